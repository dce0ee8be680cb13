"""Segment files that cannot be removed do not stop eviction; pages of removed files are stored again."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.eviction.reclaimer import FAILURES_MAX
from kvfs.format.segment import PURGE_ALL, PURGE_PENDING, PurgeMark
from kvfs.index import ledger
from kvfs.index.session import Session
from kvfs.index.tables import DROPPED, SegmentRow
from kvfs.system.files import Files
from tests.stores import counters, restored, seeded, segment_files, tiny, tokens_of

LAYOUT = tiny(page_tokens=64, head_dim=16)
CHUNKS = 50  # a prompt takes most of a segment


class Stubborn(Files):
    """Files for which chosen calls fail."""

    refused: Callable[[str, str], bool] = staticmethod(lambda call, name: False)
    error = errno.EIO

    def _ask(self, call: str, name: str) -> None:
        if self.refused(call, name):
            raise OSError(self.error, "refused")

    def rename(self, src: str, dst: str, **how: Any) -> None:
        self._ask("rename", src)
        super().rename(src, dst, **how)

    def unlink(self, name: str, **how: Any) -> None:
        self._ask("unlink", name)
        super().unlink(name, **how)

    def open(self, name: str, flags: int, *rest: Any, **how: Any) -> int:
        self._ask("open", name)
        return super().open(name, flags, *rest, **how)


@pytest.fixture
def files() -> Stubborn:
    return Stubborn()


@pytest.fixture
def store(memory_path: Path, files: Stubborn) -> Iterator[kvfs.Store]:
    """A store that relocates nothing, so that all of it can be dropped."""
    with kvfs.open(memory_path / "store", capacity="24MiB", segment_bytes="1MiB", files=files) as opened:
        opened._shared.services().evictor._relocate = lambda *_: None  # type: ignore[method-assign]
        yield opened


def fill(store: kvfs.Store, prompts: int) -> list[str]:
    """Store so many prompts; the names of the segments, which are several."""
    ns = store.namespace("m", LAYOUT, "r1")
    for seed in range(prompts):
        result = ns.put(tokens_of(seed, CHUNKS, 64), seeded(seed, CHUNKS * LAYOUT.page_bytes))
        assert result.stored + result.skipped == CHUNKS
    return [file.name for file in segment_files(Path(store.path))]


@pytest.mark.parametrize("call", ["rename", "unlink", "open"])
def test_one_segment_that_cannot_be_removed_does_not_keep_the_others(
    store: kvfs.Store, files: Stubborn, call: str
) -> None:
    names = fill(store, 8)
    assert len(names) > 4
    files.refused = lambda what, name: (what, name) == (call, names[0])
    store._shared.services().active.finish_all()
    store.gc(0)
    states = store.stats()["segments"]
    assert states["dropped"] == 1 and states["sealed"] + states["active"] == 0
    assert 0 < store.stats()["used_bytes"] < 3 << 20, "it stays charged"
    assert counters(store)["evict_errors"]
    files.refused = lambda what, name: False
    store.gc(0)
    assert store.stats()["used_bytes"] == 0
    assert segment_files(Path(store.path)) == [] == list((Path(store.path) / "doomed").iterdir())


def test_a_store_goes_on_although_a_segment_cannot_be_removed(store: kvfs.Store, files: Stubborn) -> None:
    names = fill(store, 8)
    files.refused = lambda what, name: (what, name) == ("unlink", names[0])
    store._shared.services().active.finish_all()
    store._shared.services().evictor.reclaimer.drop(store._shared.c.index.read(lambda s: s.segments()[0][0], 5.0))
    fill(store, 40)
    assert store.namespace("m", LAYOUT, "r1").match(tokens_of(39, CHUNKS, 64)).chunks == CHUNKS
    assert counters(store)["segments_reclaimed"] > 2


def test_a_directory_in_the_way_is_moved_aside(store: kvfs.Store) -> None:
    names, path = fill(store, 8), Path(store.path)
    (path / "doomed" / names[0]).mkdir()
    (path / "doomed" / names[0] / "notes").write_text("mine")
    store._shared.services().active.finish_all()
    store.gc(0)
    assert store.stats()["used_bytes"] == 0 and segment_files(path) == []
    [aside] = (path / "quarantine").iterdir()
    assert aside.name.startswith(names[0]) and (aside / "notes").read_text() == "mine"


def test_if_nothing_can_be_removed_nothing_more_is_dropped(store: kvfs.Store, files: Stubborn) -> None:
    """To drop more would lose pages and free nothing."""
    names = fill(store, 8)
    assert len(names) > FAILURES_MAX
    files.refused = lambda what, name: what == "unlink" and name.endswith(".kvs")
    store._shared.services().active.finish_all()
    for _ in range(3):
        store.gc(0)
    assert store.stats()["segments"]["dropped"] == FAILURES_MAX
    files.refused = lambda what, name: False
    store.gc(0)
    assert store.stats()["used_bytes"] == 0


def test_a_purge_reports_a_dropped_segment_that_could_not_be_removed(store: kvfs.Store, files: Stubborn) -> None:
    """A rebuild would name its pages again."""
    names = fill(store, 8)
    files.refused = lambda what, name: (what, name) == ("rename", names[0])
    store._shared.services().active.finish_all()
    store.gc(0)
    with pytest.raises(kvfs.StoreAccessError, match="refused"):
        store.purge("m")


def test_a_marked_segment_whose_end_cannot_be_synced_stays_charged_and_marked(
    store: kvfs.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut may bring its file back, and a rebuild then needs the mark."""
    store._shared.background.stop()
    fill(store, 4)
    store._shared.services().active.finish_all()
    (number, row), *others = rows(store)
    marks, reclaimer = store._shared.c.marks, store._shared.services().evictor.reclaimer
    marks.write(PurgeMark(row.segment_id, PURGE_ALL | PURGE_PENDING, 0, b""))
    fsync, doomed = Files.fsync, store._shared.c.directory.sub("doomed")

    def fail(self: Files, fd: int) -> None:
        if fd == doomed:
            raise OSError(errno.EIO, "refused")
        fsync(self, fd)

    with monkeypatch.context() as patch:
        patch.setattr(Files, "fsync", fail)
        assert not reclaimer.drop(number, row.segment_id) and reclaimer.drop(others[0][0])
        assert reclaimer.reclaim_dropped() == 0
    assert marks.ids() == {row.segment_id} and {n for n, r in rows(store) if r.state == DROPPED} == {number}
    assert reclaimer.reclaim_dropped() == row.allocated and not marks.ids()


