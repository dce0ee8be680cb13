"""The threads of transfers and what they share: turns, stalls, batches, deadlines and the ring."""

from __future__ import annotations

import gc
import math
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvfs.errors import ConfigError
from kvfs.transfer.unfinished import Unfinished
from kvfs.transfer.workers import JobThreads, TransportContext, Writes, fail, make_ring, wait_for
from kvfs.types import TransferState
from tests.stores import wait_until

MIB = 1 << 20


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_disk_counts_as_stalled_by_what_is_being_written() -> None:
    """Half a second, and a second for each 512 MB; each write that ends begins the time again."""
    clock = Clock()
    writes = Writes(clock)
    assert writes.stalled_at() == math.inf
    with writes.one(256_000_000):
        assert writes.stalled_at() == 101.0
        clock.now = 103.0
        with writes.one(512_000_000):
            assert writes.stalled_at() == 102.0, "the second write does not begin the time again"
        assert writes.stalled_at() == 104.0
    assert writes.stalled_at() == math.inf
    clock.now = 200.0
    with pytest.raises(ValueError, match="x"), writes.one(0):
        assert writes.stalled_at() == 200.5
        raise ValueError("x")
    assert writes.stalled_at() == math.inf


def test_jobs_run_in_order_and_an_error_ends_none_of_the_others(caplog: pytest.LogCaptureFixture) -> None:
    ran, ended = list[object](), list[int]()
    threads = JobThreads("test", 1, lambda: ended.append(1))

    def crash() -> None:
        raise KeyboardInterrupt

    threads.put(lambda: ran.append(1))
    threads.put(crash)
    threads.put(lambda: ran.append(threading.current_thread().name))
    threads.close(10.0)
    assert ran == [1, "kvfs-test-0"] and ended == [1]
    assert [r.message for r in caplog.records] == ["a transfer crashed"]


def test_each_thread_ends_behind_what_was_put_before() -> None:
    ran, ended, free = list[int](), list[int](), threading.Event()
    threads = JobThreads("test", 3, lambda: ended.append(1))
    assert all(thread.daemon for thread in threads._threads) and len(threads._threads) == 3

    def block() -> None:
        free.wait(10.0)

    threads.put(block)
    for n in range(20):
        threads.put(lambda n=n: ran.append(n))  # type: ignore[misc]
    threads.dismiss()
    began = time.monotonic()
    threads.join(0.05)
    assert time.monotonic() - began < 5.0 and len(ended) < 3, "one of them still runs"
    free.set()
    threads.join(10.0)
    assert sorted(ran) == list(range(20)) and ended == [1, 1, 1]


def test_threads_end_when_nobody_has_them_any_more() -> None:
    threads = JobThreads("test", 2)
    alive = list(threads._threads)
    del threads
    gc.collect()
    wait_until(lambda: not any(thread.is_alive() for thread in alive))


def test_a_thread_may_end_the_others() -> None:
    done = threading.Event()
    threads = JobThreads("test", 1)

    def close() -> None:
        threads.close(5.0)
        done.set()

    threads.put(close)
    assert done.wait(10.0), "it does not wait for itself"


@pytest.mark.parametrize(
    ("page", "holds", "pages"),
    [(4096, 1000, 128), (4096, 100, 100), (MIB, 1000, 16), (16 * MIB, 10, 1), (64 * MIB, 10, 1), (MIB, 0, 1)],
)
def test_how_many_pages_are_asked_for_at_once(page: int, holds: int, pages: int) -> None:
    context: Any = SimpleNamespace(ring=SimpleNamespace(holds=lambda nbytes: holds))
    assert TransportContext.batch(context, page) == pages


