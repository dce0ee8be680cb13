"""The service behind LightLLM's disk worker, over memory like its CPU cache; tests/lightllm has LightLLM itself."""

from __future__ import annotations

import errno
import json
import logging
import random
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from kvfs.errors import ConfigError, UnsupportedModelError
from kvfs.integrations.lightllm import tasks
from kvfs.integrations.lightllm.prompts import Prompts
from kvfs.integrations.lightllm.service import PyLocalCacheService
from kvfs.integrations.lightllm.settings import settings_of
from kvfs.integrations.lightllm.tasks import PyState
from kvfs.system.files import Files
from kvfs.testing import EngineContract, Fault, FaultyFiles
from tests.integrations.lightllm_cache import (
    POISON,
    FakeEngine,
    canonical,
    ended,
    environment,
    hashes,
    set_canonical,
    start,
)

PAGE = 64
SHAPE: dict[str, Any] = {"layers": 3, "heads": 2, "dim": 8, "dtype": torch.bfloat16}
PAGE_BYTES = PAGE * 3 * 2 * 2 * 8 * 2
SERVER = {"cpu_cache_token_page_size": PAGE}
CONFIG = {
    "model_type": "llama", "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "hidden_size": 32, "head_dim": 8, "rope_theta": 10000.0, "torch_dtype": "bfloat16",
}  # fmt: skip


def memory(pages: int = 96, nbytes: int = PAGE_BYTES) -> torch.Tensor:
    return torch.full((pages, nbytes), POISON, dtype=torch.uint8)


