"""The adapter of SGLang's hierarchical cache over pools of its layouts; tests/sglang has SGLang itself."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kvfs
from kvfs.errors import ConfigError, UnsupportedModelError
from kvfs.integrations.sglang import attachment as module
from kvfs.integrations.sglang.ranks import Rank
from kvfs.integrations.sglang.settings import settings_of
from kvfs.system.files import Files
from kvfs.testing import EngineContract
from tests.integrations.sglang_pools import (
    LAYOUTS,
    FakeEngine,
    MHATokenToKVPoolHost,
    MLATokenToKVPoolHost,
    hashes,
    page_bytes,
    page_of,
    poison,
    set_page,
    slots,
)

PAGE = 64
POOL = {"page_size": PAGE, "pages": 96}


class TestHiCache(EngineContract):
    page_tokens = PAGE
    page_bytes = page_bytes(MHATokenToKVPoolHost())

    def start(self, path: Path, files: Files | None = None) -> FakeEngine:
        return FakeEngine.start(path, MHATokenToKVPoolHost(), files=files)


def contents(pool: Any, count: int, seed: int = 0) -> list[bytes]:
    draw = torch.Generator().manual_seed(seed)
    nbytes = page_bytes(pool)
    return [torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=draw).numpy().tobytes() for _ in range(count)]


def tokens_of(seed: int, pages: int, page: int = PAGE) -> list[int]:
    return torch.randint(0, 32_000, (pages * page,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("page_size", [16, 64, 128])
@pytest.mark.parametrize("latent", [False, True], ids=["mha", "mla"])
def test_pages_of_one_layout_are_read_in_every_other(memory_path: Path, latent: bool, page_size: int) -> None:
    kind = MLATokenToKVPoolHost if latent else MHATokenToKVPoolHost
    layouts = [name for name in LAYOUTS if not latent or name != "page_head"]
    tokens, pages = tokens_of(1, 5, page_size), contents(kind(page_size=page_size, pages=8), 5)
    for layout in layouts:
        engine = FakeEngine.start(memory_path / "store", kind(layout, page_size=page_size, pages=8))
        if layout == layouts[0]:
            assert engine.put(tokens, pages) == 5
        assert engine.lookup(tokens) == 5 and engine.get(tokens, 5) == pages, layout
        engine.close()


def test_pages_are_canonical(memory_path: Path) -> None:
    """What SGLang stores is found by token ids, and what is stored by token ids is found by SGLang."""
    engine = FakeEngine.start(memory_path / "store", MHATokenToKVPoolHost())
    ns, tokens = engine.pages.attached.space, tokens_of(2, 70)
    first, second = contents(engine.pool, 40), contents(engine.pool, 30, seed=1)
    engine.put(tokens[: 40 * PAGE], first)
    with ns.match(tokens) as match:
        out = bytearray(match.nbytes)
        assert ns.get(match, out) == 40 and bytes(out) == b"".join(first)
    assert ns.put(tokens, b"".join(second), 40).stored == 30
    assert engine.lookup(tokens) == 70 and engine.get(tokens, 70) == first + second
    engine.close()


DEGREES = [(1, 2), (2, 1), (2, 4), (4, 2), (4, 1), (1, 4), (4, 8), (8, 1)]


@pytest.mark.parametrize(("writers", "readers"), DEGREES)
def test_tensor_parallel_degrees_read_each_other(memory_path: Path, writers: int, readers: int) -> None:
    """4 KV heads on 1 to 8 ranks: with 8, two ranks hold the same head, and each stores half of the pages."""
    total, tokens = 4, tokens_of(3, 6)
    whole = MHATokenToKVPoolHost(heads=total, pages=8)
    pages = contents(whole, 6)
    for n, page in enumerate(pages):
        set_page(whole, n, page)

    def engine_of(rank: int, size: int) -> FakeEngine:
        pool = MHATokenToKVPoolHost("layer_first", heads=max(1, total // size), pages=8)
        return FakeEngine.start(memory_path / "store", pool, rank=Rank(rank, size), kv_heads=total)

    def share(rank: int, size: int, engine: FakeEngine) -> None:
        """The rank's heads of the whole pool."""
        first = Rank(rank, size).heads(total)[0]
        for mine, all_heads in zip(
            (engine.pool.k_buffer, engine.pool.v_buffer), (whole.k_buffer, whole.v_buffer), strict=True
        ):
            mine[:, : 6 * PAGE] = all_heads[: 6 * PAGE, :, first : first + engine.pool.head_num].transpose(0, 1)

    for rank in range(writers):
        engine = engine_of(rank, writers)
        assert engine.lookup(tokens) < 6, "some rank has not stored its share"
        share(rank, writers, engine)
        assert engine.save(hashes(tokens, PAGE), range(6), []) == 6
        engine.close()
    for rank in range(readers):
        engine = engine_of(rank, readers)
        assert engine.lookup(tokens) == 6
        found = engine.get(tokens, 6)
        poison(engine.pool)
        share(rank, readers, engine)
        assert found == [page_of(engine.pool, n) for n in range(6)]
        engine.close()


