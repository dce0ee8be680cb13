"""The beginning of a load, in its caller's thread: its plan, or that of its first window, and its first copies.

They fill scratch, so nothing of the transfer has to exist for them. To make it takes a twentieth of the time that the
copies of a short load take; the load thread begins to run as much later. It goes on where a load is long, or where
something has to be waited for.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from kvfs.format import segment as fmt
from kvfs.gpu.batches import BATCH_CALLS, FirstBatch, copy_first, cut_in_batches
from kvfs.gpu.page_feed import WINDOW_PAGES
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
SHORT_BYTES = 128 << 20  # a load of at most so many is enqueued in its caller's thread, which that takes about 1 ms
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
    load takes them, or the load thread gives the turn to another load."""

    def __init__(self, context: GpuTransportContext, match: PrefixMatch, pages: Pages, *, layerwise: bool) -> None:
        self._gpu, self._match, self._layerwise = context, match, layerwise
        self._groups = [(a, chunks) for a, chunks in pages if chunks]
        self._opened: AbstractContextManager[Mapping[int, OpenSegment]] | None = None
        self._turn = self._copies = self._taken = False  # whether it may have a turn, and copies may be under way
        self._handed_over = False
        self.whole = False  # all of it is planned
        self.fits = False  # and the lane takes it at once
        self.planned: dict[int, tuple[list[Run], int]] = {}  # by group number: runs, and the chunks that are in them
        self.held: Mapping[int, OpenSegment] = {}
        self.regions = RegionLease()
        self.first: FirstBatch | None = None  # of the first group, unless it comes in bands
        self.since = 0.0  # when the first copy was enqueued

    def begin(self, after: Any) -> bool:
        """Whether it has begun: nothing is under way, the engine's event has come, and the pages that are planned are
        registered. Otherwise it is to be dropped."""
        gpu, query = self._gpu, getattr(after, "query", None)
        if query is None or gpu.regions is None or not self._groups or gpu.device.is_capturing():
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
                self._plan_first()
                self._copy_first()
        except _NotReadyError:
            return False
        except Exception:  # the load thread meets it again, and accounts for it
            log.debug("a load cannot begin in its caller's thread", exc_info=True)
            return False
        return True

    def _plan_first(self) -> None:
        """Plan the whole load if it is short, else its first window. Raises _NotReadyError."""
        gpu, groups = self._gpu, self._groups
        if sum(len(chunks) * a.page_bytes for a, chunks in groups) <= SHORT_BYTES:
            batches = sum(
                2 * self._bands(a, chunks) + SMALL_BATCHES + len(chunks) * a.page_bytes // gpu.batch_bytes
                for a, chunks in groups
            )
            copies = sum(self._plan(a, chunks) * self._bands(a, chunks) for a, chunks in groups)
            self.whole, self.fits = True, gpu.loads.takes(batches, copies + BATCH_CALLS * batches)
        else:
            a, chunks = groups[0]
            if self._bands(a, chunks) > 1:  # each band needs all pages
                raise _NotReadyError
            self._plan(a, chunks[:WINDOW_PAGES])

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
        left = 0 if self.whole else len(chunks[WINDOW_PAGES:])
        behind = left + sum(len(more) * later.page_bytes for later, more in self._groups[1:]) // page
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

    def hand_over(self) -> None:
        """The load thread goes on: it calls ``resume``."""
        self._gpu.turns.hand_over(self)
        self._taken = self._handed_over = True

    def resume(self) -> bool:
        """On the load thread: whether the load may take what was handed over. If another one had its turn meanwhile,
        nothing is left of it; the copies have ended then."""
        kept = self._gpu.turns.resume(self)
        if not kept and self._handed_over:
            self._handed_over = self._turn = self._copies = self._taken = False
            self.drop()
        return kept

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
            opened, self._opened = self._opened, None
            if opened is not None:
                opened.__exit__(None, None, None)


def cut_runs(runs: Sequence[Run], wanted: int) -> Iterator[Run]:
    """``runs``, without the chunks that are not wanted."""
    for run in runs:
        if span(run.chunk, run.count) & ~wanted:
            for first, count in streaks([bool(wanted >> run.chunk + i & 1) for i in range(run.count)]):
                yield run.cut(first, count)
        else:
            yield run
