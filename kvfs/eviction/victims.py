"""Which segment is evicted next: which segments may be, and how the policy ranks them.

A ranking covers all segments: 17 us each on a slow core. A store of terabytes has tens of thousands, so there one
ranking serves for several victims, a 512th of the segments, in its order. Each victim is checked again when its turn
comes: by then it may be pinned, be part of its quota's guarantee, or be held by a reader.
"""

from __future__ import annotations

import fcntl
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from itertools import islice
from typing import NamedTuple

from kvfs.context import Context
from kvfs.directory.config import quota_id
from kvfs.eviction.policy import EvictionPlan, Policy
from kvfs.eviction.survey import Survey
from kvfs.eviction.usage import Summary
from kvfs.index import ledger
from kvfs.index.deadlines import COMMIT_SECONDS
from kvfs.index.session import Session
from kvfs.index.tables import ACTIVE, DROPPED, SEALED, SegmentRow
from kvfs.segments.writer import file_name
from kvfs.system.descriptors import Descriptor

SEGMENTS_PER_VICTIM = 512  # one ranking yields one victim per so many segments
RANKING_SECONDS = 1.0  # how long a ranking is used: access times change meanwhile


class Victim(NamedTuple):
    """A segment to evict. ``seqs``: records to relocate first, of ``relocate_bytes`` bytes."""

    number: int
    row: SegmentRow
    seqs: Sequence[int] = ()
    relocate_bytes: int = 0


class Victims:
    """Chooses victims for one evictor: owns the queue that a ranking leaves; ``Survey`` reads, ``Policy`` ranks.

    The caller holds the evictors' lock.
    """

    def __init__(self, context: Context) -> None:
        self._c = context
        self._survey = Survey(context)
        self._policy = Policy()
        self._next: deque[Victim] = deque()  # of the last ranking
        self._until = 0.0
        self.pinned: Callable[[], set[bytes]] = set  # ids of segments that pins protect

    def choose(self, budget_bytes: int, owner: bytes = b"", spared: Set[bytes] = frozenset()) -> Victim | None:
        """The next victim, with at most ``budget_bytes`` to relocate, or None. Held segments come last.

        ``owner``: only segments of this quota. ``spared``: ids of segments and classes that stay.
        """
        if not owner and not spared and (victim := self._queued(budget_bytes)) is not None:
            return victim
        evictable, uses, now = self.survey(owner, spared)
        ranked = self._unheld(self._policy.ranked(uses, now, budget_bytes), evictable)
        first = next(ranked, None)
        if first is not None:
            if not owner and not spared:
                more = len(uses) // SEGMENTS_PER_VICTIM - 1
                self._next.extend(v for v in islice(ranked, max(0, more)) if v.row.state == SEALED)
                self._until = self._c.files.monotonic() + RANKING_SECONDS
            return first
        if evictable and not self._c.index.read(_dropped_bytes, COMMIT_SECONDS):
            return Victim(*next(iter(evictable.items())))  # one at a time: it frees no bytes yet
        return None

    def _unheld(self, plans: Iterator[EvictionPlan], evictable: dict[int, SegmentRow]) -> Iterator[Victim]:
        for plan in plans:
            row = evictable[plan.victim]
            if not self.is_held(row):
                seqs = self._survey.seqs(row.segment_id, plan.relocate)
                yield Victim(plan.victim, row, seqs, plan.relocate_bytes)

    def _queued(self, budget_bytes: int) -> Victim | None:
        """The next victim of the last ranking, if it is unchanged and may still be evicted."""
        if self._next and self._c.files.monotonic() < self._until:
            victim = self._next.popleft()
            if victim.relocate_bytes <= budget_bytes and self._may_evict(victim) and not self.is_held(victim.row):
                return victim
        self._next.clear()
        return None

    def _may_evict(self, victim: Victim) -> bool:
        mine = victim.row.class_id[: ledger.QUOTA_BYTES]

        def look(session: Session) -> tuple[SegmentRow | None, int]:
            dropped = sum(r.allocated for _, r in session.segments_in(DROPPED) if r.class_id.startswith(mine))
            return session.segment(victim.number), session.quota_used(mine) - dropped

        row, used = self._c.index.read(look, COMMIT_SECONDS)
        if row != victim.row or row.segment_id in self.pinned():
            return False
        guaranteed = self._guaranteed()
        return mine not in guaranteed or used - guaranteed[mine] >= row.allocated

    def forget(self, segment_id: bytes) -> None:
        """Discard what is cached of a segment: it has changed."""
        self._survey.forget(segment_id)
        self._next.clear()

    def dropped(self, victim: Victim) -> None:
        """The victim was dropped, or the attempt failed."""
        self._survey.forget(victim.row.segment_id)

    def survey(
        self, owner: bytes = b"", spared: Set[bytes] = frozenset()
    ) -> tuple[dict[int, SegmentRow], list[Summary], int]:
        """(evictable segments by number, summaries of all segments, the time that these refer to in us)."""
        rows = self._c.index.read(lambda s: s.segments(), COMMIT_SECONDS)
        evictable = {
            n: r for n, r in self._evictable(rows, owner).items() if spared.isdisjoint((r.segment_id, r.class_id))
        }
        return evictable, *self._survey.summaries(rows, evictable)

    def is_held(self, row: SegmentRow) -> bool:
        """Whether a reader has the segment open, so that dropping it would not free its blocks."""
        files = self._c.files
        try:
            segments = self._c.directory.sub("segments")
            file = Descriptor.open(files, file_name(row.segment_id), os.O_RDONLY, dir_fd=segments)
        except OSError:
            return False
        try:
            return not files.flock(file.fd, fcntl.LOCK_EX)
        finally:
            file.close()

    def _evictable(self, rows: Iterable[tuple[int, SegmentRow]], owner: bytes) -> dict[int, SegmentRow]:
        """Segments that may be evicted: sealed, or active without a living owner; not pinned, not guaranteed."""
        pinned, spare = self.pinned(), self._above_guarantee(rows)
        evictable = {}
        for number, row in rows:
            mine = row.class_id[: ledger.QUOTA_BYTES]
            if row.state == DROPPED or row.segment_id in pinned:
                continue
            if mine != owner and mine in spare and row.allocated > spare[mine]:
                continue  # guaranteed against others; a quota's own pages may make room for its new ones
            if row.state == ACTIVE and self._c.liveness is not None and self._c.liveness.is_alive(row.owner):
                continue
            if row.class_id.startswith(owner):
                evictable[number] = row
        return evictable

    def _guaranteed(self) -> dict[bytes, int]:
        """Guaranteed bytes of the quotas that have any."""
        guaranteed = {quota_id(name): q.guaranteed_bytes for name, q in self._c.settings.quotas.items()}
        return {owner: nbytes for owner, nbytes in guaranteed.items() if nbytes}

    def _above_guarantee(self, rows: Iterable[tuple[int, SegmentRow]]) -> dict[bytes, int]:
        """Bytes that each quota with a guarantee uses above it (negative: below)."""
        above = {owner: -nbytes for owner, nbytes in self._guaranteed().items()}
        for _, row in rows:
            mine = row.class_id[: ledger.QUOTA_BYTES]
            if mine in above and row.state != DROPPED:
                above[mine] += row.allocated
        return above


def _dropped_bytes(session: Session) -> int:
    return session.ledger().dropped