# -- files that were removed -------------------------------------------------------------------


def rows(store: kvfs.Store) -> list[tuple[int, SegmentRow]]:
    return store._shared.c.index.read(lambda s: s.segments(), 5.0)


@pytest.mark.parametrize("sealed", [False, True])
def test_pages_of_segments_that_vanish_are_stored_again(store: kvfs.Store, sealed: bool) -> None:
    """The index called them stored: each match restored nothing, and no put stored them again."""
    fill(store, 3)
    if sealed:
        store._shared.services().active.finish_all()
    for file in segment_files(Path(store.path)):
        file.unlink()
    ns = store.namespace("m", LAYOUT, "r1")
    end = time.monotonic() + 20.0
    for seed in range(3):
        tokens, pages = tokens_of(seed, CHUNKS, 64), seeded(seed, CHUNKS * LAYOUT.page_bytes)
        while ns.match(tokens).chunks < CHUNKS and time.monotonic() < end:
            ns.put(tokens, pages)
            time.sleep(0.05)
        assert restored(ns, tokens) == pages
    assert counters(store)["segments_missing"] >= 2
    assert store.verify().ok


def test_a_segment_that_cannot_be_opened_now_is_not_dropped(store: kvfs.Store, files: Stubborn) -> None:
    names = fill(store, 3)
    files.refused = lambda what, name: what == "open" and name in names
    ns = store.namespace("m", LAYOUT, "r1")
    assert [ns.match(tokens_of(seed, CHUNKS, 64)).chunks for seed in range(3)] == [0] * 3
    store._shared.services().evictor.drop_missing()
    files.refused = lambda what, name: False
    assert [ns.match(tokens_of(seed, CHUNKS, 64)).chunks for seed in range(3)] == [CHUNKS] * 3
    assert "segments_missing" not in counters(store)


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_rebuild_by_a_process_short_of_descriptors_leaves_no_segment_out(
    store: kvfs.Store, files: Stubborn, error: int
) -> None:
    names, core = fill(store, 3), store._shared
    core.background.stop()
    core.services().active.finish_all()
    core.c.index.retire()
    files.error, files.refused = error, lambda what, name: (what, name) == ("open", names[0])
    with pytest.raises(OSError, match="refused"):
        core.rebuild_if_needed()
    files.refused = lambda what, name: False
    core.rebuild_if_needed()
    ns = store.namespace("m", LAYOUT, "r1")
    assert [ns.match(tokens_of(seed, CHUNKS, 64)).chunks for seed in range(3)] == [CHUNKS] * 3


def test_only_what_is_missing_is_dropped(store: kvfs.Store) -> None:
    """Neither a segment that has its file, nor one of another generation, nor one that is being created."""
    fill(store, 3)
    core, path = store._shared, Path(store.path)
    generation = core.c.index.generation

    def dropped(number: int, row: SegmentRow, generation: str) -> bool:
        return core.services().evictor.reclaimer.drop_missing(row.segment_id, number, generation)

    assert not any(dropped(number, row, generation) for number, row in rows(store))
    for file in segment_files(path):
        file.unlink()
    assert not any(dropped(number, row, "0" * 16) for number, row in rows(store))
    (first, one), (second, another) = rows(store)[:2]
    assert not dropped(first, another, generation)

    def make(session: Session) -> int:
        limits = ledger.budget(core.settings)
        return ledger.new_segment(session, bytes(16), core.c.owner, ledger.ANY_CLASS, 0, 4096, limits)

    with core.services().active.lock(
        next(iter(core.services().active._writers))
        # background tasks would release a row without a writer
    ):
        number = core.c.index.write(make, 5.0)
        assert not dropped(number, dict(rows(store))[number], generation)
    assert dropped(first, one, generation) and dropped(second, another, generation)
    assert not dropped(first, one, generation)


def test_a_table_that_could_not_be_read_once_is_read_again(store: kvfs.Store, files: Stubborn) -> None:
    """It counted as a segment without pages until its next use, and was dropped first."""
    names, evictor = fill(store, 3), store._shared.services().evictor
    files.refused = lambda what, name: what == "open" and name in names
    _, blind, _ = evictor.victims.survey()
    files.refused = lambda what, name: False
    _, seen, _ = evictor.victims.survey()
    assert not any(summary.fragments.stamps for summary in blind) and all(summary.fragments.stamps for summary in seen)
