"""Bytes on disk, format 1. ``docs/format.md`` is the authority; a test compares this module with it.

Everything is little endian. Every structure ends in an XXH3-64 of the bytes before it, so each can be verified
alone. Parsers take untrusted bytes: they return None for anything invalid and never raise.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from kvfs.format.checksums import checksum

BLOCK = 4096  # alignment of payloads, header page and seal page
SEGMENT_MAGIC = b"KVFSEG1\n"
SEAL_MAGIC = b"KVFSEAL1"
FIRST_TABLE = BLOCK  # where the first record table begins
FIRST_TABLE_BYTES = 3 * BLOCK  # small, and payloads begin at 16 KiB: a small segment must not be mostly table
TABLE_BYTES = 4 * BLOCK
FIRST_PAYLOAD = FIRST_TABLE + FIRST_TABLE_BYTES
DESCRIPTOR_BYTES_MAX = 64 * 1024

# Feature bits that this version knows. Unknown compatible bits are ignored, unknown read-only bits forbid
# appending, unknown incompatible bits forbid reading.
COMPATIBLE = READ_ONLY_COMPATIBLE = INCOMPATIBLE = 0

KIND_PART, KIND_NAMESPACE, KIND_CHAIN = 1, 2, 3
CODEC_RAW, CODEC_ZSTD, CODEC_PLANES = 0, 1, 2  # defined in ``kvfs.format.codec``
KNOWN_CODECS = frozenset((CODEC_RAW, CODEC_ZSTD, CODEC_PLANES))  # a page of any other codec is a miss

FLAG_PINNED = 1  # holds a pinned prefix while pins/<class> exists
FLAG_DIRECT = 2  # payloads written with O_DIRECT: mapped only when sealed
FLAG_CARRIED = 4  # holds hot pages that eviction relocated from segments that it dropped

PURGE_MAGIC = b"KVFSPRG1"
PURGE_PENDING = 1  # index rows may still name the purged records
PURGE_ALL = 2  # every record of the segment is purged

_HEADER = struct.Struct("<8sIIQQQ16s16sQIII16s")
_ENTRY = struct.Struct("<BBHIIIII8sQIIQQ32s32s16s8s")
_SEAL = struct.Struct("<8s16sIIQQ16s")
_PURGE = struct.Struct("<8s16sIII")
_CHECK = struct.Struct("<Q")
_CHECKED_ENTRY = struct.Struct(_ENTRY.format + "8s")
_NAMED_ENTRY = struct.Struct("<B63x32s56x8s")  # kind, chunk hash, check word

HEADER_BYTES = _HEADER.size + 8
ENTRY_BYTES = _ENTRY.size + 8
SEAL_BYTES = _SEAL.size + 8


class Header(NamedTuple):
    """First page of a segment, written once."""

    segment_id: bytes  # 16 random bytes, unique across stores
    store_id: bytes  # 16 bytes
    created_us: int
    flags: int = 0
    class_id: bytes = bytes(16)  # what the segment is reserved for (quota, expiry, pin); zero: any page
    format: int = 1


class Entry(NamedTuple):
    """One record of a segment's table. KIND_CHAIN uses seq, epoch and payload (the next table) only."""

    kind: int
    codec: int
    group: int  # ordinal of the group in the namespace's layout
    seq: int  # ordinal in the segment, over all its tables, chain entries included
    epoch: int  # raised each time another process adopts the active segment
    ns_seq: int  # seq of the namespace record in the same segment
    chunk: int  # ordinal of the chunk in its prompt
    expires: int  # unix seconds, 0 = never
    part: bytes  # Part.pack()
    payload: int  # offset, multiple of BLOCK
    stored_bytes: int
    raw_bytes: int
    leaves: int  # offset of the leaf table (0: none)
    written_us: int
    chunk_hash: bytes  # for KIND_NAMESPACE: the namespace digest
    run_hash: bytes  # chunk hash that keys the index row of this chunk: the first of its run or of a fork
    root: bytes
    attempt: bytes  # 8 bytes: the save id: equal for all ranks that wrote together


class Seal(NamedTuple):
    """Last page of a sealed segment."""

    segment_id: bytes
    records: int
    tail: int  # offset of this page: the end of the payloads
    sealed_us: int
    table_root: bytes  # XXH3-128 over the check words of all entries


class PurgeMark(NamedTuple):
    """Records of a segment that must never be named again."""

    segment_id: bytes
    flags: int  # PURGE_*
    epoch: int  # entries of a higher epoch are not meant: a process that adopts the segment may reuse their slots
    bits: bytes  # bit seq % 8 of byte seq // 8

    @property
    def pending(self) -> bool:
        return bool(self.flags & PURGE_PENDING)

    @property
    def whole(self) -> bool:
        return bool(self.flags & PURGE_ALL)

    def covers(self, entry: Entry) -> bool:
        if self.whole:
            return True
        at, bit = divmod(entry.seq, 8)
        return entry.epoch <= self.epoch and at < len(self.bits) and bool(self.bits[at] >> bit & 1)


def _with_check(body: bytes, seed: int = 0) -> bytes:
    return body + _CHECK.pack(checksum(body, seed=seed))


def _body(data: bytes | memoryview, size: int, seed: int = 0) -> bytes | None:
    """The first ``size`` bytes if the check word behind them agrees."""
    if len(data) < size + 8:
        return None
    body = bytes(data[:size])
    return body if _CHECK.unpack(bytes(data[size : size + 8]))[0] == checksum(body, seed=seed) else None


