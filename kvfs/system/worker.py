"""The thread that alone touches LMDB and its gate.

Python runs signal handlers in the main thread, between any two bytecodes: an interrupt inside a critical
section left the lock held in 13 % of 10,000 tries. So the section lives in a thread of its own and the caller
only waits for the answer. A caller that is interrupted or out of time abandons the request: it is skipped if
it has not begun, and finished by the thread if it has.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
#: What a caller waits beyond its deadline for a request that has begun (a commit may wait for a disk).
GRACE_SECONDS = 1.0


class _Request(Generic[T]):
    __slots__ = ("_done", "abandoned", "call", "error", "result")

    def __init__(self, call: Callable[[], T]) -> None:
        self.call = call
        self.result: T | None = None
        self.error: BaseException | None = None
        self.abandoned = False
        self._done = threading.Lock()
        self._done.acquire()

    def run(self) -> None:
        if not self.abandoned:
            try:
                self.result = self.call()
            except BaseException as exc:  # handed to the caller, whoever that is
                self.error = exc
        self._done.release()

    def wait(self, timeout: float) -> bool:
        try:
            done = self._done.acquire(timeout=max(0.0, timeout))
        except BaseException:
            self.abandoned = True
            raise
        if not done:
            self.abandoned = True
        return done


class Worker:
    """Runs calls one after the other in its own daemon thread."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[_Request[Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], T], timeout: float) -> T:
        """Result of ``function``; its exception is raised here. TimeoutError if it was not done in time."""
        if threading.current_thread() is self._thread:
            return function()
        request = _Request(function)
        self._queue.put(request)
        if not request.wait(timeout + GRACE_SECONDS):
            raise TimeoutError
        if request.error is not None:
            raise request.error
        return request.result  # type: ignore[return-value]

    def stop(self, timeout: float = 5.0) -> None:
        self._queue.put(None)
        self._thread.join(timeout)

    def _loop(self) -> None:
        while (request := self._queue.get()) is not None:
            request.run()
            del request  # a result must not live until the next request
