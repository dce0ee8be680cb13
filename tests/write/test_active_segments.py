"""Active segments: how their files grow, when they are sealed or trimmed, who adopts them, and what failures leave."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.errors import IndexUnavailableError
from kvfs.index import ledger
from kvfs.index.ledger import ANY_CLASS, NeedSpaceError
from kvfs.index.session import Session
from kvfs.index.tables import ACTIVE, DROPPED, SEALED, SegmentRow
from kvfs.write.active_segments import ActiveSegments, Declined, RoomWait, SegmentClass
from tests.stores import TINY_BYTES, counted, restored, seeded, segment_files, tiny, tokens_of

KIB = 1 << 10
SEGMENT = 256 * KIB
ANY = SegmentClass()
CHAT = SegmentClass(b"chatchat" + bytes(8))


@pytest.fixture
def store(memory_path: Path) -> Iterator[kvfs.Store]:
    with kvfs.open(memory_path / "store", capacity="16MiB") as opened:
        opened._shared.background.stop()  # the test runs background tasks itself
        yield opened


@pytest.fixture
def active(store: kvfs.Store) -> ActiveSegments:
    return store._shared.services().active


def put(store: kvfs.Store, seed: int, pages: int) -> kvfs.PutResult:
    return store.namespace("m", tiny(), "1").put(tokens_of(seed, pages), seeded(seed, pages * TINY_BYTES))


def rows(store: kvfs.Store) -> list[SegmentRow]:
    return [row for _, row in store._shared.c.index.read(lambda s: s.segments(), 5.0)]


def test_a_segment_grows_by_quarters_and_is_sealed_when_it_is_full(store: kvfs.Store) -> None:
    """A page takes a block and, in appends of one, a block for its leaf table."""
    seen, sizes = [], []
    for seed in range(40):
        assert put(store, seed, 1).stored == 1
        last = rows(store)[-1]
        seen.append((len(rows(store)), (last.allocated - ledger.charge(0, 0)) // KIB))
        (size,) = {f.stat().st_size for f in segment_files(Path(store.path)) if last.segment_id.hex() in f.name}
        sizes.append(size // KIB)
    # 16 KiB of tables, the descriptor, then two blocks for each page
    assert seen[:5] == [(1, 64)] * 5 and seen[5:13] == [(1, 128)] * 8 and seen[13:21] == [(1, 192)] * 8
    assert seen[21:29] == [(1, 256)] * 8 and seen[29:34] == [(2, 64)] * 5
    assert sizes == [n for _, n in seen]
    first, second = rows(store)
    assert (first.state, second.state) == (SEALED, ACTIVE)
    assert first.records == 1 + 29 and first.tail == (16 + 4 + 29 * 8) * KIB
    assert first.allocated == ledger.charge(first.tail + 4096, first.records)


@pytest.mark.parametrize(("pages", "allocated"), [(1, 64), (9, 64), (10, 68), (30, 148), (56, 252)])
def test_a_new_segment_has_room_for_the_whole_append(store: kvfs.Store, pages: int, allocated: int) -> None:
    assert put(store, 1, pages).stored == pages
    (row,) = rows(store)
    assert row.allocated - ledger.charge(0, pages + 8) == allocated * KIB
    assert row.records == pages + 1


@pytest.mark.parametrize(("pages", "state"), [(20, ACTIVE), (26, ACTIVE), (27, SEALED), (40, SEALED)])
@pytest.mark.parametrize("how", ["close", "tidy"])
def test_what_rests_is_sealed_if_more_than_half_full_and_else_trimmed(
    store: kvfs.Store, active: ActiveSegments, pages: int, state: int, how: str
) -> None:
    put(store, 1, pages)
    (before,) = rows(store)
    owner = before.owner
    assert (before.tail > SEGMENT // 2) is (state == SEALED)
    if how == "close":
        assert active.close() and not active.active_numbers()
    else:
        active._used_at[ANY] -= 9.9
        active.tidy()
        assert rows(store) == [before], "it was used less than ten seconds ago"
        active._used_at[ANY] -= 0.1
        active.tidy()
    (after,) = rows(store)
    size = before.tail + (4096 if state == SEALED else 0)
    assert after == before._replace(
        state=state, owner=owner if (how, state) == ("tidy", ACTIVE) else bytes(16),
        allocated=ledger.charge(size, before.records),
    )  # fmt: skip
    assert [f.stat().st_size for f in segment_files(Path(store.path))] == [size]
    if how == "tidy" and state == ACTIVE:
        assert active.active_numbers() == {1} and not active._used_at
        active.tidy()
        assert rows(store) == [after]
        assert put(store, 2, 1).stored == 1, "it grows again"
        assert len(rows(store)) == 1 and rows(store)[0].allocated > after.allocated


def test_the_segment_of_another_time_is_adopted(memory_path: Path) -> None:
    path = memory_path / "store"
    with kvfs.open(path, capacity="16MiB") as store:
        put(store, 1, 5)
    with kvfs.open(path) as store:
        store._shared.background.stop()
        (released,) = rows(store)
        assert (released.owner, released.epoch, released.state) == (bytes(16), 1, ACTIVE)
        assert put(store, 2, 3).stored == 3
        (adopted,) = rows(store)
        assert (adopted.owner, adopted.epoch) == (store._shared.c.owner, 2)
        assert adopted.records == released.records + 1 + 3, "with a descriptor of its own"
        assert adopted.tail == released.tail + (1 + 3 + 1) * 4096
        ns = store.namespace("m", tiny(), "1")
        assert restored(ns, tokens_of(1, 5)) == seeded(1, 5 * TINY_BYTES)
        assert restored(ns, tokens_of(2, 3)) == seeded(2, 3 * TINY_BYTES)


@pytest.mark.parametrize(
    "change",
    [{"class_id": b"c" * 16}, {"flags": 1}, {"tail": SEGMENT - 24 * KIB}, {"state": SEALED}, {}],
    ids=["class", "flags", "tail", "sealed", "none"],
)
def test_only_a_segment_of_the_class_with_room_is_adopted(memory_path: Path, change: dict[str, Any]) -> None:
    path = memory_path / "store"
    with kvfs.open(path, capacity="16MiB") as store:
        put(store, 1, 5)
    with kvfs.open(path) as store:
        store._shared.background.stop()
        (row,) = rows(store)
        store._shared.c.index.write(lambda s: s.set_segment(1, row, row._replace(**change)), 5.0)
        active = store._shared.services().active
        found = active._adopt(ANY, 28 * KIB)
        assert (found is None) is bool(change)
        if found is not None:
            assert (found.writer.number, found.writer.epoch, found.writer.records) == (1, 2, 6)
            found.writer.close()


def test_a_segment_may_be_full_up_to_the_room_of_one_record(memory_path: Path) -> None:
    path = memory_path / "store"
    with kvfs.open(path, capacity="16MiB") as store:
        put(store, 1, 5)
    with kvfs.open(path) as store:
        store._shared.background.stop()
        active, (row,) = store._shared.services().active, rows(store)
        for room, fits in ((28 * KIB - 1, False), (28 * KIB, True)):
            changed = row._replace(tail=SEGMENT - room)
            store._shared.c.index.write(partial(Session.set_segment, number=1, old=row, new=changed), 5.0)
            found = active._adopt(ANY, 28 * KIB)
            assert (found is not None) is fits
            row = changed
        assert found is not None
        found.writer.close()


def test_a_segment_that_cannot_be_adopted_takes_no_more_appends(memory_path: Path) -> None:
    path = memory_path / "store"
    with kvfs.open(path, capacity="16MiB") as store:
        put(store, 1, 5)
    segment_files(path)[0].write_bytes(b"")
    with kvfs.open(path) as store:
        store._shared.background.stop()
        with counted(store) as moved:
            assert put(store, 2, 1).stored == 1
            assert moved("adopt_errors") == 1
        assert [row.state for row in rows(store)] == [SEALED, ACTIVE]
        assert rows(store)[0].owner == bytes(16)


def test_a_segment_that_cannot_be_made_is_dropped(
    store: kvfs.Store, active: ActiveSegments, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patch:
        patch.setattr(store._shared.c.files, "fallocate", refuse, raising=False)
        with counted(store) as moved:
            assert put(store, 1, 2).reason == "io"
            assert (moved("write_errors"), moved("pages_declined_io"), moved("disk_full")) == (1, 2, 0)
    assert [row.state for row in rows(store)] == [DROPPED] and not active._pending_steps
    assert put(store, 1, 2).stored == 2


def test_a_page_larger_than_any_segment_is_declined(active: ActiveSegments) -> None:
    largest = ledger.segment_limit(active._c.settings, 1 << 30)
    with pytest.raises(Declined, match="space"):
        active._create(ANY, largest + 1, largest + 1, RoomWait(0.0))
    made = active._create(ANY, largest, largest, RoomWait(0.0))
    assert made.writer.allocated == largest == (16 << 20) // 16
    made.writer.close()


def test_a_step_that_the_index_refuses_is_taken_later(
    store: kvfs.Store, active: ActiveSegments, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, 1, 2)

    def refuse(*_: Any, **__: Any) -> None:
        raise IndexUnavailableError("slow")

    with counted(store) as moved, monkeypatch.context() as patch:
        patch.setattr(store._shared.c.index, "write", refuse)
        active.close_for_appends(ANY)
        assert moved("drop_errors") == 1
    assert len(active._pending_steps) == 1 and rows(store)[0].state == ACTIVE
    assert not active.active_numbers() and not active._used_at and not active._dirty
    active.tidy()
    assert rows(store)[0].state == SEALED and active._pending_steps == []
    active.close_for_appends(ANY)  # it has none: nothing happens
    active._pending_steps = [(1, "another generation", ledger.mark_dropped)]
    active.tidy()
    assert rows(store)[0].state == SEALED and active._pending_steps == []


@pytest.mark.parametrize(("pages", "state"), [(0, DROPPED), (2, SEALED)])
def test_a_row_of_this_process_without_a_writer_is_released(
    store: kvfs.Store, active: ActiveSegments, pages: int, state: int
) -> None:
    """An interrupt came between a commit and its use."""
    if pages:
        put(store, 1, pages)
    else:
        active.writer(ANY, 28 * KIB, 28 * KIB, lambda writer: 0, RoomWait(0.0))
    active.tidy()
    assert rows(store)[0].state == ACTIVE
    lost = active._writers.pop(ANY)
    lock = active.lock(ANY._replace(evictor=True, lane=7))
    with lock:
        active.class_locks.is_free_within = lambda *_: False  # type: ignore[method-assign]
        active.tidy()
        assert rows(store)[0].state == ACTIVE, "a put may be about to use the row"
        del active.class_locks.is_free_within
    active.tidy()
    assert rows(store)[0].state == state
    lost.writer.close()


def test_classes_have_segments_of_their_own(store: kvfs.Store, active: ActiveSegments) -> None:
    classes = [ANY, CHAT, ANY._replace(lane=1), ANY._replace(flags=4, evictor=True)]
    made = [active.writer(c, 28 * KIB, 0, lambda writer: 0, RoomWait(0.0)) for c in classes]
    assert active.active_numbers() == {1, 2, 3, 4}
    assert [(r.class_id, r.flags) for r in rows(store)] == [(c.class_id, c.flags) for c in classes]
    assert active.writer(CHAT, 28 * KIB, 0, lambda writer: 0, RoomWait(0.0)) is made[1]
    active.finish_all({made[0].writer.segment_id, made[2].writer.segment_id})
    assert active.active_numbers() == {2, 4}
    active.finish(ANY)  # it has none
    active.finish_all()
    assert active.active_numbers() == set() and {r.state for r in rows(store)} == {SEALED}


def test_more_active_segments_than_may_be_are_sealed_the_oldest_first(
    store: kvfs.Store, active: ActiveSegments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfs.write.active_segments.CLASSES_MAX", 2)
    classes = [ANY._replace(lane=n) for n in range(4)]
    for n, one in enumerate(classes):
        active.writer(one, 28 * KIB, 0, lambda writer: 0, RoomWait(0.0))
        active._used_at[one] -= 4 - n
    active._used_at[classes[1]] -= 5  # the one that was used last, long ago
    active.tidy()
    assert active.active_numbers() == {3, 4}
    active.tidy()
    assert active.active_numbers() == {3, 4} and active._used_at.keys() == set(classes[2:]), "they are in use"
    with monkeypatch.context() as patch:
        patch.setattr("kvfs.write.active_segments.CLASSES_MAX", 1)
        with active.lock(classes[2]):  # an append to it goes on
            active.tidy()
    assert active.active_numbers() == {3}


def test_a_segment_of_a_lifetime_is_sealed_when_it_rests(store: kvfs.Store, active: ActiveSegments) -> None:
    lived = SegmentClass(bytes(8) + b"lifetime")
    assert lived.expires and not ANY.expires and not lived._replace(flags=4).expires and not CHAT.expires
    assert CHAT.quota == b"chatchat" and ANY.quota == bytes(8)
    active.writer(lived, 28 * KIB, 0, lambda writer: 0, RoomWait(0.0))
    active._used_at[lived] -= 10.0
    active.tidy()
    assert not active.active_numbers() and rows(store)[0].state == SEALED


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), IndexUnavailableError("slow")], ids=["disk", "index"])
def test_a_trim_that_fails_is_counted_and_tried_again(
    store: kvfs.Store, active: ActiveSegments, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    put(store, 1, 2)

    def refuse() -> int:
        raise error

    with counted(store) as moved, monkeypatch.context() as patch:
        patch.setattr(active._writers[ANY].writer, "trim", refuse)
        active._used_at[ANY] -= 10.0
        active.tidy()
        assert moved("tidy_errors") == 1
    assert active.active_numbers() == {1} and rows(store)[0].state == ACTIVE


def test_a_seal_that_fails_closes_the_segment(
    store: kvfs.Store, active: ActiveSegments, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, 1, 2)

    def refuse() -> int:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(active._writers[ANY].writer, "seal", refuse)
    charged = rows(store)[0].allocated
    active.finish(ANY)
    assert not active.active_numbers()
    assert (rows(store)[0].state, rows(store)[0].allocated) == (SEALED, charged), "without a seal page the charge stays"


# -- waiting for room --------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_save_waits_for_room_in_sum(
    store: kvfs.Store, active: ActiveSegments, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, asked = Clock(), list[tuple[int, float, bytes, bool]]()
    monkeypatch.setattr(active._c.files, "monotonic", clock, raising=False)

    def make_room(missing: int, deadline: float, owner: bytes, *, index_full: bool = False) -> bool:
        asked.append((missing, deadline, owner, index_full))
        clock.now += 2.0
        return True

    monkeypatch.setattr(active, "_make_room", make_room)
    errors: list[Exception | None] = [NeedSpaceError(7, b"chatchat"), IndexUnavailableError("index full"), None]
    left = iter(errors)

    def transact(session: Session) -> int:
        error = next(left)
        if error is not None:
            raise error
        return 5

    active._no_room[CHAT.quota] = 0.0
    wait = RoomWait(5.0)
    assert active.with_room(transact, wait, CHAT) == 5
    assert asked == [(7, 105.0, b"chatchat", False), (0, 105.0, b"", True)]
    assert wait.seconds == 3.0 and CHAT.quota not in active._no_room
    left = iter([NeedSpaceError(1)] * 9)
    with pytest.raises(Declined, match="space"):
        active.with_room(transact, wait, CHAT)
    assert wait.seconds == -1.0 and active._no_room == {CHAT.quota: clock.now + 1.0}
    asked.clear()
    left = iter([NeedSpaceError(1)])
    with pytest.raises(Declined, match="space"):
        active.with_room(transact, RoomWait(0.0), CHAT)
    assert asked == [], "a save that may not wait does not evict"
    left = iter([IndexUnavailableError("slow")])
    with pytest.raises(IndexUnavailableError, match="slow"):
        active.with_room(transact, RoomWait(5.0), CHAT)


def test_where_nothing_can_be_evicted_a_segment_of_the_quota_is_sealed(
    store: kvfs.Store, active: ActiveSegments, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes = [CHAT._replace(lane=n) for n in range(3)]
    for n, one in enumerate([ANY, *lanes]):
        active.writer(one, 28 * KIB, 0, lambda writer: 0, RoomWait(0.0))
        active._used_at[one] += n
    slept: list[float] = []
    monkeypatch.setattr(active._c.files, "sleep", slept.append, raising=False)
    locks = [active.lock(one) for one in (ANY, *lanes)]  # one that nothing refers to is forgotten
    with active.lock(lanes[1]):
        assert active._seal_other(b"chatchat", lanes[0])
        assert active.active_numbers() == {1, 2, 3} and slept == [], "neither the caller's nor the one in use"
        assert active._seal_other(b"chatchat", lanes[0])
        assert slept == [0.005] and active.active_numbers() == {1, 2, 3}
    assert active._seal_other(b"chatchat", lanes[0])
    assert active.active_numbers() == {1, 2}
    assert not active._seal_other(b"chatchat", lanes[0]) and slept == [0.005]
    assert not any(lock.locked() for lock in locks)
    monkeypatch.setattr(active, "_make_room", lambda *_, **__: False)
    sealed: list[bytes] = []
    monkeypatch.setattr(active, "_seal_other", lambda owner, own: sealed.append(owner) or len(sealed) < 3)  # type: ignore[func-returns-value]
    for owner, tries in ((b"chatchat", 3), (b"", 0)):
        sealed.clear()

        def full(session: Session, owner: bytes = owner) -> None:
            raise NeedSpaceError(1, owner)

        with pytest.raises(Declined, match="space"):
            active.with_room(full, RoomWait(5.0), CHAT)
        assert len(sealed) == tries


def test_a_full_disk_is_waited_for_within_the_wait_of_the_save(
    active: ActiveSegments, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, asked = Clock(), list[Any]()
    monkeypatch.setattr(active._c.files, "monotonic", clock, raising=False)

    def make_room(missing: int, deadline: float, owner: bytes, *, disk_full: bool = False) -> bool:
        asked.append((missing, deadline, owner, disk_full))
        clock.now += 1.5
        return True

    monkeypatch.setattr(active, "_make_room", make_room)
    wait = RoomWait(2.0)
    assert active.evict_for_full_disk(77, wait)
    assert asked == [(77, 102.0, b"", True)] and wait.seconds == 0.5
    assert active.evict_for_full_disk(77, wait) and wait.seconds == -1.0
    assert not active.evict_for_full_disk(77, wait) and len(asked) == 2


@pytest.mark.parametrize(
    ("until", "seconds"),
    [(None, 5.0), (100.5, 0.0), (100.0, 0.05), (99.0, 0.05), (90.0, 0.05), (89.9, 5.0)],
)
def test_a_wait_that_timed_out_shortens_the_next_ones(
    active: ActiveSegments, monkeypatch: pytest.MonkeyPatch, until: float | None, seconds: float
) -> None:
    monkeypatch.setattr(active._c.files, "monotonic", Clock(), raising=False)
    if until is not None:
        active._no_room[bytes(8)] = until
    assert active.room_wait(ANY, 5.0) == RoomWait(seconds) and active.room_wait(CHAT, 5.0) == RoomWait(5.0)


def test_the_classes_limits_are_those_of_its_quota(active: ActiveSegments) -> None:
    settings = active._c.settings
    assert ANY.limits(settings) == ledger.budget(settings, ANY_CLASS)
    assert ANY._replace(evictor=True).limits(settings) == ledger.budget(settings, evictor=True)
    assert ANY.limits(settings) != ANY._replace(evictor=True).limits(settings)


def test_a_close_waits_for_appends_in_sum(
    store: kvfs.Store, active: ActiveSegments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five seconds for all classes together; where an append hangs this process stays the owner."""
    clock, asked = Clock(), list[float]()
    for lane in range(3):
        active.writer(ANY._replace(lane=lane), 28 * KIB, 0, lambda writer: 0, RoomWait(0.0))
    monkeypatch.setattr(active._c.files, "monotonic", clock, raising=False)

    def is_free_within(segment_class: SegmentClass, seconds: float) -> bool:
        asked.append(seconds)
        clock.now += 3.0
        return segment_class.lane == 1

    monkeypatch.setattr(active.class_locks, "is_free_within", is_free_within)
    assert not active.close()
    assert asked == [5.0, 2.0, 0.0] and active.active_numbers() == {1, 3}
    owners = [row.owner == active._c.owner for row in rows(store)]
    assert owners == [True, False, True]


