"""Waits for the lock of a segment class end, on the main thread and on any other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from kvfs.write import class_locks
from kvfs.write.class_locks import AppendTimeoutError, ClassLocks

T = TypeVar("T")


def here(call: Callable[[], T]) -> T:
    return call()


def elsewhere(call: Callable[[], T]) -> T:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result(10)


@pytest.mark.parametrize("thread", [here, elsewhere])
def test_a_lock_is_held_by_one_append_of_its_class(
    thread: Callable[[Callable[[], bool]], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(class_locks, "APPEND_SECONDS", 0.01)
    locks = ClassLocks()
    a, b = locks.lock("a"), locks.lock("b")  # references: a class without one gets a new lock, which is free

    def enters(key: str) -> bool:
        try:
            with locks.acquire_within(key):
                return locks.lock(key).locked()
        except AppendTimeoutError:
            return False

    with a:
        assert not thread(lambda: enters("a")), "the wait ends"
        assert not thread(lambda: locks.is_free_within("a"))
        assert thread(lambda: enters("b")), "another class does not wait"
    assert thread(lambda: enters("a"))
    assert thread(lambda: locks.is_free_within("a"))
    assert not a.locked() and not b.locked(), "released at the end"


@pytest.mark.parametrize("thread", [here, elsewhere])
def test_who_looks_waits_until_the_lock_is_free(thread: Callable[[Callable[[], bool]], bool]) -> None:
    locks = ClassLocks()
    lock = locks.lock("a")
    lock.acquire()
    release = threading.Timer(0.02, lock.release)
    release.start()
    assert thread(lambda: locks.is_free_within("a", 10.0))
    release.join()
