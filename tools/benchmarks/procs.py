"""procs: several processes putting and getting in one store.

Each process repeats, for --seconds or until it has put its share of --size: put a new prompt of its own, get two of
its own and two that all processes share, in an order that the seed fixes. The baseline, in turns with it, is as many
processes that do the same with bare ``pwritev`` and ``preadv``: files of their own, shared files, no checksums, no
index. Everything lies in the page cache; whole prompts are moved. ``get`` includes its ``match`` and verifies. Rates
are sums over the processes, until the last one ends; "per process" shows whether anybody starves.

Then two processes put the same prompts at once: every page must be stored once, by one of them.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.benchmarks import bare, ours
from tools.benchmarks.bare import BareWriter
from tools.benchmarks.case import Case, Payload, allocated_bytes, size_text
from tools.benchmarks.crew import Crew, Job
from tools.benchmarks.measure import GB, BenchError, Spread, percentile
from tools.benchmarks.mix import SHARED, BareMix, MixResult, SamePuts, StoreMix
from tools.benchmarks.report import Report, Table, Value


@dataclass(frozen=True)
class Plan:
    case: Case
    procs: Sequence[int]
    seconds: float

    def puts_max(self, procs: int) -> int:
        """Prompts that each process may put."""
        return max(2, self.case.prompts // procs)


def run(report: Report, folder: Path, plan: Plan) -> None:
    case = plan.case
    table = Table(
        f"procs: pages of {size_text(case.page_bytes)}, {size_text(case.prompt_bytes)} per call, "
        f"segments and files of {size_text(case.segment_bytes)}, 1 put : 4 gets, warm, {case.threads} threads each"
    )
    first: dict[str, float] = {}
    try:
        for procs in plan.procs:
            plain = _run_bare(folder / "bare", plan, procs)
            stored = _run_store(folder / "store", plan, procs)
            base = _rate(plain, case)
            for side, results, ratio in (("bare", plain, None), ("store", stored, _rate(stored, case) / base)):
                first.setdefault(side, _rate(results, case))
                table.add(**_row(side, procs, results, case, first[side], ratio))
    finally:
        if table.rows:
            table.notes.append(f"x first: against the first row of the same side ({plan.procs[0]} processes)")
            report.show(table)
    _same_prompts(report, folder / "same", plan)


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
        return crew.run(plan.seconds)


def _rate(results: Sequence[MixResult], case: Case) -> float:
    """GB per second of all together."""
    calls = sum(len(r.puts) + len(r.gets) for r in results)
    return calls * case.prompt_bytes / GB / max(r.seconds for r in results)


def _row(
    side: str, procs: int, results: Sequence[MixResult], case: Case, first: float, ratio: float | None
) -> dict[str, Value]:
    puts, gets = ([t * 1e3 for r in results for t in getattr(r, name)] for name in ("puts", "gets"))
    own = [(len(r.puts) + len(r.gets)) * case.prompt_bytes / GB / r.seconds for r in results]
    total = (len(puts) + len(gets)) * case.prompt_bytes / GB
    return {
        "procs": procs,
        "side": side,
        "verified": "yes" if side == "store" else "no",
        "seconds": max(r.seconds for r in results),
        "calls": len(puts) + len(gets),
        "GB/s": _rate(results, case),
        "x first": _rate(results, case) / first,
        "ratio to bare": ratio,
        "GB/s per process": Spread.of(own),
        "cpu s/GB": sum(r.cpu_seconds for r in results) / total,
        "put ms p50": percentile(puts, 50),
        "put p99": percentile(puts, 99),
        "get ms p50": percentile(gets, 50),
        "get p99": percentile(gets, 99),
    }


def _same_prompts(report: Report, folder: Path, plan: Plan) -> None:
    """Two processes, the same prompts in the same order, at the same time."""
    case = plan.case
    with case.store(folder):
        pass  # made before the race
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
