"""Requests of the kernel's FUSE driver and the replies to them, as bytes. No I/O.

Source of all numbers and layouts: include/uapi/linux/fuse.h of Linux 6.9 (protocol 7.40, the first with passthrough).
They are an ABI: later kernels only append. All integers are of the host's byte order; structs have no hidden padding.
"""

from __future__ import annotations

import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from typing import NamedTuple

MAJOR, MINOR = 7, 40
MINOR_MIN = 31  # Linux 5.4: the oldest whose structs these are
ROOT_ID = 1
NAME_BYTES_MAX = 255
PAGE_BYTES = 4096


class Op(IntEnum):
    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    SETXATTR = 21
    GETXATTR = 22
    LISTXATTR = 23
    REMOVEXATTR = 24
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    CREATE = 35
    INTERRUPT = 36
    DESTROY = 38
    BATCH_FORGET = 42
    READDIRPLUS = 44
    RENAME2 = 45


class Init(IntFlag):
    """What the two sides can do."""

    ASYNC_READ = 1 << 0
    ATOMIC_O_TRUNC = 1 << 3
    BIG_WRITES = 1 << 5
    READDIRPLUS = 1 << 13
    READDIRPLUS_AUTO = 1 << 14
    PARALLEL_DIROPS = 1 << 18
    MAX_PAGES = 1 << 22
    EXPLICIT_INVAL_DATA = 1 << 25
    HANDLE_KILLPRIV_V2 = 1 << 28
    INIT_EXT = 1 << 30
    PASSTHROUGH = 1 << 37


class OpenFlag(IntFlag):
    """How the kernel treats an open file."""

    NONE = 0
    DIRECT_IO = 1 << 0
    KEEP_CACHE = 1 << 1
    NOFLUSH = 1 << 5
    PASSTHROUGH = 1 << 7


class Set(IntFlag):
    """Which attributes a SETATTR changes."""

    MODE = 1 << 0
    UID = 1 << 1
    GID = 1 << 2
    SIZE = 1 << 3
    ATIME = 1 << 4
    MTIME = 1 << 5
    FH = 1 << 6
    ATIME_NOW = 1 << 7
    MTIME_NOW = 1 << 8


HEADER = struct.Struct("=IIQQIIIHH")  # length, opcode, unique, node, uid, gid, pid, extensions, -
REPLY = struct.Struct("=IiQ")  # length, error, unique
ATTR = struct.Struct("=6Q10I")
ENTRY = struct.Struct("=4Q2I")
ENTRY_BYTES = ENTRY.size + ATTR.size
ATTR_REPLY = struct.Struct("=QII")
OPEN_REPLY = struct.Struct("=QIi")
INIT_IN = struct.Struct("=4I")
INIT_REPLY = struct.Struct("=4I2H2I2H2I6I")
STATFS_REPLY = struct.Struct("=5Q4I24x")
DIRENT = struct.Struct("=QQII")
GETATTR_IN = struct.Struct("=IIQ")
SETATTR_IN = struct.Struct("=IIQQQQQQIIIIIIII")
READ_IN = struct.Struct("=QQIIQII")
WRITE_IN = READ_IN
RELEASE_IN = struct.Struct("=QIIQ")
FLUSH_IN = struct.Struct("=QIIQ")
FSYNC_IN = struct.Struct("=QII")
PAIR_IN = struct.Struct("=II")  # OPEN, MKDIR, GETXATTR, SETXATTR
CREATE_IN = struct.Struct("=IIII")
FORGET_ONE = struct.Struct("=QQ")
RENAME_IN = struct.Struct("=Q")
RENAME2_IN = struct.Struct("=QII")
BACKING_MAP = struct.Struct("=iIQ")
IOC_BACKING_OPEN = 1 << 30 | BACKING_MAP.size << 16 | 229 << 8 | 1
IOC_BACKING_CLOSE = 1 << 30 | 4 << 16 | 229 << 8 | 2


class Caller(NamedTuple):
    """The process that made a system call."""

    uid: int
    gid: int


@dataclass
class Attr:
    """What ``stat`` shows. Times in nanoseconds since 1970."""

    ino: int
    mode: int
    size: int = 0
    nlink: int = 1
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    atime_ns: int = 0
    ctime_ns: int = 0
    blocks: int = field(default=-1)  # of 512 bytes; -1: what the size takes

    def pack(self) -> bytes:
        times = [divmod(ns, 10**9) for ns in (self.atime_ns, self.mtime_ns, self.ctime_ns)]
        blocks = -(-self.size // 512) if self.blocks < 0 else self.blocks
        return ATTR.pack(
            self.ino, self.size, blocks, *(s for s, _ in times), *(ns for _, ns in times), self.mode, self.nlink,
            self.uid, self.gid, 0, PAGE_BYTES, 0,
        )  # fmt: skip

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.mode)


@dataclass
class Entry:
    """A name that exists: its node, and for how long the kernel may trust name and attributes (seconds)."""

    node: int
    attr: Attr
    seconds: float = 0.0

    def pack(self) -> bytes:
        whole, rest = _seconds(self.seconds)
        return ENTRY.pack(self.node, 0, whole, whole, rest, rest) + self.attr.pack()


@dataclass
class Opened:
    """An open file. ``backing``: descriptor of a file from which the kernel itself may serve every read, or -1."""

    handle: int
    flags: OpenFlag = OpenFlag.NONE
    backing: int = -1


class Usage(NamedTuple):
    """What ``statfs`` shows, in bytes and files."""

    total_bytes: int
    free_bytes: int
    files: int
    free_files: int


class DirectoryItem(NamedTuple):
    name: bytes
    ino: int
    mode: int


