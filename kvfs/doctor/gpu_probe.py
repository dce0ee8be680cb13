"""Probes the CUDA driver in a process of its own: a broken driver hangs or kills its caller.

``kvfs.doctor.gpu_checks`` runs it as a script (``python gpu_probe.py FD OFFSET NBYTES``). It imports neither kvfs nor
torch. It reports each step on stdout, one JSON object per line, before it takes it, so that the last line says where it
ended. FD is a file of the store; NBYTES bytes of it are registered read-only and read back through each device. With
the arguments ``link NBYTES`` it measures copies of so many bytes between pinned memory and each device instead.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
import time
from collections.abc import Callable
from typing import Any

DEVICES_MAX = 16
LINK_ROUNDS = 5  # copies that count, after one that does not
_PATTERN = 0xA5
_PORTABLE, _READ_ONLY = 1, 8
_HOST_REGISTER, _READ_ONLY_REGISTER = 99, 113  # CUdevice_attribute


class _Failed(Exception):
    """A call of the driver failed."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def report(**what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


class _Driver:
    """Calls the driver's functions by name; raises _Failed for their error codes."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def __call__(self, name: str, *arguments: Any) -> None:
        function = getattr(self._library, name)
        function.restype = ctypes.c_int
        code = function(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(ctypes.c_int(code), ctypes.byref(text))
            described = (text.value or b"unknown error").decode("ascii", "replace")
            raise _Failed(code, f"{name}: error {code} ({described})")

    def number(self, name: str, *arguments: Any) -> int:
        value = ctypes.c_int()
        self(name, ctypes.byref(value), *arguments)
        return value.value


def main(words: list[str]) -> None:
    if words[0] == "link":
        nbytes = int(words[1])
        each_device("link of", lambda driver, ordinal: measure_link(driver, ordinal, nbytes))
    else:
        fd, offset, nbytes = map(int, words)
        each_device("registration on", lambda driver, ordinal: read_in_place(driver, ordinal, fd, offset, nbytes))


def each_device(step: str, check: Callable[[_Driver, int], dict[str, Any]]) -> None:
    """Run ``check`` on each device, and report what it returns or why it failed."""
    report(step="load")
    try:
        driver = _Driver()
    except OSError as exc:
        report(missing=str(exc))
        return
    try:
        report(step="cuInit")
        driver("cuInit", 0)
        report(version=driver.number("cuDriverGetVersion"))
        count = driver.number("cuDeviceGetCount")
        report(count=count)
    except (_Failed, AttributeError) as exc:
        report(failed=str(exc), code=getattr(exc, "code", 0))
        return
    for ordinal in range(min(count, DEVICES_MAX)):
        report(step=f"device {ordinal}")
        try:
            report(device=describe(driver, ordinal))
            report(step=f"{step} device {ordinal}")
            report(checked=ordinal, works=True, reason="", **check(driver, ordinal))
        except (_Failed, AttributeError, OSError, ValueError) as exc:
            report(checked=ordinal, works=False, reason=str(exc), code=getattr(exc, "code", 0))
    report(step="done")


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


def read_in_place(driver: _Driver, ordinal: int, fd: int, offset: int, nbytes: int) -> dict[str, Any]:
    """Register a read-only map of the file and read it back through the device. Raises where that does not work."""
    device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    driver("cuDeviceGet", ctypes.byref(device), ordinal)
    driver("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    driver("cuCtxSetCurrent", context)
    mapping = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=offset)
    content = mapping[:]  # reads the pages in; a bad sector ends this process only
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
    return {}


def measure_link(driver: _Driver, ordinal: int, nbytes: int) -> dict[str, Any]:
    """Seconds of each copy to the device and back. Raises where one fails or brings other bytes."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    memory, host, size = ctypes.c_uint64(), ctypes.c_void_p(), ctypes.c_size_t(nbytes)
    driver("cuDeviceGet", ctypes.byref(device), ordinal)
    driver("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    driver("cuCtxSetCurrent", context)
    driver("cuMemHostAlloc", ctypes.byref(host), size, ctypes.c_uint(_PORTABLE))
    driver("cuMemAlloc_v2", ctypes.byref(memory), size)
    ctypes.memset(host, _PATTERN, nbytes)
    to_device = [_timed(driver, "cuMemcpyHtoD_v2", memory, host, size) for _ in range(LINK_ROUNDS + 1)]
    ctypes.memset(host, 0, nbytes)
    to_host = [_timed(driver, "cuMemcpyDtoH_v2", host, memory, size) for _ in range(LINK_ROUNDS + 1)]
    if ctypes.string_at(host, nbytes).strip(bytes([_PATTERN])):
        raise ValueError("the device returned other bytes")
    driver("cuMemFree_v2", memory)
    driver("cuMemFreeHost", host)
    driver("cuDevicePrimaryCtxRelease_v2", device)
    return {"to_device": to_device[1:], "to_host": to_host[1:]}


def _timed(driver: _Driver, name: str, *arguments: Any) -> float:
    begin = time.perf_counter()
    driver(name, *arguments)
    driver("cuCtxSynchronize")
    return time.perf_counter() - begin


def address_of(mapping: mmap.mmap) -> int:
    """Address of a read-only map: ctypes gives addresses of writable buffers only."""

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
        main(sys.argv[1:])
    finally:
        sys.stdout.flush()
        os._exit(0)  # the driver's exit handlers may hang
