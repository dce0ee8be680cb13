"""Where a load's bytes come from: registered regions, or the ring.

Copies are enqueued on the lane's DMA stream and not waited for. The GPU verifies pages, except those that other parts
make up or that are stored in a codec, and leaves too short for its checksum: the CPU verifies these in the ring.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from kvfs.context import Context
from kvfs.format import segment as fmt
from kvfs.format.checksums import LEAF_BYTES, leaf_table, root_of
from kvfs.gpu.device import Event
from kvfs.gpu.page_feed import GroupPages, PageFeed
from kvfs.gpu.populate import PageCachePrefetch
from kvfs.gpu.registration_cache import RegionLease
from kvfs.gpu.resources import GpuTransportContext, Manner, wait_until
from kvfs.lookup.prefix_match import Source
from kvfs.pages.chunk_set import span
from kvfs.read.assemble import assemble
from kvfs.read.plan import Run
from kvfs.system.thread_pool import Begun
from kvfs.transfer.control import TransferControl
from kvfs.transfer.outcome import TierAccounting
from kvfs.transfer.staging import Lease, SlotState
from kvfs.types import Tier, Verify


class _Reading(NamedTuple):
    """Pages on their way from a segment to slots."""

    run: Run
    lease: Lease
    begun: Begun[None]


class PageSource:
    """The bytes of one group of one load. Owns its slots, its lease of regions and its reads."""

    def __init__(
        self, context: GpuTransportContext, transfer: TransferControl, pages: GroupPages, feed: PageFeed,
        tiers: TierAccounting, manner: Manner, catch_up: Callable[[], None],
    ) -> None:  # fmt: skip
        """``catch_up``: called before anything that may have to wait."""
        self._context, self._transfer, self._pages, self._feed = context, transfer, pages, feed
        self._attached, self._tiers, self._manner, self._catch_up = pages.attached, tiers, manner, catch_up
        self._regions = RegionLease()
        self._leases: list[tuple[Event, Lease]] = []  # with the ends of the copies out of them
        self._reads: dict[tuple[int, int], _Reading] = {}  # ahead of ``send``, by segment and offset of the run
        self._summed = context.shapes[self._attached.number].sums  # the GPU can check what it reads in place
        self._direct = partial(_reads_directly, context.store)
        self._prefetch = PageCachePrefetch(context, feed.tails, self._direct)
        self.sums = self._summed and context.store.verify is not Verify.OFF
        group = self._attached.group
        self.table_bytes = group.leaves(self._attached.part) * LEAF_BYTES if self.sums else 0  # of a page
        self.faults: list[tuple[int, int]] = []  # (segment, seq) of records that do not verify
        self.refused: list[int] = []  # chunks that are not loaded because of them

    # -- registered regions ------------------------------------------------------------------

    def registered(self, run: Run, *, prefetched: bool = False) -> Sequence[tuple[int, int]] | None:
        """(address, bytes) of registered memory, until ``release``; None if the run has to come through the ring.

        Only what the page cache holds is registered now: faulting a cold map in takes longer than reading the file.
        ``prefetched``: the run has just been read for this.
        """
        if run.ranges:  # leased by the load
            return run.ranges
        regions = self._context.regions
        if regions is None or not self._summed:
            return None
        ranges = regions.ranges(run.held, run.offset, run.span, 0, self._regions, register=False)
        if ranges is not None:
            return ranges
        if not prefetched and not self._may_register(run):
            regions.lacks(run.held, run.offset, run.span)
            return None
        published, cached = self._feed.tails[run.segment], self._context.store.segments.cached_bytes
        missing = regions.missing(run.held, run.offset, run.span, published)
        if any(cached(run.held, *region) not in (region[1], None) for region in missing):
            self._catch_up()  # the rest of a region comes from the disk
        return regions.ranges(run.held, run.offset, run.span, published, self._regions, register=True)

    def _may_register(self, run: Run) -> bool:
        """Whether all of a run is registered, or in the page cache and worth registering."""
        regions, cached = self._context.regions, self._context.store.segments.cached_bytes
        assert regions is not None
        if regions.covers(run.held, run.offset, run.span):
            return True
        ready = regions.source.ready(gentle=not self._manner.registers)
        return ready and cached(run.held, run.offset, run.span) in (run.span, None)

    def expect(self, runs: Sequence[Run]) -> None:
        """Announce the runs that will be sent, before any of them is."""
        unknown = [run for run in runs if not run.ranges]
        if self._summed and unknown:
            self._prefetch.expect(unknown)

    def prepare(self, run: Run) -> None:
        """Begin the reads that a later ``send`` of this run would wait for."""
        if run.ranges:
            return
        in_place = self._context.regions is not None and self._summed
        if in_place and (self._may_register(run) or self._begin_prefetch(run)):
            return
        ring, now = self._context.ring, self._context.store.files.monotonic()
        size = self._attached.page_bytes
        if run.count > ring.holds(size) // 4:
            return
        self._reap()
        lease = ring.acquire(run.count, now, page_bytes=size)
        if lease is not None and self._transfer.own(lease):
            self._reads[run.segment, run.offset] = self._begin(run, lease)

    def send(self, run: Run, target: int, pieces: list[tuple[int, int, int]] | None = None) -> Iterator[Run]:
        """Enqueue the copies of a run, gaps included, to ``target``; yields the parts of it that are coming.

        ``pieces``: takes (source, target, bytes) of those out of registered memory, for the caller to enqueue.
        """
        dma, reading_ahead = self._context.loads.dma, (run.segment, run.offset) in self._reads
        prefetched = not run.ranges and self._await_prefetch(run)
        ranges = self.registered(run, prefetched=prefetched)
        if ranges is None and self._summed and not reading_ahead and self._begin_prefetch(run):
            prefetched = self._await_prefetch(run)
            ranges = self.registered(run, prefetched=prefetched)
        if ranges is not None:
            self._note(run, Tier.DISK if prefetched else Tier.HOST)
            for address, nbytes in ranges:
                if pieces is None:
                    dma.copy_in(target, address, nbytes)
                else:
                    pieces.append((address, target, nbytes))
                target += nbytes
            yield run
            return
        done = 0
        while done < run.count:
            reading = self._reads.pop((run.segment, run.offset), None) if not done else None
            if reading is None:
                lease = self._lease(run.count - done)
                if lease is None:
                    return
                reading = self._begin(run.cut(done, len(lease)), lease, prefetched=prefetched)
            part = reading.run
            try:
                self._catch_up()
            finally:  # else the slots would be another transfer's while they are filled
                good = self._end(reading)
            self._drain(reading.lease, target + done * run.stride)
            yield from (part.cut(first, count) for first, count in streaks(good))
            self._refuse([(part.chunk + i, part.seqs[i]) for i, fine in enumerate(good) if not fine], part.segment)
            done += part.count

    def note_in_place(self, run: Run) -> None:
        """The copies of a registered run are enqueued, by another."""
        self._note(run, Tier.HOST)

    def _begin_prefetch(self, run: Run) -> bool:
        """Read a run into the page cache, to register it there; False if that is not worthwhile."""
        return self._manner.registers and self._prefetch.begin(run)

    def _await_prefetch(self, run: Run) -> bool:
        if self._prefetch.has(run):
            self._catch_up()
        return self._prefetch.wait(run)

    def send_rows(self, run: Run, offset: int, width: int, granules: int, target: int) -> None:
        """Enqueue ``width`` bytes of each granule of a registered run, from ``offset`` in the granule on."""
        ranges = self.registered(run)
        assert ranges is not None, "a run that was registered no longer is"
        self._note(run, Tier.HOST)
        step = self._attached.page_bytes // granules
        if granules == 1 or run.stride == self._attached.page_bytes:
            rows = [(offset, run.stride if granules == 1 else step, run.count * granules)]
        else:
            rows = [(i * run.stride + offset, step, granules) for i in range(run.count)]
        for first, pitch, count in rows:
            self._copy_rows(ranges, first, pitch, count, width, target)
            target += count * width

    def _copy_rows(
        self, ranges: Sequence[tuple[int, int]], offset: int, pitch: int, count: int, width: int, target: int
    ) -> None:
        """Rows ``pitch`` apart; one strided copy for each range, two plain ones where a row is in two."""
        dma, start = self._context.loads.dma, 0
        for number, (address, nbytes) in enumerate(ranges):
            end = start + nbytes
            if count and offset < end:
                inside = min(count, max(0, (end - offset - width) // pitch + 1))
                if inside:
                    dma.copy_in_2d(target, width, address + offset - start, pitch, width, inside)
                    offset, target, count = offset + inside * pitch, target + inside * width, count - inside
                if count and offset < end:
                    head = end - offset
                    dma.copy_in(target, address + offset - start, head)
                    dma.copy_in(target + head, ranges[number + 1][0], width - head)
                    offset, target, count = offset + pitch, target + width, count - 1
            start = end
        assert not count, "rows reach beyond what is registered"

    # -- the ring ----------------------------------------------------------------------------

    def _lease(self, pages: int) -> Lease | None:
        """Slots, FILLING; those whose copies have ended are released first. None, and a reason noted, if none come."""
        ring, clock, size = self._context.ring, self._context.store.files.monotonic, self._attached.page_bytes
        pages = min(pages, max(1, ring.holds(size) // 4))
        self._catch_up()
        while True:
            self._reap()
            mine = bool(self._leases or self._reads)
            lease = ring.acquire(
                pages, clock() if mine else self._transfer.deadline, page_bytes=size, least=1,
                give_up_at=lambda: -math.inf if self._transfer.stopped else math.inf,
            )  # fmt: skip
            if lease is not None:
                return lease if self._transfer.own(lease) else None
            if self._leases:
                wait_until(self._context, self._leases[0][0], self._manner.poll_seconds)
            elif self._reads:  # reading ahead has taken the slots that are needed now
                self._end_read()
            else:
                self._transfer.note("ring")
                return None

    def _reap(self) -> None:
        """Release the slots whose copies have ended."""
        while self._leases and self._leases[0][0].query():
            self._leases.pop(0)[1].release()

    def _begin(self, run: Run, lease: Lease, *, prefetched: bool = False) -> _Reading:
        """Fill the slots by several threads. ``prefetched``: this load has read the run into the page cache."""
        segments = self._context.store.segments
        cached = segments.cached_bytes(run.held, run.offset, run.span)
        self._note(run, Tier.HOST if cached == run.span and not prefetched else Tier.DISK)
        direct = cached == 0 and self._direct(run)
        calls, step = list[Callable[[], None]](), self._manner.read_bytes
        for first, memory in lease.runs(run.stride):
            offset = run.offset + first * run.stride
            calls += [
                partial(segments.read, run.held, memory[at : at + step], offset + at, direct=direct)
                for at in range(0, len(memory), step)
            ]
        return _Reading(run, lease, self._context.readers.begin(calls))

    def _end(self, reading: _Reading) -> list[bool]:
        """Wait for the reads; which pages are good."""
        run, lease, begun = reading
        try:
            begun.wait()
            good = [True] * run.count
        except OSError:
            good = self._read_singly(run, lease)
        if not self.sums and self._context.store.verify is not Verify.OFF:
            self._verify(run, lease, good)
        return good

    def _read_singly(self, run: Run, lease: Lease) -> list[bool]:
        """Read page by page, after one of them could not be read; which could."""
        self._context.store.counters.add("read_errors")
        good = []
        for i, memory in enumerate(lease.views()):
            try:
                self._context.store.segments.read(run.held, memory, run.offset + i * run.stride)
                good.append(True)
            except OSError:
                good.append(False)
        return good

    def _verify(self, run: Run, lease: Lease, good: list[bool]) -> None:
        leaf_bytes = self._attached.group.leaf_bytes(self._attached.part)
        for i, memory in enumerate(lease.views()):
            if good[i] and root_of(leaf_table(memory, leaf_bytes)) != run.root(i):
                self._context.store.counters.add("pages_corrupt")
                good[i] = False

    def _drain(self, lease: Lease, target: int) -> None:
        """Enqueue the copies out of the slots, ``stride`` apart; the lease is released when they have ended."""
        dma, stride = self._context.loads.dma, self.stride
        lease.move(SlotState.FULL)
        lease.move(SlotState.DRAINING)
        for first, count, at in lease.ranges():
            dma.copy_in(target + first * stride, self._context.ring_address + at, count * stride)
        self._leases.append((dma.record(), lease))

    def send_assembled(self, chunks: Sequence[int], target: int) -> tuple[list[int], list[int]]:
        """Pages that other parts make up or that a codec encodes: the CPU makes and verifies them, ``stride`` apart.

        (chunks dealt with, positions of those that are coming); fewer than asked if slots are short.
        """
        lease = self._lease(len(chunks))
        if lease is None:
            return [], []
        context, gm, group = self._context, self._pages.gm, self._attached.group
        taken = list(chunks[: len(lease)])
        sources, good = gm.sources(), []
        for chunk in taken:
            warm = all(self._in_cache(source) for source in sources.get(chunk, []))
            self._tiers.note(self._attached.number, 1 << chunk, Tier.HOST if warm else Tier.DISK)
        calls = [
            partial(assemble, context.store, sources.get(c, []), gm, group, page, self._feed.held)
            for c, page in zip(taken, lease.views(), strict=True)
        ]
        self._catch_up()
        for i, (chunk, (whole, wrong)) in enumerate(zip(taken, context.readers.run(calls), strict=True)):
            self.faults += [(source.place.segment, source.place.seq) for source in wrong]
            if whole:
                good.append(i)
            else:
                self.refused.append(chunk)
        self._drain(lease, target)
        return taken, good

    def _in_cache(self, source: Source) -> bool:
        place, held = source.place, self._feed.held.get(source.place.segment)
        cached = self._context.store.segments.cached_bytes
        return held is not None and cached(held, place.block * fmt.BLOCK, place.stored_bytes) == place.stored_bytes

    @property
    def stride(self) -> int:
        """Bytes from page to page in the ring, and in scratch where pages are not copied run by run."""
        return fmt.align(self._attached.page_bytes)

    @property
    def has_slots(self) -> bool:
        """Whether slots of the ring are in use, or about to be."""
        return bool(self._leases or self._reads)

    # -- checksums, the end --------------------------------------------------------------------

    def tables(self, run: Run) -> tuple[bytes, bytes]:
        """The sums that the GPU must find, and for each page 1 if they agree with the root in the index, else 0."""
        if not self.sums:
            return b"", b"\1" * run.count
        c, size = self._context.store, self.table_bytes
        try:
            raw = run.tables if run.leaf_bytes == size else b""
            if not raw and run.leaf and run.leaf_bytes == size:
                raw = c.files.read(run.held.fd, size * run.count, run.leaf)
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
        self._tiers.note(self._attached.number, span(run.chunk, run.count), tier)

    def free_slots(self) -> None:
        """Wait for the copies out of slots, and release these."""
        self.end_reads()
        while self._leases:
            wait_until(self._context, self._leases[0][0], self._manner.poll_seconds)
            self._reap()

    def end_reads(self) -> None:
        """Wait for reads whose pages will not be sent."""
        self._prefetch.close()
        while self._reads:
            self._end_read()

    def _end_read(self) -> None:
        reading = self._reads.popitem()[1]
        self._end(reading)
        reading.lease.release()

    def release(self) -> None:
        """Release regions and slots; no copy of this load is under way any more."""
        for _, lease in self._leases:
            lease.release()
        self._leases.clear()
        if self._context.regions is not None:
            self._context.regions.release(self._regions)


def _reads_directly(store: Context, run: Run) -> bool:
    """Whether reads of cold pages bypass the page cache (O_DIRECT): always, or for pages that were never used."""
    mode = store.mode
    return mode.direct or (mode.cold_direct and not store.access_times.was_used(run.held.segment_id, run.seqs[0]))


def streaks(good: Sequence[int], most: int = 1 << 62) -> Iterator[tuple[int, int]]:
    """(first, count) of each run of what is true, cut to at most ``most``."""
    if most >= len(good) and all(good):
        yield 0, len(good)
        return
    first = 0
    for i in range(1, len(good) + 1):
        if i == len(good) or good[i] != good[first] or i - first == most:
            if good[first]:
                yield first, i - first
            first = i
