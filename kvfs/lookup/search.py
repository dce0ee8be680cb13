"""Walking the index along a prompt: which chunks are stored, and which lengths they restore.

Sets of chunks are Python ints: bit i = chunk i. So a hybrid model's restorable lengths are a few shifts and ANDs
over all lengths at once, and covering a reader's rectangle by the parts that several ranks wrote is an AND over
elementary rectangles of an OR over parts.

Three walkers: ``walk_forward`` for groups that need all of their pages, ``walk_back`` for windows and snapshots,
``walk_all`` for all that is stored. Each takes ``read``, which runs a step under the gate and returns its result; a
step reads about ROWS_PER_HOLD rows and returns whether the walk is finished.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeAlias

from kvfs.index.native_session import NativeSession
from kvfs.index.rows import CLAIM, RUN, Row
from kvfs.index.session import Session
from kvfs.lookup.part_cover import useful_parts
from kvfs.lookup.row_hits import Hit, HitBlock, RunHits, hits_of
from kvfs.native.index_walker import PreparedLookup, keys_per_call
from kvfs.pages.chunk_hash import HASH_BYTES, joined, page_key, page_keys, page_prefix
from kvfs.pages.layout import Group, Part

#: Rows read in one hold of the gate: about 1 ms, for which all other processes wait.
ROWS_PER_HOLD = 256


@dataclass
class Found:
    """What the index holds of one group along a prompt."""

    present: int = 0  # chunks whose parts cover the wanted rectangle
    claimed: int = 0  # chunks that are being written
    hits: dict[int, RunHits] = field(default_factory=dict)  # by run

    def add(self, run: int, run_length: int, found: RunFound) -> None:
        self.present |= found.covered << run * run_length
        if found.claimed:
            self.claimed |= found.claimed << run * run_length
        self.hits[run] = found.hits

    def hits_of(self, run: int) -> Sequence[Hit]:
        return hits_of(run, self.hits.get(run, ()))


_Read: TypeAlias = "tuple[bytes, Row | None]"  # a row's key, and the row


class RunFound(NamedTuple):
    covered: int
    claimed: int
    hits: Sequence[Hit]
    whole: bool  # every chunk is covered


@dataclass(frozen=True)
class Prompt:
    """Chunk hashes of a prompt in one namespace. ``run_length`` is 1 for an engine's keys: they have no order."""

    digest: bytes
    hashes: Sequence[bytes]
    run_length: int = RUN

    @property
    def keyed(self) -> bool:
        """Whether its pages are named by keys: each has an index row of its own, and none needs another."""
        return self.run_length == 1

    @property
    def joined(self) -> bytes:
        """The hashes, concatenated."""
        return joined(self.hashes)

    def key(self, group: Group, part: Part, chunk: int) -> bytes:
        """Row key: page key of the chunk, then the packed part."""
        return page_key(self.digest, group.name, self.hashes[chunk]) + part.pack()

    def runs(self) -> int:
        return -(-len(self.hashes) // self.run_length)

    def run(self, number: int) -> tuple[int, int]:
        """(first chunk, count) of a run."""
        first = number * self.run_length
        return first, min(self.run_length, len(self.hashes) - first)


class GroupLookup:
    """The lookup of one group of a prompt, for a reader of the rectangle ``want``.

    Owns what was found so far. Which runs are read, and when, is up to a walker; the rows come from its session.
    """

    def __init__(self, prompt: Prompt, group: Group, want: Part) -> None:
        self.group = group
        self.want = want
        self.part_bytes = group.part_bytes(want)
        self.found = Found()
        self.rows_read = 0
        self.generation = ""  # of the index that was read
        self.state: object = None  # of it, if all that was read is of one commit
        self.segments: dict[int, bytes] = {}  # ids of the segments that contain hits, by number
        self.tails: dict[int, int] = {}  # end of what is published in each of them
        self.gapped: list[int] = []  # runs that were read and lack chunks
        self._useful = useful_parts(want, ())
        self._prepared: PreparedLookup | None = None
        self.extend(prompt)

    def extend(self, prompt: Prompt) -> None:
        """Continue with ``prompt``, which begins with the previous one; what was found stays."""
        self.prompt = prompt
        # one block of memory for the index thread: the hashes are in the cache of the caller's core, not in its own
        self._hashes = prompt.joined
        self._prepared = None

    @cached_property
    def _page_key(self) -> Callable[[bytes], bytes]:
        return page_keys(self.prompt.digest, self.group.name)

    def use_parts(self, known: tuple[Part, ...]) -> None:
        """Set the parts that the namespace has; those that help are read, the most useful first."""
        useful = useful_parts(self.want, known)
        if useful is not self._useful:
            self._useful, self._prepared = useful, None

    @property
    def parts(self) -> Sequence[Part]:
        """The parts that help."""
        return self._useful.parts

    def read_run(self, session: Session | NativeSession, run: int, *, stop_at_gap: bool) -> RunFound:
        """Look up one run in all useful parts, until they cover it."""
        return self.read_runs(session, run, run + 1, stop_at_gap=stop_at_gap)[1]

    def read_runs(
        self, session: Session | NativeSession, run: int, end: int, *, stop_at_gap: bool
    ) -> tuple[int, RunFound]:
        """Look up runs [run, end), up to the first that one row does not cover; (next run, result of the last one).

        Usually one row covers a run, so that case does no bookkeeping.
        """
        if isinstance(session, NativeSession):
            return self._walk(session, run, end, stop_at_gap=stop_at_gap)
        found, length, hits, whole = self.found, self.prompt.run_length, tuple[Hit, ...](), 0
        parts, first_is_enough = self._useful.parts, self._useful.first_is_enough
        for number in range(run, end):
            first = number * length
            wanted = self._hashes[HASH_BYTES * first : HASH_BYTES * (first + length)]
            count = len(wanted) // HASH_BYTES
            whole = (1 << count) - 1
            key, row = self._read_row(session, 0, first) if parts else (b"", None)
            if row is None or not first_is_enough or not self._is_whole(session, row, wanted, count):
                head = (key, row) if parts else None
                result = self._read_parts(session, number, wanted, whole, stop_at_gap, head)
                found.add(number, length, result)
                if not result.whole:
                    self.gapped.append(number)
                return number + 1, result
            found.present |= whole << first
            found.hits[number] = hits = (Hit(number, parts[0], key, row.value, whole, row),)
        return end, RunFound(whole, 0, hits, True)

    def _prepare(self) -> PreparedLookup:
        """The arguments that all calls of the native library share."""
        if self._prepared is None:
            prompt, useful = self.prompt, self._useful
            prefix = page_prefix(prompt.digest, self.group.name)
            self._prepared = PreparedLookup(
                self._hashes, prompt.run_length, prefix, useful.packed, useful.cells, useful.first_is_enough
            )
        return self._prepared

    def _walk(self, session: NativeSession, run: int, end: int, *, stop_at_gap: bool) -> tuple[int, RunFound]:
        """``read_runs`` in one native call, up to the first run that is not whole. HandOverError changes nothing."""
        found, length, parts = self.found, self.prompt.run_length, self._useful.parts
        if not parts:
            session.check_last()
            found.hits[run] = ()
            self.gapped.append(run)
            return run + 1, RunFound(0, 0, (), False)
        walked = session.walk(self._prepare(), run, end, ROWS_PER_HOLD, stop_at_gap=stop_at_gap)
        self.rows_read += walked.rows_read
        for segment, segment_id, tail in walked.segments:
            self.tails[segment] = tail
            self.segments[segment] = segment_id
        last = walked.end - 1
        block = HitBlock(walked.rows, walked.values, parts)
        for number in range(run, walked.end):
            found.hits[number] = block
        covered, claimed = walked.covered, walked.claimed[-1] if walked.claimed else 0
        # all runs before the last one are whole
        found.present |= (covered << (last - run) * length | (1 << (last - run) * length) - 1) << run * length
        for number, bits in enumerate(walked.claimed, run):
            found.claimed |= bits << number * length
        whole = covered == (1 << self.prompt.run(last)[1]) - 1
        if not whole:
            self.gapped.append(last)
        return walked.end, RunFound(covered, claimed, block.of(last) if not whole else (), whole)

    def forked(self, session: NativeSession, runs: Sequence[int]) -> list[int]:
        """Those of ``runs`` (ascending) in which a chunk other than the first one has a row of its own."""
        length, found, at = self.prompt.run_length, list[int](), 0
        while at < len(runs) and length > 1 and self.parts:
            end = at + 1
            while end < len(runs) and runs[end] == runs[end - 1] + 1:
                end += 1
            there = self._heads(session, runs[at], runs[end - 1] + 1, 1)
            found += [run for n, run in enumerate(runs[at:end]) if 1 in there[n * length + 1 : (n + 1) * length]]
            at = end
        return found

    def _heads(self, session: NativeSession, run: int, end: int, stride: int) -> bytes:
        """Whether every ``stride``-th chunk of runs [run, end) has a row of its own: a byte each, 0 or 1."""
        length = self.prompt.run_length
        first, last = run * length, min(end * length, len(self.prompt.hashes))
        step = stride * keys_per_call(len(self.parts))
        return b"".join(
            session.walker.there(self._prepare(), at, stride, -(-(min(last, at + step) - at) // stride))
            for at in range(first, last, step)
        )

    def next_present(self, session: Session | NativeSession, run: int, end: int, budget: int) -> int:
        """The next run in [run, end) whose first chunk has a row, else ``end``; those before it lack all chunks.

        Asks for keys in bulks of growing size, two keys counted as a row; ends early when ``rows_read`` reaches
        ``budget``.
        """
        length, parts, count = self.prompt.run_length, self._useful.packed, 4
        if not parts:
            return end
        if isinstance(session, NativeSession):
            end = min(end, run + keys_per_call(len(parts)))
            heads = self._heads(session, run, end, length)
            self.rows_read += max(1, len(heads) * len(parts) // 2)
            found = heads.find(1)
            end = end if found < 0 else run + found
            self.gapped += range(run, end)
            return end
        while run < end and self.rows_read < budget:
            runs = range(run, min(end, run + max(1, min(count, 2 * ROWS_PER_HOLD // len(parts)))))
            pages = [self._page_key(self.prompt.hashes[number * length]) for number in runs]
            there = set(session.keys_there([page + part for page in pages for part in parts]))
            self.rows_read += max(1, len(pages) * len(parts) // 2)
            for page in pages:
                if there and any(page + part in there for part in parts):
                    return run
                self.gapped.append(run)
                run += 1
            count *= 2
        return run

    def has_some(self, run: int) -> bool:
        """Whether any chunk of a run has been found, or is being written."""
        first, count = self.prompt.run(run)
        return bool(self.found.hits_of(run) or self.found.claimed >> first & (1 << count) - 1)

    def keys_within(self, run: int) -> list[bytes]:
        """Keys of the rows that chunks of a run, other than its first one, may have of their own."""
        first, count = self.prompt.run(run)
        pages = map(self._page_key, self.prompt.hashes[first + 1 : first + count])
        return [page + part for page in pages for part in self._useful.packed]

    def _read_row(self, session: Session, part: int, chunk: int) -> _Read:
        key = self._page_key(self.prompt.hashes[chunk]) + self._useful.packed[part]
        self.rows_read += 1
        return key, session.row(key)

    def _is_whole(self, session: Session, row: Row, wanted: bytes, count: int) -> bool:
        """Whether a row has all ``count`` chunks of a run, all of them live."""
        if row.matches(wanted, count) != (1 << count) - 1:
            return False
        for e in row.extents:
            if e.first < count:
                segment_id = session.live_in(e)
                if segment_id is None:
                    return False
                self._note_segment(session, e.segment, segment_id)
        return True

    def _note_segment(self, session: Session, segment: int, segment_id: bytes) -> None:
        self.tails[segment] = session.tails[segment]
        self.segments[segment] = segment_id  # last: a thread that finds the id finds the tail as well

    def _read_parts(
        self, session: Session, run: int, wanted: bytes, whole: int, stop_at_gap: bool, head: _Read | None
    ) -> RunFound:
        """``head``: the row of the run's first chunk in the first part, if it was read."""
        live: list[int] = []
        claimed, covered = 0, 0
        hits: list[Hit] = []
        for part in range(len(self.parts)):
            bits, claims, new = self._read_rows(session, part, run, wanted, stop_at_gap, head)
            head = None
            live.append(bits)
            claimed |= claims
            hits += new
            covered = self._cover(live, whole)
            if covered == whole:
                break
        return RunFound(covered, claimed, hits, covered == whole)

    def _read_rows(
        self, session: Session, part: int, run: int, wanted: bytes, stop_at_gap: bool, head: _Read | None
    ) -> tuple[int, int, list[Hit]]:
        """Live and claimed chunks of part number ``part`` in the rows of a run; follows forks."""
        first, count = self.prompt.run(run)
        live = claimed = seen = 0
        hits = []
        unread = (1 << count) - 1  # chunks whose own row, if they head one, has not been read
        while left := unread & ~seen:
            j = (left & -left).bit_length() - 1
            unread &= -2 << j
            key, row = self._read_row(session, part, first + j) if head is None else head
            head = None
            if row is not None:
                matched = row.matches(wanted, count)
                new_live, new_claimed = self._live_and_claimed(session, row, matched & ~live)
                if new_live:
                    hits.append(Hit(run, self.parts[part], key, row.value, new_live, row))
                live |= new_live
                claimed |= new_claimed & ~live
                seen |= live | claimed
            if not seen >> j & 1 and stop_at_gap:
                break
        return live, claimed, hits

    def _live_and_claimed(self, session: Session, row: Row, matched: int) -> tuple[int, int]:
        live = claimed = 0
        for e in row.extents:
            bits = ((1 << e.chunks) - 1 << e.first) & matched
            if not bits:
                continue
            segment_id = session.live_in(e)
            if segment_id is not None:
                live |= bits
                self._note_segment(session, e.segment, segment_id)
            elif e.flags & CLAIM and session.claim_holds(e):
                claimed |= bits
        return live, claimed

    def _cover(self, live: Sequence[int], whole: int) -> int:
        """Chunks whose every elementary rectangle is in some live part."""
        if self._useful.first_is_enough and live[0] == whole:
            return whole
        covered = whole
        for parts in self._useful.cells:
            union = 0
            for index in parts:
                if index < len(live):
                    union |= live[index]
            covered &= union
        return covered


def prefix_length(bits: int) -> int:
    """Number of consecutive one bits from bit 0."""
    return (~bits & bits + 1).bit_length() - 1


def valid_lengths(present: int, chunks: int | None, lengths: int) -> int:
    """Set of lengths (bit L, 0 <= L <= ``lengths``) for which the last ``chunks`` chunks are present; None: all."""
    everything = (1 << lengths + 1) - 1
    if chunks is None or chunks >= lengths:  # a window wider than the prompt needs all of it
        return everything & (1 << prefix_length(present) + 1) - 1
    shifted = present << chunks | (1 << chunks) - 1  # chunks before the first count as present
    span = 1
    while span < chunks:
        step = min(span, chunks - span)
        shifted &= shifted >> step
        span += step
    return shifted & everything


def search(lookups: Sequence[GroupLookup], page_tokens: int, lengths: int, read: Callable[..., bool]) -> int:
    """Longest restorable length in chunks, at most ``lengths``; fills ``found`` of each lookup."""
    full = [x for x in lookups if x.group.need.kind == "all"]
    best = lengths
    for lookup in full:
        best = min(best, walk_forward(lookup, best, read))
        if not best:
            return 0
    return walk_back([x for x in lookups if x not in full], page_tokens, best, read)


def walk_forward(lookup: GroupLookup, lengths: int, read: Callable[..., bool], begin: int = 0) -> int:
    """Leading chunks, at most ``lengths``, of a group that needs all; the first ``begin`` are known to be stored."""
    run_length = lookup.prompt.run_length
    runs = -(-lengths // run_length)
    position = begin // run_length
    lookup.found.present &= (1 << position * run_length) - 1  # what is read again may have been dropped

    def step(session: Session | NativeSession) -> bool:
        nonlocal position
        budget = lookup.rows_read + ROWS_PER_HOLD
        while position < runs and lookup.rows_read < budget:
            end = min(runs, position + budget - lookup.rows_read)
            position, found = lookup.read_runs(session, position, end, stop_at_gap=True)
            if not found.whole:
                return True
        return position >= runs

    while not read(step):
        pass
    return min(lengths, prefix_length(lookup.found.present))


def walk_back(lookups: Sequence[GroupLookup], page_tokens: int, lengths: int, read: Callable[..., bool]) -> int:
    """Longest length, at most ``lengths``, of windows and snapshots.

    Only the chunks just before a candidate length are read, the longest candidate first.
    """
    if not lookups or not lengths:
        return lengths
    run_length = lookups[0].prompt.run_length
    needs = [x.group.need.chunks(page_tokens) or 1 for x in lookups]
    run = (lengths - 1) // run_length
    best = 0

    def step(session: Session | NativeSession) -> bool:
        nonlocal run, best
        budget = sum(x.rows_read for x in lookups) + ROWS_PER_HOLD
        while run >= 0 and sum(x.rows_read for x in lookups) < budget:
            for lookup in lookups:
                lookup.read_run(session, run, stop_at_gap=False)
            valid = (1 << lengths + 1) - 1
            for lookup, chunks in zip(lookups, needs, strict=True):
                valid &= valid_lengths(lookup.found.present, chunks, lengths)
            # lengths whose windows begin before this run are not decided yet, but all of them are shorter
            decided = valid >> run * run_length + max(needs) << run * run_length + max(needs)
            if decided or run == 0:
                best = (decided or valid).bit_length() - 1
                return True
            run -= 1
        return False

    while not read(step):
        pass
    return best


def walk_all(
    lookup: GroupLookup,
    first: int,
    end: int,
    read: Callable[[Callable[[Session | NativeSession], bool]], bool],
    *,
    to_first_gap: bool,
    prefix: bool = False,
) -> bool:
    """What is stored or being written of chunks [first, end), except behind gaps: ``lookup.gapped`` lists these runs.

    ``to_first_gap``: ends with the run of the first chunk that is neither. ``prefix``: ends where nothing more can be
    stored without a gap. Whether it did, so that something may follow.
    """
    run, last = first // lookup.prompt.run_length, -(-end // lookup.prompt.run_length)
    ended = False

    def step(session: Session | NativeSession) -> bool:
        nonlocal run, ended
        budget = lookup.rows_read + ROWS_PER_HOLD
        while run < last and lookup.rows_read < budget:
            stop = min(last, run + budget - lookup.rows_read)
            run, found = lookup.read_runs(session, run, stop, stop_at_gap=not to_first_gap)
            begin, count = lookup.prompt.run(run - 1)
            wanted = (1 << count) - 1 & ~((1 << max(0, first - begin)) - 1)
            if to_first_gap and wanted & ~(found.covered | found.claimed):
                return True
            # of several parts, the others may go on behind a gap of one
            if prefix and not found.whole and (len(lookup.parts) < 2 or not found.covered & 1):
                ended = True
                return True
            if not (found.whole or found.hits or found.claimed):  # most likely nothing follows
                run = lookup.next_present(session, run, last, budget)
        return run >= last

    while run < last and not read(step):
        pass
    return ended
