"""For tests of copies: buffers of every order with guard bytes, and a reference that walks every byte."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from kvfs.pages import host_copy
from kvfs.pages.describe import describe
from kvfs.pages.device_kv import DeviceKV
from kvfs.pages.layout import Group, PageLayout, Part


class Copies(NamedTuple):
    """A pair of functions with the signatures of ``kvfs.pages.host_copy``; None: they do not count bytes."""

    gather: Callable[..., int | None]
    scatter: Callable[..., int | None]


HOST = Copies(host_copy.gather, host_copy.scatter)
POISON = 0xA5
GUARD = 64


def guarded(shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """An array of random bytes, and the allocation that contains it, with guard bytes on both sides."""
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
    """(byte of the page, allocation, byte of the allocation) of all that must be copied."""
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
    """A layout, an order and tensors of that order, whose unit ids are shuffled."""

    def __init__(
        self, order: str, page: int, block: int, *, heads: int = 2, dim: int = 3, dtype: str = "float16",
        layers: int = 2, units: int = 0, copies: Copies = HOST,
    ) -> None:  # fmt: skip
        self.copies = copies
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
        """Both directions against the reference; all other bytes are unchanged."""
        part = part or self.part
        size = self.group.part_bytes(part)
        moves = list(reference(self.group, part, self.kv, self.memory, self.ids, chunk, first))
        before = self.snapshot()
        page = bytearray([POISON]) * size
        want = bytearray(page)
        for at, raw, index in moves:
            want[at] = raw[index]
        copied = self.copies.gather(page, self.group, part, self.kv, self.ids, chunk, first_token=first)
        assert copied in (None, len(moves))
        assert page == want
        assert self.snapshot() == before, "gather wrote to the engine"
        source = self.rng.integers(0, 256, size, dtype="uint8")
        expected = [bytearray(b) for b in before]
        index_of = {id(raw): i for i, raw in enumerate(self.memory.values())}
        for at, raw, index in moves:
            expected[index_of[id(raw)]][index] = source[at]
        kept = source.tobytes()
        copied = self.copies.scatter(kept, self.group, part, self.kv, self.ids, chunk, first_token=first)
        assert copied in (None, len(moves))
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
