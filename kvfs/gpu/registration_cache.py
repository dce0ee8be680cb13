"""Regions of segments that a GPU can read: which exist, which copies use them, which are dropped first.

A region is up to REGION_BYTES of a segment, in the page cache or in an arena (``kvfs.gpu.registration``). Published
bytes never change, so a region stays right; it covers published bytes only. Regions cost pinned memory: their sum is
bounded, the least recently used are dropped first, and none is dropped while a copy uses it. A region keeps its
segment open, for which at most a quarter of the process's descriptors may be spent. It also keeps the segment's shared
lock, so a dropped segment counts as used space until its regions are released (``sweep``).
"""

from __future__ import annotations

import contextlib
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from kvfs.gpu.registration import FullError, RegionSource, RegisteredRegion
from kvfs.segments.open_segments import OpenSegment, sealed_bytes
from kvfs.system.files import Files

REGION_BYTES = 64 << 20
SEGMENTS_MAX = 4096  # with regions, where descriptors are unlimited; and sealed segments whose size is remembered
GROW_SECONDS = 0.1  # of each second, for pinning blocks in the background
MAKING_SECONDS = 0.5  # a region takes a tenth of it on a healthy disk


class RegisteredRange(NamedTuple):
    """Neighbouring registered bytes."""

    address: int
    nbytes: int


class _Region:
    """A region, and how many transfers copy from it."""

    __slots__ = ("address", "memory", "nbytes", "users")

    def __init__(self, memory: RegisteredRegion) -> None:
        self.memory, self.address, self.nbytes = memory, memory.address, memory.nbytes
        self.users = 0


_Key = tuple[bytes, int]  # segment id, number of the region in it


class RegionLease:
    """The regions that one transfer copies from."""

    def __init__(self) -> None:
        self.regions: set[_Region] = set()


