"""Victims of one ranking: taken in its order, and each only if it may still be evicted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs import Quota
from kvfs.eviction import victims
from kvfs.eviction.victims import RANKING_SECONDS
from kvfs.index import ledger
from kvfs.index.tables import SEALED
from kvfs.system.files import Files
from kvfs.testing import FakeClock
from tests.stores import TINY_BYTES, restored, seeded, tiny, tokens_of

CHUNKS = 8
PAGES = seeded(1, CHUNKS * TINY_BYTES)
SEGMENTS = 12
LAYOUT = tiny(head_dim=128)
LARGE = seeded(2, CHUNKS * LAYOUT.page_bytes)  # a segment of 256 KiB


class Clock(FakeClock, Files):
    """The real file system under a clock that is set by hand."""


@pytest.fixture
def rankings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many segments each ranking covered; one serves for a third of them."""
    monkeypatch.setattr(victims, "SEGMENTS_PER_VICTIM", 3)
    made, survey = list[int](), victims.Victims.survey

    def counted(*args: Any, **how: Any) -> Any:
        result = survey(*args, **how)
        made.append(len(result[1]))
        return result

    monkeypatch.setattr(victims.Victims, "survey", counted)
    return made


@pytest.fixture
def store(memory_path: Path, rankings: list[int]) -> Iterator[kvfs.Store]:
    """A store of one quota; each prompt is a segment, a second older than the next."""
    quotas = {"m": Quota(guaranteed_bytes=4096)}
    path = memory_path / "store"
    with kvfs.open(path, capacity="32MiB", segment_bytes="256KiB", quotas=quotas, files=Clock()) as made:
        made._shared.background.stop()
        ns = made.namespace("m", tiny(), revision="r1")
        for seed in range(SEGMENTS):
            assert ns.put(tokens_of(seed, CHUNKS), PAGES).stored == CHUNKS
            made._shared.services().active.finish_all()
            clock(made).advance(1.0)
        yield made


def clock(store: kvfs.Store) -> Clock:
    files = store._shared.c.files
    assert isinstance(files, Clock)
    return files


def left(store: kvfs.Store) -> list[int]:
    ns = store.namespace("m", tiny(), revision="r1")
    return [seed for seed in range(SEGMENTS) if restored(ns, tokens_of(seed, CHUNKS)) == PAGES]


def evict(store: kvfs.Store, times: int) -> None:
    for _ in range(times):
        assert store._shared.services().evictor._evict_one()


def test_one_ranking_serves_for_a_share_of_the_segments_in_order(store: kvfs.Store, rankings: list[int]) -> None:
    evict(store, 4)
    assert rankings == [SEGMENTS]
    evict(store, 1)
    assert rankings == [SEGMENTS, SEGMENTS - 4] and left(store) == list(range(5, SEGMENTS))


