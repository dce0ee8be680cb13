"""When an index generation is trusted after a restart or a crash: its file ``state``, and what is compared with it.

``state`` says for which boot, device and inode a generation was made dirty, or that it was closed cleanly. A
generation is trusted if it was closed cleanly, or if it is dirty, of this boot, on the same device and inode, and
another process uses it now.
"""

from __future__ import annotations

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


def trusted_state(directory: Directory, name: str, fd: int, *, alone: bool, boot: str) -> State:
    """The state of the generation ``name`` with the open index file ``fd``; OSError if it must not be trusted.

    ``alone``: no other process uses the generation.
    """
    data = directory.files.fstat(fd)
    state = read_state(directory)
    same = state is not None and (state.generation, state.device, state.inode) == (name, data.st_dev, data.st_ino)
    same = same and data.st_nlink == 1  # two names: a copy by hard links
    if not same or state is None or not (state.clean or (not alone and state.boot == boot)):
        raise OSError("dirty index of another boot or of dead processes")
    return state


def trust_version(directory: Directory) -> tuple[object, ...]:
    """Changes whenever the answer to whether an index may be trusted can change."""
    return file_version(directory, "CURRENT", directory.sub("index")), file_version(directory, "state", directory.root)


def file_version(directory: Directory, name: str, folder: int) -> tuple[int, ...] | None:
    """Identity of a small file that is only ever replaced; None if there is none."""
    try:
        st = directory.files.stat(name, dir_fd=folder)
    except OSError:
        return None
    return st.st_dev, st.st_ino, st.st_mtime_ns, st.st_ctime_ns
