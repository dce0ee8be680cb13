"""Pages of an object that is still coming: verified and stored before the rest is there."""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.bundles.incoming import PageAppender
from kvfs.errors import NoSpaceError
from kvfs.remote.directory_store import DirectoryStore
from kvfs.remote.object_store import Fetched, RemoteError
from kvfs.remote.page_object import HEAD_BYTES, Arriving, decode
from kvfs.remote.pull import Puller, _Wanted
from tests.stores import TINY_BYTES, restored, seeded, tiny, tokens_of

CHUNKS = 40  # two objects


@pytest.fixture
def data(here: kvfs.Store) -> bytes:
    """A prompt that is in the bucket."""
    data = seeded(1, CHUNKS * TINY_BYTES)
    here.namespace("chat", tiny(), "1a").put(tokens_of(1, CHUNKS), data)
    here.push(["chat"])
    return data


@pytest.fixture
def first(data: bytes, there: kvfs.Store, monkeypatch: pytest.MonkeyPatch) -> tuple[_Wanted, bytes]:
    """The first object of the prompt, by its name and its bytes."""
    found: list[tuple[_Wanted, bytes]] = []
    fetch = Puller._fetch

    def keep(puller: Puller, wanted: _Wanted, *request: Any) -> Any:
        came = puller._bucket.objects.get(wanted.shape.name(wanted.chunk_hash), 0, wanted.shape.object_bytes_max)
        if came is not None:
            found.append((wanted, bytes(came.data)))
        return fetch(puller, wanted, *request)

    with monkeypatch.context() as patch:
        patch.setattr(Puller, "_fetch", keep)
        there.pull("chat")
    return max(found, key=lambda one: len(one[1]))


def arriving(wanted: _Wanted, data: bytes, lengths: list[int]) -> list[int]:
    """How many pages verify when each of these numbers of bytes has come; the rest of the room is another object's."""
    room = memoryview(bytearray(b"\xa5" * len(data)))
    one, counts, at = Arriving(room, wanted.shape, wanted.chunk_hash), [], 0
    whole = decode(memoryview(data), wanted.shape, wanted.chunk_hash)
    for length in lengths:
        room[at:length] = data[at:length]
        at, before = length, len(one.pages)
        assert one.come(length) == (len(one.pages) > before)
        counts.append(len(one.pages))
        for early, page in zip(one.pages, whole, strict=False):
            assert (early.entry, bytes(early.payload), early.table) == (page.entry, bytes(page.payload), page.table)
    assert decode(memoryview(data), wanted.shape, wanted.chunk_hash, verified=one.pages) == whole
    return counts


def test_each_page_verifies_as_soon_as_its_last_byte_is_there(first: tuple[_Wanted, bytes]) -> None:
    wanted, data = first
    pages = decode(memoryview(data), wanted.shape, wanted.chunk_hash)
    ends = [page.entry.payload + page.entry.stored_bytes for page in pages]
    assert len(ends) == 32
    assert arriving(wanted, data, [HEAD_BYTES - 1, HEAD_BYTES, ends[0] - 1]) == [0, 0, 0]
    assert arriving(wanted, data, [n for end in ends for n in (end - 1, end)]) == [
        n for i in range(32) for n in (i, i + 1)
    ]
    assert arriving(wanted, data, [ends[20] + 1, len(data)]) == [21, 32]


