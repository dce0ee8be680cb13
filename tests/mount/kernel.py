"""What the kernel does for a process, without one: path walks, retries after ESTALE, references to nodes.

It calls ``NodeTable`` as the FUSE driver does, so files can be tested where nothing can be mounted.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import kvfs
from kvfs.mount import view as views
from kvfs.mount.chunks import Chunks
from kvfs.mount.file_tree import FileTree
from kvfs.mount.folder import root_of
from kvfs.mount.names import Names
from kvfs.mount.node import NodeTable
from kvfs.mount.operations import Operations
from kvfs.mount.spool import Spool
from kvfs.mount.wire import ROOT_ID, Attr, Caller, Entry, Opened, SetAttr, Usage

T = TypeVar("T")
NOTHING = SetAttr(None, None, None, None, None, None, None)
ME = Caller(os.getuid(), os.getgid())


class Kernel:
    """System calls on paths, as bytes of the mount. ``open`` gives a descriptor for ``read``, ``write``, ``close``."""

    def __init__(self, operations: Operations) -> None:
        self.ops = operations
        self.open_files: dict[int, tuple[Opened, int]] = {}

    def _walk(self, path: str) -> int:
        """The node of a path, with a reference that ``forget`` returns."""
        node = ROOT_ID
        for name in filter(None, path.split("/")):
            parent, node = node, self.ops.lookup(node, name.encode()).node
            if parent != ROOT_ID:
                self.ops.forget(parent, 1)
        return node

    def _parent(self, path: str) -> tuple[int, bytes]:
        folder, _, name = path.rpartition("/")
        return self._walk(folder), os.fsencode(name)

    def _on(self, path: str, call: Callable[[int], T]) -> T:
        """Call with the node of a path; once more with a new walk if the node is stale."""
        for attempt in (1, 2):
            node = self._walk(path)
            try:
                return call(node)
            except OSError as exc:
                if exc.errno != errno.ESTALE or attempt == 2:
                    raise
            finally:
                if node != ROOT_ID:
                    self.ops.forget(node, 1)
        raise AssertionError

    def stat(self, path: str) -> Attr:
        return self._on(path, lambda node: self.ops.getattr(node, None)[0])

    def node(self, path: str) -> int:
        return self._on(path, lambda node: node)

    def exists(self, path: str) -> bool:
        try:
            self.stat(path)
        except FileNotFoundError:
            return False
        return True

    def listdir(self, path: str) -> list[str]:
        def listed(node: int) -> list[str]:
            items = self.ops.entries(node)
            found = self.ops.listed(node, items, attributes=False)
            return [os.fsdecode(item.name) for item, (there, _) in zip(items, found, strict=True) if there]

        return self._on(path, listed)

    def open(self, path: str, flags: int = os.O_RDONLY, mode: int = 0o644) -> int:
        if flags & os.O_CREAT:
            try:
                return self.open(
                    path, flags & ~(os.O_CREAT | os.O_EXCL) if not flags & os.O_EXCL else flags ^ os.O_CREAT
                )
            except FileNotFoundError:
                pass
            parent, name = self._parent(path)
            entry, opened = self.ops.create(parent, name, flags, mode, ME)
            return self._opened(opened, entry)
        for attempt in (1, 2):
            node = self._walk(path)
            if flags & os.O_EXCL:
                self.ops.forget(node, 1)
                raise FileExistsError(errno.EEXIST, path)
            try:
                return self._opened(self.ops.open(node, flags), node)
            except OSError as exc:
                self.ops.forget(node, 1)
                if exc.errno != errno.ESTALE or attempt == 2:
                    raise
        raise AssertionError

    def _opened(self, opened: Opened, node: Entry | int) -> int:
        self.open_files[opened.handle] = opened, node.node if isinstance(node, Entry) else node
        return opened.handle

    def read(self, fd: int, size: int = 1 << 30, offset: int = 0) -> bytes:
        """Read as the kernel does: from the backing file, if the reply named one."""
        opened, _ = self.open_files[fd]
        if opened.backing >= 0:
            return os.pread(opened.backing, size, offset)
        out = bytearray()
        while len(out) < size:
            data = bytes(self.ops.read(fd, min(1 << 20, size - len(out)), offset + len(out)))
            if not data:
                break
            out += data
        return bytes(out)

    def write(self, fd: int, data: bytes, offset: int = 0) -> None:
        for at in range(0, len(data), 1 << 20):
            part = memoryview(data)[at : at + (1 << 20)]
            assert self.ops.write(fd, part, offset + at) == len(part)

    def close(self, fd: int) -> None:
        _, node = self.open_files.pop(fd)
        try:
            self.ops.flush(fd)
        finally:
            self.ops.release(fd)
            self.ops.forget(node, 1)

    def die(self) -> None:
        """The process that has the files open ends without closing them: the kernel only releases."""
        for fd, (_, node) in list(self.open_files.items()):
            self.ops.release(fd)
            self.ops.forget(node, 1)
        self.open_files.clear()

    def save(self, path: str, data: bytes, flags: int = os.O_WRONLY | os.O_CREAT | os.O_TRUNC) -> None:
        fd = self.open(path, flags)
        try:
            self.write(fd, data)
        finally:
            self.close(fd)

    def load(self, path: str) -> bytes:
        fd = self.open(path)
        try:
            return self.read(fd)
        finally:
            self.close(fd)

    def truncate(self, path: str, size: int) -> None:
        self.set(path, NOTHING._replace(size=size))

    def set(self, path: str, change: SetAttr) -> None:
        self._on(path, lambda node: self.ops.setattr(node, change))

    def unlink(self, path: str) -> None:
        self.ops.unlink(*self._parent(path))

    def mkdir(self, path: str) -> None:
        parent, name = self._parent(path)
        self.ops.forget(self.ops.mkdir(parent, name, 0o755, ME).node, 1)

    def rmdir(self, path: str) -> None:
        self.ops.rmdir(*self._parent(path))

    def rename(self, old: str, new: str, flags: int = 0) -> None:
        self.ops.rename(*self._parent(old), *self._parent(new), flags)

    def xattr(self, path: str, name: str) -> bytes:
        return self._on(path, lambda node: self.ops.getxattr(node, name.encode()))

    def set_xattr(self, path: str, name: str, value: bytes) -> None:
        self._on(path, lambda node: self.ops.setxattr(node, name.encode(), value))


class Mounted:
    """A store as a mount shows it, without a mount. The store stays open after ``close``."""

    def __init__(self, store: kvfs.Store, *, spool_bytes: int = 64 << 20, durable: bool = False) -> None:
        self.store = store
        self.spool = Spool(str(Path(store.path)), spool_bytes)
        self.chunks = Chunks(store, self.spool)
        self.names = Names(store.path, self.chunks, read_only=False, durable=durable)
        self.tree = FileTree(self.names, self.chunks, self.spool)
        self.view = views.View(store, self.spool)
        self.table = NodeTable(views.root(self.view, root_of(self.tree)), lambda: Usage(1, 1, 1, 1), ME)
        self.tree.rename_key = self.table.rename_key
        self.kernel = Kernel(self.table)

    def sweep(self) -> None:
        """Two sweeps: what is gone in both is removed."""
        self.names.sweep(self.names.sweep(set(), lambda: False), lambda: False)

    def names_on_disk(self) -> list[str]:
        return sorted(os.listdir(self.names.root))

    def close(self) -> None:
        self.table.close()
        self.tree.close()
        self.view.close()

    def __enter__(self) -> Mounted:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
