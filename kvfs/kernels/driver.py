"""The few calls of the CUDA driver that torch does not offer: host registration, copies from raw addresses, launches.

Copies are asynchronous and need pinned memory on the host's side; their calls take microseconds and keep the GIL, so
that a busy Python thread cannot come between two of them. The driver's functions report errors by value, so a failed
call leaves no state that a later call would find. A context must be current on the calling thread
(``torch.cuda.set_device``).
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

_PORTABLE, _READ_ONLY = 1, 8
_HOST, _DEVICE = 1, 2  # CUmemorytype
_RELAXED = 2  # CUstreamCaptureMode
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: it does not wait for the default stream
IPC_BYTES = 64  # of a CUipcMemHandle
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_REACHES_HOST = (91, 113)  # CUdevice_attribute: registered memory has one address; it may be read-only
_ENDED = (4, 709)  # CUresult: driver shut down, or context destroyed
_NOT_REGISTERED = (*_ENDED, 713)  # or memory not registered

_Pointer, _Size, _Device, _Stream = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_void_p


class CudaError(OSError):
    """A call of the driver failed."""


class _Copy2D(ctypes.Structure):
    _fields_ = (
        ("src_x", _Size), ("src_y", _Size), ("src_type", ctypes.c_int), ("src_host", _Pointer),
        ("src_device", _Device), ("src_array", _Pointer), ("src_pitch", _Size),
        ("dst_x", _Size), ("dst_y", _Size), ("dst_type", ctypes.c_int), ("dst_host", _Pointer),
        ("dst_device", _Device), ("dst_array", _Pointer), ("dst_pitch", _Size),
        ("width", _Size), ("height", _Size),
    )  # fmt: skip


class _IpcHandle(ctypes.Structure):
    _fields_ = (("raw", ctypes.c_ubyte * IPC_BYTES),)


class _Driver:
    def __init__(self) -> None:
        slow, quick = ctypes.CDLL("libcuda.so.1"), ctypes.PyDLL("libcuda.so.1")
        self.register = _typed(slow.cuMemHostRegister_v2, _Pointer, _Size, ctypes.c_uint)
        self.unregister = _typed(slow.cuMemHostUnregister, _Pointer)
        self.error_string = _typed(slow.cuGetErrorString, ctypes.c_int, _Pointer)
        self.capture_mode = _typed(quick.cuThreadExchangeStreamCaptureMode, _Pointer)
        self.copy_in = _typed(quick.cuMemcpyHtoDAsync_v2, _Device, _Pointer, _Size, _Stream)
        self.copy_out = _typed(quick.cuMemcpyDtoHAsync_v2, _Pointer, _Device, _Size, _Stream)
        self.copy_2d = _typed(quick.cuMemcpy2DAsync_v2, _Pointer, _Stream)
        self.stream_make = _typed(slow.cuStreamCreateWithPriority, _Pointer, ctypes.c_uint, ctypes.c_int)
        self.stream_end = _typed(slow.cuStreamDestroy_v2, _Stream)
        self.attribute = _typed(slow.cuDeviceGetAttribute, _Pointer, ctypes.c_int, ctypes.c_int)
        self.device = _typed(slow.cuDeviceGet, _Pointer, ctypes.c_int)
        self.range_of = _typed(slow.cuMemGetAddressRange_v2, _Pointer, _Pointer, _Device)
        self.ipc_get = _typed(slow.cuIpcGetMemHandle, _Pointer, _Device)
        self.ipc_open = _typed(slow.cuIpcOpenMemHandle_v2, _Pointer, _IpcHandle, ctypes.c_uint)
        self.ipc_close = _typed(slow.cuIpcCloseMemHandle, _Device)
        size = ctypes.c_uint
        self.launch = _typed(
            quick.cuLaunchKernel, _Pointer, size, size, size, size, size, size, size, _Stream, _Pointer, _Pointer
        )

    def check(self, code: int, what: str) -> None:
        if code:
            text = ctypes.c_char_p()
            self.error_string(code, ctypes.byref(text))
            raise CudaError(f"{what}: CUDA error {code} ({(text.value or b'unknown').decode()})")


def _typed(function: ctypes._NamedFuncPointer, *types: type) -> ctypes._NamedFuncPointer:
    function.argtypes, function.restype = types, ctypes.c_int
    return function


@functools.cache
def _driver() -> _Driver:
    try:
        return _Driver()
    except (OSError, AttributeError) as exc:
        raise CudaError(f"no usable CUDA driver: {exc}") from None


def register(address: int, nbytes: int, *, read_only: bool) -> None:
    """Pin host memory for DMA, in whole pages; ``read_only`` also allows read-only shared maps of files."""
    flags = _PORTABLE | (_READ_ONLY if read_only else 0)
    _driver().check(_driver().register(address, nbytes, flags), f"register {nbytes} bytes")


def unregister(address: int) -> None:
    """Unpin what was registered from ``address`` on. CudaError if the driver keeps it registered."""
    code = _driver().unregister(address)
    if code not in _NOT_REGISTERED:
        _driver().check(code, "unregister")


def reaches_host(index: int) -> bool:
    """Whether kernels of a device can use registered memory, read-only maps included, at the host's addresses."""
    device, value = ctypes.c_int(), ctypes.c_int()
    _driver().check(_driver().device(ctypes.byref(device), index), f"device {index}")
    for attribute in _REACHES_HOST:
        code = _driver().attribute(ctypes.byref(value), attribute, device)
        if code or not value.value:
            return False
    return True


