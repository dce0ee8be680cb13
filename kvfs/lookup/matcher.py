"""Looking prompts up: from chunk hashes to a PrefixMatch that holds its segments."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from kvfs.context import Context
from kvfs.errors import ConfigError, IndexUnavailableError
from kvfs.index.deadlines import LOOKUP_SECONDS
from kvfs.index.native_session import NativeSession
from kvfs.index.session import Session
from kvfs.lookup.gaps import read_behind_gaps
from kvfs.lookup.prefix_match import HOLD_SECONDS, AskCold, GroupMatch, Hold, PrefixMatch, restorable, used_ranges
from kvfs.lookup.row_hits import Hits
from kvfs.lookup.search import Found, GroupLookup, Prompt, search, walk_all
from kvfs.native.index_walker import HandOverError, MovedError
from kvfs.pages.chunk_set import span
from kvfs.pages.layout import Group, PageLayout, Part
from kvfs.segments.open_segments import HeldSegments, OpenSegment

T = TypeVar("T")
NATIVE_TRIES = 4  # while others write, there may be a commit between any two native calls


class Matcher:
    """Lookups of one namespace: holds the segments of what was found, and counts. Thread-safe.

    Owns the parts that each group of the namespace has, as of the last commit. The walk over the index is delegated to
    ``search``, page tiers to ``tiers``. An index that cannot answer is never an error: it is a miss, and counted.
    """

    def __init__(self, context: Context, digest: bytes, layout: PageLayout, ask_cold: AskCold) -> None:
        self._c = context
        self._digest, self._layout = digest, layout
        self._ask_cold = ask_cold
        self.whole = [group.full for group in layout.groups]  # the parts that are whole pages
        #: state of the index, parts by group in it; replaced as a whole, because several threads look up
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
        """Lookups of all groups, and the runner of their steps."""
        lookups = [GroupLookup(prompt, *pair) for pair in zip(self._layout.groups, wants, strict=True)]
        return lookups, SearchRunner(self, dict(enumerate(lookups)))

    def count(self, match: PrefixMatch, chunks: int, seconds: float) -> None:
        """Count a lookup of ``chunks`` chunks that found ``match``."""
        self.count_tokens(chunks * self._layout.page_tokens, match.tokens)
        self._c.counters.took("match", seconds)

    def count_tokens(self, queried: int, matched: int) -> None:
        """Count a lookup of ``queried`` tokens, of which the store has ``matched`` for the caller."""
        self._c.counters.add_of(self._digest, lookups=1, tokens_queried=queried, tokens_matched=matched)

    def count_unavailable(self, exc: IndexUnavailableError) -> None:
        self._c.counters.add(f"lookup_unavailable_{str(exc).partition(':')[0].replace(' ', '_')}")

    def use_parts(self, session: Session | NativeSession, lookups: Mapping[int, GroupLookup]) -> None:
        """Tell lookups, by group number, which parts their groups have."""
        for number, lookup in lookups.items():
            lookup.use_parts(self._parts(session, number))

    def _parts(self, session: Session | NativeSession, number: int) -> tuple[Part, ...]:
        """Parts of a group; read again after every commit of any process."""
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
        """Run a step of a lookup: natively in this thread, or else in the index thread.

        A step that the native library hands over is run again from what it had found.
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
        """Whether each chunk of the only group is stored; all False if the index cannot answer in time."""
        (group,), count = self._layout.groups, len(prompt.hashes)
        bits = self.present(prompt, 0, group, self.whole[0], 0, count, whole=True).found.present
        return [bool(bits >> n & 1) for n in range(count)]

    def select(
        self, prompt: Prompt, first: Mapping[str, int], found: Sequence[GroupLookup] | None = None
    ) -> PrefixMatch:
        """A match of all chunks of ``prompt`` for a reader that has chosen: of group g the pages from ``first[g]`` on.

        The reader has the earlier pages that a group needs, so these are not looked up. Pages that are not stored are
        part of the match nevertheless, and fail when they are loaded. ``found``: lookups of a prompt that begins with
        this one, which are repeated only if there was a commit since.
        """
        chunks = len(prompt.hashes)
        lookups = found if found is not None and self._are_current(found) else [
            self.present(prompt, number, group, self.whole[number], first.get(group.name, chunks), chunks, whole=True)
            for number, group in enumerate(self._layout.groups)
        ]  # fmt: skip
        generation = next((x.generation for x in reversed(lookups) if x.generation), "")
        for lookup in lookups:
            if lookup.generation != generation:  # its segment numbers name other segments in this generation
                lookup.found, lookup.segments, lookup.tails = Found(), {}, {}
        pages = self._pages(lookups, chunks, first)
        return self._match(lookups, chunks, generation, pages, self.acquire(pages.segments, generation))

    def _are_current(self, lookups: Sequence[GroupLookup]) -> bool:
        """Whether nothing was committed since. False where only the index thread could tell."""
        native = self._c.index.native_session()
        try:
            state = None if native is None else native.now_state
        except HandOverError:
            return False
        return state is not None and all(lookup.state == state for lookup in lookups)

    def hold(
        self, lookups: Sequence[GroupLookup], chunks: int, generation: str, known: Mapping[int, OpenSegment]
    ) -> PrefixMatch:
        """The match of what was found. Locks its segments other than ``known``; shorter if one has been dropped."""
        pages = self._pages(lookups, chunks)
        held: Mapping[int, OpenSegment]
        if known:
            held = {**known, **self.acquire({n: i for n, i in pages.segments.items() if n not in known}, generation)}
        else:
            held = self.acquire(pages.segments, generation)
        if any(number not in held for number in pages.segments):
            chunks = restorable(pages.groups, chunks, _in_segments(pages.groups, held))
            pages = self._pages(lookups, chunks)
        return self._match(lookups, chunks, generation, pages, held)

    def acquire(self, segments: Mapping[int, bytes], generation: str) -> HeldSegments:
        """Those of ``segments`` (ids by number) that could be locked in time."""
        held = self._c.segments.acquire_all(segments, generation, LOOKUP_SECONDS)
        self._c.counters.add("lookup_segments_missing", len(segments) - len(held))
        return held

    def _pages(self, lookups: Sequence[GroupLookup], chunks: int, chosen: Mapping[str, int] | None = None) -> _Pages:
        """The pages that ``chunks`` chunks need; in a match that a reader has ``chosen``, those from its chunks on."""
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
        return _Pages(tuple(groups), segments, tails)

    def _match(
        self, lookups: Sequence[GroupLookup], chunks: int, generation: str, pages: _Pages,
        held: Mapping[int, OpenSegment],
    ) -> PrefixMatch:  # fmt: skip
        """A match that holds ``held``; its time becomes the access time of the request."""
        match = PrefixMatch(
            chunks * self._layout.page_tokens, self._layout.page_tokens, self._digest, generation, pages.groups,
            pages.segments, at_us=self._c.files.now_us(),
            last_hash=lookups[0].prompt.hashes[chunks - 1] if chunks else b"", tails=pages.tails,
            hold=Hold(held, self._c.files.monotonic() + HOLD_SECONDS), ask_cold=self._ask_cold,
        )  # fmt: skip
        if chunks:
            self._c.access_times.note_request(match.last_hash, match.at_us)
        self._c.holds.add(match.hold)
        return match

    def note_use(self, lookup: GroupLookup, at_us: int, noted: int = 0) -> None:
        """Set the access time of the pages that ``lookup`` found, for a request that uses them without a load; not of
        the chunks ``noted``."""
        chunks = lookup.found.present & ~noted
        hits = Hits(lookup.found.hits, range(lookup.prompt.runs())) if chunks else ()
        for segment, seq, count in used_ranges(hits, lookup.prompt.run_length, chunks):
            self._c.access_times.stamp(lookup.segments[segment], seq, [at_us] * count)

    def group_match(self, number: int, lookup: GroupLookup, first: int, end: int) -> GroupMatch:
        """Of what was found of a group, chunks [first, end)."""
        group, length = lookup.group, lookup.prompt.run_length
        runs = range(first // length, -(-end // length)) if end else range(0)
        hits = Hits(dict(lookup.found.hits), runs)
        need = group.need.chunks(self._layout.page_tokens)
        present = lookup.found.present & span(first, end - first)
        return GroupMatch(
            number, group.name, lookup.want, need, lookup.part_bytes, first, end - first, hits, length, present
        )  # fmt: skip

    def present(
        self, prompt: Prompt, number: int, group: Group, part: Part, first: int, end: int, *, whole: bool,
        orphans: bool = True, prefix: bool = False,
    ) -> GroupLookup:  # fmt: skip
        """What is stored or being written of chunks [first, end). Unless ``whole``, ends at the first gap.

        ``orphans``: as in ``read_behind_gaps``. ``prefix``: from chunk 0 on, all chunks before the first that is not
        stored, and perhaps others. Incomplete if the index cannot answer in time: a claim looks again.
        """
        lookup = GroupLookup(prompt, group, part)
        read = SearchRunner(self, {number: lookup})
        with contextlib.suppress(IndexUnavailableError):
            ended = walk_all(lookup, first, end, read, to_first_gap=not whole, prefix=prefix)
            if whole and not ended and lookup.gapped:
                read_behind_gaps(lookup, read, orphans=orphans, native=self._c.index.native_session())
        return lookup


class _Pages(NamedTuple):
    """What a match consists of, before its segments are held: pages by group, segment ids and published ends."""

    groups: tuple[GroupMatch, ...]
    segments: dict[int, bytes]
    tails: dict[int, int]


def later(tails: dict[int, int], others: Mapping[int, int]) -> None:
    """Merge the published ends of segments, by number; the larger one is the later one, since segments only grow."""
    for segment, tail in others.items():
        tails[segment] = max(tail, tails.get(segment, tail))


class SearchRunner:
    """Runs the steps of a search under the gate, all of them in one generation of the index.

    The first step also reads which parts there are, so that a short match costs one pass through the gate; a later one
    reads them again if there was a commit.
    """

    def __init__(self, matcher: Matcher, lookups: Mapping[int, GroupLookup]) -> None:
        self._matcher = matcher
        self._lookups = lookups  # by group number
        self._state: object = None
        self.generation = ""

    def __call__(self, step: Callable[[Session | NativeSession], T]) -> T:
        def checked(session: Session | NativeSession) -> T:
            state = session.state
            if self._state != state:
                self._begin(session)
                self._state = state
                for lookup in self._lookups.values():
                    lookup.state = None if lookup.rows_read else state
            if session.generation != self.generation:  # in another index, segment numbers name other segments
                raise IndexUnavailableError("replaced meanwhile")
            return step(session)

        return self._matcher.read(checked)

    def _begin(self, session: Session | NativeSession) -> None:
        self._matcher.use_parts(session, self._lookups)
        self.generation = self.generation or session.generation
        for lookup in self._lookups.values():
            lookup.generation = self.generation


def _unpack_part(packed: bytes) -> Part | None:
    try:
        return Part.unpack(packed)
    except ConfigError:
        return None


def _in_segments(groups: Sequence[GroupMatch], held: Mapping[int, OpenSegment]) -> dict[str, int]:
    """By group, the chunks (as bits) whose segments are all held."""
    good = {}
    for gm in groups:
        bits = 0
        for chunk, sources in gm.sources().items():
            if all(s.place.segment in held for s in sources):
                bits |= 1 << chunk
        good[gm.name] = bits
    return good
