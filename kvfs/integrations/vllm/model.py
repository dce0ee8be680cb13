"""What an engine's KV depends on: groups of pages, and the identity of the namespace.

Scheduler and workers compute it separately from the same configuration and must agree, so what only one of them sees
(block tables, tensors) is not part of it. Anything that can change KV for equal tokens is in the identity or refused:
an unknown field of the model's config leads to another namespace, never to a wrong hit. TP and PP sizes are not part of
it: a rank stores a part of each page.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvfs.errors import ConfigError, UnsupportedModelError
from kvfs.integrations.vllm.weights import weights_id
from kvfs.pages.hf_config import config_digest
from kvfs.pages.layout import Cell, Group, Need, PageLayout

_DTYPES = {"torch.bfloat16": "bf16", "torch.float16": "f16", "torch.float32": "f32"}
_DRAFTERS_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
_LENGTH_SCALED = ("dynamic", "longrope", "su")  # rope kinds that vLLM scales by max_model_len at start


@dataclass(frozen=True)
class EngineGroup:
    """One KV cache group of the engine, and its pages in the store."""

    name: str  # of the group in the layout
    index: int  # of the group in the engine
    block_tokens: int
    packed: bool  # the byte order inside a block is not by token, so only whole blocks can be moved


@dataclass(frozen=True)
class EngineModel:
    """Everything that scheduler and workers must agree on."""

    name: str
    layout: PageLayout
    revision: str
    extra: Mapping[str, Any]
    groups: tuple[EngineGroup, ...]
    blocks_per_page: int
    items_hashed: bool = True  # whether images and other items are identified by their content

    @property
    def page_tokens(self) -> int:
        return self.layout.page_tokens


def model_of(config: VllmConfig, cache: KVCacheConfig, blocks_per_page: int, given_weights: str) -> EngineModel:
    """Identity and groups. Raises UnsupportedModelError or ConfigError if KV of this engine cannot be reused safely.

    ``given_weights``: the setting ``weights_id``; "" if it is derived from the weights.
    """
    _check(config, cache)
    groups, described = [], []
    for index in cache.prefix_cacheable_group_ids:
        spec, names = cache.kv_cache_groups[index].kv_cache_spec, cache.kv_cache_groups[index].layer_names
        if isinstance(spec, UniformTypeKVCacheSpecs):
            first = next(iter(spec.kv_cache_specs.values()))
            if any(other != first for other in spec.kv_cache_specs.values()):
                _refuse("layers of one group keep KV of different shapes")
            spec = first
        group, packed = _group(config, spec, index, names, blocks_per_page)
        described.append(group)
        groups.append(EngineGroup(group.name, index, spec.block_size, packed))
    sizes = {group.block_tokens for group in groups}
    if len(sizes) > 1:
        _refuse(f"its cache groups have blocks of {sorted(sizes)} tokens")
    layout = PageLayout.of(described, page_tokens=sizes.pop() * blocks_per_page)
    model = config.model_config
    name = model.model.rstrip("/").rpartition("/")[2] if model.model.startswith(("/", ".")) else model.model
    return EngineModel(
        name, layout, given_weights or weights_id(model, config.load_config), _extra(config, groups), tuple(groups),
        blocks_per_page, _hashes_items(config),
    )  # fmt: skip


def _check(config: VllmConfig, cache: KVCacheConfig) -> None:
    parallel, hf = config.parallel_config, config.model_config.hf_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        _refuse("context parallelism splits the tokens of a block over ranks")
    if cache.hisparse_host_num_blocks is not None:
        _refuse("a host-resident sparse cache keeps no whole pages")
    if set(cache.prefix_cacheable_group_ids) != set(range(len(cache.kv_cache_groups))):
        _refuse("some of its cache groups cannot be cached by prefix")
    if parallel.pipeline_parallel_size > 1 and len(cache.kv_cache_groups) > 1:
        _refuse("pipeline parallelism groups the layers of a hybrid model by rank")
    drafting = config.speculative_config
    if drafting is not None and drafting.method not in _DRAFTERS_WITHOUT_KV:
        _refuse("the drafter of speculative decoding keeps a separate KV cache")
    if getattr(config.cache_config, "calculate_kv_scales", False):
        _refuse("scales of its fp8 cache depend on the first requests; use scales of the checkpoint")
    if getattr(hf, "is_encoder_decoder", False):
        _refuse("cross attention does not depend on the decoder's tokens alone")


def _group(config: VllmConfig, spec: Any, index: int, names: list[str], blocks_per_page: int) -> tuple[Group, bool]:
    if type(spec) not in (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec):
        _refuse(f"it has layers with {type(spec).__name__}; full, MLA and sliding-window attention are supported")
    if spec.tokens_per_state != 1 or getattr(spec, "non_causal", False):
        _refuse(f"its {type(spec).__name__} does not keep one causal state per token")
    if getattr(spec, "attention_chunk_size", None):
        _refuse("chunked attention is not a sliding window")
    parallel = config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        layers = tuple(range(config.model_config.hf_text_config.num_hidden_layers))
    else:
        layers = tuple(sorted({extract_layer_index(name) for name in names}))
    window = getattr(spec, "sliding_window", None) if isinstance(spec, SlidingWindowSpec) else None
    packing = _packing(config, spec)
    cell = Cell(_encoding(spec, packing), spec.state_content_size_bytes)
    need = Need.all() if window is None else Need.window_of(window)
    heads = total_heads(config, spec)
    name = f"{'full' if window is None else 'window'}{index}"
    return Group(name, layers, heads, cell, need, spec.block_size * blocks_per_page), bool(packing)


def total_heads(config: VllmConfig, spec: AttentionSpec) -> int:
    """Head slots of all TP ranks together; replicas count once."""
    if isinstance(spec, MLAAttentionSpec):
        return 1
    size = config.parallel_config.tensor_parallel_size
    total = int(config.model_config.get_total_num_kv_heads())
    if size == 1:
        return int(spec.num_heads)
    if spec.num_heads != spec.num_kv_heads or spec.num_kv_heads != max(1, total // size):
        _refuse(f"a rank keeps {spec.num_heads} of {total} KV heads, which is not an even share of {size} ranks")
    if total % size and size % total:
        _refuse(f"{total} KV heads do not share {size} ranks evenly")
    return total


def _packing(config: VllmConfig, spec: AttentionSpec) -> str:
    """The byte order inside a block, for engines of the same kind only; "" if it is token by token."""
    block = f"blocks of {spec.block_size}"
    if config.device_config.device_type == "cpu":
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        isa = _get_attn_isa(config.model_config.dtype, spec.block_size, spec.head_size, config.cache_config.cache_dtype)
        return f"cpu {isa} {block}"
    plain = spec.state_content_bytes is None and spec.num_heads == spec.num_kv_heads
    if plain and spec.kv_quant_mode in (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR):
        return ""
    backend = str(config.attention_config.backend)
    if config.attention_config.backend is None:
        _refuse("its cache is packed by an attention backend that was not named (pass --attention-backend)")
    return f"{backend} {block} slots {spec.num_heads} tp {config.parallel_config.tensor_parallel_size}"


def _encoding(spec: AttentionSpec, packing: str) -> str:
    dtype = _DTYPES.get(str(spec.dtype), str(spec.dtype).removeprefix("torch."))
    if isinstance(spec, MLAAttentionSpec):  # vLLM stores the rotary part interleaved
        text = f"{dtype} latent {spec.head_size} interleaved {spec.cache_dtype_str or 'auto'}"
    else:
        text = f"{dtype} k{spec.head_size}+v{spec.head_size_v}"
    if spec.kv_quant_mode is not KVQuantMode.NONE:
        text += f" {spec.kv_quant_mode.name.lower()}"
    return f"{text} vllm {packing}" if packing else text


def _extra(config: VllmConfig, groups: list[EngineGroup]) -> dict[str, Any]:
    model = config.model_config
    extra = {
        "engine": "vllm",
        # some models write the engine's max_model_len into their config when they load
        "config": config_digest(model.hf_config, {"max_model_len"}),
        "dtype": str(model.dtype).removeprefix("torch."),
        "cache_dtype": str(config.cache_config.cache_dtype),
        "quantization": str(model.quantization or ""),
        "class": str(model.architecture),
        "implementation": str(model.model_impl),
        "groups": [[group.name, group.block_tokens] if group.packed else [group.name] for group in groups],
    }
    rope = json.dumps(getattr(model.hf_text_config, "rope_parameters", None), default=str)
    if any(f'"{kind}"' in rope for kind in _LENGTH_SCALED):
        extra["max_model_len"] = model.max_model_len
    items = model.multimodal_config
    if items is not None:  # the hash of an item covers what the request says, not what the engine adds
        added = [
            getattr(items, name, None) for name in ("mm_processor_kwargs", "media_io_kwargs", "video_pruning_rate")
        ]
        extra["items"] = json.dumps(added, sort_keys=True, default=str)
    return extra


def _hashes_items(config: VllmConfig) -> bool:
    """Whether vLLM hashes images and other items. Without its caches it numbers them."""
    items = config.model_config.multimodal_config
    return items is None or items.mm_processor_cache_gb > 0 or bool(config.cache_config.enable_prefix_caching)


def layers_of(names: list[str]) -> dict[int, str]:
    """Model layer id -> name. ConfigError where two layers share an id."""
    found: dict[int, str] = {}
    for name in names:
        other = found.setdefault(extract_layer_index(name), name)
        if other != name:
            raise ConfigError(f"layers {other} and {name} have one number: start the engine without KvfsConnector")
    return found


def _refuse(why: str) -> Any:
    raise UnsupportedModelError(f"kvfs cannot keep the KV of this engine: {why}. Start it without KvfsConnector")
