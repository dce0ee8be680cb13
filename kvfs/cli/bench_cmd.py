"""``kvfs bench``: what a store does on this machine, and from when on restoring pays."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from kvfs.cli import text
from kvfs.cli.app import CommandGroup, common
from kvfs.cli.bench_serve_cmd import serve_command

if TYPE_CHECKING:
    from kvfs.bench.host import Ratio, Result
    from kvfs.doctor.gpu_checks import Link

PROFILES = ("8b", "70b", "mla")


@click.group(
    "bench",
    cls=CommandGroup,
    invoke_without_command=True,
    examples=(
        "kvfs bench --prefill 25000",
        "kvfs bench --path /mnt/nvme --profile mla --size 1GiB",
        "kvfs bench serve --help",
    ),
)
@click.option("--path", metavar="DIR", help="Where to write: the file system to measure.  [default: that of the store]")
@click.option("--profile", type=click.Choice(PROFILES), default="8b", show_default=True, help="The model's KV cache.")
@click.option("--size", metavar="SIZE", default="512MiB", show_default=True, help="Bytes of one prompt.")
@click.option("--rounds", type=click.IntRange(1, 100), default=5, show_default=True, help="Rounds that count.")
@click.option(
    "--prefill", type=click.FloatRange(min=1), metavar="N", help="Tokens per second that the engine computes."
)
@common
@click.pass_context
def bench_command(
    ctx: click.Context, path: str | None, profile: str, size: str, rounds: int, prefill: float | None
) -> None:
    """Measure saves, loads and lookups against bare system calls of the same run; `bench serve` measures a server.

    Writes into a new directory, which is removed at the end, on an error and on an interrupt. With --prefill it says
    from how many tokens on a load is faster than computing. Loads end in host memory. Where there is a GPU, the copy
    to it is measured by itself and counted after the load, on the slowest link; kvfs overlaps the two.
    """
    if ctx.invoked_subcommand is not None:
        return
    from kvfs.bench import host
    from kvfs.cli.output import shown
    from kvfs.directory.config import parse_size
    from kvfs.doctor.gpu_checks import measure_links
    from kvfs.errors import ConfigError

    app = ctx.obj
    nbytes = parse_size(size, "--size")
    known = host.profiles()[profile]
    page = known.layout.groups[0].part_bytes(known.layout.groups[0].full)
    if nbytes < page:
        raise ConfigError(f"--size is {nbytes} bytes: a page of {profile} has {page}, pass at least that")
    place = path or _existing(os.path.abspath(app.path))
    if not os.path.isdir(place):
        raise ConfigError(f"--path is {place}: pass a directory that exists")
    needed, free = nbytes * (rounds + 3) + (64 << 20), shutil.disk_usage(place).free
    if free < needed:
        raise ConfigError(
            f"{place} has {text.size(free)} free, and this needs {text.size(needed)}: pass a smaller --size or --rounds"
        )
    with tempfile.TemporaryDirectory(prefix="kvfs-bench-", dir=place) as folder:
        found = host.measure(
            folder, known.layout, nbytes, rounds, shown(app.out, "measuring", lambda n: f"{n:.0f} rounds")
        )
    links = measure_links()
    app.out.result(
        _data(found, profile, place, prefill, *links), lambda: _lines(found, known.about, place, prefill, *links)
    )


def _existing(path: str) -> str:
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


def _slowest(links: list[Link]) -> float | None:
    return min((link.to_device[1] for link in links), default=None)


def _data(
    found: Result, profile: str, place: str, prefill: float | None, links: list[Link], no_link: str
) -> dict[str, Any]:
    def ratio(one: Ratio) -> dict[str, list[float]]:
        return {"gb_per_second": [round(n, 3) for n in one.rate], "of_bare": [round(n, 3) for n in one.of_bare]}

    data: dict[str, Any] = {
        "path": place, "profile": profile, "tokens": found.tokens, "token_bytes": found.token_bytes,
        "rounds": found.rounds, "save": ratio(found.save), "load": ratio(found.load),
        "load_cold": ratio(found.load_cold),
        "match_us": [round(s * 1e6, 1) for s in found.match_seconds],
        "links": [
            {
                "device": link.ordinal, "name": link.name, "to_device": [round(n, 3) for n in link.to_device],
                "to_host": [round(n, 3) for n in link.to_host],
            }
            for link in links
        ],
        "no_link": no_link,
    }  # fmt: skip
    if prefill is not None:
        link = _slowest(links)
        data["break_even_tokens"] = found.break_even_tokens(prefill, cold=False, link=link)
        data["break_even_tokens_cold"] = found.break_even_tokens(prefill, cold=True, link=link)
    return data


def _lines(
    found: Result, about: str, place: str, prefill: float | None, links: list[Link], no_link: str
) -> Iterator[str]:
    per_prompt = text.size(found.tokens * found.token_bytes)
    yield f"{about}; prompts of {text.count(found.tokens)} tokens, {per_prompt}; {place}"
    yield ""
    rows = [
        [
            name,
            *(f"{n:.2f}" for n in (one.rate[1], one.rate[0], one.rate[2])),
            *(f"{n:.2f}" for n in _turned(one.of_bare)),
        ]
        for name, one in (("save", found.save), ("load, page cache", found.load), ("load, disk", found.load_cold))
    ]
    yield from text.table(["", "GB/S", "MIN", "MAX", "OF BARE", "MIN", "MAX"], rows, "lrrrrrr")
    low, middle, high = (s * 1e6 for s in found.match_seconds)
    yield f"match   {middle:,.0f} us (min {low:,.0f}, max {high:,.0f})"
    yield ""
    if links:
        names = [f"{link.ordinal} {text.printable(link.name)}" for link in links]
        rates = [[f"{n:.2f}" for way in (one.to_device, one.to_host) for n in _turned(way)] for one in links]
        yield from text.table(
            ["GPU", "TO IT", "MIN", "MAX", "FROM IT", "MIN", "MAX"],
            [[name, *row] for name, row in zip(names, rates, strict=True)],
            "lrrrrrr",
        )
    if no_link:
        yield f"GPU link: {no_link}."
    yield ""
    link, by = _slowest(links), " and the link" if links else ""
    for cold, where in ((False, "the page cache"), (True, "the disk")):
        speed = found.tokens_per_second(cold=cold, link=link)
        yield f"From {where}{by} it restores {speed:,.0f} tokens per second{'.' if prefill is None else ':'}"
        if prefill is not None:
            yield f"  {_verdict(found.break_even_tokens(prefill, cold=cold, link=link), prefill)}"
    if prefill is None:
        yield "An engine that computes fewer gains; --prefill N says from how many tokens on."


def _turned(spread: tuple[float, float, float]) -> tuple[float, float, float]:
    low, middle, high = spread
    return middle, low, high


def _verdict(tokens: int | None, prefill: float) -> str:
    if tokens is None:
        return f"computing {prefill:,.0f} is faster."
    first = "the first token" if tokens == 1 else f"{text.count(tokens)} tokens"
    return f"from {first} on that is faster than computing {prefill:,.0f}."


bench_command.add_command(serve_command)
