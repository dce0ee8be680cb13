"""Threads that do parts of one call, and that an interrupt of the caller leaves in order.

Not ``concurrent.futures``: its locks are taken in Python code, so a signal handler that raises in ``submit`` leaves
one held, and the next call waits for ever. Here the caller touches only what one C call does as a whole.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_RUN, _SKIP = "run", "skip"
_WAIT_SECONDS = 0.05


class _Task(Generic[T]):
    __slots__ = ("call", "claims", "done", "error", "finished", "result")

    def __init__(self, call: Callable[[], T]) -> None:
        self.call = call
        self.claims: list[str] = []  # whoever appends first decides
        self.result: T | None = None
        self.error: BaseException | None = None
        self.finished = False
        self.done = threading.Lock()
        self.done.acquire()

    def run(self) -> None:
        self.claims.append(_RUN)
        if self.claims[0] is _RUN:
            try:
                self.result = self.call()
            except BaseException as exc:  # handed to the caller
                self.error = exc
        self.finished = True
        self.done.release()

    def wait(self) -> None:
        while not self.finished:
            self.done.acquire(timeout=_WAIT_SECONDS)

    def skip(self) -> bool:
        """Do not begin it any more; False if it has begun."""
        self.claims.append(_SKIP)
        return self.claims[0] is _SKIP


class Begun(Generic[T]):
    """Calls that were begun."""

    def __init__(self, tasks: Sequence[_Task[T]]) -> None:
        self._tasks = tasks

    def wait(self) -> None:
        """Wait for all of them; raises what the first one that failed did."""
        for task in self._tasks:
            task.wait()
        for task in self._tasks:
            if task.error is not None:
                raise task.error


class Pool:
    """A fixed number of daemon threads. Not for a forked child, where they are not: make another there."""

    def __init__(self, threads: int, name: str) -> None:
        self._queue: queue.SimpleQueue[_Task[Any] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._loop, name=name, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def run(self, calls: Sequence[Callable[[], T]], beside: Callable[[], object] = lambda: None) -> list[T]:
        """Results of ``calls``, while the caller does ``beside``. Whatever is raised, no call runs any more then."""
        tasks = [_Task(call) for call in calls]
        try:
            for task in tasks:
                self._queue.put(task)
            beside()
            for task in tasks:
                task.wait()
        except BaseException:
            self._end(tasks)
            raise
        for task in tasks:
            if task.error is not None:
                raise task.error
        return [task.result for task in tasks]  # type: ignore[misc]

    def begin(self, calls: Sequence[Callable[[], T]]) -> Begun[T]:
        """Let ``calls`` run while the caller goes on. Not for callers that an interrupt may end."""
        tasks = [_Task(call) for call in calls]
        for task in tasks:
            self._queue.put(task)
        return Begun(tasks)

    @staticmethod
    def _end(tasks: Sequence[_Task[Any]]) -> None:
        """Buffers of the caller must not be touched behind his back, however often he is interrupted."""
        while True:
            try:
                for task in [task for task in tasks if not task.skip()]:
                    task.wait()
                return
            except BaseException:  # the first one is raised when all has ended
                continue

    def close(self, timeout: float = 5.0) -> None:
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(timeout)

    def _loop(self) -> None:
        while (task := self._queue.get()) is not None:
            task.run()
            del task  # its result must not live until the next one
