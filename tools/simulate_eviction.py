"""Replays a request trace against ``kvfs.eviction.policy`` and against exact LRU by page; prints how they compare.

A trace is JSON lines with ``timestamp`` (ms), ``input_length`` and ``hash_ids`` (chained ids of 512-token
blocks); the id of a partial last block is not storable. Without --trace a synthetic one of growing conversations
is made. Every page is one unit of space. Eviction runs on demand, when a writer would exceed the capacity less
the standing reserve; only relocation may use the reserve. Active segments are charged in eighths.
All pages of a request get one access time; --loose-stamps gives each segment's pages a time of their own.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from kvfs.eviction.policy import RELOCATED_LIFE_US, Policy, WriteBudget
from kvfs.eviction.usage import Summary, group

Request = tuple[int, list[int]]  # us, block ids
RESERVE_SEGMENTS = 2
BLOCK_TOKENS = 512
#: Bytes of a page: large, so that the write budget's fractions of a page are not rounded away.
PAGE = 1000


class Result(NamedTuple):
    hits: int
    write_amplification: float
    used_max: int  # pages
    evictions: int
    choose_ms: float


class _Segment:
    def __init__(self, number: int, owner: int) -> None:
        self.number = number
        self.owner = owner
        self.pages: list[int] = []
        self.sealed = False
        self.summary: Summary | None = None


class Store:
    """The store's bookkeeping, reduced to what eviction sees."""

    def __init__(self, capacity: int, segments: int, writers: int, loose: bool = False) -> None:
        self.loose = loose
        self.segment_pages = max(1, capacity // segments)
        self.limit = capacity - RESERVE_SEGMENTS * self.segment_pages
        self.step = max(1, self.segment_pages // 8)
        self.budget = WriteBudget(self.segment_pages * PAGE)
        self.segments: dict[int, _Segment] = {}
        self.active: dict[int, _Segment] = {}
        self.where: dict[int, _Segment] = {}
        self.stamp: dict[int, int] = {}
        self.chunk: dict[int, int] = {}
        self.written: dict[int, int] = {}
        self.copies: set[int] = set()
        self.next = 1
        self.new = self.relocated = self.used_max = self.evictions = 0
        self.choose_s = 0.0
        self.policy = Policy()

    def used(self) -> int:
        active = sum(-(-len(s.pages) // self.step) * self.step for s in self.active.values())
        return active + (len(self.segments) - len(self.active)) * self.segment_pages

    def append(self, writer: int, page: int) -> None:
        segment = self.active.get(writer)
        if segment is None:
            segment = self.active[writer] = self.segments[self.next] = _Segment(self.next, writer)
            self.next += 1
        segment.pages.append(page)
        segment.summary = None
        self.where[page] = segment
        if len(segment.pages) >= self.segment_pages:
            segment.sealed = True
            segment.summary = None
            del self.active[writer]

    def touch(self, page: int, now: int) -> None:
        self.stamp[page] = now + self.where[page].number * 37 % 10_007 if self.loose else now
        self.where[page].summary = None

    def request(self, writer: int, now: int, pages: Sequence[int]) -> int:
        hits = next((i for i, page in enumerate(pages) if page not in self.where), len(pages))
        for page in pages:
            if page in self.where:
                self.touch(page, now)
        for i in range(hits, len(pages)):
            page = pages[i]
            if page in self.where:
                continue
            while self.used() + 1 > self.limit and len(self.segments) > len(self.active):
                self.evict(writer, now)
            # Eviction may have taken the predecessor: the rest of the prompt is declined.
            if self.used() + 1 > self.limit or (i and pages[i - 1] not in self.where):
                break
            self.stamp[page], self.written[page], self.chunk[page] = now, now, i
            self.copies.discard(page)
            self.append(writer, page)
            self.new += 1
            self.budget.stored(PAGE)
            self.used_max = max(self.used_max, self.used())
        return hits

    def summary(self, segment: _Segment) -> Summary:
        if segment.summary is None:
            pages = segment.pages
            fragments = group(
                [self.stamp[p] for p in pages],
                [PAGE] * len(pages),
                [self.chunk[p] for p in pages],
                [max(RELOCATED_LIFE_US * (p in self.copies), self.stamp[p] - self.written[p]) for p in pages],
            )
            segment.summary = Summary(segment.number, self.segment_pages * PAGE, segment.sealed, False, fragments)
        return segment.summary

    def evict(self, writer: int, now: int) -> None:
        begin = time.perf_counter()
        plan = self.policy.choose([self.summary(s) for s in self.segments.values()], now, self.budget.available)
        self.choose_s += time.perf_counter() - begin
        assert plan is not None
        victim = self.segments.pop(plan.victim)
        kept = [victim.pages[i] for i in plan.relocate]
        for page in victim.pages:
            del self.where[page]
        self.copies.update(kept)
        self.written.update(dict.fromkeys(kept, now))
        self.evictions += 1
        # The victim's file stays until its records are copied: the reserve holds both.
        for page in kept:
            self.append(writer, page)
            self.used_max = max(self.used_max, self.used() + self.segment_pages)
        self.relocated += len(kept)
        self.budget.relocated(plan.relocate_bytes)


def replay(trace: Iterable[Request], capacity: int, segments: int, writers: int, *, loose: bool = False) -> Result:
    store, hits = Store(capacity, segments, writers, loose), 0
    for number, (now, pages) in enumerate(trace):
        hits += store.request(number % writers, now + number + 1, pages)
    amplification = (store.new + store.relocated) / max(1, store.new)
    choose_ms = 1e3 * store.choose_s / max(1, store.evictions)
    return Result(hits, amplification, store.used_max, store.evictions, choose_ms)


def exact_lru(trace: Iterable[Request], capacity: int) -> int:
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for _, pages in trace:
        hits += next((i for i, page in enumerate(pages) if page not in cache), len(pages))
        for page in reversed(pages):  # the head is the most recent: tails go first
            cache[page] = None
            cache.move_to_end(page)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits


def read_trace(path: Path) -> tuple[list[Request], int]:
    """(requests, blocks asked for, partial ones included)."""
    trace, blocks = [], 0
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            ids = row["hash_ids"]
            blocks += len(ids)
            trace.append((row["timestamp"] * 1000, ids[:-1] if row["input_length"] % BLOCK_TOKENS else ids))
    return trace, blocks


def synthetic_trace(requests: int = 4000, seed: int = 1) -> tuple[list[Request], int]:
    """Conversations that share a first block, grow by turns, and end after a random number of them."""
    rng = random.Random(seed)
    trace: list[Request] = []
    open_chats: list[list[int]] = []
    fresh = 1
    for number in range(requests):
        if open_chats and rng.random() < 0.4:
            chat = open_chats.pop(rng.randrange(max(0, len(open_chats) - 200), len(open_chats)))
        else:
            chat = [0]
        grown = min(200, 1 + int(rng.paretovariate(1.2) * 4))
        chat = [*chat, *range(fresh, fresh + grown)]
        fresh += grown
        trace.append((number * 300_000, chat))
        if rng.random() < 0.7:
            open_chats.append(chat)
    return trace, sum(len(pages) for _, pages in trace)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="JSON lines; a synthetic trace if not given")
    parser.add_argument("--capacity", type=float, nargs="+", default=[5, 10, 20, 40], help="%% of the unique blocks")
    parser.add_argument("--segments", type=int, nargs="+", default=[512, 256, 128])
    parser.add_argument("--writers", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--loose-stamps", action="store_true", help="no common access time for the pages of a request")
    options = parser.parse_args(arguments)
    trace, blocks = read_trace(options.trace) if options.trace else synthetic_trace()
    unique = len({page for _, pages in trace for page in pages})
    print(f"{len(trace)} requests, {blocks} blocks, {unique} unique and storable")
    print("segments writers capacity%   LRU%  policy%  ratio  writes  used/cap  evictions  ms/choose")
    lru = {c: exact_lru(trace, int(unique * c / 100)) for c in options.capacity}
    for segments in options.segments:
        for writers in options.writers:
            for percent in options.capacity:
                capacity = int(unique * percent / 100)
                r = replay(trace, capacity, segments, writers, loose=options.loose_stamps)
                ratio = r.hits / max(1, lru[percent])
                print(
                    f"{segments:8} {writers:7} {percent:9g} {100 * lru[percent] / blocks:6.2f} "
                    f"{100 * r.hits / blocks:8.2f} {ratio:6.3f} {r.write_amplification:7.3f} "
                    f"{r.used_max / capacity:9.3f} {r.evictions:10} {r.choose_ms:10.2f}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
