"""Unit ids of a prompt: which are accepted, and which chunks have all or some of theirs."""

from __future__ import annotations

import re
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvfs.errors import ConfigError
from kvfs.transfer.units import UNITS_MAX, UnitIds, check_enough, checked_units, chunks_covered, to_load

MOST = 10  # units of the device


def attached(number: int = 0, per_chunk: int = 2, name: str = "full") -> Any:
    """A group whose chunk has ``per_chunk`` units."""
    device = SimpleNamespace(units=MOST, unit_range=lambda _, chunk: range(chunk * per_chunk, (chunk + 1) * per_chunk))
    return SimpleNamespace(number=number, group=SimpleNamespace(name=name), device=device)


ONE = {"full": attached(3)}
TWO = {"full": attached(3), "window": attached(5, name="window")}


def ids(*numbers: int, complete: bool = True) -> UnitIds:
    made = UnitIds("q", numbers)
    made.complete = complete
    return made


@pytest.mark.parametrize(
    "given", [[0, 9, 4], (0, 9, 4), array("q", [0, 9, 4]), np.array([0, 9, 4]), np.array([0, 9, 4], "int32")]
)
def test_ids_of_any_kind_are_taken(given: Any) -> None:
    assert checked_units(ONE, given) == {3: array("q", [0, 9, 4])}
    found = checked_units(TWO, {"window": given, "full": []})
    assert {number: list(value) for number, value in found.items()} == {5: [0, 9, 4], 3: []}


@pytest.mark.parametrize(("given", "complete"), [([], True), ([0], True), ([-1], False), ([3, -1, 9], False)])
def test_whether_there_is_an_id_for_each_unit_is_noted(given: list[int], complete: bool) -> None:
    assert checked_units(ONE, given)[3].complete is complete


@pytest.mark.parametrize(("low", "high"), [(-2, 3), (0, 10), (-5, -3)])
def test_ids_of_no_unit_are_refused(low: int, high: int) -> None:
    message = f"units of group full reach from {low} to {high}: pass ids in 0..9, -1 for none"
    with pytest.raises(ConfigError, match=re.escape(message)):
        checked_units(ONE, [low, high])


@pytest.mark.parametrize("given", [b"\0" * 8, bytearray(8), 5, None, "ab", [1.5], [[1, 2]], [1 << 63], ["1"]])
def test_what_is_no_flat_sequence_of_integers_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="units of group full: pass a flat sequence of integers, -1 for none"):
        checked_units(ONE, given)


def test_several_groups_need_their_names() -> None:
    with pytest.raises(ConfigError, match=re.escape("map each of the groups ['full', 'window']")):
        checked_units(TWO, [1])
    with pytest.raises(ConfigError, match=re.escape("units names group 'other'; attached are ['full', 'window']")):
        checked_units(TWO, {"other": [1]})
    assert list(checked_units(TWO, {"window": [1]})) == [5], "a group may be left out"


def test_ids_from_a_later_unit_on_have_none_before() -> None:
    found = checked_units(ONE, [4, 5], 3)[3]
    assert list(found) == [-1, -1, -1, 4, 5] and not found.complete
    found = checked_units(ONE, [4, 5], 0)[3]
    assert list(found) == [4, 5] and found.complete
    both = checked_units(TWO, {"full": [4], "window": [5]}, {"window": 1})
    assert (list(both[3]), both[3].complete) == ([4], True)
    assert (list(both[5]), both[5].complete) == ([-1, 5], False)
    both = checked_units(TWO, {"full": [4], "window": [5]}, 2)
    assert list(both[3]) == [-1, -1, 4] and list(both[5]) == [-1, -1, 5]


@pytest.mark.parametrize("first", [-1, UNITS_MAX + 1, True, 1.0, "1", {"other": 1}, {"full": -1}])
def test_a_first_unit_that_is_none_is_refused(first: Any) -> None:
    name, value = next(iter(first.items())) if isinstance(first, dict) else ("full", first)
    message = f"first_unit of group {name!r} is {value!r}: pass 0 to {UNITS_MAX} for groups of units"
    with pytest.raises(ConfigError, match=re.escape(message)):
        checked_units(ONE, [1], first)


def test_the_largest_first_unit_is_taken() -> None:
    assert len(checked_units(ONE, [1], UNITS_MAX)[3]) == UNITS_MAX + 1


@pytest.mark.parametrize(
    ("have", "chunks", "need"),
    [(6, range(3), 0), (5, range(3), 6), (6, range(3, 3), 0), (0, range(0), 0), (0, range(1), 2), (7, range(2, 4), 8)],
)
def test_each_chunk_needs_an_id_for_each_of_its_units(have: int, chunks: range, need: int) -> None:
    if not need:
        check_enough(ONE["full"], ids(*[0] * have), chunks)
        return
    with pytest.raises(ConfigError, match=f"units of group full has {have} ids, {need} are needed; pass -1"):
        check_enough(ONE["full"], ids(*[0] * have), chunks)


@pytest.mark.parametrize("have", range(9))
@pytest.mark.parametrize("chunks", range(5))
def test_the_chunks_that_are_covered_are_those_with_all_ids(have: int, chunks: int) -> None:
    assert chunks_covered(ONE["full"], ids(*[0] * have), chunks) == min(chunks, have // 2)


def test_a_chunk_is_loaded_if_one_of_its_units_has_an_id() -> None:
    some = ids(-1, -1, 4, -1, -1, 0, 7, 8, complete=False)
    assert to_load(ONE["full"], some, range(4)) == [1, 2, 3] and to_load(ONE["full"], some, [0]) == []
    assert to_load(ONE["full"], some, iter([3, 0, 1])) == [3, 1]
    assert to_load(ONE["full"], ids(), iter([5, 2])) == [5, 2], "no id is looked at"
