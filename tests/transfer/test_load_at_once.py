"""Loads that the engine's own thread copies: small ones, of pages that the page cache holds, without any wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvfs
from kvfs.errors import ConfigError
from kvfs.native import library
from kvfs.read.fetch import Fetcher
from kvfs.system.files import Files
from kvfs.transfer import at_once
from kvfs.transfer.at_once import LoadsAtOnce
from kvfs.transfer.host_io import HostIO
from kvfs.types import Tier, TransferResult
from tests.transfer.test_host_io import LATE, LAYOUT, PAGE, SECONDS, Engine, blocks, flip, prompt, saved, settled


@pytest.fixture
def store(store_path: Path) -> Iterator[kvfs.Store]:
    if library.loaded() is None:
        pytest.skip(f"the native library is {library.state()}")
    with kvfs.open(store_path, capacity="64MiB") as opened:
        yield opened


@pytest.fixture
def ns(store: kvfs.Store) -> kvfs.Namespace:
    return store.namespace("model", LAYOUT, revision="1")


def untouched(engine: Engine) -> bool:
    return bool((engine.memory == 0xA5A5).all())


def counted(store: kvfs.Store) -> dict[str, int]:
    return {name: store.stats()["counters"].get(name, 0) for name in ("loads_done", "tokens_loaded", "bytes_loaded")}


def test_the_caller_copies_several_loads(ns: kvfs.Namespace, store: kvfs.Store) -> None:
    source, target = saved(ns, 6), Engine(seed=None)
    with ns.attach(target.kv, threads=1) as io, ns.match(prompt(6)) as match, ns.match(prompt(2)) as short:
        results = io.load_at_once([(match, blocks(6, 20)), (short, blocks(2, 40))], SECONDS)
        assert target.tokens(blocks(6, 20)) == source.tokens(blocks(6))
        assert target.tokens(blocks(2, 40)) == source.tokens(blocks(2))
        whole = [
            TransferResult(n * PAGE, n, made.nbytes, tiers={Tier.HOST: n * PAGE})
            for n, made in ((6, match), (2, short))
        ]
        assert results == whole
        assert counted(store) == {
            "loads_done": 2, "tokens_loaded": 8 * PAGE, "bytes_loaded": match.nbytes + short.nbytes
        }  # fmt: skip
        assert io.load_at_once([], SECONDS) == []


def test_it_counts_as_the_same_load_by_threads_does(ns: kvfs.Namespace, store: kvfs.Store) -> None:
    saved(ns, 6)
    target, units = Engine(seed=None), blocks(6)
    units[:6] = [-1] * 6  # the engine has the first three pages
    with ns.attach(target.kv, threads=1) as io, ns.match(prompt(6)) as match:
        (result,) = io.load_at_once([(match, units)], SECONDS)
        first = counted(store)
        assert (target.memory[:, :6] == 0xA5A5).all(), "units that are left alone"
        assert io.load(match, units, deadline=LATE).wait(SECONDS) == result
        assert result is not None and result.pages == 3 and first["loads_done"] == 1
        assert counted(store) == {name: 2 * count for name, count in first.items()}


def test_a_damaged_page_keeps_no_other_load(store: kvfs.Store, ns: kvfs.Namespace, store_path: Path) -> None:
    source, target = saved(ns, 4), Engine(seed=None)
    flip(store_path, source.memory[0, 6, 0, 0].tobytes())

    def wrong() -> int:
        """Cells that are neither those that were saved nor untouched."""
        return int(((target.memory[:, :8] != source.memory[:, :8]) & (target.memory[:, :8] != 0xA5A5)).sum())

    with ns.attach(target.kv, threads=1) as io, ns.match(prompt(4)) as match, ns.match(prompt(2)) as short:
        results = io.load_at_once([(match, blocks(4)), (short, blocks(2, 20))], SECONDS)
        assert results[0] is None and results[1] is not None and results[1].pages == 2
        assert target.tokens(blocks(2, 20)) == source.tokens(blocks(2)) and wrong() == 0
        assert store.stats()["counters"].get("pages_corrupt", 0) == 0, "the load that follows tells"
        result = io.load(match, blocks(4), deadline=LATE).wait(SECONDS)
        assert result is not None and result.declined and result.reason == "unreadable" and wrong() == 0
        assert store.stats()["counters"]["pages_corrupt"] == 1


@pytest.mark.parametrize("why", ["size", "hold", "no time", "not cached"])
def test_what_may_wait_is_left_to_the_threads(ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    source, target = saved(ns, 3), Engine(seed=None)
    if why == "size":
        monkeypatch.setattr(at_once, "AT_ONCE_BYTES", 1)
    with ns.attach(target.kv, threads=1) as io, ns.match(prompt(3)) as match:
        if why == "hold":
            match.close()
        if why == "not cached":  # since the lookup: a read of it may begin to read ahead, which waits for a hung disk
            monkeypatch.setattr(Files, "cached_bytes", lambda *_: PAGE)
        assert io.load_at_once([(match, blocks(3))], 0.0 if why == "no time" else SECONDS) == [None]
        assert untouched(target)
        result = io.load(match, blocks(3), deadline=LATE).wait(SECONDS)
        assert result is not None and result.pages == 3 and target.tokens(blocks(3)) == source.tokens(blocks(3))


def test_pages_of_a_segment_that_is_gone_are_left_to_the_threads(ns: kvfs.Namespace) -> None:
    saved(ns, 3)
    target = Engine(seed=None)
    with ns.attach(target.kv, threads=1) as io, ns.match(prompt(3)) as match:
        assert match.hold is not None
        match.hold.held = {}
        assert io.load_at_once([(match, blocks(3))], SECONDS) == [None] and untouched(target)


def test_a_load_of_nothing_keeps_no_other_load(ns: kvfs.Namespace) -> None:
    source, target = saved(ns, 4), Engine(seed=None)
    with ns.attach(target.kv, threads=1) as io, ns.match(prompt(4)) as match, ns.match(prompt(2)) as short:
        nothing, result = io.load_at_once([(match, [-1] * 8), (short, blocks(2, 20))], SECONDS)
        assert nothing == TransferResult(4 * PAGE, tiers={Tier.DEVICE: 4 * PAGE})
        assert result is not None and result.pages == 2
        assert target.tokens(blocks(2, 20)) == source.tokens(blocks(2))


def test_many_loads_are_copied_in_several_calls(ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target, calls = saved(ns, 4), Engine(seed=None), list[int]()
    scatter = Fetcher.scatter_at_once

    def noted(fetcher: Fetcher, pages: Any, loads: int) -> set[int]:
        calls.append(loads)
        return scatter(fetcher, pages, loads)

    monkeypatch.setattr(Fetcher, "scatter_at_once", noted)
    with ns.attach(target.kv, threads=1) as io, ns.match(prompt(4)) as match:
        monkeypatch.setattr(at_once, "TOGETHER_BYTES", 2 * match.nbytes)
        places = [blocks(4, 10 * n) for n in range(5)]
        results = io.load_at_once([(match, place) for place in places], SECONDS)
        assert calls == [2, 2, 1]
        for place, result in zip(places, results, strict=True):
            assert result is not None and target.tokens(place) == source.tokens(blocks(4))


def test_loads_behind_the_time_are_left(ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(ns, 2)
    scatter, late = Fetcher.scatter_at_once, list[bool]()

    def slow(fetcher: Fetcher, pages: Any, loads: int) -> set[int]:
        late.append(True)
        return scatter(fetcher, pages, loads)

    monkeypatch.setattr(Fetcher, "scatter_at_once", slow)
    monkeypatch.setattr(at_once, "TOGETHER_BYTES", 1)
    with ns.attach(Engine(seed=None).kv, threads=1) as io, ns.match(prompt(2)) as match:
        with monkeypatch.context() as patched:
            patched.setattr(type(io._c.files), "monotonic", lambda files: 1000.0 + len(late) * SECONDS)
            first, second = io.load_at_once([(match, blocks(2)), (match, blocks(2, 20))], SECONDS)
        assert first is not None and second is None


def test_an_error_leaves_the_loads_to_the_threads(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine's thread sees none, and the log has it once."""
    saved(ns, 3)

    def broken(*_: object) -> set[int]:
        raise OSError("no memory")

    monkeypatch.setattr(Fetcher, "scatter_at_once", broken)
    with ns.attach(Engine(seed=None).kv, threads=1) as io, ns.match(prompt(3)) as match:
        for _ in range(3):
            assert io.load_at_once([(match, blocks(3))], SECONDS) == [None]
    assert [record.getMessage() for record in caplog.records] == ["loads in the engine's thread failed"]


