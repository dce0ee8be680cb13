"""A save from a GPU: gathered into scratch, summed there, by DMA to the ring; appended on write threads.

The pages of a batch and their leaf tables arrive together, while the next batches are gathered, of whatever group: the
link does not run dry between two groups. Without slots for a page within the deadline it is declined before it is
gathered.
"""

from __future__ import annotations

import contextlib
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kvfs.format.checksums import LEAF_BYTES
from kvfs.gpu.device import Event
from kvfs.gpu.lane import ALIGN, BATCHES, CommandBuffer
from kvfs.gpu.resources import YIELD_SECONDS, GpuTransportContext, wait_for_event, wait_until
from kvfs.kernels.work_list import GRANULE_WORDS, HEAD_WORDS, WORD, granule_words, pack
from kvfs.pages.layout import Group
from kvfs.transfer.save import Batch, Save
from kvfs.transfer.staging import Lease, SlotState
from kvfs.transfer.workers import Attached, fail
from kvfs.types import TransferState
from kvfs.write.appender import AppendJob

BATCH_BYTES = 32 << 20
AHEAD = 8  # batches that are gathered while the oldest is on its way: what a cancellation waits for


class _Flight(NamedTuple):
    """A batch on its way to its slots."""

    batch: Batch
    arrived: Event
    sheet: CommandBuffer
    tables: int  # where in it the leaf tables arrive; negative: they are made by the CPU
    step: contextlib.ExitStack  # bytes move until it is closed


