"""The ring: bounded, no slot lost or owned twice, no wait without an end."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvfs.errors import ConfigError
from kvfs.system.memory_views import address_of
from kvfs.transfer.staging import SLOT_ALIGN, Lease, SlotState, StagingRing
from kvfs.transfer.workers import SLOW_BYTES_PER_SECOND, STALLED_SECONDS, Writes

NOW = 0.0  # a deadline that has passed


def ring(slots: int = 4, slot_bytes: int = 4096) -> StagingRing:
    return StagingRing(slot_bytes, slots, time.monotonic)


def soon(condition: Callable[[], bool]) -> None:
    """Wait until another thread has made it true."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def got(lease: Lease | None) -> Lease:
    assert lease is not None
    return lease


def test_slots_are_reused() -> None:
    r = ring()
    lease = got(r.acquire(2, NOW))
    assert lease.slots == (0, 1) and r.free == 2
    for state in (SlotState.FULL, SlotState.DRAINING):
        assert r.states()[SlotState.FREE] == 2
        lease.move(state)
        assert r.states()[state] == 2
    lease.release()
    assert r.free == 4 and lease.state is SlotState.FREE and not lease.slots
    lease.release()
    assert r.free == 4
    r.check()


@pytest.mark.parametrize("moves", [["DRAINING"], ["FILLING"], ["FREE"], ["FULL", "FULL"], ["FULL", "DRAINING", "FULL"]])
def test_a_wrong_transition_is_a_bug(moves: list[str]) -> None:
    lease = got(ring().acquire(1, NOW))
    with pytest.raises(AssertionError, match="must not move from"):
        for name in moves:
            lease.move(SlotState[name])


def test_a_released_lease_cannot_move() -> None:
    lease = got(ring().acquire(1, NOW))
    lease.release()
    with pytest.raises(AssertionError):
        lease.move(SlotState.FULL)


def test_slots_do_not_overlap_and_keep_their_bytes() -> None:
    r = ring(3, 100)
    leases = [got(r.acquire(1, NOW)) for _ in range(3)]
    for i, lease in enumerate(leases):
        lease.views()[0][:] = bytes([i]) * 100
    assert [bytes(lease.views()[0]) for lease in leases] == [bytes([i]) * 100 for i in range(3)]


def test_neighbours_are_one_run_of_memory() -> None:
    r = ring(6, 64)
    held = [got(r.acquire(1, NOW)) for _ in range(6)]
    for i in (0, 2, 3, 4):
        held[i].release()
    lease = got(r.acquire(3, NOW))
    assert lease.slots == (2, 3, 4)
    assert [(i, len(m)) for i, m in lease.runs(64)] == [(0, 192)]
    lease.release()
    held[5].release()
    apart = got(r.acquire(5, NOW))
    assert [(i, len(m)) for i, m in apart.runs(64)] == [(0, 64), (1, 256)]


def test_a_slot_holds_as_many_pages_as_fit() -> None:
    r = ring(4, 3 * SLOT_ALIGN)
    assert [r.holds(n) for n in (1, SLOT_ALIGN, SLOT_ALIGN + 1, 3 * SLOT_ALIGN)] == [12, 12, 4, 4]
    lease = got(r.acquire(7, NOW, page_bytes=SLOT_ALIGN))
    assert len(lease) == 7 and lease.slots == (0, 1, 2) and r.free == 1
    assert len(got(r.acquire(5, NOW, page_bytes=SLOT_ALIGN, least=1))) == 3, "one slot is left"
    assert r.acquire(1, NOW, page_bytes=1) is None, "slots are not shared"
    lease.release()
    assert len(lease) == 0 and not lease.views() and r.free == 3


def test_least_and_keep_count_pages_and_slots() -> None:
    r = ring(4, 3 * SLOT_ALIGN)
    assert r.acquire(10, NOW, page_bytes=SLOT_ALIGN, keep=1) is None, "10 pages need 4 slots"
    save = got(r.acquire(12, NOW, page_bytes=SLOT_ALIGN, least=9, keep=1))
    assert len(save) == 9 and r.free == 1
    save.release()
    assert r.acquire(13, time.monotonic() + 1e9, page_bytes=SLOT_ALIGN) is None, "can never be met, so declined at once"


