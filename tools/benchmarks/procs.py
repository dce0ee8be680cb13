"""procs: several processes putting and getting in one store.

Each process repeats, for --seconds or until it has put its share of --size: put a new private prompt, get two private
prompts and two that all processes share, in an order fixed by the seed. The baseline, alternating with it, is the same
number of processes that do the same with bare ``pwritev`` and ``preadv``: private files, shared files, no checksums, no
index. All files are in the page cache; whole prompts are moved. ``get`` includes its ``match`` and verifies. Rates
are sums over the processes, until the last one ends; "per process" shows whether a process starves. A short round of
both sides precedes and is not counted.

Then two processes put the same prompts concurrently: every page must be stored once, by one of them.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from tools.benchmarks import ours
from tools.benchmarks.bare import BareWriter
from tools.benchmarks.case import Case, Payload, allocated_bytes, size_text
from tools.benchmarks.crew import Crew, Job
from tools.benchmarks.measure import GB, BenchError, Spread, back_memory, percentile
from tools.benchmarks.mix import SHARED, BareMix, MixResult, SamePuts, StoreMix
from tools.benchmarks.report import Report, Table, Value

WARM_BYTES_MAX = 4 << 30  # memory that is backed before a round, so that the kernel has free pages at hand


@dataclass(frozen=True)
class Plan:
    case: Case
    procs: Sequence[int]
    rounds: int
    seconds: float

    def puts_max(self, procs: int) -> int:
        """Prompts that each process may put."""
        return max(2, self.case.prompts // procs)


#: The results of all processes, round by round.
Rounds: TypeAlias = "list[list[MixResult]]"


def run(report: Report, folder: Path, plan: Plan) -> None:
    case = plan.case
    table = Table(
        f"procs: pages of {size_text(case.page_bytes)}, {size_text(case.prompt_bytes)} per call, "
        f"segments and files of {size_text(case.segment_bytes)}, 1 put : 4 gets, warm, {case.threads} threads each"
    )
    table.notes.append(f"x first: against the first row of the same side ({plan.procs[0]} processes), round by round")
    _measure(folder, replace(plan, rounds=1, seconds=min(1.0, plan.seconds)), plan.procs[0])  # the warm-up
    first: dict[str, Rounds] = {}
    try:
        for procs in plan.procs:
            sides = _measure(folder, plan, procs)
            for side, rounds in sides.items():
                relative = {
                    "x first": _ratio(rounds, first.setdefault(side, rounds), case),
                    "ratio to bare": _ratio(rounds, sides["bare"], case) if side != "bare" else None,
                }
                table.add(**_row(side, procs, rounds, case), **relative)
    finally:
        if table.rows:
            report.show(table)
    _same_prompts(report, folder / "same", plan)


def _measure(folder: Path, plan: Plan, procs: int) -> dict[str, Rounds]:
    """Both sides, alternating."""
    bare, store = list[list[MixResult]](), list[list[MixResult]]()
    for _ in range(plan.rounds):
        bare.append(_run_bare(folder / "bare", plan, procs))
        store.append(_run_store(folder / "store", plan, procs))
    return {"bare": bare, "store": store}


def _run_bare(folder: Path, plan: Plan, procs: int) -> list[MixResult]:
    folder.mkdir()
    payload, writer = Payload(plan.case), BareWriter(folder / "shared", plan.case)
    for prompt in range(SHARED):
        writer.write(prompt, payload.of(prompt))
    writer.close()
    results = _together([BareMix(plan.case, folder, n, plan.puts_max(procs)) for n in range(procs)], plan)
    shutil.rmtree(folder)
    return results


def _run_store(folder: Path, plan: Plan, procs: int) -> list[MixResult]:
    payload = Payload(plan.case)
    with plan.case.store(folder, scale=2) as store:
        namespace = plan.case.namespace(store)
        for prompt in range(SHARED):
            namespace.put(plan.case.tokens(prompt), payload.of(prompt))
    results = _together([StoreMix(plan.case, folder, n, plan.puts_max(procs)) for n in range(procs)], plan)
    ours.remove(folder)
    return results


def _together(jobs: Sequence[Job[MixResult]], plan: Plan) -> list[MixResult]:
    with Crew(jobs) as crew:
        back_memory(min(len(jobs) * plan.puts_max(len(jobs)) * plan.case.prompt_bytes * 3 // 2, WARM_BYTES_MAX))
        return crew.run(plan.seconds)


def _rate(results: Sequence[MixResult], case: Case) -> float:
    """GB per second over all processes."""
    return sum(_calls(r) for r in results) * case.prompt_bytes / GB / max(r.seconds for r in results)


def _ratio(rounds: Rounds, base: Rounds, case: Case) -> Spread:
    return Spread.of([_rate(a, case) / _rate(b, case) for a, b in zip(rounds, base, strict=True)])


def _calls(result: MixResult) -> int:
    return len(result.puts) + len(result.gets)


def _row(side: str, procs: int, rounds: Rounds, case: Case) -> dict[str, Value]:
    results_all = [result for results in rounds for result in results]
    puts, gets = ([t * 1e3 for r in results_all for t in getattr(r, name)] for name in ("puts", "gets"))
    gigabytes = (len(puts) + len(gets)) * case.prompt_bytes / GB
    return {
        "procs": procs,
        "side": side,
        "verified": "yes" if side == "store" else "no",
        "seconds": max(r.seconds for r in results_all),
        "calls": len(puts) + len(gets),
        "GB/s": Spread.of([_rate(results, case) for results in rounds]),
        "GB/s per process": Spread.of([_calls(r) * case.prompt_bytes / GB / r.seconds for r in results_all]),
        "cpu s/GB": sum(r.cpu_seconds for r in results_all) / gigabytes,
        "put ms p50": percentile(puts, 50),
        "put p99": percentile(puts, 99),
        "get ms p50": percentile(gets, 50),
        "get p99": percentile(gets, 99),
    }


def _same_prompts(report: Report, folder: Path, plan: Plan) -> None:
    """Two processes put the same prompts in the same order, concurrently."""
    case = plan.case
    with case.store(folder):
        pass  # created before the race
    with Crew([SamePuts(case, folder) for _ in range(2)]) as crew:
        both = crew.run(None)
    pages = case.prompts * case.prompt_pages
    stored, skipped, in_flight, declined = (sum(getattr(r, name) for r in both) for name in SamePuts.COUNTS)
    taken = allocated_bytes(ours.segment_paths(folder)) / case.size_bytes
    ours.check_all(folder, case, Payload(case))
    table = Table(f"procs: two processes put the same {case.prompts} prompts at once")
    table.add(
        pages=pages, stored=stored, by_each=" + ".join(str(r.stored) for r in both), skipped=skipped,
        in_flight=in_flight, declined=declined, each_once=stored == pages, file_bytes_per_payload_byte=taken,
        seconds=max(r.seconds for r in both),
    )  # fmt: skip
    report.show(table)
    ours.remove(folder)
    if stored != pages:
        raise BenchError(f"{pages} pages were stored {stored} times")
