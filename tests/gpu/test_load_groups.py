"""Loads of several groups through the GPU transport over a simulated device: one behind the other, without a pause."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="the GPU transport needs triton")

import kvfs
from kvfs.gpu import batches, lane
from kvfs.gpu import page_source as gpusource
from kvfs.gpu.page_source import PageSource
from kvfs.pages.layout import Group, Need, PageLayout
from kvfs.read.reader import Reader
from kvfs.system.files import Files
from tests.gpu.simulated import SimulatedDevice, SimulatedStream
from tests.gpu.test_gpu_io import NOW, SECONDS, attach, way
from tests.stores import counted, segment_files

__all__ = ["way"]  # a fixture
PAGE, CHUNKS, WINDOW = 16, 12, 4
CELL = PageLayout.kv(layers=1, kv_heads=2, head_dim=8, dtype="bfloat16", page_tokens=PAGE).groups[0].cell
LAYOUT = PageLayout.of(
    [
        Group("full", (0, 3), 2, CELL, Need.all(), PAGE),
        Group("window", (1, 2, 4), 2, CELL, Need.window_of(WINDOW * PAGE), PAGE),
    ],
    PAGE,
)
TOKENS = list(range(CHUNKS * PAGE))


class Engine:
    def __init__(self, seed: int | None = None) -> None:
        rng = np.random.default_rng(seed)
        self.memory, self.kvs = {}, []
        for group in LAYOUT.groups:
            shape = (len(group.layers), CHUNKS + 3, PAGE, 2, 16)
            filled = np.full(shape, 0xA5A5, "uint16") if seed is None else rng.integers(0, 1 << 16, shape, "uint16")
            self.memory[group.name] = filled
            self.kvs.append(kvfs.describe(group, filled, "layer,block,token,head,2*dim"))

    def blocks(self, group: str, first: int, end: int) -> bytes:
        return self.memory[group][:, first:end].tobytes()


def units() -> dict[str, list[int]]:
    return {group.name: list(range(CHUNKS)) for group in LAYOUT.groups}


@pytest.fixture
def ns(store: kvfs.Store) -> kvfs.Namespace:
    return store.namespace("hybrid", LAYOUT, "1")


@pytest.fixture
def source(ns: kvfs.Namespace) -> Engine:
    engine = Engine(seed=1)
    with attach(ns, *engine.kvs) as io:
        result = io.save(ns.plan_save(TOKENS), units(), NOW).wait(SECONDS)
        assert result is not None and result.pages == 2 * CHUNKS
    return engine


def test_a_group_that_cannot_be_settled_leaves_no_other_group_pinned(
    ns: kvfs.Namespace, source: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, forgets = SimulatedDevice(), list[int]()

    def forget(*_: Any) -> None:
        forgets.append(1)
        raise RuntimeError("the index is broken")

    monkeypatch.setattr(gpusource, "root_of", lambda _: bytes(16))
    monkeypatch.setattr(Reader, "forget", forget)
    with attach(ns, *Engine().kvs, device=device) as io, ns.match(TOKENS) as match:
        result = io.load(match, units(), NOW).wait(SECONDS)
        assert forgets and result is not None and result.reason == "error"
    assert not device.registered and not ns._c.pinned.mine


@pytest.mark.parametrize("layerwise", [False, True])
def test_all_groups_arrive(ns: kvfs.Namespace, source: Engine, way: dict[str, Any], layerwise: bool) -> None:
    target = Engine()
    with attach(ns, *target.kvs, **way) as io, ns.match(TOKENS) as match:
        for _ in range(2):  # the second time some of it is pinned
            transfer = io.load(match, units(), NOW, layerwise=layerwise)
            result = transfer.wait(SECONDS)
            assert result is not None and (result.tokens, result.pages) == (CHUNKS * PAGE, CHUNKS + WINDOW), result
            assert all(transfer.layer_ready(layer).is_set() for layer in range(5))
        assert io.ring.free == io.ring.slots
    assert target.blocks("full", 0, CHUNKS) == source.blocks("full", 0, CHUNKS)
    assert target.blocks("window", CHUNKS - WINDOW, CHUNKS) == source.blocks("window", CHUNKS - WINDOW, CHUNKS)
    assert set(target.blocks("window", 0, CHUNKS - WINDOW)) == {0xA5}
    for group in ("full", "window"):
        assert set(target.blocks(group, CHUNKS, CHUNKS + 3)) == {0xA5}


class Order(SimulatedStream):
    """Records what is enqueued, and each query of the host."""

    def __init__(self, device: Any) -> None:
        super().__init__(device)
        self.log: list[str] = device.log

    def copy_in(self, target: int, source: int, nbytes: int) -> None:
        self.log.append("copy")
        super().copy_in(target, source, nbytes)

    def scatter(self, *args: Any, **kwargs: Any) -> None:
        self.log.append("launch")
        super().scatter(*args, **kwargs)

    def copy_out(self, target: int, source: int, nbytes: int) -> None:
        self.log.append("end")
        super().copy_out(target, source, nbytes)


class Ordered(SimulatedDevice):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def stream(self, *, urgent: bool = False) -> Any:
        return Order(self)


def log_of_a_load(ns: kvfs.Namespace, scratch_bytes: int | str = "1MiB", **how: bool) -> list[str]:
    """What a load enqueues and queries, in order, with all regions registered."""
    device, target = Ordered(), Engine()
    with attach(ns, *target.kvs, device=device, scratch_bytes=scratch_bytes) as io, ns.match(TOKENS) as match:
        io.warm(match)
        device.log.clear()
        result = io.load(match, units(), NOW, **how).wait(SECONDS)
        assert result is not None and result.tokens == CHUNKS * PAGE
    return list(device.log)


def test_the_next_group_is_copied_before_the_last_one_is_launched(ns: kvfs.Namespace, source: Engine) -> None:
    assert log_of_a_load(ns) == ["copy", "copy", "launch", "end", "launch", "end"]


def test_few_copies_are_ahead_of_their_launches(
    ns: kvfs.Namespace, source: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane, "PENDING", 2)
    ahead, log = 0, log_of_a_load(ns, scratch_bytes=1)  # room for four batches, each of a page
    for what in log:
        ahead += (what == "copy") - (what == "launch")
        assert ahead <= lane.PENDING + 1
    assert log.count("copy") > 2 * lane.PENDING


@pytest.mark.parametrize("layerwise", [False, True])
def test_batches_are_small_only_at_the_end_of_the_load(
    ns: kvfs.Namespace, source: Engine, monkeypatch: pytest.MonkeyPatch, layerwise: bool
) -> None:
    """Not at the end of each group or band: only the last kernels have no copy behind them."""
    monkeypatch.setattr(batches, "BATCH_BYTES_MIN", 1)
    log = log_of_a_load(ns, layerwise=layerwise)
    *bands, rest = " ".join(what for what in log if what != "copy").split("end")
    launches = [band.count("launch") for band in bands]
    assert not rest and launches[0] < WINDOW and all(n < launches[-1] for n in launches[:-1]), launches
    assert len(launches) == (5 if layerwise else 2)


@pytest.mark.parametrize("group", ["full", "window"])
@pytest.mark.parametrize("layerwise", [False, True])
def test_a_flipped_bit_of_either_group_is_refused(
    ns: kvfs.Namespace, store: kvfs.Store, source: Engine, way: dict[str, Any], group: str, layerwise: bool
) -> None:
    chunk = CHUNKS - 2
    pages = source.memory[group][:, chunk].tobytes()
    damage(Path(store.path), ns, group, chunk)
    target = Engine()
    with attach(ns, *target.kvs, **way) as io, ns.match(TOKENS) as match, counted(store) as moved:
        result = io.load(match, units(), NOW, layerwise=layerwise).wait(SECONDS)
        # shorter prefixes would need pages of the window that the match does not have
        assert result is not None and (result.tokens, result.reason) == (0, "unreadable"), result
        assert moved("pages_corrupt") == 1
    assert target.memory[group][:, chunk].tobytes() == b"\xa5" * len(pages), "unverified bytes reached a unit"


def damage(path: Path, ns: kvfs.Namespace, group: str, chunk: int) -> None:
    with ns.match(TOKENS) as match:
        gm = match.group(group)
        page = bytes(memoryview(ns.view(match, group)[chunk - gm.first])[:64])
    [segment] = segment_files(path)
    data = bytearray(segment.read_bytes())
    at = data.index(page) + 5
    with segment.open("r+b") as file:
        file.seek(at)
        file.write(bytes([data[at] ^ 4]))


def test_slots_are_released_before_the_next_group_wants_them(ns: kvfs.Namespace, source: Engine) -> None:
    target, slot = Engine(), max(g.page_bytes for g in LAYOUT.groups)
    one = -(-slot // 4096) * 4096
    with attach(ns, *target.kvs, transport="ring", ring_bytes=one) as io, ns.match(TOKENS) as match:
        result = io.load(match, units(), NOW, deadline=SECONDS).wait(2 * SECONDS)
        assert result is not None and (result.tokens, result.reason) == (CHUNKS * PAGE, ""), result


def test_pages_that_a_damaged_window_makes_useless_do_not_come_through_the_ring(
    ns: kvfs.Namespace, store: kvfs.Store, source: Engine
) -> None:
    """Shorter prefixes would need other pages of the window."""
    damage(Path(store.path), ns, "window", CHUNKS - 2)
    target = Engine()
    with attach(ns, *target.kvs, transport="ring") as io, ns.match(TOKENS) as match:
        result = io.load(match, units(), NOW).wait(SECONDS)
        assert result is not None and (result.tokens, result.pages, result.reason) == (0, WINDOW - 1, "unreadable")
    assert target.blocks("full", 0, CHUNKS) == b"\xa5" * len(target.blocks("full", 0, CHUNKS))


def test_layers_that_have_arrived_do_not_wait_for_a_disk(
    ns: kvfs.Namespace, source: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window is in registered regions; the reads of the other group take a while."""
    target, reading, go_on = Engine(), threading.Event(), threading.Event()
    with attach(ns, *target.kvs) as io, ns.match(TOKENS) as match:
        io.warm(match)
        registered, segments = PageSource.registered, io._gpu_context.store.segments
        read = segments.read

        def only_the_window(self: PageSource, run: Any, *, prefetched: bool = False) -> Any:
            return registered(self, run, prefetched=prefetched) if self._attached.group.name == "window" else None

        def slowly(*args: Any, **kwargs: Any) -> None:
            reading.set()
            assert go_on.wait(SECONDS)
            read(*args, **kwargs)

        monkeypatch.setattr(PageSource, "registered", only_the_window)
        monkeypatch.setattr(PageSource, "prepare", lambda self, run: None)
        monkeypatch.setattr(segments, "read", slowly)
        transfer = io.load(match, units(), NOW, layerwise=True)
        assert reading.wait(SECONDS)
        assert all(transfer.layer_ready(layer).wait(SECONDS) for layer in (1, 2, 4))
        assert not transfer.layer_ready(0).is_set()
        go_on.set()
        assert transfer.wait(SECONDS).tokens == CHUNKS * PAGE  # type: ignore[union-attr]


