"""Loads that wait for no disk: what the page cache has, verified, and nothing of the rest."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.native import library
from kvfs.pages.chunk_set import bits_of
from kvfs.system.files import Files
from tests.stores import corrupt, counted, seeded, segment_files, tiny, tokens_of

COUNT = 12
KEYS = [b"%032d" % n for n in range(COUNT)]
#: One leaf that is read in one step, one that is read in several, and pages with a gap behind each.
SIZES = [4096, (1 << 20) + 4096, 5000]


@pytest.fixture(autouse=True)
def with_library() -> None:
    if library.loaded() is None:
        pytest.skip("the native library is not built")


@pytest.fixture
def store(store_path: Path) -> Iterator[kvfs.Store]:
    with kvfs.open(store_path, capacity="128MiB") as made:
        yield made


def stored(store: kvfs.Store, size: int) -> tuple[kvfs.Namespace, list[bytes]]:
    data = seeded(size, COUNT * size)
    ns = store.namespace("m", kvfs.PageLayout.opaque(size, 16), "1")
    assert ns.put_keys(KEYS, data).stored == COUNT
    return ns, [data[n * size : (n + 1) * size] for n in range(COUNT)]


def drop(path: Path) -> None:
    """Drop all segments from the page cache."""
    for file in segment_files(path):
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            if Files().cached_bytes(fd, 0, 1 << 30) != 0:
                pytest.skip("this file system keeps its pages, or does not tell")
        finally:
            os.close(fd)


@pytest.mark.parametrize("verify", ["always", "first", "off"])
@pytest.mark.parametrize("size", SIZES)
def test_pages_of_the_page_cache_come_at_once_in_one_buffer_or_in_many(
    store_path: Path, size: int, verify: str
) -> None:
    with kvfs.open(store_path, capacity="128MiB", verify=verify) as store:
        ns, pages = stored(store, size)
        with ns.match_keys(KEYS) as match:
            whole, single = bytearray(COUNT * size), [bytearray(size) for _ in range(COUNT)]
            for out in (whole, single):
                with counted(store) as moved:
                    assert ns.get_pages(match, out, wait=False) == {"opaque": (1 << COUNT) - 1}
                    assert moved("bytes_loaded") == COUNT * size and moved("tokens_loaded_host") == COUNT * 16
        assert whole == b"".join(pages) and single == pages


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("tells", [True, False])
def test_what_the_page_cache_lacks_is_left_to_a_load_that_waits(
    store: kvfs.Store, store_path: Path, size: int, tells: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the kernel cannot tell: then each read finds out by itself."""
    ns, pages = stored(store, size)
    if not tells:
        monkeypatch.setattr(store._shared.c.segments, "cached_bytes", lambda *_: None)
    with ns.match_keys(KEYS) as match:
        drop(store_path)
        out = [bytearray(size) for _ in KEYS]
        with counted(store) as moved:
            good = ns.get_pages(match, out, wait=False)["opaque"]
            assert not good & 1 and not (tells and good), "read-ahead may have brought others"
            assert moved("bytes_loaded") == good.bit_count() * size and not moved("tokens_loaded_disk")
        assert all(out[n] == pages[n] for n in range(COUNT) if good >> n & 1)
        monkeypatch.undo()
        assert ns.get_pages(match, out) == {"opaque": (1 << COUNT) - 1} and out == pages


