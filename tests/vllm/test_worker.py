"""When the worker's half reports: loads that end together are reported together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.kv_offload.base import GPULoadStoreSpec

from kvfs.errors import ConfigError, KvfsError
from kvfs.integrations.vllm import worker
from kvfs.integrations.vllm.manager import LoadSpec, SaveSpec
from kvfs.integrations.vllm.metrics import Metrics
from kvfs.integrations.vllm.worker import KvfsWorker, _TransferJob
from kvfs.types import Tier, TransferResult

LOADED = TransferResult(64, 1, 4096, tiers={Tier.HOST: 64})


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
    half._jobs, half._late, half.idle = {}, [], not tokens

    def noted(*_: Any, **options: Any) -> None:
        asked.append(options["gentle"])

    half._io = SimpleNamespace(load=noted, save=noted)  # type: ignore[assignment]
    half._is_ours = lambda spec: True  # type: ignore[method-assign]
    half._placed = lambda src, dst: (plan, {})  # type: ignore[method-assign, assignment, return-value]
    half._begin_load(SimpleNamespace(match=object()), {})  # type: ignore[arg-type]
    half.submit_store(1, object(), SaveSpec(plan, {}, bytes(8)))  # type: ignore[arg-type]
    assert asked == [gentle, gentle]


class Copies:
    """In place of a transport: which loads the step's own thread was asked to copy, and which were begun."""

    def __init__(self, results: list[Any] | KvfsError) -> None:
        self.results = results
        self.at_once: list[Any] = []
        self.begun: list[Any] = []

    def load_at_once(self, loads: list[tuple[Any, Any]], seconds: float) -> list[Any]:
        assert seconds == worker.AT_ONCE_SECONDS
        self.at_once += [match for match, _ in loads]
        if isinstance(self.results, KvfsError):
            raise self.results
        return self.results

    def load(self, match: Any, *_: Any, **options: Any) -> Any:
        self.begun.append(match)
        if isinstance(self.results, KvfsError) and match == "a":
            raise self.results
        return SimpleNamespace(done=End(Ends(0)))


def _loading(io: Copies, *, idle: bool = True, on_gpu: bool = False, hangs: bool = False) -> KvfsWorker:
    """A worker to which two loads were submitted."""
    half = KvfsWorker.__new__(KvfsWorker)
    half._on_gpu, half._settings, half.step_tokens = on_gpu, SimpleNamespace(load_seconds=1.0), 0  # type: ignore[assignment]
    half._late = [SimpleNamespace(done=End(Ends(0)))] if hangs else []  # type: ignore[list-item]
    half._jobs, half._kept, half._publishing, half._logged, half.lost = {}, [], [], set(), set()
    half._keeps_prefix, half._page_tokens, half._peers, half.metrics = True, 64, None, Metrics()
    half._engine = [SimpleNamespace(attached=[], group=SimpleNamespace(block_tokens=64))]  # type: ignore[list-item]
    half._io, half.idle, half._event = io, idle, lambda: None  # type: ignore[assignment, method-assign]
    for job, match in enumerate("ab"):
        blocks = GPULoadStoreSpec([job], group_sizes=[1], block_indices=[0])
        half.submit_load(job, LoadSpec(match, 1), blocks)  # type: ignore[arg-type]
    return half


def test_loads_of_a_step_that_computes_nothing_are_copied_by_its_thread() -> None:
    io = Copies([LOADED, None])
    half = _loading(io)
    assert io.begun == [], "a thread would take turns of the interpreter"
    half.load_at_once()
    assert io.at_once == ["a", "b"] and io.begun == ["b"]
    (result,) = half.get_finished()
    assert (result.job_id, result.success) == (0, True)
    half.load_at_once()
    assert io.at_once == ["a", "b"] and list(half._jobs) == [1]
    assert half.metrics._counts == {"pages_loaded": 1, "tokens_loaded_host": 64}


@pytest.mark.parametrize(("idle", "on_gpu"), [(False, False), (True, True)])
def test_other_loads_begin_when_they_are_submitted(idle: bool, on_gpu: bool) -> None:
    io = Copies([])
    half = _loading(io, idle=idle, on_gpu=on_gpu)
    assert io.begun == ["a", "b"]
    half.load_at_once()
    assert io.at_once == [] and len(io.begun) == 2 and half.get_finished() == []


def test_no_load_begins_behind_a_disk_that_hangs() -> None:
    io = Copies([])
    half = _loading(io, hangs=True)
    half.load_at_once()
    assert io.at_once == io.begun == []
    assert [(each.job_id, each.success) for each in half.get_finished()] == [(0, False), (1, False)]


def test_a_load_that_is_refused_fails_alone() -> None:
    io = Copies(ConfigError("units of a group"))
    half = _loading(io)
    half.load_at_once()
    assert io.begun == ["a", "b"]
    assert [(each.job_id, each.success) for each in half.get_finished()] == [(0, False)]
    assert half.metrics._counts == {"loads_refused": 1}
