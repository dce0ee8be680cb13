"""Real mounts: whether they are possible here, and a mount served by a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvfs.mount.mounting import DEVICE, KIND, mounted_kind

ROOT = Path(__file__).resolve().parents[2]
WAIT_SECONDS = 60.0  # for anything that takes milliseconds on a quiet machine


def why_not() -> str:
    """Why nothing can be mounted here; empty if it can."""
    if os.geteuid() != 0:
        return "mounting without fusermount3 needs root"
    try:
        os.close(os.open(DEVICE, os.O_RDWR))
    except OSError as exc:
        return f"{DEVICE}: {exc.strerror}"
    with open("/proc/self/status", encoding="ascii") as lines:
        effective = next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff"))
    return "" if effective >> 21 & 1 else "mounting needs CAP_SYS_ADMIN"


needs_fuse = pytest.mark.skipif(bool(why_not()), reason=f"needs FUSE: {why_not()}")


def kvfs(*arguments: str, code: int = 0) -> str:
    """Run the command; its output and errors."""
    done = subprocess.run(
        [sys.executable, "-m", "kvfs.cli.main", *arguments], capture_output=True, text=True, timeout=WAIT_SECONDS,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@contextmanager
def serving(store: Path, where: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A process that serves a mount; at the end it is unmounted, whatever happened."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kvfs.cli.main", "-C", str(store), "mount", str(where), *options], text=True,
        stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert "mounted at" in process.stdout.readline(), "the mount did not start"
        yield process
    finally:
        if mounted_kind(str(where)) == KIND:
            subprocess.run(["umount", "-l", str(where)], check=False, timeout=WAIT_SECONDS)
        if process.poll() is None:
            try:
                process.wait(WAIT_SECONDS)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
        assert process.stdout is not None
        process.stdout.close()


def wait_until(condition: object) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)
