"""An index that is rebuilt while an operation is in progress: numbers of segments mean other segments then."""

from __future__ import annotations

import fcntl
import gc
import os
import pickle
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.errors import StoreLockedError
from kvfs.eviction import reclaimer
from kvfs.format.segment import CODEC_PLANES
from kvfs.index import environment
from kvfs.index.rows import parse_row
from kvfs.index.session import Session
from kvfs.lookup.search import Prompt
from kvfs.maintenance.recompress import Recompressor
from kvfs.pages.layout import Cell, Group, Need
from kvfs.segments.writer import SegmentWriter
from kvfs.system.worker import GRACE_SECONDS
from tests.stores import TINY_BYTES, load, restored, seeded, segment_files, tiny, tokens_of

CHUNKS = 4
PAGES = seeded(1, CHUNKS * TINY_BYTES)
SEGMENTS = 4


@pytest.fixture
def store(memory_path: Path) -> Iterator[kvfs.Store]:
    with kvfs.open(memory_path / "store", capacity="16MiB", segment_bytes="256KiB") as made:
        made._shared.background.stop()
        for n in range(SEGMENTS):
            assert put(made, n).put(tokens_of(n, CHUNKS), PAGES).skipped == CHUNKS
            made._shared.services().active.finish_all()
        yield made


def space_of(store: kvfs.Store, n: int) -> kvfs.Namespace:
    return store.namespace("m", tiny(), revision="r1", salt=f"tenant {n}")


def put(store: kvfs.Store, n: int) -> kvfs.Namespace:
    ns = space_of(store, n)
    ns.put(tokens_of(n, CHUNKS), PAGES)
    return ns


def rebuild(store: kvfs.Store) -> None:
    """Replace the index, as ``verify --repair`` of another process does. The newest segment gets the first number."""
    store._shared.c.index.retire()
    store._shared.rebuild_if_needed()


def there(store: kvfs.Store) -> list[bool]:
    return [restored(space_of(store, n), tokens_of(n, CHUNKS)) == PAGES for n in range(SEGMENTS)]


def after(monkeypatch: pytest.MonkeyPatch, target: Any, name: str, meanwhile: Callable[[], None]) -> None:
    """Call ``meanwhile`` after the first call of a method."""
    call = getattr(target, name)

    def once(*args: Any, **how: Any) -> Any:
        result = call(*args, **how)
        monkeypatch.setattr(target, name, call)
        meanwhile()
        return result

    monkeypatch.setattr(target, name, once)


