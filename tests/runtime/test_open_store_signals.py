"""Signals between any two bytecodes of a call: afterwards no lock is held, and the store works."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvfs
from kvfs.index.tables import ACTIVE
from kvfs.runtime import open_store
from kvfs.system.thread_pool import Pool
from kvfs.transfer.control import TransferControl, TransferTask
from kvfs.transfer.handle import Transfer
from kvfs.types import Tier
from tests.stores import TINY_BYTES, restored, seeded, segment_files, tiny, tokens_of

CHUNKS = 3
STORM_SECONDS = 2.0


class Interrupted(BaseException):
    """What the handler raises, like KeyboardInterrupt."""


@pytest.fixture
def store(memory_path: Path) -> Iterator[kvfs.Store]:
    with kvfs.open(memory_path / "store", capacity="64MiB") as made:
        yield made


@pytest.fixture
def storm(request: pytest.FixtureRequest) -> Iterator[Callable[[Callable[[], Any]], tuple[int, int]]]:
    """Runs a call again and again while alarms hit it at random moments; (calls that ended, calls interrupted)."""
    armed = False

    def strike(_number: int, _frame: Any) -> None:
        if armed:
            raise Interrupted

    def run(call: Callable[[], Any]) -> tuple[int, int]:
        nonlocal armed
        draw, ended, interrupted = random.Random(request.node.name), 0, 0
        end = time.monotonic() + STORM_SECONDS
        while time.monotonic() < end:
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(20e-6, 3e-3))
                call()
                armed = False
                ended += 1
            except Interrupted:
                interrupted += 1
            finally:
                armed = False
                signal.setitimer(signal.ITIMER_REAL, 0)
        return ended, interrupted

    old, hook = signal.signal(signal.SIGALRM, strike), sys.unraisablehook
    sys.unraisablehook = lambda _: None  # one may hit a __del__; pytest's hook would keep the frames and their objects
    yield run
    sys.unraisablehook = hook
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, old)


def is_free(path: Path) -> bool:
    """Whether any process could take the lock now."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        with open(path, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                time.sleep(0.001)  # the index thread may be finishing what was abandoned
    return False


def works(store: kvfs.Store, seed: int) -> None:
    path = Path(store.path)
    assert is_free(path / "gate") and is_free(path / "main") and is_free(path / "run" / "gc")
    ns = store.namespace("m", tiny(), revision="r1")
    tokens, pages = tokens_of(seed, CHUNKS), seeded(seed, CHUNKS * TINY_BYTES)
    put = ns.put(tokens, pages)
    assert put.stored == CHUNKS, put
    assert restored(ns, tokens) == pages


def check_all(store: kvfs.Store, seeds: range) -> None:
    """What the interrupted puts have stored is right."""
    ns = store.namespace("m", tiny(), revision="r1")
    for seed in seeds:
        found = restored(ns, tokens_of(seed, CHUNKS))
        assert found == seeded(seed, CHUNKS * TINY_BYTES)[: len(found)]


def test_interrupted_puts_leave_no_lock_and_no_wrong_byte(store: kvfs.Store, storm: Any) -> None:
    ns = store.namespace("m", tiny(), revision="r1")
    pages = [seeded(seed, CHUNKS * TINY_BYTES) for seed in range(50)]
    prompts = [tokens_of(seed, CHUNKS) for seed in range(50)]
    count = 0

    def put() -> None:
        nonlocal count
        seed, count = count % 50, count + 1
        ns.put(prompts[seed], pages[seed])

    _, interrupted = storm(put)
    assert interrupted > 20, "the storm missed"
    works(store, 1000)
    check_all(store, range(50))


