"""Pins in a full store: room is made for them, and never by evicting pages that they need."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.errors import NoSpaceError
from kvfs.format import segment as fmt
from kvfs.index.session import Session
from kvfs.segments.scan import scan_segment
from kvfs.system.files import Files
from kvfs.testing import FakeClock
from kvfs.write.active_segments import SegmentClass
from tests.stores import counted, restored, seeded, tokens_of

CHUNKS = 15
LAYOUT = kvfs.PageLayout.kv(layers=2, kv_heads=2, head_dim=64, dtype="bfloat16", page_tokens=16)
PAGES = seeded(1, CHUNKS * LAYOUT.page_bytes)
MIB = 1 << 20


class Clock(FakeClock, Files):
    """The real file system under a clock that is set by hand."""


@pytest.fixture
def store(memory_path: Path) -> Iterator[kvfs.Store]:
    with kvfs.open(memory_path / "store", capacity="16MiB", segment_bytes="256KiB", files=Clock()) as made:
        yield made


def advance(store: kvfs.Store, seconds: float) -> None:
    files = store._shared.c.files
    assert isinstance(files, Clock)
    files.advance(seconds)


def fill(store: kvfs.Store, seeds: range) -> kvfs.Namespace:
    ns = store.namespace("model", LAYOUT, revision="r1")
    for seed in seeds:
        assert ns.put(tokens_of(seed, CHUNKS), PAGES).stored == CHUNKS
        advance(store, 0.01)
    return ns


def test_a_full_store_makes_room_for_a_pin_and_keeps_it(store: kvfs.Store) -> None:
    ns = fill(store, range(80))
    with counted(store) as count:
        for seed in (79, 78, 77):
            assert store.pin(f"prompt {seed}", ns, tokens_of(seed, CHUNKS)) == CHUNKS * 16
            assert store.stats()["used_bytes"] <= 16 * MIB
        assert count("segments_evicted") > 0
    fill(store, range(100, 200))
    assert all(restored(ns, tokens_of(seed, CHUNKS)) == PAGES for seed in (79, 78, 77))
    assert store.verify().ok


def test_a_pin_of_many_segments_evicts_neither_what_it_copies_nor_its_copies(store: kvfs.Store) -> None:
    ns = store.namespace("model", LAYOUT, revision="r1")
    chunks = 300  # 4.7 of 12.5 MiB, the oldest in the store, so these and their copies rank first for eviction
    pages = seeded(2, chunks * LAYOUT.page_bytes)
    assert ns.put(tokens_of(500, chunks), pages).stored == chunks
    advance(store, 1000.0)
    for seed in range(20):
        ns.put(tokens_of(seed, CHUNKS), PAGES)
    assert store.pin("long", ns, tokens_of(500, chunks)) == chunks * 16
    assert store.stats()["counters"]["segments_evicted"] > 5
    fill(store, range(100, 200))
    assert restored(ns, tokens_of(500, chunks)) == pages
    assert store.verify().ok


def test_others_may_take_some_of_the_room_first(store: kvfs.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    ns = fill(store, range(80))
    pins = store._shared.services().pins
    make_room, seeds = pins._make_room, iter(range(300, 400))

    def made_and_taken(*args: Any) -> None:
        make_room(*args)
        for seed in (next(seeds), next(seeds)):  # puts that fit need no lock that the pin holds
            ns.put(tokens_of(seed, CHUNKS), PAGES)

    monkeypatch.setattr(pins, "_make_room", made_and_taken)
    assert store.pin("prompt", ns, tokens_of(79, CHUNKS)) == CHUNKS * 16
    assert next(seeds) > 300 and store.stats()["used_bytes"] <= 16 * MIB


def test_no_more_than_half_the_capacity_is_pinned(store: kvfs.Store) -> None:
    fill(store, range(80))
    pinned = 0
    with pytest.raises(NoSpaceError, match="at most half"):
        for seed in range(100, 140):
            store.pin(str(seed), fill(store, range(seed, seed + 1)), tokens_of(seed, CHUNKS))
            pinned += 1
    assert pinned >= 20


def test_a_pin_keeps_its_pages_and_none_after_them(store: kvfs.Store) -> None:
    """The segments of whole prompts were kept for a shared beginning: 35 times the bytes of the pin."""
    ns = fill(store, range(40))
    for seed in range(20):
        assert store.pin(str(seed), ns, tokens_of(seed, CHUNKS)[:16]) == 16
    rows = store._shared.c.index.read(lambda s: s.segments(), 2.0)
    kept = [row for _, row in rows if row.segment_id in store._shared.services().pins.segments()]
    assert len(kept) == 20 and all(row.flags & fmt.FLAG_PINNED for row in kept)
    fill(store, range(100, 250))
    for seed in range(20):
        assert restored(ns, tokens_of(seed, CHUNKS)) == PAGES[: LAYOUT.page_bytes]
    assert store.verify().ok


def test_the_files_of_pins_are_bounded(store: kvfs.Store) -> None:
    ns = fill(store, range(1))
    most = store.settings.pin_files_bytes // fmt.BLOCK
    for number in range(most):
        assert store.pin(f"p{number}", ns, tokens_of(0, CHUNKS))
    with pytest.raises(NoSpaceError, match="files of all pins"):
        store.pin("one more", ns, tokens_of(0, CHUNKS))
    assert store.pin("p0", ns, tokens_of(0, CHUNKS)), "replaces its file"
    assert store.unpin("p1") and store.pin("one more", ns, tokens_of(0, CHUNKS))


def test_a_pin_writes_each_row_once_per_batch_and_reads_neighbours_together(
    store: kvfs.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each record rewrote its row: a pin of one prompt of 62,500 pages took 34 s."""
    store._shared.background.stop()
    ns = fill(store, range(1))
    calls: Counter[str] = Counter()
    for owner, name in ((Session, "put_row"), (Files, "preadv"), (Files, "pwritev")):
        monkeypatch.setattr(owner, name, _counting(calls, name, getattr(owner, name)))
    assert store.pin("p", ns, tokens_of(0, CHUNKS)) == CHUNKS * 16
    assert 0 < calls["put_row"] < CHUNKS // 2, "a batch has a quarter of a segment: four pages"
    assert calls["preadv"] < CHUNKS and calls["pwritev"] < 2 * CHUNKS
    monkeypatch.undo()
    assert restored(ns, tokens_of(0, CHUNKS)) == PAGES and store.verify().ok


