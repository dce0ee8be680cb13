"""How bytes are named and checked: golden vectors, and every way to pass token ids."""

from __future__ import annotations

import hashlib
import struct
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import kvfs
from kvfs.errors import ConfigError
from kvfs.format import checksums
from kvfs.native import library
from kvfs.pages import chunk_hash
from tests.stores import TINY_BYTES, counters, segment_files, tiny

CHAIN = (
    "5d85718ec594b982c252d0279e5966ffca33a5eaf2a455038d3ab331fde70cea",
    "4681c0107c38f402cd1bc30b0b09a65202dba31f98269d9d7f63f5e0dea6901a",
)
#: two chunks of 16 tokens: 0..31
TOKENS = struct.pack("<32I", *range(32))


# ---------------------------------------------------------------- golden vectors


def test_the_first_parent_of_a_chain_is_what_every_kvfs_ever_used() -> None:
    assert chunk_hash.tenant_seed("") == b""
    assert (
        chunk_hash.tenant_seed("tenant-a").hex() == "684d4d1aacb9073873a9742651ac5ff1bea86a38f23b44dd6bc522afff249240"
    )
    assert chunk_hash.tenant_seed("ä") == hashlib.sha256(b"kvfs chain 1\n\xc3\xa4").digest()


@pytest.mark.parametrize("how", ["native", "python"])
def test_a_chain_of_chunks_is_what_every_kvfs_ever_used(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "python":
        monkeypatch.setattr(library, "loaded", lambda: None)
    seed = chunk_hash.tenant_seed("")
    assert tuple(h.hex() for h in chunk_hash.chain(TOKENS, 16, seed)) == CHAIN
    # the same, from the definition
    first = hashlib.sha256(TOKENS[:64]).digest()
    assert chunk_hash.chain(TOKENS, 16, seed) == [first, hashlib.sha256(first + TOKENS[64:]).digest()]


def test_an_extra_key_enters_its_chunk_and_all_later_ones() -> None:
    seed = chunk_hash.tenant_seed("")
    hashes = chunk_hash.chain(TOKENS, 16, seed, {1: b"image"})
    assert hashes[0].hex() == CHAIN[0]
    assert hashes[1].hex() == "7f3edc4af4d3a1ac3f7d036030381c97bfda414b78aa16c30d3137a3cfcd5398"
    early = chunk_hash.chain(TOKENS, 16, seed, {0: b"image"})
    assert early[0].hex() != CHAIN[0] and early[1] not in (hashes[1], bytes.fromhex(CHAIN[1]))


def test_a_first_chunk_with_an_extra_key_follows_the_seed_of_the_empty_salt() -> None:
    (early, _) = chunk_hash.chain(TOKENS, 16, b"", {0: b"image"})
    assert early.hex() == "5ef83e760b0d764957beb9527f95169bc460c9a472b7df75ca1babf13ed8225d"
    assert early == hashlib.sha256(hashlib.sha256(b"kvfs chain 1\n").digest() + TOKENS[:64] + b"image").digest()
    assert chunk_hash.chain(TOKENS, 16, b"", {0: b""}) == chunk_hash.chain(TOKENS, 16, b"")


def test_no_extra_key_makes_a_first_chunk_look_like_a_second_one() -> None:
    """Without a seed, the tokens and the key of a first chunk could spell a hash and the tokens of a second chunk."""
    first, second = chunk_hash.chain(TOKENS, 16, b"")
    spelled = first + TOKENS[64:]
    (forged,) = chunk_hash.chain(spelled[:64], 16, b"", {0: spelled[64:]})
    assert hashlib.sha256(spelled).digest() == second != forged


def test_no_tokens_make_a_first_chunk_look_like_a_key() -> None:
    spelled = b"kvfs key 1\n" + bytes(53)
    (forged, _) = chunk_hash.chain(spelled + TOKENS[:64], 16, b"")
    assert forged != chunk_hash.chunk_of_key(spelled[11:], b"")
    assert forged == hashlib.sha256(hashlib.sha256(b"kvfs chain 1\n").digest() + spelled).digest()
    (short, *_) = chunk_hash.chain(spelled, 2, b"")  # shorter than that text: what follows is not part of its name
    assert short == hashlib.sha256(spelled[:8]).digest()


@pytest.mark.parametrize("tail", [1, 15])
def test_a_tail_shorter_than_a_chunk_names_nothing(tail: int) -> None:
    seed = chunk_hash.tenant_seed("")
    tokens = TOKENS + struct.pack(f"<{tail}I", *range(tail))
    assert chunk_hash.chain(tokens, 16, seed) == chunk_hash.chain(TOKENS, 16, seed)
    assert chunk_hash.chain(tokens[-4 * tail :], 16, seed) == []


@pytest.mark.parametrize("extra", [None, {0: b"x"}])
def test_a_hash_stands_for_the_whole_prefix(extra: dict[int, bytes] | None) -> None:
    seed = chunk_hash.tenant_seed("")
    changed = b"\x01" + TOKENS[1:]
    ours, theirs = chunk_hash.chain(TOKENS, 16, seed, extra), chunk_hash.chain(changed, 16, seed, extra)
    assert all(a != b for a, b in zip(ours, theirs, strict=True))


def test_a_page_key_is_what_every_kvfs_ever_used() -> None:
    namespace, chunk = bytes(range(32)), bytes.fromhex(CHAIN[1])
    key = chunk_hash.page_key(namespace, "full", chunk)
    assert key.hex() == "a6714ecc0f7e20d278e0babecc0b88de72463249c53a3cadb20bad337eb74578"
    assert key == hashlib.blake2b(namespace + b"\x04full" + chunk, digest_size=32).digest()


def test_keys_made_one_after_the_other_are_the_same() -> None:
    namespace, chunks = bytes(range(32)), [bytes([i]) * 32 for i in range(4)]
    key = chunk_hash.page_keys(namespace, "full")
    assert [key(chunk) for chunk in chunks] == [chunk_hash.page_key(namespace, "full", chunk) for chunk in chunks]


def test_namespace_group_and_chunk_each_change_a_page_key() -> None:
    namespace, chunk = bytes(32), bytes(31) + b"\x01"
    keys = {
        chunk_hash.page_key(namespace, "full", chunk),
        chunk_hash.page_key(bytes(31) + b"\x01", "full", bytes(32)),
        chunk_hash.page_key(namespace, "fulk", chunk),
        chunk_hash.page_key(namespace, "ful", b"l" + chunk[:-1]),
        chunk_hash.page_key(namespace, "full", bytes(32)),
    }
    assert len(keys) == 5


def test_an_opaque_key_is_what_every_kvfs_ever_used() -> None:
    seed = chunk_hash.tenant_seed("")
    key = chunk_hash.chunk_of_key(b"engine-key-1", seed)
    assert key.hex() == "619f502df8ded56931718a51b51b06e75a9e022ce6f8155b239c2413b72b8948"
    assert key == hashlib.sha256(b"kvfs key 1\n" + b"engine-key-1").digest()
    tenant = chunk_hash.tenant_seed("tenant-a")
    assert chunk_hash.chunk_of_key(b"k", tenant) == hashlib.sha256(b"kvfs key 1\n" + tenant + b"k").digest()


def test_leaf_table_and_root_are_what_every_kvfs_ever_used() -> None:
    payload = bytes(range(256))
    table = checksums.leaf_table(payload, 64)
    assert table.hex() == "55edb08990eb876124297b1068f474d43f054f2c93399420c286f96efec201bd"
    words = [xxhash.xxh3_64_intdigest(payload[i : i + 64]) for i in range(0, 256, 64)]
    assert table == struct.pack("<4Q", *words)
    assert checksums.root_of(table).hex() == "4b119f16a5ed7739bb106dc4f8164b10"
    assert checksums.leaf_table(memoryview(payload), 64) == checksums.leaf_table(bytearray(payload), 64) == table


def test_another_process_makes_the_same_hashes() -> None:
    """No hash may depend on the process: not on PYTHONHASHSEED, not on a random key."""
    code = (
        "from kvfs.pages import chunk_hash; seed = chunk_hash.tenant_seed('');"
        "print([h.hex() for h in chunk_hash.chain(chunk_hash.token_bytes(range(32)), 16, seed)])"
    )
    root = Path(__file__).resolve().parents[2]
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONPATH": str(root), "PYTHONHASHSEED": hash_seed},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stdout.strip() == str(list(CHAIN))


# ---------------------------------------------------------------- every way to pass token ids

IDS = [0, 1, 2, 31_999, 2**31 - 1]
WIDE = [*IDS, 2**31, 2**32 - 1]
SMALL = [0, 1, 2, 127]


def _strided(dtype: str, ids: list[int]) -> Any:
    table = np.zeros((len(ids), 3), dtype)
    table[:, 1] = ids
    return table[:, 1]


SAME = {
    "list": (list, WIDE),
    "tuple": (tuple, WIDE),
    "list of numpy integers": (lambda ids: [np.int64(i) for i in ids], WIDE),
    "array I": (lambda ids: array("I", ids), WIDE),
    "array i": (lambda ids: array("i", ids), IDS),
    "array q": (lambda ids: array("q", ids), WIDE),
    "array Q": (lambda ids: array("Q", ids), WIDE),
    "array h": (lambda ids: array("h", ids), SMALL),
    "array B": (lambda ids: array("B", ids), SMALL),
    "memoryview": (lambda ids: memoryview(array("I", ids)), WIDE),
    "strided memoryview": (lambda ids: memoryview(array("I", [x for i in ids for x in (i, 7)]))[::2], WIDE),
    **{
        f"numpy {dtype}": (lambda ids, dtype=dtype: np.array(ids, dtype), ids)
        for dtype, ids in (
            ("int8", SMALL), ("uint8", SMALL), ("int16", SMALL), ("uint16", SMALL), ("int32", IDS), ("uint32", WIDE),
            ("int64", WIDE), ("uint64", WIDE), (">i4", IDS), (">u4", WIDE), (">i8", WIDE), ("object", WIDE),
        )
    },
    **{
        f"strided numpy {dtype}": (lambda ids, dtype=dtype: _strided(dtype, ids), ids)
        for dtype, ids in (("int32", IDS), ("uint32", WIDE), ("int64", WIDE), ("int16", SMALL), (">i4", IDS))
    },
    "reversed numpy": (lambda ids: np.array(ids[::-1], "int64")[::-1], WIDE),
    "read-only numpy": (lambda ids: np.frombuffer(struct.pack(f"<{len(ids)}I", *ids), "uint32"), WIDE),
}  # fmt: skip


@pytest.mark.parametrize("way", SAME)
def test_every_way_to_pass_token_ids_names_the_same_tokens(way: str) -> None:
    make, ids = SAME[way]
    assert chunk_hash.token_bytes(make(ids)) == struct.pack(f"<{len(ids)}I", *ids)


def test_a_range_names_its_tokens() -> None:
    assert chunk_hash.token_bytes(range(5, 9)) == struct.pack("<4I", 5, 6, 7, 8)


@pytest.mark.parametrize("empty", [[], (), range(0), array("i"), np.array([], "int64"), np.array([], "int32")])
def test_an_empty_prompt_names_no_tokens(empty: Any) -> None:
    assert chunk_hash.token_bytes(empty) == b""


@pytest.mark.parametrize("dtype", ["int64", "int32", "int16", "uint8"])
def test_torch_tensors_name_the_same_tokens(dtype: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    ids = SMALL if dtype in ("int16", "uint8") else IDS
    tensor = torch.tensor(ids, dtype=getattr(torch, dtype))
    expected = struct.pack(f"<{len(ids)}I", *ids)
    assert chunk_hash.token_bytes(tensor) == expected
    assert chunk_hash.token_bytes(torch.stack([tensor, tensor], dim=1)[:, 0]) == expected  # strided
    with pytest.raises(ConfigError, match=r"dimensions|flat"):
        chunk_hash.token_bytes(tensor.reshape(1, -1))


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40))
def test_lists_arrays_and_numpy_agree(ids: list[int]) -> None:
    expected = struct.pack(f"<{len(ids)}I", *ids)
    for source in (ids, array("I", ids), np.array(ids, "uint32"), np.array(ids, "int64"), np.array(ids, "uint64")):
        assert chunk_hash.token_bytes(source) == expected


