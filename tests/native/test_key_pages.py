"""What the native library plans for pages of keys is what Python plans from their rows."""

from __future__ import annotations

import random
import struct
from dataclasses import replace

import pytest

from kvfs.index.rows import Place, pack_row
from kvfs.lookup.prefix_match import GroupMatch, used_ranges
from kvfs.lookup.row_hits import Hit, HitBlock, Hits, RunHits
from kvfs.native import key_pages, library
from kvfs.pages.layout import Part
from kvfs.read.plan import plan_runs
from kvfs.segments.open_segments import OpenSegment

WANT, OTHER = Part(0, 1, 0, 1), Part(0, 2, 0, 1)
PAGE, KEY, LEAVES = 4096, bytes(40), 3
HELD = {n: OpenSegment(n, bytes(16), -1, "") for n in (1, 2)}  # segment 3 has been dropped


def drawn_places(draw: random.Random, count: int) -> list[Place]:
    """Of pages that mostly follow one another in a segment."""
    at, found = Place(bytes(32), b"", 0, 0, 1, 10, PAGE, 1000, 1, 0), list[Place]()
    for number in range(count):
        at = at._replace(block=at.block + 1, leaf=at.leaf and at.leaf + LEAVES, seq=at.seq + 1)
        change = draw.randrange(40)
        if change < 6:
            at = at._replace(**[
                {"segment": draw.randrange(1, 4)}, {"block": draw.randrange(100)}, {"seq": at.seq + 1},
                {"leaf": draw.choice([0, 500])}, {"codec": draw.randrange(2)},
                {"stored_bytes": draw.choice([PAGE, PAGE // 2])},
            ][change])  # fmt: skip
        found.append(at._replace(root=number.to_bytes(16, "little")))
    return found


def block_of(rows: list[tuple[int, int, bytes]]) -> HitBlock:
    packed, values = b"", b""
    for run, part, value in rows:
        packed += struct.pack("<IIIIQ40s", run, part, 1, len(value), len(values), KEY)
        values += value
    return HitBlock(packed, values, [WANT, OTHER])


def matched(draw: random.Random, count: int) -> GroupMatch:
    """A match of keys out of blocks of rows, as walks return them; some pages have a row in two parts, or none."""
    found, at = dict[int, RunHits](), 0
    while at < count:
        end, rows = min(count, at + draw.randrange(1, 60)), list[tuple[int, int, bytes]]()
        for run, place in enumerate(drawn_places(draw, end - at), at):
            parts = draw.choices([(0,), (0, 1), (1,), ()], [20, 3, 1, 1])[0]
            rows += [(run, part, pack_row(KEY, {0: place}, LEAVES)) for part in parts]
        found.update(dict.fromkeys(range(at, end), block_of(rows)))
        at = end
    return GroupMatch(0, "full", WANT, None, PAGE, 0, count, Hits(found, range(count)), 1)


@pytest.mark.parametrize("seed", range(40))
def test_runs_and_ranges_are_those_of_the_rows(native: library.Library, seed: int) -> None:
    draw = random.Random(seed)
    whole = matched(draw, draw.randrange(1, 200))
    first = draw.randrange(whole.count)
    for match in (whole, whole.cut(first, draw.randrange(whole.count - first + 1))):
        assert isinstance(match.hits, Hits) and match.hits.stretches(WANT) is not None
        by_rows = replace(match, hits=tuple(match.hits))
        assert plan_runs(match, HELD) == plan_runs(by_rows, HELD)
        good = draw.getrandbits(whole.count)
        used = {
            (segment, record)
            for segment, at, count in used_ranges(match.hits, 1, good)
            for record in range(at, at + count)
        }
        assert used == {
            (segment, record)
            for segment, at, count in used_ranges(by_rows.hits, 1, good)
            for record in range(at, at + count)
        }


def test_pages_that_follow_one_another_are_one_stretch(native: library.Library) -> None:
    places = [Place(bytes(32), bytes([n]) * 16, 0, 0, 1, 10 + 2 * n, PAGE, 50 + LEAVES * n, 7 + n, 0) for n in range(5)]
    block = block_of([(4 + n, 0, pack_row(KEY, {0: place}, LEAVES)) for n, place in enumerate(places)])
    (one,) = block.stretches(WANT) or ()
    assert one == key_pages.Stretch(4, 5, 1, 0, PAGE, LEAVES, 7, 2, 10, 50, b"".join(p.root for p in places))
    (cut,) = Hits(dict.fromkeys(range(4, 9), block), range(5, 7)).stretches(WANT) or ()
    assert cut == key_pages.Stretch(5, 2, 1, 0, PAGE, LEAVES, 8, 2, 12, 53, bytes([1]) * 16 + bytes([2]) * 16)
    assert block.stretches(OTHER) == [] and block.stretches(None) == [one]


def test_a_row_with_more_chunks_than_its_key_names_gives_the_first(native: library.Library) -> None:
    places = {n: Place(bytes(32), bytes([n]) * 16, 0, 0, n + 1, 10 + n, PAGE, 50, 7 + n, 0) for n in range(3)}
    (one,) = block_of([(0, 0, pack_row(KEY, places, LEAVES))]).stretches(WANT) or ()
    assert (one.pages, one.segment, one.block, one.seq, one.roots) == (1, 1, 10, 7, bytes(16))


def test_python_plans_what_python_has_read_and_all_without_the_library(native: library.Library) -> None:
    value = pack_row(KEY, {0: Place(bytes(32), bytes(16), 0, 0, 1, 10, PAGE, 50, 7, 0)}, LEAVES)
    block = block_of([(0, 0, value)])
    mixed = Hits({0: block, 1: (Hit(1, WANT, KEY, value, 1),)}, range(2))
    assert mixed.stretches(WANT) is None and Hits({0: block, 1: ()}, range(2)).stretches(WANT) is not None
    with library.paused():
        assert block.stretches(WANT) is None
