"""How long the calls of LightLLM's device path take its inference loop: ``python -m tools.benchmarks.lightllm_calls``.

A pool of token slots in random order; prompts of 32k tokens that are saved, looked up and loaded on the simulated
device of the tests, whose kernels do nothing here. Wall time includes what other threads and processes take.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from tools.benchmarks.calls import Watch, use_simulated_device


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    from tests.integrations import lightllm_device as stand_ins
    from tests.integrations.test_lightllm_device import PAGE, OnDevice, loop, tokens_of

    watch = Watch()
    use_simulated_device()
    stand_ins.FAST = True
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
