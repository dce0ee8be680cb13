"""KvfsConnector: vLLM's offloading connector with kvfs below it.

vLLM's classes track requests: hybrid groups, preemption, blocks that are reused while they are copied, ranks. The
subclasses here build the identity and the descriptors, turn failed loads into requests that are recomputed, and store
those afterwards. Written for the interfaces of the versions in ``versions.TESTED``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata, TransferJob
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.forward_context import ForwardContext
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingManager, OffloadingSpec, OffloadingWorker
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvfs.errors import ConfigError
from kvfs.integrations.vllm import versions
from kvfs.integrations.vllm.manager import KvfsManager
from kvfs.integrations.vllm.metrics import definitions
from kvfs.integrations.vllm.model import EngineModel, model_of
from kvfs.integrations.vllm.settings import check_early, set_defaults, settings_of
from kvfs.integrations.vllm.views import describe_caches
from kvfs.integrations.vllm.worker import KvfsWorker
from kvfs.namespace import Namespace
from kvfs.store import Store, open_store

logger = init_logger(f"vllm.{__name__}")  # below vLLM's own logger, for its handlers

_NEEDS_CONNECTOR = 'KvfsOffloadingSpec works below KvfsConnector only: write "kv_connector": "KvfsConnector"'


class KvfsOffloadingSpec(OffloadingSpec):
    """Owns the store and the namespace of one engine process, and creates the manager for vLLM's scheduler half.

    Created by KvfsConnector, which alone sees the configuration that identifies the model.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self.settings = settings_of(self.extra_config)
        self._store: Store | None = None
        self._namespace: Namespace | None = None
        self._model: EngineModel | None = None

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return definitions()

    def open(self, vllm_config: VllmConfig, cache: KVCacheConfig) -> EngineModel:
        """Open the store and the namespace of this engine. ConfigError, UnsupportedModelError, StoreAccessError."""
        model = model_of(vllm_config, cache, self.blocks_per_chunk, self.settings.weights_id)
        wanted = self.settings.mode or "cache"
        self._store = open_store(
            self.settings.path, capacity=self.settings.capacity, mode=wanted, read_only=self.settings.read_only
        )
        if self.settings.mode not in (None, self._store.settings.mode):
            logger.warning(
                "kvfs: this store is in mode %s, not %s: kvfs config set mode %s changes it for later starts",
                self._store.settings.mode, wanted, wanted,
            )  # fmt: skip
        self._model = model
        self._namespace = self._store.namespace(
            model.name, model.layout, model.revision, extra=model.extra, codec=self.settings.codec
        )
        return model

    @property
    def namespace(self) -> Namespace:
        assert self._namespace is not None, "open() was not called"
        return self._namespace

    def get_manager(self) -> OffloadingManager:
        if self._store is None or self._model is None:
            raise ConfigError(_NEEDS_CONNECTOR)
        return KvfsManager(self._store, self.namespace, self._model, self.settings)

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        raise ConfigError(_NEEDS_CONNECTOR)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()


class _Recent(NamedTuple):
    """A request that got its blocks before the outcome of another connector's loads was known."""

    request: Request
    tokens: int  # of its output, when it got its blocks
    loads: int  # number of the latest step with such loads, by then

    def has_output(self) -> bool:
        stopped = self.request.status is RequestStatus.FINISHED_STOPPED  # with its output, which may be no token
        return stopped or int(self.request.num_output_tokens) > self.tokens


