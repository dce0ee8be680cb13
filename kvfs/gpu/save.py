"""A save from a GPU: gathered into scratch, summed there, by DMA to the ring; appended on write threads.

The pages of a batch and their leaf tables arrive together, while the next batches, of any group, are gathered: the link
does not run dry between two groups. A page for which no slots come within the deadline is declined before it is
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
from kvfs.gpu.device import OUT_PROGRAMS, Event
from kvfs.gpu.lane import ALIGN, BATCHES, CommandBuffer
from kvfs.gpu.resources import SAVE_POLL_SECONDS, YIELD_SECONDS, GpuTransportContext, wait_for_event, wait_until
from kvfs.kernels.work_list import GRANULE_WORDS, HEAD_WORDS, WORD, granule_words, pack, pack_pieces
from kvfs.pages.layout import Group
from kvfs.transfer.save import Batch, Save
from kvfs.transfer.staging import Lease, SlotState
from kvfs.transfer.workers import Attached, fail
from kvfs.types import TransferState
from kvfs.write.appender import AppendJob

BATCH_BYTES = 32 << 20
#: Batches that are gathered while the oldest is on its way: 1 GiB needs no turn of this thread in between. Each takes
#: some 6 calls of the driver on each stream, which takes 1,021 ahead. A cancellation waits for all of them, some 25 ms.
AHEAD = 36


class _Flight(NamedTuple):
    """A batch on its way to its slots."""

    batch: Batch
    arrived: Event
    commands: CommandBuffer
    tables: int  # offset in it where the leaf tables arrive; negative: the CPU makes them
    step: contextlib.ExitStack  # bytes move until it is closed


@dataclass
class GpuSave(Save):
    """A save in progress."""

    _tables: dict[int, dict[int, bytes]] = field(default_factory=dict)  # by group number and chunk
    _flights: deque[_Flight] = field(default_factory=deque)
    _commands: CommandBuffer | None = None
    _landed: list[Batch] = field(default_factory=list)  # not handed over yet

    @property
    def gpu(self) -> GpuTransportContext:
        assert isinstance(self.context, GpuTransportContext)
        return self.context

    def run(self) -> None:
        """On the save thread: everything up to ``source_free``."""
        lane = self.gpu.saves
        try:
            self.gpu.device.enter()
            if self._is_behind_the_engine():
                self.transfer.enter(TransferState.COPYING)
                with lane.kernels.use():
                    self._gather_all()
        except Exception as exc:
            fail(self.transfer, exc)
        finally:
            try:
                if self._flights:  # left by an error
                    lane.quiet()
                if self._commands is not None:
                    lane.give_back(self._commands)
            finally:
                for flight in self._flights:
                    flight.step.close()
                self.transfer.enter(TransferState.WRITING)
                self.transfer.free_source()
                if self._landed:
                    self.gpu.store.files.sleep(YIELD_SECONDS)  # the engine gets the GIL before the writers
                self._hand_over_landed()
                self._finish(gathered=True)

    def _is_behind_the_engine(self) -> bool:
        """Have what follows wait for the engine's event: on the GPU where it can, else here; False: it has not come.

        Enqueued ahead, batches cost the engine nothing: its thread waits for the GPU. Enqueued once the event has come,
        they take the interpreter when the engine needs it to launch its next step.
        """
        if self.gpu.device.orders(self.after):
            self.gpu.saves.kernels.after(self.after)
            return not self.transfer.stopped
        return wait_for_event(self.gpu, self.transfer, self.after, SAVE_POLL_SECONDS)

    def _gather_all(self) -> None:
        """Enqueue the batches of all groups; then wait for those that are still on their way."""
        need = sum(self._commands_bytes(a, len(chunks)) for a, chunks in self.pages if chunks)
        commands = self._commands = self.gpu.saves.commands(need)
        try:
            for attached, chunks in self.pages:
                if chunks and not self._gather_group(attached, chunks, commands):
                    break
            self.transfer.free_source_when(self.gpu.saves.kernels.record().query)
        finally:
            while self._flights:
                self._land()

    def _gather_group(self, attached: Attached, chunks: list[int], commands: CommandBuffer) -> bool:
        """Enqueue the batches of a group; False ends the save."""
        gpu, transfer, done = self.gpu, self.transfer, 0
        units = self._send_ids(attached, commands)
        most = max(1, min(BATCH_BYTES, gpu.saves.nbytes // BATCHES) // gpu.ring.stride(attached.page_bytes))
        pages = most if self._flights else max(1, most // 4)  # the link waits for the first batch
        while done < len(chunks) and chunks[done] < self.limit:
            if transfer.stopped or gpu.late(transfer):
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
                self._flights.append(self._send(batch, commands, units, step))
            except BaseException:
                with step:
                    gpu.saves.quiet()
                raise
            done += len(batch.chunks)
            if len(self._flights) > AHEAD:
                self._land()
        return True

    def _lease(self, pages: int, page_bytes: int) -> Lease | None:
        """Slots for a batch; batches on their way are landed, and handed over, before it waits."""
        gpu, ring = self.gpu, self.gpu.ring
        while True:
            clock = gpu.store.files.monotonic
            lease = ring.acquire(
                pages,
                clock() if self._flights or self._landed else self.transfer.deadline,
                page_bytes=page_bytes,
                least=1,
                keep=gpu.save_keep,
                give_up_at=gpu.writes.stalled_at,
            )
            if lease is not None:
                return lease if self.transfer.own(lease) else None
            if not self._flights and not self._landed:
                self.transfer.note("ring")
                return None
            if self._flights:
                self._land()
            self._hand_over_landed()

    def _commands_bytes(self, attached: Attached, pages: int) -> int:
        """Room that a group needs in the command buffer, at most: if each page is a batch of its own."""
        shape, granules = self.gpu.shapes[attached.number], attached.group.granules
        words = (granules * (GRANULE_WORDS + shape.layers) + HEAD_WORDS) * WORD + 4 * ALIGN
        return len(self.units[attached.number]) * WORD + pages * words + ALIGN

    def _send_ids(self, attached: Attached, commands: CommandBuffer) -> tuple[int, int]:
        """Unit ids of a group: offset in the command buffer, and how many. Ahead of pages on their way to slots."""
        ids = array("q", self.units[attached.number])
        at = commands.put(ids)
        commands.send(self.gpu.saves.kernels, at)
        return at, len(ids)

    def _send(
        self, batch: Batch, commands: CommandBuffer, units: tuple[int, int], step: contextlib.ExitStack
    ) -> _Flight:
        """Enqueue: work list, gather, sums, copies to the slots."""
        gpu, lane, (attached, chunks, lease) = self.gpu, self.gpu.saves, batch
        shape, group, stride = gpu.shapes[attached.number], attached.group, lease.stride
        scratch = lane.slice(len(chunks) * stride, lane.kernels)
        assert scratch is not None, "a batch of a save was not finished"
        words = _words(chunks, group, stride, shape.layers * shape.leaf_bytes)
        nbytes = len(chunks) * group.granules * shape.layers * LEAF_BYTES
        tables = commands.room(nbytes)
        pieces = [
            (scratch.address + first * stride, gpu.ring_address + at, count * stride)
            for first, count, at in lease.ranges()
        ]
        if shape.sums:
            pieces.append((commands.address(tables), commands.back_address(tables), nbytes))
        gentle = self.gentle and shape.kernels and gpu.device.reaches_host
        out = commands.put(pack_pieces(pieces)) if gentle else -1
        work = commands.put(pack(
            shape, words, scratch=scratch.address, unit_ids=commands.address(units[0]), units=units[1], flags=0,
            leaves=commands.address(tables), buffers=gpu.tables[attached.number].address,
        ))  # fmt: skip
        commands.send(lane.kernels, out if gentle else work)
        launch = commands.work(work, commands.words(*units))
        lane.kernels.gather(launch, shape)
        lane.dma.after(lane.kernels.record(scratch.arrived))
        if gentle:
            lane.dma.copy_pieces(commands.work(out, commands.words(out, 0)), programs=OUT_PROGRAMS)
        else:
            for source, target, size in pieces:
                lane.dma.copy_out(target, source, size)
        lane.finished(scratch, lane.dma)
        return _Flight(batch, lane.dma.record(), commands, tables if shape.sums else -1, step)

    def _land(self) -> None:
        """Wait until the oldest batch has arrived."""
        batch, arrived, commands, tables, step = self._flights.popleft()
        with step:
            wait_until(self.gpu, arrived, SAVE_POLL_SECONDS)
            if tables >= 0:
                self._keep_tables(batch, commands, tables)
            batch.lease.move(SlotState.FULL)
        self._landed.append(batch)

    def _hand_over_landed(self) -> None:
        """Hand landed batches to the write threads: when slots are short, or when all pages are gathered.

        Not before: the writers would take the GIL from this thread, which the engine waits for.
        """
        self._hand_over(self._landed)
        self._landed.clear()

    def _keep_tables(self, batch: Batch, commands: CommandBuffer, at: int) -> None:
        attached = batch.attached
        size = attached.group.leaves(attached.part) * LEAF_BYTES
        raw = bytes(commands.back(at, size * len(batch.chunks)))
        mine = self._tables.setdefault(attached.number, {})
        for i, chunk in enumerate(batch.chunks):
            mine[chunk] = raw[i * size : (i + 1) * size]

    def _job(self, attached: Attached, payload: Callable[[int], memoryview], lane: int) -> AppendJob:
        job = super()._job(attached, payload, lane)
        tables = self._tables.get(attached.number)
        return replace(job, table=tables.__getitem__) if tables else job  # kept: a full disk makes a batch come twice


def _words(chunks: Sequence[int], group: Group, size: int, step: int) -> array[int]:
    """The granules of pages that are ``size`` bytes apart, granules of a page ``step`` apart."""
    states, granules = group.states, group.granules
    jump = states // granules
    if granules == 1 or size == granules * step:
        tokens = [first for chunk in chunks for first in range(chunk * states, (chunk + 1) * states, jump)]
        return granule_words(0, size if granules == 1 else step, tokens, [0] * len(tokens))
    words = array("q")
    for i, chunk in enumerate(chunks):
        words += granule_words(i * size, step, range(chunk * states, (chunk + 1) * states, jump), [0] * granules)
    return words
