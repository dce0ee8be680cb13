"""What an eviction knows of segments: sizes, ages and lives of their records, and when they are read again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvfs
from kvfs.eviction import survey as survey_module
from kvfs.eviction.survey import Survey
from kvfs.format import segment as fmt
from kvfs.index.tables import DROPPED, SegmentRow
from kvfs.segments.scan import scan_segment
from kvfs.system.files import Files
from kvfs.testing import FakeClock
from tests.stores import TINY_BYTES, counted, seeded, segment_files, tiny, tokens_of

SECOND = 1_000_000


class Clock(FakeClock, Files):
    """The real file system under a clock that is set by hand."""


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The bound of each read of a segment's tables."""
    made, scan = list[int | None](), scan_segment

    def counting(fd: int, files: Files, *, records_max: int | None = None) -> Any:
        made.append(records_max)
        return scan(fd, files, records_max=records_max)

    monkeypatch.setattr(survey_module, "scan_segment", counting)
    return made


@pytest.fixture
def store(memory_path: Path, reads: list[int | None]) -> Iterator[kvfs.Store]:
    with kvfs.open(memory_path / "store", capacity="16MiB", files=Clock()) as made:
        made._shared.background.stop()
        put(made, 1, 3)
        yield made


def put(store: kvfs.Store, seed: int, pages: int, **how: Any) -> None:
    ns = store.namespace("m", tiny(), "1")
    assert ns.put(tokens_of(seed, pages), seeded(seed, pages * TINY_BYTES), **how).stored == pages


def clock(store: kvfs.Store) -> Clock:
    files = store._shared.c.files
    assert isinstance(files, Clock)
    return files


def rows(store: kvfs.Store) -> list[tuple[int, SegmentRow]]:
    return store._shared.c.index.read(lambda s: s.segments(), 5.0)


