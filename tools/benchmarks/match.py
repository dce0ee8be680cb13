"""match: the cost of a lookup: alone, next to a busy Python thread, for other processes, and in a large index.

Part 1: hashing a prompt (``token_bytes`` and ``chain``) alone; ``ns.match`` of it with everything stored, which
includes the hashing; and the same with a prompt that was hashed recently, alternating. Then all of it again with a
thread in the process that spins in Python.

Part 2: the effect on other processes. One process looks up a short prompt in a loop, another puts small new pages in
a loop, while this process first waits, then matches the long prompt in a loop, then does so next to a busy thread. On
a machine with fewer than four cores the busy processes also wait for each other's cores.

Part 3: the cost per page of a match, and the time to open and to rebuild, for a small and a large index. Each store is
filled with long prompts of 4 KiB pages, closed, and opened in new processes. Opening is timed from ``kvfs.open`` (the
module is loaded) to its return and to the first match; the rebuild from ``kvfs.open`` on a store whose ``state`` and
content of ``index`` were deleted, until ``stats()`` reports the index as ready. All files are in the page cache.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import kvfs
from kvfs.native import library as native_library
from kvfs.pages.chunk_hash import chain, tenant_seed, token_bytes
from tools.benchmarks import native_lookups, others, scaling
from tools.benchmarks.measure import (
    BenchError,
    BusyThread,
    Contender,
    Sample,
    Spread,
    Stopwatch,
    interleave,
    time_ratio,
)
from tools.benchmarks.report import Report, Table
from tools.benchmarks.scaling import SMALL_PAGE_BYTES, Library


@dataclass(frozen=True)
class Plan:
    tokens: int
    page_tokens: Sequence[int]
    index_pages: Sequence[int]
    rounds: int
    seconds: float
    seed: int
    lengths: Sequence[int] = ()
    busy: Sequence[int] = ()

    @property
    def need_bytes(self) -> int:
        """Upper bound of the disk space: payloads, tables and index."""
        pages = sum(self.index_pages) + self.tokens // min(self.page_tokens)
        return pages * (SMALL_PAGE_BYTES * 3 // 2)


def run(report: Report, folder: Path, plan: Plan) -> None:
    lookups = Table(f"match: one prompt of {plan.tokens} tokens, all of it stored, same process")
    sides = Table(f"match: the native path ({native_library.state()}) and the Python path, in turns")
    effects = Table("match: what other processes see")
    for page_tokens in plan.page_tokens:
        library = Library(folder / f"prompt-{page_tokens}", page_tokens, plan.tokens // page_tokens, 1, plan.seed)
        library.fill()
        _lookup_rows(lookups, plan, library)
        if native_library.loaded() is not None:
            lengths = [*plan.lengths, plan.tokens]
            native_lookups.add_rows(sides, library, lengths, plan.busy, plan.rounds)
        others.add_rows(effects, library, plan.seconds)
        library.remove()
    report.show(lookups)
    report.show(sides)
    report.show(effects)
    scaling.run(report, folder, plan.index_pages, plan.rounds, plan.seed)


def _lookup_rows(table: Table, plan: Plan, library: Library) -> None:
    ids = library.tokens(0)
    numbers = ids.tolist()
    with library.store() as store:
        namespace = library.namespace(store)
        contenders = [
            Contender("hash list", lambda: _hash(library, numbers)),
            Contender("hash", lambda: _hash(library, ids)),
            Contender("match", lambda: match_once(namespace, ids), store._shared.c.chains.forget),
            Contender("again", lambda: match_once(namespace, ids)),
        ]
        for busy in (False, True):
            with ExitStack() as stack:
                if busy:
                    stack.enter_context(BusyThread())
                samples = interleave(contenders, plan.rounds)
            for name, label, kind in (
                ("hash list", "hashing", "list"), ("hash", "hashing", "array"), ("match", "hashing+match", "array"),
                ("again", "match, hashed before", "array"),
            ):  # fmt: skip
                _add(table, library, label, kind, busy, samples[name], samples["hash"])


def _add(
    table: Table, library: Library, op: str, kind: str, busy: bool, samples: Sequence[Sample], base: Sequence[Sample]
) -> None:
    milliseconds = Spread.of([s.seconds * 1e3 for s in samples])
    table.add(
        tokens_per_page=library.page_tokens, pages=library.prompt_pages, op=op, token_ids=kind, busy_thread=busy,
        ms=milliseconds, us_per_page=milliseconds.middle * 1e3 / library.prompt_pages,
        cpu_ms=Spread.of([s.cpu_seconds * 1e3 for s in samples]).middle,
        ratio_to_hashing=time_ratio(samples, base),
    )  # fmt: skip


def _hash(library: Library, ids: array[int] | list[int]) -> Sample:
    seed, watch = tenant_seed(""), Stopwatch()
    with watch:
        hashes = chain(token_bytes(ids), library.page_tokens, seed)
    if len(hashes) != library.prompt_pages:
        raise BenchError(f"{len(hashes)} hashes instead of {library.prompt_pages}")
    return watch.sample()


def match_once(namespace: kvfs.Namespace, ids: array[int]) -> Sample:
    """Look up a prompt that is stored entirely, and release the match."""
    watch = Stopwatch()
    with watch:
        match = namespace.match(ids)
        match.close()
    if match.tokens != len(ids):
        raise BenchError(f"match found {match.tokens} of {len(ids)} tokens")
    return watch.sample()
