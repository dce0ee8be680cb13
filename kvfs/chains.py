"""The chains of the last prompts, so that a prompt that comes again, or grows, is not hashed again.

A request is hashed when it is looked up, and once more when what was computed for it is saved; the next turn of a
conversation begins with all of the last one. Comparing tokens takes a fiftieth of the time.
"""

from __future__ import annotations

from typing import NamedTuple

from kvfs.hashing import TOKEN_BYTES, chain

PROMPTS = 128  # of all namespaces together: looking through them takes 20 microseconds
BYTES_MAX = 16 << 20  # of their tokens and hashes
HASH_COST = 80  # of a bytes object with a hash, and its place in a list


class _Known(NamedTuple):
    seed: bytes
    step: int
    tokens: bytes  # whole chunks, as the chain takes them
    hashes: list[bytes]


class Chains:
    """The last chains of an open store, without extra keys. Thread-safe: what is remembered is replaced as a whole."""

    def __init__(self) -> None:
        self._known: tuple[_Known, ...] = ()  # the last one first

    def hashes(self, tokens: bytes, page_tokens: int, seed: bytes) -> list[bytes]:
        """``hashing.chain`` of these, as a list of the caller's own."""
        step = page_tokens * TOKEN_BYTES
        end = len(tokens) // step * step
        best, common = _Known(seed, step, b"", []), 0
        for one in self._known:
            same = _common(one.tokens, tokens, step, common, end) if one[:2] == (seed, step) else 0
            if same > common:
                best, common = one, same
        hashes = best.hashes[: common // step]
        if common < end:
            hashes += chain(tokens[common:end], page_tokens, hashes[-1] if hashes else seed)
            self._remember(_Known(seed, step, tokens[:end], hashes), best if common == len(best.tokens) else None)
            return hashes.copy()
        if common:
            self._remember(best, best)
        return hashes

    def forget(self) -> None:
        """For whoever measures what it is to hash a prompt."""
        self._known = ()

    def _remember(self, new: _Known, instead_of: _Known | None) -> None:
        """``instead_of``: what it begins with, or is."""
        if _cost(new) > BYTES_MAX:
            return
        kept, room = list[_Known](), BYTES_MAX
        for one in (new, *(one for one in self._known if one is not instead_of)):
            room -= _cost(one)
            if room < 0 or len(kept) == PROMPTS:
                break
            kept.append(one)
        self._known = tuple(kept)


def _cost(one: _Known) -> int:
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
