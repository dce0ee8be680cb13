"""Part 2 of the match benchmark: lookups and commits of other processes next to a busy one."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from types import TracebackType

from tools.benchmarks.crew import Crew, Job
from tools.benchmarks.measure import BusyThread, percentile
from tools.benchmarks.report import Table
from tools.benchmarks.scaling import SMALL_PAGE_BYTES, Library

LOOKUP_TOKENS = 4096
FRESH_PROMPTS = 1 << 30  # numbers of prompts that are not stored
WARM_CALLS = 3


@dataclass(frozen=True)
class Calls:
    """Seconds of each call, and the number of incomplete calls."""

    seconds: list[float]
    short: int


class _Caller(AbstractContextManager["_Caller"]):
    """Repeats a call for the ordered number of seconds."""

    library: Library

    def __enter__(self) -> _Caller:
        self._stack = ExitStack()
        self._namespace = self.library.namespace(self._stack.enter_context(self.library.store()))
        self._prepare()
        for _ in range(WARM_CALLS):
            self._before()
            self._call()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def run(self, order: float) -> Calls:
        seconds, short, end = list[float](), 0, time.perf_counter() + order
        while time.perf_counter() < end:
            self._before()
            start = time.perf_counter()
            whole = self._call()
            seconds.append(time.perf_counter() - start)
            short += not whole
        return Calls(seconds, short)

    def _prepare(self) -> None: ...

    def _before(self) -> None: ...

    def _call(self) -> bool:
        raise NotImplementedError


@dataclass
class Lookups(_Caller):
    """Matches the first ``tokens`` tokens of prompt 0; 0 means all of them."""

    library: Library
    tokens: int = 0

    def _prepare(self) -> None:
        ids = self.library.tokens(0)
        count = min(self.tokens or len(ids), len(ids)) // self.library.page_tokens * self.library.page_tokens
        self._ids = ids[:count]

    def _call(self) -> bool:
        with self._namespace.match(self._ids) as match:
            return bool(match.tokens == len(self._ids))


@dataclass
class Commits(_Caller):
    """Puts prompts of one page."""

    library: Library

    def _prepare(self) -> None:
        self._number, self._page = FRESH_PROMPTS, bytes(SMALL_PAGE_BYTES)

    def _before(self) -> None:
        self._number += 1
        self._ids = self.library.tokens(self._number, pages=1)

    def _call(self) -> bool:
        return bool(self._namespace.put(self._ids, self._page).stored == 1)


def add_rows(table: Table, library: Library, seconds: float) -> None:
    jobs: dict[str, Job[Calls]] = {
        f"lookup of {LOOKUP_TOKENS} tokens": Lookups(library, LOOKUP_TOKENS),
        "put of 1 page": Commits(library),
    }
    with Crew(list(jobs.values())) as crew, Lookups(library) as mine:
        for phase, matching, busy in (
            ("waits", False, False), ("matches", True, False), ("matches, busy thread", True, True),
        ):  # fmt: skip
            with ExitStack() as stack:
                if busy:
                    stack.enter_context(BusyThread())
                crew.start(seconds)
                own = mine.run(seconds) if matching else None
                calls = crew.collect()
            for name, seen in zip(jobs, calls, strict=True):
                _add(table, library, phase, f"another: {name}", seen)
            if own is not None:
                _add(table, library, phase, "this one: match of all", own)


def _add(table: Table, library: Library, phase: str, who: str, calls: Calls) -> None:
    milliseconds = [s * 1e3 for s in calls.seconds]
    table.add(
        tokens_per_page=library.page_tokens, this_process=phase, process=who, calls=len(milliseconds),
        short=calls.short, ms_p50=percentile(milliseconds, 50), p90=percentile(milliseconds, 90),
        p99=percentile(milliseconds, 99), most=percentile(milliseconds, 100),
    )  # fmt: skip
