"""Loads that the engine's own thread copies: small ones, of pages that the page cache holds, without any wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvfs
from kvfs.native import library
from kvfs.read.fetch import Fetcher
from kvfs.system.files import Files
from kvfs.transfer import at_once
from kvfs.transfer import load as host_load
from kvfs.transfer.at_once import LoadsAtOnce
from kvfs.transfer.host_io import HostIO
from tests.transfer.test_host_io import LATE, LAYOUT, SECONDS, Engine, Gate, Log, blocks, flip, prompt, saved, settled


@pytest.fixture
def store(store_path: Path) -> Iterator[kvfs.Store]:
    if library.loaded() is None:
        pytest.skip(f"the native library is {library.state()}")
    with kvfs.open(store_path, capacity="64MiB") as opened:
        yield opened


@pytest.fixture
def ns(store: kvfs.Store) -> kvfs.Namespace:
    return store.namespace("model", LAYOUT, revision="1")


@pytest.fixture
def busy(ns: kvfs.Namespace) -> Iterator[Callable[[HostIO], Gate]]:
    """Keeps the only read thread of a transport at work until the gate opens."""
    gates: list[Gate] = []

    def start(io: HostIO) -> Gate:
        gate = Gate()
        gate.shut()
        gates.append(gate)
        io.load(ns.match([]), [], after=gate, deadline=LATE)
        assert gate.reached.wait(SECONDS)
        return gate

    yield start
    for gate in gates:
        gate.open()


def test_the_caller_copies_what_no_thread_has_begun(ns: kvfs.Namespace, busy: Callable[[HostIO], Gate]) -> None:
    source, target, logs = saved(ns, 6), Engine(seed=None), [Log(), Log()]
    with ns.attach(target.kv, threads=1) as io, ns.match(prompt(6)) as match, ns.match(prompt(2)) as short:
        gate = busy(io)
        transfers = [
            io.load(match, blocks(6, 20), deadline=LATE, **logs[0].hooks),
            io.load(short, blocks(2, 40), deadline=LATE, first_token=16, **logs[1].hooks),
        ]
        io.load_at_once(SECONDS)
        assert target.tokens(blocks(6, 20)) == source.tokens(blocks(6))
        assert target.tokens(blocks(2, 40)[1:]) == source.tokens(blocks(2)[1:])
        assert (target.memory[:, 40] == 0xA5A5).all(), "tokens before the first one are left alone"
        io.load_at_once(SECONDS)  # nothing is left, and the ends wait for the thread
        gate.open()
        results = [transfer.wait(SECONDS) for transfer in transfers]
        assert [(r.pages, r.declined) for r in results if r is not None] == [(6, 0), (2, 0)]
        for log, transfer, pages in zip(logs, transfers, (6, 2), strict=True):
            log.check(transfer, pages)
        settled(io)


def test_a_damaged_page_is_left_to_the_threads(
    store: kvfs.Store, ns: kvfs.Namespace, busy: Callable[[HostIO], Gate], store_path: Path
) -> None:
    source, target = saved(ns, 4), Engine(seed=None)
    flip(store_path, source.memory[0, 4, 0, 0].tobytes())

    def flipped_in(engine: Engine) -> int:
        """Cells that are neither those that were saved nor untouched."""
        wrong = (engine.memory != source.memory) & (engine.memory != 0xA5A5)
        return int(wrong.sum())

    with ns.attach(target.kv, threads=1) as io, ns.match(prompt(4)) as match:
        gate = busy(io)
        transfer = io.load(match, blocks(4), deadline=LATE)
        io.load_at_once(SECONDS)
        assert not transfer.done.is_set() and flipped_in(target) == 0
        gate.open()
        result = transfer.wait(SECONDS)
        assert result is not None and result.declined and result.reason == "unreadable"
        assert flipped_in(target) == 0
        assert store.stats()["counters"]["pages_corrupt"] == 1
        settled(io)


@pytest.mark.parametrize("why", ["event", "size", "stopped", "no time"])
def test_what_may_wait_is_left_to_the_threads(
    ns: kvfs.Namespace, busy: Callable[[HostIO], Gate], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    source, target = saved(ns, 3), Engine(seed=None)
    if why == "size":
        monkeypatch.setattr(host_load, "AT_ONCE_BYTES", 1)
    with ns.attach(target.kv, threads=1) as io, ns.match(prompt(3)) as match:
        gate = busy(io)
        event = (lambda: None) if why == "event" else None
        transfer = io.load(match, blocks(3), after=event, deadline=LATE)
        if why == "stopped":
            assert transfer.withdraw(SECONDS)
        io.load_at_once(0.0 if why == "no time" else SECONDS)
        assert (target.memory == 0xA5A5).all()
        gate.open()
        assert transfer.done.wait(SECONDS)
        assert (target.tokens(blocks(3)) == source.tokens(blocks(3))) is (why != "stopped")
        settled(io)


def test_one_damaged_page_keeps_no_other_load(
    store: kvfs.Store, ns: kvfs.Namespace, busy: Callable[[HostIO], Gate], store_path: Path
) -> None:
    source, target, log = saved(ns, 4), Engine(seed=None), Log()
    flip(store_path, source.memory[0, 6, 0, 0].tobytes())
    with ns.attach(target.kv, threads=1) as io, ns.match(prompt(4)) as match, ns.match(prompt(2)) as short:
        gate = busy(io)
        io.load(match, blocks(4), deadline=LATE)
        transfer = io.load(short, blocks(2, 20), deadline=LATE, **log.hooks)
        io.load_at_once(SECONDS)
        assert target.tokens(blocks(2, 20)) == source.tokens(blocks(2))
        gate.open()
        result = transfer.wait(SECONDS)
        assert result is not None and (result.pages, result.declined) == (2, 0)
        log.check(transfer, 2)
        settled(io)


def test_a_load_of_nothing_keeps_no_other_load(ns: kvfs.Namespace, busy: Callable[[HostIO], Gate]) -> None:
    source, target = saved(ns, 4), Engine(seed=None)
    with ns.attach(target.kv, threads=1) as io, ns.match(prompt(4)) as match, ns.match(prompt(2)) as short:
        gate = busy(io)
        nothing = io.load(match, {}, deadline=LATE, first_token=match.tokens)
        transfer = io.load(short, blocks(2, 20), deadline=LATE)
        io.load_at_once(SECONDS)
        assert target.tokens(blocks(2, 20)) == source.tokens(blocks(2))
        gate.open()
        results = [one.wait(SECONDS) for one in (nothing, transfer)]
        assert [(r.pages, r.reason) for r in results if r is not None] == [(0, ""), (2, "")]
        settled(io)


def test_many_loads_are_copied_in_several_calls(ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target, calls = saved(ns, 4), Engine(seed=None), list[int]()
    scatter = Fetcher.scatter_at_once

    def counted(fetcher: Fetcher, pages: Any, loads: int) -> set[int]:
        calls.append(loads)
        return scatter(fetcher, pages, loads)

    monkeypatch.setattr(Fetcher, "scatter_at_once", counted)
    with ns.attach(target.kv, threads=1) as io, ns.match(prompt(4)) as match:
        monkeypatch.setattr(at_once, "TOGETHER_BYTES", 2 * match.nbytes)
        places = [blocks(4, 10 * n) for n in range(5)]
        transfers = [io.load(match, place, deadline=LATE, at_once=True) for place in places]
        io.load_at_once(SECONDS)
        assert calls == [2, 2, 1]
        for place, transfer in zip(places, transfers, strict=True):
            assert transfer.wait(SECONDS) and target.tokens(place) == source.tokens(blocks(4))
        settled(io)


def test_pages_of_a_segment_that_is_gone_are_left_to_the_threads(
    ns: kvfs.Namespace, busy: Callable[[HostIO], Gate]
) -> None:
    saved(ns, 3)
    target = Engine(seed=None)
    with ns.attach(target.kv, threads=1) as io, ns.match(prompt(3)) as match:
        assert match.hold is not None
        match.hold.held = {}
        gate = busy(io)
        transfer = io.load(match, blocks(3), deadline=LATE)
        io.load_at_once(SECONDS)
        assert (target.memory == 0xA5A5).all() and not transfer.done.is_set()
        gate.open()
        result = transfer.wait(SECONDS)
        assert result is not None and result.pages == 0
        settled(io)


def test_an_error_leaves_the_loads_to_the_threads(ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's thread sees none."""
    source, target = saved(ns, 3), Engine(seed=None)

    def broken(*_: object) -> set[int]:
        raise OSError("no memory")

    monkeypatch.setattr(Fetcher, "scatter_at_once", broken)
    with ns.attach(target.kv, threads=1) as io, ns.match(prompt(3)) as match:
        transfer = io.load(match, blocks(3), deadline=LATE, at_once=True)
        io.load_at_once(SECONDS)
        assert transfer.wait(SECONDS) and target.tokens(blocks(3)) == source.tokens(blocks(3))
        settled(io)


