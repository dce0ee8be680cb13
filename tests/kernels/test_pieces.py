"""The kernel that copies to and from the host, under Triton's interpreter."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("triton", reason="the kernels need triton")
import torch

from kvfs.kernels import pieces
from kvfs.kernels.work_list import pack_pieces


@pytest.mark.parametrize("programs", [1, 3])
def test_each_piece_arrives_and_nothing_else_is_written(programs: int) -> None:
    rng = random.Random(programs)
    sizes = [1, pieces.BLOCK, pieces.BLOCK + 1, 3 * pieces.BLOCK - 7, 0]
    source = torch.arange(1, 40_000)
    target = torch.zeros(40_000, dtype=torch.int64)
    expected = target.clone()
    listed, at = [], 5
    for size in sizes:
        first = rng.randrange(len(source) - size)
        listed.append((source.data_ptr() + 8 * first, target.data_ptr() + 8 * at, 8 * size))
        expected[at : at + size] = source[first : first + size]
        at += size + 3
    pieces.copy_pieces(torch.tensor(pack_pieces(listed)), programs=programs)
    assert torch.equal(target, expected)


def test_a_list_names_the_words_of_each_piece() -> None:
    assert pack_pieces([]).tolist() == [0]
    assert pack_pieces([(8, 16, 24), (32, 64, 8)]).tolist() == [2, 8, 16, 3, 32, 64, 1]
