"""What a reader notes of the pages that it gave out, and copies that it cannot make."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvfs
from kvfs import Cell, Group, Need, PageLayout
from kvfs.directory.config import KIB
from kvfs.lookup.prefix_match import PrefixMatch
from kvfs.native import library
from kvfs.read import reader as reader_module
from kvfs.system.files import Files
from tests.stores import TINY_BYTES, corrupt, counted, counters, seeded, segment_files, tiny, tokens_of

CHUNKS = 6
PAGES = seeded(1, CHUNKS * TINY_BYTES)
KEYS = [b"%032d" % n for n in range(CHUNKS)]
LARGE = kvfs.PageLayout.kv(layers=2, kv_heads=2, head_dim=64, dtype="bfloat16", page_tokens=16)  # 16 KiB


@pytest.fixture
def store(memory_path: Path) -> Iterator[kvfs.Store]:
    with kvfs.open(memory_path / "store", capacity="16MiB") as made:
        yield made


@pytest.fixture
def ns(store: kvfs.Store) -> kvfs.Namespace:
    return store.namespace("m", tiny(), "1")


def used(store: kvfs.Store, match: PrefixMatch, chunks: int) -> list[bool]:
    """Of the first chunks of a match, whether an access time was noted at the time of this match."""
    times = store._shared.c.access_times
    (gm,) = match.groups
    places = [gm.sources()[chunk][0].place for chunk in range(chunks)]
    stamps = {number: times.raw(segment_id) for number, segment_id in match.segments.items()}
    found = [(stamps[p.segment], p.seq) for p in places]
    return [seq < len(raw) and raw[seq] == match.at_us for raw, seq in found]


def put_in_pieces(ns: kvfs.Namespace) -> None:
    """In two stretches of records, of two pages and of four; others are between them."""
    assert ns.put(tokens_of(1, CHUNKS)[:32], PAGES[: 2 * TINY_BYTES]).stored == 2
    assert ns.put(tokens_of(2, 1), PAGES[:TINY_BYTES]).stored == 1
    assert ns.put(tokens_of(1, CHUNKS), PAGES).stored == CHUNKS - 2


@pytest.mark.parametrize("bad", [0, 2, CHUNKS])
def test_the_pages_of_a_view_are_noted_as_used_and_no_others(store: kvfs.Store, ns: kvfs.Namespace, bad: int) -> None:
    put_in_pieces(ns)
    if bad < CHUNKS:
        corrupt(Path(store.path), PAGES[bad * TINY_BYTES : (bad + 1) * TINY_BYTES])
    with ns.match(tokens_of(1, CHUNKS)) as match:
        assert [bytes(view) for view in ns.view(match)] == [
            PAGES[n * TINY_BYTES : (n + 1) * TINY_BYTES] for n in range(bad)
        ]
        assert used(store, match, CHUNKS) == [n < bad for n in range(CHUNKS)]


def test_a_load_notes_the_good_pages_and_counts_their_bytes(store: kvfs.Store, ns: kvfs.Namespace) -> None:
    put_in_pieces(ns)
    for n in (0, 1):
        corrupt(Path(store.path), PAGES[n * TINY_BYTES : (n + 1) * TINY_BYTES])
    with ns.match(tokens_of(1, CHUNKS)) as match, counted(store) as moved:
        assert ns.get(match, bytearray(match.nbytes)) == 0
        assert used(store, match, CHUNKS) == [n >= 2 for n in range(CHUNKS)]
        assert moved("bytes_loaded") == (CHUNKS - 2) * TINY_BYTES and moved("tokens_loaded") == 0
    assert not ns.match(tokens_of(1, CHUNKS)), "the bad ones left the index"


def test_a_match_that_was_sent_to_another_process_is_opened_again_unless_it_was_purged(
    store: kvfs.Store, ns: kvfs.Namespace
) -> None:
    assert ns.put(tokens_of(1, CHUNKS), PAGES).stored == CHUNKS
    with ns.match(tokens_of(1, CHUNKS)) as match:
        sent = pickle.dumps(match)
    there = pickle.loads(sent)
    assert bytes(ns.view(there)[-1]) == PAGES[-TINY_BYTES:]
    out = bytearray(there.nbytes)
    assert ns.get(there, out) == CHUNKS and out == PAGES
    assert store.purge(namespace=ns).pages == CHUNKS
    assert ns.get(pickle.loads(sent), out) == 0 and ns.view(pickle.loads(sent)) == []


@pytest.fixture
def target(tmp_path: Path) -> Iterator[int]:
    if library.loaded() is None:
        pytest.skip("the native library is not built")
    fd = os.open(tmp_path / "copy", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def test_a_copy_has_the_bytes_of_its_spots_and_counts(store: kvfs.Store, ns: kvfs.Namespace, target: int) -> None:
    assert ns.put_keys(KEYS, PAGES).stored == CHUNKS
    with ns.match_keys(KEYS) as match, counted(store) as moved:
        assert ns.copy(match, target, [(0, 1000, 50), (1000, len(PAGES) - 1000, 2000)])
        names = ("bytes_loaded", "tokens_loaded", "tokens_loaded_host", "tokens_loaded_disk")
        assert [moved(name) for name in names] == [len(PAGES), CHUNKS * 16, CHUNKS * 16, 0]
        times = store._shared.c.access_times
        ((number, segment_id),) = match.segments.items()
        assert list(times.raw(segment_id)).count(match.at_us) == CHUNKS, f"one segment ({number}): one time"
    assert os.pread(target, 1000, 50) == PAGES[:1000]
    assert os.pread(target, len(PAGES), 2000) == PAGES[1000:]


@pytest.mark.parametrize("why", ["a damaged page", "a page in a codec", "a dropped segment", "all in a codec"])
def test_what_cannot_be_copied_as_a_whole_counts_as_nothing(store: kvfs.Store, target: int, why: str) -> None:
    pages = b"".join(bytes([n]) * LARGE.page_bytes for n in range(CHUNKS))
    raw, encoded = (store.namespace("large", LARGE, "1", codec=codec) for codec in ("raw", "zstd"))
    half = 0 if why == "all in a codec" else CHUNKS // 2
    if half:
        assert raw.put_keys(KEYS[:half], pages[: half * LARGE.page_bytes]).stored == half
    store._shared.services().active.finish_all()
    last = encoded if "codec" in why else raw
    assert last.put_keys(KEYS[half:], pages[half * LARGE.page_bytes :]).stored == CHUNKS - half
    if why == "a damaged page":
        corrupt(Path(store.path), pages[-LARGE.page_bytes :])
    with raw.match_keys(KEYS) as match:
        assert match.chunks == CHUNKS
        sent = pickle.loads(pickle.dumps(match))
    if why == "a dropped segment":
        segment_files(Path(store.path))[0].unlink()
        store._shared.c.segments.close()
    before = counters(store)
    assert raw.copy(sent, target, [(0, len(pages), 0)]) is False
    changed = {name for name, value in counters(store).items() if value != before.get(name, 0)}
    assert not {"bytes_loaded", "tokens_loaded"} & changed, changed
    assert not any(any(store._shared.c.access_times.raw(one)) for one in sent.segments.values())


def test_only_keys_of_one_group_are_copied(ns: kvfs.Namespace, target: int) -> None:
    assert ns.put(tokens_of(1, CHUNKS), PAGES).stored == CHUNKS
    with ns.match(tokens_of(1, CHUNKS)) as match, pytest.raises(kvfs.ConfigError, match="needs a match of keys"):
        ns.copy(match, target, [(0, KIB, 0)])


def test_a_view_of_many_pages_is_filled_in_steps_that_cover_it(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel maps the pages of a step at once; what it leaves out would be mapped page by page."""
    assert ns.put(tokens_of(1, CHUNKS), PAGES).stored == CHUNKS
    filled: list[tuple[int, int]] = []
    populate = Files.populate

    def noting(self: Files, mapping: object, offset: int, nbytes: int) -> None:
        filled.append((offset, nbytes))
        populate(self, mapping, offset, nbytes)  # type: ignore[arg-type]

    monkeypatch.setattr(reader_module, "READ_BYTES", 2 * TINY_BYTES)
    monkeypatch.setattr(Files, "populate", noting)
    with ns.match(tokens_of(1, CHUNKS)) as match:
        assert len(ns.view(match)) == CHUNKS
    filled.sort()
    assert filled == [(n * 4096, 4096 + TINY_BYTES) for n in range(0, CHUNKS, 2)]


