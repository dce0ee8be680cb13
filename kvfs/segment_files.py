"""Segments that this process holds open for reading, each once, each under a shared flock."""

from __future__ import annotations

import fcntl
import os
import threading
import weakref

from kvfs.descriptors import Descriptor
from kvfs.directory import Directory
from kvfs.segment import file_name

LOCK_TRIES, LOCK_SECONDS = 40, 0.00025


class Held:
    """An open segment, for as long as somebody refers to it: a match, a read in progress."""

    __slots__ = ("__weakref__", "_file", "direct", "generation", "number", "segment_id", "tried_direct")

    def __init__(self, number: int, segment_id: bytes, file: Descriptor, generation: str) -> None:
        self.number = number
        self.segment_id = segment_id
        self.generation = generation
        self._file = file
        self.direct: Descriptor | None = None
        self.tried_direct = False

    @property
    def fd(self) -> int:
        return self._file.fd


class SegmentFiles:
    """Opens segments by id and shares the descriptor among the readers of this process. Thread-safe.

    Bytes below a published tail never change, so a held segment may be read after it was dropped; its blocks
    are free when the last holder anywhere lets go. Nobody counts: a segment is closed with its last reference.
    """

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._files = directory.files
        self._lock = threading.Lock()
        self._open: weakref.WeakValueDictionary[bytes, Held] = weakref.WeakValueDictionary()

    def acquire(self, number: int, segment_id: bytes, generation: str) -> Held | None:
        """The segment, open as long as the result lives; None if it is gone or cannot be opened."""
        with self._lock:
            held = self._open.get(segment_id)
            if held is None:
                file = self._open_locked(segment_id)
                if file is None:
                    return None
                held = self._open[segment_id] = Held(number, segment_id, file, generation)
            return held

    def _open_locked(self, segment_id: bytes, flags: int = 0) -> Descriptor | None:
        try:
            segments = self._directory.sub("segments")
            file = Descriptor.open(self._files, file_name(segment_id), os.O_RDONLY | flags, dir_fd=segments)
        except OSError:
            return None
        try:
            # whoever unlinks holds LOCK_EX meanwhile, so a link count seen under LOCK_SH stays; an evictor that
            # only looks whether a segment is held has the lock for microseconds
            for _ in range(LOCK_TRIES):
                if self._files.flock(file.fd, fcntl.LOCK_SH):
                    if self._files.fstat(file.fd).st_nlink > 0:
                        return file
                    break
                self._files.sleep(LOCK_SECONDS)
        except OSError:
            pass
        file.close()
        return None

    def direct(self, held: Held) -> int:
        """Descriptor of a held segment for reads that bypass the page cache; negative where there is none."""
        with self._lock:
            if not held.tried_direct:
                held.direct = self._open_locked(held.segment_id, os.O_DIRECT)
                held.tried_direct = True
            return held.direct.fd if held.direct is not None else -1

    def count(self) -> int:
        return len(self._open)

    def abandon(self) -> None:
        """In a forked child, where the parent's descriptors are closed."""
        self._lock = threading.Lock()
        self._open = weakref.WeakValueDictionary()
