"""The ``adapter_params`` of ``--l2-adapter``, checked before anything is opened."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvfs.directory.config import parse_duration, parse_size
from kvfs.errors import ConfigError
from kvfs.format.codec import parse as parse_codec
from kvfs.pages.layout import GRANULE_TOKENS

WHERE = "adapter_params of --l2-adapter"


@dataclass(frozen=True)
class LMCacheSettings:
    """Times in seconds."""

    path: str
    weights_id: str
    capacity: int | str | None = None  # of a new store; an existing one keeps its own
    chunk_tokens: int = 256  # as --chunk-size of the server
    codec: str | None = None  # of objects stored from now on; None: the store's
    ttl: float | str | None = None  # lifetime of stored objects; None: the quota's
    threads: int = 4  # of stores, and as many of loads
    store_seconds: float = 30.0  # a store task that takes longer ends as failed
    load_seconds: float = 30.0  # a load or lookup task that takes longer ends with what it has


def settings_of(params: Mapping[str, Any]) -> LMCacheSettings:
    """The settings, checked. ConfigError names the value and what to write instead."""
    known = {f.name for f in fields(LMCacheSettings)}
    unknown = sorted(set(params) - known)
    if unknown:
        raise ConfigError(f"{WHERE} has {unknown[0]!r}: pass some of {', '.join(sorted(known))}")
    values = {"path": os.environ.get("KVFS_DIR"), **params}
    if not isinstance(values["path"], str) or not values["path"]:
        raise ConfigError(f'path in {WHERE} is {values["path"]!r}: write "path": "/var/cache/kvfs", or set KVFS_DIR')
    weights = values.get("weights_id")
    if not isinstance(weights, str) or not weights:
        raise ConfigError(
            f"weights_id in {WHERE} is {weights!r}: write the commit of the model, or a digest of its weights, because "
            "the keys of LMCache name neither"
        )
    for name, value in values.items():
        _check(name, value)
    return LMCacheSettings(**values)


def _check(name: str, value: Any) -> None:
    where = f"{name} in {WHERE}"
    if name == "chunk_tokens" and (type(value) is not int or value < 1 or value % GRANULE_TOKENS):
        raise ConfigError(
            f"{where} is {value!r}: pass the --chunk-size of the server, a multiple of {GRANULE_TOKENS} tokens"
        )
    if name == "threads" and (type(value) is not int or not 1 <= value <= 64):
        raise ConfigError(f"{where} is {value!r}: pass 1 to 64")
    if name in ("store_seconds", "load_seconds") and (type(value) not in (int, float) or not 0 < value <= 3600):
        raise ConfigError(f"{where} is {value!r}: pass seconds, above 0 and at most 3600")
    if name == "capacity" and value is not None:
        parse_size(value, where)
    if name == "ttl" and value is not None:
        parse_duration(value, where)
    if name == "codec" and value is not None:
        parse_codec(value)
