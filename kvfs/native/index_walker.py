"""One generation of an index, read by the compiled library in the caller's thread.

Each call reads as of one commit, takes no lock, and never waits for a disk. Where it would have to, it raises
HandOverError, and the index thread does the work.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
from collections.abc import Sequence
from typing import NamedTuple

from kvfs.errors import KvfsError
from kvfs.native.library import (
    CELLS_MAX,
    KEYS_MAX,
    MOVED,
    PARTS_MAX,
    ROWS_MAX,
    RUNS_MAX,
    SEGMENTS_MAX,
    Descriptors,
    Library,
    Lookup,
    Stamp,
    Walked,
)

VALUES_BYTES = 1 << 20
TRIES = 4  # of a call, while other processes commit more than once during each
_ROW_BYTES = 64  # of a kvfs_row
_SEGMENT = struct.Struct("<IIQ16s")
_Heads = ctypes.c_char * KEYS_MAX  # one type: a type of each size would cost more than the call, and leave garbage
_REASONS = {errno.EAGAIN: "busy", errno.ESTALE: "stale", errno.EIO: "damaged", errno.E2BIG: "large"}


class HandOverError(KvfsError):
    """The compiled library cannot do this now; the Python path can. ``str()``: why, one word."""


class MovedError(HandOverError):
    """There was a commit since the parts of the lookup were read: read them again."""


class WalkResult(NamedTuple):
    """What a walk read, up to and including the first run that is not covered."""

    end: int  # the run that follows the last one read
    rows_read: int
    rows: bytes  # kvfs_row of each
    values: bytes
    covered: int  # chunks of the last run; all before it are covered
    claimed: Sequence[int]  # chunks that are being written, by run; empty if there are none
    segments: list[tuple[int, bytes, int]]  # number, id, end of what is published


class _Buffers:
    """Memory that one walk fills. Kept for the next one, since its pages are in the CPU's cache."""

    def __init__(self) -> None:
        self.rows = ctypes.create_string_buffer(_ROW_BYTES * ROWS_MAX)
        self.values = ctypes.create_string_buffer(VALUES_BYTES)
        self.segments = ctypes.create_string_buffer(_SEGMENT.size * SEGMENTS_MAX)
        self.covered, self.claimed = (ctypes.c_uint32 * RUNS_MAX)(), (ctypes.c_uint32 * RUNS_MAX)()
        at = ctypes.addressof
        self.walked = Walked(
            at(self.rows), at(self.values), VALUES_BYTES, at(self.segments), at(self.covered), at(self.claimed)
        )


class PreparedLookup:
    """Of one group of a prompt, what all calls need."""

    def __init__(
        self, hashes: bytes, run_length: int, prefix: bytes, parts: Sequence[bytes], cells: Sequence[Sequence[int]],
        first_is_enough: bool,
    ) -> None:  # fmt: skip
        if len(parts) > PARTS_MAX or len(cells) > CELLS_MAX:
            raise HandOverError("large")
        sets = b"".join([sum(1 << part for part in cell).to_bytes(8, "little") for cell in cells])
        self.parts = len(parts)
        self.struct = Lookup(
            hashes, len(hashes) // 32, run_length, prefix, len(prefix), b"".join(parts), len(parts), sets, len(cells),
            first_is_enough,
        )  # fmt: skip


