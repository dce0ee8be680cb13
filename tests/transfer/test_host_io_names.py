"""Transfers of pages that are named by hashes and by keys, with units that begin in the middle of a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import kvfs
from kvfs import PageOutcome
from kvfs.errors import ConfigError
from kvfs.pages.chunk_set import bits_of
from tests.stores import corrupt, tokens_of

PAGE, BLOCK, CHUNKS = 32, 16, 40
LAYOUT = kvfs.PageLayout.kv(layers=2, kv_heads=4, head_dim=8, dtype="bfloat16", page_tokens=PAGE)
SECONDS = 60.0


class Engine:
    """Blocks of 16 tokens: unit n holds the block n, in an order of its own."""

    def __init__(self, heads: tuple[int, int] = (0, 4), *, filled: bool = True) -> None:
        whole = np.random.default_rng(1).integers(0, 65536, (2, 2 * CHUNKS, BLOCK, 4, 16), dtype="uint16")
        mine = whole[:, :, :, heads[0] : sum(heads)]
        self.memory = np.ascontiguousarray(mine) if filled else np.full_like(mine, 0xA5A5)
        self.kv = kvfs.describe(LAYOUT.groups[0], self.memory, "layer,block,token,head,2*dim", first_head=heads[0])

    def pages(self, chunks: list[int]) -> bytes:
        return self.memory[:, [2 * c + i for c in chunks for i in (0, 1)]].tobytes()


@pytest.fixture
def store(store_path: Path) -> Iterator[kvfs.Store]:
    with kvfs.open(store_path, capacity="32MiB") as store:
        yield store


@pytest.fixture
def ns(store: kvfs.Store) -> kvfs.Namespace:
    return store.namespace("model", LAYOUT, "1")


def units(chunks: list[int]) -> list[int]:
    """The unit ids of these pages."""
    return [2 * c + i for c in chunks for i in (0, 1)]


def keys_of(chunks: list[int]) -> list[bytes]:
    return [b"key %d" % c for c in chunks]


def test_a_tail_is_saved_and_loaded_with_its_units_only(ns: kvfs.Namespace) -> None:
    tokens, engine, other = tokens_of(1, CHUNKS, PAGE), Engine(), Engine(filled=False)
    hashes = ns.chunk_hashes(tokens)
    first, every = 33, list(range(CHUNKS))
    with ns.attach(engine.kv) as io:
        assert (
            io.save(ns.prompt(tokens).plan({"full": every[:first]}), units(every[:first])).wait(SECONDS).pages == first
        )
        plan = ns.prompt(hashes=hashes).plan({"full": every[first:]})
        done = io.save(plan, units(every[first:]), first_unit=2 * first).wait(SECONDS)
        assert (done.pages, done.reason) == (CHUNKS - first, "")
        early = io.save(ns.prompt(tokens).plan({"full": [first - 1]}), units(every[first:]), first_unit=2 * first)
        assert early.wait(SECONDS).reason == "source", "there is no unit of this page"
    with ns.attach(other.kv) as io, ns.prompt(hashes=hashes).select({"full": first}, CHUNKS) as match:
        done = io.load(match, units(every[first:]), first_token=first * PAGE, first_unit=2 * first).wait(SECONDS)
        assert done.tokens == CHUNKS * PAGE and done.pages == CHUNKS - first
    assert other.pages(every[first:]) == engine.pages(every[first:])
    assert (other.memory[:, units(every[:first])] == 0xA5A5).all()


def test_pages_of_keys_are_saved_and_loaded_one_by_one(store: kvfs.Store, ns: kvfs.Namespace) -> None:
    """In any order, behind pages without a source, and behind pages that are damaged."""
    engine, other, wanted = Engine(), Engine(filled=False), [7, 3, 30, 1, 12, 39]
    outcomes: dict[int, PageOutcome] = {}

    def note(page: kvfs.PageDone) -> None:
        outcomes[page.chunk] = page.outcome

    with ns.attach(engine.kv) as io:
        pages = ns.prompt(keys=keys_of(wanted))
        plan = pages.plan({"full": range(6)})
        ids = units(wanted)
        ids[2] = -1  # of the second page
        done = io.save(plan, ids, on_page=note).wait(SECONDS)
        assert (done.pages, done.declined, done.reason) == (5, 1, "source")
        assert outcomes == {n: PageOutcome.DECLINED if n == 1 else PageOutcome.STORED for n in range(6)}
        again = io.save(plan, units(wanted)).wait(SECONDS)
        assert (again.pages, again.skipped) == (1, 5)
        assert io.save(plan, units(wanted)).wait(SECONDS).nbytes == 0
    assert ns.present_keys(keys_of(wanted)) == [True] * 6 and not ns.match(tokens_of(1, 1, PAGE))
    backwards = wanted[::-1]
    page = bytearray(LAYOUT.page_bytes)
    with ns.match_keys(keys_of([30])) as match:
        assert ns.get(match, page) == 1
    corrupt(Path(store.path), bytes(page))
    outcomes.clear()
    names = [b"unknown", *keys_of(backwards)]
    ring = 2 * LAYOUT.page_bytes  # the load takes several batches
    with ns.attach(other.kv, ring_bytes=ring) as io, ns.prompt(keys=names).select({"full": 0}, 7) as match:
        assert match.group("full").present == bits_of(range(1, 7))
        done = io.load(match, [0, 1, *units(backwards)], on_page=note).wait(SECONDS)
        assert (done.tokens, done.pages, done.reason) == (0, 5, "unreadable")
    bad = {0, 1 + backwards.index(30)}
    assert outcomes == {n: PageOutcome.UNREADABLE if n in bad else PageOutcome.LOADED for n in range(7)}
    fine = [c for c in wanted if c != 30]
    assert other.pages(fine) == engine.pages(fine)
    assert (other.memory[:, units([0, 30])] == 0xA5A5).all(), "a page that is lost touched the engine's memory"


def test_keys_of_ranks_make_whole_pages(ns: kvfs.Namespace) -> None:
    left, right, whole = Engine((0, 2)), Engine((2, 2)), Engine(filled=False)
    some = [4, 2]
    for rank in (left, right):
        with ns.attach(rank.kv) as io:
            assert ns.present_keys(keys_of(some)) == [False, False], "a rank's share is no page"
            done = io.save(ns.prompt(keys=keys_of(some)).plan({"full": [0, 1]}), units(some)).wait(SECONDS)
            assert done.pages == 2
    with ns.attach(whole.kv) as io, ns.match_keys(keys_of(some)) as match:
        assert io.load(match, units(some)).wait(SECONDS).tokens == 2 * PAGE
    assert whole.pages(some) == Engine().pages(some)


def test_opaque_pages_are_saved_under_keys_only(store: kvfs.Store) -> None:
    """A plan of chunks would put 32 pages into one row, where no lookup by key finds them."""
    layout = kvfs.PageLayout.opaque(600, 16)
    ns = store.namespace("opaque", layout, "1")
    memory = np.random.default_rng(2).integers(0, 256, (50, 600), dtype="uint8")
    kv = kvfs.describe(layout.groups[0], [memory], "slot,dim")
    plan = ns.prompt(keys=keys_of(list(range(36)))).plan({"opaque": range(36)})
    with ns.attach(kv) as io:
        with pytest.raises(ConfigError, match=r"ns.prompt\(keys="):
            io.save(replace(plan, keyed=False), range(36))
        assert io.save(plan, range(36)).wait(SECONDS).pages == 36
        assert ns.present_keys(keys_of(list(range(36)))) == [True] * 36
        memory[36:] = 0
        with ns.prompt(keys=keys_of([35, 5])).select({"opaque": 0}, 2) as match:
            assert io.load(match, [40, 41]).wait(SECONDS).pages == 2
    assert (memory[[40, 41]] == memory[[35, 5]]).all()


def test_what_cannot_be_honoured_is_refused(ns: kvfs.Namespace) -> None:
    engine = Engine()
    plan = ns.prompt(keys=keys_of([1, 2])).plan({"full": [0, 1]})
    with ns.attach(engine.kv) as io:
        with pytest.raises(ConfigError, match="names page 7"):
            io.save(replace(plan, missing={"full": (0, 7)}), units([0, 1]))
        for first in (-1, 1.0, True, 1 << 30, {"window": 0}):
            with pytest.raises(ConfigError, match="first_unit"):
                io.save(plan, units([0, 1]), first_unit=first)  # type: ignore[arg-type]
