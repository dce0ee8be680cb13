"""``kvfs bench serve``: load on a server, or on the library, as conversations make it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from kvfs.cli import text
from kvfs.cli.app import FILE, App, Command, common

if TYPE_CHECKING:
    from kvfs.bench.driver import Progress, Run
    from kvfs.bench.target import Target
    from kvfs.bench.workload import Session

WORKLOADS = ("multi-turn", "long-doc", "prefixes", "trace")
SIZES = ("sessions", "turns", "shared", "first", "turn", "output")


@click.command(
    "serve",
    cls=Command,
    examples=(
        "kvfs bench serve --target http://localhost:8000/v1 --concurrency 16 --report run.html",
        "kvfs bench serve --target http://localhost:8000/v1 --workload trace --trace conversation_trace.jsonl",
    ),
)
@click.option("--target", metavar="URL", required=True, help="http://HOST:PORT/v1, or `store` for the library alone.")
@click.option("--model", metavar="NAME", help="The model to ask.  [default: the only one of the server]")
@click.option("--workload", type=click.Choice(WORKLOADS), default="multi-turn", show_default=True, help="What to ask.")
@click.option("--trace", "trace_file", type=FILE, metavar="FILE", help="Requests of a trace of the Mooncake format.")
@click.option("--speed", type=click.FloatRange(min=0, min_open=True), default=1.0, help="Of a trace.  [default: 1]")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Only the first N requests of a trace.")
@click.option("--sessions", type=click.IntRange(1), default=32, show_default=True, help="Sessions, or documents.")
@click.option("--turns", type=click.IntRange(1), default=4, show_default=True, help="Turns, questions, prefixes.")
@click.option("--shared", type=click.IntRange(0), default=1024, show_default=True, help="Tokens that all share.")
@click.option("--first", type=click.IntRange(1), default=2048, show_default=True, help="Tokens of a first prompt.")
@click.option("--turn", type=click.IntRange(1), default=256, show_default=True, help="Tokens of a further one.")
@click.option("--output", type=click.IntRange(1), default=128, show_default=True, help="Tokens to generate.")
@click.option("--concurrency", type=click.IntRange(1, 4096), help="Sessions at a time.  [default: 8]")
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), help="Sessions per second, as Poisson arrivals.")
@click.option("--timeout", metavar="TIME", default="5m", show_default=True, help="Of one request.")
@click.option("--seed", type=int, default=1, show_default=True, help="For tokens, order and arrivals.")
@click.option("--report", type=FILE, metavar="FILE", help="Write a page with plots (.html), or all requests (.json).")
@common
@click.pass_obj
def serve_command(
    app: App, /, target: str, trace_file: str | None, report: str | None, limit: int | None, **options: Any
) -> None:
    """Ask a server as users do who keep conversations, and measure times to the first token, between tokens, and hits.

    With --concurrency so many users each keep a session; with --rate sessions begin at random times. A trace sets its
    own times. The target `store` makes lookups, loads and saves of a new store in this process, with the KV cache of an
    8B model, and computes nothing.
    """
    from kvfs.bench import report as reports
    from kvfs.directory.config import parse_duration
    from kvfs.errors import KvfsError

    if (options["workload"] == "trace") != (trace_file is not None):
        raise click.UsageError("--workload trace and --trace FILE belong together: give both, or neither")
    if options["rate"] is not None and options["concurrency"] is not None:
        raise click.UsageError("--rate and --concurrency are both given: choose one")
    if report is not None and not report.endswith((".html", ".json")):
        raise click.UsageError(f"--report is {report!r}: name a file that ends with .html or .json")
    if report is not None:
        _check_writable(report)  # before the run, which may take hours
    seconds = parse_duration(options["timeout"], "--timeout")
    sessions = partial(_sessions, trace_file, limit, options)
    if trace_file is not None:
        for _ in sessions():  # a broken line is found before a request is sent
            pass
    run = asyncio.run(_run(app, target, sessions(), trace_file is not None, options, seconds))
    data = reports.summary(run, {"target": target, "trace": trace_file, **options})
    if report is not None:
        body = (
            reports.page(run, data) if report.endswith(".html") else json.dumps({**data, "each": reports.requests(run)})
        )
        _write(report, body)
    app.out.result(data, lambda: _lines(data), [str(data["hit_ratio"])])
    if data["failed"] == data["requests"]:
        raise KvfsError("no request succeeded: see the errors above")


def _sessions(trace_file: str | None, limit: int | None, options: dict[str, Any]) -> Iterator[Session]:
    from kvfs.bench import workload

    if trace_file is not None:
        return workload.trace(trace_file, options["seed"], speed=options["speed"], limit=limit)
    shape = workload.Shape(**{name: options[name] for name in SIZES})
    if options["workload"] == "multi-turn":
        return workload.multi_turn(shape, options["seed"])
    if options["workload"] == "long-doc":
        return workload.long_documents(shape, options["seed"])
    return workload.shared_prefixes(shape, options["seed"])


async def _run(
    app: App, url: str, sessions: Iterator[Session], timed: bool, options: dict[str, Any], seconds: float
) -> Run:
    """``timed``: sessions have times of their own."""
    from kvfs.bench.driver import Run

    def show(progress: Progress) -> None:
        failed = f", {progress.failed} failed" if progress.failed else ""
        app.out.draw(f"{progress.seconds:.0f} s  {progress.requests} requests{failed}  {progress.running} running")

    with tempfile.TemporaryDirectory(prefix="kvfs-bench-") as folder:
        target = await _target(url, folder, options, seconds)
        run = Run(target, options["seed"], show)
        try:
            if timed or options["rate"] is not None:
                await run.open(sessions, options["rate"])
            else:
                await run.closed(sessions, options["concurrency"] or 8)
        finally:
            await target.close()
    return run


async def _target(url: str, folder: str, options: dict[str, Any], seconds: float) -> Target:
    from kvfs.bench import host
    from kvfs.bench.target import OpenAITarget, StoreTarget
    from kvfs.errors import ConfigError

    if url != "store":
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--target is {url!r}: pass http://HOST:PORT/v1, or store")
        return await OpenAITarget.connect(url, options["model"], seconds)
    layout = host.profiles()["8b"].layout
    return StoreTarget.open(os.path.join(folder, "store"), layout)


def _check_writable(path: str) -> None:
    from kvfs.errors import ConfigError

    if os.path.isdir(path):
        raise ConfigError(f"--report is {path}, a directory: name a file")
    folder = os.path.dirname(path) or "."
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"cannot write {path}: name a file in a directory that exists and is writable")


def _write(path: str, body: str) -> None:
    from kvfs.errors import ConfigError

    part = f"{path}.part"
    try:
        with open(part, "w", encoding="utf-8") as file:
            file.write(body)
        os.replace(part, path)
    except OSError as exc:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise ConfigError(f"cannot write {path} ({exc.strerror}): name a directory that is writable") from None


def _lines(data: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{text.count(data['requests'])} requests in {data['seconds']:.1f} s, {text.count(data['failed'])} failed   "
        f"prompts {text.count(data['prompt_tokens'])} tokens, generated {text.count(data['output_tokens'])}"
    )
    if data["hit_ratio"] is not None:
        yield f"cached    {100 * data['hit_ratio']:.1f} % of the prompts' tokens"
    elif data["failed"] < data["requests"]:
        yield "cached    the server does not say; vLLM does with --enable-prompt-tokens-details"
    rows = [
        [name, *(f"{1e3 * data[key][p]:,.1f}" for p in ("p50", "p90", "p99", "mean", "max"))]
        for name, key in (("first token", "ttft"), ("between tokens", "itl"), ("whole request", "e2e"))
        if data[key] is not None
    ]
    if rows:
        yield ""
        yield from text.table(["MS", "P50", "P90", "P99", "MEAN", "MAX"], rows, "lrrrrr")
    if data["late_seconds"] > 1:
        yield f"sessions began up to {data['late_seconds']:.1f} s late: this client was the limit"
    for error, n in data["errors"].items():
        yield f"error     {text.count(n)}: {error}"
