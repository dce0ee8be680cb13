"""Mutants that no test can tell, each with the reason: ``excused.toml``.

An entry names the module, the line as it stands in the source, and the line of the mutant, both without indentation.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LIST = Path(__file__).with_name("excused.toml")


class Excuse(NamedTuple):
    path: str
    line: str
    mutant: str
    why: str


@cache
def excuses() -> tuple[Excuse, ...]:
    return tuple(Excuse(**entry) for entry in tomllib.loads(LIST.read_text(encoding="utf-8")).get("mutant", ()))


def excused(path: str, diff: str) -> str | None:
    """Why no test can tell this mutant, or None if one should."""
    before, after = changed_lines(diff)
    found = (e.why for e in excuses() if (e.path, e.line, e.mutant) == (path, before, after))
    return next(found, None)


def changed_lines(diff: str) -> tuple[str, str]:
    """What a diff takes out and puts in, lines joined by a space, without indentation."""
    lines = [line for line in diff.splitlines() if not line.startswith(("---", "+++"))]
    taken, put = ([line[1:].strip() for line in lines if line.startswith(sign)] for sign in "-+")
    return " ".join(taken), " ".join(put)
