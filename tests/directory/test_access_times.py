"""The files of access times: what is noted, written, bounded, read again and forgotten."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvfs
from kvfs.directory import access_times
from kvfs.directory.access_times import AccessTimes
from kvfs.directory.root import Directory
from kvfs.system.files import Files
from kvfs.testing import FakeClock

ONE, TWO = b"1" * 16, b"2" * 16


class Clock(FakeClock, Files):
    """The real file system under a clock that is set by hand."""


@pytest.fixture
def path(memory_path: Path) -> Path:
    kvfs.open(memory_path / "store", capacity="16MiB").close()
    return memory_path / "store"


@pytest.fixture
def directory(path: Path) -> Iterator[Directory]:
    with contextlib.closing(Directory(str(path), Clock(), read_only=False)) as made:
        yield made


@pytest.fixture
def times(directory: Directory) -> AccessTimes:
    return AccessTimes(directory)


def file_of(directory: Directory, segment_id: bytes) -> Path:
    return Path(directory.path) / "run" / "use" / segment_id.hex()


def test_times_are_written_at_the_place_of_their_record(times: AccessTimes, directory: Directory) -> None:
    times.stamp(ONE, 2, [5, 6])
    times.stamp(ONE, 0, [1])
    times.stamp(TWO, 1, [9])
    times.stamp(TWO, 7, [])
    assert not file_of(directory, ONE).exists() and times.was_used(ONE, 3) and times.was_used(ONE, 2)
    assert not times.was_used(ONE, 1) and not times.was_used(ONE, 4) and not times.was_used(TWO, 2)
    times.flush()
    assert file_of(directory, ONE).read_bytes() == b"".join(n.to_bytes(8, "little") for n in (1, 0, 5, 6))
    assert file_of(directory, ONE).stat().st_mode & 0o777 == 0o600
    assert list(times.raw(TWO)) == [0, 9] and list(times.raw(ONE, 3)) == [1, 0, 5] and list(times.raw(b"x" * 16)) == []
    assert [times.was_used(ONE, seq) for seq in range(5)] == [True, False, True, True, False]
    assert not times.was_used(b"x" * 16, 0)


def test_where_there_is_no_time_or_one_in_the_future_the_writing_counts(
    times: AccessTimes, directory: Directory
) -> None:
    now = directory.files.now_us()
    times.stamp(ONE, 0, [now, now + 1, 0, now - 1])
    assert times.stamps(ONE, [10, 11, 12, 13, 14]) == [now, 11, 12, now - 1, 14]
    assert times.stamps(ONE, [10]) == [now] and times.stamps(TWO, iter([10, 11])) == [10, 11]


def test_what_waits_to_be_written_is_bounded(times: AccessTimes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_times, "NOTED_MAX", 5)
    times.stamp(ONE, 0, [1, 2, 3])
    times.stamp(ONE, 3, [4, 5, 6])
    times.stamp(ONE, 3, [7, 8])
    assert list(times.raw(ONE)) == [1, 2, 3, 7, 8]
    times.stamp(ONE, 0, [9] * 5)
    assert list(times.raw(ONE)) == [9] * 5, "what is written waits no more"


def test_few_files_are_kept_open(times: AccessTimes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_times, "_OPEN_MAX", 2)
    before = len(os.listdir("/proc/self/fd"))
    for n in (1, 2, 1, 3):
        times.stamp(bytes([n]) * 16, 0, [n])
        times.flush()
    assert list(times._open) == [b"\1" * 16, b"\3" * 16], "the one that was used longest ago is closed"
    assert len(os.listdir("/proc/self/fd")) == before + 3, "with the folder"


def test_a_file_with_two_names_is_not_written(times: AccessTimes, directory: Directory, path: Path) -> None:
    file = file_of(directory, ONE)
    file.write_bytes(bytes(8))
    os.link(file, path / "run" / "snapshot")
    times.stamp(ONE, 0, [7])
    assert list(times.raw(ONE)) == [7] and (path / "run" / "snapshot").read_bytes() == bytes(8)


def test_a_request_is_remembered_for_ten_minutes(
    times: AccessTimes, directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = directory.files.now_us()
    for ago, known in ((0, True), (599_999_999, True), (600_000_000, False), (-1, False)):
        times.note_request(b"h", now - ago)
        assert times.request_of(b"h") == (now - ago if known else None)
    assert times.request_of(b"other") is None
    monkeypatch.setattr(access_times, "REQUESTS_MAX", 2)
    for name in (b"a", b"b", b"a", b"c"):
        times.note_request(name, now)
    assert [times.request_of(name) is not None for name in (b"a", b"b", b"c")] == [True, False, True]


def test_what_is_forgotten_is_not_written_again(times: AccessTimes, directory: Directory) -> None:
    times.stamp(ONE, 0, [1])
    times.flush()
    times.stamp(ONE, 0, [2])
    times.stamp(TWO, 0, [3, 4])
    times.forget(ONE)
    times.forget(b"x" * 16)
    assert times._noted_count == 2 and ONE not in times._open
    times.flush()
    assert not file_of(directory, ONE).exists() and list(times.raw(TWO)) == [3, 4]


def test_a_sweep_removes_what_is_of_no_segment(times: AccessTimes, directory: Directory) -> None:
    for segment_id in (ONE, TWO):
        times.stamp(segment_id, 0, [1])
    times.flush()
    file_of(directory, b"3" * 16).mkdir()
    file_of(directory, b"4" * 16).write_bytes(b"")
    times.sweep({TWO})
    left = {file.name for file in file_of(directory, ONE).parent.iterdir()}
    assert left == {TWO.hex(), (b"3" * 16).hex()}


def test_a_version_changes_with_a_time(times: AccessTimes, directory: Directory) -> None:
    assert times.version(ONE) == (0, 0)
    times.stamp(ONE, 0, [1])
    first = times.version(ONE)
    assert first == (file_of(directory, ONE).stat().st_mtime_ns, 8)
    times.stamp(ONE, 1, [1])
    assert times.version(ONE)[1] == 16


def test_a_close_writes_what_is_noted(times: AccessTimes, directory: Directory) -> None:
    times.close()
    times.stamp(ONE, 0, [1])
    before = len(os.listdir("/proc/self/fd"))
    times.close()
    assert file_of(directory, ONE).read_bytes() == (1).to_bytes(8, "little") and not times._open and times._own is None
    assert len(os.listdir("/proc/self/fd")) <= before + 1, "the folder alone"


def test_a_reader_notes_nothing_and_a_child_writes_nothing_of_its_parent(path: Path, times: AccessTimes) -> None:
    with contextlib.closing(Directory(str(path), Clock(), read_only=True)) as directory:
        reader = AccessTimes(directory)
        reader.stamp(ONE, 0, [1])
        assert not reader.was_used(ONE, 0) and reader._noted == []
    times.stamp(ONE, 0, [1])
    times.abandon()
    times.flush()
    assert list(times.raw(ONE)) == [] and times._noted_count == 0


def test_what_was_noted_before_a_fork_is_the_parents_to_write(times: AccessTimes, directory: Directory) -> None:
    times.stamp(ONE, 0, [1, 2])
    with times._lock:  # of a thread that only the parent has
        times.abandon()
    times.flush()
    assert not file_of(directory, ONE).exists() and not times.was_used(ONE, 0)
    times.stamp(ONE, 0, [5])
    assert list(times.raw(ONE)) == [5]
