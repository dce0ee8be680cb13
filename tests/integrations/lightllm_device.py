"""LightLLM's pool, requests and inference loop as far as the device path sees them, without LightLLM."""

from __future__ import annotations

import enum
import functools
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kvfs.integrations.lightllm import device_pages as module
from kvfs.integrations.lightllm.device import DevicePath
from kvfs.integrations.lightllm.device_pages import UNKNOWN, DevicePages, Restore, Shard
from kvfs.integrations.lightllm.model import Server
from kvfs.integrations.lightllm.settings import settings_of
from kvfs.store import open_store
from kvfs.system.files import Files
from tests.integrations.lightllm_cache import SECONDS, SETTINGS, canonical, environment, set_canonical

POISON = 1.5
FAST = False  # leave out checks that cost the loop time


class MemoryManager:
    """Token slots, handed out in random order as after many requests."""

    def __init__(self, slots: int, *, layers: int, heads: int, dim: int, dtype: torch.dtype) -> None:
        self.kv_buffer = torch.full((layers, slots + 1, 2 * heads, dim), POISON, dtype=dtype)
        self.shape: Any = {"layers": layers, "heads": heads, "dim": dim, "dtype": dtype}
        numbers = list(range(slots))
        random.Random(1).shuffle(numbers)
        self._state = torch.tensor(numbers, dtype=torch.int32)  # free ones from ``_start`` on
        self._handed_out = torch.zeros(slots, dtype=torch.int32)
        self._start, self.size = 0, slots

    @property
    def left(self) -> int:
        return self.size - self._start

    def alloc(self, need_size: int) -> torch.Tensor:
        assert need_size <= self.left
        found = self._handed_out[:need_size]  # a view that the next call overwrites, as LightLLM's
        found.copy_(self._state[self._start : self._start + need_size])
        self._start += need_size
        return found

    def free(self, slots: torch.Tensor) -> None:
        assert FAST or not torch.isin(slots, self._state[self._start :]).any(), "slots are freed twice"
        self._start -= len(slots)
        self._state[self._start : self._start + len(slots)] = slots

    def page(self, slots: torch.Tensor) -> bytes:
        """Canonical bytes of the page in these slots."""
        one = self.kv_buffer[:, slots.long()].contiguous().view(torch.uint8).reshape(1, -1)
        return canonical(one, 0, **self.shape)

    def set_page(self, slots: torch.Tensor, content: bytes) -> None:
        one = torch.empty((1, len(content)), dtype=torch.uint8)
        set_canonical(one, 0, content, **self.shape)
        layers, _, heads, dim = self.kv_buffer.shape
        self.kv_buffer[:, slots.long()] = one.view(self.kv_buffer.dtype).reshape(layers, len(slots), heads, dim)


class Request:
    """LightLLM's InferReq, with what it has in shared memory."""

    class _CpuCacheTaskStatus(enum.Enum):
        NOT_STARTED, RUNNING, FINISHED = range(3)

    def __init__(self, number: int, tokens: Sequence[int], row: int = 0) -> None:
        self.req_id, self.req_idx, self.cur_kv_len, self.infer_aborted = number, row, 0, False
        self.cpu_cache_task_status = self._CpuCacheTaskStatus.NOT_STARTED
        arr = np.array([*tokens, *[0] * 8], dtype=np.int64)
        self.shm_req = SimpleNamespace(
            input_len=len(tokens), shm_prompt_ids=SimpleNamespace(arr=arr), shm_cur_kv_len=0, cpu_prompt_cache_len=0,
            disk_prompt_cache_len=0,
        )  # fmt: skip
        self.sampling_param = SimpleNamespace(shm_param=SimpleNamespace(prompt_logprobs=-1), disable_prompt_cache=False)
        self.slave = False

    def is_slave_req(self) -> bool:
        return self.slave


