"""What running requests of a whole vLLM pay while its connector saves, and what a hit after a restart takes.

Run it in vLLM's environment, on the machine in question:
``python -m tools.benchmarks.vllm_saving --connectors none,kvfs,tiers --tokens 32776 --rounds 3``.

One engine process for each connector, in the order given and then in reverse. Each computes ``rounds`` prompts and goes
on for 63 tokens while they are saved; then two batches of eight prompts of a quarter of the length. kvfs starts once
more on its store, where the same prompts are hits. Times are those of the engine's caller: compare them within one run,
and touch the memory of a fresh virtual machine first. Weights are random (``load_format="dummy"``): times, no outputs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ANSWER = 64  # tokens: the first, and 63 while the prompt is saved
SHAPES = {  # layers, width, heads of 128, KV heads
    "8b": (32, 4096, 32, 8),
    "tiny": (2, 256, 2, 1),
}


def model_config(shape: str, tokens: int) -> dict[str, Any]:
    layers, width, heads, kv_heads = SHAPES[shape]
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": width, "hidden_act": "silu",
        "intermediate_size": width * 7 // 2, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": 128, "vocab_size": 32_000, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2 * tokens, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


def connector(name: str, store: str) -> dict[str, Any] | None:
    """vLLM's ``kv_transfer_config``; "tiers" is vLLM's own: host memory, and files below it."""
    if name == "none":
        return None
    if name == "kvfs":
        extra = {"path": store, "capacity": "40GiB", "weights_id": "dummy"}
        return {"kv_connector": "KvfsConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    extra = {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 24 << 30, "block_size": 64,
        "secondary_tiers": [{"type": "fs", "root_dir": store}],
    }  # fmt: skip
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


class Caller:
    """Asks an engine in this process, and takes times."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._asked = engine, 0

    def ask(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """All prompts at once. Seconds until the last first token, and the end; ms between tokens; cached tokens."""
        from vllm import SamplingParams

        self._engine.reset_prefix_cache()
        sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        for prompt in prompts:
            self._asked += 1
            self._engine.llm_engine.add_request(str(self._asked), {"prompt_token_ids": prompt}, sampling)
        last: dict[str, float] = {}
        gaps, firsts, cached, left = [], [], 0, len(prompts)
        while left:
            for output in self._engine.llm_engine.step():
                now = time.perf_counter()
                if output.request_id in last:
                    gaps.append(1e3 * (now - last[output.request_id]))
                elif output.outputs and output.outputs[0].token_ids:
                    firsts.append(now - began)
                last[output.request_id] = now
                if output.finished:
                    left -= 1
                    cached += output.num_cached_tokens or 0
        gaps.sort()
        return {
            "first": round(max(firsts), 4), "end": round(time.perf_counter() - began, 4), "cached": cached,
            "gap_mean": round(sum(gaps) / max(1, len(gaps)), 3), "gap_p50": round(gaps[len(gaps) // 2], 3),
            "gap_p99": round(gaps[int(0.99 * (len(gaps) - 1))], 3),
        }  # fmt: skip


def measure(arguments: argparse.Namespace) -> None:
    """In a process of its own: one engine, one line of JSON per measurement."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    transfer = connector(arguments.child, arguments.store)
    engine = LLM(
        model=arguments.model, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
        max_model_len=arguments.tokens + 2 * ANSWER, max_num_batched_tokens=min(8192, arguments.tokens),
        kv_cache_memory_bytes=arguments.cache_gib << 30, max_num_seqs=64, disable_log_stats=False,
        kv_transfer_config=KVTransferConfig(**transfer) if transfer else None,
    )  # fmt: skip
    caller = Caller(engine)

    def prompt(what: object, tokens: int) -> list[int]:
        draw = random.Random(str(what))
        return [draw.randrange(3, 31_990) for _ in range(tokens)]

    for i in range(3):  # kernels are compiled, and graphs captured
        caller.ask([prompt(f"{time.time()} {i}", arguments.tokens // 8)], 8)
    for i in range(arguments.rounds):
        print("ROW", json.dumps({"what": "prompt", **caller.ask([prompt(i, arguments.tokens)], ANSWER)}), flush=True)
    for i in range(0 if arguments.again else 2):
        batch = [prompt((i, n), arguments.tokens // 4) for n in range(8)]
        print("ROW", json.dumps({"what": "batch of 8", **caller.ask(batch, ANSWER)}), flush=True)
    time.sleep(1.0)


def child(arguments: argparse.Namespace, name: str, model: Path, store: Path, *, again: bool) -> None:
    """Run one engine; print its rows as a table."""
    command = [sys.executable, "-m", "tools.benchmarks.vllm_saving", "--child", name, "--model", str(model)]
    command += ["--store", str(store), "--tokens", str(arguments.tokens), "--rounds", str(arguments.rounds)]
    command += ["--cache-gib", str(arguments.cache_gib), *(["--again"] if again else [])]
    ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    rows = [json.loads(line[4:]) for line in ran.stdout.splitlines() if line.startswith("ROW ")]
    if ran.returncode or not rows:
        sys.exit(f"the engine with {name} ended with {ran.returncode}: {ran.stderr[-2000:]}")
    label = f"{name}, started again" if again else name
    for row in rows:
        gaps = f"{row['gap_mean']} | {row['gap_p50']} | {row['gap_p99']}"
        print(f"| {label} | {row['what']} | {row['first']} | {row['end']} | {gaps} | {row['cached']} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connectors", default="none,kvfs,tiers")
    parser.add_argument("--tokens", type=int, default=32_776)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--cache-gib", type=int, default=24, help="of the engine's own KV cache")
    parser.add_argument("--folder", help="for the stores; default: a temporary one")
    for internal in ("--child", "--model", "--store"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    parser.add_argument("--again", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        measure(arguments)
        return
    names = arguments.connectors.split(",")
    print(
        "| connector | what | first token, s | end, s | ms per token: mean | p50 | p99 | cached |\n" + "|---" * 8 + "|"
    )
    folder = Path(tempfile.mkdtemp(prefix="kvfs-saving-", dir=arguments.folder))
    try:
        model = folder / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(model_config(arguments.shape, arguments.tokens)))
        for turn, name in enumerate([*names, *reversed(names)]):
            store = folder / f"store-{turn}"
            child(arguments, name, model, store, again=False)
            if name == "kvfs" and turn < len(names):
                child(arguments, name, model, store, again=True)
            shutil.rmtree(store, ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
