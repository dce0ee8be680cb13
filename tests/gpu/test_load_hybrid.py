"""Models with several groups, their pages of different sizes, on a simulated device."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="the GPU transport needs triton")

import kvfs
from kvfs.gpu.device import Event, Stream
from kvfs.gpu.gpu_io import GpuIO
from kvfs.gpu.lane import CommandBuffer, DmaLane
from kvfs.pages.layout import Cell, Group, Need, PageLayout
from kvfs.transfer import workers
from kvfs.transfer.host_io import HostIO
from kvfs.transfer.staging import Lease
from tests.gpu.simulated import Happened, SimulatedDevice, SimulatedStream
from tests.gpu.test_gpu_io import BLOCK, LATE, NOW, ORDER, PAGE, SECONDS, attach, prompt

CELL = Cell("bf16 k8+v8", 32)
CHUNKS = 12
UNITS = {"full": range(2 * CHUNKS), "window": range(2 * CHUNKS)}


def hybrid(full: int, window: int) -> PageLayout:
    """Groups of so many layers, 2048 bytes of a page each; the window is all but the first tokens of a prompt."""
    layers = tuple(range(full + window))
    return PageLayout.of(
        [
            Group("full", layers[:full], 2, CELL, Need.all(), PAGE),
            Group("window", layers[full:], 2, CELL, Need.window_of(8 * PAGE), PAGE),
        ],
        PAGE,
    )


LAYOUT = hybrid(2, 6)  # pages of 4 KiB and of 12


class Engine:
    """The KV memory of all groups, with random bytes or poison."""

    def __init__(self, layout: PageLayout = LAYOUT, *, seed: int | None = None) -> None:
        self.memory = [np.full((len(g.layers), 2 * CHUNKS, BLOCK, 2, 16), 0xA5A5, "uint16") for g in layout.groups]
        if seed is not None:
            rng = np.random.default_rng(seed)
            for memory in self.memory:
                memory[...] = rng.integers(0, 65536, memory.shape, dtype="uint16")
        self.kvs = [
            kvfs.describe(group, memory, ORDER, layers=list(group.layers))
            for group, memory in zip(layout.groups, self.memory, strict=True)
        ]


class CountingStream(SimulatedStream):
    def copy_in(self, target: int, source: int, nbytes: int) -> None:
        self._device.copies.append((source, nbytes))  # type: ignore[attr-defined]
        super().copy_in(target, source, nbytes)

    def copy_out(self, target: int, source: int, nbytes: int) -> None:
        self._device.copies.append((target, nbytes))  # type: ignore[attr-defined]
        super().copy_out(target, source, nbytes)


class CountingDevice(SimulatedDevice):
    """Notes each copy by DMA: (where on the host, bytes)."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[int, int]] = []

    def stream(self, *, urgent: bool = False) -> Stream:
        return CountingStream(self)

    def ring_copies(self, io: HostIO) -> list[int]:
        assert isinstance(io, GpuIO)
        first, ring = io._gpu_context.ring_address, io.ring
        return [nbytes for address, nbytes in self.copies if 0 <= address - first < ring.slots * ring.slot_bytes]


@pytest.fixture(autouse=True)
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's disk may be slow: no save gives up on it."""
    monkeypatch.setattr(workers, "STALLED_SECONDS", LATE)


@pytest.fixture
def ns(store: kvfs.Store) -> kvfs.Namespace:
    return store.namespace("hybrid", LAYOUT, "1")


def save(ns: kvfs.Namespace, io: HostIO, **how: Any) -> kvfs.TransferResult:
    result = io.save(ns.plan_save(prompt(CHUNKS)), UNITS, NOW, **{"deadline": LATE, **how}).wait(SECONDS)
    assert result is not None
    return result


def check_loaded(source: Engine, target: Engine) -> None:
    """All of the full group, and the last 8 pages of the other one."""
    assert (target.memory[0] == source.memory[0]).all()
    assert (target.memory[1][:, 2 * (CHUNKS - 8) :] == source.memory[1][:, 2 * (CHUNKS - 8) :]).all()
    assert (target.memory[1][:, : 2 * (CHUNKS - 8)] == 0xA5A5).all()


@pytest.mark.parametrize("way", [{}, {"registered_bytes": 0}], ids=["in place", "ring"])
@pytest.mark.parametrize("layers", [(2, 6), (2, 5), (3, 1)], ids=["3 a slot", "2 and a rest", "half a block"])
@pytest.mark.parametrize("slots", [2, 5])
def test_pages_that_share_slots(store: kvfs.Store, layers: tuple[int, int], slots: int, way: dict[str, Any]) -> None:
    layout = hybrid(*layers)
    ns, ring = store.namespace("any", layout, "1"), slots * 2048 * (max(layers) + 1)
    source, target = Engine(layout, seed=1), Engine(layout)
    with attach(ns, *source.kvs, ring_bytes=ring, dirty_bytes=ring) as io:
        assert save(ns, io).pages == 2 * CHUNKS
    with attach(ns, *target.kvs, ring_bytes=ring, **way) as io, ns.match(prompt(CHUNKS)) as match:
        result = io.load(match, UNITS, NOW).wait(SECONDS)
        assert result is not None and result.tokens == CHUNKS * PAGE
        io.ring.check()
    check_loaded(source, target)


