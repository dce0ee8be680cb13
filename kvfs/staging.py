"""The ring: bounded memory between an engine's buffers and the files, in slots of one page each.

    FREE -> FILLING -> FULL -> DRAINING -> FREE        and back to FREE from anywhere (rolled back)

A save fills from the engine and drains to a segment, a load fills from segments and drains to the engine. Slots
are taken as a :class:`Lease`, whose slots move together; letting go twice is harmless, so that whoever ends a
transfer can also end its leases. Nobody waits beyond his deadline: no slots is an answer, and counted.

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

from kvfs.errors import ConfigError

ASK_SECONDS = 0.02  # between two looks of somebody who waits
SEARCH_MAX = 256  # slots that are looked at for neighbours


class SlotState(enum.Enum):
    """Who may touch a slot: nobody, the writer of it, nobody, the reader of it."""

    FREE = "free"
    FILLING = "filling"
    FULL = "full"
    DRAINING = "draining"


_NEXT = {
    SlotState.FILLING: SlotState.FULL,
    SlotState.FULL: SlotState.DRAINING,
}


class Lease:
    """Slots of a ring, in ascending order, all in one state. Made by ``StagingRing.acquire``, FILLING."""

    def __init__(self, ring: StagingRing, slots: tuple[int, ...]) -> None:
        self._ring = ring
        self.slots = slots
        self.state = SlotState.FILLING

    def __len__(self) -> int:
        return len(self.slots)

    def views(self, nbytes: int) -> list[memoryview]:
        """The first ``nbytes`` of each slot, writable. Not to be used after the release."""
        return [self._ring.view(slot, 1)[:nbytes] for slot in self.slots]

    def runs(self, nbytes: int) -> list[tuple[int, memoryview]]:
        """(index of the first slot here, memory) of neighbouring slots, where pages of ``nbytes`` fill slots."""
        if nbytes != self._ring.slot_bytes:
            return list(enumerate(self.views(nbytes)))
        runs: list[tuple[int, memoryview]] = []
        first = 0
        for i in range(1, len(self.slots) + 1):
            if i == len(self.slots) or self.slots[i] != self.slots[i - 1] + 1:
                runs.append((first, self._ring.view(self.slots[first], i - first)))
                first = i
        return runs

    def move(self, state: SlotState) -> None:
        """Go on to ``state``. AssertionError if that is not the next one: a bug of the caller."""
        if not self.slots or _NEXT.get(self.state) is not state:
            raise AssertionError(f"a lease of {len(self.slots)} slots goes from {self.state} to {state}")
        self.state = state

    def release(self) -> None:
        """Free the slots. From any state, any number of times, from any thread."""
        self._ring._release(self)


class StagingRing:
    """``slots`` slots of ``slot_bytes`` bytes in one private anonymous map. Thread-safe.

    The memory is a child's own after a fork (copy on write), so a child can never scribble into a page that its
    parent writes to disk. ``memory``: use this instead, for example pinned memory.
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
        self._memory = memory
        self._monotonic = monotonic
        self._changed = threading.Condition()
        self._free = list(range(slots))
        self._leases: set[Lease] = set()
        self._queues: dict[int, deque[object]] = {}  # who waits, first come first served, by ``keep``
        self._closed = False

    @property
    def free(self) -> int:
        return len(self._free)

    def view(self, slot: int, count: int) -> memoryview:
        """The memory of neighbouring slots."""
        return self._memory[slot * self.slot_bytes : (slot + count) * self.slot_bytes]

    def acquire(
        self, n: int, deadline: float, *, least: int | None = None, keep: int = 0,
        in_vain_from: Callable[[], float] = lambda: math.inf,
    ) -> Lease | None:  # fmt: skip
        """Take ``n`` slots, or as many as are free but at least ``least`` (default: n); they are FILLING.

        Waits until ``deadline`` (on the clock of the ring), in the order of arrival among those with the same
        ``keep``: slots that must stay free for others; but no longer than until what ``in_vain_from`` says, which is
        asked again and again. None: nothing changed, and it is counted in ``declined``.
        What can never be had is None at once.
        """
        least = n if least is None else least
        if not 1 <= least <= n or keep < 0:
            raise ConfigError(f"acquire {least} to {n} slots and keep {keep}: pass 1 <= least <= n, keep >= 0")
        me = object()
        with self._changed:
            queue = self._queues.setdefault(keep, deque())
            queue.append(me)
            try:
                while queue[0] is not me or len(self._free) - keep < least:
                    left = min(deadline, in_vain_from()) - self._monotonic()
                    if self._closed or left <= 0 or least > self.slots - keep:
                        self.declined += 1
                        return None
                    self._changed.wait(min(left, ASK_SECONDS))
                if self._closed:
                    self.declined += 1
                    return None
                return self._take(min(n, len(self._free) - keep))
            finally:
                queue.remove(me)
                self._changed.notify_all()

    def _take(self, n: int) -> Lease:
        first = _neighbours(self._free, n)
        taken = self._free[first : first + n]
        del self._free[first : first + n]
        lease = Lease(self, tuple(taken))
        self._leases.add(lease)
        return lease

    def _release(self, lease: Lease) -> None:
        with self._changed:
            if lease not in self._leases:
                return
            self._leases.remove(lease)
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
        """Nobody gets a slot any more; who waits is declined. The memory goes with its last user."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def _neighbours(free: Sequence[int], n: int) -> int:
    """Where in the ascending ``free`` the first run of ``n`` slots begins; 0 if there is none near the start."""
    for i in range(min(len(free) - n + 1, SEARCH_MAX)):
        if free[i + n - 1] - free[i] == n - 1:
            return i
    return 0
