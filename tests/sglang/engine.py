"""SGLang's own controller, pools and threads on a CPU, as the contract of adapters uses an engine."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import Empty
from typing import Any

import torch
from sglang.srt.managers.cache_controller import HiCacheController, PrefetchOperation
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import _mha_host_inputs
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.utils import get_hash_str
from sglang.srt.runtime_context import get_parallel

from kvfs.integrations.sglang import attachment as module
from kvfs.integrations.sglang.ranks import Rank
from kvfs.store import open_store
from kvfs.system.files import Files
from tests.integrations.sglang_pools import page_of, poison, set_page, slots

SECONDS = 60.0


def host_pool(
    layout: str = "page_first", *, latent: bool = False, page: int = 64, pages: int = 96, layers: int = 3,
    heads: int = 2, start_layer: int = 0,
) -> tuple[Any, Any]:  # fmt: skip
    """SGLang's device pool and host pool."""
    common = {"start_layer": start_layer, "end_layer": start_layer + layers - 1}
    how = {"host_to_device_ratio": 1.0, "host_size": 0, "page_size": page, "layout": layout, "pin_memory": False}
    size = page * pages
    if latent:
        device = MLATokenToKVPool(size, page, torch.bfloat16, 24, 8, layers, "cpu", False, **common)
        info = device.get_device_pool_infos()[0].buffer_info
        host = MLATokenToKVPoolHost(
            info, device_capacity_tokens=size, target_layer_num=layers, override_kv_cache_dim=device.kv_cache_dim,
            **common, **how,
        )  # fmt: skip
    else:
        device = MHATokenToKVPool(size, page, torch.bfloat16, heads, 8, layers, "cpu", False, **common)
        kind, info, arguments = _mha_host_inputs(device)
        host = kind(info, **{**arguments, **how})
    host.kv_buffer.view(torch.uint8).zero_()
    return device, host


class RealEngine:
    """One rank: a HiCacheController with a storage backend of kvfs."""

    def __init__(
        self, path: Path, *, pool: tuple[Any, Any] | None = None, rank: Rank | None = None, files: Files | None = None,
        pass_prefix: bool = True, **extra: Any,
    ) -> None:  # fmt: skip
        self.device, self.pool = pool or host_pool()
        rank = rank or Rank()
        self._pass_prefix = pass_prefix
        self.page = self.pool.page_size
        self._free = list(range(self.pool.size // self.page))[::-1]
        allocator = PagedTokenToKVPoolAllocator(self.device.size, self.page, torch.bfloat16, "cpu", self.device, False)
        config = {
            "backend_name": "kvfs", "module_path": "kvfs.integrations.sglang.hicache", "class_name": "KvfsHiCache",
            "interface_v1": 1, "path": str(path), "capacity": "64MiB", "weights_id": "0123abcd", "ring_bytes": "8MiB",
            **extra,
        }  # fmt: skip
        before = module.open_store
        module.open_store = functools.partial(open_store, files=files) if files is not None else open_store  # type: ignore[assignment]
        try:
            with get_parallel().override(
                attn_dcp_size=1, attn_dcp_rank=0, tp_rank=rank.tp, tp_size=rank.tp_size, pp_rank=rank.pp,
                pp_size=rank.pp_size,
            ):  # fmt: skip
                self.controller = HiCacheController(
                    allocator, self.pool, self.page, tp_group=None, load_cache_event=threading.Event(),
                    storage_backend="dynamic", model_name="org/model", storage_backend_extra_config=config,
                )  # fmt: skip
        finally:
            module.open_store = before

    @property
    def backend(self) -> Any:
        """The adapter, inside of SGLang's failure injector if that is on."""
        backend = self.controller.storage_backend
        return getattr(backend, "_backend", backend)

    def put(self, tokens: Sequence[int], pages: Sequence[bytes], first: int = 0) -> int:
        mine = self._free[: len(pages)]
        for page, content in zip(mine, pages, strict=True):
            set_page(self.pool, page, content)
        return self.save(tokens, mine, first)

    def save(self, tokens: Sequence[int], mine: Sequence[int], first: int = 0) -> int:
        self.submit(tokens, mine, first)
        return self.controller.ack_backup_queue.get(timeout=SECONDS).completed_tokens // self.page

    def submit(self, tokens: Sequence[int], mine: Sequence[int], first: int = 0) -> None:
        """Hand a backup to SGLang's thread."""
        names = get_hash_str(list(tokens), None, page_size=self.page)
        part = names[first : first + len(mine)]
        self.controller.write_storage(
            slots(self.pool, mine), list(tokens[first * self.page : (first + len(mine)) * self.page]), hash_value=part,
            prefix_keys=names[:first] if self._pass_prefix else None,
        )  # fmt: skip

    def lookup(self, tokens: Sequence[int]) -> int:
        operation = PrefetchOperation("lookup", list(tokens))
        return self.controller._storage_hit_query(operation)[1] // self.page

    def get(self, tokens: Sequence[int], count: int) -> list[bytes | None]:
        mine = self._free[-count:]
        poison(self.pool)
        untouched = page_of(self.pool, mine[0])
        done = self.prefetch(tokens[: count * self.page], mine)
        found = list[bytes | None]()
        for n, page in enumerate(mine):
            content = page_of(self.pool, page)
            found.append(content if content != untouched else None)
            assert n >= done or content != untouched, "a page that SGLang uses was not loaded"
        return found

    def prefetch(self, tokens: Sequence[int], mine: Sequence[int]) -> int:
        """Pages that SGLang takes for loaded, through its threads."""
        operation = PrefetchOperation("prefetch", list(tokens))
        operation.hash_value = get_hash_str(list(tokens), None, page_size=self.page)
        operation.host_indices = slots(self.pool, mine)
        self.controller.prefetch_buffer.put(operation)
        done = 0
        while True:
            ack = self.controller.ack_prefetch_queue.get(timeout=SECONDS)
            if ack.completed_tokens is not None:
                done = ack.completed_tokens // self.page
            if ack.completed_req:
                return done

    def counters(self) -> Mapping[str, int]:
        return dict(self.backend._pages.attached.store.stats()["counters"])

    def drain(self) -> None:
        """Forget what SGLang's threads reported so far."""
        for queue in (self.controller.ack_backup_queue, self.controller.ack_prefetch_queue):
            while True:
                try:
                    queue.get_nowait()
                except Empty:
                    break

    def close(self) -> None:
        self.controller.detach_storage_backend()
