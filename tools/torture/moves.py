"""moves: a store in use is renamed, bind-mounted, unmounted lazily and mounted again.

Processes open it where it is at that time and keep it open. None is killed, so there is no reason to give the index up:
more than one rebuild in a cycle is a failure, as is an acknowledged prompt that is not served.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import time
from pathlib import Path

from tools.torture.case import open_store
from tools.torture.crew import Crew
from tools.torture.judge import Judge
from tools.torture.kill import forget
from tools.torture.mounts import mounted

IMAGE_BYTES = 320 << 20  # xfs needs 300 MiB
ROLES = ("writer", "mixed", "reader", "collector")
STEP_SECONDS = (0.7, 2.0)
STEPS = 5


def run(folder: Path, seed: int, seconds: float, judge: Judge, kinds: tuple[str, ...] = ("ext4", "xfs")) -> None:
    chance = random.Random(seed)
    end, number = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        judge.context = f"moves, seed {seed}, cycle {number}: "
        _cycle(folder, seed * 100 + number, kinds[number % len(kinds)], chance, judge)
        judge.counts["cycles"] += 1
        number += 1


def _cycle(folder: Path, seed: int, kind: str, chance: random.Random, judge: Judge) -> None:
    forget(folder)
    binds: list[Path] = []
    with mounted(folder, kind, IMAGE_BYTES) as mount:
        where, store = folder / "where", mount.path / "store"
        with open_store(store, capacity="128MiB") as opened:
            store_id = str(opened.stats()["store_id"])
        _point(where, store, store_id)
        options = {"create": 0, "capacity": "128MiB", "fault": "the store moves"}
        try:
            with Crew(folder, seed, options) as crew:
                for role in ROLES:
                    crew.start(role)
                for step in range(STEPS):
                    _work(crew, chance, judge)
                    judge.counts["faults"] += 1
                    store = _step(folder, mount.path, store, step, chance, binds, judge)
                    _point(where, store, store_id)
                    crew.start(chance.choice(ROLES))
                _work(crew, chance, judge)
                rebuilds = _rebuilds(store)
                if rebuilds > 1:
                    judge.found("unopenable", f"{rebuilds} rebuilds of an index that was in use all the time")
            with Crew(folder, seed + 1, options) as crew:
                crew.run("checker", judge)
                crew.collect(judge)
            shutil.rmtree(folder / "status", ignore_errors=True)
        finally:
            where.unlink(missing_ok=True)
            for bind in reversed(binds):
                subprocess.run(["umount", "-l", str(bind)], capture_output=True, check=False)
                bind.rmdir()


def _point(where: Path, store: Path, store_id: str) -> None:
    """Tell the processes where the store is, and its id: another store may have its old name."""
    new = where.with_suffix(".new")
    new.write_text(f"{store}\n{store_id}")
    new.rename(where)


def _work(crew: Crew, chance: random.Random, judge: Judge) -> None:
    end = time.monotonic() + chance.uniform(*STEP_SECONDS)
    while time.monotonic() < end:
        time.sleep(0.05)
        crew.check(judge)


def _step(
    folder: Path, root: Path, store: Path, step: int, chance: random.Random, binds: list[Path], judge: Judge
) -> Path:
    """Move the store in one way; where it is now."""
    kind = chance.choice(("rename", "swap", "bind", "lazy"))
    judge.counts[kind] += 1
    if kind in ("rename", "swap"):
        new = root / f"store-{step}"
        (root / store.name).rename(new)
        if kind == "swap":  # another store takes the old name
            with open_store(root / store.name, capacity="16MiB"):
                pass
        return store.parent / new.name
    bind = folder / f"bind-{step}"
    bind.mkdir()
    subprocess.run(["mount", "--bind", str(root), str(bind)], check=True, capture_output=True)
    binds.append(bind)
    if kind == "lazy" and len(binds) > 1:  # processes go on below a mount point that is gone
        old = binds.pop(0)
        subprocess.run(["umount", "-l", str(old)], check=True, capture_output=True)
        old.rmdir()
    return bind / store.name


def _rebuilds(store: Path) -> int:
    with open_store(store, capacity="128MiB") as opened:
        return int(opened.stats()["totals"].get("rebuilds", 0))
