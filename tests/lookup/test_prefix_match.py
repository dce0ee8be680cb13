"""A match: what it holds and for how long, its pages, their sources, and its parts."""

from __future__ import annotations

import pickle
import random
import struct
from dataclasses import FrozenInstanceError, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

import kvfs
from kvfs.errors import ConfigError
from kvfs.index.rows import Place, pack_row
from kvfs.lookup.prefix_match import GroupMatch, Hold, PageRef, PrefixMatch, Source, used_ranges
from kvfs.lookup.row_hits import Hit, HitBlock, Hits
from kvfs.pages.chunk_set import span
from kvfs.pages.layout import Part
from kvfs.types import Tier
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
            assert match.at_us and match.last_hash == ns.chunk_hashes(tokens)[-1] and match.ask_cold is not None
            assert [page.chunk for page in match.pages] == [0, 1, 2]
            field: Any = "hold"
            with pytest.raises(FrozenInstanceError):
                setattr(match, field, None)
            copy = pickle.loads(pickle.dumps(match))
            assert copy == match and copy.hold is None and copy.ask_cold is None


def test_neighbouring_records_are_one_range_of_the_used_ones() -> None:
    """Three in a row of segment 4, then a gap, then one in another segment; chunk 5 is not used."""

    def hit(run: int, *extents: tuple[int, int, int, int]) -> Any:
        found = [SimpleNamespace(first=f, chunks=n, segment=s, seq=q) for f, n, s, q in extents]
        bits = sum((1 << e.chunks) - 1 << e.first for e in found)
        return SimpleNamespace(run=run, bits=bits, row=lambda: SimpleNamespace(extents=found))

    hits = [hit(0, (0, 2, 4, 10), (2, 3, 4, 12), (5, 1, 9, 1), (6, 2, 4, 20)), hit(1, (0, 1, 4, 22), (1, 4, 6, 23))]
    assert used_ranges(hits, 8, 0b11111_11011111) == [(4, 10, 5), (4, 20, 3), (6, 23, 4)]
    assert used_ranges(hits, 8, 0) == []


WANT, OTHER = Part(0, 1, 0, 1), Part(0, 1, 0, 2)


def drawn(draw: random.Random, runs: int, length: int) -> tuple[list[Hit], dict[int, list[Source]]]:
    """Hits of some runs, and the sources of each chunk."""
    hits, sources = list[Hit](), dict[int, list[Source]]()
    for run in range(runs):
        for part in draw.sample([WANT, OTHER], draw.choice([1, 1, 2])):
            seq, places = draw.randrange(1, 100), dict[int, Place]()
            segment = draw.choice([1, 2])
            for slot in range(length):
                seq += draw.choice([0, 0, 0, 5])
                if draw.random() < 0.8:
                    places[slot] = Place(bytes([slot]) * 32, bytes(16), 0, 0, segment, 10 * seq, 100, 5 * seq, seq, 0)
                seq += 1
            if not places:
                continue
            bits = sum(1 << slot for slot in places if draw.random() < 0.9)
            hits.append(Hit(run, part, bytes(40), pack_row(bytes(40), places, 4), bits))
            for slot, place in places.items():
                if bits >> slot & 1:
                    sources.setdefault(run * length + slot, []).append(Source(part, place))
    return hits, sources


