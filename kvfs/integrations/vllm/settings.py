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
from kvfs.system.memory_limits import memory_limit

#: Settings of vLLM's own offloading connector that are accepted next to those of kvfs.
ENGINE_KEYS = frozenset(
    {"spec_name", "blocks_per_chunk", "block_size", "self_describing_kv_events", "sync_load_budget_bytes"}
)
#: A ring without a size in the settings: at least 256 MiB, at most this share of the host's memory, or the cgroup's.
RING_BYTES_MIN, RING_SHARE = 256 << 20, 32
REGISTERED_SHARE = 4  # of ``registered_bytes`` without a size, as in ``kvfs.gpu.gpu_io``
WARM_SECONDS = 5.0  # that a start may take longer for it: some 100 GiB
PAGE_TOKENS = 64  # tokens of a page where the engine's blocks are smaller: larger pages cost less per token


@dataclass(frozen=True)
class VllmSettings:
    """Sizes in bytes, times in seconds, lengths in tokens."""

    path: str
    capacity: int | str | None = None  # of a new store; an existing one keeps its own
    mode: str | None = None  # of a new store; None: cache
    weights_id: str = ""  # "": the commit of a hub model, or a digest of the files of a local one
    share: str = ""  # "engines": use one namespace with other engines
    min_tokens: int = 0  # shorter prompts are neither looked up nor stored
    max_tokens: int = 1 << 24  # tokens of a prompt beyond this are neither looked up nor stored
    read_only: bool = False  # load, never store
    drafter: bool = True  # keep the KV of the drafter's layers, where its weights are identified
    offload_prompt_only: bool = True  # a setting of vLLM; if false, generated tokens are also stored
    codec: str | None = None  # of pages stored from now on; None: the store's
    load_seconds: float = 30.0  # a load that takes longer is recomputed
    bucket_seconds: float | None = None  # longest wait of a request for the bucket; None: while that beats computing
    store_seconds: float = 2.0  # pages that are not copied by then are not stored
    ring_bytes: int | str | None = None  # of pinned memory, per rank; None: what three steps of the engine compute
    registered_bytes: int | str | None = None  # pinned by all ranks for loads; None: a quarter of the memory
    warm_bytes: int | str | None = None  # of the pages used last, registered when a rank starts; None: its share
    threads: int = 2  # of copies, per rank and direction
    dp_pulls: bool = False  # copy prefixes from the GPUs of other DP ranks of this host


def settings_of(extra: Mapping[str, Any]) -> VllmSettings:
    """The settings, checked. ConfigError names the value and what to write instead."""
    known = {f.name: f for f in fields(VllmSettings)}
    unknown = sorted(set(extra) - set(known) - ENGINE_KEYS)
    if unknown:
        names = sorted({*known, *ENGINE_KEYS} - {"spec_name", "sync_load_budget_bytes"})
        raise ConfigError(f"kv_connector_extra_config has {unknown[0]!r}: pass some of {', '.join(names)}")
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
    elif name == "bucket_seconds" and value is not None:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 600:
            raise ConfigError(f"bucket_seconds is {value!r}: pass 0 to 600 seconds; 0 asks no bucket")
    elif name in ("read_only", "drafter", "offload_prompt_only", "self_describing_kv_events", "dp_pulls"):
        if type(value) is not bool:  # vLLM would read "false" as true
            raise ConfigError(f"{name} is {value!r}: pass true or false")
    elif name == "threads":
        if type(value) is not int or not 1 <= value <= 64:
            raise ConfigError(f"threads is {value!r}: pass 1 to 64")
    elif name == "spec_name":
        if value != SPEC:  # another spec would not register the metrics of kvfs
            raise ConfigError(f"spec_name is {value!r}: leave it out, or write {SPEC}")
    elif name == "sync_load_budget_bytes":
        if value != 0 or isinstance(value, bool):  # the engine would compute from such a load whatever its outcome
            raise ConfigError(f"sync_load_budget_bytes is {value!r}: leave it out; kvfs loads between steps, verified")
    elif name in ("blocks_per_chunk", "block_size"):
        if type(value) is not int or not 1 <= value <= PAGE_TOKENS_MAX:
            raise ConfigError(f"{name} is {value!r}: pass 1 to {PAGE_TOKENS_MAX}")
    elif name == "weights_id":
        if not isinstance(value, str) or not value.isprintable() or len(value) > 128:
            raise ConfigError(f"weights_id is {value!r}: pass up to 128 printable characters that name these weights")
    elif name == "share":
        if value not in ("", "engines"):
            raise ConfigError(f'share is {value!r}: write "engines" to share pages with other engines, or leave it out')
    elif name == "mode" and value is not None:
        if value not in MODES:
            raise ConfigError(f"mode is {value!r}: choose one of {', '.join(MODES)}")
    elif name == "codec" and value is not None:
        parse_codec(value)
    elif name in ("ring_bytes", "warm_bytes", "capacity", "registered_bytes") and value is not None:
        parse_size(value, name)


def ring_bytes(settings: VllmSettings, step_bytes: int) -> int | str:
    """Size of the staging ring. ``step_bytes``: of the KV that a step of the engine computes, at most, on this rank.

    Three steps: one is written to the page cache, one arrives, and a quarter of the ring is left to loads.
    """
    if settings.ring_bytes is not None:
        return settings.ring_bytes
    most = (memory_limit() or 0) // RING_SHARE
    return max(RING_BYTES_MIN, min(3 * step_bytes, most))


def warm_bytes(settings: VllmSettings, ranks: int) -> int:
    """How much a rank registers when it starts: by default its share of what all ``ranks`` of the host may register."""
    if settings.warm_bytes is not None:
        return parse_size(settings.warm_bytes, "warm_bytes")
    if settings.registered_bytes is not None:
        return parse_size(settings.registered_bytes, "registered_bytes") // ranks
    return (memory_limit() or 0) // REGISTERED_SHARE // ranks


def set_defaults(extra: MutableMapping[str, Any], block_tokens: tuple[int, ...], single: bool = False) -> None:
    """Set what vLLM's half reads, unless it is set: the spec's name, and how many blocks make a page.

    ``block_tokens``: tokens of a block, per group. A chunk has the least number of blocks that makes a multiple of 16
    tokens; with one group, as many as fit PAGE_TOKENS. Hybrids do not combine blocks: windows move by blocks, and a
    page of which some blocks were freed cannot be stored. Groups with different blocks have chunks of one block each,
    and pages of a common multiple. ``single``: blocks are moved as they are, one for each page.
    """
    extra.setdefault("spec_name", SPEC)
    extra.setdefault("sync_load_budget_bytes", 0)
    if "blocks_per_chunk" in extra or "block_size" in extra:
        return
    sizes, blocks = set(block_tokens), 1
    if len(sizes) == 1 and not single:
        blocks = next(n for n in range(1, 17) if n * block_tokens[0] % 16 == 0)
    if len(block_tokens) == 1 and not single:
        blocks = max(blocks, PAGE_TOKENS // block_tokens[0] // blocks * blocks)
    extra["blocks_per_chunk"] = blocks
