"""Pages that an engine's keys name: their chunk hashes, and where neighbours are stored, in one call for many pages."""

from __future__ import annotations

import ctypes
import struct
from typing import NamedTuple

from kvfs.native import library

HASH_BYTES, ROOT_BYTES = 32, 16
HELD_BYTES = 256 << 10  # of keys: half a millisecond, for which the interpreter is held
_ROW_BYTES = 64  # of a kvfs_row
_STRETCH = struct.Struct("<8I2Q")


class Stretch(NamedTuple):
    """Pages that are neighbours in the prompt and in a segment (kvfs_stretch)."""

    chunk: int  # the first one
    pages: int
    segment: int
    codec: int
    stored_bytes: int  # of one page
    leaves: int  # of one page
    seq: int  # record of the first page; the others follow
    step: int  # blocks from one page to the next; 0: there is one
    block: int  # of the first page
    leaf: int  # leaf table of the first page, in units of 8 bytes; the others follow. 0: there are none
    roots: bytes


def chunk_hashes(head: bytes, keys: bytes, size: int) -> bytes | None:
    """SHA-256 of ``head`` and each of ``keys``, which are of ``size`` bytes, one behind the other; None where hashlib
    has to compute them."""
    native = library.loaded()
    if native is None or not native.has_sha or not size:
        return None
    count = len(keys) // size
    out = library.new_bytes(HASH_BYTES * count)
    work = native.held if len(keys) <= HELD_BYTES else native.free
    work.kvfs_keys(head, len(head), keys, size, count, out)
    return out


def stretches(rows: bytes, values: bytes, part: int) -> list[Stretch] | None:
    """Of the rows of part number ``part`` that a walk over keys has returned; None where Python has to parse them."""
    native = library.loaded()
    if native is None:
        return None
    count = len(rows) // _ROW_BYTES
    found, roots = ctypes.create_string_buffer(_STRETCH.size * count), ctypes.create_string_buffer(ROOT_BYTES * count)
    joined = native.held.kvfs_stretches(rows, count, values, part, found, roots)
    made, at, every = list[Stretch](), 0, roots.raw
    for fields in _STRETCH.iter_unpack(found.raw[: _STRETCH.size * joined]):
        end = at + ROOT_BYTES * fields[1]
        made.append(Stretch._make((*fields, every[at:end])))
        at = end
    return made
