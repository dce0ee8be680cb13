"""Tasks as LightLLM's disk worker polls them."""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Callable, Sequence

from kvfs.transfer.handle import Transfer

log = logging.getLogger("lightllm.kvfs")
GRACE_SECONDS = 5.0  # beyond its deadline, for a transfer that waits for a disk; then LightLLM gets its pages back


class PyState(enum.Enum):
    """State of one page. LightLLM uses the pages of a load only if all of them are Finished."""

    Initial = 0
    Working = 1
    Finished = 2
    Aborted = 3


class PyTask:
    """One save or load of pages. Thread-safe. It ends in any case, a few seconds behind its deadline at the latest.

    From its end on no byte of its pages is read or written. Pages that are not Finished then are Aborted.
    """

    def __init__(self, pages: int, already: Sequence[int], ended: Callable[[PyTask], object]) -> None:
        """``already``: pages of the tensor that were stored before; LightLLM releases them at once.

        ``ended`` is called once, with the task.
        """
        self.page_already_list = list(already)
        self._states = [PyState.Working] * pages
        self._lock = threading.Lock()
        self._over = False
        self._transfer: Transfer | None = None
        self._give_up_at = float("inf")
        self._ended = ended

    # -- for LightLLM ------------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether it has ended."""
        if not self._over and time.monotonic() >= self._give_up_at and self._transfer is not None:
            log.warning("kvfs: a %s took too long and was given up", self._transfer.kind)
            self.abort()
        return self._over

    def data_safe(self) -> bool:
        """Whether the pages may be reused: a save has copied them then, and may go on to write."""
        transfer = self._transfer
        if transfer is not None and transfer.kind == "save" and transfer.source_free.is_set():
            return True
        return self.ready()

    def state(self) -> list[PyState]:
        """The state of each page."""
        with self._lock:
            return list(self._states)

    # -- for the service ---------------------------------------------------------------------

    def finished(self, number: int) -> None:
        """Page ``number`` is stored, or loaded."""
        with self._lock:
            if not self._over:
                self._states[number] = PyState.Finished

    def follow(self, transfer: Transfer, seconds: float) -> None:
        """Take the transfer that moves the pages, and calls ``end``; it has ``seconds``."""
        self._give_up_at = time.monotonic() + seconds + GRACE_SECONDS
        self._transfer = transfer

    def end(self) -> None:
        """Make what is not finished Aborted. Again: nothing."""
        with self._lock:
            if self._over:
                return
            self._states = [s if s is PyState.Finished else PyState.Aborted for s in self._states]
            self._over = True
        self._ended(self)

    def abort(self) -> None:
        """End it now. Waits for a copy in memory, never for a disk; behind it no byte of the pages moves."""
        transfer = self._transfer
        while transfer is not None and not transfer.withdraw(GRACE_SECONDS):
            log.error("kvfs: a copy of a %s does not end; its pages are held back", transfer.kind)
        self.end()
