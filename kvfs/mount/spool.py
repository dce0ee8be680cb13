"""Unnamed files of a mount: what is being written, and verified copies of what is open. Bounded.

They have no name, so a process that dies leaves none behind. Their bytes are on the store's file system and do not
count for its capacity: ``limit_bytes`` bounds them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections import OrderedDict

IDLE_MAX = 1024  # copies that are kept without use: each takes a descriptor
#: Emptied drafts that are kept for the next ones: ext4 is slow to make files where it has just removed some.
EMPTY_MAX = 16
EMPTIED_BYTES_MAX = 1 << 20  # a larger draft costs more to fill than to make


class SpoolFile:
    """An unnamed file, and the bytes that it may have. Closed by ``Spool.release``."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.reserved = 0
        self.size = 0
        #: The kernel reads it by itself. A map outlives the open file, and nothing tells when it ends: the bytes stay.
        self.passed = False

    def read(self, size: int, offset: int) -> bytes:
        return os.pread(self.fd, min(size, max(0, self.size - offset)), offset)


class Spool:
    """Owns the unnamed files of one mount. Copies that are not in use are kept, and released as room is needed."""

    def __init__(self, folder: str, limit_bytes: int) -> None:
        self._folder = folder
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._used = 0
        self._idle: OrderedDict[object, SpoolFile] = OrderedDict()
        self._empty: list[int] = []  # descriptors

    def create(self, nbytes: int = 0) -> SpoolFile:
        """A file with room for ``nbytes``. OSError ENOSPC if there is none."""
        with self._lock:
            fd = self._empty.pop() if self._empty else -1
        file = SpoolFile(fd if fd >= 0 else _unnamed(self._folder))
        try:
            self.resize(file, nbytes)
        except BaseException:
            self.release(file)
            raise
        return file

    def resize(self, file: SpoolFile, nbytes: int) -> None:
        """Let ``file`` have ``nbytes``; OSError ENOSPC if that is too much, for the spool or the file system."""
        dropped: list[SpoolFile] = []
        with self._lock:
            more = nbytes - file.reserved
            while self._used + more > self.limit_bytes and self._idle:
                dropped.append(self._idle.popitem(last=False)[1])
                self._used -= dropped[-1].reserved
            full = more > 0 and self._used + more > self.limit_bytes
            if not full:
                self._used += more
                file.reserved = nbytes
        for old in dropped:
            os.close(old.fd)
        if full:
            raise OSError(errno.ENOSPC, f"files that are open or being written would exceed {self.limit_bytes} bytes")

    def write(self, file: SpoolFile, data: memoryview, offset: int) -> None:
        """Write all of ``data``. OSError."""
        end = offset + len(data)
        if end > file.reserved:
            self.resize(file, end)
        while data:
            n = os.pwrite(file.fd, data, offset)
            data, offset = data[n:], offset + n
        file.size = max(file.size, end)

    def truncate(self, file: SpoolFile, nbytes: int) -> None:
        self.resize(file, nbytes)
        os.ftruncate(file.fd, nbytes)
        file.size = nbytes

    def keep(self, key: object, file: SpoolFile) -> None:
        """Keep a copy that is not in use now, until ``take`` or until its room is needed."""
        with self._lock:
            dropped = [self._idle.pop(key, None)]
            self._idle[key] = file
            if len(self._idle) > IDLE_MAX:
                dropped.append(self._idle.popitem(last=False)[1])
        for old in dropped:
            if old is not None:
                self.release(old)

    def take(self, key: object) -> SpoolFile | None:
        """The copy that was kept under ``key``, if it still exists; it is in use from now on."""
        with self._lock:
            return self._idle.pop(key, None)

    def release(self, file: SpoolFile) -> None:
        with self._lock:
            self._used -= file.reserved
            file.reserved = 0
        os.close(file.fd)

    def release_draft(self, file: SpoolFile) -> None:
        """Release a file that only this process has read: it may be emptied and reused for another draft."""
        if file.passed or file.size > EMPTIED_BYTES_MAX or len(self._empty) >= EMPTY_MAX:
            self.release(file)
            return
        try:
            os.ftruncate(file.fd, 0)
        except OSError:
            self.release(file)
            return
        with self._lock:
            self._used -= file.reserved
            file.reserved = 0
            self._empty.append(file.fd)

    def used_bytes(self) -> int:
        with self._lock:
            return self._used

    def close(self) -> None:
        with self._lock:
            idle, self._idle = list(self._idle.values()), OrderedDict()
            empty, self._empty = self._empty, []
        for file in idle:
            self.release(file)
        for fd in empty:
            os.close(fd)


def _unnamed(folder: str) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        if exc.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    name = os.path.join(folder, f".{os.urandom(8).hex()}")  # a file system without O_TMPFILE
    fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(OSError):
        os.unlink(name)
    return fd
