"""The pages of files: what loads need to be fast, and a store that does not answer."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.errors import IndexUnavailableError
from kvfs.format import segment as fmt
from kvfs.lookup.prefix_match import PrefixMatch
from kvfs.mount import cells, spool
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


# -- small files -------------------------------------------------------------------------------


def test_a_small_save_takes_little_memory(mounted: Mounted) -> None:
    mounted.kernel.save("files/a", b"x")
    tracemalloc.start()
    try:
        mounted.kernel.save("files/b", b"y")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_content_that_is_there_is_saved_with_one_lookup(mounted: Mounted, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("match_keys", "present_keys", "put_keys"):
        original = getattr(Namespace, name)

        def counted(self: Namespace, *args: Any, name: str = name, original: Any = original) -> Any:
            calls.append(name)
            return original(self, *args)

        monkeypatch.setattr(Namespace, name, counted)
    mounted.kernel.save("files/a", b"x")
    assert calls == ["match_keys", "put_keys", "match_keys"]
    calls.clear()
    mounted.kernel.save("files/b", b"x")
    assert calls == ["match_keys"]
    assert mounted.kernel.load("files/b") == b"x"


def test_what_was_found_in_several_lookups_is_found_again_as_a_whole(mounted: Mounted) -> None:
    """Pages of the first may be evicted while the others are saved."""
    data = seeded(1, PAGE_BYTES) + b"rest"
    mounted.kernel.save("files/a", data)
    found: list[object] = []
    find = mounted.chunks.find
    mounted.chunks.find = lambda manifest, **how: found.append(manifest) or find(manifest, **how)  # type: ignore[func-returns-value, method-assign]
    mounted.kernel.save("files/b", data)
    assert len(found) == 1
    assert mounted.kernel.load("files/b") == data


def test_a_new_manifest_takes_no_blocks_ahead_and_one_that_replaces_another_does(
    mounted: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead: list[int] = []
    monkeypatch.setattr(mounted.names._clock, "fallocate", lambda fd, at, n, **how: ahead.append(n))
    mounted.kernel.save("files/a", b"x")
    assert not ahead
    mounted.kernel.save("files/a", seeded(2, 200_000))
    assert ahead == [64 + 16 + 4 * 32]
    mounted.kernel.save("files/a", b"x")
    assert mounted.kernel.load("files/a") == b"x"
    assert os.stat("a", dir_fd=mounted.names.root).st_size == 64 + 16 + 32


# -- drafts ------------------------------------------------------------------------------------


def test_the_file_of_a_small_draft_serves_the_next_one_and_shows_nothing_of_it(
    mounted: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    original = spool._unnamed
    monkeypatch.setattr(spool, "_unnamed", lambda folder: made.append(folder) or original(folder))
    mounted.kernel.save("files/a", b"secret" * 1000)
    for n in range(3):
        fd = mounted.kernel.open(f"files/{n}", os.O_WRONLY | os.O_CREAT)
        mounted.kernel.write(fd, b"end", 5000)
        mounted.kernel.close(fd)
    assert len(made) == 1
    assert mounted.kernel.load("files/2") == bytes(5000) + b"end"
    assert mounted.spool.used_bytes() == 5003


def test_a_file_that_the_kernel_reads_by_itself_serves_no_other_content(mounted: Mounted) -> None:
    mounted.kernel.save("files/a", b"mapped")
    fd = mounted.kernel.open("files/a")
    backing = os.dup(mounted.kernel.open_files[fd][0].backing)  # as a map has it, after the close
    mounted.kernel.close(fd)
    for n in range(3):
        mounted.kernel.save("files/a", b"other%d" % n)
    assert os.pread(backing, 100, 0) == b"mapped"
    os.close(backing)


def test_large_and_many_emptied_drafts_are_not_kept(mounted: Mounted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "EMPTY_MAX", 2)
    monkeypatch.setattr(spool, "EMPTIED_BYTES_MAX", 100)
    mounted.kernel.save("files/large", bytes(101))
    assert not mounted.spool._empty
    fds = [mounted.kernel.open(f"files/{n}", os.O_WRONLY | os.O_CREAT) for n in range(4)]
    for fd in fds:
        mounted.kernel.close(fd)
    assert len(mounted.spool._empty) == 2
