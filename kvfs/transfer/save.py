"""A save from host memory: gathered on a copy thread, appended and published on write threads."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from kvfs.lookup.search import Prompt
from kvfs.pages.chunk_set import bits_of
from kvfs.pages.host_copy import gather_pages
from kvfs.transfer.control import Outcomes, TransferControl
from kvfs.transfer.staging import Lease, SlotState
from kvfs.transfer.units import UnitIds
from kvfs.transfer.workers import Attached, TransportContext, fail, wait_for
from kvfs.types import PageOutcome, TransferState
from kvfs.write.active_segments import RoomWait, SegmentClass
from kvfs.write.appender import BATCH_BYTES, AppendJob

LANE_BYTES = 128 << 20  # of a save for each write lane: a thread and an active segment
REQUEST_BYTES = 256 << 20  # that the append process is asked for at once: each request takes turns of this interpreter


class Batch(NamedTuple):
    """Pages of one group in slots, on their way to the store."""

    attached: Attached
    chunks: list[int]
    lease: Lease

    @property
    def nbytes(self) -> int:
        return len(self.chunks) * self.attached.page_bytes


@dataclass
class Save:
    """A save in progress."""

    context: TransportContext
    transfer: TransferControl
    prompt: Prompt
    pages: list[tuple[Attached, list[int]]]
    units: Mapping[int, UnitIds]  # by group number
    after: Any
    expires: int
    segment_class: SegmentClass
    attempt: bytes
    writers: Sequence[Callable[[Callable[[], None]], None]]  # of the write lanes: each runs its calls in order
    gentle: bool = False  # ignored by the host transport
    limit: int = 1 << 62  # pages from this chunk on are useless: a group of full attention has declined one
    _unwritten: int = 0
    _handed: int = 0  # batches
    _gathering: bool = True
    _wait: RoomWait | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        nbytes = sum(a.page_bytes * len(chunks) for a, chunks in self.pages)
        self._lanes = max(1, min(len(self.writers), nbytes // LANE_BYTES))
        slots, most = self.context.ring.slots - self.context.save_keep, BATCH_BYTES
        if self.context.append_process is not None:
            most = REQUEST_BYTES
        self._append_bytes = min(most, slots * self.context.ring.slot_bytes // (2 * self._lanes))
        first = min((chunks[0] for _, chunks in self.pages if chunks), default=0)
        times = self.context.store.access_times
        #: one access time for all pages of the request, with those that its lookup found
        self.at_us = (first and times.request_of(self.prompt.hashes[first - 1])) or self.context.store.files.now_us()

    def cut_to_source(self) -> None:
        """Leave out pages without units to come from, and in groups of full attention all pages behind them."""
        for i, (a, chunks) in enumerate(self.pages):
            ids = self.units.get(a.number, UnitIds("q"))
            if ids.complete and (not chunks or a.device.unit_range(a.group, chunks[-1])[-1] < len(ids)):
                self.pages[i] = (a, self._useful(chunks))
                continue
            needed = {c: a.device.unit_range(a.group, c) for c in chunks}
            there = [c for c in chunks if needed[c][-1] < len(ids) and all(ids[u] >= 0 for u in needed[c])]
            if len(there) < len(chunks):
                self.transfer.note("source")
                if self._ends_with(a):
                    self.limit = min(self.limit, min(set(chunks) - set(there)))
            self.pages[i] = (a, self._useful(there))

    def _ends_with(self, attached: Attached) -> bool:
        """Whether no page behind one of this group that is declined is of use."""
        return attached.group.need.kind == "all" and not self.prompt.keyed

    def _useful(self, chunks: list[int]) -> list[int]:
        """Those before the limit; ``chunks`` ascend."""
        return chunks[: bisect.bisect_left(chunks, self.limit)]

    def run(self) -> None:
        """On a copy thread: everything up to ``source_free``."""
        try:
            wait_for(self.transfer, self.after)
            self.transfer.enter(TransferState.COPYING)
            for attached, chunks in self.pages:
                if not self._gather(attached, chunks):
                    break
        except Exception as exc:
            fail(self.transfer, exc)
        finally:
            self.transfer.enter(TransferState.WRITING)
            self.transfer.free_source()
            self._finish(gathered=True)

    def _gather(self, attached: Attached, chunks: list[int]) -> bool:
        """Copy pages to slots, as far as slots come until the deadline; False ends the save."""
        context, transfer, done = self.context, self.transfer, 0
        while done < len(chunks) and chunks[done] < self.limit:
            if transfer.stopped or context.late(transfer):
                return False
            size = attached.page_bytes
            lease = context.ring.acquire(
                min(context.batch(size), len(chunks) - done), transfer.deadline, page_bytes=size, least=1,
                keep=context.save_keep, give_up_at=context.writes.stalled_at,
            )  # fmt: skip
            if lease is None:
                transfer.note("ring")
                return False
            if not transfer.own(lease):
                return False
            batch = Batch(attached, chunks[done : done + len(lease)], lease)
            with transfer.step() as allowed:
                if not allowed:
                    return False
                self._fill(batch)
                lease.move(SlotState.FULL)
            done += len(batch.chunks)
            self._hand_over([batch])
        return True

    def _hand_over(self, batches: Sequence[Batch]) -> None:
        """Batches go to the write lanes in turn, several together if the ring is large; a small save uses one lane.

        An append of several batches is one commit, and lookups read fewer entries of the index.
        """
        appends = list(_together(batches, self._append_bytes))
        with self._lock:
            self._unwritten += len(appends)
        for append in appends:
            lane = self._handed % self._lanes
            self._handed += 1
            self.writers[lane](partial(self._write, append, lane))

    def _fill(self, batch: Batch) -> None:
        a, chunks = batch.attached, batch.chunks
        copied = gather_pages(batch.lease.views(), a.group, a.part, a.device, self.units[a.number], chunks)
        assert copied == batch.nbytes, f"pages {chunks} have {copied} of {batch.nbytes} bytes"

    def _write(self, batches: Sequence[Batch], lane: int) -> None:
        """On a write thread."""
        nbytes = sum(batch.nbytes for batch in batches)
        try:
            with self.transfer.step(engine=False) as allowed, self.context.writes.one(nbytes):
                if allowed:
                    for batch in batches:
                        batch.lease.move(SlotState.DRAINING)
                    self._append(batches, lane)
        except Exception as exc:
            fail(self.transfer, exc)
        finally:
            for batch in batches:
                batch.lease.release()
            self._finish(gathered=False)

    def _append(self, batches: Sequence[Batch], lane: int) -> None:
        """Batches of one group."""
        attached, chunks = batches[0].attached, [chunk for batch in batches for chunk in batch.chunks]
        places = dict(zip(chunks, (at for batch in batches for at in batch.lease.offsets()), strict=True))
        memory, size = self.context.ring.memory, attached.page_bytes
        written: set[int] = set()

        def payload(chunk: int) -> memoryview:
            written.add(chunk)
            return memory[places[chunk] : places[chunk] + size]

        useful = self._useful(chunks)
        job, wait = self._job(attached, payload, lane), self._room_wait()
        process = self.context.append_process
        outcome = process.store(job, useful, places, wait) if process is not None else None
        if outcome is None:  # there is no such process, or it has died
            outcome = self.context.appender.store(job, useful, wait)
        taken = useful[: len(useful) - outcome.declined]
        if taken:
            self.context.store.access_times.note_request(self.prompt.hashes[taken[-1]], self.at_us)
        if len(taken) < len(useful):
            self.transfer.note(outcome.reason)
            if self._ends_with(attached):
                with self._lock:
                    self.limit = min(self.limit, useful[len(taken)])
        settle = partial(self._settle, attached.number)
        settle([c for c in taken if c in written], PageOutcome.STORED)
        settle([c for c in taken if c not in written], PageOutcome.SKIPPED)
        settle(chunks[len(taken) :], PageOutcome.DECLINED)

    def _room_wait(self) -> RoomWait:
        """Of the whole save, in all lanes."""
        with self._lock:
            if self._wait is None:
                self._wait = self.context.appender.room_wait(self.segment_class)
            return self._wait

    def _job(self, attached: Attached, payload: Callable[[int], memoryview], lane: int) -> AppendJob:
        return AppendJob(
            self.context.identity.digest, self.context.descriptor, attached.number, attached.group, attached.part,
            self.prompt, payload, self.expires, self.at_us, self.attempt, self.segment_class._replace(lane=lane),
            codec=self.context.codec,
        )  # fmt: skip

    def _settle(self, number: int, chunks: Sequence[int], outcome: PageOutcome) -> None:
        self.transfer.settle(number, bits_of(chunks), outcome)

    def _finish(self, *, gathered: bool) -> None:
        """End the transfer when nothing is left to gather or to write, or when it was stopped.

        After a close no write thread takes what was gathered last.
        """
        with self._lock:
            if gathered:
                self._gathering = False
            else:
                self._unwritten -= 1
            over = not self._gathering and not self._unwritten
        if over or self.transfer.stopped:
            self.transfer.try_end()


def _together(batches: Sequence[Batch], nbytes_max: int) -> Iterator[list[Batch]]:
    """Neighbouring batches of one group, of at most so many bytes unless a single one has more."""
    together, nbytes = list[Batch](), 0
    for batch in batches:
        if together and (batch.attached is not together[0].attached or nbytes + batch.nbytes > nbytes_max):
            yield together
            together, nbytes = [], 0
        together.append(batch)
        nbytes += batch.nbytes
    if together:
        yield together


def stored(done: Outcomes) -> int:
    """Chunks of which at least one page was stored."""
    chunks = 0
    for bits in done.get(PageOutcome.STORED, {}).values():
        chunks |= bits
    return chunks.bit_count()
