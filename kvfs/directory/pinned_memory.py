"""How much memory the processes of a host keep pinned for one store. Each publishes it in its liveness file."""

from __future__ import annotations

import threading

from kvfs.directory.liveness import Liveness

FRESH_SECONDS = 1.0  # how long the sum of the other processes is used before it is read again


class PinnedBytes:
    """The account of one process. Thread-safe. Two processes that take at once may exceed a limit by what they take.

    ``take`` may wait for the disk. ``give_back`` never does, since loads and signal handlers call it; ``say`` publishes
    the change later.
    """

    def __init__(self, liveness: Liveness | None) -> None:
        self._liveness = liveness  # None: read-only, which publishes nothing and reads nothing
        self._lock = threading.RLock()  # of the numbers; reentrant, since a signal handler may interrupt its holder
        self._disk = threading.Lock()
        self._asked = float("-inf")
        self._others = self._said = 0
        self.mine = 0

    def take(self, nbytes: int, limit: int, now: float) -> bool:
        """Pin ``nbytes`` more, if all processes together then keep at most ``limit``; ``now``: monotonic seconds.

        False also while the others cannot be read: a process that is out of descriptors cannot list them.
        """
        with self._disk:
            if self._liveness is not None and now - self._asked > FRESH_SECONDS:
                try:
                    self._others = self._liveness.pinned_by_others()
                except OSError:
                    return False
                self._asked = now
            with self._lock:
                if self._others + self.mine + nbytes > limit:
                    return False
                self.mine += nbytes
            self._say()
            return True

    def give_back(self, nbytes: int) -> None:
        with self._lock:
            assert nbytes <= self.mine, "more is given back than was taken"
            self.mine -= nbytes

    def say(self) -> None:
        """Publish the bytes of this process, if they have changed. Called every second."""
        if self._said != self.mine:
            with self._disk:
                self._say()

    def _say(self) -> None:
        self._said = self.mine
        if self._liveness is not None:
            self._liveness.say_pinned(self._said)