def fine(target: Engine, source: Engine, told: list[kvfs.PageDone]) -> None:
    """Each page had one callback, LOADED pages are in the engine, and every byte is untouched or the source's."""
    assert len(told) == len({(page.group, page.chunk) for page in told}) == CHUNKS + WINDOW
    for page in told:
        if page.outcome is kvfs.PageOutcome.LOADED:
            mine, other = target.memory[page.group][:, page.chunk], source.memory[page.group][:, page.chunk]
            assert (mine == other).all()
    for name, memory in target.memory.items():
        assert ((memory == 0xA5A5) | (memory == source.memory[name]))[:, :CHUNKS].all()


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("how", [{}, {"registered_bytes": 0}])
def test_groups_before_a_failing_launch_are_loaded(
    ns: kvfs.Namespace, source: Engine, how: dict[str, Any], layerwise: bool
) -> None:
    loaded = set()
    for launch in range(1, 6):
        device, target, told = SimulatedDevice(), Engine(), list[kvfs.PageDone]()
        with attach(ns, *target.kvs, device=device, **how) as io, ns.match(TOKENS) as match:
            io.warm(match)
            device.fails_at = device.launches + launch
            result = io.load(match, units(), NOW, layerwise=layerwise, on_page=told.append).wait(SECONDS)
            assert result is not None
            fine(target, source, told)
            loaded.add(result.pages)
            assert io.ring.free == io.ring.slots
            maps = io._gpu_context.regions
            assert maps is None or not any(region.users for region in maps._regions.values())
            device.fails_at = -1
            assert io.load(match, units(), NOW).wait(SECONDS).tokens == CHUNKS * PAGE  # type: ignore[union-attr]
    assert loaded >= {0, WINDOW}, "the first group is discarded with the second"


