"""Pinning ahead of traffic: what loads will copy from is registered, or in an arena, before the first of them comes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from kvfs.catalog.walk import Stretch, Walk
from kvfs.context import Context
from kvfs.errors import IndexUnavailableError
from kvfs.format import segment as fmt
from kvfs.gpu.registration_cache import RegistrationCache
from kvfs.lookup.prefix_match import PrefixMatch
from kvfs.read.plan import plan_runs
from kvfs.read.reader import Reader
from kvfs.segments.open_segments import OpenSegment
from kvfs.system.files import Files
from kvfs.transfer.workers import Attached


def pin_match(
    maps: RegistrationCache, reader: Reader, match: PrefixMatch, ready: list[int], stopped: Callable[[], bool]
) -> None:  # fmt: skip
    """Pin what a match needs, until ``stopped``. To ``ready``: bytes of it that the GPU can read without the ring."""
    with reader.held(match) as held:
        for gm in match.groups:
            for run in plan_runs(gm, held)[0]:
                if stopped():
                    return
                ready.append(maps.warm(run.held, run.offset, run.span, match.tails[run.segment]))


def pin_hottest(
    context: Context,
    maps: RegistrationCache,
    digest: bytes,
    attached: Collection[Attached],
    nbytes: int,
    deadline: float,
    stopped: Callable[[], bool],
) -> None:
    """Pin the pages of a namespace that were used last, until ``nbytes``, of whatever, are pinned.

    Pages that lie as these groups' own parts want them, and that the page cache holds, as it does half of the piece
    around them: to fault cold ones in by registering them takes longer than to read them. Nothing that is pinned goes
    for them. ``deadline``: monotonic; the search for pages has half of the time until then.
    """
    own = {(a.number, a.part.pack()): a.page_bytes for a in attached}
    files, generation = context.files, context.index.generation
    begin = files.monotonic()
    found = _hottest(context, digest, own, begin + (deadline - begin) / 2)
    ends, hopeless = dict[bytes, int](), set[tuple[bytes, int]]()  # what is published; pieces not to be tried again
    for s in found:
        ends[s.segment_id] = max(ends.get(s.segment_id, 0), _end(s))
    for s in found:
        if maps.pinned >= nbytes or stopped():
            break
        held = context.segments.acquire(s.segment, s.segment_id, generation)
        if held is None:
            continue
        end, published = _end(s), ends[s.segment_id]
        for start, size in maps.missing(held, s.offset, end - s.offset, published):
            first, last = max(start, s.offset), min(start + size, end)
            if (s.segment_id, start) in hopeless or _cached(files, held, first, last - first) < last - first:
                continue
            fits = maps.pinned + maps.source.cost(size) <= nbytes and 2 * _cached(files, held, start, size) >= size
            if not fits or not maps.warm(held, first, last - first, published, spare=True):
                hopeless.add((s.segment_id, start))


def _end(s: Stretch) -> int:
    return s.offset + (s.pages - 1) * s.stride + fmt.align(s.stored_bytes)


def _cached(files: Files, held: OpenSegment, offset: int, nbytes: int) -> int:
    """Bytes of a range that the page cache holds; all of it where the kernel does not say."""
    cached = files.cached_bytes(held.fd, offset, nbytes)
    return nbytes if cached is None else cached


def _hottest(context: Context, digest: bytes, own: dict[tuple[int, bytes], int], deadline: float) -> list[Stretch]:
    """Stretches of these parts that a reader of them finds as they are, the ones that were used last first."""

    def found() -> Iterator[Stretch]:
        try:
            for s in Walk(context, deadline=deadline).stretches():
                if s.digest == digest and own.get((s.group, s.part)) == s.stored_bytes:
                    yield s._replace(hashes=b"")  # of a large store they would be most of what is kept
                if context.files.monotonic() >= deadline:  # the walk looks less often, and each record may be a read
                    return
        except IndexUnavailableError:
            return  # what was found until then

    return sorted(found(), key=lambda s: -s.stamp_us)
