"""What eviction chooses from: the records of every segment as the policy sees them, read once and cached.

A segment's table is read again when it has more records. Its fragments are grouped again when access times or records
have changed.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Sequence
from typing import NamedTuple

from kvfs.context import Context
from kvfs.eviction.policy import RELOCATED_LIFE_US
from kvfs.eviction.usage import Fragments, Summary, group
from kvfs.format import segment as fmt
from kvfs.index.tables import DROPPED, SegmentRow
from kvfs.segments.scan import scan_segment


class Table(NamedTuple):
    """What eviction needs of a segment's records; arrays, since there may be many."""

    seqs: array[int]  # of its pages
    written_us: array[int]  # of all records, by seq
    sizes: array[int]  # bytes that a page takes in the file: its blocks, and its share of tables
    chunks: array[int]
    expires: array[int]  # unix seconds; 0: never
    marked: bool  # read with a purge mark


class _KnownSegment(NamedTuple):
    version: tuple[object, ...]
    until_s: int  # when the next of the records expires; 0: none does
    fragments: Fragments


class Survey:
    """Owns the cached tables and fragments of one evictor.

    The caller holds the evictors' lock, unless its result changes nothing (a dry run).
    """

    def __init__(self, context: Context) -> None:
        self._c = context
        self._tables: dict[bytes, Table] = {}
        self._uses: dict[bytes, _KnownSegment] = {}

    def summaries(self, rows: Sequence[tuple[int, SegmentRow]], evictable: Container[int]) -> tuple[list[Summary], int]:
        """(summaries of all segments that are not dropped, the time that they refer to in us)."""
        now = self._c.files.now_us()
        marked = self._c.marks.ids()
        if len(self._tables) > 2 * len(rows) + 64:  # other processes drop segments, too
            known = {r.segment_id for _, r in rows}
            self._tables = {i: t for i, t in self._tables.items() if i in known}
            self._uses = {i: u for i, u in self._uses.items() if i in known}
        uses = []
        for number, row in rows:
            if row.state != DROPPED:
                table = self._table(number, row, row.segment_id in marked)
                fragments = self._fragments(row, table, now)
                uses.append(Summary(number, row.allocated, number in evictable, False, fragments))
        return uses, now

    def forget(self, segment_id: bytes) -> None:
        """Discard what is cached of a segment."""
        self._uses.pop(segment_id, None)
        self._tables.pop(segment_id, None)

    def seqs(self, segment_id: bytes, ordinals: Sequence[int]) -> list[int]:
        """Numbers of records in a segment, from their ordinals in its summary."""
        table = self._tables[segment_id]
        return [table.seqs[i] for i in ordinals]

    def _table(self, number: int, row: SegmentRow, marked: bool) -> Table:
        """A segment's records: read once, and again when there are more."""
        known = self._tables.get(row.segment_id)
        if known is None or known.marked != marked or len(known.written_us) < row.records:
            known = self._tables[row.segment_id] = self._read_table(number, row, marked)
        return known

    def _fragments(self, row: SegmentRow, table: Table, now_us: int) -> Fragments:
        """A segment's fragments; grouped again when access times or records have changed, or some have expired."""
        # a table that could not be read is empty, and may be readable the next time
        version = (row.records, table.marked, len(table.seqs), *self._c.access_times.version(row.segment_id))
        cached = self._uses.get(row.segment_id)
        now_s = now_us // 1_000_000
        if cached is not None and cached.version == version and (not cached.until_s or now_s < cached.until_s):
            return cached.fragments
        stamps = self._c.access_times.stamps(row.segment_id, table.written_us)
        # a copy's time of writing is that of the relocation: the life of the original is no longer known
        least = RELOCATED_LIFE_US if row.flags & fmt.FLAG_CARRIED else 0
        fragments = group(
            [0 if 0 < e <= now_s else stamps[seq] for seq, e in zip(table.seqs, table.expires, strict=True)],
            table.sizes, table.chunks, [max(least, stamps[seq] - table.written_us[seq]) for seq in table.seqs],
        )  # fmt: skip
        until_s = min((e for e in table.expires if e > now_s), default=0)
        self._uses[row.segment_id] = _KnownSegment(version, until_s, fragments)
        return fragments

    def _read_table(self, number: int, row: SegmentRow, marked: bool) -> Table:
        held = self._c.segments.acquire(number, row.segment_id, self._c.index.generation)
        mark = self._c.marks.read(row.segment_id) if marked else None
        scan = None
        if held is not None:
            try:
                scan = scan_segment(held.fd, self._c.files, records_max=row.records)
            except OSError:
                self._c.counters.add("read_errors")
        entries = scan.entries if scan is not None else []
        parts = [e for e in entries if e.kind == fmt.KIND_PART]
        purged = {e.seq for e in parts if mark is not None and mark.covers(e)}
        blocks = [fmt.align(e.stored_bytes) for e in parts]
        share = max(0, scan.end - fmt.FIRST_PAYLOAD - sum(blocks)) // len(parts) if scan is not None and parts else 0
        return Table(
            array("I", [e.seq for e in parts]), array("Q", [e.written_us for e in entries]),
            array("Q", [nbytes + share for nbytes in blocks]), array("I", [e.chunk for e in parts]),
            array("I", [1 if e.seq in purged else e.expires for e in parts]),  # 1: long ago
            marked,
        )  # fmt: skip
