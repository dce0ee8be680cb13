"""The open cores of this process: one per directory, since LMDB must not be opened twice. Forks and exits."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable

from kvfs.directory import root
from kvfs.errors import ConfigError, StoreLockedError, StoreNotFoundError
from kvfs.runtime.open_store import CLOSE_SECONDS, OpenStore
from kvfs.system.files import Files
from kvfs.types import Verify

WAIT_SECONDS = 30.0  # for a core of the same directory that is being closed
Key = tuple[int, int]  # device and inode of the directory

_LOCK = threading.RLock()
_STORES: dict[Key, OpenStore] = {}
_LEAVING: dict[Key, tuple[OpenStore, threading.Event]] = {}  # being closed, and when that is over


def enter(
    path: str, read_only: bool, verify: Verify | None, threads: int | None, files: Files, declines: str = "",
    *, inspect_only: bool = False,
) -> OpenStore:  # fmt: skip
    """The core of a directory; ``leave`` it when done. ``looks``: without its workshop until that is needed.

    One that is being closed is waited for: opened beside it, the index would be taken for a broken one.
    """
    end = files.monotonic() + WAIT_SECONDS
    while True:
        with _LOCK:
            key = _key(path)
            core, leaving = _STORES.get(key), _LEAVING.get(key)
            forgotten = core is not None and 0 < core.users <= len(core.abandoned)
            if leaving is None and not forgotten:
                return _enter(key, path, read_only, verify, threads, files, declines, inspect_only)
        if leaving is None:
            assert core is not None
            _settle(core)
        elif not leaving[1].wait(max(0.0, end - files.monotonic())):
            raise StoreLockedError(f"{path} is still being closed in this process: try again")


def _key(path: str) -> Key:
    with root.translate_os_errors(path):
        try:
            st = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            raise StoreNotFoundError(
                f"{path} does not exist; create a store with kvfs.open(path, capacity=...)"
            ) from None
    return st.st_dev, st.st_ino


def _enter(
    key: Key, path: str, read_only: bool, verify: Verify | None, threads: int | None, files: Files, declines: str,
    inspect_only: bool,
) -> OpenStore:  # fmt: skip
    core = _STORES.get(key)
    if core is None:
        core = _STORES[key] = OpenStore(path, read_only, verify, threads, files, declines, inspect_only=inspect_only)
        core.on_abandoned = _settle
    elif core.read_only and not read_only:
        raise StoreLockedError(f"{path} is open read-only in this process: close it before opening it for writing")
    elif verify not in (None, core.c.verify) or threads not in (None, core.c.threads):
        raise ConfigError(
            f"{path} is open in this process with verify={core.c.verify.value!r} and threads={core.c.threads}: "
            "all stores of one directory in a process share these; leave them out or close the other one"
        )
    if not inspect_only:
        core.c.inspect_only = False  # a later open that only inspects does not change that
        core.work()
    core.users += 1
    return core


def leave(core: OpenStore) -> None:
    """One user less; the last one closes it, outside of the lock."""
    with _LOCK:
        core.users -= 1
        key = next((key for key, value in _STORES.items() if value is core), None)
        if core.users or key is None:
            return
        del _STORES[key]
        over = threading.Event()
        _LEAVING[key] = core, over
    try:
        core.close()
    finally:
        _LEAVING.pop(key, None)
        over.set()


def abandon(core: OpenStore) -> None:
    """``leave`` for the garbage collector, which may run in any thread, between any two bytecodes, under any lock.

    Closing there made another store's index thread miss its deadline. So the core's own thread does it.
    """
    core.abandoned.append(None)


def _settle(core: OpenStore) -> None:
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
    _resume.extend(core.c.index.quiesce(1.0) for core in _STORES.values())


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
        core.release_in_child().close()
    _LEAVING.clear()
    for key, core in list(_STORES.items()):
        try:
            core.restart_in_child()
        except BaseException as exc:  # a signal handler's, too: what is half made is not used again
            del _STORES[key]
            if not isinstance(exc, Exception):
                raise


def _close_all() -> None:
    for core in list(_STORES.values()):
        core.close()
    _STORES.clear()
    for _, over in list(_LEAVING.values()):  # by threads that end with the interpreter
        over.wait(CLOSE_SECONDS)


os.register_at_fork(before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
atexit.register(_close_all)