def test_an_interrupt_keeps_no_segment(ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = saved(ns, 3), Engine(seed=None)

    def interrupted(*_: object) -> set[int]:
        raise KeyboardInterrupt

    with ns.attach(target.kv, threads=1) as io, ns.match(prompt(3)) as match:
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(Fetcher, "scatter_at_once", interrupted)
            io.load_at_once([(match, blocks(3))], SECONDS)
        result = io.load(match, blocks(3), deadline=LATE).wait(SECONDS)
        assert result is not None and result.pages == 3 and target.tokens(blocks(3)) == source.tokens(blocks(3))
        settled(io)
        assert match.hold is not None
        match.close()
        assert match.hold.held == {}


@pytest.mark.parametrize("units", [[1, 2], [0, 1, 2, 3, 4, 64], [0.5] * 6], ids=["few", "outside", "no ids"])
def test_bad_units_are_refused_before_anything_is_copied(ns: kvfs.Namespace, units: list[Any]) -> None:
    saved(ns, 3)
    target = Engine(seed=None)
    with ns.attach(target.kv, threads=1) as io, ns.match(prompt(3)) as match:
        with pytest.raises(ConfigError, match="units of group"):
            io.load_at_once([(match, blocks(3)), (match, units)], SECONDS)
        assert untouched(target)


def test_a_match_of_another_namespace_is_refused(ns: kvfs.Namespace, store: kvfs.Store) -> None:
    other = store.namespace("other", LAYOUT, revision="1")
    with ns.attach(Engine(seed=None).kv) as io, other.match([]) as match, pytest.raises(ConfigError, match="another"):
        io.load_at_once([(match, [])], SECONDS)


def test_a_close_waits_for_a_caller_that_copies(ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine may free its memory once ``close`` has returned."""
    saved(ns, 3)
    scatter, copying, closing = Fetcher.scatter_at_once, threading.Event(), threading.Event()
    order = list[str]()

    def slow(fetcher: Fetcher, pages: Any, loads: int) -> set[int]:
        copying.set()
        assert closing.wait(SECONDS)
        left = scatter(fetcher, pages, loads)
        order.append("copied")
        return left

    monkeypatch.setattr(Fetcher, "scatter_at_once", slow)
    with ns.match(prompt(3)) as match:
        io = ns.attach(Engine(seed=None).kv, threads=1)
        caller = threading.Thread(target=io.load_at_once, args=([(match, blocks(3))], SECONDS))
        caller.start()
        assert copying.wait(SECONDS)
        wait = io._unfinished.wait
        monkeypatch.setattr(io._unfinished, "wait", lambda left: (order.append("closed"), wait(left))[1])
        closer = threading.Thread(target=io.close)
        closer.start()
        while not io._closed:
            pass
        closing.set()
        for thread in (caller, closer):
            thread.join(SECONDS)
        assert order == ["copied", "closed"]


def test_a_close_in_the_meantime_leaves_nothing_to_copy(ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(ns, 3)
    target = Engine(seed=None)
    with ns.match(prompt(3)) as match:
        io = ns.attach(target.kv, threads=1)
        pages_of = HostIO._pages_of

        def closing(each: HostIO, *arguments: Any) -> Any:
            found = pages_of(each, *arguments)
            each.close()
            return found

        monkeypatch.setattr(HostIO, "_pages_of", closing)
        assert io.load_at_once([(match, blocks(3))], SECONDS) == [None] and untouched(target)
        with pytest.raises(ConfigError, match="closed"):
            io.load_at_once([], SECONDS)


def test_in_mode_staging_no_page_comes_into_the_page_cache(disk_path: Path) -> None:
    """A read that waits for no disk has the kernel read ahead, so the caller does not even try."""
    with kvfs.open(disk_path / "store", capacity="64MiB", mode="staging") as store:
        ns = store.namespace("model", LAYOUT, revision="1")
        saved(ns, 6)
        with ns.attach(Engine(seed=None).kv, threads=1) as io, ns.match(prompt(6)) as match:
            assert io.load_at_once([(match, blocks(6))], SECONDS) == [None]
    for path in (disk_path / "store" / "segments").glob("*.kvs"):
        with path.open("rb") as file:
            size = path.stat().st_size
            assert (Files().cached_bytes(file.fileno(), 0, size) or 0) < size // 2


def test_loads_are_taken_together_up_to_so_many_bytes_of_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at_once, "TOGETHER_BYTES", 10)
    monkeypatch.setattr(at_once, "AT_ONCE_BYTES", 5)
    store = SimpleNamespace(mode=SimpleNamespace(direct=False), files=SimpleNamespace(monotonic=lambda: 0.0))
    made, taken = LoadsAtOnce(SimpleNamespace(store=store)), list[int]()  # type: ignore[arg-type]
    monkeypatch.setattr(made, "_run", lambda loads: taken.append(len(loads)) or [None] * len(loads))

    def run(*sizes: int) -> list[int]:
        taken.clear()
        loads: Any = [SimpleNamespace(nbytes=nbytes) for nbytes in sizes]
        assert made.run(loads, 1.0) == [None] * len(sizes)
        return list(taken)

    assert run(5, 99, 99, 4, 1, 5, 99, 5) == [5, 3]
    assert run(*[99] * 30) == [30], "what is not small is not copied here"


def test_where_pages_go_is_found_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def targets(*args: Any) -> Any:
        asked.append(args)
        return len(asked)

    monkeypatch.setattr(at_once, "targets", targets)
    nothing: Any = None
    made: Any = LoadsAtOnce(nothing)
    one, two = (SimpleNamespace(number=n, group=f"g{n}", part="p", device="d") for n in (1, 2))
    assert [made._targets_of(one), made._targets_of(two), made._targets_of(one)] == [1, 2, 1]
    assert asked == [("g1", "p", "d"), ("g2", "p", "d")]
