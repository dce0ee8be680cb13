"""gather and scatter against a reference that walks every byte, over layouts, dtypes, blocks and pages."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvfs import hostcopy
from kvfs.device import DeviceKV
from kvfs.errors import ConfigError
from kvfs.hostcopy import gather, scatter
from kvfs.layout import Cell, Group, Need, PageLayout, Part
from kvfs.tensors import describe

POISON = 0xA5
GUARD = 64


@pytest.fixture(params=["numpy", "memmove"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "memmove":
        monkeypatch.setattr(hostcopy, "_numpy", lambda: None)
    return str(request.param)


def guarded(shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """An array of random bytes, and the allocation that it lies in with guard bytes on both sides."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = rng.integers(0, 256, nbytes + 2 * GUARD, dtype="uint8")
    raw[:GUARD] = raw[-GUARD:] = 0xEE
    return raw[GUARD : GUARD + nbytes].view(dtype).reshape(shape), raw


def cells(kv: DeviceKV, memory: dict[int, np.ndarray]) -> Any:
    """Byte address of (layer, unit, token, head, byte of the cell), straight from the formula."""

    def address(layer: int, unit: int, token: int, head: int, byte: int) -> tuple[np.ndarray, int]:
        for b in kv.buffers:
            if layer in b.layers and b.heads[0] <= head < sum(b.heads) and 0 <= byte - b.cell[0] < b.cell[1]:
                i = b.layers.index(layer)
                at = b.bases[i] + unit * b.stride[0] + token * b.stride[1] + (head - b.heads[0]) * b.stride[2]
                at += byte - b.cell[0]
                for start, raw in memory.items():
                    if start <= at < start + raw.nbytes:
                        return raw, at - start
        raise AssertionError("nowhere")

    return address


def reference(
    group: Group, part: Part, kv: DeviceKV, memory: dict[int, np.ndarray], units: list[int], chunk: int, first: int
) -> Iterator[tuple[int, np.ndarray, int]]:
    """(byte of the page, allocation, byte of it) of all that must move."""
    address = cells(kv, memory)
    size, per = group.cell.nbytes, max(1, kv.unit_tokens)
    for state in range(group.states):
        token = chunk * group.states + state
        unit = units[chunk] if group.states == 1 else units[token // per]
        if unit < 0 or (group.states > 1 and token < first):
            continue
        granule, inside = divmod(state, group.granule_states)
        for row in range(part.layers):
            for h in range(part.heads):
                at = (((granule * part.layers + row) * part.heads + h) * group.granule_states + inside) * size
                for byte in range(size):
                    layer = group.layers[part.layer + row]
                    yield at + byte, *address(layer, unit, token % per if group.states > 1 else 0, part.head + h, byte)


class Case:
    """A layout, an order and its tensors."""

    def __init__(
        self, order: str, page: int, block: int, *, heads: int = 2, dim: int = 3, dtype: str = "float16",
        layers: int = 2, units: int = 0,
    ) -> None:  # fmt: skip
        self.rng = np.random.default_rng(0)
        self.group = PageLayout.kv(
            layers=layers, kv_heads=heads, head_dim=dim, dtype="float32" if dtype == "float32" else "bfloat16",
            page_tokens=page,
        ).groups[0]  # fmt: skip
        tokens = 2 * page
        per = 1 if block == 0 else block
        self.units = units or -(-tokens // per) + 2
        size = {
            "layer": layers, "block": self.units, "slot": self.units, "batch": 2, "kv": 2, "token": block or self.units,
            "head": heads, "2*head": 2 * heads, "dim": dim, "2*dim": 2 * dim,
        }  # fmt: skip
        names = order.split(",")
        shape = tuple(size[n] for n in names)
        pairs = not {"kv", "2*head", "2*dim"} & set(names)
        count = (1 if "layer" in names else layers) * (2 if pairs else 1)
        made = [guarded(shape, dtype, self.rng) for _ in range(count)]
        self.memory = {raw.__array_interface__["data"][0]: raw for _, raw in made}
        tensors: Any = [array for array, _ in made]
        if pairs:
            tensors = [tuple(tensors[i : i + 2]) for i in range(0, count, 2)]
        self.kv = describe(self.group, tensors[0] if "layer" in names else tensors, order)
        self.kv.check(PageLayout.of([self.group], page))
        ids = list(range(self.units))
        random.Random(1).shuffle(ids)
        self.ids = ids[: -(-tokens // per)]
        self.part = self.kv.part(self.group)

    def snapshot(self) -> list[bytes]:
        return [raw.tobytes() for raw in self.memory.values()]

    def check(self, chunk: int, first: int = 0, part: Part | None = None) -> None:
        """Both directions against the reference; whatever must not change does not."""
        part = part or self.part
        size = self.group.part_bytes(part)
        moves = list(reference(self.group, part, self.kv, self.memory, self.ids, chunk, first))
        before = self.snapshot()
        page = bytearray([POISON]) * size
        want = bytearray(page)
        for at, raw, index in moves:
            want[at] = raw[index]
        copied = gather(page, self.group, part, self.kv, self.ids, chunk, first_token=first)
        assert (copied, page) == (len(moves), want)
        assert self.snapshot() == before, "gather wrote to the engine"
        source = self.rng.integers(0, 256, size, dtype="uint8")
        expected = [bytearray(b) for b in before]
        index_of = {id(raw): i for i, raw in enumerate(self.memory.values())}
        for at, raw, index in moves:
            expected[index_of[id(raw)]][index] = source[at]
        kept = source.tobytes()
        assert scatter(kept, self.group, part, self.kv, self.ids, chunk, first_token=first) == len(moves)
        assert [bytearray(b) for b in self.snapshot()] == expected
        assert source.tobytes() == kept, "scatter wrote to the page"


ORDERS = [
    ("block,kv,token,head,dim", 16),  # vLLM, per layer
    ("kv,block,token,head,dim", 16),
    ("block,kv,head,token,dim", 16),
    ("block,head,token,2*dim", 16),  # vLLM on a CPU
    ("layer,kv,block,token,head,dim", 16),
    ("block,layer,head,token,2*dim", 16),  # block-outermost: granules byte for byte
    ("block,layer,token,head,kv,dim", 16),
    ("slot,head,dim", 0),  # SGLang
    ("layer,slot,2*head,dim", 0),  # LightLLM
    ("batch,head,token,dim", 0),  # transformers
]


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
def test_units_of_minus_one_are_left_alone(order: str, way: str) -> None:
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
    monkeypatch.setattr(hostcopy, "_numpy", lambda: None)
    calls = []
    monkeypatch.setattr(hostcopy.ctypes, "memmove", lambda to, source, n: calls.append(n))
    case = Case("block,layer,head,token,2*dim", 64, 16)
    gather(bytearray(case.group.page_bytes), case.group, case.part, case.kv, [3, 4, 6, 5], 0)
    assert calls == [case.group.page_bytes // 2] + [case.group.page_bytes // 4] * 2


def test_scales_that_lie_apart(way: str) -> None:
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
