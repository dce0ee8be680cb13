"""PrefixMatch: what a lookup found, and the hold on the segments that contain it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

from kvfs.errors import ConfigError
from kvfs.index.rows import Place
from kvfs.lookup.row_hits import Hit, Hits
from kvfs.lookup.search import valid_lengths
from kvfs.pages.chunk_set import span, streaks_of
from kvfs.pages.layout import Part
from kvfs.segments.open_segments import OpenSegment
from kvfs.types import Tier

#: By group of a match, the chunks (as bits) that the page cache lacks.
AskCold: TypeAlias = "Callable[[PrefixMatch], Mapping[str, int]]"
#: Shared locks of an unclosed match end after this long, so that a forgotten one does not keep blocks allocated.
HOLD_SECONDS = 60.0


class Source(NamedTuple):
    """One stored part of a page, and where it is stored."""

    part: Part
    place: Place


class PageRef(NamedTuple):
    """One page of a match, and its tier when it was asked for."""

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
    hits: Sequence[Hit]
    run_length: int
    present: int = 0  # the chunks, as bits, that the index names; all of them unless a reader chose the pages

    @property
    def nbytes(self) -> int:
        return self.count * self.part_bytes

    def cut(self, first: int, count: int) -> GroupMatch:
        """The match of chunks [first, first + count) only; they are a subset of this one's."""
        if (first, count) == (self.first, self.count):
            return self
        runs = range(first // self.run_length, -(-(first + count) // self.run_length))
        hits = self.hits.within(runs) if isinstance(self.hits, Hits) else tuple(h for h in self.hits if h.run in runs)
        return replace(self, first=first, count=count, hits=hits, present=self.present & span(first, count))

    def for_part(self, part: Part, part_bytes: int) -> GroupMatch:
        """The match for a reader of ``part``, a rectangle within ``want``; ``part_bytes`` of it per page."""
        if part == self.want:
            return self
        return replace(self, want=part, part_bytes=part_bytes)

    def sources(self) -> dict[int, list[Source]]:
        """Chunk -> the stored parts that cover it, for the chunks of this match."""
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
    """The open segments of a match, under shared locks until ``close``, garbage collection or expiry. Thread-safe.

    Owns references to the segments (``held``, by number), whose blocks stay allocated meanwhile. ``acquire`` and
    ``release`` bracket each use; a use in progress keeps the segments beyond ``close``. The background task of the
    store closes holds at ``expires_at``.
    """

    def __init__(self, held: Mapping[int, OpenSegment], expires_at: float) -> None:
        self.held = held
        self.expires_at = expires_at
        self._lock = threading.Lock()
        self._users = 0
        self._closed = False

    def acquire(self) -> bool:
        """Begin a use, which ``release`` ends; False if the hold is closed."""
        with self._lock:
            if self._closed:
                return False
            self._users += 1
            return True

    def release(self) -> None:
        """End a use that ``acquire`` began."""
        with self._lock:
            self._users -= 1
            self._drop_unused()

    def close(self) -> None:
        """End the hold: the segments are released when no use is in progress. May be called again."""
        with self._lock:
            self._closed = True
            self._drop_unused()

    def detach(self) -> None:
        """In a forked child: forget the segments, whose descriptors belong to the parent, and its users."""
        self._lock = threading.Lock()
        self.held, self._closed, self._users = {}, True, 0

    def _drop_unused(self) -> None:
        if self._closed and not self._users:
            self.held = {}


@dataclass(frozen=True, repr=False)
class PrefixMatch:
    """The longest restorable prefix of a prompt. Picklable: one process matches, others load.

    ``tokens`` is a multiple of the page size. The match owns a hold, which keeps its pages from being reclaimed until
    ``close()``, the end of a ``with`` block, garbage collection, or HOLD_SECONDS. A match that was pickled or has
    expired still loads as long as its segments exist. Made by ``Matcher``; loaded by ``Namespace`` and its transfers.
    """

    tokens: int
    page_tokens: int
    namespace: bytes
    generation: str
    groups: tuple[GroupMatch, ...]
    segments: dict[int, bytes] = field(repr=False)
    at_us: int = 0  # time of the lookup: the access time of all that this request uses
    last_hash: bytes = field(default=b"", repr=False)  # chunk hash at its end
    tails: dict[int, int] = field(default_factory=dict, repr=False)  # end of what was published then, by segment
    hold: Hold | None = field(default=None, repr=False, compare=False)
    ask_cold: AskCold | None = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        pages = ", ".join(f"{g.count} of {g.name}" for g in self.groups) or "none"
        return f"<PrefixMatch {self.tokens} tokens, pages {pages}, {self.nbytes} bytes>"

    @property
    def chunks(self) -> int:
        """Matched chunks: ``tokens / page_tokens``."""
        return self.tokens // self.page_tokens

    @property
    def keyed(self) -> bool:
        """Whether its pages are those of keys: each is of use by itself."""
        return any(g.run_length == 1 for g in self.groups)

    @property
    def nbytes(self) -> int:
        """Bytes that loading all of it moves."""
        return sum(g.nbytes for g in self.groups)

    @property
    def pages(self) -> list[PageRef]:
        """The pages in load order, each with its current tier (the kernel is asked at this call)."""
        cold, refs = self.cold(), list[PageRef]()
        for g in self.groups:
            disk = cold[g.name]
            chunks = range(g.first, g.first + g.count)
            refs += [PageRef(g.name, c, Tier.DISK if disk >> c & 1 else Tier.HOST) for c in chunks]
        return refs

    def cold(self) -> Mapping[str, int]:
        """By group, the chunks (as bits) with a page that is on the disk only. The kernel is asked at this call."""
        if self.ask_cold is None:
            return {g.name: span(g.first, g.count) for g in self.groups}
        return self.ask_cold(self)

    def group(self, name: str) -> GroupMatch:
        """The pages of one group; KeyError if the layout has no such group."""
        for g in self.groups:
            if g.name == name:
                return g
        raise KeyError(f"no group {name!r} in this match; it has {[g.name for g in self.groups]}")

    def first_page(self, group: str) -> int:
        """Number of the first chunk whose page of ``group`` is needed (above 0 for windows and snapshots)."""
        return self.group(group).first

    def page_count(self, group: str) -> int:
        """How many pages of ``group`` a load moves, from ``first_page`` on."""
        return self.group(group).count

    def restorable(self, good: Mapping[str, int]) -> int:
        """Longest length in chunks that ``good`` (group name -> set of chunks as bits) restores."""
        return restorable(self.groups, self.chunks, good)

    def cut(self, first: int, count: int) -> PrefixMatch:
        """Of a match of keys the pages [first, first + count), under the same hold: closing one closes both."""
        if not self.keyed or not 0 <= first <= first + count <= self.chunks:
            raise ConfigError(f"{count} pages from {first} on of {self!r}: cut a match of keys, within its pages")
        return replace(self, groups=tuple(g.cut(first, count) for g in self.groups))

    def close(self) -> None:
        """Release the segments; a load in progress keeps them until its end."""
        if self.hold is not None:
            self.hold.close()

    def __enter__(self) -> PrefixMatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __bool__(self) -> bool:
        return self.tokens > 0

    def __iter__(self) -> Iterator[PageRef]:
        return iter(self.pages)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "hold": None, "ask_cold": None}


