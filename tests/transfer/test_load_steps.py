"""The steps of a load to host memory, each by itself, over a ring, a reader and a transfer that only take notes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvfs.lookup.prefix_match import GroupMatch, PrefixMatch
from kvfs.pages.layout import Part
from kvfs.transfer import load as load_module
from kvfs.transfer.load import HostLoad, LoadRequest, finish_lookup, neighbours
from kvfs.transfer.outcome import TierAccounting
from kvfs.transfer.staging import SlotState
from kvfs.types import PageOutcome, Tier

WANT = Part(0, 1, 0, 1)
SIZE = 10  # bytes of a page


def group_match(name: str = "full", first: int = 0, count: int = 6, number: int = 0) -> GroupMatch:
    return GroupMatch(number, name, WANT, None, SIZE, first, count, (), 32)


def match_of(*groups: GroupMatch, chunks: int = 6) -> PrefixMatch:
    return PrefixMatch(chunks * 16, 16, b"", "", groups, {})


def attached(number: int = 0, name: str = "full", page_bytes: int = SIZE) -> Any:
    group = SimpleNamespace(name=name, layers=(number,), states=16, leaf_bytes=lambda part: 5)
    return SimpleNamespace(number=number, group=group, part=WANT, page_bytes=page_bytes, device=None)


class Lease:
    def __init__(self, pages: int, notes: list[Any]) -> None:
        self._pages, self._notes = pages, notes

    def __len__(self) -> int:
        return self._pages

    def runs(self, nbytes: int) -> Iterator[tuple[int, memoryview]]:
        """Two slots may be neighbours: a stretch of two pages, then single ones."""
        at = 0
        while at < self._pages:
            pages = min(2, self._pages - at)
            yield at, memoryview(bytearray(pages * nbytes))
            at += pages

    def views(self) -> list[str]:
        return [f"slot {n}" for n in range(self._pages)]

    def move(self, state: SlotState) -> None:
        self._notes.append(state)

    def release(self) -> None:
        self._notes.append("released")


class Notes(SimpleNamespace):
    """A transfer: a member of sets."""

    __hash__ = object.__hash__


class Stage:
    """What a load uses. ``slots``: what each call of the ring gives, ``good``: the chunks that verify."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, slots: list[int], good: int = -1, **how: Any) -> None:
        self.notes: list[Any] = []
        self.reads: list[tuple[int, int, int]] = []
        self.settled: list[tuple[int, PageOutcome]] = []
        self.scattered: list[tuple[list[str], list[int]]] = []
        self.reading: list[int] = []
        left = iter(slots)
        self.transfer: Any = Notes(
            stopped=how.get("stopped", False), deadline=9.0, late_for="deadline",
            note=lambda reason: self.notes.append(reason),
            step=lambda **_: contextlib.nullcontext(how.get("allowed", True)),
            settle=lambda group, bits, outcome: self.settled.append((bits, outcome)),
            enter=self.notes.append, offer=lambda pages, summary: self.notes.append(pages), end=lambda: None,
            layers_ready=self.notes.append,
        )  # fmt: skip

        def acquire(pages: int, deadline: float, *, page_bytes: int, least: int) -> Lease | None:
            self.notes.append((pages, page_bytes, least, self.transfer.late_for))
            count = min(pages, next(left))
            return Lease(count, self.notes) if count else None

        def load_run(match: Any, gm: Any, group: Any, out: memoryview, held: Any) -> tuple[int, dict[Tier, int]]:
            self.reads.append((gm.first, gm.count, len(out)))
            self.reading.append(len(self.context.reading))
            wanted = ((1 << gm.count) - 1) << gm.first
            return wanted & good, {Tier.DISK: wanted & 0b10, Tier.HOST: wanted & ~0b10}

        self.context: Any = SimpleNamespace(
            ring=SimpleNamespace(acquire=acquire), batch=lambda size: 4, late=lambda transfer: how.get("late", False),
            reader=SimpleNamespace(load_run=load_run), reading=set(),
            store=SimpleNamespace(mode=SimpleNamespace(direct=how.get("direct", False))),
        )  # fmt: skip
        self.tiers = TierAccounting()
        monkeypatch.setattr(
            load_module, "scatter_pages",
            lambda pages, group, part, device, units, chunks, *, first_token: self.scattered.append((pages, chunks)),
        )  # fmt: skip

    def load(self, pages: list[Any], match: PrefixMatch, **how: Any) -> HostLoad:
        request = LoadRequest(
            self.context, self.transfer, match, pages, {a.number: None for a, _ in pages}, how.pop("after", None), 0,
            self.tiers, **how,
        )  # fmt: skip
        made = HostLoad(request)
        made._possible = {g.name: ((1 << g.count) - 1) << g.first for g in match.groups}
        return made


