"""How long a save may wait for room after another one waited and got none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import kvfs
from kvfs.index.ledger import ANY_CLASS, NeedSpaceError
from kvfs.index.session import Session
from kvfs.write.active_segments import (
    FORGET_SECONDS,
    NO_ROOM_SECONDS,
    PROBE_SECONDS,
    Declined,
    RoomWait,
    SegmentClass,
)
from kvfs.write.appender import PartShape
from tests.stores import TINY_BYTES, seeded, segment_files, tiny, tokens_of


def test_a_wait_that_timed_out_shortens_later_ones_and_is_forgotten(memory_path: Path) -> None:
    """It was remembered for the life of the process: a save had 50 ms whenever the store was full again."""
    with kvfs.open(memory_path / "store", capacity="16MiB") as store:
        active, segment_class = store._shared.services().active, SegmentClass(ANY_CLASS, 0)
        assert active.room_wait(segment_class, 5.0).seconds == 5.0
        now = store._shared.c.files.monotonic()
        for ago, expected in ((0.0, 0.0), (NO_ROOM_SECONDS, PROBE_SECONDS), (NO_ROOM_SECONDS + FORGET_SECONDS, 5.0)):
            active._no_room[segment_class.quota] = now + NO_ROOM_SECONDS - ago
            assert active.room_wait(segment_class, 5.0).seconds == expected


def test_parallel_appends_of_a_save_wait_at_the_same_time(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lane that had begun to wait last gave the others its rest: eight lanes waited eight times as long."""
    with kvfs.open(memory_path / "store", capacity="16MiB") as store:
        active, wait, asked = store._shared.services().active, RoomWait(5.0), list[float]()

        def full(session: Session) -> None:
            raise NeedSpaceError(1)

        def make_room(missing: int, deadline: float, owner: bytes, **how: bool) -> bool:
            asked.append(deadline)
            wait.seconds = 0.0  # the other lane's wait is over
            return True

        monkeypatch.setattr(active, "_make_room", make_room)
        with pytest.raises(Declined, match="space"):
            active.with_room(full, wait, SegmentClass(ANY_CLASS, 0))
        assert len(asked) == 1


def test_the_first_save_that_gets_room_after_a_wait_ends_the_short_ones(memory_path: Path) -> None:
    """A save that needed no eviction says nothing about room."""
    with kvfs.open(memory_path / "store", capacity="16MiB") as store:
        active, segment_class = store._shared.services().active, SegmentClass(ANY_CLASS, 0)
        active._make_room = lambda *_, **__: True
        for tries, remembered in (([None], True), ([NeedSpaceError(1), None], False)):
            active._no_room[segment_class.quota] = store._shared.c.files.monotonic()
            left = iter(tries)

            def transact(_: Session, left: Iterator[NeedSpaceError | None] = left) -> None:
                if (error := next(left)) is not None:
                    raise error

            active.with_room(transact, RoomWait(5.0), segment_class)
            assert (segment_class.quota in active._no_room) is remembered


def test_the_smallest_segment_of_a_page_has_room_for_its_leaf_table() -> None:
    layout = tiny(layers=64, kv_heads=8, head_dim=4)
    shape = PartShape.of(layout.groups[0], layout.groups[0].full)
    assert shape.leaves >= 64
    for pages in (1, 400):
        assert shape.need_fresh(100, pages) >= pages * (shape.page_bytes + 8 * shape.leaves)


def test_a_segment_that_a_rebuild_may_have_missed_is_removed(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made while another process rebuilt the index: no row of the new index names it."""
    with kvfs.open(memory_path / "store", capacity="16MiB") as store:
        ns, active = store.namespace("m", tiny(), "1"), store._shared.services().active
        with monkeypatch.context() as patch:
            patch.setattr(active, "_is_current", lambda generation: False)
            assert ns.put(tokens_of(1, 1), seeded(1, TINY_BYTES)).reason == "index"
        assert not segment_files(memory_path / "store")
        assert ns.put(tokens_of(1, 1), seeded(1, TINY_BYTES)).stored == 1
