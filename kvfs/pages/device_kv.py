"""The engine's buffers as data: one descriptor for every engine and every order of dimensions.

    address(layer i, unit u, token t, head h) = bases[i] + u * stride[0] + t * stride[1] + h * stride[2]

is where ``cell[1]`` bytes are stored, from byte ``cell[0]`` of the cell on. Separate K and V are two buffers of one
:class:`DeviceKV`. ``kvfs.pages.describe`` makes them from tensors. Nothing here reads or writes memory;
``kvfs.pages.host_copy`` does, and only after ``check``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvfs.errors import ConfigError
from kvfs.pages.layout import PAGE_TOKENS_MAX, Group, PageLayout, Part

_MEMORY = re.compile(r"host|pinned|cuda:\d+")


@dataclass(frozen=True, slots=True)
class KVBuffer:
    """Where a piece of each cell is stored. Addresses and strides in bytes; strides may be negative."""

    memory: str  # "host", "pinned" or "cuda:n"
    bases: tuple[int, ...]  # address of (unit 0, token 0, first head) per layer
    extents: tuple[tuple[int, int], ...]  # (start, bytes) of the allocation that contains each base
    layers: tuple[int, ...]  # MODEL layer ids, in the order of ``bases``
    heads: tuple[int, int]  # first model head slot, how many
    replica: tuple[int, int]  # (index, count) of ranks that hold the same bytes; one of them saves each page
    unit_tokens: int  # tokens of a unit: 1 = token slots, B = blocks, 0 = one state per unit
    units: int
    stride: tuple[int, int, int]  # per unit, token, head
    cell: tuple[int, int]  # offset in the cell, contiguous bytes
    owner: object = field(default=None, compare=False, repr=False)  # keeps the allocations alive

    def __post_init__(self) -> None:
        numbers = (*self.bases, *self.layers, *self.heads, *self.replica, self.unit_tokens, self.units, *self.stride,
                   *self.cell, *(n for extent in self.extents for n in extent))  # fmt: skip
        shapes = [len(self.heads), len(self.replica), len(self.stride), len(self.cell)]
        if shapes != [2, 2, 3, 2] or any(len(e) != 2 for e in self.extents):
            raise ConfigError(f"heads, replica, stride, cell have {shapes} numbers: pass 2, 2, 3, 2; 2 per extent")
        wrong = [n for n in numbers if type(n) is not int]
        if wrong:
            raise ConfigError(f"a buffer holds {wrong[0]!r}: pass plain integers for addresses, strides and sizes")
        if not len(self.bases) == len(self.extents) == len(self.layers) or not self.layers:
            raise ConfigError(
                f"a buffer has {len(self.layers)} layers, {len(self.bases)} bases, {len(self.extents)} extents: "
                "pass one base and one extent per layer"
            )

    @property
    def states(self) -> int:
        """States of one unit: its tokens, or one."""
        return max(1, self.unit_tokens)


class _Rectangle(NamedTuple):
    """The share of a buffer in one layer's cells: half-open ranges of heads and of bytes."""

    head: int
    head_end: int
    byte: int
    byte_end: int

    def overlaps(self, other: _Rectangle) -> bool:
        heads = self.head < other.head_end and other.head < self.head_end
        return heads and self.byte < other.byte_end and other.byte < self.byte_end


