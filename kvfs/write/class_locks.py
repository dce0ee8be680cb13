"""Locks of segment classes: an append holds the lock of its class, and every wait for one is bounded."""

from __future__ import annotations

import errno
import threading
import time
import weakref
from collections.abc import Hashable
from contextlib import AbstractContextManager

POLL_SECONDS = 0.001
APPEND_SECONDS = 30.0  # longest wait for other appends: a disk that needs longer hangs

#: A lock exists while a thread holds it or is about to acquire it.
_Locks = weakref.WeakValueDictionary[Hashable, threading.Lock]


class AppendTimeoutError(OSError):
    """Another append has held the lock for APPEND_SECONDS."""

    def __init__(self) -> None:
        super().__init__(errno.ETIMEDOUT, f"another write has hung for {APPEND_SECONDS:g} s")


class _Bounded:
    """A lock with a bounded wait, for threads in which no signal handler runs.

    To look first and acquire then is not bounded: another append may take the lock in between.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        if not self._lock.acquire(timeout=APPEND_SECONDS):
            raise AppendTimeoutError

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class ClassLocks:
    """Owns one lock for each class of segments. Thread-safe.

    Appends enter ``acquire_within``. Background tasks, which can skip a round, look first::

        if locks.is_free_within(key, 1.0):
            with locks.lock(key): ...
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks = _Locks()

    def lock(self, key: Hashable) -> threading.Lock:
        with self._lock:
            return self._locks.setdefault(key, threading.Lock())

    def acquire_within(self, key: Hashable) -> AbstractContextManager[object]:
        """Context that holds the lock; the caller enters it at once.

        AppendTimeoutError, here or at the entry, if another append has held the lock for APPEND_SECONDS.
        """
        if threading.current_thread() is not threading.main_thread():
            return _Bounded(self.lock(key))
        if not self.is_free_within(key, APPEND_SECONDS):
            raise AppendTimeoutError
        return self.lock(key)

    def is_free_within(self, key: Hashable, seconds: float = 0.0) -> bool:
        """Whether the lock becomes free within so many seconds. Does not acquire it for the caller: use ``with``.

        The main thread only polls: an interrupt between acquiring a lock and the next statement would leave it locked.
        """
        lock = self.lock(key)
        if threading.current_thread() is not threading.main_thread():
            free = lock.acquire(timeout=seconds)
            if free:
                lock.release()
            return free
        end = time.monotonic() + seconds
        while lock.locked() and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
        return not lock.locked()
