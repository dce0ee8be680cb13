"""Restores: a prompt is looked up while its first pages are on their way."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="the GPU transport needs triton")

import kvfs
from kvfs import PageOutcome, TransferState, gpubatches, gpulane, gpurestore, gpusource, lookup
from kvfs.errors import ConfigError, IndexUnavailableError
from kvfs.layout import Group, Need, PageLayout
from kvfs.lookahead import Lookahead
from kvfs.match import PrefixMatch
from kvfs.matcher import Matcher
from kvfs.staging import SLOT_ALIGN
from tests.kernels import test_gpu_groups as groups
from tests.kernels.test_gpu_late import WAYS, LateDevice
from tests.kernels.test_gpu_overlap import Halting
from tests.kernels.test_gpu_transport import LATE, LAYOUT, NOW, PAGE, SECONDS, Engine, attach, prompt, saved
from tests.stores import counted, segment_files

CHUNKS = 12
UNITS = range(2 * CHUNKS)


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpurestore, "FIRST_PAGES", 2)


def restored(io: Any, tokens: list[int], units: Any = UNITS, **how: Any) -> kvfs.TransferResult:
    result = io.restore(tokens, units, NOW, LATE, **how).wait(SECONDS)
    assert result is not None
    return result


def come(ns: kvfs.Namespace, io: Any, how: str, tokens: list[int], units: Any) -> kvfs.TransferResult:
    """What a load, or a restore, of a prompt comes to."""
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
    """Stops lookups before the piece that ends behind chunk ``at``."""

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
def test_restores_and_loads_that_overlap_are_right_whatever_comes_first(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch, way: str, seed: int
) -> None:
    monkeypatch.setattr(gpulane, "QUEUED", 3)
    monkeypatch.setattr(gpubatches, "BATCH_BYTES_MIN", 1)
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


def test_the_first_pages_are_on_their_way_before_the_rest_is_looked_up(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, device, looking = saved(ns, CHUNKS), Engine(), Halting(), Looking(monkeypatch, 6)
    monkeypatch.setattr(gpulane, "PENDING", 0)
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


def test_its_first_pages_are_looked_up_while_the_engine_still_uses_its_units(
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


def test_it_counts_as_one_lookup_and_lets_go_of_its_segments(ns: kvfs.Namespace, store: kvfs.Store) -> None:
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
    assert not [hold for hold in ns._c.holds if hold.held], "a restore that is over holds segments"
    cells = [cell.cell_contents for cell in transfer._summarise.__closure__ or ()]
    held = [cell.hold and cell.hold.held for cell in cells if isinstance(cell, PrefixMatch)]
    assert held == [{}] and Lookahead not in map(type, cells), "whoever keeps the transfer holds them"


def test_work_lists_take_as_much_room_as_what_is_found(ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not as much as all of the prompt would; where that is more than was thought, they go on another sheet."""
    monkeypatch.setattr(gpulane, "SHEET_BYTES", 4096)
    monkeypatch.setattr(gpurestore, "SHEET_PAGES", 1)
    monkeypatch.setattr(gpubatches, "BATCH_BYTES_MIN", 1)
    source, target = saved(ns, CHUNKS), Engine()
    with attach(ns, target.kv, scratch_bytes="32KiB") as io:
        lane, taken = io._gpu_desk.loads, list[int]()
        sheet = lane.sheet
        lane.sheet = lambda nbytes: (taken.append(nbytes), sheet(nbytes))[1]  # type: ignore[method-assign]
        for many in (CHUNKS, CHUNKS, 40_000):
            target.memory[...] = 0xA5A5
            assert restored(io, prompt(many), [*UNITS, *[31] * (2 * many - len(UNITS))]).tokens == CHUNKS * PAGE
            assert target.tokens(UNITS) == source.tokens(UNITS)
            assert len(taken) > 1 or many > CHUNKS
            assert len(lane._sheets) == len(lane._free)
            taken.clear()
        assert sum(sheet.nbytes for sheet in lane._sheets) < 80 * many


