"""Converts between canonical pages and tensors of transformers, [head, token, dim] of one row of one layer."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kvfs.integrations.transformers.model import cell_dims
from kvfs.pages.layout import GRANULE_TOKENS, Group


def states_of(pages: torch.Tensor, group: Group, dtype: torch.dtype, position: int,
              device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Keys and values of one layer (by position in the group), each [head, token, dim], on ``device``.

    ``pages``: uint8, CPU, consecutive whole pages of ``group``.
    """
    cells = _cells(pages, group, dtype)[:, position].to(device)  # [granule, head, token, K then V]
    keys, values = (part.transpose(0, 1).flatten(1, 2) for part in cells.split(cell_dims(group), dim=-1))
    return keys, values


def pages_of(states: Iterable[tuple[torch.Tensor, torch.Tensor]], tokens: int, group: Group,
             dtype: torch.dtype) -> torch.Tensor:  # fmt: skip
    """Whole pages, uint8 on the CPU, of ``tokens`` tokens of all layers of ``group``.

    ``states``: keys and values of each layer in order, each [head, tokens, dim] of ``dtype`` on any device.
    """
    pages = torch.empty(tokens // group.states * group.page_bytes, dtype=torch.uint8)
    cells = _cells(pages, group, dtype)
    for position, (keys, values) in enumerate(states):
        both = torch.cat((keys, values), dim=-1)  # [head, token, K then V]
        cells[:, position].copy_(both.unflatten(1, (-1, GRANULE_TOKENS)).transpose(0, 1))
    return pages


def _cells(pages: torch.Tensor, group: Group, dtype: torch.dtype) -> torch.Tensor:
    """A view of pages as [granule, layer, head, token, K then V]."""
    shape = (-1, len(group.layers), group.heads, GRANULE_TOKENS, sum(cell_dims(group)))
    return pages.view(dtype).view(shape)
