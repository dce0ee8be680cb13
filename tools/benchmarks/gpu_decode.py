"""What a save and a load of 8,192 tokens (1 GiB) cost decode steps next to them, by the copy engine and by a kernel:
``python -m tools.benchmarks.gpu_decode``. Needs a GPU of 80 GB.

A step is a graph of matrix-vector products over 14 GB of weights; it takes its inputs from pinned memory, and waits
for its tokens on the host, as engines do. Lost: what the steps after a transfer's start take longer than a step alone,
added up. Each load is compared, bit for bit. With ``--prefill`` also the time of matrix products of a prefill.
"""

from __future__ import annotations

import itertools
import random
import shutil
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable
from typing import Any

import click

import kvfs
from tools.benchmarks.gpu_engine import BLOCK, SHAPES, Engine, torch_with_cuda
from tools.benchmarks.measure import BenchError, Spread

TOKENS, LAYERS, SECONDS = 8192, 32, 30.0
WATCHED_SECONDS = 0.1  # from the start of a transfer on
PREFILL_LAYERS = 12
SIZES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))


class Steps:
    """The steps of an engine without attention."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        options = {"device": "cuda", "dtype": torch.bfloat16}
        self._weights = [[torch.randn(*size, **options) for size in SIZES] for _ in range(LAYERS)]
        self._inputs = {size: torch.randn(size, **options) for size in (4096, 14336)}
        self._prompt = {size: torch.randn(TOKENS, size, **options) for size in (4096, 14336)}
        self._there = [torch.zeros(512, dtype=torch.int64, pin_memory=True) for _ in range(6)]
        self._here = [torch.zeros(512, dtype=torch.int64, device="cuda") for _ in range(6)]
        self._sampled = torch.zeros(64, dtype=torch.int64, pin_memory=True)
        self._compute()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._compute()

    def _compute(self) -> None:
        for layer in self._weights:
            for weight in layer:
                self.torch.mv(weight, self._inputs[weight.shape[1]])

    def decode(self) -> float:
        """Milliseconds of one step, as the engine's thread sees it."""
        begin = time.perf_counter()
        for here, there in zip(self._here, self._there, strict=True):
            here.copy_(there, non_blocking=True)
        self._graph.replay()
        self._sampled.copy_(self._here[0][:64], non_blocking=True)
        event = self.torch.cuda.Event()
        event.record()
        event.synchronize()
        return (time.perf_counter() - begin) * 1e3

    def prefill(self) -> Any:
        """Enqueue the products of some layers; the event of their end."""
        for layer in self._weights[:PREFILL_LAYERS]:
            for weight in layer:
                self.torch.mm(self._prompt[weight.shape[1]], weight.t())
        event = self.torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@click.command()
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--prefill/--no-prefill", default=True)
@click.option("--path", type=click.Path(), default=None, help="Where to write.")
def main(rounds: int, prefill: bool, path: str | None) -> None:
    """What saves and loads cost decode steps next to them."""
    torch, rng = torch_with_cuda(), random.Random(1)
    layout = SHAPES["gqa16"]()
    source, target = Engine(torch, layout, TOKENS, 1), Engine(torch, layout, TOKENS, 2)
    source.fill(1)
    steps = Steps(torch)
    alone = statistics.median([steps.decode() for _ in range(60)][10:])
    print(f"decode step alone: {alone:.2f} ms", flush=True)
    folder = tempfile.mkdtemp(prefix="kvfs-decode-", dir=path)
    try:
        with kvfs.open(folder + "/store", capacity="40GiB") as store:
            ns = store.namespace("bench", layout, "1")
            with (
                ns.attach(source.kvs, ring_bytes="4GiB", append_elsewhere=True) as saving,
                ns.attach(target.kvs, ring_bytes="1GiB") as loading,
            ):
                measure(torch, rng, ns, steps, alone, (source, saving), (target, loading), rounds, prefill=prefill)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure(
    torch: Any, rng: random.Random, ns: kvfs.Namespace, steps: Steps, alone: float, source: tuple[Engine, Any],
    target: tuple[Engine, Any], rounds: int, *, prefill: bool,
) -> None:  # fmt: skip
    engine, saving = source
    numbers, units = itertools.count(1), {kv.group: engine.units[: TOKENS // BLOCK] for kv in engine.kvs}

    def prompt(number: int) -> array[int]:
        return array("I", range(number * 10007, number * 10007 + TOKENS))

    def event() -> Any:
        happened = torch.cuda.Event()
        happened.record()
        return happened

    def save(gentle: bool) -> Any:
        return saving.save(ns.plan_save(prompt(next(numbers))), units, event(), SECONDS, gentle=gentle)

    def stored(transfer: Any) -> None:
        result = transfer.wait(SECONDS)
        if result is None or result.pages != TOKENS // BLOCK:
            raise BenchError(f"a save stored {result}")

    stored(save(gentle=False))
    theirs, loading = target
    placed = {kv.group: theirs.units[: TOKENS // BLOCK] for kv in theirs.kvs}
    with ns.match(prompt(1)) as match:
        loading.warm(match)

        def load(gentle: bool) -> Any:
            return loading.load(match, placed, event(), SECONDS, gentle=gentle)

        def restored(transfer: Any) -> None:
            result = transfer.wait(SECONDS)
            if result is None or result.tokens != TOKENS or not engine.same(theirs, TOKENS):
                raise BenchError(f"a load brought {result}, or other bytes")
            theirs.fill(None)

        for name, begin, end in (("save", save, stored), ("load", load, restored)):
            next_to_decode(name, steps, alone, rng, rounds, begin, end)
        if prefill:
            for name, begin, end in (("save", save, stored), ("load", load, restored)):
                next_to_prefill(torch, name, steps, rng, rounds, begin, end)


def next_to_decode(
    name: str, steps: Steps, alone: float, rng: random.Random, rounds: int, begin: Callable[[bool], Any],
    end: Callable[[Any], None],
) -> None:  # fmt: skip
    rows: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}
    for number in range(-1, rounds):
        for gentle in rng.sample((False, True), 2):
            steps.decode()
            start, seen, over = time.perf_counter(), list[float](), 0.0
            transfer = begin(gentle)
            moved = transfer.source_free if name == "save" else transfer.done
            while time.perf_counter() - start < WATCHED_SECONDS:
                seen.append(steps.decode())
                if not over and moved.is_set():
                    over = (time.perf_counter() - start) * 1e3
            end(transfer)
            if number >= 0:
                rows[gentle].append((sum(max(0.0, ms - alone) for ms in seen), max(seen), over or 1e3))
    for gentle, found in rows.items():
        lost, longest, free = (Spread.of(column) for column in zip(*found, strict=True))
        print(
            f"{name}, {'gentle' if gentle else 'copy engine'}: decode steps lose {lost.middle:.1f} ms [{lost.low:.1f}, "
            f"{lost.high:.1f}], the longest takes {longest.middle:.1f}; moved after {free.middle:.1f} [{free.low:.1f}, "
            f"{free.high:.1f}]", flush=True,
        )  # fmt: skip


def next_to_prefill(
    torch: Any, name: str, steps: Steps, rng: random.Random, rounds: int, begin: Callable[[bool], Any],
    end: Callable[[Any], None],
) -> None:  # fmt: skip
    rows: dict[bool | None, list[float]] = {None: [], False: [], True: []}
    for number in range(-1, rounds):
        for gentle in rng.sample((None, False, True), 3):
            torch.cuda.synchronize()
            first = torch.cuda.Event(enable_timing=True)
            first.record()
            transfer = None if gentle is None else begin(gentle)
            last = steps.prefill()
            last.synchronize()
            if transfer is not None:
                end(transfer)
            if number >= 0:
                rows[gentle].append(first.elapsed_time(last))
    for gentle, found in rows.items():
        what = {None: "alone", False: f"next to a {name}, copy engine", True: f"next to a {name}, gentle"}[gentle]
        ms = Spread.of(found)
        print(f"prefill {what}: {ms.middle:.1f} ms [{ms.low:.1f}, {ms.high:.1f}]", flush=True)


if __name__ == "__main__":
    main()
