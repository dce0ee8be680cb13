"""Loads that follow one another: the next is enqueued while the last ones move, and waits only for its own copies."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the GPU transport needs triton")

import kvfs
from kvfs import PageOutcome, TransferState
from kvfs.gpu import batches, lane
from kvfs.gpu.page_source import PageSource
from kvfs.gpu.resources import UNDER_WAY
from kvfs.kernels.driver import CudaError
from kvfs.read.plan import Run
from tests.gpu.simulated import SimulatedDevice
from tests.gpu.test_gpu_io import LATE, NOW, PAGE, SECONDS, Engine, attach, prompt, saved
from tests.gpu.test_load_late import WAYS, LateDevice, Recorded
from tests.stores import segment_files

CHUNKS = 2
BLOCKS = 2 * CHUNKS  # of a prompt
PROMPTS = 5


class Halting(LateDevice):
    """Enqueued work happens after ``go``, all of it at the next query."""

    def __init__(self) -> None:
        super().__init__(seed=1)
        self.go = threading.Event()
        self.go.set()

    def halt(self) -> None:
        self.go.clear()
        self.scatters = 0

    def launched(self, scatters: int) -> None:
        """Wait until so many of the loads, one batch each, are enqueued."""
        end = time.monotonic() + SECONDS
        while self.scatters < scatters:
            assert time.monotonic() < end, self.scatters
            time.sleep(0.001)

    def steps(self, most: int, until: Any) -> bool:
        if self.go.is_set():
            super().steps(1 << 30, lambda: False)
        return bool(until())


def several(ns: kvfs.Namespace) -> Engine:
    """Prompts in the store; all of their KV in one engine, one prompt behind the other."""
    whole = Engine(seed=1)
    with attach(ns, whole.kv) as io:
        for number in range(PROMPTS):
            units = range(BLOCKS * number, BLOCKS * (number + 1))
            result = io.save(ns.plan_save(prompt(CHUNKS, 1000 * number)), units, NOW, deadline=LATE).wait(SECONDS)
            assert result is not None and result.pages == CHUNKS
    return whole


def units_of(number: int) -> range:
    return range(BLOCKS * number, BLOCKS * (number + 1))


def start(io: Any, ns: kvfs.Namespace, number: int, **options: Any) -> kvfs.Transfer:
    with ns.match(prompt(CHUNKS, 1000 * number)) as match:
        assert match.tokens == CHUNKS * PAGE
        transfer: kvfs.Transfer = io.load(match, units_of(number), NOW, deadline=LATE, **options)
        return transfer


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(3))
def test_loads_that_overlap_are_right_in_any_order_of_streams(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch, way: str, seed: int
) -> None:
    monkeypatch.setattr(lane, "QUEUED", 3)
    monkeypatch.setattr(batches, "BATCH_BYTES_MIN", 1)
    source, target, device, chance = several(ns), Engine(), LateDevice(seed), random.Random(seed)
    with attach(ns, target.kv, device=device, scratch_bytes="4KiB", **WAYS[way]) as io:
        for _ in range(2):
            target.memory[...] = 0xA5A5
            numbers = chance.sample(range(PROMPTS), PROMPTS)
            transfers = [(number, start(io, ns, number, layerwise=chance.random() < 0.5)) for number in numbers]
            dropped = chance.choice(transfers)[1]
            assert dropped.cancel(SECONDS)
            for number, transfer in transfers:
                result = transfer.wait(SECONDS)
                assert result is not None
                if transfer is not dropped:
                    assert result.tokens == CHUNKS * PAGE, result
                    assert target.tokens(units_of(number)) == source.tokens(units_of(number))
        assert io.ring.free == io.ring.slots
    assert not device.errors and not device.registered and not ns._c.pinned.mine


def test_the_next_load_is_enqueued_before_the_last_one_has_arrived(ns: kvfs.Namespace) -> None:
    source, target, device = several(ns), Engine(), Halting()
    with attach(ns, target.kv, device=device) as io:
        device.halt()
        transfers = [start(io, ns, number) for number in range(PROMPTS)]
        device.launched(UNDER_WAY)
        assert not any(transfer.done.is_set() for transfer in transfers)
        assert not transfers[-1].done.wait(0.1)
        assert device.scatters == UNDER_WAY and transfers[UNDER_WAY].state is TransferState.QUEUED
        device.go.set()
        for number, transfer in enumerate(transfers):
            result = transfer.wait(SECONDS)
            assert result is not None and result.tokens == CHUNKS * PAGE
            assert target.tokens(units_of(number)) == source.tokens(units_of(number))
    assert not device.errors


def test_a_load_that_waits_for_a_disk_delays_the_end_of_no_other(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, device = several(ns), Engine(), Halting()
    tables, stuck, go = PageSource.tables, threading.Event(), threading.Event()
    with attach(ns, target.kv, device=device) as io:
        device.halt()
        first = start(io, ns, 0)
        device.launched(1)

        def hangs(self: PageSource, run: Run) -> tuple[bytes, bytes]:
            stuck.set()
            assert go.wait(SECONDS)
            return tables(self, run)

        monkeypatch.setattr(PageSource, "tables", hangs)
        second = start(io, ns, 1)
        try:
            assert stuck.wait(SECONDS)
            device.go.set()
            result = first.wait(SECONDS)
            assert result is not None and result.tokens == CHUNKS * PAGE
            assert target.tokens(units_of(0)) == source.tokens(units_of(0))
            assert not second.done.is_set()
        finally:
            go.set()
        assert second.wait(SECONDS) is not None
        assert target.tokens(units_of(1)) == source.tokens(units_of(1))
    assert not device.errors


def test_layers_are_announced_by_the_thread_that_sees_them_first(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls of the driver hold the GIL: the end thread may see a band milliseconds later."""
    monkeypatch.setattr(lane, "QUEUED", 1)
    monkeypatch.setattr(batches, "BATCH_BYTES_MIN", 1)
    source, target, go, units = saved(ns, 8), Engine(), threading.Event(), range(16)
    with attach(ns, target.kv, device=LateDevice(seed=1), scratch_bytes=1) as io, ns.match(prompt(8)) as match:
        io.warm(match)
        io._gpu_context.ends.put(lambda: go.wait(SECONDS) and None)
        transfer = io.load(match, units, NOW, deadline=LATE, layerwise=True)
        try:
            assert transfer.layer_ready(0).wait(SECONDS) and not transfer.done.is_set()
        finally:
            go.set()
        result = transfer.wait(SECONDS)
        assert result is not None and result.tokens == 8 * PAGE
        assert target.tokens(units) == source.tokens(units)


