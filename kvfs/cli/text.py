"""Numbers, times and tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_AGES = ((604_800, "w"), (86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


class Heading(str):
    """The first line of a table; bold on a terminal."""


def size(nbytes: float) -> str:
    """``116.5 GiB``."""
    unit = 0
    while abs(nbytes) >= 1024 and unit < len(_UNITS) - 1:
        nbytes, unit = nbytes / 1024, unit + 1
    return f"{nbytes:.0f} B" if unit == 0 else f"{nbytes:.1f} {_UNITS[unit]}"


def count(n: int) -> str:
    """``53,000``."""
    return f"{n:,}"


def seconds(value: float) -> str:
    """``3 d``, ``2 s``: in the largest unit of which there is at least one."""
    for length, unit in _AGES:
        if value >= length:
            return f"{value / length:.0f} {unit}"
    return "0 s"


def age(at_us: int, now_us: int) -> str:
    """``2 s ago``, or ``never``."""
    return f"{seconds(max(0, now_us - at_us) / 1e6)} ago" if at_us else "never"


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def bar(part: float, whole: float, width: int = 20) -> str:
    full = min(width, round(width * part / whole)) if whole else 0
    return f"[{'#' * full}{'.' * (width - full)}]"


def printable(text: str) -> str:
    """Without control sequences: names come from untrusted files, and the result may go to a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], right: str = "") -> list[str]:
    """Aligned columns below a ``Heading``; ``right`` has an r at the position of each right-aligned column."""
    cells = [list(heads), *(list(row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(heads))]
    lines = []
    for row in cells:
        parts = [
            c.rjust(w) if i < len(right) and right[i] == "r" else c.ljust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(parts).rstrip())
    return [Heading(lines[0]), *lines[1:]]


def pairs(items: Iterable[tuple[str, str]]) -> list[str]:
    """A name and a value per line, the values aligned."""
    listed = list(items)
    width = max((len(name) for name, _ in listed), default=0)
    return [f"{name.ljust(width)}  {value}".rstrip() for name, value in listed]
