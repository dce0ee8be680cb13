"""ChunkHashCache: whatever is remembered, the hashes are those of the whole prompt."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvfs.pages.chunk_hash_cache
from kvfs.pages.chunk_hash import TOKEN_BYTES, chain, tenant_seed
from kvfs.pages.chunk_hash_cache import BYTES_MAX, HASH_COST, PROMPTS, Chain, ChunkHashCache

SEED, PAGE = tenant_seed("tenant"), 4


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each call of ``chain``."""
    calls: list[int] = []

    def counted(tokens: bytes, *args: Any) -> list[bytes]:
        calls.append(len(tokens) // TOKEN_BYTES)
        return chain(tokens, *args)

    monkeypatch.setattr(kvfs.pages.chunk_hash_cache, "chain", counted)
    return calls


def hashes(chains: ChunkHashCache, tokens: bytes, page: int, seed: bytes) -> list[bytes]:
    return Chain(chains, tokens, page, seed).all()


def ids(*parts: tuple[int, int]) -> bytes:
    """``count`` tokens that begin with ``first``, and so on."""
    return b"".join(array("I", range(first, first + count)).tobytes() for first, count in parts)


@given(st.lists(st.lists(st.integers(0, 1), max_size=40), max_size=30), st.data())
@settings(max_examples=200)
def test_prompts_that_share_whatever_they_share_have_the_hashes_of_the_whole(
    prompts: list[list[int]], data: st.DataObject
) -> None:
    chains = ChunkHashCache()
    for prompt in prompts:
        if data.draw(st.booleans()):
            prompt = [*data.draw(st.sampled_from(prompts)), *prompt]  # a longer one, or the next turn
        tokens = array("I", prompt).tobytes()
        page, seed = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([SEED, tenant_seed("another")]))
        assert hashes(chains, tokens, page, seed) == chain(tokens, page, seed)


def test_only_what_is_new_is_hashed(hashed: list[int]) -> None:
    chains = ChunkHashCache()
    turns = [ids((0, 100)), ids((0, 100)), ids((0, 230)), ids((0, 60)), ids((0, 130), (9000, 60)), ids((0, 230))]
    for tokens in turns:
        assert hashes(chains, tokens, PAGE, SEED) == chain(tokens, PAGE, SEED)
    assert hashed == [100, 128, 60]  # 100 + 128 of 230, which make whole chunks; 128 of the fork's 190 are known


def test_a_request_is_hashed_once_while_many_others_are_under_way(hashed: list[int]) -> None:
    chains, requests = ChunkHashCache(), [ids((0, 400), (1000 * n, 200)) for n in range(1, PROMPTS + 1)]
    for tokens in requests:
        hashes(chains, tokens, PAGE, SEED)
    assert sum(hashed) == 400 + 200 * PROMPTS
    for tokens in requests:
        hashes(chains, tokens + ids((7, 8)), PAGE, SEED)  # with what was computed for it
    assert sum(hashed) == 400 + 208 * PROMPTS


def test_what_is_remembered_is_bounded() -> None:
    chains = ChunkHashCache()
    for n in range(3 * PROMPTS):
        hashes(chains, ids((1000 * n, 4 * PAGE)), PAGE, SEED)
    assert len(chains._known) == PROMPTS
    large = BYTES_MAX // 3 // (PAGE * TOKEN_BYTES + HASH_COST) * PAGE
    for n in range(5):
        hashes(chains, ids((10_000_000 * n, large)), PAGE, SEED)
        assert sum(len(one.tokens) + HASH_COST * len(one.hashes) for one in chains._known) <= BYTES_MAX
    before = chains._known
    assert len(before) == 3
    whole = ids((0, 4 * large))
    assert hashes(chains, whole, PAGE, SEED) == chain(whole, PAGE, SEED)
    assert chains._known == before


def test_nothing_is_remembered_of_prompts_without_a_whole_chunk() -> None:
    chains = ChunkHashCache()
    assert hashes(chains, b"", PAGE, SEED) == [] == hashes(chains, ids((1, PAGE - 1)), PAGE, SEED) and not chains._known


def test_a_conversation_is_remembered_as_one_prompt() -> None:
    chains = ChunkHashCache()
    for turn in range(1, 50):
        hashes(chains, ids((0, turn * PAGE)), PAGE, SEED)
    assert [one.tokens for one in chains._known] == [ids((0, 49 * PAGE))]
