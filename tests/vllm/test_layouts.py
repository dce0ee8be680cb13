"""The connector's classes over the engine's cache views, in all of its layouts; no model runs.

The tests take the part of the engine's scheduler: they give requests to the manager and blocks to the worker, and then
read the blocks through the views that attention would use.
"""

from __future__ import annotations

import copy
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowSpec,
    compute_layer_kv_cache_shape_bytes,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LookupResult, ReqContext, make_offload_key
from vllm.v1.request import Request

import kvfs
from kvfs.errors import UnsupportedModelError
from kvfs.integrations.vllm import manager, worker
from kvfs.integrations.vllm.manager import KvfsManager
from kvfs.integrations.vllm.model import model_of
from kvfs.integrations.vllm.settings import set_defaults, settings_of
from kvfs.integrations.vllm.shared import shared_model
from kvfs.integrations.vllm.views import describe_caches
from kvfs.integrations.vllm.worker import KvfsWorker
from kvfs.testing import Fault, FaultyFiles
from kvfs.types import TransferResult

BLOCKS, BLOCK = 24, 16
CAT, DOG = "ca" * 32, "d0" * 32  # hashes of their content
Prompt = Callable[..., list[int]]
_FULL = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 32}
SPECS: dict[str, list[tuple[KVCacheSpec, int]]] = {  # groups: (spec, layers)
    "full": [(FullAttentionSpec(**_FULL, dtype=torch.bfloat16), 4)],
    "fp8": [(FullAttentionSpec(**_FULL, dtype=torch.float8_e4m3fn), 4)],
    "mla": [(MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=576, dtype=torch.bfloat16), 3)],
    "hybrid": [
        (FullAttentionSpec(**_FULL, dtype=torch.bfloat16), 2),
        (SlidingWindowSpec(**_FULL, dtype=torch.bfloat16, sliding_window=40), 2),
        (SlidingWindowSpec(**_FULL, dtype=torch.bfloat16, sliding_window=40), 2),
    ],
}


@pytest.fixture(scope="module")
def engine_config(model: Callable[[str], Path]) -> VllmConfig:
    args = EngineArgs(model=str(model("llama")), enforce_eager=True, block_size=32, max_model_len=1024, dtype="float32")
    config = args.create_engine_config()
    config.device_config.device_type = "cuda"  # blocks ordered token by token, which the CPU's kernels do not keep
    return config


class HungFiles(FaultyFiles):
    """A disk that may hang: calls of one kind do not return before ``answer``."""

    HANG_SECONDS = 60.0

    def __init__(self) -> None:
        super().__init__()
        self._answered = threading.Event()

    def hang(self, kind: str) -> None:
        self.arm(Fault(1, kind, action="delay", persistent=True, seconds=self.HANG_SECONDS))

    def answer(self) -> None:
        self.arm()
        self._answered.set()

    def sleep(self, seconds: float) -> None:
        if seconds == self.HANG_SECONDS:
            self._answered.wait(seconds)
        else:
            super().sleep(seconds)


