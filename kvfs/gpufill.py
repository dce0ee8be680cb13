"""Cold pages of a load that are brought into the page cache, to be registered there, in place of the ring.

In large folios that takes a tenth of the CPU time of reads into a buffer, and later loads find them. What nobody has
used before is left to the ring, which reads it past the page cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial

from kvfs.files import Files
from kvfs.gpujobs import GpuDesk
from kvfs.pool import Begun
from kvfs.reads import Run
from kvfs.segment_files import Held, may_map

FILL_BYTES = 8 << 20  # by one thread; cut where the file has as many, so that no two threads want parts of one folio


class Fills:
    """The runs of one load. ``past``: whether a run that is not in the page cache is to be read past it.

    ``published``: bytes of each segment (by number) that are known to be published.
    """

    def __init__(self, desk: GpuDesk, published: Mapping[int, int], past: Callable[[Run], bool]) -> None:
        self._desk, self._files, self._published, self._past = desk, desk.context.files, published, past
        self._begun: dict[tuple[int, int], Begun[None]] = {}  # by where the run lies

    def begin(self, run: Run) -> bool:
        """Have a run read by several threads; False if it is not to be."""
        maps = self._desk.in_place
        if maps is None or not maps.backing.fills or not self._files.has_large_folios():
            return False
        cached = self._desk.context.segments.cached_bytes(run.held, run.offset, run.span)
        if cached is None or cached >= run.span or (not cached and self._past(run)):
            return False
        # a whole piece is registered, and the driver would read what is cold of it, page by page
        if 2 * run.span < maps.extent(run.held, run.offset, run.span, self._published[run.segment]):
            return False
        if not may_map(self._files, run.held):
            return False
        calls, at, end = [], run.offset, run.offset + run.span
        while at < end:
            following = min(end, (at // FILL_BYTES + 1) * FILL_BYTES)
            calls.append(partial(_populate, self._files, run.held, at, following - at))
            at = following
        self._begun[run.segment, run.offset] = self._desk.readers.begin(calls)
        return True

    def end(self, run: Run) -> bool:
        """Wait until the page cache holds a run; False if it is not to, or cannot."""
        if (run.segment, run.offset) not in self._begun and not self.begin(run):
            return False
        try:
            self._begun.pop((run.segment, run.offset)).wait()
        except (OSError, ValueError):  # the ring finds out which page it is
            self._desk.context.counters.add("read_errors")
            return False
        return True

    def close(self) -> None:
        """Wait for those that nobody has waited for."""
        while self._begun:
            with contextlib.suppress(OSError, ValueError):
                self._begun.popitem()[1].wait()


def _populate(files: Files, held: Held, offset: int, nbytes: int) -> None:
    with files.map(held.fd, nbytes, offset) as mapping:
        files.populate(mapping)
