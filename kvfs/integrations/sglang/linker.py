"""kvfs as the external linker of SGLang's unified radix cache: device pool to store, without a host pool in between.

SGLang loads ``KvfsLinker`` by name (``--unified-cache-external-linker-backend dynamic``); docs/sglang.md has the flags.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker

from kvfs.errors import ConfigError, UnsupportedModelError
from kvfs.integrations.sglang.attachment import Attachment
from kvfs.integrations.sglang.identity import ModelFiles
from kvfs.integrations.sglang.linker_pages import LinkerPages
from kvfs.integrations.sglang.pools import device_pool
from kvfs.integrations.sglang.ranks import Rank
from kvfs.integrations.sglang.settings import LINKER_FLAG, settings_of


class KvfsLinker(UnifiedCacheLinker):
    """The linker of one rank."""

    def __init__(
        self, server_args: Any, params: Any, *, components: Any, extra_config: dict[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:  # fmt: skip
        self.forward_stream = forward_stream
        others = sorted(component.name for component in components if component != ComponentType.FULL)
        if others:
            raise UnsupportedModelError(
                f"kvfs keeps the KV of full attention, this tree also has {', '.join(others)}: serve the model without "
                "--enable-unified-cache-external-linker"
            )
        if params.mtp_draft_device_pools or params.sidecar_draft_device_pools:
            raise UnsupportedModelError(
                "kvfs keeps no KV of draft models: start SGLang without --speculative-algorithm, or without "
                "--enable-unified-cache-external-linker"
            )
        kvcache = params.token_to_kv_pool_allocator.get_kvcache()
        pool, settings = device_pool(kvcache), settings_of(extra_config, LINKER_FLAG)
        if settings.share:
            raise ConfigError(f"share in {LINKER_FLAG}: a linker's pages are found by linkers only; leave it out")
        rank = _rank(params, server_args)
        name = getattr(server_args, "served_model_name", None)
        replica = (rank.tp, rank.tp_size) if pool.latent else (0, 1)  # every rank offloads its copy of MLA
        attached = Attachment.open(settings, rank, ModelFiles(server_args), name, pool, replica)
        self.pools = {PoolName.KV: kvcache}
        self.layer_done_counter = LayerWiseLoadCounter(len(pool.layers))
        self._pages = LinkerPages(attached, settings, self.layer_done_counter, pool.layers[0])
        self._on_gpu = attached.kv.memory.startswith("cuda")

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        return list(range(1, self._pages.lookup(_of_kv(transfers).keys or []) + 1))

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        transfer = _of_kv(transfers)
        return self._pages.load(rid, transfer.keys or [], transfer.device_indices)

    def start_layer_wise_loading(self) -> int:
        return self._pages.start(self._after())

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return bool(self.layer_done_counter.finish(counter_index))

    def cancel_queued_load(self, rid: str) -> bool:
        return self._pages.cancel(rid)

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        transfer = _of_kv(transfers)
        return self._pages.offload(transfer.keys or [], transfer.device_indices, self._after())

    def num_completed_offloads(self) -> int:
        return self._pages.completed()

    def pop_completed_offload(self) -> bool:
        return self._pages.pop()

    def reset(self) -> None:
        self._pages.reset()

    def close(self) -> None:
        self._pages.close()

    def _after(self) -> Any:
        """What is behind all that uses the slots now; None in host memory, where nothing is asynchronous."""
        return _Events(self.record_offload_ready()) if self._on_gpu else None


class _Events:
    """Events of several streams as one. A stream that waited for them would cost the scheduler a call for each."""

    def __init__(self, events: Sequence[Any]) -> None:
        self._events = events

    def query(self) -> bool:
        return all(event.query() for event in self._events)

    def synchronize(self) -> None:
        for event in self._events:
            event.synchronize()


def _of_kv(transfers: list[PoolTransfer]) -> PoolTransfer:
    """The transfer of full attention: the only one, since other components are refused."""
    (transfer,) = transfers
    assert transfer.name == PoolName.KV, transfer.name
    return transfer


def _rank(params: Any, server_args: Any) -> Rank:
    group = params.attn_tp_cache_group or params.tp_cache_group
    tp, size = (0, 1)
    if group is not None:
        tp, size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    pp, stages = int(getattr(params, "pp_rank", 0) or 0), int(getattr(params, "pp_size", 1) or 1)
    for name in ("attn_cp_size", "dcp_size"):
        if int(getattr(server_args, name, 1) or 1) > 1:
            raise UnsupportedModelError(f"context parallelism splits pages over ranks: start SGLang without {name}")
    return Rank(tp, size, pp, stages)
