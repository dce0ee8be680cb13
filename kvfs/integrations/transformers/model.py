"""What a model's KV depends on: the layout of its cache and the identity of its namespace.

Anything that can change KV for equal tokens is in the identity, or the model is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from transformers import DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvfs.errors import ConfigError, UnsupportedModelError
from kvfs.integrations.transformers.adapters import has_adapters, switches, unfit
from kvfs.integrations.transformers.layers import fits
from kvfs.pages.hf_config import config_digest, rope_identity
from kvfs.pages.layout import Group, PageLayout
from kvfs.pages.shared_identity import shared_identity

DIGEST_THREADS = 8  # at most, of a digest of weights: about 1 s per GB and core
SAMPLES = 6  # positions along each dimension of a tensor that a fingerprint reads
#: encodings of supported cells: dims of keys and values, or for MLA of latents and rotary part
_CELL = re.compile(r"(bf16|f16|f32) (?:k(\d+)\+v(\d+)|latent (\d+)\+(\d+) (?:interleaved|halves))")
#: order of the rotary part in the cache of transformers, where it is not "interleaved"
_ROPE_ORDER = {"deepseek_v3": "halves"}
_TRAINING = "the model or a part of it is in training mode, where dropout changes KV: call model.eval()"
_SHORT = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
_digests: weakref.WeakKeyDictionary[Any, tuple[object, str]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class ModelSource:
    """A model and the identity of its KV. ``fingerprint`` is None if the caller guarantees the weights."""

    model: Any
    layout: PageLayout
    revision: str
    rope: dict[str, Any]
    adapter: str
    switches: tuple[str, ...] = field(repr=False)  # of the adapters that ``adapter`` stands for
    extra: dict[str, str]
    fingerprint: object = field(repr=False)
    shared: dict[str, Any] | None = field(default=None, repr=False)  # arguments of a namespace shared with engines

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values."""
        return next(dtype for dtype, name in _SHORT.items() if _encoding(self.layout.groups[0]).startswith(name))

    def changed(self) -> str:
        """Why the model no longer computes the KV of its identity; "" if it does."""
        if in_training(self.model):
            return _TRAINING
        if torch.is_autocast_enabled(self.model.device.type):
            return "autocast is on, which computes KV in another precision: load and save outside of it"
        if has_adapters(self.model) and not self.adapter:
            return "an adapter was attached to the model: make a namespace with adapter="
        if self.switches != switches(self.model):
            return "an adapter was switched, merged or scaled: make a namespace with another adapter="
        if self.extra.get("code") != foreign_code(self.model).get("code"):
            return "code of the model was replaced: make a new namespace"
        rounded = self.extra.get("inv_freq") != _rotary_precision(self.model).get("inv_freq")
        if rounded or self.model.dtype != self.dtype:
            return "the model was cast to another dtype: make a new namespace"
        if "config" in self.extra and self.extra["config"] != config_digest(self.model.config):
            return "the config changed, and masks depend on it: make a new namespace"
        if self.fingerprint is not None and self.fingerprint != fingerprint(self.model):
            return "the weights changed or moved: make a new namespace"
        return ""

    def devices(self) -> list[torch.device]:
        """Where each model layer keeps its KV at this moment: a model may move."""
        decoder = self.model.get_decoder() if hasattr(self.model, "get_decoder") else self.model
        count = 1 + max(layer for group in self.layout.groups for layer in group.layers)
        blocks = getattr(decoder, "layers", None)
        if blocks is None or len(blocks) != count:
            return [self.model.device] * count
        return [next((p.device for p in block.parameters()), self.model.device) for block in blocks]


def source_of(model: Any, page_tokens: int, revision: str | None, adapter: str) -> ModelSource:
    """Identity of ``model``. UnsupportedModelError or ConfigError if its KV must not be reused."""
    _check(model, adapter)
    layout = layout_of(model.config, model.dtype, page_tokens)
    latent = sum(len(group.layers) for group in layout.groups if "latent" in _encoding(group))
    if latent and sum(hasattr(module, "expand_kv") for module in model.modules()) != latent:
        _refuse("this release of transformers keeps the KV of MLA expanded to all heads: install a newer one")
    extra = {**_rotary_precision(model), **foreign_code(model)}
    seen = None
    if revision is None:
        # not the commit in the config: it belongs to the file of the config, while weights are replaced, trained,
        # merged and cast without it
        revision = f"weights-{weights_digest(model)}"
        seen = fingerprint(model)
        # options given to from_pretrained change KV without changing weights
        extra["config"] = config_digest(model.config)
    return ModelSource(model, layout, revision, rope_identity(model.config), adapter, switches(model), extra, seen)


