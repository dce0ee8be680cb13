"""The batches of a load: enqueued for DMA as early as scratch allows, and for the kernels behind it.

The copies of a few batches, of the next band or group too, are enqueued before the kernels of the first one: the host's
work in between takes longer than the copy of a small batch, and the link would run dry.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple

from kvfs.gpu.device import IN_PROGRAMS, Event
from kvfs.gpu.lane import ALIGN, DmaLane, LaunchQueue, ScratchSlice
from kvfs.gpu.page_source import PageSource, streaks
from kvfs.gpu.resources import GpuTransportContext
from kvfs.kernels.work_list import GRANULE_WORDS, HEAD_WORDS, WORD, Shape, granule_words, pack, pack_pieces
from kvfs.read.plan import Run
from kvfs.transfer.workers import Attached

BATCH_BYTES_MIN = 8 << 20  # of the first and of the last batches: nothing hides their kernels
RUNS_MAX = 256  # of a batch: each is a copy
BATCH_CALLS = 10  # of the driver for a batch, in addition to its copies and its small data
AHEAD = 3  # batches that are prepared behind the one that was sent
FLAG = 4  # bytes
UNKNOWN = 2  # whether a leaf table is good


@dataclass(frozen=True)
class Window:
    """Neighbouring pages of a load: runs of those that segments hold as they are wanted, and the others."""

    runs: list[Run]
    others: list[int]
    left: int  # pages that are known to follow

    def __len__(self) -> int:
        return sum(run.count for run in self.runs) + len(self.others)


class LayerBand(NamedTuple):
    """Layer positions [first, first + rows) of all pages."""

    first: int
    rows: int
    end: Event  # all of it has arrived
    flags: int  # offset in the command buffer where the pages' flags are then


class FirstBatch(NamedTuple):
    """The copies of a group's first batch, enqueued ahead of all else."""

    batches: list[list[Run]]  # all of the group
    scratch: ScratchSlice


class _Copied(NamedTuple):
    """A batch that DMA brings to scratch: (pages, offset of the first one, bytes from page to page)."""

    scratch: ScratchSlice
    parts: list[tuple[Run, int, int]]
    first: int  # layer position
    rows: int


