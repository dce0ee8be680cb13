"""One host at a time, and only file systems whose locks every process sees."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kvfs
from kvfs.directory import root
from kvfs.directory.root import check_filesystem, filesystem_of
from kvfs.errors import StoreAccessError, StoreLockedError
from kvfs.system.files import Files, boot_id
from tests.stores import TINY_BYTES, counters, restored, seeded, tiny, tokens_of

ROOT = Path(__file__).resolve().parents[2]
FOREIGN = "00000000-1111-2222-3333-444444444444"
TOKENS, PAGES = tokens_of(1, 4), seeded(1, 4 * TINY_BYTES)


@pytest.fixture
def path(memory_path: Path) -> Path:
    with kvfs.open(memory_path / "store", capacity="16MiB") as store:
        store.namespace("m", tiny(), revision="r1").put(TOKENS, PAGES)
    return memory_path / "store"


def heartbeat(path: Path, boot: str, age_seconds: float) -> Path:
    """The file of a process whose last heartbeat is this old."""
    file = path / "run" / f"{os.urandom(16).hex()}.live"
    stamp = int((time.time() - age_seconds) * 1e6)
    file.write_bytes(f"{boot} {stamp:020d}\n".encode().ljust(64))
    return file


@pytest.mark.parametrize("age", [0.0, 20.0, -20.0])
def test_a_store_in_use_under_another_kernel_is_refused(path: Path, age: float) -> None:
    """A clock may differ a little."""
    file = heartbeat(path, FOREIGN, age)
    with pytest.raises(StoreLockedError, match="another kernel"):
        kvfs.open(path)
    with kvfs.open(path, read_only=True) as store:
        assert restored(store.namespace("m", tiny(), revision="r1"), TOKENS) == PAGES
    file.unlink()
    kvfs.open(path).close()


@pytest.mark.parametrize("content", ["old", "of this boot", "empty", "nonsense", "directory"])
def test_other_heartbeats_do_not_refuse_an_open(path: Path, content: str) -> None:
    file = heartbeat(
        path, boot_id(Files()) if content == "of this boot" else FOREIGN, 31.0 if content == "old" else 0.0
    )
    if content == "empty":
        file.write_bytes(b"")
    elif content == "nonsense":
        file.write_bytes(os.urandom(64))
    elif content == "directory":
        file.unlink()
        file.mkdir()
    with kvfs.open(path) as store:
        assert restored(store.namespace("m", tiny(), revision="r1"), TOKENS) == PAGES


@pytest.mark.parametrize(("changed", "refused"), [(1, False), (4, False), (5, True)])
def test_a_damaged_boot_id_of_this_kernel_refuses_no_open(path: Path, changed: int, refused: bool) -> None:
    """A process had ended without removing its file, and a bit of the file had flipped (model, case 22040693)."""
    own = boot_id(Files())
    damaged = "".join("0" if c != "0" else "1" for c in own[:changed]) + own[changed:]
    heartbeat(path, damaged, 0.0)
    if refused:
        with pytest.raises(StoreLockedError, match="another kernel"):
            kvfs.open(path)
    else:
        kvfs.open(path).close()


def test_a_heartbeat_says_boot_and_time(path: Path) -> None:
    with kvfs.open(path) as store:
        liveness = store._shared.c.liveness
        assert liveness is not None
        file = path / "run" / f"{liveness.owner.hex()}.live"
        for _ in range(2):
            boot, stamp = file.read_bytes()[:64].split()  # counts may follow
            assert boot.decode() == boot_id(Files())
            assert abs(time.time() - int(stamp) / 1e6) < 60.0
            liveness.beat()


def test_file_systems_are_told_apart(tmp_path: Path) -> None:
    assert filesystem_of("/proc") == "proc"
    assert filesystem_of(str(tmp_path / "missing")) is None
    with pytest.raises(StoreAccessError, match=r"/proc is on proc.*bind mount"):
        check_filesystem("/proc")
    if os.path.isdir("/dev/shm"):
        assert filesystem_of("/dev/shm") in ("tmpfs", "overlay", None)


@pytest.mark.needs_root("mounting")
def test_an_overlay_is_refused_and_what_lies_below_it_is_not(tmp_path: Path) -> None:
    """Locks on an overlay are not seen below it: each of two containers would take itself for the only user."""
    lower, work = tmp_path / "lower", tmp_path / "work"
    upper, merged = tmp_path / "upper", tmp_path / "a mount"
    for folder in (lower, upper, work, merged):
        folder.mkdir()
    if filesystem_of(str(tmp_path)) == "overlay":
        pytest.skip("the tests' own directory is on an overlay")
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    done = subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(merged)], capture_output=True)
    if done.returncode:
        pytest.skip(f"no overlays here: {done.stderr.decode().strip()}")
    try:
        with pytest.raises(StoreAccessError, match="is on overlay"):
            kvfs.open(merged / "store", capacity="16MiB")
        with kvfs.open(lower / "store", capacity="16MiB"):
            pass
        with pytest.raises(StoreAccessError, match="is on overlay"):
            kvfs.open(merged / "store", read_only=True)
    finally:
        subprocess.run(["umount", "-l", str(merged)], check=True)


READ_UNTIL_TOLD = """
import json, sys, kvfs
from tests.stores import restored, tiny
store = kvfs.open(sys.argv[1], read_only=True)
ns = store.namespace("m", tiny(), revision="r1")
for line in sys.stdin:
    print(restored(ns, json.loads(line)).hex(), flush=True)
