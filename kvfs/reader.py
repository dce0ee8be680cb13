"""Loading: from segments into the caller's memory, or as views of the page cache; verified."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import NamedTuple, TypeVar

from kvfs import format as fmt
from kvfs.assemble import assemble
from kvfs.buffers import address_of
from kvfs.context import COMMIT_SECONDS, Context
from kvfs.errors import IndexUnavailableError
from kvfs.hashing import LEAF_BYTES, leaf_table, root_of
from kvfs.index.rows import Place
from kvfs.index.runs import forget_place
from kvfs.layout import Group
from kvfs.match import GroupMatch, Hold, PageRef, PrefixMatch, Source, used_ranges
from kvfs.pool import Pool
from kvfs.segment_files import Held
from kvfs.types import Tier, Verify

T = TypeVar("T")
COLD_THREADS = 8  # parallel reads of what is not in the page cache
READ_BYTES = 4 << 20  # one preadv
SUM_BYTES = 512 << 10  # read and summed at once
VIEW_BYTES = 256 << 20  # one map
VERIFIED_MAX = 1 << 20  # remembered pages of policy "first"


class Page(NamedTuple):
    """One page to load: where it goes, and where its parts lie."""

    chunk: int
    out: int  # offset in the caller's buffer
    sources: list[Source]


class Job(NamedTuple):
    """Pages that lie one behind the other in a segment, and go one behind the other to the buffer."""

    held: Held
    offset: int
    pages: list[Page]


class Reader:
    """Reads the pages of matches. Thread-safe; nothing here raises for a disk that misbehaves."""

    def __init__(self, context: Context) -> None:
        self._c = context
        self._pool: Pool | None = None
        self._lock = threading.Lock()
        self._verified: set[tuple[bytes, int]] = set()

    # -- get ---------------------------------------------------------------------------------

    def load(self, match: PrefixMatch, groups: Sequence[Group], outs: Sequence[memoryview]) -> int:
        """Fill the buffers; leading chunks that are restorable from what verified."""
        with self.held(match) as held:
            good = {}
            for gm, out in zip(match.groups, outs, strict=True):
                good[gm.name] = self._load_group(match, gm, groups[gm.number], out, held)
            chunks = match.restorable(good) if match.groups else 0
            self._c.counters.add("tokens_loaded", chunks * match.page_tokens)
            return chunks

    def load_run(
        self, match: PrefixMatch, gm: GroupMatch, group: Group, out: memoryview, held: dict[int, Held]
    ) -> tuple[int, dict[int, Tier]]:
        """Fill ``out`` with the chunks of ``gm``, which may be a cut of the match's; (good ones as bits, tiers).

        A chunk's tier is where it lay just before it was read. For transfers: counts bytes, but no tokens.
        """
        tiers = self._chunk_tiers(gm, held)
        return self._load_group(match, gm, group, out, held), tiers

    def _load_group(
        self, match: PrefixMatch, gm: GroupMatch, group: Group, out: memoryview, held: dict[int, Held]
    ) -> int:
        """Set (as bits) of the chunks that are now in ``out``, verified."""
        direct, assembled = _pages(gm)
        jobs = list(_merge(direct, gm.part_bytes, held))
        bad: list[tuple[Page, Source]] = []
        good = 0
        for bits, faults in self._map(lambda job: self._read_job(job, gm, group, out), jobs, out):
            good |= bits
            bad += faults
        for page in assembled:
            target = out[page.out : page.out + gm.part_bytes]
            whole, wrong = assemble(self._c, page.sources, gm, group, target, held)
            bad += [(page, source) for source in wrong]
            good |= whole << page.chunk
        self._stamp(match, gm, good, held)
        self._c.counters.add("bytes_loaded", good.bit_count() * gm.part_bytes)
        self._forget(match, gm, group, bad)
        return good

    def _map(self, function: Callable[[Job], T], jobs: list[Job], out: memoryview) -> Iterator[T]:
        """Run jobs, in parallel where that helps; results in any order."""
        if len(jobs) < 2:
            return map(function, jobs)
        cold = self._cached(jobs[0]) == 0 or self._cached(jobs[-1]) == 0
        # direct reads keep a disk busy with many requests; through the page cache, few streams read ahead best
        workers = min(len(jobs), COLD_THREADS if self._direct(jobs[-1], out) >= 0 else self._c.threads)
        if workers < 2:
            return map(function, jobs)
        with self._lock:
            if self._pool is None:
                self._pool = Pool(max(COLD_THREADS, self._c.threads), "kvfs-read")
        bounds = [len(jobs) * i // workers for i in range(workers + 1)]
        # from a disk each thread takes a stretch of neighbours; from memory whichever job is next
        shares = [iter(jobs[a:b]) for a, b in pairwise(bounds)] if cold else [iter(jobs)] * workers
        return chain.from_iterable(self._pool.run([partial(_each, function, share) for share in shares]))

    def _cached(self, job: Job) -> int | None:
        size = sum(p.sources[0].place.stored_bytes for p in job.pages)
        return self._c.files.cached_bytes(job.held.fd, job.offset, size)

    def _direct(self, job: Job, out: memoryview) -> int:
        """Descriptor for reading a job past the page cache, or negative if it should not be.

        Cold bytes that nobody has used before go that way: reading them through the page cache costs several times
        the CPU, and pages used once are the first that the kernel drops again.
        """
        first, size = job.pages[0], sum(p.sources[0].place.stored_bytes for p in job.pages)
        target = out[first.out : first.out + size]
        if (
            size % fmt.BLOCK
            or self._cached(job) != 0
            or address_of(target) % fmt.BLOCK
            or self._c.recency.was_used(job.held.segment_id, first.sources[0].place.seq)
        ):
            return -1
        return self._c.segments.direct(job.held)

    def _read_job(
        self, job: Job, gm: GroupMatch, group: Group, out: memoryview
    ) -> tuple[int, list[tuple[Page, Source]]]:
        size, first = gm.part_bytes, job.pages[0].out
        target = out[first : first + size * len(job.pages)]
        try:
            table = self._read_and_sum(job, target, group.leaf_bytes(gm.want), self._direct(job, out))
        except OSError:
            return self._read_singly(job, gm, group, out)
        good, bad = 0, []
        step = LEAF_BYTES * group.leaves(gm.want)
        for i, page in enumerate(job.pages):
            source = page.sources[0]
            if table is not None:
                fine = self._agrees(table[i * step : (i + 1) * step], source.place)
            else:
                data = out[page.out : page.out + size]
                fine = self._check(job.held, source.place, data, group.leaf_bytes(gm.want))
            if fine:
                good |= 1 << page.chunk
            else:
                bad.append((page, source))
        return good, bad

    def _read_and_sum(self, job: Job, target: memoryview, leaf_bytes: int, direct: int) -> bytes | None:
        """Read a job; its leaf table if every read is checked, summed while the bytes are in the CPU cache."""
        if direct >= 0:
            self._c.counters.add("direct_reads")
        fd = direct if direct >= 0 else job.held.fd
        if self._c.verify is not Verify.ALWAYS:
            self._c.files.read_into(fd, target, job.offset)
            return None
        step = len(target) if direct >= 0 else max(1, SUM_BYTES // leaf_bytes) * leaf_bytes
        tables = []
        for at in range(0, len(target), step):
            piece = target[at : at + step]
            self._c.files.read_into(fd, piece, job.offset + at)
            tables.append(leaf_table(piece, leaf_bytes))
        return b"".join(tables)

    def _read_singly(
        self, job: Job, gm: GroupMatch, group: Group, out: memoryview
    ) -> tuple[int, list[tuple[Page, Source]]]:
        """One of the pages cannot be read: find out which."""
        self._c.counters.add("read_errors")
        good, bad = 0, []
        for page in job.pages:
            source = page.sources[0]
            target = out[page.out : page.out + gm.part_bytes]
            try:
                self._c.files.read_into(job.held.fd, target, source.place.block * fmt.BLOCK)
                fine = self._check(job.held, source.place, target, group.leaf_bytes(gm.want))
            except OSError:
                fine = False
            if fine:
                good |= 1 << page.chunk
            else:
                bad.append((page, source))
        return good, bad

    def _check(self, held: Held, place: Place, data: memoryview, leaf_bytes: int) -> bool:
        """Whether the bytes are the ones that the index vouches for."""
        policy = self._c.verify
        if policy is Verify.OFF:
            return True
        key = (held.segment_id, place.seq)
        if policy is Verify.FIRST and key in self._verified:
            return True
        if not self._agrees(leaf_table(data, leaf_bytes), place):
            return False
        if policy is Verify.FIRST:
            if len(self._verified) >= VERIFIED_MAX:
                self._verified.clear()
            self._verified.add(key)
        return True

    def _agrees(self, table: bytes, place: Place) -> bool:
        if root_of(table) == place.root:
            return True
        self._c.counters.add("pages_corrupt")
        return False

    # -- views -------------------------------------------------------------------------------

    def view(self, match: PrefixMatch, gm: GroupMatch, group: Group) -> list[memoryview]:
        """Read-only buffers of the leading pages that verify, over shared maps of the segments.

        Each map keeps its segment's blocks; a view stays valid after eviction.
        """
        views: list[memoryview] = []
        with self.held(match) as held:
            direct, _ = _pages(gm)
            good = 0
            for job in _merge(direct, gm.part_bytes, held, VIEW_BYTES):
                if job.pages[0].chunk != gm.first + len(views):
                    break
                new = self._map_job(job, gm, group)
                views += new
                good |= (1 << len(new)) - 1 << job.pages[0].chunk
                if len(new) < len(job.pages):
                    break
            self._stamp(match, gm, good, held)
        return views

    def _map_job(self, job: Job, gm: GroupMatch, group: Group) -> list[memoryview]:
        size = gm.part_bytes
        try:
            mapping = self._c.files.map(job.held.fd, size * len(job.pages), job.offset)
            self._c.files.populate(mapping)
        except (OSError, ValueError):
            self._c.counters.add("read_errors")
            return []
        whole = memoryview(mapping).toreadonly()
        views = []
        for i, page in enumerate(job.pages):
            data = whole[i * size : (i + 1) * size]
            if not self._check(job.held, page.sources[0].place, data, group.leaf_bytes(gm.want)):
                break
            views.append(data)
        return views

    # -- tiers, stamps, faults -----------------------------------------------------------------

    def tiers(self, match: PrefixMatch) -> list[PageRef]:
        """Tier of every page of a match: HOST if the page cache has all of it."""
        refs = []
        with self.held(match) as held:
            for gm in match.groups:
                refs += [PageRef(gm.name, chunk, tier) for chunk, tier in self._chunk_tiers(gm, held).items()]
        return refs

    def _chunk_tiers(self, gm: GroupMatch, held: dict[int, Held]) -> dict[int, Tier]:
        sources = gm.sources()
        tiers = {}
        for chunk in range(gm.first, gm.first + gm.count):
            warm = all(self._in_cache(held, s.place) for s in sources.get(chunk, []))
            tiers[chunk] = Tier.HOST if warm else Tier.DISK
        return tiers

    def _in_cache(self, held: dict[int, Held], place: Place) -> bool:
        file = held.get(place.segment)
        if file is None:
            return False
        cached = self._c.files.cached_bytes(file.fd, place.block * fmt.BLOCK, place.stored_bytes)
        return cached is not None and cached >= place.stored_bytes

    def _stamp(self, match: PrefixMatch, gm: GroupMatch, good: int, held: dict[int, Held]) -> None:
        for segment, seq, count in used_ranges(gm.hits, gm.run_length, good):
            if segment in held:
                self._c.recency.stamp(held[segment].segment_id, seq, [match.at_us] * count)
        self._c.recency.note_request(match.last_hash, match.at_us)

    def _forget(self, match: PrefixMatch, gm: GroupMatch, group: Group, bad: Sequence[tuple[Page, Source]]) -> None:
        """Take bad records out of the index, so that the next lookup misses and the page can be stored anew."""
        if not bad or self._c.liveness is None:
            return
        wrong = {(source.place.segment, source.place.seq) for _, source in bad}
        keys = {hit.key for hit in gm.hits}
        with contextlib.suppress(IndexUnavailableError):
            self._c.index.write(
                lambda s: forget_place(s, keys, wrong) if s.generation == match.generation else 0, COMMIT_SECONDS
            )

    @contextlib.contextmanager
    def held(self, match: PrefixMatch) -> Iterator[dict[int, Held]]:
        """The open segments of a match, by number; reopened if the match came from elsewhere or has expired."""
        hold = match.hold
        if hold is None or not hold.enter():
            held = {}
            for number, segment_id in match.segments.items():
                one = self._c.segments.acquire(number, segment_id, match.generation)
                if one is not None:
                    held[number] = one
            hold = Hold(self._c.segments, held, 0.0)
            hold.enter()
            hold.release()
        try:
            yield hold.held
        finally:
            hold.leave()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def abandon(self) -> None:
        """In a forked child: the parent's threads are not here."""
        self._pool = None
        self._lock = threading.Lock()


