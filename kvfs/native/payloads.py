"""Payloads by the compiled library, with the interpreter released: reads, copies to a file, leaf tables, writes."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from kvfs.native.library import Library

LEAF_BYTES = 8
ROOT_BYTES = 16
#: Pieces that one call reads: 128 MiB of 512 KiB each, some 20 ms, after which a signal handler may run.
PIECES_PER_CALL = 256
#: Pieces that one call copies, some 16 MiB, for the same reason.
COPIES_PER_CALL = 8
#: Of one huge page, on most processors.
HUGE_BYTES = 2 << 20
#: Bytes that one call writes, for the same reason.
WRITE_BYTES = 64 << 20
_JOB = struct.Struct("<iiqQQQQQ")
_RECORD = struct.Struct("<QQQQQQ")
_SPAN = struct.Struct("<QQ")
_SPOT = struct.Struct("<QQq")
_of_thread = threading.local()


class Stretch(NamedTuple):
    """Bytes of a file, for a place in the caller's buffer."""

    fd: int
    offset: int
    at: int  # in the buffer
    nbytes: int
    leaf_bytes: int  # 0: not summed


class _Pieces:
    """Stretches of files as ``kvfs_job``, cut into pieces of ``step`` bytes, with room for their leaf tables."""

    def __init__(self, stretches: Sequence[Stretch], step: int) -> None:
        self.step = step
        self._tables: list[tuple[int, int]] = []  # where the leaf table of each stretch is, in bytes
        packed, pieces, leaves = [], 0, 0
        for s in stretches:
            packed.append(_JOB.pack(s.fd, 0, s.offset, s.at, s.nbytes, s.leaf_bytes, leaves, pieces))
            count = -(-s.nbytes // s.leaf_bytes) if s.leaf_bytes else 0
            self._tables.append((LEAF_BYTES * leaves, LEAF_BYTES * (leaves + count)))
            leaves += count
            pieces += -(-s.nbytes // step)
        self.jobs, self.n_jobs, self.count = b"".join(packed), len(stretches), pieces
        self.sums = ctypes.create_string_buffer(max(8, LEAF_BYTES * leaves))
        self.next = ctypes.c_uint64(0)

    def table(self, number: int) -> bytes:
        """Leaf table of a stretch."""
        first, end = self._tables[number]
        return ctypes.string_at(ctypes.addressof(self.sums) + first, end - first)

    def tables(self) -> bytes:
        return self.sums.raw[: self._tables[-1][1]]


class CachedRead:
    """One read of many stretches out of the page cache, by several threads: each runs ``work`` on the same ``share``.

    The caller keeps the descriptors and the buffer until all threads have returned.
    """

    def __init__(self, native: Library, stretches: Sequence[Stretch], step: int, address: int, threads: int) -> None:
        """``step``: bytes of a piece, a multiple of each leaf; ``address``: of the buffer."""
        self._free, self._address = native.free, address
        self._pieces = _Pieces(stretches, step)
        self._left = ctypes.create_string_buffer(max(1, len(stretches)))
        #: whether the file system can say what is in the page cache
        self.supported = True
        #: one item for each call that a thread may make; who takes all of them stops the others
        self.share: Iterator[int] = iter(range(threads - -self._pieces.count // PIECES_PER_CALL))

    def work(self, share: Iterator[int]) -> None:
        p = self._pieces
        for _ in share:
            code = self._free.kvfs_read(
                p.jobs, p.n_jobs, p.count, p.step, self._address, p.sums, p.next, self._left, PIECES_PER_CALL
            )
            if code < 0:
                self.supported = False
                return

    def left(self) -> list[int]:
        """Numbers of the stretches that could not be read at once."""
        return [number for number, flag in enumerate(self._left.raw[: self._pieces.n_jobs]) if flag]

    def table(self, number: int) -> bytes:
        """Leaf table of a stretch."""
        return self._pieces.table(number)

    def tables(self) -> bytes:
        """Leaf tables of all stretches, one behind the other."""
        return self._pieces.tables()


class FileCopy:
    """One copy of many stretches, whose ``at`` is a place in a stream, to a file, by several threads as in
    ``CachedRead``."""

    def __init__(
        self,
        native: Library,
        stretches: Sequence[Stretch],
        spots: Sequence[tuple[int, int, int]],
        to: int,
        step: int,
        threads: int,
    ) -> None:
        """``spots``: place in the stream, bytes, place in the file ``to``. ``step``: bytes of a piece, a multiple of
        each leaf; all stretches are summed."""
        self._free, self._to, self._pieces = native.free, to, _Pieces(stretches, step)
        self._spots, self._n_spots = b"".join([_SPOT.pack(*spot) for spot in spots]), len(spots)
        self.errno = 0  # of the first read or write that failed: then the copy is undefined
        self.share: Iterator[int] = iter(range(threads - -self._pieces.count // COPIES_PER_CALL))

    def work(self, share: Iterator[int]) -> None:
        p, address = self._pieces, scratch(self._pieces.step)
        for _ in share:
            done = self._free.kvfs_copy(
                p.jobs, p.n_jobs, p.count, p.step, address, p.sums, p.next, self._spots, self._n_spots, self._to,
                COPIES_PER_CALL,
            )  # fmt: skip
            if done < 0:
                self.errno = -done
                return

    def tables(self) -> bytes:
        """Leaf tables of all stretches, one behind the other."""
        return self._pieces.tables()


def scratch(nbytes: int) -> int:
    """Address of memory of the calling thread, in huge pages where the kernel has them. Kept for its next copy.

    A read with O_DIRECT into pages of 4 KiB is one segment for each: the disk gets many small requests.
    """
    memory: tuple[int, int, object] | None = getattr(_of_thread, "memory", None)
    if memory is None or memory[1] < nbytes:
        mapped = mmap.mmap(-1, nbytes + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError, AttributeError):  # a kernel without them
            mapped.madvise(mmap.MADV_HUGEPAGE)
        owner = (ctypes.c_char * len(mapped)).from_buffer(mapped)
        memory = _of_thread.memory = -(-ctypes.addressof(owner) // HUGE_BYTES) * HUGE_BYTES, nbytes, owner
    return memory[0]


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
