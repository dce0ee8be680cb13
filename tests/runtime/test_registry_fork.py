"""A store that is open when the process forks: parent and child both go on, and neither uses the other's locks."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.directory.liveness import Liveness
from kvfs.runtime import registry
from kvfs.system.files import Files
from tests.stores import TINY_BYTES, counters, load, restored, run_child, seeded, tiny, tokens_of

CHUNKS = 3


@pytest.fixture
def store(memory_path: Path) -> Iterator[kvfs.Store]:
    with kvfs.open(memory_path / "store", capacity="32MiB") as made:
        yield made


@pytest.fixture
def ns(store: kvfs.Store) -> kvfs.Namespace:
    made = store.namespace("m", tiny(), revision="r1")
    assert save(made, 1) == CHUNKS
    return made


def save(ns: kvfs.Namespace, seed: int) -> int:
    return ns.put(tokens_of(seed, CHUNKS), seeded(seed, CHUNKS * TINY_BYTES)).stored


def serves(ns: kvfs.Namespace, *seeds: int) -> bool:
    return all(restored(ns, tokens_of(seed, CHUNKS)) == seeded(seed, CHUNKS * TINY_BYTES) for seed in seeds)


def owner(store: kvfs.Store) -> bytes:
    return store._shared.c.owner


def test_parent_and_child_both_go_on(store: kvfs.Store, ns: kvfs.Namespace) -> None:
    def child() -> tuple[bool, int, bool, bytes]:
        return serves(ns, 1), save(ns, 2), serves(ns, 1, 2), owner(store)

    fine, stored, both, theirs = run_child(child)
    assert fine and stored == CHUNKS and both and theirs != owner(store)
    assert serves(ns, 1, 2) and save(ns, 3) == CHUNKS and serves(ns, 1, 2, 3)


def test_parent_and_child_store_at_the_same_time(store: kvfs.Store, ns: kvfs.Namespace) -> None:
    """Each in its own segments: neither overwrites the other's records."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.read(reader, 1)
            fine = all(save(ns, 100 + n) == CHUNKS for n in range(30)) and serves(ns, *range(100, 130))
            os._exit(0 if fine else 3)
        finally:
            os._exit(4)
    os.write(writer, b"x")
    assert all(save(ns, 200 + n) == CHUNKS for n in range(30))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert serves(ns, *range(100, 130), *range(200, 230))
    os.close(reader)
    os.close(writer)


def test_the_end_of_a_child_frees_nothing_of_the_parent(store: kvfs.Store, ns: kvfs.Namespace) -> None:
    """Neither its liveness, nor the segments that its matches hold."""
    match = ns.match(tokens_of(1, CHUNKS))

    def child() -> str:
        match.close()
        store.close()
        return "closed"

    assert run_child(child) == "closed"
    assert run_child(lambda: "ended without closing") == "ended without closing"
    with observer(store) as others:
        assert owner(store) in others, "the parent is alive"
    segment = next(iter(match.segments.values()))
    import fcntl

    with open(Path(store.path) / "segments" / f"{segment.hex()}.kvs") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert load(ns, match)["full"] == seeded(1, CHUNKS * TINY_BYTES)
    assert save(ns, 2) == CHUNKS and serves(ns, 1, 2)
    match.close()


class observer:
    """The live processes, as another process sees them."""

    def __init__(self, store: kvfs.Store) -> None:
        self.directory = store._shared.directory

    def __enter__(self) -> list[bytes]:
        self.liveness = Liveness(self.directory)
        return self.liveness.others()

    def __exit__(self, *_: object) -> None:
        self.liveness.close()


def test_the_end_of_the_parent_frees_nothing_of_the_child(memory_path: Path) -> None:
    """The parent dies without a close; the child goes on, and its index is trusted as before."""
    path = memory_path / "store"
    (reader, writer), (dead, died) = os.pipe(), os.pipe()
    parent = os.fork()
    if not parent:
        store = kvfs.open(path, capacity="32MiB")
        ns = store.namespace("m", tiny(), revision="r1")
        save(ns, 1)
        waiting, opened = os.pipe()
        if os.fork():
            os.read(waiting, 1)
            os._exit(0)
        os.write(opened, b"x")
        answer: Any = "nothing"
        try:
            os.close(died)
            os.read(dead, 1)
            answer = (serves(ns, 1), save(ns, 2), serves(ns, 1, 2), counters(store).get("rebuilds", 0))
            store.close()
        finally:
            os.write(writer, pickle.dumps(answer))
            os._exit(0)
    os.close(writer)
    os.waitpid(parent, 0)  # until then, threads that are still ending have its files open
    os.write(died, b"x")
    with os.fdopen(reader, "rb") as pipe:
        assert pickle.loads(pipe.read()) == (True, CHUNKS, True, 0)
    for end in (dead, died):
        os.close(end)
    with kvfs.open(path) as store:
        assert serves(store.namespace("m", tiny(), revision="r1"), 1, 2)
        assert "rebuilds" not in counters(store), "the child was the last one, and closed"


