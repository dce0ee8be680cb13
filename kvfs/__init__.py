"""kvfs: a file-system-style, tiered, persistent store for the attention KV of LLM prompts.

>>> import kvfs
>>> with kvfs.open("/var/cache/kvfs", capacity="200GiB") as store:  # doctest: +SKIP
...     layout = kvfs.PageLayout.kv(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16")
...     ns = store.namespace("llama-3-8b", layout, revision="9213176")
...     ns.put(token_ids, pages)
...     with ns.match(token_ids, leave=1) as match:
...         loaded = ns.get(match, out)

Names are loaded when they are first used, so that ``import kvfs`` costs little and never imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfs.version import __version__

if TYPE_CHECKING:
    from kvfs.config import Quota as Quota
    from kvfs.errors import (
        ConfigError as ConfigError,
        CorruptError as CorruptError,
        FormatError as FormatError,
        KvfsError as KvfsError,
        NoSpaceError as NoSpaceError,
        StoreAccessError as StoreAccessError,
        StoreLockedError as StoreLockedError,
        StoreNotFoundError as StoreNotFoundError,
        StoreReadOnlyError as StoreReadOnlyError,
        UnsupportedModelError as UnsupportedModelError,
    )
    from kvfs.identity import Identity as Identity
    from kvfs.layout import (
        Cell as Cell,
        Group as Group,
        Need as Need,
        PageLayout as PageLayout,
        Part as Part,
    )
    from kvfs.match import PrefixMatch as PrefixMatch
    from kvfs.namespace import Namespace as Namespace, SavePlan as SavePlan
    from kvfs.store import Store as Store, open_store as open
    from kvfs.types import PutResult as PutResult, Tier as Tier, Verify as Verify

_HOME = {
    "Quota": "config",
    "ConfigError": "errors",
    "CorruptError": "errors",
    "FormatError": "errors",
    "KvfsError": "errors",
    "NoSpaceError": "errors",
    "StoreAccessError": "errors",
    "StoreLockedError": "errors",
    "StoreNotFoundError": "errors",
    "StoreReadOnlyError": "errors",
    "UnsupportedModelError": "errors",
    "Identity": "identity",
    "Cell": "layout",
    "Group": "layout",
    "Need": "layout",
    "PageLayout": "layout",
    "Part": "layout",
    "PrefixMatch": "match",
    "Namespace": "namespace",
    "SavePlan": "namespace",
    "Store": "store",
    "PutResult": "types",
    "Tier": "types",
    "Verify": "types",
}

__all__ = ["__version__", "open", *_HOME]


def __getattr__(name: str) -> Any:
    import importlib

    if name == "open":
        value = importlib.import_module("kvfs.store").open_store
    elif name in _HOME:
        value = getattr(importlib.import_module(f"kvfs.{_HOME[name]}"), name)
    else:
        raise AttributeError(f"module 'kvfs' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
