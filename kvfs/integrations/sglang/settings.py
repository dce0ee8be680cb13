"""The settings of ``--hicache-storage-backend-extra-config`` and of the linker, checked before anything is opened."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvfs.errors import ConfigError
from kvfs.integrations.settings import check_known, check_value

HICACHE_FLAG = "--hicache-storage-backend-extra-config"
LINKER_FLAG = "--unified-cache-external-linker-config"
#: Keys that SGLang leaves in its extra config for itself.
ENGINE_KEYS = frozenset({"backend_name", "module_path", "class_name", "interface_v1", "enable_metadata_cache"})


@dataclass(frozen=True)
class SGLangSettings:
    """Sizes in bytes, times in seconds."""

    flag: str  # where the settings were written: errors name it
    path: str
    capacity: int | str | None = None  # of a new store; an existing one keeps its own
    weights_id: str = ""  # "": the commit of a hub model, or a digest of the files of a local one
    name: str = ""  # of the namespace; "": the served model's
    layers: int = 0  # of the whole model; 0: from its config
    kv_heads: int = 0  # of the whole model; 0: from its config
    share: str = ""  # "engines": use one namespace with other engines
    codec: str | None = None  # of pages stored from now on; None: the store's
    ttl: float | str | None = None  # lifetime of stored pages; None: the quota's
    ring_bytes: int | str = "512MiB"  # of staging memory, per rank
    threads: int = 4  # of copies, per rank and direction
    store_seconds: float = 30.0  # pages that are not copied by then are not stored
    load_seconds: float = 30.0  # pages that are not loaded by then are recomputed


def settings_of(extra: Mapping[str, Any] | None, flag: str = HICACHE_FLAG) -> SGLangSettings:
    """The settings, checked. ConfigError names the value and what to write instead."""
    extra = dict(extra or {})
    known = {f.name for f in fields(SGLangSettings)} - {"flag"}
    check_known(set(extra) - ENGINE_KEYS, known, flag)
    values = {"path": os.environ.get("KVFS_DIR"), **{name: extra[name] for name in known if name in extra}}
    if not isinstance(values["path"], str) or not values["path"]:
        raise ConfigError(
            f'path is {values["path"]!r}: write {flag} \'{{"path": "/var/cache/kvfs", "capacity": "200GiB", ...}}\', '
            "or set KVFS_DIR"
        )
    for name, value in values.items():
        if name in ("layers", "kv_heads") and (type(value) is not int or not 0 <= value <= 4096):
            raise ConfigError(f"{name} in {flag} is {value!r}: pass an integer in 0..4096")
        check_value(name, value, flag)
    return SGLangSettings(flag, **values)