@pytest.mark.parametrize("damage", ["page", "launch"])
def test_a_bad_load_does_not_affect_the_loads_around_it(ns: kvfs.Namespace, store: kvfs.Store, damage: str) -> None:
    source, target, device = several(ns), Engine(), Halting()
    if damage == "page":
        with ns.match(prompt(CHUNKS, 1000)) as match:
            page = bytes(memoryview(ns.view(match)[0])[:64])
        [path] = segment_files(Path(store.path))
        raw = path.read_bytes()
        at = raw.index(page)
        with path.open("r+b") as file:
            file.seek(at)
            file.write(bytes([raw[at] ^ 4]))
    with attach(ns, target.kv, device=device) as io:
        device.halt()
        if damage == "launch":
            device.refuses_at = device.scatters + 2
        transfers = [start(io, ns, number) for number in range(3)]
        device.launched(3 if damage == "page" else 2)  # the load that failed waits for its copies
        device.go.set()
        results = [transfer.wait(SECONDS) for transfer in transfers]
        assert [result is not None and result.tokens for result in results] == [CHUNKS * PAGE, 0, CHUNKS * PAGE]
        assert results[1] is not None and results[1].reason == {"page": "unreadable", "launch": "error"}[damage]
        for number in (0, 2):
            assert target.tokens(units_of(number)) == source.tokens(units_of(number))
        assert set(target.tokens(list(units_of(1))[:2])) == {0xA5}
        if damage == "launch":
            assert isinstance(transfers[1].error, CudaError)
    assert not device.errors and not device.registered