@pytest.mark.parametrize("how", [{}, {"registered_bytes": 0}])
@pytest.mark.parametrize("launch", [1, 2, 3, 5])
@pytest.mark.parametrize("why", ["cancelled", "deadline"])
def test_a_load_that_ends_at_any_launch_counts_the_pages_that_arrived(
    ns: kvfs.Namespace, source: Engine, how: dict[str, Any], launch: int, why: str
) -> None:
    device, target, told, started = SimulatedDevice(), Engine(), list[kvfs.PageDone](), threading.Event()
    with attach(ns, *target.kvs, device=device, **how) as io, ns.match(TOKENS) as match:
        begin = device.launches

        class Started:
            def query(self) -> bool:
                return started.is_set()

        def end() -> None:
            if device.launches != begin + launch:
                return
            if why == "deadline":
                object.__setattr__(transfer._control.task, "deadline", 0.0)
            else:
                threading.Thread(target=transfer.cancel).start()
                while not transfer._control.stopped:
                    pass

        device.before_launch = end
        transfer = io.load(match, units(), Started(), layerwise=True, on_page=told.append)
        started.set()
        assert transfer.wait(SECONDS) is not None
        fine(target, source, told)
        assert io.ring.free == io.ring.slots
        assert io.load(match, units(), NOW).wait(SECONDS).tokens == CHUNKS * PAGE  # type: ignore[union-attr]


