"""The adapter of SGLang's external linker over device pools of its layout; tests/sglang has SGLang's own tree."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvfs.errors import ConfigError, UnsupportedModelError
from kvfs.integrations.sglang import linker_pages as module
from kvfs.integrations.sglang.attachment import digests
from kvfs.integrations.sglang.pools import device_pool
from kvfs.integrations.sglang.ranks import Rank
from kvfs.lookup.matcher import Matcher
from kvfs.system.files import Files
from kvfs.testing import EngineContract, Fault, FaultyFiles
from tests.integrations.sglang_pools import (
    FakeLinkerEngine,
    MHATokenToKVPool,
    MLATokenToKVPool,
    hashes,
    page_bytes,
    page_of,
    set_page,
    slots,
)
from tests.integrations.test_sglang import contents, tokens_of
from tests.stores import corrupt

PAGE = 64


class TestLinker(EngineContract):
    page_tokens = PAGE
    page_bytes = page_bytes(MHATokenToKVPool(pages=1))
    gives_up_loads = True

    def start(self, path: Path, files: Files | None = None) -> FakeLinkerEngine:
        return FakeLinkerEngine.start(path, MHATokenToKVPool(), files=files)


def test_tails_and_nodes_are_found_without_what_is_before_them(memory_path: Path) -> None:
    engine = FakeLinkerEngine.start(memory_path / "store", MHATokenToKVPool())
    tokens, pages = tokens_of(1, 50), contents(engine.pool, 50)
    names = hashes(tokens, PAGE)
    for first, end in ((37, 50), (0, 5), (5, 37)):
        assert engine.put(tokens[: end * PAGE], pages[first:end], first) == end - first
    assert [engine.pages.lookup(names[first:]) for first in (0, 1, 31, 33, 49)] == [50, 49, 19, 17, 1]
    engine.pages.reset()  # what lookups used is noted in the background
    assert engine.counters()["lookups"] == 5 and engine.counters()["tokens_matched"] == 136 * PAGE
    engine.close()


def test_several_requests_load_in_one_batch_and_a_cancelled_one_does_not(memory_path: Path) -> None:
    engine = FakeLinkerEngine.start(memory_path / "store", MHATokenToKVPool())
    prompts = [(hashes(tokens_of(n, 4), PAGE), contents(engine.pool, 4, n)) for n in range(3)]
    for n, (_, pages) in enumerate(prompts):
        engine.put(tokens_of(n, 4), pages)
    before = page_of(engine.pool, 90)
    for n, (names, _) in enumerate(prompts):
        assert engine.pages.load(f"rid {n}", names, slots(engine.pool, range(20 * n + 10, 20 * n + 14)))
    engine.pages.load("late", prompts[0][0], slots(engine.pool, range(90, 94)))
    assert engine.pages.cancel("late") and not engine.pages.cancel("late")
    assert engine.counter.finish(engine.pages.start(None)) and engine.pages.start(None) == -1
    for n, (_, pages) in enumerate(prompts):
        assert [page_of(engine.pool, p) for p in range(20 * n + 10, 20 * n + 14)] == pages
    assert page_of(engine.pool, 90) == before
    engine.close()


def test_the_log_tells_the_tiers_of_each_request(memory_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeLinkerEngine.start(memory_path / "store", MHATokenToKVPool())
    for n in (2, 3):
        engine.put(tokens_of(n, n), contents(engine.pool, n, n))
    with caplog.at_level("DEBUG", logger="sglang.kvfs"):
        for n in (2, 3):
            engine.pages.load(f"rid {n}", hashes(tokens_of(n, n), PAGE), slots(engine.pool, range(10 * n, 11 * n)))
        assert engine.counter.finish(engine.pages.start(None))
        engine.close()
    said = [re.match(r"kvfs: request (rid .): loaded (\d+) tokens: (.*)", line) for line in caplog.messages]
    found = [(m[1], int(m[2]), sum(map(int, re.findall(r"(?:host|disk) (\d+)", m[3])))) for m in said if m]
    assert found == [("rid 2", 2 * PAGE, 2 * PAGE), ("rid 3", 3 * PAGE, 3 * PAGE)]


def test_a_page_that_is_lost_fails_the_batch_and_the_next_lookup_is_shorter(memory_path: Path) -> None:
    engine = FakeLinkerEngine.start(memory_path / "store", MHATokenToKVPool())
    tokens, pages = tokens_of(2, 6), contents(engine.pool, 6)
    engine.put(tokens, pages)
    corrupt(memory_path / "store", pages[3])
    assert engine.lookup(tokens) == 6
    assert engine.pages.load("rid", hashes(tokens, PAGE), slots(engine.pool, range(40, 46)))
    assert not engine.counter.finish(engine.pages.start(None))
    assert engine.lookup(tokens) == 3
    assert engine.pages.load("rid", hashes(tokens, PAGE)[:3], slots(engine.pool, range(40, 43)))
    assert engine.counter.finish(engine.pages.start(None)), "the next batch is loaded"
    engine.close()


def test_a_load_goes_on_from_its_lookup_unless_the_store_has_changed(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeLinkerEngine.start(memory_path / "store", MHATokenToKVPool())
    tokens, names = tokens_of(8, 6), hashes(tokens_of(8, 6), PAGE)
    pages = contents(engine.pool, 6)
    engine.put(tokens, pages)
    asked, present = list[str](), Matcher.present

    def noted(self: Matcher, *args: Any, **kwargs: Any) -> Any:
        asked.append(threading.current_thread().name)
        return present(self, *args, **kwargs)

    monkeypatch.setattr(Matcher, "present", noted)
    monkeypatch.setattr(Matcher, "_are_current", lambda self, lookups: True)
    assert engine.lookup(tokens) == 6 and asked == ["MainThread"]
    assert engine.get(tokens, 4) == pages[:4]
    assert asked == ["MainThread"], "the load asked again"
    assert engine.get(tokens, 4) == pages[:4] and asked[1:] == ["kvfs-load-0"], "a lookup serves one load"
    monkeypatch.setattr(Matcher, "_are_current", lambda self, lookups: False)
    assert engine.lookup(tokens) == 6 and engine.get(tokens, 6) == pages and asked[3:] == ["kvfs-load-0"]
    monkeypatch.undo()
    assert engine.lookup(tokens) == 6
    engine.pages._attached.store.purge(engine.pages._attached.space)
    assert engine.pages.load("rid", names, slots(engine.pool, range(40, 46)))
    assert not engine.counter.finish(engine.pages.start(None)), "purged after the lookup"
    engine.close()


def test_a_lookup_reads_nothing_behind_the_first_page_that_is_missing(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeLinkerEngine.start(memory_path / "store", MHATokenToKVPool())
    names, pages = hashes(tokens_of(5, 40), PAGE), contents(engine.pool, 40)
    engine.put(tokens_of(5, 2), pages[:2])
    engine.put(tokens_of(5, 40), pages[3:], 3)  # page 2 is missing
    read, present = list[int](), Matcher.present

    def noted(self: Matcher, *args: Any, **kwargs: Any) -> Any:
        found = present(self, *args, **kwargs)
        read.append(found.rows_read)
        return found

    monkeypatch.setattr(Matcher, "present", noted)
    assert engine.pages.lookup(names) == 2 and engine.pages.lookup(hashes(tokens_of(6, 40), PAGE)) == 0
    assert read == [3, 1]
    monkeypatch.undo()
    assert engine.pages.lookup(names[3:]) == 37 and engine.get(tokens_of(5, 2), 2) == pages[:2]
    engine.close()


def test_lookups_are_kept_for_some_loads(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOKUPS_MAX", 2)
    engine = FakeLinkerEngine.start(memory_path / "store", MHATokenToKVPool())
    names = [hashes(tokens_of(n, 3), PAGE) for n in range(3)]
    for n in range(3):
        engine.put(tokens_of(n, 3), contents(engine.pool, 3, n))
        assert engine.pages.lookup(names[n]) == 3
    assert engine.pages.lookup(hashes(tokens_of(9, 3), PAGE)) == 0
    assert [engine.pages._found(keys) is not None for keys in names] == [False, True, True]
    assert engine.pages.lookup(names[0]) == 3 and engine.pages._found([*names[0][:2], names[1][2]]) is None
    assert engine.pages._found([]) is None
    engine.close()


@pytest.mark.parametrize("wrong", ["ab", "g" * 64, " " * 64, "ab " * 21 + "a", 7])
def test_keys_that_are_no_hashes_are_named(wrong: Any) -> None:
    good = hashes(tokens_of(1, 2), PAGE)
    assert digests(good) == [bytes.fromhex(key) for key in good] and digests([]) == []
    with pytest.raises(ConfigError, match=re.escape(f"page key {wrong!r}")):
        digests([good[0], wrong, good[1]])


def test_a_disk_that_hangs_does_not_keep_a_node_locked(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its offload is reported as failed soon after its slots are free, and is there when it is offered again."""
    monkeypatch.setattr(module, "PUBLISH_SECONDS", 0.2)
    hang = threading.Event()

    class HangingFiles(Files):
        def pwritev(self, fd: int, buffers: Any, offset: int) -> int:
            if threading.current_thread().name.startswith("kvfs-write"):
                assert hang.wait(60)
            return super().pwritev(fd, buffers, offset)

    engine = FakeLinkerEngine.start(memory_path / "store", MHATokenToKVPool(), files=HangingFiles())
    tokens, pages = tokens_of(3, 4), contents(engine.pool, 4)
    began = time.monotonic()
    assert engine.put(tokens, pages) == 0 and time.monotonic() - began < 30
    hang.set()
    end = time.monotonic() + 60
    while engine.lookup(tokens) < 4:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert engine.put(tokens, pages) == 4
    engine.close()


