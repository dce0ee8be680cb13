"""What an engine's KV depends on: groups of pages, and the identity of the namespace.

Scheduler and workers compute it separately from the same configuration and must agree, so what only one of them sees
(block tables, tensors) is not part of it. Anything that can change KV for equal tokens is in the identity or refused:
an unknown field of the model's config leads to another namespace, never to a wrong hit. TP and PP sizes are not part of
it, except for recurrent states and context parallelism: a rank stores a part of each page.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    iter_layer_specs,
)

from kvfs.errors import UnsupportedModelError
from kvfs.integrations.vllm.drafters import drafter_of, is_drafters, number_in
from kvfs.integrations.vllm.weights import weights_id
from kvfs.pages.hf_config import config_digest
from kvfs.pages.layout import GRANULE_TOKENS, LAYERS_MAX, PAGE_TOKENS_MAX, Cell, Group, Need, PageLayout

_DTYPES = {"torch.bfloat16": "bf16", "torch.float16": "f16", "torch.float32": "f32"}
_ATTENTION = (
    FullAttentionSpec, MLAAttentionSpec, SinkFullAttentionSpec, SlidingWindowSpec, SlidingWindowMLASpec,
    ChunkedLocalAttentionSpec,
)  # fmt: skip
_LENGTH_SCALED = ("dynamic", "longrope", "su")  # rope kinds that vLLM scales by max_model_len at start


@dataclass(frozen=True)
class StoredGroup:
    """Layers of one shape in a cache group of the engine: a group of the layout.

    ``kind``: what a page holds of a head slot. "tokens": a state for each token. "block": the bytes of one block, in an
    order that only engines of the same kind know. "state": the recurrent state at the end of the page.
    """

    name: str
    kind: Literal["tokens", "block", "state"]
    packed: bool  # the byte order inside a block is not by token, so only whole blocks can be moved
    spec: Any  # of each layer
    layers: Mapping[int, str]  # layer id in the layout -> name, of the layers that this process knows
    layer_ids: tuple[int, ...]  # in the layout
    drafts: bool = False  # whether they are the drafter's

    @property
    def whole(self) -> bool:
        """Whether blocks cannot be divided."""
        return self.packed or self.kind == "block"


@dataclass(frozen=True)
class EngineGroup:
    """One KV cache group of the engine: layers that share block tables. Nothing is stored if all are those of a
    drafter that is left out."""

    index: int  # of the group in the engine
    block_tokens: int  # of all ranks together
    chunk_tokens: int  # of what the engine stores and loads at a time
    stored: tuple[StoredGroup, ...]

    def pages(self, stored: StoredGroup, end: int, page_tokens: int) -> range:
        """The pages that the chunk up to token ``end`` touches; of a state the one that ends there, if any."""
        last = -(-end // page_tokens)
        if stored.kind == "state":
            return range(last - 1, last) if end % page_tokens == 0 else range(0)
        return range((end - 1) // self.chunk_tokens * self.chunk_tokens // page_tokens, last)


@dataclass(frozen=True)
class EngineModel:
    """Everything that scheduler and workers must agree on."""

    name: str
    layout: PageLayout
    revision: str
    extra: Mapping[str, Any]
    groups: tuple[EngineGroup, ...]
    blocks_per_chunk: int
    items_hashed: bool = True  # whether images and other items are identified by their content
    adapters: str = ""  # how the engine applies adapters; "": it takes none
    rope: Mapping[str, Any] = field(default_factory=dict)  # where it is not in ``extra``

    @property
    def page_tokens(self) -> int:
        return self.layout.page_tokens


#: for each cache group of the engine: layer name -> spec
LayerSpecs = Sequence[Mapping[str, Any]]


def layer_specs(cache: KVCacheConfig) -> LayerSpecs:
    """The layers that this process was told of: a worker those of its rank, the scheduler those of one rank, with one
    spec for each group."""
    found = []
    for group in cache.kv_cache_groups:
        specs = group.kv_cache_spec
        uniform = isinstance(specs, UniformTypeKVCacheSpecs)
        found.append({name: specs.kv_cache_specs[name] if uniform else specs for name in group.layer_names})
    return found


def merged(ranks: Iterable[LayerSpecs]) -> LayerSpecs:
    """The layers of all ranks, in the same order in all processes."""
    found: list[dict[str, Any]] = []
    for groups in ranks:
        found += [{} for _ in range(len(groups) - len(found))]
        for index, specs in enumerate(groups):
            found[index].update(specs)
    return [dict(sorted(specs.items(), key=lambda item: _place(item[0]))) for specs in found]


def needs_all_ranks(config: VllmConfig, cache: KVCacheConfig) -> bool:
    """Whether a rank does not know all layers of the model: stages of a pipeline divide the groups of a hybrid."""
    return config.parallel_config.pipeline_parallel_size > 1 and len(cache.kv_cache_groups) > 1


def model_of(
    config: VllmConfig, cache: KVCacheConfig, blocks_per_chunk: int, given_weights: str,
    layers: LayerSpecs | None = None, *, drafter: bool = True,
) -> EngineModel:  # fmt: skip
    """Identity and groups. Raises UnsupportedModelError or ConfigError if KV of this engine cannot be reused safely.

    ``given_weights``: the setting ``weights_id``; "" if it is derived from the weights. ``layers``: of all ranks, where
    this process was not told of all of them, or not of all shapes. ``drafter``: whether its layers are kept, if that
    can be.
    """
    _check(config, cache)
    known = layer_specs(cache) if layers is None else layers
    drafting = drafter_of(config, known, given_weights, _ATTENTION) if drafter else None
    taken: set[int] = set()  # layer ids of the layout
    engine, groups = [], []
    for index in cache.prefix_cacheable_group_ids:
        spec = cache.kv_cache_groups[index].kv_cache_spec
        tokens = block_tokens(config, spec)
        found = list(_stored(config, index, _shapes(config, known[index]), taken, whole=len(known) == 1))
        if drafting is not None:
            shapes = _shapes(config, known[index], drafts=True)
            found += _stored(config, index, shapes, taken, whole=False, drafts=True)
        engine.append(EngineGroup(index, tokens, tokens * blocks_per_chunk, tuple(found)))
        groups += found
    if not groups:
        _refuse("none of its cache groups can be cached by prefix")
    page = page_tokens(config, engine)
    layout = PageLayout.of([_layout_group(config, group, page) for group in groups], page_tokens=page)
    model = config.model_config
    name = model.model.rstrip("/").rpartition("/")[2] if model.model.startswith(("/", ".")) else model.model
    blocks = {stored.name: group.block_tokens for group in engine for stored in group.stored}
    return EngineModel(
        name, layout, given_weights or weights_id(model, config.load_config),
        _extra(config, groups, blocks, drafting), tuple(engine), blocks_per_chunk, _hashes_items(config),
        _adapters(config),
    )  # fmt: skip


def block_tokens(config: VllmConfig, spec: Any) -> int:
    """Tokens of a block of all ranks together: context parallelism divides them."""
    shards = config.parallel_config.decode_context_parallel_size if spec.dcp_sharded else 1
    return int(spec.block_size) * int(shards)


def default_blocks(config: VllmConfig, cache: KVCacheConfig) -> tuple[tuple[int, ...], bool]:
    """(tokens of a block, per group; whether a page must be one block)."""
    specs = [cache.kv_cache_groups[index].kv_cache_spec for index in cache.prefix_cacheable_group_ids]
    each = [s for spec in specs for s in iter_layer_specs(spec)]
    return tuple(block_tokens(config, spec) for spec in specs), any(_is_block(config, spec) for spec in each)


def page_tokens(config: VllmConfig, groups: Sequence[EngineGroup]) -> int:
    """Tokens of a page: a common multiple of what the engine stores at a time in each group.

    Shorter where the engine restores recurrent states inside a block (``prefix_match_unit``), or where a block is
    larger than any page; blocks must be divisible then.
    """
    sizes = {group.chunk_tokens for group in groups if group.stored}
    stored = [stored for group in groups for stored in group.stored]
    divisible = len(sizes) == 1 and not any(group.whole for group in stored)
    size = math.lcm(GRANULE_TOKENS, *sizes)
    unit = getattr(config.cache_config, "prefix_match_unit", None)
    if divisible and unit and any(group.kind == "state" for group in stored):
        tail = math.lcm(GRANULE_TOKENS, unit)
        size = tail if size % tail == 0 else size
    if size > PAGE_TOKENS_MAX and divisible and size in sizes:
        size = max(n for n in range(GRANULE_TOKENS, PAGE_TOKENS_MAX + 1, GRANULE_TOKENS) if size % n == 0)
    if size > PAGE_TOKENS_MAX:
        _refuse(f"its cache groups have blocks of {sorted(sizes)} tokens, which fit no page of {PAGE_TOKENS_MAX}")
    for group in groups:
        if any(stored.kind == "block" for stored in group.stored) and group.block_tokens != size:
            _refuse(
                f"blocks of {group.block_tokens} tokens are compressed or split over ranks, in pages of {size} tokens"
            )
    return size


def _check(config: VllmConfig, cache: KVCacheConfig) -> None:
    parallel, hf = config.parallel_config, config.model_config.hf_config
    device = config.device_config.device_type
    if device not in ("cuda", "cpu") or (device == "cuda" and torch.version.hip is not None):
        name = "AMD GPU (ROCm)" if torch.version.hip is not None else device
        _refuse(f"its device is {name}, and kvfs copies from NVIDIA GPUs and from host memory")
    if parallel.prefill_context_parallel_size > 1:
        _refuse("prefill context parallelism splits the tokens of a block over ranks")
    if cache.hisparse_host_num_blocks is not None:
        _refuse("a host-resident sparse cache keeps no whole pages")
    if getattr(config.cache_config, "calculate_kv_scales", False):
        _refuse("scales of its fp8 cache depend on the first requests; use scales of the checkpoint")
    if getattr(hf, "is_encoder_decoder", False):
        _refuse("cross attention does not depend on the decoder's tokens alone")


# -- groups ----------------------------------------------------------------------------------


def _shapes(config: VllmConfig, layers: Mapping[str, Any], *, drafts: bool = False) -> list[tuple[Any, list[str]]]:
    """The layers of an engine's group by their spec: those of the model, or those of its drafter."""
    shapes: dict[Any, list[str]] = {}
    for name, spec in layers.items():
        if is_drafters(config, name) is drafts:
            shapes.setdefault(spec, []).append(name)
    return sorted(shapes.items(), key=lambda item: min(map(_place, item[1])))


