"""A lane: what one direction of transfers keeps on a GPU - scratch, work lists, streams for DMA and kernels.

    load   DMA of a batch into scratch -> leaves checked -> cells scattered      (meanwhile the next batches are coming)
    save   cells gathered into scratch -> leaves summed  -> DMA to pinned slots

Scratch is used round and round; a batch's piece of it is used again when the streams have got past its last use, and
they wait for that, nobody else. So the host may be slow, or another Python thread busy, without the link running dry.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvfs.gpu.device import Device, Event, Memory, Stream
from kvfs.kernels.work_list import WORD, Work
from kvfs.system.memory_views import address_of
from kvfs.types import BufferLike

ALIGN = 256
SHEET_BYTES = 1 << 20  # at least
BATCHES = 4  # of full size that scratch holds
PENDING = 4  # copies, and ends of bands, ahead of their launches
#: Batches, and calls of the driver, that are enqueued and not over. It takes about a thousand calls ahead, then the
#: host would wait in it, and keep the interpreter.
QUEUED, CALLS = 24, 512
#: Of one ``push``: on an H200 up to 24 KiB of pageable memory go ahead of large copies in other streams, and any number
#: of them; from pinned memory they queue up behind these after the first few.
PUSH_BYTES = 4096


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


class ScratchSlice:
    """A batch's piece of scratch, and events of it: ``arrived`` what it was filled with, and ``done`` with it."""

    def __init__(self, first: int, end: int, address: int, arrived: Event, done: Event) -> None:
        self.first, self.end, self.address, self.arrived, self.done = first, end, address, arrived, done
        self.enqueued = False  # its last use


class CommandBuffer:
    """Small data that a transfer sends along, or gets back: the same offsets on the host and in device memory."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.nbytes = nbytes
        self._host = memoryview(bytearray(nbytes))
        self._device: Memory = device.memory(nbytes)  # which the engine may have all of
        self._back = device.pinned(nbytes)
        self._address = address_of(self._host)
        self._used = 0

    def reset(self) -> None:
        self._used = 0

    def put(self, data: BufferLike) -> int:
        """Append bytes on the host's side; their offset."""
        raw = memoryview(data).cast("B")
        at = self.room(len(raw))
        self._host[at : at + len(raw)] = raw
        return at

    def room(self, nbytes: int) -> int:
        """Append room for bytes that come from the device; its offset."""
        at = self._used
        assert at + nbytes <= self.nbytes, "a sheet is full"
        self._used = at + aligned(nbytes)
        return at

    def address(self, offset: int) -> int:
        """On the device."""
        return self._device.address + offset

    def has(self, *sizes: int) -> bool:
        """Whether there is room for pieces of these sizes."""
        return self._used + sum(map(aligned, sizes)) <= self.nbytes

    def words(self, offset: int, count: int) -> memoryview:
        """Of what was put at ``offset``, as i64."""
        return self._host[offset : offset + count * WORD].cast("q")

    def work(self, offset: int, unit_ids: memoryview) -> Work:
        """The work list that was put last, at ``offset``."""
        return Work(self._device, offset, self._host[offset : self._used].cast("q"), unit_ids)

    def send(self, stream: Stream, first: int) -> int:
        """Copy what was put from ``first`` on, past large copies of other streams; in how many calls."""
        starts = range(first, self._used, PUSH_BYTES)
        for at in starts:
            stream.push(self._device.address + at, self._address + at, min(PUSH_BYTES, self._used - at))
        return len(starts)

    def fetch(self, stream: Stream, offset: int, nbytes: int, into: int) -> None:
        """Copy what lies at ``offset`` on the device back, to ``into``."""
        stream.copy_out(self._back.address + into, self._device.address + offset, nbytes)

    def back(self, offset: int, nbytes: int) -> memoryview:
        """What was fetched into it."""
        return self._back.view[offset : offset + nbytes]

    def close(self) -> None:
        self._back.close()


