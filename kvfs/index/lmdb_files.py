"""LMDB environments as kvfs makes, opens and removes them."""

from __future__ import annotations

import contextlib
import os
import stat
from typing import Any

import lmdb

from kvfs.index.session import Tables

_DATABASES = (b"pages", b"segments", b"namespaces", b"meta")


def open_environment(path: str, map_size: int, mode: int, *, read_only: bool = False) -> lmdb.Environment:
    """LMDB as kvfs uses it everywhere: no locking of its own, no writable map, no sync in the commit."""
    return lmdb.open(
        os.fsencode(path), map_size=map_size, subdir=True, readonly=read_only, metasync=False, sync=False, mode=mode,
        create=False, readahead=False, writemap=False, max_dbs=len(_DATABASES), max_spare_txns=1, lock=False,
        lib_version=0,
    )  # fmt: skip


def begin(env: lmdb.Environment, *, write: bool) -> Any:
    """A transaction. Who opened the index with more bytes than this process may have made it larger than its map."""
    try:
        return env.begin(write=write)
    except lmdb.MapResizedError:
        env.set_mapsize(0)  # that of the others
        return env.begin(write=write)


def discard_generation(path: str) -> None:
    """Remove a generation, or whatever else bears its name; as far as that can be done."""
    with contextlib.suppress(OSError):
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)  # rmtree would wait for a writer of a fifo
        else:
            from shutil import rmtree  # seldom needed, and it brings three compression libraries

            rmtree(path, ignore_errors=True)


def open_tables(env: lmdb.Environment, *, create: bool) -> Tables:
    """Handles of the named databases; the exclusive gate is held, or nobody else knows the environment."""
    return Tables(*(env.open_db(name, create=create) for name in _DATABASES))
