"""Gather from the memory of another GPU: cells of a peer's units become canonical pages in scratch of this one.

What ``kvfs.kernels.cells`` does towards pages, for reads that come over a link between GPUs: a read takes a microsecond
and more, so what counts is how many bytes are under way. One task is one tile, and no loop or mask stands between two
of them where the buffers allow it. Buffers that differ in their cells (values and scales) get launches of their own. On
two H100 with NVLink, of 397 GB/s of one copy: 32 programs 367, 16 programs 340; the kernel of ``cells`` 286 and 151 to
213, single copies of 32 KiB by the copy engine 42, of 2 MiB 350.
"""

from __future__ import annotations

import functools
import itertools
import math
from array import array
from typing import Any, NamedTuple

import triton
import triton.language as tl

from kvfs.kernels.cells import KINDS
from kvfs.kernels.work_list import BUFFER_WORDS, GRANULE_WORDS, HEAD_WORDS, ROWS_MAX, Shape

COLS_MAX = 256  # of a tile: a whole cell of MLA
TILE_BYTES_MAX = 32 << 10
PROGRAMS, PROGRAMS_MAX, WARPS = 32, 528, 8  # of tiles of TILE_BYTES_MAX, and of small ones

_HEAD = tl.constexpr(HEAD_WORDS)
_GRANULE = tl.constexpr(GRANULE_WORDS)
_BUFFER = tl.constexpr(BUFFER_WORDS)


class Tiles(NamedTuple):
    """How the cells of a granule in one layer of neighbouring buffers are cut: what the kernel is compiled for."""

    first: int  # of the buffers
    buffers: int
    rows: int
    cols: int
    row_tiles: int
    col_tiles: int
    element: int
    full: bool  # every tile is full, and every buffer has every layer
    one_unit: bool  # all states of a granule are in one unit

    @property
    def programs(self) -> int:
        """Programs that keep enough under way: more, the less a tile holds."""
        tile = self.rows * self.cols * self.element
        return max(PROGRAMS, min(PROGRAMS_MAX, PROGRAMS * TILE_BYTES_MAX // tile))

    @property
    def warps(self) -> int:
        return max(1, min(WARPS, self.rows * self.cols // 32))


@functools.lru_cache(maxsize=256)
def tiles(shape: Shape) -> tuple[Tiles, ...]:
    """The launches for buffers of this shape."""
    table, size = array("q", shape.table), BUFFER_WORDS + shape.layers
    kinds: list[tuple[int, int, int, bool]] = []  # of each buffer: lines, elements of a line, their bytes, is whole
    for at in range(0, size * shape.buffers, size):
        bases = table[at + BUFFER_WORDS : at + size]
        element = math.gcd(8, *table[at : at + 5], shape.cell_bytes, shape.leaf_bytes, *bases)
        kinds.append((table[at + 6] * shape.states, table[at + 4] // element, element, all(bases)))
    found, one_unit = list[Tiles](), shape.unit_tokens % shape.states == 0
    for kind, same in itertools.groupby(range(shape.buffers), kinds.__getitem__):
        numbers, (lines, elements, element, whole) = list(same), kind
        if not lines:
            continue
        rows = min(ROWS_MAX, _power(lines))
        cols = min(COLS_MAX, _power(elements), max(1, TILE_BYTES_MAX // (rows * element)))
        full = whole and not lines % rows and not elements % cols
        found.append(Tiles(
            numbers[0], len(numbers), rows, cols, -(-lines // rows), -(-elements // cols), element, full, one_unit
        ))  # fmt: skip
    return tuple(found)


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


@triton.jit
def _pull(  # type: ignore[no-untyped-def]
    work, FIRST: tl.constexpr, BUFFERS: tl.constexpr, STATES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    ROW_TILES: tl.constexpr, COL_TILES: tl.constexpr, ELEMENT: tl.constexpr, KIND: tl.constexpr, FULL: tl.constexpr,
    ONE_UNIT: tl.constexpr,
):  # fmt: skip
    rows = tl.load(work + 1)
    first_row = tl.load(work + 2)
    leaf_bytes = tl.load(work + 3)
    cell_bytes = tl.load(work + 4)
    unit_tokens = tl.load(work + 5)
    scratch = tl.load(work + 8)
    unit_ids = tl.load(work + 9).to(tl.pointer_type(tl.int64))
    table = tl.load(work + 12).to(tl.pointer_type(tl.int64))
    row_words = tl.load(work + 13)
    total = tl.load(work) * rows * (BUFFERS * ROW_TILES * COL_TILES)
    lane = tl.arange(0, ROWS)
    col = tl.arange(0, COLS)
    for task in range(tl.program_id(0).to(tl.int64), total, tl.num_programs(0)):
        tile = task % (BUFFERS * ROW_TILES * COL_TILES)
        rest = task // (BUFFERS * ROW_TILES * COL_TILES)
        row = rest % rows
        granule = work + _HEAD + (rest // rows) * _GRANULE
        buffer = table + (FIRST + tile // (ROW_TILES * COL_TILES)) * row_words
        line = (tile // COL_TILES) % ROW_TILES * ROWS + lane
        at = (tile % COL_TILES) * COLS + col
        base = tl.load(buffer + _BUFFER + first_row + row)
        token = tl.load(granule + 1)
        head = line // STATES
        state = line % STATES
        if ONE_UNIT:
            index = token // unit_tokens
            start = (
                base + tl.load(unit_ids + index) * tl.load(buffer) + (token - index * unit_tokens) * tl.load(buffer + 1)
            )
            cells = start + state * tl.load(buffer + 1) + head * tl.load(buffer + 2)
        else:
            position = token + state
            index = position // unit_tokens
            inside = position - index * unit_tokens
            cells = (
                base
                + tl.load(unit_ids + index) * tl.load(buffer)
                + (inside * tl.load(buffer + 1) + head * tl.load(buffer + 2))
            )
        page = scratch + tl.load(granule) + row * leaf_bytes + tl.load(buffer + 3)
        place = page + ((tl.load(buffer + 5) + head) * STATES + state) * cell_bytes
        source = cells.to(tl.pointer_type(KIND))
        target = place.to(tl.pointer_type(KIND))
        if FULL:
            value = tl.load(source[:, None] + at[None, :])
            tl.store(target[:, None] + at[None, :], value)
        else:
            here = (line < tl.load(buffer + 6) * STATES) & (base != 0)
            mask = here[:, None] & (at < tl.load(buffer + 4) // ELEMENT)[None, :]
            value = tl.load(source[:, None] + at[None, :], mask=mask)
            tl.store(target[:, None] + at[None, :], value, mask=mask)


def gather(work: Any, shape: Shape, cut: Tiles, *, programs: int, warps: int) -> Any:
    """Run on the current stream. ``cut``: one of ``tiles``. ``work``: an i64 tensor that begins with a work list whose
    buffer table is the peer's, with addresses as this device sees them. Every unit that a granule needs must be there.

    Returns the compiled kernel; None under the interpreter.
    """
    return _pull[(programs,)](
        work, cut.first, cut.buffers, shape.states, cut.rows, cut.cols, cut.row_tiles, cut.col_tiles, cut.element,
        KINDS[cut.element], cut.full, cut.one_unit, num_warps=warps,
    )  # fmt: skip
