"""The background thread of an open store: upkeep that no call should wait for."""

from __future__ import annotations

import logging
import threading

from kvfs.context import Context
from kvfs.errors import IndexUnavailableError
from kvfs.runtime.background_tasks import PeriodicTask

log = logging.getLogger("kvfs")
TICK_SECONDS = 0.25  # how late a task may start


class BackgroundScheduler:
    """Runs tasks in one thread until stopped. A task that fails is counted and runs again at its next turn."""

    def __init__(self, context: Context, tasks: list[PeriodicTask]) -> None:
        self._c = context
        self._tasks = tasks
        begin = context.files.monotonic()
        self._due = {task.name: begin + task.after for task in tasks}
        self._ran: dict[str, float] = {}
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="kvfs-background", daemon=True)
        self._thread.start()

    def add(self, tasks: list[PeriodicTask]) -> None:
        """Run these, too, from now on."""
        now = self._c.files.monotonic()
        self._due |= {task.name: now + task.after for task in tasks}
        self._tasks += tasks  # the loop may be iterating over the list: it reaches the new ones, too

    def wake(self, name: str) -> None:
        """Run a task at once, or in the next tick if it has just run: other processes can cause any number of hints."""
        if name in self._due:
            self._due[name] = 0.0
            if self._c.files.monotonic() - self._ran.get(name, -TICK_SECONDS) >= TICK_SECONDS:
                self._wake.set()

    def _loop(self) -> None:
        while not self._stopping:
            for task in self._tasks:
                if self._stopping:
                    break
                now = self._c.files.monotonic()
                if now >= self._due[task.name]:
                    self._ran[task.name] = now
                    self._due[task.name] = now + task.every
                    self._run(task)
            self._wake.wait(TICK_SECONDS)
            self._wake.clear()

    def _run(self, task: PeriodicTask) -> None:
        try:
            task.run()
        except (OSError, IndexUnavailableError) as exc:
            self._c.counters.add(f"task_{task.name}_failed")
            log.debug("task %s: %s", task.name, exc)
        except Exception:  # a bug must not end the upkeep silently
            self._c.counters.add(f"task_{task.name}_crashed")
            log.exception("kvfs task %s crashed", task.name)

    def stop(self, timeout: float = 10.0) -> None:
        self._stopping = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def is_running(self) -> bool:
        """Whether a task goes on in its thread, behind the deadline of ``stop``."""
        return self._thread.is_alive() and threading.current_thread() is not self._thread
