"""Signals between any two bytecodes of a call: afterwards no lock is held, and the store works."""

from __future__ import annotations

import fcntl
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.pool import Pool
from tests.stores import TINY_BYTES, restored, seeded, tiny, tokens_of

CHUNKS = 3
STORM_SECONDS = 2.0


class Interrupted(BaseException):
    """What the handler raises, as KeyboardInterrupt is."""


@pytest.fixture
def store(memory_path: Path) -> Iterator[kvfs.Store]:
    with kvfs.open(memory_path / "store", capacity="64MiB") as made:
        yield made


@pytest.fixture
def storm() -> Iterator[Callable[[Callable[[], Any]], tuple[int, int]]]:
    """Runs a call again and again while alarms hit it at random moments; (calls that ended, calls interrupted)."""
    armed = False

    def strike(_number: int, _frame: Any) -> None:
        if armed:
            raise Interrupted

    def run(call: Callable[[], Any]) -> tuple[int, int]:
        nonlocal armed
        draw, ended, interrupted = random.Random(1), 0, 0
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

    old = signal.signal(signal.SIGALRM, strike)
    yield run
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, old)


def is_free(path: Path) -> bool:
    """Whether the lock could be had now, by anybody."""
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
    """Whatever of the interrupted puts is there is right."""
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
    """What was stored between interrupts is found by whoever reads the segments."""
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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # one may hit a weakref's callback
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


def test_ctrl_c_ends_a_put_at_once(store: kvfs.Store) -> None:
    """The interrupt reaches the caller, though the index is busy."""
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
    time.sleep(0.11)  # the breaker lets a call through again
    works(store, 3000)


def test_an_interrupted_load_has_ended_when_the_interrupt_arrives() -> None:
    """The caller may use his buffer for something else at once: nothing writes into it behind his back."""
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
        pool.run([partial(fill, at) for at in range(4)], beside=interrupted_caller)
    assert buffer == b"\1" * 4
    with pytest.raises(ZeroDivisionError):
        pool.run([lambda: 1, lambda: 1 // 0])
    assert pool.run([lambda n=n: n * n for n in range(20)]) == [n * n for n in range(20)]  # type: ignore[misc]
    pool.close()


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
        pool.run([first, *[partial(ran.append, n) for n in range(1, 5)]], beside=interrupted_caller)
    assert pool.run([lambda: "alive"]) == ["alive"]
    assert ran in ([], [0])
    pool.close()