def test_interrupted_puts_survive_a_rebuild(memory_path: Path, storm: Any) -> None:
    """A rebuild from the segments finds what was stored between interrupts."""
    path = memory_path / "store"
    stored: list[int] = []
    with kvfs.open(path, capacity="256MiB") as store:
        ns = store.namespace("m", tiny(), revision="r1")
        count = 0

        def put() -> None:
            nonlocal count
            seed, count = count, count + 1
            if ns.put(tokens_of(seed, 1), seeded(seed, TINY_BYTES)).stored:
                stored.append(seed)

        storm(put)
        found = [seed for seed in stored if restored(ns, tokens_of(seed, 1)) == seeded(seed, TINY_BYTES)]
        assert found == stored and len(stored) > 20
    (path / "index" / "CURRENT").unlink()
    with kvfs.open(path) as store:
        assert store.wait_ready()
        ns = store.namespace("m", tiny(), revision="r1")
        lost = [seed for seed in stored if restored(ns, tokens_of(seed, 1)) != seeded(seed, TINY_BYTES)]
        assert not lost


def test_interrupted_matches_leave_no_lock_and_no_stuck_thread(store: kvfs.Store, storm: Any) -> None:
    ns = store.namespace("m", tiny(), revision="r1")
    tokens, pages = tokens_of(1, 40), seeded(1, 40 * TINY_BYTES)
    ns.put(tokens, pages)

    def match() -> None:
        with ns.match(tokens) as found:
            assert found.chunks == 40 and ns.get(found, bytearray(found.nbytes)) == 40

    _, interrupted = storm(match)
    assert interrupted > 20, "the storm missed"
    works(store, 2000)
    assert restored(ns, tokens) == pages


def open_files() -> Counter[str]:
    """The open files of this process, by name."""
    names: Counter[str] = Counter()
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            names[os.readlink(entry.path)] += 1
    # the watch starts a second after the store was opened, in a thread that no signal handler runs in
    return Counter({name: n for name, n in names.items() if not name.startswith("anon_inode:")})


def settled(store: kvfs.Store) -> None:
    """Run the upkeep that a store does every second or two."""
    gc.collect()
    store._shared.c.access_times.flush()
    store._shared._expire_holds()
    store._shared.services().active.tidy()


def rows_of(store: kvfs.Store) -> set[int]:
    """Active segments that the ledger charges to this process."""
    c = store._shared.c
    return {n for n, row in c.index.read(lambda s: s.segments_in(ACTIVE), 2.0) if row.owner == c.owner}


@pytest.mark.parametrize("seed", range(3))
def test_interrupted_matches_and_loads_hold_nothing(store: kvfs.Store, storm: Any, seed: int) -> None:
    """Matches of several segments, each of which is opened and locked again: none stays open."""
    ns = store.namespace("m", tiny(), revision="r1")
    tokens, pages = tokens_of(seed, 40), seeded(seed, 40 * TINY_BYTES)
    for chunk in range(0, 40, 5):
        ns.put(tokens, pages[chunk * TINY_BYTES :][: 5 * TINY_BYTES], start=chunk)
        store._shared.services().active.finish_all()
    out = bytearray(40 * TINY_BYTES)
    ns.get(ns.match(tokens), out)
    settled(store)
    # files of access times are open from here on, when the background has opened those that it was at
    end = time.monotonic() + 60
    while sum("/run/use/" in name for name in open_files()) < len(segment_files(Path(store.path))):
        assert time.monotonic() < end
        time.sleep(0.05)
    before = open_files()

    def match() -> None:
        found = ns.match(tokens)
        views = ns.view(found)
        assert ns.get(found, out) == 40 and len(views) == 40
        found.close()

    _, interrupted = storm(match)
    assert interrupted > 20, "the storm missed"
    settled(store)
    end = time.monotonic() + 60
    while open_files() - before and time.monotonic() < end:  # the background is at work for a moment now and then
        time.sleep(0.05)
    assert open_files() - before == Counter()
    assert store._shared.c.segments.count() == 0
    assert all(is_free(file) for file in segment_files(Path(store.path)))
    works(store, 5000)


