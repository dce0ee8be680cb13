"""Opening and removing LMDB environments, and beginning their transactions.

LMDB opens files by path and follows links, so it gets a path that names an open descriptor.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import Any

import lmdb

from kvfs.directory.root import Directory
from kvfs.index.session import Tables
from kvfs.system.descriptors import opened
from kvfs.system.files import Files

PAGE = min(mmap.PAGESIZE, 32 << 10)  # LMDB's: that of the kernel, up to 32 KiB
SLACK_BYTES = 8 << 20  # allocated ahead, for the commits of an eviction on a full disk
_DATABASES = (b"pages", b"segments", b"namespaces", b"meta")


def open_environment(fd: int, map_size: int, *, read_only: bool = False) -> lmdb.Environment:
    """Open the environment in the file ``fd``, which may be empty: no LMDB locks, no writable map, no syncs in commits.

    LMDB opens the file again, so the caller may close ``fd``.
    """
    return lmdb.open(
        f"/proc/self/fd/{fd}", map_size=map_size, subdir=False, readonly=read_only, metasync=False, sync=False,
        create=False, readahead=False, writemap=False, max_dbs=len(_DATABASES), max_spare_txns=1, lock=False,
        lib_version=0,
    )  # fmt: skip


def begin(env: lmdb.Environment, *, write: bool) -> Any:
    """Begin a transaction. A process with a larger map may have grown the index beyond the map of this one."""
    try:
        return env.begin(write=write)
    except lmdb.MapResizedError:
        env.set_mapsize(0)  # adopts the size in the file
        return env.begin(write=write)


def discard_generation(files: Files, index: int, name: str) -> None:
    """Remove a generation, or any other file of its name, from the directory ``index``. Errors are ignored.

    Its blocks become free at once, although a process that is stopped may still map it. No transaction uses it, and
    none begins on a generation that is not current.
    """
    with (
        contextlib.suppress(OSError),
        opened(files, name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=index) as folder,
        opened(files, "data.mdb", os.O_RDWR, dir_fd=folder) as fd,
    ):
        if files.fstat(fd).st_nlink == 1:  # else the content belongs to another directory, too
            files.truncate(fd, 0)
    with contextlib.suppress(OSError, RecursionError):
        _remove(files, name, index)


def _remove(files: Files, name: str, folder: int) -> None:
    """Remove a file, or a directory with its content. Links are not followed."""
    try:
        files.unlink(name, dir_fd=folder)
    except IsADirectoryError:
        with opened(files, name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=folder) as fd:
            for entry in files.listdir(fd):
                _remove(files, entry, fd)
        files.rmdir(name, dir_fd=folder)


def check_size(env: lmdb.Environment, files: Files, fd: int) -> None:
    """Raise CorruptedError if the file ends before its last page. LMDB would read behind the end: a SIGBUS."""
    size = files.fstat(fd).st_size
    if size < 2 * PAGE or size < _bytes_of(env):  # the first two pages say how many there are
        raise lmdb.CorruptedError("the index file was truncated")


def extend_to_last_page(env: lmdb.Environment, files: Files, fd: int) -> None:
    """After a commit: LMDB does not write pages that one transaction allocates and frees."""
    if files.fstat(fd).st_size < (nbytes := _bytes_of(env)):
        files.truncate(fd, nbytes)


def _bytes_of(env: lmdb.Environment) -> int:
    return (int(env.info()["last_pgno"]) + 1) * PAGE


def open_tables(env: lmdb.Environment, *, create: bool) -> Tables:
    """Handles of the named databases. The exclusive gate is held, or no other process knows the environment."""
    return Tables(*(env.open_db(name, create=create) for name in _DATABASES))


def keep_slack(directory: Directory, generation: str, map_size: int) -> None:
    """Allocate blocks ahead of the index file's end, so that eviction can commit on a full disk.

    Up to SLACK_BYTES behind the end of a generation's file. OSError if the disk has no room.
    """
    files = directory.files
    folder = files.open(generation, os.O_RDONLY | os.O_DIRECTORY, dir_fd=directory.sub("index"))
    with contextlib.ExitStack() as stack:
        stack.callback(files.close, folder)
        fd = files.open("data.mdb", os.O_RDWR, dir_fd=folder)
        stack.callback(files.close, fd)
        st = files.fstat(fd)
        wanted = min(map_size, st.st_size + SLACK_BYTES)
        if st.st_blocks * 512 < min(wanted, st.st_size + SLACK_BYTES // 2):
            files.fallocate(fd, 0, wanted, keep_size=True)