def test_neighbours_share_a_copy_for_pages_of_any_size(ns: kvfs.Namespace) -> None:
    device, source, target = CountingDevice(), Engine(seed=1), Engine()
    with attach(ns, *source.kvs, device=device) as io:
        assert save(ns, io).pages == 2 * CHUNKS
        assert device.ring_copies(io) == [CHUNKS * 4096, CHUNKS * 12288]
    device = CountingDevice()
    with attach(ns, *target.kvs, device=device, registered_bytes=0) as io, ns.match(prompt(CHUNKS)) as match:
        result = io.load(match, UNITS, NOW).wait(SECONDS)
        assert result is not None and result.tokens == CHUNKS * PAGE
        assert sorted(device.ring_copies(io)) == [CHUNKS * 4096, 8 * 12288]
    check_loaded(source, target)


class GatedStream(SimulatedStream):
    def record(self, event: Event | None = None) -> Event:
        return event or self._device.link  # type: ignore[attr-defined]


class GatedDevice(SimulatedDevice):
    """What was enqueued counts as under way until ``link`` has happened."""

    class Link(Happened):
        def __init__(self) -> None:
            self.open = threading.Event()
            self.open.set()

        def query(self) -> bool:
            return self.open.is_set()

    def __init__(self) -> None:
        super().__init__()
        self.link = self.Link()

    def stream(self, *, urgent: bool = False) -> Stream:
        return GatedStream(self)


def soon(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_the_next_group_is_gathered_while_the_last_one_is_on_its_way(ns: kvfs.Namespace) -> None:
    device, source, target = GatedDevice(), Engine(seed=1), Engine()
    with attach(ns, *source.kvs, device=device) as io:
        launches = device.launches
        device.link.open.clear()
        try:
            transfer = io.save(ns.plan_save(prompt(CHUNKS)), UNITS, NOW, deadline=LATE)
            soon(lambda: device.launches == launches + 2)
            assert not transfer.source_free.wait(0.05), "the engine's memory may still be read"
        finally:
            device.link.open.set()
        result = transfer.wait(SECONDS)
        assert result is not None and result.pages == 2 * CHUNKS
    with attach(ns, *target.kvs) as io, ns.match(prompt(CHUNKS)) as match:
        assert io.load(match, UNITS, NOW).wait(SECONDS) is not None
    check_loaded(source, target)


def test_a_cancellation_waits_for_the_batches_of_all_groups(ns: kvfs.Namespace) -> None:
    device = GatedDevice()
    with attach(ns, *Engine(seed=1).kvs, device=device) as io:
        launches = device.launches
        device.link.open.clear()
        try:
            transfer = io.save(ns.plan_save(prompt(CHUNKS)), UNITS, NOW, deadline=LATE)
            soon(lambda: device.launches == launches + 2)
            assert not transfer.cancel(0.05) and not transfer.source_free.is_set()
        finally:
            device.link.open.set()
        assert transfer.cancel(SECONDS) and transfer.source_free.is_set()
        assert transfer.state is kvfs.TransferState.CANCELLED
        soon(lambda: io.ring.free == io.ring.slots)
    with ns.match(prompt(CHUNKS)) as match:
        assert match.tokens == 0


def test_a_decline_in_the_group_of_full_attention_ends_the_save(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimulatedDevice()
    with attach(ns, *Engine(seed=1).kvs, device=device) as io:
        launches, acquire = device.launches, io.ring.acquire

        def none_for_full(n: int, deadline: float, *, page_bytes: int, **how: Any) -> Lease | None:
            return None if page_bytes == 4096 else acquire(n, deadline, page_bytes=page_bytes, **how)

        monkeypatch.setattr(io.ring, "acquire", none_for_full)
        result = save(ns, io)
        assert (result.pages, result.declined, result.reason) == (0, 2 * CHUNKS, "ring")
        assert device.launches == launches


def test_a_failing_launch_in_the_second_group_leaves_nothing_under_way(ns: kvfs.Namespace) -> None:
    device = SimulatedDevice()
    with attach(ns, *Engine(seed=1).kvs, device=device) as io:
        device.fails_at = device.launches + 2
        transfer = io.save(ns.plan_save(prompt(CHUNKS)), UNITS, NOW, deadline=LATE)
        assert transfer.done.wait(SECONDS) and transfer.state is kvfs.TransferState.FAILED
        soon(lambda: io.ring.free == io.ring.slots)
        io.ring.check()
        assert save(ns, io).declined == 0


def test_one_command_buffer_has_room_for_all_groups(store: kvfs.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each page is a batch of its own."""
    monkeypatch.setattr(DmaLane, "commands", lambda lane, nbytes: CommandBuffer(lane.device, nbytes))
    layout = hybrid(3, 3)
    ns = store.namespace("even", layout, "1")
    with attach(ns, *Engine(layout, seed=1).kvs, ring_bytes=8192) as io:
        assert io.ring.slots == 1 and save(ns, io).pages == 2 * CHUNKS
