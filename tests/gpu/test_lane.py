"""A driver that is late: few batches are enqueued at once, and the driver waits for no disk under its lock."""

from __future__ import annotations

import errno
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="the GPU transport needs triton")

import kvfs
from kvfs.gpu import batches, lane
from kvfs.gpu.batches import Batches
from kvfs.gpu.device import Event, Stream
from kvfs.gpu.lane import DmaLane
from kvfs.gpu.registration import FullError, PinnedBudget, RegisteredMaps
from kvfs.system.files import HUGE_BYTES, BareMap, Files
from tests.gpu.simulated import SimulatedDevice, SimulatedStream
from tests.gpu.test_gpu_io import LATE, NOW, PAGE, SECONDS, Engine, attach, prompt, saved

CHUNKS = 8


class Later:
    """An event that happens once it has been queried often enough, or is waited for."""

    def __init__(self) -> None:
        self.left = 0.0

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0


class LateStream(SimulatedStream):
    def event(self) -> Event:
        return Later()

    def record(self, event: Any = None) -> Event:
        event = event or Later()
        event.left = self._device.asks  # type: ignore[attr-defined]
        return event  # type: ignore[no-any-return]

    def synchronize(self) -> None:
        return None


class LateDevice(SimulatedDevice):
    def __init__(self, asks: float = 3) -> None:
        super().__init__()
        self.asks = asks

    def stream(self, *, urgent: bool = False) -> Stream:
        return LateStream(self)


@pytest.fixture(autouse=True)
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane, "QUEUED", 2)


def test_a_lane_knows_which_batch_has_to_have_ended() -> None:
    device = LateDevice()
    lane = DmaLane(device, 4096)
    ends = []
    for number in range(5):
        due = lane.due()
        assert (due is None) == (number < 2)
        if due is not None:
            assert due is ends[number - 2], "the oldest of two"
        slot = lane.slice(256, lane.dma)
        assert slot is not None
        lane.finished(slot, lane.kernels)
        ends.append(lane._ends[number % 2])


def test_a_batch_of_many_calls_counts_for_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane, "QUEUED", 8)
    monkeypatch.setattr(lane, "CALLS", 10)
    tested = DmaLane(LateDevice(), 1 << 20)
    for number, calls, last in [(1, 6, None), (2, 4, None), (3, 1, 0), (4, 9, 1), (5, 30, 4), (6, 2, 4), (7, 8, 4)]:
        slot = tested.slice(256, tested.dma)
        assert slot is not None
        tested.finished(slot, tested.kernels, calls)
        due = tested.due()
        assert due is (None if last is None else tested._ends[last]), number


