"""Where a load's bytes come from: registered maps, or the ring.

Copies are enqueued on the lane's DMA stream and not waited for. Pages that other parts make up or that are stored in a
codec, and leaves that are too short for the GPU's checksum, are verified by the CPU in the ring; all others by the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from kvfs.context import Context
from kvfs.format import segment as fmt
from kvfs.format.checksums import LEAF_BYTES, leaf_table, root_of
from kvfs.gpu.device import Event
from kvfs.gpu.populate import PageCachePrefetch
from kvfs.gpu.registration_cache import RegionLease, RegisteredRange
from kvfs.gpu.resources import GpuTransportContext
from kvfs.lookup.prefix_match import GroupMatch, Source
from kvfs.pages.chunk_set import span
from kvfs.read.assemble import assemble
from kvfs.read.plan import Run
from kvfs.segments.open_segments import OpenSegment
from kvfs.system.thread_pool import Begun
from kvfs.transfer.control import TransferControl
from kvfs.transfer.outcome import TierAccounting
from kvfs.transfer.staging import Lease, SlotState
from kvfs.transfer.workers import Attached
from kvfs.types import Tier, Verify

READ_BYTES = 4 << 20  # one preadv


class _Reading(NamedTuple):
    """Pages on their way from a segment to slots."""

    run: Run
    lease: Lease
    begun: Begun[None]


class PageSource:
    """The pages of one group of one load."""

    def __init__(
        self, desk: GpuTransportContext, transfer: TransferControl, attached: Attached, gm: GroupMatch,
        held: Mapping[int, OpenSegment],
        published: Mapping[int, int], came_from: TierAccounting, catch_up: Callable[[], None],
    ) -> None:  # fmt: skip
        self._desk, self._transfer, self._attached, self._gm, self._held = desk, transfer, attached, gm, held
        self._came_from = came_from
        self._catch_up = catch_up  # to be called before anything that may have to wait
        self._regions = RegionLease()
        self._leases: list[tuple[Event, Lease]] = []
        self._ahead: dict[tuple[int, int], _Reading] = {}  # by where the run lies
        self._published = published  # bytes of each segment that are known to be
        self._summed = desk.shapes[attached.number].sums  # the GPU can check what it reads in place
        self._past = partial(_past, desk.context)
        self._fills = PageCachePrefetch(desk, self._published, self._past)
        self.sums = self._summed and desk.context.verify is not Verify.OFF
        self.table_bytes = attached.group.leaves(attached.part) * LEAF_BYTES if self.sums else 0  # of a page
        self.faults: list[tuple[int, int]] = []  # (segment, seq) of records that do not verify
        self.refused: list[int] = []  # chunks that are not loaded because of them

    def grow(self, gm: GroupMatch) -> None:
        """More of the group has been found: ``gm`` begins with what was known."""
        self._gm = gm

    # -- registered maps ---------------------------------------------------------------------

    def in_place(self, run: Run, *, filled: bool = False) -> list[RegisteredRange] | None:
        """Registered memory of a run, from now until ``release``; None if it is to come through the ring.

        Only what the page cache holds is registered now: to fault a cold map in takes longer than to read the file.
        ``filled``: it has just been read for this.
        """
        maps = self._desk.in_place
        if maps is None or not self._summed:
            return None
        ranges = maps.ranges(run.held, run.offset, run.span, 0, self._regions, register=False)
        if ranges is not None:
            return ranges
        if not filled and not self._registers(run):
            maps.lacks(run.held, run.offset, run.span)
            return None
        published, cached = self._published[run.segment], self._desk.context.segments.cached_bytes
        missing = maps.missing(run.held, run.offset, run.span, published)
        if any(cached(run.held, *region) not in (region[1], None) for region in missing):
            self._catch_up()  # the rest of a region comes from the disk
        return maps.ranges(run.held, run.offset, run.span, published, self._regions, register=True)

    def _registers(self, run: Run) -> bool:
        maps, cached = self._desk.in_place, self._desk.context.segments.cached_bytes
        assert maps is not None
        if maps.covers(run.held, run.offset, run.span):
            return True
        return maps.source.ready() and cached(run.held, run.offset, run.span) in (run.span, None)

    def expect(self, runs: Sequence[Run]) -> None:
        """Tell which runs will be sent, before any of them is."""
        if self._summed:
            self._fills.expect(runs)

    def prepare(self, run: Run) -> None:
        """Begin the reads that a later ``send`` of this run will wait for, if there will be any."""
        if self._desk.in_place is not None and self._summed and (self._registers(run) or self._fills.begin(run)):
            return
        ring, now = self._desk.ring, self._desk.context.files.monotonic()
        size = self._attached.page_bytes
        if run.count > ring.holds(size) // 4:
            return
        self._reap()
        lease = ring.acquire(run.count, now, page_bytes=size)
        if lease is not None and self._transfer.own(lease):
            self._ahead[run.segment, run.offset] = self._begin(run, lease)

    def send(self, run: Run, target: int) -> Iterator[Run]:
        """Enqueue the copies of a run, gaps included, to ``target``; yields the stretches of it that come."""
        dma, ahead = self._desk.loads.dma, (run.segment, run.offset) in self._ahead
        filled = self._filled(run)
        stretches = self.in_place(run, filled=filled)
        if stretches is None and self._summed and not ahead and self._fills.begin(run):
            filled = self._filled(run)
            stretches = self.in_place(run, filled=filled)
        if stretches is not None:
            self._note(run, Tier.DISK if filled else Tier.HOST)
            for address, nbytes in stretches:
                dma.copy_in(target, address, nbytes)
                target += nbytes
            yield run
            return
        done = 0
        while done < run.count:
            reading = self._ahead.pop((run.segment, run.offset), None) if not done else None
            if reading is None:
                lease = self._lease(run.count - done)
                if lease is None:
                    return
                reading = self._begin(run.cut(done, len(lease)), lease, filled=filled)
            part = reading.run
            try:
                self._catch_up()
            finally:  # else the slots would be another transfer's while they are filled
                good = self._end(reading)
            self._drain(reading.lease, target + done * run.stride)
            yield from (part.cut(first, count) for first, count in streaks(good))
            self._refuse([(part.chunk + i, part.seqs[i]) for i, fine in enumerate(good) if not fine], part.segment)
            done += part.count

    def _filled(self, run: Run) -> bool:
        if self._fills.has(run):
            self._catch_up()
        return self._fills.wait(run)

    def send_rows(self, run: Run, offset: int, width: int, granules: int, target: int) -> None:
        """Enqueue ``width`` bytes of each granule of a registered run, from ``offset`` in the granule on."""
        stretches = self.in_place(run)
        assert stretches is not None, "a run that was registered is so no more"
        self._note(run, Tier.HOST)
        step = self._attached.page_bytes // granules
        if granules == 1 or run.stride == self._attached.page_bytes:
            rows = [(offset, run.stride if granules == 1 else step, run.count * granules)]
        else:
            rows = [(i * run.stride + offset, step, granules) for i in range(run.count)]
        for first, pitch, count in rows:
            self._copy_rows(stretches, first, pitch, count, width, target)
            target += count * width

    def _copy_rows(
        self, stretches: Sequence[RegisteredRange], offset: int, pitch: int, count: int, width: int, target: int
    ) -> None:
        """Rows ``pitch`` apart; one strided copy for each stretch, two plain ones where a row is in two."""
        dma, start = self._desk.loads.dma, 0
        for number, (address, nbytes) in enumerate(stretches):
            end = start + nbytes
            if count and offset < end:
                inside = min(count, max(0, (end - offset - width) // pitch + 1))
                if inside:
                    dma.copy_in_2d(target, width, address + offset - start, pitch, width, inside)
                    offset, target, count = offset + inside * pitch, target + inside * width, count - inside
                if count and offset < end:
                    head = end - offset
                    dma.copy_in(target, address + offset - start, head)
                    dma.copy_in(target + head, stretches[number + 1].address, width - head)
                    offset, target, count = offset + pitch, target + width, count - 1
            start = end
        assert not count, "rows reach beyond what is registered"

    # -- the ring ----------------------------------------------------------------------------

    def _lease(self, pages: int) -> Lease | None:
        """Slots, FILLING; those whose copies are over go back first. None, and the reason noted, if none come."""
        ring, clock, size = self._desk.ring, self._desk.context.files.monotonic, self._attached.page_bytes
        pages = min(pages, max(1, ring.holds(size) // 4))
        self._catch_up()
        while True:
            self._reap()
            mine = bool(self._leases or self._ahead)
            lease = ring.acquire(
                pages, clock() if mine else self._transfer.deadline, page_bytes=size, least=1,
                give_up_at=lambda: -math.inf if self._transfer.stopped else math.inf,
            )  # fmt: skip
            if lease is not None:
                return lease if self._transfer.own(lease) else None
            if self._leases:
                self._leases[0][0].synchronize()
            elif self._ahead:  # read ahead has taken what is needed now
                self._end_read()
            else:
                self._transfer.note("ring")
                return None

    def _reap(self) -> None:
        while self._leases and self._leases[0][0].query():
            self._leases.pop(0)[1].release()

    def _begin(self, run: Run, lease: Lease, *, filled: bool = False) -> _Reading:
        """Have the slots filled by several threads. ``filled``: the page cache has it from this load."""
        segments = self._desk.context.segments
        cached = segments.cached_bytes(run.held, run.offset, run.span)
        self._note(run, Tier.HOST if cached == run.span and not filled else Tier.DISK)
        past = cached == 0 and self._past(run)
        calls: list[Callable[[], None]] = []
        for first, memory in lease.runs(run.stride):
            offset = run.offset + first * run.stride
            calls += [
                partial(segments.read, run.held, memory[at : at + READ_BYTES], offset + at, direct=past)
                for at in range(0, len(memory), READ_BYTES)
            ]
        return _Reading(run, lease, self._desk.readers.begin(calls))

    def _end(self, reading: _Reading) -> list[bool]:
        """Which pages are in their slots, fit to be sent."""
        run, lease, begun = reading
        try:
            begun.wait()
            good = [True] * run.count
        except OSError:
            good = self._read_singly(run, lease)
        if not self.sums and self._desk.context.verify is not Verify.OFF:
            self._verify(run, lease, good)
        return good

    def _read_singly(self, run: Run, lease: Lease) -> list[bool]:
        """One of the pages cannot be read: find out which."""
        self._desk.context.counters.add("read_errors")
        good = []
        for i, memory in enumerate(lease.views()):
            try:
                self._desk.context.segments.read(run.held, memory, run.offset + i * run.stride)
                good.append(True)
            except OSError:
                good.append(False)
        return good

    def _verify(self, run: Run, lease: Lease, good: list[bool]) -> None:
        leaf_bytes = self._attached.group.leaf_bytes(self._attached.part)
        for i, memory in enumerate(lease.views()):
            if good[i] and root_of(leaf_table(memory, leaf_bytes)) != run.root(i):
                self._desk.context.counters.add("pages_corrupt")
                good[i] = False

    def _drain(self, lease: Lease, target: int) -> None:
        """Enqueue the copies out of the slots, ``stride`` apart; the lease goes back when they are over."""
        dma, stride = self._desk.loads.dma, self.stride
        lease.move(SlotState.FULL)
        lease.move(SlotState.DRAINING)
        for first, count, at in lease.stretches():
            dma.copy_in(target + first * stride, self._desk.ring_address + at, count * stride)
        self._leases.append((dma.record(), lease))

    def send_assembled(self, chunks: Sequence[int], target: int) -> tuple[list[int], list[int]]:
        """Pages that other parts make up or that are to be decoded: made and verified by the CPU, ``stride`` apart.

        (chunks dealt with, positions of those that come); fewer than asked if slots are short.
        """
        lease = self._lease(len(chunks))
        if lease is None:
            return [], []
        taken = list(chunks[: len(lease)])
        sources, good = self._gm.sources(), []
        for chunk in taken:
            warm = all(self._in_cache(source) for source in sources.get(chunk, []))
            self._came_from.note(self._attached.number, 1 << chunk, Tier.HOST if warm else Tier.DISK)
        calls = [
            partial(assemble, self._desk.context, sources.get(c, []), self._gm, self._attached.group, page, self._held)
            for c, page in zip(taken, lease.views(), strict=True)
        ]
        self._catch_up()
        for i, (chunk, (whole, wrong)) in enumerate(zip(taken, self._desk.readers.run(calls), strict=True)):
            self.faults += [(source.place.segment, source.place.seq) for source in wrong]
            if whole:
                good.append(i)
            else:
                self.refused.append(chunk)
        self._drain(lease, target)
        return taken, good

    def _in_cache(self, source: Source) -> bool:
        place, held = source.place, self._held.get(source.place.segment)
        cached = self._desk.context.segments.cached_bytes
        return held is not None and cached(held, place.block * fmt.BLOCK, place.stored_bytes) == place.stored_bytes

    @property
    def stride(self) -> int:
        """Bytes from page to page in the ring and in scratch, where they do not come as they lie in a segment."""
        return fmt.align(self._attached.page_bytes)

    @property
    def has_slots(self) -> bool:
        """Whether slots of the ring are in use, or about to be."""
        return bool(self._leases or self._ahead)

    # -- checksums, the end --------------------------------------------------------------------

    def tables(self, run: Run) -> tuple[bytes, bytes]:
        """What the GPU's sums of the pages must be, and for each page 1 if the index vouches for that, or else 0."""
        if not self.sums:
            return b"", b"\1" * run.count
        c, size = self._desk.context, self.table_bytes
        try:
            raw = c.files.read(run.held.fd, size * run.count, run.leaf) if run.leaf and run.leaf_bytes == size else b""
        except OSError:
            c.counters.add("read_errors")
            raw = b""
        raw = raw.ljust(size * run.count, b"\0")
        roots = [root_of(raw[at : at + size]) for at in range(0, len(raw), size)]
        if b"".join(roots) == run.roots:
            return raw, b"\1" * run.count
        good = bytes(root == run.root(i) for i, root in enumerate(roots))
        for i in [i for i, fine in enumerate(good) if not fine]:
            c.counters.add("pages_corrupt")
            self._refuse([(run.chunk + i, run.seqs[i])], run.segment)
        return raw, good

    def _refuse(self, pages: Sequence[tuple[int, int]], segment: int) -> None:
        for chunk, seq in pages:
            self.refused.append(chunk)
            self.faults.append((segment, seq))

    def _note(self, run: Run, tier: Tier) -> None:
        self._came_from.note(self._attached.number, span(run.chunk, run.count), tier)

    def free_slots(self) -> None:
        """Wait for the copies out of slots, and let go of these."""
        self.end_reads()
        while self._leases:
            self._leases[0][0].synchronize()
            self._reap()

    def end_reads(self) -> None:
        """Wait for reads that nothing will be sent of."""
        self._fills.close()
        while self._ahead:
            self._end_read()

    def _end_read(self) -> None:
        reading = self._ahead.popitem()[1]
        self._end(reading)
        reading.lease.release()

    def release(self) -> None:
        """Let go of maps and slots; no copy of this load is under way any more."""
        for _, lease in self._leases:
            lease.release()
        self._leases.clear()
        if self._desk.in_place is not None:
            self._desk.in_place.release(self._regions)


def _past(c: Context, run: Run) -> bool:
    """Whether what is not in the page cache is read past it: where nobody has used it before, or always."""
    return c.mode.direct or (c.mode.cold_direct and not c.access_times.was_used(run.held.segment_id, run.seqs[0]))


def streaks(good: Sequence[int], most: int = 1 << 62) -> Iterator[tuple[int, int]]:
    """(first, count) of each run of what is true, in pieces of at most ``most``."""
    if most >= len(good) and all(good):
        yield 0, len(good)
        return
    first = 0
    for i in range(1, len(good) + 1):
        if i == len(good) or good[i] != good[first] or i - first == most:
            if good[first]:
                yield first, i - first
            first = i
