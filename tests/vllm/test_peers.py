"""DP ranks that pull from one another, with vLLM's scheduler: simulated workers and, in place of the GPUs' tables and
copies, a dictionary. Workers compare every byte that attention would read; here also every byte that is offered."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig

from kvfs.integrations.vllm import connector
from kvfs.integrations.vllm.peers import PeerPlace, Reused
from kvfs.types import Tier, TransferResult, TransferState
from tests.vllm.simulated import SimulatedEngine
from tests.vllm.test_kinds import KINDS, engine_config  # noqa: F401

Prompt = Callable[..., list[int]]


class Host:
    """What the ranks of a host offer: (rank, group, hash) -> units and their bytes."""

    def __init__(self) -> None:
        self.ranks: dict[int, Copies] = {}
        self.offered: dict[tuple[int, str, bytes], tuple[tuple[int, ...], bytes]] = {}
        self.reaches = True

    def of_others(self, rank: int, group: str, name: bytes) -> tuple[int, str, bytes] | None:
        keys = [(other, group, name) for other in self.ranks if other != rank]
        return next((key for key in keys if self.reaches and key in self.offered), None)

    def check(self) -> None:
        for (rank, group, _), (units, raw) in self.offered.items():
            assert self.ranks[rank].read(group, units) == raw, f"a block of {units} was written to while it is offered"


class Copies:
    """In place of ``PeerCopies``."""

    def __init__(self, host: Host, rank: int, parts: Any) -> None:
        self.host, self.place = host, PeerPlace(0, "", rank, 2, parts)
        self.views: dict[str, list[torch.Tensor]] = {}
        self.attached: dict[str, Any] = {}
        self.retracted: set[int] = set()
        self.pulled = 0
        host.ranks[rank] = self

    def begin(self, engine: SimulatedEngine) -> None:
        (rank,) = engine.ranks
        for a in rank.connector.connector_worker.worker._attached:  # type: ignore[union-attr]
            assert a.units_per_block == 1
            self.attached[a.stored.name] = a
            self.views[a.stored.name] = [rank.views[n].view(torch.uint8) for n in a.stored.layers.values()]

    def read(self, group: str, units: tuple[int, ...]) -> bytes:
        return b"".join(view[unit].numpy().tobytes() for view in self.views[group] for unit in units)

    def units_of(self, group: str, units: list[int], chunk: int) -> tuple[int, ...]:
        a = self.attached[group]
        numbers = a.device.unit_range(a.layout, chunk)
        found = tuple(units[n] for n in numbers) if numbers[-1] < len(units) else ()
        return found if found and min(found) >= 0 else ()

    def publish(self, hashes: Any, units: dict[str, list[int]], first: int, after: Any) -> None:
        for group, ids in units.items():
            for chunk in range(first, len(hashes)):
                if mine := self.units_of(group, ids, chunk):
                    self.host.offered[self.place.rank, group, hashes[chunk]] = mine, self.read(group, mine)

    def retract(self, reused: Reused) -> None:
        gone = {*reused.blocks}
        self.retracted |= gone
        for key, (units, _) in list(self.host.offered.items()):
            if key[0] == self.place.rank and (reused.everything or gone & {*units}):
                del self.host.offered[key]

    def load(self, plan: Any, units: dict[str, list[int]], after: Any, deadline: float, on_done: Any) -> Any:
        good = plan.chunks
        for group, chunks in plan.sources.items():
            for chunk, (key, there) in chunks.items():
                if self.host.offered.get(key, ((), b""))[0] != there:
                    good = min(good, chunk)
                    continue
                a = self.attached[group]
                here = [units[group][n] for n in a.device.unit_range(a.layout, chunk)]
                for mine, other in zip(self.views[group], self.host.ranks[key[0]].views[group], strict=True):
                    for to, of in zip(here, there, strict=True):
                        if to >= 0:  # of a page on the edge of a window, the engine wants the last blocks
                            mine[to] = other[of]
                self.pulled += 1
        tokens = good * plan.size
        result = TransferResult(tokens, good, 0, 0, plan.chunks - good, {Tier.PEER: tokens}, "")
        transfer = SimpleNamespace(
            result=result, state=TransferState.DONE if good == plan.chunks else TransferState.PARTIAL,
            done=threading.Event(), withdraw=lambda _: True,
        )  # fmt: skip
        transfer.done.set()
        on_done(transfer)
        return transfer

    def close(self) -> None:
        pass


class Lookups:
    """In place of ``PeerLookups``."""

    def __init__(self, host: Host, layout: Any, rank: int) -> None:
        self.host, self.layout, self.rank = host, layout, rank

    def held(self, pages: Any) -> dict[str, int]:
        found = {}
        for group in self.layout.groups:
            bits = [self.host.of_others(self.rank, group.name, name) is not None for name in pages.hashes]
            found[group.name] = sum(1 << chunk for chunk, held in enumerate(bits) if held)
        return found

    def plans(self, pages: Any, first: int, end: int) -> dict[int, Any]:
        sources: dict[str, dict[int, Any]] = {}
        for group, begin in pages.needed(first, end).items():
            for chunk in range(begin, end):
                key = self.host.of_others(self.rank, group, pages.hashes[chunk])
                if key is None:
                    return {}
                sources.setdefault(group, {})[chunk] = key, self.host.offered[key][0]
        peers = {0: SimpleNamespace(groups={group: (list(some), None) for group, some in sources.items()})}
        size = self.layout.page_tokens
        return {0: SimpleNamespace(
            chunks=end, size=size, sources=sources, peers=peers, match=None, close=lambda: None
        )}  # fmt: skip

    def close(self) -> None:
        pass


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    made = Host()
    monkeypatch.setattr(connector, "join", lambda io, parallel, *_: Copies(made, len(made.ranks), io.parts))
    monkeypatch.setattr(
        connector, "PeerLookups", lambda _, layout, places: Lookups(made, layout, places[0].rank)
    )  # fmt: skip
    execute = SimulatedEngine.step

    def step(engine: SimulatedEngine) -> None:
        execute(engine)
        made.check()

    monkeypatch.setattr(SimulatedEngine, "step", step)
    yield made


def rank(config: VllmConfig, kind: str, store: Path, host: Host, **settings: Any) -> SimulatedEngine:
    engine = SimulatedEngine(config, KINDS[kind], store, dp_pulls=True, **settings)
    host.ranks[len(host.ranks) - 1].begin(engine)
    return engine


@pytest.mark.parametrize("kind", ["full", "window", "unequal blocks"])
def test_what_one_rank_computed_the_other_pulls(
    engine_config: VllmConfig,  # noqa: F811
    tmp_path: Path, prompt: Prompt, host: Host, kind: str,
) -> None:  # fmt: skip
    """Each has a store of its own, so that nothing comes from there."""
    one, two = prompt(1, 500), [*prompt(1, 300), *prompt(2, 150)]
    with rank(engine_config, kind, tmp_path / "a", host) as first, rank(engine_config, kind, tmp_path / "b", host) as b:
        size = first.connector._manager._model.page_tokens
        assert first.generate(one) == [0]
        assert b.generate(one) == [499 // size * size]
        assert host.ranks[1].pulled > 0 and b.checked > 0
        assert b.generate(two)[0] >= (300 // size - 1) * size if kind == "full" else b.generate(two)
        host.reaches = False
        assert b.generate(prompt(3, 200)) == [0]


def test_blocks_are_taken_back_before_they_are_reused(
    engine_config: VllmConfig,  # noqa: F811
    tmp_path: Path, prompt: Prompt, host: Host,
) -> None:  # fmt: skip
    """Few blocks, many requests at once, preemptions, hits of the engines' own caches and resets; ``Host.check``."""
    small = copy.deepcopy(engine_config)
    small.model_config.max_model_len = small.scheduler_config.max_model_len = 512
    settings = {"pool_bytes": 1 << 18, "offload_prompt_only": False}  # 40 blocks
    with (
        rank(small, "full", tmp_path / "a", host, **settings) as a,
        rank(small, "full", tmp_path / "b", host, **settings) as b,
    ):
        for engine in (a, b):
            engine.generate(*[prompt(seed, 140) for seed in range(4)], tokens=24)
            engine.generate(prompt(1, 140), prompt(10, 300), tokens=2, forget=False)
        assert a.preempted and b.preempted
        assert any(copies.pulled for copies in host.ranks.values())
        assert all(copies.retracted for copies in host.ranks.values())
        assert host.offered
        assert a.reset()
        a.step()
        assert not [key for key in host.offered if key[0] == 0]


def test_pages_that_are_taken_back_after_the_lookup_are_computed(
    engine_config: VllmConfig,  # noqa: F811
    tmp_path: Path, prompt: Prompt, host: Host, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    one = prompt(1, 500)
    with rank(engine_config, "full", tmp_path / "a", host) as a, rank(engine_config, "full", tmp_path / "b", host) as b:
        assert a.generate(one) == [0]
        load = Copies.load

        def late(self: Copies, plan: Any, *arguments: Any) -> Any:
            some = plan.sources["full0"][3][1]
            host.ranks[0].retract(Reused(some))
            return load(self, plan, *arguments)

        monkeypatch.setattr(Copies, "load", late)
        size = a.connector._manager._model.page_tokens
        assert b.generate(one) == [3 * size]
        assert b.checked > 0


def test_an_engine_without_the_setting_is_no_rank(
    engine_config: VllmConfig,  # noqa: F811
    tmp_path: Path, prompt: Prompt, host: Host,
) -> None:  # fmt: skip
    with SimulatedEngine(engine_config, KINDS["full"], tmp_path / "a") as engine:
        assert engine.generate(prompt(1, 300)) == [0]
        assert not host.ranks and engine.ranks[0].connector.get_handshake_metadata() is None
