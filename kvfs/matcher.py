"""Looking prompts up: from chunk hashes to a PrefixMatch that holds its segments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from kvfs.context import LOOKUP_SECONDS, Context
from kvfs.errors import ConfigError, IndexUnavailableError
from kvfs.index.session import Session
from kvfs.layout import Group, PageLayout, Part
from kvfs.lookup import ROWS_PER_HOLD, Found, GroupLookup, Prompt, search
from kvfs.match import HOLD_SECONDS, GroupMatch, Hold, PageRef, PrefixMatch
from kvfs.presence import read_behind_gaps
from kvfs.segment_files import Held

T = TypeVar("T")


class Matcher:
    """Lookups of one namespace. Never raises for an index that cannot answer: that is a miss, and counted."""

    def __init__(
        self, context: Context, digest: bytes, layout: PageLayout, tiers: Callable[[PrefixMatch], list[PageRef]]
    ) -> None:
        self._c = context
        self._digest = digest
        self._layout = layout
        self._tiers = tiers
        self._parts_of: dict[int, tuple[Part, ...]] = {}  # by group, at ``_parts_at``; for the index thread alone
        self._parts_at: object = None

    def match(self, prompt: Prompt, wants: Sequence[Part]) -> PrefixMatch:
        """Longest restorable prefix; ``wants``: the rectangle wanted of each group."""
        began = self._c.files.monotonic()
        lookups = [GroupLookup(prompt, *pair) for pair in zip(self._layout.groups, wants, strict=True)]
        chunks = 0
        generation = ""
        if prompt.hashes:
            try:
                read = _FirstParts(self, lookups)
                chunks = search(lookups, self._layout.page_tokens, len(prompt.hashes), read)
                generation = read.generation
            except IndexUnavailableError as exc:
                self._c.counters.add(f"lookup_unavailable_{str(exc).partition(':')[0].replace(' ', '_')}")
        self._c.counters.add("lookups")
        self._c.counters.add("tokens_queried", len(prompt.hashes) * self._layout.page_tokens)
        match = self._hold(lookups, chunks, generation)
        self._c.counters.took("match", self._c.files.monotonic() - began)
        return match

    def use_parts(self, session: Session, lookups: Sequence[GroupLookup]) -> None:
        """Tell lookups which parts their groups have."""
        for number, lookup in enumerate(lookups):
            lookup.use_parts(self._parts(session, number))

    def _parts(self, session: Session, number: int) -> tuple[Part, ...]:
        """Parts of a group; looked up again after every commit, of whatever process."""
        if self._parts_at != session.state:
            self._parts_at, self._parts_of = session.state, {}
        parts = self._parts_of.get(number)
        if parts is None:
            packed = session.parts(self._digest, number)
            parts = self._parts_of[number] = tuple(p for p in map(_unpack_part, packed) if p is not None)
        return parts

    def read(self, function: Callable[[Session], T]) -> T:
        return self._c.index.read(function, LOOKUP_SECONDS)

    def stored(self, prompt: Prompt) -> list[bool]:
        """Whether each chunk of the only group is stored. An index that cannot answer in time knows of none."""
        (group,), count = self._layout.groups, len(prompt.hashes)
        bits = self.present(prompt, 0, group, group.full, 0, count, whole=True).found.present
        return [bool(bits >> n & 1) for n in range(count)]

    def select(self, prompt: Prompt, first: Mapping[str, int]) -> PrefixMatch:
        """A match of all chunks of ``prompt`` for a reader who has chosen: of group g the pages from ``first[g]`` on.

        Of the pages before them that a group needs nothing is looked up: the reader has them. What is not stored
        is part of the match all the same, and fails when it is loaded.
        """
        chunks = len(prompt.hashes)
        lookups = [
            self.present(prompt, number, group, group.full, first.get(group.name, chunks), chunks, whole=True)
            for number, group in enumerate(self._layout.groups)
        ]
        generation = next((x.generation for x in reversed(lookups) if x.generation), "")
        for lookup in lookups:
            if lookup.generation != generation:  # numbers meant other segments then
                lookup.found, lookup.segments = Found(), {}
        match = self._assemble(lookups, chunks, generation, first)
        self._add_hold(match, self._acquire(match), lookups)
        return match

    def _hold(self, lookups: Sequence[GroupLookup], chunks: int, generation: str) -> PrefixMatch:
        """Lock the segments of what was found; where one is gone meanwhile, shorten."""
        match = self._assemble(lookups, chunks, generation)
        held = self._acquire(match)
        if len(held) < len(match.segments):
            match = self._assemble(lookups, match.restorable(_good(match, held)), generation)
        self._add_hold(match, held, lookups)
        self._c.counters.add("tokens_matched", match.tokens)
        return match

    def _acquire(self, match: PrefixMatch) -> dict[int, Held]:
        held = self._c.segments.acquire_all(match.segments, match.generation, LOOKUP_SECONDS)
        self._c.counters.add("lookup_segments_missing", len(match.segments) - len(held))
        return held

    def _add_hold(self, match: PrefixMatch, held: Mapping[int, Held], lookups: Sequence[GroupLookup]) -> None:
        match.hold, match._tiers = Hold(held, self._c.files.monotonic() + HOLD_SECONDS), self._tiers
        match.at_us = self._c.files.now_us()
        if match.chunks:
            match.last_hash = lookups[0].prompt.hashes[match.chunks - 1]
            self._c.recency.note_request(match.last_hash, match.at_us)
        self._c.holds.add(match.hold)

    def _assemble(
        self, lookups: Sequence[GroupLookup], chunks: int, generation: str, chosen: Mapping[str, int] | None = None
    ) -> PrefixMatch:
        groups = []
        segments: dict[int, bytes] = {}
        for number, lookup in enumerate(lookups):
            need = lookup.group.need.chunks(self._layout.page_tokens)
            first = 0 if need is None else max(0, chunks - need)
            if chosen is not None:
                first = min(first, chosen.get(lookup.group.name, chunks))
            length = lookup.prompt.run_length
            runs = range(first // length, -(-chunks // length)) if chunks else range(0)
            hits = tuple(hit for run in runs for hit in lookup.found.hits.get(run, ()))
            groups.append(
                GroupMatch(number, lookup.group.name, lookup.want, need, lookup.group.part_bytes(lookup.want),
                           first, chunks - first, hits, length)
            )  # fmt: skip
            if chunks:
                segments.update(lookup.segments)
        return PrefixMatch(
            chunks * self._layout.page_tokens, self._layout.page_tokens, self._digest, generation,
            tuple(groups), segments,
        )  # fmt: skip

    def present(
        self, prompt: Prompt, number: int, group: Group, part: Part, first: int, end: int, *, whole: bool,
        orphans: bool = True,
    ) -> GroupLookup:  # fmt: skip
        """What is stored or being written of chunks [first, end). Unless ``whole``, ends at the first gap.

        ``orphans``: also forks in runs, other than the first such, of which nothing else is left.
        """
        lookup = GroupLookup(prompt, group, part)
        run, last = first // prompt.run_length, -(-end // prompt.run_length)

        def step(session: Session) -> bool:
            nonlocal run
            lookup.use_parts(self._parts(session, number))
            budget = lookup.rows_read + ROWS_PER_HOLD
            while run < last and lookup.rows_read < budget:
                end = min(last, run + budget - lookup.rows_read)
                run, found = lookup.read_runs(session, run, end, stop_at_gap=whole)
                begin, count = prompt.run(run - 1)
                wanted = (1 << count) - 1 & ~((1 << max(0, first - begin)) - 1)
                if not whole and wanted & ~(found.covered | found.claimed):
                    return True
                if not found.hits and not found.claimed:  # most likely nothing follows
                    run = lookup.next_there(session, run, last, budget)
            return run >= last

        def read(function: Callable[[Session], T]) -> T:
            def same(session: Session) -> T:
                lookup.generation = lookup.generation or session.generation
                _check_generation(session, lookup.generation)
                return function(session)

            return self.read(same)

        try:
            while run < last and not read(step):
                pass
            if whole:
                read_behind_gaps(lookup, read, orphans=orphans)
        except IndexUnavailableError:
            pass  # claiming looks again
        return lookup


class _FirstParts:
    """Runs the steps of a search; the first one also reads which parts there are, so that a match is one trip."""

    def __init__(self, matcher: Matcher, lookups: Sequence[GroupLookup]) -> None:
        self._matcher = matcher
        self._lookups = lookups
        self.generation = ""

    def __call__(self, step: Callable[[Session], bool]) -> bool:
        def first(session: Session) -> bool:
            if not self.generation:
                self._matcher.use_parts(session, self._lookups)
                self.generation = session.generation
            _check_generation(session, self.generation)
            return step(session)

        return self._matcher.read(first)


def _check_generation(session: Session, generation: str) -> None:
    """What was found so far names segments by number, and these mean other segments in another index."""
    if session.generation != generation:
        raise IndexUnavailableError("replaced meanwhile")


def _unpack_part(packed: bytes) -> Part | None:
    try:
        return Part.unpack(packed)
    except ConfigError:
        return None


def _good(match: PrefixMatch, held: Mapping[int, Held]) -> dict[str, int]:
    """Chunks of a match whose segments are all held, as bits."""
    good = {}
    for gm in match.groups:
        bits = 0
        for chunk, sources in gm.sources().items():
            if all(s.place.segment in held for s in sources):
                bits |= 1 << chunk
        good[gm.name] = bits
    return good
