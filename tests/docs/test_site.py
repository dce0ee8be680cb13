"""The site of the documentation: its navigation, the links of its pages, and the reference of the code."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvfs
from tools import docs_site

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def config() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: pip install pyyaml")
    document: dict[str, Any] = yaml.safe_load((ROOT / ".mkdocs.yml").read_text(encoding="utf-8"))
    return document


def entries(nav: list[Any]) -> list[str]:
    """The pages of a navigation, in order."""
    pages: list[str] = []
    for entry in nav:
        pages += [entry] if isinstance(entry, str) else [p for some in entry.values() for p in entries(some)]
    return pages


def test_the_navigation_names_every_page_once() -> None:
    """The decisions are listed by their own page."""
    pages = {str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md") if not p.match("decisions/0*.md")}
    named = entries(config()["nav"])
    assert sorted(named) == sorted({*pages, *docs_site.TOP_PAGES, docs_site.REFERENCE})


def test_the_page_of_decisions_lists_each() -> None:
    listed = (DOCS / "decisions" / "README.md").read_text(encoding="utf-8")
    pages = sorted(p.name for p in (DOCS / "decisions").glob("0*.md"))
    assert pages and [name for name in pages if f"({name})" not in listed] == []


def test_every_exported_name_is_in_the_reference() -> None:
    text = docs_site.reference()
    names = [name for name in kvfs.__all__ if not name.startswith("__")]
    assert len(names) > 30 and [name for name in names if f"\n::: kvfs.{name}\n" not in text] == []
    for module in docs_site.SECTIONS.values():
        assert importlib.util.find_spec(module) is not None


@pytest.mark.parametrize(
    ("page", "link", "there"),
    [
        ("README.md", "[a](docs/vllm.md#models)", "[a](vllm.md#models)"),
        ("README.md", "![a](docs/img/first-token.svg)", "![a](img/first-token.svg)"),
        ("README.md", "[a](SECURITY.md)", "[a](SECURITY.md)"),
        ("api.md", "[a](../SECURITY.md)", "[a](SECURITY.md)"),
        ("api.md", "[a](#store) [b](glossary.md)", "[a](#store) [b](glossary.md)"),
        ("decisions/0019-locks-of-readers.md", "[a](../../SECURITY.md)", "[a](../SECURITY.md)"),
        ("decisions/0013-vllm.md", "[a](../benchmarks.md)", "[a](../benchmarks.md)"),
        ("mount.md", "([manifest.py](../kvfs/mount/manifest.py) has)", "(manifest.py has)"),
        ("api.md", "[a](../missing.py)", "[a](../missing.py)"),
        ("api.md", "[a](https://example.org/b)", "[a](https://example.org/b)"),
    ],
)
def test_links_of_the_repository_become_those_of_the_site(page: str, link: str, there: str) -> None:
    assert docs_site.with_site_links(link, page) == there


def test_the_site_builds_with_every_link(tmp_path: Path) -> None:
    for module in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(module, reason=f"{module} is not installed: make docs has it")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", ".mkdocs.yml", "-d", tmp_path / "site"],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False, stdin=subprocess.DEVNULL,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    reference = (tmp_path / "site" / "reference.html").read_text(encoding="utf-8")
    assert [name for name in kvfs.__all__ if not name.startswith("__") and f'id="kvfs.{name}"' not in reference] == []
