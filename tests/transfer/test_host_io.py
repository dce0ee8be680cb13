"""Asynchronous transfers: every state reached, every step cancelled, every wait bounded, every callback once."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import gc
import multiprocessing
import os
import pickle
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvfs
from kvfs import PageOutcome, TransferState
from kvfs.errors import ConfigError, StoreReadOnlyError
from kvfs.pages.layout import Cell, Group, Need, PageLayout, Part
from kvfs.system.files import Files
from kvfs.transfer import load as host_load
from kvfs.transfer import save as host_save
from kvfs.transfer import workers
from kvfs.transfer.control import TransferControl, TransferTask
from kvfs.transfer.host_io import HostIO
from kvfs.types import Tier
from kvfs.write.active_segments import RoomWait
from kvfs.write.appender import AppendJob, Outcome

PAGE, BLOCK = 32, 16
LAYOUT = PageLayout.kv(layers=4, kv_heads=4, head_dim=8, dtype="bfloat16", page_tokens=PAGE)
ORDER = "layer,block,token,head,2*dim"
SECONDS = 60.0  # of waits that end at once unless something is wrong
LATE = 3600.0  # a deadline that no test reaches


class Gate:
    """Stops threads at a place until it is opened."""

    def __init__(self) -> None:
        self.reached, self._open = threading.Event(), threading.Event()
        self._open.set()

    def shut(self) -> None:
        self.reached.clear()
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def __call__(self) -> None:
        if not self._open.is_set():
            self.reached.set()
            assert self._open.wait(SECONDS)


class GatedFiles(Files):
    """A disk whose reads and writes by transfers can be stalled."""

    def __init__(self) -> None:
        self.writes, self.reads = Gate(), Gate()

    def pwritev(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        if threading.current_thread().name.startswith("kvfs-write"):
            self.writes()
        return super().pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
        if threading.current_thread().name.startswith("kvfs-read"):
            self.reads()
        return super().preadv(fd, buffers, offset, flags)


class Engine:
    """The KV memory of one rank: a tensor of its layers and heads, and its first content."""

    def __init__(self, layers: Sequence[int] = range(4), heads: tuple[int, int] = (0, 4), *, seed: int | None = 0,
                 replica: tuple[int, int] = (0, 1), units: int = 64) -> None:  # fmt: skip
        shape = (len(layers), units, BLOCK, heads[1], 16)
        self.memory = np.full(shape, 0xA5A5, "uint16")
        if seed is not None:  # the bytes of a cell depend on (layer, unit, token, head) of the model only
            whole = np.random.default_rng(seed).integers(0, 65536, (4, units, BLOCK, 4, 16), dtype="uint16")
            self.memory[...] = whole[list(layers), :, :, heads[0] : sum(heads)]
        self.kv = kvfs.describe(
            LAYOUT.groups[0], self.memory, ORDER, layers=list(layers), first_head=heads[0], replica=replica
        )

    def tokens(self, units: Sequence[int]) -> bytes:
        return self.memory[:, list(units)].tobytes()


class Log:
    """Records the calls of callbacks."""

    def __init__(self) -> None:
        self.pages: Counter[tuple[str, int]] = Counter()
        self.outcomes: Counter[PageOutcome] = Counter()
        self.ends: list[kvfs.Transfer] = []
        self.late = 0

    @property
    def hooks(self) -> dict[str, Any]:
        return {"on_page": self.page, "on_done": self.done}

    def page(self, done: kvfs.PageDone) -> None:
        self.late += bool(self.ends)
        self.pages[done.group, done.chunk] += 1
        self.outcomes[done.outcome] += 1

    def done(self, transfer: kvfs.Transfer) -> None:
        assert transfer.result is not None
        self.ends.append(transfer)

    def check(self, transfer: kvfs.Transfer, pages: int) -> None:
        """Once per page, then once for the transfer."""
        assert len(self.pages) == pages and set(self.pages.values()) <= {1}
        assert self.ends == [transfer] and not self.late


def prompt(chunks: int, first: int = 0) -> list[int]:
    return list(range(first, first + chunks * PAGE))


def blocks(chunks: int, first: int = 0) -> list[int]:
    return list(range(first, first + chunks * PAGE // BLOCK))


@pytest.fixture
def files() -> Iterator[GatedFiles]:
    gated = GatedFiles()
    yield gated
    gated.writes.open()
    gated.reads.open()


@pytest.fixture
def store(store_path: Path, files: GatedFiles) -> Iterator[kvfs.Store]:
    with kvfs.open(store_path, capacity="64MiB", files=files) as opened:
        yield opened
        files.writes.open()
        files.reads.open()


@pytest.fixture
def ns(store: kvfs.Store) -> kvfs.Namespace:
    return store.namespace("model", LAYOUT, revision="1")


def saved(ns: kvfs.Namespace, chunks: int, *, seed: int = 0) -> Engine:
    """An engine whose first ``chunks`` chunks are stored."""
    engine = Engine(seed=seed)
    with ns.attach(engine.kv) as io:
        result = io.save(ns.plan_save(prompt(chunks)), blocks(chunks), deadline=LATE).wait(SECONDS)
    assert result is not None and result.pages == chunks
    return engine


def settled(io: HostIO) -> None:
    """Nothing is leaked once all transfers have ended."""
    end = time.monotonic() + SECONDS
    while io.ring.free < io.ring.slots or io._unfinished:
        assert time.monotonic() < end, io.ring.states()
        time.sleep(0.001)
    io.ring.check()


# -- round trips ----------------------------------------------------------------------------


def test_save_and_load(ns: kvfs.Namespace, store: kvfs.Store) -> None:
    engine, other = Engine(), Engine(seed=None)
    log = Log()
    io = ns.attach(engine.kv)
    assert io.transport == "host" and io.parts == {"full": Part(0, 4, 0, 4)}
    t = io.save(ns.plan_save(prompt(5)), blocks(5, 3), **log.hooks)
    assert t.published.wait(SECONDS) and t.done.wait(SECONDS) and t.source_free.is_set()
    assert t.state is TransferState.DONE and t.kind == "save"
    assert t.result == kvfs.TransferResult(5 * PAGE, 5, 5 * LAYOUT.page_bytes)
    log.check(t, 5)
    log = Log()
    with ns.attach([other.kv]) as io2, ns.match(prompt(6)) as match:
        t = io2.load(match, blocks(6, 20), **log.hooks)
        result = t.wait(SECONDS)
        assert t.layer_ready(3).is_set()
    assert result is not None and (result.tokens, result.pages, result.reason) == (5 * PAGE, 5, "")
    assert sum(result.tiers.values()) == result.tokens
    log.check(t, 5)
    assert other.tokens(blocks(5, 20)) == engine.tokens(blocks(5, 3))
    untouched = [u for u in range(64) if u not in blocks(5, 20)]
    assert (other.memory[:, untouched] == 0xA5A5).all()
    counters = store.stats()["counters"]
    assert counters["tokens_loaded"] == 5 * PAGE == counters["tokens_matched"]
    assert counters["saves_done"] == counters["loads_done"] == 1
    settled(io)


def test_saving_again_moves_nothing(ns: kvfs.Namespace) -> None:
    engine = saved(ns, 3)
    io = ns.attach(engine.kv)
    t = io.save(ns.plan_save(prompt(3)), blocks(3))
    assert t.wait(SECONDS) == kvfs.TransferResult() and t.state is TransferState.DONE
    stale = kvfs.SavePlan(3, ns.plan_save(prompt(3)).hashes, {"full": (0, 1, 2)}, ns.identity.digest)
    t = io.save(stale, blocks(3))
    assert t.wait(SECONDS) == kvfs.TransferResult(skipped=3) and t.state is TransferState.DONE


def test_put_and_save_make_the_same_pages(ns: kvfs.Namespace) -> None:
    engine = saved(ns, 4)
    out = bytearray(4 * LAYOUT.page_bytes)
    with ns.match(prompt(4)) as match:
        assert ns.get(match, out) == 4
    want = engine.memory.reshape(4, 64, BLOCK, 4, 16)[:, :8].transpose(1, 0, 3, 2, 4).tobytes()
    assert bytes(out) == want


@pytest.mark.parametrize("ring_pages", [1, 2, 5])
def test_a_prompt_larger_than_the_ring(ns: kvfs.Namespace, ring_pages: int) -> None:
    engine, other = Engine(), Engine(seed=None)
    size = ring_pages * max(4096, LAYOUT.page_bytes)
    with ns.attach(engine.kv, ring_bytes=size) as io, ns.attach(other.kv, ring_bytes=size) as io2:
        result = io.save(ns.plan_save(prompt(17)), blocks(17), deadline=LATE).wait(SECONDS)
        assert result is not None and result.pages == 17
        with ns.match(prompt(17)) as match:
            assert io2.load(match, blocks(17), deadline=LATE).wait(SECONDS).tokens == 17 * PAGE  # type: ignore[union-attr]
        assert other.tokens(blocks(17)) == engine.tokens(blocks(17))
        settled(io)
        settled(io2)


def test_all_batches_of_a_save_share_one_wait_for_room(
    ns: kvfs.Namespace, store: kvfs.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each append had a wait of five seconds: where readers hold a store, a save of many batches lasted minutes."""
    waits: list[RoomWait] = []
    appender = store._shared.services().appender
    append = appender.store

    def counted(job: AppendJob, chunks: Sequence[int], wait: RoomWait) -> Outcome:
        waits.append(wait)
        return append(job, chunks, wait)

    monkeypatch.setattr(appender, "store", counted)
    engine = Engine()
    with ns.attach(engine.kv, ring_bytes=2 * LAYOUT.page_bytes) as io:
        for first in (0, 8 * PAGE):
            result = io.save(ns.plan_save(prompt(8, first)), blocks(8), deadline=LATE).wait(SECONDS)
            assert result is not None and result.pages == 8
    assert len(waits) > 4 and len({id(wait) for wait in waits}) == 2


