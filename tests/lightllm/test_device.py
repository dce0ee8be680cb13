"""The device path under LightLLM's own requests, radix tree, allocator and patched cache module, on a CPU.

Replaced: the model, the GPU (host memory, where nothing is asynchronous) and the groups of ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import time
import types
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.test_lightllm import PAGE, SHAPE, contents, model_folder, tokens_of
from tests.lightllm.engine import SECONDS, _without_models, arguments
from tests.lightllm.test_disk_worker import pytestmark as needs_a_checkout
from tests.stores import corrupt

pytestmark = needs_a_checkout

PATCH = Path(__file__).resolve().parents[2] / "docs" / "lightllm-device.patch"
PLACE = "lightllm/server/router/model_infer/mode_backend"
SLOTS = 64 * PAGE
_KEPT = list[Any]()  # until the process ends: LightLLM closes shared memory into which its arrays still point


@contextlib.contextmanager
def _on_cpu() -> Iterator[None]:
    """Tensors that LightLLM makes on the GPU, or pins, are plain ones."""
    names = ("zeros", "empty", "arange", "tensor", "full")
    before = {name: getattr(torch, name) for name in names}

    def plain(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*given: Any, **how: Any) -> Any:
            how.pop("pin_memory", None)
            if how.get("device") == "cuda":
                how["device"] = "cpu"
            return make(*given, **how)

        return made

    for name in names:
        setattr(torch, name, plain(before[name]))
    try:
        yield
    finally:
        for name in names:
            setattr(torch, name, before[name])


@contextlib.contextmanager
def _modules(**replaced: dict[str, Any]) -> Iterator[None]:
    before = {name: sys.modules.get(name) for name in replaced}
    for name, content in replaced.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(content)
    try:
        yield
    finally:
        for name, one in before.items():
            sys.modules.pop(name, None)
            if one is not None:
                sys.modules[name] = one


def _patched(folder: Path) -> Any:
    """LightLLM's cache module with the patch; the classes of its backend and its kernels are not needed."""
    source = Path(os.environ["LIGHTLLM_SOURCE"])
    for name in ("multi_level_kv_cache.py", "base_backend.py", "chunked_prefill/impl.py"):
        copy = folder / PLACE / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((source / PLACE / name).read_bytes())
    subprocess.run(["patch", "-p1", "--quiet", "--fuzz=0", "-i", str(PATCH)], cwd=folder, check=True, timeout=60)
    for file in (folder / PLACE).rglob("*.py"):
        compile(file.read_text(), str(file), "exec")
    package = PLACE.replace("/", ".")
    with _modules(**{package: {"__path__": []}, f"{package}.base_backend": {"ModeBackend": object}}):
        name = f"{package}.multi_level_kv_cache"
        spec = importlib.util.spec_from_file_location(name, folder / PLACE / "multi_level_kv_cache.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


class Rank:
    """One rank of a server: LightLLM's context, radix tree, allocator and requests, and its patched cache module."""

    def __init__(self, path: Path, folder: Path) -> None:
        from lightllm.utils import envs_utils

        args = arguments(model_folder(folder), enable_disk_cache=False, data_type="bfloat16")
        os.environ |= {
            "LIGHTLLM_START_ARGS": json.dumps(args), "LIGHTLLM_UNIQUE_SERVICE_NAME_ID": uuid.uuid4().hex[:16],
            "LIGHTLLM_CURRENT_RANK_IN_NODE": "0",
            "KVFS_LIGHTLLM": json.dumps({"path": str(path), "capacity": "64MiB", "ring_bytes": "8MiB", "device": True}),
        }  # fmt: skip
        for cached in (envs_utils.get_env_start_args, envs_utils.get_unique_server_name):
            cached.cache_clear()
        _without_models()
        importlib.import_module("lightllm.common.basemodel")  # first: LightLLM's modules import one another
        from lightllm.common.kv_cache_mem_manager.allocator import KvCacheAllocator
        from lightllm.server.core.objs import ShmReqManager
        from lightllm.server.router.dynamic_prompt.radix_cache import RadixCache
        from lightllm.server.router.model_infer import infer_batch

        self.shm = ShmReqManager()
        infer_batch.custom_cat = torch.cat  # of tensors on the GPU
        with _on_cpu():
            self.allocator = KvCacheAllocator(SLOTS)
            self.pool = _pool(self.allocator)
            self.rows = torch.zeros((9, 32 * PAGE), dtype=torch.int32)
            self.context = infer_batch.g_infer_context
            sampling = types.SimpleNamespace(init_req_sampling_params=lambda req: None)
            self.requests = types.SimpleNamespace(
                req_to_token_indexs=self.rows, mem_manager=self.pool, req_sampling_params_manager=sampling,
                alloc=itertools.cycle(range(8)).__next__, free=lambda rows, slots: self.allocator.free(slots),
            )  # fmt: skip
            tree = RadixCache(uuid.uuid4().hex, SLOTS, 0, self.pool)
            self.backend = types.SimpleNamespace(
                model=types.SimpleNamespace(mem_manager=self.pool, req_manager=self.requests, **dict.fromkeys((
                    "prefill_att_backend", "decode_att_backend", "prefill_att_backend1", "decode_att_backend1",
                ))),
                is_master_in_dp=True, rank_in_dp=0, dp_world_size=1, radix_cache=tree,
            )  # fmt: skip
            self.context.args = envs_utils.get_env_start_args()
            self.context.backend, self.context.req_manager = self.backend, self.requests
            self.context.radix_cache, self.context.shm_req_manager = tree, self.shm
            self.context.requests_mapping, self.context.infer_req_ids = {}, []
            self.context.vocab_size, self.context.is_linear_att_mixed_model = 32_000, False
            module = _patched(folder.with_name("patched"))
            module.create_new_group_for_current_dp = lambda backend: None
            module.dist = types.SimpleNamespace(barrier=lambda group: None)
            module.CpuKvCacheClient = lambda **_: None
            package = PLACE.replace("/", ".")
            with _modules(**{package: {"__path__": []}, f"{package}.base_backend": {"ModeBackend": object}}):
                self.module = module.MultiLevelKvCacheModule(self.backend)
        self.context.get_cpu_kv_cache_stream = lambda: None
        self._numbers = iter(range(8, 1 << 30, 8))

    def request(self, tokens: list[int]) -> Any:
        """A new request, as the router hands it to the rank."""
        from lightllm.server.core.objs import SamplingParams

        index, number = self.shm.alloc_req_index(), next(self._numbers)
        made = self.shm.get_req_obj_by_index(index)
        parameters = SamplingParams()
        parameters.max_new_tokens, parameters.prompt_logprobs, parameters.seed = 16, -1, -1
        made.init(number, tokens, parameters, None)
        made.group_req_id = number
        self.shm.put_back_req_obj(made)
        images = types.SimpleNamespace(to_dict=dict)
        (req,) = self.context.add_reqs([(number, index, images, 0)])
        self.module.load_cpu_cache_to_reqs([req])
        _KEPT.extend((made, req))
        return req

    def turn_until(self, done: Callable[[], bool]) -> None:
        end = time.monotonic() + SECONDS
        while not done():
            assert time.monotonic() < end, "the loop goes on without end"
            self.module.update_cpu_cache_task_states()
            time.sleep(0.0005)

    def await_load(self, req: Any) -> int:
        self.turn_until(lambda: self.module.kvfs.ready([req]) == [req])
        return int(req.cur_kv_len)

    def compute(self, req: Any, pages: list[bytes]) -> None:
        """What prefill does: slots for the tokens that are not there yet, and their KV."""
        first, end = req.cur_kv_len, len(pages) * PAGE
        self.rows[req.req_idx, first:end] = self.pool.alloc(end - first)
        for number in range(first // PAGE, len(pages)):
            _set_page(self.pool, self.slots(req, number), pages[number])
        req.cur_kv_len = end

    def finish(self, req: Any) -> None:
        """What the loop does with a request that has ended; what was taken is published then."""
        saves = list[Any]()

        def ended() -> bool:
            over = bool(self.module.offload_finished_reqs_to_cpu_cache([req]) == [req])
            saves.extend(task.save for task in self.module.cpu_cache_handle_queue)
            return over

        self.turn_until(ended)
        self.context.filter_reqs([req])
        assert all(save._saving is None or save._saving.wait(SECONDS) for save in saves)

    def slots(self, req: Any, number: int) -> torch.Tensor:
        return self.rows[req.req_idx, number * PAGE : (number + 1) * PAGE]

    def pages(self, req: Any) -> list[bytes]:
        return [_page(self.pool, self.slots(req, n)) for n in range(req.cur_kv_len // PAGE)]

    def held(self) -> int:
        """Slots that neither a request nor the tree has given back."""
        return int(SLOTS - self.allocator.can_use_mem_size - self.backend.radix_cache.get_tree_total_tokens_num())

    def restart_tree(self) -> None:
        self.backend.radix_cache.free_radix_cache_to_get_enough_token(SLOTS)
        assert self.allocator.can_use_mem_size == SLOTS

    def close(self) -> None:
        self.module.kvfs.close()


def _pool(allocator: Any) -> Any:
    from tests.integrations.lightllm_device import MemoryManager

    made = MemoryManager(SLOTS, **SHAPE)
    made.alloc, made.free = allocator.alloc, allocator.free  # type: ignore[method-assign]
    made.allocator = allocator  # type: ignore[attr-defined]
    return made


def _page(pool: Any, slots: torch.Tensor) -> bytes:
    found: bytes = pool.page(slots)
    return found


def _set_page(pool: Any, slots: torch.Tensor, content: bytes) -> None:
    pool.set_page(slots, content)


@pytest.fixture
def start(memory_path: Path) -> Iterator[Callable[[], Rank]]:
    made = list[Rank]()

    def one() -> Rank:
        made.append(Rank(memory_path / "store", memory_path / "model"))
        _KEPT.append(made[-1])
        return made[-1]

    before = dict(os.environ)
    yield one
    for rank in made:
        rank.close()
    os.environ.clear()
    os.environ |= before


def test_a_finished_prompt_is_restored_after_a_restart(start: Callable[[], Rank]) -> None:
    rank, tokens, pages = start(), tokens_of(1, 20), contents(1, 20)
    req = rank.request([*tokens, 0])
    assert rank.await_load(req) == 0
    rank.compute(req, pages)
    rank.finish(req)
    assert rank.held() == 0
    rank.close()
    rank = start()
    req = rank.request([*tokens, 0])
    assert rank.await_load(req) == 20 * PAGE and rank.pages(req) == pages
    assert req.shm_req.cpu_prompt_cache_len == req.shm_req.shm_cur_kv_len == 20 * PAGE
    rank.finish(req)
    assert rank.held() == 0, "the tree owns the slots that were loaded"
    again = rank.request([*tokens, 0])
    assert again.cur_kv_len == 20 * PAGE and rank.module.kvfs.ready([again]) == [again], "the tree has it"
    rank.finish(again)


def test_what_the_tree_has_is_not_loaded_and_not_written(start: Callable[[], Rank]) -> None:
    rank, tokens, pages = start(), tokens_of(1, 20), contents(1, 20)
    req = rank.request([*tokens, 0])
    rank.await_load(req)
    rank.compute(req, pages)
    rank.finish(req)
    rank.restart_tree()
    short = rank.request([*tokens[: 5 * PAGE + 7], 31_999])  # the tree ends within a page
    assert rank.await_load(short) == 5 * PAGE
    rows = rank.rows[short.req_idx]
    rows[5 * PAGE : 5 * PAGE + 7] = rank.pool.alloc(7)
    rank.pool.kv_buffer[:, rows[5 * PAGE : 5 * PAGE + 7].long()] = 3.0
    short.cur_kv_len = 5 * PAGE + 7
    rank.finish(short)
    req = rank.request([*tokens, 0])
    assert req.cur_kv_len == 5 * PAGE + 7
    assert rank.await_load(req) == 20 * PAGE
    shared = rank.rows[req.req_idx, 5 * PAGE : 5 * PAGE + 7]
    assert (rank.pool.kv_buffer[:, shared.long()] == 3.0).all()
    assert rank.pages(req)[:5] == pages[:5] and rank.pages(req)[6:] == pages[6:]
    rank.finish(req)
    assert rank.held() == 0


def test_a_damaged_page_makes_the_load_shorter(start: Callable[[], Rank], memory_path: Path) -> None:
    rank, tokens, pages = start(), tokens_of(1, 20), contents(1, 20)
    req = rank.request([*tokens, 0])
    rank.await_load(req)
    rank.compute(req, pages)
    rank.finish(req)
    rank.close()
    corrupt(memory_path / "store", pages[12])
    rank = start()
    req = rank.request([*tokens, 0])
    assert rank.await_load(req) == 12 * PAGE and rank.pages(req) == pages[:12]
    rank.compute(req, pages)
    rank.finish(req)
    rank.restart_tree()
    req = rank.request([*tokens, 0])
    assert rank.await_load(req) == 20 * PAGE and rank.pages(req) == pages, "it was stored again"
    rank.finish(req)
    assert rank.held() == 0


def test_an_aborted_request_leaves_no_slot_behind(start: Callable[[], Rank]) -> None:
    rank, tokens, pages = start(), tokens_of(1, 20), contents(1, 20)
    req = rank.request([*tokens, 0])
    rank.await_load(req)
    rank.compute(req, pages)
    rank.finish(req)
    for turns in range(6):
        rank.restart_tree()
        rank.pool.kv_buffer.fill_(1.5)
        req = rank.request([*tokens, 0])
        for _ in range(turns):
            rank.module.update_cpu_cache_task_states()
            time.sleep(0.001)
        req.infer_aborted = True
        loaded = rank.await_load(req)
        assert rank.pages(req) == pages[: loaded // PAGE]
        rank.finish(req)
        assert rank.held() == 0


def test_a_server_without_the_setting_works_as_before(start: Callable[[], Rank], memory_path: Path) -> None:
    rank = start()
    rank.close()
    os.environ["KVFS_LIGHTLLM"] = json.dumps({"path": str(memory_path / "other")})
    module = sys.modules[type(rank.module.kvfs).__module__]
    assert module.device_path(None, None, None) is None
    assert not (memory_path / "other").exists()
    assert dataclasses.is_dataclass(type(rank.module.kvfs.pages))