def _place(name: str) -> tuple[int, str]:
    """Order of layers, and of shapes in a group: that of the model, equal in all processes."""
    return number_in(name) or 0, name


class _Shape(NamedTuple):
    spec: Any
    names: dict[int, str]  # by the number in the name


def _stored(
    config: VllmConfig, index: int, shapes: list[tuple[Any, list[str]]], taken: set[int], *, whole: bool,
    drafts: bool = False,
) -> Iterable[StoredGroup]:  # fmt: skip
    """The groups of the layout for one group of the engine. Adds their layer ids to ``taken``.

    ``whole``: the group has all layers of the model, of which a stage of a pipeline knows its own.
    """
    distinct = [_Shape(spec, names) for spec, named in shapes for names in _numbered(named)]
    for n, (spec, names) in enumerate(distinct):
        kind = _kind(config, spec)
        base = 0
        while taken & {base + number for number in names}:  # an indexer has the number of its layer's attention
            base += LAYERS_MAX
        ids = {base + number: name for number, name in sorted(names.items())}
        what = "draft" if drafts else "state" if kind == "state" else "window" if _window(spec) else "full"
        name = f"{what}{index}" if not n else f"{what}{index}.{n}"
        packed = kind == "tokens" and bool(_packing(config, spec))
        in_layout = tuple(ids)
        if whole and len(distinct) == 1 and config.parallel_config.pipeline_parallel_size > 1:
            in_layout = tuple(range(config.model_config.get_total_num_hidden_layers()))
        taken.update(in_layout)
        yield StoredGroup(name, kind, packed, spec, ids, in_layout, drafts)


