"""The bugs that ``python -m tools.mutants named`` plants match the source."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]


def test_there_are_enough_and_each_has_a_name() -> None:
    assert len({m.name for m in MUTATIONS}) == len(MUTATIONS) >= 15


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name.replace(" ", "_"))
def test_a_planted_bug_matches_the_source(mutation: Mutation) -> None:
    """If this fails, the source has changed: update the entry, and run ``python -m tools.mutants named``."""
    planted = mutation.planted(ROOT)
    assert planted != (ROOT / mutation.path).read_text(encoding="utf-8")
    compile(planted, mutation.path, "exec")
    assert mutation.tests and all((ROOT / test.partition("::")[0]).exists() for test in mutation.tests)
