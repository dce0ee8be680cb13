"""Torture of a store: faults, kills, crashes, power cuts, full disks.

Every command takes --seed and --seconds, works in a directory of its own below --path (removed at the end), and ends
with one line of counts. The exit status is 1 if anything was lost, wrong, blocked, leaked or could not be opened.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from tools.benchmarks.workspace import workspace
from tools.torture import kill as kill_runs
from tools.torture.judge import Judge

Command = TypeVar("Command", bound=Callable[..., None])
ROOM_BYTES = 1 << 30


def common(command: Command) -> Command:
    """Options that every command has."""
    for option in (
        click.option("--seed", default=1, show_default=True, help="Of everything that is random."),
        click.option("--seconds", default=30.0, show_default=True, help="How long to go on."),
        click.option(
            "--path", type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path),
            default=lambda: Path(tempfile.gettempdir()), show_default="temporary directory",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


@click.group(help=__doc__)
def main() -> None:
    pass


@main.command(help=kill_runs.__doc__)
@common
def kill(seed: int, seconds: float, path: Path) -> None:
    judge = Judge()
    with workspace(path, ROOM_BYTES) as folder:
        kill_runs.run(folder, seed, seconds, judge)
    counts = ("rounds", "freezes", "boots", "forks", "stored", "chunks_served", "acknowledged")
    judge.finish(**{name: judge.counts[name] for name in counts})


if __name__ == "__main__":
    main(prog_name="python -m tools.torture")
