"""When records were last used: one small file of access times per segment, shared by all processes.

``run/use/<segment id>`` holds a u64 (microseconds since 1970) per record, by its seq. A reader writes one with a pwrite
and does not touch the index; readers that race write nearly the same number. The file is advice: where an access time
is absent, damaged or in the future, the time of writing counts. The file is never mapped (a full disk would be SIGBUS).

``stamp`` only notes a use: an engine's scheduler calls it, and a disk may hang. The background writes what was noted
every FLUSH_SECONDS, and so does a thread that reads access times, before it reads.
"""

from __future__ import annotations

import contextlib
import os
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvfs.directory.root import Directory
from kvfs.system.descriptors import Descriptor, opened
from kvfs.system.files import pack_u64

STAMP_BYTES = 8  # of one access time
_OPEN_MAX = 64  # files that are kept open
RECORDS_MAX = 1 << 23  # of one segment: longer files are cut there
REQUESTS_MAX = 4096  # requests that are remembered
FLUSH_SECONDS = 0.25  # how old a use is at most before other processes see it
NOTED_MAX = 1 << 20  # access times that wait to be written: of a disk that hangs, the later ones are lost
CLOSE_SECONDS = 1.0  # how long a close waits for the disk
REQUEST_US = 600_000_000  # a prompt that is saved within this time of its lookup belongs to the same request


