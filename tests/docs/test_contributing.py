"""Files that CONTRIBUTING.md and docs/walkthrough.md name exist, and so do the names that they quote from them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "docs" / "walkthrough.md"]
CODE = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"(?:kvfs|tests|tools|docs)/[\w/.]*\w\.(?:py|md|svg)|(?:kvfs|tests|tools)/[\w/]*")
NAME = re.compile(r"_?[A-Za-z]\w*")


def paragraphs(page: Path) -> list[str]:
    """Rows of tables, one by one, and paragraphs."""
    blocks = re.split(r"\n\n", page.read_text(encoding="utf-8"))
    return [part for block in blocks for part in (block.splitlines() if block.startswith("|") else [block])]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    found = [code for code in CODE.findall(page.read_text(encoding="utf-8")) if FILE.fullmatch(code)]
    assert found, f"{page.name} names no file"
    missing = [name for name in found if not (ROOT / name).exists()]
    assert not missing, f"{page.name} names {missing}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_names_in_brackets_behind_a_file_are_in_that_file(page: Path) -> None:
    """`kvfs/context.py` (`LOOKUP_SECONDS`), and `live_in` of `kvfs/index/session.py`."""
    missing: list[str] = []
    for text in paragraphs(page):
        pairs = [
            *re.findall(r"`([\w/.]+\.py)` \(((?:`\w+`(?:, )?)+)", text),
            *((file, name) for name, file in re.findall(r"(`\w+`) of `([\w/.]+\.py)`", text)),
            *re.findall(r"\(`([\w/.]+\.py)`, (`\w+`)", text),
        ]
        for file, names in pairs:
            source = (ROOT / file).read_text(encoding="utf-8")
            missing += [f"{name} in {file}" for name in NAME.findall(names) if not re.search(rf"\b{name}\b", source)]
    assert not missing, f"{page.name}: {missing}"


def test_ten_questions_are_answered_by_paths() -> None:
    text = PAGES[0].read_text(encoding="utf-8")
    rows = [line for line in text[text.index("## Ten questions") :].splitlines() if line.startswith("| W")]
    assert len(rows) == 10
    assert all(FILE.fullmatch(CODE.findall(row.split("|")[2])[0]) for row in rows)
