"""Copy token slots: cells of other ranks' pools go straight into slots of this one, each token from a rank of its own.

One launch for all tokens, layers and buffers. It sums nothing: who decided where a token is answers for its bytes. The
work list is a block of little-endian i64 words:

    0   tokens
    1   layers        of the part
    2   buffer_words  of one buffer in a buffer table (``kvfs.kernels.work_list``)
    3   own           address of the buffer table of the targets
    16  tokens x (address of the buffer table of its source, slot there, slot here)
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl

from kvfs.kernels.cells import KINDS
from kvfs.kernels.work_list import BUFFER_WORDS, HEAD_WORDS, ROWS_MAX, Shape

TOKEN_WORDS = 3
COLS_MAX = 256  # of a tile: a whole cell of MLA

_HEAD = tl.constexpr(HEAD_WORDS)
_TOKEN = tl.constexpr(TOKEN_WORDS)
_BUFFER = tl.constexpr(BUFFER_WORDS)


class Cut(NamedTuple):
    """What the kernel is compiled for: the tiles of a token in one layer of one buffer, and the bytes of an element."""

    buffers: int
    rows: int
    cols: int
    row_tiles: int
    col_tiles: int
    element: int


def cells_of(shape: Shape) -> list[tuple[int, ...]]:
    """What two pools must have in common, of each buffer: place and bytes of its part of a cell, first head, heads."""
    table, size = array("q", shape.table), BUFFER_WORDS + shape.layers
    return [tuple(table[at + 3 : at + 7]) for at in range(0, size * shape.buffers, size)]


def cut(own: Shape, *sources: Shape) -> Cut:
    """Tiles for copies between pools of equal cells (``cells_of``), whose strides may differ."""
    element = math.gcd(own.element, *(shape.element for shape in sources))
    cells = cells_of(own)
    heads, elements = max(cell[3] for cell in cells), max(cell[1] for cell in cells) // element
    rows, cols = min(ROWS_MAX, _power(heads)), min(COLS_MAX, _power(elements))
    return Cut(own.buffers, rows, cols, -(-heads // rows), -(-elements // cols), element)


def _power(n: int) -> int:
    return 1 << (max(1, n) - 1).bit_length()


def pack(own: int, layers: int, sources: Sequence[int], source_slots: Sequence[int], slots: Sequence[int]) -> bytes:
    """The work list. ``own``, and ``sources`` of each token: addresses of buffer tables."""
    words = array("q", bytes(8 * (HEAD_WORDS + TOKEN_WORDS * len(slots))))
    words[:4] = array("q", [len(slots), layers, BUFFER_WORDS + layers, own])
    for i, values in enumerate((sources, source_slots, slots)):
        words[HEAD_WORDS + i :: TOKEN_WORDS] = array("q", values)
    return words.tobytes()


@triton.jit
def _copy(  # type: ignore[no-untyped-def]
    work, BUFFERS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ROW_TILES: tl.constexpr,
    COL_TILES: tl.constexpr, ELEMENT: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    layers = tl.load(work + 1)
    buffer_words = tl.load(work + 2)
    own = tl.load(work + 3).to(tl.pointer_type(tl.int64))
    total = tl.load(work) * layers * (BUFFERS * ROW_TILES * COL_TILES)
    for task in range(tl.program_id(0).to(tl.int64), total, tl.num_programs(0)):
        tile = task % (BUFFERS * ROW_TILES * COL_TILES)
        rest = task // (BUFFERS * ROW_TILES * COL_TILES)
        token = work + _HEAD + (rest // layers) * _TOKEN
        place = (tile // (ROW_TILES * COL_TILES)) * buffer_words
        here = own + place
        there = tl.load(token).to(tl.pointer_type(tl.int64)) + place
        target = tl.load(here + _BUFFER + rest % layers)
        source = tl.load(there + _BUFFER + rest % layers)
        head = (tile // COL_TILES) % ROW_TILES * ROWS + tl.arange(0, ROWS)
        at = (tile % COL_TILES) * COLS + tl.arange(0, COLS)
        row = (head < tl.load(here + 6)) & (target != 0) & (source != 0)
        mask = row[:, None] & (at < tl.load(here + 4) // ELEMENT)[None, :]
        cells = source + tl.load(token + 1) * tl.load(there) + head * tl.load(there + 2)
        places = target + tl.load(token + 2) * tl.load(here) + head * tl.load(here + 2)
        value = tl.load(cells.to(tl.pointer_type(KIND))[:, None] + at[None, :], mask=mask)
        tl.store(places.to(tl.pointer_type(KIND))[:, None] + at[None, :], value, mask=mask)


def copy(work: Any, tiles: Cut, *, programs: int, warps: int = 4) -> None:
    """Run on the current stream. ``work``: an i64 tensor that begins with a work list."""
    _copy[(programs,)](
        work, tiles.buffers, tiles.rows, tiles.cols, tiles.row_tiles, tiles.col_tiles, tiles.element,
        KINDS[tiles.element], num_warps=warps,
    )  # fmt: skip
