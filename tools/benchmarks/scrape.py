"""``python -m tools.benchmarks.scrape``: what a scrape of a large store costs the exporter, and an engine beside it.

A process that has the store open fills it, looks up one prompt of every namespace, so that all of them have counts, and
then idles as an engine without requests. This process serves the metrics over HTTP as ``kvfs metrics --listen`` does.
The CPU time of the engine is taken over windows of equal length, in turns with one scrape each second and without any.
"""

from __future__ import annotations

import tempfile
import time
import urllib.request
from array import array
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import click

import kvfs
from kvfs.metrics import exporter
from tools.benchmarks import case
from tools.benchmarks.case import MIB
from tools.benchmarks.crew import Crew
from tools.benchmarks.measure import BenchError

PAGE_BYTES = 1024
PAGE_TOKENS = 16
PROMPT_PAGES = 1000
CAPACITY_BYTES = 16 << 30  # at least: a smaller store keeps counts of fewer namespaces
PUBLISHED_SECONDS = 12.0  # counts by namespace are published every five


@dataclass
class Engine(AbstractContextManager["Engine"]):
    """Fills the store on the order "fill"; answers "cpu" with the CPU seconds of its process."""

    path: Path
    pages: int
    namespaces: int

    def __enter__(self) -> Engine:
        index = max(16 * MIB, 400 * self.pages)
        capacity = 2 * self.pages * PAGE_BYTES + CAPACITY_BYTES + index
        self._stack = ExitStack()
        self._store = self._stack.enter_context(kvfs.open(self.path, capacity=capacity, index_bytes=index))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def run(self, order: Any) -> float:
        if order == "fill":
            self._fill()
        return time.process_time()

    def _fill(self) -> None:
        layout = kvfs.PageLayout.kv(
            layers=1, kv_heads=1, head_dim=PAGE_BYTES // (4 * PAGE_TOKENS), dtype="bfloat16", page_tokens=PAGE_TOKENS
        )
        data, left = bytes(PROMPT_PAGES * PAGE_BYTES), self.pages
        each = -(-self.pages // self.namespaces)
        for number in range(self.namespaces):
            ns = self._store.namespace(f"model-{number:03}", layout, revision="9213176")
            mine = min(each, left)
            left -= mine
            for begin in range(0, mine, PROMPT_PAGES):
                count = min(PROMPT_PAGES, mine - begin)
                tokens: array[int] = case.tokens(number, begin, count * PAGE_TOKENS)
                done = ns.put(tokens, memoryview(data)[: count * PAGE_BYTES])
                if done.stored != count:
                    raise BenchError(f"put stored {done}")
            ns.match(tokens[: 4 * PAGE_TOKENS]).close()


@click.command()
@click.option("--pages", default=1_000_000, show_default=True)
@click.option("--namespaces", default=300, show_default=True)
@click.option("--scrapes", default=20, show_default=True, help="Of each window; one each second.")
@click.option("--rounds", default=3, show_default=True, help="Pairs of windows.")
def main(pages: int, namespaces: int, scrapes: int, rounds: int) -> None:
    """Milliseconds of a scrape: passed, of the exporter's CPU, and of the engine's CPU beyond a window without any."""
    with tempfile.TemporaryDirectory(prefix="kvfs-bench-") as folder, ExitStack() as stack:
        path = Path(folder) / "store"
        crew = stack.enter_context(Crew([Engine(path, pages, namespaces)]))
        crew.run("fill")
        time.sleep(PUBLISHED_SECONDS)
        store = stack.enter_context(kvfs.open(path, counted=False))
        server, _ = exporter.serve(store, "127.0.0.1", 0)
        stack.callback(server.shutdown)
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        body = _scrape(url)[1]
        named = len({line.split("}")[0] for line in body.splitlines() if line.startswith("kvfs_namespace_lookups_")})
        passed, own, engine = list[float](), list[float](), list[float]()
        for _ in range(rounds):
            before, spent = crew.run("cpu")[0], list[float]()
            for scraping in (False, True):
                for _ in range(scrapes):
                    began, cpu = time.monotonic(), time.process_time()
                    if scraping:
                        passed.append(_scrape(url)[0])
                        own.append(time.process_time() - cpu)
                    time.sleep(max(0.0, began + 1.0 - time.monotonic()))
                after = crew.run("cpu")[0]
                spent.append(after - before)
                before = after
            engine.append((spent[1] - spent[0]) / scrapes)
        click.echo(f"{pages:,} pages, {named} namespaces, {len(body):,} bytes of text, {len(passed)} scrapes")
        for what, values in (("passed", passed), ("CPU of the exporter", own), ("CPU of the engine", engine)):
            ranked = sorted(1e3 * v for v in values)
            click.echo(f"{what}: {ranked[len(ranked) // 2]:.1f} ms [{ranked[0]:.1f}, {ranked[-1]:.1f}]")


def _scrape(url: str) -> tuple[float, str]:
    began = time.perf_counter()
    with urllib.request.urlopen(url, timeout=60) as answer:
        body = answer.read().decode()
    return time.perf_counter() - began, body


if __name__ == "__main__":
    main()
