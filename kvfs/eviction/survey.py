"""What eviction is to choose from: the records of every segment, as the policy sees them, read once and kept.

A segment's table is read again when there are more records; its pieces are made anew when stamps or records have
changed.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Sequence
from functools import partial
from typing import NamedTuple

from kvfs.context import Context
from kvfs.eviction import orphans
from kvfs.eviction.orphans import CohortTable
from kvfs.eviction.policy import CARRIED_LIFE_US
from kvfs.eviction.usage import Fragments, Summary, group
from kvfs.format import segment as fmt
from kvfs.format.segment import Entry
from kvfs.index.tables import DROPPED, SegmentRow
from kvfs.segments.scan import read_namespace, scan_segment

COHORT_US = 300_000_000  # ranks that wrote nothing for this long will not complete a page


class Candidate(NamedTuple):
    number: int
    row: SegmentRow


class Table(NamedTuple):
    """The records of a segment, as far as eviction is concerned; arrays, since there may be many."""

    seqs: array[int]  # of its pages
    written_us: array[int]  # of all records, by seq
    sizes: array[int]
    chunks: array[int]
    expires: array[int]
    cohorts: CohortTable
    marked: bool  # read with a purge mark


class _KnownSegment(NamedTuple):
    version: tuple[object, ...]
    until_s: int  # when the next of the records expires; 0: none does
    pieces: Fragments


class Survey:
    """One per evictor; whoever uses it holds the evictors' lock, or only looks."""

    def __init__(self, context: Context) -> None:
        self._c = context
        self._tables: dict[bytes, Table] = {}
        self._uses: dict[bytes, _KnownSegment] = {}

    def summaries(self, rows: Sequence[tuple[int, SegmentRow]], evictable: Container[int]) -> tuple[list[Summary], int]:
        """(what the policy sees of each segment that is not dropped, the time of that)."""
        now = self._c.files.now_us()
        marked = self._c.marks.ids()
        tables = {n: self.table(Candidate(n, r), r.segment_id in marked) for n, r in rows if r.state != DROPPED}
        if len(self._tables) > 2 * len(rows) + 64:  # others dropped segments, too
            known = {r.segment_id for _, r in rows}
            self._tables = {i: t for i, t in self._tables.items() if i in known}
            self._uses = {i: u for i, u in self._uses.items() if i in known}
        unmatched = orphans.orphans({n: t.cohorts for n, t in tables.items()}, now - COHORT_US)
        none = frozenset[int]()
        uses = [
            Summary(n, r.allocated, n in evictable, False, self._pieces(r, tables[n], unmatched.get(n, none), now))
            for n, r in rows
            if n in tables
        ]
        return uses, now

    def forget(self, segment_id: bytes) -> None:
        """What is known of a segment is out of date."""
        self._uses.pop(segment_id, None)
        self._tables.pop(segment_id, None)

    def seqs(self, segment_id: bytes, ordinals: Sequence[int]) -> list[int]:
        """Numbers of records in a segment, from their ordinals in its summary."""
        table = self._tables[segment_id]
        return [table.seqs[i] for i in ordinals]

    def table(self, candidate: Candidate, marked: bool) -> Table:
        """A segment's records, read once, and again when there are more."""
        segment_id = candidate.row.segment_id
        known = self._tables.get(segment_id)
        if known is None or known.marked != marked or len(known.written_us) < candidate.row.records:
            known = self._tables[segment_id] = self._read_table(candidate, marked)
        return known

    def _pieces(self, row: SegmentRow, table: Table, unmatched: frozenset[int], now_us: int) -> Fragments:
        """What was used together of a segment; made anew when stamps or records have changed, or some have expired."""
        version = (  # a table that could not be read is empty, and may be read the next time
            row.records, table.marked, len(table.seqs), unmatched, *self._c.access_times.version(row.segment_id),
        )  # fmt: skip
        cached = self._uses.get(row.segment_id)
        now_s = now_us // 1_000_000
        if cached is not None and cached.version == version and (not cached.until_s or now_s < cached.until_s):
            return cached.pieces
        stamps = self._c.access_times.stamps(row.segment_id, table.written_us)
        # a copy's time of writing is that of the carry: what the original had lived is no longer known
        least = CARRIED_LIFE_US if row.flags & fmt.FLAG_CARRIED else 0
        dead = [0 < e <= now_s or i in unmatched for i, e in enumerate(table.expires)]
        pieces = group(
            [0 if gone else stamps[seq] for seq, gone in zip(table.seqs, dead, strict=True)],
            table.sizes, table.chunks, [max(least, stamps[seq] - table.written_us[seq]) for seq in table.seqs],
        )  # fmt: skip
        until_s = min((e for e in table.expires if e > now_s), default=0)
        self._uses[row.segment_id] = _KnownSegment(version, until_s, pieces)
        return pieces

    def _read_table(self, candidate: Candidate, marked: bool) -> Table:
        held = self._c.segments.acquire(candidate.number, candidate.row.segment_id, self._c.index.generation)
        mark = self._c.marks.read(candidate.row.segment_id) if marked else None
        purged: set[int] = set()
        entries: list[Entry] = []
        found = CohortTable()
        if held is not None:
            try:
                scan = scan_segment(held.fd, self._c.files, records_max=candidate.row.records)
                entries = scan.entries if scan is not None else []
                purged = {e.seq for e in entries if mark is not None and mark.covers(e)}
                found = orphans.collect(
                    (e for e in entries if e.kind == fmt.KIND_PART),
                    partial(read_namespace, held.fd, self._c.files, entries), purged,
                )  # fmt: skip
            except OSError:
                self._c.counters.add("read_errors")
                entries, found = [], CohortTable()
        parts = [e for e in entries if e.kind == fmt.KIND_PART]
        return Table(
            array("I", [e.seq for e in parts]), array("Q", [e.written_us for e in entries]),
            array("Q", [e.stored_bytes for e in parts]), array("I", [e.chunk for e in parts]),
            array("I", [1 if e.seq in purged else e.expires for e in parts]),  # 1: long ago
            found, marked,
        )  # fmt: skip
