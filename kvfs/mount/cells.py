"""Where a file is cut, so that what two conversations have in common becomes equal pages.

A file of an unknown format is cut every PAGE_BYTES. In a prompt cache the KV of each layer is one run of rows, a row
per token; a longer conversation moves every run after the first, so pages cut from the start of the file would differ
although the tokens agree. So in files of known formats a page begins where each run begins.

Known: safetensors (tensors; of tensors with four dimensions [batch, heads, tokens, numbers] each head), and saved
sessions and slots of llama.cpp. Bytes decide, not names. Any doubt means an unknown format: cutting is only a matter of
how much is shared, never of what is read back.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvfs.mount.manifest import PAGE_BYTES, PIECES_MAX, Piece, last_page_bytes

#: (offset, bytes) -> what the file has there; shorter at its end.
Read = Callable[[int, int], bytes]

RUNS_MAX = PIECES_MAX // 2  # each run makes at most two pieces
HEADER_BYTES_MAX = 16 << 20  # of a safetensors file: longer ones are not looked at
_SESSION, _SEQUENCE = 0x6767736E, 0x67677371  # LLAMA_SESSION_MAGIC, LLAMA_STATE_SEQ_MAGIC of llama.h
TOKENS_MAX = 1 << 24
SEARCH_BYTES = 1 << 20  # how far after the tokens the rows of a llama.cpp file may begin, besides 64 bytes per token
CANDIDATES_MAX = 1024  # places that are tried
_LAYERS_MAX, _TYPES_MAX, _ROW_BYTES_MAX = 1024, 64, 1 << 24
_HEAD_WORDS = (2, 4)  # before the first layer: of versions up to 2025, and later


@dataclass(frozen=True)
class Plan:
    """How a file becomes a stream of pages."""

    pieces: tuple[Piece, ...]  # in the order of the file
    whole_pages: int
    last_bytes: int

    @property
    def last_page(self) -> int:
        return last_page_bytes(self.last_bytes)


def plan(size: int, read: Read) -> Plan:
    """The plan of a file of ``size`` bytes. Raises what ``read`` raises."""
    starts = sorted({0, *(at for at in _starts(size, read) if 0 < at < size)})
    if len(starts) > RUNS_MAX:
        starts = [0]
    return arrange([b - a for a, b in zip(starts, [*starts[1:], size], strict=True)])


def arrange(runs: Sequence[int]) -> Plan:
    """Whole pages of each run first, in order; then what is left over of all runs, as if it were one."""
    whole = sum(n // PAGE_BYTES for n in runs)
    pieces: list[Piece] = []
    page, rest = 0, whole * PAGE_BYTES
    for n in runs:
        full = n // PAGE_BYTES * PAGE_BYTES
        for at, nbytes in ((page, full), (rest, n - full)):
            if nbytes and pieces and sum(pieces[-1]) == at:
                pieces[-1] = Piece(pieces[-1].at, pieces[-1].nbytes + nbytes)
            elif nbytes:
                pieces.append(Piece(at, nbytes))
        page, rest = page + full, rest + n - full
    return Plan(tuple(pieces), rest // PAGE_BYTES, rest % PAGE_BYTES)


def _starts(size: int, read: Read) -> list[int]:
    try:
        head = read(0, 16)
        if len(head) < 16:
            return []
        if head[:4] in (_SESSION.to_bytes(4, "little"), _SEQUENCE.to_bytes(4, "little")):
            return _llama_rows(size, read)
        if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < min(size, HEADER_BYTES_MAX):
            return _tensors(size, read)
    except (ValueError, KeyError, TypeError, RecursionError, struct.error):
        pass
    return []


# -- safetensors -----------------------------------------------------------------------------


def _tensors(size: int, read: Read) -> list[int]:
    (length,) = struct.unpack("<Q", read(0, 8))
    header = json.loads(read(8, length))
    starts: list[int] = []
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        begin, end = tensor["data_offsets"]
        shape = tensor["shape"]
        if not (type(begin) is type(end) is int and 0 <= begin <= end and 8 + length + end <= size):
            return []
        heads = 1
        if len(shape) == 4 and all(type(n) is int and n > 0 for n in shape):
            heads = shape[0] * shape[1]
        if (end - begin) % heads or (end - begin) // heads < 2 * PAGE_BYTES:
            heads = 1
        if len(starts) + heads > RUNS_MAX:
            return []
        starts += range(8 + length + begin, 8 + length + end, max(1, (end - begin) // heads))
    return starts


# -- llama.cpp -------------------------------------------------------------------------------
#
# llama_state_save_file and llama_state_seq_save_file: magic, version, number of tokens (u32 each), tokens (i32), then
# state that differs from version to version, and the rows of each cache as llama_kv_cache::state_write_data has them:
# u32 v_trans, u32 layers, since 2026 two words more (rotations of K and V); per layer i32 type, u64 bytes of a row, the
# rows of K; then the same of V, or, if V is stored transposed, per layer i32 type, u32 bytes of a number, u32 rows, and
# the rows, each with a number per token.
# What precedes the rows is not parsed but searched: only a table that accounts for every byte of the file is believed.


def _llama_rows(size: int, read: Read) -> list[int]:
    (tokens,) = struct.unpack("<I", read(8, 4))
    if tokens > TOKENS_MAX:
        return []
    at, starts = 12 + 4 * tokens, list[int]()
    while at < size:
        found = _find_cache(size, read, at, tokens)
        if found is None:
            return []
        at, runs = found
        starts += runs
    return starts


def _find_cache(size: int, read: Read, first: int, tokens: int) -> tuple[int, list[int]] | None:
    """(end, where runs begin) of the first cache at or after ``first``."""
    window = read(first, min(size - first, SEARCH_BYTES + 64 * tokens + 20))
    # the number of cells is that of the tokens, or one of the two words before the cells (streams, cells)
    counts = dict.fromkeys([tokens, *struct.unpack_from("<II", window.ljust(8, b"\0"))])
    for offset, head in itertools.islice(_candidates(window), CANDIDATES_MAX):
        v_trans, layers = struct.unpack_from("<II", window, offset)
        for cells in counts:
            found = _parse_runs(size, read, first + offset + head, v_trans, layers, cells)
            if found is not None:
                return found
    return None


def _candidates(window: bytes) -> Iterator[tuple[int, int]]:
    """(offset, bytes up to the first layer) where v_trans, layers, then a type and the bytes of a row may be."""
    words = memoryview(window)[: len(window) // 4 * 4].cast("I")
    for n in range(len(words) - 4):
        if words[n] <= 1 and 0 < words[n + 1] <= _LAYERS_MAX:
            for head in _HEAD_WORDS:
                layer = words[n + head : n + head + 3]  # type, bytes of a row in two words
                if len(layer) == 3 and layer[0] < _TYPES_MAX and 0 < layer[1] <= _ROW_BYTES_MAX and not layer[2]:
                    yield n * 4, head * 4


def _parse_runs(size: int, read: Read, at: int, v_trans: int, layers: int, cells: int) -> tuple[int, list[int]] | None:
    """(end, starts) if ``layers`` layers of K and V of so many cells are there."""
    starts: list[int] = []
    for n in range(2 * layers):
        if n == layers and at == size:  # models whose V is computed from K store none
            break
        if v_trans and n >= layers:
            kind, number, rows = struct.unpack("<iII", read(at, 12).ljust(12, b"\xff"))
            row, count, at = number * cells, rows, at + 12
        else:
            kind, row = struct.unpack("<iQ", read(at, 12).ljust(12, b"\xff"))
            count, at = cells, at + 12
        if not 0 <= kind < _TYPES_MAX or row > _ROW_BYTES_MAX * 64 or at + row * count > size or cells < 1:
            return None
        starts.append(at)
        at += row * count
    return at, starts
