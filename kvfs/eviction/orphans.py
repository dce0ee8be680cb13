"""Which records belong to pages that their cohort of ranks did not finish, or lost a part of. Pure: no I/O, no clock.

Ranks that write a page together, each its part, give the same ``attempt``. If one of them dies, or eviction drops one
rank's segment, the other ranks' records of those pages restore nothing. A cohort is judged by a count and a sum of
chunk hashes per part: equal for all parts as long as all of its pages are whole. Only the records of cohorts that
are not whole are looked at one by one; there, parts of other such cohorts count, too, since a second attempt may
have stored just what the first one lacked.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvfs.errors import ConfigError
from kvfs.format.checksums import checksum
from kvfs.format.segment import Entry
from kvfs.pages.identity import Described
from kvfs.pages.layout import Part

NO_ATTEMPT = bytes(8)
NO_SHAPE = 0xFFFF_FFFF
_MASK = (1 << 64) - 1


class Shape(NamedTuple):
    """A part as a cohort wrote it. Areas count layers times head slots."""

    attempt: bytes
    digest: bytes
    group: int
    part: bytes
    area: int
    whole: int  # area of a page


@dataclass
class CohortTable:
    """The cohorts' records of one segment; arrays by ordinal among its pages."""

    shapes: list[Shape] = field(default_factory=list)
    written_us: list[int] = field(default_factory=list)  # the latest of each shape
    sums: list[tuple[int, int]] = field(default_factory=list)  # records of each shape, and the sum of their keys
    shape_of: array[int] = field(default_factory=lambda: array("I"))
    keys: array[int] = field(default_factory=lambda: array("Q"))  # stands for namespace, group and chunk hash


def collect(
    parts: Iterable[Entry], describe: Callable[[int], Described | None], purged: Container[int] = ()
) -> CohortTable:
    """The cohorts of a segment's records; ``describe`` gives the namespace behind the seq of its entry."""
    table = CohortTable()
    numbers: dict[tuple[bytes, int, int, bytes], int] = {}
    spaces: dict[int, Described | None] = {}  # there are few of them, and an attempt per request
    for entry in parts:
        key, number = 0, NO_SHAPE
        if entry.attempt != NO_ATTEMPT and entry.seq not in purged:
            named = (entry.attempt, entry.ns_seq, entry.group, entry.part)
            if named not in numbers:
                if entry.ns_seq not in spaces:
                    spaces[entry.ns_seq] = describe(entry.ns_seq)
                numbers[named] = _add_shape(table, entry, spaces[entry.ns_seq])
            number = numbers[named]
        if number != NO_SHAPE:
            table.written_us[number] = max(table.written_us[number], entry.written_us)
            shape = table.shapes[number]
            key = checksum(shape.digest + entry.group.to_bytes(2, "little") + entry.chunk_hash)
            count, total = table.sums[number]
            table.sums[number] = count + 1, total + key & _MASK
        table.shape_of.append(number)
        table.keys.append(key)
    return table


def _add_shape(table: CohortTable, entry: Entry, described: Described | None) -> int:
    """Number of a new shape; NO_SHAPE for whole pages, and for what makes no sense."""
    if described is None or entry.group >= len(described.layout.groups):
        return NO_SHAPE
    full = described.layout.groups[entry.group].full
    try:
        part = Part.unpack(entry.part)
    except ConfigError:
        return NO_SHAPE
    if part.contains(full):
        return NO_SHAPE
    table.shapes.append(
        Shape(entry.attempt, described.digest, entry.group, entry.part, part.heads * part.layers,
              full.heads * full.layers)
    )  # fmt: skip
    table.written_us.append(0)
    table.sums.append((0, 0))
    return len(table.shapes) - 1


def orphans(tables: Mapping[int, CohortTable], before_us: int) -> dict[int, frozenset[int]]:
    """Segment number -> ordinals of its records whose pages cannot be whole.

    Cohorts that wrote something at ``before_us`` or later may still be at it, and are left out.
    """
    broken = _broken(tables, before_us)
    if not broken:
        return {}
    areas: dict[int, int] = {}
    suspects: list[tuple[int, int, int, int]] = []
    seen: set[tuple[int, bytes]] = set()
    for number, table in tables.items():
        chosen = [s[:3] in broken for s in table.shapes]
        if not any(chosen):
            continue
        for ordinal, at in enumerate(table.shape_of):
            if at == NO_SHAPE or not chosen[at]:
                continue
            shape, key = table.shapes[at], table.keys[ordinal]
            suspects.append((number, ordinal, key, shape.whole))
            if (key, shape.part) not in seen:  # copies of a record cover no more than the record
                seen.add((key, shape.part))
                areas[key] = areas.get(key, 0) + shape.area
    found: dict[int, set[int]] = {}
    for number, ordinal, key, whole in suspects:
        if areas[key] < whole:
            found.setdefault(number, set()).add(ordinal)
    return {number: frozenset(ordinals) for number, ordinals in found.items()}


def _broken(tables: Mapping[int, CohortTable], before_us: int) -> set[tuple[bytes, bytes, int]]:
    """Cohorts (attempt, namespace, group) whose parts do not all hold the same chunks, or do not make a page."""
    sums: dict[tuple[bytes, bytes, int], dict[bytes, tuple[int, int]]] = {}
    missing: dict[tuple[bytes, bytes, int], int] = {}
    young: set[tuple[bytes, bytes, int]] = set()
    for table in tables.values():
        for shape, written_us, (count, total) in zip(table.shapes, table.written_us, table.sums, strict=True):
            cohort = shape[:3]
            by_part = sums.setdefault(cohort, {})
            if shape.part not in by_part:
                missing[cohort] = missing.get(cohort, shape.whole) - shape.area
            before = by_part.get(shape.part, (0, 0))
            by_part[shape.part] = before[0] + count, before[1] + total & _MASK
            if written_us >= before_us:
                young.add(cohort)
    return {c for c, by_part in sums.items() if c not in young and (missing[c] > 0 or len(set(by_part.values())) > 1)}
