"""Transfers of the GPU transport that end early: no byte moves after the end, and nothing stays pinned."""

from __future__ import annotations

import _thread
import errno
import gc
import math
import mmap
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the GPU transport needs triton")

import kvfs
from kvfs import TransferState
from kvfs.directory.liveness import Liveness
from kvfs.gpu import save as gpu_save
from kvfs.gpu.lane import DmaLane
from kvfs.gpu.registration_cache import MAKING_SECONDS
from kvfs.gpu.resources import UNDER_WAY
from kvfs.kernels.driver import CudaError
from kvfs.transfer import save as host_save
from tests.gpu.simulated import SimulatedDevice
from tests.gpu.test_gpu_io import LATE, LAYOUT, NOW, SECONDS, Engine, attach, prompt, saved


def test_slots_that_are_being_read_into_stay_with_a_load_that_fails(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(ns, 8)
    device, go, stuck, reads = SimulatedDevice(), threading.Event(), threading.Event(), list[int]()
    segments = type(ns._c.segments)
    read_now = segments.read

    def read(*args: Any, **options: Any) -> None:
        reads.append(1)
        if len(reads) == 2:  # of the second batch: the launch of the first one fails meanwhile
            stuck.set()
            assert go.wait(SECONDS)
        read_now(*args, **options)

    monkeypatch.setattr(segments, "read", read)
    with (
        attach(ns, Engine().kv, device=device, registered_bytes=0, scratch_bytes="4KiB") as io,
        ns.match(prompt(8)) as match,
    ):
        device.fails_at = device.launches + 1
        transfer = io.load(match, range(16), NOW)
        assert stuck.wait(SECONDS)
        ended = transfer.done.wait(0.2)
        free = io.ring.free
        go.set()
        result = transfer.wait(SECONDS)
        assert result is not None and result.reason == "error"
        assert not ended and free < io.ring.slots
        assert io.ring.free == io.ring.slots


def test_a_child_does_not_unmap_what_was_pinned_and_closed() -> None:
    pinned = SimulatedDevice().pinned(1 << 20)
    pinned.close()
    pid = os.fork()
    if not pid:
        own = [mmap.mmap(-1, pinned.nbytes) for _ in range(100)]  # one of them is at the address of the parent's map
        del pinned
        gc.collect()
        for memory in own:
            memory[0] = memory[-1] = 1
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


def test_memory_whose_pinning_is_interrupted_is_not_unmapped_while_it_is_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """New memory at its address would count as registered, and copies would read the old pages."""
    device = SimulatedDevice()
    register, had = device.register, list[int]()

    def interrupted(address: int, nbytes: int, *, read_only: bool) -> None:
        register(address, nbytes, read_only=read_only)
        had.append(address)
        raise KeyboardInterrupt

    monkeypatch.setattr(device, "register", interrupted)
    with pytest.raises(KeyboardInterrupt):
        device.pinned(1 << 20)
    assert had and not device.registered


@pytest.mark.parametrize("lacking", ["kvfs-ring", "kvfs-tell-0", "kvfs-end-0", "kvfs-read-0", "kvfs-write-0"])
def test_an_attach_without_more_threads_leaves_nothing_pinned_and_no_thread_behind(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    device, before, start, started = SimulatedDevice(), set(threading.enumerate()), threading.Thread.start, list[str]()

    def start_most(thread: threading.Thread) -> None:
        started.append(thread.name)
        if thread.name == lacking and (lacking not in ("kvfs-ring", "kvfs-write-0") or started.count(lacking) > 2):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_most)
    with pytest.raises(RuntimeError):
        attach(ns, Engine().kv, device=device)
    monkeypatch.undo()
    assert not device.registered
    end = time.monotonic() + SECONDS
    while left := [t.name for t in {*threading.enumerate()} - before if t.name in {*started, lacking}]:
        assert time.monotonic() < end, left
        time.sleep(0.001)
        gc.collect()


OF_THE_STORE = {"kvfs-open", "kvfs-watch"}


@pytest.mark.parametrize("transport", ["in_place", "arena", "ring"])
def test_an_engine_that_is_not_closed_leaves_nothing_pinned_and_no_thread_behind(
    ns: kvfs.Namespace, transport: str
) -> None:
    source, target, device, before = saved(ns, 2), Engine(), SimulatedDevice(), set(threading.enumerate())
    io = attach(ns, target.kv, device=device, transport=transport)
    with ns.match(prompt(2)) as match:
        transfer = io.load(match, range(4), NOW)
        del io  # the transfer keeps it
        result = transfer.wait(SECONDS)
        assert result is not None and target.tokens(range(4)) == source.tokens(range(4))
    assert device.registered
    del transfer
    end = time.monotonic() + SECONDS
    while device.registered or (left := {t.name for t in {*threading.enumerate()} - before} - OF_THE_STORE):
        assert time.monotonic() < end, left
        gc.collect()
        time.sleep(0.001)
    assert not ns._c.pinned.mine


def test_a_load_that_waits_for_slots_is_cancelled_at_once(ns: kvfs.Namespace) -> None:
    saved(ns, 2)
    with attach(ns, Engine().kv, registered_bytes=0) as io, ns.match(prompt(2)) as match:
        taken = io.ring.acquire(io.ring.slots, LATE)
        assert taken is not None
        transfer = io.load(match, range(4), NOW, deadline=LATE)
        while transfer.state is not TransferState.LOADING:
            time.sleep(0.001)
        try:
            assert transfer.cancel(SECONDS / 10)
        finally:
            taken.release()
        result = transfer.wait(SECONDS)
        assert result is not None and (result.pages, result.reason) == (0, "cancelled")


def test_a_save_can_be_cancelled_from_a_callback(ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    started, settled, called, cancelled = threading.Event(), threading.Event(), threading.Event(), list[bool]()
    append, wait_until, waits = host_save.Save._append, gpu_save.wait_until, list[int]()

    def slow_append(*args: Any) -> None:
        """A page is settled; the thread that ends its step next calls back."""
        append(*args)
        settled.set()
        called.wait(0.2)

    def slow_wait(*args: Any) -> None:
        """Later batches land behind that."""
        waits.append(1)
        assert len(waits) == 1 or settled.wait(SECONDS)
        wait_until(*args)

    def on_page(_: kvfs.PageDone) -> None:
        if not called.is_set():
            called.set()
            assert started.wait(SECONDS)
            cancelled.append(transfer.cancel(SECONDS / 10))

    monkeypatch.setattr(host_save.Save, "_append", slow_append)
    monkeypatch.setattr(gpu_save, "wait_until", slow_wait)
    slots = 4 * 8192
    with attach(ns, Engine(seed=1).kv, ring_bytes=slots, dirty_bytes=slots, scratch_bytes="4KiB") as io:
        transfer = io.save(ns.plan_save(prompt(16)), range(32), NOW, deadline=LATE, on_page=on_page)
        started.set()
        assert transfer.wait(SECONDS) is not None
        assert cancelled == [True] and transfer.state is TransferState.CANCELLED
        assert io.ring.free == io.ring.slots


@pytest.mark.parametrize("layerwise", [False, True])
def test_segments_are_released_though_no_garbage_is_collected(ns: kvfs.Namespace, layerwise: bool) -> None:
    """Engines keep the collector from running; a segment that is open is not reclaimed."""
    saved(ns, 4)
    gc.collect()
    before = ns._c.segments.count()
    with attach(ns, Engine().kv, transport="ring") as io:
        gc.disable()
        try:
            with ns.match(prompt(4)) as match:
                result = io.load(match, range(8), NOW, layerwise=layerwise).wait(SECONDS)
            assert result is not None and result.pages == 4
            end = time.monotonic() + SECONDS / 20
            while ns._c.segments.count() > before:
                assert time.monotonic() < end
                time.sleep(0.001)
        finally:
            gc.enable()


def test_a_load_that_outlives_the_close_keeps_what_it_uses_until_its_end(ns: kvfs.Namespace) -> None:
    source, target = saved(ns, 4), Engine()
    device, go, stuck = SimulatedDevice(), threading.Event(), threading.Event()
    io = attach(ns, target.kv, device=device)

    def launch() -> None:
        stuck.set()
        assert go.wait(SECONDS)

    with ns.match(prompt(4)) as match:
        device.before_launch = launch
        transfer = io.load(match, range(8), NOW)
        assert stuck.wait(SECONDS)
        io.close(timeout=0.05)
        assert not transfer.done.is_set() and device.maps()
        go.set()
        result = transfer.wait(SECONDS)
    assert result is not None and result.pages == 4 and target.tokens(range(8)) == source.tokens(range(8))
    assert not device.registered and not ns._c.pinned.mine


@pytest.mark.parametrize("lacking", ["device", "host"])
def test_a_command_buffer_without_memory_leaves_nothing_behind(ns: kvfs.Namespace, lacking: str) -> None:
    """The engine may have taken all of the GPU's memory."""
    device = SimulatedDevice()
    with attach(ns, Engine(seed=1).kv, device=device) as io:
        lane = io._gpu_context.saves
        lane.give_back(lane.commands(1))
        before, memory, most = len(device.registered), device.memory, device.pinned_max
        if lacking == "device":
            device.memory = full  # type: ignore[method-assign]
        else:
            device.pinned_max = 1 << 20
        for _ in range(3):
            with pytest.raises((MemoryError, CudaError)):
                lane.commands(2 << 20)
        device.memory, device.pinned_max = memory, most  # type: ignore[method-assign]
        assert len(device.registered) < before
        commands = lane.commands(1)
        device.check_host(commands._back.address, 1)
        assert len(device.registered) == before


def test_a_long_prompt_reuses_the_command_buffer_of_the_last_one(ns: kvfs.Namespace) -> None:
    """Making one takes longer than planning the load of a short prompt."""
    device = SimulatedDevice()
    with attach(ns, Engine(seed=1).kv, device=device) as io:
        lane = io._gpu_context.loads
        made = lane.commands(2 << 20)
        lane.give_back(made)
        for nbytes in (1 << 20, 2 << 20, 1):
            commands = lane.commands(nbytes)
            assert (commands is made) == (nbytes > 1 << 20)
            lane.give_back(commands)
        few, more = lane.commands(1), [lane.commands(2 << 20) for _ in range(2)]
        assert few.nbytes == 1 << 20 and more[0] is made and more[1] is not made
        assert len(lane._buffers) == UNDER_WAY


def full(_: int) -> Any:
    raise MemoryError("CUDA out of memory")


def test_regions_can_be_freed_while_pinned_bytes_are_counted(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM may strike the main thread anywhere."""
    saved(ns, 2)
    device = SimulatedDevice()
    with attach(ns, Engine().kv, device=device) as io, ns.match(prompt(2)) as match:
        assert io.warm(match) and device.maps()
        monkeypatch.setattr(Liveness, "pinned_by_others", lambda _: io.release() or 0)  # type: ignore[func-returns-value]
        thread = threading.Thread(target=ns._c.pinned.take, args=(1, 1 << 30, math.inf), daemon=True)
        thread.start()
        thread.join(SECONDS / 10)
        assert not thread.is_alive() and not device.maps()


@pytest.mark.parametrize("transport", ["in_place", "arena"])
def test_a_region_that_hangs_while_it_is_made_delays_no_load_and_no_close(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """Its bytes come from a disk; other loads read the page cache, or use the ring."""
    source, target = saved(ns, 4), Engine()
    device, go, stuck = SimulatedDevice(), threading.Event(), threading.Event()
    io = attach(ns, target.kv, device=device, transport=transport)
    maps = io._gpu_context.regions
    assert maps is not None
    make_now = maps.source.make

    def make(*args: Any, **options: Any) -> Any:
        stuck.set()
        assert go.wait(SECONDS)
        return make_now(*args, **options)

    with ns.match(prompt(4)) as match:
        monkeypatch.setattr(maps.source, "make", make)
        hanging = threading.Thread(target=io.warm, args=(match,))
        hanging.start()
        assert stuck.wait(SECONDS)
        for first in (0, 8):
            result = io.load(match, range(first, first + 8), NOW, deadline=SECONDS / 2).wait(SECONDS)
            assert result is not None and result.pages == 4
            assert target.tokens(range(first, first + 8)) == source.tokens(range(8))
        assert io.warm(match) == 0
        io.sweep()
        closing = threading.Thread(target=io.close)
        closing.start()
        closing.join(SECONDS / 2)
        assert not closing.is_alive()
        go.set()
        hanging.join(SECONDS)
    assert not hanging.is_alive()
    assert not device.registered and not ns._c.pinned.mine and maps.nbytes == 0


def test_after_a_timeout_no_call_waits_for_a_region_until_it_is_done(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(ns, 4)
    go, stuck = threading.Event(), threading.Event()
    with attach(ns, Engine().kv, device=SimulatedDevice()) as io, ns.match(prompt(4)) as match:
        maps = io._gpu_context.regions
        assert maps is not None
        make_now, waits = maps.source.make, list[float | None]()
        wait_for = maps._made.wait_for

        def make(*args: Any, **options: Any) -> Any:
            stuck.set()
            assert go.wait(SECONDS)
            return make_now(*args, **options)

        def counted_wait(ready: Any, timeout: float | None = None) -> bool:
            waits.append(timeout)
            return wait_for(ready, timeout)

        monkeypatch.setattr(maps.source, "make", make)
        monkeypatch.setattr(maps._made, "wait_for", counted_wait)
        hanging = threading.Thread(target=io.warm, args=(match,))
        hanging.start()
        assert stuck.wait(SECONDS)
        for _ in range(3):
            assert io.warm(match) == 0
        assert waits == [MAKING_SECONDS, MAKING_SECONDS, 0.0, 0.0]
        go.set()
        hanging.join(SECONDS)
        assert io.warm(match) == match.nbytes


@pytest.mark.parametrize("where", ["current", "quiet"])
def test_a_store_is_closed_though_its_gpu_is_broken(
    store_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    """After an illegal address in any kernel each later call fails; torch raises RuntimeError."""

    def broken(*_: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    store = kvfs.open(store_path, capacity="64MiB")
    ns, device = store.namespace("model", LAYOUT, "1"), SimulatedDevice()
    saved(ns, 2)
    io = attach(ns, Engine().kv, device=device)
    with ns.match(prompt(2)) as match:
        assert io.warm(match)
    monkeypatch.setattr(*((device, "current") if where == "current" else (DmaLane, "quiet")), broken)
    store.close()
    assert "could not be released" in caplog.text
    assert bool(device.registered) == (where == "current"), "one step that fails keeps the others"
    assert not list((store_path / "run").glob("*.live"))


@pytest.mark.parametrize("call", ["warm", "warm_hottest"])
@pytest.mark.parametrize("transport", ["in_place", "arena"])
def test_an_interrupt_while_regions_are_made_leaves_nothing_pinned_behind(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch, call: str, transport: str
) -> None:
    saved(ns, 2)
    device = SimulatedDevice()
    with attach(ns, Engine().kv, device=device, transport=transport) as io, ns.match(prompt(2)) as match:
        register_now, before = device.register, dict(device.registered)

        def register(*args: Any, **options: Any) -> None:
            register_now(*args, **options)
            _thread.interrupt_main()
            time.sleep(0.01)  # in the main thread it strikes here, before the region is recorded

        monkeypatch.setattr(device, "register", register)
        with pytest.raises(KeyboardInterrupt):
            io.warm(match) if call == "warm" else io.warm_hottest("1GiB")
            time.sleep(1)
        monkeypatch.setattr(device, "register", register_now)
        end = time.monotonic() + SECONDS
        while any(thread.name == "kvfs-pin" for thread in threading.enumerate()):
            assert time.monotonic() < end
            time.sleep(0.001)
        assert ns._c.pinned.mine in (0, sum(n for at, (n, _) in device.registered.items() if at not in before))
        assert io.warm(match) == match.nbytes
    assert not device.registered and not ns._c.pinned.mine


def test_an_arena_without_memory_for_a_block_is_charged_nothing_for_it(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``vm.max_map_count``, or a limit of the address space."""
    source, target, device = saved(ns, 2), Engine(), SimulatedDevice()
    with attach(ns, target.kv, device=device, transport="arena") as io, ns.match(prompt(2)) as match:
        pinned = device.pinned

        def none(_: int) -> Any:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

        monkeypatch.setattr(device, "pinned", none)
        assert io.warm(match) == 0 and not ns._c.pinned.mine
        result = io.load(match, range(4), NOW).wait(SECONDS)
        assert result is not None and result.pages == 2 and target.tokens(range(4)) == source.tokens(range(4))
        monkeypatch.setattr(device, "pinned", pinned)
        assert io.warm(match) == match.nbytes


@pytest.mark.parametrize("transport", ["in_place", "arena", "ring"])
def test_memory_that_the_driver_keeps_registered_stays_mapped(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, transport: str
) -> None:
    """New memory at its address would count as registered: the engine's own copies would read old pages."""

    def mapped(address: int) -> bool:
        with open("/proc/self/maps") as maps:
            spans = [line.split(" ", 1)[0].split("-") for line in maps]
        return any(int(first, 16) <= address < int(end, 16) for first, end in spans)

    def keep(address: int) -> None:
        raise CudaError("unregister: not permitted")

    saved(ns, 2)
    device = SimulatedDevice()
    with attach(ns, Engine().kv, device=device, transport=transport) as io, ns.match(prompt(2)) as match:
        assert bool(io.warm(match)) == (transport != "ring")
        pinned, unregister = ns._c.pinned.mine, device.unregister
        monkeypatch.setattr(device, "unregister", keep)
    kept = dict(device.registered)
    assert kept and all(mapped(address) for address in kept) and ns._c.pinned.mine == pinned
    assert "not permitted" in caplog.text
    for address in kept:
        unregister(address)
    ns._c.pinned.give_back(pinned)
