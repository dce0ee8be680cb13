"""Namespaces of which nothing is stored: the index forgets them, and never one that has a page."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.errors import IndexUnavailableError
from kvfs.eviction import reclaimer
from kvfs.index import ledger
from kvfs.index.session import Session
from kvfs.index.tables import SEALED
from tests.stores import TINY_BYTES, restored, seeded, tiny, tokens_of

CHUNKS = 4
PAGES = seeded(1, CHUNKS * TINY_BYTES)


@pytest.fixture
def store(memory_path: Path) -> Iterator[kvfs.Store]:
    with kvfs.open(memory_path / "store", capacity="16MiB", segment_bytes="256KiB") as made:
        made._shared.background.stop()
        yield made


def space_of(store: kvfs.Store, tenant: int) -> kvfs.Namespace:
    return store.namespace("m", tiny(), revision="r1", salt=f"tenant {tenant}")


def put(store: kvfs.Store, tenant: int, seed: int = 0) -> kvfs.Namespace:
    ns = space_of(store, tenant)
    assert ns.put(tokens_of(seed, CHUNKS), PAGES).stored == CHUNKS
    return ns


def known(store: kvfs.Store) -> int:
    return len(store.catalog.described())


def seal(store: kvfs.Store) -> None:
    store._shared.services().active.finish_all()


def drop_all(store: kvfs.Store) -> None:
    """Drop all segments, without the sweep that follows."""
    for number, row in store._shared.c.index.read(lambda s: s.segments(), 2.0):
        if row.state == SEALED:
            assert store._shared.services().evictor.reclaimer.drop(number)


def test_what_has_no_page_is_forgotten_and_comes_back_with_the_next(store: kvfs.Store) -> None:
    for tenant in range(150):
        put(store, tenant)
    seal(store)
    drop_all(store)
    kept = put(store, 7)
    assert known(store) == 150
    store._shared.services().evictor.reclaimer.sweep_all()
    assert known(store) == 1 and store.stats()["counters"]["namespaces_forgotten"] == 149
    assert store._shared.c.index.read(lambda s: s.txn.stat(s.db.namespaces)["entries"], 2.0) == 2, (
        "and a shape of parts"
    )
    assert restored(kept, tokens_of(0, CHUNKS)) == PAGES
    assert restored(space_of(store, 8), tokens_of(0, CHUNKS)) == b""
    assert restored(put(store, 8), tokens_of(0, CHUNKS)) == PAGES
    assert store.verify().ok


def test_a_namespace_is_known_before_its_bytes_are_written(store: kvfs.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rebuild may bring back what a dead writer appended: a purge must be able to name it."""

    def die(*args: Any, **how: Any) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("kvfs.segments.writer.SegmentWriter.append", die)
    assert space_of(store, 1).put(tokens_of(1, CHUNKS), PAGES).declined == CHUNKS
    assert [d.name for d in store.catalog.described()] == ["m"]


def test_a_purged_namespace_is_no_longer_listed(store: kvfs.Store) -> None:
    other = store.namespace("n", tiny(), revision="r1")
    other.put(tokens_of(1, CHUNKS), PAGES)
    put(store, 1)
    assert store.purge("m").pages == CHUNKS
    assert [d.name for d in store.catalog.described()] == ["n"]
    assert restored(other, tokens_of(1, CHUNKS)) == PAGES


def test_an_index_has_room_for_any_number_of_successive_namespaces(memory_path: Path) -> None:
    with kvfs.open(memory_path / "store", capacity="32MiB", segment_bytes="256KiB", index_bytes="2MiB") as store:
        for tenant in range(5000):
            ns = space_of(store, tenant)
            assert ns.put(tokens_of(tenant, 1), PAGES[:TINY_BYTES]).stored == 1, tenant
        assert restored(ns, tokens_of(tenant, 1)) == PAGES[:TINY_BYTES]
        assert store.stats()["counters"]["namespaces_forgotten"] > 1000


def store_again(store: kvfs.Store) -> None:
    put(store, 1, seed=1)


def store_in_a_new_segment(store: kvfs.Store) -> None:
    seal(store)
    put(store, 1, seed=1)


def store_and_seal(store: kvfs.Store) -> None:
    put(store, 1, seed=1)
    seal(store)


@pytest.mark.parametrize("meanwhile", [store_again, store_in_a_new_segment, store_and_seal])
def test_a_page_stored_while_namespaces_are_read_keeps_its_own(
    store: kvfs.Store, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[kvfs.Store], None]
) -> None:
    for tenant in (1, 2):
        put(store, tenant)
    seal(store)
    drop_all(store)
    put(store, 3)  # a segment is active
    calls = []

    def forget(session: Any, growing: Any, digests: Any) -> int:
        calls.append(digests)
        return gc_forget(session, growing, digests)

    gc_forget = reclaimer._forget
    monkeypatch.setattr(reclaimer, "_forget", forget)
    read, index = store._shared.c.index.read, store._shared.c.index

    def read_and_store(function: Callable[..., Any], timeout: float) -> Any:
        result = read(function, timeout)
        if reclaimer.Session.contents in getattr(function, "args", ()):
            monkeypatch.setattr(index, "read", read)
            meanwhile(store)
        return result

    monkeypatch.setattr(index, "read", read_and_store)
    assert reclaimer.forget_namespaces(store._shared.c) == 1 and len(calls[0]) == 2
    assert restored(space_of(store, 1), tokens_of(1, CHUNKS)) == PAGES
    assert known(store) == 2


