"""Chunk hashes and page keys: the only place that decides how pages are named.

Chain (engine-independent; equal hash = equal whole prefix)::

    h[-1] = nothing; with a tenant's salt SHA-256("kvfs chain 1\\n" + salt)
    h[i]  = SHA-256(h[i-1] + tokens of chunk i as u32 little endian [+ extra key of chunk i])

Without a salt and extra keys these are the page hashes of SGLang (``get_hash_str``), so that its pages and those of a
caller that passes token ids have one name. A first chunk with an extra key, or whose tokens spell the beginning of a
key's text, follows the seed of the empty salt, not nothing: otherwise it could be read as a hash and the tokens of a
second chunk, or as a key.

PageKey = BLAKE2b-256(namespace digest, group name, h[i]). Content is named by SHA-256 and BLAKE2b only: the checksums
of ``kvfs.format.checksums`` (XXH3) detect faults, but not attacks.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, overload

from kvfs.errors import ConfigError
from kvfs.native import hash_chain, key_pages
from kvfs.types import ExtraKeys, TokensLike

HASH_BYTES = 32
TOKEN_BYTES = 4
_KEY = b"kvfs key 1\n"  # begins the text that is hashed of an opaque key


class ChunkHashes(Sequence[bytes]):
    """Chunk hashes of a prompt in one block of bytes: 8,192 objects would take half as long as the hashing."""

    __slots__ = ("joined",)

    def __init__(self, joined: bytes = b"") -> None:
        self.joined = joined

    def __len__(self) -> int:
        return len(self.joined) // HASH_BYTES

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> ChunkHashes: ...

    def __getitem__(self, index: int | slice) -> bytes | ChunkHashes:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1:
                return ChunkHashes(self.joined[HASH_BYTES * start : HASH_BYTES * stop])
            return ChunkHashes(b"".join([self[i] for i in range(start, stop, step)]))
        at = HASH_BYTES * (index if index >= 0 else index + len(self))
        if not 0 <= at < len(self.joined):
            raise IndexError(f"chunk {index} of {len(self)}")
        return self.joined[at : at + HASH_BYTES]

    def __iter__(self) -> Iterator[bytes]:
        joined = self.joined
        return iter([joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES)])

    def __add__(self, other: ChunkHashes) -> ChunkHashes:
        return ChunkHashes(self.joined + other.joined)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ChunkHashes):
            return self.joined == other.joined
        return list(self) == list(other) if isinstance(other, (list, tuple)) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{len(self)} chunk hashes>"


def joined(names: Sequence[bytes]) -> bytes:
    """Hashes or keys, one behind the other."""
    return names.joined if isinstance(names, ChunkHashes) else b"".join(names)


def tenant_seed(salt: str) -> bytes:
    """First parent of a chain: empty without a salt.

    Without the salt, a tenant's keys cannot be computed, and so cannot be probed.
    """
    return _seed_of(salt) if salt else b""


def _seed_of(salt: str) -> bytes:
    return hashlib.sha256(b"kvfs chain 1\n" + salt.encode("utf-8")).digest()


def chain(tokens: bytes, page_tokens: int, seed: bytes, extra: ExtraKeys | None = None) -> ChunkHashes:
    """32-byte hashes of the full chunks of ``tokens`` (u32 little endian); a tail shorter than a chunk is ignored.

    ``seed``: the parent of the first one, 32 bytes or none. ``extra``: chunk number -> bytes that also enter its hash.
    """
    step = page_tokens * TOKEN_BYTES
    if not seed and ((extra and extra.get(0)) or tokens[:step].startswith(_KEY)):
        seed = _seed_of("")
    native = hash_chain.chain(tokens, step, seed, extra)
    if native is not None:
        return ChunkHashes(native)
    sha, parent = hashlib.sha256, seed
    hashes: list[bytes] = []
    append = hashes.append
    if not extra:
        for start in range(0, len(tokens) - step + 1, step):
            parent = sha(parent + tokens[start : start + step]).digest()
            append(parent)
        return ChunkHashes(b"".join(hashes))
    for number, start in enumerate(range(0, len(tokens) - step + 1, step)):
        parent = sha(parent + tokens[start : start + step] + extra.get(number, b"")).digest()
        append(parent)
    return ChunkHashes(b"".join(hashes))


def chunk_of_key(key: bytes, seed: bytes) -> bytes:
    """Chunk hash of an engine's opaque key."""
    return hashlib.sha256(_KEY + seed + key).digest()


