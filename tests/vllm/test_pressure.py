"""The real engine with too few blocks, with aborted requests, and with other connectors next to kvfs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engine import Engine

pytestmark = pytest.mark.timeout(600)
Models = Callable[[str], Path]
Prompt = Callable[..., list[int]]
#: 48 blocks of 32 tokens: four requests of 300 tokens fit until they have generated some tokens
SMALL: dict[str, Any] = {"kv_cache_memory_bytes": 3 << 20, "max_model_len": 1024, "max_num_batched_tokens": 1024}

EXAMPLE = {"kv_connector": "ExampleConnector"}
FAILING = {"kv_connector": "FailingConnector", "kv_connector_module_path": "tests.vllm.failing"}


def test_preemption_while_pages_are_loaded_and_saved(model: Models, prompt: Prompt, memory_path: Path) -> None:
    """In memory: requests that resume must not overtake a disk."""
    store, prompts = memory_path / "store", [prompt(seed, 300) for seed in range(4)]
    with Engine(model("llama")) as plain:
        expected = [tokens for _, tokens in plain.generate(*prompts, max_tokens=160)]
    settings = {"offload_prompt_only": False}  # so that blocks of preempted requests are being saved
    for life in range(2):
        with Engine(model("llama"), store, extra=settings, **SMALL) as engine:
            answers = engine.generate(*prompts, max_tokens=160)
            assert [tokens for _, tokens in answers] == expected, f"process {life}"
            counted = engine.metrics()
            assert counted["num_preemptions"] > 0
            assert counted["kvfs_pages_loaded"] > 0, "resumed requests find what they had computed"
            # no block is leaked: a request that needs 30 of the 48
            assert engine.generate(prompt(9, 900), max_tokens=2)[0][0] == (0 if life == 0 else 896)


def test_requests_aborted_while_pages_are_loaded_and_saved(model: Models, prompt: Prompt, tmp_path: Path) -> None:
    store = tmp_path / "store"
    stored, fresh = [prompt(seed, 300) for seed in range(4)], [prompt(seed, 300) for seed in range(10, 14)]
    with Engine(model("llama"), store, **SMALL) as engine:
        expected = engine.generate(*stored, max_tokens=8)
    with Engine(model("llama"), store, **SMALL) as engine:
        for steps in range(4):
            assert engine.ask("abort", prompts=stored, steps=steps) > 0
            assert engine.ask("abort", prompts=fresh, steps=steps) > 0
        answers = engine.generate(*stored, max_tokens=8)
        assert answers == [(256, tokens) for _, tokens in expected]
        assert engine.generate(prompt(9, 900), max_tokens=2)[0][0] == 0, "no block is leaked"
        warm = engine.generate(*fresh, max_tokens=8)
        assert any(cached > 0 for cached, _ in warm), "pages that were saved before the abort"
    with Engine(model("llama"), **SMALL) as plain:
        assert [tokens for _, tokens in warm] == [tokens for _, tokens in plain.generate(*fresh, max_tokens=8)]


def next_to(store: Path, other: dict[str, Any], shared: Path) -> dict[str, Any]:
    """A configuration of kvfs and another connector after it."""
    children = [
        {"kv_connector": "KvfsConnector", "kv_role": "kv_both",
         "kv_connector_extra_config": {"path": str(store), "capacity": "256MiB"}},
        {"kv_role": "kv_both", "kv_connector_extra_config": {"shared_storage_path": str(shared)}, **other},
    ]  # fmt: skip
    return {
        "kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": children},
    }  # fmt: skip


def test_below_multiconnector(model: Models, prompt: Prompt, tmp_path: Path) -> None:
    """What kvfs cannot read is computed, or read by the other connector."""
    transfer = next_to(tmp_path / "store", EXAMPLE, tmp_path / "other")
    with Engine(model("llama"), transfer=transfer) as first:
        expected = first.generate(prompt(1), prompt(2))
    with Engine(model("llama"), transfer=transfer, faulty=True) as second:
        assert second.generate(prompt(1)) == [(640, expected[0][1])]
        assert second.metrics()["kvfs_pages_loaded"] == 10
        second.fault(kind="preadv")
        assert second.generate(prompt(2))[0][1] == expected[1][1]
        assert second.metrics()["kvfs_loads_failed"] == 1


def test_what_another_connector_loads_within_a_step_is_stored_only_if_it_is_right(
    model: Models, prompt: Prompt, tmp_path: Path
) -> None:
    store, shared, (right, wrong, fresh) = tmp_path / "store", tmp_path / "shared", map(prompt, range(3))
    with Engine(model("llama"), transfer=next_to(tmp_path / "first", EXAMPLE, shared)) as first:
        expected = first.generate(right, wrong, fresh)
    with Engine(model("llama"), transfer=next_to(store, EXAMPLE, shared)) as good:
        assert good.generate(right) == [(672, expected[0][1])]
        good.generate(prompt(8, 40))  # one more step
    with Engine(model("llama"), transfer=next_to(store, FAILING, shared)) as bad:
        assert bad.generate(wrong)[0][1] == expected[1][1], "the engine computes it again"
        bad.generate(prompt(8, 40))
    with Engine(model("llama"), store) as alone:
        assert alone.generate(right) == [(640, expected[0][1])]
        assert alone.generate(wrong) == [(0, expected[1][1])]
        assert alone.generate(fresh) == [(0, expected[2][1])]
