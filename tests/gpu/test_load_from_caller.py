"""Loads that are enqueued in their caller's thread: which are, that they load the same bytes, and how they end."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the GPU transport needs triton")

import kvfs
from kvfs import TransferState
from kvfs.gpu import batches, head_start, lane, page_feed
from kvfs.gpu.gpu_io import GpuIO
from kvfs.gpu.head_start import HeadStart
from kvfs.gpu.load import GpuLoad
from kvfs.gpu.resources import LinkPace
from kvfs.gpu.turns import Turns
from kvfs.kernels.driver import CudaError
from kvfs.system.files import Files
from kvfs.transfer.host_io import HostIO
from tests.gpu.simulated import Pending, SimulatedDevice
from tests.gpu.test_gpu_io import LATE, NOW, PAGE, SECONDS, Engine, attach, prompt, saved
from tests.stores import counted, run_child, segment_files, wait_until

CHUNKS = 4
UNITS = range(2 * CHUNKS)
WAYS: dict[str, dict[str, Any]] = {"in_place": {}, "arena": {"transport": "arena"}}


class Launching(SimulatedDevice):
    """Knows which threads launch kernels, and calls ``during`` before the first launch of a load."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.threads, self.during = list[threading.Thread](), list[Callable[[], object]]()
        self.before_launch = self._note
        self.captures = False

    def _note(self) -> None:
        self.threads.append(threading.current_thread())
        if self.during:
            self.during.pop()()

    def is_capturing(self) -> bool:
        return self.captures

    def here(self) -> bool:
        """Whether all launches since the last call were made by the calling thread."""
        threads, self.threads = self.threads, []
        return bool(threads) and set(threads) == {threading.current_thread()}


@pytest.fixture
def device() -> Launching:
    return Launching()


@pytest.fixture
def source(ns: kvfs.Namespace) -> Engine:
    return saved(ns, CHUNKS)


@pytest.fixture
def target() -> Engine:
    return Engine()


@pytest.fixture
def io(ns: kvfs.Namespace, source: Engine, target: Engine, device: Launching) -> Iterator[GpuIO]:
    """With all pages registered."""
    with attach(ns, target.kv, device=device) as opened:
        warm(opened, ns)
        device.threads.clear()
        assert isinstance(opened, GpuIO)
        yield opened
    assert not device.registered and not ns._c.pinned.mine


def warm(io: HostIO, ns: kvfs.Namespace) -> None:
    with ns.match(prompt(CHUNKS)) as match:
        assert io.warm(match) == match.nbytes


def load(io: HostIO, ns: kvfs.Namespace, after: Any = NOW, deadline: float = LATE, **options: Any) -> kvfs.Transfer:
    with ns.match(prompt(CHUNKS)) as match:
        assert match.tokens == CHUNKS * PAGE
        return io.load(match, UNITS, after, deadline, **options)


def ended(transfer: kvfs.Transfer) -> int:
    result = transfer.wait(SECONDS)
    assert result is not None
    return result.tokens


def idle(io: GpuIO) -> None:
    """Wait until nothing is left of the loads before."""
    wait_until(lambda: not io._reads.waiting and not io._gpu_context.turns._under_way and not len(io._unfinished))


def same(source: Engine, target: Engine) -> bool:
    return target.tokens(UNITS) == source.tokens(UNITS)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layerwise", [False, True])
def test_a_load_of_registered_pages_is_enqueued_by_its_caller(
    ns: kvfs.Namespace, source: Engine, target: Engine, device: Launching, way: str, layerwise: bool
) -> None:
    with attach(ns, target.kv, device=device, **WAYS[way]) as io:
        warm(io, ns)
        device.threads.clear()
        for _ in range(3):
            target.memory[...] = 0xA5A5
            assert ended(load(io, ns, layerwise=layerwise)) == CHUNKS * PAGE
            assert device.here() and same(source, target)


def test_a_load_that_has_to_wait_for_its_event_is_left_to_the_load_thread(
    ns: kvfs.Namespace, io: GpuIO, source: Engine, target: Engine, device: Launching
) -> None:
    event = Pending()
    transfer = load(io, ns, event)
    assert not device.threads
    event.happened.set()
    assert ended(transfer) == CHUNKS * PAGE and not device.here() and same(source, target)


def test_a_load_next_to_another_one_is_left_to_the_load_thread(
    ns: kvfs.Namespace, io: GpuIO, source: Engine, target: Engine, device: Launching
) -> None:
    turns, other = io._gpu_context.turns, object()
    assert turns.begin_alone(other)
    turns.enqueued(other)
    assert ended(load(io, ns)) == CHUNKS * PAGE and not device.here()
    turns.over(other)
    assert ended(load(io, ns)) == CHUNKS * PAGE and device.here() and same(source, target)


