"""How much memory the processes of a host keep pinned for one store: each says so in its liveness file."""

from __future__ import annotations

import threading

from kvfs.liveness import Liveness

FRESH_SECONDS = 1.0  # what others have is asked again after this


class PinnedBytes:
    """The account of one process. Thread-safe. Two processes that take at once may exceed a limit by what they take."""

    def __init__(self, liveness: Liveness | None) -> None:
        self._liveness = liveness  # None: read-only, and alone for all that is known
        self._lock = threading.RLock()  # a handler of SIGTERM gives back, whatever it interrupts
        self._asked = float("-inf")
        self._others = 0
        self.mine = 0

    def take(self, nbytes: int, limit: int, now: float) -> bool:
        """Pin ``nbytes`` more, if all processes together then keep at most ``limit``; ``now``: monotonic seconds.

        Not while nobody can tell what the others have: a process that is out of descriptors cannot list them.
        """
        with self._lock:
            if self._liveness is not None and now - self._asked > FRESH_SECONDS:
                try:
                    self._others = self._liveness.pinned_by_others()
                except OSError:
                    return False
                self._asked = now
            if self._others + self.mine + nbytes > limit:
                return False
            self._say(self.mine + nbytes)
            return True

    def give_back(self, nbytes: int) -> None:
        with self._lock:
            assert nbytes <= self.mine, "more is given back than was taken"
            self._say(self.mine - nbytes)

    def _say(self, mine: int) -> None:
        self.mine = mine
        if self._liveness is not None:
            self._liveness.say_pinned(mine)
