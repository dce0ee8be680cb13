"""The API server: the one flag that users write, its processes, concurrent requests, its metrics."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.vllm.engine import Engine

Prompt = Callable[..., list[int]]
START_SECONDS = 240.0


class Server:
    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, prompt: list[int]) -> tuple[int, list[int]]:
        """(cached tokens, new tokens)"""
        body = {
            "model": "m", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True,
        }  # fmt: skip
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            answer: dict[str, Any] = json.load(response)
        details = answer["usage"].get("prompt_tokens_details") or {}
        return details.get("cached_tokens") or 0, answer["choices"][0]["token_ids"]

    def all(self, prompts: list[list[int]]) -> list[tuple[int, list[int]]]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(self.ask, prompts))

    def metric(self, name: str, label: str = "") -> float:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as response:
            text = response.read().decode()
        return sum(
            float(value)
            for value in re.findall(rf"^vllm:{name}(?:_total)?\{{[^}}]*{label}[^}}]*\}} (\S+)$", text, re.M)
        )


@contextmanager
def serving(model: Path, store: Path) -> Iterator[Server]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    transfer = {
        "kv_connector": "KvfsConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"path": str(store), "capacity": "256MiB"},
    }  # fmt: skip
    log = store.parent / f"{port}.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port),
             "--host", "127.0.0.1", "--served-model-name", "m", "--enforce-eager", "--block-size", "32",
             "--max-model-len", "2048", "--dtype", "float32", "--kv-cache-memory-bytes", str(32 << 20),
             "--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(transfer)],
            stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except (urllib.error.URLError, ConnectionError):
                assert process.poll() is None and time.monotonic() < end, log.read_text()[-4000:]
                time.sleep(0.5)
        yield Server(url)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def test_concurrent_requests_over_two_servers(model: Callable[[str], Path], prompt: Prompt, tmp_path: Path) -> None:
    """Eight concurrent requests that share 448 tokens and then diverge; then again after a restart."""
    prompts = [[*prompt(1, 448), *prompt(10 + n, 150)] for n in range(8)]
    with Engine(model("llama")) as plain:
        expected = [tokens for _, tokens in plain.generate(*prompts, max_tokens=8)]
    with serving(model("llama"), tmp_path / "store") as first:
        assert [tokens for _, tokens in first.all(prompts)] == expected
        assert first.metric("kv_offload_store_bytes") > 0
    with serving(model("llama"), tmp_path / "store") as second:
        warm = second.all(prompts)
        assert [tokens for _, tokens in warm] == expected
        assert all(cached >= 448 for cached, _ in warm)
        assert second.metric("external_prefix_cache_hits") >= 576 + 7 * 128
        assert second.metric("kvfs_pages_loaded") >= 9 + 7 * 2 and second.metric("kvfs_loads_failed") == 0
        hits = second.metric("external_prefix_cache_hits")  # each of these tokens came from one tier of kvfs
        by_source = [second.metric("prompt_tokens_cached_by_source", f'source="{tier}"') for tier in ("host", "disk")]
        assert sum(by_source) == hits
        assert second.metric("kvfs_tokens_loaded_host") + second.metric("kvfs_tokens_loaded_disk") == hits
