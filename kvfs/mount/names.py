"""The names of files: a tree of directories below the store's, in which each file holds a manifest.

So the host's file system makes renames atomic, lists, and refuses names that are too long; all mounts and processes
share the tree. Nothing in it is trusted: no symlink is followed, and what is no manifest is no file.

A name whose pages were evicted is *gone*: lookups do not find it, and the sweep removes it. A name without a manifest
is *unfinished*. A writer holds a shared flock on a name, new or not, until it has finished or given up: the sweep
leaves such names alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvfs.mount import manifest as form
from kvfs.mount.chunks import Chunks
from kvfs.mount.manifest import Manifest, State
from kvfs.system.files import Files

FOLDER, TREE = "files", "names"  # <store>/files/names
FILES_MAX = 100_000  # names of one store; the sweep removes the least recently used ones beyond it
DEPTH_MAX = 64  # directories within each other that the sweep follows
VERDICT_SECONDS = 10.0  # how long a file counts as complete without another look, while its segments exist
VERDICTS_MAX = 2 * FILES_MAX
TORN_TRIES, TORN_SECONDS = 4, 0.005  # a manifest that another mount is writing is read again
log = logging.getLogger("kvfs.mount")


class Verdict(NamedTuple):
    """When a file was complete, the segments that held it, and its size."""

    at: float
    segments: frozenset[bytes]
    size: int


class Found(NamedTuple):
    """A name that stands for a file: its inode and its manifest's check."""

    ino: int
    check: int


class Head(NamedTuple):
    """What the first bytes of a manifest say, of which the rest may be damaged."""

    found: Found
    state: State