def test_interrupted_puts_keep_no_file_no_lock_and_no_charge(memory_path: Path, storm: Any) -> None:
    """Segments are made, sealed, evicted and relocated all the time: an interrupt leaves nothing behind."""
    with kvfs.open(memory_path / "store", capacity="16MiB", segment_bytes="256KiB") as store:
        ns = store.namespace("m", tiny(), revision="r1")
        pages, count = seeded(1, 40 * TINY_BYTES), 0

        def put() -> None:
            nonlocal count
            count += 1
            ns.put(tokens_of(count, 40), pages, ttl=None if count % 3 else 1000.0 * (count % 7))

        for _ in range(80):
            put()
        _, interrupted = storm(put)
        assert interrupted > 20, "the storm missed"
        settled(store)
        store.gc()
        c = store._shared.c
        active = store._shared.services().active
        assert rows_of(store) == active.active_numbers()
        assert c.index.read(lambda s: s.check_ledger(), 2.0)
        held = [
            name for name, n in open_files().items() if name.endswith(".kvs") or "(deleted)" in name for _ in range(n)
        ]
        assert len([name for name in held if str(memory_path) in name]) == len(active.active_numbers()), held
        works(store, 100_000)
        for _ in range(5):  # eviction relocates a little to a segment of its own
            store._shared.services().active.finish_all()
            assert all(is_free(file) for file in segment_files(Path(store.path)))
            left = store.gc(0)["bytes_after"]
        assert left == 0, "something is charged that no process can reclaim"


def test_ctrl_c_ends_a_put_at_once(store: kvfs.Store) -> None:
    """The interrupt reaches the caller although the index is busy."""
    ns = store.namespace("m", tiny(), revision="r1")
    with open(Path(store.path) / "gate", "rb") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        old = signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            with pytest.raises(KeyboardInterrupt):
                ns.put(tokens_of(1, CHUNKS), seeded(1, CHUNKS * TINY_BYTES))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, old)
    assert store.wait_ready(60.0), "the breaker lets no call through"
    works(store, 3000)


