"""Which pieces a load registers, and which come through the ring meanwhile.

The driver registers a piece about as fast as threads fill as many slots of the ring, on one core, without a byte
copied. So where many pieces are needed that nobody has registered, every second one comes through the ring: the link
then gets nearly twice what either way gives. What came through the ring is registered by later loads.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from kvfs.bits import span
from kvfs.gpujobs import GpuDesk
from kvfs.inplace import InPlace
from kvfs.reads import Run

PAGES_MIN = 4  # of a piece: what lies in two pieces goes with the ring


class Ways:
    """Of one group of one load. ``page_bytes``: of a page in a slot of the ring."""

    def __init__(self, desk: GpuDesk, page_bytes: int) -> None:
        self._maps, self._ring, self._page_bytes = desk.in_place, desk.ring, page_bytes
        self._pieces: dict[tuple[int, int], bool] = {}  # by segment and number: whether it comes through the ring
        self._last = True
        self._chunks = 0  # as bits: those that come through the ring

    def by_ring(self, run: Run) -> bool:
        """Whether a run that ``split`` gave, or a cut of it, is one for the ring."""
        return bool(self._chunks >> run.chunk & 1)

    def split(self, run: Run) -> Iterator[Run]:
        """The stretches of a run that the page cache holds: each is to be registered, or is one for the ring."""
        maps = self._maps
        if maps is None or not self._applies(maps, run):
            yield run
            return
        first = 0
        for by_ring, pages in groupby(self._ways(maps, run)):
            count = sum(1 for _ in pages)
            part = run.cut(first, count)
            if by_ring:
                self._chunks |= span(part.chunk, count)
            yield part
            first += count

    def _applies(self, maps: InPlace, run: Run) -> bool:
        """A ring of which a quarter holds a piece is filled ahead: see ``PageSource.prepare``."""
        enough = self._ring.holds(self._page_bytes) // 4 * run.stride >= maps.piece_bytes
        return enough and PAGES_MIN * run.stride <= maps.piece_bytes and maps.backing.shares_work

    def _ways(self, maps: InPlace, run: Run) -> Iterator[bool]:
        """For each page whether it comes through the ring."""
        for i in range(run.count):
            start = run.offset + i * run.stride
            first, last = start // maps.piece_bytes, (start + run.stride - 1) // maps.piece_bytes
            yield self._way(maps, run, first) or (last > first and self._way(maps, run, last))

    def _way(self, maps: InPlace, run: Run, number: int) -> bool:
        way = self._pieces.get((run.segment, number))
        if way is None:
            start = max(run.offset, number * maps.piece_bytes)
            end = min(run.offset + run.span, (number + 1) * maps.piece_bytes)
            way = not maps.covers(run.held, start, end - start)
            if way:
                way = self._last = not self._last
            self._pieces[run.segment, number] = way
        return way
