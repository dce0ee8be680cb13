"""power: the file system under a busy store loses its power, and comes back with the contents of its journal.

Each cycle makes an ext4 or xfs image, lets processes write, shuts the file system down without a log flush, kills
the processes, mounts again (the journal is replayed) and opens the store. Level "cache" may lose pages, level "sync"
must not; neither may serve wrong bytes or fail to open. In every second cycle the store is smaller than what is
written: eviction, relocation, imports, recompression, pins and purges are under way at the cut, or end just before it
and a witness notes what it is told is stored: all of that must come back, at level "batch" too.
"""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path

from tools.torture.crew import Crew
from tools.torture.judge import Judge
from tools.torture.kill import forget
from tools.torture.mounts import Mount, mounted

IMAGE_BYTES = 320 << 20
ROLES = ("writer", "mixed", "forker")
EVICTING = ("filler", "filler", "user", "manager", "manager")
STARTING_SHARE = 0.2  # of cuts that may come before all processes work
START_SECONDS = 10.0  # for which a cut waits for them otherwise, at most
WITNESS_SECONDS = 60.0  # until a witness has read everything, at most
LEVELS = ("cache", "sync", "batch")


def run(
    folder: Path, seed: int, seconds: float, judge: Judge, kinds: tuple[str, ...] = ("ext4", "xfs"),
    mode: str = "cache",
) -> None:  # fmt: skip
    chance = random.Random(seed)
    end, number = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        kind = kinds[number % len(kinds)]
        sync = LEVELS[number // len(kinds) % 3]
        evicting = number // len(kinds) // 3 % 2 == 1
        judge.context = f"power, seed {seed}, cycle {number}, {kind}, level {sync}: "
        (_evicting_cycle if evicting else _cycle)(folder, seed * 100 + number, kind, sync, chance, judge, mode)
        number += 1


def _cycle(folder: Path, seed: int, kind: str, sync: str, chance: random.Random, judge: Judge, mode: str) -> None:
    forget(folder)
    with mounted(folder, kind, IMAGE_BYTES) as mount:
        options = {"store": mount.path / "store", "sync": sync, "capacity": "256MiB", "strict": int(sync == "sync")}
        options |= {"mode": mode, "fault": f"power cuts, {sync}"}
        for _ in range(chance.randint(1, 3)):  # after the first time with what is left
            with Crew(folder, seed, options) as crew:
                for role in ROLES:
                    crew.start(role)
                _work(crew, chance, 0.1, 1.6)
                if chance.random() < 0.3:
                    crew.run("closer", judge)
                _cut(mount, crew, chance, judge)
            _check(folder, seed, mount, options, judge)


def _evicting_cycle(
    folder: Path, seed: int, kind: str, sync: str, chance: random.Random, judge: Judge, mode: str
) -> None:
    forget(folder)
    with mounted(folder, kind, IMAGE_BYTES) as mount:
        options = {"store": mount.path / "store", "sync": sync, "capacity": chance.choice(("16MiB", "24MiB"))}
        options |= {"mode": mode, "pages": "mixed", "fault": f"power cuts while evicting, {sync}"}
        options |= {"strict": int(sync != "cache"), "strict_pins": int(sync == "sync")}
        with Crew(folder, seed, options) as crew:
            crew.run("exporter", judge)
            for role in EVICTING:
                crew.start(role)
            _work(crew, chance, 1.5, 4.0)
            if chance.random() < 0.6:
                for name in list(crew.members):
                    crew.kill(name)
                    judge.counts["kills"] += 1
                _witness(folder, crew, judge)
            _cut(mount, crew, chance, judge)
            judge.counts["cuts_evicting"] += 1
        _check(folder, seed, mount, options, judge)


def _work(crew: Crew, chance: random.Random, least: float, most: float) -> None:
    """Let the processes work for ``least`` to ``most`` seconds, most times from when all have started to."""
    end = time.monotonic() + (START_SECONDS if chance.random() >= STARTING_SHARE else 0.0)
    while time.monotonic() < end and not all(map(crew.has_reported, crew.members)):
        time.sleep(0.02)
    time.sleep(chance.uniform(least, most))


def _witness(folder: Path, crew: Crew, judge: Judge) -> None:
    """Let a witness note what is stored; it still runs when this returns."""
    (folder / "ready").unlink(missing_ok=True)
    name = crew.start("witness")
    end = time.monotonic() + WITNESS_SECONDS
    while not (folder / "ready").exists():
        if time.monotonic() > end or crew.members[name].poll() is not None:
            judge.found("blocked", f"the witness is not ready: {crew.errors_of(name)[-600:]}")
            return
        time.sleep(0.02)


def _cut(mount: Mount, crew: Crew, chance: random.Random, judge: Judge) -> None:
    mount.cut_power()
    judge.counts["faults"] += 1
    judge.counts[f"cuts_{mount.kind}"] += 1
    time.sleep(chance.uniform(0.0, 0.3))
    for name in list(crew.members):
        crew.kill(name)
        judge.counts["kills"] += 1


def _check(folder: Path, seed: int, mount: Mount, options: dict[str, object], judge: Judge) -> None:
    """Mount again, and open the store."""
    mount.detach()
    mount.attach()
    with Crew(folder, seed + 1, options) as crew:
        crew.run("checker", judge)
        crew.collect(judge)
    shutil.rmtree(folder / "status", ignore_errors=True)
