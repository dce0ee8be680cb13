"""On a real GPU, through the public API: the same bytes as the host's copies make, and no others.

python -m pytest tests/gpu tests/kernels -m gpu
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="the GPU transport needs triton")
import torch

import kvfs
from kvfs.gpu import save as gpu_save
from kvfs.gpu.load import GpuLoad
from kvfs.gpu.save import GpuSave
from kvfs.kernels import cells
from kvfs.pages.layout import Group, PageLayout
from kvfs.types import Tier, TransferState
from tests.cells import ORDERS, Case, reference
from tests.stores import counted

pytestmark = pytest.mark.gpu
SECONDS = 60.0
WAYS: dict[str, dict[str, Any]] = {
    "in_place": {}, "arena": {"transport": "arena"}, "ring": {"registered_bytes": 0}, "torch": {},
}  # fmt: skip


@pytest.fixture
def store(store_path: Path) -> Iterator[kvfs.Store]:
    with kvfs.open(store_path, capacity="512MiB") as opened:
        yield opened


@pytest.fixture(params=list(WAYS))
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    if request.param == "torch":
        monkeypatch.setattr(cells, "move", fails)
    return WAYS[request.param]


def fails(*args: Any, **changes: Any) -> None:
    raise RuntimeError("Triton does not compile")


def event() -> Any:
    happened = torch.cuda.Event()
    happened.record()
    return happened


class OnGpu:
    """The allocations of a case on the GPU, guard bytes included, and the case's descriptor moved there."""

    def __init__(self, case: Case, *, poison: bool) -> None:
        self.case = case
        self.raw = {start: torch.from_numpy(raw.copy()).cuda() for start, raw in case.memory.items()}
        if poison:
            for raw in self.raw.values():
                raw[64:-64] = 0xA5
        self.before = self.bytes()
        self.kv = kvfs.DeviceKV(case.kv.group, tuple(self._moved(b) for b in case.kv.buffers))

    def _moved(self, buffer: kvfs.KVBuffer) -> kvfs.KVBuffer:
        bases, extents = [], []
        for base in buffer.bases:
            start, raw = next((s, r) for s, r in self.raw.items() if s <= base < s + r.numel())
            bases.append(raw.data_ptr() + base - start)
            extents.append((raw.data_ptr() + 64, raw.numel() - 128))
        return kvfs.KVBuffer(
            "cuda:0", tuple(bases), tuple(extents), buffer.layers, buffer.heads, buffer.replica, buffer.unit_tokens,
            buffer.units, buffer.stride, buffer.cell, owner=list(self.raw.values()),
        )  # fmt: skip

    def bytes(self) -> dict[int, bytes]:
        return {start: raw.cpu().numpy().tobytes() for start, raw in self.raw.items()}


def layout_of(group: Group, page: int) -> PageLayout:
    return PageLayout.of([group], page)


CASES = [
    *[(order, block, 32, {}) for order, block in ORDERS],
    *[("block,head,token,2*dim", 16, 16, {"dim": dim, "dtype": dtype, "heads": 3})
      for dim in (5, 13, 96, 128) for dtype in ("float16", "float32")],
    *[("block,kv,token,head,dim", block, page, {"dim": 8}) for block in (16, 32, 64) for page in (16, 64)],
]  # fmt: skip