def model_folder(path: Path, **changes: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    (path / "model.safetensors").write_bytes(b"weights")
    return path


def server_of(folder: Path, **changes: Any) -> dict[str, Any]:
    """The arguments of a LightLLM server, as far as they matter."""
    return {
        "model_dir": str(folder), "model_name": "default_model_name", "data_type": "bfloat16", "quant_type": "none",
        "llm_kv_type": "None", "mtp_mode": None, "load_way": "HF", **SERVER, **changes,
    }  # fmt: skip


def contents(seed: int, count: int, nbytes: int = PAGE_BYTES) -> list[bytes]:
    draw = random.Random(seed)
    return [draw.randbytes(nbytes) for _ in range(count)]


def tokens_of(seed: int, pages: int) -> list[int]:
    return random.Random(seed).choices(range(32_000), k=pages * PAGE)


class TestOpaquePages(EngineContract):
    page_tokens = PAGE
    page_bytes = PAGE_BYTES

    def start(self, path: Path, files: Files | None = None) -> FakeEngine:
        tensor = memory()
        return FakeEngine(tensor, start(path, tensor, server=SERVER, files=files), PAGE, prompts=False)


class CanonicalEngine(FakeEngine):
    """Under a worker that tells prompts; pages are given and returned as canonical bytes."""

    def put(self, tokens: Any, pages: Any, first: int = 0) -> int:
        return super().put(tokens, [_lightllm(page) for page in pages], first)

    def get(self, tokens: Any, count: int) -> list[bytes | None]:
        return [None if page is None else _canonical(page) for page in super().get(tokens, count)]


def _lightllm(page: bytes) -> bytes:
    tensor = memory(1)
    set_canonical(tensor, 0, page, **SHAPE)
    return tensor[0].numpy().tobytes()


def _canonical(page: bytes) -> bytes:
    return canonical(torch.frombuffer(bytearray(page), dtype=torch.uint8)[None], 0, **SHAPE)


def patched(path: Path, folder: Path, files: Files | None = None, pages: int = 96, **settings: Any) -> CanonicalEngine:
    tensor = memory(pages)
    server = server_of(model_folder(folder))
    settings = {"weights_id": "", **settings}
    service = start(path, tensor, server=server, files=files, prompts=True, **settings)
    return CanonicalEngine(tensor, service, PAGE, prompts=True)


class TestCanonicalPages(EngineContract):
    page_tokens = PAGE
    page_bytes = PAGE_BYTES

    def start(self, path: Path, files: Files | None = None) -> FakeEngine:
        return patched(path, path.with_name("model"), files)


def engine_of(path: Path, files: Files | None = None, **settings: Any) -> FakeEngine:
    tensor = memory()
    return FakeEngine(tensor, start(path, tensor, server=SERVER, files=files, **settings), PAGE, prompts=False)


# ---------------------------------------------------------------- pages and names


def test_told_pages_are_canonical(memory_path: Path) -> None:
    """What LightLLM stores is found by token ids, and what is stored by token ids is found by LightLLM."""
    engine = patched(memory_path / "store", memory_path / "model")
    ns, tokens = engine.service._space, tokens_of(2, 70)
    first, second = contents(1, 40), contents(2, 30)
    assert engine.put(tokens[: 40 * PAGE], first) == 40
    with ns.match(tokens) as match:
        out = bytearray(match.nbytes)
        assert ns.get(match, out) == 40 and bytes(out) == b"".join(first)
    assert ns.put(tokens, b"".join(second), 40).stored == 30
    assert engine.lookup(tokens) == 70 and engine.get(tokens, 70) == first + second
    engine.close()


def test_pages_of_tokens_that_were_not_told_are_left_alone(memory_path: Path) -> None:
    engine = patched(memory_path / "store", memory_path / "model", pages=8)
    tokens = tokens_of(3, 4)
    names = hashes([*tokens, 0], PAGE)
    engine.service.tell_prompt(names[:2], tokens[: 2 * PAGE])
    states = ended(engine.service.create(names, torch.arange(4), "w"))
    assert states == [PyState.Finished] * 2 + [PyState.Aborted] * 2
    assert engine.service.query(names) == [True, True, False, False]
    assert ended(engine.service.create(names, torch.arange(4), "r"))[2:] == [PyState.Aborted] * 2
    assert engine.service.query(names[1:]) == [False] * 3, "a page is of its whole prefix"
    engine.close()


def test_a_hash_of_two_prompts_names_nothing(memory_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = patched(memory_path / "store", memory_path / "model", pages=8)
    names = hashes([*tokens_of(4, 3), 0], PAGE)
    engine.service.tell_prompt(names, tokens_of(4, 3))
    with caplog.at_level(logging.WARNING, "lightllm.kvfs"):
        engine.service.tell_prompt([*names[:2], 7, 8], [*tokens_of(4, 3)[: 1 * PAGE], *tokens_of(5, 3)])
    assert "two prompts have one hash" in caplog.text
    states = ended(engine.service.create(names, torch.arange(3), "w"))
    assert states == [PyState.Finished, PyState.Aborted, PyState.Aborted]
    engine.close()


def test_the_pages_told_last_are_remembered() -> None:
    prompts = Prompts(pages_max=4)
    chunks = [bytes([n]) * 32 for n in range(8)]
    assert prompts.tell([0, 1, 2, 3], chunks[:4]) and prompts.chunks([0, 1, 2, 3]) == chunks[:4]
    assert prompts.tell([0, 1, 4], [*chunks[:2], chunks[4]])
    assert prompts.chunks([0, 1, 4]) == [*chunks[:2], chunks[4]]
    assert prompts.chunks([0, 1, 2]) == chunks[:2], "the oldest was forgotten"
    assert prompts.chunks([1]) == [], "it is no first page"


def test_a_tail_is_loaded_where_the_engine_has_the_beginning(memory_path: Path) -> None:
    engine = engine_of(memory_path / "store")
    tokens, pages = tokens_of(6, 8), contents(6, 8)
    engine.put(tokens, pages)
    engine.tensor.fill_(POISON)
    task = engine.service.create(hashes([*tokens, 0], PAGE), torch.arange(40, 48), "r", start_pos=5)
    assert ended(task) == [PyState.Finished] * 3
    assert [engine.page(n) for n in range(45, 48)] == pages[5:]
    assert all(engine.page(n) == bytes([POISON]) * PAGE_BYTES for n in range(40, 45))
    engine.close()


def test_stored_pages_are_released_at_once(memory_path: Path) -> None:
    engine = engine_of(memory_path / "store")
    tokens, pages = tokens_of(7, 6), contents(7, 6)
    engine.put(tokens[: 4 * PAGE], pages[:4])
    names = hashes([*tokens, 0], PAGE)
    task = engine.service.create(names, torch.tensor([9, 8, 7, 6, 5, 4]), "w")
    assert task.page_already_list == [9, 8, 7, 6]
    assert ended(task) == [PyState.Finished] * 6 and task.data_safe()
    before = engine.counters()
    again = engine.service.create(names, torch.tensor([9, 8, 7, 6, 5, 4]), "w")
    assert again.ready() and again.data_safe() and again.page_already_list == [9, 8, 7, 6, 5, 4]
    assert engine.counters().get("bytes_written") == before.get("bytes_written")
    assert engine.service.active_threads("w") == engine.service.active_threads("r") == 0
    engine.close()


def test_two_servers_share_a_store(memory_path: Path) -> None:
    one, other = engine_of(memory_path / "store"), engine_of(memory_path / "store")
    tokens, pages = tokens_of(8, 5), contents(8, 5)
    assert one.put(tokens, pages) == 5
    assert other.lookup(tokens) == 5 and other.get(tokens, 5) == pages
    one.close()
    other.close()


# ---------------------------------------------------------------- disks, deadlines, aborts


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_save_that_fails_ends_and_frees_its_pages(memory_path: Path, error: int) -> None:
    files = FaultyFiles()
    engine = engine_of(memory_path / "store", files)
    tokens, pages = tokens_of(9, 20), contents(9, 20)
    files.arm(Fault(kind="pwritev", error=error, persistent=True))
    names = hashes([*tokens, 0], PAGE)
    task = engine.service.create(names, torch.arange(20), "w")
    ended(task, "data_safe")
    assert set(ended(task)) == {PyState.Aborted}
    files.arm()
    assert engine.lookup(tokens) == 0 and engine.put(tokens, pages) == 20
    assert engine.get(tokens, 20) == pages
    engine.close()


class Hanging(Files):
    """Reads of kvfs's load threads and writes of pages wait for ``go``."""

    def __init__(self) -> None:
        self.go, self.started = threading.Event(), threading.Event()
        self.go.set()

    def _wait(self) -> None:
        if threading.current_thread().name.startswith(("kvfs-read", "kvfs-write")) and not self.go.is_set():
            self.started.set()
            assert self.go.wait(60)

    def preadv(self, *arguments: Any) -> int:
        self._wait()
        return super().preadv(*arguments)

    def pwritev(self, *arguments: Any) -> int:
        self._wait()
        return super().pwritev(*arguments)


@pytest.mark.usefixtures("python_only")
def test_a_load_that_hangs_ends_and_moves_no_byte_afterwards(memory_path: Path) -> None:
    files = Hanging()
    engine = engine_of(memory_path / "store", files, load_seconds=0.3)
    tokens, pages = tokens_of(10, 4), contents(10, 4)
    engine.put(tokens, pages)
    engine.tensor.fill_(POISON)
    files.go.clear()
    task = engine.service.create(hashes([*tokens, 0], PAGE), torch.arange(4), "r")
    assert files.started.wait(60) and engine.service.active_threads("r") == 1
    assert set(ended(task)) == {PyState.Aborted}
    assert engine.service.active_threads("r") == 0
    files.go.set()
    engine.close()  # waits for the transfer
    assert bool((engine.tensor == POISON).all())


@pytest.mark.usefixtures("python_only")
def test_a_save_that_hangs_gives_its_pages_back_and_ends(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tasks, "GRACE_SECONDS", 0.2)
    files = Hanging()
    engine = engine_of(memory_path / "store", files, store_seconds=0.3)
    tokens, pages = tokens_of(13, 4), contents(13, 4)
    for number, page in enumerate(pages):
        engine.tensor[number] = torch.frombuffer(bytearray(page), dtype=torch.uint8)
    files.go.clear()
    task = engine.service.create(hashes([*tokens, 0], PAGE), torch.arange(4), "w")
    assert files.started.wait(60)
    ended(task, "data_safe")
    engine.tensor.fill_(0xEE)  # of the next owner
    assert set(ended(task)) == {PyState.Aborted} and "a save took too long" in caplog.text
    assert engine.service.active_threads("w") == 0
    files.go.set()
    engine.close()
    with_pages = engine_of(memory_path / "store")
    count = with_pages.lookup(tokens)
    assert with_pages.get(tokens, count) == pages[:count]
    with_pages.close()


@pytest.mark.parametrize("mode", ["r", "w"])
def test_an_abort_races_with_the_reuse_of_pages(memory_path: Path, mode: str) -> None:
    """Behind an abort a page has another owner: no load writes to it, and no save stores what it holds then."""
    engine = engine_of(memory_path / "store")
    draw, stored = random.Random(11), 0
    for n in range(60):
        tokens, pages = tokens_of(1000 + n, 12), contents(n, 12)
        names = hashes([*tokens, 0], PAGE)
        if mode == "r":
            assert engine.put(tokens, pages) == 12
        for page in range(12):
            engine.tensor[page] = torch.frombuffer(bytearray(pages[page]), dtype=torch.uint8)
        if mode == "r":
            engine.tensor.fill_(POISON)
        task = engine.service.create(names, torch.arange(12), mode)
        if n % 4:
            time.sleep(draw.random() * 0.002)
        else:
            ended(task)
        engine.service.abort(task)
        assert task.ready() and task.data_safe()
        engine.tensor.fill_(0xEE)  # of the next owner
        assert all(state in (PyState.Finished, PyState.Aborted) for state in task.state())
        time.sleep(0.001)
        assert bool((engine.tensor == 0xEE).all()), "an aborted load wrote to a page"
        if mode == "w":
            count = engine.lookup(tokens)
            stored += count
            assert not count or engine.get(tokens, count) == pages[:count], "a page was stored after its abort"
    assert mode == "r" or stored >= 15 * 12
    assert engine.service.active_threads(mode) == 0
    engine.close()


# ---------------------------------------------------------------- how LightLLM finds it


def test_lightllm_imports_it_by_the_printed_path(memory_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    where = subprocess.run(
        [sys.executable, "-m", "kvfs.integrations.lightllm"],
        cwd=root, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    code = "import light_mem; print(light_mem.PyLocalCacheService.__module__, light_mem.PyState.Finished.value)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=memory_path, env={"PYTHONPATH": f"{where.stdout.strip()}:{root}", "PATH": "/usr/bin"}, capture_output=True,
        text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout.split() == [PyLocalCacheService.__module__, "2"], done.stderr


def test_the_store_is_in_the_directory_of_the_disk_cache(memory_path: Path) -> None:
    tensor, file = memory(4), str(memory_path / "cache_file")
    server = {**SERVER, "disk_cache_dir": str(memory_path)}
    with environment({"weights_id": "0123abcd", "ring_bytes": "8MiB"}, server):
        service = PyLocalCacheService(
            kvcache_tensor=tensor, file=file, storage_size=32 << 20, num_shard=8, num_worker=24
        )  # fmt: skip
    assert service._store.path == f"{file}.kvfs" and service._store.settings.capacity_bytes == 32 << 20
    assert (service._n, service._page_size) == (1, PAGE_BYTES)
    service.close()
    with environment({"weights_id": "0123abcd"}, SERVER), pytest.raises(ConfigError, match="--disk_cache_dir"):
        PyLocalCacheService(tensor, file)


# ---------------------------------------------------------------- identity


def identity(path: Path, server: Mapping[str, Any], *, prompts: bool = False, **settings: Any) -> bytes:
    settings = {"weights_id": "", **settings}
    service = start(path, memory(4), server=server, prompts=prompts, **settings)
    service.close()
    return service.identity


def test_what_changes_kv_changes_the_namespace(memory_path: Path) -> None:
    folder, path = model_folder(memory_path / "model"), memory_path / "store"
    quant = memory_path / "quant.yaml"
    quant.write_text("a: 1")
    server = server_of(folder)
    found = {identity(path, server), identity(path, server, prompts=True)}
    changes: list[dict[str, Any]] = [
        {"data_type": "float16"}, {"quant_type": "fp8w8a8"}, {"llm_kv_type": "int8kv"}, {"quant_cfg": str(quant)},
        {"mtp_mode": "eagle_with_att", "mtp_step": 1, "mtp_draft_model_dir": str(folder)}, {"expert_dtype": "fp4"},
        {"cpu_cache_token_page_size": 128}, {"linear_att_page_block_num": 4},
    ]  # fmt: skip
    found |= {identity(path, {**server, **change}) for change in changes}
    quant.write_text("a: 2")
    found.add(identity(path, {**server, "quant_cfg": str(quant)}))
    (folder / "model.safetensors").write_bytes(b"others!")
    found.add(identity(path, server))
    assert len(found) == 12
    assert identity(path, server) == identity(path, {**server, "port": 9, "tp": 8}), "neither ports nor ranks do"


def test_a_model_that_is_not_understood_is_opaque(memory_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = model_folder(memory_path / "model", num_hidden_layers=4)
    with caplog.at_level(logging.INFO, "lightllm.kvfs"):
        opaque = identity(memory_path / "store", server_of(folder), prompts=True)
    assert opaque == identity(memory_path / "store", server_of(folder)) and "pages are opaque" in caplog.text


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("server", "settings", "message"),
    [
        ({"enable_multimodal": True}, {}, "--disable_vision --disable_audio"),
        ({"enable_rl": True}, {}, "--enable_rl"),
        ({"cpu_cache_token_page_size": 8}, {}, "--cpu_cache_token_page_size is 8: pass 64"),
        ({"model_dir": "/nowhere/model"}, {}, '"weights_id"'),
        ({"quant_cfg": "/nowhere/q.yaml"}, {}, "--quant_cfg /nowhere/q.yaml cannot be read"),
        ({}, {"share": "engines"}, "lightllm-prompts.patch"),
        ({}, {"pth": "/x"}, "'pth'"),
    ],
)
def test_what_cannot_be_kept_is_refused_before_a_store_is_made(
    memory_path: Path, server: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    given = server_of(model_folder(memory_path / "model"), **server)
    with pytest.raises(ConfigError, match=message):
        start(memory_path / "store", memory(4), server=given, **{"weights_id": "", **settings})
    assert not (memory_path / "store").exists()


@pytest.mark.parametrize(
    ("server", "config", "message"),
    [
        ({"quant_type": "fp8w8a8"}, {}, "--quant_type fp8w8a8 changes KV"),
        ({"llm_kv_type": "int8kv"}, {}, "--llm_kv_type int8kv changes KV"),
        ({"mtp_mode": "eagle_with_att", "mtp_step": 1}, {}, "--mtp_mode eagle_with_att changes KV"),
        ({"data_type": None}, {}, "--data_type is None"),
        ({}, {"num_hidden_layers": 4}, "by .*config.json and --data_type they have"),
        ({}, {"model_type": "gpt_neo"}, "gpt_neo"),
        ({}, {"model_type": "deepseek_v3", "kv_lora_rank": 16, "qk_rope_head_dim": 8}, "keys and values only"),
    ],
)
def test_what_other_engines_do_not_know_is_not_shared(
    memory_path: Path, server: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    given = server_of(model_folder(memory_path / "model", **config), **server)
    with pytest.raises(UnsupportedModelError, match=message):
        start(memory_path / "store", memory(4), server=given, prompts=True, share="engines", weights_id="")
    assert not (memory_path / "store").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "JSON object"),
        ("{", "JSON object"),
        ('{"pth": 1}', "'pth'"),
        ('{"path": 7}', "path in KVFS_LIGHTLLM is 7"),
        ('{"threads": 0}', "threads"),
        ('{"share": "all"}', "engines"),
        ('{"load_seconds": 100}', "load_seconds in KVFS_LIGHTLLM is 100"),
        ('{"capacity": "many"}', "capacity"),
        ('{"codec": "zip"}', "codec"),
        ('{"ttl": "soon"}', "ttl"),
    ],
)
def test_settings_name_the_value_and_the_variable(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings_of({"KVFS_LIGHTLLM": text})


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros((4, 2, 64), dtype=torch.uint8),
        torch.zeros((4, 64), dtype=torch.float16),
        torch.zeros((8, 64), dtype=torch.uint8)[::2],
        torch.zeros((4, 64), dtype=torch.uint8, device="meta"),
        torch.zeros((0, 64), dtype=torch.uint8),
    ],
    ids=["3-D", "halves", "gaps", "elsewhere", "empty"],
)
def test_a_tensor_that_is_no_cpu_cache_is_refused(memory_path: Path, tensor: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match="kvcache_tensor is"):
        start(memory_path / "store", tensor)
    assert not (memory_path / "store").exists()


def test_calls_that_do_not_fit_are_refused(memory_path: Path) -> None:
    engine = engine_of(memory_path / "store")
    create, names = engine.service.create, hashes([*tokens_of(12, 3), 0], PAGE)
    for bad, message in (
        (lambda: create(names, torch.arange(3), "x"), "mode is 'x'"),
        (lambda: create(names, torch.arange(2), "w"), "2 pages for 3 hashes"),
        (lambda: create(names, torch.tensor([0, 1, 96]), "w"), "no page 96: the tensor has 0 to 95"),
        (lambda: create(names, torch.tensor([0, 1, -1]), "r"), "no page -1"),
        (lambda: create(names, torch.arange(3), "r", start_pos=4), "start_pos is 4"),
        (lambda: create([1 << 128], torch.arange(1), "w"), "more than 128 bits"),
        (lambda: engine.service.active_threads("x"), "mode is 'x'"),
    ):
        with pytest.raises(ConfigError, match=message):
            bad()
    nothing = create([], torch.tensor([], dtype=torch.int32), "w")
    assert nothing.ready() and nothing.state() == [] and engine.service.query([]) == []
    engine.close()
