"""Files saved in the mount: what is read back is what was closed, as a whole, or there is no file."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from pathlib import Path

import pytest

import kvfs
from kvfs.mount.chunks import FILES
from kvfs.mount.manifest import PAGE_BYTES
from kvfs.mount.wire import OpenFlag
from tests.mount.kernel import NOTHING, Kernel, Mounted
from tests.stores import seeded, segment_files

NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL
MIB = 1 << 20


def refused(number: int) -> object:
    return pytest.raises(OSError, match=rf"\[Errno {number}\]")


def pages(store: kvfs.Store) -> int:
    return sum(info.pages for info in store.catalog.namespaces() if info.name == FILES)


def evict_all(mounted: Mounted) -> None:
    """Drop everything, as other files that are more in use would."""
    mounted.store.gc(0)
    mounted.names._verdicts.clear()


# -- content -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 4096, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 9 * MIB + 12_345])
def test_a_saved_file_is_read_back(kernel: Kernel, size: int) -> None:
    data = seeded(size, size)
    kernel.save("files/a", data)
    assert kernel.stat("files/a").size == size
    assert kernel.load("files/a") == data


def test_equal_pages_are_stored_once(kernel: Kernel, store: kvfs.Store) -> None:
    data = seeded(1, 10 * PAGE_BYTES)
    kernel.save("files/a", data)
    before = pages(store)
    kernel.save("files/b", data + b"more")
    assert (before, pages(store)) == (10, 11)
    kernel.save("files/zeros", bytes(100 * PAGE_BYTES))
    assert pages(store) == 12
    assert kernel.load("files/zeros") == bytes(100 * PAGE_BYTES)


def test_files_are_there_after_a_restart_and_a_rebuild(store_path: Path) -> None:
    data = seeded(2, MIB)
    with kvfs.open(store_path, capacity="64MiB") as store, Mounted(store) as mounted:
        mounted.kernel.mkdir("files/folder")
        mounted.kernel.save("files/folder/a", data)
    for file in (store_path / "index").iterdir():
        file.unlink() if file.is_file() else [inner.unlink() for inner in file.iterdir()]
    with kvfs.open(store_path) as store, Mounted(store) as mounted:
        assert store.wait_ready()
        assert mounted.kernel.listdir("files/folder") == ["a"]
        assert mounted.kernel.load("files/folder/a") == data


def test_a_file_is_written_in_any_order_and_truncated(kernel: Kernel) -> None:
    fd = kernel.open("files/a", NEW)
    kernel.write(fd, b"tail", 3 * PAGE_BYTES)
    kernel.write(fd, b"head", 0)
    kernel.close(fd)
    assert kernel.load("files/a") == b"head" + bytes(3 * PAGE_BYTES - 4) + b"tail"
    kernel.truncate("files/a", 2)
    assert kernel.load("files/a") == b"he"
    kernel.truncate("files/a", 5)
    assert kernel.load("files/a") == b"he\0\0\0"
    fd = kernel.open("files/a", os.O_WRONLY)
    kernel.write(fd, b"!", 1)
    kernel.close(fd)
    assert kernel.load("files/a") == b"h!\0\0\0"


def test_a_reader_sees_what_a_writer_of_the_mount_has_written_so_far(kernel: Kernel) -> None:
    writer = kernel.open("files/a", NEW)
    kernel.write(writer, b"first")
    reader = kernel.open("files/a")
    kernel.write(writer, b"F")
    assert kernel.read(reader) == b"First"
    assert kernel.stat("files/a").size == 5
    kernel.close(writer)
    assert kernel.read(reader) == b"First"
    kernel.close(reader)


def test_an_unchanged_writer_stores_nothing(kernel: Kernel, mounted: Mounted) -> None:
    kernel.save("files/a", b"x" * 10)
    before = os.stat("a", dir_fd=mounted.names.root).st_mtime_ns
    kernel.close(kernel.open("files/a", os.O_RDWR))
    assert os.stat("a", dir_fd=mounted.names.root).st_mtime_ns == before


def test_a_file_that_was_just_saved_is_found_without_asking_the_index(
    kernel: Kernel, mounted: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel.save("files/a", b"data")
    with monkeypatch.context() as silent:
        silent.setattr(mounted.chunks, "find", None)
        assert kernel.stat("files/a").size == 4
    mounted.store._shared.services().active.finish_all()
    mounted.store.gc(0)
    assert not kernel.exists("files/a")


def test_the_kernel_tells_when_a_writer_is_closed_and_sends_nothing_for_a_reader(kernel: Kernel) -> None:
    kernel.save("files/a", b"data")
    for path, flags, tells in [("files/a", os.O_RDONLY, False), ("files/a", os.O_RDWR, True), ("stats.json", 0, False)]:
        fd = kernel.open(path, flags)
        assert (OpenFlag.NOFLUSH in kernel.open_files[fd][0].flags) != tells
        kernel.close(fd)


# -- names -------------------------------------------------------------------------------------


def test_a_rename_replaces_and_open_files_keep_their_content(kernel: Kernel) -> None:
    kernel.save("files/a", b"old")
    reader = kernel.open("files/a")
    kernel.save("files/a.tmp", b"newer")
    kernel.rename("files/a.tmp", "files/a")
    assert kernel.load("files/a") == b"newer"
    assert kernel.read(reader) == b"old"
    assert kernel.listdir("files") == ["a"]
    kernel.close(reader)


def test_a_file_that_is_unlinked_while_it_is_written_leaves_nothing(kernel: Kernel, mounted: Mounted) -> None:
    fd = kernel.open("files/a", NEW)
    kernel.write(fd, b"data")
    kernel.unlink("files/a")
    kernel.write(fd, b"more", 4)
    assert kernel.read(fd) == b"datamore"
    kernel.close(fd)
    assert not kernel.exists("files/a")
    assert mounted.names_on_disk() == []


def test_a_file_that_is_unlinked_or_evicted_while_it_is_open_stays_readable(kernel: Kernel, mounted: Mounted) -> None:
    data = seeded(3, MIB)
    kernel.save("files/a", data)
    fd = kernel.open("files/a")
    node = kernel.node("files/a")
    assert kernel.ops.getattr(node, None)[0].nlink == 1
    kernel.unlink("files/a")
    assert kernel.ops.getattr(node, None)[0].nlink == 0
    evict_all(mounted)
    assert kernel.read(fd) == data
    kernel.close(fd)


def test_renamed_while_it_is_written(kernel: Kernel) -> None:
    kernel.mkdir("files/to")
    fd = kernel.open("files/a", NEW)
    kernel.rename("files/a", "files/to/b")
    kernel.write(fd, b"data")
    kernel.close(fd)
    assert kernel.load("files/to/b") == b"data"
    assert not kernel.exists("files/a")


def test_renames_of_directories_and_their_files(kernel: Kernel) -> None:
    kernel.mkdir("files/one")
    kernel.save("files/one/a", b"1")
    kernel.rename("files/one", "files/two")
    assert kernel.load("files/two/a") == b"1"
    with refused(errno.ENOTEMPTY):
        kernel.rmdir("files/two")
    kernel.unlink("files/two/a")
    kernel.rmdir("files/two")
    assert kernel.listdir("files") == []


@pytest.mark.parametrize(
    ("call", "number"),
    [
        (lambda k: k.open("files/a", NEW), errno.EEXIST),
        (lambda k: k.mkdir("files/a"), errno.EEXIST),
        (lambda k: k.rename("files/a", "files/b", 1), errno.EEXIST),
        (lambda k: k.rename("files/a", "files/b", 2), errno.EINVAL),
        (lambda k: k.rename("files/a", "pins/b"), errno.EXDEV),
        (lambda k: k.rename("files/none", "files/b"), errno.ENOENT),
        (lambda k: k.unlink("files/folder"), errno.EISDIR),
        (lambda k: k.unlink("files/none"), errno.ENOENT),
        (lambda k: k.rmdir("files/a"), errno.ENOTDIR),
        (lambda k: k.save("files/" + "n" * 300, b""), errno.ENAMETOOLONG),
        (lambda k: k.stat("files/a/b"), errno.ENOTDIR),
        (lambda k: k.open("files/folder"), errno.EISDIR),
        (lambda k: k.truncate("files/a", 1 << 60), errno.EFBIG),
        (lambda k: k.set_xattr("files/a", "user.other", b"1"), errno.EOPNOTSUPP),
        (lambda k: k.set_xattr("files/a", "user.kvfs.ttl", b"soon"), errno.EINVAL),
        (lambda k: k.xattr("files/a", "user.other"), errno.ENODATA),
        (lambda k: k.save("stats.json", b""), errno.EACCES),
        (lambda k: k.save("pins/new", b""), errno.EPERM),
        (lambda k: k.unlink("stats.json"), errno.EPERM),
    ],
)
def test_what_is_not_possible_has_the_errno_that_programs_know(kernel: Kernel, call: object, number: int) -> None:
    kernel.save("files/a", b"a")
    kernel.save("files/b", b"b")
    kernel.mkdir("files/folder")
    with refused(number):
        call(kernel)  # type: ignore[operator]
    assert kernel.load("files/a") == b"a"
    assert kernel.load("files/b") == b"b"


def test_modes_and_times_are_kept(kernel: Kernel) -> None:
    kernel.save("files/a", b"a")
    kernel.set("files/a", NOTHING._replace(mode=0o640, mtime_ns=10**18 + 1))
    kernel.load("files/a")
    attr = kernel.stat("files/a")
    assert (stat.S_IMODE(attr.mode), attr.mtime_ns) == (0o640, 10**18 + 1)


def test_nodes_are_forgotten(kernel: Kernel, mounted: Mounted) -> None:
    for n in range(20):
        kernel.save(f"files/{n}", bytes([n]))
        kernel.load(f"files/{n}")
    kernel.listdir("files")
    kernel.rename("files/1", "files/2")
    with refused(errno.EEXIST):
        kernel.open("files/3", NEW)
    assert len(mounted.table._nodes) <= 2  # the top, and files/ for the calls that keep it
    assert mounted.table._files == {}
    assert dict(mounted.tree.spots) == {}


def test_a_reader_that_came_while_it_was_written_does_not_need_the_store(kernel: Kernel, mounted: Mounted) -> None:
    data = seeded(11, MIB)
    writer = kernel.open("files/a", NEW)
    kernel.write(writer, data)
    reader = kernel.open("files/a")
    kernel.close(writer)
    evict_all(mounted)
    assert kernel.read(reader) == data
    kernel.close(reader)


def test_the_end_of_an_old_node_does_not_disturb_the_new_one(kernel: Kernel) -> None:
    kernel.save("files/a", b"one")
    reader = kernel.open("files/a")
    with refused(errno.ESTALE):  # the kernel looks up again: that node is another one
        kernel.ops.open(kernel.open_files[reader][1], os.O_RDWR)
    new = kernel._walk("files/a")
    assert new != kernel.open_files[reader][1]
    kernel.close(reader)
    kernel.ops.release(kernel.ops.open(new, os.O_RDWR).handle)
    kernel.ops.forget(new, 1)


# -- failures ----------------------------------------------------------------------------------


def test_a_file_that_the_store_cannot_hold_is_refused_at_close(store_path: Path) -> None:
    with kvfs.open(store_path, capacity="16MiB") as store, Mounted(store) as mounted:
        kernel = mounted.kernel
        with refused(errno.ENOSPC):
            kernel.save("files/a", seeded(4, 20 * MIB))
        assert not kernel.exists("files/a")
        assert mounted.names_on_disk() == []
        kernel.save("files/a", b"fits")
        with refused(errno.ENOSPC):
            kernel.save("files/a", seeded(5, 20 * MIB))
        if kernel.exists("files/a"):  # unless its page made room
            assert kernel.load("files/a") == b"fits"


def test_a_full_spool_is_refused_at_write_and_again_at_close(store: kvfs.Store) -> None:
    with Mounted(store, spool_bytes=4 * MIB) as mounted:
        kernel = mounted.kernel
        busy = kernel.open("files/busy", NEW)
        kernel.write(busy, bytes(3 * MIB))
        fd = kernel.open("files/a", NEW)
        with refused(errno.ENOSPC):
            kernel.write(fd, bytes(2 * MIB))
        with refused(errno.ENOSPC):
            kernel.write(fd, b"small", 0)
        with refused(errno.ENOSPC):
            kernel.close(fd)
        assert not kernel.exists("files/a")
        kernel.close(busy)
        assert kernel.load("files/busy") == bytes(3 * MIB)
        with refused(errno.EFBIG):
            kernel.save("files/large", bytes(5 * MIB))
        assert mounted.names_on_disk() == ["busy"]


def test_a_save_that_fails_leaves_the_old_content(
    kernel: Kernel, mounted: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel.save("files/a", b"old")

    def fails(*_: object) -> None:
        raise OSError(errno.EIO, "the disk")

    with monkeypatch.context() as broken:
        broken.setattr(mounted.chunks, "_put_run", fails)
        with refused(errno.EIO):
            kernel.save("files/a", b"new content")
    assert kernel.load("files/a") == b"old"


def test_at_sync_level_sync_the_manifest_and_its_directory_are_synced(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    with kvfs.open(store_path, capacity="64MiB", sync="sync") as store, Mounted(store, durable=True) as mounted:
        fsync = os.fsync
        monkeypatch.setattr("os.fsync", lambda fd: (synced.append(os.fstat(fd).st_ino), fsync(fd))[1])
        fd = mounted.kernel.open("files/a", NEW)
        mounted.kernel.write(fd, b"data")
        mounted.kernel.ops.fsync(fd)
        folder = os.fstat(mounted.names.root).st_ino
        assert {os.stat("a", dir_fd=mounted.names.root).st_ino, folder} <= set(synced)
        synced.clear()
        mounted.kernel.rename("files/a", "files/b")
        assert folder in synced
        mounted.kernel.close(fd)


def test_a_writer_that_dies_leaves_no_half_file(store: kvfs.Store, mounted: Mounted) -> None:
    fd = mounted.kernel.open("files/a", NEW)
    mounted.kernel.write(fd, b"half")
    with Mounted(store) as other:
        assert not other.kernel.exists("files/a")
        assert other.kernel.listdir("files") == []
        other.sweep()
        assert other.names_on_disk() == ["a"], "its writer lives"
        os.close(mounted.tree.drafts.popitem()[1].draft.name_fd)  # type: ignore[union-attr]  # as the kernel does
        other.sweep()
        assert other.names_on_disk() == []
    os.dup2(os.open(os.devnull, os.O_RDONLY), fd + 100)
    mounted.table._files.clear()


def test_a_process_that_ends_without_close_has_saved_its_file(kernel: Kernel) -> None:
    fd = kernel.open("files/a", NEW)
    kernel.write(fd, b"data")
    kernel.die()
    assert kernel.load("files/a") == b"data"


def test_a_mount_that_ends_stores_no_half_file(store: kvfs.Store) -> None:
    with Mounted(store) as first:
        first.kernel.save("files/old", b"content")
        for name in ("new", "old"):
            fd = first.kernel.open(f"files/{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            first.kernel.write(fd, b"half")
    with Mounted(store) as second:
        assert second.names_on_disk() == ["old"]
        assert second.kernel.load("files/old") == b"content"


def test_an_evicted_file_disappears_as_a_whole(kernel: Kernel, mounted: Mounted) -> None:
    kernel.save("files/a", seeded(6, 3 * MIB))
    kernel.load("files/a")
    evict_all(mounted)
    assert not kernel.exists("files/a")
    assert kernel.listdir("files") == []
    with refused(errno.ENOENT):
        kernel.load("files/a")
    kernel.save("files/a", b"again", NEW)
    assert kernel.load("files/a") == b"again"


def test_names_of_evicted_files_are_swept_and_their_directory_can_be_removed(kernel: Kernel, mounted: Mounted) -> None:
    kernel.mkdir("files/folder")
    kernel.save("files/folder/a", seeded(6, MIB))
    kernel.save("files/b", seeded(7, MIB))
    evict_all(mounted)
    kernel.save("files/c", b"new")
    assert mounted.names_on_disk() == ["b", "c", "folder"]
    kernel.rmdir("files/folder")
    mounted.sweep()
    assert mounted.names_on_disk() == ["c"]


def test_files_in_use_survive_eviction_and_others_go(store_path: Path) -> None:
    with kvfs.open(store_path, capacity="32MiB") as store, Mounted(store) as mounted:
        kernel = mounted.kernel
        kept = seeded(100, MIB)
        kernel.save("files/kept", kept)
        for n in range(40):
            kernel.save(f"files/{n}", seeded(n, MIB))
            mounted.spool.close()  # so that each load reads the pages
            assert kernel.load("files/kept") == kept
        left = kernel.listdir("files")
        assert "kept" in left
        assert "0" not in left
        assert len(left) < 33
        loaded = 0
        for name in left:
            with contextlib.suppress(FileNotFoundError):  # evicted since, in the background
                assert kernel.load(f"files/{name}") == (kept if name == "kept" else seeded(int(name), MIB))
                loaded += 1
        assert loaded > 10


def test_pages_that_many_files_share_stay_while_files_come_and_go(store_path: Path) -> None:
    shared = seeded(1, 2 * MIB)
    with kvfs.open(store_path, capacity="16MiB") as store, Mounted(store) as mounted:
        for n in range(30):
            own = seeded(1_000 + n, MIB + MIB // 2)
            mounted.kernel.save(f"files/{n}", own[: MIB // 2] + shared + own[MIB // 2 :])
        left = [int(name) for name in mounted.kernel.listdir("files")]
        assert {27, 28, 29} <= set(left), "the latest files are there"
        assert 0 not in left


def test_a_flipped_byte_is_an_error_and_then_no_file(kernel: Kernel, mounted: Mounted, store_path: Path) -> None:
    data = seeded(8, 2 * MIB)
    kernel.save("files/a", data)
    needle = data[MIB : MIB + 64]
    for file in segment_files(store_path):
        raw = bytearray(file.read_bytes())
        at = raw.find(needle)
        if at >= 0:
            raw[at] ^= 1
            with file.open("r+b") as out:
                out.write(raw)
    with refused(errno.EIO):
        kernel.load("files/a")
    assert not kernel.exists("files/a")
    kernel.save("files/a", data)
    assert kernel.load("files/a") == data


@pytest.mark.parametrize("damage", ["flip", "short", "empty", "long"])
def test_a_damaged_manifest_is_no_file(kernel: Kernel, mounted: Mounted, damage: str) -> None:
    kernel.save("files/a", seeded(9, MIB))
    fd = os.open("a", os.O_RDWR, dir_fd=mounted.names.root)
    size = os.fstat(fd).st_size
    if damage == "flip":
        byte = os.pread(fd, 1, 100)[0]
        os.pwrite(fd, bytes([byte ^ 1]), 100)
    else:
        os.ftruncate(fd, {"short": size - 1, "empty": 0, "long": size + 1}[damage])
    os.close(fd)
    mounted.names._verdicts.clear()
    assert not kernel.exists("files/a")
    mounted.sweep()
    assert mounted.names_on_disk() == []


def test_nothing_that_is_planted_in_the_tree_of_names_is_followed(
    kernel: Kernel, mounted: Mounted, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"not of the store")
    root = mounted.names.root
    os.symlink(secret, "link", dir_fd=root)
    os.symlink(tmp_path, "folder", dir_fd=root)
    os.mkfifo("pipe", dir_fd=root)
    for name in ("link", "folder", "folder/secret", "pipe"):
        assert not kernel.exists(f"files/{name}")
    assert kernel.listdir("files") == []
    with refused(errno.EEXIST):
        kernel.save("files/link", b"x")
    mounted.sweep()
    assert secret.read_bytes() == b"not of the store"


# -- attributes --------------------------------------------------------------------------------


def test_hits_are_counted_and_a_lifetime_ends(kernel: Kernel, mounted: Mounted) -> None:
    kernel.save("files/a", b"data")
    kernel.load("files/a")
    kernel.load("files/a")
    assert kernel.xattr("files/a", "user.kvfs.hits") == b"2"
    kernel.set_xattr("files/a", "user.kvfs.ttl", b"1h")
    assert 3_590 < int(kernel.xattr("files/a", "user.kvfs.ttl")) <= 3_600
    assert kernel.load("files/a") == b"data"
    fd = os.open("a", os.O_RDWR, dir_fd=mounted.names.root)
    mounted.names.write_state(fd, mounted.names.state(fd)._replace(expires=1))
    os.close(fd)
    assert not kernel.exists("files/a")
    mounted.sweep()
    assert mounted.names_on_disk() == []


# -- two mounts --------------------------------------------------------------------------------


def test_two_mounts_share_files_and_a_new_content_is_a_new_node(store: kvfs.Store, mounted: Mounted) -> None:
    with Mounted(store) as other:
        mounted.kernel.save("files/a", b"one")
        assert other.kernel.load("files/a") == b"one"
        reader = other.kernel.open("files/a")
        before = other.kernel.node("files/a")
        mounted.kernel.save("files/a", b"two")
        assert other.kernel.load("files/a") == b"two"
        assert other.kernel.node("files/a") != before
        assert other.kernel.read(reader) == b"one"
        other.kernel.close(reader)
        mounted.kernel.unlink("files/a")
        assert not other.kernel.exists("files/a")


def test_a_writer_next_to_readers_gets_a_node_of_its_own(kernel: Kernel) -> None:
    kernel.save("files/a", b"one")
    reader = kernel.open("files/a")
    assert kernel.open_files[reader][0].backing >= 0
    writer = kernel.open("files/a", os.O_WRONLY | os.O_TRUNC)
    assert kernel.open_files[writer][1] != kernel.open_files[reader][1]
    kernel.write(writer, b"two")
    kernel.close(writer)
    assert kernel.read(reader) == b"one"
    assert kernel.load("files/a") == b"two"
    kernel.close(reader)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("saved_first", [False, True])
@pytest.mark.parametrize("by_path", [False, True])
def test_a_reader_that_came_before_the_kernel_released_the_writer_keeps_what_was_saved(
    kernel: Kernel, late: bool, saved_first: bool, by_path: bool
) -> None:
    """``close`` returns after the flush; the release comes later, even after the next writer."""
    writer = kernel.open("files/a", NEW)
    kernel.write(writer, b"one")
    reader = -1 if saved_first else kernel.open("files/a")
    kernel.ops.flush(writer)
    if saved_first:
        reader = kernel.open("files/a")
    if not late:
        kernel.ops.release(writer)
    if by_path:
        kernel.truncate("files/a", 1)
    else:
        kernel.save("files/a", b"two")
    assert kernel.read(reader) == b"one"
    assert kernel.node("files/a") != kernel.open_files[reader][1]
    if late:
        with refused(errno.ESTALE):  # a copy of the descriptor, whose draft has a successor
            kernel.write(writer, b"X")
        with refused(errno.ESTALE):
            kernel.ops.setattr(kernel.open_files[writer][1], NOTHING._replace(handle=writer, size=1))
        kernel.ops.release(writer)
    new = b"o" if by_path else b"two"
    assert kernel.read(reader) == b"one"
    assert kernel.load("files/a") == new
    again = kernel.open("files/a", os.O_RDWR)
    kernel.write(again, b"T")
    kernel.close(again)
    assert kernel.read(reader) == b"one"
    assert kernel.load("files/a") == b"T" + new[1:]


@pytest.mark.parametrize("flags", [os.O_RDWR, os.O_WRONLY | os.O_TRUNC])
def test_a_map_keeps_its_content_after_its_file_was_closed(kernel: Kernel, flags: int) -> None:
    """The kernel maps the copy, not the file of the mount: its release comes with the close."""
    data = seeded(7, 3 * PAGE_BYTES + 5)
    kernel.save("files/a", data)
    fd = kernel.open("files/a")
    mapped = os.dup(kernel.open_files[fd][0].backing)
    kernel.close(fd)
    for _ in range(2):
        writer = kernel.open("files/a", flags)
        kernel.write(writer, b"new", 1)
        kernel.close(writer)
    kernel.truncate("files/a", 2)
    assert os.pread(mapped, len(data) + 1, 0) == data
    assert kernel.load("files/a") == (data[:1] if flags & os.O_RDWR else b"\0") + b"n"
    os.close(mapped)


def test_a_reader_follows_a_writer_of_which_another_descriptor_was_closed(kernel: Kernel) -> None:
    writer = kernel.open("files/a", NEW)
    kernel.write(writer, b"one")
    kernel.ops.flush(writer)  # by a child process that ends
    reader = kernel.open("files/a")
    kernel.write(writer, b"two", 3)
    assert kernel.read(reader) == b"onetwo"
    second = kernel.open("files/a", os.O_WRONLY)
    kernel.write(second, b"!", 6)
    assert kernel.read(reader) == b"onetwo!"
    for fd in (second, writer, reader):
        kernel.close(fd)
    assert kernel.load("files/a") == b"onetwo!"


def test_a_sweep_just_after_a_file_was_made_does_not_take_its_name(
    mounted: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer has made the name, and does not hold the lock yet that shows that it lives."""
    lock, sweeps = fcntl.flock, iter([mounted.sweep])

    def late(fd: int, operation: int) -> None:
        if operation & fcntl.LOCK_SH and (sweep := next(sweeps, None)) is not None:
            sweep()
        lock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    mounted.kernel.save("files/a", b"content")
    assert mounted.kernel.load("files/a") == b"content"


