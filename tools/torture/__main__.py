"""Torture of a store: faults, kills, crashes, power cuts, full disks.

Every command takes --seed and --seconds, works in a directory of its own below --path (removed at the end), and ends
with one line of counts. The exit status is 1 if anything was lost, wrong, blocked, leaked or could not be opened.
"""

from __future__ import annotations

import faulthandler
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import click

from tools.benchmarks.workspace import workspace
from tools.torture import crash as crash_runs
from tools.torture import fill as fill_runs
from tools.torture import full as full_runs
from tools.torture import fuzz as fuzz_runs
from tools.torture import kill as kill_runs
from tools.torture import model as model_runs
from tools.torture import mounter, mounts
from tools.torture import moves as move_runs
from tools.torture import power as power_runs
from tools.torture import stall as stall_runs
from tools.torture import steps as step_runs
from tools.torture.judge import Judge
from tools.torture.parsers import TARGETS

Command = TypeVar("Command", bound=Callable[..., None])
WORKLOADS = ("kills", "stops", "clocks")  # of tools/torture/steps.py
ROOM_BYTES = 1 << 30
HANGS_SECONDS = 300.0  # a run that takes longer than its time by this much hangs


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


MODE = click.option("--mode", type=click.Choice(["cache", "staging"]), default="cache", show_default=True)


@contextmanager
def watched(seconds: float) -> Iterator[None]:
    """End a run that hangs with the stacks of its threads: every wait of kvfs has a deadline."""
    faulthandler.dump_traceback_later(seconds + HANGS_SECONDS, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@click.group(help=__doc__)
def main() -> None:
    pass


@main.command(help=kill_runs.__doc__)
@MODE
@click.option("--mounts", is_flag=True, help="Two more processes use files through mounts of the store. Root only.")
@common
def kill(mode: str, mounts: bool, seed: int, seconds: float, path: Path) -> None:
    judge = Judge()
    if mounts and (why := mounter.missing()):
        raise click.ClickException(why)
    with workspace(path, ROOM_BYTES) as folder:
        kill_runs.run(folder, seed, seconds, judge, mode=mode, mounts=mounts)
    counts: tuple[str, ...] = (
        "rounds", "freezes", "boots", "forks", "stored", "chunks_served", "acknowledged", "pinned", "purged",
    )  # fmt: skip
    if mounts:
        counts += ("mounts", "files_saved", "files_read", "files_refused")
    more = {name: judge.counts[name] for name in counts}
    judge.finish(**more, hot_percent=100 * judge.counts["hot_served"] // max(1, judge.counts["hot_chunks"]))


@main.command(help=model_runs.__doc__)
@common
@click.option(
    "--workload",
    type=click.Choice(["random", "small", "kills", "stops", "clocks"]),
    default="random",
    show_default=True,
)
def model(workload: str, seed: int, seconds: float, path: Path) -> None:
    logging.getLogger("kvfs").addHandler(logging.NullHandler())
    logging.getLogger("kvfs").propagate = False
    judge = Judge()
    with watched(seconds), workspace(path, ROOM_BYTES) as folder:
        if workload in WORKLOADS:
            getattr(step_runs, workload)(folder, seed, seconds, judge)
        else:
            model_runs.run(folder, seed, seconds, judge, small=workload == "small")
    judge.finish(**{name: judge.counts[name] for name in ("cases", "pairs", "stops", "points") if judge.counts[name]})


@main.command(help=crash_runs.__doc__)
@common
def crash(seed: int, seconds: float, path: Path) -> None:
    judge = Judge()
    with watched(seconds), workspace(path, ROOM_BYTES) as folder:
        crash_runs.run(folder, seed, seconds, judge)
    judge.finish(images=judge.counts["images"])


@main.command(help=fuzz_runs.__doc__)
@common
@click.option("--only", multiple=True, type=click.Choice(sorted(TARGETS)), help="These targets; default: all.")
@click.option("--corpus", type=click.Path(file_okay=False, path_type=Path), help="Where new inputs are written.")
def fuzz(only: tuple[str, ...], corpus: Path | None, seed: int, seconds: float, path: Path) -> None:
    judge = Judge()
    with watched(seconds):
        executions = fuzz_runs.run(seed, seconds, judge, only, corpus)
    judge.counts["operations"] = executions.total()
    judge.finish(**executions)


def _need_mounts(*kinds: str) -> None:
    if why := mounts.missing(*kinds):
        raise click.ClickException(why)
    mounts.apart()


@main.command(help=power_runs.__doc__)
@common
@click.option("--kind", "kinds", type=click.Choice(["ext4", "xfs"]), multiple=True, default=("ext4", "xfs"))
@MODE
def power(kinds: tuple[str, ...], mode: str, seed: int, seconds: float, path: Path) -> None:
    _need_mounts(*kinds)
    judge = Judge()
    with workspace(path, ROOM_BYTES) as folder:
        power_runs.run(folder, seed, seconds, judge, kinds, mode)
    counts = (*(f"cuts_{kind}" for kind in kinds), "cuts_evicting", "acknowledged", "witnessed", "pinned", "purged")
    judge.finish(**{name: judge.counts[name] for name in counts})


@main.command(help=move_runs.__doc__)
@common
def moves(seed: int, seconds: float, path: Path) -> None:
    _need_mounts("ext4", "xfs")
    judge = Judge()
    with workspace(path, ROOM_BYTES) as folder:
        move_runs.run(folder, seed, seconds, judge)
    judge.finish(
        **{
            name: judge.counts[name]
            for name in ("cycles", "rename", "swap", "bind", "lazy", "acknowledged", "strangers")
        }
    )


@main.command(help=full_runs.__doc__)
@common
def full(seed: int, seconds: float, path: Path) -> None:
    _need_mounts("ext4")
    judge = Judge()
    with workspace(path, ROOM_BYTES) as folder:
        full_runs.run(folder, seed, seconds, judge)
    judge.finish(**{name: judge.counts[name] for name in ("disks", "stored", "declined", "acknowledged")})


@main.command(help=fill_runs.__doc__)
@common
@click.option("--kind", type=click.Choice(["tmpfs", "ext4", "xfs"]), default="ext4", show_default=True)
@click.option("--capacity", default=fill_runs.CAPACITY, show_default=True)
def fill(kind: str, capacity: str, seed: int, seconds: float, path: Path) -> None:
    _need_mounts(kind)
    judge = Judge()
    with workspace(path, ROOM_BYTES) as folder:
        fill_runs.run(folder, seed, seconds, judge, kind, capacity)
    judge.finish(**{name: judge.counts[name] for name in ("written_mib", "highest_kib", "samples", "declined")})


@main.command(help=stall_runs.__doc__)
@common
def stall(seed: int, seconds: float, path: Path) -> None:
    judge = Judge()
    with watched(seconds), workspace(path, ROOM_BYTES) as folder:
        stall_runs.run(folder, seconds, judge)
    judge.finish()


if __name__ == "__main__":
    main(prog_name="python -m tools.torture")
