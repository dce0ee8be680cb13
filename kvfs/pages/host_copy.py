"""Copies between an engine's host buffers and canonical pages, [granule][layer][head slot][state][cell].

``gather`` reads the buffers and writes a page, ``scatter`` does the reverse; both copy exactly the bytes that the
descriptor names. The native library copies many pages in one call; without it, numpy copies a whole run of tokens in
one; without numpy, ``memmove`` copies what is contiguous on both sides. The descriptor must have passed
``DeviceKV.check``; unit ids are checked here, against ``units``.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from kvfs.errors import ConfigError
from kvfs.native import cells, library
from kvfs.pages.device_kv import DeviceKV, KVBuffer
from kvfs.pages.layout import Group, Part
from kvfs.system.memory_views import address_of, address_of_readonly, byte_view
from kvfs.types import BufferLike

CellTargets: TypeAlias = cells.Targets
RUNS_PER_GRANULE = 4  # with more runs than this, numpy copies each layer by index, in one call


class _Span(NamedTuple):
    """Neighbouring states of one granule in one unit."""

    state: int  # the first, within the page
    states: int  # how many
    unit: int
    inside: int  # the first, within the unit


class _CopyRun(NamedTuple):
    """States of one granule that are evenly spaced in a buffer."""

    state: int  # the first, within the page
    states: int  # how many
    offset: int  # bytes from the base of a layer to the first
    step: int  # bytes from one to the next


class _Rows(NamedTuple):
    """The cells that a buffer and a part share: (row in the page, index of the base) per layer, and heads."""

    layers: list[tuple[int, int]]
    page_head: int
    buffer_head: int
    heads: int


def gather(
    page: BufferLike, group: Group, part: Part, device_kv: DeviceKV, units: Sequence[int], chunk: int, *,
    first_token: int = 0,
) -> int:  # fmt: skip
    """Copy page ``chunk`` of a prompt from the engine's buffers; returns the bytes copied.

    ``page``: writable, ``group.part_bytes(part)`` bytes. ``units[i]`` is the unit with tokens
    [i * unit_tokens, (i + 1) * unit_tokens) of the prompt (for groups of one state per page: with the state at the
    end of chunk i); -1 = none. The page's bytes of states without a unit, of tokens before ``first_token``, and of
    layers and heads that the buffers do not hold, are not touched. ConfigError for a wrong size or unit id.
    """
    return gather_pages([page], group, part, device_kv, units, [chunk], first_token=first_token)


def scatter(
    page: BufferLike, group: Group, part: Part, device_kv: DeviceKV, units: Sequence[int], chunk: int, *,
    first_token: int = 0,
) -> int:  # fmt: skip
    """Copy page ``chunk`` of a prompt to the engine's buffers; returns the bytes copied. As ``gather``, reversed."""
    return scatter_pages([page], group, part, device_kv, units, [chunk], first_token=first_token)


def gather_pages(
    pages: Sequence[BufferLike], group: Group, part: Part, device_kv: DeviceKV, units: Sequence[int],
    chunks: Sequence[int], *, first_token: int = 0,
) -> int:  # fmt: skip
    """``gather`` for several pages of a prompt, of ascending chunks."""
    views = _views(pages, group, part, writable=True)
    return _move(views, group, part, device_kv, units, chunks, first_token, to_page=True)


def scatter_pages(
    pages: Sequence[BufferLike], group: Group, part: Part, device_kv: DeviceKV, units: Sequence[int],
    chunks: Sequence[int], *, first_token: int = 0,
) -> int:  # fmt: skip
    """``scatter`` for several pages of a prompt, of ascending chunks."""
    views = _views(pages, group, part, writable=False)
    return _move(views, group, part, device_kv, units, chunks, first_token, to_page=False)


def _views(pages: Sequence[BufferLike], group: Group, part: Part, *, writable: bool) -> list[memoryview]:
    nbytes = group.part_bytes(part)
    views = [byte_view(page, "page", writable=writable) for page in pages]
    wrong = next((view for view in views if len(view) != nbytes), None)
    if wrong is not None:
        raise ConfigError(f"page of group {group.name} has {len(wrong)} bytes: pass {nbytes}")
    return views


