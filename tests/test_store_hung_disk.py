"""A disk that hangs ends no call of an operator by itself: each has a deadline, and goes on when the disk answers."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

import kvfs
from kvfs.errors import StoreLockedError
from kvfs.runtime import open_store, registry
from kvfs.runtime.background_tasks import PeriodicTask
from kvfs.system import worker
from kvfs.system.files import Files
from tests.stores import TINY_BYTES, restored, seeded, tiny, tokens_of

CHUNKS = 4
TOKENS, PAGES = tokens_of(1, CHUNKS), seeded(1, CHUNKS * TINY_BYTES)
KINDS = ("open", "listdir", "preadv", "pwritev", "stat", "rename", "unlink", "fsync")


class HangingFiles(Files):
    """A disk that answers no call of an operator's thread while it hangs."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.answers.set()


def _waiting(kind: str) -> Callable[..., Any]:
    def call(self: HangingFiles, *args: Any, **how: Any) -> Any:
        if threading.current_thread().name == "kvfs-call":
            self.answers.wait(60)
        return getattr(Files, kind)(self, *args, **how)

    return call


for _kind in KINDS:
    setattr(HangingFiles, _kind, _waiting(_kind))

CALLS: dict[str, Callable[[kvfs.Store, kvfs.Namespace], object]] = {
    "pin": lambda store, ns: store.pin("prompt", ns, TOKENS),
    "unpin": lambda store, ns: store.unpin("another"),
    "pins": lambda store, ns: store.pins(),
    "purge": lambda store, ns: store.purge(ns),
    "gc": lambda store, ns: store.gc(0),
    "namespaces": lambda store, ns: store.catalog.namespaces(),
    "prefixes": lambda store, ns: store.catalog.prefixes(store.catalog.described()[0]),
    "pages": lambda store, ns: store.catalog.find_pages(ns.chunk_hashes(TOKENS)[0].hex()),
}


@pytest.fixture
def files() -> Iterator[HangingFiles]:
    made = HangingFiles()
    yield made
    made.answers.set()


