"""The baselines: the same bytes through bare system calls, in files of the store's segment size.

Written in the steps in which the store writes: blocks allocated a quarter of a file at a time, one gathered
``pwritev`` per call and file, one buffer per page.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import xxhash

from kvfs.format.checksums import leaf_table
from tools.benchmarks.case import LEAF_BYTES, MIB, Case, Payload, cached_share, out_buffer
from tools.benchmarks.measure import BenchError, Sample, Stopwatch

IOV_MAX = 1024
ALLOCATE_STEPS = 4
WARM_READ_BYTES = 1 * MIB  # fits the core's cache, so that the checksum finds it there
COLD_READ_BYTES = 4 * MIB

touch = xxhash.xxh3_64_intdigest


class Extent(NamedTuple):
    """Where a piece of a prompt is stored."""

    file: int
    offset: int
    at: int  # offset in the prompt
    nbytes: int


def extents(case: Case, prompt: int) -> Iterator[Extent]:
    """The pieces of a prompt, cut where a file is full."""
    per_file = case.segment_bytes // case.page_bytes
    first, last = prompt * case.prompt_pages, (prompt + 1) * case.prompt_pages
    start = first
    while start < last:
        end = min(last, (start // per_file + 1) * per_file)
        yield Extent(
            start // per_file, start % per_file * case.page_bytes, (start - first) * case.page_bytes,
            (end - start) * case.page_bytes,
        )  # fmt: skip
        start = end


def file_paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.bare"))


def file_path(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}.bare"


def can_read_direct(folder: Path) -> bool:
    """Whether the file system opens files with O_DIRECT."""
    try:
        os.close(os.open(file_paths(folder)[0], os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT))
    except OSError:
        return False
    return True


def remove(folder: Path) -> None:
    for path in file_paths(folder):
        path.unlink()
    with suppress(FileNotFoundError):
        folder.rmdir()


class BareWriter:
    """Writes prompts one behind the other; ``sums`` computes the checksums that the store would."""

    def __init__(self, folder: Path, case: Case, *, sums: bool = False) -> None:
        folder.mkdir(exist_ok=True)
        self._folder, self._case, self._sums = folder, case, sums
        self._fd = self._file = -1
        self._allocated = 0

    def write(self, prompt: int, data: memoryview) -> None:
        page = self._case.page_bytes
        for extent in extents(self._case, prompt):
            self._make_room(extent)
            views = [data[at : at + page] for at in range(extent.at, extent.at + extent.nbytes, page)]
            if self._sums:
                for view in views:
                    leaf_table(view, LEAF_BYTES)
            self._gather(views, extent.offset)

    def _make_room(self, extent: Extent) -> None:
        if extent.file != self._file:
            self.close()
            path = file_path(self._folder, extent.file)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self._file, self._allocated = extent.file, 0
        end = extent.offset + extent.nbytes
        if end > self._allocated:
            step = self._allocated + self._case.segment_bytes // ALLOCATE_STEPS
            self._allocated = min(self._case.segment_bytes, max(end, step))
            os.posix_fallocate(self._fd, 0, self._allocated)

    def _gather(self, views: list[memoryview], offset: int) -> None:
        for first in range(0, len(views), IOV_MAX):
            batch = views[first : first + IOV_MAX]
            expected = sum(map(len, batch))
            if os.pwritev(self._fd, batch, offset) != expected:
                raise BenchError("pwritev was cut short: is the disk full?")
            offset += expected

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def write_all(folder: Path, case: Case, payload: Payload, *, sums: bool = False) -> Sample:
    """All prompts into fresh files."""
    watch, writer = Stopwatch(), BareWriter(folder, case, sums=sums)
    for prompt in range(case.prompts):
        data = payload.of(prompt)
        with watch:
            writer.write(prompt, data)
    writer.close()
    return watch.sample(case.size_bytes)


@dataclass
class BareRead(AbstractContextManager["BareRead"]):
    """Reads all prompts, each thread a stretch of each; with ``sums`` computes the store's checksums."""

    case: Case
    folder: Path
    threads: int
    sums: bool = False
    direct: bool = False
    read_bytes: int = WARM_READ_BYTES

    def __enter__(self) -> BareRead:
        self._stack = ExitStack()
        self._fds: dict[int, int] = {}
        for number in range(len(file_paths(self.folder))):
            self._fd(number)
        self._pool = self._stack.enter_context(ThreadPoolExecutor(self.threads))
        self._out = out_buffer(self.case.prompt_bytes)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _fd(self, number: int) -> int:
        fd = self._fds.get(number)
        if fd is None:
            flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if self.direct else 0)
            fd = self._fds[number] = os.open(file_path(self.folder, number), flags)
            self._stack.callback(os.close, fd)
        return fd

    def run(self, _order: Any = None) -> Sample:
        watch, cached = Stopwatch(), cached_share(file_paths(self.folder))
        for prompt in range(self.case.prompts):
            stretches = self._stretches(prompt)
            with watch:
                self._read_prompt(stretches)
        return watch.sample(self.case.size_bytes, cached)

    def read(self, prompt: int) -> memoryview:
        """One prompt, in the buffer that everybody uses."""
        self._read_prompt(self._stretches(prompt))
        return self._out

    def _stretches(self, prompt: int) -> list[list[Extent]]:
        pieces = [
            Extent(e.file, e.offset + at, e.at + at, min(self.read_bytes, e.nbytes - at))
            for e in extents(self.case, prompt)
            for at in range(0, e.nbytes, self.read_bytes)
        ]
        share = -(-len(pieces) // self.threads)
        return [pieces[i : i + share] for i in range(0, len(pieces), share)]

    def _read_prompt(self, stretches: list[list[Extent]]) -> None:
        if len(stretches) == 1:
            self._read_pieces(stretches[0])
        else:
            list(self._pool.map(self._read_pieces, stretches))

    def _read_pieces(self, pieces: list[Extent]) -> None:
        for file, offset, at, nbytes in pieces:
            target = self._out[at : at + nbytes]
            if os.preadv(self._fd(file), [target], offset) != nbytes:
                raise BenchError("preadv was cut short")
            if self.sums:
                leaf_table(target, LEAF_BYTES)


@dataclass
class BareView(AbstractContextManager["BareView"]):
    """Maps each prompt, touches every byte, unmaps; one thread."""

    case: Case
    folder: Path

    def __enter__(self) -> BareView:
        self._files = [path.open("rb") for path in file_paths(self.folder)]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files:
            file.close()

    def run(self, _order: Any = None) -> Sample:
        watch, cached = Stopwatch(), cached_share(file_paths(self.folder))
        for prompt in range(self.case.prompts):
            with watch:
                for extent in extents(self.case, prompt):
                    self._touch(extent)
        return watch.sample(self.case.size_bytes, cached)

    def _touch(self, extent: Extent) -> None:
        fd, page = self._files[extent.file].fileno(), self.case.page_bytes
        start = extent.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        skip = extent.offset - start
        length = skip + extent.nbytes
        mapping = mmap.mmap(fd, length, mmap.MAP_SHARED, mmap.PROT_READ, offset=start)
        with mapping, memoryview(mapping) as whole:
            for at in range(skip, length, page):
                with whole[at : at + page] as view:
                    touch(view)
