"""Checksums: XXH3-64 per leaf, XXH3-128 over the leaf table as the root of a part."""

from __future__ import annotations

import sys
from array import array
from typing import Any

import xxhash

LEAF_BYTES = 8  # one leaf's checksum in a leaf table
ROOT_BYTES = 16

checksum = xxhash.xxh3_64_intdigest
root_of = xxhash.xxh3_128_digest


def leaf_table(payload: Any, leaf_bytes: int) -> bytes:
    """XXH3-64 of each ``leaf_bytes`` bytes of ``payload``: u64, little endian, concatenated."""
    view = memoryview(payload)
    digest = xxhash.xxh3_64_digest
    # xxhash gives digests big endian; the table is little endian like everything else on disk
    packed = array("Q", b"".join([digest(view[i : i + leaf_bytes]) for i in range(0, len(view), leaf_bytes)]))
    if sys.byteorder == "little":
        packed.byteswap()
    return packed.tobytes()
