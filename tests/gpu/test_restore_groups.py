"""Restores of several groups: pages that are sent while others are looked up, and which of them are useful."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="the GPU transport needs triton")

import kvfs
from kvfs.lookup import search as lookup
from kvfs.pages.layout import Group, Need, PageLayout
from kvfs.transfer.staging import SLOT_ALIGN
from tests.gpu import test_load_groups as groups
from tests.gpu.test_gpu_io import LATE, NOW, SECONDS, attach
from tests.gpu.test_load_late import WAYS
from tests.gpu.test_restore import come, restored, small_windows, through_ring
from tests.stores import counted

__all__ = ["small_windows", "through_ring"]  # fixtures


@pytest.fixture
def hybrid(store: kvfs.Store) -> kvfs.Namespace:
    return store.namespace("hybrid", groups.LAYOUT, "1")


def save_hybrid(ns: kvfs.Namespace, chunks: int = groups.CHUNKS) -> groups.Engine:
    engine = groups.Engine(seed=1)
    with attach(ns, *engine.kvs) as io:
        result = io.save(ns.plan_save(groups.TOKENS[: chunks * groups.PAGE]), groups.units(), NOW, LATE).wait(SECONDS)
        assert result is not None and not result.declined
    return engine


def check_hybrid_prefix(source: groups.Engine, target: groups.Engine, chunks: int) -> None:
    first = max(0, chunks - groups.WINDOW)
    assert target.blocks("full", 0, chunks) == source.blocks("full", 0, chunks)
    assert target.blocks("window", first, chunks) == source.blocks("window", first, chunks)


def check_hybrid(source: groups.Engine, target: groups.Engine, chunks: int) -> None:
    check_hybrid_prefix(source, target, chunks)
    first = max(0, chunks - groups.WINDOW)
    assert set(target.blocks("window", 0, first) + target.blocks("window", chunks, groups.CHUNKS + 3)) <= {0xA5}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stored", [0, 3, 7, groups.CHUNKS])
def test_windows_are_those_at_the_end_of_the_prefix(hybrid: kvfs.Namespace, way: str, stored: int) -> None:
    source, target = save_hybrid(hybrid, stored), groups.Engine()
    with attach(hybrid, *target.kvs, **{**WAYS[way], "ring_bytes": "64KiB", "dirty_bytes": None}) as io:
        result = restored(io, groups.TOKENS, groups.units())
        pages = stored + min(stored, groups.WINDOW)
        assert (result.tokens, result.pages, result.declined) == (stored * groups.PAGE, pages, 0), result
    check_hybrid(source, target, stored)


@pytest.mark.parametrize("way", WAYS)
def test_pages_behind_the_last_whole_window_are_useless(hybrid: kvfs.Namespace, way: str) -> None:
    """All of the full group is stored, and sent by then; of the windows those up to chunk 7."""
    source, target = save_hybrid(hybrid, 7), groups.Engine()
    pages = {"full": bytes(5 * hybrid.layout.groups[0].page_bytes), "window": b""}
    assert hybrid.put(groups.TOKENS, pages, {"full": 7, "window": 0}).stored == 5
    with attach(hybrid, *target.kvs, **{**WAYS[way], "ring_bytes": "64KiB", "dirty_bytes": None}) as io:
        result = restored(io, groups.TOKENS, groups.units())
        assert (result.tokens, result.pages, result.declined) == (7 * groups.PAGE, 7 + groups.WINDOW, 0), result
    check_hybrid(source, target, 7)


def test_pages_that_were_sent_and_are_useless_do_not_count_as_used(hybrid: kvfs.Namespace, store: kvfs.Store) -> None:
    """The full group is stored, and no window."""
    pages = {"full": bytes(5 * hybrid.layout.groups[0].page_bytes), "window": b""}
    assert hybrid.put(groups.TOKENS, pages, {"full": 0, "window": 0}).stored == 5
    times: list[Any] = []
    with counted(store) as moved, attach(hybrid, *groups.Engine().kvs) as io:
        access_times = hybrid._c.access_times
        access_times.stamp = lambda *args: times.append(args)  # type: ignore[method-assign]
        result = restored(io, groups.TOKENS, groups.units())
        assert (result.tokens, result.pages, result.nbytes, result.declined) == (0, 0, 0, 0)
    assert not moved("bytes_loaded") and not times and access_times.request_of(b"") is None


@pytest.mark.parametrize("way", ["in_place", "small ring"])
@pytest.mark.parametrize(("group", "chunk"), [("full", 3), ("full", 0), ("window", 9)])
def test_a_damaged_page_of_either_group_shortens_what_is_restored(
    hybrid: kvfs.Namespace, store: kvfs.Store, way: str, group: str, chunk: int
) -> None:
    source, target = save_hybrid(hybrid), groups.Engine()
    groups.damage(Path(store.path), hybrid, group, chunk)
    with attach(hybrid, *target.kvs, **{**WAYS[way], "ring_bytes": "64KiB", "dirty_bytes": None}) as io:
        result = restored(io, groups.TOKENS, groups.units())
        assert result.reason == "unreadable" and result.tokens <= chunk * groups.PAGE, result
        if group == "full" and way == "small ring":  # its slots are waited for: known before windows are sent
            assert set(target.blocks("window", 0, groups.CHUNKS)) == {0xA5}
        again = restored(io, groups.TOKENS, groups.units())
        assert again.tokens == hybrid.match(groups.TOKENS).tokens and not again.declined, again
    check_hybrid_prefix(source, target, again.tokens // groups.PAGE)


def test_a_rank_that_holds_only_windows_restores_what_all_ranks_can(hybrid: kvfs.Namespace) -> None:
    source, target = save_hybrid(hybrid), groups.Engine()
    with attach(hybrid, target.kvs[1]) as io:
        result = restored(io, groups.TOKENS, range(groups.CHUNKS))
        assert (result.tokens, result.pages) == (groups.CHUNKS * groups.PAGE, groups.WINDOW)
    first, end = groups.CHUNKS - groups.WINDOW, groups.CHUNKS
    assert target.blocks("window", first, end) == source.blocks("window", first, end)
    assert set(target.blocks("full", 0, end)) == {0xA5}


def test_the_second_group_waits_for_slots_of_the_first(hybrid: kvfs.Namespace) -> None:
    """A ring of one page, for both."""
    source, target = save_hybrid(hybrid), groups.Engine()
    with attach(hybrid, *target.kvs, registered_bytes=0, ring_bytes=SLOT_ALIGN, dirty_bytes=SLOT_ALIGN) as io:
        assert restored(io, groups.TOKENS, groups.units()).tokens == groups.CHUNKS * groups.PAGE
        assert io.ring.free == io.ring.slots
    check_hybrid(source, target, groups.CHUNKS)


def test_a_segment_that_grows_between_two_lookups_is_read_in_place(
    store: kvfs.Store, monkeypatch: pytest.MonkeyPatch, through_ring: list[int]
) -> None:
    """The window's group is the first of the layout and the last in the lookup; its pages are stored meanwhile."""
    layout = PageLayout.of(
        [
            Group("window", (1, 2, 4), 2, groups.CELL, Need.window_of(4 * groups.PAGE), groups.PAGE),
            Group("all", (0, 3), 2, groups.CELL, Need.all(), groups.PAGE),
        ],
        groups.PAGE,
    )
    ns, tokens, chunks = store.namespace("reversed", layout, "1"), groups.TOKENS, groups.CHUNKS
    window, full = (g.page_bytes for g in layout.groups)
    first = {"window": 0, "all": 0}
    assert ns.put(tokens, {"window": b"", "all": bytes(chunks * full)}, first).stored == chunks
    assert ns.put([7] * groups.PAGE, {"window": bytes(window), "all": b""}, first).stored == 1  # its part is known
    back = lookup.walk_back

    def grows(*args: Any) -> int:
        assert ns.put(tokens, {"window": bytes(chunks * window), "all": b""}, first).stored == chunks
        return back(*args)

    monkeypatch.setattr(lookup, "walk_back", grows)
    memory = [np.full((len(g.layers), chunks, groups.PAGE, 2, 16), 0xA5A5, "uint16") for g in layout.groups]
    kvs = [kvfs.describe(g, m, "layer,block,token,head,2*dim") for g, m in zip(layout.groups, memory, strict=True)]
    with attach(ns, *kvs) as io:
        units = {g.name: list(range(chunks)) for g in layout.groups}
        assert come(ns, io, "load", tokens, units).tokens == chunks * groups.PAGE
    assert not through_ring and not memory[1].any() and not memory[0][:, chunks - 4 :].any()
