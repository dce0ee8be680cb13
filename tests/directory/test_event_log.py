"""The event log: bounded, torn lines skipped, no fault raises, and what operators do is in it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import kvfs
from kvfs.directory import event_log
from kvfs.directory.event_log import EventLog
from kvfs.directory.root import Directory
from kvfs.system.files import Files
from kvfs.testing import FakeClock, Fault, FaultyFiles
from tests.stores import TINY_BYTES, run_child, seeded, tiny, tokens_of


@pytest.fixture
def path(store_path: Path) -> Path:
    with kvfs.open(store_path, capacity="64MiB", counted=False):
        pass
    return store_path


@pytest.fixture(autouse=True)
def directories() -> Iterator[None]:
    """Closes what ``log_of`` opened."""
    yield
    while OPENED:
        OPENED.pop().close()


OPENED: list[Directory] = []


def log_of(path: Path, files: Files | None = None, *, read_only: bool = False) -> EventLog:
    OPENED.append(Directory(str(path), files or Files(), read_only=read_only))
    return EventLog(OPENED[-1])


def seen(path: Path) -> list[tuple[str, dict[str, object]]]:
    return [(event.what, event.details) for event in log_of(path, read_only=True).read()]


def test_events_are_read_in_the_order_in_which_they_happened(path: Path) -> None:
    log = log_of(path)
    log.add("purged", pages=3, namespace="alpha")
    log.add("gc")
    (first, second) = log.read()
    assert (first.what, first.details, first.pid) == ("purged", {"pages": 3, "namespace": "alpha"}, os.getpid())
    assert second.what == "gc" and first.at_us <= second.at_us


def test_the_log_is_bounded_and_keeps_the_newest(path: Path) -> None:
    log = EventLog(Directory(str(path), Files(), read_only=False), 2000)
    for n in range(100):
        log.add("gc", count=n)
    numbers = [details["count"] for _, details in seen(path)]
    assert 10 < len(numbers) <= 44 and numbers == list(range(100 - len(numbers), 100))
    assert sum(f.stat().st_size for f in (path / "run").glob("events*")) <= 4000


def test_long_details_are_cut_and_a_line_that_is_too_long_is_left_out(path: Path) -> None:
    log = log_of(path)
    log.add("pinned", name="x" * 5000)
    log.add("settings changed", **{f"key{n}": "x" * 300 for n in range(50)})
    assert seen(path) == [("pinned", {"name": "x" * 256})]


def test_a_torn_line_costs_only_itself(path: Path) -> None:
    log = log_of(path)
    log.add("gc", count=1)
    with (path / "run" / "events").open("ab") as file:
        file.write(b'{"at_us": 5, "what": "torn", "pid"')
    log.add("gc", count=2)
    assert seen(path) == [("gc", {"count": 1}), ("gc", {"count": 2})]


@pytest.mark.parametrize(
    "line",
    [b"\xff" * 40, b"{}", b"[1]", b'{"at_us": 1, "what": 2, "pid": 3, "command": "", "details": {}}', b"[" * 100_000,
     b'{"at_us": 1, "what": "x", "pid": 3, "command": "", "details": {"a": []}}',
     b'{"at_us": 1' + b"0" * 20 + b', "what": "x", "pid": 3, "command": "", "details": {}}',
     b'{"at_us": -1, "what": "x", "pid": 3, "command": "", "details": {}}',
     b'{"at_us": 1, "what": "x", "pid": 3, "command": "", "details": {"a": 1' + b"0" * 400 + b"}}"],
)  # fmt: skip
def test_garbage_is_no_event(path: Path, line: bytes) -> None:
    (path / "run" / "events").write_bytes(line + b"\n")
    assert seen(path) == []
    log_of(path).add("gc")
    assert seen(path) == [("gc", {})]


@pytest.mark.parametrize("kind", ["open", "pwritev", "preadv", "flock", "fstat", "rename"])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_no_fault_raises(path: Path, kind: str, nth: int) -> None:
    files = FaultyFiles()
    log = EventLog(Directory(str(path), files, read_only=False), 300)
    files.arm(Fault(nth=files.calls[kind] + nth, kind=kind, action="error", error=errno.EIO))
    for n in range(4):
        log.add("gc", count=n)
        list(log.read())
    files.arm()
    log.add("gc", count=9)
    assert seen(path)[-1] == ("gc", {"count": 9})


def test_a_process_that_is_stopped_with_the_lock_keeps_no_other_waiting(path: Path) -> None:
    log = log_of(path)
    log.add("gc", count=1)
    with (path / "run" / "events").open("rb") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        log.add("gc", count=2)
        assert seen(path) == [("gc", {"count": 1})]
    log.add("gc", count=3)
    assert seen(path)[-1] == ("gc", {"count": 3})


def test_processes_that_add_at_once_tear_no_line(path: Path) -> None:
    def add() -> None:
        log = log_of(path)
        for n in range(50):
            log.add(f"of {os.getpid()}", count=n)

    threads = [threading.Thread(target=run_child, args=(add,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    files = [path / "run" / name for name in ("events.1", "events")]  # the longer the lines, the sooner it is full
    data = [file.read_bytes() for file in files if file.exists()]
    assert all(each.endswith(b"\n") for each in data)
    assert len(seen(path)) == sum(each.count(b"\n") for each in data) > 50


class RotatedMeanwhile(Files):
    """Another process rotates the log between this one's open and its lock."""

    def __init__(self, rotate: Callable[[], None]) -> None:
        self._rotate: Callable[[], None] | None = rotate

    def flock(self, fd: int, kind: int) -> bool:
        rotate, self._rotate = self._rotate, None
        if rotate is not None:
            rotate()
        return super().flock(fd, kind)


