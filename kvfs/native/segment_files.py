"""Segments opened and closed in one call that holds the interpreter: a busy thread would take it in between."""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Sequence

from kvfs.native.library import Library


class OpenedBatch:
    """Descriptors of segments until ``take`` hands them on. An interrupt in between closes the rest."""

    def __init__(self, native: Library, folder: int, ids: Sequence[bytes]) -> None:
        """``folder``: descriptor of the directory of segments. Those that cannot be had at once are negative."""
        self._take = native.held.kvfs_take
        self._fds = (ctypes.c_int32 * len(ids))(*[-1] * len(ids))
        native.held.kvfs_open_segments(folder, b"".join(ids), len(ids), self._fds)

    def __len__(self) -> int:
        return len(self._fds)

    def is_open(self, number: int) -> bool:
        return self._fds[number] >= 0

    def take(self, number: int, kept: list[int | None]) -> None:
        """Move a descriptor to ``kept``, whose owner closes it from now on, in one step."""
        kept.extend(map(self._take, (ctypes.addressof(self._fds) + 4 * number,)))

    def __del__(self) -> None:
        for fd in self._fds:
            if fd >= 0:
                os.close(fd)


def close_linked(native: Library, kept: list[int | None]) -> bool:
    """Close what was appended to a list that held None, and remove it from the list, in one step.

    False, with nothing done, if the close could free blocks: that takes long, and other threads have to run meanwhile.
    """
    fd = kept[-1]
    if fd is None or not native.held.kvfs_is_linked(fd):
        return False
    deque(map(native.held.kvfs_close, iter(kept.pop, None)), maxlen=0)
    return True
