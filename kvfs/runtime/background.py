"""The background thread of an open store: upkeep that no call should wait for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import NamedTuple

from kvfs.context import Context
from kvfs.errors import IndexUnavailableError

log = logging.getLogger("kvfs")
TICK_SECONDS = 0.25


class Chore(NamedTuple):
    """Something to do every ``every`` seconds, for the first time ``after`` so many."""

    name: str
    every: float
    run: Callable[[], None]
    after: float = 0.0


class Keeper:
    """Runs chores until stopped. A chore that fails is counted and tried again at its next turn."""

    def __init__(self, context: Context, chores: list[Chore]) -> None:
        self._c = context
        self._chores = chores
        begin = context.files.monotonic()
        self._due = {chore.name: begin + chore.after for chore in chores}
        self._ran: dict[str, float] = {}
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="kvfs-keeper", daemon=True)
        self._thread.start()

    def add(self, chores: list[Chore]) -> None:
        """More of them, from now on."""
        now = self._c.files.monotonic()
        self._due |= {chore.name: now + chore.after for chore in chores}
        self._chores += chores  # the loop may be going through them: it comes to these, too

    def nudge(self, name: str) -> None:
        """Do a chore at once; if it was done just now, with the next tick: others may cause any number of nudges."""
        if name in self._due:
            self._due[name] = 0.0
            if self._c.files.monotonic() - self._ran.get(name, -TICK_SECONDS) >= TICK_SECONDS:
                self._wake.set()

    def _loop(self) -> None:
        while not self._stopping:
            for chore in self._chores:
                if self._stopping:
                    break
                now = self._c.files.monotonic()
                if now >= self._due[chore.name]:
                    self._ran[chore.name] = now
                    self._due[chore.name] = now + chore.every
                    self._run(chore)
            self._wake.wait(TICK_SECONDS)
            self._wake.clear()

    def _run(self, chore: Chore) -> None:
        try:
            chore.run()
        except (OSError, IndexUnavailableError) as exc:
            self._c.counters.add(f"chore_{chore.name}_failed")
            log.debug("chore %s: %s", chore.name, exc)
        except Exception:  # a bug must not end the upkeep silently
            self._c.counters.add(f"chore_{chore.name}_crashed")
            log.exception("kvfs chore %s crashed", chore.name)

    def stop(self, timeout: float = 10.0) -> None:
        self._stopping = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)