store.close()
"""


def test_a_reader_that_outlives_the_last_writer_costs_no_rebuild(path: Path) -> None:
    store = kvfs.open(path)
    reader = subprocess.Popen(
        [sys.executable, "-c", READ_UNTIL_TOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert reader.stdin is not None and reader.stdout is not None

    def read() -> bytes:
        assert reader.stdin is not None and reader.stdout is not None
        reader.stdin.write(f"{TOKENS}\n")
        reader.stdin.flush()
        return bytes.fromhex(reader.stdout.readline())

    try:
        assert read() == PAGES
        store.close()  # the last writer; the reader stays
        assert b'"clean": true' in (path / "state").read_bytes()
        assert read() == PAGES
        with kvfs.open(path) as store:
            assert "rebuilds" not in counters(store)
            ns = store.namespace("m", tiny(), revision="r1")
            assert restored(ns, TOKENS) == PAGES
            store.gc(0)
            assert read() == b"", "the reader sees what the next writer did"
            assert ns.put(TOKENS, PAGES).stored == 4
            assert read() == PAGES
        reader.stdin.close()
        assert reader.wait(30) == 0
        with kvfs.open(path) as store:
            assert "rebuilds" not in counters(store)
    finally:
        reader.kill()
        reader.wait()
        reader.stdout.close()


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"), ("/srv", "ext4"), ("/srv/kv", "xfs"), ("/srv/kv/a/b", "xfs"), ("/srv/kvs", "ext4"),
        ("/srv/kv/deep", "tmpfs"), ("/twice", "btrfs"), ("/a space/x", "zfs"),
    ],
)  # fmt: skip
def test_the_mount_that_is_nearest_and_on_top_counts(monkeypatch: pytest.MonkeyPatch, path: str, kind: str) -> None:
    mounts = [("/", "ext4"), ("/srv/kv/deep", "tmpfs"), ("/srv/kv", "xfs"), ("/twice", "nfs"), ("/twice", "btrfs"),
              ("/a\\040space", "zfs")]  # fmt: skip
    lines = [f"36 35 98:0 / {mount} rw,noatime master:1 - {kind} /dev/root rw" for mount, kind in mounts]
    monkeypatch.setattr(os.path, "realpath", lambda path, strict=False: path)
    monkeypatch.setattr(root, "open", lambda *_, **__: io.StringIO("\n".join(lines) + "\n"), raising=False)
    assert filesystem_of(path) == kind


@pytest.mark.parametrize("lines", ["", "36 35 98:0 / /other rw - ext4 x rw\n", "36 35\n", "36 35 98:0 / / rw ext4\n"])
def test_a_list_of_mounts_that_cannot_be_read_tells_nothing(monkeypatch: pytest.MonkeyPatch, lines: str) -> None:
    monkeypatch.setattr(root, "open", lambda *_, **__: io.StringIO(lines), raising=False)
    assert filesystem_of("/proc") is None
