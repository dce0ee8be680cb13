"""Rows of the ``pages`` table: one row names up to 32 consecutive chunks of one part of one group.

Key: PageKey of the run's first chunk, then the part (8 bytes). Value (little endian)::

     0  u64      XXH3-64 of the rest, seeded with the first 8 bytes of the key
     8  u8 u8    version (1), number of extents
    10  u16      zero
    12  u32      presence: bit j = chunk j of the run is here
    16  u32      leaves of one part: the leaf tables of neighbours are 8 bytes times this apart
    20  extents  32 bytes each (struct _EXTENT), by first chunk
     .  hashes   32 bytes for each present chunk, in order
     .  roots    16 bytes for each present chunk, in order

An extent says where a stretch of neighbouring chunks is stored; chunks stored together share one. A run has more than
one continuation if prompts share its first chunks and fork later: a chunk whose slot in the row of the run's first
chunk is taken goes to a row keyed by the first chunk that differs. Lookups follow the same rule, so a row never has
more than 32 chunks and a lookup reads one row per run plus one per fork.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from kvfs.format.checksums import ROOT_BYTES, checksum
from kvfs.pages.chunk_hash import HASH_BYTES

RUN = 32
_HEAD = struct.Struct("<QBBHII")
_EXTENT = struct.Struct("<BBBBIIIIIII")
_VERSION = 1
_U32_MAX = 0xFFFF_FFFF

CLAIM = 1  # extent flag: the owner of ``segment`` is writing these chunks until ``expires``; nothing is stored yet
CLAIM_SECONDS = 5  # longest life of a claim


class Extent(NamedTuple):
    """Chunks [first, first+chunks) of a run, at ``block + i * stride`` (units of 4 KiB) of a segment."""

    first: int
    chunks: int
    codec: int
    flags: int
    segment: int  # number of the segment in the index
    block: int
    stride: int
    stored_bytes: int
    leaf: int  # offset of the first leaf table in units of 8 bytes
    seq: int  # ordinal of the first record in the segment
    expires: int  # unix seconds, 0 = never


class Place(NamedTuple):
    """Where one chunk's part is stored, and the root of its leaf table. Units as in ``Extent``."""

    chunk_hash: bytes
    root: bytes
    codec: int
    flags: int
    segment: int
    block: int
    stored_bytes: int
    leaf: int
    seq: int
    expires: int


class Row:
    """A validated row value, read lazily."""

    __slots__ = ("_hashes", "extents", "leaves", "present", "value")

    def __init__(self, value: bytes, present: int, leaves: int, extents: tuple[Extent, ...]) -> None:
        self.value = value
        self.leaves = leaves
        self.present = present
        self.extents = extents
        self._hashes = _HEAD.size + _EXTENT.size * len(extents)

    def matches(self, wanted: bytes, count: int) -> int:
        """Set (bits) of the chunks whose hash equals that in ``wanted``: ``count`` hashes of 32 bytes, by chunk."""
        present, value, at = self.present, self.value, self._hashes
        if present & (present + 1) == 0:  # no holes, the usual case: one comparison
            n = min(present.bit_length(), count)
            if value.startswith(wanted if n == count else wanted[: HASH_BYTES * n], at):
                return (1 << n) - 1
        found = 0
        for j in range(min(count, present.bit_length())):
            if present >> j & 1:
                if value[at : at + HASH_BYTES] == wanted[HASH_BYTES * j : HASH_BYTES * (j + 1)]:
                    found |= 1 << j
                at += HASH_BYTES
        return found

    def places(self) -> Iterator[tuple[int, Place]]:
        """(chunk of the run, place) of every chunk."""
        value, hashes = self.value, self._hashes
        roots = hashes + HASH_BYTES * self.present.bit_count()
        rank = 0
        for e in self.extents:
            for i in range(e.chunks):
                h, r = hashes + HASH_BYTES * rank, roots + ROOT_BYTES * rank
                rank += 1
                n = 0 if e.flags & CLAIM else i
                yield e.first + i, Place(
                    value[h : h + HASH_BYTES], value[r : r + ROOT_BYTES], e.codec, e.flags, e.segment,
                    e.block + n * e.stride, e.stored_bytes, e.leaf + n * self.leaves, e.seq + n, e.expires,
                )  # fmt: skip

    def hashed(self) -> Iterator[tuple[Extent, int, bytes]]:
        """(extent, chunks, their hashes) of each extent."""
        at = self._hashes
        for e in self.extents:
            end = at + HASH_BYTES * e.chunks
            yield e, e.chunks, self.value[at:end]
            at = end

    def stretches(self, bits: int) -> Iterator[tuple[Extent, int, int, bytes]]:
        """(extent, its chunks skipped before, count, roots) of each stretch of chunks in ``bits``."""
        at, value = self._hashes + HASH_BYTES * self.present.bit_count(), self.value
        for e in self.extents:
            use, skipped = bits >> e.first & (1 << e.chunks) - 1, 0
            while use:
                gap = (use & -use).bit_length() - 1
                use, skipped = use >> gap, skipped + gap
                count = (~use & use + 1).bit_length() - 1
                first = at + ROOT_BYTES * skipped
                yield e, skipped, count, value[first : first + ROOT_BYTES * count]
                use, skipped = use >> count, skipped + count
            at += ROOT_BYTES * e.chunks


