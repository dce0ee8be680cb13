"""The open stores of this process: one per directory, since LMDB must not be opened twice. Forks and exits."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable
from functools import partial

from kvfs.directory import root
from kvfs.errors import ConfigError, StoreLockedError, StoreNotFoundError
from kvfs.runtime.open_store import CLOSE_SECONDS, OpenOptions, OpenStore
from kvfs.system.worker import WatchedCalls

log = logging.getLogger("kvfs")
WAIT_SECONDS = 30.0  # how long an open waits for the same directory to be closed in this process
#: How long a forked child waits in ``os.fork`` for a disk that does not answer, where nothing else of it can run.
RESTART_SECONDS = 5.0
Key = tuple[int, int]  # device and inode of the directory

_LOCK = threading.RLock()
_STORES: dict[Key, OpenStore] = {}
#: What another thread opens or closes, outside of the lock: a fork must not wait. The event is set when that is over.
_OPENING: dict[Key, tuple[OpenStore, threading.Event]] = {}
_CLOSING: dict[Key, tuple[OpenStore, threading.Event]] = {}


def acquire(options: OpenOptions) -> OpenStore:
    """The open store of a directory; ``release`` it when done.

    One that is being opened or closed is waited for: LMDB refuses an index that the process has open, which looks like
    damage.
    """
    end = options.files.monotonic() + WAIT_SECONDS
    opening, key = (OpenStore(options), threading.Event()), _key(options.path)
    try:
        while True:
            with _LOCK:
                key = _key(options.path)
                store, busy = _STORES.get(key), _OPENING.get(key) or _CLOSING.get(key)
                forgotten = store is not None and 0 < store.users <= len(store.forgotten)
                if busy is None and store is not None and not forgotten:
                    return _use(store, options)
                if busy is None and store is None:
                    _OPENING[key] = opening
                    break
            if busy is None:
                assert store is not None
                _release_forgotten(store)
            elif not busy[1].wait(max(0.0, end - options.files.monotonic())):
                raise StoreLockedError(f"{options.path} is still being opened or closed in this process: try again")
        store = opening[0]
        store.on_forgotten = partial(_release_forgotten, store)
        store.start()
        with _LOCK:
            _STORES[key] = store
            return _use(store, options)
    finally:
        if _OPENING.get(key) is opening:
            del _OPENING[key]
        opening[1].set()


def _key(path: str) -> Key:
    with root.translate_os_errors(path):
        try:
            st = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            raise StoreNotFoundError(
                f"{path} does not exist; create a store with kvfs.open(path, capacity=...)"
            ) from None
    return st.st_dev, st.st_ino


def _use(store: OpenStore, options: OpenOptions) -> OpenStore:
    """One user more, if the store is open in the way that is asked for."""
    path = options.path
    if store.read_only and not options.read_only:
        raise StoreLockedError(f"{path} is open read-only in this process: close it before opening it for writing")
    if options.verify not in (None, store.c.verify) or options.threads not in (None, store.c.threads):
        raise ConfigError(
            f"{path} is open in this process with verify={store.c.verify.value!r} and threads={store.c.threads}: "
            "all stores of one directory in a process share these; leave them out or close the other one"
        )
    if not options.inspect_only:
        store.c.inspect_only = False  # a later open that only inspects does not change that
        store.services()
    store.users += 1
    return store


def release(store: OpenStore) -> None:
    """One user less; the last one closes the store, outside of the lock."""
    if store.disabled:  # is not registered
        store.close()
        return
    with _LOCK:
        store.users -= 1
        key = next((key for key, value in _STORES.items() if value is store), None)
        if store.users or key is None:
            return
        del _STORES[key]
        over = threading.Event()
        _CLOSING[key] = store, over
    try:
        store.close()
    finally:
        _CLOSING.pop(key, None)
        over.set()


def release_later(store: OpenStore) -> None:
    """``release`` for finalizers, which may run in any thread, between any two bytecodes, under any lock.

    Closing there made another store's index thread miss its deadline. So the store's background thread releases it.
    """
    store.forgotten.append(None)


def _release_forgotten(store: OpenStore) -> None:
    while store.forgotten:
        try:
            store.forgotten.pop()
        except IndexError:  # another thread was faster
            return
        release(store)


# -- forks and exits -------------------------------------------------------------------------

_resume: list[Callable[[], object]] = []


def _before_fork() -> None:
    _LOCK.acquire()
    opening = [store for store, _ in _OPENING.values() if hasattr(store, "c")]
    _resume.extend(store.c.index.quiesce(1.0) for store in [*_STORES.values(), *opening])


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
    for store, _ in [*_OPENING.values(), *_CLOSING.values()]:  # a copy of the parent's locks would outlast its close
        if hasattr(store, "c"):
            store.release_in_child().close()
    _OPENING.clear()
    _CLOSING.clear()
    for key, store in list(_STORES.items()):
        try:
            WatchedCalls(store.path, RESTART_SECONDS).run(store.restart_in_child)
        except StoreLockedError:  # until the disk answers, and the store has been started, its calls miss and decline
            log.warning("%s: the disk hangs: a forked child begins without this store", store.path)
        except BaseException as exc:  # a signal handler may raise one: a store that is half started is not used again
            del _STORES[key]
            if not isinstance(exc, Exception):
                raise


def _close_all() -> None:
    for store in list(_STORES.values()):
        store.close()
    _STORES.clear()
    for _, over in list(_CLOSING.values()):  # by threads that end with the interpreter
        over.wait(CLOSE_SECONDS)


os.register_at_fork(before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
atexit.register(_close_all)