@pytest.mark.parametrize(("order", "block", "page", "changes"), CASES)
def test_a_round_trip_equals_the_host(
    store: kvfs.Store, way: dict[str, Any], order: str, block: int, page: int, changes: dict[str, Any]
) -> None:
    case = Case(order, page, block, **{"dim": 8, **changes})
    ns = store.namespace("model", layout_of(case.group, page), "1")
    tokens = list(range(2 * page))
    source, target = OnGpu(case, poison=False), OnGpu(case, poison=True)
    with ns.attach(source.kv) as io:
        result = io.save(ns.plan_save(tokens), case.ids, event()).wait(SECONDS)
        assert result is not None and result.pages == 2, result
    assert source.bytes() == source.before, "a save wrote to the engine"
    with ns.match(tokens) as match:
        pages = bytearray(match.nbytes)
        assert ns.get(match, pages) == 2
    expected = {start: bytearray(raw) for start, raw in target.before.items()}
    index = {id(raw): start for start, raw in case.memory.items()}
    for chunk in range(2):
        for at, raw, i in reference(case.group, case.part, case.kv, case.memory, case.ids, chunk, 0):
            assert pages[chunk * case.group.page_bytes + at] == raw[i]
            expected[index[id(raw)]][i] = raw[i]
    with ns.attach(target.kv, **way) as io, ns.match(tokens) as match:
        assert io.kernels == ("torch" if cells.move is fails else "triton")
        if io.transport == "arena":
            assert io.warm(match) >= match.nbytes  # with the gaps between pages
        result = io.load(match, case.ids, event(), layerwise=order.startswith("layer")).wait(SECONDS)
        assert result is not None and result.tokens == 2 * page, result
    assert {start: bytearray(raw) for start, raw in target.bytes().items()} == expected


LAYOUT = PageLayout.kv(layers=8, kv_heads=4, head_dim=64, dtype="bfloat16", page_tokens=16)


class Rank:
    """Paged KV of a model of LAYOUT."""

    def __init__(self, blocks: int = 256, seed: int | None = None) -> None:
        self.tensors = [torch.full((2, blocks, 16, 4, 64), -1, dtype=torch.int16, device="cuda") for _ in range(8)]
        if seed is not None:
            for i, tensor in enumerate(self.tensors):
                tensor.random_(-30000, 30000, generator=torch.Generator("cuda").manual_seed(seed * 100 + i))
        self.kv = kvfs.describe(LAYOUT.groups[0], self.tensors, "kv,block,token,head,dim")

    def same(self, other: Rank, blocks: int) -> bool:
        return all(torch.equal(a[:, :blocks], b[:, :blocks]) for a, b in zip(self.tensors, other.tensors, strict=True))


def save(ns: kvfs.Namespace, rank: Rank, tokens: list[int], units: Any, after: Any = None) -> None:
    with ns.attach(rank.kv) as io:
        result = io.save(ns.plan_save(tokens), units, after or event()).wait(SECONDS)
        assert result is not None and result.declined == 0, result


def test_mode_staging_bypasses_the_page_cache(store_path: Path) -> None:
    source, target, tokens = Rank(seed=7), Rank(), list(range(4096))
    with kvfs.open(store_path, capacity="512MiB", mode="staging") as store:
        ns = store.namespace("model", LAYOUT, "1")
        save(ns, source, tokens, range(256))
        with ns.attach(target.kv) as io, ns.match(tokens) as match:
            assert io.transport == "ring"
            result = io.load(match, range(256), event()).wait(SECONDS)
            assert result is not None and result.tiers == {Tier.DISK: len(tokens)}, result
        assert target.same(source, 256)


def test_a_large_save_on_a_gpu_is_written_to_several_segments(store_path: Path) -> None:
    layout = PageLayout.kv(layers=8, kv_heads=4, head_dim=64, dtype="bfloat16", page_tokens=64)
    source, target, tokens = Rank(seed=8, blocks=8192), Rank(blocks=8192), list(range(1 << 17))
    with kvfs.open(store_path, capacity="4GiB") as store:
        ns = store.namespace("model", layout, "1")
        with ns.attach(source.kv, ring_bytes="2GiB") as io:
            result = io.save(ns.plan_save(tokens), range(8192), event(), deadline=SECONDS).wait(SECONDS)
            assert result is not None and result.declined == 0, result
        assert store.stats()["segments"]["active"] > 1
    with kvfs.open(store_path) as store:
        ns = store.namespace("model", layout, "1")
        with ns.attach(target.kv) as io, ns.match(tokens) as match:
            result = io.load(match, range(8192), event()).wait(SECONDS)
            assert result is not None and result.tokens == len(tokens), result
    assert target.same(source, 8192)


