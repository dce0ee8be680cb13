"""Pulls between ranks of one host over simulated devices."""

from __future__ import annotations

import gc
import pickle
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="ranks need the GPU transport")

import kvfs
from kvfs.errors import ConfigError
from kvfs.kernels.driver import CudaError
from kvfs.ranks import RankGroup, RankTables, pull
from kvfs.ranks import group as rank_group
from kvfs.types import Tier, TransferState
from tests.gpu.simulated import Pending, SimulatedDevice
from tests.ranks.simulated import LAYOUT, NOW, PAGE, SECONDS, Rank, closing, prompt, wait_until

UNITS = [2 * i + 1 for i in range(12)]  # blocks of a prompt at the source
OTHERS = [30 - i for i in range(12)]  # and at the reader


@pytest.fixture
def ns(store: kvfs.Store) -> kvfs.Namespace:
    return store.namespace("model", LAYOUT, "1")


@pytest.fixture
def pair(ns: kvfs.Namespace, memory_path: Path) -> Iterator[tuple[Rank, Rank]]:
    """A source with random bytes, and a reader that reaches it."""
    source, reader = Rank(ns, 0, 2, memory_path, seed=1), Rank(ns, 1, 2, memory_path)
    with closing(source, reader):
        assert reader.group.wait_for_peers(1, SECONDS)
        yield source, reader


def kept(rank: Rank, units: list[int]) -> bool:
    """Whether all other units are as they were."""
    return set(rank.bytes(sorted({*range(rank.units)} - {*units}))) == {0xA5}


@pytest.mark.parametrize("interpreted", [False, True])
def test_a_prefix_is_pulled_from_the_rank_that_holds_it(
    ns: kvfs.Namespace, memory_path: Path, interpreted: bool
) -> None:
    source = Rank(ns, 0, 2, memory_path, seed=1, device=SimulatedDevice(interpreted=interpreted))
    reader = Rank(ns, 1, 2, memory_path, device=SimulatedDevice(interpreted=interpreted))
    with closing(source, reader):
        assert reader.group.wait_for_peers(1, SECONDS)
        source.publish(prompt(6), UNITS)
        plan = reader.group.longest(reader.pages(prompt(8)))
        assert (plan.tokens, plan.sources("full")) == (6 * PAGE, [0] * 6)
        result = reader.load(prompt(8), OTHERS)
        assert (result.tokens, result.pages, result.tiers) == (6 * PAGE, 6, {Tier.PEER: 6 * PAGE})
        assert reader.bytes(OTHERS) == source.bytes(UNITS)
        assert kept(reader, OTHERS)


