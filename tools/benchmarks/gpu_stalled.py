"""How long an engine waits for its blocks while the disk is stalled: saves on a GPU, one after the other, at a pace.

The store is on a file system whose writes of payloads do not return until the end. The ring holds a few prompts; saves
that find no slots are declined. Times from ``save`` until ``source_free``, with a healthy disk before and after (a save
also waits for slots if saves exceed the disk's rate: choose the pace accordingly).
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvfs
from kvfs.system.files import Files
from tools.benchmarks.gpu_engine import BLOCK, SHAPES, Engine, torch_with_cuda
from tools.benchmarks.measure import BenchError, percentile
from tools.benchmarks.report import Report, Table

WAIT_SECONDS = 60.0
RING = "1GiB"
HEALTHY = 20  # saves, before and after


@dataclass(frozen=True)
class Plan:
    shape: str
    tokens: int
    saves: int  # while the disk is stalled
    pace_seconds: float
    seed: int

    @property
    def need_bytes(self) -> int:
        return 12 << 30


class StoppingFiles(Files):
    """A disk that can be stopped: threads that write payloads hang in their calls."""

    def __init__(self) -> None:
        self.runs = threading.Event()
        self.runs.set()

    def pwritev(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        if threading.current_thread().name.startswith("kvfs-write"):
            self.runs.wait()
        return super().pwritev(fd, buffers, offset)


def run(report: Report, folder: Path, plan: Plan) -> None:
    torch, layout, files = torch_with_cuda(), SHAPES[plan.shape](), StoppingFiles()
    engine = Engine(torch, layout, plan.tokens, plan.seed)
    engine.fill(plan.seed)
    table = Table(
        f"{plan.shape}: milliseconds from save to source_free, {plan.tokens} tokens "
        f"({engine.needed(plan.tokens) >> 20} MiB) every {plan.pace_seconds * 1e3:.0f} ms, ring {RING}"
    )
    with kvfs.open(folder / "store", capacity=plan.need_bytes, segment_bytes="256MiB", files=files) as store:
        ns = store.namespace("stalled", layout, "1")
        with ns.attach(engine.kvs, ring_bytes=RING) as io:
            saver = _Saver(torch, ns, io, engine, plan)
            for disk, count in (("healthy", HEALTHY), ("stalled", plan.saves), ("healthy again", HEALTHY)):
                if disk == "stalled":
                    files.runs.clear()
                times, transfers = saver.go(count)
                declined = sum(t.done.is_set() and bool(t.result.declined) for t in transfers)
                table.add(
                    disk=disk, saves=count, declined=declined, p50=percentile(times, 50), p99=percentile(times, 99),
                    most=max(times),
                )  # fmt: skip
                files.runs.set()
                if not all(t.wait(WAIT_SECONDS) for t in transfers):
                    raise BenchError(f"a save did not end within {WAIT_SECONDS} s")
    report.show(table)


class _Saver:
    def __init__(self, torch: Any, ns: kvfs.Namespace, io: Any, engine: Engine, plan: Plan) -> None:
        self._torch, self._ns, self._io, self._plan = torch, ns, io, plan
        self._units = {kv.group: engine.units[: plan.tokens // BLOCK] for kv in engine.kvs}
        self._next = 0

    def go(self, count: int) -> tuple[list[float], list[Any]]:
        """(milliseconds until source_free, transfers) of new prompts."""
        times, transfers = [], []
        for _ in range(count):
            first, self._next = self._next, self._next + self._plan.tokens
            tokens = array("I", range(first, self._next))
            event = self._torch.cuda.Event()
            event.record()
            begin = time.perf_counter()
            transfers.append(self._io.save(self._ns.plan_save(tokens), self._units, event))
            if not transfers[-1].source_free.wait(WAIT_SECONDS):
                raise BenchError(f"source_free took more than {WAIT_SECONDS} s")
            times.append((time.perf_counter() - begin) * 1e3)
            time.sleep(self._plan.pace_seconds)
        return times, transfers
