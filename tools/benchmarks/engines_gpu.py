"""SGLang's and LightLLM's own pools in GPU memory: loads and saves of kvfs beside the engines' own paths, in one run.

``python -m tools.benchmarks.engines_gpu --engines FOLDER``: FOLDER/python holds the engines' sources and what they
import, FOLDER/lightllm a checkout of LightLLM. Each contender runs by itself; one that cannot run is a row with its
reason. Targets are poisoned before each load and compared with the saved bytes after it.

Stores have segments of ``--segment``, as stores of 128 GiB and more have by default. By its capacity this benchmark's
would have some of 19 MB; then registering them costs so much by region that loads go through the ring for good.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
import traceback
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PAGE = 64
SECONDS = 60.0
POISON = 0x7B


class Bench:
    """The sizes of a run, and its table."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch

        self.torch, self.args, self.device = torch, args, args.device
        self.tokens, self.layers, self.rounds = args.tokens // PAGE * PAGE, args.layers, args.rounds
        self.heads, self.dim = 8, 128
        self.nbytes = self.tokens * self.layers * 2 * self.heads * self.dim * 2
        self.store = Path(tempfile.mkdtemp(prefix="engines-gpu-", dir=args.store))
        self.rows: list[tuple[str, str]] = []

    def capacity(self) -> int:
        return 4 * self.nbytes + (4 << 30)

    def make_store(self, name: str) -> str:
        """A new store with segments as large as those of a server's."""
        import kvfs

        path = str(self.store / name)
        kvfs.open(path, capacity=self.capacity(), segment_bytes=self.args.segment).close()
        return path

    def regions(self, name: str, io: Any) -> None:
        """Say how loads reached the GPU: what is registered, and what the driver has taken for it lately."""
        regions = io._gpu_context.regions if self.device == "cuda" else None
        if regions is None:
            return
        source = regions.source
        cost = getattr(source, "_seconds", 0.0) * (1 << 30) / max(1.0, getattr(source, "_registered", 0.0))
        self.row(
            f"{name}: registered", f"{regions.nbytes / 1e9:.2f} GB, {source.name}, {cost:.3f} s/GiB, "
            f"{'loads register more' if source.ready() else 'what is missing goes through the ring'}",
        )  # fmt: skip

    def sync(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def event(self) -> Any:
        """What kvfs waits for: behind all that was enqueued so far. None without a GPU."""
        if self.device != "cuda":
            return None
        event = self.torch.cuda.Event()
        event.record()
        return event

    def row(self, name: str, what: str) -> None:
        self.rows.append((name, what))
        print(f"{name:58} {what}", flush=True)

    def rate(self, name: str, seconds: list[float], nbytes: int, first: list[float] | None = None) -> None:
        rates = sorted(nbytes / 1e9 / s for s in seconds)
        text = f"{rates[0]:7.2f} {statistics.median(rates):7.2f} {rates[-1]:7.2f} GB/s"
        if first:
            text += f"   first layer {statistics.median(first) * 1e3:7.2f} ms of {statistics.median(seconds) * 1e3:.1f}"
        self.row(name, text)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        try:
            yield
        except BaseException as exc:
            if isinstance(exc, KeyboardInterrupt):
                raise
            self.row(name, f"did not run: {type(exc).__name__}: {str(exc)[:300]}")
            traceback.print_exc(limit=-6)

    def timed(self, run: Callable[[], object]) -> list[float]:
        """Seconds of each round; one before them is not counted."""
        seconds = list[float]()
        for _ in range(self.rounds + 1):
            self.sync()
            begin = time.perf_counter()
            run()
            self.sync()
            seconds.append(time.perf_counter() - begin)
        return seconds[1:]

    def fill(self, tensors: list[Any]) -> None:
        for tensor in tensors:
            tensor.view(self.torch.int16).random_(-30000, 30000)
        self.sync()

    def same(self, tensors: list[Any], one: Any, other: Any) -> bool:
        return all(self.torch.equal(t[one].view(self.torch.int16), t[other].view(self.torch.int16)) for t in tensors)

    def poison(self, tensors: list[Any], slots: Any) -> None:
        for tensor in tensors:
            tensor[slots] = 0.125
        self.sync()


def link(bench: Bench) -> None:
    """The link by itself: one copy between pinned memory and the device."""
    torch = bench.torch
    host = torch.empty(bench.nbytes, dtype=torch.uint8, pin_memory=bench.device == "cuda")
    host.random_(0, 255)
    device = torch.empty_like(host, device=bench.device)
    bench.rate("link: one copy, host to device", bench.timed(lambda: device.copy_(host)), bench.nbytes)
    bench.rate("link: one copy, device to host", bench.timed(lambda: host.copy_(device)), bench.nbytes)


# -- SGLang ----------------------------------------------------------------------------------


def stub_sgl_kernel() -> None:
    """sgl_kernel, whose build needs another torch: names exist, calls fail. HiCache's JIT kernels do not use it."""
    if importlib.util.find_spec("sgl_kernel") is not None:
        return

    class Missing(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)

            def call(*_: Any, **__: Any) -> Any:
                raise NotImplementedError(f"sgl_kernel.{name} is not here")

            return call

    class Finder:
        def find_spec(self, name: str, *_: Any) -> Any:
            mine = name.partition(".")[0] == "sgl_kernel" and name != "sgl_kernel.scalar_type"
            return importlib.util.spec_from_loader(name, self, is_package=True) if mine else None  # type: ignore[arg-type]

        def create_module(self, spec: Any) -> Any:
            return Missing(spec.name)

        def exec_module(self, module: Any) -> None:
            pass

    sys.meta_path.append(Finder())


def sglang_pool(bench: Bench) -> tuple[Any, Any]:
    """SGLang's device pool of two prompts, with its allocator."""
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    torch, size = bench.torch, 2 * bench.tokens
    pool = MHATokenToKVPool(
        size, PAGE, torch.bfloat16, bench.heads, bench.dim, bench.layers, bench.device, False,
        start_layer=0, end_layer=bench.layers - 1,
    )  # fmt: skip
    bench.fill([*pool.k_buffer, *pool.v_buffer])
    return pool, PagedTokenToKVPoolAllocator(size, PAGE, torch.bfloat16, bench.device, pool, False)


def sglang_linker(bench: Bench, pool: Any, allocator: Any) -> None:
    """KvfsLinker over the device pool: offload, restart, layer-wise loads; a second offload moves no byte."""
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    from kvfs.integrations.sglang.linker import KvfsLinker

    torch, pages = bench.torch, bench.tokens // PAGE
    keys = [hashlib.sha256(b"%d" % n).hexdigest() for n in range(pages)]
    params = SimpleNamespace(
        token_to_kv_pool_allocator=allocator, page_size=PAGE, tp_cache_group=None, attn_tp_cache_group=None, pp_rank=0,
        pp_size=1, mtp_draft_device_pools=(), sidecar_draft_device_pools=(),
    )  # fmt: skip
    extra = {"path": bench.make_store("linker"), "capacity": bench.capacity(), "weights_id": "0123abcd",
             "ring_bytes": bench.args.ring}  # fmt: skip
    source = torch.arange(PAGE, PAGE + bench.tokens, device=bench.device)
    target = source + bench.tokens
    tensors = [*pool.k_buffer, *pool.v_buffer]

    def made() -> Any:
        return KvfsLinker(
            SimpleNamespace(served_model_name="bench"), params, components={ComponentType.FULL}, extra_config=extra
        )

    def calls(run: Callable[[], Any]) -> tuple[Any, float]:
        begin = time.perf_counter()
        return run(), time.perf_counter() - begin

    def offload(linker: Any, slots: Any) -> tuple[float, float]:
        begin = time.perf_counter()
        ok, blocked = calls(lambda: linker.offload([PoolTransfer(name=PoolName.KV, keys=keys, device_indices=slots)]))
        assert ok
        while not linker.num_completed_offloads():
            assert time.perf_counter() - begin < SECONDS
            time.sleep(0.0005)
        linker.pop_completed_offload()
        return time.perf_counter() - begin, blocked

    linker = made()
    seconds, blocked = offload(linker, source)
    bench.rate("sglang, kvfs linker: first offload, until published", [seconds], bench.nbytes)
    print("counters after it:", dict(linker._pages._attached.store.stats()["counters"]))
    before = dict(linker._pages._attached.store.stats()["counters"])
    again, _ = offload(linker, source)
    after = dict(linker._pages._attached.store.stats()["counters"])
    moved = {k: after[k] - before.get(k, 0) for k in after if after[k] != before.get(k, 0)}
    bench.row("sglang, kvfs linker: second offload", f"{again * 1e3:.2f} ms, counters that changed: {moved or 'none'}")
    linker.close()
    linker = made()
    if bench.device == "cuda":
        time.sleep(3.0)  # what a start does in the background
    longest = dict.fromkeys(("lookup", "load", "start", "offload"), 0.0) | {"offload": blocked}
    totals, firsts = list[float](), list[float]()
    for n in range(bench.rounds + 1):
        bench.poison(tensors, target)
        transfer = [PoolTransfer(name=PoolName.KV, keys=keys, device_indices=target)]
        begin = time.perf_counter()
        found, took = calls(lambda: linker.lookup(f"r{n}", transfer))  # noqa: B023
        longest["lookup"] = max(longest["lookup"], took)
        assert len(found) == pages, f"{len(found)} of {pages} pages are found"
        _, took = calls(lambda: linker.load(f"r{n}", transfer))  # noqa: B023
        longest["load"] = max(longest["load"], took)
        index, took = calls(linker.start_layer_wise_loading)
        longest["start"] = max(longest["start"], took)
        counter = linker.layer_done_counter
        counter.set_consumer(index)
        counter.wait_until(0)
        first = time.perf_counter() - begin
        assert linker.finish_layer_wise_loading(index), "the load failed"
        total = time.perf_counter() - begin
        bench.sync()
        assert bench.same(tensors, source, target), "bytes differ"
        if n:
            totals.append(total)
            firsts.append(first)
    bench.rate("sglang, kvfs linker: load after a restart", totals, bench.nbytes, firsts)
    bench.regions("sglang, kvfs linker", linker._pages._attached.io)
    bench.row(
        "sglang, kvfs linker: longest call on the scheduler, ms",
        ", ".join(f"{k} {v * 1e3:.2f}" for k, v in longest.items()),
    )
    linker.close()


def sglang_hicache(bench: Bench, pool: Any, allocator: Any, io: str, layout: str) -> None:
    """HiCacheController: its copies between device and host pool, then its file storage in front of them."""
    from sglang.srt.managers.cache_controller import HiCacheController, PrefetchOperation
    from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import _mha_host_inputs
    from sglang.srt.mem_cache.utils import get_hash_str
    from sglang.srt.runtime_context import get_parallel

    torch, name = bench.torch, f"sglang, hicache {io} {layout}"
    kind, info, arguments = _mha_host_inputs(pool)
    host = kind(info, **{
        **arguments, "host_to_device_ratio": 1.0, "host_size": 0, "page_size": PAGE, "layout": layout,
        "pin_memory": bench.device == "cuda",
    })  # fmt: skip
    os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(bench.store / f"hicache-{io}-{layout}")
    with get_parallel().override(attn_dcp_size=1, attn_dcp_rank=0, tp_rank=0, tp_size=1, pp_rank=0, pp_size=1):
        controller = HiCacheController(
            allocator, host, PAGE, tp_group=None, load_cache_event=threading.Event(), io_backend=io,
            storage_backend="file", model_name="bench",
        )  # fmt: skip
    tensors = [*pool.k_buffer, *pool.v_buffer]
    source = torch.arange(PAGE, PAGE + bench.tokens, device=bench.device)
    saved = list[Any]()

    def write() -> None:
        if saved:
            host.free(saved.pop())
        saved.append(controller.write(source))
        controller.ack_write_queue.pop().finish_event.synchronize()

    firsts = list[float]()

    def load() -> Any:
        begin = time.perf_counter()
        slots = controller.load(saved[0])
        assert slots is not None
        index = controller.start_loading()
        if bench.device == "cuda":
            controller.layer_done_counter.events[index].wait(0)
            torch.cuda.current_stream().synchronize()
        firsts.append(time.perf_counter() - begin)
        controller.ack_load_queue.pop().finish_event.synchronize()
        allocator.free(slots)
        return slots

    allocator.clear()
    allocator.alloc(bench.tokens)  # the source
    bench.rate(f"{name}: device to host pool", bench.timed(write), bench.nbytes)
    bench.poison(tensors, source + bench.tokens)
    bench.rate(f"{name}: host pool to device", bench.timed(load), bench.nbytes, firsts)
    assert bench.same(tensors, source, load()), "bytes differ"
    tokens = list(range(bench.tokens))
    names = get_hash_str(tokens, None, page_size=PAGE)
    begin = time.perf_counter()
    controller.write_storage(saved[0], tokens, hash_value=names, prefix_keys=[])
    controller.ack_backup_queue.get(timeout=SECONDS)
    bench.rate(f"{name}: host pool to files", [time.perf_counter() - begin], bench.nbytes)

    def prefetch() -> None:
        operation = PrefetchOperation("prefetch", tokens)
        operation.hash_value, operation.host_indices = names, saved[0]
        controller.prefetch_buffer.put(operation)
        while not controller.ack_prefetch_queue.get(timeout=SECONDS).completed_req:
            pass

    def both() -> None:
        prefetch()
        load()

    bench.rate(f"{name}: files to host pool to device", bench.timed(both), bench.nbytes)
    assert bench.same(tensors, source, load()), "bytes differ"
    controller.detach_storage_backend()


def sglang_lmcache(bench: Bench, pool: Any) -> None:
    """LMCache's connector of SGLang between the pool and chunks of 256 tokens in pinned memory."""
    from lmcache.v1.gpu_connector.gpu_connectors import SGLangGPUConnector
    from lmcache.v1.memory_management import MemoryFormat

    torch, chunk = bench.torch, 256
    connector = SGLangGPUConnector(bench.heads * bench.dim, bench.layers)
    count = bench.tokens // chunk
    shape = (count, *connector.get_shape(chunk))
    host = torch.empty(shape, dtype=torch.bfloat16, pin_memory=bench.device == "cuda")
    chunks = [SimpleNamespace(tensor=t, metadata=SimpleNamespace(fmt=MemoryFormat.KV_2LTD)) for t in host]
    starts = [n * chunk for n in range(count)]
    ends = [n + chunk for n in starts]
    source = torch.arange(PAGE, PAGE + bench.tokens, device=bench.device)
    target, caches = source + bench.tokens, (pool.k_buffer, pool.v_buffer)
    saves = bench.timed(lambda: connector.batched_from_gpu(chunks, starts, ends, kvcaches=caches, slot_mapping=source))
    bench.rate("sglang, lmcache connector: device to host chunks", saves, bench.nbytes)
    tensors = [*pool.k_buffer, *pool.v_buffer]
    bench.poison(tensors, target)
    loads = bench.timed(lambda: connector.batched_to_gpu(chunks, starts, ends, kvcaches=caches, slot_mapping=target))
    bench.rate("sglang, lmcache connector: host chunks to device", loads, bench.nbytes)
    assert bench.same(tensors, source, target), "bytes differ"


# -- LightLLM --------------------------------------------------------------------------------


def module_at(folder: Path, name: str) -> Any:
    """One module of LightLLM by its file, without the packages above it."""
    spec = importlib.util.spec_from_file_location(f"lightllm_{name.rsplit('/', 1)[-1]}", folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lightllm_buffer(bench: Bench, size: int) -> Any:
    """The KV buffer of LightLLM's memory manager: its own class's, or one of that shape if the class cannot be made."""
    with suppress(BaseException):
        from lightllm.common.kv_cache_mem_manager.mem_manager import MemoryManager

        made = MemoryManager.__new__(MemoryManager)
        made._init_buffers(size, bench.torch.bfloat16, bench.heads, bench.dim, bench.layers)
        bench.row("lightllm: pool", "MemoryManager of LightLLM")
        return made.kv_buffer
    bench.row("lightllm: pool", "a tensor of the shape that MemoryManager._init_buffers makes")
    shape = (bench.layers, size + 1, 2 * bench.heads, bench.dim)
    return bench.torch.empty(shape, dtype=bench.torch.bfloat16, device=bench.device)


def lightllm_cpu_cache(bench: Bench, folder: Path, buffer: Any) -> None:
    """LightLLM's two kernels between its pool and pinned pages of its CPU cache, called as its operators do."""
    kernels = module_at(folder, "lightllm/common/basemodel/triton_kernel/kv_cache_offload")
    torch, pages = bench.torch, bench.tokens // PAGE
    shape = (pages, bench.layers, PAGE, 2 * bench.heads, bench.dim)
    cache = torch.empty(shape, dtype=torch.bfloat16, pin_memory=True)
    source = torch.arange(bench.tokens, device="cuda")
    target, numbers = source + bench.tokens, torch.arange(pages, dtype=torch.int32, device="cuda")
    common = {"gpu_kv_cache": buffer, "gpu_kv_cache_scale": None, "cpu_kv_cache": cache, "cpu_kv_cache_scale": None,
              "page_indexes": numbers, "tp_index": 0, "tp_world_size": 1, "grid_num": 16}  # fmt: skip
    ready = torch.zeros(pages, dtype=torch.bool, device="cuda")
    saves = bench.timed(lambda: kernels.offload_gpu_kv_to_cpu(token_indexes=source, page_readies=ready, **common))
    bench.rate("lightllm, its CPU cache: device to cache", saves, bench.nbytes)
    bench.poison(list(buffer), target)
    loads = bench.timed(lambda: kernels.load_cpu_kv_to_gpu(gpu_mem_indexes=target, **common))
    bench.rate("lightllm, its CPU cache: cache to device (one launch)", loads, bench.nbytes)
    assert bench.same(list(buffer), source, target), "bytes differ"


def lightllm_by_hand(bench: Bench, buffer: Any) -> None:
    """kvfs over LightLLM's pool as token slots: save, restart, layer-wise load, without a CPU cache."""
    import kvfs

    layout = kvfs.PageLayout.kv(
        layers=bench.layers, kv_heads=bench.heads, head_dim=bench.dim, dtype="bfloat16", page_tokens=PAGE
    )
    (group,) = layout.groups
    kv = kvfs.describe(group, list(buffer), "slot,2*head,dim")
    tokens = [n * 7 % 32000 for n in range(bench.tokens)]
    source, target = list(range(bench.tokens)), list(range(bench.tokens, 2 * bench.tokens))
    random.Random(1).shuffle(source)
    random.Random(2).shuffle(target)
    path = bench.make_store("lightllm")

    @contextmanager
    def opened() -> Iterator[tuple[Any, Any]]:
        with kvfs.open(path, capacity=bench.capacity()) as store:
            space = store.namespace("lightllm", layout, revision="0123abcd")
            io = space.attach(kv, ring_bytes=bench.args.ring)
            try:
                yield space, io
            finally:
                io.close()

    with opened() as (space, io):
        begin = time.perf_counter()
        prompt = space.prompt(tokens)
        prompt.look()
        saving = io.save(prompt.plan({group.name: list(range(prompt.chunks))}), source, bench.event(), deadline=SECONDS)
        assert saving.wait(SECONDS) is not None
        bench.rate("lightllm, kvfs by hand: save, until published", [time.perf_counter() - begin], bench.nbytes)
    with opened() as (space, io):
        if bench.device == "cuda":
            time.sleep(3.0)
        totals, firsts, longest = list[float](), list[float](), 0.0
        for n in range(bench.rounds + 1):
            bench.poison(list(buffer), bench.torch.tensor(target, device=bench.device))
            begin = time.perf_counter()
            with space.match(tokens) as match:
                loading = io.load(match, target, bench.event(), deadline=SECONDS, layerwise=True)
                queued = time.perf_counter() - begin
                assert loading.layer_ready(0).wait(SECONDS)
                first = time.perf_counter() - begin
                result = loading.wait(SECONDS)
            total = time.perf_counter() - begin
            assert result is not None and result.tokens == bench.tokens, result
            bench.sync()
            where = bench.torch.tensor
            assert bench.same(list(buffer), where(source, device=bench.device), where(target, device=bench.device))
            if n:
                totals.append(total)
                firsts.append(first)
                longest = max(longest, queued)
        bench.rate("lightllm, kvfs by hand: layer-wise load after a restart", totals, bench.nbytes, firsts)
        bench.row("lightllm, kvfs by hand: lookup and load() return after", f"{longest * 1e3:.2f} ms at most")
        bench.regions("lightllm, kvfs by hand", io)


class Slots:
    """The slots of LightLLM's memory manager, handed out in random order as after many requests."""

    def __init__(self, bench: Bench, size: int) -> None:
        self._state = bench.torch.randperm(size, generator=bench.torch.Generator().manual_seed(3)).int()
        self._start = 0

    @property
    def left(self) -> int:
        return len(self._state) - self._start

    def alloc(self, need_size: int) -> Any:
        self._start += need_size
        return self._state[self._start - need_size : self._start].clone()

    def free(self, slots: Any) -> None:
        self._start -= len(slots)
        self._state[self._start : self._start + len(slots)] = slots.cpu()


def lightllm_adapter(bench: Bench, buffer: Any) -> None:
    """The device path as LightLLM's inference loop calls it: save, restart, loads into slots in random order."""
    import numpy as np

    from kvfs.integrations.lightllm.device import DevicePath
    from kvfs.integrations.lightllm.device_pages import DevicePages, Shard
    from kvfs.integrations.lightllm.model import Server
    from kvfs.integrations.lightllm.settings import settings_of

    torch, name = bench.torch, "lightllm, kvfs device path"
    model = bench.store / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({
        "model_type": "llama", "num_hidden_layers": bench.layers, "num_attention_heads": bench.heads,
        "num_key_value_heads": bench.heads, "head_dim": bench.dim, "hidden_size": bench.heads * bench.dim,
        "rope_theta": 10000.0, "torch_dtype": "bfloat16",
    }))  # fmt: skip
    settings = settings_of({"KVFS_LIGHTLLM": json.dumps({
        "path": bench.make_store("lightllm-adapter"), "capacity": bench.capacity(), "weights_id": "0123abcd",
        "ring_bytes": bench.args.ring, "device": True, "store_seconds": 60, "load_seconds": 60,
    })})  # fmt: skip
    server = Server({"LIGHTLLM_START_ARGS": json.dumps({
        "model_dir": str(model), "data_type": "bf16", "cpu_cache_token_page_size": PAGE,
    })})  # fmt: skip
    pool, rows = Slots(bench, 2 * bench.tokens), torch.zeros((2, bench.tokens + 1), dtype=torch.int32)
    rows = rows.to(bench.device)
    overlap = torch.cuda.Stream() if bench.device == "cuda" else None
    backend = SimpleNamespace(
        model=SimpleNamespace(mem_manager=pool, req_manager=SimpleNamespace(req_to_token_indexs=rows)),
        is_master_in_dp=True,
    )  # fmt: skip
    context = SimpleNamespace(
        radix_cache=None, get_can_alloc_token_num=lambda: pool.left, get_overlap_stream=lambda: overlap
    )
    ids = np.array([*(n * 7 % 32000 for n in range(bench.tokens)), 1], dtype=np.int64)
    longest = dict.fromkeys(("begin_save", "begin_loads", "update", "ready"), 0.0)

    def request(number: int) -> Any:
        """LightLLM's InferReq."""
        return SimpleNamespace(
            req_id=number, req_idx=number % 2, cur_kv_len=0, infer_aborted=False, cpu_cache_task_status=None,
            _CpuCacheTaskStatus=SimpleNamespace(RUNNING="running", FINISHED="finished"), is_slave_req=lambda: False,
            shm_req=SimpleNamespace(input_len=len(ids), shm_prompt_ids=SimpleNamespace(arr=ids)),
            sampling_param=SimpleNamespace(
                shm_param=SimpleNamespace(prompt_logprobs=-1), disable_prompt_cache=False
            ),
        )  # fmt: skip

    def called(path: Any, call: str, *given: Any) -> Any:
        begin = time.perf_counter()
        found = getattr(path, call)(*given)
        longest[call] = max(longest[call], time.perf_counter() - begin)
        return found

    def until(path: Any, saves: Any, done: Callable[[], bool]) -> None:
        end = time.perf_counter() + SECONDS
        while not done():
            assert time.perf_counter() < end, "it goes on without end"
            called(path, "update", saves)
            time.sleep(0.0005)

    def same(one: Any, other: Any) -> bool:
        return bench.same(list(buffer), rows[one, : bench.tokens].long(), rows[other, : bench.tokens].long())

    saves = deque[Any]()
    first = request(0)
    rows[0, : bench.tokens] = pool.alloc(bench.tokens).to(bench.device)
    first.cur_kv_len = bench.tokens
    for again in (False, True):
        path = DevicePath(DevicePages.open(settings, server, Shard(buffer, 0, 1)), backend, context, list)
        if not again:
            begin = time.perf_counter()
            saves.append(called(path, "begin_save", first))
            saving = saves[0].save
            until(path, saves, lambda: not saves)
            free = time.perf_counter() - begin
            assert saving._saving is not None and saving._saving.wait(SECONDS) is not None
            bench.rate(f"{name}: save, until its slots are free", [free], bench.nbytes)
            bench.rate(f"{name}: save, until published", [time.perf_counter() - begin], bench.nbytes)
            path.close()
    totals = list[float]()
    for number in range(1, 2 * bench.rounds + 3, 2):
        bench.poison(list(buffer), pool._state[pool._start :].long().to(bench.device))
        req = request(number)
        begin = time.perf_counter()
        called(path, "begin_loads", [req])
        until(path, saves, lambda: called(path, "ready", [req]) == [req])  # noqa: B023
        totals.append(time.perf_counter() - begin)
        assert req.cur_kv_len == bench.tokens, f"{req.cur_kv_len} of {bench.tokens} tokens are loaded"
        bench.sync()
        assert same(0, 1), "bytes differ"
        pool.free(rows[1, : bench.tokens])
    bench.rate(f"{name}: first load after a restart", totals[:1], bench.nbytes)
    bench.rate(f"{name}: load", totals[1:], bench.nbytes)
    bench.row(f"{name}: longest call, ms", ", ".join(f"{k} {v * 1e3:.2f}" for k, v in longest.items()))
    bench.regions(name, path.pages.io)
    path.close()


def lightllm(bench: Bench, folder: Path) -> None:
    buffer = lightllm_buffer(bench, 2 * bench.tokens)
    bench.fill(list(buffer))
    with bench.part("lightllm, kvfs device path"):
        lightllm_adapter(bench, buffer)
    with bench.part("lightllm, kvfs by hand"):
        lightllm_by_hand(bench, buffer)
    with bench.part("lightllm, its CPU cache"):
        lightllm_cpu_cache(bench, folder, buffer)


def sglang(bench: Bench) -> None:
    stub_sgl_kernel()
    pool, allocator = sglang_pool(bench)
    with bench.part("sglang, kvfs linker"):
        sglang_linker(bench, pool, allocator)
    with bench.part("sglang, lmcache connector"):
        sglang_lmcache(bench, pool)
    for io, layout in (("kernel", "layer_first"), ("kernel", "page_first"), ("direct", "page_first_direct")):
        with bench.part(f"sglang, hicache {io} {layout}"):
            sglang_hicache(bench, pool, allocator, io, layout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ring", default="1GiB")
    parser.add_argument("--only", choices=("lightllm", "sglang"), help="one engine")
    parser.add_argument("--segment", default="256MiB", help="bytes of a segment of the stores")
    parser.add_argument(
        "--store", type=Path, default=None, help="directory of the stores; default: that of temporaries"
    )
    args = parser.parse_args()
    sys.path[:0] = [str(args.engines / "lightllm"), str(args.engines / "python")]
    sys.path.append(str(args.engines / "stubs"))  # of what is not installed
    bench = Bench(args)
    print(
        f"{bench.tokens} tokens, {bench.layers} layers, {bench.nbytes / 1e9:.2f} GB, {bench.rounds} rounds", flush=True
    )
    try:
        with bench.part("link"):
            link(bench)
        if args.only != "sglang":
            with bench.part("lightllm"):
                lightllm(bench, args.engines / "lightllm")
        if args.only != "lightllm":
            with bench.part("sglang"):
                sglang(bench)
    finally:
        shutil.rmtree(bench.store, ignore_errors=True)
    print("\n" + "\n".join(f"{name:58} {what}" for name, what in bench.rows), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
