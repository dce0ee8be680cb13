"""What a load restored: tokens, and the tiers that held them."""

from __future__ import annotations

from collections.abc import Mapping

from kvfs.lookup.prefix_match import PrefixMatch
from kvfs.pages.chunk_set import span
from kvfs.transfer.control import Outcomes
from kvfs.types import PageOutcome, Tier


class TierAccounting:
    """The tier that each page of a load was read from: sets of chunks, as bits, by group number and tier."""

    def __init__(self) -> None:
        self._tiers: dict[int, dict[Tier, int]] = {}

    def note(self, group: int, chunks: int, tier: Tier) -> None:
        """``chunks`` came from ``tier``; replaces what was noted of them before."""
        tiers = self._tiers.setdefault(group, {})
        for other in tiers:
            tiers[other] &= ~chunks
        tiers[tier] = tiers.get(tier, 0) | chunks

    def slowest(self, good: Mapping[int, int]) -> dict[Tier, int]:
        """Tier -> the chunks whose slowest page came from it; pages in ``good`` (chunks as bits, by group) count."""
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
    match: PrefixMatch, names: Mapping[int, str], done: Outcomes, tiers: TierAccounting, first_token: int
) -> tuple[int, dict[Tier, int]]:
    """Tokens restored by a load, and how many by tier. ``names``: of the groups that it loaded, by number."""
    good = {g.name: span(g.first, g.count) for g in match.groups}
    for outcome, groups in done.items():
        if outcome is not PageOutcome.LOADED:
            for group, bits in groups.items():
                good[names[group]] &= ~bits
    chunks, size = match.restorable(good), match.page_tokens
    slowest = tiers.slowest(done.get(PageOutcome.LOADED, {}))
    counts = {tier: (bits & span(0, chunks)).bit_count() * size for tier, bits in slowest.items()}
    edge, kept = divmod(first_token, size)  # the tokens before ``first_token`` did not move
    if edge < chunks:
        for tier, bits in slowest.items():
            counts[tier] -= kept * (bits >> edge & 1)
    counts[Tier.DEVICE] = chunks * size - sum(counts.values())
    return chunks * size, {tier: tokens for tier, tokens in sorted(counts.items()) if tokens}
