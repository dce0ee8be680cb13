"""What a load restored: tokens, and the tiers that they came from."""

from __future__ import annotations

from collections.abc import Mapping

from kvfs.lookup.prefix_match import PrefixMatch
from kvfs.pages.chunk_set import span
from kvfs.transfer.control import Outcomes
from kvfs.types import PageOutcome, Tier


class TierAccounting:
    """The tier of each page of a load when it was read: sets of chunks, as bits, by group number and tier."""

    def __init__(self) -> None:
        self._tiers: dict[int, dict[Tier, int]] = {}

    def note(self, group: int, chunks: int, tier: Tier) -> None:
        """``chunks`` came from ``tier``; what was noted of them before is forgotten."""
        tiers = self._tiers.setdefault(group, {})
        for other in tiers:
            tiers[other] &= ~chunks
        tiers[tier] = tiers.get(tier, 0) | chunks

    def slowest(self, good: Mapping[int, int]) -> dict[Tier, int]:
        """Tier -> the chunks, of those in ``good`` by group, of which it is the slowest that a page came from."""
        slowest: dict[Tier, int] = {}
        taken = 0
        for tier in sorted(Tier, reverse=True):
            chunks = 0
            for group, tiers in self._tiers.items():
                chunks |= tiers.get(tier, 0) & good.get(group, 0)
            slowest[tier] = chunks & ~taken
            taken |= chunks
        return slowest


def restored(
    match: PrefixMatch, names: Mapping[int, str], done: Outcomes, came_from: TierAccounting, first_token: int
) -> tuple[int, dict[Tier, int]]:
    """Tokens restored by a load, and from where. ``names``: of the groups that it moved pages of, by number."""
    good = {g.name: span(g.first, g.count) for g in match.groups}
    for outcome, groups in done.items():
        if outcome is not PageOutcome.LOADED:
            for group, bits in groups.items():
                good[names[group]] &= ~bits
    chunks, size = match.restorable(good), match.page_tokens
    slowest = came_from.slowest(done.get(PageOutcome.LOADED, {}))
    counts = {tier: (bits & span(0, chunks)).bit_count() * size for tier, bits in slowest.items()}
    edge, kept = divmod(first_token, size)  # the tokens before ``first_token`` did not move
    if edge < chunks:
        for tier, bits in slowest.items():
            counts[tier] -= kept * (bits >> edge & 1)
    counts[Tier.DEVICE] = chunks * size - sum(counts.values())
    return chunks * size, {tier: tokens for tier, tokens in sorted(counts.items()) if tokens}
