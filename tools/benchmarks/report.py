"""Tables for people, JSON for programs; both from the same rows."""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import click

from kvfs.version import __version__
from tools.benchmarks.measure import Sample, Spread

Value: TypeAlias = "str | int | float | bool | Spread | None"


@dataclass
class Table:
    """Rows under one title; a column is named by its first row. ``notes`` stand below the table."""

    title: str
    rows: list[dict[str, Value]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, **values: Value) -> None:
        self.rows.append({name.replace("_", " "): value for name, value in values.items()})

    def text(self) -> str:
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        cells = [names, *([_cell(row.get(name)) for name in names] for row in self.rows)]
        widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
        left = [all(isinstance(row.get(name), str) for row in self.rows) for name in names]
        lines = [
            "  ".join(c.ljust(w) if to_left else c.rjust(w) for c, w, to_left in zip(line, widths, left, strict=True))
            for line in cells
        ]
        lines.insert(1, "  ".join("-" * width for width in widths))
        notes = [f"  {note}" for note in self.notes]
        return "\n".join([self.title, *(line.rstrip() for line in lines), *notes, ""])


def _cell(value: Value) -> str:
    if isinstance(value, Spread):
        return f"{_number(value.middle)} [{_number(value.low)} {_number(value.high)}]"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return _number(value)
    return "" if value is None else str(value)


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 0.1 else f"{value:.2f}"


def rates(ours: Sequence[Sample]) -> dict[str, Value]:
    """The columns that every row about moved bytes has."""
    return {
        "GB/s": Spread.of([s.gb_per_second for s in ours]),
        "cpu s/GB": Spread.of([s.cpu_seconds_per_gb for s in ours]),
    }


def cached_share(samples: Sequence[Sample]) -> str:
    """Least share of the bytes that the page cache held when the clock started."""
    shares = [s.cached for s in samples if s.cached is not None]
    return f"{min(shares):.0%}..{max(shares):.0%}" if shares else "-"


class Report:
    """Prints each table when it is made, and keeps it for the JSON file."""

    def __init__(self, command: str, options: dict[str, Value], json_path: Path | None) -> None:
        self._json_path = json_path
        self._tables: list[Table] = []
        self._head = {"benchmark": command, "options": options, "machine": machine()}
        facts = ", ".join(f"{name} {value}" for name, value in machine().items())
        click.echo(f"kvfs {command}: {', '.join(f'{k} {_cell(v)}' for k, v in options.items())}\n{facts}")
        click.echo("a [b c]: median a, least b, most c of all rounds\n")

    def show(self, table: Table) -> None:
        self._tables.append(table)
        click.echo(table.text())

    def save(self) -> None:
        if self._json_path is None:
            return
        tables = [{"title": t.title, "rows": [_plain(r) for r in t.rows], "notes": t.notes} for t in self._tables]
        self._json_path.write_text(json.dumps({**self._head, "tables": tables}, indent=1) + "\n", encoding="utf-8")


def _plain(row: dict[str, Value]) -> dict[str, object]:
    """A row with spreads as objects, and null for values that are not finite."""
    return {name: _plain_value(value) for name, value in row.items()}


def _plain_value(value: Value) -> object:
    if isinstance(value, Spread):
        return {"min": value.low, "median": value.middle, "max": value.high}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def machine() -> dict[str, Value]:
    """Facts that a reader needs to compare figures."""
    return {
        "kvfs": __version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()
