"""What it costs the caller to ask the bucket for a prompt that it lacks: a lookup alone, and one with ``Store.fetch``.

    python -m tools.benchmarks.fetch_cost --tokens 131072 --page-tokens 64 --rounds 40

Each round has a prompt of its own, which neither the store nor the bucket holds; the bucket is a directory, the process
that asks it has started. Times are those of the caller's thread, in milliseconds.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from pathlib import Path

import click

import kvfs
from kvfs.directory import config_file
from kvfs.system.files import Files


@click.command(help=__doc__)
@click.option("--tokens", type=int, default=131_072, show_default=True)
@click.option("--page-tokens", type=int, default=64, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=40, show_default=True)
def main(tokens: int, page_tokens: int, rounds: int) -> None:
    layout = kvfs.PageLayout.kv(layers=2, kv_heads=1, head_dim=16, dtype="float16", page_tokens=page_tokens)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store"
        kvfs.open(path, capacity="64MiB").close()
        config_file.change(str(path), "remote.url", f"file://{folder}/bucket", Files())
        with kvfs.open(path) as store:
            ns = store.namespace("model", layout, "1")
            began = time.monotonic()
            first = store.fetch(ns, [1] * page_tokens)
            if first is None or not first.wait(60.0):
                raise click.ClickException("the bucket was not asked")
            started = time.monotonic() - began
            alone, asked, answered = [], [], []
            for number in range(rounds):
                draw = random.Random(number)
                prompt = [draw.randrange(50_000) for _ in range(tokens)]
                t0 = time.perf_counter()
                pages = ns.prompt(prompt)
                pages.look()
                t1 = time.perf_counter()
                fetch = store.fetch(ns, hashes=pages.hashes)
                t2 = time.perf_counter()
                if fetch is None or not fetch.wait(60.0):
                    raise click.ClickException("the bucket was not asked")
                answered.append(time.perf_counter() - t1)
                alone.append(t1 - t0)
                asked.append(t2 - t0)
    ratios = [b / a for a, b in zip(alone, asked, strict=True)]
    click.echo(f"start of the process and first answer: {started:.2f} s")
    for name, values, unit in (
        ("lookup", alone, 1e3), ("lookup and fetch", asked, 1e3), ("ratio", ratios, 1.0), ("answer", answered, 1e3)
    ):  # fmt: skip
        some = [v * unit for v in values]
        click.echo(f"{name}: {statistics.median(some):.3f} [{min(some):.3f}, {max(some):.3f}]")


if __name__ == "__main__":
    main()