@pytest.mark.parametrize("first", [0, 1, PAGE - 1, PAGE, 2 * PAGE + 5, 4 * PAGE])
def test_only_the_tokens_from_first_token_on(ns: kvfs.Namespace, first: int) -> None:
    engine, other = saved(ns, 4), Engine(seed=None)
    with ns.attach(other.kv) as io, ns.match(prompt(4)) as match:
        result = io.load(match, blocks(4), first_token=first).wait(SECONDS)
    assert result is not None and result.tokens == 4 * PAGE
    got, want = (e.memory[:, :8].reshape(4, 4 * PAGE, 4, 16) for e in (other, engine))
    assert (got[:, :first] == 0xA5A5).all() and (got[:, first:] == want[:, first:]).all()
    assert result.tiers.get(Tier.DEVICE, 0) == first and sum(result.tiers.values()) == 4 * PAGE


def test_units_of_minus_one_stay_as_they_are(ns: kvfs.Namespace) -> None:
    engine, other = saved(ns, 3), Engine(seed=None)
    with ns.attach(other.kv) as io, ns.match(prompt(3)) as match:
        t = io.load(match, [0, -1, -1, -1, 4, 5])
        result = t.wait(SECONDS)
    assert result is not None and (result.tokens, result.pages) == (3 * PAGE, 2)
    assert result.tiers[Tier.DEVICE] == PAGE
    assert (other.memory[:, 1:4] == 0xA5A5).all()
    assert other.tokens([0, 4, 5]) == engine.tokens([0, 4, 5])


@pytest.mark.parametrize("kind", ["callable", "wait", "synchronize"])
def test_the_source_is_read_after_the_event(ns: kvfs.Namespace, kind: str) -> None:
    engine, event = Engine(seed=None), threading.Event()

    class Stream:
        synchronize = staticmethod(event.wait)

        def wait(self) -> None:
            raise AssertionError("wait() of a device event makes a stream wait, not the host")

    after = {"callable": event.wait, "wait": event, "synchronize": Stream()}[kind]
    with ns.attach(engine.kv) as io:
        t = io.save(ns.plan_save(prompt(2)), blocks(2), after=after, deadline=LATE)
        engine.memory[...] = Engine().memory
        event.set()
        assert t.wait(SECONDS) is not None
    other = Engine(seed=None)
    with ns.attach(other.kv) as io, ns.match(prompt(2)) as match:
        assert io.load(match, blocks(2)).wait(SECONDS) is not None
    assert other.tokens(blocks(2)) == Engine().tokens(blocks(2))


# -- states ----------------------------------------------------------------------------------


def stalled(where: str, io: HostIO, ns: kvfs.Namespace, files: GatedFiles, monkeypatch: pytest.MonkeyPatch,
            log: Log) -> tuple[kvfs.Transfer, Callable[[], None]]:  # fmt: skip
    """A transfer of 3 pages that is stopped in a state, and a call that lets it continue."""
    gate = Gate()
    kind, _, state = where.partition(" ")
    submit: Callable[..., kvfs.Transfer]
    if kind == "save":
        plan = ns.plan_save(prompt(3, 10_000))
        submit = lambda after: io.save(plan, blocks(3), after=after, deadline=LATE, **log.hooks)  # noqa: E731
    else:
        match = ns.match(prompt(3))
        submit = lambda after: io.load(match, blocks(3), after=after, deadline=LATE, **log.hooks)  # noqa: E731
    after: Any = None
    if state in ("queued", "waiting"):
        gate.shut()
        after = gate
    if state == "queued":
        for _ in range(2):  # both threads of the pool
            empty = ns.plan_save([])
            blocker = Gate()
            blocker.shut()
            if kind == "save":
                io.save(empty, [], after=lambda b=blocker: (b.reached.set(), gate()), deadline=LATE)  # type: ignore[misc]
            else:
                io.load(ns.match([]), [], after=lambda b=blocker: (b.reached.set(), gate()), deadline=LATE)  # type: ignore[misc]
            assert blocker.reached.wait(SECONDS)
        return submit(None), gate.open
    if state == "copying":
        gate.shut()
        real = host_save.gather_pages
        monkeypatch.setattr(host_save, "gather_pages", lambda *a: (gate(), real(*a))[1])
    elif state == "scattering":
        gate.shut()
        scatter = host_load.scatter_pages
        monkeypatch.setattr(host_load, "scatter_pages", lambda *a, **k: (gate(), scatter(*a, **k))[1])
    elif state in ("writing", "loading"):
        gate = files.writes if state == "writing" else files.reads
        gate.shut()
    t = submit(after)
    assert gate.reached.wait(SECONDS)
    return t, gate.open


