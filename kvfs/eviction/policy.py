"""Which segment to drop and which of its records to carry forward. Pure policy: no I/O, no clock.

A prompt is worth something only up to its first missing page, so pages are valued by prompt, not one by one.
All pages that one request touched (hit, skipped by a save, or written) should carry the *same* stamp: then an
equal stamp across segments means "used together last time", and the chunk indices give their order. Stamps that
differ by segment do no harm, but links between segments are lost. For each segment and
stamp (a piece, ``kvfs.eviction.usage``):

    hazard = (1 + age / 50 s) ** -1.5 x sqrt(1 + life / 50 s); age: since its last use; life, by record: from its
             writing to its last use, at most an hour, at least 150 s for carried records. In a store that turns
             over quickly a quarter of the oldest page's age stands in place of the age's 50 s
    loss   = hazard x bytes, summed over the piece and all later pieces of that stamp, in whatever segment: they
             become unreachable with it. A piece behind a gap in the chunk indices is unreachable: loss 0.

A victim's pieces are carried, highest loss per byte first, while the write budget lasts and only where they are
worth twice the store's average byte. The victim is the segment with the least loss left per byte freed.

Where the constants come from: a one-hour trace of 12,031 conversation requests. Its uses per page and hour, 2, 4, 8
and 16 minutes after the last use (each until the next): 1.7, 0.9, 0.4, 0.06 for pages used once, so hazard falls
faster than 1 / age; 4.6, 2.0, 0.7, 0.07 for those used twice; 8 to 16 minutes after it, 0.2 for a life of one to two
minutes, 0.7 to 1.1 for two to 17, 1.7 for 17 to 34. The exponents 1.25 to 2 and 0.33 to 1, and scales of 20 to 100 s,
were tried, and the simplest of those that did well taken; the 150 s make a carried record count twice. Chosen and
measured on the same trace; differences under half a percent are noise. The threshold: 1.5 and 3 do as well.
``docs/decisions/0007-eviction-by-loss-of-prefixes.md`` has the figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import mul

from kvfs.eviction.usage import SCALE_US, RequestChains, SegmentUse, Summary, summarise

#: The least life of carried records: they count twice at least.
CARRIED_LIFE_US = 3 * SCALE_US
AGE_POWER = 1.5
CARRY_WORTH = 2.0
WRITE_BUDGET = 0.05
#: Savings of the write budget, in segments: it grows while the store fills, when nothing is carried.
BUDGET_SEGMENTS = 4


@dataclass(frozen=True)
class EvictionPlan:
    victim: int
    carry: tuple[int, ...]  # record ordinals, ascending
    carry_bytes: int
    reason: str


@dataclass
class WriteBudget:
    """Bytes that may be carried: 5 % of what was newly stored, less what was carried already."""

    segment_bytes: int
    tokens: float = field(default=0.0)

    def stored(self, nbytes: int) -> None:
        self.tokens = min(self.tokens + WRITE_BUDGET * nbytes, float(BUDGET_SEGMENTS * self.segment_bytes))

    def carried(self, nbytes: int) -> None:
        self.tokens -= nbytes

    @property
    def available(self) -> int:
        """For one victim: at most one segment, so that dropping it always gains space."""
        return max(0, int(min(self.tokens, self.segment_bytes)))


class Policy:
    """Chooses victims, and keeps between choices what does not depend on the time. Not thread-safe."""

    def __init__(self) -> None:
        self._chains = RequestChains()

    def choose(self, summaries: Iterable[Summary], now_us: int, budget_bytes: int) -> EvictionPlan | None:
        """The next victim, or None if nothing may be dropped. O(pieces)."""
        return next(self.ranked(summaries, now_us, budget_bytes), None)

    def ranked(self, summaries: Iterable[Summary], now_us: int, budget_bytes: int) -> Iterator[EvictionPlan]:
        """What may be dropped, the best victim first; each plan as if it were the only one. O(pieces) for all."""
        listed = list(summaries)
        self._chains.update({s.number: s.pieces for s in listed})
        losses, average = self._losses(listed, now_us)
        scored: list[tuple[bool, float, int, Summary, list[int]]] = []
        for summary in listed:
            if summary.evictable:
                lost = losses[summary.number]
                taken, spent = _worth_carrying(summary, lost, CARRY_WORTH * average, budget_bytes)
                left = max(0.0, sum(lost) - sum(lost[i] for i in taken))
                scored.append((summary.held, left / max(1, summary.nbytes - spent), summary.number, summary, taken))
        for held, score, number, summary, taken in sorted(scored, key=lambda x: x[:3]):
            carry = tuple(sorted(i for piece in taken for i in summary.pieces.ordinals_of(piece)))
            spent = sum(summary.pieces.nbytes[i] for i in taken)
            reason = f"loss {score / average if average else 0.0:.3f} of average" + (", held" if held else "")
            yield EvictionPlan(number, carry, spent, reason)

    def _losses(self, summaries: Sequence[Summary], now_us: int) -> tuple[dict[int, list[float]], float]:
        """(loss of each piece, by segment and in its order; average worth of a live byte)."""
        losses: dict[int, list[float]] = {}
        worth, total_bytes = 0.0, 0
        # a store that turns over in seconds must still tell old from new
        oldest = min((s.pieces.stamps[0] for s in summaries if s.pieces.stamps), default=now_us)
        scale = max(1, min(SCALE_US, (now_us - oldest) // 4))
        for s in summaries:
            hazards = [(1.0 + (now_us - t) / scale) ** -AGE_POWER if t < now_us else 1.0 for t in s.pieces.stamps]
            losses[s.number] = list(map(mul, self._chains.tails[s.number], hazards))
            worth += sum(map(mul, self._chains.reached[s.number], hazards))
            total_bytes += sum(s.pieces.nbytes)
        return losses, worth / total_bytes if total_bytes else 0.0


def _worth_carrying(
    summary: Summary, losses: Sequence[float], least: float, budget_bytes: int
) -> tuple[list[int], int]:
    """(pieces that are worth more than ``least`` per byte, the best first, as many as may be carried; their bytes)."""
    pieces = summary.pieces
    # The victim must free something, so a carry never fills it.
    room, spent = min(budget_bytes, summary.nbytes - 1), 0
    if room <= 0:
        return [], 0
    limits = map(mul, pieces.nbytes, repeat(least))
    good = [i for i, (loss, limit) in enumerate(zip(losses, limits, strict=True)) if loss > limit]
    good.sort(
        key=lambda i: (-losses[i] / max(1, pieces.nbytes[i]), pieces.first[i])
    )  # a forged record may claim no bytes
    taken: list[int] = []
    for i in good:
        if spent + pieces.nbytes[i] <= room:
            taken.append(i)
            spent += pieces.nbytes[i]
    return taken, spent


def choose(summaries: Iterable[Summary], now_us: int, budget_bytes: int) -> EvictionPlan | None:
    """A single choice, with nothing kept."""
    return Policy().choose(summaries, now_us, budget_bytes)


def plan(segments: Iterable[SegmentUse], now_us: int, budget_bytes: int = 0) -> EvictionPlan | None:
    """``choose`` without a cache of summaries."""
    return choose(map(summarise, segments), now_us, budget_bytes)
