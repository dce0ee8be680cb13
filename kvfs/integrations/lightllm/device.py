"""LightLLM's KV pool on the GPU and a store, without its CPU cache: what docs/lightllm-device.patch calls.

The inference loop of each rank calls ``begin_loads`` with new requests, ``update`` once per turn, ``ready`` before it
chooses what to compute, and ``begin_save`` with a request that has finished. The contract:

- No call waits for a disk, the GPU or a lookup. What takes longer than a fraction of a millisecond runs on threads of
  kvfs, and so does what releases the GIL, which another thread would then have for five milliseconds.
- Ranks of one group make the same calls in the same order, and act on what ``agree`` returns alone: the least of what
  they have found. So they take the same slots, and compute the same prompts.
- From ``begin_loads`` on a request is held back until its load has ended. Then ``cur_kv_len`` covers what every rank
  has verified, and nothing else: a page that is damaged, lost or late makes it shorter, and its slots go back.
- Slots that the radix tree shares are never written. The slots of a load belong to it until no byte of them can be
  written any more, also if its request is aborted: that stops the load, it does not wait for it.
- A finished request keeps its slots until they are copied, ``store_seconds`` at most. Pages that are stored are not
  copied again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from kvfs.errors import UnsupportedModelError
from kvfs.integrations.lightllm.device_pages import UNKNOWN, DevicePages, Restore, Save, Shard, Streams
from kvfs.integrations.lightllm.model import Server
from kvfs.integrations.lightllm.settings import settings_of
from kvfs.types import Tier

#: Of LightLLM's CPU cache: for less a load is not worth its turn of the loop.
LOAD_TOKENS_MIN, PROMPT_TOKENS_MIN = 128, 256


@dataclass
class _Loading:
    """A request that is held back."""

    req: Any
    restore: Restore
    slots: torch.Tensor | None = None  # of its load, once the length is agreed on


class SaveTask:
    """A save, in the queue of LightLLM that holds its request."""

    def __init__(self, req: Any, save: Save) -> None:
        self.req, self.save = req, save


def device_path(backend: Any, context: Any, group: Any) -> DevicePath | None:
    """The device path of this rank; None unless KVFS_LIGHTLLM asks for it.

    ``backend``: LightLLM's ModeBackend; ``context``: its InferenceContext; ``group``: gloo, of the ranks that compute
    one request. ConfigError or UnsupportedModelError names the flag or setting to change, before a store is made.
    """
    settings = settings_of()
    if not settings.device:
        return None
    server, pool = Server(), backend.model.mem_manager
    server.check(without='"device" in KVFS_LIGHTLLM')
    if type(pool).__name__ != "MemoryManager":
        raise UnsupportedModelError(
            f"its pool is a {type(pool).__name__}; kvfs keeps plain keys and values: leave --llm_kv_type, --mtp_mode "
            'and "device" in KVFS_LIGHTLLM out, or serve another model'
        )
    shard = Shard(pool.kv_buffer, backend.rank_in_dp, backend.dp_world_size)
    pages = DevicePages.open(settings, server, shard)
    return DevicePath(pages, backend, context, partial(_least, group) if shard.ranks > 1 else list)


def _least(group: Any, own: Sequence[int]) -> list[int]:
    """The least that any rank has, number by number."""
    numbers = torch.tensor(own, dtype=torch.int64)
    torch.distributed.all_reduce(numbers, op=torch.distributed.ReduceOp.MIN, group=group)
    found: list[int] = numbers.tolist()
    return found


class DevicePath:
    """Moves KV between one rank's pool and the store. Called by LightLLM's inference loop, one call at a time."""

    def __init__(
        self, pages: DevicePages, backend: Any, context: Any, agree: Callable[[Sequence[int]], list[int]]
    ) -> None:  # fmt: skip
        self.pages, self._backend, self._context, self._agree = pages, backend, context, agree
        self._loading: dict[int, _Loading] = {}  # by request id, oldest first: in the same order on all ranks

    # -- loads -------------------------------------------------------------------------------

    def begin_loads(self, reqs: Sequence[Any]) -> None:
        """Look new requests up. ``update`` loads them, ``ready`` holds them back until then."""
        for req in reqs:
            limit = (req.shm_req.input_len - 1) // self.pages.page_tokens * self.pages.page_tokens
            if limit - req.cur_kv_len < LOAD_TOKENS_MIN or req.shm_req.input_len < PROMPT_TOKENS_MIN:
                continue
            parameters = req.sampling_param
            if parameters.shm_param.prompt_logprobs >= 0 or parameters.disable_prompt_cache or req.is_slave_req():
                continue
            self._loading[req.req_id] = _Loading(req, Restore(self.pages, _token_ids(req, limit)))

    def ready(self, reqs: Sequence[Any]) -> list[Any]:
        """Those that are not held back."""
        return [req for req in reqs if req.req_id not in self._loading]

    def is_loading(self) -> bool:
        """Whether a request is held back."""
        return bool(self._loading)

    def update(self, saves: deque[SaveTask]) -> None:
        """Take the next step of all that is under way, where every rank has taken the last one.

        ``saves``: LightLLM's queue of what ``begin_save`` returned.
        """
        if not saves and not self._loading:
            return
        loading = list(self._loading.values())
        for one in loading:
            if one.req.infer_aborted:
                one.restore.stop()
        free, *tokens = self._agree([_leading(saves), *(one.restore.tokens for one in loading)])
        for _ in range(free):
            req = saves.popleft().req
            req.cpu_cache_task_status = req._CpuCacheTaskStatus.FINISHED
        for one, count in zip(loading, tokens, strict=True):
            if count != UNKNOWN:
                self._go_on(one, count)

    def _go_on(self, one: _Loading, tokens: int) -> None:
        """``tokens``: that all ranks have found, or loaded."""
        req, first = one.req, one.req.cur_kv_len
        if one.slots is None and not req.infer_aborted and self._takes(tokens - first):
            one.slots = self._allocate(req, tokens - first)
            one.restore.load(one.slots, first, self._streams())
            return
        if one.slots is not None:
            kept = max(0, min(tokens - first, len(one.slots)))
            self._backend.model.mem_manager.free(one.slots[kept:])
            req.cur_kv_len = first + kept
            if self._backend.is_master_in_dp:
                disk = min(kept, one.restore.tiers.get(Tier.DISK, 0))
                req.shm_req.cpu_prompt_cache_len, req.shm_req.disk_prompt_cache_len = kept - disk, disk
                req.shm_req.shm_cur_kv_len = req.cur_kv_len
        one.restore.close()
        del self._loading[req.req_id]

    def _takes(self, tokens: int) -> bool:
        return LOAD_TOKENS_MIN <= tokens <= int(self._context.get_can_alloc_token_num())

    def _allocate(self, req: Any, tokens: int) -> torch.Tensor:
        model, tree = self._backend.model, self._context.radix_cache
        if tree is not None:
            tree.free_radix_cache_to_get_enough_token(need_token_num=tokens)
        slots: torch.Tensor = model.mem_manager.alloc(need_size=tokens)
        first = req.cur_kv_len
        model.req_manager.req_to_token_indexs[req.req_idx, first : first + tokens].copy_(slots, non_blocking=True)
        return slots.clone()  # LightLLM hands out views of a buffer that it goes on using

    # -- saves -------------------------------------------------------------------------------

    def begin_save(self, req: Any) -> SaveTask | None:
        """Store the prompt of a request that has finished; None if it has no whole page.

        Its status is RUNNING until ``update`` finds that its slots are copied, on all ranks.
        """
        status, size = req._CpuCacheTaskStatus, self.pages.page_tokens
        tokens = min(req.cur_kv_len, req.shm_req.input_len) // size * size
        if not tokens:
            req.cpu_cache_task_status = status.FINISHED
            return None
        rows, row = self._backend.model.req_manager.req_to_token_indexs, req.req_idx
        req.cpu_cache_task_status = status.RUNNING
        token_ids = _token_ids(req, tokens)
        return SaveTask(req, Save(self.pages, token_ids, lambda: rows[row, :tokens], self._streams()))

    def _streams(self) -> Streams:
        if not self.pages.on_gpu:
            return ()
        return torch.cuda.current_stream(), self._context.get_overlap_stream()

    def close(self) -> None:
        """End what is under way, and close the store. LightLLM ends with its process."""
        self.pages.close()


def _token_ids(req: Any, tokens: int) -> Any:
    """A copy of the first ids of a prompt, made without releasing the GIL."""
    ids = req.shm_req.shm_prompt_ids.arr[:tokens]
    return np.frombuffer(ids.tobytes(), dtype=ids.dtype)


def _leading(saves: Sequence[SaveTask]) -> int:
    """How many of the oldest saves have copied their slots."""
    for number, task in enumerate(saves):
        if not task.save.free:
            return number
    return len(saves)