def test_pages_are_loaded_as_slots_come_and_neighbours_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, one = Stage(monkeypatch, slots=[4, 4]), attached()
    load = stage.load([(one, [0, 1, 2, 4, 5])], match_of(group_match()))
    assert load._load(one, [0, 1, 2, 4, 5], {}) is True
    asked = [note for note in stage.notes if isinstance(note, tuple)]
    assert asked == [(4, SIZE, 1, "ring"), (1, SIZE, 1, "ring")], "late for the ring, as long as there is no slot"
    assert stage.transfer.late_for == "deadline"
    assert stage.reads == [(0, 2, 20), (2, 1, 10), (4, 1, 10), (5, 1, 10)]
    assert stage.reading == [1] * 4 and not stage.context.reading, "it reads from a disk that may hang"
    assert stage.scattered == [(["slot 0", "slot 1", "slot 2", "slot 3"], [0, 1, 2, 4]), (["slot 0"], [5])]
    assert stage.settled == [
        (0b10111, PageOutcome.LOADED), (0, PageOutcome.UNREADABLE), (0b100000, PageOutcome.LOADED),
        (0, PageOutcome.UNREADABLE),
    ]  # fmt: skip
    states = [note for note in stage.notes if not isinstance(note, tuple)]
    assert states == [SlotState.FULL, SlotState.DRAINING, "released"] * 2
    assert load._possible == {"full": 0b111111}
    slowest = stage.tiers.slowest({0: 0b111111})
    assert (slowest[Tier.DISK], slowest[Tier.HOST]) == (0b10, 0b110101)


def test_nothing_behind_a_page_that_does_not_verify_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, one = Stage(monkeypatch, slots=[2, 2, 2], good=0b110111), attached()
    load = stage.load([(one, [0, 1, 2, 3, 4, 5])], match_of(group_match()))
    assert load._load(one, [0, 1, 2, 3, 4, 5], {}) is False
    assert [chunks for _, chunks in stage.scattered] == [[0, 1], [2]] and "unreadable" in stage.notes
    assert stage.scattered[1] == (["slot 0"], [2])
    assert stage.settled[2:] == [(0b100, PageOutcome.LOADED), (0b1000, PageOutcome.UNREADABLE)]
    assert load._possible == {"full": 0b110111}


def test_pages_of_keys_are_loaded_behind_one_that_does_not_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, one = Stage(monkeypatch, slots=[2, 2, 2], good=0b110111), attached()
    gm = GroupMatch(0, "full", WANT, None, SIZE, 0, 6, (), 1)
    load = stage.load([(one, list(range(6)))], match_of(gm))
    assert load._load(one, list(range(6)), {}) is False
    assert [chunks for _, chunks in stage.scattered] == [[0, 1], [2], [4, 5]]


@pytest.mark.parametrize(("how", "noted"), [({"stopped": True}, []), ({"late": True}, []), ({"slots": [0]}, ["ring"])])
def test_what_gets_no_turn_is_not_possible_any_more(
    monkeypatch: pytest.MonkeyPatch, how: dict[str, Any], noted: list[str]
) -> None:
    stage, one = Stage(monkeypatch, **{"slots": [4], **how}), attached()
    load = stage.load([(one, [1, 2])], match_of(group_match()))
    assert load._load(one, [1, 2], {}) is False
    assert [note for note in stage.notes if isinstance(note, str)] == noted and stage.reads == []
    assert load._possible == {"full": 0b111001}


def test_what_was_read_for_a_transfer_that_has_ended_reaches_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, one = Stage(monkeypatch, slots=[4], allowed=False), attached()
    load = stage.load([(one, [0, 1])], match_of(group_match()))
    assert load._load(one, [0, 1], {}) is False
    assert stage.reads == [(0, 2, 20)] and stage.scattered == [] == stage.settled
    assert stage.notes[-2:] == [SlotState.FULL, "released"]


def test_a_group_is_loaded_only_as_far_as_the_others_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, one, two = Stage(monkeypatch, slots=[9] * 9, good=0b000111), attached(), attached(1, "other")
    match = match_of(group_match(), group_match("other", number=1))
    load = stage.load([(one, list(range(6))), (two, list(range(6)))], match)
    assert load._load(one, list(range(6)), {}) is False
    stage.scattered.clear()
    assert load._load(two, list(range(6)), {}) is False
    assert [chunks for _, chunks in stage.scattered] == [[0, 1, 2]]


def test_a_lookup_that_is_finished_offers_the_pages_that_were_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for stopped, late, go_on in ((False, False, True), (True, False, False), (False, True, False)):
        stage, asked = Stage(monkeypatch, slots=[], stopped=stopped, late=late), list[bool]()
        match = match_of(group_match(first=1, count=3), group_match("other", first=2, count=2, number=1), chunks=4)

        def finish(*, go_on: bool, asked: list[bool] = asked, match: PrefixMatch = match) -> PrefixMatch:
            asked.append(go_on)
            return match

        pages = [(attached(), [0, 1, 2, 3, 4]), (attached(1, "other"), [1, 2, 3, 4])]
        load = stage.load(pages, match_of(), lookahead=SimpleNamespace(finish=finish))
        request = finish_lookup(load._request)
        assert asked == [go_on] and request.match is match
        assert [chunks for _, chunks in request.pages] == [[1, 2, 3], [2, 3]]
        assert stage.notes == [{0: 0b1110, 1: 0b1100}]


@pytest.mark.parametrize(
    ("chunks", "found"),
    [
        ([], []), ([5], [(5, 1)]), ([0, 1, 2], [(0, 3)]), ([0, 2, 3, 7], [(0, 1), (2, 2), (7, 1)]),
        ([3, 2], [(3, 1), (2, 1)]),
    ],
)  # fmt: skip
def test_neighbours_are_consecutive_chunks(chunks: list[int], found: list[tuple[int, int]]) -> None:
    assert list(neighbours(chunks)) == found
