"""Copies of single tokens between pools, against numpy."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="the copy kernels need triton")
import torch

from kvfs.kernels import token_copy
from kvfs.kernels.work_list import Shape, shape_of
from kvfs.pages.describe import describe
from kvfs.pages.layout import PageLayout

SLOTS = 12


def pool(layout: PageLayout, shapes: list[tuple[tuple[int, ...], str, str]], seed: int) -> tuple[list[Any], Shape]:
    """The buffers of one rank, for each layer one of each shape, and the shape of its group."""
    rng, group = np.random.default_rng(seed), layout.groups[0]
    layers = [
        tuple(rng.integers(0, 127, shape).astype("int8").view(kind) for shape, kind, _ in shapes) for _ in group.layers
    ]
    tensors: Any = [layer if len(layer) > 1 else layer[0] for layer in layers]
    orders: Any = [order for _, _, order in shapes]
    kv = describe(group, tensors, orders if len(shapes) > 1 else orders[0])
    return layers, shape_of(group, group.full, kv)


def run(
    own: Shape, sources: list[Shape], ranks: list[int], slots: list[int], targets: list[int], programs: int
) -> None:
    tables = [np.frombuffer(bytearray(shape.table), dtype="int64") for shape in [own, *sources]]
    at = [int(table.__array_interface__["data"][0]) for table in tables]
    work = token_copy.pack(at[0], own.layers, [at[1 + rank] for rank in ranks], slots, targets)
    words = torch.frombuffer(bytearray(work), dtype=torch.int64)
    token_copy.copy(words, token_copy.cut(own, *sources), programs=programs)


CASES = {
    "fused": (
        PageLayout.kv(layers=2, kv_heads=3, head_dim=4, dtype="bfloat16", page_tokens=16),
        [((SLOTS, 3, 16), "uint16", "slot,head,2*dim")],
    ),
    "apart": (
        PageLayout.kv(layers=2, kv_heads=2, head_dim=5, dtype="bfloat16", page_tokens=16),
        [((SLOTS, 2, 10), "uint16", "slot,head,dim")] * 2,
    ),
    "scales": (
        PageLayout.kv(layers=1, kv_heads=2, head_dim=8, dtype="int8", scale="float32", page_tokens=16),
        [((SLOTS, 2, 8), "int8", "slot,head,dim")] * 2 + [((SLOTS, 8), "float32", "slot,head")] * 2,
    ),
    "mla": (
        PageLayout.mla(layers=2, kv_lora_rank=24, rope_dim=8, dtype="bfloat16", page_tokens=16),
        [((SLOTS, 64), "uint16", "slot,dim")],
    ),
}


@pytest.mark.parametrize("kind", CASES)
def test_each_token_comes_from_its_own_rank_and_slot(kind: str) -> None:
    layout, shapes = CASES[kind]
    (mine, own), (one, first), (two, second) = (pool(layout, shapes, seed) for seed in range(3))
    want = [[buffer.copy() for buffer in layer] for layer in mine]
    ranks, slots, targets = [1, 0, 0, 1, 1], [0, 11, 3, 3, 7], [5, 2, 11, 0, 7]
    for layer, (a, b) in enumerate(zip(one, two, strict=True)):
        for i, buffer in enumerate(want[layer]):
            for rank, slot, target in zip(ranks, slots, targets, strict=True):
                buffer[target] = (a, b)[rank][i][slot]
    run(own, [first, second], ranks, slots, targets, programs=3)
    for got, right in zip(mine, want, strict=True):
        for x, y in zip(got, right, strict=True):
            np.testing.assert_array_equal(x.view("uint8"), y.view("uint8"))


def test_strides_of_the_ranks_may_differ() -> None:
    layout, _ = CASES["fused"]
    group = layout.groups[0]
    wide = np.random.default_rng(7).integers(0, 65536, (2, SLOTS, 5, 8), dtype="uint16")
    narrow: Any = np.zeros((SLOTS, 2, 3, 8), dtype="uint16")
    source = shape_of(group, group.full, describe(group, [layer[:, 1:4] for layer in wide], "slot,head,2*dim"))
    own = shape_of(group, group.full, describe(group, [narrow[:, i] for i in range(2)], "slot,head,2*dim"))
    run(own, [source], [0, 0], [4, 9], [1, 0], programs=50)
    for layer in range(2):
        np.testing.assert_array_equal(narrow[[1, 0], layer], wide[layer][[4, 9], 1:4])
    assert not narrow[2:].any()


def test_tiles_cover_more_heads_and_longer_cells_than_one_has() -> None:
    layout = PageLayout.kv(layers=1, kv_heads=130, head_dim=2, dtype="bfloat16", page_tokens=16)
    (mine, own), (theirs, source) = (pool(layout, [((2, 130, 8), "uint16", "slot,head,2*dim")], n) for n in range(2))
    cut = token_copy.cut(own, source)
    assert cut.row_tiles == 2
    run(own, [source], [0], [1], [0], programs=1)
    np.testing.assert_array_equal(mine[0][0][0], theirs[0][0][1])


def test_a_work_list_names_the_source_of_each_token() -> None:
    words = array("q", token_copy.pack(7, 2, [100, 200], [1, 2], [3, 4]))
    assert words[:4].tolist() == [2, 2, 10, 7]
    assert words[16:].tolist() == [100, 1, 3, 200, 2, 4]