def test_a_forked_child_owns_no_segment_and_waits_for_no_lock(store: kvfs.Store, active: ActiveSegments) -> None:
    put(store, 1, 2)
    active.note_dirty(ANY)
    active._pending_steps.append((9, "generation", ledger.mark_dropped))
    writer, lock = active._writers[ANY].writer, active.lock(ANY)
    with lock:  # of a thread that only the parent has
        active.abandon()
        assert writer._file.fd < 0 and active.active_numbers() == set()
        assert not active.lock(ANY).locked()
        active._take_pending_steps()
        active.sync_dirty()
        assert active.close()
    assert rows(store)[0].state == ACTIVE, "the parent's"


@pytest.mark.parametrize("how", ["sealed", "closed", "trimmed"])
def test_nothing_is_kept_of_a_class_without_a_segment(store: kvfs.Store, active: ActiveSegments, how: str) -> None:
    put(store, 1, 2)
    active.note_dirty(ANY)
    assert ANY in active._used_at
    writer = active._writers[ANY].writer
    if how == "sealed":
        active.finish(ANY)
    elif how == "closed":
        active.close_for_appends(ANY)
    else:
        active.close()
    assert ANY not in active._writers and active.active_numbers() == set()
    assert writer._file.fd < 0
    assert ANY not in active._used_at or how == "trimmed"
    assert ANY not in active._dirty or how == "trimmed"
    active.close_for_appends(ANY)  # of a class that has none
    active.finish(ANY)


