"""A small object in a file that processes update in turns."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.directory import slot_file
from kvfs.directory.root import Directory
from kvfs.directory.slot_file import SlotFile
from kvfs.system.files import Files
from kvfs.testing import FakeClock


class Clock(FakeClock, Files):
    """The real file system under a clock that is set by hand; a sleep moves it, and is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.advance(seconds)


@pytest.fixture
def directory(memory_path: Path) -> Iterator[Directory]:
    kvfs.open(memory_path / "store", capacity="16MiB").close()
    with contextlib.closing(Directory(str(memory_path / "store"), Clock(), read_only=False)) as made:
        yield made


def test_an_object_is_replaced_in_turns(directory: Directory) -> None:
    one, two = (SlotFile(directory, "thing", 4096) for _ in range(2))
    path = Path(directory.path) / "run" / "thing"
    assert one.read() == {} and not path.exists()
    rooms: list[int] = []

    def change(before: dict[str, Any], room: int) -> dict[str, Any]:
        rooms.append(room)
        return {"n": before.get("n", 0) + 1}

    for n in range(1, 5):
        assert (one if n % 2 else two).update(change)
        assert one.read() == two.read() == {"n": n} and path.stat().st_size == 8192
    assert set(rooms) == {4096 - 20}, "without the head: checksum, turn, length"
    data = bytearray(path.read_bytes())
    assert b'"n":4' in data[:4096] and b'"n":3' in data[4096:]
    data[25] ^= 1
    path.write_bytes(data)
    assert one.read() == {"n": 3}, "the one before"
    data[4096 + 25] ^= 1
    path.write_bytes(data)
    assert one.read() == {}


@pytest.mark.parametrize(
    ("size", "kept"), [(0, False), (8191, False), (8192, True), (2 << 20, True), ((2 << 20) + 2, False)]
)
def test_a_file_of_another_size_is_made_again(directory: Directory, size: int, kept: bool) -> None:
    path = Path(directory.path) / "run" / "thing"
    path.write_bytes(bytes(size))
    made = SlotFile(directory, "thing", 16384)
    made.reserve()
    assert path.stat().st_size == (size if kept else 32768)
    assert made.update(lambda before, room: {"room": room}) and made.read() == {
        "room": (size // 2 if kept else 16384) - 20
    }


def test_a_lock_of_another_process_is_waited_for_briefly(directory: Directory) -> None:
    clock = directory.files
    assert isinstance(clock, Clock)
    made = SlotFile(directory, "thing", 4096)
    made.reserve()
    fd = os.open(Path(directory.path) / "run" / "thing", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    before = clock.monotonic()
    assert not made.update(lambda before, room: {"n": 1})
    assert clock.monotonic() == pytest.approx(before + 0.2, abs=0.0015) and set(clock.slept) == {0.001}
    assert made.read() == {}
    os.close(fd)
    assert made.update(lambda before, room: {"n": 1}) and made.read() == {"n": 1}


def test_no_blocks_are_made_while_another_process_keeps_the_lock(directory: Directory) -> None:
    path = Path(directory.path) / "run" / "thing"
    path.touch()
    fd = os.open(path, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    slots = SlotFile(directory, "thing", 4096)
    slots.reserve()
    assert path.stat().st_size == 0
    os.close(fd)
    slots.reserve()
    assert path.stat().st_size == 8192


def test_a_lock_that_another_process_keeps_is_waited_for_up_to_the_limit(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, clock = Path(directory.path) / "run" / "thing", directory.files
    assert isinstance(clock, Clock)
    slots = SlotFile(directory, "thing", 4096)
    assert slots.update(lambda before, room: {"n": 1})
    fd = os.open(path, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.advance(slot_file.WAIT_SECONDS / 2)

    monkeypatch.setattr(clock, "sleep", sleep)
    began = clock.monotonic()
    assert not slots.update(lambda before, room: {"n": 2}) and slots.read() == {"n": 1}
    assert len(slept) == 2 and clock.monotonic() == began + slot_file.WAIT_SECONDS
    os.close(fd)
    assert slots.update(lambda before, room: {"n": 2}) and len(slept) == 2
