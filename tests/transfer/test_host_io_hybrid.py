"""Transfers of several groups through slots that hold several pages of the smaller ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvfs
from kvfs.directory import config_file
from kvfs.errors import ConfigError
from kvfs.pages.layout import Cell, Group, Need, PageLayout
from kvfs.read.reader import Reader
from kvfs.system.files import Files
from kvfs.transfer import save as host_save
from kvfs.transfer import workers

PAGE, BLOCK, CHUNKS = 32, 16, 12
SECONDS = 60.0  # of waits that end at once unless something is wrong
LATE = 3600.0  # a deadline that no test reaches
UNITS = {"full": range(2 * CHUNKS), "window": range(2 * CHUNKS)}
PROMPT = list(range(CHUNKS * PAGE))


def hybrid(full: int, window: int, heads: int = 2) -> PageLayout:
    """Groups of so many layers, 1024 bytes of a page each and head."""
    layers, cell = tuple(range(full + window)), Cell("bf16 k8+v8", 32)
    return PageLayout.of(
        [
            Group("full", layers[:full], heads, cell, Need.all(), PAGE),
            Group("window", layers[full:], heads, cell, Need.window_of(8 * PAGE), PAGE),
        ],
        PAGE,
    )


class Engine:
    """The KV memory of all groups, with random bytes or poison."""

    def __init__(self, layout: PageLayout, *, seed: int | None = None) -> None:
        self.memory = [
            np.full((len(g.layers), 2 * CHUNKS, BLOCK, g.heads, 16), 0xA5A5, "uint16") for g in layout.groups
        ]
        if seed is not None:
            rng = np.random.default_rng(seed)
            for memory in self.memory:
                memory[...] = rng.integers(0, 65536, memory.shape, dtype="uint16")
        self.kvs = [
            kvfs.describe(group, memory, "layer,block,token,head,2*dim", layers=list(group.layers))
            for group, memory in zip(layout.groups, self.memory, strict=True)
        ]


@pytest.fixture(autouse=True)
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's disk may be slow: no save gives up on it."""
    monkeypatch.setattr(workers, "STALLED_SECONDS", LATE)


@pytest.mark.parametrize("mode", ["cache", "staging"])
@pytest.mark.parametrize("slots", [1, 2, 5])
@pytest.mark.parametrize(("layers", "heads"), [((2, 6), 2), ((2, 5), 2), ((6, 2), 2), ((1, 3), 3)])
def test_pages_that_share_slots(disk_path: Path, layers: tuple[int, int], heads: int, slots: int, mode: str) -> None:
    layout = hybrid(*layers, heads)
    source, target, ring = Engine(layout, seed=1), Engine(layout), slots * 4096 * max(layers)
    with kvfs.open(disk_path / "store", capacity="64MiB"):
        pass
    config_file.change(str(disk_path / "store"), "mode", mode, Files())
    with kvfs.open(disk_path / "store") as store:
        ns = store.namespace("hybrid", layout, "1")
        with ns.attach(source.kvs, ring_bytes=ring, dirty_bytes=ring) as io:
            result = io.save(ns.plan_save(PROMPT), UNITS, deadline=LATE).wait(SECONDS)
            assert result is not None and result.pages == 2 * CHUNKS
            io.ring.check()
        with ns.attach(target.kvs, ring_bytes=ring) as io, ns.match(PROMPT) as match:
            result = io.load(match, UNITS).wait(SECONDS)
            assert result is not None and result.tokens == CHUNKS * PAGE
    late = slice(2 * (CHUNKS - 8), None)
    assert (target.memory[0] == source.memory[0]).all()
    assert (target.memory[1][:, late] == source.memory[1][:, late]).all()
    assert (target.memory[1][:, : late.start] == 0xA5A5).all()


