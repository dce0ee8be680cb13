"""What would be uploaded: the source archive has all that its own tests read, and metadata that an index shows."""

from __future__ import annotations

import tarfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
READ_BY_TESTS = (
    "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE", "Makefile", "constraints.txt",
    "pyproject.toml", "hatch_build.py", ".ci/run", ".mkdocs.yml", ".github/workflows/ci.yml", "docs/cli.md",
    "docs/deploy/grafana.json", "docs/examples/README.md", "tests/conftest.py", "tools/structure.py",
)  # fmt: skip


def test_the_source_archive_has_what_its_tests_read_and_a_page_for_the_index(tmp_path: Path) -> None:
    sdist = pytest.importorskip("hatchling.builders.sdist", reason="hatchling is not installed: make install has it")
    (archive,) = sdist.SdistBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
        info = tar.extractfile(f"{Path(archive).name.removesuffix('.tar.gz')}/PKG-INFO")
        assert info is not None
        metadata = Parser().parsestr(info.read().decode())
    assert [path for path in READ_BY_TESTS if path not in names] == []
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert (ROOT / "README.md").read_text(encoding="utf-8").strip() in metadata.get_payload()
    assert metadata["Requires-Python"] == "<3.15,>=3.10" and metadata["Author"] == "kvfs contributors"
