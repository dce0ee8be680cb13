"""gather and scatter against a reference that walks every byte, over layouts, dtypes, blocks and pages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest

from kvfs.errors import ConfigError
from kvfs.native import library
from kvfs.pages import host_copy
from kvfs.pages.describe import describe
from kvfs.pages.host_copy import gather, gather_pages, scatter, scatter_pages
from kvfs.pages.layout import Cell, Group, Need, PageLayout, Part
from tests.cells import GUARD, ORDERS, POISON, Case, guarded, reference


@pytest.fixture(params=["native", "numpy", "memmove"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "native" and library.loaded() is None:
        pytest.skip(f"the native library is {library.state()}")
    if request.param == "memmove":
        monkeypatch.setattr(host_copy, "_numpy", lambda: None)
    with library.paused() if request.param != "native" else contextlib.nullcontext():
        yield str(request.param)


@pytest.mark.parametrize(("order", "block"), ORDERS)
def test_every_order_equals_the_reference(order: str, block: int, way: str) -> None:
    case = Case(order, 32, block)
    for chunk in (0, 1):
        case.check(chunk)


@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("page", [16, 64])
def test_blocks_and_pages_of_any_ratio(page: int, block: int, way: str) -> None:
    case = Case("block,kv,token,head,dim", page, block, dim=1, heads=1)
    case.check(1)
    case.check(0, first=5)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("dim", [1, 5, 8, 13])
def test_odd_head_dims(dtype: str, dim: int, way: str) -> None:
    Case("block,head,token,2*dim", 16, 16, dtype=dtype, dim=dim, heads=3).check(1)


@pytest.mark.parametrize("order", ["block,kv,token,head,dim", "layer,slot,2*head,dim"])
@pytest.mark.parametrize("first", [0, 1, 16, 37, 40, 63, 64])
def test_only_the_last_tokens(order: str, first: int, way: str) -> None:
    case = Case(order, 32, 16 if "block" in order else 0, heads=1, dim=2)
    case.check(1, first=first)


@pytest.mark.parametrize("order", ["block,kv,token,head,dim", "slot,head,dim"])
def test_units_of_minus_one_are_not_touched(order: str, way: str) -> None:
    case = Case(order, 32, 16 if "block" in order else 0)
    for i in range(0, len(case.ids), 3):
        case.ids[i] = -1
    case.check(0)
    case.check(1)
    case.ids = [-1] * len(case.ids)
    case.check(0)


@pytest.mark.parametrize("ids", [list(range(64)), list(range(63, -1, -1)), [0, *range(2, 65)]])
def test_token_slots_in_runs(ids: list[int], way: str) -> None:
    case = Case("slot,head,dim", 32, 0)
    case.ids = ids
    case.check(0)
    case.check(1)


def test_a_page_of_a_smaller_part(way: str) -> None:
    case = Case("block,kv,token,head,dim", 16, 16, heads=4, layers=3)
    case.check(1, part=Part(1, 2, 1, 2))


def test_contiguous_blocks_are_granules_byte_for_byte(way: str) -> None:
    case = Case("block,layer,head,token,2*dim", 16, 16)
    page = bytearray(case.group.page_bytes)
    gather(page, case.group, case.part, case.kv, [1], 0)
    raw = next(iter(case.memory.values()))
    assert page == raw[GUARD + len(page) : GUARD + 2 * len(page)].tobytes()


def test_what_is_contiguous_on_both_sides_moves_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copy, "_numpy", lambda: None)
    calls = []
    monkeypatch.setattr(host_copy.ctypes, "memmove", lambda to, source, n: calls.append(n))
    case = Case("block,layer,head,token,2*dim", 64, 16)
    with library.paused():
        gather(bytearray(case.group.page_bytes), case.group, case.part, case.kv, [3, 4, 6, 5], 0)
    assert calls == [case.group.page_bytes // 2] + [case.group.page_bytes // 4] * 2


@pytest.mark.parametrize(("order", "block", "first"), [("block,head,token,2*dim", 16, 0), ("slot,head,dim", 0, 37)])
def test_several_pages_are_those_that_single_calls_move(order: str, block: int, first: int, way: str) -> None:
    """Also when pages in between are left out, and units of the last one are missing."""
    case = Case(order, 32, block, units=160)
    ids, chunks = list(range(159, -1, -1))[: 3 * 32 // max(1, block) + 16 // max(1, block)], [0, 1, 3]
    singly = [bytearray([POISON]) * case.group.page_bytes for _ in chunks]
    together = [bytearray(page) for page in singly]
    moved = sum(
        gather(page, case.group, case.part, case.kv, ids, chunk, first_token=first)
        for page, chunk in zip(singly, chunks, strict=True)
    )
    assert gather_pages(together, case.group, case.part, case.kv, ids, chunks, first_token=first) == moved > 0
    assert together == singly
    before = case.snapshot()
    for raw in case.memory.values():
        raw[GUARD:-GUARD] = 0
    expected = [np.frombuffer(old, "uint8") for old in before]
    assert scatter_pages(together, case.group, case.part, case.kv, ids, chunks, first_token=first) == moved
    cells = sum(int(np.count_nonzero(raw[GUARD:-GUARD])) for raw in case.memory.values())
    assert 0 < cells <= moved
    for raw, old in zip(case.memory.values(), expected, strict=True):
        there = raw != 0
        assert (raw[there] == old[there]).all()


def test_scales_in_separate_tensors(way: str) -> None:
    layout = PageLayout.kv(layers=2, kv_heads=3, head_dim=5, dtype="int8", scale="float32", page_tokens=16)
    group, rng = layout.groups[0], np.random.default_rng(3)
    shapes = [((4, 16, 3, 5), "int8")] * 2 + [((4, 16, 3), "float32")] * 2
    made = [[guarded(shape, dtype, rng) for shape, dtype in shapes] for _ in range(2)]
    kv = describe(
        group, [tuple(a for a, _ in layer) for layer in made],
        ["block,token,head,dim", "block,token,head,dim", "block,token,head", "block,token,head"],
    )  # fmt: skip
    assert kv.check(layout) is group and [b.cell for b in kv.buffers] == [(0, 5), (5, 5), (10, 4), (14, 4)]
    memory = {raw.__array_interface__["data"][0]: raw for layer in made for _, raw in layer}
    page = bytearray(group.page_bytes)
    gather(page, group, group.full, kv, [2], 0)
    assert all(page[at] == raw[i] for at, raw, i in reference(group, group.full, kv, memory, [2], 0, 0))


def test_states_and_mla(way: str) -> None:
    state = Group("state", (0, 3), 2, Cell("opaque", 11), Need.exact(), 1)
    rng = np.random.default_rng(4)
    made = [guarded((5, 2, 11), "uint8", rng) for _ in range(2)]
    kv = describe(state, [a for a, _ in made], "slot,head,dim")
    kv.check(PageLayout.of([state], 16))
    memory = {raw.__array_interface__["data"][0]: raw for _, raw in made}
    page = bytearray(state.page_bytes)
    assert gather(page, state, state.full, kv, [-1, 4], 0) == 0
    assert gather(page, state, state.full, kv, [-1, 4], 1) == len(page)
    assert all(page[at] == raw[i] for at, raw, i in reference(state, state.full, kv, memory, [-1, 4], 1, 0))
    mla = PageLayout.mla(layers=1, kv_lora_rank=6, rope_dim=2, dtype="bfloat16", page_tokens=16)
    latent = np.arange(3 * 16 * 8, dtype="uint16").reshape(3, 16, 8)
    kv = describe(mla.groups[0], [latent], "block,token,dim")
    kv.check(mla)
    page = bytearray(mla.page_bytes)
    gather(page, mla.groups[0], mla.groups[0].full, kv, [2], 0)
    assert page == latent[2].tobytes()


def test_the_two_directions_are_not_mixed_up(way: str) -> None:
    case = Case("block,kv,token,head,dim", 16, 16)
    page = bytearray([POISON]) * case.group.page_bytes
    scatter(page, case.group, case.part, case.kv, [0], 0)
    assert page == bytearray([POISON]) * len(page)
    back = bytearray(len(page))
    gather(back, case.group, case.part, case.kv, [0], 0)
    assert back == page


def test_bad_arguments_are_refused(way: str) -> None:
    case = Case("block,kv,token,head,dim", 16, 16)
    with pytest.raises(ConfigError, match="bytes: pass"):
        gather(bytearray(7), case.group, case.part, case.kv, [0], 0)
    with pytest.raises(ConfigError, match="read-only"):
        gather(bytes(case.group.page_bytes), case.group, case.part, case.kv, [0], 0)
    for unit in (-2, case.units):
        with pytest.raises(ConfigError, match=f"unit {unit} at position 0"):
            scatter(bytes(case.group.page_bytes), case.group, case.part, case.kv, [unit], 0)


def test_torch_tensors(way: str) -> None:
    torch = pytest.importorskip("torch")
    layout = PageLayout.kv(layers=2, kv_heads=2, head_dim=3, dtype=torch.bfloat16, page_tokens=16)
    group = layout.groups[0]
    keys, values = (torch.randn(2, 2, 40, 3).to(torch.bfloat16) for _ in range(2))
    kv = describe(group, [(keys, values), (keys + 1, values + 1)], "batch,head,token,dim", row=1)
    kv.check(layout)
    page = bytearray(group.page_bytes)
    gather(page, group, group.full, kv, range(40), 1)
    got = torch.frombuffer(page, dtype=torch.bfloat16).reshape(1, 2, 2, 16, 6)[0]
    want = torch.stack([torch.cat([k, v], -1)[1, :, 16:32] for k, v in ((keys, values), (keys + 1, values + 1))])
    assert torch.equal(got, want)
