"""A real engine with LoRA adapters, and one with a drafter, across restarts: the tokens of an engine without kvfs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.vllm.engine import Engine
from tests.vllm.models import build, build_adapter

Models = Callable[[str], Path]
Prompt = Callable[..., list[int]]


def test_two_adapters_find_their_own_pages(model: Models, prompt: Prompt, tmp_path: Path) -> None:
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    one = ("one", 1, str(build_adapter(tmp_path / "one", 1)))
    two = ("two", 2, str(build_adapter(tmp_path / "two", 2)))
    with Engine(model("llama"), tmp_path / "store", **options) as first:
        computed = [first.generate(prompt(1), lora=lora)[0] for lora in (one, two, None)]
    assert [cached for cached, _ in computed] == [0, 0, 0]
    assert len({tuple(tokens) for _, tokens in computed}) == 3, "the adapters change what is generated"
    (tmp_path / "two").rename(tmp_path / "renamed")
    with Engine(model("llama"), tmp_path / "store", **options) as second:
        again = [second.generate(prompt(1), lora=lora)[0] for lora in (one, ("x", 7, str(tmp_path / "renamed")), None)]
    assert again == [(640, tokens) for _, tokens in computed]


def test_an_engine_with_a_drafter_finds_what_one_without_stored(model: Models, prompt: Prompt, tmp_path: Path) -> None:
    drafter = build("llama", tmp_path / "drafter", seed=5)
    drafting = {"method": "draft_model", "model": str(drafter), "num_speculative_tokens": 2}
    with Engine(model("llama"), tmp_path / "store") as plain:
        first, second = plain.generate(prompt(1), prompt(2))
    left_out = {"drafter": False}
    with Engine(model("llama"), tmp_path / "store", extra=left_out, speculative_config=drafting) as engine:
        assert engine.generate(prompt(1)) == [(640, first[1])]
        third = engine.generate(prompt(3))
        assert engine.generate(prompt(3)) == [(640, third[0][1])]
        assert engine.generate(prompt(2)) == [(640, second[1])]
