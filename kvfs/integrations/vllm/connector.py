"""KvfsConnector: vLLM's offloading connector with kvfs below it.

vLLM's classes track requests: hybrid groups, preemption, blocks that are reused while they are copied, ranks. The
subclasses here build the identity and the descriptors, turn failed loads into requests that are recomputed, and store
those afterwards. Written for the interfaces of the versions in ``versions.TESTED``.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.forward_context import ForwardContext
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingManager, OffloadingSpec, OffloadingWorker, ReqContext
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvfs.directory.config import parse_size
from kvfs.errors import ConfigError
from kvfs.integrations.vllm import versions
from kvfs.integrations.vllm.internals import (
    ConnectorShell,
    OffloadingConnectorMetadata,
    SchedulerHalf,
    WorkerHalf,
    offloading_config,
)
from kvfs.integrations.vllm.manager import KvfsManager
from kvfs.integrations.vllm.metrics import definitions
from kvfs.integrations.vllm.model import (
    EngineModel,
    LayerSpecs,
    default_blocks,
    layer_specs,
    merged,
    model_of,
    needs_all_ranks,
)
from kvfs.integrations.vllm.peers import PeerCopies, PeerLookups, PeerPlace, ReusedBlocks, join
from kvfs.integrations.vllm.settings import (
    WARM_SECONDS,
    check_early,
    ring_bytes,
    set_defaults,
    settings_of,
    warm_bytes,
)
from kvfs.integrations.vllm.shared import shared_model
from kvfs.integrations.vllm.views import AttachedGroup, describe_caches
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

    def open(self, vllm_config: VllmConfig, cache: KVCacheConfig, layers: LayerSpecs | None = None) -> EngineModel:
        """Open the store and the namespace of this engine. ConfigError, UnsupportedModelError, StoreAccessError.

        ``layers``: as for ``model_of``. May be called again when they are known.
        """
        kept = self.settings.drafter and not self.settings.share  # other engines do not have its layers
        model = model_of(vllm_config, cache, self.blocks_per_chunk, self.settings.weights_id, layers, drafter=kept)
        if self.settings.share:
            model = shared_model(vllm_config, model, self.settings.weights_id)
        if self._store is None:
            self._store = self._open_store()
        self._model = model
        self._namespace = self._store.namespace(
            model.name, model.layout, model.revision, rope=model.rope, extra=model.extra, codec=self.settings.codec
        )
        return model

    def _open_store(self) -> Store:
        wanted = self.settings.mode or "cache"
        store = open_store(
            self.settings.path, capacity=self.settings.capacity, mode=wanted, read_only=self.settings.read_only
        )
        if self.settings.mode not in (None, store.settings.mode):
            logger.warning(
                "kvfs: this store is in mode %s, not %s: kvfs config set mode %s changes it for later starts",
                store.settings.mode, wanted, wanted,
            )  # fmt: skip
        warn_of_capacity(store, self.settings.capacity)
        return store

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


def warn_of_capacity(store: Store, given: int | str | None) -> None:
    """Name a limit that will not be the limit: another than the store's, or one beyond its disk."""
    kept = store.settings.capacity_bytes
    if given is not None and parse_size(given, "capacity") != kept:
        logger.warning(
            "kvfs: the capacity of this store is %d bytes, not %s: kvfs config set capacity %s changes it",
            kept, given, given,
        )  # fmt: skip
    disk = shutil.disk_usage(store.path).total
    if kept > disk:
        logger.warning("kvfs: the capacity of this store is %d bytes, its file system has %d", kept, disk)


@dataclass
class KvfsHandshake(KVConnectorHandshakeMetadata):
    """From the workers to the scheduler: the layers of all ranks, each with its own spec; where this one publishes.

    ``layers``: None where the scheduler sees as much. Only a worker can tell: the scheduler may see one spec for all.
    """

    layers: LayerSpecs | None
    place: PeerPlace | None = None


def layers_of_stages(mine: LayerSpecs) -> list[LayerSpecs]:
    """The layers of each stage of the pipeline. All of its ranks call this while they start."""
    stages = get_pp_group()
    found: list[LayerSpecs] = [mine] * stages.world_size
    torch.distributed.all_gather_object(found, mine, group=stages.cpu_group)
    return found


class _Recent(NamedTuple):
    """A request that got its blocks before the outcome of another connector's loads was known."""

    request: Request
    tokens: int  # of its output, when it got its blocks
    loads: int  # number of the latest step with such loads, by then

    def has_output(self) -> bool:
        stopped = self.request.status is RequestStatus.FINISHED_STOPPED  # with its output, which may be no token
        return stopped or int(self.request.num_output_tokens) > self.tokens


