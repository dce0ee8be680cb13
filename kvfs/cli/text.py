"""Numbers, times and tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvfs.directory.sizes import size as size

PROBLEMS_SHOWN = 20  # lines of a report's problems; --json has all
COLUMN_MIN = 12  # characters that a shortened column keeps: an id is still recognized
_DOTS = "..."
_AGES = ((604_800, "w"), (86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


class Heading(str):
    """The first line of a table; bold on a terminal."""


class Marked(str):
    """A line whose first ``end`` characters are a mark; in ``color`` on a terminal."""

    end: int
    color: str

    def __new__(cls, line: str, end: int, color: str) -> Marked:
        self = super().__new__(cls, line)
        self.end, self.color = end, color
        return self


def count(n: int) -> str:
    """``53,000``."""
    return f"{n:,}"


def pages(n: float) -> str:
    return f"{count(round(n))} pages"


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
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def shortened(word: str, width: int) -> str:
    """``word`` in at most ``width`` characters: the middle is left out, since names differ at their ends."""
    if len(word) <= width:
        return word
    kept = max(0, width - len(_DOTS))
    tail = kept // 2
    return word[: kept - tail] + _DOTS[:width] + word[len(word) - tail :]


def table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], columns: str = "", width: int | None = None
) -> list[str]:
    """Aligned columns below a ``Heading``; ``columns`` has a letter for each: r, right-aligned; f, left-aligned.

    ``width``: of a terminal; the widest of the columns without these letters, which hold names, are shortened until a
    row fits, but not below COLUMN_MIN.
    """
    cells = [heads, *rows]
    letters = columns.ljust(len(heads))
    across = list(zip(*cells, strict=True))
    widths = [max(map(len, column)) for column in across]
    excess = sum(widths) + 2 * (len(widths) - 1) - width if width is not None else 0
    while excess > 0:
        widest = max(range(len(widths)), key=lambda i: (letters[i] not in "rf", widths[i]))
        if letters[widest] in "rf" or widths[widest] <= max(COLUMN_MIN, len(heads[widest])):
            break
        widths[widest] -= 1
        excess -= 1
    fitting = [
        column if max(map(len, column)) <= wide else tuple(shortened(cell, wide) for cell in column)
        for wide, column in zip(widths, across, strict=True)
    ]
    row = "  ".join(f"%{'' if letter == 'r' else '-'}{wide}s" for letter, wide in zip(letters, widths, strict=False))
    lines = [(row % cells).rstrip() for cells in zip(*fitting, strict=True)]
    return [Heading(lines[0]), *lines[1:]]


def pairs(items: Iterable[tuple[str, str]]) -> list[str]:
    """A name and a value per line, the values aligned."""
    listed = list(items)
    width = max((len(name) for name, _ in listed), default=0)
    return [f"{name.ljust(width)}  {value}".rstrip() for name, value in listed]
