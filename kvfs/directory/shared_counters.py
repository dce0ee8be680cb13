"""Counts of all processes of a store, summed without a daemon, across restarts and deaths.

``run/totals`` holds the sums. Each process adds what it has counted since it last did so, every EVERY_SECONDS and when
it closes the store. The file consists of two slots that are written in turn, each with its own checksum: a death in the
middle of a write leaves the other slot. An exclusive flock serializes the updates; a process that does not get it
within WAIT_SECONDS keeps its counts until the next time. Blocks are allocated when the file is made, and updates
overwrite them: a disk that fills up later costs nothing. Counts are advice: no call raises for a file system that
fails, and what a killed process counted since its last update is lost.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import struct
import threading
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from kvfs.directory.root import Directory
from kvfs.format.checksums import checksum
from kvfs.system.descriptors import Descriptor

SLOT_BYTES = 16 * 1024
NAMES_MAX = 160  # in the sums: with names of 56 characters and counts of 19 digits they fit into a slot
EVERY_SECONDS = 5.0  # how old the published counts of a live process are at most
WAIT_SECONDS = 0.2  # for the lock: an update takes a fraction of a millisecond, unless its process is stopped
READS_MAX = 3  # of the slots, until one of them is not in the middle of an update
TOTALS = "totals"
_HEAD = struct.Struct("<QQI")  # check, turn, length of the JSON that follows
_NAME = re.compile(r"[a-z0-9_-]{1,56}\Z")
_COUNT_MAX = 1 << 62
_OLD_FILE = re.compile(r"[0-9a-f]{32}\.count\Z")  # of earlier versions, one per process


class _Slot(NamedTuple):
    turn: int  # the higher one is the valid one
    counts: dict[str, int]


_EMPTY = _Slot(0, {})


class SharedCounters:
    """The sums of a store, and what this process has added to them."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._files = directory.files
        self._added: Mapping[str, int] = {}  # counts of this process that the sums contain
        self._lock = threading.Lock()
        self._removed_old_files = False

    def add(self, counts: Mapping[str, int]) -> None:
        """Bring the sums up to date with ``counts``: all that this process has counted so far."""
        if self._directory.read_only or not self._lock.acquire(timeout=WAIT_SECONDS):
            return
        try:
            gained = {name: n - self._added.get(name, 0) for name, n in counts.items()}
            if any(gained.values()) and self._add(gained):
                self._added = dict(counts)
        except OSError:
            pass
        finally:
            self._lock.release()

    def total(self) -> dict[str, int]:
        """The sums over all processes, live and dead, since the store was made."""
        with contextlib.suppress(OSError):
            file = Descriptor.open(self._files, TOTALS, os.O_RDONLY, dir_fd=self._directory.sub("run"))
            for _ in range(READS_MAX):
                if (found := self._read(file)).turn:
                    return found.counts
        return {}

    def _add(self, gained: Mapping[str, int]) -> bool:
        """False if another process keeps the lock."""
        if not self._removed_old_files:
            self._remove_old_files()
        file = self._opened()
        if not self._locked(file):
            return False
        if self._files.fstat(file.fd).st_size < 2 * SLOT_BYTES:
            self._files.write_all(file.fd, [bytes(2 * SLOT_BYTES)], 0)
        before = self._read(file)
        counts = Counter(before.counts)
        counts.update(gained)
        slot = _pack(_Slot(before.turn + 1, counts))
        self._files.write_all(file.fd, [slot], (before.turn + 1) % 2 * SLOT_BYTES)
        return True

    def _opened(self) -> Descriptor:
        """The file. It is locked as long as the result lives."""
        run = self._directory.sub("run")
        with contextlib.suppress(FileExistsError):
            return Descriptor.create(self._files, TOTALS, self._directory.file_mode, dir_fd=run)
        return Descriptor.open(self._files, TOTALS, os.O_RDWR, dir_fd=run)

    def _locked(self, file: Descriptor) -> bool:
        end = self._files.monotonic() + WAIT_SECONDS
        while not self._files.flock(file.fd, fcntl.LOCK_EX):
            if self._files.monotonic() >= end:
                return False
            self._files.sleep(0.001)
        return True

    def _read(self, file: Descriptor) -> _Slot:
        data = self._files.read(file.fd, 2 * SLOT_BYTES, 0)
        return max((_parse(data[:SLOT_BYTES]), _parse(data[SLOT_BYTES:])), key=lambda slot: slot.turn)

    def _remove_old_files(self) -> None:
        run = self._directory.sub("run")
        for name in self._files.listdir(run):
            if _OLD_FILE.match(name):
                with contextlib.suppress(OSError):
                    self._files.unlink(name, dir_fd=run)
        self._removed_old_files = True


def _pack(slot: _Slot) -> bytes:
    # a latency has a name for each of its buckets: these are left out first
    names = sorted(filter(_NAME.match, slot.counts), key=lambda name: ("_us_" in name, name))[:NAMES_MAX]
    body = json.dumps({"counts": {name: slot.counts[name] for name in names}}).encode()
    assert len(body) <= SLOT_BYTES - _HEAD.size, "names are bounded"
    head = _HEAD.pack(0, slot.turn, len(body))[8:]
    return checksum(head + body).to_bytes(8, "little") + head + body


def _parse(data: bytes) -> _Slot:
    """A slot's content; empty for bytes that are not one."""
    check, turn, length = _HEAD.unpack_from(data)
    end = _HEAD.size + length
    if end > len(data) or checksum(data[8:end]) != check:
        return _EMPTY
    try:
        named = [(name, n) for name, n in json.loads(data[_HEAD.size : end])["counts"].items() if _NAME.match(name)]
        return _Slot(turn, {name: n for name, n in named if type(n) is int and 0 <= n < _COUNT_MAX})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return _EMPTY
