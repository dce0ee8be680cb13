"""How long the calls of LightLLM's device path take its inference loop: ``python -m tools.benchmarks.lightllm_calls``.

A pool of token slots in random order; prompts of 32k tokens that are saved, looked up and loaded on the simulated
device of the tests, whose kernels do nothing here. Wall time includes what other threads and processes take.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

MS = 1e3


class Watch:
    """Wall and CPU time of calls, by name."""

    def __init__(self) -> None:
        self._wall, self._cpu = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)

    def time(self, name: str, call: Callable[..., Any], *given: Any) -> Any:
        wall, cpu = time.perf_counter(), time.thread_time()
        found = call(*given)
        self._wall[name].append((time.perf_counter() - wall) * MS)
        self._cpu[name].append((time.thread_time() - cpu) * MS)
        return found

    def report(self) -> None:
        for name, wall in self._wall.items():
            cpu = self._cpu[name]
            print(
                f"{name:18} {len(wall):5} calls, ms: wall median {statistics.median(wall):.3f}, "
                f"p99 {sorted(wall)[int(0.99 * len(wall))]:.3f}, max {max(wall):.3f}; "
                f"CPU median {statistics.median(cpu):.3f}, max {max(cpu):.3f}"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    import torch

    from kvfs.namespace import Namespace
    from tests.gpu.simulated import SimulatedDevice, SimulatedStream
    from tests.gpu.test_gpu_io import attach
    from tests.integrations import lightllm_device as stand_ins
    from tests.integrations.test_lightllm_device import PAGE, OnDevice, loop, tokens_of

    device, watch = SimulatedDevice(), Watch()

    def attached(space: Namespace, kv: Any, *, queue_max: int, **_: Any) -> Any:
        return attach(space, kv, device=device, ring_bytes="64MiB", scratch_bytes="64MiB", queue_max=queue_max)

    Namespace.attach = attached  # type: ignore[method-assign, assignment]
    for kernel in ("_move", "_sum"):
        setattr(SimulatedStream, kernel, lambda *_, **__: None)
    stand_ins.FAST = True
    torch.set_num_threads(1)
    tokens = args.tokens // PAGE * PAGE
    print(f"{tokens} tokens, {args.rounds} rounds, load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        engine = loop(Path(folder) / "store", slots=2 * tokens + PAGE, kind=OnDevice, capacity="1GiB")
        for number in range(args.rounds):
            prompt = tokens_of(number, tokens // PAGE)
            req = engine.request([*prompt, 0])
            engine.rows[0, :tokens] = engine.pool.alloc(tokens)
            req.cur_kv_len = tokens
            task = watch.time("begin_save", engine.path.begin_save, req)
            engine.saves.append(task)
            while engine.saves:
                watch.time("update, saving", engine.path.update, engine.saves)
                time.sleep(0.001)
            assert task.save._saving is None or task.save._saving.wait(60) is not None
            engine.release(req)
            req = engine.request([*prompt, 0])
            watch.time("begin_loads", engine.path.begin_loads, [req])
            while watch.time("ready", engine.path.ready, [req]) != [req]:
                watch.time("update, loading", engine.path.update, engine.saves)
                time.sleep(0.001)
            assert req.cur_kv_len == tokens, f"{req.cur_kv_len} tokens are restored"
            engine.release(req)
        engine.close()
    watch.report()
    return 0


if __name__ == "__main__":
    sys.exit(main())
