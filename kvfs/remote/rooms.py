"""Memory of objects, used again by the pushes and pulls of a process.

Memory for objects of 16 MiB from the allocator stays with it, however much that is, or is fresh each time: to get fresh
pages costs more than the copy into them.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time

IDLE_BYTES_MAX = 288 << 20  # that is kept for later objects: 16 of 16 MiB and their tables, as one pull has by default
IDLE_MAX = 256  # small ones, too, take memory of the kernel
REST_SECONDS = 10.0  # without a use, before the kernel may take what rooms have: the next writes take twice as long


class Rooms:
    """Owns the rooms that are not in use. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # around what follows
        self._idle: list[mmap.mmap] = []
        self._used_at: float | None = None  # monotonic seconds of the last use since the rooms rest; None: they rest

    def take(self, nbytes: int) -> mmap.mmap:
        """A room of ``nbytes`` or more. It need not be given back."""
        with self._lock:
            self._used_at = time.monotonic()
            for i in range(len(self._idle) - 1, -1, -1):  # the last one is still in the processor's caches
                if len(self._idle[i]) >= nbytes:
                    return self._idle.pop(i)
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def give(self, room: mmap.mmap) -> None:
        """Take back a room that is no longer read or written."""
        with self._lock:
            self._used_at = time.monotonic()
            self._idle.append(room)
            while len(self._idle) > IDLE_MAX or sum(map(len, self._idle)) > IDLE_BYTES_MAX:
                self._idle.pop(0)

    def rest(self, seconds: float = 0.0) -> None:
        """If no room was taken or given back for ``seconds``: the kernel, if it lacks memory, takes what they have."""
        with self._lock:
            if self._used_at is None or time.monotonic() - self._used_at < seconds:
                return
            self._used_at = None
            for room in self._idle:
                with contextlib.suppress(OSError, AttributeError):  # a kernel without it
                    room.madvise(mmap.MADV_FREE)


ROOMS = Rooms()
os.register_at_fork(after_in_child=lambda: ROOMS.__init__())  # type: ignore[misc]
