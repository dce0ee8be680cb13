"""Evicting: keeps the store below its limit by dropping whole segments, and carries their hot pages forward.

The choice is made by ``kvfs.eviction`` (pure); this module feeds it and carries it out.
"""

from __future__ import annotations

from typing import NamedTuple

from kvfs import format as fmt
from kvfs import space
from kvfs.active import SegmentClass
from kvfs.context import COMMIT_SECONDS, Context
from kvfs.errors import IndexUnavailableError
from kvfs.gc import BACKGROUND_FROM, BACKGROUND_TO, GcLock, Reclaimer, index_is_full
from kvfs.index.tables import SegmentRow
from kvfs.writer import Appender

CARRY = SegmentClass(b"carried".ljust(16, b"\0"), fmt.FLAG_CARRIED, evictor=True)


class Candidate(NamedTuple):
    number: int
    row: SegmentRow


class Evictor:
    """One per open store. Thread-safe; among processes one evictor works at a time."""

    appender: Appender

    def __init__(self, context: Context) -> None:
        self._c = context
        self._lock = GcLock(context)
        self._reclaimer = Reclaimer(context)

    # -- entry points ------------------------------------------------------------------------

    def make_room(self, missing: int, deadline: float) -> bool:
        """Free ``missing`` bytes for a writer; whether it is worth that he tries again."""
        try:
            with self._lock.hold(deadline) as held:
                if not held:
                    return False
                freed = self._reclaimer.finish_doomed()
                while freed < missing and self._c.files.monotonic() < deadline:
                    dropped = self._evict_one()
                    if dropped is None:
                        break
                    freed += dropped
            if not freed:
                self._c.files.sleep(0.01)  # somebody may let go of a doomed segment
        except (OSError, IndexUnavailableError):
            self._c.counters.add("evict_errors")
            return False
        return True

    def background(self) -> None:
        """Finish what is doomed; above BACKGROUND_FROM of the limit evict down to BACKGROUND_TO."""
        ledger, full = self._c.index.read(
            lambda s: (s.ledger(), index_is_full(s, self._c.settings.index_bytes)), COMMIT_SECONDS
        )
        limit = space.budget(self._c.settings).limit
        if not ledger.doomed and ledger.used <= BACKGROUND_FROM * limit and not full:
            return
        with self._lock.hold(self._c.files.monotonic()) as held:
            if not held:
                return
            self._reclaimer.finish_doomed()
            if full:
                self._reclaimer.sweep_all()
            for _ in range(64):
                used = self._c.index.read(lambda s: s.ledger().used, COMMIT_SECONDS)
                if used <= BACKGROUND_TO * limit and not full:
                    break
                if self._evict_one() is None:
                    break
                if full:
                    self._reclaimer.sweep_all()
                    full = self._c.index.read(lambda s: index_is_full(s, self._c.settings.index_bytes), COMMIT_SECONDS)

    def collect(self, target_bytes: int | None) -> dict[str, int]:
        """Evict until ``target_bytes`` are in use; what was done."""
        limit = space.budget(self._c.settings).limit if target_bytes is None else target_bytes
        dropped = 0
        before = self._c.index.read(lambda s: s.ledger().used, COMMIT_SECONDS)
        with self._lock.hold(self._c.files.monotonic() + 30.0) as held:
            if held:
                self._reclaimer.finish_doomed()
                while self._c.index.read(lambda s: s.ledger().used, COMMIT_SECONDS) > limit:
                    if self._evict_one() is None:
                        break
                    dropped += 1
                self._reclaimer.sweep_all()
        after = self._c.index.read(lambda s: s.ledger().used, COMMIT_SECONDS)
        return {"segments_dropped": dropped, "bytes_before": before, "bytes_after": after}

    def sweep(self) -> None:
        self._reclaimer.sweep_step()

    # -- one victim --------------------------------------------------------------------------

    def _evict_one(self) -> int | None:
        """Drop the best victim; bytes that are free now (0: still held by somebody), None if there is none."""
        raise NotImplementedError
