"""Descriptors: what they refuse, with which remedy, and what rectangle they hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvfs.errors import ConfigError
from kvfs.pages.describe import describe
from kvfs.pages.device_kv import DeviceKV, KVBuffer
from kvfs.pages.layout import Cell, Group, Need, PageLayout, Part

LAYOUT = PageLayout.kv(layers=[2, 3, 5, 7], kv_heads=4, head_dim=8, dtype="bfloat16", page_tokens=64)
GROUP = LAYOUT.groups[0]
CELL = GROUP.cell.nbytes  # 32


def buffer(**changes: Any) -> KVBuffer:
    """Blocks of 16, [block][token][head][cell], heads 0 and 1 of all layers."""
    head, token = CELL, 2 * CELL
    block = 16 * token
    bases = tuple(0x10000 + i * 8 * block for i in range(4))
    good = KVBuffer(
        "host", bases, tuple((b, 8 * block) for b in bases), GROUP.layers, (0, 2), (0, 1), 16, 8,
        (block, token, head), (0, CELL),
    )  # fmt: skip
    return replace(good, **changes)


def kv(*buffers: KVBuffer) -> DeviceKV:
    return DeviceKV("full", buffers)


def test_a_good_descriptor_passes() -> None:
    device = kv(buffer())
    assert device.check(LAYOUT) is GROUP
    assert device.part(GROUP) == Part(0, 2, 0, 4)
    assert kv(buffer(memory="pinned")).check(LAYOUT) is GROUP


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory": "gpu"}, "'gpu': pass 'host'"),
        ({"replica": (2, 2)}, r"\(2, 2\): pass \(index, count\)"),
        ({"heads": (3, 2)}, r"\(3, 2\): \(first, count\) within its 4"),
        ({"cell": (8, CELL)}, rf"\(8, {CELL}\): \(offset, bytes\) within"),
        ({"units": 0}, "units of group full is 0"),
        ({"units": 9}, "reaches .* correct stride, units or extents"),
        ({"stride": (-1024, 64, 32)}, "reaches"),
        ({"stride": (1024, 0, 32)}, "share bytes"),
        ({"stride": (1024, 64, 16)}, "share bytes"),
        ({"layers": (2, 3, 5, 6)}, r"layer 6 is not in group full: pass model layer ids out of \(2, 3, 5, 7\)"),
        ({"layers": (2, 3, 5, 5)}, "is given twice"),
        ({"cell": (0, 16)}, "hold 32 of 64 bytes of a token"),
        ({"unit_tokens": 0}, "unit_tokens of group full is 0: pass the tokens"),
        ({"unit_tokens": -1}, "is -1"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kv(buffer(**changes)).check(LAYOUT)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"units": 1.5}, "holds 1.5: pass plain integers"),
        ({"units": True}, "holds True"),
        ({"bases": (0x10000,)}, "4 layers, 1 bases, 4 extents"),
        ({"stride": (1, 2)}, r"have \[2, 2, 2, 2\] numbers"),
        ({"extents": ((1,),) * 4}, "2 per extent"),
    ],
)
def test_a_buffer_of_the_wrong_shape_cannot_be_made(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        buffer(**changes)


def test_block_and_page_sizes() -> None:
    for tokens in (1, 2, 4, 8, 16, 32, 64, 128, 4096):
        wide = buffer(unit_tokens=tokens, units=1, stride=(0, 64, 32), extents=((0x1, 1 << 40),) * 4)
        kv(wide).check(LAYOUT)
    with pytest.raises(ConfigError, match=r"blocks of 48 tokens do not fit pages of 64 .* page_tokens=48"):
        kv(buffer(unit_tokens=48, units=1, extents=((0x1, 1 << 40),) * 4)).check(LAYOUT)
    with pytest.raises(ConfigError, match="page_tokens=80"):
        kv(buffer(unit_tokens=40, units=1, extents=((0x1, 1 << 40),) * 4)).check(LAYOUT)


def test_the_pieces_of_a_cell_must_tile_it() -> None:
    k, v = buffer(cell=(0, 16)), buffer(cell=(16, 16))
    kv(k, v).check(LAYOUT)
    with pytest.raises(ConfigError, match="are in two buffers"):
        kv(k, v, buffer(cell=(30, 2))).check(LAYOUT)
    with pytest.raises(ConfigError, match="hold 56 of 64"):
        kv(k, buffer(cell=(16, 12))).check(LAYOUT)
    with pytest.raises(ConfigError, match="differ in unit_tokens, units or replica"):
        kv(k, replace(v, units=7)).check(LAYOUT)


def test_heads_and_layers_may_be_in_separate_buffers() -> None:
    first, second = buffer(), buffer(heads=(2, 2))
    assert kv(first, second).part(GROUP) == Part(0, 4, 0, 4)
    kv(first, second).check(LAYOUT)
    half = {"bases": first.bases[:2], "extents": first.extents[:2]}
    kv(buffer(layers=(2, 3), **half), buffer(layers=(7, 5), **half)).check(LAYOUT)
    with pytest.raises(ConfigError, match=r"at \[0, 2\] of group full are not contiguous"):
        kv(buffer(layers=(2, 5), **half)).check(LAYOUT)
    assert kv(buffer(layers=(5, 7), **half)).part(GROUP) == Part(0, 2, 2, 2)


def test_states_take_one_unit_per_page() -> None:
    state = Group("state", (0,), 1, Cell("opaque", 100), Need.exact(), 1)
    layout = PageLayout.of([state], 16)
    one = KVBuffer("host", (4096,), ((4096, 1000),), (0,), (0, 1), (0, 1), 0, 10, (100, 0, 0), (0, 100))
    device = DeviceKV("state", (one,))
    assert device.check(layout) is state
    assert list(device.unit_range(state, 3)) == [3]
    with pytest.raises(ConfigError, match="pass 0: it has one state per page"):
        DeviceKV("state", (replace(one, unit_tokens=1),)).check(layout)


def test_unit_ranges() -> None:
    assert list(kv(buffer()).unit_range(GROUP, 2)) == [8, 9, 10, 11]
    assert list(kv(buffer(unit_tokens=128)).unit_range(GROUP, 3)) == [1]
    assert len(kv(buffer(unit_tokens=1)).unit_range(GROUP, 1)) == 64


def test_replicas_elect_one_writer_per_page() -> None:
    ranks = [kv(buffer(replica=(i, 3))) for i in range(3)]
    assert [[r.writes(c) for r in ranks].index(True) for c in range(6)] == [0, 1, 2, 0, 1, 2]
    assert all(sum(r.writes(c) for r in ranks) == 1 for c in range(6))
    assert [r.written((1, 2, 4, 7, 9)) for r in ranks] == [[9], [1, 4, 7], [2]]
    assert kv(buffer()).written((1, 2, 4)) == [1, 2, 4]


def test_no_buffers_are_refused() -> None:
    with pytest.raises(ConfigError, match="non-empty tuple"):
        DeviceKV("full", ())
    with pytest.raises(ConfigError, match="no group 'window'"):
        DeviceKV("window", (buffer(),)).check(LAYOUT)


# -- tensors ---------------------------------------------------------------------------------


def tensor(*shape: int) -> np.ndarray:
    return np.zeros(shape, "uint16")


@pytest.mark.parametrize(
    ("make", "order", "message"),
    [
        (lambda: [tensor(4, 16, 4, 16)] * 3, "block,token,head,2*dim", "3 tensors for 4 layers"),
        (lambda: [tensor(4, 16, 4)] * 4, "block,token,head,2*dim", "3 dimensions, the order names 4"),
        (lambda: [tensor(4, 16, 4, 16)] * 4, "block,tokens,head,2*dim", "names 'tokens'"),
        (lambda: [tensor(4, 16, 4, 16)] * 4, "head,head,token,dim", "names 'head'"),
        (lambda: [tensor(4, 16, 4, 16)] * 4, "kv,layer,head,dim", "name 'block'"),
        (lambda: [tensor(4, 16, 4, 16)] * 4, "slot,token,head,dim", "or 'slot'"),
        (lambda: [tensor(4, 4, 16)] * 4, "block,head,2*dim", "'block' without 'token'"),
        (lambda: [tensor(3, 4, 16, 4, 8)] * 4, "kv,block,token,head,dim", "holds K and V, 2"),
        (lambda: [tensor(4, 16, 4, 32)[..., ::2]] * 4, "block,token,head,2*dim", "must be contiguous"),
        (lambda: [tensor(4, 16, 4, 17)] * 4, "block,token,head,2*dim", "odd size"),
        (lambda: tensor(3, 4, 16, 4, 16), "layer,block,token,head,2*dim", "3 entries for 4 layers"),
        (lambda: [[1]] * 4, "block,token", "pass a torch tensor or a numpy array"),
        (lambda: [tensor(4, 16, 4, 16), *[tensor(5, 16, 4, 16)] * 3], "block,token,head,2*dim", "differ in shape"),
    ],
)
def test_tensors_that_cannot_be_described(make: Any, order: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        describe(GROUP, make(), order)


def test_read_only_arrays_and_foreign_rows_are_refused() -> None:
    frozen = tensor(4, 16, 4, 16)
    frozen.setflags(write=False)
    with pytest.raises(ConfigError, match="read-only"):
        describe(GROUP, [frozen] * 4, "block,token,head,2*dim")
    pairs = [(tensor(2, 4, 64, 8), tensor(2, 4, 64, 8)) for _ in range(4)]
    assert describe(GROUP, pairs, "batch,head,token,dim", row=1).check(LAYOUT) is GROUP
    with pytest.raises(ConfigError, match="row is 2"):
        describe(GROUP, pairs, "batch,head,token,dim", row=2)


def test_a_tensor_on_a_gpu_does_not_pass_for_host_memory_that_the_cpu_may_read() -> None:
    class Far:
        """As torch shows a tensor on a GPU."""

        shape, dtype = (4, 16, 4, 16), "torch.bfloat16"
        device = type("device", (), {"type": "cuda", "__str__": lambda _: "cuda:0"})()
        data_ptr, element_size, stride = lambda _: 1 << 20, lambda _: 2, lambda _: (1024, 64, 16, 1)
        nbytes = lambda _: 4 * 16 * 4 * 16 * 2  # noqa: E731
        untyped_storage = lambda far: far  # noqa: E731

    assert describe(GROUP, [Far()] * 4, "block,token,head,2*dim").memory == "cuda:0"
    for tensors, memory in (([Far()] * 4, "pinned"), ([Far()] * 4, "host"), ([tensor(4, 16, 4, 16)] * 4, "cuda:0")):
        with pytest.raises(ConfigError, match=f"memory is '{memory}', a tensor is in"):
            describe(GROUP, tensors, "block,token,head,2*dim", memory=memory)


def test_views_know_the_allocation_around_them() -> None:
    whole = tensor(4, 8, 16, 4, 16)  # layers first, blocks 2..5 of each
    views = list(whole[:, 2:6])
    device = describe(GROUP, views, "block,token,head,2*dim")
    start = whole.__array_interface__["data"][0]
    assert device.check(LAYOUT) is GROUP
    assert set(device.buffers[0].extents) == {(start, whole.nbytes)}
    assert device.buffers[0].units == 4
    backwards = [v[::-1] for v in views]
    assert describe(GROUP, backwards, "block,token,head,2*dim").check(LAYOUT) is GROUP


def test_an_expanded_tensor_is_refused() -> None:
    torch = pytest.importorskip("torch")
    one = torch.zeros(4, 1, 4, 16, dtype=torch.bfloat16)
    distinct = [one.clone().expand(4, 16, 4, 16) for _ in range(4)]
    with pytest.raises(ConfigError, match="share bytes"):
        describe(GROUP, distinct, "block,token,head,2*dim").check(LAYOUT)


def test_halves_do_not_pass_for_bfloat16_of_the_same_width() -> None:
    torch = pytest.importorskip("torch")
    shape = (4, 16, 4, 16)
    for dtype in (torch.float16, torch.float32):
        with pytest.raises(ConfigError, match="the cells of group full bf16"):
            describe(GROUP, [torch.zeros(shape, dtype=dtype)] * 4, "block,token,head,2*dim")
    for dtype in (torch.bfloat16, torch.int16):  # bare words say nothing of what they hold
        describe(GROUP, [torch.zeros(shape, dtype=dtype)] * 4, "block,token,head,2*dim")


def test_floats_of_8_bits_do_not_pass_for_others_of_the_same_width() -> None:
    torch = pytest.importorskip("torch")
    for wanted, other in (
        ("float8_e4m3fn", "float8_e5m2"),
        ("float8_e5m2", "float8_e4m3fnuz"),
        ("int8", "float8_e5m2"),
    ):
        group = PageLayout.kv(layers=4, kv_heads=4, head_dim=8, dtype=wanted, scale="float32").groups[0]
        cells, scales = "block,token,head,2*dim", torch.zeros(4, 16, 4, 2)
        with pytest.raises(ConfigError, match=f"holds {other}, the cells of group full {wanted}"):
            describe(group, [(torch.zeros(4, 16, 4, 16).to(getattr(torch, other)), scales)] * 4, cells)
        for dtype in (getattr(torch, wanted), torch.uint8):  # bare bytes say nothing of what they hold
            describe(group, [(torch.zeros(4, 16, 4, 16).to(dtype), scales)] * 4, cells)


def test_k_and_v_that_touch_are_one_piece() -> None:
    touching = describe(GROUP, [tensor(4, 16, 4, 2, 8) for _ in range(4)], "block,token,head,kv,dim")
    assert [b.cell for b in touching.buffers] == [(0, CELL)]
    separate = describe(GROUP, [tensor(4, 2, 16, 4, 8) for _ in range(4)], "block,kv,token,head,dim")
    assert [b.cell for b in separate.buffers] == [(0, CELL // 2), (CELL // 2, CELL // 2)]
    assert touching.check(LAYOUT) is separate.check(LAYOUT) is GROUP


def test_ranks_describe_their_share() -> None:
    share = describe(
        GROUP, [tensor(4, 16, 2, 16) for _ in range(2)], "block,token,head,2*dim", layers=[5, 7], first_head=2,
        replica=(1, 2),
    )  # fmt: skip
    share.check(LAYOUT)
    assert share.part(GROUP) == Part(2, 2, 2, 2)
    assert not share.writes(0) and share.writes(1)
