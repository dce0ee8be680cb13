"""The settings in ``KVFS_LIGHTLLM``, checked before anything is opened. LightLLM's own flags have no place for them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvfs.directory.config import parse_duration, parse_size
from kvfs.errors import ConfigError
from kvfs.format.codec import parse as parse_codec

VARIABLE = "KVFS_LIGHTLLM"
SHARE = ("", "engines")


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


def settings_of(environment: Mapping[str, str] = os.environ) -> LightLLMSettings:
    """The settings, checked. ConfigError names the value and what to write instead."""
    text = environment.get(VARIABLE) or "{}"
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise ConfigError(f"{VARIABLE} is {text!r:.200}: pass a JSON object, such as {_EXAMPLE}")
    known = {f.name for f in fields(LightLLMSettings)}
    unknown = sorted(set(given) - known)
    if unknown:
        raise ConfigError(f"{VARIABLE} has {unknown[0]!r}: pass some of {', '.join(sorted(known))}")
    values = {"path": environment.get("KVFS_DIR") or "", **given}
    for name, value in values.items():
        _check(name, value)
    return LightLLMSettings(**values)


_EXAMPLE = '\'{"path": "/var/cache/kvfs", "capacity": "200GiB"}\''


def _check(name: str, value: Any) -> None:
    where = f"{name} in {VARIABLE}"
    if name in ("path", "weights_id", "name") and not isinstance(value, str):
        raise ConfigError(f"{where} is {value!r}: pass text")
    if name == "threads" and (type(value) is not int or not 1 <= value <= 64):
        raise ConfigError(f"{where} is {value!r}: pass 1 to 64")
    if name == "share" and value not in SHARE:
        raise ConfigError(f'{where} is {value!r}: pass "engines" to share pages with other engines, or leave it out')
    if name in ("store_seconds", "load_seconds") and (type(value) not in (int, float) or not 0 < value <= 60):
        raise ConfigError(f"{where} is {value!r}: pass seconds, above 0 and at most 60, since LightLLM waits 120")
    if name == "ring_bytes" or (name == "capacity" and value is not None):
        parse_size(value, where)
    if name == "ttl" and value is not None:
        parse_duration(value, where)
    if name == "codec" and value is not None:
        parse_codec(value)