def test_pages_that_were_claimed_before_their_namespace_was_forgotten_are_found(
    store: kvfs.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, 1)
    seal(store)
    drop_all(store)
    ns, own_segment, times = space_of(store, 1), ledger.own_segment, []

    def forget_between(*args: Any) -> Any:
        times.append(1)
        return own_segment(*args)

    monkeypatch.setattr("kvfs.index.ledger.own_segment", forget_between)
    append = kvfs.segments.writer.SegmentWriter.append  # type: ignore[attr-defined]

    def append_and_forget(*args: Any, **how: Any) -> Any:
        assert times == [1], "claimed, not published"
        assert reclaimer.forget_namespaces(store._shared.c) == 1
        return append(*args, **how)

    monkeypatch.setattr("kvfs.segments.writer.SegmentWriter.append", append_and_forget)
    assert ns.put(tokens_of(5, CHUNKS), PAGES).stored == CHUNKS
    assert times == [1, 1]
    assert restored(ns, tokens_of(5, CHUNKS)) == PAGES


def test_a_round_of_sweeping_counts_once_when_no_namespace_can_be_forgotten(
    store: kvfs.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tenant in (1, 2):
        put(store, tenant)
        seal(store)
    first, second = [n for n, row in store._shared.c.index.read(lambda s: s.segments(), 2.0) if row.state == SEALED]
    tested, forget = store._shared.services().evictor.reclaimer, reclaimer.forget_namespaces
    tested.drop(first)

    def fail(context: Any) -> int:
        monkeypatch.setattr(reclaimer, "forget_namespaces", forget)
        tested.drop(second)  # behind the sweep
        raise IndexUnavailableError("timeout")

    monkeypatch.setattr(reclaimer, "forget_namespaces", fail)
    tested.sweep_all()
    assert store._shared.c.index.read(lambda s: s.ledger().unswept, 2.0) == 0
    assert store._shared.c.index.read(lambda s: s.txn.stat(s.db.pages)["entries"], 2.0) == 0
    assert known(store) == 0


def test_namespaces_of_a_new_index_are_not_forgotten(store: kvfs.Store) -> None:
    put(store, 1)
    seal(store)
    drop_all(store)
    index = store._shared.c.index
    growing = index.read(reclaimer._read_growing, 2.0)
    digests = [digest for digest, _ in index.slices(Session.namespaces, 2.0)]
    assert len(digests) == 1
    assert index.write(lambda s: reclaimer._forget(s, growing._replace(generation="another"), digests), 2.0) == 0
    assert index.write(lambda s: reclaimer._forget(s, growing, digests), 2.0) == 1


def damage_contents(session: Any) -> None:
    with session.txn.cursor(db=session.db.meta) as cursor:
        assert cursor.set_range(b"contents/")
        cursor.put(cursor.key(), b"nonsense")


def test_damaged_contents_count_as_pages(store: kvfs.Store) -> None:
    ns = put(store, 1)

    seal(store)
    store._shared.c.index.write(damage_contents, 2.0)
    assert reclaimer.forget_namespaces(store._shared.c) == 0
    assert restored(ns, tokens_of(0, CHUNKS)) == PAGES


def test_damaged_contents_stay_some_after_puts_and_purges(store: kvfs.Store) -> None:
    ns = put(store, 1)

    store._shared.c.index.write(damage_contents, 2.0)
    put(store, 1, seed=1)  # into the same segment
    store.purge(ns, prefix=tokens_of(1, CHUNKS))
    assert reclaimer.forget_namespaces(store._shared.c) == 0
    assert restored(ns, tokens_of(0, CHUNKS)) == PAGES


def test_a_namespace_is_known_while_it_has_pages(store: kvfs.Store) -> None:
    draw, forgotten = random.Random(5), 0
    for step in range(400):
        tenant = draw.randrange(12)
        space_of(store, tenant).put(tokens_of(draw.randrange(30), CHUNKS), PAGES)
        if step % 10 == 0:
            seal(store)
        if step % 25 == 0:
            rows = store._shared.c.index.read(lambda s: s.segments(), 2.0)
            sealed = [number for number, row in rows if row.state == SEALED]
            for number in draw.sample(sealed, len(sealed) // 2):
                store._shared.services().evictor.reclaimer.drop(number)
            before = store.catalog.contents()
            forgotten += reclaimer.forget_namespaces(store._shared.c)
            assert {d.digest for d in store.catalog.described()} == {c.digest for c in before}
    assert forgotten > 5
    assert store.verify().ok
