"""Replays a request trace against a real store and compares its hits with exact LRU by page.

    python -m tools.replay --trace conversation_trace.jsonl

The trace has one JSON object per line with ``timestamp`` (ms), ``input_length`` and ``hash_ids`` (chained ids of
512-token blocks; the format of the Mooncake release). Each request looks its blocks up, loads the leading ones that
are there, and stores the others; the last block of a request is left out if it is partial. A block becomes one page
of ``--page`` bytes. The clock of the store follows the timestamps, so that ages mean what they mean in the trace.

``--calls`` chooses what an engine asks of the store: ``match,get,put`` as above; ``match,put``, all blocks, where its
own cache still has the pages; ``put`` of all blocks, without a lookup: then a hit is a leading block that is stored.

Capacity is a share of the bytes of all unique blocks, and everything counts against it on our side: index, tables,
leaf checksums, the standing reserve. LRU has no such costs; "of equal LRU" is against an LRU of as many pages as the
store held at most (seen every SAMPLE requests), so that it shows the choice of pages alone. Without ``--trace`` a
synthetic trace is used.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import click

import kvfs
from kvfs.lookup.search import Prompt
from kvfs.system.files import Files

BLOCK_TOKENS = 512
CALLS = ("match,get,put", "match,put", "put")
SAMPLE = 50  # requests between two readings of what the store uses and holds


class Request(NamedTuple):
    at_ms: int
    blocks: tuple[int, ...]


class TraceClock(Files):
    """Real files under the trace's clock."""

    def __init__(self) -> None:
        self.trace_us = 1_700_000_000_000_000

    def now_us(self) -> int:
        self.trace_us += 1  # access times of one request keep their order
        return self.trace_us


