"""Open files that have an owner: whatever ends it, an interrupt included, the descriptor and its locks go with it.

Python runs signal handlers between bytecodes, so a handler that raises can strike between a system call and the
statement that keeps its result. Here a descriptor is kept by the same C call that opens it (``Files.open`` with
``keep``), in a list that a ``Descriptor`` owns already; and it leaves that list in the same C call that closes it. An
interrupt as ``__del__`` begins skips it; ``sweep`` makes up for that.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator

from kvfs.system.files import Files

#: id of a list -> (its owner, the list, how to close). In a forked child all of them are the parent's.
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
    def create(cls, files: Files, name: str, mode: int, *, dir_fd: int) -> Descriptor:
        made = cls(files)
        files.create(name, mode, dir_fd=dir_fd, keep=made._kept)
        return made

    @classmethod
    def reopen(cls, files: Files, fd: int, flags: int) -> Descriptor:
        """The file of an open descriptor once more, with other flags."""
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
        """Never fails. Once closed, nothing happens."""
        if self.fd >= 0:
            with contextlib.suppress(OSError, IndexError):  # two threads at once: the second one finds nothing
                self._files.close_kept(self._kept)
        _KEPT.pop(id(self._kept), None)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, TypeError):  # the interpreter is ending, modules are gone
            self.close()


@contextlib.contextmanager
def opened(files: Files, name: str, flags: int, *, dir_fd: int) -> Iterator[int]:
    """A file for the length of a block."""
    file = Descriptor.open(files, name, flags, dir_fd=dir_fd)
    try:
        yield file.fd
    finally:
        file.close()


def sweep() -> int:
    """Close what lost its owner to an interrupt; how many. For a thread that no signal handler runs in."""
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
    """In a forked child: the parent's files, with the parent's locks; closing leaves these alone."""
    for _, kept, _ in list(_KEPT.values()):
        while len(kept) > 1:
            with contextlib.suppress(OSError):
                os.close(kept.pop() or 0)
    _KEPT.clear()


os.register_at_fork(after_in_child=_close_inherited)
