"""What a verification says, number by number, of each kind of damage; what a repair counts, and how far it gets."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.directory.root import Directory
from kvfs.errors import ConfigError
from kvfs.format import segment as fmt
from kvfs.index.session import Session
from kvfs.index.tables import DROPPED
from kvfs.maintenance.verify import Verification, Verifier, _digest, restore_super
from kvfs.system.files import Files
from tests.stores import TINY_BYTES, scanned, seeded, segment_files, tiny, tokens_of

PAGES = 120  # two prompts of sixty, in segments of at most 57 pages


@pytest.fixture
def path(memory_path: Path) -> Path:
    where = memory_path / "store"
    with kvfs.open(where, capacity="32MiB") as store:
        ns = store.namespace("alpha", tiny(), "1a")
        for seed in range(2):
            assert ns.put(tokens_of(seed, 60), seeded(seed, 60 * TINY_BYTES)).stored == 60
    return where


def checked(path: Path, **how: Any) -> tuple[Verification, list[tuple[int, int]]]:
    seen: list[tuple[int, int]] = []
    with kvfs.open(path) as store:
        store._shared.background.stop()
        charged = store._shared.c.index.read(lambda s: s.ledger().used, 5.0)
        report = store.verify(progress=lambda done, total: seen.append((done, total)), **how)
    assert all(done <= total == charged for done, total in seen) and seen[-1] == (charged, charged)
    return report, seen


def good(path: Path, without: Path | None = None) -> dict[str, Any]:
    files = [file for file in segment_files(path) if file != without]
    pages = sum(len(list(scanned(file).parts())) for file in files)
    return {"segments": len(files), "pages": pages, "bytes": pages * TINY_BYTES, "index_pages": pages}


def test_a_whole_store(path: Path) -> None:
    report, seen = checked(path)
    assert report == Verification(segments=3, pages=PAGES, bytes=PAGES * TINY_BYTES, index_pages=PAGES) and report.ok
    assert len(seen) == PAGES + 3
    assert seen[0][0] == 16384 + 4096 + TINY_BYTES, "the first page is behind the table and the descriptor"
    report, seen = checked(path, sample=0.0)
    assert report == Verification(segments=3, index_pages=PAGES) and len(seen) == 3
    some, _ = checked(path, sample=0.5)
    assert 30 < some.pages < 90 and checked(path, sample=0.5)[0] == some, "the same sample for a seed"
    assert checked(path, sample=0.5, seed=1)[0].pages != some.pages or checked(path, sample=0.5, seed=2)[0] != some
    assert checked(path, repair=True)[0].repaired == 0


@pytest.mark.parametrize("sample", [-0.01, 1.01])
def test_a_share_of_the_pages_is_between_nothing_and_all(path: Path, sample: float) -> None:
    with kvfs.open(path) as store, pytest.raises(ConfigError, match="pass a share from 0"):
        store.verify(sample)


def change(at: int) -> Callable[[Path], None]:
    def changed(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[at] ^= 1
        file.write_bytes(data)

    return changed


@pytest.mark.parametrize(
    ("damage", "segments", "says"),
    [
        (change(20), 0, "its header is damaged or another segment's"),
        (change(4096 + 160 * 5 + 40), 1, "{n} records are published, 5 can be read"),
        (lambda file: file.unlink(), 0, "cannot be opened"),
        (lambda file: file.write_bytes(b""), 0, "its header is damaged or another segment's"),
    ],
)
def test_a_damaged_segment(path: Path, damage: Callable[[Path], None], segments: int, says: str) -> None:
    file = segment_files(path)[1]
    records, left = len(scanned(file).entries), good(path, without=file)
    damage(file)
    report, _ = checked(path)
    pages = 4 if segments else 0  # of those five, one is the descriptor's
    assert report == Verification(
        segments=2 + segments, pages=left["pages"] + pages, bytes=(left["pages"] + pages) * TINY_BYTES,
        index_pages=PAGES if segments else left["pages"], bad_segments=1,
        problems=[f"segment {file.stem}: {says.format(n=records)}"],
    )  # fmt: skip
    assert not report.ok
    mended, _ = checked(path, repair=True)
    assert mended.repaired == 1


@pytest.mark.parametrize(
    ("at", "why"),
    [(0, "payload and leaf checksums disagree"), (1 << 20, "payload and leaf checksums disagree")],
    ids=["payload", "leaves"],
)
def test_a_damaged_page(path: Path, at: int, why: str) -> None:
    """The first page of the second prompt: 16 tokens from the beginning of it."""
    wanted = seeded(1, TINY_BYTES)
    (file,) = (f for f in segment_files(path) if wanted in f.read_bytes())
    entry = next(e for e in scanned(file).parts() if file.read_bytes()[e.payload :].startswith(wanted))
    change(entry.leaves if at else entry.payload)(file)
    report, _ = checked(path)
    line = f"alpha@1a tokens 0-16, segment {file.stem} record {entry.seq}: {why}"
    assert report == Verification(**good(path), bad_pages=1, problems=[line]) and not report.ok
    mended, _ = checked(path, repair=True)
    assert (mended.bad_pages, mended.repaired) == (1, 1)
    after, _ = checked(path)
    assert after == Verification(**{**good(path), "index_pages": PAGES - 1}), "what no row names is no bad page"


def test_a_damaged_descriptor_makes_its_pages_bad(path: Path) -> None:
    file = segment_files(path)[0]
    pages = len(list(scanned(file).parts()))
    change(16384 + 3)(file)
    report, _ = checked(path)
    assert report.bad_pages == pages and not report.ok and len(report.problems) == pages
    assert all(line.endswith("its namespace record is damaged") for line in report.problems)
    mended, _ = checked(path, repair=True)
    assert mended.repaired == pages
    assert checked(path)[0].ok


def test_rows_of_the_index_that_contradict_or_are_damaged(path: Path) -> None:
    with kvfs.open(path) as store:
        core = store._shared
        core.background.stop()

        def break_rows(session: Session) -> list[str]:
            rows = [(bytes(key), bytes(value)) for key, value in session.txn.cursor(db=session.db.pages)]
            for key, value in rows[:2]:
                session.put_row(key, value[:-1])
            return [key.hex()[:16] for key, _ in rows]

        keys = core.c.index.write(break_rows, 5.0)
        report = Verifier(core.c, 0.0, 0).run()
        assert len(keys) == 4, "two prompts in rows of 32 pages"
        assert report.index_errors == 2 and report.index_pages in (2 * 28, 28 + 32, 2 * 32)
        assert report.problems == [f"index row {key}: damaged" for key in keys[:2]] and not report.ok
        mended = store.verify(0.0, repair=True)
        assert mended.repaired == 2
        core.rebuild_if_needed()
        assert store.verify().ok


def test_a_ledger_that_is_not_the_sum_of_its_segments(path: Path) -> None:
    with kvfs.open(path) as store:
        core = store._shared
        core.background.stop()
        wrong = lambda s: s._set_ledger(s.ledger()._replace(used=s.ledger().used + 1))  # noqa: E731
        core.c.index.write(wrong, 5.0)
        report = store.verify(0.0, repair=True)
        assert (report.index_errors, report.repaired) == (1, 1)
        assert report.problems == ["index: the ledger is not the sum of its segments"]


def test_files_that_the_index_does_not_know(path: Path) -> None:
    folder = path / "segments"
    (folder / "notes.txt").write_bytes(b"hello")
    (folder / ("0" * 32 + ".kvs")).mkdir()
    (folder / ("1" * 32 + ".kvs")).write_bytes(segment_files(path)[1].read_bytes())
    with kvfs.open(path) as store:
        store._shared.background.stop()
        report = store.verify(0.0)
        assert (report.foreign_files, report.bad_segments, report.segments) == (2, 1, 3)
        assert sorted(report.problems) == [
            f"segments/{'0' * 32}.kvs: not a file of kvfs",
            f"segments/{'1' * 32}.kvs: the index does not know it",
            "segments/notes.txt: not a file of kvfs",
        ]
        mended = store.verify(0.0, repair=True)
        assert mended.repaired == 3 and len(list((path / "quarantine").iterdir())) == 2


def test_a_dropped_segment_is_not_checked(path: Path) -> None:
    with kvfs.open(path) as store:
        core = store._shared
        core.background.stop()
        with store.namespace("alpha", tiny(), "1a").match(tokens_of(0, 60)) as match:
            assert match.chunks == 60
            number = core.c.index.read(lambda s: s.segments(), 5.0)[0][0]
            core.services().evictor.reclaimer.drop(number)
            report = store.verify()
        assert report.segments == 2 and report.ok and report.index_pages == report.pages < PAGES


def test_a_report_has_a_bounded_number_of_lines() -> None:
    report = Verification()
    for n in range(1001):
        report.note(str(n))
    assert report.problems == [str(n) for n in range(1000)]
    assert report.ok
    for name in ("bad_pages", "bad_segments", "index_errors", "foreign_files"):
        damaged = Verification()
        setattr(damaged, name, 1)
        assert not damaged.ok
    assert Verification(segments=1, pages=1, bytes=1, index_pages=1, repaired=1).ok


def test_each_file_that_cannot_be_moved_aside_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["a-note", "b-note", "c-note"]
    for name in names:
        (path / "segments" / name).write_bytes(b"x")
    with kvfs.open(path) as store:
        store._shared.background.stop()
        files = store._shared.c.files
        rename = files.rename

        def refuse(source: str, target: str, **how: int) -> None:
            if source == "b-note":
                raise OSError(1, "Operation not permitted")
            rename(source, target, **how)

        monkeypatch.setattr(files, "rename", refuse, raising=False)
        report = store.verify(0.0, repair=True)
        assert report.repaired == 2 and "segments/b-note: stays (Operation not permitted)" in report.problems
        for name in names:
            (path / "segments" / name).write_bytes(b"x")
        monkeypatch.setattr("kvfs.maintenance.verify.QUARANTINE_FILES_MAX", 2)
        report = store.verify(0.0, repair=True)
        full = [
            line for line in report.problems if line.endswith("stays, quarantine/ is full; remove its files by hand")
        ]
        assert len(full) == 3 and report.repaired == 0


@pytest.mark.parametrize(
    ("records", "error", "bad"),
    [(5, 0, True), (0, 0, False), (0, errno.EACCES, True), (0, errno.EPERM, True), (0, errno.EIO, True),
     (0, errno.ENOENT, False), (0, errno.EMFILE, False), (5, errno.ENOENT, True)],
)  # fmt: skip
def test_a_segment_that_cannot_be_opened_is_bad_if_it_holds_pages_or_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch, records: int, error: int, bad: bool
) -> None:
    """One without records may be a file that another process is about to remove."""
    with kvfs.open(path) as store:
        core = store._shared
        core.background.stop()
        number, row = core.c.index.read(lambda s: s.segments(), 5.0)[0]
        core.c.index.write(lambda s: s.set_segment(number, row, row._replace(records=records)), 5.0)
        files = core.c.files
        name, opens = f"{row.segment_id.hex()}.kvs", files.open

        def fail(wanted: str, flags: int, *args: Any, **how: Any) -> int:
            if error and wanted == name:
                raise OSError(error, "refused")
            return opens(wanted, flags, *args, **how)

        acquire = core.c.segments.acquire
        monkeypatch.setattr(core.c.segments, "acquire", lambda n, *how: None if n == number else acquire(n, *how))
        monkeypatch.setattr(files, "open", fail, raising=False)
        report = Verifier(core.c, 0.0, 0).run()
    assert (report.segments, report.bad_segments) == (2, int(bad))
    assert report.problems == [f"segment {row.segment_id.hex()}: cannot be opened"] * bad


def test_a_segment_that_was_dropped_meanwhile_is_not_bad(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with kvfs.open(path) as store:
        core = store._shared
        core.background.stop()
        rows = dict(core.c.index.read(lambda s: s.segments(), 5.0))
        for change in ("dropped", "gone", "another"):
            verifier = Verifier(core.c, 0.0, 0)
            now = {
                "dropped": rows[1]._replace(state=DROPPED),
                "gone": None,
                "another": rows[1]._replace(segment_id=b"x" * 16),
            }[change]
            monkeypatch.setattr(Session, "segment", lambda self, number, now=now: now)
            assert not verifier._still_there(1, rows[1])
        monkeypatch.undo()
        assert Verifier(core.c, 0.0, 0)._still_there(1, rows[1])


def with_header(path: Path, name: str, **changes: Any) -> None:
    """A segment file that is only a header."""
    header = fmt.Header(bytes.fromhex(name), b"s" * 16, 50, 0, bytes(16))
    (path / "segments" / f"{name}.kvs").write_bytes(fmt.pack_header(header._replace(**changes)))


@pytest.mark.parametrize(
    ("ids", "store_id", "created"),
    [
        ([(b"a" * 16, 70), (b"b" * 16, 40), (b"a" * 16, 60)], b"a" * 16, 60),
        ([(b"a" * 16, 70)], b"a" * 16, 70),
        ([], None, None),
    ],
)
def test_a_lost_super_file_names_the_store_of_most_segments_and_its_first_time(
    tmp_path: Path, ids: list[tuple[bytes, int]], store_id: bytes | None, created: int | None
) -> None:
    kvfs.open(tmp_path / "store", capacity="16MiB").close()
    path = tmp_path / "store"
    assert not restore_super(str(path), Files()), "it is not lost"
    (path / "super").unlink()
    for n, (one, created_us) in enumerate(ids):
        with_header(path, f"{n:032x}", store_id=one, created_us=created_us)
    if store_id is None:
        (path / "pins" / "0123456789abcdef").touch()  # else nothing shows that there was a store
    else:
        with_header(path, "a" * 32, segment_id=b"x" * 16, store_id=b"c" * 16)  # under the name of another
        (path / "segments" / ("b" * 32 + ".kvs")).write_bytes(b"damaged")
        (path / "segments" / "notes").write_bytes(b"x")
    assert restore_super(str(path), Files())
    with contextlib.closing(Directory(str(path), Files(), read_only=True)) as directory:
        found = directory.store_id()
    body = json.loads((path / "super").read_bytes())
    assert (store_id is None and len(found) == 16) or (found, body["created_us"]) == (store_id, created)
    assert not restore_super(str(path), Files())


@pytest.mark.parametrize(("ns_seq", "named"), [(0, True), (1, False), (2, False), (99, False)])
def test_a_page_belongs_to_the_namespace_that_its_entry_names(path: Path, ns_seq: int, named: bool) -> None:
    scan = scanned(segment_files(path)[0])
    entries = scan.entries[:2]
    assert [e.kind for e in entries] == [fmt.KIND_NAMESPACE, fmt.KIND_PART]
    entry = entries[1]._replace(ns_seq=ns_seq)
    assert _digest(dataclasses.replace(scan, entries=entries), entry) == (entries[0].chunk_hash if named else b"")


@pytest.mark.parametrize(("error", "counts"), [(errno.EIO, True), (errno.EACCES, True), (errno.ENOMEM, False)])
def test_a_page_that_cannot_be_read_is_bad_unless_memory_is_short(
    path: Path, monkeypatch: pytest.MonkeyPatch, error: int, counts: bool
) -> None:
    with kvfs.open(path) as store:
        core = store._shared
        core.background.stop()
        calls: list[int] = []

        def fail(held: object, nbytes: int, offset: int) -> bytes:
            calls.append(offset)
            raise OSError(error, "broken")

        monkeypatch.setattr(core.c.segments, "read_bytes", fail)
        if counts:
            report = store.verify()
            assert report.bad_pages == PAGES == len(calls)
            assert all(line.endswith(": cannot be read (broken)") for line in report.problems)
        else:
            with pytest.raises(kvfs.KvfsError, match="too little memory to check a page; verify when more is free"):
                store.verify(repair=True)
            assert len(calls) == 1
