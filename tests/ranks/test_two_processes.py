"""Two ranks in two processes, one of which is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="ranks need the GPU transport")

import kvfs
from kvfs.ranks.tokens import TokenCopy
from kvfs.types import Tier
from tests.gpu.simulated import Pending
from tests.ranks.simulated import BLOCK, LAYOUT, SECONDS, Rank, closing, prompt

UNITS = [2 * i + 1 for i in range(12)]
OTHERS = [30 - i for i in range(12)]


class Source:
    """A child process with rank 0. Of blocks: it has published six pages. Of slots: it retracts what it is told."""

    def __init__(self, path: Path, folder: Path, *, block: int = BLOCK) -> None:
        ready, told = os.pipe()
        asked, self._ask = os.pipe()
        self._answer, answers = os.pipe()
        self.pid = os.fork()  # of a process that has no store yet
        if not self.pid:
            with contextlib.suppress(BaseException):
                store = kvfs.open(path, capacity="64MiB")
                ns = store.namespace("model", LAYOUT, "1")
                rank = Rank(ns, 0, 2, folder, seed=1, block=block)
                if block == BLOCK:
                    rank.publish(prompt(6), UNITS)
                os.write(told, rank.bytes(UNITS))
                os.close(told)
                while slot := os.read(asked, 1):
                    os.write(answers, bytes([rank.group.retract(list(slot), timeout=0.01)]))
            os._exit(1)
        for mine in (told, asked, answers):
            os.close(mine)
        with open(ready, "rb") as pipe:
            self.bytes = pipe.read()

    def retract(self, slot: int) -> bool:
        """Whether no peer reads the slot any more."""
        os.write(self._ask, bytes([slot]))
        answer = os.read(self._answer, 1)
        assert answer, "the source has ended"
        return answer == b"\1"

    def close(self) -> None:
        self.kill()
        for mine in (self._ask, self._answer):
            os.close(mine)

    def kill(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0


@pytest.fixture
def source(store_path: Path, memory_path: Path) -> Iterator[Source]:
    child = Source(store_path, memory_path)
    yield child
    child.close()


@pytest.fixture
def reader(store_path: Path, memory_path: Path) -> Iterator[tuple[Source, Rank]]:
    """A rank of token slots, and its source."""
    child = Source(store_path, memory_path, block=1)
    with contextlib.closing(child), kvfs.open(store_path) as store:
        rank = Rank(store.namespace("model", LAYOUT, "1"), 1, 2, memory_path, block=1)
        with closing(rank):
            assert rank.group.wait_for_peers(1, SECONDS)
            yield child, rank


def test_a_prefix_comes_from_another_process(source: Source, store_path: Path, memory_path: Path) -> None:
    with kvfs.open(store_path) as store:
        reader = Rank(store.namespace("model", LAYOUT, "1"), 1, 2, memory_path)
        with closing(reader):
            assert reader.group.wait_for_peers(1, SECONDS)
            assert reader.load(prompt(6), OTHERS).tiers == {Tier.PEER: 6 * 32}
            assert reader.bytes(OTHERS) == source.bytes


def test_the_reader_goes_on_when_the_source_is_killed_in_the_middle_of_a_pull(
    source: Source, store_path: Path, memory_path: Path
) -> None:
    with kvfs.open(store_path) as store:
        reader = Rank(store.namespace("model", LAYOUT, "1"), 1, 2, memory_path)
        with closing(reader):
            assert reader.group.wait_for_peers(1, SECONDS)
            plan = reader.group.longest(reader.pages(prompt(6)))
            assert plan.sources("full") == [0] * 6
            reader.device.before_launch = source.kill
            began = time.monotonic()
            result = reader.begin(plan, OTHERS).wait(1.0)
            assert result is not None and time.monotonic() - began < 1.0
            assert source.pid == 0, "it was killed while the pull was under way"
            if result.tokens == 6 * 32:  # the memory of a killed process stays as long as it is mapped
                assert reader.bytes(OTHERS) == source.bytes
            reader.group.tables.check()
            assert reader.group.longest(reader.pages(prompt(6))).tokens == 0
            again = reader.begin(plan, OTHERS).wait(1.0)  # a plan from before
            assert again is not None and (again.tokens, again.pages) == (0, 0)
            assert reader.counters()["pulls_without_peer"]
            reader.publish(prompt(1, first=1000), OTHERS[:2])  # it goes on
            assert reader.group.retract(OTHERS[:2])


def copy_under_way(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> tuple[TokenCopy, Pending]:
    """A copy of all slots of rank 0, and the event of its end."""
    pending = Pending()
    monkeypatch.setattr(rank.group._lane.dma, "record", lambda *_: pending)
    copy = rank.group.copy_tokens([0] * 12, UNITS, OTHERS)
    assert copy is not None
    return copy, pending


def test_another_process_keeps_token_slots_while_they_are_read(
    reader: tuple[Source, Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, rank = reader
    copy, pending = copy_under_way(rank, monkeypatch)
    assert source.retract(0), "it is not read"
    assert not source.retract(UNITS[3]), "it is read, and is reused all the same"
    pending.happened.set()
    assert copy.arrived(SECONDS) == bytes([1, 1, 1, 0] + [1] * 8)
    assert rank.bytes(OTHERS) == source.bytes
    assert source.retract(UNITS[4])


def test_no_token_counts_of_a_source_that_is_killed_while_it_is_read(
    reader: tuple[Source, Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, rank = reader
    copy, pending = copy_under_way(rank, monkeypatch)
    source.kill()
    pending.happened.set()
    assert copy.arrived(SECONDS) == bytes(12)
    assert rank.group.copy_tokens([0], [1], [1]) is None, "nothing moves from it any more"
