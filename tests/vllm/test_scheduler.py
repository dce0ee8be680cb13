"""The connector in the scheduler's role, called as the engine's scheduler would. No model runs."""

from __future__ import annotations

import copy
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    KVCacheBlock,
    get_request_block_hasher,
    init_none_hash,
    make_block_hash_with_group_id,
)
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvfs.integrations.vllm import adapters, costs, manager, prefetch
from kvfs.integrations.vllm.connector import KvfsConnector
from kvfs.integrations.vllm.prefetch import Prefetcher
from kvfs.lookup import matcher
from kvfs.lookup.prefix_match import PrefixMatch
from kvfs.lookup.prompt_pages import PromptPages
from kvfs.maintenance.warm import Warmed
from kvfs.pages.chunk_set import bits_of

BLOCK, TOKENS, HIT = 16, 130, 128  # of a block, of a prompt, of the two pages in it
FIRST = range(1, 10)  # blocks of a request


@pytest.fixture(scope="module")
def engine_config(model: Callable[[str], Path]) -> VllmConfig:
    args = EngineArgs(
        model=str(model("llama")), enforce_eager=True, block_size=BLOCK, max_model_len=1024, dtype="float32"
    )
    config = args.create_engine_config()
    config.device_config.device_type = "cuda"  # blocks ordered token by token, which the CPU's kernels do not keep
    return config


@pytest.fixture
def connector(engine_config: VllmConfig, tmp_path: Path) -> Iterator[KvfsConnector]:
    init_none_hash(sha256)
    config = copy.deepcopy(engine_config)
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="KvfsConnector", kv_role="kv_both",
        kv_connector_extra_config={"path": str(tmp_path / "store"), "capacity": "64MiB", "weights_id": "w"},
    )  # fmt: skip
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
    layers = [f"model.layers.{n}.self_attn.attn" for n in range(4)]
    cache = KVCacheConfig(
        24, [KVCacheTensor(0, [], 0, 0)], [KVCacheGroupSpec(layers, spec)], kv_cache_layout="LBNHC"
    )  # fmt: skip
    made = KvfsConnector(config, KVConnectorRole.SCHEDULER, cache)
    yield made
    made.shutdown()


def arrive(connector: KvfsConnector, name: str, lora: LoRARequest | None = None) -> Request:
    tokens = [random.Random(f"{name} {i}").randrange(5, 1000) for i in range(TOKENS)]
    hasher = get_request_block_hasher(BLOCK, sha256)
    request = Request(name, tokens, SamplingParams(max_tokens=4), None, block_hasher=hasher, lora_request=lora)
    connector.on_new_request(request)
    return request


def allocate(
    connector: KvfsConnector, request: Request, ids: Iterable[int], external: int = 0, shared: int = 0
) -> None:
    """``shared``: how many of the first blocks come from the engine's own prefix cache."""
    blocks = [KVCacheBlock(n) for n in ids]
    for block in blocks[:shared]:
        block.set_block_hash(make_block_hash_with_group_id(BlockHash(b"of another request"), 0), BLOCK)
    connector.update_state_after_alloc(request, KVCacheBlocks((blocks,)), external)


def step(connector: KvfsConnector, *new: tuple[Request, Iterable[int]], **fields: Any) -> Any:
    """The end of a step of the scheduler that computes the requests in ``new``. The metadata for the workers."""
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [SimpleNamespace(req_id=r.request_id, block_ids=(list(ids),)) for r, ids in new]  # type: ignore[misc]
    output.num_scheduled_tokens = {request.request_id: TOKENS for request, _ in new}
    for name, value in fields.items():
        setattr(output, name, value)
    meta = connector.build_connector_meta(output)
    for request, _ in new:
        request.status, request.num_computed_tokens = RequestStatus.RUNNING, TOKENS
    return meta


def computed(connector: KvfsConnector, name: str, ids: Iterable[int]) -> tuple[Request, int]:
    """A request that was computed, and the job that stores it."""
    request = arrive(connector, name)
    connector.get_num_new_matched_tokens(request, 0)
    allocate(connector, request, ids)
    (job,) = step(connector, (request, ids)).store_jobs
    return request, job


def preempt(connector: KvfsConnector, request: Request) -> None:
    step(connector, preempted_req_ids={request.request_id})
    request.status, request.num_computed_tokens = RequestStatus.PREEMPTED, 0


