"""Loads to an engine's buffers by the compiled library: pages are read, verified and copied one by one, with the
interpreter released."""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvfs.native.cells import Targets
from kvfs.native.library import Library
from kvfs.native.payloads import LEAF_BYTES, scratch

#: Pages that one call loads, of at most 8 MiB each: a signal handler may run afterwards.
CALL_BYTES = 64 << 20
_RUN = struct.Struct("<iIqQQQQQQQQ")


class LoadRun(NamedTuple):
    """Pages that are neighbours in the prompt and evenly spaced in a file, and where their cells go."""

    load: int  # number of the load that they are part of
    fd: int
    offset: int
    stride: int  # bytes from one page to the next
    nbytes: int  # of a page
    leaf_bytes: int  # 0: not verified
    roots: bytes  # of the pages, one behind the other
    pages: int
    state: int  # of the prompt: the first page's first
    units: array[int]  # of type q, checked, of the whole prompt
    targets: Targets


class CachedLoad:
    """One load of many runs out of the page cache, by several threads: each runs ``work`` on the same ``share``.

    The caller keeps the descriptors and the engine's buffers until all threads have returned.
    """

    def __init__(self, native: Library, runs: Sequence[LoadRun], loads: int, threads: int) -> None:
        """``loads``: how many there are."""
        self._free, self._kept = native.free, runs  # with the units and targets
        packed, pages, left = [], 0, [0] * loads
        for run in runs:
            units, _ = run.units.buffer_info()
            packed.append(_RUN.pack(
                run.fd, run.load, run.offset, run.stride, run.nbytes, run.leaf_bytes, pages, run.state, units,
                run.targets.address, run.targets.count,
            ))  # fmt: skip
            pages += run.pages
            left[run.load] += run.pages
        self._runs, self._count, self._pages = b"".join(packed), len(packed), pages
        self._roots = b"".join([run.roots for run in runs])
        largest = max(run.nbytes for run in runs)
        leaves = max(-(-run.nbytes // run.leaf_bytes) if run.leaf_bytes else 0 for run in runs)
        self._room, self._most = largest + LEAF_BYTES * leaves, max(1, CALL_BYTES // largest)
        self._next, self._left = ctypes.c_uint64(0), (ctypes.c_uint32 * loads)(*left)
        #: one item for each call that a thread may make; who takes all of them stops the others
        self.share: Iterator[int] = iter(range(threads - -pages // self._most))

    def work(self, share: Iterator[int]) -> None:
        memory = scratch(self._room)
        for _ in share:
            code = self._free.kvfs_load(
                self._runs, self._count, self._roots, self._pages, memory, self._next, self._left, self._most
            )
            if code < 0:  # the file system does not say what is in the page cache
                return

    def left(self) -> set[int]:
        """Numbers of the loads of which a page was not copied: it could not be had at once, or did not verify. Others
        of their pages may have been copied."""
        return {number for number, pages in enumerate(self._left) if pages}