@pytest.mark.parametrize("seed", range(30))
def test_the_sources_of_a_part_of_a_match_are_those_of_its_chunks(seed: int) -> None:
    draw, length = random.Random(seed), random.Random(seed).choice([1, 4, 32])
    hits, sources = drawn(draw, 4, length)
    total = 4 * length
    first = draw.randrange(total)
    gm = GroupMatch(2, "g", WANT, None, 100, first, total - first, hits, length, span(first, total - first))
    assert gm.nbytes == 100 * (total - first) and gm.cut(first, total - first) is gm
    assert gm.sources() == {c: found for c, found in sources.items() if c >= first}
    for _ in range(10):
        begin = draw.randrange(first, total)
        count = draw.randrange(total - begin + 1)
        cut = gm.cut(begin, count)
        assert (cut.first, cut.count, cut.present) == (begin, count, span(begin, count))
        assert cut.sources() == {c: found for c, found in sources.items() if begin <= c < begin + count}
        needed = range(begin // length, -(-(begin + count) // length))
        assert cut is gm or list(cut.hits) == [h for h in hits if h.run in needed]
    assert gm.for_part(WANT, 100) is gm
    other = gm.for_part(OTHER, 50)
    assert (other.want, other.part_bytes, other.first, other.hits) == (OTHER, 50, first, hits)
    damaged = replace(gm, hits=[Hit(0, WANT, bytes(40), b"damaged", 1)])
    assert damaged.sources() == {}


@pytest.mark.parametrize("seed", range(30))
def test_the_used_ranges_hold_all_records_of_good_chunks(seed: int) -> None:
    draw, length = random.Random(seed), random.Random(seed).choice([1, 4, 32])
    hits, sources = drawn(draw, 4, length)
    good = sum(1 << c for c in range(4 * length) if draw.random() < 0.5)
    ranges = used_ranges(hits, length, good)
    used = {(s.place.segment, s.place.seq) for c, found in sources.items() if good >> c & 1 for s in found}
    held = [(segment, seq) for segment, first, count in ranges for seq in range(first, first + count)]
    assert used <= set(held)
    extents = {
        (e.segment, e.seq + i): sum(h.bits & good >> h.run * length & span(e.first, e.chunks) for h in [hit])
        for hit in hits for e in hit.row().extents for i in range(e.chunks)  # type: ignore[union-attr]
    }  # fmt: skip
    assert all(record in extents for record in held), "whole extents, and only those of the hits"
    assert all(a[0] != b[0] or a[1] + a[2] != b[1] for a, b in pairwise(ranges)), "neighbours are merged"


def match_of(*groups: GroupMatch, tokens: int = 32, **changes: Any) -> PrefixMatch:
    return PrefixMatch(tokens, 16, b"n" * 32, "g", groups, {}, **changes)


def test_what_a_match_says_of_itself() -> None:
    one = GroupMatch(0, "full", WANT, None, 100, 0, 2, (), 32)
    two = GroupMatch(1, "window", WANT, 1, 7, 1, 1, (), 32)
    match = match_of(one, two)
    assert repr(match) == "<PrefixMatch 32 tokens, pages 2 of full, 1 of window, 207 bytes>"
    assert repr(match_of(tokens=0)) == "<PrefixMatch 0 tokens, pages none, 0 bytes>"
    assert (match.chunks, match.nbytes, match.keyed, bool(match), bool(match_of(tokens=0))) == (
        2,
        207,
        False,
        True,
        False,
    )
    assert (match.first_page("window"), match.page_count("window"), match.page_count("full")) == (1, 1, 2)
    assert match.group("window") is two
    with pytest.raises(KeyError, match=r"no group 'x' in this match; it has \['full', 'window'\]"):
        match.group("x")
    pages = [PageRef("full", 0, Tier.DISK), PageRef("full", 1, Tier.DISK), PageRef("window", 1, Tier.DISK)]
    assert match.pages == list(match) == pages
    assert match.cold() == {"full": 0b11, "window": 0b10}
    told = match_of(one, ask_cold=lambda made: {"full": made.chunks})
    assert told.pages == [PageRef("full", 0, Tier.HOST), PageRef("full", 1, Tier.DISK)]
    for good, chunks in (
        ({"full": 3, "window": 2}, 2), ({"full": 1, "window": 2}, 0), ({"full": 1, "window": 1}, 1),
        ({"full": 3, "window": 0}, 0), ({"full": 2, "window": 3}, 0),
    ):  # fmt: skip
        assert match.restorable(good) == chunks
    with match_of(one, hold=make_hold()) as held:
        assert held.hold is not None and held.hold.held
    assert not held.hold.held
    match.close()


def test_a_part_of_a_match_of_keys() -> None:
    keys = match_of(GroupMatch(0, "full", WANT, None, 100, 0, 5, (), 1, 0b11111), tokens=80, hold=make_hold())
    assert keys.keyed and not match_of().keyed
    part = keys.cut(2, 3)
    assert (part.groups[0].first, part.groups[0].count, part.groups[0].present) == (2, 3, 0b11100)
    assert part.hold is keys.hold and keys.cut(5, 0).groups[0].count == 0 and keys.cut(0, 5).groups == keys.groups
    for first, count in ((-1, 2), (0, 6), (3, 3), (2, -1), (6, 0)):
        with pytest.raises(ConfigError, match=f"{count} pages from {first} on of <PrefixMatch 80 tokens"):
            keys.cut(first, count)
    with pytest.raises(ConfigError, match="cut a match of keys"):
        match_of(GroupMatch(0, "full", WANT, None, 100, 0, 2, (), 32)).cut(0, 1)


def test_hits_are_a_sequence_of_those_of_their_runs() -> None:
    one, two, three = (Hit(n, WANT, bytes(40), b"v", 1) for n in range(3))
    hits = Hits({0: (one, two), 2: (three,), 5: (), 6: (one,)}, range(6))
    assert list(hits) == [one, two, three] and len(hits) == 3 and hits[1] is two and hits[1:] == (two, three)
    assert hits == (one, two, three) and hits != (one,) and hits != [one, two, three] and len(Hits({}, range(3))) == 0
    assert pickle.loads(pickle.dumps(hits)) == (one, two, three)
    assert Hits({0: (one, two, three)}, range(1)) == hits
    assert hits.within(range(1, 9)) == (three,) and hits.within(range(2)) == (one, two)


def test_a_block_of_rows_is_taken_apart_once() -> None:
    values = [pack_row(bytes(40), {n: Place(bytes(32), bytes(16), 0, 0, 1, 4, 100, 5, n + 1, 0)}, 4) for n in range(3)]
    at, rows = 0, b""
    for run, part, value in ((7, 0, values[0]), (7, 1, values[1]), (9, 0, values[2])):
        rows += struct.pack("<IIIIQ40s", run, part, 1 << run, len(value), at, bytes([run]) * 40)
        at += len(value)
    block = HitBlock(rows, b"".join(values), [WANT, OTHER])
    assert [(h.run, h.part, h.bits, h.value, h.key, h.checked) for h in block.of(7)] == [
        (7, WANT, 128, values[0], b"\7" * 40, True), (7, OTHER, 128, values[1], b"\7" * 40, True),
    ]  # fmt: skip
    assert [h.value for h in block.of(9)] == [values[2]] and block.of(8) == () and block.of(7) is block.of(7)
    assert [slot for slot, _ in block.of(9)[0].row().places()] == [2]  # type: ignore[union-attr]
