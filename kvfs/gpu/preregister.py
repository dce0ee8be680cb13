"""Registration ahead of traffic: regions that loads will copy from are made before the first load comes."""

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


def register_match(
    regions: RegistrationCache, reader: Reader, match: PrefixMatch, ready: list[int], stopped: Callable[[], bool]
) -> None:  # fmt: skip
    """Make the regions of a match, until ``stopped``. Appends to ``ready``: bytes that need not go through the ring."""
    with reader.open_segments(match) as held:
        for gm in match.groups:
            for run in plan_runs(gm, held)[0]:
                if stopped():
                    return
                ready.append(regions.warm(run.held, run.offset, run.span, match.tails[run.segment]))


def register_hottest(
    context: Context,
    regions: RegistrationCache,
    digest: bytes,
    attached: Collection[Attached],
    nbytes: int,
    deadline: float,
    stopped: Callable[[], bool],
) -> None:
    """Make regions of the pages of a namespace that were used last, until ``nbytes`` in all are pinned.

    Only pages of these groups' own parts that the page cache holds, together with half of their region: faulting cold
    pages in by registering takes longer than reading them. No pinned region is dropped for them. ``deadline``:
    monotonic; the search for pages has half of the time until then.
    """
    own = {(a.number, a.part.pack()): a.page_bytes for a in attached}
    files, generation = context.files, context.index.generation
    begin = files.monotonic()
    found = _hottest(context, digest, own, begin + (deadline - begin) / 2)
    published = dict[bytes, int]()  # bytes by segment
    unregistrable = set[tuple[bytes, int]]()  # (segment, start) of regions that are not tried again
    for s in found:
        published[s.segment_id] = max(published.get(s.segment_id, 0), _end(s))
    for s in found:
        if regions.pinned >= nbytes or stopped():
            break
        held = context.segments.acquire(s.segment, s.segment_id, generation)
        if held is None:
            continue
        end = _end(s)
        for start, size in regions.missing(held, s.offset, end - s.offset, published[s.segment_id]):
            first, last = max(start, s.offset), min(start + size, end)
            if (s.segment_id, start) in unregistrable or _cached(files, held, first, last - first) < last - first:
                continue
            fits = regions.pinned + regions.source.cost(size) <= nbytes
            worthwhile = fits and 2 * _cached(files, held, start, size) >= size
            if not worthwhile or not regions.warm(held, first, last - first, published[s.segment_id], spare=True):
                unregistrable.add((s.segment_id, start))


def _end(s: Stretch) -> int:
    return s.offset + (s.pages - 1) * s.stride + fmt.align(s.stored_bytes)


def _cached(files: Files, held: OpenSegment, offset: int, nbytes: int) -> int:
    """Bytes of a range that the page cache holds; all of it where the kernel does not say."""
    cached = files.cached_bytes(held.fd, offset, nbytes)
    return nbytes if cached is None else cached


def _hottest(context: Context, digest: bytes, own: dict[tuple[int, bytes], int], deadline: float) -> list[Stretch]:
    """Runs of records of these parts that are stored as a reader of them wants them, by access time, latest first."""

    def found() -> Iterator[Stretch]:
        try:
            for s in Walk(context, deadline=deadline).stretches():
                if s.digest == digest and own.get((s.group, s.part)) == s.stored_bytes:
                    yield s._replace(hashes=b"")  # most of the memory that a large store would need here
                if context.files.monotonic() >= deadline:  # the walk looks less often, and each record may be a read
                    return
        except IndexUnavailableError:
            return  # with what was found until then

    return sorted(found(), key=lambda s: -s.stamp_us)
