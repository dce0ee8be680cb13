"""A load to a GPU: runs of pages by DMA into scratch, checked there, and only then scattered to the engine's units.

The host reads the leaf tables and checks them against the roots of the index; the GPU checks the sums of the bytes that
arrived against the tables, and leaves out pages that differ.

How loads overlap, so that the link does not run dry between two of them:

- The load thread runs ``run``: it enqueues all copies, kernels and ends of bands of one load, then begins the next one.
  A load needs one of UNDER_WAY permits from its first copy to its end. Where no other is under way, the caller's thread
  has enqueued the first copies (``kvfs.gpu.head_start``).
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

from kvfs.gpu.batches import FLAG, Batches, LayerBand, Window, commands_bytes
from kvfs.gpu.device import Device
from kvfs.gpu.head_start import HeadStart, bands_of, cut_runs
from kvfs.gpu.lane import LaunchQueue
from kvfs.gpu.page_feed import GroupPages, MatchFeed, PageFeed, RestoreFeed
from kvfs.gpu.page_source import PageSource
from kvfs.gpu.resources import GENTLE, QUICK, SWITCH_SECONDS, GpuTransportContext, wait_for_event
from kvfs.kernels.work_list import Shape
from kvfs.pages.chunk_set import bits_of, members, span
from kvfs.read.plan import Run, plan_runs
from kvfs.transfer.control import TransferControl
from kvfs.transfer.load import LoadRequest
from kvfs.transfer.workers import fail
from kvfs.types import PageOutcome, TransferState

log = logging.getLogger("kvfs")
#: The waiter of a load needs about 200 us to wake up. LATER_MAX bounds the loads with deferred cleanup.
CLEAN_UP_SECONDS, LATER_MAX = 1e-3, 4


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
        self._manner = GENTLE if request.gentle else QUICK
        ahead = request.lookahead
        self._feed: PageFeed = MatchFeed(request, {}) if ahead is None else RestoreFeed(request, ahead)
        self._room = 0  # bytes of its first command buffer
        self._begun: HeadStart | None = None  # in the caller's thread, and taken by this load
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
        """On the load thread: enqueue all of it, or go on, unless ``run_now`` has begun to and was interrupted."""
        gpu, begun, overtaken = self._gpu, self._request.begun, False
        if self._begun is not None:
            return
        if isinstance(begun, HeadStart) and begun.resume():
            self._take(begun)
        else:
            overtaken = gpu.turns.begin(self)
        try:
            gpu.device.enter()
            if overtaken:  # its first copies: nothing reads their scratch
                gpu.loads.quiet()
            self._feed.begin()
            if wait_for_event(gpu, self._transfer, self._request.after, self._manner.poll_seconds):
                self._move()
        except Exception as exc:
            fail(self._transfer, exc)
        finally:
            self._end_enqueuing()

    def run_now(self) -> bool:
        """In the caller's thread: enqueue the rest, if it has begun there and nothing has to be waited for."""
        gpu, begun = self._gpu, self._request.begun
        if not isinstance(begun, HeadStart):
            return False
        with gpu.device.current():
            if not begun.fits or not gpu.loads.has_commands(self._commands_bytes()) or not begun.read_tables():
                begun.hand_over()
                return False
            try:
                self._take(begun)
                self._move()
            except Exception as exc:
                fail(self._transfer, exc)
            finally:
                self._end_enqueuing()
        return True

    def _take(self, begun: HeadStart) -> None:
        assert isinstance(self._feed, MatchFeed)
        self._begun, self._since = begun, begun.since
        self._feed.begin_with(begun.take(), begun.held, at_once=begun.whole)

    def _move(self) -> None:
        self._transfer.enter(TransferState.LOADING)
        self._feed.hold()
        if self._moving.enter_context(self._transfer.step(tell=False)):
            with self._gpu.loads.kernels.use():
                self._enqueue()

    def _end_enqueuing(self) -> None:
        if (
            self._begun is not None and self._launches is None
        ):  # it was stopped; nothing reads its first copies' scratch
            try:
                self._gpu.loads.quiet()
            except Exception as exc:
                fail(self._transfer, exc)
        self._bands.put(None)
        self._hand_over()
        self._gpu.turns.enqueued(self._begun or self)

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
        if (self._begun is not None and not self._groups) or any(
            group.cut for group in self._groups
        ):  # else the ends of the last bands are the ends of everything
            self._gpu.loads.quiet()

    def _send_group(self, launches: LaunchQueue, pages: GroupPages) -> None:
        """Without a pause behind the last group, unless that one holds slots of the ring."""
        group = self._begin(launches, pages)
        self._groups.append(group)
        if self._begun is not None and self._begun.first is not None and len(self._groups) == 1:
            group.batches.continue_with(self._begun.first)
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
                bands=bands_of(a, len(chunks), layerwise=self._request.layerwise),
            )
            for a, chunks in self._feed.at_most() if chunks
        )  # fmt: skip
        return self._room

    def _begin(self, launches: LaunchQueue, pages: GroupPages) -> GroupLoad:
        gpu, request, a = self._gpu, self._request, pages.attached
        source = PageSource(gpu, self._transfer, pages, self._feed, request.tiers, self._manner, launches.all)
        batches = Batches(
            gpu, launches, a, source, request.units[a.number], pages.wanted,
            bands=bands_of(a, len(pages.wanted), layerwise=request.layerwise), first_token=request.first_token,
            gentle=request.gentle and gpu.shapes[a.number].kernels and gpu.device.reaches_host,
            poll_seconds=self._manner.poll_seconds, stop=self._stop,
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
        planned = self._begun.planned.get(group.number) if self._begun is not None else None
        if planned is None or chunks & ~planned[1]:
            planned = plan_runs(group.pages.gm.cut(now[0], now[-1] - now[0] + 1), self._feed.held)
        runs, covered = planned
        runs = list(cut_runs(runs, chunks))
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
        step = -(-layers // bands_of(group.pages.attached, len(window), layerwise=True))
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
            if gpu.regions is not None and self._begun is not None and not self._unknown:
                gpu.regions.release(self._begun.regions)
            for group in groups:
                self._settle(group)
        except Exception as exc:
            fail(transfer, exc)
        finally:
            self._moving.close()
            if self._launches is not None and not self._unknown:
                self._launches.give_back()
            gpu.arriving.popleft()
            gpu.turns.over(self._begun or self)
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
            self._gpu.store.files.sleep(self._manner.poll_seconds)

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