def test_pipeline_stages_make_whole_pages(memory_path: Path) -> None:
    tokens = tokens_of(4, 4)
    whole = MHATokenToKVPoolHost("layer_first", layers=5, pages=8)
    pages = contents(whole, 4)
    for n, page in enumerate(pages):
        set_page(whole, n, page)
    for stage, layers in enumerate((range(3), range(3, 5))):
        pool = MHATokenToKVPoolHost("layer_first", layers=len(layers), start_layer=layers[0], pages=8)
        engine = FakeEngine.start(memory_path / "store", pool, rank=Rank(pp=stage, pp_size=2), layers=5)
        assert engine.lookup(tokens) == 0
        pool.kv_buffer[:, :, : 4 * PAGE] = whole.kv_buffer[:, list(layers), : 4 * PAGE]
        assert engine.save(hashes(tokens, PAGE), range(4), []) == 4
        engine.close()
    engine = FakeEngine.start(memory_path / "store", MHATokenToKVPoolHost(layers=5, pages=8))
    assert engine.lookup(tokens) == 4 and engine.get(tokens, 4) == pages
    engine.close()


def test_a_long_prompt_is_found_in_batches_whose_prefix_is_not_told(memory_path: Path) -> None:
    """SGLang says nothing of what is before a prompt's first batch, and then neither before its next ones."""
    engine = FakeEngine.start(memory_path / "store", MHATokenToKVPoolHost(page_size=16, pages=300))
    tokens, pages = tokens_of(5, 290, 16), contents(engine.pool, 290)
    names = hashes(tokens, 16)
    assert engine.put(tokens, pages) == 290
    assert [engine.pages.exists(names[at : at + 128], None) for at in (0, 128, 256)] == [128, 128, 34]
    poison(engine.pool)
    for at in (0, 128, 256):
        batch = names[at : at + 128]
        assert all(engine.pages.load(batch, slots(engine.pool, range(at, at + len(batch))), None))
    assert [page_of(engine.pool, n) for n in range(290)] == pages
    engine.close()