def _move(
    pages: Sequence[memoryview], group: Group, part: Part, device_kv: DeviceKV, units: Sequence[int],
    chunks: Sequence[int], first_token: int, *, to_page: bool,
) -> int:  # fmt: skip
    moved = 0
    native, numpy = library.loaded(), _numpy()
    for buffer in device_kv.buffers:
        rows = _rows(buffer, group, part)
        if not rows.heads or not rows.layers:
            continue
        states = 0
        if native is not None and chunks:
            states = _move_native(native, pages, group, part, buffer, rows, units, chunks, first_token, to_page)
        else:
            for page, chunk in zip(pages, chunks, strict=True):
                copy = _Copy(page, group, part, buffer, rows, to_page)
                states += _move_page(numpy, copy, units, chunk, first_token)
        moved += states * len(rows.layers) * rows.heads * buffer.cell[1]
    return moved


def _move_page(numpy: Any, copy: _Copy, units: Sequence[int], chunk: int, first_token: int) -> int:
    """Copy one page; how many states of it."""
    spans = list(_spans(copy.buffer, copy.group, units, chunk, first_token))
    if spans:
        runs = _merge(spans, copy.buffer, copy.group.granule_states)
        if numpy is None:
            copy.with_memmove(runs)
        elif len(runs) > RUNS_PER_GRANULE * copy.group.granules:
            copy.by_index(numpy, spans)
        else:
            copy.by_run(numpy, runs)
    return sum(span.states for span in spans)


def _move_native(
    native: library.Library, pages: Sequence[memoryview], group: Group, part: Part, buffer: KVBuffer, rows: _Rows,
    units: Sequence[int], chunks: Sequence[int], first_token: int, to_page: bool,
) -> int:  # fmt: skip
    """Copy pages in one call; how many states of them."""
    per = buffer.states
    first = 0 if group.states == 1 else first_token
    begin, end = max(chunks[0] * group.states, first), (chunks[-1] + 1) * group.states
    low, high = begin // per, max(begin // per, -(-end // per))
    ids = array("q", units[low:high])
    if ids and not -1 <= min(ids) <= max(ids) < buffer.units:
        for index in range(low, high):
            _unit(buffer, units, index)  # names the wrong one
    whole = begin == chunks[0] * group.states and len(ids) == high - low and min(ids) >= 0
    ids.extend([-1] * (high - low - len(ids)))
    shape, layers = _target(group, part, buffer, rows, first, low)
    address = address_of_readonly if pages[0].readonly else address_of
    cells.move(
        native, shape, layers,
        [(address(page), chunk * group.states) for page, chunk in zip(pages, chunks, strict=True)], ids,
        to_page=to_page,
    )  # fmt: skip
    if whole:
        return len(chunks) * group.states
    return sum(span.states for chunk in chunks for span in _spans(buffer, group, units, chunk, first_token))


def targets(group: Group, part: Part, device_kv: DeviceKV, first_token: int = 0) -> CellTargets:
    """Where the native library copies the cells of ``part`` to; ``first_token`` as in ``scatter``."""
    first = 0 if group.states == 1 else first_token
    found = [(buffer, _rows(buffer, group, part)) for buffer in device_kv.buffers]
    return cells.Targets([
        _target(group, part, buffer, rows, first, 0) for buffer, rows in found if rows.heads and rows.layers
    ])  # fmt: skip


def _target(
    group: Group, part: Part, buffer: KVBuffer, rows: _Rows, first: int, first_unit: int
) -> tuple[cells.Shape, list[tuple[int, int]]]:
    size, head = group.cell.nbytes, rows.buffer_head * buffer.stride[2]
    shape = cells.Shape(
        group.states, group.granule_states, buffer.states, part.layers, part.heads, rows.heads, size, buffer.cell[1],
        rows.page_head * group.granule_states * size + buffer.cell[0], first, first_unit, *buffer.stride,
    )  # fmt: skip
    return shape, [(row, buffer.bases[index] + head) for row, index in rows.layers]


