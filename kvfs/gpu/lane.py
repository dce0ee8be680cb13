"""A lane: what one direction of transfers keeps on a GPU - streams for copies and kernels, command buffers, scratch.

    load   DMA of a batch into scratch -> leaves checked -> cells scattered      (meanwhile the next batches are coming)
    save   cells gathered into scratch -> leaves summed  -> DMA to pinned slots

Scratch is a ring of slices, one for each batch. A slice is reused when the streams have passed its last use; only the
streams wait for that. So the host may be slow, or another Python thread busy, without the link running dry.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvfs.gpu.device import Device, Event, Memory, Stream
from kvfs.kernels.work_list import WORD, Work
from kvfs.system.memory_views import address_of
from kvfs.types import BufferLike

ALIGN = 256
COMMANDS_BYTES_MIN = 1 << 20  # of a command buffer
BATCHES = 4  # of full size that scratch holds
PENDING = 4  # launches, and ends of bands, that copies may be ahead of
#: Batches, and calls of the driver, that are enqueued and have not ended. The driver takes 1,021 launches and copies
#: of a stream ahead (H100, driver 580); then a call blocks in it and holds the GIL.
QUEUED, CALLS = 24, 512
#: Of one ``push``: on an H200 up to 24 KiB of pageable memory pass large copies of other streams, in any number of
#: calls; copies from pinned memory queue up behind these after the first few.
PUSH_BYTES = 4096


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


class ScratchSlice:
    """The scratch of one batch. Events: ``arrived`` when it is filled, ``done`` behind its last use."""

    def __init__(self, first: int, end: int, address: int, arrived: Event, done: Event) -> None:
        self.first, self.end, self.address, self.arrived, self.done = first, end, address, arrived, done
        self.enqueued = False  # its last use


class CommandBuffer:
    """Small data that a transfer sends along, or gets back: the same offsets on the host and in device memory.

    ``pinned``: what is sent is pinned too. Then one call sends any amount and the host does not wait for what the
    stream does before; but it queues up behind large copies from the host.
    """

    def __init__(self, device: Device, nbytes: int, *, pinned: bool = False) -> None:
        self.nbytes = nbytes
        self._device: Memory = device.memory(nbytes)  # may fail: the engine may have taken all of it
        self._back = device.pinned(nbytes)
        self._pinned = pinned
        self._host = self._back.view[:nbytes] if pinned else memoryview(bytearray(nbytes))
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

    def write(self, offset: int, data: bytes) -> None:
        """Into room that was appended, on the host's side."""
        self._host[offset : offset + len(data)] = data

    def room(self, nbytes: int) -> int:
        """Append room for bytes that come from the device, or are written in place; its offset."""
        at = self._used
        assert at + nbytes <= self.nbytes, "a command buffer is full"
        self._used = at + aligned(nbytes)
        return at

    def host(self, offset: int) -> int:
        """Address on the host's side."""
        return self._address + offset

    def address(self, offset: int) -> int:
        """On the device."""
        return self._device.address + offset

    def has(self, *sizes: int) -> bool:
        """Whether there is room for appends of these sizes."""
        return self._used + sum(map(aligned, sizes)) <= self.nbytes

    def words(self, offset: int, count: int) -> memoryview:
        """Of what was put at ``offset``, as i64."""
        return self._host[offset : offset + count * WORD].cast("q")

    @property
    def used(self) -> int:
        """Offset of what is appended next."""
        return self._used

    def work(self, offset: int, unit_ids: memoryview, end: int | None = None) -> Work:
        """The work list at ``offset``; ``end``: where it ends, unless it was put last."""
        return Work(self._device, offset, self._host[offset : end or self._used].cast("q"), unit_ids)

    def send(self, stream: Stream, first: int) -> int:
        """Copy what was put from ``first`` on, past large copies of other streams unless pinned; in how many calls."""
        if self._pinned:
            stream.copy_in(self._device.address + first, self._back.address + first, self._used - first)
            return 1
        starts = range(first, self._used, PUSH_BYTES)
        for at in starts:
            stream.push(self._device.address + at, self._address + at, min(PUSH_BYTES, self._used - at))
        return len(starts)

    def fetch(self, stream: Stream, offset: int, nbytes: int, into: int) -> None:
        """Copy bytes at ``offset`` on the device back, to ``into``."""
        stream.copy_out(self._back.address + into, self._device.address + offset, nbytes)

    def back_address(self, offset: int) -> int:
        """Where the host finds what is fetched into ``offset``."""
        return self._back.address + offset

    def back(self, offset: int, nbytes: int) -> memoryview:
        """What was fetched into ``offset``."""
        return self._back.view[offset : offset + nbytes]

    def close(self) -> None:
        self._back.close()