def _numbered(names: list[str]) -> list[dict[int, str]]:
    """Names by the first number in them; several mappings where a model layer has several of these caches."""
    found: list[dict[int, str]] = []
    for name in names:
        number = number_in(name) or 0
        place = next((names for names in found if number not in names), None)
        if place is None:
            found.append(place := {})
        place[number] = name
    return found


def _kind(config: VllmConfig, spec: Any) -> Literal["tokens", "block", "state"]:
    if isinstance(spec, MambaSpec):
        if spec.mamba_cache_mode == "none":
            _refuse("its recurrent states are kept for the last token only; start it with --enable-prefix-caching")
        return "state"
    if type(spec) not in _ATTENTION:
        _refuse(f"it has layers with {type(spec).__name__}")
    if getattr(spec, "non_causal", False):
        _refuse(f"its {type(spec).__name__} does not keep one causal state per token")
    return "block" if _is_block(config, spec) else "tokens"


def _is_block(config: VllmConfig, spec: Any) -> bool:
    """Whether a rank's block has no state for each of its tokens: they are compressed, or divided among ranks."""
    if isinstance(spec, MambaSpec):
        return False
    return _is_split(config, spec) or bool(spec.tokens_per_state != 1)


def _is_split(config: VllmConfig, spec: Any) -> bool:
    return bool(spec.dcp_sharded) and config.parallel_config.decode_context_parallel_size > 1


