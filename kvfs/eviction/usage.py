"""What was used together: the fragments of prompts that segments hold, and what is lost with each. No I/O, no clock.

A fragment is the records of one segment that have one access time. Fragments with equal access times in several
segments form a request chain, in the order of their chunks. A fragment takes all later ones of its chain with it, and
a fragment behind a gap is worth nothing. A store may hold a million fragments, so they are columns, not objects, and
only chains whose fragments have changed are followed again.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: Scale of ages and lives, in microseconds (``kvfs.eviction.policy`` says where it comes from).
SCALE_US = 50_000_000
#: Longest life that counts, in microseconds. Longer ones were not observed, and a clock that was set or a forged
#: record may claim any.
LIFE_MAX_US = 3_600_000_000


@dataclass(frozen=True, eq=False)
class Fragments:
    """The fragments of one segment, by access time. Fragment i has records ``ordinals[starts[i] : starts[i + 1]]``."""

    stamps: array[int]  # access times, us, ascending
    first: array[int]  # lowest chunk index
    last: array[int]
    weights: array[float]  # bytes, weighted by the lives of the records
    nbytes: array[int]
    starts: array[int]
    ordinals: array[int]  # of all records, by fragment and chunk

    def ordinals_of(self, fragment: int) -> array[int]:
        return self.ordinals[self.starts[fragment] : self.starts[fragment + 1]]


@dataclass(frozen=True)
class Summary:
    """A segment as the policy needs it; its fragments are valid until the segment's access times or records change.

    ``evictable`` is False for active and pinned segments: their records count, they are never the victim.
    ``held`` segments (a reader has them open) are the victim only when there is no other.
    """

    number: int
    nbytes: int
    evictable: bool
    held: bool
    fragments: Fragments


def group(
    stamps: Sequence[int], record_bytes: Sequence[int], chunk_index: Sequence[int], lives: Sequence[int]
) -> Fragments:
    """The live records of a segment by access time. All sequences by record ordinal. O(records); cache it.

    ``stamps``: last use, us; 0 = dead: duplicate, superseded, expired, or no page. ``lives``: us from writing to the
    last use; 0 = used once.
    """
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
    """Of a byte, relative to a byte that was used once."""
    return math.sqrt(1.0 + min(max(0, life_us), LIFE_MAX_US) / SCALE_US)


class RequestChains:
    """What is lost with each fragment, kept between calls. By segment number, in the order of the fragments:

    ``tails``: weight of the fragment and of all later ones of its chain; 0 behind a gap.
    ``reached``: its own weight; 0 behind a gap.
    """

    def __init__(self) -> None:
        self.tails: dict[int, array[float]] = {}
        self.reached: dict[int, array[float]] = {}
        self._fragments: dict[int, Fragments] = {}
        self._where: dict[int, int | tuple[int, ...]] = {}  # access time -> segments that have records of it
        self._updating = False

    def update(self, fragments: Mapping[int, Fragments]) -> None:
        """``fragments`` of all segments. O(those that differ from the last call)."""
        if self._updating:  # an interrupt ended the last call
            for known in (self.tails, self.reached, self._fragments, self._where):
                known.clear()
        self._updating = True
        changed: set[int] = set()  # access times whose chains have changed
        for number in [n for n, known in self._fragments.items() if fragments.get(n) is not known]:
            self._unlink(number, changed)
        for number, new in fragments.items():
            if number not in self._fragments:
                self._link(number, new, changed)
        for stamp in changed:
            self._follow(stamp)
        self._updating = False

    def _link(self, number: int, new: Fragments, changed: set[int]) -> None:
        self._fragments[number] = new
        self.tails[number] = self.reached[number] = new.weights  # shared until a chain changes them
        where = self._where
        for stamp in new.stamps:
            there = where.setdefault(stamp, number)
            if there != number:
                where[stamp] = (there, number) if isinstance(there, int) else (*there, number)
                changed.add(stamp)

    def _unlink(self, number: int, changed: set[int]) -> None:
        where = self._where
        for stamp in self._fragments.pop(number).stamps:
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
        chain = sorted(self._fragment(n, stamp) for n in ((there,) if isinstance(there, int) else there))
        reachable, end = 0, chain[0][1]
        for first, last, _, _ in chain:
            if first > end + 1:
                break
            end = max(end, last)
            reachable += 1
        tail = 0.0
        for at in range(len(chain) - 1, -1, -1):
            _, _, number, fragment = chain[at]
            own = self._fragments[number].weights[fragment] if at < reachable else 0.0
            tail += own
            if self.tails[number] is self._fragments[number].weights:
                self.tails[number], self.reached[number] = self.tails[number][:], self.tails[number][:]
            self.tails[number][fragment], self.reached[number][fragment] = tail, own

    def _fragment(self, number: int, stamp: int) -> tuple[int, int, int, int]:
        fragments = self._fragments[number]
        at = bisect_left(fragments.stamps, stamp)
        return fragments.first[at], fragments.last[at], number, at
