"""kill: processes that write, read, fork and collect, killed and frozen at random moments.

After each round a fresh process opens the store: everything that was acknowledged must be served, with the right
bytes. Between some rounds the kernel's boot id in ``state`` is replaced, as if the machine had been reset.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from pathlib import Path

from tools.torture.crew import Crew
from tools.torture.judge import Judge

ROLES = ("writer", "writer", "mixed", "reader", "forker", "collector")
ROUND_SECONDS = 3.0
ROUNDS_PER_STORE = 6
FREEZE_SECONDS_MAX = 1.5


def run(
    folder: Path, seed: int, seconds: float, judge: Judge, roles: tuple[str, ...] = ROLES, mode: str = "cache"
) -> None:
    """Rounds until the time is up."""
    chance = random.Random(seed)
    end, number = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        if number % ROUNDS_PER_STORE == 0:
            shutil.rmtree(folder / "store", ignore_errors=True)
            (folder / "acks").unlink(missing_ok=True)
        _round(folder, seed * 100 + number, chance, judge, roles, number, mode)
        judge.counts["rounds"] += 1
        number += 1
        if judge.counts["lost"] or judge.counts["wrong"] or judge.counts["unopenable"]:
            judge.notes.append(f"seed {seed}, round {number}")
            return


def _round(
    folder: Path, seed: int, chance: random.Random, judge: Judge, roles: tuple[str, ...], number: int, mode: str
) -> None:
    options = {"first": number % ROUNDS_PER_STORE * 40, "families": 60, "mode": mode}
    with Crew(folder, seed, options) as crew:
        for role in roles:
            crew.start(role)
        end = time.monotonic() + ROUND_SECONDS
        while time.monotonic() < end:
            time.sleep(chance.uniform(0.02, 0.25))
            crew.tick()
            crew.check(judge)
            running = [n for n in crew.members if n not in crew.stopped]
            if not running:
                continue
            name = chance.choice(running)
            if chance.random() < 0.3:
                crew.stop(name, chance.uniform(0.05, FREEZE_SECONDS_MAX))
                judge.counts["freezes"] += 1
            else:
                crew.kill(name)
                judge.counts["kills"] += 1
                crew.start(name.partition("-")[0])
        _end(crew, chance, judge)
        if chance.random() < 0.4:
            judge.counts["boots"] += other_boot(folder / "store")
        crew.run("checker", judge)
        crew.collect(judge)


def _end(crew: Crew, chance: random.Random, judge: Judge) -> None:
    """All at once, or one after the other, or politely."""
    polite = chance.random() < 0.3
    crew.resume()  # a frozen one that holds the gate would make the others' closes wait for their deadlines
    for name in list(crew.members):
        if not crew.kill(name, signal.SIGTERM if polite else signal.SIGKILL):
            judge.found("blocked", f"{name} did not end within 20 s of SIGTERM")
        judge.counts["kills"] += not polite


def other_boot(store: Path) -> bool:
    """As if the machine had been reset with the index dirty; False if the index was closed cleanly."""
    try:
        state = json.loads((store / "state").read_bytes())
    except (OSError, ValueError):
        return False
    if state["clean"]:
        return False
    state["boot"] = "00000000-0000-0000-0000-000000000000"
    (store / "state").write_text(json.dumps(state))
    return True
