"""A watch without a store around it: what it says and tells, and that nothing about it fails."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from watchdog.observers import inotify_c

import kvfs
from kvfs.directory import watch as watch_module
from kvfs.directory.root import Directory
from kvfs.directory.watch import DROPS, HOLDS, SETTINGS, Heard, Watch
from kvfs.system.files import Files


@pytest.fixture
def directory(memory_path: Path) -> Iterator[Directory]:
    kvfs.open(memory_path / "store", capacity="16MiB").close()
    with contextlib.closing(Directory(str(memory_path / "store"), Files(), read_only=False)) as made:
        yield made


class Ear:
    """Notes what it hears; ``until`` waits for it."""

    def __init__(self) -> None:
        self.heard: list[Heard] = []
        self._some = threading.Condition()

    def __call__(self, one: Heard) -> None:
        with self._some:
            self.heard.append(one)
            self._some.notify_all()

    def until(self, one: Heard) -> None:
        with self._some:
            assert self._some.wait_for(lambda: one in self.heard, 30.0), self.heard


@pytest.mark.parametrize("adopts", [False, True])
def test_a_watch_that_begins_tells_each_task_and_then_what_arrives(directory: Directory, adopts: bool) -> None:
    ear, root = Ear(), Path(directory.path)
    before = len(os.listdir("/proc/self/fd"))
    watch = Watch(directory, ear, adopts=adopts)
    assert not watch.works and watch.why == "not started yet"
    watch.stop()  # of one that does not run
    watch.keep()
    assert watch.works and watch.why == ""
    assert ear.heard == [Heard(SETTINGS), Heard(HOLDS), *[Heard(DROPS)] * adopts]
    watch.keep()
    assert len(ear.heard) == 2 + adopts, "it runs already"
    ear.heard.clear()
    (root / "other.toml").write_text("")
    (root / "kvfs.toml").write_text((root / "kvfs.toml").read_text())
    ear.until(Heard(SETTINGS, "kvfs.toml", False))
    (root / "other.toml").rename(root / "kvfs.toml")
    ear.until(Heard(SETTINGS, "kvfs.toml", True))
    (root / "import" / "a.tar").write_text("")
    (root / "segments" / "a.kvs").write_text("")
    (root / "segments" / "a.kvs").unlink()
    ear.until(Heard(HOLDS, "a.kvs", False))
    if adopts:
        ear.until(Heard(DROPS, "a.tar", False))
    assert {one.name for one in ear.heard} == {"kvfs.toml", "a.kvs", *["a.tar"] * adopts}
    watch.stop()
    assert not watch.works and len(os.listdir("/proc/self/fd")) <= before + 3  # subdirectories stay open


def test_no_child_that_runs_another_program_inherits_the_watch(directory: Directory) -> None:
    inotify, tasks = Watch(directory, lambda heard: None, adopts=True)._open()
    assert not os.get_inheritable(inotify.fd) and not os.get_blocking(inotify.fd)
    assert list(tasks.values()) == [SETTINGS, HOLDS, DROPS]
    inotify.close()


def test_each_reason_for_polling_is_logged_once(
    directory: Directory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watch = Watch(directory, lambda heard: None, adopts=False)
    monkeypatch.setattr(inotify_c, "inotify_init", lambda: -1)
    with caplog.at_level(logging.INFO, logger="kvfs"):
        watch.keep()
        assert len(caplog.records) == 1
        watch.keep()
        assert "max_user_instances" in watch.why and not watch.works
        monkeypatch.undo()
        monkeypatch.setattr(inotify_c, "inotify_add_watch", lambda *_: -1)
        watch.keep()
        watch.keep()
    assert "max_user_watches" in watch.why and watch_module.probe(directory) == watch.why
    assert [r.getMessage().partition(": ")[0] for r in caplog.records] == [
        "changes are found by polling, not by inotify"
    ] * 2
    monkeypatch.undo()
    assert watch_module.probe(directory) == ""


def test_a_probe_without_watchdog_says_so(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(inotify_c, "InotifyConstants")
    assert "InotifyConstants" in watch_module.probe(directory)


@pytest.mark.parametrize("lost", ["IN_IGNORED", "IN_UNMOUNT"])
def test_a_watched_directory_that_is_lost_ends_the_watch(
    directory: Directory, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    mask = getattr(inotify_c.InotifyConstants, lost)
    monkeypatch.setattr(watch_module, "_events", lambda data: [(1, mask, "")])
    watch = Watch(directory, lambda heard: None, adopts=True)
    watch.keep()
    thread = watch._thread
    assert thread is not None
    (Path(directory.path) / "kvfs.toml").write_text("")
    thread.join(30.0)
    assert not watch.works and watch.why == "a watched directory was removed"
    watch.stop()


def test_a_read_that_fails_ends_the_watch_with_its_reason(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, read = Watch(directory, lambda heard: None, adopts=False), os.read
    watch.keep()
    thread = watch._thread
    assert thread is not None

    def fail(fd: int, nbytes: int) -> bytes:
        if threading.current_thread() is thread:
            raise OSError(errno.EIO, "no events")
        return read(fd, nbytes)

    monkeypatch.setattr(os, "read", fail)
    (Path(directory.path) / "kvfs.toml").touch()
    (Path(directory.path) / "kvfs.toml").write_text("")
    thread.join(30.0)
    assert not watch.works and "no events" in watch.why
    watch.stop()


def test_a_watch_may_be_stopped_by_what_it_tells(directory: Directory) -> None:
    stopped = threading.Event()

    def hear(one: Heard) -> None:
        if one.name:
            watch.stop()
            stopped.set()

    watch = Watch(directory, hear, adopts=False)
    watch.keep()
    (Path(directory.path) / "kvfs.toml").write_text("")
    assert stopped.wait(30.0) and not watch.works


def packed(*events: tuple[int, int, bytes]) -> bytes:
    return b"".join(struct.pack("<iIII", number, mask, 0, len(name)) + name for number, mask, name in events)


def test_events_of_one_read_are_told_apart() -> None:
    data = packed((1, 8, b"kvfs.toml\0\0\0"), (-1, 0x4000, b""), (3, 0x80, b"a\xff\0\0"))
    expected: list[Any] = [(1, 8, "kvfs.toml"), (-1, 0x4000, ""), (3, 0x80, os.fsdecode(b"a\xff"))]
    assert list(watch_module._events(data)) == expected
    assert list(watch_module._events(data[:-20])) == expected[:2], "what is left of a head is none"
    assert list(watch_module._events(b"")) == []


def test_a_storm_of_events_is_read_with_rests_in_between(directory: Directory) -> None:
    slept: list[float] = []

    class Resting(Files):
        def sleep(self, seconds: float) -> None:
            slept.append(seconds)
            time.sleep(0)

    directory.files = Resting()
    ear = Ear()
    watch = Watch(directory, ear, adopts=False)
    watch.keep()
    (Path(directory.path) / "kvfs.toml").write_text("")
    ear.until(Heard(SETTINGS, "kvfs.toml", False))
    watch.stop()
    assert slept and set(slept) == {watch_module.REST_SECONDS}
