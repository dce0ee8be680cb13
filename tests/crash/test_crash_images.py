"""What a crash may leave of the files: the CI size of ``python -m tools.torture crash``."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tools.torture.crash import build, check, workload
from tools.torture.judge import Judge

IMAGES = 12


@pytest.mark.parametrize("sync", ["cache", "sync"])
def test_images_of_a_crash_open_and_lose_no_more_than_was_promised(memory_path: Path, sync: str) -> None:
    judge, chance = Judge(), random.Random(7)
    ops = workload(memory_path / "store", sync, chance, judge)
    for number in range(IMAGES):
        at = len(ops) if number % 2 else chance.randrange(1, len(ops) + 1)
        build(memory_path / "image", memory_path / "store", ops[:at], chance)
        check(memory_path / "image", ops[:at], sync, judge)
    assert not judge.failed, "\n".join([judge.line(), *judge.notes])
