"""The kernels alone, in GPU memory: GB/s of checksums, gather and scatter for 1 to 128 programs.

A batch of random bytes in scratch, blocks of 16 tokens in random order; medians, the L2 cache emptied before each run.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvfs.kernels.work_list import Shape, granule_words, pack, shape_of
from tools.benchmarks.gpu_engine import BLOCK, SHAPES, Engine, torch_with_cuda
from tools.benchmarks.report import Report, Table

PROGRAMS = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Plan:
    shapes: Sequence[str]
    sizes: Sequence[int]
    seed: int


def run(report: Report, plan: Plan) -> None:
    torch = torch_with_cuda()
    for name in plan.shapes:
        for nbytes in plan.sizes:
            table = Table(f"{name}: kernels on {nbytes >> 20} MiB, GB/s")
            batch = Batch(torch, name, nbytes, plan.seed)
            for what, call in batch.calls().items():
                table.add(kernel=what, **{str(n): batch.rate(lambda n=n, call=call: call(n)) for n in PROGRAMS})
            report.show(table)


class Batch:
    """Pages of a shape in scratch, and the work list that kvfs would make for them."""

    def __init__(self, torch: Any, name: str, nbytes: int, seed: int) -> None:
        from kvfs.kernels import xxh3

        layout = SHAPES[name]()
        group = layout.groups[0]
        self.pages = max(1, nbytes // group.page_bytes)
        self.nbytes = self.pages * group.page_bytes
        engine = Engine(torch, layout, self.pages * layout.page_tokens, seed)
        device = engine.kvs[0]
        self.shape: Shape = shape_of(group, device.part(group), device)
        self.engine, self._torch = engine, torch
        self.scratch = torch.empty(self.nbytes, dtype=torch.uint8, device="cuda").random_(0, 256)
        self.flags = torch.zeros(self.pages, dtype=torch.int32, device="cuda")
        self.leaves = torch.zeros(self.nbytes // self.shape.leaf_bytes + 1, dtype=torch.int64, device="cuda")
        self.table = torch.frombuffer(bytearray(self.shape.table), dtype=torch.int64).cuda()
        self.constants = torch.frombuffer(bytearray(xxh3.CONSTANTS), dtype=torch.int64).cuda()
        units = engine.units[: self.pages * layout.page_tokens // BLOCK]
        self.units = torch.tensor(units, dtype=torch.int64, device="cuda")
        step = self.shape.layers * self.shape.leaf_bytes
        granules = self.pages * group.granules
        tokens = range(0, granules * group.granule_states, group.granule_states)
        words = granule_words(0, step, tokens, [i // group.granules for i in range(granules)])
        work = pack(
            self.shape, words, scratch=self.scratch.data_ptr(), unit_ids=self.units.data_ptr(), units=len(units),
            flags=self.flags.data_ptr(), leaves=self.leaves.data_ptr(), buffers=self.table.data_ptr(),
        )  # fmt: skip
        self.work = torch.frombuffer(array("b", work), dtype=torch.int64).cuda()

    def calls(self) -> dict[str, Callable[[int], None]]:
        from kvfs.gpu.device import copy_warps
        from kvfs.kernels import cells, xxh3

        def move(to_page: bool) -> Callable[[int], None]:
            return lambda n: cells.move(
                self.work, self.shape, to_page=to_page, programs=n, warps=copy_warps(self.shape)
            )

        return {
            "leaves (XXH3)": lambda n: xxh3.leaves(self.work, self.constants, self.shape, check=False, programs=n),
            "scatter": move(False),
            "gather": move(True),
        }

    def rate(self, call: Callable[[], object]) -> float:
        from triton.testing import do_bench

        return float(self.nbytes / do_bench(call, warmup=3, rep=15, return_mode="median") / 1e6)
