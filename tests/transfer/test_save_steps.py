"""The steps of a save, each by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvfs.transfer import save as save_module
from kvfs.transfer.save import Batch, Save, _together, stored
from kvfs.transfer.staging import SlotState
from kvfs.transfer.units import UnitIds
from kvfs.types import PageOutcome

MIB = 1 << 20


def attached(number: int = 0, *, kind: str = "all", page_bytes: int = MIB, per_page: int = 2, units: int = 100) -> Any:
    device = SimpleNamespace(
        units=units, unit_range=lambda group, chunk: range(chunk * per_page, (chunk + 1) * per_page)
    )
    group = SimpleNamespace(name=f"g{number}", need=SimpleNamespace(kind=kind))
    return SimpleNamespace(number=number, page_bytes=page_bytes, device=device, group=group)


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


class FakeLease:
    """So many slots; notes the states that they get."""

    def __init__(self, size: int, states: list[Any]) -> None:
        self._size, self.states = size, states

    def __len__(self) -> int:
        return self._size

    def move(self, state: SlotState) -> None:
        self.states.append(state)

    def release(self) -> None:
        self.states.append("released")


def gathering(**how: Any) -> tuple[Any, list[str], list[Any], list[Any]]:
    """A save of four pages whose ring gives two slots at a time: (save, notes, states of slots, chunks handed over)."""
    made, noted, _ = save([(attached(), [0, 1, 2, 3])])
    states, handed, asked = list[Any](), list[Any](), list[Any]()
    leases = iter(how.get("leases", [2, 2]))

    def acquire(pages: int, deadline: float, **options: Any) -> FakeLease | None:
        asked.append((pages, options["least"], options["keep"]))
        size = next(leases)
        return FakeLease(size, states) if size else None

    made.context.ring.acquire = acquire
    made.context.batch = lambda size: 3
    made.context.writes = SimpleNamespace(stalled_at=lambda: 0.0, one=contextlib.nullcontext)
    made.context.late = lambda transfer: how.get("late", False)
    made.transfer.deadline, made.transfer.stopped = 5.0, how.get("stopped", False)
    made.transfer.own = lambda lease: how.get("owns", True)
    made.transfer.step = lambda **_: contextlib.nullcontext(how.get("allowed", True))
    made._fill = lambda batch: states.append(f"filled {batch.chunks}")
    made._hand_over = lambda batches: handed.extend(batch.chunks for batch in batches)
    made.asked = asked
    return made, noted, states, handed


def test_pages_are_gathered_as_slots_come() -> None:
    made, noted, states, handed = gathering()
    assert made._gather(made.pages[0][0], [0, 1, 2, 3]) is True
    assert handed == [[0, 1], [2, 3]] and made.asked == [(3, 1, 0), (2, 1, 0)] and noted == []
    assert states == ["filled [0, 1]", SlotState.FULL, "filled [2, 3]", SlotState.FULL]


@pytest.mark.parametrize(
    ("how", "noted", "handed"),
    [
        ({"stopped": True}, [], []), ({"late": True}, [], []), ({"leases": [2, 0]}, ["ring"], [[0, 1]]),
        ({"owns": False}, [], []), ({"allowed": False}, [], []),
    ],
)  # fmt: skip
def test_a_save_that_may_not_go_on_gathers_no_other_group(how: Any, noted: list[str], handed: list[Any]) -> None:
    made, notes, _, found = gathering(**how)
    assert made._gather(made.pages[0][0], [0, 1, 2, 3]) is False
    assert notes == noted and found == handed


def test_pages_behind_a_decline_are_not_gathered_and_the_next_group_is() -> None:
    made, _, _, handed = gathering()
    made.limit = 2
    assert made._gather(made.pages[0][0], [0, 1, 2, 3]) is True and handed == [[0, 1]]
    assert made._gather(made.pages[0][0], [2, 3]) is True and made._gather(made.pages[0][0], []) is True


@pytest.mark.parametrize("allowed", [True, False])
def test_slots_drain_while_they_are_appended_and_are_released_in_any_case(allowed: bool) -> None:
    made, noted, states, _ = gathering(allowed=allowed)
    made._unwritten, made._gathering = 1, False
    made._append = lambda batches, lane: states.append((len(batches), lane))
    batches = [Batch(made.pages[0][0], [n], FakeLease(1, states)) for n in range(2)]  # type: ignore[arg-type]
    made._write(batches, 7)
    appended = [SlotState.DRAINING, SlotState.DRAINING, (2, 7)]
    assert states == [*(appended if allowed else []), "released", "released"] and noted == ["end"]


def test_an_append_that_raises_fails_the_save_and_releases_its_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    made, noted, states, _ = gathering()
    made._unwritten, made._gathering = 2, False
    failed: list[BaseException] = []
    monkeypatch.setattr(save_module, "fail", lambda transfer, exc: failed.append(exc))

    def append(*_: Any) -> None:
        raise ValueError("x")

    made._append = append
    made._write([Batch(made.pages[0][0], [0], FakeLease(1, states))], 0)  # type: ignore[arg-type]
    assert states == [SlotState.DRAINING, "released"] and [str(exc) for exc in failed] == ["x"]
    assert made._unwritten == 1 and noted == [], "another append is under way"
