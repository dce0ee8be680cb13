"""Sets of chunks as integers."""

from __future__ import annotations

import random
from itertools import pairwise

from kvfs.pages.chunk_set import bits_of, members, span, streaks_of


def test_streaks_are_the_chunks_that_follow_one_another() -> None:
    assert list(streaks_of(0)) == [] and list(streaks_of(span(3, 4))) == [(3, 4)]
    assert list(streaks_of(0b1101110001)) == [(0, 1), (4, 3), (8, 2)]
    draw = random.Random(1)
    for _ in range(50):
        bits = draw.getrandbits(300) & draw.getrandbits(300) | span(draw.randrange(300), draw.randrange(40))
        streaks = list(streaks_of(bits))
        assert [chunk for first, count in streaks for chunk in range(first, first + count)] == list(members(bits))
        assert all(first + count < after for (first, count), (after, _) in pairwise(streaks))
        assert bits_of(members(bits)) == bits
