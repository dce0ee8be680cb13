"""Paged KV memory on a GPU as engines lay it out; filled, poisoned and compared there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kvfs
from kvfs.pages.layout import Group, Need, PageLayout
from tools.benchmarks.measure import BenchError


def _gqa(page_tokens: int) -> PageLayout:
    return PageLayout.kv(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16", page_tokens=page_tokens)


def _hybrid() -> PageLayout:
    whole = _gqa(16).groups[0]
    window = Group("window", tuple(range(8, 32)), 8, whole.cell, Need.window_of(1024), 16)
    return PageLayout.of([Group("full", tuple(range(8)), 8, whole.cell, Need.all(), 16), window], 16)


SHAPES: dict[str, Callable[[], PageLayout]] = {
    "gqa16": lambda: _gqa(16),
    "gqa64": lambda: _gqa(64),
    "mla64": lambda: PageLayout.mla(layers=61, kv_lora_rank=512, rope_dim=64, dtype="bfloat16", page_tokens=64),
    "int8": lambda: PageLayout.kv(
        layers=32, kv_heads=8, head_dim=128, dtype="int8", scale="float32", page_tokens=16
    ),
    "hybrid": _hybrid,
}  # fmt: skip
BLOCK = 16


def torch_with_cuda() -> Any:
    """torch; BenchError if it is not there, or sees no CUDA device."""
    try:
        import torch
    except ImportError as exc:
        raise BenchError(f"this benchmark needs torch, triton and a GPU: {exc}") from None
    if not torch.cuda.is_available():
        raise BenchError("this benchmark needs a CUDA device, torch sees none")
    return torch


class Engine:
    """Paged KV memory on the device, as vLLM lays it out; blocks in random order."""

    def __init__(self, torch: Any, layout: PageLayout, tokens: int, seed: int) -> None:
        self.torch, self.layout = torch, layout
        blocks = tokens // BLOCK * 5 // 4
        generator = torch.Generator().manual_seed(seed)
        self.units = torch.randperm(blocks, generator=generator)[: tokens // BLOCK].tolist()
        self.tensors: list[Any] = []
        self.windows: list[int] = []  # of each tensor's group, 0: all tokens
        self.kvs = []
        for group in layout.groups:
            self.kvs.append(self._describe(group, blocks))
            self.windows += [group.need.window] * (len(self.tensors) - len(self.windows))

    def _describe(self, group: Group, blocks: int) -> kvfs.DeviceKV:
        torch, heads, encoding = self.torch, group.heads, group.cell.encoding
        if heads == 1:
            shape = (blocks, BLOCK, group.cell.nbytes // 2)
            made = [torch.empty(*shape, dtype=torch.bfloat16, device="cuda") for _ in group.layers]
            self.tensors += made
            return kvfs.describe(group, made, "block,token,dim")
        if "int8" in encoding:
            rows = []
            for _ in group.layers:
                values = [torch.empty(blocks, BLOCK, heads, 128, dtype=torch.int8, device="cuda") for _ in range(2)]
                scales = [torch.empty(blocks, BLOCK, heads, dtype=torch.float32, device="cuda") for _ in range(2)]
                rows.append((*values, *scales))
                self.tensors += [*values, *scales]
            return kvfs.describe(group, rows, ["block,token,head,dim"] * 2 + ["block,token,head"] * 2)
        made = [torch.empty(2, blocks, BLOCK, heads, 128, dtype=torch.bfloat16, device="cuda") for _ in group.layers]
        self.tensors += made
        return kvfs.describe(group, made, "kv,block,token,head,dim")

    def fill(self, seed: int | None) -> None:
        """Fill with random bytes, or poison; waits for the GPU."""
        for i, tensor in enumerate(self.tensors):
            raw = tensor.view(self.torch.uint8)
            if seed is None:
                raw.fill_(0xA5)
            else:
                raw.random_(0, 256, generator=self.torch.Generator("cuda").manual_seed(seed * 1000 + i))
        self.torch.cuda.synchronize()

    def same(self, other: Engine, tokens: int, number: int = 0) -> bool:
        """Whether the tokens that a load of prompt ``number`` of ``tokens`` moves hold the same bytes."""
        torch, begin, end = self.torch, number * tokens, (number + 1) * tokens
        for a, b, window in zip(self.tensors, other.tensors, self.windows, strict=True):
            first = (max(begin, end - window) if window else begin) // BLOCK
            mine = torch.tensor(self.units[first : end // BLOCK], device="cuda")
            theirs = torch.tensor(other.units[first : end // BLOCK], device="cuda")
            dim = 1 if a.shape[0] == 2 and a.dim() == 5 else 0
            if not torch.equal(
                a.index_select(dim, mine).view(torch.uint8), b.index_select(dim, theirs).view(torch.uint8)
            ):
                return False
        return True

    def needed(self, tokens: int) -> int:
        """Bytes of a prompt that a load moves."""
        total = 0
        for group in self.layout.groups:
            chunks, last = tokens // self.layout.page_tokens, group.need.chunks(self.layout.page_tokens)
            total += group.page_bytes * (chunks if last is None else min(chunks, last))
        return total
