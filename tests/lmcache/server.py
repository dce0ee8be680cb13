"""LMCache's own StorageManager with its controllers, L1 memory and an L2 adapter of kvfs, in this process or another.

As a program, ``python -m tests.lmcache.server PATH SEED COUNT``: stores COUNT objects, one after the other, and prints
the number of each that its store controller has finished.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.distributed.storage_manager import StorageManager

CHUNK = 256
SECONDS = 60.0
L1_BYTES = 64 << 20
RANK = 0x01000100


def spec_of(path: Path, serde: Mapping[str, Any] | None = None, **params: Any) -> str:
    """The value of --l2-adapter."""
    settings = {"path": str(path), "capacity": "256MiB", "weights_id": "0123abcd", "threads": 2, **params}
    spec: dict[str, Any] = {
        "type": "plugin", "module_path": "kvfs.integrations.lmcache.adapter", "class_name": "KvfsL2Adapter",
        "adapter_params": settings,
    }  # fmt: skip
    return json.dumps({**spec, "serde": serde} if serde else spec)


def layout_of(nbytes: int) -> MemoryLayoutDesc:
    """An object of two layers of K and V in bfloat16, as the serializers expect it."""
    return MemoryLayoutDesc([torch.Size([2, 2, nbytes // 256, 32])], [torch.bfloat16])


def keys_of(tokens: Sequence[int], salt: str = "") -> list[ObjectKey]:
    digest, keys = b"", list[ObjectKey]()
    for first in range(0, len(tokens) - CHUNK + 1, CHUNK):
        digest = hashlib.sha256(digest + repr(list(tokens[first : first + CHUNK])).encode()).digest()
        keys.append(ObjectKey(digest, "org/model", RANK, 0, salt))
    return keys


def content_of(seed: int, number: int, nbytes: int) -> bytes:
    return random.Random(f"{seed} {number}").randbytes(nbytes)


class Manager:
    """A StorageManager, as an engine's requests use it."""

    def __init__(self, spec: str, nbytes: int, l1_bytes: int = L1_BYTES) -> None:
        self.nbytes, self.layout = nbytes, layout_of(nbytes)
        memory = L1MemoryManagerConfig(l1_bytes, use_lazy=False, shm_name="")
        self.manager = StorageManager(
            StorageManagerConfig(
                L1ManagerConfig(memory), EvictionConfig("LRU"),
                parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[spec])),
            )
        )  # fmt: skip

    @property
    def adapter(self) -> Any:
        ((_, _, adapter),) = self.manager._snapshot_adapters()
        return getattr(adapter, "inner_adapter", adapter)

    def write(self, keys: Sequence[ObjectKey], pages: Sequence[bytes]) -> int:
        """Objects into L1, and by LMCache's store controller to L2; how many L2 has then of leading ones."""
        reserved = self.manager.reserve_write(list(keys), self.layout)
        assert len(reserved) == len(keys), "L1 has no memory"
        for key, page in zip(keys, pages, strict=True):
            memoryview(reserved[key].byte_array).cast("B")[:] = page
        self.manager.finish_write(list(keys))
        self.settle()
        return self.stored(keys)

    def settle(self) -> None:
        """Wait until no store is under way."""
        end, quiet = time.monotonic() + SECONDS, 0
        while quiet < 4 and time.monotonic() < end:
            time.sleep(0.02)
            statuses = [c.report_status() for c in self.manager._store_controllers.values()]
            busy = any(s["in_flight_task_count"] or s.get("pending_keys_count", 0) for s in statuses)
            quiet = 0 if busy else quiet + 1
        assert quiet == 4, "a store task has not ended"

    def stored(self, keys: Sequence[ObjectKey]) -> int:
        """Leading keys that the adapter finds."""
        adapter = self.adapter
        objects = adapter._objects
        number = objects.submit_lookup(list(keys), {0: self.layout})
        end = time.monotonic() + SECONDS
        while (result := objects.lookups.take(number)) is None and time.monotonic() < end:
            time.sleep(0.002)
        assert result is not None
        adapter.submit_unlock([keys[n] for n in result.numbers])
        return next((n for n, number in enumerate(result.numbers) if n != number), len(result.numbers))

    def prefetch(self, keys: Sequence[ObjectKey]) -> list[bytes]:
        """Leading objects that LMCache finds and makes resident, from L1 and L2."""
        spec = PrefetchTaskSpec([GroupedObjectKeys(list(keys), 0, self.layout)])
        handle = self.manager.submit_prefetch_task(spec)
        assert self.manager.wait_prefetch_status(handle, SECONDS), "a prefetch has not ended"
        result = self.manager.query_prefetch_status(handle)
        assert result is not None
        mine = list(keys)[: result.hit_cells[0].popcount()]
        if not mine:
            return []
        with self.manager.read_prefetched_results(mine) as objects:
            assert objects is not None
            found = [bytes(memoryview(one.byte_array).cast("B")) for one in objects]
        self.manager.finish_read_prefetched(mine)
        return found

    def clear_l1(self) -> None:
        self.manager.clear(force=True)

    def locks(self) -> tuple[int, int, int]:
        """Locks of L1 for reads, for writes, and of the adapter."""
        status = self.manager.report_status()
        l1 = next(s for s in _dicts(status) if "read_locked_count" in s)
        return l1["read_locked_count"], l1["write_locked_count"], len(self.adapter._objects.locks)

    def close(self) -> None:
        self.manager.close()


def _dicts(value: Any) -> list[dict[str, Any]]:
    found = [value] if isinstance(value, dict) else []
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        found += _dicts(one)
    return found


def main() -> None:
    path, seed, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    manager = Manager(spec_of(path), 32768)
    keys = keys_of(random.Random(seed).choices(range(32_000), k=count * CHUNK))
    print("ready", flush=True)
    for n in range(0, count, 4):
        part = range(n, min(count, n + 4))
        manager.write([keys[i] for i in part], [content_of(seed, i, 32768) for i in part])
        print(part[-1] + 1, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
