"""Reads and writes that bypass the page cache. O_DIRECT requires memory, offsets and sizes in whole blocks.

Aligned data is transferred directly, all other data through a bounce buffer of BOUNCE_BYTES per call. Copies release
the GIL.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Iterator, Sequence
from typing import Any

from kvfs.format.segment import BLOCK, align
from kvfs.system.files import Files
from kvfs.system.memory_views import address_of, address_of_readonly

BOUNCE_BYTES = 1 << 20
KEPT_MAX = 8  # unused bounce buffers that are kept for later calls

_kept: list[memoryview] = []


def aligned(nbytes: int) -> memoryview:
    """Private memory of ``nbytes``, aligned to a page."""
    return memoryview(mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))[:nbytes]


@contextlib.contextmanager
def _bounce() -> Iterator[memoryview]:
    try:
        room = _kept.pop()  # one C call: no lock that an interrupt could leave held
    except IndexError:
        room = aligned(BOUNCE_BYTES)
    yield room
    if len(_kept) < KEPT_MAX:  # not after an error: the kernel may still use the memory
        _kept.append(room)


def write(files: Files, fd: int, buffers: Sequence[Any], offset: int) -> None:
    """Write ``buffers``, each starting on a block and padded with zeros to a whole one. ``fd`` has O_DIRECT."""
    with _bounce() as room:
        queue: list[memoryview] = []
        used, start = 0, address_of(room)

        def flush() -> None:
            nonlocal used, offset
            offset += files.write_all(fd, queue, offset, BLOCK)
            queue.clear()
            used = 0

        for buffer in buffers:
            data = memoryview(buffer)
            size, source = len(data), address_of_readonly(data)
            at = size - size % BLOCK if source % BLOCK == 0 else 0
            if at:
                queue.append(data[:at])
            while at < size:
                if used == len(room):
                    flush()
                n = min(size - at, len(room) - used)
                ctypes.memmove(start + used, source + at, n)
                whole = align(n)
                ctypes.memset(start + used + n, 0, whole - n)
                queue.append(room[used : used + whole])
                used, at = used + whole, at + n
        flush()


def read(files: Files, fd: int, target: memoryview, offset: int) -> None:
    """Fill ``target`` from ``offset``; EIO if the file ends first. ``fd`` has O_DIRECT."""
    size, to = len(target), address_of(target)
    done = size - size % BLOCK if offset % BLOCK == to % BLOCK == 0 else 0
    if done:
        files.read_into(fd, target[:done], offset, BLOCK)
    if done == size:
        return
    with _bounce() as room:
        start = address_of(room)
        while done < size:
            skip = (offset + done) % BLOCK
            n = min(size - done, len(room) - skip)
            files.read_into(fd, room[: align(skip + n)], offset + done - skip, BLOCK)
            ctypes.memmove(to + done, start + skip, n)
            done += n
