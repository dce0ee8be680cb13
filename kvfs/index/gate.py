"""The two-file gate before every use of the index, for all processes of a host.

A reader takes ``gate`` shared, ``main`` shared, and drops ``gate``; a writer takes both exclusive. A writer holds
``gate`` while it waits for ``main``, so readers cannot starve it. LMDB's own locking is off: it names readers by
process id, which two containers share. The kernel drops the flocks of dead processes.

Threads of one process share the two descriptors, so only the index thread (``kvfs.system.worker``) uses the gate.
"""

from __future__ import annotations

import fcntl
import os

from kvfs.directory.root import Directory
from kvfs.errors import IndexUnavailableError
from kvfs.system.descriptors import Descriptor

POLL_SECONDS = 75e-6  # fixed: exponential back-off measured 30 times worse


class Gate:
    """Owns the descriptors of the two lock files. ``acquire`` has a deadline and never blocks in the kernel."""

    def __init__(self, directory: Directory) -> None:
        self._files = directory.files
        self._root = directory.root
        self._flags = os.O_RDONLY if directory.read_only else os.O_RDWR
        self._fds: dict[str, Descriptor] = {}
        self._inodes: dict[str, int] = {}  # of what is open
        try:
            for name in ("gate", "main"):
                self._fd(name)
        except OSError:
            self.close()
            raise
        self.held = False

    def _fd(self, name: str) -> int:
        if name not in self._fds:
            file = Descriptor.open(self._files, name, self._flags, dir_fd=self._root)
            try:
                self._inodes[name] = self._files.fstat(file.fd).st_ino
            except OSError:
                file.close()
                raise
            self._fds[name] = file
        return self._fds[name].fd

    def acquire(self, *, exclusive: bool, deadline: float) -> None:
        """Raises IndexUnavailableError ("timeout") after ``deadline`` (monotonic seconds) and holds no lock then."""
        assert not self.held, "gate acquired twice"
        kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        try:
            self._lock("gate", kind, deadline)
            self._lock("main", kind, deadline)
            self.held = True
            if not exclusive:
                self._unlock("gate")
            if not self._in_place():
                raise IndexUnavailableError("the store's lock files were replaced: the directory was removed")
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Never fails, and never leaves a lock behind."""
        self.held = False
        self._unlock("main")
        self._unlock("gate")

    def _lock(self, name: str, kind: int, deadline: float) -> None:
        fd = self._fd(name)
        while not self._files.flock(fd, kind):
            if self._files.monotonic() >= deadline:
                raise IndexUnavailableError("timeout")
            self._files.sleep(POLL_SECONDS)

    def _unlock(self, name: str) -> None:
        file = self._fds.get(name)
        if file is None:
            return
        try:
            self._files.flock(file.fd, fcntl.LOCK_UN)
        except OSError:  # closing also releases the lock; the next acquire opens the file again
            self._fds.pop(name).close()

    def _in_place(self) -> bool:
        """Whether the paths still name the locked files: a lock on a replaced file excludes no other process."""
        try:
            return all(
                self._files.stat(name, dir_fd=self._root).st_ino == inode for name, inode in self._inodes.items()
            )
        except OSError:
            return False

    def close(self) -> None:
        """Close the descriptors. In a forked child this leaves the parent's locks in place."""
        for file in self._fds.values():
            file.close()
        self._fds.clear()
