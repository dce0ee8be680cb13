"""What a pull costs on the processor: ``python -m tools.benchmarks.ranks_host``. Needs no GPU.

Two ranks in one process pull from each other over devices that move no byte: a launch, or a copy, only takes the time
on its stream that an H100 would take. Shown, in us, medians [least, most]: from the call to the first launch of a copy,
to the last one, until ``load`` returns; and what the waiter loses behind the last event on the GPU.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

import kvfs
from kvfs.gpu.gpu_io import GpuIO
from kvfs.pages.layout import PageLayout
from kvfs.ranks import RankGroup
from tests.gpu.simulated import SimulatedDevice, SimulatedStream
from tools.benchmarks.gpu_engine import BLOCK, SHAPES

SECONDS = 30.0
#: Of an H100, bytes a second: copies, sums beside copies, sums alone. A launch takes no less than LAUNCH seconds.
COPY, SUM, QUICK = 372e9, 860e9, 2240e9
LAUNCH = 3e-6


class TimedEvent:
    def __init__(self) -> None:
        self.at = 0.0

    def query(self) -> bool:
        return time.perf_counter() >= self.at

    def synchronize(self) -> None:
        while not self.query():
            time.sleep(20e-6)


class TimedStream(SimulatedStream):
    def __init__(self, device: TimedDevice) -> None:
        super().__init__(device)
        self._timed, self._free = device, 0.0

    def _takes(self, seconds: float) -> None:
        self._free = max(self._free, time.perf_counter()) + max(LAUNCH, seconds)

    def event(self) -> Any:
        return TimedEvent()

    def record(self, event: Any = None) -> Any:
        event = event or TimedEvent()
        event.at = self._free
        return event

    def after(self, event: Any) -> None:
        self._free = max(self._free, event.at)

    def copy_in(self, target: int, source: int, nbytes: int) -> None:
        super().copy_in(target, source, nbytes)
        self._takes(nbytes / 25e9)

    def copy_out(self, target: int, source: int, nbytes: int) -> None:
        super().copy_out(target, source, nbytes)
        self._takes(5e-6)

    def pull(self, work: Any, tiles: Any) -> None:
        self._timed.marks.append(time.perf_counter())
        self._takes(self._bytes(work) / COPY)
        self._timed.ends.append(self._free)

    def sum_units(self, work: Any, shape: Any, *, check: bool, quick: bool = False) -> None:
        self._takes(self._bytes(work) / (QUICK if quick else SUM))
        self._timed.ends.append(self._free)

    def _bytes(self, work: Any) -> int:
        return int(work.host[0] * work.host[1] * work.host[3])


class TimedDevice(SimulatedDevice):
    """A device whose kernels move nothing and take as long as those of an H100."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: list[float] = []  # launches of copies
        self.ends: list[float] = []  # when kernels end

    def stream(self, *, urgent: bool = False) -> Any:
        return TimedStream(self)