def restorable(groups: Iterable[GroupMatch], chunks: int, good: Mapping[str, int]) -> int:
    """Longest length, at most ``chunks``, that ``good`` (group name -> set of chunks as bits) restores."""
    valid = (1 << chunks + 1) - 1
    for g in groups:
        valid &= valid_lengths(good[g.name], g.need_chunks, chunks)
    return valid.bit_length() - 1


def used_ranges(hits: Iterable[Hit], run_length: int, good: int) -> list[tuple[int, int, int]]:
    """(segment, first record, count) of the records that store the chunks in ``good``; neighbours are merged."""
    ranges: list[tuple[int, int, int]] = []
    segment = first = count = 0
    for number, seq, records in _used(hits, run_length, good):
        if number == segment and first + count == seq:
            count += records
            continue
        if count:
            ranges.append((segment, first, count))
        segment, first, count = number, seq, records
    return [*ranges, (segment, first, count)] if count else ranges


def _used(hits: Iterable[Hit], run_length: int, good: int) -> Iterator[tuple[int, int, int]]:
    """``used_ranges`` before neighbours are merged."""
    stretches = hits.stretches(None) if run_length == 1 and isinstance(hits, Hits) else None
    if stretches is not None:
        for one in stretches:
            for chunk, count in streaks_of(good & span(one.chunk, one.pages)):
                yield one.segment, one.seq + chunk - one.chunk, count
        return
    for hit in hits:
        bits = hit.bits & good >> hit.run * run_length
        row = hit.row() if bits else None
        for e in row.extents if row is not None else ():
            if bits >> e.first & (1 << e.chunks) - 1:
                yield e.segment, e.seq, e.chunks
