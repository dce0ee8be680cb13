"""Where a GPU reads regions of segments from: the page cache, registered in place, or an arena of pinned memory.

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

MEASURED_BYTES = 256 << 20  # registered, before their cost decides
REMEMBERED_BYTES = 1 << 30  # about so many count: pages that were just written cost twice what they cost a second later
#: Above this cost loads use the ring. In a vLLM that reloads what it saved (H100), loads through the ring took 0.04 to
#: 0.09 s per GiB; with 0.075 as the limit first loads took as long, and later ones 0.02 to 0.06 (docs/decisions/0011).
SECONDS_PER_GIB_MAX = 0.075
AGAIN_SECONDS = 10.0  # until what was too expensive is measured again: else one bad second decides for good
FAILURES_MAX = 8  # of the driver, until loads stop asking it
READ_BYTES = 4 << 20  # one preadv into a block
LACKED_MAX = 256  # regions that are remembered as lacking from one second to the next


class RegisteredRegion(NamedTuple):
    """Memory that the device can read, and that holds bytes of a segment. It keeps the segment open."""

    held: OpenSegment
    address: int
    nbytes: int
    memory: Any


class FullError(Exception):
    """The budget is spent: nothing may be pinned unless something else is freed."""


class PinnedBudget:
    """Bytes that all processes of the host together may pin."""

    def __init__(self, account: PinnedBytes, files: Files, limit: int) -> None:
        self._account, self._files, self.limit = account, files, limit

    def take(self, nbytes: int) -> None:
        """FullError if that exceeds the limit."""
        if not self._account.take(nbytes, self.limit, self._files.monotonic()):
            raise FullError

    def give_back(self, nbytes: int) -> None:
        self._account.give_back(nbytes)


class RegionSource(Protocol):
    """Makes regions, in one thread at a time, and frees them, in any thread."""

    name: str
    budget: PinnedBudget

    @property
    def wants_prefetch(self) -> bool:
        """Whether loads gain by reading cold pages into the page cache, and making regions of them there."""

    def ready(self, *, gentle: bool) -> bool:
        """Whether a load gains by making the regions that it needs, rather than by going through the ring.

        ``gentle``: without keeping launches of the engine waiting.
        """

    def lacks(self, segment_id: bytes, number: int) -> None:
        """A load has gone without this region."""

    @property
    def short(self) -> bool:
        """Whether ``grow`` would pin something."""

    def grow(self, seconds: float) -> None:
        """Pin memory for what loads have lacked since the last call, for about so long."""

    def cost(self, nbytes: int) -> int:
        """Bytes that are pinned for a region of ``nbytes``."""

    def make(self, held: OpenSegment, start: int, nbytes: int, *, ahead: bool) -> RegisteredRegion | None:
        """[start, start + nbytes) of a segment, all of it published. ``ahead``: no load waits for it.

        FullError; None if it cannot be had, or, unless ``ahead``, not soon.
        """

    def free(self, region: RegisteredRegion) -> None:
        """No copy from it is under way any more."""

    def close(self) -> None:
        """Every region has been freed."""


class RegisteredMaps:
    """Maps of the page cache, registered read-only: no byte is copied by a CPU."""

    name, short = "in_place", False

    def __init__(self, device: Device, files: Files, budget: PinnedBudget) -> None:
        self._device, self._files, self.budget = device, files, budget
        self.failed = 0  # registrations that the driver refused, one after the other
        self._seconds, self._registered = 0.0, 0.0  # spent lately, on how many bytes
        self._at = 0.0  # when the last of them was registered

    @property
    def wants_prefetch(self) -> bool:
        return self.failed < FAILURES_MAX  # even expensive registration costs less than the disk

    def ready(self, *, gentle: bool) -> bool:
        if gentle:
            return False
        expensive = self._seconds * (1 << 30) > SECONDS_PER_GIB_MAX * self._registered
        if expensive and self._registered >= MEASURED_BYTES:
            if self._files.monotonic() - self._at < AGAIN_SECONDS:
                return False
            self._seconds = self._registered = 0.0
        return self.failed < FAILURES_MAX

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

    def _register(self, region: RegisteredRegion, begin: float, *, ahead: bool) -> RegisteredRegion | None:
        begin = self._files.monotonic() if ahead else begin
        try:
            self._device.register(region.address, region.nbytes, read_only=True)
        except CudaError:
            region.memory.close()
            self.budget.give_back(region.nbytes)
            self.failed += 1
            return None
        self.failed = 0
        self._registered += region.nbytes
        self._at = self._files.monotonic()
        self._seconds += self._at - begin
        if self._registered > REMEMBERED_BYTES:
            self._registered, self._seconds = self._registered / 2, self._seconds / 2
        return region

    def _bring_in(self, held: OpenSegment, address: int, start: int, nbytes: int) -> None:
        """Read what the page cache lacks: the driver would do it page by page, and block all launches meanwhile."""
        files = self._files
        if files.cached_bytes(held.fd, start, nbytes) in (nbytes, None):
            return
        files.prefer_huge(address, nbytes)
        for at in range(0, nbytes, HUGE_BYTES):
            size = min(HUGE_BYTES, nbytes - at)
            if files.cached_bytes(held.fd, start + at, size) != size:
                files.populate_at(address + at, size)

    def free(self, region: RegisteredRegion) -> None:
        if _unregister(self._device, region.memory):
            self.budget.give_back(region.nbytes)

    def close(self) -> None:
        pass


class Arena:
    """Pinned blocks of one size. Pinning takes half a second per GiB, so loads only fill blocks that are free.

    ``grow`` pins blocks in the background.
    """

    name, wants_prefetch = "arena", False  # its blocks are filled from the disk

    def __init__(self, device: Device, files: Files, budget: PinnedBudget, readers: Pool, block_bytes: int) -> None:
        self._device, self._files, self.budget, self._readers = device, files, budget, readers
        self._block_bytes = block_bytes
        self._free: list[Pinned] = []
        self._blocks: list[Pinned] = []
        self._full = False  # the budget is spent: a new region takes the block of another one
        self._lacked: set[tuple[bytes, int]] = set()  # regions that loads have gone without

    def ready(self, *, gentle: bool) -> bool:
        return bool(self._free) or self._full

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
        """A new block. FullError if the budget is spent, or the memory cannot be pinned."""
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

    def free(self, region: RegisteredRegion) -> None:
        self._free.append(region.memory)

    def close(self) -> None:
        for block in self._blocks:
            with contextlib.suppress(CudaError):
                block.close()
                self.budget.give_back(self._block_bytes)
        self._blocks.clear()
        self._free.clear()


class Probe(NamedTuple):
    """Whether the device reads a read-only map of a file of this store right."""

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
        _unregister(device, mapping)
    return Probe(same, "" if same else "the device read other bytes")


def _read_back(device: Device, address: int, nbytes: int) -> bytes:
    back = device.pinned(nbytes)
    try:
        memory, stream = device.memory(nbytes), device.stream()
        stream.copy_in(memory.address, address, nbytes)
        stream.copy_out(back.address, memory.address, nbytes)
        stream.synchronize()
        return bytes(back.view[:nbytes])
    finally:
        back.close()


def _unregister(device: Device, mapping: BareMap) -> bool:
    """Unregister and unmap. False if the driver keeps the registration: then the map stays until the process ends.

    Otherwise new memory at its address would count as registered, and the device would read the old pages.
    """
    try:
        device.unregister(mapping.address)
    except CudaError as exc:
        log.warning("%d bytes stay pinned until this process ends: %s", mapping.nbytes, exc)
        return False
    mapping.close()
    return True
