"""The index of a process: transactions and what their errors say, generations that come and go, and a clean close."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lmdb
import pytest

import kvfs
from kvfs.directory.root import Directory
from kvfs.errors import IndexUnavailableError
from kvfs.index import environment
from kvfs.index.environment import Index
from kvfs.index.session import Session
from kvfs.index.trust import checksum_of, read_state
from kvfs.system.files import Files
from tests.stores import TINY_BYTES, seeded, tiny, tokens_of, wait_until


@pytest.fixture
def path(memory_path: Path) -> Path:
    with kvfs.open(memory_path / "store", capacity="16MiB") as store:
        store.namespace("m", tiny(), "1").put(tokens_of(1, 4), seeded(1, 4 * TINY_BYTES))
    return memory_path / "store"


class Noting(Files):
    """Notes what is read ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def readahead(self, fd: int, offset: int, nbytes: int) -> None:
        self.calls.append(("readahead", offset, nbytes))


@contextlib.contextmanager
def opened(path: Path, files: Files | None = None, *, read_only: bool = False) -> Iterator[Index]:
    with contextlib.closing(Directory(str(path), files or Files(), read_only=read_only)) as directory:
        index = Index(directory, 2 << 20)
        try:
            yield index
        finally:
            if not index._closed:
                index.close()


def used(session: Session) -> int:
    return session.ledger().used


def generations(path: Path) -> list[str]:
    return sorted(p.name for p in (path / "index").iterdir() if p.is_dir())


def locked(path: Path, name: str = "gate") -> int:
    fd = os.open(path / name, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


# -- transactions ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raised", "message", "errors"),
    [
        (OSError(errno.EIO, "broken"), "^index error: broken$", 1),
        (lmdb.MapFullError("full"), "^index full$", 0),
        (lmdb.CorruptedError("x"), "^index error: ", 1),
        (IndexUnavailableError("other"), "^other$", 0),
    ],
)
@pytest.mark.parametrize("call", ["read", "write"])
def test_what_an_error_in_a_transaction_says(
    path: Path, raised: Exception, message: str, errors: int, call: str
) -> None:
    def fail(session: Session) -> None:
        raise raised

    with opened(path) as index:
        assert index.read(used, 5.0) > 0
        before, name = index.errors, index.generation
        with pytest.raises(IndexUnavailableError, match=message):
            getattr(index, call)(fail, 5.0)
        assert index.errors == before + errors and index.timeouts == 0
        retired = isinstance(raised, lmdb.CorruptedError)
        assert (generations(path) == []) is retired and (path / "index" / "CURRENT").exists() is not retired
        if retired:
            assert index.is_missing(5.0)
            with pytest.raises(IndexUnavailableError, match=r"^rebuilding$"):
                index.read(used, 5.0)
        else:
            assert index.read(used, 5.0) > 0 and index.generation == name and not index.is_missing(5.0)
    with pytest.raises(IndexUnavailableError, match=r"^closed$"):
        index.read(used, 5.0)
    assert not index.is_missing(5.0) and index.native_session() is None


def test_a_transaction_that_fails_changes_nothing(path: Path) -> None:
    def change(session: Session) -> None:
        session.put_row(b"k" * 40, b"v")
        raise IndexUnavailableError("x")

    with opened(path) as index:
        with pytest.raises(IndexUnavailableError):
            index.write(change, 5.0)
        assert index.read(lambda s: s.keys_there([b"k" * 40]), 5.0) == []
        index.write(lambda s: s.put_row(b"k" * 40, b"v"), 5.0)
        assert index.read(lambda s: s.keys_there([b"k" * 40]), 5.0) == [b"k" * 40]


def test_slices_come_in_holds_of_a_bounded_number_of_rows(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "ROWS_PER_HOLD", 3)
    asked: list[tuple[bytes, int]] = []

    def look(session: Session, after: bytes, rows_max: int) -> tuple[list[int], bytes | None]:
        asked.append((after, rows_max))
        n = len(asked)
        return [n, n], bytes([n]) if n < 3 else None

    with opened(path) as index:
        assert list(index.slices(look, 5.0)) == [1, 1, 2, 2, 3, 3]
    assert asked == [(b"", 3), (b"\1", 3), (b"\2", 3)]


def test_the_time_of_a_transaction_is_that_of_the_clock_in_seconds(path: Path) -> None:
    class Late(Files):
        def now_us(self) -> int:
            return 1_700_000_000_999_999

    with opened(path, Late()) as index:
        assert index.read(lambda s: s.now_s, 5.0) == 1_700_000_000


