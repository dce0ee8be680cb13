"""What a plan of a recompression says of each segment, and when a run ends."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.errors import IndexUnavailableError, StoreLockedError
from kvfs.format import codec
from kvfs.format import segment as fmt
from kvfs.index.tables import ACTIVE, SegmentRow
from kvfs.maintenance import recompress
from kvfs.maintenance.recompress import Recompressor, RecompressPlan, RecompressStep, _class_of
from kvfs.system.files import Files
from kvfs.testing import FakeClock
from kvfs.write.active_segments import Declined, SegmentClass
from tests.format.test_codec import LAYOUT, PAGE, PAGES
from tests.stores import counted, tokens_of


class Clock(FakeClock, Files):
    """The real file system under a clock that is set by hand."""


@pytest.fixture
def store(memory_path: Path) -> Iterator[kvfs.Store]:
    """Three sealed segments of a prompt each, the last one used last, and an active one."""
    files = Clock()
    with kvfs.open(memory_path / "store", capacity="64MiB", segment_bytes="512KiB", files=files) as made:
        made._shared.background.stop()
        ns = made.namespace("model", LAYOUT, "1")
        for prompt in range(4):
            assert ns.put(tokens_of(prompt, 6), PAGES).stored == 6
            if prompt < 3:
                made._shared.services().active.finish_all()
            files.advance(100.0)
        yield made


@pytest.fixture
def recompressor(store: kvfs.Store) -> Recompressor:
    services = store._shared.services()
    return Recompressor(store._shared.c, services.evictor, services.active)


def rows(store: kvfs.Store) -> dict[int, SegmentRow]:
    return dict(store._shared.c.index.read(lambda s: s.segments(), 5.0))


def clock(store: kvfs.Store) -> Clock:
    files = store._shared.c.files
    assert isinstance(files, Clock)
    return files


ZSTD = fmt.CODEC_ZSTD


def test_a_plan_names_sealed_segments_the_longest_unused_first(store: kvfs.Store, recompressor: Recompressor) -> None:
    now = clock(store).now_us()
    plan = recompressor.plan(ZSTD, 0.0)
    assert (plan.codec, plan.idle_seconds, plan.left) == (ZSTD, 0.0, {})
    assert [step.segment for step in plan.steps] == [1, 2, 3], "not the active one"
    for n, step in enumerate(plan.steps):
        assert step.segment_id == rows(store)[n + 1].segment_id and step.last_used_us == now - (4 - n) * 100_000_000
        middle = PAGES[3 * PAGE : 4 * PAGE]
        share = len(codec.encode(middle, ZSTD, LAYOUT.groups[0].cell.element_bytes)[1]) / PAGE
        assert (step.pages, step.raw_bytes) == (6, 6 * PAGE) and step.saves_bytes == int(6 * PAGE * (1 - share))
    assert plan.saves_bytes == sum(step.saves_bytes for step in plan.steps)
    with store.namespace("model", LAYOUT, "1").match(tokens_of(0, 6)) as match:
        out = bytearray(match.nbytes)
        assert store.namespace("model", LAYOUT, "1").get(match, out) == 6
    clock(store).advance(1.0)
    assert [step.segment for step in recompressor.plan(ZSTD, 0.0).steps] == [2, 3, 1], "it was used"


@pytest.mark.parametrize(("idle", "segments"), [(0.0, 3), (199.0, 3), (200.0, 3), (201.0, 2), (400.0, 1), (401.0, 0)])
def test_a_segment_is_cold_if_it_was_unused_for_so_long(recompressor: Recompressor, idle: float, segments: int) -> None:
    plan = recompressor.plan(ZSTD, idle)
    assert len(plan.steps) == segments
    assert plan.left == ({"used lately": 3 - segments} if segments < 3 else {})


def test_what_is_not_looked_at_in_time_is_left(
    store: kvfs.Store, recompressor: Recompressor, monkeypatch: pytest.MonkeyPatch
) -> None:
    examine = recompressor._examine

    def slow(*args: Any) -> RecompressStep | str:
        clock(store).advance(1.0)
        return examine(*args)

    monkeypatch.setattr(recompressor, "_examine", slow)
    for seconds, looked in ((0.0, 0), (1.0, 1), (1.5, 2), (3.5, 3)):
        plan = recompressor.plan(ZSTD, 0.0, seconds)
        assert len(plan.steps) == looked
        assert plan.left == ({"not looked at": 3 - looked} if looked < 3 else {})


def test_each_segment_that_stays_has_a_reason(
    store: kvfs.Store, recompressor: Recompressor, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = rows(store)[1]
    c, victims = store._shared.c, store._shared.services().evictor.victims

    def reason(change: Callable[[pytest.MonkeyPatch], object], **changes: Any) -> str | RecompressStep:
        with monkeypatch.context() as patch:
            change(patch)
            return recompressor._examine(1, row._replace(**changes), ZSTD, 0.0)

    assert isinstance(reason(lambda patch: None), RecompressStep)
    assert reason(lambda patch: patch.setattr(victims, "is_held", lambda row: True)) == "in use"
    assert reason(lambda patch: patch.setattr(c.segments, "acquire", lambda *_: None)) == "gone"
    assert reason(lambda patch: None, records=row.records + 1) == "unreadable"
    assert reason(lambda patch: patch.setattr(recompress, "scan_segment", lambda *_: None)) == "unreadable"
    assert reason(lambda patch: patch.setattr(recompress, "_namespaces", lambda *_: None)) == "unreadable"
    assert reason(lambda patch: patch.setattr(codec, "NAMES", {})) == "of a codec that this version does not know"
    assert reason(lambda patch: patch.setattr(recompressor, "_sample", lambda *_: 1.0)) == "would not shrink"
    for flags, expected in ((fmt.PURGE_PENDING, "being purged"), (0, "")):
        c.marks.write(fmt.PurgeMark(row.segment_id, flags, 1, b"\0"))
        found = reason(lambda patch: None)
        assert found == expected or (not expected and isinstance(found, RecompressStep))
    c.marks.forget(row.segment_id)

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "broken")

    with counted(store) as moved:
        assert reason(lambda patch: patch.setattr(recompress, "scan_segment", fail)) == "unreadable"
        assert moved("read_errors") == 1
    assert recompressor.run(ZSTD, 0.0).segments == 3
    last = max(n for n, one in rows(store).items() if one.state != ACTIVE)
    assert recompressor._examine(last, rows(store)[last], ZSTD, 0.0) == "encoded"


@pytest.mark.parametrize(("share", "worth"), [(0.89, True), (0.5, True), (0.999, False)])
def test_a_segment_is_worth_it_if_a_tenth_of_it_is_saved(
    store: kvfs.Store, recompressor: Recompressor, monkeypatch: pytest.MonkeyPatch, share: float, worth: bool
) -> None:
    monkeypatch.setattr(recompressor, "_sample", lambda *_: share)
    row = rows(store)[1]._replace(allocated=6 * PAGE)
    found = recompressor._examine(1, row, ZSTD, 0.0)
    if worth:
        assert isinstance(found, RecompressStep) and found.saves_bytes == int(6 * PAGE * (1 - share))
    else:
        assert found == "would not shrink"


def test_a_run_tells_its_progress_and_counts(store: kvfs.Store, recompressor: Recompressor) -> None:
    seen: list[tuple[int, int]] = []
    with counted(store) as moved:
        done = recompressor.run(ZSTD, 0.0, progress=lambda at, total: seen.append((at, total)))
        assert moved("segments_recompressed") == done.segments == 3
    assert seen == [(0, 3), (1, 3), (2, 3)] and (done.pages, done.failed, done.stopped) == (18, 0, "")
    assert not any(row.flags & fmt.FLAG_PINNED for row in rows(store).values())


@pytest.mark.parametrize(
    ("errors", "segments", "failed", "stopped"),
    [
        ([OSError(errno.EIO, "x")] * 2, 1, 2, ""),
        ([OSError(errno.EIO, "x")] * 3, 0, 3, "io"),
        ([Declined("unreadable")] * 3, 0, 3, "unreadable"),
        ([Declined("space")], 0, 0, "space"),
        ([OSError(errno.EIO, "x"), None, OSError(errno.EIO, "x")], 1, 2, ""),
        ([IndexUnavailableError("timeout")], 0, 0, "io"),
    ],
)
def test_a_run_ends_where_it_makes_no_sense_to_go_on(
    recompressor: Recompressor, monkeypatch: pytest.MonkeyPatch, errors: list[Exception | None], segments: int,
    failed: int, stopped: str,
) -> None:  # fmt: skip
    left, rewrite = iter(errors), recompressor._rewrite

    def sometimes(*args: Any) -> None:
        if (error := next(left, None)) is not None:
            raise error
        rewrite(*args)

    monkeypatch.setattr(recompressor, "_rewrite", sometimes)
    done = recompressor.run(ZSTD, 0.0)
    assert (done.segments, done.failed, done.stopped) == (segments, failed, stopped)


def test_a_run_ends_in_time(store: kvfs.Store, recompressor: Recompressor, monkeypatch: pytest.MonkeyPatch) -> None:
    rewrite = recompressor._rewrite

    def slow(*args: Any) -> None:
        rewrite(*args)
        clock(store).advance(10.0)

    monkeypatch.setattr(recompressor, "_rewrite", slow)
    done = recompressor.run(ZSTD, 0.0, 20.0)
    assert (done.segments, done.stopped) == (2, "time")
    assert recompressor.run(ZSTD, 0.0, 0.0).stopped == "time"


def test_a_lock_that_is_lost_meanwhile_ends_the_run(
    store: kvfs.Store, recompressor: Recompressor, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = recompressor._examine(1, rows(store)[1], ZSTD, 0.0)
    assert isinstance(step, RecompressStep)
    monkeypatch.setattr(recompress, "LOCK_SECONDS", 0.0)
    with store._shared.services().evictor.lock.hold(0.0) as held:
        assert held
        for segments, error in ((0, StoreLockedError), (1, Declined)):
            with pytest.raises(error):
                recompressor._rewrite(step, ZSTD, recompress.Recompressed(segments=segments), set())


def test_a_segment_that_changed_since_it_was_examined_is_left(store: kvfs.Store, recompressor: Recompressor) -> None:
    found = recompressor._examine(1, rows(store)[1], ZSTD, 0.0)
    assert isinstance(found, RecompressStep)
    report, used = recompress.Recompressed(), set[SegmentClass]()
    for step in (found._replace(segment=99), found._replace(segment=4), found._replace(segment_id=b"x" * 16)):
        recompressor._rewrite(step, ZSTD, report, used)
    recompressor._evictor.victims.pinned = lambda: {found.segment_id}
    recompressor._rewrite(found, ZSTD, report, used)
    assert (report.segments, report.pages, used) == (0, 0, set()) and set(rows(store)) == {1, 2, 3, 4}


def test_copies_have_the_class_of_their_source_but_no_pin() -> None:
    row = SegmentRow(b"i" * 16, bytes(16), b"quota123lifetime", 2, 0, 1, 7, 4096, 0, 0, 0)
    assert _class_of(row) == SegmentClass(b"quota123lifetime", 0, evictor=True)
    carried = row._replace(flags=fmt.FLAG_CARRIED | fmt.FLAG_DIRECT)
    assert _class_of(carried) == SegmentClass(b"quota123lifetime", fmt.FLAG_CARRIED, evictor=True)
    pinned = row._replace(flags=fmt.FLAG_PINNED)
    assert _class_of(pinned) == SegmentClass(b"quota123" + bytes(8), 0, evictor=True)
    assert RecompressPlan(1, 0.0).saves_bytes == 0
