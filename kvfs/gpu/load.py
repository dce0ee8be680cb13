"""A load to a GPU: runs of pages by DMA into scratch, checked there, and only then scattered to the engine's units.

Leaf tables are read and held against the index's roots by the host; the GPU holds the sums of the bytes that really
came against them, and leaves out pages that differ. Everything is enqueued ahead by the load thread; another one looks
at the outcome at the end, or, layer-wise, at the end of each band of layers. So the next load is on its way when this
one ends, and what that may have to wait for holds up no other's end.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from queue import SimpleQueue
from typing import TypeAlias

from kvfs.gpu.batches import FLAG, Batches, LayerBand, Window, sheet_bytes
from kvfs.gpu.device import Device
from kvfs.gpu.lane import LaunchQueue
from kvfs.gpu.page_source import PageSource, streaks
from kvfs.gpu.resources import POLL_SECONDS, SWITCH_SECONDS, GpuTransportContext, wait_for_event
from kvfs.kernels.work_list import Shape
from kvfs.lookup.prefix_match import GroupMatch
from kvfs.pages.chunk_set import bits_of, members, span
from kvfs.read.plan import Run, plan_runs
from kvfs.segments.open_segments import OpenSegment
from kvfs.transfer.control import TransferControl
from kvfs.transfer.load import Load
from kvfs.transfer.workers import Attached, fail
from kvfs.types import PageOutcome, TransferState

BANDS = 8  # of a layer-wise load, at most
#: What smaller ones cost the host is more than what their copies take: of a band, and of a page's share in it.
BAND_BYTES_MIN, SHARE_BYTES_MIN = 32 << 20, 128 << 10
#: Whoever has waited for a load may need 200 microseconds to run again, and what is left to do of it would keep the
#: interpreter from him: it begins after so long. And of how many loads it may wait until others have ended.
CLEAN_UP_SECONDS, LATER_MAX = 1e-3, 4
WINDOW_PAGES = 32  # that are planned before the first copy; then twice as many, while those are on their way


#: The chunks of each group.
Pages: TypeAlias = "Sequence[tuple[Attached, list[int]]]"


@dataclass
class GroupLoad:
    """The load of one group."""

    attached: Attached
    gm: GroupMatch
    shape: Shape
    source: PageSource
    batches: Batches
    wanted: list[int]
    runs: list[Run] = field(default_factory=list)  # of the windows so far
    covered: int = 0  # chunks that should lie in them
    cut: bool = False  # it ended before the last page
    torn: bool = False  # it ended between two bands: no page has all of its layers
    sent: bool = False  # up to the end of the last band that there will be
    flagged: memoryview = field(default_factory=lambda: memoryview(b""))  # as the last band left them
    whole: bool = True  # nothing is known to be missing


@dataclass
class GpuLoad(Load):
    """A load in progress: one thread calls ``run``, another ``finish``."""

    _groups: list[GroupLoad] = field(default_factory=list)
    #: (group, band) in the order in which they arrive, from when their ends are enqueued until somebody sees them
    _coming: deque[tuple[GroupLoad, LayerBand]] = field(default_factory=deque)
    _looking: threading.Lock = field(default_factory=threading.Lock)
    _bands: SimpleQueue[bool] = field(default_factory=SimpleQueue)  # True for each band, at last False
    _moving: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)  # the transfer's step
    _holding: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)  # the match's segments
    _handed_over: bool = False
    _launches: LaunchQueue | None = None
    _unknown: bool = False  # what of it has come
    _afterwards: list[Callable[[], None]] = field(default_factory=list)

    @cached_property
    def gpu(self) -> GpuTransportContext:
        assert isinstance(self.desk, GpuTransportContext)
        return self.desk

    def run(self) -> None:
        """On the load thread: enqueue all of it."""
        self.gpu.under_way.acquire()
        try:
            self.gpu.device.enter()
            self._look_ahead()
            if wait_for_event(self.gpu, self.transfer, self.after):
                self.transfer.enter(TransferState.LOADING)
                held = self._hold()
                if self._moving.enter_context(self.transfer.step(tell=False)):
                    with self.gpu.loads.kernels.use():
                        self._enqueue(held)
        except Exception as exc:
            fail(self.transfer, exc)
        finally:
            self._bands.put(False)
            self._hand_over()

    def _look_ahead(self) -> None:
        """What can be done while the engine still uses its units."""

    def _hold(self) -> dict[int, OpenSegment]:
        """The segments of what there is to load, for all of the load."""
        return self._holding.enter_context(self.gpu.reader.held(self.match))

    @property
    def _tails(self) -> Mapping[int, int]:
        """The end of what is published in each of them."""
        return self.match.tails

    def _hand_over(self) -> None:
        if not self._handed_over:
            self._handed_over = True
            self.gpu.arriving.append(self._has_come)
            self.gpu.ends.put(self.finish)

    def _enqueue(self, held: dict[int, OpenSegment]) -> None:
        launches = self._launches = LaunchQueue(self.gpu.loads, partial(self._sheet_bytes, self.pages))
        try:
            self._send_groups(launches, held)
            launches.all()
            self.transfer.expect({
                PageOutcome.LOADED: {g.attached.number: bits_of(g.wanted) for g in self._groups}
            })  # fmt: skip
        except BaseException:
            self._unknown = True
            self.gpu.loads.quiet()
            self._unknown = False
            raise
        finally:
            for group in self._groups:
                group.source.end_reads()
        if any(group.cut for group in self._groups):  # else the ends of the last bands are the ends of everything
            self.gpu.loads.quiet()

    def _send_groups(self, launches: LaunchQueue, held: dict[int, OpenSegment]) -> None:
        """The groups one behind the other, without a pause between them, as long as they need no slots of the ring."""
        for number, (attached, chunks) in enumerate(self.pages):
            limit = self.match.restorable(self.possible)
            wanted = [chunk for chunk in chunks if chunk < limit]
            if wanted and not self.transfer.stopped:
                gm = self.match.group(attached.group.name)
                later = self.pages[number + 1 :]
                self._send_group(launches, attached, gm, wanted, held, later)

    def _send_group(
        self, launches: LaunchQueue, attached: Attached, gm: GroupMatch, wanted: list[int],
        held: dict[int, OpenSegment], later: Pages,
    ) -> None:  # fmt: skip
        group = self._begin(launches, attached, gm.for_part(attached.part, attached.page_bytes), wanted, held)
        self._groups.append(group)
        self._send(group, held, sum(len(others) * a.page_bytes for a, others in later))
        if later and group.source.has_slots:  # which the next group may want
            launches.all()
            self._await_announcements()
            group.source.free_slots()
            good = bits_of(self._outcome(group)[0])
            self.possible[gm.name] = self.possible.get(gm.name, -1) & ~(bits_of(group.wanted) & ~good)

    def _sheet_bytes(self, most: Pages) -> int:
        """For work lists of so many pages at most."""
        return sum(
            sheet_bytes(
                self.gpu.shapes[a.number], a.group.granules, pages=len(chunks), units=len(self.units[a.number]),
                bands=self._bands_of(a, len(chunks)),
            )
            for a, chunks in most if chunks
        )  # fmt: skip

    def _bands_of(self, attached: Attached, pages: int) -> int:
        """In how many bands so many pages come, at most."""
        if not self.layerwise:
            return 1
        each = attached.page_bytes
        return max(1, min(BANDS, pages * each // BAND_BYTES_MIN, each // SHARE_BYTES_MIN))

    def _begin(
        self, launches: LaunchQueue, attached: Attached, gm: GroupMatch, wanted: list[int], held: dict[int, OpenSegment]
    ) -> GroupLoad:
        source = PageSource(self.gpu, self.transfer, attached, gm, held, self._tails, self.came_from, launches.all)
        batches = Batches(
            self.gpu, launches, attached, source, self.units[attached.number], wanted,
            bands=self._bands_of(attached, len(wanted)), first_token=self.first_token, stop=self._stop,
            ended=partial(self._ended, len(self._groups)),
        )  # fmt: skip
        return GroupLoad(attached, gm, self.gpu.shapes[attached.number], source, batches, wanted)

    def _ended(self, number: int, band: LayerBand) -> None:
        self._coming.append((self._groups[number], band))
        self._bands.put(True)
        self._hand_over()

    def _stop(self) -> bool:
        """Whether to go no further. Looks for what has come: calls of the driver keep the interpreter from others."""
        self._announce_what_came(wait=False)
        for has_come in list(self.gpu.arriving)[:1]:
            if has_come != self._has_come and has_come():
                self.gpu.context.files.sleep(SWITCH_SECONDS)
        return self.transfer.stopped or self.gpu.late(self.transfer)

    def _send(self, group: GroupLoad, held: dict[int, OpenSegment], behind: int) -> None:
        """Everything of a group up to the end of its last band; ``behind``: bytes of those that follow."""
        layers, behind_all = group.shape.layers, True
        for window in self._windows(group, held):
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
        if not behind_all:  # the last window was not known to be it
            group.batches.end_band(0, layers)
        group.sent = True

    def _windows(self, group: GroupLoad, held: dict[int, OpenSegment]) -> Iterator[Window]:
        """Where the pages lie, a stretch at a time; all at once for bands, each of which needs all pages."""
        wanted = group.wanted
        done, pages = 0, len(wanted) if self.layerwise else WINDOW_PAGES
        while done < len(wanted):
            now = wanted[done : done + pages]
            done, pages = done + len(now), 2 * pages
            yield self._window(group, now, held, left=len(wanted) - done)

    def _window(self, group: GroupLoad, now: list[int], held: dict[int, OpenSegment], *, left: int) -> Window:
        """Where some of the pages of a group lie."""
        chunks = bits_of(now)
        runs, covered = plan_runs(group.gm.cut(now[0], now[-1] - now[0] + 1), held)
        runs = list(_cut(runs, chunks))
        group.runs += runs
        group.covered |= covered & chunks
        return Window(runs, list(members(chunks & ~covered)), left)

    def _plan_bands(self, group: GroupLoad, window: Window) -> list[tuple[int, int]]:
        """(first layer position, layers) of what comes one behind the other: all at once, unless layer-wise."""
        layers = group.shape.layers
        if not self.layerwise or window.others or any(group.source.in_place(run) is None for run in window.runs):
            return [(0, layers)]
        step = -(-layers // self._bands_of(group.attached, len(window)))
        return [(first, min(step, layers - first)) for first in range(0, layers, step)]

    # -- the end -----------------------------------------------------------------------------

    def finish(self) -> None:
        """On the thread that waits for ends: tell which layers have come, then what became of each page."""
        try:
            self._wait_for_bands()
            groups = self._groups if not self._unknown else []
            for group in groups:  # all of them, whatever is wrong with one
                group.source.release()
            for group in groups:
                self._settle(group)
        except Exception as exc:
            fail(self.transfer, exc)
        finally:
            self._moving.close()
            if self._launches is not None and not self._unknown:
                self._launches.give_back()
            self.gpu.arriving.popleft()
            self.gpu.under_way.release()
            if self.transfer.calls_back:
                self.gpu.callbacks.put(partial(_tell, self.gpu.device, self.transfer))
            else:
                self.transfer.end()
        self.gpu.later.append(self._clean_up)
        while self.gpu.later:
            if not self.gpu.ends.waiting:
                self.gpu.context.files.sleep(CLEAN_UP_SECONDS)
            if self.gpu.ends.waiting and len(self.gpu.later) <= LATER_MAX:
                break
            self.gpu.later.popleft()()

    def _clean_up(self) -> None:
        """What nobody waits for. In pieces: others may want the interpreter."""
        with self._holding:
            self._groups.clear()  # which have this load, and would live until the garbage is collected
            for call in self._afterwards:
                self.gpu.context.files.sleep(SWITCH_SECONDS)
                call()
            if self.lookahead is not None:
                self.lookahead.release()

    def _wait_for_bands(self) -> None:
        """Until nothing more is enqueued, and what was has come; after an error nobody knows what that is."""
        bands = iter(self._bands.get, False)
        try:
            self.gpu.device.enter()
            for _ in bands:
                self._await_announcements()
        except Exception as exc:
            fail(self.transfer, exc)
            deque(bands, maxlen=0)
            self._unknown = True
            self.gpu.loads.wait()
            self._unknown = False
            for group in self._groups:
                group.sent = False

    def _has_come(self) -> bool:
        """Whether all has come whose end is enqueued."""
        coming = list(self._coming)
        return not coming or coming[-1][1].end.query()

    def _await_announcements(self) -> None:
        while not self._announce_what_came(wait=True):
            self.gpu.context.files.sleep(POLL_SECONDS)

    def _announce_what_came(self, *, wait: bool) -> bool:
        """Tell of bands that have come; whether none is on its way. On either thread, in order."""
        if self._coming and self._looking.acquire(blocking=wait):
            try:
                while self._coming and self._coming[0][1].end.query():
                    self._announce(*self._coming[0])
                    self._coming.popleft()
            finally:
                self._looking.release()
        return not self._coming

    def _announce(self, group: GroupLoad, band: LayerBand) -> None:
        """While all pages are well, the layers of a band that has come are ready."""
        group.flagged = group.batches.flags(band)
        all_sent = not group.cut and len(group.batches.sent) == len(group.wanted)
        group.whole = group.whole and all_sent and not any(group.flagged)
        if group.whole:
            layers = group.attached.group.layers[group.attached.part.layer :]
            self.transfer.layers_ready(layers[band.first : band.first + band.rows])

    def _settle(self, group: GroupLoad) -> None:
        """What became of the pages of a group; after an error, of those of which everything had been enqueued."""
        if not group.sent or group.batches.ends:
            self._account(group, [], group.source.faults)
        elif group.whole:
            self._account(group, group.wanted, [])
            self.transfer.settle(group.attached.number, bits_of(group.wanted), PageOutcome.LOADED)
        else:
            self._sort_out(group)

    def _outcome(self, group: GroupLoad) -> tuple[list[int], list[tuple[int, int]], set[int]]:
        """Of a group that has come: (chunks that are loaded, records whose bytes differ, bad chunks)."""
        if group.whole:
            return group.wanted, [], set()
        sent, index = {} if group.torn else group.batches.sent, group.batches.index
        records = {run.chunk + i: (run.segment, seq) for run in group.runs for i, seq in enumerate(run.seqs)}
        differ = [chunk for chunk in sent if group.flagged[index[chunk] * FLAG]]
        gone = [chunk for chunk in members(group.covered) if chunk not in records]
        bad = {*differ, *gone, *group.source.refused}
        return sorted(sent.keys() - bad), [records[chunk] for chunk in differ], bad

    def _sort_out(self, group: GroupLoad) -> None:
        """Not all is well: what became of each page. Those that were not reached stay open, and are declined."""
        loaded, differ, bad = self._outcome(group)
        self.gpu.context.counters.add("pages_corrupt", len(differ))
        self._account(group, loaded, group.source.faults + differ)
        if bad:
            self.transfer.note("unreadable")
        self.transfer.settle(group.attached.number, bits_of(loaded), PageOutcome.LOADED)
        self.transfer.settle(group.attached.number, bits_of(sorted(bad)), PageOutcome.UNREADABLE)

    def _account(self, group: GroupLoad, loaded: Sequence[int], faults: list[tuple[int, int]]) -> None:
        """Records that do not verify leave the index now; stamps can wait until the engine has been told."""
        if faults:
            self.gpu.reader.forget(self.match, group.gm, faults)
        of_use = {g.name: span(g.first, g.count) for g in self.match.groups}  # none, after an error in a restore
        good = bits_of(loaded) & of_use.get(group.gm.name, 0)
        self._afterwards.append(partial(self.gpu.reader.note, self.match, group.gm, good))


def _tell(device: Device, transfer: TransferControl) -> None:
    """End it on the thread that calls back: what is called may want the GPU, while another thread captures a graph."""
    try:
        device.enter()
    finally:
        transfer.end()


def _cut(runs: Sequence[Run], wanted: int) -> Iterator[Run]:
    """The stretches of ``runs`` whose chunks are wanted."""
    for run in runs:
        if span(run.chunk, run.count) & ~wanted:
            for first, count in streaks([bool(wanted >> run.chunk + i & 1) for i in range(run.count)]):
                yield run.cut(first, count)
        else:
            yield run