def test_a_page_takes_its_block_and_its_share_of_tables(store: kvfs.Store) -> None:
    """Three pages of a block each; a block of the descriptor and one of leaf tables."""
    survey, now = Survey(store._shared.c), clock(store).now_us()
    (found,), at = survey.summaries(rows(store), {1})
    ((number, row),) = rows(store)
    assert at == now and (found.number, found.nbytes, found.evictable, found.held) == (1, row.allocated, True, False)
    assert list(found.fragments.nbytes) == [3 * (4096 + 2 * 4096 // 3)] and number == 1
    assert (list(found.fragments.first), list(found.fragments.last)) == ([0], [2])
    assert survey.seqs(row.segment_id, [0, 2]) == [1, 3], "record 0 is the descriptor"
    assert not survey.summaries(rows(store), {2})[0][0].evictable
    dropped = row._replace(state=DROPPED)
    assert survey.summaries([(1, dropped)], {1})[0] == []


def test_tables_are_read_once_and_again_when_there_are_more_records(store: kvfs.Store, reads: list[int | None]) -> None:
    survey = Survey(store._shared.c)
    first = survey.summaries(rows(store), set())[0][0].fragments
    assert survey.summaries(rows(store), set())[0][0].fragments is first and reads == [4]
    put(store, 2, 2)
    (grown,) = survey.summaries(rows(store), set())[0]
    assert reads == [4, 6] and sum(len(grown.fragments.ordinals_of(i)) for i in range(len(grown.fragments.stamps))) == 5
    survey.forget(rows(store)[0][1].segment_id)
    survey.forget(b"unknown")
    survey.summaries(rows(store), set())
    assert reads == [4, 6, 6]


def test_fragments_are_grouped_again_after_a_use(store: kvfs.Store, reads: list[int | None]) -> None:
    survey = Survey(store._shared.c)
    first = survey.summaries(rows(store), set())[0][0].fragments
    clock(store).advance(100.0)
    times, now = store._shared.c.access_times, clock(store).now_us()
    times.stamp(rows(store)[0][1].segment_id, 1, [now, now])
    times.flush()
    used = survey.summaries(rows(store), set())[0][0].fragments
    assert used is not first and reads == [4]
    assert len(used.stamps) == 2 and used.stamps[1] - used.stamps[0] == 100 * SECOND
    assert [list(used.ordinals_of(i)) for i in range(2)] == [[2], [0, 1]]
    each = 4096 + 2 * 4096 // 3
    assert list(used.weights) == pytest.approx([each, 2 * each * (1 + 100 / 50) ** 0.5]), "those lived 100 s"


def test_records_of_copies_have_a_life_of_150_seconds_at_least(store: kvfs.Store) -> None:
    ((number, row),) = rows(store)
    carried = row._replace(flags=row.flags | fmt.FLAG_CARRIED)
    (found,) = Survey(store._shared.c).summaries([(number, carried)], set())[0]
    assert list(found.fragments.weights) == pytest.approx([2.0 * found.fragments.nbytes[0]])


def test_records_that_have_expired_are_dead(memory_path: Path, reads: list[int | None]) -> None:
    quotas = {"m": kvfs.Quota(ttl_seconds=50)}
    with kvfs.open(memory_path / "store", capacity="16MiB", files=Clock(), quotas=quotas) as store:
        store._shared.background.stop()
        put(store, 1, 3)
        survey, ((_, row),) = Survey(store._shared.c), rows(store)
        first = survey.summaries(rows(store), set())[0][0].fragments
        assert len(first.ordinals) == 3 and row.expires
        left = row.expires - clock(store).now_us() / SECOND
        clock(store).advance(left - 1.5)
        assert survey.summaries(rows(store), set())[0][0].fragments is first
        clock(store).advance(1.5)
        assert clock(store).now_us() // SECOND == row.expires
        assert len(survey.summaries(rows(store), set())[0][0].fragments.ordinals) == 0
        assert len(reads) == 1


def test_purged_records_are_dead(store: kvfs.Store, reads: list[int | None], monkeypatch: pytest.MonkeyPatch) -> None:
    survey, ((_, row),) = Survey(store._shared.c), rows(store)
    assert len(survey.summaries(rows(store), set())[0][0].fragments.ordinals) == 3
    mark = SimpleNamespace(covers=lambda entry: entry.seq == 2)
    marks = SimpleNamespace(ids=lambda: {row.segment_id}, read=lambda segment_id: mark)
    names = ("files", "segments", "index", "counters", "access_times")
    context: Any = SimpleNamespace(**{name: getattr(store._shared.c, name) for name in names}, marks=marks)
    survey._c = context
    assert list(survey.summaries(rows(store), set())[0][0].fragments.ordinals) == [0, 2]
    survey.summaries(rows(store), set())
    assert reads == [4, 4], "once more, for the mark"


def test_a_table_that_cannot_be_read_is_empty_and_tried_again(
    store: kvfs.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise OSError(5, "broken")

    survey = Survey(store._shared.c)
    with monkeypatch.context() as patch, counted(store) as moved:
        patch.setattr(survey_module, "scan_segment", broken)
        assert len(survey.summaries(rows(store), set())[0][0].fragments.stamps) == 0
        assert moved("read_errors") == 1
    assert len(survey.summaries(rows(store), set())[0][0].fragments.stamps) == 1
    ((number, row),) = rows(store)
    segment_files(Path(store.path))[0].unlink()
    other = row._replace(segment_id=b"x" * 16)
    assert len(survey.summaries([(number, other)], set())[0][0].fragments.stamps) == 0


def test_what_is_known_of_segments_that_are_gone_is_discarded(store: kvfs.Store) -> None:
    survey = Survey(store._shared.c)
    survey.summaries(rows(store), set())
    ((_, row),) = rows(store)
    for n in range(65):
        survey._tables[bytes([n]) * 16] = survey._tables[row.segment_id]
    survey.summaries(rows(store), set())
    assert len(survey._tables) == 66
    survey._tables[b"y" * 16] = survey._tables[row.segment_id]
    survey._uses[b"y" * 16] = survey._uses[row.segment_id]
    survey.summaries(rows(store), set())
    assert list(survey._tables) == [row.segment_id] == list(survey._uses)
