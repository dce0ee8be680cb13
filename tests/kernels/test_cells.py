"""The copy kernel against a reference that walks every byte: the cases of the host's copies, and batches."""

from __future__ import annotations

import ctypes
import sys
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="the copy kernels need triton")
import torch

from kvfs.kernels import cells, torch_fallback
from kvfs.kernels.work_list import Work, pack, shape_of
from kvfs.pages.describe import describe
from kvfs.pages.device_kv import DeviceKV
from kvfs.pages.layout import Cell, Group, Need, PageLayout, Part
from tests.cells import ORDERS, Case, Copies, guarded, reference
from tests.gpu.simulated import at_host

PROGRAMS = 3
BY = ""


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def words(raw: bytes) -> Any:
    return torch.frombuffer(bytearray(raw), dtype=torch.int64)


def run(
    scratch: np.ndarray, granules: Sequence[tuple[int, int, int]], group: Group, part: Part, kv: DeviceKV,
    units: Sequence[int], first: int, *, to_page: bool, flags: np.ndarray, rows: range | None = None,
) -> None:  # fmt: skip
    shape = shape_of(group, part, kv)
    ids, table = np.array(units, dtype="int64"), np.frombuffer(bytearray(shape.table), dtype="uint8")
    work = pack(
        shape, array("q", chain.from_iterable(granules)), scratch=address(scratch), unit_ids=address(ids),
        units=len(ids), flags=address(flags), leaves=0, buffers=address(table),
        first_token=first if group.states > 1 else 0, first_row=rows.start if rows else 0,
        rows=len(rows) if rows else None,
    )  # fmt: skip
    if BY == "torch":
        host = memoryview(bytearray(work)).cast("q")
        torch_fallback.move(Work(None, 0, host, memoryview(bytearray(ids)).cast("q")), shape, at_host, to_page=to_page)
    else:
        cells.move(words(work), shape, to_page=to_page, programs=PROGRAMS)