def test_a_log_that_another_process_rotates_meanwhile_loses_nothing(path: Path) -> None:
    directory = Directory(str(path), Files(), read_only=False)
    other = EventLog(directory, 1000)
    while (path / "run" / "events").stat().st_size < 900 if (path / "run" / "events").exists() else True:
        other.add("gc", count=1)
    before = len(seen(path))
    files = RotatedMeanwhile(lambda: other.add("by the other", text="x" * 80))
    EventLog(Directory(str(path), files, read_only=False), 1000).add("mine")
    assert [what for what, _ in seen(path)] == ["gc"] * before + ["by the other", "mine"]


def test_a_reader_writes_nothing(path: Path) -> None:
    log_of(path, read_only=True).add("gc")
    assert not (path / "run" / "events").exists()


def test_what_an_operator_does_is_in_the_log(store_path: Path) -> None:
    with kvfs.open(store_path, capacity="64MiB") as store:
        ns = store.namespace("alpha", tiny(), "9213176")
        ns.put(tokens_of(1, 4), seeded(1, 4 * TINY_BYTES))
        store.pin("system", ns, tokens_of(1, 4))
        store.unpin("system")
        store.unpin("system")
        store.purge(ns)
        store.gc(0)
        events = {event.what: event.details for event in store.events()}
        assert [event.what for event in store.events()].count("unpinned") == 1
    assert events["pinned"] == {"name": "system", "tokens": 64} and events["unpinned"] == {"name": "system"}
    assert events["purged"]["pages"] == 8, "the pages and their pinned copies"
    assert events["purged"]["namespace"] == ns.identity.digest.hex()
    assert "segments_dropped" in events["gc"]


def test_faults_and_evictions_are_noted_once_with_their_number(store_path: Path) -> None:
    with kvfs.open(store_path, capacity="64MiB") as store:
        counters = store._shared.c.counters
        counters.add("pages_corrupt", 3)
        store._shared._note_counts()
        store._shared._note_counts()
        counters.add("segments_evicted", 2)
    assert [e for e in seen(store_path) if e[0] != "index rebuilt"] == [
        ("pages damaged", {"count": 3}), ("segments evicted", {"count": 2})
    ]  # fmt: skip


def test_a_change_of_settings_is_noted_by_one_process(store_path: Path) -> None:
    with kvfs.open(store_path, capacity="64MiB") as store:
        shared = store._shared
        before = shared.c.settings
        now = replace(before, capacity_bytes=before.capacity_bytes * 2)
        shared._note_settings(before, now)
        shared._note_settings(before, now)
        shared._note_settings(before, before)
    changed = [details for what, details in seen(store_path) if what == "settings changed"]
    assert changed == [{"capacity_bytes": f"{64 << 20} -> {128 << 20}"}]


def test_a_long_event_is_noted_once(path: Path) -> None:
    log = log_of(path)
    for _ in range(2):
        log.add_once("settings changed", 60.0, quotas="x" * 300)
    assert [details for _, details in seen(path)] == [{"quotas": "x" * 256}]
    log.add_once("settings changed", 0.0, quotas="x" * 300)
    log.add_once("settings changed", 60.0, quotas="y" * 300)
    assert len(seen(path)) == 3