def _window(spec: Any) -> int | None:
    """Tokens before a length whose KV it needs; None: all."""
    if isinstance(spec, SlidingWindowSpec):
        return int(spec.sliding_window) + int(spec.extra_retained_tokens)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return int(spec.attention_chunk_size)
    return None


def _layout_group(config: VllmConfig, group: StoredGroup, page: int) -> Group:
    spec, window = group.spec, _window(group.spec)
    nbytes = int(spec.state_content_size_bytes if group.kind != "block" else spec.unpadded_page_size_bytes)
    need = Need.exact() if group.kind == "state" else Need.all() if window is None else Need.window_of(window)
    cell = Cell(_encoding(config, group), nbytes)
    return Group(
        group.name, group.layer_ids, total_heads(config, group), cell, need, page if group.kind == "tokens" else 1
    )


# -- heads -----------------------------------------------------------------------------------


def _is_latent(spec: Any) -> bool:
    """Whether all ranks keep the same bytes: one latent vector in place of heads."""
    return isinstance(spec, (MLAAttentionSpec, SlidingWindowMLASpec))


def _is_replicated(config: VllmConfig, group: StoredGroup) -> bool:
    if group.kind == "state":
        return bool(group.spec.tp_replicated)
    return _is_latent(group.spec) and not _is_split(config, group.spec)