def chunks_of_keys(keys: Sequence[bytes], seed: bytes) -> ChunkHashes:
    """Chunk hashes of an engine's opaque keys."""
    sizes = {HASH_BYTES} if isinstance(keys, ChunkHashes) else set(map(len, keys))
    native = key_pages.chunk_hashes(_KEY + seed, joined(keys), *sizes) if len(sizes) == 1 else None
    return ChunkHashes(b"".join([chunk_of_key(key, seed) for key in keys]) if native is None else native)


def page_keys(namespace_digest: bytes, group: str) -> Callable[[bytes], bytes]:
    """PageKey of a chunk hash: BLAKE2b-256 over (namespace digest, length-prefixed group name, chunk hash)."""
    begun = hashlib.blake2b(page_prefix(namespace_digest, group), digest_size=32).copy

    def key(chunk_hash: bytes) -> bytes:
        whole = begun()  # a copy takes half the time of a new hash
        whole.update(chunk_hash)
        return whole.digest()

    return key


def page_key(namespace_digest: bytes, group: str, chunk_hash: bytes) -> bytes:
    """PageKey of one chunk hash, as ``page_keys`` makes it."""
    return hashlib.blake2b(page_prefix(namespace_digest, group) + chunk_hash, digest_size=32).digest()


def page_prefix(namespace_digest: bytes, group: str) -> bytes:
    """The bytes before the chunk hash in a PageKey."""
    name = group.encode("ascii")
    return namespace_digest + len(name).to_bytes(1, "little") + name


def token_bytes(token_ids: TokensLike) -> bytes:
    """Token ids as u32 little endian bytes.

    Accepts int sequences, 1-D integer buffers, numpy arrays and torch tensors; the last three without making Python
    objects of the ids. Raises ConfigError for text, floats, negative ids, and ids of 2**32 or more.
    """
    if isinstance(token_ids, (str, bytes, bytearray)):
        raise ConfigError(
            f"token_ids is {type(token_ids).__name__}: pass the integer ids that your tokenizer gives for it"
        )
    if isinstance(token_ids, (Mapping, Set)):
        raise ConfigError(f"token_ids is {type(token_ids).__name__}, which has no order of its own: pass a sequence")
    source = token_ids
    if type(source).__module__.partition(".")[0] == "torch" and hasattr(source, "detach"):
        source = _from_tensor(source)
    try:
        view = memoryview(source)
    except (TypeError, ValueError, BufferError):
        return _from_sequence(source)
    if view.ndim != 1:
        raise ConfigError(f"token_ids has {view.ndim} dimensions {view.shape}: pass one prompt as a 1-D sequence")
    kind = view.format.lstrip("@=<")
    if kind in ("i", "I", "l", "L", "q", "Q") and sys.byteorder == "little":
        return _from_words(view.tobytes(), kind.islower(), view.itemsize)
    return _from_sequence(source)


def _from_tensor(tensor: Any) -> Any:
    """The ids of a torch tensor as a buffer, or as a list if numpy is not imported or lacks the dtype."""
    tensor = tensor.detach().cpu()
    if "numpy" in sys.modules:
        try:
            return tensor.numpy()
        except (TypeError, RuntimeError):
            pass
    return tensor.tolist()


def _from_sequence(token_ids: Any) -> bytes:
    try:
        ids = array("I", token_ids)
    except (TypeError, OverflowError, ValueError) as exc:
        raise ConfigError(
            f"token_ids holds something that is not an integer in [0, 2**32): {exc}; pass a flat sequence of token ids"
        ) from None
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def _from_words(raw: bytes, signed: bool, size: int) -> bytes:
    """Ids of ``size`` bytes each, native and little endian."""
    if size == 8:
        words = memoryview(raw).cast("I")
        if words[1::2].tobytes() != bytes(len(raw) // 2):
            raise ConfigError("token_ids holds a value outside [0, 2**32): pass token ids of your tokenizer")
        return words[0::2].tobytes()
    if signed and raw and min(memoryview(raw).cast("i")) < 0:
        raise ConfigError(f"token_ids holds {min(memoryview(raw).cast('i'))}: ids must not be negative")
    return raw
