"""How much of a rebuild one transaction does: less, the fuller the new index."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvfs.index.environment import FULL
from kvfs.maintenance import rebuild
from kvfs.maintenance.rebuild import ENTRIES_PER_COMMIT, PAGE, PAGES_PER_ENTRY, _SegmentBuilder

SIZE = 16 << 20


@pytest.mark.parametrize(
    ("used", "step"),
    [
        (0, SIZE // PAGE // PAGES_PER_ENTRY),
        (SIZE // 2, SIZE // 2 // PAGE // PAGES_PER_ENTRY),
        (SIZE - PAGES_PER_ENTRY * PAGE * 3, 0 if SIZE - PAGES_PER_ENTRY * PAGE * 3 > FULL * SIZE else 3),
        (SIZE, 0),
    ],
)
def test_the_fuller_the_index_the_smaller_the_commits(used: int, step: int) -> None:
    assert _step(used, SIZE) == step


def test_a_commit_has_at_least_one_entry_and_at_most_what_bounds_its_memory() -> None:
    assert _step(0, PAGE) == 1
    assert _step(0, 1 << 40) == rebuild.ENTRIES_PER_COMMIT == ENTRIES_PER_COMMIT


def _step(used: int, size: int) -> int:
    builder: Any = SimpleNamespace(_settings=SimpleNamespace(index_bytes=size))
    session: Any = SimpleNamespace(used_bytes=lambda: used)
    _SegmentBuilder._size_step(builder, session)
    return int(builder._step)
