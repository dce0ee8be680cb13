"""The identity that all engines of a model have, for this engine: ``"share": "engines"``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm.config import VllmConfig

from kvfs.errors import ConfigError, UnsupportedModelError
from kvfs.integrations.vllm.model import EngineModel
from kvfs.integrations.weights import config_file, model_revision
from kvfs.pages.shared_identity import shared_identity

#: Arguments that change KV in a way that other engines do not know, and their values that do not.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "quantization": (None, ""),
    "hf_overrides": (None, {}),
    "hf_config_path": (None, ""),
    "model_impl": ("auto", "vllm"),
}


def shared_model(config: VllmConfig, model: EngineModel, given_weights: str) -> EngineModel:
    """``model`` with the identity of ``kvfs.shared_identity``, and its groups' names.

    ConfigError names the argument to leave out if KV does not follow from the model's weights and config;
    UnsupportedModelError if the engine's cache does not hold the cells of the shared layout.
    """
    of, load = config.model_config, config.load_config
    values: dict[str, Any] = {name: getattr(of, name, None) for name in _NEUTRAL}
    wrong = [(name, value) for name, value in values.items() if _plain(value) not in _NEUTRAL[name]]
    if _plain(load.load_format) not in ("auto", "safetensors"):
        wrong.append(("load_format", load.load_format))
    if str(config.cache_config.cache_dtype) != "auto":
        wrong.append(("kv_cache_dtype", config.cache_config.cache_dtype))
    for name, value in wrong:
        raise ConfigError(
            f'--{name.replace("_", "-")} {value} changes KV, unknown to other engines: leave it out, or "share"'
        )
    if of.multimodal_config is not None or "max_model_len" in model.extra:
        raise UnsupportedModelError(
            "KV of this model depends on more than token ids, weights and config (images, or RoPE scaled by "
            '--max-model-len): leave "share" out'
        )
    file = config_file(of.model, of.revision)
    weights = given_weights or model_revision(of.model, of.revision, getattr(load, "download_dir", None))
    if file is None or not weights:
        raise ConfigError(
            f'share needs the config.json and the commit or weight files of {of.model} on this host: leave "share" '
            "out, or load the model from a folder"
        )
    identity = shared_identity(file, weights, dtype=str(of.dtype), page_tokens=model.page_tokens)
    return replace(
        _with_layout(model, identity["layout"]), name=identity["name"], revision=identity["revision"],
        rope=identity["rope"], extra=identity["extra"],
    )  # fmt: skip


def _with_layout(model: EngineModel, layout: Any) -> EngineModel:
    """``model`` with the pages of ``layout``, if these hold what the engine keeps."""
    mine, groups = model.layout.groups, [stored for group in model.groups for stored in group.stored]
    if len(layout.groups) != 1 or len(groups) != 1:
        raise UnsupportedModelError(
            f"the cache of this engine has {len(groups)} groups, that of the model {len(layout.groups)}: engines share "
            'one group of full attention; leave "share" out'
        )
    (theirs,), (stored,) = layout.groups, groups
    if stored.packed or stored.kind != "tokens":
        raise UnsupportedModelError(
            "this engine keeps KV in blocks of a kernel's own byte order (on CPUs always), which no other engine "
            'reads: leave "share" out'
        )
    same = [(g.layers, g.heads, g.cell.nbytes, g.need, g.states, g.cell.encoding.split()[0]) for g in (mine[0], theirs)]
    if same[0] != same[1]:
        raise UnsupportedModelError(
            f'this engine keeps {mine[0]}, the config of the model describes {theirs}: leave "share" out'
        )
    named = tuple(
        replace(group, stored=tuple(replace(one, name=theirs.name) for one in group.stored)) for group in model.groups
    )
    return replace(model, layout=layout, groups=named)


def _plain(value: Any) -> Any:
    """An enumeration's value, which is what the command line takes."""
    return getattr(value, "value", value)
