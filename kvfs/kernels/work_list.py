"""The work list of one launch: what the kernels read, as one block of little-endian i64 words.

    0   granules      number of granules in this batch
    1   rows          layers of each granule here
    2   first_row     the first of them, as a layer position of the part
    3   leaf_bytes    bytes of one layer of one granule
    4   cell_bytes
    5   unit_tokens   tokens of a unit; 1 for groups of one state per page
    6   units         how many unit ids there are
    7   first_token   tokens before it do not move
    8   scratch       address that the offsets below count from
    9   unit_ids      address of the unit ids, i64
    10  flags         address of one i32 per page: not 0 = bad
    11  leaves        address of one u64 per leaf: read by ``check``, written by ``make``
    12  buffers       address of the buffer table (below)
    13  buffer_words  of one buffer in it
    16  granules x (offset in scratch, first token, page) - for groups of one state the chunk in place of the token

The buffer table has, for each buffer, BUFFER_WORDS words and then the base address of each layer of the part (0: not
in this buffer). No property of a launch is a scalar argument, so no count or offset can make Triton compile again.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvfs.pages.device_kv import DeviceKV
from kvfs.pages.layout import Group, Part

HEAD_WORDS = 16
GRANULE_WORDS = 3
BUFFER_WORDS = 8
PIECE_WORDS = 3
WORD = 8
ROWS_MAX = 128  # of a tile: states x heads
COLS_MAX = 64  # of a tile: elements of a cell in one buffer
LEAF_BYTES_MIN = 241  # shorter inputs take other paths of XXH3: the host sums them


@dataclass(frozen=True)
class Shape:
    """Constants of one group of one rank: those that the kernels are compiled for, and the buffer table."""

    buffers: int
    states: int  # of a granule
    rows: int  # of a tile
    cols: int
    element: int  # bytes moved at once: divides every address, stride and size
    aligned: bool  # leaves start and end on 8 bytes
    table: bytes
    leaf_bytes: int
    cell_bytes: int
    layers: int
    unit_tokens: int
    kernels: bool = True  # Triton works here; if not, torch moves the cells, and the host sums

    @property
    def tile_bytes(self) -> int:
        return self.rows * self.cols * self.element

    @property
    def sums(self) -> bool:
        """Whether the kernels can sum its leaves."""
        return self.kernels and self.leaf_bytes >= LEAF_BYTES_MIN


class Work(NamedTuple):
    """A work list on the device, and its words and unit ids on the host, i64 all."""

    memory: Any  # of the device (``kvfs.gpu.device.Memory``)
    offset: int  # in it
    host: memoryview  # the same words
    unit_ids: memoryview

    @property
    def words(self) -> Any:
        """A tensor of the device that begins with the work list."""
        return self.memory.words(self.offset)

    @property
    def address(self) -> int:
        """Of the work list, on the device."""
        return int(self.memory.address + self.offset)


def shape_of(group: Group, part: Part, device: DeviceKV) -> Shape:
    """The shape of ``part`` of ``group`` in checked buffers (``DeviceKV.check``)."""
    words = array("q")
    element, rows, cols = 8, 1, 1
    leaf_bytes = group.leaf_bytes(part)
    for b in device.buffers:
        bases = [0] * part.layers
        for base, layer in zip(b.bases, b.layers, strict=True):
            row = group.layers.index(layer) - part.layer
            if 0 <= row < part.layers:
                bases[row] = base
        head = max(part.head, b.heads[0])
        heads = max(0, min(part.head + part.heads, sum(b.heads)) - head)
        bases = [base and base + (head - b.heads[0]) * b.stride[2] for base in bases]
        element = math.gcd(element, *b.stride, *b.cell, group.cell.nbytes, leaf_bytes, *bases)
        words.extend([*b.stride, *b.cell, head - part.head, heads, 0, *bases])
        rows = max(rows, heads * group.granule_states)
        cols = max(cols, b.cell[1])
    return Shape(
        len(device.buffers), group.granule_states, min(ROWS_MAX, _power(rows)),
        min(COLS_MAX, _power(-(-cols // element))), element, leaf_bytes % 8 == 0, words.tobytes(), leaf_bytes,
        group.cell.nbytes, part.layers, max(1, device.unit_tokens),
    )  # fmt: skip


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def granule_words(offset: int, step: int, tokens: Sequence[int], pages: Sequence[int], granules: int = 1) -> array[int]:
    """Words of granules ``step`` bytes apart from ``offset`` on; ``granules`` of each of ``pages``."""
    return words_of(range(offset, offset + step * len(tokens), step), tokens, pages, granules)


def words_of(first: Sequence[int], tokens: Sequence[int], pages: Sequence[int], granules: int = 1) -> array[int]:
    """Words of granules, of which ``first`` holds the first ones; ``granules`` of each of ``pages``."""
    words = array("q", bytes(len(tokens) * GRANULE_WORDS * WORD))
    words[0::GRANULE_WORDS] = array("q", first)
    words[1::GRANULE_WORDS] = array("q", tokens)
    for i in range(granules):
        words[2 + i * GRANULE_WORDS :: granules * GRANULE_WORDS] = array("q", pages)
    return words


def pack(shape: Shape, granules: array[int], **fields: Any) -> bytes:
    """The work list; ``fields`` as of ``head``."""
    return head(shape, len(granules) // GRANULE_WORDS, **fields) + granules.tobytes()


def head(
    shape: Shape, granules: int, *, scratch: int, unit_ids: int, units: int, flags: int, leaves: int, buffers: int,
    first_token: int = 0, first_row: int = 0, rows: int | None = None, source: tuple[int, int] = (0, 0),
) -> bytes:  # fmt: skip
    """The first HEAD_WORDS words; ``granules`` and ``units`` are numbers, the others without a default addresses.

    ``source``: tokens of a unit of the source, and the address of its unit ids (``kvfs.kernels.pull``).
    """
    rows = shape.layers if rows is None else rows
    return array("q", [
        granules, rows, first_row, shape.leaf_bytes, shape.cell_bytes, shape.unit_tokens, units, first_token, scratch,
        unit_ids, flags, leaves, buffers, BUFFER_WORDS + shape.layers, *source,
    ]).tobytes()  # fmt: skip


def pack_pieces(pieces: Iterable[tuple[int, int, int]]) -> array[int]:
    """The list of a launch of ``copy_out``: how many pieces, and of each (source, target, i64 words)."""
    words = array("q", [0])
    for source, target, nbytes in pieces:
        assert nbytes % WORD == 0, f"{nbytes} bytes are no whole words"
        words.extend((source, target, nbytes // WORD))
    words[0] = len(words) // PIECE_WORDS
    return words
