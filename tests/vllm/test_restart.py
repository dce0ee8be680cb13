"""The real engine across restarts: a process finds what another computed, with the tokens of one without kvfs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

import kvfs
from kvfs.system.files import Files
from tests.stores import wait_until
from tests.vllm.engine import Engine

Models = Callable[[str], Path]
Prompt = Callable[..., list[int]]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "gemma4"])
def test_a_second_process_finds_what_the_first_computed(
    kind: str, model: Models, prompt: Prompt, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    with Engine(model(kind)) as plain:
        expected = plain.generate(prompt(1), prompt(2))
    with Engine(model(kind), store) as first:
        assert first.generate(prompt(1), prompt(2)) == expected
    with Engine(model(kind), store) as second:
        warm = second.generate(prompt(1), prompt(2))
        hits = second.metrics()["external_prefix_cache_hits"]
        longer = second.generate([*prompt(1), *prompt(3, 100)])
    assert [tokens for _, tokens in warm] == [tokens for _, tokens in expected]
    assert [cached for cached, _ in warm] == [640 if kind != "gemma3" else 672] * 2
    assert hits == sum(cached for cached, _ in warm)
    assert longer[0][0] == warm[0][0], "a longer prompt shares the beginning"


def test_mode_staging_serves_from_the_disk(model: Models, prompt: Prompt, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with Engine(model("llama"), store, extra={"mode": "staging"}) as one:
        first = one.generate(prompt(1))
    with Engine(model("llama"), store) as two:  # the store says what its mode is
        assert two.generate(prompt(1)) == [(640, first[0][1])]
    for path in (store / "segments").glob("*.kvs"):
        with path.open("rb") as file:
            size = path.stat().st_size
            assert (Files().cached_bytes(file.fileno(), 0, size) or 0) < size // 4, "payloads are in the page cache"
    with kvfs.open(store, create=False) as opened:
        assert opened.stats()["mode"] == "staging"
        assert opened.verify().ok


def test_ranks_of_another_degree_are_served(model: Models, prompt: Prompt, tmp_path: Path) -> None:
    """Each rank stores its heads; a page is a hit once all of it is stored, for any number of ranks.

    A load fills the cache with the bytes that the other engine had: 20 blocks of 4 layers and 2 heads.
    """
    store, blocks = tmp_path / "store", 20 * 4 * 2
    with Engine(model("llama"), store) as one:
        first = one.generate(prompt(1))
        cache = one.cache()
    with Engine(model("llama"), store, tensor_parallel_size=2) as two:
        assert two.generate(prompt(1)) == [(640, first[0][1])]
        assert len(two.cache() & cache) >= blocks
        second = two.generate(prompt(2))
        assert second[0][0] == 0
        cache = two.cache()
    with Engine(model("llama"), store, tensor_parallel_size=2) as two:
        assert two.generate(prompt(2)) == [(640, second[0][1])]
        assert len(two.cache() & cache) >= blocks
    with Engine(model("llama"), store) as one:
        assert one.generate(prompt(2)) == [(640, second[0][1])]
        assert len(one.cache() & cache) >= blocks
        assert one.generate(prompt(1)) == [(640, first[0][1])]
    with kvfs.open(store, create=False) as opened:
        assert opened.verify().ok
        assert sum(info.pages for info in opened.catalog.namespaces()) == 10 + 2 * 10, "ten halves by each rank"


def test_layers_on_other_ranks_are_served(model: Models, prompt: Prompt, tmp_path: Path) -> None:
    """Pipeline parallelism: each rank stores its layers."""
    store, blocks = tmp_path / "store", 20 * 4 * 2
    # vLLM's CPU runner allocates the buffers between the stages when it warms up a compiled model
    stages = {
        "pipeline_parallel_size": 2, "enforce_eager": False, "compilation_config": {"mode": 2, "backend": "eager"},
    }  # fmt: skip
    with Engine(model("llama"), store) as one:
        first = one.generate(prompt(1))
        cache = one.cache()
    with Engine(model("llama"), store, **stages) as two:
        assert two.generate(prompt(1)) == [(640, first[0][1])]
        assert len(two.cache() & cache) >= blocks
        second = two.generate(prompt(2))
        assert second[0][0] == 0
        cache = two.cache()
    with Engine(model("llama"), store) as one:
        assert one.generate(prompt(2)) == [(640, second[0][1])]
        assert len(one.cache() & cache) >= blocks
    with kvfs.open(store, create=False) as opened:
        assert opened.verify().ok
        assert sum(info.pages for info in opened.catalog.namespaces()) == 10 + 2 * 10, "ten halves by each rank"


def test_other_weights_dtypes_and_blocks_miss(model: Models, prompt: Prompt, tmp_path: Path) -> None:
    from tests.vllm.models import build

    store = tmp_path / "store"
    with Engine(model("llama"), store) as engine:
        engine.generate(prompt(1))
        assert engine.generate(prompt(1))[0][0] == 640
    others = [
        (build("llama", tmp_path / "other", seed=1), {}),
        (model("llama"), {"dtype": "bfloat16"}),
        (model("llama"), {"block_size": 64}),  # its blocks are packed by the CPU's kernels
    ]
    for path, options in others:
        with Engine(path, store, **options) as engine:
            assert engine.generate(prompt(1))[0][0] == 0


def test_two_engines_share_a_store_and_one_is_killed(model: Models, prompt: Prompt, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with Engine(model("llama"), store) as one, Engine(model("llama"), store) as two:
        first = one.generate(prompt(1))
        with kvfs.open(store, create=False, read_only=True) as opened:  # another engine does not wait for a save
            wait_until(lambda: sum(info.pages for info in opened.catalog.namespaces()) == 10)
        assert two.generate(prompt(1)) == [(640, first[0][1])]
        assert one.process.stdin is not None
        one.process.stdin.write('{"op": "generate", "prompts": %s, "forget": true, "sampling": {}}\n'
                                % [prompt(seed) for seed in range(10, 30)])  # fmt: skip
        one.process.stdin.flush()
        with kvfs.open(store, create=False, read_only=True) as opened:  # until some of its 200 pages are stored
            end = time.monotonic() + 120
            while sum(info.pages for info in opened.catalog.namespaces()) < 30 and time.monotonic() < end:
                time.sleep(0.005)
        one.kill()
        assert two.generate(prompt(1)) == [(640, first[0][1])]
        fresh = two.generate(prompt(40))
        assert two.generate(prompt(40)) == [(640, fresh[0][1])]
        for seed in range(10, 30):  # stored or not: right tokens
            cached, tokens = two.generate(prompt(seed))[0]
            assert two.generate(prompt(seed))[0][1] == tokens, (seed, cached)


def test_after_reset_cache_nothing_stored_before_is_found(model: Models, prompt: Prompt, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with Engine(model("llama"), store) as engine:
        first = engine.generate(prompt(1))
        assert engine.generate(prompt(1))[0][0] == 640
        assert engine.ask("reset") and engine.ask("reset"), "twice without a step between"
        assert engine.generate(prompt(1)) == first, "computed again"
        assert engine.generate(prompt(1)) == [(640, first[0][1])], "and stored again"
    with Engine(model("llama"), store) as engine:
        assert engine.generate(prompt(1)) == [(640, first[0][1])]


def test_generated_tokens_are_stored_if_asked_for(model: Models, prompt: Prompt, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with Engine(model("llama"), store, extra={"offload_prompt_only": False}) as engine:
        tokens = engine.generate(prompt(1, 100), max_tokens=200)[0][1]
    with Engine(model("llama"), store) as engine:
        turn = [*prompt(1, 100), *tokens, *prompt(2, 50)]
        assert engine.generate(turn)[0][0] == 256, "four pages of 64 of the 299 tokens that have KV"
