"""The unit table of a pool: its buffer table, and where each element of a leaf is in them.

For each ``Shape.element`` bytes of a leaf one little-endian i64: the number of the buffer in its low BUFFER_BITS, above
them the bytes from the first cell of a granule there. Where a granule is in several units, the bytes are those from its
token's first cell.
"""

from __future__ import annotations

from array import array

from kvfs.kernels.work_list import BUFFER_WORDS, Shape

BUFFER_BITS = 6
BUFFERS_MAX = 1 << BUFFER_BITS


def unit_table(shape: Shape) -> bytes:
    """Of a pool whose shape has at most BUFFERS_MAX buffers (``sums_in_units``)."""
    words, size = array("q", shape.table), BUFFER_WORDS + shape.layers
    together = shape.unit_tokens % shape.states == 0
    per_cell, cells = shape.cell_bytes // shape.element, shape.leaf_bytes // shape.cell_bytes
    places = array("q", bytes(8 * per_cell * cells))
    for number in range(shape.buffers):
        _, token, head, byte, nbytes, first, heads = words[number * size : number * size + 7]
        begin, count = byte // shape.element, nbytes // shape.element
        for line in range(first * shape.states, (first + heads) * shape.states):
            start = (line // shape.states - first) * head + (line % shape.states * token if together else 0)
            at = line * per_cell + begin
            places[at : at + count] = array(
                "q", range(start << BUFFER_BITS | number, start + nbytes << BUFFER_BITS, shape.element << BUFFER_BITS)
            )
    return shape.table + places.tobytes()


def sums_in_units(shape: Shape) -> bool:
    """Whether the kernel can sum leaves in these units."""
    return shape.sums and shape.buffers <= BUFFERS_MAX
