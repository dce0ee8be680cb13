"""``generate``: restore, generate, save."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import GenerationConfig

from kvfs.errors import ConfigError
from kvfs.integrations.transformers.cache import PrefixCache, namespace_for
from kvfs.integrations.transformers.prompts import PromptRow, rows_of
from kvfs.types import PutResult, Tier

if TYPE_CHECKING:
    from kvfs.store import Store

#: Option -> values with which the rows of the cache remain those of the prompts; the first is recommended.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "num_beams": (1, None),
    "num_return_sequences": (1, None),
    "use_cache": (True, None),
    "cache_implementation": (None, "hybrid"),  # "hybrid" is in old checkpoints, and ignored by transformers
    "prefill_chunk_size": (None,),  # several releases append the restored tokens a second time
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "use_mtp": (False, None),
    "token_healing": (False, None),
    "penalty_alpha": (0, None),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
}
#: Arguments of ``model.generate`` that replace the input or the method.
_REFUSED = frozenset({"inputs", "assistant_model", "custom_generate", "past_key_values"})


class Generated(NamedTuple):
    """Result of ``generate``."""

    output: Any  #: what ``model.generate`` returned
    restored: int  #: prompt tokens that were restored, over all rows, without padding
    saved: PutResult
    #: ``restored`` by the slowest tier that a page of the token was read from: HOST is the page cache; DEVICE if no
    #: page was needed, as before a window
    tiers: Mapping[Tier, int]


def generate(model: Any, cache: PrefixCache | Store, input_ids: Any, **kwargs: Any) -> Generated:
    """``model.generate(input_ids, **kwargs)``, computing only the part of the prompts that is not stored.

    ``cache``: from ``namespace_for``, or a store (the first call then reads all weights to identify them).
    ``input_ids``: [n] or [batch, n] integers, batches padded on the left with ``attention_mask`` among
    ``kwargs``; without it, padding is inferred from pad_token_id just as transformers does.

    ConfigError for options that make KV depend on more than the tokens, or mix rows: beams, several sequences
    per prompt, assistants, another cache, inputs other than tokens. UnsupportedModelError as
    ``namespace_for``.
    """
    if not isinstance(cache, PrefixCache):
        cache = namespace_for(cache, model)
    if cache.model is not model:
        raise ConfigError("this cache belongs to another model object: make one with namespace_for(store, model)")
    mask = kwargs.pop("attention_mask", None)
    _check(model, kwargs)
    ids = torch.as_tensor(input_ids, device=model.device)
    ids = ids.unsqueeze(0) if ids.dim() == 1 else ids
    mask = _inferred_mask(model, kwargs, ids) if mask is None else torch.as_tensor(mask, device=model.device)
    mask = mask.unsqueeze(0) if mask.dim() == 1 else mask
    past, columns, tiers = cache.load_rows(prompts := rows_of(ids, mask))
    restored = sum(max(0, columns - row.pad) for row in prompts)
    output = model.generate(ids, attention_mask=mask, past_key_values=past, **kwargs)
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    rows = [_trimmed(row, ids.shape[1], _option(model, kwargs, "pad_token_id")) for row in rows_of(sequences, mask)]
    if past.get_seq_length() != sequences.shape[1] - 1:  # its columns do not belong to these tokens
        reason = f"cache: {past.get_seq_length()} tokens after generating {sequences.shape[1]}"
        return Generated(output, restored, PutResult(0, 0, 0, 0, reason), tiers)
    return Generated(output, restored, cache.save_rows(rows, past), tiers)


def _check(model: Any, kwargs: dict[str, Any]) -> None:
    known = {*vars(GenerationConfig()), *inspect.signature(model.generate).parameters} - _REFUSED
    for name in kwargs:
        if name not in known and kwargs[name] is not None:
            raise ConfigError(
                f"{name} is given, and KV may depend on it: leave it out, or call model.generate without a store"
            )
    for name, plain in _PLAIN.items():
        value = _option(model, kwargs, name)
        if value not in plain:
            raise ConfigError(f"{name} is {value!r:.80}: pass {plain[0]!r}, or call model.generate without a store")


def _option(model: Any, kwargs: dict[str, Any], name: str) -> Any:
    """An option of generation, looked up as transformers does."""
    for holder in (kwargs, kwargs.get("generation_config"), getattr(model, "generation_config", None)):
        value = holder.get(name) if isinstance(holder, dict) else getattr(holder, name, None)
        if value is not None:
            return value
    return None


def _inferred_mask(model: Any, kwargs: dict[str, Any], ids: torch.Tensor) -> torch.Tensor:
    """Zero for tokens that are padding and cannot be the end of a text, else one."""
    pad, end = _option(model, kwargs, "pad_token_id"), _option(model, kwargs, "eos_token_id")
    ends = end if isinstance(end, (list, tuple)) else [end]
    return torch.ones_like(ids) if pad is None or pad in ends else (ids != pad).long()


def _trimmed(row: PromptRow, columns: int, pad: int | None) -> PromptRow:
    """The row without the padding that transformers appends to rows that ended before others."""
    end, prompt = len(row.tokens), columns - row.pad
    while pad is not None and end > prompt and int(row.tokens[end - 1]) == pad:
        end -= 1
    return PromptRow(row.tokens[:end], row.pad)
