"""The kernel that copies from a peer's units into own ones, against a reference that walks every byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="the kernels need triton")
from kvfs.kernels import pull
from kvfs.kernels.moves import Moves, Tiles, moves_of
from kvfs.kernels.work_list import pack, shape_of, words_of
from kvfs.pages.describe import describe
from kvfs.pages.device_kv import DeviceKV
from kvfs.pages.layout import Cell, Group, Need, PageLayout
from tests.cells import Case, guarded, reference
from tests.kernels.test_cells import address, words

PAGES = 2


class Pool:
    """One side: described buffers, the memory behind them, and the units of PAGES pages."""

    def __init__(self, kv: DeviceKV, memory: dict[int, np.ndarray], ids: list[int]) -> None:
        self.kv, self.memory, self.ids = kv, memory, ids

    def poison(self) -> None:
        for raw in self.memory.values():
            raw[...] = 0xA5

    def snapshot(self) -> list[bytes]:
        return [raw.tobytes() for raw in self.memory.values()]


def of(case: Case) -> Pool:
    return Pool(case.kv, case.memory, list(case.ids))


def copied(group: Group, source: Pool, target: Pool, *, some: bool = False, first_token: int = 0) -> tuple[Tiles, ...]:
    """Copy PAGES pages into poison, and compare all memory of the target."""
    part = target.kv.part(group)
    mine, theirs = shape_of(group, part, target.kv), shape_of(group, part, source.kv)
    moves: Moves = moves_of(theirs, mine, some=some)
    table, ids = np.frombuffer(bytearray(moves.table), dtype="uint8"), np.array(target.ids, dtype="int64")
    source_ids = np.array(source.ids, dtype="int64")
    states, step = group.states, group.granule_states
    tokens = range(0, PAGES * states, step) if states > 1 else range(PAGES)
    work = words(pack(
        mine, words_of(tokens, tokens, range(PAGES), group.granules), scratch=address(table), unit_ids=address(ids),
        units=len(ids), flags=0, leaves=0, buffers=0, first_token=first_token,
        source=(theirs.unit_tokens, address(source_ids)),
    ))  # fmt: skip
    target.poison()
    for tiles in moves.tiles:
        pull.copy(work, tiles, programs=3, warps=4)
    got = target.snapshot()
    target.poison()
    for chunk in range(PAGES):
        from_peer = {
            at: raw[i] for at, raw, i in reference(group, part, source.kv, source.memory, source.ids, chunk, 0)
        }
        for at, raw, i in reference(group, part, target.kv, target.memory, target.ids, chunk, first_token):
            raw[i] = from_peer[at]
    assert got == target.snapshot()
    return moves.tiles


ORDERS = [
    ("block,kv,token,head,dim", 16),
    ("kv,block,token,head,dim", 16),
    ("block,head,token,2*dim", 16),
    ("block,kv,head,token,dim", 32),  # several granules in a unit
    ("layer,slot,head,2*dim", 1),  # a unit for each token
    ("layer,block,token,head,2*dim", 8),  # two units for a granule
]


@pytest.mark.parametrize("there", ORDERS)
@pytest.mark.parametrize("here", ORDERS)
def test_a_pull_between_any_two_orders_moves_every_byte_and_no_other(
    here: tuple[str, int], there: tuple[str, int]
) -> None:
    source, target = (Case(order, 32, block, heads=2, dim=8) for order, block in (there, here))
    tiles = copied(source.group, of(source), of(target))
    if here == there and here[1] >= 16:
        expected = 2 if "kv" in here[0] else 1  # K and V have lines of their own
        assert [(t.lines, t.states) for t in tiles] == [(2 if here[1] == 32 else 1, 1)]
        assert tiles[0].moves == expected, "the states of a granule follow one another in both"


@pytest.mark.parametrize("dim", [3, 5])
def test_lines_that_no_power_of_two_divides_are_masked(dim: int) -> None:
    order, block = ORDERS[0]
    source, target = (Case(order, 16, block, heads=1, dim=dim) for _ in range(2))
    (tiles,) = copied(source.group, of(source), of(target))
    assert tiles.line % tiles.cols


@pytest.mark.parametrize(("order", "block"), ORDERS)
@pytest.mark.parametrize("first_token", [0, 5, 16, 37])
def test_tokens_that_the_engine_has_and_those_without_a_unit_are_left_out(
    order: str, block: int, first_token: int
) -> None:
    source, target = (Case(order, 32, block, heads=2, dim=8) for _ in range(2))
    pool = of(target)
    pool.ids[len(pool.ids) // 2] = -1
    copied(source.group, of(source), pool, some=True, first_token=first_token)


def test_values_and_scales_are_read_by_launches_of_their_own() -> None:
    """Quantised cells: of one launch for both, the short lines of the scales would set the pace of all."""
    group = PageLayout.kv(layers=2, kv_heads=2, head_dim=16, dtype="int8", scale="float32", page_tokens=16).groups[0]
    dice = np.random.default_rng(1)

    def pool(ids: list[int]) -> Pool:
        rows: list[Any] = []
        memory = {}
        for _ in range(2):
            made = [guarded((3, 16, 2, 16), "int8", dice) for _ in range(2)]
            made += [guarded((3, 16, 2), "float32", dice) for _ in range(2)]
            memory.update({raw.__array_interface__["data"][0]: raw for _, raw in made})
            rows.append(tuple(array for array, _ in made))
        return Pool(describe(group, rows, ["block,token,head,dim"] * 2 + ["block,token,head"] * 2), memory, ids)

    tiles = copied(group, pool([2, 0]), pool([0, 1]))
    assert [(t.first, t.moves, t.lines, t.cols * t.element) for t in tiles] == [(0, 2, 1, 512), (2, 2, 1, 128)]


def test_a_state_of_a_recurrent_layer_is_one_line() -> None:
    group = Group("state", (0, 1), 1, Cell("raw", 600), Need.exact(), 1)
    dice = np.random.default_rng(1)

    def pool(ids: list[int]) -> Pool:
        made = [guarded((4, 1, 600), "uint8", dice) for _ in range(2)]
        memory = {raw.__array_interface__["data"][0]: raw for _, raw in made}
        return Pool(describe(group, [array for array, _ in made], "block,head,dim"), memory, ids)

    (tiles,) = copied(group, pool([3, 1]), pool([0, 2]))
    assert tiles.lines == tiles.moves == 1


def test_layers_that_only_one_side_has_in_a_buffer_are_moved_by_the_buffers_that_have_them() -> None:
    """One side keeps all layers in one tensor, the other one a tensor for each."""
    source, target = Case("layer,block,token,head,2*dim", 16, 16, dim=8), Case("block,kv,token,head,dim", 16, 16, dim=8)
    copied(source.group, of(source), of(target))
