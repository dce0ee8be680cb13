"""Segments that this process holds open for reading, each once, each under a shared flock."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import weakref
from collections.abc import Mapping

from kvfs.directory.io_mode import CACHE, Mode
from kvfs.directory.root import Directory
from kvfs.format import segment as fmt
from kvfs.segments.writer import file_name
from kvfs.system import direct_io
from kvfs.system.descriptors import Descriptor
from kvfs.system.files import Files
from kvfs.system.worker import Worker

LOCK_TRIES, LOCK_SECONDS = 40, 0.00025
MISSING_MAX = 256
CLOSE_SECONDS = 5.0


class OpenSegment:
    """An open segment, for as long as somebody refers to it: a match, a read in progress."""

    __slots__ = ("__weakref__", "_file", "direct", "generation", "mappable", "number", "segment_id", "tried_direct")

    def __init__(self, number: int, segment_id: bytes, file: Descriptor, generation: str) -> None:
        self.number = number
        self.segment_id = segment_id
        self.generation = generation
        self._file = file
        self.direct: Descriptor | None = None
        self.tried_direct = False
        self.mappable = False  # as far as is known: see ``may_map``

    @property
    def fd(self) -> int:
        return self._file.fd


class SegmentFiles:
    """Opens segments by id and shares the descriptor among the readers of this process. Thread-safe.

    Bytes below a published tail never change, so a held segment may be read after it was dropped; its blocks
    are free when the last holder anywhere lets go. Nobody counts: a segment is closed with its last reference.
    Payload is read with ``read`` alone, which knows whether the page cache may be used.
    """

    def __init__(self, directory: Directory, mode: Mode = CACHE) -> None:
        self._directory = directory
        self._mode = mode
        self._files = directory.files
        self._lock = threading.Lock()
        self._open: weakref.WeakValueDictionary[bytes, OpenSegment] = weakref.WeakValueDictionary()
        self._missing: dict[bytes, tuple[int, str]] = {}
        self._opener: Worker | None = None
        self._opens: object = None  # what the opener is at
        self._late: object = None  # of that, what somebody has waited for in vain
        self._closed = False

    def acquire_all(self, segments: Mapping[int, bytes], generation: str, seconds: float) -> dict[int, OpenSegment]:
        """Those of ``segments`` (ids by number) that are open, or can be opened within ``seconds`` and a grace.

        A thread of its own opens them, since a disk may keep whoever does; nobody waits for it again until it is back.
        """
        with self._lock:
            held = {number: one for number, key in segments.items() if (one := self._open.get(key)) is not None}
        rest = {number: key for number, key in segments.items() if number not in held}
        return held | self._open_in_time(rest, generation, seconds) if rest and not self.hangs else held

    @property
    def hangs(self) -> bool:
        """Whether a disk keeps the thread that opens."""
        return self._late is not None and self._late is self._opens

    def _open_in_time(self, segments: Mapping[int, bytes], generation: str, seconds: float) -> dict[int, OpenSegment]:
        opened: dict[int, OpenSegment] = {}
        me = object()

        def work() -> None:
            self._opens = me
            try:
                for number, segment_id in segments.items():
                    one = self.acquire(number, segment_id, generation)
                    if one is not None:
                        opened[number] = one
            finally:
                self._opens = None

        try:
            opener = self._worker()
            if opener is not None:
                opener.call(work, seconds)
            else:
                work()
        except TimeoutError:
            if self._opens is me:  # and does not wait for another's
                self._late = me
        return dict(opened)

    def _worker(self) -> Worker | None:
        """None where the process may have no more threads, or after the close, when nobody would end it."""
        with self._lock:
            if self._opener is None and not self._closed:
                with contextlib.suppress(RuntimeError):
                    self._opener = Worker("kvfs-open")
            return self._opener

    def close(self) -> None:
        """What is open stays so for those that have it."""
        with self._lock:
            self._closed = True
            opener, self._opener = self._opener, None
        if opener is not None:
            opener.stop(0.0 if self.hangs else CLOSE_SECONDS)

    def acquire(self, number: int, segment_id: bytes, generation: str) -> OpenSegment | None:
        """The segment, open as long as the result lives; None if it is gone or cannot be opened."""
        with self._lock:
            held = self._open.get(segment_id)
        if held is not None:
            return held
        try:
            file = self._open_locked(segment_id)  # a disk may keep that for long, and others want theirs
        except FileNotFoundError:
            with self._lock:
                if len(self._missing) < MISSING_MAX:
                    self._missing[segment_id] = number, generation
            return None
        if file is None:
            return None
        held = OpenSegment(number, segment_id, file, generation)
        if self._mode.direct:
            held.direct, held.tried_direct = self._reopen_direct(held), True
            if held.direct is None:
                return None  # short of descriptors, perhaps: its pages are as good as they were
        with self._lock:
            return self._open.setdefault(segment_id, held)  # another thread may have been faster

    def take_missing(self) -> dict[bytes, tuple[int, str]]:
        """Segments that were asked for and have no file, with number and generation; most were dropped meanwhile."""
        with self._lock:
            missing, self._missing = self._missing, {}
            return missing

    def _open_locked(self, segment_id: bytes) -> Descriptor | None:
        """FileNotFoundError if there is no such file; None for all that may be otherwise the next time."""
        try:
            segments = self._directory.sub("segments")
            file = Descriptor.open(self._files, file_name(segment_id), os.O_RDONLY, dir_fd=segments)
        except FileNotFoundError:
            raise
        except OSError:
            return None
        try:
            # whoever unlinks holds LOCK_EX meanwhile, so a link count seen under LOCK_SH stays; an evictor that
            # only looks whether a segment is held has the lock for microseconds
            for _ in range(LOCK_TRIES):
                if self._files.flock(file.fd, fcntl.LOCK_SH):
                    if self._files.fstat(file.fd).st_nlink > 0:
                        if self._mode.direct:  # tables alone are read here: no payload comes along
                            self._files.random_access(file.fd)
                        return file
                    break
                self._files.sleep(LOCK_SECONDS)
        except OSError:
            pass
        file.close()
        return None

    def direct(self, held: OpenSegment) -> int:
        """Descriptor of a held segment for reads that bypass the page cache; negative where there is none."""
        with self._lock:
            if not held.tried_direct:
                held.direct = self._reopen_direct(held)
                held.tried_direct = True
            return held.direct.fd if held.direct is not None else -1

    def _reopen_direct(self, held: OpenSegment) -> Descriptor | None:
        """The segment that is held, though it may have been dropped and have no name any more."""
        try:
            file = Descriptor.reopen(self._files, held.fd, os.O_RDONLY | os.O_DIRECT)
        except OSError:
            return None
        with contextlib.suppress(OSError):
            if self._files.flock(file.fd, fcntl.LOCK_SH):
                return file
        file.close()
        return None

    # -- payload -----------------------------------------------------------------------------

    def read(self, held: OpenSegment, target: memoryview, offset: int, *, direct: bool = False) -> None:
        """Fill ``target`` with stored bytes. ``direct`` bypasses the page cache if it can; mode staging always does."""
        fd = self.direct(held) if direct or self._mode.direct else -1
        if fd >= 0:
            direct_io.read(self._files, fd, target, offset)
        elif self._mode.direct:
            raise OSError(errno.EIO, "the segment cannot be opened with O_DIRECT")
        else:
            self._files.read_into(held.fd, target, offset)

    def read_bytes(self, held: OpenSegment, nbytes: int, offset: int) -> bytearray:
        data = bytearray(nbytes)
        self.read(held, memoryview(data), offset)
        return data

    def cached_bytes(self, held: OpenSegment, offset: int, nbytes: int) -> int | None:
        """How much of a range the page cache would serve; None if the kernel does not say."""
        return 0 if self._mode.direct else self._files.cached_bytes(held.fd, offset, nbytes)

    def may_map(self, held: OpenSegment) -> bool:
        return may_map(self._files, held)

    def count(self) -> int:
        return len(self._open)

    def abandon(self) -> None:
        """In a forked child, where the parent's descriptors are closed."""
        self._lock = threading.Lock()
        self._open, self._missing = weakref.WeakValueDictionary(), {}
        self._opener, self._opens, self._late = None, None, None


def may_map(files: Files, held: OpenSegment) -> bool:
    """Whether a segment may be mapped. One written past the page cache only when it is sealed.

    A map may bring more into the page cache than what it is of: a large folio, readahead. Where that is pinned, a
    write past the page cache cannot make it go, and the old bytes would be seen for ever.
    """
    if not held.mappable:
        try:
            header = fmt.parse_header(files.read(held.fd, fmt.BLOCK, 0))
            written_direct = header is None or bool(header.flags & fmt.FLAG_DIRECT)
            held.mappable = not written_direct or sealed_bytes(files, held) > 0
        except OSError:
            return False
    return held.mappable


def sealed_bytes(files: Files, held: OpenSegment) -> int:
    """Size of a segment if it is sealed, else 0."""
    end = files.fstat(held.fd).st_size
    seal = fmt.parse_seal(files.read(held.fd, fmt.BLOCK, end - fmt.BLOCK)) if end > fmt.BLOCK else None
    fits = seal is not None and seal.segment_id == held.segment_id and seal.tail == end - fmt.BLOCK
    return end if fits else 0
