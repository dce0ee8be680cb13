"""kvfs as a secondary tier below vLLM's own CPU tier.

    "kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": ..., "secondary_tiers": [{"type": "kvfs", "path": ..., "capacity": ..., "weights_id": ...}]}

The tier sees rows of bytes and block hashes, but no model. So its pages are opaque, and all of its configuration,
ranks included, is part of the identity: unlike KvfsConnector, it shares pages with no other TP or PP size. Reads are
verified; a page that fails verification is a failed promotion, which vLLM recomputes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, ClassVar

import numpy as np
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import LookupResult, Medium, OffloadKey, ReqContext, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, ScheduleEndContext, SecondaryTierManager, TransferJob

from kvfs.errors import ConfigError
from kvfs.namespace import Namespace
from kvfs.pages.layout import GRANULE_TOKENS, PAGE_TOKENS_MAX, PageLayout
from kvfs.store import open_store
from kvfs.system.thread_pool import Pool

logger = init_logger(f"vllm.{__name__}")
DRAIN_SECONDS = 10.0  # longest wait for jobs before a reset and at the end; a job whose disk hangs has failed then
KEY_BYTES = 32 + 4  # a SHA-256 hash and the number of the group
#: fields of vLLM's OffloadingConfig that name the bytes of a row
_GROUP = ("tokens_per_block", "layer_names", "group_id")
_CACHE = ("tokens_per_hash", "blocks_per_chunk")
_PARALLEL = ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size", "is_parallelism_agnostic")


class _Lookups(AsyncLookupManager):
    def __init__(self, namespace: Namespace, tier_type: str) -> None:
        super().__init__(tier_type=tier_type)
        self._ns = namespace

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        return self._ns.present_keys(keys)


class KvfsTier(SecondaryTierManager):
    """Moves rows between vLLM's CPU tier and the store. Runs in the scheduler's process; I/O is left to its threads.

    Owns the jobs that are open. A thread touches a row only under the lock, while its job is open: a disk that hangs
    keeps a thread and its copy of a row, but no row.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, path: str = "",
        capacity: int | str | None = None, weights_id: str = "", threads: int = 4, backpressure_detector: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        if not path or not weights_id:
            raise ConfigError(
                f'path is {path!r}, weights_id {weights_id!r}: write {{"type": "kvfs", "path": "/var/cache/kvfs", '
                '"capacity": "200GiB", "weights_id": ...}, with a commit or digest of the weights: a tier sees none'
            )
        if type(threads) is not int or not 1 <= threads <= 64:
            raise ConfigError(f"threads is {threads!r}: pass 1 to 64")
        self._rows = np.frombuffer(primary_kv_view, dtype=np.uint8).reshape(-1, self.block_size_bytes)
        self._store = open_store(path, capacity=capacity)
        self._ns = self._store.namespace(
            offloading_spec.config.model.name.rstrip("/").rpartition("/")[2], _layout(offloading_spec, self._rows),
            weights_id, extra=identity_of(offloading_spec.config),
        )  # fmt: skip
        self._pool = Pool(threads, "kvfs-tier")
        self._changed = threading.Condition()  # of the jobs
        self._open: dict[int, TransferJob] = {}  # without a result
        self._finished: SimpleQueue[tuple[JobResult, Collection[OffloadKey]]] = SimpleQueue()
        self._lookups = _Lookups(self._ns, tier_type)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if not _is_stable(key):
            return LookupResult.MISS
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, self._store_row)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, self._load_row)

    def _store_row(self, job_id: int, key: OffloadKey, number: int) -> bool:
        with self._changed:
            if job_id not in self._open:
                return False
            row = self._rows[number].tobytes()
        return bool(self._ns.put_keys([key], row).declined == 0)

    def _load_row(self, job_id: int, key: OffloadKey, number: int) -> bool:
        row = bytearray(self._rows.shape[1])
        with self._ns.match_keys([key]) as match:
            if not match or self._ns.get(match, row) != 1:
                return False
        with self._changed:
            if job_id not in self._open:
                return False
            self._rows[number] = np.frombuffer(row, dtype=np.uint8)
        return True

    def _submit(self, job: TransferJob, move: Callable[[int, OffloadKey, int], bool]) -> None:
        with self._changed:
            self._open[job.job_id] = job
        self._pool.begin([partial(self._run, job, move)])

    def _run(self, job: TransferJob, move: Callable[[int, OffloadKey, int], bool]) -> None:
        began, moved = time.monotonic(), list[OffloadKey]()
        try:
            for key, number in zip(job.keys, job.chunk_ids, strict=True):
                if job.job_id not in self._open or not _is_stable(key) or not move(job.job_id, key, int(number)):
                    break
                moved.append(key)
        except Exception:  # of any kind: the job must end, or its rows stay pinned forever
            logger.exception("kvfs: a job of the tier failed")
        self._end(job, moved, time.monotonic() - began)

    def _end(self, job: TransferJob, moved: Sequence[OffloadKey], seconds: float) -> None:
        """Report a job, once."""
        keys = list(job.keys)
        whole = len(moved) == len(keys)
        failed = () if whole or not job.is_promotion else keys[len(moved) :]
        result = JobResult(
            job.job_id, whole, None if whole or not moved else tuple(moved), seconds, len(moved) * self.block_size_bytes
        )
        with self._changed:
            if self._open.pop(job.job_id, None) is not None:
                self._finished.put((result, failed))
                self._changed.notify_all()

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results: list[JobResult] = []
        while True:
            try:
                result, failed = self._finished.get_nowait()
            except Empty:
                return results
            self._lookups.mark_miss(list(failed))
            results.append(result)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._lookups.flush()

    def drain_jobs(self) -> None:
        """Wait for all jobs, at most DRAIN_SECONDS; those that are left have failed, and touch no row any more."""
        with self._changed:
            self._changed.wait_for(lambda: not self._open, DRAIN_SECONDS)
            left = list(self._open.values())
            for job in left:
                self._end(job, (), DRAIN_SECONDS)
        if left:
            logger.warning("kvfs: %d jobs of the tier did not end within %s s: kvfs doctor", len(left), DRAIN_SECONDS)

    def shutdown(self) -> None:
        self._lookups.shutdown()
        self.drain_jobs()
        self._pool.close(timeout=0.1)
        self._store.close()


