"""How many of the machine's cores are busy during a run, and how many with the benchmark itself: whether it is the
cores that limit a rate, or what else the machine does."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tools.benchmarks.measure import Sample, Stopwatch


@dataclass(frozen=True, slots=True)
class Run(Sample):
    """A sample, and the cores that were busy on average: with anything, and with processes below one."""

    cores: float = 0.0
    cores_of_ours: float = 0.0


class CoreWatch(Stopwatch):
    """A stopwatch that also looks at the cores. For a run of some tenths of a second or more: it counts in ticks."""

    def __init__(self, root: int) -> None:
        """``root``: process id. It and all below it, that are there from beginning to end, are ours."""
        super().__init__()
        self._root = root
        self._busy = self._ours = 0.0

    def __enter__(self) -> CoreWatch:
        self._busy -= _machine_seconds()
        self._ours -= _seconds_below(self._root)
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, exc, trace)
        self._busy += _machine_seconds()
        self._ours += _seconds_below(self._root)

    def run(self, nbytes: int) -> Run:
        seconds = max(self.seconds, 1e-9)
        return Run(self.seconds, self.cpu_seconds, nbytes, None, self._busy / seconds, self._ours / seconds)


def _machine_seconds() -> float:
    """CPU seconds of all cores since the machine's start."""
    with open("/proc/stat") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]  # what follows is counted in them already
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def _seconds_below(root: int) -> float:
    """CPU seconds of the processes that are there now, from ``root`` down."""
    parents, ticks = dict[int, int](), dict[int, int]()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                after_name = (folder / "stat").read_text().rpartition(") ")[2].split()
                parents[int(folder.name)] = int(after_name[1])
                ticks[int(folder.name)] = int(after_name[11]) + int(after_name[12])
    return sum(ticks[pid] for pid in ticks if _is_below(pid, root, parents)) / os.sysconf("SC_CLK_TCK")


def _is_below(pid: int, root: int, parents: dict[int, int]) -> bool:
    seen = set[int]()
    while pid != root and pid in parents and pid not in seen:
        seen.add(pid)
        pid = parents[pid]
    return pid == root
