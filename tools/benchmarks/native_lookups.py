"""Part 1b of the match benchmark: the native path and the Python path of lookups, in turns, next to busy threads."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import kvfs
from kvfs.native import library as native_library
from kvfs.pages.chunk_hash import chain, tenant_seed, token_bytes
from tools.benchmarks.measure import (
    BusyThread,
    Contender,
    Sample,
    Spread,
    Stopwatch,
    interleave,
    percentile,
    time_ratio,
)
from tools.benchmarks.report import Table
from tools.benchmarks.scaling import Library


@dataclass
class _Lookups:
    """Matches of one prompt; counts those that did not find all of it."""

    namespace: kvfs.Namespace
    ids: array[int]
    short: int = field(default=0)

    def run(self) -> Sample:
        watch = Stopwatch()
        with watch:
            match = self.namespace.match(self.ids)
            match.close()
        self.short += match.tokens != len(self.ids)
        return watch.sample()

    def run_python(self) -> Sample:
        with native_library.paused():
            return self.run()


def _hash(ids: array[int], page_tokens: int) -> Sample:
    seed, watch = tenant_seed(""), Stopwatch()
    with native_library.paused(), watch:
        chain(token_bytes(ids), page_tokens, seed)
    return watch.sample()


def add_rows(table: Table, library: Library, lengths: Sequence[int], busy: Sequence[int], rounds: int) -> None:
    """Rows for prompts of ``lengths`` tokens next to each number of busy threads."""
    everything = library.tokens(0)
    with library.store() as store:
        namespace = library.namespace(store)
        forget = store._shared.c.chains.forget
        for tokens in sorted({min(n, len(everything)) // library.page_tokens * library.page_tokens for n in lengths}):
            ids = everything[:tokens]
            for threads in busy:
                python, native = _Lookups(namespace, ids), _Lookups(namespace, ids)
                contenders = [
                    Contender("hashlib", lambda ids=ids: _hash(ids, library.page_tokens)),  # type: ignore[misc]
                    Contender("python", python.run_python, forget),
                    Contender("native", native.run, forget),
                ]
                with BusyThread(threads):
                    samples = interleave(contenders, rounds)
                ms = {name: [s.seconds * 1e3 for s in some] for name, some in samples.items()}
                table.add(
                    tokens_per_page=library.page_tokens, tokens=tokens, busy_threads=threads,
                    hashlib_ms=Spread.of(ms["hashlib"]), python_ms=Spread.of(ms["python"]),
                    native_ms=Spread.of(ms["native"]), python_p99=percentile(ms["python"], 99),
                    native_p99=percentile(ms["native"], 99),
                    native_to_python=time_ratio(samples["native"], samples["python"]),
                    native_to_hashlib=time_ratio(samples["native"], samples["hashlib"]),
                    python_lost=python.short, native_lost=native.short,
                )  # fmt: skip