def test_a_file_is_made_while_a_sweep_looks_at_its_name(mounted: Mounted, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, refusals = fcntl.flock, iter([BlockingIOError(errno.EAGAIN, "the sweep has it")])

    def late(fd: int, operation: int) -> None:
        if operation & fcntl.LOCK_SH and (refusal := next(refusals, None)) is not None:
            raise refusal
        lock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    mounted.kernel.save("files/a", b"content")
    assert mounted.kernel.load("files/a") == b"content" and mounted.names.count == 1


@pytest.mark.parametrize("expired", [False, True])
def test_a_sweep_leaves_a_file_that_is_being_written_its_name(mounted: Mounted, expired: bool) -> None:
    """Its old content is evicted, or its lifetime is over, before the new one is stored."""
    kernel = mounted.kernel
    kernel.save("files/a", seeded(1, 3 * PAGE_BYTES))
    fd = kernel.open("files/a", os.O_RDWR)
    kernel.write(fd, b"new", 0)
    if expired:
        kernel.set_xattr("files/a", "user.kvfs.ttl", b"1s")
        mounted.names._clock.now_us = lambda: time.time_ns() // 1000 + 10_000_000  # type: ignore[method-assign]
    else:
        mounted.store._shared.services().active.finish_all()
        evict_all(mounted)
        assert not pages(mounted.store)
    for _ in range(2):
        mounted.sweep()
    if expired:
        kernel.set_xattr("files/a", "user.kvfs.ttl", b"1h")
    kernel.close(fd)
    assert mounted.names_on_disk() == ["a"]
    assert kernel.load("files/a") == b"new" + seeded(1, 3 * PAGE_BYTES)[3:]


def test_a_writer_that_comes_while_the_sweep_removes_the_name_makes_it_again(
    mounted: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, lock = mounted.kernel, fcntl.flock
    kernel.save("files/a", b"old")
    removals = iter([lambda: os.unlink("a", dir_fd=mounted.names.root)])

    def late(fd: int, operation: int) -> None:
        if operation & fcntl.LOCK_SH and (remove := next(removals, None)) is not None:
            remove()
        lock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    kernel.save("files/a", b"new")
    assert kernel.load("files/a") == b"new"


def test_copies_that_are_not_in_use_take_few_descriptors(
    kernel: Kernel, mounted: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfs.mount.spool.IDLE_MAX", 3)
    before = len(os.listdir("/proc/self/fd"))
    for n in range(8):
        kernel.save(f"files/{n}", b"%d" % n)
        assert kernel.load(f"files/{n}") == b"%d" % n
    assert len(mounted.spool._idle) == 3
    assert len(os.listdir("/proc/self/fd")) <= before + 8
    assert mounted.spool.used_bytes() == 3
    assert [kernel.load(f"files/{n}") for n in range(8)] == [b"%d" % n for n in range(8)]


def test_an_open_that_finds_too_many_files_open_changes_nothing(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel.save("files/a", b"old")
    fd = kernel.open("files/a")
    monkeypatch.setattr("kvfs.mount.node.HANDLES_MAX", 1)
    for name in ("files/a", "files/b"):
        with refused(errno.ENFILE):
            kernel.save(name, b"new")
    kernel.close(fd)
    assert kernel.load("files/a") == b"old"
    with refused(errno.ENOENT):
        kernel.load("files/b")
