"""kvfs behind LightLLM's own disk worker, CPU cache client and manager."""

from __future__ import annotations

import errno
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvfs.errors import ConfigError, UnsupportedModelError
from kvfs.integrations.weights import model_revision
from kvfs.system.files import Files
from kvfs.testing import EngineContract, Fault, FaultyFiles
from tests.integrations.shared_engines import LightLLM, SGLang, Transformers
from tests.integrations.test_lightllm import PAGE, PAGE_BYTES, contents, model_folder, tokens_of
from tests.lightllm.engine import POISON, CanonicalEngine, Engine, Server

ROOT = Path(__file__).resolve().parents[2]
SOURCE, COMMIT = os.environ.get("LIGHTLLM_SOURCE", ""), "87881ae7ca9aa774db744ad38df22c95d80c0eb0"

pytestmark = pytest.mark.skipif(
    not Path(SOURCE, "lightllm", "server", "multi_level_kv_cache", "disk_cache_worker.py").is_file(),
    reason=f"LIGHTLLM_SOURCE names no checkout of https://github.com/ModelTC/LightLLM at {COMMIT}",
)


def start(path: Path, files: Files | None = None, **how: Any) -> Engine:
    """A server of a small model with the store ``path``."""
    kind = CanonicalEngine if how.get("patched") else Engine
    return kind(Server(path, model_folder(path.with_name("model")), files=files, **how))


class TestUnmodified(EngineContract):
    page_tokens = PAGE
    page_bytes = PAGE_BYTES
    gives_up_loads = True

    def start(self, path: Path, files: Files | None = None) -> Engine:
        return start(path, files)


class TestPatched(EngineContract):
    page_tokens = PAGE
    page_bytes = PAGE_BYTES
    gives_up_loads = True

    def start(self, path: Path, files: Files | None = None) -> Engine:
        return start(path, files, patched=True)


@pytest.mark.parametrize("patched", [False, True])
def test_a_request_gets_what_the_cpu_cache_lacks_from_disk(memory_path: Path, patched: bool) -> None:
    engine = start(memory_path / "store", patched=patched)
    server, tokens, pages = engine.server, tokens_of(1, 20), contents(1, 20)
    assert engine.put(tokens, pages) == 20
    server.forget()
    first = server.request([*tokens[: 8 * PAGE], 0])
    server.release_pages(server.match(first))
    assert first.disk_prompt_cache_len == 8 * PAGE
    second = server.request([*tokens, 0])
    found = server.match(second)
    assert len(found) == 20 and second.disk_prompt_cache_len == 12 * PAGE, "eight pages were in the CPU cache"
    assert [engine._canonical_bytes(server.memory[n].numpy().tobytes()) for n in found] == pages
    server.release_pages(found)
    third = server.request([*tokens, 0])
    server.release_pages(server.match(third))
    assert third.disk_prompt_cache_len == 0, "all are in the CPU cache now"
    for made in (first, second, third):
        server.release(made)
    assert server.references() == 0
    engine.close()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("nth", [1, 2, 5])
def test_a_disk_that_fails_keeps_no_page_and_serves_no_wrong_one(memory_path: Path, error: int, nth: int) -> None:
    files = FaultyFiles()
    engine = start(memory_path / "store", files)
    for n in range(4):
        tokens, pages = tokens_of(20 + n, 16), contents(n, 16)
        files.arm(Fault(nth=files.calls["pwritev"] + nth, kind="pwritev", error=error, persistent=n < 2))
        engine.put(tokens, pages)  # waits until all references are back
        files.arm()
        assert engine.server.references() == 0
        count = engine.lookup(tokens)
        assert engine.get(tokens, 16)[:count] == pages[:count]
    tokens, pages = tokens_of(30, 16), contents(30, 16)
    assert engine.put(tokens, pages) == 16
    files.arm(Fault(kind="preadv", error=errno.EIO, persistent=True))
    found = engine.get(tokens, 16)
    assert all(got in (None, page) for got, page in zip(found, pages, strict=True))
    files.arm()
    assert engine.server.references() == 0
    engine.close()


