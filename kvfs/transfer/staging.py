"""The ring: bounded memory between an engine's buffers and the files, in slots of one size.

    FREE -> FILLING -> FULL -> DRAINING -> FREE        and back to FREE from anywhere (rolled back)

A save fills from the engine and drains to a segment, a load fills from segments and drains to the engine. Slots
are taken as a :class:`Lease`, whose slots move together. A second release is harmless, so that the end of a transfer
can release all of its leases. No caller waits beyond its deadline: no slots is an answer, and counted.

A lease is for pages of one size, and its slots hold as many of them as fit: each begins on SLOT_ALIGN, none is in
two slots. Requests and leases count pages; what is free, kept for others, or in some state is counted in slots.
No two leases share a slot: the rest of a lease's last slot is unused until the slot is free again.

Invariants: every slot is FREE or of exactly one open lease; free + leased = all (``check``).
"""

from __future__ import annotations

import bisect
import enum
import math
import mmap
import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise

from kvfs.errors import ConfigError

SLOT_ALIGN = 4096  # O_DIRECT wants it
ASK_SECONDS = 0.02  # between two calls of ``give_up_at``
SEARCH_MAX = 256  # free slots that a search for neighbours looks at


class SlotState(enum.Enum):
    """A slot may be written while FILLING and read while DRAINING."""

    FREE = "free"
    FILLING = "filling"
    FULL = "full"
    DRAINING = "draining"


_NEXT = {
    SlotState.FILLING: SlotState.FULL,
    SlotState.FULL: SlotState.DRAINING,
}


class Lease:
    """Room for ``len`` pages in slots of a ring, ascending, all in one state. Made by ``acquire``, FILLING.

    Pages are ``stride`` bytes apart, from the beginning of each slot on. Its memory must not be used after the release.
    """

    def __init__(self, ring: StagingRing, slots: tuple[int, ...], pages: int, page_bytes: int) -> None:
        self._ring, self._pages, self._page_bytes = ring, pages, page_bytes
        self.slots = slots
        self.stride = ring.stride(page_bytes)
        self.state = SlotState.FILLING

    def __len__(self) -> int:
        return self._pages if self.slots else 0

    def offsets(self) -> list[int]:
        """Of each page, in the ring."""
        return [at + i * self.stride for _, count, at in self.ranges() for i in range(count)]

    def views(self) -> list[memoryview]:
        """Each page, writable."""
        memory, size = self._ring.memory, self._page_bytes
        return [memory[at : at + size] for at in self.offsets()]

    def ranges(self) -> list[tuple[int, int, int]]:
        """(index of the first page, pages, offset in the ring) of neighbouring pages."""
        slots, per_slot, slot_bytes = self.slots, self._ring.per_slot(self._page_bytes), self._ring.slot_bytes
        full = per_slot * self.stride == slot_bytes
        first = [i for i, slot in enumerate(slots) if not (full and i and slots[i - 1] + 1 == slot)]
        return [
            (i * per_slot, min(end * per_slot, self._pages) - i * per_slot, slots[i] * slot_bytes)
            for i, end in pairwise((*first, len(slots)))
        ]

    def runs(self, step: int) -> list[tuple[int, memoryview]]:
        """(index of the first page, memory) of pages ``step`` bytes apart: ranges if that is the stride, else pages."""
        if step != self.stride:
            return list(enumerate(self.views()))
        return [(first, self._ring.memory[at : at + count * step]) for first, count, at in self.ranges()]

    def move(self, state: SlotState) -> None:
        """Go on to ``state``, the next one; AssertionError for any other."""
        if not self.slots or _NEXT.get(self.state) is not state:
            raise AssertionError(f"a lease of {len(self.slots)} slots must not move from {self.state} to {state}")
        self.state = state

    def release(self) -> None:
        """Free the slots. From any state, any number of times, from any thread."""
        self._ring._release(self)


