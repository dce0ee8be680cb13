"""Transfers that have not ended: who is late, who ends them, and how long a close waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvfs.transfer import unfinished as module
from kvfs.transfer.unfinished import Unfinished, _ends_late, _stop
from kvfs.types import TransferState

SECONDS = 30.0  # of waits that end at once


class Transfer(SimpleNamespace):
    """A transfer that is stopped and ended."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__

    def __init__(self, deadline: float, kind: str = "load", state: TransferState = TransferState.QUEUED) -> None:
        super().__init__(deadline=deadline, late_for="ring", state=state, task=SimpleNamespace(kind=kind))
        self.stopped: list[str] = []
        self.ended = threading.Event()
        self.by: list[threading.Thread] = []

    def stop(self, reason: str) -> None:
        self.stopped.append(reason)

    def try_end(self) -> None:
        self.by.append(threading.current_thread())
        self.ended.set()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def unfinished(clock: Clock) -> Any:
    made = Unfinished(clock)
    yield made
    made.dismiss()


def test_a_transfer_ends_at_its_deadline_and_not_before(unfinished: Any, clock: Clock) -> None:
    late, early = Transfer(100.0), Transfer(1e6)
    unfinished.add(early)
    assert len(unfinished) == 1 and unfinished._wakes_at == [1e6]
    unfinished.add(late)
    assert late.ended.wait(SECONDS) and late.stopped == ["ring"] and not early.ended.is_set()
    assert [thread.name for thread in late.by] == ["kvfs-end"] and late.by[0].daemon
    assert len(unfinished) == 2, "it is discarded when it has ended"
    clock.now = 1e6
    unfinished.add(other := Transfer(5.0))  # wakes the thread
    assert early.ended.wait(SECONDS) and other.ended.wait(SECONDS)
    assert early.stopped == other.stopped == late.stopped == ["ring"], "once each"


def test_only_an_earlier_deadline_wakes_the_thread(unfinished: Any) -> None:
    unfinished.add(Transfer(500.0))
    wakes: list[bool] = []
    unfinished._wake = SimpleNamespace(put=wakes.append)
    unfinished._wakes_at[0] = 500.0
    for deadline, woken in ((500.0, 0), (600.0, 0), (499.0, 1), (499.0, 1), (400.0, 2)):
        unfinished.add(Transfer(deadline))
        assert wakes == [True] * woken and unfinished._wakes_at[0] == min(deadline, unfinished._wakes_at[0])


def test_a_transfer_that_has_ended_is_not_stopped(unfinished: Any, clock: Clock) -> None:
    gone, last = Transfer(1e6), Transfer(1e6)
    for one in (gone, last):
        unfinished.add(one)
    unfinished.discard(gone)
    unfinished.discard(gone)
    clock.now = 1e6
    unfinished.add(Transfer(1.0))
    assert last.ended.wait(SECONDS) and not gone.stopped


def test_a_close_waits_until_all_have_ended(unfinished: Any) -> None:
    one, two = Transfer(1e9), Transfer(1e9)
    assert unfinished.wait(0.0) == []
    unfinished.add(one)
    unfinished.add(two)
    unfinished.discard(two)
    assert unfinished.wait(0.0) == [one]
    timer = threading.Timer(0.01, unfinished.discard, [one])
    timer.start()
    assert unfinished.wait(SECONDS) == []
    timer.join()


@pytest.mark.parametrize("kind", ["load", "save"])
@pytest.mark.parametrize("state", list(TransferState))
def test_the_deadline_of_a_save_is_for_its_copies(kind: str, state: TransferState) -> None:
    one: Any = Transfer(0.0, kind, state)
    before = state in (TransferState.QUEUED, TransferState.WAITING)
    assert _ends_late(one) is (kind == "load" or before)


def test_a_process_without_threads_ends_late_transfers_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    late: Any = [Transfer(0.0), Transfer(0.0)]
    late[0].late_for = "deadline"

    def refuse(*_: Any, **__: Any) -> Callable[[], None]:
        raise RuntimeError("can't start new thread")

    _stop([])
    monkeypatch.setattr(module.threading, "Thread", refuse)
    _stop(late)
    assert [one.stopped for one in late] == [["deadline"], ["ring"]]
    assert all(one.by == [threading.current_thread()] for one in late)