class Lane:
    """The streams and command buffers of one direction, and how many batches are under way. One thread at a time."""

    def __init__(self, device: Device, *, pinned_commands: bool = False, urgent_copies: bool = False) -> None:
        """``pinned_commands``: see ``CommandBuffer``. ``urgent_copies``: its copies are kernels, too."""
        self.device = device
        self._pinned_commands = pinned_commands
        self.dma = device.stream(urgent=True) if urgent_copies else device.stream()
        self.kernels = device.stream()
        self._buffers: list[CommandBuffer] = []
        self._free: list[CommandBuffer] = []  # of these
        self._ends = [self.dma.event() for _ in range(QUEUED)]  # of the last batches, round and round
        self._calls: deque[int] = deque(maxlen=QUEUED)  # that each of them took, the last one first
        self._finished = 0
        self._events: list[Event] = []  # to be used again

    def event(self) -> Event:
        """An event for ``record``, until it is given back with ``reuse``. From any thread."""
        try:
            return self._events.pop()
        except IndexError:
            return self.dma.event()

    def reuse(self, event: Event) -> None:
        """No stream will wait for it, and nothing that asks it counts any more. From any thread."""
        self._events.append(event)

    def due(self) -> Event | None:
        """What has to have happened before another batch is enqueued; None while few are under way."""
        calls = 0
        for back, more in enumerate(self._calls):
            calls += more
            if calls > CALLS or back + 1 == QUEUED:
                return self._ends[(self._finished - 1 - back) % QUEUED]
        return None

    @staticmethod
    def takes(batches: int, calls: int) -> bool:
        """Whether so many batches, and calls of the driver, are enqueued without waiting, if none is under way."""
        return batches < QUEUED and calls <= CALLS

    def enqueued(self, stream: Stream, calls: int = 0) -> None:
        """``stream`` has been given the end of a batch, which ``calls`` of the driver enqueued."""
        stream.record(self._ends[self._finished % QUEUED])
        self._calls.appendleft(calls)
        self._finished += 1

    def commands(self, nbytes: int) -> CommandBuffer:
        """An empty command buffer, until it is given back: the smallest that suffices, else a new one.

        A new one replaces the largest free one.
        """
        free = sorted(self._free, key=lambda buffer: buffer.nbytes)
        buffer = next((one for one in free if one.nbytes >= nbytes), None)
        if buffer is not None:
            self._free.remove(buffer)
        else:
            if free:
                self._free.remove(free[-1])
                self._buffers.remove(free[-1])
                free[-1].close()
            size = max(COMMANDS_BYTES_MIN, 1 << (nbytes - 1).bit_length())
            buffer = CommandBuffer(self.device, size, pinned=self._pinned_commands)
            self._buffers.append(buffer)
        buffer.reset()
        return buffer

    def has_commands(self, nbytes: int) -> bool:
        """Whether ``commands`` would find a buffer. From any thread."""
        return any(one.nbytes >= nbytes for one in list(self._free))

    def give_back(self, buffer: CommandBuffer) -> None:
        """Nothing uses it any more. From any thread."""
        self._free.append(buffer)

    def wait(self) -> None:
        """Wait for all that this lane has been given so far. From any thread."""
        for stream in (self.dma, self.kernels):
            stream.synchronize()

    def close(self) -> None:
        self._free.clear()
        while self._buffers:
            self._buffers.pop().close()


class DmaLane(Lane):
    """A lane with scratch, through which the batches go."""

    def __init__(self, device: Device, nbytes: int) -> None:
        super().__init__(device)
        self.nbytes = aligned(nbytes)
        self._scratch: Memory = device.memory(self.nbytes + ALIGN)
        self._base = aligned(self._scratch.address)
        self._slices: deque[ScratchSlice] = deque()  # oldest first, round the scratch
        self._pairs: list[tuple[Event, Event]] = []  # to be used again

    def slice(self, nbytes: int, stream: Stream) -> ScratchSlice | None:
        """Scratch for a batch, which ``stream`` will fill; that stream waits for the last uses of it.

        None if one of those uses is not ``finished`` yet: the caller finishes it first.
        """
        while self._slices and self._slices[0].enqueued and self._slices[0].done.query():
            self._retire()
        first = self._slices[-1].end if self._slices else 0
        if first + nbytes > self.nbytes:
            first = 0
        end = first + aligned(nbytes)
        assert end <= self.nbytes, f"a batch of {nbytes} bytes is larger than the scratch"
        over = [i for i, one in enumerate(self._slices) if one.first < end and first < one.end]
        if over:  # the older ones are done by then
            last = self._slices[over[-1]]
            if not last.enqueued:
                return None
            stream.after(last.done)
            for _ in range(over[-1] + 1):
                self._retire()
        events = self._pairs.pop() if self._pairs else (self.dma.event(), self.dma.event())
        self._slices.append(ScratchSlice(first, end, self._base + first, *events))
        return self._slices[-1]

    def _retire(self) -> None:
        one = self._slices.popleft()
        self._pairs.append((one.arrived, one.done))

    def finished(self, scratch: ScratchSlice, stream: Stream, calls: int = 0) -> None:
        """``stream`` has been given the last use of a slice; ``calls`` of the driver enqueued its batch."""
        stream.record(scratch.done)
        self.enqueued(stream, calls)
        scratch.enqueued = True

    def quiet(self) -> None:
        """Wait until nothing of this lane is under way; forget batches that were not finished."""
        self.wait()
        while self._slices:
            self._retire()


class LaunchQueue:
    """Calls that follow copies, in order, for all groups of a load: launches of kernels, and ends of bands.

    Owns the load's command buffers.
    """

    def __init__(self, lane: DmaLane, commands_bytes: Callable[[], int]) -> None:
        """``commands_bytes``: of the first command buffer; asked when the first copies are under way."""
        self._lane, self._commands_bytes = lane, commands_bytes
        self._calls: deque[Callable[[], None]] = deque()
        self._buffers: list[CommandBuffer] = []

    def commands(self, *sizes: int) -> CommandBuffer:
        """A command buffer with room for appends of these sizes."""
        last = self._buffers[-1] if self._buffers else None
        if last is None or not last.has(*sizes):
            least = self._commands_bytes() if last is None else last.nbytes
            self._buffers.append(self._lane.commands(max(least, sum(map(aligned, sizes)))))
        return self._buffers[-1]

    def give_back(self) -> None:
        """Nothing of the load is under way any more."""
        while self._buffers:
            self._lane.give_back(self._buffers.pop())

    def add(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        while len(self._calls) > PENDING:
            self.oldest()

    def oldest(self) -> None:
        self._calls.popleft()()

    def all(self) -> None:
        while self._calls:
            self.oldest()
