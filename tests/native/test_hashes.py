"""Hashes of the native library equal those of hashlib and xxhash, by the CPU's instructions and without them."""

from __future__ import annotations

import ctypes
import hashlib
import random
from collections.abc import Iterator

import pytest
import xxhash

from kvfs.native import hash_chain, key_pages, library
from kvfs.pages import chunk_hash
from kvfs.pages.chunk_hash import ChunkHashes, chain, tenant_seed

SEED = tenant_seed("tenant")


@pytest.fixture(params=["cpu", "portable"])
def code(request: pytest.FixtureRequest, native: library.Library) -> Iterator[library.Library]:
    native.held.kvfs_portable(request.param == "portable")
    yield native
    native.held.kvfs_portable(False)


def digest(function: ctypes._CFuncPtr, data: bytes, nbytes: int) -> bytes:
    out = ctypes.create_string_buffer(nbytes)
    function(data, len(data), out)
    return out.raw


def test_every_length_has_the_hash_of_the_library(code: library.Library) -> None:
    draw = random.Random(1)
    for nbytes in [*range(600), *range(600, 5000, 97), 65536, 100_001]:
        data = draw.randbytes(nbytes)
        for seed in (0, draw.getrandbits(64)):
            assert code.held.kvfs_xxh3_64(data, nbytes, seed) == xxhash.xxh3_64_intdigest(data, seed=seed), nbytes
        assert digest(code.held.kvfs_xxh3_128, data, 16) == xxhash.xxh3_128_digest(data), nbytes
        assert digest(code.held.kvfs_blake2b, data, 32) == hashlib.blake2b(data, digest_size=32).digest(), nbytes


def hashed(tokens: bytes, page_tokens: int, seed: bytes, extra: dict[int, bytes] | None) -> list[bytes]:
    """By the definition."""
    step, parent, found = 4 * page_tokens, seed, []
    for number in range(len(tokens) // step):
        chunk = tokens[number * step : (number + 1) * step]
        parent = hashlib.sha256(parent + chunk + (extra or {}).get(number, b"")).digest()
        found.append(parent)
    return found


@pytest.mark.parametrize("held", [0, 1 << 30], ids=["released", "held"])
def test_hashes_of_keys_are_equal(code: library.Library, monkeypatch: pytest.MonkeyPatch, held: int) -> None:
    monkeypatch.setattr(key_pages, "HELD_BYTES", held)
    monkeypatch.setattr(code, "has_sha", True)
    draw = random.Random(3)
    for nbytes in (1, 5, 20, 21, 32, 52, 53, 64, 200):  # SHA-256 pads a block of 55 bytes, and one of 56 with another
        keys = [draw.randbytes(nbytes) for _ in range(draw.randrange(1, 40))]
        for seed in (b"", SEED):
            wanted = [chunk_hash.chunk_of_key(key, seed) for key in keys]
            assert key_pages.chunk_hashes(b"kvfs key 1\n" + seed, b"".join(keys), nbytes) == b"".join(wanted)
            assert list(chunk_hash.chunks_of_keys(keys, seed)) == wanted
            if nbytes == chunk_hash.HASH_BYTES:
                assert list(chunk_hash.chunks_of_keys(ChunkHashes(b"".join(keys)), seed)) == wanted


def test_keys_of_several_lengths_are_hashed_by_python(code: library.Library) -> None:
    assert key_pages.chunk_hashes(b"", b"", 0) is None
    for keys in ([b"a", b"bc"], [b""], []):
        assert list(chunk_hash.chunks_of_keys(keys, b"")) == [chunk_hash.chunk_of_key(key, b"") for key in keys]
    assert not chunk_hash.chunks_of_keys(ChunkHashes(), b"")


@pytest.mark.parametrize("held", [100, 1 << 30], ids=["short slices", "one call"])
def test_chains_are_equal(code: library.Library, monkeypatch: pytest.MonkeyPatch, held: int) -> None:
    monkeypatch.setattr(hash_chain, "HELD_BYTES", held)
    monkeypatch.setattr(code, "has_sha", True)
    draw = random.Random(2)
    for page_tokens in (1, 2, 7, 8, 15, 16, 64, 100):
        for chunks in (0, 1, 5, 40):
            tokens = draw.randbytes(4 * (page_tokens * chunks + draw.randrange(page_tokens)))
            extra = {draw.randrange(45): draw.randbytes(draw.randrange(200)) for _ in range(draw.randrange(6))}
            for keys in (None, extra):
                for seed in (SEED, b"", b"of another length"):
                    native = hash_chain.chain(tokens, 4 * page_tokens, seed, keys)
                    assert native is not None and ChunkHashes(native) == hashed(tokens, page_tokens, seed, keys)


def test_a_long_prompt_is_hashed_with_the_interpreter_released(
    native: library.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, int]] = []
    monkeypatch.setattr(native, "has_sha", True)
    for side in ("held", "free"):
        functions = getattr(native, side)
        real = functions.kvfs_chain
        monkeypatch.setattr(
            functions, "kvfs_chain",
            lambda *a, side=side, real=real: (calls.append((side, a[2] - a[1])), real(*a))[1],
        )  # fmt: skip
    for tokens in (1024, 131_072, 131_072 + 16):
        chain(bytes(4 * tokens), 16, SEED)
    assert calls == [("held", 64), ("held", 4096), ("held", 4096), ("free", 8193)]


def test_without_the_library_the_chain_is_the_same(native: library.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, extra = random.Random(3).randbytes(4 * 1000), {3: b"image", 70: b"none such"}
    cases = [(seed, keys) for seed in (SEED, b"") for keys in (None, extra, {0: b"first"})]
    both = [chain(tokens, 16, *case) for case in cases]
    monkeypatch.setattr(library, "loaded", lambda: None)
    assert [chain(tokens, 16, *case) for case in cases] == both


def test_chunk_hashes_are_a_sequence() -> None:
    names = [bytes([n]) * 32 for n in range(5)]
    one = ChunkHashes(b"".join(names))
    assert one == names and list(one) == names and len(one) == 5 and names[2] in one
    assert one[0] == names[0] and one[-1] == names[-1] and one[1:3] == names[1:3] and one[::-2] == names[::-2]
    assert one[4:] + one[:1] == [names[4], names[0]] and one[7:] == [] and not ChunkHashes()
    assert one != names[:4] and one != "hashes" and repr(one) == "<5 chunk hashes>"
    for index in (5, -6):
        with pytest.raises(IndexError):
            one[index]


def test_page_keys_are_blake2b_of_the_prefix(native: library.Library) -> None:
    key = chunk_hash.page_key(b"d" * 32, "full", b"h" * 32)
    assert digest(native.held.kvfs_blake2b, chunk_hash.page_prefix(b"d" * 32, "full") + b"h" * 32, 32) == key
