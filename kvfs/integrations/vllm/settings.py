"""The settings of ``kv_connector_extra_config``, checked before the engine allocates anything."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, fields
from typing import Any

from kvfs.directory.config import MODES, parse_size
from kvfs.errors import ConfigError
from kvfs.format.codec import parse as parse_codec
from kvfs.integrations.vllm import SPEC
from kvfs.pages.layout import PAGE_TOKENS_MAX
from kvfs.store import open_store

#: Settings of vLLM's own offloading connector that are accepted next to those of kvfs.
ENGINE_KEYS = frozenset({"spec_name", "blocks_per_chunk", "block_size", "self_describing_kv_events"})
PAGE_TOKENS = 64  # tokens of a page where the engine's blocks are smaller: larger pages cost less per token


@dataclass(frozen=True)
class VllmSettings:
    """Sizes in bytes, times in seconds, lengths in tokens."""

    path: str
    capacity: int | str | None = None  # of a new store; an existing one keeps its own
    mode: str | None = None  # of a new store; None: cache
    weights_id: str = ""  # "": the commit of a hub model, or a digest of the files of a local one
    min_tokens: int = 0  # shorter prompts are neither looked up nor stored
    max_tokens: int = 1 << 24  # tokens of a prompt beyond this are neither looked up nor stored
    read_only: bool = False  # load, never store
    offload_prompt_only: bool = True  # a setting of vLLM; if false, generated tokens are also stored
    codec: str | None = None  # of pages stored from now on; None: the store's
    load_seconds: float = 30.0  # a load that takes longer is recomputed
    store_seconds: float = 2.0  # pages that are not copied by then are not stored
    ring_bytes: int | str = "256MiB"  # of pinned memory, per rank
    registered_bytes: int | str | None = None  # pinned by all ranks for loads; None: a quarter of the memory
    warm_bytes: int | str = "8GiB"  # of the pages used last, registered for loads when a rank starts on a GPU
    threads: int = 2  # of copies, per rank and direction


def settings_of(extra: Mapping[str, Any]) -> VllmSettings:
    """The settings, checked. ConfigError names the value and what to write instead."""
    known = {f.name: f for f in fields(VllmSettings)}
    unknown = sorted(set(extra) - set(known) - ENGINE_KEYS)
    if unknown:
        raise ConfigError(f"kv_connector_extra_config has {unknown[0]!r}: pass some of {', '.join(sorted(known))}")
    values = {"path": os.environ.get("KVFS_DIR"), **{name: extra[name] for name in known if name in extra}}
    path = values["path"]
    if path is not None and not isinstance(path, str):
        raise ConfigError(f'path is {path!r}: write a directory, such as "/var/cache/kvfs"')
    if not path:
        raise ConfigError(
            'path is missing: write "kv_connector_extra_config": {"path": "/var/cache/kvfs", "capacity": "200GiB"}, '
            "or set KVFS_DIR"
        )
    settings = VllmSettings(**values)
    for name, value in {**values, **{name: extra[name] for name in ENGINE_KEYS if name in extra}}.items():
        _check(name, value)
    return settings


def check_early(extra: Mapping[str, Any]) -> None:
    """Check what can be checked before the engine loads its model: each value, and that the store opens.

    Raises ConfigError, StoreAccessError or another KvfsError, each with its remedy. A missing store is created.
    """
    settings = settings_of(extra)
    open_store(
        settings.path, capacity=settings.capacity, mode=settings.mode or "cache", read_only=settings.read_only,
        counted=False,
    ).close()  # fmt: skip


def _check(name: str, value: Any) -> None:
    if name in ("min_tokens", "max_tokens"):
        if type(value) is not int or value < 0:
            raise ConfigError(f"{name} is {value!r}: pass a number of tokens, 0 or more")
    elif name in ("load_seconds", "store_seconds"):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 600:
            raise ConfigError(f"{name} is {value!r}: pass seconds, more than 0 and at most 600")
    elif name in ("read_only", "offload_prompt_only", "self_describing_kv_events"):
        if type(value) is not bool:  # vLLM would read "false" as true
            raise ConfigError(f"{name} is {value!r}: pass true or false")
    elif name == "threads":
        if type(value) is not int or not 1 <= value <= 64:
            raise ConfigError(f"threads is {value!r}: pass 1 to 64")
    elif name == "spec_name":
        if value != SPEC:  # another spec would not register the metrics of kvfs
            raise ConfigError(f"spec_name is {value!r}: leave it out, or write {SPEC}")
    elif name in ("blocks_per_chunk", "block_size"):
        if type(value) is not int or not 1 <= value <= PAGE_TOKENS_MAX:
            raise ConfigError(f"{name} is {value!r}: pass 1 to {PAGE_TOKENS_MAX}")
    elif name == "weights_id":
        if not isinstance(value, str) or not value.isprintable() or len(value) > 128:
            raise ConfigError(f"weights_id is {value!r}: pass up to 128 printable characters that name these weights")
    elif name == "mode" and value is not None:
        if value not in MODES:
            raise ConfigError(f"mode is {value!r}: choose one of {', '.join(MODES)}")
    elif name == "codec" and value is not None:
        parse_codec(value)
    elif name in ("ring_bytes", "warm_bytes") or (name in ("capacity", "registered_bytes") and value is not None):
        parse_size(value, name)


def set_defaults(extra: MutableMapping[str, Any], block_tokens: tuple[int, ...]) -> None:
    """Set what vLLM's half reads, unless it is set: the spec's name, and how many blocks make a page.

    ``block_tokens``: tokens of a block, per group. A page has the least number of blocks that makes a multiple of 16
    tokens; with one group, as many as fit PAGE_TOKENS. Hybrids do not combine blocks: windows move by blocks, and a
    page of which some blocks were freed cannot be stored.
    """
    extra.setdefault("spec_name", SPEC)
    if "blocks_per_chunk" in extra or "block_size" in extra:
        return
    sizes = set(block_tokens)
    blocks = next(n for n in range(1, 17) if all(n * size % 16 == 0 for size in sizes))
    if len(block_tokens) == 1:
        blocks = max(blocks, PAGE_TOKENS // block_tokens[0] // blocks * blocks)
    extra["blocks_per_chunk"] = blocks
