"""Which pages a purge means."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvfs import hashing
from kvfs.errors import ConfigError
from kvfs.format import Entry
from kvfs.identity import Described, salt_digest
from kvfs.namespace import Namespace
from kvfs.types import ExtraKeys, TokensLike


@dataclass(frozen=True)
class Selection:
    """Records of the namespaces that ``takes`` names; of these chunks only, if there are any."""

    takes: Callable[[Described], bool]
    chunks: frozenset[bytes] | None = None

    def has(self, entry: Entry) -> bool:
        return self.chunks is None or entry.chunk_hash in self.chunks


def select(
    namespace: Namespace | str | bytes | None, salt: str | None, prefix: TokensLike | None,
    chunks: Iterable[bytes] | None, extra: ExtraKeys | None,
) -> Selection:  # fmt: skip
    """The selection that the arguments of ``Store.purge`` ask for; ConfigError if they ask for none, or for all."""
    if namespace is None and salt is None:
        raise ConfigError("nothing to purge: name a namespace or a salt (to remove everything, delete the directory)")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise ConfigError(f"salt is {type(salt).__name__} or empty: pass a tenant's salt, or name a namespace instead")
    if not isinstance(namespace, (Namespace, str, bytes, type(None))) or namespace in ("", b""):
        raise ConfigError(f"namespace is {namespace!r}: pass a Namespace, a name, or a digest")
    if isinstance(namespace, bytes) and len(namespace) != hashing.HASH_BYTES:
        raise ConfigError(f"namespace digest has {len(namespace)} bytes: it has {hashing.HASH_BYTES}")
    if prefix is not None:
        if chunks is not None:
            raise ConfigError("prefix and chunks are both given: pass one")
        if not isinstance(namespace, Namespace):
            raise ConfigError("prefix needs a Namespace as store.namespace(...) gives it: tokens are hashed by it")
        chunks = namespace.chunk_hashes(prefix, extra=extra)
    elif extra is not None:
        raise ConfigError("extra belongs to a prefix: pass prefix=token_ids")
    wanted = None if chunks is None else _hashes(chunks)
    secret = None if salt is None else salt_digest(salt)

    def takes(described: Described) -> bool:
        return (secret is None or described.salt == secret) and _is_named(described, namespace)

    return Selection(takes, wanted)


def _hashes(chunks: Iterable[bytes]) -> frozenset[bytes]:
    if isinstance(chunks, (bytes, str)):
        raise ConfigError("chunks must be a sequence of chunk hashes, not one: put it into a list")
    hashes = frozenset(chunks)
    if not all(isinstance(h, bytes) and len(h) == hashing.HASH_BYTES for h in hashes):
        raise ConfigError(f"chunks must hold hashes of {hashing.HASH_BYTES} bytes each, as chunk_hashes() gives them")
    return hashes


def _is_named(described: Described, namespace: Namespace | str | bytes | None) -> bool:
    if isinstance(namespace, Namespace):
        return described.digest == namespace.identity.digest
    if isinstance(namespace, bytes):
        return described.digest == namespace
    return namespace is None or namespace in (described.name, described.digest.hex())
