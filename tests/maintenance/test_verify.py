"""verify names each kind of damage; a repair mends it or moves it aside, and the next run finds none."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.errors import IndexUnavailableError
from kvfs.eviction.dry_run import make_plan
from kvfs.eviction.policy import EvictionPlan, Policy, Summary
from kvfs.index.rows import pack_row, parse_row
from kvfs.index.session import Session
from kvfs.maintenance.verify import Verifier, _headers
from kvfs.system.files import Files
from tests.stores import TINY_BYTES, restored, seeded, segment_files, tiny, tokens_of

PROMPTS = 6


@pytest.fixture
def path(store_path: Path) -> Path:
    with kvfs.open(store_path, capacity="32MiB") as store:
        ns = store.namespace("alpha", tiny(), "1a")
        for seed in range(PROMPTS):
            ns.put(tokens_of(seed, 60), seeded(seed, 60 * TINY_BYTES))
    return store_path


def flip_payload(path: Path) -> None:
    for file in segment_files(path):
        data = bytearray(file.read_bytes())
        at = data.find(seeded(3, TINY_BYTES))
        if at >= 0:
            data[at + 7] ^= 1
            file.write_bytes(data)


def flip_header(path: Path) -> None:
    file = segment_files(path)[0]
    data = bytearray(file.read_bytes())
    data[20] ^= 1
    file.write_bytes(data)


def flip_entry(path: Path) -> None:
    file = segment_files(path)[0]
    data = bytearray(file.read_bytes())
    data[4096 + 160 * 5 + 40] ^= 1
    file.write_bytes(data)


def truncate(path: Path) -> None:
    file = segment_files(path)[0]
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size // 2)


def foreign_segment(path: Path) -> None:
    other = path.parent / "other"
    with kvfs.open(other, capacity="32MiB") as store:
        store.namespace("beta", tiny(), "1a").put(tokens_of(1, 4), seeded(1, 4 * TINY_BYTES))
    shutil.copy(segment_files(other)[0], path / "segments")


def garbage(path: Path) -> None:
    for name in ("notes.txt", "z" * 32 + ".kvs", "-rf"):
        (path / "segments" / name).write_bytes(b"hello")


def lost_segment(path: Path) -> None:
    segment_files(path)[1].unlink()


@pytest.mark.parametrize(
    "damage", [flip_payload, flip_header, flip_entry, truncate, foreign_segment, garbage, lost_segment]
)
def test_damage_is_named_and_mended(path: Path, damage: Callable[[Path], None]) -> None:
    damage(path)
    with kvfs.open(path) as store:
        report = store.verify()
        assert not report.ok and report.problems
        mended = store.verify(repair=True)
        assert mended.repaired or damage is lost_segment  # a background task drops it as well, and may have been faster
        assert store.wait_ready()
        left = store.verify()
        assert left.ok, left.problems
        ns = store.namespace("alpha", tiny(), "1a")
        for seed in range(PROMPTS):
            assert seeded(seed, 60 * TINY_BYTES).startswith(restored(ns, tokens_of(seed, 60)))


@pytest.mark.parametrize("finder", ["verify", "get"])
def test_counts_after_a_repair_equal_those_of_a_rebuilt_index(path: Path, finder: str) -> None:
    flip_payload(path)

    def counts(store: kvfs.Store) -> tuple[int, int]:
        (info,) = store.catalog.namespaces()
        return info.pages, info.nbytes

    with kvfs.open(path) as store:
        ns = store.namespace("alpha", tiny(), "1a")
        pages, nbytes = counts(store)
        if finder == "verify":
            assert store.verify(1.0, repair=True).repaired == 1
        else:
            assert len(restored(ns, tokens_of(3, 60))) < 60 * TINY_BYTES
        assert counts(store) == (pages - 1, nbytes - TINY_BYTES)
        assert ns.put(tokens_of(3, 60), seeded(3, 60 * TINY_BYTES)).stored == 1
        assert counts(store) == (pages, nbytes)
    shutil.rmtree(path / "index")
    with kvfs.open(path) as store:
        assert store.wait_ready(60.0) and counts(store) == (pages, nbytes)


def test_repair_removes_nothing_from_an_index_that_it_did_not_check(path: Path) -> None:
    """In another index, numbers mean other segments."""
    flip_payload(path)
    with kvfs.open(path) as store:
        verifier = Verifier(store._shared.c, 1.0, 0)
        assert verifier.run().bad_pages == 1
        (number,) = verifier._bad
        store._shared.c.index.retire()
        store._shared.rebuild_if_needed()
        rows = store._shared.c.index.read(lambda s: s.segments(), 2.0)
        verifier._bad = {n: set(range(1000)) for n, _ in rows} | {number: set(range(1000))}
        verifier.repair()
        assert verifier.report.repaired == 0 and "check again" in verifier.report.problems[-1]
        assert store.verify(repair=True).repaired == 1
        ns = store.namespace("alpha", tiny(), "1a")
        whole = [seed for seed in range(PROMPTS) if len(restored(ns, tokens_of(seed, 60))) == 60 * TINY_BYTES]
        assert whole == [0, 1, 2, 4, 5]


def test_foreign_files_are_moved_aside_and_never_deleted(path: Path) -> None:
    garbage(path)
    with kvfs.open(path) as store:
        store.verify(0.0, repair=True)
    kept = [p.read_bytes() for p in (path / "quarantine").iterdir()]
    assert kept == [b"hello"] * 3


def test_a_full_quarantine_leaves_foreign_files_in_place(path: Path) -> None:
    for i in range(70):
        (path / "segments" / f"notes-{i}").write_bytes(b"hello")
    with kvfs.open(path) as store:
        report = store.verify(0.0, repair=True)
        assert report.foreign_files == 70 and report.repaired == 64
        assert any("quarantine/ is full" in line for line in report.problems)


def test_a_deleted_index_is_rebuilt_by_opening(path: Path) -> None:
    shutil.rmtree(path / "index")
    with kvfs.open(path) as store:
        assert store.wait_ready() and store.verify().ok
        assert restored(store.namespace("alpha", tiny(), "1a"), tokens_of(1, 60)) == seeded(1, 60 * TINY_BYTES)


def test_a_plan_of_gc_has_the_budget_of_what_it_relocates(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = list[int]()

    class Noting(Policy):
        def choose(self, summaries: Iterable[Summary], now_us: int, budget_bytes: int) -> EvictionPlan | None:
            budgets.append(budget_bytes)
            choice = super().choose(summaries, now_us, budget_bytes)
            return choice and replace(choice, relocate_bytes=1000)

    monkeypatch.setattr("kvfs.eviction.dry_run.Policy", Noting)
    with kvfs.open(path) as store:
        core = store._shared
        evictor = core.services().evictor
        evictor.budget.tokens = 1500.0
        plan = make_plan(core.c, evictor, 0)
        assert len(plan.steps) >= 2 and evictor.budget.tokens == 1500.0
    assert budgets[: len(plan.steps)] == [1500, 500, *[0] * (len(plan.steps) - 2)]


def test_the_headers_of_all_segments_are_found(path: Path) -> None:
    (path / "segments" / f"{'0' * 32}.kvs").write_bytes(bytes(8192))
    with kvfs.open(path) as store:
        known = {row.segment_id for _, row in store.catalog.segment_rows()}
        assert {header.segment_id for header in _headers(store._shared.c.directory)} == known != set()


def test_gc_does_about_what_its_plan_shows(path: Path) -> None:
    with kvfs.open(path) as store:
        core = store._shared
        used = store.stats()["used_bytes"]
        assert make_plan(core.c, core.services().evictor, None).steps == ()
        plan = store.gc_plan(used // 2)
        before = {row.segment_id for _, row in store.catalog.segment_rows()}
        again = store.gc_plan(used // 2)
        assert {row.segment_id for _, row in store.catalog.segment_rows()} == before, "a plan changed something"
        assert abs(len(again.steps) - len(plan.steps)) <= 1
        done = store.gc(used // 2)
        after = {row.segment_id for _, row in store.catalog.segment_rows()}
        # ages change meanwhile, so of two that are worth about the same either may be evicted
        assert len(before - after) == done["segments_dropped"] > 1
        assert abs(len(plan.steps) - done["segments_dropped"]) <= 1
        assert done["bytes_after"] <= used // 2 and plan.used_bytes - plan.freed_bytes <= used // 2


@pytest.mark.parametrize("target", [-1, "much", 1.5])
def test_a_target_that_is_no_size_evicts_nothing(path: Path, target: Any) -> None:
    with kvfs.open(path) as store:
        for call in (store.gc, store.gc_plan):
            with pytest.raises(kvfs.ConfigError, match=f"target_bytes is {target!r}: give bytes"):
                call(target)
        assert store.gc_plan("1KiB").target_bytes == 1024


def test_gc_ends_when_its_time_is_over(path: Path) -> None:
    with kvfs.open(path) as store:
        assert store.gc(0, seconds=0.0)["segments_dropped"] == 0
        assert store.gc(0)["segments_dropped"] > 0


def test_verify_does_not_hang_where_there_is_no_index(path: Path) -> None:
    with kvfs.open(path) as store:
        store._shared.c.index.retire()
        with contextlib.suppress(IndexUnavailableError):
            store.catalog.namespaces()
        assert store.wait_ready() and store.catalog.namespaces()[0].pages == 60 * PROMPTS


@pytest.mark.parametrize("wrong", [{"codec": 2}, {"stored_bytes": TINY_BYTES - 8}])
def test_a_row_that_misreads_good_bytes_is_reported(path: Path, wrong: dict[str, int]) -> None:
    with kvfs.open(path) as store:
        ns = store.namespace("alpha", tiny(), "1a")

        def damage(session: Session) -> None:
            with session.txn.cursor(db=session.db.pages) as cursor:
                assert cursor.first()
                key, value = cursor.item()
            row = parse_row(key, value)
            assert row is not None
            places = {j: place._replace(**wrong) if not j else place for j, place in row.places()}
            session.put_row(key, pack_row(key, places, row.leaves))

        store._shared.c.index.write(damage, 2.0)
        assert store.verify(0.0).index_errors == 1
        store.verify(repair=True)
        assert store.wait_ready() and store.verify().ok
        for seed in range(PROMPTS):
            assert restored(ns, tokens_of(seed, 60)) == seeded(seed, 60 * TINY_BYTES)


class Refusing(Files):
    """A user without read permission for segments."""

    def open(
        self, name: str, flags: int, mode: int = 0o600, *, dir_fd: int, keep: list[int | None] | None = None
    ) -> int:
        if name.endswith(".kvs"):
            raise PermissionError(errno.EACCES, "Permission denied", name)
        return super().open(name, flags, mode, dir_fd=dir_fd, keep=keep)


def test_a_store_of_unreadable_segments_is_not_reported_as_empty(path: Path) -> None:
    """The index that a reader builds for itself holds none of their pages, so none was missing."""
    (path / "index" / "CURRENT").unlink()
    with kvfs.open(path, read_only=True, files=Refusing()) as store:
        assert store.wait_ready(30.0)
        report = store.verify()
    assert report.bad_segments == len(segment_files(path)) and "cannot be opened" in report.problems[0], report


@pytest.mark.parametrize("make", [lambda p: p.symlink_to("/etc/passwd"), Path.mkdir], ids=["link", "folder"])
def test_what_is_no_file_is_moved_aside_even_if_it_has_a_segments_name(
    path: Path, make: Callable[[Path], None]
) -> None:
    """A rebuild ignores it: it was never repaired, and each repair discarded the index."""
    make(path / "segments" / f"{'0' * 32}.kvs")
    with kvfs.open(path) as store:
        assert store.wait_ready(30.0)
        before = store.stats()["index"]["generation"]
        report = store.verify(0.0, repair=True)
        assert (report.foreign_files, report.bad_segments, report.repaired) == (1, 0, 1)
        assert store.verify(0.0).ok and store.stats()["index"]["generation"] == before
    assert len(list((path / "quarantine").iterdir())) == 1
