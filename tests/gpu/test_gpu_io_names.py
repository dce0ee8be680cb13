"""The GPU transport with pages of keys: each is saved and loaded by itself, whichever way it reaches the device."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the GPU transport needs triton")

import kvfs
from kvfs import PageOutcome
from tests.gpu.simulated import SimulatedDevice
from tests.gpu.test_gpu_io import LAYOUT, NOW, SECONDS, Engine, attach
from tests.stores import corrupt

WAYS = {"in_place": {}, "arena": {"transport": "arena"}, "ring": {"registered_bytes": 0}}


def units(chunks: list[int]) -> list[int]:
    return [2 * c + i for c in chunks for i in (0, 1)]


def keys_of(chunks: list[int]) -> list[bytes]:
    return [b"key %d" % c for c in chunks]


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_pages_of_keys_are_saved_and_loaded_one_by_one(
    store: kvfs.Store, ns: kvfs.Namespace, way: str, layerwise: bool
) -> None:
    """In any order, behind pages without a source, behind one that is not stored and one that is damaged."""
    source, target, wanted = Engine(seed=1), Engine(), [7, 3, 10, 1, 12, 5]
    outcomes: dict[int, PageOutcome] = {}

    def note(page: kvfs.PageDone) -> None:
        outcomes[page.chunk] = page.outcome

    with attach(ns, source.kv) as io:
        plan = ns.prompt(keys=keys_of(wanted)).plan({"full": range(6)})
        done = io.save(plan, [-1, -1, *units(wanted[1:])], NOW).wait(SECONDS)
        assert done is not None and (done.pages, done.reason) == (5, "source")
        done = io.save(plan, units(wanted), NOW).wait(SECONDS)
        assert done is not None and (done.pages, done.skipped) == (1, 5)
    page = bytearray(LAYOUT.page_bytes)
    with ns.match_keys(keys_of([10])) as match:
        assert ns.get(match, page) == 1
    corrupt(Path(store.path), bytes(page))
    names = [b"unknown", *keys_of(wanted[::-1])]
    with (
        attach(ns, target.kv, device=SimulatedDevice(), **WAYS[way]) as io,
        ns.prompt(keys=names).select({"full": 0}, 7) as match,
    ):
        transfer = io.load(match, [0, 1, *units(wanted[::-1])], NOW, layerwise=layerwise, on_page=note)
        done = transfer.wait(SECONDS)
        assert done is not None and (done.tokens, done.pages, done.reason) == (0, 5, "unreadable")
    bad = {0, 1 + wanted[::-1].index(10)}
    assert outcomes == {n: PageOutcome.UNREADABLE if n in bad else PageOutcome.LOADED for n in range(7)}
    fine = units([c for c in wanted if c != 10])
    assert target.tokens(fine) == source.tokens(fine)
    assert set(target.tokens(sorted({*range(32)} - {*fine}))) == {0xA5}, (
        "a page that is lost touched the engine's memory"
    )
