"""Ranks over simulated devices, whose memory is files that other processes map."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import kvfs


@pytest.fixture
def store(store_path: Path) -> Iterator[kvfs.Store]:
    with kvfs.open(store_path, capacity="64MiB") as opened:
        yield opened
