"""kill: processes that write, read, fork and collect, killed and frozen at random moments.

After each round a new process opens the store: every acknowledged prompt must be served, with the correct bytes.
Between some rounds the boot id in ``state`` is replaced, as if the machine had been reset. Stores take turns: with
pages of one size; with tiny, odd and huge ones; with the wall clocks of all processes, or of each by itself, jumping by
up to 400 days; smaller than what is written: eviction, relocation, imports, pins and purges are under way. With
--mounts two more processes mount the store and use files in it: each is the version that its first bytes name, and no
file is lost where nothing is evicted.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

from tools.torture import mounter
from tools.torture.case import CLOCK_SECONDS_MAX
from tools.torture.crew import Crew
from tools.torture.judge import Judge

ROLES = ("writer", "writer", "mixed", "reader", "forker", "collector")
EVICTING = ("filler", "user", "user", "manager", "forker", "reader")
MOUNTING, SAVES_MIN = ("mounter", "mounter"), 20  # besides, with --mounts; files that a round saves, as time allows
ROUND_SECONDS = 3.0
ROUND_SECONDS_MAX, ACKS_MIN = 30.0, 25  # on a slow machine a round goes on until so many prompts were acknowledged
ROUNDS_PER_STORE = 6
FREEZE_SECONDS_MAX = 1.5
#: Options of one store after the other; ``roles`` are its processes.
STORES: tuple[dict[str, object], ...] = (
    {"fault": "kills and freezes"},
    {"fault": "kills and freezes", "pages": "mixed", "clock": "shared"},
    {"fault": "kills while evicting", "pages": "mixed", "capacity": "16MiB", "strict": 0, "roles": EVICTING},
    {"fault": "kills and freezes", "clock": "own"},
    {"fault": "kills while evicting", "capacity": "16MiB", "strict": 0, "roles": EVICTING, "clock": "own"},
)
STARTING_SHARE = 0.3  # of kills that would hit a process before its first report, and do: a slow start must end once


def run(
    folder: Path, seed: int, seconds: float, judge: Judge, roles: tuple[str, ...] = ROLES, mode: str = "cache",
    mounts: bool = False,
) -> None:  # fmt: skip
    """Run rounds until the time is up."""
    chance = random.Random(seed)
    end, number = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        if number % ROUNDS_PER_STORE == 0:
            forget(folder)
            (folder / "bundle").unlink(missing_ok=True)
        try:
            _round(folder, seed * 100 + number, chance, judge, roles, number, mode, MOUNTING if mounts else ())
        finally:
            mounter.unmount_all(folder)
        judge.counts["rounds"] += 1
        number += 1
        if judge.counts["lost"] or judge.counts["wrong"] or judge.counts["unopenable"]:
            judge.notes.append(f"seed {seed}, round {number}")
            return


def _round(
    folder: Path, seed: int, chance: random.Random, judge: Judge, roles: tuple[str, ...], number: int, mode: str,
    more: tuple[str, ...],
) -> None:  # fmt: skip
    options: dict[str, Any] = {"first": number % ROUNDS_PER_STORE * 40, "families": 60, "mode": mode}
    options |= STORES[number // ROUNDS_PER_STORE % len(STORES)]
    roles = options.pop("roles", roles)
    if roles is EVICTING and not (folder / "bundle").exists():
        with Crew(folder, seed, options) as crew:
            crew.run("exporter", judge)
    with Crew(folder, seed, options) as crew:
        for role in (*roles, *more):
            crew.start(role)
        started = time.monotonic()
        while (lasted := time.monotonic() - started) < ROUND_SECONDS_MAX:
            saved = not more or crew.sum("files_saved") >= SAVES_MIN
            if lasted >= ROUND_SECONDS and saved and (roles is EVICTING or _acks(folder) >= ACKS_MIN):
                break
            time.sleep(chance.uniform(0.02, 0.25))
            if options.get("clock") == "shared" and chance.random() < 0.2:
                jump(folder, chance)
            crew.tick()
            crew.check(judge)
            running = [n for n in crew.members if n not in crew.stopped]
            if not running:
                continue
            name = chance.choice(running)
            if chance.random() < 0.3:
                crew.stop(name, chance.uniform(0.05, FREEZE_SECONDS_MAX))
                judge.counts["freezes"] += 1
            elif crew.has_reported(name) or chance.random() < STARTING_SHARE:
                crew.kill(name)
                judge.counts["kills"] += 1
                crew.start(name.partition("-")[0])
        _end(crew, chance, judge)
        if chance.random() < 0.4:
            judge.counts["boots"] += other_boot(folder / "store")
        crew.run("checker", judge)
        crew.collect(judge)


def forget(folder: Path) -> None:
    """Remove the store and what was promised of it."""
    shutil.rmtree(folder / "store", ignore_errors=True)
    shutil.rmtree(folder / "source", ignore_errors=True)
    for name in ("acks", "pinned", "unpinned", "purged", "clock", "saved"):
        (folder / name).unlink(missing_ok=True)


def jump(folder: Path, chance: random.Random) -> None:
    """The clock of all processes jumps, sometimes back to the right time."""
    offset_us = chance.choice((0, int(chance.uniform(-1, 1) * CLOCK_SECONDS_MAX * 1e6)))
    (folder / "clock.new").write_text(str(offset_us))
    (folder / "clock.new").rename(folder / "clock")


def _acks(folder: Path) -> int:
    acks = folder / "acks"
    return acks.read_bytes().count(b"\n") if acks.exists() else 0


def _end(crew: Crew, chance: random.Random, judge: Judge) -> None:
    """End all processes: killed at once, killed one after the other, or by SIGTERM."""
    polite = chance.random() < 0.3
    crew.resume()  # a frozen one that holds the gate would make the others' closes wait for their deadlines
    for name in list(crew.members):
        if not crew.kill(name, signal.SIGTERM if polite else signal.SIGKILL):
            judge.found("blocked", f"{name} did not end within 20 s of SIGTERM")
        judge.counts["kills"] += not polite


def other_boot(store: Path) -> bool:
    """Change the boot id of a dirty index, as a reset of the machine does; False if the index was closed cleanly."""
    try:
        state = json.loads((store / "state").read_bytes())
    except (OSError, ValueError):
        return False
    if state["clean"]:
        return False
    state["boot"] = "00000000-0000-0000-0000-000000000000"
    (store / "state").write_text(json.dumps(state))
    return True
