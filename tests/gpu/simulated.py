"""A device over host memory: copies happen at once. For the tests of the GPU transport.

Leaves are summed by the xxhash library and cells are moved by the torch fallback, unless a test asks for the kernels
under Triton's interpreter: a hundredth of the time, and tests of the kernels themselves are in ``tests/kernels``.

It checks what a real GPU requires: copies only touch memory that is pinned, registered or its own, and registered
memory is still mapped.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from kvfs.gpu.device import OUT_PROGRAMS, Event, Pinned, Stream
from kvfs.kernels import cells, pieces, pull, torch_fallback, unit_sums, xxh3
from kvfs.kernels.driver import IPC_BYTES, CudaError
from kvfs.kernels.moves import MOVE_WORDS, Tiles
from kvfs.kernels.work_list import BUFFER_WORDS, GRANULE_WORDS, HEAD_WORDS, PIECE_WORDS, WORD, Shape, Work

_INTERPRETER = threading.Lock()  # Triton's interpreter replaces functions of its language while a kernel runs


class Happened:
    """An event of the past."""

    def query(self) -> bool:
        return True


class Pending:
    """An event that streams can wait for; a test sets it. Work behind it runs in the thread that enqueues it."""

    def __init__(self) -> None:
        self.happened, self.awaited = threading.Event(), threading.Event()

    def query(self) -> bool:
        return self.happened.is_set()

    def synchronize(self) -> None:
        self.awaited.set()
        self.happened.wait(100)


class SimulatedMemory:
    def __init__(self, nbytes: int) -> None:
        self.array = np.full(-(-nbytes // 8) * 8, 0xA5, dtype="uint8")
        self.address = int(self.array.__array_interface__["data"][0])

    def words(self, offset: int) -> Any:
        return torch.from_numpy(self.array[offset:].view("int64"))


def at_host(address: int, elements: int, element: int) -> Any:
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return torch.frombuffer((ctypes.c_char * (elements * element)).from_address(address), dtype=kinds[element])


class SimulatedStream:
    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device

    def copy_in(self, target: int, source: int, nbytes: int) -> None:
        self._device.check_host(source, nbytes)
        self._device.check_own(target, nbytes)
        self._device.copied += nbytes
        ctypes.memmove(target, source, nbytes)

    def push(self, target: int, source: int, nbytes: int) -> None:
        self._device.check_own(target, nbytes)
        ctypes.memmove(target, source, nbytes)

    def copy_in_2d(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int
    ) -> None:
        for i in range(height):
            self.copy_in(target + i * target_pitch, source + i * source_pitch, width)

    def copy_out(self, target: int, source: int, nbytes: int) -> None:
        self._device.check_host(target, nbytes)
        self._device.check_own(source, nbytes)
        ctypes.memmove(target, source, nbytes)

    def use(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def event(self) -> Event:
        return Happened()

    def synchronize(self) -> None:
        event = self.record()
        while not event.query():
            time.sleep(0.0001)

    def record(self, event: Event | None = None) -> Event:
        return event or Happened()

    def after(self, event: Event) -> None:
        if isinstance(event, Pending):
            event.synchronize()

    def gather(self, work: Work, shape: Shape) -> None:
        self._move(work, shape, to_page=True)
        if shape.sums:
            self._sum(work, shape, check=False)

    def scatter(self, work: Work, shape: Shape, *, check: bool, quick: bool = False) -> None:
        if check:
            assert shape.sums
            self._sum(work, shape, check=True)
        self._move(work, shape, to_page=False)

    def copy_pieces(self, work: Work, *, programs: int) -> None:
        words = work.host[1 : 1 + work.host[0] * PIECE_WORDS].tolist()
        listed = [words[i : i + PIECE_WORDS] for i in range(0, len(words), PIECE_WORDS)]
        for source, target, count in listed:
            host, own = (target, source) if programs == OUT_PROGRAMS else (source, target)
            self._device.check_host(host, count * WORD)
            self._device.check_own(own, count * WORD)
        if self._device.interpreted:
            with _INTERPRETER:
                pieces.copy_pieces(work.words, programs=2)
        else:
            for source, target, count in listed:
                ctypes.memmove(target, source, count * WORD)

    def pull(self, work: Work, tiles: Sequence[Tiles]) -> None:
        self._launched()
        for cut in tiles:
            if self._device.interpreted:
                with _INTERPRETER:
                    pull.copy(work.words, cut, programs=2, warps=4)
            else:
                _copy_on_host(work, cut)

    def sum_units(self, work: Work, shape: Shape, *, check: bool, quick: bool = False) -> None:
        self._launched()
        if self._device.interpreted:
            with _INTERPRETER:
                unit_sums.leaves(work.words, self._device.constants, shape, check=check, programs=2)
        else:
            _sum_units_on_host(work, shape, check=check)

    def _launched(self) -> None:
        self._device.launches += 1
        self._device.before_launch()
        if self._device.launches == self._device.fails_at:
            raise CudaError("launch: out of resources")

    def _move(self, work: Work, shape: Shape, *, to_page: bool) -> None:
        self._launched()
        if shape.kernels and not self._device.triton:
            raise ImportError("No module named 'triton'")
        if shape.kernels and self._device.interpreted:
            with _INTERPRETER:
                cells.move(work.words, shape, to_page=to_page, programs=2)
        else:
            moved = work if to_page or not shape.sums else _without_flagged_pages(work)
            torch_fallback.move(moved, shape, at_host, to_page=to_page)

    def _sum(self, work: Work, shape: Shape, *, check: bool) -> None:
        if self._device.interpreted:
            with _INTERPRETER:
                xxh3.leaves(work.words, self._device.constants, shape, check=check, programs=2)
        else:
            _sum_on_host(work, check=check)


def _granules(work: Work) -> list[list[int]]:
    """(offset in scratch, first token, page) of each granule of a work list."""
    words = work.host[HEAD_WORDS:].tolist()
    return [words[i : i + GRANULE_WORDS] for i in range(0, work.host[0] * GRANULE_WORDS, GRANULE_WORDS)]


def _sum_on_host(work: Work, *, check: bool) -> None:
    """What the kernel ``xxh3.leaves`` does: write each leaf's sum, or flag the pages whose sums differ."""
    rows, leaf_bytes, scratch, flags, leaves = (work.host[i] for i in (1, 3, 8, 10, 11))
    for number, (offset, _, page) in enumerate(_granules(work)):
        for row in range(rows):
            digest = xxhash.xxh3_64_intdigest(ctypes.string_at(scratch + offset + row * leaf_bytes, leaf_bytes))
            leaf = ctypes.c_uint64.from_address(leaves + 8 * (number * rows + row))
            if not check:
                leaf.value = digest
            elif leaf.value != digest:
                _flag(flags, page).value = 1


