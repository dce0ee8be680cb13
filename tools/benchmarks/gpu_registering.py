"""What registering and unregistering maps of segments does to others on the GPU: the time from the launch of a small
kernel to its end, alone and meanwhile, in this process and in a second one; then what a store's users see when a
process is killed that has as much registered and holds the index.

The maps are those of a store in the page cache, registered as ``GpuIO.warm`` does it: pieces of 64 MiB.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import kvfs
from tools.benchmarks.gpu_engine import SHAPES, Engine
from tools.benchmarks.measure import BenchError, percentile
from tools.benchmarks.report import Report, Table

TOKENS = 32768
PAUSE_SECONDS = 100e-6  # between launches


@dataclass(frozen=True)
class Plan:
    nbytes: int
    seed: int


def run(report: Report, folder: Path, plan: Plan) -> None:
    try:
        import torch
    except ImportError as exc:
        raise BenchError(f"this benchmark needs torch and a GPU: {exc}") from None
    if not torch.cuda.is_available():
        raise BenchError("this benchmark needs a CUDA device, torch sees none")
    path = folder / "store"
    prompts = _fill(torch, path, plan)
    start = multiprocessing.get_context("spawn")
    mine, theirs = start.Pipe()
    process = start.Process(target=_second, args=(theirs,), daemon=True)
    process.start()
    try:
        _launches(torch, report, path, prompts, mine)
    finally:
        mine.send("end")
        process.join(30)
    _killed(report, path, prompts, plan)


def _fill(torch: Any, path: Path, plan: Plan) -> list[array[int]]:
    """A store of at least ``nbytes`` in the page cache."""
    layout = SHAPES["gqa64"]()
    page = layout.groups[0].page_bytes
    pages = TOKENS // layout.page_tokens
    prompts = [array("I", range(i << 20, (i << 20) + TOKENS)) for i in range(-(-plan.nbytes // (pages * page)))]
    data = bytearray(os.urandom(1 << 20)) * (page * 64 >> 20)
    with kvfs.open(path, capacity=plan.nbytes * 5 // 4 + (4 << 30), segment_bytes="256MiB") as store:
        ns = store.namespace("bench", layout, "1")
        for prompt in prompts:
            for first in range(0, pages, 64):
                result = ns.put(prompt[: (first + 64) * layout.page_tokens], data, start=first)
                if result.declined:
                    raise BenchError(f"the store declined pages: {result}")
    return prompts


def _attach(torch: Any, store: kvfs.Store, nbytes: int) -> tuple[kvfs.Namespace, Any]:
    layout = SHAPES["gqa64"]()
    ns = store.namespace("bench", layout, "1")
    engine = Engine(torch, layout, 1024, 1)
    return ns, ns.attach(engine.kvs, ring_bytes="64MiB", registered_bytes=nbytes)


class _Prober:
    """Launches a small kernel again and again, and waits for each."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._x = torch.zeros(1024, device="cuda")
        self._stream = torch.cuda.Stream()
        self.once()

    def once(self) -> float:
        begin = time.perf_counter()
        with self._torch.cuda.stream(self._stream):
            self._x.add_(1)
        self._stream.synchronize()
        return time.perf_counter() - begin

    def until(self, over: Callable[[], bool]) -> list[float]:
        taken = []
        while not over():
            taken.append(self.once())
            time.sleep(PAUSE_SECONDS)
        return taken


def _second(pipe: Connection) -> None:
    import torch

    prober = _Prober(torch)
    pipe.send("ready")
    while pipe.recv() == "go":
        pipe.send(prober.until(pipe.poll))
        pipe.recv()


def _launches(torch: Any, report: Report, path: Path, prompts: list[array[int]], second: Connection) -> None:
    table = Table("a small kernel from launch to end, milliseconds")
    prober = _Prober(torch)
    second.recv()

    def watch(what: str, work: Callable[[], object]) -> None:
        over = threading.Event()

        def worker() -> None:
            torch.cuda.set_device(0)
            work()
            over.set()

        thread = threading.Thread(target=worker)
        second.send("go")
        begin = time.perf_counter()
        thread.start()
        mine = prober.until(over.is_set)
        seconds = time.perf_counter() - begin
        thread.join()
        second.send("stop")
        for who, taken in (("this process", mine), ("another", second.recv())):
            ms = {f"p{p}": percentile(taken, p) * 1e3 for p in (50, 99)}
            table.add(meanwhile=what, seconds=seconds, in_=who, launches=len(taken), **ms, most=max(taken) * 1e3)
        second.send("seen")

    with kvfs.open(path) as store:
        ns, io = _attach(torch, store, 1 << 40)
        matches = [ns.match(prompt) for prompt in prompts]
        watch("nothing", lambda: time.sleep(1.0))
        watch("registering", lambda: [io.warm(match) for match in matches])
        table.notes.append(f"{io._gpu_desk.in_place.nbytes / (1 << 30):.1f} GiB were registered")
        watch("unregistering", io.let_go)
        for match in matches:
            match.close()
        io.close()
    report.show(table)


def _victim(path: str, prompts: list[array[int]], pipe: Connection) -> None:
    """Registers everything, and holds the index until it is killed."""
    import torch

    with kvfs.open(path) as store:
        ns, io = _attach(torch, store, 1 << 40)
        for prompt in prompts:
            with ns.match(prompt) as match:
                io.warm(match)

        def hold(session: object) -> None:
            pipe.send(io._gpu_desk.in_place.nbytes)
            time.sleep(600)

        ns._c.index.write(hold, 600.0)


def _killed(report: Report, path: Path, prompts: list[array[int]], plan: Plan) -> None:
    table = Table("lookups of another process around the kill of a process that holds the index, milliseconds")
    start = multiprocessing.get_context("spawn")
    mine, theirs = start.Pipe()
    victim = start.Process(target=_victim, args=(str(path), prompts, theirs), daemon=True)
    victim.start()
    if not mine.poll(300):
        raise BenchError("the process that is to be killed did not register its maps within 300 s")
    registered = mine.recv()
    with kvfs.open(path) as store:
        ns = store.namespace("bench", SHAPES["gqa64"](), "1")
        slowest, first_hit = 0.0, 0.0
        os.kill(victim.pid or 0, signal.SIGKILL)
        begin = time.perf_counter()
        while time.perf_counter() - begin < 60 and not first_hit:
            before = time.perf_counter()
            with ns.match(prompts[0]) as match:
                now = time.perf_counter()
                slowest = max(slowest, now - before)
                first_hit = now - begin if match else 0.0
        victim.join(60)
        table.add(
            registered_GiB=registered / (1 << 30), slowest_lookup=slowest * 1e3, first_hit_after=first_hit * 1e3,
            process_gone_after=(time.perf_counter() - begin) * 1e3,
        )  # fmt: skip
    report.show(table)
