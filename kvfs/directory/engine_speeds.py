"""How fast engines compute the prompts of each namespace, as those that stored them have measured it.

An engine that starts has computed nothing yet, and must decide whether a cold disk is worth waiting for.
``run/engines`` has the last measurement of each of the ENGINES_MAX namespaces that were measured last. It is advice: no
call raises for a file system that fails.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any

from kvfs.directory.root import Directory
from kvfs.directory.slot_file import SLOT_BYTES_MIN, SlotFile

ENGINES_MAX = 32
TOKENS_PER_SECOND_MAX = 100_000_000
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")


class EngineSpeeds:
    """The file of one store. Any thread may use it."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._file = SlotFile(directory, "engines", SLOT_BYTES_MIN)

    def read(self, digest: bytes) -> int | None:
        """Tokens per second; None if no engine has told."""
        with contextlib.suppress(OSError):
            found = _entries(self._file.read()).get(digest.hex())
            return found[0] if found is not None else None
        return None

    def note(self, digest: bytes, tokens_per_second: float) -> None:
        """An engine computes so many tokens of this namespace per second."""
        if self._directory.read_only:
            return
        now_us, speed = self._directory.files.now_us(), min(max(1, round(tokens_per_second)), TOKENS_PER_SECOND_MAX)

        def change(body: dict[str, Any], _: int) -> dict[str, Any]:
            mine, others = digest.hex(), _entries(body)
            entries = {mine: (speed, now_us), **{name: value for name, value in others.items() if name != mine}}
            # of equal times the first stays: those of a clock that was ahead do not keep this one out
            latest = sorted(entries, key=lambda name: min(entries[name][1], now_us), reverse=True)[:ENGINES_MAX]
            return {"engines": {name: entries[name] for name in latest}}

        with contextlib.suppress(OSError):
            self._file.update(change)


def _entries(body: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Digest -> (tokens per second, when); whatever else a damaged file holds is left out."""
    found = body.get("engines")
    items = list(found.items())[:ENGINES_MAX] if isinstance(found, dict) else []
    return {name: (value[0], value[1]) for name, value in items if _DIGEST.match(name) and _is_entry(value)}


def _is_entry(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(type(n) is int and n >= 0 for n in value)
        and 1 <= value[0] <= TOKENS_PER_SECOND_MAX
        and value[1] < 1 << 62
    )
