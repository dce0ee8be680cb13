"""How much memory the processes of a host keep pinned for one store: each says so in its liveness file."""

from __future__ import annotations

import threading

from kvfs.directory.liveness import Liveness

FRESH_SECONDS = 1.0  # what others have is asked again after this


class PinnedBytes:
    """The account of one process. Thread-safe. Two processes that take at once may exceed a limit by what they take.

    Whoever takes waits for the disk; giving back does not, since loads and a handler of SIGTERM do that. Others learn
    of it by ``say``.
    """

    def __init__(self, liveness: Liveness | None) -> None:
        self._liveness = liveness  # None: read-only, and alone for all that is known
        self._lock = threading.RLock()  # of numbers; the handler may interrupt who holds it
        self._disk = threading.Lock()
        self._asked = float("-inf")
        self._others = self._said = 0
        self.mine = 0

    def take(self, nbytes: int, limit: int, now: float) -> bool:
        """Pin ``nbytes`` more, if all processes together then keep at most ``limit``; ``now``: monotonic seconds.

        Not while nobody can tell what the others have: a process that is out of descriptors cannot list them.
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
        """Tell the other processes, if there is news. Called every second."""
        if self._said != self.mine:
            with self._disk:
                self._say()

    def _say(self) -> None:
        self._said = self.mine
        if self._liveness is not None:
            self._liveness.say_pinned(self._said)
