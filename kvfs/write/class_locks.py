"""Whose turn it is to append to a segment: one lock for each class of segments, and waits for it that end."""

from __future__ import annotations

import errno
import threading
import time
import weakref
from collections.abc import Hashable
from contextlib import AbstractContextManager

POLL_SECONDS = 0.001
APPEND_SECONDS = 30.0  # that other appends to a segment may take: longer, and the disk hangs

#: Each as long as somebody refers to it: holds it, or is about to.
_Locks = weakref.WeakValueDictionary[Hashable, threading.Lock]


class AppendTimeoutError(OSError):
    """Another write has hung for too long."""

    def __init__(self) -> None:
        super().__init__(errno.ETIMEDOUT, f"another write has hung for {APPEND_SECONDS:g} s")


class _Bounded:
    """For threads that no signal handler runs in: who only looked first, and was overtaken, would wait for ever."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        if not self._lock.acquire(timeout=APPEND_SECONDS):
            raise AppendTimeoutError

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class ClassLocks:
    """One lock for each class of segments; an append holds the lock of its class.

    An append enters ``acquire_within``. Background tasks, which can skip a round, look first::

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
        """Context that holds the lock; to be entered at once.

        AppendTimeoutError, here or at its entry, if another append has hung for APPEND_SECONDS.
        """
        if threading.current_thread() is not threading.main_thread():
            return _Bounded(self.lock(key))
        if not self.is_free_within(key, APPEND_SECONDS):
            raise AppendTimeoutError
        return self.lock(key)

    def is_free_within(self, key: Hashable, seconds: float = 0.0) -> bool:
        """Whether the lock is free within so many seconds. Not held then: only ``with`` never leaves one held for good.

        In the main thread an interrupt may come between acquiring a lock and knowing that, so that one only looks.
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