def test_offloads_are_reported_in_order_and_bounded(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "OFFLOADS_MAX", 3)
    files = FaultyFiles()
    engine = FakeLinkerEngine.start(memory_path / "store", MHATokenToKVPool(), files=files)
    prompts = [tokens_of(n, 2) for n in range(3)]
    for n, page in enumerate(contents(engine.pool, 2)):
        set_page(engine.pool, n + 1, page)
    files.arm(Fault(kind="pwritev", persistent=True))
    for tokens in prompts:
        assert engine.pages.offload(hashes(tokens, PAGE), slots(engine.pool, (1, 2)), None)
    assert not engine.pages.offload(hashes(prompts[0], PAGE), slots(engine.pool, (1, 2)), None), "too many"
    assert [engine.reported() for _ in prompts] == [False] * 3
    files.arm()
    assert engine.pages.offload(hashes(prompts[0], PAGE), slots(engine.pool, (1, 2)), None) and engine.reported()
    engine.close()


def test_a_reset_ends_what_is_under_way(memory_path: Path) -> None:
    engine = FakeLinkerEngine.start(memory_path / "store", MHATokenToKVPool())
    tokens = tokens_of(4, 40)
    for n, page in enumerate(contents(engine.pool, 40)):
        set_page(engine.pool, n + 1, page)
    engine.pages.offload(hashes(tokens, PAGE), slots(engine.pool, range(1, 41)), None)
    engine.pages.load("rid", hashes(tokens, PAGE), slots(engine.pool, range(41, 81)))
    engine.pages.reset()
    assert engine.pages.completed() == 0 and engine.pages.start(None) == -1
    before = page_of(engine.pool, 41)
    time.sleep(0.1)
    assert page_of(engine.pool, 41) == before
    assert engine.put(tokens_of(5, 2), contents(engine.pool, 2)) == 2, "it goes on"
    engine.close()


