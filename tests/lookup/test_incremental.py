"""A lookup that is made a piece at a time finds what a lookup in one go finds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvfs
from kvfs.errors import IndexUnavailableError
from kvfs.index.rows import RUN
from kvfs.lookup.incremental import Lookahead
from kvfs.lookup.prefix_match import PrefixMatch
from kvfs.lookup.prompt_pages import chain_of
from kvfs.pages.layout import Cell, Group, Need, PageLayout
from tests.stores import counters, segment_files

PAGE, MOST = 16, 3 * RUN + 5
CELL = Cell("bf16", 2)
FULL = [Group("full", (0, 1), 1, CELL, Need.all(), PAGE), Group("other", (2,), 1, CELL, Need.all(), PAGE)]
WINDOW = Group("window", (3,), 1, CELL, Need.window_of(5 * PAGE), PAGE)
LAYOUTS = {
    "full": PageLayout.of(FULL[:1], PAGE), "two": PageLayout.of(FULL, PAGE),
    "hybrid": PageLayout.of([*FULL, WINDOW], PAGE),
    "window": PageLayout.of([WINDOW], PAGE),
}  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[kvfs.Store]:
    with kvfs.open(tmp_path_factory.mktemp("store") / "store", capacity="64MiB") as opened:
        yield opened


def tokens_of(salt: int, chunks: int) -> list[int]:
    return [salt, *range(1, chunks * PAGE)]


def put(ns: kvfs.Namespace, tokens: Sequence[int], first: dict[str, int], count: dict[str, int]) -> None:
    pages = {g.name: b"%c" % (g.layers[0] + 1) * g.page_bytes * count[g.name] for g in ns.layout.groups}
    assert not ns.put(tokens, pages, start=first).declined


def lookahead(ns: kvfs.Namespace, tokens: Sequence[int], chunks: int) -> Lookahead:
    chain = chain_of(ns._c, ns.identity, tokens)
    return Lookahead(ns._c, ns._matcher, ns.identity, chain, [g.full for g in ns.layout.groups], chunks)


def same(found: PrefixMatch, expected: PrefixMatch) -> bool:
    pages = [[(g.name, g.first, g.count, g.sources()) for g in match.groups] for match in (found, expected)]
    return found.tokens == expected.tokens and pages[0] == pages[1] and found.last_hash == expected.last_hash


@given(st.data())
@settings(max_examples=150)
def test_a_lookup_in_pieces_finds_what_a_whole_lookup_finds(store: kvfs.Store, data: st.DataObject) -> None:
    layout = LAYOUTS[data.draw(st.sampled_from(sorted(LAYOUTS)))]
    ns = store.namespace(f"{len(layout.groups)}{layout.groups[0].name}", layout, "1")
    lengths = st.integers(0, MOST) | st.sampled_from([0, RUN, 2 * RUN, MOST])
    salt, asked = data.draw(st.integers(0, 1 << 30)), data.draw(st.integers(1, MOST))
    tokens = tokens_of(salt, MOST)
    for _ in range(data.draw(st.integers(1, 2))):
        ends = {g.name: data.draw(lengths) for g in layout.groups}
        first = {g.name: 0 if g.need.kind == "all" else data.draw(st.integers(0, ends[g.name])) for g in layout.groups}
        put(ns, tokens, first, {name: end - first[name] for name, end in ends.items()})
    with ns.match(tokens[: asked * PAGE]) as expected:
        ahead = lookahead(ns, tokens, asked)
        for number, group in enumerate(layout.groups):
            done = 0
            while group.need.kind == "all" and done < ahead.limit and data.draw(st.booleans()):
                to = data.draw(st.integers(done + 1, ahead.limit))
                there = ahead.more(number, to)
                assert expected.chunks <= ahead.limit and (there == to or ahead.limit == there)
                assert ahead.found(number, there).sources().keys() == set(range(there))
                assert {s.place.segment for row in ahead.found(number, there).sources().values() for s in row} <= (
                    ahead.held.keys()
                )
                done = to
        assert same(ahead.finish(go_on=True), expected)
        ahead.release()
    assert not ahead.held


def test_it_counts_as_one_lookup_and_its_hashes_are_remembered(store: kvfs.Store) -> None:
    ns = store.namespace("counted", LAYOUTS["full"], "1")
    tokens = tokens_of(1, MOST)
    put(ns, tokens, {"full": 0}, {"full": 40})
    before = counters(store)
    store._shared.c.chains.forget()
    ahead = lookahead(ns, tokens, MOST)
    assert ahead.more(0, 10) == 10 and len(ahead._chain.hashes) == 10
    assert ahead.more(0, 60) == 40 == ahead.limit and len(ahead._chain.hashes) == 60
    assert ahead.finish(go_on=True).chunks == 40
    assert len(ahead._chain.hashes) == 60  # the prefix ends before the others
    after = counters(store)
    names = ("lookups", "tokens_queried", "tokens_matched")
    assert [after[name] - before.get(name, 0) for name in names] == [1, MOST * PAGE, 40 * PAGE]
    assert store._shared.c.chains._longest(ahead._chain._tokens, PAGE * 4, ns.identity.seed)[1] == 60 * PAGE * 4


def test_what_was_found_remains_when_the_index_stops_answering(
    store: kvfs.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ns = store.namespace("unavailable", LAYOUTS["full"], "1")
    tokens = tokens_of(2, MOST)
    put(ns, tokens, {"full": 0}, {"full": MOST})
    ahead = lookahead(ns, tokens, MOST)
    assert ahead.more(0, RUN) == RUN

    def read(*_: Any) -> bool:
        raise IndexUnavailableError("timeout")

    monkeypatch.setattr(ns._matcher, "read", read)
    assert ahead.more(0, 2 * RUN) == RUN == ahead.limit
    assert ahead.finish(go_on=True).chunks == RUN
    assert counters(store)["lookup_unavailable_timeout"] == 1


def test_a_missing_segment_ends_the_prefix_before_its_pages(tmp_path: Path) -> None:
    path, tokens, files = tmp_path / "store", tokens_of(3, MOST), list[set[Path]]()
    for first, end in ((0, 40), (40, 70), (70, MOST)):
        with kvfs.open(path, capacity="64MiB") as store:
            put(store.namespace("missing", LAYOUTS["full"], "1"), tokens, {"full": first}, {"full": end - first})
        files.append(set(segment_files(path)) - set().union(*files))
    for file in files[1]:
        file.unlink()
    with kvfs.open(path) as store:
        ahead = lookahead(store.namespace("missing", LAYOUTS["full"], "1"), tokens, MOST)
        assert ahead.more(0, RUN) == RUN and ahead.limit == MOST
        assert ahead.more(0, 3 * RUN) == 40 == ahead.limit
        assert ahead.finish(go_on=True).chunks == 40
        assert counters(store)["lookup_segments_missing"] >= 1


def test_nothing_more_is_looked_up_for_a_load_that_has_ended(store: kvfs.Store) -> None:
    tokens = tokens_of(4, MOST)
    for name, found in (("full", RUN), ("two", 0), ("hybrid", 0), ("window", 0)):
        ns = store.namespace(f"ended {name}", LAYOUTS[name], "1")
        put(ns, tokens, {g.name: 0 for g in ns.layout.groups}, {g.name: MOST for g in ns.layout.groups})
        before = counters(store)
        ahead = lookahead(ns, tokens, MOST)
        if name != "window":
            assert ahead.more(0, RUN) == RUN
        assert ahead.finish(go_on=False).chunks == found
        assert counters(store).get("lookups", 0) - before.get("lookups", 0) == bool(found)