def make_stream(priority: int) -> int:
    """The handle of a new stream in the current context. A lower priority is more urgent; the usual one is 0."""
    handle = ctypes.c_void_p()
    _driver().check(_driver().stream_make(ctypes.byref(handle), _NON_BLOCKING, priority), "make a stream")
    assert handle.value is not None
    return handle.value


def end_stream(handle: int) -> None:
    """The driver frees it once its work is done."""
    code = _driver().stream_end(handle)
    if code not in _ENDED:
        _driver().check(code, "end a stream")


def allocation_of(address: int) -> tuple[int, int]:
    """(start, bytes) of the allocation of a device, or of an opened peer, that contains ``address``."""
    start, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
    code = _driver().range_of(ctypes.byref(start), ctypes.byref(nbytes), address)
    _driver().check(code, f"allocation of {address:#x}")
    return start.value, nbytes.value


def export(start: int) -> bytes:
    """A handle with which other processes of the host open the allocation that begins at ``start``.

    CudaError for memory of a virtual address range (expandable segments, sleep mode), which has none.
    """
    handle = _IpcHandle()
    _driver().check(_driver().ipc_get(ctypes.byref(handle), start), "handle of an allocation for other processes")
    return bytes(handle.raw)


def open_peer(handle: bytes) -> int:
    """Map an allocation of another process into the current context; its address here. Takes some 10 ms.

    The memory stays mapped when its process ends. CudaError where the two devices cannot reach each other.
    """
    given, address = _IpcHandle.from_buffer_copy(handle), ctypes.c_uint64()
    code = _driver().ipc_open(ctypes.byref(address), given, _LAZY_PEER_ACCESS)
    _driver().check(code, "open the memory of a peer")
    return address.value


def close_peer(address: int) -> None:
    """Unmap what ``open_peer`` mapped; once for each time that it was opened."""
    _driver().check(_driver().ipc_close(address), "close the memory of a peer")


def relax_capture() -> int:
    """Let the calling thread's calls neither end the capture of a graph in another thread, nor fail because of it.

    By default registering and querying do both. Returns the argument of ``restore_capture``.
    """
    return _capture_mode(_RELAXED)


def restore_capture(mode: int) -> None:
    _capture_mode(mode)


def _capture_mode(mode: int) -> int:
    value = ctypes.c_int(mode)
    _driver().check(_driver().capture_mode(ctypes.byref(value)), "capture mode")
    return value.value


def copy_in(target: int, source: int, nbytes: int, stream: int) -> None:
    """Host to device, in stream order. Pageable memory is read before this returns."""
    code = _driver().copy_in(target, source, nbytes, stream)
    if code:
        _driver().check(code, f"copy of {nbytes} bytes to the device")


def copy_out(target: int, source: int, nbytes: int, stream: int) -> None:
    """Device to host, in stream order."""
    code = _driver().copy_out(target, source, nbytes, stream)
    if code:
        _driver().check(code, f"copy of {nbytes} bytes to the host")


def copy_in_2d(
    target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int, stream: int
) -> None:
    """``height`` rows of ``width`` bytes, each a pitch behind the last, host to device, in stream order."""
    copy = _Copy2D(
        src_type=_HOST, src_host=source, src_pitch=source_pitch, dst_type=_DEVICE, dst_device=target,
        dst_pitch=target_pitch, width=width, height=height,
    )  # fmt: skip
    code = _driver().copy_2d(ctypes.byref(copy), stream)
    if code:
        _driver().check(code, f"copy of {height} x {width} bytes to the device")


def launch(function: int, programs: int, threads: int, shared: int, stream: int, parameters: ctypes.Array[Any]) -> None:
    """``programs`` blocks of ``threads``, with ``shared`` bytes of shared memory. ``parameters``: their addresses."""
    code = _driver().launch(function, programs, 1, 1, threads, 1, 1, shared, stream, parameters, None)
    if code:
        _driver().check(code, f"launch of {programs} x {threads} threads")
