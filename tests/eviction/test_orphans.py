"""Ranks that write together: what a dead one leaves blocks nobody, and goes first."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest

import kvfs
from kvfs import Part
from kvfs.eviction.orphans import NO_SHAPE, CohortTable, Shape, collect, orphans
from kvfs.eviction.survey import Candidate
from kvfs.pages.identity import Described
from kvfs.segments.scan import read_namespace
from kvfs.system.files import Files
from kvfs.testing import FakeClock
from tests.lookup.test_part_cover import CHUNKS, LAYERS, cut, layout_of, ranks_of
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


def save(ns: kvfs.Namespace, seed: int, parts: list[Part], attempt: bytes, chunks: int = CHUNKS) -> int:
    """Each rank stores its part; the chunks stored."""
    tokens, pages = tokens_of(seed, chunks), pages_of(seed, chunks)
    puts = [ns.put(tokens, cut(pages, GROUP, part), part=part, attempt=attempt) for part in parts]
    assert not any(put.declined or put.in_flight for put in puts)
    return sum(put.stored for put in puts)


def is_whole(ns: kvfs.Namespace, seed: int, chunks: int = CHUNKS) -> bool:
    data = restored(ns, tokens_of(seed, chunks))
    assert data == pages_of(seed, chunks)[: len(data)]
    return len(data) == chunks * LAYOUT.page_bytes


@pytest.mark.parametrize("first", DEGREES)
def test_a_second_attempt_of_any_degree_completes_what_dead_ranks_left(
    memory_path: Path, first: tuple[int, int]
) -> None:
    """All subsets of ranks that lived; the new ranks store no more than they must, and readers see whole pages."""
    path, seed = memory_path / "store", 0
    written = list(ranks_of(4, *first))
    with kvfs.open(path, capacity="64MiB") as store:
        ns = store.namespace("m", LAYOUT, revision="r1")
        for second in DEGREES:
            for alive in range(len(written)):
                for lived in list(combinations(written, alive))[:6]:
                    seed += 1
                    save(ns, seed, list(lived), b"attempt1")
                    assert not is_whole(ns, seed)
                    save(ns, seed, list(ranks_of(4, *second)), b"attempt2")
                    assert is_whole(ns, seed), (lived, second)
                    assert save(ns, seed, list(ranks_of(4, *second)), b"attempt3") == 0
    (path / "index" / "CURRENT").unlink()
    with kvfs.open(path) as store:
        assert store.wait_ready()
        ns = store.namespace("m", LAYOUT, revision="r1")
        assert all(is_whole(ns, number + 1) for number in range(seed))


# ---------------------------------------------------------------- which records are orphans


def table(*shapes: tuple[bytes, int, list[int]], written_us: int = 0) -> CohortTable:
    """A segment with records of a page of two parts: (attempt, part, chunks)."""
    made = CohortTable()
    for number, (attempt, part, chunks) in enumerate(shapes):
        made.shapes.append(Shape(attempt, b"d" * 32, 0, bytes([part] * 8), 1, 2))
        made.written_us.append(written_us)
        made.sums.append((len(chunks), sum(chunks)))
        made.shape_of.extend([number] * len(chunks))
        made.keys.extend(chunks)
    return made


def test_whole_cohorts_have_no_orphans() -> None:
    assert orphans({1: table((b"a", 0, [1, 2, 3])), 2: table((b"a", 1, [1, 2]), (b"a", 1, [3]))}, 1) == {}


def test_what_one_rank_lacks_makes_orphans_of_the_others() -> None:
    found = orphans({1: table((b"a", 0, [1, 2, 3])), 2: table((b"a", 1, [1]))}, 1)
    assert found == {1: frozenset({1, 2})}
    assert orphans({1: table((b"a", 0, [1, 2, 3]))}, 1) == {1: frozenset({0, 1, 2})}


def test_a_cohort_that_may_still_be_writing_is_left_alone() -> None:
    assert orphans({1: table((b"a", 0, [1, 2, 3]), written_us=5)}, 5) == {}
    assert orphans({1: table((b"a", 0, [1, 2, 3]), written_us=5), 2: table((b"a", 1, [1]))}, 5) == {}


def test_a_second_attempt_counts_for_what_the_first_one_left() -> None:
    tables = {1: table((b"a", 0, [1, 2, 3]), (b"a", 1, [1])), 2: table((b"b", 1, [2]))}
    assert orphans(tables, 1) == {1: frozenset({2})}


def test_copies_of_a_part_do_not_make_a_page() -> None:
    assert orphans({1: table((b"a", 0, [1])), 2: table((b"a", 0, [1]))}, 1) == {1: frozenset({0}), 2: frozenset({0})}


def test_records_without_a_cohort_are_never_orphans() -> None:
    made = table((b"a", 0, [1]))
    made.shape_of.append(NO_SHAPE)
    made.keys.append(0)
    assert orphans({1: made}, 1) == {1: frozenset({0})}


# ---------------------------------------------------------------- eviction


def seal(store: kvfs.Store) -> None:
    store._shared.services().active.finish_all()


def evict_one(store: kvfs.Store) -> None:
    assert store.gc(store.stats()["used_bytes"] - 1)["segments_dropped"] == 1


def test_what_a_dead_rank_left_goes_before_older_pages(store: kvfs.Store) -> None:
    clock = store._shared.c.files
    assert isinstance(clock, Clock)
    ns = store.namespace("m", LAYOUT, revision="r1")
    first, second = ranks_of(4, 2, 1)
    for seed, parts in ((1, [first, second]), (2, [first]), (3, [first, second])):
        assert save(ns, seed, parts, seed.to_bytes(8, "big"), 40) == 40 * len(parts)
        seal(store)
        clock.advance(60.0)
    clock.advance(300.0)
    evict_one(store)
    assert (is_whole(ns, 1, 40), is_whole(ns, 3, 40)) == (True, True)
    assert ns.match(tokens_of(2, 40), part=first).tokens == 0, "the orphans"
    assert save(ns, 2, [first, second], b"attempt2", 40) == 80


def test_what_loses_a_part_is_dropped_with_it(store: kvfs.Store) -> None:
    """The segment of one rank goes: the other rank's records go next, though they are the newest."""
    clock = store._shared.c.files
    assert isinstance(clock, Clock)
    ns = store.namespace("m", LAYOUT, revision="r1")
    first, second = ranks_of(4, 2, 1)
    save(ns, 1, [first, second], b"cohort 1", 40)
    seal(store)
    clock.advance(60.0)
    before = set(segment_files(Path(store.path)))
    save(ns, 2, [first], b"cohort 2", 40)
    seal(store)
    (lost,) = set(segment_files(Path(store.path))) - before
    save(ns, 2, [second], b"cohort 2", 40)
    seal(store)
    assert is_whole(ns, 1, 40) and is_whole(ns, 2, 40)
    clock.advance(400.0)
    rows = store._shared.c.index.read(lambda s: s.segments(), 1.0)
    store._shared.services().evictor.reclaimer.drop(next(n for n, row in rows if row.segment_id.hex() == lost.stem))
    evict_one(store)
    assert is_whole(ns, 1, 40)
    assert ns.match(tokens_of(2, 40), part=second).tokens == 0


