"""Bare ways to bring cold files into the page cache, without copies of their bytes.

``readahead``: POSIX_FADV_WILLNEED, then the last byte. ``populate``: a map and MADV_POPULATE_READ. ``huge``: the same
with MADV_HUGEPAGE before it, for which the kernel takes folios of 2 MiB. Each thread takes the next block of a file.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tools.benchmarks.case import Case, cached_share
from tools.benchmarks.measure import BenchError, Sample, Stopwatch

#: Way, threads, MiB of a block.
WAYS = (
    ("readahead", 4, 8), ("readahead", 8, 8), ("populate", 4, 8), ("huge", 2, 32), ("huge", 4, 8), ("huge", 4, 32),
    ("huge", 8, 8),
)  # fmt: skip
_MADV_HUGEPAGE, _MADV_POPULATE_READ = 14, 22
_MAP_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def can_populate() -> bool:
    """Whether the kernel knows MADV_POPULATE_READ (5.14)."""
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        try:
            page.madvise(_MADV_POPULATE_READ)
        except OSError:
            return False
    return True


@dataclass
class BareFill(AbstractContextManager["BareFill"]):
    """Fill the page cache with files that hold the bytes of a case."""

    case: Case
    paths: Sequence[Path]
    way: str
    threads: int
    block_bytes: int

    def __enter__(self) -> BareFill:
        self._stack = ExitStack()
        self._files = [self._stack.enter_context(path.open("rb")) for path in self.paths]
        self._pool = self._stack.enter_context(ThreadPoolExecutor(self.threads))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def run(self, _order: Any = None) -> Sample:
        watch, cached = Stopwatch(), cached_share(self.paths)
        blocks, lock = self._blocks(), threading.Lock()
        fill: Callable[[int, int, int], None] = _readahead if self.way == "readahead" else self._populate

        def loop(_: int) -> None:
            while True:
                with lock:
                    block = next(blocks, None)
                if block is None:
                    return
                fill(*block)

        with watch:
            list(self._pool.map(loop, range(self.threads)))
        return watch.sample(self.case.size_bytes, cached)

    def _blocks(self) -> Iterator[tuple[int, int, int]]:
        for file in self._files:
            size = os.fstat(file.fileno()).st_size
            for at in range(0, size, self.block_bytes):
                yield file.fileno(), at, min(self.block_bytes, size - at)

    def _populate(self, fd: int, offset: int, nbytes: int) -> None:
        address = _libc.mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, offset)
        if address == _MAP_FAILED:
            raise BenchError(f"mmap: {os.strerror(ctypes.get_errno())}")
        if self.way == "huge":
            _libc.madvise(address, nbytes, _MADV_HUGEPAGE)
        failed = _libc.madvise(address, nbytes, _MADV_POPULATE_READ)
        _libc.munmap(address, nbytes)
        if failed:
            raise BenchError("MADV_POPULATE_READ failed")


def _readahead(fd: int, offset: int, nbytes: int) -> None:
    os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_WILLNEED)
    os.pread(fd, 1, offset + nbytes - 1)