def line_of(**changes: object) -> bytes:
    event: dict[str, object] = {"at_us": 1, "what": "x", "pid": 3, "command": "c", "details": {}}
    return json.dumps({**event, **changes}).encode() + b"\n"


@pytest.mark.parametrize(
    ("changes", "event"),
    [
        ({}, True), ({"at_us": 0}, True), ({"at_us": -1}, False), ({"at_us": (1 << 57) - 1}, True),
        ({"at_us": 1 << 57}, False), ({"at_us": 1.0}, False), ({"at_us": True}, False), ({"pid": (1 << 63) - 1}, True),
        ({"pid": 1 << 63}, False), ({"pid": 1 - (1 << 63)}, True), ({"pid": -(1 << 63)}, False), ({"pid": "3"}, False),
        ({"command": None}, False), ({"what": 5}, False), ({"details": []}, False), ({"details": {"a": None}}, False),
        ({"details": {"a": (1 << 63) - 1, "b": "y"}}, True), ({"details": {"a": 1 << 63}}, False),
        ({"details": {"b": "y", "a": -(1 << 63)}}, False), ({"details": {"a": True}}, False), ({"more": 1}, False),
    ],
)  # fmt: skip
def test_an_event_has_kinds_and_numbers_that_it_may_have(path: Path, changes: dict[str, object], event: bool) -> None:
    (path / "run" / "events").write_bytes(line_of(**changes))
    assert len(seen(path)) == event


class Clock(FakeClock, Files):
    """The real file system under a clock that is set by hand; a sleep moves it."""

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def length(path: Path) -> int:
    """Bytes of the only line of the log; the next one with as long a text has as many."""
    return (path / "run" / "events").stat().st_size


@pytest.mark.parametrize("less", [0, 1])
def test_a_file_is_replaced_when_a_line_does_not_fit_to_the_byte(path: Path, clock: Clock, less: int) -> None:
    log_of(path, clock).add("gc", count=1)
    log = EventLog(Directory(str(path), clock, read_only=False), 2 * length(path) - less)
    log.add("gc", count=2)
    assert (path / "run" / "events.1").exists() is bool(less)
    assert seen(path) == [("gc", {"count": 1}), ("gc", {"count": 2})]


def test_a_line_that_no_file_holds_is_the_only_one_of_its_file(path: Path, clock: Clock) -> None:
    log = EventLog(Directory(str(path), clock, read_only=False), 10)
    log.add("gc", count=1)
    assert seen(path) == [("gc", {"count": 1})] and not (path / "run" / "events.1").exists()
    for count in (2, 3):
        log.add("gc", count=count)
    assert seen(path) == [("gc", {"count": 2}), ("gc", {"count": 3})]


def test_a_line_has_a_limited_length(path: Path, clock: Clock) -> None:
    log = log_of(path, clock)
    log.add("x")
    room = event_log.LINE_BYTES_MAX - length(path) + 1
    log.add("y" * (room + 1))
    log.add("z" * room)
    assert [what[0] for what, _ in seen(path)] == ["x", "z"]


def test_an_event_names_the_program(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_of(path)
    for argv in (["/usr/bin/" + "p" * 300], [""], []):
        monkeypatch.setattr("sys.argv", argv)
        log.add("gc")
    assert [event.command for event in log.read()] == ["p" * 256, "", ""]


def test_an_event_is_noted_again_when_it_is_old_enough(path: Path, clock: Clock) -> None:
    log = log_of(path, clock)
    for advance, events in ((0.0, 1), (59.0, 1), (1.0, 2), (1.0, 2)):
        clock.advance(advance)
        log.add_once("gc", 60.0, count=1)
        assert len(seen(path)) == events
    log.add_once("purged", 60.0, count=1)
    assert len(seen(path)) == 3


def test_a_lock_that_another_process_keeps_is_waited_for_in_steps(
    path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = log_of(path, clock)
    log.add("gc", count=1)
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        clock.advance(event_log.WAIT_SECONDS / 2)

    monkeypatch.setattr(clock, "sleep", sleep)
    with (path / "run" / "events").open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        log.add("gc", count=2)
    assert len(waits) == 2 and seen(path) == [("gc", {"count": 1})]


def test_a_file_is_private_and_read_up_to_a_limit(path: Path) -> None:
    log_of(path).add("gc", count=1)
    file = path / "run" / "events"
    assert file.stat().st_mode & 0o777 == 0o600
    line = file.read_bytes()
    count = event_log.FILE_BYTES_MAX // len(line) + 5
    file.write_bytes(line * count)
    assert len(seen(path)) == event_log.FILE_BYTES_MAX // len(line)
