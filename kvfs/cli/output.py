"""The only module that writes: results to stdout as text, JSON or ids; notes, errors and progress to stderr."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import click

from kvfs.cli import text

PROGRESS_SECONDS = 0.2  # between two draws of a progress bar


class Output:
    """Where a command writes. ``result`` is called once, at the end."""

    def __init__(self) -> None:
        self.json = False
        self.quiet = False
        self._drawn = False

    @property
    def color(self) -> bool:
        """Whether stdout is a terminal and NO_COLOR is unset or empty."""
        return sys.stdout.isatty() and not os.environ.get("NO_COLOR")

    def result(self, data: dict[str, Any], lines: Callable[[], Iterable[str]], ids: Iterable[str] = ()) -> None:
        """Print a result: ``data`` with --json, ``ids`` with -q, else the lines."""
        self.clear()
        if self.json:
            click.echo(json.dumps(data, indent=2))
        else:
            for line in ids if self.quiet else lines():
                bold = self.color and isinstance(line, text.Heading)
                click.echo(click.style(line, bold=True) if bold else text.printable(line))

    def note(self, message: str) -> None:
        """Information for people that scripts do not need."""
        if not self.quiet:
            self.clear()
            click.echo(f"kvfs: {text.printable(message)}", err=True)

    def error(self, message: str, code: int) -> None:
        self.clear()
        if self.json:
            click.echo(json.dumps({"error": {"exit_code": code, "message": message}}), err=True)
        else:
            click.echo(f"kvfs: {text.printable(' '.join(message.split()))}", err=True)

    def confirm(self, question: str, *, yes: bool) -> None:
        """Ask before data is destroyed. UsageError without a terminal, unless ``yes``."""
        if yes:
            return
        if not sys.stdin.isatty():
            raise click.UsageError("this destroys data, and without a terminal no question can be asked: pass --yes")
        self.clear()
        if not click.confirm(text.printable(question), err=True):
            raise click.ClickException("nothing was changed")

    # -- progress ----------------------------------------------------------------------------

    def progress(self, what: str, total: int) -> Progress:
        return Progress(self, what, total)

    def draw(self, line: str) -> None:
        """A line that the next one replaces; only on a terminal."""
        if sys.stderr.isatty() and not self.quiet:
            sys.stderr.write(f"\r\033[K{text.printable(line[:200])}")
            sys.stderr.flush()
            self._drawn = True

    def clear(self) -> None:
        if self._drawn:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
            self._drawn = False


class Progress:
    """A progress bar: amount done of ``total``, rate and time left. ``unit`` formats an amount."""

    def __init__(self, output: Output, what: str, total: int, unit: Callable[[float], str] = text.size) -> None:
        self._output = output
        self._what = what
        self._unit = unit
        self.total = total
        self._began = self._shown = time.monotonic()

    def __call__(self, done: int) -> None:
        now = time.monotonic()
        if now - self._shown < PROGRESS_SECONDS:
            return
        self._shown = now
        rate = done / max(1e-9, now - self._began)
        left = text.seconds((self.total - done) / rate) if rate and self.total >= done else "?"
        share = f"{text.bar(done, self.total)} {text.percent(done, self.total)}"
        self._output.draw(f"{self._what} {share}  {self._unit(done)}  {self._unit(rate)}/s  {left} left")


def shown(output: Output, what: str, unit: Callable[[float], str] = text.size) -> Callable[[int, int], None]:
    """A callback (done, total) that creates its bar at the first call, when the total is known."""
    bars: list[Progress] = []

    def show(done: int, total: int) -> None:
        if not bars:
            bars.append(Progress(output, what, total, unit))
        bars[0](done)

    return show