@pytest.mark.parametrize(("deadline", "late"), [(99.0, True), (100.0, True), (100.1, False)])
def test_what_is_late_says_so(deadline: float, late: bool) -> None:
    noted: list[str] = []
    transfer: Any = SimpleNamespace(deadline=deadline, note=noted.append)
    context: Any = SimpleNamespace(
        store=SimpleNamespace(files=SimpleNamespace(monotonic=Clock())), reading={transfer.deadline}
    )
    assert TransportContext.late(context, transfer) is late
    assert noted == ["deadline"] * late
    context.reading = [transfer]
    assert TransportContext.read_hangs(context) is late
    context.reading = []
    assert not TransportContext.read_hangs(context)


@pytest.mark.parametrize("name", ["synchronize", "wait", ""])
@pytest.mark.parametrize("stopped", [False, True])
def test_the_event_of_an_engine_is_waited_for(name: str, stopped: bool) -> None:
    waited, entered = list[int](), list[TransferState]()
    transfer: Any = SimpleNamespace(stopped=stopped, enter=entered.append)
    event: Callable[[], None] = lambda: waited.append(1)  # noqa: E731
    wait_for(transfer, SimpleNamespace(**{name: event}) if name else event)
    wait_for(transfer, None)
    expected = [] if stopped else [1]
    assert waited == expected and entered == [TransferState.WAITING] * len(expected)


def test_a_transfer_that_fails_is_logged_and_ends(caplog: pytest.LogCaptureFixture) -> None:
    stopped: list[object] = []
    error = ValueError("x")
    fail(SimpleNamespace(task=SimpleNamespace(kind="save"), stop=lambda *how: stopped.append(how)), error)  # type: ignore[arg-type]
    assert stopped == [("error", error)]
    assert [(r.message, r.levelname) for r in caplog.records] == [("a save failed", "ERROR")]
    assert caplog.records[0].exc_info is not None


def context_of() -> Any:
    return SimpleNamespace(files=SimpleNamespace(monotonic=Clock()))


@pytest.mark.parametrize(
    ("pages", "ring", "dirty", "slot", "slots", "keep"),
    [
        ([4096], 40960, None, 4096, 10, 2),
        ([4097, 100], 81920, None, 8192, 10, 2),
        ([4096], "12KiB", None, 4096, 3, 0),
        ([4096], 40960, 4096, 4096, 10, 9),
        ([4096], 40960, "1MiB", 4096, 10, 0),
        ([4096], 45055, 8191, 4096, 10, 9),
        ([4096], 4096, None, 4096, 1, 0),
    ],
)
def test_the_ring_and_what_saves_leave_free(
    pages: list[int], ring: int | str, dirty: int | str | None, slot: int, slots: int, keep: int
) -> None:
    attached: Any = [SimpleNamespace(page_bytes=n) for n in pages]
    asked: list[int] = []
    made, kept = make_ring(context_of(), attached, ring, dirty, lambda n: asked.append(n))
    assert (made.slot_bytes, made.slots, kept, asked) == (slot, slots, keep, [slot * slots])


@pytest.mark.parametrize(
    ("ring", "dirty", "message"),
    [
        (4095, None, "ring_bytes is 4095: pass at least 4096, for one page of 100 bytes"),
        (8192, 4095, "dirty_bytes is 4095: pass at least 4096, for one page of 100 bytes"),
    ],
)
def test_a_ring_that_holds_no_page_is_refused(ring: int, dirty: int | None, message: str) -> None:
    attached: Any = [SimpleNamespace(page_bytes=100)]
    with pytest.raises(ConfigError, match=message):
        make_ring(context_of(), attached, ring, dirty)


def test_nothing_waits_for_these_threads_when_the_interpreter_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs at the exit would find a queue whose threads are gone."""
    made: list[Any] = []

    def finalize(*args: Any) -> Any:
        made.append(SimpleNamespace(atexit=True, args=args))
        return made[-1]

    monkeypatch.setattr("weakref.finalize", finalize)
    threads, late = JobThreads("test", 2), Unfinished(Clock())
    assert [one.atexit for one in made] == [False, False]
    assert [one.args[0] for one in made] == [threads, late]
    assert all(thread.daemon for thread in threads._threads)
    threads.close(10.0)
    late.dismiss()
