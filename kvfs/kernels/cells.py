"""Gather and scatter: cells between an engine's buffers and canonical pages in scratch, one kernel both ways.

A program takes (granule, layer) after (granule, layer): 16 states of all heads of one layer, which is one leaf. Of
each buffer it moves a tile of rows (head, state) by columns (elements of the part of the cell that the buffer holds).
K, V and scales are buffers of one launch.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from kvfs.kernels.work_list import BUFFER_WORDS, GRANULE_WORDS, HEAD_WORDS, Shape

_HEAD = tl.constexpr(HEAD_WORDS)
_GRANULE = tl.constexpr(GRANULE_WORDS)
_BUFFER = tl.constexpr(BUFFER_WORDS)


@triton.jit
def _cells(  # type: ignore[no-untyped-def]
    work, BUFFERS: tl.constexpr, STATES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ELEMENT: tl.constexpr,
    KIND: tl.constexpr, TO_PAGE: tl.constexpr,
):  # fmt: skip
    rows = tl.load(work + 1)
    first_row = tl.load(work + 2)
    leaf_bytes = tl.load(work + 3)
    cell_bytes = tl.load(work + 4)
    unit_tokens = tl.load(work + 5).to(tl.int32)
    units = tl.load(work + 6).to(tl.int32)
    first_token = tl.load(work + 7).to(tl.int32)
    scratch = tl.load(work + 8)
    unit_ids = tl.load(work + 9).to(tl.pointer_type(tl.int64))
    flags = tl.load(work + 10).to(tl.pointer_type(tl.int32))
    table = tl.load(work + 12).to(tl.pointer_type(tl.int64))
    row_words = tl.load(work + 13)
    total = tl.load(work) * rows
    lane = tl.arange(0, ROWS)
    col = tl.arange(0, COLS)
    for task in range(tl.program_id(0).to(tl.int64), total, tl.num_programs(0)):
        granule = work + _HEAD + (task // rows) * _GRANULE
        row = task % rows
        page = scratch + tl.load(granule) + row * leaf_bytes
        token = tl.load(granule + 1).to(tl.int32)
        bad = 0
        if not TO_PAGE:
            bad = tl.load(flags + tl.load(granule + 2))
        for b in tl.static_range(BUFFERS):
            buffer = table + b * row_words
            base = tl.load(buffer + _BUFFER + first_row + row)
            stride_unit = tl.load(buffer)
            stride_token = tl.load(buffer + 1)
            stride_head = tl.load(buffer + 2)
            cell_offset = tl.load(buffer + 3)
            elements = tl.load(buffer + 4) // ELEMENT
            page_head = tl.load(buffer + 5)
            count = tl.load(buffer + 6) * STATES
            if bad != 0 or base == 0:
                count = count * 0
            for first in range(0, count, ROWS):
                line = first + lane
                head = line // STATES
                state = (line % STATES).to(tl.int32)
                position = token + state
                index = position // unit_tokens
                here = (line < count) & (index < units) & (position >= first_token)
                unit = tl.load(unit_ids + index, mask=here, other=-1)
                here = here & (unit >= 0)
                inside = (position - index * unit_tokens).to(tl.int64)
                device = base + unit * stride_unit + inside * stride_token + head * stride_head
                place = page + ((page_head + head) * STATES + state) * cell_bytes + cell_offset
                device_cells = device.to(tl.pointer_type(KIND))
                page_cells = place.to(tl.pointer_type(KIND))
                for start in range(0, elements, COLS):
                    at = start + col
                    mask = here[:, None] & (at < elements)[None, :]
                    if TO_PAGE:
                        value = tl.load(device_cells[:, None] + at[None, :], mask=mask)
                        tl.store(page_cells[:, None] + at[None, :], value, mask=mask)
                    else:
                        value = tl.load(page_cells[:, None] + at[None, :], mask=mask)
                        tl.store(device_cells[:, None] + at[None, :], value, mask=mask)


KINDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


def move(work: Any, shape: Shape, *, to_page: bool, programs: int, warps: int = 8) -> Any:
    """Run on the current stream. ``work``: an i64 tensor that begins with a work list (``kvfs.kernels.work_list``).

    Returns the compiled kernel; None under the interpreter.
    """
    return _cells[(programs,)](
        work, shape.buffers, shape.states, shape.rows, shape.cols, shape.element, KINDS[shape.element], to_page,
        num_warps=warps,
    )  # fmt: skip
