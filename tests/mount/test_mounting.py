"""Where a store can be mounted, and real mounts: programs use files, and the process that serves them dies."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import kvfs
from kvfs.cli.mount_helper import translate
from kvfs.mount import mounting
from kvfs.mount.connection import Connection
from kvfs.mount.mounting import KIND, MountError, check_mount_point, mounted_kind, unmount
from kvfs.mount.operations import Operations
from tests.mount.real import kvfs as command
from tests.mount.real import needs_fuse, serving, wait_until
from tests.stores import run_child, seeded, segment_files, tiny, tokens_of

MIB = 1 << 20


@pytest.fixture
def where(tmp_path: Path) -> Path:
    (tmp_path / "mnt").mkdir()
    return tmp_path / "mnt"


@pytest.fixture
def made(store_path: Path) -> Path:
    with kvfs.open(store_path, capacity="64MiB") as store:
        ns = store.namespace("tiny", tiny(), "9213176")
        ns.put(tokens_of(1, 6), seeded(1, 6 * tiny().page_bytes))
    return store_path


# -- without FUSE --------------------------------------------------------------------------------


def test_mount_points_that_cannot_be_used_are_refused_with_a_remedy(made: Path, where: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_bytes(b"")
    for path, words in [
        ("none", "does not exist: make"), ("file", "no directory"), ("full", "not empty"),
        ("store", "inside the store"), ("store/files", "does not exist"), ("store/pins", "inside the store"),
    ]:  # fmt: skip
        with pytest.raises(MountError, match=words):
            check_mount_point(str(tmp_path / path), str(made))
    assert check_mount_point(str(where), str(made)) == str(where)
    with pytest.raises(MountError, match="no mount of a store"):
        unmount(str(where))
    with pytest.raises(MountError, match="but of proc"):
        unmount("/proc")


def test_without_fuse_the_error_says_how_to_get_it(
    made: Path, where: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with kvfs.open(made) as store:
        monkeypatch.setattr("os.geteuid", lambda: 1000)
        monkeypatch.setattr("shutil.which", lambda name: None)
        with pytest.raises(MountError, match="apt install fuse3"):
            mounting.mount(store, str(where), mounting.MountOptions(), lambda: None)
        monkeypatch.setattr("os.geteuid", lambda: 0)
        monkeypatch.setattr(mounting, "DEVICE", str(tmp_path / "fuse"))
        with pytest.raises(MountError, match="modprobe fuse"):
            mounting.mount(store, str(where), mounting.MountOptions(), lambda: None)


def test_a_bug_or_an_unknown_request_is_an_errno_and_never_a_silence() -> None:
    from kvfs.mount import wire

    class Broken(Operations):
        def lookup(self, parent: int, name: bytes) -> wire.Entry:
            raise ZeroDivisionError

    ours, theirs = os.pipe()
    connection = Connection(theirs, Broken())
    for op, body, number in [(1, b"x\0", errno.EIO), (1, b"x", errno.EINVAL), (99, b"", errno.ENOSYS), (6, b"", 1)]:
        head = wire.HEADER.pack(wire.HEADER.size + len(body), op, 7, 1, 0, 0, 0, 0, 0)
        request = wire.parse(memoryview(head + body))
        connection._reply(request, *connection._answer(request))
        assert wire.REPLY.unpack(os.read(ours, 100)) == (16, -number, 7)
    os.close(ours)
    os.close(theirs)


def test_a_line_of_fstab_becomes_a_command() -> None:
    plain = translate(["/store", "/mnt", "-o", "rw,nofail,x-systemd.automount"])
    assert plain == ["-C", "/store", "mount", "/mnt", "--daemon"]
    options = translate(["/store", "/mnt", "-sn", "-o", "ro,allow_other,spool=1GiB"])[5:]
    assert options == ["--read-only", "--allow-other", "--spool", "1GiB"]
    for wrong in (["/store"], ["/store", "/mnt", "-o", "alow_other"], ["/store", "/mnt", "-x"]):
        with pytest.raises(ValueError, match=r"usage|unknown"):
            translate(wrong)


# -- with FUSE -----------------------------------------------------------------------------------


@needs_fuse
def test_programs_save_rename_map_and_read_files(made: Path, where: Path) -> None:
    data = seeded(1, 5 * MIB + 123)
    with serving(made, where):
        files = where / "files"
        (files / "a.tmp").write_bytes(data)
        (files / "a.tmp").rename(files / "a")
        assert (files / "a").read_bytes() == data
        with open(files / "a", "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            (files / "a").unlink()
            assert mapped[:] == data
        (files / "folder").mkdir()
        for n in range(300):
            (files / "folder" / f"{n}").write_bytes(b"%d" % n)
        assert len(os.listdir(files / "folder")) == 300
        with ThreadPoolExecutor(16) as pool:
            found = list(pool.map(lambda n: (files / "folder" / f"{n}").read_bytes(), range(300)))
        assert found == [b"%d" % n for n in range(300)]
        with open(files / "b", "w+b") as file, mmap_of(file, 10_000) as mapped:
            mapped[5_000:5_004] = b"here"
            mapped.flush()
        assert (files / "b").read_bytes()[4_998:5_006] == b"\0\0here\0\0"
        with open(files / "b", "ab") as file:
            file.write(b"end")
        assert (files / "b").stat().st_size == 10_003
        os.setxattr(files / "b", "user.kvfs.ttl", b"60")
        assert set(os.listxattr(files / "b")) == {"user.kvfs.hits", "user.kvfs.ttl"}
        for call in (lambda: os.link(files / "b", files / "c"), lambda: os.symlink("b", files / "c")):
            with pytest.raises(PermissionError):
                call()
        with pytest.raises(OSError, match="File name too long"):
            (files / ("n" * 300)).write_bytes(b"")
        assert os.statvfs(where).f_blocks * os.statvfs(where).f_frsize == 64 * MIB
        with pytest.raises(MountError, match="mount of a store already"):
            check_mount_point(str(where), str(made))
        command("umount", str(where))
    assert os.listdir(where) == []


def mmap_of(file: object, size: int) -> mmap.mmap:
    file.truncate(size)  # type: ignore[attr-defined]
    return mmap.mmap(file.fileno(), size)  # type: ignore[attr-defined]


@needs_fuse
def test_reading_and_writing_one_file_at_the_same_time(made: Path, where: Path) -> None:
    with serving(made, where):
        path = where / "files" / "a"
        path.write_bytes(b"old" * 10_000)
        with open(path, "rb") as reader:
            assert reader.read(3) == b"old"
            path.write_bytes(b"new" * 20_000)
            assert reader.read() == (b"old" * 10_000)[3:]
            assert path.read_bytes() == b"new" * 20_000
        with open(path, "r+b", buffering=0) as writer, open(path, "rb", buffering=0) as second:
            writer.write(b"XYZ")
            assert second.read(6) == b"XYZnew"
        assert path.read_bytes()[:6] == b"XYZnew"


@needs_fuse
def test_killed_and_mounted_again(made: Path, where: Path) -> None:
    data = seeded(2, 3 * MIB)
    with serving(made, where) as process:
        (where / "files" / "a").write_bytes(data)
        half = os.open(where / "files" / "half", os.O_WRONLY | os.O_CREAT)
        os.write(half, data)
        process.send_signal(signal.SIGKILL)
        process.wait()
        with pytest.raises(OSError, match="not connected"):
            os.statvfs(where)
        with pytest.raises(OSError):
            os.close(half)
        assert "process died: run kvfs umount" in command("-C", str(made), "mount", str(where), code=1)
        assert "unmounted" in command("umount", str(where))
    with serving(made, where, "--read-only"):
        assert os.listdir(where / "files") == ["a"]
        assert (where / "files" / "a").read_bytes() == data
        with pytest.raises(OSError, match="Read-only"):
            (where / "files" / "b").write_bytes(b"")


@needs_fuse
def test_the_process_ends_the_mount_when_it_is_asked_to(made: Path, where: Path) -> None:
    with serving(made, where) as process:
        (where / "files" / "a").write_bytes(b"data")
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: process.poll() is not None)
        assert process.returncode == 130
        assert mounted_kind(str(where)) is None
    with kvfs.open(made) as store:
        assert store.wait_ready()


@needs_fuse
def test_a_daemon_reports_how_its_start_went(made: Path, where: Path, tmp_path: Path) -> None:
    try:
        assert "ends it" in command("-C", str(made), "mount", str(where), "--daemon")
        (where / "files" / "a").write_bytes(b"data")
        with open(where / "files" / "a", "rb"):
            assert "in use" in command("umount", str(where), code=1)
        command("umount", str(where), "--lazy")
        assert mounted_kind(str(where)) is None
        assert "no store" in command("-C", str(tmp_path / "none"), "mount", str(where), "--daemon", code=10)
    finally:
        if mounted_kind(str(where)) == KIND:
            unmount(str(where), lazy=True)


@needs_fuse
def test_other_users_come_in_only_if_they_are_let(made: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        (Path(folder) / "mnt").mkdir()
        other_users(made, Path(folder) / "mnt")


def other_users(made: Path, where: Path) -> None:
    with serving(made, where):
        assert run_child(lambda: errno_of(lambda: os.listdir(where)), uid=1234) == errno.EACCES
    with serving(made, where, "--allow-other"):
        (where / "files" / "a").write_bytes(b"for all")
        assert run_child(lambda: errno_of(lambda: os.listdir(where)), uid=1234) == 0
        for private in ("prefixes", "segments", "stats.json", "files"):
            assert run_child(lambda p=private: errno_of(lambda: (where / p).read_bytes()), uid=1234) != 0  # type: ignore[misc]
            assert run_child(lambda p=private: errno_of(lambda: os.listdir(where / p)), uid=1234) != 0  # type: ignore[misc]
        assert run_child(lambda: errno_of(lambda: (where / "files" / "a").read_bytes()), uid=1234) == errno.EACCES
        (where / "files").chmod(0o777)
        (where / "files" / "a").chmod(0o600)
        assert run_child(lambda: errno_of(lambda: (where / "files" / "a").read_bytes()), uid=1234) == errno.EACCES
        assert run_child(lambda: errno_of(lambda: (where / "files" / "b").write_bytes(b"mine")), uid=1234) == 0
        assert (where / "files" / "b").stat().st_uid == 1234


def errno_of(call: object) -> int:
    try:
        call()  # type: ignore[operator]
    except OSError as exc:
        return exc.errno or -1
    return 0


@needs_fuse
def test_two_mounts_of_one_store_share_files(made: Path, where: Path, tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    with serving(made, where), serving(made, tmp_path / "two"):
        (where / "files" / "a").write_bytes(b"one")
        assert (tmp_path / "two" / "files" / "a").read_bytes() == b"one"
        (tmp_path / "two" / "files" / "b").write_bytes(b"two" * 100)
        (tmp_path / "two" / "files" / "b").rename(tmp_path / "two" / "files" / "a")
        wait_until(lambda: (where / "files" / "a").read_bytes() == b"two" * 100)


@needs_fuse
def test_safetensors_loads_a_prefix_and_a_flipped_byte_is_an_error(made: Path, where: Path) -> None:
    torch = pytest.importorskip("torch")
    torch_file = pytest.importorskip("safetensors.torch")
    with kvfs.open(made) as store, store.match_prefix(prefix_of(store)) as match:
        store.export_tensors(str(made.parent / "exported"), match)
    expected = torch_file.load_file(made.parent / "exported")
    with serving(made, where):
        (name,) = os.listdir(where / "prefixes")
        found = torch_file.load_file(where / "prefixes" / name)
        assert found.keys() == expected.keys()
        assert all(found[k].view(torch.uint8).equal(expected[k].view(torch.uint8)) for k in expected)
        del found  # tensors map the file, and a mapped file keeps the mount
    needle = seeded(1, 6 * tiny().page_bytes)[:64]
    for file in segment_files(made):
        raw = file.read_bytes()
        if needle in raw:
            with file.open("r+b") as out:
                out.seek(raw.index(needle))
                out.write(bytes([needle[0] ^ 1]))
    with serving(made, where):
        with pytest.raises(OSError, match="Input/output error"):
            open(where / "prefixes" / name, "rb").close()
        with pytest.raises(FileNotFoundError):  # what the library makes of every error of an open
            torch_file.load_file(where / "prefixes" / name)


def prefix_of(store: kvfs.Store) -> str:
    (described,) = store.catalog.described()
    prefixes, _ = store.catalog.prefixes(described)
    return prefixes[0].last_hash.hex()
