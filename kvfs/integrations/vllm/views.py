"""From the engine's cache tensors to descriptors of its memory.

Every layer's tensor is a view [blocks, head slots, tokens, content] whose strides give its actual layout: any of
vLLM's six, packed with other layers, or in kernel blocks smaller than the manager's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, MLAAttentionSpec, iter_layer_specs

from kvfs.errors import ConfigError
from kvfs.integrations.vllm.model import EngineGroup, EngineModel, layers_of
from kvfs.pages.describe import describe
from kvfs.pages.device_kv import DeviceKV


class AttachedEngine(NamedTuple):
    """A group of this rank. A block of the engine is ``units_per_block`` consecutive units of the descriptor."""

    group: EngineGroup
    device: DeviceKV
    units_per_block: int


def describe_caches(
    config: VllmConfig, cache: KVCacheConfig, model: EngineModel, tensors: Mapping[str, torch.Tensor]
) -> list[AttachedEngine]:
    """One descriptor per group. ConfigError for tensors that contradict the configuration."""
    return [_describe(config, cache, model, group, tensors) for group in model.groups]


def _describe(
    config: VllmConfig, cache: KVCacheConfig, model: EngineModel, group: EngineGroup,
    tensors: Mapping[str, torch.Tensor],
) -> AttachedEngine:  # fmt: skip
    layout = model.layout.group(group.name)
    spec = next(iter(iter_layer_specs(cache.kv_cache_groups[group.index].kv_cache_spec)))
    assert isinstance(spec, AttentionSpec)
    named = layers_of([n for n in cache.kv_cache_groups[group.index].layer_names if n in tensors])
    ids = tuple(sorted(set(named) & set(layout.layers)))
    views = [tensors[named[layer]] for layer in ids]
    if not views:
        raise ConfigError(f"the engine registered no tensor of group {group.name}: kvfs has nothing to copy")
    tokens = _check(group, spec, cache.num_blocks, layout.cell.nbytes, views)
    rank = config.parallel_config.rank % config.parallel_config.tensor_parallel_size
    first_head, replica = _share(config, spec, rank, layout.heads)
    device = describe(
        layout, views, "block,head,token,dim", layers=ids, first_head=first_head, replica=replica
    )  # fmt: skip
    return AttachedEngine(group, device, group.block_tokens // tokens)


def _check(group: EngineGroup, spec: AttentionSpec, blocks: int, cell_bytes: int, views: list[torch.Tensor]) -> int:
    """Tokens of a kernel block. ConfigError if the views do not have the shape of the configuration."""
    for view in views:
        if not isinstance(view, torch.Tensor) or view.dim() != 4:
            kind = tuple(view.shape) if isinstance(view, torch.Tensor) else type(view).__name__
            raise ConfigError(f"group {group.name} has a cache of {kind}: kvfs knows [blocks, heads, tokens, content]")
        shape = tuple(int(n) for n in view.shape)
        if (shape[1], shape[3] * view.element_size()) != (spec.num_heads, cell_bytes):
            raise ConfigError(
                f"group {group.name} has a cache of shape {shape}: expected {spec.num_heads} heads of {cell_bytes} "
                "bytes"
            )
        if shape[0] * shape[2] != blocks * group.block_tokens or group.block_tokens % shape[2]:
            raise ConfigError(
                f"group {group.name} has a cache of shape {shape}: expected {blocks} blocks of {group.block_tokens} "
                "tokens"
            )
        if group.packed and shape[2] != group.block_tokens:
            raise ConfigError(
                f"kernels take blocks of {shape[2]} tokens, the manager {group.block_tokens}, and their bytes have an "
                f"order of their own: start the engine with --block-size {shape[2]}"
            )
    return int(views[0].shape[2])


def _share(config: VllmConfig, spec: AttentionSpec, rank: int, total: int) -> tuple[int, tuple[int, int]]:
    """(first head slot of this rank, (index, count) of the ranks with the same heads)."""
    size = config.parallel_config.tensor_parallel_size
    if isinstance(spec, MLAAttentionSpec):
        return 0, (rank, size)
    if total >= size:
        return rank * (total // size) if size > 1 else 0, (0, 1)
    copies = size // total
    return rank // copies, (rank % copies, copies)
