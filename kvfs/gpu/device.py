"""One GPU as the transports use it: streams, events, scratch, pinned memory, copies, kernels.

``Gpu`` is the real one, through torch and ``kvfs.kernels.driver``. Tests use a class with the same methods over host
memory instead (``tests/gpu/simulated.py``).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

from kvfs.errors import ConfigError
from kvfs.kernels import driver, torch_fallback
from kvfs.kernels.driver import CudaError
from kvfs.kernels.launch import Launch, launch_of
from kvfs.kernels.moves import Tiles
from kvfs.kernels.work_list import Shape, Work

#: Programs per kernel. A few would keep up with the link; many, for a shorter time, cost other work on the GPU less.
COPY_PROGRAMS, SUM_PROGRAMS = 128, 64
OUT_PROGRAMS, IN_PROGRAMS = 4, 16  # of gentle copies: to the host at 51 GB/s, from it at 49
UNIT_SUM_PROGRAMS = 132  # one for each multiprocessor of an H100: pulls wait for them
QUICK_PROGRAMS = 264  # two for each multiprocessor of an H100: sums at 2,240 GB/s in place of 860
COPY_TILE_BYTES = 32 << 10  # tiles of at least this size are faster with fewer warps
PR_SET_TIMERSLACK, TIMER_SLACK_NS = 29, 1000


def copy_warps(shape: Shape) -> int:
    return 4 if shape.tile_bytes >= COPY_TILE_BYTES else 8


class Event(Protocol):
    """A point in a stream, reached when all work before it has been done."""

    def query(self) -> bool: ...


class Stream(Protocol):
    """Work in order. Host addresses must be pinned or registered; nothing here waits. Launch kernels in ``use``."""

    def copy_in(self, target: int, source: int, nbytes: int) -> None: ...

    def push(self, target: int, source: int, nbytes: int) -> None:
        """Copy a few bytes of pageable memory in; it may change as soon as this returns."""

    def copy_in_2d(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int
    ) -> None: ...

    def copy_out(self, target: int, source: int, nbytes: int) -> None: ...

    def copy_pieces(self, work: Work, *, programs: int) -> None:
        """Copy what a list names (``work_list.pack_pieces``) by a kernel: copies of other streams do not wait."""

    def use(self) -> AbstractContextManager[object]:
        """Inside, this thread launches kernels on it."""

    def event(self) -> Event:
        """An event for ``record``, which may be recorded again and again."""

    def synchronize(self) -> None:
        """Wait for all that it has been given so far; the thread sleeps."""

    def record(self, event: Event | None = None) -> Event: ...

    def after(self, event: Event) -> None: ...

    def gather(self, work: Work, shape: Shape) -> None:
        """Copy cells of the engine to pages; if ``shape.sums``, sum their leaves then."""

    def scatter(self, work: Work, shape: Shape, *, check: bool, quick: bool = False) -> None:
        """Copy cells of pages without flags to the engine; ``check`` sums the leaves first, and flags bad pages.

        ``quick``: with all of the GPU, where something waits for it and nothing else is under way.
        """

    def pull(self, work: Work, tiles: Sequence[Tiles]) -> None:
        """Copy cells of a peer into units (``kvfs.kernels.pull``)."""

    def sum_units(self, work: Work, shape: Shape, *, check: bool, quick: bool = False) -> None:
        """Sum the leaves of cells in units, and flag bad pages (``check``) or write the sums. ``quick`` as above."""


class Memory(Protocol):
    """Memory of the device."""

    address: int

    def words(self, offset: int) -> Any:
        """From byte ``offset`` on, in the form that kernels take."""


class Device(Protocol):
    """A GPU."""

    name: str
    reaches_host: bool  # its kernels read and write registered memory of the host at the host's addresses

    def enter(self) -> None:
        """Make it current on the calling thread, one of kvfs's own, permanently."""

    def current(self) -> AbstractContextManager[object]:
        """Make it current on the calling thread, any thread, inside."""

    def is_capturing(self) -> bool:
        """Whether the calling thread captures a graph: most calls would end that."""

    def stream(self, *, urgent: bool = False) -> Stream:
        """``urgent``: its kernels begin before those of other streams that wait for room on the GPU."""

    def memory(self, nbytes: int) -> Memory: ...

    def pinned(self, nbytes: int, fd: int = -1) -> Pinned: ...

    def register(self, address: int, nbytes: int, *, read_only: bool) -> None: ...

    def unregister(self, address: int) -> None: ...

    def export(self, address: int) -> tuple[bytes, int, int]:
        """(handle for other processes, start, bytes) of the allocation that contains ``address``. CudaError."""

    def open_peer(self, handle: bytes) -> tuple[int, int]:
        """(start, bytes) here of an allocation that another process has exported. CudaError if it cannot be reached."""

    def close_peer(self, start: int) -> None: ...

    def owns(self, memory: str) -> bool:
        """Whether buffers with this ``KVBuffer.memory`` are its own."""

    def orders(self, event: object) -> bool:
        """Whether its streams can wait for what an engine passes as ``after``."""


