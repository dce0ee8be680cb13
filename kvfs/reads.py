"""From a match to reads: stretches of pages that lie one behind the other in a segment, as the index has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kvfs import format as fmt
from kvfs.hashing import ROOT_BYTES
from kvfs.index.rows import parse_row
from kvfs.match import GroupMatch
from kvfs.segment_files import Held


@dataclass
class Job:
    """``count`` pages from ``chunk`` on, ``size`` bytes each, neighbours in a segment and in the caller's buffer."""

    held: Held
    segment: int  # its number in the match's generation of the index
    offset: int  # in it
    chunk: int
    out: int  # offset in the caller's buffer
    size: int
    roots: bytes = b""  # of the pages, one behind the other
    seqs: list[int] = field(default_factory=list)  # their records

    @property
    def count(self) -> int:
        return len(self.seqs)

    @property
    def nbytes(self) -> int:
        return self.size * len(self.seqs)

    def root(self, i: int) -> bytes:
        return self.roots[i * ROOT_BYTES : (i + 1) * ROOT_BYTES]

    def bits(self) -> int:
        return (1 << len(self.seqs)) - 1 << self.chunk


def plan_reads(gm: GroupMatch, held: Mapping[int, Held], bytes_max: int) -> tuple[list[Job], int]:
    """Reads of the pages that lie just as the reader wants them, by chunk, and the set (as bits) of all that do.

    Chunks whose segment is gone are in the set and in no read: they are misses.
    """
    jobs: list[Job] = []
    wanted, covered = (1 << gm.count) - 1 << gm.first, 0
    for hit in gm.hits:
        base = hit.run * gm.run_length
        bits = hit.bits & (wanted & ~covered) >> base
        row = parse_row(hit.key, hit.value) if bits and hit.part == gm.want else None
        for e, skipped, count, roots in row.stretches(bits) if row is not None else ():
            if e.codec or e.stored_bytes != gm.part_bytes:
                continue
            chunk = base + e.first + skipped
            covered |= (1 << count) - 1 << chunk
            file = held.get(e.segment)
            if file is None:
                continue
            offset = (e.block + skipped * e.stride) * fmt.BLOCK
            seqs = list(range(e.seq + skipped, e.seq + skipped + count))
            out = (chunk - gm.first) * gm.part_bytes
            at = Job(file, e.segment, offset, chunk, out, gm.part_bytes, roots, seqs)
            near = e.stride * fmt.BLOCK == gm.part_bytes
            for piece in [at] if near or count == 1 else _singly(at, e.stride * fmt.BLOCK):
                _add(jobs, piece, max(1, bytes_max // gm.part_bytes))
    jobs.sort(key=lambda job: job.chunk)  # rows of forks may interleave
    return jobs, covered


def _singly(job: Job, stride: int) -> Iterator[Job]:
    """Pages with gaps between them."""
    for i, seq in enumerate(job.seqs):
        out = job.out + i * job.size
        yield Job(job.held, job.segment, job.offset + i * stride, job.chunk + i, out, job.size, job.root(i), [seq])


def _add(jobs: list[Job], job: Job, pages_max: int) -> None:
    """Append a stretch, joined to the last one where they meet, in jobs of at most ``pages_max`` pages."""
    done = 0
    while done < job.count:
        last = jobs[-1] if jobs else None
        offset, chunk = job.offset + done * job.size, job.chunk + done
        if (
            last is None
            or last.held is not job.held
            or last.offset + last.nbytes != offset
            or last.chunk + last.count != chunk
            or last.count >= pages_max
        ):
            last = Job(job.held, job.segment, offset, chunk, job.out + done * job.size, job.size)
            jobs.append(last)
        take = min(job.count - done, pages_max - last.count)
        last.roots += job.roots[done * ROOT_BYTES : (done + take) * ROOT_BYTES]
        last.seqs += job.seqs[done : done + take]
        done += take
