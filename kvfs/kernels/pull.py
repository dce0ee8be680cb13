"""Copies from the memory of another GPU: cells of a peer's units go straight into units of this one.

A read over a link between GPUs takes a microsecond and more, so what counts is how many bytes are under way: a program
takes one tile of TILE_BYTES after the other. The work list (``kvfs.kernels.work_list``) has these words of its own:

    8   moves          address of the table of moves (``kvfs.kernels.moves``)
    14  source_tokens  tokens of a unit of the peer
    15  source_ids     address of the peer's unit ids, i64
    16  granules x (first token in the peer's units, first token in the own ones, page)
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from kvfs.kernels.cells import KINDS
from kvfs.kernels.moves import MOVE_WORDS, Tiles
from kvfs.kernels.work_list import BUFFER_WORDS, GRANULE_WORDS, HEAD_WORDS

PROGRAMS, WARPS = 32, 8

_HEAD = tl.constexpr(HEAD_WORDS)
_GRANULE = tl.constexpr(GRANULE_WORDS)
_BUFFER = tl.constexpr(BUFFER_WORDS)
_MOVE = tl.constexpr(MOVE_WORDS)


@triton.jit
def _pull(  # type: ignore[no-untyped-def]
    work, FIRST: tl.constexpr, MOVES: tl.constexpr, LINES: tl.constexpr, STATES: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, PIECES: tl.constexpr, ELEMENT: tl.constexpr, KIND: tl.constexpr, LINE: tl.constexpr,
    VECTORS: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    layers = tl.load(work + 1).to(tl.int32)
    first_row = tl.load(work + 2)
    unit_tokens = tl.load(work + 5).to(tl.int32)
    units = tl.load(work + 6).to(tl.int32)
    first_token = tl.load(work + 7).to(tl.int32)
    moves = tl.load(work + 8).to(tl.pointer_type(tl.int64))
    unit_ids = tl.load(work + 9).to(tl.pointer_type(tl.int64))
    move_words = _MOVE + 2 * (tl.load(work + 13) - _BUFFER)
    source_tokens = tl.load(work + 14).to(tl.int32)
    source_ids = tl.load(work + 15).to(tl.pointer_type(tl.int64))
    total = tl.load(work).to(tl.int32) * layers * (MOVES * LINES * PIECES)
    lane = tl.arange(0, ROWS)
    col = tl.arange(0, COLS)
    for start in range(tl.program_id(0) * ROWS, total, tl.num_programs(0) * ROWS):
        number = start + lane
        here = number < total
        piece = number % PIECES
        line = number // PIECES % LINES
        rest = number // (PIECES * LINES)
        move = moves + (FIRST + rest % MOVES) * move_words
        rest = rest // MOVES
        granule = work + _HEAD + (rest // layers) * _GRANULE
        bases = move + _MOVE + 2 * (first_row + rest % layers)
        source = tl.load(bases, mask=here, other=0)
        target = tl.load(bases + 1, mask=here, other=0)
        here = here & (source != 0)
        head = (line // STATES).to(tl.int64)
        state = line % STATES
        position = tl.load(granule, mask=here, other=0).to(tl.int32) + state
        index = position // source_tokens
        inside = (position - index * source_tokens).to(tl.int64)
        source += tl.load(source_ids + index, mask=here, other=0) * tl.load(move)
        source += inside * tl.load(move + 1) + head * tl.load(move + 2)
        position = tl.load(granule + 1, mask=here, other=0).to(tl.int32) + state
        index = position // unit_tokens
        inside = (position - index * unit_tokens).to(tl.int64)
        if SOME:
            here = here & (index < units) & (position >= first_token)
        unit = tl.load(unit_ids + index, mask=here, other=-1)
        if SOME:
            here = here & (unit >= 0)
        target += unit * tl.load(move + 3)
        target += inside * tl.load(move + 4) + head * tl.load(move + 5)
        source += piece.to(tl.int64) * (COLS * ELEMENT)
        target += piece.to(tl.int64) * (COLS * ELEMENT)
        mask = here[:, None]
        if LINE % COLS != 0:
            if PIECES == 1:
                mask = mask & (col < LINE)[None, :]
            else:
                mask = mask & (col[None, :] < (LINE - piece * COLS)[:, None])
        read = source.to(tl.pointer_type(KIND))[:, None] + col[None, :]
        write = target.to(tl.pointer_type(KIND))[:, None] + col[None, :]
        if VECTORS:
            read = tl.multiple_of(read, (1, 16))
            write = tl.multiple_of(write, (1, 16))
        tl.store(write, tl.load(read, mask=mask), mask=mask)


def copy(work: Any, tiles: Tiles, *, programs: int, warps: int) -> Any:
    """Run on the current stream. ``tiles``: of the moves of ``work``, an i64 tensor that begins with a work list.

    Returns the compiled kernel; None under the interpreter.
    """
    return _pull[(programs,)](
        work, tiles.first, tiles.moves, tiles.lines, tiles.states, tiles.rows, tiles.cols, tiles.pieces, tiles.element,
        KINDS[tiles.element], tiles.line, tiles.vectors, tiles.some, num_warps=warps,
    )  # fmt: skip
