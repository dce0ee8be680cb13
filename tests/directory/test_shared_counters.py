"""Counts of all processes, living and dead: summed once, whatever dies when."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.directory import shared_counters
from kvfs.directory.liveness import Liveness
from kvfs.directory.root import Directory
from kvfs.directory.shared_counters import SharedCounters
from kvfs.system.files import Files
from kvfs.testing import Fault, FaultyFiles
from tests.stores import TINY_BYTES, run_child, seeded, tiny, tokens_of


@pytest.fixture
def path(store_path: Path) -> Path:
    with kvfs.open(store_path, capacity="64MiB", counted=False):
        pass
    return store_path


class Process:
    """What one process has of the shared_counters."""

    def __init__(self, path: Path, files: Files | None = None) -> None:
        self.directory = Directory(str(path), files or Files(), read_only=False)
        self.liveness = Liveness(self.directory)
        self.shared_counters = SharedCounters(self.directory, self.liveness)

    def die(self) -> None:
        """As kill -9 would have it: the lock goes, the files stay."""
        self.liveness.forget()


def total(path: Path) -> dict[str, int]:
    directory = Directory(str(path), Files(), read_only=True)
    try:
        return SharedCounters(directory, None).total()
    finally:
        directory.close()


def test_counts_of_the_living_the_ended_and_the_dead_are_summed_once(path: Path) -> None:
    living, ended, dead = Process(path), Process(path), Process(path)
    living.shared_counters.write({"lookups": 1})
    living.shared_counters.write({"lookups": 2})
    ended.shared_counters.close({"lookups": 10})
    dead.shared_counters.write({"lookups": 100, "gets": 5})
    dead.die()
    assert total(path) == {"lookups": 112, "gets": 5}
    living.shared_counters.merge_dead()
    living.shared_counters.merge_dead()
    assert total(path) == {"lookups": 112, "gets": 5}
    living.shared_counters.close({"lookups": 3})
    assert total(path) == {"lookups": 113, "gets": 5}
    assert not list((path / "run").glob("*.count"))


def test_a_death_between_totals_and_unlink_counts_nothing_twice(path: Path) -> None:
    files = FaultyFiles()
    process = Process(path, files)
    process.shared_counters.write({"lookups": 7})
    files.arm(Fault(kind="unlink", error=errno.EIO, persistent=True))
    process.shared_counters.close({"lookups": 8})
    assert list((path / "run").glob("*.count"))
    assert total(path) == {"lookups": 8}
    process.die()
    other = Process(path)
    other.shared_counters.merge_dead()
    assert total(path) == {"lookups": 8} and not list((path / "run").glob("*.count"))


@pytest.mark.parametrize("kind", ["open", "pwritev", "rename", "flock", "unlink", "listdir"])
@pytest.mark.parametrize("nth", range(1, 7))
def test_no_fault_raises_or_counts_twice(path: Path, kind: str, nth: int) -> None:
    files = FaultyFiles()
    process = Process(path, files)
    files.arm(Fault(nth=files.calls[kind] + nth, kind=kind, error=errno.ENOSPC))
    process.shared_counters.write({"lookups": 4})
    process.shared_counters.merge_dead()
    process.shared_counters.close({"lookups": 5})
    files.arm()
    assert total(path).get("lookups", 0) in (0, 4, 5)


@pytest.mark.parametrize("name", ["totals", "count"])
def test_a_torn_slot_leaves_the_one_before_and_garbage_counts_as_nothing(path: Path, name: str) -> None:
    process = Process(path)
    process.shared_counters.write({"lookups": 1})
    process.shared_counters.write({"lookups": 2})
    if name == "totals":
        process.shared_counters.close({"lookups": 3})
        process = Process(path)
        process.shared_counters.close({"lookups": 1})
    file = path / "run" / "totals" if name == "totals" else next((path / "run").glob("*.count"))
    data = bytearray(file.read_bytes())
    newest = 0  # both files have been written twice
    data[newest + 30] ^= 1
    file.write_bytes(data)
    assert total(path) == ({"lookups": 3} if name == "totals" else {"lookups": 1})
    for garbage in (b"", b"x" * 10, os.urandom(2 * shared_counters.SLOT_BYTES)):
        file.write_bytes(garbage)
        assert total(path) == {}


def test_absurd_counts_are_bounded(path: Path) -> None:
    process = Process(path)
    process.shared_counters.write({f"name_{i}": i for i in range(5000)})
    assert 0 < len(total(path)) <= shared_counters.NAMES_MAX


def use(path: Path, seed: int) -> dict[str, Any]:
    with kvfs.open(path) as store:
        ns = store.namespace("alpha", tiny(), "9213176")
        ns.put(tokens_of(seed, 4), seeded(seed, 4 * TINY_BYTES))
        ns.match(tokens_of(seed, 4)).close()
    return {}


def test_of_too_many_names_latencies_are_left_out_first(path: Path) -> None:
    latencies = [f"{what}_us_{n}" for what in ("get", "match", "put", "view") for n in range(40)]
    others = ["pages_declined_read-only", "tokens_matched", "write_errors", "zeal"]
    process = Process(path)
    process.shared_counters.write(dict.fromkeys([*latencies, *others], 7))
    found = total(path)
    assert len(found) == shared_counters.NAMES_MAX and [found[name] for name in others] == [7] * 4


def test_totals_survive_restarts_and_a_kill(path: Path) -> None:
    run_child(lambda: use(path, 1))
    run_child(lambda: use(path, 2))
    child = os.fork()
    if not child:
        store = kvfs.open(path)
        store.namespace("alpha", tiny(), "9213176").put(tokens_of(3, 4), seeded(3, 4 * TINY_BYTES))
        store._core.c.shared_counters.write(store._core.c.counters.snapshot())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    with kvfs.open(path, counted=False) as store:
        totals = store.stats()["totals"]
        assert totals["pages_stored"] == 12 and totals["lookups"] == 2 and totals["tokens_matched"] == 128


def test_a_process_that_only_looks_is_not_counted(path: Path) -> None:
    with kvfs.open(path, counted=False) as store:
        store.namespace("alpha", tiny(), "9213176").match(tokens_of(1, 4)).close()
    assert total(path) == {}


@pytest.mark.parametrize("counted_first", [True, False])
def test_who_looks_in_a_process_that_serves_does_not_silence_it(path: Path, counted_first: bool) -> None:
    with kvfs.open(path, counted=counted_first) as one, kvfs.open(path, counted=not counted_first):
        one.namespace("alpha", tiny(), "9213176").put(tokens_of(1, 4), seeded(1, 4 * TINY_BYTES))
    with kvfs.open(path, counted=False) as store:
        assert store.stats()["totals"]["pages_stored"] == 4


def test_a_child_of_a_process_that_only_looks_is_not_counted(path: Path) -> None:
    def look() -> dict[str, Any]:
        store.namespace("alpha", tiny(), "9213176").match(tokens_of(1, 4)).close()
        store.close()
        return {}

    with kvfs.open(path, counted=False) as store:
        run_child(look)
    assert total(path) == {}


@pytest.mark.parametrize("end", ["close", "forget"])
def test_what_is_said_after_the_end_reaches_nobodys_file(path: Path, tmp_path: Path, end: str) -> None:
    directory = Directory(str(path), Files(), read_only=False)
    liveness = Liveness(directory)
    getattr(liveness, end)()
    with (tmp_path / "other").open("w+b") as other:  # it has the number of the closed file now
        liveness.say_pinned(1 << 20)
        with pytest.raises(OSError, match="Bad file descriptor"):
            liveness.beat()
        liveness.close()
        other.seek(0)
        assert other.read() == b""
    directory.close()
