"""The GPU path against the link: saves and loads through the public API on one CUDA device.

Baselines of the same run and the same bytes: memcpy between pinned memory and the device, one call; preadv into
pinned memory by 4 and by 16 threads, then memcpy; `tensor[...].cpu()`. A load's time is that of match, load and wait,
with verification on the GPU, of a prompt that the process has to hash; a save's that of plan and save, of a prompt
that it has looked up before. Targets are poisoned before each load, and compared after it, bit for bit, with the saved
bytes. Loads read sealed segments from the page cache, in the process that saved them, unless a row says otherwise.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import kvfs
from kvfs.gpu.head_start import HeadStart
from kvfs.gpu.load import GpuLoad
from tools.benchmarks.gpu_engine import BLOCK, SHAPES, Engine, torch_with_cuda
from tools.benchmarks.measure import (
    BenchError,
    Contender,
    Sample,
    Spread,
    Stopwatch,
    interleave,
    percentile,
    rate_ratio,
)
from tools.benchmarks.report import Report, Table, rates

SECONDS = 60.0
SEGMENT = "256MiB"
REPLAYS = 1000
PARTS = ("saves", "active", "sealed", "threads", "layerwise", "several", "cold")
SEVERAL = 16  # prompts that are loaded at once, at most


@dataclass(frozen=True)
class Plan:
    shapes: Sequence[str]
    tokens: Sequence[int]
    rounds: int
    seed: int
    ring_bytes: int
    beside: bool
    parts: Sequence[str] = PARTS

    @property
    def need_bytes(self) -> int:
        token_bytes = [sum(g.page_bytes for g in SHAPES[s]().groups) // SHAPES[s]().page_tokens for s in self.shapes]
        saves = max(1, self.rounds // 3) if "saves" in self.parts else 0
        return (5 + len(self.tokens) + saves) * max(token_bytes) * max(self.tokens)


def run(report: Report, folder: Path, plan: Plan) -> None:
    torch = torch_with_cuda()
    for shape in plan.shapes:
        _Bench(torch, report, folder, plan, shape).run()


class _Bench:
    """One shape."""

    def __init__(self, torch: Any, report: Report, folder: Path, plan: Plan, shape: str) -> None:
        self.torch, self.report, self.folder, self.plan, self.shape = torch, report, folder, plan, shape
        self.layout = SHAPES[shape]()
        self.most = max(plan.tokens)
        self.source = Engine(torch, self.layout, self.most, plan.seed)
        self.target = Engine(torch, self.layout, self.most, plan.seed + 1)
        self.source.fill(plan.seed)
        self.path = folder / shape
        self.capacity = plan.need_bytes + (4 << 30)
        self.prompts = 0
        most = max(self.source.needed(n) for n in plan.tokens)
        self.pinned = torch.empty(most, dtype=torch.uint8, pin_memory=True)
        self.scratch = torch.empty(most, dtype=torch.uint8, device="cuda")

    def run(self) -> None:
        try:
            parts = self.plan.parts
            with self._store() as (store, ns):
                if "saves" in parts:
                    self._saves(store, ns)
                for tokens in self.plan.tokens:
                    self._save(ns, tokens, self._tokens(tokens, 7))
                if "active" in parts:
                    self._loads(ns, self.plan.tokens[-1:], "active")
            with self._store() as (store, ns):
                if "sealed" in parts:
                    self._loads(ns, self.plan.tokens, "sealed")
                if "threads" in parts:
                    for tokens in self.plan.tokens:
                        self._threads(ns, tokens)
                if "layerwise" in parts:
                    self._layerwise(ns, self.most)
                if "several" in parts:
                    for tokens in self.plan.tokens:
                        self._several(ns, tokens)
                if self.plan.beside:
                    self._beside(ns, self.most)
                if "cold" in parts:
                    self._cold(ns, self.most)
        finally:
            shutil.rmtree(self.path, ignore_errors=True)

    @contextmanager
    def _store(self) -> Iterator[tuple[kvfs.Store, kvfs.Namespace]]:
        with kvfs.open(self.path, capacity=self.capacity, segment_bytes=SEGMENT) as store:
            self.store = store
            yield store, store.namespace("bench", self.layout, "1")

    def _tokens(self, tokens: int, salt: int) -> array[int]:
        return array("I", range(salt * 1_000_003, salt * 1_000_003 + tokens))

    def _event(self) -> Any:
        event = self.torch.cuda.Event()
        event.record()
        return event

    def _units(self, engine: Engine, tokens: int, number: int = 0) -> Any:
        count = tokens // BLOCK
        ids = engine.units[number * count : (number + 1) * count]
        return {kv.group: ids for kv in engine.kvs}

    def _attach(self, ns: kvfs.Namespace, engine: Engine, **settings: Any) -> Any:
        return ns.attach(engine.kvs, **{"ring_bytes": self.plan.ring_bytes, **settings})

    # -- baselines ---------------------------------------------------------------------------

    def _memcpy(self, nbytes: int, *, to_host: bool) -> Callable[[], Sample]:
        def copy() -> Sample:
            host, device = self.pinned[:nbytes], self.scratch[:nbytes]
            with Stopwatch() as watch:
                (host.copy_(device, non_blocking=True) if to_host else device.copy_(host, non_blocking=True))
                event = self.torch.cuda.Event(blocking=True)
                event.record()
                event.synchronize()
            return watch.sample(nbytes)

        return copy

    def _preadv(self, nbytes: int, threads: int) -> Callable[[], Sample]:
        """As other stores do: threads read files into pinned memory, block by block, and each block is copied."""
        files = [os.open(p, os.O_RDONLY) for p in sorted((self.path / "segments").glob("*.kvs"))]
        blocks, left, step = list[tuple[int, int]](), nbytes, 4 << 20
        for fd in files:
            size = os.fstat(fd).st_size
            blocks += [(fd, at) for at in range(0, min(size - step, left), step)]
            left = nbytes - len(blocks) * step
        view = memoryview(self.pinned.numpy())
        pool = ThreadPoolExecutor(threads)

        def load() -> Sample:
            stream = self.torch.cuda.Stream()

            def one(index: int) -> None:
                fd, at = blocks[index]
                start = index * step
                os.preadv(fd, [view[start : start + step]], at)
                with self.torch.cuda.stream(stream):
                    self.scratch[start : start + step].copy_(self.pinned[start : start + step], non_blocking=True)

            with Stopwatch() as watch:
                list(pool.map(one, range(min(len(blocks), nbytes // step))))
                stream.synchronize()
            return watch.sample(min(len(blocks), nbytes // step) * step)

        return load

    def _naive(self, tokens: int) -> Sample:
        """`tensor[blocks].cpu()`, what a naive store saves with."""
        torch = self.torch
        ids = torch.tensor(self.source.units[: tokens // BLOCK], device="cuda")
        nbytes = 0
        with Stopwatch() as watch:
            for tensor in self.source.tensors[:8]:
                dim = 1 if tensor.dim() == 5 else 0
                nbytes += tensor.index_select(dim, ids).cpu().nbytes
        return watch.sample(nbytes)

    # -- saves -------------------------------------------------------------------------------

    def _save(self, ns: kvfs.Namespace, tokens: int, prompt: array[int]) -> tuple[float, float, float]:
        """(seconds until source_free, until published, CPU seconds)."""
        with self._attach(ns, self.source) as io:
            return self._save_with(io, ns, tokens, prompt)

    def _save_with(
        self, io: Any, ns: kvfs.Namespace, tokens: int, prompt: array[int], number: int = 0
    ) -> tuple[float, float, float]:  # fmt: skip
        ns.match(prompt).close()  # as an engine does before it computes the prompt
        begin, cpu = time.perf_counter(), time.process_time()
        plan = ns.plan_save(prompt)
        transfer = io.save(plan, self._units(self.source, tokens, number), self._event(), deadline=SECONDS)
        transfer.source_free.wait(SECONDS)
        free, cpu_free = time.perf_counter() - begin, time.process_time() - cpu
        result = transfer.wait(SECONDS)
        published = time.perf_counter() - begin
        if result is None or result.declined:
            raise BenchError(f"a save of {tokens} tokens ended with {result}")
        return free, published, cpu_free

    def _saves(self, store: kvfs.Store, ns: kvfs.Namespace) -> None:
        tokens = self.most
        nbytes = sum(g.page_bytes for g in self.layout.groups) * (tokens // self.layout.page_tokens)
        io = self._attach(ns, self.source)
        published: list[Sample] = []

        def save() -> Sample:
            self.prompts += 1
            free, done, cpu = self._save_with(io, ns, tokens, self._tokens(tokens, 100 + self.prompts))
            published.append(Sample(done, 0.0, nbytes))
            return Sample(free, cpu, nbytes)

        rows = [
            Contender("pinned memcpy", self._memcpy(min(nbytes, self.pinned.numel()), to_host=True)),
            Contender("save until source_free", save),
            Contender("bare buffered write, 4 threads", lambda: self._bare_write(nbytes)),
            Contender("naive tensor[...].cpu()", lambda: self._naive(tokens)),
        ]
        samples = interleave(rows, max(1, self.plan.rounds // 3))
        samples["save until published"] = published[1:]
        io.close()
        self._report("save", tokens, "active", samples, "pinned memcpy")

    def _bare_write(self, nbytes: int) -> Sample:
        names = [self.folder / f"bare-{i}" for i in range(4)]
        view = memoryview(self.pinned.numpy())
        share = min(nbytes, len(view)) // 4 // (1 << 20) * (1 << 20)

        def one(index: int) -> None:
            fd = os.open(names[index], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for at in range(0, share, 4 << 20):
                os.pwrite(fd, view[index * share + at : index * share + min(at + (4 << 20), share)], at)
            os.close(fd)

        with ThreadPoolExecutor(4) as pool, Stopwatch() as watch:
            list(pool.map(one, range(4)))
        for name in names:
            name.unlink()
        return watch.sample(4 * share)

    # -- loads -------------------------------------------------------------------------------

    def _load(self, io: Any, ns: kvfs.Namespace, tokens: int) -> Callable[[], Sample]:
        prompt, units = self._tokens(tokens, 7), self._units(self.target, tokens)
        nbytes = self.source.needed(tokens)

        def load() -> Sample:
            self.store._shared.c.chains.forget()
            with Stopwatch() as watch, ns.match(prompt) as match:
                result = io().load(match, units, self._event()).wait(SECONDS)
            if result is None or result.tokens != tokens:
                raise BenchError(f"a load of {tokens} tokens ended with {result}")
            return watch.sample(nbytes)

        return load

    def _restore(self, io: Any, tokens: int) -> Callable[[], Sample]:
        """Looked up while the first pages move."""
        prompt, units = self._tokens(tokens, 7), self._units(self.target, tokens)
        nbytes = self.source.needed(tokens)

        def restore() -> Sample:
            self.store._shared.c.chains.forget()
            with Stopwatch() as watch:
                result = io.restore(prompt, units, self._event()).wait(SECONDS)
            if result is None or result.tokens != tokens:
                raise BenchError(f"a restore of {tokens} tokens ended with {result}")
            return watch.sample(nbytes)

        return restore

    def _check(self, tokens: int, number: int = 0) -> None:
        if not self.target.same(self.source, tokens, number):
            raise BenchError(f"{self.shape}, {tokens} tokens: the loaded bytes differ")

    def _loads(self, ns: kvfs.Namespace, sizes: Sequence[int], state: str) -> None:
        for tokens in sizes:
            self._loads_of(ns, tokens, state)

    def _loads_of(self, ns: kvfs.Namespace, tokens: int, state: str) -> None:
        nbytes = self.source.needed(tokens)
        ring = self._attach(ns, self.target, registered_bytes=0)
        placed = self._attach(ns, self.target, registered_bytes="32GiB")
        arena = self._attach(ns, self.target, registered_bytes="32GiB", transport="arena")
        with ns.match(self._tokens(tokens, 7)) as match:
            for io in (placed, arena):
                if io.warm(match) < match.nbytes:
                    raise BenchError(f"{io.transport}: not all pages of the load are registered")
        fresh: list[Any] = []

        def poison() -> None:
            self.target.fill(None)

        def renew() -> None:
            poison()
            fresh.append(self._attach(ns, self.target, registered_bytes="32GiB"))

        def check() -> None:
            self._check(tokens)

        def check_and_close() -> None:
            check()
            fresh.pop().close()

        rows = [
            Contender("pinned memcpy", self._memcpy(nbytes, to_host=False)),
            Contender("in place, registered", self._load(lambda: placed, ns, tokens), poison, check),
            Contender("in place, restored", self._restore(placed, tokens), poison, check),
            Contender("in place, first touch", self._load(lambda: fresh[-1], ns, tokens), renew, check_and_close),
            Contender("arena, filled", self._load(lambda: arena, ns, tokens), poison, check),
            Contender("ring", self._load(lambda: ring, ns, tokens), poison, check),
        ]
        if state == "sealed":
            rows += [Contender(f"bare preadv, {n} threads", self._preadv(nbytes, n)) for n in (4, 16)]
        samples = interleave(rows, self.plan.rounds)
        for io in (ring, placed, arena):
            io.close()
        self._report("load", tokens, state, samples, "pinned memcpy")

    def _threads(self, ns: kvfs.Namespace, tokens: int) -> None:
        """The same load, enqueued by its caller's thread where that is possible, and always by the load thread."""
        io = self._attach(ns, self.target, registered_bytes="32GiB")
        with ns.match(self._tokens(tokens, 7)) as match:
            if io.warm(match) < match.nbytes:
                raise BenchError("not all pages of the load are registered")
        load, begun = self._load(lambda: io, ns, tokens), list[bool]()

        def counted(job: GpuLoad) -> bool:
            begun.append(run_now(job))
            return begun[-1]

        def of_load_thread() -> Sample:
            with replaced(HeadStart, "begin", lambda start, after: False):
                return load()

        def poison() -> None:
            self.target.fill(None)

        def check() -> None:
            self._check(tokens)

        nbytes, run_now = self.source.needed(tokens), GpuLoad.run_now
        rows = [
            Contender("pinned memcpy", self._memcpy(nbytes, to_host=False)),
            Contender("of the caller's thread", load, poison, check),
            Contender("of the load thread", of_load_thread, poison, check),
            Contender("restored", self._restore(io, tokens), poison, check),
        ]
        with replaced(GpuLoad, "run_now", counted):
            samples = interleave(rows, self.plan.rounds)
        io.close()
        note = f"{sum(begun)} of {len(begun)} loads were enqueued by the caller's thread"
        self._report("load", tokens, "sealed", samples, "pinned memcpy", note)

    def _several(self, ns: kvfs.Namespace, tokens: int) -> None:
        """Prompts that are asked for at once, and one after the other."""
        count = min(SEVERAL, self.most // tokens, self.pinned.numel() // self.source.needed(tokens))
        if count < 2:
            return
        salt = 1000 + tokens // 1024 * SEVERAL  # prompts of other lengths begin with other tokens
        prompts = [self._tokens(tokens, salt + number) for number in range(count)]
        with self._attach(ns, self.source) as io:
            for number, prompt in enumerate(prompts):
                self._save_with(io, ns, tokens, prompt, number)
        io = self._attach(ns, self.target, registered_bytes="32GiB")
        for prompt in prompts:
            with ns.match(prompt) as match:
                io.warm(match)

        def begin(number: int) -> Any:
            with ns.match(prompts[number]) as match:
                return io.load(match, self._units(self.target, tokens, number), self._event())

        def load(*, at_once: bool) -> Sample:
            self.store._shared.c.chains.forget()
            with Stopwatch() as watch:
                transfers = []
                for number in range(count):
                    transfers.append(begin(number))
                    if not at_once:
                        transfers[-1].wait(SECONDS)
                results = [transfer.wait(SECONDS) for transfer in transfers]
            if any(result is None or result.tokens != tokens for result in results):
                raise BenchError(f"loads of {tokens} tokens ended with {results}")
            return watch.sample(count * self.source.needed(tokens))

        def restore() -> Sample:
            self.store._shared.c.chains.forget()
            with Stopwatch() as watch:
                units = [self._units(self.target, tokens, number) for number in range(count)]
                transfers = [io.restore(*pair, self._event()) for pair in zip(prompts, units, strict=True)]
                results = [transfer.wait(SECONDS) for transfer in transfers]
            if any(result is None or result.tokens != tokens for result in results):
                raise BenchError(f"restores of {tokens} tokens ended with {results}")
            return watch.sample(count * self.source.needed(tokens))

        def poison() -> None:
            self.target.fill(None)

        def check() -> None:
            for number in range(count):
                self._check(tokens, number)

        rows = [
            Contender("pinned memcpy", self._memcpy(count * self.source.needed(tokens), to_host=False)),
            Contender("one after the other", partial(load, at_once=False), poison, check),
            Contender("all at once", partial(load, at_once=True), poison, check),
            Contender("all at once, restored", restore, poison, check),
        ]
        samples = interleave(rows, self.plan.rounds)
        io.close()
        self._report(f"loads of {count} prompts", tokens, "sealed", samples, "pinned memcpy")

    def _layerwise(self, ns: kvfs.Namespace, tokens: int) -> None:
        """When layer 0 may start, against the whole load."""
        io = self._attach(ns, self.target, registered_bytes="32GiB")
        prompt, units = self._tokens(tokens, 7), self._units(self.target, tokens)
        with ns.match(prompt) as match:
            io.warm(match)
        first: list[float] = []

        def load() -> Sample:
            self.store._shared.c.chains.forget()
            with Stopwatch() as watch:
                begin = time.perf_counter()
                with ns.match(prompt) as match:
                    transfer = io.load(match, units, self._event(), layerwise=True)
                    transfer.layer_ready(0).wait(SECONDS)
                    first.append(time.perf_counter() - begin)
                    transfer.wait(SECONDS)
            return watch.sample(self.source.needed(tokens))

        rows = [
            Contender("pinned memcpy", self._memcpy(self.source.needed(tokens), to_host=False)),
            Contender("in place, layer-wise", load, lambda: self.target.fill(None), lambda: self._check(tokens)),
        ]
        samples = interleave(rows, self.plan.rounds)
        io.close()
        share = [a / s.seconds for a, s in zip(first[1:], samples["in place, layer-wise"], strict=True)]
        note = f"layer 0 may start after {_text(Spread.of(share))} of the load"
        self._report("load", tokens, "sealed", samples, "pinned memcpy", note)

    def _cold(self, ns: kvfs.Namespace, tokens: int) -> None:
        nbytes = self.source.needed(tokens)

        def drop() -> None:
            self.target.fill(None)
            os.sync()
            with suppress(OSError):
                Path("/proc/sys/vm/drop_caches").write_text("1", encoding="ascii")  # as root; else per file, below
            for path in (self.path / "segments").glob("*.kvs"):
                fd = os.open(path, os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)

        fresh: list[Any] = []

        def renew() -> None:
            drop()
            fresh.append(self._attach(ns, self.target))

        def check_and_close() -> None:
            self._check(tokens)
            fresh.pop().close()

        rows = [
            Contender("cold, bare O_DIRECT, 16 threads", self._bare_direct(nbytes, 16), drop),
            Contender("cold, bare buffered, 4 threads", self._preadv(nbytes, 4), drop),
            Contender("cold load", self._load(lambda: fresh[-1], ns, tokens), renew, check_and_close),
        ]
        samples = interleave(rows, max(1, self.plan.rounds // 3))
        self._report("load", tokens, "cold", samples, "cold, bare O_DIRECT, 16 threads")

    def _beside(self, ns: kvfs.Namespace, tokens: int) -> None:
        """The slowdown of a model's work on the same GPU while loads, and while saves, follow one another."""
        table = Table(f"{self.shape}: time of a CUDA graph during transfers of {tokens} tokens, against alone")
        load_io = self._attach(ns, self.target, registered_bytes="32GiB")
        save_io = self._attach(ns, self.source)
        load = self._load(lambda: load_io, ns, tokens)
        load()

        def save() -> None:
            self.prompts += 1
            io, prompt = save_io, self._tokens(tokens, 500 + self.prompts)
            transfer = io.save(ns.plan_save(prompt), self._units(self.source, tokens), self._event(), deadline=SECONDS)
            transfer.source_free.wait(SECONDS)
            transfer.cancel(SECONDS)

        for name, graph in (("matmul 8192", self._matmul()), ("32 matrix-vector products", self._decode())):
            alone = self._replay(graph)
            for kind, work in (("loads", load), ("saves", save)):
                stop = threading.Event()

                def loop(stop: threading.Event = stop, work: Callable[[], object] = work) -> None:
                    self.torch.cuda.set_device(0)
                    while not stop.is_set():
                        work()

                thread = threading.Thread(target=loop)
                thread.start()
                busy = self._replay(graph)
                stop.set()
                thread.join()
                ratio = {p: percentile(busy, p) / percentile(alone, p) for p in (50, 99)}
                table.add(work=name, during=kind, alone_ms=percentile(alone, 50) * 1e3, median=ratio[50], p99=ratio[99])
        load_io.close()
        save_io.close()
        self.report.show(table)

    def _graph(self, work: Callable[[], object]) -> Any:
        torch = self.torch
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph

    def _matmul(self) -> Any:
        a, b = (self.torch.randn(8192, 8192, dtype=self.torch.bfloat16, device="cuda") for _ in range(2))
        return self._graph(lambda: a @ b)

    def _decode(self) -> Any:
        """The weights of 32 layers read once, a token at a time: bound by memory, many short kernels."""
        torch = self.torch
        weights = [torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda") for _ in range(32)]
        x = torch.randn(1, 4096, dtype=torch.bfloat16, device="cuda")

        def step() -> None:
            y = x
            for w in weights:
                y = y @ w

        return self._graph(step)

    def _replay(self, graph: Any) -> list[float]:
        """Seconds of each replay, by events."""
        torch = self.torch
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            marks[0].record()
            for mark in marks[1:]:
                graph.replay()
                mark.record()
        stream.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]

    def _bare_direct(self, nbytes: int, threads: int) -> Callable[[], Sample]:
        paths = sorted((self.path / "segments").glob("*.kvs"))
        view = memoryview(self.pinned.numpy())
        step = 4 << 20

        def read() -> Sample:
            files = [os.open(p, os.O_RDONLY | os.O_DIRECT) for p in paths]
            blocks = [(fd, at) for fd in files for at in range(0, os.fstat(fd).st_size - step, step)][: nbytes // step]

            def one(index: int) -> None:
                fd, at = blocks[index]
                os.preadv(fd, [view[index * step : (index + 1) * step]], at)

            with ThreadPoolExecutor(threads) as pool, Stopwatch() as watch:
                list(pool.map(one, range(len(blocks))))
            for fd in files:
                os.close(fd)
            return watch.sample(len(blocks) * step)

        return read

    def _report(
        self, what: str, tokens: int, state: str, samples: dict[str, list[Sample]], base: str, *notes: str
    ) -> None:
        table = Table(f"{self.shape}: {what} of {tokens} tokens, {state} segments; ratio to {base}", notes=list(notes))
        for name, taken in samples.items():
            table.add(way=name, **rates(taken), ratio=rate_ratio(taken, samples[base]) if name != base else None)
        self.report.show(table)


@contextmanager
def replaced(owner: type, name: str, value: object) -> Iterator[None]:
    """An attribute of a class, inside."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _text(spread: Spread) -> str:
    return f"{spread.middle:.2f} [{spread.low:.2f} {spread.high:.2f}]"