def test_a_segment_whose_file_a_rebuild_has_missed_is_removed(
    store: kvfs.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No index knew of it: its blocks were not charged, and no process would ever have removed it."""
    path, create = Path(store.path), SegmentWriter.create

    def late(*args: Any, **how: Any) -> SegmentWriter:
        monkeypatch.setattr(SegmentWriter, "create", create)
        rebuild(store)
        return create(*args, **how)

    monkeypatch.setattr(SegmentWriter, "create", late)
    ns = space_of(store, SEGMENTS)
    assert ns.put(tokens_of(SEGMENTS, CHUNKS), PAGES).reason == "index"
    assert len(segment_files(path)) == SEGMENTS and store.verify().ok
    assert ns.put(tokens_of(SEGMENTS, CHUNKS), PAGES).stored == CHUNKS
    assert there(store) == [True] * SEGMENTS


def test_an_eviction_spares_the_segment_that_has_its_victims_number_now(
    store: kvfs.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    evictor = store._shared.services().evictor
    after(monkeypatch, evictor.victims, "choose", lambda: rebuild(store))
    evictor._evict_one()
    assert there(store) == [True] * SEGMENTS
    assert evictor._evict_one()
    assert sum(there(store)) == SEGMENTS - 1
    assert store.verify().ok


def test_reclaiming_a_segment_spares_another_that_has_its_number_now(
    store: kvfs.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A held segment stays charged while one that had its number is reclaimed."""
    reclaimer, index = store._shared.services().evictor.reclaimer, store._shared.c.index
    number, row = index.read(lambda s: s.segments(), 2.0)[0]
    with space_of(store, SEGMENTS - 1).match(tokens_of(SEGMENTS - 1, CHUNKS)):
        last = index.read(lambda s: s.segments(), 2.0)[-1][0]
        assert not reclaimer.drop(last)

        def meanwhile() -> None:
            rebuild(store)
            assert index.read(lambda s: s.segment(number), 2.0).segment_id != row.segment_id

        used = index.read(lambda s: s.ledger().used, 2.0)
        after(monkeypatch, store._shared.c.access_times, "forget", meanwhile)
        reclaimer.drop(number)
        rows = index.read(lambda s: s.segments(), 2.0)
        assert sum(r.allocated for _, r in rows) == index.read(lambda s: s.ledger().used, 2.0) <= used
        files = {f.stem for folder in ("segments", "doomed") for f in (Path(store.path) / folder).glob("*.kvs")}
        assert files <= {r.segment_id.hex() for _, r in rows}, "a file that is not charged"


def test_a_purge_fails_if_an_index_that_was_built_meanwhile_may_name_its_pages(
    store: kvfs.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    purger = store._shared.services().purger
    monkeypatch.setattr(purger, "_finish", lambda *args: rebuild(store))
    with pytest.raises(StoreLockedError, match="again"):
        store.purge(namespace="m", salt="tenant 1")
    monkeypatch.undo()
    store.purge(namespace="m", salt="tenant 1")
    assert there(store) == [True, False, True, True]
    assert store.verify().ok


@pytest.mark.parametrize("how", ["match", "select"])
def test_groups_that_were_looked_up_in_two_generations_are_not_a_match(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """At level "first" a page is verified once: another segment's page must not be taken for it."""
    cell = Cell("u8", 1)
    layout = kvfs.PageLayout.of([Group(name, (n,), 1, cell, Need.all(), 16) for n, name in enumerate(("a", "b"))], 16)
    size, tokens = layout.groups[0].page_bytes, tokens_of(0, CHUNKS)
    pages = {name: seeded(n, CHUNKS * size) for n, name in enumerate(("a", "b"))}
    with kvfs.open(memory_path / "two", capacity="16MiB", segment_bytes="256KiB", verify="first") as store:
        store._shared.background.stop()
        ns = store.namespace("m", layout, revision="r1")
        for name in pages:
            other = ({*pages} - {name}).pop()
            ns.put(tokens, {name: pages[name], other: b""}, {name: 0, other: CHUNKS})
            store._shared.services().active.finish_all()
        with ns.match(tokens) as match:
            assert match.tokens == len(tokens) and load(ns, match) == pages
        after(monkeypatch, store._shared.c.index, "read", lambda: rebuild(store))
        prompt = Prompt(ns.identity.digest, ns.chunk_hashes(tokens))
        found = ns.match(tokens) if how == "match" else ns._matcher.select(prompt, {"a": 0, "b": 0})
        with found:
            got = load(ns, found)
            assert all(pages[name].startswith(got[name]) for name in pages), "another page"
        with ns.match(tokens) as match:
            assert load(ns, match) == pages


def test_a_segment_that_is_held_since_an_earlier_index_can_be_pinned(store: kvfs.Store) -> None:
    with space_of(store, 0).match(tokens_of(0, CHUNKS)) as earlier:
        assert earlier.tokens
        rebuild(store)
        assert store.pin("system prompt", space_of(store, 0), tokens_of(0, CHUNKS)) == CHUNKS * 16
    assert there(store) == [True] * SEGMENTS


def test_recompressing_moves_a_segment_that_is_held_under_an_earlier_number(
    store: kvfs.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load of an earlier match opens the segment after recompress has looked at it."""
    layout = tiny(head_dim=64)
    ns, pages = store.namespace("zeros", layout, revision="r1"), bytes(CHUNKS * layout.page_bytes)
    for n in range(3):
        ns.put(tokens_of(n, CHUNKS), pages)
    store._shared.services().active.finish_all()
    match = pickle.loads(pickle.dumps(ns.match(tokens_of(0, CHUNKS))))
    gc.collect()
    rebuild(store)
    evictor, held = store._shared.services().evictor, []

    def hold() -> None:
        held.append(store._shared.c.segments.acquire(*next(iter(match.segments.items())), match.generation))

    after(monkeypatch, Recompressor, "_examine", hold)
    done = Recompressor(store._shared.c, evictor, store._shared.services().active).run(CODEC_PLANES, 0.0)
    assert done.segments
    assert [restored(ns, tokens_of(n, CHUNKS)) == pages for n in range(3)] == [True] * 3


def test_an_index_that_is_installed_late_stays(store: kvfs.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk syncs slowly: the caller times out, and the generation becomes current all the same."""
    core, write_state, index = store._shared, environment.write_state, store._shared.c.index
    index.retire()
    installed = threading.Event()

    def slowly(*args: Any) -> None:
        monkeypatch.setattr(environment, "write_state", write_state)
        time.sleep(GRACE_SECONDS + 0.5)
        write_state(*args)
        installed.set()

    monkeypatch.setattr(environment, "write_state", slowly)
    monkeypatch.setattr(index, "install", lambda name, timeout: environment.Index.install(index, name, 0.01))
    with pytest.raises(TimeoutError):
        core.rebuild_if_needed()
    assert installed.wait(60)
    assert there(store) == [True] * SEGMENTS
    current = (Path(store.path) / "index" / "CURRENT").read_text()
    assert (Path(store.path) / "index" / current / "data.mdb").exists()
    assert (Path(store.path) / "index" / current / "users").exists()


def test_a_sweep_starts_over_in_a_new_index(store: kvfs.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reclaimer, "SWEEP_ROWS", 1)
    index, tested = store._shared.c.index, store._shared.services().evictor.reclaimer

    def first_segment(session: Session) -> int:
        with session.txn.cursor(db=session.db.pages) as cursor:
            row = parse_row(*next(iter(cursor)))
        assert row is not None
        return row.extents[0].segment

    assert tested.drop(index.read(lambda s: s.segments(), 2.0)[0][0])
    assert tested.sweep_step(1)  # one row of four
    rebuild(store)
    assert tested.drop(index.read(first_segment, 2.0))
    tested.sweep_all()
    assert index.read(lambda s: s.txn.stat(s.db.pages)["entries"], 2.0) == SEGMENTS - 2


def test_a_store_that_was_moved_while_it_is_open_is_opened_through_its_descriptors(store: kvfs.Store) -> None:
    """By its old path the index seems to be missing: this process removed each new one of the other processes."""
    old, new = Path(store.path), Path(store.path).with_name("moved")
    old.rename(new)
    try:
        rebuild(store)
        generation = store._shared.c.index.generation
        index = new / "index"
        with open(index / generation / "users") as users:
            fcntl.flock(users, fcntl.LOCK_SH)  # another process uses the index
            (index / "again").write_text(generation)
            (index / "again").rename(index / "CURRENT")
            assert there(store) == [True] * SEGMENTS
        assert (index / "CURRENT").read_text() == generation == store._shared.c.index.generation
        assert not old.exists()
    finally:
        new.rename(old)


@pytest.mark.parametrize("change", ["mode", "owner", "content"])
def test_a_change_of_current_that_names_the_same_generation_costs_no_rebuild(store: kvfs.Store, change: str) -> None:
    """A process on its own took its index for one that a crash left dirty, and removed it."""
    index, path = store._shared.c.index, Path(store.path) / "index" / "CURRENT"
    generation, environment_ = index.generation, index._env
    if change == "mode":
        path.chmod(0o640)
    elif change == "owner":
        os.chown(path, os.getuid(), os.getgid())  # the time of the last change is new
    else:
        (path.parent / "again").write_text(generation)
        (path.parent / "again").rename(path)
    assert there(store) == [True] * SEGMENTS
    assert put(store, SEGMENTS).put(tokens_of(SEGMENTS, CHUNKS), PAGES).skipped == CHUNKS
    assert index.generation == generation and index._env is environment_ and path.read_text() == generation


def test_another_index_under_the_name_of_the_open_one_is_not_taken_for_it(store: kvfs.Store) -> None:
    index = store._shared.c.index
    generation = index.generation
    folder = Path(store.path) / "index" / generation
    shutil.copy(folder / "data.mdb", folder / "copy")
    (folder / "copy").rename(folder / "data.mdb")
    (folder.parent / "CURRENT").chmod(0o640)
    assert there(store) == [False] * SEGMENTS and index.generation == generation
    store._shared.rebuild_if_needed()
    assert there(store) == [True] * SEGMENTS and index.generation != generation


def test_a_new_generation_waits_for_the_gate_as_long_as_it_may(
    store: kvfs.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other processes hold it for milliseconds, again and again."""
    gate = os.open(Path(store.path) / "gate", os.O_RDWR)
    release = threading.Timer(0.2, os.close, [gate])
    index = store._shared.c.index
    install, refuse, taken = index.install, index._refuse_if_current, list[bool]()

    def with_the_gate() -> None:
        taken.append(True)
        refuse()

    def while_another_holds_the_gate(name: str, timeout: float) -> None:
        fcntl.flock(gate, fcntl.LOCK_EX)
        release.start()
        install(name, timeout)

    monkeypatch.setattr(index, "_refuse_if_current", with_the_gate)
    monkeypatch.setattr(index, "install", while_another_holds_the_gate)
    rebuild(store)
    release.join()
    assert taken and all(there(store))


def test_blocks_are_kept_ahead_of_the_end_of_an_index_that_this_process_writes(
    store: kvfs.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of one that is private to a reader: nothing commits there on a full disk."""
    kept: list[str] = []
    index = store._shared.c.index
    monkeypatch.setattr(environment, "keep_slack", lambda directory, generation, map_size: kept.append(generation))
    index.keep_slack()
    assert kept == [index.generation]
    monkeypatch.setattr(index, "_private", True)
    index.keep_slack()
    assert len(kept) == 1
