"""Leaf checksums of the kernel equal the library's, bit for bit."""

from __future__ import annotations

from array import array
from itertools import chain
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="the checksum kernel needs triton")
import torch
import xxhash

from kvfs.format.checksums import leaf_table
from kvfs.kernels import xxh3
from kvfs.kernels.work_list import LEAF_BYTES_MIN, Shape, pack


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def words(raw: bytes) -> Any:
    return torch.frombuffer(bytearray(raw), dtype=torch.int64)


def shape(leaf_bytes: int, layers: int) -> Shape:
    return Shape(1, 16, 16, 16, 1, leaf_bytes % 8 == 0, b"", leaf_bytes, 1, layers, 1)


def run(
    data: np.ndarray, offsets: list[int], s: Shape, leaves: np.ndarray, *, check: bool, pages: int = 0
) -> list[int]:
    flags = np.zeros(max(1, pages or len(offsets)), dtype="int32")
    granules = array("q", chain.from_iterable((offset, 0, i) for i, offset in enumerate(offsets)))
    work = pack(
        s, granules, scratch=address(data), unit_ids=0, units=0, flags=address(flags), leaves=address(leaves), buffers=0
    )
    xxh3.leaves(words(work), words(xxh3.CONSTANTS), s, check=check, programs=2)
    return [int(flag) for flag in flags]


@pytest.mark.parametrize("size", [LEAF_BYTES_MIN, 248, 255, 256, 1000, 1023, 1024, 1025, 1088, 2048, 4096, 5001])
def test_equal_to_the_library_at_every_length(size: int) -> None:
    rng = np.random.default_rng(size)
    layers, pad = 3, 8
    data = rng.integers(0, 256, 2 * (layers * size + pad), dtype="uint8")
    offsets = [0, layers * size + pad]
    leaves = np.zeros(2 * layers, dtype="uint64")
    run(data, offsets, shape(size, layers), leaves, check=False)
    want = b"".join(leaf_table(data[at : at + layers * size].tobytes(), size) for at in offsets)
    assert leaves.tobytes() == want


@pytest.mark.parametrize("size", [256, 1025])
def test_any_flipped_bit_flags_its_page_and_no_other(size: int) -> None:
    rng = np.random.default_rng(1)
    data = rng.integers(0, 256, 5 * 2 * size, dtype="uint8")
    offsets = [i * 2 * size for i in range(5)]
    leaves = np.zeros(10, dtype="uint64")
    s = shape(size, 2)
    run(data, offsets, s, leaves, check=False)
    assert run(data, offsets, s, leaves, check=True) == [0] * 5
    for at in (0, size - 1, 2 * size, 7 * size + 100, 10 * size - 1):
        data[at] ^= 1 << at % 8
        assert run(data, offsets, s, leaves, check=True) == [int(i == at // (2 * size)) for i in range(5)]
        data[at] ^= 1 << at % 8
    leaves[3] ^= np.uint64(1 << 63)
    assert run(data, offsets, s, leaves, check=True) == [0, 1, 0, 0, 0]


def test_the_reference_is_the_library_that_the_store_uses() -> None:
    assert xxhash.xxh3_64_intdigest(b"kvfs" * 100) == int.from_bytes(leaf_table(b"kvfs" * 100, 400), "little")