def test_neighbouring_pages_are_joined_in_and_across_slots() -> None:
    r = ring(4, 2 * SLOT_ALIGN)
    held = [got(r.acquire(1, NOW)) for _ in range(4)]
    for i in (0, 2, 3):
        held[i].release()
    full = got(r.acquire(5, NOW, page_bytes=SLOT_ALIGN))
    assert full.slots == (0, 2, 3)
    assert full.ranges() == [(0, 2, 0), (2, 3, 4 * SLOT_ALIGN)]
    assert [(i, len(m)) for i, m in full.runs(SLOT_ALIGN)] == [(0, 2 * SLOT_ALIGN), (2, 3 * SLOT_ALIGN)]
    full.release()
    short = got(r.acquire(4, NOW, page_bytes=SLOT_ALIGN - 1))
    assert [(i, len(m)) for i, m in short.runs(SLOT_ALIGN - 1)] == [(i, SLOT_ALIGN - 1) for i in range(4)]
    assert short.ranges() == [(0, 4, 4 * SLOT_ALIGN)], "with the rest of its block, each is as long as its stride"


def test_pages_are_not_joined_across_the_unused_end_of_a_slot() -> None:
    r = ring(2, 5 * SLOT_ALIGN)
    lease = got(r.acquire(4, NOW, page_bytes=2 * SLOT_ALIGN))
    assert lease.ranges() == [(0, 2, 0), (2, 2, 5 * SLOT_ALIGN)]


def test_none_within_the_deadline_changes_nothing_and_is_counted() -> None:
    r = ring(2)
    lease = got(r.acquire(2, NOW))
    assert r.acquire(1, NOW) is None and r.acquire(1, time.monotonic() + 0.01) is None
    assert r.declined == 2 and r.free == 0
    lease.release()
    assert r.acquire(3, time.monotonic() + 1e9) is None, "more slots than the ring has are declined at once"
    assert r.acquire(1, time.monotonic() + 1e9, keep=2) is None
    assert len(got(r.acquire(3, NOW, least=1))) == 2
    r.check()


def test_saves_leave_slots_to_loads() -> None:
    r = ring(4)
    save = got(r.acquire(4, NOW, least=1, keep=1))
    assert len(save) == 3
    assert r.acquire(1, NOW, keep=1) is None
    assert len(got(r.acquire(1, NOW))) == 1


@pytest.mark.parametrize(("n", "least", "keep"), [(0, None, 0), (1, 2, 0), (1, 0, 0), (1, 1, -1)])
def test_bad_requests(n: int, least: int | None, keep: int) -> None:
    with pytest.raises(ConfigError):
        ring().acquire(n, NOW, least=least, keep=keep)
    with pytest.raises(ConfigError):
        StagingRing(0, 1, time.monotonic)


@pytest.mark.parametrize("page_bytes", [0, 4097])
def test_pages_that_no_slot_holds_are_refused(page_bytes: int) -> None:
    with pytest.raises(ConfigError, match="pages of 1 to 4096 bytes"):
        ring().acquire(1, NOW, page_bytes=page_bytes)


def test_first_come_first_served_and_small_ones_do_not_overtake() -> None:
    r, order = ring(2), []
    lease = got(r.acquire(1, NOW))

    def take(name: str, n: int) -> None:
        mine = got(r.acquire(n, time.monotonic() + 30))
        order.append(name)
        mine.release()

    threads = []
    for i, (name, n) in enumerate((("large", 2), ("small", 1))):
        threads.append(threading.Thread(target=take, args=(name, n)))
        threads[-1].start()
        soon(lambda i=i: len(r._queues.get(0, ())) > i)  # type: ignore[misc]
    assert not order
    lease.release()
    for thread in threads:
        thread.join(30)
    assert order == ["large", "small"]


