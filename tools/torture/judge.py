"""Counts and findings of a torture run, and its verdict."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import click

from kvfs.errors import KvfsError
from tools.torture.times import Times

T = TypeVar("T")
BLOCKED_SECONDS = 15.0  # no call may take longer, even with failing files and dying processes
COUNTS = ("operations", "kills", "faults", "lost", "wrong", "blocked", "raised", "leaked", "unopenable", "over")
FAILURES = frozenset(COUNTS[3:])


@dataclass
class Judge:
    """Counts, and the first few findings in words. Thread-safe enough for counting."""

    counts: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    context: str = ""  # prepended to notes: the seed and the case at hand
    delayed: Callable[[], float] = lambda: 0.0  # seconds by which this process was delayed on purpose, so far
    stops: bool = False  # ``delayed`` counts stops of the whole process, which no deadline can end
    fault: str = "no fault"  # the kind of fault at hand: calls are timed for each
    times: Times = field(default_factory=Times)

    def found(self, what: str, text: str, n: int = 1) -> None:
        """Count a failure and note its description."""
        self.counts[what] += n
        if len(self.notes) < 40:
            self.notes.append(f"{what}: {self.context}{text}")

    def call(self, name: str, function: Callable[[], T], *, may_raise: bool = False) -> T | None:
        """Run one public call. It may raise KvfsError only, and only if it opens or manages a store."""
        self.counts["operations"] += 1
        start, delayed = time.monotonic(), self.delayed()
        try:
            return function()
        except KvfsError as exc:
            if not may_raise:
                self.found("raised", f"{name}: {exc!r}")
        except Exception as exc:
            self.found("raised", f"{name}: {exc!r}")
        finally:
            took = time.monotonic() - start
            if may_raise or self.stops:  # gc, verify: no deadline; puts, matches and loads have one
                took -= self.delayed() - delayed
            self.times.add(self.fault, name, max(took, 0.0))
            if took > BLOCKED_SECONDS:
                self.found("blocked", f"{name} took {took:.1f} s")
        return None

    def merge(self, counts: dict[str, int], notes: list[str], times: dict[str, Any] | None = None) -> None:
        self.counts.update(counts)
        self.times.merge(times or {})
        self.notes += notes[: max(0, 40 - len(self.notes))]

    @property
    def failed(self) -> bool:
        return any(self.counts[name] for name in FAILURES)

    def line(self, **more: Any) -> str:
        """The summary."""
        shown = {name: self.counts[name] for name in COUNTS} | more
        return " ".join(f"{name}={value}" for name, value in shown.items())

    def finish(self, **more: Any) -> None:
        """Print findings and the summary line; exit status 1 if anything failed."""
        for note in self.notes:
            click.echo(note, err=True)
        for line in self.times.lines():
            click.echo(line)
        click.echo(self.line(**more))
        if self.failed:
            raise SystemExit(1)


def open_files() -> dict[str, str]:
    """Descriptors of this process and their targets."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue  # the listing's own descriptor
    return found


def kvfs_threads() -> list[threading.Thread]:
    """Running threads of kvfs."""
    return [t for t in threading.enumerate() if t.name.startswith("kvfs-")]
