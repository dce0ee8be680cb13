"""full: the file system is smaller than the capacity, so that the disk is full before the store is.

Processes keep running for a while on the full disk: they may decline, miss and evict, they must not die, raise or serve
wrong bytes. Then other files are removed, and the store must open and serve.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

from tools.torture.crew import Crew
from tools.torture.judge import Judge
from tools.torture.mounts import mounted

FULL_SECONDS = 3.0  # that processes run on a full disk
WAIT_SECONDS = 40.0  # until the disk is full, at most
BALLAST_BYTES = 8 << 20
FULL_BYTES = 1 << 20  # a disk with less free space is full: too little for a segment or an index
ROLES = ("writer", "mixed", "forker", "collector")


def run(folder: Path, seed: int, seconds: float, judge: Judge, kinds: tuple[str, ...] = ("tmpfs", "ext4")) -> None:
    chance = random.Random(seed)
    end, number = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        _cycle(folder / str(number), seed * 100 + number, kinds[number % len(kinds)], chance, judge)
        judge.counts["disks"] += 1
        number += 1


def _cycle(folder: Path, seed: int, kind: str, chance: random.Random, judge: Judge) -> None:
    judge.context = f"full, seed {seed}, {kind}: "
    nbytes = chance.randint(24, 48) << 20
    with mounted(folder, kind, nbytes) as mount:
        ballast = mount.path / "ballast"
        with open(ballast, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, BALLAST_BYTES)
        options = {"store": mount.path / "store", "capacity": "256MiB", "families": 400, "strict": 0}
        options["fault"] = "full disk"
        with Crew(folder, seed, options) as crew:
            for role in ROLES:
                crew.start(role)
            end, full_since = time.monotonic() + WAIT_SECONDS, 0.0
            while (now := time.monotonic()) < (full_since + FULL_SECONDS if full_since else end):
                time.sleep(0.1)
                crew.check(judge)
                if not full_since and mount.free_bytes() < FULL_BYTES:
                    full_since = now
                if chance.random() < 0.1 and crew.members:
                    name = chance.choice(list(crew.members))
                    crew.kill(name)
                    judge.counts["kills"] += 1
                    crew.start(name.partition("-")[0])
            judge.counts["faults"] += bool(full_since)
        ballast.unlink()
        with Crew(folder, seed + 1, options) as crew:
            crew.run("checker", judge)
            crew.collect(judge)
