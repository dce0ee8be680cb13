"""Hook of the documentation site (``.mkdocs.yml``): what the site has besides ``docs/``, and its links.

MkDocs reads one folder, and pages of this repository link to files outside it. So the pages at the top of the
repository become pages of the site, ``reference.md`` is made from the names that the package exports, and links lead
to the same files in the site. A link to a file that is no page (a source file) is left as text.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TOP_PAGES = ("README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")
REFERENCE = "reference.md"
#: Heading -> the module whose ``__all__`` is its section
SECTIONS = {
    "kvfs": "kvfs",
    "transformers": "kvfs.integrations.transformers",
    "Metrics": "kvfs.metrics",
}
_LINK = re.compile(r"(?P<mark>!?)\[(?P<text>[^\[\]]*)\]\((?P<target>[^()\s:#]+)(?P<anchor>#[^()\s]*)?\)")


def reference() -> str:
    """The page of the code's own reference: one directive for each exported name."""
    lines = [
        "# Reference of the code", "",
        "Made from the docstrings of the names that each module exports. [API](api.md) tells how they work together.",
    ]  # fmt: skip
    for heading, module in SECTIONS.items():
        lines += ["", f"## {heading}"]
        for name in exported(module):
            lines += ["", f"::: {module}.{name}"]
    return "\n".join(lines) + "\n"


def exported(module: str) -> list[str]:
    """The names of ``__all__``, from the source: importing the module would need torch."""
    tree = ast.parse((ROOT / module.replace(".", "/") / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return [name for name in names if not name.startswith("__")]
    raise AssertionError(f"{module} has no __all__")


def site_path(file: str) -> str | None:
    """Where a file of the repository is in the site; None if it is not part of it. Both are relative."""
    if file in TOP_PAGES:
        return file
    return file.removeprefix("docs/") if file.startswith("docs/") else None


def repository_path(page: str) -> str:
    """The inverse of ``site_path``."""
    return page if page in TOP_PAGES else f"docs/{page}"


def with_site_links(markdown: str, page: str) -> str:
    """The text of ``page`` (a path in the site), with the links of the repository turned into those of the site."""
    source = posixpath.dirname(repository_path(page))
    here = posixpath.dirname(page)

    def link(match: re.Match[str]) -> str:
        file = posixpath.normpath(posixpath.join(source, match["target"]))
        found = site_path(file)
        if found is not None:
            target = posixpath.relpath(found, here or ".")
            return f"{match['mark']}[{match['text']}]({target}{match['anchor'] or ''})"
        if not (ROOT / file).exists():
            return match[0]  # MkDocs reports it
        return match["text"]

    return _LINK.sub(link, markdown)


# -- called by MkDocs --------------------------------------------------------------------------------


def on_config(config: Any) -> Any:
    """Anchors as code hosts make them, because the same pages are read there."""
    from pymdownx.slugs import slugify

    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for name in TOP_PAGES:
        files.append(File.generated(config, name, content=(ROOT / name).read_text(encoding="utf-8")))
    files.append(File.generated(config, REFERENCE, content=reference()))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    return with_site_links(markdown, page.file.src_uri)