@dataclass(frozen=True, slots=True)
class DeviceKV:
    """The buffers in which a rank keeps one group: a rectangle of its layers and head slots."""

    group: str
    buffers: tuple[KVBuffer, ...]

    def __post_init__(self) -> None:
        if type(self.buffers) is not tuple or not self.buffers:
            raise ConfigError(f"group {self.group!r}: pass a non-empty tuple of KVBuffer")

    @property
    def memory(self) -> str:
        """The memory of all buffers: "host", "pinned" or "cuda:n"."""
        return self.buffers[0].memory

    @property
    def unit_tokens(self) -> int:
        return self.buffers[0].unit_tokens

    @property
    def units(self) -> int:
        return self.buffers[0].units

    def part(self, group: Group) -> Part:
        """The rectangle that this rank holds. ConfigError if it is not one of ``group``."""
        positions = sorted({_position(group, layer) for buffer in self.buffers for layer in buffer.layers})
        head = min(buffer.heads[0] for buffer in self.buffers)
        heads = max(sum(buffer.heads) for buffer in self.buffers) - head
        if positions != list(range(positions[0], positions[0] + len(positions))):
            raise ConfigError(
                f"layers at {positions} of group {group.name} are not contiguous: attach each contiguous run separately"
            )
        part = Part(head, heads, positions[0], len(positions))
        group.leaves(part)  # ConfigError for a part outside the group
        return part

    def writes(self, chunk: int) -> bool:
        """Whether this rank is the one to save page ``chunk``, among those that hold the same bytes."""
        index, count = self.buffers[0].replica
        return chunk % count == index

    def written(self, chunks: Sequence[int]) -> list[int]:
        """Those of ``chunks`` that this rank saves."""
        alone = self.buffers[0].replica[1] == 1
        return list(chunks) if alone else [chunk for chunk in chunks if self.writes(chunk)]

    def unit_range(self, group: Group, chunk: int) -> range:
        """Numbers (positions in ``units`` of a prompt) of the units that page ``chunk`` touches."""
        tokens = self.unit_tokens
        if not tokens:
            return range(chunk, chunk + 1)
        first = chunk * group.states
        return range(first // tokens, -(-(first + group.states) // tokens))

    def check(self, layout: PageLayout) -> Group:
        """The group of ``layout`` that this describes. ConfigError names what does not fit, and the remedy."""
        group = layout.group(self.group)
        for buffer in self.buffers:
            _check_buffer(buffer, group)
            first = self.buffers[0]
            if buffer.memory != first.memory:
                raise ConfigError(
                    f"group {group.name}: buffers are in {first.memory} and {buffer.memory}; attach one device"
                )
            same = (buffer.unit_tokens, buffer.units, buffer.replica) == (first.unit_tokens, first.units, first.replica)
            if not same:
                raise ConfigError(
                    f"group {group.name}: buffers differ in unit_tokens, units or replica; one unit id must mean "
                    "the same tokens in all of them"
                )
        _check_units(self.unit_tokens, group, layout.page_tokens)
        _check_tiling(self, group, self.part(group))
        return group


def _position(group: Group, layer: int) -> int:
    try:
        return group.layers.index(layer)
    except ValueError:
        raise ConfigError(
            f"layer {layer} is not in group {group.name}: pass model layer ids out of {group.layers}"
        ) from None


def _check_buffer(buffer: KVBuffer, group: Group) -> None:
    where = f"of group {group.name}"
    if not _MEMORY.fullmatch(buffer.memory):
        raise ConfigError(f"memory {where} is {buffer.memory!r}: pass 'host', 'pinned' or 'cuda:<n>'")
    (index, count), (first, heads), (offset, nbytes) = buffer.replica, buffer.heads, buffer.cell
    if not 0 <= index < count:
        raise ConfigError(f"replica {where} is {buffer.replica}: pass (index, count) with 0 <= index < count")
    if first < 0 or heads < 1 or first + heads > group.heads:
        raise ConfigError(f"heads {where} are {buffer.heads}: (first, count) within its {group.heads} head slots")
    if offset < 0 or nbytes < 1 or offset + nbytes > group.cell.nbytes:
        raise ConfigError(f"cell {where} is {buffer.cell}: (offset, bytes) within its {group.cell.nbytes} bytes")
    if buffer.units < 1:
        raise ConfigError(f"units {where} is {buffer.units}: pass how many units the buffer has, 1 or more")
    if len(set(buffer.layers)) < len(buffer.layers) or len(set(buffer.bases)) < len(buffer.bases):
        raise ConfigError(f"a layer or a base address {where} is given twice: pass each layer once, at its own address")
    _check_extents(buffer, where)


def _check_extents(buffer: KVBuffer, where: str) -> None:
    """ConfigError unless every address is inside its allocation, and no two cells share a byte."""
    counts = (buffer.units, buffer.states, buffer.heads[1])
    steps = [s * (n - 1) for s, n in zip(buffer.stride, counts, strict=True)]
    low, high = sum(s for s in steps if s < 0), sum(s for s in steps if s > 0) + buffer.cell[1]
    for layer, base, (start, nbytes) in zip(buffer.layers, buffer.bases, buffer.extents, strict=True):
        if start <= 0 or base + low < start or base + high > start + nbytes:
            raise ConfigError(
                f"layer {layer} {where} reaches [{base + low:#x}, {base + high:#x}), its allocation is "
                f"[{start:#x}, {start + nbytes:#x}): correct stride, units or extents"
            )
    inner = buffer.cell[1]
    for stride, count in sorted((abs(s), n) for s, n in zip(buffer.stride, counts, strict=True) if n > 1):
        if stride < inner:
            raise ConfigError(
                f"stride {buffer.stride} {where} makes cells share bytes: pass a tensor that is not expanded"
            )
        inner = stride * (count - 1) + inner


def _check_units(unit_tokens: int, group: Group, page_tokens: int) -> None:
    if unit_tokens < 0 or (unit_tokens == 0) != (group.states == 1):
        want = "0: it has one state per page" if group.states == 1 else "the tokens of a block, or 1 for token slots"
        raise ConfigError(f"unit_tokens of group {group.name} is {unit_tokens}: pass {want}")
    if unit_tokens and page_tokens % unit_tokens and unit_tokens % page_tokens:
        works = math.lcm(16, unit_tokens)
        hint = f"page_tokens={works}" if works <= PAGE_TOKENS_MAX else "a block size that divides the page"
        raise ConfigError(
            f"blocks of {unit_tokens} tokens do not fit pages of {page_tokens} tokens: neither divides the other; "
            f"use a layout with {hint}"
        )


def _check_tiling(device: DeviceKV, group: Group, part: Part) -> None:
    """ConfigError unless the pieces of all buffers tile the cells of ``part``.

    They do if no two overlap in any layer, and their areas add up.
    """
    for layer in group.layers[part.layer : part.layer + part.layers]:
        pieces = list(_rectangles(device, layer))
        for i, one in enumerate(pieces):
            if any(one.overlaps(other) for other in pieces[:i]):
                raise ConfigError(
                    f"layer {layer} of group {group.name}: bytes [{one.byte}, {one.byte_end}) of the cell are in two "
                    "buffers; pass each byte of a cell once"
                )
        area = sum((p.head_end - p.head) * (p.byte_end - p.byte) for p in pieces)
        if area != part.heads * group.cell.nbytes:
            raise ConfigError(
                f"layer {layer} of group {group.name}: the buffers hold {area} of {part.heads * group.cell.nbytes} "
                f"bytes of a token ({part.heads} heads, cell {group.cell.encoding!r} of {group.cell.nbytes} bytes); "
                "pass all pieces of the cell, K, V and scales"
            )


def _rectangles(device: DeviceKV, layer: int) -> Iterator[_Rectangle]:
    for buffer in device.buffers:
        if layer in buffer.layers:
            (head, heads), (offset, nbytes) = buffer.heads, buffer.cell
            yield _Rectangle(head, head + heads, offset, offset + nbytes)