def test_one_slot_and_32_threads_all_end() -> None:
    r, done = ring(1), []

    def work() -> None:
        for _ in range(20):
            lease = r.acquire(1, time.monotonic() + 60)
            view = got(lease).views()[0][:8]
            view[:] = threading.get_ident().to_bytes(8, "little")
            got(lease).move(SlotState.FULL)
            got(lease).move(SlotState.DRAINING)
            assert bytes(view) == threading.get_ident().to_bytes(8, "little")
            got(lease).release()
        done.append(1)

    threads = [threading.Thread(target=work) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(done) == 32 and r.free == 1
    r.check()


def test_close_ends_all_waits() -> None:
    r, answers = ring(1), []
    lease = got(r.acquire(1, NOW))
    waiting = threading.Thread(target=lambda: answers.append(r.acquire(1, time.monotonic() + 1e6)))
    waiting.start()
    soon(lambda: len(r._queues.get(0, ())) == 1)
    r.close()
    waiting.join(30)
    assert answers == [None]
    lease.release()
    assert r.acquire(1, NOW) is None
    r.check()


class RingMachine(RuleBasedStateMachine):
    """Against a model: which lease owns which slots, and in which state; pages of several sizes."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.ring = ring(6, 7 * SLOT_ALIGN)
        self.model: dict[Lease, SlotState] = {}
        self.value = 0
        self.values: dict[Lease, int] = {}
        self.declined = 0

    @rule(
        target=leases, n=st.integers(1, 25), least=st.integers(1, 25), keep=st.integers(0, 3),
        page_bytes=st.sampled_from([5, SLOT_ALIGN, 2 * SLOT_ALIGN - 1, 3 * SLOT_ALIGN, 7 * SLOT_ALIGN]),
    )  # fmt: skip
    def acquire(self, n: int, least: int, keep: int, page_bytes: int) -> Lease | None:
        least = min(n, least)
        per_slot = 7 // -(-page_bytes // SLOT_ALIGN)
        room = max(0, self.ring.free - keep) * per_slot
        lease = self.ring.acquire(n, NOW, page_bytes=page_bytes, least=least, keep=keep)
        if room < least:
            assert lease is None
            self.declined += 1
            return None
        assert lease is not None and len(lease) == min(n, room) and len(lease.slots) == -(-len(lease) // per_slot)
        views = lease.views()
        assert [len(view) for view in views] == [page_bytes] * len(lease)
        for view in views:
            self.value += 1
            view[:] = bytes([self.value % 251]) * page_bytes
        self.model[lease], self.values[lease] = SlotState.FILLING, self.value
        return lease

    @rule(lease=leases, state=st.sampled_from(SlotState))
    def move(self, lease: Lease | None, state: SlotState) -> None:
        if lease is None:
            return
        order = [SlotState.FILLING, SlotState.FULL, SlotState.DRAINING]
        allowed = lease in self.model and (self.model[lease], state) in pairwise(order)
        if allowed:
            lease.move(state)
            self.model[lease] = state
        else:
            with pytest.raises(AssertionError):
                lease.move(state)

    @rule(lease=leases)
    def release(self, lease: Lease | None) -> None:
        if lease is not None:
            lease.release()
            self.model.pop(lease, None)

    @rule(lease=consumes(leases))
    def release_twice(self, lease: Lease | None) -> None:
        self.release(lease)
        self.release(lease)

    @invariant()
    def adds_up(self) -> None:
        self.ring.check()
        want = dict.fromkeys(SlotState, 0)
        for lease, state in self.model.items():
            want[state] += len(lease.slots)
        want[SlotState.FREE] = self.ring.slots - sum(want.values())
        assert self.ring.states() == want and self.ring.declined == self.declined

    @invariant()
    def no_lease_writes_to_a_page_of_another(self) -> None:
        for lease in self.model:
            first = self.values[lease] - len(lease) + 1
            for value, view in enumerate(lease.views(), first):
                assert view == bytes([value % 251]) * len(view)

    @invariant()
    def stretches_and_runs_are_the_pages_in_their_order(self) -> None:
        for lease in self.model:
            starts = [address_of(view) for view in lease.views()]
            runs = lease.runs(lease.stride)
            assert [(i, n * lease.stride) for i, n, _ in lease.ranges()] == [(i, len(m)) for i, m in runs]
            assert starts == [address_of(m) + at for _, m in runs for at in range(0, len(m), lease.stride)]
            assert all((start - starts[0]) % SLOT_ALIGN == 0 for start in starts)


TestRingMachine = RingMachine.TestCase
TestRingMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_disk_is_stalled_once_a_slow_one_would_have_ended_a_write() -> None:
    now = [100.0]
    writes = Writes(lambda: now[0])
    assert writes.stalled_at() == math.inf
    with writes.one(int(SLOW_BYTES_PER_SECOND)):
        assert writes.stalled_at() == 101.0 + STALLED_SECONDS
        now[0] = 100.7
        with writes.one(int(SLOW_BYTES_PER_SECOND // 2)):
            assert writes.stalled_at() == 101.5 + STALLED_SECONDS, "another write begins: none has ended"
            now[0] = 100.9
        assert writes.stalled_at() == pytest.approx(101.9 + STALLED_SECONDS)
    assert writes.stalled_at() == math.inf
