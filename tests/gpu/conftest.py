"""Fixtures of all tests of the GPU transport."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import kvfs
from kvfs.gpu import head_start
from tests.transfer.conftest import patience

__all__ = ["patience"]  # a fixture


@pytest.fixture
def store(store_path: Path) -> Iterator[kvfs.Store]:
    with kvfs.open(store_path, capacity="64MiB") as opened:
        yield opened


@pytest.fixture
def ns(store: kvfs.Store) -> kvfs.Namespace:
    from tests.gpu.test_gpu_io import LAYOUT  # which needs triton

    return store.namespace("model", LAYOUT, "1")


@pytest.fixture(autouse=True)
def small_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer-wise loads of a few pages come in as many bands as large ones."""
    monkeypatch.setattr(head_start, "BAND_BYTES_MIN", 1)
    monkeypatch.setattr(head_start, "SHARE_BYTES_MIN", 1)
