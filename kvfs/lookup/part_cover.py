"""Which of the parts that ranks wrote cover the rectangle that a reader wants."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from kvfs.index.tables import PARTS_MAX
from kvfs.pages.layout import Part


class Useful(NamedTuple):
    """The parts that intersect what a reader wants, the most useful first."""

    parts: tuple[Part, ...]
    packed: tuple[bytes, ...]
    cells: tuple[tuple[int, ...], ...]  # for each elementary rectangle of what is wanted, the parts that contain it
    first_is_enough: bool  # ``parts[0]`` contains all that is wanted


@lru_cache(maxsize=16)
def useful_parts(want: Part, known: tuple[Part, ...]) -> Useful:
    """Those of ``known`` that help a reader of ``want``; cached, since prompts of one engine ask for the same."""
    useful = [p for p in known if p.intersect(want) is not None]
    useful.sort(key=lambda p: (p != want, not p.contains(want), p.heads * p.layers, p.pack()))
    parts = tuple(useful[:PARTS_MAX])
    first_is_enough = bool(parts) and parts[0].contains(want)
    return Useful(parts, tuple(part.pack() for part in parts), _elementary(want, parts), first_is_enough)


def _elementary(want: Part, parts: Sequence[Part]) -> tuple[tuple[int, ...], ...]:
    """For each cell of the grid that the parts' edges cut ``want`` into: the parts that contain it."""
    clipped = [p.intersect(want) for p in parts]
    heads = {want.head, want.head + want.heads}
    layers = {want.layer, want.layer + want.layers}
    for c in clipped:
        assert c is not None
        heads |= {c.head, c.head + c.heads}
        layers |= {c.layer, c.layer + c.layers}
    grid = []
    for h0, h1 in pairwise(sorted(heads)):
        for l0, l1 in pairwise(sorted(layers)):
            cell = Part(h0, h1 - h0, l0, l1 - l0)
            grid.append(tuple(i for i, p in enumerate(parts) if p.contains(cell)))
    return tuple(grid)
