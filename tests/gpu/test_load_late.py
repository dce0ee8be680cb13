"""Transfers over a device that is late: enqueued work happens at queries and waits, the streams in any order.

Copies read host memory when they happen, as those of a GPU do: memory that was released, or reused, too early shows.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton", reason="the GPU transport needs triton")

import kvfs
from kvfs.gpu import batches, lane
from kvfs.gpu import page_source as gpusource
from kvfs.gpu.device import Event
from kvfs.kernels.driver import CudaError
from kvfs.kernels.work_list import Shape, Work
from tests.gpu.simulated import SimulatedDevice, SimulatedStream
from tests.gpu.test_gpu_io import LATE, NOW, PAGE, SECONDS, Engine, attach, prompt

CHUNKS = 8
STEPS = 3  # of enqueued work at each query, at most


class Recorded:
    """An event, which may be recorded several times."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self.recorded = self.happened = 0

    def query(self) -> bool:
        return self._device.steps(STEPS, lambda: self.happened >= self.recorded)


class LateStream(SimulatedStream):
    def __init__(self, device: LateDevice) -> None:
        super().__init__(device)
        self.late, self.calls = device, deque[Callable[[], bool]]()

    def _later(self, call: Callable[..., None], *args: Any, **options: Any) -> None:
        def run() -> bool:
            call(*args, **options)
            return True

        with self.late.lock:
            self.calls.append(run)

    def copy_in(self, target: int, source: int, nbytes: int) -> None:
        self._later(super().copy_in, target, source, nbytes)

    def push(self, target: int, source: int, nbytes: int) -> None:
        data = ctypes.string_at(source, nbytes)
        self._device.check_own(target, nbytes)
        self._later(ctypes.memmove, target, data, nbytes)

    def copy_out(self, target: int, source: int, nbytes: int) -> None:
        self._later(super().copy_out, target, source, nbytes)

    def copy_pieces(self, work: Work, *, programs: int) -> None:
        self._later(super().copy_pieces, work, programs=programs)

    def event(self) -> Event:
        return Recorded(self.late)

    def record(self, event: Any = None) -> Event:
        event = event or Recorded(self.late)
        with self.late.lock:
            event.recorded += 1
            number = event.recorded

            def happens() -> bool:
                event.happened = max(event.happened, number)
                return True

            self.calls.append(happens)
        return event  # type: ignore[no-any-return]

    def after(self, event: Any) -> None:
        with self.late.lock:
            number = event.recorded  # what is recorded later is not waited for
            self.calls.append(lambda: event.happened >= number)

    def gather(self, work: Work, shape: Shape) -> None:
        self._later(super().gather, work, shape)

    def scatter(self, work: Work, shape: Shape, *, check: bool) -> None:
        self.late.scatters += 1
        if self.late.scatters == self.late.refuses_at:
            raise CudaError("launch: out of resources")
        self._later(super().scatter, work, shape, check=check)


class LateDevice(SimulatedDevice):
    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(**options)
        self.lock, self.random = threading.RLock(), random.Random(seed)
        self.streams: list[LateStream] = []
        self.errors: list[BaseException] = []
        self.scatters = 0
        self.refuses_at = -1

    def stream(self, *, urgent: bool = False) -> Any:
        self.streams.append(LateStream(self))
        return self.streams[-1]

    def steps(self, most: int, until: Callable[[], bool]) -> bool:
        """Do some of the enqueued work; whether ``until`` holds."""
        with self.lock:
            for _ in range(self.random.randint(0, most) if most <= STEPS else most):
                ready = [stream for stream in self.streams if stream.calls]
                if until() or not ready:
                    break
                stream = self.random.choice(ready)
                try:
                    if stream.calls[0]():
                        stream.calls.popleft()
                except BaseException as exc:
                    self.errors.append(exc)
                    stream.calls.popleft()
            return until()


@pytest.fixture(params=[1, 2])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    monkeypatch.setattr(lane, "QUEUED", 3)
    monkeypatch.setattr(batches, "BATCH_BYTES_MIN", 1)
    return LateDevice(request.param)


def stored(ns: kvfs.Namespace) -> Engine:
    engine = Engine(seed=1)
    with attach(ns, engine.kv) as io:
        result = io.save(ns.plan_save(prompt(CHUNKS)), range(2 * CHUNKS), NOW, deadline=LATE).wait(SECONDS)
    assert result is not None and result.pages == CHUNKS, result
    return engine


class SlowCopies(LateDevice):
    """The stream that was made last, the one of kernels, goes first: copies happen when it waits for them."""

    def steps(self, most: int, until: Callable[[], bool]) -> bool:
        with self.lock:
            while not until():
                moved = (stream for stream in reversed(self.streams) if stream.calls and stream.calls[0]())
                stream = next(moved, None)
                if stream is None:
                    break
                stream.calls.popleft()
            return until()