@dataclass
class GpuSave(Save):
    """A save in progress."""

    _tables: dict[int, dict[int, bytes]] = field(default_factory=dict)  # by group number and chunk
    _flights: deque[_Flight] = field(default_factory=deque)
    _sheet: CommandBuffer | None = None
    _landed: list[Batch] = field(default_factory=list)  # not handed over yet

    @property
    def gpu(self) -> GpuTransportContext:
        assert isinstance(self.desk, GpuTransportContext)
        return self.desk

    def run(self) -> None:
        """On the save thread: everything up to ``source_free``."""
        lane = self.gpu.saves
        try:
            self.gpu.device.enter()
            if wait_for_event(self.gpu, self.transfer, self.after):
                self.transfer.enter(TransferState.COPYING)
                with lane.kernels.use():
                    self._gather_all()
        except Exception as exc:
            fail(self.transfer, exc)
        finally:
            try:
                if self._flights:  # left by an error
                    lane.quiet()
                if self._sheet is not None:
                    lane.give_back(self._sheet)
            finally:
                for flight in self._flights:
                    flight.step.close()
                self.transfer.enter(TransferState.WRITING)
                self.transfer.free_source()
                if self._landed:
                    self.gpu.context.files.sleep(YIELD_SECONDS)  # the engine gets the interpreter before the writers
                self._hand_over_landed()
                self._finish(gathered=True)

    def _gather_all(self) -> None:
        """Enqueue the batches of all groups; then wait for those that are still on their way."""
        need = sum(self._sheet_bytes(a, len(chunks)) for a, chunks in self.pages if chunks)
        sheet = self._sheet = self.gpu.saves.sheet(need)
        try:
            for attached, chunks in self.pages:
                if chunks and not self._gather_group(attached, chunks, sheet):
                    break
        finally:
            while self._flights:
                self._land()

    def _gather_group(self, attached: Attached, chunks: list[int], sheet: CommandBuffer) -> bool:
        """Enqueue the batches of a group; False ends the save."""
        desk, transfer, done = self.gpu, self.transfer, 0
        units = self._send_ids(attached, sheet)
        most = max(1, min(BATCH_BYTES, desk.saves.nbytes // BATCHES) // desk.ring.stride(attached.page_bytes))
        pages = most if self._flights else max(1, most // 4)  # the link waits for the first batch
        while done < len(chunks) and chunks[done] < self.limit:
            if transfer.stopped or desk.late(transfer):
                return False
            lease = self._lease(min(pages, len(chunks) - done), attached.page_bytes)
            if lease is None:
                return False
            pages = min(most, 2 * pages)
            batch = Batch(attached, chunks[done : done + len(lease)], lease)
            step = contextlib.ExitStack()
            if not step.enter_context(transfer.step(tell=False)):
                step.close()
                return False
            try:
                self._flights.append(self._send(batch, sheet, units, step))
            except BaseException:
                with step:
                    desk.saves.quiet()
                raise
            done += len(batch.chunks)
            if len(self._flights) > AHEAD:
                self._land()
        return True

    def _lease(self, pages: int, page_bytes: int) -> Lease | None:
        """Slots for a batch; batches on their way are landed, and handed over, before it waits."""
        desk, ring = self.gpu, self.gpu.ring
        while True:
            clock = desk.context.files.monotonic
            lease = ring.acquire(
                pages,
                clock() if self._flights or self._landed else self.transfer.deadline,
                page_bytes=page_bytes,
                least=1,
                keep=desk.save_keep,
                give_up_at=desk.writes.stalled_at,
            )
            if lease is not None:
                return lease if self.transfer.own(lease) else None
            if not self._flights and not self._landed:
                self.transfer.note("ring")
                return None
            if self._flights:
                self._land()
            self._hand_over_landed()

    def _sheet_bytes(self, attached: Attached, pages: int) -> int:
        """What a group puts on the sheet, at most: if each page is a batch of its own."""
        shape, granules = self.gpu.shapes[attached.number], attached.group.granules
        words = (granules * (GRANULE_WORDS + shape.layers) + HEAD_WORDS) * WORD + 3 * ALIGN
        return len(self.units[attached.number]) * WORD + pages * words + ALIGN

    def _send_ids(self, attached: Attached, sheet: CommandBuffer) -> tuple[int, int]:
        """Unit ids of a group: where on the sheet, and how many. Not behind pages that are on their way to slots."""
        ids = array("q", self.units[attached.number])
        at = sheet.put(ids)
        sheet.send(self.gpu.saves.kernels, at)
        return at, len(ids)

    def _send(self, batch: Batch, sheet: CommandBuffer, units: tuple[int, int], step: contextlib.ExitStack) -> _Flight:
        """Enqueue: work list, gather, sums, copies to the slots."""
        desk, lane, (attached, chunks, lease) = self.gpu, self.gpu.saves, batch
        shape, group, stride = desk.shapes[attached.number], attached.group, lease.stride
        slot = lane.slot(len(chunks) * stride, lane.kernels)
        assert slot is not None, "a batch of a save was not finished"
        words = _words(chunks, group, stride, shape.layers * shape.leaf_bytes)
        nbytes = len(chunks) * group.granules * shape.layers * LEAF_BYTES
        tables = sheet.room(nbytes)
        work = sheet.put(pack(
            shape, words, scratch=slot.address, unit_ids=sheet.address(units[0]), units=units[1], flags=0,
            leaves=sheet.address(tables), buffers=desk.tables[attached.number].address,
        ))  # fmt: skip
        sheet.send(lane.kernels, work)
        launch = sheet.work(work, sheet.words(*units))
        lane.kernels.gather(launch, shape)
        lane.dma.after(lane.kernels.record(slot.arrived))
        for first, count, at in lease.stretches():
            lane.dma.copy_out(desk.ring_address + at, slot.address + first * stride, count * stride)
        if shape.sums:
            sheet.fetch(lane.dma, tables, nbytes, into=tables)
        lane.finished(slot, lane.dma)
        return _Flight(batch, lane.dma.record(), sheet, tables if shape.sums else -1, step)

    def _land(self) -> None:
        """Wait until the oldest batch has arrived."""
        batch, arrived, sheet, tables, step = self._flights.popleft()
        with step:
            wait_until(self.gpu, arrived)
            if tables >= 0:
                self._keep_tables(batch, sheet, tables)
            batch.lease.move(SlotState.FULL)
        self._landed.append(batch)

    def _hand_over_landed(self) -> None:
        """What has arrived goes to the write threads: when slots are short, or when all is gathered.

        Not at once, since they take the interpreter from this one, and the engine waits for this one.
        """
        self._hand_over(self._landed)
        self._landed.clear()

    def _keep_tables(self, batch: Batch, sheet: CommandBuffer, at: int) -> None:
        attached = batch.attached
        size = attached.group.leaves(attached.part) * LEAF_BYTES
        raw = bytes(sheet.back(at, size * len(batch.chunks)))
        mine = self._tables.setdefault(attached.number, {})
        for i, chunk in enumerate(batch.chunks):
            mine[chunk] = raw[i * size : (i + 1) * size]

    def _job(self, attached: Attached, payload: Callable[[int], memoryview], lane: int) -> AppendJob:
        job = super()._job(attached, payload, lane)
        tables = self._tables.get(attached.number)
        return replace(job, table=tables.__getitem__) if tables else job  # kept: a full disk makes a batch come twice


def _words(chunks: Sequence[int], group: Group, size: int, step: int) -> array[int]:
    """The granules of pages that lie ``size`` bytes apart, granules of a page ``step`` apart."""
    states, granules = group.states, group.granules
    jump = states // granules
    if granules == 1 or size == granules * step:
        tokens = [first for chunk in chunks for first in range(chunk * states, (chunk + 1) * states, jump)]
        return granule_words(0, size if granules == 1 else step, tokens, [0] * len(tokens))
    words = array("q")
    for i, chunk in enumerate(chunks):
        words += granule_words(i * size, step, range(chunk * states, (chunk + 1) * states, jump), [0] * granules)
    return words