class Slow(Files):
    """Reads of load threads and writes of pages wait until ``go``."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()

    def _wait(self) -> None:
        if threading.current_thread().name.startswith(("kvfs-read", "kvfs-write")):
            assert self.go.wait(60)

    def preadv(self, *arguments: Any) -> int:
        self._wait()
        return super().preadv(*arguments)

    def pwritev(self, *arguments: Any) -> int:
        self._wait()
        return super().pwritev(*arguments)


def patience(server: Server, seconds: float) -> None:
    """How long LightLLM's worker waits for a task before it aborts it."""
    type(server.worker)._wait_task.__globals__["TASK_WAIT_TIMEOUT_S"] = seconds


@pytest.mark.usefixtures("python_only")
def test_the_worker_aborts_a_load_and_reuses_its_pages(memory_path: Path) -> None:
    """LightLLM's own abort, at random moments of a load: the next owner of a page keeps what it wrote."""
    files = Slow()
    engine = start(memory_path / "store", files)
    server, tokens, pages = engine.server, tokens_of(40, 24), contents(40, 24)
    assert engine.put(tokens, pages) == 24
    draw, given_up = random.Random(40), 0
    for n in range(30):
        server.forget()
        patience(server, 0.001 + 0.02 * draw.random() if n % 3 else 60)
        if n % 3 == 1:
            files.go.clear()
        made = server.request([*tokens, 0])
        found = server.match(made)
        if found:
            assert [server.memory[page].numpy().tobytes() for page in found] == pages[: len(found)]
            server.release_pages(found)
        given_up += not found
        assert server.references() == 0
        server.memory.fill_(0xEE)  # of the next owner
        files.go.set()
        time.sleep(0.003)
        assert bool((server.memory == 0xEE).all()), "an aborted load wrote to a page"
        server.release(made)
    assert 10 <= given_up <= 20
    engine.close()


@pytest.mark.usefixtures("python_only")
def test_the_worker_gives_up_an_offload_and_its_pages_are_reused(memory_path: Path) -> None:
    """A disk that hangs: references come back all the same, and what is stored later is what the pages held then."""
    files = Slow()
    engine = start(memory_path / "store", files, settings={"store_seconds": 0.5, "ring_bytes": "1MiB"})
    server = engine.server
    patience(server, 0.05)
    files.go.clear()
    asked = []
    for n in range(3):  # more than the ring takes
        tokens, pages = tokens_of(50 + n, 90), contents(50 + n, 90)
        made = server.request([*tokens, 0])
        server.forget()
        server.offload(made.token_hash_list.get_all(), pages)
        end = time.monotonic() + 60
        while server.references() or server.client.offload_page_indexes.size():
            assert time.monotonic() < end, "references are left"
            time.sleep(0.002)
        server.memory.fill_(0xEE)
        asked.append((tokens, pages))
        server.release(made)
    files.go.set()
    patience(server, 60)
    server.settle()
    for tokens, pages in asked:
        count = engine.lookup(tokens)
        assert engine.get(tokens[: count * PAGE], count) == pages[:count]
    engine.close()


CHILD = """
import os, sys
from pathlib import Path
sys.path[:0] = [{stubs!r}, {shim!r}, {source!r}]
from tests.integrations.test_lightllm import contents, tokens_of
from tests.lightllm.test_disk_worker import start
engine = start(Path(sys.argv[1]), patched={patched!r})
print("ready", os.environ["LIGHTLLM_UNIQUE_SERVICE_NAME_ID"], engine.server.args.cpu_kv_cache_shm_id, flush=True)
for n in range(200):
    engine.put(tokens_of(n, 30), [engine._canonical_bytes(page) for page in contents(n, 30)])
"""


