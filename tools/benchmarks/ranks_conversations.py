"""Conversations on two ranks, with and without pulls: ``python -m tools.benchmarks.ranks --part conversations``.

USERS users keep a conversation each; each turn goes to a rank at random, as a router without affinity sends it. A rank
has its own prefix cache of blocks, as an engine has, evicted by use. What it does not have it pulls, loads from the
store, or computes: the matrix products of 32 layers of an 8B model's size for as many tokens, without attention, and
then bytes that depend on the prefix. Compared are the tokens that are computed with those of one GPU cache as large as
both, replayed over the same turns.
"""

from __future__ import annotations

import random
import time
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from tools.benchmarks.gpu_engine import BLOCK
from tools.benchmarks.ranks_worker import SECONDS, Worker

USERS, TURNS, FIRST, QUESTION, ANSWER, SYSTEM = 24, 10, 2048, 512, 256, 1024
POOL_TOKENS = 262_144  # of each rank, more than all conversations have
LAYERS, HIDDEN, INNER = 32, 4096, 14336
CHUNK = 2048  # tokens that are computed at once
WAYS = ("neither", "store", "pulls")


class EngineWorker(Worker):
    """A rank that serves turns."""

    def open(self, way: str, seed: int) -> None:
        """``way``: what it does with a prefix that it lacks."""
        self.start("gqa16", POOL_TOKENS * 4 // 5, seed, way, False)
        self.way = way
        self.before = self.counters()
        torch = self.torch
        self.free = list(self.target.units)
        self.cached: OrderedDict[bytes, int] = OrderedDict()  # chunk hash -> unit, by use
        if not hasattr(self, "weights"):
            shapes = [(HIDDEN, HIDDEN * 3 // 2), (HIDDEN, HIDDEN), (HIDDEN, 2 * INNER), (INNER, HIDDEN)]
            self.weights = [torch.randn(*s, dtype=torch.bfloat16, device="cuda") * 0.01 for s in shapes]
        self._compute(CHUNK)

    def unreachable(self) -> None:
        """As where the GPUs cannot reach each other."""
        for instance in list(self.group._memories):
            self.group._refused[instance] += 1  # so that it is not opened again
            self.group._sources.pop(instance)
        self.group._publications.put(self.group._look_around)

    def _compute(self, tokens: int) -> None:
        torch = self.torch
        for at in range(0, tokens, CHUNK):
            count = min(CHUNK, tokens - at)
            x = torch.ones(count, HIDDEN, dtype=torch.bfloat16, device="cuda")
            wide = torch.ones(count, INNER, dtype=torch.bfloat16, device="cuda")
            for _ in range(LAYERS):
                x @ self.weights[0]
                x @ self.weights[1]
                x @ self.weights[2]
                wide @ self.weights[3]
        torch.cuda.synchronize()

    def _take(self, count: int) -> list[int]:
        """Free units; what was used least recently is evicted, once no peer reads it."""
        lacking = count - len(self.free)
        if lacking > 0:
            old = [self.cached.popitem(last=False)[1] for _ in range(lacking)]
            self.group.retract({kv.group: old for kv in self.target.kvs}, timeout=1.0)
            self.free += old
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def _write(self, hashes: Sequence[bytes], units: Sequence[int]) -> None:
        """Bytes that depend on the prefix, so that a reader can compare them."""
        torch = self.torch
        ids = torch.tensor(list(units), device="cuda")
        values = torch.tensor([h[0] for h in hashes], dtype=torch.uint8, device="cuda")
        for tensor in self.target.tensors:
            raw = tensor.view(torch.uint8)
            raw[:, ids] = values.view(1, -1, *[1] * (raw.dim() - 2))

    def turn(self, tokens: Sequence[int]) -> dict[str, Any]:
        """One request: seconds until the first token, tokens that were computed."""
        begin = time.perf_counter()
        pages = self.ns.prompt(array("I", tokens))
        hashes = list(pages.hashes)
        own = 0
        while own < len(hashes) and hashes[own] in self.cached:
            self.cached.move_to_end(hashes[own])
            own += 1
        units = [self.cached[h] for h in hashes[:own]]
        loaded, names = own, [kv.group for kv in self.target.kvs]
        if self.way == "pulls":
            pages.look()
            plan = self.group.longest(pages, first=own, leave=1)
            units += self._take(len(hashes) - own)
            if plan.chunks > own:
                result = self.group.load(plan, dict.fromkeys(names, units), self.event(), SECONDS).wait(SECONDS)
                loaded = max(own, result.tokens // self.layout.page_tokens if result else 0)
            plan.close()
        elif self.way == "store":
            with self.ns.match(array("I", tokens), leave=1) as match:
                units += self._take(len(hashes) - own)
                if match.chunks > own:
                    result = self.io.load(
                        match, dict.fromkeys(names, units), self.event(), SECONDS, own * self.layout.page_tokens
                    ).wait(SECONDS)  # fmt: skip
                    loaded = max(own, result.tokens // self.layout.page_tokens if result else 0)
        else:
            units += self._take(len(hashes) - own)
        computed = len(tokens) - loaded * self.layout.page_tokens
        self._compute(computed)
        seconds = time.perf_counter() - begin
        wrong = self._wrong(hashes[own:loaded], units[own:loaded])
        self._write(hashes[loaded:], units[loaded:])
        self.cached.update(zip(hashes[own:], units[own:], strict=True))
        event = self.event()
        if self.way != "neither" and loaded < len(hashes):
            missing = {g: list(range(loaded, len(hashes))) for g in names}
            pages.look()
            self.io.save(pages.plan(missing), dict.fromkeys(names, units), event, SECONDS).source_free.wait(SECONDS)
        if self.way == "pulls":
            self.group.publish(hashes, dict.fromkeys(names, units), event, first=own)
        return {"seconds": seconds, "computed": computed, "pulled": loaded - own, "wrong": wrong}

    def _wrong(self, hashes: Sequence[bytes], units: Sequence[int]) -> int:
        if not hashes:
            return 0
        torch = self.torch
        ids = torch.tensor(list(units), device="cuda")
        values = torch.tensor([h[0] for h in hashes], dtype=torch.uint8, device="cuda")
        tensor = self.target.tensors[-1].view(torch.uint8)[:, ids]
        return int((tensor != values.view(1, -1, *[1] * (tensor.dim() - 2))).any())


def turns(seed: int) -> list[tuple[int, list[int]]]:
    """(rank's dice, prompt) of each request, in order."""
    dice = random.Random(seed)
    system = [dice.randrange(1 << 16) for _ in range(SYSTEM)]
    histories = [system + [dice.randrange(1 << 16) for _ in range(FIRST)] for _ in range(USERS)]
    found = []
    for _ in range(TURNS):
        for user in dice.sample(range(USERS), USERS):
            histories[user] = histories[user] + [dice.randrange(1 << 16) for _ in range(QUESTION)]
            found.append((dice.randrange(1 << 30), histories[user]))
            histories[user] = histories[user] + [dice.randrange(1 << 16) for _ in range(ANSWER)]
    return found


def shared_cache(requests: Sequence[tuple[int, list[int]]], blocks: int) -> int:
    """Tokens that one cache of so many blocks would compute."""
    cached: OrderedDict[int, None] = OrderedDict()
    computed = 0
    for _, tokens in requests:
        own = chain = 0
        whole = True
        for at in range(0, len(tokens) // BLOCK * BLOCK, BLOCK):
            chain = hash((chain, tuple(tokens[at : at + BLOCK])))
            whole = whole and chain in cached and at + BLOCK < len(tokens)
            own += whole
            cached[chain] = None
            cached.move_to_end(chain)
        while len(cached) > blocks:
            cached.popitem(last=False)
        computed += len(tokens) - own * BLOCK
    return computed


def run(path: str, *, unreachable: bool = False, seed: int = 1) -> None:
    from tools.benchmarks.ranks import Rank, both, say

    requests = turns(seed)
    ideal = shared_cache(requests, 2 * POOL_TOKENS // BLOCK)
    worker = "tools.benchmarks.ranks_conversations:EngineWorker"
    pair = [Rank(rank, 2, path, worker) for rank in (0, 1)]
    results = {}
    for way in ("pulls",) if unreachable else WAYS:
        both(pair, "open", way, seed)  # a namespace of its own
        if way == "pulls" and not all(both(pair, "peers")):
            say(row="conversations", way=way, error="the ranks do not reach each other")
        if unreachable:
            both(pair, "unreachable")
        rows = [pair[dice % 2].call("turn", tokens) for dice, tokens in requests]
        times = sorted(row["seconds"] for row in rows[USERS:])
        results[way] = sum(row["computed"] for row in rows)
        total = sum(len(tokens) for _, tokens in requests)
        say(
            row="conversations", way=way + (", unreachable" if unreachable else ""), requests=len(rows),
            tokens=total, computed=results[way], of_shared_cache=results[way] / ideal,
            hit_rate=1 - results[way] / total, ttft_p50_ms=1000 * times[len(times) // 2],
            ttft_p99_ms=1000 * times[len(times) * 99 // 100], wrong=sum(row["wrong"] for row in rows),
            counters={
                name: n
                for name, n in pair[0].call("counters").items()
                if any(word in name for word in ("pull", "publ", "peer"))
            },
        )  # fmt: skip
        both(pair, "stop")
