"""Saves and loads of a model's pages against bare loops over files of the same size, in turns.

Each round writes a new file and a new prompt, then reads both from the page cache and from the disk. Ratios are taken
within a round, so that a machine whose speed changes changes both sides. Every loaded prompt is compared once with what
was saved. A disk cache below the kernel, such as that of a virtual machine's host, may still be warm in the cold reads.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import NamedTuple

from kvfs.errors import ConfigError, KvfsError
from kvfs.namespace import Namespace
from kvfs.pages.layout import PageLayout
from kvfs.store import open_store

PIECE_BYTES = 8 << 20  # of one system call of the bare loops
PAGE_TOKENS = 64
MATCHES = 20  # lookups per round


class Profile(NamedTuple):
    """A model's KV cache. ``about``: for people."""

    about: str
    layout: PageLayout


def profiles() -> dict[str, Profile]:
    """Layouts of models that are often served, by name; bf16."""
    return {
        "8b": Profile("8B, GQA: 32 layers, 8 KV heads of 128", _gqa(32)),
        "70b": Profile("70B, GQA: 80 layers, 8 KV heads of 128", _gqa(80)),
        "mla": Profile(
            "671B, MLA: 61 layers of 512 + 64",
            PageLayout.mla(
                layers=61, kv_lora_rank=512, rope_dim=64, dtype="bfloat16", page_tokens=PAGE_TOKENS
            ),
        ),
    }  # fmt: skip


def _gqa(layers: int) -> PageLayout:
    return PageLayout.kv(layers=layers, kv_heads=8, head_dim=128, dtype="bfloat16", page_tokens=PAGE_TOKENS)


class Ratio(NamedTuple):
    """Rates of the store in GB/s, and its share of the bare loop's rate within a round: minimum, median, maximum."""

    rate: tuple[float, float, float]
    of_bare: tuple[float, float, float]


@dataclass
class Result:
    """What was measured, with prompts of ``tokens`` tokens of ``token_bytes`` bytes each."""

    tokens: int
    token_bytes: int
    save: Ratio
    load: Ratio
    load_cold: Ratio
    match_seconds: tuple[float, float, float]
    rounds: int

    def break_even_tokens(self, prefill: float, *, cold: bool, link: float | None = None) -> int | None:
        """From how many tokens on a load is faster than computing ``prefill`` tokens per second; None: never.

        A load costs a lookup and its bytes at the median rate, and with ``link`` (GB/s) a copy to a GPU after it.
        """
        gain = 1 / prefill - 1 / self.tokens_per_second(cold=cold, link=link)
        return None if gain <= 0 else max(1, round(self.match_seconds[1] / gain))

    def tokens_per_second(self, *, cold: bool, link: float | None = None) -> float:
        seconds_per_gb = 1 / (self.load_cold if cold else self.load).rate[1] + (1 / link if link else 0.0)
        return 1e9 / seconds_per_gb / self.token_bytes


@dataclass
class _Times:
    bare: list[float] = field(default_factory=list)
    store: list[float] = field(default_factory=list)

    def take(self, bare: Callable[[], None], store: Callable[[], None], before: Callable[[], object] = int) -> None:
        """Time both, one after the other; ``before`` each of them."""
        for times, run in ((self.bare, bare), (self.store, store)):
            before()
            times.append(_timed(run))

    def ratio(self, nbytes: int) -> Ratio:
        return Ratio(
            _spread([nbytes / 1e9 / s for s in self.store]),
            _spread([b / s for b, s in zip(self.bare, self.store, strict=True)]),
        )


def measure(
    folder: str, layout: PageLayout, nbytes: int, rounds: int, progress: Callable[[int, int], None], seed: int = 1
) -> Result:
    """Measure in the empty directory ``folder``, with prompts of about ``nbytes`` bytes.

    Needs about ``nbytes`` times rounds * 2 of the disk. Raises KvfsError if a page is not stored or loaded.
    """
    page_bytes = layout.groups[0].part_bytes(layout.groups[0].full)
    pages = max(1, nbytes // page_bytes)
    tokens, size = pages * PAGE_TOKENS, pages * page_bytes
    draw = random.Random(seed)
    payload = memoryview(draw.randbytes(page_bytes) * pages)
    out = memoryview(bytearray(size))
    save, load, cold, matches = _Times(), _Times(), _Times(), list[float]()
    with open_store(os.path.join(folder, "store"), capacity=4 * rounds * size + (1 << 30), counted=False) as store:
        ns = store.namespace("bench", layout, "bench")
        for number in range(rounds + 1):  # the first round warms up: caches, threads, memory of the host
            bare = os.path.join(folder, f"bare-{number}")
            prompt = [draw.randrange(1, 1 << 31) for _ in range(tokens)]
            kept = save, load, cold, matches
            if not number:
                kept = _Times(), _Times(), _Times(), list[float]()
            kept[0].take(partial(_write, bare, payload), partial(_put, ns, prompt, payload, pages))
            _sync(folder)
            kept[3].extend(_timed(partial(_match, ns, prompt)) for _ in range(MATCHES))
            read, get = partial(_read, bare, out), partial(_get, ns, prompt, out, pages)
            kept[1].take(read, get)
            kept[2].take(read, get, before=partial(_drop, folder))
            if out != payload:
                raise KvfsError("the loaded bytes are not those that were saved")
            os.unlink(bare)
            progress(number + 1, rounds + 1)
    return Result(
        tokens,
        page_bytes // PAGE_TOKENS,
        save.ratio(size),
        load.ratio(size),
        cold.ratio(size),
        _spread(matches),
        rounds,
    )


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    return min(values), median(values), max(values)


def _timed(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _match(ns: Namespace, prompt: Sequence[int]) -> None:
    ns.match(prompt).close()


def _put(ns: Namespace, prompt: Sequence[int], payload: memoryview, pages: int) -> None:
    done = ns.put(prompt, payload)
    if done.stored != pages:
        raise ConfigError(f"only {done.stored} of {pages} pages were stored ({done.reason}): is the disk full?")


def _get(ns: Namespace, prompt: Sequence[int], out: memoryview, pages: int) -> None:
    with ns.match(prompt) as match:
        loaded = ns.get(match, out)
    if loaded != pages:
        raise KvfsError(f"only {loaded} of {pages} pages were loaded")


def _write(path: str, payload: memoryview) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        for at in range(0, len(payload), PIECE_BYTES):
            os.pwrite(fd, payload[at : at + PIECE_BYTES], at)
    finally:
        os.close(fd)


def _read(path: str, out: memoryview) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        for at in range(0, len(out), PIECE_BYTES):
            os.preadv(fd, [out[at : at + PIECE_BYTES]], at)
    finally:
        os.close(fd)


def _files(folder: str) -> list[str]:
    segments = os.path.join(folder, "store", "segments")
    found = [os.path.join(segments, name) for name in os.listdir(segments)]
    return found + [os.path.join(folder, name) for name in os.listdir(folder) if name.startswith("bare-")]


def _sync(folder: str) -> None:
    for path in _files(folder):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(fd)
        finally:
            os.close(fd)


def _drop(folder: str) -> None:
    """Drop the pages of these files from the page cache; they are written back already."""
    for path in _files(folder):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