class Rank:
    """Cache views of one engine process, and the kvfs manager and worker above them."""

    def __init__(
        self, config: VllmConfig, kind: str, layout: KVCacheLayout, path: Path, *, kernel_block: int | None = None,
        pages: int | None = None, seed: int = 0, files: Any = None, ring_pages: int = 64, **settings: Any,
    ) -> None:  # fmt: skip
        self.specs, self.blocks_each = SPECS[kind], BLOCKS
        names, groups, first = [], [], 0
        for spec, layers in self.specs:
            names.append([f"model.layers.{first + i}.self_attn.attn" for i in range(layers)])
            groups.append(KVCacheGroupSpec(names[-1], spec))
            first += layers
        cache = KVCacheConfig(BLOCKS, [KVCacheTensor(0, [], 0, 0)], groups, kv_cache_layout=layout.name)
        self.views = self._views(layout, names, kernel_block, seed)
        extra: dict[str, Any] = {"path": str(path), "capacity": "64MiB", "weights_id": "w", **settings}
        if pages is not None:
            extra["blocks_per_chunk"] = pages
        set_defaults(extra, tuple(spec.block_size for spec, _ in self.specs))
        self.per_page, checked = extra["blocks_per_chunk"], settings_of(extra)
        self.model = model_of(config, cache, self.per_page, checked.weights_id)
        if checked.share:
            self.model = shared_model(config, self.model, checked.weights_id)
        keywords = {} if files is None else {"files": files}
        self.store = kvfs.open(path, capacity=checked.capacity, **keywords)
        ns = self.store.namespace(
            self.model.name, self.model.layout, self.model.revision, rope=self.model.rope, extra=self.model.extra
        )
        groups_here = describe_caches(config, cache, self.model, self.views)
        self.worker = KvfsWorker(
            ns.attach(
                [a.device for e in groups_here for a in e.attached],
                ring_bytes=ring_pages * self.model.layout.page_bytes,
            ),
            groups_here,
            self.model.page_tokens,
            checked,
        )
        self.manager = KvfsManager(self.store, ns, self.model, checked)

    def _views(
        self, layout: KVCacheLayout, names: list[list[str]], kernel_block: int | None, seed: int
    ) -> dict[str, torch.Tensor]:
        """As the engine creates them: groups of one shape share the memory, and each block belongs to one group."""
        views: dict[str, torch.Tensor] = {}
        generator = torch.Generator().manual_seed(seed)
        layers = max(count for _, count in self.specs)
        spec = self.specs[0][0]
        page = math.prod(compute_layer_kv_cache_shape_bytes(spec, 1)[1:])
        raw = torch.randint(0, 100, (page * layers * BLOCKS,), dtype=torch.int8, generator=generator)
        strides = compute_layout_strides(spec, BLOCKS, layers, layout)
        for (each, count), group in zip(self.specs, names, strict=True):
            place = KVCacheTensor(raw.numel(), group, strides[0], strides[1])
            made = create_kv_cache_views(raw, each, BLOCKS, layout, place, kernel_block)
            views.update(zip(group, made[:count], strict=True))
        return views

    def tokens(self, blocks: Mapping[int, list[int]]) -> dict[str, torch.Tensor]:
        """The KV of a request as attention sees it: layer -> [tokens, heads, content]. ``blocks``: per group."""
        seen, first = {}, 0
        for index, (_, count) in enumerate(self.specs):
            for layer in range(first, first + count):
                view = self.views[f"model.layers.{layer}.self_attn.attn"]
                per = view.shape[0] // BLOCKS
                rows = [view[b * per + i] for b in blocks[index] for i in range(per)]
                seen[str(layer)] = torch.cat([row.transpose(0, 1) for row in rows]).view(torch.uint8).clone()
            first += count
        return seen

    def close(self) -> None:
        self.worker.shutdown()
        self.manager.shutdown()

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Asked:
    """A request as the scheduler's half sees it: a key for each page of each group."""

    def __init__(self, rank: Rank, name: str, tokens: list[int], generates: int = 4, **fields: Any) -> None:
        self.rank = rank
        self.request = Request(name, tokens, SamplingParams(max_tokens=generates), None, **fields)
        self.context = ReqContext(name)
        self.keys: dict[tuple[int, int], Any] = {}
        self.generate([])
        rank.manager.announce(self.request)
        rank.manager.on_new_request(self.context)

    def generate(self, tokens: list[int]) -> None:
        for token in tokens:
            self.request.append_output_token_ids(token)
        size = self.rank.model.page_tokens
        for index in range(len(self.rank.specs)):
            for chunk in range(self.request.num_tokens // size):
                key = make_offload_key(f"{self.request.request_id} {chunk}".encode().ljust(32), index)
                self.context.set_offload_key_position(key, (chunk + 1) * size)
                self.keys[index, chunk] = key

    def hits(self) -> dict[int, list[int]]:
        self.rank.manager.refresh(self.request.request_id)
        found: dict[int, list[int]] = {}
        for (index, chunk), key in self.keys.items():
            if self.rank.manager.lookup(key, self.context) is LookupResult.HIT:
                found.setdefault(index, []).append(chunk)
        return found

    def save(self, blocks: Mapping[int, list[int]], job: int = 1, only: Mapping[int, list[int]] | None = None) -> int:
        """Submit what the manager wants to store. Returns the number of pages."""
        offered = [k for (g, c), k in self.keys.items() if only is None or c in only.get(g, ())]
        output = self.rank.manager.prepare_store(offered, self.context)
        assert output is not None
        per, ids, sizes, firsts = self.rank.per_page, [], [], []
        wanted = set(output.keys_to_store)
        for index in range(len(self.rank.specs)):
            chunks = [c for (g, c), k in self.keys.items() if g == index and k in wanted]
            mine = [blocks[index][c * per + i] for c in chunks for i in range(per)]
            ids += [b for b in mine if b]
            sizes.append(len([b for b in mine if b]))
            firsts.append(chunks[0] * per + next(i for i, b in enumerate(mine) if b) if any(mine) else 0)
        assert self.rank.worker.submit_store(job, GPULoadStoreSpec(ids, sizes, firsts), output.store_spec)
        self.stored = output.keys_to_store
        return len(wanted)

    def load(self, blocks: Mapping[int, list[int]], first: Mapping[int, int], job: int = 2) -> None:
        """``first``: per group, the first block to load; the last one is the end of ``blocks``."""
        per = self.rank.per_page
        keys = [k for (g, c), k in self.keys.items() if first[g] // per <= c < -(-len(blocks[g]) // per)]
        spec = self.rank.manager.prepare_load(keys, self.context)
        ids = [b for g, row in blocks.items() for b in row[first[g] :]]
        sizes = [len(row) - first[g] for g, row in blocks.items()]
        assert self.rank.worker.submit_load(job, spec, GPULoadStoreSpec(ids, sizes, list(first.values())))


def finish(rank: Rank, job: int, seconds: float = 20.0) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for result in rank.worker.get_finished():
            if result.job_id == job:
                return result
        time.sleep(0.002)
    raise AssertionError(f"job {job} did not end")


def settle(rank: Rank) -> None:
    """Wait until all saves are published."""
    end = time.monotonic() + 20.0
    while rank.worker._publishing and time.monotonic() < end:
        rank.worker.get_finished()
        time.sleep(0.002)


def blocks_for(rank: Rank, first: int, count: int = 6) -> dict[int, list[int]]:
    """Distinct blocks for each group: the engine gives a block to one group at a time. Block 0 is never given."""
    step = 1 if first % 2 else -1
    groups = len(rank.specs)
    spread = max(1, (BLOCKS - 1) // groups)
    return {g: [1 + g * spread + (first + step * i) % spread for i in range(min(count, spread))] for g in range(groups)}


def stored(rank: Rank, tokens: list[int]) -> None:
    """Save a prompt."""
    Asked(rank, "a", tokens).save(blocks_for(rank, 3))
    assert finish(rank, 1).success
    settle(rank)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "store"


@pytest.mark.parametrize("kind", list(SPECS))
@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
def test_pages_of_one_layout_are_read_by_every_other(
    engine_config: VllmConfig, store: Path, prompt: Prompt, kind: str, layout: KVCacheLayout
) -> None:
    tokens = prompt(1, 6 * BLOCK)
    with Rank(engine_config, kind, KVCacheLayout.LBNHC, store, pages=1, seed=1) as first:
        asked, blocks = Asked(first, "a", tokens), blocks_for(first, 3)
        assert asked.hits() == {} and asked.save(blocks) == 6 * len(first.specs)
        assert finish(first, 1).success
        settle(first)
        expected = first.tokens(blocks)
    with Rank(engine_config, kind, layout, store, pages=1, seed=2) as second:
        asked, blocks = Asked(second, "b", tokens), blocks_for(second, 8)
        assert asked.hits() == {g: list(range(6)) for g in range(len(second.specs))}
        before = second.tokens(
            {g: [b for b in range(1, BLOCKS) if all(b not in r for r in blocks.values())] for g in blocks}
        )
        asked.load(blocks, dict.fromkeys(blocks, 0))
        assert finish(second, 2).success
        for layer, seen in second.tokens(blocks).items():
            assert torch.equal(seen, expected[layer]), f"layer {layer}"
        after = second.tokens(
            {g: [b for b in range(1, BLOCKS) if all(b not in r for r in blocks.values())] for g in blocks}
        )
        assert all(torch.equal(before[layer], after[layer]) for layer in before), "a block of another request changed"


@pytest.mark.parametrize(
    "layout", [KVCacheLayout.LBNHC, KVCacheLayout.LBHNC, KVCacheLayout.LHBNC], ids=lambda x: x.name
)
def test_kernel_blocks_smaller_than_the_managers(
    engine_config: VllmConfig, store: Path, prompt: Prompt, layout: KVCacheLayout
) -> None:
    tokens = prompt(1, 6 * BLOCK)
    with Rank(engine_config, "full", KVCacheLayout.LBNHC, store, pages=1, seed=1) as whole:
        asked, blocks = Asked(whole, "a", tokens), blocks_for(whole, 3)
        asked.save(blocks)
        assert finish(whole, 1).success
        settle(whole)
        expected = whole.tokens(blocks)
    if layout is KVCacheLayout.LHBNC:
        with pytest.raises((ValueError, AssertionError)):  # the engine itself has no such views
            Rank(engine_config, "full", layout, store, pages=1, kernel_block=8)
        return
    with Rank(engine_config, "full", layout, store, pages=1, seed=2, kernel_block=8) as split:
        asked, blocks = Asked(split, "b", tokens), blocks_for(split, 8)
        asked.load(blocks, {0: 0})
        assert finish(split, 2).success
        assert all(torch.equal(seen, expected[layer]) for layer, seen in split.tokens(blocks).items())


def test_only_what_is_asked_for_is_loaded(engine_config: VllmConfig, store: Path, prompt: Prompt) -> None:
    """Pages of several blocks, of which the engine already has the first ones, also inside of a page."""
    tokens = prompt(1, 6 * BLOCK)
    with Rank(engine_config, "full", KVCacheLayout.LBHNC, store, pages=2, seed=1) as rank:
        asked, blocks = Asked(rank, "a", tokens), blocks_for(rank, 3)
        assert asked.save(blocks) == 3
        assert finish(rank, 1).success
        settle(rank)
        expected = rank.tokens(blocks)
    with Rank(engine_config, "full", KVCacheLayout.BLHNC, store, pages=2, seed=2) as rank:
        asked, blocks = Asked(rank, "b", tokens), blocks_for(rank, 8)
        before = rank.tokens(blocks)
        asked.load(blocks, {0: 3})
        assert finish(rank, 2).success
        cut = 3 * BLOCK
        for layer, seen in rank.tokens(blocks).items():
            assert torch.equal(seen[:cut], before[layer][:cut]) and torch.equal(seen[cut:], expected[layer][cut:])


def test_a_page_of_which_blocks_were_freed_is_not_stored(
    engine_config: VllmConfig, store: Path, prompt: Prompt
) -> None:
    tokens = prompt(1, 6 * BLOCK)
    with Rank(engine_config, "hybrid", KVCacheLayout.LBNHC, store, pages=2, seed=1) as rank:
        asked, blocks = Asked(rank, "a", tokens), blocks_for(rank, 3)
        blocks[1] = [0, *blocks[1][1:]]  # the window has moved on
        asked.save(blocks)
        assert finish(rank, 1).success
        settle(rank)
        assert Asked(rank, "b", tokens).hits() == {0: [0, 1, 2], 1: [1, 2], 2: [0, 1, 2]}


def test_a_request_that_had_its_blocks_is_looked_up_again(
    engine_config: VllmConfig, store: Path, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that waits in the queue is not. A preempted one must find what it had computed, however soon."""
    monkeypatch.setattr(manager, "FRESH_SECONDS", 600.0)
    with Rank(engine_config, "full", KVCacheLayout.LBNHC, store, pages=1, seed=1) as rank:
        asked = Asked(rank, "waits", prompt(1, 6 * BLOCK))
        assert asked.hits() == {}
        stored(rank, prompt(1, 6 * BLOCK))
        assert asked.hits() == {}
        rank.manager.admitted("waits")
        assert asked.hits() == {0: list(range(6))}


def test_a_flush_waits_for_the_copy_and_not_for_the_disk(
    engine_config: VllmConfig, store: Path, prompt: Prompt
) -> None:
    files = HungFiles()
    with Rank(engine_config, "full", KVCacheLayout.LBNHC, store, pages=1, files=files) as rank:
        asked, blocks = Asked(rank, "a", prompt(1, 6 * BLOCK)), blocks_for(rank, 3)
        files.hang("pwritev")
        asked.save(blocks)
        rank.worker.wait({1})
        (job,) = rank.worker._jobs.values()
        assert job.transfer is not None and job.transfer.source_free.is_set() and not job.transfer.done.is_set()
        assert finish(rank, 1).success
        files.answer()


def test_an_aborted_load_moves_no_byte_afterwards(engine_config: VllmConfig, store: Path, prompt: Prompt) -> None:
    tokens = prompt(1, 6 * BLOCK)
    with Rank(engine_config, "full", KVCacheLayout.LBNHC, store, pages=1) as rank:
        stored(rank, tokens)
        again, target = Asked(rank, "b", tokens), blocks_for(rank, 12)
        again.load(target, {0: 0})
        rank.worker.wait({2})
        seen = rank.tokens(target)
        assert finish(rank, 2).job_id == 2
        assert all(torch.equal(seen[layer], now) for layer, now in rank.tokens(target).items())


def test_a_flush_of_a_stalled_save_takes_its_blocks_back(
    engine_config: VllmConfig, store: Path, prompt: Prompt
) -> None:
    """The ring is full of pages that wait for a disk: pages that are not copied by then are not stored."""
    files = HungFiles()
    with Rank(
        engine_config, "full", KVCacheLayout.LBNHC, store, pages=1, files=files, ring_pages=2, store_seconds=30.0
    ) as rank:
        asked, blocks = Asked(rank, "a", prompt(1, 6 * BLOCK)), blocks_for(rank, 3)
        files.hang("pwritev")
        asked.save(blocks)
        (job,) = rank.worker._jobs.values()
        assert job.transfer is not None
        rank.worker.wait({1})
        assert job.transfer.source_free.is_set() and not job.transfer.done.is_set(), "it waited for the disk"
        assert finish(rank, 1).success
        files.answer()


def test_a_load_whose_disk_stalls_ends_and_is_recomputed(
    engine_config: VllmConfig, store: Path, prompt: Prompt
) -> None:
    tokens, files = prompt(1, 6 * BLOCK), HungFiles()
    with Rank(engine_config, "full", KVCacheLayout.LBNHC, store, pages=1) as rank:
        stored(rank, tokens)
    with Rank(engine_config, "full", KVCacheLayout.LBNHC, store, pages=1, files=files, load_seconds=0.2) as rank:
        again, target = Asked(rank, "b", tokens), blocks_for(rank, 8)
        assert again.hits()
        files.hang("preadv")
        before = rank.tokens(target)
        again.load(target, {0: 0})
        (job,) = rank.worker._jobs.values()
        assert not finish(rank, 2).success
        assert rank.worker._io._context.read_hangs(), "its disk has answered"
        assert job.transfer is not None and job.transfer.done.is_set(), "its deadline ends it"
        again.load(target, {0: 0}, job=3)
        (refused,) = rank.worker._jobs.values()
        assert refused.transfer is not None and refused.transfer.result is not None
        assert refused.transfer.result.reason == "disk", "another load does not wait for that disk"
        assert not finish(rank, 3).success
        files.answer()
        until = time.monotonic() + 20.0
        while rank.worker._io._context.read_hangs():
            assert time.monotonic() < until
            time.sleep(0.01)
        assert all(torch.equal(before[layer], now) for layer, now in rank.tokens(target).items())
        rank.worker._settings = replace(rank.worker._settings, load_seconds=20.0)
        again.load(target, {0: 0}, job=4)
        assert finish(rank, 4).success


def test_the_log_of_a_disk_that_fails_is_not_flooded(
    engine_config: VllmConfig, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    monkeypatch.setattr(worker.logger, "warning", lambda message, *args, **_: logged.append(message % args))
    with Rank(engine_config, "full", KVCacheLayout.LBNHC, store, pages=1) as rank:
        for pages in range(1, 4):
            rank.worker._refused("load", TimeoutError(f"attempt {pages}"))
            result = TransferResult(0, 0, 0, 0, pages, {}, "space")
            rank.worker._publishing = [SimpleNamespace(result=result)]  # type: ignore[list-item]
            rank.worker.get_finished()
    assert logged == [
        "kvfs: a load was refused: attempt 1",
        "kvfs: pages were not stored (space, 1 the first time)",
    ]


def test_a_store_that_was_removed_is_named(
    engine_config: VllmConfig, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    monkeypatch.setattr(worker.logger, "warning", lambda message, *args, **_: logged.append(message % args))
    with Rank(engine_config, "full", KVCacheLayout.LBNHC, store, pages=1) as rank:
        shutil.rmtree(store)
        for _ in range(2):
            result = TransferResult(0, 0, 0, 0, 3, {}, "index")
            rank.worker._publishing = [SimpleNamespace(result=result)]  # type: ignore[list-item]
            rank.worker.get_finished()
    assert logged == [
        f"kvfs: the store {store} was removed: nothing is stored or found until the engine restarts",
        "kvfs: pages were not stored (index, 3 the first time)",
    ]


def test_after_a_reset_among_requests_nothing_is_stored(engine_config: VllmConfig, store: Path, prompt: Prompt) -> None:
    """Their blocks, and the engine's own prefix cache, hold KV of the previous weights."""
    with Rank(engine_config, "full", KVCacheLayout.LBNHC, store, pages=1) as rank:
        asked = Asked(rank, "a", prompt(1, 6 * BLOCK))
        rank.manager.tainted = True
        rank.manager.reset_cache()
        assert asked.save(blocks_for(rank, 3)) == 0
        rank.manager.tainted = False
        assert asked.save(blocks_for(rank, 3), job=2) == 6


def test_after_a_failed_load_lookups_miss(engine_config: VllmConfig, store: Path, prompt: Prompt) -> None:
    tokens = prompt(1, 6 * BLOCK)
    with Rank(engine_config, "full", KVCacheLayout.LBNHC, store, pages=1) as rank:
        stored(rank, tokens)
        again = Asked(rank, "b", tokens)
        assert again.hits()
        for path in (store / "segments").rglob("*"):
            if path.is_file():
                path.write_bytes(bytes(path.stat().st_size))
        assert not rank.manager.is_loading("b"), "a load that fails now belongs to another connector"
        again.load(blocks_for(rank, 8), {0: 0})
        assert not finish(rank, 2).success
        assert rank.manager.is_loading("b")
        rank.manager.complete_load(list(again.keys.values()), again.context)
        rank.manager.load_failed("b")
        assert again.hits() == {} and not rank.manager.is_loading("b")


def test_what_a_request_depends_on_in_addition_to_tokens_is_in_its_keys(
    engine_config: VllmConfig, store: Path, prompt: Prompt
) -> None:
    tokens = prompt(1, 6 * BLOCK)

    def image(identifier: str, offset: int) -> Any:
        place = SimpleNamespace(offset=offset, length=20)
        return SimpleNamespace(modality="image", identifier=identifier, mm_position=place)

    with Rank(engine_config, "full", KVCacheLayout.LBNHC, store, pages=1) as rank:
        asked = Asked(rank, "a", tokens, mm_features=[image(CAT, 20)])
        asked.save(blocks_for(rank, 3))
        finish(rank, 1)
        settle(rank)
        assert Asked(rank, "b", tokens, mm_features=[image(CAT, 20)]).hits() == {0: list(range(6))}
        for number, fields in enumerate(
            ({"mm_features": [image(DOG, 20)]}, {"mm_features": [image(CAT, 21)]}, {}, )
        ):  # fmt: skip
            assert Asked(rank, f"c{number}", tokens, **fields).hits() == {0: [0]}, "the page before the image"
        assert Asked(rank, "d", tokens, mm_features=[image(CAT, 20)], cache_salt="tenant").hits() == {}
        rank.manager.reset_cache()
        assert Asked(rank, "e", tokens, mm_features=[image(CAT, 20)]).hits() == {}


def test_requests_that_do_not_depend_on_their_tokens_alone_are_bypassed(
    engine_config: VllmConfig, store: Path, prompt: Prompt
) -> None:
    tokens = prompt(1, 6 * BLOCK)
    with Rank(engine_config, "full", KVCacheLayout.LBNHC, store, pages=1) as rank:
        named_by_a_client = SimpleNamespace(
            modality="image", identifier="img1", mm_position=SimpleNamespace(offset=20, length=20)
        )
        for number, fields in enumerate(
            ({"lora_request": SimpleNamespace(name="x")}, {"resumable": True}, {"mm_features": [named_by_a_client]})
        ):
            asked = Asked(rank, f"a{number}", tokens, **fields)
            assert asked.hits() == {} and asked.save(blocks_for(rank, 3), job=10 + number) == 0
            assert finish(rank, 10 + number).success


def test_limits_of_length(engine_config: VllmConfig, store: Path, prompt: Prompt) -> None:
    with Rank(engine_config, "full", KVCacheLayout.LBNHC, store, pages=1, min_tokens=50, max_tokens=64) as rank:
        assert Asked(rank, "short", prompt(1, 3 * BLOCK)).save(blocks_for(rank, 3), job=1) == 0
        assert Asked(rank, "long", prompt(1, 6 * BLOCK)).save(blocks_for(rank, 3), job=2) == 4


@pytest.mark.parametrize(("prompt_only", "pages"), [(False, 2), (True, 0)])
def test_a_short_prompt_grows_into_pages(
    engine_config: VllmConfig, store: Path, prompt: Prompt, prompt_only: bool, pages: int
) -> None:
    """It has no page at first, and two with the generated tokens; where only prompts are stored, none."""
    tokens = prompt(1, 6 * BLOCK)
    with Rank(engine_config, "full", KVCacheLayout.LBNHC, store, pages=3, offload_prompt_only=prompt_only) as rank:
        short = Asked(rank, "short", tokens[:BLOCK], generates=5 * BLOCK)
        assert short.hits() == {}
        short.generate(tokens[BLOCK:])
        assert short.save(blocks_for(rank, 3)) == pages
        assert finish(rank, 1).success
        settle(rank)
        assert Asked(rank, "long", tokens).hits() == ({0: [0, 1]} if pages else {})
        assert Asked(rank, "never a page", tokens[:BLOCK], generates=BLOCK).save(blocks_for(rank, 3), job=2) == 0
        assert list(rank.manager._requests) == (["long"] if prompt_only else ["short", "long"])


FULL, WINDOW = SPECS["full"][0][0], SPECS["hybrid"][1][0]
#: part of the message -> the change to an engine that is served, and its groups
REFUSALS: dict[str, tuple[Callable[[VllmConfig], None], list[KVCacheSpec]]] = {
    "states are kept for the last token only": (
        lambda c: None, [MambaSpec(block_size=BLOCK, shapes=((4, 4),), dtypes=(torch.float32,))]
    ),
    "it has layers with RSWASpec": (
        lambda c: None, [RSWASpec(**_FULL, dtype=torch.bfloat16, rswa_window=64)]
    ),
    "prefill context parallelism splits": (
        lambda c: setattr(c.parallel_config, "prefill_context_parallel_size", 2), [FULL]
    ),
    "compressed or split over ranks, in pages of 48": (
        lambda c: None, [replace(FULL, tokens_per_state=4), replace(WINDOW, block_size=48)]
    ),
    "fit no page of 4096": (lambda c: None, [FULL, replace(WINDOW, block_size=4112)]),
    "device is xpu": (lambda c: setattr(c.device_config, "device_type", "xpu"), [FULL]),
    "depend on the first requests": (lambda c: setattr(c.cache_config, "calculate_kv_scales", True), [FULL]),
    "cross attention": (lambda c: setattr(c.model_config.hf_config, "is_encoder_decoder", True), [FULL]),
    "which is not an even share of 3 ranks": (lambda c: setattr(c.parallel_config, "tensor_parallel_size", 3), [FULL]),
    "backend that was not named": (
        lambda c: None, [replace(FULL, kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD)]
    ),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSALS)
def test_engines_whose_kv_cannot_be_kept_are_refused(engine_config: VllmConfig, why: str) -> None:
    """With the reason, when the engine starts. The same engine without that is served."""
    change, specs = REFUSALS[why]
    config = copy.deepcopy(engine_config)
    change(config)
    groups = [KVCacheGroupSpec([f"model.layers.{n}.self_attn.attn"], spec) for n, spec in enumerate(specs)]
    with pytest.raises(UnsupportedModelError, match=why) as caught:
        model_of(config, KVCacheConfig(BLOCKS, [], groups), 1, "w")
    assert str(caught.value).endswith("Start it without KvfsConnector")
    whole = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["model.layers.0.self_attn.attn"], FULL)])
    model_of(engine_config, whole, 1, "w")


@pytest.mark.parametrize(
    ("blocks", "per_page"),
    [
        ((16,), 4), ((32,), 2), ((64,), 1), ((128,), 1), ((8,), 8), ((48,), 1), ((16, 16), 1), ((8, 8), 2),
        ((16, 32), 1), ((4, 64, 256), 1),
    ],
)  # fmt: skip
def test_blocks_of_a_page(blocks: tuple[int, ...], per_page: int) -> None:
    extra: dict[str, Any] = {}
    set_defaults(extra, blocks)
    assert extra["blocks_per_chunk"] == per_page
    single: dict[str, Any] = {}
    set_defaults(single, blocks, single=True)
    assert single["blocks_per_chunk"] == 1, "blocks that are moved as they are"
