"""Reading runs of pages into the caller's memory with several threads, and verifying them.

What appears to be in the page cache is read without waiting for a disk, in pieces that fit into a core's cache, where
the checksum finds them; each thread takes the next piece when it is free, so that all threads end together. What turns
out not to be cached is read afterwards, like everything else: each thread reads neighbours, in large reads.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import TypeAlias

from kvfs.context import Context
from kvfs.format import segment as fmt
from kvfs.format.checksums import LEAF_BYTES, leaf_table, root_of
from kvfs.native import library, payloads
from kvfs.native.loads import CachedLoad, LoadRun
from kvfs.read.plan import ReadJob, Run, Scatter
from kvfs.system.files import Files
from kvfs.system.memory_views import PageBuffers, address_of
from kvfs.system.thread_pool import Team
from kvfs.types import Verify

COLD_THREADS = 8  # parallel reads of what is not in the page cache: keeps several requests queued at a disk
PIECE_BYTES = 512 << 10  # read and checksummed at once: stays in a core's cache in between
SCATTER_BYTES = 2 << 20  # for each thread that copies to an engine's buffers: a thread comes within 0.1 ms
READ_BYTES = 4 << 20  # one read of what is not in the page cache
COPY_BYTES = 2 << 20  # copied to a file at once: one huge page, so one request to the disk
COPY_THREADS = 3  # of one copy: copies of several batches run at once
VERIFIED_MAX = 1 << 20  # pages that policy "first" remembers as verified

#: Chunks that were read and verified, as bits; bad records as (segment, seq).
Found: TypeAlias = "tuple[int, list[tuple[int, int]]]"


#: One read of whole leaves: number of the piece, number of the job, descriptor, offset in the file, offset in the
#: caller's buffer, bytes, bytes of a leaf (0: no checksum). A plain tuple: there are hundreds in one call.
_Piece: TypeAlias = "tuple[int, int, int, int, int, int, int]"


class Fetcher:
    """Reads and verifies pages. Thread-safe. Disk errors make misses, they are never raised.

    Owns what policy "first" has verified. Parallel work is delegated to ``team``, reads to the open segments.
    """

    def __init__(self, context: Context, team: Team) -> None:
        self._c = context
        self._team = team
        self._verified: set[tuple[bytes, int]] = set()

    def fetch(
        self, jobs: Sequence[ReadJob], leaf_bytes: int, out: memoryview | PageBuffers
    ) -> tuple[int, list[tuple[int, int]], int]:
        """Fill ``out`` with jobs, each of at most READ_BYTES or one page.

        Returns the chunks that verified (as bits), bad records as (segment, seq), and the chunks that the page cache
        lacked (as bits).
        """
        ends = jobs[:1], jobs[-1:]
        if all(self._seems_cached(job) for end in ends for job in end):
            found, rest = self._from_cache(jobs, leaf_bytes, out)
        else:
            seems = [self._seems_cached(job) for job in jobs]
            found, rest = self._from_cache([job for job, yes in zip(jobs, seems, strict=True) if yes], leaf_bytes, out)
            rest = sorted(rest + [job for job, yes in zip(jobs, seems, strict=True) if not yes], key=_chunk)
        if rest:
            found += self._from_disk(rest, leaf_bytes, out)
        cold = sum(job.bits() for job in rest)
        return sum(bits for bits, _ in found), [fault for _, faults in found for fault in faults], cold

    def fetch_at_once(self, jobs: Sequence[ReadJob], leaf_bytes: int, out: memoryview | PageBuffers) -> int:
        """Fill ``out`` with jobs that are in the page cache as a whole; the chunks that verified (as bits).

        Waits for no disk. Nothing is counted of other chunks; none is good where that cannot be done.
        """
        native = self._native()
        jobs = self._cached_jobs(jobs) if native is not None else []
        if native is None or not jobs:
            return 0
        summed = [self.must_verify(job) for job in jobs]
        read = self._read_native(native, jobs, summed, leaf_bytes, out, self._readers(jobs, leaf_bytes))
        if not read.supported:
            return 0
        left, good = set(read.left()), 0
        same = not left and all(summed) and self._same_roots(native, read, jobs, leaf_bytes)
        for number, job in enumerate(jobs):
            if number in left:
                continue
            if not same and summed[number] and b"".join(_roots(job, read.table(number), leaf_bytes)) != job.roots:
                continue
            self._remember(job.held.segment_id, job.seqs)
            good |= job.bits()
        return good

    def _same_roots(
        self, native: library.Library, read: payloads.CachedRead | payloads.FileCopy, jobs: Sequence[ReadJob],
        leaf_bytes: int,
    ) -> bool:  # fmt: skip
        """Whether all jobs, which have no gaps, were summed and verify: one call for all of them."""
        found = payloads.roots(native, read.tables(), jobs[0].size // leaf_bytes * LEAF_BYTES)
        return found == b"".join([job.roots for job in jobs])

    def _cached_jobs(self, jobs: Sequence[ReadJob]) -> list[ReadJob]:
        """Those of which the kernel does not tell that some of it is not in the page cache: a read that finds less than
        it wants may begin to read ahead, which waits where a disk hangs. Neighbours are asked about at once."""
        found, first = list[ReadJob](), 0
        for end in range(1, len(jobs) + 1):
            last = jobs[end - 1]
            behind = fmt.align(last.offset + last.nbytes)
            if end < len(jobs) and jobs[end].held is last.held and jobs[end].offset == behind:
                continue
            offset, nbytes = jobs[first].offset, last.offset + last.nbytes - jobs[first].offset
            if self._c.segments.cached_bytes(last.held, offset, nbytes) in (None, nbytes):
                found += jobs[first:end]
            else:
                found += [job for job in jobs[first:end] if self._cached(job) == job.nbytes]
            first = end
        return found

    def copy(
        self, jobs: Sequence[ReadJob], leaf_bytes: int, to: int, spots: Sequence[tuple[int, int, int]]
    ) -> int | None:
        """Copy the pages of jobs into the file ``to``, all verified; the chunks that the page cache lacked (as bits).

        A job's ``out`` is its place in the stream of the spots. None if that cannot be done, or a page does not verify:
        ``fetch`` tells which, and the file is undefined there.
        """
        native = library.loaded()
        if native is None or type(self._c.files) is not Files:
            return None
        direct = [self._reads_direct(job) for job in jobs]
        fds = [self._c.segments.direct(job.held) if yes else job.held.fd for job, yes in zip(jobs, direct, strict=True)]
        if min(fds) < 0:
            return None
        self._c.counters.add("direct_reads", sum(direct))
        stretches = [
            payloads.Stretch(fd, job.offset, job.out, job.nbytes, leaf_bytes)
            for fd, job in zip(fds, jobs, strict=True)
        ]  # fmt: skip
        step = max(1, COPY_BYTES // leaf_bytes) * leaf_bytes
        workers = max(1, min(sum(-(-job.nbytes // step) for job in jobs), COPY_THREADS))
        copy = payloads.FileCopy(native, stretches, spots, to, step, workers)
        self._team.each(copy.work, [copy.share] * workers)
        if copy.errno:
            return None
        if not self._same_roots(native, copy, jobs, leaf_bytes):
            return None
        return sum(job.bits() for job, yes in zip(jobs, direct, strict=True) if yes)

    def scatter_at_once(self, pages: Sequence[tuple[Scatter, Sequence[Run]]], loads: int) -> set[int]:
        """Copy the runs of pages to the engine; numbers of the loads of which a page is not in the page cache, or does
        not verify. All of them where that cannot be done."""
        native = self._native()
        if native is None or not pages:
            return {each.load for each, _ in pages}
        lacking = {
            each.load for each, runs in pages if not all(self._run_cached(run, each.gm.part_bytes) for run in runs)
        }
        pages = [(each, runs) for each, runs in pages if each.load not in lacking]
        cached = [
            LoadRun(
                each.load, run.held.fd, run.offset, run.stride, each.gm.part_bytes,
                each.leaf_bytes if self.must_verify(run) else 0, run.roots, run.count, run.chunk * each.states,
                each.units, each.targets,
            )
            for each, runs in pages for run in runs
        ]  # fmt: skip
        nbytes = sum(each.gm.nbytes for each, _ in pages)
        workers = max(1, min(self._c.threads, nbytes // SCATTER_BYTES))
        load = CachedLoad(native, cached, loads, workers)
        self._team.each(load.work, [load.share] * workers)
        return load.left() | lacking

    def _run_cached(self, run: Run, page_bytes: int) -> bool:
        """As of ``_cached_jobs``."""
        nbytes = run.span - run.stride + page_bytes
        return self._c.segments.cached_bytes(run.held, run.offset, nbytes) in (None, nbytes)

    def _native(self) -> library.Library | None:
        """The library, unless the tests replace the system calls."""
        return library.loaded() if type(self._c.files) is Files else None

    def _seems_cached(self, job: ReadJob) -> bool:
        """Whether the end of a job is in the page cache. Asking about all of it costs a tenth of reading it."""
        return self._c.segments.cached_bytes(job.held, job.offset + job.nbytes - 1, 1) != 0

    # -- from the page cache -------------------------------------------------------------------

    def _from_cache(
        self, jobs: Sequence[ReadJob], leaf_bytes: int, out: memoryview | PageBuffers
    ) -> tuple[list[Found], list[ReadJob]]:
        """(what was found, jobs that cannot be read without waiting for a disk)."""
        native = self._native()
        summed = [self.must_verify(job) for job in jobs]
        if native is not None and jobs:
            read = self._read_native(native, jobs, summed, leaf_bytes, out, self._readers(jobs, leaf_bytes))
            if read.supported:
                return self._found_native(read, jobs, summed, leaf_bytes)
        pieces: list[_Piece] = []
        step = _step(leaf_bytes)
        firsts = []
        for number, job in enumerate(jobs):
            firsts.append(len(pieces))
            fd, offset, start, end, leaf = job.held.fd, job.offset, job.out, job.nbytes, leaf_bytes * summed[number]
            pieces += [
                (n, number, fd, offset + at, start + at, min(step, end - at), leaf)
                for n, at in enumerate(range(0, end, step), len(pieces))
            ]
        tables: list[bytes | None] = [None] * len(pieces)
        left: set[int] = set()
        workers = max(1, min(len(pieces), self._c.threads))
        self._team.each(partial(self._read_pieces, out, tables, left), [iter(pieces)] * workers)
        found = []
        for number, (job, (a, b)) in enumerate(zip(jobs, pairwise([*firsts, len(pieces)]), strict=True)):
            if number not in left:
                table = b"".join([table for table in tables[a:b] if table is not None])
                found.append(self._verify_job(job, table, leaf_bytes) if summed[number] else (job.bits(), []))
        return found, [jobs[number] for number in sorted(left)]

    def _readers(self, jobs: Sequence[ReadJob], leaf_bytes: int) -> int:
        """Threads that have something to do."""
        return max(1, min(sum(-(-job.nbytes // _step(leaf_bytes)) for job in jobs), self._c.threads))

    def _read_native(
        self, native: library.Library, jobs: Sequence[ReadJob], summed: Sequence[bool], leaf_bytes: int,
        out: memoryview | PageBuffers, workers: int,
    ) -> payloads.CachedRead:  # fmt: skip
        """Read what the page cache has, with one call per thread; not ``supported`` where the file system does not say
        what that is."""
        places = [job.out for job in jobs]
        if isinstance(out, PageBuffers):
            places = [address_of(out[job.out : job.out + job.nbytes]) for job in jobs]
            start = min(places)
            places = [place - start for place in places]
        else:
            start = address_of(out)
        stretches = [
            payloads.Stretch(job.held.fd, job.offset, place, job.nbytes, leaf_bytes * yes)
            for job, place, yes in zip(jobs, places, summed, strict=True)
        ]
        read = payloads.CachedRead(native, stretches, _step(leaf_bytes), start, workers)
        self._team.each(read.work, [read.share] * workers)
        return read

    def _found_native(
        self, read: payloads.CachedRead, jobs: Sequence[ReadJob], summed: Sequence[bool], leaf_bytes: int
    ) -> tuple[list[Found], list[ReadJob]]:
        left, found = set(read.left()), []
        for number, job in enumerate(jobs):
            if number not in left:
                verified = self._verify_job(job, read.table(number), leaf_bytes) if summed[number] else (job.bits(), [])
                found.append(verified)
        return found, [jobs[number] for number in sorted(left)]

    def must_verify(self, job: ReadJob | Run) -> bool:
        """Whether the policy asks for checksums of a job."""
        policy, segment = self._c.verify, job.held.segment_id
        if policy is Verify.FIRST:
            return not all((segment, seq) in self._verified for seq in job.seqs)
        return policy is Verify.ALWAYS

    def _read_pieces(
        self, out: memoryview | PageBuffers, tables: list[bytes | None], left: set[int], share: Iterator[_Piece]
    ) -> None:
        """Read and checksum a share of the pieces; ``left`` gets the jobs that could not be read."""
        read_cached = self._c.files.read_cached
        for number, job, fd, offset, at, nbytes, leaf_bytes in share:
            if job in left:
                continue
            target = out[at : at + nbytes]
            try:
                done = read_cached(fd, target, offset)
            except OSError:  # counted if it fails again when the job is read from the disk
                done = False
            if not done:
                left.add(job)
            elif leaf_bytes:
                tables[number] = leaf_table(target, leaf_bytes)

    # -- from a disk ---------------------------------------------------------------------------

    def _from_disk(self, jobs: Sequence[ReadJob], leaf_bytes: int, out: memoryview | PageBuffers) -> list[Found]:
        cold = self._cached(jobs[0]) == 0 or self._cached(jobs[-1]) == 0
        # direct reads keep a disk busy with many requests; through the page cache, a few streams read ahead best
        workers = min(len(jobs), COLD_THREADS if self._reads_direct_into(jobs[-1], out) else self._c.threads)
        bounds = [len(jobs) * i // workers for i in range(workers + 1)]
        # from a disk each thread reads neighbours; from memory it takes the next job
        shares = [iter(jobs[a:b]) for a, b in pairwise(bounds)] if cold else [iter(jobs)] * workers
        read = partial(self._read_jobs, leaf_bytes, out)
        return [found for share in self._team.each(read, shares) for found in share]

    def _read_jobs(self, leaf_bytes: int, out: memoryview | PageBuffers, share: Iterator[ReadJob]) -> list[Found]:
        return [self._read_job(job, out[job.out : job.out + job.nbytes], leaf_bytes, out) for job in share]

    def _cached(self, job: ReadJob) -> int | None:
        return self._c.segments.cached_bytes(job.held, job.offset, job.nbytes)

    def _reads_direct_into(self, job: ReadJob, out: memoryview | PageBuffers) -> bool:
        """``_reads_direct``, and the buffer is aligned for it."""
        aligned = not address_of(out[job.out : job.out + job.nbytes]) % fmt.BLOCK
        return self._c.mode.direct or (aligned and self._reads_direct(job))

    def _reads_direct(self, job: ReadJob) -> bool:
        """Whether a job bypasses the page cache (O_DIRECT).

        In mode cache this is so for cold bytes without an earlier use: reading them through the page cache costs
        several times the CPU, and the kernel drops pages used once first.
        """
        mode = self._c.mode
        return mode.direct or (
            mode.cold_direct
            and not job.size % fmt.BLOCK
            and self._cached(job) == 0
            and not self._c.access_times.was_used(job.held.segment_id, job.seqs[0])
            and self._c.segments.direct(job.held) >= 0
        )

    def _read_job(self, job: ReadJob, target: memoryview, leaf_bytes: int, out: memoryview | PageBuffers) -> Found:
        """Read and verify."""
        try:
            table = self._read_and_sum(job, target, leaf_bytes, self._reads_direct_into(job, out))
        except OSError:
            return self._read_singly(job, target, leaf_bytes)
        if table is not None:
            return self._verify_job(job, table, leaf_bytes)
        return _found(job, [self.check(job, i, job.page(target, i), leaf_bytes) for i in range(job.count)])

    def _read_and_sum(self, job: ReadJob, target: memoryview, leaf_bytes: int, direct: bool) -> bytes | None:
        """Read a job; its leaf table if every read is verified, computed while the bytes are in the CPU cache."""
        read = self._c.segments.read
        if direct:
            self._c.counters.add("direct_reads")
        if self._c.verify is not Verify.ALWAYS:
            read(job.held, target, job.offset, direct=direct)
            return None
        step = len(target) if direct else _step(leaf_bytes)
        tables = []
        for at in range(0, len(target), step):
            piece = target[at : at + step]
            read(job.held, piece, job.offset + at, direct=direct)
            tables.append(leaf_table(piece, leaf_bytes))
        return b"".join(tables)

    def _read_singly(self, job: ReadJob, target: memoryview, leaf_bytes: int) -> Found:
        """Read page by page after a read of the whole job has failed."""
        self._c.counters.add("read_errors")
        good: list[bool | None] = []
        for i in range(job.count):
            page = job.page(target, i)
            try:
                self._c.segments.read(job.held, page, job.offset + i * job.size)
                good.append(self.check(job, i, page, leaf_bytes))
            except OSError as exc:
                good.append(None if exc.errno == errno.ENOMEM else False)
        return _found(job, good)

    # -- verification ----------------------------------------------------------------------------

    def check(self, job: ReadJob, i: int, data: memoryview, leaf_bytes: int) -> bool:
        """Whether page ``i`` has the root that the index holds; True where the policy does not ask."""
        policy, key = self._c.verify, (job.held.segment_id, job.seqs[i])
        if policy is Verify.OFF or (policy is Verify.FIRST and key in self._verified):
            return True
        if not self._agrees(root_of(leaf_table(data, leaf_bytes)), job.root(i)):
            return False
        self._remember(job.held.segment_id, job.seqs[i : i + 1])
        return True

    def _verify_job(self, job: ReadJob, table: bytes, leaf_bytes: int) -> Found:
        """Which pages of a job have the roots that the index holds; ``table``: leaf tables of what was read."""
        roots = _roots(job, table, leaf_bytes)
        if b"".join(roots) == job.roots:
            self._remember(job.held.segment_id, job.seqs)
            return job.bits(), []
        good = [self._agrees(root, job.root(i)) for i, root in enumerate(roots)]
        self._remember(job.held.segment_id, [seq for seq, fine in zip(job.seqs, good, strict=True) if fine])
        return _found(job, good)

    def _agrees(self, root: bytes, expected: bytes) -> bool:
        if root == expected:
            return True
        self._c.counters.add("pages_corrupt")
        return False

    def remember(self, runs: Sequence[Run]) -> None:
        """Note that these pages are verified, for policy "first"."""
        for run in runs:
            self._remember(run.held.segment_id, run.seqs)

    def _remember(self, segment: bytes, seqs: Sequence[int]) -> None:
        """Note that these records are verified: policy "first" skips them from now on."""
        if self._c.verify is Verify.FIRST:
            if len(self._verified) >= VERIFIED_MAX:
                self._verified.clear()
            self._verified.update([(segment, seq) for seq in seqs])


def _step(leaf_bytes: int) -> int:
    """Bytes of a piece: whole leaves."""
    return max(1, PIECE_BYTES // leaf_bytes) * leaf_bytes


def _roots(job: ReadJob, table: bytes, leaf_bytes: int) -> list[bytes]:
    """Root of each page of a job, from its leaf table."""
    step = job.size // leaf_bytes * LEAF_BYTES
    return [root_of(table[at : at + step]) for at in range(0, len(table), step)]


def _chunk(job: ReadJob) -> int:
    return job.chunk


def _found(job: ReadJob, good: Sequence[bool | None]) -> Found:
    """``good`` of a page: False for a bad record; None for a miss due to lack of memory, which is not a bad record."""
    bits = sum(1 << job.chunk + i for i, fine in enumerate(good) if fine)
    return bits, [(job.segment, seq) for fine, seq in zip(good, job.seqs, strict=True) if fine is False]
