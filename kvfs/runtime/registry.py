"""The open stores of this process: one per directory, since LMDB must not be opened twice. Forks and exits."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from kvfs.directory import root
from kvfs.errors import ConfigError, StoreLockedError, StoreNotFoundError
from kvfs.runtime.open_store import CLOSE_SECONDS, OpenOptions, OpenStore
from kvfs.system.worker import WatchedCalls

T = TypeVar("T")
log = logging.getLogger("kvfs")
WAIT_SECONDS = 30.0  # how long an open waits for the same directory to be closed in this process
CLOSE_MAX_SECONDS = 20.0  # how long a close waits in all, once transfers have ended: several of its steps may wait
#: How long a forked child waits in ``os.fork`` for a disk that does not answer, where nothing else of it can run.
RESTART_SECONDS = 5.0
Key = tuple[int, int]  # device and inode of the directory

_LOCK = threading.RLock()
_STORES: dict[Key, OpenStore] = {}
#: What another thread opens or closes, outside of the lock: a fork must not wait. The event is set when that is over.
_OPENING: dict[Key, tuple[OpenStore, threading.Event]] = {}
_CLOSING: dict[Key, tuple[OpenStore, threading.Event]] = {}
#: Of directories that are being opened, or whose disk hangs: one call waits for each such disk, others fail at once.
_CALLS: dict[str, WatchedCalls] = {}


def watched(path: str, function: Callable[[], T]) -> T:
    """Result of a step of an open; StoreLockedError if the disk hangs. The step goes on when the disk answers."""
    calls = _CALLS.setdefault(path, WatchedCalls(path))
    try:
        return calls.run(function)
    finally:
        if not calls.busy():
            _CALLS.pop(path, None)


class _Opening:
    """A store that a thread opens, and whose caller may leave meanwhile."""

    def __init__(self, options: OpenOptions) -> None:
        self.store = OpenStore(options)
        self.store.on_forgotten = partial(_release_forgotten, self.store, watch=False)
        self._options = options
        self._over = threading.Event()
        self._key: Key | None = None
        self._begun = self._left = self._used = False  # under _LOCK

    def register(self, key: Key) -> None:
        self._key = key
        _OPENING[key] = self.store, self._over

    def run(self) -> OpenStore:
        assert self._key is not None
        with _LOCK:
            if self._left:
                return self.store
            self._begun = True
        try:
            self.store.start()
            with _LOCK:
                if not self._left:
                    _STORES[self._key] = self.store
                    _use(self.store, self._options)
                    self._used = True
            if self._left and not self._used:
                self.store.close()
        finally:
            self._forget()
        return self.store

    def leave(self) -> None:
        """The caller raises: what it has opened, or will have, is closed."""
        with _LOCK:
            self._left, used = True, self._used
            if not self._begun:
                self._forget()
        if used:
            release(self.store)

    def _forget(self) -> None:
        if self._key is not None:
            _OPENING.pop(self._key, None)
        self._over.set()


def acquire(options: OpenOptions) -> OpenStore:
    """The open store of a directory; ``release`` it when done. StoreLockedError if its disk hangs.

    One that is being opened or closed is waited for: LMDB refuses an index that the process has open, which looks like
    damage.
    """
    end = options.files.monotonic() + WAIT_SECONDS
    opening = _Opening(options)
    try:
        while True:
            key = watched(options.path, partial(_key, options.path))
            with _LOCK:
                store, busy = _STORES.get(key), _OPENING.get(key) or _CLOSING.get(key)
                forgotten = store is not None and 0 < store.users <= len(store.forgotten)
                if busy is None and store is not None and not forgotten:
                    return _use(store, options)
                if busy is None and store is None:
                    opening.register(key)
                    break
            if busy is None:
                assert store is not None
                _release_forgotten(store)
            elif not busy[1].wait(max(0.0, end - options.files.monotonic())):
                raise StoreLockedError(f"{options.path} is still being opened or closed in this process: try again")
        return watched(options.path, opening.run)
    except BaseException:
        opening.leave()
        raise


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


def release(store: OpenStore, *, watch: bool = True) -> None:
    """One user less; the last one closes the store, outside of the lock. ``watch``: as of ``_close``."""
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
    closes = list[None]()

    def close() -> None:
        closes.append(None)
        try:
            store.close()
        finally:
            _CLOSING.pop(key, None)
            over.set()

    try:
        _close(store, close, watch)
    finally:
        if not closes:  # an interrupt came first
            _CLOSING.pop(key, None)
            over.set()


def _close(store: OpenStore, close: Callable[[], None], watch: bool = True) -> None:
    """Close a store; ``watch``: leave that to a daemon thread if the disk hangs. Its locks are held until it ends."""
    store.end_transfers()  # in any case before the caller goes on: it may free their buffers
    if not watch:
        close()
        return
    try:
        WatchedCalls(store.path).run(close, CLOSE_MAX_SECONDS)
    except StoreLockedError:
        store.leave()


def release_later(store: OpenStore) -> None:
    """``release`` for finalizers, which may run in any thread, between any two bytecodes, under any lock.

    Closing there made another store's index thread miss its deadline. So the store's background thread releases it.
    """
    store.forgotten.append(None)


def _release_forgotten(store: OpenStore, *, watch: bool = True) -> None:
    """``watch=False``: by the store's background thread, which a close in another thread would wait for."""
    while store.forgotten:
        try:
            store.forgotten.pop()
        except IndexError:  # another thread was faster
            return
        release(store, watch=watch)


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
    _CALLS.clear()
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
        _close(store, store.close)
    _STORES.clear()
    for _, over in list(_CLOSING.values()):  # by threads that end with the interpreter
        over.wait(CLOSE_SECONDS)


os.register_at_fork(before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
atexit.register(_close_all)
