"""A fork in the middle of an operation: the child has its own locks and keeps none of the parent's."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kvfs
from tools.torture.case import PROMPTS, get, locks_left, namespace, open_store, put
from tools.torture.judge import Judge


@pytest.fixture
def judge() -> Iterator[Judge]:
    found = Judge()
    yield found
    assert not found.failed, "\n".join([found.line(), *found.notes])


def in_child(work: Callable[[], bool]) -> int:
    """Fork; the child's exit status is 0 if ``work`` says so."""
    child = os.fork()
    if child:
        return child
    try:
        os._exit(0 if work() else 1)
    finally:
        os._exit(2)


def ended_well(child: int) -> bool:
    for _ in range(3000):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status == 0
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return False


def test_a_child_keeps_no_lock_of_an_eviction_or_a_rebuild(tmp_path: Path, judge: Judge) -> None:
    """A child that was forked while its parent evicted held run/gc as long as it lived: no process could evict."""
    path = tmp_path / "store"
    with open_store(path) as store:
        ns = namespace(store)
        put(ns, PROMPTS.tokens(1, 5), judge)
        held, release = threading.Event(), threading.Event()

        def evict() -> None:
            with store._shared.services().evictor.lock.hold(store._shared.c.files.monotonic() + 5.0) as got:
                assert got
                held.set()
                release.wait(30.0)

        thread = threading.Thread(target=evict)
        thread.start()
        assert held.wait(10.0)
        read, write = os.pipe()
        child = in_child(lambda: os.read(read, 1) == b"." and _works(store))
        try:
            release.set()
            thread.join()
            time.sleep(0.1)
            assert "run/gc" not in locks_left(path)
            store.gc()
        finally:
            os.write(write, b".")
            assert ended_well(child)
            os.close(read)
            os.close(write)


def _works(store: kvfs.Store) -> bool:
    judge = Judge()
    ns = namespace(store)
    mine = PROMPTS.tokens(1000 + os.getpid(), 5)  # no other process writes these
    put(ns, PROMPTS.tokens(2, 5), judge)
    store.gc(0)
    result = put(ns, mine, judge)
    found = get(ns, mine, judge)
    if found != 5 or judge.failed:
        print(found, result, judge.notes, store.stats(), file=sys.stderr, flush=True)
    return found == 5 and not judge.failed


def test_children_of_a_busy_parent_go_on_with_the_open_store(tmp_path: Path, judge: Judge) -> None:
    with open_store(tmp_path / "store") as store:
        ns = namespace(store)
        busy, stop = [0], threading.Event()

        def work() -> None:
            while not stop.is_set():
                busy[0] += 1
                put(ns, PROMPTS.tokens(busy[0] % 50, 10), judge)
                get(ns, PROMPTS.tokens(busy[0] % 50, 10), judge, views=True)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            assert all(ended_well(in_child(lambda: _works(store))) for _ in range(10))
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert busy[0] > 10


def test_views_and_matches_of_the_parent_survive_a_fork(tmp_path: Path, judge: Judge) -> None:
    with open_store(tmp_path / "store") as store:
        ns, tokens = namespace(store), PROMPTS.tokens(1, 10)
        put(ns, tokens, judge)
        with ns.match(tokens) as match:
            views = ns.view(match)
            out = bytearray(match.nbytes)
            child = in_child(lambda: not PROMPTS.wrong(tokens, views) and ns.get(match, out) == 10)
            assert ended_well(child)
            assert ns.get(match, out) == 10
            assert PROMPTS.wrong(tokens, views) == 0
            assert len(views) == 10
