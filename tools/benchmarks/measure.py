"""Clocks: samples of wall and CPU time, contenders measured in turns, spreads and percentiles.

Every contender is run once without being counted; then round by round, one after the other, so that a machine
that grows slower or faster does so for all of them. A ratio is taken within one round. Python's garbage
collector is off while a clock runs. CPU time is that of this process and of children that it has waited for;
what the kernel writes back later is not included.

In a virtual machine whose host takes free memory back, a page that the host must find first costs ten times the
write to it, for the contender that happens to be next. ``back_memory`` before each run that fills the page cache
makes that rarer, not impossible: its mark is CPU seconds per GB that differ several times between rounds. Such noise
only slows runs down, so the best round of both sides is compared as well.
"""

from __future__ import annotations

import gc
import math
import mmap
import os
import resource
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from types import TracebackType
from typing import NamedTuple

GB = 1e9


class BenchError(RuntimeError):
    """The measured call did not do what it should: a figure would mean nothing."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured run."""

    seconds: float
    cpu_seconds: float
    nbytes: int = 0
    cached: float | None = None  # share of the files in the page cache just before, 0 to 1

    @property
    def gb_per_second(self) -> float:
        return self.nbytes / GB / self.seconds

    @property
    def cpu_seconds_per_gb(self) -> float:
        return self.cpu_seconds / (self.nbytes / GB)


class Spread(NamedTuple):
    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(min(values), median(values), max(values))


class Stopwatch:
    """Adds up wall and CPU seconds of the ``with`` blocks it is used for."""

    def __init__(self) -> None:
        self.seconds = self.cpu_seconds = 0.0

    def __enter__(self) -> Stopwatch:
        self._collect = gc.isenabled()
        gc.disable()
        self._cpu, self._wall = cpu_seconds(), time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds += time.perf_counter() - self._wall
        self.cpu_seconds += cpu_seconds() - self._cpu
        if self._collect:
            gc.enable()

    def sample(self, nbytes: int = 0, cached: float | None = None) -> Sample:
        return Sample(self.seconds, self.cpu_seconds, nbytes, cached)


def cpu_seconds() -> float:
    """CPU seconds, user and system, of this process and of children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


@dataclass(frozen=True)
class Contender:
    """Something to measure. ``before`` and ``after`` are not timed."""

    name: str
    run: Callable[[], Sample]
    before: Callable[[], object] = field(default=lambda: None)
    after: Callable[[], object] = field(default=lambda: None)


def interleave(contenders: Sequence[Contender], rounds: int) -> dict[str, list[Sample]]:
    """Samples of each contender, by name; sample ``i`` of all of them is from round ``i``."""
    samples: dict[str, list[Sample]] = {c.name: [] for c in contenders}
    for number in range(rounds + 1):
        for contender in contenders:
            contender.before()
            sample = contender.run()
            contender.after()
            if number:
                samples[contender.name].append(sample)
    return samples


def rate_ratio(ours: Sequence[Sample], baseline: Sequence[Sample]) -> Spread:
    """Rate over rate of the same round; above 1 is faster than the baseline."""
    return Spread.of([a.gb_per_second / b.gb_per_second for a, b in zip(ours, baseline, strict=True)])


def best_ratio(ours: Sequence[Sample], baseline: Sequence[Sample]) -> float:
    """Best rate over best rate, each of any round."""
    return max(s.gb_per_second for s in ours) / max(s.gb_per_second for s in baseline)


def time_ratio(ours: Sequence[Sample], baseline: Sequence[Sample]) -> Spread:
    """Time over time of the same round; above 1 is slower than the baseline."""
    return Spread.of([a.seconds / b.seconds for a, b in zip(ours, baseline, strict=True)])


def fastest(samples: Mapping[str, Sequence[Sample]], names: Sequence[str]) -> str:
    """The contender with the highest median rate."""
    return max(names, key=lambda name: median(s.gb_per_second for s in samples[name]))


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest rank; NaN of nothing."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] if ordered else math.nan


def back_memory(nbytes: int) -> None:
    """Have the machine's free memory backed by its host: fill ``nbytes`` of it, at most half, and free them."""
    half = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    size = min(nbytes, half)
    if size > 0:
        mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE).close()


class BusyThread:
    """Python threads, one unless said otherwise, that never wait and never release the interpreter by themselves."""

    def __init__(self, count: int = 1) -> None:
        self._count = count

    def __enter__(self) -> BusyThread:
        self._stop = False
        self._threads = [threading.Thread(target=self._spin, name="busy", daemon=True) for _ in range(self._count)]
        for thread in self._threads:
            thread.start()
        return self

    def _spin(self) -> None:
        count = 0
        while not self._stop:
            count += 1

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop = True
        for thread in self._threads:
            thread.join()
