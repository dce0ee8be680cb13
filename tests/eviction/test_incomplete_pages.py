"""Ranks that store parts of the same pages: what a dead rank leaves is completed by a later save, or ages out."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest

import kvfs
from kvfs import Part
from kvfs.system.files import Files
from kvfs.testing import FakeClock
from tests.lookup.test_part_cover import CHUNKS, cut, layout_of, ranks_of
from tests.stores import restored, scanned, seeded, segment_files, tokens_of

LAYOUT = layout_of(4)
GROUP = LAYOUT.groups[0]
DEGREES = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4), (4, 2)]


class Clock(FakeClock, Files):
    """The real file system under a clock that is set by hand."""


@pytest.fixture
def store(memory_path: Path) -> Iterator[kvfs.Store]:
    with kvfs.open(memory_path / "store", capacity="64MiB", files=Clock()) as made:
        yield made


def pages_of(seed: int, chunks: int = CHUNKS) -> bytes:
    return seeded(seed, chunks * LAYOUT.page_bytes)


def save(ns: kvfs.Namespace, seed: int, parts: list[Part], save_id: bytes, chunks: int = CHUNKS) -> int:
    """Each rank stores its part; the chunks stored."""
    tokens, pages = tokens_of(seed, chunks), pages_of(seed, chunks)
    puts = [ns.put(tokens, cut(pages, GROUP, part), part=part, attempt=save_id) for part in parts]
    assert not any(put.declined or put.in_flight for put in puts)
    return sum(put.stored for put in puts)


def is_whole(ns: kvfs.Namespace, seed: int, chunks: int = CHUNKS) -> bool:
    data = restored(ns, tokens_of(seed, chunks))
    assert data == pages_of(seed, chunks)[: len(data)]
    return len(data) == chunks * LAYOUT.page_bytes


@pytest.mark.parametrize("first", DEGREES)
def test_a_second_save_of_any_degree_completes_what_dead_ranks_left(memory_path: Path, first: tuple[int, int]) -> None:
    """All subsets of ranks that lived; the new ranks store no more than they must, and readers see whole pages."""
    path, seed = memory_path / "store", 0
    written = list(ranks_of(4, *first))
    with kvfs.open(path, capacity="64MiB") as store:
        ns = store.namespace("m", LAYOUT, revision="r1")
        for second in DEGREES:
            for alive in range(len(written)):
                for lived in list(combinations(written, alive))[:6]:
                    seed += 1
                    save(ns, seed, list(lived), b"save no1")
                    assert not is_whole(ns, seed)
                    save(ns, seed, list(ranks_of(4, *second)), b"save no2")
                    assert is_whole(ns, seed), (lived, second)
                    assert save(ns, seed, list(ranks_of(4, *second)), b"save no3") == 0
    (path / "index" / "CURRENT").unlink()
    with kvfs.open(path) as store:
        assert store.wait_ready()
        ns = store.namespace("m", LAYOUT, revision="r1")
        assert all(is_whole(ns, number + 1) for number in range(seed))


def evict_one(store: kvfs.Store) -> None:
    assert store.gc(store.stats()["used_bytes"] - 1)["segments_dropped"] == 1


def test_what_a_dead_rank_left_ages_out_and_can_be_saved_again(store: kvfs.Store) -> None:
    """Lookups for whole pages never touch incomplete ones, so these go before older pages that are used."""
    clock = store._shared.c.files
    assert isinstance(clock, Clock)
    ns = store.namespace("m", LAYOUT, revision="r1")
    first, second = ranks_of(4, 2, 1)
    for seed, parts in ((1, [first, second]), (2, [first]), (3, [first, second])):
        assert save(ns, seed, parts, seed.to_bytes(8, "big"), 40) == 40 * len(parts)
        store._shared.services().active.finish_all()
        clock.advance(60.0)
    clock.advance(300.0)
    assert is_whole(ns, 1, 40) and not is_whole(ns, 2, 40)
    evict_one(store)
    assert ns.match(tokens_of(2, 40), part=first).tokens == 0, "the incomplete pages"
    assert (is_whole(ns, 1, 40), is_whole(ns, 3, 40)) == (True, True)
    assert save(ns, 2, [first, second], b"save no2", 40) == 80


def test_relocated_records_keep_their_save_id(store: kvfs.Store) -> None:
    ns = store.namespace("m", LAYOUT, revision="r1")
    parts = list(ranks_of(4, 2, 1))
    save(ns, 1, parts, b"save no1", 5)
    for part in parts:
        with ns.match(tokens_of(1, 5), part=part) as match:
            store._shared.services().pins.pin(f"pin {part.head}", match)
    store._shared.services().active.finish_all()
    found = [{entry.attempt for entry in scanned(path).parts()} for path in segment_files(Path(store.path))]
    assert found == [{b"save no1"}] * 3
