"""Memory that objects come into: used again, bounded, and never by two at once."""

from __future__ import annotations

import errno
import mmap

import pytest

import kvfs
from kvfs.remote import rooms
from kvfs.remote.rooms import ROOMS, Rooms
from tests.stores import TINY_BYTES, restored, seeded, tiny, tokens_of, wait_until

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


class Watched(mmap.mmap):
    """A room that counts how often the kernel was told that it may take its pages."""

    rests = 0

    def madvise(self, *arguments: int) -> None:
        assert arguments == (mmap.MADV_FREE,)
        self.rests += 1
        super().madvise(*arguments)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in seconds, that rooms see."""
    now = [1000.0]
    monkeypatch.setattr("kvfs.remote.rooms.time.monotonic", lambda: now[0])
    return now


def test_rooms_rest_once_when_none_was_used_for_some_time(clock: list[float]) -> None:
    mine, room = Rooms(), Watched(-1, 1 << 20)
    mine.give(room)
    clock[0] += 9.0
    mine.rest(10.0)
    assert room.rests == 0
    clock[0] += 1.0
    mine.rest(10.0)
    mine.rest(10.0)
    assert room.rests == 1, "a room that rests is told so once"


@pytest.mark.parametrize("use", ["take", "give"])
def test_a_use_puts_the_rest_of_all_rooms_off(clock: list[float], use: str) -> None:
    mine, room = Rooms(), Watched(-1, 1 << 20)
    mine.give(room)
    clock[0] += 9.0
    if use == "take":
        mine.take(2 << 20)
    else:
        mine.give(mmap.mmap(-1, 1 << 20))
    clock[0] += 9.0
    mine.rest(10.0)
    assert room.rests == 0
    clock[0] += 1.0
    mine.rest(10.0)
    assert room.rests == 1


def test_a_room_that_rested_is_used_and_rests_again() -> None:
    mine, room = Rooms(), Watched(-1, 1 << 20)
    mine.give(room)
    mine.rest()
    assert mine.take(1 << 20) is room
    room[:3] = b"abc"
    mine.rest()
    assert (room.rests, room[:3]) == (1, b"abc"), "it is not idle"
    mine.give(room)
    mine.rest()
    assert room.rests == 2


def test_rooms_are_kept_ready_for_the_next_pull(
    here: kvfs.Store, there: kvfs.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To write to a room that rested takes twice as long."""
    room = Watched(-1, 32 << 20)
    monkeypatch.setattr(ROOMS, "_idle", [room])
    here.namespace("chat", tiny(), "1a").put(tokens_of(1, CHUNKS), seeded(1, CHUNKS * TINY_BYTES))
    assert here.push(["chat"]).objects
    assert there.pull(there.namespace("chat", tiny(), "1a"), tokens_of(1, CHUNKS)).stored == CHUNKS
    assert room in ROOMS._idle and room.rests == 0


def test_the_background_lets_rooms_rest(here: kvfs.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    here.namespace("chat", tiny(), "1a").put(tokens_of(1, 1), seeded(1, TINY_BYTES))  # services run from here on
    room = Watched(-1, 1 << 20)
    monkeypatch.setattr(ROOMS, "_idle", [room])
    monkeypatch.setattr(ROOMS, "_used_at", float("-inf"))
    here._shared.background.wake("rooms")
    wait_until(lambda: room.rests == 1)


def test_a_store_that_is_closed_lets_rooms_rest(here: kvfs.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    here.namespace("chat", tiny(), "1a").put(tokens_of(1, 1), seeded(1, TINY_BYTES))
    room = Watched(-1, 1 << 20)
    monkeypatch.setattr(ROOMS, "_idle", [])
    ROOMS.give(room)
    here.close()
    assert room.rests == 1


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


def test_a_pull_without_memory_for_objects_ends_and_says_so(
    here: kvfs.Store, there: kvfs.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.namespace("chat", tiny(), "1a").put(tokens_of(1, CHUNKS), seeded(1, CHUNKS * TINY_BYTES))
    assert here.push(["chat"]).objects
    other = there.namespace("chat", tiny(), "1a")

    def refuse(nbytes: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patched:
        patched.setattr(ROOMS, "take", refuse)
        done = there.pull(other, tokens_of(1, CHUNKS))
    assert done.failed and not done.stored and "Cannot allocate memory" in done.problems[0]
    assert there.pull(other, tokens_of(1, CHUNKS)).stored == CHUNKS


def test_the_memory_of_forks_is_given_back(
    here: kvfs.Store, there: kvfs.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of an object behind a fork has a name of its own, and is fetched by itself."""
    ns, other = (store.namespace("chat", tiny(), "1a") for store in (here, there))
    long, short = list(tokens_of(1, CHUNKS)), list(tokens_of(1, 20))
    ns.put(short, seeded(1, 20 * TINY_BYTES))
    assert here.push(["chat"]).stored == 20
    ns.put(long, seeded(1, CHUNKS * TINY_BYTES))
    assert here.push(["chat"]).stored == CHUNKS - 20
    taken, take = [], ROOMS.take

    def noted(nbytes: int) -> object:
        taken.append(take(nbytes))
        return taken[-1]

    monkeypatch.setattr(ROOMS, "_idle", [])
    monkeypatch.setattr(ROOMS, "take", noted)
    assert there.pull(other, long).stored == CHUNKS
    assert taken and {id(room) for room in ROOMS._idle} == {id(room) for room in taken}
    assert restored(other, long) == seeded(1, CHUNKS * TINY_BYTES)
