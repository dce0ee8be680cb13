"""Scanning a segment's own tables: untrusted bytes, read up to the first invalid entry."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvfs.errors import ConfigError
from kvfs.format import segment as fmt
from kvfs.format.checksums import LEAF_BYTES, root_of
from kvfs.format.segment import BLOCK, ENTRY_BYTES, Entry, Header, Seal, align
from kvfs.pages.identity import Described, parse_descriptor
from kvfs.pages.layout import Part
from kvfs.system.files import Files

_U32_MAX = 0xFFFF_FFFF


@dataclass
class Scan:
    """Header, seal and valid entries of a segment, and where an adopter appends."""

    header: Header
    entries: list[Entry]
    seal: Seal | None
    table: int  # table block and slot that take the next entry
    slot: int
    end: int  # end of what the entries cover without leaf tables, whose sizes only the layouts tell
    size: int
    checks: bytes  # check words of the entries, concatenated
    appendable: bool  # False where the header has features that forbid appending

    def parts(self) -> Iterator[Entry]:
        return (e for e in self.entries if e.kind == fmt.KIND_PART)


def scan_segment(fd: int, files: Files, *, records_max: int | None = None) -> Scan | None:
    """Read the tables of a segment; None if it has no valid header. Raises OSError unchanged."""
    size = files.fstat(fd).st_size
    if size < fmt.FIRST_PAYLOAD:
        return None
    page = files.read(fd, BLOCK, 0)
    header = fmt.parse_header(page)
    if header is None:
        return None
    seed, table, slot, epoch = fmt.segment_seed(header.segment_id), fmt.FIRST_TABLE, 0, 0
    entries: list[Entry] = []
    checks: list[bytes] = []
    end = fmt.FIRST_PAYLOAD
    block = files.read(fd, fmt.FIRST_TABLE_BYTES, table)
    slots, chained = fmt.slots_of_table(True), True
    while chained:
        chained = False
        for entry, check in fmt.parse_entries(memoryview(block)[: slots * ENTRY_BYTES], seed):
            if len(entries) == records_max or entry.seq != len(entries) or entry.epoch < epoch:
                break
            if not _inside(entry, size, end, slot == slots - 1):
                break
            epoch = entry.epoch
            entries.append(entry)
            checks.append(check)
            slot += 1
            if entry.kind == fmt.KIND_CHAIN:
                chained = True
                table, slot, slots = entry.payload, 0, fmt.slots_of_table(False)
                block = files.read(fd, fmt.TABLE_BYTES, table)
                end = max(end, table + fmt.TABLE_BYTES)
                break
            end = max(end, align(entry.payload + entry.stored_bytes))
            if entry.leaves:
                end = max(end, align(entry.leaves + 8))
    words = b"".join(checks)
    seal = _read_seal(fd, files, size, header.segment_id, len(entries), root_of(words))
    return Scan(header, entries, seal, table, slot, end, size, words, fmt.may_append(page))


def chunk_hashes(fd: int, files: Files) -> list[bytes]:
    """Chunk hashes (of a namespace's entry: its digest) of all entries that ``scan_segment`` could find, and perhaps of
    more: only their check words are compared. Empty without a valid header. Raises OSError unchanged."""
    size = files.fstat(fd).st_size
    header = fmt.parse_header(files.read(fd, BLOCK, 0)) if size >= fmt.FIRST_PAYLOAD else None
    if header is None:
        return []
    seed, found = fmt.segment_seed(header.segment_id), list[bytes]()
    at: int | None = fmt.FIRST_TABLE
    nbytes = fmt.FIRST_TABLE_BYTES
    while at is not None:
        block = memoryview(files.read(fd, nbytes, at))
        names, following = fmt.parse_names(block[: nbytes // ENTRY_BYTES * ENTRY_BYTES], seed)
        found += names
        nbytes = fmt.TABLE_BYTES
        # tables are in the order of the file
        at = following if following is not None and at < following <= size - nbytes else None
    return found


def _inside(entry: Entry, size: int, end: int, last_slot: bool) -> bool:
    """Whether an entry points into the file. Chain entries must be in the last slot and point forward."""
    if entry.payload % BLOCK or entry.payload < fmt.FIRST_PAYLOAD or entry.payload + entry.stored_bytes > size:
        return False
    if entry.payload // BLOCK > _U32_MAX or entry.leaves // 8 > _U32_MAX:  # too large for an index row
        return False
    if entry.kind == fmt.KIND_CHAIN:
        return last_slot and entry.payload >= end and entry.payload + fmt.TABLE_BYTES <= size
    return not last_slot and entry.leaves % 8 == 0 and entry.leaves <= size


def covered_end(scan: Scan, describe: Callable[[int], Described | None]) -> int | None:
    """End of what the entries cover, leaf tables included: an adopter must not write below it.

    ``describe`` returns the namespace for the seq of its entry. None if a layout is unknown or a leaf table reaches
    outside the file.
    """
    end = scan.end
    sizes: dict[tuple[int, int, bytes], int | None] = {}
    for entry in scan.parts():
        if entry.leaves:
            shape = entry.ns_seq, entry.group, entry.part
            if shape not in sizes:
                sizes[shape] = _table_bytes(describe(entry.ns_seq), entry.group, entry.part)
            size = sizes[shape]
            if size is None or entry.leaves + size > scan.size:
                return None
            end = max(end, align(entry.leaves + size))
    return end


def _table_bytes(described: Described | None, number: int, packed: bytes) -> int | None:
    if described is None or number >= len(described.layout.groups):
        return None
    try:
        return described.layout.groups[number].leaves(Part.unpack(packed)) * LEAF_BYTES
    except ConfigError:
        return None


def _read_seal(fd: int, files: Files, size: int, segment_id: bytes, records: int, root: bytes) -> Seal | None:
    if size % BLOCK:
        return None
    seal = fmt.parse_seal(files.read(fd, BLOCK, size - BLOCK))
    if seal is None or seal.segment_id != segment_id or seal.tail != size - BLOCK:
        return None
    return seal if (seal.records, seal.table_root) == (records, root) else None


def read_descriptor(fd: int, files: Files, entry: Entry) -> bytes | None:
    """The descriptor that a KIND_NAMESPACE entry points to, or None if its bytes do not verify."""
    if entry.stored_bytes > fmt.DESCRIPTOR_BYTES_MAX:
        return None
    data = files.read(fd, entry.stored_bytes, entry.payload)
    return data if root_of(data) == entry.root else None


def read_namespace(fd: int, files: Files, entries: Sequence[Entry], seq: int) -> Described | None:
    """The namespace that entry ``seq`` describes; None if it is not a namespace entry or does not verify."""
    if seq >= len(entries) or entries[seq].kind != fmt.KIND_NAMESPACE:
        return None
    data = read_descriptor(fd, files, entries[seq])
    described = parse_descriptor(data) if data is not None else None
    return described if described is not None and described.digest == entries[seq].chunk_hash else None