def test_a_match_of_the_parent_loads_in_the_child(store: kvfs.Store, ns: kvfs.Namespace) -> None:
    with ns.match(tokens_of(1, CHUNKS)) as match:
        views = ns.view(match)

        def child() -> tuple[bytes, bytes]:
            return load(ns, match)["full"], b"".join(views)

        pages = seeded(1, CHUNKS * TINY_BYTES)
        assert run_child(child) == (pages, pages)
        assert load(ns, match)["full"] == pages


def test_a_fork_while_other_threads_use_the_store(store: kvfs.Store, ns: kvfs.Namespace) -> None:
    """The child inherits no lock that a thread of the parent holds."""
    stop, wrong = threading.Event(), []

    def work(seed: int) -> None:
        step = 0
        while not stop.is_set():
            step += 1
            if save(ns, 10_000 * seed + step % 200) not in (0, CHUNKS) or not serves(ns, 1):
                wrong.append(step)

    threads = [threading.Thread(target=work, args=(n,)) for n in (1, 2)]
    for thread in threads:
        thread.start()
    try:
        for n in range(12):
            assert run_child(lambda n=n: (serves(ns, 1), save(ns, 900_000 + n))) == (True, CHUNKS)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong and serves(ns, 1, *range(900_000, 900_012))


def grandchild(depth: int, ns: kvfs.Namespace) -> bool:
    fine = serves(ns, 1) and save(ns, 500 + depth) == CHUNKS
    return fine and (depth == 0 or bool(run_child(lambda: grandchild(depth - 1, ns)))) and serves(ns, 500 + depth)


def test_children_of_children_go_on(ns: kvfs.Namespace) -> None:
    assert run_child(lambda: grandchild(3, ns))
    assert serves(ns, 500, 501, 502, 503)


def pool_worker(seed: int) -> bool:
    assert SHARED is not None
    return save(SHARED, 700 + seed) == CHUNKS and serves(SHARED, 1, 700 + seed)


SHARED: kvfs.Namespace | None = None


def test_a_multiprocessing_pool_shares_the_store(store: kvfs.Store, ns: kvfs.Namespace) -> None:
    global SHARED
    SHARED = ns
    with multiprocessing.get_context("fork").Pool(3) as pool:
        assert all(pool.map(pool_worker, range(9), chunksize=1))
    SHARED = None
    assert serves(ns, *range(700, 709))


def test_a_read_only_store_forks_too(memory_path: Path) -> None:
    path = memory_path / "store"
    with kvfs.open(path, capacity="16MiB") as store:
        save(store.namespace("m", tiny(), revision="r1"), 1)
    with kvfs.open(path, read_only=True) as store:
        ns = store.namespace("m", tiny(), revision="r1")
        assert run_child(lambda: serves(ns, 1)) and serves(ns, 1)


def test_the_last_process_closes_the_index(memory_path: Path) -> None:
    path = memory_path / "store"
    store = kvfs.open(path, capacity="16MiB")
    ns = store.namespace("m", tiny(), revision="r1")
    save(ns, 1)

    def child() -> bool:
        fine = serves(ns, 1)
        store.close()
        return fine

    assert run_child(child)
    store.close()
    with kvfs.open(path) as store:
        assert serves(store.namespace("m", tiny(), revision="r1"), 1) and "rebuilds" not in counters(store)


def test_a_child_of_a_process_that_was_sweeping_sweeps(tmp_path: Path) -> None:
    """The child has no background thread: an inherited lock would be held forever, and the evictors' lock too."""
    with kvfs.open(tmp_path / "swept", capacity="16MiB") as store:

        def sweep() -> dict[str, int]:
            signal.alarm(20)
            return store.gc(0)

        with store._shared.services().evictor.reclaimer._sweeping:
            assert run_child(sweep)["bytes_after"] >= 0
        assert store.gc(0)["bytes_after"] >= 0


