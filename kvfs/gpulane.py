"""A lane: what one direction of transfers keeps on a GPU - scratch in slots, work lists, streams for DMA and kernels.

    load   DMA of a batch into a slot -> leaves checked -> cells scattered      (meanwhile the next batch is coming)
    save   cells gathered into a slot -> leaves summed  -> DMA to pinned slots

Everything is enqueued without waiting; a slot is used again when the stream has got past its last use. So the host may
be slow, or another Python thread busy, without the link running dry.
"""

from __future__ import annotations

from kvfs.gpu import Device, Event, Memory, Stream
from kvfs.types import BufferLike

ALIGN = 256


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


class Slot:
    """A piece of scratch, and events of its last use: ``arrived`` what it was filled with, and ``done``."""

    def __init__(self, address: int, arrived: Event, done: Event) -> None:
        self.address, self.arrived, self.done = address, arrived, done


class Sheet:
    """Small data that a transfer sends along, or gets back: the same bytes in pinned and in device memory."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.nbytes = nbytes
        self._host, self._device = device.pinned(nbytes), device.memory(nbytes)
        self._used = 0

    def reset(self) -> None:
        self._used = 0

    def put(self, data: BufferLike) -> int:
        """Append bytes on the host's side; their offset."""
        raw = memoryview(data).cast("B")
        at = self.room(len(raw))
        self._host.view[at : at + len(raw)] = raw
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

    def words(self, offset: int) -> object:
        return self._device.words(offset)

    def send(self, stream: Stream, first: int) -> None:
        """Copy what was put from ``first`` on."""
        stream.copy_in(self._device.address + first, self._host.address + first, self._used - first)

    def fetch(self, stream: Stream, offset: int, nbytes: int, into: int) -> None:
        """Copy what lies at ``offset`` on the device to ``into`` on the host."""
        stream.copy_out(self._host.address + into, self._device.address + offset, nbytes)

    def host(self, offset: int, nbytes: int) -> memoryview:
        return self._host.view[offset : offset + nbytes]

    def close(self) -> None:
        self._host.close()


class Lane:
    """Used by one thread at a time."""

    def __init__(self, device: Device, slot_bytes: int, slots: int) -> None:
        self.device, self.slot_bytes = device, slot_bytes
        self.dma, self.kernels = device.stream(), device.stream()
        self._scratch: Memory = device.memory(slot_bytes * slots + ALIGN)
        base = aligned(self._scratch.address)
        self._slots = [Slot(base + i * slot_bytes, self.dma.event(), self.dma.event()) for i in range(slots)]
        self._next = 0
        self._sheet: Sheet | None = None

    def slot(self) -> Slot:
        """The slot whose last use is longest ago. Whoever writes to it lets the stream wait for ``done``."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        return slot

    def sheet(self, nbytes: int) -> Sheet:
        """An empty sheet. The last one is not in use any more."""
        if self._sheet is None or self._sheet.nbytes < nbytes:
            if self._sheet is not None:
                self._sheet.close()
            self._sheet = Sheet(self.device, 1 << max(20, (nbytes - 1).bit_length()))
        self._sheet.reset()
        return self._sheet

    def quiet(self) -> None:
        """Wait until nothing of this lane is under way."""
        for stream in (self.dma, self.kernels):
            stream.record().synchronize()

    def close(self) -> None:
        if self._sheet is not None:
            self._sheet.close()
            self._sheet = None
