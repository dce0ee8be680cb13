"""Segments that this process holds open for reading: each opened once, under a shared flock."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping

from kvfs.directory.io_mode import CACHE, Mode
from kvfs.directory.root import Directory
from kvfs.format import segment as fmt
from kvfs.native import library, segment_files
from kvfs.native.segment_files import SegmentHold, SegmentTable
from kvfs.segments.writer import file_name
from kvfs.system import direct_io
from kvfs.system.descriptors import Descriptor
from kvfs.system.files import Files
from kvfs.system.worker import Worker

LOCK_TRIES, LOCK_SECONDS = 40, 0.00025  # 10 ms in all: an evictor that probes a segment has its lock for microseconds
MISSING_MAX = 256  # segments without a file that are remembered until ``take_missing``
CLOSE_SECONDS = 5.0  # that a close waits for the opener thread


class OpenSegment:
    """An open segment. It stays open, and its blocks stay allocated, while a match or a read refers to it."""

    __slots__ = ("__weakref__", "_file", "direct", "generation", "mappable", "number", "segment_id", "tried_direct")

    def __init__(self, number: int, segment_id: bytes, file: Descriptor | SegmentHold, generation: str) -> None:
        self.number = number
        self.segment_id = segment_id
        self.generation = generation
        self._file = file
        self.direct: Descriptor | None = None
        self.tried_direct = False
        self.mappable = False  # set by ``may_map`` once it is known

    @property
    def fd(self) -> int:
        return self._file.fd


class HeldSegments(Mapping[int, OpenSegment]):
    """The segments of a match, by number. They stay open as long as this object exists.

    Those that were opened natively become OpenSegments when a load asks for them: a lookup needs none.
    """

    def __init__(self, files: SegmentFiles, generation: str) -> None:
        self._files, self._generation = files, generation
        self._opened: dict[int, OpenSegment] = {}
        self._held: Mapping[int, bytes] = {}  # ids of what was opened natively
        self._hold: SegmentHold | None = None

    def is_of(self, ids: Mapping[int, bytes], generation: str) -> bool:
        """Whether it holds the segments ``ids``, opened natively."""
        return self._generation == generation and self._held == ids

    def hold(self, hold: SegmentHold, ids: Mapping[int, bytes]) -> None:
        """Add what ``hold`` has of ``ids``, the segments that it was made for."""
        self._hold, held = hold, hold.held()
        self._held = ids if all(held) else {n: key for (n, key), fine in zip(ids.items(), held, strict=True) if fine}

    def add(self, opened: Mapping[int, OpenSegment]) -> None:
        self._opened |= opened

    def __getitem__(self, number: int) -> OpenSegment:
        one = self._opened.get(number)
        if one is None:
            one = self._files.share(number, self._held[number], self._generation)
            assert one is not None, "it is held, hence open"
            self._opened[number] = one
        return one

    def __contains__(self, number: object) -> bool:
        return number in self._opened or number in self._held

    def __iter__(self) -> Iterator[int]:
        return iter({**self._held, **self._opened})

    def __len__(self) -> int:
        return len({**self._held, **self._opened})


class SegmentFiles:
    """Owns the segments open for reading: opens them by id and shares each among the readers of this process.

    Thread-safe. Bytes below a published tail never change, so a held segment may be read after it was dropped; its
    blocks are reclaimed when the last holder on the host has closed it. No reference counts: a segment is closed with
    its last reference. Payloads are read through ``read`` only, which decides whether the page cache may be used.
    """

    def __init__(self, directory: Directory, mode: Mode = CACHE) -> None:
        self._directory = directory
        self._mode = mode
        self._files = directory.files
        self._lock = threading.Lock()
        self._table: SegmentTable | None = None  # of what is opened natively
        self._open: weakref.WeakValueDictionary[bytes, OpenSegment] = weakref.WeakValueDictionary()
        #: what the last match holds, if it is in use: requests of one batch often have pages in the same segments
        self._last: Callable[[], HeldSegments | None] = lambda: None
        self._missing: dict[bytes, tuple[int, str]] = {}
        self._opener: Worker | None = None
        self._in_progress: object = None  # the request that the opener works on
        self._timed_out: object = None  # the last request that a caller timed out on
        self._closed = False

    def acquire_all(self, segments: Mapping[int, bytes], generation: str, seconds: float) -> HeldSegments:
        """Those of ``segments`` (ids by number) that are open, or can be opened within ``seconds`` and a grace.

        Natively this is done in the caller's thread, which does not wait. Otherwise a separate thread opens them, since
        a disk may hang. While it hangs, callers get only what is open already.
        """
        held = self._hold_now(segments, generation)
        rest = {n: key for n, key in segments.items() if n not in held} if len(held) < len(segments) else {}
        if rest:
            with self._lock:
                opened = {number: one for number, key in rest.items() if (one := self._open.get(key)) is not None}
            rest = {number: key for number, key in rest.items() if number not in opened}
            if rest and not self.hangs:
                opened |= self._open_in_time(rest, generation, seconds)
            held.add(opened)
        return held

    def _hold_now(self, segments: Mapping[int, bytes], generation: str) -> HeldSegments:
        """Those that can be held natively."""
        table, last = self._native_table(), self._last()
        if table is not None and last is not None and segments and last.is_of(segments, generation):
            return last
        held = HeldSegments(self, generation)
        if table is not None and segments:
            held.hold(SegmentHold(table, self._directory.sub("segments"), list(segments.values())), segments)
            self._last = weakref.ref(held)
        return held

    def _native_table(self) -> SegmentTable | None:
        """None where Python opens segments."""
        native = library.loaded()
        if native is None or type(self._files) is not Files or self._mode.direct:
            return None
        if self._table is None:
            with self._lock:
                self._table = self._table or SegmentTable(native)
        return self._table

    @property
    def hangs(self) -> bool:
        """Whether a disk blocks the opener thread."""
        return self._timed_out is not None and self._timed_out is self._in_progress

    def _open_in_time(self, segments: Mapping[int, bytes], generation: str, seconds: float) -> dict[int, OpenSegment]:
        opened: dict[int, OpenSegment] = {}
        request = object()

        def work() -> None:
            self._in_progress = request
            try:
                for number, segment_id in segments.items():
                    one = self.acquire(number, segment_id, generation)
                    if one is not None:
                        opened[number] = one
            finally:
                self._in_progress = None

        try:
            opener = self._worker()
            if opener is not None:
                opener.call(work, seconds)
            else:
                work()
        except TimeoutError:
            if self._in_progress is request:  # not queued behind another request
                self._timed_out = request
        return dict(opened)

    def _worker(self) -> Worker | None:
        """The opener; None where the process may start no more threads, or after the close, which stops it."""
        with self._lock:
            if self._opener is None and not self._closed:
                with contextlib.suppress(RuntimeError):
                    self._opener = Worker("kvfs-open")
            return self._opener

    def close(self) -> None:
        """Stop the opener. Open segments stay open for their holders."""
        with self._lock:
            self._closed = True
            opener, self._opener = self._opener, None
        if opener is not None:
            opener.stop(0.0 if self.hangs else CLOSE_SECONDS)

    def acquire(self, number: int, segment_id: bytes, generation: str) -> OpenSegment | None:
        """The segment, open as long as the result is referenced; None if it has no file or cannot be opened."""
        held = self.share(number, segment_id, generation)
        if held is not None:
            return held
        try:
            file = self._open_locked(segment_id)  # without ``_lock``: a disk may block this for long
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
                return None  # short of descriptors, perhaps: the pages stay in the index
        with self._lock:
            return self._open.setdefault(segment_id, held)  # another thread may have been faster

    def share(self, number: int, segment_id: bytes, generation: str) -> OpenSegment | None:
        """The segment, if it is open or can be opened natively."""
        with self._lock:
            one = self._open.get(segment_id)
        table = self._table or self._native_table() if one is None else None
        if table is not None:
            hold = SegmentHold(table, self._directory.sub("segments"), [segment_id])
            if hold.fd >= 0:
                one = OpenSegment(number, segment_id, hold, generation)
                with self._lock:
                    one = self._open.setdefault(segment_id, one)
        return one

    def take_missing(self) -> dict[bytes, tuple[int, str]]:
        """Requested segments without a file, with number and generation; most were dropped meanwhile."""
        with self._lock:
            missing, self._missing = self._missing, {}
            return missing

    def _open_locked(self, segment_id: bytes) -> Descriptor | None:
        """Open a segment under a shared flock. FileNotFoundError if it has no file; None for other errors."""
        try:
            segments = self._directory.sub("segments")
            file = Descriptor.open_unstamped(self._files, file_name(segment_id), dir_fd=segments)
        except FileNotFoundError:
            raise
        except OSError:
            return None
        try:
            # an unlink happens under LOCK_EX, so the link count cannot change under LOCK_SH
            for _ in range(LOCK_TRIES):
                if self._files.flock(file.fd, fcntl.LOCK_SH):
                    if self._files.fstat(file.fd).st_nlink > 0:
                        if self._mode.direct:  # only tables are read here: readahead would bring payloads along
                            self._files.random_access(file.fd)
                        return file
                    break
                self._files.sleep(LOCK_SECONDS)
        except OSError:
            pass
        file.close()
        return None

    def direct(self, held: OpenSegment) -> int:
        """Descriptor of a held segment for reads with O_DIRECT; negative where it cannot be opened so."""
        with self._lock:
            if not held.tried_direct:
                held.direct = self._reopen_direct(held)
                held.tried_direct = True
            return held.direct.fd if held.direct is not None else -1

    def _reopen_direct(self, held: OpenSegment) -> Descriptor | None:
        """Open a held segment with O_DIRECT, by its descriptor: it may have no name any more."""
        try:
            file = Descriptor.reopen(self._files, held.fd, os.O_RDONLY | os.O_DIRECT)
        except OSError:
            return None
        with contextlib.suppress(OSError):
            if self._files.flock(file.fd, fcntl.LOCK_SH):
                return file
        file.close()
        return None

    def sweep(self) -> None:
        """Release what any store's lookups lost to an interrupt. For a thread other than the main one."""
        segment_files.sweep()

    # -- payload -----------------------------------------------------------------------------

    def read(self, held: OpenSegment, target: memoryview, offset: int, *, direct: bool = False) -> None:
        """Fill ``target`` with stored bytes from ``offset``. OSError if they cannot be read.

        ``direct`` bypasses the page cache where O_DIRECT works; mode staging always bypasses it.
        """
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
        """Bytes of a range that are in the page cache; None if the kernel does not tell."""
        return 0 if self._mode.direct else self._files.cached_bytes(held.fd, offset, nbytes)

    def may_map(self, held: OpenSegment) -> bool:
        return may_map(self._files, held)

    def count(self) -> int:
        """Segments that are open."""
        with self._lock:
            by_python = sum(not isinstance(one._file, SegmentHold) for one in self._open.values())
        return by_python + (self._table.open_count() if self._table is not None else 0)

    def abandon(self) -> None:
        """In a forked child, where the parent's descriptors are closed: start without open segments."""
        self._lock = threading.Lock()
        self._open, self._missing, self._table = weakref.WeakValueDictionary(), {}, None
        self._opener, self._in_progress, self._timed_out, self._last = None, None, None, lambda: None


def may_map(files: Files, held: OpenSegment) -> bool:
    """Whether a segment may be mapped. One written with O_DIRECT may be mapped only when it is sealed.

    A map may bring neighbouring pages into the page cache (large folios, readahead). If such a page is pinned, a later
    direct write cannot invalidate it, and readers would see its old bytes permanently.
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
    """Size in bytes of a segment if it is sealed, else 0."""
    end = files.fstat(held.fd).st_size
    seal = fmt.parse_seal(files.read(held.fd, fmt.BLOCK, end - fmt.BLOCK)) if end > fmt.BLOCK else None
    fits = seal is not None and seal.segment_id == held.segment_id and seal.tail == end - fmt.BLOCK
    return end if fits else 0
