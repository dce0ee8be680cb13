"""An engine without a model: vLLM's scheduler, grouping and cache layout; the workers write what a model would have.

The KV of a token is a function of the tokens up to it and of the layer, so every byte that attention may read can be
checked before each step. Recurrent states are a function of all tokens up to the last one.
"""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.utils import allocate_kv_cache

from kvfs.integrations.vllm import connector
from kvfs.integrations.vllm.connector import KvfsConnector
from kvfs.integrations.vllm.model import layer_specs
from tests.vllm.grouping import caches_of

POOL_BYTES = 8 << 20  # of the cache, per rank
STEPS = 4000  # a request that needs more does not end


class SimulatedEngine:
    """``specs``: layer name -> its cache; a list of these: of the stages of a pipeline. ``ranks``: of decode context
    parallelism. ``settings``: of kvfs."""

    def __init__(
        self, config: VllmConfig, specs: Mapping[str, KVCacheSpec] | list[dict[str, KVCacheSpec]], store: Path, *,
        ranks: int = 1,
        layout: str = "LBHNC", pool_bytes: int = POOL_BYTES, drafters: Sequence[str] = (), **settings: Any,
    ) -> None:  # fmt: skip
        init_none_hash(sha256)
        self.drafters = frozenset(drafters)  # layers whose KV kvfs leaves out
        config = copy.deepcopy(config)
        config.cache_config.kv_cache_layout = layout
        stages = specs if isinstance(specs, list) else [dict(specs)]
        config.parallel_config.decode_context_parallel_size = ranks
        config.parallel_config.tensor_parallel_size = ranks
        config.parallel_config.pipeline_parallel_size = len(stages)
        config.parallel_config.world_size = ranks * len(stages)
        told = [stage for stage in stages for _ in range(ranks)]
        caches = caches_of(config, list(told), pool_bytes)
        for cache in caches:
            cache.kv_cache_layout = layout
        self.cache = generate_scheduler_kv_cache_config(caches)
        config.cache_config.num_gpu_blocks = self.cache.num_blocks
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="KvfsConnector", kv_role="kv_both",
            kv_connector_extra_config={
                "path": str(store), "capacity": "256MiB", "weights_id": "w", "ring_bytes": "16MiB", **settings
            },
        )  # fmt: skip
        self.config = config
        block_size, hash_size = resolve_kv_cache_block_sizes(self.cache, config)
        self.hash_size = hash_size
        self.scheduler = Scheduler(
            vllm_config=config, kv_cache_config=self.cache, block_size=block_size, hash_block_size=hash_size,
            structured_output_manager=StructuredOutputManager(config),
        )  # fmt: skip
        self.hasher = get_request_block_hasher(hash_size, sha256)
        self.ranks = [_Rank(config, cache, rank, ranks, caches) for rank, cache in enumerate(caches)]
        shaken = [rank.connector.get_handshake_metadata() for rank in self.ranks]
        content = {(0, rank): metadata for rank, metadata in enumerate(shaken) if metadata is not None}
        assert self.scheduler.connector is not None
        if content:
            self.scheduler.connector.set_xfer_handshake_metadata_pp_aware(content)
        self.aggregator = KVOutputAggregator(len(caches))
        self.checked = 0  # states that were compared
        self.requests = self.preempted = 0
        self.adapters: dict[int, bytes] = {}
        self.cached: dict[str, int] = {}  # tokens that a request had when it was scheduled first

    @property
    def connector(self) -> KvfsConnector:
        found = self.scheduler.connector
        assert isinstance(found, KvfsConnector)
        return found

    def generate(self, *prompts: list[int], tokens: int = 4, forget: bool = True, lora: Any = None) -> list[int]:
        """Cached tokens of each prompt. Every step compares what it may read. ``forget``: the engine's prefix cache."""
        if forget:
            assert self.scheduler.kv_cache_manager.reset_prefix_cache()
        requests = [self.submit(prompt, tokens, lora) for prompt in prompts]
        for _ in range(STEPS):
            self.step()
            if not self.scheduler.has_unfinished_requests():
                break
        else:
            raise AssertionError("a request does not end")
        self.settle()
        return [self.cached[request.request_id] for request in requests]

    def submit(self, prompt: list[int], tokens: int, lora: Any = None) -> Request:
        self.requests += 1
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        sampling.update_from_generation_config({}, 1)
        request = Request(f"r{self.requests}", prompt, sampling, None, block_hasher=self.hasher, lora_request=lora)
        self.scheduler.add_request(request)
        return request

    def cell(self, prompt: list[int], token: int, layer: str) -> bytes:
        """The KV of the first head for a token, as it is in a page."""
        view = self.ranks[0].views[layer].view(torch.uint8)
        return _content(view, _prefixes(prompt, b"")[token], layer)[0].numpy().tobytes()

    def reset(self) -> bool:
        return bool(self.scheduler.reset_prefix_cache(reset_connector=True))

    def settle(self) -> None:
        """Until no job is left, and all saves are published."""
        for _ in range(STEPS):
            self.step()
            busy = any(rank.publishing() for rank in self.ranks)
            if not busy and not self.scheduler.has_requests():
                return
            time.sleep(0.001)
        raise AssertionError("a job does not end")

    def step(self) -> None:
        output = self.scheduler.schedule()
        self.preempted += len(output.preempted_req_ids or ())
        self.cached.update((data.req_id, data.num_computed_tokens) for data in output.scheduled_new_reqs)
        outputs = [rank.execute(output, self) for rank in self.ranks]
        sampled = []
        for req_id in output.num_scheduled_tokens:
            request = self.scheduler.requests[req_id]
            # the scheduler has counted this step's tokens already
            done = request.num_computed_tokens >= request.num_tokens
            sampled.append([(request.num_tokens * 7) % 900 + 5] if done else [])
        runner = [
            ModelRunnerOutput(
                list(output.num_scheduled_tokens), {r: i for i, r in enumerate(output.num_scheduled_tokens)}, sampled,
                kv_connector_output=each,
            )
            for each in outputs
        ]  # fmt: skip
        merged = self.aggregator.aggregate(runner)
        assert merged is not None
        self.scheduler.update_from_output(output, merged)
        if not output.num_scheduled_tokens:
            time.sleep(0.001)

    def close(self) -> None:
        self.scheduler.shutdown()
        for rank in self.ranks:
            rank.connector.shutdown()

    def __enter__(self) -> SimulatedEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Rank:
    """A worker: the cache of one rank, and the connector's half."""

    def __init__(
        self, config: VllmConfig, cache: KVCacheConfig, rank: int, ranks: int, all_caches: list[KVCacheConfig]
    ) -> None:
        self.rank, self.ranks, self.cache = rank % ranks, ranks, cache
        mine = copy.deepcopy(config)
        mine.parallel_config.rank = rank
        self.views = allocate_kv_cache(cache, torch.device("cpu"), config.cache_config.get_resolved_kv_cache_layout())
        with pytest.MonkeyPatch.context() as patch:  # what the stages of a pipeline tell each other
            patch.setattr(connector, "layers_of_stages", lambda _: [layer_specs(each) for each in all_caches])
            self.connector = KvfsConnector(mine, KVConnectorRole.WORKER, cache)
        self.connector.register_kv_caches(self.views)

    def publishing(self) -> bool:
        half = self.connector.connector_worker
        assert half is not None and half.worker is not None
        half.worker.get_finished() if not half.worker._jobs else None
        return bool(half.worker._publishing or half.worker._jobs)

    def execute(self, output: Any, engine: SimulatedEngine) -> KVConnectorOutput:
        half, metadata = self.connector, output.kv_connector_metadata
        half.handle_preemptions(metadata)
        assert half.connector_worker is not None and half.connector_worker.worker is not None
        assert half.connector_worker.worker.step_tokens == output.total_num_scheduled_tokens  # type: ignore[attr-defined]
        half.bind_connector_metadata(metadata)
        if output.new_block_ids_to_zero:
            for view in self.views.values():
                view[output.new_block_ids_to_zero] = 0
        for moved in output.kv_cache_block_copies or ():
            for view in self.views.values():
                view[moved.dst_block_id] = view[moved.src_block_id].clone()
        for req_id, count in output.num_scheduled_tokens.items():
            self._compute(engine, req_id, count)
        half.start_load_kv(SimpleNamespace(attn_metadata=1 if output.num_scheduled_tokens else None))
        half.wait_for_save()
        results = half.get_transfer_results(output.finished_req_ids)
        said = KVConnectorOutput(
            finished_sending=results.finished_sending, finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=half.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=half.build_connector_worker_meta(),
        )  # fmt: skip
        half.clear_connector_metadata()
        return said

    def _compute(self, engine: SimulatedEngine, req_id: str, count: int) -> None:
        request = engine.scheduler.requests[req_id]
        end = request.num_computed_tokens  # counted ahead of this step
        start = end - count
        lora = request.lora_request  # its weights, as they were when the engine read them first
        if lora is not None and lora.lora_int_id not in engine.adapters:
            engine.adapters[lora.lora_int_id] = _weights(lora.lora_path)
        weights = engine.adapters[lora.lora_int_id] if lora is not None else b""
        names = _prefixes(list(request.all_token_ids), weights)
        tables = engine.scheduler.kv_cache_manager.get_block_ids(req_id)
        for group, blocks in zip(self.cache.kv_cache_groups, tables, strict=True):
            specs = group.kv_cache_spec
            each = specs.kv_cache_specs if isinstance(specs, UniformTypeKVCacheSpecs) else {}
            for layer in group.layer_names:
                spec, view = each.get(layer, specs), self.views[layer].view(torch.uint8)
                place: Callable[[int], tuple[int, int] | None]
                if isinstance(spec, MambaSpec):
                    if start and layer not in engine.drafters:
                        self._compare(engine, view, blocks[(start - 1) // spec.block_size], 0, names[start - 1], layer)
                    view[blocks[(end - 1) // spec.block_size], :, 0] = _content(view, names[end - 1], layer)
                    continue
                place = self._placing(spec, blocks)
                first = 0
                if isinstance(spec, SlidingWindowSpec):
                    first = max(0, start - spec.sliding_window + 1)
                elif isinstance(spec, ChunkedLocalAttentionSpec):
                    first = start // spec.attention_chunk_size * spec.attention_chunk_size
                step = int(spec.tokens_per_state)
                for token in range(first, end):
                    at = place(token) if (token + 1) % step == 0 else None
                    if at is None:
                        continue
                    if token >= start:
                        view[at[0], :, at[1]] = _content(view, names[token], layer)
                    elif layer not in engine.drafters:
                        self._compare(engine, view, at[0], at[1], names[token], layer)

    def _placing(self, spec: Any, blocks: list[int]) -> Callable[[int], tuple[int, int] | None]:
        shards = self.ranks if spec.dcp_sharded else 1
        tokens, step = spec.block_size * shards, int(spec.tokens_per_state)

        def place(token: int) -> tuple[int, int] | None:
            """(block, state in it) of a token; None if another rank has it."""
            inner = token % tokens
            if shards > 1 and inner % shards != self.rank:
                return None
            return blocks[token // tokens], inner // shards // step

        return place

    def _compare(
        self, engine: SimulatedEngine, view: torch.Tensor, block: int, state: int, prefix: bytes, layer: str
    ) -> None:
        assert block, f"{layer}: attention would read a block that was freed"
        found = view[block, :, state]
        assert torch.equal(found, _content(view, prefix, layer)), f"{layer}: block {block}, state {state} is wrong"
        engine.checked += 1


def _weights(path: str) -> bytes:
    return (Path(path) / "adapter_model.safetensors").read_bytes()


def _prefixes(tokens: list[int], weights: bytes) -> list[bytes]:
    names, before = [], weights
    for token in tokens:
        before = hashlib.blake2b(before + token.to_bytes(4, "little"), digest_size=16).digest()
        names.append(before)
    return names


def _content(view: torch.Tensor, prefix: bytes, layer: str) -> torch.Tensor:
    """[heads, bytes] of one state. Bytes below 64: of any type, a finite number."""
    heads, nbytes = int(view.shape[1]), int(view.shape[3])
    seed = hashlib.blake2b(prefix + layer.encode(), digest_size=64).digest()
    raw = (seed * (heads * nbytes // 64 + 1))[: heads * nbytes]
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).reshape(heads, nbytes) & 63