def _counting(calls: Counter[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **how: Any) -> Any:
        calls[name] += 1
        return function(*args, **how)

    return call


def test_a_page_that_cannot_be_read_costs_a_copy_no_other(store: kvfs.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours are read together; where that fails, one by one."""
    store._shared.background.stop()
    fill(store, range(1))
    services, index = store._shared.services(), store._shared.c.index
    number, row = next(item for item in index.read(lambda s: s.segments(), 2.0) if item[1].records > 8)
    held = store._shared.c.segments.acquire(number, row.segment_id, index.generation)
    assert held is not None
    scan = scan_segment(held.fd, store._shared.c.files)
    assert scan is not None
    parts = list(scan.parts())
    bad, preadv = parts[5].payload, Files.preadv

    def fail(self: Files, fd: int, buffers: Sequence[Any], offset: int, *more: Any) -> int:
        if offset <= bad < offset + sum(map(len, buffers)):
            raise OSError(errno.EIO, "Input/output error")
        return preadv(self, fd, buffers, offset, *more)

    monkeypatch.setattr(Files, "preadv", fail)
    target = SegmentClass(flags=fmt.FLAG_CARRIED, evictor=True)
    copied = services.evictor.relocator.copy(target, number, held, [e.seq for e in parts])
    assert copied == len(parts) - 1 and store.stats()["counters"]["read_errors"] == 1


@pytest.mark.parametrize("name", ["", "x" * 129, "a\nb", "\u00e4", 5, None])
def test_a_name_that_no_pin_can_have_is_refused(store: kvfs.Store, name: Any) -> None:
    ns = fill(store, range(1))
    for call in (lambda: store.pin(name, ns, tokens_of(0, CHUNKS)), lambda: store.unpin(name)):
        with pytest.raises(kvfs.ConfigError, match="pass 1 to 128 printable ASCII characters"):
            call()
    assert store.pins() == []
