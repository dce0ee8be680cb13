"""The files around an index: whether it is trusted, its locks, its size, and how its generations are removed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest
import xxhash

import kvfs
from kvfs.directory.root import Directory
from kvfs.errors import IndexUnavailableError
from kvfs.index import lmdb_files, trust
from kvfs.index.gate import Gate
from kvfs.index.lmdb_files import check_size, discard_generation, extend_to_last_page, keep_slack, open_environment
from kvfs.index.trust import State, checksum_of, file_version, read_state, trust_version, trusted_state, write_state
from kvfs.system.files import Files
from kvfs.testing import FakeClock

STATE = State("g", "boot", 1, 2, True, "sum")


class Clock(FakeClock, Files):
    """The real file system under a clock that is set by hand; a sleep moves it."""

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)


@pytest.fixture
def path(memory_path: Path) -> Path:
    kvfs.open(memory_path / "store", capacity="16MiB").close()
    return memory_path / "store"


@pytest.fixture
def directory(path: Path) -> Iterator[Directory]:
    with contextlib.closing(Directory(str(path), Clock(), read_only=False)) as made:
        yield made


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 2500, 3000])
def test_the_checksum_of_a_file_is_that_of_all_its_bytes(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trust, "PIECE_BYTES", 1000)
    monkeypatch.setattr(trust, "CHECKED_BYTES_MAX", 2500)
    data = bytes(n % 251 for n in range(size))
    (tmp_path / "f").write_bytes(data)
    with (tmp_path / "f").open("rb") as file:
        found = checksum_of(Files(), file.fileno())
    assert found == (xxhash.xxh3_64_hexdigest(data) if size <= 2500 else "")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"{}", b"5", json.dumps({**STATE._asdict(), "device": "1"}).encode(), b"x" * 4097,
     json.dumps({**STATE._asdict(), "clean": 1}).encode(), json.dumps({**STATE._asdict(), "inode": True}).encode()],
)  # fmt: skip
def test_a_damaged_state_is_none(directory: Directory, path: Path, content: bytes) -> None:
    write_state(directory, STATE)
    assert read_state(directory) == STATE
    (path / "state").write_bytes(content)
    assert read_state(directory) is None
    (path / "state").unlink()
    assert read_state(directory) is None


def test_a_state_without_a_checksum_is_of_an_earlier_version(directory: Directory, path: Path) -> None:
    body = STATE._asdict()
    del body["checksum"]
    (path / "state").write_text(json.dumps(body))
    assert read_state(directory) == STATE._replace(checksum="")


@pytest.mark.parametrize(("error", "raised"), [(errno.EMFILE, True), (errno.ENOMEM, True), (errno.EIO, False)])
def test_a_state_that_cannot_be_read_now_is_not_called_damaged(
    directory: Directory, monkeypatch: pytest.MonkeyPatch, error: int, raised: bool
) -> None:
    def fail(*_: Any, **__: Any) -> bytes:
        raise OSError(error, "x")

    monkeypatch.setattr(directory, "read_small", fail)
    if raised:
        with pytest.raises(OSError, match="x"):
            read_state(directory)
    else:
        assert read_state(directory) is None


@pytest.mark.parametrize(
    ("change", "alone", "trusted"),
    [
        ({}, True, True), ({}, False, True), ({"clean": False}, False, True), ({"clean": False}, True, False),
        ({"clean": False, "boot": "other"}, False, False), ({"boot": "other"}, True, True),
        ({"generation": "h"}, False, False), ({"device": 0}, False, False), ({"inode": 0}, False, False),
    ],
)  # fmt: skip
def test_an_index_is_trusted_if_it_is_clean_or_in_use(
    directory: Directory, tmp_path: Path, change: dict[str, Any], alone: bool, trusted: bool
) -> None:
    (tmp_path / "data").write_bytes(b"")
    st = (tmp_path / "data").stat()
    state = State("g", "boot", st.st_dev, st.st_ino, True, "")._replace(**change)
    write_state(directory, state)
    with (tmp_path / "data").open("rb") as file:
        if trusted:
            assert trusted_state(directory, "g", file.fileno(), alone=alone, boot="boot") == state
            os.link(tmp_path / "data", tmp_path / "copy")
        with pytest.raises(OSError, match="dirty index of another boot or of dead processes"):
            trusted_state(directory, "g", file.fileno(), alone=alone, boot="boot")


def test_what_trust_depends_on_has_a_version(directory: Directory, path: Path) -> None:
    before = trust_version(directory)
    assert before == trust_version(directory) and None not in before
    write_state(directory, STATE)
    after = trust_version(directory)
    assert after[0] == before[0] and after[1] != before[1]
    (path / "index" / "CURRENT").unlink()
    assert trust_version(directory) == (None, after[1])
    st = (path / "state").stat()
    assert file_version(directory, "state", directory.root) == (st.st_dev, st.st_ino, st.st_mtime_ns, st.st_ctime_ns)


def test_only_a_full_disk_has_the_state_overwritten(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    write_state(directory, STATE)
    other = STATE._replace(generation="h", checksum="")
    for error, written in ((errno.EIO, False), (errno.EDQUOT, True)):

        def fail(*_: Any, error: int = error, **__: Any) -> None:
            raise OSError(error, "x")

        with monkeypatch.context() as patch:
            patch.setattr(directory, "write_small", fail)
            if written:
                write_state(directory, other)
            else:
                with pytest.raises(OSError, match="x"):
                    write_state(directory, other)
        assert read_state(directory) == (other if written else STATE)


# -- the gate ----------------------------------------------------------------------------------


def locked(path: Path, name: str) -> str:
    """The lock that others could not take: "", "shared" or "exclusive"."""
    fd = os.open(path / name, os.O_RDWR)
    try:
        for kind, held in ((fcntl.LOCK_EX, ""), (fcntl.LOCK_SH, "shared")):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, kind | fcntl.LOCK_NB)
                return held
        return "exclusive"
    finally:
        os.close(fd)


@pytest.mark.parametrize(("exclusive", "gate", "main"), [(True, "exclusive", "exclusive"), (False, "", "shared")])
def test_which_locks_are_held(directory: Directory, path: Path, exclusive: bool, gate: str, main: str) -> None:
    made = Gate(directory)
    assert not made.held
    made.acquire(exclusive=exclusive, deadline=0.0)
    assert made.held and (locked(path, "gate"), locked(path, "main")) == (gate, main)
    with pytest.raises(AssertionError, match="gate acquired twice"):
        made.acquire(exclusive=exclusive, deadline=0.0)
    made.release()
    made.release()
    assert not made.held and (locked(path, "gate"), locked(path, "main")) == ("", "")
    made.close()


@pytest.mark.parametrize("name", ["gate", "main"])
@pytest.mark.parametrize("exclusive", [True, False])
def test_a_lock_of_another_process_is_waited_for_until_the_deadline(
    directory: Directory, path: Path, name: str, exclusive: bool
) -> None:
    clock = directory.files
    assert isinstance(clock, Clock)
    made, fd = Gate(directory), os.open(path / name, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    before = clock.monotonic()
    with pytest.raises(IndexUnavailableError, match=r"^timeout$"):
        made.acquire(exclusive=exclusive, deadline=before + 0.01)
    assert clock.monotonic() == pytest.approx(before + 0.01, abs=1e-4) and not made.held
    os.close(fd)
    assert (locked(path, "gate"), locked(path, "main")) == ("", "")
    made.acquire(exclusive=exclusive, deadline=before)
    made.close()
    assert (locked(path, "gate"), locked(path, "main")) == ("", "")


@pytest.mark.parametrize("name", ["gate", "main"])
@pytest.mark.parametrize("gone", [True, False])
def test_a_lock_file_that_was_replaced_locks_nobody_out(
    directory: Directory, path: Path, name: str, gone: bool
) -> None:
    made = Gate(directory)
    (path / name).rename(path / "run" / name)
    if not gone:
        (path / name).write_bytes(b"")
    with pytest.raises(IndexUnavailableError, match="lock files were replaced"):
        made.acquire(exclusive=False, deadline=0.0)
    assert not made.held
    made.close()


def test_a_gate_that_cannot_be_opened_leaves_no_descriptor(directory: Directory, path: Path) -> None:
    (path / "main").unlink()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        Gate(directory)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_lock_that_cannot_be_released_is_closed(
    directory: Directory, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Gate(directory)
    made.acquire(exclusive=True, deadline=0.0)
    flock = directory.files.flock

    def fail(fd: int, kind: int) -> bool:
        if kind == fcntl.LOCK_UN:
            raise OSError(errno.EIO, "x")
        return flock(fd, kind)

    with monkeypatch.context() as patch:
        patch.setattr(directory.files, "flock", fail, raising=False)
        made.release()
    assert (locked(path, "gate"), locked(path, "main")) == ("", "")
    made.acquire(exclusive=True, deadline=0.0)
    assert (locked(path, "gate"), locked(path, "main")) == ("exclusive", "exclusive")
    made.close()


# -- LMDB's file -------------------------------------------------------------------------------


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[tuple[lmdb.Environment, Any]]:
    with (tmp_path / "data.mdb").open("x+b") as file:
        env = open_environment(file.fileno(), 1 << 24)
        with env.begin(write=True) as txn:
            for n in range(1000):
                txn.put(n.to_bytes(4, "big"), bytes(64))
        yield env, file
        env.close()


def test_an_index_that_ends_before_its_last_page_is_refused(environment: tuple[lmdb.Environment, Any]) -> None:
    env, file = environment
    needed = (env.info()["last_pgno"] + 1) * lmdb_files.PAGE
    assert needed > 3 * lmdb_files.PAGE
    os.truncate(file.fileno(), needed - 5)
    extend_to_last_page(env, Files(), file.fileno())
    assert os.fstat(file.fileno()).st_size == needed
    os.truncate(file.fileno(), needed + 5)
    extend_to_last_page(env, Files(), file.fileno())
    assert os.fstat(file.fileno()).st_size == needed + 5
    for size, fine in (
        (needed, True),
        (needed + 1, True),
        (needed - 1, False),
        (2 * lmdb_files.PAGE - 1, False),
        (0, False),
    ):
        os.truncate(file.fileno(), size)
        if fine:
            check_size(env, Files(), file.fileno())
        else:
            with pytest.raises(lmdb.CorruptedError, match="the index file was truncated"):
                check_size(env, Files(), file.fileno())


@pytest.mark.parametrize(
    ("map_size", "blocks", "asked"),
    [(1 << 30, 0, 9 << 20), (4 << 20, 0, 4 << 20), (1 << 30, 5 << 20, None), (1 << 30, (5 << 20) - 4096, 9 << 20),
     (4 << 20, 4 << 20, None), (4 << 20, (4 << 20) - 4096, 4 << 20)],
)  # fmt: skip
def test_blocks_behind_the_index_are_kept_ahead(
    directory: Directory, path: Path, map_size: int, blocks: int, asked: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a file of 1 MiB, eight more, again when fewer than four are left."""
    (path / "index" / "g").mkdir()
    file = path / "index" / "g" / "data.mdb"
    file.touch()
    fd = os.open(file, os.O_RDWR)
    if blocks:
        Files().fallocate(fd, 0, blocks, keep_size=True)
    os.truncate(fd, 1 << 20)
    if blocks:  # a truncation frees what is behind the end
        Files().fallocate(fd, 0, blocks, keep_size=True)
    os.close(fd)
    calls: list[tuple[int, int, bool]] = []
    monkeypatch.setattr(
        directory.files, "fallocate", lambda fd, offset, n, *, keep_size=False: calls.append((offset, n, keep_size)),
        raising=False,
    )  # fmt: skip
    before = len(os.listdir("/proc/self/fd"))
    keep_slack(directory, "g", map_size)
    assert calls == ([(0, asked, True)] if asked else [])
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_a_generation_is_removed_with_all_that_is_in_it(directory: Directory, path: Path, tmp_path: Path) -> None:
    index = path / "index"
    for name in ("g", "h"):
        (index / name / "deep").mkdir(parents=True)
        (index / name / "deep" / "f").write_bytes(b"x")
        (index / name / "data.mdb").write_bytes(b"content")
        (index / name / "link").symlink_to(tmp_path)
    (tmp_path / "kept").write_bytes(b"k")
    os.link(index / "g" / "data.mdb", path / "run" / "copy")
    fd = os.open(index / "h" / "data.mdb", os.O_RDONLY)
    for name in ("g", "h", "none"):
        discard_generation(directory.files, directory.sub("index"), name)
    assert not (index / "g").exists() and not (index / "h").exists()
    assert (path / "run" / "copy").read_bytes() == b"content", "another directory's"
    assert os.fstat(fd).st_size == 0, "its blocks are free, although it is open"
    os.close(fd)
    assert (tmp_path / "kept").exists()
    (index / "f").write_bytes(b"x")
    discard_generation(directory.files, directory.sub("index"), "f")
    assert not (index / "f").exists()


@pytest.mark.parametrize(
    ("size", "map_size", "asked"),
    [
        (9 << 20, 1 << 30, 17 << 20),
        (12 << 20, 1 << 30, 20 << 20),
        (12 << 20, 16 << 20, 16 << 20),
        (0, 1 << 30, 8 << 20),
    ],
)
def test_as_much_is_kept_ahead_of_a_larger_index(
    directory: Directory, path: Path, size: int, map_size: int, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path / "index" / "g").mkdir()
    with (path / "index" / "g" / "data.mdb").open("xb") as file:
        file.truncate(size)
    calls: list[int] = []
    monkeypatch.setattr(
        directory.files, "fallocate", lambda fd, offset, n, *, keep_size=False: calls.append(n), raising=False
    )
    keep_slack(directory, "g", map_size)
    assert calls == [asked]
