"""The hash chain of a prompt in one call, where the CPU has SHA-256 instructions."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from kvfs.native import library

HASH_BYTES = 32
#: Of tokens, hashed in one call that holds the interpreter: half a millisecond.
HELD_BYTES = 256 << 10
#: Calls that hold the interpreter, for one prompt. A longer prompt is hashed with it released: to get it back takes
#: 5 ms for each thread that wants it, which is then the smaller part.
HELD_CALLS = 2
_CHUNK_BYTES = 64  # what a shorter chunk costs
_EXTRA = struct.Struct("<QQQ")


def chain(tokens: bytes, step: int, seed: bytes, extra: Mapping[int, bytes] | None) -> bytes | None:
    """Hashes of the chunks of ``step`` bytes, one behind the other; None where hashlib is not slower.

    ``seed``: the parent of the first chunk, of any length.
    """
    native = library.loaded()
    if native is None or not native.has_sha:
        return None
    chunks = len(tokens) // step
    entries, keys = b"", b""
    if extra:
        used = sorted(chunk for chunk in extra if 0 <= chunk < chunks)
        at = [0]
        for chunk in used:
            at.append(at[-1] + len(extra[chunk]))
        entries = b"".join(_EXTRA.pack(chunk, at[i], len(extra[chunk])) for i, chunk in enumerate(used))
        keys = b"".join(extra[chunk] for chunk in used)
    out = library.new_bytes(HASH_BYTES * chunks)
    some = max(1, HELD_BYTES // max(step, _CHUNK_BYTES))
    work, count = (
        (native.held, some)
        if len(keys) <= HELD_BYTES and chunks <= HELD_CALLS * some
        else (native.free, max(1, chunks))
    )
    for first in range(0, chunks, count):
        end = min(chunks, first + count)
        work.kvfs_chain(tokens, first, end, step, seed, len(seed), entries, len(entries) // _EXTRA.size, keys, out)
    return out
