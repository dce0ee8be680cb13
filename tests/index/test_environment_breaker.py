"""The breaker of the index: after one timeout callers fail at once, and the index thread probes."""

from __future__ import annotations

import fcntl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.errors import IndexUnavailableError
from kvfs.index.environment import Index
from tests.stores import TINY_BYTES, restored, seeded, tiny, tokens_of

CHUNKS = 3
TOKENS, PAGES = tokens_of(1, CHUNKS), seeded(1, CHUNKS * TINY_BYTES)


@pytest.fixture
def store(memory_path: Path) -> Iterator[kvfs.Store]:
    with kvfs.open(memory_path / "store", capacity="16MiB") as made:
        made._shared.background.stop()
        assert made.namespace("m", tiny(), revision="r1").put(TOKENS, PAGES).stored == CHUNKS
        yield made


def test_a_late_read_costs_a_read_only_store_neither_its_index_nor_an_error(store: kvfs.Store) -> None:
    """The probe wrote, LMDB refused that, and the index was taken for a damaged one."""
    path = store.path
    store.close()
    with kvfs.open(path, read_only=True) as reader:
        index = reader._shared.c.index
        index.read(lambda session: None, 5.0)
        environment = index._env
        with open(Path(path) / "gate") as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            with pytest.raises(IndexUnavailableError, match="timeout"):
                index.read(lambda session: None, 0.05)
        assert eventually(lambda: not index._refused and not index._probing)
        index.read(lambda session: None, 5.0)
        assert index._env is environment and index.errors == 0


def eventually(check: Callable[[], bool]) -> bool:
    end = time.monotonic() + 60
    while not check():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def no_call(*_: Any) -> None:
    pytest.fail("a caller waits for the index thread")


@pytest.mark.parametrize("cause", ["a stopped process holds the gate", "the index thread hangs"])
def test_no_caller_waits_while_the_breaker_is_open(
    store: kvfs.Store, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    index, ns, release = store._shared.c.index, store.namespace("m", tiny(), revision="r1"), threading.Event()
    monkeypatch.setattr("kvfs.system.worker.GRACE_SECONDS", 0.05)
    monkeypatch.setattr(type(index), "native_session", lambda _: None)  # which would answer without the index thread
    with open(Path(store.path) / "gate") as gate:
        if cause == "the index thread hangs":
            index._worker.submit(lambda: release.wait(60))
        else:
            fcntl.flock(gate, fcntl.LOCK_EX)
        assert not restored(ns, TOKENS), "a miss, after one deadline"
        with monkeypatch.context() as patch:
            patch.setattr(index._worker, "call", no_call)
            for _ in range(100):
                assert not restored(ns, TOKENS)
                assert ns.put(tokens_of(2, 1), seeded(2, TINY_BYTES)).reason == "index"
                time.sleep(0.002)
        release.set()
    assert eventually(lambda: restored(ns, TOKENS) == PAGES)
    assert ns.put(tokens_of(2, 1), seeded(2, TINY_BYTES)).stored == 1


def test_a_process_that_stopped_as_a_reader_hinders_writers_only(
    store: kvfs.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    index: Index = store._shared.c.index
    with open(Path(store.path) / "main") as main:
        fcntl.flock(main, fcntl.LOCK_SH)
        with pytest.raises(IndexUnavailableError, match="timeout"):
            index.write(lambda session: None, 0.05)
        index.read(lambda session: None, 60.0)
        with monkeypatch.context() as patch, pytest.raises(IndexUnavailableError, match="timeout"):
            patch.setattr(index._worker, "call", no_call)
            index.write(lambda session: None, 60.0)

    def writes() -> bool:
        try:
            index.write(lambda session: None, 60.0)
        except IndexUnavailableError:
            return False
        return True

    assert eventually(writes)


def test_the_close_of_a_store_whose_index_thread_hangs_ends(store: kvfs.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    index, release = store._shared.c.index, threading.Event()
    monkeypatch.setattr("kvfs.system.worker.GRACE_SECONDS", 0.05)
    index._worker.submit(lambda: release.wait(60))
    stopped: list[float] = []
    stop = index._worker.stop
    monkeypatch.setattr(index._worker, "stop", lambda timeout: (stopped.append(timeout), stop(timeout)))
    index.close(timeout=0.05)
    assert stopped == [0.0], "waits a second time for a thread that hangs"
    release.set()
