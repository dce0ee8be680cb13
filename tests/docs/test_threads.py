"""The table of threads in docs/architecture.md names every thread that the source starts, and no other."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Names as they are given to threads and pools; JobThreads and TaskQueue put the prefix and a number around theirs.
WHOLE = re.compile(
    r"(?:name=f?|thread_name_prefix=|Executor\([^\"\n]*, |\bPool\(\w+, |Team\([^\"\n]*, |Worker\()"
    r"\"(kvfs-[a-z]+(?:-[a-z]+)*)"
)
PARTS = re.compile(r"(?:JobThreads|TaskQueue\[\w+\])\(\"([a-z]+(?:-[a-z]+)*)\"")


def started() -> set[str]:
    found: set[str] = set()
    for file in (ROOT / "kvfs").rglob("*.py"):
        source = file.read_text(encoding="utf-8")
        found |= set(WHOLE.findall(source)) | {f"kvfs-{name}" for name in PARTS.findall(source)}
    return found


def listed() -> set[str]:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = text[text.index("## Threads of a process") :].splitlines()
    return {
        re.sub(r"-(?:n|0)\Z", "", name)
        for row in rows if row.startswith("| `kvfs-")
        for name in re.findall(r"`(kvfs-[a-z0-9-]+)`", row.split("|")[1])
    }  # fmt: skip


def test_every_thread_is_in_the_table_and_no_other() -> None:
    assert len(started()) > 30
    assert started() == listed()
