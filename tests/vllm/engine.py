"""An engine in a separate process, controlled by lines of JSON: ``python -m tests.vllm.engine '{"model": ...}'``.

Reads JSON commands from standard input, writes ``RESULT <json>`` for each. :class:`Engine` is the other end.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import kvfs.store
from kvfs.testing import Fault, FaultyFiles

FILES = FaultyFiles()
ROOT = Path(__file__).resolve().parents[2]
START_SECONDS, CALL_SECONDS = 240.0, 180.0


class Engine:
    """Starts, asks and stops the engine. ``extra``: settings of kvfs, which is used if ``store`` is given.

    ``transfer``: configuration of another connector. ``env``: added to the process. ``faulty``: ``fault`` affects its
    files, which the native library does not read then.
    """

    def __init__(
        self, model: Path, store: Path | None = None, *, extra: dict[str, Any] | None = None,
        env: dict[str, str] | None = None, transfer: dict[str, Any] | None = None, faulty: bool = False,
        **options: Any,
    ) -> None:  # fmt: skip
        config = transfer
        if store is not None:
            settings = {"path": str(store), "capacity": "256MiB", **(extra or {})}
            config = {"kv_connector": "KvfsConnector", "kv_role": "kv_both", "kv_connector_extra_config": settings}
        job = {"model": str(model), "transfer": config, "options": options, "faulty": faulty}
        base = {
            "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING",
            "PYTHONPATH": str(ROOT), "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        }  # fmt: skip
        if options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1) > 1:
            base["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
        self.log: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.vllm.engine", json.dumps(job)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, start_new_session=True,
            env={**os.environ, **base, **(env or {})},
        )  # fmt: skip
        self._answer(START_SECONDS)

    def ask(self, op: str, **arguments: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
        self.process.stdin.flush()
        return self._answer(CALL_SECONDS)

    def generate(
        self, *prompts: list[int], forget: bool = True, lora: tuple[str, int, str] | None = None, **sampling: Any
    ) -> list[tuple[int, list[int]]]:
        """(cached tokens, new tokens) of each prompt. ``forget``: empty the engine's own prefix cache before.

        ``lora``: name, number and directory of an adapter.
        """
        answer = self.ask("generate", prompts=prompts, forget=forget, sampling=sampling, lora=lora)
        return [tuple(r) for r in answer]

    def metrics(self) -> dict[str, float]:
        found: dict[str, float] = self.ask("metrics")
        return found

    def cache(self) -> set[str]:
        """The contents of the engine's cache: layer, head and digest of each block that was ever filled, all ranks."""
        return set(self.ask("cache"))

    def fault(self, **fault: Any) -> int:
        """Inject a fault from now on (see ``kvfs.testing.Fault``), or none without arguments. How many fired."""
        fired: int = self.ask("fault", fault=fault)
        return fired

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)

    def close(self) -> None:
        if self.process.poll() is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.close()
        if kind is not None:
            print("\n".join(self.log[-80:]))

    def _answer(self, seconds: float) -> Any:
        assert self.process.stdout is not None
        alarm = threading.Timer(seconds, self.kill)
        alarm.start()
        try:
            for line in self.process.stdout:
                if line.startswith("RESULT "):
                    return json.loads(line.removeprefix("RESULT "))
                self.log.append(line.rstrip())
        finally:
            alarm.cancel()
        raise AssertionError("the engine ended:\n" + "\n".join(self.log[-60:]))


def _serve(job: dict[str, Any]) -> None:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    if job["faulty"]:
        kvfs.store.Files = lambda: FILES  # type: ignore[misc,assignment]
    transfer = KVTransferConfig(**job["transfer"]) if job["transfer"] else None
    options = {
        "kv_cache_memory_bytes": 32 << 20, "enforce_eager": True, "block_size": 32, "max_model_len": 2048,
        "max_num_batched_tokens": 2048, "dtype": "float32", "disable_log_stats": False, **job["options"],
    }  # fmt: skip
    llm = LLM(model=job["model"], kv_transfer_config=transfer, **options)
    _reply("ready")
    for line in sys.stdin:
        command = json.loads(line)
        _reply(_OPERATIONS[command.pop("op")](llm, **command))


def _reply(value: Any) -> None:
    print("RESULT " + json.dumps(value), flush=True)


