"""Which segment to drop and which of its records to carry forward. Pure policy: no I/O, no clock.

A prompt is worth something only up to its first missing page, so pages are valued by prompt, not one by one.
All pages that one request touched (hit, skipped by a save, or written) should carry the *same* stamp: then an
equal stamp across segments means "used together last time", and the chunk indices give their order. Stamps that
differ by segment do no harm, but links between segments are lost. For each segment and stamp (a ``Piece``):

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

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

#: Of age and life.
SCALE_US = 50_000_000
#: More counts no more: nothing was seen of longer lives, and a clock that was set, or a forged record, may claim any.
LIFE_MAX_US = 3_600_000_000
#: The least life of carried records: they count twice at least.
CARRIED_LIFE_US = 3 * SCALE_US
AGE_POWER = 1.5
CARRY_WORTH = 2.0
WRITE_BUDGET = 0.05
#: Savings of the write budget, in segments: it grows while the store fills, when nothing is carried.
BUDGET_SEGMENTS = 4


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


@dataclass(frozen=True)
class Piece:
    """The records of one segment that bear one stamp."""

    stamp: int
    first: int  # lowest chunk index
    last: int
    weight: float  # bytes, by what the records' lives make them worth
    nbytes: int
    ordinals: tuple[int, ...]  # by chunk index


@dataclass(frozen=True)
class Summary:
    """A segment as ``choose`` needs it; valid until the segment's stamps or records change."""

    number: int
    nbytes: int
    evictable: bool
    held: bool
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Plan:
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


def summarise(segment: SegmentUse) -> Summary:
    """Group the live records by stamp. O(records); cache it."""
    lives = segment.lives or [0] * len(segment.stamps)
    by_stamp: dict[int, list[int]] = {}
    for ordinal, stamp in enumerate(segment.stamps):
        if stamp > 0:
            by_stamp.setdefault(stamp, []).append(ordinal)
    pieces = []
    for stamp, ordinals in by_stamp.items():
        ordinals.sort(key=segment.chunk_index.__getitem__)
        pieces.append(
            Piece(
                stamp,
                segment.chunk_index[ordinals[0]],
                segment.chunk_index[ordinals[-1]],
                sum(_worth(lives[i]) * segment.record_bytes[i] for i in ordinals),
                sum(segment.record_bytes[i] for i in ordinals),
                tuple(ordinals),
            )
        )
    return Summary(segment.number, segment.nbytes, segment.evictable, segment.held, tuple(pieces))


def choose(summaries: Iterable[Summary], now_us: int, budget_bytes: int) -> Plan | None:
    """The next victim, or None if nothing may be dropped. O(pieces)."""
    return next(ranked(summaries, now_us, budget_bytes), None)


def ranked(summaries: Iterable[Summary], now_us: int, budget_bytes: int) -> Iterator[Plan]:
    """What may be dropped, the best victim first; each plan as if it were the only one. O(pieces) for all."""
    listed = list(summaries)
    losses, average = _losses(listed, now_us)
    scored: list[tuple[bool, float, int, Summary, list[Piece], int]] = []
    for summary in listed:
        if not summary.evictable:
            continue
        pieces = sorted(
            ((losses[summary.number, p.stamp], p) for p in summary.pieces),
            key=lambda x: (-x[0] / max(1, x[1].nbytes), x[1].first, x[1].stamp),  # a forged record may claim no bytes
        )
        left, spent = 0.0, 0
        taken: list[Piece] = []
        # The victim must free something, so a carry never fills it.
        room = min(budget_bytes, summary.nbytes - 1)
        for loss, piece in pieces:
            if spent + piece.nbytes <= room and loss > CARRY_WORTH * average * piece.nbytes:
                taken.append(piece)
                spent += piece.nbytes
            else:
                left += loss
        score = left / max(1, summary.nbytes - spent)
        scored.append((summary.held, score, summary.number, summary, taken, spent))
    for held, score, number, _, taken, spent in sorted(scored, key=lambda x: x[:3]):
        carry = tuple(sorted(i for piece in taken for i in piece.ordinals))
        reason = f"loss {score / average if average else 0.0:.3f} of average" + (", held" if held else "")
        yield Plan(number, carry, spent, reason)


def _worth(life_us: int) -> float:
    """Of a byte, against one that was used once."""
    return math.sqrt(1.0 + min(max(0, life_us), LIFE_MAX_US) / SCALE_US)


def plan(segments: Iterable[SegmentUse], now_us: int, budget_bytes: int = 0) -> Plan | None:
    """``choose`` without a cache of summaries."""
    return choose(map(summarise, segments), now_us, budget_bytes)


def _losses(summaries: Sequence[Summary], now_us: int) -> tuple[dict[tuple[int, int], float], float]:
    """(loss of each piece by (segment, stamp), average worth of a live byte)."""
    by_stamp: dict[int, list[tuple[int, int, int, float]]] = {}
    total_bytes = 0
    for s in summaries:
        for p in s.pieces:
            by_stamp.setdefault(p.stamp, []).append((p.first, p.last, s.number, p.weight))
            total_bytes += p.nbytes
    losses: dict[tuple[int, int], float] = {}
    worth = 0.0
    # a store that turns over in seconds must still tell old from new
    scale = max(1, min(SCALE_US, (now_us - min(by_stamp, default=now_us)) // 4))
    for stamp, chain in by_stamp.items():
        hazard = (1.0 + max(0, now_us - stamp) / scale) ** -AGE_POWER
        chain.sort()
        reachable, end = 0, chain[0][1]
        for first, last, _, _ in chain:
            if first > end + 1:
                break
            end = max(end, last)
            reachable += 1
        tail = 0.0
        for _, _, number, weight in reversed(chain[:reachable]):
            tail += weight * hazard
            losses[number, stamp] = tail
        for _, _, number, _ in chain[reachable:]:
            losses[number, stamp] = 0.0
        worth += tail
    return losses, worth / total_bytes if total_bytes else 0.0
