"""Segments that this process holds open for reading, each once, each under a shared flock."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading

from kvfs.directory import Directory
from kvfs.segment import file_name

LOCK_TRIES, LOCK_SECONDS = 40, 0.00025
NOT_OPEN, NO_DIRECT_IO = -1, -2


class Held:
    """An open segment. ``refs`` counts matches and views in progress."""

    __slots__ = ("direct_fd", "fd", "generation", "number", "refs", "segment_id")

    def __init__(self, number: int, segment_id: bytes, fd: int, generation: str) -> None:
        self.number = number
        self.segment_id = segment_id
        self.fd = fd
        self.generation = generation
        self.direct_fd = NOT_OPEN
        self.refs = 1


class SegmentFiles:
    """Opens segments by id and shares the descriptor among the readers of this process. Thread-safe.

    Bytes below a published tail never change, so a held segment may be read after it was dropped; its blocks
    are free when the last holder anywhere lets go.
    """

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._files = directory.files
        self._lock = threading.Lock()
        self._open: dict[bytes, Held] = {}

    def acquire(self, number: int, segment_id: bytes, generation: str) -> Held | None:
        """The segment, held until ``release``; None if it is gone or cannot be opened."""
        with self._lock:
            held = self._open.get(segment_id)
            if held is not None:
                held.refs += 1
                return held
            fd = self._open_locked(segment_id)
            if fd < 0:
                return None
            held = self._open[segment_id] = Held(number, segment_id, fd, generation)
            return held

    def _open_locked(self, segment_id: bytes, flags: int = 0) -> int:
        try:
            fd = self._files.open(file_name(segment_id), os.O_RDONLY | flags, dir_fd=self._directory.sub("segments"))
        except OSError:
            return -1
        try:
            # whoever unlinks holds LOCK_EX meanwhile, so a link count seen under LOCK_SH stays; an evictor that
            # only looks whether a segment is held has the lock for microseconds
            for _ in range(LOCK_TRIES):
                if self._files.flock(fd, fcntl.LOCK_SH):
                    if self._files.fstat(fd).st_nlink > 0:
                        return fd
                    break
                self._files.sleep(LOCK_SECONDS)
        except OSError:
            pass
        with contextlib.suppress(OSError):
            self._files.close(fd)
        return -1

    def direct(self, held: Held) -> int:
        """Descriptor of a held segment for reads that bypass the page cache; negative where there is none."""
        with self._lock:
            if held.direct_fd == NOT_OPEN:
                fd = self._open_locked(held.segment_id, os.O_DIRECT)
                held.direct_fd = fd if fd >= 0 else NO_DIRECT_IO
            return held.direct_fd

    def release(self, held: Held) -> None:
        with self._lock:
            held.refs -= 1
            assert held.refs >= 0, "segment released twice"
            if held.refs == 0:
                self._open.pop(held.segment_id, None)
                for fd in (held.fd, held.direct_fd):
                    if fd >= 0:
                        with contextlib.suppress(OSError):
                            self._files.close(fd)

    def count(self) -> int:
        return len(self._open)

    def abandon(self) -> None:
        """In a forked child: close the inherited descriptors; the parent's locks stay."""
        self._lock = threading.Lock()
        for held in self._open.values():
            for fd in (held.fd, held.direct_fd):
                if fd >= 0:
                    with contextlib.suppress(OSError):
                        os.close(fd)
        self._open.clear()