WAYS: dict[str, dict[str, Any]] = {
    "in_place": {}, "arena": {"transport": "arena"},
    "small ring": {"registered_bytes": 0, "ring_bytes": 4 * 8192, "dirty_bytes": 4 * 8192},
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layerwise", [False, True])
def test_loads_are_right_in_any_order_of_streams(
    ns: kvfs.Namespace, device: LateDevice, way: str, layerwise: bool
) -> None:
    source, target = stored(ns), Engine()
    with attach(ns, target.kv, device=device, scratch_bytes="4KiB", **WAYS[way]) as io:
        for _ in range(2):
            target.memory[...] = 0xA5A5
            with ns.match(prompt(CHUNKS)) as match:
                result = io.load(match, range(2 * CHUNKS), NOW, layerwise=layerwise).wait(SECONDS)
                assert result is not None and result.tokens == CHUNKS * PAGE, result
            assert target.tokens(range(2 * CHUNKS)) == source.tokens(range(2 * CHUNKS))
        assert io.ring.free == io.ring.slots
    assert not device.errors and not device.registered


@pytest.mark.parametrize("way", ["in_place", "small ring"])
def test_saves_are_right_in_any_order_of_streams(ns: kvfs.Namespace, device: LateDevice, way: str) -> None:
    source, target = Engine(seed=1), Engine()
    with attach(ns, source.kv, device=device, scratch_bytes="4KiB", **WAYS[way]) as io:
        for first in (0, 1000):
            transfer = io.save(ns.plan_save(prompt(CHUNKS, first)), range(2 * CHUNKS), NOW, deadline=LATE)
            assert transfer.source_free.wait(SECONDS)
            held = source.tokens(range(2 * CHUNKS))
            source.memory[...] = 0x5A5A  # the engine reuses it
            result = transfer.wait(SECONDS)
            assert result is not None and result.pages == CHUNKS, result
            with attach(ns, target.kv) as other, ns.match(prompt(CHUNKS, first)) as match:
                assert other.load(match, range(2 * CHUNKS), NOW).wait(SECONDS)
            assert target.tokens(range(2 * CHUNKS)) == held
    assert not device.errors and not device.registered


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layerwise", [False, True])
def test_a_cancelled_load_moves_nothing_after_the_cancel(
    ns: kvfs.Namespace, device: LateDevice, way: str, layerwise: bool
) -> None:
    stored(ns)
    target = Engine()
    with attach(ns, target.kv, device=device, scratch_bytes="4KiB", **WAYS[way]) as io:
        for turn in range(4):
            with ns.match(prompt(CHUNKS)) as match:
                transfer = io.load(match, range(2 * CHUNKS), NOW, layerwise=layerwise)
                threading.Event().wait(0.01 * turn)
                assert transfer.cancel(SECONDS)
            assert not any(stream.calls for stream in device.streams)
            assert io.ring.free == io.ring.slots
    assert not device.errors and not device.registered


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("damage", ["launch", "tables"])
def test_a_load_that_fails_releases_nothing_that_copies_still_read(
    ns: kvfs.Namespace, device: LateDevice, monkeypatch: pytest.MonkeyPatch, way: str, layerwise: bool, damage: str
) -> None:
    stored(ns)
    target = Engine()
    io = attach(ns, target.kv, device=device, scratch_bytes="4KiB", **WAYS[way])
    with ns.match(prompt(CHUNKS)) as match:
        if damage == "launch":
            device.refuses_at = device.scatters + 3
        else:
            monkeypatch.setattr(gpusource, "root_of", lambda _: bytes(16))
        result = io.load(match, range(2 * CHUNKS), NOW, layerwise=layerwise).wait(SECONDS)
        assert result is not None and result.reason == {"launch": "error", "tables": "unreadable"}[damage]
        io.close()
    assert not any(stream.calls for stream in device.streams)
    assert io.ring.free == io.ring.slots and not ns._c.pinned.mine
    assert not device.errors and not device.registered
    if damage == "tables":
        assert set(target.tokens(range(2 * CHUNKS))) == {0xA5}


def test_pages_whose_flags_cannot_be_waited_for_are_not_loaded(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(ns)
    late, refused = LateDevice(1), list[int]()
    with attach(ns, Engine().kv, device=late) as io, ns.match(prompt(CHUNKS)) as match:
        kernels, record_now = io._gpu_context.loads.kernels, LateStream.record

        def record(stream: LateStream, event: Any = None) -> Event:
            if stream is kernels and event is None and not refused:
                refused.append(1)
                raise CudaError("record: out of memory")
            return record_now(stream, event)

        monkeypatch.setattr(LateStream, "record", record)
        result = io.load(match, range(2 * CHUNKS), NOW).wait(SECONDS)
        assert refused and result is not None and (result.pages, result.reason) == (0, "error")
    assert not late.errors and not late.registered


@pytest.mark.parametrize("way", WAYS)
def test_a_load_waits_for_the_copies_of_pages_that_it_refuses(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """No kernel is launched for these; their source may be released as soon as the load has ended."""
    stored(ns)
    late = SlowCopies(1)
    monkeypatch.setattr(gpusource, "root_of", lambda _: bytes(16))
    with attach(ns, Engine().kv, device=late, **WAYS[way]) as io, ns.match(prompt(CHUNKS)) as match:
        result = io.load(match, range(2 * CHUNKS), NOW).wait(SECONDS)
        assert result is not None and result.reason == "unreadable"
        assert not any(stream.calls for stream in late.streams)
