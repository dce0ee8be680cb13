"""power: the file system under a busy store loses its power, and comes back with the contents of its journal.

Each cycle makes an ext4 or xfs image, lets processes write, shuts the file system down without a log flush, kills
the processes, mounts again (the journal is replayed) and opens the store. Level "cache" may lose pages, level "sync"
must not; neither may serve wrong bytes or fail to open.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

from tools.torture.crew import Crew
from tools.torture.judge import Judge
from tools.torture.mounts import mounted

IMAGE_BYTES = 320 << 20
ROLES = ("writer", "mixed", "forker")


def run(
    folder: Path, seed: int, seconds: float, judge: Judge, kinds: tuple[str, ...] = ("ext4", "xfs"),
    mode: str = "cache",
) -> None:  # fmt: skip
    chance = random.Random(seed)
    end, number = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        kind, sync = kinds[number % len(kinds)], ("cache", "sync", "batch")[number // len(kinds) % 3]
        _cycle(folder / str(number), seed * 100 + number, kind, sync, chance, judge, mode)
        judge.counts[f"cuts_{kind}"] += 1
        number += 1


def _cycle(folder: Path, seed: int, kind: str, sync: str, chance: random.Random, judge: Judge, mode: str) -> None:
    judge.context = f"power, seed {seed}, {kind}, level {sync}: "
    with mounted(folder, kind, IMAGE_BYTES) as mount:
        options = {"store": mount.path / "store", "sync": sync, "capacity": "256MiB", "strict": int(sync == "sync")}
        options["mode"] = mode
        for _ in range(chance.randint(1, 2)):  # the second time with what the first has left
            with Crew(folder, seed, options) as crew:
                for role in ROLES:
                    crew.start(role)
                time.sleep(chance.uniform(0.8, 2.5))
                if chance.random() < 0.3:
                    crew.run("closer", judge)
                mount.cut_power()
                judge.counts["faults"] += 1
                time.sleep(chance.uniform(0.0, 0.3))
                for name in list(crew.members):
                    crew.kill(name)
                    judge.counts["kills"] += 1
            mount.detach()
            mount.attach()
            with Crew(folder, seed + 1, options) as crew:
                crew.run("checker", judge)
                crew.collect(judge)
