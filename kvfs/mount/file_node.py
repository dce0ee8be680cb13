"""One file below files/: its draft, its copy, and how it is opened.

A node is a file with one content. The kernel caches pages by node, so a name with another content is another node.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
from collections.abc import Iterator
from dataclasses import replace

from kvfs.directory.config import parse_duration
from kvfs.errors import ConfigError
from kvfs.mount.chunks import ContentGoneError
from kvfs.mount.file_tree import Draft, FileTree, NamedNode, Spot, attr_of, log
from kvfs.mount.manifest import FILE_BYTES_MAX, Manifest, State
from kvfs.mount.names import Found
from kvfs.mount.node import Node, OpenFile
from kvfs.mount.operations import fail
from kvfs.mount.spool import SpoolFile
from kvfs.mount.wire import Attr, OpenFlag, SetAttr

HITS, TTL = b"user.kvfs.hits", b"user.kvfs.ttl"
TOUCH_SECONDS = 30.0  # a copy that is opened again marks its pages as used this often


class FileNode(NamedNode):
    """A file with one content. ``check`` is None until it has one.

    Some of its open files are served by the kernel from the copy (``passed``), the others by this process: the kernel
    allows only one kind at a time. Readers that came while it was written share the draft until its writers close it.
    From then on, as all readers do, they keep what was saved: the next writer gets a node of its own, and a writer
    that only seemed to be closed is refused, since its draft has a successor.
    """

    def __init__(self, tree: FileTree, ino: int, check: int | None, manifest: Manifest | None) -> None:
        super().__init__(tree, ("file", ino, check) if check is not None else ("draft", next(tree.unique)), ino)
        self.lock = threading.RLock()
        self.check = check
        self.manifest = manifest
        self.draft: Draft | None = None
        self.copy: SpoolFile | None = None
        self.passed = self.cached = 0
        self.has_successor = False  # new writers have another node
        self.touched = 0.0
        self.spot: Spot | None = None
        self._stat: os.stat_result | None = None

    @property
    def found(self) -> Found:
        return Found(self.ino, self.check or 0)

    def renewed(self, other: Node) -> None:
        assert isinstance(other, FileNode)
        self.spot = other.spot

    # -- its name ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def named(self, flags: int = os.O_RDONLY) -> Iterator[int]:
        """Descriptor of its name's file. ESTALE if the name means another file now."""
        if self.draft is not None:
            yield self.draft.name_fd
            return
        spot = self.spot or fail(errno.ESTALE)
        with spot.place.opened() as dir_fd:
            try:
                fd = self.tree.names.open(spot.name, dir_fd, flags)
            except FileNotFoundError:
                fail(errno.ESTALE)
        try:
            if os.fstat(fd).st_ino != self.ino:
                fail(errno.ESTALE)
            yield fd
        finally:
            os.close(fd)

    def content(self) -> Manifest:
        if self.manifest is None:
            with self.named() as fd:
                manifest = self.tree.names.manifest(fd)
            if manifest is None or manifest.check != self.check:
                fail(errno.ESTALE)
            self.manifest = manifest
        return self.manifest

    def attr(self) -> Attr:
        with self.lock:
            gone = False
            try:
                st = self._stat = self._status()
            except OSError as exc:
                if self._stat is None:
                    raise
                st, gone = self._stat, exc.errno == errno.ESTALE  # unlinked or replaced, and still open
            return self._attr(st, gone)

    def found_attr(self, found: Node) -> Attr:
        assert isinstance(found, FileNode)
        with self.lock:
            st, found.looked = found.looked, None
            if st is None:  # it is being written: there was no lookup
                return self.attr()
            self._stat = st
            return self._attr(st, False)

    def _status(self) -> os.stat_result:
        """Status of its name's file. ESTALE if the name means another file now."""
        if self.draft is not None:
            return os.fstat(self.draft.name_fd)
        spot = self.spot or fail(errno.ESTALE)
        with spot.place.opened() as dir_fd:
            try:
                st = os.stat(spot.name, dir_fd=dir_fd, follow_symlinks=False)
            except FileNotFoundError:
                fail(errno.ESTALE)
        if st.st_ino != self.ino or not stat.S_ISREG(st.st_mode):
            fail(errno.ESTALE)
        return st

    def _attr(self, st: os.stat_result, gone: bool) -> Attr:
        attr = attr_of(st)
        attr.nlink = 0 if gone else attr.nlink
        attr.size = self.draft.file.size if self.draft is not None else self._size()
        attr.blocks = -(-attr.size // 512)
        return attr

    def _size(self) -> int:
        known = self.tree.names.size_of(self.found) if self.manifest is None else self.manifest.size
        return self.content().size if known is None else known

    def set(self, change: SetAttr, file: OpenFile | None) -> None:
        with self.lock:
            if change.size is not None:
                self._truncate(change.size, file)
            with self.named(os.O_RDWR) as fd:
                self._change(change, fd)

    def _truncate(self, size: int, file: OpenFile | None) -> None:
        if size > min(FILE_BYTES_MAX, self.tree.spool.limit_bytes):
            fail(errno.EFBIG)
        draft = self.draft
        if draft is not None and file in draft.writers:
            draft.writers[file] = False  # it is open
        if draft is not None and (file in draft.writers or not self._is_kept()):
            self._resize(size)
            return
        writer = self.open(os.O_WRONLY | (0 if size else os.O_TRUNC))
        try:
            self._resize(size)
            writer.flush()
        finally:
            writer.close()

    def _resize(self, size: int) -> None:
        assert self.draft is not None
        if self.has_successor:
            fail(errno.ESTALE)
        self.draft.dirty = True
        try:
            self.tree.spool.truncate(self.draft.file, size)
        except OSError as exc:
            self.draft.error = exc.errno or errno.EIO
            raise

    def xattrs(self) -> dict[bytes, bytes]:
        with self.lock, self.named() as fd:
            state = self.tree.names.state(fd)
        found = {HITS: str(state.hits).encode()}
        if state.expires:
            found[TTL] = str(max(0, state.expires - self.tree.clock.now_us() // 1_000_000)).encode()
        return found

    def xattr(self, name: bytes) -> bytes | None:
        return self.xattrs().get(name) if name in (HITS, TTL) else None  # the kernel asks for others at each open

    def set_xattr(self, name: bytes, value: bytes | None) -> None:
        if name != TTL:
            fail(errno.EPERM if name == HITS else errno.EOPNOTSUPP)
        expires = 0
        if value is not None:
            try:
                seconds = parse_duration(value.decode("ascii"), "ttl")
            except (ConfigError, UnicodeDecodeError):
                fail(errno.EINVAL)
            expires = self.tree.clock.now_us() // 1_000_000 + max(1, int(seconds))
        with self.lock, self.named(os.O_RDWR) as fd:
            if self.check is None:  # an unfinished file has no state yet
                fail(errno.EBUSY)
            self.tree.names.write_state(fd, self.tree.names.state(fd)._replace(expires=expires))

    # -- opening -----------------------------------------------------------------------------

    def open(self, flags: int) -> OpenFile:
        with self.lock:
            if flags & os.O_ACCMODE == os.O_RDONLY and not flags & os.O_TRUNC:
                return self._open_reader()
            if self._is_kept():
                self._leave()
                fail(errno.ESTALE)  # the kernel looks up again
            if self.draft is None:
                if self.ino in self.tree.drafts:  # of a newer content, which the next lookup finds
                    fail(errno.ESTALE)
                return self.begin(self._draft(flags), dirty=bool(flags & os.O_TRUNC))
            if flags & os.O_TRUNC:
                self._resize(0)
            return self._writer()

    def _is_kept(self) -> bool:
        """Whether readers rely on the saved content: the next one is another node."""
        if self.passed or self.has_successor:
            return True
        return bool(self.cached) and (self.draft is None or self.draft.is_settled)

    def _leave(self) -> None:
        """Let lookups find the file as another node."""
        self.has_successor = True
        self.tree.rename_key(self, ("old", next(self.tree.unique)))
        with self.tree.lock:
            if self.tree.drafts.get(self.ino) is self:
                del self.tree.drafts[self.ino]

    def _open_reader(self) -> OpenFile:
        if self.draft is None:
            self._load()
            if not self.cached and self.copy is not None:
                self.passed += 1
                self.copy.passed = True
                return _Reader(self, self.copy.fd)
        self.cached += 1
        return _Reader(self, -1)

    def _load(self) -> None:
        """Have a copy of the content, and count the use."""
        tree = self.tree
        now = tree.clock.monotonic()
        if self.copy is None:
            self.copy = tree.spool.take(self.key)
        if self.copy is None:
            self.copy = self._loaded()
            self.touched = now
        elif now - self.touched >= TOUCH_SECONDS:
            with contextlib.suppress(OSError):  # an index that does not answer: the copy needs none
                tree.chunks.find(self.content(), touch=True)
            self.touched = now
        if not tree.names.read_only:
            with contextlib.suppress(OSError), self.named(os.O_RDWR) as fd:
                state = tree.names.state(fd)
                tree.names.write_state(fd, state._replace(hits=state.hits + 1))

    def _loaded(self) -> SpoolFile:
        """A new copy of the content."""
        try:
            return self.tree.chunks.load(self.content())
        except ContentGoneError:
            self.tree.names.doubt(self.found)
            fail(errno.ENOENT)
        except OSError:
            self.tree.names.doubt(self.found)
            raise

    def _draft(self, flags: int) -> Draft:
        """A draft that begins with the content of the file, or empty."""
        with self.named(os.O_RDWR) as fd:
            name_fd, locked = os.dup(fd), False
        try:
            with contextlib.suppress(BlockingIOError):  # the sweep is about to remove it
                fcntl.flock(name_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                locked = bool(os.fstat(name_fd).st_nlink)
            if not locked:
                fail(errno.ESTALE)
            if flags & os.O_TRUNC:
                return Draft(self.tree.spool.create(), name_fd)
            self._load()
            assert self.copy is not None
            copy, self.copy = self.copy, None
            if copy.passed:  # a closed file may still be mapped
                self._keep(copy)
                copy = self._loaded()
            return Draft(copy, name_fd)
        except BaseException:
            os.close(name_fd)
            raise

    def begin(self, draft: Draft, *, dirty: bool) -> OpenFile:
        draft.dirty = dirty
        with self.tree.lock:
            self.draft = draft
            self.tree.drafts[self.ino] = self
        return self._writer()

    def _writer(self) -> OpenFile:
        assert self.draft is not None
        writer = _Writer(self)
        self.draft.writers[writer] = False
        return writer

    # -- content -----------------------------------------------------------------------------

    def read(self, size: int, offset: int) -> bytes:
        with self.lock:
            if self.draft is None and self.copy is None:
                self._load()
            source = self.draft.file if self.draft is not None else self.copy
            assert source is not None
            return source.read(size, offset)

    def write(self, writer: OpenFile, data: memoryview, offset: int) -> int:
        with self.lock:
            draft = self.draft
            assert draft is not None, "a writer is open"
            if draft.error:
                fail(draft.error)
            if self.has_successor:
                fail(errno.ESTALE)
            draft.writers[writer] = False
            draft.dirty = True
            try:
                if offset + len(data) > min(FILE_BYTES_MAX, self.tree.spool.limit_bytes):
                    fail(errno.EFBIG)
                self.tree.spool.write(draft.file, data, offset)
            except OSError as exc:
                draft.error = exc.errno or errno.EIO  # never a file with a hole where this was
                raise
            return len(data)

    def commit(self) -> None:
        """Store the draft as the content of the file. OSError; then the content is what it was."""
        with self.lock:
            draft = self.draft
            if draft is None or not (draft.dirty or draft.error):
                return
            if draft.error:
                fail(draft.error)
            names = self.tree.names
            if not os.fstat(draft.name_fd).st_nlink:  # unlinked: no lookup will find it
                draft.dirty = False
                return
            try:
                manifest, segments = self.tree.chunks.save(draft.file)
                state = names.state(draft.name_fd) if self.check is not None else State()
                names.write(draft.name_fd, replace(manifest, state=state))
                if names.durable and self.spot is not None:
                    with self.spot.place.opened() as folder:
                        names.made_durable(folder)
            except OSError as exc:
                draft.error = exc.errno or errno.EIO
                raise
            draft.dirty = False
            self.manifest, self.check = manifest, manifest.check
            names.note_complete(self.found, segments, manifest.size)
            self.tree.rename_key(self, ("file", self.ino, self.check))

    def flush(self, writer: OpenFile) -> None:
        """A descriptor of a writer is closed: maybe the only one."""
        with self.lock:
            self.commit()
            assert self.draft is not None, "a writer is open"
            self.draft.writers[writer] = True

    def close_writer(self, writer: OpenFile) -> None:
        with self.lock:
            draft = self.draft
            assert draft is not None, "a writer is open"
            try:
                if draft.dirty and not draft.error:  # written through a map after the last close
                    self.commit()
            except OSError as exc:
                log.warning("a file is not stored: %s", exc)
            finally:
                del draft.writers[writer]
                if not draft.writers:
                    self._end(draft)

    def give_up(self, writer: OpenFile) -> None:
        """End a writer whose program could not finish: its draft is not stored."""
        with self.lock:
            if self.draft is not None and self.draft.dirty:
                self.draft.error = errno.ENOTCONN
            self.close_writer(writer)

    def _end(self, draft: Draft) -> None:
        with self.tree.lock:
            self.draft = None
            if self.tree.drafts.get(self.ino) is self:
                del self.tree.drafts[self.ino]
            if self.check is None:  # never stored: no file
                self._remove_name()
        if draft.error:  # the kernel has cached what was not stored
            self.tree.rename_key(self, ("old", next(self.tree.unique)))
        os.close(draft.name_fd)
        if self.cached and not draft.error and not draft.dirty:
            self.copy = draft.file  # for readers that opened it meanwhile
        else:
            self.tree.spool.release_draft(draft.file)

    def _remove_name(self) -> None:
        if self.spot is not None:
            with contextlib.suppress(OSError), self.spot.place.opened() as dir_fd:
                if os.stat(self.spot.name, dir_fd=dir_fd, follow_symlinks=False).st_ino == self.ino:
                    os.unlink(self.spot.name, dir_fd=dir_fd)

    def close_reader(self, passed: bool) -> None:
        with self.lock:
            if passed:
                self.passed -= 1
            else:
                self.cached -= 1
            if not self.passed and not self.cached and self.copy is not None:
                copy, self.copy = self.copy, None
                self._keep(copy)

    def _keep(self, copy: SpoolFile) -> None:
        """Keep the copy of the content, which has no readers, for later ones."""
        if isinstance(self.key, tuple) and self.key[0] == "file":
            self.tree.spool.keep(self.key, copy)
        else:  # it has a successor: no lookup finds this content again
            self.tree.spool.release(copy)


class _Reader(OpenFile):
    def __init__(self, node: FileNode, backing: int) -> None:
        self._node, self.backing = node, backing

    def read(self, size: int, offset: int) -> bytes:
        return self._node.read(size, offset)

    def close(self) -> None:
        self._node.close_reader(self.backing >= 0)


class _Writer(OpenFile):
    flags = OpenFlag.NONE  # what is written is stored when a descriptor is closed

    def __init__(self, node: FileNode) -> None:
        self._node = node

    def read(self, size: int, offset: int) -> bytes:
        return self._node.read(size, offset)

    def write(self, data: memoryview, offset: int) -> int:
        return self._node.write(self, data, offset)

    def flush(self) -> None:
        self._node.flush(self)

    def sync(self) -> None:
        self._node.commit()

    def close(self) -> None:
        self._node.close_writer(self)

    def give_up(self) -> None:
        self._node.give_up(self)
