"""Opening and removing LMDB environments, and beginning their transactions."""

from __future__ import annotations

import contextlib
import os
import stat
from typing import Any

import lmdb

from kvfs.index.session import Tables

_DATABASES = (b"pages", b"segments", b"namespaces", b"meta")


def open_environment(path: str, map_size: int, mode: int, *, read_only: bool = False) -> lmdb.Environment:
    """Open an environment without LMDB's locks, without a writable map and without syncs in commits."""
    return lmdb.open(
        os.fsencode(path), map_size=map_size, subdir=True, readonly=read_only, metasync=False, sync=False, mode=mode,
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


def discard_generation(path: str) -> None:
    """Remove a generation, or any other file of its name. Errors are ignored."""
    with contextlib.suppress(OSError):
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)  # rmtree would wait for a writer of a fifo
        else:
            from shutil import rmtree  # rarely needed, and it imports three compression libraries

            rmtree(path, ignore_errors=True)


def open_tables(env: lmdb.Environment, *, create: bool) -> Tables:
    """Handles of the named databases. The exclusive gate is held, or no other process knows the environment."""
    return Tables(*(env.open_db(name, create=create) for name in _DATABASES))