def test_an_interrupt_leaves_the_load_to_the_threads(
    ns: kvfs.Namespace, busy: Callable[[HostIO], Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = saved(ns, 3), Engine(seed=None)

    def interrupted(*_: object) -> set[int]:
        raise KeyboardInterrupt

    with ns.attach(target.kv, threads=1) as io, ns.match(prompt(3)) as match:
        gate = busy(io)
        transfer = io.load(match, blocks(3), deadline=LATE)
        monkeypatch.setattr(Fetcher, "scatter_at_once", interrupted)
        with pytest.raises(KeyboardInterrupt):
            io.load_at_once(SECONDS)
        gate.open()
        result = transfer.wait(SECONDS)
        assert result is not None and result.pages == 3 and target.tokens(blocks(3)) == source.tokens(blocks(3))
        settled(io)


def test_a_load_at_once_is_left_to_the_caller(ns: kvfs.Namespace) -> None:
    """A thread that began it would take turns of the interpreter while the caller copies the others."""
    source, target = saved(ns, 3), Engine(seed=None)
    with ns.attach(target.kv, threads=2) as io, ns.match(prompt(3)) as match:
        transfer = io.load(match, blocks(3), deadline=LATE, at_once=True)
        other = io.load(match, blocks(3, 20), deadline=LATE)
        assert other.wait(SECONDS) and (target.memory[:, 0:3] == 0xA5A5).all(), "the threads are free, and leave it"
        io.load_at_once(SECONDS)
        assert target.tokens(blocks(3)) == source.tokens(blocks(3))
        result = transfer.wait(SECONDS)
        assert result is not None and (result.pages, result.declined) == (3, 0)
        settled(io)


@pytest.mark.parametrize("why", ["event", "size"])
def test_a_load_that_the_caller_may_not_copy_goes_to_the_threads(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    saved(ns, 3)
    if why == "size":
        monkeypatch.setattr(host_load, "AT_ONCE_BYTES", 1)
    with ns.attach(Engine(seed=None).kv, threads=1) as io, ns.match(prompt(3)) as match:
        event = (lambda: None) if why == "event" else None
        result = io.load(match, blocks(3), after=event, deadline=LATE, at_once=True).wait(SECONDS)
        assert result is not None and result.pages == 3


def test_a_close_leaves_no_load_to_a_caller_that_does_not_come(ns: kvfs.Namespace) -> None:
    saved(ns, 3)
    with ns.match(prompt(3)) as match:
        io = ns.attach(Engine(seed=None).kv, threads=1)
        transfer = io.load(match, blocks(3), deadline=LATE, at_once=True)
        io.close()
        assert transfer.result is not None and transfer.result.pages == 3


def test_a_load_that_is_late_is_not_copied(ns: kvfs.Namespace) -> None:
    """The engine computes its tokens instead, and may do so already."""
    saved(ns, 3)
    target = Engine(seed=None)
    with ns.attach(target.kv, threads=1) as io, ns.match(prompt(3)) as match:
        transfer = io.load(match, blocks(3), deadline=0.0, at_once=True)
        io.load_at_once(SECONDS)
        result = transfer.wait(SECONDS)
        assert result is not None and (result.pages, result.reason) == (0, "deadline")
        assert (target.memory == 0xA5A5).all()


def test_in_mode_staging_no_page_comes_into_the_page_cache(disk_path: Path) -> None:
    """A read that waits for no disk has the kernel read ahead, so the caller does not even try."""
    with kvfs.open(disk_path / "store", capacity="64MiB", mode="staging") as store:
        ns = store.namespace("model", LAYOUT, revision="1")
        source, target = saved(ns, 6), Engine(seed=None)
        with ns.attach(target.kv, threads=1) as io, ns.match(prompt(6)) as match:
            transfer = io.load(match, blocks(6), deadline=LATE, at_once=True)
            io.load_at_once(SECONDS)
            assert transfer.wait(SECONDS) and target.tokens(blocks(6)) == source.tokens(blocks(6))
    for path in (disk_path / "store" / "segments").glob("*.kvs"):
        with path.open("rb") as file:
            size = path.stat().st_size
            assert (Files().cached_bytes(file.fileno(), 0, size) or 0) < size // 2


def test_the_first_loads_are_taken_up_to_so_many_bytes_of_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at_once, "TOGETHER_BYTES", 10)
    nothing: Any = None
    made, taken = LoadsAtOnce(nothing), list[int]()
    monkeypatch.setattr(made, "_run", lambda loads: taken.append(len(loads)))
    loads: Any = deque(SimpleNamespace(nbytes=nbytes, is_small=nbytes <= 5) for nbytes in (5, 99, 99, 4, 1, 5, 99, 5))
    while loads:
        made.run_some(loads)
    assert taken == [5, 3]
    loads = deque(SimpleNamespace(nbytes=99, is_small=False) for _ in range(30))
    made.run_some(loads)
    assert taken == [5, 3, 30], "what is not small is not copied here"


def test_where_pages_go_is_found_out_once_for_loads_from_the_first_token_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def targets(*args: Any) -> Any:
        asked.append(args)
        return len(asked)

    monkeypatch.setattr(at_once, "targets", targets)
    nothing: Any = None
    made: Any = LoadsAtOnce(nothing)
    one, two = (SimpleNamespace(number=n, group=f"g{n}", part="p", device="d") for n in (1, 2))
    assert [made._targets_of(one, 0), made._targets_of(two, 0), made._targets_of(one, 0)] == [1, 2, 1]
    assert [made._targets_of(one, 5), made._targets_of(one, 5)] == [3, 4]
    assert asked == [("g1", "p", "d"), ("g2", "p", "d"), ("g1", "p", "d", 5), ("g1", "p", "d", 5)]
