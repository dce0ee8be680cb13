"""Copies between device memory and pinned memory, by a kernel in place of the copy engine.

The driver passes all copies of one direction through one queue, in the order of the calls, whatever their streams. The
few bytes that an engine sends and fetches in each step wait there for all of a save or load: 19 ms for each GiB (H100,
driver 580). A kernel does not make them wait. Few programs keep up with the link; more cost other kernels more.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from kvfs.kernels.work_list import PIECE_WORDS

_PIECE = tl.constexpr(PIECE_WORDS)
BLOCK, WARPS = 2048, 8  # words that a program moves at once


@triton.jit
def _copy_pieces(work, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    pieces = tl.load(work).to(tl.int32)
    lane = tl.arange(0, BLOCK)
    for piece in range(pieces):
        words = work + 1 + piece * _PIECE
        source = tl.load(words).to(tl.pointer_type(tl.int64))
        target = tl.load(words + 1).to(tl.pointer_type(tl.int64))
        count = tl.load(words + 2)
        for first in range(tl.program_id(0).to(tl.int64) * BLOCK, count, tl.num_programs(0) * BLOCK):
            at = first + lane
            mask = at < count
            tl.store(target + at, tl.load(source + at, mask=mask), mask=mask)


def copy_pieces(work: Any, *, programs: int) -> Any:
    """Run on the current stream. ``work``: an i64 tensor that begins with a list of pieces
    (``work_list.pack_pieces``).

    Returns the compiled kernel; None under the interpreter.
    """
    return _copy_pieces[(programs,)](work, BLOCK, num_warps=WARPS)
