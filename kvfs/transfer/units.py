"""Unit ids of a prompt: the engine's units that hold its tokens, checked before anything moves."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Any

from kvfs.errors import ConfigError
from kvfs.transfer.workers import Attached

#: As the caller passes them: one sequence, or one per group name.
Units = Any


UNITS_MAX = 1 << 24  # of one prompt
_NONE = array("q", [-1])


class UnitIds(array):  # type: ignore[type-arg]
    """Checked unit ids of a prompt, i64; ``complete``: none is -1."""

    complete = True


def checked_units(
    attached: Mapping[str, Attached], units: Units, first_unit: int | Mapping[str, int] = 0
) -> dict[int, UnitIds]:
    """Unit ids by group number. ConfigError for what is no id, and for ids of no attached unit.

    ``first_unit``: the number, in the prompt, of the first id; there is none of those before.
    """
    if not isinstance(units, Mapping):
        if len(attached) > 1:
            raise ConfigError(f"units must map each of the groups {list(attached)} to its unit ids")
        units = dict.fromkeys(attached, units)
    before = first_unit if isinstance(first_unit, Mapping) else dict.fromkeys(units, first_unit)
    for name, number in before.items():
        if type(number) is not int or not 0 <= number <= UNITS_MAX or name not in units:
            raise ConfigError(f"first_unit of group {name!r} is {number!r}: pass 0 to {UNITS_MAX} for groups of units")
    ids: dict[int, UnitIds] = {}
    for name, value in units.items():
        if name not in attached:
            raise ConfigError(f"units names group {name!r}; attached are {list(attached)}")
        a = attached[name]
        try:
            given = value.tolist() if hasattr(value, "tolist") else value
            if isinstance(given, (bytes, bytearray)):
                raise TypeError("an array would take eight of them for one id")
            numbers = UnitIds("q", given)
            low, high = (min(given), max(given)) if numbers else (0, 0)
        except (TypeError, ValueError, OverflowError):
            raise ConfigError(f"units of group {name}: pass a flat sequence of integers, -1 for none") from None
        if not -1 <= low <= high < a.device.units:
            raise ConfigError(
                f"units of group {name} reach from {low} to {high}: pass ids in 0..{a.device.units - 1}, -1 for none"
            )
        found = numbers
        if before.get(name):
            found = UnitIds("q", _NONE * before[name])
            found.extend(numbers)
        found.complete = low >= 0 and found is numbers
        ids[a.number] = found
    return ids


def check_enough(a: Attached, ids: UnitIds, chunks: range) -> None:
    """ConfigError unless there are ids for all of ``chunks``."""
    if chunks and a.device.unit_range(a.group, chunks[-1])[-1] >= len(ids):
        need = a.device.unit_range(a.group, chunks[-1])[-1] + 1
        raise ConfigError(f"units of group {a.group.name} has {len(ids)} ids, {need} are needed; pass -1 to leave one")


def chunks_covered(a: Attached, ids: UnitIds, chunks: int) -> int:
    """How many of the first ``chunks`` chunks have all of their units among ``ids``."""
    if chunks and a.device.unit_range(a.group, chunks - 1)[-1] < len(ids):
        return chunks
    return bisect_left(range(chunks), len(ids), key=lambda chunk: a.device.unit_range(a.group, chunk)[-1])


def to_load(a: Attached, ids: UnitIds, chunks: Iterable[int]) -> list[int]:
    """Those of ``chunks`` that have a unit to load into."""
    if ids.complete:
        return list(chunks)
    return [c for c in chunks if any(ids[i] >= 0 for i in a.device.unit_range(a.group, c))]