def test_a_prompt_is_looked_up_while_its_first_pages_move(store: kvfs.Store, way: Any) -> None:
    ns = store.namespace("model", LAYOUT, "1")
    source, target, tokens = Rank(seed=9), Rank(), list(range(4096))
    save(ns, source, tokens, range(256))
    with ns.attach(target.kv, **way) as io:
        for stored, asked in ((256, tokens), (256, [*tokens, *tokens]), (100, [*tokens[:1607], 7, *tokens])):
            for tensor in target.tensors:
                tensor.fill_(-1)
            result = io.restore(asked, range(256), event()).wait(SECONDS)
            assert result is not None and (result.tokens, result.declined) == (16 * stored, 0), result
            assert target.same(source, stored)
            assert all((tensor[:, stored:] == -1).all() for tensor in target.tensors)


@pytest.mark.parametrize("capturing", [False, True])
@pytest.mark.parametrize("layerwise", [False, True])
def test_a_load_of_registered_pages_is_enqueued_by_its_caller_unless_that_captures_a_graph(
    store: kvfs.Store, way: dict[str, Any], monkeypatch: pytest.MonkeyPatch, layerwise: bool, capturing: bool
) -> None:
    ns = store.namespace("model", LAYOUT, "1")
    source, target, tokens = Rank(seed=11), Rank(), list(range(1024))
    save(ns, source, tokens, range(64))
    begun, run_now = list[bool](), GpuLoad.run_now

    def noted(job: GpuLoad) -> bool:
        begun.append(run_now(job))
        return begun[-1]

    monkeypatch.setattr(GpuLoad, "run_now", noted)
    with ns.attach(target.kv, **way) as io, ns.match(tokens) as match:
        in_place = io.warm(match) >= match.nbytes and io.kernels == "triton"
        for _ in range(3):
            for tensor in target.tensors:
                tensor.fill_(-1)
            after, graph, sums = event(), torch.cuda.CUDAGraph(), torch.zeros(4, device="cuda")
            torch.cuda.synchronize()
            if capturing:
                with torch.cuda.graph(graph):
                    sums += 1
                    transfer = io.load(match, range(64), after, layerwise=layerwise)
                graph.replay()
                assert sums.tolist() == [1.0] * 4
            else:
                transfer = io.load(match, range(64), after, layerwise=layerwise)
            result = transfer.wait(SECONDS)
            assert result is not None and result.tokens == 1024, result
            assert target.same(source, 64)
            assert all((tensor[:, 64:] == -1).all() for tensor in target.tensors)
    assert begun == [in_place and not capturing] * 3


def test_a_save_waits_for_the_forward_that_writes_the_blocks(store: kvfs.Store) -> None:
    ns = store.namespace("model", LAYOUT, "1")
    late, rank, target = Rank(seed=5), Rank(), Rank()
    stream = torch.cuda.Stream()
    with ns.attach(rank.kv) as io:
        plan = ns.plan_save(list(range(512)))
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)  # about a tenth of a second
            for mine, theirs in zip(rank.tensors, late.tensors, strict=True):
                mine.copy_(theirs)
            written = torch.cuda.Event()
            written.record(stream)
        transfer = io.save(plan, range(32), written)
        assert not transfer.source_free.is_set()
        transfer.wait(SECONDS)
    with ns.attach(target.kv) as io, ns.match(list(range(512))) as match:
        io.load(match, range(32), event()).wait(SECONDS)
    assert target.same(late, 32)


