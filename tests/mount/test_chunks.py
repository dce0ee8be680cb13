"""The pages of files: what loads need to be fast, and a store that does not answer."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kvfs
from kvfs.errors import IndexUnavailableError
from kvfs.format import segment as fmt
from kvfs.mount.chunks import BATCH_BYTES, FIND_SECONDS, SAVE_SECONDS, Chunks
from kvfs.mount.spool import Spool
from kvfs.system.memory_views import address_of
from kvfs.testing import FakeClock
from tests.mount.kernel import ME, Mounted
from tests.stores import seeded

Hang = Callable[[int], None]


def test_a_batch_is_loaded_where_reads_past_the_page_cache_may_go(store: kvfs.Store, tmp_path: Path) -> None:
    chunks = Chunks(store, Spool(str(tmp_path), 1 << 20))
    buffer = chunks._buffer()
    assert len(buffer) == BATCH_BYTES
    assert address_of(buffer) % fmt.BLOCK == 0
    chunks.close()


@pytest.fixture
def clock(mounted: Mounted) -> FakeClock:
    clock = mounted.chunks._clock = FakeClock()  # type: ignore[assignment]
    return clock


@pytest.fixture
def hang(store: kvfs.Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hang]:
    """Let so many calls of the index time out; natively nothing is looked up."""
    store._shared.background.stop()
    index, left = store._shared.c.index, 0
    submit = index._submit

    def late(*args: object, **how: object) -> object:
        nonlocal left
        if left:
            left -= 1
            raise IndexUnavailableError("timeout")
        return submit(*args, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(index, "native_session", lambda: None)
    monkeypatch.setattr(index, "_submit", late)

    def begin(calls: int) -> None:
        nonlocal left
        left = calls

    yield begin


@pytest.mark.parametrize("calls", [1, 2, 5, 40])
def test_a_file_is_saved_though_the_index_does_not_answer_at_first(
    mounted: Mounted, clock: FakeClock, hang: Hang, calls: int
) -> None:
    fd = mounted.kernel.open("files/a", os.O_WRONLY | os.O_CREAT)
    data = seeded(1, 200_000)
    mounted.kernel.write(fd, data)
    hang(calls)
    mounted.kernel.close(fd)
    assert mounted.kernel.load("files/a") == data


@pytest.mark.parametrize("calls", [1, 2, 5, 40])
def test_a_file_is_found_and_loaded_though_the_index_does_not_answer_at_first(
    mounted: Mounted, clock: FakeClock, hang: Hang, calls: int
) -> None:
    data = seeded(1, 200_000)
    mounted.kernel.save("files/a", data)
    mounted.names._verdicts.clear()
    hang(calls)
    assert mounted.kernel.exists("files/a")
    hang(calls)
    assert mounted.kernel.load("files/a") == data


def test_an_index_that_does_not_answer_at_all_is_an_error_after_a_while(
    mounted: Mounted, clock: FakeClock, hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfs.mount.chunks.POLL_SECONDS", 1.0)
    mounted.kernel.save("files/a", b"data")
    mounted.names._verdicts.clear()
    hang(1 << 30)
    began = clock.monotonic()
    with pytest.raises(OSError, match=rf"\[Errno {errno.EIO}\]"):
        mounted.kernel.stat("files/a")
    assert FIND_SECONDS <= clock.monotonic() - began < 2 * FIND_SECONDS
    fd = mounted.table.create(mounted.kernel.node("files"), b"b", os.O_WRONLY, 0o600, ME)[1].handle
    mounted.table.write(fd, memoryview(b"more"), 0)
    began = clock.monotonic()
    with pytest.raises(OSError, match=rf"\[Errno {errno.EIO}\]"):
        mounted.table.flush(fd)
    assert SAVE_SECONDS <= clock.monotonic() - began < 2 * SAVE_SECONDS
    mounted.table.release(fd)
    hang(0)
    assert mounted.kernel.load("files/a") == b"data"
    assert not mounted.kernel.exists("files/b")


def test_a_segment_that_cannot_be_opened_in_time_loses_no_file(
    store: kvfs.Store, mounted: Mounted, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = seeded(1, 200_000)
    mounted.kernel.save("files/a", data)
    mounted.names._verdicts.clear()
    segments, tries = store._shared.c.segments, iter(range(3))
    acquire = segments.acquire_all

    def late(wanted: object, *how: object) -> object:
        return acquire({} if next(tries, None) is not None else wanted, *how)  # type: ignore[arg-type]

    monkeypatch.setattr(segments, "acquire_all", late)
    assert mounted.kernel.load("files/a") == data
