"""Which namespace an engine's pages belong to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvfs.errors import ConfigError
from kvfs.integrations.sglang.pools import Pool
from kvfs.integrations.sglang.ranks import Rank
from kvfs.integrations.sglang.settings import SGLangSettings
from kvfs.integrations.weights import config_file, model_revision
from kvfs.pages.shared_identity import shared_identity

#: Arguments of the server that change KV in a way that other engines do not know.
_SWITCHES = (
    "quantization", "quantization_param_path", "modelopt_quant", "rl_quant_profile", "json_model_override_args",
    "kv_cache_dtype", "load_format", "model_impl",
)  # fmt: skip


class ModelFiles:
    """The model that SGLang serves. ``server``: its ServerArgs; None if it is not known."""

    def __init__(self, server: Any | None) -> None:
        self._server = server

    def _argument(self, name: str) -> Any:
        return getattr(self._server, name, None)

    @property
    def config(self) -> Path | None:
        """Its config.json, if it is on this host."""
        model = self._argument("model_path")
        return config_file(model, self._argument("revision")) if isinstance(model, str) else None

    def number(self, *names: str) -> int:
        """The first of these fields that the config of the text model has; 0 if none, or there is no config."""
        file = self.config
        try:
            fields = json.loads(file.read_bytes()) if file is not None else {}
        except (OSError, ValueError):
            return 0
        inner = fields.get("text_config") if isinstance(fields, dict) else None
        for place in (inner, fields):
            for name in names:
                value = place.get(name) if isinstance(place, dict) else None
                if type(value) is int and value > 0:
                    return value
        return 0

    def weights(self, settings: SGLangSettings) -> str:
        """What identifies the weights and their config. ConfigError if nothing does."""
        if settings.weights_id:
            return settings.weights_id
        model, revision = self._argument("model_path"), self._argument("revision")
        if str(self._argument("load_format")) == "dummy":
            return f"dummy-seed-{self._argument('random_seed')}"
        found = model_revision(model, revision, self._argument("download_dir")) if isinstance(model, str) else None
        if found:
            return found
        raise ConfigError(
            f'kvfs cannot tell which weights {model or "this engine"} has: write "weights_id" with a commit or '
            f"digest of them into {settings.flag}"
        )

    def switches(self) -> dict[str, str]:
        """Arguments of the server that change KV of equal weights."""
        given = {name: self._argument(name) for name in ("dtype", "context_length", *_SWITCHES)}
        return {name: str(value) for name, value in given.items() if value not in (None, "", "{}", "auto")}


def namespace_arguments(
    settings: SGLangSettings, model: ModelFiles, pool: Pool, rank: Rank, model_name: str | None
) -> dict[str, Any]:
    """Arguments of ``Store.namespace``. ConfigError names the setting that is missing."""
    if settings.share:
        return _shared(settings, model, pool)
    layers = settings.layers or model.number("num_hidden_layers") or _alone(settings, "layers", rank.pp_size, pool)
    heads = 1
    if not pool.latent:
        heads = settings.kv_heads or model.number("num_key_value_heads", "num_attention_heads")
        heads = heads or _alone(settings, "kv_heads", rank.tp_size, pool)
    return {
        "name": settings.name or model_name or "model",
        "layout": pool.layout(layers, heads),
        "revision": model.weights(settings),
        "extra": {"engine": "sglang", **model.switches()},
    }


def _alone(settings: SGLangSettings, name: str, ranks: int, pool: Pool) -> int:
    if ranks == 1:
        return int(pool.pool.layer_num if name == "layers" else pool.pool.head_num)
    raise ConfigError(
        f'kvfs cannot tell how many {name} the whole model has: write "{name}" into {settings.flag}, since each of '
        f"{ranks} ranks holds a share of them"
    )


def _shared(settings: SGLangSettings, model: ModelFiles, pool: Pool) -> dict[str, Any]:
    """The identity that all engines of a model have. ConfigError if KV does not follow from weights and config."""
    file, switches = model.config, model.switches()
    if file is None:
        raise ConfigError(
            f'share in {settings.flag} needs the config.json of the model on this host: leave "share" out'
        )
    for name in _SWITCHES:
        if name in switches:
            raise ConfigError(
                f"--{name.replace('_', '-')} {switches[name]} changes KV, unknown to other engines: leave it "
                f'out, or "share" in {settings.flag}'
            )
    return shared_identity(file, model.weights(settings), dtype=pool.dtype, page_tokens=pool.page_tokens)
