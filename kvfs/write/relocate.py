"""Copying records between segments, for eviction (hot pages of a victim), pins and recompression.

Only bytes that verify are copied; the index is changed only where it still names the source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

from kvfs.context import Context
from kvfs.format import codec as codecs
from kvfs.format import segment as fmt
from kvfs.format.checksums import leaf_table, root_of
from kvfs.format.codec import CodecError, CodecMemoryError
from kvfs.format.segment import Entry
from kvfs.index.rows import RUN
from kvfs.lookup.prefix_match import PrefixMatch
from kvfs.pages.chunk_hash import page_key
from kvfs.pages.identity import Described, parse_descriptor
from kvfs.pages.layout import Group, Part
from kvfs.segments.open_segments import OpenSegment
from kvfs.segments.scan import Scan, read_descriptor, scan_segment
from kvfs.segments.writer import Record
from kvfs.write.active_segments import Declined, SegmentClass
from kvfs.write.appender import Appender, Move, PartShape, RelocateJob
from kvfs.write.encode import encode_records

BATCH_BYTES = 8 << 20  # of payloads in memory at a time
RECORDS = 256  # index rows per short hold of the index
_Key: TypeAlias = tuple[int, int, bytes]  # what the records of a batch share: ns_seq, group, part


class _Source(NamedTuple):
    """Namespace and part of the records of one key."""

    described: Described
    descriptor: bytes
    group: Group
    shape: PartShape


class Relocator:
    """Copies records that the index names; delegates reading to ``_SegmentCopy``, appending to ``Appender``."""

    def __init__(self, context: Context, appender: Appender) -> None:
        self._c = context
        self._appender = appender

    def copy_match(
        self, segment_class: SegmentClass, match: PrefixMatch, sources: set[int], make_room: Callable[[int], object]
    ) -> int:
        """Copy the pages of a match that are in segments ``sources``; Declined if not all of them could be.

        ``make_room`` is called with the bytes that are about to be copied.
        """
        wanted: dict[int, dict[int, int]] = {}  # segment -> seq -> bytes
        for group in match.groups:
            for parts in group.sources().values():
                for source in parts:
                    if source.place.segment in sources:
                        nbytes = fmt.align(source.place.stored_bytes)
                        wanted.setdefault(source.place.segment, {})[source.place.seq] = nbytes
        copied = 0
        for number, seqs in wanted.items():
            held = self._c.segments.acquire(number, match.segments[number], match.generation)
            if held is None:
                raise Declined("a segment was dropped or cannot be opened")
            make_room(sum(seqs.values()))
            copied += self.copy(segment_class, number, held, sorted(seqs))
        if copied < sum(map(len, wanted.values())):
            raise Declined("some pages changed meanwhile or could not be read")
        return copied

    def copy(
        self, segment_class: SegmentClass, number: int, held: OpenSegment, seqs: Sequence[int], *,
        recode: int | None = None,
    ) -> int:  # fmt: skip
        """Copy records ``seqs`` of a segment; returns how many the index names at their new place now.

        ``number`` is the segment's in the current index; ``held.number`` may be from an earlier one.

        Copies are synced before the index names them, unless the store's level is ``cache``: callers drop the source.

        ``recode``: store raw payloads in this codec where that makes them smaller. Declined is raised for a page that
        cannot be read or may be purged, and for a damaged table or descriptor.
        """
        scan = scan_segment(held.fd, self._c.files)
        if recode is not None and (scan is None or max(seqs, default=-1) >= len(scan.entries)):
            raise Declined("unreadable")
        if scan is None:
            return 0
        return _SegmentCopy(self._c, self._appender, segment_class, number, held, scan, recode).run(seqs)


class _SegmentCopy:
    """One copy of records of one segment: reads and verifies them, and hands them to the appender in batches."""

    def __init__(
        self, context: Context, appender: Appender, segment_class: SegmentClass, number: int, held: OpenSegment,
        scan: Scan, recode: int | None,
    ) -> None:  # fmt: skip
        self._c = context
        self._appender = appender
        self._class = segment_class
        self._number = number
        self._held = held
        self._scan = scan
        self._recode = recode
        self._mark = context.marks.read(held.segment_id)  # a copy of a purged record would come back in a rebuild
        self._used_us = context.access_times.stamps(held.segment_id, [e.written_us for e in scan.entries])
        self._sources: dict[_Key, _Source] = {}

    def run(self, seqs: Sequence[int]) -> int:
        copied = 0
        batch: list[Entry] = []
        largest = 0  # space is reserved as if all records of a batch were that large: codecs make sizes differ
        limit = min(BATCH_BYTES, self._c.settings.segment_bytes // 4)
        for seq in seqs:
            entry = self._scan.entries[seq] if seq < len(self._scan.entries) else None
            if entry is None or entry.kind != fmt.KIND_PART:
                continue
            if self._mark is not None and self._mark.covers(entry):
                if self._recode is not None:
                    raise Declined("a mark")  # of a purge in progress, or one that cannot be read now
                continue
            cost = fmt.align(entry.stored_bytes)
            full = len(batch) == RECORDS or (len(batch) + 1) * max(largest, cost) > limit
            if batch and (_key_of(entry) != _key_of(batch[0]) or full):
                copied += self._copy(batch)
                batch, largest = [], 0
            batch.append(entry)
            largest = max(largest, cost)
        if batch:
            copied += self._copy(batch)
        return copied

    def _copy(self, entries: Sequence[Entry]) -> int:
        """Copy the records of one key that verify."""
        try:
            source = self._source(entries[0])
        except (OSError, ValueError) as exc:
            self._note_unreadable(exc)
            return 0
        if source is None and self._recode is not None:
            raise Declined("unreadable")
        if source is None:
            return 0
        shape = source.shape
        fitting = [e for e in entries if codecs.fits(e.codec, e.stored_bytes, shape.page_bytes)]
        records = [(e, self._record(e, payload, shape)) for e, payload in self._payloads(fitting)]
        moves = [
            Move(self._number, e.seq, e.chunk % RUN, record, self._used_us[e.seq])
            for e, record in records if record is not None
        ]  # fmt: skip
        return self._write(moves, source, entries[0].part) if moves else 0

    def _source(self, entry: Entry) -> _Source | None:
        """Read once per key. None if the entry's namespace does not verify or lacks its group."""
        key = _key_of(entry)
        source = self._sources.get(key)
        if source is None:
            source = self._read_source(entry)
            if source is not None:
                self._sources[key] = source
        return source

    def _read_source(self, entry: Entry) -> _Source | None:
        entries = self._scan.entries
        if entry.ns_seq >= len(entries) or entries[entry.ns_seq].kind != fmt.KIND_NAMESPACE:
            return None
        descriptor = read_descriptor(self._held.fd, self._c.files, entries[entry.ns_seq])
        described = parse_descriptor(descriptor) if descriptor is not None else None
        if descriptor is None or described is None or entry.group >= len(described.layout.groups):
            return None
        group = described.layout.groups[entry.group]
        return _Source(described, descriptor, group, PartShape.of(group, Part.unpack(entry.part)))

    def _payloads(self, entries: Sequence[Entry]) -> Iterator[tuple[Entry, memoryview]]:
        """The stored bytes of records that can be read; those of neighbours with one read."""
        for stretch in _neighbours(entries):
            first, last = stretch[0].payload, stretch[-1]
            data = memoryview(bytearray(last.payload + last.stored_bytes - first))
            try:
                self._c.segments.read(self._held, data, first)
            except (OSError, ValueError) as exc:
                if len(stretch) > 1:  # perhaps one of them is bad
                    for entry in stretch:
                        yield from self._payloads([entry])
                else:
                    self._note_unreadable(exc)
                continue
            for entry in stretch:
                at = entry.payload - first
                yield entry, data[at : at + entry.stored_bytes]

    def _note_unreadable(self, exc: Exception) -> None:
        self._c.counters.add("read_errors")
        if self._recode is not None and isinstance(exc, OSError):
            raise Declined("io") from None

    def _record(self, entry: Entry, payload: memoryview, shape: PartShape) -> Record | None:
        """The record with its payload as it is stored, or None if it does not verify."""
        try:
            table = leaf_table(codecs.decoded(payload, entry.codec, shape.page_bytes), shape.leaf_bytes)
        except CodecError as exc:
            if self._recode is not None and isinstance(exc, CodecMemoryError):
                raise Declined("memory") from None
            table = b""
        if root_of(table) != entry.root:
            self._c.counters.add("pages_corrupt")
            return None
        return Record(
            payload, shape.leaf_bytes, shape.leaves, shape.page_bytes, entry.group, entry.chunk, entry.part,
            entry.chunk_hash, entry.run_hash, entry.expires, entry.codec, table, entry.attempt,
        )  # fmt: skip

    def _write(self, batch: Sequence[Move], source: _Source, part: bytes) -> int:
        described, descriptor, group, shape = source
        if self._recode is not None:
            batch = self._encoded(batch, self._recode, group)
        if described.layout.kind == "opaque":
            batch = [move._replace(slot=0) for move in batch]
        row_key = partial(_row_key, described.digest, group.name, part)
        stored = shape._replace(page_bytes=max(len(move.record.payload) for move in batch))
        return self._appender.relocate(RelocateJob(described.digest, descriptor, row_key, stored, batch, self._class))

    def _encoded(self, batch: Sequence[Move], codec: int, group: Group) -> list[Move]:
        """The batch with raw records encoded; a record that has a codec keeps it."""
        raw = [move.record for move in batch if move.record.codec == fmt.CODEC_RAW]
        encoded = iter(encode_records(raw, codec, group.cell.element_bytes, self._c.counters))
        return [m._replace(record=next(encoded)) if m.record.codec == fmt.CODEC_RAW else m for m in batch]


def _neighbours(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Records by stretches of payloads that are next to each other, up to their padding."""
    stretches: list[list[Entry]] = []
    end = -1
    for entry in entries:
        if entry.payload == end:
            stretches[-1].append(entry)
        else:
            stretches.append([entry])
        end = fmt.align(entry.payload + entry.stored_bytes)
    return stretches


def _key_of(entry: Entry) -> _Key:
    return entry.ns_seq, entry.group, entry.part


def _row_key(digest: bytes, group: str, part: bytes, chunk_hash: bytes) -> bytes:
    return page_key(digest, group, chunk_hash) + part
