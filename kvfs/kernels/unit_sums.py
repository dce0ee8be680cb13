"""Sums of leaves where they are: XXH3-64 of canonical leaves whose cells are in an engine's units, without a copy.

The same sums as ``kvfs.kernels.xxh3``. A leaf has the cells of one granule in one layer, by head and state; the buffer
table is followed by a table of where its elements are (``kvfs.kernels.unit_table``), so that the kernel does little
arithmetic on addresses.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from kvfs.kernels.cells import KINDS
from kvfs.kernels.unit_table import BUFFER_BITS, BUFFERS_MAX
from kvfs.kernels.work_list import BUFFER_WORDS, GRANULE_WORDS, HEAD_WORDS, Shape
from kvfs.kernels.xxh3 import _FIRST, _LAST, _digest, _product, _scrambled, _swap

LEAVES = 16  # of a tile; on an H100 faster than 8 and 32
WORD_WARPS, PART_WARPS = 8, 4  # where words are read at once, and where they are put together: the other one is slower

_HEAD = tl.constexpr(HEAD_WORDS)
_GRANULE = tl.constexpr(GRANULE_WORDS)
_BUFFER = tl.constexpr(BUFFER_WORDS)
_BITS = tl.constexpr(BUFFER_BITS)
_NUMBER = tl.constexpr(BUFFERS_MAX - 1)


@triton.jit
def _word(  # type: ignore[no-untyped-def]
    at, bases, unit_ids, token, unit_tokens, table, row_words, places, there,
    BUFFERS: tl.constexpr, STATES: tl.constexpr, CELL: tl.constexpr, ELEMENT: tl.constexpr, KIND: tl.constexpr,
    ONE_UNIT: tl.constexpr, LEAVES: tl.constexpr,
):  # fmt: skip
    """u64 (leaf, lane) at byte ``at`` of the leaves, by lane. ``bases``: by buffer, of each leaf."""
    value = tl.zeros((LEAVES, 8), tl.uint64)
    for part in tl.static_range(8 // ELEMENT):
        place = tl.load(places + (at // ELEMENT + part))
        number = (place & _NUMBER)[None, :]
        base = bases[0][:, None]
        for b in tl.static_range(1, BUFFERS):
            base = tl.where(number == b, bases[b][:, None], base)
        address = base + (place >> _BITS)[None, :]
        here = there[:, None] & (base != 0)
        if not ONE_UNIT:
            buffer = table + number * row_words
            position = token[:, None] + ((at + part * ELEMENT) // CELL % STATES)[None, :]
            index = position // unit_tokens
            inside = (position - index * unit_tokens).to(tl.int64)
            unit = tl.load(unit_ids + index, mask=here, other=0)
            address += inside * tl.load(buffer + 1) + unit * tl.load(buffer)
        data = tl.load(address.to(tl.pointer_type(KIND)), mask=here, other=0)
        if ELEMENT == 8:
            value = data.to(tl.uint64, bitcast=True)
        else:
            value = value | ((data.to(tl.uint64) & ((1 << (8 * ELEMENT)) - 1)) << (8 * ELEMENT * part))
    return value


@triton.jit
def _unit_leaves(  # type: ignore[no-untyped-def]
    work, constants, LEAVES: tl.constexpr, CHECK: tl.constexpr, BUFFERS: tl.constexpr, STATES: tl.constexpr,
    CELL: tl.constexpr, ELEMENT: tl.constexpr, KIND: tl.constexpr, ONE_UNIT: tl.constexpr, UNROLLED: tl.constexpr,
):  # fmt: skip
    rows = tl.load(work + 1)
    first_row = tl.load(work + 2)
    size = tl.load(work + 3).to(tl.int32)
    unit_tokens = tl.load(work + 5).to(tl.int32)
    unit_ids = tl.load(work + 9).to(tl.pointer_type(tl.int64))
    flags = tl.load(work + 10).to(tl.pointer_type(tl.int32))
    leaves = tl.load(work + 11).to(tl.pointer_type(tl.uint64))
    table = tl.load(work + 12).to(tl.pointer_type(tl.int64))
    row_words = tl.load(work + 13)
    places = table + BUFFERS * row_words
    total = tl.load(work) * rows
    constants = constants.to(tl.pointer_type(tl.uint64), bitcast=True)
    lane = tl.arange(0, 8)
    scramble = tl.load(constants + 16 + lane)[None, :]
    start = tl.load(constants + _FIRST + lane)[None, :]
    blocks = (size - 1) // 1024
    stripes = (size - 1 - blocks * 1024) // 64
    step = tl.num_programs(0) * LEAVES
    for first in range(tl.program_id(0).to(tl.int64) * LEAVES, total, step):
        leaf = first + tl.arange(0, LEAVES)
        there = leaf < total
        granule = work + _HEAD + (leaf // rows) * _GRANULE
        token = tl.load(granule + 1, mask=there, other=0).to(tl.int32)
        index = token // unit_tokens
        inside = (token - index * unit_tokens).to(tl.int64)
        unit = tl.load(unit_ids + index, mask=there, other=0)
        bases = ()
        for b in tl.static_range(BUFFERS):
            buffer = table + b * row_words
            base = tl.load(buffer + _BUFFER + first_row + leaf % rows, mask=there, other=0)
            if ONE_UNIT:
                base = tl.where(base != 0, base + unit * tl.load(buffer) + inside * tl.load(buffer + 1), base)
            bases = bases + (base,)  # type: ignore[assignment]  # noqa: RUF005 - Triton compiles no stars
        lanes = tl.zeros((LEAVES, 8), tl.uint64) + start
        at = lane * 8
        for _ in range(blocks):
            sums = tl.zeros((LEAVES, 8), tl.uint64)
            plain = tl.zeros((LEAVES, 8), tl.uint64)
            for some in range(0, 16, UNROLLED):
                for one in tl.static_range(UNROLLED):
                    data = _word(
                        at + (some + one) * 64, bases, unit_ids, token, unit_tokens, table, row_words, places, there,
                        BUFFERS, STATES, CELL, ELEMENT, KIND, ONE_UNIT, LEAVES,
                    )  # fmt: skip
                    sums += _product(data, tl.load(constants + some + one + lane)[None, :])
                    plain += data
            lanes = _scrambled(lanes + sums + _swap(plain, LEAVES), scramble)
            at += 1024
        plain = tl.zeros((LEAVES, 8), tl.uint64)
        for stripe in range(stripes):
            data = _word(
                at, bases, unit_ids, token, unit_tokens, table, row_words, places, there,
                BUFFERS, STATES, CELL, ELEMENT, KIND, ONE_UNIT, LEAVES,
            )  # fmt: skip
            lanes += _product(data, tl.load(constants + stripe + lane)[None, :])
            plain += data
            at += 64
        data = _word(
            size - 64 + lane * 8, bases, unit_ids, token, unit_tokens, table, row_words, places, there,
            BUFFERS, STATES, CELL, ELEMENT, KIND, ONE_UNIT, LEAVES,
        )  # fmt: skip
        lanes += _product(data, tl.load(constants + _LAST + lane)[None, :]) + _swap(plain + data, LEAVES)
        digest = _digest(lanes, constants, lane, size, LEAVES)
        if CHECK:
            expected = tl.load(leaves + leaf, mask=there, other=0)
            page = tl.load(granule + 2, mask=there, other=0)
            tl.store(flags + page, tl.full((LEAVES,), 1, tl.int32), mask=there & (digest != expected))
        else:
            tl.store(leaves + leaf, digest, mask=there)


def unrolled(element: int) -> int:
    """Stripes of a block whose loads are under way together: 16 of single bytes took half a minute to compile."""
    return 16 if element >= 4 else 4


def leaves(work: Any, constants: Any, shape: Shape, *, check: bool, programs: int) -> Any:
    """Sum the leaves of a batch on the current stream: compare with ``leaves`` and flag (``check``), or write them.

    ``work``: an i64 tensor that begins with a work list whose buffer table is a unit table; the first words of its
    granules are not used, and every unit must be there. ``constants``: an i64 tensor that holds ``xxh3.CONSTANTS``.
    Returns the compiled kernel; None under the interpreter.
    """
    one_unit, words = shape.unit_tokens % shape.states == 0, shape.element == 8
    return _unit_leaves[(programs,)](
        work, constants, LEAVES, check, shape.buffers, shape.states, shape.cell_bytes, shape.element,
        KINDS[shape.element], one_unit, unrolled(shape.element), num_warps=WORD_WARPS if words else PART_WARPS,
    )  # fmt: skip
