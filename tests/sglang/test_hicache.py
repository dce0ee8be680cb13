"""KvfsHiCache under SGLang's own controller, host pools and threads."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageFailureInjector, PoolHitPolicy, PoolName, PoolTransfer

import kvfs
from kvfs.errors import ConfigError, UnsupportedModelError
from kvfs.integrations.sglang.ranks import Rank
from kvfs.system.files import Files
from kvfs.testing import EngineContract
from tests.integrations.sglang_pools import LAYOUTS, page_bytes, page_of, poison, set_page, slots
from tests.sglang.engine import RealEngine, host_pool

PAGE = 64


class TestHiCache(EngineContract):
    page_tokens = PAGE
    page_bytes = page_bytes(host_pool(pages=2)[1])

    def start(self, path: Path, files: Files | None = None) -> RealEngine:
        return RealEngine(path, files=files)


def contents(pool: Any, count: int, seed: int = 0) -> list[bytes]:
    draw, nbytes = random.Random(seed), page_bytes(pool)
    return [draw.randbytes(nbytes) for _ in range(count)]


def tokens_of(seed: int, pages: int, page: int = PAGE) -> list[int]:
    return random.Random(seed).choices(range(32_000), k=pages * page)


@pytest.mark.parametrize("page", [16, 64, 128])
@pytest.mark.parametrize("latent", [False, True], ids=["mha", "mla"])
def test_pages_of_one_layout_are_read_in_every_other(memory_path: Path, latent: bool, page: int) -> None:
    layouts = [name for name in LAYOUTS if not latent or name != "page_head"]
    tokens = tokens_of(1, 5, page)
    pages = contents(host_pool(latent=latent, page=page, pages=2)[1], 5)
    for layout in layouts:
        engine = RealEngine(memory_path / "store", pool=host_pool(layout, latent=latent, page=page, pages=8))
        if layout == layouts[0]:
            assert engine.put(tokens, pages) == 5
        assert engine.lookup(tokens) == 5 and engine.get(tokens, 5) == pages, layout
        engine.close()


def test_prompts_of_token_ids_and_of_sglang_are_the_same(memory_path: Path) -> None:
    engine = RealEngine(memory_path / "store")
    ns, tokens = engine.backend._pages.attached.space, tokens_of(2, 60)
    first, second = contents(engine.pool, 40), contents(engine.pool, 20, seed=1)
    assert engine.put(tokens[: 40 * PAGE], first) == 40
    with ns.match(tokens) as match:
        out = bytearray(match.nbytes)
        assert ns.get(match, out) == 40 and bytes(out) == b"".join(first)
    assert ns.put(tokens, b"".join(second), 40).stored == 20
    assert engine.lookup(tokens) == 60 and engine.get(tokens, 60) == first + second
    engine.close()


@pytest.mark.parametrize("writers", [1, 2, 4])
@pytest.mark.parametrize("readers", [1, 2, 4])
@pytest.mark.parametrize("total", [4, 2], ids=["shares", "replicas"])
def test_tensor_parallel_degrees_read_each_other(memory_path: Path, writers: int, readers: int, total: int) -> None:
    """With 2 KV heads on 4 ranks, two ranks hold the same head, and each stores half of the pages."""
    tokens, (_, whole) = tokens_of(3, 6), host_pool("layer_first", heads=total, pages=8)
    for n, page in enumerate(contents(whole, 6)):
        set_page(whole, n, page)

    def engine_of(rank: int, size: int) -> RealEngine:
        pool = host_pool("layer_first", heads=max(1, total // size), pages=8)
        return RealEngine(memory_path / "store", pool=pool, rank=Rank(rank, size), kv_heads=total)

    def share(rank: int, size: int, pool: Any) -> None:
        first = Rank(rank, size).heads(total)[0]
        pool.kv_buffer[:, :, : 6 * PAGE] = whole.kv_buffer[:, :, : 6 * PAGE, first : first + pool.head_num]

    for rank in range(writers):
        engine = engine_of(rank, writers)
        assert engine.lookup(tokens) < 6, "some rank has not stored its share"
        share(rank, writers, engine.pool)
        assert engine.save(tokens, range(6)) == 6
        engine.close()
    for rank in range(readers):
        engine = engine_of(rank, readers)
        assert engine.lookup(tokens) == 6
        found = engine.get(tokens, 6)
        share(rank, readers, engine.pool)
        assert found != [page_of(engine.pool, n) for n in range(6)][::-1]
        assert found == [page_of(engine.pool, n) for n in range(6)]
        engine.close()


def test_pipeline_stages_make_whole_pages(memory_path: Path) -> None:
    tokens, (_, whole) = tokens_of(4, 4), host_pool("layer_first", layers=5, pages=8)
    pages = contents(whole, 4)
    for n, page in enumerate(pages):
        set_page(whole, n, page)
    for stage, layers in enumerate((range(3), range(3, 5))):
        pool = host_pool("layer_first", layers=len(layers), start_layer=layers[0], pages=8)
        engine = RealEngine(memory_path / "store", pool=pool, rank=Rank(pp=stage, pp_size=2), layers=5)
        assert engine.lookup(tokens) == 0
        engine.pool.kv_buffer[:, :, : 4 * PAGE] = whole.kv_buffer[:, list(layers), : 4 * PAGE]
        assert engine.save(tokens, range(4)) == 4
        engine.close()
    engine = RealEngine(memory_path / "store", pool=host_pool(layers=5, pages=8))
    assert engine.lookup(tokens) == 4 and engine.get(tokens, 4) == pages
    engine.close()


def test_a_prompt_of_several_batches(memory_path: Path) -> None:
    """SGLang moves 128 pages at a time, and says nothing of what is before the first batch of a prompt."""
    engine = RealEngine(memory_path / "store", pool=host_pool(page=16, pages=300))
    tokens, pages = tokens_of(5, 290, 16), contents(engine.pool, 290)
    assert engine.put(tokens, pages) == 290
    assert engine.lookup(tokens) == 290 and engine.get(tokens, 290) == pages
    engine.close()


def test_failures_and_delays_of_sglang_s_injector(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.02")
    engine = RealEngine(memory_path / "store", pool=host_pool(page=16, pages=300))
    assert isinstance(engine.controller.storage_backend, HiCacheStorageFailureInjector)
    served = 0
    for seed in range(12):
        tokens, pages = tokens_of(seed, 20, 16), contents(engine.pool, 20, seed)
        engine.put(tokens, pages)
        found = engine.lookup(tokens)
        assert 0 <= found <= 20
        if found:
            got = engine.get(tokens, found)
            assert all(have in (None, want) for have, want in zip(got, pages, strict=False))
            served += sum(have is not None for have in got)
    assert served, "everything failed: the test shows nothing"
    engine.close()


def test_a_detach_with_transfers_under_way(memory_path: Path) -> None:
    """It ends soon, nothing moves in the pool afterwards, and what is found by the next engine is right."""
    pool = host_pool(page=16, pages=300)
    engine = RealEngine(memory_path / "store", pool=pool)
    prompts = [(tokens_of(seed, 20, 16), contents(engine.pool, 20, seed)) for seed in range(12)]
    for n, (tokens, pages) in enumerate(prompts):
        mine = range(20 * n, 20 * n + 20)
        for page, content in zip(mine, pages, strict=True):
            set_page(engine.pool, page, content)
        engine.submit(tokens, mine)
    began = time.monotonic()
    engine.close()
    assert time.monotonic() - began < 40
    poison(engine.pool)
    before = engine.pool.kv_buffer.clone()
    time.sleep(0.3)
    assert torch.equal(engine.pool.kv_buffer.view(torch.int16), before.view(torch.int16))
    engine = RealEngine(memory_path / "store", pool=pool)
    for tokens, pages in prompts:
        found = engine.lookup(tokens)
        assert found == 0 or engine.get(tokens, found) == pages[:found]
    engine.close()


def test_two_engines_of_one_store(memory_path: Path) -> None:
    engines = [RealEngine(memory_path / "store", pool=host_pool(page=16, pages=100)) for _ in range(2)]
    prompts = [(tokens_of(seed, 20, 16), contents(engines[0].pool, 20, seed)) for seed in range(8)]

    def work(engine: RealEngine, mine: list[Any]) -> None:
        for tokens, pages in mine:
            assert engine.put(tokens, pages) == 20

    threads = [threading.Thread(target=work, args=(e, prompts if n else prompts[::-1])) for n, e in enumerate(engines)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for engine in engines:
        assert all(engine.lookup(tokens) == 20 and engine.get(tokens, 20) == pages for tokens, pages in prompts)
        engine.close()


def test_without_the_flag_for_prefix_keys_nothing_is_stored(
    memory_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = RealEngine(memory_path / "store", pass_prefix=False)
    tokens, pages = tokens_of(6, 8), contents(engine.pool, 8)
    assert engine.put(tokens, pages) == 0 == engine.lookup(tokens)
    assert "hicache_storage_pass_prefix_keys" in caplog.text
    engine.close()


# ---------------------------------------------------------------- refused


def test_a_wrong_number_of_kv_heads_is_refused(memory_path: Path) -> None:
    """Over a pool of 2 heads it would make pages that never become whole."""
    with pytest.raises(ValueError, match="correct kv_heads"):
        RealEngine(memory_path / "store", kv_heads=3)
    assert not (memory_path / "store").exists()


@pytest.mark.parametrize("extra", [{"interface_v1": 0}, {"weights_id": ""}, {"surprise": 1}])
def test_bad_settings_are_refused_at_the_attach(memory_path: Path, extra: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"interface_v1|weights_id|surprise"):
        RealEngine(memory_path / "store", **extra)
    assert not (memory_path / "store").exists()


def test_pools_other_than_full_attention_are_refused_at_the_attach_and_later(memory_path: Path) -> None:
    engine = RealEngine(memory_path / "store")
    with pytest.raises(UnsupportedModelError, match=r"draft.*--speculative-algorithm"):
        engine.backend.register_mem_host_pool_v2(engine.pool, PoolName.DRAFT)
    engine.close()


def test_transfers_of_other_pools_find_nothing(memory_path: Path) -> None:
    engine = RealEngine(memory_path / "store")
    tokens, pages = tokens_of(7, 4), contents(engine.pool, 4)
    engine.put(tokens, pages)
    names = [h.hex() for h in engine.backend._pages.attached.space.chunk_hashes(tokens)]
    window = PoolTransfer(PoolName.SWA, keys=names[-1:], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    assert engine.backend.batch_exists_v2(names, [window]).kv_hit_pages == 0
    assert engine.backend.batch_exists_v2(names).restorable_prefix_pages == [1, 2, 3, 4]
    poison(engine.pool)
    both = [window, PoolTransfer(PoolName.KV, host_indices=slots(engine.pool, range(4)), keys=names)]
    assert engine.backend.batch_get_v2(both) == {PoolName.SWA: [False], PoolName.KV: [True] * 4}
    assert [page_of(engine.pool, n) for n in range(4)] == pages
    for call in ("get", "set", "batch_get", "batch_set"):
        with pytest.raises(ConfigError, match="interface_v1"):
            getattr(engine.backend, call)(names[0])
    engine.backend.clear()
    assert not engine.backend.exists(names[0])
    engine.close()


def test_the_store_is_the_one_that_other_processes_use(memory_path: Path) -> None:
    engine = RealEngine(memory_path / "store")
    tokens, pages = tokens_of(8, 4), contents(engine.pool, 4)
    engine.put(tokens, pages)
    engine.close()
    with kvfs.open(memory_path / "store") as store:
        assert store.verify().ok and [space.name for space in store.catalog.namespaces()] != []
