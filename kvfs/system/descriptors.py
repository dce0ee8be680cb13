"""Open files with an owner: when the owner ends, even by an interrupt, the descriptor is closed and its locks released.

Python runs signal handlers between bytecodes, so a handler that raises can strike between a system call and the
statement that stores its result. Here the C call that opens a file (``Files.open`` with ``keep``) also stores the
descriptor, in a list that a ``Descriptor`` already owns, and the C call that closes it removes it from that list. An
interrupt at the start of ``__del__`` skips the close; ``sweep`` closes such descriptors later.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator

from kvfs.system.files import Files

#: id of a list -> (its owner, the list, what closes it). A forked child inherits all of them from its parent.
_KEPT: dict[int, tuple[weakref.ref[Descriptor], list[int | None], Files]] = {}


class Descriptor:
    """Owns one open file. Closed with ``close``, or with its last reference."""

    __slots__ = ("__weakref__", "_files", "_kept")

    def __init__(self, files: Files) -> None:
        self._files = files
        self._kept: list[int | None] = [None]
        _KEPT[id(self._kept)] = (weakref.ref(self), self._kept, files)

    @classmethod
    def open(cls, files: Files, name: str, flags: int, *, dir_fd: int) -> Descriptor:
        made = cls(files)
        files.open(name, flags, dir_fd=dir_fd, keep=made._kept)
        return made

    @classmethod
    def open_unstamped(cls, files: Files, name: str, *, dir_fd: int) -> Descriptor:
        """Open for reads that must not wait, so without access times: to note one is a write to the file system's
        journal, for which even a read with RWF_NOWAIT waits.

        Only the file's owner and root may ask for that. For another member of the store's group a disk that hangs may
        hang such a read.
        """
        try:
            return cls.open(files, name, os.O_RDONLY | os.O_NOATIME, dir_fd=dir_fd)
        except PermissionError:
            return cls.open(files, name, os.O_RDONLY, dir_fd=dir_fd)

    @classmethod
    def create(cls, files: Files, name: str, mode: int, *, dir_fd: int) -> Descriptor:
        made = cls(files)
        files.create(name, mode, dir_fd=dir_fd, keep=made._kept)
        return made

    @classmethod
    def reopen(cls, files: Files, fd: int, flags: int) -> Descriptor:
        """Open the file of an open descriptor again, with other flags."""
        made = cls(files)
        files.reopen(fd, flags, made._kept)
        return made

    @classmethod
    def owning(cls, files: Files, fd: int) -> Descriptor:
        """Take over a descriptor that another call has opened."""
        made = cls(files)
        made._kept.append(fd)
        return made

    @property
    def fd(self) -> int:
        """Negative when closed, which makes every call on it an OSError."""
        return self._kept[-1] if self._kept and self._kept[-1] is not None else -1

    def close(self) -> None:
        """Never fails. Further calls do nothing."""
        if self.fd >= 0:
            with contextlib.suppress(OSError, IndexError):  # of two threads at once, the second finds nothing
                self._close()
        _KEPT.pop(id(self._kept), None)

    def _close(self) -> None:
        self._files.close_kept(self._kept)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, TypeError):  # the interpreter is ending, modules are unloaded
            self.close()


@contextlib.contextmanager
def opened(files: Files, name: str, flags: int, *, dir_fd: int) -> Iterator[int]:
    """Open a file for the length of a ``with`` block; gives its descriptor."""
    file = Descriptor.open(files, name, flags, dir_fd=dir_fd)
    try:
        yield file.fd
    finally:
        file.close()


def sweep() -> int:
    """Close descriptors whose owner was lost to an interrupt; how many. For a thread other than the main one."""
    closed = 0
    for key, (owner, kept, files) in list(_KEPT.items()):
        if owner() is None:
            if len(kept) > 1:
                with contextlib.suppress(OSError):
                    files.close_kept(kept)
                closed += 1
            _KEPT.pop(key, None)
    return closed


def _close_inherited() -> None:
    """In a forked child: close the parent's files. Closing does not release the parent's locks."""
    for _, kept, _ in list(_KEPT.values()):
        while len(kept) > 1:
            with contextlib.suppress(OSError):
                os.close(kept.pop() or 0)
    _KEPT.clear()


os.register_at_fork(after_in_child=_close_inherited)
