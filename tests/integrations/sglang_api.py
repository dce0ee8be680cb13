"""The names of SGLang that its linker imports, with as much behind them as it uses, where SGLang is not installed."""

from __future__ import annotations

import enum
import importlib.util
import sys
import types
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

MEM_CACHE = "sglang.srt.mem_cache"


class PoolName(str, enum.Enum):
    KV = "kv"


class ComponentType(enum.Enum):
    FULL, SWA = range(2)


@dataclass
class PoolTransfer:
    name: PoolName
    device_indices: Any = None
    keys: list[str] | None = None


class LayerWiseLoadCounter:
    """SGLang's counter of layers: a future for each layer of a batch."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers, self.producer_index = num_layers, -1
        self.futures = dict[int, list[Future[None]]]()

    def update_producer(self) -> int:
        self.producer_index += 1
        self.futures[self.producer_index] = [Future() for _ in range(self.num_layers)]
        return self.producer_index

    def complete(self, index: int, layer: int) -> None:
        self.futures[index][layer].set_result(None)

    def fail(self, index: int, error: BaseException) -> None:
        for future in self.futures.get(index, ()):
            if not future.done():
                future.set_exception(error)

    def finish(self, index: int) -> bool:
        return all(future.exception(60) is None for future in self.futures.pop(index))

    def reset(self) -> None:
        self.producer_index = -1
        self.futures.clear()


class UnifiedCacheLinker:
    """SGLang's base class of linkers."""

    forward_stream: Any = None

    def record_offload_ready(self) -> list[Any]:
        ready = torch.cuda.Event()
        ready.record()
        events = [ready]
        if self.forward_stream is not None:
            written = torch.cuda.Event()
            written.record(self.forward_stream)
            events.append(written)
        return events


def install() -> None:
    """Make ``kvfs.integrations.sglang.linker`` importable without SGLang."""
    if "sglang" in sys.modules or importlib.util.find_spec("sglang") is not None:
        return
    for name in ("sglang", "sglang.srt", MEM_CACHE, f"{MEM_CACHE}.unified_cache"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = []
    for name, here in (
        ("hicache_storage", (PoolName, PoolTransfer)),
        ("unified_cache.component_type", (ComponentType,)),
        ("unified_cache.unified_cache_linker", (LayerWiseLoadCounter, UnifiedCacheLinker)),
    ):
        made = types.ModuleType(f"{MEM_CACHE}.{name}")
        for one in here:
            setattr(made, one.__name__, one)
        sys.modules[made.__name__] = made