def test_scattered_pages_come_in_batches_of_few_copies(ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target, sent = Engine(seed=1), Engine(), []
    with attach(ns, source.kv) as io:  # every second page, then the rest: no neighbours of the prompt are side by side
        plan = ns.plan_save(prompt(CHUNKS))
        for parity in (0, 1):
            some = replace(plan, missing={name: chunks[parity::2] for name, chunks in plan.missing.items()})
            assert io.save(some, range(2 * CHUNKS), NOW, deadline=LATE).wait(SECONDS)
    copy = Batches._copy

    def watched(self: Batches, batch: Any, *args: Any) -> Any:
        sent.append(len(batch))
        return copy(self, batch, *args)

    monkeypatch.setattr(Batches, "_copy", watched)
    monkeypatch.setattr(batches, "RUNS_MAX", 3)
    for layerwise in (False, True):
        with attach(ns, target.kv, device=LateDevice()) as io, ns.match(prompt(CHUNKS)) as match:
            io.warm(match)
            result = io.load(match, range(2 * CHUNKS), NOW, layerwise=layerwise).wait(SECONDS)
            assert result is not None and result.tokens == CHUNKS * PAGE, result
        assert target.tokens(range(2 * CHUNKS)) == source.tokens(range(2 * CHUNKS))
    assert max(sent) == 3


@pytest.mark.parametrize("layerwise", [False, True])
def test_few_batches_are_under_way(ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch, layerwise: bool) -> None:
    source, target, seen = saved(ns, CHUNKS), Engine(), []
    copy = Batches._copy

    def watched(self: Batches, *args: Any) -> Any:
        due = self._lane.due()
        seen.append(due is None or due.left < 0)  # type: ignore[attr-defined]
        return copy(self, *args)

    monkeypatch.setattr(Batches, "_copy", watched)
    with attach(ns, target.kv, device=LateDevice(), scratch_bytes=1) as io, ns.match(prompt(CHUNKS)) as match:
        io.warm(match)
        result = io.load(match, range(2 * CHUNKS), NOW, layerwise=layerwise).wait(SECONDS)
        assert result is not None and result.tokens == CHUNKS * PAGE, result
    assert target.tokens(range(2 * CHUNKS)) == source.tokens(range(2 * CHUNKS))
    assert all(seen) and len(seen) >= CHUNKS / 2


@pytest.mark.parametrize("end", ["cancel", "deadline"])
def test_a_load_that_waits_for_scratch_can_be_ended(ns: kvfs.Namespace, end: str) -> None:
    saved(ns, CHUNKS)
    target, device = Engine(), LateDevice()
    with attach(ns, target.kv, device=device, scratch_bytes=1) as io, ns.match(prompt(CHUNKS)) as match:
        io.warm(match)
        device.asks = float("inf")
        lane = io._gpu_context.loads
        transfer = io.load(match, range(2 * CHUNKS), NOW, deadline=SECONDS if end == "cancel" else 0.5)
        stop = time.monotonic() + SECONDS
        while lane.due() is None:
            assert time.monotonic() < stop
            time.sleep(0.001)
        device.asks = 3
        if end == "cancel":
            assert transfer.cancel(SECONDS)
        result = transfer.wait(SECONDS)
        assert result is not None and result.tokens < CHUNKS * PAGE
        assert result.reason == {"cancel": "cancelled", "deadline": "deadline"}[end]


def test_layers_that_have_arrived_are_announced_while_others_wait_for_scratch(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, device = saved(ns, CHUNKS), Engine(), LateDevice(0)
    stuck, goes_on, calls = threading.Event(), threading.Event(), []

    def due(self: DmaLane) -> Event | None:
        if self._finished == 2:
            calls.append(self)  # the end of the first band is launched behind the first of them
        if len(calls) < 2:
            return None
        stuck.set()
        return SimpleNamespace(query=goes_on.is_set)  # type: ignore[return-value]

    with attach(ns, target.kv, device=device, scratch_bytes=1) as io, ns.match(prompt(CHUNKS)) as match:
        io.warm(match)
        monkeypatch.setattr(DmaLane, "due", due)
        transfer = io.load(match, range(2 * CHUNKS), NOW, layerwise=True)
        try:
            assert stuck.wait(SECONDS)
            assert transfer.layer_ready(0).wait(SECONDS), "the first layers wait for the last"
            assert not transfer.done.is_set()
        finally:
            goes_on.set()
        result = transfer.wait(SECONDS)
        assert result is not None and result.tokens == CHUNKS * PAGE, result
    assert target.tokens(range(2 * CHUNKS)) == source.tokens(range(2 * CHUNKS))


class SparseFiles(Files):
    """A page cache that lacks the second and the last huge page of a file."""

    def __init__(self) -> None:
        self.read_in: list[tuple[int, int]] = []
        self.code = self.base = 0

    def cached_bytes(self, fd: int, offset: int, nbytes: int) -> int | None:
        if nbytes > HUGE_BYTES:
            return nbytes - 2
        return nbytes - (offset // HUGE_BYTES in (1, 3))

    def map_bare(self, fd: int, length: int, offset: int) -> BareMap:
        made = super().map_bare(fd, length, offset)
        self.base = made.address
        return made

    def populate_at(self, address: int, nbytes: int) -> None:
        self.read_in.append((address - self.base, nbytes))
        if self.code:
            raise OSError(self.code, os.strerror(self.code))


@pytest.mark.parametrize("code", [0, errno.EIO])
def test_bytes_that_the_page_cache_lacks_are_read_before_they_are_registered(
    store: kvfs.Store, tmp_path: Path, code: int
) -> None:
    files, device = SparseFiles(), SimulatedDevice()
    files.code = code
    maps = RegisteredMaps(device, files, PinnedBudget(store._shared.c.pinned, files, 1 << 40))
    (tmp_path / "file").touch()
    os.truncate(tmp_path / "file", 4 * HUGE_BYTES)
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        held: Any = SimpleNamespace(fd=fd, mappable=True)
        made = maps.make(held, 0, 4 * HUGE_BYTES - 4096, ahead=True)
        lacking = [(HUGE_BYTES, HUGE_BYTES), (3 * HUGE_BYTES, HUGE_BYTES - 4096)]
        if code:
            assert made is None and files.read_in == lacking[:1]
        else:
            assert made is not None and files.read_in == lacking
            maps.free(made)
    finally:
        os.close(fd)
    assert not device.registered and store._shared.c.pinned.mine == 0 and maps.failed == 0


class HalfCachedFiles(Files):
    """A page cache that holds every second huge page."""

    def cached_bytes(self, fd: int, offset: int, nbytes: int) -> int | None:
        return nbytes // 2 if nbytes > HUGE_BYTES else nbytes * (offset // HUGE_BYTES % 2)


def test_a_region_stays_one_map_of_the_process(store: kvfs.Store, tmp_path: Path) -> None:
    """A process may have 65,530 maps, and the engine needs some."""
    files, device, size = HalfCachedFiles(), SimulatedDevice(), 16 * HUGE_BYTES
    maps = RegisteredMaps(device, files, PinnedBudget(store._shared.c.pinned, files, 1 << 40))
    path = tmp_path / "file"
    path.touch()
    os.truncate(path, size)
    fd = os.open(path, os.O_RDONLY)
    try:
        held: Any = SimpleNamespace(fd=fd, mappable=True)
        made = maps.make(held, 0, size, ahead=True)
        assert made is not None
        with open("/proc/self/maps") as known:
            assert sum(str(path) in line for line in known) == 1
        maps.free(made)
    finally:
        os.close(fd)


def test_nothing_is_read_for_a_region_that_exceeds_the_budget(store: kvfs.Store, tmp_path: Path) -> None:
    """A rank that starts when others have spent the budget would read for its whole deadline, in order to drop it."""
    files = SparseFiles()
    maps = RegisteredMaps(SimulatedDevice(), files, PinnedBudget(store._shared.c.pinned, files, HUGE_BYTES))
    (tmp_path / "file").touch()
    os.truncate(tmp_path / "file", 4 * HUGE_BYTES)
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        held: Any = SimpleNamespace(fd=fd, mappable=True)
        with pytest.raises(FullError):
            maps.make(held, 0, 4 * HUGE_BYTES, ahead=True)
        assert not files.read_in
        assert maps.make(held, 4 * HUGE_BYTES, HUGE_BYTES, ahead=True) is None, "behind the end of the file"
    finally:
        os.close(fd)
    assert store._shared.c.pinned.mine == 0