def test_without_prefix_keys_nothing_is_stored(memory_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine.start(memory_path / "store", MHATokenToKVPoolHost())
    names = hashes(tokens_of(6, 8), PAGE)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert engine.save(names, range(8), None) == 0
    assert [r.message for r in caplog.records if "hicache_storage_pass_prefix_keys" in r.message] != []
    assert len([r for r in caplog.records if "stores nothing" in r.message]) == 1, "it is said once"
    assert engine.counters().get("pages_stored", 0) == 0
    engine.close()


def test_a_transfer_that_is_late_is_given_up_and_the_pool_is_left_alone(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk hangs in a read: the call returns after its deadline, and nothing reaches the pool afterwards."""
    hang, started = threading.Event(), threading.Event()

    class HangingFiles(Files):
        def preadv(self, fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
            if threading.current_thread().name.startswith("kvfs-read") and hang is not None and not hang.is_set():
                started.set()
                hang.wait(60)
            return super().preadv(fd, buffers, offset, flags)

    monkeypatch.setattr(module, "GRACE_SECONDS", 0.2)
    hang.set()
    engine = FakeEngine.start(
        memory_path / "store", MHATokenToKVPoolHost(pages=8), files=HangingFiles(), load_seconds=0.1
    )
    tokens, pages = tokens_of(7, 4), contents(engine.pool, 4)
    assert engine.put(tokens, pages) == 4
    hang.clear()
    assert engine.get(tokens, 4) == [None] * 4 and started.is_set()
    before = engine.pool.kv_buffer.clone()
    hang.set()
    engine.close()
    assert torch.equal(engine.pool.kv_buffer.view(torch.int16), before.view(torch.int16))


def test_a_close_ends_what_is_under_way(memory_path: Path) -> None:
    engine = FakeEngine.start(memory_path / "store", MHATokenToKVPoolHost())
    tokens, pages = tokens_of(8, 40), contents(engine.pool, 40)
    errors, stop = list[BaseException](), threading.Event()

    def work() -> None:
        while not stop.is_set():
            try:
                engine.put(tokens, pages)
                engine.pages.exists(hashes(tokens, PAGE), None)
            except ConfigError:  # closed
                return
            except BaseException as exc:
                errors.append(exc)
                return

    thread = threading.Thread(target=work)
    thread.start()
    engine.close()
    stop.set()
    thread.join(60)
    assert not thread.is_alive() and not errors


# ---------------------------------------------------------------- bad input


def pool_with(**attributes: Any) -> MHATokenToKVPoolHost:
    pool = MHATokenToKVPoolHost(pages=8)
    for name, value in attributes.items():
        setattr(pool, name, value)
    return pool


class PageInterleaveHostPool(MHATokenToKVPoolHost):
    pass


@pytest.mark.parametrize(
    ("pool", "how", "message"),
    [
        (PageInterleaveHostPool(pages=2), {}, "PageInterleaveHostPool"),
        (pool_with(layout="page_unified"), {}, "--hicache-mem-layout"),
        (pool_with(page_size=8), {}, "--page-size 64"),
        (pool_with(target_layer_num=2), {}, "--speculative-algorithm"),
        (pool_with(dtype="torch.float8_e4m3fn"), {}, "--kv-cache-dtype auto"),
        (pool_with(), {"kv_heads": 3}, "correct kv_heads"),
        (pool_with(), {"kv_heads": 4}, "correct kv_heads"),
        (pool_with(), {"layers": 2}, "correct layers"),
        (pool_with(), {"rank": Rank(0, 2)}, '"kv_heads"'),
        (pool_with(), {"rank": Rank(0, 1, 0, 2)}, '"layers"'),
        (pool_with(), {"rank": Rank(0, 4), "kv_heads": 6}, "do not share 4 ranks evenly"),
        (pool_with(), {"weights_id": ""}, '"weights_id"'),
        (pool_with(), {"share": "engines"}, "config.json"),
    ],
    ids=lambda value: None if isinstance(value, (dict, str)) else type(value).__name__,
)
def test_what_cannot_be_kept_is_refused_before_a_store_is_made(
    memory_path: Path, pool: Any, how: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, UnsupportedModelError), match=message):
        FakeEngine.start(memory_path / "store", pool, **how)
    assert not (memory_path / "store").exists()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "KVFS_DIR"),
        ({"path": ""}, "path is ''"),
        ({"path": "/x", "pth": 1}, "'pth'"),
        ({"path": "/x", "threads": 0}, "threads"),
        ({"path": "/x", "kv_heads": "8"}, "kv_heads"),
        ({"path": "/x", "share": "all"}, "engines"),
        ({"path": "/x", "load_seconds": 0}, "load_seconds"),
        ({"path": "/x", "capacity": "many"}, "capacity"),
        ({"path": "/x", "codec": "zip"}, "codec"),
        ({"path": "/x", "ttl": "soon"}, "ttl"),
    ],
)
def test_settings_name_the_value_and_the_flag(
    monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any], message: str
) -> None:
    monkeypatch.delenv("KVFS_DIR", raising=False)
    with pytest.raises(ConfigError, match=message):
        settings_of(extra)


def test_context_parallel_ranks_are_refused() -> None:
    config = SimpleNamespace(attn_cp_size=2, dcp_size=1, tp_rank=0, tp_size=2, pp_rank=0, pp_size=1)
    with pytest.raises(UnsupportedModelError, match="--attn-cp-size"):
        Rank.of(config)


def test_keys_and_slots_that_sglang_does_not_make_are_refused(memory_path: Path) -> None:
    engine = FakeEngine.start(memory_path / "store", MHATokenToKVPoolHost(pages=8))
    name = hashes(tokens_of(9, 1), PAGE)[0]
    for bad in ("", "x" * 64, name[:-1], name + "00", 7):
        with pytest.raises(ConfigError, match="page key"):
            engine.pages.exists([bad], None)  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="slots for 1 pages"):
        engine.pages.save([name], torch.arange(PAGE - 1), [])
    with pytest.raises(ConfigError, match="not a multiple"):
        engine.pages.load([name], torch.arange(1, PAGE + 1), [])
    engine.close()


# ---------------------------------------------------------------- identity

CONFIG = {
    "model_type": "llama", "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "hidden_size": 32, "rope_theta": 10000.0, "torch_dtype": "bfloat16",
}  # fmt: skip


def model_folder(path: Path, **changes: Any) -> SimpleNamespace:
    """A local model and the arguments of a server of it."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    (path / "model.safetensors").write_bytes(b"weights")
    return SimpleNamespace(model_path=str(path), revision=None, load_format="auto", dtype="auto", quantization=None)


def test_heads_layers_and_weights_come_from_the_model(memory_path: Path, tmp_path: Path) -> None:
    server = model_folder(tmp_path / "model")
    pool = MHATokenToKVPoolHost(heads=1, pages=8)
    engine = FakeEngine.start(memory_path / "store", pool, rank=Rank(1, 2), server=server, weights_id="")
    space = engine.pages.attached.space
    assert (space.layout.groups[0].heads, len(space.layout.groups[0].layers)) == (2, 3)
    assert space.identity.revision.startswith("model-") and space.name == "org/model"
    engine.close()
    other = model_folder(tmp_path / "other", rope_theta=500000.0)
    engine = FakeEngine.start(memory_path / "store", pool, rank=Rank(1, 2), server=other, weights_id="")
    assert engine.pages.attached.space.identity.digest != space.identity.digest, (
        "the config is part of what identifies weights"
    )
    engine.close()


def test_shared_pages_are_those_of_every_engine(memory_path: Path, tmp_path: Path) -> None:
    server = model_folder(tmp_path / "model")
    engine = FakeEngine.start(
        memory_path / "store", MHATokenToKVPoolHost(pages=8), server=server, weights_id="a" * 40, share="engines"
    )
    identity = kvfs.shared_identity(CONFIG, "a" * 40, dtype="bfloat16", page_tokens=PAGE)
    tokens, pages = tokens_of(10, 4), contents(engine.pool, 4)
    with kvfs.open(memory_path / "store") as store:
        ns = store.namespace(**identity)
        assert ns.put(tokens, b"".join(pages)).stored == 4
    assert engine.lookup(tokens) == 4 and engine.get(tokens, 4) == pages
    engine.close()
    for name, value in (("quantization", "fp8"), ("json_model_override_args", '{"rope_theta": 1}')):
        setattr(server, name, value)
        with pytest.raises(ConfigError, match=name.replace("_", "-")):
            FakeEngine.start(memory_path / "store", MHATokenToKVPoolHost(pages=8), server=server, share="engines")
        setattr(server, name, None)


def test_clear_removes_the_pages_of_this_namespace_only(memory_path: Path) -> None:
    first = FakeEngine.start(memory_path / "store", MHATokenToKVPoolHost())
    second = FakeEngine.start(memory_path / "store", MHATokenToKVPoolHost(), weights_id="ffff")
    tokens, pages = tokens_of(11, 4), contents(first.pool, 4)
    assert first.put(tokens, pages) == second.put(tokens, pages) == 4
    first.pages.clear()
    assert (first.lookup(tokens), second.lookup(tokens)) == (0, 4)
    first.close()
    second.close()
