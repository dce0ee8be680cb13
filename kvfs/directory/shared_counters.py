"""Counts shared by all processes of a store without a daemon, across restarts and deaths.

Each live process writes its counts into ``run/<owner>.count``; ``run/totals`` holds the sum of those that have
ended. Who closes folds its own file into the totals; a file whose process died is folded by whoever notices. Both
kinds of file consist of two slots that are written in turn, each with its own check word, so that a death in the
middle of a write leaves the one before. Blocks are allocated when a file is made, and writes go over them with
pwrite: a disk that fills up later costs nothing. Counts are advice: no call raises for a file system that
misbehaves, and what a killed process counted in its last seconds is lost.

Folding is idempotent: the totals name the owners that they contain until those files are unlinked.
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
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from kvfs.directory.liveness import Liveness
from kvfs.directory.root import Directory
from kvfs.format.checksums import checksum
from kvfs.system.descriptors import Descriptor, opened

SLOT_BYTES = 16 * 1024
NAMES_MAX = 160
FOLDED_MAX = 64
EVERY_SECONDS = 5.0
_HEAD = struct.Struct("<QQI")  # check, turn, length of the JSON behind it
_FILE = re.compile(r"([0-9a-f]{32})\.count\Z")
_NAME = re.compile(r"[a-z0-9_-]{1,56}\Z")
_COUNT_MAX = 1 << 62
TOTALS = "totals"
NOW = "now_"  # begins the names of what only counts as long as the process lives


class CountersSnapshot(NamedTuple):
    """Content of one file."""

    turn: int
    counts: dict[str, int]
    folded: frozenset[str]  # totals only: owners whose files are contained


_EMPTY = CountersSnapshot(0, {}, frozenset())


class SharedCounters:
    """The counts of a store: this process's file, and the sum of all."""

    def __init__(self, directory: Directory, liveness: Liveness | None) -> None:
        self._directory = directory
        self._files = directory.files
        self._liveness = liveness
        self._file: Descriptor | None = None
        self._turn = 0
        self._written: Mapping[str, int] = {}
        self.excluded = False  # what this process counts is not for the others
        self._lock = threading.Lock()

    # -- this process ------------------------------------------------------------------------

    def write(self, counts: Mapping[str, int]) -> None:
        """Publish what this process has counted so far."""
        if self._liveness is None or self.excluded or counts == self._written:
            return
        with self._lock, contextlib.suppress(OSError):
            if self._file is None:
                self._file = self._make(f"{self._liveness.owner.hex()}.count")
            self._turn += 1
            self._write_slot(self._file.fd, CountersSnapshot(self._turn, dict(counts), frozenset()))
            self._written = dict(counts)

    def close(self, counts: Mapping[str, int]) -> None:
        """Fold this process's counts into the totals: its last act."""
        if self._liveness is None:
            return
        self.write(counts)
        with self._lock, contextlib.suppress(OSError):
            if self._file is not None:
                self._file.close()
                self._file = None
                self._merge({self._liveness.owner.hex()})

    def abandon(self) -> None:
        """In a forked child: the file is the parent's."""
        self._lock = threading.Lock()
        self._file = None

    # -- all processes -----------------------------------------------------------------------

    def merge_dead(self) -> None:
        """Take over what processes counted that are no more."""
        if self._liveness is None:
            return
        with self._lock, contextlib.suppress(OSError):
            dead = [o for o in self._owners() if not self._liveness.is_alive(bytes.fromhex(o))]
            if dead:
                self._merge(set(dead[: FOLDED_MAX // 2]))

    def total(self) -> dict[str, int]:
        """Sum over all processes, living and dead, since the store was made."""
        sums: Counter[str] = Counter()
        with contextlib.suppress(OSError):
            # a fold between the two reads would lose or double a file: look until nothing has changed
            for _ in range(8):
                before = self._read(TOTALS)
                found = {o: self._read(f"{o}.count") for o in self._owners() if o not in before.folded}
                if self._read(TOTALS).turn == before.turn:
                    break
            sums.update(before.counts)
            for owner, tally in found.items():
                alive = self._liveness is None or self._liveness.is_alive(bytes.fromhex(owner))
                sums.update(tally.counts if alive else persistent(tally.counts))
        return dict(sums)

    def _owners(self) -> list[str]:
        names = (_FILE.match(name) for name in self._files.listdir(self._directory.sub("run")))
        return [m[1] for m in names if m is not None]

    def _merge(self, owners: set[str]) -> None:
        run = self._directory.sub("run")
        with self._totals() as fd:
            if fd < 0:
                return
            totals = self._read_fd(fd)
            there = set(self._owners())
            sums = Counter(totals.counts)
            for owner in owners & there - totals.folded:
                sums.update(persistent(self._read(f"{owner}.count").counts))
            folded = frozenset((totals.folded | owners) & there)
            if len(folded) > FOLDED_MAX:
                return  # files that cannot be unlinked: nothing more is folded, so nothing is counted twice
            self._write_slot(fd, CountersSnapshot(totals.turn + 1, dict(sums), folded))
            for owner in folded:
                with contextlib.suppress(OSError):
                    self._files.unlink(f"{owner}.count", dir_fd=run)

    @contextlib.contextmanager
    def _totals(self) -> Iterator[int]:
        """The totals, open and locked; -1 if somebody else is at it for a long time."""
        run = self._directory.sub("run")
        try:
            self._files.stat(TOTALS, dir_fd=run)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                self._make(TOTALS).close()
        with opened(self._files, TOTALS, os.O_RDWR, dir_fd=run) as fd:
            for _ in range(200):
                if self._files.flock(fd, fcntl.LOCK_EX):
                    yield fd
                    return
                self._files.sleep(0.001)
            yield -1

    # -- files -------------------------------------------------------------------------------

    def _make(self, name: str) -> Descriptor:
        """A new file with its blocks; it appears under its name when it is complete."""
        run = self._directory.sub("run")
        temporary = f".{name}.{self._files.random(4).hex()}"
        file = Descriptor.create(self._files, temporary, self._directory.file_mode, dir_fd=run)
        try:
            self._files.write_all(file.fd, [bytes(2 * SLOT_BYTES)], 0)
            if name == TOTALS:  # of two who make it, one wins
                os.link(temporary, name, src_dir_fd=run, dst_dir_fd=run, follow_symlinks=False)
                self._files.unlink(temporary, dir_fd=run)
            else:
                self._files.rename(temporary, name, src_dir_fd=run, dst_dir_fd=run)
        except BaseException:
            file.close()
            with contextlib.suppress(OSError):
                self._files.unlink(temporary, dir_fd=run)
            raise
        return file

    def _write_slot(self, fd: int, tally: CountersSnapshot) -> None:
        # latencies have a name for each bucket, and are the first to be left out
        counts = dict(sorted(tally.counts.items(), key=lambda item: ("_us_" in item[0], item[0]))[:NAMES_MAX])
        body = json.dumps({"counts": counts, "folded": sorted(tally.folded)}).encode()
        if len(body) <= SLOT_BYTES - _HEAD.size:
            head = _HEAD.pack(0, tally.turn, len(body))[8:]
            check = checksum(head + body).to_bytes(8, "little")
            self._files.write_all(fd, [check + head + body], tally.turn % 2 * SLOT_BYTES)

    def _read(self, name: str) -> CountersSnapshot:
        try:
            with opened(self._files, name, os.O_RDONLY, dir_fd=self._directory.sub("run")) as fd:
                return self._read_fd(fd)
        except OSError:
            return _EMPTY

    def _read_fd(self, fd: int) -> CountersSnapshot:
        try:
            slots = [self._files.read(fd, SLOT_BYTES, i * SLOT_BYTES) for i in (0, 1)]
        except OSError:
            return _EMPTY
        return max((_parse(slot) for slot in slots), key=lambda t: t.turn)


def persistent(counts: Mapping[str, int]) -> dict[str, int]:
    """What a process leaves behind of its counts."""
    return {name: n for name, n in counts.items() if not name.startswith(NOW)}


def _parse(slot: bytes) -> CountersSnapshot:
    """A slot's content; empty for bytes that are not one."""
    check, turn, length = _HEAD.unpack_from(slot)
    end = _HEAD.size + length
    if end > len(slot) or checksum(slot[8:end]) != check:
        return _EMPTY
    try:
        body = json.loads(slot[_HEAD.size : end])
        named = [(name, n) for name, n in body["counts"].items() if _NAME.match(name)]
        counts = {name: n for name, n in named if type(n) is int and 0 <= n < _COUNT_MAX}
        return CountersSnapshot(turn, counts, frozenset(o for o in body["folded"] if isinstance(o, str)))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return _EMPTY
