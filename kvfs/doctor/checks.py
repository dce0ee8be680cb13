"""Checks of a store and its surroundings, with remedies.

They open no index and change nothing, so they work where nothing else does.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import resource
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from kvfs.bundles.drop_folder import waiting
from kvfs.directory import config, io_mode
from kvfs.directory.liveness import census
from kvfs.directory.root import GOOD_FILESYSTEMS, Directory, filesystem_of
from kvfs.directory.sizes import size
from kvfs.directory.watch import probe
from kvfs.doctor.findings import BAD, OK, WARN, Finding
from kvfs.doctor.locks import locks, processes
from kvfs.errors import ConfigError, CorruptError, KvfsError
from kvfs.native import library
from kvfs.native.payloads import CachedRead, Stretch
from kvfs.system.descriptors import opened
from kvfs.system.direct_io import aligned
from kvfs.system.files import Files, boot_id
from kvfs.system.memory_limits import cgroup_limit, memory_available
from kvfs.system.memory_views import address_of

CHECKS_SECONDS, DISK_SECONDS = 1.0, 4.0  # all checks together before the disk is asked; the read of one block
WRITE_SECONDS = 10.0  # for a new file: a disk that writes much may take seconds
SEGMENTS_MAX = 8192  # segments whose share in the page cache is read
HEADROOM_FILES = 256  # descriptors that a process needs in addition to one per segment
_MIB = 1 << 20


def diagnose(path: str, files: Files, more: Callable[[], list[Finding]] = list) -> list[Finding]:
    """The findings of all checks, and those of ``more``. Raises only if there is no store.

    The checks run in a thread. While they take long, another one reads a block of the disk; if that read does not end
    within DISK_SECONDS, the findings are those so far, and that the disk hangs. A third one makes a file without a
    name: a file system that is frozen, or whose journal hangs, may answer all reads.
    """
    found: list[Finding] = []
    checks, write = _started(lambda: _diagnose(path, files, found, more)), _started(lambda: _write_disk(path, files))
    end = files.monotonic() + WRITE_SECONDS
    while wait([checks], CHECKS_SECONDS).not_done:
        read = _started(lambda: _read_disk(path, files))
        if not wait([checks, read], DISK_SECONDS, FIRST_COMPLETED).done:
            detail = f"it hangs: the read of one block takes more than {DISK_SECONDS:.0f} s; other checks are left out"
            remedy = "look at dmesg and the device; processes that wait for it go on when it answers"
            return [*found, Finding("disk", BAD, detail, remedy)]
        if not write.done() and files.monotonic() >= end:
            break
    else:
        checks.result()
    if not wait([write], max(0.0, end - files.monotonic())).done:
        detail = f"it takes no writes: a new file takes more than {WRITE_SECONDS:.0f} s"
        remedy = (
            "if it is frozen: fsfreeze -u; else look at dmesg and the device; what waits for it goes on when it writes"
        )
        return [*found, Finding("disk", BAD, detail, remedy)]
    return found


def _diagnose(path: str, files: Files, found: list[Finding], more: Callable[[], list[Finding]]) -> None:
    directory = Directory(path, files, read_only=True)
    try:
        try:
            store_id = directory.store_id()
            found.append(Finding("format", OK, f"format 1, id {store_id.hex()[:8]}"))
        except KvfsError as exc:
            if exc.exit_code == 10:
                raise
            remedy = "use the kvfs that wrote it, or start with an empty directory"
            found.append(Finding("format", BAD, str(exc), "" if isinstance(exc, CorruptError) else remedy))
        for check in (
            _settings, _file_system, _space, _permissions, _limits, _memory, _kernel, _native, processes, locks,
            _index, _leftovers, _drop_folder, _watch, _page_cache,
        ):  # fmt: skip
            try:
                found += check(directory)
            except (OSError, KvfsError, ValueError) as exc:
                name = check.__name__.strip("_").replace("_", " ")
                found.append(Finding(name, BAD, f"could not be checked: {exc}", _remedy(exc)))
        found += more()
    finally:
        directory.close()


def _remedy(exc: Exception) -> str:
    """For a check that failed itself."""
    if isinstance(exc, PermissionError):
        return "run kvfs doctor as the owner of the store, or in its group"
    if isinstance(exc, FileNotFoundError):
        return "open the store for writing once, which makes missing folders: kvfs inspect"
    if isinstance(exc, OSError) and exc.errno == errno.EIO:
        return "the device fails: look at dmesg, and move the store"
    return "" if isinstance(exc, KvfsError) else "report it, with the output of kvfs doctor --json"


def _started(function: Callable[[], None]) -> Future[None]:
    """``function`` in a daemon thread, which a process that ends does not wait for."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            function()
            future.set_result(None)
        except BaseException as exc:  # raised by ``result``
            future.set_exception(exc)

    threading.Thread(target=run, name="kvfs-doctor", daemon=True).start()
    return future


