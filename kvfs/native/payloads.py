"""Payloads by the compiled library, with the interpreter released: reads out of the page cache, leaf tables, writes."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from kvfs.native.library import Library

LEAF_BYTES = 8
ROOT_BYTES = 16
#: Pieces that one call reads: 128 MiB of 512 KiB each, some 20 ms, after which a signal handler may run.
PIECES_PER_CALL = 256
#: Bytes that one call writes, for the same reason.
WRITE_BYTES = 64 << 20
_JOB = struct.Struct("<iiqQQQQQ")
_RECORD = struct.Struct("<QQQQQQ")
_SPAN = struct.Struct("<QQ")


class Stretch(NamedTuple):
    """Bytes of a file, for a place in the caller's buffer."""

    fd: int
    offset: int
    at: int  # in the buffer
    nbytes: int
    leaf_bytes: int  # 0: not summed


class CachedRead:
    """One read of many stretches out of the page cache, by several threads: each runs ``work`` on the same ``share``.

    The caller keeps the descriptors and the buffer until all threads have returned.
    """

    def __init__(self, native: Library, stretches: Sequence[Stretch], step: int, address: int, threads: int) -> None:
        """``step``: bytes of a piece, a multiple of each leaf; ``address``: of the buffer."""
        self._free, self._step, self._address = native.free, step, address
        self._tables: list[tuple[int, int]] = []  # where the leaf table of each stretch is, in bytes
        packed, pieces, leaves = [], 0, 0
        for s in stretches:
            packed.append(_JOB.pack(s.fd, 0, s.offset, s.at, s.nbytes, s.leaf_bytes, leaves, pieces))
            count = -(-s.nbytes // s.leaf_bytes) if s.leaf_bytes else 0
            self._tables.append((LEAF_BYTES * leaves, LEAF_BYTES * (leaves + count)))
            leaves += count
            pieces += -(-s.nbytes // step)
        self._jobs, self._count, self._pieces = b"".join(packed), len(stretches), pieces
        self._sums = ctypes.create_string_buffer(max(8, LEAF_BYTES * leaves))
        self._left = ctypes.create_string_buffer(max(1, len(stretches)))
        self._next = ctypes.c_uint64(0)
        #: whether the file system can say what is in the page cache
        self.supported = True
        #: one item for each call that a thread may make; who takes all of them stops the others
        self.share: Iterator[int] = iter(range(threads - -pieces // PIECES_PER_CALL))

    def work(self, share: Iterator[int]) -> None:
        for _ in share:
            code = self._free.kvfs_read(
                self._jobs, self._count, self._pieces, self._step, self._address, self._sums, self._next, self._left,
                PIECES_PER_CALL,
            )  # fmt: skip
            if code < 0:
                self.supported = False
                return

    def left(self) -> list[int]:
        """Numbers of the stretches that could not be read at once."""
        return [number for number, flag in enumerate(self._left.raw[: self._count]) if flag]

    def table(self, number: int) -> bytes:
        """Leaf table of a stretch."""
        first, end = self._tables[number]
        return ctypes.string_at(ctypes.addressof(self._sums) + first, end - first)


def roots(native: Library, tables: bytes, table_bytes: int) -> bytes:
    """Roots of leaf tables of ``table_bytes`` each, one behind the other."""
    count = len(tables) // table_bytes
    out = ctypes.create_string_buffer(ROOT_BYTES * count)
    native.free.kvfs_roots(tables, count, table_bytes, out)
    return out.raw


class _Sums:
    """Leaf tables of payloads, (address, bytes, bytes of a leaf) each, in one piece of memory."""

    def __init__(self, payloads: Sequence[tuple[int, int, int]]) -> None:
        sizes = [LEAF_BYTES * -(-nbytes // leaf) for _, nbytes, leaf in payloads]
        self._root = ctypes.create_string_buffer(ROOT_BYTES)  # not used here: a root costs less than to hand it over
        self._out = ctypes.create_string_buffer(max(1, sum(sizes)))
        self.span = ctypes.addressof(self._out), sum(sizes)
        self._ends, packed = [0], []
        for (address, nbytes, leaf), size in zip(payloads, sizes, strict=True):
            at = self.span[0] + self._ends[-1]
            packed.append(_RECORD.pack(address, nbytes, leaf, at, size, ctypes.addressof(self._root)))
            self._ends.append(self._ends[-1] + size)
        self.records, self.count = b"".join(packed), len(packed)

    def tables(self) -> list[bytes]:
        raw = self._out.raw
        return [raw[first:end] for first, end in pairwise(self._ends)]


def leaf_tables(native: Library, payloads: Sequence[tuple[int, int, int]]) -> list[bytes]:
    """Leaf tables of payloads: (address, bytes, bytes of a leaf) each. The caller keeps them."""
    sums = _Sums(payloads)
    native.free.kvfs_sum_records(sums.records, sums.count)
    return sums.tables()


def append(
    native: Library, fd: int, payloads: Sequence[tuple[int, int, int]], spans: Sequence[tuple[int, int]], offset: int
) -> list[bytes]:
    """Write memory, (address, bytes) each, and behind it the leaf tables of ``payloads``, which it returns.

    OSError as of ``os.pwritev``. The caller keeps all memory.
    """
    sums = _Sums(payloads)
    everything = [*spans, sums.span]
    packed = b"".join([_SPAN.pack(*span) for span in everything])
    total = sum(nbytes for _, nbytes in everything)
    done = native.free.kvfs_append(sums.records, sums.count, fd, packed, len(everything), offset, WRITE_BYTES)
    while 0 <= done < total:
        done = native.free.kvfs_write(fd, packed, len(everything), offset, done, WRITE_BYTES)
    if done < 0:
        raise OSError(-done, os.strerror(-done))
    return sums.tables()
