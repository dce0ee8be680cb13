"""KvfsLinker under SGLang's own radix tree: offload, restart, load layer by layer."""

from __future__ import annotations

import functools
import random
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker
from sglang.srt.mem_cache.utils import get_hash_str
from sglang.test.kits.unified_radix_cache import fixtures
from sglang.test.kits.unified_radix_cache.config import CacheConfig

from kvfs.errors import UnsupportedModelError
from kvfs.integrations.sglang.linker import KvfsLinker
from kvfs.integrations.sglang.linker_pages import LinkerPages
from tests.stores import corrupt

PAGE, LAYERS, HEADS, DIM = 64, 3, 2, 8


class Tree:
    """SGLang's radix tree over its device pool, with a linker of kvfs made by its factory."""

    def __init__(self, path: Path, **extra: Any) -> None:
        config = CacheConfig(
            page_size=PAGE, components=(ComponentType.FULL,), kv_size=64 * PAGE, max_context_len=64 * PAGE,
            num_layers=LAYERS, head_num=HEADS, head_dim=DIM, dtype=torch.bfloat16,
        )  # fmt: skip
        paged = functools.partial(PagedTokenToKVPoolAllocator, page_size=PAGE)
        with mock.patch.multiple(fixtures, TokenToKVPoolAllocator=paged, get_device=lambda: "cpu"):
            self.cache, self.allocator, _ = fixtures.build_fixture(config)
        self.pool = self.allocator.get_kvcache()
        params = SimpleNamespace(
            token_to_kv_pool_allocator=self.allocator, page_size=PAGE, tp_cache_group=None, attn_tp_cache_group=None,
            pp_rank=0, pp_size=1, mtp_draft_device_pools=(), sidecar_draft_device_pools=(),
        )  # fmt: skip
        extra = {"path": str(path), "capacity": "64MiB", "weights_id": "0123abcd", "ring_bytes": "8MiB", **extra}
        self.linker = create_unified_cache_linker(
            SimpleNamespace(served_model_name="org/model"), params, backend="dynamic",
            config={
                "linker": "KvfsLinker", "linker_module_path": "kvfs.integrations.sglang.linker",
                "linker_extra_config": extra,
            },
            components=set(self.cache.components),
        )  # fmt: skip
        self.cache.init_cache_linker(self.linker)
        self._requests = 0

    def insert(self, tokens: list[int], seed: int) -> torch.Tensor:
        """Put a prompt into the tree, with KV from a seed, and have it offloaded; its slots."""
        slots = self.allocator.alloc(len(tokens))
        self.fill(slots, seed)
        self.cache.insert(InsertParams(key=RadixKey(array("q", tokens)), value=slots))
        end = time.monotonic() + 30
        while self.cache.linker.pending_offloads:
            assert time.monotonic() < end
            self.cache.check_hicache_events()
            time.sleep(0.005)
        return slots

    def fill(self, slots: torch.Tensor, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        for buffer in (*self.pool.k_buffer, *self.pool.v_buffer):
            buffer[slots] = torch.randn((len(slots), HEADS, DIM), generator=draw).to(torch.bfloat16)

    def kv(self, slots: torch.Tensor) -> list[torch.Tensor]:
        return [buffer[slots].clone() for buffer in (*self.pool.k_buffer, *self.pool.v_buffer)]

    def match(self, tokens: list[int]) -> tuple[Any, Any]:
        """A request, and what the tree reports for it."""
        self._requests += 1
        request = SimpleNamespace(
            rid=f"r{self._requests}", kv=None, swa_branching_seqlen=None, last_node=None, session=None
        )
        result = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens)), req=request))
        request.last_node = result.last_device_node
        return request, result

    def load(self, request: Any, result: Any) -> torch.Tensor:
        """Load what was matched into slots of the request, which are returned."""
        count, _ = self.cache.init_load_back(
            InitLoadBackParams(result.best_match_node, result.host_hit_length, req=request)
        )
        assert count == result.host_hit_length
        return self.cache.linker.private_load_indices[request.rid]

    def close(self) -> None:
        self.cache.linker.close()


@pytest.fixture
def tree(memory_path: Path) -> Iterator[Tree]:
    tree = Tree(memory_path / "store")
    yield tree
    tree.close()


def tokens_of(seed: int, pages: int) -> list[int]:
    return random.Random(seed).choices(range(32_000), k=pages * PAGE)


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(one, other, strict=True))


def test_a_prompt_is_loaded_layer_by_layer_after_a_restart(memory_path: Path) -> None:
    first, tokens = Tree(memory_path / "store"), tokens_of(1, 12)
    wanted = first.kv(first.insert(tokens, 1))
    first.close()
    second = Tree(memory_path / "store")
    request, result = second.match([*tokens, 1, 2, 3])
    assert result.host_hit_length == 12 * PAGE
    slots = second.load(request, result)
    second.fill(slots, 99)
    index = second.cache.linker.start_layer_wise_loading()
    second.linker.layer_done_counter.set_consumer(index)
    for layer in range(LAYERS):
        second.linker.layer_done_counter.wait_until(layer)
        assert same([second.kv(slots)[n] for n in (layer, LAYERS + layer)], [wanted[layer], wanted[LAYERS + layer]])
    assert second.cache.linker.finish_loads() == [] and same(second.kv(slots), wanted)
    second.close()


