"""Models with several groups, their pages of different sizes, on a simulated device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="the GPU transport needs triton")

import kvfs
from kvfs import hostjobs
from kvfs.gpu import Stream
from kvfs.gpuio import GpuIO
from kvfs.layout import Cell, Group, Need, PageLayout
from tests.kernels.simulated import SimulatedDevice, SimulatedStream
from tests.kernels.test_gpu_transport import BLOCK, LATE, NOW, ORDER, PAGE, SECONDS, attach, prompt

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

    def stream(self) -> Stream:
        return CountingStream(self)

    def ring_copies(self, io: GpuIO) -> list[int]:
        first, ring = io._gpu_desk.ring_address, io.ring
        return [nbytes for address, nbytes in self.copies if 0 <= address - first < ring.slots * ring.slot_bytes]


@pytest.fixture(autouse=True)
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's disk may be slow: no save gives up on it."""
    monkeypatch.setattr(hostjobs, "STALLED_SECONDS", LATE)


@pytest.fixture
def store(store_path: Path) -> Iterator[kvfs.Store]:
    with kvfs.open(store_path, capacity="64MiB") as opened:
        yield opened


@pytest.fixture
def ns(store: kvfs.Store) -> kvfs.Namespace:
    return store.namespace("hybrid", LAYOUT, "1")


def save(ns: kvfs.Namespace, io: GpuIO, **how: Any) -> kvfs.TransferResult:
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


def test_neighbours_go_in_one_copy_whatever_the_size_of_their_pages(ns: kvfs.Namespace) -> None:
    device, source, target = CountingDevice(), Engine(seed=1), Engine()
    with attach(ns, *source.kvs, device=device) as io:
        assert save(ns, io).pages == 2 * CHUNKS
        assert device.ring_copies(io) == [CHUNKS * 4096, 5 * 12288, 7 * 12288]
    device = CountingDevice()
    with attach(ns, *target.kvs, device=device, registered_bytes=0) as io, ns.match(prompt(CHUNKS)) as match:
        result = io.load(match, UNITS, NOW).wait(SECONDS)
        assert result is not None and result.tokens == CHUNKS * PAGE
        assert sorted(device.ring_copies(io)) == [12288, CHUNKS * 4096, 7 * 12288], "as they were saved"
    check_loaded(source, target)