def _sum_units_on_host(work: Work, shape: Shape, *, check: bool) -> None:
    """What the kernel ``unit_sums.leaves`` does: the same by way of pages."""
    granules, size = _granules(work), shape.layers * shape.leaf_bytes
    pages = ctypes.create_string_buffer(max(1, len(granules)) * size)
    words = work.host[: HEAD_WORDS + len(granules) * GRANULE_WORDS].tolist()
    words[8] = ctypes.addressof(pages)
    for i in range(len(granules)):
        words[HEAD_WORDS + i * GRANULE_WORDS] = i * size
    moved = work._replace(host=memoryview(array("q", words)))
    torch_fallback.move(moved, shape, at_host, to_page=True)
    _sum_on_host(moved, check=check)


def _copy_on_host(work: Work, tiles: Tiles) -> None:
    """What the kernel ``pull.copy`` does, line by line."""

    def i64(address: int, count: int) -> Any:
        return (ctypes.c_int64 * count).from_address(address)

    layers, first_row, tokens, units, first_token, table, unit_ids = (work.host[i] for i in (1, 2, 5, 6, 7, 8, 9))
    source_tokens, source_ids, size = work.host[14], work.host[15], MOVE_WORDS + 2 * (work.host[13] - BUFFER_WORDS)
    for (there, here, _), move, layer, line in itertools.product(
        _granules(work), range(tiles.first, tiles.first + tiles.moves), range(layers), range(tiles.lines)
    ):
        words = i64(table + 8 * size * move, size)
        source, target = words[MOVE_WORDS + 2 * (first_row + layer) :][:2]
        head, state = divmod(line, tiles.states)
        (unit, inside), (index, place) = divmod(there + state, source_tokens), divmod(here + state, tokens)
        if not source or (tiles.some and (index >= units or here + state < first_token)):
            continue
        mine = i64(unit_ids + 8 * index, 1)[0]
        if mine < 0:
            assert tiles.some
            continue
        theirs = i64(source_ids + 8 * unit, 1)[0]
        ctypes.memmove(
            target + mine * words[3] + place * words[4] + head * words[5],
            source + theirs * words[0] + inside * words[1] + head * words[2], tiles.line * tiles.element,
        )  # fmt: skip