@pytest.mark.parametrize(("here", "there"), [(16, 64), (64, 16), (1, 16), (16, 1), (8, 32)])
def test_ranks_may_differ_in_the_size_of_their_units(
    ns: kvfs.Namespace, memory_path: Path, here: int, there: int
) -> None:
    """Several pages of one unit, several units of one page, and token slots."""
    source = Rank(ns, 0, 2, memory_path, seed=1, units=512 // there, block=there)
    reader = Rank(ns, 1, 2, memory_path, units=512 // here, block=here)
    with closing(source, reader):
        assert reader.group.wait_for_peers(1, SECONDS)
        mine, theirs = list(range(256 // here))[::-1], list(range(256 // there))[::-1]
        source.publish(prompt(8), theirs)
        assert reader.load(prompt(8), mine).tiers == {Tier.PEER: 8 * PAGE}
        assert reader.tokens(mine, 8 * PAGE) == source.tokens(theirs, 8 * PAGE)


def test_one_plan_mixes_a_peer_the_store_and_the_own_gpu(pair: tuple[Rank, Rank], ns: kvfs.Namespace) -> None:
    source, reader = pair
    saved = source.io.save(ns.plan_save(prompt(6)), UNITS, NOW).wait(SECONDS)
    assert saved is not None and saved.pages == 6
    source.publish(prompt(3), UNITS[:6])
    plan = reader.group.longest(reader.pages(prompt(6)))
    assert plan.sources("full") == [0, 0, 0, None, None, None]
    result = reader.begin(plan, OTHERS).wait(SECONDS)
    assert result is not None and result.tokens == 6 * PAGE and result.pages == 6
    assert result.tiers == {Tier.PEER: 3 * PAGE, Tier.HOST: 3 * PAGE}
    assert reader.bytes(OTHERS) == source.bytes(UNITS)
    reader.publish(prompt(2), OTHERS[:4])
    wait_until(lambda: reader.group.tables.table(1) is not None)
    assert reader.group.longest(reader.pages(prompt(6))).sources("full") == [1, 1, 0, None, None, None]


def test_chunks_that_the_engine_has_are_not_moved(pair: tuple[Rank, Rank]) -> None:
    source, reader = pair
    source.publish(prompt(6), UNITS)
    plan = reader.group.longest(reader.pages(prompt(6)), first=2, leave=1)
    assert (plan.chunks, plan.sources("full")) == (5, [0, 0, 0])
    result = reader.begin(plan, OTHERS).wait(SECONDS)
    assert result is not None and (result.tokens, result.pages) == (5 * PAGE, 3)
    assert result.tiers == {Tier.DEVICE: 2 * PAGE, Tier.PEER: 3 * PAGE}
    assert kept(reader, OTHERS[4:10])


@pytest.mark.parametrize("block", [1, 16, 64])
def test_tokens_before_the_first_and_units_that_are_none_are_left_out(
    ns: kvfs.Namespace, memory_path: Path, block: int
) -> None:
    """Pages of which only some tokens move are verified where the peer keeps them."""
    source = Rank(ns, 0, 2, memory_path, seed=1, units=512 // block, block=block)
    reader = Rank(ns, 1, 2, memory_path, units=512 // block, block=block)
    with closing(source, reader):
        assert reader.group.wait_for_peers(1, SECONDS)
        theirs, mine = list(range(256 // block)), list(range(256 // block))[::-1]
        source.publish(prompt(8), theirs)
        first, left = PAGE + 5, 160 // block
        given = [*mine[:left], -1, *mine[left + 1 :]]
        result = reader.load(prompt(8), given, first_token=first)
        assert (result.tokens, result.pages) == (8 * PAGE, 8 - (2 if block > PAGE else 0))
        cells = reader.tokens(mine, 256), source.tokens(theirs, 256)
        size = len(cells[0]) // 4 // 256  # of a token in one layer
        for layer in range(4):
            for token in range(256):
                at = slice((layer * 256 + token) * size, (layer * 256 + token + 1) * size)
                moved = token >= first and token // block != left
                assert cells[0][at] == (cells[1][at] if moved else b"\xa5" * size), (layer, token)
        source.memory.reshape(4, 512, 2, 16)[2, 32, 1, 5] ^= 1  # page 1, which moves in part: a token that does not
        result = reader.load(prompt(8), given, first_token=first)
        assert (result.tokens, result.reason) == (PAGE, "unreadable")


def test_a_flipped_byte_in_the_memory_of_a_peer_ends_the_prefix_there(pair: tuple[Rank, Rank]) -> None:
    source, reader = pair
    source.publish(prompt(6), UNITS)
    source.memory[2, UNITS[7], 3, 1, 5] ^= 1  # page 3
    result = reader.load(prompt(6), OTHERS)
    assert (result.tokens, result.pages, result.reason) == (3 * PAGE, 5, "unreadable")
    assert reader.bytes(OTHERS[:6]) == source.bytes(UNITS[:6])
    assert reader.counters()["pages_pull_corrupt"] == 1


def test_a_page_that_was_retracted_is_not_found(pair: tuple[Rank, Rank]) -> None:
    source, reader = pair
    source.publish(prompt(6), UNITS)
    assert source.group.retract([UNITS[9]])
    assert reader.group.longest(reader.pages(prompt(6))).tokens == 4 * PAGE


def test_a_page_that_is_retracted_between_the_lookup_and_the_load_is_not_loaded(pair: tuple[Rank, Rank]) -> None:
    source, reader = pair
    source.publish(prompt(6), UNITS)
    plan = reader.group.longest(reader.pages(prompt(6)))
    source.group.retract([UNITS[9]])
    result = reader.begin(plan, OTHERS).wait(SECONDS)
    assert result is not None and result.tokens == 4 * PAGE
    assert set(reader.bytes(OTHERS[8:10])) == {0xA5}
    assert reader.counters()["pages_retracted"] == 1


def test_units_that_are_reused_while_they_are_read_do_not_count(pair: tuple[Rank, Rank]) -> None:
    """The source may not wait: it retracts a page in the middle of a pull, whose bytes are still the right ones."""
    source, reader = pair
    source.publish(prompt(6), UNITS)
    asked: list[bool] = []

    def reuse() -> None:
        if not asked:
            asked.append(source.group.retract([UNITS[9]]))

    reader.device.before_launch = reuse
    result = reader.load(prompt(6), OTHERS)
    assert asked == [False], "a lease on these units is in force"
    assert result.tokens == 4 * PAGE and source.counters()["units_reused_under_lease"] == 1
    assert source.group.retract([UNITS[9]], timeout=SECONDS), "the lease ends with the pull"


def test_an_allocator_that_waits_gets_its_units_when_the_pull_ends(pair: tuple[Rank, Rank]) -> None:
    source, reader = pair
    source.publish(prompt(6), UNITS)
    table = reader.group.tables.table(0)
    assert table is not None
    plan = reader.group.longest(reader.pages(prompt(6)))
    found = plan.peers[0].groups["full"][1]
    lease = table.lease({"full": found}, 0.05)
    assert lease is not None
    assert not source.group.retract(UNITS[:2])
    assert source.group.retract(UNITS[2:4], timeout=SECONDS), "a lease ends at its deadline, whatever its owner does"
    table.end_lease(lease)


def test_leases_are_bounded_and_a_pull_without_one_moves_nothing(
    pair: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, reader = pair
    source.publish(prompt(6), UNITS)
    table = reader.group.tables.table(0)
    assert table is not None
    plan = reader.group.longest(reader.pages(prompt(6)))
    found = plan.peers[0].groups["full"][1]
    leases = [table.lease({"full": found}, 60.0) for _ in range(64)]
    assert None not in leases and table.lease({"full": found}, 60.0) is None
    result = reader.begin(plan, OTHERS).wait(SECONDS)
    assert result is not None and result.pages == 0 and kept(reader, [])
    assert reader.counters()["pulls_without_lease"] == 1
    for lease in leases:
        assert lease is not None
        table.end_lease(lease)
    assert reader.load(prompt(6), OTHERS).pages == 6


def test_a_rank_that_has_ended_is_forgotten_and_one_that_comes_back_is_found(
    pair: tuple[Rank, Rank], ns: kvfs.Namespace, memory_path: Path
) -> None:
    source, reader = pair
    source.publish(prompt(6), UNITS)
    plan = reader.group.longest(reader.pages(prompt(6)))
    source.close()
    result = reader.begin(plan, OTHERS).wait(SECONDS)
    assert result is not None and result.pages == 0
    reader.group.wait_for_peers(1, 0.0)
    wait_until(lambda: not reader.group.peers)
    assert reader.group.longest(reader.pages(prompt(6))).tokens == 0
    wait_until(lambda: not reader.device.opened)
    again = Rank(ns, 0, 2, memory_path, seed=2)
    with closing(again):
        assert reader.group.wait_for_peers(1, SECONDS)
        again.publish(prompt(6), UNITS)
        assert reader.load(prompt(6), OTHERS).pages == 6
        assert reader.bytes(OTHERS) == again.bytes(UNITS)


def test_peers_that_are_not_reached_are_counted_and_the_store_serves(ns: kvfs.Namespace, memory_path: Path) -> None:
    source, reader = Rank(ns, 0, 2, memory_path, seed=1), Rank(ns, 1, 2, memory_path, units=32)
    reader.device.reaches_peers = False
    with closing(source, reader):
        saved = source.io.save(ns.plan_save(prompt(6)), UNITS, NOW).wait(SECONDS)
        assert saved is not None and saved.pages == 6
        source.publish(prompt(6), UNITS)
        assert not reader.group.wait_for_peers(1, 0.2)
        wait_until(lambda: reader.counters().get("peers_unreachable", 0) == 1)
        result = reader.load(prompt(6), OTHERS)
        assert result.tiers == {Tier.HOST: 6 * PAGE}
        assert reader.bytes(OTHERS) == source.bytes(UNITS)


def test_memory_without_handles_is_not_offered_and_its_rank_still_pulls(
    ns: kvfs.Namespace, memory_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = Rank(ns, 0, 2, memory_path, seed=1)
    reader = Rank(ns, 1, 2, memory_path, shared=False)
    with closing(source, reader):
        assert "rank 1 cannot offer its memory" in caplog.text
        assert reader.group.wait_for_peers(1, SECONDS)
        source.publish(prompt(6), UNITS)
        assert reader.load(prompt(6), OTHERS).tiers == {Tier.PEER: 6 * PAGE}
        assert not source.group.wait_for_peers(1, 0.2)


def test_a_plan_is_made_in_one_process_and_loaded_in_another(pair: tuple[Rank, Rank], memory_path: Path) -> None:
    source, reader = pair
    source.publish(prompt(6), UNITS)
    tables = RankTables(reader.io.namespace, LAYOUT, reader.io.parts, 2, directory=str(memory_path))
    plan = tables.longest(reader.pages(prompt(6)), rank=1)
    tables.close()
    result = reader.begin(pickle.loads(pickle.dumps(plan)), OTHERS).wait(SECONDS)
    assert result is not None and result.pages == 6


def test_what_is_retracted_before_it_is_summed_is_not_published(pair: tuple[Rank, Rank]) -> None:
    source, reader = pair
    late = Pending()
    hashes = list(source.ns.prompt(prompt(6)).hashes)
    source.group._publications.put(lambda: late.happened.wait(SECONDS) and None)
    assert source.group.publish(hashes, UNITS, NOW)
    source.group.retract(UNITS[4:6])
    late.happened.set()
    wait_until(lambda: source.counters().get("pages_published", 0) == 6)
    assert reader.group.longest(reader.pages(prompt(6))).tokens == 2 * PAGE


def test_units_that_get_another_prompt_lose_the_first_one(pair: tuple[Rank, Rank]) -> None:
    source, reader = pair
    source.publish(prompt(6), UNITS)
    source.publish(prompt(2, first=5000), UNITS[6:10])
    assert reader.group.longest(reader.pages(prompt(6))).tokens == 3 * PAGE
    assert reader.group.longest(reader.pages(prompt(2, first=5000))).tokens == 2 * PAGE


def test_the_table_holds_every_page_that_the_units_can_hold(ns: kvfs.Namespace, memory_path: Path) -> None:
    source = Rank(ns, 0, 1, memory_path, seed=1, units=2048)
    with closing(source):
        source.publish(prompt(1024), list(range(2048)))
        assert source.group.longest(source.pages(prompt(1024))).tokens == 1024 * PAGE


def test_a_cancelled_pull_moves_no_byte_afterwards(pair: tuple[Rank, Rank]) -> None:
    source, reader = pair
    source.publish(prompt(6), UNITS)
    plan = reader.group.longest(reader.pages(prompt(6)))
    late = Pending()
    transfer = reader.group.load(plan, OTHERS, late)
    assert transfer.cancel(SECONDS)
    assert transfer.wait(SECONDS) is not None and transfer.state is TransferState.CANCELLED
    late.happened.set()
    assert kept(reader, [])


def test_a_pull_whose_event_does_not_come_ends_at_its_deadline(pair: tuple[Rank, Rank]) -> None:
    source, reader = pair
    source.publish(prompt(6), UNITS)
    plan = reader.group.longest(reader.pages(prompt(6)))
    transfer = reader.group.load(plan, OTHERS, Pending(), deadline=0.05)
    result = transfer.wait(SECONDS)
    assert result is not None and (result.pages, result.reason) == (0, "deadline")


def test_a_pull_behind_one_that_waits_ends_at_its_own_deadline(pair: tuple[Rank, Rank]) -> None:
    source, reader = pair
    source.publish(prompt(6), UNITS)
    plan = reader.group.longest(reader.pages(prompt(6)))
    late = Pending()
    first = reader.group.load(plan, OTHERS, late)
    second = reader.group.load(plan, OTHERS, Pending(), deadline=0.05)
    result = second.wait(SECONDS)
    assert result is not None and (result.pages, result.reason) == (0, "deadline")
    assert first.result is None and kept(reader, [])
    late.happened.set()
    assert first.wait(SECONDS) is not None and reader.bytes(OTHERS) == source.bytes(UNITS)


def test_an_error_of_the_driver_ends_one_pull_and_not_the_next(pair: tuple[Rank, Rank]) -> None:
    source, reader = pair
    source.publish(prompt(6), UNITS)
    plan = reader.group.longest(reader.pages(prompt(6)))
    reader.device.fails_at = reader.device.launches + 1
    failing = reader.begin(plan, OTHERS)
    assert failing.wait(SECONDS) is not None
    assert failing.state is TransferState.FAILED and isinstance(failing.error, CudaError)
    reader.device.fails_at = -1
    assert reader.load(prompt(6), OTHERS).pages == 6


def test_a_large_pull_is_enqueued_by_a_thread(pair: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    source, reader = pair
    monkeypatch.setattr(rank_group, "INLINE_BYTES", 1)
    source.publish(prompt(6), UNITS)
    assert reader.load(prompt(6), OTHERS).pages == 6
    assert reader.bytes(OTHERS) == source.bytes(UNITS)


def test_a_pull_whose_source_was_killed_does_not_begin(
    pair: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, not when the reader next looks at who is alive."""
    source, reader = pair
    source.publish(prompt(6), UNITS)
    plan = reader.group.longest(reader.pages(prompt(6)))
    monkeypatch.setattr(reader.group, "_look_soon", lambda: None)
    source.group._own._file.close()  # as the kernel does; nothing is retracted
    result = reader.begin(plan, OTHERS).wait(SECONDS)
    assert result is not None and result.pages == 0 and kept(reader, [])
    assert reader.counters()["pulls_without_peer"] == 1


def test_a_table_is_not_closed_while_a_pull_asks_whether_its_rank_is_alive(
    pair: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of its file may be that of another one then."""
    table = pair[1].group.tables.table(0)
    assert table is not None
    closing, flock = threading.Thread(target=table.close), table._files.flock

    def slow(fd: int, operation: int) -> bool:
        closing.start()
        closing.join(0.02)
        return flock(fd, operation)

    monkeypatch.setattr(table._files, "flock", slow)
    assert table.alive()
    closing.join(SECONDS)
    assert not table.alive()


def test_a_pull_under_way_when_its_source_closes_does_not_count(pair: tuple[Rank, Rank]) -> None:
    """The engine of the source may free its memory as soon as ``close`` has returned."""
    source, reader = pair
    source.publish(prompt(6), UNITS)
    reader.device.before_launch = source.group.close
    result = reader.load(prompt(6), OTHERS)
    assert (result.tokens, result.pages, result.reason) == (0, 0, "unreadable")


def test_what_is_summed_while_a_rank_closes_is_not_published(pair: tuple[Rank, Rank]) -> None:
    source, _ = pair
    source.group._publications.put(lambda: source.group._publisher.close())
    assert source.group.publish(list(source.ns.prompt(prompt(6)).hashes), UNITS, NOW)
    source.group._publications.put(lambda: None)
    source.group._publications.close(SECONDS)
    assert source.counters().get("pages_published", 0) == 0


@pytest.fixture
def idle(pair: tuple[Rank, Rank]) -> Iterator[threading.Event]:
    """The reader's thread of pulls runs nothing until it is set."""
    go = threading.Event()
    pair[1].group._pulls.put(lambda: go.wait(SECONDS) and None)
    yield go
    go.set()


def test_a_waiter_finishes_a_pull_without_a_turn_of_another_thread(
    pair: tuple[Rank, Rank], idle: threading.Event
) -> None:
    source, reader = pair
    source.publish(prompt(6), UNITS)
    result = reader.load(prompt(6), OTHERS)
    assert (result.tokens, result.pages) == (6 * PAGE, 6) and reader.bytes(OTHERS) == source.bytes(UNITS)
    assert source.group.retract(UNITS), "its lease has ended"
    idle.set()
    wait_until(lambda: not reader.group._pulls.waiting)
    assert reader.counters()["pages_pulled"] == 6, "once"


def test_a_waiter_with_a_callback_leaves_the_end_to_the_thread(pair: tuple[Rank, Rank], idle: threading.Event) -> None:
    source, reader = pair
    source.publish(prompt(6), UNITS)
    names: list[str] = []
    plan = reader.group.longest(reader.pages(prompt(6)))
    transfer = reader.begin(plan, OTHERS, on_done=lambda _: names.append(threading.current_thread().name))
    assert transfer.wait(0.01) is None
    idle.set()
    assert transfer.wait(SECONDS) is not None and names == ["kvfs-rank-pull-0"]


def test_a_waiter_gives_up_at_its_timeout(
    pair: tuple[Rank, Rank], idle: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, reader = pair
    source.publish(prompt(6), UNITS)
    with monkeypatch.context() as patch:
        patch.setattr(pull.Pull, "ended", lambda _: False)
        transfer = reader.begin(reader.group.longest(reader.pages(prompt(6))), OTHERS)
        assert transfer.wait(0.01) is None and transfer.result is None
    assert transfer.wait(SECONDS) is not None and reader.bytes(OTHERS) == source.bytes(UNITS)


def test_two_waiters_end_a_pull_once(pair: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    source, reader = pair
    source.publish(prompt(6), UNITS)
    both, settle, calls = threading.Barrier(2, timeout=SECONDS), pull.Pull.settle, list[str]()
    ended = pull.Pull.ended

    def together(self: Any) -> bool:
        if threading.current_thread().name.startswith("waiter"):
            both.wait()
        return ended(self)

    monkeypatch.setattr(pull.Pull, "ended", together)
    monkeypatch.setattr(pull.Pull, "settle", lambda self, t: (calls.append(""), settle(self, t)))
    gate = threading.Event()
    reader.group._pulls.put(lambda: gate.wait(SECONDS) and None)
    transfer = reader.begin(reader.group.longest(reader.pages(prompt(6))), OTHERS)
    waiters = [threading.Thread(target=transfer.wait, args=(SECONDS,), name=f"waiter {i}") for i in range(2)]
    for waiter in waiters:
        waiter.start()
    for waiter in waiters:
        waiter.join(SECONDS)
    gate.set()
    assert transfer.result is not None and transfer.result.pages == 6 and len(calls) == 1


def test_an_interrupt_anywhere_in_the_end_by_a_waiter_has_the_thread_do_it_again(pair: tuple[Rank, Rank]) -> None:
    """With a page that is wrong: it must not count, wherever the interrupt strikes."""
    source, reader = pair
    source.publish(prompt(2), UNITS[:4])
    source.memory[2, UNITS[3], 3, 1, 5] ^= 1  # page 1
    plan = reader.group.longest(reader.pages(prompt(2)))
    struck = 0
    while True:
        lines, go = Interrupt(after=struck), threading.Event()
        reader.group._pulls.put(lambda go=go: go.wait(SECONDS) and None)
        transfer = reader.begin(plan, OTHERS)
        try:
            with lines:
                assert transfer.wait(SECONDS) is not None
        except KeyboardInterrupt:
            struck += 1
        go.set()
        result = transfer.wait(5.0)
        assert result is not None and (result.tokens, result.pages, result.reason) == (PAGE, 1, "unreadable"), lines.at
        assert transfer.state is TransferState.PARTIAL, lines.at
        if lines.after >= 0:
            break
    assert struck > 50, "that many places were tried"


class Interrupt:
    """A KeyboardInterrupt in this thread behind so many calls in the end of a pull: there a signal handler runs."""

    def __init__(self, after: int) -> None:
        self.after, self.at = after, ""

    def __enter__(self) -> None:
        gc.disable()  # what others do at a collection is no part of the end
        sys.setprofile(self._event)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        gc.enable()

    def _event(self, frame: Any, event: str, _: Any) -> None:
        above = frame
        while above is not None and above.f_code.co_name != "_settle_and_end":
            above = above.f_back
        if above is not None and event in ("call", "return", "c_return"):
            self.after -= 1
            if self.after == -1:
                self.at = f"{event}, {frame.f_code.co_filename}:{frame.f_lineno}"
                raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 2}, "rank is 2: pass 0 to 1"),
        ({"ranks": 65}, "ranks is 65: pass how many there are, 1 to 64"),
        ({"directory": "/nonexistent"}, "/nonexistent cannot be opened"),
        ({"rank": 0}, "belongs to a process that is alive: pass another rank"),
    ],
)
def test_wrong_settings_are_refused(
    pair: tuple[Rank, Rank], memory_path: Path, change: dict[str, Any], message: str
) -> None:
    settings: dict[str, Any] = {"rank": 1, "ranks": 2, "directory": str(memory_path), "name": "", **change}
    with pytest.raises(ConfigError, match=message):
        RankGroup(pair[0].io, settings.pop("rank"), settings.pop("ranks"), **settings)


def test_a_damaged_table_of_a_peer_is_no_peer(ns: kvfs.Namespace, memory_path: Path) -> None:
    source = Rank(ns, 0, 2, memory_path, seed=1)
    with closing(source):
        source.publish(prompt(6), UNITS)
        path = next(p for p in memory_path.iterdir() if p.name.startswith("kvfs-ranks-") and p.name.endswith("-0"))
        whole = np.fromfile(path, dtype="uint8")
        dice = np.random.default_rng(1)
        for _ in range(40):
            damaged = whole.copy()
            damaged[dice.integers(0, 900, 3)] = dice.integers(0, 256, 3, dtype="uint8")
            with open(path, "r+b") as file:
                file.write(damaged.tobytes())
            tables = RankTables(ns.identity.digest, LAYOUT, source.io.parts, 2, directory=str(memory_path))
            plan = tables.longest(source.pages(prompt(6)))
            assert plan.tokens in (0, 6 * PAGE)
            tables.close()
        with open(path, "r+b") as file:
            file.write(whole.tobytes())


def test_ranks_need_the_native_library(ns: kvfs.Namespace, memory_path: Path, python_only: None) -> None:
    with pytest.raises(ConfigError, match="ranks need the native library"):
        Rank(ns, 0, 2, memory_path)
