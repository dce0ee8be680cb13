"""fill: several processes write three times the capacity while the used bytes of the file system are sampled.

One process holds views of pages that were evicted long ago, one writer is killed with space reserved. The store has a
file system of its own, so statvfs measures the store: it must never use more than the capacity.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

from kvfs.directory.config import parse_size
from tools.torture.crew import Crew
from tools.torture.judge import Judge
from tools.torture.mounts import mounted

CAPACITY = "32MiB"
SAMPLE_SECONDS = 0.004
#: Inodes and directory blocks of the store, which tmpfs does not count and ext4 does; within OVERHEAD_BYTES.
TIMES = 3


def run(folder: Path, seed: int, seconds: float, judge: Judge, kind: str = "tmpfs", capacity: str = CAPACITY) -> None:
    """Run until three times the capacity is written; ``blocked`` if that takes longer than ``seconds``."""
    limit = parse_size(capacity)
    chance = random.Random(seed)
    judge.context = f"fill, seed {seed}, {kind}: "
    with mounted(folder, kind, 4 * limit) as mount:
        options = {"store": mount.path / "store", "capacity": capacity, "families": 1 << 20, "strict": 0}
        options["fault"] = "a store at its limit"
        before = mount.used_bytes()
        highest, killed, end = 0, False, time.monotonic() + seconds
        with Crew(folder, seed, options) as crew:
            for role in ("filler", "filler", "filler", "filler", "holder"):
                crew.start(role)
            while (written := _written(crew)) < TIMES * limit and time.monotonic() < end:
                until = time.monotonic() + 0.25
                while time.monotonic() < until:
                    highest = max(highest, mount.used_bytes() - before)
                    judge.counts["samples"] += 1
                    time.sleep(SAMPLE_SECONDS)
                crew.check(judge)
                if not killed and written > limit // 2:
                    killed = True
                    crew.kill(chance.choice([n for n in crew.members if n.startswith("filler")]))
                    judge.counts["kills"] += 1
                    crew.start("filler")
        judge.counts["written_mib"] += written >> 20
        judge.counts["highest_kib"] = max(judge.counts["highest_kib"], highest >> 10)
        if highest > limit:
            judge.found("over", f"{highest} bytes were in use, the capacity is {limit}")
        if written < TIMES * limit:
            judge.found("blocked", f"only {written} bytes were stored in {seconds:.0f} s")
        with Crew(folder, seed + 1, options) as crew:
            crew.run("checker", judge)
            crew.collect(judge)


def _written(crew: Crew) -> int:
    return crew.sum("stored_bytes")
