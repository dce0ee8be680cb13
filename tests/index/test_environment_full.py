"""An index that is full before the store is: it drops as few pages as it can, and no put is declined."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import kvfs
from kvfs.index.deadlines import COMMIT_SECONDS
from kvfs.index.row_updates import sweep
from kvfs.index.tables import SEALED
from tests.stores import TINY_BYTES, restored, run_child, seeded, tiny, tokens_of

CHUNKS = 32  # a row of the index each
PAGES = seeded(1, CHUNKS * TINY_BYTES)


@pytest.fixture
def store(memory_path: Path) -> Iterator[kvfs.Store]:
    with kvfs.open(memory_path / "s", capacity="256MiB", index_bytes="2MiB", segment_bytes="512KiB") as opened:
        yield opened


def is_full(store: kvfs.Store) -> bool:
    """Full, apart from the last commit or two."""
    return store._shared.c.index.read(lambda s: s.used_bytes(), COMMIT_SECONDS) > 0.845 * store.settings.index_bytes


def sealed(store: kvfs.Store) -> list[int]:
    rows = store._shared.c.index.read(lambda s: s.segments(), COMMIT_SECONDS)
    return [number for number, row in rows if row.state == SEALED]


def fill(ns: kvfs.Namespace, store: kvfs.Store) -> int:
    """Put prompts until the index is nearly full; how many."""
    for n in range(2000):
        if is_full(store):
            return n
        assert ns.put(tokens_of(n, CHUNKS), PAGES).stored == CHUNKS
    raise AssertionError("the index does not fill up")


def test_most_of_a_store_stays_when_its_index_is_full(store: kvfs.Store) -> None:
    ns = store.namespace("m", tiny(), revision="r1")
    count = fill(ns, store)
    peak, held = len(sealed(store)), []
    for n in range(count, 2 * count):
        assert ns.put(tokens_of(n, CHUNKS), PAGES) == (CHUNKS, 0, 0, 0, "")
        held.append(len(sealed(store)))
    assert min(held) > 0.75 * peak, (peak, held)
    latest = range(2 * count - count // 4, 2 * count)
    whole = [ns.match(tokens_of(n, CHUNKS)).tokens == CHUNKS * 16 for n in latest]
    assert sum(whole) > 0.9 * len(whole), "the oldest are dropped first"


def test_a_full_index_can_be_swept(store: kvfs.Store) -> None:
    """LMDB copies each leaf that changes: a commit that changes many finds no free pages."""
    ns = store.namespace("m", tiny(), revision="r1")
    count = fill(ns, store)
    evictor = store._shared.services().evictor
    with evictor.lock.hold(store._shared.c.files.monotonic() + 10) as got:
        assert got
        for number in sealed(store)[::2]:
            assert evictor.reclaimer.drop(number)
        evictor.reclaimer.sweep_all()
    for n in range(count, count + 50):
        assert ns.put(tokens_of(n, CHUNKS), PAGES).stored == CHUNKS
    assert not store.stats()["counters"].get("evict_errors")


def test_packing_keeps_every_row_and_frees_pages(store: kvfs.Store) -> None:
    index = store._shared.c.index
    ns = store.namespace("m", tiny(), revision="r1")
    for n in range(300):
        ns.put(tokens_of(n, 1), PAGES[:TINY_BYTES])

    def rows() -> dict[bytes, bytes]:
        return index.read(lambda s: dict(s.txn.cursor(db=s.db.pages)), COMMIT_SECONDS)

    def thin_out() -> None:
        keys = sorted(rows())
        thinned = [key for n, key in enumerate(keys) if n % 5 > 1]  # leaves stay a little more than a quarter full
        index.write(lambda s: [s.delete_row(key) for key in thinned], COMMIT_SECONDS)

    thin_out()
    before, sparse = rows(), index.read(lambda s: (s.fullness(), s.used_bytes()), COMMIT_SECONDS)
    following: bytes | None = b"\0"
    while following is not None:
        step = partial(sweep, start=following, rows_max=40, pack=True)
        following, changed = index.write(step, COMMIT_SECONDS)
        assert not changed
    dense = index.read(lambda s: (s.fullness(), s.used_bytes()), COMMIT_SECONDS)
    assert rows() == before
    assert dense[0] > sparse[0] + 0.1 and dense[1] < sparse[1]


def test_a_full_index_can_be_rebuilt(memory_path: Path) -> None:
    """A commit for segments of many small pages would change each leaf, and find no free pages for the copies."""
    count = 0
    with kvfs.open(memory_path / "s", capacity="512MiB", index_bytes="2MiB", segment_bytes="8MiB") as store:
        ns = store.namespace("m", tiny(), revision="r1")
        while not is_full(store):
            assert ns.put(tokens_of(count, 1), PAGES[:TINY_BYTES]).stored == 1
            count += 1
        latest = range(count - count // 4, count)
        there = sum(ns.match(tokens_of(n, 1)).tokens for n in latest)
        store._shared.background.stop()
        store._shared.c.index.retire()
        store._shared.rebuild_if_needed()
        assert sum(ns.match(tokens_of(n, 1)).tokens for n in latest) == there > 0
        assert ns.put(tokens_of(count, 1), PAGES[:TINY_BYTES]).stored == 1
        assert store.verify().ok


def test_an_index_that_has_become_too_small_names_the_latest_pages(memory_path: Path) -> None:
    with kvfs.open(memory_path / "s", capacity="256MiB", index_bytes="4MiB", segment_bytes="512KiB") as store:
        ns = store.namespace("m", tiny(), revision="r1")
        count = fill(ns, store)
    text = (memory_path / "s" / "kvfs.toml").read_text()
    (memory_path / "s" / "kvfs.toml").write_text(text.replace(str(4 << 20), str(2 << 20)))
    (memory_path / "s" / "state").unlink()
    with kvfs.open(memory_path / "s") as store:
        assert store.settings.index_bytes == 2 << 20
        report, ns = store._shared.rebuilt, store.namespace("m", tiny(), revision="r1")
        assert report is not None and report.unnamed
        stored = [ns.match(tokens_of(n, CHUNKS)).tokens > 0 for n in range(count)]
        assert stored == sorted(stored) and 0.3 * count < sum(stored) < 0.7 * count, "the oldest are left out"
        assert ns.put(tokens_of(count, CHUNKS), PAGES).stored == CHUNKS


def test_a_process_with_a_smaller_map_follows_an_index_that_another_process_grew(store: kvfs.Store) -> None:
    """Settings apply from the next open on. It took the larger file for damaged, and removed it each time."""
    store._shared.background.stop()
    ns, tokens = store.namespace("m", tiny(), revision="r1"), tokens_of(1, CHUNKS)
    assert ns.put(tokens, PAGES).stored == CHUNKS
    settings = Path(store.path) / "kvfs.toml"
    text = settings.read_text().replace(f"index_bytes = {2 << 20}", f"index_bytes = {16 << 20}")
    settings.write_text(text)

    def another_process() -> int:
        with kvfs.open(store.path) as other:
            other._shared.background.stop()
            index, size = other._shared.c.index, 8 << 10
            for first in range(0, 512, 64):
                rows = [f"{n:040}".encode() for n in range(first, first + 64)]
                index.write(lambda s, rows=rows: [s.put_row(key, bytes(size)) for key in rows], 5.0)
            return index.read(lambda s: s.used_bytes(), COMMIT_SECONDS)

    generation = store.stats()["index"]["generation"]
    assert run_child(another_process) > 4 << 20
    assert restored(ns, tokens) == PAGES
    store._shared.c.index.write(lambda s: s.delete_row(f"{0:040}".encode()), COMMIT_SECONDS)
    assert store.stats()["index"]["generation"] == generation