def _generate(
    llm: Any, prompts: list[list[int]], forget: bool, sampling: dict[str, Any], lora: list[Any] | None = None
) -> list[Any]:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    if forget:
        llm.reset_prefix_cache()
    arguments = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, **sampling}
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids in prompts], SamplingParams(**arguments), use_tqdm=False,
        lora_request=LoRARequest(*lora) if lora is not None else None,
    )  # fmt: skip
    return [[o.num_cached_tokens, list(o.outputs[0].token_ids)] for o in outputs]


def _time(llm: Any, prompt: list[int], tokens: int = 1) -> dict[str, Any]:
    """Seconds until all tokens, and until the first one, of a prompt that the engine's own cache does not hold."""
    from vllm import SamplingParams

    llm.reset_prefix_cache()
    began = time.perf_counter()
    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    output = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)[0]
    seconds = time.perf_counter() - began
    first = output.metrics.first_token_latency if output.metrics is not None else seconds
    return {
        "seconds": seconds, "first": first, "cached": output.num_cached_tokens,
        "tokens": list(output.outputs[0].token_ids),
    }  # fmt: skip


def _batch(llm: Any, prompts: list[list[int]], tokens: int = 1) -> dict[str, Any]:
    """Prompts at once, which the engine's own cache does not hold: seconds until the last token of all, and until the
    first one of each; CPU seconds of the process; steps that computed something."""
    from vllm import SamplingParams

    llm.reset_prefix_cache()
    executor, steps = llm.llm_engine.engine_core.engine_core.model_executor, []
    execute = executor.execute_model

    def counted(scheduled: Any, *arguments: Any, **options: Any) -> Any:
        if scheduled.total_num_scheduled_tokens:
            steps.append(len(scheduled.num_scheduled_tokens))
        return execute(scheduled, *arguments, **options)

    executor.execute_model = counted
    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    began, busy = time.perf_counter(), time.process_time()
    try:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    finally:
        executor.execute_model = execute
    return {
        "seconds": time.perf_counter() - began, "cpu": time.process_time() - busy, "steps": len(steps),
        "firsts": [output.metrics.first_token_latency for output in outputs],
        "cached": [output.num_cached_tokens for output in outputs],
    }  # fmt: skip


def _metrics(llm: Any) -> dict[str, float]:
    return {m.name.removeprefix("vllm:"): m.value for m in llm.get_metrics() if hasattr(m, "value")}


def _usage(llm: Any) -> dict[str, int]:
    """Descriptors and resident bytes of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"fds": len(os.listdir("/proc/self/fd")), "rss": pages * os.sysconf("SC_PAGE_SIZE")}


def _reset(llm: Any) -> bool:
    return bool(llm.llm_engine.reset_prefix_cache(reset_connector=True))


def _fault(llm: Any, fault: dict[str, Any]) -> int:
    FILES.arm(*([Fault(nth=1, persistent=True, **fault)] if fault else []))
    return FILES.fired


def _abort(llm: Any, prompts: list[list[int]], steps: int) -> int:
    """Begin requests and abort them after some steps. Returns how many were unfinished."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    llm.reset_prefix_cache()
    sampling = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
    names = [f"{steps}-{n}" for n in range(len(prompts))]
    for name, ids in zip(names, prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": ids}, sampling)
    for _ in range(steps):
        engine.step()
    left: int = engine.get_num_unfinished_requests()
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    return left


def _cache(llm: Any) -> list[str]:
    return [line for rank in llm.collective_rpc(_cache_of_rank) for line in rank]


def _cache_of_rank(worker: Any) -> list[str]:
    import hashlib

    from vllm.distributed import get_tp_group
    from vllm.model_executor.models.utils import extract_layer_index

    found = []
    for name, layer in worker.vllm_config.compilation_config.static_forward_context.items():
        for block in layer.kv_cache:  # [blocks, heads, tokens, content]
            for head, content in enumerate(block):
                if content.any():
                    digest = hashlib.sha256(content.contiguous().numpy().tobytes()).hexdigest()
                    number = get_tp_group().rank_in_group * len(block) + head
                    found.append(f"{extract_layer_index(name)} {number} {digest}")
    return found


_OPERATIONS = {
    "generate": _generate, "metrics": _metrics, "time": _time, "batch": _batch, "usage": _usage, "reset": _reset,
    "fault": _fault, "abort": _abort, "cache": _cache,
}  # fmt: skip

if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))
