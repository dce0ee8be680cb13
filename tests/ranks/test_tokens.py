"""Copies of single tokens between ranks with token slots."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("triton", reason="ranks need the GPU transport")

import kvfs
from kvfs.errors import ConfigError
from kvfs.ranks import tokens
from tests.ranks.simulated import LAYOUT, SECONDS, Rank, closing, wait_until

SLOTS = 48


@pytest.fixture
def ranks(store: kvfs.Store, memory_path: Path) -> Iterator[list[Rank]]:
    """Two sources with random bytes, and the reader, the last one."""
    ns = store.namespace("model", LAYOUT, "1")
    made = [Rank(ns, n, 3, memory_path, seed=n + 1 if n < 2 else None, units=SLOTS, block=1) for n in range(3)]
    with closing(*made):
        assert made[2].group.wait_for_peers(2, SECONDS)
        yield made


def test_tokens_come_from_the_ranks_and_slots_that_the_router_names(ranks: list[Rank]) -> None:
    one, two, reader = ranks
    before = reader.device.launches
    event = reader.group.copy_tokens(np.array([1, 0, 0]), [7, 7, 40], (5, 0, 47))
    assert event is not None
    wait_until(event.query)
    assert reader.bytes([5]) == two.bytes([7])
    assert reader.bytes([0, 47]) == one.bytes([7, 40])
    assert set(reader.bytes(sorted({*range(SLOTS)} - {5, 0, 47}))) == {0xA5}
    assert reader.device.launches == before, "the kernels of pages take no part"
    assert reader.counters()["tokens_copied"] == 3


def test_the_own_gpu_may_be_a_source(ranks: list[Rank]) -> None:
    one, _, reader = ranks
    assert reader.group.copy_tokens([0], [3], [4]) is not None
    wait_until(lambda: reader.group.tables.table(2) is not None)
    wait_until(lambda: reader.group.wait_for_peers(2, SECONDS) and reader.group.copy_tokens([2], [4], [9]) is not None)
    assert reader.bytes([9]) == one.bytes([3])


def test_nothing_moves_from_a_rank_that_has_ended(ranks: list[Rank]) -> None:
    one, _, reader = ranks
    one.group.close()
    assert reader.group.copy_tokens([1, 0], [1, 1], [1, 2]) is None
    assert set(reader.bytes(range(SLOTS))) == {0xA5}


def test_copies_that_do_not_end_are_bounded(ranks: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    *_, reader = ranks
    monkeypatch.setattr(tokens, "WAITING_MAX", 0)
    assert reader.group.copy_tokens([0], [1], [1]) is None


@pytest.mark.parametrize(
    ("source_ranks", "source_slots", "target_slots", "what"),
    [
        ([3], [0], [0], "there are 3 ranks"), ([0], [SLOTS], [0], "source slot 48"), ([0], [0], [SLOTS], "48 slots"),
        ([0], [0, 1], [0], "source_slots"), ([0], [-1], [0], "source_slots"), ([0.5], [0], [0], "source_ranks"),
    ],
)  # fmt: skip
def test_wrong_slots_are_refused(
    ranks: list[Rank], source_ranks: list[int], source_slots: list[int], target_slots: list[int], what: str
) -> None:
    with pytest.raises(ConfigError, match=what):
        ranks[2].group.copy_tokens(source_ranks, source_slots, target_slots)
    assert set(ranks[2].bytes(range(SLOTS))) == {0xA5}


def test_engines_of_blocks_have_no_token_slots(store: kvfs.Store, memory_path: Path) -> None:
    rank = Rank(store.namespace("model", LAYOUT, "1"), 0, 2, memory_path)
    with closing(rank), pytest.raises(ConfigError, match="token slots"):
        rank.group.copy_tokens([0], [0], [1])


def test_a_peer_of_blocks_is_refused(store: kvfs.Store, memory_path: Path) -> None:
    ns = store.namespace("model", LAYOUT, "1")
    source, reader = Rank(ns, 0, 2, memory_path, seed=1), Rank(ns, 1, 2, memory_path, block=1)
    with closing(source, reader):
        assert reader.group.wait_for_peers(1, SECONDS)
        with pytest.raises(ConfigError, match="otherwise"):
            reader.group.copy_tokens([0], [0], [0])
