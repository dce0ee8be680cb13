"""Which processes are alive: one flock'd file with a random name per process and store.

The kernel releases the lock when the process dies, for any reason. Process ids do not identify a process: containers
that share a store have equal ones. The file is never mapped, and its lock never released with LOCK_UN, since both would
act through a forked child.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import struct
import sys
from collections.abc import Mapping
from operator import ne
from typing import NamedTuple

from kvfs.directory.config import OVERHEAD_BYTES
from kvfs.directory.root import Directory
from kvfs.errors import NoSpaceError, StoreLockedError
from kvfs.format.checksums import checksum
from kvfs.format.segment import BLOCK
from kvfs.system.descriptors import Descriptor, opened
from kvfs.system.files import boot_id

OWNER_BYTES = 16
NO_OWNER = bytes(OWNER_BYTES)  # of a segment that no process appends to
HEARTBEAT_SECONDS = 5.0
FOREIGN_FRESH_SECONDS = 30.0  # age up to which a heartbeat under another kernel means that the store is in use there
DAMAGED_CHARS = 4  # in which a boot id may differ and be taken for ours, damaged: those of two kernels share hardly any
_NAME = re.compile(r"[0-9a-f]{32}\.live\Z")
_TEMPORARY = re.compile(r"\.[0-9a-f]{32}\.live\Z")  # until it is locked
OPENING_SECONDS = 60.0  # age from which an unlocked temporary file counts as left by a process that was killed
_LINE_BYTES = 64  # boot id and time of the heartbeat, padded
_PINNED_BYTES = 8  # after the line; absent: nothing
_WATCHING = _LINE_BYTES + _PINNED_BYTES  # offset of one byte; absent, or another value: unknown
_WATCHES = {1: "polling", 2: "inotify"}
COMMAND_BYTES = 32
#: The counts that each process publishes in its own file, for a view of the processes.
PROCESS_COUNTS = (
    "lookups", "tokens_queried", "tokens_matched", "tokens_loaded", "bytes_loaded", "bytes_written", "pages_stored",
)  # fmt: skip
_STATUS_AT = 128  # offset; absent, or with a wrong checksum: unknown
_STATUS = struct.Struct(f"<QIQQ{COMMAND_BYTES}s{len(PROCESS_COUNTS)}Q")  # checksum of the rest, pid, opened, published


class Liveness:
    """Owns the liveness file of this process in one store, and reads those of the other processes.

    ``files_bytes``: what the files of all processes may take. NoSpaceError if there is no room for this one's.
    """

    def __init__(self, directory: Directory, files_bytes: int = OVERHEAD_BYTES // 2) -> None:
        self._directory = directory
        self._files = directory.files
        self._run = directory.sub("run")
        self.boot = boot_id(self._files)
        self.owner = self._files.random(OWNER_BYTES)
        self._dead: set[bytes] = set()
        self._check_room(files_bytes // BLOCK)
        name = f"{self.owner.hex()}.live"
        temporary = f".{name}"
        self._file = Descriptor.create(self._files, temporary, directory.file_mode, dir_fd=self._run)
        try:
            if not self._files.flock(self._file.fd, fcntl.LOCK_EX):
                raise StoreLockedError(f"{name}: another process locked a file that was just created")
            try:
                self.beat()
            except OSError as exc:  # a full disk: the lock is enough, and the next beats try again
                if exc.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
            # renamed when locked: no process can find it unlocked and take this one for dead
            self._files.rename(temporary, name, src_dir_fd=self._run, dst_dir_fd=self._run)
        except BaseException:
            with contextlib.suppress(OSError):
                self._files.unlink(temporary, dir_fd=self._run)
            self.close()
            raise
        self._since_us = self._files.now_us()
        program = os.path.basename(sys.argv[0] if sys.argv else "") or "python"
        self._command = program.encode("ascii", "replace")[:COMMAND_BYTES]

    def _check_room(self, most: int) -> None:
        """NoSpaceError if ``most`` other processes have the store open. What dead ones left is removed first."""
        if self._count() >= most and len(self.others()) >= most:
            raise NoSpaceError(
                f"{self._directory.path} is open in {most} processes, the most for its capacity: close some of them, "
                "or raise the capacity"
            )

    def _count(self) -> int:
        return sum(bool(_NAME.match(name) or _TEMPORARY.match(name)) for name in self._files.listdir(self._run))

    def beat(self) -> None:
        """Write the heartbeat, for processes under another kernel, where the lock is not seen."""
        line = f"{self.boot} {self._files.now_us():020d}\n".encode().ljust(_LINE_BYTES)
        self._files.write_all(self._file.fd, [line], 0)

    def say_pinned(self, nbytes: int) -> None:
        """Publish how much memory this process keeps pinned."""
        with contextlib.suppress(OSError):  # then the others read the last value
            self._files.write_all(self._file.fd, [nbytes.to_bytes(_PINNED_BYTES, "little")], _LINE_BYTES)

    def pinned_by_others(self) -> int:
        """Bytes that the other live processes keep pinned. OSError if they cannot be listed."""
        total = 0
        for owner in self.others():
            with (
                contextlib.suppress(OSError),
                opened(self._files, f"{owner.hex()}.live", os.O_RDONLY, dir_fd=self._run) as fd,
            ):
                total += int.from_bytes(self._files.read(fd, _PINNED_BYTES, _LINE_BYTES), "little")
        return total

    def say_watching(self, how: str) -> None:
        """Publish how this process learns what others change: by "inotify" or by "polling"."""
        with contextlib.suppress(OSError):
            self._files.write_all(self._file.fd, [bytes(n for n, name in _WATCHES.items() if name == how)], _WATCHING)

    def say_counts(self, counts: Mapping[str, int]) -> None:
        """Publish the PROCESS_COUNTS of this process, and what it is."""
        numbers = [counts.get(name, 0) for name in PROCESS_COUNTS]
        status = _STATUS.pack(0, os.getpid(), self._since_us, self._files.now_us(), self._command, *numbers)[8:]
        with contextlib.suppress(OSError):
            self._files.write_all(self._file.fd, [checksum(status).to_bytes(8, "little"), status], _STATUS_AT)

    def is_alive(self, owner: bytes) -> bool:
        """Whether the process with id ``owner`` still runs. Death is final, so it is remembered."""
        if owner == self.owner:
            return True
        if owner == NO_OWNER or owner in self._dead:
            return False
        alive = self._locked(f"{owner.hex()}.live")
        if not alive:
            if len(self._dead) > 4096:
                self._dead.clear()
            self._dead.add(owner)
        return alive

    def _locked(self, name: str) -> bool:
        try:
            file = Descriptor.open(self._files, name, os.O_RDONLY, dir_fd=self._run)
        except FileNotFoundError:
            return False
        except OSError:
            return True  # unknown: nothing is taken over on a doubt
        try:
            return not self._files.flock(file.fd, fcntl.LOCK_SH)
        finally:
            file.close()

    def others(self) -> list[bytes]:
        """Ids of the other live processes. Removes the files of dead ones."""
        found = []
        for name in self._files.listdir(self._run):
            if _TEMPORARY.match(name):
                self._remove_left(name)
            if not _NAME.match(name):
                continue
            owner = bytes.fromhex(name[: 2 * OWNER_BYTES])
            if owner == self.owner:
                continue
            if self.is_alive(owner):
                found.append(owner)
            else:
                with contextlib.suppress(OSError):
                    self._files.unlink(name, dir_fd=self._run)
        return found

    def _remove_left(self, name: str) -> None:
        """Remove a temporary file whose process was killed before it renamed it.

        A new one is not even locked: the lock would keep its process from taking it.
        """
        with contextlib.suppress(OSError):
            age = self._files.now_us() / 1e6 - self._files.stat(name, dir_fd=self._run).st_mtime
            if abs(age) > OPENING_SECONDS and not self._locked(name):
                self._files.unlink(name, dir_fd=self._run)

    def refuse_foreign_kernel(self) -> None:
        """Raise if a process under another kernel used the store within the last seconds."""
        now = self._files.now_us()
        for name in self._files.listdir(self._run):
            if not _NAME.match(name) or name.startswith(self.owner.hex()):
                continue
            with contextlib.suppress(OSError, ValueError):
                fd = self._files.open(name, os.O_RDONLY, dir_fd=self._run)
                try:
                    boot, stamp = self._files.read(fd, _LINE_BYTES, 0).decode("ascii").split()
                finally:
                    self._files.close(fd)
                age = (now - int(stamp)) / 1e6
                foreign = len(boot) != len(self.boot) or sum(map(ne, boot, self.boot)) > DAMAGED_CHARS
                if foreign and -FOREIGN_FRESH_SECONDS < age < FOREIGN_FRESH_SECONDS:
                    raise StoreLockedError(
                        f"{self._directory.path} is in use under another kernel (heartbeat {age:.0f} s ago): "
                        f"file locks do not reach it, so a store serves one host at a time; stop the other user, "
                        f"or wait {FOREIGN_FRESH_SECONDS:.0f} s after it has ended"
                    )

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._files.unlink(f"{self.owner.hex()}.live", dir_fd=self._run)
        self._file.close()


def census(directory: Directory) -> list[tuple[str, bool]]:
    """(id in hex, whether it is alive) of every process that has, or had, the store open. Removes nothing."""
    files, run = directory.files, directory.sub("run")
    found = []
    for name in sorted(files.listdir(run)):
        if not _NAME.match(name):
            continue
        try:
            fd = files.open(name, os.O_RDONLY, dir_fd=run)
        except OSError:
            continue
        try:
            found.append((name[: 2 * OWNER_BYTES], not files.flock(fd, fcntl.LOCK_SH)))
        finally:
            files.close(fd)
    return found


class ProcessInfo(NamedTuple):
    """What a live process that may write to the store says of itself. 0, "" or empty: it has not said so."""

    owner: str  # id in hex
    pinned_bytes: int
    watching: str  # "inotify" or "polling"
    pid: int  # in its own PID namespace
    command: str  # name of its program, of at most COMMAND_BYTES bytes
    since_us: int  # when it opened the store
    at_us: int  # when the counts were published
    counts: Mapping[str, int]  # PROCESS_COUNTS since it opened the store


def processes(directory: Directory) -> list[ProcessInfo]:
    """The live processes that may write to the store. OSError if they cannot be listed."""
    found = []
    for owner, alive in census(directory):
        if alive:
            with contextlib.suppress(OSError):  # it has ended meanwhile
                file = Descriptor.open(directory.files, f"{owner}.live", os.O_RDONLY, dir_fd=directory.sub("run"))
                size = min(directory.files.fstat(file.fd).st_size, _STATUS_AT + _STATUS.size)
                found.append(_process(owner, directory.files.read(file.fd, size, 0)))
    return found


def _process(owner: str, data: bytes) -> ProcessInfo:
    pinned = int.from_bytes(data[_LINE_BYTES:_WATCHING], "little")
    watching = _WATCHES.get(data[_WATCHING], "") if len(data) > _WATCHING else ""
    status = data[_STATUS_AT:]
    if len(status) < _STATUS.size or checksum(status[8:]) != int.from_bytes(status[:8], "little"):
        return ProcessInfo(owner, pinned, watching, 0, "", 0, 0, {})
    _, pid, since_us, at_us, command, *counts = _STATUS.unpack(status)
    name = command.rstrip(b"\0").decode("ascii", "replace")
    return ProcessInfo(
        owner, pinned, watching, pid, name, since_us, at_us, dict(zip(PROCESS_COUNTS, counts, strict=True))
    )
