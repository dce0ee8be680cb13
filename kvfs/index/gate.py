"""The two-file gate that stands before every use of the index, for all processes of a host.

A reader takes ``gate`` shared, ``main`` shared, and drops ``gate``; a writer takes both exclusive. Holding
``gate`` while it waits for ``main``, a writer cannot be starved. LMDB's own locking is off: it names readers
by process id, which two containers share. The kernel drops flocks of the dead, so nothing is left behind.

Threads of one process share the two descriptors, so callers hold a process-wide mutex (``index.worker``).
"""

from __future__ import annotations

import fcntl
import os

from kvfs.directory import Directory
from kvfs.errors import IndexUnavailableError

POLL_SECONDS = 75e-6  # fixed: exponential back-off was measured to lose 30-fold against it


class Gate:
    """``acquire`` and ``release`` with a deadline; never blocks in the kernel."""

    def __init__(self, directory: Directory) -> None:
        self._files = directory.files
        self._root = directory.root
        flags = os.O_RDONLY if directory.read_only else os.O_RDWR
        self._gate = self._files.open("gate", flags, dir_fd=self._root)
        self._main = self._files.open("main", flags, dir_fd=self._root)
        self.held = False

    def acquire(self, *, exclusive: bool, deadline: float) -> None:
        """Raise IndexUnavailableError ("timeout") past ``deadline`` (monotonic seconds), holding nothing then."""
        assert not self.held, "gate acquired twice"
        kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        self._lock(self._gate, kind, deadline)
        try:
            self._lock(self._main, kind, deadline)
        except BaseException:
            self._files.flock(self._gate, fcntl.LOCK_UN)
            raise
        self.held = True
        if not exclusive:
            self._files.flock(self._gate, fcntl.LOCK_UN)
        if not self._in_place():
            self.release()
            raise IndexUnavailableError("the store's lock files were replaced: the directory is gone")

    def release(self) -> None:
        self.held = False
        self._files.flock(self._main, fcntl.LOCK_UN)
        self._files.flock(self._gate, fcntl.LOCK_UN)

    def _lock(self, fd: int, kind: int, deadline: float) -> None:
        while not self._files.flock(fd, kind):
            if self._files.monotonic() >= deadline:
                raise IndexUnavailableError("timeout")
            self._files.sleep(POLL_SECONDS)

    def _in_place(self) -> bool:
        """A lock on a file that somebody replaced excludes nobody."""
        try:
            return all(
                self._files.stat(name, dir_fd=self._root).st_ino == self._files.fstat(fd).st_ino
                for name, fd in (("gate", self._gate), ("main", self._main))
            )
        except OSError:
            return False

    def close(self) -> None:
        """Close the descriptors; in a forked child this leaves the parent's locks alone."""
        os.close(self._gate)
        os.close(self._main)
