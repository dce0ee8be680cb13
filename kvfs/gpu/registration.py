"""Where a GPU reads pieces of segments from: the page cache, registered in place, or an arena of pinned memory.

The arena is for hosts whose driver does not register read-only maps of files: blocks that are pinned once and filled
again and again from the page cache, or past it from the disk. Both keep what they pin within a budget that all
processes of the host share.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
from functools import partial
from typing import Any, NamedTuple, Protocol

from kvfs.directory.pinned_memory import PinnedBytes
from kvfs.gpu.device import Device, Pinned
from kvfs.kernels.driver import CudaError
from kvfs.segments.open_segments import OpenSegment, may_map
from kvfs.system.files import HUGE_BYTES, BareMap, Files
from kvfs.system.thread_pool import Pool

log = logging.getLogger("kvfs")

MEASURED_BYTES = 256 << 20  # registered, before the cost of it is believed
REMEMBERED_BYTES = 1 << 30  # about so many count: pages that were just written cost twice what they cost a second later
#: Dearer than this, a load is faster through the ring than by registering first. On two H200 hosts the ring made 0.026
#: and 0.039 s per GiB, a load that registers 0.01 more than registering alone.
SECONDS_PER_GIB_MAX = 0.035
FAILURES_MAX = 8  # of the driver, until loads ask it no more
READ_BYTES = 4 << 20  # one preadv into a block
LACKED_MAX = 256  # regions that are remembered as lacking from one second to the next


class RegisteredRegion(NamedTuple):
    """Memory that the device can read, and that holds bytes of a segment. It keeps the segment open."""

    held: OpenSegment
    address: int
    nbytes: int
    memory: Any


class FullError(Exception):
    """Nothing may be pinned any more, unless something else is let go."""


class PinnedBudget:
    """What may be pinned, of the host's processes together."""

    def __init__(self, account: PinnedBytes, files: Files, limit: int) -> None:
        self._account, self._files, self.limit = account, files, limit

    def take(self, nbytes: int) -> None:
        """FullError if that is too much."""
        if not self._account.take(nbytes, self.limit, self._files.monotonic()):
            raise FullError

    def give_back(self, nbytes: int) -> None:
        self._account.give_back(nbytes)


class RegionSource(Protocol):
    """How pieces are made: by one thread at a time. Another may free some meanwhile."""

    name: str
    budget: PinnedBudget

    @property
    def fills(self) -> bool:
        """Whether loads gain by bringing what is cold into the page cache, and making pieces of it there."""

    def ready(self) -> bool:
        """Whether a load gains by making the pieces that it needs, rather than going through the ring."""

    def lacks(self, segment_id: bytes, number: int) -> None:
        """A load has gone without this region."""

    @property
    def short(self) -> bool:
        """Whether ``grow`` would pin something."""

    def grow(self, seconds: float) -> None:
        """Pin memory for what loads have lacked since the last call, for about so long."""

    def cost(self, nbytes: int) -> int:
        """What is pinned for a region of so many bytes."""

    def make(self, held: OpenSegment, start: int, nbytes: int, *, ahead: bool) -> RegisteredRegion | None:
        """[start, start + nbytes) of a segment, all of it published. ``ahead``: no load waits for it.

        FullError; None if it cannot be had, or, unless ``ahead``, not soon.
        """

    def free(self, backed: RegisteredRegion) -> None:
        """Nothing copies from it any more."""

    def close(self) -> None:
        """All has been freed."""


class RegisteredMaps:
    """Maps of the page cache, registered read-only: no byte is copied by a CPU."""

    name, short = "in_place", False

    def __init__(self, device: Device, files: Files, budget: PinnedBudget) -> None:
        self._device, self._files, self.budget = device, files, budget
        self.failed = 0  # registrations that the driver refused, one after the other
        self._seconds, self._registered = 0.0, 0.0  # spent on how many bytes, of late

    @property
    def fills(self) -> bool:
        return self.failed < FAILURES_MAX  # whatever it costs, it costs less than the disk

    def ready(self) -> bool:
        dear = self._seconds * (1 << 30) > SECONDS_PER_GIB_MAX * self._registered
        return self.failed < FAILURES_MAX and not (dear and self._registered >= MEASURED_BYTES)

    def lacks(self, segment_id: bytes, number: int) -> None:
        pass

    def grow(self, seconds: float) -> None:
        pass

    def cost(self, nbytes: int) -> int:
        return nbytes

    def make(self, held: OpenSegment, start: int, nbytes: int, *, ahead: bool) -> RegisteredRegion | None:
        if not may_map(self._files, held):
            return None
        begin = self._files.monotonic()
        self.budget.take(nbytes)  # before anything is read for it
        try:
            mapping = self._files.map_bare(held.fd, nbytes, start)
        except OSError:
            self.budget.give_back(nbytes)
            return None
        try:
            self._bring_in(held, mapping.address, start, nbytes)
        except OSError:
            mapping.close()
            self.budget.give_back(nbytes)
            return None
        return self._register(RegisteredRegion(held, mapping.address, nbytes, mapping), begin, ahead=ahead)

    def _register(self, backed: RegisteredRegion, begin: float, *, ahead: bool) -> RegisteredRegion | None:
        begin = self._files.monotonic() if ahead else begin
        try:
            self._device.register(backed.address, backed.nbytes, read_only=True)
        except CudaError:
            backed.memory.close()
            self.budget.give_back(backed.nbytes)
            self.failed += 1
            return None
        self.failed = 0
        self._registered += backed.nbytes
        self._seconds += self._files.monotonic() - begin
        if self._registered > REMEMBERED_BYTES:
            self._registered, self._seconds = self._registered / 2, self._seconds / 2
        return backed

    def _bring_in(self, held: OpenSegment, address: int, start: int, nbytes: int) -> None:
        """Read what the page cache lacks: the driver would do it page by page, and let nobody launch meanwhile."""
        files = self._files
        if files.cached_bytes(held.fd, start, nbytes) in (nbytes, None):
            return
        files.prefer_huge(address, nbytes)
        for at in range(0, nbytes, HUGE_BYTES):
            size = min(HUGE_BYTES, nbytes - at)
            if files.cached_bytes(held.fd, start + at, size) != size:
                files.populate_at(address + at, size)

    def free(self, backed: RegisteredRegion) -> None:
        if _unpinned(self._device, backed.memory):
            self.budget.give_back(backed.nbytes)

    def close(self) -> None:
        pass


