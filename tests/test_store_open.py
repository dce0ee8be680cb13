"""Opening and creating: what is refused, with which remedy, and that a store opens again as it was left."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvfs
from kvfs import (
    ConfigError,
    CorruptError,
    FormatError,
    KvfsError,
    Quota,
    StoreAccessError,
    StoreLockedError,
    StoreNotFoundError,
    StoreReadOnlyError,
)
from kvfs.directory import config_file
from kvfs.directory.config import make_settings, parse_duration, parse_size, parse_toml, to_toml
from kvfs.directory.root import _canonical
from kvfs.doctor.checks import diagnose
from kvfs.errors import IndexUnavailableError
from kvfs.format.checksums import checksum
from kvfs.maintenance.verify import restore_super
from kvfs.runtime import registry
from kvfs.runtime.background import TICK_SECONDS
from kvfs.segments.scan import scan_segment
from kvfs.system.files import Files
from tests.stores import TINY_BYTES, counters, restored, run_child, seeded, segment_files, tiny, tokens_of

NO_OWNER = 65534
CHUNKS = 4
#: stores of children that are not to be closed
KEPT: list[kvfs.Store] = []
TOKENS, PAGES = tokens_of(1, CHUNKS), seeded(1, CHUNKS * TINY_BYTES)


@pytest.fixture
def path(memory_path: Path) -> Path:
    """A closed store with one prompt in it."""
    with kvfs.open(memory_path / "store", capacity="16MiB") as store:
        assert store.namespace("m", tiny(), revision="r1").put(TOKENS, PAGES).stored == CHUNKS
    return memory_path / "store"


def serves(store: kvfs.Store) -> bool:
    assert store.wait_ready(10)
    return restored(store.namespace("m", tiny(), revision="r1"), TOKENS) == PAGES


def tree(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


# ---------------------------------------------------------------- creating


def test_a_new_store_needs_a_capacity(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="capacity="):
        kvfs.open(store_path)
    with pytest.raises(StoreNotFoundError, match="capacity="):
        kvfs.open(store_path, create=False, capacity="16MiB")
    with pytest.raises(StoreNotFoundError):
        kvfs.open(store_path, read_only=True, capacity="16MiB")
    assert not store_path.exists()
    monkeypatch.setenv("KVFS_CAPACITY", "16MiB")
    monkeypatch.setenv("KVFS_DIR", str(store_path))
    with kvfs.open() as store:
        assert store.settings.capacity_bytes == 16 << 20
    monkeypatch.delenv("KVFS_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(store_path.parent / "cache"))
    (store_path.parent / "cache").mkdir()
    with kvfs.open() as store:  # the default of the command
        assert store.path == str(store_path.parent / "cache" / "kvfs")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # a user without a home directory
    with pytest.raises(ConfigError, match="HOME"):
        kvfs.open()
    with pytest.raises(ConfigError, match="path is empty"):
        kvfs.open("")


BAD_ARGUMENTS: dict[str, tuple[dict[str, Any], type[KvfsError]]] = {
    "capacity too small": ({"capacity": "15MiB"}, ConfigError),
    "capacity zero": ({"capacity": 0}, ConfigError),
    "negative capacity": ({"capacity": -1}, ConfigError),
    "capacity of words": ({"capacity": "plenty"}, ConfigError),
    "capacity of another unit": ({"capacity": "16 apples"}, ConfigError),
    "capacity of a fraction": ({"capacity": 1.5e9}, ConfigError),
    "capacity true": ({"capacity": True}, ConfigError),
    "endless capacity": ({"capacity": "9" * 400}, ConfigError),
    "endless number": ({"capacity": 10**5000}, ConfigError),
    "more than any disk": ({"capacity": "99999999TiB"}, ConfigError),
    "segment too small": ({"segment_bytes": "4KiB"}, ConfigError),
    "segment too large": ({"segment_bytes": "5GiB"}, ConfigError),
    "segments that do not fit": ({"segment_bytes": "4MiB"}, ConfigError),
    "index too small": ({"index_bytes": 4096}, ConfigError),
    "index that does not fit": ({"index_bytes": "15MiB"}, ConfigError),
    "sync": ({"sync": "sometimes"}, ConfigError),
    "mode": ({"mode": "fast"}, ConfigError),
    "verify": ({"verify": "maybe"}, ConfigError),
    "verify of a list": ({"verify": []}, ConfigError),
    "no threads": ({"threads": 0}, ConfigError),
    "threads true": ({"threads": True}, ConfigError),
    "many threads": ({"threads": 65}, ConfigError),
}


@pytest.mark.parametrize("what", BAD_ARGUMENTS)
def test_a_bad_argument_leaves_no_directory_behind(store_path: Path, what: str) -> None:
    arguments, error = BAD_ARGUMENTS[what]
    with pytest.raises(error):
        kvfs.open(store_path, **{"capacity": "16MiB", **arguments})
    assert not store_path.exists()


BAD_PATHS: dict[str, Callable[[Path], Any]] = {
    "a file": lambda p: p / "file",
    "below a file": lambda p: p / "file" / "store",
    "far below a file": lambda p: p / "file" / "a" / "store",
    "no parent": lambda p: p / "absent" / "store",
    "a zero in it": lambda p: str(p / "a\0b"),
    "too long": lambda p: p / ("x" * 300),
    "empty": lambda p: "",
    "a number": lambda p: 7,
    "a dangling symlink": lambda p: p / "dangling",
    "a loop": lambda p: p / "loop" / "store",
    "not empty": lambda p: p / "foreign",
}


@pytest.mark.parametrize("what", BAD_PATHS)
@pytest.mark.parametrize("how", [{"capacity": "16MiB"}, {"create": False}, {"read_only": True}])
def test_a_path_that_can_hold_no_store_is_refused(tmp_path: Path, what: str, how: dict[str, Any]) -> None:
    (tmp_path / "file").write_text("no store")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "store")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").write_text("years of work")
    before = tree(tmp_path)
    with pytest.raises(KvfsError):
        kvfs.open(BAD_PATHS[what](tmp_path), **how)
    assert tree(tmp_path) == before and not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    "name", ["with space", "ünï", "-rf", "a'b\"c", "new\nline", "100%", "\U0001f4be", ".hidden", "\udcff"], ids=ascii
)
@pytest.mark.parametrize("kind", [str, Path, os.fsencode])
def test_any_name_that_the_system_accepts_will_do(memory_path: Path, name: str, kind: Callable[[Any], Any]) -> None:
    where = kind(str(memory_path / name))
    for _ in range(2):
        with kvfs.open(where, capacity="16MiB") as store:
            ns = store.namespace("m", tiny(), revision="r1")
            ns.put(TOKENS, PAGES)
            assert serves(store)


def test_a_relative_path_means_the_directory_of_that_moment(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(memory_path)
    with kvfs.open("store", capacity="16MiB") as store:
        monkeypatch.chdir("/")
        ns = store.namespace("m", tiny(), revision="r1")
        assert ns.put(TOKENS, PAGES).stored == CHUNKS
        (memory_path / "store" / "index" / "CURRENT").unlink()  # the rebuild finds its files, too
        assert serves(store)


def test_an_empty_directory_becomes_a_store_and_a_half_made_one_too(memory_path: Path) -> None:
    where = memory_path / "store"
    where.mkdir()
    (where / "lost+found").mkdir()
    with kvfs.open(where, capacity="16MiB"):
        pass
    (where / "super").unlink()  # as if the creator had died before its last step
    (where / ".super.0123456789abcdef").write_text("half")
    with kvfs.open(where, capacity="32MiB") as store:
        assert store.settings.capacity_bytes == 16 << 20, "the first creator's settings stay"


@pytest.mark.parametrize("left", ["segments", "pins"])
def test_a_store_that_lost_its_super_file_is_never_made_again(path: Path, left: str) -> None:
    with kvfs.open(path) as store:
        ns = store.namespace("m", tiny(), revision="r1")
        store.pin("kept", ns, TOKENS)
        store_id = store.stats()["store_id"]
    super_file = (path / "super").read_bytes()
    (path / "super").unlink()
    for file in (path / ("pins" if left == "segments" else "segments")).iterdir():
        file.unlink()
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    for how in ({"capacity": "16MiB"}, {"create": False}, {"read_only": True}):
        with pytest.raises(CorruptError, match="verify --repair"):
            kvfs.open(path, **how)  # type: ignore[arg-type]
    assert before == {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    assert restore_super(str(path), Files()) and not restore_super(str(path), Files())
    with kvfs.open(path) as store:
        if left == "segments":
            assert serves(store) and store.stats()["store_id"] == store_id
            created = json.loads((path / "super").read_bytes())["created_us"]
            assert abs(created - json.loads(super_file)["created_us"]) < 600_000_000


def test_a_lost_super_file_whose_segments_are_unreadable_stays_lost(path: Path) -> None:
    (path / "super").unlink()
    for file in segment_files(path):
        file.write_bytes(bytes(8192))
    with pytest.raises(CorruptError, match="no segment has a readable header"):
        restore_super(str(path), Files())
    assert not (path / "super").exists()


def test_files_are_private_under_any_umask(memory_path: Path) -> None:
    old = os.umask(0)
    try:
        with kvfs.open(memory_path / "store", capacity="16MiB") as store:
            store.namespace("m", tiny(), revision="r1").put(TOKENS, PAGES)
            modes(memory_path / "store", 0o700, 0o600)
    finally:
        os.umask(old)


def test_a_directory_shared_with_a_group_stays_shared(memory_path: Path) -> None:
    where = memory_path / "store"
    where.mkdir()
    where.chmod(0o2770)
    old = os.umask(0o077)
    try:
        with kvfs.open(where, capacity="16MiB") as store:
            store.namespace("m", tiny(), revision="r1").put(TOKENS, PAGES)
            modes(where, 0o2770, 0o660)
    finally:
        os.umask(old)


def modes(path: Path, folder: int, file: int) -> None:
    for found in [path, *path.rglob("*")]:
        mode = stat.S_IMODE(found.stat().st_mode)
        assert mode == (folder if found.is_dir() else file), f"{found}: {mode:04o}"


def create_at(path: str, barrier: Any, answers: Any) -> None:
    barrier.wait()
    with kvfs.open(path, capacity="16MiB") as store:
        ready = store.wait_ready(20)
        ns = store.namespace("m", tiny(), revision="r1")
        put = ns.put(TOKENS, PAGES)
        answers.put((store.stats()["store_id"], ready, put.declined))


def test_racing_creators_make_one_store(memory_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, answers = context.Barrier(8), context.Queue()
    where = str(memory_path / "store")
    crew = [context.Process(target=create_at, args=(where, barrier, answers)) for _ in range(8)]
    for one in crew:
        one.start()
    found = [answers.get(timeout=60) for _ in crew]
    for one in crew:
        one.join(20)
    assert [one.exitcode for one in crew] == [0] * 8
    assert len({store_id for store_id, _, _ in found}) == 1 and all(ready for _, ready, _ in found)
    assert not any(declined for _, _, declined in found)
    assert not list(Path(where).rglob(".*")), "nothing temporary is left"
    with kvfs.open(where) as store:
        assert serves(store)


# ---------------------------------------------------------------- opening again


def test_a_store_opens_as_it_was_closed(path: Path) -> None:
    with kvfs.open(path, capacity="999TiB", sync="sync") as store:  # settings of an existing store do not change
        assert store.settings.capacity_bytes == 16 << 20 and store.settings.sync == "cache"
        assert serves(store) and "rebuilds" not in counters(store)


def test_two_opens_of_one_process_share(path: Path) -> None:
    link = path.parent / "link"
    link.symlink_to(path)
    first, second = kvfs.open(path), kvfs.open(link)
    assert first._shared is second._shared
    first.close()
    first.close()
    assert serves(second)
    with pytest.raises(ConfigError, match="closed"):
        first.stats()
    second.close()
    with kvfs.open(path) as store:
        assert serves(store) and "rebuilds" not in counters(store)


def test_a_store_without_a_close_is_closed_with_its_last_reference(path: Path) -> None:
    store = kvfs.open(path)
    assert len(list((path / "run").glob("*.live"))) == 1
    background = store._shared.background
    del store
    background._thread.join(20.0)
    assert not list((path / "run").glob("*.live"))


def test_no_thread_and_no_descriptor_outlives_a_store(path: Path) -> None:
    def census() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    with kvfs.open(path):
        pass
    before = census()
    for _ in range(5):
        with kvfs.open(path) as store:
            assert serves(store)
    for how in ({"read_only": True}, {"verify": "first", "threads": 2}):
        with kvfs.open(path, **how) as store:  # type: ignore[arg-type]
            assert serves(store)
    (path / "super").write_bytes(b"damaged")
    for _ in range(5):
        with pytest.raises(FormatError):
            kvfs.open(path)
    assert census() == before


def dirty(path: Path) -> None:
    """The state after the death of the last user: the index is dirty, and no process holds it."""

    def use() -> bool:
        KEPT.append(kvfs.open(path))
        return serves(KEPT[-1])  # ends without closing

    assert run_child(use)
    assert json.loads((path / "state").read_bytes())["clean"] is False


def test_an_index_that_dead_processes_left_is_rebuilt(path: Path) -> None:
    dirty(path)
    with kvfs.open(path) as store:
        assert serves(store) and counters(store)["rebuilds"] == 1


@pytest.mark.parametrize("key", ["boot", "device", "inode", "generation"])
def test_a_clean_index_of_another_file_is_rebuilt(path: Path, key: str) -> None:
    """A copied or restored directory: the state file describes another index."""
    state = json.loads((path / "state").read_bytes())
    state[key] = state[key] + 1 if isinstance(state[key], int) else "0" * len(state[key])
    (path / "state").write_text(json.dumps(state))
    with kvfs.open(path) as store:
        assert serves(store) and counters(store).get("rebuilds", 0) == (key != "boot")


def test_a_dirty_index_of_another_boot_is_not_trusted_though_a_process_holds_it(path: Path) -> None:
    generation = (path / "index" / "CURRENT").read_text()
    state = json.loads((path / "state").read_bytes())
    (path / "state").write_text(json.dumps({**state, "clean": False, "boot": "0" * 36}))
    import fcntl

    with open(path / "index" / generation / "users") as users:
        fcntl.flock(users, fcntl.LOCK_SH)
        with kvfs.open(path) as store:
            assert serves(store) and counters(store)["rebuilds"] == 1


def test_a_copy_of_a_live_store_serves_right_bytes(path: Path) -> None:
    copy = path.parent / "copy"
    with kvfs.open(path) as store:
        shutil.copytree(path, copy)
        assert serves(store)
    with kvfs.open(copy) as store:
        assert serves(store) and counters(store)["rebuilds"] == 1


@pytest.mark.parametrize("name", ["state", "index/CURRENT"])
@pytest.mark.parametrize("what", ["absent", "empty", "garbage", "too large", "a fifo", "a symlink"])
def test_all_pages_are_served_after_damage_to_the_state_of_the_index(path: Path, name: str, what: str) -> None:
    file = path / name
    content = file.read_bytes()
    file.unlink()
    if what == "a fifo":
        os.mkfifo(file)
    elif what == "a symlink":
        (path.parent / "elsewhere").write_bytes(content)
        file.symlink_to(path.parent / "elsewhere")
    elif what != "absent":
        file.write_bytes({"empty": b"", "garbage": b"\xff\0[{" * 4, "too large": b"a" * 10_000}[what])
    with kvfs.open(path) as store:
        assert serves(store)
    with kvfs.open(path) as store:
        assert serves(store) and "rebuilds" not in counters(store)


@pytest.mark.parametrize("what", ["data.mdb", "users", "everything"])
def test_all_pages_are_served_after_damage_to_the_index(path: Path, what: str) -> None:
    generation = path / "index" / (path / "index" / "CURRENT").read_text()
    if what == "everything":
        shutil.rmtree(generation)
    elif what == "data.mdb":
        inode = (generation / what).stat().st_ino
        os.truncate(generation / what, 100)
        assert (generation / what).stat().st_ino == inode
    else:
        (generation / what).unlink()
    with kvfs.open(path) as store:
        assert serves(store)


@pytest.mark.parametrize("name", ["index", "doomed", "run", "pins", "import", "quarantine"])
def test_a_missing_directory_is_made_again(path: Path, name: str) -> None:
    shutil.rmtree(path / name)
    with kvfs.open(path) as store:
        assert serves(store)


@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda p: os.symlink("/etc/passwd", p), os.mkdir, lambda p: open(p, "x").close()]
)
@pytest.mark.parametrize(
    "name", ["segments/" + "a" * 32 + ".kvs", "segments/readme", "run/" + "b" * 32 + ".live", "index/" + "c" * 16]
)
def test_an_unexpected_file_in_the_store_neither_blocks_nor_breaks(
    path: Path, name: str, make: Callable[[Any], Any]
) -> None:
    make(path / name)
    (path / "index" / "CURRENT").unlink()
    with kvfs.open(path) as store:
        assert serves(store)


@pytest.mark.parametrize("what", ["a symlink", "a fifo", "a directory", "absent"])
@pytest.mark.parametrize("name", ["super", "kvfs.toml", "gate", "main", "segments"])
def test_a_store_whose_own_files_were_replaced_is_refused_or_repaired(path: Path, name: str, what: str) -> None:
    moved = path.parent / "moved"
    os.rename(path / name, moved)
    if what == "a symlink":
        (path / name).symlink_to(moved)
    elif what == "a fifo":
        os.mkfifo(path / name)
    elif what == "a directory":
        (path / name).mkdir()
    for how in ({"create": False}, {"read_only": True}):
        try:
            with kvfs.open(path, **how) as store:  # type: ignore[arg-type]
                assert name == "segments" and what in ("a directory", "absent")
                assert store.namespace("m", tiny(), revision="r1").match(TOKENS).tokens == 0
        except KvfsError as exc:
            assert str(path) in str(exc)


# ---------------------------------------------------------------- versions and features


def rewrite_super(path: Path, **changes: Any) -> None:
    body = {**json.loads((path / "super").read_bytes()), **changes}
    del body["check"]
    body["check"] = f"{checksum(_canonical(body)):016x}"
    (path / "super").write_text(json.dumps(body))


def features(**lists: list[str]) -> dict[str, list[str]]:
    return {"compatible": [], "read_only_compatible": [], "incompatible": [], **lists}


@pytest.mark.parametrize("version", [0, 2, 999])
def test_another_format_is_refused_by_number(path: Path, version: int) -> None:
    rewrite_super(path, format=version)
    before = tree(path)
    for read_only in (False, True):
        with pytest.raises(FormatError, match=f"format {version}"):
            kvfs.open(path, read_only=read_only)
    assert tree(path) == before


def test_features_decide_what_may_be_done(path: Path) -> None:
    rewrite_super(path, features=features(compatible=["sparkles"]), future="whatever")
    with kvfs.open(path) as store:
        assert serves(store)
    rewrite_super(path, features=features(read_only_compatible=["new-index"]))
    with pytest.raises(FormatError, match=r"new-index.*read_only=True"):
        kvfs.open(path)
    with kvfs.open(path, read_only=True) as store:
        assert serves(store)
    rewrite_super(path, features=features(incompatible=["encryption"]))
    for read_only in (False, True):
        with pytest.raises(FormatError, match=r"encryption.*upgrade"):
            kvfs.open(path, read_only=read_only)


BAD_SUPERS = {
    "empty": b"", "text": b"hello", "bytes": b"\xff\xfe\0", "a list": b"[]", "a number": b"5", "null": b"null",
    "deep": b"[" * 8000, "too large": b" " * 20_000, "no keys": b"{}",
    "another program's": b'{"kvfs": "no", "check": "", "format": 1}',
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_SUPERS)
def test_a_damaged_super_file_is_refused_and_kept(path: Path, what: str) -> None:
    (path / "super").write_bytes(BAD_SUPERS[what])
    with pytest.raises(FormatError, match="super"):
        kvfs.open(path, capacity="16MiB")
    assert (path / "super").read_bytes() == BAD_SUPERS[what]


def test_every_changed_character_of_the_super_file_is_noticed(path: Path) -> None:
    """Except white space, and what has no meaning."""
    data = (path / "super").read_bytes()
    for at in range(0, len(data), 3):
        changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        (path / "super").write_bytes(changed)
        try:
            same = json.loads(changed) == json.loads(data)
        except ValueError:
            same = False
        if not same:
            with pytest.raises(FormatError):
                kvfs.open(path)


# ---------------------------------------------------------------- settings

BAD_SETTINGS = {
    "no text": b"\xff\xfe", "no toml": b"capacity = ", "unknown key": b'capacity = "16MiB"\ncapasity = 1',
    "no capacity": b'sync = "cache"', "bad size": b'capacity = "lots"', "bad kind": b"capacity = true",
    "a fraction": b"capacity = 2.5e9", "bad sync": b'capacity = "16MiB"\nsync = "x"',
    "sync of a number": b'capacity = "16MiB"\nsync = 1', "bad mode": b'capacity = "16MiB"\nmode = "x"',
    "segment": b'capacity = "16MiB"\nsegment_bytes = "huge"', "quota": b'capacity = "16MiB"\nquota = 1',
    "quota key": b'capacity = "16MiB"\n[quota.a]\nmax = 1', "quota cap": b'capacity = "16MiB"\n[quota.a]\ncap = "x"',
    "ttl": b'capacity = "16MiB"\n[quota.a]\nttl = "next week"',
    "negative ttl": b'capacity = "16MiB"\n[quota.a]\nttl = -1',
    "endless ttl": b'capacity = "16MiB"\n[quota.a]\nttl = inf',
    "promised twice": b'capacity = "16MiB"\n[quota.a]\nguaranteed = "9MiB"', "deep": b"a = " + b"[" * 3000,
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_SETTINGS)
def test_an_invalid_setting_is_named(path: Path, what: str) -> None:
    (path / "kvfs.toml").write_bytes(BAD_SETTINGS[what])
    before = tree(path)
    with pytest.raises(ConfigError):
        kvfs.open(path)
    assert tree(path) == before


def test_settings_too_small_for_a_store_are_refused(path: Path) -> None:
    (path / "kvfs.toml").write_text('capacity = "1MiB"')
    with pytest.raises(ConfigError, match="16MiB"):
        kvfs.open(path)
    (path / "kvfs.toml").write_text("#" * 300_000)
    with pytest.raises(FormatError, match=r"kvfs\.toml"):
        kvfs.open(path)


def test_every_process_obeys_the_settings_of_the_store(path: Path) -> None:
    text = (path / "kvfs.toml").read_text()
    (path / "kvfs.toml").write_text(text.replace(str(16 << 20), '"1 GiB"'))
    with kvfs.open(path, capacity="16MiB") as store:
        assert store.settings.capacity_bytes == 1 << 30


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("1", 1), ("200G", 200 * 10**9), ("1.5TiB", 3 << 39), (" 8 kb ", 8000), ("2KiB", 2048), (2**60 + 1, 2**60 + 1),
     (str(2**60 + 1), 2**60 + 1), ("0", 0), ("3mi", 3 << 20)],
)  # fmt: skip
def test_sizes_mean_what_they_say(text: int | str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    ("text", "seconds"), [("30d", 2592000), ("12h", 43200), (90, 90), (0.5, 0.5), ("1.5m", 90), ("2w", 1209600)]
)
def test_durations_mean_what_they_say(text: float | str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@given(st.one_of(st.text(max_size=20), st.integers(), st.floats(), st.none(), st.binary(max_size=5), st.booleans()))
def test_any_value_is_a_size_or_a_config_error(value: Any) -> None:
    for parse in (parse_size, parse_duration):
        with suppress(ConfigError):
            assert parse(value) >= 0


quotas = st.builds(
    Quota,
    st.integers(0, 1 << 20),
    st.none() | st.integers(0, 2**50),
    st.none() | st.integers(0, 10**8) | st.floats(0, 1e8),
)


@given(
    st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=8), quotas, max_size=3), st.integers(16 << 20, 2**50)
)
def test_settings_survive_their_file(named: dict[str, Quota], capacity: int) -> None:
    settings = make_settings(capacity, quotas=named)
    assert parse_toml(to_toml(settings), "kvfs.toml") == settings


# ---------------------------------------------------------------- permissions


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A directory that other users can reach."""
    folder = Path(tempfile.mkdtemp(prefix="kvfs-open-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def refusal(path: Path, **how: Any) -> tuple[str, str]:
    """The error that another user gets."""

    def attempt() -> tuple[str, str]:
        try:
            kvfs.open(path, **how).close()
        except KvfsError as exc:
            return type(exc).__name__, str(exc)
        return "", ""

    result: tuple[str, str] = run_child(attempt, uid=NO_OWNER)
    return result


@pytest.mark.needs_root("another user is needed")
def test_another_user_may_not_open_a_private_store(open_path: Path) -> None:
    path = open_path / "store"
    kvfs.open(path, capacity="16MiB").close()
    for how in ({}, {"read_only": True}, {"capacity": "16MiB"}):
        name, text = refusal(path, **how)
        assert name == "StoreAccessError" and str(path) in text and "run as" in text
    assert refusal(open_path / "mine", capacity="16MiB")[0] == "StoreAccessError"


@pytest.mark.needs_root("another user is needed")
def test_a_world_writable_directory_is_refused_or_made_private(open_path: Path) -> None:
    path = open_path / "store"
    path.mkdir()
    path.chmod(0o777)
    name, text = refusal(path, capacity="16MiB")
    assert name == "StoreAccessError" and "chmod o-rwx" in text
    kvfs.open(path, capacity="16MiB").close()  # its owner can remove the permissions of others
    assert stat.S_IMODE(path.stat().st_mode) == 0o770


def test_permissions_that_others_got_later_are_removed(path: Path) -> None:
    path.chmod(0o707)
    with kvfs.open(path) as store:
        assert serves(store)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


@pytest.mark.needs_root("another user is needed")
def test_a_member_of_the_group_may_use_a_shared_store(open_path: Path) -> None:
    path = open_path / "store"
    path.mkdir()
    os.chown(path, 0, NO_OWNER)
    path.chmod(0o2770)
    with kvfs.open(path, capacity="16MiB") as store:
        assert store.namespace("m", tiny(), revision="r1").put(TOKENS, PAGES).stored == CHUNKS

        def member() -> tuple[bool, int]:
            with kvfs.open(path) as theirs:
                ns = theirs.namespace("m", tiny(), revision="r1")
                return serves(theirs), ns.put(tokens_of(2, 1), seeded(2, TINY_BYTES)).stored

        assert run_child(member, uid=NO_OWNER) == (True, 1)
        assert restored(store.namespace("m", tiny(), revision="r1"), tokens_of(2, 1)) == seeded(2, TINY_BYTES)


@pytest.mark.needs_root("another user is needed")
@pytest.mark.parametrize("mode", [0o700, 0o2770])
def test_what_root_writes_belongs_to_the_owner_of_the_store(open_path: Path, mode: int) -> None:
    path = open_path / "store"
    path.mkdir()
    os.chown(path, NO_OWNER, NO_OWNER)
    path.chmod(mode)

    def owner(capacity: str | None = None) -> str:
        with kvfs.open(path, capacity=capacity) as theirs:
            assert serves(theirs) or theirs.namespace("m", tiny(), revision="r1").put(TOKENS, PAGES).stored == CHUNKS
            return str(theirs.stats()["index"]["generation"])

    generation = run_child(lambda: owner("64MiB"), uid=NO_OWNER)
    (path / "purged").rmdir()
    config_file.change(str(path), "sync", "batch", Files())
    with kvfs.open(path) as store:
        ns = store.namespace("root", tiny(), revision="r1")
        assert ns.put(TOKENS, PAGES).stored == CHUNKS and store.pin("p", ns, TOKENS)
    found = [path, *path.rglob("*")]
    assert {(p.stat().st_uid, p.stat().st_gid) for p in found} == {(NO_OWNER, NO_OWNER)}
    assert run_child(owner, uid=NO_OWNER) == generation
    os.chown(path / "kvfs.toml", 0, 0)
    findings = {f.check: f for f in diagnose(str(path), Files())}
    assert findings["owners"].status == "bad" and "kvfs.toml" in findings["owners"].detail


@contextmanager
def mounted_read_only(path: Path) -> Iterator[None]:
    done = subprocess.run(["mount", "--bind", "-o", "ro", str(path), str(path)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no bind mounts here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.needs_root("mounting")
@pytest.mark.parametrize("how", ["clean", "dirty", "no index"])
def test_a_read_only_file_system_can_be_read(path: Path, how: str) -> None:
    if how == "dirty":
        dirty(path)
    elif how == "no index":
        shutil.rmtree(path / "index")
        (path / "index").mkdir()
    with mounted_read_only(path):
        with pytest.raises(StoreReadOnlyError, match="read_only=True"):
            kvfs.open(path)
        with kvfs.open(path, read_only=True) as store:
            assert serves(store)
        with pytest.raises(StoreReadOnlyError):
            kvfs.open(path / "new", capacity="16MiB")
    with kvfs.open(path) as store:
        assert serves(store)


def test_a_private_index_leaves_nothing_behind(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A reader of a store whose index may not be trusted builds a private one. It may be killed at any time."""
    dirty(path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = tree(path)

    def read() -> bool:
        KEPT.append(kvfs.open(path, read_only=True))
        return serves(KEPT[-1])  # ends without closing

    assert run_child(read)
    assert not list(tmp_path.iterdir())
    with kvfs.open(path, read_only=True) as store:
        assert serves(store)
    assert not list(tmp_path.iterdir()) and tree(path) == before


@pytest.mark.needs_root("mounting")
def test_a_private_index_without_disk_space_is_an_error_that_says_so(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    dirty(path)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(tmp_path)], capture_output=True)
    if done.returncode:
        pytest.skip("no mounts here")
    try:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        with pytest.raises(StoreAccessError, match="no private index"):
            kvfs.open(path, read_only=True)
        assert not list(tmp_path.iterdir())
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)
    with kvfs.open(path, read_only=True) as store:
        assert serves(store)


def read_elsewhere(path: Path, tokens: list[int]) -> bytes:
    """What a process that opens the store read-only loads."""
    code = (
        "import sys, json, kvfs; from tests.stores import restored, tiny;"
        "store = kvfs.open(sys.argv[1], read_only=True); ns = store.namespace('m', tiny(), revision='r1');"
        "sys.stdout.buffer.write(restored(ns, json.load(sys.stdin))); store.close()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], input=json.dumps(tokens).encode(), capture_output=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def test_a_reader_sees_what_a_writer_stores_meanwhile(path: Path) -> None:
    later, pages = tokens_of(5, 2), seeded(5, 2 * TINY_BYTES)
    with kvfs.open(path) as store:
        assert read_elsewhere(path, TOKENS) == PAGES
        store.namespace("m", tiny(), revision="r1").put(later, pages)
        assert read_elsewhere(path, later) == pages
    with kvfs.open(path) as store:
        assert serves(store) and "rebuilds" not in counters(store)


@pytest.mark.parametrize("linked", [False, True])
def test_a_reader_creates_and_removes_no_file_of_access_times(path: Path, linked: bool) -> None:
    """Cold unused pages are read with O_DIRECT, so a reader asks for access times that may not exist."""
    times = path / "run" / "use" / segment_files(path)[0].stem
    times.unlink(missing_ok=True)
    if linked:  # in a snapshot
        times.write_bytes((5).to_bytes(8, "little") * 4)
        os.link(times, path.parent / "other name")
    before = tree(path)
    with kvfs.open(path, read_only=True) as store:
        access_times, segment_id = store._shared.c.access_times, bytes.fromhex(times.name)
        assert [access_times.was_used(segment_id, seq) for seq in (1, 3, 4)] == [linked, linked, False]
        assert serves(store)
    assert tree(path) == before


def test_one_process_does_not_open_a_store_read_only_and_for_writing(path: Path) -> None:
    with kvfs.open(path, read_only=True), pytest.raises(StoreLockedError, match="read-only"):
        kvfs.open(path)
    with kvfs.open(path), kvfs.open(path, read_only=True) as both:
        assert serves(both)


def test_a_segment_of_another_store_is_not_served(path: Path) -> None:
    """A segment file that was copied from another store: its pages belong to that store."""
    other = path.parent / "other"
    with kvfs.open(other, capacity="16MiB") as store:
        assert store.namespace("m", tiny(), revision="r1").put(tokens_of(9, 1), seeded(9, TINY_BYTES)).stored == 1
    for file in segment_files(other):
        shutil.copy(file, path / "segments" / file.name)
    (path / "index" / "CURRENT").unlink()
    with kvfs.open(path) as store:
        assert serves(store)
        assert store.namespace("m", tiny(), revision="r1").match(tokens_of(9, 1)).tokens == 0


def test_missing_settings_are_a_corrupt_error(path: Path) -> None:
    (path / "kvfs.toml").unlink()
    with pytest.raises(CorruptError, match="capacity"):
        kvfs.open(path)
    with pytest.raises(StoreAccessError, match="gate"):
        (path / "kvfs.toml").write_text('capacity = "16MiB"')
        (path / "gate").unlink()
        kvfs.open(path)


def test_threads_that_list_one_directory_miss_nothing(tmp_path: Path) -> None:
    """A purge saw no marks, and reported success, while the upkeep listed them."""
    names = {f"{i:032x}" for i in range(300)}
    for name in names:
        (tmp_path / name).touch()
    files, fd = Files(), os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with ThreadPoolExecutor(4) as pool:
            for found in pool.map(lambda _: files.listdir(fd), range(400)):
                assert set(found) == names
    finally:
        os.close(fd)


def test_a_store_that_is_forgotten_is_closed_by_its_own_thread(tmp_path: Path) -> None:
    """The collector may run in another store's index thread: a close there made that store miss its deadlines."""
    forgotten = kvfs.open(tmp_path / "forgotten", capacity="16MiB")
    core, cycle = forgotten._shared, [forgotten]
    cycle.append(cycle)  # type: ignore[arg-type]  # only the collector finds it
    closed_by: list[threading.Thread] = []
    close = core.close
    core.close = lambda: (closed_by.append(threading.current_thread()), close())[1]  # type: ignore[func-returns-value,method-assign]
    with kvfs.open(tmp_path / "store", capacity="16MiB") as store:
        del forgotten, cycle
        assert store._shared.c.index.read(lambda session: gc.collect(), 2.0) > 0
        core.background._thread.join(20.0)
    assert closed_by == [core.background._thread]
    with kvfs.open(tmp_path / "forgotten", create=False) as again:
        assert again._shared is not core and again._shared.rebuilt is None, "it was not left clean"


def test_a_namespace_keeps_its_store_open(tmp_path: Path) -> None:
    ns = kvfs.open(tmp_path / "store", capacity="16MiB").namespace("model", tiny(), "1")
    gc.collect()
    time.sleep(2 * TICK_SECONDS)  # its background thread would close it
    assert ns.put(tokens_of(1, 3), seeded(1, 3 * TINY_BYTES)).stored == 3


def test_a_store_that_is_being_closed_is_waited_for(tmp_path: Path) -> None:
    """LMDB refuses to open the index twice in one process, which was taken for damage."""
    store = kvfs.open(tmp_path / "store", capacity="16MiB")
    ns = store.namespace("model", tiny(), "1")
    assert ns.put(tokens_of(1, 3), seeded(1, 3 * TINY_BYTES)).stored == 3
    core, closing, go_on = store._shared, threading.Event(), threading.Event()
    reader = core.services().reader
    reader.close = lambda: (closing.set(), go_on.wait(20.0))  # type: ignore[assignment,method-assign,return-value]
    leaving = threading.Thread(target=store.close)
    leaving.start()
    assert closing.wait(20.0)
    opened: list[kvfs.Store] = []
    opening = threading.Thread(target=lambda: opened.append(kvfs.open(tmp_path / "store")))
    opening.start()
    opening.join(0.3)
    assert opening.is_alive(), "it did not wait"
    go_on.set()
    leaving.join(20.0)
    opening.join(20.0)
    with opened[0] as again:
        assert again._shared is not core and again._shared.rebuilt is None
        assert again.namespace("model", tiny(), "1").match(tokens_of(1, 3)).chunks == 3


def test_a_child_forked_while_a_store_is_closed_keeps_none_of_its_locks(tmp_path: Path) -> None:
    store = kvfs.open(tmp_path / "store", capacity="16MiB")
    core, closing, go_on = store._shared, threading.Event(), threading.Event()
    reader = core.services().reader
    reader.close = lambda: (closing.set(), go_on.wait(20.0))  # type: ignore[assignment,method-assign,return-value]
    leaving = threading.Thread(target=store.close)
    leaving.start()
    assert closing.wait(20.0)
    child = os.fork()
    if not child:
        time.sleep(30.0)
        os._exit(0)
    try:
        go_on.set()
        leaving.join(20.0)
        with kvfs.open(tmp_path / "store") as again:
            assert again._shared.rebuilt is None, "the child held the lock that tells a clean index from a dirty one"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_forgotten_reader_does_not_keep_a_writer_out(tmp_path: Path) -> None:
    kvfs.open(tmp_path / "store", capacity="16MiB").close()
    reader = kvfs.open(tmp_path / "store", read_only=True)
    del reader
    with kvfs.open(tmp_path / "store") as writer:
        assert not writer.read_only


def test_an_interrupt_while_a_store_is_opened_does_not_hang_the_next_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kvfs.open(tmp_path / "store", capacity="16MiB").close()
    real, struck = registry.OpenStore.services, list[None]()

    def services(opened: registry.OpenStore) -> Any:
        if opened in registry._STORES.values() and not struck:  # it is started, and has no user yet
            struck.append(None)
            raise KeyboardInterrupt
        return real(opened)

    monkeypatch.setattr(registry.OpenStore, "services", services)
    with pytest.raises(KeyboardInterrupt):
        kvfs.open(tmp_path / "store")
    opened: list[kvfs.Store] = []
    opening = threading.Thread(target=lambda: opened.append(kvfs.open(tmp_path / "store")), daemon=True)
    opening.start()
    opening.join(20.0)
    assert opened, "it waits for nothing"
    opened[0].close()
    assert not registry._STORES


def test_an_open_waits_while_another_process_makes_an_index_current(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds the gate for a few syncs. The open returned after 20 ms of that, and the first puts declined."""
    with kvfs.open(tmp_path / "store", capacity="16MiB") as store:
        store._shared.background.stop()
        answers = ["rebuilding", "rebuilding", "timeout", "timeout", "", "rebuilding"]

        def read(*_: object) -> None:
            if answer := answers.pop(0):
                raise IndexUnavailableError(answer)

        monkeypatch.setattr(store._shared, "rebuild_if_needed", lambda: None)
        with monkeypatch.context() as patch:
            patch.setattr(store._shared.c.index, "read", read)
            store._shared._become_ready()
        assert answers == ["rebuilding"]


def test_a_new_store_tells_people_and_backups_what_it_is(path: Path) -> None:
    kvfs.open(path, capacity="32MiB").close()
    assert (path / "README.txt").read_text().startswith("This directory is a kvfs store")
    assert (path / "CACHEDIR.TAG").read_bytes().startswith(b"Signature: 8a477f597d28d172789f06886806bc55")


def test_a_new_segment_begins_with_the_first_epoch(path: Path) -> None:
    with kvfs.open(path, capacity="32MiB") as store:
        store.namespace("m", tiny(), "1").put(tokens_of(1, 3), seeded(1, 3 * TINY_BYTES))
        (file,) = segment_files(path)
        with open(file, "rb") as opened:
            scan = scan_segment(opened.fileno(), Files())
    assert scan is not None and scan.entries[0].epoch == 1
