"""What a load restored: how many tokens, and from which tier."""

from __future__ import annotations

from typing import Any

import pytest

from kvfs.lookup.prefix_match import GroupMatch, PrefixMatch
from kvfs.pages.layout import Part
from kvfs.transfer.outcome import TierAccounting, restored
from kvfs.types import PageOutcome, Tier

SIZE = 16
NAMES = {0: "full", 2: "window"}
LOADED, SKIPPED, UNREADABLE = PageOutcome.LOADED, PageOutcome.SKIPPED, PageOutcome.UNREADABLE
HOST, DISK, DEVICE, REMOTE = Tier.HOST, Tier.DISK, Tier.DEVICE, Tier.REMOTE


def tiers(*noted: tuple[int, int, Tier]) -> TierAccounting:
    made = TierAccounting()
    for one in noted:
        made.note(*one)
    return made


def slowest(made: TierAccounting, good: dict[int, int]) -> dict[Tier, int]:
    return {tier: chunks for tier, chunks in made.slowest(good).items() if chunks}


def test_a_chunk_is_of_the_tier_of_its_slowest_page() -> None:
    made = tiers((0, 0b1111, HOST), (2, 0b0110, DISK), (0, 0b1000, REMOTE), (2, 0b1000, HOST))
    every = {0: 0b1111, 2: 0b1111}
    assert slowest(made, every) == {HOST: 0b0001, DISK: 0b0110, REMOTE: 0b1000}
    assert list(made.slowest(every)) == sorted(Tier, reverse=True)


def test_what_was_noted_last_of_a_chunk_counts() -> None:
    made = tiers((0, 0b111, DISK), (0, 0b010, HOST))
    assert slowest(made, {0: 0b111}) == {DISK: 0b101, HOST: 0b010}
    made.note(0, 0b011, DEVICE)
    assert slowest(made, {0: 0b111}) == {DISK: 0b100, DEVICE: 0b011}


def test_only_good_pages_count() -> None:
    made = tiers((0, 0b111, DISK), (2, 0b111, HOST))
    assert slowest(made, {0: 0b001, 2: 0b010}) == {DISK: 0b001, HOST: 0b010}
    assert slowest(made, {}) == {} == slowest(made, {1: 0b111})


def match_of(*groups: tuple[int, int | None, int, int], chunks: int = 4) -> PrefixMatch:
    """Of groups (number, chunks needed, first, count)."""
    made = tuple(
        GroupMatch(number, NAMES[number], Part(0, 1, 0, 1), need, 64, first, count, (), 32)
        for number, need, first, count in groups
    )
    return PrefixMatch(chunks * SIZE, SIZE, b"", "", made, {})


FULL = match_of((0, None, 0, 4))


@pytest.mark.parametrize(
    ("done", "first_token", "tokens", "by_tier"),
    [
        ({LOADED: {0: 0b1111}}, 0, 64, {HOST: 32, DISK: 32}),
        ({LOADED: {0: 0b1110}, SKIPPED: {0: 0b0001}}, 0, 0, {}),
        ({LOADED: {0: 0b0111}, UNREADABLE: {0: 0b1000}}, 0, 48, {HOST: 32, DISK: 16}),
        ({LOADED: {0: 0b1011}, UNREADABLE: {0: 0b0100}}, 0, 32, {HOST: 32}),
        ({LOADED: {0: 0b1110}}, 16, 64, {DEVICE: 16, HOST: 16, DISK: 32}),
        ({LOADED: {0: 0b1110}}, 21, 64, {DEVICE: 21, HOST: 11, DISK: 32}),
        ({LOADED: {0: 0b1100}}, 33, 64, {DEVICE: 33, DISK: 31}),
        ({LOADED: {0: 0b1111}}, 5, 64, {DEVICE: 5, HOST: 27, DISK: 32}),
        ({LOADED: {0: 0b0111}, UNREADABLE: {0: 0b1000}}, 48 + 5, 48, {HOST: 32, DISK: 16}),
        ({}, 64, 64, {DEVICE: 64}),
    ],
)
def test_tokens_before_the_first_failure_are_restored(
    done: Any, first_token: int, tokens: int, by_tier: dict[Tier, int]
) -> None:
    noted = tiers((0, 0b0011, HOST), (0, 0b1100, DISK))
    assert restored(FULL, NAMES, done, noted, first_token) == (tokens, by_tier)


def test_tiers_come_fastest_first() -> None:
    noted = tiers((0, 0b0001, DISK), (0, 0b0010, REMOTE), (0, 0b0100, HOST))
    _, found = restored(FULL, NAMES, {LOADED: {0: 0b0111}}, noted, 0)
    assert list(found.items()) == [(DEVICE, 16), (HOST, 16), (DISK, 16), (REMOTE, 16)]


def test_a_window_restores_a_length_for_which_its_last_chunks_are_good() -> None:
    match = match_of((0, None, 0, 4), (2, 2, 2, 2))
    noted = tiers((0, 0b1111, HOST), (2, 0b1100, DISK))
    done: Any = {LOADED: {0: 0b1111, 2: 0b1100}}
    assert restored(match, NAMES, done, noted, 0) == (64, {HOST: 32, DISK: 32})
    done = {LOADED: {0: 0b1111, 2: 0b0100}, UNREADABLE: {2: 0b1000}}
    assert restored(match, NAMES, done, noted, 0) == (0, {}), "the chunks before the window were not looked up"
