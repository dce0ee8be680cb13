"""Segment files: create, append records, seal. ``kvfs.index.ledger`` describes the life of a segment.

Invariants. A payload is written before its table entry, a table entry before the index names it. Nothing below
``tail`` is ever written again, apart from table slots that hold no published entry. Only the owner writes. Every open
descriptor has a shared flock, so that an exclusive one tells the reclaimer that no reader is left; a map of a segment
keeps a duplicate of the locked descriptor and thereby the lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from kvfs.directory.root import Directory
from kvfs.format import segment as fmt
from kvfs.format.checksums import LEAF_BYTES, leaf_table, root_of
from kvfs.format.segment import BLOCK, ENTRY_BYTES, Entry, Header, Seal, align
from kvfs.native import library, payloads
from kvfs.segments.scan import covered_end, read_namespace, scan_segment
from kvfs.system import direct_io
from kvfs.system.descriptors import Descriptor, opened
from kvfs.system.files import Files
from kvfs.system.memory_views import address_of_readonly
from kvfs.system.thread_pool import Pool

T = TypeVar("T")
WRITE_THREADS = 4
NATIVE_BYTES = 64 << 10  # of a payload; finding the address of a smaller one takes as long as its checksum
OVERLAP_BYTES = 4 << 20  # from this size on, checksums are computed while payloads are written


def file_name(segment_id: bytes) -> str:
    return f"{segment_id.hex()}.kvs"


def sync_segment(directory: Directory, segment_id: bytes) -> None:
    """fdatasync the segment of another process. OSError if that fails."""
    with opened(directory.files, file_name(segment_id), os.O_RDONLY, dir_fd=directory.sub("segments")) as fd:
        directory.files.fdatasync(fd)


class Record(NamedTuple):
    """One part of one page on its way into a segment."""

    payload: Any  # buffer of the bytes to store
    leaf_bytes: int
    leaves: int
    raw_bytes: int  # of the payload before its codec
    group: int
    chunk: int
    part: bytes
    chunk_hash: bytes
    run_hash: bytes
    expires: int
    codec: int = fmt.CODEC_RAW
    table: bytes = b""  # leaf table of the raw bytes; optional for a raw payload, required for an encoded one
    attempt: bytes = bytes(8)  # the save id: equal for all ranks of one save


class Placed(NamedTuple):
    """Where a record is stored, and the root of its leaf table."""

    payload: int  # offset in the segment
    leaves: int  # offset of its leaf table
    seq: int
    root: bytes


class _Writers:
    """Threads that write payloads while the caller computes their checksums, since a write releases the GIL.

    They also encode payloads before a write. Started on first use; a forked child starts its own.
    """

    def __init__(self) -> None:
        self._pool: Pool | None = None
        self._lock = threading.Lock()

    def run(self, calls: Sequence[Callable[[], T]], meanwhile: Callable[[], object] = lambda: None) -> list[T]:
        """Run ``calls`` in the pool and ``meanwhile`` in the caller; all in the caller if no thread can be started."""
        with self._lock:
            pool = self._pool = self._pool or Pool(0, "kvfs-write")
            with contextlib.suppress(RuntimeError):
                pool.grow(WRITE_THREADS)
        if pool.size:
            return pool.run(calls, meanwhile)
        meanwhile()
        return [call() for call in calls]


WRITERS = _Writers()
os.register_at_fork(after_in_child=lambda: WRITERS.__init__())  # type: ignore[misc]


class SegmentWriter:
    """Owns the file of one active segment: appends records at ``tail`` and entries to the chained tables.

    Not thread-safe. The caller reserves ``allocated`` in the index before it grows the file. After a failed or
    interrupted write the segment takes no more records (``dead``).
    """

    def __init__(
        self, file: Descriptor, segment_id: bytes, number: int, files: Files, *, epoch: int, tail: int, table: int,
        records: int, allocated: int, direct: Descriptor | None = None,
    ) -> None:  # fmt: skip
        self._file = file
        self._direct = direct  # the same file with O_DIRECT, if payloads bypass the page cache
        self.segment_id = segment_id
        self.number = number
        self.epoch = epoch
        self.tail = tail
        self.table = table
        self.records = records
        self.allocated = allocated
        self.dead = False
        self._files = files
        self._seed = fmt.segment_seed(segment_id)
        self._namespaces: dict[bytes, int] = {}
        self._slot = 0
        self._checks = bytearray()  # check words of all entries so far

    @classmethod
    def create(cls, directory: Directory, header: Header, number: int, allocated: int) -> SegmentWriter:
        """Create the file with its header page and ``allocated`` bytes of blocks. OSError leaves no file."""
        files, name, direct = directory.files, file_name(header.segment_id), None
        file = Descriptor.create(files, name, directory.file_mode, dir_fd=directory.sub("segments"))
        try:
            files.flock(file.fd, fcntl.LOCK_SH)
            if header.flags & fmt.FLAG_DIRECT:
                direct = _reopen_direct(files, file)
            files.fallocate(file.fd, 0, allocated)
            files.write_all(file.fd, [fmt.pack_header(header)], 0)
        except OSError:
            _close(file, direct)
            with contextlib.suppress(OSError):
                files.unlink(name, dir_fd=directory.sub("segments"))
            raise
        return cls(
            file, header.segment_id, number, files, epoch=1, tail=fmt.FIRST_PAYLOAD, table=fmt.FIRST_TABLE,
            records=0, allocated=allocated, direct=direct,
        )  # fmt: skip

    @classmethod
    def adopt(
        cls, directory: Directory, segment_id: bytes, number: int, *, epoch: int, tail: int, records: int,
        allocated: int,
    ) -> SegmentWriter:  # fmt: skip
        """Open a dead owner's segment to append behind its last published record. OSError if that is not safe."""
        files = directory.files
        file = Descriptor.open(files, file_name(segment_id), os.O_RDWR, dir_fd=directory.sub("segments"))
        fd, direct = file.fd, None
        try:
            if not files.flock(fd, fcntl.LOCK_SH):
                raise OSError(errno.EBUSY, "the segment is being removed")
            files.random_access(fd)  # only tables are read: readahead would bring payloads along
            if files.fstat(fd).st_nlink > 1:
                raise OSError(errno.EMLINK, "the segment has another name: a snapshot must not change")
            scan = scan_segment(fd, files, records_max=records)
            if scan is None or scan.header.segment_id != segment_id or len(scan.entries) != records or scan.seal:
                raise OSError(errno.EIO, "the table does not hold the published records")
            if not scan.appendable:
                raise OSError(errno.EPERM, "the segment has features that forbid appending")
            end = covered_end(scan, partial(read_namespace, fd, files, scan.entries))
            if end is None or end > tail:
                raise OSError(errno.EIO, "published records may reach beyond the tail")
            if scan.header.flags & fmt.FLAG_DIRECT:
                direct = _reopen_direct(files, file)
            files.fallocate(fd, 0, allocated)
            # a rebuild would name entries that the dead owner did not publish, whose payloads are overwritten now
            slots = fmt.slots_of_table(scan.table == fmt.FIRST_TABLE) - scan.slot
            files.write_all(fd, [bytes(slots * ENTRY_BYTES)], scan.table + scan.slot * ENTRY_BYTES)
        except OSError:
            _close(file, direct)
            raise
        writer = cls(
            file, segment_id, number, files, epoch=epoch, tail=tail, table=scan.table, records=records,
            allocated=allocated, direct=direct,
        )  # fmt: skip
        writer._slot, writer._checks = scan.slot, bytearray(scan.checks)
        return writer

    @property
    def fd(self) -> int:
        return self._file.fd

    # -- sizes -------------------------------------------------------------------------------

    def need(self, digest: bytes, descriptor: bytes, payload_bytes: int, leaf_table_bytes: int, pages: int) -> int:
        """Bytes that an append of ``pages`` equal records takes: payloads, leaf tables, descriptor, new tables."""
        known = digest in self._namespaces
        free = fmt.slots_of_table(self.table == fmt.FIRST_TABLE) - 1 - self._slot
        return _need(0 if known else len(descriptor), payload_bytes, leaf_table_bytes, pages, free)

    @staticmethod
    def need_fresh(descriptor_bytes: int, payload_bytes: int, leaf_table_bytes: int, pages: int = 1) -> int:
        """Bytes of a sealed segment that holds ``pages`` records and nothing else."""
        free = fmt.slots_of_table(True) - 1
        return fmt.FIRST_PAYLOAD + _need(descriptor_bytes, payload_bytes, leaf_table_bytes, pages, free) + BLOCK

    def remaining_bytes(self, segment_bytes: int) -> int:
        """Bytes that can still be appended before the segment reaches ``segment_bytes``, seal page included."""
        return segment_bytes - BLOCK - self.tail

    # -- writing -----------------------------------------------------------------------------

    def grow(self, allocated: int) -> None:
        """Allocate blocks up to ``allocated`` bytes, which the index has reserved."""
        try:
            self._files.fallocate(self.fd, 0, allocated)
        except OSError:
            self.dead = True
            raise
        self.allocated = allocated

    def append(self, records: Sequence[Record], digest: bytes, descriptor: bytes, at_us: int) -> list[Placed]:
        """Write records and their entries. On return they are in the file, and nothing names them yet."""
        assert not self.dead, "append to a dead segment"
        assert all(r.table for r in records if r.codec), "an encoded page needs the leaf table of its raw bytes"
        try:
            return self._append(records, digest, descriptor, at_us)
        except BaseException:  # an interrupt may leave tables and counts half changed, like an error
            self.dead = True
            raise

    def _append(self, records: Sequence[Record], digest: bytes, descriptor: bytes, now: int) -> list[Placed]:
        start = self.tail
        buffers: list[Any] = []
        entries: list[Entry] = []
        offset = start
        if digest not in self._namespaces:
            entries.append(
                Entry(fmt.KIND_NAMESPACE, 0, 0, 0, self.epoch, 0, 0, 0, bytes(8), offset, len(descriptor),
                      len(descriptor), 0, now, digest, bytes(32), root_of(descriptor), bytes(8))
            )  # fmt: skip
            offset += _push(buffers, descriptor)
            if self._direct is not None:  # like tables, a descriptor is written through the page cache
                self._files.write_all(self.fd, buffers, start)
                start, buffers = offset, []
        offsets = []
        for r in records:
            offsets.append(offset)
            offset += _push(buffers, r.payload)
        leaves_at = offset
        end = leaves_at + align(sum(r.leaves for r in records) * LEAF_BYTES)
        assert end <= self.allocated, "append beyond what was reserved"
        tables = self._write_payloads(records, buffers, start, leaves_at)
        for r, payload, table in zip(records, offsets, tables, strict=True):
            entries.append(
                Entry(fmt.KIND_PART, r.codec, r.group, 0, self.epoch, 0, r.chunk, r.expires, r.part, payload,
                      len(memoryview(r.payload)), r.raw_bytes, leaves_at, now, r.chunk_hash, r.run_hash,
                      root_of(table), r.attempt)
            )  # fmt: skip
            leaves_at += len(table)
        placed = self._write_entries(entries, end, digest)
        return placed[len(placed) - len(records) :]

    def _write_payloads(
        self, records: Sequence[Record], buffers: Sequence[Any], start: int, leaves_at: int
    ) -> list[bytes]:
        """Write payloads and leaf tables; returns the tables. Large writes overlap with their checksums.

        With O_DIRECT, ``buffers`` holds payloads only.
        """
        tables: list[bytes] = []
        native = self._native(records)

        def make_tables() -> None:
            if native is None:
                tables.extend(r.table or leaf_table(r.payload, r.leaf_bytes) for r in records)
            else:
                tables.extend(payloads.leaf_tables(native, [_memory(r) for r in records]))

        known = all(r.table for r in records)  # then nothing is left to do while payloads are written
        small = leaves_at - start < OVERLAP_BYTES or (known and self._direct is None)
        writes: list[Callable[[], object]] = [partial(self._files.write_all, self.fd, buffers, start)]
        if self._direct is not None:
            writes = list(self._direct_writes(records, start, 1 if small else WRITE_THREADS))
        elif small and native is not None:
            spans = [(address_of_readonly(data), len(memoryview(data))) for data in buffers]
            return payloads.append(native, self.fd, [_memory(r) for r in records], spans, start)
        elif small:
            make_tables()
            self._files.write_all(self.fd, [*buffers, b"".join(tables)], start)
            return tables
        # when this returns or raises, no thread reads the caller's memory or writes the segment any more
        if small:
            make_tables()
            for write in writes:
                write()
        else:
            WRITERS.run(writes, make_tables)
        self._files.write_all(self.fd, [b"".join(tables)], leaves_at)
        return tables

    def _native(self, records: Sequence[Record]) -> library.Library | None:
        """The native library, where it saves time: payloads of many leaves that have no table yet."""
        native = library.loaded()
        if native is None or type(self._files) is not Files:
            return None
        return native if all(not r.table and r.raw_bytes >= NATIVE_BYTES for r in records) else None

    def _direct_writes(self, records: Sequence[Record], start: int, most: int) -> Iterator[Callable[[], object]]:
        """Direct writes of payloads: one stretch of neighbours for each of at most ``most`` threads."""
        assert self._direct is not None
        count = min(most, len(records))
        for first, end in pairwise(len(records) * i // count for i in range(count + 1)):
            data = [r.payload for r in records[first:end]]
            yield partial(direct_io.write, self._files, self._direct.fd, data, start)
            start += sum(align(len(memoryview(p))) for p in data)

    def _write_entries(self, entries: list[Entry], end: int, digest: bytes) -> list[Placed]:
        """Number the entries, write them to the tables (new ones are chained at ``end``), advance the tail."""
        blocks: list[tuple[int, int, list[bytes]]] = [(self.table, self._slot, [])]
        seq, placed = self.records, []
        ns_seq = self._namespaces.get(digest, -1)
        for entry in entries:
            table, slot, packed = blocks[-1]
            if slot + len(packed) == fmt.slots_of_table(table == fmt.FIRST_TABLE) - 1:
                chain = Entry(fmt.KIND_CHAIN, 0, 0, seq, self.epoch, 0, 0, 0, bytes(8), end, 0, 0, 0, 0,
                              bytes(32), bytes(32), bytes(16), bytes(8))  # fmt: skip
                packed.append(fmt.pack_entry(chain, self._seed))
                seq += 1
                blocks.append((end, 0, []))
                end += fmt.TABLE_BYTES
            if entry.kind == fmt.KIND_NAMESPACE:
                ns_seq = seq
            entry = entry._replace(seq=seq, ns_seq=ns_seq)
            blocks[-1][2].append(fmt.pack_entry(entry, self._seed))
            placed.append(Placed(entry.payload, entry.leaves, seq, entry.root))
            seq += 1
        assert end <= self.allocated, "table beyond what was reserved"
        for table, _, _ in blocks[1:]:
            # an adopted tail may hold unpublished bytes of the dead owner
            self._files.write_all(self.fd, [bytes(fmt.TABLE_BYTES)], table)
        for table, slot, packed in blocks:
            self._files.write_all(self.fd, [b"".join(packed)], table + slot * ENTRY_BYTES)
        for _, _, packed in blocks:
            for raw in packed:
                self._checks += fmt.entry_check(raw)
        self.table, self._slot = blocks[-1][0], blocks[-1][1] + len(blocks[-1][2])
        self.records, self.tail = seq, end
        self._namespaces[digest] = ns_seq
        return placed

    def seal(self) -> int:
        """Write the seal page and truncate the file behind it; returns the final file size."""
        seal = Seal(self.segment_id, self.records, self.tail, self._files.now_us(), root_of(self._checks))
        end = self.tail + BLOCK
        self._files.write_all(self.fd, [fmt.pack_seal(seal)], self.tail)
        self._files.truncate(self.fd, end)
        self.allocated = end
        return end

    def trim(self) -> int:
        """Free the blocks behind the tail, which were never published; returns the new file size."""
        end = align(self.tail)
        self._files.truncate(self.fd, end)
        self.allocated = end
        return end

    def close(self) -> None:
        _close(self._file, self._direct)

    def discard(self, directory: Directory) -> None:
        """Close and remove a segment without records."""
        with contextlib.suppress(OSError):
            self._files.unlink(file_name(self.segment_id), dir_fd=directory.sub("segments"))
        self.close()


def _memory(record: Record) -> tuple[int, int, int]:
    """(address, bytes, bytes of a leaf) of a payload."""
    return address_of_readonly(record.payload), len(memoryview(record.payload)), record.leaf_bytes


def _reopen_direct(files: Files, file: Descriptor) -> Descriptor:
    """A second, locked descriptor of the segment, with O_DIRECT."""
    direct = Descriptor.reopen(files, file.fd, os.O_RDWR | os.O_DIRECT)
    try:
        files.flock(direct.fd, fcntl.LOCK_SH)
    except OSError:
        direct.close()
        raise
    return direct


def _close(file: Descriptor, direct: Descriptor | None) -> None:
    if direct is not None:
        direct.close()
    file.close()


def _need(descriptor_bytes: int, payload_bytes: int, leaf_table_bytes: int, pages: int, free_slots: int) -> int:
    entries = pages + (descriptor_bytes > 0)
    per_table = fmt.slots_of_table(False) - 1
    tables = max(0, -(-(entries - free_slots) // per_table))
    payloads = pages * align(payload_bytes) + align(pages * leaf_table_bytes)
    return align(descriptor_bytes) + payloads + tables * fmt.TABLE_BYTES


def _push(buffers: list[Any], data: Any) -> int:
    """Queue a buffer, padded to the next block; returns its padded size."""
    size = len(memoryview(data))
    pad = align(size) - size
    buffers.append(data)
    if pad:
        buffers.append(_ZEROS[:pad])
    return size + pad


_ZEROS = memoryview(bytes(BLOCK))
