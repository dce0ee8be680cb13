"""kvfs as the storage backend of SGLang's hierarchical cache: host pool to store, page by page.

SGLang loads ``KvfsHiCache`` by name (``--hicache-storage-backend dynamic``); docs/sglang.md has the flags.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from kvfs.errors import ConfigError, UnsupportedModelError
from kvfs.integrations.sglang.identity import ModelFiles
from kvfs.integrations.sglang.pages import HiCachePages
from kvfs.integrations.sglang.ranks import Rank
from kvfs.integrations.sglang.settings import settings_of

V1 = 'write "interface_v1": 1 into --hicache-storage-backend-extra-config: kvfs reads and writes the host pool itself'


def server_arguments() -> Any | None:
    """The arguments of this server; None outside of one."""
    try:
        from sglang.srt.runtime_context import get_server_args

        return get_server_args()
    except (ImportError, AttributeError, RuntimeError, ValueError):  # also: outside of a server there are none
        return None


class KvfsHiCache(HiCacheStorage):
    """The backend of one rank. SGLang's threads call it; disks never make it raise."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Any = None) -> None:
        extra = storage_config.extra_config or {}
        if not extra.get("interface_v1"):
            raise ConfigError(V1)
        self._pages = HiCachePages(
            settings_of(extra), Rank.of(storage_config), ModelFiles(server_arguments()), storage_config.model_name
        )
        self._attached = False

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Pools other than the one of full attention: refused, since no hit would be complete without them."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if self._attached:
            self._check_pools()

    def on_host_pools_registered(self) -> None:
        self._check_pools()
        self._pages.attach(self.mem_pool_host)
        self._attached = True

    def _check_pools(self) -> None:
        others = sorted(str(name) for name in getattr(self, "registered_pools", {}) if name != PoolName.KV)
        if others:
            raise UnsupportedModelError(
                f"kvfs keeps the pool of full attention, this engine also needs {', '.join(others)}: serve the model "
                "without --hicache-storage-backend, or, if these are of a draft model, without --speculative-algorithm"
            )

    # -- keys of the pool of full attention --------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        return self._pages.exists(keys, _prefix(extra_info))

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._pages.save(keys, host_indices, _prefix(extra_info))

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._pages.load(keys, host_indices, _prefix(extra_info))

    # -- the same with transfers: other pools were refused at the attach ---------------------

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:  # fmt: skip
        found = 0 if _others(pool_transfers) else self.batch_exists(keys, extra_info)
        return PoolTransferResult(found, {PoolName.KV: found} if found else {}, list(range(1, found + 1)))

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {t.name: self._one(self._pages.save, t, extra_info) for t in transfers}

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {t.name: self._one(self._pages.load, t, extra_info) for t in transfers}

    def _one(self, move: Any, transfer: PoolTransfer, extra_info: HiCacheStorageExtraInfo | None) -> list[bool]:
        keys: Sequence[str] = transfer.keys or []
        if transfer.name != PoolName.KV or transfer.host_indices is None:
            return [False] * len(keys)
        done: list[bool] = move(keys, transfer.host_indices, _prefix(extra_info))
        return done

    # -- the rest ----------------------------------------------------------------------------

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def clear(self) -> None:
        self._pages.clear()

    def close(self) -> None:
        self._pages.close()

    def get(self, *_: Any, **__: Any) -> Any:
        raise ConfigError(V1)

    def batch_get(self, *_: Any, **__: Any) -> Any:
        raise ConfigError(V1)

    def set(self, *_: Any, **__: Any) -> Any:
        raise ConfigError(V1)

    def batch_set(self, *_: Any, **__: Any) -> Any:
        raise ConfigError(V1)


def _prefix(extra_info: HiCacheStorageExtraInfo | None) -> list[str] | None:
    return None if extra_info is None else extra_info.prefix_keys


def _others(transfers: list[PoolTransfer] | None) -> bool:
    return any(t.name != PoolName.KV for t in transfers or ())
