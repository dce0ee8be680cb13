"""What the parts of an open store share."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvfs.directory import io_mode
from kvfs.directory.access_times import AccessTimes
from kvfs.directory.config import Settings
from kvfs.directory.io_mode import Mode
from kvfs.directory.liveness import Liveness
from kvfs.directory.pinned_memory import PinnedBytes
from kvfs.directory.purge_marks import PurgeMarks
from kvfs.directory.root import Directory
from kvfs.directory.shared_counters import SharedCounters
from kvfs.index.environment import Index
from kvfs.pages.chunk_hash_cache import ChunkHashCache
from kvfs.segments.open_segments import SegmentFiles
from kvfs.system.files import Files
from kvfs.types import Verify

T = TypeVar("T")
LOOKUP_SECONDS = 0.25  # deadline of index calls of lookups: after it the engine recomputes
COMMIT_SECONDS = 2.0  # deadline of index calls of writers and upkeep


class Counters:
    """Monotonic counts of one process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, n: int = 1) -> None:
        if n:
            with self._lock:
                self._counts[name] += n

    def took(self, what: str, seconds: float) -> None:
        """Count a latency: ``<what>_us_<n>`` counts those below 2**n, and not below 2**(n-1), microseconds."""
        self.add(f"{what}_us_{min(40, int(seconds * 1e6).bit_length())}")

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)


@dataclass
class Context:
    """The parts of one open store of this process, which every layer below its public face uses."""

    directory: Directory
    files: Files
    settings: Settings
    store_id: bytes
    index: Index
    liveness: Liveness | None  # None: read-only
    access_times: AccessTimes
    segments: SegmentFiles
    marks: PurgeMarks
    verify: Verify
    threads: int
    shared_counters: SharedCounters
    declines: str = ""  # why no page is stored, if none is: "disabled" or "read-only"
    inspect_only: bool = False  # counts of this process stay out of the shared ones, and it adopts no bundles
    counters: Counters = field(default_factory=Counters)
    chains: ChunkHashCache = field(default_factory=ChunkHashCache)
    pinned: PinnedBytes = field(init=False)
    holds: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)  # holds of matches in use
    attached: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)  # HostIO and GpuIO objects: closed first

    def __post_init__(self) -> None:
        self.pinned = PinnedBytes(self.liveness)

    @property
    def mode(self) -> Mode:
        return io_mode.of(self.settings)

    @property
    def owner(self) -> bytes:
        assert self.liveness is not None, "a read-only store owns nothing"
        return self.liveness.owner


def living(objects: weakref.WeakSet[T]) -> list[T]:
    """The objects in the set now. Retried, since iterating fails while another thread adds an object."""
    while True:
        with contextlib.suppress(RuntimeError):
            return list(objects)
