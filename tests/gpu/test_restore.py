"""Restores: a prompt is looked up while its first pages move."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the GPU transport needs triton")

import kvfs
from kvfs import PageOutcome
from kvfs.errors import ConfigError
from kvfs.gpu import batches, lane, page_feed
from kvfs.gpu import page_source as gpusource
from kvfs.lookup.incremental import Lookahead
from kvfs.lookup.prefix_match import PrefixMatch
from tests.gpu.test_gpu_io import LATE, LAYOUT, NOW, PAGE, SECONDS, Engine, attach, prompt, saved
from tests.gpu.test_load_late import WAYS, LateDevice
from tests.gpu.test_load_overlap import Halting
from tests.stores import counted, segment_files

CHUNKS = 12
UNITS = range(2 * CHUNKS)


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_feed, "FIRST_PAGES", 2)


def restored(io: Any, tokens: list[int], units: Any = UNITS, **how: Any) -> kvfs.TransferResult:
    result = io.restore(tokens, units, NOW, LATE, **how).wait(SECONDS)
    assert result is not None
    return result


def come(ns: kvfs.Namespace, io: Any, how: str, tokens: list[int], units: Any) -> kvfs.TransferResult:
    """The result of a load, or a restore, of a prompt."""
    if how == "restore":
        return restored(io, tokens, units)
    with ns.match(tokens) as match:
        result: kvfs.TransferResult | None = io.load(match, units, NOW, LATE).wait(SECONDS)
        assert result is not None
        return result


@pytest.fixture
def through_ring(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pages of each run that comes through the ring."""
    counts, begin = list[int](), gpusource.PageSource._begin

    def counting(self: Any, run: Any, *args: Any, **options: Any) -> Any:
        counts.append(run.count)
        return begin(self, run, *args, **options)

    monkeypatch.setattr(gpusource.PageSource, "_begin", counting)
    return counts


