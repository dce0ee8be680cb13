"""LightLLM's own manager, disk worker, CPU cache client and requests, in one process without a GPU.

Real: shared memory of the CPU cache (SysV) and of its metadata, requests, hashes, the manager with its threads and
sockets, the disk worker. Replaced: the model classes, whose kernels need a GPU, and the router's copy from the GPU.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
import types
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kvfs.integrations.lightllm import service as module
from kvfs.store import open_store
from kvfs.system.files import Files
from tests.integrations.lightllm_cache import canonical, set_canonical

PATCH = Path(__file__).resolve().parents[2] / "docs" / "lightllm-prompts.patch"
PACKAGE = "lightllm.server.multi_level_kv_cache"
SECONDS = 60.0
POISON = 0x7B
PAGE = 64
SHAPE: dict[str, Any] = {"layers": 3, "heads": 2, "dim": 8, "dtype": torch.bfloat16}


def _without_models() -> None:
    """The classes by which LightLLM chooses the shape of its CPU cache: of a plain model."""
    models = types.ModuleType("lightllm.models")
    for name in ("Plain", "Deepseek2TpPartModel", "Deepseek3_2TpPartModel"):
        setattr(models, name, type(name, (), {}))
    models.get_model_class = lambda model_cfg: models.Plain  # type: ignore[attr-defined]
    sys.modules["lightllm.models"] = models


@contextlib.contextmanager
def classes(patched: bool) -> Iterator[Any]:
    """The manager's module, and in ``sys.modules`` the worker's: as they are, or with the patch of kvfs."""
    names = [f"{PACKAGE}.{name}" for name in ("disk_cache_worker", "manager")]
    before = {name: sys.modules.pop(name, None) for name in names}
    try:
        with tempfile.TemporaryDirectory() as folder:
            places = {name: Path(os.environ["LIGHTLLM_SOURCE"], *name.split(".")).with_suffix(".py") for name in names}
            if patched:
                for name, place in places.items():
                    copy = Path(folder, *name.split(".")).with_suffix(".py")
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    copy.write_bytes(place.read_bytes())
                    places[name] = copy
                subprocess.run(
                    ["patch", "-p1", "--quiet", "--fuzz=0", "-i", str(PATCH)], cwd=folder, check=True, timeout=60
                )  # fmt: skip
            for name, place in places.items():
                spec = importlib.util.spec_from_file_location(name, place)
                assert spec is not None and spec.loader is not None
                sys.modules[name] = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(sys.modules[name])
            yield sys.modules[names[1]]
    finally:
        for name, one in before.items():
            sys.modules.pop(name, None)
            if one is not None:
                sys.modules[name] = one


def arguments(folder: Path, **changes: Any) -> dict[str, Any]:
    """The arguments of a server, all of them."""
    import dataclasses

    from lightllm.server.core.objs.start_args_type import StartArgs

    given = dataclasses.asdict(StartArgs())
    return {
        **given, "model_dir": str(folder), "enable_cpu_cache": True, "enable_disk_cache": True,
        "cpu_cache_token_page_size": PAGE, "disk_cache_storage_size": 0.0625, "running_max_req_size": 8,
        "cpu_kv_cache_shm_id": uuid.uuid4().int % 123456789, "zmq_mode": "tcp://", **changes,
    }  # fmt: skip


class Server:
    """A LightLLM server as far as its multi-level cache goes; ``offload`` stands for its router."""

    def __init__(
        self, path: Path, folder: Path, *, patched: bool = False, files: Files | None = None, pages: int = 96,
        settings: Mapping[str, Any] | None = None, shape: Mapping[str, Any] | None = None, **changes: Any,
    ) -> None:  # fmt: skip
        import zmq
        from lightllm.utils import envs_utils, kv_cache_utils, shm_port_args

        self.shape: Any = {**SHAPE, **(shape or {})}
        layers, heads, dim, dtype = (self.shape[name] for name in ("layers", "heads", "dim", "dtype"))
        self.page_bytes = PAGE * layers * 2 * heads * dim * dtype.itemsize
        changes = {"data_type": str(dtype).removeprefix("torch."), **changes}
        args = arguments(
            folder,
            disk_cache_dir=str(path.parent),
            cpu_cache_storage_size=(pages + 0.5) * self.page_bytes / 2**30,
            **changes,
        )
        os.environ |= {
            "LIGHTLLM_START_ARGS": json.dumps(args), "LIGHTLLM_UNIQUE_SERVICE_NAME_ID": uuid.uuid4().hex[:16],
            "LIGHTLLM_DISK_CACHE_PROMPT_LIMIT_LENGTH": "0",
            "KVFS_LIGHTLLM": json.dumps(
                {"path": str(path), "capacity": "64MiB", "ring_bytes": "8MiB", **(settings or {})}
            ),
        }  # fmt: skip
        for cached in (
            envs_utils.get_env_start_args, envs_utils.get_unique_server_name, envs_utils.get_llm_data_type,
            kv_cache_utils.calcu_cpu_cache_meta, kv_cache_utils.select_mem_manager_class,
        ):  # fmt: skip
            cached.cache_clear()
        _without_models()
        shm_port_args.ShmPortArgs._instance = None
        shm_port_args.ShmPortArgs.get_instance(create=True)
        self.args = envs_utils.get_env_start_args()
        self._router = zmq.Context.instance().socket(zmq.PULL)
        self._router.bind(f"tcp://127.0.0.1:{shm_port_args.get_shm_port_args().router_port}")
        before = module.open_store
        module.open_store = functools.partial(open_store, files=files) if files is not None else open_store  # type: ignore[assignment]
        try:
            with classes(patched) as found:
                self.manager = found.MultiLevelKVCacheManager(self.args)
        finally:
            module.open_store = before
        self.worker, self.client = self.manager.disk_cache_worker, self.manager.cpu_cache_client
        self.service = self.worker.service
        self.memory = self.client.cpu_kv_cache_tensor.flatten(1).view(torch.uint8)
        assert len(self.memory) == pages and self.memory.shape[1] == self.page_bytes
        self._requests = iter(range(8, 1 << 30, 8))

    # -- what the router does ----------------------------------------------------------------

    def request(self, tokens: Sequence[int]) -> Any:
        """A request in shared memory, as LightLLM's HTTP server makes it."""
        from lightllm.server.core.objs import SamplingParams

        index = self.manager.shm_req_manager.alloc_req_index()
        made = self.manager.shm_req_manager.get_req_obj_by_index(index)
        parameters = SamplingParams()
        parameters.max_new_tokens, parameters.prompt_logprobs = 16, -1
        made.init(next(self._requests), list(tokens), parameters, None)
        self.manager.shm_req_manager.put_back_req_obj(made)
        return made

    def release(self, made: Any) -> None:
        self.manager.shm_req_manager.release_req_index(made.index_in_shm_mem)

    def match(self, made: Any) -> list[int]:
        """Let the manager look the request up, through its queue; the pages of the CPU cache that it may use then."""
        from lightllm.server.core.objs.io_objs import GroupReqIndexes

        self.manager.recv_queue.put(GroupReqIndexes(made.request_id, None, [made.index_in_shm_mem], time.time()))
        assert self._router.poll(int(SECONDS * 1000)), "the manager does not answer"
        answer = self._router.recv_pyobj()
        assert answer.group_req_id == made.request_id
        return list(made.cpu_cache_match_page_indexes.get_all())

    def offload(self, names: Sequence[int], pages: Sequence[bytes], first: int = 0) -> None:
        """Put pages into the CPU cache, as the router does when a request has finished."""
        with self.locked():
            mine, ready = self.client.allocate_pages(list(names), disk_offload_enable=True)
        assert -1 not in mine, "the CPU cache is full"
        for number, content in zip(mine[first:], pages, strict=True):
            if not ready[mine.index(number)]:
                self.memory[number] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        with self.locked():
            self.client.update_pages_status_to_ready(
                mine, deref=True, disk_offload_enable=True, token_num_in_page_list=len(names) * PAGE
            )  # fmt: skip

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        self.client.lock.acquire_sleep1ms()
        try:
            yield
        finally:
            self.client.lock.release()

    def release_pages(self, pages: Sequence[int]) -> None:
        with self.locked():
            self.client.deref_pages(list(pages))

    # -- for tests ---------------------------------------------------------------------------

    def references(self) -> int:
        items = self.client.page_items.linked_items
        return sum(items[n].ref_count for n in range(self.client.page_num))

    def settle(self) -> None:
        """Wait until the worker has offloaded everything, and the service has stored it."""
        end = time.monotonic() + SECONDS
        while self.references() or self.client.offload_page_indexes.size() or self.service.active_threads("w"):
            assert time.monotonic() < end, f"{self.references()} references are left"
            time.sleep(0.002)

    def forget(self) -> None:
        """Empty the CPU cache, and overwrite its memory."""
        with self.locked():
            mine, _ = self.client.allocate_pages(
                [uuid.uuid4().int for _ in range(self.client.page_num)], disk_offload_enable=True
            )  # fmt: skip
            assert -1 not in mine, "a page is referenced"
            self.client.recycle_pages(mine)
        self.memory.fill_(POISON)

    def close(self) -> None:
        """End the threads of the manager and the service. LightLLM ends with its process."""

        stopped = threading.Event()

        def stop() -> None:  # the worker's thread has no end of its own
            stopped.set()
            threading.Event().wait()

        self.worker._gather_offload_payloads = stop
        assert stopped.wait(SECONDS), "the worker hangs"
        self.manager.recv_queue = queue.Queue()
        self.manager.executor.shutdown()
        self.service.close()
        self._router.close(0)
        self.manager.zmq_recv_socket.close(0)
        self.manager.send_to_router.close(0)