class Arena:
    """Pinned blocks of one size. To pin one takes half a second per GiB, so loads only use those that are there."""

    name, fills = "arena", False  # its blocks are filled from the disk

    def __init__(self, device: Device, files: Files, budget: PinnedBudget, readers: Pool, block_bytes: int) -> None:
        self._device, self._files, self.budget, self._readers = device, files, budget, readers
        self._block_bytes = block_bytes
        self._free: list[Pinned] = []
        self._blocks: list[Pinned] = []
        self._full = False  # the budget is spent: a new region takes the block of another one
        self._lacked: set[tuple[bytes, int]] = set()  # regions that loads have gone without

    def lacks(self, segment_id: bytes, number: int) -> None:
        if len(self._lacked) < LACKED_MAX:
            self._lacked.add((segment_id, number))

    @property
    def short(self) -> bool:
        return len(self._lacked) > len(self._free) and not self._full

    def grow(self, seconds: float) -> None:
        """Pin a block for each region that lacked one; the next load of that region fills it."""
        end, lacked = self._files.monotonic() + seconds, len(self._lacked)
        self._lacked.clear()
        with contextlib.suppress(FullError):
            for _ in range(lacked - len(self._free)):
                self._free.append(self._pin())
                if self._files.monotonic() >= end:
                    break

    def ready(self) -> bool:
        return bool(self._free) or self._full

    def cost(self, nbytes: int) -> int:
        return self._block_bytes  # however much of it is filled

    def make(self, held: OpenSegment, start: int, nbytes: int, *, ahead: bool) -> RegisteredRegion | None:
        block = self._block(ahead=ahead)
        if block is None:
            return None
        try:
            self._readers.run([
                partial(self._files.read_into, held.fd, block.view[at : min(at + READ_BYTES, nbytes)], start + at)
                for at in range(0, nbytes, READ_BYTES)
            ])  # fmt: skip
        except OSError:
            self._free.append(block)
            return None
        return RegisteredRegion(held, block.address, nbytes, block)

    def _block(self, *, ahead: bool) -> Pinned | None:
        if self._free:
            return self._free.pop()
        if not ahead:
            if self._full:
                raise FullError
            return None
        return self._pin()

    def _pin(self) -> Pinned:
        """A new block. FullError, once and from then on, if the budget is spent."""
        self._full = True
        self.budget.take(self._block_bytes)
        try:
            block = self._device.pinned(self._block_bytes)
        except OSError:  # the driver's, too; or the process has no room for another map
            self.budget.give_back(self._block_bytes)
            raise FullError from None
        self._blocks.append(block)
        self._full = False
        return block

    def free(self, backed: RegisteredRegion) -> None:
        self._free.append(backed.memory)

    def close(self) -> None:
        for block in self._blocks:
            with contextlib.suppress(CudaError):
                block.close()
                self.budget.give_back(self._block_bytes)
        self._blocks.clear()
        self._free.clear()


class Probe(NamedTuple):
    """What the device makes of a read-only map of a file of this store."""

    works: bool
    reason: str = ""


def probe(device: Device, fd: int, files: Files, nbytes: int) -> Probe:
    """Register a map of ``nbytes`` of ``fd`` and read it back through the device, byte for byte."""
    try:
        mapping = files.map_bare(fd, nbytes, 0)
    except OSError as exc:
        return Probe(False, f"cannot map: {exc}")
    try:
        files.populate_at(mapping.address, nbytes)
        device.register(mapping.address, nbytes, read_only=True)
    except OSError as exc:
        mapping.close()
        return Probe(False, str(exc) if isinstance(exc, CudaError) else f"cannot map: {exc}")
    try:
        same = _read_back(device, mapping.address, nbytes) == ctypes.string_at(mapping.address, nbytes)
    except CudaError as exc:
        return Probe(False, str(exc))
    finally:
        _unpinned(device, mapping)
    return Probe(same, "" if same else "the device read other bytes")


def _read_back(device: Device, address: int, nbytes: int) -> bytes:
    back = device.pinned(nbytes)
    try:
        memory, stream = device.memory(nbytes), device.stream()
        stream.copy_in(memory.address, address, nbytes)
        stream.copy_out(back.address, memory.address, nbytes)
        stream.record().synchronize()
        return bytes(back.view[:nbytes])
    finally:
        back.close()


def _unpinned(device: Device, mapping: BareMap) -> bool:
    """Let go of a registered map. False if the driver keeps it: it stays where it is, for good.

    The driver would take whatever came to lie there for it, and read the old pages in place of that.
    """
    try:
        device.unregister(mapping.address)
    except CudaError as exc:
        log.warning("%d bytes stay pinned until this process ends: %s", mapping.nbytes, exc)
        return False
    mapping.close()
    return True