# -- generations -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gate", "main"])
@pytest.mark.parametrize("step", ["install", "retire", "write"])
def test_a_step_waits_for_the_gate_and_changes_nothing_without_it(path: Path, step: str, name: str) -> None:
    with opened(path) as index:
        index.read(used, 5.0)
        before, content = generations(path), (path / "index" / "CURRENT").read_bytes()
        calls: dict[str, Callable[[], object]] = {
            "install": lambda: index.install("0" * 16, 0.05), "retire": lambda: index.retire(0.05),
            "write": lambda: index.write(lambda s: None, 0.05),
        }  # fmt: skip
        fd = locked(path, name)
        with pytest.raises(IndexUnavailableError, match=r"^timeout$"):
            calls[step]()
        os.close(fd)
        assert generations(path) == before and (path / "index" / "CURRENT").read_bytes() == content
        wait_until(lambda: not index._probing)  # finds out meanwhile whether the index answers again
        assert not index._gate.held


def test_a_generation_is_not_installed_while_another_process_reads(path: Path) -> None:
    with opened(path) as index:
        index.read(used, 5.0)
        fd = os.open(path / "gate", os.O_RDWR)
        fcntl.flock(fd, fcntl.LOCK_SH)
        with pytest.raises(IndexUnavailableError, match=r"^timeout$"):
            index.install("0" * 16, 0.05)
        os.close(fd)


@pytest.mark.parametrize(
    ("paused", "inside", "closed"),
    [(True, True, True), (True, False, True), (False, False, True), (False, True, False)],
)
def test_a_forked_child_closes_what_it_has_inherited_unless_a_thread_was_in_lmdb(
    paused: bool, inside: bool, closed: bool
) -> None:
    closes = list[str]()
    env = SimpleNamespace(close=lambda: closes.append("environment"))
    index: Any = SimpleNamespace(
        _close_native=lambda: closes.append("native"), _env=env, _paused=paused, _in_lmdb=inside,
        _gate=SimpleNamespace(close=lambda: closes.append("gate")),
    )  # fmt: skip
    Index.abandon(index)
    assert closes == ["native", *(["environment"] if closed else []), "gate"] and index._env is None


def test_a_generation_that_is_retired_is_gone(path: Path) -> None:
    with opened(path) as index:
        index.read(used, 5.0)
        index.retire()
        assert index._env is None and index._data.fd < 0, "it is closed before it is removed"
        assert generations(path) == [] and not (path / "index" / "CURRENT").exists() and index.is_missing(5.0)
        index.retire()


def test_a_generation_is_installed_only_where_none_is_current(path: Path) -> None:
    with opened(path) as index:
        with pytest.raises(IndexUnavailableError, match=r"^another generation is current$"):
            index.install("0" * 16, 5.0)
        (old,) = generations(path)
        folder = path / "index" / ("0" * 16)
        folder.mkdir()
        (folder / "users").write_bytes(b"")
        (folder / "data.mdb").write_bytes((path / "index" / old / "data.mdb").read_bytes())
        (path / "index" / "CURRENT").write_bytes(b"damaged")
        index.install("0" * 16, 5.0)
        assert (path / "index" / "CURRENT").read_bytes() == b"0" * 16 and index.generation == "0" * 16
        assert index.read(used, 5.0) > 0
        state = read_state(index._directory)
        assert state is not None and (state.generation, state.clean) == ("0" * 16, False), "it is in use"
        st = (folder / "data.mdb").stat()
        assert (state.device, state.inode) == (st.st_dev, st.st_ino)
        index._closed = True
        with pytest.raises(IndexUnavailableError, match=r"^closed$"):
            index.install("0" * 16, 5.0)
        index._closed = False


def test_a_new_generation_replaces_one_that_is_not_trusted(path: Path) -> None:
    (old,) = generations(path)
    folder = path / "index" / ("0" * 16)
    folder.mkdir()
    (folder / "users").write_bytes(b"")
    (folder / "data.mdb").write_bytes((path / "index" / old / "data.mdb").read_bytes())
    (path / "state").write_bytes(b"damaged")
    with opened(path) as index:
        index.install("0" * 16, 5.0)
        assert generations(path) == ["0" * 16], "the other one is removed"


