"""kvfs below vLLM: the cost on the scheduler, and a comparison with vLLM's own connectors, on CPUs.

Runs in the engine's environment (``make test-vllm`` creates it):
``.venv-vllm/bin/python -m tools.benchmarks.vllm WHAT [--rounds N]``, see ``--help``. Times are ratios
to a baseline of the same round, as median [min, max]; lookups are rates.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

from tools.benchmarks import vllm_faults, vllm_lookups, vllm_serve

TOKENS = 131_072
PROMPT = 1900
#: for the kernels of all engines: left alone, vLLM reserves another core for one with a connector. Its own setting of
#: cores does nothing in an engine without processes of its own.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
STORE_SECONDS = 120.0  # longest wait until a batch is stored
PROMPTS_CACHED = 704  # tokens of the shortest prompt of a batch, which has 760


def ratios(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


def scheduler(rounds: int) -> None:
    """A prompt of 131,072 tokens: time of vLLM's thread in the manager, against its own hashing of the blocks."""
    import torch
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash

    import kvfs
    from kvfs.integrations.vllm.manager import KvfsManager
    from kvfs.integrations.vllm.model import EngineGroup, EngineModel, StoredGroup
    from kvfs.integrations.vllm.settings import settings_of

    init_none_hash(sha256)
    for block in (16, 64):
        layout = kvfs.PageLayout.kv(layers=2, kv_heads=1, head_dim=8, dtype=torch.bfloat16, page_tokens=block)
        seen: dict[str, list[float]] = {}
        with tempfile.TemporaryDirectory() as folder, kvfs.open(f"{folder}/s", capacity="1GiB") as store:
            ns = store.namespace("m", layout, "1")
            stored = StoredGroup(layout.groups[0].name, "tokens", False, None, {}, (0, 1))
            model = EngineModel("m", layout, "1", {}, (EngineGroup(0, block, block, (stored,)),), 1)
            manager = KvfsManager(store, ns, model, settings_of({"path": folder}))
            for n in range(rounds + 1):
                tokens = [random.Random(f"{n} {block}").randrange(100_000) for _ in range(64)] * (TOKENS // 64)
                ns.put(tokens, bytes(TOKENS // block * layout.page_bytes))
                for name, ratio in _request(manager, f"r{n}", tokens, block).items():
                    if n:  # the first round warms up
                        seen.setdefault(name, []).append(ratio)
        for name, values in seen.items():
            print(f"| {block} | {name} | {ratios(values)} |")


def _request(manager: Any, name: str, tokens: list[int], block: int) -> dict[str, float]:
    """The time of each call of a request, as a multiple of its hashing."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
    from vllm.v1.request import Request

    began = time.perf_counter()
    request = Request(name, tokens, SamplingParams(), None, block_hasher=get_request_block_hasher(block, sha256))
    hashing = time.perf_counter() - began
    context = ReqContext(name)
    keys = [make_offload_key(h, 0) for h in request.block_hashes]
    for i, key in enumerate(keys):
        context.set_offload_key_position(key, (i + 1) * block)

    def look() -> None:
        manager.refresh(name)
        assert all(manager.lookup(key, context) is LookupResult.HIT for key in keys)

    steps: dict[str, Callable[[], Any]] = {
        "new request": lambda: (manager.announce(request), manager.on_new_request(context)),
        "first lookup": look,
        "lookup again": look,
        "offer all its pages": lambda: manager.prepare_store(keys, context),
        "prepare a load of all": lambda: manager.prepare_load(keys, context),
    }
    result = {}
    for step, run in steps.items():
        began = time.perf_counter()
        run()
        result[step] = (time.perf_counter() - began) / hashing
    manager.complete_load(keys, context)
    manager.on_request_finished(context)
    return result


CONNECTORS: dict[str, Callable[[Path], dict[str, Any] | None]] = {
    "none": lambda path: None,
    "kvfs": lambda path: {
        "kv_connector": "KvfsConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"path": str(path), "capacity": "2GiB", "offload_prompt_only": True},
    },
    "fs tier": lambda path: {
        "kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec", "spec_module_path": "tools.benchmarks.vllm_peers",
            "cpu_bytes_to_use": 512 << 20, "block_size": 64,
            "secondary_tiers": [{"type": "fs", "root_dir": str(path)}],
        },
    },
    "ExampleConnector": lambda path: {
        "kv_connector": "ExampleConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(path)},
    },
}  # fmt: skip


def engines(rounds: int) -> None:
    """Time to the first token of a prompt, computed and after a restart; bytes on disk; a flipped byte in each file."""
    from tests.vllm.engine import Engine

    folder = Path(tempfile.mkdtemp(prefix="kvfs-bench-"))
    try:
        model = _bench_model(folder / "model")
        prompts = [[random.Random(f"{n} {i}").randrange(5, 900) for i in range(PROMPT)] for n in range(rounds + 1)]
        options = {"kv_cache_memory_bytes": 512 << 20, "dtype": "bfloat16", "max_num_seqs": 4, "env": ONE_THREAD}
        with Engine(model, **options) as plain:
            computed = [plain.ask("time", prompt=p) for p in prompts]
        for name, make in CONNECTORS.items():
            if name == "none":
                continue
            path = folder / name.replace(" ", "-")
            transfer = make(path)
            try:
                with Engine(model, transfer=transfer, **options) as first:
                    stored = [first.ask("time", prompt=p, tokens=4) for p in prompts]
                    time.sleep(2.0)
                used = sum(f.stat().st_blocks * 512 for f in path.rglob("*") if f.is_file())
                with Engine(model, transfer=transfer, **options) as second:
                    warm = [second.ask("time", prompt=p) for p in prompts]
                same = sum(w["tokens"][:1] == c["tokens"][:1] for w, c in zip(warm, computed, strict=True))
                faster = [c["seconds"] / w["seconds"] for w, c in zip(warm, computed, strict=True)][1:]
                storing = [s["first"] / c["seconds"] for s, c in zip(stored, computed, strict=True)][1:]
                damaged = _damaged(Engine, model, path, transfer, options, prompts, computed)
                print(
                    f"| {name} | {ratios(faster)} | {ratios(storing)} | {warm[-1]['cached']} | {used >> 20} MiB |"
                    f" {same} of {len(prompts)} | {damaged} |"
                )
            except AssertionError as exc:
                print(f"| {name} | did not run: {str(exc).splitlines()[-1][:160]} |")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def batch(rounds: int) -> None:
    """32 prompts at once that are all stored: kvfs, and vLLM's tiers with all of them in host memory.

    Both engines run at the same time, in turns, each with its kernels on one thread. The share of the machine that each
    gets varies, so CPU time, which varies less, is given too.
    """
    from tests.vllm import models
    from tests.vllm.engine import Engine

    folder = Path(tempfile.mkdtemp(prefix="kvfs-bench-"))
    try:
        model = models.build("llama", folder / "model")
        prompts = [[random.Random(f"{n} {i}").randrange(5, 900) for i in range(760 + n)] for n in range(32)]
        options = {"kv_cache_memory_bytes": 256 << 20, "dtype": "bfloat16", "max_num_batched_tokens": 4096}
        tokens = sum(map(len, prompts))
        seen: dict[str, list[dict[str, Any]]] = {}
        with ExitStack() as stack:
            running = {
                name: stack.enter_context(
                    Engine(model, transfer=CONNECTORS[name](folder / name), env=ONE_THREAD, **options)
                )
                for name in ("kvfs", "fs tier")
            }
            for engine in running.values():
                engine.ask("batch", prompts=prompts, tokens=4)
                end = time.monotonic() + STORE_SECONDS
                while min(engine.ask("batch", prompts=prompts)["cached"]) < PROMPTS_CACHED:
                    assert time.monotonic() < end, "the prompts were not stored"
                    time.sleep(0.5)
            for n in range(rounds):
                for name in list(running)[:: -1 if n % 2 else 1]:
                    seen.setdefault(name, []).append(running[name].ask("batch", prompts=prompts))
        base = seen["fs tier"]
        for name, found in seen.items():
            rows = list(zip(found, base, strict=True))
            cells = [
                ratios([tier["seconds"] / mine["seconds"] for mine, tier in rows]),
                ratios([statistics.median(mine["firsts"]) / statistics.median(tier["firsts"]) for mine, tier in rows]),
                ratios([mine["cpu"] / tier["cpu"] for mine, tier in rows]),
                ratios([tokens / mine["cpu"] / 1000 for mine in found]),
                ratios([float(mine["steps"]) for mine in found]),
            ]
            print(f"| {name} | {' | '.join(cells)} |")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def loads(rounds: int) -> None:
    """The loads of such a batch alone, without an engine: 32 of 12 pages in host memory, together. CPU ms of
    the process, and ms until the last one has ended."""
    import torch

    import kvfs
    from kvfs.native import library

    layout = kvfs.PageLayout.kv(layers=4, kv_heads=2, head_dim=32, dtype=torch.bfloat16, page_tokens=64)
    tensors = [torch.zeros(1024, 2, 32, 64, dtype=torch.bfloat16) for _ in range(4)]
    described = kvfs.describe(layout.groups[0], tensors, "block,head,token,2*dim")
    ways = {"threads": False, "the caller's thread": True, "threads, KVFS_NATIVE=0": False}
    seen: dict[str, list[tuple[float, float]]] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        kvfs.open(f"{folder}/s", capacity="1GiB") as store,
        ExitStack() as stack,
    ):
        ns = store.namespace("m", layout, "1")
        io = stack.enter_context(ns.attach([described], ring_bytes="256MiB", threads=2))
        matches = []
        for n in range(32):
            prompt = [random.Random(f"{n} {i}").randrange(5, 900) for i in range(12 * 64)]
            ns.put(prompt, random.Random(n).randbytes(12 * layout.page_bytes))
            matches.append(stack.enter_context(ns.match(prompt)))
        for _ in range(rounds + 1):
            for way, at_once in ways.items():
                with library.paused() if "NATIVE" in way else nullcontext():
                    began, busy = time.perf_counter(), time.process_time()
                    wanted = [(match, [n * 24 + i for i in range(24)]) for n, match in enumerate(matches)]
                    if at_once:
                        done = io.load_at_once(wanted, 1.0)
                    else:
                        transfers = [io.load(match, units) for match, units in wanted]
                        done = [transfer.wait(STORE_SECONDS) for transfer in transfers]
                    took = time.process_time() - busy, time.perf_counter() - began
                assert all(result is not None and result.pages == 12 for result in done)
                seen.setdefault(way, []).append((1000 * took[0], 1000 * took[1]))
    for way, values in seen.items():
        cpu, whole = zip(*values[1:], strict=True)  # the first round warms up
        print(f"| {way} | {ratios(list(cpu))} | {ratios(list(whole))} |")


def lookups(rounds: int) -> None:
    """Prompts per second that a scheduler with each connector gets answered."""
    vllm_lookups.run(rounds, CONNECTORS)


def faults(rounds: int) -> None:
    """The answers of an engine during faults of the disk below its connector. Nothing is timed: no rounds."""
    vllm_faults.run(CONNECTORS)


def _damaged(engine: Any, model: Path, path: Path, transfer: Any, options: Any, prompts: Any, computed: Any) -> str:
    """The answers of an engine with a flipped bit in every 64 KiB of its files."""
    vllm_faults.flip(path)
    try:
        with engine(model, transfer=transfer, **options) as third:
            answers = [third.ask("time", prompt=p, tokens=4) for p in prompts]
    except AssertionError:
        return "the engine ended"
    right = sum(a["tokens"][:1] == c["tokens"][:1] for a, c in zip(answers, computed, strict=True))
    return f"{right} of {len(prompts)} right, {sum(a['cached'] > 0 for a in answers)} from the cache"


def _bench_model(path: Path) -> Path:
    from transformers import LlamaConfig

    from tests.vllm import models

    shape = {**models._BASE, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16,
             "num_key_value_heads": 4, "head_dim": 64}  # fmt: skip
    models.CONFIGS["bench"] = lambda: LlamaConfig(num_hidden_layers=12, **shape)
    return models.build("bench", path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["scheduler", "engines", "batch", "loads", "lookups", "faults", "serve"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--reports", type=Path, help="of serve: a directory for the pages with plots")
    arguments = parser.parse_args()
    if arguments.what == "serve":
        vllm_serve.run(arguments.rounds, CONNECTORS, arguments.reports)
        return
    modes = {
        "scheduler": scheduler,
        "engines": engines,
        "batch": batch,
        "loads": loads,
        "lookups": lookups,
        "faults": faults,
    }
    modes[arguments.what](arguments.rounds)


if __name__ == "__main__":
    main()
