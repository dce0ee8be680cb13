"""Lookups per second of vLLM's schedulers: kvfs, vLLM's file-system tier and ExampleConnector, over the same prompts.

No engine runs: the real connectors in their scheduler's role are called as the scheduler does, ``on_new_request``,
then ``get_num_new_matched_tokens`` and a step until there is an answer. One process stores the prompts, as files or
pages of 64 tokens and 8 KiB; each round of lookups is a new process that has just opened them. A prompt is *answered*
when the scheduler may continue with it: by then, the file-system tier has read the pages into its CPU tier.

``python -m tools.benchmarks.vllm lookups --rounds N`` runs it; :func:`main` is one of its processes.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BLOCK = 64
SETTLE = 10  # tokens after the last whole page: vLLM computes at least one
Lengths = dict[str, tuple[int, int]]  # name -> tokens of a prompt, prompts
LENGTHS: Lengths = {"1,900": (1_856 + SETTLE, 32), "32k": (32_768 + SETTLE, 8), "128k": (131_072 + SETTLE, 3)}
WITHOUT = "kvfs, KVFS_NATIVE=0"
PROCESS_SECONDS = 600.0  # longest run of one process
ANSWER_SECONDS = 300.0  # longest wait for one answer
LAYER = "model.layers.0.self_attn.attn"
_ROOT = Path(__file__).resolve().parents[2]


def run(
    rounds: int, connectors: dict[str, Callable[[Path], dict[str, Any] | None]], lengths: Lengths = LENGTHS
) -> None:
    """All connectors, alternating; a table row per connector and length. kvfs also without its native library."""
    folder = Path(tempfile.mkdtemp(prefix="kvfs-bench-"))
    try:
        model = _model(folder / "model")
        connectors = {**connectors, WITHOUT: connectors["kvfs"]}
        names = [name for name in connectors if name != "none"]
        seen: dict[tuple[str, str, str], list[float]] = {}
        for name in names:
            _process("fill", model, lengths, connectors[name](folder / name.replace(" ", "-")), name)
        for _ in range(rounds):
            for name in names:
                found = _process("look", model, lengths, connectors[name](folder / name.replace(" ", "-")), name)
                for length, kinds in found.items():
                    for kind, value in kinds.items():
                        seen.setdefault((length, name, kind), []).append(value)
        for length in lengths:
            for name in names:
                cells = [
                    _spread(seen[length, name, kind]) for kind in ("hit", "miss", "hit_thread_ms", "miss_thread_ms")
                ]
                print(f"| {length} | {name} | {' | '.join(cells)} |")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _spread(values: list[float]) -> str:
    digits = 0 if statistics.median(values) >= 100 else 1 if statistics.median(values) >= 10 else 2
    return f"{statistics.median(values):,.{digits}f} [{min(values):,.{digits}f}, {max(values):,.{digits}f}]"


def _model(path: Path) -> Path:
    from transformers import LlamaConfig

    from tests.vllm import models

    shape = {**models._BASE, "max_position_embeddings": 1 << 18}
    models.CONFIGS["lookups"] = lambda: LlamaConfig(num_hidden_layers=1, **shape)
    return models.build("lookups", path)


def _process(
    what: str, model: Path, lengths: Lengths, transfer: dict[str, Any] | None, name: str
) -> dict[str, dict[str, float]]:
    job = json.dumps({"what": what, "model": str(model), "lengths": lengths, "transfer": transfer})
    quiet = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "PYTHONPATH": str(_ROOT),
        "KVFS_NATIVE": "0" if name == WITHOUT else "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tools.benchmarks.vllm_lookups", job], cwd=_ROOT, env={**os.environ, **quiet},
        capture_output=True, text=True, timeout=PROCESS_SECONDS, check=False,
    )  # fmt: skip
    answers = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not answers:
        raise AssertionError(f"{what} failed: {done.stderr[-2000:]}")
    found: dict[str, dict[str, float]] = json.loads(answers[-1][7:])
    return found


# -- one process -----------------------------------------------------------------------------


def main() -> None:
    job = json.loads(sys.argv[1])
    scheduler = Scheduler(job["model"], job["lengths"], job["transfer"])
    try:
        result = scheduler.fill() if job["what"] == "fill" else scheduler.look()
    finally:
        scheduler.connector.shutdown()
    print("RESULT " + json.dumps(result), flush=True)


class Scheduler:
    """Calls a connector as vLLM's scheduler does, for prompts that are looked up and never computed."""

    def __init__(self, model: str, lengths: Lengths, transfer: dict[str, Any]) -> None:
        import torch
        from vllm.config import KVTransferConfig, set_current_vllm_config
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
        from vllm.engine.arg_utils import EngineArgs
        from vllm.plugins import load_general_plugins
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

        self._lengths = lengths
        load_general_plugins()
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        config = EngineArgs(
            model=model, enforce_eager=True, block_size=BLOCK, max_model_len=1 << 18, dtype="bfloat16",
            kv_transfer_config=KVTransferConfig(**transfer),
        ).create_engine_config()  # fmt: skip
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.bfloat16)
        self.page_bytes = spec.page_size_bytes
        tensors = [KVCacheTensor(self.page_bytes * 16, [LAYER], 0, self.page_bytes)]
        cache = KVCacheConfig(16, tensors, [KVCacheGroupSpec([LAYER], spec)], kv_cache_layout="BLHNC")
        with set_current_vllm_config(config):
            self.connector = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, cache)

    def request(self, length: str, number: int, kind: str) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        count = self._lengths[length][0]
        tokens = random.Random(f"{length} {number} {kind}").choices(range(5, 1000), k=count)
        return Request(f"{length} {number} {kind}", tokens, SamplingParams(), None, block_hasher=self._hasher)

    # -- storing -----------------------------------------------------------------------------

    def fill(self) -> dict[str, Any]:
        store = {
            "KvfsConnector": self._fill_kvfs, "OffloadingConnector": self._fill_tier,
            "ExampleConnector": self._fill_example,
        }[type(self.connector).__name__]  # fmt: skip
        for length, (_, prompts) in self._lengths.items():
            for number in range(prompts):
                store(self.request(length, number, "hit"))
        return {}

    def _fill_kvfs(self, request: Any) -> None:
        namespace = self.connector._manager._ns
        pages = len(request.prompt_token_ids) // BLOCK
        put = namespace.put(request.prompt_token_ids, os.urandom(pages * namespace.layout.page_bytes))
        assert put.stored + put.skipped == pages, put

    def _fill_tier(self, request: Any) -> None:
        from vllm.v1.kv_offload.base import make_offload_key

        mapper = self.connector.scheduler.manager.secondary_tiers[0].file_mapper
        for block_hash in request.block_hashes:
            path = Path(mapper.get_file_name(make_offload_key(block_hash, 0)))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(os.urandom(self.page_bytes))

    def _fill_example(self, request: Any) -> None:
        import torch

        count = (len(request.prompt_token_ids) - 2) // BLOCK * BLOCK
        name = self.connector._generate_filename_debug(LAYER, torch.tensor(request.prompt_token_ids)[:count], [])
        Path(name).write_bytes(os.urandom(count // BLOCK * self.page_bytes))

    # -- looking -----------------------------------------------------------------------------

    def look(self) -> dict[str, dict[str, float]]:
        from vllm.utils.gc_utils import freeze_gc_heap

        freeze_gc_heap()  # as the engine does when it has started: no collection goes through what was imported
        found: dict[str, dict[str, float]] = {}
        for length, (_, prompts) in self._lengths.items():
            took: dict[str, list[tuple[float, float]]] = {"hit": [], "miss": []}
            for number in range(prompts):
                for kind, times in took.items():
                    times.append(self._one(self.request(length, number, kind), kind))
            found[length] = {
                **{kind: prompts / sum(answered for answered, _ in times) for kind, times in took.items()},
                **{f"{kind}_thread_ms": 1000 * sum(t for _, t in times) / prompts for kind, times in took.items()},
            }
        return found

    def _one(self, request: Any, kind: str) -> tuple[float, float]:
        """Seconds until a request is answered, and CPU seconds of the scheduler's thread."""
        from vllm.v1.core.sched.output import SchedulerOutput

        began, busy = time.perf_counter(), time.thread_time()
        self.connector.on_new_request(request)
        while True:
            tokens, _ = self.connector.get_num_new_matched_tokens(request, 0)
            if tokens is not None:
                break
            self.connector.build_connector_meta(SchedulerOutput.make_empty())
            assert time.perf_counter() - began < ANSWER_SECONDS, f"no answer to {request.request_id}"
            time.sleep(0)  # the scheduler continues with its next step
        seconds, thread = time.perf_counter() - began, time.thread_time() - busy
        whole = len(request.prompt_token_ids) // BLOCK * BLOCK
        expected = whole if kind == "hit" else 0
        assert tokens == expected, f"{request.request_id}: {tokens} tokens, not {expected}"
        request.num_computed_tokens = 0
        self.connector.request_finished(request, [])
        return seconds, thread


if __name__ == "__main__":
    main()
