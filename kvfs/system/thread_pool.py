"""Threads that do parts of one call, and that an interrupt of the caller leaves in order.

Not ``concurrent.futures``: its locks are taken in Python code, so a signal handler that raises in ``submit`` leaves
one held, and the next call waits for ever. Here the caller touches only what one C call does as a whole.
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
_WAIT_SECONDS = 0.05


class PoolClosedError(OSError):
    """A call had not begun when its pool was closed."""


class _Task(Generic[T]):
    __slots__ = ("call", "claims", "done", "error", "finished", "result")

    def __init__(self, call: Callable[[], T]) -> None:
        self.call: Callable[[], T] | None = call
        self.claims: list[str] = []  # whoever appends first decides
        self.result: T | None = None
        self.error: BaseException | None = None
        self.finished = False
        self.done = threading.Lock()
        self.done.acquire()

    def run(self) -> None:
        self.claims.append(_RUN)
        call, self.call = self.call, None  # the caller's buffers are his alone when he goes on
        if self.claims[0] is _RUN and call is not None:
            try:
                self.result = call()
            except BaseException as exc:  # handed to the caller
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
        """Do not begin it any more; False if it has begun."""
        self.claims.append(_SKIP)
        if self.claims[0] is not _SKIP:
            return False
        self.call = None
        return True


class Begun(Generic[T]):
    """Calls that were begun."""

    def __init__(self, tasks: Sequence[_Task[T]], pool: Pool) -> None:
        self._tasks, self._pool = tasks, pool

    def wait(self) -> None:
        """Wait for all of them; raises what the first one that failed did."""
        for task in self._tasks:
            task.wait(self._pool)
        for task in self._tasks:
            if task.error is not None:
                raise task.error


class Pool:
    """Daemon threads. Not for a forked child, where they are not: make another there."""

    def __init__(self, threads: int, name: str) -> None:
        self._queue: queue.SimpleQueue[_Task[Any] | None] = queue.SimpleQueue()
        self._name = name
        self._threads: list[threading.Thread] = []
        self.closed = False
        try:
            self.grow(threads)
        except BaseException:  # the process may have no more: those that there are would wait for ever
            self.close(0.0)
            raise

    @property
    def size(self) -> int:
        return len(self._threads)

    def grow(self, threads: int) -> None:
        """Have at least so many threads. One caller at a time."""
        while len(self._threads) < threads:
            thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def run(
        self, calls: Sequence[Callable[[], T]], beside: Callable[[], object] = lambda: None, *, helping: bool = False
    ) -> list[T]:
        """Results of ``calls``, while the caller does ``beside``. Whatever is raised, no call runs any more then.

        ``helping``: calls that have not begun when the caller is ready are left out.
        """
        tasks = [_Task(call) for call in calls]
        try:
            for task in tasks:
                self._queue.put(task)
            beside()
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
        """Let ``calls`` run while the caller goes on. Not for callers that an interrupt may end."""
        tasks = [_Task(call) for call in calls]
        for task in tasks:
            self._queue.put(task)
        return Begun(tasks, self)

    def _end(self, tasks: Sequence[_Task[Any]]) -> None:
        """Buffers of the caller must not be touched behind his back, however often he is interrupted."""
        while True:
            try:
                for task in [task for task in tasks if not task.skip()]:
                    task.wait(self)
                return
            except BaseException:  # the first one is raised when all has ended
                continue

    def close(self, timeout: float = 5.0) -> None:
        """Wait for all threads together at most so long: those that a disk keeps end when it comes back. What has not
        begun by then ends with an OSError."""
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
    """Threads that share the work of one call with its caller; each is made when it is first needed.

    Who starts one waits until it runs: 0.1 ms, and milliseconds where all cores are busy.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._count = threads
        self._name = name
        self._pool: Pool | None = None
        self._closed = False  # then callers do it all themselves
        self._wanted = 0  # threads that calls in progress can use; too many at worst, after an interrupt
        self._lock = threading.Lock()

    def each(self, work: Callable[[Iterator[S]], T], shares: Sequence[Iterator[S]]) -> list[T]:
        """Results of ``work`` for every share, the first one in the caller's thread; in any order.

        Shares may be one and the same iterator: whoever is free takes the next item, and the result of a thread that
        came too late is missing. So are those of shares that nobody had begun when the team was closed. An interrupt
        of the caller takes all items that nobody has begun from the others.
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
        except PoolClosedError:  # of a store that was closed meanwhile, and whose disk is slow
            return done
        finally:
            with self._lock:
                self._wanted -= len(calls)

    def _started(self, threads: int) -> Pool | None:
        """The pool, with so many threads more than other calls can use; None: without threads.

        After ``close`` nobody would end them.
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
        """In a forked child: the parent's threads are not here."""
        self._pool, self._wanted = None, 0
        self._lock = threading.Lock()
