"""Threads that run parts of one call, and that survive an interrupt of the caller.

Not ``concurrent.futures``: it takes locks in Python code, so a signal handler that raises in ``submit`` leaves one
held, and the next call waits forever. Here each step of the caller is one C call.
"""

from __future__ import annotations

import contextlib
import errno
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

S = TypeVar("S")
T = TypeVar("T")
_RUN, _SKIP = "run", "skip"
_WAIT_SECONDS = 0.05  # how often a caller checks whether the pool was closed


class PoolClosedError(OSError):
    """A call had not begun when its pool was closed."""


class _Task(Generic[T]):
    __slots__ = ("call", "claims", "done", "error", "finished", "result")

    def __init__(self, call: Callable[[], T]) -> None:
        self.call: Callable[[], T] | None = call
        self.claims: list[str] = []  # the first entry decides
        self.result: T | None = None
        self.error: BaseException | None = None
        self.finished = False
        self.done = threading.Lock()
        self.done.acquire()

    def run(self) -> None:
        self.claims.append(_RUN)
        call, self.call = self.call, None  # afterwards the pool refers to no buffer of the caller
        if self.claims[0] is _RUN and call is not None:
            try:
                self.result = call()
            except BaseException as exc:  # raised in the caller
                self.error = exc
        del call
        self.finished = True
        self.done.release()

    def wait(self, pool: Pool) -> None:
        while not self.finished:
            self.done.acquire(timeout=_WAIT_SECONDS)
            if pool.closed and not self.finished and self.skip():
                self.error = PoolClosedError(errno.ECANCELED, "the pool was closed")
                return

    def skip(self) -> bool:
        """Keep the task from beginning; False if it has begun."""
        self.claims.append(_SKIP)
        if self.claims[0] is not _SKIP:
            return False
        self.call = None
        return True


class Begun(Generic[T]):
    """Calls that were begun with ``Pool.begin``."""

    def __init__(self, tasks: Sequence[_Task[T]], pool: Pool) -> None:
        self._tasks, self._pool = tasks, pool

    def wait(self) -> None:
        """Wait for all of them; raises what the first failed one raised."""
        for task in self._tasks:
            task.wait(self._pool)
        for task in self._tasks:
            if task.error is not None:
                raise task.error


class Pool:
    """Owns daemon threads that run calls. A forked child has none of them: make another pool there."""

    def __init__(self, threads: int, name: str) -> None:
        self._queue: queue.SimpleQueue[_Task[Any] | None] = queue.SimpleQueue()
        self._name = name
        self._threads: list[threading.Thread] = []
        self.closed = False
        try:
            self.grow(threads)
        except BaseException:  # the process may have no more threads: those already started would wait forever
            self.close(0.0)
            raise

    @property
    def size(self) -> int:
        return len(self._threads)

    def grow(self, threads: int) -> None:
        """Have at least this many threads. One caller at a time."""
        while len(self._threads) < threads:
            thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def run(
        self, calls: Sequence[Callable[[], T]], meanwhile: Callable[[], object] = lambda: None, *, helping: bool = False
    ) -> list[T]:
        """Results of ``calls``, while the caller runs ``meanwhile``. No call is running when this returns or raises.

        ``helping``: calls that have not begun when ``meanwhile`` ends are left out.
        """
        tasks = [_Task(call) for call in calls]
        try:
            for task in tasks:
                self._queue.put(task)
            meanwhile()
            if helping:
                tasks = [task for task in tasks if not task.skip()]
            for task in tasks:
                task.wait(self)
        except BaseException:
            self._end(tasks)
            raise
        for task in tasks:
            if task.error is not None:
                raise task.error
        return [task.result for task in tasks]  # type: ignore[misc]

    def begin(self, calls: Sequence[Callable[[], T]]) -> Begun[T]:
        """Let ``calls`` run while the caller goes on. Not for callers that an interrupt can reach."""
        tasks = [_Task(call) for call in calls]
        for task in tasks:
            self._queue.put(task)
        return Begun(tasks, self)

    def _end(self, tasks: Sequence[_Task[Any]]) -> None:
        """Wait for all calls, however often the caller is interrupted: they use its buffers."""
        while True:
            try:
                for task in [task for task in tasks if not task.skip()]:
                    task.wait(self)
                return
            except BaseException:  # the first interrupt is raised at the end
                continue

    def close(self, timeout: float = 5.0) -> None:
        """Wait for all threads, at most ``timeout`` seconds in sum: one that waits for a disk ends with that wait.
        Calls that have not begun by then end with PoolClosedError."""
        for _ in self._threads:
            self._queue.put(None)
        end = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        self.closed = True

    def _loop(self) -> None:
        while (task := self._queue.get()) is not None:
            task.run()
            del task  # its result must not live until the next one


class Team:
    """Threads that share the work of one call with its caller; each is started when it is first needed.

    Starting one takes 0.1 ms, and milliseconds where all cores are busy.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._count = threads
        self._name = name
        self._pool: Pool | None = None
        self._closed = False  # then each caller does all of its work itself
        self._wanted = 0  # threads that calls in progress can use; an interrupt may leave it too high
        self._lock = threading.Lock()

    def each(self, work: Callable[[Iterator[S]], T], shares: Sequence[Iterator[S]]) -> list[T]:
        """Results of ``work`` for every share, the first one in the caller's thread; in any order.

        Shares may be one and the same iterator: each thread that is free takes the next item, and a thread that finds
        none left gives no result. Shares that have not begun when the team is closed give none either. An interrupt of
        the caller takes the remaining items away from the other threads.
        """
        pool = self._started(len(shares) - 1) if len(shares) > 1 else None
        if pool is None:
            return [work(share) for share in shares]
        done: list[T] = []

        def mine() -> None:
            try:
                done.append(work(shares[0]))
            except BaseException:
                for share in shares:
                    deque(share, maxlen=0)
                raise

        calls = [partial(work, share) for share in shares[1:]]
        try:
            return [*pool.run(calls, mine, helping=shares[0] is shares[-1]), *done]
        except PoolClosedError:  # the store was closed meanwhile, and its disk is slow
            return done
        finally:
            with self._lock:
                self._wanted -= len(calls)

    def _started(self, threads: int) -> Pool | None:
        """The pool, with ``threads`` more than other calls use, if possible; None if there are no threads.

        None is started after ``close``: nothing would end them.
        """
        with self._lock:
            if self._closed:
                return None
            if self._pool is None:
                self._pool = Pool(0, self._name)
            with contextlib.suppress(RuntimeError):  # the process may have no more threads
                self._pool.grow(min(self._wanted + threads, self._count))
            if not self._pool.size:
                return None
            self._wanted += threads
            return self._pool

    def close(self) -> None:
        with self._lock:
            self._closed = True
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def abandon(self) -> None:
        """In a forked child, which has none of the parent's threads."""
        self._pool, self._wanted = None, 0
        self._lock = threading.Lock()
