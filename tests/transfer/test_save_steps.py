"""The steps of a save and the unit ids of an engine, each by itself."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvfs.errors import ConfigError
from kvfs.transfer import save as save_module
from kvfs.transfer.save import Batch, Save, _together, stored
from kvfs.transfer.units import UNITS_MAX, UnitIds, check_enough, checked_units, chunks_covered, to_load
from kvfs.types import PageOutcome

MIB = 1 << 20


def attached(number: int = 0, *, kind: str = "all", page_bytes: int = MIB, per_page: int = 2, units: int = 100) -> Any:
    device = SimpleNamespace(
        units=units, unit_range=lambda group, chunk: range(chunk * per_page, (chunk + 1) * per_page)
    )
    group = SimpleNamespace(name=f"g{number}", need=SimpleNamespace(kind=kind))
    return SimpleNamespace(number=number, page_bytes=page_bytes, device=device, group=group)


# -- unit ids ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "first", "ids", "complete"),
    [
        ([5, 6], 0, [5, 6], True), ([5, -1], 0, [5, -1], False), ([5, 6], 2, [-1, -1, 5, 6], False), ([], 0, [], True),
        ((0, 99), 0, [0, 99], True), (array("q", [3]), 0, [3], True), ({"g0": [7]}, {"g0": 1}, [-1, 7], False),
        (SimpleNamespace(tolist=lambda: [4]), 0, [4], True),
    ],
)  # fmt: skip
def test_unit_ids_are_numbers_of_units(given: Any, first: Any, ids: list[int], complete: bool) -> None:
    found = checked_units({"g0": attached()}, given, first)
    assert list(found) == [0] and list(found[0]) == ids and found[0].complete is complete


@pytest.mark.parametrize(
    ("given", "first", "message"),
    [
        ([100], 0, "units of group g0 reach from 100 to 100: pass ids in 0..99, -1 for none"),
        ([-2, 5], 0, "units of group g0 reach from -2 to 5"),
        ([5, 1 << 70], 0, "pass a flat sequence of integers"),
        ([1.5], 0, "pass a flat sequence of integers"),
        (5, 0, "pass a flat sequence of integers"),
        (b"12345678", 0, "pass a flat sequence of integers"),
        ({"x": [1]}, 0, r"units names group 'x'; attached are \['g0'\]"),
        ([1], -1, "first_unit of group 'g0' is -1: pass 0 to 16777216"),
        ([1], UNITS_MAX + 1, "first_unit of group 'g0' is 16777217"),
        ([1], True, "first_unit of group 'g0' is True"),
        ({"g0": [1]}, {"x": 1}, "first_unit of group 'x' is 1"),
    ],
)
def test_what_is_no_unit_is_refused(given: Any, first: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked_units({"g0": attached()}, given, first)


def test_several_groups_have_units_each() -> None:
    both = {"g0": attached(0), "g1": attached(1)}
    with pytest.raises(ConfigError, match="units must map each of the groups"):
        checked_units(both, [1])
    assert {n: list(ids) for n, ids in checked_units(both, {"g1": [1], "g0": [2, 3]}).items()} == {0: [2, 3], 1: [1]}


@pytest.mark.parametrize(("ids", "covered"), [(0, 0), (1, 0), (2, 1), (3, 1), (7, 3), (8, 4), (9, 4)])
def test_how_many_chunks_have_all_their_units(ids: int, covered: int) -> None:
    one, numbers = attached(), UnitIds("q", range(ids))
    assert chunks_covered(one, numbers, 4) == covered and chunks_covered(one, numbers, 0) == 0
    check_enough(one, numbers, range(covered))
    check_enough(one, numbers, range(0))
    with pytest.raises(ConfigError, match=f"g0 has {ids} ids, {2 * covered + 2} are needed; pass -1 to leave one"):
        check_enough(one, numbers, range(covered + 1))


def test_pages_without_any_unit_are_not_loaded() -> None:
    ids = UnitIds("q", [1, 2, -1, 4, -1, -1])
    ids.complete = False
    assert to_load(attached(), ids, range(3)) == [0, 1]
    ids.complete = True
    assert to_load(attached(), ids, range(3)) == [0, 1, 2]


# -- a save ------------------------------------------------------------------------------------


def save(
    pages: list[tuple[Any, list[int]]], units: dict[int, Any] | None = None, *, slots: int = 100, keep: int = 0,
    process: object = None, lanes: int = 8, keyed: bool = False, request: int | None = None,
) -> tuple[Any, list[str], list[int]]:  # fmt: skip
    noted, handed = list[str](), list[int]()
    asked: list[bytes] = []

    def request_of(name: bytes) -> int | None:
        asked.append(name)
        return request

    times = SimpleNamespace(request_of=request_of)
    context: Any = SimpleNamespace(
        ring=SimpleNamespace(slots=slots, slot_bytes=MIB), save_keep=keep, append_process=process,
        store=SimpleNamespace(access_times=times, files=SimpleNamespace(now_us=lambda: 77)),
    )  # fmt: skip
    transfer: Any = SimpleNamespace(note=noted.append, stopped=False, try_end=lambda: noted.append("end"))
    prompt: Any = SimpleNamespace(hashes=[n.to_bytes(2, "big") for n in range(300)], keyed=keyed)

    def lane(number: int) -> Callable[[Callable[[], None]], None]:
        return lambda call: handed.append(number)

    made: Any = Save(
        context, transfer, prompt, pages, units or {}, None, 0, None, b"", [lane(n) for n in range(lanes)],  # type: ignore[arg-type]
    )  # fmt: skip
    made.asked = asked
    return made, noted, handed


@pytest.mark.parametrize(
    ("mib", "lanes", "of"), [(1, 8, 1), (255, 8, 1), (256, 8, 2), (300, 8, 2), (2000, 8, 8), (2000, 3, 3)]
)
def test_a_save_has_a_lane_for_every_128_mib(mib: int, lanes: int, of: int) -> None:
    assert save([(attached(page_bytes=mib * MIB), [0])], lanes=lanes)[0]._lanes == of


@pytest.mark.parametrize(
    ("slots", "keep", "process", "pages", "most"),
    [
        (100, 0, None, 1, 50),
        (100, 40, None, 1, 30),
        (1000, 0, None, 1, 64),
        (1000, 0, object(), 1, 256),
        (100, 0, None, 256, 25),
    ],
)
def test_an_append_takes_half_of_what_a_lane_may_have_of_the_ring(
    slots: int, keep: int, process: object, pages: int, most: int
) -> None:
    made, _, _ = save([(attached(), list(range(pages)))], slots=slots, keep=keep, process=process)
    assert made._append_bytes == most * MIB


@pytest.mark.parametrize(
    ("first", "request_us", "at"),
    [(0, 55, 77), (4, 55, 55), (4, None, 77), (4, 0, 77)],
    ids=["whole", "known", "no", "zero"],
)
def test_a_save_has_the_access_time_of_its_lookup(first: int, request_us: int | None, at: int) -> None:
    made, _, _ = save([(attached(), [first, first + 1]), (attached(1), [])], request=request_us)
    assert made.at_us == at and made.asked == ([(first - 1).to_bytes(2, "big")] if first else [])
    assert save([(attached(), [])])[0].at_us == 77


def test_pages_without_units_are_left_out() -> None:
    ids = UnitIds("q", [0, 1, 2, 3, -1, 5, 6, 7, 8])
    ids.complete = False
    for kind, keyed, kept, limit in (
        ("all", False, [0, 1], 2), ("window", False, [0, 1, 3], 1 << 62), ("all", True, [0, 1, 3], 1 << 62)
    ):  # fmt: skip
        made, noted, _ = save([(attached(kind=kind), [0, 1, 2, 3, 4])], {0: ids}, keyed=keyed)
        made.cut_to_source()
        assert (made.pages[0][1], made.limit, noted) == (kept, limit, ["source"])


def test_what_follows_a_gap_of_one_group_is_cut_in_the_next() -> None:
    short, whole = UnitIds("q", range(5)), UnitIds("q", range(40))
    made, noted, _ = save(
        [(attached(0), [0, 1, 2, 3]), (attached(1), [0, 2, 3]), (attached(2), [])], {0: short, 1: whole}
    )
    made.cut_to_source()
    assert [chunks for _, chunks in made.pages] == [[0, 1], [0], []] and made.limit == 2 and noted == ["source"]
    made, noted, _ = save([(attached(1), [0, 2, 19])], {1: whole})
    made.cut_to_source()
    assert made.pages[0][1] == [0, 2, 19] and noted == []
    made, noted, _ = save([(attached(1), [0, 2, 20])], {1: whole})
    made.cut_to_source()
    assert made.pages[0][1] == [0, 2] and noted == ["source"]


def batch(to: Any, first: int, count: int) -> Batch:
    return Batch(to, list(range(first, first + count)), None)  # type: ignore[arg-type]


def test_neighbouring_batches_of_a_group_are_appended_together() -> None:
    one, two = attached(0), attached(1)
    batches = [
        batch(one, 0, 2),
        batch(one, 2, 2),
        batch(one, 4, 1),
        batch(two, 0, 1),
        batch(two, 1, 9),
        batch(two, 10, 1),
    ]
    assert [b.nbytes for b in batches] == [2 * MIB, 2 * MIB, MIB, MIB, 9 * MIB, MIB]
    for most, expected in ((4, [2, 1, 1, 1, 1]), (5, [3, 1, 1, 1]), (3, [1, 2, 1, 1, 1]), (100, [3, 3]), (0, [1] * 6)):
        found = list(_together(batches, most * MIB))
        assert [len(some) for some in found] == expected and [b for some in found for b in some] == batches
    assert list(_together([], 5)) == []


def test_batches_go_to_the_lanes_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_module, "LANE_BYTES", 2 * MIB)
    one = attached()
    made, _, handed = save([(one, list(range(6)))], slots=1)
    assert made._lanes == 3
    made._hand_over([batch(one, n, 1) for n in range(4)])
    made._hand_over([batch(one, 4, 1)])
    assert handed == [0, 1, 2, 0, 1] and made._unwritten == 5


def test_a_save_ends_when_all_is_gathered_and_written() -> None:
    made, noted, _ = save([(attached(), [0])])
    made._unwritten = 2
    made._finish(gathered=False)
    made._finish(gathered=True)
    assert noted == [] and made._unwritten == 1 and not made._gathering
    made._finish(gathered=False)
    assert noted == ["end"]
    other, noted, _ = save([(attached(), [0])])
    other._unwritten = 2
    other.transfer.stopped = True
    other._finish(gathered=False)
    assert noted == ["end"], "it was stopped"
    empty, noted, _ = save([(attached(), [0])])
    empty._finish(gathered=True)
    assert noted == ["end"]


def test_a_chunk_of_which_a_page_was_stored_counts_once() -> None:
    done: Any = {PageOutcome.STORED: {0: 0b0110, 1: 0b1100}, PageOutcome.SKIPPED: {0: 0b1}}
    assert stored(done) == 3 and stored({}) == 0
