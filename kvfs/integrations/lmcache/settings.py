"""The ``adapter_params`` of ``--l2-adapter``, checked before anything is opened."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvfs.errors import ConfigError
from kvfs.integrations.settings import check_known, check_value
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
    check_known(params, [f.name for f in fields(LMCacheSettings)], WHERE)
    values = {"path": os.environ.get("KVFS_DIR"), **params}
    if not isinstance(values["path"], str) or not values["path"]:
        raise ConfigError(f'path in {WHERE} is {values["path"]!r}: write "path": "/var/cache/kvfs", or set KVFS_DIR')
    weights = values.get("weights_id")
    if not isinstance(weights, str) or not weights:
        raise ConfigError(
            f"weights_id in {WHERE} is {weights!r}: write the commit of the model, or a digest of its weights, because "
            "the keys of LMCache name neither"
        )
    chunk = values.get("chunk_tokens", GRANULE_TOKENS)
    if type(chunk) is not int or chunk < 1 or chunk % GRANULE_TOKENS:
        raise ConfigError(
            f"chunk_tokens in {WHERE} is {chunk!r}: pass the --chunk-size of the server, a multiple of "
            f"{GRANULE_TOKENS} tokens"
        )
    for name, value in values.items():
        check_value(name, value, WHERE)
    return LMCacheSettings(**values)