def test_carried_records_keep_their_cohort(store: kvfs.Store) -> None:
    ns = store.namespace("m", LAYOUT, revision="r1")
    parts = list(ranks_of(4, 2, 1))
    save(ns, 1, parts, b"cohort 1", 5)
    for part in parts:
        with ns.match(tokens_of(1, 5), part=part) as match:
            store._shared.services().pins.pin(f"pin {part.head}", match)
    seal(store)
    evictor = store._shared.services().evictor
    rows = store._shared.c.index.read(lambda s: s.segments(), 1.0)
    found = [evictor.victims._survey.table(Candidate(n, row), False).cohorts.shapes for n, row in rows]
    assert [[s.attempt for s in shapes] for shapes in found] == [[b"cohort 1"] * 2, [b"cohort 1"], [b"cohort 1"]]
    assert LAYERS * GROUP.heads == found[0][0].whole


def test_a_namespace_is_read_once_however_many_attempts_there_are(store: kvfs.Store) -> None:
    """An engine makes an attempt per request: the descriptor was parsed for each."""
    ns = store.namespace("m", LAYOUT, revision="r1")
    for seed in range(1, 6):
        save(ns, seed, list(ranks_of(4, 2, 1)), b"cohort %d" % seed, 2)
    [segment] = segment_files(Path(store.path))
    scan, asked = scanned(segment), []

    def describe(seq: int) -> Described | None:
        asked.append(seq)
        with segment.open("rb") as file:
            return read_namespace(file.fileno(), Files(), scan.entries, seq)

    assert len(collect(scan.parts(), describe).shapes) == 10
    assert len(asked) == 1
