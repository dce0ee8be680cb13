"""doctor: each problem around a store is named, with the processes that cause it and a remedy."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.doctor import checks, locks
from kvfs.doctor.findings import BAD, OK, WARN, Finding
from kvfs.native import library
from kvfs.native.payloads import CachedRead
from kvfs.system.files import Files
from tests.stores import TINY_BYTES, seeded, tiny, tokens_of


@pytest.fixture
def path(store_path: Path) -> Path:
    with kvfs.open(store_path, capacity="64MiB") as store:
        store.namespace("alpha", tiny(), "1a").put(tokens_of(1, 10), seeded(1, 10 * TINY_BYTES))
    return store_path


def findings(path: Path) -> dict[str, Finding]:
    return {f.check: f for f in checks.diagnose(str(path), Files())}


def test_nothing_is_wrong_with_a_store_that_was_closed(path: Path) -> None:
    found = findings(path)
    assert not [f for f in found.values() if f.status == BAD]
    assert found["index"].status == OK and "closed cleanly" in found["index"].detail
    assert found["processes"].data == {"alive": 0, "dead": 0, "holders": []}


def test_the_code_that_does_lookups_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = library.state()
    assert findings(path)["native library"].detail.startswith(state)
    with kvfs.open(path) as store:
        assert store.stats()["native"] == state
    for state, status in (("off: not built", WARN), (library.SWITCHED_OFF, OK)):
        monkeypatch.setattr(library, "_load", lambda state=state: (None, state))
        found = findings(path)["native library"]
        assert (found.status, found.detail, found.data) == (status, state, {"state": state})
        assert ("compiler" in found.remedy) == (status == WARN)


def test_a_file_system_that_hides_its_page_cache_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if library.loaded() is None:
        pytest.skip(f"the native library is {library.state()}")

    def unsupported(read: CachedRead, share: Iterator[int]) -> None:
        read.supported = False

    monkeypatch.setattr(CachedRead, "work", unsupported)
    found = findings(path)["native library"]
    assert found.status == WARN and "cannot say what is in the page cache" in found.detail


def test_users_are_named_by_pid(path: Path) -> None:
    with kvfs.open(path):
        found = findings(path)
        assert found["processes"].data["alive"] == 1
        assert found["processes"].data["holders"] == [f"pid {os.getpid()}"]
        assert found["index"].status == OK and "in use" in found["index"].detail


def test_a_stopped_process_that_holds_a_lock_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "LOCK_SECONDS", 0.05)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        fd = os.open(path / "main", os.O_RDWR)
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.write(writer, b"x")
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    try:
        os.read(reader, 1)
        found = findings(path)["locks"]
        assert found.status == BAD and f"main by pid {child}" in found.detail and "CONT" in found.remedy
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert findings(path)["locks"].status == OK


def test_a_dead_process_and_the_index_that_it_left(path: Path) -> None:
    child = os.fork()
    if not child:
        store = kvfs.open(path)  # referenced: a store that is garbage collected is closed
        assert store.path
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    found = findings(path)
    assert found["processes"].data["dead"] == 1
    assert found["index"].status == WARN and "rebuilt" in found["index"].detail


def test_a_disk_smaller_than_the_limit(path: Path) -> None:
    settings = path / "kvfs.toml"
    settings.write_text('capacity = "4000TiB"\nsegment_bytes = "64MiB"\nindex_bytes = "64MiB"\n')
    found = findings(path)["space"]
    assert found.status == WARN and "kvfs config set capacity" in found.remedy


def test_too_few_open_files(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # a real limit would have to leave room for what tests before this one have open
    monkeypatch.setattr(resource, "getrlimit", lambda of: (checks.HEADROOM_FILES - 1, 1 << 20))
    found = findings(path)["open files"]
    assert found.status == WARN and "ulimit -n" in found.remedy


def test_settings_super_permissions_and_leftovers(path: Path) -> None:
    (path / "kvfs.toml").write_text("capacity = 'x'\n")
    os.chmod(path, 0o705)
    (path / "quarantine" / "x").write_bytes(b"")
    (path / "state").write_bytes(b"garbage")
    found = findings(path)
    assert found["settings"].status == BAD and "capacity" in found["settings"].detail
    assert found["permissions"].status == BAD and "chmod" in found["permissions"].remedy
    assert found["quarantine"].status == WARN and found["index"].status == WARN
    (path / "super").write_bytes(b"{}")
    assert findings(path)["format"].status == BAD


def test_a_missing_store_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(kvfs.StoreNotFoundError):
        checks.diagnose(str(tmp_path / "none"), Files())


def test_a_disk_that_hangs_is_named_in_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "CHECKS_SECONDS", 0.05)
    monkeypatch.setattr(checks, "DISK_SECONDS", 0.2)
    answered = threading.Event()

    class Hanging(Files):
        def preadv(self, fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
            answered.wait(60)
            return super().preadv(fd, buffers, offset, flags)

    try:
        found = checks.diagnose(str(path), Hanging(), lambda: pytest.fail("went on"))
    finally:
        answered.set()
    assert [(f.check, f.status) for f in found] == [("disk", BAD)] and "hangs" in found[0].detail


@pytest.mark.parametrize("checks_hang", [False, True])
def test_a_disk_that_takes_no_writes_is_named_in_time(
    path: Path, monkeypatch: pytest.MonkeyPatch, checks_hang: bool
) -> None:
    """A frozen file system answers all reads: the doctor said that nothing was bad."""
    monkeypatch.setattr(checks, "CHECKS_SECONDS", 0.05)
    monkeypatch.setattr(checks, "WRITE_SECONDS", 0.3)
    thawed = threading.Event()

    class Frozen(Files):
        def open(self, name: str, flags: int, *args: Any, **how: Any) -> int:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                thawed.wait(60)
            return super().open(name, flags, *args, **how)

    try:
        found = checks.diagnose(
            str(path), Frozen(), lambda: [] if not checks_hang else [Finding(str(thawed.wait(60)), OK, "")]
        )
    finally:
        thawed.set()
    assert [(f.check, f.status) for f in found if f.status == BAD] == [("disk", BAD)]
    assert "no writes" in found[-1].detail and "fsfreeze" in found[-1].remedy
    assert {"format", "locks"} <= {f.check for f in found}


def test_slow_checks_are_waited_for_while_the_disk_answers(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "CHECKS_SECONDS", 0.05)
    slow = Finding("slow", OK, "")
    found = checks.diagnose(str(path), Files(), lambda: [(threading.Event().wait(0.5) and slow) or slow])
    assert found[-1] is slow and "disk" not in {f.check for f in found}


def test_it_changes_nothing(path: Path) -> None:
    def state() -> dict[str, int]:
        return {str(p): p.stat().st_mtime_ns for p in path.rglob("*")}

    before = state()
    findings(path)
    assert state() == before


def test_the_drop_folder_and_what_was_refused(path: Path) -> None:
    assert findings(path)["drop folder"].data == {"waiting": 0, "refused": 0}
    (path / "import" / "b.tar").write_bytes(b"x")
    found = findings(path)["drop folder"]
    assert found.status == WARN and "no process has the store open" in found.detail and "kvfs import" in found.remedy
    with kvfs.open(path):
        assert findings(path)["drop folder"].status == OK
    (path / "import" / "refused").mkdir()
    (path / "import" / "refused" / "odd.tar").write_bytes(b"x")
    (path / "import" / "refused" / "odd.tar.reason").write_text("changed")
    found = findings(path)["drop folder"]
    assert found.status == WARN and "odd.tar" in found.detail and ".reason" in found.remedy
    assert found.data == {"waiting": 1, "refused": 1}


def test_whether_inotify_works(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from watchdog.observers import inotify_c

    found = findings(path)["watch"]
    assert found.status == OK and found.data["inotify"] and found.data["max_user_watches"] > 0
    monkeypatch.setattr(inotify_c, "inotify_init", lambda: -1)
    found = findings(path)["watch"]
    assert found.status == WARN and "max_user_instances" in found.detail + found.remedy and not found.data["inotify"]
