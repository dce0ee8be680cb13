"""Cold pages of a load that are brought into the page cache, to be registered there, in place of the ring.

By whole pieces, as they will be registered: what is missing of one then, a single thread would have to read. In large
folios that takes a tenth of the CPU time of reads into a buffer, and later loads find them. What nobody has
used before is left to the ring, which reads it past the page cache.
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

FILL_BYTES = 8 << 20  # by one thread; a piece has whole ones, so that no two threads want parts of one folio


class PageCachePrefetch:
    """The runs of one load. ``past``: whether a run that is not in the page cache is to be read past it.

    ``published``: bytes of each segment (by number) that are known to be published.
    """

    def __init__(self, desk: GpuTransportContext, published: Mapping[int, int], past: Callable[[Run], bool]) -> None:
        self._desk, self._files, self._published, self._past = desk, desk.context.files, published, past
        self._begun: dict[tuple[int, int], Begun[None]] = {}  # by segment and first byte of the piece
        self._waits: dict[tuple[int, int], list[Begun[None]]] = {}  # by where the run lies
        self._told: list[Run] = []
        self._expected: Counter[tuple[int, int]] = Counter()  # bytes of each piece (by segment) that will be asked for

    def expect(self, runs: Iterable[Run]) -> None:
        """Tell what will be asked for, before any of it is."""
        self._told += runs

    def _is_worth_it(self, run: Run) -> bool:
        """Whether half of each piece is asked for: the driver registers whole ones, and reads the rest page by page."""
        while self._told:
            told = self._told.pop()
            self._expected.update({(told.segment, number): inside for number, inside, _ in self._touched(told)})
        return all(2 * self._expected[run.segment, number] >= nbytes for number, _, nbytes in self._touched(run))

    def _touched(self, run: Run) -> list[tuple[int, int, int]]:
        maps = self._desk.in_place
        return maps.touched(run.held, run.offset, run.span, self._published[run.segment]) if maps is not None else []

    def begin(self, run: Run) -> bool:
        """Have the pieces of a run read by several threads; False if they are not to be."""
        maps = self._desk.in_place
        if maps is None or not maps.source.fills or not self._files.has_large_folios():
            return False
        cached = self._desk.context.segments.cached_bytes(run.held, run.offset, run.span)
        if cached is None or cached >= run.span or (not cached and self._past(run)):
            return False
        if not self._is_worth_it(run) or not may_map(self._files, run.held):
            return False
        waits = self._waits[run.segment, run.offset] = []
        for first, nbytes in maps.missing(run.held, run.offset, run.span, self._published[run.segment]):
            begun = self._begun.get((run.segment, first))
            if begun is None:
                begun = self._desk.readers.begin(list(self._reads(run.held, first, nbytes)))
                self._begun[run.segment, first] = begun
            waits.append(begun)
        return True

    def _reads(self, held: OpenSegment, first: int, nbytes: int) -> Iterator[Callable[[], None]]:
        for at in range(first, first + nbytes, FILL_BYTES):
            size = min(FILL_BYTES, first + nbytes - at)
            if self._desk.context.segments.cached_bytes(held, at, size) != size:
                yield partial(_populate, self._files, held, at, size)

    def has(self, run: Run) -> bool:
        """Whether that was begun."""
        return (run.segment, run.offset) in self._waits

    def wait(self, run: Run) -> bool:
        """Wait until the page cache holds a run's pieces; False if that was not begun, or cannot be."""
        waits = self._waits.pop((run.segment, run.offset), None)
        if waits is None:
            return False
        try:
            for begun in waits:
                begun.wait()
        except (OSError, ValueError):  # the ring finds out which page it is
            self._desk.context.counters.add("read_errors")
            return False
        return True

    def close(self) -> None:
        """Wait for those that nobody has waited for."""
        while self._begun:
            with contextlib.suppress(OSError, ValueError):
                self._begun.popitem()[1].wait()


def _populate(files: Files, held: OpenSegment, offset: int, nbytes: int) -> None:
    with files.map(held.fd, nbytes, offset) as mapping:
        files.populate(mapping)