@pytest.mark.parametrize("name", CALLS)
def test_a_call_ends_although_its_disk_hangs(
    memory_path: Path, files: HangingFiles, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """``pin`` and ``purge`` ended when the disk answered, after 40 and 30 s."""
    monkeypatch.setattr(worker, "HUNG_SECONDS", 0.3)
    with kvfs.open(memory_path / "store", capacity="32MiB", files=files) as store:
        ns = store.namespace("m", tiny(), revision="r1")
        assert ns.put(TOKENS, PAGES).stored == CHUNKS
        store.pin("kept", ns, tokens_of(1, 1))
        if name in ("purge", "gc"):
            store.unpin("kept")
        files.answers.clear()
        with pytest.raises(StoreLockedError, match="the disk has not answered"):
            CALLS[name](store, ns)
        assert restored(ns, TOKENS) == PAGES, "inference goes on"
        assert ns.new_epoch().identity.epoch
        files.answers.set()
        end = time.monotonic() + 60
        while True:
            try:
                CALLS[name](store, ns)
                break
            except StoreLockedError:
                assert time.monotonic() < end
                time.sleep(0.01)
        assert store.verify().ok


def _counted(stats: Any) -> dict[str, Any]:
    """Without what a process is doing at the moment, which its background may tell in between."""
    totals = {key: value for key, value in stats["totals"].items() if not key.startswith("now_")}
    return {"totals": totals, "processes": stats["processes"], "pinned_bytes": stats["pinned_bytes"]}


FIGURES: dict[str, Callable[[kvfs.Store], object]] = {
    "stats": lambda store: _counted(store.stats()),
    "processes": lambda store: [process.owner for process in store.processes()],
    "namespace_counts": lambda store: store.namespace_counts(),
    "events": lambda store: store.events(),
}


class FrozenFiles(HangingFiles):
    """The same, and the caller must not ask the disk itself."""


def _refusing(kind: str) -> Callable[..., Any]:
    def call(self: FrozenFiles, *args: Any, **how: Any) -> Any:
        if threading.current_thread() is threading.main_thread() and not self.answers.is_set():
            pytest.fail(f"the caller waits for {kind} of a disk that hangs")
        return getattr(HangingFiles, kind)(self, *args, **how)

    return call


for _kind in KINDS:
    setattr(FrozenFiles, _kind, _refusing(_kind))


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_as_of_the_last_call_while_the_disk_hangs(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """``stats`` ended when the disk answered, after 28 s."""
    monkeypatch.setattr(worker, "FIGURES_SECONDS", 0.3)
    others = set(threading.enumerate())  # an earlier test's store may still be closing
    files = FrozenFiles()
    with kvfs.open(memory_path / "store", capacity="32MiB", files=files) as store:
        ns = store.namespace("m", tiny(), revision="r1")
        assert ns.put(TOKENS, PAGES).stored == CHUNKS
        counters = store._shared.c.counters
        store._shared.c.shared_counters.add(counters.snapshot(), counters.by_namespace())
        store._shared.c.events.add("gc", segments=1)
        last = FIGURES[name](store)
        assert last
        files.answers.clear()
        try:
            for _ in range(3):  # those after the first one come at once
                assert FIGURES[name](store) == last
            left = {one for one in threading.enumerate() if one.name == "kvfs-call"} - others
            assert len(left) == 1, "threads pile up"
        finally:
            files.answers.set()
        store._shared.c.events.add("gc", segments=2)
        end = time.monotonic() + 60
        while name == "events" and FIGURES[name](store) == last:
            assert time.monotonic() < end
            time.sleep(0.01)


def test_a_close_ends_although_its_disk_hangs_and_goes_on_when_it_answers(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It lasted as long as the disk hung, in the update of counters or the truncation of a segment."""
    monkeypatch.setattr(worker, "HUNG_SECONDS", 0.3)
    files = FrozenFiles()
    store = kvfs.open(memory_path / "store", capacity="32MiB", files=files)
    ns = store.namespace("m", tiny(), revision="r1")
    assert ns.put(TOKENS, PAGES).stored == CHUNKS
    files.answers.clear()
    try:
        with caplog.at_level(logging.WARNING, "kvfs"):
            store.close()
        assert "the disk hangs: the close goes on" in caplog.text
        assert store._shared.c.counters.snapshot()["closes_left"] == 1
        assert ns.put(tokens_of(2, 1), PAGES[:TINY_BYTES]).reason == "closed"
        monkeypatch.setattr(registry, "WAIT_SECONDS", 0.1)
        with pytest.raises(StoreLockedError, match="still being opened or closed"):
            kvfs.open(memory_path / "store", files=files)
    finally:
        files.answers.set()
    monkeypatch.setattr(registry, "WAIT_SECONDS", 60.0)
    with kvfs.open(memory_path / "store", files=files) as again:
        assert again._shared.rebuilt is None, "the index was not left clean"
        assert restored(again.namespace("m", tiny(), revision="r1"), TOKENS) == PAGES


class SlowIO:
    """Transfers that hang."""

    timeouts: ClassVar[list[float]] = []

    def close(self, timeout: float = 10.0) -> None:
        self.timeouts.append(timeout)
        time.sleep(timeout)


def test_transfers_that_hang_share_one_deadline(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each had ten seconds of its own: a close with three of them lasted 30 s."""
    monkeypatch.setattr(open_store, "CLOSE_SECONDS", 0.3)
    monkeypatch.setattr(open_store, "MOMENT_SECONDS", 0.01)
    store = kvfs.open(memory_path / "store", capacity="32MiB")
    attached: Any = store._shared.c.attached
    hanging = [SlowIO(), SlowIO(), SlowIO()]
    SlowIO.timeouts.clear()
    for one in hanging:
        attached.add(one)
    store._shared.end_transfers()
    for one in hanging:
        attached.discard(one)
    store.close()
    assert len(SlowIO.timeouts) == 3 and sum(SlowIO.timeouts) < 0.4


def test_a_close_that_proceeds_slowly_is_left_too(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "CLOSE_MAX_SECONDS", 0.2)
    store, over = kvfs.open(memory_path / "store", capacity="32MiB"), threading.Event()
    reader = store._shared.services().reader

    def busy() -> None:
        while not over.wait(0.001):
            pass

    monkeypatch.setattr(reader, "close", busy)
    store.close()
    assert store._shared.c.counters.snapshot()["closes_left"] == 1
    over.set()
    kvfs.open(memory_path / "store").close()


@pytest.mark.parametrize("left", ["a task", "a rebuild", ""])
def test_the_directory_stays_open_for_a_thread_that_a_close_has_left(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    """It used the numbers of closed descriptors when the disk answered: they may be those of other files by then."""
    monkeypatch.setattr(open_store, "CLOSE_SECONDS", 0.1)
    opened = kvfs.open(memory_path / "store", capacity="32MiB")
    store, answers = opened._shared, threading.Event()
    stop = store.background.stop
    monkeypatch.setattr(store.background, "stop", lambda: stop(0.1))
    hanging = threading.Event()

    def hangs() -> None:
        hanging.set()
        answers.wait(60)

    if left == "a task":
        store.background.add([PeriodicTask("hangs", 9.0, hangs)])
        store.background.wake("hangs")
        assert hanging.wait(60)
    elif left == "a rebuild":
        store._rebuilder = threading.Thread(target=answers.wait, args=(60,), daemon=True)
        store._rebuilder.start()
    opened.close()
    answers.set()
    assert (store.directory.root >= 0) == bool(left)
    store.directory.close()


@pytest.mark.parametrize("new", [False, True])
def test_an_open_raises_while_its_disk_hangs(memory_path: Path, monkeypatch: pytest.MonkeyPatch, new: bool) -> None:
    """It lasted as long as the disk hung, in the caller's thread."""
    monkeypatch.setattr(worker, "HUNG_SECONDS", 0.3)
    files, path = FrozenFiles(), memory_path / "store"
    if not new:
        kvfs.open(path, capacity="32MiB").close()
    files.answers.clear()
    try:
        for _ in range(3):  # those after the first one come at once
            with pytest.raises(StoreLockedError, match=f"{path}: the disk has not answered.*kvfs doctor"):
                kvfs.open(path, capacity="32MiB", files=files)
        assert [one.name for one in threading.enumerate()].count("kvfs-call") == 1, "threads pile up"
    finally:
        files.answers.set()
    end = time.monotonic() + 60
    while registry._CALLS and any(calls.busy() for calls in registry._CALLS.values()):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert not registry._STORES and not registry._OPENING, "what no caller waits for stays open"
    with kvfs.open(path, capacity="32MiB", files=files) as store:
        assert store.namespace("m", tiny(), revision="r1").put(TOKENS, PAGES).stored == CHUNKS
    assert not registry._CALLS


EXITS = """
import sys, kvfs
from kvfs.system import worker
from tests.stores import TINY_BYTES, seeded, tiny, tokens_of
from tests.test_store_hung_disk import HangingFiles
worker.HUNG_SECONDS = 0.3
files = HangingFiles()
store = kvfs.open(sys.argv[1], capacity="32MiB", files=files)
store.namespace("m", tiny(), revision="r1").put(tokens_of(1, 4), seeded(1, 4 * TINY_BYTES))
files.answers.clear()
"""


def test_an_interpreter_ends_although_the_disk_of_an_open_store_hangs(memory_path: Path) -> None:
    run = [sys.executable, "-c", EXITS, str(memory_path / "store")]
    done = subprocess.run(run, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    assert "the disk hangs: the close goes on" in done.stderr
    with kvfs.open(memory_path / "store") as again:
        assert restored(again.namespace("m", tiny(), revision="r1"), TOKENS) == PAGES
