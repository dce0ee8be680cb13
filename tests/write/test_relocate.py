"""Copies of records: how many, in which batches, and what a page that is damaged, purged or unknown costs."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvfs
from kvfs.format import segment as fmt
from kvfs.index import ledger
from kvfs.index.ledger import NeedSpaceError
from kvfs.segments.open_segments import OpenSegment
from kvfs.write import relocate
from kvfs.write.active_segments import Declined, SegmentClass
from kvfs.write.relocate import Relocator, _neighbours
from tests.stores import TINY_BYTES, counted, restored, scanned, seeded, tiny, tokens_of

PAGES = 10
TARGET = SegmentClass(bytes(8) + b"carried\0", fmt.FLAG_CARRIED, evictor=True)


@pytest.fixture
def store(memory_path: Path) -> Iterator[kvfs.Store]:
    """A sealed segment with the pages of two namespaces."""
    with kvfs.open(memory_path / "store", capacity="16MiB") as made:
        made._shared.background.stop()
        for name in ("one", "two"):
            made.namespace(name, tiny(), "1").put(tokens_of(1, PAGES), seeded(1, PAGES * TINY_BYTES))
        made._shared.services().active.finish_all()
        yield made


@pytest.fixture
def batches(store: kvfs.Store, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Records of each batch that the appender was given."""
    appender, made = store._shared.services().appender, list[list[int]]()
    original = appender.relocate

    def noting(job: Any) -> int:
        made.append([move.seq for move in job.moves])
        return original(job)

    monkeypatch.setattr(appender, "relocate", noting)
    return made


def relocator(store: kvfs.Store) -> Relocator:
    return store._shared.services().evictor.relocator


def source(store: kvfs.Store) -> Path:
    """The file of segment 1."""
    row = store._shared.c.index.read(lambda s: s.segment(1), 5.0)
    assert row is not None
    return Path(store.path) / "segments" / f"{row.segment_id.hex()}.kvs"


def held(store: kvfs.Store) -> OpenSegment:
    file = source(store)
    found = store._shared.c.segments.acquire(1, bytes.fromhex(file.stem), store._shared.c.index.generation)
    assert found is not None
    return found


def damage(store: kvfs.Store, *seqs: int) -> None:
    file = source(store)
    data = bytearray(file.read_bytes())
    for entry in scanned(file).entries:
        if entry.seq in seqs:
            data[entry.payload] ^= 1
    file.write_bytes(data)


def copy(store: kvfs.Store, seqs: list[int], **how: Any) -> int:
    return relocator(store).copy(TARGET, 1, held(store), seqs, **how)


def test_each_namespace_is_a_batch_of_its_own(store: kvfs.Store, batches: list[list[int]]) -> None:
    """Records 0 and 11 are the descriptors."""
    assert copy(store, list(range(40))) == 2 * PAGES
    assert batches == [list(range(1, 11)), list(range(12, 22))]
    for name in ("one", "two"):
        ns = store.namespace(name, tiny(), "1")
        assert restored(ns, tokens_of(1, PAGES)) == seeded(1, PAGES * TINY_BYTES)
    with counted(store) as moved:
        assert copy(store, [1, 2, 3]) == 0, "the index names their copies"
        assert moved("read_errors") == 0
    assert copy(store, []) == 0 and copy(store, [0, 11, 999]) == 0


