"""The steps of an eviction: when room is made, when it ends, what is told to the writer, and what is counted."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.errors import IndexUnavailableError, StoreLockedError
from kvfs.eviction import reclaimer as reclaimer_module
from kvfs.eviction.evictor import Evictor
from kvfs.eviction.reclaimer import Reclaimer, forget_namespaces, index_is_full
from kvfs.eviction.victims import Victim
from kvfs.format.segment import PURGE_ALL, PurgeMark
from kvfs.index import ledger
from kvfs.index.tables import ACTIVE, DROPPED, SEALED, SegmentRow
from kvfs.system.files import Files
from kvfs.testing import FakeClock
from kvfs.write.active_segments import Declined
from tests.stores import TINY_BYTES, counted, seeded, segment_files, tiny, tokens_of

PAGES = 20  # of a prompt, which is a segment here


class Clock(FakeClock, Files):
    """The real file system under a clock that is set by hand; a sleep moves it."""

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)


@pytest.fixture
def store(memory_path: Path) -> Iterator[kvfs.Store]:
    with kvfs.open(memory_path / "store", capacity="16MiB", files=Clock()) as made:
        made._shared.background.stop()
        fill(made, 6)
        yield made


def fill(store: kvfs.Store, prompts: int) -> None:
    ns = store.namespace("m", tiny(), "1")
    for seed in range(prompts):
        assert ns.put(tokens_of(seed, PAGES), seeded(seed, PAGES * TINY_BYTES)).stored == PAGES
        store._shared.services().active.finish_all()
        clock(store).advance(1.0)


@pytest.fixture
def evictor(store: kvfs.Store) -> Evictor:
    return store._shared.services().evictor


@pytest.fixture
def reclaimer(evictor: Evictor) -> Reclaimer:
    return evictor.reclaimer


def clock(store: kvfs.Store) -> Clock:
    files = store._shared.c.files
    assert isinstance(files, Clock)
    return files


def rows(store: kvfs.Store) -> dict[int, SegmentRow]:
    return dict(store._shared.c.index.read(lambda s: s.segments(), 5.0))


def used(store: kvfs.Store) -> int:
    return store._shared.c.index.read(lambda s: s.ledger().used, 5.0)


def hold(row: SegmentRow, store: kvfs.Store) -> int:
    """A descriptor with the lock of a reader in another process."""
    import fcntl

    fd = os.open(Path(store.path) / "segments" / f"{row.segment_id.hex()}.kvs", os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    return fd


def test_room_is_made_segment_by_segment_until_there_is_enough(store: kvfs.Store, evictor: Evictor) -> None:
    each = rows(store)[1].allocated
    for missing, evicted in ((1, 1), (each, 1), (each + 1, 2)):
        with counted(store) as moved:
            before = used(store)
            assert evictor.make_room(missing, clock(store).monotonic() + 5.0)
            assert used(store) == before - evicted * each
            assert (moved("segments_evicted"), moved("segments_reclaimed")) == (evicted, evicted)
    assert list(rows(store)) == [5, 6], "the oldest went first"
    assert evictor.make_room(100 * each, clock(store).monotonic() + 5.0), "some of it was freed"
    assert rows(store) == {} and not segment_files(Path(store.path))
    before_sleep = clock(store).monotonic()
    assert evictor.make_room(1, before_sleep + 5.0), (
        "a writer of the store tries again: a reader may release the segment"
    )
    assert clock(store).monotonic() == pytest.approx(before_sleep + 0.02)
    for how in ({"disk_full": True}, {"owner": b"chatchat"}):
        assert not evictor.make_room(1, clock(store).monotonic() + 5.0, **how), "there is nothing to wait for"
    assert clock(store).monotonic() == pytest.approx(before_sleep + 0.02)


def test_no_segment_is_evicted_behind_the_deadline(store: kvfs.Store, evictor: Evictor) -> None:
    assert evictor.make_room(1, clock(store).monotonic())
    assert len(rows(store)) == 6


def test_what_readers_hold_is_waited_for(store: kvfs.Store, evictor: Evictor) -> None:
    held = [hold(row, store) for row in rows(store).values()]
    try:
        before = clock(store).monotonic()
        assert evictor.make_room(1, before + 5.0)
        assert clock(store).monotonic() == pytest.approx(before + 0.02)
        assert [row.state for row in rows(store).values()] == [DROPPED] + [SEALED] * 5, "one at a time"
        assert evictor.make_room(1, before + 5.0, disk_full=True)
        assert [row.state for row in rows(store).values()].count(DROPPED) == 1
    finally:
        for fd in held:
            os.close(fd)
    each = rows(store)[1].allocated
    with counted(store) as moved:
        assert evictor.make_room(each, clock(store).monotonic() + 5.0)
        assert (moved("segments_reclaimed"), moved("segments_evicted")) == (1, 0), "what was dropped is enough"
    with counted(store) as moved:
        evictor._c.index.write(lambda s: ledger.mark_dropped(s, 2, evictor._c.owner), 5.0)
        assert evictor.make_room(each, clock(store).monotonic() + 5.0, disk_full=True)
        assert (moved("segments_reclaimed"), moved("segments_evicted")) == (2, 1), "only what is evicted now counts"


def test_a_lock_that_another_evictor_keeps_costs_less_the_next_time(store: kvfs.Store, evictor: Evictor) -> None:
    with Evictor(evictor._c).lock.hold(clock(store).monotonic()) as held:
        assert held
        before = clock(store).monotonic()
        assert not evictor.make_room(1, before + 1.0)
        assert clock(store).monotonic() == pytest.approx(before + 1.0, abs=0.003)
        before = clock(store).monotonic()
        assert not evictor.make_room(1, before + 1.0)
        assert clock(store).monotonic() == pytest.approx(before + 0.05, abs=0.003)
        with pytest.raises(StoreLockedError, match="another process evicts or purges: try again later"):
            evictor.collect(0, 0.0)
        evictor.background()
        evictor.charge_unknown()
    before = clock(store).monotonic()
    assert evictor.make_room(1, before + 1.0) and not evictor._timed_out and len(rows(store)) == 5


@pytest.mark.parametrize(
    ("error", "again"), [(OSError(errno.EIO, "broken"), False), (IndexUnavailableError("slow"), True)]
)
def test_an_error_while_room_is_made_is_counted(
    store: kvfs.Store, evictor: Evictor, monkeypatch: pytest.MonkeyPatch, error: Exception, again: bool
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(evictor, "_evict_one", fail)
    before = clock(store).monotonic()
    with counted(store) as moved:
        assert evictor.make_room(1, before + 1.0) is again
        assert moved("evict_errors") == 1
    assert clock(store).monotonic() == pytest.approx(before + 0.02 * again)


def test_collecting_ends_at_the_target_and_says_what_it_did(store: kvfs.Store, evictor: Evictor) -> None:
    each, before = rows(store)[1].allocated, used(store)
    seen: list[tuple[int, int]] = []
    assert evictor.collect(None) == {"segments_dropped": 0, "bytes_before": before, "bytes_after": before}
    done = evictor.collect(3 * each, progress=lambda *at: seen.append(at))
    assert done == {"segments_dropped": 3, "bytes_before": before, "bytes_after": 3 * each}
    assert seen == [(n * each, 3 * each) for n in range(3)]
    assert evictor.collect(0, 0.0) == {"segments_dropped": 0, "bytes_before": 3 * each, "bytes_after": 3 * each}
    assert evictor.collect(0)["segments_dropped"] == 3
    assert evictor.collect(0)["segments_dropped"] == 0


@pytest.mark.parametrize(("seconds", "patience"), [(None, 30.0), (0.0, 0.5), (5.0, 5.0), (100.0, 30.0)])
def test_how_long_a_collection_waits_for_other_evictors(
    store: kvfs.Store, evictor: Evictor, seconds: float | None, patience: float
) -> None:
    before = clock(store).monotonic()
    with Evictor(evictor._c).lock.hold(before), pytest.raises(StoreLockedError):
        evictor.collect(0, seconds)
    assert clock(store).monotonic() == pytest.approx(before + patience, abs=0.003)


@pytest.mark.parametrize("over", [0, 1])
def test_the_background_keeps_room_for_the_next_step_of_a_segment(
    store: kvfs.Store, evictor: Evictor, monkeypatch: pytest.MonkeyPatch, over: int
) -> None:
    settings = evictor._c.settings
    limit = ledger.budget(settings).limit - settings.segment_bytes // 4
    row = rows(store)[1]
    filled = row._replace(allocated=row.allocated + limit + over - used(store))
    evictor._c.index.write(lambda s: s.set_segment(1, row, filled), 5.0)
    assert used(store) == limit + over
    evictor.background()
    assert len(rows(store)) == 6 - over, "one segment is enough"


def test_the_background_reclaims_what_is_dropped(store: kvfs.Store, evictor: Evictor) -> None:
    evictor.background()
    assert len(rows(store)) == 6
    evictor._c.index.write(lambda s: ledger.mark_dropped(s, 2, evictor._c.owner), 5.0)
    evictor.background()
    assert list(rows(store)) == [1, 3, 4, 5, 6]


def test_room_for_copies_ends_when_there_is_nothing_left_or_the_time_is_over(
    store: kvfs.Store, evictor: Evictor
) -> None:
    limit, each = ledger.budget(evictor._c.settings).limit, rows(store)[1].allocated
    now = clock(store).monotonic()
    evictor.make_room_locked(limit - 6 * each, now + 5.0, frozenset())
    assert len(rows(store)) == 6
    evictor.make_room_locked(limit - 6 * each + 1, now + 5.0, frozenset({rows(store)[1].segment_id}))
    assert list(rows(store)) == [1, 3, 4, 5, 6], "what is spared stays"
    evictor.make_room_locked(limit, now, frozenset())
    assert list(rows(store)) == [3, 4, 5, 6], "one, and the time is over"
    evictor._c.index.write(lambda s: ledger.mark_dropped(s, 4, evictor._c.owner), 5.0)
    evictor.make_room_locked(limit - 3 * each, now + 5.0, frozenset())
    assert list(rows(store)) == [3, 5, 6], "what is dropped is reclaimed first"
    evictor.make_room_locked(limit, now + 5.0, {row.class_id for row in rows(store).values()})
    assert list(rows(store)) == [3, 5, 6] and clock(store).monotonic() == now
    held = [hold(row, store) for row in rows(store).values()]
    evictor.make_room_locked(limit, now + 0.1, frozenset())
    for fd in held:
        os.close(fd)
    assert clock(store).monotonic() == pytest.approx(now + 0.1, abs=0.02)


def test_segments_whose_pages_have_all_expired_are_dropped(store: kvfs.Store, evictor: Evictor) -> None:
    now_s = clock(store).now_us() // 1_000_000
    for number, change in (
        (1, {"expires": now_s}), (2, {"expires": now_s + 1}), (3, {"expires": 0}),
        (4, {"expires": now_s - 9, "state": ACTIVE, "owner": evictor._c.owner}),
        (5, {"expires": now_s - 9, "state": ACTIVE, "owner": b"dead" * 4}),
    ):  # fmt: skip
        row = rows(store)[number]
        evictor._c.index.write(lambda s, n=number, r=row, c=change: s.set_segment(n, r, r._replace(**c)), 5.0)  # type: ignore[misc]
    with counted(store) as moved:
        evictor.expire()
        assert moved("segments_expired") == 2
    assert list(rows(store)) == [2, 3, 4, 6]


def test_a_segment_without_its_file_is_dropped(store: kvfs.Store, evictor: Evictor) -> None:
    gone = rows(store)[2]
    (Path(store.path) / "segments" / f"{gone.segment_id.hex()}.kvs").unlink()
    with store.namespace("m", tiny(), "1").match(tokens_of(1, PAGES)) as match:
        assert match.chunks == PAGES or match.chunks == 0
        buffer = bytearray(PAGES * TINY_BYTES)
        store.namespace("m", tiny(), "1").get(match, buffer)
    with counted(store) as moved:
        evictor.drop_missing()
        evictor.drop_missing()
        assert moved("segments_missing") == 1
    assert list(rows(store)) == [1, 3, 4, 5, 6]
    generation = evictor._c.index.generation
    for number, wanted in ((1, (b"x" * 16, 1, generation)), (3, (gone.segment_id, 1, generation))):
        assert not evictor.reclaimer.drop_missing(*wanted), number
    first = rows(store)[1]
    assert not evictor.reclaimer.drop_missing(first.segment_id, 1, generation), "its file is there"
    (Path(store.path) / "segments" / f"{first.segment_id.hex()}.kvs").unlink()
    assert not evictor.reclaimer.drop_missing(first.segment_id, 1, "another")
    evictor._c.index.write(lambda s: s.set_segment(1, first, first._replace(records=0)), 5.0)
    assert not evictor.reclaimer.drop_missing(first.segment_id, 1, generation), "it may be about to be made"
    evictor._c.index.write(lambda s: s.set_segment(1, first._replace(records=0), first), 5.0)
    assert evictor.reclaimer.drop_missing(first.segment_id, 1, generation)


# -- reclaiming --------------------------------------------------------------------------------


def test_files_that_cannot_be_removed_end_eviction_after_four(
    store: kvfs.Store, evictor: Evictor, reclaimer: Reclaimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patch, counted(store) as moved:
        patch.setattr(reclaimer, "_unlink", fail)
        for n in range(4):
            assert not reclaimer.fails
            assert evictor._evict_one() == 0
            assert reclaimer._failures == n + 1
        assert reclaimer.fails and evictor._evict_one() is None
        assert moved("evict_errors") == 4 and moved("segments_reclaimed") == 0
        assert reclaimer.reclaim_dropped() == 0 and moved("evict_errors") == 5
        with pytest.raises(OSError, match="broken"):
            reclaimer.reclaim_dropped(strict=True)
    assert [row.state for row in rows(store).values()] == [DROPPED] * 4 + [SEALED] * 2
    each = rows(store)[1].allocated
    assert reclaimer.reclaim_dropped() == 4 * each and not reclaimer.fails and reclaimer._failures == 0
    reclaimer._failures = 9
    assert reclaimer.reclaim_dropped() == 0 and reclaimer._failures == 0, "another process has removed them"


def test_one_that_cannot_be_removed_stops_none_of_the_others(
    store: kvfs.Store, reclaimer: Reclaimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink, bad = reclaimer._unlink, rows(store)[2].segment_id

    def some(row: SegmentRow) -> bool:
        if row.segment_id == bad:
            raise OSError(errno.EIO, "broken")
        return unlink(row)

    monkeypatch.setattr(reclaimer, "_unlink", some)
    monkeypatch.setattr(reclaimer_module, "BATCH_MAX", 2)
    with pytest.raises(OSError, match="broken"):
        reclaimer.drop_all(list(rows(store).items())[:5])
    assert {n: row.state for n, row in rows(store).items()} == {2: DROPPED, 6: SEALED}
    left = reclaimer.drop_all(list(rows(store).items())[1:])
    assert [row.state for row in left] == [DROPPED] and list(rows(store)) == [2]


def test_what_has_a_segments_name_and_is_none_stops_no_reclaim(store: kvfs.Store, reclaimer: Reclaimer) -> None:
    doomed, row = Path(store.path) / "doomed", rows(store)[1]
    name = f"{row.segment_id.hex()}.kvs"
    (doomed / name).mkdir()
    (doomed / name / "kept").write_bytes(b"x")
    assert reclaimer.drop(1)
    (aside,) = (Path(store.path) / "quarantine").iterdir()
    assert aside.name.startswith(f"{name}.") and (aside / "kept").read_bytes() == b"x"
    assert not list(doomed.iterdir()) and not (Path(store.path) / "segments" / name).exists()
    second = f"{rows(store)[2].segment_id.hex()}.kvs"
    (doomed / second).symlink_to("/etc/hostname")
    assert reclaimer.drop(2) and not list(doomed.iterdir()) and os.path.exists("/etc")
    assert not reclaimer.drop(3, b"of another index"), "the number means another segment now"
    assert rows(store)[3].state == SEALED
    fd = hold(rows(store)[3], store)
    assert not reclaimer.drop(3) and (doomed / f"{rows(store)[3].segment_id.hex()}.kvs").exists()
    os.close(fd)
    assert reclaimer.reclaim_dropped() and not list(doomed.iterdir())


def test_a_directory_in_place_of_a_segments_file_is_set_aside(store: kvfs.Store, reclaimer: Reclaimer) -> None:
    path, row = Path(store.path), rows(store)[1]
    name = f"{row.segment_id.hex()}.kvs"
    (path / "segments" / name).unlink()
    (path / "segments" / name).mkdir()
    (path / "segments" / name / "kept").write_bytes(b"x")
    before = used(store)
    assert reclaimer.drop(1) and used(store) == before - row.allocated
    (aside,) = (path / "quarantine").iterdir()
    assert (aside / "kept").read_bytes() == b"x" and not list((path / "doomed").iterdir())


def test_the_access_times_of_a_segment_go_with_its_file(store: kvfs.Store, reclaimer: Reclaimer) -> None:
    row, context = rows(store)[1], store._shared.c
    context.access_times.stamp(row.segment_id, 0, [5] * row.records)
    context.access_times.flush()
    assert any(context.access_times.raw(row.segment_id))
    fd = hold(row, store)
    assert not reclaimer.drop(1) and any(context.access_times.raw(row.segment_id)), "still held"
    os.close(fd)
    assert reclaimer.reclaim_dropped() == row.allocated
    assert not any(context.access_times.raw(row.segment_id))


def test_files_that_no_row_names_are_charged_once(store: kvfs.Store, evictor: Evictor) -> None:
    path = Path(store.path)
    (path / "segments" / ("1" * 32 + ".kvs")).write_bytes(bytes(10_000))
    (path / "doomed" / ("2" * 32 + ".kvs")).write_bytes(bytes(5_000))
    (path / "segments" / "notes").write_bytes(bytes(10_000))
    (path / "segments" / ("3" * 32 + ".kvs")).mkdir()
    before = used(store)
    with counted(store) as moved:
        evictor.charge_unknown()
        evictor.charge_unknown()
        assert moved("segments_unknown") == 2
    found = {row.segment_id: row for n, row in rows(store).items() if n > 6}
    assert {i.hex(): row.state for i, row in found.items()} == {"1" * 32: SEALED, "2" * 32: DROPPED}
    assert used(store) == before + ledger.charge(12_288, 0) + ledger.charge(8_192, 0)
    evictor.collect(0)
    assert not rows(store) and sorted(f.name for f in (path / "segments").iterdir()) == ["3" * 32 + ".kvs", "notes"]


# -- sweeping ----------------------------------------------------------------------------------


def test_a_sweep_goes_once_through_all_rows_after_a_drop(
    store: kvfs.Store, reclaimer: Reclaimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reclaimer_module, "SWEEP_ROWS", 2)
    assert not reclaimer.sweep_step(1), "nothing was dropped"
    reclaimer.drop(1)
    reclaimer.drop(2)
    with counted(store) as moved:
        steps = 0
        while reclaimer.sweep_step(1):
            steps += 1
        assert moved("rows_swept") == 2
    assert steps == 3, "six rows, two at a time: a prompt of twenty pages has one"
    assert store._shared.c.index.read(lambda s: s.ledger().unswept, 5.0) == 0
    reclaimer.drop(3)
    assert not reclaimer.sweep_step(9), "it ends with the round"
    reclaimer.drop(4)
    reclaimer.drop(5)
    reclaimer.sweep_all(clock(store).monotonic())
    assert store._shared.c.index.read(lambda s: s.ledger().unswept, 5.0) in (0, 2)
    reclaimer.sweep_all()
    assert store._shared.c.index.read(lambda s: s.ledger().unswept, 5.0) == 0


@pytest.mark.parametrize("old", ["", "zz"], ids=["below", "above"])
def test_a_sweep_of_another_index_begins_at_its_start(
    store: kvfs.Store, reclaimer: Reclaimer, monkeypatch: pytest.MonkeyPatch, old: str
) -> None:
    """An index that a rebuild replaced meanwhile: how far the sweep of the old one had come says nothing of it."""
    monkeypatch.setattr(reclaimer_module, "SWEEP_ROWS", 2)
    reclaimer.drop(1)
    assert reclaimer.sweep_step(1)
    at = reclaimer._sweep_at
    assert at is not None and at > b"\0"
    reclaimer._sweep_generation, reclaimer._sweep_at = old, b"\xff" * 40
    with counted(store) as moved:
        assert reclaimer.sweep_step(1) and reclaimer._sweep_at == at, "as in the first step"
        assert not reclaimer.sweep_step(9)
        assert moved("rows_swept") <= 1
    assert store._shared.c.index.read(lambda s: s.ledger().unswept, 5.0) == 0


def test_a_sweep_that_is_not_over_counts_no_segment_as_swept(
    store: kvfs.Store, reclaimer: Reclaimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A segment dropped while the rows are swept needs another round: its rows may be behind the sweep."""
    monkeypatch.setattr(reclaimer_module, "SWEEP_ROWS", 2)
    index = store._shared.c.index
    reclaimer.drop(1)
    assert reclaimer.sweep_step(1)
    reclaimer.drop(2)
    assert index.read(lambda s: s.ledger().unswept, 5.0) == 2
    assert reclaimer.sweep_step(2), "the end of the first round"
    assert index.read(lambda s: s.ledger().unswept, 5.0) == 1
    assert not reclaimer.sweep_step(9)
    assert index.read(lambda s: s.ledger().unswept, 5.0) == 0
    reclaimer.drop(3)
    assert reclaimer.sweep_step(1)
    reclaimer.abandon()
    with counted(store) as moved:
        assert not reclaimer.sweep_step(9) and moved("rows_swept") <= 1, "a child begins at the start"
    assert index.read(lambda s: s.ledger().unswept, 5.0) == 0


