"""``kvfs bench serve`` against vLLM's API server on a CPU, with and without kvfs, before and after a restart.

Both servers keep vLLM's own prefix cache, and run beside each other. They are asked the same conversations in turns,
then both are restarted and asked them again: what differs then is what kvfs restores. Ratios are within one turn.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

SHAPE = {"sessions": 4, "turns": 2, "shared": 256, "first": 768, "turn": 64, "output": 4, "concurrency": 1}
START_SECONDS = 300.0
_ROOT = Path(__file__).resolve().parents[2]


def run(rounds: int, connectors: dict[str, Callable[[Path], dict[str, Any] | None]], reports: Path | None) -> None:
    """Rows of Markdown: of each server before and after its restart. ``reports``: where the pages with plots go."""
    folder = Path(tempfile.mkdtemp(prefix="kvfs-bench-"))
    seen: dict[tuple[str, str], list[dict[str, Any]]] = {}
    try:
        model = _model(folder / "model")
        for when in ("first start", "after a restart"):
            with ExitStack() as stack:
                servers = {
                    name: stack.enter_context(
                        _serving(model, connectors[name](folder / "store"), folder / f"{name}.log")
                    )
                    for name in ("none", "kvfs")
                }
                for n in range(rounds + 1):
                    for name, url in servers.items():
                        page = reports / f"{name}-{when.replace(' ', '-')}-{n}.html" if reports is not None else None
                        found = _ask(url, n, page, folder / f"{name}.log")
                        if n:  # the first turn warms up
                            seen.setdefault((name, when), []).append(found)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("| server | | requests, failed | hits | TTFT p50, s | TTFT mean, of that without kvfs |")
    for (name, when), runs in seen.items():
        ratios = [f["ttft"]["mean"] / b["ttft"]["mean"] for f, b in zip(runs, seen["none", when], strict=True)]
        print(
            f"| {name} | {when} | {sum(f['requests'] for f in runs)}, {sum(f['failed'] for f in runs)} "
            f"| {_spread([f['hit_ratio'] for f in runs])} | {_spread([f['ttft']['p50'] for f in runs])} "
            f"| {_spread(ratios)} |"
        )


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} [{min(values):.3f}, {max(values):.3f}]"


def _ask(url: str, seed: int, page: Path | None, log: Path) -> dict[str, Any]:
    sizes = [word for name, n in SHAPE.items() for word in (f"--{name}", str(n))]
    done = subprocess.run(
        [sys.executable, "-m", "kvfs.cli.main", "bench", "serve", "--json", "--target", f"{url}/v1", "--seed",
         str(seed), *sizes, *(["--report", str(page)] if page is not None else [])],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(_ROOT)},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"kvfs bench serve failed: {done.stderr}{done.stdout[-2000:]}{log.read_text()[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@contextmanager
def _serving(model: Path, transfer: dict[str, Any] | None, log: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    more = ["--kv-transfer-config", json.dumps(transfer)] if transfer is not None else []
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port),
             "--host", "127.0.0.1", "--enforce-eager", "--max-model-len", "2048", "--dtype", "bfloat16",
             "--kv-cache-memory-bytes", str(256 << 20), "--enable-prompt-tokens-details", *more],
            stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": str(_ROOT)},
        )  # fmt: skip
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except (urllib.error.URLError, ConnectionError):
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"vLLM did not start: {log.read_text()[-4000:]}") from None
                time.sleep(0.5)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def _model(path: Path) -> Path:
    """Weights are random; the vocabulary is that of usual models, which the workloads draw from."""
    from transformers import LlamaConfig

    from tests.vllm import models

    shape = {**models._BASE, "vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 2816,
             "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}  # fmt: skip
    models.CONFIGS["serve"] = lambda: LlamaConfig(num_hidden_layers=12, **shape)
    return models.build("serve", path)
