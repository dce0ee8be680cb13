"""Copies from the buffers of one pool into those of another one, which may be cut otherwise: a table of moves.

A move is what one buffer of the source and one of the target have in common: some heads, and some bytes of their cells.
What follows one another in both is one line, at best all states of a granule. For each move, the table has MOVE_WORDS
little-endian i64 words and then two addresses for each layer of the part, of the source and of the target (0: one of
the two does not have this layer).

    0   stride_unit, stride_token, stride_head of the source, then of the target
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvfs.kernels.work_list import BUFFER_WORDS, Shape

MOVE_WORDS = 6
TILE_BYTES = 64 << 10
COLS_MAX, ROWS_MAX = 4096, 128
VECTOR_BYTES = 16  # that a thread moves at once where addresses allow it


class Tiles(NamedTuple):
    """How the lines of neighbouring moves are cut: what the kernel is compiled for.

    A tile has ``rows`` pieces of ``cols`` elements; its pieces may be of several lines, layers and granules.
    """

    first: int  # of the moves
    moves: int
    lines: int  # of a granule in one layer
    states: int  # lines of a head: 1 where the states follow one another
    rows: int
    cols: int
    pieces: int  # of a line
    element: int  # bytes
    line: int  # elements of a line, whose last piece may be shorter
    vectors: bool  # addresses and lines are multiples of VECTOR_BYTES
    some: bool  # states may be left out: those before the first token, and those without a unit


class Moves(NamedTuple):
    table: bytes
    tiles: tuple[Tiles, ...]


class _Buffer(NamedTuple):
    strides: tuple[int, int, int]  # of a unit, a token, a head
    cell: int  # first byte of a cell here, and how many
    nbytes: int
    head: int  # first head here, and how many
    heads: int
    bases: tuple[int, ...]  # of the first head, by layer

    def base(self, layer: int, head: int, byte: int) -> int:
        return self.bases[layer] + (head - self.head) * self.strides[2] + byte - self.cell


class _Move(NamedTuple):
    source: tuple[int, int, int]  # strides
    target: tuple[int, int, int]
    heads: int
    nbytes: int
    bases: tuple[tuple[int, int], ...]


class _Kind(NamedTuple):
    """What the moves of one launch have in common."""

    line: int
    lines: int
    states: int
    element: int
    vectors: bool


def moves_of(source: Shape, target: Shape, *, some: bool = False) -> Moves:
    """Between pools that hold the same part of the same group. ``some``: for granules of which not all states move."""
    assert (source.states, source.leaf_bytes, source.layers) == (target.states, target.leaf_bytes, target.layers)
    found = [_common(s, t, target.layers) for s in _buffers(source) for t in _buffers(target)]
    moves = [move for move in found if move is not None]
    together = not some and source.unit_tokens % source.states == 0 == target.unit_tokens % target.states
    kinds = [_kind(move, target.states, together) for move in moves]
    words = array("q")
    for move in moves:
        words.extend([*move.source, *move.target, *itertools.chain.from_iterable(move.bases)])
    return Moves(words.tobytes(), tuple(_tiles(kinds, some)))


def _buffers(shape: Shape) -> list[_Buffer]:
    words, size = array("q", shape.table), BUFFER_WORDS + shape.layers
    found = []
    for at in range(0, size * shape.buffers, size):
        unit, token, head, cell, nbytes, first, heads = words[at : at + 7]
        bases = tuple(words[at + BUFFER_WORDS : at + size])
        found.append(_Buffer((unit, token, head), cell, nbytes, first, heads, bases))
    return found


def _common(source: _Buffer, target: _Buffer, layers: int) -> _Move | None:
    head, byte = max(source.head, target.head), max(source.cell, target.cell)
    heads = min(source.head + source.heads, target.head + target.heads) - head
    nbytes = min(source.cell + source.nbytes, target.cell + target.nbytes) - byte
    bases = [(0, 0)] * layers
    for layer in range(layers):
        if source.bases[layer] and target.bases[layer]:
            bases[layer] = source.base(layer, head, byte), target.base(layer, head, byte)
    if heads <= 0 or nbytes <= 0 or not any(map(any, bases)):
        return None
    return _Move(source.strides, target.strides, heads, nbytes, tuple(bases))


def _kind(move: _Move, states: int, together: bool) -> _Kind:
    """``together``: the states of a granule are in one unit, on both sides."""
    nbytes, heads, granule = move.nbytes, move.heads, states
    tokens, steps = {move.source[1], move.target[1]}, {move.source[2], move.target[2]}
    if heads == 1 or steps == {nbytes}:  # the heads of a token follow one another
        line, lines = nbytes * heads, 1
        if together and (states == 1 or tokens == {line}):
            line, states = line * states, 1
    elif together and tokens == {nbytes}:  # the tokens of a head do
        line, lines, states = nbytes * states, heads, 1
        if steps == {line}:
            line, lines = line * heads, 1
    else:
        line, lines = nbytes, heads
    addresses = list(itertools.chain.from_iterable(move.bases))
    for unit, token, head in (move.source, move.target):
        addresses += [unit, token * (granule if states == 1 else 1), head if lines > 1 else 0]
    common = math.gcd(VECTOR_BYTES, line, *addresses)
    element = min(8, common)
    return _Kind(line, lines * states, states, element, common == VECTOR_BYTES)


def _tiles(kinds: Sequence[_Kind], some: bool) -> Iterator[Tiles]:
    for kind, same in itertools.groupby(range(len(kinds)), kinds.__getitem__):
        numbers, elements = list(same), kind.line // kind.element
        cols = min(COLS_MAX, _power(elements))
        rows = min(ROWS_MAX, TILE_BYTES // (cols * kind.element))
        yield Tiles(
            numbers[0], len(numbers), kind.lines, kind.states, rows, cols, -(-elements // cols), kind.element,
            elements, kind.vectors, some,
        )  # fmt: skip


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()
