"""interpreter: what a store takes from the Python threads of its process, and they from it.

Part 1: ``ns.get`` of one prompt in the page cache, quiet and next to a thread that runs Python without a pause,
natively and by Python, in turns.

Part 2: the turns of such a thread while the main thread waits, writes as many bytes with ``os.pwrite`` (bare), puts
prompts, and saves prompts from an engine's memory (``io.save``), in turns. A turn is an iteration of a loop. Turns
are counted per second in which the kernel had a core for the thread or it waited for the interpreter. A write slows the
thread down without the interpreter, too: it shares a core or the memory's bandwidth with it; so bare is the baseline.
``interpreter wait``: the share of the time that the thread neither ran nor waited for a core.
"""

from __future__ import annotations

import os
import threading
import time
from array import array
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import kvfs
from kvfs.native import library as native_library
from tools.benchmarks.case import Case, Payload, out_buffer
from tools.benchmarks.measure import (
    BenchError,
    BusyThread,
    Contender,
    Sample,
    Spread,
    Stopwatch,
    interleave,
    time_ratio,
)
from tools.benchmarks.ours import get_prompt, remove
from tools.benchmarks.report import Report, Table

IDLE_SECONDS = 1.0  # of a window in which the main thread waits
SAVE_SECONDS = 60.0


@dataclass(frozen=True)
class Plan:
    case: Case
    rounds: int

    @property
    def need_bytes(self) -> int:
        return 3 * self.case.size_bytes + 32 * self.case.segment_bytes


def run(report: Report, folder: Path, plan: Plan) -> None:
    gets = Table(f"interpreter: get of {plan.case.prompt_bytes >> 20} MiB next to a busy thread")
    turns = Table(f"interpreter: turns of a busy thread while {plan.case.size_bytes >> 20} MiB are saved")
    payload = Payload(plan.case)
    _gets(gets, folder / "gets", plan, payload)
    report.show(gets)
    _saves(turns, folder / "saves", plan, payload)
    report.show(turns)


def _gets(table: Table, path: Path, plan: Plan, payload: Payload) -> None:
    case, ids, out = plan.case, plan.case.tokens(0), out_buffer(plan.case.prompt_bytes)
    with case.store(path) as store:
        namespace = case.namespace(store)
        namespace.put(ids, payload.of(0))

        def get(*, native: bool, busy: bool) -> Sample:
            watch = Stopwatch()
            with ExitStack() as stack:
                if not native:
                    stack.enter_context(native_library.paused())
                if busy:
                    stack.enter_context(BusyThread())
                with watch:
                    get_prompt(namespace, case, ids, out)
            return watch.sample(case.prompt_bytes)

        paths = ["native", "python"] if native_library.loaded() is not None else ["python"]
        contenders = [
            Contender(f"{how} {busy}", lambda how=how, busy=busy: get(native=how == "native", busy=busy))  # type: ignore[misc]
            for how in paths
            for busy in (False, True)
        ]
        samples = interleave(contenders, plan.rounds)
        payload.check(out, 0)
    for how in paths:
        quiet, beside = samples[f"{how} False"], samples[f"{how} True"]
        table.add(
            path=how, quiet_ms=Spread.of([s.seconds * 1e3 for s in quiet]),
            busy_ms=Spread.of([s.seconds * 1e3 for s in beside]), busy_to_quiet=time_ratio(beside, quiet),
        )  # fmt: skip
    remove(path)


class _Window(NamedTuple):
    """What the counting thread did while a call lasted."""

    rate: float  # turns per second without those in which it waited for a core
    waiting: float  # share of the time that it waited for the interpreter


class _Counter:
    """A thread that counts without a pause."""

    def __enter__(self) -> _Counter:
        self.turns, self._stop, ready = 0, False, threading.Event()

        def spin() -> None:
            self._id = threading.get_native_id()
            ready.set()
            while not self._stop:
                self.turns += 1

        self._thread = threading.Thread(target=spin, name="busy", daemon=True)
        self._thread.start()
        ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()

    def during(self, call: Callable[[], object]) -> _Window:
        turns, began, before = self.turns, time.perf_counter(), self._scheduled()
        call()
        turns, seconds, after = self.turns - turns, time.perf_counter() - began, self._scheduled()
        ran, waited = after[0] - before[0], after[1] - before[1]
        return _Window(turns / (seconds - waited), max(0.0, 1 - (ran + waited) / seconds))

    def _scheduled(self) -> tuple[float, float]:
        """Seconds that the thread ran, and that the kernel let it wait for a core."""
        ran, waited, _ = Path(f"/proc/self/task/{self._id}/schedstat").read_text().split()
        return int(ran) / 1e9, int(waited) / 1e9


def _saves(table: Table, path: Path, plan: Plan, payload: Payload) -> None:
    """Windows of waiting, writing, putting and saving, round by round."""
    windows: dict[str, list[_Window]] = {"waiting": [], "bare": [], "put": [], "io.save": []}
    for number in range(plan.rounds):
        with plan.case.store(path, scale=2) as store, _Counter() as counter:
            calls = {
                "waiting": lambda: time.sleep(IDLE_SECONDS),
                "bare": _write_all(path.with_suffix(".bare"), plan.case, payload),
                "put": _put_all(store, plan.case, payload),
                "io.save": _save_all(store, plan.case, payload),
            }
            for name in calls if number % 2 else reversed(calls):
                windows[name].append(counter.during(calls[name]))
        remove(path)
    for name, some in windows.items():
        shares = [a.rate / b.rate for a, b in zip(some, windows["bare"], strict=True)]
        table.add(
            main_thread=name, million_turns_per_s=Spread.of([w.rate / 1e6 for w in some]), of_bare=Spread.of(shares),
            interpreter_wait=Spread.of([w.waiting for w in some]),
        )  # fmt: skip


def _write_all(path: Path, case: Case, payload: Payload) -> Callable[[], None]:
    def write() -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            for prompt in range(case.prompts):
                done = 0
                while done < case.prompt_bytes:
                    done += os.pwrite(fd, payload.view[done:], prompt * case.prompt_bytes + done)
        finally:
            os.close(fd)
            path.unlink()

    return write


def _put_all(store: kvfs.Store, case: Case, payload: Payload) -> Callable[[], None]:
    namespace = case.namespace(store)

    def put() -> None:
        for prompt in range(case.prompts):
            if namespace.put(case.tokens(prompt), payload.view).stored != case.prompt_pages:
                raise BenchError("a page was declined")

    return put


def _save_all(store: kvfs.Store, case: Case, payload: Payload) -> Callable[[], None]:
    """Saves from memory that looks like an engine's: a unit is a page, its layers are the outermost dimension."""
    import numpy as np

    namespace = store.namespace("engine", case.layout, revision="bench-1")
    layout, units = case.layout, case.prompt_pages
    layers = len(layout.groups[0].layers)
    memory = np.frombuffer(payload.view, "uint16").reshape(layers, units, layout.page_tokens, 8, 256)
    kv = kvfs.describe(layout.groups[0], memory, "layer,block,token,head,2*dim")

    def save() -> None:
        with namespace.attach(kv) as io:
            for prompt in range(case.prompts):
                ids = array("I", [(n + 1) % (1 << 32) for n in case.tokens(prompt)])
                if io.save(namespace.plan_save(ids), range(units)).wait(SAVE_SECONDS) is None:
                    raise BenchError("a save did not end")

    return save
