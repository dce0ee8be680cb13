"""Names of pages: kvfs, its native path, and SGLang's page hashes agree, and never change."""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Sequence

import pytest

from kvfs.native import hash_chain, library
from kvfs.pages import chunk_hash
from kvfs.pages.identity import Identity
from kvfs.pages.layout import PageLayout

#: page tokens -> last of the page hashes of ``TOKENS``, as SGLang 0.5.23 and kvfs 0.1 make them.
TOKENS = [(token * 7919) % 151_936 for token in range(1024)]
LAST = {
    16: "fdbb9e8603503fb9b6de7c25d617442bd886364129f08fe38a05f4d991fa6382",
    64: "cb547abeb2a3789cd060e2dfdb7d1c0b6c818e483a41d18fdb356c5d45145e9d",
    128: "0133efb72eceda14730f2b026990fd8c7f868a4735b2347b9612984e9329055b",
}


def sglang_hashes(tokens: Sequence[int], page_size: int, prior: str | None = None) -> list[str]:
    """``sglang.srt.mem_cache.utils.get_hash_str``, restated: SHA-256 over the previous digest, if there is one, and the
    tokens of the page as u32 little endian."""
    found = list[str]()
    for at in range(0, len(tokens) - page_size + 1, page_size):
        page = hashlib.sha256(bytes.fromhex(prior) if prior else b"")
        for token in tokens[at : at + page_size]:
            page.update(struct.pack("<I", token))
        prior = page.hexdigest()
        found.append(prior)
    return found


def kvfs_hashes(tokens: Sequence[int], page_tokens: int, seed: bytes = b"") -> list[str]:
    return [h.hex() for h in chunk_hash.chain(chunk_hash.token_bytes(tokens), page_tokens, seed)]


@pytest.mark.parametrize("page_tokens", LAST)
def test_hashes_of_a_prompt_without_a_salt_are_those_of_sglang(page_tokens: int) -> None:
    layout = PageLayout.kv(layers=1, kv_heads=1, head_dim=16, dtype="bfloat16", page_tokens=page_tokens)
    seed = Identity("model", layout, "0123abcd").seed
    hashes = kvfs_hashes(TOKENS, page_tokens, seed)
    assert hashes == sglang_hashes(TOKENS, page_tokens)
    assert (len(hashes), hashes[-1]) == (1024 // page_tokens, LAST[page_tokens])


@pytest.mark.parametrize("page_tokens", LAST)
def test_the_native_path_gives_the_same(page_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    native = library.loaded()
    if native is None:
        pytest.skip(f"the native library is not used: {library.state()}")
    monkeypatch.setattr(native, "has_sha", True)
    joined = hash_chain.chain(chunk_hash.token_bytes(TOKENS), 4 * page_tokens, b"", None)
    assert joined is not None and joined.hex() == "".join(sglang_hashes(TOKENS, page_tokens))


def test_a_salted_chain_of_sglang_goes_on_from_its_seed() -> None:
    """``storage_namespace_seed`` of SGLang is 32 bytes, in place of the previous digest of the first page."""
    seed = hashlib.sha256(b"sglang-cache-namespace-v1\x00\x01" + struct.pack("<Q", 6) + b"tenant").hexdigest()
    assert kvfs_hashes(TOKENS, 64, bytes.fromhex(seed)) == sglang_hashes(TOKENS, 64, seed)
    assert kvfs_hashes(TOKENS, 64, chunk_hash.tenant_seed("tenant")) != sglang_hashes(TOKENS, 64, seed)


def test_the_function_of_an_installed_sglang_gives_the_same() -> None:
    utils = pytest.importorskip(
        "sglang.srt.mem_cache.utils", reason="SGLang is not installed: make test-engines has it"
    )
    for page_tokens in LAST:
        for count in (0, 1, 2, 15):
            tokens = random.Random(count).choices(range(1 << 32), k=page_tokens * count)
            assert utils.get_hash_str(tokens, page_size=page_tokens) == kvfs_hashes(tokens, page_tokens)
    seed = utils.storage_namespace_seed(None, "tenant")
    assert utils.get_hash_str(TOKENS, seed, page_size=64) == kvfs_hashes(TOKENS, 64, bytes.fromhex(seed))
