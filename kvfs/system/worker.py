"""A thread that runs the calls of others: the only one that touches LMDB and its gate, for example.

Python runs signal handlers in the main thread, between any two bytecodes: an interrupt inside a critical section left
the lock held in 13 % of 10,000 tries. So the section runs in a thread of its own, and the caller only waits for the
answer. A caller that is interrupted or out of time abandons its request: the thread skips it if it has not begun, and
finishes it if it has.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from kvfs.errors import StoreLockedError

T = TypeVar("T")
HUNG_SECONDS = 10.0  # without any CPU time, after which a call counts as hung: a working disk answers before
FIGURES_SECONDS = 2.0  # the same for a read of figures: few small files
LOOK_SECONDS = 0.25  # between two looks at the CPU time of a call
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


class _WatchedThread(threading.Thread):
    """Runs one call; ``clock`` is that of its CPU time."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(name="kvfs-call", daemon=True)
        self._call = call
        self.result: Any = None
        self.error: BaseException | None = None
        self.clock: int | None = None

    def run(self) -> None:
        self.clock = time.pthread_getcpuclockid(threading.get_ident())
        try:
            self.result = self._call()
        except BaseException as exc:  # raised in the caller
            self.error = exc

    def cpu_seconds(self) -> float | None:
        """CPU time so far; None before the thread has begun."""
        with contextlib.suppress(OSError):  # it has ended
            return time.clock_gettime(self.clock) if self.clock is not None else None
        return None


class WatchedCalls:
    """Runs calls that may take any time as long as they proceed, and that a disk may hang: each in its own thread.

    A thread that has used no CPU time for HUNG_SECONDS waits for one system call. Its caller gets StoreLockedError, and
    the call goes on when the disk answers. While one hangs others fail at once, so there are never many threads.
    """

    def __init__(self, path: str, hung_seconds: float | None = None) -> None:
        """``hung_seconds``: instead of HUNG_SECONDS."""
        self._path = path  # of the store, for messages
        self._hung_seconds = hung_seconds
        #: That run, or hang; without a lock, which an interrupt could leave held.
        self._threads: list[_WatchedThread] = []
        self._hung: list[_WatchedThread] = []

    def run(self, function: Callable[[], T], at_most: float = math.inf) -> T:
        """Result of ``function``; raises what it raised. A call by such a call runs in its thread.

        ``at_most``: seconds, after which the caller leaves even a call that proceeds. An interrupt of the caller ends
        its wait, not the call.
        """
        if isinstance(threading.current_thread(), _WatchedThread):
            return function()
        self._hung = [one for one in self._hung if one.is_alive()]
        if self._hung:
            raise self._error()
        thread = _WatchedThread(function)
        try:
            thread.start()
        except RuntimeError:  # the process may have no more threads
            return function()
        self._threads = [*(one for one in self._threads if one.is_alive()), thread]
        patience = HUNG_SECONDS if self._hung_seconds is None else self._hung_seconds
        used, begin = thread.cpu_seconds(), time.monotonic()
        since = begin
        while thread.is_alive():
            thread.join(min(LOOK_SECONDS, max(0.0, begin + at_most - time.monotonic())))
            now, last = time.monotonic(), used
            used = thread.cpu_seconds()
            since = since if used == last else now
            if (now - since >= patience or now - begin >= at_most) and thread.is_alive():
                self._hung.append(thread)
                raise self._error()
        self._threads = [one for one in self._threads if one is not thread]  # else its result would stay in memory
        if thread.error is not None:
            raise thread.error
        return thread.result  # type: ignore[no-any-return]

    def _error(self) -> StoreLockedError:
        return StoreLockedError(
            f"{self._path}: the disk has not answered for {HUNG_SECONDS:.0f} s (kvfs doctor tells more); what was "
            "begun goes on when it does: then look what is there, and try again"
        )

    def busy(self) -> bool:
        """Whether a call runs, or hangs."""
        return any(one.is_alive() for one in [*self._threads, *self._hung])

    def join(self, seconds: float) -> None:
        """Wait for calls whose callers were interrupted; not for those that hang."""
        end = time.monotonic() + seconds
        for thread in [one for one in self._threads if one not in self._hung]:
            thread.join(max(0.0, end - time.monotonic()))


class Figures:
    """Small reads of a store's files, for figures that are asked for again and again.

    A read ends within about FIGURES_SECONDS. While the disk hangs it gives what it gave last, and at once: counts that
    became 0 in between would look like a restart to whatever computes rates of them.
    """

    def __init__(self, path: str) -> None:
        self._calls = WatchedCalls(path, FIGURES_SECONDS)
        self._last: dict[str, Any] = {}  # by name of the figure

    def read(self, name: str, function: Callable[[], T], unknown: T) -> T:
        """Result of ``function``, or the last one; ``unknown`` if there is none. Raises what it raises."""
        with contextlib.suppress(StoreLockedError):
            self._last[name] = self._calls.run(function)
        return self._last.get(name, unknown)  # type: ignore[no-any-return]