def shared_source_of(model: Any, page_tokens: int, revision: str | None, adapter: str) -> ModelSource:
    """``source_of`` with the identity that all engines of a model have. ConfigError if KV does not follow from it."""
    if revision is None:
        raise ConfigError(
            "revision is missing: with share=, pass that of the model's files, which the other engines load, for "
            "example kvfs.integrations.weights.model_revision(folder); the weights in memory must be theirs"
        )
    if adapter:
        raise ConfigError("adapter has no meaning with share=: other engines do not know it; leave one of them out")
    source = source_of(model, page_tokens, revision, adapter)
    for what, value in source.extra.items():
        raise ConfigError(f"{what} of this model is {value}, which other engines do not know: leave share= out")
    order = _ROPE_ORDER.get(model.config.model_type, "interleaved")
    shared = shared_identity(model.config, revision, dtype=str(model.dtype), page_tokens=page_tokens, rope=order)
    assert shared["layout"] == source.layout, "both are of the config"
    # nothing else stands for the weights and the config: a change of either must not reach other engines
    extra = {"config": config_digest(model.config)}
    return replace(source, extra=extra, fingerprint=fingerprint(model), shared=shared)


def _check(model: Any, adapter: str) -> None:
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise ConfigError(f"model is {type(model).__name__}: pass a model of transformers")
    if getattr(model, "hf_quantizer", None) is not None or getattr(config, "quantization_config", None):
        _refuse("its weights are quantised, and KV depends on the kernels and options")
    if any(type(tensor) not in (torch.Tensor, torch.nn.Parameter) for _, tensor in _tensors(model)) or any(
        type(module).__module__.startswith("torch.ao.") for module in model.modules()
    ):
        _refuse("some of its weights are not plain tensors (quantised, or split over processes)")
    if config.get_text_config(decoder=True) is not config:
        _refuse("it takes more than text, and KV after an image does not depend on the token ids alone")
    if getattr(model, "tp_size", None) not in (None, 1):
        _refuse("it is split over processes, and each holds only some of the heads")
    if any(tensor.device.type == "meta" for _, tensor in _tensors(model)):
        _refuse("weights are offloaded (device meta)")
    if has_adapters(model) and not adapter:
        _refuse("adapters are attached; pass adapter= a digest of the content of the active ones")
    if unfit(model):
        _refuse(unfit(model))
    if in_training(model):
        raise ConfigError(_TRAINING)


def in_training(model: Any) -> bool:
    """Whether the model or any of its modules is in training mode."""
    return any(module.training for module in model.modules())


def layout_of(config: Any, dtype: torch.dtype, page_tokens: int) -> PageLayout:
    """Layout of the pages of ``DynamicCache(config=config)``. UnsupportedModelError if it is unsupported."""
    order = _ROPE_ORDER.get(config.model_type, "interleaved")
    layout = PageLayout.from_hf_config(config, page_tokens, dtype=dtype, rope=order)
    cache = DynamicCache(config=config).layers
    known = {layer for group in layout.groups for layer in group.layers}
    if known != set(range(len(cache))):
        _refuse(f"transformers keeps {len(cache)} layers of cache, its config describes {len(known)}")
    for group in layout.groups:
        if not _encoding(group).startswith(f"{_SHORT[dtype]} ") or not _CELL.fullmatch(_encoding(group)):
            _refuse(
                f"cells are {_encoding(group)!r}, transformers keeps keys and values, or latents and their rotary part"
            )
        if group.need.kind == "window" and group.need.window < 2:
            _refuse("a window of one token keeps no cache")
        for layer in group.layers:
            if not fits(cache[layer], group, strict=True):
                _refuse(f"layer {layer} keeps a {type(cache[layer]).__name__}, its config describes {group.need}")
    return layout