def test_a_trimmed_segment_is_synced_once_at_level_batch(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with kvfs.open(memory_path / "store", capacity="16MiB", sync="batch") as store:
        store._shared.background.stop()
        active, synced = store._shared.services().active, list[int]()
        monkeypatch.setattr(active, "sync", lambda writer: synced.append(writer.number))
        put(store, 1, 2)
        assert ANY in active._dirty
        for _ in range(2):
            active._used_at[ANY] = active._c.files.monotonic() - 11.0
            active.tidy()
            active.sync_dirty()
        assert synced == [1] and ANY not in active._dirty


def test_a_row_that_may_be_used_keeps_no_other_from_being_released(store: kvfs.Store, active: ActiveSegments) -> None:
    for one in (ANY, CHAT):
        active.writer(one, 28 * KIB, 28 * KIB, lambda writer: 0, RoomWait(0.0))
    lost = [active._writers.pop(one).writer for one in (ANY, CHAT)]
    free = active.class_locks.is_free_within
    active.class_locks.is_free_within = lambda key, *how: key.class_id == CHAT.class_id and free(key, *how)  # type: ignore[assignment,method-assign,attr-defined]
    active.tidy()
    assert [row.state for row in rows(store)] == [ACTIVE, DROPPED]
    del active.class_locks.is_free_within
    for writer in lost:
        writer.close()


@pytest.mark.parametrize("generation", ["0", "g"])
def test_a_segment_of_another_index_takes_no_more_appends(
    store: kvfs.Store, active: ActiveSegments, generation: str
) -> None:
    """The names of generations have no order."""
    put(store, 1, 2)
    made = active._writers[ANY]
    active._writers[ANY] = made._replace(generation=generation)
    active._used_at[ANY] -= 11.0
    active.tidy()
    assert active.active_numbers() == set() and made.writer._file.fd < 0
    put(store, 2, 2)
    made = active._writers[ANY]
    active._writers[ANY] = made._replace(generation=generation)
    assert put(store, 3, 2).stored == 2 and active._writers[ANY].writer is not made.writer
