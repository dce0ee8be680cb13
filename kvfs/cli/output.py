"""The only module that writes: results to stdout as text, JSON or ids; notes, errors and progress to stderr."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import click

from kvfs.cli import text

PROGRESS_SECONDS = 0.2  # between two draws of a progress bar


class Output:
    """Where a command writes. ``result`` is called once, at the end."""

    def __init__(self) -> None:
        self.json = False
        self.quiet = False
        self.truncate = True
        self._drawn = False

    @property
    def color(self) -> bool:
        """Whether stdout is a terminal and NO_COLOR is unset or empty."""
        return sys.stdout.isatty() and not os.environ.get("NO_COLOR")

    @property
    def width(self) -> int | None:
        """Characters of a line of the terminal; None where tables are printed in full."""
        return terminal_size()[0] if self.truncate and sys.stdout.isatty() else None

    def result(self, data: dict[str, Any], lines: Callable[[], Iterable[str]], ids: Iterable[str] = ()) -> None:
        """Print a result: ``data`` with --json, ``ids`` with -q, else the lines."""
        self.clear()
        if self.json:
            click.echo(json.dumps(data, indent=2))
        else:
            color = self.color  # asked once: a listing may have 100,000 lines
            shown = [self._styled(line, None, color) for line in (ids if self.quiet else lines())]
            if shown:
                click.echo("\n".join(shown))  # at once: each call flushes

    def styled(self, line: str, columns: int | None = None) -> str:
        """A line for stdout: printable, cut to ``columns``, and on a terminal with its colours."""
        return self._styled(line, columns, self.color)

    def _styled(self, line: str, columns: int | None, color: bool) -> str:
        text_ = text.printable(line)[:columns]
        if not color:
            return text_
        if isinstance(line, text.Heading):
            return click.style(text_, bold=True)
        if isinstance(line, text.Marked):  # the mark is never cut: it begins the line
            return click.style(text_[: line.end], fg=line.color, bold=True) + text_[line.end :]
        return text_

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

    @contextlib.contextmanager
    def screen(self) -> Iterator[Screen]:
        """Of a command that shows samples until it is interrupted."""
        screen = Screen(self)
        try:
            yield screen
        finally:
            screen.close()

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


class Screen:
    """Samples: redrawn on a terminal, one line each in a pipe, one JSON object per line with --json."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._redraws = sys.stdout.isatty() and not (output.json or output.quiet)
        if self._redraws:
            sys.stdout.write("\033[?1049h\033[?25l")  # the alternate screen, without a cursor

    def draw(self, data: dict[str, Any], line: str, frame: Callable[[], Iterable[str]]) -> None:
        if self._output.json:
            click.echo(json.dumps(data))
        elif not self._redraws:
            click.echo(text.printable(line))
        else:
            columns, lines = terminal_size()
            rows = [self._output.styled(row, columns) for row in frame()][: max(1, lines - 1)]
            sys.stdout.write("\033[H" + "".join(f"{row}\033[K\n" for row in rows) + "\033[J")
        sys.stdout.flush()

    def close(self) -> None:
        if self._redraws:
            sys.stdout.write("\033[?25h\033[?1049l")
            sys.stdout.flush()


def terminal_size() -> tuple[int, int]:
    """(columns, rows) of the terminal; $COLUMNS and $LINES come first, as in other tools."""
    try:
        found = os.get_terminal_size(sys.stdout.fileno())
    except (OSError, ValueError):
        found = os.terminal_size((80, 24))
    sizes = [os.environ.get(name, "") for name in ("COLUMNS", "LINES")]
    columns, rows = (
        int(size) if size.isascii() and size.isdigit() and 0 < int(size) < 10_000 else seen or default
        for size, seen, default in zip(sizes, found, (80, 24), strict=True)
    )
    return columns, rows


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
