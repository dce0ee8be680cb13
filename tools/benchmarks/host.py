"""host: put, get and view against the bare system calls on this machine.

Per page size: ``put`` against a bare loop of gathered ``pwritev``; ``get`` from the page cache against ``preadv``
with and without the same checksums; ``get`` from the disk against the fastest of eight bare ways to read cold;
``view`` against a bare map, every byte touched. The bare side and the store alternate within each round, on one file
system, with equal files, equal bytes per call and one buffer; each ratio is taken within a round. Every prompt is
compared once with what was put, outside of the timing. A ``get`` or ``view`` is timed with its ``match``, and again
without it ("match apart": the match is made right before the timing starts). In the "same" process a lookup precedes
the timing; in a "new" one the first call includes one-time costs. Each round of writing creates its files and removes
them. Cold: the files are written back and their pages dropped from the page cache; a disk cache of a virtual
machine's host may still be warm. "best" compares the best rounds of both sides.

With --mode cache,staging, modes of the store are compared with each other instead: ``put``, ``put`` until the data is
on the disk, and ``get`` of pages that are not in the page cache, against the mode that is named first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from kvfs.directory import config_file
from kvfs.system.files import Files
from tools.benchmarks import bare, ours
from tools.benchmarks.bare import COLD_READ_BYTES, BareRead, BareView
from tools.benchmarks.case import Case, Payload, drop_cache, out_buffer, size_text, write_back
from tools.benchmarks.crew import Crew, Job
from tools.benchmarks.measure import Contender, Sample, back_memory, best_ratio, fastest, interleave, rate_ratio
from tools.benchmarks.ours import StoreGet, StoreView
from tools.benchmarks.report import Report, Table, cached_share, rates

COLD_THREADS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Setup:
    """A case and its files: ``bare`` and ``store`` hold the same bytes."""

    case: Case
    folder: Path
    rounds: int

    @property
    def bare(self) -> Path:
        return self.folder / "bare"

    @property
    def store(self) -> Path:
        return self.folder / "store"


def run(report: Report, folder: Path, cases: Sequence[Case], rounds: int, modes: Sequence[str] = ("cache",)) -> None:
    for case in cases:
        place = folder / size_text(case.page_bytes)
        place.mkdir()
        setup = Setup(case, place, rounds)
        if tuple(modes) == ("cache",):
            _one_page_size(report, setup)
        else:
            _compare_modes(report, setup, modes)
        out_buffer.cache_clear()


def _table(case: Case) -> Table:
    layout = case.layout.groups[0]
    return Table(
        f"host, pages of {size_text(case.page_bytes)}: bf16, {len(layout.layers)} layers, 8 KV heads of 128, "
        f"{case.page_tokens} tokens; {size_text(case.prompt_bytes)} per call, {case.prompts} calls, "
        f"segments and files of {size_text(case.segment_bytes)}"
    )


def _one_page_size(report: Report, setup: Setup) -> None:
    payload, table = Payload(setup.case), _table(setup.case)
    try:
        _write_rows(table, setup, payload)
        _fill(setup, payload)
        _warm_rows(table, setup)
        _view_rows(table, setup)
        _cold_rows(table, setup)
    finally:
        if table.rows:
            report.show(table)
    bare.remove(setup.bare)
    ours.remove(setup.store)


def _add(
    table: Table, setup: Setup, op: str, samples: Sequence[Sample], baseline: str = "",
    base: Sequence[Sample] | None = None, *, verified: str, threads: int, process: str = "same", segments: str = "-",
) -> None:  # fmt: skip
    table.add(
        page=size_text(setup.case.page_bytes), op=op, process=process, segments=segments, verified=verified,
        threads=threads, cached=cached_share(samples), **rates(samples),
        ratio=rate_ratio(samples, base) if base is not None else None,
        best=best_ratio(samples, base) if base is not None else None, to=baseline,
    )  # fmt: skip


# -- modes ----------------------------------------------------------------------------------------


def _compare_modes(report: Report, setup: Setup, modes: Sequence[str]) -> None:
    case, payload, table = setup.case, Payload(setup.case), _table(setup.case)
    stores = {mode: setup.folder / mode for mode in modes}

    def put(mode: str, durable: bool) -> Sample:
        return ours.put_all(stores[mode], case, payload, mode=mode, durable=durable)

    try:
        samples = interleave(
            [
                Contender(
                    f"put{' to the disk' if durable else ''}, {mode}",
                    partial(put, mode, durable),
                    lambda: back_memory(case.size_bytes * 3 // 2),
                    partial(ours.remove, stores[mode]),
                )
                for durable in (False, True)
                for mode in modes
            ],
            setup.rounds,
        )
        put(modes[0], True)
        ours.check_all(stores[modes[0]], case, payload)
        one = stores[modes[0]]  # the same files, read in each mode

        def turn(mode: str) -> None:
            config_file.change(str(one), "mode", mode, Files())
            drop_cache(ours.segment_paths(one))

        samples |= interleave(
            [Contender(f"get cold, {mode}", _here(StoreGet(case, one)), partial(turn, mode)) for mode in modes],
            setup.rounds,
        )
        for name, found in samples.items():
            base = f"{name.partition(', ')[0]}, {modes[0]}"
            _add(
                table, setup, name, found, base, samples[base], verified="yes" if "get" in name else "-",
                threads=case.threads if "get" in name else 1, segments=ours.segment_states(one),
            )  # fmt: skip
    finally:
        if table.rows:
            report.show(table)
    ours.remove(one)


# -- writing --------------------------------------------------------------------------------------


def _write_rows(table: Table, setup: Setup, payload: Payload) -> None:
    case = setup.case

    def drop_bare() -> None:
        bare.remove(setup.bare)

    def warm() -> None:
        back_memory(case.size_bytes * 3 // 2)

    states: list[str] = []

    def drop_store() -> None:
        states.append(ours.segment_states(setup.store))
        ours.remove(setup.store)

    samples = interleave(
        [
            Contender("bare", lambda: bare.write_all(setup.bare, case, payload), warm, drop_bare),
            Contender("sums", lambda: bare.write_all(setup.bare, case, payload, sums=True), warm, drop_bare),
            Contender("put", lambda: ours.put_all(setup.store, case, payload), warm, drop_store),
        ],
        setup.rounds,
    )
    _add(table, setup, "bare pwritev", samples["bare"], verified="-", threads=1)
    _add(table, setup, "bare sums+pwritev", samples["sums"], verified="-", threads=1)
    for name, base in (("bare pwritev", "bare"), ("bare sums+pwritev", "sums")):
        _add(table, setup, "put", samples["put"], name, samples[base], verified="-", threads=1, segments=states[-1])


def _fill(setup: Setup, payload: Payload) -> None:
    """Write the files that are read later, compare them, and write them back: no writeback must run during reads."""
    case = setup.case
    bare.write_all(setup.bare, case, payload)
    ours.put_all(setup.store, case, payload)
    ours.check_all(setup.store, case, payload)
    with BareRead(case, setup.bare, 1) as reader:
        for prompt in range(case.prompts):
            payload.check(reader.read(prompt), prompt)
    write_back([*bare.file_paths(setup.bare), *ours.segment_paths(setup.store)])


# -- reading --------------------------------------------------------------------------------------


def _here(job: Job[Sample]) -> Callable[[], Sample]:
    def run() -> Sample:
        with job:
            return job.run(None)

    return run


def _in_new_process(job: BareRead | StoreGet) -> Callable[[], Sample]:
    def run() -> Sample:
        with Crew([replace(job)]) as crew:  # only the fields go to the child
            return crew.run(None)[0]

    return run


def _warm_rows(table: Table, setup: Setup) -> None:
    case, states = setup.case, ours.segment_states(setup.store)
    plain, summed = (BareRead(case, setup.bare, case.threads, sums=sums) for sums in (False, True))
    verified, trusting = (StoreGet(case, setup.store, verify) for verify in ("always", "off"))
    first = StoreGet(case, setup.store, warm=False)
    alone, first_alone = replace(verified, apart=True), replace(first, apart=True)
    samples = interleave(
        [
            Contender("plain", _here(plain)), Contender("off", _here(trusting)),
            Contender("sums", _here(summed)), Contender("get", _here(verified)),
            Contender("alone", _here(alone)), Contender("new sums", _in_new_process(summed)),
            Contender("new get", _in_new_process(first)), Contender("new alone", _in_new_process(first_alone)),
        ],
        setup.rounds,
    )  # fmt: skip
    threads = case.threads
    _add(table, setup, "bare preadv", samples["plain"], verified="no", threads=threads)
    _add(table, setup, "bare preadv+sums", samples["sums"], verified="sums", threads=threads)
    for op, name, base, text, checked, process in (
        ("get warm, match apart", "alone", "sums", "bare preadv+sums", "yes", "same"),
        ("get warm", "get", "sums", "bare preadv+sums", "yes", "same"),
        ("get warm", "get", "plain", "bare preadv", "yes", "same"),
        ("get warm", "off", "plain", "bare preadv", "no", "same"),
        ("get warm", "get", "off", "get warm, not verified", "yes", "same"),
        ("get warm, match apart", "new alone", "new sums", "bare preadv+sums", "yes", "new"),
        ("get warm", "new get", "new sums", "bare preadv+sums", "yes", "new"),
    ):
        _add(
            table, setup, op, samples[name], text, samples[base], verified=checked, threads=threads,
            process=process, segments=states,
        )  # fmt: skip


def _view_rows(table: Table, setup: Setup) -> None:
    case, states = setup.case, ours.segment_states(setup.store)
    samples = interleave(
        [
            Contender("bare", _here(BareView(case, setup.bare))),
            Contender("view", _here(StoreView(case, setup.store))),
            Contender("view alone", _here(StoreView(case, setup.store, apart=True))),
            Contender("off", _here(StoreView(case, setup.store, "off"))),
            Contender("off alone", _here(StoreView(case, setup.store, "off", apart=True))),
        ],
        setup.rounds,
    )
    _add(table, setup, "bare mmap+touch", samples["bare"], verified="no", threads=1)
    for name, verified in (("view", "yes"), ("view alone", "yes"), ("off", "no"), ("off alone", "no")):
        op = f"view+touch{', match apart' if 'alone' in name else ''}"
        _add(
            table, setup, op, samples[name], "bare mmap+touch", samples["bare"], verified=verified,
            threads=1, segments=states,
        )  # fmt: skip
    table.notes.append("view+touch, verified: every byte is read twice, once to verify and once to touch")


def _cold_rows(table: Table, setup: Setup) -> None:
    case, states = setup.case, ours.segment_states(setup.store)
    segments, files = ours.segment_paths(setup.store), bare.file_paths(setup.bare)
    ways = {f"bare {'O_DIRECT' if direct else 'buffered'} {threads} threads": (direct, threads)
            for direct in (False, True) for threads in COLD_THREADS}  # fmt: skip
    if not bare.can_read_direct(setup.bare):
        ways = {name: way for name, way in ways.items() if not way[0]}
        table.notes.append("this file system has no O_DIRECT: cold baselines are buffered reads")
    contenders = [
        Contender(
            name,
            _here(BareRead(case, setup.bare, threads, direct=direct, read_bytes=COLD_READ_BYTES)),
            before=lambda: drop_cache(files),
        )
        for name, (direct, threads) in ways.items()
    ]
    for name, verify, where in (("get", "always", _here), ("off", "off", _here), ("new", "always", _in_new_process)):
        job = StoreGet(case, setup.store, verify, warm=where is _here)
        contenders.append(Contender(name, where(job), before=lambda: drop_cache(segments)))
    samples = interleave(contenders, setup.rounds)
    best = fastest(samples, list(ways))
    for name, (_, threads) in ways.items():
        label = f"{name.rpartition(' ')[0].rpartition(' ')[0]} preadv{' (best)' if name == best else ''}"
        _add(table, setup, label, samples[name], verified="no", threads=threads)
    for name, checked, process in (("get", "yes", "same"), ("off", "no", "same"), ("new", "yes", "new")):
        _add(
            table, setup, "get cold", samples[name], best, samples[best], verified=checked,
            threads=case.threads, process=process, segments=states,
        )  # fmt: skip
