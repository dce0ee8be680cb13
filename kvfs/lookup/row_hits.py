"""The index rows of a lookup that have live chunks.

The native library reads hundreds of rows in one call. They stay one block of bytes until a load needs them: an object
for each would take as long as the walk, and most lookups of an engine's scheduler are not loaded.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeAlias, overload

from kvfs.index.rows import Row, checked_row, parse_row
from kvfs.native import key_pages
from kvfs.native.key_pages import ROOT_BYTES, Stretch
from kvfs.pages.layout import Part

_ROW = struct.Struct("<IIIIQ40s")  # kvfs_row


@dataclass
class Hit:
    """Live chunks of one row; ``bits`` are relative to the first chunk of ``run``."""

    run: int
    part: Part
    key: bytes
    value: bytes
    bits: int
    _row: Row | None = field(default=None, repr=False, compare=False)
    checked: bool = field(default=False, repr=False, compare=False)  # its bytes are known to be a row

    def row(self) -> Row | None:
        """The row, parsed once per process; None if its bytes are damaged."""
        if self._row is None:
            self._row = checked_row(self.value) if self.checked else parse_row(self.key, self.value)
        return self._row

    def __reduce__(self) -> tuple[type[Hit], tuple[int, Part, bytes, bytes, int]]:
        return Hit, (self.run, self.part, self.key, self.value, self.bits)


class HitBlock:
    """The hits of several runs, as one native call returned them: packed rows (kvfs_row), and the rows' values."""

    __slots__ = ("_hits", "_parts", "_rows", "_values")

    def __init__(self, rows: bytes, values: bytes, parts: Sequence[Part]) -> None:
        self._rows, self._values, self._parts = rows, values, parts
        self._hits: dict[int, list[Hit]] | None = None  # by run; made by the first ``of``

    def of(self, run: int) -> Sequence[Hit]:
        if self._hits is None:
            values, hits = self._values, dict[int, list[Hit]]()
            for number, part, bits, nbytes, at, key in _ROW.iter_unpack(self._rows):
                hit = Hit(number, self._parts[part], key, values[at : at + nbytes], bits, None, True)
                hits.setdefault(number, []).append(hit)
            self._hits = hits
        return self._hits.get(run, ())

    def stretches(self, part: Part | None) -> list[Stretch] | None:
        """Of keys, the pages that are stored as ``part``, or as any, by part. None without the native library."""
        found = list[Stretch]()
        for number, stored in enumerate(self._parts):
            if part is None or part == stored:
                some = key_pages.stretches(self._rows, self._values, number)
                if some is None:
                    return None
                found += some
        return found


#: Hits of a run, or the block that has them.
RunHits: TypeAlias = "Sequence[Hit] | HitBlock"


def hits_of(run: int, found: RunHits) -> Sequence[Hit]:
    return found.of(run) if isinstance(found, HitBlock) else found


class Hits(Sequence[Hit]):
    """The hits of some runs, in the order of the prompt. Immutable; pickled as a tuple."""

    __slots__ = ("_found", "_hits", "_runs")

    def __init__(self, found: Mapping[int, RunHits], runs: range) -> None:
        """``found`` (by run) stays as it is."""
        self._found, self._runs = found, runs
        self._hits: tuple[Hit, ...] | None = None

    def all(self) -> tuple[Hit, ...]:
        if self._hits is None:
            found = self._found
            self._hits = tuple(hit for run in self._runs if run in found for hit in hits_of(run, found[run]))
        return self._hits

    def within(self, runs: range) -> Hits:
        """Those of ``runs``, which follow one another."""
        return Hits(self._found, range(max(self._runs.start, runs.start), min(self._runs.stop, runs.stop)))

    def stretches(self, part: Part | None) -> list[Stretch] | None:
        """Of keys, ``HitBlock.stretches`` of all runs: no object for each page. None where Python has read some."""
        every, at = list[Stretch](), self._runs.start
        for hits, same in groupby(map(self._found.get, self._runs)):
            end = at + sum(1 for _ in same)
            if hits:
                some = hits.stretches(part) if isinstance(hits, HitBlock) else None
                if some is None:
                    return None
                every += [cut for one in some if (cut := _within(one, at, end)) is not None]
            at = end
        return every

    def __len__(self) -> int:
        return len(self.all())

    def __iter__(self) -> Iterator[Hit]:
        return iter(self.all())

    @overload
    def __getitem__(self, index: int) -> Hit: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Hit, ...]: ...

    def __getitem__(self, index: int | slice) -> Hit | tuple[Hit, ...]:
        return self.all()[index]

    def __eq__(self, other: object) -> bool:
        return self.all() == tuple(other) if isinstance(other, (Hits, tuple)) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (self.all(),)


def _within(one: Stretch, first: int, end: int) -> Stretch | None:
    """The pages of a stretch in [first, end); None if there are none."""
    skipped = max(0, first - one.chunk)
    pages = min(one.chunk + one.pages, end) - one.chunk - skipped
    if pages == one.pages or pages <= 0:
        return one if pages > 0 else None
    return one._replace(
        chunk=one.chunk + skipped, pages=pages, seq=one.seq + skipped, block=one.block + skipped * one.step,
        leaf=one.leaf and one.leaf + skipped * one.leaves,
        roots=one.roots[ROOT_BYTES * skipped : ROOT_BYTES * (skipped + pages)],
    )  # fmt: skip
