"""Mounting a store at a directory, and unmounting: what is checked, and how the kernel is asked.

Root asks the kernel directly; other users ask through fusermount3 of the package fuse3, which hands the descriptor of
/dev/fuse over a socket (https://github.com/libfuse/libfuse, util/fusermount.c).
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import os
import resource
import shutil
import socket
import stat
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

from kvfs.errors import ConfigError, KvfsError
from kvfs.mount import view as views
from kvfs.mount.chunks import Chunks
from kvfs.mount.connection import WRITE_BYTES, Connection
from kvfs.mount.file_tree import FileTree
from kvfs.mount.folder import root_of
from kvfs.mount.names import FILES_MAX, FOLDER, Names
from kvfs.mount.node import NodeTable
from kvfs.mount.spool import Spool
from kvfs.mount.wire import Usage
from kvfs.store import Store

KIND = "fuse.kvfs"
DEVICE = "/dev/fuse"
SPOOL_SHARE = 4  # one in so many bytes of the capacity: what files being open and written may take besides
FUSERMOUNT_SECONDS = 30.0
_MS_RDONLY, _MS_NOSUID, _MS_NODEV = 1, 2, 4
_MNT_DETACH = 2


class MountError(KvfsError):
    """The directory cannot be mounted or unmounted; the message names the remedy."""


@dataclass(frozen=True)
class MountOptions:
    read_only: bool = False
    allow_other: bool = False
    spool_bytes: int | None = None  # None: a share of the capacity


def check_mount_point(path: str, store_path: str) -> str:
    """The absolute path of a directory where a store can be mounted. MountError."""
    where = os.path.abspath(path)
    try:
        mode = os.stat(where).st_mode
        if mounted_kind(where) == KIND:
            os.statvfs(where)  # not answered from a cache
    except FileNotFoundError:
        raise MountError(f"{path} does not exist: make the directory first") from None
    except OSError as exc:
        if exc.errno == errno.ENOTCONN:
            raise MountError(f"{path} is a mount whose process died: run kvfs umount {path} first") from None
        raise
    if not stat.S_ISDIR(mode):
        raise MountError(f"{path} is no directory: name an empty one")
    if mounted_kind(where) == KIND:
        raise MountError(f"{path} is a mount of a store already: name another directory, or end it with kvfs umount")
    store = os.path.realpath(store_path)
    if (os.path.realpath(where) + "/").startswith(store + "/"):
        raise MountError(f"{path} is inside the store: name a directory outside of {store_path}")
    if os.listdir(where):
        raise MountError(f"{path} is not empty: its files would be hidden; name an empty directory")
    return where


def mounted_kind(path: str) -> str | None:
    """Type of the file system that is mounted at a directory; None if none is."""
    wanted = os.path.realpath(os.path.dirname(path)) + "/" + os.path.basename(path.rstrip("/"))
    found = None
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            fields = line.split()
            where = fields[4].encode("latin-1", "backslashreplace").decode("unicode_escape")
            if where == wanted.replace("//", "/"):
                found = fields[fields.index("-") + 1]
    return found


def mount(store: Store, path: str, options: MountOptions, ready: Callable[[], None]) -> None:
    """Mount ``store`` at ``path`` and serve it until it is unmounted. ``ready`` is called when it can be used.

    MountError before anything is mounted. On KeyboardInterrupt the directory is unmounted; files that are open then
    lose their connection.
    """
    where = check_mount_point(path, store.path)
    _allow_descriptors()
    spool = Spool(_spool_folder(store, options), options.spool_bytes or store.settings.capacity_bytes // SPOOL_SHARE)
    view = views.View(store, spool)
    owner = os.stat(store.path)
    durable = store.settings.sync == "sync"
    chunks = Chunks(store, spool)
    names = Names(store.path, chunks, read_only=options.read_only or store.read_only, durable=durable)
    tree = FileTree(names, chunks, spool)
    try:
        top = views.root(view, root_of(tree) if names.root >= 0 else None)
        table = NodeTable(top, lambda: usage(store, names), (owner.st_uid, owner.st_gid))
        tree.rename_key = table.rename_key

        def started() -> None:
            tree.start_sweeps()
            ready()

        fd = _connect(where, options, read_only=options.read_only or store.read_only)
        try:
            connection = Connection(fd, table)
            try:
                connection.run(started)
            except KeyboardInterrupt:
                with contextlib.suppress(MountError):
                    unmount(where, lazy=True)
                raise
            finally:
                table.close()
        finally:
            os.close(fd)
    finally:
        tree.close()
        view.close()


def _allow_descriptors() -> None:
    """Allow as many descriptors as the hard limit does: each open file of the mount takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def usage(store: Store, names: Names) -> Usage:
    """What ``df`` shows: the limit of the store, and what it holds."""
    total = store.settings.capacity_bytes
    used = store.stats().get("used_bytes", 0)
    return Usage(total, max(0, total - used), names.count, max(0, FILES_MAX - names.count))


