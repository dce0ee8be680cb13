"""The open cores of this process: one per directory, since LMDB must not be opened twice. Forks and exits."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable

from kvfs.directory import root
from kvfs.errors import ConfigError, StoreLockedError, StoreNotFoundError
from kvfs.runtime.open_store import CLOSE_SECONDS, Core
from kvfs.system.files import Files
from kvfs.types import Verify

WAIT_SECONDS = 30.0  # for a core of the same directory that is being closed
Key = tuple[int, int]  # device and inode of the directory

_LOCK = threading.RLock()
_CORES: dict[Key, Core] = {}
_LEAVING: dict[Key, tuple[Core, threading.Event]] = {}  # being closed, and when that is over


def enter(
    path: str, read_only: bool, verify: Verify | None, threads: int | None, files: Files, declines: str = "",
    *, looks: bool = False,
) -> Core:  # fmt: skip
    """The core of a directory; ``leave`` it when done. ``looks``: without its workshop until that is needed.

    One that is being closed is waited for: opened beside it, the index would be taken for a broken one.
    """
    end = files.monotonic() + WAIT_SECONDS
    while True:
        with _LOCK:
            key = _key(path)
            core, leaving = _CORES.get(key), _LEAVING.get(key)
            forgotten = core is not None and 0 < core.users <= len(core.abandoned)
            if leaving is None and not forgotten:
                return _enter(key, path, read_only, verify, threads, files, declines, looks)
        if leaving is None:
            assert core is not None
            _settle(core)
        elif not leaving[1].wait(max(0.0, end - files.monotonic())):
            raise StoreLockedError(f"{path} is still being closed in this process: try again")


def _key(path: str) -> Key:
    with root.explained(path):
        try:
            st = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            raise StoreNotFoundError(
                f"{path} does not exist; create a store with kvfs.open(path, capacity=...)"
            ) from None
    return st.st_dev, st.st_ino


def _enter(
    key: Key, path: str, read_only: bool, verify: Verify | None, threads: int | None, files: Files, declines: str,
    looks: bool,
) -> Core:  # fmt: skip
    core = _CORES.get(key)
    if core is None:
        core = _CORES[key] = Core(path, read_only, verify, threads, files, declines, looks=looks)
        core.on_abandoned = _settle
        core.c.tallies.muted = looks
    elif core.read_only and not read_only:
        raise StoreLockedError(f"{path} is open read-only in this process: close it before opening it for writing")
    elif verify not in (None, core.c.verify) or threads not in (None, core.c.threads):
        raise ConfigError(
            f"{path} is open in this process with verify={core.c.verify.value!r} and threads={core.c.threads}: "
            "all stores of one directory in a process share these; leave them out or close the other one"
        )
    if not looks:
        core.c.tallies.muted = False  # who looks beside somebody who serves does not silence him
        core.work()
    core.users += 1
    return core


def leave(core: Core) -> None:
    """One user less; the last one closes it, outside of the lock."""
    with _LOCK:
        core.users -= 1
        key = next((key for key, value in _CORES.items() if value is core), None)
        if core.users or key is None:
            return
        del _CORES[key]
        over = threading.Event()
        _LEAVING[key] = core, over
    try:
        core.close()
    finally:
        _LEAVING.pop(key, None)
        over.set()


def abandon(core: Core) -> None:
    """``leave`` for the garbage collector, which may run in any thread, between any two bytecodes, under any lock.

    Closing there made another store's index thread miss its deadline. So the core's own thread does it.
    """
    core.abandoned.append(None)


def _settle(core: Core) -> None:
    """Leave for stores that were forgotten."""
    while core.abandoned:
        try:
            core.abandoned.pop()
        except IndexError:  # another thread was faster
            return
        leave(core)


# -- forks and exits -------------------------------------------------------------------------

_resume: list[Callable[[], object]] = []


def _before_fork() -> None:
    _LOCK.acquire()
    _resume.extend(core.c.index.quiesce(1.0) for core in _CORES.values())


def _after_in_parent() -> None:
    try:
        while _resume:
            _resume.pop()()
    finally:  # a signal handler may raise in here
        _LOCK.release()


def _after_in_child() -> None:
    global _LOCK
    _LOCK = threading.RLock()
    _resume.clear()
    for core, _ in _LEAVING.values():  # its locks are the parent's: kept here they would outlast its closing
        core.let_go_in_child().close()
    _LEAVING.clear()
    for key, core in list(_CORES.items()):
        try:
            core.restart_in_child()
        except BaseException as exc:  # a signal handler's, too: what is half made is not used again
            del _CORES[key]
            if not isinstance(exc, Exception):
                raise


def _close_all() -> None:
    for core in list(_CORES.values()):
        core.close()
    _CORES.clear()
    for _, over in list(_LEAVING.values()):  # by threads that end with the interpreter
        over.wait(CLOSE_SECONDS)


os.register_at_fork(before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
atexit.register(_close_all)
