"""The bugs that ``python -m tools.mutate`` plants match the source."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tools.mutate import plant
from tools.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]


def test_there_are_enough_and_each_has_a_name() -> None:
    assert len({m.name for m in MUTATIONS}) == len(MUTATIONS) >= 15


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name.replace(" ", "_"))
def test_a_planted_bug_matches_the_source(mutation: Mutation, tmp_path: Path) -> None:
    """If this fails, the source has changed: update the entry, and run tools.mutate."""
    copy = tmp_path / mutation.path
    copy.parent.mkdir(parents=True)
    shutil.copy(ROOT / mutation.path, copy)
    plant(mutation, tmp_path)
    assert copy.read_text() != (ROOT / mutation.path).read_text()
    compile(copy.read_text(), mutation.path, "exec")
    assert mutation.tests and all((ROOT / test.partition("::")[0]).exists() for test in mutation.tests)
