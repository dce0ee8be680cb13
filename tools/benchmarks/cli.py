"""cli: what the commands that people look with cost in a large store, and whether warming is as fast as the disk.

Part 1: ``kvfs inspect``, ``ls`` and ``stats`` as processes of their own, on a store of ``--index-pages`` pages of
4 KiB, round by round first while no other process uses the store, then while ``--writers`` processes put prompts of 64
pages without a pause. ``kvfs config`` opens no index: it shows what Python and the imports cost at that moment. On a
machine with fewer cores than writers that grows, too; each ratio is taken within one round.

Part 2: ``store.warm`` of a store whose pages are in no page cache, in turns with bare ways to read equal files cold,
and with bare ways to fill the page cache from the store's own segments (``tools.benchmarks.fills``; not from others, as
a host may cache files that are read more often). Ratios are to the fastest of all, and to the fastest that leaves the
bytes in the page cache, as warming must: O_DIRECT does not. Then one ``get`` of each prompt, with the bytes that the
process reads from a disk meanwhile (``read_bytes`` of /proc/self/io).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tools.benchmarks import bare, fills, ours
from tools.benchmarks.bare import COLD_READ_BYTES, BareRead
from tools.benchmarks.case import MIB, Case, Payload, drop_cache, out_buffer, write_back
from tools.benchmarks.crew import Crew
from tools.benchmarks.measure import (
    BenchError,
    Contender,
    Sample,
    Spread,
    Stopwatch,
    back_memory,
    best_ratio,
    interleave,
    rate_ratio,
)
from tools.benchmarks.report import Report, Table, rates
from tools.benchmarks.scaling import FILL_PAGES, SMALL_PAGE_BYTES, Library

COMMANDS = {
    "start": ("config",),
    "inspect": ("inspect",),
    "ls": ("ls",),
    "stats": ("stats",),
}  # fmt: skip
COMMAND_SECONDS = 300.0
PUT_PAGES = 64
SETTLE_SECONDS = 1.0  # until all writers write
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Plan:
    index_pages: int
    writers: int
    case: Case  # of part 2
    rounds: int
    seed: int

    @property
    def need_bytes(self) -> int:
        return 3 * self.index_pages * SMALL_PAGE_BYTES + 2 * self.case.size_bytes + 8 * self.case.segment_bytes


def run(report: Report, folder: Path, plan: Plan) -> None:
    prompt_pages = min(FILL_PAGES, plan.index_pages)
    library = Library(folder / "large", 16, prompt_pages, -(-plan.index_pages // prompt_pages), plan.seed)
    library.fill()
    commands(report, library, plan.writers, plan.rounds)
    library.remove()
    _warm(report, folder, plan)


# -- part 1 ----------------------------------------------------------------------------------


@dataclass
class Writer(AbstractContextManager["Writer"]):
    """Puts new prompts until a file appears; how many pages that were."""

    library: Library
    number: int

    def __enter__(self) -> Writer:
        self._stack = ExitStack()
        self._namespace = self.library.namespace(self._stack.enter_context(self.library.store()))
        self._data = os.urandom(PUT_PAGES * SMALL_PAGE_BYTES)
        self._prompt = 1_000_000 * (self.number + 1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def run(self, order: Any) -> int:
        stored = 0
        while not os.path.exists(order):
            self._prompt += 1
            stored += self._namespace.put(self.library.tokens(self._prompt, PUT_PAGES), self._data).stored
        return stored


def commands(report: Report, library: Library, writers: int, rounds: int) -> None:
    """The rows of part 1 for a store that is filled."""
    took: dict[tuple[str, bool], list[float]] = {(name, busy): [] for name in COMMANDS for busy in (False, True)}
    stored = 0
    stop = library.path.parent / "stop"
    for name in COMMANDS:
        _command(library.path, name)  # not counted: the files of Python and of the store are read
    with Crew([Writer(library, n) for n in range(writers)]) as crew:
        for _ in range(rounds):
            for busy in (False, True):
                if busy:
                    stop.unlink(missing_ok=True)
                    crew.start(str(stop))
                    time.sleep(SETTLE_SECONDS)
                try:
                    for name in COMMANDS:
                        took[name, busy].append(_command(library.path, name))
                finally:
                    stop.touch()
                if busy:
                    stored += sum(crew.collect())
    table = Table(f"cli: {library.pages} pages of 4 KiB; seconds of a command, alone and beside {writers} writers")
    for name in COMMANDS:
        quiet, beside = took[name, False], took[name, True]
        starts = took["start", True]
        table.add(
            command=f"kvfs {' '.join(COMMANDS[name])}", quiet_s=Spread.of(quiet), beside_s=Spread.of(beside),
            ratio=Spread.of([b / q for q, b in zip(quiet, beside, strict=True)]),
            less_start_s=Spread.of([b - s for b, s in zip(beside, starts, strict=True)]) if name != "start" else None,
        )  # fmt: skip
    table.notes.append(f"the writers stored {stored} pages meanwhile")
    report.show(table)


def _command(path: Path, name: str) -> float:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVFS_")}
    environment |= {"PYTHONPATH": str(_ROOT), "PYTHONPYCACHEPREFIX": str(path.parent / "pycache")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed kvfs is compiled, too
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "kvfs.cli.main", "-C", str(path), *COMMANDS[name]], env=environment,
        capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    if done.returncode:
        raise BenchError(f"kvfs {name} failed: {done.stderr}")
    return seconds


# -- part 2 ----------------------------------------------------------------------------------


def _warm(report: Report, folder: Path, plan: Plan) -> None:
    case, payload = plan.case, Payload(plan.case)
    plain, store = folder / "bare", folder / "store"
    bare.write_all(plain, case, payload)
    ours.put_all(store, case, payload)
    segments = ours.segment_paths(store)
    for paths in (bare.file_paths(plain), segments):
        write_back(paths)
    after: list[int] = []
    with ExitStack() as stack:
        contenders = []
        for direct in (False, *((True,) if bare.can_read_direct(plain) else ())):
            for threads in (1, 4, 8):
                job = stack.enter_context(BareRead(case, plain, threads, direct=direct, read_bytes=COLD_READ_BYTES))
                name = f"bare {'O_DIRECT' if direct else 'buffered'} x{threads}"
                contenders.append(Contender(name, _cold(case, bare.file_paths(plain), job.run)))
        for way, threads, block in fills.WAYS if fills.can_populate() else ():
            fill = stack.enter_context(fills.BareFill(case, segments, way, threads, block * MIB))
            contenders.append(Contender(f"bare {way} x{threads}, {block} MiB", _cold(case, segments, fill.run)))
        contenders.append(Contender("warm", lambda: _warm_once(case, store, after)))
        samples = interleave(contenders, plan.rounds)
    bares = {name: found for name, found in samples.items() if name != "warm"}
    best = _fastest(bares)
    filling = _fastest({name: found for name, found in bares.items() if "O_DIRECT" not in name})
    table = Table(
        f"warm: {case.size_bytes // MIB} MiB in pages of {case.page_bytes // 1024} KiB, cold, against bare reads"
    )
    for name, found in samples.items():
        table.add(
            way=name, **rates(found), ratio_to_best_bare=rate_ratio(found, bares[best]),
            ratio_to_best_fill=rate_ratio(found, bares[filling]), best_to_best=best_ratio(found, bares[best]),
            get_reads=Spread.of([float(n) for n in after]) if name == "warm" else None,
        )  # fmt: skip
    table.notes.append("get reads: bytes that the process read from a disk during get of every prompt, afterwards")
    report.show(table)
    bare.remove(plain)
    ours.remove(store)


def _fastest(samples: dict[str, list[Sample]]) -> str:
    return max(samples, key=lambda name: max(s.gb_per_second for s in samples[name]))


def _cold(case: Case, paths: Sequence[Path], read: Callable[[], Sample]) -> Callable[[], Sample]:
    def run() -> Sample:
        drop_cache(paths)
        back_memory(case.size_bytes)
        return read()

    return run


def _warm_once(case: Case, store: Path, after: list[int]) -> Sample:
    drop_cache(ours.segment_paths(store))
    back_memory(case.size_bytes)
    watch = Stopwatch()
    with case.store(store) as opened:
        name = case.namespace(opened).name
        with watch:
            done = opened.warm([name])
        if done.failed_bytes or done.read_bytes + done.resident_bytes < case.size_bytes:
            raise BenchError(f"warm read {done}")
        namespace, out, before = case.namespace(opened), out_buffer(case.prompt_bytes), _disk_bytes()
        for prompt in range(case.prompts):
            ours.get_prompt(namespace, case, case.tokens(prompt), out)
        after.append(_disk_bytes() - before)
    return watch.sample(case.size_bytes)


def _disk_bytes() -> int:
    """What this process has had read from disks since it began."""
    for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise BenchError("/proc/self/io has no read_bytes")
