"""Objects with pages: sealed segments in memory. Their bytes are untrusted until every check here has passed.

An object holds up to ``Shape.run_pages`` neighbouring pages of one prompt, in the format of a segment: header and
record table are its first FIRST_PAYLOAD bytes, so that one small range says which chunks it has.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvfs.bundles.incoming import Page, read_page, read_pages
from kvfs.context import Context
from kvfs.format import segment as fmt
from kvfs.format.segment import Entry, Header
from kvfs.pages.identity import Described, parse_descriptor
from kvfs.remote.names import Shape
from kvfs.segments.scan import read_descriptor, scan_segment
from kvfs.segments.writer import Record, SegmentWriter
from kvfs.system.descriptors import Descriptor
from kvfs.system.files import Files
from kvfs.system.memory_views import address_of_readonly

EARLY_BYTES = 4 << 20  # of pages that are verified and stored at once, while the rest of their object comes
IN_PLACE_BYTES = 64 << 10  # finding the address of less takes as long as a copy
HEAD_BYTES = fmt.FIRST_PAYLOAD  # of an object: its header and its only record table


class _Size(NamedTuple):
    st_size: int


class MemoryFile(Files):
    """One file in a piece of memory of a fixed size, whatever the descriptor says.

    Of a file that is written, ``end`` is where its bytes end so far; what is behind is of no file, and becomes zeros.
    Payloads may be there already, where they are written to.
    """

    def __init__(self, data: memoryview, end: int | None = None) -> None:
        self.data = data
        self.end = len(data) if end is None else end

    def preadv(self, fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        done = 0
        for buffer in buffers:
            piece = self.data[offset + done : offset + done + len(buffer)]
            buffer[: len(piece)] = piece
            done += len(piece)
        return done

    def read(self, fd: int, nbytes: int, offset: int) -> bytes:
        if offset + nbytes > len(self.data):
            raise OSError(errno.EIO, "the object ends before")
        return bytes(self.data[offset : offset + nbytes])  # one copy; the base class makes two

    def read_view(self, fd: int, nbytes: int, offset: int) -> memoryview:
        if offset + nbytes > len(self.data):
            raise OSError(errno.EIO, "the object ends before")
        return self.data[offset : offset + nbytes]

    def pwritev(self, fd: int, buffers: Any, offset: int) -> int:
        self._zero_until(offset)
        done = 0
        for buffer in buffers:
            piece = memoryview(buffer).cast("B")
            target = self.data[offset + done : offset + done + len(piece)]
            if len(piece) < IN_PLACE_BYTES or address_of_readonly(piece) != address_of_readonly(target):
                target[:] = piece
            done += len(piece)
        self.end = max(self.end, offset + done)
        return done

    def fstat(self, fd: int) -> Any:
        return _Size(len(self.data))

    def truncate(self, fd: int, nbytes: int) -> None:
        self._zero_until(nbytes)
        self.data = self.data[:nbytes]

    def _zero_until(self, offset: int) -> None:
        if offset > self.end:
            self.data[self.end : offset] = bytes(offset - self.end)
            self.end = offset


def payloads_at(descriptor: bytes) -> int:
    """Where the payloads of an object begin."""
    return fmt.FIRST_PAYLOAD + fmt.align(len(descriptor))


def encode(
    context: Context, shape: Shape, descriptor: bytes, records: Sequence[Record], buffer: memoryview
) -> memoryview:
    """The object that begins with the first of these neighbouring records, which have their leaf tables.

    It begins ``buffer``, which has ``shape.object_bytes_max`` bytes or more and may have held another object.
    Payloads that are there from ``payloads_at`` on, one behind the other and aligned, are not copied.
    """
    file = MemoryFile(buffer[: shape.object_bytes_max], end=0)
    segment_id = shape.segment_id(records[0].chunk_hash)
    file.write_all(-1, [fmt.pack_header(Header(segment_id, context.store_id, context.files.now_us()))], 0)
    writer = SegmentWriter(
        Descriptor(file), segment_id, 0, file, epoch=1, tail=fmt.FIRST_PAYLOAD, table=fmt.FIRST_TABLE, records=0,
        allocated=1 << 62,
    )  # fmt: skip
    writer.append(records, shape.described.digest, descriptor, context.files.now_us())
    writer.seal()
    return file.data


def covered(head: memoryview, shape: Shape, chunk_hash: bytes) -> list[Entry] | None:
    """The entries of an object, by its first HEAD_BYTES; None if it is not the object that this name stands for."""
    if len(head) < HEAD_BYTES:
        return None
    entries = _entries(head, shape, chunk_hash)
    parts = [entry for entry in entries if entry.kind == fmt.KIND_PART]
    return parts if len(parts) == len(entries) - 1 and _agree(parts, shape, chunk_hash) else None


def _entries(head: memoryview, shape: Shape, chunk_hash: bytes) -> list[Entry]:
    """The entries of the first table of an object; empty if its header is that of another one."""
    header = fmt.parse_header(bytes(head[: fmt.BLOCK]))
    segment_id = shape.segment_id(chunk_hash)
    if header is None or header.segment_id != segment_id:
        return []
    table = head[fmt.FIRST_TABLE : fmt.FIRST_TABLE + fmt.FIRST_TABLE_BYTES]
    slots = fmt.slots_of_table(True) * fmt.ENTRY_BYTES
    return [entry for entry, _ in fmt.parse_entries(table[:slots], fmt.segment_seed(segment_id))]


class Arriving:
    """The pages of an object that is still coming into ``room``, verified as soon as EARLY_BYTES of them are there.

    ``pages`` are those of ``decode``, from the first on; other threads may read it. One thread calls ``come``.
    """

    def __init__(self, room: memoryview, shape: Shape, chunk_hash: bytes, page_limit: int = 1 << 62) -> None:
        self._room, self._shape, self._chunk_hash, self._page_limit = room, shape, chunk_hash, page_limit
        self._named: tuple[Described, bytes] | None = None
        self._parts: Sequence[Entry] = ()
        self._next = HEAD_BYTES  # bytes with which there is something to do
        self.pages: list[Page] = []

    def come(self, nbytes: int) -> bool:
        """``nbytes`` are there. Whether further pages verify; those that do not are left to ``decode``."""
        if nbytes < self._next:
            return False
        file = MemoryFile(self._room[:nbytes])
        if self._named is None:
            self._next = self._begin(file)
        before = len(self.pages)
        if self._named is not None and nbytes >= self._next:
            for entry in self._parts[before:]:
                if entry.payload + entry.stored_bytes > nbytes:
                    break
                page = read_page(-1, file, entry, self._named, self._page_limit, has_table=False)
                if isinstance(page, str):
                    self._parts = ()
                    break
                self.pages.append(page)
            self._next = self._end_of_next()
        return len(self.pages) > before

    def _begin(self, file: MemoryFile) -> int:
        """Read what precedes the pages; with how many bytes to go on. Never, if the name stands for something else."""
        head, never = file.data[:HEAD_BYTES], len(self._room) + 1
        parts = covered(head, self._shape, self._chunk_hash)
        first = next((e for e in _entries(head, self._shape, self._chunk_hash) if e.kind == fmt.KIND_NAMESPACE), None)
        if parts is None or first is None or any(e.ns_seq != first.seq or e.payload < HEAD_BYTES for e in parts):
            return never
        if first.payload + first.stored_bytes > len(file.data):
            return min(never, first.payload + first.stored_bytes)
        try:
            data = read_descriptor(-1, file, first)
        except OSError:
            return never
        described = parse_descriptor(data) if data is not None else None
        if data is None or described is None or described.digest != self._shape.described.digest:
            return never
        self._named, self._parts = (described, data), parts
        return self._end_of_next()

    def _end_of_next(self) -> int:
        """How many bytes have to be there before EARLY_BYTES of further pages are."""
        nbytes = 0
        for entry in self._parts[len(self.pages) :]:
            nbytes += entry.stored_bytes
            if nbytes >= EARLY_BYTES:
                return entry.payload + entry.stored_bytes
        return len(self._room) + 1


def decode(
    data: memoryview, shape: Shape, chunk_hash: bytes, page_limit: int = 1 << 62, verified: Sequence[Page] = ()
) -> list[Page]:
    """The verified pages of an object, from its first on; empty if it is not the object that this name stands for.

    Each page is of the namespace, group and part of the name, and each leaf of it was summed. A page that does not
    verify, or has more than ``page_limit`` bytes, ends the list. ``verified``: what ``Arriving`` found in these bytes.
    """
    file = MemoryFile(data)
    try:
        scan = scan_segment(-1, file, records_max=shape.run_pages + 1)
    except OSError:
        return []
    if scan is None or scan.seal is None or scan.header.segment_id != shape.segment_id(chunk_hash):
        return []
    parts = list(scan.parts())
    if len(parts) != len(scan.entries) - 1 or not _agree(parts, shape, chunk_hash):
        return []
    pages = list(verified)
    for _, page in read_pages(-1, file, scan, page_limit, first=len(pages)):
        if isinstance(page, str) or page.described.digest != shape.described.digest:
            break
        pages.append(page)
    return pages


def _agree(parts: Sequence[Entry], shape: Shape, chunk_hash: bytes) -> bool:
    """Whether entries are neighbours in one block of chunks, from the named chunk on."""
    if not 1 <= len(parts) <= shape.run_pages or parts[0].chunk_hash != chunk_hash:
        return False
    first, packed = parts[0].chunk, shape.part.pack()
    return first // shape.run_pages == (first + len(parts) - 1) // shape.run_pages and all(
        entry.chunk == first + i and (entry.group, entry.part) == (shape.number, packed) and not entry.expires
        for i, entry in enumerate(parts)
    )
