"""Pulls between ranks of one host over simulated devices."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="ranks need the GPU transport")

import kvfs
from kvfs.types import Tier
from tests.gpu.simulated import SimulatedDevice
from tests.ranks.simulated import BLOCK, LAYOUT, PAGE, Rank, closing, prompt

UNITS = [2 * i + 1 for i in range(12)]  # blocks of a prompt at the source
OTHERS = [30 - i for i in range(12)]  # and at the reader


@pytest.fixture
def ns(store: kvfs.Store) -> kvfs.Namespace:
    return store.namespace("model", LAYOUT, "1")


def pair(ns: kvfs.Namespace, folder: Path, **changes: object) -> tuple[Rank, Rank]:
    source = Rank(ns, 0, 2, folder, seed=1, **changes)  # type: ignore[arg-type]
    reader = Rank(ns, 1, 2, folder, **changes)  # type: ignore[arg-type]
    assert source.group.wait_for_peers(1, 20) and reader.group.wait_for_peers(1, 20)
    return source, reader


@pytest.mark.parametrize("interpreted", [False, True])
def test_a_prefix_is_pulled_from_the_rank_that_holds_it(ns: kvfs.Namespace, memory_path: Path, interpreted: bool) -> None:
    source = Rank(ns, 0, 2, memory_path, seed=1, device=SimulatedDevice(interpreted=interpreted))
    reader = Rank(ns, 1, 2, memory_path, device=SimulatedDevice(interpreted=interpreted))
    with closing(source, reader):
        assert reader.group.wait_for_peers(1, 20)
        source.publish(prompt(6), UNITS)
        plan = reader.group.longest(reader.pages(prompt(8)))
        assert (plan.tokens, plan.sources("full")) == (6 * PAGE, [0] * 6)
        result = reader.load(prompt(8), OTHERS)
        assert (result.tokens, result.pages, result.tiers) == (6 * PAGE, 6, {Tier.PEER: 6 * PAGE})
        assert reader.bytes(OTHERS) == source.bytes(UNITS)
        rest = sorted({*range(32)} - {*OTHERS})
        assert set(reader.bytes(rest)) == {0xA5}
