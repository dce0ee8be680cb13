"""Counts of all processes of a store, summed without a daemon, across restarts and deaths.

``run/totals`` holds the sums of the store, ``run/namespaces`` those of single namespaces. Each process adds what it has
counted since it last did so, every EVERY_SECONDS and when it closes the store. A process that does not get the lock of
a file in time keeps its counts until the next time. Counts are advice: no call raises for a file system that fails, and
what a killed process counted since its last update is lost.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvfs.directory.root import Directory
from kvfs.directory.slot_file import WAIT_SECONDS, SlotFile

SLOT_BYTES = 16 * 1024
NAMES_MAX = 160  # in the sums
COUNT_BYTES_MAX = 80  # of a name with 56 characters and a count of 19 digits: NAMES_MAX of them fit into a slot
NAMESPACES_MAX = 512  # in the sums, and in one process: those that were counted last
NAMESPACE_SLOT_BYTES = 16 * 1024  # of a small store; ``Settings.namespace_slot_bytes``
NAMESPACE_BYTES_MAX = 510  # of an entry: its digest, and ten numbers of 19 digits with their names
EVERY_SECONDS = 5.0  # how old the published counts of a live process are at most
#: What is counted by namespace, too.
NAMESPACE_COUNTS = (
    "lookups", "tokens_queried", "tokens_matched", "tokens_loaded_host", "tokens_loaded_disk", "bytes_loaded",
    "bytes_written", "pages_stored", "pages_declined",
)  # fmt: skip
_NAME = re.compile(r"[a-z0-9_-]{1,56}\Z")
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_COUNT_MAX = 1 << 62
_OLD_FILE = re.compile(r"[0-9a-f]{32}\.count\Z")  # of earlier versions, one per process


class NamespaceSums(NamedTuple):
    """What all processes counted of one namespace."""

    at_us: int  # when one of them published last
    counts: dict[str, int]  # of NAMESPACE_COUNTS


class SharedCounters:
    """The sums of a store, and what this process has added to them."""

    def __init__(self, directory: Directory, namespace_slot_bytes: int = NAMESPACE_SLOT_BYTES) -> None:
        self._directory = directory
        self._files = directory.files
        self._totals = SlotFile(directory, "totals", SLOT_BYTES)
        self._namespaces = SlotFile(directory, "namespaces", namespace_slot_bytes)
        self._added: Mapping[str, int] = {}  # counts of this process that the sums contain
        self._added_by_namespace: Mapping[bytes, Mapping[str, int]] = {}
        self._lock = threading.Lock()
        self._removed_old_files = False

    def reserve(self) -> None:
        """Make the files before there is anything to count: on a disk that is full by then they would get no blocks."""
        with contextlib.suppress(OSError):
            self._totals.reserve()
            self._namespaces.reserve()

    def add(self, counts: Mapping[str, int], by_namespace: Mapping[bytes, Mapping[str, int]] | None = None) -> None:
        """Bring the sums up to date with all that this process has counted so far: in all, and by namespace digest."""
        if self._directory.read_only or not self._lock.acquire(timeout=WAIT_SECONDS):
            return
        try:
            self._add(counts)
            self._add_by_namespace(by_namespace or {})
        except OSError:
            pass
        finally:
            self._lock.release()

    def total(self) -> dict[str, int]:
        """The sums over all processes, live and dead, since the store was made."""
        with contextlib.suppress(OSError):
            return _counts(self._totals.read().get("counts"))
        return {}

    def by_namespace(self) -> dict[bytes, NamespaceSums]:
        """The sums by namespace digest, of those that were counted last: 32 of a small store, else up to 512."""
        with contextlib.suppress(OSError):
            entries = _entries(self._namespaces.read())
            return {digest: NamespaceSums(_time(entry), _counts(entry)) for digest, entry in entries.items()}
        return {}

    def _add(self, counts: Mapping[str, int]) -> None:
        gained = _gain(counts, self._added)
        if not gained:
            return
        if not self._removed_old_files:
            self._remove_old_files()

        def change(body: dict[str, Any], room: int) -> dict[str, Any]:
            sums = Counter(_counts(body.get("counts")))
            sums.update(gained)
            most = min(NAMES_MAX, room // COUNT_BYTES_MAX)
            # a latency has a name for each of its buckets: these are left out first
            names = sorted(filter(_NAME.match, sums), key=lambda name: ("_us_" in name, name))[:most]
            return {"counts": {name: sums[name] for name in names}}

        if self._totals.update(change):
            self._added = dict(counts)

    def _add_by_namespace(self, by_namespace: Mapping[bytes, Mapping[str, int]]) -> None:
        before = self._added_by_namespace
        found = {digest: _gain(counts, before.get(digest, {})) for digest, counts in by_namespace.items()}
        gained = {digest: gain for digest, gain in found.items() if gain}
        if not gained:
            return
        now_us = self._files.now_us()

        def change(body: dict[str, Any], room: int) -> dict[str, Any]:
            known, entries = _entries(body), dict[bytes, dict[str, int]]()
            for digest, gain in gained.items():
                sums = Counter(_counts(known.pop(digest, None)))
                sums.update({name: n for name, n in gain.items() if name in NAMESPACE_COUNTS})
                entries[digest] = {**sums, "at": now_us}
            entries |= known
            most = min(NAMESPACES_MAX, room // NAMESPACE_BYTES_MAX)
            # of equal times the first stay: those of a clock that was ahead do not keep new ones out
            kept = sorted(entries, key=lambda digest: min(_time(entries[digest]), now_us), reverse=True)[:most]
            return {"namespaces": {digest.hex(): entries[digest] for digest in kept}}

        if self._namespaces.update(change):
            self._added_by_namespace = {digest: dict(counts) for digest, counts in by_namespace.items()}

    def _remove_old_files(self) -> None:
        run = self._directory.sub("run")
        for name in self._files.listdir(run):
            if _OLD_FILE.match(name):
                with contextlib.suppress(OSError):
                    self._files.unlink(name, dir_fd=run)
        self._removed_old_files = True


def _gain(counts: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    """What was counted since ``before``. A smaller count began again at 0: the process had forgotten the namespace."""
    then = {name: before.get(name, 0) for name in counts}
    return {name: n - then[name] * (n > then[name]) for name, n in counts.items() if n != then[name]}


def _counts(found: Any) -> dict[str, int]:
    """What is a count in an object of the file."""
    if not isinstance(found, dict):
        return {}
    return {k: n for k, n in found.items() if _NAME.match(k) and k != "at" and type(n) is int and 0 <= n < _COUNT_MAX}


def _entries(body: dict[str, Any]) -> dict[bytes, dict[str, int]]:
    """Counts by namespace digest, and ``at``; whatever else a damaged file holds is left out."""
    found = body.get("namespaces")
    if not isinstance(found, dict):
        return {}
    items = list(found.items())[:NAMESPACES_MAX]
    return {
        bytes.fromhex(digest): {k: n for k, n in _counts(entry).items() if k in NAMESPACE_COUNTS} | {"at": _time(entry)}
        for digest, entry in items
        if _DIGEST.match(digest) and isinstance(entry, dict)
    }


def _time(entry: Mapping[str, Any]) -> int:
    at = entry.get("at")
    return at if type(at) is int and 0 <= at < _COUNT_MAX else 0
