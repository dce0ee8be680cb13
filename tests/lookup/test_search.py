"""Which lengths can be restored, against brute force; and rectangles covered by the parts that ranks wrote."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvfs.index.rows import CLAIM, RUN, Place, claim, pack_row, parse_row
from kvfs.lookup.gaps import KEYS_PER_HOLD, read_behind_gaps
from kvfs.lookup.prefix_match import GroupMatch, PrefixMatch
from kvfs.lookup.search import (
    ROWS_PER_HOLD,
    GroupLookup,
    Prompt,
    prefix_length,
    search,
    valid_lengths,
    walk_all,
    walk_back,
    walk_forward,
)
from kvfs.pages.chunk_set import members
from kvfs.pages.layout import Cell, Group, Need, Part

needs = st.none() | st.integers(1, 9) | st.sampled_from([64, 2**27])


def restores(present: set[int], need: int | None, length: int) -> bool:
    """Whether the chunks that a group needs for a length are there."""
    first = 0 if need is None else max(0, length - need)
    return all(chunk in present for chunk in range(first, length))


def bits_of(chunks: set[int]) -> int:
    return sum(1 << chunk for chunk in chunks)


# ---------------------------------------------------------------- sets of lengths


@given(st.sets(st.integers(0, 40)))
def test_prefix_length_counts_to_the_first_gap(present: set[int]) -> None:
    assert prefix_length(bits_of(present)) == next(n for n in range(42) if n not in present)


@given(st.sets(st.integers(0, 12)), needs, st.integers(0, 12))
@example(set(range(12)), 2**27, 12)
@example({1, 2}, 3, 3)
def test_valid_lengths_are_those_whose_chunks_are_there(present: set[int], need: int | None, lengths: int) -> None:
    found = valid_lengths(bits_of(present), need, lengths)
    assert found == sum(1 << n for n in range(lengths + 1) if restores(present, need, n))


def test_the_widest_window_costs_no_more_than_the_prompt() -> None:
    """A window of 2**31 tokens is 2**27 chunks: sets of that many bits would take seconds."""
    import tracemalloc

    tracemalloc.start()
    try:
        assert valid_lengths((1 << 8192) - 1, 2**27, 8192) == (1 << 8193) - 1
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# ---------------------------------------------------------------- search, over an index that is a dict


@dataclass
class FakeSession:
    """What a lookup asks of a session, answered from a dict."""

    rows: dict[bytes, bytes]
    dead: frozenset[int] = frozenset()
    now_s: int = 1000
    tails: Any = field(default_factory=lambda: defaultdict(int))

    def row(self, key: bytes) -> Any:
        return parse_row(key, self.rows.get(key))

    def keys_there(self, keys: Sequence[bytes]) -> list[bytes]:
        return [key for key in keys if key in self.rows]

    def live_in(self, extent: Any) -> bytes | None:
        missing = extent.flags & CLAIM or extent.segment in self.dead
        return None if missing else self.segment_id(extent.segment)

    def claim_holds(self, extent: Any) -> bool:
        return bool(extent.flags & CLAIM) and extent.segment not in self.dead

    def segment_id(self, number: int) -> bytes:
        return number.to_bytes(16, "little")


def make_group(name: str, need: Need, heads: int = 1, layers: int = 1) -> Group:
    states = 1 if need.kind == "exact" else 16
    return Group(name, tuple(range(layers)), heads, Cell("opaque", 4), need, states)


class Shelf:
    """Rows of a prompt as writers leave them."""

    def __init__(self, chunks: int, run_length: int = RUN) -> None:
        hashes = [hashlib.sha256(i.to_bytes(4, "little")).digest() for i in range(chunks)]
        self.prompt = Prompt(b"\x01" * 32, hashes, run_length)
        self.rows: dict[bytes, bytes] = {}

    def store(self, group: Group, part: Part, chunks: set[int], *, claimed: bool = False) -> None:
        runs: dict[int, dict[int, Place]] = {}
        for chunk in chunks:
            h = self.prompt.hashes[chunk]
            place = Place(h, bytes(16), 0, 0, 1, 16 + chunk, 4096, 8 * chunk, chunk, 0)
            if claimed:
                place = claim(h, 1, 9999)
            runs.setdefault(chunk // self.prompt.run_length, {})[chunk % self.prompt.run_length] = place
        for run, places in runs.items():
            key = self.prompt.key(group, part, run * self.prompt.run_length)
            self.rows[key] = pack_row(key, places, group.leaves(part))

    def lookup(self, group: Group, want: Part, known: list[Part]) -> GroupLookup:
        lookup = GroupLookup(self.prompt, group, want)
        lookup.use_parts(tuple(known))
        return lookup

    def search(self, lookups: list[GroupLookup], lengths: int, holds: list[int] | None = None) -> int:
        session = FakeSession(self.rows)

        def read(function: Callable[[Any], bool]) -> bool:
            before = sum(x.rows_read for x in lookups)
            done = function(session)
            if holds is not None:
                holds.append(sum(x.rows_read for x in lookups) - before)
            return done

        return search(lookups, 16, lengths, read)


def chunk_sets(most: int) -> st.SearchStrategy[set[int]]:
    """Sets of chunks as they occur: nearly full with a few holes, a prefix, or anything."""
    everything = set(range(most))
    holes = st.sets(st.integers(0, most - 1), max_size=4).map(lambda h: everything - h)
    prefixes = st.integers(0, most).map(lambda n: set(range(n)))
    return holes | prefixes | st.sets(st.integers(0, most - 1))


@st.composite
def hybrids(draw: st.DrawFn) -> tuple[int, list[tuple[Need, set[int]]]]:
    most = draw(st.sampled_from([1, 5, 31, 32, 33, 70, 100]))
    kinds = st.sampled_from([Need.all(), Need.exact(), *[Need.window_of(w) for w in (1, 16, 17, 64, 600, 2**31 - 1)]])
    groups = draw(st.lists(st.tuples(kinds, chunk_sets(most)), min_size=1, max_size=4))
    return most, groups


@given(hybrids(), st.data())
@settings(max_examples=300)
def test_a_match_is_the_longest_length_that_every_group_restores(
    model: tuple[int, list[tuple[Need, set[int]]]], data: st.DataObject
) -> None:
    most, groups = model
    lengths = data.draw(st.integers(1, most))
    shelf = Shelf(most)
    lookups = []
    for number, (need, present) in enumerate(groups):
        group = make_group(f"g{number}", need)
        shelf.store(group, group.full, present)
        lookups.append(shelf.lookup(group, group.full, [group.full]))
    found = shelf.search(lookups, lengths)
    fits = [n for n in range(lengths + 1) if all(restores(p, need.chunks(16), n) for need, p in groups)]
    assert found == max(fits)


@given(chunk_sets(70), st.integers(1, 70))
def test_opaque_keys_are_restored_up_to_the_first_that_is_missing(present: set[int], lengths: int) -> None:
    shelf = Shelf(70, run_length=1)
    group = make_group("opaque", Need.all())
    shelf.store(group, group.full, present)
    found = shelf.search([shelf.lookup(group, group.full, [group.full])], lengths)
    assert found == next(n for n in range(lengths + 1) if n not in present or n == lengths)


@given(chunk_sets(40), chunk_sets(40))
def test_chunks_that_are_being_written_are_not_restored(stored: set[int], written: set[int]) -> None:
    shelf, group = Shelf(40), make_group("full", Need.all())
    other = make_group("full", Need.all(), heads=2)
    shelf.store(other, Part(0, 1, 0, 1), stored)
    shelf.store(other, Part(1, 1, 0, 1), written, claimed=True)
    assert group.full == Part(0, 1, 0, 1)
    both = shelf.lookup(other, other.full, [Part(0, 1, 0, 1), Part(1, 1, 0, 1)])
    assert shelf.search([both], 40) == 0
    half = shelf.lookup(other, Part(0, 1, 0, 1), [Part(0, 1, 0, 1), Part(1, 1, 0, 1)])
    assert shelf.search([half], 40) == prefix_length(bits_of(stored))


@pytest.mark.parametrize("need", [Need.all(), Need.window_of(64), Need.exact()])
def test_no_hold_of_the_gate_reads_more_rows_than_allowed(need: Need) -> None:
    shelf, holds = Shelf(8192 * 2), []
    group = make_group("full", need)
    if need.kind == "all":
        shelf.store(group, group.full, set(range(8192 * 2)))
    lookup = shelf.lookup(group, group.full, [group.full])
    found = shelf.search([lookup], 8192 * 2, holds)
    assert found == (8192 * 2 if need.kind == "all" else 0)
    assert max(holds) <= ROWS_PER_HOLD + RUN and len(holds) > 1


def test_a_prompt_costs_one_row_per_run() -> None:
    shelf, group = Shelf(8192), make_group("full", Need.all())
    shelf.store(group, group.full, set(range(8192)))
    lookup = shelf.lookup(group, group.full, [group.full])
    assert shelf.search([lookup], 8192) == 8192 and lookup.rows_read == 8192 // RUN


@given(chunk_sets(300), st.sets(st.integers(0, 299), max_size=40), st.integers(0, 2), st.data())
def test_runs_read_together_are_found_as_if_read_one_by_one(
    stored: set[int], writing: set[int], dead: int, data: st.DataObject
) -> None:
    shelf, group = Shelf(300), make_group("g", Need("all"))
    shelf.store(group, group.full, stored - writing)
    shelf.store(group, group.full, writing, claimed=True)
    one, many = (shelf.lookup(group, group.full, [group.full]) for _ in range(2))
    session, run, runs = FakeSession(shelf.rows, frozenset({dead})), 0, shelf.prompt.runs()
    singly = [one.read_run(session, n, stop_at_gap=False) for n in range(runs)]  # type: ignore[arg-type]
    while run < runs:
        end = data.draw(st.integers(run + 1, runs))
        next_run, found = many.read_runs(session, run, end, stop_at_gap=False)  # type: ignore[arg-type]
        assert run < next_run <= end and found == singly[next_run - 1]
        assert all(singly[n].whole for n in range(run, next_run - 1)), "it continued behind a gap"
        run = next_run
    assert (one.found, one.segments, one.rows_read) == (many.found, many.segments, many.rows_read)


def test_a_window_reads_only_the_chunks_before_the_length() -> None:
    shelf, full, window = Shelf(3200), make_group("f", Need.all()), make_group("w", Need.window_of(64))
    shelf.store(full, full.full, set(range(3200)))
    shelf.store(window, window.full, set(range(3196, 3200)))
    lookups = [shelf.lookup(g, g.full, [g.full]) for g in (full, window)]
    assert shelf.search(lookups, 3200) == 3200
    assert lookups[1].rows_read <= RUN


# ---------------------------------------------------------------- parts

rectangles = st.builds(Part, st.integers(0, 5), st.integers(1, 4), st.integers(0, 5), st.integers(1, 4))


def cells_of(part: Part) -> set[tuple[int, int]]:
    return {
        (h, x) for h in range(part.head, part.head + part.heads) for x in range(part.layer, part.layer + part.layers)
    }


@given(rectangles, st.lists(st.tuples(rectangles, st.sets(st.integers(0, 6))), max_size=6, unique_by=lambda t: t[0]))
@settings(max_examples=300)
def test_a_page_is_there_when_its_parts_cover_what_the_reader_wants(
    want: Part, written: list[tuple[Part, set[int]]]
) -> None:
    shelf, group = Shelf(7), make_group("full", Need.all(), heads=9, layers=9)
    for part, chunks in written:
        shelf.store(group, part, chunks)
    lookup = shelf.lookup(group, want, [part for part, _ in written])
    session: Any = FakeSession(shelf.rows)
    found = lookup.read_run(session, 0, stop_at_gap=False)
    expected = {
        chunk for chunk in range(7)
        if cells_of(want) <= {cell for part, chunks in written if chunk in chunks for cell in cells_of(part)}
    }  # fmt: skip
    assert found.covered == bits_of(expected)


@given(rectangles, st.lists(st.tuples(rectangles, chunk_sets(40)), max_size=5, unique_by=lambda t: t[0]))
def test_a_prefix_is_as_long_as_its_parts_cover_it(want: Part, written: list[tuple[Part, set[int]]]) -> None:
    shelf, group = Shelf(40), make_group("full", Need.all(), heads=9, layers=9)
    for part, chunks in written:
        shelf.store(group, part, chunks)
    found = shelf.search([shelf.lookup(group, want, [part for part, _ in written])], 40)
    complete = (
        cells_of(want) <= {cell for part, chunks in written if chunk in chunks for cell in cells_of(part)}
        for chunk in range(40)
    )
    assert found == next((n for n, fine in enumerate(complete) if not fine), 40)


# ---------------------------------------------------------------- what is restored when some pages do not verify


@given(st.integers(1, 12), st.lists(st.tuples(needs, st.sets(st.integers(0, 11))), min_size=1, max_size=3))
def test_what_verified_decides_which_length_is_restored(chunks: int, groups: list[tuple[int | None, set[int]]]) -> None:
    matched = tuple(
        GroupMatch(n, f"g{n}", Part(0, 1, 0, 1), need, 64, 0, chunks, (), RUN) for n, (need, _) in enumerate(groups)
    )
    match = PrefixMatch(chunks * 16, 16, b"", "", matched, {})
    good = {f"g{n}": bits_of(there) for n, (_, there) in enumerate(groups)}
    fits = [n for n in range(chunks + 1) if all(restores(there, need, n) for need, there in groups)]
    assert match.restorable(good) == max(fits)


# ---------------------------------------------------------------- behind gaps

WHOLE, LEFT, RIGHT = Part(0, 2, 0, 1), Part(0, 1, 0, 1), Part(1, 1, 0, 1)
shelf_rows = st.lists(
    st.tuples(
        st.sampled_from([WHOLE, LEFT, RIGHT]), st.integers(0, 2), st.integers(0, RUN - 1),
        st.sets(st.integers(0, RUN - 1), min_size=1, max_size=6), st.booleans(), st.integers(1, 2),
    ),
    max_size=10,
)  # fmt: skip


def shelf_of(group: Group, rows: list[Any]) -> Shelf:
    """Two runs and part of a third, with rows that begin at any chunk; rows name segment 1, or 2, which is dead."""
    shelf = Shelf(2 * RUN + 20)
    for part, run, head, slots, claimed, segment in rows:
        first = run * RUN
        if first + head >= len(shelf.prompt.hashes):
            continue
        places = {}
        for j in {head, *(slot for slot in slots if slot > head)}:
            if first + j < len(shelf.prompt.hashes):
                h = shelf.prompt.hashes[first + j]
                stored = Place(h, bytes(16), 0, 0, segment, 16 + j, 4096, 8 * j, j, 0)
                places[j] = claim(h, segment, 9999) if claimed else stored
        key = shelf.prompt.key(group, part, first + head)
        shelf.rows[key] = pack_row(key, places, group.leaves(part))
    return shelf


known_parts = st.sampled_from([[WHOLE], [LEFT, RIGHT], [WHOLE, LEFT, RIGHT]])


@given(shelf_rows, known_parts)
@settings(deadline=None)
def test_what_is_stored_behind_gaps_is_found_as_if_read_chunk_by_chunk(rows: list[Any], known: list[Part]) -> None:
    group = make_group("full", Need.all(), heads=2)
    shelf = shelf_of(group, rows)
    session: Any = FakeSession(shelf.rows, dead=frozenset({2}))
    one, bulk = (shelf.lookup(group, WHOLE, known) for _ in range(2))
    for run in range(3):
        one.read_run(session, run, stop_at_gap=False)
        bulk.read_run(session, run, stop_at_gap=True)
    read_behind_gaps(bulk, lambda function: function(session))
    assert (one.found, one.segments) == (bulk.found, bulk.segments)


@given(shelf_rows, known_parts, st.integers(0, 2 * RUN + 20), st.integers(0, 2 * RUN + 20))
@settings(deadline=None)
def test_a_walk_over_all_finds_what_run_by_run_is_found(rows: list[Any], known: list[Part], a: int, b: int) -> None:
    group = make_group("full", Need.all(), heads=2)
    shelf, (first, end) = shelf_of(group, rows), sorted((a, b))
    session: Any = FakeSession(shelf.rows, dead=frozenset({2}))
    singly, whole, begun = (shelf.lookup(group, WHOLE, known) for _ in range(3))
    runs = range(first // RUN, -(-end // RUN))
    for run in runs:
        singly.read_run(session, run, stop_at_gap=False)
    walk_all(whole, first, end, lambda step: step(session), to_first_gap=False)
    read_behind_gaps(whole, lambda function: function(session))
    assert (whole.found.present, whole.found.claimed) == (singly.found.present, singly.found.claimed)
    assert {n: list(whole.found.hits_of(n)) for n in whole.found.hits if whole.found.hits_of(n)} == {
        n: list(singly.found.hits_of(n)) for n in singly.found.hits if singly.found.hits_of(n)
    }
    walk_all(begun, first, end, lambda step: step(session), to_first_gap=True)
    known_chunks = singly.found.present | singly.found.claimed
    last_run = next((n // RUN for n in range(first, end) if not known_chunks >> n & 1), runs.stop - 1)
    read = (1 << (last_run + 1) * RUN) - 1
    assert begun.found.present == singly.found.present & read and begun.found.claimed == singly.found.claimed & read


@given(st.sets(st.integers(0, 79)), st.integers(0, 80), st.sampled_from([[WHOLE], [LEFT, RIGHT]]), st.integers(1, 99))
def test_the_next_run_that_is_there_is_found_and_none_that_is_not(
    runs: set[int], begin: int, known: list[Part], budget: int
) -> None:
    group, shelf = make_group("full", Need.all(), heads=2), Shelf(80 * RUN)
    for run in runs:
        shelf.store(group, known[run % len(known)], {run * RUN, run * RUN + 3})
    lookup, session, last = shelf.lookup(group, WHOLE, known), FakeSession(shelf.rows), -1
    found, expected = begin, min((n for n in runs if n >= begin), default=80)
    while found != last:  # the budget may end it before
        lookup.rows_read, last = 0, found
        found = lookup.next_present(session, last, 80, budget)  # type: ignore[arg-type]
        assert lookup.rows_read <= budget + ROWS_PER_HOLD and last <= found <= expected
    assert found == expected and lookup.gapped == list(range(begin, expected))


@given(st.sets(st.integers(0, 5 * RUN - 1)), st.integers(0, 5 * RUN - 1), st.data())
def test_without_orphans_only_forks_of_runs_without_other_rows_are_missed(
    stored: set[int], fork: int, data: st.DataObject
) -> None:
    group, shelf = make_group("full", Need.all()), Shelf(5 * RUN)
    shelf.store(group, group.full, stored)
    for run in {chunk // RUN for chunk in stored}:  # some runs lose the row that leads to them
        if data.draw(st.booleans()):
            del shelf.rows[shelf.prompt.key(group, group.full, run * RUN)]
    h = shelf.prompt.hashes[fork]
    key = shelf.prompt.key(group, group.full, fork)
    shelf.rows[key] = pack_row(key, {fork % RUN: Place(h, bytes(16), 0, 0, 1, 16, 4096, 0, 0, 0)}, 1)
    session: Any = FakeSession(shelf.rows)
    both = [shelf.lookup(group, group.full, [group.full]) for _ in range(2)]
    for lookup, orphans in zip(both, (True, False), strict=True):
        for run in range(5):
            lookup.read_run(session, run, stop_at_gap=True)
        read_behind_gaps(lookup, lambda function: function(session), orphans=orphans)
    every, some = (lookup.found.present for lookup in both)
    missed = every & ~some
    headless = [run for run in range(5) if shelf.prompt.key(group, group.full, run * RUN) not in shelf.rows]
    assert not some & ~every and {chunk // RUN for chunk in members(missed)} <= {*headless[1:]}


@pytest.mark.parametrize("parts", [1, 64])
def test_behind_gaps_no_hold_asks_for_more_keys_or_rows_than_allowed(parts: int) -> None:
    group, shelf = make_group("full", Need.all()), Shelf(128 * RUN)
    for run in range(128):  # a row of its own, to which no other leads
        h = shelf.prompt.hashes[run * RUN + 5]
        key = shelf.prompt.key(group, group.full, run * RUN + 5)
        shelf.rows[key] = pack_row(key, {5: Place(h, bytes(16), 0, 0, 1, 16, 4096, 0, 0, 0)}, 1)
    asked: list[int] = []
    others = [Part(0, 1, 0, 1)] * (parts - 1)  # as many rows may be there
    lookup = shelf.lookup(group, group.full, [group.full, *others])

    class Counting(FakeSession):
        def keys_there(self, keys: Sequence[bytes]) -> list[bytes]:
            asked.append(len(keys))
            return super().keys_there(keys)

    session: Any = Counting(shelf.rows)
    rows: list[int] = []

    def read(function: Callable[[Any], Any]) -> Any:
        before = lookup.rows_read
        result = function(session)
        rows.append(lookup.rows_read - before)
        return result

    for run in range(128):
        lookup.read_run(session, run, stop_at_gap=True)
    read_behind_gaps(lookup, read)
    assert lookup.found.present == sum(1 << run * RUN + 5 for run in range(128))
    assert sum(asked) == parts * 128 * (RUN - 1) and max(asked) <= KEYS_PER_HOLD
    assert len(asked) <= 1.2 * sum(asked) / KEYS_PER_HOLD and max(rows) <= ROWS_PER_HOLD + RUN * parts


# ---------------------------------------------------------------- how much a hold of the gate reads


class Asked(FakeSession):
    """Notes how many keys each call asks for."""

    def __init__(self, rows: dict[bytes, bytes]) -> None:
        super().__init__(rows)
        self.asked: list[int] = []

    def keys_there(self, keys: Sequence[bytes]) -> list[bytes]:
        self.asked.append(len(keys))
        return super().keys_there(keys)


def held(lookup: GroupLookup, session: Any) -> tuple[Callable[[Callable[[Any], bool]], bool], list[int]]:
    """A ``read`` for walkers, and the rows that each call of it has read."""
    rows: list[int] = []

    def read(step: Callable[[Any], bool]) -> bool:
        before = lookup.rows_read
        done = step(session)
        rows.append(lookup.rows_read - before)
        return done

    return read, rows


@pytest.mark.parametrize("walk", ["forward", "all"])
def test_a_long_prompt_is_read_in_as_few_holds_as_may_be(walk: str) -> None:
    shelf, group = Shelf(600 * RUN), make_group("full", Need.all())
    shelf.store(group, group.full, set(range(600 * RUN)))
    lookup = shelf.lookup(group, group.full, [group.full])
    read, rows = held(lookup, FakeSession(shelf.rows))
    if walk == "forward":
        assert walk_forward(lookup, 600 * RUN, read) == 600 * RUN
    else:
        assert not walk_all(lookup, 0, 600 * RUN, read, to_first_gap=False)
    assert rows == [ROWS_PER_HOLD, ROWS_PER_HOLD, 600 - 2 * ROWS_PER_HOLD] and lookup.gapped == []
    assert lookup.found.present == (1 << 600 * RUN) - 1


def test_a_walk_that_goes_on_reads_the_run_of_its_first_chunk_again() -> None:
    shelf, group = Shelf(5 * RUN), make_group("full", Need.all())
    shelf.store(group, group.full, set(range(4 * RUN)))
    lookup = shelf.lookup(group, group.full, [group.full])
    lookup.found.present = (1 << 2 * RUN + 3) - 1
    read, rows = held(lookup, FakeSession(shelf.rows))
    assert walk_forward(lookup, 5 * RUN, read, 2 * RUN + 3) == 4 * RUN
    assert rows == [3], "runs 2 and 3, and 4, which lacks its first chunk"
    del shelf.rows[shelf.prompt.key(group, group.full, 2 * RUN)]
    assert walk_forward(lookup, 5 * RUN, read, 2 * RUN + 3) == 2 * RUN, "what is read again may have been dropped"
    assert walk_forward(lookup, RUN, read) == RUN and lookup.found.present == (1 << RUN) - 1


def test_windows_are_searched_from_the_end_in_holds_of_a_bounded_size() -> None:
    shelf, group = Shelf(20 * RUN), make_group("window", Need.window_of(16))
    shelf.store(group, group.full, {5})
    lookup = shelf.lookup(group, group.full, [group.full])
    read, rows = held(lookup, FakeSession(shelf.rows))
    assert walk_back([lookup], 16, 20 * RUN, read) == 6
    assert rows[:2] == [ROWS_PER_HOLD, ROWS_PER_HOLD] and sum(rows) <= 20 * RUN
    shelf.store(group, group.full, {20 * RUN - 1})
    again = shelf.lookup(group, group.full, [group.full])
    read, rows = held(again, FakeSession(shelf.rows))
    assert walk_back([again], 16, 20 * RUN, read) == 20 * RUN
    assert rows == [RUN - 1], "of the last run only; its last chunk is in the row of its first one"
    assert walk_back([], 16, 7, read) == 7 and walk_back([again], 16, 0, read) == 0 and len(rows) == 1


@pytest.mark.parametrize(
    ("parts", "asked"), [(1, [4, 8, 16, 32, 64, 76]), (3, [12, 24, 48, 96, 192, 228]), (200, [400, 400, 400])]
)
def test_runs_that_are_missing_are_asked_for_in_bulks_that_grow(parts: int, asked: list[int]) -> None:
    """Keys of at most 512 in one bulk; two keys count as a row."""
    shelf, group = Shelf(200 * RUN), make_group("full", Need.all())
    lookup = shelf.lookup(group, group.full, [group.full])
    lookup.use_parts((group.full,))
    lookup._useful = lookup._useful._replace(packed=[bytes([n]) * 8 for n in range(parts)])
    session: Any = Asked({})
    end = 200 if parts < 100 else 6
    assert lookup.next_present(session, 0, end, 10_000) == end
    assert session.asked == asked and lookup.gapped == list(range(end))
    assert lookup.rows_read == sum(keys // 2 for keys in asked)
    lookup.rows_read = 7
    session.asked.clear()
    assert lookup.next_present(session, 0, end, 7) == 0 and session.asked == [], "the budget is spent"
    assert lookup.next_present(session, 0, end, 8) == min(4, 512 // parts) and len(session.asked) == 1


def test_where_no_part_helps_nothing_is_asked_for() -> None:
    shelf, group = Shelf(3 * RUN), make_group("full", Need.all(), heads=2)
    lookup = shelf.lookup(group, LEFT, [RIGHT])
    session: Any = Asked({})
    assert lookup.parts == () and lookup.next_present(session, 0, 3, 99) == 3 and session.asked == []
    found = lookup.read_run(session, 1, stop_at_gap=False)
    assert (found.covered, found.claimed, found.whole, lookup.rows_read) == (0, 0, False, 0) and lookup.gapped == [1]


def test_a_run_has_something_if_it_was_found_or_is_being_written() -> None:
    shelf, group = Shelf(4 * RUN), make_group("full", Need.all())
    shelf.store(group, group.full, {RUN + 3})
    shelf.store(group, group.full, {2 * RUN + 5}, claimed=True)
    lookup = shelf.lookup(group, group.full, [group.full])
    session: Any = FakeSession(shelf.rows)
    for run in range(4):
        lookup.read_run(session, run, stop_at_gap=False)
    assert [lookup.has_some(run) for run in range(4)] == [False, True, True, False]
    assert lookup.found.present == 1 << RUN + 3 and lookup.found.claimed == 1 << 2 * RUN + 5
    assert lookup.gapped == [0, 1, 2, 3] and lookup.keys_within(3) == [
        shelf.prompt.key(group, group.full, chunk) for chunk in range(3 * RUN + 1, 4 * RUN)
    ]


@pytest.mark.parametrize(
    ("chunks", "length", "runs"),
    [
        (0, RUN, []), (1, RUN, [(0, 1)]), (RUN, RUN, [(0, RUN)]), (RUN + 1, RUN, [(0, RUN), (RUN, 1)]),
        (3, 1, [(0, 1), (1, 1), (2, 1)]),
    ],
)  # fmt: skip
def test_a_prompt_consists_of_runs(chunks: int, length: int, runs: list[tuple[int, int]]) -> None:
    prompt = Shelf(chunks, length).prompt
    assert prompt.runs() == len(runs) and [prompt.run(n) for n in range(len(runs))] == runs
    assert prompt.keyed is (length == 1) and prompt.joined == b"".join(prompt.hashes)
