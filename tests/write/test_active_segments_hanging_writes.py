"""A disk that hangs in the middle of a write blocks that write; every other call ends in bounded time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.errors import StoreAccessError
from kvfs.index.tables import ACTIVE
from kvfs.system.files import Files
from kvfs.write import active_segments as active
from kvfs.write import class_locks
from tests.stores import TINY_BYTES, counted, run_child, seeded, segment_files, tiny, tokens_of

SECONDS = 60.0


class Hanging(Files):
    """Writes of payloads by threads named "hangs" block until ``goes_on`` is set."""

    def __init__(self) -> None:
        self.hangs, self.goes_on = threading.Event(), threading.Event()

    def pwritev(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        if threading.current_thread().name == "hangs" and not self.goes_on.is_set():
            self.hangs.set()
            assert self.goes_on.wait(SECONDS)
        return super().pwritev(fd, buffers, offset)


class HangingOpens(Hanging):
    """Opens of the segments in ``names`` block until ``goes_on`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def open(self, name: str, *args: Any, **how: Any) -> int:
        if name in self.names and not self.goes_on.is_set():
            self.hangs.set()
            assert self.goes_on.wait(SECONDS)
        return super().open(name, *args, **how)


class Put:
    """A put that hangs, in a thread of its own."""

    def __init__(self, ns: kvfs.Namespace, files: Hanging) -> None:
        self.result: Any = None
        self._ns, self._files = ns, files
        self.thread = threading.Thread(target=self._run, name="hangs", daemon=True)
        self.thread.start()
        assert files.hangs.wait(SECONDS)

    def _run(self) -> None:
        self.result = put(self._ns, 7)

    def end(self) -> Any:
        self._files.goes_on.set()
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()
        return self.result


def put(ns: kvfs.Namespace, seed: int, chunks: int = 4) -> Any:
    return ns.put(tokens_of(seed, chunks), seeded(seed, chunks * TINY_BYTES))


@pytest.fixture
def files() -> Iterator[Hanging]:
    hanging = Hanging()
    yield hanging
    hanging.goes_on.set()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(active, "CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(class_locks, "APPEND_SECONDS", 0.2)


def test_a_store_can_be_closed_and_its_segment_stays_its_own(store_path: Path, files: Hanging) -> None:
    store = kvfs.open(store_path, capacity="64MiB", files=files)
    ns = store.namespace("m", tiny(), "1")
    assert put(ns, 1).stored == 4
    hanging = Put(ns, files)
    owner = ns._c.owner
    closing = threading.Thread(target=store.close, daemon=True)
    closing.start()
    closing.join(SECONDS)
    assert not closing.is_alive(), "the close hangs with the disk"

    def another_process() -> list[bool]:
        with kvfs.open(store_path) as other:
            mine = other.namespace("m", tiny(), "1")
            stored = put(mine, 2).stored == 4
            rows = mine._c.index.read(lambda s: s.segments_in(ACTIVE), 5.0)
            owners = {row.owner for _, row in rows}
            return [stored, owner in owners, len(rows) == 2, mine.match(tokens_of(1, 4)).tokens > 0]

    assert run_child(another_process) == [True] * 4, "another process appends where the write may still arrive"
    result = hanging.end()
    assert result.stored == 0 and result.declined == 4, result
    with kvfs.open(store_path) as later:
        assert later.verify().ok
        again = later.namespace("m", tiny(), "1")
        for seed in (1, 2):
            with again.match(tokens_of(seed, 4)) as match:
                out = bytearray(match.nbytes)
                assert again.get(match, out) == 4 and bytes(out) == seeded(seed, 4 * TINY_BYTES)


def test_other_puts_decline_after_a_bounded_wait(store_path: Path, files: Hanging) -> None:
    with kvfs.open(store_path, capacity="64MiB", files=files) as store, counted(store) as count:
        ns = store.namespace("m", tiny(), "1")
        hanging = Put(ns, files)
        result = put(ns, 2)
        assert (result.stored, result.declined, result.reason) == (0, 4, "io")
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(put(ns, 3)), daemon=True)
        thread.start()
        thread.join(SECONDS)
        assert results and results[0].reason == "io"
        assert count("pages_declined_io") == 8
        assert hanging.end().stored == 4
        assert put(ns, 2).stored == 4, "the disk is back"


def test_a_put_that_is_overtaken_by_one_that_hangs_declines(
    store_path: Path, files: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had seen the lock free, and then waited for it without a bound."""
    with kvfs.open(store_path, capacity="64MiB", files=files) as store:
        store._shared.background.stop()
        ns = store.namespace("m", tiny(), "1")
        assert put(ns, 1).stored == 4
        turn, hanging = ns._appender._active.class_locks.acquire_within, list[Put]()

        def overtaken(key: Any) -> Any:
            """The lock is free when it is looked at, and held when it is acquired."""
            mine = turn(key)
            if threading.current_thread() is thread and not hanging:
                hanging.append(Put(ns, files))
            return mine

        monkeypatch.setattr(ns._appender._active.class_locks, "acquire_within", overtaken)
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(put(ns, 3)), daemon=True)
        thread.start()
        thread.join(5.0)
        assert results and (results[0].declined, results[0].reason) == (4, "io"), "it waits for the disk"
        assert hanging[0].end().stored == 4


def test_upkeep_goes_on_meanwhile(store_path: Path, files: Hanging, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(active, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(active, "SYNC_SECONDS", 0.1)
    with kvfs.open(store_path, capacity="64MiB", files=files, sync="batch") as store:
        ns = store.namespace("m", tiny(), "1")
        put(ns, 1)
        segments = ns._appender._active
        hanging = Put(ns, files)
        for task in (segments.tidy, segments.sync_dirty):
            thread = threading.Thread(target=task, daemon=True)
            thread.start()
            thread.join(SECONDS)
            assert not thread.is_alive(), f"{task.__name__} waits for the disk"
        assert hanging.end().stored == 4
        segments.sync_dirty()
        assert not segments._dirty
        segments.tidy()
        assert put(ns, 2).stored == 4


def test_an_import_says_that_a_write_hangs(store_path: Path, tmp_path: Path, files: Hanging) -> None:
    bundle = tmp_path / "bundle.tar"
    with kvfs.open(tmp_path / "other", capacity="64MiB") as other:
        put(other.namespace("m", tiny(), "1"), 2)
        other.export(str(bundle), ["m"])
    with kvfs.open(store_path, capacity="64MiB", files=files) as store:
        ns = store.namespace("m", tiny(), "1")
        hanging = Put(ns, files)
        raised: list[BaseException] = []

        def take() -> None:
            try:
                store.import_bundle(str(bundle))
            except StoreAccessError as exc:
                raised.append(exc)

        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        thread.join(SECONDS)
        assert raised and "another write has hung" in str(raised[0]), "the import waits for the disk"
        assert hanging.end().stored == 4
        assert store.import_bundle(str(bundle)).stored == 4


def test_access_times_that_hang_block_no_lookup_and_no_close(store_path: Path, files: Hanging) -> None:
    """A get wrote its access times under a lock that every lookup, the end of a save and the close need."""
    store = kvfs.open(store_path, capacity="64MiB", files=files)
    store._shared.background.stop()
    ns, tokens = store.namespace("m", tiny(), "1"), tokens_of(1, 4)
    assert put(ns, 1).stored == 4

    def get() -> None:
        with ns.match(tokens) as match:
            ns.get(match, bytearray(match.nbytes))

    get()
    # as the background does
    hanging = threading.Thread(target=store._shared.c.access_times.flush, name="hangs", daemon=True)
    hanging.start()
    assert files.hangs.wait(SECONDS)
    for call in (get, lambda: put(ns, 2), lambda: store.gc(0), store.close):
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(SECONDS / 4)
        assert not thread.is_alive(), "it waits for the disk of another"
    files.goes_on.set()
    hanging.join(SECONDS)
    assert not hanging.is_alive()


def test_a_segment_whose_open_hangs_is_a_miss_and_blocks_no_other_lookup(store_path: Path) -> None:
    """Every lookup waited for a disk that did not answer."""
    files, found = HangingOpens(), list[int]()
    with kvfs.open(store_path, capacity="64MiB", files=files) as store, counted(store) as moved:
        ns = store.namespace("m", tiny(), "1")
        for seed in (1, 2):
            put(ns, seed)
            store._shared.services().active.finish_all()
            files.names |= {path.name for path in segment_files(store_path)} if seed == 1 else set()

        def get(seed: int) -> None:
            with ns.match(tokens_of(seed, 4)) as match:
                found.append(ns.get(match, bytearray(match.nbytes)))

        with ns.match(tokens_of(2, 4)) as match:
            assert match.chunks == 4  # its segment is open from now on
            try:
                for seed in (1, 1, 2):
                    thread = threading.Thread(target=get, args=(seed,), daemon=True)
                    thread.start()
                    thread.join(SECONDS / 2)
                    assert not thread.is_alive(), "it waits for the disk"
                assert files.hangs.is_set() and found == [0, 0, 4] and moved("lookup_segments_missing") == 2
            finally:
                files.goes_on.set()
        while store._shared.c.segments.hangs:
            time.sleep(0.001)
        get(1)
        assert found[-1] == 4 and not store._shared.c.segments.count()


def test_a_store_is_closed_while_a_segment_cannot_be_opened(store_path: Path) -> None:
    files, before = HangingOpens(), set(threading.enumerate())
    store = kvfs.open(store_path, capacity="64MiB", files=files)
    ns = store.namespace("m", tiny(), "1")
    put(ns, 1)
    store._shared.services().active.finish_all()
    files.names = {path.name for path in segment_files(store_path)}
    assert not ns.match(tokens_of(1, 4)) and files.hangs.is_set()
    (opener,) = (thread for thread in set(threading.enumerate()) - before if thread.name == "kvfs-open")
    closing = threading.Thread(target=store.close, daemon=True)
    closing.start()
    closing.join(SECONDS / 2)
    assert not closing.is_alive(), "the close waits for the disk"
    files.goes_on.set()
    opener.join(SECONDS)
    assert not opener.is_alive()


def test_segments_are_opened_where_the_process_may_have_no_more_threads(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with kvfs.open(store_path, capacity="64MiB") as store:
        ns = store.namespace("m", tiny(), "1")
        put(ns, 1)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            assert ns.match(tokens_of(1, 4)).chunks == 4
        segments = store._shared.c.segments
    assert segments._worker() is None, "a thread that is started after the close would never end"
