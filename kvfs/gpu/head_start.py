"""The beginning of a short load, in its caller's thread: its plan, and its first copies.

They fill scratch, so nothing of the transfer has to exist for them: to make it takes a twentieth of the time that the
copies of a short load take. If it turns out that something has to be waited for, the load thread begins the load again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from kvfs.format import segment as fmt
from kvfs.gpu.batches import BATCH_CALLS, FirstBatch, copy_first, cut_in_batches
from kvfs.gpu.page_source import streaks
from kvfs.gpu.registration_cache import REGION_BYTES, RegionLease
from kvfs.gpu.resources import GpuTransportContext
from kvfs.lookup.prefix_match import PrefixMatch
from kvfs.pages.chunk_set import bits_of, span
from kvfs.read.plan import Run, plan_runs
from kvfs.segments.open_segments import OpenSegment
from kvfs.transfer.load import Pages
from kvfs.transfer.workers import Attached

log = logging.getLogger("kvfs")
BANDS = 8  # of a layer-wise load, at most
SMALL_BATCHES = 4  # of a group, about: those towards its end
#: All of a load in its caller's thread is planned before its first copy. For more than these bytes that takes longer
#: than the load thread needs for its first window.
SHORT_BYTES = 128 << 20
#: Of a band, and of a page's share in it: what smaller ones cost the host exceeds the time of their copies.
BAND_BYTES_MIN, SHARE_BYTES_MIN = 32 << 20, 128 << 10


class _NotReadyError(Exception):
    """Something has to be waited for."""


def bands_of(attached: Attached, pages: int, *, layerwise: bool) -> int:
    """The most bands that so many pages come in."""
    if not layerwise:
        return 1
    each = attached.page_bytes
    return max(1, min(BANDS, pages * each // BAND_BYTES_MIN, each // SHARE_BYTES_MIN))


class HeadStart:
    """Owns the turn of its load, the regions and segments that it needs, and the scratch of the first copies, until the
    load takes them."""

    def __init__(self, context: GpuTransportContext, match: PrefixMatch, pages: Pages, *, layerwise: bool) -> None:
        self._gpu, self._match, self._layerwise = context, match, layerwise
        self._groups = [(a, chunks) for a, chunks in pages if chunks]
        self._opened: AbstractContextManager[Mapping[int, OpenSegment]] | None = None
        self._turn = self._copies = self._taken = False  # whether it may have a turn, and copies may be under way
        self.planned: dict[int, tuple[list[Run], int]] = {}  # by group number: runs, and the chunks that are in them
        self.held: Mapping[int, OpenSegment] = {}
        self.regions = RegionLease()
        self.first: FirstBatch | None = None  # of the first group, unless it comes in bands
        self.since = 0.0  # when the first copy was enqueued

    def begin(self, after: Any) -> bool:
        """Whether it has begun: nothing is under way, the engine's event has come, all pages are registered, and the
        lane takes the whole load at once. Otherwise it is to be dropped."""
        gpu, query = self._gpu, getattr(after, "query", None)
        batches = self._batches()
        if query is None or not batches or gpu.device.is_capturing():
            return False
        self._turn = True
        try:
            if not gpu.turns.begin_alone(self):
                return False
            with gpu.device.current():
                if not query():
                    return False
                self._opened = gpu.reader.open_segments(self._match)
                self.held = self._opened.__enter__()
                copies = sum(self._plan(a, chunks) * self._bands(a, chunks) for a, chunks in self._groups)
                if not gpu.loads.takes(batches, copies + BATCH_CALLS * batches):
                    return False
                self._copy_first()
        except _NotReadyError:
            return False
        except Exception:  # the load thread meets it again, and accounts for it
            log.debug("a load cannot begin in its caller's thread", exc_info=True)
            return False
        return True

    def _batches(self) -> int:
        """How many there will be, about; 0 if it is not short, or the lane would not take them at once."""
        gpu = self._gpu
        if gpu.regions is None or sum(len(chunks) * a.page_bytes for a, chunks in self._groups) > SHORT_BYTES:
            return 0
        batches = sum(
            2 * self._bands(a, chunks) + SMALL_BATCHES + len(chunks) * a.page_bytes // gpu.batch_bytes
            for a, chunks in self._groups
        )
        return batches if gpu.loads.takes(batches, BATCH_CALLS * batches) else 0

    def _bands(self, a: Attached, chunks: Sequence[int]) -> int:
        return bands_of(a, len(chunks), layerwise=self._layerwise)

    def _plan(self, a: Attached, chunks: list[int]) -> int:
        """Plan one group; how many copies it takes. Raises _NotReadyError."""
        gpu, regions = self._gpu, self._gpu.regions
        assert regions is not None
        gm = self._match.group(a.group.name).for_part(a.part, a.page_bytes)
        runs, covered = plan_runs(gm.cut(chunks[0], chunks[-1] - chunks[0] + 1), self.held)
        copies, wanted = 0, bits_of(chunks)
        if not gpu.shapes[a.number].sums or wanted & ~covered:  # the CPU has to make some pages
            raise _NotReadyError
        for run in runs:
            ranges = regions.ranges(run.held, run.offset, run.span, 0, self.regions, register=False)
            if ranges is None:
                raise _NotReadyError
            run.ranges = ranges
            copies += 1 + run.span // REGION_BYTES
        self.planned[a.number] = list(cut_runs(runs, wanted)), covered
        return copies

    def _copy_first(self) -> None:
        (a, chunks), gpu = self._groups[0], self._gpu
        runs, page = self.planned[a.number][0], fmt.align(a.page_bytes)
        if not runs or self._bands(a, chunks) > 1:
            return
        behind = sum(len(more) * later.page_bytes for later, more in self._groups[1:]) // page
        batches = cut_in_batches(runs, page, gpu.batch_bytes, behind)
        self._copies, self.since = True, gpu.store.files.monotonic()
        self.first = copy_first(gpu.loads, batches)

    def read_tables(self) -> bool:
        """The leaf tables of all pages; False if the page cache does not hold them."""
        files = self._gpu.store.files
        try:
            for run in (run for runs, _ in self.planned.values() for run in runs if run.leaf):
                tables = bytearray(run.leaf_bytes * run.count)
                if not files.read_cached(run.held.fd, memoryview(tables), run.leaf):
                    return False
                run.tables = bytes(tables)
        except Exception:  # likewise
            log.debug("the leaf tables of a load cannot be read", exc_info=True)
            return False
        return True

    def take(self) -> AbstractContextManager[Mapping[int, OpenSegment]] | None:
        """All that it owns is the load's from now on, also the context of the segments, which is returned."""
        self._taken = True
        return self._opened

    def drop(self) -> None:
        """Undo it, unless a load has taken it: wait for the copies, whose scratch nothing reads. Harmless again."""
        if self._taken:
            return
        self._taken = True
        gpu = self._gpu
        try:
            if self._copies:
                with gpu.device.current():
                    gpu.loads.quiet()
            if gpu.regions is not None:
                gpu.regions.release(self.regions)
        except Exception:  # the load thread meets it again; the regions stay, since copies may be under way
            log.debug("the first copies of a load cannot be waited for", exc_info=True)
        finally:
            if self._turn:
                gpu.turns.over(self)
            if self._opened is not None:
                self._opened.__exit__(None, None, None)


def cut_runs(runs: Sequence[Run], wanted: int) -> Iterator[Run]:
    """``runs``, without the chunks that are not wanted."""
    for run in runs:
        if span(run.chunk, run.count) & ~wanted:
            for first, count in streaks([bool(wanted >> run.chunk + i & 1) for i in range(run.count)]):
                yield run.cut(first, count)
        else:
            yield run
