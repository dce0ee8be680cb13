"""From a match to reads: runs of pages that are neighbours in a segment, according to the index."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvfs.format import segment as fmt
from kvfs.format.checksums import LEAF_BYTES, ROOT_BYTES
from kvfs.lookup.prefix_match import GroupMatch, PrefixMatch
from kvfs.lookup.row_hits import Hits
from kvfs.native.cells import Targets
from kvfs.pages.chunk_set import span
from kvfs.segments.open_segments import OpenSegment


@dataclass
class ReadJob:
    """``count`` pages from ``chunk`` on, ``size`` bytes each, ``stride`` bytes apart in a segment.

    In a job that is read into the caller's buffer they are neighbours there and in the segment: the stride is the size.
    """

    held: OpenSegment
    segment: int  # its number in the match's generation of the index
    offset: int  # bytes, in the segment
    chunk: int
    out: int  # bytes, in the caller's buffer
    size: int
    stride: int
    roots: bytes  # of the pages, concatenated
    seqs: list[int]  # record numbers of the pages

    @property
    def count(self) -> int:
        return len(self.seqs)

    @property
    def nbytes(self) -> int:
        return self.stride * (len(self.seqs) - 1) + self.size

    def root(self, i: int) -> bytes:
        return self.roots[i * ROOT_BYTES : (i + 1) * ROOT_BYTES]

    def page(self, data: memoryview, i: int) -> memoryview:
        """Page ``i`` of the bytes of this job."""
        return data[i * self.stride : i * self.stride + self.size]

    def bits(self) -> int:
        return (1 << len(self.seqs)) - 1 << self.chunk


@dataclass
class Run:
    """``count`` pages from ``chunk`` on, ``stride`` bytes apart in a segment, with their leaf tables."""

    held: OpenSegment
    segment: int
    offset: int
    stride: int
    chunk: int
    leaf: int  # offset of the first leaf table; the others follow without gaps. 0: there is none
    leaf_bytes: int  # of the leaf table of one page
    roots: bytes
    seqs: list[int]
    tables: bytes = b""  # the leaf tables, if they were read ahead
    ranges: Sequence[tuple[int, int]] = ()  # (address, bytes) of registered memory that holds it, if that was looked up

    @property
    def count(self) -> int:
        return len(self.seqs)

    @property
    def span(self) -> int:
        """Bytes from the start of the first page to the end of the last one's stride."""
        return self.stride * len(self.seqs)

    def root(self, i: int) -> bytes:
        return self.roots[i * ROOT_BYTES : (i + 1) * ROOT_BYTES]

    def cut(self, first: int, count: int) -> Run:
        """Pages [first, first + count) of this run."""
        return Run(
            self.held, self.segment, self.offset + first * self.stride, self.stride, self.chunk + first,
            self.leaf and self.leaf + first * self.leaf_bytes, self.leaf_bytes,
            self.roots[first * ROOT_BYTES : (first + count) * ROOT_BYTES], self.seqs[first : first + count],
            self.tables[first * self.leaf_bytes : (first + count) * self.leaf_bytes],
            self.ranges and _within(self.ranges, first * self.stride, count * self.stride),
        )  # fmt: skip


class Scatter(NamedTuple):
    """Neighbouring pages of a load that are to be copied to an engine's buffers."""

    load: int  # number of the load
    match: PrefixMatch
    gm: GroupMatch  # of these pages
    held: Mapping[int, OpenSegment]
    leaf_bytes: int
    states: int  # of a page
    units: array[int]  # of the whole prompt, checked
    targets: Targets


def _within(ranges: Sequence[tuple[int, int]], first: int, nbytes: int) -> list[tuple[int, int]]:
    """``nbytes`` bytes of ``ranges``, which follow one another, from byte ``first`` on."""
    found, end = [], first + nbytes
    for address, size in ranges:
        begin, stop = max(0, first), min(size, end)
        if begin < stop:
            found.append((address + begin, stop - begin))
        first, end = first - size, end - size
    return found