def _spool_folder(store: Store, options: MountOptions) -> str:
    """Where unnamed files are: on the store's file system, or, if that may not be written, with temporary files."""
    import tempfile

    if options.read_only or store.read_only:
        return tempfile.gettempdir()
    folder = os.path.join(store.path, FOLDER)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, stat.S_IMODE(os.stat(store.path).st_mode) & 0o2770)
    return folder


# -- asking the kernel -----------------------------------------------------------------------


def _connect(where: str, options: MountOptions, *, read_only: bool) -> int:
    """Mount, and return the descriptor of the connection."""
    flags = ["default_permissions", f"max_read={WRITE_BYTES}", *(["allow_other"] if options.allow_other else [])]
    if os.geteuid() != 0:
        return _by_fusermount(where, [*flags, f"subtype={KIND[5:]}", "fsname=kvfs", *(["ro"] if read_only else [])])
    fd = _open_device()
    wanted = f"fd={fd},rootmode=40000,user_id=0,group_id=0," + ",".join(flags)
    bits = _MS_NOSUID | _MS_NODEV | (_MS_RDONLY if read_only else 0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"kvfs", os.fsencode(where), KIND.encode(), ctypes.c_ulong(bits), wanted.encode()):
        number = ctypes.get_errno()
        os.close(fd)
        hint = "; in a container, add --cap-add SYS_ADMIN" if number == errno.EPERM else ""
        raise MountError(f"{where}: the kernel does not mount: {os.strerror(number)}{hint}")
    return fd


def _open_device() -> int:
    try:
        return os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        raise MountError(
            f"{DEVICE} does not exist: load FUSE (modprobe fuse); in a container, add --device {DEVICE}"
        ) from None
    except OSError as exc:
        if exc.errno in (errno.ENODEV, errno.ENXIO):
            raise MountError(
                f"this kernel has no FUSE ({DEVICE}: {exc.strerror}): load it with modprobe fuse"
            ) from None
        raise MountError(f"{DEVICE}: {exc.strerror}; in a container, add --device {DEVICE}") from None


def _by_fusermount(where: str, flags: list[str]) -> int:
    command = shutil.which("fusermount3")
    if command is None:
        raise MountError("fusermount3 is missing, which mounts for users other than root: apt install fuse3")
    if not os.path.exists(DEVICE):
        os.close(_open_device())
    ours, theirs = socket.socketpair()
    with ours, theirs:
        done = subprocess.run(
            [command, "-o", ",".join(flags), "--", where], pass_fds=[theirs.fileno()], text=True, capture_output=True,
            env={**os.environ, "_FUSE_COMMFD": str(theirs.fileno())}, timeout=FUSERMOUNT_SECONDS,
        )  # fmt: skip
        if done.returncode:
            raise MountError(f"{where}: {done.stderr.strip() or 'fusermount3 failed'}")
        fds = array.array("i")
        _, extra, _, _ = ours.recvmsg(1, socket.CMSG_SPACE(fds.itemsize))
        for level, kind, data in extra:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(data[: fds.itemsize])
        if not fds:
            raise MountError(f"{where}: fusermount3 gave no connection")
        os.set_inheritable(fds[0], False)
        return fds[0]


def unmount(path: str, *, lazy: bool = False) -> None:
    """Unmount a directory, also one whose process died. ``lazy``: files that are open stay so until they are closed."""
    where = os.path.abspath(path)
    kind = mounted_kind(where)
    if kind != KIND:
        raise MountError(f"{path} is no mount of a store" + (f", but of {kind}" if kind else ""))
    if os.geteuid() != 0:
        _fusermount_unmount(where, lazy)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(where), _MNT_DETACH if lazy else 0):
        number = ctypes.get_errno()
        if number == errno.EBUSY:
            raise MountError(f"{path} is in use: close its files, or unmount with --lazy")
        raise MountError(f"{path}: {os.strerror(number)}")


def _fusermount_unmount(where: str, lazy: bool) -> None:
    command = shutil.which("fusermount3")
    if command is None:
        raise MountError("fusermount3 is missing, which unmounts for users other than root: apt install fuse3")
    arguments = [command, "-u", *(["-z"] if lazy else []), "--", where]
    done = subprocess.run(arguments, text=True, capture_output=True, timeout=FUSERMOUNT_SECONDS)
    if done.returncode:
        hint = "; close its files, or unmount with --lazy" if "busy" in done.stderr else ""
        raise MountError(f"{where}: {done.stderr.strip()}{hint}")


def parse_spool(text: str | None) -> int | None:
    from kvfs.directory.config import parse_size

    size = None if text is None else parse_size(text, "--spool")
    if size is not None and size < WRITE_BYTES:
        raise ConfigError(f"--spool is {text!r}: give at least 1MiB")
    return size
