"""Which load is being enqueued, and which are on their way: the lane of loads is used by one thread at a time."""

from __future__ import annotations

import threading


class Turns:
    """Lets one load be enqueued at a time, and ``most`` be between their first copy and their end. Thread-safe.

    Loads are told apart by identity, and each call may be repeated: an interrupt in a caller's thread loses no turn.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._enqueued_now: object = None
        self._under_way: set[object] = set()
        self._closed = False

    def begin(self, load: object) -> None:
        """Wait until ``load`` may be enqueued. For the load thread."""
        with self._lock:
            self._changed.wait_for(lambda: self._enqueued_now is None and len(self._under_way) < self._most)
            self._take(load)

    def begin_alone(self, load: object) -> bool:
        """Whether ``load`` may be enqueued, because no other is under way; does not wait."""
        with self._lock:
            if self._closed or self._enqueued_now is not None or self._under_way:
                return False
            self._take(load)
            return True

    def _take(self, load: object) -> None:
        self._enqueued_now = load
        self._under_way.add(load)

    def enqueued(self, load: object) -> None:
        """All of it is enqueued: the next one may be."""
        with self._lock:
            if self._enqueued_now is load:
                self._enqueued_now = None
                self._changed.notify_all()

    def over(self, load: object) -> None:
        """It has ended."""
        with self._lock:
            self.enqueued(load)
            self._under_way.discard(load)
            self._changed.notify_all()

    def close(self, timeout: float) -> None:
        """No further ``begin_alone``; wait until the last one is enqueued."""
        with self._lock:
            self._closed = True
            self._changed.wait_for(lambda: self._enqueued_now is None, timeout)