def _read_disk(path: str, files: Files) -> None:
    """Read a block of the disk, not of the page cache. Errors are ignored: they are answers."""
    with contextlib.suppress(OSError):
        root = files.open_root(path)
        try:
            with opened(files, "super", os.O_RDONLY | os.O_DIRECT, dir_fd=root) as fd:
                files.preadv(fd, [aligned(4096)], 0)
        finally:
            files.close(root)


def _write_disk(path: str, files: Files) -> None:
    """Make a file without a name, of which nothing stays. Errors are ignored: they are answers."""
    with contextlib.suppress(OSError):
        root = files.open_root(path)
        try:
            with opened(files, ".", os.O_TMPFILE | os.O_RDWR, dir_fd=root):
                pass
        finally:
            files.close(root)


def _read_settings(directory: Directory) -> config.Settings:
    data = directory.read_small("kvfs.toml", config.TOML_BYTES_MAX)
    if data is None:
        raise KvfsError("kvfs.toml is missing")
    return config.parse_toml(data, "kvfs.toml")


def _settings(directory: Directory) -> Iterator[Finding]:
    try:
        s = _read_settings(directory)
    except KvfsError as exc:
        remedy = f'write or correct {directory.path}/kvfs.toml; its first line is like: capacity = "200GiB"'
        yield Finding("settings", BAD, str(exc), remedy)
        return
    detail = f"limit {size(s.capacity_bytes)}, segments of {size(s.segment_bytes)}, mode {s.mode}"
    try:
        io_mode.check(directory.path, s, directory.files, read_only=True)
    except ConfigError as exc:
        yield Finding("settings", BAD, str(exc), "kvfs config set mode cache, or move the store")
        return
    yield Finding("settings", OK, detail, "", {"mode": s.mode})


def _file_system(directory: Directory) -> Iterator[Finding]:
    kind = filesystem_of(directory.path)
    if kind is not None and kind not in GOOD_FILESYSTEMS:
        yield Finding("file system", BAD, f"{kind}: its locks do not reach every process", "use a local file system")
    elif _is_mounted_read_only(directory):
        yield Finding("file system", OK, f"{kind}, mounted read-only: this host can only read the store")
    else:
        yield Finding("file system", OK, kind or "unknown")


def _is_mounted_read_only(directory: Directory) -> bool:
    return bool(os.fstatvfs(directory.root).f_flag & os.ST_RDONLY)


def _space(directory: Directory) -> Iterator[Finding]:
    fs = os.fstatvfs(directory.root)
    free = fs.f_bavail * fs.f_frsize
    own = _allocated(directory)
    data: dict[str, Any] = {"free_bytes": free, "allocated_bytes": own}
    try:
        s = _read_settings(directory)
    except KvfsError:  # a finding of its own
        yield Finding("space", OK, f"{size(free)} free, {size(own)} allocated", "", data)
        return
    data["capacity_bytes"] = s.capacity_bytes
    detail = f"{size(free)} free, {size(own)} of {size(s.capacity_bytes)} allocated"
    if own + free < s.capacity_bytes:
        fits = (own + free) // 10 * 9 // _MIB
        yield Finding(
            "space", WARN, f"{detail}: the disk fills before the limit is reached",
            f"make room, or: kvfs config set capacity {fits}MiB", data,
        )  # fmt: skip
    else:
        yield Finding("space", OK, detail, "", data)


def _allocated(directory: Directory) -> int:
    """Allocated bytes of all files of the store that can be read."""
    total = 0
    for folder, _, names, fd in os.fwalk(".", dir_fd=directory.root, follow_symlinks=False):
        del folder
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(name, dir_fd=fd, follow_symlinks=False).st_blocks * 512
    return total