class KvfsConnectorScheduler(SchedulerHalf):
    """vLLM's scheduler half, except that blocks are not stored that were given up or not filled, nor any that rest on a
    load of another connector that failed or may still fail."""

    def __init__(self, spec: OffloadingSpec, config: VllmConfig, cache: KVCacheConfig, page_tokens: int) -> None:
        super().__init__(spec, config, cache)
        assert isinstance(self.manager, KvfsManager)
        self.kvfs = self.manager
        self.page_tokens = page_tokens
        self.foreign_loads = 0  # steps so far in which another connector loaded
        self._known = 0  # of these, how many have an outcome
        self._recent: dict[str, _Recent] = {}  # bounded by the requests that the engine has admitted
        self.reused: ReusedBlocks | None = None  # of engines whose pages other ranks pull

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        # other requests get them, while a token in flight may still end this one
        self.forget_blocks(scheduler_output.preempted_req_ids or ())
        return super().build_connector_meta(scheduler_output)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        # vLLM's half asks for each chunk, and sorts them, before the load may start
        source = self.kvfs.load_source(request.request_id) if num_external_tokens else None
        if source is not None:
            return {source: num_external_tokens}
        sources: dict[CacheHitSource, int] = super().get_external_cache_hit_sources(request, num_external_tokens)
        return sources

    def leading_tokens(self, group: int, context: ReqContext) -> int:
        return self.kvfs.leading_tokens(group, context)

    def storable(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        ended = scheduler_output.finished_req_ids or set()
        withheld = self._failed(ended) | self._unproven(scheduler_output)
        for req_id in ended:
            self._recent.pop(req_id, None)
        if not withheld:
            return scheduler_output
        # as if they had not been scheduled: they are offered later
        scheduled = {k: n for k, n in scheduler_output.num_scheduled_tokens.items() if k not in withheld}
        return replace(scheduler_output, num_scheduled_tokens=scheduled, finished_req_ids=ended - withheld)

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
                request = self.request(req_id)
                assert request is not None, "a request is scheduled that the connector was not told of"
                self._recent[req_id] = _Recent(request, request.num_output_tokens, self.foreign_loads)
        self._recent = {req_id: recent for req_id, recent in self._recent.items() if recent.loads > self._known}
        return set(self._recent)

    def _failed(self, req_ids: Iterable[str]) -> set[str]:
        """Requests that ended with an error, of which vLLM's half believes that their whole prompt was computed."""
        ended = {req_id: self.request(req_id) for req_id in req_ids}
        failed = RequestStatus.FINISHED_ERROR
        return {req_id for req_id, request in ended.items() if request is not None and request.status is failed}


class KvfsConnectorWorker(WorkerHalf):
    """vLLM's worker half, except that a transfer may fail. Delegates transfers to ``KvfsWorker``."""

    def __init__(self, spec: KvfsOffloadingSpec, config: VllmConfig, cache: KVCacheConfig, model: EngineModel) -> None:
        super().__init__(spec, config, cache)
        self._spec, self._model = spec, model
        self.place: PeerPlace | None = None
        self.failed: set[str] = set()  # requests whose load failed, to be reported with the next results

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        settings = self._spec.settings
        groups = describe_caches(self.vllm_config, self.kv_cache_config, self._model, kv_caches)
        attached = [a for engine in groups for a in engine.attached]
        page_bytes = sum(a.layout.part_bytes(a.device.part(a.layout)) for a in attached)
        step = self.vllm_config.scheduler_config.max_num_batched_tokens * page_bytes // self._model.page_tokens
        io = self._spec.namespace.attach(
            [a.device for a in attached], ring_bytes=ring_bytes(settings, step),
            threads=settings.threads, registered_bytes=settings.registered_bytes,
            append_elsewhere=attached[0].device.memory.startswith("cuda"),
        )  # fmt: skip
        warm = warm_bytes(settings, self.vllm_config.parallel_config.world_size)
        if warm and attached[0].device.memory.startswith("cuda"):
            io.warm_hottest(warm, WARM_SECONDS)  # now: registration blocks the kernels of a running engine
        one = len(self.kv_cache_config.kv_cache_groups) == 1  # else numbers of blocks do not name requests
        peers = self._join(io, attached) if settings.dp_pulls else None
        self.place = peers.place if peers is not None else None
        self.worker = KvfsWorker(io, groups, self._model.page_tokens, settings, keeps_prefix=one, peers=peers)

    def _join(self, io: Any, attached: Sequence[AttachedGroup]) -> PeerCopies | None:
        if any(a.stored.kind == "state" for a in attached):
            logger.warning("kvfs: dp_pulls is off: the engine goes on writing to blocks of recurrent states")
            return None
        units = {a.stored.name: a.device.units for a in attached}
        per_block = {a.stored.name: a.units_per_block for a in attached}
        return join(io, self.vllm_config.parallel_config, per_block, units)

    def handle_preemptions(self, kv_connector_metadata: OffloadingConnectorMetadata) -> None:
        # stores from before a reset: their blocks may have been freed, by sleep() even their memory
        self.drop_unsubmitted(getattr(kv_connector_metadata, "stale_below", 0))
        if isinstance(self.worker, KvfsWorker):
            self.worker.step_tokens = getattr(kv_connector_metadata, "step_tokens", 0)
        super().handle_preemptions(kv_connector_metadata)
        # behind the stores of the step before, which publish; vLLM calls this before anything writes to a block
        reused = getattr(kv_connector_metadata, "reused", None)
        if reused is not None and isinstance(self.worker, KvfsWorker):
            self.worker.reuses(reused)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        assert isinstance(self.worker, KvfsWorker)
        if self.worker.idle:
            self.worker.wait_idle()
        received: set[str] = set()
        for result in self.worker.get_finished():
            req_id = self.report(result)
            if req_id is not None:
                received.add(req_id)
                if not result.success:
                    self.failed.add(req_id)
        return set(), received

    def note_idle(self, idle: bool) -> None:
        """Whether the step that begins computes nothing."""
        if isinstance(self.worker, KvfsWorker):
            self.worker.idle = idle

    def load_at_once(self) -> None:
        """After the loads of a step were submitted."""
        if isinstance(self.worker, KvfsWorker):
            self.worker.load_at_once()

    def take_stats(self) -> KVConnectorStats | None:
        return self.worker.metrics.take() if isinstance(self.worker, KvfsWorker) else None

    def shutdown(self) -> None:
        super().shutdown()
        self._spec.close()


class KvfsConnector(ConnectorShell):
    """``--kv-transfer-config '{"kv_connector": "KvfsConnector", "kv_role": "kv_both",
    "kv_connector_extra_config": {"path": "/var/cache/kvfs", "capacity": "200GiB"}}'``"""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _check_version()
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        settings_of(transfer.kv_connector_extra_config)
        set_defaults(transfer.kv_connector_extra_config, *default_blocks(vllm_config, kv_cache_config))
        transfer.kv_load_failure_policy = "recompute"  # the default ends a request whose cache cannot be read
        spec = KvfsOffloadingSpec(offloading_config(vllm_config, kv_cache_config))
        self._layers = layer_specs(kv_cache_config)
        if role is KVConnectorRole.WORKER and needs_all_ranks(vllm_config, kv_cache_config):
            self._layers = merged(layers_of_stages(self._layers))
        self._spec = spec
        model = spec.open(vllm_config, kv_cache_config, self._layers)
        if role is KVConnectorRole.SCHEDULER:
            self._half = KvfsConnectorScheduler(spec, vllm_config, kv_cache_config, model.page_tokens)
            self._manager = self._half.kvfs
            self.connector_scheduler = self._half
            logger.info(
                "kvfs: %s, namespace %s of %s, pages of %d tokens and %d bytes",
                settings_of(spec.extra_config).path, spec.namespace.identity.digest.hex()[:12], model.name,
                model.page_tokens, model.layout.page_bytes,
            )  # fmt: skip
        else:
            self.connector_worker = KvfsConnectorWorker(spec, vllm_config, kv_cache_config, model)

    # -- scheduler ---------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        self._manager.announce(request)
        super().on_new_request(request)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self._manager.note_step(scheduler_output.total_num_scheduled_tokens)
        meta = super().build_connector_meta(scheduler_output)
        meta.stale_below, meta.step_tokens = self._half.stale_below, scheduler_output.total_num_scheduled_tokens
        if self._half.reused is not None:
            meta.reused = self._half.reused.take(scheduler_output, self._manager.block_tokens)
        return meta

    def reset_cache(self) -> bool:
        """Whether no block holds KV from before. Otherwise nothing is stored until a reset finds the engine empty."""
        manager = self._manager
        super().reset_cache()
        if self._half.reused is not None:
            self._half.reused.forget_all()
        manager.tainted = not self.empty_prefix_cache()
        if manager.tainted:
            logger.warning("kvfs: reset while requests run: nothing is stored until a reset without running requests")
        return not manager.tainted

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._half.reused is not None:
            self._half.reused.asked(request.request_id, num_computed_tokens)
        has_jobs = self._half.has_jobs(request.request_id)  # then vLLM ignores this answer, which would be stale later
        if not has_jobs and self._manager.refresh(request.request_id, num_computed_tokens):
            return None, False  # it waits for the bucket, or for its adapter
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return found

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if self._half.reused is not None:
            self._half.reused.admitted(request, blocks.get_block_ids())
        if not num_external_tokens:
            # below MultiConnector, another one may fill them before the request is scheduled: flush the stores that
            # still copy from them. Hashed blocks are shared, and only read
            self._half.will_be_filled(blocks)
        elif len(blocks.blocks) == 1:
            # the blocks before these come from the engine's prefix cache: another connector may lose one of them
            (filled,) = blocks.get_unhashed_block_ids_all_groups()
            self._manager.loads_into(request.request_id, filled)
        self._manager.admitted(request.request_id)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        # below MultiConnector, the list includes failed loads of other connectors
        ours = [req_id for req_id in connector_output.failed_recving or () if self._manager.is_loading(req_id)]
        lost = connector_output.invalid_block_ids
        shortened = self._manager.shortened(lost) if lost else {}
        for req_id in shortened:
            request = self._half.request(req_id)
            if request is not None:  # the engine has cut it to what was loaded
                self._half.offer_again(req_id, request.num_computed_tokens)
        super().update_connector_output(connector_output)
        foreign = lost.difference(*shortened.values())
        if foreign and self._half.foreign_loads and not self._manager.tainted:
            # the blocks, and what was computed from them, stay in the engine's prefix cache until they are recomputed
            self._manager.tainted = True
            logger.warning(
                "kvfs: another connector failed to load blocks that requests share: nothing is stored until a reset "
                "without running requests (reset_prefix_cache with reset_connector) or a restart of the engine"
            )
        for req_id in ours:
            self._manager.load_failed(req_id)
            self._half.offer_again(req_id)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[Any, KVConnectorHandshakeMetadata]) -> None:
        """What the workers know of the layers and the scheduler does not. Called before the first request."""
        told = [each for each in metadata.values() if isinstance(each, KvfsHandshake)]
        if told and told[0].layers is not None:
            assert self._kv_cache_config is not None
            model = self._spec.open(self._vllm_config, self._kv_cache_config, told[0].layers)
            self._manager.use(self._spec.namespace, model)
            self._half.page_tokens = model.page_tokens
        places = [each.place for each in told if each.place is not None]
        if places and len(places) == self._vllm_config.parallel_config.world_size:
            namespace = self._spec.namespace
            self._manager.use_peers(PeerLookups(namespace.identity.digest, namespace.layout, places))
            self._half.reused = ReusedBlocks()
        elif self._spec.settings.dp_pulls:
            logger.warning("kvfs: dp_pulls is off: some workers of this engine are no ranks")

    # -- workers -----------------------------------------------------------------------------

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """None unless the scheduler needs it: below MultiConnector, there is room for one connector's."""
        worker = self.connector_worker
        place = worker.place if isinstance(worker, KvfsConnectorWorker) else None
        layers = self._layers if self._scheduler_lacks_layers() else None
        return None if layers is None and place is None else KvfsHandshake(layers, place)

    def _scheduler_lacks_layers(self) -> bool:
        """Whether the scheduler does not see all layers, or not each with its own spec. For a worker, which does."""
        shapes = any(len({*specs.values()}) > 1 for specs in self._layers)
        return shapes or needs_all_ranks(self._vllm_config, self._kv_cache_config)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        worker = self.connector_worker
        assert isinstance(worker, KvfsConnectorWorker)
        # the older runner tells by the context whether anything is computed, the newer one by arguments
        worker.note_idle(forward_context.attn_metadata is None and not kwargs)
        super().start_load_kv(forward_context, **kwargs)
        worker.load_at_once()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        worker = self.connector_worker
        assert isinstance(worker, KvfsConnectorWorker)
        sent, received = worker.get_finished(finished_req_ids)
        failed, worker.failed = worker.failed, set()
        return KVConnectorTransferResults(finished_sending=sent, finished_recving=received, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        worker = self.connector_worker.worker if self.connector_worker is not None else None
        if not isinstance(worker, KvfsWorker):
            return set()
        lost, worker.lost = worker.lost, set()
        return lost

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


def _check_version() -> None:
    if versions.warning():
        logger.warning_once("kvfs: %s", versions.warning())