def test_a_fork_does_not_wait_for_a_store_that_another_thread_opens(memory_path: Path) -> None:
    """Its child opens the same store, and leaves the parent's locks to the parent."""
    begun, go_on, late = threading.Event(), threading.Event(), threading.Event()

    class SlowFiles(Files):
        def listdir(self, dir_fd: int) -> list[str]:
            begun.set()
            if not go_on.wait(30):
                late.set()
            return super().listdir(dir_fd)

    path = memory_path / "slow"
    kvfs.open(path, capacity="16MiB").close()
    opened: list[kvfs.Store] = []
    opening = threading.Thread(target=lambda: opened.append(kvfs.open(path, files=SlowFiles())))
    opening.start()
    assert begun.wait(30)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            with kvfs.open(path) as store:
                os.write(writer, b"+" if save(store.namespace("m", tiny(), revision="r1"), 1) == CHUNKS else b"-")
            signal.pause()
        finally:
            os._exit(4)
    try:
        assert not late.is_set() and not go_on.is_set(), "the fork waited for the open"
        assert os.read(reader, 1) == b"+"
        go_on.set()
        opening.join(30)
        assert serves(opened[0].namespace("m", tiny(), revision="r1"), 1)
        opened[0].close()
        with kvfs.open(path) as again:
            assert again._shared.rebuilt is None, "the child kept a lock of the parent"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("where", ["in LMDB", "at the gate", "paused"])
def test_a_child_calls_lmdb_only_if_the_index_thread_was_outside_of_it(
    store: kvfs.Store, ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Inside, a lock of LMDB may be held by a thread that the child does not have. An environment that is not closed
    keeps the child from the index: py-lmdb opens a file once per process."""
    index, release, closed, begun = store._shared.c.index, threading.Event(), list[None](), threading.Event()

    class Environment:
        def close(self) -> None:
            closed.append(None)

    environment = index._env
    if where != "paused":
        index._worker.submit(lambda: (begun.set(), release.wait(60)))
        assert begun.wait(30)  # before: a call of the background would end, and be outside again
        monkeypatch.setattr(index, "_in_lmdb", where == "in LMDB")
        index._env = Environment()  # type: ignore[assignment]
    else:
        index._worker.call(lambda: setattr(index, "_env", Environment()), 30.0)
    try:
        assert run_child(lambda: len(closed)) == (0 if where == "in LMDB" else 1)
    finally:
        index._env = environment
        release.set()
    assert serves(ns, 1)


@pytest.mark.parametrize("then", ["nothing is there", "another store is there"])
def test_a_child_goes_on_with_the_store_that_was_moved(store: kvfs.Store, ns: kvfs.Namespace, then: str) -> None:
    """It opened the old path: no store, or the wrong one, which it then wrote to."""
    old, new = Path(store.path), Path(store.path).with_name("moved")
    old.rename(new)
    if then == "another store is there":
        kvfs.open(old, capacity="32MiB").close()
    assert run_child(lambda: (serves(ns, 1), save(ns, 2), serves(ns, 1, 2))) == (True, CHUNKS, True)
    assert serves(ns, 1, 2)
    if then == "another store is there":
        with kvfs.open(old) as other:
            assert not other.catalog.namespaces()
        shutil.rmtree(old)
    new.rename(old)


def test_a_child_does_not_wait_for_a_disk_that_hangs(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It never left ``os.fork``. Now it misses and declines, and serves when the disk answers."""
    monkeypatch.setattr(registry, "RESTART_SECONDS", 0.3)
    parent, answers = os.getpid(), threading.Event()

    class HangingFiles(Files):
        def preadv(self, *args: Any, **options: Any) -> int:
            if os.getpid() != parent and not answers.wait(60):
                os._exit(5)
            return super().preadv(*args, **options)

    def child() -> tuple[int, int, bool]:
        hung = ns.match(tokens_of(1, CHUNKS)).tokens, save(ns, 2)
        store.stats()
        answers.set()
        return *hung, store.wait_ready(30) and serves(ns, 1) and save(ns, 3) == CHUNKS

    with kvfs.open(memory_path / "hangs", capacity="32MiB", files=HangingFiles()) as store:
        ns = store.namespace("m", tiny(), revision="r1")
        assert save(ns, 1) == CHUNKS
        assert run_child(child) == (0, 0, True)
        assert serves(ns, 1, 3)
