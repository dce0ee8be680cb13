"""PrefixMatch: what a lookup found, and the hold on the segments where it lies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from kvfs.index.rows import Place
from kvfs.lookup.search import Hit, valid_lengths
from kvfs.pages.layout import Part
from kvfs.segments.open_segments import OpenSegment
from kvfs.types import Tier

HOLD_SECONDS = 60.0


class Source(NamedTuple):
    """One part of one page: where it lies."""

    part: Part
    place: Place


class PageRef(NamedTuple):
    """One page of a match."""

    group: str
    chunk: int
    tier: Tier


@dataclass(frozen=True)
class GroupMatch:
    """The pages of one group that the matched length needs: chunks [first, first + count)."""

    number: int
    name: str
    want: Part
    need_chunks: int | None
    part_bytes: int  # of the wanted part of one page
    first: int
    count: int
    hits: tuple[Hit, ...]
    run_length: int

    @property
    def nbytes(self) -> int:
        return self.count * self.part_bytes

    def cut(self, first: int, count: int) -> GroupMatch:
        """The same, for chunks [first, first + count) of it only."""
        if (first, count) == (self.first, self.count):
            return self
        runs = range(first // self.run_length, -(-(first + count) // self.run_length))
        return replace(self, first=first, count=count, hits=tuple(hit for hit in self.hits if hit.run in runs))

    def for_part(self, part: Part, part_bytes: int) -> GroupMatch:
        """The same, for a reader who wants ``part``, which the rectangle of this match contains."""
        if part == self.want:
            return self
        return replace(self, want=part, part_bytes=part_bytes)

    def sources(self) -> dict[int, list[Source]]:
        """Chunk -> the parts that cover it, for the chunks of this match."""
        found: dict[int, list[Source]] = {}
        last = self.first + self.count
        for hit in self.hits:
            row = hit.row()
            if row is None:
                continue
            base = hit.run * self.run_length
            for slot, place in row.places():
                if hit.bits >> slot & 1 and self.first <= base + slot < last:
                    found.setdefault(base + slot, []).append(Source(hit.part, place))
        return found


class Hold:
    """Shared locks on the segments of a match, until released, dropped or expired."""

    def __init__(self, held: Mapping[int, OpenSegment], expires_at: float) -> None:
        self.held = dict(held)
        self.expires_at = expires_at
        self._lock = threading.Lock()
        self._users = 0
        self._closed = False

    def enter(self) -> bool:
        """Begin to read; False if the hold is over."""
        with self._lock:
            if self._closed:
                return False
            self._users += 1
            return True

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            self._finish()

    def release(self) -> None:
        """End the hold; a reader in progress finishes first."""
        with self._lock:
            self._closed = True
            self._finish()

    def detach(self) -> None:
        """In a forked child: the descriptors are the parent's."""
        self._lock = threading.Lock()
        self.held, self._closed, self._users = {}, True, 0

    def _finish(self) -> None:
        if self._closed and not self._users:
            self.held = {}


@dataclass
class PrefixMatch:
    """The longest restorable prefix of a prompt. Picklable: one process matches, others load.

    ``tokens`` is a multiple of the page size. The match keeps its pages from being reclaimed until ``close()``,
    the end of a ``with`` block, garbage collection, or HOLD_SECONDS; a match that was pickled or has expired
    still loads, as long as its segments are there.
    """

    tokens: int
    page_tokens: int
    namespace: bytes
    generation: str
    groups: tuple[GroupMatch, ...]
    segments: dict[int, bytes] = field(repr=False)
    at_us: int = 0  # when it was looked up: the stamp of everything that this request uses
    last_hash: bytes = field(default=b"", repr=False)  # chunk hash at its end
    tails: dict[int, int] = field(default_factory=dict, repr=False)  # end of what was published then, by segment
    hold: Hold | None = field(default=None, repr=False, compare=False)
    _tiers: Callable[[PrefixMatch], list[PageRef]] | None = field(default=None, repr=False, compare=False)

    @property
    def chunks(self) -> int:
        return self.tokens // self.page_tokens

    @property
    def nbytes(self) -> int:
        """Bytes that loading all of it moves."""
        return sum(g.nbytes for g in self.groups)

    @property
    def pages(self) -> list[PageRef]:
        """The pages in load order, each with the tier that it lies in now (asked of the kernel at this call)."""
        if self._tiers is not None:
            return self._tiers(self)
        return [PageRef(g.name, c, Tier.DISK) for g in self.groups for c in range(g.first, g.first + g.count)]

    def group(self, name: str) -> GroupMatch:
        for g in self.groups:
            if g.name == name:
                return g
        raise KeyError(f"no group {name!r} in this match; it has {[g.name for g in self.groups]}")

    def first_page(self, group: str) -> int:
        """Number of the first chunk whose page of ``group`` is needed (later than 0 for windows and snapshots)."""
        return self.group(group).first

    def page_count(self, group: str) -> int:
        return self.group(group).count

    def restorable(self, good: Mapping[str, int]) -> int:
        """Longest length in chunks if only the chunks in ``good`` (group name -> set as bits) are really there."""
        valid = (1 << self.chunks + 1) - 1
        for g in self.groups:
            valid &= valid_lengths(good[g.name], g.need_chunks, self.chunks)
        return valid.bit_length() - 1

    def close(self) -> None:
        if self.hold is not None:
            self.hold.release()

    def __enter__(self) -> PrefixMatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __bool__(self) -> bool:
        return self.tokens > 0

    def __iter__(self) -> Iterator[PageRef]:
        return iter(self.pages)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "hold": None, "_tiers": None}


def used_ranges(hits: Iterable[Hit], run_length: int, good: int) -> list[tuple[int, int, int]]:
    """(segment, first record, count) of the records behind the chunks in ``good``; neighbours merged."""
    ranges: list[tuple[int, int, int]] = []
    for hit in hits:
        bits = hit.bits & good >> hit.run * run_length
        row = hit.row() if bits else None
        for e in row.extents if row is not None else ():
            if not bits >> e.first & (1 << e.chunks) - 1:
                continue
            if ranges and ranges[-1][0] == e.segment and sum(ranges[-1][1:]) == e.seq:
                ranges[-1] = (e.segment, ranges[-1][1], ranges[-1][2] + e.chunks)
            else:
                ranges.append((e.segment, e.seq, e.chunks))
    return ranges
