"""XXH3-64 of leaves on the GPU, bit for bit equal to the library for inputs of more than 240 bytes.

Follows the specification and reference code of XXH3 (https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md): eight
64-bit lanes, stripes of 64 bytes, blocks of 16 stripes with a scramble behind each; default secret, seed 0. Within a
block the stripes only add to the lanes, so a block is one tile; blocks follow one another.
"""

from __future__ import annotations

from array import array
from typing import Any

import triton
import triton.language as tl

from kvfs.kernels.work_list import GRANULE_WORDS, HEAD_WORDS, Shape

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_INIT = (
    0xC2B2AE3D, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
    0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, 0x9E3779B1,
)  # fmt: skip
#: Words of the secret: all 24; from byte 121, for the last stripe; from byte 11, for the merge. Then the initial lanes
CONSTANTS = array("Q", _SECRET + _SECRET[121:185] + _SECRET[11:75]).tobytes() + array("Q", _INIT).tobytes()

LEAVES = 16  # of a tile
WARPS = 8  # on an H200 twice as fast as 4; with one block in flight it made no difference
_HEAD = tl.constexpr(HEAD_WORDS)
_GRANULE = tl.constexpr(GRANULE_WORDS)
_LAST = tl.constexpr(24)
_MERGE = tl.constexpr(32)
_FIRST = tl.constexpr(40)
_PRIME32_1 = tl.constexpr(0x9E3779B1)
_PRIME64_1 = tl.constexpr(0x9E3779B185EBCA87)
_AVALANCHE = tl.constexpr(0x165667919E3779F9)


@triton.jit
def _words(address, mask, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """u64 at byte addresses, 0 where masked out."""
    if ALIGNED:
        value = tl.load(address.to(tl.pointer_type(tl.uint64)), mask=mask, other=0)
    else:
        value = tl.zeros(address.shape, tl.uint64)
        for i in tl.static_range(8):
            byte = tl.load((address + i).to(tl.pointer_type(tl.uint8)), mask=mask, other=0)
            value = value | (byte.to(tl.uint64) << (8 * i))
    return value


@triton.jit
def _swap(lanes, LEAVES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Neighbouring lanes exchanged."""
    even, odd = tl.split(tl.reshape(lanes, (LEAVES, 4, 2)))
    return tl.reshape(tl.join(odd, even), (LEAVES, 8))


@triton.jit
def _product(data, key):  # type: ignore[no-untyped-def]
    keyed = data ^ key
    return (keyed & 0xFFFFFFFF) * (keyed >> 32)


@triton.jit
def _block(at, constants, lane, mask, LEAVES: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """What the 16 stripes of a block add to the lanes, whatever these hold."""
    lanes = tl.zeros((LEAVES, 8), tl.uint64)
    plain = tl.zeros((LEAVES, 8), tl.uint64)
    for stripe in tl.static_range(16):
        data = _words(at + stripe * 64, mask, ALIGNED)
        lanes += _product(data, tl.load(constants + stripe + lane)[None, :])
        plain += data
    return lanes + _swap(plain, LEAVES)


@triton.jit
def _scrambled(lanes, scramble):  # type: ignore[no-untyped-def]
    return (lanes ^ (lanes >> 47) ^ scramble) * _PRIME32_1


@triton.jit
def _digest(lanes, constants, lane, size, LEAVES: tl.constexpr):  # type: ignore[no-untyped-def]
    even, odd = tl.split(tl.reshape(lanes ^ tl.load(constants + _MERGE + lane)[None, :], (LEAVES, 4, 2)))
    digest = tl.sum((even * odd) ^ tl.umulhi(even, odd), axis=1) + size.to(tl.uint64) * _PRIME64_1
    digest = (digest ^ (digest >> 37)) * _AVALANCHE
    return digest ^ (digest >> 32)


@triton.jit
def _leaves(  # type: ignore[no-untyped-def]
    work, constants, LEAVES: tl.constexpr, ALIGNED: tl.constexpr, CHECK: tl.constexpr
):
    # A tile is (leaf, lane): a thread adds up the stripes of its lanes alone, with all loads of two blocks in flight.
    rows = tl.load(work + 1)
    size = tl.load(work + 3)
    scratch = tl.load(work + 8)
    flags = tl.load(work + 10).to(tl.pointer_type(tl.int32))
    leaves = tl.load(work + 11).to(tl.pointer_type(tl.uint64))
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
        mask = there[:, None] & (lane < 8)[None, :]
        granule = work + _HEAD + (leaf // rows) * _GRANULE
        address = scratch + tl.load(granule, mask=there, other=0) + (leaf % rows) * size
        lanes = tl.zeros((LEAVES, 8), tl.uint64) + start
        at = address[:, None] + (lane * 8)[None, :]
        for _ in range(blocks // 2):
            one = _block(at, constants, lane, mask, LEAVES, ALIGNED)
            other = _block(at + 1024, constants, lane, mask, LEAVES, ALIGNED)
            lanes = _scrambled(lanes + one, scramble)
            lanes = _scrambled(lanes + other, scramble)
            at += 2048
        for _ in range(blocks % 2):
            lanes = _scrambled(lanes + _block(at, constants, lane, mask, LEAVES, ALIGNED), scramble)
            at += 1024
        plain = tl.zeros((LEAVES, 8), tl.uint64)
        for stripe in range(stripes):
            data = _words(at, mask, ALIGNED)
            lanes += _product(data, tl.load(constants + stripe + lane)[None, :])
            plain += data
            at += 64
        data = _words((address + size - 64)[:, None] + (lane * 8)[None, :], mask, ALIGNED)
        lanes += _product(data, tl.load(constants + _LAST + lane)[None, :]) + _swap(plain + data, LEAVES)
        digest = _digest(lanes, constants, lane, size, LEAVES)
        if CHECK:
            expected = tl.load(leaves + leaf, mask=there, other=0)
            page = tl.load(granule + 2, mask=there, other=0)
            tl.store(flags + page, tl.full((LEAVES,), 1, tl.int32), mask=there & (digest != expected))
        else:
            tl.store(leaves + leaf, digest, mask=there)


def leaves(work: Any, constants: Any, shape: Shape, *, check: bool, programs: int) -> Any:
    """Sum the leaves of a batch on the current stream: compare with ``leaves`` and flag (``check``), or write them.

    ``constants``: an i64 tensor that holds CONSTANTS. ``shape.sums`` must be true. Returns the compiled kernel; None
    under the interpreter.
    """
    return _leaves[(programs,)](work, constants, LEAVES, shape.aligned, check, num_warps=WARPS)
