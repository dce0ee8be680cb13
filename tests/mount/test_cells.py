"""Where files are cut: the pieces are the file, and conversations with one beginning share its pages."""

from __future__ import annotations

import itertools
import json
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvfs
from kvfs.mount import cells
from kvfs.mount.chunks import FILES
from kvfs.mount.manifest import PAGE_BYTES, Piece
from tests.mount.kernel import Kernel
from tests.stores import seeded

SHARED, ROW = 1_000, 512  # tokens that the conversations have in common, bytes of a row of K or V


def rows(layer: int, seed: int, tokens: int, row: int = ROW) -> bytes:
    """Rows of a conversation: the first SHARED are those of every conversation."""
    return seeded(layer, SHARED * row) + seeded(1_000 * seed + layer, (tokens - SHARED) * row)


def llama(
    seed: int, tokens: int, *, layers: int = 3, v_trans: bool = False, session: bool = False, rotations: bool = False,
    values: bool = True,
) -> bytes:  # fmt: skip
    """A saved slot as llama.cpp writes it (tools of version 6,000 and later); with ``session``, other state before;
    ``rotations``: with the two words that versions of 2026 write."""
    head = struct.pack("<III", 0x6767736E if session else 0x67677371, 9 if session else 2, tokens)
    out = [head, seeded(seed, 4 * tokens)]
    if session:
        out.append(struct.pack("<I", 5) + b"llama" + bytes(3) + seeded(seed, 400))
    out.append(struct.pack("<II", 1, tokens))  # streams, cells
    out += [struct.pack("<iIi", n, 1, 0) for n in range(tokens)]
    out.append(struct.pack("<II", v_trans, layers) + struct.pack("<II", 64, 128) * rotations)
    for layer in range(layers):
        out += [struct.pack("<iQ", 1, ROW), rows(layer, seed, tokens)]
    for layer in range(layers if values else 0):
        if v_trans:
            numbers = [seeded(layer * 999 + n, 2 * SHARED) + seeded(seed + n, 2 * (tokens - SHARED)) for n in range(64)]
            out += [struct.pack("<iII", 1, 2, 64), *numbers]
        else:
            out += [struct.pack("<iQ", 1, ROW), rows(100 + layer, seed, tokens)]
    return b"".join(out)


def tensors(seed: int, tokens: int, *, heads: int = 2, layers: int = 2) -> bytes:
    """A prompt cache as mlx-lm saves it: K and V of each layer as [1, heads, tokens, numbers]."""
    header: dict[str, object] = {"__metadata__": {"offset": str(tokens), "note": "x" * seed}}
    parts, at = [], 0
    for layer in range(layers):
        for which in (0, 1):
            data = b"".join(rows(layer * 10 + which * 5 + head, seed, tokens) for head in range(heads))
            shape = [1, heads, tokens, ROW // 2]
            header[f"{layer}.{which}"] = {"dtype": "F16", "shape": shape, "data_offsets": [at, at + len(data)]}
            parts.append(data)
            at += len(data)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(parts)


def plan_of(data: bytes) -> cells.Plan:
    return cells.plan(len(data), lambda at, nbytes: data[at : at + nbytes])


@given(st.lists(st.integers(0, 3 * PAGE_BYTES), max_size=8))
def test_the_pieces_are_the_file_and_the_stream_is_covered_once(runs: list[int]) -> None:
    plan = cells.arrange(runs)
    assert sum(p.nbytes for p in plan.pieces) == sum(runs) == plan.whole_pages * PAGE_BYTES + plan.last_bytes
    covered = sorted(plan.pieces)
    assert all(sum(a) == b.at for a, b in itertools.pairwise(covered))
    assert not covered or covered[0].at == 0


def test_an_unknown_format_is_one_piece() -> None:
    assert plan_of(seeded(1, 5 * PAGE_BYTES + 7)).pieces == (Piece(0, 5 * PAGE_BYTES + 7),)
    assert plan_of(b"").pieces == ()


@pytest.mark.parametrize("kind", ["slot", "slot of 2026", "session", "safetensors"])
def test_conversations_with_one_beginning_share_its_pages(kernel: Kernel, store: kvfs.Store, kind: str) -> None:
    def file(seed: int, tokens: int) -> bytes:
        if kind == "safetensors":
            return tensors(seed, tokens)
        return llama(seed, tokens, session=kind == "session", rotations=kind == "slot of 2026")

    first, second = file(1, 1_300), file(2, 1_777)
    kernel.save("files/1", first)
    before = stored_pages(store)
    kernel.save("files/2", second)
    added = stored_pages(store) - before
    runs = 8 if kind == "safetensors" else 6
    shared = runs * (SHARED * ROW // PAGE_BYTES)
    whole = -(-len(second) // PAGE_BYTES)
    assert added <= whole - shared + 1, "the pages of the shared rows were stored again"
    assert kernel.load("files/1") == first
    assert kernel.load("files/2") == second


def stored_pages(store: kvfs.Store) -> int:
    return sum(info.pages for info in store.catalog.namespaces() if info.name == FILES)


def test_keys_are_shared_where_values_are_stored_transposed() -> None:
    data = llama(1, 1_300, v_trans=True)
    starts = cells._starts(len(data), lambda at, nbytes: data[at : at + nbytes])
    assert len(starts) == 6
    assert data[starts[1] :].startswith(rows(1, 1, 1_300))


def test_a_cache_without_values_is_cut_at_its_keys() -> None:
    data = llama(1, 1_300, rotations=True, values=False)
    starts = cells._starts(len(data), lambda at, nbytes: data[at : at + nbytes])
    assert [data[at : at + SHARED * ROW] for at in starts] == [rows(n, 1, SHARED) for n in range(3)]


@settings(max_examples=30)
@given(st.integers(0, 5_000), st.integers(0, 255), st.sampled_from(["llama", "tensors"]), st.integers(0, 5_000))
def test_a_damaged_header_only_costs_sharing(at: int, byte: int, kind: str, cut: int) -> None:
    whole = bytearray(llama(1, SHARED + 5, layers=1) if kind == "llama" else tensors(1, SHARED + 5, layers=1))
    whole[at] = byte
    data = bytes(whole[: len(whole) - cut])
    plan = plan_of(data)
    assert sum(p.nbytes for p in plan.pieces) == len(data)


def test_a_header_that_claims_very_much_is_not_believed() -> None:
    many = {str(n): {"dtype": "U8", "shape": [1], "data_offsets": [n, n + 1]} for n in range(cells.RUNS_MAX + 1)}
    text = json.dumps(many).encode()
    assert len(plan_of(struct.pack("<Q", len(text)) + text + bytes(cells.RUNS_MAX + 1)).pieces) == 1
    assert len(plan_of(struct.pack("<III", 0x67677371, 2, 2**32 - 1) + bytes(1_000)).pieces) == 1
