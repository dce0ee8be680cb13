"""``kvfs top``: what the processes of a store do now."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from kvfs.cli import text
from kvfs.cli.app import App, Command, common

if TYPE_CHECKING:
    from kvfs.metrics.live import Rates, View

PAUSE_MIN, PAUSE_MAX = 0.1, 1e9  # seconds between two samples; the kernel's clock ends at some 290 years
COLUMNS = ["LOOKUPS/S", "TOKENS/S", "HIT", "LOADED/S", "WRITTEN/S"]


@click.command("top", cls=Command, examples=("kvfs top", "kvfs top --interval 10s | tee load.txt"))
@click.option("--interval", metavar="TIME", default="2s", show_default=True, help="Time between two samples.")
@click.option("--times", type=click.IntRange(1), metavar="N", help="Stop after N samples.")
@common
@click.pass_obj
def top_command(app: App, interval: str, times: int | None) -> None:
    """Show what the processes of the store do now, with rates per second, until interrupted.

    On a terminal the screen is redrawn; into a pipe each sample is one line, with --json one JSON object per line.
    Processes publish every second, counts by namespace every five. Processes that only read a store that is read-only
    for them are not seen.
    """
    from kvfs.directory.config import parse_duration
    from kvfs.metrics.live import LiveView

    pause = min(max(PAUSE_MIN, parse_duration(interval, "--interval")), PAUSE_MAX)
    with app.open() as store, app.out.screen() as screen:
        live, samples = LiveView(store), 0
        while True:
            view = live.sample(time.time())
            screen.draw(_data(view), _line(view), lambda view=view: _frame(app.path, view, app.out.width))  # type: ignore[misc]
            samples += 1
            if samples == times:
                return
            time.sleep(pause)


def _data(view: View) -> dict[str, Any]:
    return {
        "used_bytes": view.used_bytes,
        "capacity_bytes": view.capacity_bytes,
        "index": view.index_state,
        "per_second": _numbers(view.total),
        "processes": [
            {
                "id": p.info.owner, "pid": p.info.pid, "command": p.info.command, "pinned_bytes": p.info.pinned_bytes,
                "open_since": p.info.since_us / 1e6, "per_second": _numbers(p.rates),
            }
            for p in view.processes
        ],
        "namespaces": [
            {"id": n.digest, "namespace": n.label, "per_second": _numbers(n.rates)} for n in view.namespaces
        ],
    }  # fmt: skip


def _numbers(rates: Rates | None) -> dict[str, float] | None:
    return None if rates is None else {name: round(n, 1) for name, n in rates._asdict().items()}


def _cells(rates: Rates | None) -> list[str]:
    if rates is None:
        return ["-"] * len(COLUMNS)
    hit = "-" if rates.hit_rate is None else f"{100 * rates.hit_rate:.1f} %"
    sizes = [text.size(int(n)) for n in (rates.bytes_loaded, rates.bytes_written)]
    return [f"{rates.lookups:,.1f}", f"{rates.tokens_queried:,.0f}", hit, *sizes]


def _used(view: View) -> str:
    if view.used_bytes is None:
        return f"index {view.index_state}"
    return f"used {text.size(view.used_bytes)} of {text.size(view.capacity_bytes)}"


def _line(view: View) -> str:
    """One sample in a pipe."""
    lookups, tokens, hit, loaded, written = _cells(view.total)
    live = len(view.processes)
    return (
        f"{time.strftime('%H:%M:%S')}  {lookups} lookups/s  {tokens} tokens/s  hit {hit}  {loaded}/s loaded  "
        f"{written}/s written  {_used(view)}  {live} {'process' if live == 1 else 'processes'}"
    )


def _frame(path: str, view: View, width: int | None) -> Iterator[str]:
    """One sample on a terminal."""
    yield text.Heading(f"{path}   {_used(view)}   index {view.index_state}   {time.strftime('%H:%M:%S')}")
    lookups, tokens, hit, loaded, written = _cells(view.total)
    yield f"{lookups} lookups/s   {tokens} tokens/s   hit {hit}   {loaded}/s loaded   {written}/s written"
    yield ""
    rows = [
        [str(p.info.pid or "-"), p.info.command or p.info.owner[:8], *_cells(p.rates), text.size(p.info.pinned_bytes)]
        for p in sorted(view.processes, key=lambda p: p.rates.lookups if p.rates else -1.0, reverse=True)
    ]
    yield from (
        text.table(["PID", "PROCESS", *COLUMNS, "PINNED"], rows, "rlrrrrrr", width)
        if rows
        else ["no other process has it open"]
    )
    yield ""
    busy = sorted(
        (n for n in view.namespaces if n.rates is not None and any(n.rates)),
        key=lambda n: n.rates.tokens_queried if n.rates else 0.0,
        reverse=True,
    )
    if busy:
        yield from text.table(
            ["NAMESPACE", *COLUMNS], [[n.label or n.digest[:12], *_cells(n.rates)] for n in busy], "lrrrrr", width
        )
