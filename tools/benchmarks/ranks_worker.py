"""A rank of the benchmark of pulls, in a process of its own: calls by name come over a pipe, and results go back."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
import traceback
from array import array
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import kvfs
from kvfs.gpu import device as gpu_device
from kvfs.kernels import driver, pull
from kvfs.ranks import RankGroup
from kvfs.types import Tier
from tools.benchmarks.gpu_engine import BLOCK, SHAPES, Engine, torch_with_cuda

SECONDS = 60.0
CAPACITY = "40GiB"


def tokens_of(prompt: int, count: int) -> array[int]:
    return array("I", range(prompt * 1_000_003 % (1 << 30), prompt * 1_000_003 % (1 << 30) + count))


class Worker:
    """What the parent calls."""

    def __init__(self, rank: int, ranks: int, path: str) -> None:
        self.torch = torch_with_cuda()
        self.torch.cuda.set_device(rank)
        self.rank, self.ranks, self.path = rank, ranks, path
        self.store: Any = None
        self.opened: list[int] = []

    def start(self, shape: str, tokens: int, seed: int, name: str, copies: bool = True) -> None:
        """``copies``: with what a reader compares: the units of rank 1, and their bytes after its ``fill(seed)``."""
        self.layout, self.seed = SHAPES[shape](), seed
        self.target = Engine(self.torch, self.layout, tokens, seed + self.rank)
        self.engine = Engine(self.torch, self.layout, tokens, seed + 1) if copies else self.target
        self.engine.fill(seed)
        if self.store is None:
            self.store = kvfs.open(self.path, capacity=CAPACITY, segment_bytes="256MiB")
        self.ns = self.store.namespace(f"ranks-{name}", self.layout, "1")
        self.io = self.ns.attach(self.target.kvs, ring_bytes="1GiB")
        self.group = RankGroup(self.io, self.rank, self.ranks, name=name)

    def stop(self) -> None:
        self.group.close()
        self.io.close()
        del self.engine, self.target, self.io, self.group
        self.torch.cuda.empty_cache()

    def fill(self, seed: int | None) -> None:
        self.target.fill(seed)

    def units(self, count: int) -> dict[str, list[int]]:
        return {kv.group: self.target.units[: count // BLOCK] for kv in self.target.kvs}

    def event(self) -> Any:
        event = self.torch.cuda.Event()
        event.record()
        return event

    def peers(self) -> bool:
        return self.group.wait_for_peers(self.ranks - 1, SECONDS)

    def counters(self) -> dict[str, int]:
        return dict(self.store.stats()["counters"])

    def publish(self, prompt: int, count: int) -> float:
        """Publish a prompt; seconds until peers can find it."""
        pages = self.ns.prompt(tokens_of(prompt, count))
        begin, before = time.perf_counter(), self.counters().get("pages_published", 0)
        assert self.group.publish(list(pages.hashes), self.units(count), self.event())
        while self.counters().get("pages_published", 0) < before + pages.chunks:
            time.sleep(0.0005)
        return time.perf_counter() - begin

    def save(self, prompt: int, count: int) -> int:
        plan = self.ns.plan_save(tokens_of(prompt, count))
        result = self.io.save(plan, self.units(count), self.event(), SECONDS).wait(SECONDS)
        return result.pages if result else 0

    def pull(self, prompt: int, count: int, check: bool = True) -> dict[str, Any]:
        """One pull into poisoned units."""
        self.target.fill(None)
        pages = self.ns.prompt(tokens_of(prompt, count))
        pages.forget()
        event = self.event()
        event.synchronize()
        begin = time.perf_counter()
        plan = self.group.longest(pages)
        planned = time.perf_counter()
        result = self.group.load(plan, self.units(plan.tokens), event, SECONDS).wait(SECONDS)
        ended = time.perf_counter()
        self.torch.cuda.synchronize()
        assert result is not None
        return {
            "tokens": result.tokens, "peer": result.tiers.get(Tier.PEER, 0), "seconds": ended - planned,
            "plan": planned - begin, "nbytes": self.target.needed(count),
            "same": not check or self.target.same(self.engine, count),
        }  # fmt: skip

    def trace(self, prompt: int, count: int, rounds: int) -> dict[str, float]:
        """Where the time of a pull goes, in us: medians of ``rounds`` in a row."""
        from kvfs.ranks import group
        from kvfs.ranks import pull as pulls

        marks: dict[str, float] = {}
        stack = contextlib.ExitStack()

        def mark(owner: Any, name: str, before: str = "", after: str = "") -> None:
            plain = getattr(owner, name)

            def timed(*args: Any, **kwargs: Any) -> Any:
                if before:
                    marks.setdefault(before, time.perf_counter())
                found = plain(*args, **kwargs)
                if after:
                    marks[after] = time.perf_counter()
                return found

            setattr(owner, name, timed)
            stack.callback(setattr, owner, name, plain)

        mark(group._Load, "_enqueue", "enqueue", "enqueued")
        mark(pulls.Pull, "_leased", "lease", "leased")
        mark(gpu_device._Stream, "pull", "first launch", "last launch")
        mark(pulls.Pull, "ended", "", "last look")
        mark(pulls.Pull, "settle", "settle", "settled")
        rows: list[dict[str, float]] = []
        pages = self.ns.prompt(tokens_of(prompt, count))
        units, event = self.units(count), self.event()
        with stack:
            for _ in range(rounds):
                plan = self.group.longest(pages)
                marks.clear()
                self.torch.cuda.synchronize()
                begin = time.perf_counter()
                transfer = self.group.load(plan, units, event, SECONDS)
                marks["returned"] = time.perf_counter()
                transfer.wait(SECONDS)
                marks["done"] = time.perf_counter()
                rows.append({name: 1e6 * (at - begin) for name, at in marks.items()})
        names = sorted(rows[-1], key=lambda name: rows[-1][name])
        return {name: sorted(row[name] for row in rows)[len(rows) // 2] for name in names}

    def load(self, prompt: int, count: int) -> dict[str, Any]:
        """One load of the same prompt from the store's page cache."""
        self.target.fill(None)
        event = self.event()
        event.synchronize()
        with self.ns.match(tokens_of(prompt, count)) as match:
            planned = time.perf_counter()
            result = self.io.load(match, self.units(match.tokens), event, SECONDS).wait(SECONDS)
        ended = time.perf_counter()
        assert result is not None
        return {
            "tokens": result.tokens, "seconds": ended - planned, "nbytes": self.target.needed(count),
            "same": self.target.same(self.engine, count),
        }  # fmt: skip

    def warm(self, prompt: int, count: int) -> int:
        with self.ns.match(tokens_of(prompt, count)) as match:
            return self.io.warm(match, SECONDS)

    def programs(self, programs: int, warps: int) -> None:
        """Of the kernel that reads a peer's memory, from now on."""
        pull.PROGRAMS, pull.WARPS = programs, warps
        for stream in (self.group._lane.dma, self.group._lane.kernels):
            stream._launches.clear()  # type: ignore[attr-defined]

    def spoil(self, page: int) -> None:
        """Flip bits of a page's last layer, behind the back of what was published; or flip them back."""
        block = page * self.layout.page_tokens // BLOCK
        tensor = self.target.tensors[-1].view(self.torch.uint8)
        cells = tensor.select(1 if tensor.dim() == 5 and tensor.shape[0] == 2 else 0, self.target.units[block])
        cells.bitwise_xor_(1)
        self.torch.cuda.synchronize()

    # -- one copy of the same bytes ------------------------------------------------------------

    def offer(self, nbytes: int) -> tuple[bytes, int]:
        """A handle of plain memory, and the offset in it."""
        self.plain = self.torch.empty(nbytes, dtype=self.torch.uint8, device="cuda")
        start, _ = driver.allocation_of(self.plain.data_ptr())
        return driver.export(start), self.plain.data_ptr() - start

    def take(self, handle: bytes, offset: int, nbytes: int) -> None:
        self.there = driver.open_peer(handle) + offset
        self.opened.append(self.there - offset)
        self.here = self.torch.empty(nbytes, dtype=self.torch.uint8, device="cuda")
        self.stream = self.torch.cuda.Stream()

    def drop(self) -> None:
        """Unmap and free what ``offer`` and ``take`` made."""
        for start in self.opened:
            driver.close_peer(start)
        self.opened.clear()
        for name in ("plain", "here"):
            if hasattr(self, name):
                delattr(self, name)
        self.torch.cuda.empty_cache()

    def memcpy(self, nbytes: int) -> float:
        """Seconds of one copy from the peer by the copy engine, its end polled as that of a pull."""
        cuda = ctypes.CDLL("libcuda.so.1")
        event = self.torch.cuda.Event()
        begin = time.perf_counter()
        code = cuda.cuMemcpyDtoDAsync_v2(
            ctypes.c_uint64(self.here.data_ptr()), ctypes.c_uint64(self.there), ctypes.c_size_t(nbytes),
            ctypes.c_void_p(self.stream.cuda_stream),
        )  # fmt: skip
        assert code == 0, f"CUDA error {code}"
        event.record(self.stream)
        while not event.query():
            time.sleep(20e-6)
        return time.perf_counter() - begin

    # -- a source that evicts -------------------------------------------------------------------

    def churn(self, prompts: int, count: int, seconds: float) -> dict[str, Any]:
        """For so long: retract one of ``prompts`` prompts, overwrite its units, publish it again.

        Prompt p has units of its own, and all of its bytes are p.
        """
        end, rounds, forced = time.monotonic() + seconds, 0, 0
        per = count // BLOCK
        hashes = {p: list(self.ns.prompt(tokens_of(p, count)).hashes) for p in range(2 * prompts)}
        shown = dict(enumerate(range(prompts)))  # place -> prompt
        for place, prompt in shown.items():
            self._write(place, per, prompt)
            self.group.publish(hashes[prompt], self._place(place, per), self.event())
        while time.monotonic() < end and not os.path.exists(f"{self.path}.stop"):
            place = rounds % prompts
            forced += not self.group.retract(self._place(place, per), timeout=1.0)
            shown[place] = shown[place] + prompts if shown[place] < prompts else shown[place] - prompts
            self._write(place, per, shown[place])
            self.group.publish(hashes[shown[place]], self._place(place, per), self.event())
            rounds += 1
            time.sleep(0.004)
        return {"rounds": rounds, "forced": forced}

    def _place(self, place: int, per: int) -> dict[str, list[int]]:
        return {kv.group: self.target.units[place * per : (place + 1) * per] for kv in self.target.kvs}

    def _write(self, place: int, per: int, value: int) -> None:
        there = list(self.target.units[place * per : (place + 1) * per])
        ids = self.torch.tensor(there, dtype=self.torch.int64, device="cuda")
        for tensor in self.target.tensors:
            dim = 1 if tensor.dim() == 5 and tensor.shape[0] == 2 else 0
            tensor.view(self.torch.uint8).index_fill_(dim, ids, value % 251 + 1)

    def pull_many(self, prompts: int, count: int, pulls: int) -> dict[str, Any]:
        """``pulls`` pulls of prompts that a peer evicts meanwhile; each loaded page is compared."""
        per, torch, wrong, whole, short, none, longest = count // BLOCK, self.torch, 0, 0, 0, 0, 0.0
        page_blocks, number, attempts = max(1, self.layout.page_tokens // BLOCK), 0, 0
        units = {kv.group: self.target.units[:per] for kv in self.target.kvs}
        chains = [self.ns.prompt(tokens_of(p, count)) for p in range(2 * prompts)]
        ids = torch.tensor(list(self.target.units[:per]), dtype=torch.int64, device="cuda")
        times: list[float] = []
        while number < pulls and none < 50 * pulls:
            attempts += 1
            prompt = attempts * 7 % (2 * prompts)
            event = self.event()
            begin = time.perf_counter()
            plan = self.group.longest(chains[prompt])
            if not plan.tokens:
                none += 1
                continue
            number += 1
            some = {g: mine[: plan.chunks * page_blocks] for g, mine in units.items()}
            result = self.group.load(plan, some, event, 1.0).wait(SECONDS)
            times.append(time.perf_counter() - begin)
            assert result is not None
            whole += result.tokens == count
            short += result.tokens < plan.tokens
            if result.tokens:
                tensor = self.target.tensors[number % len(self.target.tensors)]
                dim = 1 if tensor.dim() == 5 and tensor.shape[0] == 2 else 0
                there = tensor.view(torch.uint8).index_select(dim, ids[: result.tokens // BLOCK])
                wrong += not bool((there == prompt % 251 + 1).all())
                tensor.view(torch.uint8).index_fill_(dim, ids, 250)
        times.sort()
        longest = times[-1]
        open(f"{self.path}.stop", "w").close()
        return {
            "pulls": pulls,
            "wrong": wrong,
            "whole": whole,
            "short": short,
            "none": none,
            "longest": longest,
            "median": times[len(times) // 2],
        }

    def pull_until_gone(self, prompt: int, count: int, seconds: float) -> dict[str, Any]:
        """Pulls while the source is killed: the longest one, and how many brought what."""
        end, longest, whole, none, last = time.monotonic() + seconds, 0.0, 0, 0, 0
        units = self.units(count)
        while time.monotonic() < end:
            pages = self.ns.prompt(tokens_of(prompt, count))
            pages.look()
            begin = time.perf_counter()
            plan = self.group.longest(pages)
            page_blocks = max(1, self.layout.page_tokens // BLOCK)
            some = {g: ids[: plan.chunks * page_blocks] for g, ids in units.items()}
            if plan.tokens:
                result = self.group.load(plan, some, self.event(), 5.0).wait(SECONDS)
                last = result.tokens if result else 0
                whole += last == count
            else:
                none, last = none + 1, 0
                time.sleep(0.001)
            plan.close()
            longest = max(longest, time.perf_counter() - begin)
        return {"whole": whole, "none": none, "longest": longest, "last": last, "counters": {
            k: v for k, v in self.counters().items() if "pull" in k or "peer" in k
        }}  # fmt: skip


def serve(connection: Connection, rank: int, ranks: int, path: str, extra: str = "") -> None:
    """The process of a rank."""
    module, _, name = (extra or "tools.benchmarks.ranks_worker:Worker").partition(":")
    try:
        worker = getattr(__import__(module, fromlist=[name]), name)(rank, ranks, path)
        connection.send((True, None))
    except Exception:
        connection.send((False, traceback.format_exc()))
        return
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = (True, getattr(worker, method)(*arguments))
        except Exception:
            answer = (False, traceback.format_exc())
        with contextlib.suppress(BrokenPipeError):
            connection.send(answer)


__all__: Sequence[str] = ["Worker", "serve", "tokens_of"]
