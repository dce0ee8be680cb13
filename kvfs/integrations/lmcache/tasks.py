"""Tasks that always end: queues of work with a bound, threads and deadlines.

LMCache locks memory until a task has a result, so a task must end even if a disk never answers. Work that moves bytes
between the task's memory and memory of the adapter does so inside of ``Task.alive``. A task that has ended is alive no
more: from its result on, its memory is not touched.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from kvfs.errors import KvfsError

log = logging.getLogger("lmcache.kvfs")
R = TypeVar("R")
QUEUE_MAX = 1024  # tasks of one queue that wait for a thread; LMCache has at most tens under way


class Task(Generic[R]):
    """One task. ``value`` is its result if it ended now; work replaces it inside of ``alive``."""

    def __init__(self, number: int, work: Callable[[Task[R]], None], value: R, deadline: float) -> None:
        self.number, self.work, self.value, self.deadline = number, work, value, deadline
        self._lock = threading.Lock()  # held for copies in memory, never while a disk is waited for
        self._ended = False

    @contextmanager
    def alive(self) -> Iterator[bool]:
        """Whether the task has not ended; it does not end inside of the block."""
        with self._lock:
            yield not self._ended

    def end(self) -> bool:
        """End the task; False if it had ended."""
        with self._lock:
            first, self._ended = not self._ended, True
            return first


class TaskQueue(Generic[R]):
    """Owns the threads that run tasks, and the results until they are taken. Thread-safe.

    ``seconds``: a task has that long from its submission on; ``sweep`` ends it then with the value that it has.
    ``notify`` is called for each task that has ended.
    """

    def __init__(self, name: str, threads: int, seconds: float, notify: Callable[[], object]) -> None:
        self._name, self._seconds, self._notify = name, seconds, notify
        self._changed = threading.Condition()
        self._waiting = deque[Task[R]]()
        self._running = set[Task[R]]()
        self._results = dict[int, R]()
        self._count = 0
        self._closed = False
        self._threads = [
            threading.Thread(target=self._loop, name=f"kvfs-{name}-{n}", daemon=True) for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[Task[R]], None], value: R) -> int:
        """Have ``work`` run. ``value`` is the result of a task that ends before it set another one.

        A task that finds the queue full or closed ends at once.
        """
        with self._changed:
            task = Task(self._count, work, value, time.monotonic() + self._seconds)
            self._count += 1
            accepted = not self._closed and len(self._waiting) < QUEUE_MAX
            if accepted:
                self._waiting.append(task)
                self._changed.notify()
        if not accepted:
            log.warning("kvfs: a %s task was refused, %d wait for a thread", self._name, QUEUE_MAX)
            self._end(task)
        return task.number

    def take(self, number: int) -> R | None:
        """The result of a task that has ended, once; None otherwise."""
        with self._changed:
            return self._results.pop(number, None)

    def take_all(self) -> dict[int, R]:
        """The results of all tasks that have ended since the last call."""
        with self._changed:
            taken, self._results = self._results, {}
            return taken

    def sweep(self) -> None:
        """End the tasks whose time is over, with what they have. Waits for copies in memory only."""
        now = time.monotonic()
        with self._changed:
            late = [task for task in (*self._waiting, *self._running) if now >= task.deadline]
            self._waiting = deque(task for task in self._waiting if now < task.deadline)
        for task in late:
            if self._end(task):
                log.warning("kvfs: a %s task took longer than %s s and was given up", self._name, self._seconds)

    def close(self, seconds: float) -> None:
        """End all tasks: those that run have ``seconds`` for it. A thread that waits for a disk ends with that wait."""
        with self._changed:
            self._closed = True
            left = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        for task in left:
            self._end(task)
        with self._changed:
            self._changed.wait_for(lambda: not self._running, seconds)
            left = list(self._running)
        for task in left:
            self._end(task)

    def _end(self, task: Task[R]) -> bool:
        if not task.end():
            return False
        with self._changed:
            self._results[task.number] = task.value
        self._notify()
        return True

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                task = self._waiting.popleft()
                self._running.add(task)
            try:
                task.work(task)
            except KvfsError as exc:  # bad input, such as an object that is larger than a segment
                log.warning("kvfs: a %s task failed: %s", self._name, exc)
            except Exception:  # a bug: the task ends like any other
                log.exception("kvfs: a %s task failed", self._name)
            self._end(task)
            with self._changed:
                self._running.discard(task)
                self._changed.notify_all()
            del task  # its memory must not live until the next one