class Loop:
    """One rank's inference loop, with the device path over a pool in host memory."""

    def __init__(
        self, path: Path, pool: MemoryManager, server: Mapping[str, Any], page: int, *, rank: int = 0, ranks: int = 1,
        agree: Callable[[Sequence[int]], list[int]] = list, files: Files | None = None,
        kind: type[DevicePages] = DevicePages, **settings: Any,
    ) -> None:  # fmt: skip
        self.pool, self.page = pool, page
        before = module.open_store
        module.open_store = functools.partial(open_store, files=files) if files is not None else open_store  # type: ignore[assignment]
        try:
            with environment({"path": str(path), "device": True, **SETTINGS, **settings}, server):
                self.pages = kind.open(settings_of(), Server(), Shard(pool.kv_buffer, rank, ranks))
        finally:
            module.open_store = before
        self.rows = torch.zeros((8, pool.size), dtype=torch.int32)
        self.backend = SimpleNamespace(
            model=SimpleNamespace(mem_manager=pool, req_manager=SimpleNamespace(req_to_token_indexs=self.rows)),
            is_master_in_dp=rank == 0, rank_in_dp=rank, dp_world_size=ranks,
        )  # fmt: skip
        self.context = SimpleNamespace(radix_cache=None, get_can_alloc_token_num=lambda: pool.left)
        self.path = DevicePath(self.pages, self.backend, self.context, agree)
        self.saves: deque[Any] = deque()
        self._numbers = iter(range(8, 1 << 30, 8))

    def request(self, tokens: Sequence[int], row: int = 0) -> Request:
        return Request(next(self._numbers), tokens, row)

    def turn_until(self, done: Callable[[], bool]) -> None:
        end = time.monotonic() + SECONDS
        while not done():
            assert time.monotonic() < end, "the loop goes on without end"
            self.path.update(self.saves)
            time.sleep(0.0005)

    def load(self, req: Request) -> int:
        """As for a new request, until it may be computed; its tokens that need no computing."""
        self.path.begin_loads([req])
        self.turn_until(lambda: self.path.ready([req]) == [req])
        return req.cur_kv_len

    def save(self, req: Request) -> None:
        """As for a finished request, until its slots may be reused, and what was taken is published."""
        task = self.path.begin_save(req)
        if task is not None:
            self.saves.append(task)
            self.turn_until(lambda: req.cpu_cache_task_status is req._CpuCacheTaskStatus.FINISHED)
            saving = task.save._saving
            assert saving is None or saving.wait(SECONDS) is not None

    def compute(self, req: Request, pages: Sequence[bytes], first: int = 0) -> None:
        """Give a request slots for all of its pages, and put ``pages`` there from number ``first`` on."""
        size, count = self.page, first + len(pages)
        slots = self.pool.alloc(count * size).clone()
        self.rows[req.req_idx, : len(slots)] = slots
        for number, content in enumerate(pages, first):
            self.pool.set_page(slots[number * size : (number + 1) * size], content)
        req.cur_kv_len = len(slots)

    def release(self, req: Request) -> None:
        self.pool.free(self.rows[req.req_idx, : req.cur_kv_len])
        req.cur_kv_len = 0

    def page_of(self, req: Request, number: int) -> bytes:
        return self.pool.page(self.rows[req.req_idx, number * self.page : (number + 1) * self.page])

    def close(self) -> None:
        self.path.close()


class FakeDeviceEngine:
    """A loop as the contract of adapters uses an engine."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop

    def put(self, tokens: Sequence[int], pages: Sequence[bytes], first: int = 0) -> int:
        req = self.loop.request([*tokens[: (first + len(pages)) * self.loop.page], 0])
        self.loop.compute(req, pages, first)
        self.loop.save(req)
        self.loop.release(req)
        return max(0, self.lookup(tokens) - first)

    def lookup(self, tokens: Sequence[int]) -> int:
        found = Restore(self.loop.pages, np.array(tokens, dtype=np.int64))
        self.loop.turn_until(lambda: found.tokens != UNKNOWN)
        found.close()
        return found.tokens // self.loop.page

    def get(self, tokens: Sequence[int], count: int) -> list[bytes | None]:
        self.loop.pool.kv_buffer.fill_(POISON)
        req = self.loop.request([*tokens[: count * self.loop.page], 0])
        loaded = self.loop.load(req) // self.loop.page
        found: list[bytes | None] = [self.loop.page_of(req, n) for n in range(loaded)]
        self.loop.release(req)
        assert self.loop.pool.left == self.loop.pool.size
        return [*found, *[None] * (count - loaded)]

    def counters(self) -> Mapping[str, int]:
        return dict(self.loop.pages.store.stats()["counters"])

    def close(self) -> None:
        self.loop.close()


class Together:
    """What several ranks agree on, each in a thread of its own."""

    def __init__(self, ranks: int) -> None:
        self._barrier, self._own = threading.Barrier(ranks, timeout=SECONDS), dict[int, Sequence[int]]()

    def of(self, rank: int) -> Callable[[Sequence[int]], list[int]]:
        def agree(own: Sequence[int]) -> list[int]:
            self._own[rank] = own
            self._barrier.wait()
            least = [min(values) for values in zip(*self._own.values(), strict=True)]
            self._barrier.wait()
            return least

        return agree
