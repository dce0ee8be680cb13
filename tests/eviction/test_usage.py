"""Fragments of prompts in columns, and request chains that are kept between calls."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest

from kvfs.eviction.usage import SCALE_US, Fragments, RequestChains, group


def drawn(draw: random.Random) -> Fragments:
    """A segment with records of few access times, so that many are shared; some are dead, some behind gaps."""
    count = draw.randrange(12)
    stamps = [draw.choice([0, *range(1, 9)]) for _ in range(count)]
    return group(
        stamps,
        [draw.randrange(1, 100) for _ in range(count)],
        [draw.randrange(12) for _ in range(count)],
        [draw.choice([0, 3, 8]) * SCALE_US for _ in range(count)],  # worth 1, 2, 3: sums are exact
    )


def expected(segments: dict[int, Fragments]) -> tuple[dict[int, list[float]], dict[int, list[float]]]:
    """(tails, reached) by the definition: each chain is followed for each of its fragments."""
    tails = {n: [0.0] * len(p.stamps) for n, p in segments.items()}
    reached = {n: [0.0] * len(p.stamps) for n, p in segments.items()}
    for number, fragments in segments.items():
        for i, stamp in enumerate(fragments.stamps):
            chain = sorted(
                (p.first[j], p.last[j], n, p.weights[j])
                for n, p in segments.items()
                for j, other in enumerate(p.stamps)
                if other == stamp
            )
            for k in range(1, len(chain)):
                if chain[k][0] > max(last for _, last, _, _ in chain[:k]) + 1:
                    chain = chain[:k]
                    break
            order = [n for _, _, n, _ in chain]
            if number in order:
                tails[number][i] = sum(w for *_, w in chain[order.index(number) :])
                reached[number][i] = fragments.weights[i]
    return tails, reached


@pytest.mark.parametrize("seed", range(20))
def test_kept_chains_equal_chains_followed_from_scratch(seed: int) -> None:
    draw, chains = random.Random(seed), RequestChains()
    segments: dict[int, Fragments] = {}
    for _ in range(40):
        for number in draw.sample(range(10), draw.randrange(4)):
            if draw.random() < 0.3:
                segments.pop(number, None)
            else:
                segments[number] = drawn(draw)
        chains.update({n: segments[n] for n in draw.sample(sorted(segments), len(segments))})
        tails, reached = expected(segments)
        assert {n: list(t) for n, t in chains.tails.items()} == tails
        assert {n: list(t) for n, t in chains.reached.items()} == reached


def test_an_update_after_an_interrupted_one_starts_over(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(3)
    for halt in range(1, 60, 4):
        chains, segments = RequestChains(), {n: drawn(draw) for n in range(8)}
        chains.update(segments)
        segments = {n: drawn(draw) if n % 2 else p for n, p in segments.items() if n}
        steps = iter(range(halt))

        def interrupted(name: str, chains: RequestChains = chains, steps: Any = steps) -> Any:
            method = getattr(chains, name)

            def stepping(*args: Any) -> Any:
                if next(steps, None) is None:
                    raise KeyboardInterrupt
                return method(*args)

            return stepping

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            for name in ("_link", "_unlink", "_follow"):
                patch.setattr(chains, name, interrupted(name))
            for _ in range(halt):
                chains.update(dict(segments))
                segments[0] = drawn(draw)
        chains.update(segments)
        tails, _ = expected(segments)
        assert {n: list(t) for n, t in chains.tails.items()} == tails


def test_unchanged_fragments_are_not_followed_again() -> None:
    chains, draw = RequestChains(), random.Random(4)
    segments = {n: drawn(draw) for n in range(6)}
    chains.update(segments)
    kept = dict(chains.tails)
    chains.update(dict(segments))
    assert all(chains.tails[n] is kept[n] for n in segments)


def test_fragments_list_their_records_by_chunk() -> None:
    fragments = group([7, 0, 5, 7, 5, 7], [10, 1, 20, 30, 40, 50], [4, 0, 1, 2, 0, 3], [0] * 6)
    assert list(fragments.stamps) == [5, 7]
    assert [list(fragments.ordinals_of(i)) for i in range(2)] == [[4, 2], [3, 5, 0]]
    assert (list(fragments.first), list(fragments.last)) == ([0, 2], [1, 4])
    assert (list(fragments.nbytes), fragments.weights) == ([60, 90], array("d", [60.0, 90.0]))