def test_a_small_store_is_ranked_for_each_victim(
    store: kvfs.Store, rankings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(victims, "SEGMENTS_PER_VICTIM", 512)
    evict(store, 3)
    assert rankings == [SEGMENTS, SEGMENTS - 1, SEGMENTS - 2]


def test_a_ranking_is_used_for_a_moment_only(store: kvfs.Store, rankings: list[int]) -> None:
    evict(store, 1)
    ns = store.namespace("m", tiny(), revision="r1")
    assert restored(ns, tokens_of(1, CHUNKS)) == PAGES  # used now
    clock(store).advance(RANKING_SECONDS)
    evict(store, 1)
    assert len(rankings) == 2 and left(store) == [1, *range(3, SEGMENTS)]


def test_what_was_pinned_or_is_held_since_the_ranking_stays(store: kvfs.Store, rankings: list[int]) -> None:
    ns = store.namespace("m", tiny(), revision="r1")
    evict(store, 1)
    store.pin("one", ns, tokens_of(1, CHUNKS))
    with ns.match(tokens_of(2, CHUNKS)) as held:
        assert held.tokens
        evict(store, 2)
        assert len(rankings) == 2
    assert left(store) == [1, 2, *range(4, SEGMENTS)]
    assert store.verify().ok


def test_what_was_purged_since_the_ranking_is_no_victim(store: kvfs.Store, rankings: list[int]) -> None:
    evict(store, 1)
    ns = store.namespace("m", tiny(), revision="r1")
    assert store.purge(ns, prefix=tokens_of(1, CHUNKS)).pages == CHUNKS
    evict(store, 1)
    assert len(rankings) == 2 and left(store) == list(range(3, SEGMENTS))
    assert ns.put(tokens_of(1, CHUNKS), PAGES).stored == CHUNKS


@pytest.mark.parametrize("change", ["pinned", "dropped by another process"])
def test_a_victim_that_has_changed_is_not_taken(store: kvfs.Store, rankings: list[int], change: str) -> None:
    evictor = store._shared.services().evictor
    evict(store, 1)
    number, row = store._shared.c.index.read(lambda s: s.segments(), 2.0)[0]
    if change == "pinned":
        evictor.victims.pinned = lambda: {row.segment_id}
    else:
        assert evictor.reclaimer.drop(number)
    evict(store, 1)
    assert len(rankings) == 2
    assert left(store) == ([1] if change == "pinned" else []) + list(range(3, SEGMENTS))


def guarantee(store: kvfs.Store, segments: int) -> list[int]:
    """Guarantee the quota so many segments; the numbers of all that are not dropped."""
    rows = [(n, row) for n, row in store._shared.c.index.read(lambda s: s.segments(), 2.0) if row.state == SEALED]
    store._shared.c.settings.quotas["m"] = Quota(guaranteed_bytes=segments * rows[0][1].allocated)  # type: ignore[index]
    return [number for number, _ in rows]


def test_what_a_quota_is_guaranteed_stays(store: kvfs.Store, rankings: list[int]) -> None:
    guarantee(store, 2)
    while store._shared.services().evictor._evict_one():
        pass
    assert left(store) == [SEGMENTS - 2, SEGMENTS - 1]
    assert len(rankings) < SEGMENTS - 2


def test_dropped_segments_of_a_quota_do_not_count_although_they_are_charged(store: kvfs.Store) -> None:
    ns = store.namespace("m", tiny(), revision="r1")
    with contextlib.ExitStack() as held:
        for seed in (9, 10, 11):
            held.enter_context(ns.match(tokens_of(seed, CHUNKS)))
        numbers = guarantee(store, 8)
        evict(store, 1)
        for number in numbers[-3:]:
            assert not store._shared.services().evictor.reclaimer.drop(number), "a reader holds it"
        assert not store._shared.services().evictor._evict_one()
        assert left(store) == list(range(1, 9))


def test_what_was_used_before_a_restart_outlives_what_was_not(memory_path: Path) -> None:
    """Access times are in the store: another process evicts by them."""
    files, hot = Clock(), range(0, 40, 8)

    def fill(store: kvfs.Store, seeds: range) -> kvfs.Namespace:
        store._shared.background.stop()
        ns = store.namespace("m", LAYOUT, revision="r1")
        for seed in seeds:
            assert ns.put(tokens_of(seed, CHUNKS), LARGE).stored == CHUNKS
            files.advance(1.0)
        return ns

    with kvfs.open(memory_path / "hot", capacity="16MiB", segment_bytes="256KiB", files=files) as store:
        ns = fill(store, range(40))
        assert store.stats()["counters"].get("segments_evicted", 0) == 0
        assert all(restored(ns, tokens_of(seed, CHUNKS)) == LARGE for seed in hot)
    with kvfs.open(memory_path / "hot", files=files) as store:
        ns = fill(store, range(100, 140))
        assert store.stats()["counters"]["segments_evicted"] > 0
        left = [seed for seed in range(40) if restored(ns, tokens_of(seed, CHUNKS)) == LARGE]
    assert set(hot) <= set(left) and len(left) < 20


def test_where_readers_hold_all_segments_one_is_dropped_as_it_is(
    store: kvfs.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    chooser = store._shared.services().evictor.victims
    monkeypatch.setattr(chooser, "is_held", lambda row: True)
    victim = chooser.choose(1 << 20)
    assert victim is not None and (victim.seqs, victim.relocate_bytes) == ((), 0), "nothing of it is copied"
    c = store._shared.c
    row = c.index.read(lambda s: s.segment(victim.number), 5.0)
    assert victim.row == row
    c.index.write(lambda s: ledger.mark_dropped(s, victim.number, bytes(16)), 5.0)
    assert chooser.choose(1 << 20) is None, "one at a time: it frees no bytes yet"
