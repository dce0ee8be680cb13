"""What a name of the mount stands for, and the table of the nodes that the kernel knows."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvfs.mount.operations import Operations, fail
from kvfs.mount.wire import (
    ROOT_ID,
    Attr,
    Caller,
    DirectoryItem,
    Entry,
    Opened,
    OpenFlag,
    SetAttr,
    Usage,
)

NAME_SECONDS = 1.0  # how long the kernel trusts names and attributes: other processes change them, and evict
HANDLES_MAX = 4096  # files that are open at once, and as many more as requests are in progress
_VIEW_INO = 1 << 48  # numbers of nodes without an inode of their own begin here


class OpenFile:
    """An open file of a node; ``close`` is called once."""

    flags = OpenFlag.NOFLUSH  # of one that is only read: the kernel need not tell that a descriptor is closed
    backing = -1

    def read(self, size: int, offset: int) -> bytes | memoryview:
        fail(errno.EBADF)

    def write(self, data: memoryview, offset: int) -> int:
        fail(errno.EBADF)

    def flush(self) -> None:
        """A descriptor of the file is closed."""

    def sync(self) -> None:
        """fsync(2)."""

    def close(self) -> None:
        """The last descriptor and map are gone."""

    def give_up(self) -> None:
        """The mount ends while the file is open: nothing that was not closed is stored."""
        self.close()


class OpenBytes(OpenFile):
    """An open file whose content is known as a whole."""

    flags = OpenFlag.DIRECT_IO | OpenFlag.NOFLUSH  # its size may differ from what the last stat said

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read(self, size: int, offset: int) -> bytes | memoryview:
        return memoryview(self._data)[offset : offset + size]


class Listed(NamedTuple):
    """One name of a listing: whether it is there, and its node where attributes were asked for and are cheap."""

    is_there: bool
    node: Node | None = None


@dataclass
class Created:
    node: Node
    file: OpenFile


class Node:
    """One file or directory. Nodes with equal keys are the same file with the same content."""

    def __init__(self, key: Hashable) -> None:
        self.key = key

    def attr(self) -> Attr:
        """Attributes; ``ino`` 0: the table chooses a number."""
        raise NotImplementedError

    def found_attr(self, found: Node) -> Attr:
        """Attributes after a lookup that made ``found``, which is this node or has its key."""
        return self.attr()

    def renewed(self, other: Node) -> None:
        """A lookup found ``other``, which has this node's key."""

    # -- directories -------------------------------------------------------------------------

    def child(self, name: bytes) -> Node:
        fail(errno.ENOTDIR)

    def items(self) -> list[DirectoryItem]:
        """Its names; some may stand for nothing, which ``listed`` tells."""
        fail(errno.ENOTDIR)

    def listed(self, items: Sequence[DirectoryItem], *, nodes: bool) -> Generator[Listed, None, None]:
        """Which of its ``items`` are there, in their order; with ``nodes`` also what they stand for."""
        yield from [Listed(True)] * len(items)

    def create(self, name: bytes, flags: int, mode: int, caller: Caller) -> Created:
        fail(errno.EPERM)

    def mkdir(self, name: bytes, mode: int, caller: Caller) -> Node:
        fail(errno.EPERM)

    def unlink(self, name: bytes) -> None:
        fail(errno.EPERM)

    def rmdir(self, name: bytes) -> None:
        fail(errno.EPERM)

    def rename(self, name: bytes, target: Node, new_name: bytes, flags: int) -> None:
        fail(errno.EXDEV)

    # -- files -------------------------------------------------------------------------------

    def open(self, flags: int) -> OpenFile:
        fail(errno.EISDIR)

    def set(self, change: SetAttr, file: OpenFile | None) -> None:
        fail(errno.EPERM)

    def xattrs(self) -> dict[bytes, bytes]:
        return {}

    def xattr(self, name: bytes) -> bytes | None:
        return self.xattrs().get(name)

    def set_xattr(self, name: bytes, value: bytes | None) -> None:
        fail(errno.EOPNOTSUPP)


