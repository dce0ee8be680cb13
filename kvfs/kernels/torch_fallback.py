"""Gather and scatter where Triton does not work: what ``kvfs.kernels.cells`` does, by torch's indexing.

The host computes the address of each part of a cell, so it waits for the device more often than with the kernels.
Ignores flags: pages have been verified before.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

from kvfs.kernels.work_list import BUFFER_WORDS, GRANULE_WORDS, HEAD_WORDS, Shape, Work

ELEMENTS_MAX = 1 << 20  # moved at once: the indices of each take 16 bytes of the device

At = Callable[[int, int, int], Any]


def move(work: Work, shape: Shape, at: At, *, to_page: bool) -> None:
    """Run on the current stream. ``at(address, n, bytes)``: n integers of so many bytes there, as a tensor."""
    import torch

    granules, rows, first_row, leaf_bytes, cell_bytes, unit_tokens, units, first_token, scratch = work.host[:9]
    if not granules or not units:
        return
    lists = torch.frombuffer(work.host, dtype=torch.int64)[HEAD_WORDS:][: granules * GRANULE_WORDS].view(granules, -1)
    position = lists[:, 1:2] + torch.arange(shape.states)
    index = position // unit_tokens
    unit = torch.frombuffer(work.unit_ids, dtype=torch.int64)[index.clamp(max=units - 1)]
    here = (index < units) & (position >= first_token) & (unit >= 0)
    granule, state = here.nonzero(as_tuple=True)
    unit, inside = unit[here], (position - index * unit_tokens)[here]
    in_page = lists[granule, 0] + state * cell_bytes
    for bases, step_unit, step_token, step_head, offset, nbytes, page_head, heads in _buffers(shape, first_row, rows):
        if not heads or not len(unit):
            continue
        row, base = zip(*bases, strict=True)
        head = torch.arange(heads)
        page = in_page[:, None] + (page_head + head) * shape.states * cell_bytes + offset
        cell = (unit * step_unit + inside * step_token)[:, None] + head * step_head
        pages = page + torch.tensor(row)[:, None, None] * leaf_bytes
        cells = cell + torch.tensor(base)[:, None, None]
        _copy(shape.element, nbytes, at, cells, pages + scratch, to_page=to_page)


def _buffers(shape: Shape, first_row: int, rows: int) -> list[tuple[Any, ...]]:
    """For each buffer with any of these layers: (layer, base address) of those, and the words of its head."""
    table = array("q", shape.table)
    size, found = BUFFER_WORDS + shape.layers, []
    for start in range(0, size * shape.buffers, size):
        first = start + BUFFER_WORDS + first_row
        bases = [(row, base) for row, base in enumerate(table[first : first + rows]) if base]
        if bases:
            found.append((bases, *table[start : start + 7]))
    return found


def _copy(element: int, nbytes: int, at: At, cells: Any, pages: Any, *, to_page: bool) -> None:
    """Copy ``nbytes`` each between these addresses of the engine's cells and of pages."""
    import torch

    elements = nbytes // element
    sides = []
    for addresses in (cells, pages):
        low = int(addresses.min())
        reach = (int(addresses.max()) - low) // element + elements
        sides.append((at(low, reach, element), ((addresses - low) // element).flatten()))
    (device, cell_at), (scratch, page_at) = sides
    step = max(1, ELEMENTS_MAX // elements)
    columns = torch.arange(elements, device=device.device)
    for first in range(0, len(cell_at), step):
        cell = (cell_at[first : first + step].to(device.device)[:, None] + columns).flatten()
        page = (page_at[first : first + step].to(device.device)[:, None] + columns).flatten()
        if to_page:
            scratch[page] = device[cell]
        else:
            device[cell] = scratch[page]
