"""What operators ask about afterwards: who changed settings, purged, repaired or evicted in bulk, and when.

``run/events`` holds one JSON object per line. When it is full it replaces ``run/events.1``, and a new file begins.
The log is advice: no call raises for a file system that fails, and lines that do not parse are skipped.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from kvfs.directory.root import Directory
from kvfs.system.descriptors import Descriptor

EVENTS, OLDER = "events", "events.1"
FILE_BYTES = 16 * 1024  # of a small store, about 100 events; ``Settings.event_file_bytes``
FILE_BYTES_MAX = 1 << 20  # that are read
LINE_BYTES_MAX = 2048
WAIT_SECONDS = 0.2  # for the lock: an append takes a fraction of a millisecond
TRIES = 4  # of one append, while other processes replace the file
AT_US_MAX, NUMBER_MAX = 1 << 57, 1 << 63  # a time in the year 6537; a detail or a process id
_TEXT_MAX = 256  # characters of one detail


#: Counts that are noted as one event per minute and process, if they grew: name of the count -> what happened.
NOTED_COUNTS = {
    "segments_evicted": "segments evicted",
    "segments_expired": "segments expired",
    "segments_missing": "segments missing",
    "pages_corrupt": "pages damaged",
    "read_errors": "reads failed",
    "write_errors": "writes failed",
    "sync_errors": "syncs failed",
    "disk_full": "disk full",
    "rebuild_failed": "rebuild failed",
    "settings_refused": "settings refused",
    "bundles_refused": "bundles refused",
    "bundles_adopted": "bundles adopted",
}


class Event(NamedTuple):
    """One thing that happened to the store."""

    at_us: int
    what: str
    pid: int  # in the PID namespace of the process
    command: str  # name of its program
    details: dict[str, Any]


class EventLog:
    """Appends to the log of one store, and reads it. Thread-safe."""

    def __init__(self, directory: Directory, file_bytes: int = FILE_BYTES) -> None:
        """``file_bytes``: of each of the two files, at most."""
        self._directory = directory
        self._file_bytes = file_bytes
        self._files = directory.files

    def add_once(self, what: str, seconds: float, **details: str | int) -> None:
        """``add``, unless a process has noted the same within the last ``seconds``."""
        since, cut = self._files.now_us() - int(seconds * 1e6), _cut(details)
        if not any(e.what == what and e.at_us > since and e.details == cut for e in self.read()):
            self.add(what, **details)

    def add(self, what: str, **details: str | int) -> None:
        """Note an event with its details; values are cut to 256 characters."""
        if self._directory.read_only:
            return
        program = os.path.basename(sys.argv[0] if sys.argv else "")[:_TEXT_MAX]
        event = Event(self._files.now_us(), what, os.getpid(), program, _cut(details))
        line = json.dumps(event._asdict()).encode() + b"\n"
        if len(line) <= LINE_BYTES_MAX:
            with contextlib.suppress(OSError):
                self._append(line)

    def _append(self, line: bytes) -> None:
        """Append. The lock is released with the descriptor, also by a death."""
        run = self._directory.sub("run")
        for _ in range(TRIES):
            with contextlib.suppress(FileExistsError):
                Descriptor.create(self._files, EVENTS, self._directory.file_mode, dir_fd=run).close()
            file = Descriptor.open(self._files, EVENTS, os.O_RDWR, dir_fd=run)
            try:
                if not self._locked(file.fd):
                    return
                if not self._has_name(file.fd, run):
                    continue  # it was full, and another process has replaced it
                size = self._files.fstat(file.fd).st_size
                if size and size + len(line) > self._file_bytes:
                    self._files.rename(EVENTS, OLDER, src_dir_fd=run, dst_dir_fd=run)
                    continue
                torn = size and self._files.read(file.fd, 1, size - 1) != b"\n"  # by a death, or a full disk
                self._files.write_all(file.fd, [b"\n" + line if torn else line], size)
                return
            finally:
                file.close()

    def _has_name(self, fd: int, run: int) -> bool:
        """Whether a file is still the one that events are appended to."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(self._files.fstat(fd), self._files.stat(EVENTS, dir_fd=run))
        return False

    def _locked(self, fd: int) -> bool:
        """False if another process keeps the lock: it was stopped while it appended."""
        end = self._files.monotonic() + WAIT_SECONDS
        while not self._files.flock(fd, fcntl.LOCK_EX):
            if self._files.monotonic() >= end:
                return False
            self._files.sleep(0.001)
        return True

    def read(self) -> Iterator[Event]:
        """The events that are kept, oldest first."""
        for name in (OLDER, EVENTS):
            data = b""
            with contextlib.suppress(OSError):
                file = Descriptor.open(self._files, name, os.O_RDONLY, dir_fd=self._directory.sub("run"))
                data = self._files.read(file.fd, min(self._files.fstat(file.fd).st_size, FILE_BYTES_MAX), 0)
            yield from filter(None, map(_parse, data.splitlines()))


def _cut(details: Mapping[str, str | int]) -> dict[str, Any]:
    return {name: value[:_TEXT_MAX] if isinstance(value, str) else value for name, value in details.items()}


def _parse(line: bytes) -> Event | None:
    try:
        event = Event(**json.loads(line))
    except (ValueError, TypeError, RecursionError):
        return None
    kinds = (int, str, int, str, dict)
    if not all(type(value) is kind for value, kind in zip(event, kinds, strict=True)):
        return None
    details = event.details.values()
    if not all(type(value) in (str, int) for value in details) or not 0 <= event.at_us < AT_US_MAX:
        return None
    numbers = (value for value in (event.pid, *details) if type(value) is int)
    return event if all(abs(value) < NUMBER_MAX for value in numbers) else None
