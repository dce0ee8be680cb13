"""The state of one transfer: latches, steps, outcomes, callbacks in order, and each way in which it may end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvfs.errors import ConfigError
from kvfs.transfer.control import Latch, TransferControl, TransferTask
from kvfs.transfer.outcome import TierAccounting
from kvfs.types import PageDone, PageOutcome, Tier, TransferResult, TransferState
from tests.stores import run_child

GROUPS = {0: ("full", (0, 1), 100), 3: ("window", (1, 2), 10)}


class Lease:
    def __init__(self) -> None:
        self.released = 0

    def release(self) -> None:
        self.released += 1


def control(pages: dict[int, int] | None = None, **how: Any) -> tuple[TransferControl, list[object]]:
    told: list[object] = []
    task = TransferTask(
        how.pop("kind", "save"), {0: 0b1111, 3: 0b11} if pages is None else pages, GROUPS, 100.0,
        how.pop("summarise", lambda outcomes: (len(outcomes), {})), **how,
    )  # fmt: skip
    return TransferControl(task, lambda made: told.append("end")), told


def in_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join(10.0)
    assert not thread.is_alive()


# -- latches -----------------------------------------------------------------------------------


def test_a_latch_is_set_once_for_all() -> None:
    latch = Latch()
    assert not latch.is_set() and not latch.wait(0.0) and not latch.wait(0.01)
    in_thread(latch._set)
    latch._set()
    assert latch.is_set() and latch.wait(0.0) and latch.wait(None)


def test_those_that_wait_are_woken_at_once() -> None:
    latch, woken = Latch(), list[float]()

    def wait() -> None:
        if latch.wait(10.0):
            woken.append(time.monotonic())

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    latch._set()
    for thread in threads:
        thread.join(5.0)
    assert len(woken) == 3


def test_a_latch_is_also_set_by_what_it_watches() -> None:
    answers = iter([False, True])
    latch = Latch()
    latch.watch(lambda: next(answers))
    assert not latch.is_set() and latch.is_set() and latch.is_set(), "it is not asked again"
    failed = Latch()

    def fail() -> bool:
        raise RuntimeError("the GPU failed")

    failed.watch(fail)
    assert not failed.is_set() and failed._query is None and not failed.wait(0.001)
    failed._set()
    assert failed.wait(0.0)


def test_a_forked_child_does_not_wait_for_its_parent() -> None:
    latch, (made, _) = Latch(), control()

    def child() -> list[str]:
        said = []
        for call in (latch.wait, lambda: made.layer_ready(0), lambda: made.cancel(0.0), lambda: made.withdraw(0.0)):
            try:
                call()
            except ConfigError as exc:
                said.append(str(exc)[:36])
        return said

    assert run_child(child) == ["this transfer belongs to the parent "] * 4


@pytest.mark.parametrize("call", ["layer_ready", "cancel", "withdraw"])
def test_the_transfer_of_another_process_is_refused(call: str) -> None:
    made, _ = control()
    made.done._pid += 1  # as in a forked child
    with pytest.raises(ConfigError, match="belongs to the parent process: attach again and start a new one here"):
        getattr(made, call)(0)
    with pytest.raises(ConfigError, match="belongs to the parent process"):
        made.done.wait(0.0)
    assert made.state is TransferState.QUEUED, "it is not stopped"


# -- outcomes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settled", "stop", "state", "result"),
    [
        ([(0, 15, "STORED"), (3, 3, "STORED")], "", "DONE", (6, 420, 0, 0, "")),
        ([(0, 15, "LOADED"), (3, 3, "SKIPPED")], "", "DONE", (4, 400, 2, 0, "")),
        ([(0, 3, "STORED")], "ring", "PARTIAL", (2, 200, 0, 4, "ring")),
        ([(3, 1, "SKIPPED")], "space", "PARTIAL", (0, 0, 1, 5, "space")),
        ([(0, 15, "UNREADABLE")], "space", "DECLINED", (0, 0, 0, 6, "space")),
        ([], "space", "DECLINED", (0, 0, 0, 6, "space")),
        ([], "cancelled", "CANCELLED", (0, 0, 0, 6, "cancelled")),
        ([(0, 15, "STORED")], "cancelled", "CANCELLED", (4, 400, 0, 2, "cancelled")),
        ([(0, 15, "STORED"), (3, 3, "STORED")], "cancelled", "DONE", (6, 420, 0, 0, "")),
        ([(0, 15, "STORED"), (3, 3, "STORED"), (3, 3, "DECLINED")], "", "DONE", (6, 420, 0, 0, "")),
    ],
)
def test_what_a_transfer_comes_to(
    settled: list[tuple[int, int, str]], stop: str, state: str, result: tuple[int, int, int, int, str]
) -> None:
    made, told = control()
    for group, chunks, outcome in settled:
        made.settle(group, chunks, PageOutcome[outcome])
    if stop:
        made.stop(stop)
    assert made.result is None and not made.done.is_set()
    made.end()
    made.end()
    found = made.result
    assert found is not None and made.state is TransferState[state]
    assert (found.pages, found.nbytes, found.skipped, found.declined, found.reason) == result
    assert told == ["end"] and made.done.is_set() and made.published.is_set() and made.source_free.is_set()


@pytest.mark.parametrize(("stop", "state"), [("", "DONE"), ("space", "DECLINED"), ("cancelled", "CANCELLED")])
def test_a_transfer_of_no_pages(stop: str, state: str) -> None:
    made, _ = control({})
    if stop:
        made.stop(stop)
    made.end()
    assert made.state is TransferState[state] and made.result == TransferResult(reason=stop)


def test_an_error_is_a_failure_and_the_first_one_stays() -> None:
    made, _ = control()
    first = ValueError("first")
    made.note("ring")
    made.stop("error", first)
    made.stop("closed", ValueError("second"))
    made.note("late")
    assert made.stopped and made.error is first
    made.end()
    assert made.state is TransferState.FAILED and made.result is not None and made.result.reason == "ring"
    made.stop("x", None)
    made.enter(TransferState.LOADING)
    assert made.state is TransferState.FAILED, "it has ended"


def test_a_likely_summary_is_used_if_it_came_true() -> None:
    asked: list[Any] = []

    def summarise(outcomes: Any) -> tuple[int, dict[Tier, int]]:
        asked.append({outcome: dict(groups) for outcome, groups in outcomes.items()})
        return 10 * len(asked), {}

    for chunks, tokens, times in ((0b11, 10, 1), (0b1, 20, 2)):
        asked.clear()
        made, _ = control({0: chunks}, summarise=summarise)
        made.expect({PageOutcome.LOADED: {0: 0b11}})
        made.settle(0, 0b11, PageOutcome.LOADED)
        made.end()
        assert made.result is not None and (made.result.tokens, len(asked)) == (tokens, times)


def test_pages_may_be_known_later() -> None:
    made, _ = control({})
    made.offer({3: 0b111}, lambda outcomes: (7, {}))
    made.settle(3, 0b1001, PageOutcome.LOADED)
    made.settle(0, 1, PageOutcome.LOADED)
    made.end()
    made.offer({0: 1}, lambda outcomes: (9, {}))
    assert made.result == TransferResult(7, 1, 10, 0, 2, {}, "")


# -- callbacks ---------------------------------------------------------------------------------


def test_callbacks_come_in_order_after_their_step() -> None:
    seen: list[object] = []
    made, told = control(on_page=seen.append)
    made.call_last(lambda: seen.append("last"))
    made.when_done(lambda: seen.append("done"))
    with made.step() as allowed:
        assert allowed
        made.settle(0, 0b101, PageOutcome.STORED)
        made.settle(0, 0b001, PageOutcome.DECLINED)
        assert seen == []
    pages = [PageDone("full", 0, PageOutcome.STORED), PageDone("full", 2, PageOutcome.STORED)]
    assert seen == pages
    with made.step(tell=False):
        made.settle(3, 0b10, PageOutcome.SKIPPED)
    assert seen == pages
    made.stop("cancelled")
    with made.step() as allowed:
        assert not allowed
    assert seen[2:] == [PageDone("window", 1, PageOutcome.SKIPPED)]
    made.end()
    rest = [PageDone("full", 1, PageOutcome.CANCELLED), PageDone("full", 3, PageOutcome.CANCELLED)]
    assert seen[3:] == [*rest, PageDone("window", 0, PageOutcome.CANCELLED), "last", "done"] and told == ["end"]
    made.when_done(lambda: seen.append("at once"))
    assert seen[-1] == "at once" and made.calls_back


def test_a_callback_that_fails_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[int] = []

    def callback(page: PageDone) -> None:
        seen.append(page.chunk)
        if page.chunk == 0:
            raise ValueError("x")
        if page.chunk == 1:
            raise KeyboardInterrupt

    made, _ = control({0: 0b111}, on_page=callback)
    made.settle(0, 0b111, PageOutcome.STORED)
    with pytest.raises(KeyboardInterrupt):
        made.end()
    assert seen == [0, 1, 2] and made.done.is_set() and not made._dispatching
    assert [r.message for r in caplog.records] == ["a callback of a transfer failed"]


def test_who_calls_back() -> None:
    assert not control()[0].calls_back
    assert control(on_done=lambda handle: None)[0].calls_back
    assert control()[0].deadline == 100.0


# -- layers ------------------------------------------------------------------------------------


def test_layers_are_ready_when_they_arrive_or_at_the_end() -> None:
    made, _ = control()
    first = made.layer_ready(0)
    assert made.layer_ready(0) is first and not first.is_set()
    with pytest.raises(ConfigError, match=r"layer 7 is not part of this transfer: it has \[0, 1, 2\]"):
        made.layer_ready(7)
    made.layers_ready([0, 2])
    assert first.is_set() and made.layer_ready(2).is_set() and not made.layer_ready(1).is_set()
    second = made.layer_ready(1)
    made.end()
    assert second.is_set()
    late, _ = control()
    late.end()
    assert late.layer_ready(1).is_set()


# -- cancelling --------------------------------------------------------------------------------


def test_a_cancel_waits_for_bytes_that_move() -> None:
    made, _ = control()
    lease: Any = Lease()
    assert made.own(lease)
    with made.step(engine=False):
        assert not made.cancel(0.01) and made.stopped and made.result is None
        assert made.withdraw(0.01), "none of the engine's bytes move"
        assert made.source_free.is_set() and made.result is None and lease.released == 0
        made.try_end()
        assert made.result is None
    assert made.cancel(0.0) and made.state is TransferState.CANCELLED and lease.released == 1
    other: Any = Lease()
    assert not made.own(other) and other.released == 1
    assert made.cancel(0.0) and made.withdraw(0.0)


def test_a_withdrawal_waits_for_the_engines_bytes() -> None:
    made, _ = control()
    with made.step():
        assert not made.withdraw(0.01) and not made.source_free.is_set()
    assert made.withdraw(0.0) and made.result is not None


def test_the_source_may_be_free_before_a_worker_says_so() -> None:
    free: list[bool] = []
    made, _ = control()
    made.free_source_when(lambda: bool(free))
    assert not made.source_free.is_set()
    free.append(True)
    assert made.source_free.is_set()
    made.free_source()


def test_a_transfer_whose_bytes_move_does_not_end() -> None:
    made, _ = control()
    with made.step(), pytest.raises(AssertionError, match="while its bytes move"):
        made.end()


# -- tiers -------------------------------------------------------------------------------------


def test_a_chunk_counts_for_the_slowest_tier_of_its_pages() -> None:
    fast, slow = sorted(Tier)[1], sorted(Tier)[-1]
    tiers = TierAccounting()
    tiers.note(0, 0b1111, fast)
    tiers.note(0, 0b0110, slow)
    tiers.note(3, 0b1000, slow)
    found = tiers.slowest({0: 0b1111, 3: 0b1111})
    assert {tier: bits for tier, bits in found.items() if bits} == {slow: 0b1110, fast: 0b0001}
    assert tiers.slowest({0: 0b0011})[slow] == 0b0010 and tiers.slowest({})[fast] == 0
    tiers.note(0, 0b0110, fast)
    assert tiers.slowest({0: 0b1111})[slow] == 0


def test_one_thread_calls_back_although_others_have_events_too() -> None:
    begun, go_on, seen = threading.Event(), threading.Event(), list[int]()

    def callback(page: PageDone) -> None:
        if page.chunk == 0:
            begun.set()
            assert go_on.wait(30.0)
        seen.append(page.chunk)

    made, _ = control({0: 0b111}, on_page=callback)
    made.settle(0, 0b001, PageOutcome.STORED)
    first = threading.Thread(target=made._dispatch)
    first.start()
    assert begun.wait(30.0)
    for chunk in (1, 2):
        made.settle(0, 1 << chunk, PageOutcome.STORED)
        in_thread(made._dispatch)
        assert seen == [] and made._dispatching, "the first callback has not returned"
    go_on.set()
    first.join(30.0)
    assert seen == [0, 1, 2] and not made._dispatching


def test_an_end_that_was_broken_off_is_done_by_another_thread() -> None:
    made, told = control()
    lease: Any = Lease()
    assert made.own(lease)
    made.settle(0, 0b0011, PageOutcome.STORED)
    made._moving = made._touching = 1  # an interrupt has struck in the end of a step
    made.end_again()
    assert made.done.is_set() and made.stopped and told == ["end"] and lease.released == 1
    assert made.result is not None and (made.result.pages, made.result.declined) == (2, 4)
    state = made.state
    made.enter(TransferState.COPYING)
    with made.step() as allowed:
        assert not allowed
    made.end()
    made.end_again()
    assert told == ["end"] and lease.released == 1 and made.state is state, "once"


def test_a_cancel_that_waits_for_bytes_goes_on_when_a_broken_end_is_done_again() -> None:
    made, _ = control()
    made._moving = made._touching = 1
    waits = threading.Thread(target=made.cancel, args=(5.0,))
    waits.start()
    while not made.stopped:
        time.sleep(0.001)
    began = time.monotonic()
    made.end_again()
    waits.join(5.0)
    assert not waits.is_alive() and time.monotonic() - began < 4.0