def parse_row(key: bytes, value: bytes | None) -> Row | None:
    """The row, or None for absent or damaged bytes: then its chunks are misses."""
    if value is None or len(value) < _HEAD.size:
        return None
    check, version, extents_n, zero, present, leaves = _HEAD.unpack_from(value)
    if check != checksum(value[8:], seed=int.from_bytes(key[:8], "little")) or version != _VERSION or zero:
        return None
    extents_end = _HEAD.size + _EXTENT.size * extents_n
    if len(value) != extents_end + (HASH_BYTES + ROOT_BYTES) * present.bit_count():
        return None
    extents = _extents(value, extents_n)
    covered = end = 0
    for first, chunks, codec, flags, _, block, stride, stored, leaf, seq, _ in extents:
        if not chunks or first < end:  # hashes and roots are in the order of the chunks
            return None
        end = first + chunks
        covered |= (1 << end) - (1 << first)
        if flags & CLAIM:
            if codec | block | stride | stored | leaf | seq:
                return None
        else:
            last = chunks - 1  # its place must also fit an extent of its own: three numbers of 32 bits
            if block + last * stride | leaf + last * leaves | seq + last > _U32_MAX:
                return None
    return Row(value, present, leaves, extents) if covered == present else None  # so no chunk is beyond RUN either


def checked_row(value: bytes) -> Row:
    """The row of bytes that ``parse_row``, or the native library, has accepted."""
    _, _, extents_n, _, present, leaves = _HEAD.unpack_from(value)
    return Row(value, present, leaves, _extents(value, extents_n))


def _extents(value: bytes, count: int) -> tuple[Extent, ...]:
    if count == 1:
        return (Extent._make(_EXTENT.unpack_from(value, _HEAD.size)),)
    return tuple(map(Extent._make, _EXTENT.iter_unpack(value[_HEAD.size : _HEAD.size + _EXTENT.size * count])))


def pack_row(key: bytes, places: dict[int, Place], leaves: int) -> bytes:
    """Row value of chunk -> place; neighbours at one stride in one segment share an extent."""
    extents: list[list[int]] = []
    hashes, roots, present = [], [], 0
    previous: Place | None = None
    for j in sorted(places):
        p = places[j]
        present |= 1 << j
        hashes.append(p.chunk_hash)
        roots.append(p.root)
        if previous is not None and extents[-1][0] + extents[-1][1] == j and _joins(extents[-1], previous, p, leaves):
            if extents[-1][1] == 1:
                extents[-1][6] = p.block - previous.block
            extents[-1][1] += 1
        else:
            extents.append([j, 1, p.codec, p.flags, p.segment, p.block, 0, p.stored_bytes, p.leaf, p.seq, p.expires])
        previous = p
    body = _HEAD.pack(0, _VERSION, len(extents), 0, present, leaves)[8:]
    body += b"".join([_EXTENT.pack(*e) for e in extents]) + b"".join(hashes) + b"".join(roots)
    return checksum(body, seed=int.from_bytes(key[:8], "little")).to_bytes(8, "little") + body


def _joins(extent: list[int], before: Place, p: Place, leaves: int) -> bool:
    same = (
        p.codec == before.codec
        and p.flags == before.flags
        and p.segment == before.segment
        and p.stored_bytes == before.stored_bytes
        and p.expires == before.expires
    )
    if not same:
        return False
    if p.flags & CLAIM:
        return True
    step = p.block - before.block
    return (
        p.seq == before.seq + 1
        and p.leaf == before.leaf + leaves
        and step > 0
        and (extent[1] == 1 or step == extent[6])
    )


def claim(chunk_hash: bytes, segment: int, expires: int) -> Place:
    """Place of a chunk that the owner of ``segment`` is writing, until ``expires`` (unix seconds)."""
    return Place(chunk_hash, bytes(ROOT_BYTES), 0, CLAIM, segment, 0, 0, 0, 0, expires)
