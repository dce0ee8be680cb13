"""A running worker takes up what others change: at once where inotify works, by polling elsewhere."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.directory import config_file
from kvfs.directory.watch import DROPS, HOLDS, SETTINGS, Heard, Watch
from kvfs.errors import ConfigError
from kvfs.runtime.background import BackgroundScheduler
from kvfs.system.files import Files
from tests.stores import TINY_BYTES, counters, restored, run_child, seeded, segment_files, tiny, tokens_of

MIB = 1 << 20


def until(what: Callable[[], Any], seconds: float = 30.0) -> None:
    """Wait until ``what()`` is true. How long it takes does not matter to these tests."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


def never_polls(store: kvfs.Store, *tasks: str) -> None:
    """From now on these tasks run only after a hint."""
    background: BackgroundScheduler = store._shared.background
    background._tasks = [c._replace(every=1e9) if c.name in tasks else c for c in background._tasks]
    for name in tasks:
        background._due[name] = 1e12


@pytest.fixture
def store(store_path: Path) -> Iterator[kvfs.Store]:
    with kvfs.open(store_path, capacity="64MiB") as made:
        yield made


@pytest.fixture
def watching(store: kvfs.Store) -> kvfs.Store:
    """A store whose watch has started, and that does not poll."""
    store._shared.background.wake("watch")
    until(lambda: store.stats()["watch"] == "inotify")
    until(lambda: store._shared._follower._seen is not None)
    never_polls(store, SETTINGS, HOLDS)
    return store


def change(store: kvfs.Store, key: str, value: str) -> None:
    config_file.change(store.path, key, value, Files())


def test_a_new_capacity_counts_at_once(watching: kvfs.Store) -> None:
    change(watching, "capacity", "32MiB")
    until(lambda: watching.settings.capacity_bytes == 32 * MIB)
    assert watching.stats()["capacity_bytes"] == 32 * MIB and counters(watching)["settings_taken_up"] == 1
    change(watching, "quota.chat.cap", "1MiB")
    until(lambda: "chat" in watching.settings.quotas and watching.settings.quotas["chat"].cap_bytes == MIB)


def test_an_editor_that_writes_in_place_is_noticed_too(watching: kvfs.Store) -> None:
    (Path(watching.path) / "kvfs.toml").write_text('capacity = "48MiB"\nindex_bytes = "2MiB"\n')
    until(lambda: watching.settings.capacity_bytes == 48 * MIB)


def test_a_worker_in_another_process_evicts_down_to_the_new_capacity(store_path: Path) -> None:
    with kvfs.open(store_path, capacity="64MiB", segment_bytes="256KiB", index_bytes="2MiB"):
        pass
    ready, told = os.pipe()

    def worker() -> tuple[int, int]:
        with kvfs.open(store_path) as mine:
            ns = mine.namespace("m", tiny(page_tokens=256), "r1")
            size = 16 * TINY_BYTES
            for seed in range(20):
                prompt = [seed * 10**6 + i for i in range(100 * 256)]
                assert ns.put(prompt, seeded(seed, size) * 100).stored == 100
            before = mine.stats()["used_bytes"]
            os.write(told, b"x")
            until(lambda: mine.settings.capacity_bytes == 16 * MIB)
            until(lambda: mine.stats()["used_bytes"] < 14 * MIB)
            return before, mine.stats()["used_bytes"]

    found: list[tuple[int, int]] = []
    thread = threading.Thread(target=lambda: found.append(run_child(worker)))
    thread.start()
    os.read(ready, 1)
    config_file.change(str(store_path), "capacity", "16MiB", Files())
    thread.join()
    (before, after) = found[0]
    assert before > 32 * MIB > 14 * MIB > after


def test_invalid_settings_are_counted_and_the_old_ones_stay(
    store: kvfs.Store, caplog: pytest.LogCaptureFixture
) -> None:
    never_polls(store, SETTINGS, "watch")
    core, path = store._shared, Path(store.path) / "kvfs.toml"
    core._follower.look()
    good = path.read_text()
    with caplog.at_level(logging.WARNING, logger="kvfs"):
        for text in ("capacity = ", 'capacity = "1MiB"\n', 'colour = "red"\n', "x" * 300_000):
            path.with_suffix(".new").write_text(text)
            path.with_suffix(".new").replace(path)  # complete at every moment
            core._follow_settings()
            core._follow_settings()  # one file is reported once
    assert counters(store)["settings_refused"] == 4 == len(caplog.records)
    assert store.settings.capacity_bytes == 64 * MIB
    assert store.namespace("m", tiny(), "r").put(tokens_of(1, 4), seeded(1, 4 * TINY_BYTES)).stored == 4
    path.unlink()
    core._follow_settings()
    path.symlink_to("/etc/hostname")
    core._follow_settings()
    assert counters(store)["settings_refused"] == 6
    path.unlink()
    path.write_text(good.replace(str(64 * MIB), str(96 * MIB)))
    core._follow_settings()
    assert store.settings.capacity_bytes == 96 * MIB and core._follower.problem == ""


def test_the_size_of_an_open_index_does_not_change_under_it(store: kvfs.Store) -> None:
    never_polls(store, SETTINGS, "watch")
    before = store.settings.index_bytes
    (Path(store.path) / "kvfs.toml").write_text('capacity = "128MiB"\nindex_bytes = "8MiB"\n')
    store._shared._follow_settings()
    assert (store.settings.capacity_bytes, store.settings.index_bytes) == (128 * MIB, before)
    with pytest.raises(ConfigError):  # and the command says so
        change(store, "index_bytes", "huge")


