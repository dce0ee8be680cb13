"""Saves and loads next to requests that generate tokens: a kernel copies, where the device and the way allow it."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="the GPU transport needs triton")

import kvfs
from kvfs.gpu import load
from kvfs.gpu.device import IN_PROGRAMS, OUT_PROGRAMS, Stream
from kvfs.gpu.resources import POLL_SECONDS
from kvfs.kernels.work_list import Work
from tests.gpu.simulated import SimulatedDevice, SimulatedStream
from tests.gpu.test_gpu_io import LAYOUT, NOW, SECONDS, Engine, attach, prompt, saved

CHUNKS = 4
UNITS = range(2 * CHUNKS)


class NotingStream(SimulatedStream):
    def copy_in(self, target: int, source: int, nbytes: int) -> None:
        self._device.by_engine["in"] += nbytes  # type: ignore[attr-defined]
        super().copy_in(target, source, nbytes)

    def copy_out(self, target: int, source: int, nbytes: int) -> None:
        self._device.by_engine["out"] += nbytes  # type: ignore[attr-defined]
        super().copy_out(target, source, nbytes)

    def copy_pieces(self, work: Work, *, programs: int) -> None:
        if work.host[0]:
            self._device.by_kernel.append(programs)  # type: ignore[attr-defined]
        super().copy_pieces(work, programs=programs)


class NotingDevice(SimulatedDevice):
    """Notes bytes of the copy engine, and the programs of kernels that copied in their place."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.by_engine, self.by_kernel = {"in": 0, "out": 0}, list[int]()

    def stream(self, *, urgent: bool = False) -> Stream:
        return NotingStream(self)

    def taken(self) -> tuple[bool, bool, set[int]]:
        """Whether the copy engine moved pages in, and out; the programs of kernels. Since the last call."""
        found = (
            self.by_engine["in"] >= LAYOUT.page_bytes,
            self.by_engine["out"] >= LAYOUT.page_bytes,
            set(self.by_kernel),
        )
        self.by_engine, self.by_kernel = {"in": 0, "out": 0}, []
        return found


def save_and_load(ns: kvfs.Namespace, device: NotingDevice, *, gentle: bool, **options: Any) -> list[Any]:
    """What the save and the load took; the same bytes arrive."""
    source, target, found = Engine(seed=1), Engine(), []
    with attach(ns, source.kv, device=device, **options) as io:
        device.taken()
        assert io.save(ns.plan_save(prompt(CHUNKS)), UNITS, NOW, SECONDS, gentle=gentle).wait(SECONDS)
        found.append(device.taken())
    with attach(ns, target.kv, device=device, **options) as io, ns.match(prompt(CHUNKS)) as match:
        io.warm(match)
        device.taken()
        result = io.load(match, UNITS, NOW, SECONDS, gentle=gentle).wait(SECONDS)
        found.append(device.taken())
    assert result is not None and result.pages == CHUNKS
    assert target.tokens(UNITS) == source.tokens(UNITS)
    return found


@pytest.mark.parametrize("interpreted", [False, True])
def test_a_kernel_copies_pages_next_to_requests_that_generate_tokens(ns: kvfs.Namespace, interpreted: bool) -> None:
    device = NotingDevice(interpreted=interpreted)
    assert save_and_load(ns, device, gentle=True) == [(False, False, {OUT_PROGRAMS}), (False, False, {IN_PROGRAMS})]


def test_the_copy_engine_copies_otherwise(ns: kvfs.Namespace) -> None:
    assert save_and_load(ns, NotingDevice(), gentle=False) == [(False, True, set()), (True, False, set())]


def test_the_copy_engine_copies_where_kernels_cannot_use_the_addresses_of_the_host(ns: kvfs.Namespace) -> None:
    device = NotingDevice()
    device.reaches_host = False
    assert save_and_load(ns, device, gentle=True) == [(False, True, set()), (True, False, set())]


def test_the_copy_engine_copies_where_triton_does_not_work(ns: kvfs.Namespace) -> None:
    device = NotingDevice(triton=False)
    save, back = save_and_load(ns, device, gentle=True)
    assert save[1:] == (True, set()) and (back[0], back[2]) == (True, set())


def test_pages_that_are_not_registered_come_through_the_ring_by_the_copy_engine(ns: kvfs.Namespace) -> None:
    save, back = save_and_load(ns, NotingDevice(), gentle=True, registered_bytes=0)
    assert save == (False, False, {OUT_PROGRAMS}) and back == (True, False, set())


@pytest.mark.parametrize(("transport", "registers"), [("in_place", False), ("arena", True)])
def test_a_gentle_load_registers_nothing_but_fills_blocks_that_are_pinned(
    ns: kvfs.Namespace, transport: str, registers: bool
) -> None:
    saved(ns, CHUNKS)
    target = Engine()
    with attach(ns, target.kv, transport=transport) as io, ns.match(prompt(CHUNKS)) as match:
        regions = io._gpu_context.regions
        assert regions is not None
        if transport == "arena":  # as the background does, once loads have lacked blocks
            assert io.load(match, UNITS, NOW, SECONDS).wait(SECONDS)
            regions.sweep(())
        for gentle in (True, False):
            result = io.load(match, UNITS, NOW, SECONDS, gentle=gentle).wait(SECONDS)
            assert result is not None and result.pages == CHUNKS
            assert bool(regions.nbytes) == (registers or not gentle)


def test_reads_next_to_requests_that_generate_tokens_are_few_and_large(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(ns, CHUNKS)
    page, reads = LAYOUT.page_bytes, list[int]()
    monkeypatch.setattr(load, "QUICK", load.QUICK._replace(read_bytes=page))
    monkeypatch.setattr(load, "GENTLE", load.GENTLE._replace(read_bytes=CHUNKS * page))
    read = ns._c.segments.read
    monkeypatch.setattr(
        ns._c.segments, "read", lambda held, into, *at, **how: (reads.append(len(into)), read(held, into, *at, **how))
    )
    with attach(ns, Engine().kv, registered_bytes=0) as io, ns.match(prompt(CHUNKS)) as match:
        for gentle, sizes in ((False, [page] * CHUNKS), (True, [CHUNKS * page])):
            reads.clear()
            assert io.load(match, UNITS, NOW, SECONDS, gentle=gentle).wait(SECONDS)
            assert reads == sizes


class TenthTime:
    """An event that has happened when it is asked for the tenth time."""

    def __init__(self) -> None:
        self.left = 10

    def query(self) -> bool:
        self.left -= 1
        return self.left <= 0


@pytest.mark.parametrize(("gentle", "seconds"), [(False, POLL_SECONDS), (True, 500e-6)])
def test_a_gentle_load_seldom_asks_for_events(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch, gentle: bool, seconds: float
) -> None:
    saved(ns, CHUNKS)
    slept = list[float]()
    with attach(ns, Engine().kv) as io, ns.match(prompt(CHUNKS)) as match:
        monkeypatch.setattr(ns._c.files, "sleep", slept.append)
        assert io.load(match, UNITS, TenthTime(), SECONDS, gentle=gentle).wait(SECONDS)
    assert {s for s in slept if s in (POLL_SECONDS, 500e-6)} == {seconds}
