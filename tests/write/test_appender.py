"""Storing pages: what a put counts and says for each way in which it may end, and how many pages one batch takes."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvfs
from kvfs.directory.config import make_settings
from kvfs.errors import IndexUnavailableError, NoSpaceError
from kvfs.index import ledger
from kvfs.lookup.search import Prompt
from kvfs.pages.identity import Identity
from kvfs.write import class_locks
from kvfs.write.active_segments import Declined, RoomWait, SegmentClass
from kvfs.write.appender import ANYTHING, Appender, AppendJob, Outcome, PartShape, _runs_of, check_pages_fit
from tests.stores import TINY_BYTES, counters, seeded, tiny, tokens_of

LAYOUT = tiny()
GROUP = LAYOUT.groups[0]


@pytest.fixture
def store(memory_path: Path) -> Iterator[kvfs.Store]:
    with kvfs.open(memory_path / "store", capacity="16MiB") as opened:
        opened._shared.background.stop()
        yield opened


@pytest.fixture
def appender(store: kvfs.Store) -> Appender:
    return store._shared.services().appender


def put(store: kvfs.Store, seed: int, pages: int, **how: Any) -> kvfs.PutResult:
    return store.namespace("m", LAYOUT, "1").put(tokens_of(seed, pages), seeded(seed, pages * TINY_BYTES), **how)


def moved(store: kvfs.Store, before: dict[str, int]) -> dict[str, int]:
    """Counters that have changed, of those that count pages and failures of writes."""
    names = ("pages_", "bytes_written", "write_errors", "disk_full", "declined_")
    after = counters(store)
    return {
        name: n - before.get(name, 0)
        for name, n in after.items()
        if name.startswith(names) and n != before.get(name, 0)
    }


def test_what_is_stored_and_what_is_there_already_is_counted(store: kvfs.Store) -> None:
    before = counters(store)
    first = put(store, 1, 5)
    assert (first.stored, first.skipped, first.declined, first.reason) == (5, 0, 0, "")
    assert moved(store, before) == {"pages_stored": 5, "bytes_written": 5 * TINY_BYTES}
    before = counters(store)
    again = put(store, 1, 5)
    assert (again.stored, again.skipped, again.declined, again.reason) == (0, 5, 0, "")
    assert moved(store, before) == {"pages_skipped": 5}


@pytest.mark.parametrize(
    ("error", "reason", "counted"),
    [
        (OSError(errno.EIO, "broken"), "io", {"write_errors": 1}),
        (OSError(errno.ENOSPC, "full"), "space", {"disk_full": 1}),
        (OSError(errno.EDQUOT, "full"), "space", {"disk_full": 1}),
        (Declined("space"), "space", {}),
        (IndexUnavailableError("index full: more"), "index", {"declined_index_index_full": 1}),
        (class_locks.AppendTimeoutError(), "io", {}),
    ],
    ids=["broken", "full", "quota", "declined", "index", "hangs"],
)
def test_a_put_that_fails_says_why_and_is_counted(
    store: kvfs.Store, appender: Appender, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str,
    counted: dict[str, int],
) -> None:  # fmt: skip
    put(store, 1, 2)
    closed: list[object] = []

    def fail(*_: Any, **__: Any) -> None:
        raise error

    before = counters(store)
    with monkeypatch.context() as patch:
        patch.setattr(appender, "_batch", fail)
        patch.setattr(appender._active, "evict_for_full_disk", lambda *_: False)
        patch.setattr(appender._active, "close_for_appends", closed.append)
        result = put(store, 2, 3)
    assert (result.stored, result.declined, result.reason) == (0, 3, reason)
    assert moved(store, before) == {**counted, f"pages_declined_{reason}": 3, "pages_declined": 3}
    assert len(closed) == (type(error) is OSError), "a segment whose write failed takes no more"
    assert put(store, 2, 3).stored == 3


def test_a_put_goes_on_where_a_full_disk_got_room(
    store: kvfs.Store, appender: Appender, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, float]] = []
    batch, errors = appender._batch, iter([OSError(errno.ENOSPC, "full")] * 2)

    def sometimes(*args: Any) -> int:
        if (error := next(errors, None)) is not None:
            raise error
        return batch(*args)

    def evict(nbytes: int, wait: RoomWait) -> bool:
        asked.append((nbytes, wait.seconds))
        return True

    monkeypatch.setattr(appender, "_batch", sometimes)
    monkeypatch.setattr(appender._active, "evict_for_full_disk", evict)
    result = put(store, 1, 3)
    assert (result.stored, result.declined, result.reason) == (3, 0, "")
    assert asked == [(256 << 10, 5.0)] * 2 and counters(store)["disk_full"] == 2


def test_the_rest_of_a_put_is_declined_after_the_first_batches(
    store: kvfs.Store, appender: Appender, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, left = appender._batch, iter([None, Declined("space")])
    monkeypatch.setattr("kvfs.write.appender.BATCH_PAGES", 4)

    def sometimes(*args: Any) -> int:
        if (error := next(left)) is not None:
            raise error
        return batch(*args)

    monkeypatch.setattr(appender, "_batch", sometimes)
    before = counters(store)
    result = put(store, 1, 10)
    assert (result.stored, result.declined, result.reason) == (4, 6, "space")
    assert moved(store, before) == {
        "pages_stored": 4, "bytes_written": 4 * TINY_BYTES, "pages_declined_space": 6, "pages_declined": 6,
    }  # fmt: skip


def test_a_store_that_declines_takes_nothing(store: kvfs.Store, appender: Appender) -> None:
    job = job_of(5)
    appender._c.declines = "io"
    before = counters(store)
    assert appender.store(job, range(5)) == Outcome(declined=5, reason="io")
    assert moved(store, before) == {"pages_declined_io": 5}


def job_of(pages: int, run_length: int = 32) -> AppendJob:
    hashes = [bytes([n]) * 32 for n in range(pages)]
    prompt = Prompt(b"d" * 32, hashes, run_length)
    return AppendJob(b"d" * 32, b"{}", 0, GROUP, GROUP.full, prompt, lambda chunk: b"")


def test_chunks_that_are_there_or_being_written_are_counted(store: kvfs.Store, appender: Appender) -> None:
    """A put asks the index before: here another writer was faster in between."""
    identity = Identity("m", LAYOUT, "1")
    page = seeded(1, TINY_BYTES)

    def job(chunks: int) -> AppendJob:
        prompt = Prompt(identity.digest, [bytes([n + 1]) * 32 for n in range(chunks)])
        return AppendJob(identity.digest, identity.descriptor_bytes(), 0, GROUP, GROUP.full, prompt, lambda chunk: page)

    before = counters(store)
    assert appender.store(job(3), range(3)) == Outcome(stored=3)
    assert moved(store, before) == {"pages_stored": 3, "bytes_written": 3 * TINY_BYTES}
    before = counters(store)
    assert appender.store(job(5), range(5)) == Outcome(stored=2, skipped=3)
    assert moved(store, before) == {"pages_stored": 2, "pages_skipped": 3, "bytes_written": 2 * TINY_BYTES}
    claimed = appender._active.writer(job(7).segment_class, 28 << 10, 0, lambda writer: 0, appender.room_wait(ANYTHING))
    appender._claim(job(7), [5, 6], claimed, appender.room_wait(ANYTHING))
    before = counters(store)
    assert appender.store(job(8), range(8)) == Outcome(stored=1, skipped=5, in_flight=2)
    assert moved(store, before) == {
        "pages_stored": 1, "pages_skipped": 5, "pages_in_flight": 2, "bytes_written": TINY_BYTES,
    }  # fmt: skip


def test_chunks_are_claimed_by_run() -> None:
    runs = [(keys.first, list(keys.hashes), slots) for keys, slots in _runs_of(job_of(70), [0, 5, 31, 32, 64, 69])]
    hashes = [bytes([n]) * 32 for n in range(70)]
    assert runs == [(0, hashes[:32], [0, 5, 31]), (32, hashes[32:64], [0]), (64, hashes[64:], [0, 5])]
    keyed = [(keys.first, list(keys.hashes), slots) for keys, slots in _runs_of(job_of(3, 1), [0, 2])]
    assert keyed == [(0, hashes[:1], [0]), (2, hashes[2:3], [0])]


def test_one_batch_fills_a_segment_and_no_more(appender: Appender) -> None:
    shape = PartShape(4096, 256, 16)
    job = SimpleNamespace(shape=shape, need_fresh=lambda: 28 << 10, need=lambda writer, n: 4096 * n + 100)
    for room, pages, expected in (
        (1 << 20, 5, 5), (1 << 20, 256, 255), (8 << 20, 999, 256), (4096 * 3 + 100, 9, 3), (4096 * 3 + 99, 9, 2),
        (4096 + 99, 9, 1), (0, 9, 1), (-5, 1, 1), (4096 * 3 + 100, 3, 3), (4096 * 3 + 99, 3, 2),
    ):  # fmt: skip
        asked: list[int] = []
        writer = SimpleNamespace(remaining_bytes=lambda limit, room=room, asked=asked: asked.append(limit) or room)
        assert appender._fitting(job, writer, pages) == expected, (room, pages)  # type: ignore[arg-type]
        assert asked == [256 << 10]
    large = SimpleNamespace(
        shape=PartShape(20 << 20, 256, 16), need_fresh=lambda: 1, need=lambda writer, n: n * (20 << 20)
    )
    roomy = SimpleNamespace(remaining_bytes=lambda limit: 1 << 40)
    assert appender._fitting(large, roomy, 9) == 3, "64 MiB at once"  # type: ignore[arg-type]
    large.shape = PartShape(65 << 20, 256, 16)
    assert appender._fitting(large, roomy, 9) == 1  # type: ignore[arg-type]


def test_a_page_may_be_as_large_as_a_segment_of_the_store() -> None:
    settings = make_settings("16MiB")
    limit = ledger.page_limit(settings)
    shape = PartShape.of(GROUP, GROUP.full)
    assert (shape.page_bytes, shape.leaf_bytes * shape.leaves) == (TINY_BYTES, TINY_BYTES)
    assert shape.need_fresh(100) == 16384 + 4096 + 4096 + 4096 + 4096
    assert limit == 1 << 20
    check_pages_fit(LAYOUT, 100, settings)
    for layers, fits in ((7, True), (8, False)):
        layout = tiny(page_tokens=4096, layers=layers)
        if fits:
            check_pages_fit(layout, 100, settings)
            continue
        with pytest.raises(NoSpaceError, match=r"has 1048576 bytes, a segment of this store may hold 1048576: use a"):
            check_pages_fit(layout, 100, settings)


def test_where_a_whole_step_of_a_segment_has_no_room_the_append_alone_may(
    store: kvfs.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, 1, 1)
    asked: list[int] = []
    reserve = ledger.reserve

    def noting(session: Any, number: int, row: Any, allocated: int, records: int, limits: Any) -> None:
        asked.append(allocated)
        if len(asked) == 1:
            raise ledger.NeedSpaceError(1)
        reserve(session, number, row, allocated, records, limits)

    monkeypatch.setattr(ledger, "reserve", noting)
    assert put(store, 2, 20).stored == 20
    step, alone = asked
    (row,) = (row for _, row in store._shared.c.index.read(lambda s: s.segments(), 5.0))
    size = store._shared.services().active._writers[SegmentClass()].writer.allocated
    assert alone == size < step and alone % 4096 == 0 and row.allocated >= alone


def test_a_segment_that_was_dropped_meanwhile_takes_no_more(
    store: kvfs.Store, appender: Appender, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, 1, 2)
    active = appender._active
    before = active._writers[SegmentClass()].writer

    def stale(*_: Any) -> None:
        raise ledger.StaleWriterError

    with monkeypatch.context() as patch:
        patch.setattr(appender, "_claim", stale)
        result = put(store, 2, 3)
    assert (result.stored, result.declined, result.reason) == (0, 3, "index")
    assert SegmentClass() not in active._writers and before._file.fd < 0
    assert put(store, 2, 3).stored == 3


def test_the_smallest_segment_is_one_of_a_page_unless_more_are_named() -> None:
    job = job_of(3)
    assert job.need_fresh() == job.need_fresh(1) < job.need_fresh(2) < job.need_fresh(5)
