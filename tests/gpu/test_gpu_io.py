"""The GPU transport over a simulated device, whose copies check their memory."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="the GPU transport needs triton")

import kvfs
from kvfs import PageOutcome
from kvfs.directory import config_file
from kvfs.directory.liveness import Liveness
from kvfs.directory.pinned_memory import FRESH_SECONDS, PinnedBytes
from kvfs.errors import ConfigError
from kvfs.format import segment as fmt
from kvfs.gpu import lane
from kvfs.gpu.gpu_io import GpuIO
from kvfs.gpu.registration import PinnedBudget, RegisteredMaps
from kvfs.gpu.registration_cache import REGION_BYTES
from kvfs.kernels.driver import CudaError
from kvfs.pages.layout import Cell, Group, Need, PageLayout, Part
from kvfs.system.files import Files
from kvfs.testing import FakeClock, Fault, FaultyFiles
from kvfs.types import Tier
from tests.gpu.simulated import Happened, SimulatedDevice
from tests.stores import cached_of, counted, scanned, segment_files

SECONDS = 100.0  # of waits that end at once unless something is wrong
LATE = 3600.0  # a deadline that no test reaches
PAGE, BLOCK = 32, 16
LAYOUT = PageLayout.kv(layers=4, kv_heads=2, head_dim=8, dtype="bfloat16", page_tokens=PAGE)
ORDER = "layer,block,token,head,2*dim"
NOW = Happened()


def attach(ns: kvfs.Namespace, *kvs: kvfs.DeviceKV, device: SimulatedDevice | None = None, **changes: Any) -> GpuIO:
    settings: dict[str, Any] = {
        "ring_bytes": "1MiB", "threads": 1, "dirty_bytes": None, "queue_max": 16, "scratch_bytes": "1MiB",
        "registered_bytes": "64MiB",
    }  # fmt: skip
    return GpuIO(
        device or SimulatedDevice(), ns._c, ns._appender, ns._reader, ns._matcher, ns.identity, ns._retention,
        list(kvs),
        **{**settings, **changes},
    )  # fmt: skip


class Engine:
    """The KV memory of a rank, with random bytes or poison."""

    def __init__(
        self,
        *,
        seed: int | None = None,
        units: int = 32,
        layers: Sequence[int] = range(4),
        heads: Sequence[int] = (0, 2),
    ) -> None:
        shape = (4, units, BLOCK, 2, 16)
        self.memory = np.full(shape, 0xA5A5, "uint16")
        if seed is not None:
            self.memory[...] = np.random.default_rng(seed).integers(0, 65536, shape, dtype="uint16")
        first, count = heads
        self.memory = np.ascontiguousarray(self.memory[list(layers), :, :, first : first + count])
        self.kv = kvfs.describe(LAYOUT.groups[0], self.memory, ORDER, layers=list(layers), first_head=first)

    def tokens(self, units: Sequence[int]) -> bytes:
        return self.memory[:, list(units)].tobytes()


def prompt(chunks: int, first: int = 0) -> list[int]:
    return list(range(first, first + chunks * PAGE))


@pytest.fixture(params=["in_place", "arena", "ring", "refused", "torch", "interpreter"])
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    """How segments reach the device."""
    return {
        "in_place": {},
        "arena": {"transport": "arena"},
        "ring": {"registered_bytes": 0},
        "refused": {"device": SimulatedDevice(refuse=True)},
        "torch": {"device": SimulatedDevice(triton=False)},
        "interpreter": {"device": SimulatedDevice(interpreted=True)},
    }[request.param]


def saved(ns: kvfs.Namespace, chunks: int, *, seed: int = 1, first: int = 0, **changes: Any) -> Engine:
    """A prompt in the store, with its KV in blocks 0, 1, ..."""
    engine = Engine(seed=seed)
    io = attach(ns, engine.kv, **changes)
    tokens = prompt(chunks, first)
    result = io.save(ns.plan_save(tokens), range(2 * chunks), NOW).wait(SECONDS)
    assert result is not None and result.pages == chunks and result.tokens == len(tokens), result
    io.close()
    return engine


def test_what_was_saved_is_loaded_into_other_units(ns: kvfs.Namespace, way: dict[str, Any]) -> None:
    interpreted = "device" in way and way["device"].interpreted
    source = saved(ns, 6, device=SimulatedDevice(interpreted=interpreted))
    target = Engine()
    with attach(ns, target.kv, **way) as io, ns.match(prompt(6)) as match:
        ring = "registered_bytes" in way or io.kernels == "torch"
        assert io.transport == ("in_place" if not way or interpreted else "ring" if ring else "arena")
        units = [20 - i for i in range(12)]
        transfer = io.load(match, units, NOW)
        result = transfer.wait(SECONDS)
        assert result is not None and (result.tokens, result.pages, result.declined) == (6 * PAGE, 6, 0)
        assert result.tiers == {Tier.HOST: 6 * PAGE}
        assert target.tokens(units) == source.tokens(range(12))
        untouched = sorted({*range(32)} - {*units})
        assert set(target.tokens(untouched)) == {0xA5}
        assert all(transfer.layer_ready(layer).is_set() for layer in range(4))


def test_attach_says_where_triton_does_not_work(ns: kvfs.Namespace, caplog: pytest.LogCaptureFixture) -> None:
    with attach(ns, Engine().kv, device=SimulatedDevice(triton=False)) as io:
        assert (io.kernels, io.transport) == ("torch", "ring")
        with ns.match(prompt(3)) as match:
            assert io.warm(match) == 0
    assert "No module named 'triton'" in caplog.text
    with pytest.raises(ConfigError, match="transport is 'in_place', which needs Triton"):
        attach(ns, Engine().kv, device=SimulatedDevice(triton=False), transport="in_place")
    with attach(ns, Engine().kv) as io:
        assert io.kernels == "triton"


@pytest.mark.parametrize("triton", [True, False])
def test_a_page_does_not_depend_on_the_transport_that_wrote_it(
    ns: kvfs.Namespace, store: kvfs.Store, triton: bool
) -> None:
    engine = saved(ns, 3, device=SimulatedDevice(triton=triton))
    with ns.match(prompt(3)) as match:
        by_gpu = bytearray(match.nbytes)
        assert ns.get(match, by_gpu) == 3
    other = store.namespace("model", LAYOUT, "1", salt="by the host")
    with other.attach(engine.kv) as io:
        io.save(other.plan_save(prompt(3)), range(6)).wait(SECONDS)
    with other.match(prompt(3)) as match:
        by_host = bytearray(match.nbytes)
        assert other.get(match, by_host) == 3
    assert by_gpu == by_host


def test_a_flipped_bit_is_refused_before_anything_is_scattered(
    ns: kvfs.Namespace, store: kvfs.Store, way: dict[str, Any]
) -> None:
    source = saved(ns, 4)
    with ns.match(prompt(4)) as match:
        page = bytes(memoryview(ns.view(match)[2])[:64])
    [path] = segment_files(Path(store.path))
    at = path.read_bytes().index(page)
    with path.open("r+b") as file:
        file.seek(at + 5)
        byte = file.read(1)[0]
        file.seek(at + 5)
        file.write(bytes([byte ^ 4]))
    target = Engine()
    with attach(ns, target.kv, **way) as io, ns.match(prompt(4)) as match, counted(store) as moved:
        transfer = io.load(match, range(8), NOW)
        result = transfer.wait(SECONDS)
        assert result is not None and (result.tokens, result.reason) == (2 * PAGE, "unreadable")
        assert moved("pages_corrupt") == 1
        assert target.tokens(range(4)) == source.tokens(range(4))
        assert set(target.tokens(range(4, 6))) == {0xA5}, "unverified bytes reached a unit"
    with ns.match(prompt(4)) as match:
        assert match.tokens == 2 * PAGE, "the damaged page is still in the index"


@pytest.mark.parametrize("first_token", [1, 31, 33, 100])
def test_only_the_last_tokens_move(ns: kvfs.Namespace, way: dict[str, Any], first_token: int) -> None:
    source = saved(ns, 4)
    target = Engine()
    with attach(ns, target.kv, **way) as io, ns.match(prompt(4)) as match:
        result = io.load(match, range(8), NOW, first_token=first_token).wait(SECONDS)
        assert result is not None and result.tokens == 4 * PAGE
    flat = target.memory[:, :8].reshape(4, 128, 2, 16)
    want = source.memory[:, :8].reshape(4, 128, 2, 16)
    assert (flat[:, first_token:] == want[:, first_token:]).all()
    assert (flat[:, :first_token] == 0xA5A5).all()


def test_units_of_minus_one_are_left_alone(ns: kvfs.Namespace, way: dict[str, Any]) -> None:
    source = saved(ns, 4)
    target = Engine()
    with attach(ns, target.kv, **way) as io, ns.match(prompt(4)) as match:
        result = io.load(match, [-1, -1, -1, 3, 4, -1, -1, -1], NOW).wait(SECONDS)
        assert result is not None and (result.tokens, result.pages) == (4 * PAGE, 2)
    assert target.tokens([3, 4]) == source.tokens([3, 4])
    assert set(target.tokens([0, 1, 2, 5, 6, 7])) == {0xA5}


@pytest.mark.parametrize("layers", [range(4), range(1, 4)])
@pytest.mark.parametrize("region_bytes", [None, 4096])
def test_layer_by_layer(ns: kvfs.Namespace, layers: range, region_bytes: int | None) -> None:
    """One band for each layer; also where a layer of a page is in two regions."""
    source, target = Engine(seed=1, layers=layers), Engine(layers=layers)
    with attach(ns, source.kv) as io:
        result = io.save(ns.plan_save(prompt(5), part=io.parts), range(10), NOW).wait(SECONDS)
        assert result is not None and result.pages == 5
    device = SimulatedDevice()
    with attach(ns, target.kv, device=device) as io, ns.match(prompt(5), part=io.parts) as match:
        if region_bytes is not None:
            io._gpu_context.regions._region_bytes = region_bytes
        io.warm(match)  # the kernel may have paged out what was saved
        launches = device.launches
        result = io.load(match, range(10), NOW, layerwise=True).wait(SECONDS)
        assert result is not None and result.tokens == 5 * PAGE, result
        assert device.launches - launches == len(layers)
    assert target.tokens(range(10)) == source.tokens(range(10))


def test_a_layerwise_load_that_is_cut_short_restores_nothing(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane, "PENDING", 0)  # each band is launched before the next one is copied
    saved(ns, 3)
    device, started = SimulatedDevice(), threading.Event()
    with attach(ns, Engine().kv, device=device) as io, ns.match(prompt(3)) as match:
        begin = device.launches

        class Started(Happened):
            def query(self) -> bool:
                return started.is_set()

        def cancel_in_the_second_band() -> None:
            if device.launches == begin + 2:
                threading.Thread(target=transfer.cancel).start()
                while not transfer._control.stopped:
                    time.sleep(0.001)

        device.before_launch = cancel_in_the_second_band
        transfer = io.load(match, range(6), Started(), layerwise=True)
        started.set()
        result = transfer.wait(SECONDS)
        assert result is not None and (result.tokens, result.pages, result.reason) == (0, 0, "cancelled")
        assert device.launches == begin + 2


def test_a_save_on_a_full_disk_resumes_after_space_is_freed(store_path: Path) -> None:
    """The batch is appended twice, so its checksums are needed twice."""
    files = FaultyFiles()
    with kvfs.open(store_path, capacity="16MiB", files=files) as store:
        ns = store.namespace("model", LAYOUT, "1")
        saved(ns, 3, first=10_000)
        store._shared.services().active.finish_all()
        engine = Engine(seed=7)
        with attach(ns, engine.kv) as io:
            files.arm(Fault(1, "pwritev", error=errno.ENOSPC))
            result = io.save(ns.plan_save(prompt(3)), range(6), NOW).wait(SECONDS)
            files.arm()
            assert result is not None and result.pages == 3, result
        target = Engine()
        with attach(ns, target.kv) as io, ns.match(prompt(3)) as match:
            io.load(match, range(6), NOW).wait(SECONDS)
        assert target.tokens(range(6)) == engine.tokens(range(6))


def test_a_ring_that_cannot_be_pinned_is_refused(ns: kvfs.Namespace) -> None:
    device, threads = SimulatedDevice(pinned_max=1 << 20), threading.active_count()
    with pytest.raises(kvfs.ConfigError, match="ring_bytes is 2MiB: it cannot be pinned"):
        attach(ns, Engine().kv, device=device, ring_bytes="2MiB")
    device.fails_at = 1  # the kernels do not run
    with pytest.raises(CudaError):
        attach(ns, Engine().kv, device=device)
    assert not [nbytes for nbytes, _ in device.registered.values() if nbytes >= 1 << 20], "the ring is still pinned"
    assert threading.active_count() == threads


def test_pages_of_another_degree_are_assembled(ns: kvfs.Namespace, way: dict[str, Any]) -> None:
    whole = Engine(seed=9)
    halves = [Engine(heads=(h, 1)) for h in (0, 1)]
    for h, half in enumerate(halves):
        half.memory[...] = whole.memory[:, :, :, h : h + 1]
        with attach(ns, half.kv) as io:
            plan = ns.plan_save(prompt(3), part=io.parts)
            result = io.save(plan, range(6), NOW).wait(SECONDS)
            assert result is not None and result.pages == 3
    target = Engine()
    with attach(ns, target.kv, **way) as io, ns.match(prompt(3)) as match:
        result = io.load(match, range(6), NOW).wait(SECONDS)
        assert result is not None and result.tokens == 3 * PAGE, result
    assert target.tokens(range(6)) == whole.tokens(range(6))
    upper = Engine(heads=(1, 1), layers=(2, 3))
    with attach(ns, upper.kv, **way) as io, ns.match(prompt(3), part=io.parts) as match:
        result = io.load(match, range(6), NOW).wait(SECONDS)
        assert result is not None and result.tokens == 3 * PAGE
    assert (upper.memory[:, :6] == whole.memory[2:, :6, :, 1:2]).all()


def test_small_leaves_and_states_are_verified_by_the_cpu(store: kvfs.Store, way: dict[str, Any]) -> None:
    layout = PageLayout.of(
        [
            Group("full", (0, 2), 1, Cell("opaque", 5), Need.all(), PAGE),
            Group("state", (1,), 1, Cell("opaque", 300), Need.exact(), 1),
        ],
        PAGE,
    )
    ns = store.namespace("hybrid", layout, "1")
    rng = np.random.default_rng(2)
    full = [rng.integers(0, 256, (8, BLOCK, 1, 5), dtype="uint8") for _ in range(2)]
    state = [rng.integers(0, 256, (8, 1, 300), dtype="uint8")]

    def describe(tensors: Any, states: Any) -> list[kvfs.DeviceKV]:
        return [
            kvfs.describe(layout.groups[0], tensors, "block,token,head,dim"),
            kvfs.describe(layout.groups[1], states, "slot,head,dim"),
        ]

    with attach(ns, *describe(full, state)) as io:
        units = {"full": range(8), "state": [0, 1, 2, 3]}
        result = io.save(ns.plan_save(prompt(4)), units, NOW).wait(SECONDS)
        assert result is not None and result.pages == 8, result
    targets, states = [np.zeros_like(t) for t in full], [np.zeros_like(s) for s in state]
    with attach(ns, *describe(targets, states), **way) as io, ns.match(prompt(4)) as match:
        result = io.load(match, {"full": [7, 6, 5, 4, 3, 2, 1, 0], "state": [-1, -1, -1, 6]}, NOW).wait(SECONDS)
        assert result is not None and result.tokens == 4 * PAGE, result
    assert all((t[::-1] == f).all() for t, f in zip(targets, full, strict=True))
    assert (states[0][6] == state[0][3]).all() and not states[0][:6].any()


def test_a_ring_of_one_slot_serves_many_transfers(ns: kvfs.Namespace) -> None:
    source = saved(ns, 1)
    target = Engine()
    page = LAYOUT.groups[0].page_bytes
    with attach(ns, target.kv, registered_bytes=0, ring_bytes=page, queue_max=64) as io:
        matches = [ns.match(prompt(1)) for _ in range(32)]
        transfers = [io.load(match, [i, -1], NOW, deadline=LATE) for i, match in enumerate(matches)]
        results = [transfer.wait(SECONDS) for transfer in transfers]
        assert all(result is not None and result.tokens == PAGE for result in results)
        io.ring.check()
        assert io.ring.free == 1
    assert all(target.tokens([i]) == source.tokens([0]) for i in range(32))


class ClockFiles(FakeClock, Files):
    """Time passes when the test says so."""


def test_registering_within_loads_stops_where_it_is_expensive_and_resumes_where_it_is_cheap(
    store: kvfs.Store, tmp_path: Path
) -> None:
    files, device = ClockFiles(), SimulatedDevice()
    maps = RegisteredMaps(device, files, PinnedBudget(store._shared.c.pinned, files, 1 << 40))
    (tmp_path / "file").write_bytes(b"")
    os.truncate(tmp_path / "file", REGION_BYTES)
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    held: Any = SimpleNamespace(fd=fd, mappable=True)

    def register(gib: float, seconds_per_gib: float) -> None:
        def slowly(address: int, nbytes: int, *, read_only: bool) -> None:
            files.advance(seconds_per_gib * nbytes / 2**30)
            SimulatedDevice.register(device, address, nbytes, read_only=read_only)

        device.register = slowly  # type: ignore[method-assign]
        for _ in range(int(gib * 2**30) // REGION_BYTES):
            made = maps.make(held, 0, REGION_BYTES, ahead=True)
            assert made is not None
            maps.free(made)

    assert maps.ready(gentle=False)
    register(0.125, 1.0)
    assert maps.ready(gentle=False), "too few bytes were measured"
    register(0.25, 1.0)
    assert not maps.ready(gentle=False)
    register(8, 0.06)
    assert maps.ready(gentle=False)
    register(2, 0.1)
    assert not maps.ready(gentle=False)
    files.advance(9.9)
    assert not maps.ready(gentle=False)
    files.advance(0.1)
    assert maps.ready(gentle=False), "one bad second does not decide for good"
    register(0.25, 0.1)
    assert not maps.ready(gentle=False), "it is measured again"
    os.close(fd)


def test_registered_maps_are_bounded_and_freed(ns: kvfs.Namespace, store: kvfs.Store) -> None:
    device = SimulatedDevice()
    saved(ns, 4)
    target = Engine()
    with attach(ns, target.kv, device=device) as io, ns.match(prompt(4)) as match:
        assert io.warm(match) == match.nbytes
        assert 0 < device.maps() <= 64 << 20
        io.load(match, range(8), NOW).wait(SECONDS)
        io.sweep()
        assert device.maps() > 0
        match.close()
        [path] = segment_files(Path(store.path))
        path.rename(path.parent.parent / "doomed" / path.name)
        io.sweep()
        assert device.maps() == 0
    assert not device.registered, "something is still pinned"


def test_a_single_region_is_registered_by_the_load_that_needs_it(ns: kvfs.Namespace) -> None:
    source, target, device = saved(ns, 2), Engine(), SimulatedDevice()
    with attach(ns, target.kv, device=device) as io, ns.match(prompt(2)) as match:
        io.ring.acquire = lambda *args, **kwargs: pytest.fail("the ring was used")  # type: ignore[method-assign]
        assert io.load(match, range(4), NOW).wait(SECONDS).tokens == 2 * PAGE  # type: ignore[union-attr]
        assert device.maps() > 0
    assert target.tokens(range(4)) == source.tokens(range(4))


def test_regions_of_a_growing_segment_hold_all_that_a_load_needs(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load plans its pages window by window; the regions of the first window must serve the others."""
    monkeypatch.setattr("kvfs.gpu.page_feed.WINDOW_PAGES", 1)
    source, target = saved(ns, 8), Engine()
    with attach(ns, target.kv) as io, ns.match(prompt(8)) as match:
        monkeypatch.setattr(io.ring, "acquire", lambda *args, **kwargs: pytest.fail("the ring was used"))
        result = io.load(match, range(16), NOW).wait(SECONDS)
        assert result is not None and result.tokens == 8 * PAGE
    assert target.tokens(range(16)) == source.tokens(range(16))


