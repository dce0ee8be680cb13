"""``kvfs log``: what happened to the store, when and by whom."""

from __future__ import annotations

import datetime
import re
import time
from typing import TYPE_CHECKING

import click

from kvfs.cli import text
from kvfs.cli.app import App, Command, common

if TYPE_CHECKING:
    from kvfs.directory.event_log import Event


_DIGEST = re.compile(r"[0-9a-f]{64}\Z")  # 12 digits of it are shown, as in other commands; --json has all


@click.command("log", cls=Command, examples=("kvfs log --since 1d", "kvfs log --json -n 100"))
@click.option("--since", metavar="TIME", help="Only events of the last TIME, such as 12h or 7d.")
@click.option("-n", "--last", type=click.IntRange(1), metavar="N", help="Only the last N events.")
@common
@click.pass_obj
def log_command(app: App, since: str | None, last: int | None) -> None:
    """Show changes of settings, evictions, purges, repairs, rebuilds, imports, pins and faults, oldest first.

    Evictions and faults are noted once per minute and process, with their number. The log keeps about the last 10,000
    events.
    """
    from kvfs.directory.config import parse_duration

    after = time.time() - parse_duration(since, "--since") if since is not None else 0.0
    with app.open() as store:
        events = [event for event in store.events() if event.at_us / 1e6 >= after]
    if last is not None:
        events = events[-last:]
    data = {"events": [event._asdict() for event in events]}
    app.out.result(data, lambda: map(_line, events), (event.what for event in events))


def _detail(value: object) -> str:
    if isinstance(value, int):
        return text.count(value)
    shown = str(value)
    return shown[:12] if _DIGEST.match(shown) else shown


def _line(event: Event) -> str:
    when = datetime.datetime.fromtimestamp(event.at_us / 1e6).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    details = ", ".join(f"{name} {_detail(value)}" for name, value in event.details.items())
    return f"{when}  {event.what:<18}{details}   by {event.command or 'pid'} ({event.pid})"
