"""One process of a torture run that mounts the store, and saves, replaces, reads and removes files in the mount.

All such processes use the same few names, each through a mount of its own. A file says in its first bytes what it must
hold, so whatever version a reader finds, it is right as a whole or wrong.
"""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvfs.mount.mounting import DEVICE, MountError, unmount

if TYPE_CHECKING:
    from tools.torture.actor import Actor

FOLDER = "mounts"  # below the run's folder: a mount point for each process
KEPT, NAMES = 8, 16  # files 0 to KEPT - 1 are never removed
BYTES_MAX = 60_000  # small: where nothing may be lost, all versions together must fit into the store
PAUSE_SECONDS = 0.02
#: The store is full; its index is being rebuilt; the name means a newer content.
EXPECTED = frozenset({errno.ENOSPC, errno.EIO, errno.ESTALE})


def missing() -> str | None:
    """Why nothing can be mounted here, or None."""
    if os.geteuid() != 0:
        return "mounting needs root"
    return None if os.path.exists(DEVICE) else f"{DEVICE} does not exist"


def unmount_all(folder: Path) -> None:
    """Unmount what processes left that were killed."""
    for where in (folder / FOLDER).glob("*"):
        try:
            unmount(str(where), lazy=True)
        except MountError:
            continue  # it ended in good order


def mounter(actor: Actor) -> None:
    """Uses files through a mount until the end of the process."""
    where = actor.folder / FOLDER / f"{os.getpid()}"
    where.mkdir(parents=True)
    with _served(actor, where):
        files = where / "files"
        while not actor.ending:
            name = actor.random.randrange(NAMES)
            act = actor.random.choice((_save, _read, _read, _remove))
            actor.judge.call(act.__name__[1:] + " a file", lambda: _try(actor, act, files, name))  # noqa: B023
            actor.report(now=False)
            time.sleep(PAUSE_SECONDS)


@contextmanager
def _served(actor: Actor, where: Path) -> Iterator[None]:
    """A process that serves the mount. It is in this one's group, so what kills this one kills it."""
    store = actor.open()  # makes the store if there is none
    if store is not None:
        store.close()
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "kvfs.cli.main", "-C", str(actor.folder / "store"), "mount", str(where)]
    process = subprocess.Popen([*command, "--ready-fd", str(writing)], pass_fds=[writing])
    os.close(writing)
    try:
        with open(reading, "rb") as ready:
            if ready.read(1) != b"1":
                raise SystemExit(f"the mount did not start: {process.wait()}")
        actor.judge.counts["mounts"] += 1
        yield
    finally:
        process.terminate()
        process.wait(20.0)


def _try(actor: Actor, act: object, files: Path, name: int) -> None:
    try:
        act(actor, files, name)  # type: ignore[operator]
    except FileNotFoundError:
        if act is _read and actor.strict and name < KEPT and f"{name}" in _saved(actor):
            actor.judge.found("lost", f"file {name}")
    except OSError as exc:
        if exc.errno not in EXPECTED:
            raise
        actor.judge.counts["files_refused"] += 1


def _saved(actor: Actor) -> list[str]:
    path = actor.folder / "saved"
    return path.read_text().split() if path.exists() else []


def content(head: bytes) -> bytes:
    """What a file with these first 16 bytes must hold."""
    draw = random.Random(head)
    return head + draw.randbytes(draw.randrange(BYTES_MAX))


def _save(actor: Actor, files: Path, name: int) -> None:
    temporary = files / f"{os.getpid()}.tmp"
    temporary.write_bytes(content(name.to_bytes(8, "little") + actor.random.randbytes(8)))
    temporary.rename(files / f"{name}")
    if name < KEPT:
        actor.promise("saved", f"{name}")
    actor.judge.counts["files_saved"] += 1


def _read(actor: Actor, files: Path, name: int) -> None:
    data = (files / f"{name}").read_bytes()
    if data[:8] != name.to_bytes(8, "little") or data != content(data[:16]):
        actor.judge.found("wrong", f"file {name} of {len(data)} bytes")
    actor.judge.counts["files_read"] += 1


def _remove(actor: Actor, files: Path, name: int) -> None:
    if name >= KEPT:
        (files / f"{name}").unlink()
