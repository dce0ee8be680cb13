"""Rates of ``kvfs top``: over the time between two publications, known from the second one on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.directory.liveness import PROCESS_COUNTS, ProcessInfo
from kvfs.directory.shared_counters import NamespaceSums
from kvfs.metrics.live import LiveView, Rates
from tests.stores import TINY_BYTES, run_child, seeded, tiny, tokens_of

DIGEST = "ab" * 32


class Published:
    """A store of which only what processes publish is looked at."""

    process_id = "me"

    def __init__(self) -> None:
        self.now: list[ProcessInfo] = []
        self.sums: dict[str, NamespaceSums] = {}
        self.catalog = self

    def described(self) -> list[Any]:
        return []

    def stats(self) -> dict[str, Any]:
        return {"used_bytes": 5, "capacity_bytes": 10, "index": {"state": "ready"}}

    def processes(self) -> list[ProcessInfo]:
        return self.now

    def namespace_counts(self) -> dict[str, NamespaceSums]:
        return self.sums


def info(owner: str, at: float, lookups: int, queried: int = 0, matched: int = 0) -> ProcessInfo:
    counts = dict.fromkeys(PROCESS_COUNTS, 0) | {
        "lookups": lookups, "tokens_queried": queried, "tokens_matched": matched
    }  # fmt: skip
    return ProcessInfo(owner, 0, "inotify", 7, "engine", 0, int(at * 1e6), counts)


def test_a_rate_is_over_the_time_between_two_publications_not_between_two_samples() -> None:
    store = Published()
    live = LiveView(store)  # type: ignore[arg-type]
    store.now = [info("a", 100.0, 1000, 4000, 1000), info("me", 100.0, 5)]
    first = live.sample(100.2)
    assert first.total is None and [p.rates for p in first.processes] == [None]
    assert live.sample(100.9).total is None, "nothing new was published"
    store.now = [info("a", 101.0, 1050, 4200, 1150)]
    second = live.sample(102.2)
    assert second.total == Rates(50.0, 200.0, 150.0, 0.0, 0.0) and second.total.hit_rate == 0.75
    assert live.sample(102.9).total == second.total, "between two publications the last rate stays"


def test_a_process_that_stops_publishing_has_no_rate() -> None:
    store = Published()
    live = LiveView(store)  # type: ignore[arg-type]
    for at, lookups in ((100.0, 0), (101.0, 50)):
        store.now = [info("a", at, lookups)]
        live.sample(at)
    assert live.sample(103.9).total is not None
    assert live.sample(104.1).total is None
    store.now = []
    live.sample(105.0)
    assert not live._processes


def test_rates_of_a_namespace_need_a_window_of_several_publications() -> None:
    store = Published()
    live = LiveView(store)  # type: ignore[arg-type]
    rates = []
    for second in range(31):
        at = second // 5 * 5  # published every five seconds
        store.sums = {DIGEST: NamespaceSums(int((1000 + at) * 1e6), {"lookups": 10 * at})}
        rates.append(live.sample(1000.0 + second).namespaces[0].rates)
    assert rates[:5] == [None] * 5
    assert {r.lookups for r in rates[5:] if r is not None} == {10.0} and None not in rates[5:]
    assert live.sample(1100.0).namespaces[0].rates is None, "old publications are no rate of now"


def test_a_store_publishes_what_each_process_counted(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def child() -> Any:
        with kvfs.open(store_path, capacity="64MiB") as store:
            ns = store.namespace("alpha", tiny(), "9213176")
            ns.put(tokens_of(1, 4), seeded(1, 4 * TINY_BYTES))
            ns.match(tokens_of(1, 4)).close()
            liveness = store._shared.c.liveness
            assert liveness is not None
            liveness.say_counts(store._shared.c.counters.snapshot())
            with kvfs.open(store_path) as watcher:
                (mine,) = watcher.processes()
            return mine.counts | {"same": mine.owner == store.process_id, "pid": mine.pid > 0}

    assert run_child(child) == {
        "lookups": 1, "tokens_queried": 64, "tokens_matched": 64, "tokens_loaded": 0, "bytes_loaded": 0,
        "bytes_written": 4 * TINY_BYTES, "pages_stored": 4, "same": True, "pid": True,
    }  # fmt: skip


@pytest.mark.parametrize("damage", [b"", b"\xff" * 200, bytes(30)])
def test_a_damaged_liveness_file_says_nothing_of_its_process(
    store_path: Path, monkeypatch: pytest.MonkeyPatch, damage: bytes
) -> None:
    with kvfs.open(store_path, capacity="64MiB") as store:
        liveness = store._shared.c.liveness
        assert liveness is not None
        say_counts = liveness.say_counts
        monkeypatch.setattr(liveness, "say_counts", lambda counts: None)  # the background publishes every second
        say_counts({"lookups": 3})
        assert [p.counts["lookups"] for p in store.processes()] == [3]
        (file,) = (store_path / "run").glob("*.live")
        data = file.read_bytes()
        file.write_bytes(data[:128] + damage)
        (mine,) = store.processes()
        assert (mine.pid, mine.command, mine.at_us, mine.counts) == (0, "", 0, {})
