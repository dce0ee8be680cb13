"""vLLM's offloading connector, with names for what kvfs uses of its inside.

The only module that reads or overrides a private name of vLLM's connector. ``NAMES`` lists them, and
``tests/vllm/test_internals.py`` checks each against the installed version.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata, TransferJob
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import OffloadingSpec, OffloadKey, ReqContext, TransferResult
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.request import Request

#: owner -> private or unstable names that this module uses: attributes of an instance, methods, fields
NAMES = {
    "KVConnectorFactory, OffloadingSpecFactory, SecondaryTierFactory": ("_registry",),
    "OffloadingConnector": ("_canonical_layout", "connector_scheduler", "connector_worker", "_kv_cache_manager"),
    "OffloadingConnectorScheduler": (
        "_req_status", "_stale_job_threshold", "_current_batch_jobs_to_flush", "_current_batch_allocated_block_ids",
        "_build_store_jobs", "_calc_num_offloadable_tokens", "_reachable_store_block_mask", "config",
        "_maximal_prefix_lookup", "_events_tracker",
    ),
    "RequestOffloadState": ("req", "group_states", "transfer_jobs", "config"),
    "RequestGroupState": ("block_ids", "next_stored_chunk_idx"),
    "GroupOffloadConfig": ("group_idx", "tokens_per_chunk", "tokens_per_block"),
    "OffloadingEventsTracker": ("self_describing_enabled",),
    "SchedulerOffloadConfig": ("blocks_per_chunk", "kv_group_configs"),
    "OffloadingConnectorWorker": ("_unsubmitted_store_jobs", "_load_jobs", "_connector_worker_meta"),
    "OffloadingWorkerMetadata": ("transfer_stats", "mark_completed"),
    "KVCacheBlocks": ("get_unhashed_block_ids_all_groups",),
}  # fmt: skip


def offloading_config(config: VllmConfig, cache: KVCacheConfig) -> OffloadingConfig:
    """vLLM's description of the engine, for its scheduler half and its spec.

    Every rank stores its own part; ranks with equal bytes divide the pages among them.
    """
    return replace(build_offloading_config(config, cache), replicated_layout=False)


class SchedulerHalf(OffloadingConnectorScheduler):
    """Which requests have which blocks, which jobs move them, which must end before a block is reused."""

    #: what is offered for storing ends at a multiple of so many tokens, so that it consists of whole pages
    page_tokens = 1
    _current_batch_jobs_to_flush: set[int]

    def __init__(self, spec: OffloadingSpec, config: VllmConfig, cache: KVCacheConfig) -> None:
        super().__init__(spec, config, cache)

    def request(self, req_id: str) -> Request | None:
        status = self._req_status.get(req_id)
        return None if status is None else status.req

    def has_jobs(self, req_id: str) -> bool:
        """Whether blocks of a request are being copied."""
        status = self._req_status.get(req_id)
        return status is not None and bool(status.transfer_jobs)

    def forget_blocks(self, req_ids: Iterable[str]) -> None:
        """These requests have lost their blocks."""
        for req_id in req_ids:
            status = self._req_status.get(req_id)
            for group in status.group_states if status is not None else ():
                group.block_ids.clear()

    def offer_again(self, req_id: str, first_token: int = 0) -> None:
        """What a request computes from ``first_token`` on may be stored, whatever was offered before."""
        status = self._req_status.get(req_id)
        if status is not None:
            for config, group in zip(status.config.kv_group_configs, status.group_states, strict=True):
                group.next_stored_chunk_idx = min(group.next_stored_chunk_idx, first_token // config.tokens_per_chunk)

    def will_be_filled(self, blocks: KVCacheBlocks) -> None:
        """Jobs that still copy from blocks that are not shared end before this step."""
        fresh = blocks.get_unhashed_block_ids_all_groups()
        self._current_batch_allocated_block_ids.update(block for group in fresh for block in group)

    @property
    def stale_below(self) -> int:
        """Jobs with smaller numbers are from before a reset."""
        return int(self._stale_job_threshold)

    def reset_cache(self) -> None:
        # vLLM's half asserts that this is empty, and leaves it filled until the next step
        flush, self._current_batch_jobs_to_flush = self._current_batch_jobs_to_flush, set()
        super().reset_cache()
        self._current_batch_jobs_to_flush |= flush

    def _calc_num_offloadable_tokens(self, req_status: Any, num_computed_tokens: int) -> int:
        tokens = int(super()._calc_num_offloadable_tokens(req_status, num_computed_tokens))
        return tokens - tokens % self.page_tokens

    def _reachable_store_block_mask(self, **asked: Any) -> list[bool] | None:
        """Which blocks of a window vLLM stores: those of the last pages before a length that it can restore."""
        mask: list[bool] | None = super()._reachable_store_block_mask(**asked)
        per = self.page_tokens // asked["group_config"].tokens_per_block
        if mask is None or per < 2:
            return mask
        first = asked["start_chunk_idx"] * self.config.blocks_per_chunk
        pages = {(first + i) // per for i, wanted in enumerate(mask) if wanted}
        return [(first + i) // per in pages for i in range(len(mask))]

    def _maximal_prefix_lookup(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, req: Request, group_config: Any, start_chunk_idx: int
    ) -> int | None:
        """Asks key by key only behind what is known to be stored."""
        known = 0
        if not self._events_tracker.self_describing_enabled:  # it wants to see each key
            chunks = self.leading_tokens(group_config.group_idx, req_context) // group_config.tokens_per_chunk
            known = min(max(0, chunks - start_chunk_idx), len(keys))
        if known == len(keys):
            return known
        rest = super()._maximal_prefix_lookup(keys[known:], req_context, req, group_config, start_chunk_idx + known)
        return None if rest is None else known + int(rest)

    def leading_tokens(self, group: int, context: ReqContext) -> int:
        """Up to where a lookup of each chunk of a group would be a hit, at least."""
        return 0

    def _build_store_jobs(self, scheduler_output: SchedulerOutput) -> dict[int, TransferJob]:
        jobs: dict[int, TransferJob] = super()._build_store_jobs(self.storable(scheduler_output))
        return jobs

    def storable(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        """The step with those requests only whose KV may be stored."""
        return scheduler_output


class WorkerHalf(OffloadingConnectorWorker):
    """The jobs of one rank."""

    def drop_unsubmitted(self, below: int) -> None:
        """Drop stores with smaller numbers that have not begun, and report them as completed.

        From 0.33 on, vLLM counts reports also of jobs from before a reset, and is not idle until it has them all.
        """
        left = [job for job in self._unsubmitted_store_jobs if job[0] >= below]
        for job_id, *_ in self._unsubmitted_store_jobs:
            if job_id < below:
                self._connector_worker_meta.mark_completed(job_id)
        self._unsubmitted_store_jobs[:] = left

    def report(self, result: TransferResult) -> str | None:
        """Report a job as completed, whatever its outcome. Returns the request that it loads; None for a store."""
        req_id: str | None = self._load_jobs.pop(result.job_id, None)
        stats = self._connector_worker_meta.transfer_stats
        if result.transfer_size is not None and result.transfer_time is not None:
            (stats.store if req_id is None else stats.load).record(result.transfer_size, result.transfer_time)
        self._connector_worker_meta.mark_completed(result.job_id)
        return req_id


class ConnectorShell(OffloadingConnector):
    """vLLM's connector without halves: ``connector_scheduler`` or ``connector_worker`` is set by the subclass."""

    connector_scheduler: OffloadingConnectorScheduler | None
    connector_worker: OffloadingConnectorWorker | None

    def __init__(self, vllm_config: VllmConfig, role: Any, kv_cache_config: KVCacheConfig) -> None:
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        self._canonical_layout = False
        self.connector_scheduler = self.connector_worker = None

    def empty_prefix_cache(self) -> bool:
        """Empty the engine's own prefix cache. False if requests use blocks of it."""
        blocks = self._kv_cache_manager
        return blocks is None or bool(blocks.reset_prefix_cache())


__all__ = [
    "NAMES", "ConnectorShell", "OffloadingConnectorMetadata", "SchedulerHalf", "WorkerHalf", "offloading_config",
]  # fmt: skip
