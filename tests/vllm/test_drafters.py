"""A real engine with a drafter, across restarts: as many drafts are accepted as after a prompt that was computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.vllm.engine import Engine
from tests.vllm.models import build_eagle

Models = Callable[[str], Path]
Prompt = Callable[..., list[int]]


def drafted(engine: Engine, prompt: list[int]) -> tuple[tuple[int, list[int]], float]:
    """What is generated, and the share of the drafts that were accepted."""
    before = engine.metrics()
    (answer,) = engine.generate(prompt, max_tokens=24)
    after = engine.metrics()
    names = ("spec_decode_num_accepted_tokens", "spec_decode_num_draft_tokens")
    accepted, drafts = (after[name] - before[name] for name in names)
    assert drafts
    return answer, accepted / drafts


def test_the_kv_of_eagles_layer_is_restored(model: Models, prompt: Prompt, tmp_path: Path) -> None:
    """Its layer has the number that follows those of the model, and shares their group of the engine."""
    drafting = {"method": "eagle", "model": str(build_eagle(tmp_path / "eagle")), "num_speculative_tokens": 2}
    caches, answers = [], []
    for _ in range(2):
        with Engine(model("llama"), tmp_path / "store", speculative_config=drafting) as engine:
            answers.append(engine.generate(prompt(1))[0])
            caches.append({block for block in engine.cache() if block.startswith("4 ")})
    assert answers == [(0, answers[0][1]), (640, answers[0][1])]
    assert len(caches[0] & caches[1]) >= 2 * 640 // 32, "the restored blocks of both heads"


def test_a_restored_prompt_is_drafted_as_well_as_a_computed_one(model: Models, prompt: Prompt, tmp_path: Path) -> None:
    """The drafter is the model itself, so that its drafts are right as long as it sees the KV of the prompt."""
    options: dict[str, Any] = {
        "speculative_config": {"method": "draft_model", "model": str(model("llama")), "num_speculative_tokens": 3}
    }
    with Engine(model("llama"), tmp_path / "store", **options) as first:
        (_, tokens), computed = drafted(first, prompt(1))
    assert computed > 0.8
    with Engine(model("llama"), tmp_path / "store", **options) as second:
        assert drafted(second, prompt(1)) == ((640, tokens), computed)
        assert second.metrics()["kvfs_pages_loaded"] == 20, "ten of the model and ten of the drafter"
    with Engine(model("llama"), tmp_path / "other", extra={"drafter": False}, **options) as first:
        assert drafted(first, prompt(1)) == ((0, tokens), computed)
    with Engine(model("llama"), tmp_path / "other", extra={"drafter": False}, **options) as second:
        answer, restored = drafted(second, prompt(1))
        assert answer == (640, tokens) and restored < computed, "without the KV of the drafter"