def test_a_reader_of_a_forked_child_has_threads_of_its_own(store: kvfs.Store, ns: kvfs.Namespace) -> None:
    assert ns.put(tokens_of(1, CHUNKS), PAGES).stored == CHUNKS
    reader = store._shared.services().reader
    with reader._team._lock:  # of a thread that only the parent has
        reader.abandon()
        assert reader._team._started(1) is not None and reader._team._wanted == 1
        with ns.match(tokens_of(1, CHUNKS)) as match:
            out = bytearray(match.nbytes)
            assert ns.get(match, out) == CHUNKS and out == PAGES


def test_a_copy_counts_what_the_page_cache_lacked(
    store: kvfs.Store, ns: kvfs.Namespace, target: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ns.put_keys(KEYS, PAGES).stored == CHUNKS
    fetcher = store._shared.services().reader._fetcher
    monkeypatch.setattr(fetcher, "copy", lambda *_: 0b100110)
    with ns.match_keys(KEYS) as match, counted(store) as moved:
        assert ns.copy(match, target, [(0, len(PAGES), 0)])
        assert (moved("tokens_loaded_disk"), moved("tokens_loaded_host")) == (3 * 16, 3 * 16)


def test_the_pages_of_a_windows_view_are_those_that_are_noted(store: kvfs.Store) -> None:
    layout = PageLayout.of([Group("window", (0, 1), 1, Cell("bf16", 16), Need.window_of(32), 16)], 16)
    ns, size = store.namespace("windows", layout, "1"), layout.page_bytes
    tokens, pages = tokens_of(3, CHUNKS), seeded(3, CHUNKS * layout.page_bytes)
    for first, end in ((0, 3), (3, 5), (5, CHUNKS)):  # three stretches of records
        assert (
            ns.put(tokens[: 16 * end], {"window": pages[first * size : end * size]}, start=first).stored == end - first
        )
        assert ns.put(tokens_of(9 + end, 1), {"window": pages[:size]}).stored == 1
    with ns.match(tokens[: 16 * 5]) as match:
        (gm,) = match.groups
        assert (gm.first, gm.count) == (3, 2)
        assert [bytes(view) for view in ns.view(match)] == [pages[n * size : (n + 1) * size] for n in (3, 4)]
        ((_, segment_id),) = match.segments.items()
        stamps = list(store._shared.c.access_times.raw(segment_id))
    with ns.match(tokens) as later:
        places = later.groups[0].sources()
    with ns.match(tokens[: 16 * 3]) as earlier:
        before = earlier.groups[0].sources()
    used = {seq for seq, stamp in enumerate(stamps) if stamp == match.at_us}
    assert {places[4][0].place.seq} <= used and len(used) == 2
    assert not used & {places[5][0].place.seq, *(source[0].place.seq for source in before.values())}
