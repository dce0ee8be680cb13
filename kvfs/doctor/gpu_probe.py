"""What the CUDA driver says, asked in a process of its own: a broken driver hangs or kills whoever calls it.

Run as a script (``python gpu_probe.py FD OFFSET NBYTES``) by ``kvfs.doctor.gpu_checks``. Imports nothing of kvfs and no
torch. Each step is told on stdout, one JSON object per line, before it is taken, so that the last line says where it
ended. FD is a file of the store, of which NBYTES bytes are registered read-only and read back through each device.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
from typing import Any

DEVICES_MAX = 16
_PORTABLE, _READ_ONLY = 1, 8
_HOST_REGISTER, _READ_ONLY_REGISTER = 99, 113  # CUdevice_attribute


class _Failed(Exception):
    """A call of the driver failed."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def tell(**what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


class _Driver:
    """The driver's functions by name; they return codes."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def __call__(self, name: str, *arguments: Any) -> None:
        function = getattr(self._library, name)
        function.restype = ctypes.c_int
        code = function(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(ctypes.c_int(code), ctypes.byref(text))
            said = (text.value or b"unknown error").decode("ascii", "replace")
            raise _Failed(code, f"{name}: error {code} ({said})")

    def number(self, name: str, *arguments: Any) -> int:
        value = ctypes.c_int()
        self(name, ctypes.byref(value), *arguments)
        return value.value


def main(fd: int, offset: int, nbytes: int) -> None:
    tell(step="load")
    try:
        driver = _Driver()
    except OSError as exc:
        tell(missing=str(exc))
        return
    try:
        tell(step="cuInit")
        driver("cuInit", 0)
        tell(version=driver.number("cuDriverGetVersion"))
        count = driver.number("cuDeviceGetCount")
        tell(count=count)
    except (_Failed, AttributeError) as exc:
        tell(failed=str(exc), code=getattr(exc, "code", 0))
        return
    for ordinal in range(min(count, DEVICES_MAX)):
        tell(step=f"device {ordinal}")
        try:
            tell(device=describe(driver, ordinal))
            tell(step=f"registration on device {ordinal}")
            read_in_place(driver, ordinal, fd, offset, nbytes)
            tell(in_place=ordinal, works=True, reason="")
        except (_Failed, AttributeError, OSError, ValueError) as exc:
            tell(in_place=ordinal, works=False, reason=str(exc), code=getattr(exc, "code", 0))
    tell(step="done")


def describe(driver: _Driver, ordinal: int) -> dict[str, Any]:
    """Name, memory and what matters for reading in place, of one device."""
    device, name, total = ctypes.c_int(), ctypes.create_string_buffer(128), ctypes.c_size_t()
    driver("cuDeviceGet", ctypes.byref(device), ordinal)
    driver("cuDeviceGetName", name, 128, device)
    driver("cuDeviceTotalMem_v2", ctypes.byref(total), device)
    bus = ctypes.create_string_buffer(32)
    driver("cuDeviceGetPCIBusId", bus, 32, device)
    return {
        "ordinal": ordinal,
        "name": name.value.decode("ascii", "replace"),
        "memory_bytes": total.value,
        "pci": bus.value.decode("ascii", "replace").lower(),
        "can_register": bool(driver.number("cuDeviceGetAttribute", _HOST_REGISTER, device)),
        "can_register_read_only": bool(driver.number("cuDeviceGetAttribute", _READ_ONLY_REGISTER, device)),
    }


def read_in_place(driver: _Driver, ordinal: int, fd: int, offset: int, nbytes: int) -> None:
    """Register a read-only map of the file and read it back through the device. Raises where that does not work."""
    device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    driver("cuDeviceGet", ctypes.byref(device), ordinal)
    driver("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    driver("cuCtxSetCurrent", context)
    mapping = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=offset)
    content = mapping[:]  # reads the pages in; a bad sector ends this process, and no other
    address = ctypes.c_void_p(address_of(mapping))
    size = ctypes.c_size_t(nbytes)
    driver("cuMemHostRegister_v2", address, size, ctypes.c_uint(_PORTABLE | _READ_ONLY))
    driver("cuMemAlloc_v2", ctypes.byref(memory), size)
    driver("cuMemcpyHtoD_v2", memory, address, size)
    back = ctypes.create_string_buffer(nbytes)
    driver("cuMemcpyDtoH_v2", back, memory, size)
    driver("cuMemFree_v2", memory)
    driver("cuMemHostUnregister", address)
    driver("cuDevicePrimaryCtxRelease_v2", device)
    if back.raw != content:
        raise ValueError("the device read other bytes")


def address_of(mapping: mmap.mmap) -> int:
    """Where a read-only map begins: ctypes takes addresses of writable buffers only."""

    class PyBuffer(ctypes.Structure):
        _fields_ = (
            ("buf", ctypes.c_void_p), ("obj", ctypes.py_object), ("len", ctypes.c_ssize_t),
            ("itemsize", ctypes.c_ssize_t), ("readonly", ctypes.c_int), ("ndim", ctypes.c_int),
            ("format", ctypes.c_char_p), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
            ("suboffsets", ctypes.c_void_p), ("internal", ctypes.c_void_p),
        )  # fmt: skip

    buffer = PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(mapping), ctypes.byref(buffer), 0)
    address = int(buffer.buf or 0)
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
    return address


if __name__ == "__main__":
    try:
        main(*(int(word) for word in sys.argv[1:4]))
    finally:
        sys.stdout.flush()
        os._exit(0)  # the driver's exit handlers may hang
