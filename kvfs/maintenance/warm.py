"""Reads pages into the page cache ahead of traffic, and tells which are there already.

One advice per block makes the kernel read it without a copy to user space; reading the block's last page waits for
it. On the disk measured (docs/benchmarks.md) that was as fast as the best direct read and took a quarter of the CPU
of reading into a buffer.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from kvfs.catalog.catalog import Catalog, NotFoundError
from kvfs.catalog.walk import Stretch, Walk
from kvfs.context import Context
from kvfs.directory.pin_files import pinned_segments
from kvfs.format import segment as fmt
from kvfs.lookup.prefix_match import PrefixMatch
from kvfs.pages.identity import Described
from kvfs.segments.open_segments import OpenSegment
from kvfs.system.thread_pool import Pool

BLOCK_BYTES = 32 << 20  # of one advice; the fastest of 8, 16 and 32 MiB, at a third of the CPU time of 8 MiB
THREADS = 4
READ_BYTES = 1 << 20  # of one read, where the advice was not enough
SAMPLED_SEGMENTS_MAX = 64
GAP_BYTES = 64 << 10  # ranges with a smaller gap are read as one


class Range(NamedTuple):
    """Bytes of a segment."""

    segment: int  # number
    segment_id: bytes
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Warmed:
    """What was read. ``seconds`` of reading, 0 for a check."""

    nbytes: int = 0
    resident_bytes: int = 0  # in the page cache before; -1 if the kernel does not tell
    read_bytes: int = 0
    failed_bytes: int = 0  # evicted meanwhile, or the disk failed
    seconds: float = 0.0


class Warmer:
    """Chooses ranges of segments and reads them in threads. One per call."""

    def __init__(self, context: Context) -> None:
        self._c = context

    # -- what to read ------------------------------------------------------------------------

    def of_namespaces(self, wanted: Iterable[Described]) -> list[Range]:
        """All live pages of these namespaces."""
        digests = {d.digest for d in wanted}
        numbers = {c.segment for c in Catalog(self._c).contents() if c.digest in digests}
        stretches = (s for s in Walk(self._c).stretches(numbers.__contains__) if s.digest in digests)
        return [r for s in stretches for r in _ranges(s)]

    def of_prefixes(self, ids: Sequence[str]) -> list[Range]:
        """The pages of the requests that used these pages last (``ids``: digits of their hashes)."""
        keys = set()
        for ref, pages in Catalog(self._c).find_all_pages([ref.lower() for ref in ids]).items() if ids else ():
            if not pages:
                raise NotFoundError(f"no page has the id {ref!r}: give a namespace, or an id from kvfs ls NAMESPACE")
            keys |= {(p.located.digest, p.last_used_us) for p in pages if p.located is not None}
        return [r for s in Walk(self._c).stretches() if (s.digest, s.stamp_us) in keys for r in _ranges(s)]

    def of_match(self, match: PrefixMatch) -> list[Range]:
        """The pages of a match."""
        found = []
        for group in match.groups:
            for sources in group.sources().values():
                for source in sources:
                    place = source.place
                    segment_id = match.segments.get(place.segment)
                    if segment_id is not None:
                        found.append(Range(place.segment, segment_id, place.block * fmt.BLOCK, place.stored_bytes))
        return found

    def of_pins(self) -> list[Range]:
        """All bytes of the segments that pins protect."""
        pinned = pinned_segments(self._c.directory)
        rows = Catalog(self._c).segment_rows()
        return [Range(n, row.segment_id, 0, row.tail) for n, row in rows if row.segment_id in pinned]

    def hottest(self, nbytes: int) -> list[Range]:
        """The most recently used pages, up to ``nbytes``."""
        found = sorted(Walk(self._c).stretches(), key=lambda s: -s.stamp_us)
        chosen: list[Range] = []
        for stretch in found:
            each = fmt.align(stretch.stored_bytes)
            count = min(stretch.pages, nbytes // each)
            if count < 1:
                break
            chosen += _ranges(stretch._replace(pages=count))
            nbytes -= count * each
        return chosen

    def sample(self, nbytes: int) -> list[Range]:
        """Up to ``nbytes`` that the page cache lacks, from the begin of segments spread over the store."""
        rows = [(n, row) for n, row in Catalog(self._c).segment_rows() if row.tail >= BLOCK_BYTES]
        found: list[Range] = []
        for number, row in rows[:: max(1, len(rows) // SAMPLED_SEGMENTS_MAX)]:
            held = self._c.segments.acquire(number, row.segment_id, self._c.index.generation)
            if held is None:
                continue
            for at in range(0, row.tail - BLOCK_BYTES + 1, BLOCK_BYTES):
                if sum(r.nbytes for r in found) >= nbytes:
                    return found
                if self._c.files.cached_bytes(held.fd, at, BLOCK_BYTES) == 0:
                    found.append(Range(number, row.segment_id, at, BLOCK_BYTES))
        return found

    # -- reading -----------------------------------------------------------------------------

    def run(self, ranges: Sequence[Range], *, check: bool, progress: Callable[[int, int], None]) -> Warmed:
        """Read ranges; with ``check`` only count what is in the page cache. ``progress``: (bytes done, all bytes)."""
        blocks = list(_blocks(_merged(ranges)))
        total = sum(b.nbytes for b in blocks)
        began = self._c.files.monotonic()
        sums = _Sums(lambda done: progress(done, total))
        shared = iter(blocks)
        lock = threading.Lock()

        def next_block() -> Range | None:
            with lock:
                return next(shared, None)

        pool = Pool(THREADS, "kvfs-warm")
        try:
            pool.run([partial(self._loop, next_block, sums, check)] * min(THREADS, max(1, len(blocks))))
        finally:
            pool.close()
        seconds = 0.0 if check else self._c.files.monotonic() - began
        return Warmed(total, -1 if sums.unknown else sums.resident, sums.read, sums.failed, seconds)

    def _loop(self, next_block: Callable[[], Range | None], sums: _Sums, check: bool) -> None:
        while (block := next_block()) is not None:
            held = self._c.segments.acquire(block.segment, block.segment_id, self._c.index.generation)
            if held is None:
                sums.add(block.nbytes, failed=block.nbytes)
                continue
            try:
                self._one(held, block, sums, check)
            except OSError:
                sums.add(block.nbytes, failed=block.nbytes)

    def _one(self, held: OpenSegment, block: Range, sums: _Sums, check: bool) -> None:
        files = self._c.files
        resident = files.cached_bytes(held.fd, block.offset, block.nbytes)
        sums.unknown |= resident is None
        if check or resident == block.nbytes:
            sums.add(block.nbytes, resident=resident or 0)
            return
        with contextlib.suppress(OSError, ValueError):
            if files.has_large_folios():
                with files.map(held.fd, block.nbytes, block.offset) as mapping:
                    files.populate(mapping)
            else:
                files.readahead(held.fd, block.offset, block.nbytes)
                files.read(held.fd, 1, block.offset + block.nbytes - 1)
        # under memory pressure, after an error, or where advice is ignored, some of it is missing: read it all
        if (files.cached_bytes(held.fd, block.offset, block.nbytes) or 0) < block.nbytes:
            files.readahead(held.fd, block.offset, block.nbytes)
            for at in range(0, block.nbytes, READ_BYTES):
                files.read(held.fd, min(READ_BYTES, block.nbytes - at), block.offset + at)
        sums.add(block.nbytes, resident=resident or 0, read=block.nbytes - (resident or 0))


class _Sums:
    """What the threads have done so far. Thread-safe."""

    def __init__(self, progress: Callable[[int], None]) -> None:
        self._lock = threading.Lock()
        self._progress = progress
        self.done = self.resident = self.read = self.failed = 0
        self.unknown = False  # the kernel does not tell what is in the page cache

    def add(self, done: int, *, resident: int = 0, read: int = 0, failed: int = 0) -> None:
        with self._lock:
            self.done += done
            self.resident += resident
            self.read += read
            self.failed += failed
            with contextlib.suppress(OSError):
                self._progress(self.done)


def _ranges(s: Stretch) -> Iterator[Range]:
    if s.stride <= fmt.align(s.stored_bytes):
        yield Range(s.segment, s.segment_id, s.offset, (s.pages - 1) * s.stride + s.stored_bytes)
        return
    for i in range(s.pages):
        yield Range(s.segment, s.segment_id, s.offset + i * s.stride, s.stored_bytes)


def _merged(ranges: Iterable[Range]) -> Iterator[Range]:
    """In the order of segments and offsets, without overlaps; ranges with small gaps are joined."""
    current: Range | None = None
    for r in sorted(ranges, key=lambda r: (r.segment, r.offset)):
        if current is not None and r.segment == current.segment:
            end = current.offset + current.nbytes
            if r.offset <= end + GAP_BYTES:
                current = current._replace(nbytes=max(end, r.offset + r.nbytes) - current.offset)
                continue
        if current is not None:
            yield current
        current = r
    if current is not None:
        yield current


def _blocks(ranges: Iterable[Range]) -> Iterator[Range]:
    """Cut at multiples of BLOCK_BYTES in the file, so that no two threads read parts of one folio."""
    for r in ranges:
        at, end = r.offset, r.offset + r.nbytes
        while at < end:
            following = min(end, (at // BLOCK_BYTES + 1) * BLOCK_BYTES)
            yield r._replace(offset=at, nbytes=following - at)
            at = following
