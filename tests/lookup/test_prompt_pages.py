"""PromptPages: decisions page by page, against what ``match`` and ``plan_save`` say of the same prompt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvfs
from kvfs.lookup import matcher, prompt_pages
from kvfs.lookup.search import Found
from kvfs.native import library
from kvfs.pages.chunk_set import bits_of
from kvfs.pages.layout import Cell, Group, Need, PageLayout
from tests.stores import TINY_BYTES, seeded, tiny, tokens_of

CHUNK = 16


@pytest.fixture
def ns(store_path: Path) -> Iterator[kvfs.Namespace]:
    with kvfs.open(store_path, capacity="32MiB") as store:
        yield store.namespace("model", tiny(), "1")


def bits(numbers: range) -> int:
    return sum(1 << n for n in numbers)


def test_a_prompt_that_grows_has_the_hashes_of_the_whole(ns: kvfs.Namespace) -> None:
    tokens, extra = tokens_of(1, 9), {0: b"tenant", 5: b"image"}
    pages = ns.prompt(tokens[:7], extra=extra)
    for a, b in ((7, 8), (8, 40), (40, 41), (41, len(tokens) - 3), (len(tokens) - 3, len(tokens))):
        pages.extend(tokens[a:b])
    assert list(pages.hashes) == ns.chunk_hashes(tokens, extra=extra) and pages.tokens == len(tokens)
    assert list(ns.prompt(tokens).hashes) != list(pages.hashes)


def test_look_sees_stored_pages_also_behind_a_gap(ns: kvfs.Namespace) -> None:
    tokens = tokens_of(2, 12)
    ns.put(tokens, seeded(2, 12 * TINY_BYTES))
    pages = ns.prompt(tokens)
    (name,) = pages.stored
    assert pages.stored[name] == 0
    pages.look()
    assert pages.stored[name] == bits(range(12)) and pages.writing[name] == 0
    pages.forget()
    assert pages.stored[name] == 0


def test_a_prefix_is_looked_up_to_its_end(ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    monkeypatch.setattr(matcher, "read_behind_gaps", lambda *_, **__: read.append(1))
    tokens = tokens_of(7, 80)
    ns.put(tokens[: 40 * CHUNK], seeded(7, 40 * TINY_BYTES))
    (name,) = (pages := ns.prompt(tokens)).stored
    pages.look(prefix=True)
    assert pages.stored[name] == bits(range(40)) and not read
    pages.look(40)
    assert pages.stored[name] == bits(range(40)) and read, "what follows may be stored behind a gap"
    with pytest.raises(kvfs.ConfigError, match="begins with chunk 0"):
        pages.look(1, prefix=True)


def test_exactly_the_chosen_pages_are_loaded(ns: kvfs.Namespace) -> None:
    layout, tokens = ns.layout, tokens_of(3, 6)
    group = layout.groups[0]
    blocks = np.frombuffer(seeded(3, 6 * TINY_BYTES), dtype=np.uint8)
    ns.put(tokens, blocks.tobytes())
    store = np.zeros((8, CHUNK, len(group.layers), group.heads, group.cell.nbytes), dtype=np.uint8)
    kv = kvfs.describe(group, store, "block,token,layer,head,dim")
    pages = ns.prompt(tokens)
    pages.look()
    with ns.attach(kv) as io, pages.select({group.name: 2}, end=5) as match:
        assert match.tokens == 5 * CHUNK
        result = io.load(match, [-1, -1, 3, 4, 5]).wait(20)
        assert result is not None and (result.pages, result.declined, result.tokens) == (3, 0, 5 * CHUNK)
    pagewise = blocks.reshape(6, len(group.layers), group.heads, CHUNK, group.cell.nbytes).transpose(0, 3, 1, 2, 4)
    assert (store[3:6] == pagewise[2:5]).all() and not store[:3].any() and not store[6:].any()


def looked_up(ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch) -> tuple[prompt_pages.PromptPages, list[int], Group]:
    """Pages of which five are stored, right after their lookup; and one for each lookup from now on."""
    tokens, looked = tokens_of(8, 6), list[int]()
    ns.put(tokens[: 5 * CHUNK], seeded(8, 5 * TINY_BYTES))
    pages = ns.prompt(tokens)
    pages.look(prefix=True)
    present = matcher.Matcher.present
    monkeypatch.setattr(matcher.Matcher, "present", lambda *a, **k: (looked.append(1), present(*a, **k))[1])
    return pages, looked, ns.layout.groups[0]


def test_pages_that_were_just_looked_up_are_selected_without_the_index(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, looked, group = looked_up(ns, monkeypatch)
    with pages.select({group.name: 0}, end=4, known=True) as match:
        out = bytearray(match.nbytes)
        assert (
            match.tokens == 4 * CHUNK
            and ns.get(match, out) == 4
            and bytes(out) == seeded(8, 5 * TINY_BYTES)[: len(out)]
        )
    assert bool(looked) == (library.loaded() is None)  # without it only the index thread can tell that nothing changed
    for first, known in ((0, False), (2, True)):  # of a longer prompt the engine has a part: few segments are wanted
        looked.clear()
        pages.select({group.name: first}, end=5, known=known).close()
        assert looked
    looked.clear()
    pages.select({group.name: 0}, end=4).close()
    assert looked, "unless it is said that they are known"


def test_where_only_the_index_thread_can_tell_pages_are_looked_up_again(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, looked, group = looked_up(ns, monkeypatch)
    monkeypatch.setattr(ns._c.index, "native_session", lambda: None)
    with pages.select({group.name: 0}, end=4, known=True) as match:
        out = bytearray(match.nbytes)
        assert ns.get(match, out) == 4 and bytes(out) == seeded(8, 5 * TINY_BYTES)[: len(out)]
    assert len(looked) == 1


def test_what_was_purged_since_it_was_looked_up_is_not_selected(store_path: Path) -> None:
    with kvfs.open(store_path, capacity="32MiB") as store:
        ns, tokens = store.namespace("model", tiny(), "1"), tokens_of(9, 3)
        name = ns.layout.groups[0].name
        ns.put(tokens, seeded(9, 3 * TINY_BYTES))
        pages = ns.prompt(tokens)
        pages.look(prefix=True)
        store.purge(ns, prefix=tokens)
        with pages.select({name: 0}, end=3, known=True) as match:
            assert not match.group(name).present and ns.get(match, bytearray(match.nbytes)) == 0


def test_a_page_that_is_not_stored_makes_the_load_fail(ns: kvfs.Namespace) -> None:
    tokens, group = tokens_of(4, 6), ns.layout.groups[0]
    ns.put(tokens[: 4 * CHUNK], seeded(4, 4 * TINY_BYTES))
    store = np.zeros((8, CHUNK, len(group.layers), group.heads, group.cell.nbytes), dtype=np.uint8)
    with ns.attach(kvfs.describe(group, store, "block,token,layer,head,dim")) as io:
        pages = ns.prompt(tokens)
        result = io.load(pages.select({group.name: 2}, end=6), [-1, -1, 2, 3, 4, 5]).wait(20)
        assert result is not None and result.pages < 4 and result.declined


def test_a_plan_saves_what_it_names(ns: kvfs.Namespace) -> None:
    tokens, group = tokens_of(5, 6), ns.layout.groups[0]
    store = np.random.default_rng(5).integers(0, 256, (8, CHUNK, len(group.layers), group.heads, group.cell.nbytes))
    with ns.attach(kvfs.describe(group, store.astype(np.uint8), "block,token,layer,head,dim")) as io:
        pages = ns.prompt(tokens)
        assert io.save(pages.plan({group.name: [0, 1, 2]}), range(6)).wait(20).pages == 3  # type: ignore[union-attr]
        pages.look()
        assert pages.stored[group.name] == bits(range(3))
        assert io.save(pages.plan({group.name: [3, 4]}), range(6)).wait(20).pages == 2  # type: ignore[union-attr]
    assert ns.match(tokens).chunks == 5


def test_a_plan_names_the_pages_that_were_asked_for_in_any_order(ns: kvfs.Namespace) -> None:
    pages = ns.prompt(tokens_of(7, 6))
    name = ns.layout.groups[0].name
    for chunks in ([0, 5, 2], [0, 0, 2], [1, 1]):
        plan = pages.plan({name: chunks})
        assert bits_of(plan.missing[name]) == sum(1 << chunk for chunk in {*chunks})


def test_chunks_outside_the_prompt_are_refused(ns: kvfs.Namespace) -> None:
    pages = ns.prompt(tokens_of(6, 3))
    name = ns.layout.groups[0].name
    for wrong in (
        lambda: pages.select({name: 0}, end=4),
        lambda: pages.plan({name: [3]}),
        lambda: pages.plan({"x": []}),
    ):
        with pytest.raises(kvfs.ConfigError):
            wrong()


def test_a_match_of_nothing_names_no_page(ns: kvfs.Namespace) -> None:
    tokens = tokens_of(1, 40)
    ns.put(tokens, seeded(1, 40 * TINY_BYTES))
    group = ns.layout.groups[0].name
    with ns.prompt(tokens).select({group: 0}, end=0) as nothing, ns.prompt(tokens).select({group: 32}, end=40) as last:
        assert not nothing and nothing.groups[0].count == 0 and not nothing.groups[0].hits and not nothing.segments
        assert [hit.run for hit in last.groups[0].hits] == [1] and last.groups[0].present == 0xFF << 32


def test_a_prompt_whose_first_page_is_lost_matches_nothing(memory_path: Path) -> None:
    """The row that it shares with the next pages is still there."""
    with kvfs.open(memory_path / "store", capacity="32MiB") as store:
        ns, tokens = store.namespace("model", tiny(), "1"), tokens_of(2, 3)
        ns.put(tokens, seeded(2, 3 * TINY_BYTES))
        assert store.purge(ns, chunks=ns.chunk_hashes(tokens)[:1]).pages == 1
        with ns.match(tokens) as match:
            assert not match and match.groups[0].count == 0 and not match.groups[0].hits and not match.segments


# -- what a prompt may be ----------------------------------------------------------------------


def test_a_prompt_has_at_most_so_many_tokens(ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_pages, "TOKENS_MAX", 2 * CHUNK)
    tokens = tokens_of(1, 3)
    pages = ns.prompt(tokens[: 2 * CHUNK - 1])
    pages.extend(tokens[:1])
    assert (pages.chunks, pages.tokens) == (2, 2 * CHUNK)
    for refused in (lambda: pages.extend([1]), lambda: ns.prompt(tokens[: 2 * CHUNK + 1])):
        with pytest.raises(kvfs.ConfigError, match="33 token ids: at most 32 in one prompt"):
            refused()
    assert pages.chunks == 2
    hashes = ns.chunk_hashes(tokens[: 2 * CHUNK])
    assert ns.prompt(hashes=hashes).chunks == 2
    with pytest.raises(kvfs.ConfigError, match="3 hashes: at most those of 32 tokens in one prompt"):
        ns.prompt(hashes=[*hashes, hashes[0]])


@pytest.mark.parametrize(
    ("extra", "message"),
    [([1], "extra is list: pass a mapping"), ({-1: b"x"}, "extra maps -1 to bytes"), ({"1": b"x"}, "extra maps '1'"),
     ({1: "x"}, "extra maps 1 to str"), ({True: b"x"}, "extra maps True"), ({0: b"x", 2: None}, "extra maps 2 to")],
)  # fmt: skip
def test_extra_keys_that_are_none_are_refused(ns: kvfs.Namespace, extra: Any, message: str) -> None:
    for refused in (ns.prompt, ns.match):
        with pytest.raises(kvfs.ConfigError, match=message):
            refused(tokens_of(1, 3), extra=extra)


def test_the_tokens_that_are_left_to_compute_are_not_looked_up(ns: kvfs.Namespace) -> None:
    tokens = tokens_of(1, 3)
    ns.put(tokens, seeded(1, 3 * TINY_BYTES))
    for leave, chunks in ((0, 3), (1, 2), (CHUNK, 2), (CHUNK + 1, 1), (3 * CHUNK, 0), (1000, 0)):
        with ns.match(tokens, leave=leave) as match:
            assert match.chunks == chunks
    for wrong in (-1, 1.0, True, None):
        with pytest.raises(kvfs.ConfigError, match="pass the number of tokens to compute, 0 or more"):
            ns.match(tokens, leave=wrong)  # type: ignore[arg-type]


# -- what a reader needs -----------------------------------------------------------------------


@pytest.fixture
def hybrid(store_path: Path) -> Iterator[kvfs.Namespace]:
    cell = Cell("bf16", 2)
    groups = [
        Group("full", (0, 1), 1, cell, Need.all(), CHUNK),
        Group("window", (2,), 1, cell, Need.window_of(3 * CHUNK), CHUNK),
    ]
    with kvfs.open(store_path, capacity="32MiB") as store:
        yield store.namespace("hybrid", PageLayout.of(groups, CHUNK), "1")


def put(ns: kvfs.Namespace, tokens: list[int], first: int, window: tuple[int, int], end: int) -> None:
    counts = {"full": end - first, "window": window[1] - window[0]}
    pages = {g.name: bytes([7]) * g.page_bytes * counts[g.name] for g in ns.layout.groups}
    assert not ns.put(tokens, pages, start={"full": first, "window": window[0]}).declined


def test_a_prompt_is_restorable_where_each_group_has_what_it_needs(hybrid: kvfs.Namespace) -> None:
    tokens = tokens_of(1, 9)
    pages = hybrid.prompt(tokens)
    pages.look()
    assert pages.restorable() == 0
    put(hybrid, tokens, 0, (3, 6), 8)
    pages.look()
    assert pages.stored == {"full": bits(range(8)), "window": bits(range(3, 6))} and pages.restorable() == 6
    assert [len(pages.joined_hashes(n)) for n in (0, 2, 9, 99)] == [0, 64, 288, 288]
    assert pages.joined_hashes(2) == b"".join(hybrid.chunk_hashes(tokens)[:2])
    assert pages.needed(0, 9) == {"full": 0, "window": 6} and pages.needed(0, 2) == {"full": 0, "window": 0}
    assert pages.needed(7, 9) == {"full": 7, "window": 7} and pages.needed(2, 6) == {"full": 2, "window": 3}


def test_a_look_replaces_what_is_known_from_its_first_chunk_on(ns: kvfs.Namespace) -> None:
    tokens = tokens_of(1, 6)
    name = ns.layout.groups[0].name
    pages = ns.prompt(tokens)
    pages.stored, pages.writing = {name: 0b111}, {name: 0b110}
    pages.look(2)
    assert pages.stored == {name: 0b011} and pages.writing == {name: 0b010}, "before it nothing was asked"
    ns.put(tokens, seeded(1, 6 * TINY_BYTES))
    pages.look(4)
    assert pages.stored == {name: 0b110011}
    pages.look()
    assert pages.stored == {name: 0b111111} and pages.writing == {name: 0}


def test_pages_of_opaque_keys_have_no_tokens(store_path: Path) -> None:
    with kvfs.open(store_path, capacity="32MiB") as store:
        opaque = store.namespace("opaque", kvfs.PageLayout.opaque(100, 16), "1")
        with pytest.raises(kvfs.ConfigError, match="use match_keys and put_keys"):
            opaque.match([1, 2, 3])
        pages = opaque.prompt(keys=[b"a", b"b", b"c"])
        assert pages.joined_hashes(2) == b"".join(pages.hashes[:2]) and pages.chunks == 3


def test_what_is_being_written_is_not_stored_and_earlier_chunks_stay_as_they_were_known(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, (group,) = ns.prompt(tokens_of(2, 8)), ns.layout.groups
    answers = iter([(0b0011_0110, 0b0111_0000), (0b1100_0000, 0b0010_1000), (0b0001, 0b0110)])
    asked: list[tuple[int, int]] = []

    def present(_: Any, prompt: Any, number: int, group: Group, part: Any, first: int, end: int, **how: Any) -> Any:
        asked.append((first, end))
        found = Found(*next(answers))
        return SimpleNamespace(group=group, found=found)

    monkeypatch.setattr(matcher.Matcher, "present", present)
    pages.look()
    assert (pages.stored[group.name], pages.writing[group.name]) == (0b0011_0110, 0b0100_0000)
    pages.look(4)
    assert (pages.stored[group.name], pages.writing[group.name]) == (0b1100_0110, 0b0010_0000)
    pages.look(0)
    assert (pages.stored[group.name], pages.writing[group.name]) == (0b0001, 0b0110)
    assert asked == [(0, 8), (4, 8), (0, 8)]


CELL = Cell("bf16", 16)
HYBRID = PageLayout.of(
    [
        Group("full", (0,), 1, CELL, Need.all(), 16),
        Group("window", (1,), 1, CELL, Need.window_of(32), 16),
        Group("state", (2,), 1, CELL, Need.exact(), 1),
    ],
    16,
)


@pytest.mark.parametrize(
    ("full", "window", "state", "chunks"),
    [
        (0b1111, 0b1111, 0b1111, 4), (0b1111, 0b1100, 0b1000, 4), (0b1111, 0b0110, 0b1111, 3),
        (0b0111, 0b1111, 0b1011, 2), (0b1111, 0b1111, 0b0000, 0), (0b1110, 0b1111, 0b1111, 0),
        (0b1111, 0b0001, 0b0001, 1),
    ],
)  # fmt: skip
def test_the_restorable_length_has_all_pages_that_it_needs(
    store_path: Path, full: int, window: int, state: int, chunks: int
) -> None:
    with kvfs.open(store_path, capacity="32MiB") as store:
        pages = store.namespace("hybrid", HYBRID, "1").prompt(tokens_of(1, 4))
        assert pages.restorable() == 0
        pages.stored = {"full": full, "window": window, "state": state}
        assert pages.restorable() == chunks
        assert pages.needed(0, 4) == {"full": 0, "window": 2, "state": 3}
        assert pages.needed(3, 4) == {"full": 3, "window": 3, "state": 3}
        assert pages.needed(0, 1) == {"full": 0, "window": 0, "state": 0}


@pytest.mark.parametrize("wanted", [None, 3, ["full"], {"full": 3}, {"full": "34"}, {"full": None}])
def test_a_plan_of_anything_but_lists_of_chunks_is_refused(ns: kvfs.Namespace, wanted: Any) -> None:
    with pytest.raises(kvfs.ConfigError, match="map names of groups to lists of chunk numbers"):
        ns.prompt(tokens_of(1, 4)).plan(wanted)
