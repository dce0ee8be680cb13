"""The chunk hashes of recent prompts, so that a prompt that is repeated, or grows, is not hashed again.

A request is hashed when it is looked up, and again when its new pages are saved; the next turn of a conversation
begins with all of the previous one. Comparing tokens takes a fiftieth of the time of hashing them.
"""

from __future__ import annotations

from typing import NamedTuple

from kvfs.pages.chunk_hash import HASH_BYTES, TOKEN_BYTES, ChunkHashes, chain
from kvfs.types import ExtraKeys

PROMPTS = 128  # in all namespaces together: searching them takes 20 us
BYTES_MAX = 16 << 20  # memory of their tokens and hashes
HASH_COST = HASH_BYTES  # bytes of one hash


class _KnownPrompt(NamedTuple):
    seed: bytes
    step: int
    tokens: bytes  # u32 little endian, whole chunks
    hashes: ChunkHashes


class ChunkHashCache:
    """The recent prompts of an open store, without extra keys, and their hashes.

    Thread-safe: the tuple of prompts is replaced as a whole. Searched and filled by ``Chain``.
    """

    def __init__(self) -> None:
        self._known: tuple[_KnownPrompt, ...] = ()  # the most recent one first

    def _longest(self, tokens: bytes, step: int, seed: bytes) -> tuple[_KnownPrompt, int]:
        """The prompt that shares the longest prefix with ``tokens``, and its bytes; whole chunks of ``step`` bytes."""
        best, common = _KnownPrompt(seed, step, b"", ChunkHashes()), 0
        for one in self._known:
            same = _common(one.tokens, tokens, step, common, len(tokens)) if one[:2] == (seed, step) else 0
            if same > common:
                best, common = one, same
        return best, common

    def forget(self) -> None:
        """Forget all prompts, for benchmarks of hashing."""
        self._known = ()

    def _remember(self, new: _KnownPrompt, replaced: _KnownPrompt | None) -> None:
        """Add ``new`` as the most recent prompt; ``replaced``: the one that it begins with, or equals."""
        if _cost(new) > BYTES_MAX:
            return
        kept, room = list[_KnownPrompt](), BYTES_MAX
        for one in (new, *(one for one in self._known if one is not replaced)):
            room -= _cost(one)
            if room < 0 or len(kept) == PROMPTS:
                break
            kept.append(one)
        self._known = tuple(kept)


class Chain:
    """The chunk hashes of one prompt, computed on demand. Used by one thread.

    Owns ``hashes``, the leading chunks so far. Starts from what ``known`` has of the prompt, and adds to it.
    """

    def __init__(
        self, known: ChunkHashCache, tokens: bytes, page_tokens: int, seed: bytes, extra: ExtraKeys | None = None
    ) -> None:
        self._chains, self._page_tokens, self._seed = known, page_tokens, seed
        self._extra = dict(extra or {})  # a copy: the caller may change the original before it is used
        self._step = page_tokens * TOKEN_BYTES
        self.chunks = len(tokens) // self._step  # of the whole prompt
        self._tokens = tokens[: self.chunks * self._step]
        self._begins_with, self._common = _KnownPrompt(seed, self._step, b"", ChunkHashes()), 0
        if not extra:
            self._begins_with, self._common = known._longest(self._tokens, self._step, seed)
        self.hashes = self._begins_with.hashes[: self._common // self._step]

    def grow(self, chunks: int) -> None:
        """Compute ``hashes`` of the first ``chunks`` chunks."""
        have = len(self.hashes)
        if chunks > have:
            extra = {c - have: key for c, key in self._extra.items() if c >= have}
            tokens = self._tokens[have * self._step : chunks * self._step]
            self.hashes = self.hashes + chain(tokens, self._page_tokens, self.hashes[-1] if have else self._seed, extra)

    def all(self) -> ChunkHashes:
        """Hash the rest and remember it; all hashes."""
        self.grow(self.chunks)
        self.remember()
        return self.hashes

    def remember(self) -> None:
        """Keep what was hashed for prompts that begin with it."""
        end, begun = len(self.hashes) * self._step, self._begins_with
        if self._extra or not end:
            return
        if end == self._common:
            self._chains._remember(begun, begun)
        else:
            new = _KnownPrompt(self._seed, self._step, self._tokens[:end], self.hashes)
            self._chains._remember(new, begun if self._common == len(begun.tokens) else None)


def _cost(one: _KnownPrompt) -> int:
    return len(one.tokens) + HASH_COST * len(one.hashes)


def _common(known: bytes, tokens: bytes, step: int, common: int, end: int) -> int:
    """Bytes of the whole chunks that both begin with, if more than ``common``, else 0; at most ``end``."""
    low, high = common + step, min(len(known), end)
    if high < low or known[common:low] != tokens[common:low] or known[:common] != tokens[:common]:
        return 0
    if known[low:high] == tokens[low:high]:
        return high
    while high - low > step:  # the first difference is between them
        middle = low + (high - low) // (2 * step) * step
        if known[low:middle] == tokens[low:middle]:
            low = middle
        else:
            high = middle
    return low