def test_pages_are_verified_some_at_once(first: tuple[_Wanted, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, data = first
    ends = [p.entry.payload + p.entry.stored_bytes for p in decode(memoryview(data), wanted.shape, wanted.chunk_hash)]
    monkeypatch.setattr("kvfs.remote.page_object.EARLY_BYTES", 3 * TINY_BYTES)
    counts = arriving(wanted, data, [*ends, len(data)])
    assert counts == [(i + 1) // 3 * 3 for i in range(32)] + [30], "what is left at the end is not enough"


def test_no_flipped_byte_gives_a_wrong_page(first: tuple[_Wanted, bytes]) -> None:
    wanted, data = first
    whole = decode(memoryview(data), wanted.shape, wanted.chunk_hash)
    draw, shorter = random.Random(5), 0
    for at in [*draw.sample(range(len(data)), 200), *draw.sample(range(HEAD_BYTES), 200)]:
        damaged = bytearray(data)
        damaged[at] ^= 1 << draw.randrange(8)
        one = Arriving(memoryview(damaged), wanted.shape, wanted.chunk_hash)
        for length in [*sorted(draw.sample(range(len(data)), 5)), len(data)]:
            one.come(length)
        shorter += len(one.pages) < len(whole)
        for early, page in zip(one.pages, whole, strict=False):
            assert early.entry == page.entry and early.payload == page.payload and early.table == page.table
    assert shorter > 100


def test_an_object_under_another_name_has_no_early_pages(first: tuple[_Wanted, bytes]) -> None:
    wanted, data = first
    one = Arriving(memoryview(data), wanted.shape, bytes(32))
    assert not one.come(len(data)) and not one.pages


def test_a_page_that_is_too_large_for_this_store_ends_them(first: tuple[_Wanted, bytes]) -> None:
    wanted, data = first
    one = Arriving(memoryview(data), wanted.shape, wanted.chunk_hash, TINY_BYTES - 1)
    assert not one.come(len(data)) and not one.pages
    one = Arriving(memoryview(data), wanted.shape, wanted.chunk_hash, TINY_BYTES)
    assert one.come(len(data)) and len(one.pages) == 32


@pytest.fixture
def half_way(bucket_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Has a function called when half of an object with pages has come."""
    get = DirectoryStore.get

    def call(then: Callable[[], object]) -> None:
        def slow(
            store: DirectoryStore,
            name: str,
            start: int,
            length: int,
            room: memoryview | None = None,
            arrived: Any = None,
        ) -> Fetched | None:
            found = get(store, name, start, length, room)
            if found is not None and arrived is not None and "/pages/" in name:
                arrived(len(found.data) // 2)
                then()
            return found

        monkeypatch.setattr(DirectoryStore, "get", slow)

    return call


@pytest.fixture
def waited(half_way: Callable[[Callable[[], object]], None], monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each object, whether pages were stored before its second half came."""
    stored, waited, store = threading.Event(), list[bool](), PageAppender.store

    def tell(appender: PageAppender, *args: Any) -> None:
        store(appender, *args)
        stored.set()

    monkeypatch.setattr(PageAppender, "store", tell)
    half_way(lambda: waited.append(stored.wait(10.0)))
    return waited


def test_pages_are_stored_while_the_rest_of_their_object_comes(
    data: bytes, there: kvfs.Store, waited: list[bool]
) -> None:
    ns = there.namespace("chat", tiny(), "1a")
    done = there.pull(ns, tokens_of(1, CHUNKS))
    assert waited == [True, True]
    assert (done.stored, done.skipped, done.objects, done.failed) == (CHUNKS, 0, 2, 0), "each page is counted once"
    assert restored(ns, tokens_of(1, CHUNKS)) == data


def test_a_namespace_is_stored_while_it_comes(data: bytes, there: kvfs.Store, waited: list[bool]) -> None:
    done = there.pull("chat")
    assert waited == [True, True] and (done.stored, done.skipped, done.objects) == (CHUNKS, 0, 2)
    assert restored(there.namespace("chat", tiny(), "1a"), tokens_of(1, CHUNKS)) == data


def test_an_object_that_breaks_off_leaves_right_pages_alone(
    data: bytes, there: kvfs.Store, half_way: Callable[[Callable[[], object]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks = [True]

    def break_off() -> None:
        if breaks:
            raise RemoteError("503 SlowDown")

    half_way(break_off)
    ns = there.namespace("chat", tiny(), "1a")
    done = there.pull(ns, tokens_of(1, CHUNKS))
    assert done.failed == 1 and done.objects == 0
    found = restored(ns, tokens_of(1, CHUNKS))
    assert len(found) < len(data) and data.startswith(found)
    breaks.clear()
    there.pull(ns, tokens_of(1, CHUNKS))
    assert restored(ns, tokens_of(1, CHUNKS)) == data


def test_without_room_for_early_pages_they_are_stored_when_their_object_has_come(
    data: bytes, there: kvfs.Store, half_way: Callable[[Callable[[], object]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, refused = PageAppender.store, threading.Event()

    def full(appender: PageAppender, *args: Any) -> None:
        if not appender._space_seconds:
            assert not refused.is_set(), "it is not tried again"
            refused.set()
            raise NoSpaceError("no room for more")
        store(appender, *args)

    monkeypatch.setattr(PageAppender, "store", full)
    half_way(lambda: refused.wait(10.0))
    ns = there.namespace("chat", tiny(), "1a")
    done = there.pull(ns, tokens_of(1, CHUNKS))
    assert refused.is_set()
    assert (done.stored, done.failed, done.problems) == (CHUNKS, 0, []), "what the other appender met is not counted"
    assert restored(ns, tokens_of(1, CHUNKS)) == data


def test_an_early_store_that_fails_midway_counts_each_page_once(
    data: bytes, there: kvfs.Store, half_way: Callable[[Callable[[], object]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    append, partly, failed = PageAppender._append, threading.Event(), threading.Event()

    def fail_midway(appender: PageAppender, segment_class: Any, records: list[Any], *args: Any) -> int:
        if appender._space_seconds:
            return append(appender, segment_class, records, *args)
        if partly.is_set():
            failed.set()
            raise OSError(errno.ENOSPC, "full")
        if len(records) > 4:
            partly.set()
        return append(appender, segment_class, records[:4], *args)

    monkeypatch.setattr(PageAppender, "_append", fail_midway)
    half_way(lambda: failed.wait(10.0))
    ns = there.namespace("chat", tiny(), "1a")
    ns.put(tokens_of(1, 3), data[: 3 * TINY_BYTES])
    done = there.pull(ns, tokens_of(1, CHUNKS))
    assert failed.is_set()
    assert (done.stored, done.skipped, done.failed) == (CHUNKS - 3, 3, 0)
    assert done.nbytes == (CHUNKS - 3) * TINY_BYTES
    assert restored(ns, tokens_of(1, CHUNKS)) == data


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS, errno.ENOSPC], ids=["EIO", "EROFS", "ENOSPC"])
def test_a_disk_that_fails_makes_a_pull_shorter(
    code: int, data: bytes, there: kvfs.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> int:
        raise OSError(code, "the disk fails")

    ns = there.namespace("chat", tiny(), "1a")
    with monkeypatch.context() as patch:
        patch.setattr(PageAppender, "_append", fail)
        done = there.pull(ns, tokens_of(1, CHUNKS))
    assert (done.stored, done.skipped, done.failed) == (0, 0, 1) and "the disk fails" in done.problems[0]
    there.pull(ns, tokens_of(1, CHUNKS))
    assert restored(ns, tokens_of(1, CHUNKS)) == data


def test_a_directory_tells_what_has_come(tmp_path: Path) -> None:
    store = DirectoryStore(str(tmp_path))
    store.put_new("a/b", bytes(range(256)) * 50)
    came: list[int] = []
    room = memoryview(bytearray(12_800))

    def arrived(nbytes: int) -> None:
        came.append(nbytes)
        assert room[:nbytes] == (bytes(range(256)) * 50)[:nbytes]

    assert store.get("a/b", 0, 12_800, room, arrived) is not None
    assert came == [5000, 10_000, 12_800]
