"""A store, and what a mount shows of it, without FUSE. Lookups wait for the index on a loaded machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import kvfs
from tests.mount.kernel import Kernel, Mounted


@pytest.fixture(autouse=True)
def patient_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvfs.system.worker.GRACE_SECONDS", 60.0)


@pytest.fixture
def store(store_path: Path) -> Iterator[kvfs.Store]:
    with kvfs.open(store_path, capacity="64MiB") as made:
        yield made


@pytest.fixture
def mounted(store: kvfs.Store) -> Iterator[Mounted]:
    with Mounted(store) as made:
        yield made


@pytest.fixture
def kernel(mounted: Mounted) -> Kernel:
    return mounted.kernel
