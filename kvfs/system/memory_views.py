"""The caller's memory as bytes: bytes-like objects, numpy arrays, contiguous CPU torch tensors."""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

from kvfs.errors import ConfigError


def byte_view(data: Any, what: str, *, writable: bool = False) -> memoryview:
    """The memory of ``data`` as a flat view of bytes, without a copy. ConfigError if it is not contiguous memory."""
    if type(data).__module__.partition(".")[0] == "torch" and hasattr(data, "data_ptr"):
        data = _tensor_bytes(data, what)
    try:
        view = memoryview(data)
        if view.format == "O":
            raise TypeError("references to Python objects")
    except (TypeError, ValueError, BufferError):
        raise ConfigError(
            f"{what} is {type(data).__name__}: pass a bytes-like object, a numpy array or a CPU tensor"
        ) from None
    if not view.c_contiguous:
        raise ConfigError(
            f"{what} is not contiguous: pass a contiguous copy (numpy.ascontiguousarray, tensor.contiguous())"
        )
    if writable and view.readonly:
        raise ConfigError(f"{what} is read-only: pass a writable buffer such as a bytearray")
    if not view.nbytes:
        return memoryview(bytearray())  # a view whose shape has a zero cannot be cast
    return view.cast("B") if view.format != "B" or view.ndim != 1 else view


def address_of(view: memoryview) -> int:
    """Address of a writable buffer; 0 if it is empty."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if len(view) else 0


class PageBuffers:
    """Pages of ``size`` bytes in buffers of their own, sliced as if they were one behind the other.

    A slice is within one page. ConfigError, which names ``what``, for a buffer of another size.
    """

    def __init__(self, buffers: Sequence[Any], size: int, what: str, *, writable: bool = False) -> None:
        self._size = size
        self._views: list[memoryview] = [
            byte_view(b, f"{what}, buffer {i},", writable=writable) for i, b in enumerate(buffers)
        ]
        wrong = next((i for i, view in enumerate(self._views) if len(view) != size), None)
        if wrong is not None:
            raise ConfigError(f"{what}, buffer {wrong}, has {len(self._views[wrong])} bytes: a page has {size}")

    def __len__(self) -> int:
        return self._size * len(self._views)

    def __getitem__(self, index: slice) -> memoryview:
        page, at = divmod(int(index.start), self._size)
        return self._views[page][at : at + index.stop - index.start]


class _PyBuffer(ctypes.Structure):
    """Py_buffer of the C API."""

    _fields_ = (
        ("buf", ctypes.c_void_p), ("obj", ctypes.py_object), ("len", ctypes.c_ssize_t), ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int), ("ndim", ctypes.c_int), ("format", ctypes.c_char_p), ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p), ("suboffsets", ctypes.c_void_p), ("internal", ctypes.c_void_p),
    )  # fmt: skip


def address_of_readonly(data: Any) -> int:
    """Address of a buffer that may be read-only. The caller keeps the buffer alive."""
    buffer, api = _PyBuffer(), ctypes.pythonapi
    get = partial(api.PyObject_GetBuffer, ctypes.py_object(data), ctypes.byref(buffer), 0)
    release = partial(api.PyBuffer_Release, ctypes.byref(buffer))
    # one C call: an interrupt in between would leave the buffer exported forever
    deque(map(partial.__call__, (get, release)), maxlen=0)
    return int(buffer.buf or 0)


def _tensor_bytes(tensor: Any, what: str) -> Any:
    torch = sys.modules["torch"]
    if tensor.device.type != "cpu":
        raise ConfigError(f"{what} is on {tensor.device}: attach the device (ns.attach) or copy it with .cpu()")
    if not tensor.is_contiguous():
        raise ConfigError(f"{what} is not contiguous: pass tensor.contiguous()")
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    try:
        return flat.numpy()
    except RuntimeError:  # torch without numpy
        return (ctypes.c_char * flat.numel()).from_address(flat.data_ptr())
