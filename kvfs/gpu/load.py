"""A load to a GPU: runs of pages by DMA into scratch, checked there, and only then scattered to the engine's units.

The host reads the leaf tables and checks them against the roots of the index; the GPU checks the sums of the bytes that
arrived against the tables, and leaves out pages that differ.

How loads overlap, so that the link does not run dry between two of them:

- The load thread runs ``run``: it enqueues all copies, kernels and ends of bands of one load, then begins the next one.
  A load needs one of UNDER_WAY permits from its first copy to its end.
- The end thread runs ``finish`` of one load after the other: it waits for the bands, settles the pages and ends the
  transfer. A load is handed over to it when the end of its first band is enqueued, at the latest when ``run`` returns.
  What a load has to wait for while it is enqueued, such as a disk, delays the end of no earlier load.
- Layers are announced by whichever of the two threads sees a band first. Calls of the driver hold the GIL, so the end
  thread may see it milliseconds later than the load thread, which looks before each batch.
- When the load thread sees that the oldest load of ``arriving`` has arrived, it sleeps for SWITCH_SECONDS, which hands
  the GIL to the end thread.
- Loads with callbacks end on a third thread, since a callback may cancel the next load and wait for it.
- What is left of a load then (access times, releasing segments) is deferred by CLEAN_UP_SECONDS, so that it does not
  hold the GIL while the waiter wakes up. It gives way to ends that are due, unless LATER_MAX loads wait for it. Its
  calls sleep for SWITCH_SECONDS in between. A save likewise sleeps for YIELD_SECONDS between ``source_free`` and its
  writes.
- After an error of the driver it is unknown which copies are under way: nothing of the load is released before the lane
  is quiet.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

from kvfs.format import segment as fmt
from kvfs.gpu.batches import (
    BATCH_CALLS,
    FLAG,
    Batches,
    FirstBatch,
    LayerBand,
    Window,
    commands_bytes,
    copy_first,
    cut_in_batches,
)
from kvfs.gpu.device import Device
from kvfs.gpu.lane import LaunchQueue
from kvfs.gpu.page_feed import GroupPages, MatchFeed, PageFeed, RestoreFeed
from kvfs.gpu.page_source import PageSource, streaks
from kvfs.gpu.registration_cache import REGION_BYTES, RegionLease
from kvfs.gpu.resources import POLL_SECONDS, SWITCH_SECONDS, GpuTransportContext, wait_for_event
from kvfs.kernels.work_list import Shape
from kvfs.pages.chunk_set import bits_of, members, span
from kvfs.read.plan import Run, plan_runs
from kvfs.transfer.control import TransferControl
from kvfs.transfer.load import LoadRequest
from kvfs.transfer.workers import Attached, fail
from kvfs.types import PageOutcome, TransferState

log = logging.getLogger("kvfs")
BANDS = 8  # of a layer-wise load, at most
SMALL_BATCHES = 4  # of a group, about: those towards its end
#: All of a load in its caller's thread is planned before its first copy. For more than these bytes that takes longer
#: than the load thread needs for its first window.
SHORT_BYTES = 128 << 20
#: Of a band, and of a page's share in it: what smaller ones cost the host exceeds the time of their copies.
BAND_BYTES_MIN, SHARE_BYTES_MIN = 32 << 20, 128 << 10
#: The waiter of a load needs about 200 us to wake up. LATER_MAX bounds the loads with deferred cleanup.
CLEAN_UP_SECONDS, LATER_MAX = 1e-3, 4


class _NotReadyError(Exception):
    """Something has to be waited for."""


@dataclass
class GroupLoad:
    """The load of one group."""

    pages: GroupPages
    shape: Shape
    source: PageSource
    batches: Batches
    runs: list[Run] = field(default_factory=list)  # of the windows so far
    covered: int = 0  # chunks that should be in them
    cut: bool = False  # it ended before the last page
    torn: bool = False  # it ended between two bands: no page has all of its layers
    sent: bool = False  # up to the end of the last band that there will be
    flags: memoryview = field(default_factory=lambda: memoryview(b""))  # as the last band left them
    whole: bool = True  # no page is known to be missing

    @property
    def number(self) -> int:
        return self.pages.attached.number


class GpuLoad:
    """A load in progress: its caller calls ``run_now``, or the load thread ``run``; then the end thread ``finish``."""

    def __init__(self, request: LoadRequest) -> None:
        assert isinstance(request.context, GpuTransportContext)
        self._gpu = request.context
        self._request, self._transfer = request, request.transfer
        ahead = request.lookahead
        self._feed: PageFeed = MatchFeed(request, {}) if ahead is None else RestoreFeed(request, ahead)
        self._planned: dict[int, tuple[list[Run], int]] = {}  # by group number, where all pages are one window
        self._regions = RegionLease()  # of the plan, whose runs are copied from them
        self._room = 0  # bytes of its first command buffer
        self._batches = 0  # about, where nothing is under way
        self._begun = False  # in the caller's thread
        self._starting = False  # there: copies may be under way, though it has not begun
        self._ahead: FirstBatch | None = None  # of the first group, in the caller's thread
        self._groups: list[GroupLoad] = []
        #: (group, band) in order of arrival, from when its end is enqueued until one of the threads sees it
        self._coming: deque[tuple[GroupLoad, LayerBand]] = deque()
        self._announcing = threading.Lock()
        #: for each band the bytes up to its end, at last None
        self._bands: SimpleQueue[int | None] = SimpleQueue()
        self._sent, self._since = 0, 0.0  # bytes up to the end of the last band; when the first copy was enqueued
        self._moving = contextlib.ExitStack()  # the transfer's step
        self._handed_over = False
        self._launches: LaunchQueue | None = None
        self._unknown = False  # whether copies are under way
        self._afterwards: list[Callable[[], None]] = []

    def run(self) -> None:
        """On the load thread: enqueue all of it, unless ``run_now`` has begun to and was interrupted."""
        gpu = self._gpu
        if self._begun:
            return
        gpu.turns.begin(self)
        try:
            gpu.device.enter()
            self._feed.begin()
            if wait_for_event(gpu, self._transfer, self._request.after):
                self._move()
        except Exception as exc:
            fail(self._transfer, exc)
        finally:
            self._end_enqueuing()

    def run_now(self) -> bool:
        """In the caller's thread: enqueue all of it, if nothing is under way and nothing has to be waited for."""
        gpu = self._gpu
        if not self._is_short() or gpu.device.is_capturing():
            return False
        try:
            if not gpu.turns.begin_alone(self):
                return False
            with gpu.device.current():
                if not self._is_ready():
                    return False
                try:
                    self._begun = True
                    self._move()
                except Exception as exc:
                    fail(self._transfer, exc)
                finally:
                    self._end_enqueuing()
        finally:
            if not self._begun:
                self._drop_first()
                gpu.turns.over(self)
        return True

    def _drop_first(self) -> None:
        """Nothing reads the scratch of the first copies, if they were enqueued: give it back while the lane is ours."""
        if not self._starting:
            return
        ahead, self._ahead, self._starting = self._ahead, None, False
        try:
            with self._gpu.device.current():
                if ahead is not None:
                    self._gpu.loads.finished(ahead.scratch, self._gpu.loads.dma)
                else:  # an interrupt or an error struck among them
                    self._gpu.loads.quiet()
        except Exception:  # the load thread meets it again
            log.debug("copies that were enqueued ahead cannot be waited for", exc_info=True)

    def _is_short(self) -> bool:
        """Whether it is short, and the lane takes all of it without waiting for a batch, if it is empty."""
        request, gpu = self._request, self._gpu
        if gpu.regions is None or not isinstance(self._feed, MatchFeed):
            return False
        if sum(len(chunks) * a.page_bytes for a, chunks in request.pages) > SHORT_BYTES:
            return False
        self._batches = sum(
            2 * self._bands_of(a, len(chunks)) + SMALL_BATCHES + len(chunks) * a.page_bytes // gpu.batch_bytes
            for a, chunks in request.pages if chunks
        )  # fmt: skip
        return self._batches > 0 and gpu.loads.takes(self._batches, BATCH_CALLS * self._batches)

    def _is_ready(self) -> bool:
        """Whether the event has come, and the page cache and registered memory hold all that is needed; plans it."""
        request, gpu, query = self._request, self._gpu, getattr(self._request.after, "query", None)
        assert isinstance(self._feed, MatchFeed)
        try:
            if query is None or not query() or not gpu.loads.has_commands(self._commands_bytes()):
                return False
            self._feed.hold()
            groups = [(a, chunks) for a, chunks in request.pages if chunks]
            copies = sum(self._plan_at_once(a, chunks) * self._bands_of(a, len(chunks)) for a, chunks in groups)
            if not gpu.loads.takes(self._batches, copies + BATCH_CALLS * self._batches):
                return False
            self._feed.at_once = True
            self._copy_first(groups)  # the rest is done while these copies are under way
            for a, _ in groups:
                self._read_tables(a)
        except _NotReadyError:
            self._feed.at_once = False
        except Exception:  # the load thread meets it again, and accounts for it
            log.debug("a load cannot be planned in its caller's thread", exc_info=True)
            self._feed.at_once = False
        return self._feed.at_once

    def _plan_at_once(self, a: Attached, chunks: list[int]) -> int:
        """Plan one group; how many copies it takes. Raises _NotReadyError."""
        gpu, regions = self._gpu, self._gpu.regions
        assert regions is not None
        gm = self._request.match.group(a.group.name).for_part(a.part, a.page_bytes)
        runs, covered = plan_runs(gm.cut(chunks[0], chunks[-1] - chunks[0] + 1), self._feed.held)
        shape, copies, wanted = gpu.shapes[a.number], 0, bits_of(chunks)
        if not shape.sums or wanted & ~covered:  # the CPU has to make some pages
            raise _NotReadyError
        for run in runs:
            ranges = regions.ranges(run.held, run.offset, run.span, 0, self._regions, register=False)
            if ranges is None:
                raise _NotReadyError
            run.ranges = ranges
            copies += 1 + run.span // REGION_BYTES
        self._planned[a.number] = list(_cut(runs, wanted)), covered
        return copies

    def _copy_first(self, groups: Sequence[tuple[Attached, list[int]]]) -> None:
        """Enqueue the first copies, unless they come in bands. They fill scratch, so nothing else has to be known."""
        (a, chunks), gpu = groups[0], self._gpu
        runs, page = self._planned[a.number][0], fmt.align(a.page_bytes)
        if self._bands_of(a, len(chunks)) > 1 or not runs:
            return
        behind = sum(len(more) * later.page_bytes for later, more in groups[1:]) // page
        batches = cut_in_batches(runs, page, gpu.batch_bytes, behind)
        self._starting, self._since = True, gpu.store.files.monotonic()
        self._ahead = copy_first(gpu.loads, batches)

    def _read_tables(self, a: Attached) -> None:
        """The leaf tables of a planned group. Raises _NotReadyError if they are not in the page cache."""
        files = self._gpu.store.files
        for run in self._planned[a.number][0]:
            if run.leaf:
                tables = bytearray(run.leaf_bytes * run.count)
                if not files.read_cached(run.held.fd, memoryview(tables), run.leaf):
                    raise _NotReadyError
                run.tables = bytes(tables)

    def _move(self) -> None:
        self._transfer.enter(TransferState.LOADING)
        self._feed.hold()
        if self._moving.enter_context(self._transfer.step(tell=False)):
            with self._gpu.loads.kernels.use():
                self._enqueue()

    def _end_enqueuing(self) -> None:
        self._drop_first()  # of a load that was stopped before its first group
        self._bands.put(None)
        self._hand_over()
        self._gpu.turns.enqueued(self)

    def _hand_over(self) -> None:
        if not self._handed_over:
            self._handed_over = True
            self._gpu.arriving.append(self._has_arrived)
            self._gpu.ends.put(self.finish)

    def _enqueue(self) -> None:
        launches = self._launches = LaunchQueue(self._gpu.loads, self._commands_bytes)
        self._since = self._since or self._gpu.store.files.monotonic()
        try:
            for pages in self._feed.groups():
                self._send_group(launches, pages)
            launches.all()
            self._transfer.expect({PageOutcome.LOADED: {g.number: bits_of(g.pages.wanted) for g in self._groups}})
        except BaseException:
            self._unknown = True
            self._gpu.loads.quiet()
            self._unknown = False
            raise
        finally:
            for group in self._groups:
                group.source.end_reads()
        if any(group.cut for group in self._groups):  # else the ends of the last bands are the ends of everything
            self._gpu.loads.quiet()

    def _send_group(self, launches: LaunchQueue, pages: GroupPages) -> None:
        """Without a pause behind the last group, unless that one holds slots of the ring."""
        group = self._begin(launches, pages)
        self._groups.append(group)
        if self._ahead is not None:
            group.batches.continue_with(self._ahead)
            self._ahead, self._starting = None, False
        self._send(group, sum(len(chunks) * a.page_bytes for a, chunks in pages.later))
        if pages.later and group.source.has_slots:  # which the next group may want
            launches.all()
            self._await_announcements()
            group.source.free_slots()
            bad = bits_of(pages.wanted) & ~bits_of(self._outcome(group)[0])
            ruled_out, name = self._feed.ruled_out, pages.gm.name
            ruled_out[name] = ruled_out.get(name, 0) | bad

    def _commands_bytes(self) -> int:
        """Room for the work lists of all pages that the load may have."""
        shapes, units = self._gpu.shapes, self._request.units
        self._room = self._room or sum(
            commands_bytes(
                shapes[a.number], a.group.granules, pages=len(chunks), units=len(units[a.number]),
                bands=self._bands_of(a, len(chunks)),
            )
            for a, chunks in self._feed.at_most() if chunks
        )  # fmt: skip
        return self._room

    def _bands_of(self, attached: Attached, pages: int) -> int:
        """The most bands that so many pages come in."""
        if not self._request.layerwise:
            return 1
        each = attached.page_bytes
        return max(1, min(BANDS, pages * each // BAND_BYTES_MIN, each // SHARE_BYTES_MIN))

    def _begin(self, launches: LaunchQueue, pages: GroupPages) -> GroupLoad:
        gpu, request, a = self._gpu, self._request, pages.attached
        source = PageSource(gpu, self._transfer, pages, self._feed, request.tiers, launches.all)
        batches = Batches(
            gpu, launches, a, source, request.units[a.number], pages.wanted,
            bands=self._bands_of(a, len(pages.wanted)), first_token=request.first_token, stop=self._stop,
            ended=partial(self._band_enqueued, len(self._groups)),
        )  # fmt: skip
        return GroupLoad(pages, gpu.shapes[a.number], source, batches)

    def _band_enqueued(self, number: int, band: LayerBand) -> None:
        self._coming.append((self._groups[number], band))
        group = self._groups[number]
        self._sent += len(group.pages.wanted) * group.pages.attached.page_bytes * band.rows // group.shape.layers
        self._bands.put(self._sent)
        self._hand_over()

    def _stop(self) -> bool:
        """Whether to go no further. Announces what has arrived, and lets the end thread run if a load has."""
        self._announce_arrivals(wait=False)
        for has_arrived in list(self._gpu.arriving)[:1]:
            if has_arrived != self._has_arrived and has_arrived():
                self._gpu.store.files.sleep(SWITCH_SECONDS)
        return self._transfer.stopped or self._gpu.late(self._transfer)

    def _send(self, group: GroupLoad, behind: int) -> None:
        """Everything of a group up to the end of its last band; ``behind``: bytes of the groups that follow."""
        layers, behind_all = group.shape.layers, True
        for chunks, left in group.pages.windows():
            window = self._window(group, chunks, left)
            for first, rows in self._plan_bands(group, window):
                group.cut = not group.batches.send(window, first, rows, behind)
                behind_all = group.cut or not window.left  # else it has one band, whose end is that of the last window
                if behind_all:
                    group.torn = group.cut and rows < layers
                    group.batches.end_band(first, rows)
                if group.cut:
                    break
            if group.cut:
                break
        if not behind_all:  # the last window was not known to be the last
            group.batches.end_band(0, layers)
        group.sent = True

    def _window(self, group: GroupLoad, now: list[int], left: int) -> Window:
        """Where these pages of a group are stored."""
        chunks = bits_of(now)
        planned = self._planned.get(group.number)
        if planned is None:
            planned = plan_runs(group.pages.gm.cut(now[0], now[-1] - now[0] + 1), self._feed.held)
        runs, covered = planned
        runs = list(_cut(runs, chunks))
        group.runs += runs
        group.covered |= covered & chunks
        return Window(runs, list(members(chunks & ~covered)), left)

    def _plan_bands(self, group: GroupLoad, window: Window) -> list[tuple[int, int]]:
        """(first layer position, layers) of the bands, in order; one band unless layer-wise."""
        layers = group.shape.layers
        if not self._request.layerwise or window.others:
            return [(0, layers)]
        if any(group.source.registered(run) is None for run in window.runs):
            return [(0, layers)]
        step = -(-layers // self._bands_of(group.pages.attached, len(window)))
        return [(first, min(step, layers - first)) for first in range(0, layers, step)]

    # -- the end -----------------------------------------------------------------------------

    def finish(self) -> None:
        """On the end thread: announce the layers that have arrived, then settle each page."""
        gpu, transfer = self._gpu, self._transfer
        try:
            self._wait_for_bands()
            groups = self._groups if not self._unknown else []
            for group in groups:  # all of them, even if settling one fails
                group.source.release()
            if gpu.regions is not None and not self._unknown:
                gpu.regions.release(self._regions)
            for group in groups:
                self._settle(group)
        except Exception as exc:
            fail(transfer, exc)
        finally:
            self._moving.close()
            if self._launches is not None and not self._unknown:
                self._launches.give_back()
            gpu.arriving.popleft()
            gpu.turns.over(self)
            if transfer.calls_back:
                gpu.callbacks.put(partial(_end, gpu.device, transfer))
            else:
                transfer.end()
        gpu.later.append(self._clean_up)
        while gpu.later:
            if not gpu.ends.waiting:
                gpu.store.files.sleep(CLEAN_UP_SECONDS)
            if gpu.ends.waiting and len(gpu.later) <= LATER_MAX:
                break
            gpu.later.popleft()()

    def _clean_up(self) -> None:
        """Deferred: nothing waits for it."""
        try:
            self._groups.clear()  # they refer to this load, and would live until the garbage is collected
            for call in self._afterwards:
                self._gpu.store.files.sleep(SWITCH_SECONDS)
                call()
        finally:
            self._feed.release()

    def _wait_for_bands(self) -> None:
        """Until nothing more is enqueued, and all that was has arrived; after an error until the lane is quiet."""
        gpu, clock = self._gpu, self._gpu.store.files.monotonic
        bands = iter(self._bands.get, None)
        try:
            gpu.device.enter()
            for sent in bands:
                early = gpu.pace.early(sent, clock() - self._since)
                if early > 0:
                    gpu.store.files.sleep(early)
                self._await_announcements()
                gpu.pace.arrived(sent, clock() - self._since)
        except Exception as exc:
            fail(self._transfer, exc)
            deque(bands, maxlen=0)
            self._unknown = True
            gpu.loads.wait()
            self._unknown = False
            for group in self._groups:
                group.sent = False

    def _has_arrived(self) -> bool:
        """Whether every band has arrived whose end is enqueued."""
        coming = list(self._coming)
        return not coming or coming[-1][1].end.query()

    def _await_announcements(self) -> None:
        while not self._announce_arrivals(wait=True):
            self._gpu.store.files.sleep(POLL_SECONDS)

    def _announce_arrivals(self, *, wait: bool) -> bool:
        """Announce bands that have arrived; whether none is under way. On either thread, in order."""
        if self._coming and self._announcing.acquire(blocking=wait):
            try:
                while self._coming and self._coming[0][1].end.query():
                    self._announce(*self._coming[0])
                    self._coming.popleft()
            finally:
                self._announcing.release()
        return not self._coming

    def _announce(self, group: GroupLoad, band: LayerBand) -> None:
        """The layers of a band are ready, if no page of them is bad or missing."""
        group.flags = group.batches.flags(band)
        all_sent = not group.cut and len(group.batches.sent) == len(group.pages.wanted)
        group.whole = group.whole and all_sent and not any(group.flags)
        if group.whole:
            a = group.pages.attached
            layers = a.group.layers[a.part.layer :]
            self._transfer.layers_ready(layers[band.first : band.first + band.rows])

    def _settle(self, group: GroupLoad) -> None:
        """Settle the pages of a group; after an error, those of groups that had been enqueued completely."""
        if not group.sent or group.batches.ends:
            self._account(group, [], group.source.faults)
        elif group.whole:
            self._account(group, group.pages.wanted, [])
            self._transfer.settle(group.number, bits_of(group.pages.wanted), PageOutcome.LOADED)
        else:
            self._settle_each(group)

    def _outcome(self, group: GroupLoad) -> tuple[list[int], list[tuple[int, int]], set[int]]:
        """Of a group that has arrived: (chunks that are loaded, records whose bytes differ, bad chunks)."""
        if group.whole:
            return group.pages.wanted, [], set()
        sent, index = {} if group.torn else group.batches.sent, group.batches.index
        records = {run.chunk + i: (run.segment, seq) for run in group.runs for i, seq in enumerate(run.seqs)}
        differ = [chunk for chunk in sent if group.flags[index[chunk] * FLAG]]
        missing = [chunk for chunk in members(group.covered) if chunk not in records]
        bad = {*differ, *missing, *group.source.refused}
        return sorted(sent.keys() - bad), [records[chunk] for chunk in differ], bad

    def _settle_each(self, group: GroupLoad) -> None:
        """Settle the pages of a group that is not whole. Pages that were not sent stay open, and are declined."""
        loaded, differ, bad = self._outcome(group)
        self._gpu.store.counters.add("pages_corrupt", len(differ))
        self._account(group, loaded, group.source.faults + differ)
        if bad:
            self._transfer.note("unreadable")
        self._transfer.settle(group.number, bits_of(loaded), PageOutcome.LOADED)
        self._transfer.settle(group.number, bits_of(sorted(bad)), PageOutcome.UNREADABLE)

    def _account(self, group: GroupLoad, loaded: Sequence[int], faults: list[tuple[int, int]]) -> None:
        """Records that do not verify leave the index now; access times can wait until the transfer has ended."""
        match, gm = self._feed.match, group.pages.gm
        if faults:
            self._gpu.reader.forget(match, gm, faults)
        useful = {g.name: span(g.first, g.count) for g in match.groups}  # none, after an error in a restore
        good = bits_of(loaded) & useful.get(gm.name, 0)
        self._afterwards.append(partial(self._gpu.reader.note, match, gm, good))


def _end(device: Device, transfer: TransferControl) -> None:
    """End it on the callback thread: a callback may use the GPU while another thread captures a graph."""
    try:
        device.enter()
    finally:
        transfer.end()


def _cut(runs: Sequence[Run], wanted: int) -> Iterator[Run]:
    """``runs``, without the chunks that are not wanted."""
    for run in runs:
        if span(run.chunk, run.count) & ~wanted:
            for first, count in streaks([bool(wanted >> run.chunk + i & 1) for i in range(run.count)]):
                yield run.cut(first, count)
        else:
            yield run
