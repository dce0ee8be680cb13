"""The files of processes: they count against the limit, as a reserve that is never exceeded."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvfs
from kvfs.directory.config import Settings, make_settings
from kvfs.directory.liveness import Liveness
from kvfs.directory.root import Directory
from kvfs.errors import NoSpaceError
from kvfs.format.segment import BLOCK
from kvfs.system.files import Files
from tests.stores import run_child


@pytest.fixture
def directory(memory_path: Path) -> Iterator[Directory]:
    kvfs.open(memory_path / "store", capacity="16MiB").close()
    with contextlib.closing(Directory(str(memory_path / "store"), Files(), read_only=False)) as made:
        yield made


def files(directory: Directory) -> list[str]:
    return sorted(path.name for path in (Path(directory.path) / "run").glob("*.live"))


def test_no_more_processes_open_a_store_than_its_reserve_holds(directory: Directory) -> None:
    """Each takes a block that no row is charged with: 256 of them were the whole reserve for small files."""
    first = [Liveness(directory, 3 * BLOCK) for _ in range(3)]
    with pytest.raises(NoSpaceError, match=r"open in 3 processes.*raise the capacity"):
        Liveness(directory, 3 * BLOCK)
    assert len(files(directory)) == 3
    first.pop().close()
    first.append(Liveness(directory, 3 * BLOCK))
    for one in first:
        one.close()


@pytest.mark.parametrize("prefix", ["", "."], ids=["open", "opening"])
def test_the_files_of_dead_processes_make_room(directory: Directory, prefix: str) -> None:
    for number in range(5):
        left = Path(directory.path) / "run" / f"{prefix}{number:032x}.live"
        left.write_bytes(b"x" * 64)
        os.utime(left, (0, 0))
    one = Liveness(directory, 3 * BLOCK)
    assert files(directory) == [f"{one.owner.hex()}.live"]
    assert not list((Path(directory.path) / "run").glob(".*.live"))
    one.close()


class KilledFiles(Files):
    """A process that is killed before it gives its liveness file its name: none of its later calls happens."""

    def rename(self, src: str, dst: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        os._exit(9)


@pytest.mark.parametrize("jump", [-3600, 3600])
def test_what_a_process_left_that_was_killed_while_it_opened_the_store_is_removed(
    directory: Directory, jump: int
) -> None:
    run = Path(directory.path) / "run"

    def killed() -> None:
        with contextlib.closing(Directory(directory.path, KilledFiles(), read_only=False)) as mine:
            Liveness(mine)

    child = os.fork()
    if not child:
        killed()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    (left,) = run.glob(".*.live")
    one = Liveness(directory)
    one.others()
    assert left.exists(), "its process may be about to lock it"
    then = time.time() - jump  # also of a clock that was ahead
    os.utime(left, (then, then))
    with open(left, "rb") as opening:
        fcntl.flock(opening, fcntl.LOCK_EX)
        one.others()
        assert left.exists(), "its process lives"
    one.others()
    assert not left.exists()
    one.close()


def test_a_store_bounds_the_processes_that_open_it(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Settings, "process_files_bytes", BLOCK)
    with kvfs.open(memory_path / "store", capacity="16MiB") as store:

        def child() -> str:
            try:
                kvfs.open(store.path).close()
            except NoSpaceError as exc:
                return str(exc)
            return ""

        assert "close some of them" in run_child(child)
        assert len(list((memory_path / "store" / "run").glob("*.live"))) == 1


@pytest.mark.parametrize("capacity", ["16MiB", "1GiB", "1TiB"])
def test_the_files_of_processes_are_part_of_the_capacity(capacity: str) -> None:
    """With those of pins they leave a quarter of the reserve to settings, counters and folders."""
    settings = make_settings(capacity)
    small = settings.capacity_bytes - settings.segments_bytes_max - settings.index_bytes
    assert small - settings.process_files_bytes - settings.pin_files_bytes >= 256 << 10
    assert settings.process_files_bytes // BLOCK >= 128


def test_what_processes_keep_pinned_is_summed_over_the_others(directory: Directory) -> None:
    one, two, three = (Liveness(directory, 9 * BLOCK) for _ in range(3))
    assert one.pinned_by_others() == 0
    for process, nbytes in ((one, 5), (two, 70), (three, 900), (two, 1 << 40)):
        process.say_pinned(nbytes)
    assert [process.pinned_by_others() for process in (one, two, three)] == [(1 << 40) + 900, 905, (1 << 40) + 5]
    two.close()
    assert one.pinned_by_others() == 900
    one.close()
    three.close()