def no_instance(patch: pytest.MonkeyPatch) -> None:
    from watchdog.observers import inotify_c

    patch.setattr(inotify_c, "inotify_init", lambda: -1)


def no_watches(patch: pytest.MonkeyPatch) -> None:
    from watchdog.observers import inotify_c

    patch.setattr(inotify_c, "inotify_add_watch", lambda *_: -1)


def no_watchdog(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(__import__("sys").modules, "watchdog.observers", None)


def another_watchdog(patch: pytest.MonkeyPatch) -> None:
    from watchdog.observers import inotify_c

    patch.delattr(inotify_c, "InotifyConstants")


@pytest.mark.parametrize("without", [no_instance, no_watches, no_watchdog, another_watchdog])
def test_without_inotify_polling_finds_what_changed(
    store: kvfs.Store, monkeypatch: pytest.MonkeyPatch, without: Callable[[pytest.MonkeyPatch], None]
) -> None:
    without(monkeypatch)
    before = len(os.listdir("/proc/self/fd"))
    store._shared.background.wake("watch")
    until(lambda: store._shared.services().watch.why not in ("", "not started yet"))
    assert store.stats()["watch"] == "polling"
    assert store._shared.services().watch._thread is None and not store._shared.services().watch.works
    until(lambda: len(os.listdir("/proc/self/fd")) <= before + 1)
    change(store, "capacity", "32MiB")
    until(lambda: store.settings.capacity_bytes == 32 * MIB)


def test_segments_that_others_drop_are_released_at_once(watching: kvfs.Store) -> None:
    """The task that sweeps registered maps and expired holds runs at the hint, not a second later."""
    swept = threading.Event()

    class Transport:
        def sweep(self) -> None:
            if not segment_files(Path(watching.path)):
                swept.set()

        def close(self) -> None:
            pass

    ns = watching.namespace("m", tiny(), "r1")
    ns.put(tokens_of(1, 4), seeded(1, 4 * TINY_BYTES))
    transport = Transport()
    watching._shared.c.attached.add(transport)
    for file in segment_files(Path(watching.path)):
        file.unlink()  # as another process's eviction does it, without the index
    assert swept.wait(30.0)


def test_parent_and_child_each_watch(watching: kvfs.Store) -> None:
    def child() -> str:
        watching._shared.background.wake("watch")
        until(lambda: watching.stats()["watch"] == "inotify")
        change(watching, "capacity", "32MiB")
        until(lambda: watching.settings.capacity_bytes == 32 * MIB)
        watching.close()
        return "fine"

    assert run_child(child) == "fine"
    until(lambda: watching.settings.capacity_bytes == 32 * MIB)
    change(watching, "capacity", "48MiB")  # the end of the child ended no watch of the parent
    until(lambda: watching.settings.capacity_bytes == 48 * MIB)


def test_nothing_is_left_when_the_store_is_closed(store_path: Path) -> None:
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(5):
        with kvfs.open(store_path, capacity="64MiB") as store:
            store._shared.background.wake("watch")
            until(lambda store=store: store.stats()["watch"] == "inotify")
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == (descriptors, threads)


def test_a_watch_that_ended_is_restarted(watching: kvfs.Store) -> None:
    watch = watching._shared.services().watch
    assert watch._stop is not None
    os.eventfd_write(watch._stop.fd, 1)
    until(lambda: not watch.works)
    assert watching.stats()["watch"] == "polling"
    watch.keep()
    assert watch.works
    change(watching, "capacity", "32MiB")
    until(lambda: watching.settings.capacity_bytes == 32 * MIB)


def test_a_full_queue_is_a_hint_for_everything(watching: kvfs.Store) -> None:
    heard: list[Heard] = []
    watch = Watch(watching._shared.directory, heard.append, adopts=True)
    watch._tell(None, "", False, {1: SETTINGS, 2: HOLDS, 3: DROPS})
    watch._tell(SETTINGS, "state", True, {})
    watch._tell(DROPS, "x.tar", True, {})
    assert heard == [Heard(SETTINGS), Heard(HOLDS), Heard(DROPS), Heard(DROPS, "x.tar", True)]


def test_a_reader_follows_the_settings_too(watching: kvfs.Store) -> None:
    def reader() -> str:
        with kvfs.open(watching.path, read_only=True) as mine:
            mine._shared.background.wake("watch")
            until(lambda: mine.stats()["watch"] == "inotify")
            change(watching, "capacity", "32MiB")
            until(lambda: mine.settings.capacity_bytes == 32 * MIB)
            assert restored(mine.namespace("m", tiny(), "r1"), tokens_of(1, 4)) == b""
            return str(mine.stats()["watch"])

    watching.close()
    assert run_child(reader) == "inotify"


def test_a_store_that_is_switched_off_watches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFS_DISABLE", "1")
    with kvfs.open(tmp_path / "none", capacity="64MiB") as store:
        assert store.stats()["watch"] == "off" and store.settings.capacity_bytes == 1 << 50


def test_how_many_processes_watch_is_known_while_they_live(store_path: Path) -> None:
    with kvfs.open(store_path, capacity="64MiB") as store:
        core = store._shared
        core._publish()
        assert store.stats()["totals"]["now_polling"] == 1
        core.services().watch.keep()
        core._publish()
        totals = store.stats()["totals"]
        assert totals["now_inotify"] == 1 and "now_polling" not in totals
    with kvfs.open(store_path, counted=False) as store:
        assert not [name for name in store.stats()["totals"] if name.startswith("now_")]