class Looking:
    """Stops lookups before the step that goes beyond chunk ``at``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        more = Lookahead.more

        def gated(lookahead: Lookahead, number: int, chunks: int) -> int:
            if chunks > at:
                self.reached.set()
                assert self.go.wait(SECONDS)
            return more(lookahead, number, chunks)

        monkeypatch.setattr(Lookahead, "more", gated)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stored", [0, 1, 2, 7, CHUNKS])
def test_what_is_stored_of_a_prompt_is_restored(ns: kvfs.Namespace, way: str, stored: int) -> None:
    source, target = saved(ns, stored) if stored else Engine(), Engine()
    with attach(ns, target.kv, **WAYS[way]) as io:
        result = restored(io, prompt(CHUNKS))
        assert (result.tokens, result.pages, result.declined, result.reason) == (stored * PAGE, stored, 0, "")
        assert target.tokens(range(2 * stored)) == source.tokens(range(2 * stored))
        assert (target.memory[:, 2 * stored :] == 0xA5A5).all()
        assert io.ring.free == io.ring.slots


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(3))
def test_restores_and_loads_that_overlap_are_right_in_any_order_of_streams(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch, way: str, seed: int
) -> None:
    monkeypatch.setattr(lane, "QUEUED", 3)
    monkeypatch.setattr(batches, "BATCH_BYTES_MIN", 1)
    sources = [saved(ns, 5, seed=n, first=1000 * n) for n in range(1, 4)]
    target, device, chance = Engine(), LateDevice(seed), random.Random(seed)
    with attach(ns, target.kv, device=device, scratch_bytes="4KiB", **WAYS[way]) as io:
        for _ in range(2):
            target.memory[...] = 0xA5A5
            transfers = []
            for number in chance.sample(range(3), 3):
                units, tokens = range(10 * number, 10 * number + 10), prompt(5, 1000 * (number + 1))
                if chance.random() < 0.7:
                    transfers.append((number, units, io.restore(tokens, units, NOW, LATE)))
                else:
                    with ns.match(tokens) as match:
                        transfers.append((number, units, io.load(match, units, NOW, LATE, layerwise=True)))
            dropped = chance.choice(transfers)[2]
            assert dropped.cancel(SECONDS)
            for number, units, transfer in transfers:
                result = transfer.wait(SECONDS)
                if transfer is not dropped:
                    assert result is not None and result.tokens == 5 * PAGE, result
                    assert target.tokens(units) == sources[number].tokens(range(10))
        assert io.ring.free == io.ring.slots
    assert not device.errors and not device.registered and not ns._c.pinned.mine


def test_the_first_pages_are_enqueued_before_the_rest_is_looked_up(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, device, looking = saved(ns, CHUNKS), Engine(), Halting(), Looking(monkeypatch, 6)
    monkeypatch.setattr(lane, "PENDING", 0)
    with attach(ns, target.kv, device=device) as io:
        with ns.match(prompt(CHUNKS)) as match:
            io.warm(match)
        device.halt()
        transfer = io.restore(prompt(CHUNKS), UNITS, NOW, LATE)
        try:
            assert looking.reached.wait(SECONDS)
            device.launched(1)
            device.go.set()
            assert not transfer.done.is_set()
        finally:
            looking.go.set()
            device.go.set()
        result = transfer.wait(SECONDS)
        assert result is not None and result.tokens == CHUNKS * PAGE
        assert target.tokens(UNITS) == source.tokens(UNITS)


@pytest.mark.parametrize("stored", [2, 6])
def test_a_prefix_that_ends_with_a_step_of_the_lookup_is_waited_for(ns: kvfs.Namespace, stored: int) -> None:
    """It was not known that they are the last pages when they were sent."""
    source, target, device = saved(ns, stored), Engine(), Halting()
    with attach(ns, target.kv, device=device) as io:
        with ns.match(prompt(stored)) as match:
            io.warm(match)
        device.halt()
        transfer = io.restore(prompt(CHUNKS), UNITS, NOW, LATE)
        try:
            device.launched(1)
            assert not transfer.done.wait(0.1)
        finally:
            device.go.set()
        result = transfer.wait(SECONDS)
        assert result is not None and result.tokens == stored * PAGE
        assert target.tokens(range(2 * stored)) == source.tokens(range(2 * stored))
    assert not device.errors


def test_the_first_pages_are_looked_up_while_the_engine_still_uses_its_units(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, over, looked = saved(ns, CHUNKS), Engine(), threading.Event(), threading.Event()
    more, asked = Lookahead.more, list[int]()

    class After:
        def query(self) -> bool:
            return over.is_set()

    def noted(lookahead: Lookahead, number: int, chunks: int) -> int:
        asked.append(chunks)
        there = more(lookahead, number, chunks)
        looked.set()
        return there

    monkeypatch.setattr(Lookahead, "more", noted)
    with attach(ns, target.kv) as io:
        transfer = io.restore(prompt(CHUNKS), UNITS, After(), LATE)
        assert looked.wait(SECONDS) and not transfer.done.wait(0.05)
        assert asked == [2] and (target.memory == 0xA5A5).all()
        over.set()
        result = transfer.wait(SECONDS)
        assert result is not None and result.tokens == CHUNKS * PAGE
        assert target.tokens(UNITS) == source.tokens(UNITS)


def test_it_counts_as_one_lookup_and_releases_its_segments(ns: kvfs.Namespace, store: kvfs.Store) -> None:
    saved(ns, 5)
    pages: list[Any] = []
    with counted(store) as moved, attach(ns, Engine().kv) as io:
        transfer = io.restore(prompt(CHUNKS), UNITS, NOW, LATE, on_page=pages.append, on_done=pages.append)
        assert transfer.wait(SECONDS) is not None
        assert [(page.chunk, page.outcome) for page in pages[:-1]] == [(n, PageOutcome.LOADED) for n in range(5)]
        assert pages[-1] is transfer
        names = ("lookups", "tokens_queried", "tokens_matched", "tokens_loaded", "loads_done")
        assert [moved(name) for name in names] == [1, CHUNKS * PAGE, 5 * PAGE, 5 * PAGE, 1]
    assert moved("bytes_loaded") == 5 * ns.layout.groups[0].page_bytes
    assert not [hold for hold in ns._c.holds if hold.held], "a restore that has ended holds segments"
    cells = [cell.cell_contents for cell in transfer._control._summarise.__closure__ or ()]
    held = [cell.hold and cell.hold.held for cell in cells if isinstance(cell, PrefixMatch)]
    assert held == [{}] and Lookahead not in map(type, cells), "the transfer holds them"


def test_command_buffers_are_sized_for_the_pages_that_are_found(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for all of the prompt; if more pages are found than expected, another buffer is taken."""
    monkeypatch.setattr(lane, "COMMANDS_BYTES_MIN", 4096)
    monkeypatch.setattr(page_feed, "COMMANDS_PAGES", 1)
    monkeypatch.setattr(batches, "BATCH_BYTES_MIN", 1)
    source, target = saved(ns, CHUNKS), Engine()
    with attach(ns, target.kv, scratch_bytes="32KiB") as io:
        loads, taken = io._gpu_context.loads, list[int]()
        make = loads.commands
        loads.commands = lambda nbytes: (taken.append(nbytes), make(nbytes))[1]  # type: ignore[method-assign]
        for many in (CHUNKS, CHUNKS, 40_000):
            target.memory[...] = 0xA5A5
            assert restored(io, prompt(many), [*UNITS, *[31] * (2 * many - len(UNITS))]).tokens == CHUNKS * PAGE
            assert target.tokens(UNITS) == source.tokens(UNITS)
            assert len(taken) > 1 or many > CHUNKS
            assert len(loads._buffers) == len(loads._free)
            taken.clear()
        assert sum(buffer.nbytes for buffer in loads._buffers) < 80 * many


