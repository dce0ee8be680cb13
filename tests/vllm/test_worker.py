"""When the worker's half reports: loads that end together are reported together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvfs.integrations.vllm import worker
from kvfs.integrations.vllm.manager import SaveSpec
from kvfs.integrations.vllm.worker import KvfsWorker, _TransferJob


class Ends:
    """In place of the events that the ends of loads set: each wait ends the next load, ``most`` of them in all."""

    def __init__(self, most: int) -> None:
        self.transfers: list[Any] = []
        self.most = most
        self.waits = 0

    def wait(self, seconds: float) -> bool:
        self.waits += 1
        assert 0 < seconds <= worker.IDLE_SECONDS
        left = [transfer for transfer in self.transfers[: self.most] if not transfer.done.is_set()]
        if left:
            left[0].done.over = True
        return bool(left)

    def clear(self) -> None:
        pass


class End:
    """The event of one load."""

    over = False

    def __init__(self, ends: Ends) -> None:
        self._ends = ends

    def is_set(self) -> bool:
        return self.over

    def wait(self, seconds: float) -> bool:
        self._ends.wait(seconds)
        return self.over


def _idle_step(monkeypatch: pytest.MonkeyPatch, loads: int, ending: int, seconds: float = 60.0) -> tuple[int, int]:
    """(loads that have ended, waits) after a step that computes nothing."""
    monkeypatch.setattr(worker, "GATHER_SECONDS", seconds)
    half = KvfsWorker.__new__(KvfsWorker)
    ends = Ends(ending)
    transfers = ends.transfers = [SimpleNamespace(done=End(ends)) for _ in range(loads)]
    half._jobs = {n: _TransferJob(transfer, True, 0, 0.0) for n, transfer in enumerate(transfers)}  # type: ignore[arg-type]
    half._ended = ends  # type: ignore[assignment]
    half._io = SimpleNamespace(load_at_once=lambda seconds: None)  # type: ignore[assignment]
    half.wait_idle()
    return sum(transfer.done.is_set() for transfer in transfers), ends.waits


@pytest.mark.parametrize(
    ("loads", "ending", "waits"), [(1, 1, 1), (4, 4, 4), (4, 2, 3), (4, 0, 1), (0, 0, 0)], ids=str
)  # fmt: skip
def test_an_idle_step_waits_for_loads_that_end_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, loads: int, ending: int, waits: int
) -> None:
    """So that the next step computes all of their requests at once. It does not wait for one that is far away."""
    assert _idle_step(monkeypatch, loads, ending) == (ending, waits)


def test_an_idle_step_does_not_wait_for_an_endless_row_of_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _idle_step(monkeypatch, 100, 100, seconds=-1.0) == (1, 1)


@pytest.mark.parametrize(("tokens", "gentle"), [(0, False), (1, True), (256, True), (1024, True), (1025, False)])
def test_copies_are_gentle_next_to_steps_that_generate_tokens(tokens: int, gentle: bool) -> None:
    """Next to a prefill, or an engine that computes nothing, the copy engine is quicker and costs less."""
    half, asked = KvfsWorker.__new__(KvfsWorker), list[bool]()
    settings, plan = SimpleNamespace(load_seconds=1.0, store_seconds=1.0), SimpleNamespace(missing={})
    half._on_gpu, half._settings, half.step_tokens = False, settings, tokens  # type: ignore[assignment]
    half._jobs, half.idle = {}, not tokens

    def noted(*_: Any, **options: Any) -> None:
        asked.append(options["gentle"])

    half._io = SimpleNamespace(load=noted, save=noted)  # type: ignore[assignment]
    half._is_ours = lambda spec: True  # type: ignore[method-assign]
    half._placed = lambda src, dst: (plan, {})  # type: ignore[method-assign, assignment, return-value]
    half._begin_load(SimpleNamespace(match=object()), {})  # type: ignore[arg-type]
    half.submit_store(1, object(), SaveSpec(plan, {}, bytes(8)))  # type: ignore[arg-type]
    assert asked == [gentle, gentle]


@pytest.mark.parametrize("idle", [False, True])
def test_loads_of_a_step_that_computes_nothing_are_left_to_its_thread(idle: bool) -> None:
    half, asked = KvfsWorker.__new__(KvfsWorker), list[bool]()
    half._on_gpu, half._settings, half.step_tokens = False, SimpleNamespace(load_seconds=1.0), 0  # type: ignore[assignment]
    half._io = SimpleNamespace(load=lambda *_, **options: asked.append(options["at_once"]))  # type: ignore[assignment]
    half.idle = idle
    half._begin_load(SimpleNamespace(match=object()), {})  # type: ignore[arg-type]
    assert asked == [idle]