@pytest.mark.parametrize(
    ("error", "kept"), [(errno.EMFILE, True), (errno.ENOMEM, True), (errno.EACCES, True), (errno.EIO, False)]
)
def test_an_index_that_only_this_process_cannot_open_is_kept(
    path: Path, monkeypatch: pytest.MonkeyPatch, error: int, kept: bool
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(error, "x")

    with opened(path) as index, monkeypatch.context() as patch:
        patch.setattr(environment, "open_environment", fail)
        with pytest.raises(IndexUnavailableError, match="index error: " if kept else r"^rebuilding$"):
            index.read(used, 5.0)
    assert bool(generations(path)) is kept


def test_a_private_index_has_a_name_of_its_own(path: Path, tmp_path: Path) -> None:
    (name,) = generations(path)
    with (
        contextlib.closing(Directory(str(path), Files(), read_only=True)) as directory,
        (path / "index" / name / "data.mdb").open("r+b") as file,
    ):
        names = set()
        for _ in range(3):
            index = Index(directory, 2 << 20, private=True)
            index.open_private(file.fileno())
            assert index.generation.startswith("private-") and len(index.generation) == 16
            assert index.read(used, 5.0) > 0 and index.map_size == 2 << 20
            names.add(index.generation)
            index.close()
        assert len(names) == 3


# -- the close ---------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [False, True])
def test_the_last_user_leaves_the_index_clean(path: Path, other: bool) -> None:
    (name,) = generations(path)
    with opened(path) as index:
        index.read(used, 5.0)
        state = read_state(index._directory)
        assert state is not None and not state.clean and state.generation == name
        users = os.open(path / "index" / name / "users", os.O_RDONLY)
        if other:
            fcntl.flock(users, fcntl.LOCK_SH)
        index.close()
        state = read_state(index._directory)
        os.close(users)
        assert state is not None and state.clean is not other
        with (path / "index" / name / "data.mdb").open("rb") as file:
            assert state.checksum == ("" if other else checksum_of(Files(), file.fileno()))
    fd = locked(path)
    os.close(fd)  # the gate is free


def test_a_reader_changes_nothing(path: Path) -> None:
    before = (path / "state").read_bytes()
    with opened(path, read_only=True) as index:
        assert index.read(used, 5.0) > 0
    assert (path / "state").read_bytes() == before


@pytest.mark.parametrize("read_only", [False, True])
def test_an_index_is_read_ahead_and_has_slack(path: Path, read_only: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Noting()
    (name,) = generations(path)
    size = (path / "index" / name / "data.mdb").stat().st_size
    with opened(path, files, read_only=read_only) as index:
        index.read_ahead()
        slack: list[tuple[str, int]] = []
        monkeypatch.setattr(environment, "keep_slack", lambda directory, name, size: slack.append((name, size)))
        index.keep_slack()
        assert files.calls == slack == [], "nothing is open"
        index.read(used, 5.0)
        index.read_ahead()
        assert files.calls == [("readahead", 0, size)]
        monkeypatch.setattr(environment, "READ_AHEAD_BYTES_MAX", 4096)
        index.read_ahead()
        assert files.calls.pop() == ("readahead", 0, 4096)
        index.keep_slack()
        assert slack == ([] if read_only else [(name, 2 << 20)])
        before = len(os.listdir("/proc/self/fd"))
        index.read_ahead()
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_fork_waits_until_the_index_thread_is_between_requests(path: Path) -> None:
    with opened(path) as index:
        index.read(used, 5.0)
        resume = index.quiesce(5.0)
        assert index._paused
        done = threading.Event()

        def read() -> None:
            index.read(used, 20.0)
            done.set()

        thread = threading.Thread(target=read)
        thread.start()
        assert not done.wait(0.05), "requests wait for the end of the fork"
        resume()
        assert done.wait(10.0)
        thread.join(10.0)
        assert not index._paused


@pytest.mark.parametrize("name", ["gate", "main"])
def test_a_damaged_generation_stays_while_another_process_uses_it(path: Path, name: str) -> None:
    """It is removed under the exclusive gate only."""

    def fail(session: Session) -> None:
        fd = os.open(path / name, os.O_RDWR)  # another process begins to read meanwhile
        fcntl.flock(fd, fcntl.LOCK_SH)
        held.append(fd)
        raise lmdb.CorruptedError("x")

    held: list[int] = []
    with opened(path) as index:
        index.read(used, 5.0)
        before = generations(path)
        with pytest.raises(IndexUnavailableError, match="index error"):
            index.read(fail, 5.0)
        assert generations(path) == before and (path / "index" / "CURRENT").exists() and not index._gate.held
        os.close(held[0])
        assert index.is_missing(5.0) and generations(path) == [], "it is dirty, and nobody else uses it"


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "full"), lmdb.DiskError("x"), IndexUnavailableError("timeout")]
)
def test_an_index_that_cannot_be_left_clean_is_closed(
    path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    with opened(path) as index:
        index.read(used, 5.0)
        users, data = index._users, index._data
        monkeypatch.setattr(environment, "checksum_of", fail)
        index.close()
        assert index._env is None and (users.fd, data.fd) == (-1, -1) and not index._gate.held
        state = read_state(index._directory)
        assert state is not None and not state.clean
    fd = locked(path)
    os.close(fd)  # the gate is free


@pytest.mark.parametrize("name", ["0" * 16, "f" * 16])
def test_a_generation_that_this_process_could_not_open_is_removed_when_another_replaces_it(
    path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (old,) = generations(path)
    folder = path / "index" / name
    folder.mkdir()
    (folder / "users").write_bytes(b"")
    (folder / "data.mdb").write_bytes((path / "index" / old / "data.mdb").read_bytes())
    opens, errors = environment.open_environment, [OSError(errno.EMFILE, "too many")]

    def sometimes(*args: Any, **how: Any) -> Any:
        if errors:
            raise errors.pop()
        return opens(*args, **how)

    monkeypatch.setattr(environment, "open_environment", sometimes)
    with opened(path) as index:
        index.install(name, 5.0)
        assert generations(path) == [name] and index.generation == name and index.read(used, 5.0) > 0