def _each(function: Callable[[Job], T], jobs: Iterator[Job]) -> list[T]:
    return [function(job) for job in jobs]


def _pages(gm: GroupMatch) -> tuple[list[Page], list[Page]]:
    """Pages that can be read as they lie, and pages that must be put together from parts."""
    direct, assembled = [], []
    sources = gm.sources()
    for chunk in range(gm.first, gm.first + gm.count):
        out = (chunk - gm.first) * gm.part_bytes
        found = sources.get(chunk, [])
        whole = [s for s in found if s.part == gm.want and s.place.stored_bytes == gm.part_bytes and not s.place.codec]
        if whole:
            direct.append(Page(chunk, out, whole[:1]))
        else:
            assembled.append(Page(chunk, out, found))
    return direct, assembled


def _merge(pages: Sequence[Page], size: int, held: dict[int, Held], limit: int = READ_BYTES) -> Iterator[Job]:
    """Runs of pages that one call can move. Pages of segments that are gone are left out."""
    job: Job | None = None
    for page in pages:
        place = page.sources[0].place
        file = held.get(place.segment)
        if file is None:
            continue
        offset = place.block * fmt.BLOCK
        if (
            job is not None
            and job.held is file
            and job.offset + size * len(job.pages) == offset
            and job.pages[-1].out + size == page.out
            and size * len(job.pages) < limit
        ):
            job.pages.append(page)
            continue
        if job is not None:
            yield job
        job = Job(file, offset, [page])
    if job is not None:
        yield job
