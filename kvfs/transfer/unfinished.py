"""The transfers of one HostIO that have not ended, and the thread that stops them at their deadlines."""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

from kvfs.transfer.control import TransferControl
from kvfs.types import TransferState

_SLEEP_SECONDS_MAX = 3600.0  # a queue refuses a timeout that is too long


class Unfinished:
    """Owns the set of transfers that have not ended. Thread-safe.

    A thread of its own stops those that are late. It touches neither a disk nor a device, because each may hang. It
    sleeps until the earliest deadline, so it wakes up once for many transfers.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._changed = threading.Condition()
        self._transfers: set[TransferControl] = set()
        self._timely: set[TransferControl] = set()  # of these, those whose deadline has not been noticed yet
        self._wakes_at = [math.inf]  # when the thread looks at them again
        self._wake: SimpleQueue[bool] = SimpleQueue()  # False: end. In a forked child a lock of Python may be held
        parts = self._wake, self._changed, self._timely, self._wakes_at, monotonic
        threading.Thread(target=_stop_late, args=parts, name="kvfs-deadlines", daemon=True).start()
        weakref.finalize(self, self._wake.put, False).atexit = False

    def __len__(self) -> int:
        return len(self._transfers)

    def add(self, transfer: TransferControl) -> None:
        with self._changed:
            self._transfers.add(transfer)
            self._timely.add(transfer)
            earlier = transfer.deadline < self._wakes_at[0]
            if earlier:
                self._wakes_at[0] = transfer.deadline
        if earlier:
            self._wake.put(True)

    def discard(self, transfer: TransferControl) -> None:
        with self._changed:
            self._transfers.discard(transfer)
            self._timely.discard(transfer)
            self._changed.notify_all()

    def wait(self, timeout: float) -> list[TransferControl]:
        """Wait until all have ended, at most ``timeout`` seconds. Returns those that have not."""
        with self._changed:
            self._changed.wait_for(lambda: not self._transfers, timeout)
            return list(self._transfers)

    def dismiss(self) -> None:
        """End the thread; there will be no more transfers."""
        self._wake.put(False)


def _stop_late(
    wake: SimpleQueue[bool], changed: threading.Condition, timely: set[TransferControl], wakes_at: list[float],
    monotonic: Callable[[], float],
) -> None:  # fmt: skip
    """Refers to none of the objects that own the set, so that they can be garbage-collected."""
    while True:
        with changed:
            now = monotonic()
            late = [transfer for transfer in timely if transfer.deadline <= now]
            timely.difference_update(late)
            wakes_at[0] = min((transfer.deadline for transfer in timely), default=math.inf)
            left = wakes_at[0] - now
        _stop([transfer for transfer in late if _ends_late(transfer)])
        del late
        with contextlib.suppress(Empty):
            if not wake.get(timeout=min(left, _SLEEP_SECONDS_MAX)):
                return


def _ends_late(transfer: TransferControl) -> bool:
    """Whether its deadline ends it. That of a save is for the copies: pages that are copied are written."""
    return transfer.task.kind == "load" or transfer.state in (TransferState.QUEUED, TransferState.WAITING)


def _stop(late: Sequence[TransferControl]) -> None:
    """Stop and end them, except those that use the engine's memory: their workers end them."""
    for transfer in late:
        transfer.stop(transfer.late_for)
    if late:  # callbacks must not delay the next deadline
        try:
            threading.Thread(target=_end_all, args=(late,), name="kvfs-end", daemon=True).start()
        except RuntimeError:  # the process may have no more threads
            _end_all(late)


def _end_all(transfers: Sequence[TransferControl]) -> None:
    for transfer in transfers:
        transfer.try_end()
