"""Walks what is stored: page rows in slices, as stretches of neighbouring pages; prefixes as they were last used.

A chunk hash does not name its predecessor, so the store cannot tell which pages form a prompt. But all pages that one
request used have one access time, and ``prefixes`` groups by it. A head that a later request used as well belongs to
that request; the rest of the earlier one then begins at ``first_chunk`` > 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from kvfs.catalog.records import Records
from kvfs.context import Context
from kvfs.format import segment as fmt
from kvfs.index.deadlines import LOOKUP_SECONDS
from kvfs.index.rows import CLAIM, parse_row
from kvfs.index.session import Session
from kvfs.pages.chunk_set import span

ROWS_PER_HOLD = 256  # index rows per transaction, so that writers wait little
PATIENCE_SECONDS = 5.0  # longest wait for the index: an inspection may wait longer than an engine
PREFIXES_MAX = 200_000  # of one listing: bounds its memory
HASH_BYTES = 32


class Stretch(NamedTuple):
    """Neighbouring pages of one namespace, group and part, at one stride in a segment and with one access time."""

    digest: bytes  # of the namespace
    group: int
    part: bytes
    segment: int
    segment_id: bytes
    seq: int  # of the first record
    pages: int
    chunk: int  # number of the first in its prompt
    offset: int
    stride: int
    stored_bytes: int  # of each
    stamp_us: int
    written_us: int
    hashes: bytes  # 32 bytes per page
    row: bytes  # key of the index row

    @property
    def nbytes(self) -> int:
        return self.pages * self.stored_bytes


@dataclass(slots=True)
class Prefix:
    """What one request used last: pages with one access time in one namespace."""

    digest: bytes
    stamp_us: int
    first_chunk: int
    last_chunk: int
    last_hash: bytes  # chunk hash of its last page: its id
    pages: int = 0
    nbytes: int = 0
    chunks: dict[int, int] = field(default_factory=dict)  # group number -> set of its chunks, as bits

    def gaps(self, groups: Iterable[int]) -> int:
        """How many chunks between its first and its last one lack a page of one of these groups."""
        whole = span(self.first_chunk, self.last_chunk + 1 - self.first_chunk)
        lacking = 0
        for group in groups:
            lacking |= whole & ~self.chunks.get(group, whole)
        return lacking.bit_count()

    def add(self, s: Stretch) -> None:
        self.chunks[s.group] = self.chunks.get(s.group, 0) | span(s.chunk, s.pages)
        last = s.chunk + s.pages - 1
        if last > self.last_chunk or not self.pages:
            self.last_chunk, self.last_hash = last, s.hashes[-HASH_BYTES:]
        self.first_chunk = min(self.first_chunk, s.chunk)
        self.pages += s.pages
        self.nbytes += s.nbytes


class Walk:
    """One walk over all page rows. ``share`` is its progress, 0 to 1: row keys are hashes, so they are spread evenly.
    ``complete`` is False if the walk ended at its deadline or at a bound."""

    def __init__(self, context: Context, *, deadline: float | None = None) -> None:
        self._c = context
        self._deadline = deadline
        self.share = 0.0
        self.complete = True

    def stretches(self, wanted: Callable[[int], bool] = lambda number: True) -> Iterator[Stretch]:
        """Live pages of the segments whose number is ``wanted``. Ends early at the deadline: see ``complete``."""
        with Records(self._c) as records:
            for rows, segments in self._slices():
                now_us = self._c.files.now_us()
                for key, value in rows:
                    row = parse_row(key, value)
                    for extent, count, hashes in row.hashed() if row is not None else ():
                        segment_id = segments.get(extent.segment)
                        if extent.flags & CLAIM or segment_id is None or not wanted(extent.segment):
                            continue
                        if extent.expires and extent.expires <= now_us // 1_000_000:
                            continue
                        found = records.locate(segment_id, extent.seq)
                        if found is None:
                            continue
                        whole = Stretch(
                            found.digest, found.entry.group, found.entry.part, extent.segment, segment_id, extent.seq,
                            count, found.entry.chunk, extent.block * fmt.BLOCK, extent.stride * fmt.BLOCK,
                            extent.stored_bytes, found.entry.written_us, found.entry.written_us, hashes, key,
                        )  # fmt: skip
                        yield from _by_stamp(whole, records.stamps(segment_id), now_us)

    def hashes(self) -> Iterator[tuple[bytes, bytes, dict[int, bytes]]]:
        """(row key, row value, ids of live segments) of each row: for a search for chunk hashes."""
        for rows, segments in self._slices():
            for key, value in rows:
                yield key, value, segments

    def _slices(self) -> Iterator[tuple[list[tuple[bytes, bytes]], dict[int, bytes]]]:
        self._c.index.read_ahead()
        start, segments = b"\0", dict[int, bytes]()
        while True:
            rows, more = self._c.index.read(partial(_slice, start=start, segments=segments), self._patience())
            if rows:
                self.share = int.from_bytes(rows[-1][0][:4], "big") / 0xFFFF_FFFF
            yield rows, segments
            if not more:
                self.share = 1.0
                return
            if self._deadline is not None and self._c.files.monotonic() >= self._deadline:
                self.complete = False
                return
            start = rows[-1][0] + b"\0"

    def _patience(self) -> float:
        """How long a read of the index may wait, in seconds."""
        left = self._deadline - self._c.files.monotonic() if self._deadline is not None else PATIENCE_SECONDS
        return min(PATIENCE_SECONDS, max(LOOKUP_SECONDS, left))


def _slice(session: Session, start: bytes, segments: dict[int, bytes]) -> tuple[list[tuple[bytes, bytes]], bool]:
    """Up to ROWS_PER_HOLD rows; ``segments`` is filled with the ids of live segments, once."""
    if not segments:
        segments.update((n, r.segment_id) for n, r in session.segments() if session.segment_alive(n))
    rows = []
    with session.txn.cursor(db=session.db.pages) as cursor:
        if cursor.set_range(start):
            for item in cursor:
                rows.append(item)
                if len(rows) == ROWS_PER_HOLD:
                    return rows, True
    return rows, False


def _by_stamp(whole: Stretch, stamps: Sequence[int], now_us: int) -> Iterator[Stretch]:
    """Cut a stretch where the access time changes."""
    used = [s if 0 < s <= now_us else whole.stamp_us for s in stamps[whole.seq : whole.seq + whole.pages]]
    used += [whole.stamp_us] * (whole.pages - len(used))
    begin = 0
    for i in range(1, whole.pages + 1):
        if i == whole.pages or used[i] != used[begin]:
            if i - begin == whole.pages:
                yield whole._replace(stamp_us=used[0])
            else:
                yield whole._replace(
                    seq=whole.seq + begin, pages=i - begin, chunk=whole.chunk + begin,
                    offset=whole.offset + begin * whole.stride, stamp_us=used[begin],
                    hashes=whole.hashes[begin * HASH_BYTES : i * HASH_BYTES],
                )  # fmt: skip
            begin = i


def prefixes(walk: Walk, wanted: Callable[[int], bool], digest: bytes | None = None) -> list[Prefix]:
    """Prefixes as last used, of one namespace or of all; at most PREFIXES_MAX (then ``walk.complete`` is false)."""
    found: dict[tuple[bytes, int], Prefix] = {}
    for s in walk.stretches(wanted):
        if digest is not None and s.digest != digest:
            continue
        key = (s.digest, s.stamp_us)
        prefix = found.get(key)
        if prefix is None:
            if len(found) >= PREFIXES_MAX:
                walk.complete = False
                break
            prefix = found[key] = Prefix(s.digest, s.stamp_us, s.chunk, s.chunk, s.hashes[-HASH_BYTES:])
        prefix.add(s)
    return list(found.values())