def test_an_index_that_does_not_answer_ends_no_sweep(
    store: kvfs.Store, reclaimer: Reclaimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(context: Any) -> int:
        raise IndexUnavailableError("slow")

    monkeypatch.setattr(reclaimer_module, "forget_namespaces", slow)
    reclaimer.drop(1)
    assert not reclaimer.sweep_step(9)
    assert store._shared.c.index.read(lambda s: s.ledger().unswept, 5.0) == 0


def test_namespaces_without_pages_are_forgotten(store: kvfs.Store, reclaimer: Reclaimer) -> None:
    context = store._shared.c
    assert forget_namespaces(context) == 0
    other = store.namespace("other", tiny(), "1")
    other.put(tokens_of(77, 2), seeded(77, 2 * TINY_BYTES))
    store._shared.services().active.finish_all()
    listed = context.index.read(lambda s: [d for d, _ in s.namespaces(b"", 99)[0]], 5.0)
    assert len(listed) == 2
    (digest,) = {d for d in listed if context.index.read(lambda s, d=d: s.has_contents(7, d), 5.0)}  # type: ignore[misc]
    assert forget_namespaces(context, digest) == 0
    reclaimer.drop(7)
    with counted(store) as moved:
        assert forget_namespaces(context, digest) == 1
        assert moved("namespaces_forgotten") == 1
    for number in range(1, 7):
        reclaimer.drop(number)
    assert forget_namespaces(context) == 1
    assert context.index.read(lambda s: s.namespaces(b"", 99), 5.0) == ([], None)


@pytest.mark.parametrize(("room", "reserved"), [(False, 0), (True, 128 << 10)])
def test_an_index_is_full_at_85_percent_or_with_little_room(room: bool, reserved: int) -> None:
    class Session:
        def __init__(self, used: int) -> None:
            self.used = used

        def used_bytes(self) -> int:
            return self.used

    for index, kept in ((2 << 20, reserved), (64 << 20, 8 * reserved)):
        limit = int(0.85 * index) - kept
        assert not index_is_full(Session(limit), index, room=room)  # type: ignore[arg-type]
        assert index_is_full(Session(limit + 1), index, room=room)  # type: ignore[arg-type]


# -- a full index ------------------------------------------------------------------------------


def fill_index(monkeypatch: pytest.MonkeyPatch, evictor: Evictor, full: list[bool], sweeps: list[bool]) -> list[object]:
    """What is asked, in order: the index is ``full`` as often as that says, sweeps find something as ``sweeps`` say."""
    asked: list[object] = []

    def is_full(session: object, index_bytes: int, *, room: bool = False) -> bool:
        asked.append(("room", index_bytes) if room else ("full", index_bytes))
        return full.pop(0) if full else False

    def sweep_step(*, pack: bool = False) -> bool:
        asked.append("pack" if pack else "sweep")
        return sweeps.pop(0) if sweeps else False

    monkeypatch.setattr("kvfs.eviction.evictor.index_is_full", is_full)
    monkeypatch.setattr(evictor.reclaimer, "sweep_step", sweep_step)
    return asked


INDEX = 2 << 20  # of a store of 16 MiB


@pytest.mark.parametrize(("fullness", "sweep"), [(0.59, "pack"), (0.6, "sweep"), (1.0, "sweep")])
def test_a_full_index_is_swept_before_anything_is_evicted(
    store: kvfs.Store, evictor: Evictor, monkeypatch: pytest.MonkeyPatch, fullness: float, sweep: str
) -> None:
    monkeypatch.setattr("kvfs.index.session.Session.fullness", lambda session: fullness)
    asked = fill_index(monkeypatch, evictor, [True, True, False], [True, True])
    assert evictor.make_room(0, clock(store).monotonic() + 1.0, index_full=True)
    assert asked == [("room", INDEX), sweep, ("room", INDEX), sweep, ("room", INDEX)] and len(rows(store)) == 6


@pytest.mark.parametrize(("share", "evicted"), [(32, 1), (3, 2), (2, 3)])
def test_a_full_index_costs_a_share_of_the_segments_at_a_time(
    store: kvfs.Store, evictor: Evictor, monkeypatch: pytest.MonkeyPatch, share: int, evicted: int
) -> None:
    monkeypatch.setattr("kvfs.eviction.evictor.INDEX_SHARE", share)
    fill_index(monkeypatch, evictor, [True, True], [False, True])
    assert evictor.make_room(0, clock(store).monotonic() + 1.0, index_full=True)
    assert len(rows(store)) == 6 - evicted


def test_a_full_index_is_cleared_until_the_deadline(
    store: kvfs.Store, evictor: Evictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = fill_index(monkeypatch, evictor, [True] * 99, [])
    now = clock(store).monotonic()
    assert not evictor.make_room(0, now, index_full=True) and len(asked) == 1 and len(rows(store)) == 6
    assert not evictor.make_room(0, now + 1.0, index_full=True) and rows(store) == {}, "nothing is left"


def test_the_background_clears_a_full_index(
    store: kvfs.Store, evictor: Evictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[float] = []
    monkeypatch.setattr(evictor, "_clear_index", ends.append)
    monkeypatch.setattr("kvfs.eviction.evictor.index_is_full", lambda session, index_bytes: False)
    evictor.background()
    assert ends == []
    monkeypatch.setattr("kvfs.eviction.evictor.index_is_full", lambda session, index_bytes: index_bytes == INDEX)
    now = clock(store).monotonic()
    evictor.background()
    assert ends == [now + 2.0] and len(rows(store)) == 6


@pytest.mark.parametrize(
    "error", [None, Declined("space"), OSError(errno.EIO, "broken"), IndexUnavailableError("timeout")]
)
def test_copies_that_cannot_be_made_are_counted_and_the_segment_is_evicted(
    store: kvfs.Store, evictor: Evictor, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    asked: list[Any] = []

    def copy(*args: Any) -> int:
        asked.append(args)
        if error is not None:
            raise error
        return 3

    row = rows(store)[2]
    monkeypatch.setattr(evictor.victims, "choose", lambda *_: Victim(2, row, (1, 2, 3), 3 * 4096))
    monkeypatch.setattr(evictor.relocator, "copy", copy)
    before = evictor.budget.tokens
    with counted(store) as moved:
        assert evictor._evict_one() in (0, row.allocated)
        assert (moved("carry_errors"), moved("pages_carried")) == ((0, 3) if error is None else (1, 0))
        assert moved("segments_evicted") == 1
    assert 2 not in rows(store) or rows(store)[2].state == DROPPED
    ((target, number, held, seqs),) = asked
    assert (number, held.segment_id, tuple(seqs)) == (2, row.segment_id, (1, 2, 3)) and target.evictor
    assert evictor.budget.tokens == before - 3 * 4096


@pytest.mark.parametrize(
    ("why", "drops"),
    [
        ("missing", True), ("there", False), ("another index", False), ("no row", False), ("another segment", False),
        ("dropped", False), ("no records", False),
    ],
)  # fmt: skip
def test_a_segment_counts_as_missing_only_if_its_row_says_that_it_has_pages(
    store: kvfs.Store, reclaimer: Reclaimer, monkeypatch: pytest.MonkeyPatch, why: str, drops: bool
) -> None:
    c, row = store._shared.c, rows(store)[2]
    file = Path(store.path) / "segments" / f"{row.segment_id.hex()}.kvs"
    if why != "there":
        file.unlink()
    if why == "no records":
        c.index.write(lambda s: s.set_segment(2, row, row._replace(records=0)), 5.0)
    if why == "dropped":
        c.index.write(lambda s: ledger.mark_dropped(s, 2, row.owner), 5.0)
    finished: list[int] = []
    monkeypatch.setattr(reclaimer, "finish", lambda number, row: finished.append(number))
    before = rows(store)
    number = 99 if why == "no row" else 3 if why == "another segment" else 2
    generation = "another" if why == "another index" else c.index.generation
    assert reclaimer.drop_missing(row.segment_id, number, generation) is drops
    assert finished == [2] * drops
    if drops:
        assert rows(store)[2].state == DROPPED
    else:
        assert rows(store) == before


@pytest.mark.parametrize("strict", [True, False])
def test_a_purged_segment_is_free_when_its_removal_is_on_the_disk(
    store: kvfs.Store, reclaimer: Reclaimer, monkeypatch: pytest.MonkeyPatch, strict: bool
) -> None:
    """Its mark stays until then: a file that a power cut brings back must find it."""
    c, one, two = store._shared.c, rows(store)[1], rows(store)[2]
    c.marks.write(PurgeMark(one.segment_id, PURGE_ALL, 0, b""))
    for number in (1, 2):
        c.index.write(lambda s, n=number: ledger.mark_dropped(s, n, bytes(16)), 5.0)  # type: ignore[misc]
    fails = True

    def fsync(fd: int) -> None:
        if fails:
            raise OSError(errno.EIO, "not synced")

    monkeypatch.setattr(c.files, "fsync", fsync, raising=False)
    with counted(store) as moved:
        if strict:
            with pytest.raises(OSError, match="not synced"):
                reclaimer.reclaim_dropped(strict=True)
        else:
            assert reclaimer.reclaim_dropped() == two.allocated
        assert (moved("segments_reclaimed"), moved("evict_errors")) == (1, 0 if strict else 1)
        assert 1 in rows(store) and 2 not in rows(store) and c.marks.has(one.segment_id)
        fails = False
        assert reclaimer.reclaim_dropped() == one.allocated
        assert 1 not in rows(store) and not c.marks.has(one.segment_id) and moved("segments_reclaimed") == 2
