"""Eviction: keeps the store below its limit by dropping whole segments; their hot pages are relocated first.

Evict: pages become misses, in one commit. Reclaim: the blocks of a dropped segment's file become free
(``kvfs.eviction.reclaimer``). ``kvfs.eviction.victims`` chooses what to evict.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from functools import partial

from kvfs.context import Context
from kvfs.errors import IndexUnavailableError, StoreLockedError
from kvfs.eviction.policy import WriteBudget
from kvfs.eviction.reclaimer import GcLock, Reclaimer, index_is_full
from kvfs.eviction.victims import Victim, Victims
from kvfs.format import segment as fmt
from kvfs.index import ledger
from kvfs.index.deadlines import COMMIT_SECONDS
from kvfs.index.session import Session
from kvfs.index.tables import ACTIVE, DROPPED, SEALED, SegmentRow
from kvfs.write.active_segments import STEP, Declined, SegmentClass
from kvfs.write.relocate import Relocator

RELOCATED = b"carried\0"  # second half of the class id of segments of relocated pages; the first half is the quota
LOCK_SECONDS = 30.0  # longest wait of ``collect`` for the lock: an eviction or a purge may run
BRIEF_SECONDS = 0.5  # shortest such wait: any process's background may have the lock for a moment
MISSING_SECONDS = 0.5  # wait of ``drop_missing`` for the lock; files still missing are reported again
INDEX_SECONDS = 2.0  # longest time that the background spends on a full index at once
SPARSE = 0.6  # below this fullness of its leaves an index is packed; one that only grew is full to 0.69 on average
INDEX_SHARE = 32  # one in so many segments is dropped at once where the index is what is full
PROBE_SECONDS = 0.05  # a writer's wait for the lock after the last writer's wait timed out
HELD_SECONDS = 0.02  # a writer's wait for a reader to release a dropped segment


def _dropped_bytes(session: Session) -> int:
    return session.ledger().dropped


class Evictor:
    """Decides when to evict. Owns the evictors' lock and the write budget; delegates the choice to ``Victims``, the
    copies to ``Relocator`` and the files to ``Reclaimer``. One per open store. Thread-safe; among processes one
    evictor works at a time.
    """

    relocator: Relocator

    def __init__(self, context: Context) -> None:
        self._c = context
        self.victims = Victims(context)
        self.budget = WriteBudget(context.settings.segment_bytes)
        self.lock = GcLock(context)
        self._timed_out = False  # the last writer's wait for the lock
        self.reclaimer = Reclaimer(context)

    # -- entry points ------------------------------------------------------------------------

    def make_room(
        self, missing: int, deadline: float, owner: bytes = b"", *, disk_full: bool = False, index_full: bool = False
    ) -> bool:
        """Free ``missing`` bytes (of quota ``owner``, if given) for a writer; whether the writer should try again.

        ``deadline``: monotonic seconds. ``disk_full``: the ledger has room, the file system has none, so only what is
        evicted now counts. ``index_full``: the index has no room for more rows.
        """
        try:
            now = self._c.files.monotonic()
            with self.lock.hold(min(deadline, now + PROBE_SECONDS) if self._timed_out else deadline) as held:
                self._timed_out = not held  # its owner stands still: the next writers do not wait as long
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
                        break  # nothing is left, or readers hold what is left
                    freed += dropped
            if not freed:
                if (disk_full or owner) and dropped is None and not self._c.index.read(_dropped_bytes, COMMIT_SECONDS):
                    return False  # there is nothing to wait for
                self._c.files.sleep(HELD_SECONDS)
        except OSError:
            self._c.counters.add("evict_errors")
            return False
        except IndexUnavailableError:  # says nothing about room: the writer's next call finds out whether it answers
            self._c.counters.add("evict_errors")
            self._c.files.sleep(HELD_SECONDS)
        return True

    def make_room_locked(self, nbytes: int, end: float, spared: Set[bytes]) -> None:
        """Evict until writers may use ``nbytes`` more, nothing is left or ``end`` (monotonic seconds) has come. The
        caller holds ``lock``. ``spared``: ids of segments, and of classes of segments, that stay."""
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
        """Reclaim what is dropped, and keep room for the next step of a segment, so that writers seldom wait.

        No more than that: room that is kept free holds no pages (2 % of the capacity was measured to cost 1 % of the
        hits).
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

    def collect(
        self, target_bytes: int | None, seconds: float | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> dict[str, int]:  # fmt: skip
        """Evict until ``target_bytes`` are in use (default: the limit) or ``seconds`` have passed; what was done.
        ``progress(done, total)`` in bytes.

        StoreLockedError, and nothing is done, if other evictions or purges hold the lock all the time.
        """
        now = self._c.files.monotonic()
        end = None if seconds is None else now + seconds
        limit = ledger.budget(self._c.settings).limit if target_bytes is None else target_bytes
        dropped = 0
        before = self._c.index.read(lambda s: s.ledger().used, COMMIT_SECONDS)
        patience = LOCK_SECONDS if seconds is None else min(LOCK_SECONDS, max(BRIEF_SECONDS, seconds))
        with self.lock.hold(now + patience) as held:
            if not held:
                raise StoreLockedError(f"{self._c.directory.path}: another process evicts or purges: try again later")
            self.reclaimer.charge_unknown()
            self.reclaimer.reclaim_dropped()
            while (used := self._c.index.read(lambda s: s.ledger().used, COMMIT_SECONDS)) > limit:
                progress(max(0, before - used), max(0, before - limit))
                if (end is not None and self._c.files.monotonic() >= end) or self._evict_one() is None:
                    break
                dropped += 1
            self.reclaimer.sweep_all(end)
        after = self._c.index.read(lambda s: s.ledger().used, COMMIT_SECONDS)
        return {"segments_dropped": dropped, "bytes_before": before, "bytes_after": after}

    def expire(self) -> None:
        """Drop segments all of whose pages have expired."""
        now_s = self._c.files.now_us() // 1_000_000
        rows = self._c.index.read(lambda s: s.segments(), COMMIT_SECONDS)
        overdue = {n: row for n, row in rows if row.expires and row.expires <= now_s and self._takes_no_appends(row)}
        if overdue:
            with self.lock.hold(self._c.files.monotonic()) as held:
                for number, row in overdue.items() if held else ():
                    self.reclaimer.drop(number, row.segment_id)
                    self._c.counters.add("segments_expired")

    def _clear_index(self, end: float) -> bool:
        """Remove rows of dropped segments from a full index, and evict more segments while that is not enough; whether
        it was enough before ``end``. Segments are evicted a share at a time, since a round through all rows follows."""
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

    def _takes_no_appends(self, row: SegmentRow) -> bool:
        """Whether a segment is sealed, or active with a dead owner."""
        if row.state == ACTIVE:
            return self._c.liveness is not None and not self._c.liveness.is_alive(row.owner)
        return row.state == SEALED

    def drop_missing(self) -> None:
        """Drop segments whose files were removed from outside: their pages become misses and can be stored again."""
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

    def charge_unknown(self) -> None:
        """Charge segment files that no row names, unless another evictor is at work."""
        with self.lock.hold(self._c.files.monotonic()) as held:
            if held:
                self.reclaimer.charge_unknown()

    def sweep(self) -> None:
        self.reclaimer.sweep_step()

    # -- one victim --------------------------------------------------------------------------

    def _evict_one(self, owner: bytes = b"", spared: Set[bytes] = frozenset()) -> int | None:
        """Evict the best victim; bytes that are free now (0: a reader holds it), None if there is no victim."""
        if self.reclaimer.fails:
            return None
        victim = self.victims.choose(self.budget.available, owner, spared)
        if victim is None:
            return None
        self.budget.relocated(victim.relocate_bytes)
        if victim.row.state == ACTIVE and not self._take_over(victim):
            return 0
        if victim.seqs:
            self._relocate(victim)
        drop = partial(ledger.mark_dropped, number=victim.number, owner=self._c.owner, segment_id=victim.row.segment_id)
        row = self._c.index.write(drop, COMMIT_SECONDS)
        self.victims.dropped(victim)
        self._c.counters.add("segments_evicted")
        if row is None or not self.reclaimer.finish(victim.number, row):
            return 0
        return row.allocated

    def _take_over(self, victim: Victim) -> bool:
        """A dead owner's active segment becomes ours, so that no writer appends to it while it is dropped."""
        take = partial(ledger.adopt, number=victim.number, seen=victim.row, owner=self._c.owner)
        return self._c.index.write(take, COMMIT_SECONDS) is not None

    def _relocate(self, victim: Victim) -> None:
        """Copy hot pages to a segment of their own; what does not fit is lost."""
        held = self._c.segments.acquire(victim.number, victim.row.segment_id, self._c.index.generation)
        if held is None:
            return
        target = SegmentClass(victim.row.class_id[: ledger.QUOTA_BYTES] + RELOCATED, fmt.FLAG_CARRIED, evictor=True)
        try:
            copied = self.relocator.copy(target, victim.number, held, victim.seqs)
            self._c.counters.add("pages_carried", copied)
        except (Declined, OSError, IndexUnavailableError):
            self._c.counters.add("carry_errors")