class Names:
    """Owns the tree of names; asks ``Chunks`` whether files are complete. Thread-safe."""

    def __init__(self, store_path: str, chunks: Chunks, *, read_only: bool, durable: bool) -> None:
        self._chunks = chunks
        self._clock = Files()
        self.durable = durable  # sync level "sync": what returned is on the disk
        self.read_only = read_only
        #: Directory of unnamed files; of a read-only mount, the one for temporary files.
        self.root = -1
        self._segments = os.open(os.path.join(store_path, "segments"), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._verdicts: dict[Found, Verdict] = {}
        self._lock = threading.Lock()
        self.count = 0  # as of the last sweep, and created since
        base = os.path.join(store_path, FOLDER)
        if not read_only:
            mode = stat.S_IMODE(os.stat(store_path).st_mode) & 0o2770
            for path in (base, os.path.join(base, TREE)):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(path, mode)
        with contextlib.suppress(FileNotFoundError):
            self.root = _open_dir(os.path.join(base, TREE).encode(), None)

    # -- manifests ---------------------------------------------------------------------------

    def open(self, name: bytes, dir_fd: int, flags: int = os.O_RDONLY) -> int:
        """Descriptor of the file of a name. FileNotFoundError if it is no regular file."""
        fd, st = self.look(name, dir_fd, flags)
        if not stat.S_ISREG(st.st_mode):
            os.close(fd)
            raise FileNotFoundError(errno.ENOENT, "not a file of the mount")
        return fd

    def look(self, name: bytes, dir_fd: int, flags: int = os.O_RDONLY) -> tuple[int, os.stat_result]:
        """(descriptor, status) of the file or directory of a name. FileNotFoundError if it is neither."""
        try:
            fd = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
        except OSError as exc:
            if exc.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
                raise FileNotFoundError(errno.ENOENT, "not a file of the mount") from None
            raise
        st = os.fstat(fd)
        if not (stat.S_ISREG(st.st_mode) or stat.S_ISDIR(st.st_mode)):
            os.close(fd)
            raise FileNotFoundError(errno.ENOENT, "not a file of the mount")
        return fd, st

    def head(self, fd: int, ino: int) -> Head | None:
        """What a name stands for, without reading all of its manifest; None if it is unfinished."""
        data = os.pread(fd, form.HEAD_BYTES, 0)
        if len(data) < form.HEAD_BYTES or data[:8] != form.MAGIC:
            return None
        state = form.parse_state(data[form.STATE_AT : form.STATE_AT + form.STATE_BYTES])
        return Head(Found(ino, int.from_bytes(data[56:64], "little")), state)

    def manifest(self, fd: int) -> Manifest | None:
        """The manifest in a file; None if there is none."""
        for _ in range(TORN_TRIES):
            size = os.fstat(fd).st_size
            if not 64 <= size <= form.MANIFEST_BYTES_MAX:
                return None
            found = form.parse(self._clock.read(fd, size, 0) if os.fstat(fd).st_size == size else b"")
            if found is not None:
                return found
            self._clock.sleep(TORN_SECONDS)
        return None

    def write(self, fd: int, manifest: Manifest) -> None:
        """Replace the manifest in a file. OSError; then the old one is still there if the disk was full."""
        data, before = manifest.pack(), os.fstat(fd).st_size
        if before:  # there is a manifest to keep; blocks of a new one are cheaper when the kernel writes it back
            self._clock.fallocate(fd, 0, len(data), keep_size=True)
        self._clock.write_all(fd, [data], 0)
        if before > len(data):
            os.ftruncate(fd, len(data))
        if self.durable:
            os.fsync(fd)

    def state(self, fd: int) -> State:
        return form.parse_state(os.pread(fd, form.STATE_BYTES, form.STATE_AT))

    def write_state(self, fd: int, state: State) -> None:
        """Change hits or lifetime; the time of the last change of the content stays."""
        changed = os.fstat(fd).st_mtime_ns
        os.pwrite(fd, state.pack(), form.STATE_AT)
        os.utime(fd, ns=(self._clock.now_us() * 1000, changed))

    def made_durable(self, dir_fd: int) -> None:
        """After a change of names: at sync level "sync" it is on the disk when this returns."""
        if self.durable:
            os.fsync(dir_fd)

    # -- complete or gone ----------------------------------------------------------------------

    def is_complete(self, head: Head, manifest: Callable[[], Manifest | None]) -> bool:
        """Whether a file is there with all of its pages and within its lifetime. OSError EIO if nothing can tell."""
        found = head.found
        if self._has_expired(head):
            return False
        known = self._verdicts.get(found)
        now = self._clock.monotonic()
        if known is not None and now - known.at < VERDICT_SECONDS and all(map(self._has_segment, known.segments)):
            return True
        content = manifest()
        if content is None:
            return False
        segments = self._chunks.find(content)
        if segments is None:
            self._verdicts.pop(found, None)
            return False
        self.note_complete(found, segments, content.size)
        return True

    def note_complete(self, found: Found, segments: frozenset[bytes], size: int) -> None:
        with self._lock:
            if len(self._verdicts) >= VERDICTS_MAX:
                self._verdicts.clear()
            self._verdicts[found] = Verdict(self._clock.monotonic(), segments, size)

    def size_of(self, found: Found) -> int | None:
        """The size of a file that was complete: what its manifest said when all of it was verified."""
        known = self._verdicts.get(found)
        return None if known is None else known.size

    def doubt(self, found: Found) -> None:
        """A page of the file could not be loaded: look again at the next lookup."""
        self._verdicts.pop(found, None)

    def _has_segment(self, segment_id: bytes) -> bool:
        try:
            os.stat(f"{segment_id.hex()}.kvs", dir_fd=self._segments, follow_symlinks=False)
        except OSError:
            return False
        return True

    def exists(self, name: bytes, dir_fd: int) -> bool:
        """Whether a name stands for a directory or a complete file."""
        try:
            fd, st = self.look(name, dir_fd)
        except FileNotFoundError:
            return False
        try:
            if stat.S_ISDIR(st.st_mode):
                return True
            head = self.head(fd, st.st_ino)
            return head is not None and self.is_complete(head, lambda: self.manifest(fd))
        finally:
            os.close(fd)

    # -- the sweep -----------------------------------------------------------------------------

    def sweep(self, suspects: set[Found], stopped: Callable[[], bool]) -> set[Found]:
        """Remove names that are gone, unfinished or too many; the files that seem to be gone.

        A file is removed when it was gone in this sweep and in the last one (``suspects``): meanwhile a program may
        have stored its pages again.
        """
        gone: set[Found] = set()
        used: list[tuple[int, str, bytes]] = []
        if self.root < 0 or self.read_only or not self._chunks.is_ready():
            return suspects
        for folder, name, fd, dir_fd in self._walk(stopped):
            st = os.fstat(fd)
            head = self.head(fd, st.st_ino)
            if head is None:
                self._remove_unfinished(name, fd, dir_fd)
                continue
            with contextlib.suppress(OSError):
                if self.is_complete(head, lambda fd=fd: self.manifest(fd)):  # type: ignore[misc]
                    used.append((st.st_atime_ns, folder, name))
                elif head.found in suspects or self._has_expired(head):
                    _remove(name, fd, dir_fd)
                else:
                    gone.add(head.found)
        self.count = len(used) + len(gone)
        if len(used) > FILES_MAX:
            self._remove_oldest(used)
        return gone

    def _has_expired(self, head: Head) -> bool:
        expires = head.state.expires
        return bool(expires) and expires <= self._clock.now_us() // 1_000_000

    def _walk(self, stopped: Callable[[], bool]) -> Iterator[tuple[str, bytes, int, int]]:
        """(path of the directory, name, descriptor, directory's descriptor) of each file; no symlink is followed."""
        for folder, below, names, dir_fd in os.fwalk(".", dir_fd=self.root, follow_symlinks=False):
            if stopped():
                return
            if folder.count("/") >= DEPTH_MAX:
                below.clear()
            for text in names:
                name = os.fsencode(text)
                try:
                    fd = self.open(name, dir_fd, os.O_RDWR)
                except OSError:
                    continue
                try:
                    yield folder, name, fd, dir_fd
                finally:
                    os.close(fd)

    def _remove_unfinished(self, name: bytes, fd: int, dir_fd: int) -> None:
        """Remove a name whose writer is gone."""
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self.manifest(fd) is None:
                _remove(name, fd, dir_fd)

    def _remove_oldest(self, used: list[tuple[int, str, bytes]]) -> None:
        used.sort()
        for _, folder, name in used[: len(used) - FILES_MAX * 9 // 10]:
            with contextlib.suppress(OSError):
                dir_fd = _open_dir(os.fsencode(folder), self.root)
                try:
                    fd = self.open(name, dir_fd, os.O_RDWR)
                    try:
                        _remove(name, fd, dir_fd)
                    finally:
                        os.close(fd)
                    self.count -= 1
                finally:
                    os.close(dir_fd)

    def close(self) -> None:
        for fd in (self.root, self._segments):
            if fd >= 0:
                os.close(fd)
        self.root = self._segments = -1


def _open_dir(path: bytes, dir_fd: int | None) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)


def _remove(name: bytes, fd: int, dir_fd: int) -> None:
    """Remove a name, if it still stands for the file. BlockingIOError if a writer has it: its file would be lost."""
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if is_named(fd, name, dir_fd):
        os.unlink(name, dir_fd=dir_fd)


def is_named(fd: int, name: bytes, dir_fd: int) -> bool:
    """Whether a name still stands for an open file."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(name, dir_fd=dir_fd, follow_symlinks=False))
    except OSError:
        return False