class StagingRing:
    """``slots`` slots of ``slot_bytes`` bytes in one private anonymous map. Thread-safe.

    After a fork the memory is copied on write, so a child cannot overwrite a page that its parent writes to disk.
    ``memory``: use this instead, for example pinned memory.
    """

    def __init__(
        self, slot_bytes: int, slots: int, monotonic: Callable[[], float], memory: memoryview | None = None
    ) -> None:
        if slot_bytes < 1 or slots < 1:
            raise ConfigError(f"a ring of {slots} slots of {slot_bytes} bytes: pass at least one of each")
        self.slot_bytes = slot_bytes
        self.slots = slots
        self.declined = 0  # acquires that ended with None
        if memory is None:
            memory = memoryview(mmap.mmap(-1, slot_bytes * slots, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        self.memory = memory
        self._monotonic = monotonic
        self._changed = threading.Condition()
        self._free = list(range(slots))
        self._leases: set[Lease] = set()
        self._queues: dict[int, deque[object]] = {}  # waiting calls, first come first served, by ``keep``
        self._closed = False

    @property
    def free(self) -> int:
        return len(self._free)

    def stride(self, page_bytes: int) -> int:
        """Bytes from page to page in a slot."""
        return min(self.slot_bytes, -(-page_bytes // SLOT_ALIGN) * SLOT_ALIGN)

    def per_slot(self, page_bytes: int) -> int:
        """Pages of this size that a slot holds."""
        return self.slot_bytes // self.stride(page_bytes)

    def holds(self, page_bytes: int) -> int:
        """Pages of this size that all slots hold."""
        return self.slots * self.per_slot(page_bytes)

    def acquire(
        self, n: int, deadline: float, *, page_bytes: int | None = None, least: int | None = None, keep: int = 0,
        give_up_at: Callable[[], float] = lambda: math.inf,
    ) -> Lease | None:  # fmt: skip
        """Take slots for ``n`` pages, or for as many as there is room for, but at least ``least`` (default: n).

        ``page_bytes``: of a page (default: a slot). ``keep``: slots that must stay free for others. The slots are
        FILLING, and no more than the pages need. Waits until ``deadline`` (on the clock of the ring), or until the
        time that ``give_up_at`` returns, which is called every ASK_SECONDS; in order of arrival among callers with
        the same ``keep``. None: nothing changed, and it is counted in ``declined``. A request that can never be
        met is None at once.
        """
        least = n if least is None else least
        page_bytes = self.slot_bytes if page_bytes is None else page_bytes
        if not 1 <= least <= n or keep < 0 or not 1 <= page_bytes <= self.slot_bytes:
            raise ConfigError(
                f"acquire {least} to {n} pages of {page_bytes} bytes and keep {keep} slots: pass 1 <= least <= n, "
                f"keep >= 0, pages of 1 to {self.slot_bytes} bytes"
            )
        per_slot = self.per_slot(page_bytes)
        needed = -(-least // per_slot)
        me = object()
        with self._changed:
            queue = self._queues.setdefault(keep, deque())
            queue.append(me)
            try:
                while queue[0] is not me or len(self._free) - keep < needed:
                    left = min(deadline, give_up_at()) - self._monotonic()
                    if self._closed or left <= 0 or needed > self.slots - keep:
                        self.declined += 1
                        return None
                    self._changed.wait(min(left, ASK_SECONDS))
                if self._closed:
                    self.declined += 1
                    return None
                pages = min(n, (len(self._free) - keep) * per_slot)
                return self._take(-(-pages // per_slot), pages, page_bytes)
            finally:
                queue.remove(me)
                self._changed.notify_all()

    def _take(self, n: int, pages: int, page_bytes: int) -> Lease:
        first = _neighbours(self._free, n)
        taken = self._free[first : first + n]
        del self._free[first : first + n]
        lease = Lease(self, tuple(taken), pages, page_bytes)
        self._leases.add(lease)
        return lease

    def _release(self, lease: Lease) -> None:
        with self._changed:
            if lease not in self._leases:
                return
            self._leases.remove(lease)
            at = bisect.bisect(self._free, lease.slots[0])
            if at == len(self._free) or self._free[at] > lease.slots[-1]:  # no free one among them
                self._free[at:at] = lease.slots
            else:
                for slot in lease.slots:
                    bisect.insort(self._free, slot)
            lease.slots, lease.state = (), SlotState.FREE
            self._changed.notify_all()

    def states(self) -> dict[SlotState, int]:
        """How many slots are in each state."""
        with self._changed:
            counts = dict.fromkeys(SlotState, 0)
            counts[SlotState.FREE] = len(self._free)
            for lease in self._leases:
                counts[lease.state] += len(lease.slots)
            return counts

    def check(self) -> None:
        """Recount: AssertionError if a slot is lost, or has two owners."""
        with self._changed:
            owned = [*self._free, *(slot for lease in self._leases for slot in lease.slots)]
            if sorted(owned) != list(range(self.slots)):
                raise AssertionError(f"slots {sorted(owned)} are accounted for, the ring has {self.slots}")

    def close(self) -> None:
        """Decline every call from now on, those that wait included. The memory is freed with its last reference."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def _neighbours(free: Sequence[int], n: int) -> int:
    """Index in the ascending ``free`` of the first ``n`` neighbouring slots; 0 if the search finds none."""
    for i in range(min(len(free) - n + 1, SEARCH_MAX)):
        if free[i + n - 1] - free[i] == n - 1:
            return i
    return 0
