"""A sample of the kills and stops of ``python -m tools.torture model --workload kills`` and ``stops``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.torture import steps
from tools.torture.judge import Judge


@pytest.fixture
def judge() -> Iterator[Judge]:
    found = Judge()
    yield found
    assert not found.failed, "\n".join([found.line(), *found.notes])


@pytest.mark.timeout(300)
def test_two_writers_that_are_killed_leave_no_page_that_a_put_skips_and_a_load_misses(
    memory_path: Path, judge: Judge
) -> None:
    """The second one adopts the segment of the first. All pairs with the changes around the entries of both."""
    steps.kills(memory_path, seed=1, seconds=0.0, judge=judge)  # the templates
    assert judge.counts["points"] > 100
    for first, second in ((8, 7), (9, 6), (9, 7), (9, 8), (10, 7)):
        steps.pair(memory_path, "cache", first, second, judge)
    assert judge.counts["kills"] == 10


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_process_that_stops_longer_than_any_deadline_disturbs_no_other(memory_path: Path, judge: Judge) -> None:
    steps.stops(memory_path, seed=2, seconds=20.0, judge=judge)
    assert judge.counts["stops"] >= 2


def test_a_store_that_was_filled_with_a_wrong_clock_keeps_its_working_set(memory_path: Path, judge: Judge) -> None:
    steps.clocks(memory_path, seed=1, seconds=1.0, judge=judge)
    assert judge.counts["cases"] >= 1