def plan_runs(gm: GroupMatch, held: Mapping[int, OpenSegment]) -> tuple[list[Run], int]:
    """The pages that are stored exactly as the reader wants them: runs in chunk order, and the set of these chunks.

    Chunks whose segment has been dropped are in the set (bits) and in no run: they are misses.
    """
    keyed = _plan_keys(gm, held)
    if keyed is not None:
        return keyed
    runs: list[Run] = []
    files: dict[int, OpenSegment | None] = {}
    wanted, covered, stride = (1 << gm.count) - 1 << gm.first, 0, fmt.align(gm.part_bytes)
    next_chunk = next_offset = next_leaf = -1  # of a page that the last run continues with
    for hit in gm.hits:
        base = hit.run * gm.run_length
        bits = hit.bits & (wanted & ~covered) >> base
        row = hit.row() if bits and hit.part == gm.want else None
        for e, skipped, count, roots in row.stretches(bits) if row is not None else ():
            if e.codec or e.stored_bytes != gm.part_bytes:
                continue
            chunk = base + e.first + skipped
            covered |= (1 << count) - 1 << chunk
            if e.segment not in files:
                files[e.segment] = held.get(e.segment)
            file = files[e.segment]
            if file is None or row is None:
                continue
            leaf_bytes, seq = row.leaves * LEAF_BYTES, e.seq + skipped
            offset, leaf = (
                (e.block + skipped * e.stride) * fmt.BLOCK,
                e.leaf and e.leaf * LEAF_BYTES + skipped * leaf_bytes,
            )
            even = count == 1 or e.stride * fmt.BLOCK == stride
            follows = chunk == next_chunk and offset == next_offset and leaf == next_leaf
            if even and follows and runs[-1].held is file:  # pages of keys have a row each, and come in order
                runs[-1].roots += roots
                runs[-1].seqs.extend(range(seq, seq + count))
            else:
                seqs = list(range(seq, seq + count))
                run = Run(file, e.segment, offset, e.stride * fmt.BLOCK, chunk, leaf, leaf_bytes, roots, seqs)
                runs += _evenly(run, stride)
            next_chunk, next_offset = chunk + count, offset + count * stride if even else -1
            next_leaf = leaf and leaf + count * leaf_bytes
    runs.sort(key=lambda run: run.chunk)  # rows of forks may interleave
    return _joined(runs), covered


def _plan_keys(gm: GroupMatch, held: Mapping[int, OpenSegment]) -> tuple[list[Run], int] | None:
    """``plan_runs`` for pages of keys, which have a row each, without parsing these. None where Python has to."""
    stretches = gm.hits.stretches(gm.want) if gm.run_length == 1 and isinstance(gm.hits, Hits) else None
    if stretches is None:
        return None
    runs, covered, stride = list[Run](), 0, fmt.align(gm.part_bytes)
    for one in stretches:
        if one.codec or one.stored_bytes != gm.part_bytes:
            continue
        covered |= span(one.chunk, one.pages)
        file = held.get(one.segment)
        if file is not None:
            seqs = list(range(one.seq, one.seq + one.pages))
            run = Run(
                file, one.segment, one.block * fmt.BLOCK, one.step * fmt.BLOCK, one.chunk, one.leaf * LEAF_BYTES,
                one.leaves * LEAF_BYTES, one.roots, seqs,
            )  # fmt: skip
            runs += _evenly(run, stride)
    return _joined(runs), covered


def _evenly(run: Run, stride: int) -> list[Run]:
    """``run`` if its pages are ``stride`` bytes apart, without gaps; else a run for each page."""
    if run.stride == stride or run.count == 1:
        run.stride = stride
        return [run]
    pieces = [run.cut(i, 1) for i in range(run.count)]
    for piece in pieces:
        piece.stride = stride
    return pieces


def _joined(runs: list[Run]) -> list[Run]:
    """Join runs that are neighbours in the prompt and in a segment, with leaf tables that are neighbours as well."""
    joined: list[Run] = []
    for run in runs:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.held is run.held
            and last.chunk + last.count == run.chunk
            and last.stride == run.stride
            and last.offset + last.span == run.offset
            and bool(last.leaf) == bool(run.leaf)
            and (not run.leaf or last.leaf + last.count * last.leaf_bytes == run.leaf)
        ):
            last.roots += run.roots
            last.seqs += run.seqs
        else:
            joined.append(run)
    return joined


def plan_reads(
    gm: GroupMatch, held: Mapping[int, OpenSegment], bytes_max: int, *, gaps: bool = False, single: bool = False
) -> tuple[list[ReadJob], int]:
    """``plan_runs``, cut into jobs of at most ``bytes_max`` (or one page).

    Unless ``gaps`` between the pages of a job are allowed, each fills a buffer of consecutive pages; with ``single``
    of one page.
    """
    runs, covered = plan_runs(gm, held)
    jobs: list[ReadJob] = []
    size = gm.part_bytes
    for run in runs:
        step = max(1, bytes_max // run.stride) if gaps or (run.stride == size and not single) else 1
        stride = run.stride if gaps else size
        for i in range(0, run.count, step):
            n = min(step, run.count - i)
            jobs.append(ReadJob(
                run.held, run.segment, run.offset + i * run.stride, run.chunk + i, (run.chunk + i - gm.first) * size,
                size, stride, run.roots[i * ROOT_BYTES : (i + n) * ROOT_BYTES], run.seqs[i : i + n],
            ))  # fmt: skip
    return jobs, covered