class KvfsConnectorScheduler(OffloadingConnectorScheduler):
    """vLLM's scheduler half, except that blocks are not stored that were given up or not filled, nor any that rest on a
    load of another connector that failed or may still fail."""

    def __init__(self, spec: OffloadingSpec, config: VllmConfig, cache: KVCacheConfig) -> None:
        super().__init__(spec, config, cache)
        self.foreign_loads = 0  # steps so far in which another connector loaded
        self._known = 0  # of these, how many have an outcome
        self._recent: dict[str, _Recent] = {}  # bounded by the requests that the engine has admitted

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        for req_id in scheduler_output.preempted_req_ids or ():
            status = self._req_status.get(req_id)
            for group in status.group_states if status is not None else ():
                group.block_ids.clear()  # other requests get them, while a token in flight may still end this one
        return super().build_connector_meta(scheduler_output)

    def _build_store_jobs(self, scheduler_output: SchedulerOutput) -> dict[int, TransferJob]:
        ended = scheduler_output.finished_req_ids or set()
        withheld = self._failed(ended) | self._unproven(scheduler_output)
        for req_id in ended:
            self._recent.pop(req_id, None)
        trusted = scheduler_output
        if withheld:  # as if they had not been scheduled: they are offered later
            scheduled = {k: n for k, n in scheduler_output.num_scheduled_tokens.items() if k not in withheld}
            trusted = replace(scheduler_output, num_scheduled_tokens=scheduled, finished_req_ids=ended - withheld)
        jobs: dict[int, TransferJob] = super()._build_store_jobs(trusted)
        return jobs

    def _unproven(self, scheduler_output: SchedulerOutput) -> set[str]:
        """Requests whose KV may rest on a load of another connector that may still fail.

        A load within a step fails with the step that computes from it, and steps end in order. So the first token of a
        request that got its blocks in that step or later arrives with or after the failure. Requests that get blocks
        meanwhile may share those of the load through the engine's prefix cache.
        """
        self._known = max([self._known, *(recent.loads for recent in self._recent.values() if recent.has_output())])
        self.foreign_loads += bool(scheduler_output.has_sync_kv_loads)
        if self.foreign_loads > self._known:
            admitted = {data.req_id for data in scheduler_output.scheduled_new_reqs}
            for req_id in admitted | scheduler_output.scheduled_cached_reqs.resumed_req_ids:
                request = self._req_status[req_id].req
                self._recent[req_id] = _Recent(request, request.num_output_tokens, self.foreign_loads)
        self._recent = {req_id: recent for req_id, recent in self._recent.items() if recent.loads > self._known}
        return set(self._recent)

    def _failed(self, req_ids: Iterable[str]) -> set[str]:
        """Requests that ended with an error, of which vLLM's half believes that their whole prompt was computed."""
        ended = (self._req_status.get(req_id) for req_id in req_ids)
        failed = RequestStatus.FINISHED_ERROR
        return {status.req.request_id for status in ended if status is not None and status.req.status is failed}


class KvfsConnectorWorker(OffloadingConnectorWorker):
    """vLLM's worker half, except that a transfer may fail. Delegates transfers to ``KvfsWorker``."""

    def __init__(self, spec: KvfsOffloadingSpec, config: VllmConfig, cache: KVCacheConfig, model: EngineModel) -> None:
        super().__init__(spec, config, cache)
        self._spec, self._model = spec, model
        self.idle = False  # whether this step computes nothing
        self.failed: set[str] = set()  # requests whose load failed, to be reported with the next results

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        settings = self._spec.settings
        groups = describe_caches(self.vllm_config, self.kv_cache_config, self._model, kv_caches)
        io = self._spec.namespace.attach(
            [a.device for a in groups], ring_bytes=settings.ring_bytes, threads=settings.threads,
            registered_bytes=settings.registered_bytes,
        )  # fmt: skip
        if settings.warm_bytes:
            io.warm_hottest(settings.warm_bytes)  # now: registration blocks the kernels of a running engine
        self.worker = KvfsWorker(io, groups, self._spec.blocks_per_chunk, settings)

    def handle_preemptions(self, kv_connector_metadata: OffloadingConnectorMetadata) -> None:
        # stores from before a reset: their blocks may have been freed, by sleep() even their memory
        stale = getattr(kv_connector_metadata, "stale_below", 0)
        self._unsubmitted_store_jobs[:] = [job for job in self._unsubmitted_store_jobs if job[0] >= stale]
        super().handle_preemptions(kv_connector_metadata)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        assert isinstance(self.worker, KvfsWorker)
        if self.idle:
            self.worker.wait_idle()
        received: set[str] = set()
        for result in self.worker.get_finished():
            req_id = self._load_jobs.pop(result.job_id, None)
            stats = self._connector_worker_meta.transfer_stats
            if result.transfer_size is not None and result.transfer_time is not None:
                (stats.store if req_id is None else stats.load).record(result.transfer_size, result.transfer_time)
            self._connector_worker_meta.mark_completed(result.job_id)
            if req_id is not None:
                received.add(req_id)
                if not result.success:
                    self.failed.add(req_id)
        return set(), received

    def take_stats(self) -> KVConnectorStats | None:
        return self.worker.metrics.take() if isinstance(self.worker, KvfsWorker) else None

    def shutdown(self) -> None:
        super().shutdown()
        self._spec.close()


