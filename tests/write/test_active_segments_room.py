"""How long a save may wait for room after another one waited and got none."""

from __future__ import annotations

from pathlib import Path

import kvfs
from kvfs.index.ledger import ANY_CLASS
from kvfs.write.active_segments import FORGET_SECONDS, NO_ROOM_SECONDS, PROBE_SECONDS, SegmentClass


def test_a_wait_that_timed_out_shortens_later_ones_and_is_forgotten(memory_path: Path) -> None:
    """It was remembered for the life of the process: a save had 50 ms whenever the store was full again."""
    with kvfs.open(memory_path / "store", capacity="16MiB") as store:
        active, segment_class = store._shared.services().active, SegmentClass(ANY_CLASS, 0)
        assert active.room_wait(segment_class, 5.0).seconds == 5.0
        now = store._shared.c.files.monotonic()
        for ago, expected in ((0.0, 0.0), (NO_ROOM_SECONDS, PROBE_SECONDS), (NO_ROOM_SECONDS + FORGET_SECONDS, 5.0)):
            active._no_room[segment_class.quota] = now + NO_ROOM_SECONDS - ago
            assert active.room_wait(segment_class, 5.0).seconds == expected
