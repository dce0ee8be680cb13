"""Copying records between segments: eviction carries hot pages forward, pins collect theirs.

Only bytes that verify are copied; the index is changed only where it still names the source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

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
from kvfs.write.appender import Appender
from kvfs.write.encode import encode_records

BATCH_BYTES = 8 << 20
RECORDS = 256  # index rows per short hold of the index


class Relocator:
    """Copies records that the index names."""

    def __init__(self, context: Context, appender: Appender) -> None:
        self._c = context
        self._appender = appender

    def copy_match(
        self, segment_class: SegmentClass, match: PrefixMatch, sources: set[int], make_room: Callable[[int], object]
    ) -> int:
        """Copy the pages of a match that lie in segments ``sources``; Declined if not all of them could be.

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
                raise Declined("a segment is gone")
            make_room(sum(seqs.values()))
            copied += self.copy(segment_class, number, held, sorted(seqs))
        if copied < sum(map(len, wanted.values())):
            raise Declined("some pages changed meanwhile or could not be read")
        return copied

    def copy(
        self,
        segment_class: SegmentClass,
        number: int,
        held: OpenSegment,
        seqs: Sequence[int],
        *,
        recode: int | None = None,
    ) -> int:
        """Copy records ``seqs`` of a segment, whose number is ``number``; how many the index names at their new place
        now. (Who has held the segment for long may know it by its number in an index that is no more.)

        ``recode``: store what is raw in this codec, where that makes it smaller. Then the copies are durable before
        the index names them (as far as the store's level asks for that), and a page that a disk does not give up, or
        that a purge may mean, or a table or descriptor that is damaged ends it with Declined: the source is to go for
        the sake of its bytes, not its pages.
        """
        scan = scan_segment(held.fd, self._c.files)
        if recode is not None and (scan is None or max(seqs, default=-1) >= len(scan.entries)):
            raise Declined("unreadable")
        if scan is None:
            return 0
        mark = self._c.marks.read(held.segment_id)  # a copy of a purged record would come back in a rebuild
        stamps = self._c.access_times.stamps(held.segment_id, [e.written_us for e in scan.entries])
        copied = 0
        batch: list[tuple[int, int, int, Record]] = []
        largest = 0  # room is asked for as if all of a batch were that large: codecs make sizes differ
        limit = min(BATCH_BYTES, self._c.settings.segment_bytes // 4)
        key: tuple[int, int, bytes] | None = None
        for seq in seqs:
            entry = scan.entries[seq] if seq < len(scan.entries) else None
            if entry is None or entry.kind != fmt.KIND_PART:
                continue
            if mark is not None and mark.covers(entry):
                if recode is not None:
                    raise Declined("a mark")  # of a purge that is not over, or one that cannot be read now
                continue
            shape = (entry.ns_seq, entry.group, entry.part)
            cost = fmt.align(entry.stored_bytes)
            full = len(batch) == RECORDS or (len(batch) + 1) * max(largest, cost) > limit
            if batch and (shape != key or full):
                copied += self._write(segment_class, held, scan, batch, key, stamps, recode)
                batch, largest = [], 0
            key = shape
            record = self._read(held, scan, entry, whole=recode is not None)
            if record is not None:
                batch.append((number, seq, entry.chunk % RUN, record))
                largest = max(largest, cost)
        if batch:
            copied += self._write(segment_class, held, scan, batch, key, stamps, recode)
        return copied

    def _shape(self, held: OpenSegment, scan: Scan, ns_seq: int, number: int) -> tuple[Described, bytes, Group] | None:
        if ns_seq >= len(scan.entries) or scan.entries[ns_seq].kind != fmt.KIND_NAMESPACE:
            return None
        descriptor = read_descriptor(held.fd, self._c.files, scan.entries[ns_seq])
        described = parse_descriptor(descriptor) if descriptor is not None else None
        if descriptor is None or described is None or number >= len(described.layout.groups):
            return None
        return described, descriptor, described.layout.groups[number]

    def _read(self, held: OpenSegment, scan: Scan, entry: Entry, *, whole: bool) -> Record | None:
        """The record with its payload as it is stored, if it verifies. Declined if ``whole`` and it cannot be read."""
        try:
            shape = self._shape(held, scan, entry.ns_seq, entry.group)
            if shape is None and whole:
                raise Declined("unreadable")
            if shape is None:
                return None
            group, part = shape[2], Part.unpack(entry.part)
            raw_bytes = group.part_bytes(part)
            if not codecs.fits(entry.codec, entry.stored_bytes, raw_bytes):
                return None
            payload = memoryview(bytearray(entry.stored_bytes))
            self._c.segments.read(held, payload, entry.payload)
            table = leaf_table(codecs.decoded(payload, entry.codec, raw_bytes), group.leaf_bytes(part))
        except CodecError as exc:
            if whole and isinstance(exc, CodecMemoryError):
                raise Declined("memory") from None
            table = b""
        except (OSError, ValueError) as exc:
            self._c.counters.add("read_errors")
            if whole and isinstance(exc, OSError):
                raise Declined("io") from None
            return None
        if root_of(table) != entry.root:
            self._c.counters.add("pages_corrupt")
            return None
        return Record(
            payload, group.leaf_bytes(part), group.leaves(part), raw_bytes, entry.group, entry.chunk, entry.part,
            entry.chunk_hash, entry.run_hash, entry.expires, entry.codec, table, entry.attempt,
        )  # fmt: skip

    def _write(
        self, segment_class: SegmentClass, held: OpenSegment, scan: Scan, batch: Sequence[tuple[int, int, int, Record]],
        key: tuple[int, int, bytes] | None, stamps: Sequence[int], recode: int | None,
    ) -> int:  # fmt: skip
        assert key is not None
        shape = self._shape(held, scan, key[0], key[1])
        if shape is None and recode is not None:
            raise Declined("unreadable")
        if shape is None:
            return 0
        described, descriptor, group = shape
        leaves = batch[0][3].leaves
        if recode is not None:
            batch = self._recode(batch, recode, group)
        if described.layout.kind == "opaque":
            batch = [(number, seq, 0, record) for number, seq, _, record in batch]
        return self._appender.relocate(
            segment_class, described.digest, descriptor, partial(_row_key, described.digest, group.name, key[2]),
            leaves, batch, [stamps[seq] for _, seq, _, _ in batch], durable=recode is not None,
        )  # fmt: skip

    def _recode(
        self, batch: Sequence[tuple[int, int, int, Record]], codec: int, group: Group
    ) -> list[tuple[int, int, int, Record]]:
        """The batch with what is raw encoded; what has a codec keeps it."""
        raw = [r for _, _, _, r in batch if r.codec == fmt.CODEC_RAW]
        made = iter(encode_records(raw, codec, group.cell.element_bytes, self._c.counters))
        return [(n, seq, slot, next(made) if r.codec == fmt.CODEC_RAW else r) for n, seq, slot, r in batch]


def _row_key(digest: bytes, group: str, part: bytes, chunk_hash: bytes) -> bytes:
    return page_key(digest, group, chunk_hash) + part