def test_ranks_make_whole_pages(memory_path: Path) -> None:
    tokens, names = tokens_of(6, 4), hashes(tokens_of(6, 4), PAGE)
    whole = MHATokenToKVPool(heads=4, pages=8)
    pages = contents(whole, 4)
    for n, page in enumerate(pages):
        set_page(whole, n + 1, page)
    for rank in range(2):
        pool = MHATokenToKVPool(pages=8)
        for mine, every in zip((*pool.k_buffer, *pool.v_buffer), (*whole.k_buffer, *whole.v_buffer), strict=True):
            mine.copy_(every[:, 2 * rank : 2 * rank + 2])
        engine = FakeLinkerEngine.start(memory_path / "store", pool, rank=Rank(rank, 2), kv_heads=4)
        assert engine.lookup(tokens) == 0
        assert engine.pages.offload(names, slots(pool, range(1, 5)), None) and engine.reported()
        engine.close()
    engine = FakeLinkerEngine.start(memory_path / "store", MHATokenToKVPool(heads=4, pages=8))
    assert engine.lookup(tokens) == 4 and engine.get(tokens, 4) == pages
    engine.close()


def test_ranks_of_mla_share_the_work(memory_path: Path) -> None:
    """Each holds all bytes of a page; of three ranks each writes every third page."""
    tokens, names, pool = tokens_of(7, 7), hashes(tokens_of(7, 7), PAGE), MLATokenToKVPool(pages=8)
    pages = contents(pool, 7)
    for n, page in enumerate(pages):
        set_page(pool, n + 1, page)
    written = []
    for rank in range(3):
        engine = FakeLinkerEngine.start(memory_path / "store", pool, rank=Rank(rank, 3), replica=(rank, 3))
        assert engine.pages.offload(names, slots(pool, range(1, 8)), None) and engine.reported()
        written.append(engine.counters()["pages_stored"])
        engine.close()
    assert written == [3, 2, 2]
    engine = FakeLinkerEngine.start(memory_path / "store", MLATokenToKVPool(pages=8))
    assert engine.lookup(tokens) == 7 and engine.get(tokens, 7) == pages
    engine.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_cache_layout": "hnd"}, "hnd"),
        ({"page_size": 8}, "--page-size 64"),
        ({"dtype": "torch.uint8"}, "--kv-cache-dtype"),
    ],
)
def test_pools_that_are_not_understood_are_refused(changes: dict[str, Any], message: str) -> None:
    pool = MHATokenToKVPool(pages=2)
    for name, value in changes.items():
        setattr(pool, name, value)
    with pytest.raises(UnsupportedModelError, match=message):
        device_pool(pool)
    with pytest.raises(UnsupportedModelError, match="SimpleNamespace"):
        device_pool(SimpleNamespace())
