from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.vllm.models import build


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A model of a kind, built once."""
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = build(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return get


@pytest.fixture
def prompt() -> Callable[..., list[int]]:
    """Token ids from a seed; prompts of one seed share their beginning."""

    def get(seed: int, tokens: int = 700) -> list[int]:
        return [random.Random(f"{seed} {i}").randrange(5, 1000) for i in range(tokens)]

    return get
