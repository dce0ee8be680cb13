"""Calls that may hang with their disk: they end when nothing moves, and as late as they like while something does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import count

import pytest

from kvfs.errors import StoreLockedError
from kvfs.system import worker
from kvfs.system.worker import WatchedCalls

SECONDS = 0.3


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> WatchedCalls:
    monkeypatch.setattr(worker, "HUNG_SECONDS", SECONDS)
    monkeypatch.setattr(worker, "LOOK_SECONDS", 0.02)
    return WatchedCalls("/the/store")


@pytest.fixture
def disk() -> Iterator[threading.Event]:
    """A disk that hangs until it is set."""
    event = threading.Event()
    yield event
    event.set()


def ended(thread: threading.Thread) -> bool:
    thread.join(60)
    return not thread.is_alive()


def hung(calls: WatchedCalls, disk: threading.Event) -> threading.Thread:
    with pytest.raises(StoreLockedError, match=r"/the/store: the disk has not answered"):
        calls.run(disk.wait)
    (thread,) = calls._hung
    return thread


def test_results_and_errors_are_those_of_the_call(calls: WatchedCalls) -> None:
    assert calls.run(lambda: threading.current_thread().name) == "kvfs-call"
    with pytest.raises(KeyError, match="x"):
        calls.run(lambda: {}["x"])


def test_a_call_runs_where_the_process_may_have_no_more_threads(
    calls: WatchedCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert calls.run(threading.current_thread) is threading.current_thread()


def test_a_call_within_a_call_runs_in_its_thread(calls: WatchedCalls) -> None:
    inner, outer = calls.run(lambda: (calls.run(threading.get_ident), threading.get_ident()))
    assert inner == outer


def test_a_call_that_hangs_ends_for_its_caller_and_goes_on(calls: WatchedCalls, disk: threading.Event) -> None:
    thread = hung(calls, disk)
    disk.set()
    assert ended(thread) and calls.run(lambda: 7) == 7


def test_while_one_hangs_others_fail_at_once(calls: WatchedCalls, disk: threading.Event) -> None:
    """Each would leave one more thread behind, until the process has none left."""
    hung(calls, disk)
    before = threading.active_count()
    for _ in range(50):
        with pytest.raises(StoreLockedError):
            calls.run(lambda: pytest.fail("it was begun"))
    assert threading.active_count() == before


def test_a_call_that_proceeds_may_take_any_time(calls: WatchedCalls, monkeypatch: pytest.MonkeyPatch) -> None:
    used = count()
    monkeypatch.setattr(worker._WatchedThread, "cpu_seconds", lambda self: next(used))
    assert calls.run(lambda: threading.Event().wait(4 * SECONDS)) is False


def test_the_clock_of_a_call_stands_still_only_while_it_waits(disk: threading.Event) -> None:
    begun = threading.Event()

    def work() -> None:
        sum(range(2_000_000))
        begun.set()
        disk.wait()
        sum(range(2_000_000))

    thread = worker._WatchedThread(work)
    assert thread.cpu_seconds() is None
    thread.start()
    assert begun.wait(60)
    readings = [thread.cpu_seconds()]
    end = time.monotonic() + 60
    while len(set(readings[-10:])) > 1 or len(readings) < 10:  # until it waits
        assert time.monotonic() < end, "its clock goes on"
        time.sleep(0.01)
        readings.append(thread.cpu_seconds())
    disk.set()
    assert readings[-1] and ended(thread)


def test_a_close_waits_for_what_was_interrupted_and_not_for_what_hangs(
    calls: WatchedCalls, disk: threading.Event
) -> None:
    over = threading.Event()
    thread = worker._WatchedThread(lambda: (time.sleep(0.2), over.set()))
    thread.start()
    calls._threads.append(thread)
    calls.join(60)
    assert over.is_set()
    hung(calls, disk)
    calls.join(60)  # the test would time out