def test_the_tail_behind_what_the_device_has_is_found(memory_path: Path) -> None:
    first, tokens = Tree(memory_path / "store"), tokens_of(2, 12)
    wanted = first.kv(first.insert(tokens, 2))
    first.close()
    second = Tree(memory_path / "store")
    second.insert(tokens[: 5 * PAGE], 2)
    request, result = second.match(tokens)
    assert (result.device_prefix_len, result.host_hit_length) == (5 * PAGE, 7 * PAGE)
    slots = second.load(request, result)
    second.cache.linker.start_layer_wise_loading()
    assert second.cache.linker.finish_loads() == []
    assert same(second.kv(slots), [part[5 * PAGE :] for part in wanted])
    second.close()


def test_a_damaged_page_aborts_its_request_and_is_not_matched_again(memory_path: Path) -> None:
    first, tokens = Tree(memory_path / "store"), tokens_of(3, 6)
    first.insert(tokens, 3)
    space = first.linker._pages._attached.space
    names = get_hash_str(tokens, None, page_size=PAGE)
    page = bytearray(space.layout.page_bytes)
    with space.match_keys([bytes.fromhex(names[4])]) as match:
        assert space.get(match, page) == 1
    first.close()
    corrupt(memory_path / "store", bytes(page))
    second = Tree(memory_path / "store")
    request, result = second.match(tokens)
    assert result.host_hit_length == 6 * PAGE
    second.load(request, result)
    second.cache.linker.start_layer_wise_loading()
    assert second.cache.linker.finish_loads() == [request.rid]
    assert second.match(tokens)[1].host_hit_length == 4 * PAGE
    second.close()


def test_a_second_insert_stores_nothing_again(tree: Tree) -> None:
    tokens = tokens_of(4, 6)
    tree.insert(tokens, 4)
    counters = tree.linker._pages._attached.store.stats()["counters"]
    before = (counters["bytes_written"], counters["saves_done"])
    tree.cache.reset()
    tree.allocator.clear()
    tree.insert(tokens, 4)
    counters = tree.linker._pages._attached.store.stats()["counters"]
    assert (counters["bytes_written"], counters["saves_done"]) == before


def test_a_node_that_cannot_be_stored_is_unlocked(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFS_DISABLE", "1")
    tree, tokens = Tree(memory_path / "store"), tokens_of(5, 3)
    tree.insert(tokens, 5)
    request, result = tree.match(tokens)
    assert result.device_prefix_len == 3 * PAGE and not tree.cache.linker.has_hit(request.rid)
    node = result.last_device_node
    assert fixtures.node_device_lock_ref(tree.cache, node, ComponentType.FULL) == 0
    tree.close()


def test_calls_of_the_scheduler_do_not_wait_for_the_disk(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offloads and loads are queued: the calls return before their jobs have begun."""
    begun = list[str]()

    def late(name: str, real: Any) -> Any:
        def call(self: Any, *args: Any) -> Any:
            begun.append(name)
            return real(self, *args)

        return call

    for name in ("_load", "_offload"):
        monkeypatch.setattr(LinkerPages, name, late(name, getattr(LinkerPages, name)))
    gate = torch.zeros(1)

    class After:
        def synchronize(self) -> None:
            while not gate[0]:
                time.sleep(0.001)

    monkeypatch.setattr(KvfsLinker, "_after", lambda self: After())
    slots = tree.allocator.alloc(2 * PAGE)
    tree.cache.insert(InsertParams(key=RadixKey(array("q", tokens_of(6, 2))), value=slots))
    assert tree.linker.num_completed_offloads() == 0
    gate[0] = 1
    end = time.monotonic() + 30
    while tree.cache.linker.pending_offloads:
        assert time.monotonic() < end
        tree.cache.check_hicache_events()
    assert begun == ["_offload"]


def test_trees_and_pools_that_are_not_understood_are_refused(memory_path: Path) -> None:
    allocator = SimpleNamespace(get_kvcache=lambda: SimpleNamespace())
    params = SimpleNamespace(
        token_to_kv_pool_allocator=allocator, mtp_draft_device_pools=(), sidecar_draft_device_pools=(), page_size=PAGE
    )
    for components, drafts, message in (
        ({ComponentType.FULL, ComponentType.SWA}, (), "SWA"),
        ({ComponentType.FULL}, (object(),), "--speculative-algorithm"),
        ({ComponentType.FULL}, (), "SimpleNamespace"),
    ):
        params.sidecar_draft_device_pools = drafts
        with pytest.raises(UnsupportedModelError, match=message):
            KvfsLinker(SimpleNamespace(), params, components=components, extra_config={"path": str(memory_path)})
