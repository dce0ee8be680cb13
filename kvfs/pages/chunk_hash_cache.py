"""The chains of the last prompts, so that a prompt that comes again, or grows, is not hashed again.

A request is hashed when it is looked up, and once more when what was computed for it is saved; the next turn of a
conversation begins with all of the last one. Comparing tokens takes a fiftieth of the time.
"""

from __future__ import annotations

from typing import NamedTuple

from kvfs.pages.chunk_hash import HASH_BYTES, TOKEN_BYTES, ChunkHashes, chain
from kvfs.types import ExtraKeys

PROMPTS = 128  # of all namespaces together: looking through them takes 20 microseconds
BYTES_MAX = 16 << 20  # of their tokens and hashes
HASH_COST = HASH_BYTES  # of a hash, in bytes


class _KnownPrompt(NamedTuple):
    seed: bytes
    step: int
    tokens: bytes  # whole chunks, as the chain takes them
    hashes: ChunkHashes


class ChunkHashCache:
    """The last chains of an open store, without extra keys. Thread-safe: what is remembered is replaced as a whole."""

    def __init__(self) -> None:
        self._known: tuple[_KnownPrompt, ...] = ()  # the last one first

    def _longest(self, tokens: bytes, step: int, seed: bytes) -> tuple[_KnownPrompt, int]:
        """What begins as these do for longest, and for how many bytes; whole chunks of ``step`` bytes."""
        best, common = _KnownPrompt(seed, step, b"", ChunkHashes()), 0
        for one in self._known:
            same = _common(one.tokens, tokens, step, common, len(tokens)) if one[:2] == (seed, step) else 0
            if same > common:
                best, common = one, same
        return best, common

    def forget(self) -> None:
        """For whoever measures what it is to hash a prompt."""
        self._known = ()

    def _remember(self, new: _KnownPrompt, instead_of: _KnownPrompt | None) -> None:
        """``instead_of``: what it begins with, or is."""
        if _cost(new) > BYTES_MAX:
            return
        kept, room = list[_KnownPrompt](), BYTES_MAX
        for one in (new, *(one for one in self._known if one is not instead_of)):
            room -= _cost(one)
            if room < 0 or len(kept) == PROMPTS:
                break
            kept.append(one)
        self._known = tuple(kept)


class Chain:
    """The chunk hashes of one prompt, as far as they were asked for. Of one thread."""

    def __init__(
        self, known: ChunkHashCache, tokens: bytes, page_tokens: int, seed: bytes, extra: ExtraKeys | None = None
    ) -> None:
        self._chains, self._page_tokens, self._seed = known, page_tokens, seed
        self._extra = dict(extra or {})  # the caller may change his before it is used
        self._step = page_tokens * TOKEN_BYTES
        self.chunks = len(tokens) // self._step  # of the whole prompt
        self._tokens = tokens[: self.chunks * self._step]
        self._begins_with, self._common = _KnownPrompt(seed, self._step, b"", ChunkHashes()), 0
        if not extra:
            self._begins_with, self._common = known._longest(self._tokens, self._step, seed)
        self.hashes = self._begins_with.hashes[: self._common // self._step]

    def grow(self, chunks: int) -> None:
        """Hash the first ``chunks`` chunks at least."""
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
        """What was hashed, for prompts that begin with it."""
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
    """Bytes of the chunks that both begin with, if they are more than ``common``, else 0; at most ``end``."""
    low, high = common + step, min(len(known), end)
    if high < low or known[common:low] != tokens[common:low] or known[:common] != tokens[:common]:
        return 0
    if known[low:high] == tokens[low:high]:
        return high
    while high - low > step:  # the first difference lies between them
        middle = low + (high - low) // (2 * step) * step
        if known[low:middle] == tokens[low:middle]:
            low = middle
        else:
            high = middle
    return low