@pytest.mark.parametrize("way", [{}, {"transport": "arena"}], ids=["in place", "arena"])
def test_an_active_segment_is_read_in_place_as_far_as_it_is_published(
    store_path: Path, through_ring: list[int], way: dict[str, Any]
) -> None:
    """A piece that ended with the pages that are looked up first would be in use when the next ones need more of it."""
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
def test_a_conversation_that_grows_in_an_active_segment_is_read_in_place_soon(
    store_path: Path, through_ring: list[int], how: str
) -> None:
    """The first turn's piece is too short for the second turn, and in use when that finds out."""
    source, target = Engine(seed=1), Engine()
    with kvfs.open(store_path, capacity="1GiB") as store:
        ns = store.namespace("model", LAYOUT, "1")
        with attach(ns, source.kv) as saves, attach(ns, target.kv) as io:
            for chunks in (8, 16, 16):
                result = saves.save(ns.plan_save(prompt(chunks)), range(2 * chunks), NOW, LATE).wait(SECONDS)
                assert result is not None and not result.declined
                through_ring.clear()
                assert come(ns, io, how, prompt(chunks), range(2 * chunks)).tokens == chunks * PAGE
                io.sweep()
            assert not through_ring, "the piece was not made anew"
        assert (target.memory == source.memory).all()


def test_a_segment_that_grows_between_two_lookups_is_read_in_place(
    store: kvfs.Store, monkeypatch: pytest.MonkeyPatch, through_ring: list[int]
) -> None:
    """The window's group is the first of the layout and the last to be looked up, and its pages come meanwhile."""
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


@pytest.mark.parametrize("way", WAYS)
def test_what_was_written_by_ranks_is_put_together(ns: kvfs.Namespace, way: str) -> None:
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
        assert moved("pages_corrupt") == 1, "its record is in the index still"


def test_tokens_and_units_say_what_is_to_be_restored(ns: kvfs.Namespace) -> None:
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


# ---------------------------------------------------------------- ends


