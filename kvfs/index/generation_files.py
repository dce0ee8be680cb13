"""Files of an index generation other than LMDB's tables: ``state``, and blocks allocated ahead of the index file's end.

``state`` says for which boot, device and inode a generation was made dirty, or that it was closed cleanly.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from typing import NamedTuple

import xxhash

from kvfs.directory.root import Directory
from kvfs.system.descriptors import opened
from kvfs.system.files import SHORT_OF, Files

CHECKED_BYTES_MAX = 256 << 20  # of an index with a checksum: that much is read in about 0.1 s from the page cache
PIECE_BYTES = 1 << 20  # read at once for a checksum
SLACK_BYTES = 8 << 20  # allocated ahead, for the commits of an eviction on a full disk


class State(NamedTuple):
    """Content of the file ``state``."""

    generation: str
    boot: str
    device: int
    inode: int
    clean: bool
    checksum: str = ""  # of a clean index's file, in hex; empty: unknown


def checksum_of(files: Files, fd: int) -> str:
    """XXH3-64 of a whole file; empty above CHECKED_BYTES_MAX."""
    size, digest = files.fstat(fd).st_size, xxhash.xxh3_64()
    if size > CHECKED_BYTES_MAX:
        return ""
    piece = memoryview(bytearray(PIECE_BYTES))
    for offset in range(0, size, PIECE_BYTES):
        files.read_into(fd, piece[: size - offset], offset)
        digest.update(piece[: size - offset])
    return digest.hexdigest()


def read_state(directory: Directory) -> State | None:
    """None if it is damaged or absent. OSError if this process lacks descriptors or memory to read it."""
    try:
        data = directory.read_small("state", 4096)
        if data is None:
            return None
        body = json.loads(data)
        state = State(*(body.get(name, "") for name in State._fields))
    except Exception as exc:  # damaged state means: do not trust the index
        if getattr(exc, "errno", None) in SHORT_OF:
            raise
        return None
    kinds = (str, str, int, int, bool, str)
    return state if all(type(v) is k for v, k in zip(state, kinds, strict=True)) else None


def write_state(directory: Directory, state: State) -> None:
    """Replace the file, durably. On a full disk the old one is overwritten in place.

    A torn overwrite is damaged, or names no existing generation, so the index is not trusted. A generation is synced
    before it is called clean.
    """
    data = json.dumps(state._asdict()).encode() + b"\n"
    try:
        directory.write_small("state", data)
    except OSError as exc:
        if exc.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        with opened(directory.files, "state", os.O_RDWR, dir_fd=directory.root) as fd:
            size = directory.files.fstat(fd).st_size
            directory.files.write_all(fd, [data.ljust(size)], 0)
            directory.files.fsync(fd)


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
