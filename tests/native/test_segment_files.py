"""Segments opened and closed by the native library: the same as by Python, without handing over to another thread."""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import kvfs
from kvfs.native import library
from kvfs.native import segment_files as native_segments
from kvfs.native.segment_files import SegmentHold, SegmentTable
from kvfs.segments.open_segments import SegmentFiles
from tests.stores import TINY_BYTES, run_child, seeded, segment_files, tiny, tokens_of


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


def segment_id(n: int) -> bytes:
    return bytes([n] * 16)


def test_only_linked_regular_files_that_can_be_locked_are_held(
    native: library.Library, folder: int, tmp_path: Path
) -> None:
    before, table = opened(), SegmentTable(native)
    with open(tmp_path / (segment_id(1).hex() + ".kvs")) as taken:
        fcntl.flock(taken, fcntl.LOCK_EX)
        hold = SegmentHold(table, folder, [segment_id(n) for n in (0, 1, 2, 5, 7, 8, 9)])
        assert hold.held() == [True, False, True, False, False, False, False]
    assert table.open_count() == 2 and opened() == before + 2
    with open(tmp_path / (segment_id(0).hex() + ".kvs")) as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert os.read(hold.fd, 100) == b"segment"
    del hold
    assert opened() == before and table.open_count() == 0
    os.close(folder)


def test_a_segment_is_open_once_and_until_its_last_hold_ends(native: library.Library, folder: int) -> None:
    table = SegmentTable(native)
    first = SegmentHold(table, folder, [segment_id(0), segment_id(1)])
    second = SegmentHold(table, folder, [segment_id(1), segment_id(0), segment_id(1)])
    assert table.open_count() == 2 and second.held() == [True] * 3
    fd = second.fd
    del first
    assert table.open_count() == 2 and second.fd == fd and os.read(fd, 100) == b"segment"
    del second
    assert table.open_count() == 0
    with pytest.raises(OSError):
        os.fstat(fd)
    os.close(folder)


def at_once(made: Callable[[], SegmentHold], count: int) -> SegmentHold:
    """A hold of ``count`` segments; again where the kernel has forgotten a name, or something is mounted meanwhile."""
    for _ in range(100):
        hold = made()
        if sum(hold.held()) == count:
            break
    return hold


def test_more_segments_than_one_call_takes_and_more_than_the_table_has(native: library.Library, tmp_path: Path) -> None:
    ids = [hashlib.sha256(b"%d" % n).digest()[:16] for n in range(300)]
    crowded = [b"\1" * 8 + b"%08d" % n for n in range(40)]  # 32 of them find a place
    for one in (*ids, *crowded):
        (tmp_path / (one.hex() + ".kvs")).touch()
    folder, table, before = os.open(tmp_path, os.O_RDONLY), SegmentTable(native), opened()
    hold = at_once(lambda: SegmentHold(table, folder, ids), 300)
    assert all(hold.held()) and table.open_count() == 300 == opened() - before
    del hold
    rest = at_once(lambda: SegmentHold(table, folder, crowded), 32)
    assert rest.held() == [True] * 32 + [False] * 8 and table.open_count() == 32
    del rest
    assert opened() == before
    os.close(folder)


class _Interrupted:
    """The functions of the library; a signal handler raises behind ``name``."""

    def __init__(self, native: library.Library, name: str) -> None:
        self._held, self._name = native.held, name

    def __getattr__(self, name: str) -> Callable[..., object]:
        real = getattr(self._held, name)

        def call(*arguments: object) -> object:
            result = real(*arguments)
            if name == self._name:
                raise KeyboardInterrupt
            return result

        return call


def test_the_end_of_a_hold_on_a_removed_file_closes_it_with_the_interpreter_released(
    native: library.Library, folder: int, tmp_path: Path
) -> None:
    table, before, real = SegmentTable(native), opened(), native.free.kvfs_close
    hold = SegmentHold(table, folder, [segment_id(0), segment_id(1), segment_id(2)])
    (tmp_path / (segment_id(1).hex() + ".kvs")).unlink()
    assert table._held.kvfs_release(table._at, hold._numbers, 3) == 1
    assert opened() == before + 1 and table.open_count() == 0, "the other two are closed"
    real(hold._numbers, 3)
    assert opened() == before and list(hold._numbers) == [-1] * 3
    assert not real._flags_ & native.held.kvfs_release._flags_ & 4, "FUNCFLAG_PYTHONAPI keeps the interpreter"
    os.close(folder)


def test_an_interrupt_between_the_release_and_the_close_touches_no_other_hold(
    native: library.Library, folder: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, before = SegmentTable(native), opened()
    hold = SegmentHold(table, folder, [segment_id(1)])
    fd = hold.fd
    crowd = [(fd).to_bytes(8, "little") + bytes(7) + b"c"]  # its place in the table has the number of the descriptor
    (tmp_path / (crowd[0].hex() + ".kvs")).touch()
    other = at_once(lambda: SegmentHold(table, folder, crowd), 1)
    assert list(other._numbers) == [fd]
    (tmp_path / (segment_id(1).hex() + ".kvs")).unlink()
    monkeypatch.setattr(table, "_held", _Interrupted(native, "kvfs_release"))
    with pytest.raises(KeyboardInterrupt):
        table._release(hold._numbers)
    monkeypatch.undo()
    monkeypatch.delattr(SegmentHold, "__del__")
    del hold
    native_segments.sweep()
    assert table.open_count() == 1 and opened() == before + 1, "of the other hold"
    monkeypatch.undo()
    del other
    assert table.open_count() == 0 and opened() == before
    os.close(folder)


def test_what_an_interrupt_kept_from_being_released_is_swept(
    native: library.Library, folder: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = SegmentTable(native)
    hold = SegmentHold(table, folder, [segment_id(0)])
    monkeypatch.delattr(SegmentHold, "__del__")
    del hold
    assert table.open_count() == 1
    native_segments.sweep()
    assert table.open_count() == 0
    os.close(folder)


def test_a_forked_child_has_no_segment_open_and_touches_no_lock(
    native: library.Library, folder: int, tmp_path: Path
) -> None:
    table = SegmentTable(native)
    hold = SegmentHold(table, folder, [segment_id(0), segment_id(1)])

    def child() -> list[object]:
        nonlocal hold
        seen: list[object] = [segments_open(), table.open_count()]
        again = SegmentHold(table, folder, [segment_id(2)])
        fd = hold.fd
        del hold
        return [*seen, again.held(), fd]

    assert run_child(child) == [0, 0, [False], -1], "no descriptor of another file is taken for a segment"
    with open(tmp_path / (segment_id(0).hex() + ".kvs")) as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert hold.held() == [True, True]
    os.close(folder)


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
