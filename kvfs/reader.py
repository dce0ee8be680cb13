"""Loading: from segments into the caller's memory, or as views of the page cache; verified."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import TypeVar

from kvfs import format as fmt
from kvfs.assemble import assemble, decode_page
from kvfs.bits import span
from kvfs.buffers import address_of
from kvfs.codec import fits
from kvfs.context import COMMIT_SECONDS, Context
from kvfs.errors import IndexUnavailableError
from kvfs.hashing import LEAF_BYTES, leaf_table, root_of
from kvfs.index.rows import Place
from kvfs.index.runs import forget_place
from kvfs.layout import Group
from kvfs.match import GroupMatch, Hold, PageRef, PrefixMatch, Source, used_ranges
from kvfs.pool import Pool
from kvfs.reads import Job, plan_reads
from kvfs.segment_files import Held
from kvfs.types import Tier, Verify

S = TypeVar("S")
T = TypeVar("T")
COLD_THREADS = 8  # parallel reads of what is not in the page cache
READ_BYTES = 4 << 20  # one preadv
SUM_BYTES = 512 << 10  # read and summed at once
VIEW_BYTES = 256 << 20  # one map
VERIFIED_MAX = 1 << 20  # remembered pages of policy "first"


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
    ) -> tuple[int, dict[Tier, int]]:
        """Fill ``out`` with the chunks of ``gm``, which may be a cut of the match's; good ones and tiers, as bits.

        A chunk's tier is where it lay just before it was read. For transfers: counts bytes, but no tokens.
        """
        tiers = self._chunk_tiers(gm, held)
        return self._load_group(match, gm, group, out, held), tiers

    def note(self, match: PrefixMatch, gm: GroupMatch, good: int) -> None:
        """After a load: stamps and counts for the chunks in ``good``."""
        with self.held(match) as held:
            self._stamp(match, gm, good, held)
        self._c.counters.add("bytes_loaded", good.bit_count() * gm.part_bytes)

    def _load_group(
        self, match: PrefixMatch, gm: GroupMatch, group: Group, out: memoryview, held: dict[int, Held]
    ) -> int:
        """Set (as bits) of the chunks that are now in ``out``, verified."""
        jobs, covered = plan_reads(gm, held, READ_BYTES)
        bad: list[tuple[int, int]] = []
        good = 0
        for bits, faults in self._map(lambda job: self._read_job(job, gm, group, out), jobs, out):
            good |= bits
            bad += faults
        rest = span(gm.first, gm.count) & ~covered
        if rest:
            bits, faults = self._assemble_rest(gm, group, rest, out, held)
            good |= bits
            bad += faults
        self.note(match, gm, good)
        self.forget(match, gm, bad)
        return good

    def _assemble_rest(
        self, gm: GroupMatch, group: Group, rest: int, out: memoryview, held: dict[int, Held]
    ) -> tuple[int, list[tuple[int, int]]]:
        """Chunks in ``rest``, which do not lie as they are wanted; (good ones as bits, bad records)."""
        sources = gm.sources()
        chunks = [c for c in sources if rest >> c & 1]

        def one(chunk: int) -> tuple[int, list[tuple[int, int]]]:
            target = out[(chunk - gm.first) * gm.part_bytes :][: gm.part_bytes]
            whole, wrong = assemble(self._c, sources[chunk], gm, group, target, held)
            return whole << chunk, [(source.place.segment, source.place.seq) for source in wrong]

        cold = bool(chunks) and not all(self._in_cache(held, s.place) for s in sources[chunks[0]])
        done = list(self._share(one, chunks, COLD_THREADS if cold else self._c.threads))
        return sum(bits for bits, _ in done), [fault for _, faults in done for fault in faults]

    def _share(self, function: Callable[[S], T], items: Sequence[S], threads: int) -> Iterator[T]:
        """Results in any order, by several threads where there are several items."""
        workers = min(len(items), threads)
        if workers < 2:
            return map(function, items)
        shared = iter(items)
        return chain.from_iterable(self._threads().run([partial(_each, function, shared)] * workers))

    def _threads(self) -> Pool:
        with self._lock:
            if self._pool is None:
                self._pool = Pool(max(COLD_THREADS, self._c.threads), "kvfs-read")
            return self._pool

    def _map(self, function: Callable[[Job], T], jobs: list[Job], out: memoryview) -> Iterator[T]:
        """Run jobs, in parallel where that helps; results in any order."""
        if len(jobs) < 2:
            return map(function, jobs)
        cold = self._cached(jobs[0]) == 0 or self._cached(jobs[-1]) == 0
        # direct reads keep a disk busy with many requests; through the page cache, few streams read ahead best
        workers = min(len(jobs), COLD_THREADS if self._past(jobs[-1], out) else self._c.threads)
        if workers < 2:
            return map(function, jobs)
        bounds = [len(jobs) * i // workers for i in range(workers + 1)]
        # from a disk each thread takes a stretch of neighbours; from memory whichever job is next
        shares = [iter(jobs[a:b]) for a, b in pairwise(bounds)] if cold else [iter(jobs)] * workers
        return chain.from_iterable(self._threads().run([partial(_each, function, share) for share in shares]))

    def _cached(self, job: Job) -> int | None:
        return self._c.segments.cached_bytes(job.held, job.offset, job.nbytes)

    def _past(self, job: Job, out: memoryview) -> bool:
        """Whether a job is read past the page cache.

        In mode cache cold bytes that nobody has used before are: reading them through the page cache costs several
        times the CPU, and pages used once are the first that the kernel drops again.
        """
        mode = self._c.mode
        return mode.direct or (
            mode.cold_direct
            and not job.size % fmt.BLOCK
            and self._cached(job) == 0
            and not address_of(out[job.out : job.out + job.nbytes]) % fmt.BLOCK
            and not self._c.recency.was_used(job.held.segment_id, job.seqs[0])
            and self._c.segments.direct(job.held) >= 0
        )

    def _read_job(self, job: Job, gm: GroupMatch, group: Group, out: memoryview) -> tuple[int, list[tuple[int, int]]]:
        """Read and check; (good chunks as bits, bad records as (segment, seq))."""
        target = out[job.out : job.out + job.nbytes]
        leaf_bytes, step = group.leaf_bytes(gm.want), LEAF_BYTES * group.leaves(gm.want)
        try:
            table = self._read_and_sum(job, target, leaf_bytes, self._past(job, out))
        except OSError:
            return self._read_singly(job, target, leaf_bytes)
        if table is None:
            good = [
                self._check(job, i, target[i * job.size : (i + 1) * job.size], leaf_bytes) for i in range(job.count)
            ]
        else:
            roots = [root_of(table[at : at + step]) for at in range(0, len(table), step)]
            if b"".join(roots) == job.roots:
                return job.bits(), []
            good = [self._agrees(root, job, i) for i, root in enumerate(roots)]
        return self._judged(job, good)

    @staticmethod
    def _judged(job: Job, good: Sequence[bool]) -> tuple[int, list[tuple[int, int]]]:
        bits = sum(fine << job.chunk + i for i, fine in enumerate(good))
        return bits, [(job.segment, seq) for fine, seq in zip(good, job.seqs, strict=True) if not fine]

    def _read_and_sum(self, job: Job, target: memoryview, leaf_bytes: int, past: bool) -> bytes | None:
        """Read a job; its leaf table if every read is checked, summed while the bytes are in the CPU cache."""
        read = self._c.segments.read
        if past:
            self._c.counters.add("direct_reads")
        if self._c.verify is not Verify.ALWAYS:
            read(job.held, target, job.offset, past=past)
            return None
        step = len(target) if past else max(1, SUM_BYTES // leaf_bytes) * leaf_bytes
        tables = []
        for at in range(0, len(target), step):
            piece = target[at : at + step]
            read(job.held, piece, job.offset + at, past=past)
            tables.append(leaf_table(piece, leaf_bytes))
        return b"".join(tables)

    def _read_singly(self, job: Job, target: memoryview, leaf_bytes: int) -> tuple[int, list[tuple[int, int]]]:
        """One of the pages cannot be read: find out which."""
        self._c.counters.add("read_errors")
        good = []
        for i in range(job.count):
            page = target[i * job.size : (i + 1) * job.size]
            try:
                self._c.segments.read(job.held, page, job.offset + i * job.size)
                good.append(self._check(job, i, page, leaf_bytes))
            except OSError:
                good.append(False)
        return self._judged(job, good)

    def _check(self, job: Job, i: int, data: memoryview, leaf_bytes: int) -> bool:
        """Whether the bytes of page ``i`` are the ones that the index vouches for, as far as the policy asks."""
        policy = self._c.verify
        if policy is Verify.OFF:
            return True
        key = (job.held.segment_id, job.seqs[i])
        if policy is Verify.FIRST and key in self._verified:
            return True
        if not self._agrees(root_of(leaf_table(data, leaf_bytes)), job, i):
            return False
        if policy is Verify.FIRST:
            if len(self._verified) >= VERIFIED_MAX:
                self._verified.clear()
            self._verified.add(key)
        return True

    def _agrees(self, root: bytes, job: Job, i: int) -> bool:
        if root == job.root(i):
            return True
        self._c.counters.add("pages_corrupt")
        return False

    # -- views -------------------------------------------------------------------------------

    def view(self, match: PrefixMatch, gm: GroupMatch, group: Group) -> list[memoryview]:
        """Read-only buffers of the leading pages that verify, over shared maps of the segments.

        Each map keeps its segment's blocks; a view stays valid after eviction. Pages of a codec are private memory.
        """
        views: list[memoryview] = []
        bad: list[tuple[int, int]] = []
        leaf_bytes = group.leaf_bytes(gm.want)
        with self.held(match) as held:
            jobs, covered = plan_reads(gm, held, VIEW_BYTES)
            mapped = {job.chunk: job for job in jobs}
            sources = {} if covered.bit_count() == gm.count else gm.sources()
            while (chunk := gm.first + len(views)) < gm.first + gm.count:
                job = mapped.get(chunk)
                new = (
                    self._map_job(job, leaf_bytes)
                    if job is not None
                    else self._decoded(gm, sources.get(chunk, []), leaf_bytes, held, bad)
                )
                views += new
                if len(new) < (job.count if job is not None else 1):
                    break
            self._stamp(match, gm, (1 << len(views)) - 1 << gm.first, held)
        self.forget(match, gm, bad)
        return views

    def _decoded(
        self, gm: GroupMatch, sources: Sequence[Source], leaf_bytes: int, held: dict[int, Held],
        bad: list[tuple[int, int]],
    ) -> list[memoryview]:  # fmt: skip
        """The page in memory of its own, if it is there encoded and as it is wanted; else nothing. Faults: ``bad``."""
        for part, place in sources:
            file = held.get(place.segment)
            encoded = place.codec != fmt.CODEC_RAW and fits(place.codec, place.stored_bytes, gm.part_bytes)
            if part == gm.want and file is not None and encoded:
                page = memoryview(bytearray(gm.part_bytes))
                if decode_page(self._c, file, place, leaf_bytes, page):
                    return [page.toreadonly()]
                bad.append((place.segment, place.seq))
        return []

    def _map_job(self, job: Job, leaf_bytes: int) -> list[memoryview]:
        try:
            if self._c.segments.may_map(job.held):
                mapping = self._c.files.map(job.held.fd, job.nbytes, job.offset)
                self._c.files.populate(mapping)
                whole = memoryview(mapping).toreadonly()
            else:
                whole = memoryview(self._c.segments.read_bytes(job.held, job.nbytes, job.offset)).toreadonly()
        except (OSError, ValueError):
            self._c.counters.add("read_errors")
            return []
        views = []
        for i in range(job.count):
            data = whole[i * job.size : (i + 1) * job.size]
            if not self._check(job, i, data, leaf_bytes):
                break
            views.append(data)
        return views

    # -- tiers, stamps, faults -----------------------------------------------------------------

    def tiers(self, match: PrefixMatch) -> list[PageRef]:
        """Tier of every page of a match: HOST if the page cache has all of it."""
        refs = []
        with self.held(match) as held:
            for gm in match.groups:
                disk = self._chunk_tiers(gm, held)[Tier.DISK]
                chunks = range(gm.first, gm.first + gm.count)
                refs += [PageRef(gm.name, c, Tier.DISK if disk >> c & 1 else Tier.HOST) for c in chunks]
        return refs

    def _chunk_tiers(self, gm: GroupMatch, held: dict[int, Held]) -> dict[Tier, int]:
        """The chunks, as bits, that lie in the page cache and on the disk now."""
        sources, cold = gm.sources(), 0
        for chunk in range(gm.first, gm.first + gm.count):
            if not all(self._in_cache(held, s.place) for s in sources.get(chunk, [])):
                cold |= 1 << chunk
        return {Tier.DISK: cold, Tier.HOST: span(gm.first, gm.count) & ~cold}

    def _in_cache(self, held: dict[int, Held], place: Place) -> bool:
        file = held.get(place.segment)
        if file is None:
            return False
        cached = self._c.segments.cached_bytes(file, place.block * fmt.BLOCK, place.stored_bytes)
        return cached is not None and cached >= place.stored_bytes

    def _stamp(self, match: PrefixMatch, gm: GroupMatch, good: int, held: dict[int, Held]) -> None:
        for segment, seq, count in used_ranges(gm.hits, gm.run_length, good):
            if segment in held:
                self._c.recency.stamp(held[segment].segment_id, seq, [match.at_us] * count)
        self._c.recency.note_request(match.last_hash, match.at_us)

    def forget(self, match: PrefixMatch, gm: GroupMatch, bad: Sequence[tuple[int, int]]) -> None:
        """Take bad records out of the index, so that the next lookup misses and the page can be stored anew."""
        if not bad or self._c.liveness is None:
            return
        wrong = set(bad)
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
                if self._c.marks.has(segment_id):
                    continue  # some of it was purged, perhaps these pages: whoever wants to know looks up again
                one = self._c.segments.acquire(number, segment_id, match.generation)
                if one is not None:
                    held[number] = one
            hold = Hold(held, 0.0)
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


def _each(function: Callable[[S], T], items: Iterator[S]) -> list[T]:
    return [function(item) for item in items]
