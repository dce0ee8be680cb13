"""From the engine's cache tensors to descriptors of its memory.

Every layer's tensor is a view [blocks, head slots, tokens, content] whose strides give its actual layout: any of
vLLM's six, packed with other layers, or in kernel blocks smaller than the manager's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvfs.errors import ConfigError
from kvfs.integrations.vllm.model import EngineGroup, EngineModel, StoredGroup, share
from kvfs.pages.describe import describe
from kvfs.pages.device_kv import DeviceKV
from kvfs.pages.layout import Group


class AttachedGroup(NamedTuple):
    """A group of the layout, as this rank keeps it. A block of the engine is ``units_per_block`` units of the
    descriptor, one after the other."""

    stored: StoredGroup
    layout: Group
    device: DeviceKV
    units_per_block: int


class AttachedEngine(NamedTuple):
    """A group of the engine on this rank; nothing is attached where its layers are on other ranks, or a drafter's."""

    group: EngineGroup
    attached: tuple[AttachedGroup, ...]


def describe_caches(
    config: VllmConfig, cache: KVCacheConfig, model: EngineModel, tensors: Mapping[str, torch.Tensor]
) -> list[AttachedEngine]:
    """Descriptors by group of the engine. ConfigError for tensors that contradict the configuration."""
    found = []
    for group in model.groups:
        here = [stored for stored in group.stored if any(name in tensors for name in stored.layers.values())]
        attached = tuple(_describe(config, cache.num_blocks, model, group, stored, tensors) for stored in here)
        found.append(AttachedEngine(group, attached))
    if not any(engine.attached for engine in found):
        raise ConfigError("the engine registered no tensor that kvfs could copy: start it without KvfsConnector")
    return found


def _describe(
    config: VllmConfig, blocks: int, model: EngineModel, group: EngineGroup, stored: StoredGroup,
    tensors: Mapping[str, torch.Tensor],
) -> AttachedGroup:  # fmt: skip
    layout = model.layout.group(stored.name)
    ids = tuple(sorted(layer for layer, name in stored.layers.items() if name in tensors))
    views = [tensors[stored.layers[layer]] for layer in ids]
    first_head, replica = share(config, stored, layout.heads)
    if stored.kind == "tokens":
        tokens = _check(group, stored, blocks, layout.cell.nbytes, views)
        order, per_block = "block,head,token,dim", group.block_tokens // tokens
    else:
        views = [_opaque(stored, blocks, layout.cell.nbytes, view) for view in views]
        order, per_block = "slot,head,dim", 1
    device = describe(layout, views, order, layers=ids, first_head=first_head, replica=replica)
    return AttachedGroup(stored, layout, device, per_block)


def _opaque(stored: StoredGroup, blocks: int, nbytes: int, view: torch.Tensor) -> torch.Tensor:
    """A view [blocks, 1, bytes] of blocks whose bytes are moved as they are. ConfigError if they are not contiguous."""
    _check_tensor(stored, view)
    kernel = int(view.shape[0]) // blocks  # kernel blocks of a block
    inner = view[0]
    item = view.element_size()
    dense = inner.numel() * item
    if (
        int(view.shape[0]) != kernel * blocks or kernel * dense != nbytes or not inner.is_contiguous()
        or (kernel > 1 and view.stride(0) * item != dense)
    ):  # fmt: skip
        raise ConfigError(
            f"group {stored.name} has a cache of shape {tuple(view.shape)} and strides {view.stride()}: expected "
            f"{blocks} contiguous blocks of {nbytes} bytes"
        )
    raw = torch.empty(0, dtype=torch.uint8, device=view.device).set_(view.untyped_storage())
    return raw.as_strided(
        (blocks, 1, nbytes), (view.stride(0) * item * kernel, nbytes, 1), view.storage_offset() * item
    )  # fmt: skip


def _check_tensor(stored: StoredGroup, view: object) -> None:
    if not isinstance(view, torch.Tensor) or view.dim() != 4:
        kind = tuple(view.shape) if isinstance(view, torch.Tensor) else type(view).__name__
        raise ConfigError(f"group {stored.name} has a cache of {kind}: kvfs knows [blocks, heads, tokens, content]")


def _check(group: EngineGroup, stored: StoredGroup, blocks: int, cell_bytes: int, views: list[torch.Tensor]) -> int:
    """Tokens of a kernel block. ConfigError if the views do not have the shape of the configuration."""
    heads = stored.spec.num_heads
    for view in views:
        _check_tensor(stored, view)
        shape = tuple(int(n) for n in view.shape)
        if (shape[1], shape[3] * view.element_size()) != (heads, cell_bytes):
            raise ConfigError(
                f"group {stored.name} has a cache of shape {shape}: expected {heads} heads of {cell_bytes} bytes"
            )
        if shape[0] * shape[2] != blocks * group.block_tokens or group.block_tokens % shape[2]:
            raise ConfigError(
                f"group {stored.name} has a cache of shape {shape}: expected {blocks} blocks of {group.block_tokens} "
                "tokens"
            )
        if stored.packed and shape[2] != group.block_tokens:
            raise ConfigError(
                f"kernels take blocks of {shape[2]} tokens, the manager {group.block_tokens}, and their bytes have an "
                f"order of their own: start the engine with --block-size {shape[2]}"
            )
    return int(views[0].shape[2])
