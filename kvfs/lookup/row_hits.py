"""The index rows of a lookup that have live chunks.

The native library reads hundreds of rows in one call. They stay one block of bytes until a load needs them: an object
for each would take as long as the walk, and most lookups of an engine's scheduler are not loaded.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, overload

from kvfs.index.rows import Row, checked_row, parse_row
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


#: Hits of a run, or the block that has them.
RunHits: TypeAlias = "Sequence[Hit] | HitBlock"


def hits_of(run: int, found: RunHits) -> Sequence[Hit]:
    return found.of(run) if isinstance(found, HitBlock) else found


class Hits(Sequence[Hit]):
    """The hits of some runs, in the order of the prompt. Immutable; pickled as a tuple."""

    __slots__ = ("_hits", "_runs")

    def __init__(self, runs: Sequence[tuple[int, RunHits]] = ()) -> None:
        self._runs = runs
        self._hits: tuple[Hit, ...] | None = None

    def all(self) -> tuple[Hit, ...]:
        if self._hits is None:
            self._hits = tuple(hit for run, found in self._runs for hit in hits_of(run, found))
        return self._hits

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
