"""The kernels compile for GPUs, down to machine code: the interpreter accepts programs that the compiler refuses."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the kernels need triton")

COMPILE = """
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvfs.kernels import cells, launch, pieces, pull, token_copy, unit_sums, xxh3


def compile_for(capability, kernel, pointers, warps, constants):
    signature = {**dict.fromkeys(pointers, "*i64"), **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    assert made.asm["cubin"]
    assert launch.addresses(made.asm["ptx"]) in range(len(pointers), len(pointers) + launch.SCRATCH + 1)


for capability in map(int, sys.argv[1:]):
    compile_for(capability, pieces._copy_pieces, ["work"], pieces.WARPS, {"BLOCK": pieces.BLOCK})
    for element, kind in cells.KINDS.items():
        for to_page in (False, True):
            constants = {"BUFFERS": 2, "STATES": 16, "ROWS": 128, "COLS": 32, "ELEMENT": element, "KIND": kind}
            compile_for(capability, cells._cells, ["work"], 8, {**constants, "TO_PAGE": to_page})
        tiles = {"BUFFERS": 2, "ROWS": 8, "COLS": 32, "ROW_TILES": 2, "COL_TILES": 1, "ELEMENT": element, "KIND": kind}
        compile_for(capability, token_copy._copy, ["work"], 4, tiles)
        for lines, states, some in ((1, 1, False), (2, 1, False), (32, 16, True)):
            for line, cols, rows in ((4096, 4096, 2), (5000, 4096, 2), (9, 16, 128)):
                tiles = {"FIRST": 1, "MOVES": 2, "LINES": lines, "STATES": states, "ROWS": rows, "COLS": cols}
                tiles |= {"PIECES": -(-line // cols), "ELEMENT": element, "KIND": kind, "LINE": line, "SOME": some}
                compile_for(capability, pull._pull, ["work"], pull.WARPS, {**tiles, "VECTORS": element == 8})
        for one_unit in (False, True):
            constants = {"LEAVES": unit_sums.LEAVES, "CHECK": one_unit, "BUFFERS": 4, "STATES": 16, "CELL": 264}
            constants |= {"ELEMENT": element, "KIND": kind, "ONE_UNIT": one_unit}
            constants["UNROLLED"] = unit_sums.unrolled(element)
            compile_for(capability, unit_sums._unit_leaves, ["work", "constants"], unit_sums.PART_WARPS, constants)
    for aligned in (False, True):
        for check in (False, True):
            constants = {"LEAVES": xxh3.LEAVES, "ALIGNED": aligned, "CHECK": check}
            compile_for(capability, xxh3._leaves, ["work", "constants"], xxh3.WARPS, constants)
"""


@pytest.mark.slow
@pytest.mark.timeout(630)
def test_every_variant_compiles_without_a_gpu(tmp_path: object) -> None:
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, "80", "90"], env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
