"""Sets of chunks as Python ints: bit i = chunk i. 8,192 chunks are 1 KiB, and set operations take microseconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def span(first: int, count: int) -> int:
    """Chunks [first, first + count)."""
    return (1 << count) - 1 << first


def bits_of(chunks: Sequence[int]) -> int:
    """The set of ``chunks``, which are ascending."""
    if chunks and chunks[-1] - chunks[0] + 1 == len(chunks):
        return span(chunks[0], len(chunks))
    return sum(1 << chunk for chunk in chunks)


def members(bits: int) -> Sequence[int]:
    """The chunks of a set, ascending."""
    if not bits:
        return range(0)
    first, end = (bits & -bits).bit_length() - 1, bits.bit_length()
    if bits == span(first, end - first):
        return range(first, end)
    return [i for i, digit in enumerate(reversed(f"{bits:b}")) if digit == "1"]


def streaks_of(bits: int) -> Iterator[tuple[int, int]]:
    """(first, count) of the chunks of a set that follow one another, ascending."""
    at = 0
    while bits:
        gap = (bits & -bits).bit_length() - 1
        bits, at = bits >> gap, at + gap
        count = (~bits & bits + 1).bit_length() - 1
        yield at, count
        bits, at = bits >> count, at + count