def test_a_large_save_is_written_to_several_segments(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = LAYOUT.groups[0].page_bytes
    monkeypatch.setattr("kvfs.transfer.save.LANE_BYTES", 4 * page)
    monkeypatch.setattr("kvfs.transfer.save.BATCH_BYTES", page)
    source, target, tokens = Engine(seed=3), Engine(), prompt(12)
    with kvfs.open(store_path, capacity="64MiB") as store:
        ns = store.namespace("model", LAYOUT, "1")
        with attach(ns, source.kv, scratch_bytes=4 * (page + 4096)) as io:  # batches of a page
            result = io.save(ns.plan_save(tokens), range(24), NOW).wait(SECONDS)
        assert result is not None and result.pages == 12
        assert len(segment_files(store_path)) == 3
    with kvfs.open(store_path) as store:  # the next process appends to one of them
        ns = store.namespace("model", LAYOUT, "1")
        with attach(ns, target.kv) as io, ns.match(tokens) as match:
            result = io.load(match, range(24), NOW).wait(SECONDS)
        assert result is not None and result.tokens == len(tokens)
        assert target.tokens(range(24)) == source.tokens(range(24))
        saved(ns, 2, first=5000)
        assert len(segment_files(store_path)) == 3
        assert store.verify().ok


def test_batches_are_committed_together(ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    page = LAYOUT.groups[0].page_bytes
    monkeypatch.setattr("kvfs.transfer.save.BATCH_BYTES", 5 * page)
    source, target, tokens, appends = Engine(seed=3), Engine(), prompt(12), list[list[int]]()
    store = ns._appender.store

    def noted(job: Any, chunks: Any, wait: Any = None) -> Any:
        appends.append([*chunks])
        return store(job, chunks, wait)

    monkeypatch.setattr(ns._appender, "store", noted)
    with attach(ns, source.kv, scratch_bytes=4 * (page + 4096)) as io:  # batches of a page
        result = io.save(ns.plan_save(tokens), range(24), NOW).wait(SECONDS)
    assert result is not None and result.pages == 12 and not result.declined
    assert appends == [[*range(5)], [*range(5, 10)], [10, 11]]
    with attach(ns, target.kv) as io, ns.match(tokens) as match:
        assert [e.chunks for hit in match.groups[0].hits for e in hit.row().extents] == [5, 5, 2]  # type: ignore[union-attr]
        result = io.load(match, range(24), NOW).wait(SECONDS)
    assert result is not None and target.tokens(range(24)) == source.tokens(range(24))


def test_an_arena_is_filled_ahead_and_kept(ns: kvfs.Namespace) -> None:
    source, target, device = saved(ns, 4), Engine(), SimulatedDevice()
    with attach(ns, target.kv, device=device, transport="arena") as io, ns.match(prompt(4)) as match:
        pinned = dict(device.registered)
        assert io.warm(match) == match.nbytes
        blocks = {address: size for address, (size, _) in device.registered.items() if address not in pinned}
        assert list(blocks.values()) == [REGION_BYTES], "more than the block that the segment needs"
        assert device.maps() == 0, "a map of a file was registered"
        slots = io.ring.free
        for _ in range(3):
            result = io.load(match, range(8), NOW).wait(SECONDS)
            assert result is not None and result.tokens == 4 * PAGE and io.ring.free == slots
        assert {a for a in device.registered if a not in pinned} == set(blocks), "a block was pinned again"
    assert target.tokens(range(8)) == source.tokens(range(8))
    assert not device.registered, "something is still pinned"


def test_an_arena_grows_in_the_background_by_what_loads_have_lacked(ns: kvfs.Namespace) -> None:
    source, target, device = saved(ns, 4), Engine(), SimulatedDevice()
    with attach(ns, target.kv, device=device, transport="arena") as io, ns.match(prompt(4)) as match:
        regions, pinned = io._gpu_context.regions, len(device.registered)
        assert regions is not None
        for _ in range(2):  # through the ring: to pin a block takes longer than that
            io.load(match, range(8), NOW).wait(SECONDS)
        assert regions.nbytes == 0 and len(device.registered) == pinned
        for _ in range(2):
            io.sweep()
            assert len(device.registered) == pinned + 1, "one region was lacking"
        io.ring.acquire = lambda *args, **kwargs: pytest.fail("the ring was used")  # type: ignore[method-assign]
        target.memory[...] = 0xA5A5
        io.load(match, range(8), NOW).wait(SECONDS)
        assert regions.nbytes >= match.nbytes and target.tokens(range(8)) == source.tokens(range(8))
    assert not device.registered


def test_an_arena_makes_nothing_once_it_is_closed(ns: kvfs.Namespace) -> None:
    """A sweep may come a moment after the end, when the reader threads have ended."""
    saved(ns, 4)
    device = SimulatedDevice()
    with attach(ns, Engine().kv, device=device, transport="arena") as io, ns.match(prompt(4)) as match:
        regions = io._gpu_context.regions
        assert regions is not None
        io.load(match, range(8), NOW).wait(SECONDS)
        assert regions.short
        io.close()
        assert io.warm(match) == 0
        regions.sweep(())
    assert regions.nbytes == 0 and not device.registered


def test_a_full_arena_drops_the_oldest_region(ns: kvfs.Namespace, store: kvfs.Store) -> None:
    sources = [saved(ns, 2, seed=i, first=1000 * i) for i in range(3)]
    target, device = Engine(), SimulatedDevice()
    with attach(ns, target.kv, device=device, transport="arena", registered_bytes=2 * 4096) as io:
        regions = io._gpu_context.regions
        assert regions is not None
        regions._region_bytes = regions.source._block_bytes = 4096  # two blocks in all
        for i in (0, 1, 2, 0, 2, 1):
            with ns.match(prompt(2, 1000 * i)) as match:
                io.warm(match)
                result = io.load(match, range(4), NOW).wait(SECONDS)
            assert result is not None and result.tokens == 2 * PAGE
            assert target.tokens(range(4)) == sources[i].tokens(range(4))
            assert regions.nbytes <= 2 * 4096
    assert not device.registered


def test_a_block_that_cannot_be_filled_is_free_again(ns: kvfs.Namespace, store: kvfs.Store) -> None:
    saved(ns, 4)
    target, device = Engine(), SimulatedDevice()
    before = target.tokens(range(8))
    with attach(ns, target.kv, device=device, transport="arena") as io, ns.match(prompt(4)) as match:
        [path] = segment_files(Path(store.path))
        size = path.stat().st_size
        os.truncate(path, 4096)
        assert io.warm(match) == 0
        os.truncate(path, size)
        result = io.load(match, range(8), NOW).wait(SECONDS)
        assert result is not None and result.tokens == 0, result
        assert target.tokens(range(8)) == before
    assert not device.registered


def test_processes_of_a_host_share_the_budget_of_pinned_bytes(store_path: Path) -> None:
    with kvfs.open(store_path, capacity="64MiB") as store:
        ns = store.namespace("model", LAYOUT, "1")
        saved(ns, 4)
        directory = ns._c.directory
        other = Liveness(directory)  # as another process has it
        try:
            other.say_pinned(60 << 20)
            with attach(ns, Engine().kv, registered_bytes="64MiB") as io, ns.match(prompt(4)) as match:
                assert io.warm(match) == match.nbytes
                assert ns._c.pinned.mine == io._gpu_context.regions.nbytes  # type: ignore[union-attr]
                mine = PinnedBytes(other)
                assert not mine.take(64 << 20, 64 << 20, 0.0), "bytes of this process are not counted"
            other.say_pinned((64 << 20) - 1)
            with attach(ns, Engine().kv, registered_bytes="64MiB") as io, ns.match(prompt(4)) as match:
                time.sleep(FRESH_SECONDS)
                assert io.warm(match) == 0
                result = io.load(match, range(8), NOW).wait(SECONDS)
                assert result is not None and result.tokens == 4 * PAGE
            assert ns._c.pinned.mine == 0
        finally:
            other.close()


def test_bad_transports_are_named(ns: kvfs.Namespace) -> None:
    with pytest.raises(ConfigError, match="transport is 'nvlink': pass one of in_place, arena, ring"):
        attach(ns, Engine().kv, transport="nvlink")
    with pytest.raises(ConfigError, match=r"transport is 'in_place': host cannot: .*not supported"):
        attach(ns, Engine().kv, transport="in_place", device=SimulatedDevice(refuse=True))


def test_what_exceeds_the_budget_goes_through_the_ring(ns: kvfs.Namespace) -> None:
    source = saved(ns, 4)
    device, target = SimulatedDevice(), Engine()
    with attach(ns, target.kv, device=device, registered_bytes="4KiB") as io, ns.match(prompt(4)) as match:
        result = io.load(match, range(8), NOW).wait(SECONDS)
        assert result is not None and result.tokens == 4 * PAGE
        assert device.maps() == 0
    assert target.tokens(range(8)) == source.tokens(range(8))


def test_an_event_is_required_and_waited_for_within_the_deadline(ns: kvfs.Namespace) -> None:
    class Never(Happened):
        def query(self) -> bool:
            return False

    engine = Engine(seed=3)
    with attach(ns, engine.kv) as io:
        plan = ns.plan_save(prompt(2))
        with pytest.raises(kvfs.ConfigError, match=r"after is None: pass a torch\.cuda\.Event"):
            io.save(plan, range(4))
        transfer = io.save(plan, range(4), Never(), deadline=0.05)
        result = transfer.wait(SECONDS)
        assert result is not None and (result.pages, result.reason) == (0, "deadline")
        waiting = io.save(plan, range(4), Never(), deadline=3600)
        assert waiting.cancel(SECONDS)
        result = waiting.wait(SECONDS)
        assert result is not None and result.reason == "cancelled"
    with ns.match(prompt(2)) as match:
        assert match.tokens == 0


def test_a_failing_launch_ends_its_transfer_and_no_other(ns: kvfs.Namespace) -> None:
    engine, device = Engine(seed=4), SimulatedDevice()
    with attach(ns, engine.kv, device=device) as io:
        for kind in ("save", "load"):
            device.fails_at = device.launches + 1
            if kind == "save":
                failed = io.save(ns.plan_save(prompt(2)), range(4), NOW)
            else:
                failed = io.load(ns.match(prompt(2)), range(4), NOW)
            result = failed.wait(SECONDS)
            assert result is not None and (result.pages, result.declined, result.reason) == (0, 2, "error")
            assert failed.state is kvfs.TransferState.FAILED and "out of resources" in str(failed.error)
            io.ring.check()
            assert io.ring.free == io.ring.slots
            saved = io.save(ns.plan_save(prompt(2)), range(4), NOW).wait(SECONDS)
            assert saved is not None and not saved.declined
        loaded = io.load(ns.match(prompt(2)), range(10, 14), NOW).wait(SECONDS)
        assert loaded is not None and loaded.tokens == 2 * PAGE
    assert engine.tokens(range(10, 14)) == engine.tokens(range(4))


def test_each_page_has_one_callback(ns: kvfs.Namespace, way: dict[str, Any]) -> None:
    saved(ns, 3)
    seen: list[Any] = []
    with attach(ns, Engine().kv, **way) as io, ns.match(prompt(3)) as match:
        transfer = io.load(match, range(6), NOW, on_page=seen.append, on_done=seen.append)
        transfer.wait(SECONDS)
    assert [(s.chunk, s.outcome) for s in seen[:3]] == [(c, PageOutcome.LOADED) for c in range(3)]
    assert seen[3:] == [transfer]


def test_parts_are_refused_where_the_match_lacks_them(ns: kvfs.Namespace) -> None:
    saved(ns, 2)
    narrow = ns.match(prompt(2), part=Part(0, 1, 0, 4))
    with attach(ns, Engine().kv) as io, narrow, pytest.raises(kvfs.ConfigError, match=r"match with io\.parts"):
        io.load(narrow, range(4), NOW)


@pytest.mark.parametrize("pages", [12, 1], ids=["ring of 12", "ring of 1"])
def test_mode_staging_maps_nothing_and_reads_from_the_disk(disk_path: Path, pages: int) -> None:
    """Not even where all of it is in the page cache."""
    for attempt in range(3):  # a kernel that cannot drop a page for O_DIRECT writes through the page cache
        past, stored, cached = staged(disk_path / str(attempt), pages)
        if past < stored / 2:
            break
    assert past < stored / 2 and cached > 0


def staged(folder: Path, pages: int) -> tuple[int, int, int]:
    """Bytes in the page cache of what mode staging has stored, all of those, and bytes there of what mode cache has."""
    folder.mkdir()
    path, device = folder / "store", SimulatedDevice()
    ring = pages * LAYOUT.groups[0].page_bytes
    with kvfs.open(path, capacity="64MiB") as store:
        warm = saved(store.namespace("model", LAYOUT, "1"), 6)
    config_file.change(str(path), "mode", "staging", Files())
    with kvfs.open(path) as store:
        ns = store.namespace("model", LAYOUT, "1")
        engine, target = Engine(seed=2), Engine()
        with attach(ns, engine.kv, device=device, ring_bytes=ring) as io:
            assert io.transport == "ring"
            result = io.save(ns.plan_save(prompt(6, 9000)), range(12), NOW).wait(SECONDS)
            assert result is not None and result.pages == 6
        with attach(ns, target.kv, device=device, ring_bytes=ring) as io:
            for source, first in ((warm, 0), (engine, 9000), (engine, 9000)):
                with ns.match(prompt(6, first)) as match:
                    assert io.warm(match) == 0 and {ref.tier for ref in match.pages} == {Tier.DISK}
                    result = io.load(match, range(12), NOW, layerwise=True).wait(SECONDS)
                    assert result is not None and result.tiers == {Tier.DISK: 6 * PAGE}
                    assert device.maps() == 0 and target.tokens(range(12)) == source.tokens(range(12))
    ways = {scanned(file).header.flags: cached_of(file) for file in segment_files(path)}
    (past, stored), (cached, _) = ways[fmt.FLAG_DIRECT], ways[0]
    return past, stored, cached


class ColdFiles(Files):
    """A page cache that holds no payloads except those that were prefetched. ``bad``: prefetching fails."""

    bad = False

    def __init__(self) -> None:
        self.prefetched: list[tuple[int, int]] = []
        self._of: dict[int, int] = {}  # maps, by offset

    def has_large_folios(self) -> bool:
        return True

    def map(self, fd: int, length: int, offset: int) -> Any:
        mapping = super().map(fd, length, offset)
        self._of[id(mapping)] = offset
        return mapping

    def populate(self, mapping: Any, offset: int = 0, nbytes: int = 0) -> None:
        if self.bad:
            raise OSError(errno.EIO, "a bad sector")
        super().populate(mapping, offset, nbytes)
        self.prefetched.append((self._of[id(mapping)], len(mapping)))

    def cached_bytes(self, fd: int, offset: int, nbytes: int) -> int | None:
        return sum(max(0, min(at + n, offset + nbytes) - max(at, offset)) for at, n in self.prefetched)


@pytest.mark.parametrize("used", [True, False], ids=["used before", "never used"])
def test_cold_pages_that_were_used_before_are_prefetched_and_read_in_place(store_path: Path, used: bool) -> None:
    files, device = ColdFiles(), SimulatedDevice()
    with kvfs.open(store_path, capacity="64MiB", files=files) as store:
        ns = store.namespace("model", LAYOUT, "1")
        source, target = saved(ns, 6), Engine()
        for _ in range(2 if used else 1):
            with attach(ns, target.kv, device=device) as io, ns.match(prompt(6)) as match:
                files.prefetched.clear()  # by the probe
                result = io.load(match, range(12), NOW).wait(SECONDS)
                assert result is not None and result.tiers == {Tier.DISK: 6 * PAGE}, result
                assert target.tokens(range(12)) == source.tokens(range(12))
                assert (device.maps() > 0) == bool(files.prefetched)
        assert bool(files.prefetched) == used


def test_a_small_part_of_a_region_is_not_prefetched(store_path: Path) -> None:
    """The driver would read the rest of the region, page by page."""
    files, device = ColdFiles(), SimulatedDevice()
    with kvfs.open(store_path, capacity="64MiB", files=files) as store:
        ns = store.namespace("model", LAYOUT, "1")
        source, target = saved(ns, 12), Engine()
        for _ in range(2):  # the second time the pages were used before
            with attach(ns, target.kv, device=device) as io, ns.match(prompt(2)) as match:
                files.prefetched.clear()  # by the probe
                result = io.load(match, range(4), NOW).wait(SECONDS)
                assert result is not None and result.tiers == {Tier.DISK: 2 * PAGE}, result
                assert target.tokens(range(4)) == source.tokens(range(4))
                assert not files.prefetched and not device.maps()


def test_whole_regions_are_prefetched_once(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The load thread alone would read what the page cache lacks of a region when it is registered."""
    files, device = ColdFiles(), SimulatedDevice()
    monkeypatch.setattr("kvfs.gpu.populate.PREFETCH_BYTES", 1 << 14)
    monkeypatch.setattr("kvfs.gpu.page_feed.WINDOW_PAGES", 1)
    with kvfs.open(store_path, capacity="64MiB", files=files) as store:
        ns = store.namespace("model", LAYOUT, "1")
        source, target = saved(ns, 12), Engine()
        with attach(ns, target.kv) as io, ns.match(prompt(12)) as match:
            io.load(match, range(24), NOW).wait(SECONDS)  # the second time the pages were used before
        with attach(ns, target.kv, device=device) as io, ns.match(prompt(8)) as match:
            files.prefetched.clear()  # by the probe
            readers, populate_at = set[str](), files.populate_at
            monkeypatch.setattr(
                files, "populate_at", lambda *at: (readers.add(threading.current_thread().name), populate_at(*at))
            )
            result = io.load(match, range(16), NOW).wait(SECONDS)
            assert readers == {"kvfs-ring"}
            assert result is not None and result.tiers == {Tier.DISK: 8 * PAGE}, result
            assert target.tokens(range(16)) == source.tokens(range(16))
            ends = [0, *(at + nbytes for at, nbytes in sorted(files.prefetched))]
            assert [at for at, _ in sorted(files.prefetched)] == ends[:-1] and len(ends) > 3
            assert sum(nbytes for nbytes, read_only in device.registered.values() if read_only) == ends[-1]


def test_pages_that_cannot_be_prefetched_come_through_the_ring(store_path: Path) -> None:
    files = ColdFiles()
    with kvfs.open(store_path, capacity="64MiB", files=files) as store:
        ns = store.namespace("model", LAYOUT, "1")
        source, target = saved(ns, 6), Engine()
        with attach(ns, target.kv) as io, ns.match(prompt(6)) as match:
            io.load(match, range(12), NOW).wait(SECONDS)  # the pages count as used when it is closed
        with attach(ns, target.kv) as io, ns.match(prompt(6)) as match, counted(store) as moved:
            files.bad = True
            result = io.load(match, range(12, 24), NOW).wait(SECONDS)
            assert result is not None and result.tokens == 6 * PAGE
        assert target.tokens(range(12, 24)) == source.tokens(range(12))
        assert moved("read_errors") >= 1


def test_prefetched_pages_that_cannot_be_registered_count_as_from_the_disk(store_path: Path) -> None:
    files, device = ColdFiles(), SimulatedDevice()
    with kvfs.open(store_path, capacity="64MiB", files=files) as store:
        ns = store.namespace("model", LAYOUT, "1")
        source, target = saved(ns, 6), Engine()
        with attach(ns, target.kv) as io, ns.match(prompt(6)) as match:
            io.load(match, range(12), NOW).wait(SECONDS)  # the second time the pages were used before
        with attach(ns, target.kv, device=device) as io, ns.match(prompt(6)) as match:
            files.prefetched.clear()  # by the probe
            device.refuse = True
            result = io.load(match, range(12, 24), NOW).wait(SECONDS)
            assert files.prefetched and result is not None and result.tiers == {Tier.DISK: 6 * PAGE}, result
            assert target.tokens(range(12, 24)) == source.tokens(range(12))