def test_a_load_cancelled_in_its_first_group_does_not_begin_the_next(
    ns: kvfs.Namespace, source: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane, "PENDING", 0)  # each batch is launched before the next one is copied
    device, target = SimulatedDevice(), Engine()
    with attach(ns, *target.kvs, device=device) as io, ns.match(TOKENS) as match:
        begin = device.launches

        def cancel() -> None:
            if device.launches == begin + 1:
                threading.Thread(target=transfer.cancel).start()
                while not transfer._control.stopped:
                    pass

        started = threading.Event()

        class Started:
            def query(self) -> bool:
                return started.is_set()

        device.before_launch = cancel
        transfer = io.load(match, units(), Started())
        started.set()
        result = transfer.wait(SECONDS)
        assert result is not None and (result.tokens, result.reason) == (0, "cancelled"), result
        assert set(target.blocks("full", 0, CHUNKS)) == {0xA5}
        assert io.load(match, units(), NOW).wait(SECONDS).tokens == CHUNKS * PAGE  # type: ignore[union-attr]


REGION = 32 << 10


class RestOnDisk(Files):
    """Pages are in the page cache; with ``cold`` the rest of their regions is not, and the disk hangs."""

    def __init__(self) -> None:
        self.cold, self.stuck, self.go = False, threading.Event(), threading.Event()

    def cached_bytes(self, fd: int, offset: int, nbytes: int) -> int | None:
        return 0 if self.cold and nbytes <= REGION else super().cached_bytes(fd, offset, nbytes)

    def populate_at(self, address: int, nbytes: int) -> None:
        if self.cold:
            self.stuck.set()
            assert self.go.wait(SECONDS)
        super().populate_at(address, nbytes)


def test_pages_that_have_arrived_do_not_wait_for_the_rest_of_a_region(store_path: Path) -> None:
    files, target = RestOnDisk(), Engine()
    with kvfs.open(store_path, capacity="64MiB", files=files) as opened:
        ns = opened.namespace("hybrid", LAYOUT, "1")
        source = Engine(seed=1)
        with attach(ns, *source.kvs) as io:
            assert io.save(ns.plan_save(TOKENS), units(), NOW).wait(SECONDS)
        with attach(ns, *target.kvs) as io, ns.match(TOKENS) as match:
            maps = io._gpu_context.regions
            assert maps is not None
            maps._region_bytes = REGION
            assert io.warm(match)
            window = [ref.place for refs in match.group("window").sources().values() for ref in refs]
            keep = {place.block * 4096 // REGION for place in window[-WINDOW:]}
            for key in [key for key in maps._regions if key[1] not in keep]:
                assert maps._drop_unused(key)
            files.cold = True
            transfer = io.load(match, units(), NOW)
            try:
                assert files.stuck.wait(SECONDS)
                assert transfer.layer_ready(1).wait(SECONDS / 4), "the window waits for a disk that it does not need"
                assert not transfer.done.is_set()
            finally:
                files.go.set()
            result = transfer.wait(SECONDS)
            assert result is not None and result.tokens == CHUNKS * PAGE, result
    assert target.blocks("full", 0, CHUNKS) == source.blocks("full", 0, CHUNKS)
