"""Encoded pages through the GPU transport over a simulated device: saved, loaded, together with raw ones, damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="the GPU transport needs triton")

import kvfs
from kvfs.format import codec
from kvfs.format import segment as fmt
from kvfs.pages.layout import Part
from kvfs.types import Tier
from tests.format.test_codec import entries_of, flip
from tests.gpu.test_gpu_io import LAYOUT, NOW, PAGE, SECONDS, Engine, attach, prompt, way
from tests.stores import counted

__all__ = ["way"]  # a fixture


def engine(seed: int) -> Engine:
    """Numbers of which four bits vary."""
    made = Engine()
    made.memory[...] = 0x3F80 + np.random.default_rng(seed).integers(0, 16, made.memory.shape, dtype="uint16")
    return made


def save(store: kvfs.Store, source: Engine, chunks: int, name: str) -> None:
    """Save the missing pages of a prompt, in a codec."""
    ns = store.namespace("model", LAYOUT, "1", codec=name)
    with attach(ns, source.kv, codec=codec.CODECS[name]) as io:
        result = io.save(ns.plan_save(prompt(chunks)), range(2 * chunks), NOW).wait(SECONDS)
        assert result is not None and not result.declined, result


@pytest.mark.parametrize("name", ["zstd", "planes"])
@pytest.mark.parametrize("layerwise", [False, True])
def test_what_was_saved_encoded_is_loaded(
    store: kvfs.Store, ns: kvfs.Namespace, way: dict[str, Any], name: str, layerwise: bool
) -> None:
    source, target = engine(1), Engine()
    save(store, source, 6, name)
    assert {e.codec for e in entries_of(store)} == {codec.CODECS[name]}
    with attach(ns, target.kv, **way) as io, ns.match(prompt(6)) as match:
        transfer = io.load(match, range(12), NOW, layerwise=layerwise)
        result = transfer.wait(SECONDS)
        assert result is not None and (result.tokens, result.pages, result.declined) == (6 * PAGE, 6, 0)
        assert result.tiers == {Tier.HOST: 6 * PAGE}
        assert all(transfer.layer_ready(layer).is_set() for layer in range(4))
    assert target.tokens(range(12)) == source.tokens(range(12))
    assert set(target.tokens(range(12, 32))) == {0xA5}
    with ns.match(prompt(6)) as match:
        by_host = bytearray(match.nbytes)
        assert ns.get(match, by_host) == 6


def test_raw_and_encoded_pages_of_one_prompt_are_loaded(
    store: kvfs.Store, ns: kvfs.Namespace, way: dict[str, Any]
) -> None:
    source, target = engine(1), Engine()
    for chunks, name in ((2, "raw"), (3, "planes"), (5, "raw"), (6, "zstd"), (8, "planes")):
        save(store, source, chunks, name)
    assert [e.codec for e in entries_of(store)] == [0, 0, 2, 0, 0, 1, 2, 2]
    with attach(ns, target.kv, **way) as io, ns.match(prompt(8)) as match:
        result = io.load(match, range(16), NOW, first_token=17).wait(SECONDS)
        assert result is not None and result.tokens == 8 * PAGE
    flat = target.memory[:, :16].reshape(4, 256, 2, 16)
    assert (flat[:, 17:] == source.memory[:, :16].reshape(4, 256, 2, 16)[:, 17:]).all()
    assert (flat[:, :17] == 0xA5A5).all()


@pytest.mark.parametrize("name", ["zstd", "planes"])
def test_a_flipped_bit_of_an_encoded_page_never_reaches_a_unit(
    store: kvfs.Store, ns: kvfs.Namespace, way: dict[str, Any], name: str
) -> None:
    source, target = engine(1), Engine()
    save(store, source, 4, name)
    flip(store, 2, lambda data: data.__setitem__(len(data) // 2, data[len(data) // 2] ^ 4))
    with attach(ns, target.kv, **way) as io, ns.match(prompt(4)) as match, counted(store) as moved:
        result = io.load(match, range(8), NOW).wait(SECONDS)
        assert result is not None and (result.tokens, result.reason) == (2 * PAGE, "unreadable")
        assert moved("pages_corrupt") == 1
    assert target.tokens(range(4)) == source.tokens(range(4))
    assert set(target.tokens(range(4, 6))) == {0xA5}, "unverified bytes reached a unit"
    with ns.match(prompt(4)) as match:
        assert match.tokens == 2 * PAGE, "the damaged page is still in the index"


def test_a_rank_loads_its_part_of_encoded_pages(store: kvfs.Store, ns: kvfs.Namespace, way: dict[str, Any]) -> None:
    source = engine(3)
    save(store, source, 3, "planes")
    assert {e.codec for e in entries_of(store)} == {fmt.CODEC_PLANES}
    upper = Engine(heads=(1, 1), layers=(2, 3))
    with attach(ns, upper.kv, **way) as io, ns.match(prompt(3), part=io.parts) as match:
        assert io.parts == {"full": Part(1, 1, 2, 2)}
        result = io.load(match, range(6), NOW).wait(SECONDS)
        assert result is not None and result.tokens == 3 * PAGE
    assert (upper.memory[:, :6] == source.memory[2:, :6, :, 1:2]).all()


def test_the_setting_of_a_namespace_reaches_the_transport(store: kvfs.Store, tmp_path: Path) -> None:
    ns = store.namespace("model", LAYOUT, "1", codec="planes")
    source = engine(4)
    with ns.attach(source.kv) as io:  # host memory
        result = io.save(ns.plan_save(prompt(2)), range(4)).wait(SECONDS)
        assert result is not None and result.pages == 2
    assert {e.codec for e in entries_of(store)} == {fmt.CODEC_PLANES}
