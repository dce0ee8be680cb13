"""Directories below files/: lookups, listings and changes of names."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Generator, Iterator, Sequence

from kvfs.mount.file_node import FileNode
from kvfs.mount.file_tree import Draft, FileTree, NamedNode, Place, attr_of
from kvfs.mount.manifest import Manifest
from kvfs.mount.names import FILES_MAX, is_named
from kvfs.mount.node import Created, Listed, Node, OpenFile
from kvfs.mount.operations import fail
from kvfs.mount.wire import Attr, Caller, DirectoryItem, SetAttr

TRIES = 4  # to make a name, while sweeps take it
NO_REPLACE = 1  # RENAME_NOREPLACE of renameat2(2)


def root_of(tree: FileTree) -> Folder:
    """The directory files/ of a mount."""
    return Folder(tree, None, b"", os.fstat(tree.names.root).st_ino)


class Folder(NamedNode, Place):
    """A directory below files/."""

    def __init__(self, tree: FileTree, parent: Folder | None, name: bytes, ino: int) -> None:
        super().__init__(tree, ("folder", ino), ino)
        self.parent, self.name = parent, name

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        """Its descriptor. ESTALE if its name means another directory now: the kernel looks up again."""
        if self.parent is None:
            yield self.tree.names.root
            return
        with self.parent.opened() as above:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                fd = os.open(self.name, flags, dir_fd=above)
            except OSError as exc:
                if exc.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                    fail(errno.ESTALE)
                raise
        try:
            if os.fstat(fd).st_ino != self.ino:
                fail(errno.ESTALE)
            yield fd
        finally:
            os.close(fd)

    def renewed(self, other: Node) -> None:
        assert isinstance(other, Folder)
        self.parent, self.name = other.parent, other.name

    def attr(self) -> Attr:
        with self.opened() as fd:
            return attr_of(os.fstat(fd))

    def found_attr(self, found: Node) -> Attr:
        assert isinstance(found, Folder)
        st, found.looked = found.looked, None
        return self.attr() if st is None else attr_of(st)

    def set(self, change: SetAttr, file: OpenFile | None) -> None:
        if change.size is not None:
            fail(errno.EISDIR)
        with self.opened() as fd:
            self._change(change, fd)

    def child(self, name: bytes) -> Node:
        with self.opened() as fd:
            return self._seen(self._child(name, fd), name)

    def _seen(self, node: Node, name: bytes) -> Node:
        """``node``, which the kernel will know by this name."""
        if isinstance(node, FileNode):
            node.spot = self.tree.seen(node.ino, self, name)
        return node

    def _child(self, name: bytes, dir_fd: int) -> Node:
        fd, st = self.tree.names.look(name, dir_fd)
        try:
            known = self.tree.drafts.get(st.st_ino)
            if known is not None:
                return known
            is_dir = stat.S_ISDIR(st.st_mode)
            made = Folder(self.tree, self, name, st.st_ino) if is_dir else self._complete(fd, st.st_ino)
            made.looked = st
            return made
        finally:
            os.close(fd)

    def _complete(self, fd: int, ino: int) -> FileNode:
        names = self.tree.names
        head = names.head(fd, ino)
        read: list[Manifest] = []

        def manifest() -> Manifest | None:
            content = names.manifest(fd)
            read[:] = [] if content is None else [content]
            return content

        if head is None or not names.is_complete(head, manifest):
            fail(errno.ENOENT)
        return FileNode(self.tree, ino, head.found.check, read[0] if read else None)

    def items(self) -> list[DirectoryItem]:
        with self.opened() as dir_fd, os.scandir(dir_fd) as entries:
            listed = [(os.fsencode(e.name), e.inode(), e.is_dir(follow_symlinks=False)) for e in entries]
        return [
            DirectoryItem(name, ino, stat.S_IFDIR if is_dir else stat.S_IFREG) for name, ino, is_dir in sorted(listed)
        ]

    def listed(self, items: Sequence[DirectoryItem], *, nodes: bool) -> Generator[Listed, None, None]:
        with self.opened() as dir_fd:
            for item in items:
                try:
                    if nodes:
                        yield Listed(True, self._seen(self._child(item.name, dir_fd), item.name))
                    else:
                        yield Listed(self._is_there(item, dir_fd))
                except FileNotFoundError:
                    yield Listed(False)
                except OSError:  # a lookup tells the error
                    yield Listed(True)

    def _is_there(self, item: DirectoryItem, dir_fd: int) -> bool:
        is_dir = stat.S_ISDIR(item.mode)
        return is_dir or item.ino in self.tree.drafts or self.tree.names.exists(item.name, dir_fd)

    def _is_empty(self) -> bool:
        return not any(there for there, _ in self.listed(self.items(), nodes=False))

    # -- changes of names ----------------------------------------------------------------------

    def create(self, name: bytes, flags: int, mode: int, caller: Caller) -> Created:
        with self.tree.lock, self.opened() as dir_fd:
            try:
                found = self._seen(self._child(name, dir_fd), name)
            except FileNotFoundError:
                self._clear(name, dir_fd)  # gone or unfinished: not a file
                return self._make(name, dir_fd, mode, caller)
        if flags & os.O_EXCL:
            fail(errno.EEXIST)
        return Created(found, found.open(flags))  # without the lock, which is taken after a node's

    def _make(self, name: bytes, dir_fd: int, mode: int, caller: Caller) -> Created:
        tree = self.tree
        if tree.names.count >= FILES_MAX * 11 // 10:
            fail(errno.ENOSPC)
        name_fd = self._locked(name, dir_fd, mode, caller)
        try:
            file = tree.spool.create()
        except OSError:
            self._unmake(name, name_fd, dir_fd)
            raise
        tree.names.count += 1
        ino = os.fstat(name_fd).st_ino
        fresh = FileNode(tree, ino, None, None)
        fresh.spot = tree.seen(ino, self, name)
        return Created(fresh, fresh.begin(Draft(file, name_fd), dirty=True))

    def _locked(self, name: bytes, dir_fd: int, mode: int, caller: Caller) -> int:
        """Descriptor of a new name, under the lock that shows that its writer lives.

        A sweep that comes before the lock takes the name for one whose writer is gone: then it is made again.
        """
        made = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        for _ in range(TRIES):
            fd, is_ours = os.open(name, made, mode & 0o777 | 0o600, dir_fd=dir_fd), False
            try:
                os.fchmod(fd, mode & 0o777 | 0o600)
                _give(fd, caller)
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    is_ours = is_named(fd, name, dir_fd)
                if is_ours:
                    return fd
            finally:
                if not is_ours:
                    self._unmake(name, fd, dir_fd)
        raise OSError(errno.EAGAIN, "the name was taken again and again")

    def _unmake(self, name: bytes, fd: int, dir_fd: int) -> None:
        """Close a new file, and remove its name if that still stands for it."""
        if is_named(fd, name, dir_fd):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=dir_fd)
        os.close(fd)

    def _clear(self, name: bytes, dir_fd: int) -> None:
        """Remove what is no file and has the name of one. EEXIST if it is not ours to remove."""
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode):
                fail(errno.EEXIST)
            os.unlink(name, dir_fd=dir_fd)

    def mkdir(self, name: bytes, mode: int, caller: Caller) -> Node:
        with self.tree.lock, self.opened() as dir_fd:
            os.mkdir(name, mode & 0o777 | 0o700, dir_fd=dir_fd)
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
            try:
                os.fchmod(fd, mode & 0o777 | 0o700)
                _give(fd, caller)
                self.tree.names.made_durable(dir_fd)
                st = os.fstat(fd)
                made = Folder(self.tree, self, name, st.st_ino)
                made.looked = st
                return made
            finally:
                os.close(fd)

    def unlink(self, name: bytes) -> None:
        with self.tree.lock, self.opened() as dir_fd:
            node = self._child(name, dir_fd)
            if isinstance(node, Folder):
                fail(errno.EISDIR)
            os.unlink(name, dir_fd=dir_fd)
            self.tree.names.count -= 1
            self.tree.names.made_durable(dir_fd)

    def rmdir(self, name: bytes) -> None:
        with self.tree.lock, self.opened() as dir_fd:
            node = self._child(name, dir_fd)
            if not isinstance(node, Folder):
                fail(errno.ENOTDIR)
            if node._is_empty():
                with node.opened() as fd:
                    for left in os.listdir(fd):  # files that are gone
                        node._clear(os.fsencode(left), fd)
            os.rmdir(name, dir_fd=dir_fd)
            self.tree.names.made_durable(dir_fd)

    def rename(self, name: bytes, target: Node, new_name: bytes, flags: int) -> None:
        if not isinstance(target, Folder):
            fail(errno.EXDEV)
        if flags & ~NO_REPLACE:
            fail(errno.EINVAL)
        with self.tree.lock, self.opened() as old, target.opened() as new:
            moved = self._child(name, old)
            if flags & NO_REPLACE and target._has(new_name, new):
                fail(errno.EEXIST)
            if isinstance(moved, FileNode) and not target._has(new_name, new):
                target._clear(new_name, new)
            os.rename(name, new_name, src_dir_fd=old, dst_dir_fd=new)
            if isinstance(moved, FileNode):
                self.tree.seen(moved.ino, target, new_name)
            for fd in {old, new}:
                self.tree.names.made_durable(fd)

    def _has(self, name: bytes, dir_fd: int) -> bool:
        try:
            self._child(name, dir_fd)
        except FileNotFoundError:
            return False
        return True


def _give(fd: int, caller: Caller) -> None:
    """Make the caller the owner, where this process may do so."""
    if os.geteuid() == 0 and caller.uid != 0:
        os.fchown(fd, caller.uid, caller.gid)
