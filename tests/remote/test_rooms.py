"""Memory that objects come into: used again, bounded, and never by two at once."""

from __future__ import annotations

import pytest

import kvfs
from kvfs.remote import rooms
from kvfs.remote.rooms import ROOMS, Rooms
from tests.stores import TINY_BYTES, restored, seeded, tiny, tokens_of

CHUNKS = 100  # 4 objects


def test_a_room_that_was_given_back_is_taken_again() -> None:
    mine = Rooms()
    first, second = mine.take(5 << 20), mine.take(5 << 20)
    assert first is not second
    mine.give(first)
    mine.give(second)
    assert mine.take(5 << 20) is second, "the last one is in the caches"
    assert mine.take(9 << 20) is not first, "too small"
    assert mine.take(1) is first


def test_no_more_than_the_bound_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "IDLE_BYTES_MAX", 4 << 20)
    mine = Rooms()
    taken = [mine.take(1 << 20) for _ in range(6)]
    for room in taken:
        mine.give(room)
    assert mine._idle == taken[2:]
    mine.rest()
    assert mine.take(1) is taken[-1]


def test_pulls_use_the_same_rooms(here: kvfs.Store, there: kvfs.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    ns, other = (store.namespace("chat", tiny(), "1a") for store in (here, there))
    for seed in (1, 2):
        ns.put(tokens_of(seed, CHUNKS), seeded(seed, CHUNKS * TINY_BYTES))
    assert here.push(["chat"]).objects
    monkeypatch.setattr(ROOMS, "_idle", [])
    there.pull(other, tokens_of(1, CHUNKS))
    idle = list(ROOMS._idle)
    assert idle
    there.pull(other, tokens_of(2, CHUNKS))
    assert ROOMS._idle and set(map(id, ROOMS._idle)) >= set(map(id, idle))
    for seed in (1, 2):
        assert restored(other, tokens_of(seed, CHUNKS)) == seeded(seed, CHUNKS * TINY_BYTES)