@functools.cache
def _numpy() -> Any:
    try:
        import numpy
    except ImportError:
        return None
    return numpy


# -- addresses -------------------------------------------------------------------------------


def _rows(buffer: KVBuffer, group: Group, part: Part) -> _Rows:
    layers = []
    for index, layer in enumerate(buffer.layers):
        row = group.layers.index(layer) - part.layer
        if 0 <= row < part.layers:
            layers.append((row, index))
    head = max(part.head, buffer.heads[0])
    heads = min(part.head + part.heads, sum(buffer.heads)) - head
    return _Rows(sorted(layers), head - part.head, head - buffer.heads[0], max(0, heads))


def _spans(buffer: KVBuffer, group: Group, units: Sequence[int], chunk: int, first_token: int) -> Iterator[_Span]:
    """The states of a page that have a unit, cut at the boundaries of units and granules."""
    if group.states == 1:
        unit = _unit(buffer, units, chunk)
        if unit >= 0:
            yield _Span(0, 1, unit, 0)
        return
    size, granule = buffer.unit_tokens, group.granule_states
    token, end = max(chunk * group.states, first_token), (chunk + 1) * group.states
    while token < end:
        index, inside = divmod(token, size)
        count = min(size - inside, granule - token % granule, end - token)
        unit = _unit(buffer, units, index)
        if unit >= 0:
            yield _Span(token - chunk * group.states, count, unit, inside)
        token += count


def _merge(spans: Sequence[_Span], buffer: KVBuffer, granule: int) -> list[_CopyRun]:
    """The longest runs of evenly spaced states; none crosses a granule."""
    runs: list[_CopyRun] = []
    for span in spans:
        offset, step = span.unit * buffer.stride[0] + span.inside * buffer.stride[1], buffer.stride[1]
        if runs and runs[-1].state + runs[-1].states == span.state and span.state % granule:
            last = runs[-1]
            gap = offset - last.offset - (last.states - 1) * last.step
            if (last.states == 1 or gap == last.step) and (span.states == 1 or gap == step):
                runs[-1] = _CopyRun(last.state, last.states + span.states, last.offset, gap)
                continue
        runs.append(_CopyRun(span.state, span.states, offset, step))
    return runs


def _unit(buffer: KVBuffer, units: Sequence[int], index: int) -> int:
    unit = units[index] if index < len(units) else -1
    if not -1 <= unit < buffer.units:
        raise ConfigError(f"unit {unit} at position {index}: the buffer has units 0 to {buffer.units - 1}; -1 = none")
    return unit


@functools.lru_cache(4096)
def _memory(start: int, nbytes: int) -> Any:
    """An allocation as an array of bytes. Not owned: the caller of a copy keeps it alive."""
    return _numpy().frombuffer((ctypes.c_uint8 * nbytes).from_address(start), dtype="uint8")


# -- copying ---------------------------------------------------------------------------------


