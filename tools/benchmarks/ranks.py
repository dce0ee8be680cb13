"""Pulls between the GPUs of one host: ``python -m tools.benchmarks.ranks``. Needs two CUDA devices or more.

The baseline, in the same round: one copy of as many bytes by the copy engine, out of plain memory of the same peer,
in the same process. A pull's time is that of ``RankGroup.load`` and wait, with verification on the GPU; the lookup is
shown beside it. Targets are poisoned before each pull, and compared after it, bit for bit.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from kvfs.kernels.pull import PROGRAMS, WARPS
from tools.benchmarks import ranks_worker
from tools.benchmarks.gpu_engine import SHAPES
from tools.benchmarks.measure import BenchError, Spread

PARTS = ("pulls", "spoiled", "trace", "programs", "cache", "evictions", "killed", "conversations")


class Rank:
    """A process of ``ranks_worker.Worker``."""

    def __init__(self, rank: int, ranks: int, path: str, extra: str = "") -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self.process = context.Process(target=ranks_worker.serve, args=(there, rank, ranks, path, extra), daemon=True)
        self.process.start()
        there.close()
        self._answer()

    def begin(self, method: str, *arguments: Any) -> None:
        self._pipe.send((method, arguments))

    def _answer(self) -> Any:
        worked, answer = self._pipe.recv()
        if not worked:
            raise BenchError(str(answer))
        return answer

    def end(self) -> Any:
        return self._answer()

    def call(self, method: str, *arguments: Any) -> Any:
        self.begin(method, *arguments)
        return self.end()

    def kill(self) -> None:
        if self.process.pid is not None:
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()


def both(ranks: Sequence[Rank], method: str, *arguments: Any) -> list[Any]:
    for rank in ranks:
        rank.begin(method, *arguments)
    return [rank.end() for rank in ranks]


def say(**row: Any) -> None:
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}), flush=True)


def ratios(pairs: Sequence[tuple[float, float]]) -> Spread:
    return Spread.of([base / ours for base, ours in pairs])


def pulls(source: Rank, reader: Rank, shape: str, sizes: Sequence[int], rounds: int, label: str = "") -> None:
    """Must-show: GB/s of pulls against one copy of as many bytes."""
    for number, count in enumerate(sizes):
        prompt = 100 + number
        seconds = source.call("publish", prompt, count)
        found = [reader.call("pull", prompt, count)]
        nbytes = found[0]["nbytes"]
        pairs, best = [], []
        for _ in range(rounds):
            base = reader.call("memcpy", nbytes)
            one = reader.call("pull", prompt, count)
            found.append(one)
            pairs.append((base, one["seconds"]))
            best.append(nbytes / one["seconds"] / 1e9)
        good = all(one["same"] and one["tokens"] == one["peer"] == count for one in found)
        spread = ratios(pairs)
        say(
            row="pull", shape=shape + label, tokens=count, mib=nbytes >> 20, us=nbytes / statistics.median(best) / 1000,
            gb_s=statistics.median(best), of_memcpy=[round(x, 3) for x in spread],
            memcpy_gb_s=nbytes / statistics.median([base for base, _ in pairs]) / 1e9,
            plan_ms=1000 * statistics.median([one["plan"] for one in found]), publish_ms=1000 * seconds, exact=good,
        )  # fmt: skip
        if not good:
            say(row="WRONG", found=[{k: v for k, v in one.items() if k != "seconds"} for one in found][:3])


def spoiled(source: Rank, reader: Rank, shape: str, count: int, page_tokens: int) -> None:
    """A byte that differs from what was published ends the prefix."""
    source.call("publish", 99, count)
    for page in (0, count // page_tokens - 1):
        source.call("spoil", page)
        one = reader.call("pull", 99, count, False)
        source.call("spoil", page)
        whole = reader.call("pull", 99, count, False)
        say(
            row="spoiled", shape=shape, page=page, ends_there=one["tokens"] == page * page_tokens,
            whole_again=whole["tokens"] == count,
        )  # fmt: skip


def cache(source: Rank, reader: Rank, shape: str, count: int, rounds: int) -> None:
    """Must-show: against loading the same prefix from the page cache in place."""
    source.call("publish", 100, count)
    source.call("save", 100, count)
    reader.call("warm", 100, count)
    rows = []
    for _ in range(rounds):
        load, pull = reader.call("load", 100, count), reader.call("pull", 100, count)
        rows.append((load["seconds"], pull["seconds"], load["same"] and pull["same"], load["tokens"]))
    say(
        row="page cache / pull", shape=shape, tokens=count, times=[round(x, 2) for x in ratios([r[:2] for r in rows])],
        load_ms=1000 * statistics.median([r[0] for r in rows]), pull_ms=1000 * statistics.median([r[1] for r in rows]),
        exact=all(r[2] and r[3] == count for r in rows),
    )  # fmt: skip


def evictions(source: Rank, reader: Rank, count: int, number: int) -> None:
    source.begin("churn", 24, count, 400.0)
    time.sleep(1.0)
    result = reader.call("pull_many", 24, count, number)
    say(row="evictions", tokens=count, **result, source=source.end(), **{
        k: v for k, v in reader.call("counters").items() if "pull" in k or "retract" in k
    })  # fmt: skip


def killed(source: Rank, reader: Rank, count: int) -> None:
    source.call("publish", 100, count)
    reader.begin("pull_until_gone", 100, count, 4.0)
    time.sleep(1.5)
    source.kill()
    say(row="source killed", tokens=count, **reader.end())


@click.command()
@click.option("--shape", "shapes", multiple=True, type=click.Choice(list(SHAPES)), default=("gqa16", "mla64", "int8"))
@click.option("--tokens", "sizes", multiple=True, type=int, default=(1024, 4096, 32768))
@click.option("--rounds", type=int, default=9)
@click.option("--pulls", "number", type=int, default=10_000, help="Of the run with evictions.")
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), default=PARTS)
@click.option("--unreachable", is_flag=True, help="Conversations only, without access between the GPUs.")
@click.option("--path", type=click.Path(path_type=Path), default=None)
def main(
    shapes: Sequence[str], sizes: Sequence[int], rounds: int, number: int, parts: Sequence[str], unreachable: bool,
    path: Path | None,
) -> None:  # fmt: skip
    """Pulls between two GPUs against one copy of as many bytes."""
    folder = tempfile.mkdtemp(prefix="kvfs-ranks-", dir=path)
    store = os.path.join(folder, "store")
    try:
        if "conversations" in parts:
            from tools.benchmarks import ranks_conversations

            ranks_conversations.run(store, unreachable=unreachable)
            shutil.rmtree(store, ignore_errors=True)
        if unreachable:
            return
        pair = [Rank(rank, 2, store) for rank in (0, 1)]
        reader, source = pair
        most = max(sizes)
        for shape in shapes:
            both(pair, "start", shape, most, 1, shape)
            source.call("fill", 1)
            if not all(both(pair, "peers")):
                raise BenchError("the ranks do not reach each other")
            nbytes = 1 << 33
            reader.call("take", *source.call("offer", nbytes), nbytes)
            if "pulls" in parts:
                pulls(source, reader, shape, sizes, rounds)
            if "spoiled" in parts:
                spoiled(source, reader, shape, min(4096, most), SHAPES[shape]().page_tokens)
            if "trace" in parts:
                for number_of, count in enumerate(sizes):
                    source.call("publish", 100 + number_of, count)
                    say(row="trace", shape=shape, tokens=count, us=reader.call("trace", 100 + number_of, count, 50))
            if "programs" in parts and shape == shapes[0]:
                for programs, warps in ((16, WARPS), (64, WARPS)):
                    reader.call("programs", programs, warps)
                    pulls(source, reader, shape, sizes[-1:], rounds, f", {programs} programs of {warps} warps")
                reader.call("programs", PROGRAMS, WARPS)
            if "cache" in parts and shape == shapes[0]:
                cache(source, reader, shape, most, rounds)
            reader.call("drop")
            source.call("drop")
            if "evictions" in parts and shape == shapes[0]:
                evictions(source, reader, 1024, number)
            if "killed" in parts and shape == shapes[-1]:
                source.call("fill", 1)
                killed(source, reader, sizes[-1])
                return
            both(pair, "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
