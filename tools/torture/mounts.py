"""Small file systems for a run: mounted, cut off from power, and always unmounted at the end. Root only."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import click

FS_IOC_SHUTDOWN = 0x8004587D
NO_LOG_FLUSH = 2
RELEASE_SECONDS = 60.0
CLONE_NEWNS = 0x20000
_MAKE = {"ext4": ("mkfs.ext4", "-q", "-F"), "xfs": ("mkfs.xfs", "-q", "-f")}


def missing(*kinds: str) -> str | None:
    """Why images of these kinds cannot be mounted here, or None."""
    if os.geteuid() != 0:
        return "mounting needs root"
    for kind in kinds:
        if kind in _MAKE and shutil.which(_MAKE[kind][0]) is None:
            return f"{_MAKE[kind][0]} is not installed"
    return None


def apart() -> None:
    """Give this process a mount namespace of its own: one that another program makes meanwhile, for a container, holds
    a copy of every mount that it sees, and keeps a file system in use that a run unmounts.
    """
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS):
        raise click.ClickException(f"no mount namespace: {os.strerror(ctypes.get_errno())}")
    _run("mount", "--make-rprivate", "/")


@contextlib.contextmanager
def mounted(folder: Path, kind: str, nbytes: int) -> Iterator[Mount]:
    """A new file system of ``nbytes`` ("tmpfs", or "ext4" or "xfs" in a file) below ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = Mount(folder, kind, nbytes)
    try:
        mount.make()
        mount.attach()
        yield mount
    finally:
        mount.remove()


class Mount:
    """One mounted file system. ``path`` is its mount point."""

    def __init__(self, folder: Path, kind: str, nbytes: int) -> None:
        self.kind = kind
        self.path = folder.resolve() / f"mnt-{kind}"
        self._image = folder / f"{kind}.img"
        self._nbytes = nbytes

    def make(self) -> None:
        self.path.mkdir(exist_ok=True)
        if self.kind == "tmpfs":
            return
        with open(self._image, "wb") as image:
            image.truncate(self._nbytes)
        _run(*_MAKE[self.kind], str(self._image))

    def attach(self) -> None:
        """Mount; a journal is replayed here."""
        if self.kind == "tmpfs":
            _run("mount", "-t", "tmpfs", "-o", f"size={self._nbytes}", "tmpfs", str(self.path))
        else:
            _run("mount", "-o", "loop", str(self._image), str(self.path))

    def detach(self) -> None:
        """Unmount, and wait until the kernel has released the file system. One that is still in use, for example in
        another mount namespace, would be mounted again unchanged, without replaying its journal.
        """
        end = time.monotonic() + RELEASE_SECONDS
        while time.monotonic() < end:
            if self._is_mounted():
                subprocess.run(["umount", str(self.path)], capture_output=True, check=False)
            elif not self._is_in_use():
                return
            time.sleep(0.1)
        subprocess.run(["umount", "-l", str(self.path)], capture_output=True, check=False)
        raise click.ClickException(
            f"{self.path} is still in use {RELEASE_SECONDS:.0f} s after its processes were killed"
        )

    def _is_mounted(self) -> bool:
        """Read from the kernel's table: a file system without power does not answer stat."""
        with open("/proc/self/mountinfo", encoding="utf-8") as lines:
            return any(line.split()[4] == str(self.path) for line in lines)

    def _is_in_use(self) -> bool:
        if self.kind == "tmpfs":
            return False
        found = subprocess.run(["losetup", "-j", str(self._image)], capture_output=True, text=True, check=False)
        return bool(found.stdout.strip())

    def cut_power(self) -> None:
        """From this call on nothing reaches the image, not even the journal."""
        fd = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, FS_IOC_SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        finally:
            os.close(fd)

    def used_bytes(self) -> int:
        st = os.statvfs(self.path)
        return (st.f_blocks - st.f_bfree) * st.f_frsize

    def free_bytes(self) -> int:
        st = os.statvfs(self.path)
        return st.f_bfree * st.f_frsize

    def remove(self) -> None:
        try:
            if self._is_mounted():
                self.detach()
        finally:
            self._image.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.path.rmdir()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