class NodeTable(Operations):
    """Nodes by the numbers that the kernel knows, and open files. Delegates everything else to the nodes."""

    def __init__(self, root: Node, usage: Callable[[], Usage], owner: tuple[int, int]) -> None:
        self._lock = threading.Lock()
        self._nodes: dict[int, Node] = {ROOT_ID: root}
        self._ids: dict[Hashable, int] = {root.key: ROOT_ID}
        self._lookups: dict[int, int] = {}
        self._files: dict[int, tuple[OpenFile, Node]] = {}
        self._next_id, self._next_file = ROOT_ID + 1, 1
        self._usage = usage
        self._owner = owner

    def _node(self, number: int) -> Node:
        node = self._nodes.get(number)
        if node is None:
            fail(errno.ESTALE)
        return node

    def _entry(self, found: Node) -> Entry:
        """The entry of a node that was looked up; an equal node that is known already takes its place."""
        with self._lock:
            number = self._ids.get(found.key)
            if number is None:
                number, self._next_id = self._next_id, self._next_id + 1
                self._ids[found.key] = number
                self._nodes[number] = found
            node = self._nodes[number]
            self._lookups[number] = self._lookups.get(number, 0) + 1
        if node is not found:
            node.renewed(found)
        try:
            return Entry(number, self._numbered(number, node.found_attr(found)), NAME_SECONDS)
        except OSError:
            self.forget(number, 1)
            raise

    def _attr(self, number: int, node: Node) -> Attr:
        return self._numbered(number, node.attr())

    def _numbered(self, number: int, attr: Attr) -> Attr:
        if not attr.ino:
            attr.ino = _VIEW_INO + number
            attr.uid, attr.gid = self._owner
        return attr

    def rename_key(self, node: Node, key: Hashable) -> None:
        """The content of a node changed: from now on lookups find it under ``key``, and no node under the old one."""
        with self._lock:
            number = self._ids.pop(node.key, None)
            node.key = key
            if number is not None and self._nodes.get(number) is node:
                self._ids[key] = number

    def lookup(self, parent: int, name: bytes) -> Entry:
        return self._entry(self._node(parent).child(name))

    def forget(self, node: int, lookups: int) -> None:
        with self._lock:
            left = self._lookups.get(node, 0) - lookups
            if left > 0:
                self._lookups[node] = left
                return
            self._lookups.pop(node, None)
            if node == ROOT_ID:
                return
            gone = self._nodes.pop(node, None)
            if gone is not None and self._ids.get(gone.key) == node:
                del self._ids[gone.key]

    def getattr(self, node: int, handle: int | None) -> tuple[Attr, float]:
        return self._attr(node, self._node(node)), NAME_SECONDS

    def setattr(self, node: int, change: SetAttr) -> tuple[Attr, float]:
        found = self._node(node)
        file = self._files.get(change.handle) if change.handle is not None else None
        found.set(change, file[0] if file is not None else None)
        return self._attr(node, found), NAME_SECONDS

    def mkdir(self, parent: int, name: bytes, mode: int, caller: Caller) -> Entry:
        return self._entry(self._node(parent).mkdir(name, mode, caller))

    def unlink(self, parent: int, name: bytes) -> None:
        self._node(parent).unlink(name)

    def rmdir(self, parent: int, name: bytes) -> None:
        self._node(parent).rmdir(name)

    def rename(self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int) -> None:
        self._node(parent).rename(name, self._node(new_parent), new_name, flags)

    def open(self, node: int, flags: int) -> Opened:
        found = self._node(node)
        self._check_room()
        return self._opened(found, found.open(flags))

    def create(self, parent: int, name: bytes, flags: int, mode: int, caller: Caller) -> tuple[Entry, Opened]:
        self._check_room()
        made = self._node(parent).create(name, flags, mode, caller)
        try:
            entry = self._entry(made.node)
        except OSError:
            made.file.close()
            raise
        return entry, self._opened(made.node, made.file)

    def _check_room(self) -> None:
        """ENFILE before a file is opened: an open may truncate or make it, which none that fails must do."""
        if len(self._files) >= HANDLES_MAX:
            fail(errno.ENFILE)

    def _opened(self, node: Node, file: OpenFile) -> Opened:
        with self._lock:
            handle, self._next_file = self._next_file, self._next_file + 1
            self._files[handle] = file, node
        return Opened(handle, file.flags, file.backing)

    def _file(self, handle: int) -> OpenFile:
        found = self._files.get(handle)
        if found is None:
            fail(errno.EBADF)
        return found[0]

    def read(self, handle: int, size: int, offset: int) -> bytes | memoryview:
        return self._file(handle).read(size, offset)

    def write(self, handle: int, data: memoryview, offset: int) -> int:
        return self._file(handle).write(data, offset)

    def flush(self, handle: int) -> None:
        self._file(handle).flush()

    def fsync(self, handle: int) -> None:
        self._file(handle).sync()

    def release(self, handle: int) -> None:
        with self._lock:
            found = self._files.pop(handle, None)
        if found is not None:
            found[0].close()

    def entries(self, node: int) -> list[DirectoryItem]:
        return self._node(node).items()

    def listed(
        self, node: int, items: Sequence[DirectoryItem], *, attributes: bool
    ) -> Generator[tuple[bool, Entry | None], None, None]:
        with contextlib.closing(self._node(node).listed(items, nodes=attributes)) as listed:
            for is_there, child in listed:
                entry = None
                if child is not None:
                    with contextlib.suppress(OSError):  # a lookup tells the error
                        entry = self._entry(child)
                yield is_there, entry

    def usage(self) -> Usage:
        return self._usage()

    def getxattr(self, node: int, name: bytes) -> bytes:
        value = self._node(node).xattr(name)
        if value is None:
            fail(errno.ENODATA)
        return value

    def listxattr(self, node: int) -> list[bytes]:
        return sorted(self._node(node).xattrs())

    def setxattr(self, node: int, name: bytes, value: bytes) -> None:
        self._node(node).set_xattr(name, value)

    def removexattr(self, node: int, name: bytes) -> None:
        self._node(node).set_xattr(name, None)

    def close(self) -> None:
        """Give up what is still open: the mount ended without the kernel's releases."""
        with self._lock:
            left, self._files = list(self._files.values()), {}
        for file, _ in left:
            file.give_up()
