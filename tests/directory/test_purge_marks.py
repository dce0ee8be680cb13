"""The files of purge marks: on a doubt a mark covers everything, and only a lack of this process is an error."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvfs
from kvfs.directory.purge_marks import MARK_BYTES_MAX, PurgeMarks
from kvfs.directory.root import Directory
from kvfs.format import segment as fmt
from kvfs.format.segment import PurgeMark
from kvfs.testing import Fault, FaultyFiles

ONE, TWO = b"1" * 16, b"2" * 16
MARK = PurgeMark(ONE, fmt.PURGE_PENDING, 3, b"\5\1")
EVERYTHING = PurgeMark(ONE, fmt.PURGE_ALL | fmt.PURGE_PENDING, 0, b"")


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles(trace=True)


@pytest.fixture
def folder(memory_path: Path) -> Path:
    kvfs.open(memory_path / "store", capacity="16MiB").close()
    return memory_path / "store" / "purged"


@pytest.fixture
def marks(folder: Path, files: FaultyFiles) -> Iterator[PurgeMarks]:
    with contextlib.closing(Directory(str(folder.parent), files, read_only=False)) as made:
        yield PurgeMarks(made)


def test_a_mark_is_found_until_its_segment_is_forgotten(marks: PurgeMarks, folder: Path) -> None:
    assert marks.read(ONE) is None and not marks.has(ONE) and marks.ids() == set()
    before = marks.version()
    marks.write(MARK)
    assert marks.read(ONE) == MARK and marks.has(ONE) and not marks.has(TWO) and marks.read(TWO) is None
    assert marks.version() != before == (folder.stat().st_dev, folder.stat().st_ino, before[2])
    assert marks.version()[2] == folder.stat().st_mtime_ns
    (folder / "notes").touch()
    (folder / ("a" * 33)).touch()
    assert marks.ids() == {ONE}
    marks.forget(TWO)
    marks.forget(ONE)
    assert not marks.has(ONE) and marks.ids() == set()


def test_a_mark_that_is_settled_covers_what_it_covered(marks: PurgeMarks, files: FaultyFiles) -> None:
    marks.write(MARK)
    files.arm(Fault(files.calls["rename"] + 1, "rename"))
    marks.settle(MARK)
    assert files.fired == 1 and marks.read(ONE) == MARK, "the index is searched once more"
    marks.settle(MARK)
    assert marks.read(ONE) == MARK._replace(flags=0)
    whole = PurgeMark(TWO, fmt.PURGE_ALL | fmt.PURGE_PENDING, 0, b"")
    marks.settle(whole)
    assert marks.read(TWO) == whole._replace(flags=fmt.PURGE_ALL)


def test_marks_are_written_to_the_disk_and_their_folder_once_for_all(marks: PurgeMarks, files: FaultyFiles) -> None:
    marks.write(MARK)
    assert [call.kind for call in files.trace][-4:] == ["pwritev", "fsync", "close", "rename"]
    marks.sync()
    assert files.trace[-1].kind == "fsync"
    files.arm(Fault(files.calls["fsync"] + 1, "fsync"))
    with pytest.raises(OSError, match="injected"):
        marks.sync()


@pytest.mark.parametrize("content", [b"", b"x" * 100, fmt.pack_purge_mark(MARK)[:-1], b"x" * (MARK_BYTES_MAX + 1)])
def test_a_damaged_mark_covers_everything(marks: PurgeMarks, folder: Path, content: bytes) -> None:
    (folder / ONE.hex()).write_bytes(content)
    assert marks.read(ONE) == EVERYTHING


def test_the_mark_of_another_segment_covers_everything(marks: PurgeMarks, folder: Path) -> None:
    (folder / ONE.hex()).write_bytes(fmt.pack_purge_mark(MARK._replace(segment_id=TWO)))
    assert marks.read(ONE) == EVERYTHING


def test_a_mark_that_fills_its_file_is_read(marks: PurgeMarks) -> None:
    head = len(fmt.pack_purge_mark(PurgeMark(ONE, 0, 1, b"")))
    mark = PurgeMark(ONE, 0, 1, bytes(MARK_BYTES_MAX - head))
    marks.write(mark)
    assert marks.read(ONE) == mark


@pytest.mark.parametrize("kind", ["open", "preadv"])
def test_a_mark_that_cannot_be_read_covers_everything(marks: PurgeMarks, files: FaultyFiles, kind: str) -> None:
    marks.write(MARK)
    files.arm(Fault(files.calls[kind] + 1, kind))
    assert marks.read(ONE) == EVERYTHING and files.fired == 1


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_what_this_process_lacks_is_no_mark(marks: PurgeMarks, files: FaultyFiles, error: int) -> None:
    marks.write(MARK)
    files.arm(Fault(files.calls["open"] + 1, "open", error=error))
    with pytest.raises(OSError, match="injected") as raised:
        marks.read(ONE)
    assert raised.value.errno == error


def test_a_mark_counts_if_that_cannot_be_told(marks: PurgeMarks, files: FaultyFiles) -> None:
    assert not marks.has(ONE)
    files.arm(Fault(files.calls["stat"] + 1, "stat"))
    assert marks.has(ONE) and files.fired == 1


def test_a_store_without_the_folder_has_no_marks(folder: Path, files: FaultyFiles) -> None:
    folder.rmdir()
    with contextlib.closing(Directory(str(folder.parent), files, read_only=True)) as directory:
        marks = PurgeMarks(directory)
        assert marks.ids() == set() and marks.version() == () and not marks.has(ONE) and marks.read(ONE) is None


def test_a_sweep_removes_what_was_not_finished(marks: PurgeMarks, folder: Path) -> None:
    marks.write(MARK)
    (folder / f".{ONE.hex()}.0123456789abcdef").touch()
    (folder / "notes").touch()
    marks.sweep()
    assert sorted(os.listdir(folder)) == sorted([ONE.hex(), "notes"])


def test_a_sweep_or_a_mark_that_cannot_be_removed_is_left_for_later(
    marks: PurgeMarks, folder: Path, files: FaultyFiles
) -> None:
    (folder / ".x").touch()
    marks.write(MARK)
    for step in (marks.sweep, lambda: marks.forget(ONE)):
        files.arm(Fault(files.calls["unlink"] + 1, "unlink"))
        step()
    assert files.fired == 2 and sorted(os.listdir(folder)) == [".x", ONE.hex()]