def cell_dims(group: Group) -> tuple[int, int]:
    """Dims of the key and the value of a cell; for MLA, of the latent and the rotary part."""
    found = _CELL.fullmatch(_encoding(group))
    assert found is not None, "layout_of refuses other cells"
    keys, values = (int(number) for number in found.groups()[1:] if number)
    return keys, values


def weights_digest(model: Any) -> str:
    """BLAKE2b over name, shape, dtype and bytes of every parameter and buffer; 64 hex digits.

    Reads all weights once per model object and change: about a second per GB and core, on up to eight cores.
    Equal on all devices and in all processes. Changes that bypass autograd (``tensor.data``) and that
    ``fingerprint`` misses are not noticed before the next process.
    """
    seen = fingerprint(model)
    known = _digests.get(model)
    if known is None or known[0] != seen:
        with ThreadPoolExecutor(min(DIGEST_THREADS, os.cpu_count() or 1), "kvfs-digest") as pool:
            parts = list(pool.map(_tensor_digest, sorted(_tensors(model), key=lambda item: item[0])))
        known = (seen, hashlib.blake2b(b"".join(parts), digest_size=32).hexdigest())
        _digests[model] = known
    return known[1]


def _tensor_digest(item: tuple[str, torch.Tensor]) -> bytes:
    name, tensor = item
    head = json.dumps([name, list(tensor.shape), str(tensor.dtype)])
    digest = hashlib.blake2b(head.encode() + b"\n", digest_size=32)
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.digest()


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()  # including RoPE frequencies, which model.to(bfloat16) rounds


def fingerprint(model: Any) -> object:
    """A value that changes when a tensor of the model is replaced or written through autograd, or when another
    write, such as the merge of an adapter (``tensor.data += ...``), changes one of a few samples of each tensor."""
    tensors = [tensor for _, tensor in _tensors(model)]
    return tuple((t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors), _samples(tensors)


def _samples(tensors: Iterable[torch.Tensor]) -> bytes:
    """A digest of up to SAMPLES ** dimensions numbers of each tensor; one copy per device and dtype."""
    found: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.device.type != "meta":
            places = tuple(slice(None, None, max(1, -(-size // SAMPLES))) for size in tensor.shape)
            found.setdefault((tensor.device, tensor.dtype), []).append(tensor.detach()[places].reshape(-1))
    digest = hashlib.blake2b(digest_size=16)
    for some in found.values():
        digest.update(torch.cat(some).cpu().view(torch.uint8).numpy())
    return digest.digest()


def _rotary_precision(model: Any) -> dict[str, str]:
    """``from_pretrained`` keeps RoPE frequencies in float32; ``model.to(dtype)`` rounds them, which changes KV."""
    kinds = {str(b.dtype) for name, b in model.named_buffers() if name.endswith("inv_freq")}
    other = sorted(kinds - {"torch.float32"})
    return {"inv_freq": ",".join(other)} if other else {}


def foreign_code(model: Any) -> dict[str, str]:
    """Classes, replaced ``forward`` functions, hooks and attention functions that do not belong to transformers:
    with them, equal weights give other KV. Classes of PEFT are covered by ``adapter``."""
    chosen = getattr(model.config, "_attn_implementation", None)
    functions = [table[chosen] for table in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS) if chosen in table]
    names = set(map(_code_name, functions))
    for place, module in model.named_modules():
        names |= {_code_name(type(module)), _code_name(type(module).forward)}
        own = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        own += [module.forward] if "forward" in vars(module) else []
        names |= {f"{_code_name(part)} at {place}" for part in own}
    foreign = sorted(name for name in names if not name.startswith(("torch.nn.", "transformers.", "peft.")))
    return {"code": ",".join(foreign)} if foreign else {}


def _code_name(part: Any) -> str:
    return f"{part.__module__}.{getattr(part, '__qualname__', type(part).__qualname__)}"


def _encoding(group: Group) -> str:
    return group.cell.encoding


def _refuse(why: str) -> NoReturn:
    raise UnsupportedModelError(f"this model cannot use a store: {why}")
