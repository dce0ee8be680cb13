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
    from kvfs.directory.config import Quota as Quota
    from kvfs.errors import ConfigError as ConfigError
    from kvfs.errors import CorruptError as CorruptError
    from kvfs.errors import FormatError as FormatError
    from kvfs.errors import KvfsError as KvfsError
    from kvfs.errors import NoSpaceError as NoSpaceError
    from kvfs.errors import StoreAccessError as StoreAccessError
    from kvfs.errors import StoreLockedError as StoreLockedError
    from kvfs.errors import StoreNotFoundError as StoreNotFoundError
    from kvfs.errors import StoreReadOnlyError as StoreReadOnlyError
    from kvfs.errors import UnsupportedModelError as UnsupportedModelError
    from kvfs.lookup.prefix_match import PrefixMatch as PrefixMatch
    from kvfs.namespace import Namespace as Namespace
    from kvfs.pages.describe import describe as describe
    from kvfs.pages.device_kv import DeviceKV as DeviceKV
    from kvfs.pages.device_kv import KVBuffer as KVBuffer
    from kvfs.pages.identity import Identity as Identity
    from kvfs.pages.layout import Cell as Cell
    from kvfs.pages.layout import Group as Group
    from kvfs.pages.layout import Need as Need
    from kvfs.pages.layout import PageLayout as PageLayout
    from kvfs.pages.layout import Part as Part
    from kvfs.pages.pack import pack as pack
    from kvfs.pages.pack import unpack as unpack
    from kvfs.pages.shared_identity import shared_identity as shared_identity
    from kvfs.store import Store as Store
    from kvfs.store import open_store as open
    from kvfs.transfer.handle import Transfer as Transfer
    from kvfs.transfer.host_io import HostIO as HostIO
    from kvfs.types import PageDone as PageDone
    from kvfs.types import PageOutcome as PageOutcome
    from kvfs.types import PurgeResult as PurgeResult
    from kvfs.types import PutResult as PutResult
    from kvfs.types import SavePlan as SavePlan
    from kvfs.types import StoreStats as StoreStats
    from kvfs.types import Tier as Tier
    from kvfs.types import TransferResult as TransferResult
    from kvfs.types import TransferState as TransferState
    from kvfs.types import Verify as Verify

_HOME = {
    "Quota": "directory.config",
    "DeviceKV": "pages.device_kv",
    "KVBuffer": "pages.device_kv",
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
    "HostIO": "transfer.host_io",
    "Identity": "pages.identity",
    "Cell": "pages.layout",
    "Group": "pages.layout",
    "Need": "pages.layout",
    "PageLayout": "pages.layout",
    "Part": "pages.layout",
    "pack": "pages.pack",
    "unpack": "pages.pack",
    "PrefixMatch": "lookup.prefix_match",
    "Namespace": "namespace",
    "SavePlan": "types",
    "StoreStats": "types",
    "shared_identity": "pages.shared_identity",
    "Store": "store",
    "describe": "pages.describe",
    "Transfer": "transfer.handle",
    "TransferResult": "types",
    "TransferState": "types",
    "PageDone": "types",
    "PageOutcome": "types",
    "PurgeResult": "types",
    "PutResult": "types",
    "Tier": "types",
    "Verify": "types",
}

__all__ = [
    "Cell",
    "ConfigError",
    "CorruptError",
    "DeviceKV",
    "FormatError",
    "Group",
    "HostIO",
    "Identity",
    "KVBuffer",
    "KvfsError",
    "Namespace",
    "Need",
    "NoSpaceError",
    "PageDone",
    "PageLayout",
    "PageOutcome",
    "Part",
    "PrefixMatch",
    "PurgeResult",
    "PutResult",
    "Quota",
    "SavePlan",
    "Store",
    "StoreAccessError",
    "StoreLockedError",
    "StoreNotFoundError",
    "StoreReadOnlyError",
    "StoreStats",
    "Tier",
    "Transfer",
    "TransferResult",
    "TransferState",
    "UnsupportedModelError",
    "Verify",
    "__version__",
    "describe",
    "open",
    "pack",
    "shared_identity",
    "unpack",
]


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