# ---------------------------------------------------------------- what is no prompt


def _torch(name: str) -> Any:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    return {
        "float": lambda: torch.ones(16),
        "bfloat16": lambda: torch.ones(16, dtype=torch.bfloat16),
        "negative": lambda: torch.full((16,), -1),
        "0-d": lambda: torch.tensor(5),
        "2-D": lambda: torch.ones((2, 16), dtype=torch.int64),
        "size": lambda: torch.bfloat16,
    }[name]()


BAD: dict[str, Any] = {
    "text": lambda: "hello world, hello",
    "bytes": lambda: b"0123456789abcdef",
    "bytearray": lambda: bytearray(16),
    "none": lambda: None,
    "a number": lambda: 17,
    "negative in a list": lambda: [1, -1] * 8,
    "too large in a list": lambda: [2**32] * 16,
    "huge in a list": lambda: [10**400] * 16,
    "floats": lambda: [1.0] * 16,
    "texts": lambda: ["1"] * 16,
    "lists": lambda: [[1] * 16],
    "a mapping": lambda: dict.fromkeys(range(16)),
    "a set": lambda: set(range(16)),
    "array of floats": lambda: array("d", [1.0] * 16),
    "array of characters": lambda: array("u", "hello world, hel"),
    "negative int8": lambda: np.full(16, -1, "int8"),
    "negative int32": lambda: np.full(16, -1, "int32"),
    "negative strided int32": lambda: np.full((16, 2), -1, "int32")[:, 0],
    "negative big-endian": lambda: np.full(16, -1, ">i4"),
    "negative int64": lambda: np.full(16, -1, "int64"),
    "too large int64": lambda: np.full(16, 2**32, "int64"),
    "one too large int64": lambda: np.array([1] * 15 + [2**40]),
    "too large uint64": lambda: np.full(16, 2**64 - 1, "uint64"),
    "numpy floats": lambda: np.ones(16),
    "numpy halves": lambda: np.ones(16, "float16"),
    "numpy complex": lambda: np.ones(16, "complex64"),
    "numpy text": lambda: np.array(["1"] * 16),
    "numpy times": lambda: np.zeros(16, "datetime64[s]"),
    "numpy records": lambda: np.zeros(16, [("a", "i4"), ("b", "i4")]),
    "numpy objects": lambda: np.array([1, "x"] * 8, object),
    "0-d": lambda: np.int64(3),
    "0-d array": lambda: np.array(3),
    "2-D": lambda: np.ones((2, 16), "int64"),
    "torch floats": lambda: _torch("float"),
    "torch bfloat16": lambda: _torch("bfloat16"),
    "torch negative": lambda: _torch("negative"),
    "torch 0-d": lambda: _torch("0-d"),
    "torch 2-D": lambda: _torch("2-D"),
    "torch dtype": lambda: _torch("size"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_no_prompt_is_refused(what: str) -> None:
    with pytest.raises(ConfigError, match="token_ids"):
        chunk_hash.token_bytes(BAD[what]())


def test_a_refused_prompt_writes_nothing(store_path: Path) -> None:
    with kvfs.open(store_path, capacity="32MiB") as store:
        ns = store.namespace("m", tiny(), revision="r1")
        for what in sorted(BAD):
            with pytest.raises(ConfigError, match="token_ids"):
                ns.put(BAD[what](), bytes(TINY_BYTES))
            with pytest.raises(ConfigError, match="token_ids"):
                ns.match(BAD[what]())
        assert not segment_files(store_path)
        assert "lookups" not in counters(store) and store.stats()["used_bytes"] == 0


@given(st.binary(max_size=64), st.integers(1, 16))
@settings(max_examples=50)
def test_a_leaf_table_has_a_word_per_started_leaf(payload: bytes, leaf: int) -> None:
    table = checksums.leaf_table(payload, leaf)
    assert len(table) == 8 * -(-len(payload) // leaf)
    assert all(
        int.from_bytes(table[8 * i : 8 * i + 8], "little") == xxhash.xxh3_64_intdigest(payload[i * leaf :][:leaf])
        for i in range(len(table) // 8)
    )
