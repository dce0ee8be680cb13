"""What was used together: the pieces of prompts that segments hold, and what is lost with each. No I/O, no clock.

A piece is the records of one segment that bear one stamp. Equal stamps in several segments make a chain, the pieces of
one request in order of their chunks: a piece takes all later ones of its chain with it, and one behind a gap is worth
nothing. Fragments are columns, not objects, and chains are followed again only when their pieces have
changed: a store may hold a million.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: Of age and life.
SCALE_US = 50_000_000
#: More counts no more: nothing was seen of longer lives, and a clock that was set, or a forged record, may claim any.
LIFE_MAX_US = 3_600_000_000


@dataclass(frozen=True)
class SegmentUse:
    """What is known of one segment; all sequences by record ordinal.

    ``evictable`` is False for active and pinned segments: their records count, they are never the victim.
    ``held`` segments (some reader has them open) are the victim only when there is no other.
    """

    number: int
    nbytes: int
    stamps: Sequence[int]  # last use, us; 0 = dead: duplicate, superseded, expired, or no page
    record_bytes: Sequence[int]
    chunk_index: Sequence[int]
    lives: Sequence[int] = ()  # us from writing to the last use, 0 = used once; () = unknown
    evictable: bool = True
    held: bool = False


@dataclass(frozen=True, eq=False)
class Fragments:
    """The pieces of one segment, by stamp. Those of the records of piece i: ``ordinals[starts[i] : starts[i + 1]]``."""

    stamps: array[int]
    first: array[int]  # lowest chunk index
    last: array[int]
    weights: array[float]  # bytes, by what the records' lives make them worth
    nbytes: array[int]
    starts: array[int]
    ordinals: array[int]  # of all records, by piece and chunk

    def ordinals_of(self, piece: int) -> array[int]:
        return self.ordinals[self.starts[piece] : self.starts[piece + 1]]


@dataclass(frozen=True)
class Summary:
    """A segment as the policy needs it; its pieces are valid until the segment's stamps or records change."""

    number: int
    nbytes: int
    evictable: bool
    held: bool
    pieces: Fragments


def summarise(use: SegmentUse) -> Summary:
    pieces = group(use.stamps, use.record_bytes, use.chunk_index, use.lives)
    return Summary(use.number, use.nbytes, use.evictable, use.held, pieces)


def group(
    stamps: Sequence[int], record_bytes: Sequence[int], chunk_index: Sequence[int], lives: Sequence[int] = ()
) -> Fragments:
    """The live records of a segment by stamp; arguments as in ``SegmentUse``. O(records); cache it."""
    lives = lives or bytes(len(stamps))
    live = [i for i, stamp in enumerate(stamps) if stamp > 0]
    live.sort(key=[stamp << 32 | chunk for stamp, chunk in zip(stamps, chunk_index, strict=True)].__getitem__)
    made = Fragments(array("Q"), array("I"), array("I"), array("d"), array("Q"), array("I"), array("I", live))
    at = 0
    while at < len(live):
        first, end = live[at], at + 1
        weight, nbytes = _worth(lives[first]) * record_bytes[first], record_bytes[first]
        while end < len(live) and stamps[live[end]] == stamps[first]:
            weight += _worth(lives[live[end]]) * record_bytes[live[end]]
            nbytes += record_bytes[live[end]]
            end += 1
        made.stamps.append(stamps[first])
        made.first.append(chunk_index[first])
        made.last.append(chunk_index[live[end - 1]])
        made.weights.append(weight)
        made.nbytes.append(nbytes)
        made.starts.append(at)
        at = end
    made.starts.append(at)
    return made


def _worth(life_us: int) -> float:
    """Of a byte, against one that was used once."""
    return math.sqrt(1.0 + min(max(0, life_us), LIFE_MAX_US) / SCALE_US)


class RequestChains:
    """What is lost with each piece, kept from one look to the next. By segment number, in the order of its pieces:

    ``tails``: weight of the piece and of all later ones of its chain; 0 behind a gap.
    ``reached``: its own weight; 0 behind a gap.
    """

    def __init__(self) -> None:
        self.tails: dict[int, array[float]] = {}
        self.reached: dict[int, array[float]] = {}
        self._pieces: dict[int, Fragments] = {}
        self._where: dict[int, int | tuple[int, ...]] = {}  # the segments that a stamp is in
        self._updating = False

    def update(self, pieces: Mapping[int, Fragments]) -> None:
        """``pieces`` of all segments. O(those that are not the same as the last time)."""
        if self._updating:  # the last time an interrupt ended it
            for known in (self.tails, self.reached, self._pieces, self._where):
                known.clear()
        self._updating = True
        changed: set[int] = set()  # stamps whose chains have changed
        for number in [n for n, known in self._pieces.items() if pieces.get(n) is not known]:
            self._unlink(number, changed)
        for number, new in pieces.items():
            if number not in self._pieces:
                self._link(number, new, changed)
        for stamp in changed:
            self._follow(stamp)
        self._updating = False

    def _link(self, number: int, new: Fragments, changed: set[int]) -> None:
        self._pieces[number] = new
        self.tails[number] = self.reached[number] = new.weights  # shared, until a chain has more to say
        where = self._where
        for stamp in new.stamps:
            there = where.setdefault(stamp, number)
            if there != number:
                where[stamp] = (there, number) if isinstance(there, int) else (*there, number)
                changed.add(stamp)

    def _unlink(self, number: int, changed: set[int]) -> None:
        where = self._where
        for stamp in self._pieces.pop(number).stamps:
            there = where[stamp]
            if isinstance(there, int):
                del where[stamp]
                changed.discard(stamp)
            else:
                left = tuple(n for n in there if n != number)
                where[stamp] = left if len(left) > 1 else left[0]
                changed.add(stamp)
        del self.tails[number], self.reached[number]

    def _follow(self, stamp: int) -> None:
        there = self._where[stamp]
        chain = sorted(self._piece(n, stamp) for n in ((there,) if isinstance(there, int) else there))
        reachable, end = 0, chain[0][1]
        for first, last, _, _ in chain:
            if first > end + 1:
                break
            end = max(end, last)
            reachable += 1
        tail = 0.0
        for at in range(len(chain) - 1, -1, -1):
            _, _, number, piece = chain[at]
            own = self._pieces[number].weights[piece] if at < reachable else 0.0
            tail += own
            if self.tails[number] is self._pieces[number].weights:
                self.tails[number], self.reached[number] = self.tails[number][:], self.tails[number][:]
            self.tails[number][piece], self.reached[number][piece] = tail, own

    def _piece(self, number: int, stamp: int) -> tuple[int, int, int, int]:
        pieces = self._pieces[number]
        at = bisect_left(pieces.stamps, stamp)
        return pieces.first[at], pieces.last[at], number, at
