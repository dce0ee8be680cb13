"""One identity for all engines: equal for what means the same KV, different for what does not."""

from __future__ import annotations

from typing import Any

import pytest

import kvfs
from kvfs.errors import ConfigError, UnsupportedModelError
from kvfs.pages.identity import Identity

COMMIT = "a" * 40
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "hidden_size": 64, "rope_theta": 500000.0, "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK = {**LLAMA, "model_type": "deepseek_v3", "kv_lora_rank": 64, "qk_rope_head_dim": 16}


def digest(config: Any = LLAMA, weights: str = COMMIT, **how: Any) -> bytes:
    return Identity(**kvfs.shared_identity(config, weights, **{"dtype": "bfloat16", **how})).digest


def test_spellings_of_one_model_are_one_identity() -> None:
    import torch

    newer = {k: v for k, v in LLAMA.items() if k not in ("rope_theta", "torch_dtype")}
    newer |= {"dtype": "bfloat16", "rope_parameters": {"rope_type": "default", "rope_theta": 500000}}
    assert (
        digest() == digest(newer) == digest(dtype=torch.bfloat16) == digest(kv_dtype="bf16") == digest(page_tokens=64)
    )


def test_what_changes_kv_or_pages_changes_the_identity() -> None:
    others = [
        digest(weights="b" * 40), digest(dtype="float16"), digest(kv_dtype="float16"), digest(page_tokens=16),
        digest({**LLAMA, "rope_theta": 10000.0}), digest({**LLAMA, "num_hidden_layers": 3}),
        digest(kv_dtype="float8_e4m3fn", scale_digest="unit"), digest(DEEPSEEK), digest(DEEPSEEK, rope="halves"),
    ]  # fmt: skip
    assert len({digest(), *others}) == 1 + len(others)


def test_what_does_not_determine_kv_is_refused() -> None:
    with pytest.raises(ConfigError, match="dtype in which the engine computes"):
        digest(dtype="auto")
    with pytest.raises(ConfigError, match="a moving name"):
        digest(weights="main")
    with pytest.raises(UnsupportedModelError):
        digest({**LLAMA, "model_type": "mamba2"})


def test_two_engines_with_one_identity_read_the_same_pages(memory_path: Any) -> None:
    with kvfs.open(memory_path / "store", capacity="32MiB") as store:
        first, second = (store.namespace(**kvfs.shared_identity(LLAMA, COMMIT, dtype="bfloat16")) for _ in range(2))
        page = bytes(range(256)) * (first.layout.page_bytes // 256)
        assert first.put(range(64), page).stored == 1
        out = bytearray(page)
        assert second.get(second.match(range(64)), out) == 1 and first.name == "llama"
