"""The chains of the last prompts, so that a prompt that comes again, or grows, is not hashed again.

A request is hashed when it is looked up, and once more when what was computed for it is saved; the next turn of a
conversation begins with all of the last one. Comparing tokens takes a fiftieth of the time.
"""

from __future__ import annotations

from typing import NamedTuple

from kvfs.hashing import TOKEN_BYTES, chain

PROMPTS = 64
BYTES_MAX = 4 << 20  # of their tokens, together


class _Known(NamedTuple):
    tokens: bytes  # whole chunks, as the chain takes them
    hashes: list[bytes]


class Chains:
    """The last chains of one namespace, without extra keys. Thread-safe: what is remembered is replaced as a whole."""

    def __init__(self, page_tokens: int, seed: bytes) -> None:
        self._step, self._page_tokens, self._seed = page_tokens * TOKEN_BYTES, page_tokens, seed
        self._known: tuple[_Known, ...] = ()  # the last one first

    def hashes(self, tokens: bytes) -> list[bytes]:
        """``hashing.chain`` of ``tokens``, as a list of the caller's own."""
        end = len(tokens) // self._step * self._step
        best, common = _Known(b"", []), 0
        for one in self._known:
            same = self._common(one.tokens, tokens, common, end)
            if same > common:
                best, common = one, same
        hashes = best.hashes[: common // self._step]
        if common < end:
            hashes += chain(tokens[common:end], self._page_tokens, hashes[-1] if hashes else self._seed)
            self._remember(_Known(tokens[:end], hashes), best if common == len(best.tokens) else None)
            return hashes.copy()
        if common:
            self._remember(best, best)
        return hashes

    def _common(self, known: bytes, tokens: bytes, common: int, end: int) -> int:
        """Bytes of the chunks that both begin with, if they are more than ``common``, else 0; at most ``end``."""
        step = self._step
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

    def _remember(self, new: _Known, instead_of: _Known | None) -> None:
        """``instead_of``: what it begins with, or is."""
        if len(new.tokens) > BYTES_MAX:
            return
        kept, room = list[_Known](), BYTES_MAX
        for one in (new, *(one for one in self._known if one is not instead_of)):
            room -= len(one.tokens)
            if room < 0 or len(kept) == PROMPTS:
                break
            kept.append(one)
        self._known = tuple(kept)
