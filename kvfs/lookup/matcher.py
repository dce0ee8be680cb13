"""Looking prompts up: from chunk hashes to a PrefixMatch that holds its segments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from kvfs.context import LOOKUP_SECONDS, Context
from kvfs.errors import ConfigError, IndexUnavailableError
from kvfs.index.native_session import NativeSession
from kvfs.index.session import Session
from kvfs.lookup.gaps import read_behind_gaps
from kvfs.lookup.prefix_match import HOLD_SECONDS, GroupMatch, Hold, PageRef, PrefixMatch
from kvfs.lookup.search import ROWS_PER_HOLD, Found, GroupLookup, Prompt, search
from kvfs.native.index_walker import HandOverError, MovedError
from kvfs.pages.layout import Group, PageLayout, Part
from kvfs.segments.open_segments import OpenSegment

T = TypeVar("T")
NATIVE_TRIES = 4  # beside a writer there may be a commit between any two calls


class Matcher:
    """Lookups of one namespace. Never raises for an index that cannot answer: that is a miss, and counted."""

    def __init__(
        self, context: Context, digest: bytes, layout: PageLayout, tiers: Callable[[PrefixMatch], list[PageRef]]
    ) -> None:
        self._c = context
        self._digest, self._layout = digest, layout
        self._tiers = tiers
        #: a state of the index, and the parts of groups then; replaced as a whole, since several threads look
        self._parts_known: tuple[object, dict[int, tuple[Part, ...]]] = None, {}

    def match(self, prompt: Prompt, wants: Sequence[Part]) -> PrefixMatch:
        """Longest restorable prefix; ``wants``: the rectangle wanted of each group."""
        began = self._c.files.monotonic()
        lookups, read = self.begin(prompt, wants)
        chunks = 0
        if prompt.hashes:
            try:
                chunks = search(lookups, self._layout.page_tokens, len(prompt.hashes), read)
            except IndexUnavailableError as exc:
                self.count_unavailable(exc)
        match = self.hold(lookups, chunks, read.generation, {})
        self.count(match, len(prompt.hashes), self._c.files.monotonic() - began)
        return match

    def begin(self, prompt: Prompt, wants: Sequence[Part]) -> tuple[list[GroupLookup], SearchRunner]:
        """Lookups of all groups, and what their steps are run by."""
        lookups = [GroupLookup(prompt, *pair) for pair in zip(self._layout.groups, wants, strict=True)]
        return lookups, SearchRunner(self, lookups)

    def count(self, match: PrefixMatch, chunks: int, seconds: float) -> None:
        """A lookup of so many chunks has found ``match``."""
        self._c.counters.add("lookups")
        self._c.counters.add("tokens_queried", chunks * self._layout.page_tokens)
        self._c.counters.add("tokens_matched", match.tokens)
        self._c.counters.took("match", seconds)

    def count_unavailable(self, exc: IndexUnavailableError) -> None:
        self._c.counters.add(f"lookup_unavailable_{str(exc).partition(':')[0].replace(' ', '_')}")

    def use_parts(self, session: Session | NativeSession, lookups: Sequence[GroupLookup]) -> None:
        """Tell lookups which parts their groups have."""
        for number, lookup in enumerate(lookups):
            lookup.use_parts(self._parts(session, number))

    def _parts(self, session: Session | NativeSession, number: int) -> tuple[Part, ...]:
        """Parts of a group; looked up again after every commit, of whatever process."""
        state, (known_at, known) = session.state, self._parts_known
        if known_at != state:
            known = {}
            self._parts_known = state, known
        parts = known.get(number)
        if parts is None:
            packed = session.parts(self._digest, number)
            parts = known[number] = tuple(p for p in map(_unpack_part, packed) if p is not None)
        return parts

    def read(self, function: Callable[[Session | NativeSession], T]) -> T:
        """Run a step of a lookup: in this thread by the compiled library, or else in the index thread.

        A step that hands over halfway is run again, from what it had found.
        """
        for _ in range(NATIVE_TRIES):
            native = self._c.index.native_session()
            if native is None:
                break
            try:
                return function(native)
            except MovedError:
                continue
            except HandOverError as exc:
                self._c.counters.add(f"native_{exc}")
                break
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
                lookup.found, lookup.segments, lookup.tails = Found(), {}, {}
        match = self._assemble(lookups, chunks, generation, first)
        self._add_hold(match, self.acquire(match.segments, generation), lookups)
        return match

    def hold(
        self, lookups: Sequence[GroupLookup], chunks: int, generation: str, known: Mapping[int, OpenSegment]
    ) -> PrefixMatch:
        """What was found; locks its segments, but for ``known`` ones, and is shorter where one is gone meanwhile."""
        match = self._assemble(lookups, chunks, generation)
        held = {**known, **self.acquire({n: i for n, i in match.segments.items() if n not in known}, generation)}
        if not match.segments.keys() <= held.keys():
            match = self._assemble(lookups, match.restorable(_good(match, held)), generation)
        self._add_hold(match, held, lookups)
        return match

    def acquire(self, segments: Mapping[int, bytes], generation: str) -> dict[int, OpenSegment]:
        """Those of ``segments`` (ids by number) that could be locked in time."""
        held = self._c.segments.acquire_all(segments, generation, LOOKUP_SECONDS)
        self._c.counters.add("lookup_segments_missing", len(segments) - len(held))
        return held

    def _add_hold(self, match: PrefixMatch, held: Mapping[int, OpenSegment], lookups: Sequence[GroupLookup]) -> None:
        match.hold, match._tiers = Hold(held, self._c.files.monotonic() + HOLD_SECONDS), self._tiers
        match.at_us = self._c.files.now_us()
        if match.chunks:
            match.last_hash = lookups[0].prompt.hashes[match.chunks - 1]
            self._c.access_times.note_request(match.last_hash, match.at_us)
        self._c.holds.add(match.hold)

    def _assemble(
        self, lookups: Sequence[GroupLookup], chunks: int, generation: str, chosen: Mapping[str, int] | None = None
    ) -> PrefixMatch:
        groups = []
        segments: dict[int, bytes] = {}
        tails: dict[int, int] = {}
        for number, lookup in enumerate(lookups):
            need = lookup.group.need.chunks(self._layout.page_tokens)
            first = 0 if need is None else max(0, chunks - need)
            if chosen is not None:
                first = min(first, chosen.get(lookup.group.name, chunks))
            groups.append(self.group_match(number, lookup, first, chunks))
            if chunks:
                segments.update(lookup.segments)
                later(tails, lookup.tails)
        return PrefixMatch(
            chunks * self._layout.page_tokens, self._layout.page_tokens, self._digest, generation,
            tuple(groups), segments, tails=tails,
        )  # fmt: skip

    def group_match(self, number: int, lookup: GroupLookup, first: int, end: int) -> GroupMatch:
        """Of what was found of a group, chunks [first, end)."""
        group, length = lookup.group, lookup.prompt.run_length
        runs = range(first // length, -(-end // length)) if end else range(0)
        hits = tuple(hit for run in runs for hit in lookup.found.hits.get(run, ()))
        need = group.need.chunks(self._layout.page_tokens)
        return GroupMatch(number, group.name, lookup.want, need, lookup.part_bytes, first, end - first, hits, length)

    def present(
        self, prompt: Prompt, number: int, group: Group, part: Part, first: int, end: int, *, whole: bool,
        orphans: bool = True,
    ) -> GroupLookup:  # fmt: skip
        """What is stored or being written of chunks [first, end). Unless ``whole``, ends at the first gap.

        ``orphans``: also forks in runs, other than the first such, of which nothing else is left.
        """
        lookup = GroupLookup(prompt, group, part)
        run, last = first // prompt.run_length, -(-end // prompt.run_length)

        def step(session: Session | NativeSession) -> bool:
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

        def read(function: Callable[[Session | NativeSession], T]) -> T:
            def same(session: Session | NativeSession) -> T:
                lookup.generation = lookup.generation or session.generation
                _check_generation(session, lookup.generation)
                return function(session)

            return self.read(same)

        try:
            while run < last and not read(step):
                pass
            if whole:
                read_behind_gaps(lookup, read, orphans=orphans, native=self._c.index.native_session())
        except IndexUnavailableError:
            pass  # claiming looks again
        return lookup


def later(tails: dict[int, int], others: Mapping[int, int]) -> None:
    """Add ends of what is published: they were read one after the other, and segments grow."""
    for segment, tail in others.items():
        tails[segment] = max(tails.get(segment, 0), tail)


class SearchRunner:
    """Runs the steps of a search; the first one also reads which parts there are, so that a match is one trip."""

    def __init__(self, matcher: Matcher, lookups: Sequence[GroupLookup]) -> None:
        self._matcher = matcher
        self._lookups = lookups
        self._state: object = None
        self.generation = ""

    def __call__(self, step: Callable[[Session | NativeSession], bool]) -> bool:
        def first(session: Session | NativeSession) -> bool:
            state = session.state
            if state != self._state:  # at first, or after a commit
                self._matcher.use_parts(session, self._lookups)
                self._state = state
            self.generation = self.generation or session.generation
            _check_generation(session, self.generation)
            return step(session)

        return self._matcher.read(first)


def _check_generation(session: Session | NativeSession, generation: str) -> None:
    """What was found so far names segments by number, and these mean other segments in another index."""
    if session.generation != generation:
        raise IndexUnavailableError("replaced meanwhile")


def _unpack_part(packed: bytes) -> Part | None:
    try:
        return Part.unpack(packed)
    except ConfigError:
        return None


def _good(match: PrefixMatch, held: Mapping[int, OpenSegment]) -> dict[str, int]:
    """Chunks of a match whose segments are all held, as bits."""
    good = {}
    for gm in match.groups:
        bits = 0
        for chunk, sources in gm.sources().items():
            if all(s.place.segment in held for s in sources):
                bits |= 1 << chunk
        good[gm.name] = bits
    return good
