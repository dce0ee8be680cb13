"""What the parts of an open store share."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvfs.directory import io_mode
from kvfs.directory.access_times import AccessTimes
from kvfs.directory.config import Settings
from kvfs.directory.event_log import EventLog
from kvfs.directory.io_mode import Mode
from kvfs.directory.liveness import Liveness
from kvfs.directory.pinned_memory import PinnedBytes
from kvfs.directory.purge_marks import PurgeMarks
from kvfs.directory.root import Directory
from kvfs.directory.shared_counters import NAMESPACES_MAX, SharedCounters
from kvfs.index.environment import Index
from kvfs.pages.chunk_hash_cache import ChunkHashCache
from kvfs.segments.open_segments import SegmentFiles
from kvfs.system.files import Files
from kvfs.system.worker import Figures, WatchedCalls
from kvfs.types import Tier, Verify

T = TypeVar("T")
log = logging.getLogger("kvfs")
CLOSED = "closed"  # ``Context.declines`` once the store is closed


class Counters:
    """Monotonic counts of one process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._by_namespace: dict[bytes, Counter[str]] = {}  # by digest; the one that was counted last is the last

    def add(self, name: str, n: int = 1) -> None:
        if n:
            with self._lock:
                self._counts[name] += n

    def add_of(self, namespace: bytes, **added: int) -> None:
        """Count names of NAMESPACE_COUNTS, in all and of the namespace with this digest."""
        if any(added.values()):
            with self._lock:
                counts = self._by_namespace.pop(namespace, None)
                if counts is None:
                    counts = Counter()
                    if len(self._by_namespace) >= NAMESPACES_MAX:
                        del self._by_namespace[next(iter(self._by_namespace))]
                self._by_namespace[namespace] = counts
                for name, n in added.items():
                    if n:
                        self._counts[name] += n
                        counts[name] += n

    def loaded(self, namespace: bytes, tokens: Mapping[Tier, int]) -> None:
        """Count the tokens that a load restored, by the slowest tier that their pages were read from."""
        for tier, n in tokens.items():
            if tier is not Tier.DEVICE:
                self.add("tokens_loaded", n)
                if tier is Tier.PEER:  # not of single namespaces: their entries have no room for another count
                    self.add("tokens_loaded_peer", n)
                else:
                    self.add_of(namespace, **{f"tokens_loaded_{tier.name.lower()}": n})

    def took(self, what: str, seconds: float) -> None:
        """Count a latency: ``<what>_us_<n>`` counts those below 2**n, and not below 2**(n-1), microseconds.

        ``<what>_us`` is their sum.
        """
        micros = int(seconds * 1e6)
        with self._lock:
            self._counts[f"{what}_us"] += micros
            self._counts[f"{what}_us_{min(40, micros.bit_length())}"] += 1

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def by_namespace(self) -> dict[bytes, dict[str, int]]:
        """Counts by namespace digest, of the NAMESPACES_MAX namespaces that were counted last."""
        with self._lock:
            return {digest: dict(counts) for digest, counts in self._by_namespace.items()}


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
    declines: str = ""  # why no page is stored, if none is: "disabled", "read-only" or CLOSED
    inspect_only: bool = False  # counts of this process stay out of the shared ones, and it adopts no bundles
    counters: Counters = field(default_factory=Counters)
    chains: ChunkHashCache = field(default_factory=ChunkHashCache)
    pinned: PinnedBytes = field(init=False)
    events: EventLog = field(init=False)
    holds: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)  # holds of matches in use
    attached: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)  # HostIO and GpuIO objects: closed first

    calls: WatchedCalls = field(init=False)  # what is not part of inference, and may wait for the disk
    figures: Figures = field(init=False)
    _warned: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.pinned = PinnedBytes(self.liveness)
        self.events = EventLog(self.directory, self.settings.event_file_bytes)
        self.calls = WatchedCalls(self.directory.path)
        self.figures = Figures(self.directory.path)

    def note_use(self) -> None:
        """Warn of a use after the close, once: nothing is found and nothing stored."""
        if self.declines == CLOSED and not self._warned:
            self._warned = True
            log.warning("%s: a namespace is used after its store was closed: open it again", self.directory.path)

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
