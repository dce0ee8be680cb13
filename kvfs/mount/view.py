"""What the mount shows of a store, to read: namespaces, prefixes as safetensors files, pins, segments, statistics."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Mapping
from urllib.parse import quote, unquote_to_bytes

from kvfs.bundles.safetensors_file import UnverifiedError
from kvfs.catalog.catalog import NotFoundError
from kvfs.errors import ConfigError, IndexUnavailableError
from kvfs.lookup.prefix_match import PrefixMatch
from kvfs.metrics import exporter
from kvfs.mount.chunks import FILES, REVISION
from kvfs.mount.node import Node, OpenBytes, OpenFile
from kvfs.mount.operations import fail
from kvfs.mount.spool import Spool, SpoolFile
from kvfs.mount.wire import Attr, DirectoryItem
from kvfs.pages.identity import Described
from kvfs.store import Store

FRESH_SECONDS = 1.0  # how long a listing or a text is shown again without asking the store
FRESH_MAX = 256  # listings and texts that are kept for that: namespaces and pins come and go
LISTED_MAX = 10_000  # prefixes of one listing; every prefix can be opened by its id
LIST_SECONDS = 5.0  # longest walk of the index for a listing
ID_DIGITS = 16  # of a prefix in a listing
_TENSORS = b".safetensors"
_SEGMENT = re.compile(rb"[0-9a-f]{32}\.kvs\Z")
_PREFIX = re.compile(r"[0-9a-f]{6,64}\Z")


class View:
    """Reads what the nodes show from the store. Owns short-lived copies of listings."""

    def __init__(self, store: Store, spool: Spool) -> None:
        self.store = store
        self.spool = spool
        self.segments = os.open(os.path.join(store.path, "segments"), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        #: Permissions of the store's directory: who may not read the store may not read what is shown of it.
        self.mode = stat.S_IMODE(os.stat(store.path).st_mode)
        self._began_ns = time.time_ns()
        self._lock = threading.Lock()
        self._fresh: dict[str, tuple[float, object]] = {}

    def directory_attr(self, *, open_to_all: bool = False) -> Attr:
        mode = stat.S_IFDIR | 0o555 & (0o777 if open_to_all else self.mode)
        return Attr(0, mode, nlink=2, mtime_ns=self._began_ns, ctime_ns=self._began_ns, atime_ns=self._began_ns)

    def file_attr(self, size: int, mtime_ns: int = 0) -> Attr:
        at = mtime_ns or self._began_ns
        return Attr(0, stat.S_IFREG | 0o444 & self.mode, size, mtime_ns=at, ctime_ns=at, atime_ns=at)

    def cached(self, what: str, make: Callable[[], object]) -> object:
        """The result of ``make``, at most FRESH_SECONDS old. EIO if the index does not answer in time."""
        with self._lock:
            at, value = self._fresh.get(what, (-FRESH_SECONDS, None))
            if time.monotonic() - at >= FRESH_SECONDS:
                try:
                    value = make()
                except IndexUnavailableError:
                    fail(errno.EIO)
                if len(self._fresh) >= FRESH_MAX:
                    self._fresh.clear()
                self._fresh[what] = time.monotonic(), value
            return value

    def namespaces(self) -> dict[bytes, Described]:
        """Namespaces by the names of their directories."""

        def make() -> dict[bytes, Described]:
            known = [d for d in self.store.catalog.described() if (d.name, d.revision) != (FILES, REVISION)]
            labels = [d.label for d in known]
            return {
                _quoted(d.label if labels.count(d.label) == 1 else f"{d.label}.{d.digest.hex()[:12]}"): d for d in known
            }

        found = self.cached("namespaces", make)
        assert isinstance(found, dict)
        return found

    def prefixes(self) -> list[bytes]:
        """Names of the files of prefixes."""

        def make() -> list[bytes]:
            found: list[bytes] = []
            deadline = time.monotonic() + LIST_SECONDS
            for described in self.namespaces_now():
                left = max(0.1, deadline - time.monotonic())
                prefixes, _ = self.store.catalog.prefixes(described, seconds=left)
                whole = (p for p in prefixes if p.first_chunk == 0)
                found += [p.last_hash.hex()[:ID_DIGITS].encode() + _TENSORS for p in whole]
            return sorted(set(found))[:LISTED_MAX]

        found = self.cached("prefixes", make)
        assert isinstance(found, list)
        return found

    def namespaces_now(self) -> list[Described]:
        known = self.store.catalog.described()
        return [d for d in known if (d.name, d.revision) != (FILES, REVISION)]

    def match(self, prefix: str) -> PrefixMatch:
        """The match of a prefix. ENOENT if there is none."""
        try:
            return self.store.match_prefix(prefix)
        except (NotFoundError, ConfigError):
            fail(errno.ENOENT)
        except IndexUnavailableError:
            fail(errno.EIO)

    def close(self) -> None:
        os.close(self.segments)


class Directory(Node):
    """A directory whose names are listed by ``names`` and made by ``make``, which fails with ENOENT."""

    def __init__(
        self, key: str, view: View, names: Callable[[], Mapping[bytes, int]], make: Callable[[bytes], Node]
    ) -> None:
        super().__init__(key)
        self._view, self._names, self._make = view, names, make

    def attr(self) -> Attr:
        return self._view.directory_attr(open_to_all=self.key == "root")

    def child(self, name: bytes) -> Node:
        return self._make(name)

    def items(self) -> list[DirectoryItem]:
        return [DirectoryItem(name, 0xFFFF_FFFF, mode) for name, mode in self._names().items()]


class Text(Node):
    """A file whose content, bytes or what becomes JSON, is made when it is asked for."""

    def __init__(self, key: str, view: View, make: Callable[[], object]) -> None:
        super().__init__(key)
        self._view, self._make = view, make

    def _bytes(self) -> bytes:
        made = self._view.cached(str(self.key), self._make)
        return made if isinstance(made, bytes) else _json(made)

    def attr(self) -> Attr:
        return self._view.file_attr(len(self._bytes()))

    def open(self, flags: int) -> OpenFile:
        _check_reading(flags)
        return OpenBytes(self._bytes())


class PrefixFile(Node):
    """The stored pages of a prefix as a safetensors file: written, all pages verified, when it is opened."""

    def __init__(self, view: View, prefix: str, match: PrefixMatch) -> None:
        super().__init__(("prefix", match.namespace, match.last_hash, match.tokens))
        self._view, self._prefix = view, prefix
        self._size = view.store.tensor_file(match).nbytes
        self._at_us = match.at_us
        self._lock = threading.Lock()
        self._copy: SpoolFile | None = None
        self._readers = 0

    def attr(self) -> Attr:
        return self._view.file_attr(self._size, self._at_us * 1000)

    def open(self, flags: int) -> OpenFile:
        _check_reading(flags)
        with self._lock:
            if self._copy is None:
                self._copy = self._view.spool.take(self.key) or self._write()
            self._readers += 1
            return _Shared(self._copy, self._close)

    def _write(self) -> SpoolFile:
        with self._view.match(self._prefix) as match:
            if ("prefix", match.namespace, match.last_hash, match.tokens) != self.key:
                fail(errno.ESTALE)  # some of it was evicted meanwhile
            file = self._view.spool.create(self._size)
            try:
                self._view.store.tensor_file(match).fill(file.fd)
            except UnverifiedError:
                self._view.spool.release(file)
                fail(errno.EIO)
            except BaseException:
                self._view.spool.release(file)
                raise
            file.size = self._size
            return file

    def _close(self) -> None:
        with self._lock:
            self._readers -= 1
            if not self._readers and self._copy is not None:
                copy, self._copy = self._copy, None
                self._view.spool.keep(self.key, copy)


class _Shared(OpenFile):
    """One open file of a copy that others may have open as well."""

    def __init__(self, copy: SpoolFile, close: Callable[[], None]) -> None:
        self._copy, self._close = copy, close
        self.backing = copy.fd

    def read(self, size: int, offset: int) -> bytes:
        return self._copy.read(size, offset)

    def close(self) -> None:
        self._close()


class SegmentFile(Node):
    """A segment of the store, as it is: its bytes are not verified."""

    def __init__(self, view: View, name: bytes, st: os.stat_result) -> None:
        super().__init__(("segment", st.st_ino))
        self._view, self._name, self._stat = view, name, st
        self._lock = threading.Lock()
        self._fd = -1
        self._readers = 0

    def attr(self) -> Attr:
        with contextlib.suppress(OSError):
            self._stat = os.stat(self._name, dir_fd=self._view.segments, follow_symlinks=False)
        return self._view.file_attr(self._stat.st_size, self._stat.st_mtime_ns)

    def open(self, flags: int) -> OpenFile:
        _check_reading(flags)
        with self._lock:
            if self._fd < 0:
                wanted = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                self._fd = os.open(self._name, wanted, dir_fd=self._view.segments)
            self._readers += 1
            file = SpoolFile(self._fd)
            file.size = os.fstat(self._fd).st_size
            return _Shared(file, self._close)

    def _close(self) -> None:
        with self._lock:
            self._readers -= 1
            if not self._readers:
                fd, self._fd = self._fd, -1
                os.close(fd)


def root(view: View, files: Node | None) -> Node:
    """The top directory; ``files``: what is below files/."""
    directories: dict[bytes, Callable[[], Node]] = {
        b"namespaces": lambda: _namespaces(view), b"prefixes": lambda: _prefixes(view), b"pins": lambda: _pins(view),
        b"segments": lambda: _segments(view),
    }  # fmt: skip
    if files is not None:
        directories[b"files"] = lambda: files

    texts: dict[bytes, Callable[[], object]] = {b"stats.json": view.store.stats}
    if exporter.available():
        texts[b"metrics.prom"] = lambda: exporter.textfile(view.store)

    def names() -> dict[bytes, int]:
        return {**dict.fromkeys(sorted(directories), stat.S_IFDIR), **dict.fromkeys(sorted(texts), stat.S_IFREG)}

    def make(name: bytes) -> Node:
        if name in texts:
            return Text(name.decode(), view, texts[name])
        return directories[name]() if name in directories else fail(errno.ENOENT)

    return Directory("root", view, names, make)


def _namespaces(view: View) -> Node:
    def make(name: bytes) -> Node:
        described = view.namespaces().get(name) or fail(errno.ENOENT)
        layout = Text(f"layout {described.digest.hex()}", view, lambda: described.body)
        return Directory(
            f"namespace {described.digest.hex()}", view, lambda: {b"layout.json": stat.S_IFREG},
            lambda leaf: layout if leaf == b"layout.json" else fail(errno.ENOENT),
        )  # fmt: skip

    return Directory("namespaces", view, lambda: dict.fromkeys(view.namespaces(), stat.S_IFDIR), make)


def _prefixes(view: View) -> Node:
    def make(name: bytes) -> Node:
        prefix = name[: -len(_TENSORS)].decode("ascii", "replace")
        if not name.endswith(_TENSORS) or not _PREFIX.match(prefix):
            fail(errno.ENOENT)
        with view.match(prefix) as match:
            return PrefixFile(view, prefix, match) if match.tokens else fail(errno.ENOENT)

    return Directory("prefixes", view, lambda: dict.fromkeys(view.prefixes(), stat.S_IFREG), make)


def _pins(view: View) -> Node:
    def names() -> dict[bytes, int]:
        return {_quoted(pin.name) + b".json": stat.S_IFREG for pin in view.store.pins()}

    def make(name: bytes) -> Node:
        wanted = unquote_to_bytes(name.removesuffix(b".json")).decode("utf-8", "replace")
        pin = next((p for p in view.store.pins() if p.name == wanted), None)
        if pin is None or not name.endswith(b".json"):
            fail(errno.ENOENT)
        return Text(f"pin {pin.name} {pin.created_us}", view, pin._asdict)

    return Directory("pins", view, names, make)


def _segments(view: View) -> Node:
    def names() -> dict[bytes, int]:
        listed = os.listdir(os.path.join(view.store.path, "segments").encode())
        return dict.fromkeys(sorted(name for name in listed if _SEGMENT.match(name)), stat.S_IFREG)

    def make(name: bytes) -> Node:
        if not _SEGMENT.match(name):
            fail(errno.ENOENT)
        st = os.stat(name, dir_fd=view.segments, follow_symlinks=False)
        return SegmentFile(view, name, st) if stat.S_ISREG(st.st_mode) else fail(errno.ENOENT)

    return Directory("segments", view, names, make)


def _check_reading(flags: int) -> None:
    if flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC:
        fail(errno.EACCES)


def _quoted(name: str) -> bytes:
    """A text as a file name: every byte that is special to a path or a shell as %XX."""
    return quote(name, safe="@+,=:").encode()


def _json(value: object) -> bytes:
    return json.dumps(value, indent=2, sort_keys=True).encode() + b"\n"