class RegistrationCache:
    """Owns the regions of one device; a ``RegionSource`` makes and frees them. Thread-safe.

    One thread at a time makes a region, from a disk that may hang. Another thread waits for it at most MAKING_SECONDS.
    Once a wait has timed out, no thread waits until that region is done.
    """

    def __init__(self, source: RegionSource, files: Files, region_bytes: int = REGION_BYTES) -> None:
        self.source, self._files, self._region_bytes = source, files, region_bytes
        self._lock = threading.RLock()
        self._made = threading.Condition(self._lock)
        self._maker: object = None  # the call that makes a region
        self._stuck = False  # a wait for the maker has timed out
        self._regions: OrderedDict[_Key, _Region] = OrderedDict()  # least recently used first
        self._outgrown: set[_Region] = set()  # replaced by longer ones, freed with their last users
        self._sealed: dict[bytes, int] = {}
        files_max = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._segments_max = files_max // 4 if files_max != resource.RLIM_INFINITY else SEGMENTS_MAX
        self._closed = False

    @property
    def nbytes(self) -> int:
        """Of all regions."""
        return sum(region.nbytes for region in list(self._regions.values()))

    @property
    def pinned(self) -> int:
        """Bytes that are pinned for them."""
        return sum(self.source.cost(region.nbytes) for region in list(self._regions.values()))

    def ranges(
        self, held: OpenSegment, offset: int, nbytes: int, published: int, lease: RegionLease, *, register: bool
    ) -> list[RegisteredRange] | None:
        """Memory that holds [offset, offset + nbytes) of a segment; ``lease`` uses it from now on.

        ``published``: bytes of the segment that are known to be published. ``register``: make what is missing. None:
        something is missing, and it was not to be made, the budget is spent or the driver refuses.
        """
        found = []
        for number, inside, need in self._cuts(offset, nbytes):
            key = (held.segment_id, number)
            region = self._take(key, need, lease)
            if region is None and register:
                region = self._make(key, held, need, published, lease, ahead=False)
            if region is None:
                return None
            found.append(RegisteredRange(region.address + inside, need - inside))
        return found

    def lacks(self, held: OpenSegment, offset: int, nbytes: int) -> None:
        """A load has gone without this range."""
        for number, _, need in self._cuts(offset, nbytes):
            if self._take((held.segment_id, number), need, None) is None:
                self.source.lacks(held.segment_id, number)

    def _cuts(self, offset: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """(region, first byte in it, end in it) of a range of a segment."""
        end = offset + nbytes
        while offset < end:
            number, inside = divmod(offset, self._region_bytes)
            need = min(end - number * self._region_bytes, self._region_bytes)
            yield number, inside, need
            offset += need - inside

    def release(self, lease: RegionLease) -> None:
        """No copy of ``lease`` is under way any more."""
        with self._lock:
            for region in lease.regions:
                region.users -= 1
                assert region.users >= 0, "a region is released twice"
                if not region.users and region in self._outgrown:
                    self._outgrown.remove(region)
                    self.source.free(region.memory)
            lease.regions.clear()
            if self._closed:
                self._free_unused()

    def covers(self, held: OpenSegment, offset: int, nbytes: int) -> bool:
        """Whether regions cover all of a range."""
        with self._lock:
            for number, _, need in self._cuts(offset, nbytes):
                region = self._regions.get((held.segment_id, number))
                if region is None or region.nbytes < need:
                    return False
        return True

    def _take(self, key: _Key, need: int, lease: RegionLease | None) -> _Region | None:
        """A region of at least ``need`` bytes, used by ``lease`` from now on; None if there is none."""
        with self._lock:
            region = self._regions.get(key)
            if region is None or region.nbytes < need:
                return None
            if lease is not None:
                if region not in lease.regions:
                    lease.regions.add(region)
                    region.users += 1
                self._regions.move_to_end(key)
            return region

    def touched(self, held: OpenSegment, offset: int, nbytes: int, published: int) -> list[tuple[int, int, int]]:
        """(number, bytes of the range in it, bytes that it would have) of each region that a range is in."""
        return [
            (number, end - inside, self._published((held.segment_id, number), held, published))
            for number, inside, end in self._cuts(offset, nbytes)
        ]

    def missing(self, held: OpenSegment, offset: int, nbytes: int, published: int) -> list[tuple[int, int]]:
        """(first byte, bytes that it would have) of each region that a range needs and that does not exist."""
        found = []
        for number, _, need in self._cuts(offset, nbytes):
            key = (held.segment_id, number)
            if self._take(key, need, None) is None:
                found.append((number * self._region_bytes, self._published(key, held, published)))
        return found

    def warm(self, held: OpenSegment, offset: int, nbytes: int, published: int, *, spare: bool = False) -> int:
        """Make the regions of a range; bytes of it that are covered now. ``spare``: drop no other region for it."""
        ready = 0
        for number, inside, need in self._cuts(offset, nbytes):
            key = (held.segment_id, number)
            if self._take(key, need, None) or self._make(key, held, need, published, None, ahead=True, spare=spare):
                ready += need - inside
        return ready

    def _make(
        self,
        key: _Key,
        held: OpenSegment,
        need: int,
        published: int,
        lease: RegionLease | None,
        *,
        ahead: bool,
        spare: bool = False,
    ) -> _Region | None:
        """All of a region that is known to be published; None if that is less than ``need``, or cannot be had.

        A shorter region of that key is dropped first; one that copies use is replaced, and freed with its last user.
        ``spare``: a shorter one is only dropped once the new one is made, and not replaced while copies use it.
        """
        maker = object()
        try:
            if not self._begin_making(maker, 0.0 if self._stuck else MAKING_SECONDS):
                self._stuck = True
                return None
            return self._make_alone(key, held, max(need, 1), published, lease, ahead=ahead, spare=spare)
        finally:
            self._end_making(maker)

    def _begin_making(self, maker: object, timeout: float) -> bool:
        """Whether ``maker`` is the only one from now on; False if another one has not ended within ``timeout``."""
        with self._made:
            if self._made.wait_for(lambda: self._maker is None, timeout):
                self._maker = maker
            return self._maker is maker

    def _end_making(self, maker: object) -> None:
        with self._made:
            if self._maker is maker:
                self._maker, self._stuck = None, False
                self._made.notify()
                if self._closed:
                    self._free_unused()

    def _make_alone(
        self,
        key: _Key,
        held: OpenSegment,
        need: int,
        published: int,
        lease: RegionLease | None,
        *,
        ahead: bool,
        spare: bool,
    ) -> _Region | None:
        nbytes = self._published(key, held, published)
        with self._lock:
            made = self._take(key, need, lease)  # while this thread waited
            if self._closed or made is not None:
                return made
            if key in self._regions and nbytes >= need:
                if not spare:
                    self._drop_unused(key)
                elif self._regions[key].users:
                    return None
        while nbytes >= need:
            try:
                if self._opens_too_many(held.segment_id):
                    raise FullError
                memory = self.source.make(held, key[1] * self._region_bytes, nbytes, ahead=ahead)
            except FullError:
                with self._lock:
                    if spare or not any(self._drop_unused(oldest) for oldest in list(self._regions)):
                        return None
                continue
            return self._add(key, _Region(memory), need, lease) if memory is not None else None
        return None

    def _add(self, key: _Key, region: _Region, need: int, lease: RegionLease | None) -> _Region | None:
        with self._lock:
            if key in self._regions and not self._drop_unused(key):
                self._outgrown.add(self._regions.pop(key))
            self._regions[key] = region
            return self._take(key, need, lease) if not self._closed else None

    def _opens_too_many(self, segment_id: bytes) -> bool:
        """Whether a region of this segment would keep one segment more open than allowed."""
        if len(self._regions) < self._segments_max:
            return False
        segments = {key[0] for key in list(self._regions)}
        return segment_id not in segments and len(segments) >= self._segments_max

    def _published(self, key: _Key, held: OpenSegment, published: int) -> int:
        """Bytes of a region that are known to be published."""
        end = max(published, self._sealed_bytes(held)) - key[1] * self._region_bytes
        return max(0, min(end, self._region_bytes))

    def _sealed_bytes(self, held: OpenSegment) -> int:
        """Size of a segment if it is sealed, else 0."""
        size = self._sealed.get(held.segment_id, 0)
        if not size:
            with contextlib.suppress(OSError):
                size = sealed_bytes(self._files, held)
                if size:
                    if len(self._sealed) > SEGMENTS_MAX:
                        self._sealed.clear()
                    self._sealed[held.segment_id] = size
        return size

    def _drop_unused(self, key: _Key) -> bool:
        """Free a region; False if copies use it."""
        if self._regions[key].users:
            return False
        self.source.free(self._regions.pop(key).memory)
        return True

    @property
    def short(self) -> bool:
        """Whether ``sweep`` would pin something."""
        return self.source.short

    def dropped(self, is_dropped: Callable[[bytes], bool]) -> set[bytes]:
        """The segments of regions for which ``is_dropped``."""
        with self._lock:
            known = {key[0] for key in self._regions}
        return set(filter(is_dropped, known))

    def sweep(self, dropped: Collection[bytes]) -> None:
        """Free the unused regions of ``dropped`` segments; then have the source grow. Called every second."""
        with self._lock:
            for segment_id in dropped:
                self._sealed.pop(segment_id, None)
            for key in [key for key in self._regions if key[0] in dropped]:
                self._drop_unused(key)
        if self.short:
            maker = object()
            try:
                if self._begin_making(maker, 0.0) and not self._closed:
                    self.source.grow(GROW_SECONDS)
            finally:
                self._end_making(maker)

    def close(self) -> None:
        """Free every region that no copy uses, the others when they are released, and make no more."""
        with self._lock:
            self._closed = True
            self._free_unused()

    def _free_unused(self) -> None:
        for key in list(self._regions):
            self._drop_unused(key)
        if not self._regions and not self._outgrown and self._maker is None:
            self.source.close()