def _is_stable(key: OffloadKey) -> bool:
    """Whether a key identifies the same tokens in every process, as SHA-256 does and xxhash does not."""
    if len(key) == KEY_BYTES:
        return True
    logger.error_once(
        "kvfs: block hashes are not SHA-256, nothing is stored: start with --prefix-caching-hash-algo sha256"
    )
    return False


def identity_of(config: Any) -> dict[str, Any]:
    """What vLLM tells a tier about the bytes, ranks and layout included: a tier cannot map between them.

    Named fields: one that a later vLLM adds, or one that does not change the bytes, must not hide what is stored.
    """
    groups = [{name: getattr(group, name) for name in _GROUP} for group in config.groups]
    return {
        "engine": "vllm tier",
        "groups": groups,
        "worker_kv_bytes_per_block": config.worker_kv_bytes_per_block,
        "model": {"dtype": config.model.dtype},
        "cache": {name: getattr(config.cache, name) for name in _CACHE},
        "parallel": {name: getattr(config.parallel, name) for name in _PARALLEL},
        "replicated_layout": config.replicated_layout,
        "canonical_layout": config.canonical_layout,
        "kv_cache_layout": config.kv_cache_layout,
    }


def _layout(spec: Any, rows: np.ndarray[Any, Any]) -> PageLayout:
    tokens = max(spec.tokens_per_block) * spec.blocks_per_chunk
    pages = -(-tokens // GRANULE_TOKENS) * GRANULE_TOKENS  # informative only
    return PageLayout.opaque(int(rows.shape[1]), min(pages, PAGE_TOKENS_MAX))
