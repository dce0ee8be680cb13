"""Loads the compiled library, if there is one that fits and the user has not switched it off.

``KVFS_NATIVE=0`` in the environment switches it off. A checkout has it after ``python -m tools.build_native``, an
installed package if a C compiler was there when it was built. Everything works without it, slower.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Iterator
from ctypes import POINTER, c_char_p, c_int, c_int32, c_int64, c_uint32, c_uint64, c_void_p

ABI = 10  # of native/kvfs_native.h
NAME = "_kvfs_native.so"
SWITCHED_OFF = "off: KVFS_NATIVE=0"  # a ``state``
FEATURE_SHA = 1  # of the CPU: its own SHA-256 instructions
PREFIX_MAX, PARTS_MAX, CELLS_MAX, RUNS_MAX, ROWS_MAX, SEGMENTS_MAX, KEYS_MAX = 128, 64, 256, 256, 512, 4096, 1024


MOVED = -4096


class Stamp(ctypes.Structure):
    """kvfs_stamp."""

    _fields_ = (("device", c_uint64), ("inode", c_uint64), ("mtime_ns", c_int64), ("ctime_ns", c_int64))


class Descriptors(ctypes.Structure):
    """kvfs_descriptors."""

    _fields_ = tuple((name, c_int) for name in ("file", "data"))


class Lookup(ctypes.Structure):
    """kvfs_lookup."""

    _fields_ = (
        ("hashes", c_char_p), ("chunks", c_uint64), ("run_length", c_uint64), ("prefix", c_char_p),
        ("prefix_bytes", c_uint64), ("parts", c_char_p), ("n_parts", c_uint64), ("cells", c_char_p),
        ("n_cells", c_uint64), ("first_is_enough", c_uint64), ("now_s", c_uint64), ("known_txn", c_uint64),
    )  # fmt: skip


class Walked(ctypes.Structure):
    """kvfs_walked."""

    _fields_ = (
        ("rows", c_void_p), ("values", c_void_p), ("values_bytes", c_uint64), ("segments", c_void_p),
        ("covered", c_void_p), ("claimed", c_void_p), ("n_rows", c_uint64), ("n_segments", c_uint64),
        ("n_values", c_uint64), ("end", c_uint64), ("rows_read", c_uint64), ("txn", c_uint64),
    )  # fmt: skip


class Prefixes(ctypes.Structure):
    """kvfs_prefixes."""

    _fields_ = (
        ("entries", c_void_p), ("buckets", c_uint64), ("entry_bytes", c_uint64), ("n_units", c_uint64),
        ("n_leaves", c_uint64), ("per_unit", c_uint64),
    )  # fmt: skip


HeadWords = c_int64 * 16  # of a work list: KVFS_HEAD_WORDS


class PullPages(ctypes.Structure):
    """kvfs_pull."""

    _fields_ = (
        ("states", c_uint64), ("granules", c_uint64), ("step", c_uint64), ("units_max", c_uint64),
        ("head", HeadWords),
    )  # fmt: skip


class LeaseSlots(ctypes.Structure):
    """kvfs_leases."""

    _fields_ = (("slots", c_void_p), ("n_slots", c_uint64), ("slot_bytes", c_uint64))


_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.restype, _new_bytes.argtypes = ctypes.py_object, (c_char_p, ctypes.c_ssize_t)

_FUNCTIONS: dict[str, tuple[object, tuple[object, ...]]] = {
    "kvfs_abi": (c_uint32, ()),
    "kvfs_features": (c_uint32, ()),
    "kvfs_portable": (None, (c_int,)),
    "kvfs_chain": (
        None, (c_char_p, c_uint64, c_uint64, c_uint64, c_char_p, c_uint64, c_char_p, c_uint64, c_char_p, c_void_p),
    ),
    "kvfs_keys": (None, (c_char_p, c_uint64, c_char_p, c_uint64, c_uint64, c_void_p)),
    "kvfs_blake2b": (None, (c_char_p, c_uint64, c_void_p)),
    "kvfs_xxh3_64": (c_uint64, (c_char_p, c_uint64, c_uint64)),
    "kvfs_xxh3_128": (None, (c_char_p, c_uint64, c_void_p)),
    "kvfs_index_bytes": (c_uint64, ()),
    "kvfs_index_open": (c_int64, (c_void_p, POINTER(Descriptors), POINTER(Stamp))),
    "kvfs_index_close": (None, (c_void_p,)),
    "kvfs_walk": (c_int64, (c_void_p, POINTER(Lookup), c_uint64, c_uint64, c_uint64, c_int, POINTER(Walked))),
    "kvfs_there": (c_int64, (c_void_p, POINTER(Lookup), c_uint64, c_uint64, c_uint64, c_void_p)),
    "kvfs_parts": (c_int64, (c_void_p, c_char_p, c_uint64, c_void_p, c_uint64, POINTER(c_uint64))),
    "kvfs_stretches": (c_uint64, (c_char_p, c_uint64, c_char_p, c_uint32, c_void_p, c_void_p)),
    "kvfs_is_row": (c_int, (c_char_p, c_char_p, c_uint64)),
    "kvfs_files_bytes": (c_uint64, ()),
    "kvfs_files_init": (None, (c_void_p,)),
    "kvfs_hold": (c_uint64, (c_void_p, c_int, c_char_p, c_uint64, c_void_p)),
    "kvfs_release": (c_uint64, (c_void_p, c_void_p, c_uint64)),
    "kvfs_close": (None, (c_void_p, c_uint64)),
    "kvfs_file": (c_int, (c_void_p, c_int32)),
    "kvfs_files_open": (c_uint64, (c_void_p,)),
    "kvfs_files_abandon": (None, (c_void_p,)),
    "kvfs_read": (
        c_int64,
        (c_char_p, c_uint64, c_uint64, c_uint64, c_void_p, c_void_p, POINTER(c_uint64), c_void_p, c_uint64),
    ),
    "kvfs_copy": (
        c_int64,
        (
            c_char_p, c_uint64, c_uint64, c_uint64, c_void_p, c_void_p, POINTER(c_uint64), c_char_p, c_uint64, c_int,
            c_uint64,
        ),
    ),
    "kvfs_roots": (None, (c_char_p, c_uint64, c_uint64, c_void_p)),
    "kvfs_sum": (None, (c_void_p, c_uint64, c_uint64, c_void_p)),
    "kvfs_sum_records": (None, (c_char_p, c_uint64)),
    "kvfs_append": (c_int64, (c_char_p, c_uint64, c_int, c_char_p, c_uint64, c_int64, c_uint64)),
    "kvfs_cells": (None, (c_char_p, c_char_p, c_uint64, c_char_p, c_uint64, c_void_p, c_int)),
    "kvfs_load": (
        c_int64, (c_char_p, c_uint64, c_char_p, c_uint64, c_void_p, POINTER(c_uint64), POINTER(c_uint32), c_uint64),
    ),
    "kvfs_write": (c_int64, (c_int, c_char_p, c_uint64, c_int64, c_uint64, c_uint64)),
    "kvfs_entry_bytes": (c_uint64, (c_uint64, c_uint64)),
    "kvfs_publish": (
        None, (POINTER(Prefixes), c_void_p, c_char_p, c_void_p, c_void_p, c_char_p, c_uint64, c_uint64),
    ),
    "kvfs_retract": (c_uint64, (POINTER(Prefixes), c_void_p, c_void_p, c_uint64, c_void_p)),
    "kvfs_held": (c_uint64, (POINTER(Prefixes), c_char_p, c_uint64, c_uint64, c_void_p, c_void_p)),
    "kvfs_pull_list": (
        c_uint64,
        (
            POINTER(Prefixes), POINTER(PullPages), c_void_p, c_void_p, c_void_p, c_uint64, c_uint64, c_void_p, c_void_p,
            c_void_p, c_void_p,
        ),
    ),
    "kvfs_unchanged": (c_uint64, (POINTER(Prefixes), c_void_p, c_void_p, c_void_p, c_uint64, c_void_p)),
    "kvfs_lease": (c_int64, (POINTER(LeaseSlots), c_uint64, c_uint64)),
    "kvfs_lease_entries": (None, (POINTER(LeaseSlots), c_uint64, c_uint64, c_void_p, c_uint64)),
    "kvfs_end_lease": (None, (POINTER(LeaseSlots), c_uint64, c_uint64)),
    "kvfs_leased": (c_uint64, (POINTER(LeaseSlots), c_uint64, c_void_p, c_uint64, c_void_p)),
}  # fmt: skip


class Library:
    """The functions of native/kvfs_native.h: of ``held`` with the interpreter held, of ``free`` with it released."""

    def __init__(self, path: str) -> None:
        """OSError if it cannot be loaded; ValueError if it is of another version."""
        self.path = path
        self.held, self.free = ctypes.PyDLL(path), ctypes.CDLL(path)
        try:
            self.held.kvfs_abi.restype = c_uint32
            found = self.held.kvfs_abi()
            if found != ABI:
                raise ValueError(f"{path} has version {found} of the interface, this package needs {ABI}")
            for name, (result, arguments) in _FUNCTIONS.items():
                for side in (self.held, self.free):
                    function = getattr(side, name)
                    function.restype, function.argtypes = result, arguments
        except AttributeError as exc:
            raise ValueError(f"{path}: {exc}") from None
        self.has_sha = bool(self.held.kvfs_features() & FEATURE_SHA)


@functools.cache
def _load() -> tuple[Library | None, str]:
    if os.environ.get("KVFS_NATIVE", "1") == "0":
        return None, SWITCHED_OFF
    if sys.byteorder != "little" or ctypes.sizeof(c_void_p) != 8:
        return None, "off: for 64-bit little-endian machines only"
    path = os.path.join(os.path.dirname(__file__), NAME)
    if not os.path.exists(path):
        return None, "off: not built"
    try:
        return Library(path), "on"
    except (OSError, ValueError) as exc:
        return None, f"off: {exc}"


def new_bytes(nbytes: int) -> bytes:
    """Bytes for a function to fill before any other code sees them: no copy of a buffer."""
    made: bytes = _new_bytes(None, nbytes)
    return made


_paused = False


def loaded() -> Library | None:
    """The library; None where Python does its work."""
    return None if _paused else _load()[0]


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """For tests and benchmarks: Python does everything in the block, in all threads."""
    global _paused
    _paused, before = True, _paused
    try:
        yield
    finally:
        _paused = before


def state() -> str:
    """``on``, or ``off:`` and why."""
    return _load()[1]
