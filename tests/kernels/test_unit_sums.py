"""Sums of leaves in an engine's units equal the library's of the same pages, whatever the buffers."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="the kernels need triton")
from kvfs.format.checksums import leaf_table
from kvfs.kernels import unit_sums, xxh3
from kvfs.kernels.unit_table import unit_table
from kvfs.kernels.work_list import pack, shape_of, words_of
from kvfs.pages.describe import describe
from kvfs.pages.layout import Cell, Group, Need, PageLayout
from tests.cells import Case, guarded, reference
from tests.kernels.test_cells import address, words


def pages_of(group: Group, part: Any, kv: Any, memory: Any, ids: list[int], count: int) -> list[bytes]:
    """Canonical pages, byte by byte."""
    pages = []
    for chunk in range(count):
        page = np.zeros(group.part_bytes(part), dtype="uint8")
        for at, raw, index in reference(group, part, kv, memory, ids, chunk, 0):
            page[at] = raw[index]
        pages.append(page.tobytes())
    return pages


def run(group: Group, part: Any, kv: Any, ids: list[int], leaves: np.ndarray, pages: int, *, check: bool) -> list[int]:
    shape = shape_of(group, part, kv)
    units, table = np.array(ids, dtype="int64"), np.frombuffer(bytearray(unit_table(shape)), dtype="uint8")
    flags = np.zeros(pages, dtype="int32")
    states, step = group.states, group.granule_states
    tokens = range(0, pages * states, step) if states > 1 else range(pages)
    lists = words_of(tokens, tokens, range(pages), group.granules)
    work = words(pack(
        shape, array("q", lists), scratch=0, unit_ids=address(units), units=len(ids), flags=address(flags),
        leaves=address(leaves), buffers=address(table),
    ))  # fmt: skip
    unit_sums.leaves(work, words(xxh3.CONSTANTS), shape, check=check, programs=2)
    return [int(flag) for flag in flags]


@pytest.mark.parametrize(
    ("order", "page", "block", "heads", "dim"),
    [
        ("block,kv,token,head,dim", 16, 16, 2, 16),
        ("kv,block,token,head,dim", 32, 16, 2, 3),  # cells of 6 bytes: words of four cells
        ("block,head,token,2*dim", 16, 16, 3, 8),
        ("layer,slot,head,2*dim", 16, 1, 2, 8),  # a unit for each token
        ("layer,block,token,head,2*dim", 32, 8, 2, 5),  # two units for a granule
    ],
)
def test_sums_equal_those_of_the_pages(order: str, page: int, block: int, heads: int, dim: int) -> None:
    case = Case(order, page, block, heads=heads, dim=dim)
    size = case.group.leaf_bytes(case.part)
    pages = pages_of(case.group, case.part, case.kv, case.memory, case.ids, 2)
    leaves = np.zeros(2 * case.group.leaves(case.part), dtype="uint64")
    run(case.group, case.part, case.kv, case.ids, leaves, 2, check=False)
    assert leaves.tobytes() == b"".join(leaf_table(one, size) for one in pages)
    assert run(case.group, case.part, case.kv, case.ids, leaves, 2, check=True) == [0, 0]
    leaves[-1] ^= np.uint64(1 << 63)
    assert run(case.group, case.part, case.kv, case.ids, leaves, 2, check=True) == [0, 1]


def test_values_and_scales_are_words_of_several_buffers() -> None:
    group = PageLayout.kv(layers=2, kv_heads=2, head_dim=16, dtype="int8", scale="float32", page_tokens=16).groups[0]
    dice = np.random.default_rng(1)
    rows, memory = [], {}
    for _ in range(2):
        made = [guarded((3, 16, 2, 16), "int8", dice) for _ in range(2)]
        made += [guarded((3, 16, 2), "float32", dice) for _ in range(2)]
        memory.update({raw.__array_interface__["data"][0]: raw for _, raw in made})
        rows.append(tuple(array for array, _ in made))
    kv = describe(group, rows, ["block,token,head,dim"] * 2 + ["block,token,head"] * 2)
    part = kv.part(group)
    leaves = np.zeros(2 * group.leaves(part), dtype="uint64")
    run(group, part, kv, [2, 0], leaves, 2, check=False)
    pages = pages_of(group, part, kv, memory, [2, 0], 2)
    assert leaves.tobytes() == b"".join(leaf_table(one, group.leaf_bytes(part)) for one in pages)


def test_a_state_of_a_recurrent_layer_is_one_leaf() -> None:
    group = Group("state", (0, 1), 1, Cell("raw", 600), Need.exact(), 1)
    dice = np.random.default_rng(1)
    arrays = [guarded((4, 1, 600), "uint8", dice)[0] for _ in range(2)]
    kv = describe(group, arrays, "block,head,dim")
    leaves = np.zeros(4, dtype="uint64")
    run(group, kv.part(group), kv, [3, 1], leaves, 2, check=False)
    assert leaves.tobytes() == b"".join(leaf_table(a[unit].tobytes(), 600) for unit in (3, 1) for a in arrays)