PLACES = [
    "save queued", "save waiting", "save copying", "save writing", "load queued", "load waiting", "load loading",
    "load scattering",
]  # fmt: skip


@pytest.mark.parametrize("where", PLACES)
def test_every_state_is_reached_and_left(
    where: str, ns: kvfs.Namespace, files: GatedFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(ns, 3)
    engine, log = Engine(seed=None), Log()
    with ns.attach(engine.kv, threads=2) as io:
        t, go_on = stalled(where, io, ns, files, monkeypatch, log)
        name = where.split()[1].replace("scattering", "loading")
        if name == "writing":
            assert t.source_free.wait(SECONDS)
        assert t.state is TransferState(name)
        assert not t.done.is_set() and t.result is None and t.wait(0.0) is None and not t.published.is_set()
        assert not t.layer_ready(0).is_set()
        assert t.source_free.is_set() == (name == "writing")
        go_on()
        result = t.wait(SECONDS)
        assert result is not None and result.pages == 3 and t.state is TransferState.DONE
        log.check(t, 3)
        settled(io)


@pytest.mark.parametrize("where", PLACES)
def test_cancel_at_every_step_leaks_nothing(
    where: str, ns: kvfs.Namespace, files: GatedFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(ns, 3)
    engine, log = Engine(seed=None), Log()
    with ns.attach(engine.kv, threads=2) as io:
        t, go_on = stalled(where, io, ns, files, monkeypatch, log)
        moving = where.split()[1] in ("copying", "writing", "scattering")  # a read moves no byte of the engine
        assert t.cancel(0.0) is not moving
        if moving:
            assert not t.done.is_set()
            canceller = threading.Thread(target=t.cancel)
            canceller.start()
            go_on()
            canceller.join(SECONDS)
            assert not canceller.is_alive()
        assert t.cancel() and t.source_free.is_set()
        engine.memory[...] = 0x1111  # no transfer reads or writes it any more
        go_on()
        assert t.done.wait(SECONDS)
        log.check(t, 3)
        if where == "save writing":  # the append in progress was finished: those pages are stored
            assert t.state in (TransferState.DONE, TransferState.CANCELLED)
        elif where == "load scattering":
            assert log.outcomes == {PageOutcome.LOADED: 3} and t.state is TransferState.DONE
        else:
            assert t.state is TransferState.CANCELLED and t.result is not None
            assert (t.result.reason, t.result.declined, t.result.pages) == ("cancelled", 3, 0)
        settled(io)
    assert (engine.memory == 0x1111).all()
    with ns.match(prompt(3, 10_000)) as match:
        assert match.chunks == log.outcomes[PageOutcome.STORED]


def test_cancel_from_a_callback_and_after_the_end(ns: kvfs.Namespace) -> None:
    engine, box = Engine(), []
    with ns.attach(engine.kv, ring_bytes=2 * max(4096, LAYOUT.page_bytes)) as io:
        log = Log()

        def on_page(done: kvfs.PageDone) -> None:
            log.page(done)
            while not box:
                time.sleep(0.001)
            box[0].cancel()

        t = io.save(ns.plan_save(prompt(9)), blocks(9), deadline=LATE, on_page=on_page, on_done=log.done)
        box.append(t)
        assert t.done.wait(SECONDS) and t.cancel()
        log.check(t, 9)
        assert t.result is not None and t.result.pages >= 1
        settled(io)


def test_an_event_that_raises_is_a_failure(ns: kvfs.Namespace) -> None:
    engine, log = Engine(), Log()

    def broken() -> None:
        raise RuntimeError("no device")

    with ns.attach(engine.kv) as io:
        t = io.save(ns.plan_save(prompt(2)), blocks(2), after=broken, **log.hooks)
        assert t.done.wait(SECONDS) and t.state is TransferState.FAILED and str(t.error) == "no device"
        assert t.source_free.is_set() and t.result is not None and t.result.reason == "error"
        log.check(t, 2)
        settled(io)


@pytest.mark.parametrize("error", [RuntimeError, SystemExit, asyncio.CancelledError, KeyboardInterrupt])
def test_callbacks_that_raise_disturb_no_transfer(ns: kvfs.Namespace, error: type[BaseException]) -> None:
    calls: list[object] = []

    def broken(what: object) -> None:
        calls.append(what)
        raise error

    with ns.attach(Engine().kv) as io:
        for first in range(0, 4000, 1000):  # more than there are threads
            t = io.save(ns.plan_save(prompt(3, first)), blocks(3), on_page=broken, on_done=broken)
            assert t.wait(SECONDS) is not None and t.state is TransferState.DONE
            assert len(calls) == 4 and calls[-1] is t
            calls.clear()


# -- a disk that stalls, a ring that is full ---------------------------------------------------


def test_preemption_waits_for_source_free_only(ns: kvfs.Namespace, files: GatedFiles) -> None:
    engine = Engine()
    io = ns.attach(engine.kv)
    files.writes.shut()
    transfers = [io.save(ns.plan_save(prompt(4, i * 1000)), blocks(4, i * 8), deadline=LATE) for i in range(6)]
    assert all(t.source_free.wait(SECONDS) for t in transfers)
    assert files.writes.reached.wait(SECONDS) and not any(t.published.is_set() for t in transfers)
    engine.memory[...] = 0  # the blocks belong to another request now
    files.writes.open()
    assert all(t.wait(SECONDS) is not None for t in transfers)
    other = Engine(seed=None)
    with ns.attach(other.kv) as io2, ns.match(prompt(4, 5000)) as match:
        assert io2.load(match, blocks(4, 40)).wait(SECONDS).tokens == 4 * PAGE  # type: ignore[union-attr]
    assert other.tokens(blocks(4, 40)) == Engine().tokens(blocks(4, 40))


def test_a_full_ring_declines_before_gathering(
    ns: kvfs.Namespace, files: GatedFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(ns, 3)
    gathered: list[int] = []
    real = host_save.gather_pages
    monkeypatch.setattr(host_save, "gather_pages", lambda *a: (gathered.extend(a[-1]), real(*a))[1])
    files.writes.shut()
    with ns.attach(Engine().kv, ring_bytes=4 * max(4096, LAYOUT.page_bytes)) as io:
        first = io.save(ns.plan_save(prompt(5, 1000)), blocks(5), deadline=0.2)
        assert first.source_free.wait(SECONDS) and gathered == [0, 1, 2], "a quarter of the ring is for loads"
        log = Log()
        second = io.save(ns.plan_save(prompt(2, 2000)), blocks(2), deadline=0.05, **log.hooks)
        result = second.wait(SECONDS)
        assert result is not None and (result.declined, result.reason) == (2, "ring")
        assert second.state is TransferState.DECLINED and gathered == [0, 1, 2] and io.ring.declined >= 2
        log.check(second, 2)
        late = io.save(ns.plan_save(prompt(2, 2000)), blocks(2), deadline=0.0)
        assert late.wait(SECONDS) is not None and late.result.reason == "deadline"  # type: ignore[union-attr]
        with ns.match(prompt(3)) as match:  # loads still get slots
            assert io.load(match, blocks(3, 30), deadline=LATE).wait(SECONDS).pages == 3  # type: ignore[union-attr]
        files.writes.open()
        result = first.wait(SECONDS)
        assert result is not None and (result.pages, result.declined, result.reason) == (3, 2, "ring")
        assert first.state is TransferState.PARTIAL
        settled(io)
    with ns.match(prompt(5, 1000)) as match:
        assert match.chunks == 3


def test_a_stalled_disk_delays_no_source_free(
    ns: kvfs.Namespace, files: GatedFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that finds the ring full waits while writes make progress, not for its deadline."""
    saved(ns, 3)
    files.writes.shut()
    with ns.attach(Engine().kv, ring_bytes=4 * max(4096, LAYOUT.page_bytes)) as io:
        first = io.save(ns.plan_save(prompt(3, 1000)), blocks(3), deadline=LATE)
        larger = io.save(ns.plan_save(prompt(5, 2000)), blocks(5), deadline=LATE)
        for t in (
            first,
            larger,
            *(io.save(ns.plan_save(prompt(2, i)), blocks(2), deadline=LATE) for i in (3000, 4000)),
        ):
            assert t.source_free.wait(SECONDS)
        assert (larger.result.declined, larger.result.reason) == (5, "ring")  # type: ignore[union-attr]
        with ns.match(prompt(3)) as match:
            assert io.load(match, blocks(3, 30), deadline=LATE).wait(SECONDS).pages == 3  # type: ignore[union-attr]
        files.writes.open()
        assert first.wait(SECONDS).pages == 3  # type: ignore[union-attr]
        monkeypatch.setattr(workers, "STALLED_SECONDS", LATE)  # this machine's disk may be slow
        again = io.save(ns.plan_save(prompt(5, 2000)), blocks(5), deadline=LATE).wait(SECONDS)
        assert again is not None and (again.pages, again.declined) == (5, 0)
        settled(io)


@pytest.mark.parametrize("kind", ["save", "load"])
def test_a_transfer_queued_behind_one_that_hangs_ends_at_its_deadline(ns: kvfs.Namespace, kind: str) -> None:
    engine, event, log = saved(ns, 1), threading.Event(), Log()
    with ns.attach(engine.kv, threads=1) as io, ns.match(prompt(1)) as match:

        def start(**options: Any) -> kvfs.Transfer:
            if kind == "load":
                return io.load(match, blocks(1), **options)
            return io.save(ns.plan_save(prompt(1, 500)), blocks(1), **options)

        first = start(after=event.wait, deadline=LATE)
        late, other = start(deadline=0.1, **log.hooks), start(deadline=LATE)
        assert late.source_free.wait(SECONDS)
        result = late.wait(SECONDS)
        assert result is not None and (result.declined, result.reason) == (1, "deadline")
        log.check(late, 1)
        assert first.state is TransferState.WAITING and other.state is TransferState.QUEUED
        event.set()
        assert first.wait(SECONDS).pages == 1 and other.wait(SECONDS).reason == ""  # type: ignore[union-attr]
        settled(io)


def test_dirty_bytes_bound_what_is_not_published(ns: kvfs.Namespace, files: GatedFiles) -> None:
    page = max(4096, LAYOUT.page_bytes)
    files.writes.shut()
    with ns.attach(Engine().kv, ring_bytes=8 * page, dirty_bytes=2 * page) as io:
        t = io.save(ns.plan_save(prompt(5)), blocks(5), deadline=0.1)
        assert t.source_free.wait(SECONDS) and io.ring.free == 6
        files.writes.open()
        assert t.wait(SECONDS) is not None
    with pytest.raises(ConfigError, match="dirty_bytes"):
        ns.attach(Engine().kv, dirty_bytes=1)


def test_one_slot_and_32_transfers_all_end(ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "STALLED_SECONDS", LATE)  # a machine may be slow
    engine, page = saved(ns, 4), max(4096, LAYOUT.page_bytes)
    logs = [Log() for _ in range(32)]
    with ns.attach(engine.kv, ring_bytes=page) as io:
        assert io.ring.slots == 1
        transfers = []
        for i, log in enumerate(logs):
            if i % 2:
                transfers.append(io.save(ns.plan_save(prompt(3, 1000 * i)), blocks(3), deadline=LATE, **log.hooks))
            else:
                transfers.append(io.load(ns.match(prompt(4)), blocks(4, 8), deadline=LATE, **log.hooks))
        for i in (3, 8):
            transfers[i].cancel()
        for i, (t, log) in enumerate(zip(transfers, logs, strict=True)):
            assert t.done.wait(SECONDS)
            log.check(t, 3 if i % 2 else 4)
            assert t.state is TransferState.DONE or i in (3, 8)
        settled(io)
    assert engine.tokens(blocks(4, 8)) == engine.tokens(blocks(4))


def test_too_many_unfinished_transfers_are_declined_at_once(ns: kvfs.Namespace, files: GatedFiles) -> None:
    files.writes.shut()
    with ns.attach(Engine().kv, queue_max=1) as io:
        first = io.save(ns.plan_save(prompt(1)), blocks(1), deadline=LATE)
        second = io.save(ns.plan_save(prompt(1, 500)), blocks(1), deadline=LATE)
        assert second.done.is_set() and second.result is not None and second.result.reason == "busy"
        files.writes.open()
        assert first.wait(SECONDS) is not None
        assert io.save(ns.plan_save(prompt(1, 500)), blocks(1)).wait(SECONDS).pages == 1  # type: ignore[union-attr]


@pytest.mark.parametrize(("name", "most"), [("queue_max", 1 << 20), ("threads", 64)])
def test_numbers_of_threads_and_of_waiting_transfers_have_a_limit(ns: kvfs.Namespace, name: str, most: int) -> None:
    how: dict[str, Any] = {name: most + 1}
    with pytest.raises(kvfs.ConfigError, match=f"{name} is {most + 1}: pass 1 to {most}"):
        ns.attach(Engine().kv, **how)


@pytest.mark.parametrize("where", ["queued", "writing"])
def test_cancelled_transfers_do_not_pile_up_behind_one_that_hangs(
    ns: kvfs.Namespace, files: GatedFiles, where: str
) -> None:
    event, reasons = threading.Event(), Counter[str]()
    ring = 4 * max(4096, LAYOUT.page_bytes)
    with ns.attach(Engine().kv, queue_max=5, threads=1, ring_bytes=ring) as io:
        after = event.wait if where == "queued" else None
        files.writes.shut()
        first = io.save(ns.plan_save(prompt(1)), blocks(1), after=after, deadline=LATE)
        assert after or files.writes.reached.wait(SECONDS)
        while first.state is TransferState.QUEUED:
            time.sleep(0.001)
        for i in range(1, 21):
            t = io.save(ns.plan_save(prompt(1, 500 * i)), blocks(1), deadline=LATE)
            assert after or t.source_free.wait(SECONDS)
            assert t.cancel() and t.wait(SECONDS) is not None
            reasons[t.result.reason] += 1  # type: ignore[union-attr]
        kept = 5 if after else 5 + io.ring.slots
        assert reasons == {"cancelled": kept, "busy": 20 - kept}
        event.set()
        files.writes.open()
        assert first.wait(SECONDS).pages == 1  # type: ignore[union-attr]
        end = time.monotonic() + SECONDS
        while not (t := io.save(ns.plan_save(prompt(1, 500)), blocks(1), deadline=LATE)).wait(SECONDS).pages:  # type: ignore[union-attr]
            assert t.result.reason == "busy" and time.monotonic() < end  # type: ignore[union-attr]


def test_a_disk_that_fails_declines(ns: kvfs.Namespace, files: GatedFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int, buffers: Sequence[Any], offset: int) -> int:
        raise OSError(errno.EIO, "broken")

    log = Log()
    with ns.attach(Engine().kv) as io:
        monkeypatch.setattr(files, "pwritev", broken)
        t = io.save(ns.plan_save(prompt(3)), blocks(3), **log.hooks)
        result = t.wait(SECONDS)
        assert result is not None and (result.declined, result.reason) == (3, "io")
        assert t.state is TransferState.DECLINED and t.source_free.is_set()
        log.check(t, 3)
        settled(io)


def test_a_cancelled_save_releases_its_slots_while_the_disk_stalls(ns: kvfs.Namespace, files: GatedFiles) -> None:
    files.writes.shut()
    with ns.attach(Engine().kv) as io:
        first = io.save(ns.plan_save(prompt(2)), blocks(2), deadline=LATE)
        assert files.writes.reached.wait(SECONDS)
        second = io.save(ns.plan_save(prompt(3, 1000)), blocks(3), deadline=LATE)
        assert second.source_free.wait(SECONDS) and io.ring.free == io.ring.slots - 5
        assert second.cancel(SECONDS) and second.done.wait(SECONDS) and io.ring.free == io.ring.slots - 2
        files.writes.open()
        assert first.wait(SECONDS) is not None and second.state is TransferState.CANCELLED
        settled(io)
    assert not ns.match(prompt(3, 1000))


def test_a_decline_ends_the_batches_behind_it(
    ns: kvfs.Namespace, files: GatedFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures, real, log = [errno.EIO], files.pwritev, Log()

    def fails_once(fd: int, buffers: Sequence[Any], offset: int) -> int:
        if failures and threading.current_thread().name.startswith("kvfs-write"):
            raise OSError(failures.pop(), "broken")
        return real(fd, buffers, offset)

    with ns.attach(Engine().kv, ring_bytes=max(4096, LAYOUT.page_bytes)) as io:  # one page per batch
        monkeypatch.setattr(files, "pwritev", fails_once)
        result = io.save(ns.plan_save(prompt(4)), blocks(4), deadline=LATE, **log.hooks).wait(SECONDS)
        assert result is not None and (result.pages, result.declined, result.reason) == (0, 4, "io")
        assert not failures and log.outcomes == {PageOutcome.DECLINED: 4}


def test_nothing_is_stored_behind_a_decline(ns: kvfs.Namespace) -> None:
    with ns.attach(Engine().kv) as io:
        t = io.save(ns.plan_save(prompt(4)), [0, 1, 2, -1, 4, 5, 6, 7])
        result = t.wait(SECONDS)
        assert result is not None and (result.pages, result.declined, result.reason) == (1, 3, "source")
    with ns.match(prompt(4)) as match:
        assert match.chunks == 1


# -- loads that fall short -------------------------------------------------------------------


def flip(store_path: Path, needle: bytes) -> None:
    """Change one byte of the page that begins with ``needle``."""
    for path in (store_path / "segments").iterdir():
        data = path.read_bytes()
        at = data.find(needle)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at + 5)
                file.write(bytes([data[at + 5] ^ 0x80]))
            return
    raise AssertionError("no such page")


def test_a_page_that_does_not_verify_ends_the_restored_length(ns: kvfs.Namespace, store_path: Path) -> None:
    engine, other, log = saved(ns, 4), Engine(seed=None), Log()
    bad = engine.memory[0, 4].transpose(1, 0, 2)[0].tobytes()  # head 0 of layer 0 of the first granule of chunk 2
    flip(store_path, bad)
    with ns.attach(other.kv) as io, ns.match(prompt(4)) as match:
        assert match.chunks == 4
        t = io.load(match, blocks(4), **log.hooks)
        result = t.wait(SECONDS)
        assert result is not None and (result.tokens, result.reason) == (2 * PAGE, "unreadable")
        assert t.state is TransferState.PARTIAL and t.layer_ready(0).is_set()
        assert sum(result.tiers.values()) == 2 * PAGE and log.outcomes[PageOutcome.UNREADABLE] == 1
        log.check(t, 4)
    assert other.tokens(blocks(2)) == engine.tokens(blocks(2))
    assert (other.memory[:, 4:6] == 0xA5A5).all(), "unverified bytes must not reach the engine"
    with ns.match(prompt(4)) as match:
        assert match.chunks == 2, "the bad page is a miss now"


def test_a_load_that_gets_no_slot_says_so(ns: kvfs.Namespace) -> None:
    saved(ns, 3)
    with ns.attach(Engine(seed=None).kv) as io, ns.match(prompt(3)) as match:
        lease = io.ring.acquire(io.ring.slots, 0.0)
        assert lease is not None
        t = io.load(match, blocks(3), deadline=0.05)
        result = t.wait(SECONDS)
        assert result is not None and (result.tokens, result.reason) == (0, "ring")
        assert t.state is TransferState.DECLINED
        assert io.load(match, blocks(3), deadline=0).wait(SECONDS).reason == "deadline"  # type: ignore[union-attr]
        lease.release()


def test_a_load_without_a_slot_is_declined_for_the_ring_though_there_is_time(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(ns, 3)
    with ns.attach(Engine(seed=None).kv) as io, ns.match(prompt(3)) as match:
        monkeypatch.setattr(io.ring, "acquire", lambda *_, **__: None)  # as of a ring that is closed
        result = io.load(match, blocks(3), deadline=LATE).wait(SECONDS)
        assert result is not None and (result.tokens, result.declined, result.reason) == (0, 3, "ring")


def test_what_a_transfer_does_unless_it_is_asked_for_more(ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def noting(kind: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **how: Any) -> Any:
            made.append(kind(*args, **how))
            return made[-1]

        return make

    with ns.attach(Engine().kv) as io:
        monkeypatch.setattr(io, "_save", noting(io._save))
        monkeypatch.setattr(io, "_load", noting(io._load))
        assert io.save(ns.plan_save(prompt(3)), blocks(3)).wait(SECONDS)
        with ns.match(prompt(3)) as match:
            assert io.load(match, blocks(3)).wait(SECONDS)
    save, load = made
    assert (save.gentle, save.attempt) == (False, bytes(8))
    request = load._request
    assert (request.gentle, request.layerwise, request.first_token, request.begun) == (False, False, 0, None)


def test_the_match_may_be_closed_while_it_loads(ns: kvfs.Namespace, store: kvfs.Store) -> None:
    engine, other, event = saved(ns, 3), Engine(seed=None), threading.Event()
    with ns.attach(other.kv) as io:
        match = ns.match(prompt(3))
        t = io.load(match, blocks(3), after=event, deadline=LATE)
        match.close()
        held = store._shared.c.segments
        assert held.count() == 1, "the load holds the segment, from before it was started"
        event.set()
        result = t.wait(SECONDS)
        assert held.count() == 0
    assert result is not None and result.tokens == 3 * PAGE
    assert other.tokens(blocks(3)) == engine.tokens(blocks(3))


# -- ranks, groups ---------------------------------------------------------------------------


def ranks(tp: int, pp: int, *, seed: int | None) -> list[Engine]:
    return [
        Engine(range(4 // pp * j, 4 // pp * (j + 1)), (4 // tp * i, 4 // tp), seed=seed)
        for j in range(pp) for i in range(tp)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("a", "b"), [((1, 1), (4, 2)), ((2, 1), (1, 1)), ((4, 1), (2, 2)), ((2, 2), (4, 1)), ((1, 4), (2, 1))]
)
def test_saved_at_one_degree_and_loaded_at_another(ns: kvfs.Namespace, a: tuple[int, int], b: tuple[int, int]) -> None:
    whole = Engine()
    for rank in ranks(*a, seed=0):
        with ns.attach(rank.kv) as io:
            plan = ns.plan_save(prompt(3), part=io.parts)
            assert io.save(plan, blocks(3), deadline=LATE).wait(SECONDS).pages == 3  # type: ignore[union-attr]
    with ns.match(prompt(3)) as everything:
        for rank in ranks(*b, seed=None):
            with ns.attach(rank.kv) as io:
                for match in (everything, ns.match(prompt(3), part=io.parts)):
                    rank.memory[...] = 0
                    assert io.load(match, blocks(3), deadline=LATE).wait(SECONDS).tokens == 3 * PAGE  # type: ignore[union-attr]
                    part = io.parts["full"]
                    want = whole.memory[
                        part.layer : part.layer + part.layers, :6, :, part.head : part.head + part.heads
                    ]
                    assert (rank.memory[:, :6] == want).all()


def test_replicas_write_each_page_once(ns: kvfs.Namespace) -> None:
    stored = []
    for index in range(2):
        with ns.attach(Engine(replica=(index, 2)).kv) as io:
            log = Log()
            t = io.save(ns.plan_save(prompt(5)), blocks(5), deadline=LATE, **log.hooks)
            assert t.wait(SECONDS) is not None
            stored.append(sorted(c for _, c in log.pages))
    assert stored == [[0, 2, 4], [1, 3]]
    with ns.match(prompt(5)) as match:
        assert match.chunks == 5


def test_a_match_for_a_smaller_part_is_refused(ns: kvfs.Namespace) -> None:
    saved(ns, 1)
    with ns.attach(Engine(seed=None).kv) as io, pytest.raises(ConfigError, match=r"match with io\.parts"):
        io.load(ns.match(prompt(1), part=Part(0, 2, 0, 4)), blocks(1))


def test_opaque_pages_are_not_saved_through_a_plan_of_tokens(store: kvfs.Store) -> None:
    """It would store them in rows of several chunks, where ``match_keys`` does not look."""
    layout = PageLayout.opaque(300, 16)
    ns = store.namespace("opaque", layout, revision="1")
    hashes = tuple(bytes([n]) * 32 for n in range(4))
    plan = kvfs.SavePlan(4, hashes, {"opaque": (0, 1, 2, 3)}, ns.identity.digest)
    kv = kvfs.describe(layout.group("opaque"), np.zeros((1, 4, 300), "uint8"), "layer,slot,dim")
    with ns.attach(kv) as io, pytest.raises(ConfigError, match=r"ns\.prompt\(keys="):
        io.save(plan, [0, 1, 2, 3])


HYBRID = PageLayout.of(
    [
        Group("full", (0, 2), 2, Cell("opaque", 8), Need.all(), 16),
        Group("window", (1, 3), 2, Cell("opaque", 8), Need.window_of(40), 16),
        Group("state", (4,), 1, Cell("opaque", 300), Need.exact(), 1),
    ],
    page_tokens=16,
)


def hybrid(seed: int | None) -> tuple[dict[str, np.ndarray], list[kvfs.DeviceKV]]:
    shapes = {"full": (2, 32, 16, 2, 8), "window": (2, 32, 16, 2, 8), "state": (1, 32, 300)}
    rng = np.random.default_rng(seed)
    made = {
        n: rng.integers(0, 256, s, dtype="uint8") if seed is not None else np.full(s, 0xA5, "uint8")
        for n, s in shapes.items()
    }
    orders = {"full": "layer,block,token,head,dim", "window": "layer,block,token,head,dim", "state": "layer,slot,dim"}
    return made, [kvfs.describe(HYBRID.group(n), t, orders[n]) for n, t in made.items()]


def test_hybrid_models(store: kvfs.Store, store_path: Path) -> None:
    ns = store.namespace("hybrid", HYBRID, revision="1")
    source, kvs = hybrid(1)
    tokens = list(range(8 * 16))
    units: dict[str, list[int]] = {
        "full": list(range(8)), "window": [-1, -1, *range(6)], "state": [-1, -1, -1, 3, -1, -1, -1, 7],
    }  # fmt: skip
    with ns.attach(kvs) as io:
        t = io.save(ns.plan_save(tokens), units, deadline=LATE)
        result = t.wait(SECONDS)
        assert result is not None and (result.pages, result.declined, result.reason) == (8 + 6 + 2, 8, "source")
    target, kvs = hybrid(None)
    to = {"full": list(range(10, 18)), "window": [-1] * 5 + [20, 21, 22], "state": [-1] * 7 + [30]}
    with ns.attach(kvs) as io, ns.match(tokens) as match:
        assert match.tokens == 128
        t = io.load(match, to, deadline=LATE)
        result = t.wait(SECONDS)
        assert result is not None and (result.tokens, result.pages) == (128, 8 + 3 + 1)
        assert all(t.layer_ready(layer).is_set() for layer in range(5))
        with pytest.raises(ConfigError, match="layer 5 is not part"):
            t.layer_ready(5)
        with pytest.raises(ConfigError, match="must map each of the groups"):
            io.load(match, [0])
    assert (target["full"][:, 10:18] == source["full"][:, :8]).all()
    assert (target["window"][:, 20:23] == source["window"][:, 3:6]).all()
    assert (target["state"][:, 30] == source["state"][:, 7]).all()
    assert (target["state"][:, :30] == 0xA5).all() and (target["window"][:, :20] == 0xA5).all()


def test_a_missing_snapshot_restores_nothing_and_spares_the_rest(store: kvfs.Store, store_path: Path) -> None:
    ns = store.namespace("hybrid", HYBRID, revision="1")
    source, kvs = hybrid(1)
    tokens = list(range(4 * 16))
    units = {"full": list(range(4)), "window": list(range(4)), "state": list(range(4))}
    with ns.attach(kvs) as io:
        assert io.save(ns.plan_save(tokens), units, deadline=LATE).wait(SECONDS).pages == 12  # type: ignore[union-attr]
    flip(store_path, source["state"][0, 3].tobytes())
    target, kvs = hybrid(None)
    log = Log()
    with ns.attach(kvs) as io, ns.match(tokens) as match:
        t = io.load(match, units, deadline=LATE, **log.hooks)
        result = t.wait(SECONDS)
        assert result is not None and result.tokens == 0 and result.reason == "unreadable"
        log.check(t, 4 + 3 + 1)
    assert (target["full"] == 0xA5).all()
    with ns.match(tokens) as match:
        assert match.tokens == 48, "the snapshot before it"


def test_a_rank_without_layers_of_a_group_leaves_it_out(store: kvfs.Store) -> None:
    ns = store.namespace("hybrid", HYBRID, revision="1")
    _, kvs = hybrid(1)
    tokens = list(range(64))
    units = {n: list(range(4)) for n in ("full", "window", "state")}
    with ns.attach(kvs) as io:
        assert io.save(ns.plan_save(tokens), units, deadline=LATE).wait(SECONDS) is not None
    _, kvs = hybrid(None)
    with ns.attach(kvs[0]) as io, ns.match(tokens) as match:
        result = io.load(match, list(range(4))).wait(SECONDS)
        assert result is not None and (result.tokens, result.pages) == (64, 4)


def test_groups_in_host_memory_and_on_a_gpu_are_refused_before_the_cpu_reads_an_address_of_the_gpu(
    store: kvfs.Store,
) -> None:
    ns = store.namespace("hybrid", HYBRID, revision="1")
    _, kvs = hybrid(1)
    far = tuple(dataclasses.replace(buffer, memory="cuda:0") for buffer in kvs[1].buffers)
    with pytest.raises(ConfigError, match="is in cuda:0, others in host memory: attach one device"):
        ns.attach([kvs[0], dataclasses.replace(kvs[1], buffers=far)])


# -- arguments, retention, the end -------------------------------------------------------------


def test_store_false_and_ttl(ns: kvfs.Namespace) -> None:
    log = Log()
    with ns.attach(Engine().kv) as io:
        t = io.save(ns.plan_save(prompt(2)), blocks(2), store=False, **log.hooks)
        assert t.done.is_set() and t.source_free.is_set() and t.state is TransferState.DECLINED
        assert t.result is not None and (t.result.declined, t.result.reason) == (2, "disabled")
        log.check(t, 2)
        with ns.match(prompt(2)) as match:
            assert not match
        assert io.save(ns.plan_save(prompt(2)), blocks(2), ttl="1h").wait(SECONDS).pages == 2  # type: ignore[union-attr]
        with ns.match(prompt(2)) as match:
            places = [s.place for sources in match.groups[0].sources().values() for s in sources]
            now = time.time()
            assert all(now + 3000 < place.expires < now + 4000 for place in places)
        with pytest.raises(ConfigError, match="ttl"):
            io.save(ns.plan_save(prompt(3)), blocks(3), ttl="soon")


@pytest.mark.parametrize(
    ("units", "options", "message"),
    [
        ([0, 64], {}, r"reach from 0 to 64: pass ids in 0\.\.63"),
        ([0, -2], {}, "reach from -2"),
        (["a"], {}, "flat sequence of integers"),
        (np.array([256, 1]).tobytes(), {}, "flat sequence of integers"),  # no byte of it is above 63
        ({"other": [0]}, {}, "names group 'other'"),
        ([0, 1], {"deadline": -1}, "deadline is -1"),
        ([0, 1], {"after": 3}, "after is int"),
    ],
)
def test_bad_arguments(ns: kvfs.Namespace, units: Any, options: dict[str, Any], message: str) -> None:
    saved(ns, 1)
    with ns.attach(Engine(seed=None).kv) as io, ns.match(prompt(1)) as match:
        with pytest.raises(ConfigError, match=message):
            io.save(ns.plan_save(prompt(2)), units, **options)
        with pytest.raises(ConfigError, match=message):
            io.load(match, units, **options)
        settled(io)


def test_more_bad_arguments(ns: kvfs.Namespace, store: kvfs.Store) -> None:
    saved(ns, 2)
    other = store.namespace("other", LAYOUT, revision="1")
    with ns.attach(Engine(seed=None).kv) as io, ns.match(prompt(2)) as match:
        for call, message in (
            (lambda: io.load(match, blocks(1)), "has 2 ids, 4 are needed"),
            (lambda: io.load(match, blocks(2), first_token=-1), "first_token is -1"),
            (lambda: io.load(match, blocks(2), first_token=1.0), "first_token is 1.0"),
            (lambda: io.restore(prompt(2), blocks(2), first_token=-1), "first_token is -1"),
            (lambda: io.load(other.match(prompt(1)), blocks(1)), "another namespace"),
            (lambda: io.save(other.plan_save(prompt(1)), blocks(1)), "another namespace"),
            (lambda: io.save(ns.plan_save(prompt(3)), blocks(3), attempt=b"1"), "attempt has 1 bytes"),
            (lambda: ns.attach([]), "no buffers"),
            (lambda: ns.attach([Engine().kv] * 2), "attached twice"),
            (lambda: ns.attach(Engine().kv, ring_bytes=10), "ring_bytes is 10: pass at least"),
            (lambda: ns.attach(Engine().kv, threads=0), "threads is 0"),
            (lambda: ns.attach(Engine().kv, queue_max=0), "queue_max is 0"),
        ):
            with pytest.raises(ConfigError, match=message):
                call()  # type: ignore[no-untyped-call]


def test_a_read_only_store_loads_and_refuses_to_save(ns: kvfs.Namespace, store: kvfs.Store, store_path: Path) -> None:
    engine = saved(ns, 2)
    store.close()
    other = Engine(seed=None)
    with kvfs.open(store_path, read_only=True) as reader:
        ns = reader.namespace("model", LAYOUT, revision="1")
        with ns.attach(other.kv) as io, ns.match(prompt(2)) as match:
            with pytest.raises(StoreReadOnlyError):
                io.save(ns.plan_save(prompt(2)), blocks(2))
            assert io.load(match, blocks(2)).wait(SECONDS).tokens == 2 * PAGE  # type: ignore[union-attr]
    assert other.tokens(blocks(2)) == engine.tokens(blocks(2))


def test_closing_the_store_finishes_and_closes_its_transfers(store_path: Path) -> None:
    store = kvfs.open(store_path, capacity="64MiB")
    ns = store.namespace("model", LAYOUT, revision="1")
    io = ns.attach(Engine().kv)
    t = io.save(ns.plan_save(prompt(6)), blocks(6), deadline=LATE)
    store.close()
    assert t.done.is_set() and t.result is not None and t.result.pages == 6
    with pytest.raises(ConfigError, match=r"was closed: call ns\.attach"):
        io.save(ns.plan_save(prompt(1)), blocks(1))
    io.close()
    with kvfs.open(store_path) as again:
        assert again.namespace("model", LAYOUT, revision="1").match(prompt(6)).chunks == 6


def test_a_finished_transfer_keeps_nothing_of_its_match(ns: kvfs.Namespace) -> None:
    """The threads that ran it may get no other transfer."""
    engine = saved(ns, 2)
    with ns.attach(engine.kv) as io:
        match = ns.match(prompt(2))
        assert io.load(match, blocks(2)).wait(SECONDS).pages == 2  # type: ignore[union-attr]
        hold = weakref.ref(match.hold)
        del match
        end = time.monotonic() + SECONDS
        while hold() is not None:
            assert time.monotonic() < end, "its segments cannot be reclaimed"
            time.sleep(0.001)
            gc.collect()


def test_an_engine_that_is_not_closed_leaves_no_threads(ns: kvfs.Namespace) -> None:
    saved(ns, 2)

    def running() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t.name.startswith(("kvfs-copy-", "kvfs-read-", "kvfs-write-"))]

    before = len(running())
    for _ in range(3):
        with ns.match(prompt(2)) as match:
            transfer = ns.attach(Engine(seed=None).kv).load(match, blocks(2))
        assert transfer.wait(SECONDS).pages == 2  # type: ignore[union-attr]
        del transfer
    end = time.monotonic() + SECONDS
    while len(running()) > before:
        assert time.monotonic() < end, running()
        time.sleep(0.001)
        gc.collect()


def test_close_ends_transfers_that_do_not_finish_in_time(ns: kvfs.Namespace, files: GatedFiles) -> None:
    files.writes.shut()
    logs = [Log() for _ in range(3)]
    io = ns.attach(Engine().kv)
    transfers = []
    for i, log in enumerate(logs):
        transfers.append(io.save(ns.plan_save(prompt(2, 1000 * i)), blocks(2), deadline=LATE, **log.hooks))
        assert files.writes.reached.wait(SECONDS) and transfers[-1].source_free.wait(SECONDS)
    io.close(timeout=0.05)
    for t, log in zip(transfers[1:], logs[1:], strict=True):  # the first one's append is still on its way
        assert t.done.wait(SECONDS) and t.result is not None and t.result.reason == "closed"
        log.check(t, 2)
    assert not transfers[0].done.is_set()
    files.writes.open()
    assert transfers[0].wait(SECONDS).pages == 2  # type: ignore[union-attr]
    logs[0].check(transfers[0], 2)
    settled(io)


def test_a_save_that_gathers_beyond_the_close_ends(ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, log = Gate(), Log()
    gather = host_save.gather_pages

    def slow(*args: Any, **options: Any) -> int:
        gate()
        return gather(*args, **options)

    monkeypatch.setattr(host_save, "gather_pages", slow)
    gate.shut()
    io = ns.attach(Engine().kv)
    t = io.save(ns.plan_save(prompt(2)), blocks(2), deadline=LATE, **log.hooks)
    assert gate.reached.wait(SECONDS)
    io.close(timeout=0.05)
    assert not t.done.is_set()
    gate.open()
    assert t.done.wait(SECONDS) and t.result is not None and t.result.reason == "closed"
    log.check(t, 2)
    settled(io)


# -- other processes -------------------------------------------------------------------------


def elsewhere(path: str, packed: bytes, answers: Any) -> None:
    """Another process saves and loads by a plan and a match that it was sent."""
    plan, match = pickle.loads(packed)
    engine, target = Engine(), Engine(seed=None)
    with kvfs.open(path) as store:
        ns = store.namespace("model", LAYOUT, revision="1")
        with ns.attach(engine.kv) as io, ns.attach(target.kv) as io2:
            result = io.save(plan, blocks(4), deadline=LATE).wait(SECONDS)
            loaded = io2.load(match, blocks(2), deadline=LATE).wait(SECONDS)
    assert result is not None and loaded is not None
    answers.put((result.pages, loaded.tokens, target.tokens(blocks(2)) == engine.tokens(blocks(2))))


def test_plans_and_matches_work_in_another_process(ns: kvfs.Namespace, store_path: Path) -> None:
    saved(ns, 2)
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.Queue()
    with ns.match(prompt(2)) as match:
        packed = pickle.dumps((ns.plan_save(prompt(4)), match))
        process = spawn.Process(target=elsewhere, args=(str(store_path), packed, answers))
        process.start()
        assert answers.get(timeout=SECONDS) == (2, 2 * PAGE, True)
        process.join(SECONDS)
    assert process.exitcode == 0
    assert ns.match(prompt(4)).chunks == 4


def test_a_layer_that_has_arrived_is_ready_whenever_it_is_asked_for() -> None:
    task = TransferTask("load", {0: 0b1}, {0: ("kv", (4, 5, 6), 1)}, LATE, lambda done: (0, {}))
    t = TransferControl(task, lambda _: None)
    waited = t.layer_ready(5)
    t.layers_ready([4, 5])
    assert waited.is_set() and t.layer_ready(4).is_set() and t.layer_ready(5) is waited
    late = t.layer_ready(6)
    assert not late.is_set()
    t.end()
    assert late.is_set() and t.layer_ready(6) is late
    other = TransferControl(task, lambda _: None)
    other.end()
    assert other.layer_ready(4).is_set()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_must_attach_again(ns: kvfs.Namespace, files: GatedFiles) -> None:
    engine = Engine()
    io = ns.attach(engine.kv)
    files.writes.shut()
    t = io.save(ns.plan_save(prompt(2)), blocks(2), deadline=LATE)
    assert files.writes.reached.wait(SECONDS)
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        answer = b"no"
        try:
            files.writes = Gate()
            for call in (
                lambda: io.save(ns.plan_save([]), []), t.cancel, t.done.wait, t.source_free.wait,
                lambda: t.layer_ready(0), lambda: t.withdraw(0),
            ):  # fmt: skip
                with pytest.raises(ConfigError, match="parent process"):
                    call()  # type: ignore[operator]
            io.close()
            with ns.attach(engine.kv) as mine:
                result = mine.save(ns.plan_save(prompt(2, 7000)), blocks(2), deadline=LATE).wait(SECONDS)
            answer = b"ok" if result is not None and result.pages == 2 else repr(result).encode()
        except BaseException as exc:
            answer = repr(exc).encode()
        finally:
            os.write(write, answer)
            os._exit(0)
    os.close(write)
    answer = os.read(read, 4096)
    os.close(read)
    os.waitpid(pid, 0)
    files.writes.open()
    assert answer == b"ok"
    assert t.wait(SECONDS).pages == 2  # type: ignore[union-attr]
    assert ns.match(prompt(2, 7000)).chunks == 2
