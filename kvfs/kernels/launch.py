"""Launches of compiled kernels by the driver: a few microseconds of the host, where Triton's own launcher takes 50.

Triton's launcher looks the kernel up by the types and values of its arguments. The kernels of kvfs take only addresses,
of blocks of words that hold everything else, so one compiled kernel fits every call. Its parameters, as its PTX lists
them, are those addresses and up to two more, of scratch memory that these kernels do not use.
"""

from __future__ import annotations

import ctypes
import re
from typing import Any

from kvfs.kernels import driver

SCRATCH = 2  # parameters behind the arguments, at most: Triton's global and profile scratch
ALIGN = 16  # Triton compiles for addresses aligned so, if those of the first call are
_ENTRY = re.compile(r"\.entry\s+[\w$]+\s*\((.*?)\)", re.DOTALL)
_ADDRESS = re.compile(r"\.param\s+\.u64\b")
#: Features that a plain launch does not support; 0, False or absent in a kernel without them.
_EXTRAS = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl", "tmem_size")


class Launch:
    """One kernel on one stream, for one thread at a time."""

    def __init__(self, compiled: Any, arguments: int, programs: int, stream: int) -> None:
        metadata = compiled.metadata
        self._compiled = compiled  # unloads the kernel when it is collected
        self._values = (ctypes.c_uint64 * (arguments + SCRATCH))()
        first, size = ctypes.addressof(self._values), ctypes.sizeof(ctypes.c_uint64)
        self._parameters = (ctypes.c_void_p * len(self._values))(*range(first, first + size * len(self._values), size))
        self._arguments, self._stream, self._programs = arguments, stream, programs
        self._threads, self._shared = metadata.num_warps * metadata.target.warp_size, metadata.shared

    def __call__(self, *addresses: int) -> None:
        assert len(addresses) == self._arguments
        for i, address in enumerate(addresses):
            assert address % ALIGN == 0, f"an address that is not aligned: {address}"
            self._values[i] = address
        driver.launch(
            self._compiled.function, self._programs, self._threads, self._shared, self._stream, self._parameters
        )  # fmt: skip


def launch_of(compiled: Any, arguments: int, programs: int, stream: int) -> Launch | None:
    """A launch of what Triton compiled for ``arguments`` addresses; None if only Triton can launch it."""
    asm, metadata = getattr(compiled, "asm", {}), getattr(compiled, "metadata", None)
    if "ptx" not in asm or metadata is None or not getattr(compiled, "function", None):
        return None
    if any(getattr(metadata, extra, 0) for extra in _EXTRAS) or getattr(metadata, "num_ctas", 1) != 1:
        return None
    if addresses(asm["ptx"]) not in range(arguments, arguments + SCRATCH + 1):
        return None
    return Launch(compiled, arguments, programs, stream)


def addresses(ptx: str) -> int:
    """How many parameters the entry of a kernel has; -1 unless there is one entry and all of them are addresses."""
    entries = _ENTRY.findall(ptx)
    if len(entries) != 1:
        return -1
    parameters = [text for text in entries[0].split(",") if text.strip()]
    return len(parameters) if all(_ADDRESS.search(text) for text in parameters) else -1
