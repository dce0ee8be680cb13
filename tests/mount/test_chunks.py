"""The pages of files: what loads need to be fast, and a store that does not answer."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.errors import IndexUnavailableError
from kvfs.format import segment as fmt
from kvfs.lookup.prefix_match import PrefixMatch
from kvfs.mount import cells
from kvfs.mount.chunks import FIND_SECONDS, LOAD_BYTES, LOADED_AHEAD, SAVE_SECONDS, Chunks
from kvfs.mount.manifest import PAGE_BYTES, Piece
from kvfs.mount.spool import Spool
from kvfs.namespace import Namespace
from kvfs.native import library
from kvfs.system.memory_views import address_of
from kvfs.testing import FakeClock
from tests.mount.kernel import ME, Mounted
from tests.stores import seeded, wait_until

Hang = Callable[[int], None]


def test_a_batch_is_loaded_where_reads_past_the_page_cache_may_go(store: kvfs.Store, tmp_path: Path) -> None:
    chunks = Chunks(store, Spool(str(tmp_path), 1 << 20))
    buffer = chunks._buffer()
    assert len(buffer) == LOAD_BYTES
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


def test_a_copy_is_opened_again_without_the_index(
    mounted: Mounted, clock: FakeClock, hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfs.mount.chunks.POLL_SECONDS", 1.0)
    monkeypatch.setattr("kvfs.mount.file_node.TOUCH_SECONDS", 0.0)
    mounted.kernel.save("files/a", b"data")
    assert mounted.kernel.load("files/a") == b"data"
    hang(1 << 30)
    assert mounted.kernel.load("files/a") == b"data"
    hang(0)


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


@pytest.mark.parametrize("native", [True, False])
def test_a_file_in_pieces_is_loaded_with_and_without_the_native_library(
    mounted: Mounted, monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    """Its stream has the pieces in another order, and they end within pages."""
    if native and library.loaded() is None:
        pytest.skip("the native library is not built")
    data, begin, rest = seeded(3, 40 * PAGE_BYTES + 12_345), 9 * PAGE_BYTES + 1, 100_000
    pieces = Piece(rest, begin), Piece(0, rest), Piece(begin + rest, len(data) - begin - rest)
    plan = cells.Plan(pieces, len(data) // PAGE_BYTES, len(data) % PAGE_BYTES)
    monkeypatch.setattr(cells, "plan", lambda size, read: plan)
    file = mounted.spool.create()
    mounted.spool.write(file, memoryview(data), 0)
    manifest, _ = mounted.chunks.save(file)
    gets, get = 0, Namespace.get

    def counted(*args: Any) -> int:
        nonlocal gets
        gets += 1
        return get(*args)

    monkeypatch.setattr(Namespace, "get", counted)
    with contextlib.nullcontext() if native else library.paused():
        loaded = mounted.chunks.load(manifest)
    assert os.pread(loaded.fd, len(data) + 1, 0) == data
    assert bool(gets) != native
    mounted.spool.release(loaded)
    mounted.spool.release(file)


@pytest.fixture
def batches_of_one_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvfs.mount.chunks.LOAD_PAGES", 1)
    monkeypatch.setattr("kvfs.mount.chunks.LOAD_BYTES", PAGE_BYTES)


@pytest.fixture
def matches(monkeypatch: pytest.MonkeyPatch) -> list[PrefixMatch]:
    """What is looked up."""
    found, match_keys = list[PrefixMatch](), Namespace.match_keys

    def noted(*args: Any) -> PrefixMatch:
        found.append(match_keys(*args))
        return found[-1]

    monkeypatch.setattr(Namespace, "match_keys", noted)
    return found


@pytest.mark.usefixtures("batches_of_one_page")
def test_batches_are_looked_up_while_others_are_copied_but_not_all_of_them(
    mounted: Mounted, matches: list[PrefixMatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = seeded(4, 12 * PAGE_BYTES + 1)
    mounted.kernel.save("files/a", data)
    matches.clear()
    may_copy, copy = threading.Event(), Namespace.copy
    monkeypatch.setattr(Namespace, "copy", lambda *args: may_copy.wait(60) and copy(*args))
    found = list[bytes]()
    reader = threading.Thread(target=lambda: found.append(mounted.kernel.load("files/a")))
    reader.start()
    wait_until(lambda: len(matches) == LOADED_AHEAD)
    assert not found
    may_copy.set()
    reader.join()
    assert found == [data] and len(matches) == 13


@pytest.mark.usefixtures("batches_of_one_page")
def test_a_load_that_fails_leaves_no_segment_held(
    mounted: Mounted, matches: list[PrefixMatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted.kernel.save("files/a", seeded(5, 12 * PAGE_BYTES + 1))
    matches.clear()

    def fail(*args: Any) -> bool:
        raise OSError(errno.EIO, "the disk")

    monkeypatch.setattr(Namespace, "copy", fail)
    with pytest.raises(OSError, match="Errno 5"):
        mounted.kernel.load("files/a")
    assert 0 < len(matches) < 13
    assert not any(match.hold and match.hold.acquire() for match in matches)
    assert not mounted.spool.used_bytes()
