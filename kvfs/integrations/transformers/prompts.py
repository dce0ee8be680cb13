"""Converts ``input_ids`` and ``attention_mask`` to rows of real tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kvfs.errors import ConfigError

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class PromptRow(NamedTuple):
    """One prompt of a batch: its real tokens, and the number of padding columns before them."""

    tokens: torch.Tensor  # [n], int64, CPU
    pad: int


def rows_of(input_ids: Any, attention_mask: Any = None) -> list[PromptRow]:
    """The prompts in ``input_ids``, [n] or [batch, n] integers (tensor, array or lists).

    ``attention_mask``, [batch, m <= n], is 0 for padding and 1 for tokens; columns that it lacks are tokens
    (generated). ConfigError unless all padding is on the left and each row has a token.
    """
    ids = _matrix("input_ids", input_ids)
    if attention_mask is None:
        return [PromptRow(tokens, 0) for tokens in ids]
    mask = _matrix("attention_mask", attention_mask)
    if mask.shape[0] != ids.shape[0] or mask.shape[1] > ids.shape[1]:
        raise ConfigError(
            f"attention_mask is {list(mask.shape)}, input_ids {list(ids.shape)}: pass rows of equal length"
        )
    return [_row(number, tokens, real) for number, (tokens, real) in enumerate(zip(ids, mask, strict=True))]


def _row(number: int, tokens: torch.Tensor, real: torch.Tensor) -> PromptRow:
    pad = len(real) - int(real.sum())
    if not torch.equal(real, (torch.arange(len(real)) >= pad).long()):
        raise ConfigError(f"attention_mask of row {number} is not padding on the left: pass zeros, then ones")
    if pad == len(tokens):
        raise ConfigError(f"row {number} of input_ids is all padding: pass at least one token")
    return PromptRow(tokens[pad:], pad)


def _matrix(name: str, value: Any) -> torch.Tensor:
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as exc:
        raise ConfigError(f"{name}: {exc}; pass integers, [n] or [batch, n]") from None
    kinds = (*_INTEGERS, torch.bool) if name == "attention_mask" else _INTEGERS
    if tensor.dim() not in (1, 2) or tensor.numel() == 0 or tensor.dtype not in kinds:
        raise ConfigError(f"{name} is {tensor.dtype} {list(tensor.shape)}: pass integers, [n] or [batch, n]")
    return tensor.detach().to("cpu", torch.int64).reshape(-1, tensor.shape[-1]).contiguous()