def test_a_restore_that_is_cancelled_while_it_is_looked_up_moves_nothing_more(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, looking = saved(ns, CHUNKS), Engine(), Looking(monkeypatch, 2)
    with attach(ns, target.kv) as io:
        transfer = io.restore(prompt(CHUNKS), UNITS, NOW, LATE)
        assert looking.reached.wait(SECONDS)
        assert not transfer.cancel(0.05)
        looking.go.set()
        assert transfer.cancel(SECONDS)
        result = transfer.wait(SECONDS)
        assert result is not None and transfer.state is TransferState.CANCELLED and result.reason == "cancelled"
        assert result.tokens == 2 * PAGE and target.tokens(range(4)) == source.tokens(range(4))
        assert (target.memory[:, 4:] == 0xA5A5).all()


@pytest.mark.parametrize("when", ["queued", "waiting"])
def test_a_restore_that_is_cancelled_before_it_is_looked_up_is_cancelled(ns: kvfs.Namespace, when: str) -> None:
    saved(ns, 2)
    target, go = Engine(), threading.Event()

    class After:
        def query(self) -> bool:
            return go.is_set()

    with attach(ns, target.kv) as io:
        first = io.restore(prompt(2), UNITS, After(), LATE)
        transfer = first if when == "waiting" else io.restore(prompt(2), UNITS, NOW, LATE)
        assert transfer.cancel(SECONDS)
        go.set()
        assert first.wait(SECONDS) is not None and transfer.state is TransferState.CANCELLED
        result = transfer.result
        assert result is not None and (result.tokens, result.pages, result.reason) == (0, 0, "cancelled")
        assert restored(io, prompt(2)).tokens == 2 * PAGE


def test_a_deadline_that_passes_while_it_is_looked_up_leaves_what_was_found(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, looking = saved(ns, CHUNKS), Engine(), Looking(monkeypatch, 2)
    with attach(ns, target.kv) as io:
        transfer = io.restore(prompt(CHUNKS), UNITS, NOW, LATE)
        assert looking.reached.wait(SECONDS)
        monkeypatch.setattr(type(io._gpu_desk), "late", lambda _, transfer: transfer._note("deadline") or True)
        looking.go.set()
        result = transfer.wait(SECONDS)
        assert result is not None and (result.tokens, result.reason) == (2 * PAGE, "deadline"), result
        assert target.tokens(range(4)) == source.tokens(range(4)) and (target.memory[:, 4:] == 0xA5A5).all()


@pytest.mark.parametrize("found", [0, 2, 6])
def test_an_index_that_answers_no_more_leaves_what_was_found(
    ns: kvfs.Namespace, store: kvfs.Store, monkeypatch: pytest.MonkeyPatch, found: int
) -> None:
    source, target = saved(ns, CHUNKS), Engine()
    more, read = Lookahead.more, ns._matcher.read

    def unavailable(*_: Any) -> Any:
        raise IndexUnavailableError("timeout")

    def until(lookahead: Lookahead, number: int, chunks: int) -> int:
        monkeypatch.setattr(ns._matcher, "read", unavailable if chunks > found else read)
        return more(lookahead, number, chunks)

    monkeypatch.setattr(Lookahead, "more", until)
    with counted(store) as moved, attach(ns, target.kv) as io:
        result = restored(io, prompt(CHUNKS))
        assert (result.tokens, result.declined, moved("lookup_unavailable_timeout")) == (found * PAGE, 0, 1)
    assert target.tokens(range(2 * found)) == source.tokens(range(2 * found))


@pytest.mark.parametrize("again", [False, True], ids=["purged", "stored again"])
def test_pages_that_are_gone_when_their_row_is_read_again_are_a_miss(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    source, target, more = saved(ns, CHUNKS), Engine(), Lookahead.more
    with ns.match(prompt(CHUNKS)) as match:
        pages = b"".join(bytes(page) for page in ns.view(match))

    def after_a_change(lookahead: Lookahead, number: int, chunks: int) -> int:
        if chunks == 6:
            ns._c.index.write(lambda session: session.txn.drop(session.db.pages, delete=False), SECONDS)
            if again:
                assert ns.put(prompt(CHUNKS), pages).stored == CHUNKS
        return more(lookahead, number, chunks)

    monkeypatch.setattr(Lookahead, "more", after_a_change)
    with attach(ns, target.kv) as io:
        result = restored(io, prompt(CHUNKS))
    assert (result.tokens, result.declined) == (CHUNKS * PAGE if again else 0, 0), result
    if again:
        assert target.tokens(UNITS) == source.tokens(UNITS)


def test_an_error_behind_the_lookup_leaves_no_token_restored(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved(ns, CHUNKS)

    def fails(*_: Any) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(Matcher, "count", fails)
    with attach(ns, Engine().kv) as io:
        transfer = io.restore(prompt(CHUNKS), UNITS, NOW, LATE)
        result = transfer.wait(SECONDS)
        assert result is not None and (result.tokens, result.pages, result.tiers) == (0, 0, {})
        assert transfer.state is TransferState.FAILED
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["no memory"]


def test_a_lookup_that_fails_for_a_bug_fails_its_restore_and_no_other(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, more = saved(ns, CHUNKS), Engine(), Lookahead.more

    def fails(lookahead: Lookahead, number: int, chunks: int) -> int:
        if chunks > 2:
            raise RuntimeError("a bug")
        return more(lookahead, number, chunks)

    with attach(ns, target.kv) as io:
        with monkeypatch.context() as patched:
            patched.setattr(Lookahead, "more", fails)
            transfer = io.restore(prompt(CHUNKS), UNITS, NOW, LATE)
            result = transfer.wait(SECONDS)
        assert result is not None and (result.tokens, result.reason) == (0, "error")
        assert transfer.state is TransferState.FAILED
        assert restored(io, prompt(CHUNKS)).tokens == CHUNKS * PAGE
        assert target.tokens(UNITS) == source.tokens(UNITS)


# ---------------------------------------------------------------- several groups


@pytest.fixture
def hybrid(store: kvfs.Store) -> kvfs.Namespace:
    return store.namespace("hybrid", groups.LAYOUT, "1")


def save_hybrid(ns: kvfs.Namespace, chunks: int = groups.CHUNKS) -> groups.Engine:
    engine = groups.Engine(seed=1)
    with attach(ns, *engine.kvs) as io:
        result = io.save(ns.plan_save(groups.TOKENS[: chunks * groups.PAGE]), groups.units(), NOW, LATE).wait(SECONDS)
        assert result is not None and not result.declined
    return engine


def check_hybrid(source: groups.Engine, target: groups.Engine, chunks: int) -> None:
    first = max(0, chunks - groups.WINDOW)
    assert target.blocks("full", 0, chunks) == source.blocks("full", 0, chunks)
    assert target.blocks("window", first, chunks) == source.blocks("window", first, chunks)
    assert set(target.blocks("window", 0, first) + target.blocks("window", chunks, groups.CHUNKS + 3)) <= {0xA5}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stored", [0, 3, 7, groups.CHUNKS])
def test_windows_are_those_at_the_end_of_what_was_found(hybrid: kvfs.Namespace, way: str, stored: int) -> None:
    source, target = save_hybrid(hybrid, stored), groups.Engine()
    with attach(hybrid, *target.kvs, **{**WAYS[way], "ring_bytes": "64KiB", "dirty_bytes": None}) as io:
        result = restored(io, groups.TOKENS, groups.units())
        pages = stored + min(stored, groups.WINDOW)
        assert (result.tokens, result.pages, result.declined) == (stored * groups.PAGE, pages, 0), result
    check_hybrid(source, target, stored)


@pytest.mark.parametrize("way", WAYS)
def test_what_lies_behind_the_last_whole_window_is_of_no_use(hybrid: kvfs.Namespace, way: str) -> None:
    """All of the full group is there, and by then on its way; of the windows those up to chunk 7."""
    source, target = save_hybrid(hybrid, 7), groups.Engine()
    pages = {"full": bytes(5 * hybrid.layout.groups[0].page_bytes), "window": b""}
    assert hybrid.put(groups.TOKENS, pages, {"full": 7, "window": 0}).stored == 5
    with attach(hybrid, *target.kvs, **{**WAYS[way], "ring_bytes": "64KiB", "dirty_bytes": None}) as io:
        result = restored(io, groups.TOKENS, groups.units())
        assert (result.tokens, result.pages, result.declined) == (7 * groups.PAGE, 7 + groups.WINDOW, 0), result
    check_hybrid(source, target, 7)


def test_pages_that_came_in_vain_are_not_counted_as_used(hybrid: kvfs.Namespace, store: kvfs.Store) -> None:
    """The full group is there, and no window."""
    pages = {"full": bytes(5 * hybrid.layout.groups[0].page_bytes), "window": b""}
    assert hybrid.put(groups.TOKENS, pages, {"full": 0, "window": 0}).stored == 5
    stamps: list[Any] = []
    with counted(store) as moved, attach(hybrid, *groups.Engine().kvs) as io:
        recency = hybrid._c.recency
        recency.stamp = lambda *stamp: stamps.append(stamp)  # type: ignore[method-assign]
        result = restored(io, groups.TOKENS, groups.units())
        assert (result.tokens, result.pages, result.nbytes, result.declined) == (0, 0, 0, 0)
    assert not moved("bytes_loaded") and not stamps and recency.request_of(b"") is None


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
        again = restored(io, groups.TOKENS, groups.units())
        assert again.tokens == hybrid.match(groups.TOKENS).tokens and not again.declined, again
    check_hybrid_prefix(source, target, again.tokens // groups.PAGE)


def check_hybrid_prefix(source: groups.Engine, target: groups.Engine, chunks: int) -> None:
    first = max(0, chunks - groups.WINDOW)
    assert target.blocks("full", 0, chunks) == source.blocks("full", 0, chunks)
    assert target.blocks("window", first, chunks) == source.blocks("window", first, chunks)


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