def segment_seed(segment_id: bytes) -> int:
    """Seed of the checks of a segment's entries: an entry copied from another segment is invalid."""
    return int.from_bytes(segment_id[:8], "little")


def pack_header(header: Header) -> bytes:
    """One whole header page."""
    body = _HEADER.pack(
        SEGMENT_MAGIC, header.format, HEADER_BYTES, COMPATIBLE, READ_ONLY_COMPATIBLE, INCOMPATIBLE,
        header.store_id, header.segment_id, header.created_us, FIRST_TABLE_BYTES, TABLE_BYTES, header.flags,
        header.class_id,
    )  # fmt: skip
    return _with_check(body).ljust(BLOCK, b"\0")


def parse_header(page: bytes | memoryview) -> Header | None:
    """The header, or None if it is invalid or has a feature that forbids reading."""
    body = _body(page, _HEADER.size)
    if body is None:
        return None
    (magic, version, size, _compat, _ro, incompat, store_id, segment_id, created, first, table, flags,
     class_id) = _HEADER.unpack(body)  # fmt: skip
    if magic != SEGMENT_MAGIC or version != 1 or size != HEADER_BYTES or incompat & ~INCOMPATIBLE:
        return None
    if first != FIRST_TABLE_BYTES or table != TABLE_BYTES:
        return None
    return Header(segment_id, store_id, created, flags, class_id, version)


def may_append(page: bytes | memoryview) -> bool:
    """Whether the features in a valid header page allow this version to append to the segment."""
    return not _HEADER.unpack(bytes(page[: _HEADER.size]))[4] & ~READ_ONLY_COMPATIBLE


def pack_entry(entry: Entry, seed: int) -> bytes:
    return _with_check(_ENTRY.pack(*entry), seed)


def parse_entry(data: bytes | memoryview, seed: int) -> Entry | None:
    body = _body(data, _ENTRY.size, seed)
    if body is None:
        return None
    entry = Entry(*_ENTRY.unpack(body))
    return entry if entry.kind in (KIND_PART, KIND_NAMESPACE, KIND_CHAIN) else None


def parse_entries(table: memoryview, seed: int) -> Iterator[tuple[Entry, bytes]]:
    """The entries of a table, or of a part of it, up to the first invalid one; each with its check word."""
    at = 0
    for fields in _CHECKED_ENTRY.iter_unpack(table):
        check = fields[-1]
        if int.from_bytes(check, "little") != checksum(table[at : at + _ENTRY.size], seed=seed):
            return
        entry = Entry._make(fields[:-1])
        if entry.kind not in (KIND_PART, KIND_NAMESPACE, KIND_CHAIN):
            return
        yield entry, check
        at += ENTRY_BYTES


def parse_names(table: memoryview, seed: int) -> tuple[list[bytes], int | None]:
    """Chunk hashes of the entries of a table up to the first one whose check word is wrong, and the offset of the next
    table if the last of them is a chain entry. A quarter of the time of ``parse_entries``."""
    names, at = list[bytes](), 0
    for kind, name, check in _NAMED_ENTRY.iter_unpack(table):
        if int.from_bytes(check, "little") != checksum(table[at : at + _ENTRY.size], seed=seed):
            break
        names.append(name)
        if kind == KIND_CHAIN:
            entry = parse_entry(table[at : at + ENTRY_BYTES], seed)
            return names, entry.payload if entry is not None else None
        at += ENTRY_BYTES
    return names, None


def entry_check(data: bytes | memoryview) -> bytes:
    """The check word of a packed entry."""
    return bytes(data[ENTRY_BYTES - 8 : ENTRY_BYTES])


def pack_seal(seal: Seal) -> bytes:
    """One whole seal page."""
    body = _SEAL.pack(SEAL_MAGIC, seal.segment_id, 1, seal.records, seal.tail, seal.sealed_us, seal.table_root)
    return _with_check(body).ljust(BLOCK, b"\0")


def parse_seal(page: bytes | memoryview) -> Seal | None:
    body = _body(page, _SEAL.size)
    if body is None:
        return None
    magic, segment_id, version, records, tail, sealed_us, table_root = _SEAL.unpack(body)
    return Seal(segment_id, records, tail, sealed_us, table_root) if (magic, version) == (SEAL_MAGIC, 1) else None


def pack_purge_mark(mark: PurgeMark) -> bytes:
    body = _PURGE.pack(PURGE_MAGIC, mark.segment_id, mark.flags, mark.epoch, len(mark.bits))
    return _with_check(body + mark.bits)


def parse_purge_mark(data: bytes) -> PurgeMark | None:
    body = _body(data, len(data) - 8) if len(data) >= _PURGE.size + 8 else None
    if body is None:
        return None
    magic, segment_id, flags, epoch, nbytes = _PURGE.unpack_from(body)
    if magic != PURGE_MAGIC or len(body) != _PURGE.size + nbytes:
        return None
    return PurgeMark(segment_id, flags, epoch, body[_PURGE.size :])


def slots_of_table(first: bool) -> int:
    """Slots of a table; the last one is reserved for the chain entry."""
    return (FIRST_TABLE_BYTES if first else TABLE_BYTES) // ENTRY_BYTES


def align(offset: int, to: int = BLOCK) -> int:
    return (offset + to - 1) // to * to