@pytest.mark.parametrize("way", [{}, {"transport": "arena"}], ids=["in place", "arena"])
def test_an_active_segment_is_read_in_place_as_far_as_it_is_published(
    store_path: Path, through_ring: list[int], way: dict[str, Any]
) -> None:
    """A region that ended with the first pages would be in use when the next pages need more of it."""
    with kvfs.open(store_path, capacity="1GiB") as store:
        ns = store.namespace("model", LAYOUT, "1")
        source, target = Engine(seed=1), Engine()
        with attach(ns, source.kv) as io:
            result = io.save(ns.plan_save(prompt(CHUNKS)), UNITS, NOW, LATE).wait(SECONDS)
            assert result is not None and result.pages == CHUNKS and store.stats()["segments"]["active"]
        with attach(ns, target.kv, **way) as io:
            for again in range(3):
                through_ring.clear()
                assert restored(io, prompt(CHUNKS), UNITS).tokens == CHUNKS * PAGE
                assert not through_ring or (way and not again)
                io.sweep()
        assert target.tokens(UNITS) == source.tokens(UNITS)


@pytest.mark.parametrize("how", ["load", "restore"])
def test_a_conversation_that_grows_in_an_active_segment_is_read_in_place(
    store_path: Path, through_ring: list[int], how: str
) -> None:
    """The first turn's region is too short for the second turn, whose first copies use it by then."""
    source, target = Engine(seed=1), Engine()
    with kvfs.open(store_path, capacity="1GiB") as store:
        ns = store.namespace("model", LAYOUT, "1")
        with attach(ns, source.kv) as saves, attach(ns, target.kv) as io:
            for chunks in (8, 16, 16):
                result = saves.save(ns.plan_save(prompt(chunks)), range(2 * chunks), NOW, LATE).wait(SECONDS)
                assert result is not None and not result.declined
                assert come(ns, io, how, prompt(chunks), range(2 * chunks)).tokens == chunks * PAGE
                assert not through_ring, "the region was not replaced by a longer one"
        assert (target.memory == source.memory).all()


@pytest.mark.parametrize("way", WAYS)
def test_pages_that_ranks_have_written_are_assembled(ns: kvfs.Namespace, way: str) -> None:
    whole, target = Engine(seed=9), Engine()
    for h in (0, 1):
        half = Engine(heads=(h, 1))
        half.memory[...] = whole.memory[:, :, :, h : h + 1]
        with attach(ns, half.kv) as io:
            result = io.save(ns.plan_save(prompt(5), part=io.parts), range(10), NOW).wait(SECONDS)
            assert result is not None and result.pages == 5
    with attach(ns, target.kv, **WAYS[way]) as io:
        assert restored(io, prompt(CHUNKS)).tokens == 5 * PAGE
    assert target.tokens(range(10)) == whole.tokens(range(10))
    upper = Engine(heads=(1, 1), layers=(2, 3))
    with attach(ns, upper.kv, **WAYS[way]) as io:
        assert restored(io, prompt(CHUNKS)).tokens == 5 * PAGE
    assert (upper.memory[:, :10] == whole.memory[2:, :10, :, 1:2]).all()


