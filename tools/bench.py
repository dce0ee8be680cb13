"""Benchmarks of a store against the bare system calls, of the GPU path against the link, of codecs and of the command:
host, match, interpreter, procs, codecs, cli, gpu, kernels, registering, stalled.

Each runs in a new directory below --path (by default the system's temporary directory), which is removed at the
end and on an interrupt. Every figure alternates with its baseline in the same run. The ``--help`` of a command
says what is measured and how.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `python tools/bench.py` from anywhere

from kvfs.errors import KvfsError
from tools.benchmarks import cli as cli_bench
from tools.benchmarks import codecs as codec_bench
from tools.benchmarks import gpu as gpu_bench
from tools.benchmarks import gpu_kernels as kernel_bench
from tools.benchmarks import gpu_registering as registering_bench
from tools.benchmarks import gpu_stalled as stalled_bench
from tools.benchmarks import host as host_bench
from tools.benchmarks import interpreter as interpreter_bench
from tools.benchmarks import match as match_bench
from tools.benchmarks import procs as procs_bench
from tools.benchmarks.case import Case, Size, size_text
from tools.benchmarks.measure import BenchError
from tools.benchmarks.report import Report, Value
from tools.benchmarks.workspace import file_system, workspace

Command = TypeVar("Command", bound=Callable[..., None])


class Many(click.ParamType[Any]):
    """Values of one type, separated by commas."""

    def __init__(self, one: click.ParamType[Any]) -> None:
        self._one = one
        self.name = f"{one.name},..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        return tuple(self._one.convert(item.strip(), param, ctx) for item in str(value).split(","))


COUNTS = Many(click.IntRange(min=1))


def common(command: Command) -> Command:
    """Options that every benchmark has."""
    for option in (
        click.option("--seed", default=1, show_default=True, help="For token ids and bytes."),
        click.option(
            "--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Also write this file."
        ),
        click.option(
            "--path", type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path),
            default=lambda: Path(tempfile.gettempdir()), show_default="temporary directory",
            help="Where to write: the file system to measure.",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


@contextmanager
def session(
    command: str, path: Path, need_bytes: int, json_path: Path | None, options: dict[str, Value]
) -> Iterator[tuple[Report, Path]]:
    """(report, directory) of one run. An error becomes a message of one line."""
    with workspace(path, need_bytes) as folder:
        report = Report(command, {**options, "file system": file_system(folder)}, json_path)
        try:
            yield report, folder
        except (BenchError, KvfsError) as exc:
            raise click.ClickException(str(exc)) from exc
        finally:
            report.save()


@click.group(help=__doc__, invoke_without_command=True)
@click.pass_context
def main(ctx: click.Context) -> None:
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@main.command(help=host_bench.__doc__)
@click.option("--size", type=Size(), default="2GiB", show_default=True, help="Bytes per page size and side.")
@click.option("--page", "pages", type=Many(Size()), default="256KiB,2MiB,8MiB", show_default=True)
@click.option("--call", "call_bytes", type=Size(), default="64MiB", show_default=True, help="Bytes per call.")
@click.option("--threads", type=click.IntRange(1, 64), default=min(8, os.cpu_count() or 1), show_default="cores, <= 8")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--mode", "modes", type=Many(click.Choice(["cache", "staging"])), default="cache", show_default=True)
@common
def host(
    size: int, pages: tuple[int, ...], call_bytes: int, threads: int, rounds: int, modes: tuple[str, ...], path: Path,
    json_path: Path | None, seed: int,
) -> None:  # fmt: skip
    cases = [Case.of(size, page, call_bytes, threads, seed) for page in pages]
    need = max((1 + len(modes)) * case.size_bytes + 4 * case.segment_bytes for case in cases)
    options = dict[str, Value](
        size=size_text(size), threads=threads, rounds=rounds, modes=",".join(modes), seed=seed
    )  # fmt: skip
    with session("host", path, need, json_path, options) as (report, folder):
        host_bench.run(report, folder, cases, rounds, modes)


@main.command(help=match_bench.__doc__)
@click.option("--tokens", type=click.IntRange(min=1024), default=131072, show_default=True, help="Of one prompt.")
@click.option("--pages", "page_tokens", type=COUNTS, default="16,64", show_default=True, help="Tokens per page.")
@click.option("--index-pages", type=COUNTS, default="10000,1000000", show_default=True, help="Pages in the index.")
@click.option("--rounds", type=click.IntRange(min=1), default=20, show_default=True)
@click.option("--seconds", type=click.FloatRange(min=0.1), default=3.0, show_default=True, help="Per phase.")
@click.option(
    "--lengths", type=COUNTS, default="1024,4096,32768", show_default=True, help="Shorter prompts, in tokens."
)
@click.option("--busy", type=Many(click.IntRange(min=0)), default="0,1,3,8", show_default=True, help="Busy threads.")
@common
def match(
    tokens: int, page_tokens: tuple[int, ...], index_pages: tuple[int, ...], rounds: int, seconds: float,
    lengths: tuple[int, ...], busy: tuple[int, ...], path: Path, json_path: Path | None, seed: int,
) -> None:  # fmt: skip
    plan = match_bench.Plan(tokens, page_tokens, index_pages, rounds, seconds, seed, lengths, busy)
    options = dict[str, Value](tokens=tokens, rounds=rounds, seconds=seconds, seed=seed)
    with session("match", path, plan.need_bytes, json_path, options) as (report, folder):
        match_bench.run(report, folder, plan)


@main.command(help=interpreter_bench.__doc__)
@click.option("--size", type=Size(), default="4GiB", show_default=True, help="Bytes that each way of saving saves.")
@click.option("--page", type=Size(), default="2MiB", show_default=True)
@click.option("--call", "call_bytes", type=Size(), default="64MiB", show_default=True, help="Bytes per call.")
@click.option("--threads", type=click.IntRange(1, 64), default=min(8, os.cpu_count() or 1), show_default="cores, <= 8")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@common
def interpreter(
    size: int, page: int, call_bytes: int, threads: int, rounds: int, path: Path, json_path: Path | None, seed: int
) -> None:
    plan = interpreter_bench.Plan(Case.of(size, page, call_bytes, threads, seed), rounds)
    options = dict[str, Value](size=size_text(size), threads=threads, rounds=rounds, seed=seed)
    with session("interpreter", path, plan.need_bytes, json_path, options) as (report, folder):
        interpreter_bench.run(report, folder, plan)


@main.command(help=procs_bench.__doc__)
@click.option("--procs", type=COUNTS, default="1,2,4,8", show_default=True)
@click.option("--seconds", type=click.FloatRange(min=0.1), default=5.0, show_default=True, help="Per number and round.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--size", type=Size(), default="4GiB", show_default=True, help="Most bytes put per number and round.")
@click.option("--page", type=Size(), default="256KiB", show_default=True)
@click.option("--call", "call_bytes", type=Size(), default="8MiB", show_default=True, help="Bytes per call.")
@click.option("--threads", type=click.IntRange(1, 64), default=1, show_default=True, help="Of each process.")
@common
def procs(
    procs: tuple[int, ...], seconds: float, rounds: int, size: int, page: int, call_bytes: int, threads: int,
    path: Path, json_path: Path | None, seed: int,
) -> None:  # fmt: skip
    case = Case.of(size, page, call_bytes, threads, seed)
    plan = procs_bench.Plan(case, procs, rounds, seconds)
    need = 2 * case.size_bytes + 2 * (max(procs) + 2) * case.segment_bytes
    options = dict[str, Value](seconds=seconds, rounds=rounds, size=size_text(size), threads=threads, seed=seed)
    with session("procs", path, need, json_path, options) as (report, folder):
        procs_bench.run(report, folder, plan)


@main.command(help=codec_bench.__doc__)
@click.option(
    "--model",
    type=click.Path(exists=True, path_type=Path),
    show_default="the demo's, random weights",
    help="A .gguf file, or a folder of transformers.",
)
@click.option("--tokens", type=click.IntRange(min=64), default=2048, show_default=True, help="Of the prompt.")
@click.option("--page-tokens", type=click.IntRange(min=16), default=64, show_default=True)
@click.option(
    "--dtype",
    "dtypes",
    type=Many(click.Choice(list(codec_bench.DTYPES))),
    show_default=True,
    default="bfloat16,float16,float8_e4m3fn,int8",
    help="What the KV is converted to; the first one goes to stores.",
)
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True)
@click.option("--threads", type=click.IntRange(1, 64), default=min(4, os.cpu_count() or 1), show_default="cores, <= 4")
@common
def codecs(
    model: Path | None, tokens: int, page_tokens: int, dtypes: tuple[str, ...], rounds: int, threads: int,
    path: Path, json_path: Path | None, seed: int,
) -> None:  # fmt: skip
    plan = codec_bench.Plan(model, tokens, page_tokens, dtypes, rounds, threads)
    options = dict[str, Value](tokens=tokens, page_tokens=page_tokens, rounds=rounds, threads=threads)
    with session("codecs", path, plan.need_bytes, json_path, options) as (report, folder):
        codec_bench.run(report, folder, plan)


@main.command(help=cli_bench.__doc__)
@click.option("--index-pages", type=click.IntRange(min=1), default=1_000_000, show_default=True)
@click.option("--writers", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--size", type=Size(), default="2GiB", show_default=True, help="Bytes that are warmed.")
@click.option("--page", type=Size(), default="2MiB", show_default=True, help="Of what is warmed.")
@click.option("--call", "call_bytes", type=Size(), default="64MiB", show_default=True, help="Bytes per get.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@common
def cli(
    index_pages: int, writers: int, size: int, page: int, call_bytes: int, rounds: int, path: Path,
    json_path: Path | None, seed: int,
) -> None:  # fmt: skip
    plan = cli_bench.Plan(index_pages, writers, Case.of(size, page, call_bytes, 4, seed), rounds, seed)
    options = dict[str, Value](index_pages=index_pages, writers=writers, size=size_text(size), rounds=rounds, seed=seed)
    with session("cli", path, plan.need_bytes, json_path, options) as (report, folder):
        cli_bench.run(report, folder, plan)


@main.command(help=gpu_bench.__doc__)
@click.option("--shape", "shapes", type=Many(click.Choice(list(gpu_bench.SHAPES))), default="gqa16", show_default=True)
@click.option("--tokens", type=COUNTS, default="1024,4096,32768", show_default=True, help="Prefix lengths.")
@click.option("--ring", "ring_bytes", type=Size(), default="5GiB", show_default=True, help="Of pinned slots.")
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True)
@click.option("--beside/--no-beside", default=False, help="Also measure how much a model's kernels slow down.")
@click.option("--parts", type=Many(click.Choice(gpu_bench.PARTS)), default=",".join(gpu_bench.PARTS), show_default=True)
@common
def gpu(
    shapes: tuple[str, ...], tokens: tuple[int, ...], ring_bytes: int, rounds: int, beside: bool,
    parts: tuple[str, ...], path: Path, json_path: Path | None, seed: int,
) -> None:  # fmt: skip
    plan = gpu_bench.Plan(shapes, sorted(tokens), rounds, seed, ring_bytes, beside, parts)
    options = dict[str, Value](shapes=",".join(shapes), rounds=rounds, ring=size_text(ring_bytes), seed=seed)
    with session("gpu", path, plan.need_bytes, json_path, options) as (report, folder):
        gpu_bench.run(report, folder, plan)


@main.command(help=kernel_bench.__doc__)
@click.option("--shape", "shapes", type=Many(click.Choice(list(gpu_bench.SHAPES))), default="gqa16", show_default=True)
@click.option("--nbytes", "sizes", type=Many(Size()), default="8MiB,32MiB", show_default=True, help="Of a batch.")
@common
def kernels(shapes: tuple[str, ...], sizes: tuple[int, ...], path: Path, json_path: Path | None, seed: int) -> None:
    options = dict[str, Value](shapes=",".join(shapes), nbytes=",".join(map(size_text, sizes)), seed=seed)
    with session("kernels", path, 0, json_path, options) as (report, _):
        kernel_bench.run(report, kernel_bench.Plan(shapes, sizes, seed))


@main.command(help=registering_bench.__doc__)
@click.option("--size", type=Size(), default="20GiB", show_default=True, help="Registered while launches are timed.")
@click.option("--held", type=Size(), default="50GiB", show_default=True, help="Registered by what is killed.")
@common
def registering(size: int, held: int, path: Path, json_path: Path | None, seed: int) -> None:
    plan = registering_bench.Plan(size, held)
    options = dict[str, Value](size=size_text(size), held=size_text(held), seed=seed)
    with session("registering", path, plan.need_bytes, json_path, options) as (report, folder):
        registering_bench.run(report, folder, plan)


@main.command(help=stalled_bench.__doc__)
@click.option("--shape", type=click.Choice(list(gpu_bench.SHAPES)), default="gqa64", show_default=True)
@click.option("--tokens", type=click.IntRange(min=64), default=1024, show_default=True, help="Of a prompt.")
@click.option(
    "--saves", type=click.IntRange(min=1), default=500, show_default=True, help="While the disk stands still."
)
@click.option("--pace", type=click.FloatRange(min=0.0), default=0.05, show_default=True, help="Seconds between saves.")
@common
def stalled(shape: str, tokens: int, saves: int, pace: float, path: Path, json_path: Path | None, seed: int) -> None:
    plan = stalled_bench.Plan(shape, tokens, saves, pace, seed)
    options = dict[str, Value](shape=shape, tokens=tokens, saves=saves, pace=pace, seed=seed)
    with session("stalled", path, plan.need_bytes, json_path, options) as (report, folder):
        stalled_bench.run(report, folder, plan)


if __name__ == "__main__":
    main()