#: Maps of pinned memory. A forked child does not have these addresses (MADV_DONTFORK), so it must never unmap them:
#: it may have mapped something else there.
_MAPS: set[mmap.mmap] = set()


def _wake_soon() -> None:
    """Shorten the calling thread's short sleeps: by default Linux adds up to 50 us to each."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(TIMER_SLACK_NS), 0, 0, 0)


class Pinned:
    """Host memory for DMA: not inherited by children, pinned until ``close``.

    Anonymous, or the memory behind ``fd``, which other processes may map too and which is at least that large.
    """

    def __init__(self, device: Device, nbytes: int, fd: int = -1) -> None:
        self.nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._device = device
        self._pid = os.getpid()
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if fd < 0 else mmap.MAP_SHARED
        self._map = mmap.mmap(fd, self.nbytes, flags=flags)
        self._map.madvise(mmap.MADV_DONTFORK)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        _MAPS.add(self._map)  # before: an interrupt may come once the driver has registered it
        try:
            device.register(self.address, self.nbytes, read_only=False)
        except CudaError:
            _MAPS.discard(self._map)
            raise
        except BaseException:
            with contextlib.suppress(CudaError):
                self.close()
            raise
        self.view = memoryview(self._map)

    def close(self) -> None:
        """Unpin. No copy may be under way; views that are left keep the memory, not the pinning.

        CudaError if the driver keeps the registration. Then the map stays: new memory at its address would count as
        registered.
        """
        if self._map in _MAPS and self._pid == os.getpid():
            self._device.unregister(self.address)
            self._map.madvise(mmap.MADV_DOFORK)  # from now on a child has a map of its own to unmap
            _MAPS.discard(self._map)


class _Stream:
    """A CUDA stream. The calling thread has entered its device.

    torch deals its streams out of a pool of 32 again and again, so one of them may be a stream of the engine: kvfs
    would wait for the engine's work, and what kvfs enqueues would end the capture of a graph there. This one is made by
    the driver.
    """

    def __init__(self, torch: Any, index: int, priority: int, constants: Any) -> None:
        self._torch, self._constants = torch, constants
        self._handle = driver.make_stream(priority)
        weakref.finalize(self, _end_stream, self._handle, os.getpid()).atexit = False
        self._stream = torch.cuda.ExternalStream(self._handle, torch.device("cuda", index))
        self._launches: dict[object, Launch | None] = {}  # None: only Triton can

    def copy_in(self, target: int, source: int, nbytes: int) -> None:
        driver.copy_in(target, source, nbytes, self._handle)

    push = copy_in

    def copy_in_2d(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int
    ) -> None:
        driver.copy_in_2d(target, target_pitch, source, source_pitch, width, height, self._handle)

    def copy_out(self, target: int, source: int, nbytes: int) -> None:
        driver.copy_out(target, source, nbytes, self._handle)

    def use(self) -> AbstractContextManager[object]:
        return self._torch.cuda.stream(self._stream)  # type: ignore[no-any-return]

    def event(self) -> Event:
        """Not a blocking one: the driver takes 56 of those ahead, then calls wait for the GPU, some with the GIL."""
        return self._torch.cuda.Event()  # type: ignore[no-any-return]

    def synchronize(self) -> None:
        self.record(self._torch.cuda.Event(blocking=True)).synchronize()  # type: ignore[attr-defined]

    def record(self, event: Any = None) -> Event:
        event = event or self.event()
        event.record(self._stream)
        return event  # type: ignore[no-any-return]

    def after(self, event: Event) -> None:
        self._stream.wait_event(event)

    def gather(self, work: Work, shape: Shape) -> None:
        self._move(work, shape, to_page=True)
        if shape.sums:
            self._sum(work, shape, check=False)

    def scatter(self, work: Work, shape: Shape, *, check: bool, quick: bool = False) -> None:
        if check:
            self._sum(work, shape, check=True, programs=QUICK_PROGRAMS if quick else SUM_PROGRAMS)
        self._move(work, shape, to_page=False, programs=QUICK_PROGRAMS if quick else COPY_PROGRAMS)

    def _move(self, work: Work, shape: Shape, *, to_page: bool, programs: int = COPY_PROGRAMS) -> None:
        if not shape.kernels:
            torch_fallback.move(work, shape, self._elements, to_page=to_page)
            return
        from kvfs.kernels import cells

        kernel = (to_page, programs, shape.buffers, shape.states, shape.rows, shape.cols, shape.element)
        warps = copy_warps(shape)
        self._launch(
            kernel, lambda: cells.move(work.words, shape, to_page=to_page, programs=programs, warps=warps),
            programs, work.address,
        )  # fmt: skip

    def copy_pieces(self, work: Work, *, programs: int) -> None:
        from kvfs.kernels import pieces

        self._launch(
            ("pieces", programs), lambda: pieces.copy_pieces(work.words, programs=programs), programs, work.address
        )

    def pull(self, work: Work, tiles: Sequence[Tiles]) -> None:
        from kvfs.kernels import pull

        for cut in tiles:
            self._launch(
                ("pull", cut),
                partial(pull.copy, work.words, cut, programs=pull.PROGRAMS, warps=pull.WARPS),
                pull.PROGRAMS, work.address,
            )  # fmt: skip

    def sum_units(self, work: Work, shape: Shape, *, check: bool, quick: bool = False) -> None:
        from kvfs.kernels import unit_sums

        programs = QUICK_PROGRAMS if quick else UNIT_SUM_PROGRAMS if check else SUM_PROGRAMS
        one_unit = shape.unit_tokens % shape.states == 0
        kernel = ("units", check, programs, shape.buffers, shape.states, shape.cell_bytes, shape.element, one_unit)
        self._launch(
            kernel,
            lambda: unit_sums.leaves(work.words, self._constants, shape, check=check, programs=programs),
            programs, work.address, self._constants.data_ptr(),
        )  # fmt: skip

    def _sum(self, work: Work, shape: Shape, *, check: bool, programs: int = SUM_PROGRAMS) -> None:
        from kvfs.kernels import xxh3

        self._launch(
            (check, programs, shape.aligned),
            lambda: xxh3.leaves(work.words, self._constants, shape, check=check, programs=programs),
            programs, work.address, self._constants.data_ptr(),
        )  # fmt: skip

    def _launch(self, kernel: object, by_triton: Callable[[], Any], programs: int, *addresses: int) -> None:
        """``kernel``: key of what Triton compiles. Once it is compiled the driver launches it, if it can."""
        launch = self._launches.get(kernel)
        if launch is not None:
            launch(*addresses)
            return
        with self.use():
            made = by_triton()
        if kernel not in self._launches:
            self._launches[kernel] = launch_of(made, len(addresses), programs, self._handle)

    def _elements(self, address: int, elements: int, element: int) -> Any:
        return self._torch.as_tensor(_Raw(address, elements, element), device=self._stream.device)


def _end_stream(handle: int, pid: int) -> None:
    if pid == os.getpid():  # a child that was forked has no context
        with contextlib.suppress(CudaError):
            driver.end_stream(handle)


class _Raw:
    """Device memory as other libraries describe it to torch (CUDA Array Interface, version 2)."""

    def __init__(self, address: int, elements: int, element: int) -> None:
        kind = f"<i{element}" if element > 1 else "|i1"
        self.__cuda_array_interface__ = {"shape": (elements,), "typestr": kind, "data": (address, False), "version": 2}


class _Memory:
    def __init__(self, tensor: Any, int64: Any) -> None:
        self._tensor, self._int64 = tensor, int64
        self.address = int(tensor.data_ptr())

    def words(self, offset: int) -> Any:
        return self._tensor[offset:].view(self._int64)


class Gpu:
    """A CUDA device. ConfigError if it is not there, or lacks what kvfs needs."""

    def __init__(self, name: str) -> None:
        try:
            import torch
        except ImportError as exc:
            raise ConfigError(f"memory on {name} needs torch ({exc}): pip install 'kvfs[gpu]'") from None
        index = int(name.partition(":")[2])
        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            found = torch.cuda.device_count() if torch.cuda.is_available() else 0
            raise ConfigError(f"memory is on {name}: torch sees {found} CUDA devices here")
        self.name, self.index, self._torch = name, index, torch
        self._entered = threading.local()
        self.reaches_host = driver.reaches_host(index)
        self._constants = None
        with contextlib.suppress(ImportError):  # without triton nothing asks for them
            from kvfs.kernels import xxh3

            self._constants = torch.frombuffer(bytearray(xxh3.CONSTANTS), dtype=torch.int64).to(name)

    def owns(self, memory: str) -> bool:
        return memory == self.name

    def orders(self, event: object) -> bool:
        return isinstance(event, self._torch.cuda.Event)

    def export(self, address: int) -> tuple[bytes, int, int]:
        start, nbytes = driver.allocation_of(address)
        return driver.export(start), start, nbytes

    def open_peer(self, handle: bytes) -> tuple[int, int]:
        return driver.allocation_of(driver.open_peer(handle))

    def close_peer(self, start: int) -> None:
        driver.close_peer(start)

    def enter(self) -> None:
        if not getattr(self._entered, "done", False):
            self._torch.cuda.set_device(self.index)
            driver.relax_capture()
            self._torch.cuda.current_stream().query()  # makes the context current where this is a thread's first call
            _wake_soon()
            self._entered.done = True

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        with self._torch.cuda.device(self.index):
            mode = driver.relax_capture()
            try:
                self._torch.cuda.current_stream().query()
                yield
            finally:
                driver.restore_capture(mode)

    def is_capturing(self) -> bool:
        return bool(self._torch.cuda.is_current_stream_capturing())

    def stream(self, *, urgent: bool = False) -> Stream:
        with self.current():
            return _Stream(self._torch, self.index, -urgent, self._constants)

    def memory(self, nbytes: int) -> Memory:
        torch = self._torch
        tensor = torch.empty(-(-nbytes // 8) * 8, dtype=torch.uint8, device=self.name)
        # torch's cache may return memory that work queued on this stream still uses; other streams must wait for that
        torch.cuda.current_stream(self.index).synchronize()
        return _Memory(tensor, torch.int64)

    def pinned(self, nbytes: int, fd: int = -1) -> Pinned:
        return Pinned(self, nbytes, fd)

    def register(self, address: int, nbytes: int, *, read_only: bool) -> None:
        driver.register(address, nbytes, read_only=read_only)

    def unregister(self, address: int) -> None:
        driver.unregister(address)
