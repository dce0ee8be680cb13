"""What a check of the doctor found."""

from __future__ import annotations

from typing import Any, NamedTuple

OK, WARN, BAD = "ok", "warn", "bad"


class Finding(NamedTuple):
    """One check: its name, ok / warn / bad, what was seen, what to do ("" if nothing)."""

    check: str
    status: str
    detail: str
    remedy: str = ""
    data: dict[str, Any] = {}  # noqa: RUF012 - never changed
