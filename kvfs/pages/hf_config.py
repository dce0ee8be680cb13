"""From a Hugging Face ``config.json`` to a page layout and to the RoPE part of a namespace's identity.

Never guesses: an absent field gets the default of the model's class in transformers, and what is not
understood raises UnsupportedModelError with field, reason and remedy. ``sliding_window = w`` lets a token
attend to itself and the w-1 before it; the need is ``window(w)``, one more than a restore must have: safe.

For MLA the layout describes the latents, which paged engines and transformers keep. Early releases of transformers 5
kept them expanded to full heads: ``PageLayout.kv(kv_heads=num_attention_heads, head_dim=qk_nope_head_dim +
qk_rope_head_dim, v_head_dim=...)`` describes such a cache.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

from kvfs.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from kvfs.pages.layout import Group, PageLayout

LAYERS_MAX = 4096  # as in a layout; checked before a list of that length is made
CONFIG_BYTES_MAX = 4 << 20  # of a config.json, which is untrusted: published ones have some KiB
_FULL, _SLIDING = "full_attention", "sliding_attention"
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class _Family(NamedTuple):
    """How transformers reads the config of a model type; ``absent``: values of absent fields."""

    #: layers that slide without ``layer_types``: none, all if there is a window, from max_window_layers on if
    #: use_sliding_window, all but every n-th
    slide: Literal["none", "all", "late", "pattern"]
    absent: Mapping[str, Any] = {}
    theta: float = 10000.0
    #: whether transformers obeys ``layer_types``
    typed: bool = True


_QWEN = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
_GEMMA = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096}
_GPT_OSS = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128}
_MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
_FAMILIES = {
    "llama": _Family("none", typed=False),
    "mistral": _Family("all", {"num_key_value_heads": 8, "sliding_window": 4096}, typed=False),
    "mixtral": _Family("all", {"num_key_value_heads": 8}, 1e6, typed=False),
    "phi3": _Family("all", typed=False),
    "qwen2": _Family("late", _QWEN),
    "qwen3": _Family("late", {**_QWEN, "head_dim": 128}),
    "qwen3_moe": _Family("none", {"num_key_value_heads": 4}, typed=False),
    "gemma2": _Family("pattern", {**_GEMMA, "sliding_window_pattern": 2}),
    "gemma3_text": _Family("pattern", {**_GEMMA, "num_hidden_layers": 26, "sliding_window_pattern": 6}, 1e6),
    "gpt_oss": _Family(
        "pattern", {**_GPT_OSS, "sliding_window_pattern": 2, "rope_parameters": _GPT_OSS_ROPE}, 150000.0
    ),
    "deepseek_v2": _Family("none", _MLA, typed=False),
    "deepseek_v3": _Family("none", _MLA, typed=False),
}
_WRAPPERS = {"gemma3": "gemma3_text"}
#: Fields that cannot change KV, or that are elsewhere in an identity.
_NEUTRAL = frozenset(
    {
        *("_name_or_path", "transformers_version", "architectures", "problem_type", "id2label", "label2id"),
        *("dtype", "torch_dtype", "use_cache", "return_dict", "output_hidden_states", "output_attentions"),
        *("pad_token_id", "bos_token_id", "eos_token_id", "initializer_range"),
    }
)
_OPAQUE = "use PageLayout.of([...]) or PageLayout.opaque(...) if you know what the engine stores"
_CORRECT = "correct the config"
_CAUSAL = "the KV of a token depends on later tokens, so it cannot be reused for another continuation"
#: field -> why a config where it is set (truthy) rules out reuse
_REFUSED = {
    "is_encoder_decoder": "cross attention is not a function of the decoder's tokens",
    "add_cross_attention": "cross attention is not a function of the decoder's tokens",
    "use_bidirectional_attention": _CAUSAL,
    "prefix_lm": _CAUSAL,
    "num_kv_shared_layers": "layers borrow the KV of others",
    "per_layer_config": "layers differ in shape",
    "attention_chunk_size": "chunked attention is not a sliding window",
    "index_topk": "the indexer of sparse attention keeps a cache of its own",
    "linear_num_value_heads": "linear attention keeps a state, not KV per token",
    "mamba_d_state": "state-space layers keep a state, not KV per token",
}


def layout_from_config(
    build: type[PageLayout],
    config: Any,
    page_tokens: int = 64,
    dtype: object = None,
    *,
    rope: str = "interleaved",
    scale: object = None,
    scale_digest: str | None = None,
) -> PageLayout:
    """What ``PageLayout.from_hf_config`` does; ``build`` is PageLayout, which imports this module.

    UnsupportedModelError where KV is not a function of the prefix or the cache is not understood; ConfigError
    for invalid values.
    """
    model, cfg, family = _open(config)
    _identity(cfg, model, family)
    layers = _integer(cfg, "num_hidden_layers", most=LAYERS_MAX)
    dtype = _cache_dtype(cfg) if dtype is None else dtype
    if model.startswith("deepseek"):
        if scale is not None:
            raise ConfigError(f"scale is {scale!r}: cells of MLA hold no scales; pass scale_digest=")
        rank, rope_dim = _integer(cfg, "kv_lora_rank"), _integer(cfg, "qk_rope_head_dim")
        return build.mla(
            layers=layers,
            kv_lora_rank=rank,
            rope_dim=rope_dim,
            dtype=dtype,
            page_tokens=page_tokens,
            rope=rope,
            scale_digest=scale_digest,
        )
    sliding = _sliding(cfg, model, family, layers)
    heads = "num_attention_heads" if cfg.get("num_key_value_heads") is None else "num_key_value_heads"
    groups: list[Group] = []
    full = [layer for layer in range(layers) if layer not in sliding]
    for ids, window in ((full, None), (sorted(sliding), "sliding_window")):
        if ids:
            groups += build.kv(
                layers=ids,
                kv_heads=_integer(cfg, heads),
                head_dim=_head_dim(cfg),
                dtype=dtype,
                page_tokens=page_tokens,
                window=_integer(cfg, window) if window else None,
                scale=scale,
                scale_digest=scale_digest,
            ).groups
    return build.of(groups, page_tokens)


def rope_identity(config: Any) -> dict[str, Any]:
    """The effective RoPE parameters as canonical JSON-able data, part of a namespace's identity.

    Keys: "all", or "full" and "window" where these rotate differently (Gemma 3). The spellings of
    transformers 4 (``rope_theta``, ``rope_scaling``) and 5 (``rope_parameters``) give equal results.
    UnsupportedModelError for scalings that depend on the length of the whole sequence.
    """
    model, cfg, family = _open(config)
    return _identity(cfg, model, family)


def model_type(config: Any) -> str:
    """The model type of the text model; UnsupportedModelError for one whose cache is not understood."""
    return _open(config)[0]


def config_digest(config: Any, neutral: Set[str] = frozenset()) -> str:
    """32 hex digits over all fields of a config object that may change KV; ``neutral``: more fields that cannot."""
    fields = {key: value for key, value in config.to_dict().items() if key not in _NEUTRAL and key not in neutral}
    text = json.dumps(fields, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _open(config: Any) -> tuple[str, dict[str, Any], _Family]:
    """(model type, fields of the text model with absent ones filled in, family); refuses by individual fields."""
    outer = _read(config)
    model, cfg = outer.get("model_type"), outer
    if isinstance(model, str) and model in _WRAPPERS:
        text = outer.get("text_config")
        if not isinstance(text, Mapping):
            raise ConfigError(f"text_config is {type(text).__name__}: for {model} it must be an object")
        shared = ("dtype", "torch_dtype", "quantization_config")
        cfg = {"model_type": _WRAPPERS[model], **{key: outer.get(key) for key in shared}, **text}
        model = cfg["model_type"]
    if not isinstance(model, str) or model not in _FAMILIES:
        _refuse("model_type", model, "not a model whose cache kvfs understands", _OPAQUE)
    for fields in (outer, cfg):
        for field, why in _REFUSED.items():
            if fields.get(field):
                _refuse(field, fields[field], why, _OPAQUE)
        if fields.get("is_causal") is False:
            _refuse("is_causal", False, _CAUSAL, "serve it without kvfs")
        if fields.get("cache_implementation") == "quantized":
            why = "the scales of its cache depend on the order of updates"
            _refuse("cache_implementation", "quantized", why, "use another cache")
    family = _FAMILIES[model]
    return model, {**family.absent, **cfg}, family


def _read(config: Any) -> dict[str, Any]:
    if isinstance(config, (str, os.PathLike)):
        path = Path(config)
        try:
            with path.open("rb") as file:
                raw = file.read(CONFIG_BYTES_MAX + 1)
        except (OSError, ValueError) as exc:
            raise ConfigError(f"config {exc}: pass the path of a config.json") from None
        if len(raw) > CONFIG_BYTES_MAX:
            raise ConfigError(f"{path}: larger than {CONFIG_BYTES_MAX} bytes; pass the path of a config.json")
        try:
            config = json.loads(raw)
        except (ValueError, RecursionError) as exc:
            raise ConfigError(f"{path}: not valid JSON ({exc}); pass the path of a config.json") from None
    elif not isinstance(config, Mapping) and hasattr(config, "to_dict"):
        config = config.to_dict()
    if not isinstance(config, Mapping):
        raise ConfigError(f"config is {type(config).__name__}: pass a dict, a path or a config object")
    return dict(config)


def _sliding(cfg: Mapping[str, Any], model: str, family: _Family, layers: int) -> set[int]:
    """The layers that attend to a window."""
    window, types = cfg.get("sliding_window"), cfg.get("layer_types")
    implied: set[int] = set()
    if model == "qwen3_moe" and cfg.get("use_sliding_window"):
        why = "versions of transformers differ in which layers slide"
        _refuse("use_sliding_window", True, why, "use PageLayout.of([...])")
    elif family.slide == "all" and window is not None:
        implied = set(range(layers))
    elif family.slide == "late" and cfg.get("use_sliding_window") and window is not None:
        implied = set(range(_integer(cfg, "max_window_layers", 0), layers))
    elif family.slide == "pattern":
        every = _integer(cfg, "sliding_window_pattern")
        implied = {layer for layer in range(layers) if (layer + 1) % every}
    if types is None:
        return implied
    if not isinstance(types, (list, tuple)) or len(types) != layers:
        _refuse("layer_types", types, f"not a list with one entry for each of {layers} layers", _CORRECT)
    for kind in types:
        if kind not in (_FULL, _SLIDING):
            _refuse("layer_types", kind, "the cache of such a layer is not KV per token", _OPAQUE)
    named = {layer for layer, kind in enumerate(types) if kind == _SLIDING}
    unused = family.slide == "late" and not cfg.get("use_sliding_window") and named
    if unused or (not family.typed and named != implied):
        _refuse("layer_types", sorted(set(types)), f"contradicts the other fields of {model}", _CORRECT)
    return named


def _identity(cfg: Mapping[str, Any], model: str, family: _Family) -> dict[str, Any]:
    """``rope_identity`` of an opened config."""
    old = _mapping("rope_scaling", cfg.get("rope_scaling"))
    new = _mapping("rope_parameters", cfg.get("rope_parameters") or family.absent.get("rope_parameters"))
    if old and new and old != new and new is not _GPT_OSS_ROPE:
        why = "versions of transformers differ in which of rope_parameters and rope_scaling they obey"
        _refuse("rope_scaling", dict(old), why, "keep one of the two")
    if model == "gemma3_text":
        if not set(new) <= {_FULL, _SLIDING}:
            _refuse("rope_parameters", sorted(new), f"it must have the keys {_FULL} and {_SLIDING}", _CORRECT)
        full = old or _mapping(_FULL, new.get(_FULL))
        local = _mapping(_SLIDING, new.get(_SLIDING))
        return {
            "full": _rope(cfg, model, full, cfg.get("rope_theta"), family.theta),
            "window": _rope(cfg, model, local, cfg.get("rope_local_base_freq"), 10000.0),
        }
    rope = _rope(cfg, model, old or new, cfg.get("rope_theta"), family.theta)
    if model == "deepseek_v3":
        rope["rope_interleave"] = bool(cfg.get("rope_interleave", True))
    return {"all": rope}


def _rope(
    cfg: Mapping[str, Any], model: str, scaling: Mapping[str, Any], theta: object, default: float
) -> dict[str, Any]:
    """One set of parameters, numbers as floats, with the fields outside ``scaling`` merged in."""
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind in ("dynamic", "longrope", "su") or (model == "phi3" and kind == "yarn"):
        why = "the KV of a prefix depends on the length of the whole sequence"
        _refuse("rope_scaling", kind, why, "remove the scaling, or serve it without kvfs")
    if kind not in ("default", "linear", "yarn", "llama3"):
        _refuse("rope_scaling", kind, "an unknown way to scale RoPE", _OPAQUE)
    given = {key: value for key, value in scaling.items() if key not in ("rope_type", "type")}
    rope = {key: _plain(key, value) for key, value in given.items() if value is not None}
    _merge(rope, "rope_theta", theta, default)
    _merge(rope, "partial_rotary_factor", cfg.get("partial_rotary_factor"), 1.0)
    if kind in ("yarn", "llama3"):
        field = "original_max_position_embeddings"
        longest = _plain("max_position_embeddings", cfg.get("max_position_embeddings") or 0)
        _merge(rope, field, cfg.get(field), longest)
        rope["max_position_embeddings"] = longest
    return {"rope_type": kind, **dict(sorted(rope.items()))}


def _merge(rope: dict[str, float | bool], field: str, outside: object, default: float) -> None:
    """Fill in a field that may be given in ``rope`` or outside it; if in both, they must agree."""
    value = default if outside is None else _plain(field, outside)
    if rope.setdefault(field, value) != value and outside is not None:
        why = "given twice, and versions of transformers differ in which they obey"
        _refuse(field, f"{rope[field]} and {value}", why, _CORRECT)


def _plain(field: str, value: object) -> float | bool:
    """Numbers as floats (4 and 4.0 are the same model), flags unchanged."""
    if type(value) is bool:
        return value
    if not isinstance(value, (int, float)) or not -1e300 < value < 1e300:
        raise ConfigError(f"{field} is {type(value).__name__} or not finite: the config must have a number")
    return float(value)


def _cache_dtype(cfg: Mapping[str, Any]) -> object:
    """The model's dtype, which engines use for the cache unless the checkpoint asks for another."""
    quantization = cfg.get("quantization_config")
    quantization = quantization if isinstance(quantization, Mapping) else {}
    inner = quantization.get("quantization")
    for key, value in {**(inner if isinstance(inner, Mapping) else {}), **quantization}.items():
        if str(key).startswith("kv_cache") and value:
            remedy = "pass dtype= of the engine's cache, and scale= or scale_digest= if that is quantised"
            _refuse(f"quantization_config.{key}", value, "it asks for a quantised cache", remedy)
    dtype = cfg.get("dtype") or cfg.get("torch_dtype")
    if dtype is None:
        raise ConfigError("dtype is not in the config: pass dtype= of the engine's KV cache")
    return dtype


def _head_dim(cfg: Mapping[str, Any]) -> int:
    if cfg.get("head_dim") is not None:
        return _integer(cfg, "head_dim")
    hidden, heads = _integer(cfg, "hidden_size"), _integer(cfg, "num_attention_heads")
    if hidden % heads:
        raise ConfigError(f"hidden_size is {hidden}, not a multiple of {heads} heads: give head_dim")
    return hidden // heads


def _integer(cfg: Mapping[str, Any], field: str, least: int = 1, most: int = 2**31 - 1) -> int:
    value = cfg.get(field)
    if type(value) is not int or not least <= value <= most:
        raise ConfigError(f"{field} is {value!r:.80}: the config must have an integer in {least}..{most}")
    return value


def _mapping(field: str, value: object) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{field} is {type(value).__name__}: the config must have an object or null")
    return value


def _refuse(field: str, value: object, why: str, remedy: str) -> NoReturn:
    raise UnsupportedModelError(f"{field} is {str(value)[:80]}: {why}; {remedy}")