@pytest.mark.parametrize(
    "lacking", ["registered memory", "leaf tables", "room", "shortness", "a command buffer", "no capture"]
)
def test_a_load_that_may_have_to_wait_is_left_to_the_load_thread(
    ns: kvfs.Namespace, source: Engine, target: Engine, device: Launching, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    with attach(ns, target.kv, device=device) as io:
        if lacking != "registered memory":
            warm(io, ns)
        if lacking == "leaf tables":
            monkeypatch.setattr(Files, "read_cached", lambda *_: False)
        if lacking == "shortness":
            monkeypatch.setattr(head_start, "SHORT_BYTES", CHUNKS * ns.layout.page_bytes - 1)
        if lacking == "room":
            monkeypatch.setattr(lane, "QUEUED", 2)
        if lacking == "a command buffer":
            monkeypatch.setattr(lane.DmaLane, "has_commands", lambda *_: False)
        device.captures = lacking == "no capture"
        device.threads.clear()
        assert ended(load(io, ns)) == CHUNKS * PAGE and not device.here() and same(source, target)


def damaged(ns: kvfs.Namespace, store: kvfs.Store, number: int) -> None:
    """Flip a bit of a stored page."""
    with ns.match(prompt(CHUNKS)) as match:
        page = bytes(memoryview(ns.view(match)[number])[:64])
    [path] = segment_files(Path(store.path))
    at = path.read_bytes().index(page)
    with path.open("r+b") as file:
        file.seek(at + 5)
        byte = file.read(1)[0]
        file.seek(at + 5)
        file.write(bytes([byte ^ 4]))


def test_what_a_plan_needs_stays_registered(
    ns: kvfs.Namespace, io: GpuIO, source: Engine, target: Engine, device: Launching, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The segment is dropped, and swept, when its load is planned and no copy is enqueued yet."""
    regions = io._gpu_context.regions
    assert regions is not None

    def swept(job: GpuLoad) -> None:
        regions.sweep({key[0] for key in regions._regions})
        move(job)

    move = GpuLoad._move
    monkeypatch.setattr(GpuLoad, "_move", swept)
    assert ended(load(io, ns)) == CHUNKS * PAGE and device.here() and same(source, target)
    regions.sweep({key[0] for key in regions._regions})
    assert not regions.nbytes, "a load that has ended keeps memory registered"


@pytest.mark.parametrize("way", WAYS)
def test_a_page_that_differs_reaches_no_unit(
    ns: kvfs.Namespace, store: kvfs.Store, source: Engine, target: Engine, device: Launching, way: str
) -> None:
    damaged(ns, store, 2)
    with attach(ns, target.kv, device=device, **WAYS[way]) as io, counted(store) as moved:
        warm(io, ns)
        device.threads.clear()
        assert ended(load(io, ns)) == 2 * PAGE and device.here()
        assert moved("pages_corrupt") == 1
    assert target.tokens(range(4)) == source.tokens(range(4))
    assert set(target.tokens(range(4, 6))) == {0xA5}, "unverified bytes reached a unit"
    with ns.match(prompt(CHUNKS)) as match:
        assert match.tokens == 2 * PAGE, "the damaged page is still in the index"


@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_both_threads_load_the_same(
    ns: kvfs.Namespace, device: Launching, monkeypatch: pytest.MonkeyPatch, seed: int, short: bool
) -> None:
    """Forked prompts, any first token, units left alone, layer-wise or not: equal memory, equal results."""
    if not short:  # begun in one thread, enqueued in the other
        monkeypatch.setattr(head_start, "SHORT_BYTES", 1)
        monkeypatch.setattr(head_start, "WINDOW_PAGES", 2)
        monkeypatch.setattr(page_feed, "WINDOW_PAGES", 2)
    chance = random.Random(seed)
    engine = Engine(seed=seed, units=64)
    prompts = [prompt(chance.randint(1, 6))]
    for i in range(1, 5):
        base = chance.choice(prompts)
        prompts.append(base[: chance.randrange(0, len(base) + 1, PAGE)] + prompt(chance.randint(1, 5), 10_000 * i))
    with attach(ns, engine.kv) as io:
        for tokens in prompts:
            units = chance.sample(range(64), len(tokens) // 16)
            assert io.save(ns.plan_save(tokens), units, NOW, deadline=LATE).wait(SECONDS) is not None
    one, other = Engine(units=64), Engine(units=64)
    plain = SimulatedDevice()
    with attach(ns, one.kv, device=device) as io, attach(ns, other.kv, device=plain) as reference:
        for _ in range(12):
            tokens = chance.choice(prompts)
            units = [unit if chance.random() < 0.8 else -1 for unit in chance.sample(range(64), len(tokens) // 16)]
            options: dict[str, Any] = {"first_token": chance.randrange(len(tokens)), "layerwise": chance.random() < 0.5}
            with ns.match(tokens) as match:
                for each in (io, reference):
                    each.warm(match)
                device.threads.clear()
                mine = io.load(match, units, NOW, LATE, **options).wait(SECONDS)
                caller = device.here()
                with monkeypatch.context() as patch:
                    patch.setattr(HeadStart, "begin", lambda start, after: False)
                    theirs = reference.load(match, units, NOW, LATE, **options).wait(SECONDS)
            assert mine is not None and mine == theirs and (caller or not mine.pages or not short)
            assert (one.memory == other.memory).all()


@pytest.mark.parametrize("launched", [0, 1])
def test_a_load_cancelled_while_it_is_enqueued_ends_so(
    ns: kvfs.Namespace, io: GpuIO, target: Engine, device: Launching, monkeypatch: pytest.MonkeyPatch, launched: int
) -> None:
    def stopped(job: GpuLoad) -> bool:
        if len(device.threads) >= launched:
            job._transfer.stop("cancelled")
        return stop(job)

    stop = GpuLoad._stop
    monkeypatch.setattr(GpuLoad, "_stop", stopped)
    monkeypatch.setattr(lane, "PENDING", 0)
    monkeypatch.setattr(batches, "BATCH_BYTES_MIN", 1)
    transfer = load(io, ns)
    assert transfer.cancel(SECONDS) and transfer.state is TransferState.CANCELLED
    assert len(device.threads) == launched
    assert (set(target.tokens(UNITS)) == {0xA5}) == (not launched)
    monkeypatch.undo()
    assert ended(load(io, ns)) == CHUNKS * PAGE


def test_a_load_without_time_left_moves_nothing(
    ns: kvfs.Namespace, io: GpuIO, target: Engine, device: Launching
) -> None:
    transfer = load(io, ns, deadline=0.0)
    assert ended(transfer) == 0
    result = transfer.result
    assert result is not None and result.reason == "deadline"
    assert set(target.tokens(UNITS)) == {0xA5}
    assert ended(load(io, ns)) == CHUNKS * PAGE


@pytest.mark.parametrize("timeout", [0.0, SECONDS])
def test_a_close_while_a_caller_enqueues_waits_for_the_end_of_that(
    ns: kvfs.Namespace, source: Engine, target: Engine, device: Launching, timeout: float
) -> None:
    io = attach(ns, target.kv, device=device)
    warm(io, ns)
    closing = threading.Thread(target=io.close, args=(timeout,))

    def close() -> None:
        closing.start()
        while not io._closed:
            pass
        if timeout == 0.0:
            closing.join(0.1)  # it dismisses the threads meanwhile

    device.during.append(close)
    transfer = load(io, ns)
    assert ended(transfer) == CHUNKS * PAGE and same(source, target)
    closing.join(SECONDS)
    assert not closing.is_alive() and not device.registered and not ns._c.pinned.mine


def test_a_child_forked_while_a_caller_enqueues_can_attach(
    ns: kvfs.Namespace, io: GpuIO, source: Engine, target: Engine, device: Launching
) -> None:
    answers: list[object] = []

    def in_child() -> bool:
        try:
            io.load(match, UNITS, NOW)
        except kvfs.ConfigError:
            return True
        return False

    with ns.match(prompt(CHUNKS)) as match:
        device.during.append(lambda: answers.append(run_child(in_child)))
        assert ended(load(io, ns)) == CHUNKS * PAGE and device.here()
    assert answers == [True] and same(source, target)


@pytest.mark.parametrize("error", [KeyboardInterrupt, CudaError("launch: out of resources")])
def test_an_interrupt_or_an_error_while_a_caller_enqueues_loses_no_turn(
    ns: kvfs.Namespace, io: GpuIO, source: Engine, target: Engine, device: Launching, error: Any
) -> None:
    def fails() -> None:
        raise error

    for _ in range(4):  # more than there are turns
        device.during.append(fails)
        if error is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                load(io, ns)
        else:
            transfer = load(io, ns)
            assert ended(transfer) == 0 and transfer.state is TransferState.FAILED
        idle(io)
    assert ended(load(io, ns)) == CHUNKS * PAGE and same(source, target)


def test_an_interrupt_before_anything_is_enqueued_cancels_the_load(
    ns: kvfs.Namespace, io: GpuIO, target: Engine, device: Launching, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(start: HeadStart) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(HeadStart, "read_tables", interrupted)
    for _ in range(4):
        with pytest.raises(KeyboardInterrupt):
            load(io, ns)
        idle(io)
    assert not device.threads
    assert set(target.tokens(UNITS)) == {0xA5}
    monkeypatch.undo()
    assert ended(load(io, ns)) == CHUNKS * PAGE and device.here()


def test_turns_are_taken_one_at_a_time_and_given_back_once() -> None:
    turns, (a, b, c) = Turns(2), (object() for _ in range(3))
    assert turns.begin_alone(a) and not turns.begin_alone(b)
    turns.enqueued(a)
    turns.enqueued(a)
    assert not turns.begin_alone(b), "another load is under way"
    turns.begin(b)
    turns.enqueued(b)
    began = threading.Thread(target=turns.begin, args=(c,))
    began.start()
    began.join(0.05)
    assert began.is_alive(), "more loads are under way than may be"
    turns.over(a)
    turns.over(a)
    began.join(SECONDS)
    assert not began.is_alive()
    turns.over(b)
    turns.over(c)
    turns.close(SECONDS)
    assert not turns.begin_alone(a), "it was closed"


def test_nothing_looks_for_a_load_before_it_can_have_arrived() -> None:
    pace = LinkPace()
    assert pace.early(1000, 0.0) == 0.0, "no load has arrived yet"
    pace.arrived(1000, 10.0)
    pace.arrived(1000, 20.0)
    pace.arrived(10, 0.0)
    assert pace.early(500, 1.0) == pytest.approx(0.8 * 5.0 - 1.0)
    assert pace.early(500, 6.0) < 0


@pytest.mark.parametrize("layerwise", [False, True])
def test_registered_memory_of_a_short_load_is_looked_up_once(
    ns: kvfs.Namespace, io: GpuIO, source: Engine, target: Engine, monkeypatch: pytest.MonkeyPatch, layerwise: bool
) -> None:
    regions, asked = io._gpu_context.regions, list[str]()
    assert regions is not None
    for name in ("ranges", "covers", "touched", "missing"):
        plain = getattr(regions, name)
        monkeypatch.setattr(
            regions, name, lambda *a, plain=plain, name=name, **k: (asked.append(name), plain(*a, **k))[1]
        )
    assert ended(load(io, ns, layerwise=layerwise)) == CHUNKS * PAGE and same(source, target)
    assert asked == ["ranges"]


def test_the_first_copies_are_enqueued_before_the_tables_are_read(
    ns: kvfs.Namespace, io: GpuIO, source: Engine, target: Engine, device: Launching, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = list[int]()
    read = Files.read_cached
    monkeypatch.setattr(Files, "read_cached", lambda *a: (copied.append(device.copied), read(*a))[1])
    device.copied = 0
    assert ended(load(io, ns)) == CHUNKS * PAGE and same(source, target)
    assert copied and copied[0] > 0
    assert device.copied == CHUNKS * ns.layout.page_bytes, "a page was copied twice"


@pytest.mark.parametrize("when", ["among the copies", "behind them"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, CudaError("memcpy: unknown error")])
def test_first_copies_that_lead_to_nothing_leave_no_scratch_behind(
    ns: kvfs.Namespace,
    io: GpuIO,
    source: Engine,
    target: Engine,
    device: Launching,
    monkeypatch: pytest.MonkeyPatch,
    when: str,
    error: Any,
) -> None:
    errors = [error]

    def fails_once(plain: Callable[..., Any], *args: Any) -> Any:
        if errors:
            raise errors.pop()
        return plain(*args)

    owner, name = (Files, "read_cached") if when == "behind them" else (type(io._gpu_context.loads.dma), "copy_in")
    plain = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args: fails_once(plain, *args))
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            load(io, ns)
    else:
        assert ended(load(io, ns)) == CHUNKS * PAGE and not device.here() and same(source, target)
    idle(io)
    assert all(one.enqueued for one in io._gpu_context.loads._slices)
    assert ended(load(io, ns)) == CHUNKS * PAGE and device.here() and same(source, target)


def test_a_load_stopped_behind_its_first_copies_leaves_no_scratch_behind(
    ns: kvfs.Namespace, io: GpuIO, source: Engine, target: Engine, device: Launching, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(job: GpuLoad) -> None:
        job._transfer.stop("cancelled")
        move(job)

    move = GpuLoad._move
    monkeypatch.setattr(GpuLoad, "_move", stopped)
    assert ended(load(io, ns)) == 0 and set(target.tokens(UNITS)) == {0xA5}
    idle(io)
    assert all(one.enqueued for one in io._gpu_context.loads._slices)
    monkeypatch.undo()
    assert ended(load(io, ns)) == CHUNKS * PAGE and device.here() and same(source, target)


@pytest.mark.parametrize("refused", ["a deadline that is none", "a full queue"])
def test_a_load_that_is_refused_behind_its_first_copies_gives_everything_back(
    ns: kvfs.Namespace,
    io: GpuIO,
    source: Engine,
    target: Engine,
    device: Launching,
    monkeypatch: pytest.MonkeyPatch,
    refused: str,
) -> None:
    device.copied = 0
    if refused == "a full queue":
        monkeypatch.setattr(io, "_queue_max", 0)
        assert ended(load(io, ns)) == 0
    else:
        with pytest.raises(kvfs.ConfigError, match="deadline"):
            load(io, ns, deadline=-1.0)
    assert device.copied, "it had not begun"
    context = io._gpu_context
    assert not context.turns._under_way and all(one.enqueued for one in context.loads._slices)
    assert context.regions is not None and not any(region.users for region in context.regions._regions.values())
    assert set(target.tokens(UNITS)) == {0xA5}
    monkeypatch.undo()
    assert ended(load(io, ns)) == CHUNKS * PAGE and device.here() and same(source, target)


@pytest.fixture
def long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads of one page are short, and windows of two pages are planned."""
    monkeypatch.setattr(head_start, "SHORT_BYTES", 1)
    monkeypatch.setattr(head_start, "WINDOW_PAGES", 2)
    monkeypatch.setattr(page_feed, "WINDOW_PAGES", 2)


@pytest.mark.usefixtures("long")
def test_a_long_load_is_begun_by_its_caller_and_enqueued_by_the_load_thread(
    ns: kvfs.Namespace, io: GpuIO, source: Engine, target: Engine, device: Launching
) -> None:
    event, page = Pending(), ns.layout.page_bytes
    event.happened.set()
    held = threading.Event()
    io._reads.put(lambda: held.wait(SECONDS) and None)
    wait_until(lambda: not io._reads.waiting)
    device.copied = 0
    transfer = load(io, ns, event)
    assert device.copied == 2 * page and not device.threads, "of its first window"
    held.set()
    assert ended(transfer) == CHUNKS * PAGE and not device.here() and same(source, target)
    assert device.copied == CHUNKS * page, "a page was copied twice"
    idle(io)
    context = io._gpu_context
    assert context.regions is not None and not any(region.users for region in context.regions._regions.values())


@pytest.mark.usefixtures("long")
def test_a_load_that_was_begun_behind_another_ones_turn_gives_way_and_begins_again(
    ns: kvfs.Namespace, io: GpuIO, source: Engine, target: Engine, device: Launching, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load thread has taken the other one from its queue, and not yet asked for its turn."""
    held, took = threading.Event(), threading.Event()
    begin = Turns.begin

    def late(turns: Turns, job: object) -> bool:
        took.set()
        held.wait(SECONDS)
        return begin(turns, job)

    monkeypatch.setattr(Turns, "begin", late)
    with monkeypatch.context() as patch:
        patch.setattr(HeadStart, "begin", lambda start, after: False)
        first = load(io, ns)
    assert took.wait(SECONDS)
    second = load(io, ns)
    assert io._gpu_context.turns._handed_over is not None
    held.set()
    assert ended(first) == ended(second) == CHUNKS * PAGE and same(source, target)
    idle(io)
    context = io._gpu_context
    assert all(one.enqueued for one in context.loads._slices)
    assert context.regions is not None and not any(region.users for region in context.regions._regions.values())


@pytest.mark.usefixtures("long")
def test_a_long_load_cancelled_behind_its_first_copies_moves_nothing_more(
    ns: kvfs.Namespace, io: GpuIO, source: Engine, target: Engine, device: Launching
) -> None:
    held = threading.Event()
    io._reads.put(lambda: held.wait(SECONDS) and None)
    wait_until(lambda: not io._reads.waiting)
    transfer = load(io, ns)
    assert transfer.cancel(SECONDS)
    held.set()
    idle(io)
    assert not device.threads and set(target.tokens(UNITS)) == {0xA5}
    assert all(one.enqueued for one in io._gpu_context.loads._slices)
    assert ended(load(io, ns)) == CHUNKS * PAGE and same(source, target)