class IndexWalker:
    """Reads one generation. Thread-safe under the interpreter's lock. ``close`` before its descriptors are closed."""

    def __init__(
        self, native: Library, current: int, data: int, stamp: tuple[int, ...]
    ) -> None:  # fmt: skip
        """Descriptors of CURRENT and of the index file; ``stamp``: of CURRENT. OSError if it is another by now."""
        self._held = native.held
        # a large index needs all of it; a page that nothing is written to takes no memory
        self._memory = mmap.mmap(-1, self._held.kvfs_index_bytes(), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._index = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._free: list[_Buffers] = []
        self._heads: list[ctypes.Array[ctypes.c_char]] = []  # likewise, of ``there``
        code = self._held.kvfs_index_open(self._index, Descriptors(current, data), Stamp(*stamp))
        if code:
            raise OSError(-code, os.strerror(-code))
        self.last_txn = 0  # the last commit that a call has seen

    def close(self) -> None:
        """Each later call raises HandOverError. The descriptors are the caller's."""
        self._held.kvfs_index_close(self._index)

    def walk(
        self, lookup: PreparedLookup, first: int, end: int, rows_max: int, now_s: int, txn: int, *, stop_at_gap: bool
    ) -> WalkResult:
        """Rows of runs [first, end), at most ``rows_max`` or one run; see kvfs_walk. MovedError unless ``txn`` is the
        last commit."""
        lookup.struct.now_s, lookup.struct.known_txn = now_s, txn
        try:
            buffers = self._free.pop()
        except IndexError:
            buffers = _Buffers()
        walked = buffers.walked
        end = min(end, first + RUNS_MAX)
        code = self._held.kvfs_walk(self._index, lookup.struct, first, end, rows_max, stop_at_gap, walked)
        if code:
            self._free.append(buffers)
            if code == MOVED:
                self.last_txn = walked.txn
                raise MovedError("moved")
            raise _error(code)
        rows = ctypes.string_at(buffers.rows, _ROW_BYTES * walked.n_rows)
        values = ctypes.string_at(buffers.values, walked.n_values)
        segments = [
            (number, segment_id, tail)
            for number, _, tail, segment_id in _SEGMENT.iter_unpack(
                ctypes.string_at(buffers.segments, _SEGMENT.size * walked.n_segments)
            )
        ]
        end, count = walked.end, walked.end - first
        some = ctypes.string_at(buffers.claimed, 4 * count) != bytes(4 * count)  # numbers of all would take longer
        claimed = buffers.claimed[:count] if some else ()
        result = WalkResult(end, walked.rows_read, rows, values, buffers.covered[count - 1], claimed, segments)
        self._free.append(buffers)
        return result

    def there(self, lookup: PreparedLookup, first: int, stride: int, count: int) -> bytes:
        """For chunks first, first + stride, ...: 1 if one has a row of its own, else 0. At most KEYS_MAX / parts."""
        found = self._heads.pop() if self._heads else _Heads()
        for _ in range(TRIES):
            code = self._held.kvfs_there(self._index, lookup.struct, first, stride, count, found)
            if code != MOVED:
                break
        there: bytes = found.raw[:count]
        self._heads.append(found)
        if code:
            raise _error(code)
        return there

    def parts(self, digest: bytes, group: int, parts_max: int, known_txn: int) -> list[bytes]:
        """Packed parts that were stored of a group. MovedError unless ``known_txn`` is the last commit."""
        found = ctypes.create_string_buffer(8 * parts_max)
        txn = ctypes.c_uint64(0)
        prefix = digest + group.to_bytes(2, "big")
        count = self._held.kvfs_parts(self._index, prefix, len(prefix), found, parts_max, txn)
        if count == MOVED or (count >= 0 and txn.value != known_txn):
            self.last_txn = 0 if count < 0 else txn.value
            raise MovedError("moved")
        if count < 0:
            raise _error(count)
        raw = found.raw
        return [raw[at : at + 8] for at in range(0, 8 * count, 8)]

    def last_commit(self) -> int:
        """Number of the last commit."""
        txn = ctypes.c_uint64(0)
        for _ in range(TRIES):
            code = self._held.kvfs_parts(self._index, b"", 0, None, 0, txn)
            if code != MOVED:
                break
        if code < 0:
            raise _error(code)
        self.last_txn = txn.value
        return self.last_txn


def _error(code: int) -> HandOverError:
    return HandOverError("moved" if code == MOVED else _REASONS.get(-code, "unsupported"))


def keys_per_call(parts: int) -> int:
    """Chunks that one call of ``there`` takes."""
    return KEYS_MAX // 2 // max(1, parts)
