"""What is stored: pages of an exact size, prompts with token ids of their own, random bytes that differ."""

from __future__ import annotations

import functools
import mmap
import os
import random
from array import array
from dataclasses import dataclass
from pathlib import Path

import click
import xxhash

import kvfs
from kvfs.directory.config import parse_size
from kvfs.system.files import Files
from tools.benchmarks.measure import BenchError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
#: 16 tokens of one layer with 8 KV heads of 128 bf16 numbers, K and V: 4 KiB per token and layer.
LEAF_BYTES = 64 * KIB
LAYERS_MAX = 32


class Size(click.ParamType[int]):
    """Bytes, as "256KiB"."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_size(value if isinstance(value, int) else str(value))
        except kvfs.ConfigError as exc:
            self.fail(str(exc), param, ctx)


def size_text(nbytes: int) -> str:
    """The shortest exact name of a size."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if nbytes and nbytes % unit == 0:
            return f"{nbytes // unit}{name}"
    return f"{nbytes}B"


@dataclass(frozen=True)
class Case:
    """One page size: ``prompts`` prompts of ``prompt_pages`` pages; a call moves one prompt."""

    page_bytes: int
    prompt_pages: int
    prompts: int
    segment_bytes: int
    threads: int
    seed: int

    @classmethod
    def of(cls, size: int, page_bytes: int, call_bytes: int, threads: int, seed: int) -> Case:
        if page_bytes % LEAF_BYTES or not page_bytes:
            raise click.BadParameter(f"{page_bytes} is no multiple of {LEAF_BYTES} (64KiB)", param_hint="--page")
        prompt_pages = max(1, min(call_bytes, size) // page_bytes)
        prompts = max(1, size // (prompt_pages * page_bytes))
        # eight segments and more, each with room for some pages
        wanted = max(1 * MIB, 8 * page_bytes, min(256 * MIB, size // 8))
        segment_bytes = 1 << (wanted - 1).bit_length()
        return cls(page_bytes, prompt_pages, prompts, segment_bytes, threads, seed)

    @property
    def prompt_bytes(self) -> int:
        return self.prompt_pages * self.page_bytes

    @property
    def size_bytes(self) -> int:
        return self.prompts * self.prompt_bytes

    @property
    def page_tokens(self) -> int:
        return self.layout.page_tokens

    @property
    def layout(self) -> kvfs.PageLayout:
        """bf16 GQA, 8 KV heads of 128: as many layers up to 32 as divide the page, the rest are tokens."""
        leaves = self.page_bytes // LEAF_BYTES
        layers = max(n for n in range(1, LAYERS_MAX + 1) if leaves % n == 0)
        return kvfs.PageLayout.kv(
            layers=layers, kv_heads=8, head_dim=128, dtype="bfloat16", page_tokens=16 * leaves // layers
        )

    def tokens(self, prompt: int) -> array[int]:
        """Token ids of a prompt; no two prompts share a page."""
        return tokens(self.seed, prompt, self.prompt_pages * self.page_tokens)

    def store(self, path: Path, *, verify: str = "always", scale: int = 1, mode: str = "cache") -> kvfs.Store:
        """The store of this case, with room for ``scale`` times its bytes; ``mode`` of one that is made."""
        capacity = 2 * scale * self.size_bytes + 24 * self.segment_bytes + 64 * MIB
        return kvfs.open(
            path, capacity=capacity, segment_bytes=self.segment_bytes, mode=mode, verify=verify, threads=self.threads
        )

    def namespace(self, store: kvfs.Store) -> kvfs.Namespace:
        return store.namespace("bench", self.layout, revision="bench-1")


def tokens(seed: int, prompt: int, count: int) -> array[int]:
    """``count`` reproducible token ids."""
    return array("I", random.Random(f"{seed}/{prompt}").randbytes(4 * count))


class Payload:
    """The bytes of one prompt: random, and numbered page by page for whichever prompt is next."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self.view = memoryview(mmap.mmap(-1, case.prompt_bytes))
        source = random.Random(case.seed)
        for start in range(0, case.prompt_bytes, 16 * MIB):
            piece = self.view[start : start + 16 * MIB]
            piece[:] = source.randbytes(len(piece))

    def of(self, prompt: int) -> memoryview:
        """The bytes of ``prompt``, until the next call."""
        first = prompt * self._case.prompt_pages
        for page in range(self._case.prompt_pages):
            at = page * self._case.page_bytes
            self.view[at : at + 8] = (first + page).to_bytes(8, "little")
        return self.view

    def check(self, found: memoryview, prompt: int) -> None:
        """BenchError unless ``found`` holds the bytes of ``prompt``."""
        if xxhash.xxh3_64_digest(found) != xxhash.xxh3_64_digest(self.of(prompt)):
            raise BenchError(f"prompt {prompt} came back with other bytes")


@functools.lru_cache(maxsize=1)
def out_buffer(nbytes: int) -> memoryview:
    """The one buffer that everything in this process reads into: page-aligned, touched."""
    buffer = mmap.mmap(-1, nbytes)
    for start in range(0, nbytes, mmap.PAGESIZE):
        buffer[start] = 1
    return memoryview(buffer)


# -- files --------------------------------------------------------------------------------------


def write_back(paths: list[Path]) -> None:
    """Wait until the disk has the files; they stay in the page cache."""
    for path in paths:
        with path.open("rb") as file:
            os.fdatasync(file.fileno())


def drop_cache(paths: list[Path]) -> None:
    """Write the files back, then drop their pages (and no others) from the page cache."""
    write_back(paths)
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_share(paths: list[Path]) -> float | None:
    """Share of the files' bytes in the page cache; None if the kernel does not say."""
    cached = total = 0
    for path in paths:
        with path.open("rb") as file:
            size = path.stat().st_size
            found = Files().cached_bytes(file.fileno(), 0, size)
        if found is None:
            return None
        cached, total = cached + found, total + size
    return cached / total if total else None


def allocated_bytes(paths: list[Path]) -> int:
    """Bytes of disk that the files take."""
    return sum(path.stat().st_blocks * 512 for path in paths)