class SetAttr(NamedTuple):
    """A change of attributes; None: stays."""

    handle: int | None
    size: int | None
    mode: int | None
    uid: int | None
    gid: int | None
    atime_ns: int | None
    mtime_ns: int | None


class Request(NamedTuple):
    """One request of the kernel. ``body`` is a view of the receiver's buffer: valid until the reply."""

    op: int
    unique: int
    node: int
    caller: Caller
    body: memoryview


class ProtocolError(Exception):
    """The kernel sent what this version does not understand: a bug, or another driver."""


def parse(data: memoryview) -> Request:
    """The request in ``data``. ProtocolError if it is cut."""
    if len(data) < HEADER.size:
        raise ProtocolError(f"a request of {len(data)} bytes")
    length, op, unique, node, uid, gid, _, extensions, _ = HEADER.unpack_from(data)
    if length != len(data) or extensions * 8 > length - HEADER.size:
        raise ProtocolError(f"a request of {len(data)} bytes says that it has {length}")
    return Request(op, unique, node, Caller(uid, gid), data[HEADER.size : length - extensions * 8])


def names(body: memoryview, count: int) -> list[bytes]:
    """The first ``count`` names in ``body``, each ended by a zero byte."""
    found = bytes(body).split(b"\0", count)
    if len(found) <= count:
        raise ProtocolError(f"{len(found) - 1} names where {count} are expected")
    return found[:count]


def parse_setattr(body: memoryview, now_ns: int) -> SetAttr:
    (valid, _, handle, size, _, atime, mtime, _, atime_ns, mtime_ns, _, mode, _, uid, gid, _) = SETATTR_IN.unpack_from(
        body
    )
    at = now_ns if valid & Set.ATIME_NOW else atime * 10**9 + atime_ns
    changed = now_ns if valid & Set.MTIME_NOW else mtime * 10**9 + mtime_ns
    return SetAttr(
        handle if valid & Set.FH else None, size if valid & Set.SIZE else None, mode if valid & Set.MODE else None,
        uid if valid & Set.UID else None, gid if valid & Set.GID else None,
        at if valid & Set.ATIME else None, changed if valid & Set.MTIME else None,
    )  # fmt: skip


def init_reply(body: memoryview, max_write: int) -> tuple[bytes, Init]:
    """(reply to INIT, what both sides can do). ProtocolError for a kernel that is too old."""
    major, minor, readahead, flags = INIT_IN.unpack_from(body)
    if major != MAJOR or minor < MINOR_MIN:
        raise ProtocolError(f"the kernel speaks FUSE {major}.{minor}, {MAJOR}.{MINOR_MIN} or later is needed")
    if flags & Init.INIT_EXT:
        flags |= int.from_bytes(body[16:20], "little") << 32
    # HANDLE_KILLPRIV_V2: files have no set-id bits and no capabilities, so the kernel need not ask before each write
    wanted = (
        Init.ASYNC_READ | Init.ATOMIC_O_TRUNC | Init.BIG_WRITES | Init.READDIRPLUS | Init.READDIRPLUS_AUTO
        | Init.PARALLEL_DIROPS | Init.MAX_PAGES | Init.EXPLICIT_INVAL_DATA | Init.HANDLE_KILLPRIV_V2 | Init.INIT_EXT
        | Init.PASSTHROUGH
    )  # fmt: skip
    both = Init(flags & int(wanted))
    background = 64  # requests of readahead in flight: more only wait in the daemon
    reply = INIT_REPLY.pack(
        MAJOR, min(minor, MINOR), max(readahead, max_write), int(both) & 0xFFFF_FFFF, background, background * 3 // 4,
        max_write, 1, max_write // PAGE_BYTES, 0, int(both) >> 32, 1 if both & Init.PASSTHROUGH else 0,
        0, 0, 0, 0, 0, 0,
    )  # fmt: skip
    return reply, both


def entry_attr(attr: Attr, seconds: float) -> bytes:
    whole, rest = _seconds(seconds)
    return ATTR_REPLY.pack(whole, rest, 0) + attr.pack()


def item_bytes(name: bytes, *, attributes: bool) -> int:
    """What a name takes in a reply to READDIR; with ``attributes`` to READDIRPLUS."""
    return (ENTRY_BYTES if attributes else 0) + (DIRENT.size + len(name) + 7 & ~7)


def pack_item(item: DirectoryItem, number: int, entry: Entry | None, *, attributes: bool) -> bytes:
    """A name of a reply, after which a listing goes on at ``number``. Without an entry the kernel looks it up."""
    ino = item.ino if entry is None else entry.attr.ino
    packed = DIRENT.pack(ino, number, len(item.name), stat.S_IFMT(item.mode) >> 12) + item.name
    packed += bytes(-len(packed) % 8)
    if not attributes:
        return packed
    return (bytes(ENTRY_BYTES) if entry is None else entry.pack()) + packed


def listed_nodes(reply: bytes | bytearray | memoryview) -> Iterator[int]:
    """The nodes to which a reply to READDIRPLUS gives the kernel a reference."""
    at = 0
    while at < len(reply):
        node = ENTRY.unpack_from(reply, at)[0]
        length = DIRENT.unpack_from(reply, at + ENTRY_BYTES)[2]
        at += ENTRY_BYTES + (DIRENT.size + length + 7 & ~7)
        if node:
            yield node


def statfs_bytes(usage: Usage) -> bytes:
    total, free = usage.total_bytes // PAGE_BYTES, usage.free_bytes // PAGE_BYTES
    return STATFS_REPLY.pack(
        total, free, free, usage.files, usage.free_files, PAGE_BYTES, NAME_BYTES_MAX, PAGE_BYTES, 0
    )


def _seconds(seconds: float) -> tuple[int, int]:
    return int(seconds), int(seconds % 1 * 1e9)