class AccessTimes:
    """Writes and reads access times. No call raises for a file system that fails: they are advice."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._files = directory.files
        self._lock = threading.Lock()  # lookups wait for it: no call to the disk inside
        self._open: OrderedDict[bytes, Descriptor] = OrderedDict()
        self._requests: OrderedDict[bytes, int] = OrderedDict()
        self._noted: list[tuple[bytes, int, Sequence[int]]] = []  # (segment id, seq of the first record, times)
        self._noted_count = 0
        self._own: Descriptor | None = None  # of ``run/use``, for the thread that a close may leave

    def note_request(self, chunk_hash: bytes, at_us: int) -> None:
        """A lookup, load or save at ``at_us`` ended in ``chunk_hash``: a save that goes on from there has its time."""
        with self._lock:
            self._requests[chunk_hash] = at_us
            self._requests.move_to_end(chunk_hash)
            if len(self._requests) > REQUESTS_MAX:
                self._requests.popitem(last=False)

    def request_of(self, chunk_hash: bytes) -> int | None:
        """When the request that ends in ``chunk_hash`` began, if that was less than REQUEST_US ago."""
        with self._lock:
            at_us = self._requests.get(chunk_hash)
        return at_us if at_us is not None and 0 <= self._files.now_us() - at_us < REQUEST_US else None

    def stamp(self, segment_id: bytes, first: int, stamps: Sequence[int]) -> None:
        """Records from ``first`` on were used at these times. All that one request uses gets the same time:
        eviction takes records with equal access times for pages of one prompt."""
        if self._directory.read_only or not stamps:
            return
        with self._lock:
            if self._noted_count + len(stamps) <= NOTED_MAX:
                self._noted.append((segment_id, first, stamps))
                self._noted_count += len(stamps)

    def flush(self) -> None:
        """Write what was noted."""
        with self._lock:
            noted, self._noted, self._noted_count = self._noted, [], 0
        for segment_id, first, stamps in noted:
            with contextlib.suppress(OSError):
                file = self._file(segment_id)
                self._files.write_all(file.fd, [pack_u64(stamps)], first * STAMP_BYTES)

    def _file(self, segment_id: bytes) -> Descriptor:
        """The file of a segment. It stays open as long as the caller refers to it, even if it leaves the cache: so the
        lock is not held while the disk is busy."""
        with self._lock:
            file = self._open.get(segment_id)
            if file is not None:
                self._open.move_to_end(segment_id)
                return file
        file = self._opened(segment_id)
        with self._lock:
            self._open[segment_id] = file
            if len(self._open) > _OPEN_MAX:
                self._open.popitem(last=False)
        return file

    def _folder(self) -> int:
        own = self._own
        return self._directory.sub("run/use") if own is None else own.fd

    def _opened(self, segment_id: bytes) -> Descriptor:
        run, name, files = self._folder(), segment_id.hex(), self._files
        try:
            file = Descriptor.open(files, name, os.O_RDWR, dir_fd=run)
            if files.fstat(file.fd).st_nlink > 1:  # of a snapshot, or no file of kvfs
                file.close()
                files.unlink(name, dir_fd=run)
                raise FileNotFoundError
        except FileNotFoundError:
            try:
                file = Descriptor.create(files, name, self._directory.file_mode, dir_fd=run)
            except FileExistsError:
                file = Descriptor.open(files, name, os.O_RDWR, dir_fd=run)
        return file

    def stamps(self, segment_id: bytes, written_us: Iterable[int]) -> list[int]:
        """Access time of each record; where there is none, the time at which it was written."""
        now, used = self._files.now_us(), list(written_us)
        stamps = self.raw(segment_id, len(used))
        for i, stamp in enumerate(stamps):
            if 0 < stamp <= now:
                used[i] = stamp
        return used

    def raw(self, segment_id: bytes, records_max: int = RECORDS_MAX) -> array[int]:
        """The access times in the file, by seq; empty if there is no file."""
        self.flush()
        stamps = array("Q")
        with contextlib.suppress(OSError):
            file = Descriptor.open(self._files, segment_id.hex(), os.O_RDONLY, dir_fd=self._directory.sub("run/use"))
            size = min(self._files.fstat(file.fd).st_size // STAMP_BYTES, records_max) * STAMP_BYTES
            stamps.frombytes(self._files.read(file.fd, size, 0))
        return stamps

    def was_used(self, segment_id: bytes, seq: int) -> bool:
        """Whether a record was used since it was written."""
        for noted, first, stamps in list(self._noted):  # not written yet
            if noted == segment_id and first <= seq < first + len(stamps):
                return True
        run = self._directory.sub("run/use")
        with contextlib.suppress(OSError), opened(self._files, segment_id.hex(), os.O_RDONLY, dir_fd=run) as fd:
            return any(self._files.read(fd, STAMP_BYTES, seq * STAMP_BYTES))
        return False

    def version(self, segment_id: bytes) -> tuple[int, int]:
        """Changes when an access time does."""
        self.flush()
        try:
            st = self._files.stat(segment_id.hex(), dir_fd=self._directory.sub("run/use"))
        except OSError:
            return 0, 0
        return st.st_mtime_ns, st.st_size

    def forget(self, segment_id: bytes) -> None:
        """The segment is reclaimed."""
        with self._lock:
            self._open.pop(segment_id, None)
            self._noted = [noted for noted in self._noted if noted[0] != segment_id]
            self._noted_count = sum(len(stamps) for _, _, stamps in self._noted)
        with contextlib.suppress(OSError):
            self._files.unlink(segment_id.hex(), dir_fd=self._directory.sub("run/use"))

    def sweep(self, known: set[bytes]) -> None:
        """Remove the access times of segments that no longer exist."""
        with contextlib.suppress(OSError):
            run = self._directory.sub("run/use")
            names = {segment_id.hex() for segment_id in known}
            for name in self._files.listdir(run):
                if name not in names:
                    with contextlib.suppress(OSError):  # a directory, for example: not made by kvfs
                        self._files.unlink(name, dir_fd=run)

    def close(self) -> None:
        """Write what was noted. A disk that hangs is left to a thread, whose folder is its own: the directory will be
        closed, and the number of its descriptor may be another folder's, when the disk answers."""
        if self._noted:
            with contextlib.suppress(OSError):
                folder = self._directory.sub("run/use")
                self._own = Descriptor.reopen(self._files, folder, os.O_RDONLY | os.O_DIRECTORY)
                self._write_last()
        with self._lock:
            self._open.clear()

    def _write_last(self) -> None:
        def write() -> None:
            self.flush()
            with self._lock:
                self._open.clear()
            self._own = None

        writer = threading.Thread(target=write, name="kvfs-stamps", daemon=True)
        try:
            writer.start()
        except RuntimeError:  # Python 3.12 starts no thread while it exits; or the process may have no more
            write()
        else:
            writer.join(CLOSE_SECONDS)

    def abandon(self) -> None:
        """In a forked child: what was noted is the parent's to write."""
        self._lock = threading.Lock()
        self._noted, self._noted_count = [], 0
        self._own = None
        self._open.clear()