def read_trace(path: Path) -> list[Request]:
    requests = []
    for line in path.read_text().splitlines():
        body = json.loads(line)
        ids = body["hash_ids"][: body["input_length"] // BLOCK_TOKENS]
        requests.append(Request(int(body["timestamp"]), tuple(ids)))
    return requests


def synthetic(seed: int, sessions: int = 400) -> list[Request]:
    """Sessions of several turns that share a few system prompts; later turns extend earlier ones."""
    rng, requests, fresh = random.Random(seed), [], iter(range(1000, 10**9))
    for _ in range(sessions):
        at, blocks = rng.randrange(3_600_000), list(range(rng.choice((0, 10, 20)), rng.choice((21, 25))))
        for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
            blocks = blocks + [next(fresh) for _ in range(rng.randrange(1, 20))]
            requests.append(Request(at, tuple(blocks)))
            at += rng.randrange(5_000, 300_000)
    return sorted(requests)


def exact_lru(requests: Sequence[Request], pages: int) -> int:
    """Leading blocks that hit if exactly the ``pages`` most recently used ones are kept."""
    kept: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in requests:
        leading = True
        for block in request.blocks:
            if block in kept:
                hits += leading
                kept.move_to_end(block)
            else:
                leading = False
                kept[block] = None
        while len(kept) > pages:
            kept.popitem(last=False)
    return hits


class Replayed(NamedTuple):
    hits: int
    written: int  # pages stored
    relocated: int
    declined: int
    used_max: int
    held_max: int  # pages
    seconds: float


def replay(
    requests: Sequence[Request], capacity: int, page_bytes: int, path: str, segments: int | None, calls: str = CALLS[0]
) -> Replayed:
    """Run the trace through a store of ``capacity`` bytes at ``path``."""
    clock, tokens = TraceClock(), 16
    layout = kvfs.PageLayout.kv(
        layers=1, kv_heads=1, head_dim=page_bytes // tokens // 4, dtype="bf16", page_tokens=tokens
    )
    assert layout.page_bytes == page_bytes
    hits = declined = used = held = 0
    begin = time.perf_counter()
    page = random.Random(0).randbytes(page_bytes)
    with kvfs.open(path, capacity=capacity, segment_bytes=segments and capacity // segments, files=clock) as store:
        ns = store.namespace("trace", layout, revision="trace-1")
        out = bytearray(1)
        base = clock.trace_us
        for number, request in enumerate(requests):
            clock.trace_us = max(clock.trace_us, base + request.at_ms * 1000)
            ids = [i for block in request.blocks for i in (block,) * tokens]
            loaded = 0
            if calls == "put":
                there = ns._matcher.stored(Prompt(ns.identity.digest, ns.chunk_hashes(ids)))  # stamps nothing
                hits += sum(1 for _ in takewhile(bool, there))
            else:
                with ns.match(ids) as match:
                    if calls == "match,get,put":
                        if match.nbytes > len(out):
                            out = bytearray(match.nbytes)
                        loaded = ns.get(match, out)
                        hits += loaded
                    else:
                        hits += match.chunks
            missing = len(request.blocks) - loaded
            if missing:
                declined += ns.put(ids, page * missing, start=loaded).declined
            if number % SAMPLE == 0:
                used = max(used, store.stats().get("used_bytes", 0))  # missing while the index does not answer
                held = max(held, sum(c.records for c in store.catalog.contents()))
        counters = store.stats()["counters"]
    seconds = time.perf_counter() - begin
    return Replayed(
        hits, counters.get("pages_stored", 0), counters.get("pages_carried", 0), declined, used, held, seconds
    )


def shares(text: str) -> Iterator[float]:
    for item in text.split(","):
        value = float(item)
        if not 0 < value <= 1000:
            raise click.BadParameter(f"{item}: give percents of the unique blocks, like 5,10,20,40")
        yield value


@click.command()
@click.option(
    "--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="JSON lines; default: synthetic"
)
@click.option("--capacity", default="5,10,20,40", show_default=True, help="percents of the unique blocks")
@click.option("--page", default=8192, show_default=True, help="bytes of a block's page")
@click.option(
    "--path", type=click.Path(path_type=Path), help="where to make the stores (default: a temporary directory)"
)
@click.option("--calls", type=click.Choice(CALLS), multiple=True, default=CALLS[:1], show_default=True)
@click.option("--segments", type=int, help="segments at the limit (default: the store's)")
@click.option("--limit", type=int, help="only the first requests")
@click.option("--seed", default=0, show_default=True)
def main(
    trace: Path | None, capacity: str, page: int, path: Path | None, calls: tuple[str, ...], segments: int | None,
    limit: int | None, seed: int,
) -> None:  # fmt: skip
    requests = (read_trace(trace) if trace else synthetic(seed))[:limit]
    total = sum(len(r.blocks) for r in requests)
    unique = len({b for r in requests for b in r.blocks})
    unbounded = exact_lru(requests, unique + 1)
    click.echo(f"{len(requests)} requests, {total} blocks, {unique} unique, unbounded {100 * unbounded / total:.2f} %")
    click.echo(
        "capacity     pages    LRU %   kvfs %   ratio   pages held   of equal LRU   write amplification   declined   "
        "used max / limit   requests/s   calls"
    )
    for percent in shares(capacity):
        for pattern in calls:
            pages = int(unique * percent / 100)
            folder = tempfile.mkdtemp(prefix="kvfs-replay-", dir=path)
            try:
                limit_bytes = pages * page
                done = replay(requests, limit_bytes, page, f"{folder}/store", segments, pattern)
            except kvfs.NoSpaceError as exc:
                sys.exit(f"{percent} %: {exc}")
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            lru, equal = exact_lru(requests, pages), exact_lru(requests, done.held_max)
            amplification = (done.written + done.relocated) / max(1, done.written)
            click.echo(
                f"{percent:6.1f} %  {pages:8d}  {100 * lru / total:6.2f}  {100 * done.hits / total:6.2f}   "
                f"{done.hits / max(1, lru):5.3f}   {done.held_max:10d}   {done.hits / max(1, equal):12.3f}   "
                f"{amplification:19.3f}   {done.declined:8d}   "
                f"{done.used_max / limit_bytes:16.3f}   {len(requests) / done.seconds:10.0f}   {pattern}"
            )


if __name__ == "__main__":
    main()
