"""What ``mode`` of kvfs.toml means: all other code asks a :class:`Mode`.

A process keeps the mode that the store had when the process opened it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from typing import NamedTuple

from kvfs.directory.config import Settings
from kvfs.directory.root import filesystem_of
from kvfs.errors import ConfigError
from kvfs.format import segment as fmt
from kvfs.system import direct_io
from kvfs.system.descriptors import Descriptor
from kvfs.system.files import Files

MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs"})
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT)


class Mode(NamedTuple):
    """How payload is read and written. Tables are small, and always go through the page cache."""

    name: str
    direct: bool = False  # O_DIRECT for all payload: the page cache holds none of it
    cold_direct: bool = False  # O_DIRECT for pages that are not in the page cache and were never used
    maps: bool = True  # segments are mapped: views, registered maps, reading ahead

    @property
    def segment_flags(self) -> int:
        """Flags in the header of a new segment. All of a segment is written in the same way."""
        return fmt.FLAG_DIRECT if self.direct else 0

    def check_maps(self, what: str, instead: str) -> None:
        """ConfigError in a mode that maps no segments, since a map reads them into the page cache."""
        if not self.maps:
            raise ConfigError(
                f'{what} needs pages in the page cache, and mode "{self.name}" of this store keeps them out: '
                f"{instead}, or set another mode (kvfs config set mode cache)"
            )


CACHE = Mode("cache", cold_direct=True)
STAGING = Mode("staging", direct=True, maps=False)
MEMORY = Mode("memory")
_MODES = {mode.name: mode for mode in (CACHE, STAGING, MEMORY)}


def of(settings: Settings) -> Mode:
    """The mode of a store."""
    return _MODES[settings.mode]


def check(path: str, settings: Settings, files: Files, *, read_only: bool = False) -> None:
    """ConfigError if the file system of ``path`` does not support the mode. Leaves no file behind.

    If ``path`` does not exist yet, its parent is checked.
    """
    where = path if os.path.isdir(path) else os.path.dirname(os.path.abspath(path))
    mode = of(settings)
    if mode is CACHE or not os.path.isdir(where):
        return
    kind = filesystem_of(where)
    in_memory = kind in MEMORY_FILESYSTEMS
    instead = 'or choose mode "cache"'
    if os.path.lexists(os.path.join(path, "super")):  # there is a store to be set
        instead += " (kvfs config set mode cache)"
    if mode is MEMORY and not in_memory:
        raise ConfigError(
            f'mode is "memory", and {path} is on {kind or "an unknown file system"}: put the store on '
            f"tmpfs (below /dev/shm, or mount one), {instead}"
        )
    if mode is STAGING:
        if in_memory:
            why = f"is on {kind}, which is memory itself"
        elif mmap.PAGESIZE != fmt.BLOCK:
            why = f"is on a host with memory pages of {mmap.PAGESIZE} bytes, not {fmt.BLOCK}"
        elif not _takes_direct(where, files, read_only):
            why = f"is on {kind or 'a file system'} that refuses O_DIRECT or ignores it"
        else:
            return
        raise ConfigError(f'mode is "staging", and {path} {why}: put the store on a local disk (ext4, xfs), {instead}')


def _takes_direct(where: str, files: Files, read_only: bool) -> bool:
    """Whether a block can be written and read with O_DIRECT. Other errors of the disk do not count."""
    root = files.open_root(where)
    try:
        file = _existing(files, root) if read_only else _unnamed(files, root)
        try:
            block = direct_io.aligned(fmt.BLOCK)
            if not read_only:
                block[:8] = files.random(8)
                direct_io.write(files, file.fd, [block], 0)
            files.preadv(file.fd, [block], 0)
            if not read_only and files.cached_bytes(file.fd, 0, fmt.BLOCK):
                return False  # the flag is accepted, and ignored
        finally:
            file.close()
    except OSError as exc:
        return exc.errno != errno.EINVAL
    finally:
        with contextlib.suppress(OSError):
            files.close(root)
    return True


def _existing(files: Files, root: int) -> Descriptor:
    return Descriptor.open(files, "super", os.O_RDONLY | os.O_DIRECT, dir_fd=root)


def _unnamed(files: Files, root: int) -> Descriptor:
    """A new file without a name, opened with O_DIRECT."""
    try:
        return Descriptor.open(files, ".", os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, dir_fd=root)
    except OSError as exc:
        if exc.errno not in _NO_TMPFILE:
            raise
    name = f".super.{files.random(8).hex()}"  # a name that is allowed in the directory of a new store
    try:
        return Descriptor.open(files, name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_DIRECT, dir_fd=root)
    finally:
        with contextlib.suppress(OSError):
            files.unlink(name, dir_fd=root)