class Batches:
    """The batches of one group, on the lane of loads; nothing here waits for the GPU, but for ``due`` batches."""

    def __init__(
        self, context: GpuTransportContext, launches: LaunchQueue, attached: Attached, source: PageSource,
        units: Sequence[int], wanted: Sequence[int], *, bands: int, first_token: int, gentle: bool,
        poll_seconds: float, stop: Callable[[], bool], ended: Callable[[LayerBand], None],
    ) -> None:  # fmt: skip
        """``ended``: called with each band whose end is enqueued. ``gentle``: a kernel copies what is registered."""
        self._context, self._lane, self._attached, self._source = context, context.loads, attached, source
        self._launches, self._stop, self._ended, self._poll_seconds = launches, stop, ended, poll_seconds
        self._shape, self._granules = context.shapes[attached.number], attached.group.granules
        self._unit_ids, self._first_token = units, first_token if attached.group.states > 1 else 0
        self._bands, self._wanted, self._gentle = bands, wanted, gentle
        self._ready = False  # the head of the commands
        self._size = source.table_bytes  # of the leaf table of a page
        # of the wanted pages, for the later bands; and which of them are good
        self._tables, self._good = bytearray(), bytearray()
        if bands > 1:
            self._tables, self._good = bytearray(self._size * len(wanted)), bytearray([UNKNOWN]) * len(wanted)
        self._ahead: FirstBatch | None = None
        self.sent: dict[int, None] = {}  # chunks whose kernels were enqueued, in that order
        self.ends = 0  # of bands, that wait to be enqueued

    @property
    def page_bytes(self) -> int:
        """Of a page in scratch, when all of it is copied."""
        return self._source.stride

    def _prepare(self) -> None:
        """What all batches share: unit ids, the pages' flags, and where these come back at the end of each band."""
        ids, flags = array("q", self._unit_ids), bytes(FLAG * len(self._wanted))
        head = self._head = self._launches.commands(len(ids) * WORD, *[len(flags)] * (self._bands + 1))
        self._units, self._flags = head.put(ids), head.put(flags)
        head.send(self._lane.kernels, self._units)
        self._rooms = [head.room(len(flags)) for _ in range(self._bands)]
        self.index = {chunk: i for i, chunk in enumerate(self._wanted)}
        self._ready = True

    # -- copies ------------------------------------------------------------------------------

    def continue_with(self, ahead: FirstBatch) -> None:
        """The only window of this group has its first copies under way."""
        self._ahead = ahead

    def send(self, window: Window, first: int, rows: int, behind: int = 0) -> bool:
        """Some layers of all pages of a window; False if the load ends before the last one.

        ``behind``: bytes that follow the last window's last layers.
        """
        whole = rows == self._shape.layers
        page = self.page_bytes if whole else rows * self._shape.leaf_bytes * self._granules
        later = (window.left + len(window)) * (self._shape.layers - first - rows) // rows
        ahead, self._ahead = self._ahead, None
        batches = ahead.batches if ahead is not None else cut_in_batches(
            window.runs, page, self._context.batch_bytes, window.left + later + behind // page
        )  # fmt: skip
        if whole:
            self._source.expect(window.runs)
        for number, batch in enumerate(batches):
            if not self._may_go_on():
                return False
            started = ahead.scratch if ahead is not None and not number else None
            copied = self._copy(batch, first, rows) if started is None else self._copied_ahead(batch, started, rows)
            self._launches.add(partial(self._launch_copied, copied))
            for run in chain(*batches[number + 1 if number == 0 else number + AHEAD : number + AHEAD + 1]):
                self._source.prepare(run)
        return self._send_assembled(window.others)

    def _may_go_on(self) -> bool:
        """Wait until few enough batches are under way; False if the load is to end."""
        due = self._lane.due()
        while not self._stop():
            if due is None or due.query():
                return True
            self._context.store.files.sleep(self._poll_seconds)
        return False

    def _slice(self, nbytes: int) -> ScratchSlice:
        while True:
            scratch = self._lane.slice(nbytes, self._lane.dma)
            if scratch is not None:
                return scratch
            self._launches.oldest()

    def _copy(self, batch: Sequence[Run], first: int, rows: int) -> _Copied:
        whole, leaf = rows == self._shape.layers, self._shape.leaf_bytes
        width = rows * leaf
        scratch = self._slice(sum(run.span if whole else run.count * self._granules * width for run in batch))
        at, parts, pieces = 0, [], list[tuple[int, int, int]]()
        for run in batch:
            if whole:  # with the gaps that are in the segment
                coming = self._source.send(run, scratch.address + at, pieces if self._gentle else None)
                parts += [(part, at + (part.chunk - run.chunk) * run.stride, run.stride) for part in coming]
                at += run.span
            else:
                self._source.send_rows(run, first * leaf, width, self._granules, scratch.address + at)
                parts.append((run, at, self._granules * width))
                at += run.count * self._granules * width
        if pieces:
            self._copy_pieces(pieces)
        self._lane.dma.record(scratch.arrived)
        return _Copied(scratch, parts, first, rows)

    def _copy_pieces(self, pieces: list[tuple[int, int, int]]) -> None:
        words = pack_pieces(pieces)
        commands = self._launches.commands(len(words) * WORD)
        at = commands.put(words)
        commands.send(self._lane.dma, at)
        self._lane.dma.copy_pieces(commands.work(at, commands.words(at, 0)), programs=IN_PROGRAMS)

    def _copied_ahead(self, batch: Sequence[Run], scratch: ScratchSlice, rows: int) -> _Copied:
        at, parts = 0, []
        for run in batch:
            self._source.note_in_place(run)
            parts.append((run, at, run.stride))
            at += run.span
        return _Copied(scratch, parts, 0, rows)

    def _send_assembled(self, chunks: Sequence[int]) -> bool:
        """Pages that were written for other head slots or layers than these, or in a codec; False as ``send``."""
        left, size = list(chunks), self.page_bytes
        step = max(1, self._context.batch_bytes // size)
        while left and self._may_go_on():
            self._launches.all()
            scratch, words = self._slice(min(step, len(left)) * size), array("q")
            taken, good = self._source.send_assembled(left[:step], scratch.address)
            self._lane.dma.record(scratch.arrived)
            for i in good:
                words += self._words(taken[i], b"\1", i * size, size, self._shape.layers * self._shape.leaf_bytes)
            self._launch(scratch, words, b"", 0, self._shape.layers, check=False, copies=len(good))
            if not taken:
                return False
            left = left[len(taken) :]
        return not left

    # -- kernels -----------------------------------------------------------------------------

    def _launch_copied(self, copied: _Copied) -> None:
        scratch, parts, first, rows = copied
        words, tables = array("q"), list[bytes]()
        for run, at, stride in parts:
            found, good = self._find_tables(run)
            words += self._words(run.chunk, good, at, stride, rows * self._shape.leaf_bytes)
            tables += [found[self._size * i : self._size * (i + n)] for i, n in streaks(good)]
        whole = b"".join(tables)
        if whole and rows < self._shape.layers:
            whole = _columns(whole, self._shape.layers, first, rows)
        self._launch(scratch, words, whole, first, rows, check=self._source.sums, copies=len(parts))

    def _find_tables(self, run: Run) -> tuple[bytes, bytes]:
        """The leaf tables of a run, and which of them are good; read and checked once."""
        if not self._ready:
            self._prepare()
        if self._bands == 1:
            return self._source.tables(run)
        first, end = self.index[run.chunk], self.index[run.chunk] + run.count
        if self._good[first] == UNKNOWN:  # the batches of all bands are cut alike, or finer
            tables = self._source.tables(run)
            self._tables[first * self._size : end * self._size], self._good[first:end] = tables
        return bytes(self._tables[first * self._size : end * self._size]), bytes(self._good[first:end])

    def _words(self, chunk: int, good: bytes, offset: int, stride: int, step: int) -> array[int]:
        """The granules of pages from ``chunk`` on that are ``stride`` apart, from ``offset`` of a slice on.

        Pages that are not ``good`` are left out; granules of a page are ``step`` apart.
        """
        if not self._ready:
            self._prepare()
        states, granules = self._attached.group.states, self._granules
        jump = 1 if states == 1 else states // granules
        even = granules == 1 or stride == granules * step
        words = array("q")
        for first, count in streaks(good, len(good) if even else 1):
            chunks = range(chunk + first, chunk + first + count)
            self.sent.update(dict.fromkeys(chunks))
            begin, page = chunks[0] * (1 if states == 1 else states), self.index[chunks[0]]
            words += granule_words(
                offset + first * stride, stride if granules == 1 else step,
                range(begin, begin + count * granules * jump, jump), range(page, page + count), granules,
            )  # fmt: skip
        return words

    def _launch(
        self, scratch: ScratchSlice, words: array[int], tables: bytes, first: int, rows: int, *, check: bool,
        copies: int,
    ) -> None:  # fmt: skip
        """Check and scatter what ``copies`` of the DMA stream bring to ``scratch``."""
        calls = copies + BATCH_CALLS
        if words:
            kernels, shape, units = self._lane.kernels, self._shape, len(self._unit_ids)
            commands = self._launches.commands(len(tables), (HEAD_WORDS + len(words)) * WORD)
            leaves = commands.put(tables)
            work = commands.put(pack(
                shape, words, scratch=scratch.address, unit_ids=self._head.address(self._units), units=units,
                flags=self._head.address(self._flags), leaves=commands.address(leaves),
                buffers=self._context.tables[self._attached.number].address, first_token=self._first_token,
                first_row=first, rows=rows,
            ))  # fmt: skip
            calls += commands.send(kernels, leaves)
            kernels.after(scratch.arrived)
            launch = commands.work(work, self._head.words(self._units, units))
            kernels.scatter(launch, shape, check=check)
        else:  # the end of a band is the end of all copies before it, those of refused pages included
            self._lane.kernels.after(scratch.arrived)
        self._lane.finished(scratch, self._lane.kernels, calls)

    def end_band(self, first: int, rows: int) -> None:
        """Enqueue the end of a band, behind all that was sent so far."""
        self.ends += 1
        self._launches.add(partial(self._end_band, first, rows))

    def _end_band(self, first: int, rows: int) -> None:
        if not self._ready:
            self._prepare()
        room = self._rooms.pop()
        self._head.fetch(self._lane.kernels, self._flags, FLAG * len(self._wanted), into=room)
        band = LayerBand(first, rows, self._lane.kernels.record(), room)
        self.ends -= 1  # a group without any would count as verified
        self._ended(band)

    def flags(self, band: LayerBand) -> memoryview:
        """One for each wanted page, FLAG bytes apart; not 0: its bytes differ from its checksums."""
        return self._head.back(band.flags, FLAG * len(self._wanted))


def commands_bytes(shape: Shape, granules: int, *, pages: int, units: int, bands: int) -> int:
    """Room in a command buffer for one group: unit ids, flags, leaf tables and work lists."""
    lists = bands * pages * (granules * GRANULE_WORDS + HEAD_WORDS) * WORD
    leaves = pages * granules * shape.layers * WORD
    padding = (3 * pages * bands + bands + 8) * ALIGN  # at most, if each page is a batch of its own
    return units * WORD + (bands + 2) * pages * FLAG + lists + leaves + padding


def _columns(tables: bytes, layers: int, first: int, rows: int) -> bytes:
    """The entries of layers [first, first + rows) of leaf tables, granule by granule."""
    whole = array("Q", tables)
    cut = array("Q", bytes(len(whole) // layers * rows * WORD))
    for row in range(rows):
        cut[row::rows] = whole[first + row :: layers]
    return cut.tobytes()


def copy_first(lane: DmaLane, batches: list[list[Run]]) -> FirstBatch | None:
    """Enqueue the copies of the first of these batches, whose runs are registered."""
    scratch = lane.slice(sum(run.span for run in batches[0]), lane.dma)
    if scratch is None:
        return None
    target = scratch.address
    for run in batches[0]:
        for address, nbytes in run.ranges:
            lane.dma.copy_in(target, address, nbytes)
            target += nbytes
    lane.dma.record(scratch.arrived)
    return FirstBatch(batches, scratch)


def cut_in_batches(runs: Sequence[Run], page: int, batch_bytes: int, behind: int) -> list[list[Run]]:
    """Batches of pages of ``page`` bytes. ``behind``: pages that follow."""
    return list(_batches(runs, max(1, batch_bytes // page), max(1, BATCH_BYTES_MIN // page), behind))


def _batches(runs: Sequence[Run], most: int, least: int, behind: int) -> Iterator[list[Run]]:
    """Runs, cut where necessary, in batches of at most ``most`` pages; smaller towards the end, down to ``least``.

    ``behind``: pages that follow them. A batch has up to three quarters of what is left: each costs the host
    something, and the GPU sums and scatters it six times as fast as the link brings it, while the next one comes.
    """
    left = sum(run.count for run in runs) + behind
    batch: list[Run] = []
    room = _room(left, most, least)
    for run in runs:
        done = 0
        while done < run.count:
            take = min(room, run.count - done)
            batch.append(run.cut(done, take) if take < run.count else run)
            done, room, left = done + take, room - take, left - take
            if not room or len(batch) == RUNS_MAX:
                yield batch
                batch, room = [], _room(left, most, least)
    if batch:
        yield batch


def _room(left: int, most: int, least: int) -> int:
    return min(most, max(least, left * 3 // 4))
