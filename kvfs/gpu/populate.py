"""Reads the cold pages of a load into the page cache, where they are registered, in place of reads into the ring.

By whole regions, as they will be registered: a single thread would have to read what is missing of one then. In large
folios that takes a tenth of the CPU time of reads into a buffer, and later loads find the pages. Pages that were never
used are left to the ring, which reads them past the page cache.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from kvfs.gpu.resources import GpuTransportContext
from kvfs.read.plan import Run
from kvfs.segments.open_segments import OpenSegment, may_map
from kvfs.system.files import Files
from kvfs.system.thread_pool import Begun

PREFETCH_BYTES = 8 << 20  # by one thread; a region is a multiple of it, so that no two threads want parts of one folio


class PageCachePrefetch:
    """The cold runs of one group of one load.

    ``published``: bytes of each segment (by number) that are known to be published. ``direct``: whether reads of a run
    that is not in the page cache bypass it.
    """

    def __init__(
        self, context: GpuTransportContext, published: Mapping[int, int], direct: Callable[[Run], bool]
    ) -> None:
        self._context, self._files, self._published, self._direct = context, context.store.files, published, direct
        self._begun: dict[tuple[int, int], Begun[None]] = {}  # by segment and first byte of the region
        self._waits: dict[tuple[int, int], list[Begun[None]]] = {}  # by segment and offset of the run
        self._announced: list[Run] = []
        self._expected: Counter[tuple[int, int]] = Counter()  # bytes of each region (by segment) that will be sent

    def expect(self, runs: Iterable[Run]) -> None:
        """Announce the runs that will be sent, before any of them is."""
        self._announced += runs

    def _is_worthwhile(self, run: Run) -> bool:
        """Whether half of each region will be sent: whole ones are registered, the rest is read page by page."""
        while self._announced:
            run_ahead = self._announced.pop()
            self._expected.update({(run_ahead.segment, n): inside for n, inside, _ in self._touched(run_ahead)})
        return all(2 * self._expected[run.segment, number] >= nbytes for number, _, nbytes in self._touched(run))

    def _touched(self, run: Run) -> list[tuple[int, int, int]]:
        regions = self._context.regions
        if regions is None:
            return []
        return regions.touched(run.held, run.offset, run.span, self._published[run.segment])

    def begin(self, run: Run) -> bool:
        """Have several threads read the regions of a run; False if it is not worthwhile."""
        regions = self._context.regions
        if regions is None or not regions.source.wants_prefetch or not self._files.has_large_folios():
            return False
        cached = self._context.store.segments.cached_bytes(run.held, run.offset, run.span)
        if cached is None or cached >= run.span or (not cached and self._direct(run)):
            return False
        if not self._is_worthwhile(run) or not may_map(self._files, run.held):
            return False
        waits = self._waits[run.segment, run.offset] = []
        for first, nbytes in regions.missing(run.held, run.offset, run.span, self._published[run.segment]):
            begun = self._begun.get((run.segment, first))
            if begun is None:
                begun = self._context.readers.begin(list(self._reads(run.held, first, nbytes)))
                self._begun[run.segment, first] = begun
            waits.append(begun)
        return True

    def _reads(self, held: OpenSegment, first: int, nbytes: int) -> Iterator[Callable[[], None]]:
        for at in range(first, first + nbytes, PREFETCH_BYTES):
            size = min(PREFETCH_BYTES, first + nbytes - at)
            if self._context.store.segments.cached_bytes(held, at, size) != size:
                yield partial(_populate, self._files, held, at, size)

    def has(self, run: Run) -> bool:
        """Whether ``begin`` has begun to read it."""
        return (run.segment, run.offset) in self._waits

    def wait(self, run: Run) -> bool:
        """Wait until the page cache holds the regions of a run; False if it was not begun, or cannot be read."""
        waits = self._waits.pop((run.segment, run.offset), None)
        if waits is None:
            return False
        try:
            for begun in waits:
                begun.wait()
        except (OSError, ValueError):  # the ring finds out which page it is
            self._context.store.counters.add("read_errors")
            return False
        return True

    def close(self) -> None:
        """Wait for the reads that were begun."""
        while self._begun:
            with contextlib.suppress(OSError, ValueError):
                self._begun.popitem()[1].wait()


def _populate(files: Files, held: OpenSegment, offset: int, nbytes: int) -> None:
    with files.map(held.fd, nbytes, offset) as mapping:
        files.populate(mapping)
