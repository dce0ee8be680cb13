"""The hold of a match: its segments stay until it is closed and no use is in progress."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError
from types import SimpleNamespace
from typing import Any

import pytest

import kvfs
from kvfs.lookup.prefix_match import Hold, used_ranges
from tests.stores import TINY_BYTES, seeded, tiny, tokens_of


def make_hold() -> Hold:
    segment: Any = object()
    return Hold({1: segment}, 0.0)


def test_a_hold_keeps_its_segments_until_it_is_closed() -> None:
    hold = make_hold()
    assert hold.acquire()
    hold.release()
    assert hold.held
    hold.close()
    assert not hold.held and not hold.acquire()
    hold.close()


def test_a_use_in_progress_keeps_the_segments_of_a_closed_hold() -> None:
    hold = make_hold()
    assert hold.acquire() and hold.acquire()
    hold.close()
    hold.release()
    assert hold.held and not hold.acquire()
    hold.release()
    assert not hold.held


def test_a_detached_hold_has_no_segments_and_no_users() -> None:
    hold = make_hold()
    hold.acquire()
    hold.detach()
    assert not hold.held and not hold.acquire()


@pytest.mark.parametrize("how", ["match", "select"])
def test_a_match_is_complete_when_it_is_made(tmp_path: Any, how: str) -> None:
    with kvfs.open(tmp_path / "store", capacity="32MiB") as store:
        ns = store.namespace("m", tiny(), "1")
        tokens = tokens_of(1, 3)
        ns.put(tokens, seeded(1, 3 * TINY_BYTES))
        group = ns.layout.groups[0].name
        with ns.match(tokens) if how == "match" else ns.prompt(tokens).select({group: 0}, end=3) as match:
            assert match.hold is not None and match.hold.held.keys() == match.segments.keys() == match.tails.keys()
            assert match.at_us and match.last_hash == ns.chunk_hashes(tokens)[-1] and match.page_tiers is not None
            assert [page.chunk for page in match.pages] == [0, 1, 2]
            field: Any = "hold"
            with pytest.raises(FrozenInstanceError):
                setattr(match, field, None)
            copy = pickle.loads(pickle.dumps(match))
            assert copy == match and copy.hold is None and copy.page_tiers is None


def test_neighbouring_records_are_one_range_of_the_used_ones() -> None:
    """Three in a row of segment 4, then a gap, then one in another segment; chunk 5 is not used."""

    def hit(run: int, *extents: tuple[int, int, int, int]) -> Any:
        found = [SimpleNamespace(first=f, chunks=n, segment=s, seq=q) for f, n, s, q in extents]
        bits = sum((1 << e.chunks) - 1 << e.first for e in found)
        return SimpleNamespace(run=run, bits=bits, row=lambda: SimpleNamespace(extents=found))

    hits = [hit(0, (0, 2, 4, 10), (2, 3, 4, 12), (5, 1, 9, 1), (6, 2, 4, 20)), hit(1, (0, 1, 4, 22), (1, 4, 6, 23))]
    assert used_ranges(hits, 8, 0b11111_11011111) == [(4, 10, 5), (4, 20, 3), (6, 23, 4)]
    assert used_ranges(hits, 8, 0) == []