def test_small_pages_in_one_slot_are_read_in_one_call(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, reads, real = hybrid(2, 6), [], Reader.load_run

    def load_run(self: Reader, match: Any, gm: Any, *args: Any) -> Any:
        reads.append((gm.name, gm.count))
        return real(self, match, gm, *args)

    monkeypatch.setattr(Reader, "load_run", load_run)
    with kvfs.open(store_path, capacity="64MiB") as store:
        ns = store.namespace("hybrid", layout, "1")
        with ns.attach(Engine(layout, seed=1).kvs, ring_bytes=4 * 12288) as io:
            result = io.save(ns.plan_save(PROMPT), UNITS, deadline=LATE).wait(SECONDS)
            assert result is not None and result.pages == 2 * CHUNKS
            with ns.match(PROMPT) as match:
                assert io.load(match, UNITS).wait(SECONDS) is not None
    assert reads == [("window", 4), ("window", 4), ("full", 12)]


def test_dirty_slots_are_counted_whole(store_path: Path) -> None:
    """The limit of saves counts slots: ten small pages in four of them leave the fifth to loads."""
    layout = hybrid(2, 6)
    with kvfs.open(store_path, capacity="64MiB") as store:
        ns = store.namespace("hybrid", layout, "1")
        with ns.attach(Engine(layout).kvs, ring_bytes=5 * 12288, dirty_bytes=4 * 12288) as io:
            context = io._context
            assert context.save_keep == 1 and context.batch(4096) == 15 and context.batch(12288) == 5
            lease = io.ring.acquire(15, 0.0, page_bytes=4096, least=10, keep=context.save_keep)
            assert lease is not None and len(lease) == 12 and io.ring.free == 1
            lease.release()
        with pytest.raises(ConfigError, match=r"ring_bytes is 12287: pass at least 12288, for one page of 12288"):
            ns.attach(Engine(layout).kvs, ring_bytes=12287)


def test_sets_of_pages_with_gaps_are_right(store_path: Path) -> None:
    """Pages of a lease need not be neighbours in the prompt."""
    layout = hybrid(2, 6)
    source, target = Engine(layout, seed=1), Engine(layout)
    some = [-1 if chunk in (5, 6, 9) else block for chunk in range(CHUNKS) for block in (2 * chunk, 2 * chunk + 1)]
    with kvfs.open(store_path, capacity="64MiB") as store:
        ns = store.namespace("hybrid", layout, "1")
        with ns.attach(source.kvs) as io:
            assert io.save(ns.plan_save(PROMPT), UNITS, deadline=LATE).wait(SECONDS) is not None
        with ns.attach(target.kvs, ring_bytes=2 * 12288) as io, ns.match(PROMPT) as match:
            assert io.load(match, {"full": some, "window": some}).wait(SECONDS) is not None
    kept = [block for block in some if block >= 0]
    lost = sorted({*range(2 * CHUNKS)} - {*kept})
    assert (target.memory[0][:, kept] == source.memory[0][:, kept]).all()
    assert (target.memory[0][:, lost] == 0xA5A5).all()


def test_no_group_is_gathered_behind_a_page_that_full_attention_lacks(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, gathered, real = hybrid(2, 6), [], host_save.gather_pages

    def gather(*a: Any) -> int:
        gathered.extend((a[1].name, chunk) for chunk in a[-1])
        return int(real(*a))

    monkeypatch.setattr(host_save, "gather_pages", gather)
    lacking = [-1 if block == 8 else block for block in range(2 * CHUNKS)]
    with kvfs.open(store_path, capacity="64MiB") as store:
        ns = store.namespace("hybrid", layout, "1")
        with ns.attach(Engine(layout, seed=1).kvs) as io:
            units = {"full": lacking, "window": UNITS["window"]}
            result = io.save(ns.plan_save(PROMPT), units, deadline=LATE).wait(SECONDS)
            assert result is not None and (result.pages, result.reason) == (8, "source")
    assert gathered == [(name, chunk) for name in ("full", "window") for chunk in range(4)]


def test_an_attached_engine_says_what_it_holds(tmp_path: Path) -> None:
    layout = hybrid(2, 6)
    with kvfs.open(tmp_path / "store", capacity="64MiB") as store:
        ns = store.namespace("hybrid", layout, "1")
        with ns.attach(Engine(layout).kvs) as io:
            assert io.namespace == ns.plan_save(PROMPT).namespace
            assert [io.page_bytes(g.name) for g in layout.groups] == [g.page_bytes for g in layout.groups]
            with pytest.raises(ConfigError, match="'other' is not attached"):
                io.page_bytes("other")
