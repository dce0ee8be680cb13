"""Which segment to evict and which of its records to relocate first. Pure policy: no I/O, no clock.

A prompt is worth something only up to its first missing page, so pages are valued by prompt, not one by one.
All pages that one request touched (hit, skipped by a save, or written) should have the *same* access time: then an
equal time across segments means "used together last time", and the chunk indices give their order. Times that
differ by segment do no harm, but links between segments are lost. For each segment and access time (a fragment,
``kvfs.eviction.usage``):

    hazard = (1 + age / 50 s) ** -1.5 x sqrt(1 + life / 50 s); age: since its last use; life, by record: from its
             writing to its last use, at most an hour, at least 150 s for relocated records. In a store that turns
             over quickly a quarter of the oldest page's age stands in place of the age's 50 s. 0 for a last use in
             the future: the clock was wrong, and an unknown time counts as older than all known ones
    loss   = hazard x bytes, summed over the fragment and all later fragments of that access time, in whatever
             segment: they become unreachable with it. A fragment behind a gap in the chunk indices is unreachable:
             loss 0.

A victim's fragments are relocated, highest loss per byte first, while the write budget lasts and only where they are
worth twice the store's average byte. The victim is the segment with the least loss left per byte freed.

Where the constants come from: a one-hour trace of 12,031 conversation requests. Its uses per page and hour, 2, 4, 8
and 16 minutes after the last use (each until the next): 1.7, 0.9, 0.4, 0.06 for pages used once, so hazard falls
faster than 1 / age; 4.6, 2.0, 0.7, 0.07 for those used twice; 8 to 16 minutes after it, 0.2 for a life of one to two
minutes, 0.7 to 1.1 for two to 17, 1.7 for 17 to 34. The exponents 1.25 to 2 and 0.33 to 1, and scales of 20 to 100 s,
were tried, and the simplest of those that did well taken; the 150 s make a relocated record count twice. Chosen and
measured on the same trace; differences under half a percent are noise. The threshold: 1.5 and 3 do as well.
``docs/decisions/0007-eviction-by-loss-of-prefixes.md`` has the figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import mul

from kvfs.eviction.usage import SCALE_US, RequestChains, Summary

#: Life that a relocated record is given at least, in microseconds: such records count twice.
RELOCATED_LIFE_US = 3 * SCALE_US
AGE_POWER = 1.5
#: A fragment is relocated if its loss per byte is at least this many times the store's average.
RELOCATE_WORTH = 2.0
#: A last use up to this much later than ``now_us`` counts as now, in microseconds: a survey may be a second old.
AHEAD_US = 1_000_000
#: Bytes that may be relocated per byte that is newly stored, both in whole blocks.
WRITE_BUDGET = 0.05
#: Most that the write budget saves up, in segments: it grows while the store fills and nothing is relocated.
BUDGET_SEGMENTS = 4


@dataclass(frozen=True)
class EvictionPlan:
    """One segment to evict, by number, and the records of it to relocate first."""

    victim: int
    relocate: tuple[int, ...]  # record ordinals, ascending
    relocate_bytes: int
    reason: str


@dataclass
class WriteBudget:
    """Bytes that may be relocated: 5 % of what was newly stored, less what was relocated already."""

    segment_bytes: int
    tokens: float = field(default=0.0)

    def stored(self, nbytes: int) -> None:
        self.tokens = min(self.tokens + WRITE_BUDGET * nbytes, float(BUDGET_SEGMENTS * self.segment_bytes))

    def relocated(self, nbytes: int) -> None:
        self.tokens -= nbytes

    @property
    def available(self) -> int:
        """For one victim: at most one segment, so that evicting it always gains space."""
        return max(0, int(min(self.tokens, self.segment_bytes)))


class Policy:
    """Ranks victims. Keeps between calls what does not depend on the time. Not thread-safe."""

    def __init__(self) -> None:
        self._chains = RequestChains()

    def choose(self, summaries: Iterable[Summary], now_us: int, budget_bytes: int) -> EvictionPlan | None:
        """The next victim, or None if no segment may be evicted. O(fragments)."""
        return next(self.ranked(summaries, now_us, budget_bytes), None)

    def ranked(self, summaries: Iterable[Summary], now_us: int, budget_bytes: int) -> Iterator[EvictionPlan]:
        """A plan for each evictable segment, the best victim first; each as if it were the only one. O(fragments)."""
        listed = list(summaries)
        self._chains.update({s.number: s.fragments for s in listed})
        losses, average = self._losses(listed, now_us)
        scored: list[tuple[bool, float, int, Summary, list[int]]] = []
        for summary in listed:
            if summary.evictable:
                lost = losses[summary.number]
                taken, spent = _worth_relocating(summary, lost, RELOCATE_WORTH * average, budget_bytes)
                left = max(0.0, sum(lost) - sum(lost[i] for i in taken))
                scored.append((summary.held, left / max(1, summary.nbytes - spent), summary.number, summary, taken))
        for held, score, number, summary, taken in sorted(scored, key=lambda x: x[:3]):
            relocate = tuple(sorted(i for fragment in taken for i in summary.fragments.ordinals_of(fragment)))
            spent = sum(summary.fragments.nbytes[i] for i in taken)
            reason = f"loss {score / average if average else 0.0:.3f} of average" + (", held" if held else "")
            yield EvictionPlan(number, relocate, spent, reason)

    def _losses(self, summaries: Sequence[Summary], now_us: int) -> tuple[dict[int, list[float]], float]:
        """(loss of each fragment, by segment and in its order; average worth of a live byte)."""
        losses: dict[int, list[float]] = {}
        worth, total_bytes = 0.0, 0
        # a store that turns over in seconds must still tell old from new
        oldest = min((s.fragments.stamps[0] for s in summaries if s.fragments.stamps), default=now_us)
        scale = max(1, min(SCALE_US, (now_us - oldest) // 4))
        for s in summaries:
            hazards = [
                (1.0 + max(0, now_us - t) / scale) ** -AGE_POWER if t <= now_us + AHEAD_US else 0.0
                for t in s.fragments.stamps
            ]
            losses[s.number] = list(map(mul, self._chains.tails[s.number], hazards))
            worth += sum(map(mul, self._chains.reached[s.number], hazards))
            total_bytes += sum(s.fragments.nbytes)
        return losses, worth / total_bytes if total_bytes else 0.0


def _worth_relocating(
    summary: Summary, losses: Sequence[float], least: float, budget_bytes: int
) -> tuple[list[int], int]:
    """(fragments worth more than ``least`` per byte, the best first, as many as the budget allows; their bytes)."""
    fragments = summary.fragments
    # The victim must free something, so the copies never fill it.
    room, spent = min(budget_bytes, summary.nbytes - 1), 0
    if room <= 0:
        return [], 0
    limits = map(mul, fragments.nbytes, repeat(least))
    good = [i for i, (loss, limit) in enumerate(zip(losses, limits, strict=True)) if loss > limit]
    # a forged record may claim no bytes
    good.sort(key=lambda i: (-losses[i] / max(1, fragments.nbytes[i]), fragments.first[i]))
    taken: list[int] = []
    for i in good:
        if spent + fragments.nbytes[i] <= room:
            taken.append(i)
            spent += fragments.nbytes[i]
    return taken, spent