class DmaLane:
    """Used by one thread at a time."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.device, self.nbytes = device, aligned(nbytes)
        self.dma, self.kernels = device.stream(), device.stream()
        self._scratch: Memory = device.memory(self.nbytes + ALIGN)
        self._base = aligned(self._scratch.address)
        self._slots: deque[ScratchSlice] = deque()  # oldest first, round the scratch
        self._events: list[tuple[Event, Event]] = []  # to be used again
        self._sheets: list[CommandBuffer] = []
        self._free: list[CommandBuffer] = []  # of these
        self._ends = [self.dma.event() for _ in range(QUEUED)]  # of the last batches, round and round
        self._calls: deque[int] = deque(maxlen=QUEUED)  # that each of them took, the last one first
        self._finished = 0

    def due(self) -> Event | None:
        """What has to be over before another batch is enqueued; None while there are few."""
        calls = 0
        for back, more in enumerate(self._calls):
            calls += more
            if calls > CALLS or back + 1 == QUEUED:
                return self._ends[(self._finished - 1 - back) % QUEUED]
        return None

    def slot(self, nbytes: int, stream: Stream) -> ScratchSlice | None:
        """Scratch for a batch, which ``stream`` is to fill: it waits for the last uses of it.

        None if the last use of one of those is not ``finished`` yet: the caller does that first.
        """
        while self._slots and self._slots[0].enqueued and self._slots[0].done.query():
            self._retire()
        first = self._slots[-1].end if self._slots else 0
        if first + nbytes > self.nbytes:
            first = 0
        end = first + aligned(nbytes)
        assert end <= self.nbytes, f"a batch of {nbytes} bytes is larger than the scratch"
        over = [i for i, slot in enumerate(self._slots) if slot.first < end and first < slot.end]
        if over:  # those that are older are over by then, too
            last = self._slots[over[-1]]
            if not last.enqueued:
                return None
            stream.after(last.done)
            for _ in range(over[-1] + 1):
                self._retire()
        events = self._events.pop() if self._events else (self.dma.event(), self.dma.event())
        self._slots.append(ScratchSlice(first, end, self._base + first, *events))
        return self._slots[-1]

    def _retire(self) -> None:
        slot = self._slots.popleft()
        self._events.append((slot.arrived, slot.done))

    def finished(self, slot: ScratchSlice, stream: Stream, calls: int = 0) -> None:
        """Behind what ``stream`` has been given so far, in ``calls`` of the driver, the slot may be used again."""
        stream.record(slot.done)
        stream.record(self._ends[self._finished % QUEUED])
        self._calls.appendleft(calls)
        self._finished += 1
        slot.enqueued = True

    def sheet(self, nbytes: int) -> CommandBuffer:
        """An empty sheet, until it is given back: the smallest that will do, or a new one in place of the largest."""
        free = sorted(self._free, key=lambda sheet: sheet.nbytes)
        sheet = next((one for one in free if one.nbytes >= nbytes), None)
        if sheet is not None:
            self._free.remove(sheet)
        else:
            if free:
                self._free.remove(free[-1])
                self._sheets.remove(free[-1])
                free[-1].close()
            sheet = CommandBuffer(self.device, max(SHEET_BYTES, 1 << (nbytes - 1).bit_length()))
            self._sheets.append(sheet)
        sheet.reset()
        return sheet

    def give_back(self, sheet: CommandBuffer) -> None:
        """Nothing uses it any more. Any thread may do that."""
        self._free.append(sheet)

    def wait(self) -> None:
        """Wait for what this lane has been given so far. Any thread may do that."""
        for stream in (self.dma, self.kernels):
            stream.record().synchronize()

    def quiet(self) -> None:
        """Wait until nothing of this lane is under way; whatever was not finished is given up."""
        self.wait()
        while self._slots:
            self._retire()

    def close(self) -> None:
        self._free.clear()
        while self._sheets:
            self._sheets.pop().close()


class LaunchQueue:
    """What is to be enqueued behind copies, in order, for all groups of a load: their kernels, and ends of bands."""

    def __init__(self, lane: DmaLane, sheet_bytes: Callable[[], int]) -> None:
        self._lane, self._sheet_bytes = lane, sheet_bytes
        self._calls: deque[Callable[[], None]] = deque()
        self._sheets: list[CommandBuffer] = []

    def sheet(self, *sizes: int) -> CommandBuffer:
        """One with room for pieces of these sizes. The first one is taken when the first copies are under way."""
        last = self._sheets[-1] if self._sheets else None
        if last is None or not last.has(*sizes):
            least = self._sheet_bytes() if last is None else last.nbytes
            self._sheets.append(self._lane.sheet(max(least, sum(map(aligned, sizes)))))
        return self._sheets[-1]

    def give_back(self) -> None:
        """Nothing of the load is under way any more."""
        while self._sheets:
            self._lane.give_back(self._sheets.pop())

    def add(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        while len(self._calls) > PENDING:
            self.oldest()

    def oldest(self) -> None:
        self._calls.popleft()()

    def all(self) -> None:
        while self._calls:
            self.oldest()