@pytest.mark.parametrize("way", WAYS)
def test_a_load_whose_end_cannot_be_queried_moves_nothing_after_its_end(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """It may be half enqueued then."""
    several(ns)
    target, device, go, refused = Engine(), LateDevice(1), threading.Event(), threading.Event()
    end_band, query_now = batches.Batches._end_band, Recorded.query

    def query(event: Recorded) -> bool:
        if threading.current_thread().name == "kvfs-end-0" and not refused.is_set():
            refused.set()
            raise CudaError("query: not permitted")
        return query_now(event)

    def halts(*args: Any) -> None:
        end_band(*args)
        assert refused.wait(SECONDS) and go.wait(SECONDS)

    monkeypatch.setattr(Recorded, "query", query)
    monkeypatch.setattr(batches.Batches, "_end_band", halts)
    io = attach(ns, target.kv, device=device, **WAYS[way])
    transfer = start(io, ns, 0, layerwise=True)
    assert refused.wait(SECONDS)
    ended = transfer.done.wait(0.1)
    go.set()
    result = transfer.wait(SECONDS)
    assert not ended and not any(stream.calls for stream in device.streams)
    assert result is not None and (result.pages, result.reason) == (0, "error")
    assert io.ring.free == io.ring.slots
    second = start(io, ns, 1).wait(SECONDS)
    assert second is not None and second.tokens == CHUNKS * PAGE
    io.close()
    assert not device.errors and not device.registered and not ns._c.pinned.mine


def test_a_callback_may_cancel_the_next_load(ns: kvfs.Namespace) -> None:
    source, target, device, cancelled = several(ns), Engine(), Halting(), list[bool]()
    with attach(ns, target.kv, device=device) as io:
        device.halt()
        pages = list[PageOutcome]()
        first = start(
            io, ns, 0, on_page=lambda page: pages.append(page.outcome),
            on_done=lambda _: cancelled.append(second.cancel(SECONDS)),
        )  # fmt: skip
        second = start(io, ns, 1)
        device.launched(2)
        device.go.set()
        assert first.wait(SECONDS) is not None
        assert cancelled == [True] and second.wait(SECONDS) is not None
        assert pages == [PageOutcome.LOADED] * CHUNKS
        assert target.tokens(units_of(0)) == source.tokens(units_of(0))


def test_callbacks_run_where_the_gpu_is_current(ns: kvfs.Namespace) -> None:
    several(ns)
    device, entered, called = SimulatedDevice(), set[str](), set[str]()
    device.enter = lambda: entered.add(threading.current_thread().name)  # type: ignore[method-assign]
    with attach(ns, Engine().kv, device=device) as io:
        options = {what: lambda _: called.add(threading.current_thread().name) for what in ("on_page", "on_done")}
        assert start(io, ns, 0, **options).wait(SECONDS) is not None
    assert called and called <= entered


def test_loads_in_a_row_share_their_command_buffers(ns: kvfs.Namespace) -> None:
    several(ns)
    device = SimulatedDevice()
    with attach(ns, Engine().kv, device=device) as io:
        before = len(device.blocks)
        for _ in range(2):
            for transfer in [start(io, ns, number) for number in range(PROMPTS)]:
                assert transfer.wait(SECONDS) is not None
        assert len(device.blocks) == before


def test_a_close_waits_for_loads_that_overlap(ns: kvfs.Namespace) -> None:
    saved(ns, CHUNKS)
    device = Halting()
    io = attach(ns, Engine().kv, device=device)
    device.halt()
    transfers = [start(io, ns, 0) for _ in range(UNDER_WAY + 1)]
    threading.Timer(0.1, device.go.set).start()
    io.close(SECONDS)
    assert [t.state for t in transfers] == [TransferState.DONE] * len(transfers)
    assert not device.registered and not ns._c.pinned.mine
