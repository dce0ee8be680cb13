"""A rebuild from its lock to the generation that it installs, and what is left when it ends early."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest

import kvfs
from kvfs.directory.config import make_settings
from kvfs.directory.root import Directory
from kvfs.errors import IndexUnavailableError
from kvfs.format import segment as fmt
from kvfs.index.environment import Index
from kvfs.maintenance import rebuild as rebuild_module
from kvfs.maintenance.rebuild import Report, rebuild
from kvfs.system.files import Files
from tests.stores import TINY_BYTES, seeded, segment_files, tiny, tokens_of

PAGES = 5
OTHER = "0123456789abcdef"


@pytest.fixture
def path(memory_path: Path) -> Path:
    """A store without a current generation."""
    where = memory_path / "store"
    with kvfs.open(where, capacity="16MiB") as store:
        store.namespace("m", tiny(), "1").put(tokens_of(1, PAGES), seeded(1, PAGES * TINY_BYTES))
    (where / "index" / "CURRENT").unlink()
    return where


@pytest.fixture
def directory(path: Path) -> Iterator[Directory]:
    with contextlib.closing(Directory(str(path), Files(), read_only=False)) as made:
        yield made


@pytest.fixture
def index(directory: Directory) -> Iterator[Index]:
    made = Index(directory, 2 << 20)
    yield made
    made.close()


def run(directory: Directory, index: Index, *, cancelled: Any = lambda: False) -> Report | None:
    return rebuild(directory, index, make_settings("16MiB"), directory.store_id(), alone=True, cancelled=cancelled)


def generations(path: Path) -> list[str]:
    return sorted(p.name for p in (path / "index").iterdir() if p.is_dir())


def stale(path: Path, name: str = OTHER) -> None:
    (path / "index" / name).mkdir()
    (path / "index" / name / "data.mdb").write_bytes(bytes(8192))


def test_what_rebuilds_that_died_have_left_is_removed(path: Path, directory: Directory, index: Index) -> None:
    (before,) = generations(path)
    stale(path)
    stale(path, "notes")
    report = run(directory, index)
    assert report is not None and report.pages == PAGES
    (name,) = set(generations(path)) - {"notes"}
    assert name not in (before, OTHER) and index.generation == name
    assert (path / "index" / "CURRENT").read_text() == name
    modes = {file.name: file.stat().st_mode & 0o777 for file in (path / "index" / name).iterdir()}
    assert modes == {"data.mdb": 0o600, "users": 0o600} and (path / "run" / "rebuild").stat().st_mode & 0o777 == 0o600
    assert index.read(lambda s: s.used_bytes(), 5.0) > 0


def test_where_a_generation_is_current_nothing_is_built_or_removed(
    path: Path, directory: Directory, index: Index
) -> None:
    assert run(directory, index) is not None
    before = generations(path)
    stale(path)
    assert run(directory, index) is None and generations(path) == sorted([OTHER, *before])


def test_one_process_builds_at_a_time(path: Path, directory: Directory, index: Index) -> None:
    (path / "run" / "rebuild").touch()
    stale(path)
    fd = os.open(path / "run" / "rebuild", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    before = generations(path)
    assert run(directory, index) is None and generations(path) == before
    os.close(fd)
    assert run(directory, index) is not None


def test_a_rebuild_that_is_cancelled_leaves_nothing(path: Path, directory: Directory, index: Index) -> None:
    asked: list[int] = []

    def cancelled() -> bool:
        asked.append(len(generations(path)))
        return len(asked) == 2

    with pytest.raises(IndexUnavailableError, match=r"^closed$"):
        run(directory, index, cancelled=cancelled)
    assert asked == [1, 1], "the new one; it is asked before each step"
    assert generations(path) == [] and not (path / "index" / "CURRENT").exists()


def test_an_error_of_the_new_index_is_one_of_the_index(
    path: Path, directory: Directory, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise lmdb.MapFullError("full")

    monkeypatch.setattr(rebuild_module, "build", fail)
    with pytest.raises(IndexUnavailableError, match=r"index error: .*full"):
        run(directory, index)
    assert generations(path) == []


@pytest.mark.parametrize(
    ("raised", "current", "kept"),
    [
        (IndexUnavailableError("x"), False, False),
        (KeyboardInterrupt(), False, False),
        (KeyboardInterrupt(), True, True),
        (TimeoutError(), False, True),
        (IndexUnavailableError("x"), True, True),
    ],
)
def test_a_generation_that_may_have_become_current_stays(
    path: Path, directory: Directory, index: Index, monkeypatch: pytest.MonkeyPatch, raised: BaseException,
    current: bool, kept: bool,
) -> None:  # fmt: skip
    names: list[str] = []

    def install(name: str, timeout: float) -> None:
        names.append(name)
        (path / "index" / "CURRENT").write_text(name if current else "f" * 16)
        raise raised

    monkeypatch.setattr(index, "install", install)
    with pytest.raises(type(raised)):
        run(directory, index)
    assert generations(path) == (names if kept else [])
    (path / "index" / "CURRENT").unlink()


@pytest.mark.parametrize("group", [7, 1])
def test_a_record_of_a_group_that_its_namespace_lacks_gets_no_row(
    path: Path, directory: Directory, index: Index, group: int
) -> None:
    (file,) = segment_files(path)
    data = bytearray(file.read_bytes())
    seed = fmt.segment_seed(bytes.fromhex(file.stem))
    at = fmt.FIRST_TABLE + 2 * fmt.ENTRY_BYTES
    entry = fmt.parse_entry(bytes(data[at : at + fmt.ENTRY_BYTES]), seed)
    assert entry is not None and entry.kind == fmt.KIND_PART
    data[at : at + fmt.ENTRY_BYTES] = fmt.pack_entry(entry._replace(group=group), seed)
    file.write_bytes(data)
    report = run(directory, index)
    assert report is not None and (report.pages, report.skipped_entries) == (PAGES - 1, 1)