class Engine:
    """A server as the contract of adapters uses an engine. Loads of which one page is lost are given up as a whole."""

    def __init__(self, server: Server) -> None:
        self.server, self._closed = server, False

    def put(self, tokens: Sequence[int], pages: Sequence[bytes], first: int = 0) -> int:
        made = self.server.request([*tokens, 0])
        names = made.token_hash_list.get_all()[: first + len(pages)]
        with self._told(made):
            self.server.forget()
            self.server.offload(names, [self._engine_bytes(page) for page in pages], first)
            self.server.settle()
        return max(0, self._stored(names) - first)

    def lookup(self, tokens: Sequence[int]) -> int:
        made = self.server.request([*tokens, 0])
        with self._told(made):
            return self._stored(made.token_hash_list.get_all())

    def get(self, tokens: Sequence[int], count: int) -> list[bytes | None]:
        made = self.server.request([*tokens[: count * PAGE], 0])
        self.server.forget()
        found = self.server.match(made)
        pages = [self._canonical_bytes(self.server.memory[n].numpy().tobytes()) for n in found]
        assert made.disk_prompt_cache_len == len(found) * PAGE
        self.server.release_pages(found)
        self.server.release(made)
        assert self.server.references() == 0
        return [*pages, *[None] * (count - len(found))]

    def counters(self) -> Mapping[str, int]:
        return dict(self.server.service.counters())

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.server.close()

    def _stored(self, names: Sequence[int]) -> int:
        return int(self.server.worker.query_loadable_pages(list(names), 0))

    @contextlib.contextmanager
    def _told(self, made: Any) -> Iterator[None]:
        """The manager has seen the request, as it does before each is computed; what it loaded is released."""
        self.server.release_pages(self.server.match(made))
        yield
        self.server.release(made)

    def _engine_bytes(self, page: bytes) -> bytes:
        return page

    def _canonical_bytes(self, page: bytes) -> bytes:
        return page


class CanonicalEngine(Engine):
    """A patched server; pages are given and returned as canonical bytes."""

    def _engine_bytes(self, page: bytes) -> bytes:
        one = torch.empty((1, self.server.page_bytes), dtype=torch.uint8)
        set_canonical(one, 0, page, **self.server.shape)
        return one.numpy().tobytes()

    def _canonical_bytes(self, page: bytes) -> bytes:
        return canonical(torch.frombuffer(bytearray(page), dtype=torch.uint8)[None], 0, **self.server.shape)
