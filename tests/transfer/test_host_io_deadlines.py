"""Transfers end at their deadlines, whatever hangs: a read, an engine's event, or the thread that does the upkeep."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs import PageOutcome, TransferState
from kvfs.system.files import Files
from kvfs.transfer.host_io import HostIO
from tests.transfer.test_host_io import LATE, LAYOUT, SECONDS, Engine, Gate, Log, blocks, prompt, saved, settled

DEADLINE = 0.1
UNTOUCHED = 0x1111


class HangingFiles(Files):
    """A disk that answers no read of transfers, and no call of the background thread, while its gates are shut."""

    def __init__(self) -> None:
        self.reads, self.upkeep = Gate(), Gate()

    def preadv(self, fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
        if threading.current_thread().name.startswith("kvfs-read"):
            self.reads()
        return super().preadv(fd, buffers, offset, flags)

    def pwritev(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        if threading.current_thread().name == "kvfs-background":
            self.upkeep()
        return super().pwritev(fd, buffers, offset)


@pytest.fixture
def files() -> Iterator[HangingFiles]:
    hanging = HangingFiles()
    yield hanging
    hanging.reads.open()
    hanging.upkeep.open()


@pytest.fixture
def ns(store_path: Path, files: HangingFiles) -> Iterator[kvfs.Namespace]:
    with kvfs.open(store_path, capacity="64MiB", files=files) as store:
        yield store.namespace("model", LAYOUT, revision="1")
        files.reads.open()
        files.upkeep.open()


def started(kind: str, io: HostIO, ns: kvfs.Namespace, **options: Any) -> kvfs.Transfer:
    if kind == "restore":
        return io.restore(prompt(3), blocks(3), **options)
    with ns.match(prompt(3)) as match:
        return io.load(match, blocks(3), **options)


def declined(transfer: kvfs.Transfer, log: Log, pages: int) -> None:
    """It ended at its deadline, and each page was declined."""
    result = transfer.wait(SECONDS)
    assert result is not None and (result.tokens, result.pages, result.reason) == (0, 0, "deadline")
    assert result.declined == pages == log.outcomes[PageOutcome.DECLINED]
    assert transfer.state is TransferState.DECLINED and transfer.source_free.is_set()
    log.check(transfer, pages)


@pytest.mark.parametrize("kind", ["load", "restore"])
def test_a_load_ends_at_its_deadline_although_its_read_hangs(
    ns: kvfs.Namespace, files: HangingFiles, kind: str
) -> None:
    source = saved(ns, 3)
    engine, log = Engine(seed=None), Log()
    engine.memory[...] = UNTOUCHED
    with ns.attach(engine.kv, threads=2) as io:
        files.reads.shut()
        transfer = started(kind, io, ns, deadline=DEADLINE, **log.hooks)
        assert files.reads.reached.wait(SECONDS)
        declined(transfer, log, 3)
        assert transfer.cancel(0.0), "nothing of an ended transfer can move"
        assert io.ring.free < io.ring.slots, "the read may still write to its slots"
        assert (engine.memory == UNTOUCHED).all()
        refused = started(kind, io, ns, deadline=LATE).result
        assert refused is not None and refused.reason == "disk", "it would wait behind the read that hangs"
        files.reads.open()
        settled(io)
        later = started(kind, io, ns, deadline=LATE).wait(SECONDS)
        assert later is not None and later.pages == 3
    assert engine.tokens(blocks(3)) == source.tokens(blocks(3))


def test_what_a_read_brings_behind_the_deadline_reaches_no_engine(ns: kvfs.Namespace, files: HangingFiles) -> None:
    saved(ns, 3)
    engine, log = Engine(seed=None), Log()
    engine.memory[...] = UNTOUCHED
    with ns.attach(engine.kv, threads=1) as io:
        files.reads.shut()
        transfer = started("load", io, ns, deadline=DEADLINE, **log.hooks)
        declined(transfer, log, 3)
        files.reads.open()
        settled(io)
        assert transfer.error is None and transfer.result is not None and not transfer.result.tiers
    assert (engine.memory == UNTOUCHED).all()


@pytest.mark.parametrize("kind", ["save", "load", "restore"])
def test_a_transfer_ends_at_its_deadline_although_its_event_never_comes(ns: kvfs.Namespace, kind: str) -> None:
    engine, event, log = saved(ns, 3), threading.Event(), Log()
    with ns.attach(engine.kv, threads=1) as io:
        how: dict[str, Any] = {"after": event.wait, "deadline": DEADLINE, **log.hooks}
        if kind == "save":
            transfer = io.save(ns.plan_save(prompt(3, 500)), blocks(3), **how)
        else:
            transfer = started(kind, io, ns, **how)
        declined(transfer, log, 3)
        event.set()
        settled(io)


def test_a_queued_load_ends_at_its_deadline_although_the_upkeep_hangs(ns: kvfs.Namespace, files: HangingFiles) -> None:
    engine, log = saved(ns, 3), Log()
    files.upkeep.shut()
    assert files.upkeep.reached.wait(SECONDS)  # the heartbeat
    with ns.attach(engine.kv, threads=1) as io:
        event = threading.Event()
        first = started("load", io, ns, after=event.wait, deadline=LATE)
        declined(started("load", io, ns, deadline=DEADLINE, **log.hooks), log, 3)
        assert not first.done.is_set()
        event.set()
        assert first.wait(SECONDS) is not None


def test_the_close_does_not_wait_for_a_read_that_hangs(ns: kvfs.Namespace, files: HangingFiles) -> None:
    engine = saved(ns, 3)
    io = ns.attach(engine.kv, threads=1)
    files.reads.shut()
    transfer = started("load", io, ns, deadline=LATE)
    assert files.reads.reached.wait(SECONDS)
    io.close(timeout=0.0)
    result = transfer.wait(SECONDS)
    assert result is not None and (result.declined, result.reason) == (3, "closed")


def test_an_attached_engine_that_is_forgotten_leaves_no_thread(ns: kvfs.Namespace) -> None:
    before = set(threading.enumerate())  # engines of other tests that nothing has collected yet
    io = ns.attach(Engine().kv, threads=1)
    (thread,) = [one for one in threading.enumerate() if one.name == "kvfs-deadlines" and one not in before]
    del io
    thread.join(SECONDS)
    assert not thread.is_alive()
