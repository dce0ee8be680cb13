"""The files of processes: they count against the limit, as a reserve that is never exceeded."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvfs
from kvfs.directory.config import Settings, make_settings
from kvfs.directory.liveness import (
    COMMAND_BYTES,
    FOREIGN_FRESH_SECONDS,
    HEARTBEAT_SECONDS,
    NO_OWNER,
    OPENING_SECONDS,
    PROCESS_COUNTS,
    Liveness,
    census,
    processes,
)
from kvfs.directory.root import Directory
from kvfs.errors import NoSpaceError, StoreLockedError
from kvfs.format.segment import BLOCK
from kvfs.system.files import Files
from kvfs.testing import FakeClock, Fault, FaultyFiles
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


# -- who is alive ------------------------------------------------------------------------------


def test_a_process_is_alive_until_its_lock_is_gone_and_never_again(directory: Directory) -> None:
    one, two = Liveness(directory), Liveness(directory)
    assert one.is_alive(one.owner) and one.is_alive(two.owner) and one.others() == [two.owner]
    assert not one.is_alive(NO_OWNER)
    two.close()
    assert not one.is_alive(two.owner)
    left = Path(directory.path) / "run" / f"{two.owner.hex()}.live"
    with open(left, "wb") as again:
        fcntl.flock(again, fcntl.LOCK_EX)
        assert not one.is_alive(two.owner), "death is final: an id is never used twice"
    one.close()


def test_a_process_whose_file_cannot_be_opened_counts_as_alive(memory_path: Path) -> None:
    """Nothing is taken over on a doubt."""
    kvfs.open(memory_path / "store", capacity="16MiB").close()
    files = FaultyFiles()
    with contextlib.closing(Directory(str(memory_path / "store"), files, read_only=False)) as directory:
        one = Liveness(directory)
        dead = Path(directory.path) / "run" / f"{7:032x}.live"
        dead.write_bytes(b"")
        files.arm(Fault(kind="open", error=errno.EMFILE, persistent=True))
        assert one.is_alive(bytes.fromhex(dead.stem)) and one.others() == [bytes.fromhex(dead.stem)]
        assert dead.exists()
        files.arm()
        assert one.others() == [] and not dead.exists()
        one.close()


def test_a_dead_process_is_forgotten_when_there_were_very_many(directory: Directory) -> None:
    one = Liveness(directory)
    for number in range(1, 5000):
        assert not one.is_alive(number.to_bytes(16, "big"))
    assert 0 < len(one._dead) <= 4097
    one.close()


def test_a_census_tells_the_dead_from_the_living_and_removes_nothing(directory: Directory) -> None:
    one = Liveness(directory)
    run = Path(directory.path) / "run"
    for name in (f"{1:032x}.live", f".{2:032x}.live", f"{3:032x}.live.old", "gc"):
        (run / name).touch()
    before = sorted(run.iterdir())
    assert sorted(census(directory)) == sorted([(f"{1:032x}", False), (one.owner.hex(), True)])
    assert sorted(run.iterdir()) == before
    assert [found.owner for found in processes(directory)] == [one.owner.hex()]
    one.close()


# -- what a process says of itself --------------------------------------------------------------


def test_a_process_says_what_it_is_and_what_it_did(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/bin/" + "engine" * 9])
    before = directory.files.now_us()
    one = Liveness(directory)
    (silent,) = processes(directory)
    assert (silent.pid, silent.command, silent.watching, silent.pinned_bytes) == (0, "", "", 0)
    assert (silent.since_us, silent.at_us, silent.counts) == (0, 0, {})
    one.say_counts({"lookups": 7, "bytes_written": 1 << 40, "another": 9})
    one.say_pinned(123)
    for how in ("inotify", "polling", "guessing"):
        one.say_watching(how)
        (said,) = processes(directory)
        assert said.watching == (how if how != "guessing" else "polling")
    assert (said.owner, said.pid, said.pinned_bytes) == (one.owner.hex(), os.getpid(), 123)
    assert said.command == ("engine" * 9)[:COMMAND_BYTES]
    assert before <= said.since_us <= said.at_us <= directory.files.now_us()
    assert dict(said.counts) == dict.fromkeys(PROCESS_COUNTS, 0) | {"lookups": 7, "bytes_written": 1 << 40}
    one.close()


def test_what_a_damaged_file_says_is_not_believed(directory: Directory) -> None:
    one = Liveness(directory)
    one.say_counts({"lookups": 7})
    one.say_pinned(5)
    file = Path(directory.path) / "run" / f"{one.owner.hex()}.live"
    whole = file.read_bytes()
    for data in (whole[:-1], whole[:130] + bytes([whole[130] ^ 1]) + whole[131:], whole[:-1] + b"x"):
        os.truncate(file, 0)
        file.write_bytes(data)
        (said,) = processes(directory)
        assert (said.pid, said.counts, said.pinned_bytes) == (0, {}, 5)
    one.close()


def test_a_program_without_a_name_is_python(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    for argv, name in (([""], "python"), ([], "python"), (["/opt/serv\u00e9"], "serv?")):
        monkeypatch.setattr("sys.argv", argv)
        one = Liveness(directory)
        one.say_counts({})
        (said,) = processes(directory)
        assert said.command == name
        one.close()


@pytest.mark.parametrize(("error", "opens"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EIO, False)])
def test_a_full_disk_does_not_keep_a_process_from_opening_the_store(memory_path: Path, error: int, opens: bool) -> None:
    """The lock is enough, and the next beats try again."""
    kvfs.open(memory_path / "store", capacity="16MiB").close()
    files = FaultyFiles()
    with contextlib.closing(Directory(str(memory_path / "store"), files, read_only=False)) as directory:
        files.arm(Fault(kind="pwritev", error=error, persistent=True))
        if opens:
            one = Liveness(directory)
            assert [name for name, alive in census(directory) if alive] == [one.owner.hex()]
            one.say_pinned(5)  # nor do figures that cannot be written stop it
            one.say_counts({})
            one.say_watching("polling")
            one.close()
        else:
            with pytest.raises(OSError, match="injected"):
                Liveness(directory)
        run = Path(directory.path) / "run"
        assert not [*run.glob("*.live"), *run.glob(".*.live")], "no file is left"


# -- heartbeats ----------------------------------------------------------------------------------


class SetFiles(FakeClock, Files):
    """The file system under a clock that is set by hand."""


@pytest.mark.parametrize(
    ("age", "refused"), [(FOREIGN_FRESH_SECONDS - 1, True), (1 - FOREIGN_FRESH_SECONDS, True), (0, True),
                         (FOREIGN_FRESH_SECONDS, False), (-FOREIGN_FRESH_SECONDS, False)],
)  # fmt: skip
def test_a_heartbeat_under_another_kernel_counts_for_half_a_minute(
    memory_path: Path, age: float, refused: bool
) -> None:
    kvfs.open(memory_path / "store", capacity="16MiB").close()
    files = SetFiles()
    with contextlib.closing(Directory(str(memory_path / "store"), files, read_only=False)) as directory:
        one = Liveness(directory)
        stamp = files.now_us() - int(age * 1e6)
        foreign = Path(directory.path) / "run" / f"{9:032x}.live"
        foreign.write_bytes(f"{'f' * 36} {stamp:020d}\n".encode().ljust(64))
        if refused:
            with pytest.raises(StoreLockedError, match=rf"heartbeat {age:.0f} s ago.*wait 30 s"):
                one.refuse_foreign_kernel()
        else:
            one.refuse_foreign_kernel()
        one.close()


def test_a_process_misses_five_beats_before_another_host_takes_it_for_gone() -> None:
    assert FOREIGN_FRESH_SECONDS >= 6 * HEARTBEAT_SECONDS


def test_its_own_heartbeat_and_files_of_other_names_refuse_no_open(directory: Directory) -> None:
    one = Liveness(directory)
    stamp = directory.files.now_us()
    foreign = f"{'f' * 36} {stamp:020d}\n".encode().ljust(64)
    run = Path(directory.path) / "run"
    for name in (f"{one.owner.hex()}.live", f".{4:032x}.live", f"{5:032x}.live.new"):
        (run / name).write_bytes(foreign)
    one.refuse_foreign_kernel()
    (run / f"{0:032x}.live").write_bytes(b"nonsense")
    for number in range(1, 4):
        (run / f"{number:032x}.live").write_bytes(foreign)
    with pytest.raises(StoreLockedError):
        one.refuse_foreign_kernel()
    one.close()


@pytest.mark.parametrize("age", [OPENING_SECONDS - 1, 1 - OPENING_SECONDS, OPENING_SECONDS + 1, -OPENING_SECONDS - 1])
def test_how_long_a_process_may_take_to_lock_its_file(memory_path: Path, age: float) -> None:
    kvfs.open(memory_path / "store", capacity="16MiB").close()
    files = SetFiles()
    with contextlib.closing(Directory(str(memory_path / "store"), files, read_only=False)) as directory:
        one = Liveness(directory)
        left = Path(directory.path) / "run" / f".{4:032x}.live"
        left.touch()
        then = files.now_us() / 1e6 - age
        os.utime(left, (then, then))
        one.others()
        assert left.exists() == (abs(age) < OPENING_SECONDS)
        one.close()