def test_kvfs_installs_no_handler_and_an_engines_own_may_call_release(store: kvfs.Store) -> None:
    ns, numbers = store.namespace("m", tiny(), revision="r1"), (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    blocks = np.zeros((2, CHUNKS, 16, 2, 8), "uint16")
    with ns.attach(kvfs.describe(ns.layout.groups[0], blocks, "layer,block,token,head,2*dim")) as io:
        old = signal.signal(signal.SIGALRM, lambda *_: io.release())
        try:
            signal.raise_signal(signal.SIGALRM)
        finally:
            signal.signal(signal.SIGALRM, old)
        saved = io.save(ns.plan_save(tokens_of(1, CHUNKS)), list(range(CHUNKS))).wait(30)
        assert saved is not None and saved.pages == CHUNKS
    assert [signal.getsignal(number) for number in numbers] == before


def test_an_interrupted_load_has_ended_when_the_interrupt_arrives() -> None:
    """The caller may use its buffer for something else at once: no thread writes into it any more."""
    pool = Pool(4, "test-pool")
    running, go_on = threading.Semaphore(0), threading.Event()
    buffer = bytearray(4)

    def fill(at: int) -> None:
        running.release()
        go_on.wait(5)
        buffer[at] = 1

    def interrupted_caller() -> None:
        for _ in range(4):
            running.acquire()
        threading.Timer(0.05, go_on.set).start()
        raise Interrupted

    with pytest.raises(Interrupted):
        pool.run([partial(fill, at) for at in range(4)], meanwhile=interrupted_caller)
    assert buffer == b"\1" * 4
    with pytest.raises(ZeroDivisionError):
        pool.run([lambda: 1, lambda: 1 // 0])
    assert pool.run([lambda n=n: n * n for n in range(20)]) == [n * n for n in range(20)]  # type: ignore[misc]
    pool.close()


def test_a_transfer_ends_though_its_cancel_is_interrupted() -> None:
    def strike(_number: int, _frame: Any) -> None:
        raise Interrupted

    def summarise(_done: Any) -> tuple[int, dict[Tier, int]]:
        signal.raise_signal(signal.SIGALRM)
        return 0, {}

    ended: list[object] = []
    for stop in ("cancel", "withdraw", "try_end"):
        task = TransferTask("load", {0: 0b11}, {0: ("full", (0,), 1)}, 0.0, summarise, on_done=ended.append)
        control = TransferControl(task, ended.append)
        transfer = Transfer(control)
        old = signal.signal(signal.SIGALRM, strike)
        try:
            with pytest.raises(Interrupted):
                control.try_end() if stop == "try_end" else getattr(transfer, stop)(timeout=0)
        finally:
            signal.signal(signal.SIGALRM, old)
        assert transfer.wait(60) is not None and ended == [control, transfer]
        ended.clear()


def test_calls_that_have_not_begun_are_skipped_after_an_interrupt() -> None:
    pool = Pool(1, "test-pool")
    ran: list[int] = []
    release = threading.Event()

    def first() -> None:
        release.wait(5)
        ran.append(0)

    def interrupted_caller() -> None:
        threading.Timer(0.05, release.set).start()
        raise Interrupted

    with pytest.raises(Interrupted):
        pool.run([first, *[partial(ran.append, n) for n in range(1, 5)]], meanwhile=interrupted_caller)
    assert pool.run([lambda: "alive"]) == ["alive"]
    assert ran in ([], [0])
    pool.close()


def test_threads_that_wait_for_a_disk_share_one_timeout_at_close(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, release, waits = Pool(8, "test-pool"), threading.Event(), list[float]()
    held = pool.begin([partial(release.wait, 60)] * 8)
    join = threading.Thread.join

    def counted_join(thread: threading.Thread, timeout: float = 1e9) -> None:
        waits.append(timeout)
        join(thread, timeout)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", counted_join)
        pool.close(0.25)
    release.set()
    held.wait()
    assert len(waits) == 8 and sum(waits) < 0.5, waits


def test_a_segment_that_was_sealed_meanwhile_is_not_dropped(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Upkeep saw a new segment before its writer was registered, waited for the put, and dropped what it stored."""
    with kvfs.open(store_path, capacity="16MiB") as store:
        active, index = store._shared.services().active, store._shared.c.index
        ns = store.namespace("model", tiny(), "1")
        read = index.read
        early: list[Any] = []

        def stale(function: Any, timeout: float) -> Any:
            return early.pop() if early else read(function, timeout)

        monkeypatch.setattr(index, "read", stale)
        ns.put(tokens_of(1, 8), seeded(1, 8 * TINY_BYTES))
        rows = [(n, row._replace(records=0)) for n, row in read(lambda s: s.segments_in(ACTIVE), 5.0)]
        early.append((rows, index.generation))
        active.finish_all()
        active._release_rows_without_writer()
        assert not early, "the upkeep looked elsewhere"
        assert restored(ns, tokens_of(1, 8)) == seeded(1, 8 * TINY_BYTES)


def test_calls_that_a_closed_pool_has_not_begun_end_with_an_error() -> None:
    """Its only thread may wait for a disk, or may have ended."""
    pool, release = Pool(1, "test-pool"), threading.Event()
    held = pool.begin([partial(release.wait, 30)])
    queued = pool.begin([lambda: None])
    pool.close(timeout=0.05)
    with pytest.raises(OSError, match="closed"):
        queued.wait()
    with pytest.raises(OSError, match="closed"):
        pool.run([lambda: None])
    release.set()
    held.wait()


def test_an_interrupt_in_the_middle_of_an_open_is_raised_unchanged(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came out as an AttributeError, and the index's thread and descriptors stayed."""

    class Interrupted(open_store.AccessTimes):
        def __init__(self, *args: Any) -> None:
            raise KeyboardInterrupt

    with kvfs.open(store_path, capacity="16MiB") as store:
        store.namespace("model", tiny(), "1").put(tokens_of(1, 8), seeded(1, 8 * TINY_BYTES))
    before, files = {t.name for t in threading.enumerate()}, len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(open_store, "AccessTimes", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            kvfs.open(store_path)
    assert {t.name for t in threading.enumerate()} == before
    assert len(os.listdir("/proc/self/fd")) == files
    with kvfs.open(store_path) as store:
        assert restored(store.namespace("model", tiny(), "1"), tokens_of(1, 8)) == seeded(1, 8 * TINY_BYTES)
