"""A load to a GPU: runs of pages by DMA into scratch, checked there, and only then scattered to the engine's units.

Leaf tables are read and held against the index's roots by the host; the GPU holds the sums of the bytes that really
came against them, and leaves out pages that differ. Everything is enqueued ahead; the host looks at the outcome at the
end, or, layer-wise, at the end of each band of layers.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import NamedTuple

from kvfs.gpu import Event
from kvfs.gpujobs import GpuDesk, wait_for_event
from kvfs.gpulane import ALIGN, Sheet, Slot
from kvfs.gpusource import PageSource, streaks
from kvfs.hostjobs import Attached, fail
from kvfs.hostload import Load
from kvfs.kernels.work import GRANULE_WORDS, HEAD_WORDS, WORD, Shape, granule_words, pack
from kvfs.match import GroupMatch
from kvfs.reads import Run, plan_runs
from kvfs.segment_files import Held
from kvfs.types import PageId, PageOutcome, TransferState

BATCH_BYTES_MIN = 8 << 20  # of the last batches: their check and scatter come on top of the copies
AHEAD = 3  # batches that are prepared while one is sent
BANDS = 8  # of a layer-wise load
FLAG = 4


class _Band(NamedTuple):
    """Layer positions [first, first + rows), when all pages of it are there, and where their flags lie then."""

    first: int
    rows: int
    end: Event
    flags: int


@dataclass
class _Group:
    """The load of one group."""

    attached: Attached
    gm: GroupMatch
    shape: Shape
    source: PageSource
    sheet: Sheet
    units: int  # offset of the unit ids in the sheet
    unit_count: int
    flags: int  # offset of the pages' flags in it
    index: dict[int, int]  # chunk -> its flag
    sent: dict[int, None] = field(default_factory=dict)  # chunks that were enqueued
    whole: bool = True  # nothing is known to be missing

    @property
    def granules(self) -> int:
        return self.attached.group.granules

    @property
    def page_bytes(self) -> int:
        """Of a page in scratch, when all of it comes."""
        return self.source.stride


@dataclass
class GpuLoad(Load):
    """A load in progress."""

    _afterwards: list[Callable[[], None]] = field(default_factory=list)

    @property
    def gpu(self) -> GpuDesk:
        assert isinstance(self.desk, GpuDesk)
        return self.desk

    def run(self) -> None:
        """On the load thread."""
        try:
            self.gpu.device.enter()
            if wait_for_event(self.gpu, self.transfer, self.after):
                self.transfer._enter(TransferState.LOADING)
                with self.gpu.reader.held(self.match) as held, self.gpu.loads.kernels.use():
                    for attached, chunks in self.pages:
                        self._load_chunks(attached, chunks, held)
        except Exception as exc:
            fail(self.transfer, exc)
        finally:
            self.transfer._end()
        for call in self._afterwards:
            call()

    def _load_chunks(self, attached: Attached, chunks: list[int], held: dict[int, Held]) -> None:
        limit = self.match.restorable(self.possible)
        wanted = [chunk for chunk in chunks if chunk < limit]
        with self.transfer._step() as allowed:
            if allowed and wanted:
                self._load_group(attached, wanted, held)

    def _load_group(self, attached: Attached, wanted: list[int], held: dict[int, Held]) -> None:
        gm = self.match.group(attached.group.name).for_part(attached.part, attached.page_bytes)
        runs, covered = plan_runs(gm, held)
        runs = list(_cut(runs, wanted))
        source = PageSource(self.gpu, self.transfer, attached, gm, runs, held, self.tiers)
        group = self._begin(attached, gm, source, wanted)
        others = [] if covered.bit_count() == gm.count else [c for c in wanted if not covered >> c & 1]
        bands: deque[_Band] = deque()
        try:
            for first, rows in self._plan_bands(group, runs, others):
                group.whole = self._send(group, runs, first, rows) and self._send_assembled(group, others)
                if not group.whole and rows < group.shape.layers:
                    group.sent.clear()  # no page has all of its layers
                bands.append(self._end_band(group, first, rows))
                flags = bands[-1].flags
                if not group.whole:
                    break
                self._announce(group, bands, wait=False)
            self._announce(group, bands, wait=True)
        finally:
            self.gpu.loads.quiet()
            source.release()
        if not group.whole:
            self._sort_out(group, flags, wanted, runs, covered)
            return
        self._account(group, wanted, [])
        if len(self.pages) == 1:
            self.transfer._settle_rest(PageOutcome.LOADED)
        else:
            self._settle(group, wanted, PageOutcome.LOADED)

    def _begin(self, attached: Attached, gm: GroupMatch, source: PageSource, wanted: list[int]) -> _Group:
        shape, lane = self.gpu.shapes[attached.number], self.gpu.loads
        ids = array("q", self.units[attached.number])
        bands = BANDS if self.layerwise else 1
        lists = bands * len(wanted) * (attached.group.granules * GRANULE_WORDS + HEAD_WORDS) * WORD
        leaves = len(wanted) * attached.group.granules * shape.layers * WORD
        padding = (3 * len(wanted) * bands + bands + 8) * ALIGN  # at most, if each page is a batch of its own
        sheet = lane.sheet(len(ids) * WORD + (bands + 2) * len(wanted) * FLAG + lists + leaves + padding)
        units, flags = sheet.put(ids), sheet.put(bytes(FLAG * len(wanted)))
        sheet.send(lane.dma, units)
        return _Group(
            attached, gm, shape, source, sheet, units, len(ids), flags, {chunk: i for i, chunk in enumerate(wanted)}
        )

    # -- bands and batches -------------------------------------------------------------------

    def _plan_bands(self, group: _Group, runs: list[Run], others: list[int]) -> list[tuple[int, int]]:
        """(first layer position, layers) of what comes one behind the other: all at once, unless layer-wise."""
        layers = group.shape.layers
        if not self.layerwise or others or any(group.source.in_place(run) is None for run in runs):
            return [(0, layers)]
        step = -(-layers // BANDS)
        return [(first, min(step, layers - first)) for first in range(0, layers, step)]

    def _send(self, group: _Group, runs: list[Run], first: int, rows: int) -> bool:
        """Enqueue some layers of all pages, batch by batch; False if the load ends before the last one."""
        whole = rows == group.shape.layers
        page = group.page_bytes if whole else rows * group.shape.leaf_bytes * group.granules
        most, least = max(1, self.gpu.loads.slot_bytes // page), max(1, BATCH_BYTES_MIN // page)
        batches = list(_batches(runs, most, least))
        for number, batch in enumerate(batches):
            if self._stop():
                return False
            for run in chain(*batches[number and number + AHEAD : number + AHEAD + 1]):
                group.source.prepare(run)
            if whole:
                self._send_whole(group, batch)
            else:
                self._send_rows(group, batch, first, rows)
        return True

    def _stop(self) -> bool:
        return self.transfer.stopped or self.gpu.late(self.transfer)

    def _slot(self) -> Slot:
        lane = self.gpu.loads
        slot = lane.slot()
        lane.dma.after(slot.done)
        return slot

    def _send_whole(self, group: _Group, batch: list[Run]) -> None:
        """All layers of some pages, as they lie in the segment."""
        slot, at, words, tables = self._slot(), 0, array("q"), []
        step = group.shape.layers * group.shape.leaf_bytes
        for run in batch:
            for part in group.source.send(run, slot.address + at):
                begin = at + (part.chunk - run.chunk) * run.stride
                found = group.source.tables(part)
                tables += [table for table in found if table is not None]
                words += self._words(group, part.chunk, found, begin, run.stride, step)
            at += run.span
        self._launch(group, slot, words, tables, 0, group.shape.layers, check=group.source.sums)

    def _send_rows(self, group: _Group, batch: list[Run], first: int, rows: int) -> None:
        """Some layers of pages that lie in registered maps."""
        slot, at, words, tables = self._slot(), 0, array("q"), []
        leaf, granules = group.shape.leaf_bytes, group.granules
        width, step = rows * leaf, group.shape.layers * WORD
        for run in batch:
            group.source.send_rows(run, first * leaf, width, granules, slot.address + at)
            found = group.source.tables(run)
            words += self._words(group, run.chunk, found, at, granules * width, width)
            for table in found:
                if table:
                    tables += [table[i : i + rows * WORD] for i in range(first * WORD, len(table), step)]
            at += run.count * granules * width
        self._launch(group, slot, words, tables, first, rows, check=group.source.sums)

    def _send_assembled(self, group: _Group, chunks: Sequence[int]) -> bool:
        """Pages that were written for other head slots or layers than these, or in a codec; False as ``_send``."""
        left, size = list(chunks), group.page_bytes
        step = max(1, self.gpu.loads.slot_bytes // size)
        while left and not self._stop():
            slot, words = self._slot(), array("q")
            taken, good = group.source.send_assembled(left[:step], slot.address)
            if not taken:
                return False
            for i in good:
                words += self._words(
                    group, taken[i], [b""], i * size, size, group.shape.layers * group.shape.leaf_bytes
                )
            self._launch(group, slot, words, [], 0, group.shape.layers, check=False)
            left = left[len(taken) :]
        return not left

    def _words(
        self, group: _Group, chunk: int, tables: Sequence[bytes | None], offset: int, stride: int, step: int
    ) -> array[int]:
        """The granules of pages from ``chunk`` on that lie ``stride`` apart from ``offset`` of a slot on.

        Pages without a table are left out; granules of a page lie ``step`` apart.
        """
        states, granules = group.attached.group.states, group.granules
        jump = 1 if states == 1 else states // granules
        even = granules == 1 or stride == granules * step
        words = array("q")
        for first, count in streaks([table is not None for table in tables], len(tables) if even else 1):
            group.sent.update(dict.fromkeys(range(chunk + first, chunk + first + count)))
            begin = (chunk + first) * (1 if states == 1 else states)
            flags = [group.index[c] for c in range(chunk + first, chunk + first + count) for _ in range(granules)]
            words += granule_words(
                offset + first * stride, stride if granules == 1 else step,
                range(begin, begin + count * granules * jump, jump), flags,
            )  # fmt: skip
        return words

    def _launch(
        self, group: _Group, slot: Slot, words: array[int], tables: list[bytes], first: int, rows: int, *, check: bool
    ) -> None:
        """Check and scatter what the DMA stream brings to ``slot``."""
        lane, sheet, shape = self.gpu.loads, group.sheet, group.shape
        leaves = sheet.put(b"".join(tables))
        work = sheet.put(pack(
            shape, words, scratch=slot.address, unit_ids=sheet.address(group.units), units=group.unit_count,
            flags=sheet.address(group.flags), leaves=sheet.address(leaves),
            buffers=self.gpu.tables[group.attached.number].address,
            first_token=self.first_token if group.attached.group.states > 1 else 0, first_row=first, rows=rows,
        ))  # fmt: skip
        sheet.send(lane.dma, leaves)
        lane.kernels.after(lane.dma.record(slot.arrived))
        if words:
            if check:
                lane.kernels.sums(sheet.words(work), shape, check=True)
            lane.kernels.move(sheet.words(work), shape, to_page=False)
        lane.kernels.record(slot.done)

    # -- the end -----------------------------------------------------------------------------

    def _end_band(self, group: _Group, first: int, rows: int) -> _Band:
        kernels, nbytes = self.gpu.loads.kernels, FLAG * len(group.index)
        room = group.sheet.room(nbytes)
        group.sheet.fetch(kernels, group.flags, nbytes, into=room)
        return _Band(first, rows, kernels.record(), room)

    def _announce(self, group: _Group, bands: deque[_Band], *, wait: bool) -> None:
        """Bands that have arrived: while all pages are well, their layers are ready."""
        layers = group.attached.group.layers[group.attached.part.layer :]
        while bands and (wait or bands[0].end.query()):
            band = bands.popleft()
            band.end.synchronize()
            flags = group.sheet.host(band.flags, FLAG * len(group.index))
            group.whole = group.whole and len(group.sent) == len(group.index) and not any(flags)
            if group.whole:
                self.transfer._layers_ready(layers[band.first : band.first + band.rows])

    def _sort_out(self, group: _Group, flags: int, wanted: list[int], runs: list[Run], covered: int) -> None:
        """Not all is well: what became of each page. Those that were not reached stay open, and are declined."""
        flagged = group.sheet.host(flags, FLAG * len(wanted))
        records = {run.chunk + i: (run.segment, seq) for run in runs for i, seq in enumerate(run.seqs)}
        differ = [chunk for chunk in group.sent if flagged[group.index[chunk] * FLAG]]
        self.gpu.context.counters.add("pages_corrupt", len(differ))
        gone = [chunk for chunk in wanted if covered >> chunk & 1 and chunk not in records]
        bad = {*differ, *gone, *group.source.refused}
        loaded = [chunk for chunk in group.sent if chunk not in bad]
        self.possible[group.gm.name] &= ~(_bits(wanted) & ~_bits(loaded))
        self._account(group, loaded, group.source.faults + [records[chunk] for chunk in differ])
        if bad:
            self.transfer._note("unreadable")
        self._settle(group, loaded, PageOutcome.LOADED)
        self._settle(group, sorted(bad), PageOutcome.UNREADABLE)

    def _settle(self, group: _Group, chunks: Sequence[int], outcome: PageOutcome) -> None:
        number = group.attached.number
        self.transfer._settle([PageId(number, chunk) for chunk in chunks], outcome)

    def _account(self, group: _Group, loaded: Sequence[int], faults: list[tuple[int, int]]) -> None:
        """Records that do not verify leave the index now; stamps can wait until the engine has been told."""
        if faults:
            self.gpu.reader.forget(self.match, group.gm, faults)
        self._afterwards.append(partial(self.gpu.reader.note, self.match, group.gm, _bits(loaded)))


def _bits(chunks: Sequence[int]) -> int:
    """A set of chunks as bits."""
    if chunks and chunks[-1] - chunks[0] + 1 == len(chunks):  # they ascend
        return (1 << chunks[-1] + 1) - (1 << chunks[0])
    return sum(1 << chunk for chunk in chunks)


def _cut(runs: Sequence[Run], wanted: Sequence[int]) -> Iterator[Run]:
    """The stretches of ``runs`` whose chunks are wanted."""
    chunks = set(wanted)
    for run in runs:
        if chunks.issuperset(range(run.chunk, run.chunk + run.count)):
            yield run
        else:
            for first, count in streaks([run.chunk + i in chunks for i in range(run.count)]):
                yield run.cut(first, count)


def _batches(runs: Sequence[Run], most: int, least: int) -> Iterator[list[Run]]:
    """Runs, cut where need be, in batches of at most ``most`` pages; towards the end ever fewer, down to ``least``."""
    left = sum(run.count for run in runs)
    batch: list[Run] = []
    room = min(most, max(least, left // 3))
    for run in runs:
        done = 0
        while done < run.count:
            take = min(room, run.count - done)
            batch.append(run.cut(done, take) if take < run.count else run)
            done, room, left = done + take, room - take, left - take
            if not room:
                yield batch
                batch, room = [], min(most, max(least, left // 3))
    if batch:
        yield batch