class Rank:
    def __init__(self, ns: kvfs.Namespace, rank: int, folder: Path, layout: PageLayout, tokens: int) -> None:
        self.ns, self.device = ns, TimedDevice()
        blocks = tokens // BLOCK * 5 // 4
        self.units = np.random.default_rng(rank).permutation(blocks)[: tokens // BLOCK].tolist()
        kv = self._describe(layout, blocks, folder / f"{rank}.pool")
        self.io = GpuIO(
            self.device, ns._c, ns._appender, ns._reader, ns._matcher, ns.identity, ns._retention, [kv],  # type: ignore[arg-type]
            ring_bytes="16MiB", threads=1, dirty_bytes=None, queue_max=16, scratch_bytes="16MiB",
            registered_bytes="64MiB",
        )  # fmt: skip
        self.group = RankGroup(self.io, rank, 2, directory=str(folder))

    def _describe(self, layout: PageLayout, blocks: int, path: Path) -> kvfs.DeviceKV:
        group, heads = layout.groups[0], layout.groups[0].heads
        cell = group.cell.nbytes
        each = blocks * BLOCK * heads * cell
        raw = self.device.share(str(path), each * len(group.layers))
        rows: list[Any] = []
        for i in range(len(group.layers)):
            flat = raw[i * each : (i + 1) * each]
            if heads == 1:
                rows.append(flat.view("uint16").reshape(blocks, BLOCK, cell // 2))
            elif "int8" in group.cell.encoding:
                values, scales = blocks * BLOCK * heads * 128, blocks * BLOCK * heads * 4
                cut = np.split(flat, [values, 2 * values, 2 * values + scales])
                rows.append((
                    *(one.view("int8").reshape(blocks, BLOCK, heads, 128) for one in cut[:2]),
                    *(one.view("float32").reshape(blocks, BLOCK, heads) for one in cut[2:]),
                ))  # fmt: skip
            else:
                rows.append(flat.view("uint16").reshape(2, blocks, BLOCK, heads, 128))
        if heads == 1:
            return kvfs.describe(group, rows, "block,token,dim")
        if "int8" in group.cell.encoding:
            return kvfs.describe(group, rows, ["block,token,head,dim"] * 2 + ["block,token,head"] * 2)
        return kvfs.describe(group, rows, "kv,block,token,head,dim")

    def publish(self, tokens: Sequence[int], count: int) -> None:
        pages = self.ns.prompt(tokens)
        before = self.counters().get("pages_published", 0)
        event = TimedEvent()
        assert self.group.publish(list(pages.hashes), self.units[: count // BLOCK], event)
        while self.counters().get("pages_published", 0) < before + pages.chunks:
            time.sleep(0.001)

    def counters(self) -> dict[str, int]:
        return self.ns._c.counters.snapshot()

    def close(self) -> None:
        self.group.close()
        self.io.close()


def one(reader: Rank, tokens: Sequence[int], count: int) -> dict[str, float]:
    pages = reader.ns.prompt(tokens)
    pages.forget()
    units, event, device = reader.units[: count // BLOCK], TimedEvent(), reader.device
    planning = time.perf_counter()
    plan = reader.group.longest(pages)
    device.marks.clear()
    device.ends.clear()
    begin = time.perf_counter()
    transfer = reader.group.load(plan, units, event, SECONDS)
    returned = time.perf_counter()
    result = transfer.wait(SECONDS)
    done = time.perf_counter()
    assert result is not None and result.tokens == count and result.pages == plan.chunks, result
    whole = plan.chunks * reader.io.pools.attached["full"].page_bytes if hasattr(reader.io, "pools") else 0
    return {
        "plan": begin - planning, "first launch": device.marks[0] - begin, "last launch": device.marks[-1] - begin,
        "returned": returned - begin, "behind the last event": done - max(device.ends),
        "launches": len(device.marks) / 1e6, "whole": done - begin, "of a copy": whole / 390e9 / (done - begin) / 1e6,
    }  # fmt: skip


@click.command()
@click.option("--shape", "shapes", multiple=True, type=click.Choice(list(SHAPES)), default=("gqa16", "mla64", "int8"))
@click.option("--tokens", "sizes", multiple=True, type=int, default=(1024, 4096, 32768))
@click.option("--rounds", type=int, default=31)
def main(shapes: Sequence[str], sizes: Sequence[int], rounds: int) -> None:
    """The host's part of pulls between GPUs."""
    for shape in shapes:
        with tempfile.TemporaryDirectory(prefix="kvfs-ranks-") as folder, contextlib.ExitStack() as stack:
            store = stack.enter_context(kvfs.open(f"{folder}/store", capacity="1GiB"))
            layout = SHAPES[shape]()
            ns = store.namespace("ranks", layout, "1")
            source, reader = (Rank(ns, rank, Path(folder), layout, max(sizes)) for rank in (0, 1))
            stack.callback(source.close)
            stack.callback(reader.close)
            assert reader.group.wait_for_peers(1, SECONDS)
            for number, count in enumerate(sizes):
                tokens = array("I", range(number * 1_000_003, number * 1_000_003 + count))
                source.publish(tokens, count)
                rows = [one(reader, tokens, count) for _ in range(rounds + 2)][2:]
                source.group.retract(source.units)
                found = {
                    name: [round(1e6 * f([row[name] for row in rows]), 2 if name == "of a copy" else 0)
                           for f in (statistics.median, min, max)]
                    for name in rows[0]
                }  # fmt: skip
                print(json.dumps({"shape": shape, "tokens": count, "us": found}), flush=True)


if __name__ == "__main__":
    main()
