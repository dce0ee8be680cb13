"""Which namespace LightLLM's pages belong to, from the arguments of its server: they are in its environment."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvfs.errors import ConfigError, UnsupportedModelError
from kvfs.integrations.lightllm.settings import VARIABLE, LightLLMSettings
from kvfs.integrations.weights import config_file, model_revision
from kvfs.pages.hf_config import rope_identity
from kvfs.pages.layout import GRANULE_TOKENS, PageLayout
from kvfs.pages.shared_identity import shared_identity

ARGUMENTS = "LIGHTLLM_START_ARGS"
PATCH = "docs/lightllm-prompts.patch"
PAGE_TOKENS = 256  # LightLLM's default; of pages whose server is not known
_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
#: Arguments that change KV of equal weights, and so does what is in the files that the last two name.
_SWITCHES = (
    "quant_type", "expert_dtype", "llm_kv_type", "mtp_mode", "load_way", "quant_cfg",
    "kv_quant_calibration_config_path",
)  # fmt: skip
_FILES = ("quant_cfg", "kv_quant_calibration_config_path")
_UNSET = (None, "", "none", "None", "HF")
_LINEAR = (
    "linear_att_hash_page_size", "linear_att_page_block_num", "linear_att_ssm_data_type",
    "disable_linear_att_small_page_cpu_cache",
)  # fmt: skip


class Server:
    """The arguments of LightLLM's server. Outside of one there are none, and the settings must say what is needed."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        text = environment.get(ARGUMENTS)
        try:
            given = json.loads(text) if text else {}
        except ValueError:
            raise ConfigError(f"{ARGUMENTS} is no JSON: LightLLM sets it, do not set it by hand") from None
        self._given: dict[str, Any] = given if isinstance(given, dict) else {}

    def __bool__(self) -> bool:
        return bool(self._given)

    def argument(self, name: str) -> Any:
        return self._given.get(name)

    @property
    def page_tokens(self) -> int:
        return int(self.argument("cpu_cache_token_page_size") or PAGE_TOKENS)

    @property
    def dtype(self) -> str:
        """In which it computes; "" if that is not known."""
        given = str(self.argument("data_type") or "")
        return _DTYPES.get(given, given)

    @property
    def config(self) -> Path | None:
        model = self.argument("model_dir")
        return config_file(model) if isinstance(model, str) and Path(model).is_dir() else None

    def check(self, without: str = "--enable_disk_cache") -> None:
        """ConfigError or UnsupportedModelError, with the flag to change. ``without``: what LightLLM can do without."""
        if self.argument("enable_multimodal"):
            raise UnsupportedModelError(
                "LightLLM numbers images and audio again in each run, so pages with one would be found for another: "
                f"pass --disable_vision --disable_audio, or leave {without} out"
            )
        if self.argument("enable_rl"):
            raise UnsupportedModelError(
                "--enable_rl changes weights in place, and pages of the old ones would be found: leave --enable_rl or "
                f"{without} out"
            )
        if self.page_tokens % GRANULE_TOKENS:
            raise ConfigError(
                f"--cpu_cache_token_page_size is {self.page_tokens}: pass 64, or another multiple of {GRANULE_TOKENS}"
            )

    def name(self, settings: LightLLMSettings) -> str:
        served, folder = self.argument("model_name"), Path(str(self.argument("model_dir") or "lightllm"))
        return settings.name or (served if served not in (None, "default_model_name") else folder.resolve().name)

    def weights(self, settings: LightLLMSettings) -> str:
        """What identifies the weights and their config. ConfigError if nothing does."""
        if settings.weights_id:
            return settings.weights_id
        model = self.argument("model_dir")
        found = model_revision(model) if isinstance(model, str) and Path(model).is_dir() else None
        if found:
            return found
        raise ConfigError(
            f'kvfs cannot tell which weights {model or "this engine"} has: write "weights_id" with a commit or digest '
            f"of them into {VARIABLE}"
        )

    def switches(self) -> dict[str, str]:
        """What changes KV of equal weights. ConfigError for a file that cannot be read."""
        found = {name: str(self.argument(name)) for name in _SWITCHES if self.argument(name) not in _UNSET}
        found |= {name: _digest(name, found[name]) for name in _FILES if name in found}
        if "llm_kv_type" in found:
            found["llm_kv_quant_group_size"] = str(self.argument("llm_kv_quant_group_size"))
        if "mtp_mode" in found:
            draft = self.argument("mtp_draft_model_dir")
            found["mtp_step"] = str(self.argument("mtp_step"))
            found["mtp_draft"] = (model_revision(draft) if isinstance(draft, str) else None) or str(draft)
        return found

    # -- namespaces --------------------------------------------------------------------------

    def opaque(self, settings: LightLLMSettings, page_bytes: int) -> dict[str, Any]:
        """Arguments of ``Store.namespace`` for pages that kvfs does not interpret, under hashes of LightLLM."""
        if settings.share:
            raise ConfigError(
                f"share in {VARIABLE} needs pages under token ids: apply {PATCH} to LightLLM, or leave it out"
            )
        return self._own(settings, PageLayout.opaque(page_bytes, self.page_tokens), {})

    def device(self, settings: LightLLMSettings) -> tuple[str, int | str, dict[str, Any]]:
        """Directory and capacity of the store, and arguments of ``Store.namespace``, for the pool on the GPU."""
        if self.argument("run_mode") not in (None, "normal") or int(self.argument("nnodes") or 1) > 1:
            raise UnsupportedModelError(
                f'"device" in {VARIABLE} is for servers of one host that compute and answer: leave it out with '
                "--run_mode prefill or decode and --nnodes"
            )
        folder = self.argument("disk_cache_dir")
        if not settings.path and not folder:
            raise ConfigError(
                f'no directory of the store: write "path" into {VARIABLE}, set KVFS_DIR, or pass --disk_cache_dir'
            )
        path = settings.path or str(Path(folder, "cache_file.kvfs"))
        capacity = settings.capacity or int(float(self.argument("disk_cache_storage_size") or 10) * (1 << 30))
        return path, capacity, self.canonical(settings, None)

    def canonical(self, settings: LightLLMSettings, page_bytes: int | None) -> dict[str, Any]:
        """Arguments of ``Store.namespace`` for pages under token ids. UnsupportedModelError where cells are unknown.

        ``page_bytes``: of the pages that LightLLM has; None if the caller compares shapes itself.
        """
        config, switches = self.config, self.switches()
        if config is None:
            raise UnsupportedModelError(f"there is no config.json in --model_dir {self.argument('model_dir')}")
        for name in _SWITCHES if settings.share else ("llm_kv_type", "mtp_mode"):
            if name in switches:
                raise UnsupportedModelError(
                    f"--{name} {self.argument(name)} changes KV, unknown to other engines: leave it out, or "
                    f'"share" in {VARIABLE}'
                )
        if self.dtype not in _DTYPES.values():
            raise UnsupportedModelError(f"--data_type is {self.argument('data_type')!r}: pass bf16, fp16 or fp32")
        if settings.share:
            arguments = shared_identity(config, self.weights(settings), dtype=self.dtype, page_tokens=self.page_tokens)
        else:
            layout = PageLayout.from_hf_config(config, self.page_tokens, dtype=self.dtype)
            arguments = self._own(settings, layout, rope_identity(config))
        layout = arguments["layout"]
        if [group.name for group in layout.groups] != ["full"] or "latent" in layout.groups[0].cell.encoding:
            raise UnsupportedModelError("LightLLM's pages are understood of full attention with keys and values only")
        if page_bytes is not None and layout.page_bytes != page_bytes:
            raise UnsupportedModelError(
                f"LightLLM's pages have {page_bytes} bytes, by {config} and --data_type they have {layout.page_bytes}"
            )
        return arguments

    def _own(self, settings: LightLLMSettings, layout: PageLayout, rope: Mapping[str, Any]) -> dict[str, Any]:
        given = {name: str(self.argument(name)) for name in _LINEAR if self.argument(name) is not None}
        extra = {"engine": "lightllm", "dtype": self.dtype, **self.switches()}
        if layout.kind == "opaque":  # pages of hybrids hold states after so many tokens
            extra |= given
        return {
            "name": self.name(settings), "layout": layout, "revision": self.weights(settings), "rope": rope,
            "extra": extra,
        }  # fmt: skip


def _digest(name: str, path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as exc:
        raise ConfigError(f"--{name} {path} cannot be read: {exc.strerror}") from None
