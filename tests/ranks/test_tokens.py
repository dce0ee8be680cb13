"""Copies of single tokens between ranks with token slots."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("triton", reason="ranks need the GPU transport")

import kvfs
from kvfs.errors import ConfigError
from kvfs.kernels.driver import CudaError
from kvfs.ranks import tokens
from kvfs.ranks.shared_files import SLOTS as LEASES
from tests.gpu.simulated import Pending
from tests.ranks.simulated import LAYOUT, SECONDS, Rank, closing, prompt, wait_until

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
    copy = reader.group.copy_tokens(np.array([1, 0, 0]), [7, 7, 40], (5, 0, 47))
    assert copy is not None and copy.arrived(SECONDS) == b"\1\1\1" and copy.event.query()
    assert reader.bytes([5]) == two.bytes([7])
    assert reader.bytes([0, 47]) == one.bytes([7, 40])
    assert set(reader.bytes(sorted({*range(SLOTS)} - {5, 0, 47}))) == {0xA5}
    assert reader.device.launches == before, "the kernels of pages take no part"
    assert reader.counters()["tokens_copied"] == 3


def test_the_own_gpu_may_be_a_source(ranks: list[Rank]) -> None:
    one, _, reader = ranks
    first = reader.group.copy_tokens([0], [3], [4])
    assert first is not None and first.arrived(SECONDS) == b"\1"
    wait_until(lambda: reader.group.tables.table(2) is not None)
    wait_until(lambda: reader.group.wait_for_peers(2, SECONDS) and reader.group.copy_tokens([2], [4], [9]) is not None)
    assert reader.bytes([9]) == one.bytes([3])


def test_nothing_moves_from_a_rank_that_has_ended(ranks: list[Rank]) -> None:
    one, _, reader = ranks
    one.group.close()
    assert reader.group.copy_tokens([1, 0], [1, 1], [1, 2]) is None
    assert set(reader.bytes(range(SLOTS))) == {0xA5}


@pytest.fixture
def pending(ranks: list[Rank], monkeypatch: pytest.MonkeyPatch) -> Iterator[Pending]:
    """The end of the copies that the reader begins."""
    event = Pending()
    monkeypatch.setattr(ranks[2].group._lane.dma, "record", lambda *_: event)
    yield event
    event.happened.set()


def test_a_source_keeps_the_slots_while_they_are_read(ranks: list[Rank], pending: Pending) -> None:
    one, two, reader = ranks
    copy = reader.group.copy_tokens([0, 1], [7, 7], [1, 2])
    assert copy is not None and copy.arrived() is None
    assert one.group.retract([6, 8]), "no lease on these"
    assert not one.group.retract([7]) and not two.group.retract([5, 7], timeout=0.01)
    pending.happened.set()
    assert copy.arrived(SECONDS) is not None
    assert one.group.retract([7]) and two.group.retract([7])


def test_a_token_whose_slot_is_retracted_while_it_is_read_does_not_count(ranks: list[Rank], pending: Pending) -> None:
    one, two, reader = ranks
    copy = reader.group.copy_tokens([0, 1, 0, 0], [7, 7, 8, 9], [1, 2, 3, 4])
    assert copy is not None
    one.group.retract([9, 7])
    two.group.retract([8])
    pending.happened.set()
    assert copy.arrived(SECONDS) == b"\0\1\1\0"
    assert (reader.counters()["tokens_copied"], reader.counters()["tokens_retracted"]) == (2, 2)


def test_slots_that_are_published_again_while_they_are_read_do_not_count(ranks: list[Rank], pending: Pending) -> None:
    one, _, reader = ranks
    copy = reader.group.copy_tokens([0, 0], [31, 32], [1, 2])
    assert copy is not None
    one.publish(prompt(1), range(32))
    pending.happened.set()
    assert copy.arrived(SECONDS) == b"\0\1"


def test_what_was_retracted_before_does_not_matter(ranks: list[Rank]) -> None:
    one, _, reader = ranks
    assert one.group.retract([7])
    copy = reader.group.copy_tokens([0], [7], [1])
    assert copy is not None and copy.arrived(SECONDS) == b"\1"


def test_a_lease_ends_with_the_copies_though_nothing_asks(ranks: list[Rank], pending: Pending) -> None:
    one, _, reader = ranks
    assert reader.group.copy_tokens([0], [7], [1]) is not None
    assert not one.group.retract([7])
    pending.happened.set()
    assert one.group.retract([7], timeout=4.0), "before the deadline of the lease"


def test_a_lease_has_a_deadline(ranks: list[Rank], pending: Pending, monkeypatch: pytest.MonkeyPatch) -> None:
    one, _, reader = ranks
    monkeypatch.setattr(tokens, "LEASE_SECONDS", 0.001)
    copy = reader.group.copy_tokens([0, 0], [7, 8], [1, 2])
    assert one.group.retract([7], timeout=SECONDS) and copy is not None
    assert copy.arrived() is None, "they have not ended"
    reader.group._pulls.put(pending.happened.set)  # the thread of pulls waits no longer than that
    assert copy.arrived(SECONDS) == b"\0\1"


def test_nothing_counts_of_a_source_that_closes_while_it_is_read(ranks: list[Rank], pending: Pending) -> None:
    one, _, reader = ranks
    copy = reader.group.copy_tokens([0, 1], [7, 7], [1, 2])
    one.group.close()
    pending.happened.set()
    assert copy is not None and copy.arrived(SECONDS) == b"\0\1"


def test_nothing_moves_without_a_lease(ranks: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, reader = ranks
    table = reader.group.tables.table(1)
    assert table is not None
    for _ in range(LEASES):
        assert table.lease_slots(array("I", [9]), SECONDS) is not None
    assert reader.group.copy_tokens([0, 1], [7, 7], [1, 2]) is None
    assert reader.counters()["pulls_without_lease"] == 1
    assert one.group.retract([7]), "the lease on the other source was given back"
    assert not two.group.retract([9])
    assert set(reader.bytes(range(SLOTS))) == {0xA5}


def test_a_failed_launch_leaves_no_lease(ranks: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    one, _, reader = ranks

    def fails(*_: object) -> None:
        raise CudaError("record: no device")

    monkeypatch.setattr(reader.group._lane.dma, "record", fails)
    with pytest.raises(CudaError):
        reader.group.copy_tokens([0], [7], [1])
    assert one.group.retract([7])


def test_nothing_counts_when_the_gpu_has_failed(ranks: list[Rank], pending: Pending) -> None:
    _, _, reader = ranks
    copy = reader.group.copy_tokens([0], [7], [1])

    def fails() -> bool:
        raise CudaError("query: device lost")

    pending.query = fails  # type: ignore[method-assign]
    assert copy is not None and copy.arrived(SECONDS) == b"\0"


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


@pytest.mark.parametrize(("number", "other"), [(1, "99"), (0, "9" * 5)])
def test_a_peer_whose_table_has_wrong_numbers_of_slots_is_not_reached(
    store: kvfs.Store, memory_path: Path, number: int, other: str
) -> None:
    ns = store.namespace("model", LAYOUT, "1")
    source = Rank(ns, 0, 2, memory_path, seed=1, units=SLOTS, block=1)
    with closing(source):
        path = next(p for p in memory_path.iterdir() if p.name.startswith("kvfs-ranks-") and p.name.endswith("-0"))
        table = path.read_bytes()
        found = re.search(rb'"token_slots": \[(\d+), (\d+)\]', table)
        assert found is not None
        wrong = [*found.groups()]
        wrong[number] = other.encode()
        text = b'"token_slots":[%b,%b]' % (wrong[0], wrong[1])
        start, end = found.span()
        with path.open("r+b") as file:
            file.seek(start)
            file.write(text.ljust(end - start))
        reader = Rank(ns, 1, 2, memory_path, units=SLOTS, block=1)
        with closing(reader):
            reader.group._look_around()
            assert reader.group.peers == []
            assert reader.group.copy_tokens([0], [1], [1]) is None


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