def report(connector: KvfsConnector, job: int, **fields: Any) -> None:
    meta = OffloadingWorkerMetadata(completed_jobs={job: 1})
    connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=meta, **fields))


def publish(connector: KvfsConnector, request: Request) -> None:
    """Store the pages of a request, as a worker would."""
    namespace = connector._manager._ns
    pages = namespace.layout.page_bytes * (TOKENS // namespace.layout.page_tokens)
    assert request.prompt_token_ids is not None
    namespace.put(request.prompt_token_ids, bytes(pages))


@pytest.mark.parametrize(("shared", "flushed"), [(0, True), (9, False)])
def test_blocks_that_another_connector_fills_are_flushed_first(
    connector: KvfsConnector, shared: int, flushed: bool
) -> None:
    """Below MultiConnector, a request that another connector loads gets blocks from which kvfs still copies. It is not
    scheduled in that step. Blocks of the engine's prefix cache are read, not filled."""
    request, job = computed(connector, "a", FIRST)
    request.status = RequestStatus.FINISHED_STOPPED
    connector.request_finished_all_groups(request, (list(FIRST),))
    other = arrive(connector, "other")
    assert connector.get_num_new_matched_tokens(other, 0) == (0, False)
    allocate(connector, other, FIRST, shared=shared)
    jobs = step(connector, finished_req_ids={"a"}).jobs_to_flush
    assert jobs == {job} or (not flushed and not jobs), "vLLM 0.33 fences blocks that are read, too"
    assert step(connector).jobs_to_flush == set()


def test_a_request_whose_pages_are_being_copied_is_looked_up_when_they_are_stored(
    connector: KvfsConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is preempted during a save. The engine asks in each step, and ignores the answers before the save ends."""
    monkeypatch.setattr(manager, "FRESH_SECONDS", 600.0)
    request, job = computed(connector, "a", FIRST)
    preempt(connector, request)
    assert connector.get_num_new_matched_tokens(request, 0) == (None, False)
    publish(connector, request)
    report(connector, job)
    assert connector.get_num_new_matched_tokens(request, 0) == (HIT, True)


def test_a_load_that_failed_counts_until_a_preemption(connector: KvfsConnector) -> None:
    """Not until it has blocks again: below MultiConnector, another load may fail then, and so on without end."""
    request = arrive(connector, "a")
    publish(connector, request)
    assert connector.get_num_new_matched_tokens(request, 0) == (HIT, True)
    allocate(connector, request, FIRST, external=HIT)
    (job,) = step(connector).load_jobs
    report(connector, job, failed_recving={"a"})
    for _ in range(2):
        assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
        allocate(connector, request, FIRST)
    for job in step(connector, (request, FIRST)).store_jobs:
        report(connector, job)
    preempt(connector, request)
    assert connector.get_num_new_matched_tokens(request, 0) == (HIT, True)


def test_blocks_that_a_preemption_took_are_not_stored_when_the_last_token_comes_later(connector: KvfsConnector) -> None:
    """With asynchronous scheduling, a step is in flight when its request loses its blocks. Its token may end the
    request and fill a page of it; by then, another request writes into these blocks."""
    connector.scheduler.config = connector.scheduler.config._replace(offload_prompt_only=False)
    request, job = computed(connector, "a", range(1, 13))
    request.append_output_token_ids([7] * 61)
    step(connector, num_scheduled_tokens={"a": 61})
    report(connector, job)
    preempt(connector, request)
    request.append_output_token_ids([7, 7])  # 193 tokens: the KV of three pages was there
    request.status = RequestStatus.FINISHED_STOPPED
    connector.request_finished_all_groups(request, ([],))
    computed(connector, "b", range(1, 13))
    assert not step(connector, finished_req_ids={"a"}).store_jobs


def test_an_error_in_the_midst_of_a_prompt_stores_nothing_more(connector: KvfsConnector) -> None:
    """Its last block is allocated but not filled. vLLM takes a request that was not aborted to have a whole prompt."""
    request = arrive(connector, "a")
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    allocate(connector, request, range(1, 9))
    assert not step(connector, (request, range(1, 9)), num_scheduled_tokens={"a": 60}).store_jobs
    request.num_computed_tokens = 60
    step(connector, num_scheduled_tokens={"a": 60})
    request.num_computed_tokens = 120
    request.status = RequestStatus.FINISHED_ERROR
    connector.request_finished_all_groups(request, (list(range(1, 9)),))
    assert not step(connector, finished_req_ids={"a"}).store_jobs


def admit(
    connector: KvfsConnector, name: str, ids: Iterable[int], *, loads: bool = False, shared: int = 0
) -> tuple[Request, Any]:
    """A request that gets blocks, and its store jobs. ``loads``: another connector fills some of them in that step.
    ``shared``: how many of the first blocks come from the engine's own prefix cache."""
    request = arrive(connector, name)
    assert connector.get_num_new_matched_tokens(request, shared * BLOCK) == (0, False)
    allocate(connector, request, ids, shared=shared)
    return request, step(connector, (request, ids), has_sync_kv_loads=loads).store_jobs


def go_on(connector: KvfsConnector, *requests: Request) -> dict[str, int]:
    """Another step of these requests. Returns how many pages of each it begins to store."""
    jobs = step(connector, num_scheduled_tokens={r.request_id: 1 for r in requests}).store_jobs
    return {job.req_id: len(job.src_spec.block_ids) * BLOCK // 64 for job in jobs.values()}


def fail_others(connector: KvfsConnector) -> None:
    connector.update_connector_output(KVConnectorOutput(invalid_block_ids={3}))


def test_what_another_connector_loads_within_a_step_is_stored_once_the_outcome_is_known(
    connector: KvfsConnector,
) -> None:
    """Its failure comes with what was computed from it, and no later than the first token."""
    request, jobs = admit(connector, "a", FIRST, loads=True)
    assert not jobs and not go_on(connector, request)
    sharing, jobs = admit(connector, "b", range(10, 19))
    assert not jobs, "it may share blocks of the first one"
    request.append_output_token_ids(7)
    assert go_on(connector, request, sharing) == {"a": 2, "b": 2}
    computed(connector, "c", range(1, 10))


def test_a_token_does_not_prove_later_loads(connector: KvfsConnector) -> None:
    first, _ = admit(connector, "a", FIRST, loads=True)
    second, jobs = admit(connector, "b", range(10, 19), loads=True)
    assert not jobs
    first.append_output_token_ids(7)
    assert go_on(connector, first, second) == {"a": 2}
    first.append_output_token_ids(7)
    sharing, jobs = admit(connector, "c", [*range(10, 14), *range(19, 24)], shared=4)
    assert not jobs and go_on(connector, first, second, sharing) == {}
    sharing.append_output_token_ids(7)
    assert go_on(connector, first, second, sharing) == {"b": 2, "c": 2}, "steps end in order"


def test_the_outcome_of_an_aborted_requests_load_is_known_with_the_next_token(connector: KvfsConnector) -> None:
    request, _ = admit(connector, "a", range(10, 19), loads=True)
    assert not end(connector, request, status=RequestStatus.FINISHED_ABORTED)
    sharing, jobs = admit(connector, "b", [*range(10, 14), *range(19, 24)], shared=4)
    assert not jobs and not go_on(connector, sharing)
    sharing.append_output_token_ids(7)
    assert go_on(connector, sharing) == {"b": 2}
    computed(connector, "c", range(1, 10))


def end(connector: KvfsConnector, *requests: Request, status: RequestStatus = RequestStatus.FINISHED_STOPPED) -> Any:
    for request in requests:
        request.status = status
        connector.request_finished_all_groups(request, ([],))
    return step(connector, finished_req_ids={request.request_id for request in requests}).store_jobs


@pytest.mark.parametrize("aborted", [False, True])
def test_nothing_is_stored_after_another_connector_failed_until_a_reset(
    connector: KvfsConnector, aborted: bool
) -> None:
    """Until the blocks are computed again, other requests share them, and compute from them what is as wrong."""
    request, jobs = admit(connector, "a", range(10, 19), loads=True)
    assert not jobs
    if aborted:
        end(connector, request, status=RequestStatus.FINISHED_ABORTED)
    fail_others(connector)
    sharing, jobs = admit(connector, "b", [*range(10, 14), *range(19, 24)], shared=4)
    assert not jobs and go_on(connector, sharing) == {}
    for each in (request, sharing):
        each.append_output_token_ids(7)
    assert go_on(connector, *([] if aborted else [request]), sharing) == {}
    assert not end(connector, sharing)
    assert not admit(connector, "other", [*range(19, 24), *range(1, 5)], shared=5)[1]
    assert connector.reset_cache()
    computed(connector, "after", range(10, 19))


def test_a_token_that_was_computed_from_a_failed_load_proves_nothing(connector: KvfsConnector) -> None:
    """With asynchronous scheduling, the step after the one that failed is in flight, and returns such a token."""
    request, _ = admit(connector, "a", range(10, 19), loads=True)
    go_on(connector, request)
    fail_others(connector)
    go_on(connector, request)
    request.append_output_token_ids(7)
    sharing, jobs = admit(connector, "b", [*range(10, 14), *range(19, 24)], shared=4)
    assert not jobs
    sharing.append_output_token_ids(7)
    assert go_on(connector, request, sharing) == {}
    preempt(connector, sharing)
    assert connector.get_num_new_matched_tokens(sharing, 8 * BLOCK) == (0, False)
    again = [*range(10, 14), *range(19, 24)]
    allocate(connector, sharing, again, shared=8)
    assert not step(connector, (sharing, again)).store_jobs, "it finds its own blocks again"


def begin_load(connector: KvfsConnector, ids: Iterable[int], shared: int = 0) -> tuple[Request, int]:
    """A request whose stored pages are being loaded, and the job."""
    publish(connector, arrive(connector, "stored"))
    request = arrive(connector, "stored")
    found = connector.get_num_new_matched_tokens(request, shared * BLOCK)
    assert found == (HIT - shared * BLOCK, True)
    allocate(connector, request, ids, external=HIT - shared * BLOCK, shared=shared)
    (job,) = step(connector).load_jobs
    return request, job


def test_a_block_that_another_connector_lost_is_not_taken_for_one_of_a_load(connector: KvfsConnector) -> None:
    """The request that kvfs loads has it from the engine's prefix cache, where others find it, too."""
    admit(connector, "b", range(10, 19), loads=True)
    request, _ = begin_load(connector, [*range(10, 14), *range(19, 24)], shared=4)
    connector.update_connector_output(KVConnectorOutput(invalid_block_ids={10}))
    assert connector._manager.tainted and connector._manager.is_loading(request.request_id)


def test_the_lost_blocks_of_an_aborted_request_are_no_failure_of_another_connector(connector: KvfsConnector) -> None:
    """They are never shared."""
    admit(connector, "b", range(10, 19), loads=True)
    request, job = begin_load(connector, FIRST)
    end(connector, request, status=RequestStatus.FINISHED_ABORTED)
    report(connector, job, invalid_block_ids={5, 6, 7, 8})
    assert not connector._manager.tainted and not connector._manager._loading


@pytest.fixture
def lora(connector: KvfsConnector, tmp_path: Path) -> LoRARequest:
    (tmp_path / "adapter").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / "adapter" / name).write_text("{}")
    connector._manager._adapters = adapters.Adapters("bfloat16")
    connector._manager._adapters._began_ns = time.time_ns() + 10**12
    return LoRARequest("one", 1, str(tmp_path / "adapter"))


def test_the_engine_goes_on_while_an_adapter_is_read(
    connector: KvfsConnector, monkeypatch: pytest.MonkeyPatch, lora: LoRARequest
) -> None:
    """Its request waits in the queue."""
    go_on, bypassed, digest = threading.Event(), connector._manager.metrics._counts, adapters._digest

    def slow(files: list[Path]) -> bytes:
        assert go_on.wait(60)
        return digest(files)

    monkeypatch.setattr(adapters, "_digest", slow)
    monkeypatch.setattr(adapters, "DIGEST_SECONDS", 600.0)
    request, other = arrive(connector, "a", lora), arrive(connector, "b", lora)
    assert connector.get_num_new_matched_tokens(request, 0) == (None, False)
    assert end(connector, other, status=RequestStatus.FINISHED_ABORTED) == {}
    go_on.set()
    assert connector._manager._unread["a"].reading.ended.wait(60)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    allocate(connector, request, FIRST)
    assert len(step(connector, (request, FIRST)).store_jobs) == 1
    assert not connector._manager._unread and "requests_bypassed" not in bypassed
    assert computed(connector, "c", FIRST), "a request without an adapter"


def test_an_adapter_on_a_disk_that_hangs_is_not_waited_for(
    connector: KvfsConnector, monkeypatch: pytest.MonkeyPatch, lora: LoRARequest
) -> None:
    go_on, bypassed = threading.Event(), connector._manager.metrics._counts

    def hangs(files: list[Path]) -> bytes:
        go_on.wait(60)
        return bytes(32)

    monkeypatch.setattr(adapters, "_digest", hangs)
    monkeypatch.setattr(adapters, "DIGEST_SECONDS", 0.0)
    for n, name in enumerate(("first", "behind it"), start=1):
        assert connector.get_num_new_matched_tokens(arrive(connector, name, lora), 0) == (0, False)
        assert bypassed["requests_bypassed"] == n
    go_on.set()


def test_a_process_without_threads_serves_requests_without_adapters(
    connector: KvfsConnector, monkeypatch: pytest.MonkeyPatch, lora: LoRARequest
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    assert connector.get_num_new_matched_tokens(arrive(connector, "a", lora), 0) == (0, False)
    assert connector._manager.metrics._counts["requests_bypassed"] == 1


def test_the_failure_of_an_asynchronous_load_does_not_stop_saves(connector: KvfsConnector) -> None:
    """A request that waits for an asynchronous load shares its blocks with no other, and is computed after that."""
    fail_others(connector)
    computed(connector, "a", FIRST)


def test_a_withheld_request_that_was_preempted_is_stored_once_it_has_a_token(connector: KvfsConnector) -> None:
    """A step of its prompt was in flight when it was preempted. The output of that proves nothing: the engine drops it,
    or waits for it before it gives the request blocks again."""
    request, jobs = admit(connector, "a", FIRST, loads=True)
    assert not jobs
    preempt(connector, request)
    request.num_stale_output_tokens, request.drop_stale_output = TOKENS, True
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    allocate(connector, request, FIRST)
    assert not step(connector, (request, FIRST)).store_jobs
    request.append_output_token_ids(7)
    assert go_on(connector, request) == {"a": 2}


def test_a_request_that_resumes_with_another_connectors_load_is_withheld(connector: KvfsConnector) -> None:
    request = arrive(connector, "a")
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    allocate(connector, request, FIRST)
    assert not step(connector, (request, FIRST), num_scheduled_tokens={"a": 60}).store_jobs
    preempt(connector, request)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    allocate(connector, request, FIRST)
    resumed = CachedRequestData.make_empty()
    resumed.req_ids, resumed.resumed_req_ids, resumed.new_block_ids = ["a"], {"a"}, [(list(FIRST),)]
    meta = step(
        connector, scheduled_cached_reqs=resumed, num_scheduled_tokens={"a": TOKENS}, has_sync_kv_loads=True
    )  # fmt: skip
    request.status, request.num_computed_tokens = RequestStatus.RUNNING, TOKENS
    assert not meta.store_jobs and not go_on(connector, request)
    request.append_output_token_ids(7)
    assert go_on(connector, request) == {"a": 2}


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_withheld_request_that_ends_is_stored_if_it_has_a_token(connector: KvfsConnector, tokens: int) -> None:
    request, jobs = admit(connector, "a", FIRST, loads=True)
    assert not jobs
    request.append_output_token_ids([7] * tokens)
    request.status = RequestStatus.FINISHED_STOPPED if tokens else RequestStatus.FINISHED_ABORTED
    connector.request_finished_all_groups(request, (list(FIRST),))
    assert len(step(connector, finished_req_ids={"a"}).store_jobs) == tokens
    assert not connector.scheduler._recent  # type: ignore[attr-defined]


class SlowDisk:
    """A disk on which a page takes a second, for an engine that computes it in a tenth."""

    def __init__(self, connector: KvfsConnector, monkeypatch: pytest.MonkeyPatch) -> None:
        self.manager = connector._manager
        self.cold: set[int] = set()  # pages of the prompt that the page cache lacks
        for module in (costs, manager):
            monkeypatch.setattr(module, "READ_BYTES_MIN", 1)
        self.manager.costs._computed.append(640.0)
        self.manager.costs.note_read(self.manager._ns.layout.page_bytes, 1.0)
        self.asked: list[Any] = []
        monkeypatch.setattr(self.manager._prefetcher, "ask", self.asked.append)

    def pages(self) -> dict[str, int]:
        """In place of ``PrefixMatch.cold``."""
        return {"full0": bits_of(sorted(self.cold))}


@pytest.mark.parametrize(("cold", "tokens"), [({0, 1}, 0), ({1}, 64), ({0}, 0), (set(), HIT)])
def test_a_disk_slower_than_computing_is_not_waited_for(
    connector: KvfsConnector, monkeypatch: pytest.MonkeyPatch, cold: set[int], tokens: int
) -> None:
    disk = SlowDisk(connector, monkeypatch)
    disk.cold = cold
    monkeypatch.setattr(PrefixMatch, "cold", lambda match: disk.pages())
    publish(connector, arrive(connector, "stored"))
    request = arrive(connector, "stored")
    assert connector.get_num_new_matched_tokens(request, 0) == (tokens, tokens > 0)
    counted = disk.manager.metrics._counts.get("tokens_not_worth")
    if tokens == HIT:
        assert not disk.asked
        return
    assert counted == HIT - tokens
    (match,) = disk.asked
    assert match.chunks == 2 and {*range(tokens // 64, 2)} <= match.group("full0").sources().keys()
    disk.cold = set()  # the page cache has them now
    disk.manager._requests[request.request_id].looked_at = float("-inf")
    assert connector.get_num_new_matched_tokens(request, 0) == (HIT, True)


@pytest.mark.parametrize(
    ("cold", "sources"),
    [
        (set(), {CacheHitSource.HOST: HIT}),
        ({0, 1}, {CacheHitSource.DISK: HIT}),
        ({1}, {CacheHitSource.HOST: 64, CacheHitSource.DISK: 64}),
    ],
)
def test_hits_are_counted_by_where_they_come_from(
    connector: KvfsConnector, monkeypatch: pytest.MonkeyPatch, cold: set[int], sources: dict[CacheHitSource, int]
) -> None:
    publish(connector, arrive(connector, "stored"))
    request = arrive(connector, "stored")
    monkeypatch.setattr(PrefixMatch, "cold", lambda match: {"full0": bits_of(sorted(cold))})
    asked = []
    by_chunk = connector._manager.get_load_source
    monkeypatch.setattr(
        connector._manager, "get_load_source", lambda key, context: asked.append(key) or by_chunk(key, context)
    )
    assert connector.get_num_new_matched_tokens(request, 0) == (HIT, True)
    allocate(connector, request, FIRST, HIT)
    assert connector.get_external_cache_hit_sources(request, HIT) == sources
    assert bool(asked) == (len(sources) > 1), "vLLM's half asks for each chunk, which takes milliseconds"
    assert connector.get_external_cache_hit_sources(request, 0) == {}


def test_what_was_not_worth_a_load_is_not_stored_again(
    connector: KvfsConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SlowDisk(connector, monkeypatch)
    disk.cold = {0, 1}
    monkeypatch.setattr(PrefixMatch, "cold", lambda match: disk.pages())
    publish(connector, arrive(connector, "stored"))
    request = arrive(connector, "stored")
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    allocate(connector, request, FIRST)
    assert not step(connector, (request, FIRST)).store_jobs


def test_pages_that_were_not_waited_for_are_read_in_the_background(
    connector: KvfsConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other; the oldest of too many are left out, and none stays held."""
    begun, go_on, read = threading.Event(), threading.Event(), list[Any]()
    manager = connector._manager

    def slow(*, match: Any, **options: Any) -> Warmed:
        read.append(match)
        begun.set()
        assert go_on.wait(60)
        return Warmed(read_bytes=costs.READ_BYTES_MIN, seconds=0.5)

    manager._prefetcher.stop()  # its first read, of a sample, has ended
    prefetcher = Prefetcher(manager._store, manager._ns, manager.costs)
    monkeypatch.setattr(manager._store, "warm", slow)
    publish(connector, arrive(connector, "stored"))
    pages = manager._ns.prompt(arrive(connector, "stored").prompt_token_ids or [])
    matches = [pages.select({"full0": 0}, 2) for _ in range(prefetch.WAITING_MAX + 3)]
    prefetcher.ask(matches[0])
    assert begun.wait(60)
    for match in matches[1:]:
        prefetcher.ask(match)
    go_on.set()
    end = time.monotonic() + 60
    while prefetcher._thread is not None and time.monotonic() < end:
        time.sleep(0.01)
    assert read == [matches[0], *matches[3:]]
    assert not any(match.hold is not None and match.hold.acquire() for match in matches), "they are closed"
    assert manager.costs.bytes_per_second == pytest.approx(2 * costs.READ_BYTES_MIN)


def test_prompts_in_the_queue_are_read_ahead(connector: KvfsConnector, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the engine has not asked about, each once, the oldest first; not faster than the disk reads."""
    half, read, go_on = connector._manager, list[int](), threading.Event()
    half._prefetcher.stop()
    half._prefetcher = Prefetcher(half._store, half._ns, half.costs)
    monkeypatch.setattr(manager, "READ_BYTES_MIN", 1)

    def slow(*, match: Any, **options: Any) -> Warmed:
        assert go_on.wait(60)
        read.append(match.chunks)
        return Warmed()

    monkeypatch.setattr(half._store, "warm", slow)
    names = ["asked", *(f"waits {n}" for n in range(6))]
    requests = [arrive(connector, name) for name in names]
    for request in requests:
        publish(connector, request)
    assert connector.get_num_new_matched_tokens(requests[0], 0) == (HIT, True)
    assert end(connector, requests.pop(), status=RequestStatus.FINISHED_ABORTED) == {}
    for _ in range(8):
        step(connector)
        time.sleep(0.001)
    left = list(half._queued)
    assert len(left) in (2, 3) and left == names[-1 - len(left) : -1], "one is read or begun, two wait, others later"
    go_on.set()
    until = time.monotonic() + 60
    while half._queued and time.monotonic() < until:
        step(connector)
        time.sleep(0.01)
    while half._prefetcher._thread is not None and time.monotonic() < until:
        time.sleep(0.01)
    assert read == [2] * 5


@pytest.mark.parametrize("why", ["small", "large", "mode"])
def test_what_gains_nothing_is_not_read_ahead(
    connector: KvfsConnector, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    half, asked = connector._manager, list[Any]()
    monkeypatch.setattr(manager, "READ_BYTES_MIN", 1 if why != "small" else 1 << 60)
    monkeypatch.setattr(half, "_ahead_bytes", 0 if why == "large" else 1 << 60)
    settings = SimpleNamespace(mode="memory" if why == "mode" else "cache")
    monkeypatch.setattr(half, "_store", SimpleNamespace(settings=settings, close=half._store.close))
    monkeypatch.setattr(half, "_prefetcher", SimpleNamespace(waiting=0, ask_prompt=asked.append, stop=lambda: None))
    arrive(connector, "a")
    step(connector)
    assert not asked and not half._queued


def test_reading_ahead_goes_on_after_an_error_of_any_kind(
    connector: KvfsConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = connector._manager
    manager._prefetcher.stop()
    prefetcher, read = Prefetcher(manager._store, manager._ns, manager.costs), threading.Event()

    def failing(**what: Any) -> Warmed:
        if "sample" in what:
            raise ZeroDivisionError
        read.set()
        return Warmed()

    monkeypatch.setattr(manager._store, "warm", failing)
    prefetcher.begin(manager._ns)
    prefetcher.ask(manager._ns.match([1] * TOKENS))
    assert read.wait(60)


def test_a_process_without_threads_reads_nothing_ahead(
    connector: KvfsConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's thread goes on, and what waits is not held after the engine has ended."""
    manager = connector._manager
    publish(connector, arrive(connector, "stored"))
    pages = manager._ns.prompt(arrive(connector, "stored").prompt_token_ids or [])
    match = pages.select({"full0": 0}, 2)
    prefetcher = Prefetcher(manager._store, manager._ns, manager.costs)

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        prefetcher.ask(match)
    prefetcher.stop()
    assert match.hold is None or not match.hold.acquire(), "it is closed"


def test_a_prefetch_ends_with_the_engine(connector: KvfsConnector, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = threading.Event(), threading.Event()

    def endless(*, progress: Callable[[int, int], None], **options: Any) -> Warmed:
        begun.set()
        try:
            while True:
                progress(0, 1)
                time.sleep(0.001)
        finally:
            ended.set()

    manager = connector._manager
    prefetcher = Prefetcher(manager._store, manager._ns, manager.costs)
    monkeypatch.setattr(manager._store, "warm", endless)
    prefetcher.begin(manager._ns)
    assert begun.wait(60)
    prefetcher.stop()
    assert ended.wait(60)


def test_an_engine_that_starts_knows_how_fast_the_last_one_computed(connector: KvfsConnector) -> None:
    manager = connector._manager
    manager.costs._computed.append(26_500.0)
    request = arrive(connector, "a")
    request.status = RequestStatus.FINISHED_STOPPED
    connector.request_finished_all_groups(request, ([],))
    step(connector, finished_req_ids={"a"})
    end = time.monotonic() + 60
    while manager._ns.compute_speed() is None and time.monotonic() < end:
        time.sleep(0.01)
    later = costs.Costs()
    prefetcher = Prefetcher(manager._store, manager._ns, later)
    prefetcher.begin(manager._ns)
    while later.tokens_per_second is None and time.monotonic() < end:
        time.sleep(0.01)
    assert later.tokens_per_second == 26_500
    later._computed.append(9_000.0)
    assert later.tokens_per_second == 9_000, "its own measurements count, once there are some"


def test_the_first_request_finds_an_index_that_has_been_looked_up(
    connector: KvfsConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first lookup of a process takes five times as long as the others."""
    looked: list[int] = []
    monkeypatch.setattr(PromptPages, "look", lambda self, first=0: looked.append(self.chunks))
    old = connector._manager
    manager.KvfsManager(old._store, old._ns, old._model, old._settings)
    assert looked and all(looked)


def test_a_prompt_of_which_nothing_is_stored_is_looked_up_no_further(
    connector: KvfsConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row for each of its other pages: they took a fifth of the scheduler's time for a prompt of 1,900 tokens."""
    behind: list[int] = []
    read = matcher.read_behind_gaps
    monkeypatch.setattr(matcher, "read_behind_gaps", lambda *a, **k: (behind.append(1), read(*a, **k)))
    request = arrive(connector, "a")
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False) and not behind
    allocate(connector, request, FIRST)
    assert step(connector, (request, FIRST)).store_jobs and behind, "what is stored already is not stored again"


def test_chunks_that_are_known_to_be_stored_are_not_asked_one_by_one(
    connector: KvfsConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(connector, arrive(connector, "stored"))
    asked: list[Any] = []
    lookup = connector._manager.lookup
    monkeypatch.setattr(connector._manager, "lookup", lambda key, context: asked.append(key) or lookup(key, context))
    request = arrive(connector, "stored")
    assert connector.get_num_new_matched_tokens(request, 0) == (HIT, True) and len(asked) <= 1
    assert connector.get_num_new_matched_tokens(request, 64) == (HIT - 64, True)
    asked.clear()
    assert connector.get_num_new_matched_tokens(arrive(connector, "other"), 0) == (0, False) and len(asked) == 1
    tracker = connector._half._events_tracker
    monkeypatch.setattr(tracker, "self_describing_enabled", True)
    seen: list[int] = []
    monkeypatch.setattr(tracker, "record_lookup", lambda request, group, chunk, key: seen.append(chunk))
    assert connector.get_num_new_matched_tokens(request, 0) == (HIT, True)
    assert (
        seen == list(range(len(seen)))
        and len(seen) * connector._half.config.kv_group_configs[0].tokens_per_chunk == HIT
    )


def test_what_the_engine_has_of_a_prompt_makes_pages_behind_a_gap_useful(
    connector: KvfsConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store may have evicted the first page, which the engine's own cache has by now."""
    looked: list[bool] = []
    look = PromptPages.look
    monkeypatch.setattr(
        PromptPages, "look", lambda self, first=0, *, prefix: (looked.append(prefix), look(self, first, prefix=prefix))
    )
    request = arrive(connector, "a")
    for computed_tokens, expected in ((0, [True]), (0, [True]), (64, [True, False]), (0, [True, False])):
        assert connector.get_num_new_matched_tokens(request, computed_tokens) == (0, False)
        assert looked == expected


def test_what_a_request_is_told_follows_what_is_stored(connector: KvfsConnector) -> None:
    request = arrive(connector, "a")
    publish(connector, request)
    state = connector._manager._requests["a"]
    assert state.leading_tokens("full0") == 0
    state.look(0)
    assert state.leading_tokens("full0") == HIT
    state.forget()
    assert state.leading_tokens("full0") == 0
    state.use_peers({"full0": 0b101})
    assert state.leading_tokens("full0") == HIT // 2
