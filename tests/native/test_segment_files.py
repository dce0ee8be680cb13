"""Segments opened and closed by the native library: the same as by Python, without handing over to another thread."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

import pytest

import kvfs
from kvfs.native import library
from kvfs.native.segment_files import OpenedBatch, close_linked
from kvfs.segments.open_segments import SegmentFiles
from tests.stores import TINY_BYTES, seeded, segment_files, tiny, tokens_of


@pytest.fixture
def folder(tmp_path: Path) -> int:
    for n in range(3):
        (tmp_path / f"{bytes([n]) * 16!r}").touch()
        (tmp_path / (bytes([n] * 16).hex() + ".kvs")).write_bytes(b"segment")
    (tmp_path / (bytes([7] * 16).hex() + ".kvs")).mkdir()
    (tmp_path / (bytes([8] * 16).hex() + ".kvs")).symlink_to(bytes(16).hex() + ".kvs")
    os.mkfifo(tmp_path / (bytes([9] * 16).hex() + ".kvs"))
    return os.open(tmp_path, os.O_RDONLY)


def opened() -> int:
    return len(os.listdir("/proc/self/fd"))


def segments_open() -> int:
    """Segments that are open, each counted once."""
    return len({name for fd in os.listdir("/proc/self/fd") if (name := target(fd)).endswith(".kvs")})


def target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def test_only_linked_regular_files_that_can_be_locked_are_opened(
    native: library.Library, folder: int, tmp_path: Path
) -> None:
    before = opened()
    with open(tmp_path / (bytes([1] * 16).hex() + ".kvs")) as taken:
        fcntl.flock(taken, fcntl.LOCK_EX)
        batch = OpenedBatch(native, folder, [bytes([n] * 16) for n in (0, 1, 2, 5, 7, 8, 9)])
        assert [batch.is_open(n) for n in range(len(batch))] == [True, False, True, False, False, False, False]
    kept: list[int | None] = [None]
    batch.take(0, kept)
    assert not batch.is_open(0) and len(kept) == 2
    with open(tmp_path / (bytes(16).hex() + ".kvs")) as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    del batch  # closes what was not taken
    assert opened() == before + 1
    assert close_linked(native, kept) and kept == [] and opened() == before
    os.close(folder)


def test_a_file_without_a_name_is_closed_with_the_interpreter_released(native: library.Library, tmp_path: Path) -> None:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    (tmp_path / "file").unlink()
    kept: list[int | None] = [None, fd]
    assert not close_linked(native, kept) and kept == [None, fd]
    os.close(fd)


def test_a_lookup_opens_segments_in_its_own_thread(
    native: library.Library, memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def handed_over(*_: object) -> None:
        raise AssertionError("the opener thread was asked")

    with kvfs.open(memory_path / "store", capacity="64MiB", segment_bytes="256KiB") as store:
        store._shared.background.stop()
        ns, tokens = store.namespace("m", tiny(), revision="r1"), tokens_of(1, 400)
        ns.put(tokens, seeded(1, 400 * TINY_BYTES))
        for path in segment_files(memory_path / "store"):
            os.stat(path)
        monkeypatch.setattr(SegmentFiles, "_open_in_time", handed_over)
        before, threads = segments_open(), threading.active_count()
        with ns.match(tokens) as match:
            assert match.chunks == 400 and match.hold is not None
            assert len(match.hold.held) == len(match.segments) > 1
            assert segments_open() == before + len(match.segments) - 1  # the active one is open for writing, too
            out = bytearray(match.nbytes)
            assert ns.get(match, out) == 400
        assert segments_open() == before and threading.active_count() <= threads + 1


def test_a_segment_that_is_gone_is_looked_for_by_the_opener(native: library.Library, memory_path: Path) -> None:
    with kvfs.open(memory_path / "store", capacity="64MiB", segment_bytes="256KiB") as store:
        store._shared.background.stop()
        ns, tokens = store.namespace("m", tiny(), revision="r1"), tokens_of(1, 40)
        ns.put(tokens, seeded(1, 40 * TINY_BYTES))
        (path,) = segment_files(memory_path / "store")
        path.unlink()
        assert ns.match(tokens).tokens == 0
        assert len(store._shared.c.segments.take_missing()) == 1
