from __future__ import annotations

from pathlib import Path

import pytest

import kvfs
from tests.stores import TINY_BYTES, seeded, tiny, tokens_of


@pytest.fixture
def store(store_path: Path) -> Path:
    """A store with one namespace and a prompt of ten chunks."""
    with kvfs.open(store_path, capacity="64MiB") as s:
        s.namespace("alpha", tiny(), "9213176").put(tokens_of(1, 10), seeded(1, 10 * TINY_BYTES))
    return store_path
