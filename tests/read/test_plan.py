"""From rows of the index to reads."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from kvfs.index.rows import Place, pack_row
from kvfs.lookup.prefix_match import GroupMatch
from kvfs.lookup.row_hits import Hit
from kvfs.pages.layout import Part
from kvfs.read.plan import plan_reads, plan_runs
from kvfs.segments.open_segments import OpenSegment

WANT = Part(0, 1, 0, 1)
PAGE = 4096


def place(block: int, seq: int) -> Place:
    return Place(seq.to_bytes(32, "little"), seq.to_bytes(16, "little"), 0, 0, 1, block, PAGE, 1000 + block, seq, 0)


def hit(places: dict[int, Place]) -> Hit:
    key = bytes(40)
    return Hit(0, WANT, key, pack_row(key, places, 1), sum(1 << j for j in places))


def planned(hits: tuple[Hit, ...], count: int, bytes_max: int = 1 << 20) -> list[tuple[int, int, int, bytes]]:
    gm = GroupMatch(0, "full", WANT, None, PAGE, 0, count, hits, 32)
    jobs, covered = plan_reads(gm, {1: OpenSegment(1, bytes(16), -1, "")}, bytes_max)
    assert covered == (1 << count) - 1
    assert all(job.roots == b"".join(seq.to_bytes(16, "little") for seq in job.seqs) for job in jobs)
    return [(job.chunk, job.count, job.offset // PAGE, bytes(job.seqs)) for job in jobs]


def test_rows_that_interleave_are_read_in_the_order_of_the_prompt() -> None:
    """A view ends at the first gap: it returned 3 pages of 18 where a fork's row filled the middle of a run."""
    outer = hit({0: place(10, 1), 1: place(11, 2), 4: place(20, 5)})
    inner = hit({2: place(30, 7), 3: place(31, 8)})
    assert planned((outer, inner), 5) == [(0, 2, 10, b"\1\2"), (2, 2, 30, b"\7\x08"), (4, 1, 20, b"\5")]


def test_neighbours_are_one_read_up_to_its_limit() -> None:
    row = hit({j: place(10 + j, 1 + j) for j in range(7)})
    assert planned((row,), 7, 3 * PAGE) == [(0, 3, 10, b"\1\2\3"), (3, 3, 13, b"\4\5\6"), (6, 1, 16, b"\7")]