class KvfsConnector(OffloadingConnector):
    """``--kv-transfer-config '{"kv_connector": "KvfsConnector", "kv_role": "kv_both",
    "kv_connector_extra_config": {"path": "/var/cache/kvfs", "capacity": "200GiB"}}'``"""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        _check_version()
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        settings_of(transfer.kv_connector_extra_config)
        set_defaults(transfer.kv_connector_extra_config, _block_tokens(kv_cache_config))
        transfer.kv_load_failure_policy = "recompute"  # the default ends a request whose cache cannot be read
        # every rank stores its own part; ranks with equal bytes divide the pages among them
        spec = KvfsOffloadingSpec(
            replace(build_offloading_config(vllm_config, kv_cache_config), replicated_layout=False)
        )
        self._canonical_layout = False
        self.connector_scheduler = self.connector_worker = None
        model = spec.open(vllm_config, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            self.connector_scheduler = KvfsConnectorScheduler(spec, vllm_config, kv_cache_config)
            logger.info(
                "kvfs: %s, namespace %s of %s, pages of %d tokens and %d bytes",
                settings_of(spec.extra_config).path, spec.namespace.identity.digest.hex()[:12], model.name,
                model.page_tokens, model.layout.page_bytes,
            )  # fmt: skip
        else:
            self.connector_worker = KvfsConnectorWorker(spec, vllm_config, kv_cache_config, model)

    @property
    def _manager(self) -> KvfsManager:
        manager = self.scheduler.manager
        assert isinstance(manager, KvfsManager)
        return manager

    # -- scheduler ---------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        self._manager.announce(request)
        super().on_new_request(request)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        meta = super().build_connector_meta(scheduler_output)
        meta.stale_below = self.scheduler._stale_job_threshold
        return meta

    def reset_cache(self) -> bool:
        """Whether no block holds KV from before. Otherwise nothing is stored until a reset finds the engine empty."""
        scheduler, manager = self.scheduler, self._manager
        # vLLM's half asserts that this is empty, and leaves it filled until the next step
        flush, scheduler._current_batch_jobs_to_flush = scheduler._current_batch_jobs_to_flush, set()
        super().reset_cache()
        scheduler._current_batch_jobs_to_flush |= flush
        blocks = self._kv_cache_manager
        manager.tainted = blocks is not None and not blocks.reset_prefix_cache()
        if manager.tainted:
            logger.warning("kvfs: reset while requests run: nothing is stored until a reset without running requests")
        return not manager.tainted

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        status = self.scheduler._req_status.get(request.request_id)
        if status is None or not status.transfer_jobs:  # else vLLM ignores this answer, which would be stale later
            self._manager.refresh(request.request_id)
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return found

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if not num_external_tokens:
            # below MultiConnector, another one may fill them before the request is scheduled: flush the stores that
            # still copy from them. Hashed blocks are shared, and only read
            fresh = blocks.get_unhashed_block_ids_all_groups()
            self.scheduler._current_batch_allocated_block_ids.update(block for group in fresh for block in group)
        self._manager.admitted(request.request_id)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        # below MultiConnector, the list includes failed loads of other connectors
        ours = [req_id for req_id in connector_output.failed_recving or () if self._manager.is_loading(req_id)]
        super().update_connector_output(connector_output)
        if connector_output.invalid_block_ids and self.scheduler.foreign_loads and not self._manager.tainted:
            # the blocks, and what was computed from them, stay in the engine's prefix cache until they are recomputed
            self._manager.tainted = True
            logger.warning(
                "kvfs: another connector failed to load blocks that requests share: nothing is stored until a reset "
                "without running requests (reset_prefix_cache with reset_connector) or a restart of the engine"
            )
        for req_id in ours:
            self._manager.load_failed(req_id)
            status = self.scheduler._req_status.get(req_id)
            for group in status.group_states if status is not None else ():
                group.next_stored_chunk_idx = 0  # all that is recomputed may be stored

    # -- workers -----------------------------------------------------------------------------

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        worker = self.connector_worker
        assert isinstance(worker, KvfsConnectorWorker)
        # the older runner tells by the context whether anything is computed, the newer one by arguments
        worker.idle = forward_context.attn_metadata is None and not kwargs

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        worker = self.connector_worker
        assert isinstance(worker, KvfsConnectorWorker)
        sent, received = worker.get_finished(finished_req_ids)
        failed, worker.failed = worker.failed, set()
        return KVConnectorTransferResults(finished_sending=sent, finished_recving=received, failed_recving=failed)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if isinstance(self.connector_worker, KvfsConnectorWorker):
            return self.connector_worker.take_stats()
        stats: KVConnectorStats | None = super().get_kv_connector_stats()
        return stats

    # -- the class, in any process -----------------------------------------------------------

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """False: nothing is copied inside the forward pass.

        Where graphs are used, vLLM calls this while it builds its configuration, long before it loads the model. It is
        the first call that sees the settings, so they are checked here.
        """
        check_early(extra_config)
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        assert vllm_config.kv_transfer_config is not None
        check_early(vllm_config.kv_transfer_config.kv_connector_extra_config)
        return None  # any: strides are read from the tensors

    @classmethod
    def build_prom_metrics(cls, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> Any:
        assert vllm_config.kv_transfer_config is not None
        vllm_config.kv_transfer_config.kv_connector_extra_config.setdefault("spec_name", KvfsOffloadingSpec.__name__)
        return super().build_prom_metrics(vllm_config, *args, **kwargs)


def _block_tokens(cache: KVCacheConfig) -> tuple[int, ...]:
    groups: Mapping[int, Any] = dict(enumerate(cache.kv_cache_groups))
    return tuple(groups[index].kv_cache_spec.block_size for index in cache.prefix_cacheable_group_ids)


def _check_version() -> None:
    if versions.warning():
        logger.warning_once("kvfs: %s", versions.warning())
