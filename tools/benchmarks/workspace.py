"""The directory of a benchmark's files: new, with enough free space, removed at the end."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import click

SLACK_BYTES = 256 << 20  # that must stay free next to the files of a run


def file_system(path: Path) -> str:
    """Type of the file system of ``path``, as the kernel names it."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
            left, _, right = line.partition(" - ")
            if left.split()[2] == wanted:
                return right.split()[0]
    return "unknown"


def require_space(path: Path, need_bytes: int) -> None:
    """ClickException unless ``path`` has ``need_bytes`` and SLACK_BYTES free."""
    stat = os.statvfs(path)
    free, need = stat.f_bavail * stat.f_frsize, need_bytes + SLACK_BYTES
    if free < need:
        raise click.ClickException(
            f"{path} has {free / 2**30:.1f} GiB free, this run needs {need / 2**30:.1f} GiB: "
            "choose another --path or smaller sizes"
        )


@contextlib.contextmanager
def workspace(path: Path, need_bytes: int) -> Iterator[Path]:
    """A new directory in ``path``, removed at the end, also after an interrupt or SIGTERM."""
    require_space(path, need_bytes)
    before = signal.signal(signal.SIGTERM, _interrupt)
    folder = Path(tempfile.mkdtemp(prefix="kvfs-bench-", dir=path))
    try:
        yield folder
    finally:
        with _no_interrupt():
            shutil.rmtree(folder, ignore_errors=True)
        signal.signal(signal.SIGTERM, before)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def _no_interrupt() -> Iterator[None]:
    """Ignore a second Ctrl-C, which would leave gigabytes of files."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
