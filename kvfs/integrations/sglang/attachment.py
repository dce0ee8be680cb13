"""A store with a pool of the engine attached to it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvfs.errors import ConfigError, UnsupportedModelError
from kvfs.integrations.sglang.identity import ModelFiles, namespace_arguments
from kvfs.integrations.sglang.pools import GROUP, Pool
from kvfs.integrations.sglang.ranks import Rank
from kvfs.integrations.sglang.settings import SGLangSettings
from kvfs.namespace import Namespace
from kvfs.pages.chunk_hash import ChunkHashes
from kvfs.pages.device_kv import DeviceKV
from kvfs.store import Store, open_store
from kvfs.transfer.handle import Transfer
from kvfs.transfer.host_io import HostIO

log = logging.getLogger("sglang.kvfs")
GRACE_SECONDS = 5.0  # beyond its deadline, for a transfer that waits for a disk; then the pool gets its pages back
HASH_DIGITS = 64


@dataclass(frozen=True)
class Attachment:
    """Owns the store and the transport of one rank."""

    store: Store
    space: Namespace
    io: HostIO
    kv: DeviceKV
    page_tokens: int

    @classmethod
    def open(
        cls, settings: SGLangSettings, rank: Rank, model: ModelFiles, model_name: str | None, pool: Pool,
        replica: tuple[int, int] = (0, 1),
    ) -> Attachment:  # fmt: skip
        """ConfigError or UnsupportedModelError names the flag to change, before a store is made."""
        arguments = namespace_arguments(settings, model, pool, rank, model_name)
        layout = arguments["layout"]
        if [group.name for group in layout.groups] != [GROUP]:
            raise UnsupportedModelError(f"kvfs keeps one pool of full attention, the model has {len(layout.groups)}")
        kv = pool.device_kv(layout.groups[0], rank, replica)
        store = open_store(settings.path, capacity=settings.capacity)
        try:
            space = store.namespace(**arguments, codec=settings.codec)
            io = space.attach(
                kv, ring_bytes=settings.ring_bytes, threads=settings.threads,
                append_elsewhere=kv.memory.startswith("cuda"),
            )  # fmt: skip
        except BaseException:
            store.close()
            raise
        return cls(store, space, io, kv, pool.page_tokens)

    def units(self, keys: Any, slots: Any) -> list[int]:
        """Numbers of the pool's pages; each page of tokens is one page of the pool."""
        size = self.page_tokens
        if len(slots) != len(keys) * size:
            raise ConfigError(f"{len(slots)} slots for {len(keys)} pages of {size} tokens: pass a slot for each token")
        first = [int(slot) for slot in slots[::size].tolist()]
        wrong = next((slot for slot in first if slot % size), None)
        if wrong is not None:
            raise ConfigError(f"a page begins at slot {wrong}, which is not a multiple of its {size} tokens")
        return [slot // size for slot in first]

    def close(self) -> None:
        """End what is under way, and close the store."""
        self.io.close()
        self.store.close()


def ended(transfer: Transfer, seconds: float) -> bool:
    """Wait for the end of a transfer; False if it is late: then no byte of the pool moves any more."""
    if transfer.wait(seconds + GRACE_SECONDS) is not None:
        return True
    log.warning("kvfs: a %s took longer than %s s and was given up", transfer.kind, seconds)
    # it waits for a copy in memory, never for a disk; the pool reuses the pages when this call returns
    while not transfer.withdraw(GRACE_SECONDS):
        log.error("kvfs: a copy of a %s does not end; its pages of the pool are held back", transfer.kind)
    return False


def digests(keys: Sequence[str]) -> ChunkHashes:
    """The bytes of page hashes."""
    size = HASH_DIGITS // 2
    try:
        joined = bytes.fromhex("".join(keys)) if set(map(len, keys)) <= {HASH_DIGITS} else b""
    except (TypeError, ValueError):
        joined = b""
    if len(joined) != size * len(keys):
        joined = b"".join([digest(key) for key in keys])  # names the one that is no hash
    return ChunkHashes(joined)


def digest(key: str) -> bytes:
    """The bytes of a page hash."""
    try:
        found = bytes.fromhex(key)
        if len(key) != HASH_DIGITS or len(found) != HASH_DIGITS // 2:  # spaces are no digits
            raise ValueError
        return found
    except (TypeError, ValueError):
        raise ConfigError(f"page key {key!r:.80} is no hash of {HASH_DIGITS} hex digits, as SGLang makes it") from None
