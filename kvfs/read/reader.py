"""Loading verified pages: from segments into the caller's memory, or as views of the page cache."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, reduce
from operator import and_, or_
from typing import TypeVar

from kvfs.context import Context
from kvfs.errors import IndexUnavailableError
from kvfs.format import segment as fmt
from kvfs.format.codec import fits
from kvfs.index.deadlines import COMMIT_SECONDS
from kvfs.index.row_updates import forget
from kvfs.index.rows import Place
from kvfs.lookup.prefix_match import GroupMatch, Hold, PrefixMatch, Source, used_ranges
from kvfs.pages.chunk_set import span
from kvfs.pages.layout import Group
from kvfs.read.assemble import assemble, decode_page
from kvfs.read.fetch import COLD_THREADS, READ_BYTES, Fetcher
from kvfs.read.plan import ReadJob, Scatter, plan_reads, plan_runs
from kvfs.segments.open_segments import OpenSegment
from kvfs.system.files import Files
from kvfs.system.files import Mapping as FileMapping
from kvfs.system.memory_views import PageBuffers
from kvfs.system.thread_pool import Team
from kvfs.types import Tier

S = TypeVar("S")
T = TypeVar("T")
VIEW_BYTES = 256 << 20  # of the pages of a view that are verified, or where maps are not allowed read, together


class Reader:
    """Reads the pages of matches. Thread-safe. Disk errors make misses, they are never raised.

    Owns a team of threads. Reads of pages stored as wanted are delegated to ``Fetcher``, all others to ``assemble``.
    """

    def __init__(self, context: Context) -> None:
        self._c = context
        self._team = Team(max(COLD_THREADS, context.threads), "kvfs-read")
        self._fetcher = Fetcher(context, self._team)

    # -- get ---------------------------------------------------------------------------------

    def load(
        self, match: PrefixMatch, groups: Sequence[Group], outs: Sequence[memoryview | PageBuffers]
    ) -> tuple[dict[str, int], dict[Tier, int]]:
        """Fill the buffers; the chunks that verified, as bits, by group name, and those of use by their slowest tier.

        Chunks that need no page, such as those before a window, are of tier DEVICE.
        """
        with self.open_segments(match) as held:
            good, cold, read = {}, 0, 0
            for gm, out in zip(match.groups, outs, strict=True):
                good[gm.name], missed = self._load_group(match, gm, groups[gm.number], out, held)
                cold |= missed
                read |= span(gm.first, gm.count)
            return good, self._count_tiers(match, good, read, cold)

    def load_at_once(
        self, match: PrefixMatch, groups: Sequence[Group], outs: Sequence[memoryview | PageBuffers]
    ) -> tuple[dict[str, int], dict[Tier, int]]:
        """``load`` of what is stored as wanted and in the page cache: waits for no disk. Nothing is noted of other
        chunks, for which ``load`` is to follow; that is all of them if the hold of the match is closed."""
        good, hold = dict.fromkeys((gm.name for gm in match.groups), 0), match.hold
        if hold is None or not hold.acquire():
            return good, {}
        try:
            for gm, out in zip(match.groups, outs, strict=True):
                jobs, _ = plan_reads(gm, hold.held, READ_BYTES, single=isinstance(out, PageBuffers))
                good[gm.name] = self._fetcher.fetch_at_once(jobs, groups[gm.number].leaf_bytes(gm.want), out)
                self._note(match, gm, good[gm.name], hold.held)
            read = reduce(or_, (span(gm.first, gm.count) for gm in match.groups))
            return good, self._count_tiers(match, good, read, 0)
        finally:
            hold.release()

    def _count_tiers(self, match: PrefixMatch, good: Mapping[str, int], read: int, cold: int) -> dict[Tier, int]:
        """Count the tokens of a load by tier; the chunks of use, as bits, by tier. All but ``good`` as bits, too."""
        usable = span(0, match.restorable(good))
        if match.keyed:  # each page is of use by itself
            usable = reduce(and_, good.values())
        tiers = {Tier.DEVICE: usable & ~read, Tier.HOST: usable & read & ~cold, Tier.DISK: usable & cold}
        tokens = {tier: chunks.bit_count() * match.page_tokens for tier, chunks in tiers.items()}
        self._c.counters.loaded(match.namespace, tokens)
        return {tier: chunks for tier, chunks in tiers.items() if chunks}

    def copy(self, match: PrefixMatch, group: Group, to: int, spots: Sequence[tuple[int, int, int]]) -> bool:
        """Copy all pages of a match of the only group into the file ``to``, verified, and ``touch`` them. False if that
        cannot be done: then ``load`` tells which pages are good, and the file is undefined at the spots."""
        (gm,) = match.groups
        with self.open_segments(match) as held:
            jobs, _ = plan_reads(gm, held, READ_BYTES)
            if not jobs or sum(job.count for job in jobs) < gm.count:
                return False
            cold = self._fetcher.copy(jobs, group.leaf_bytes(gm.want), to, spots)
        if cold is None:
            return False
        self.touch(match)
        self._c.counters.add_of(match.namespace, bytes_loaded=gm.nbytes)
        missed = cold.bit_count() * match.page_tokens
        self._c.counters.loaded(match.namespace, {Tier.DISK: missed, Tier.HOST: match.tokens - missed})
        return True

    def load_run(
        self, match: PrefixMatch, gm: GroupMatch, group: Group, out: memoryview, held: Mapping[int, OpenSegment]
    ) -> tuple[int, dict[Tier, int]]:
        """Fill ``out`` with the chunks of ``gm``, which may be a cut of the match's; good chunks and tiers, as bits.

        For transfers: counts bytes, but not tokens.
        """
        good, cold = self._load_group(match, gm, group, out, held)
        return good, {Tier.DISK: cold, Tier.HOST: span(gm.first, gm.count) & ~cold}

    def scatter_at_once(self, pages: Sequence[Scatter], loads: int) -> set[int]:
        """Copy pages to an engine's buffers without waiting for a disk; numbers of the loads that this could not do.

        Their verified pages may have been copied, and nothing was counted of them. In this thread, with the help of
        others where it is much.
        """
        planned = [plan_runs(each.gm, each.held)[0] for each in pages]
        whole = [sum(run.count for run in runs) == each.gm.count for each, runs in zip(pages, planned, strict=True)]
        left = {each.load for each, fine in zip(pages, whole, strict=True) if not fine}
        wanted = [(each, runs) for each, runs in zip(pages, planned, strict=True) if each.load not in left]
        left |= self._fetcher.scatter_at_once(wanted, loads)
        for each, runs in wanted:
            if each.load not in left:
                self._fetcher.remember(runs)
                self._note(each.match, each.gm, span(each.gm.first, each.gm.count), each.held)
        return left

    def note(self, match: PrefixMatch, gm: GroupMatch, good: int) -> None:
        """After a load: access times and counts of the chunks in ``good`` (bits)."""
        with self.open_segments(match) as held:
            self._note(match, gm, good, held)

    def _note(self, match: PrefixMatch, gm: GroupMatch, good: int, held: Mapping[int, OpenSegment]) -> None:
        self._note_access(match, gm, good, held)
        self._c.counters.add_of(match.namespace, bytes_loaded=good.bit_count() * gm.part_bytes)

    def touch(self, match: PrefixMatch) -> None:
        """Set the access times of all pages of a match: one time for each segment, in microseconds from the match's."""
        order = {segment: n for n, segment in enumerate(sorted(match.segments))}
        with self.open_segments(match) as held:
            for gm in match.groups:
                for segment, seq, count in used_ranges(gm.hits, gm.run_length, span(gm.first, gm.count)):
                    if segment in held:
                        at_us = match.at_us + order[segment]
                        self._c.access_times.stamp(held[segment].segment_id, seq, [at_us] * count)

    def _load_group(
        self, match: PrefixMatch, gm: GroupMatch, group: Group, out: memoryview | PageBuffers,
        held: Mapping[int, OpenSegment],
    ) -> tuple[int, int]:  # fmt: skip
        """Fill ``out``; the chunks (as bits) that verified, and those that the page cache lacked."""
        jobs, covered = plan_reads(gm, held, READ_BYTES, single=isinstance(out, PageBuffers))
        good, bad, cold = self._fetcher.fetch(jobs, group.leaf_bytes(gm.want), out)
        rest = span(gm.first, gm.count) & ~covered
        if rest:
            cold |= self._cold_chunks(gm, held) & rest
            bits, faults = self._assemble_rest(gm, group, rest, out, held)
            good |= bits
            bad += faults
        self._note(match, gm, good, held)
        self.forget(match, gm, bad)
        return good, cold

    def _assemble_rest(
        self, gm: GroupMatch, group: Group, rest: int, out: memoryview | PageBuffers, held: Mapping[int, OpenSegment]
    ) -> tuple[int, list[tuple[int, int]]]:
        """Fill ``out`` with chunks in ``rest``, which are not stored as wanted; (good ones as bits, bad records)."""
        sources = gm.sources()
        chunks = [c for c in sources if rest >> c & 1]

        def one(chunk: int) -> tuple[int, list[tuple[int, int]]]:
            target = out[(chunk - gm.first) * gm.part_bytes : (chunk - gm.first + 1) * gm.part_bytes]
            whole, wrong = assemble(self._c, sources[chunk], gm, group, target, held)
            return whole << chunk, [(source.place.segment, source.place.seq) for source in wrong]

        cold = bool(chunks) and not all(self._in_cache(held, s.place) for s in sources[chunks[0]])
        shares = [iter(chunks)] * max(1, min(len(chunks), COLD_THREADS if cold else self._c.threads))
        done = [found for share in self._team.each(partial(_each, one), shares) for found in share]
        return sum(bits for bits, _ in done), [fault for _, faults in done for fault in faults]

    # -- views -------------------------------------------------------------------------------

    def view(self, match: PrefixMatch, gm: GroupMatch, group: Group) -> list[memoryview]:
        """Read-only buffers of the leading pages that verify, over shared maps of the segments.

        One map per segment, with one descriptor, whatever the number of pages. It keeps the segment's blocks allocated;
        a view stays valid after eviction. Decoded pages are private memory.
        """
        views: list[memoryview] = []
        bad: list[tuple[int, int]] = []
        leaf_bytes = group.leaf_bytes(gm.want)
        with self.open_segments(match) as held:
            jobs, covered = plan_reads(gm, held, VIEW_BYTES, gaps=True)
            mapped = {job.chunk: job for job in jobs}
            maps = _SegmentMaps(self._c.files, jobs)
            sources = {} if covered.bit_count() == gm.count else gm.sources()
            while (chunk := gm.first + len(views)) < gm.first + gm.count:
                job = mapped.get(chunk)
                new = (
                    self._map_job(job, maps, leaf_bytes)
                    if job is not None
                    else self._decoded(gm, sources.get(chunk, []), leaf_bytes, held, bad)
                )
                views += new
                if len(new) < (job.count if job is not None else 1):
                    break
            self._note_access(match, gm, (1 << len(views)) - 1 << gm.first, held)
        self.forget(match, gm, bad)
        return views

    def _decoded(
        self, gm: GroupMatch, sources: Sequence[Source], leaf_bytes: int, held: Mapping[int, OpenSegment],
        bad: list[tuple[int, int]],
    ) -> list[memoryview]:  # fmt: skip
        """The page, decoded into new memory, if it is stored encoded and as wanted; else nothing. Faults: ``bad``."""
        for part, place in sources:
            file = held.get(place.segment)
            encoded = place.codec != fmt.CODEC_RAW and fits(place.codec, place.stored_bytes, gm.part_bytes)
            if part == gm.want and file is not None and encoded:
                page = memoryview(bytearray(gm.part_bytes))
                fine = decode_page(self._c, file, place, leaf_bytes, page)
                if fine:
                    return [page.toreadonly()]
                if fine is False:
                    bad.append((place.segment, place.seq))
        return []

    def _map_job(self, job: ReadJob, maps: _SegmentMaps, leaf_bytes: int) -> list[memoryview]:
        """Leading pages of a job that verify; several threads verify them."""
        mapping = None
        at = 0  # of the job in the map
        try:
            if self._c.segments.may_map(job.held):
                mapping, at = maps.of(job)
                whole = memoryview(mapping).toreadonly()[at : at + job.nbytes]
            else:
                whole = memoryview(self._c.segments.read_bytes(job.held, job.nbytes, job.offset)).toreadonly()
        except (OSError, ValueError):
            self._c.counters.add("read_errors")
            return []
        views = [job.page(whole, i) for i in range(job.count)]
        step = max(1, READ_BYTES // job.size) if self._fetcher.must_verify(job) else job.count
        firsts = range(0, job.count, step)

        def bad_page(first: int) -> int:
            """The first page of the step from ``first`` on that does not verify; ``job.count`` if there is none."""
            part = views[first : first + step]
            try:
                if mapping is not None:
                    nbytes = (len(part) - 1) * job.stride + job.size
                    self._c.files.populate(mapping, at + first * job.stride, nbytes)
            except OSError:
                self._c.counters.add("read_errors")
                return first
            wrong = (n for n, view in enumerate(part, first) if not self._fetcher.check(job, n, view, leaf_bytes))
            return next(wrong, job.count)

        shares = [iter(firsts)] * max(1, min(len(firsts), self._c.threads))
        ends = [end for share in self._team.each(partial(_each, bad_page), shares) for end in share]
        return views[: min(ends)]

    # -- tiers, access times, faults -----------------------------------------------------------

    def cold(self, match: PrefixMatch) -> dict[str, int]:
        """By group of a match, the chunks (as bits) of which the page cache does not hold all."""
        with self.open_segments(match) as held:
            return {gm.name: self._cold_chunks(gm, held) for gm in match.groups}

    def _cold_chunks(self, gm: GroupMatch, held: Mapping[int, OpenSegment]) -> int:
        if self._has_cached(gm, held):  # the usual case, without an object for each page
            return 0
        sources, cold = gm.sources(), 0
        spans: dict[int, tuple[int, int]] = {}  # of each segment, from its first page to its last one
        for each in sources.values():
            for place in (source.place for source in each):
                begin = place.block * fmt.BLOCK
                low, high = spans.get(place.segment, (begin, begin))
                spans[place.segment] = min(low, begin), max(high, begin + place.stored_bytes)
        if not all(
            self._cached(held, segment, *ends) for segment, ends in spans.items()
        ):  # or the kernel is asked once
            for chunk in range(gm.first, gm.first + gm.count):
                if not all(self._in_cache(held, s.place) for s in sources.get(chunk, [])):
                    cold |= 1 << chunk
        return cold

    def _has_cached(self, gm: GroupMatch, held: Mapping[int, OpenSegment]) -> bool:
        """Whether the page cache has all records that were found, asked once for those that are stored together."""
        for hit in gm.hits:
            row = hit.row()
            for e in row.extents if row is not None else ():
                begin = e.block * fmt.BLOCK
                end = begin + (e.chunks - 1) * e.stride * fmt.BLOCK + e.stored_bytes
                used = hit.bits >> e.first & (1 << e.chunks) - 1
                if used and not self._cached(held, e.segment, begin, end):
                    return False
        return True

    def _in_cache(self, held: Mapping[int, OpenSegment], place: Place) -> bool:
        begin = place.block * fmt.BLOCK
        return self._cached(held, place.segment, begin, begin + place.stored_bytes)

    def _cached(self, held: Mapping[int, OpenSegment], segment: int, begin: int, end: int) -> bool:
        file = held.get(segment)
        cached = None if file is None else self._c.segments.cached_bytes(file, begin, end - begin)
        return cached is not None and cached >= end - begin

    def _note_access(self, match: PrefixMatch, gm: GroupMatch, good: int, held: Mapping[int, OpenSegment]) -> None:
        for segment, seq, count in used_ranges(gm.hits, gm.run_length, good):
            if segment in held:
                self._c.access_times.stamp(held[segment].segment_id, seq, [match.at_us] * count)
        if match.last_hash:
            self._c.access_times.note_request(match.last_hash, match.at_us)

    def forget(self, match: PrefixMatch, gm: GroupMatch, bad: Sequence[tuple[int, int]]) -> None:
        """Remove bad records from the index, so that the next lookup misses and the page can be stored again."""
        if not bad or self._c.liveness is None:
            return
        wrong = dict.fromkeys(bad, match.namespace)
        keys = {hit.key for hit in gm.hits}
        with contextlib.suppress(IndexUnavailableError):
            self._c.index.write(
                lambda s: forget(s, keys, wrong) if s.generation == match.generation else None, COMMIT_SECONDS
            )

    @contextlib.contextmanager
    def open_segments(self, match: PrefixMatch) -> Iterator[Mapping[int, OpenSegment]]:
        """The open segments of a match, by number; reopened if the match was unpickled or its hold is closed."""
        hold = match.hold
        if hold is None or not hold.acquire():
            held = dict[int, OpenSegment]()
            for number, segment_id in match.segments.items():
                if self._c.marks.has(segment_id):
                    continue  # some of it was purged, perhaps these pages: only a new lookup can tell
                one = self._c.segments.acquire(number, segment_id, match.generation)
                if one is not None:
                    held[number] = one
            hold = Hold(held, 0.0)
            hold.acquire()
            hold.close()
        try:
            yield hold.held
        finally:
            hold.release()

    def close(self) -> None:
        self._team.close()

    def abandon(self) -> None:
        """In a forked child, which does not have the parent's threads."""
        self._team.abandon()


class _SegmentMaps:
    """Maps of the segments of ``jobs``, each of the range that has their pages; made when they are needed."""

    def __init__(self, files: Files, jobs: Sequence[ReadJob]) -> None:
        self._files = files
        self._ranges: dict[int, tuple[int, int]] = {}
        for job in jobs:
            first, end = self._ranges.get(job.segment, (job.offset, 0))
            self._ranges[job.segment] = min(first, job.offset), max(end, job.offset + job.nbytes)
        self._maps: dict[int, FileMapping] = {}

    def of(self, job: ReadJob) -> tuple[FileMapping, int]:
        """The map that has the pages of a job, and their offset in it."""
        first, end = self._ranges[job.segment]
        if job.segment not in self._maps:
            self._maps[job.segment] = self._files.map(job.held.fd, end - first, first)
        return self._maps[job.segment], job.offset - first


def _each(function: Callable[[S], T], items: Iterator[S]) -> list[T]:
    return [function(item) for item in items]