def test_a_save_is_enqueued_while_the_engine_still_computes(store: kvfs.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver takes 56 blocking events ahead: enqueueing would wait for the engine, which could launch nothing."""
    monkeypatch.setattr(gpu_save, "BATCH_BYTES", 1)  # a page each
    ns = store.namespace("model", LAYOUT, "1")
    rank, stream, computed = Rank(seed=5), torch.cuda.Stream(), list[bool]()
    land = GpuSave._land

    def landed(job: GpuSave) -> None:
        computed.append(job.after.query())
        land(job)

    monkeypatch.setattr(GpuSave, "_land", landed)
    with ns.attach(rank.kv) as io:
        for first in (0, 1024):  # kernels are compiled in the first one
            with torch.cuda.stream(stream):
                torch.cuda._sleep(2_000_000_000)  # about a second
                written = torch.cuda.Event()
                written.record(stream)
            computed.clear()
            result = io.save(ns.plan_save(list(range(first, first + 512))), range(32), written).wait(SECONDS)
            assert result is not None and result.pages == 32, result
    assert len(computed) == 32 and not computed[0]


def test_a_flipped_bit_in_the_page_cache_is_refused_before_its_layers_event(store: kvfs.Store, way: Any) -> None:
    ns = store.namespace("model", LAYOUT, "1")
    source, target = Rank(seed=1), Rank()
    tokens = list(range(1024))
    save(ns, source, tokens, range(64))
    with ns.match(tokens) as match:
        view = ns.view(match)[40]
        needle = bytes(view[:64])
    path = next(p for p in (Path(store.path) / "segments").glob("*.kvs") if needle in p.read_bytes())
    at = path.read_bytes().index(needle) + LAYOUT.page_bytes // 2
    with path.open("r+b") as file:
        file.seek(at)
        old = file.read(1)[0]
        file.seek(at)
        file.write(bytes([old ^ 1]))
    for layerwise in (False, True):
        with ns.attach(target.kv, **way) as io, ns.match(tokens) as match, counted(store) as moved:
            if match.tokens < 1024:
                break
            transfer = io.load(match, range(64), event(), layerwise=layerwise)
            result = transfer.wait(SECONDS)
            assert result is not None and (result.tokens, result.reason) == (640, "unreadable")
            assert moved("pages_corrupt") == 1
    assert target.same(source, 40)
    assert all((tensor[:, 40] == -1).all() for tensor in target.tensors), "unverified bytes reached a unit"


def test_eviction_at_full_rate_while_loads_run_in_place(store_path: Path) -> None:
    with kvfs.open(store_path, capacity="96MiB") as store:
        ns = store.namespace("model", LAYOUT, "1")
        source, target = Rank(seed=2), Rank()
        hot = list(range(1024))
        save(ns, source, hot, range(64))
        stop = threading.Event()

        def churn() -> None:
            n = 1
            page = np.random.default_rng(0).integers(0, 256, 64 * LAYOUT.page_bytes, dtype="uint8")
            while not stop.is_set():
                ns.put(list(range(n * 10_000, n * 10_000 + 1024)), page)
                n += 1

        thread = threading.Thread(target=churn)
        thread.start()
        good = 0
        try:
            with ns.attach(target.kv) as io:
                end = time.monotonic() + 5
                while time.monotonic() < end:
                    for tensor in target.tensors:
                        tensor.fill_(-1)
                    with ns.match(hot) as match:
                        if not match:
                            save(ns, source, hot, range(64))
                            continue
                        result = io.load(match, range(64), event()).wait(SECONDS)
                    assert result is not None
                    assert target.same(source, result.tokens // 16), "wrong bytes under eviction"
                    good += result.tokens > 0
        finally:
            stop.set()
            thread.join()
        assert good > 10


def test_cancel_fences(store: kvfs.Store) -> None:
    ns = store.namespace("model", LAYOUT, "1")
    source, target = Rank(seed=3), Rank()
    save(ns, source, list(range(4096)), range(256))
    with ns.attach(target.kv) as io:
        for wait in (0.0, 0.0003, 0.001, 0.003):
            with ns.match(list(range(4096))) as match:
                transfer = io.load(match, range(256), event())
                time.sleep(wait)
                assert transfer.cancel(SECONDS)
                for tensor in target.tensors:
                    tensor.fill_(-1)
                torch.cuda.synchronize()
                time.sleep(0.01)
                assert all((tensor == -1).all() for tensor in target.tensors), "bytes moved after cancel"
                assert transfer.state in (TransferState.CANCELLED, TransferState.DONE, TransferState.PARTIAL)


def test_a_device_that_is_not_there_is_refused(store: kvfs.Store) -> None:
    ns = store.namespace("model", LAYOUT, "1")
    rank = Rank()
    far = tuple(dataclasses.replace(buffer, memory="cuda:99") for buffer in rank.kv.buffers)
    with pytest.raises(kvfs.ConfigError, match="memory is on cuda:99"):
        ns.attach(kvfs.DeviceKV(rank.kv.group, far))


def test_the_driver_launches_kernels_that_triton_has_compiled(store: kvfs.Store) -> None:
    ns = store.namespace("model", LAYOUT, "1")
    source, target = Rank(seed=1), Rank()
    with ns.attach(source.kv) as saves, ns.attach(target.kv) as loads:
        for first in (0, 1000):  # the first save is Triton's, of which there are no more then
            tokens, blocks = list(range(first, first + 512)), range(first // 100, first // 100 + 32)
            saved = saves.save(ns.plan_save(tokens), blocks, event()).wait(SECONDS)
            assert saved is not None and saved.pages == 32, saved
            with ns.match(tokens) as match:
                loaded = loads.load(match, blocks, event()).wait(SECONDS)
                assert loaded is not None and loaded.tokens == 512, loaded
        for stream in (saves._gpu_context.saves.kernels, loads._gpu_context.loads.kernels):
            assert stream._launches and all(stream._launches.values()), stream._launches
    used = [*range(32), *range(10, 42)]
    for mine, theirs in zip(target.tensors, source.tensors, strict=True):
        assert torch.equal(mine[:, used], theirs[:, used])


@pytest.mark.parametrize("transport", ["in_place", "arena"])
def test_pages_that_were_used_last_are_registered_before_the_first_load(store: kvfs.Store, transport: str) -> None:
    ns = store.namespace("model", LAYOUT, "1")
    source, target, tokens = Rank(seed=1), Rank(), list(range(512))
    save(ns, source, tokens, range(32))
    with ns.attach(target.kv, transport=transport) as io, ns.match(tokens) as match:
        assert io.warm_hottest("1GiB") >= match.nbytes
        before = io._gpu_context.regions.nbytes
        result = io.load(match, range(32), event()).wait(SECONDS)
        assert result is not None and result.tokens == 512, result
        assert io._gpu_context.regions.nbytes == before, "the load had to register more"
    assert target.same(source, 32)


def test_no_stream_of_torch_is_one_of_kvfs(store: kvfs.Store) -> None:
    """torch deals 32 streams of a pool out again and again: work of kvfs on the engine's stream would end a capture."""
    ns, rank = store.namespace("model", LAYOUT, "1"), Rank()
    with ns.attach(rank.kv) as io:
        gpu = io._gpu_context
        mine = {lane.kernels._handle for lane in (gpu.loads, gpu.saves)} | {
            lane.dma._handle for lane in (gpu.loads, gpu.saves)
        }
        pool = {torch.cuda.Stream(priority=p).cuda_stream for _ in range(64) for p in (0, -1)}
        assert len(mine) >= 3 and not mine & pool


def test_graphs_are_captured_while_pages_are_moved_and_registered(
    store: kvfs.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default a call of any thread that CUDA deems unsafe fails, and ends the capture."""
    ns = store.namespace("model", LAYOUT, "1")
    source, target, tokens = Rank(seed=1), Rank(), list(range(512))
    save(ns, source, tokens, range(32))
    over, happened, turns = threading.Event(), event(), list[tuple[bool, int]]()
    with ns.attach(target.kv) as io:
        monkeypatch.setattr(io, "_is_dropped", lambda segment_id: True)  # each sweep frees all regions

        def serve() -> None:
            while not over.is_set():
                with ns.match(tokens) as match:
                    pinned = io.warm(match) == match.nbytes
                    result = io.load(match, range(32), happened).wait(SECONDS)
                turns.append((pinned, result.tokens if result is not None else -1))
                io.sweep()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            a = torch.randn(256, 256, device="cuda") / 16
            a @ a  # makes the library's handle, which is not allowed during a capture
            for _ in range(200):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):  # in the mode that engines leave it in
                    b = a
                    for _ in range(50):
                        b = b @ a
                graph.replay()
            torch.cuda.synchronize()
        finally:
            over.set()
            thread.join()
    assert len(turns) > 10 and set(turns) == {(True, 512)}, turns
    assert target.same(source, 32)
