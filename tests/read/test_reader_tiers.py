"""Tiers of a load: what was read from where, and only what was read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs import Cell, Group, Need, PageLayout, Tier
from kvfs.pages.chunk_set import bits_of, span
from kvfs.system.files import Files
from tests.stores import TINY_BYTES, counted, seeded, segment_files, tiny, tokens_of

CHUNKS = 12


class SomeCached(Files):
    """A page cache that holds the files ``cached`` and no others."""

    def __init__(self) -> None:
        self.cached: set[int] = set()

    def cached_bytes(self, fd: int, offset: int, nbytes: int) -> int:
        return nbytes if os.fstat(fd).st_ino in self.cached else 0

    def preadv(self, fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
        return super().preadv(fd, buffers, offset)  # what is cached never makes a read wait


@pytest.fixture
def files() -> SomeCached:
    return SomeCached()


@pytest.fixture
def store(store_path: Path, files: SomeCached) -> Any:
    with kvfs.open(store_path, capacity="64MiB", files=files) as opened:
        yield opened


def place_of(path: Path, page: bytes) -> tuple[Path, int]:
    """The segment file that holds the bytes of a page, and their offset."""
    for file in segment_files(path):
        at = file.read_bytes().find(page)
        if at >= 0:
            return file, at
    raise AssertionError("no segment holds this page")


def two_classes(store: kvfs.Store, path: Path, files: SomeCached) -> tuple[kvfs.Namespace, list[int], bytes]:
    """A prompt whose first five pages are cached; pages with a lifetime have segments of their own."""
    ns = store.namespace("model", tiny(), "1")
    tokens, pages = tokens_of(1, CHUNKS), seeded(1, CHUNKS * TINY_BYTES)
    assert ns.put(tokens[: 5 * 16], pages[: 5 * TINY_BYTES]).stored == 5
    assert ns.put(tokens, pages[5 * TINY_BYTES :], start=5, ttl="1h").stored == CHUNKS - 5
    warm, cold = (place_of(path, pages[n * TINY_BYTES : (n + 1) * TINY_BYTES])[0] for n in (0, CHUNKS - 1))
    assert warm != cold
    files.cached.add(warm.stat().st_ino)
    return ns, tokens, pages


def test_each_chunk_counts_for_the_tier_that_it_was_read_from(
    store: kvfs.Store, store_path: Path, files: SomeCached
) -> None:
    ns, tokens, pages = two_classes(store, store_path, files)
    out = bytearray(len(pages))
    with counted(store) as moved, ns.match(tokens) as match:
        assert ns.get_tiers(match, out) == {Tier.HOST: span(0, 5), Tier.DISK: span(5, CHUNKS - 5)}
        assert moved("tokens_loaded_host") == 5 * 16 and moved("tokens_loaded_disk") == (CHUNKS - 5) * 16
    assert out == pages


def test_a_page_that_does_not_verify_is_of_no_tier(store: kvfs.Store, store_path: Path, files: SomeCached) -> None:
    ns, tokens, pages = two_classes(store, store_path, files)
    file, at = place_of(store_path, pages[7 * TINY_BYTES : 8 * TINY_BYTES])
    with file.open("r+b") as handle:
        handle.seek(at)
        handle.write(bytes([pages[7 * TINY_BYTES] ^ 1]))
    with ns.match(tokens) as match:
        assert ns.get_tiers(match, bytearray(len(pages))) == {Tier.HOST: span(0, 5), Tier.DISK: span(5, 2)}


def test_of_keys_each_page_counts_by_itself(store: kvfs.Store, store_path: Path) -> None:
    ns = store.namespace("model", tiny(), "1")
    keys, pages = [b"%032d" % n for n in range(4)], seeded(2, 4 * TINY_BYTES)
    assert ns.put_keys(keys, pages).stored == 4
    file, at = place_of(store_path, pages[TINY_BYTES : 2 * TINY_BYTES])
    with file.open("r+b") as handle:
        handle.seek(at)
        handle.write(bytes([pages[TINY_BYTES] ^ 1]))
    with ns.match_keys(keys) as match:
        assert ns.get_tiers(match, bytearray(len(pages))) == {Tier.DISK: bits_of([0, 2, 3])}


def test_chunks_before_a_window_are_read_from_nowhere(store: kvfs.Store) -> None:
    layout = PageLayout.of([Group("window", (0, 1), 1, Cell("bf16", 16), Need.window_of(32), 16)], 16)
    ns = store.namespace("windows", layout, "1")
    tokens, size = tokens_of(3, 6), layout.page_bytes
    assert ns.put(tokens, {"window": seeded(3, 6 * size)}).stored == 6
    with counted(store) as moved, ns.match(tokens) as match:
        first = match.first_page("window")
        out = bytearray(match.page_count("window") * size)
        assert 0 < first < 6
        assert ns.get_tiers(match, out) == {Tier.DEVICE: span(0, first), Tier.DISK: span(first, 6 - first)}
        assert moved("tokens_loaded") == moved("tokens_loaded_disk") == (6 - first) * 16


def test_a_match_of_nothing_has_no_tiers(store: kvfs.Store) -> None:
    ns = store.namespace("model", tiny(), "1")
    with ns.match(tokens_of(9, 4)) as match:
        assert ns.get_tiers(match, bytearray()) == {}


def test_a_warm_match_asks_the_kernel_once_per_segment(
    store: kvfs.Store, store_path: Path, files: SomeCached, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine's scheduler asks for the tiers of long prompts. Where something is missing, each page is asked for."""
    ns, tokens, _ = two_classes(store, store_path, files)
    asked: list[int] = []
    inner = files.cached_bytes

    def counting(fd: int, offset: int, nbytes: int) -> int:
        asked.append(nbytes)
        return inner(fd, offset, nbytes)

    monkeypatch.setattr(files, "cached_bytes", counting)
    with ns.match(tokens) as match:
        asked.clear()
        assert [page.tier for page in match.pages] == [Tier.HOST] * 5 + [Tier.DISK] * (CHUNKS - 5)
        assert len(asked) > CHUNKS
        files.cached.update(os.stat(file).st_ino for file in segment_files(store_path))
        asked.clear()
        assert [page.tier for page in match.pages] == [Tier.HOST] * CHUNKS
        assert len(asked) == 2
