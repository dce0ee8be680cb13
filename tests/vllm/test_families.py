"""Families of models of 2024 to 2026: what vLLM's own grouping makes of their caches, and whether kvfs keeps it.

The shapes are those of the models' configurations, with vLLM's default block sizes on a GPU and no parallelism. The
table in docs/vllm.md is the output of ``table``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    iter_layer_specs,
)

from kvfs.errors import UnsupportedModelError
from kvfs.integrations.vllm.model import default_blocks, layer_specs, model_of
from kvfs.integrations.vllm.settings import set_defaults
from tests.vllm.grouping import groups_of
from tests.vllm.test_kinds import Drafting

DOC = Path(__file__).resolve().parents[2] / "docs" / "vllm.md"
BF16, F32, U8 = torch.bfloat16, torch.float32, torch.uint8
Specs = dict[str, KVCacheSpec]


def _full(heads: int, size: int, block: int = 16, **fields: Any) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block, num_kv_heads=heads, head_size=size, dtype=BF16, **fields)


def _window(heads: int, size: int, window: int, **fields: Any) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=16, num_kv_heads=heads, head_size=size, dtype=BF16, sliding_window=window, **fields
    )


def _latent(size: int = 576, dtype: torch.dtype = BF16, **fields: Any) -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size=fields.pop("block", 64), num_kv_heads=1, head_size=size, dtype=dtype, **fields)


def _layers(numbers: Any, spec: KVCacheSpec, name: str = "self_attn.attn", head: str = "model.layers") -> Specs:
    return {f"{head}.{n}.{name}": spec for n in numbers}


def _hybrid(
    full: Any, attention: Callable[[int], KVCacheSpec], states: Any, shapes: Any, dtypes: Any, name: str
) -> Specs:
    """As vLLM aligns them: the attention block is the least multiple of 16 tokens that holds a state."""
    state = MambaSpec(block_size=16, shapes=shapes, dtypes=dtypes)
    token = attention(16).page_size_bytes // 16
    unit = 128 if isinstance(attention(16), MLAAttentionSpec) else 16
    block = -(-state.page_size_bytes // (token * unit)) * unit
    padded = MambaSpec(
        block_size=block, shapes=shapes, dtypes=dtypes, page_size_padded=block * token, mamba_cache_mode="align"
    )
    return {**_layers(full, attention(block)), **_layers(states, padded, name)}


def _every(n: int, layers: int, first: int = 0) -> list[int]:
    return list(range(first, layers, n))


def _others(layers: int, some: list[int]) -> list[int]:
    return [n for n in range(layers) if n not in some]


def _mixed(layers: int, some: list[int], one: KVCacheSpec, other: KVCacheSpec) -> Specs:
    return {f"model.layers.{n}.self_attn.attn": one if n in some else other for n in range(layers)}


class Family(NamedTuple):
    specs: Specs
    layers: int  # of the model, without a drafter's
    drafter: bool = False
    encoder: bool = False


def _deepseek_v4(layers: int) -> Specs:
    swa = SlidingWindowMLASpec(
        block_size=64, num_kv_heads=1, head_size=584, dtype=U8, sliding_window=128, cache_dtype_str="fp8_ds_mla",
        alignment=576, model_version="deepseek_v4",
    )  # fmt: skip
    sparse = MLAAttentionSpec(
        block_size=256, num_kv_heads=1, head_size=584, dtype=U8, tokens_per_state=4, cache_dtype_str="fp8_ds_mla",
        alignment=576, model_version="deepseek_v4",
    )  # fmt: skip
    return {**_layers(range(layers), swa, "attn.swa_cache"), **_layers(_every(2, layers), sparse, "attn.mla_attn")}


_QWEN_FULL = _every(4, 48, 3)
_NEMOTRON_FULL, _NEMOTRON_STATES = [14, 21, 30, 39], _every(2, 52)
_MIMO_FULL = [0, 5, 11, 17, 23, 29, 35, 41, 47]
FAMILIES: dict[str, Family] = {
    "Llama 3.x, Mistral 3, Phi-4": Family(_layers(range(80), _full(8, 128)), 80),
    "Qwen3, Qwen3-MoE": Family(_layers(range(94), _full(4, 128)), 94),
    "GLM-4.5 to 4.7 with MTP": Family(_layers(range(47), _full(8, 128)), 46, drafter=True),
    "Llama 3.x with EAGLE-3": Family(_layers(range(33), _full(8, 128)), 32, drafter=True),
    "Gemma 3": Family(_mixed(62, _every(6, 62, 5), _full(16, 128), _window(16, 128, 1024)), 62),
    "Gemma 4": Family(_mixed(60, _every(6, 60, 5), _full(4, 512), _window(16, 256, 1024)), 60),
    "gpt-oss": Family(_mixed(36, _every(2, 36, 1), _full(8, 64), _window(8, 64, 128)), 36),
    "MiMo-V2-Flash": Family(
        _mixed(48, _MIMO_FULL, _full(4, 192, head_size_v=128), _window(8, 192, 128, head_size_v=128)), 48
    ),
    "Llama 4": Family(
        _mixed(48, _every(4, 48, 3), _full(8, 128), ChunkedLocalAttentionSpec(
            block_size=16, num_kv_heads=8, head_size=128, dtype=BF16, attention_chunk_size=8192)), 48,
    ),
    "DeepSeek-V3, R1, Kimi-K2": Family(_layers(range(61), _latent()), 61),
    "DeepSeek-V3 with MTP": Family(_layers(range(62), _latent()), 61, drafter=True),
    "DeepSeek-V3.2, GLM-5": Family(
        {**_layers(range(61), _latent()), **_layers(range(61), _latent(132, U8), "self_attn.indexer.k_cache")}, 61
    ),
    "DeepSeek-V4": Family(_deepseek_v4(43), 43),
    "LongCat-Flash": Family(
        {**_layers(range(28), _latent(), "self_attn.0.attn"), **_layers(range(28), _latent(), "self_attn.1.attn")}, 28
    ),
    "Qwen3-Next, 3.5": Family(
        _hybrid(_QWEN_FULL, lambda b: _full(2, 256, b), _others(48, _QWEN_FULL), ((3, 8192), (32, 128, 128)),
                (BF16, F32), "linear_attn"), 48,
    ),
    "Kimi-Linear": Family(
        _hybrid(_every(4, 27, 3), lambda b: _latent(block=b), _others(27, _every(4, 27, 3)),
                ((3, 4096), (3, 4096), (3, 4096), (32, 128, 128)), (BF16, BF16, BF16, F32), "self_attn"), 27,
    ),
    "Nemotron-H, Nemotron 3": Family(
        _hybrid(_NEMOTRON_FULL, lambda b: _full(8, 128, b), _NEMOTRON_STATES, ((3, 12288), (128, 64, 128)),
                (BF16, F32), "mixer"), 52,
    ),
    "Granite 4 H": Family(
        _hybrid(_every(10, 40, 5), lambda b: _full(8, 128, b), _others(40, _every(10, 40, 5)),
                ((3, 8448), (128, 64, 128)), (BF16, F32), "mamba"), 40,
    ),
    "Jamba": Family(
        _hybrid(_every(8, 32, 4), lambda b: _full(8, 128, b), _others(32, _every(8, 32, 4)),
                ((3, 8192), (8192, 16)), (BF16, F32), "mamba"), 32,
    ),
    "Falcon-H1": Family(
        _hybrid(range(44), lambda b: _full(4, 128, b), range(44), ((3, 4608), (32, 128, 256)), (BF16, F32), "mamba"),
        44,
    ),
    "MiniMax-M1": Family(
        _hybrid(_every(8, 80, 7), lambda b: _full(8, 128, b), _others(80, _every(8, 80, 7)), ((64, 128, 128),),
                (F32,), "self_attn"), 80,
    ),
    "LFM2": Family(
        _hybrid([2, 5, 8, 10, 12, 14], lambda b: _full(8, 64, b), _others(16, [2, 5, 8, 10, 12, 14]), ((2, 2048),),
                (BF16,), "conv"), 16,
    ),
    "Whisper": Family(
        {**_layers(range(32), _full(20, 64)), **_layers(range(32), CrossAttentionSpec(
            block_size=16, num_kv_heads=20, head_size=64, dtype=BF16), "encoder_attn.attn")}, 32, encoder=True,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def engine_config(model: Callable[[str], Path]) -> VllmConfig:
    args = EngineArgs(model=str(model("llama")), enforce_eager=True, block_size=16, max_model_len=1024, dtype="float32")
    config = args.create_engine_config()
    config.device_config.device_type = "cuda"
    config.cache_config.kv_cache_layout = "LBHNC"
    return config


def row(config: VllmConfig, name: str) -> str:
    """A row of the table."""
    family, config = FAMILIES[name], copy.deepcopy(config)
    config.model_config.get_total_num_hidden_layers = lambda: family.layers  # type: ignore[method-assign]
    config.model_config.hf_config.is_encoder_decoder = family.encoder
    if family.drafter:
        config.speculative_config = Drafting()  # type: ignore[assignment]
    groups = groups_of(config, family.specs)
    cache = KVCacheConfig(1000, [], groups, kv_cache_layout="LBHNC")
    kinds: dict[str, int] = {}
    for group in groups:
        spec = next(iter(iter_layer_specs(group.kv_cache_spec)))
        kind = f"{type(spec).__name__.removesuffix('Spec').removesuffix('Attention')} {spec.block_size}"
        kinds[kind] = kinds.get(kind, 0) + 1
    shown = ", ".join(f"{count} x {kind}" if count > 1 else kind for kind, count in kinds.items())
    extra: dict[str, Any] = {}
    set_defaults(extra, *default_blocks(config, cache))
    try:
        found = model_of(config, cache, extra["blocks_per_chunk"], "w", layer_specs(cache))
        answer = f"pages of {found.page_tokens} tokens"
    except UnsupportedModelError as exc:
        answer = "refused: " + str(exc).partition(": ")[2].removesuffix(". Start it without KvfsConnector")
    return f"| {name} | {shown} | {answer} |"


@pytest.mark.parametrize("name", FAMILIES)
def test_the_manual_says_what_becomes_of_each_family(engine_config: VllmConfig, name: str) -> None:
    expected = row(engine_config, name)
    assert expected in DOC.read_text().splitlines(), expected


def test_only_what_the_engines_own_offloading_refuses_too_is_refused(engine_config: VllmConfig) -> None:
    refused = [name for name in FAMILIES if "refused" in row(engine_config, name)]
    assert refused == ["Whisper"] and len(FAMILIES) >= 20