class _Copy(NamedTuple):
    """One copy between a page and a buffer, in one of three ways."""

    page: memoryview
    group: Group
    part: Part
    buffer: KVBuffer
    rows: _Rows
    to_page: bool

    def by_run(self, numpy: Any, runs: Sequence[_CopyRun]) -> None:
        """For few runs: all heads of a run and layer in one strided copy."""
        view, stride = self._page_array(numpy), self.buffer.stride
        for run in runs:
            granule, state = divmod(run.state, self.group.granule_states)
            shape, strides = (self.rows.heads, run.states, self.buffer.cell[1]), (stride[2], run.step, 1)
            for row, index in self.rows.layers:
                cells = self._device_array(numpy, index, run.offset, shape, strides)
                states = view[granule, row, :, state : state + run.states]
                if self.to_page:
                    states[...] = cells
                else:
                    cells[...] = states

    def by_index(self, numpy: Any, spans: Sequence[_Span]) -> None:
        """For scattered token slots: all of a layer in one indexed copy."""
        picks = [(s.state + i, s.unit, s.inside + i) for s in spans for i in range(s.states)]
        states, units, tokens = numpy.array(picks, dtype="int64").T
        view, buffer, group = self._page_array(numpy), self.buffer, self.group
        shape = (buffer.units, buffer.states, self.rows.heads, buffer.cell[1])
        lines = (group.granules, group.granule_states, *shape[2:])
        granules, inside = numpy.divmod(states, group.granule_states)
        for row, index in self.rows.layers:
            cells = self._device_array(numpy, index, 0, shape, (*buffer.stride, 1))
            if not self.to_page:
                by_state = view[:, row].transpose(0, 2, 1, 3).reshape(group.states, *shape[2:])
                cells[units, tokens] = by_state[states]
            elif len(states) == group.states:
                view[:, row] = cells[units, tokens].reshape(lines).transpose(0, 2, 1, 3)
            else:
                view[granules, row, :, inside] = cells[units, tokens]

    def with_memmove(self, runs: Sequence[_CopyRun]) -> None:
        """Without numpy: one call for each range that is contiguous on both sides."""
        if self.page.readonly:
            holder: Any = (ctypes.c_uint8 * len(self.page)).from_buffer_copy(self.page)
        else:
            holder = (ctypes.c_uint8 * len(self.page)).from_buffer(self.page)
        base = ctypes.addressof(holder)
        for address, at, nbytes in _coalesce(self._pieces(runs)):
            if self.to_page:
                ctypes.memmove(base + at, address, nbytes)
            else:
                ctypes.memmove(address, base + at, nbytes)

    def _pieces(self, runs: Sequence[_CopyRun]) -> Iterator[tuple[int, int, int]]:
        """(address, offset in the page, bytes) in the order of the page."""
        group, part, buffer, rows = self.group, self.part, self.buffer, self.rows
        size, (offset, nbytes) = group.cell.nbytes, buffer.cell
        for granule, some in itertools.groupby(runs, lambda run: run.state // group.granule_states):
            here = list(some)
            for row, index in rows.layers:
                for head in range(rows.heads):
                    line = (granule * part.layers + row) * part.heads + rows.page_head + head
                    base = buffer.bases[index] + (rows.buffer_head + head) * buffer.stride[2]
                    for run in here:
                        at = (line * group.granule_states + run.state % group.granule_states) * size + offset
                        if run.step == size == nbytes:
                            yield base + run.offset, at, run.states * size
                            continue
                        for i in range(run.states):
                            yield base + run.offset + i * run.step, at + i * size, nbytes

    def _page_array(self, numpy: Any) -> Any:
        """The page as [granule][layer][head][state][byte], cut to the heads and bytes of the buffer."""
        group, part, rows, (offset, nbytes) = self.group, self.part, self.rows, self.buffer.cell
        shape = (group.granules, part.layers, part.heads, group.granule_states, group.cell.nbytes)
        whole = numpy.frombuffer(self.page, dtype="uint8").reshape(shape)
        return whole[:, :, rows.page_head : rows.page_head + rows.heads, :, offset : offset + nbytes]

    def _device_array(self, numpy: Any, index: int, offset: int, shape: Any, strides: Any) -> Any:
        """Cells of one layer from the first shared head on; numpy checks them against the allocation's bounds."""
        buffer = self.buffer
        start, nbytes = buffer.extents[index]
        at = buffer.bases[index] - start + offset + self.rows.buffer_head * buffer.stride[2]
        return numpy.ndarray(shape, "uint8", _memory(start, nbytes), at, strides)


def _coalesce(pieces: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """Join pieces that continue where the previous one ended, on both sides."""
    last = (0, 0, 0)
    for address, at, nbytes in pieces:
        if last[2] and (address, at) == (last[0] + last[2], last[1] + last[2]):
            last = (last[0], last[1], last[2] + nbytes)
            continue
        if last[2]:
            yield last
        last = (address, at, nbytes)
    if last[2]:
        yield last