def total_heads(config: VllmConfig, group: StoredGroup) -> int:
    """Head slots of all TP ranks together; replicas count once. A state or a block of a rank is one slot."""
    if _is_replicated(config, group):
        return 1
    size, spec = config.parallel_config.tensor_parallel_size, group.spec
    if group.kind != "tokens":
        return int(size)
    of = config.model_config if not group.drafts else config.speculative_config.draft_model_config
    total = int(of.get_total_num_kv_heads())
    if size == 1:
        return int(spec.num_heads)
    if spec.num_heads != spec.num_kv_heads or spec.num_kv_heads != max(1, total // size):
        _refuse(f"a rank keeps {spec.num_heads} of {total} KV heads, which is not an even share of {size} ranks")
    if total % size and size % total:
        _refuse(f"{total} KV heads do not share {size} ranks evenly")
    return total


def share(config: VllmConfig, group: StoredGroup, total: int) -> tuple[int, tuple[int, int]]:
    """(first head slot of this rank, (index, count) of the ranks with the same bytes)."""
    size = config.parallel_config.tensor_parallel_size
    rank = config.parallel_config.rank % size
    if _is_replicated(config, group):
        return 0, (rank, size)
    if total >= size:
        return rank * (total // size) if size > 1 else 0, (0, 1)
    copies = size // total
    return rank // copies, (rank % copies, copies)


# -- bytes -----------------------------------------------------------------------------------


def _packing(config: VllmConfig, spec: AttentionSpec) -> str:
    """The byte order inside a block, for engines of the same kind only; "" if it is token by token."""
    block = f"blocks of {spec.block_size}"
    if config.device_config.device_type == "cpu":
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        isa = _get_attn_isa(config.model_config.dtype, spec.block_size, spec.head_size, config.cache_config.cache_dtype)
        return f"cpu {isa} {block}"
    if spec.dtype is torch.uint8 and spec.state_content_bytes is None:
        return f"bytes {block}"  # of a kernel: an indexer keeps the numbers of a block, then their scales
    plain = spec.state_content_bytes is None and spec.num_heads == spec.num_kv_heads
    if plain and spec.kv_quant_mode in (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR):
        return ""
    backend = str(config.attention_config.backend)
    if config.attention_config.backend is None:
        _refuse("its cache is packed by an attention backend that was not named (pass --attention-backend)")
    return f"{backend} {block} slots {spec.num_heads} tp {config.parallel_config.tensor_parallel_size}"


def _encoding(config: VllmConfig, group: StoredGroup) -> str:
    spec, parallel = group.spec, config.parallel_config
    if isinstance(spec, MambaSpec):
        told = f"{spec.mamba_type} {spec.shapes} {[str(dtype) for dtype in spec.dtypes]}"
        digest = hashlib.blake2b(told.encode(), digest_size=8).hexdigest()
        return f"state {digest} vllm {'replicated' if spec.tp_replicated else f'tp {parallel.tensor_parallel_size}'}"
    dtype = _DTYPES.get(str(spec.dtype), str(spec.dtype).removeprefix("torch."))
    if _is_latent(spec):  # vLLM stores the rotary part interleaved
        text = f"{dtype} latent {spec.head_size} interleaved {spec.cache_dtype_str or 'auto'}"
    else:
        text = f"{dtype} k{spec.head_size}+v{spec.head_size_v}"
    if spec.kv_quant_mode is not KVQuantMode.NONE:
        text += f" {spec.kv_quant_mode.name.lower()}"
    packing = _packing(config, spec)
    if group.kind == "block":
        packing = (
            f"{packing} block of {spec.block_size} x {spec.num_heads} per {spec.tokens_per_state}, "
            f"dcp {parallel.decode_context_parallel_size} by {parallel.cp_kv_cache_interleave_size}, "
            f"tp {parallel.tensor_parallel_size}"
        ).strip()
    return f"{text} vllm {packing}" if packing else text


def _extra(
    config: VllmConfig, groups: list[StoredGroup], blocks: Mapping[str, int], drafter: Mapping[str, str] | None
) -> dict[str, Any]:
    model = config.model_config
    extra: dict[str, Any] = {
        "engine": "vllm",
        # some models write the engine's max_model_len into their config when they load
        "config": config_digest(model.hf_config, {"max_model_len"}),
        "dtype": str(model.dtype).removeprefix("torch."),
        "cache_dtype": str(config.cache_config.cache_dtype),
        "quantization": str(model.quantization or ""),
        "class": str(model.architecture),
        "implementation": str(model.model_impl),
        "groups": [[group.name, blocks[group.name]] if group.whole else [group.name] for group in groups],
    }
    if drafter is not None:
        extra["drafter"] = dict(drafter)
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


def _adapters(config: VllmConfig) -> str:
    lora = config.lora_config
    return "" if lora is None else str(lora.lora_dtype).removeprefix("torch.")


def _refuse(why: str) -> Any:
    raise UnsupportedModelError(f"kvfs cannot keep the KV of this engine: {why}. Start it without KvfsConnector")
