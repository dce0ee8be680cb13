"""What a file system of a mount does, one method per request; every call may raise OSError with the errno to report."""

from __future__ import annotations

import errno
import os
from collections.abc import Generator, Sequence
from typing import NoReturn

from kvfs.mount.wire import Attr, Caller, DirectoryItem, Entry, Opened, SetAttr, Usage


def fail(number: int) -> NoReturn:
    raise OSError(number, os.strerror(number))


class Operations:
    """The calls of a file system by node numbers, as the kernel makes them. Thread-safe; here, all are refused."""

    def lookup(self, parent: int, name: bytes) -> Entry:
        fail(errno.ENOENT)

    def forget(self, node: int, lookups: int) -> None:
        """The kernel dropped ``lookups`` of the references that replies with this node gave it."""

    def getattr(self, node: int, handle: int | None) -> tuple[Attr, float]:
        """Attributes, and for how many seconds the kernel may trust them."""
        fail(errno.ENOENT)

    def setattr(self, node: int, change: SetAttr) -> tuple[Attr, float]:
        fail(errno.EPERM)

    def mkdir(self, parent: int, name: bytes, mode: int, caller: Caller) -> Entry:
        fail(errno.EPERM)

    def unlink(self, parent: int, name: bytes) -> None:
        fail(errno.EPERM)

    def rmdir(self, parent: int, name: bytes) -> None:
        fail(errno.EPERM)

    def rename(self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int) -> None:
        fail(errno.EPERM)

    def open(self, node: int, flags: int) -> Opened:
        fail(errno.EPERM)

    def create(self, parent: int, name: bytes, flags: int, mode: int, caller: Caller) -> tuple[Entry, Opened]:
        fail(errno.EPERM)

    def read(self, handle: int, size: int, offset: int) -> bytes | memoryview:
        """At most ``size`` bytes; fewer only at the end of the file."""
        fail(errno.EBADF)

    def write(self, handle: int, data: memoryview, offset: int) -> int:
        """``data`` is valid during the call only."""
        fail(errno.EBADF)

    def flush(self, handle: int) -> None:
        """A process closed one of its descriptors of the handle; the error is what ``close`` returns."""

    def release(self, handle: int) -> None:
        """The last descriptor and the last map of the handle are gone."""

    def fsync(self, handle: int) -> None:
        """Called for files and directories."""

    def entries(self, node: int) -> list[DirectoryItem]:
        """The names of a directory; ``listed`` tells which are there."""
        fail(errno.ENOTDIR)

    def listed(
        self, node: int, items: Sequence[DirectoryItem], *, attributes: bool
    ) -> Generator[tuple[bool, Entry | None], None, None]:
        """For each of the names whether it is there, and with ``attributes`` its entry, if that costs little.

        Looked up as the generator goes on, which the caller closes. Each entry is a reference, as one of ``lookup`` is.
        """
        fail(errno.ENOTDIR)

    def usage(self) -> Usage:
        fail(errno.ENOSYS)

    def getxattr(self, node: int, name: bytes) -> bytes:
        fail(errno.ENODATA)

    def listxattr(self, node: int) -> list[bytes]:
        return []

    def setxattr(self, node: int, name: bytes, value: bytes) -> None:
        fail(errno.EOPNOTSUPP)

    def removexattr(self, node: int, name: bytes) -> None:
        fail(errno.EOPNOTSUPP)