@pytest.fixture(autouse=True, params=["triton", "torch"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernel or torch moves the cells."""
    monkeypatch.setattr(sys.modules[__name__], "BY", request.param)
    return str(request.param)


def move(
    page: Any, group: Group, part: Part, kv: DeviceKV, units: Sequence[int], chunk: int, first: int, *, to_page: bool
) -> None:
    """One page, its granules as one batch."""
    data = np.frombuffer(bytearray(page), dtype="uint8")
    step = len(data) // group.granules
    token = chunk if group.states == 1 else chunk * group.states
    granules = [(i * step, token + i * 16, 0) for i in range(group.granules)]
    run(data, granules, group, part, kv, units, first, to_page=to_page, flags=np.zeros(1, dtype="int32"))
    if to_page:
        ctypes.memmove((ctypes.c_uint8 * len(page)).from_buffer(page), address(data), len(page))
    else:
        assert data.tobytes() == bytes(page), "scatter wrote to the page"


def gather(page: Any, *args: Any, first_token: int = 0) -> None:
    move(page, *args, first_token, to_page=True)


def scatter(page: Any, *args: Any, first_token: int = 0) -> None:
    move(page, *args, first_token, to_page=False)


KERNEL = Copies(gather, scatter)


@pytest.mark.parametrize(("order", "block"), ORDERS)
def test_every_order_equals_the_reference(order: str, block: int) -> None:
    Case(order, 32, block, copies=KERNEL).check(1)


@pytest.mark.parametrize("block", [16, 32, 64])
@pytest.mark.parametrize("page", [16, 64])
def test_blocks_and_pages_of_any_ratio(page: int, block: int) -> None:
    case = Case("block,kv,token,head,dim", page, block, dim=1, heads=1, copies=KERNEL)
    case.check(1)
    case.check(0, first=5)


@pytest.mark.parametrize("dim", [1, 5, 8, 96])
def test_odd_head_dims(dim: int) -> None:
    Case("block,head,token,2*dim", 16, 16, dtype="float32", dim=dim, heads=3, copies=KERNEL).check(1)


@pytest.mark.parametrize("first", [0, 1, 37, 63, 64])
def test_only_the_last_tokens(first: int) -> None:
    Case("layer,slot,2*head,dim", 32, 0, heads=1, dim=2, copies=KERNEL).check(1, first=first)


@pytest.mark.parametrize("order", ["block,kv,token,head,dim", "slot,head,dim"])
def test_units_of_minus_one_are_left_alone(order: str) -> None:
    case = Case(order, 32, 16 if "block" in order else 0, copies=KERNEL)
    for i in range(0, len(case.ids), 3):
        case.ids[i] = -1
    case.check(1)


def test_more_heads_than_a_tile_has_rows() -> None:
    Case("block,kv,token,head,dim", 16, 16, heads=9, dim=2, layers=1, copies=KERNEL).check(1)


def test_a_page_of_a_smaller_part() -> None:
    Case("block,kv,token,head,dim", 16, 16, heads=4, layers=3, copies=KERNEL).check(1, part=Part(1, 2, 1, 2))


def test_scales_in_buffers_of_their_own_move_in_the_same_launch(monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    layout = PageLayout.kv(layers=2, kv_heads=3, head_dim=5, dtype="int8", scale="float32", page_tokens=16)
    group, rng = layout.groups[0], np.random.default_rng(3)
    shapes = [((4, 16, 3, 5), "int8")] * 2 + [((4, 16, 3), "float32")] * 2
    made = [[guarded(shape, dtype, rng) for shape, dtype in shapes] for _ in range(2)]
    kv = describe(
        group, [tuple(a for a, _ in layer) for layer in made],
        ["block,token,head,dim", "block,token,head,dim", "block,token,head", "block,token,head"],
    )  # fmt: skip
    memory = {raw.__array_interface__["data"][0]: raw for layer in made for _, raw in layer}
    page = bytearray(group.page_bytes)
    launches = []
    monkeypatch.setattr(cells, "move", lambda *a, move=cells.move, **k: (launches.append(a), move(*a, **k)))
    gather(page, group, group.full, kv, [2], 0)
    assert len(launches) == (by == "triton")
    assert all(page[at] == raw[i] for at, raw, i in reference(group, group.full, kv, memory, [2], 0, 0))


def test_states_and_mla() -> None:
    state = Group("state", (0, 3), 2, Cell("opaque", 11), Need.exact(), 1)
    rng = np.random.default_rng(4)
    made = [guarded((5, 2, 11), "uint8", rng) for _ in range(2)]
    kv = describe(state, [a for a, _ in made], "slot,head,dim")
    memory = {raw.__array_interface__["data"][0]: raw for _, raw in made}
    page = bytearray(state.page_bytes)
    gather(page, state, state.full, kv, [-1, 4], 1)
    assert all(page[at] == raw[i] for at, raw, i in reference(state, state.full, kv, memory, [-1, 4], 1, 0))
    mla = PageLayout.mla(layers=1, kv_lora_rank=80, rope_dim=2, dtype="bfloat16", page_tokens=16)
    latent = np.arange(3 * 16 * 82, dtype="uint16").reshape(3, 16, 82)
    kv = describe(mla.groups[0], [latent], "block,token,dim")
    page = bytearray(mla.page_bytes)
    gather(page, mla.groups[0], mla.groups[0].full, kv, [2], 0)
    assert page == latent[2].tobytes()


def test_a_flagged_page_is_not_scattered(by: str) -> None:
    if by == "torch":
        pytest.skip("where torch moves the cells, pages are verified before")
    case = Case("block,kv,token,head,dim", 16, 16)
    data = np.full(2 * case.group.page_bytes, 7, dtype="uint8")
    granules = [(0, 0, 0), (case.group.page_bytes, 16, 1)]
    before = case.snapshot()
    one = Case("block,kv,token,head,dim", 16, 16)
    flags = np.array([1, 0], dtype="int32")
    run(data, granules, case.group, case.part, case.kv, case.ids, 0, to_page=False, flags=flags)
    page = bytearray([7]) * case.group.page_bytes
    one_ids = [-1, case.ids[1]]
    scatter(page, one.group, one.part, one.kv, one_ids, 1)
    assert case.snapshot() == one.snapshot() != before


def test_a_band_of_layers_of_a_batch() -> None:
    case = Case("block,kv,token,head,dim", 16, 16, layers=4)
    group = case.group
    page = np.zeros(group.page_bytes, dtype="uint8")
    granules = [(0, 0, 0)]
    flags = np.zeros(1, dtype="int32")
    run(page, granules, group, case.part, case.kv, case.ids, 0, to_page=True, flags=flags)
    leaf = group.leaf_bytes(case.part)
    band = np.zeros(2 * leaf, dtype="uint8")
    run(band, granules, group, case.part, case.kv, case.ids, 0, to_page=True, flags=flags, rows=range(1, 3))
    assert band.tobytes() == page[leaf : 3 * leaf].tobytes()
    assert band.any()
