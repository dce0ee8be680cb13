"""Part 3 of the match benchmark: lookups, opening and rebuilding by index size. Also the small stores of all parts."""

from __future__ import annotations

import random
import shutil
import time
from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import kvfs
from tools.benchmarks import case as cases
from tools.benchmarks.case import MIB
from tools.benchmarks.crew import Crew
from tools.benchmarks.measure import BenchError, Spread
from tools.benchmarks.report import Report, Table, Value

SMALL_PAGE_BYTES = 4096
FILL_PAGES = 2000  # per prompt
FILL_PAGE_TOKENS = 16
MATCHES = 5  # per round
OPENS = 3
REBUILD_SECONDS = 600.0
POLL_SECONDS = 0.001


@dataclass(frozen=True)
class Library:
    """A store of ``prompts`` prompts of ``prompt_pages`` small pages (one layer, one head, 4 KiB)."""

    path: Path
    page_tokens: int
    prompt_pages: int
    prompts: int
    seed: int

    @property
    def pages(self) -> int:
        return self.prompt_pages * self.prompts

    def store(self) -> kvfs.Store:
        capacity = 2 * self.pages * SMALL_PAGE_BYTES + 256 * MIB
        index = max(8 * MIB, 400 * self.pages)  # small pages need more index than the default share
        return kvfs.open(self.path, capacity=capacity + index, index_bytes=index)

    def namespace(self, store: kvfs.Store) -> kvfs.Namespace:
        head_dim = SMALL_PAGE_BYTES // (4 * self.page_tokens)  # K and V of bf16
        layout = kvfs.PageLayout.kv(
            layers=1, kv_heads=1, head_dim=head_dim, dtype="bfloat16", page_tokens=self.page_tokens
        )
        return store.namespace("bench", layout, revision="bench-1")

    def tokens(self, prompt: int, pages: int | None = None) -> array[int]:
        return cases.tokens(self.seed, prompt, (pages or self.prompt_pages) * self.page_tokens)

    def fill(self) -> float:
        """Put everything, one prompt per call. Returns the seconds in ``put``."""
        seconds = 0.0
        data = random.Random(self.seed).randbytes(self.prompt_pages * SMALL_PAGE_BYTES)
        with self.store() as store:
            namespace = self.namespace(store)
            for prompt in range(self.prompts):
                ids = self.tokens(prompt)
                start = time.perf_counter()
                result = namespace.put(ids, data)
                seconds += time.perf_counter() - start
                if result.stored != self.prompt_pages:
                    raise BenchError(f"put stored {result.stored} of {self.prompt_pages} pages: {result}")
        return seconds

    def remove_index(self) -> None:
        """Delete the index, which the segments can rebuild."""
        for entry in (self.path / "index").iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        (self.path / "state").unlink()

    def remove(self) -> None:
        shutil.rmtree(self.path)


@dataclass(frozen=True)
class Opened:
    """Seconds from ``kvfs.open`` until it returns, until the index is ready, until the first complete match."""

    opened: float
    ready: float
    first_match: float


@dataclass
class Opener(AbstractContextManager["Opener"]):
    """Opens the store on the order "open", and matches that many random prompts on a number."""

    library: Library

    def __enter__(self) -> Opener:
        self._stack = ExitStack()
        self._random = random.Random(self.library.seed)
        _ = kvfs.open  # names are loaded on first use: outside of the timing
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def run(self, order: Any) -> Any:
        return self._open() if order == "open" else self._match(order)

    def _open(self) -> Opened:
        ids = self.library.tokens(0)
        start = time.perf_counter()
        store = self._stack.enter_context(self.library.store())
        opened = time.perf_counter() - start
        while store.stats()["index"]["state"] != "ready":
            if time.perf_counter() > start + REBUILD_SECONDS:
                raise BenchError(f"the index is not ready after {REBUILD_SECONDS:.0f} s: {store.stats()['index']}")
            time.sleep(POLL_SECONDS)
        ready = time.perf_counter() - start
        self._namespace = self.library.namespace(store)
        self._whole_match(ids)
        return Opened(opened, ready, time.perf_counter() - start)

    def _match(self, times: int) -> float:
        """Seconds per page."""
        seconds = 0.0
        for _ in range(times):
            ids = self.library.tokens(self._random.randrange(self.library.prompts))
            start = time.perf_counter()
            self._whole_match(ids)
            seconds += time.perf_counter() - start
        return seconds / (times * self.library.prompt_pages)

    def _whole_match(self, ids: array[int]) -> None:
        with self._namespace.match(ids) as match:
            if match.tokens != len(ids):
                raise BenchError(f"match found {match.tokens} of {len(ids)} tokens")


def run(report: Report, folder: Path, index_pages: Sequence[int], rounds: int, seed: int) -> None:
    prompt_pages = min(FILL_PAGES, *index_pages)
    libraries = [
        Library(folder / f"index-{pages}", FILL_PAGE_TOKENS, prompt_pages, pages // prompt_pages, seed)
        for pages in index_pages
    ]
    fills = [library.fill() for library in libraries]
    clean = [[_open(library) for _ in range(min(OPENS, rounds))] for library in libraries]
    costs = _match_costs(libraries, rounds)
    table = Table(f"match: size of the index; prompts of {prompt_pages} pages of {FILL_PAGE_TOKENS} tokens, 4 KiB")
    for library, fill, opens, cost in zip(libraries, fills, clean, costs, strict=True):
        row: dict[str, Value] = {
            "pages": library.pages,
            "index bytes per page": _index_bytes(library) / library.pages,
            "put pages/s": library.pages / fill,
            "match us per page": Spread.of(cost),
            "ratio": Spread.of([a / b for a, b in zip(cost, costs[0], strict=True)]),
            "open ms": Spread.of([o.opened * 1e3 for o in opens]),
            "to first match ms": Spread.of([o.first_match * 1e3 for o in opens]),
        }
        table.add(**row, **_rebuild(library))
        library.remove()
    table.notes.append("every opening is in a new process, after a clean close; matches are warm, of random prompts")
    report.show(table)


def _rebuild(library: Library) -> dict[str, Value]:
    """Open the store without its index."""
    library.remove_index()
    rebuilt = _open(library)
    return {
        "rebuild: open ms": rebuilt.opened * 1e3,
        "rebuild s": rebuilt.ready,
        "rebuild pages/s": library.pages / rebuilt.ready,
    }


def _open(library: Library) -> Opened:
    """In a new process."""
    with Crew([Opener(library)]) as crew:
        opened: Opened = crew.run("open")[0]
        return opened


def _match_costs(libraries: Sequence[Library], rounds: int) -> list[list[float]]:
    """Microseconds per page, for each library and round; the libraries alternate."""
    costs: list[list[float]] = [[] for _ in libraries]
    with ExitStack() as stack:
        crews = [stack.enter_context(Crew([Opener(library)])) for library in libraries]
        for crew in crews:
            crew.run("open")
        for number in range(rounds + 1):
            for crew, cost in zip(crews, costs, strict=True):
                seconds = crew.run(MATCHES)[0]
                if number:
                    cost.append(seconds * 1e6)
    return costs


def _index_bytes(library: Library) -> int:
    """Bytes of disk space of the index."""
    return cases.allocated_bytes([path for path in (library.path / "index").rglob("*") if path.is_file()])
