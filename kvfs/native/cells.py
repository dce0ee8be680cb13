"""Copies of cells between an engine's buffer and pages by the compiled library, with the interpreter released."""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvfs.native.library import Library

_SHAPE = struct.Struct("<11Q3q")
_PAIR = struct.Struct("<QQ")


class Shape(NamedTuple):
    """kvfs_shape of native/kvfs_native.h."""

    states: int
    granule_states: int
    unit_states: int
    page_layers: int
    page_heads: int
    heads: int
    cell: int
    nbytes: int
    page_at: int
    first: int
    first_unit: int
    unit_step: int
    state_step: int
    head_step: int


class Targets:
    """Where the cells of a part are, in an engine's buffers: packed once, for many loads. The caller keeps the memory
    of the buffers."""

    def __init__(self, targets: Sequence[tuple[Shape, Sequence[tuple[int, int]]]]) -> None:
        """Of each buffer its shape, and its layers as for ``move``."""
        self._layers, packed = list[object](), []
        for shape, layers in targets:
            rows = ctypes.create_string_buffer(b"".join([_PAIR.pack(*row) for row in layers]))
            self._layers.append(rows)
            packed.append(_SHAPE.pack(*shape) + _PAIR.pack(ctypes.addressof(rows), len(layers)))
        self._packed = ctypes.create_string_buffer(b"".join(packed))
        self.address, self.count = ctypes.addressof(self._packed), len(packed)


def move(
    native: Library, shape: Shape, layers: Iterable[tuple[int, int]], pages: Iterable[tuple[int, int]],
    units: array[int], *, to_page: bool,
) -> None:  # fmt: skip
    """``layers``: (row in the part, address) each; ``pages``: (address, its first state in the prompt) each; ``units``:
    of type q, checked. The caller keeps all memory."""
    rows, places = [_PAIR.pack(*row) for row in layers], [_PAIR.pack(*page) for page in pages]
    address, _ = units.buffer_info()
    native.free.kvfs_cells(
        _SHAPE.pack(*shape), b"".join(rows), len(rows), b"".join(places), len(places), ctypes.c_void_p(address), to_page
    )
