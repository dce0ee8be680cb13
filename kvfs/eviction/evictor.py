"""Evicting: keeps the store below its limit by dropping whole segments, and carries their hot pages forward.

``kvfs.eviction.victims`` chooses; this module says when, and carries it out.
"""

from __future__ import annotations

from collections.abc import Set
from functools import partial

from kvfs.context import COMMIT_SECONDS, Context
from kvfs.errors import IndexUnavailableError, StoreLockedError
from kvfs.eviction import policy as eviction
from kvfs.eviction.reclaimer import GcLock, Reclaimer, index_is_full
from kvfs.eviction.victims import Victim, Victims
from kvfs.format import segment as fmt
from kvfs.index import ledger
from kvfs.index.session import Session
from kvfs.index.tables import ACTIVE, DROPPED, SEALED, SegmentRow
from kvfs.write.active_segments import STEP, Declined, SegmentClass
from kvfs.write.relocate import Relocator

CARRIED = b"carried\0"  # second half of the class of segments that take carried pages; the first is the quota
LOCK_SECONDS = 30.0  # how long ``collect`` waits for an eviction, or a purge, to end
BRIEF_SECONDS = 0.5  # at least, since the background of any process may have it for a moment
MISSING_SECONDS = 0.5  # another evictor is waited for; what is still missing is asked for again
INDEX_SECONDS = 2.0  # that the background cleans a full index at a time
SPARSE = 0.6  # leaves of an index that only grew are full to 0.69 on average
INDEX_SHARE = 32  # of the segments are dropped at once where their rows are what is short: one in so many
PROBE_SECONDS = 0.05  # that a writer waits for the lock where the last one has waited in vain
HELD_SECONDS = 0.02  # a writer waits this long for somebody to let go of a dropped segment


def _dropped_bytes(session: Session) -> int:
    return session.ledger().dropped


