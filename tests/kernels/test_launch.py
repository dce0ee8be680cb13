"""Launches by the driver: only of kernels that Triton would launch in the same way."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from kvfs.kernels import driver, launch

PTX = """
.visible .entry _cells(
	.param .u64 .ptr .global .align 16 _cells_param_0,
	.param .u64 .ptr .global .align 1 _cells_param_1
)
.reqntid 128
{
	ld.param.u64 %rd1, [_cells_param_0];
	ret;
}
"""


def compiled(ptx: str = PTX, function: int | None = 4711, **changes: Any) -> SimpleNamespace:
    plain = {"num_warps": 4, "shared": 96, "num_ctas": 1, "target": SimpleNamespace(warp_size=32)}
    return SimpleNamespace(asm={"ptx": ptx}, function=function, metadata=SimpleNamespace(**{**plain, **changes}))


def test_addresses_are_counted_and_everything_else_is_refused() -> None:
    assert launch.addresses(PTX) == 2
    assert launch.addresses(PTX.replace(".param .u64 .ptr .global .align 1", ".param .u32")) == -1
    assert launch.addresses(PTX + PTX.replace("_cells", "_more")) == -1, "two kernels"
    assert launch.addresses("") == -1
    assert launch.addresses(".visible .entry none()\n{ ret; }") == 0


@pytest.mark.parametrize(
    ("made", "arguments"),
    [
        (None, 2),  # under the interpreter
        (SimpleNamespace(asm={"amdgcn": ""}, metadata=SimpleNamespace(), function=1), 2),
        (compiled(function=None), 2),
        (compiled(PTX.replace(".u64", ".u32", 1)), 2),
        (compiled(), 3),
        (compiled(PTX.replace("_cells_param_1", "p1,\n.param .u64 p2,\n.param .u64 p3,\n.param .u64 p4")), 2),
        (compiled(num_ctas=2), 2),
        (compiled(global_scratch_size=128), 2),
        (compiled(profile_scratch_size=128), 2),
        (compiled(launch_cooperative_grid=True), 2),
        (compiled(launch_pdl=True), 2),
        (compiled(tmem_size=64), 2),
    ],
)  # fmt: skip
def test_kernels_that_need_more_than_a_plain_launch_are_left_to_triton(made: Any, arguments: int) -> None:
    assert launch.launch_of(made, arguments, 8, 1) is None


@pytest.mark.parametrize("arguments", [1, 2])
def test_a_launch_passes_the_addresses_and_nothing_for_scratch(arguments: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def fake(function: int, programs: int, threads: int, shared: int, stream: int, parameters: Any) -> None:
        values = [ctypes.c_uint64.from_address(parameters[i]).value for i in range(arguments + launch.SCRATCH)]
        asked.append((function, programs, threads, shared, stream, values))

    monkeypatch.setattr(driver, "launch", fake)
    one = launch.launch_of(compiled(), arguments, 64, 99)
    assert one is not None
    given = [0x7F00_0000_1000 + 256 * i for i in range(arguments)]
    one(*given)
    one(*[address + 512 for address in given])
    assert asked == [
        (4711, 64, 128, 96, 99, [*given, 0, 0]),
        (4711, 64, 128, 96, 99, [*[address + 512 for address in given], 0, 0]),
    ]


def test_an_address_that_is_not_aligned_is_a_bug() -> None:
    one = launch.launch_of(compiled(), 1, 64, 99)
    assert one is not None
    with pytest.raises(AssertionError, match="17"):
        one(17)
