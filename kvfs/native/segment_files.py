"""Segments that are held open by the compiled library: a lookup of a long prompt holds and releases dozens of them.

Each call does all of a lookup's segments with the interpreter held: a busy thread would take it in between.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import weakref
from collections.abc import Sequence

from kvfs.native.library import Library

#: Opened or closed in one call that holds the interpreter: less than a millisecond.
HELD_SEGMENTS = 128
_NUMBER = ctypes.sizeof(ctypes.c_int32)
_TABLES: weakref.WeakSet[SegmentTable] = weakref.WeakSet()
#: id of the numbers of a hold -> (the hold, its table, its numbers): an interrupt may keep a hold from releasing them
_HOLDS: dict[int, tuple[weakref.ref[SegmentHold], SegmentTable, ctypes.Array[ctypes.c_int32]]] = {}


class SegmentTable:
    """Owns the descriptors of the segments that this process holds, each open once. Thread-safe."""

    def __init__(self, native: Library) -> None:
        self._held, self._free = native.held, native.free
        self._memory = ctypes.create_string_buffer(self._held.kvfs_files_bytes())
        self._at = ctypes.addressof(self._memory)
        self._held.kvfs_files_init(self._at)
        _TABLES.add(self)

    def open_count(self) -> int:
        return int(self._held.kvfs_files_open(self._at))

    def abandon(self) -> None:
        """In a forked child: close the parent's files, without its locks."""
        self._held.kvfs_files_abandon(self._at)

    def _hold(self, folder: int, ids: Sequence[bytes], numbers: ctypes.Array[ctypes.c_int32]) -> None:
        at = ctypes.addressof(numbers)
        for first in range(0, len(ids), HELD_SEGMENTS):
            some = ids[first : first + HELD_SEGMENTS]
            self._held.kvfs_hold(self._at, folder, b"".join(some), len(some), at + _NUMBER * first)

    def _fd(self, number: int) -> int:
        return int(self._held.kvfs_file(self._at, number))

    def _release(self, numbers: ctypes.Array[ctypes.c_int32]) -> None:
        """After an interrupt anywhere in here ``sweep`` calls it again: ``numbers`` say what is left to do."""
        at, count = ctypes.addressof(numbers), len(numbers)
        for first in range(0, count, HELD_SEGMENTS):
            some = min(HELD_SEGMENTS, count - first)
            if self._held.kvfs_release(self._at, at + _NUMBER * first, some):
                self._free.kvfs_close(at + _NUMBER * first, some)
        _HOLDS.pop(id(numbers), None)


class SegmentHold:
    """Segments that stay open, and whose blocks stay allocated, as long as this object exists."""

    __slots__ = ("__weakref__", "_numbers", "_table")

    def __init__(self, table: SegmentTable, folder: int, ids: Sequence[bytes]) -> None:
        """``folder``: descriptor of the directory of segments. Those that cannot be had at once are not held."""
        self._table = table
        self._numbers = (ctypes.c_int32 * len(ids))(*[-1] * len(ids))
        _HOLDS[id(self._numbers)] = weakref.ref(self), table, self._numbers
        table._hold(folder, ids, self._numbers)

    def held(self) -> list[bool]:
        """Of each segment, whether it is held."""
        return [number >= 0 for number in self._numbers]

    @property
    def fd(self) -> int:
        """Descriptor of the first segment; negative if it is not held."""
        return self._table._fd(self._numbers[0])

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, TypeError):  # the interpreter is ending, modules are unloaded
            self._table._release(self._numbers)


def sweep() -> None:
    """Release what was lost to an interrupt, in all stores. For a thread other than the main one."""
    for owner, table, numbers in list(_HOLDS.values()):
        if owner() is None:
            table._release(numbers)


def _abandon_inherited() -> None:
    for table in list(_TABLES):
        table.abandon()


os.register_at_fork(after_in_child=_abandon_inherited)