class Evictor:
    """One per open store. Thread-safe; among processes one evictor works at a time."""

    relocator: Relocator

    def __init__(self, context: Context) -> None:
        self._c = context
        self.victims = Victims(context)
        self.budget = eviction.WriteBudget(context.settings.segment_bytes)
        self.lock = GcLock(context)
        self._waited = False  # in vain, the last time
        self.reclaimer = Reclaimer(context)

    # -- entry points ------------------------------------------------------------------------

    def make_room(
        self, missing: int, deadline: float, owner: bytes = b"", *, disk_full: bool = False, index_full: bool = False
    ) -> bool:
        """Free ``missing`` bytes (of a quota, if given) for a writer; whether it is worth that he tries again.

        ``disk_full``: the ledger has room, the file system has not, so only what is evicted now counts.
        ``index_full``: rows are what there is no room for.
        """
        try:
            now = self._c.files.monotonic()
            with self.lock.hold(min(deadline, now + PROBE_SECONDS) if self._waited else deadline) as held:
                self._waited = not held  # whoever has it stands still: the next writers do not wait as long
                if not held:
                    return False
                if index_full:
                    return self._clear_index(deadline)
                freed = self.reclaimer.reclaim_dropped()
                freed = 0 if disk_full else freed
                dropped: int | None = 0
                while freed < missing and self._c.files.monotonic() < deadline:
                    dropped = self._evict_one(owner)
                    if not dropped:
                        break  # nothing is left, or what is left is held by somebody
                    freed += dropped
            if not freed:
                if (disk_full or owner) and dropped is None and not self._c.index.read(_dropped_bytes, COMMIT_SECONDS):
                    return False  # there is nothing to wait for
                self._c.files.sleep(HELD_SECONDS)
        except (OSError, IndexUnavailableError):
            self._c.counters.add("evict_errors")
            return False
        return True

    def make_room_locked(self, nbytes: int, end: float, spared: Set[bytes]) -> None:
        """Evict until writers may use ``nbytes`` more, nothing is left or ``end``, for who holds ``lock`` already.
        ``spared``: ids of segments, and of classes of segments, that stay."""
        limit = ledger.budget(self._c.settings).limit - nbytes
        while self._c.index.read(lambda s: s.ledger().used, COMMIT_SECONDS) > limit:
            if self.reclaimer.reclaim_dropped():
                continue
            dropped = self._evict_one(spared=spared)
            if dropped is None and not self._c.index.read(_dropped_bytes, COMMIT_SECONDS):
                break  # there is nothing to wait for
            if self._c.files.monotonic() >= end:
                break
            if not dropped:
                self._c.files.sleep(HELD_SECONDS)

    def background(self) -> None:
        """Finish what is dropped, and keep room for the next step of a segment, so that writers seldom wait.

        No more than that: room that is kept free holds no pages (2 % of the capacity were measured to cost 1 %
        of the hits).
        """
        totals, full = self._c.index.read(
            lambda s: (s.ledger(), index_is_full(s, self._c.settings.index_bytes)), COMMIT_SECONDS
        )
        limit = ledger.budget(self._c.settings).limit - self._c.settings.segment_bytes // STEP
        if not totals.dropped and totals.used <= limit and not full:
            return
        with self.lock.hold(self._c.files.monotonic()) as held:
            if not held:
                return
            self.reclaimer.reclaim_dropped()
            if full:
                self._clear_index(self._c.files.monotonic() + INDEX_SECONDS)
            for _ in range(64):
                if self._c.index.read(lambda s: s.ledger().used, COMMIT_SECONDS) <= limit or self._evict_one() is None:
                    break

    def collect(self, target_bytes: int | None, seconds: float | None = None) -> dict[str, int]:
        """Evict until ``target_bytes`` are in use or so many ``seconds`` have passed; what was done.

        StoreLockedError if somebody else evicts or purges all the time: then nothing was.
        """
        now = self._c.files.monotonic()
        end = None if seconds is None else now + seconds
        limit = ledger.budget(self._c.settings).limit if target_bytes is None else target_bytes
        dropped = 0
        before = self._c.index.read(lambda s: s.ledger().used, COMMIT_SECONDS)
        patience = LOCK_SECONDS if seconds is None else min(LOCK_SECONDS, max(BRIEF_SECONDS, seconds))
        with self.lock.hold(now + patience) as held:
            if not held:
                raise StoreLockedError(f"{self._c.directory.path}: somebody else evicts or purges: ask again later")
            self.reclaimer.reclaim_dropped()
            while self._c.index.read(lambda s: s.ledger().used, COMMIT_SECONDS) > limit:
                if (end is not None and self._c.files.monotonic() >= end) or self._evict_one() is None:
                    break
                dropped += 1
            self.reclaimer.sweep_all(end)
        after = self._c.index.read(lambda s: s.ledger().used, COMMIT_SECONDS)
        return {"segments_dropped": dropped, "bytes_before": before, "bytes_after": after}

    def expire(self) -> None:
        """Drop segments all of whose pages have passed their time."""
        now_s = self._c.files.now_us() // 1_000_000
        rows = self._c.index.read(lambda s: s.segments(), COMMIT_SECONDS)
        overdue = {n: row for n, row in rows if row.expires and row.expires <= now_s and self._is_left(row)}
        if overdue:
            with self.lock.hold(self._c.files.monotonic()) as held:
                for number, row in overdue.items() if held else ():
                    self.reclaimer.drop(number, row.segment_id)
                    self._c.counters.add("segments_expired")

    def _clear_index(self, end: float) -> bool:
        """Take rows of dropped segments out of a full index, and drop more as long as that is not enough; whether it
        was before ``end``. Segments go a share at a time, since a round through all rows follows."""
        full = partial(index_is_full, index_bytes=self._c.settings.index_bytes, room=True)
        while self._c.index.read(full, COMMIT_SECONDS):
            if self._c.files.monotonic() >= end:
                return False
            pack = self._c.index.read(lambda s: s.fullness(), COMMIT_SECONDS) < SPARSE
            if not self.reclaimer.sweep_step(pack=pack):
                share = max(1, len(self._c.index.read(lambda s: s.segments(), COMMIT_SECONDS)) // INDEX_SHARE)
                dropped = [self._evict_one() for _ in range(share)]
                if dropped[0] is None:
                    return False
        return True

    def _is_left(self, row: SegmentRow) -> bool:
        """Whether nobody appends to a segment any more."""
        if row.state == ACTIVE:
            return self._c.liveness is not None and not self._c.liveness.is_alive(row.owner)
        return row.state == SEALED

    def drop_missing(self) -> None:
        """Segments whose files somebody has removed: their pages become misses, and are stored anew."""
        missing = self._c.segments.take_missing()
        if not missing:
            return
        live = {
            r.segment_id for _, r in self._c.index.read(lambda s: s.segments(), COMMIT_SECONDS) if r.state != DROPPED
        }
        missing = {i: named for i, named in missing.items() if i in live}
        if missing:
            with self.lock.hold(self._c.files.monotonic() + MISSING_SECONDS) as held:
                for segment_id, (number, generation) in missing.items() if held else ():
                    if self.reclaimer.drop_missing(segment_id, number, generation):
                        self.victims.forget(segment_id)
                        self._c.counters.add("segments_missing")

    def sweep(self) -> None:
        self.reclaimer.sweep_step()

    # -- one victim --------------------------------------------------------------------------

    def _evict_one(self, owner: bytes = b"", spared: Set[bytes] = frozenset()) -> int | None:
        """Drop the best victim; bytes that are free now (0: still held by somebody), None if there is none."""
        if self.reclaimer.fails:
            return None
        victim = self.victims.choose(self.budget.available, owner, spared)
        if victim is None:
            return None
        self.budget.carried(victim.carry_bytes)
        if victim.row.state == ACTIVE and not self._take_over(victim):
            return 0
        if victim.seqs:
            self._carry(victim)
        drop = partial(ledger.mark_dropped, number=victim.number, owner=self._c.owner, segment_id=victim.row.segment_id)
        row = self._c.index.write(drop, COMMIT_SECONDS)
        self.victims.dropped(victim)
        self._c.counters.add("segments_evicted")
        if row is None or not self.reclaimer.finish(victim.number, row):
            return 0
        return row.allocated

    def _take_over(self, victim: Victim) -> bool:
        """A dead owner's active segment becomes ours, so that nobody goes on with it while it is dropped."""
        take = partial(ledger.adopt, number=victim.number, seen=victim.row, owner=self._c.owner)
        return self._c.index.write(take, COMMIT_SECONDS) is not None

    def _carry(self, victim: Victim) -> None:
        """Copy hot pages to a segment of their own; what does not fit is lost."""
        held = self._c.segments.acquire(victim.number, victim.row.segment_id, self._c.index.generation)
        if held is None:
            return
        carry = SegmentClass(victim.row.class_id[: ledger.QUOTA_BYTES] + CARRIED, fmt.FLAG_CARRIED, evictor=True)
        try:
            copied = self.relocator.copy(carry, victim.number, held, victim.seqs)
            self._c.counters.add("pages_carried", copied)
        except (Declined, OSError, IndexUnavailableError):
            self._c.counters.add("carry_errors")
