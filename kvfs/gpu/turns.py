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
        self._handed_over: object = None  # the same, if its first copies are enqueued and the load thread is to go on
        self._under_way: set[object] = set()
        self._closed = False

    def begin(self, load: object) -> bool:
        """Wait until ``load`` may be enqueued. For the load thread. True if a load that was handed over is overtaken,
        whose turn is over then: it was handed over behind this one."""

        def mine() -> bool:
            others = self._under_way - {self._handed_over}
            return self._enqueued_now in (None, self._handed_over) and len(others) < self._most

        with self._lock:
            self._changed.wait_for(mine)
            overtaken = self._handed_over
            if overtaken is not None:
                self.over(overtaken)
            self._take(load)
            return overtaken is not None

    def hand_over(self, load: object) -> None:
        """From now on the load thread enqueues it."""
        with self._lock:
            if self._enqueued_now is load:
                self._handed_over = load
                self._changed.notify_all()

    def resume(self, load: object) -> bool:
        """Whether ``load``, which was handed over, still has its turn. For the load thread."""
        with self._lock:
            kept = self._handed_over is load
            if kept:
                self._handed_over = None
            return kept

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
                self._enqueued_now = self._handed_over = None
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
