"""The settings in ``KVFS_LIGHTLLM``, checked before anything is opened. LightLLM's own flags have no place for them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields

from kvfs.directory.config import parse_size
from kvfs.errors import ConfigError
from kvfs.integrations.settings import check_known, check_value
from kvfs.system.memory_limits import memory_limit

VARIABLE = "KVFS_LIGHTLLM"
REGISTERED_SHARE = 4  # of the host's memory may be registered, as in ``kvfs.gpu.gpu_io``
_EXAMPLE = '\'{"path": "/var/cache/kvfs", "capacity": "200GiB"}\''


@dataclass(frozen=True)
class LightLLMSettings:
    """Sizes in bytes, times in seconds."""

    path: str = ""  # "": next to the file that LightLLM names, in --disk_cache_dir
    capacity: int | str | None = None  # of a new store; None: --disk_cache_storage_size
    weights_id: str = ""  # "": a digest of the files in --model_dir, or the commit if it is a snapshot of the hub
    name: str = ""  # of the namespace; "": --model_name, or the name of --model_dir
    share: str = ""  # "engines": use one namespace with other engines
    codec: str | None = None  # of pages stored from now on; None: the store's
    ttl: float | str | None = None  # lifetime of stored pages; None: the quota's
    ring_bytes: int | str = "512MiB"  # of staging memory
    threads: int = 4  # of copies, per direction
    store_seconds: float = 30.0  # pages that are not copied by then are not stored
    load_seconds: float = 30.0  # pages that are not loaded by then are computed
    device: bool = False  # between the pool on the GPU and the store, without LightLLM's CPU cache
    warm_bytes: int | str | None = None  # with device: of the pages used last, registered at the start; None: its share


def settings_of(environment: Mapping[str, str] = os.environ) -> LightLLMSettings:
    """The settings, checked. ConfigError names the value and what to write instead."""
    text = environment.get(VARIABLE) or "{}"
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise ConfigError(f"{VARIABLE} is {text!r:.200}: pass a JSON object, such as {_EXAMPLE}")
    check_known(given, [f.name for f in fields(LightLLMSettings)], VARIABLE)
    values = {"path": environment.get("KVFS_DIR") or "", **given}
    if not isinstance(values["path"], str):
        raise ConfigError(f"path in {VARIABLE} is {values['path']!r}: pass text")
    if not isinstance(values.get("device", False), bool):
        raise ConfigError(f"device in {VARIABLE} is {values['device']!r}: pass true or false")
    if values.get("warm_bytes") is not None:
        parse_size(values["warm_bytes"], f"warm_bytes in {VARIABLE}")
    for name, value in values.items():
        check_value(name, value, VARIABLE, seconds_max=60, why=", since LightLLM waits 120")
    return LightLLMSettings(**values)


def warm_bytes(settings: LightLLMSettings, ranks: int) -> int:
    """How much a rank registers when it starts: by default its share of what all ``ranks`` of the host may register."""
    if settings.warm_bytes is not None:
        return parse_size(settings.warm_bytes, "warm_bytes")
    return (memory_limit() or 0) // REGISTERED_SHARE // ranks