def test_pages_of_keys_that_are_neighbours_are_one_run() -> None:
    """Each has a row of its own."""
    key = bytes(40)
    blocks = [10, 11, 12, 20, 21, 5]
    hits = tuple(Hit(n, WANT, key, pack_row(key, {0: place(block, 1 + n)}, 1), 1) for n, block in enumerate(blocks))
    gm = GroupMatch(0, "full", WANT, None, PAGE, 0, 6, hits, 1)
    runs, covered = plan_runs(gm, {1: OpenSegment(1, bytes(16), -1, "")})
    assert covered == 0b111111
    assert [(run.chunk, run.offset // PAGE, run.seqs) for run in runs] == [
        (0, 10, [1, 2, 3]), (3, 20, [4, 5]), (5, 5, [6]),
    ]  # fmt: skip
    assert b"".join(run.roots for run in runs) == b"".join((1 + n).to_bytes(16, "little") for n in range(6))


def test_runs_have_no_gaps_whatever_a_row_says() -> None:
    """The copy of a whole run has room for its pages, not for bytes between them."""
    row = hit({j: place(10 + 7 * j, 1 + j) for j in range(3)} | {3: place(25, 4)})
    gm = GroupMatch(0, "full", WANT, None, PAGE, 0, 4, (row,), 32)
    runs, _ = plan_runs(gm, {1: OpenSegment(1, bytes(16), -1, "")})
    assert [(run.chunk, run.count, run.offset // PAGE, run.span // PAGE) for run in runs] == [
        (0, 1, 10, 1), (1, 1, 17, 1), (2, 2, 24, 2),
    ]  # fmt: skip


def test_pages_with_gaps_between_them_are_read_singly() -> None:
    row = hit({j: place(10 + 2 * j, 1 + j) for j in range(3)})
    assert planned((row,), 3) == [(0, 1, 10, b"\1"), (1, 1, 12, b"\2"), (2, 1, 14, b"\3")]


def test_a_part_of_a_run_has_its_part_of_the_registered_memory() -> None:
    row = hit({j: place(10 + j, 1 + j) for j in range(4)})
    gm = GroupMatch(0, "full", WANT, None, PAGE, 0, 4, (row,), 32)
    (run,) = plan_runs(gm, {1: OpenSegment(1, bytes(16), -1, "")})[0]
    assert not run.cut(1, 2).ranges
    first, second = 0x100000, 0x900000
    run.ranges = [(first, PAGE + 512), (second, 3 * PAGE - 512)]
    assert run.cut(0, 1).ranges == [(first, PAGE)]
    assert run.cut(1, 2).ranges == [(first + PAGE, 512), (second, 2 * PAGE - 512)]
    assert run.cut(1, 3).cut(1, 2).ranges == [(second + PAGE - 512, 2 * PAGE)]


def test_a_read_with_gaps_takes_pages_at_their_stride_and_others_one_at_a_time() -> None:
    """Half a block of payload to a page: the pages of a segment are further apart than those of a buffer."""
    size = PAGE // 2
    places = {j: place(10 + j, 1 + j)._replace(stored_bytes=size) for j in range(4)}
    gm = GroupMatch(0, "full", WANT, None, size, 1, 4, (hit(places),), 32)
    held = {1: OpenSegment(1, bytes(16), -1, "")}
    (job,), _ = plan_reads(gm, held, 1 << 20, gaps=True)
    assert (job.chunk, job.offset, job.out, job.count) == (1, 11 * PAGE, 0, 3), "from the first chunk that is wanted"
    assert (job.size, job.stride, job.nbytes, job.bits()) == (size, PAGE, 2 * PAGE + size, 0b1110)
    data = memoryview(bytearray(job.nbytes))
    data[PAGE : PAGE + size] = bytes([7]) * size
    assert bytes(job.page(data, 1)) == bytes([7]) * size and job.root(1) == (3).to_bytes(16, "little")
    jobs, _ = plan_reads(gm, held, 1 << 20)
    assert [(j.chunk, j.offset, j.out, j.stride) for j in jobs] == [
        (1, 11 * PAGE, 0, size), (2, 12 * PAGE, size, size), (3, 13 * PAGE, 2 * size, size),
    ]  # fmt: skip


def test_a_single_read_is_of_one_page_although_they_are_neighbours() -> None:
    gm = GroupMatch(0, "full", WANT, None, PAGE, 0, 3, (hit({j: place(10 + j, 1 + j) for j in range(3)}),), 32)
    jobs, _ = plan_reads(gm, {1: OpenSegment(1, bytes(16), -1, "")}, 1 << 20, single=True)
    assert [job.count for job in jobs] == [1, 1, 1]


def test_pages_of_a_dropped_segment_are_covered_and_not_read() -> None:
    gm = GroupMatch(0, "full", WANT, None, PAGE, 0, 3, (hit({j: place(10 + j, 1 + j) for j in range(3)}),), 32)
    assert plan_reads(gm, {}, 1 << 20) == ([], 0b111)


@pytest.mark.parametrize("seed", range(60))
def test_runs_are_those_pages_that_follow_one_another(seed: int) -> None:
    """Rows that interleave, rows of forks, codecs, gaps, parts and segments, against a list of single pages."""
    draw = random.Random(seed)
    size, length, count = draw.choice([PAGE, 3 * PAGE, PAGE // 2]), draw.choice([1, 4, 32]), draw.randrange(1, 40)
    first = draw.randrange(count)
    blocks = -(-size // PAGE)
    leaves = draw.choice([1, 4])
    hits, pages, covered, other = list[Hit](), dict[int, Place](), 0, Part(0, 1, 0, 2)
    for number in range(-(-count // length)):
        slots = [j for j in range(length) if number * length + j < count]
        for _ in range(draw.choice([1, 1, 2, 3])):
            taken = [j for j in slots if draw.random() < 0.8]
            block, seq, leaf = draw.randrange(50, 10_000), draw.randrange(1, 10_000), draw.randrange(4_000, 10_000)
            segment, places = draw.choice([1, 1, 2, 9]), dict[int, Place]()
            gap = draw.choice([0, 0, 0, 5])
            for j in taken:
                if draw.random() < 0.1:
                    block, seq, leaf = (
                        block + draw.choice([0, 7]),
                        seq + draw.choice([0, 1]),
                        leaf + draw.choice([0, 8]),
                    )
                places[j] = Place(
                    bytes([j]) * 32, draw.randbytes(16), draw.choice([0] * 9 + [1]), 0, segment, block,
                    draw.choice([size] * 9 + [size - 1]), leaf, seq, 0,
                )  # fmt: skip
                block, seq, leaf = block + blocks + gap, seq + 1, leaf + leaves
            if not places:
                continue
            part = draw.choice([WANT] * 5 + [other])
            bits = sum(1 << j for j in places if draw.random() < 0.9)
            hits.append(Hit(number, part, bytes(40), pack_row(bytes(40), places, leaves), bits))
            for j, place in places.items():
                chunk = number * length + j
                usable = part == WANT and bits >> j & 1 and not place.codec and place.stored_bytes == size
                if usable and chunk >= first and not covered >> chunk & 1:
                    covered |= 1 << chunk
                    if place.segment != 9:
                        pages[chunk] = place
    held = {n: OpenSegment(n, bytes(16), -1, "") for n in (1, 2)}
    gm = GroupMatch(0, "full", WANT, None, size, first, count, tuple(hits), length)
    runs, found = plan_runs(gm, held)
    assert found == covered
    assert [run.chunk + i for run in runs for i in range(run.count)] == sorted(pages), "in the order of the prompt"
    stride = blocks * PAGE
    for run in runs:
        assert (run.stride, run.leaf_bytes, run.span) == (stride, 8 * leaves, stride * run.count)
        for i, seq in enumerate(run.seqs):
            place = pages[run.chunk + i]
            assert (run.held, run.segment, seq, run.root(i)) == (
                held[place.segment],
                place.segment,
                place.seq,
                place.root,
            )
            assert (run.offset + i * stride, run.leaf + i * run.leaf_bytes) == (place.block * PAGE, place.leaf * 8)
    for before, after in pairwise(runs):
        joins = (
            before.held is after.held and before.chunk + before.count == after.chunk
            and before.offset + before.span == after.offset
            and before.leaf + before.count * before.leaf_bytes == after.leaf
        )  # fmt: skip
        assert not joins, "what follows in the prompt, in the segment and in its leaf tables is one run"
    for bytes_max in (1, stride, 3 * stride + 1, 1 << 20):
        for gaps in (False, True):
            jobs, covered_by_jobs = plan_reads(gm, held, bytes_max, gaps=gaps)
            assert covered_by_jobs == covered
            most = max(1, bytes_max // stride) if gaps or stride == size else 1
            assert [job.count for job in jobs] == [
                min(most, run.count - at) for run in runs for at in range(0, run.count, most)
            ]
            for job in jobs:
                assert job.out == (job.chunk - first) * size and job.stride == (stride if gaps else size)
                assert job.offset == pages[job.chunk].block * PAGE and job.bits() == (1 << job.count) - 1 << job.chunk
                assert job.seqs == [pages[job.chunk + i].seq for i in range(job.count)]


def test_a_part_of_a_run_is_that_run_from_its_first_page_on() -> None:
    row = hit({j: place(10 + j, 1 + j)._replace(leaf=3000 + j) for j in range(4)})
    gm = GroupMatch(0, "full", WANT, None, PAGE, 0, 4, (row,), 32)
    (run,) = plan_runs(gm, {1: OpenSegment(1, bytes(16), -1, "")})[0]
    run.tables = bytes(range(4 * run.leaf_bytes))
    part = run.cut(1, 2)
    assert (part.chunk, part.offset, part.stride, part.count, part.span) == (1, 11 * PAGE, PAGE, 2, 2 * PAGE)
    assert part.seqs == [2, 3] and part.roots == b"".join(n.to_bytes(16, "little") for n in (2, 3))
    assert [part.root(n) for n in range(2)] == [run.root(1), run.root(2)]
    assert part.tables == run.tables[run.leaf_bytes : 3 * run.leaf_bytes] and part.leaf_bytes == run.leaf_bytes
    assert part.leaf == run.leaf + run.leaf_bytes > 0
    run.leaf = 0
    assert run.cut(2, 1).leaf == 0, "there is none"
    assert run.cut(0, 4) == run