def _permissions(directory: Directory) -> Iterator[Finding]:
    st = os.fstat(directory.root)
    mode = stat.S_IMODE(st.st_mode)
    shape = "shared with its group" if mode & 0o070 == 0o070 else "private"
    detail = f"mode {mode:04o}, {shape}, owner {st.st_uid}, group {st.st_gid}"
    if mode & 0o007:
        yield Finding("permissions", BAD, f"{detail}: others have access", f"chmod o-rwx {directory.path}")
    elif not _is_mounted_read_only(directory) and not os.access(directory.path, os.W_OK):
        yield Finding("permissions", WARN, f"{detail}: this user may only read", "run as the owner or in the group")
    else:
        yield Finding("permissions", OK, detail)
    foreign = _foreign(directory, st, shared=mode & 0o070 == 0o070)
    if foreign:
        yield Finding(
            "owners", BAD, f"{len(foreign)} files are of other users, not the owner's ({', '.join(foreign[:4])})",
            f"as root: chown -R {st.st_uid}:{st.st_gid} {directory.path}",
        )  # fmt: skip


def _foreign(directory: Directory, root: os.stat_result, *, shared: bool) -> list[str]:
    """Files of another owner than the store's directory; in a shared store, of another group."""
    found = []
    for folder, _, names, fd in os.fwalk(".", dir_fd=directory.root, follow_symlinks=False):
        if folder.startswith("./import"):  # of other programs
            continue
        for name in (".", *names):
            with contextlib.suppress(OSError):
                st = os.stat(name, dir_fd=fd, follow_symlinks=False)
                if st.st_gid != root.st_gid if shared else st.st_uid != root.st_uid:
                    found.append(repr(os.path.normpath(os.path.join(folder, name))))
    return found


def _limits(directory: Directory) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    segments = len(directory.files.listdir(directory.sub("segments")))
    need = segments + HEADROOM_FILES
    data = {"nofile": soft, "segments": segments}
    if soft != resource.RLIM_INFINITY and soft < need:
        yield Finding(
            "open files", WARN, f"limit {soft}, the store has {segments} segments: lookups will miss",
            f"ulimit -n {min(hard, max(4096, need)) if hard != resource.RLIM_INFINITY else max(4096, need)}", data,
        )  # fmt: skip
    else:
        yield Finding("open files", OK, f"limit {_limit(soft)}, {segments} segments", "", data)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    limit = "unlimited" if locked == resource.RLIM_INFINITY else size(locked)
    yield Finding("locked memory", OK, f"limit {limit} (matters for pinned rings only)", "", {"memlock": locked})


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _memory(directory: Directory) -> Iterator[Finding]:
    limit, available = cgroup_limit(), memory_available()
    data = {"cgroup_limit_bytes": limit, "available_bytes": available}
    room = f"{size(available)} available" if available is not None else "available memory unknown"
    if limit is None:
        yield Finding("memory", OK, f"{room}, no cgroup limit", "", data)
    else:
        yield Finding(
            "memory",
            OK,
            f"{room}; the cgroup may use {size(limit)}, page cache that it reads in included",
            "",
            data,
        )


def _kernel(directory: Directory) -> Iterator[Finding]:
    files = directory.files
    fd = files.open("super", os.O_RDONLY, dir_fd=directory.root)
    try:
        cachestat = files.cached_bytes(fd, 0, 1) is not None
    finally:
        files.close(fd)
    detail = f"Linux {platform.release()}, cachestat {'works' if cachestat else 'is missing'}"
    if cachestat:
        yield Finding("kernel", OK, detail)
    else:
        yield Finding(
            "kernel", WARN, f"{detail}: tiers are shown as disk", "a kernel from 6.5 on, or allow it in seccomp"
        )


def _native(directory: Directory) -> Iterator[Finding]:
    native, state = library.loaded(), library.state()
    if native is None:
        chosen = state == library.SWITCHED_OFF
        remedy = "" if chosen else "install kvfs where there is a C compiler; until then Python does its work, slower"
        yield Finding("native library", OK if chosen else WARN, state, remedy, {"state": state})
        return
    with opened(directory.files, "super", os.O_RDONLY, dir_fd=directory.root) as fd:
        block = bytearray(1)
        read = CachedRead(native, [Stretch(fd, 0, 0, 1, 0)], 1, address_of(memoryview(block)), 1)
        read.work(read.share)
    if not read.supported:
        detail = f"{state}, but this file system or kernel cannot say what is in the page cache: Python does its work"
        yield Finding("native library", WARN, detail, "allow cachestat and preadv2 in seccomp", {"state": state})
        return
    sha = "with" if native.has_sha else "without"
    yield Finding("native library", OK, f"{state}, {sha} SHA-256 instructions", "", {"state": state})


