"""The kernel that reads a peer's memory, against a reference that walks every byte."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="the kernels need triton")
from kvfs.kernels import pull
from kvfs.kernels.work_list import granule_words, pack, shape_of
from kvfs.pages.describe import describe
from kvfs.pages.layout import Cell, Group, Need, PageLayout
from tests.cells import Case, guarded, reference
from tests.kernels.test_cells import address, words


def pulled(group: Group, part: Any, kv: Any, ids: list[int], pages: int) -> tuple[np.ndarray, tuple[pull.Tiles, ...]]:
    """``pages`` pages, each between poison, whose units follow one another in ``ids``."""
    shape, size = shape_of(group, part, kv), group.part_bytes(part)
    scratch = np.full(pages * size + 128, 0xA5, dtype="uint8")
    units, table = np.array(ids, dtype="int64"), np.frombuffer(bytearray(shape.table), dtype="uint8")
    states, step = group.states, group.granule_states
    tokens = range(0, pages * states, step) if states > 1 else range(pages)
    lists = granule_words(64, shape.layers * shape.leaf_bytes, tokens, [0] * pages, group.granules)
    work = words(pack(
        shape, array("q", lists), scratch=address(scratch), unit_ids=address(units), units=len(ids), flags=0, leaves=0,
        buffers=address(table),
    ))  # fmt: skip
    cuts = pull.tiles(shape)
    for cut in cuts:
        pull.gather(work, shape, cut, programs=3, warps=4)
    return scratch, cuts


@pytest.mark.parametrize(
    ("order", "page", "block", "heads", "dim"),
    [
        ("block,kv,token,head,dim", 16, 16, 2, 16),  # every tile is full
        ("kv,block,token,head,dim", 32, 16, 2, 3),  # lines of 12 bytes
        ("block,head,token,2*dim", 16, 16, 3, 8),
        ("layer,slot,head,2*dim", 16, 1, 2, 8),  # a unit for each token
        ("layer,block,token,head,2*dim", 32, 8, 2, 5),  # two units for a granule
    ],
)
def test_a_pull_makes_the_pages_that_the_reference_makes(
    order: str, page: int, block: int, heads: int, dim: int
) -> None:
    case = Case(order, page, block, heads=heads, dim=dim)
    scratch, cuts = pulled(case.group, case.part, case.kv, case.ids, 2)
    size = case.group.part_bytes(case.part)
    want = np.full(2 * size + 128, 0xA5, dtype="uint8")
    for chunk in (0, 1):
        for at, raw, index in reference(case.group, case.part, case.kv, case.memory, case.ids, chunk, 0):
            want[64 + chunk * size + at] = raw[index]
    assert bytes(scratch) == bytes(want)
    assert all(cut.full for cut in cuts) == (dim in (8, 16) and heads != 3)
    assert [cut.one_unit for cut in cuts] == [block % 16 == 0] * len(cuts)


def test_values_and_scales_are_read_by_launches_of_their_own() -> None:
    """Quantised cells: of one launch for both, the small tiles of the scales would set the pace of all."""
    group = PageLayout.kv(layers=2, kv_heads=2, head_dim=16, dtype="int8", scale="float32", page_tokens=16).groups[0]
    dice = np.random.default_rng(1)
    rows, memory = [], {}
    for _ in range(2):
        made = [guarded((3, 16, 2, 16), "int8", dice) for _ in range(2)]
        made += [guarded((3, 16, 2), "float32", dice) for _ in range(2)]
        memory.update({raw.__array_interface__["data"][0]: raw for _, raw in made})
        rows.append(tuple(array for array, _ in made))
    kv = describe(group, rows, ["block,token,head,dim"] * 2 + ["block,token,head"] * 2)
    scratch, cuts = pulled(group, kv.part(group), kv, [2, 0], 2)
    assert [(cut.first, cut.buffers, cut.element) for cut in cuts] == [(0, 2, 8), (2, 2, 4)]
    size = group.page_bytes
    want = np.full(2 * size + 128, 0xA5, dtype="uint8")
    for chunk in (0, 1):
        for at, raw, index in reference(group, kv.part(group), kv, memory, [2, 0], chunk, 0):
            want[64 + chunk * size + at] = raw[index]
    assert bytes(scratch) == bytes(want)


def test_a_state_of_a_recurrent_layer_is_one_line() -> None:
    group = Group("state", (0, 1), 1, Cell("raw", 600), Need.exact(), 1)
    dice = np.random.default_rng(1)
    arrays = [guarded((4, 1, 600), "uint8", dice)[0] for _ in range(2)]
    kv = describe(group, arrays, "block,head,dim")
    scratch, _ = pulled(group, kv.part(group), kv, [3, 1], 2)
    want = np.concatenate([array[unit].reshape(-1) for unit in (3, 1) for array in arrays])
    assert bytes(scratch) == b"\xa5" * 64 + want.tobytes() + b"\xa5" * 64
