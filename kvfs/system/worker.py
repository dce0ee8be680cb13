"""A thread that runs the calls of others: the only one that touches LMDB and its gate, for example.

Python runs signal handlers in the main thread, between any two bytecodes: an interrupt inside a critical section left
the lock held in 13 % of 10,000 tries. So the section runs in a thread of its own, and the caller only waits for the
answer. A caller that is interrupted or out of time abandons its request: the thread skips it if it has not begun, and
finishes it if it has.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
GRACE_SECONDS = 1.0  # how long a caller waits beyond its deadline: a commit that has begun may wait for a disk


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
            except BaseException as exc:  # raised in the caller
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
    """Owns a daemon thread that runs calls one after the other."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[_Request[Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], T], timeout: float) -> T:
        """Result of ``function``; raises what it raised. TimeoutError if it has not ended in time."""
        if threading.current_thread() is self._thread:
            return function()
        request = _Request(function)
        self._queue.put(request)
        if not request.wait(timeout + GRACE_SECONDS):
            raise TimeoutError
        if request.error is not None:
            raise request.error
        return request.result  # type: ignore[return-value]

    def submit(self, function: Callable[[], object]) -> None:
        """Run ``function`` after the calls that wait already. Its result, or error, is dropped."""
        self._queue.put(_Request(function))

    def stop(self, timeout: float = 5.0) -> None:
        self._queue.put(None)
        self._thread.join(timeout)

    def _loop(self) -> None:
        while (request := self._queue.get()) is not None:
            request.run()
            del request  # its result must not stay alive until the next request
