"""What a rebuild finds and what rows it makes, segment by segment, for each kind of damage."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.directory.config import Settings, make_settings
from kvfs.directory.purge_marks import PurgeMarks
from kvfs.directory.root import Directory
from kvfs.errors import IndexUnavailableError
from kvfs.format import segment as fmt
from kvfs.index import ledger
from kvfs.index.lmdb_files import open_environment, open_tables
from kvfs.index.session import Session
from kvfs.index.tables import ACTIVE, DROPPED, SEALED, SegmentRow
from kvfs.maintenance.rebuild import Report, build
from kvfs.system.files import Files
from tests.stores import TINY_BYTES, scanned, seeded, segment_files, tiny, tokens_of

PAGES = 12


class Broken(Files):
    """Opens of one file fail."""

    def __init__(self, name: str, error: int) -> None:
        super().__init__()
        self._name, self._error = name, error

    def open(
        self, name: str, flags: int, mode: int = 0o600, *, dir_fd: int, keep: list[int | None] | None = None
    ) -> int:
        if name == self._name:
            raise OSError(self._error, os.strerror(self._error))
        return super().open(name, flags, mode, dir_fd=dir_fd, keep=keep)


@pytest.fixture
def path(memory_path: Path) -> Path:
    """Two sealed segments and one that is not."""
    where = memory_path / "store"
    with kvfs.open(where, capacity="16MiB") as store:
        store._shared.background.stop()
        for seed in range(3):
            store.namespace("m", tiny(), "1").put(tokens_of(seed, PAGES), seeded(seed, PAGES * TINY_BYTES))
            if seed < 2:
                store._shared.services().active.finish_all()
    return where


def store_id(path: Path) -> bytes:
    with contextlib.closing(Directory(str(path), Files(), read_only=True)) as directory:
        return directory.store_id()


def built(
    path: Path, *, alone: bool = True, settings: Settings | None = None, files: Files | None = None, **how: Any
) -> tuple[Report, dict[str, SegmentRow], int]:
    """(report, rows by the name of the segment, pages of the namespace by its contents)."""
    settings = settings or make_settings("16MiB")
    data = path.parent / "built.mdb"
    data.unlink(missing_ok=True)
    with (
        contextlib.closing(Directory(str(path), files or Files(), read_only=False)) as directory,
        data.open("x+b") as file,
    ):
        report = build(directory, file.fileno(), settings, store_id(path), alone=alone, **how)
        env = open_environment(file.fileno(), settings.index_bytes)
        tables = open_tables(env, create=False)
        with env.begin() as txn:
            session = Session(txn, tables, "", 0)
            assert session.check_ledger()
            rows = {row.segment_id.hex(): row for _, row in session.segments()}
            pages = sum(c.records for c in session.contents(b"", 999)[0])
            assert pages == report.pages
        env.close()
    return report, rows, pages


def by_state(path: Path) -> tuple[list[Path], Path]:
    files = segment_files(path)
    sealed = [f for f in files if scanned(f).seal is not None]
    (open_one,) = set(files) - set(sealed)
    return sealed, open_one


def test_a_whole_store(path: Path) -> None:
    sealed, unsealed = by_state(path)
    report, rows, _ = built(path)
    assert report == Report(segments=3, pages=3 * PAGES)
    for file in segment_files(path):
        scan = scanned(file)
        assert rows[file.stem] == SegmentRow(
            bytes.fromhex(file.stem), bytes(16), bytes(16), ACTIVE if file == unsealed else SEALED, 0, 1, PAGES + 1,
            ledger.charge(file.stat().st_blocks * 512, PAGES + 1), 16384 + 4096 * (1 + PAGES + 1), scan.table, 0,
        )  # fmt: skip
    _, rows, _ = built(path, alone=False)
    assert {row.state for row in rows.values()} == {SEALED}, "others may append to what is not sealed"
    assert len(sealed) == 2


def test_of_two_records_of_one_page_one_is_named(path: Path) -> None:
    sealed, _ = by_state(path)
    other = path / "segments" / ("f" * 32 + ".kvs")
    shutil.copy(sealed[0], other)
    report, rows, _ = built(path)
    assert report == Report(
        segments=3, pages=3 * PAGES, damaged_segments=1,
        problems=[f"segments/{other.name}: no valid header of this store, dropped"],
    )  # fmt: skip
    assert rows["f" * 32].state == DROPPED and rows["f" * 32].records == 0
    data = bytearray(sealed[0].read_bytes())
    header = fmt.parse_header(bytes(data[:4096]))
    assert header is not None
    # the same records under another id: entries are bound to their segment, so none of them counts
    data[:4096] = fmt.pack_header(header._replace(segment_id=bytes.fromhex("f" * 32)))
    other.write_bytes(data)
    report, rows, _ = built(path)
    assert (report.segments, report.pages, report.damaged_segments, report.duplicates) == (4, 3 * PAGES, 0, 0)
    assert (rows["f" * 32].state, rows["f" * 32].records) == (ACTIVE, 0), "nothing in it verifies, not even its seal"


def test_a_page_that_was_stored_twice(path: Path) -> None:
    shutil.rmtree(path / "index")
    with kvfs.open(path) as store:
        store._shared.background.stop()
        assert store.wait_ready()
        numbers = store._shared.c.index.read(lambda s: s.segments(), 5.0)
        for number, _ in numbers:
            store._shared.c.index.write(lambda s, n=number: ledger.mark_dropped(s, n, bytes(16)), 5.0)  # type: ignore[misc]
        store.namespace("m", tiny(), "1").put(tokens_of(0, PAGES), seeded(0, PAGES * TINY_BYTES))
    report, _, _ = built(path)
    assert (report.segments, report.pages, report.duplicates) == (4, 3 * PAGES, PAGES)


@pytest.mark.parametrize(
    ("damage", "state"),
    [(lambda f: f.write_bytes(b""), DROPPED), (lambda f: f.write_bytes(bytes(20_000)), DROPPED)],
    ids=["empty", "zeros"],
)
def test_a_file_without_a_header_is_dropped(path: Path, damage: Callable[[Path], object], state: int) -> None:
    file = segment_files(path)[0]
    damage(file)
    report, rows, _ = built(path)
    assert report == Report(
        segments=2, pages=2 * PAGES, damaged_segments=1,
        problems=[f"segments/{file.name}: no valid header of this store, dropped"],
    )  # fmt: skip
    assert rows[file.stem] == SegmentRow(
        bytes.fromhex(file.stem), bytes(16), bytes(16), state, 0, 1, 0,
        ledger.charge(file.stat().st_blocks * 512, 0), 16384, 4096, 0,
    )  # fmt: skip


@pytest.mark.parametrize("error", [errno.EIO, errno.EACCES])
def test_a_segment_that_cannot_be_read_is_charged(path: Path, error: int) -> None:
    file = segment_files(path)[0]
    report, rows, _ = built(path, files=Broken(file.name, error))
    assert report == Report(
        segments=2, pages=2 * PAGES, unreadable_segments=1, problems=[f"segments/{file.name}: {os.strerror(error)}"]
    )
    assert (rows[file.stem].state, rows[file.stem].records) == (SEALED, 0)
    assert rows[file.stem].allocated == ledger.charge(file.stat().st_blocks * 512, 0)


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENOMEM])
def test_a_process_that_is_short_of_descriptors_builds_nothing(path: Path, error: int) -> None:
    with pytest.raises(OSError, match=os.strerror(error)):
        built(path, files=Broken(segment_files(path)[0].name, error))


def test_what_is_doomed_is_dropped_and_what_is_no_segment_left_alone(path: Path) -> None:
    first, second, _ = segment_files(path)
    first.rename(path / "doomed" / first.name)
    (path / "segments" / "notes").write_bytes(b"x")
    (path / "doomed" / ("a" * 32 + ".kvs")).symlink_to("nowhere")
    report, rows, _ = built(path)
    assert report == Report(
        segments=2, pages=2 * PAGES,
        problems=["segments/notes: not a segment's name, left alone", f"doomed/{'a' * 32}.kvs: not a file, left alone"],
    )  # fmt: skip
    assert (rows[first.stem].state, rows[first.stem].records) == (DROPPED, PAGES + 1)
    assert rows[second.stem].state != DROPPED


def test_purged_records_get_no_rows(path: Path) -> None:
    first, second, third = segment_files(path)
    with contextlib.closing(Directory(str(path), Files(), read_only=False)) as directory:
        marks = PurgeMarks(directory)
        bits = bytearray(PAGES // 8 + 1)
        for seq in (1, 2, 5):
            bits[seq // 8] |= 1 << seq % 8
        marks.write(fmt.PurgeMark(bytes.fromhex(first.stem), 0, 1, bytes(bits)))
        marks.write(fmt.PurgeMark(bytes.fromhex(second.stem), fmt.PURGE_ALL, 0, b""))
    report, rows, _ = built(path)
    assert (report.segments, report.pages, report.purged) == (2, 2 * PAGES - 3, 3)
    assert rows[second.stem].state == DROPPED and rows[first.stem].records == PAGES + 1 and rows[third.stem].records


def test_what_has_expired_gets_no_rows(memory_path: Path) -> None:
    path = memory_path / "store"
    with kvfs.open(path, capacity="16MiB", quotas={"m": kvfs.Quota(ttl_seconds=1000)}) as store:
        store.namespace("m", tiny(), "1").put(tokens_of(1, PAGES), seeded(1, PAGES * TINY_BYTES))
    (file,) = segment_files(path)
    expires = max(e.expires for e in scanned(file).parts())

    class Later(Files):
        def __init__(self, now_s: int) -> None:
            super().__init__()
            self._now_s = now_s

        def now_us(self) -> int:
            return self._now_s * 1_000_000

    for now_s, expired in ((expires - 1, 0), (expires, PAGES)):
        report, rows, _ = built(path, files=Later(now_s))
        assert (report.pages, report.expired) == (PAGES - expired, expired)
        assert rows[file.stem].expires == expires


@pytest.mark.parametrize("level", ["cache", "batch", "sync"])
def test_what_a_power_cut_has_torn_gets_no_rows_where_bytes_are_synced(path: Path, level: str) -> None:
    """Of a segment that has no seal; it takes no more appends."""
    _, file = by_state(path)
    entries = list(scanned(file).parts())
    data = bytearray(file.read_bytes())
    data[entries[3].payload] ^= 1
    data[entries[5].leaves] ^= 1
    file.write_bytes(data)
    report, rows, _ = built(path, settings=make_settings("16MiB", sync=level))
    torn = 0 if level == "cache" else 2
    assert (report.pages, report.torn) == (3 * PAGES - torn, torn)
    assert rows[file.stem].state == (SEALED if torn else ACTIVE)


def test_a_segment_that_cannot_be_synced_is_left_out(path: Path) -> None:
    class Failing(Files):
        def fdatasync(self, fd: int) -> None:
            raise OSError(errno.EIO, "broken")

    _, file = by_state(path)
    report, rows, _ = built(path, files=Failing(), settings=make_settings("16MiB", sync="batch"))
    assert (report.pages, report.torn, rows[file.stem].state) == (2 * PAGES, PAGES, SEALED)
    assert report.problems == [f"segments/{file.name}: not synced, its pages are left out"]


def test_records_of_an_unknown_namespace_are_skipped(path: Path) -> None:
    file = by_state(path)[0][0]
    data = bytearray(file.read_bytes())
    data[16384 + 3] ^= 1
    file.write_bytes(data)
    report, rows, _ = built(path)
    assert (report.segments, report.pages, report.skipped_entries) == (3, 2 * PAGES, PAGES)
    assert rows[file.stem].records == PAGES + 1


def test_a_rebuild_ends_when_it_is_cancelled(path: Path) -> None:
    with pytest.raises(IndexUnavailableError, match="closed"):
        built(path, cancelled=lambda: True)


def test_a_report_has_a_bounded_number_of_lines() -> None:
    report = Report()
    for n in range(101):
        report.note(str(n))
    assert report.problems == [str(n) for n in range(100)]
