"""The table of planted bugs in docs/reliability.md is that of ``tools/mutations.py``.

KVFS_REFRESH_DOCS=1 writes the table into the page.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from tools.mutations import MUTATIONS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
TABLE = re.compile(r"(?<=\| tests \| notice \|\n\|---\|---\|\n)(?:\|.*\n)*")


def rows() -> str:
    """One row for each file or folder of tests: the names of the bugs that it notices."""
    noticed: dict[str, list[str]] = {}
    for mutation in MUTATIONS:
        noticed.setdefault(mutation.tests[0].partition("::")[0], []).append(mutation.name)
    return "".join(f"| `{tests}` | {'; '.join(sorted(names))} |\n" for tests, names in sorted(noticed.items()))


def test_the_planted_bugs_are_those_of_the_list() -> None:
    text = PAGE.read_text(encoding="utf-8")
    found = TABLE.search(text)
    assert found is not None, f"{PAGE.name} has no table of planted bugs"
    if os.environ.get("KVFS_REFRESH_DOCS") == "1":
        PAGE.write_text(text[: found.start()] + rows() + text[found.end() :], encoding="utf-8")
    else:
        assert found[0] == rows(), "run the tests of tests/docs with KVFS_REFRESH_DOCS=1"
