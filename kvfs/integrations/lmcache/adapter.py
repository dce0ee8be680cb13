"""kvfs as an L2 adapter of LMCache's multiprocess server: L1 memory to store, object by object.

LMCache loads ``KvfsL2Adapter`` by name (an ``--l2-adapter`` of type ``plugin``); docs/lmcache.md has the flags.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.platform import create_event_notifier

from kvfs.integrations.lmcache.objects import Events, Keys, Objects
from kvfs.integrations.lmcache.settings import settings_of


class KvfsL2Adapter(L2AdapterInterface):
    """The adapter of one server. Every task ends in a result, whatever the disk does."""

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        settings = settings_of(params)
        super().__init__(max_capacity_bytes=0)  # kvfs evicts by itself, for all processes together
        self._events = [create_event_notifier() for _ in range(3)]
        try:
            self._objects = Objects(settings, Events(*(event.notify for event in self._events)))
        except BaseException:
            self._close_events()
            raise

    def get_store_event_fd(self) -> int:
        return int(self._events[0].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._events[1].fileno())

    def get_load_event_fd(self) -> int:
        return int(self._events[2].fileno())

    # -- stores ------------------------------------------------------------------------------

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        return self._objects.submit_store(list(keys), list(objects))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        done = self._objects.stores.take_all()
        for result in done.values():
            if result.keys:
                self._notify_keys_stored(list(result.keys), list(result.sizes))
        return {number: L2StoreResult(result.good, result.nbytes) for number, result in done.items()}

    # -- lookups and locks -------------------------------------------------------------------

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        return self._objects.submit_lookup(list(keys), group_layout_descs)

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return _bitmap(self._objects.lookups.take(task_id))

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        self._objects.locks.remove(keys)

    # -- loads -------------------------------------------------------------------------------

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        return self._objects.submit_load(list(keys), list(objects))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return _bitmap(self._objects.loads.take(task_id))

    # -- the rest ----------------------------------------------------------------------------

    def delete(self, keys: list[ObjectKey]) -> None:
        """Remove objects permanently, for every process that uses the store."""
        removed = self._objects.delete(keys)
        if removed:
            self._notify_keys_deleted([key for key, _ in removed], [nbytes for _, nbytes in removed])

    def get_usage(self) -> AdapterUsage:
        """What the store allocates. No capacity and no bytes by salt: LMCache would evict by these figures."""
        return AdapterUsage(self._used_bytes(), 0)

    def report_status(self) -> dict[str, Any]:
        stats = self._objects.store.stats()
        return {
            "is_healthy": stats["index"]["state"] == "ready", "type": "kvfs", "path": stats["path"],
            "capacity_bytes": stats["capacity_bytes"], "used_bytes": stats.get("used_bytes", 0),
            "locked_keys": len(self._objects.locks), "pages_corrupt": stats["counters"].get("pages_corrupt", 0),
        }  # fmt: skip

    def close(self) -> None:
        """End all tasks and close the store. May be called again."""
        self._objects.close()
        self._close_events()

    def _used_bytes(self) -> int:
        return int(self._objects.store.stats().get("used_bytes", 0))

    def _close_events(self) -> None:
        events, self._events = self._events, []
        for event in events:
            event.close()


def _bitmap(result: Keys | None) -> Bitmap | None:
    if result is None:
        return None
    bitmap = Bitmap(result.count)
    bitmap.batched_set(result.numbers)
    return bitmap
