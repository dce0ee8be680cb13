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

import pytest

from tests.vllm.engine import Engine

Prompt = Callable[..., list[int]]
START_SECONDS = 240.0


class Server:
    def __init__(self, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.url, self.log = url, log
        self._process = process

    def kill(self) -> None:
        """The API server and its engines, at once."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)

    def ask(self, prompt: list[int], rank: int | None = None) -> tuple[int, list[int]]:
        """(cached tokens, new tokens). ``rank``: the data-parallel one that computes it; None: the server chooses."""
        body = {
            "model": "m", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True,
        }  # fmt: skip
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(),
            {"Content-Type": "application/json", **({} if rank is None else {"X-data-parallel-rank": str(rank)})},
        )  # fmt: skip
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

    def wait_for(self, name: str, label: str) -> None:
        """Until a counter is not 0."""
        end = time.monotonic() + 60
        while not self.metric(name, label):
            assert time.monotonic() < end, f"{name} stays 0"
            time.sleep(0.1)


@contextmanager
def serving(model: Path, store: Path, *flags: str, **settings: Any) -> Iterator[Server]:
    """``flags``: of the server, besides those of all tests. ``settings``: of kvfs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    transfer = {
        "kv_connector": "KvfsConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"path": str(store), "capacity": "256MiB", **settings},
    }  # fmt: skip
    log = store.parent / f"{port}.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port),
             "--host", "127.0.0.1", "--served-model-name", "m", "--enforce-eager", "--block-size", "32",
             "--max-model-len", "2048", "--dtype", "float32", "--kv-cache-memory-bytes", str(32 << 20),
             "--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(transfer), *flags],
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
        yield Server(url, process, log)
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


@pytest.mark.slow
@pytest.mark.timeout(600)  # six processes import vLLM
def test_data_parallel_ranks_of_one_server_share_the_store(
    model: Callable[[str], Path], prompt: Prompt, tmp_path: Path
) -> None:
    """What one rank has computed the other one loads, and a later engine once the server was killed. On a CPU the pages
    come from the store: ``dp_pulls`` needs GPUs, and says so."""
    first, other = prompt(1, 600), prompt(2, 600)
    with Engine(model("llama")) as plain:
        expected = [tokens for _, tokens in plain.generate(first, other, max_tokens=8)]
    with serving(model("llama"), tmp_path / "store", "--data-parallel-size", "2", dp_pulls=True) as server:
        assert server.ask(first, rank=0) == (0, expected[0])
        assert server.ask(other, rank=1) == (0, expected[1])
        for rank in (0, 1):
            server.wait_for("kv_offload_store_bytes", f'engine="{rank}"')
        for rank, prompt_of_the_other, tokens in ((1, first, expected[0]), (0, other, expected[1])):
            assert server.ask(prompt_of_the_other, rank=rank) == (576, tokens)
            assert server.metric("external_prefix_cache_hits", f'engine="{rank}"') == 576
            assert server.metric("kvfs_pages_loaded", f'engine="{rank}"') == 9
        assert server.metric("kvfs_loads_failed") == server.metric("kvfs_tokens_loaded_peer") == 0
        assert "dp_pulls is off, pages come from the store: ranks are for buffers on a GPU" in server.log.read_text()
        server.kill()
    with Engine(model("llama"), tmp_path / "store") as later:
        answers = later.generate(first, other, max_tokens=8)
    assert answers == [(576, tokens) for tokens in expected]
