"""``python -m tools.benchmarks.serve_truth``: what ``kvfs bench serve`` says of a server with known delays and hits.

The server of the tests runs in a process of its own. By the clock that both processes share it notes when each request
came and when it sent each token. That record is the truth, not the delays that were set: a busy machine delays the
server, too. Delays before first tokens vary by half, so that sessions do not stay in step: a burst of all users at once
would measure the queue in front of the server's one core.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from itertools import pairwise
from typing import Any

import click

from kvfs.bench import report, workload
from kvfs.bench.driver import Run
from kvfs.bench.target import OpenAITarget
from kvfs.bench.workload import Shape


def serve(pipe: Any, first: float, each: float) -> None:
    """The process of the server: sends its address and, after one more message, what it noted."""
    from tests.bench.test_serve import FakeServer

    server = FakeServer(first, each, varied=0.5)
    with server.url() as url:
        pipe.send(url)
        pipe.recv()
    pipe.send((server.times, sum(server.cached), sum(map(len, server.prompts))))


async def measure(url: str, shape: Shape, concurrency: int) -> dict[str, Any]:
    target = await OpenAITarget.connect(url, None, 120.0)
    run = Run(target, 1, lambda progress: None)
    try:
        await run.closed(workload.multi_turn(shape, 1), concurrency)
    finally:
        await target.close()
    return report.summary(run, {})


def compare(concurrency: int, first: float, each: float, output: int) -> None:
    """One row: reported and true mean time to the first token and between tokens, and hit ratio."""
    shape = Shape(sessions=max(8, 2 * concurrency), turns=3, shared=32, first=64, turn=16, output=output)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, first, each), daemon=True)
    process.start()
    found = asyncio.run(measure(ours.recv(), shape, concurrency))
    ours.send(None)
    times, cached, prompts = ours.recv()
    process.join(60)
    ttft = report.spread([t[1] - t[0] for t in times])
    itl = report.spread([b - a for t in times for a, b in pairwise(t[1:])])
    assert ttft is not None and itl is not None and found["failed"] == 0 and len(times) == found["requests"]
    row = []
    for name, true in (("ttft", 1e3 * ttft["mean"]), ("itl", 1e3 * itl["mean"])):
        said = 1e3 * found[name]["mean"]
        row.append(f"{name} {said:.2f} / {true:.2f} ms = {said / true:.4f}")
    hits = cached / prompts
    row.append(f"hits {found['hit_ratio']:.4f} / {hits:.4f} = {found['hit_ratio'] / hits:.4f}")
    click.echo(f"concurrency {concurrency:2d}, {found['requests']} requests: " + "   ".join(row))


@click.command()
@click.option("--concurrency", default="1,8,64", show_default=True)
@click.option("--first", default=0.5, show_default=True, help="Seconds before the first token.")
@click.option("--each", default=0.05, show_default=True, help="Seconds between tokens.")
@click.option("--output", default=8, show_default=True, help="Tokens of an answer.")
def main(concurrency: str, first: float, each: float, output: int) -> None:
    """Reported / true = ratio, of means and of the hit ratio, for each concurrency."""
    for some in concurrency.split(","):
        compare(int(some), first, each, output)


if __name__ == "__main__":
    main()