@pytest.mark.parametrize(
    ("records", "nbytes", "sizes"), [(4, 1 << 20, [4, 4, 2]), (256, 12288, [3, 3, 3, 1]), (256, 1, [1] * 10)]
)
def test_batches_are_bounded(
    store: kvfs.Store, batches: list[list[int]], records: int, nbytes: int, sizes: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(relocate, "RECORDS", records)
    monkeypatch.setattr(relocate, "BATCH_BYTES", nbytes)
    assert copy(store, list(range(1, 11))) == PAGES
    assert [len(batch) for batch in batches] == sizes


def test_a_batch_has_a_quarter_of_a_segment_at_most(store: kvfs.Store, batches: list[list[int]]) -> None:
    made = relocator(store)
    settings = made._c.settings
    assert settings.segment_bytes // 4 == 16 * 4096
    assert copy(store, list(range(1, 11))) == PAGES and len(batches) == 1


def test_a_damaged_page_costs_no_other(store: kvfs.Store) -> None:
    damage(store, 3, 5)
    with counted(store) as moved:
        assert copy(store, list(range(1, 11))) == PAGES - 2
        assert moved("pages_corrupt") == 2


@pytest.mark.parametrize("recode", [None, fmt.CODEC_ZSTD])
def test_pages_of_a_damaged_descriptor_are_not_copied(store: kvfs.Store, recode: int | None) -> None:
    damage(store, 0)
    if recode is None:
        assert copy(store, list(range(22))) == PAGES, "those of the other namespace"
        return
    with pytest.raises(Declined, match="unreadable"):
        copy(store, list(range(22)), recode=recode)


def test_a_segment_without_a_header_is_not_copied(store: kvfs.Store) -> None:
    opened = held(store)
    source(store).write_bytes(b"")
    assert relocator(store).copy(TARGET, 1, opened, [1, 2]) == 0
    with pytest.raises(Declined, match="unreadable"):
        relocator(store).copy(TARGET, 1, opened, [1, 2], recode=fmt.CODEC_ZSTD)


@pytest.mark.parametrize(("last", "fine"), [(21, True), (22, False)])
def test_a_recoding_needs_all_of_its_records(store: kvfs.Store, last: int, fine: bool) -> None:
    if fine:
        assert copy(store, [1, last], recode=fmt.CODEC_ZSTD) == 2
        return
    with pytest.raises(Declined, match="unreadable"):
        copy(store, [1, last], recode=fmt.CODEC_ZSTD)


def test_purged_records_are_not_copied(store: kvfs.Store) -> None:
    marks = store._shared.c.marks
    opened = held(store)
    marks.write(fmt.PurgeMark(opened.segment_id, 0, 1, bytes([0b0001_1000, 0, 0])))
    assert copy(store, list(range(1, 11))) == PAGES - 2, "3 and 4"
    with pytest.raises(Declined, match="a mark"):
        copy(store, list(range(1, 11)), recode=fmt.CODEC_ZSTD)


@pytest.mark.parametrize("recode", [None, fmt.CODEC_ZSTD])
def test_after_an_error_neighbours_are_read_one_by_one(
    store: kvfs.Store, recode: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, segments = held(store), store._shared.c.segments
    bad = scanned(source(store)).entries[4].payload
    read, lengths = segments.read, list[int]()

    def failing(one: OpenSegment, target: memoryview, offset: int, *, direct: bool = False) -> None:
        lengths.append(len(target))
        if offset <= bad < offset + len(target):
            raise OSError(errno.EIO, "broken")
        read(one, target, offset, direct=direct)

    monkeypatch.setattr(segments, "read", failing)
    with counted(store) as moved:
        if recode is None:
            assert relocator(store).copy(TARGET, 1, opened, list(range(1, 11))) == PAGES - 1
        else:
            with pytest.raises(Declined, match="io"):
                relocator(store).copy(TARGET, 1, opened, list(range(1, 11)), recode=recode)
        assert moved("read_errors") == 1
    ten = 9 * 4096 + TINY_BYTES
    assert lengths == [ten] + [TINY_BYTES] * (10 if recode is None else 4)


def test_neighbours_follow_one_another_up_to_their_padding() -> None:
    def entry(payload: int, stored: int) -> Any:
        return SimpleNamespace(payload=payload, stored_bytes=stored)

    one, two, three, four = entry(4096, 1), entry(8192, 4096), entry(12288, 5000), entry(20480, 1)
    gap, back = entry(28672, 1), entry(4096, 1)
    assert _neighbours([one, two, three, four]) == [[one, two, three, four]]
    assert _neighbours([one, three]) == [[one], [three]] and _neighbours([]) == []
    assert _neighbours([four, gap, back]) == [[four], [gap], [back]]


def test_a_match_is_pinned_whole_or_declined(store: kvfs.Store) -> None:
    ns, rooms = store.namespace("one", tiny(), "1"), list[int]()
    target = SegmentClass(b"p" * 16, fmt.FLAG_PINNED)
    with ns.match(tokens_of(1, PAGES)) as match:
        assert relocator(store).copy_match(target, match, {7}, rooms.append) == 0 and rooms == []
        assert relocator(store).copy_match(target, match, {1}, rooms.append) == PAGES and rooms == [PAGES * 4096]
    two = store.namespace("two", tiny(), "1")
    with two.match(tokens_of(1, PAGES)) as match:
        damage(store, 13)
        with pytest.raises(Declined, match="some pages changed meanwhile or could not be read"):
            relocator(store).copy_match(target, match, {1}, rooms.append)


def test_records_whose_descriptor_cannot_be_read_are_not_copied(
    store: kvfs.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> bytes:
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patch, counted(store) as moved:
        patch.setattr(relocate, "read_descriptor", fail)
        assert copy(store, [1, 2, 12]) == 0 and moved("read_errors") == 2, "once for each namespace"
        with pytest.raises(Declined, match="io"):
            copy(store, [1, 2], recode=fmt.CODEC_ZSTD)
    assert copy(store, [1, 2]) == 2


@pytest.mark.parametrize("seqs", [[1, 2], [1, 2, 3]])
def test_copies_keep_the_times_at_which_their_pages_were_used(store: kvfs.Store, seqs: list[int]) -> None:
    """The descriptor of their namespace comes first: the last record has an even number, or an odd one."""
    c = store._shared.c
    opened = held(store)
    c.access_times.stamp(opened.segment_id, 1, [1001, 1002, 1003])
    assert copy(store, seqs) == len(seqs)
    rows = dict(c.index.read(lambda s: s.segments(), 5.0))
    (row,) = (row for row in rows.values() if row.flags & fmt.FLAG_CARRIED)
    assert list(c.access_times.raw(row.segment_id)) == [0, *(1000 + seq for seq in seqs)]


def test_copies_are_charged_before_they_are_written_and_declined_where_there_is_no_room(
    store: kvfs.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    c, opened = store._shared.c, held(store)
    assert copy(store, [1]) == 1
    before = {p.name: p.stat().st_size for p in (Path(store.path) / "segments").iterdir()}
    asked: list[tuple[int, int]] = []
    reserve = ledger.reserve

    def noting(session: Any, number: int, row: Any, allocated: int, records: int, limits: Any) -> None:
        asked.append((allocated, records))
        reserve(session, number, row, allocated, records, limits)

    monkeypatch.setattr(ledger, "reserve", noting)
    assert relocator(store).copy(TARGET, 1, opened, list(range(2, 11))) == PAGES - 1
    (row,) = (row for _, row in c.index.read(lambda s: s.segments(), 5.0) if row.flags & fmt.FLAG_CARRIED)
    ((allocated, records),) = asked
    size = (Path(store.path) / "segments" / f"{row.segment_id.hex()}.kvs").stat().st_size
    assert size == allocated >= before[f"{row.segment_id.hex()}.kvs"]
    assert records >= row.records == 1 + PAGES and row.allocated == ledger.charge(allocated, records)

    def full(*_: Any) -> None:
        raise NeedSpaceError(1)

    monkeypatch.setattr(ledger, "reserve", full)
    for recode in (None, fmt.CODEC_ZSTD):
        with pytest.raises(Declined, match="space"):
            relocator(store).copy(TARGET, 1, opened, [12, 13], recode=recode)
    assert restored(store.namespace("two", tiny(), "1"), tokens_of(1, PAGES)) == seeded(1, PAGES * TINY_BYTES)