def _flag(flags: int, page: int) -> ctypes.c_int32:
    return ctypes.c_int32.from_address(flags + 4 * page)


def _without_flagged_pages(work: Work) -> Work:
    """The kernel ``cells.move`` leaves flagged pages out; the torch fallback moves every page of its work list."""
    flags = work.host[10]
    if not flags:
        return work
    kept = [granule for granule in _granules(work) if not _flag(flags, granule[2]).value]
    words = [len(kept), *work.host[1:HEAD_WORDS].tolist(), *(word for granule in kept for word in granule)]
    return work._replace(host=memoryview(array("q", words)))


class SimulatedDevice:
    """``refuse``: registrations of maps fail, as on hosts whose driver cannot do it. ``triton``: Triton is installed.

    ``interpreted``: the Triton kernels run, under the interpreter.
    """

    name, reaches_host = "host", True

    def __init__(
        self, *, refuse: bool = False, triton: bool = True, interpreted: bool = False, pinned_max: int = 1 << 30
    ) -> None:
        self.constants = torch.frombuffer(bytearray(xxh3.CONSTANTS), dtype=torch.int64)
        self.refuse, self.triton, self.interpreted, self.pinned_max = refuse, triton, interpreted, pinned_max
        self.registered: dict[int, tuple[int, bool]] = {}
        self.blocks: list[SimulatedMemory] = []
        self.launches = self.copied = 0
        self.fails_at = -1  # the launch that fails
        self.before_launch: Callable[[], object] = lambda: None
        self.shared: dict[int, tuple[str, int]] = {}  # by start: file and bytes of memory that other processes may open
        self.opened: dict[int, mmap.mmap] = {}  # of peers
        self.reaches_peers = True

    def share(self, path: str, nbytes: int) -> np.ndarray:
        """Memory of this device that others may open: a file that they map."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(fd, nbytes)
        made = np.frombuffer(mmap.mmap(fd, nbytes), dtype="uint8")
        os.close(fd)
        self.shared[int(made.__array_interface__["data"][0])] = path, nbytes
        return made

    def export(self, address: int) -> tuple[bytes, int, int]:
        for start, (path, nbytes) in self.shared.items():
            if start <= address < start + nbytes:
                return path.encode().ljust(IPC_BYTES, b"\0"), start, nbytes
        raise CudaError("handle of an allocation for other processes: not supported")

    def open_peer(self, handle: bytes) -> tuple[int, int]:
        if not self.reaches_peers:
            raise CudaError("open the memory of a peer: peer access is not supported")
        with open(handle.rstrip(b"\0").decode(), "rb+") as file:
            opened = mmap.mmap(file.fileno(), 0)
        start = ctypes.addressof(ctypes.c_char.from_buffer(opened))
        self.opened[start] = opened
        return start, len(opened)

    def close_peer(self, start: int) -> None:
        del self.opened[start]

    def owns(self, memory: str) -> bool:
        return memory == "host"

    def orders(self, event: object) -> bool:
        return isinstance(event, Pending)

    def enter(self) -> None:
        pass

    def current(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def is_capturing(self) -> bool:
        return False

    def stream(self, *, urgent: bool = False) -> Stream:
        return SimulatedStream(self)

    def memory(self, nbytes: int) -> SimulatedMemory:
        self.blocks.append(SimulatedMemory(nbytes))
        return self.blocks[-1]

    def pinned(self, nbytes: int, fd: int = -1) -> Pinned:
        return Pinned(self, nbytes, fd)

    def register(self, address: int, nbytes: int, *, read_only: bool) -> None:
        if read_only and self.refuse:
            raise CudaError("register: not supported")
        if nbytes > self.pinned_max:
            raise CudaError("register: out of memory")
        for start, (length, _) in self.registered.items():
            assert address + nbytes <= start or start + length <= address, "registered twice"
        self.registered[address] = (nbytes, read_only)

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def maps(self) -> int:
        """Bytes of files that are registered."""
        return sum(nbytes for nbytes, read_only in self.registered.values() if read_only)

    def check_host(self, address: int, nbytes: int) -> None:
        inside = any(s <= address and address + nbytes <= s + n for s, (n, _) in self.registered.items())
        assert inside, f"{nbytes} bytes at {address:#x} are not pinned as one"

    def check_own(self, address: int, nbytes: int) -> None:
        inside = any(b.address <= address and address + nbytes <= b.address + b.array.nbytes for b in self.blocks)
        assert inside, f"{nbytes} bytes at {address:#x} are not the device's"
