"""The drafter of speculative decoding: which layers are its own, and whether their KV is kept.

vLLM names a block of a drafter by the tokens up to its end, as it names those of the model, and so does kvfs. KV of
EAGLE's and MTP's layers at a position depends on the next token, too, which the name lacks for the last position of a
page: that one may come from a prompt that went on differently. Every draft is verified, so it can cost a draft, and no
wrong token. Where vLLM marks a group as the drafter's, it leaves the last page of a hit to be computed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import AttentionSpec

from kvfs.errors import ConfigError
from kvfs.integrations.vllm.weights import weights_id
from kvfs.pages.hf_config import config_digest

_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
#: methods whose KV at a position depends on the tokens before, on this one and on few that follow. Not dflash and
#: dspark: they write several positions in one pass that is not causal
_KEPT = ("eagle", "eagle3", "mtp", "draft_model")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # of a layer, in its name


def number_in(name: str) -> int | None:
    """Number of a layer, from its name."""
    found = _NUMBER.search(name)
    return int(found[0]) if found is not None else None


def is_drafters(config: VllmConfig, name: str) -> bool:
    """Whether a layer belongs to the drafter."""
    drafting = config.speculative_config
    if drafting is None or drafting.method in _WITHOUT_KV:
        return False
    if any(part.startswith(("mtp", "draft")) for part in name.split(".")):
        return True
    number = number_in(name)
    return number is not None and number >= config.model_config.get_total_num_hidden_layers()


def drafter_of(
    config: VllmConfig, layers: Sequence[Mapping[str, Any]], given_weights: str, kinds: Iterable[type]
) -> dict[str, str] | None:
    """What the KV of the drafter depends on; None if its layers are left out.

    They are where its weights are not identified, and where not every rank has its share of them. ``layers``: of all
    groups of the engine. ``kinds``: the caches that pages can hold.
    """
    drafting, parallel, model = config.speculative_config, config.parallel_config, config.model_config
    own = [spec for specs in layers for name, spec in specs.items() if is_drafters(config, name)]
    draft: Any = getattr(drafting, "draft_model_config", None)
    if drafting is None or not own or drafting.method not in _KEPT or not getattr(draft, "model", None):
        return None
    if parallel.pipeline_parallel_size > 1 or parallel.decode_context_parallel_size > 1 or draft.dtype != model.dtype:
        return None
    if drafting.draft_parallel_config.tensor_parallel_size != parallel.tensor_parallel_size:
        return None
    if not all(_is_plain(spec, tuple(kinds)) for spec in own):
        return None
    try:
        same = bool(given_weights) and draft.model == model.model  # of MTP: the files of the model
        weights = given_weights if same else weights_id(draft, config.load_config)
    except ConfigError:
        return None
    return {
        "weights": weights,
        "method": drafting.method,
        "class": str(draft.architecture),
        "quantization": str(draft.quantization or ""),
        "config": config_digest(draft.hf_config, {"max_model_len"}),
    }


def _is_plain(spec: Any, kinds: tuple[type, ...]) -> bool:
    attention = isinstance(spec, AttentionSpec) and type(spec) in kinds
    return attention and spec.tokens_per_state == 1 and not getattr(spec, "non_causal", False)
