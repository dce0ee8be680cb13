"""Who has a store open, and who holds its locks."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

from kvfs.directory.liveness import FOREIGN_FRESH_SECONDS, census
from kvfs.directory.root import Directory
from kvfs.doctor.findings import BAD, OK, Finding
from kvfs.system.files import boot_id

LOCK_SECONDS = 1.0  # a lock that is held for longer is reported: its owners need milliseconds


def processes(directory: Directory) -> Iterator[Finding]:
    """Who has the store open, on this host and on others."""
    holders = _lock_holders()
    owners = census(directory)
    alive = [owner for owner, lives in owners if lives]
    dead = len(owners) - len(alive)
    named = [_holder(directory, f"{owner}.live", "run", holders) or "unknown" for owner in alive]
    detail = f"{len(alive)} open the store" + (f" ({', '.join(named[:16])})" if named else "")
    data = {"alive": len(alive), "dead": dead, "holders": named}
    yield Finding(
        "processes", OK, detail + (f"; {dead} died and are cleaned up after by the next user" if dead else ""), "", data
    )
    now, boot = directory.files.now_us(), boot_id(directory.files)
    for owner, _ in owners:
        body = directory.read_small(f"{owner}.live", 4096, sub="run") or b""
        with contextlib.suppress(ValueError):
            other, stamp = body.decode("ascii").split()
            age = (now - int(stamp)) / 1e6
            if other != boot and 0 <= age < FOREIGN_FRESH_SECONDS:
                yield Finding(
                    "hosts", BAD, f"a process under another kernel used the store {age:.0f} s ago",
                    "one host at a time: stop the other one",
                )  # fmt: skip


def locks(directory: Directory) -> Iterator[Finding]:
    """Locks that are held for longer than their owners need."""
    holders = _lock_holders()
    stuck: list[str] = []
    busy: list[str] = []
    for name, sub in (("gate", ""), ("main", ""), ("gc", "run"), ("rebuild", "run")):
        free = _is_free(directory, name, sub)
        if free is False:
            who = _holder(directory, name, sub, holders) or "an unknown process"
            (busy if name == "rebuild" else stuck).append(f"{name} by {who}")
    if stuck:
        yield Finding(
            "locks", BAD, f"held for more than {LOCK_SECONDS:.0f} s: {'; '.join(stuck)}",
            "it is stopped, swapping or waits for a disk: resume it (kill -CONT) or end it, which releases its locks",
        )  # fmt: skip
    else:
        yield Finding("locks", OK, "free" if not busy else f"free; {'; '.join(busy)} (an index is being built)")


def _lock_holders() -> dict[tuple[int, int], list[tuple[int, str]]]:
    """(device, inode) -> [(pid, READ or WRITE)] of all flocks that /proc/locks shows to this process."""
    found: dict[tuple[int, int], list[tuple[int, str]]] = {}
    with contextlib.suppress(OSError), open("/proc/locks", encoding="ascii") as lines:
        for line in lines:
            fields = line.split()
            with contextlib.suppress(ValueError, IndexError):
                if fields[1] != "FLOCK":  # also skips processes that wait for a lock
                    continue
                major, minor, inode = fields[5].split(":")
                device = os.makedev(int(major, 16), int(minor, 16))
                found.setdefault((device, int(inode)), []).append((int(fields[4]), fields[3]))
    return found


def _holder(directory: Directory, name: str, sub: str, holders: dict[tuple[int, int], list[tuple[int, str]]]) -> str:
    try:
        st = directory.files.stat(name, dir_fd=directory.sub(sub) if sub else directory.root)
    except OSError:
        return ""
    # 0: a process of another PID namespace
    return ", ".join(
        f"pid {pid}" if pid else "a process of another container" for pid, _ in holders.get((st.st_dev, st.st_ino), [])
    )


def _is_free(directory: Directory, name: str, sub: str) -> bool | None:
    """Whether a lock can be acquired within LOCK_SECONDS; None if there is no such file."""
    files = directory.files
    try:
        fd = files.open(name, os.O_RDONLY, dir_fd=directory.sub(sub) if sub else directory.root)
    except OSError:
        return None
    try:
        deadline = files.monotonic() + LOCK_SECONDS
        while not files.flock(fd, fcntl.LOCK_SH):
            if files.monotonic() >= deadline:
                return False
            files.sleep(0.001)
        return True
    finally:
        files.close(fd)