def _index(directory: Directory) -> Iterator[Finding]:
    current = directory.read_small("CURRENT", 64, sub="index")
    if current is None:
        yield Finding("index", WARN, "there is none: lookups miss until it is rebuilt", "open the store: kvfs inspect")
        return
    data = directory.read_small("state", 4096)
    try:
        state = json.loads(data or b"")
        clean, boot = state["clean"], state["boot"]
    except (ValueError, KeyError, TypeError):
        yield Finding("index", WARN, "its state file is damaged: it will be rebuilt", "open the store: kvfs inspect")
        return
    used = any(lives for _, lives in census(directory))
    if clean:
        yield Finding("index", OK, f"generation {current.decode('ascii', 'replace')[:16]}, closed cleanly")
    elif used and boot == boot_id(directory.files):
        yield Finding("index", OK, f"generation {current.decode('ascii', 'replace')[:16]}, in use")
    else:
        yield Finding(
            "index", WARN, "its users died: it will be rebuilt from the segments at the next open",
            "open the store ahead of traffic: kvfs inspect",
        )  # fmt: skip


def _leftovers(directory: Directory) -> Iterator[Finding]:
    counts = {sub: len(directory.files.listdir(directory.sub(sub))) for sub in ("doomed", "quarantine")}
    data: dict[str, Any] = dict(counts)
    if counts["quarantine"]:
        yield Finding(
            "quarantine", WARN, f"{counts['quarantine']} files that are not kvfs's were put aside",
            f"look at {directory.path}/quarantine and remove its files", data,
        )  # fmt: skip
    held = f"{counts['doomed']} dropped segments are still held by readers" if counts["doomed"] else "none"
    yield Finding("dropped segments", OK, held, "", data)


def _drop_folder(directory: Directory) -> Iterator[Finding]:
    names, refused = waiting(directory)
    data = {"waiting": len(names), "refused": len(refused)}
    if refused:
        yield Finding(
            "drop folder", WARN, f"{len(names)} files wait, {len(refused)} were refused ({', '.join(refused[:4])})",
            f"cat {directory.path}/import/refused/*.reason, and remove these files", data,
        )  # fmt: skip
    elif names and not any(lives for _, lives in census(directory)):
        yield Finding(
            "drop folder", WARN, f"{len(names)} files wait, and no process has the store open to adopt them",
            "start a worker, or: kvfs import FILE", data,
        )  # fmt: skip
    else:
        yield Finding("drop folder", OK, f"{len(names)} files wait, none was refused", "", data)


def _watch(directory: Directory) -> Iterator[Finding]:
    why = probe(directory)
    data: dict[str, Any] = {"inotify": not why}
    for name in ("max_user_instances", "max_user_watches"):
        with contextlib.suppress(OSError, ValueError), open(f"/proc/sys/fs/inotify/{name}", encoding="ascii") as file:
            data[name] = int(file.read())
    if why:
        yield Finding(
            "watch", WARN, f"inotify does not work ({why}): workers poll, and notice changes after seconds",
            "sysctl fs.inotify.max_user_instances=1024 (default 128), or stop the processes that use them up", data,
        )  # fmt: skip
    else:
        yield Finding("watch", OK, "inotify works: workers notice changes at once", "", data)


def _page_cache(directory: Directory) -> Iterator[Finding]:
    files, folder = directory.files, directory.sub("segments")
    names = files.listdir(folder)
    cached = total = 0
    for name in names[:SEGMENTS_MAX]:
        with contextlib.suppress(OSError):
            fd = files.open(name, os.O_RDONLY, dir_fd=folder)
            try:
                nbytes = files.fstat(fd).st_size
                total += nbytes
                cached += files.cached_bytes(fd, 0, nbytes) or 0 if nbytes else 0
            finally:
                files.close(fd)
    share = f"{100 * cached / total:.0f} %" if total else "nothing is stored"
    data = {"cached_bytes": cached, "segments_bytes": total, "segments_seen": min(len(names), SEGMENTS_MAX)}
    yield Finding("page cache", OK, f"{size(cached)} of {size(total)} of segments ({share})", "", data)
