"""Something that happens once, and that anybody may wait for."""

from __future__ import annotations

import contextlib
import os
import threading
import time

from kvfs.errors import ConfigError

_SLICE_SECONDS = 0.05


class Milestone:
    """A transfer has several: made in half a microsecond, where ``threading.Event`` takes seven.

    A lock is held until it happens. Whoever waits takes it and lets go of it, one after the other; if an interrupt
    strikes in between, the others find out a moment later.
    """

    __slots__ = ("_happened", "_held", "_lock", "_pid")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._held = [self._lock]  # whoever pops it lets go of it
        self._happened = False
        self._pid = os.getpid()

    def is_set(self) -> bool:
        return self._happened

    def wait(self, timeout: float | None = None) -> bool:
        """Wait, at most ``timeout`` seconds; whether it has happened. ConfigError in a forked child."""
        self.check_process()
        end = None if timeout is None else time.monotonic() + timeout
        while not self._happened:
            left = _SLICE_SECONDS if end is None else min(_SLICE_SECONDS, end - time.monotonic())
            if left <= 0:
                return self._happened
            if self._lock.acquire(timeout=left):
                self._lock.release()
        return True

    def check_process(self) -> None:
        """ConfigError in a forked child: what it waits for happens in the parent."""
        if self._pid != os.getpid():
            raise ConfigError("this transfer belongs to the parent process: attach again and start a new one here")

    def _set(self) -> None:
        self._happened = True
        if self._held:
            with contextlib.suppress(IndexError):  # somebody else was quicker
                self._held.pop().release()