@pytest.mark.parametrize(("way", "chunk"), [("in_place", 0), ("in_place", 4), ("arena", 4), ("small ring", 11)])
def test_a_flipped_bit_ends_what_is_restored_and_leaves_the_index(
    ns: kvfs.Namespace, store: kvfs.Store, way: str, chunk: int
) -> None:
    source, target = saved(ns, CHUNKS), Engine()
    with ns.match(prompt(CHUNKS)) as match:
        page = bytes(memoryview(ns.view(match)[chunk])[:64])
    [path] = segment_files(Path(store.path))
    raw = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(raw.index(page))
        file.write(bytes([page[0] ^ 4]))
    with counted(store) as moved, attach(ns, target.kv, **WAYS[way]) as io:
        result = restored(io, prompt(CHUNKS))
        assert (result.tokens, result.reason) == (chunk * PAGE, "unreadable"), result
        assert target.tokens(range(2 * chunk)) == source.tokens(range(2 * chunk))
        assert (target.memory[:, 2 * chunk : 2 * chunk + 2] == 0xA5A5).all()
        assert moved("pages_corrupt") == 1
        assert restored(io, prompt(CHUNKS)).tokens == chunk * PAGE
        assert moved("pages_corrupt") == 1, "its record is still in the index"


def test_tokens_and_units_say_what_to_restore(ns: kvfs.Namespace) -> None:
    source, target = saved(ns, CHUNKS), Engine()
    tokens = prompt(CHUNKS)
    with attach(ns, target.kv) as io:

        def check(expected: int, units: Any = UNITS, **how: Any) -> kvfs.TransferResult:
            target.memory[...] = 0xA5A5
            result = restored(io, tokens, units, **how)
            assert result.tokens == expected * PAGE, result
            return result

        check(CHUNKS - 1, leave=1)
        check(CHUNKS - 2, leave=PAGE + 1)
        check(0, leave=1 << 30)
        check(0, extra={0: b"an image"})
        check(3, extra={3: b"an image"})
        check(4, range(9))  # the ninth block is half a page
        check(0, range(1))
        check(0, [])
        assert check(CHUNKS, first_token=5 * PAGE).pages == CHUNKS - 5
        assert (target.memory[:, :10] == 0xA5A5).all()
        assert target.tokens(range(10, 24)) == source.tokens(range(10, 24))
        assert check(CHUNKS, first_token=CHUNKS * PAGE).pages == 0
        assert check(CHUNKS, [-1] * 7 + list(range(7, 24))).pages == CHUNKS - 3
        assert (target.memory[:, :7] == 0xA5A5).all()
        assert target.tokens(range(7, 24)) == source.tokens(range(7, 24))
        check(CHUNKS, [*range(12, 24), *range(12)])
        assert target.tokens([*range(12, 24), *range(12)]) == source.tokens(UNITS)
        assert restored(io, []).tokens == restored(io, tokens[: PAGE - 1]).tokens == 0
        assert restored(io, [*tokens, 7]).tokens == CHUNKS * PAGE
        assert restored(io, [*tokens[: 7 * PAGE], 7, *tokens]).tokens == 7 * PAGE


def test_bad_input_is_refused_before_anything_moves(ns: kvfs.Namespace, store: kvfs.Store) -> None:
    bad: list[tuple[str, dict[str, Any]]] = [
        ("leave is -1", {"leave": -1}), ("first_token is -1", {"first_token": -1}),
        ("deadline is -1", {"deadline": -1}), ("after is None", {"after": None}),
        ("token_ids is str", {"token_ids": "text"}),
        ("units of group full reach from 0 to 32", {"units": range(33)}), ("extra is list", {"extra": []}),
        ("units names group 'window'", {"units": {"window": UNITS}}), ("units lacks group 'full'", {"units": {}}),
    ]  # fmt: skip
    good: dict[str, Any] = {"token_ids": prompt(2), "units": UNITS, "after": NOW}
    with counted(store) as moved, attach(ns, Engine().kv) as io:
        for message, changed in bad:
            with pytest.raises(ConfigError, match=message):
                io.restore(**{**good, **changed})
        assert not io._unfinished and not moved("lookups")
    with pytest.raises(ConfigError, match="was closed"):
        io.restore(**good)
