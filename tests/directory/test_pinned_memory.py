"""All processes of a store together pin no more than its limit."""

from __future__ import annotations

from typing import Any

import pytest

from kvfs.directory.pinned_memory import FRESH_SECONDS, PinnedBytes


class Others:
    """Liveness of a store in which other processes pin ``nbytes``."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.asked, self.said = nbytes, 0, 0
        self.error: OSError | None = None

    def pinned_by_others(self) -> int:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return self.nbytes

    def say_pinned(self, nbytes: int) -> None:
        self.said = nbytes


def account(others: Any) -> PinnedBytes:
    return PinnedBytes(others)


def test_what_others_pin_counts_and_is_asked_for_once_in_a_while() -> None:
    others = Others(60)
    pinned = account(others)
    assert not pinned.take(41, 100, 0.0) and pinned.take(40, 100, 0.0)
    assert (others.asked, others.said, pinned.mine) == (1, 40, 40)
    others.nbytes = 0
    assert not pinned.take(1, 100, FRESH_SECONDS) and pinned.take(60, 100, FRESH_SECONDS + 0.1)
    assert others.asked == 2


def test_nothing_is_pinned_while_the_others_cannot_be_read() -> None:
    others = Others(0)
    others.error = OSError(24, "too many open files")
    pinned = account(others)
    assert not pinned.take(1, 100, 0.0)
    others.error = None
    assert pinned.take(1, 100, 0.0), "the failed question is asked again"


def test_a_reader_has_the_limit_to_itself() -> None:
    pinned = account(None)
    assert pinned.take(100, 100, 0.0) and not pinned.take(1, 100, 0.0)
    pinned.give_back(100)
    assert pinned.take(1, 100, 0.0)


def test_a_part_of_what_was_taken_is_given_back() -> None:
    others = Others(0)
    pinned = account(others)
    assert pinned.take(40, 100, 0.0)
    pinned.give_back(15)
    assert pinned.mine == 25 and others.said == 40, "the next second says so"
    pinned.say()
    assert others.said == 25
    others.said = 0
    pinned.say()
    assert others.said == 0, "it has not changed"
    pinned.give_back(25)
    with pytest.raises(AssertionError, match="more is given back than was taken"):
        pinned.give_back(1)
    assert pinned.mine == 0
