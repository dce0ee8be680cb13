"""The directory of a store: its super file, its small files, its layout and modes, and what each error says."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.directory import root
from kvfs.directory.root import Directory
from kvfs.errors import (
    CorruptError,
    FormatError,
    KvfsError,
    NoSpaceError,
    StoreAccessError,
    StoreNotFoundError,
    StoreReadOnlyError,
)  # fmt: skip
from kvfs.format.checksums import checksum
from kvfs.system.files import Files
from kvfs.testing import Fault, FaultyFiles

ID = bytes(range(16))


@pytest.fixture
def path(memory_path: Path) -> Path:
    kvfs.open(memory_path / "store", capacity="16MiB").close()
    return memory_path / "store"


@pytest.fixture
def directory(path: Path) -> Iterator[Directory]:
    with contextlib.closing(Directory(str(path), Files(), read_only=False)) as made:
        yield made


def changed(**changes: Any) -> bytes:
    """A super file with other fields and a checksum that matches them."""
    body = json.loads(root.pack_super(ID, 5))
    del body["check"]
    for name, value in changes.items():
        if value is None:
            del body[name]
        else:
            body[name] = value
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps({**body, "check": f"{checksum(canonical):016x}"}).encode()


def features(**named: list[str]) -> dict[str, list[str]]:
    return {"compatible": [], "read_only_compatible": [], "incompatible": [], **named}


def test_a_super_file_holds_the_id() -> None:
    assert root.parse_super(root.pack_super(ID, 5), "p", read_only=False) == ID
    body = json.loads(root.pack_super(ID, 5))
    assert (body["kvfs"], body["format"], body["created_us"], body["store_id"]) == ("store", 1, 5, ID.hex())
    assert root.pack_super(ID, 5).endswith(b"}\n")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "p/super is damaged or not kvfs's"),
        (b"[]", "p/super is damaged or not kvfs's"),
        (b"5", "p/super is damaged or not kvfs's"),
        (b"[" * 100_000, "p/super is damaged or not kvfs's"),
        (changed(kvfs="file"), "(not the super file of a store)"),
        (changed(store_id="00" * 15), "(not the super file of a store)"),
        (changed(store_id="x"), "p/super is damaged or not kvfs's"),
        (changed(format="1"), "(not the super file of a store)"),
        (changed(format=True), "(not the super file of a store)"),
        (changed(format=2), "p has format 2, this kvfs reads format 1"),
        (changed(format=0), "p has format 0, this kvfs reads format 1"),
        (changed(features=None), "p/super is damaged or not kvfs's"),
        (changed(features=features(incompatible=["x"])), "p uses features ['x'] that this kvfs does not know"),
        (changed(features=features(read_only_compatible=["x"])), "features ['x'] that this kvfs may only read"),
        (changed(created_us=6).replace(b"6", b"7"), "p/super is damaged (checksum)"),
    ],
)
def test_a_super_file_that_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(FormatError) as raised:
        root.parse_super(data, "p", read_only=False)
    assert message in str(raised.value)


def test_features_that_may_be_ignored() -> None:
    assert root.parse_super(changed(features=features(compatible=["x"])), "p", read_only=False) == ID
    assert root.parse_super(changed(features=features(read_only_compatible=["x"])), "p", read_only=True) == ID


def test_small_files_are_bounded_and_replaced(directory: Directory, path: Path) -> None:
    directory.write_small("state", b"12345")
    assert directory.read_small("state", 5) == b"12345" and directory.read_small("none", 5) is None
    with pytest.raises(FormatError, match=r"state has 5 bytes, at most 4 are expected: not written by kvfs"):
        directory.read_small("state", 4)
    directory.write_small("one", b"x", sub="pins")
    assert directory.read_small("one", 5, sub="pins") == b"x" and (path / "pins" / "one").read_bytes() == b"x"
    assert stat.S_IMODE((path / "pins" / "one").stat().st_mode) == 0o600
    with pytest.raises(FormatError, match=r"pins/one has 1 bytes"):
        directory.read_small("one", 0, sub="pins")
    directory.remove("one", sub="pins")
    directory.remove("one", sub="pins")
    assert not list((path / "pins").iterdir()) and not list(path.glob(".*"))


def test_a_folder_in_the_place_of_a_small_file_is_moved_aside(directory: Directory, path: Path) -> None:
    (path / "pins" / "one").mkdir()
    (path / "pins" / "one" / "kept").write_bytes(b"k")
    directory.write_small("one", b"x", sub="pins")
    assert (path / "pins" / "one").read_bytes() == b"x"
    (aside,) = (path / "quarantine").iterdir()
    assert aside.name.startswith("one.") and (aside / "kept").read_bytes() == b"k"


class Counting(Files):
    """Counts syncs; fails one kind of call."""

    def __init__(self, fails: str = "") -> None:
        super().__init__()
        self.synced, self.fails = 0, fails

    def fsync(self, fd: int) -> None:
        self.synced += 1
        if self.fails == "fsync":
            raise OSError(errno.EIO, "broken")

    def rename(self, *args: Any, **how: Any) -> None:
        if self.fails == "rename":
            raise OSError(errno.EIO, "broken")
        super().rename(*args, **how)


@pytest.mark.parametrize(("how", "syncs"), [({}, 2), ({"sync_folder": False}, 1), ({"durable": False}, 0)])
def test_a_durable_file_is_synced_and_so_is_its_folder(path: Path, how: dict[str, Any], syncs: int) -> None:
    files = Counting()
    with contextlib.closing(Directory(str(path), files, read_only=False)) as directory:
        directory.write_small("state", b"x", **how)
    assert files.synced == syncs


@pytest.mark.parametrize("fails", ["fsync", "rename"])
def test_a_small_file_that_cannot_be_written_leaves_the_old_one_and_no_other(path: Path, fails: str) -> None:
    files = Counting(fails)
    before = (path / "kvfs.toml").read_bytes()
    with contextlib.closing(Directory(str(path), files, read_only=False)) as directory:
        descriptors = len(os.listdir("/proc/self/fd"))
        with pytest.raises(OSError, match="broken"):
            directory.write_small("kvfs.toml", b"x")
        assert len(os.listdir("/proc/self/fd")) == descriptors
    assert (path / "kvfs.toml").read_bytes() == before and not list(path.glob(".*"))


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("name", ["segments", "run", "run/use", "purged"])
def test_a_missing_folder_is_made_or_named(path: Path, name: str, read_only: bool) -> None:
    for file in sorted((path / name).rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    (path / name).rmdir()
    with contextlib.closing(Directory(str(path), Files(), read_only=read_only)) as directory:
        if read_only and name != "purged":
            with pytest.raises(CorruptError, match=f"{name}.* is missing: open the store for writing once"):
                root.check_layout(directory)
            return
        root.check_layout(directory)
        assert (path / name).is_dir() is not read_only
        if name == "run" and not read_only:
            assert (path / "run" / "gc").is_file() and (path / "run" / "use").is_dir()


def test_a_file_in_the_place_of_a_folder_is_named(path: Path) -> None:
    (path / "purged").rmdir()
    (path / "purged").write_bytes(b"")
    with (
        contextlib.closing(Directory(str(path), Files(), read_only=False)) as directory,
        pytest.raises(CorruptError, match="purged is no directory: move it away"),
    ):
        root.check_layout(directory)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (errno.EACCES, StoreAccessError, "; run as the store's owner or a member of its group"),
        (errno.EPERM, StoreAccessError, "; run as the store's owner or a member of its group"),
        (errno.EROFS, StoreReadOnlyError, ": open it with read_only=True, or create it elsewhere"),
        (errno.ENOSPC, NoSpaceError, ": make room on its file system"),
        (errno.EDQUOT, NoSpaceError, ": make room on its file system"),
        (errno.EIO, StoreAccessError, "; the device fails: look at dmesg"),
        (errno.ELOOP, StoreAccessError, "; choose another directory"),
    ],
)
@pytest.mark.parametrize(("name", "shown"), [(None, ""), ("p", ""), ("q", " (q)")])
def test_what_an_error_of_the_disk_says(
    error: int, kind: type[KvfsError], message: str, name: str | None, shown: str
) -> None:
    with pytest.raises(kind) as raised, root.translate_os_errors("p"):
        raise OSError(error, os.strerror(error), name)
    assert str(raised.value) == f"p: {os.strerror(error)}{shown}{message}"
    assert type(raised.value) is kind


def test_what_is_a_store(path: Path, tmp_path: Path) -> None:
    assert root.is_store(str(path))
    assert not root.is_store(str(tmp_path)) and not root.is_store(str(tmp_path / "none"))
    assert not root.is_store(str(path / "super"))
    (tmp_path / "super").symlink_to("nowhere")
    assert root.is_store(str(tmp_path)), "valid or not"


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda path: None, StoreNotFoundError, "does not exist; create a store with"),
        (lambda path: path.write_bytes(b""), StoreNotFoundError, "is a file, and a store is a directory"),
    ],
)
def test_what_cannot_be_opened(
    tmp_path: Path, make: Callable[[Path], None], kind: type[KvfsError], message: str
) -> None:
    make(tmp_path / "x")
    with pytest.raises(kind, match=message):
        Directory(str(tmp_path / "x"), Files(), read_only=True)


def test_a_directory_without_super_is_no_store_and_one_with_pages_has_lost_it(path: Path, tmp_path: Path) -> None:
    with (
        contextlib.closing(Directory(str(tmp_path), Files(), read_only=True)) as empty,
        pytest.raises(StoreNotFoundError, match="holds no kvfs store"),
    ):
        empty.store_id()
    (path / "super").unlink()
    with contextlib.closing(Directory(str(path), Files(), read_only=False)) as directory:
        assert not directory.has_super()
        with pytest.raises(StoreNotFoundError):
            directory.store_id()
        for name in ("segments", "pins"):
            (path / name / "x").write_bytes(b"")
            with pytest.raises(CorruptError, match=rf"super file is lost \({name}/ is not empty\)"):
                directory.store_id()
            (path / name / "x").unlink()
        directory.publish_super(ID, 5)
        directory.publish_super(bytes(16), 6)
        assert directory.has_super() and directory.store_id() == ID, "the first of two creators wins"
    assert not list(path.glob(".*"))


@pytest.mark.parametrize(
    ("mode", "left"), [(0o700, 0o700), (0o707, 0o700), (0o755, 0o750), (0o771, 0o770), (0o702, 0o700)]
)
def test_others_lose_their_permissions(path: Path, mode: int, left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    path.chmod(mode)

    def refuse(*_: Any) -> None:
        raise PermissionError

    with contextlib.closing(Directory(str(path), Files(), read_only=False)) as directory:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fchmod", refuse)
            if mode & 0o002:
                with pytest.raises(StoreAccessError, match=f"writable by every user .mode {mode:04o}."):
                    root.tighten(directory)
            else:
                root.tighten(directory)
        root.tighten(directory)
    assert stat.S_IMODE(path.stat().st_mode) == left


@pytest.mark.parametrize(
    ("mode", "file", "folder"), [(0o700, 0o600, 0o700), (0o770, 0o660, 0o2770), (0o750, 0o600, 0o700)]
)
def test_a_group_that_may_write_the_directory_shares_its_files(path: Path, mode: int, file: int, folder: int) -> None:
    path.chmod(mode)
    with contextlib.closing(Directory(str(path), Files(), read_only=False)) as directory:
        assert (directory.file_mode, directory.dir_mode) == (file, folder)


@pytest.mark.parametrize(
    ("store", "folder", "expected"),
    [(0o700, 0o2770, 0o600), (0o770, 0o2770, 0o640), (0o770, 0o770, 0o600), (0o770, 0o2750, 0o600)],
)
def test_what_is_written_for_a_group_is_readable_by_it(
    path: Path, tmp_path: Path, store: int, folder: int, expected: int
) -> None:
    path.chmod(store)
    (tmp_path / "out").mkdir()
    (tmp_path / "out").chmod(folder)
    before = os.umask(0)
    try:
        with contextlib.closing(Directory(str(path), Files(), read_only=False)) as directory:
            os.close(directory.opener(str(tmp_path / "out" / "file"), os.O_CREAT | os.O_WRONLY))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out" / "file").stat().st_mode) == expected


def test_a_store_is_made_where_nothing_of_others_is(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError, match="none does not exist; create it first"):
        root.create(str(tmp_path / "none" / "x"), b"capacity = 16777216\n", Files())
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "notes").write_bytes(b"")
    (tmp_path / "x" / "a").write_bytes(b"")
    attempts: list[Callable[[], None]] = [
        partial(root.create, str(tmp_path / "x"), b"", Files()),
        partial(root.check_free, str(tmp_path / "x"), Files()),
    ]
    for attempt in attempts:
        with pytest.raises(FormatError, match=r"is not empty .'a' is not kvfs's.: give kvfs a directory of its own"):
            attempt()
    for name in ("notes", "a"):
        (tmp_path / "x" / name).unlink()
    for name in (".super.1", ".kvfs.toml.1", ".README.txt.1", ".CACHEDIR.TAG.1", ".state.1", "lost+found", "epochs"):
        (tmp_path / "x" / name).write_bytes(b"")
    root.check_free(str(tmp_path / "x"), Files())
    root.create(str(tmp_path / "x"), b"capacity = 16777216\n", Files())
    assert (tmp_path / "x" / "kvfs.toml").read_bytes() == b"capacity = 16777216\n"
    assert (tmp_path / "x" / "CACHEDIR.TAG").read_bytes().startswith(b"Signature: 8a477f597d28d172789f06886806bc55\n")
    assert b"It may be deleted as a whole" in (tmp_path / "x" / "README.txt").read_bytes()
    assert {f.name for f in (tmp_path / "x").iterdir()} >= {"gate", "main", "super", *root.SUBDIRECTORIES} - {"run/use"}
    root.create(str(tmp_path / "x"), b"another", Files())
    assert (tmp_path / "x" / "kvfs.toml").read_bytes() == b"capacity = 16777216\n"


def test_descriptors_of_folders_are_opened_once(directory: Directory) -> None:
    first = directory.sub("run/use")
    before = len(os.listdir("/proc/self/fd"))
    assert directory.sub("run/use") == first and len(os.listdir("/proc/self/fd")) == before
    directory.close()
    assert directory.root == -1 and len(os.listdir("/proc/self/fd")) == before - 2


@pytest.mark.parametrize(
    ("name", "error", "fine"),
    [("purged", errno.ENOSPC, True), ("purged", errno.EIO, False), ("pins", errno.ENOSPC, False)],
)
def test_on_a_full_disk_a_store_is_opened_without_a_folder_of_later_versions(
    path: Path, name: str, error: int, fine: bool
) -> None:
    (path / name).rmdir()
    files = FaultyFiles(Fault(1, "mkdir", error=error))
    with contextlib.closing(Directory(str(path), files, read_only=False)) as opened:
        if fine:
            root.check_layout(opened)
        else:
            with pytest.raises(OSError, match="injected"):
                root.check_layout(opened)
        assert files.fired == 1 and not (path / name).exists()
        root.check_layout(opened)
        assert (path / name).is_dir()


@pytest.mark.parametrize("there", [True, False])
def test_a_reader_needs_all_folders_but_those_of_later_versions(path: Path, there: bool) -> None:
    (path / ("purged" if there else "quarantine")).rmdir()
    with contextlib.closing(Directory(str(path), Files(), read_only=True)) as opened:
        if there:
            root.check_layout(opened)
        else:
            with pytest.raises(CorruptError, match=f"{path}/quarantine is missing: open the store for writing once"):
                root.check_layout(opened)
    assert not (path / ("purged" if there else "quarantine")).exists()


def test_the_lock_of_evictions_is_made_where_it_is_missing(path: Path) -> None:
    (path / "run" / "gc").unlink()
    for read_only in (True, False):
        with contextlib.closing(Directory(str(path), Files(), read_only=read_only)) as opened:
            root.check_layout(opened)
        assert (path / "run" / "gc").exists() is not read_only
    assert (path / "run" / "gc").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("fails", [False, True])
def test_a_store_that_is_made_or_not_leaves_no_descriptor(tmp_path: Path, fails: bool) -> None:
    before = len(os.listdir("/proc/self/fd"))
    files = FaultyFiles(*[Fault(1, "rename")] * fails)
    with contextlib.suppress(StoreAccessError):
        root.create(str(tmp_path / "store"), b"capacity = 16777216\n", files)
    assert files.fired == fails and root.is_store(str(tmp_path / "store")) is not fails
    root.create(str(tmp_path / "store"), b"capacity = 16777216\n", Files())
    assert len(os.listdir("/proc/self/fd")) == before