@pytest.mark.parametrize("seed", range(4))
def test_a_server_that_is_killed_while_it_offloads(memory_path: Path, seed: int) -> None:
    """kill -9: what the next server finds is what was stored, and whole pages only."""
    patched = bool(seed % 2)
    here = Path(__file__).parent
    code = CHILD.format(
        stubs=str(here / "stubs"), shim=str(ROOT / "kvfs/integrations/lightllm/shim"),
        source=os.environ["LIGHTLLM_SOURCE"], patched=patched,
    )  # fmt: skip
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(memory_path / "store")], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    try:
        assert child.stdout is not None
        ready = next(line for line in child.stdout if line.startswith("ready "))  # behind LightLLM's own lines
        _, name, shm_key = ready.split()
        time.sleep(0.3 + random.Random(seed).random() * 1.5)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait(60)
    for file in Path("/dev/shm").glob(f"{name}_*"):  # what the killed server could not remove
        file.unlink()
    subprocess.run(["ipcrm", "-M", shm_key], check=True, timeout=60)
    engine, found = start(memory_path / "store", patched=patched), 0
    for n in range(200):
        tokens = tokens_of(n, 30)
        count = engine.lookup(tokens)
        if not count:
            break
        pages = [engine._canonical_bytes(page) for page in contents(n, 30)]
        assert engine.get(tokens[: count * PAGE], count) == pages[:count]
        found += count
    assert found, "nothing was stored before the kill"
    tokens, pages = tokens_of(900, 30), contents(900, 30)
    assert engine.put(tokens, pages) == 30 and engine.get(tokens, 30) == pages
    engine.close()


def test_two_servers_share_a_store(memory_path: Path) -> None:
    one = start(memory_path / "store", patched=True)
    tokens, pages = tokens_of(60, 12), contents(60, 12)
    assert one.put(tokens, pages) == 12
    other = start(memory_path / "store", patched=True)
    assert other.get(tokens, 12) == pages
    before = other.counters().get("bytes_written", 0)
    assert other.put(tokens, pages) == 12 and other.counters().get("bytes_written", 0) == before
    other.close()
    one.close()


def test_images_and_other_flags_fail_the_start(memory_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="--disable_vision"):
        start(memory_path / "store", enable_multimodal=True)
    with pytest.raises(ConfigError, match=r"lightllm-prompts\.patch"):
        start(memory_path / "store", settings={"share": "engines"})
    assert not (memory_path / "store").exists()


# ---------------------------------------------------------------- one prefix for several engines

SHARED = {"layers": 3, "heads": 2, "dim": 8, "dtype": torch.float32}
SHARED_BYTES = PAGE * 3 * 2 * 2 * 8 * 4


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("writes", [True, False], ids=["LightLLM writes", "LightLLM reads"])
def test_a_patched_server_shares_pages_with_other_engines(memory_path: Path, llama: Path, writes: bool) -> None:
    """LightLLM's own manager and worker on one side; transformers, SGLang and the service by itself on the other."""
    path, pages = memory_path / "store", contents(70, 4, SHARED_BYTES)
    tokens = random.Random(70).choices(range(96), k=4 * PAGE)
    model = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
    floats = torch.randn(4 * SHARED_BYTES // 4, generator=torch.Generator().manual_seed(7)).numpy().tobytes()
    pages = [floats[at : at + SHARED_BYTES] for at in range(0, len(floats), SHARED_BYTES)]

    def real() -> CanonicalEngine:
        return CanonicalEngine(Server(path, llama, patched=True, shape=SHARED, settings={"share": "engines"}))

    others = [
        lambda: Transformers(path, model, llama),
        lambda: SGLang(path, llama, "page_head", **SHARED),
        lambda: LightLLM(path, llama, **SHARED),
    ]
    assert model_revision(str(llama))
    if writes:
        engine = real()
        assert engine.put(tokens, pages) == 4
        digest = engine.server.service.identity
        engine.close()
        for other in others:
            reader = other()
            assert reader.identity == digest and reader.get(tokens) == pages
            reader.close()
        return
    for n, other in enumerate(others):
        ids = [*tokens[:-1], n]
        writer = other()
        assert writer.put(ids, pages) == 4
        writer.close()
        engine = real()
        assert engine.get(ids, 4) == pages
        engine.close()


def test_pages_that_were_not_told_are_not_stored(memory_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A patched manager that gives a lookup up, because it is late, has told nothing: such pages are left out."""
    engine = start(memory_path / "store", patched=True)
    server, tokens, pages = engine.server, tokens_of(80, 6), contents(80, 6)
    made = server.request([*tokens, 0])
    with caplog.at_level(logging.WARNING):
        server.offload(made.token_hash_list.get_all(), pages)
        server.settle()
    assert engine.lookup(tokens) == 0 and bool((server.memory != POISON).any())
    server.release(made)
    engine.close()
