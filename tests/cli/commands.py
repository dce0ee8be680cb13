"""The command, as its tests run it: in a new process, in this one, or on a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest

from kvfs.cli.app import App
from kvfs.cli.main import run

ROOT = Path(__file__).resolve().parents[2]


def environment(**extra: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("KVFS_")}
    return {**kept, "PYTHONPATH": str(ROOT), **extra}


def command(*arguments: str, stdin: bytes | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command in a new process."""
    done = subprocess.run(
        [sys.executable, "-m", "kvfs.cli.main", *arguments], env=environment(**variables), capture_output=True,
        input=stdin if stdin is not None else b"", timeout=60,
    )  # fmt: skip
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def called(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command in this process: equivalent, and faster."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        for name in [n for n in os.environ if n.startswith("KVFS_")]:
            patch.delenv(name)
        for name, value in variables.items():
            patch.setenv(name, value)
        patch.setattr(sys, "stdin", io.StringIO())
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run(App(), list(arguments))
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def on_a_terminal(
    arguments: list[str], answer: bytes = b"", columns: int = 0, rows: int = 0, **variables: str
) -> tuple[int, str]:
    """Run the command with a terminal as its three streams. Returns (exit code, output)."""
    main, side = pty.openpty()
    if columns:
        fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", rows or 24, columns, 0, 0))
        variables = {"COLUMNS": "", "LINES": "", **variables}
    child = subprocess.Popen(
        [sys.executable, "-m", "kvfs.cli.main", *arguments], env=environment(**variables), stdin=side, stdout=side,
        stderr=side, start_new_session=True,
    )  # fmt: skip
    os.close(side)
    killer = threading.Timer(60, child.kill)
    killer.start()
    if answer:
        os.write(main, answer)
    seen = shown(main)
    killer.cancel()
    return child.wait(30), seen.decode()


def shown(terminal: int) -> bytes:
    """What the programs of a pseudo-terminal print until the last one ends; closes this end of it."""
    seen = b""
    while True:
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        seen += piece
    os.close(terminal)
    return seen