@pytest.mark.parametrize("size", SIZES)
def test_neighbours_of_a_page_that_is_not_cached_come_at_once(
    store: kvfs.Store, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ns, pages = stored(store, size)
    with ns.match_keys(KEYS) as match:
        cold = random.Random(size).sample(range(COUNT), 4)
        warm, out = [n for n in range(COUNT) if n not in cold], [bytearray(size) for _ in KEYS]
        places = [match.groups[0].sources()[n][0].place for n in cold]

        def cached_bytes(held: Any, offset: int, nbytes: int) -> int:
            mine = [p.block * 4096 for p in places if match.segments[p.segment] == held.segment_id]
            return nbytes - sum(offset <= at < offset + nbytes for at in mine)

        monkeypatch.setattr(store._shared.c.segments, "cached_bytes", cached_bytes)
        assert ns.get_pages(match, out, wait=False) == {"opaque": bits_of(warm)}
        assert [n for n in range(COUNT) if out[n] == pages[n]] == warm, "the others are not even asked for"


@pytest.mark.parametrize("size", SIZES)
def test_damage_is_neither_given_out_nor_counted_twice(store: kvfs.Store, store_path: Path, size: int) -> None:
    ns, pages = stored(store, size)
    corrupt(store_path, pages[5])
    with ns.match_keys(KEYS) as match, counted(store) as moved:
        out = [bytearray(size) for _ in KEYS]
        good = bits_of([n for n in range(COUNT) if n != 5])
        assert ns.get_pages(match, out, wait=False) == {"opaque": good}
        assert not moved("pages_corrupt") and ns.match_keys(KEYS[5:6]), "it is noted by the load that follows"
        assert all(out[n] == pages[n] for n in range(COUNT) if n != 5)
        assert ns.get_pages(match, out) == {"opaque": good}
        assert moved("pages_corrupt") == 1 and not ns.match_keys(KEYS[5:6])


def test_a_match_that_holds_nothing_is_not_loaded_at_once(store: kvfs.Store) -> None:
    """Its segments would have to be opened, which a disk may delay."""
    ns, pages = stored(store, 4096)
    with ns.match_keys(KEYS) as match:
        sent = pickle.loads(pickle.dumps(match))
    for lost in (sent, match):
        out = bytearray(COUNT * 4096)
        assert ns.get_pages(lost, out, wait=False) == {"opaque": 0} and not any(out)
        assert ns.get_pages(lost, out) == {"opaque": (1 << COUNT) - 1} and out == b"".join(pages)


@pytest.mark.parametrize("native", [True, False])
def test_a_read_of_a_segment_notes_no_access_time(store: kvfs.Store, store_path: Path, native: bool) -> None:
    """To note one, a read of the page cache would wait for the journal of a disk that hangs."""
    ns, _ = stored(store, 4096)
    for file in segment_files(store_path):
        os.utime(file, ns=(0, file.stat().st_mtime_ns))  # so old that a read would write it
    with contextlib.nullcontext() if native else library.paused(), ns.match_keys(KEYS) as match:
        assert ns.get_pages(match, bytearray(COUNT * 4096), wait=not native)["opaque"].bit_count() == COUNT
    assert [file.stat().st_atime_ns for file in segment_files(store_path)] == [0]


def test_a_prompt_counts_the_pages_that_can_be_restored(store: kvfs.Store, store_path: Path) -> None:
    ns, tokens = store.namespace("kv", tiny(), "1"), tokens_of(1, 4)
    size = ns.layout.page_bytes
    pages = seeded(3, 4 * size)
    assert ns.put(tokens, pages).stored == 4
    corrupt(store_path, pages[2 * size : 3 * size])
    with ns.match(tokens) as match, counted(store) as moved:
        assert ns.get_pages(match, bytearray(4 * size), wait=False) == {"full": 0b1011}
        assert moved("tokens_loaded") == 32


def test_pages_in_a_codec_are_left_to_a_load_that_waits(store: kvfs.Store) -> None:
    ns = store.namespace("m", kvfs.PageLayout.opaque(8192, 16), "1", codec="zstd")
    pages = b"".join(bytes([n]) * 8192 for n in range(4))
    assert ns.put_keys(KEYS[:4], pages).stored == 4
    with ns.match_keys(KEYS[:4]) as match:
        out = bytearray(4 * 8192)
        assert ns.get_pages(match, out, wait=False) == {"opaque": 0}
        assert ns.get_pages(match, out) == {"opaque": 0b1111} and out == pages
