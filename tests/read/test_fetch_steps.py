"""Reads of pages, step by step: what the page cache and the disk are asked, what is verified and counted."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvfs.format.checksums import leaf_table, root_of
from kvfs.read import fetch
from kvfs.read.fetch import Fetcher
from kvfs.read.plan import ReadJob
from kvfs.types import Verify

PAGE, LEAF = 4096, 256
CONTENT = bytes((n * 7 + n // 4096) % 251 for n in range(64 * PAGE))  # of the segment
SEGMENT = b"s" * 16


class Segments:
    """One segment in memory: the first ``cached`` bytes of it are in the page cache."""

    def __init__(self, cached: int | None = 0) -> None:
        self.cached = cached
        self.reads: list[tuple[int, int, bool]] = []
        self.fails: dict[int, int] = {}  # reads that begin here fail with this errno
        self.direct_fd = 3

    def cached_bytes(self, held: Any, offset: int, nbytes: int) -> int | None:
        return None if self.cached is None else max(0, min(self.cached, offset + nbytes) - offset)

    def direct(self, held: Any) -> int:
        return self.direct_fd

    def read(self, held: Any, target: memoryview, offset: int, *, direct: bool = False) -> None:
        self.reads.append((offset // PAGE, len(target), direct))
        if offset in self.fails or (
            len(target) > PAGE and any(offset <= at < offset + len(target) for at in self.fails)
        ):
            raise OSError(self.fails.get(offset, errno.EIO), "broken")
        target[:] = CONTENT[offset : offset + len(target)]


def fetcher(
    segments: Segments, verify: Verify = Verify.ALWAYS, **changes: Any
) -> tuple[Fetcher, Counter[str], list[int]]:
    counts, teams = Counter[str](), list[int]()

    def read_cached(fd: int, target: memoryview, offset: int) -> bool:
        if segments.cached is not None and offset + len(target) > segments.cached:
            return False
        if offset in segments.fails:
            raise OSError(segments.fails[offset], "broken")
        target[:] = CONTENT[offset : offset + len(target)]
        return True

    def each(call: Callable[[Any], Any], shares: Sequence[Iterable[Any]]) -> list[Any]:
        teams.append(len(shares))
        return [call(share) for share in shares]

    context: Any = SimpleNamespace(
        segments=segments, verify=verify, threads=2, files=SimpleNamespace(read_cached=read_cached),
        counters=SimpleNamespace(add=lambda name, n=1: counts.update({name: n})),
        mode=SimpleNamespace(direct=False, cold_direct=False), access_times=SimpleNamespace(was_used=lambda *_: False),
    )  # fmt: skip
    for name, value in changes.items():
        setattr(context, name, value)
    team: Any = SimpleNamespace(each=each)
    return Fetcher(context, team), counts, teams


def job(first: int, count: int, chunk: int | None = None, *, wrong: Iterable[int] = ()) -> ReadJob:
    """``count`` pages from block ``first`` of the segment; those in ``wrong`` have another root in the index."""
    data = [CONTENT[(first + i) * PAGE : (first + i + 1) * PAGE] for i in range(count)]
    roots = [bytes(16) if i in set(wrong) else root_of(leaf_table(d, LEAF)) for i, d in enumerate(data)]
    number = first if chunk is None else chunk
    held: Any = SimpleNamespace(segment_id=SEGMENT, fd=5)
    return ReadJob(
        held,
        7,
        first * PAGE,
        number,
        first * PAGE,
        PAGE,
        PAGE,
        b"".join(roots),
        [100 + first + i for i in range(count)],
    )


def bits(*chunks: int) -> int:
    return sum(1 << chunk for chunk in chunks)


def fetched(made: Fetcher, jobs: Sequence[ReadJob]) -> tuple[bytearray, tuple[int, list[tuple[int, int]], int]]:
    out = bytearray(len(CONTENT))
    return out, made.fetch(jobs, LEAF, memoryview(out))


@pytest.mark.parametrize("verify", list(Verify))
def test_what_is_cached_is_read_without_the_disk(verify: Verify) -> None:
    segments = Segments(cached=len(CONTENT))
    made, counts, teams = fetcher(segments, verify)
    out, found = fetched(made, [job(0, 2), job(4, 1)])
    assert found == (bits(0, 1, 4), [], 0) and segments.reads == [] and not counts and teams == [2]
    assert out[: 2 * PAGE] == CONTENT[: 2 * PAGE] and out[4 * PAGE : 5 * PAGE] == CONTENT[4 * PAGE : 5 * PAGE]
    assert not any(out[2 * PAGE : 4 * PAGE]), "no more than that"
    assert made._verified == ({(SEGMENT, n) for n in (100, 101, 104)} if verify is Verify.FIRST else set())


@pytest.mark.parametrize("verify", list(Verify))
def test_what_is_not_cached_comes_from_the_disk(verify: Verify) -> None:
    segments = Segments(cached=2 * PAGE)
    made, counts, teams = fetcher(segments, verify)
    out, found = fetched(made, [job(0, 2), job(4, 2)])
    assert found == (bits(0, 1, 4, 5), [], bits(4, 5)) and segments.reads == [(4, 2 * PAGE, False)]
    assert out[4 * PAGE : 6 * PAGE] == CONTENT[4 * PAGE : 6 * PAGE] and not counts and teams == [1, 1]
    segments.reads.clear()
    assert fetched(made, [job(4, 2), job(0, 1)])[1] == (bits(0, 4, 5), [], bits(4, 5))
    assert segments.reads == [(4, 2 * PAGE, False)]


def test_without_a_word_of_the_kernel_the_cache_is_tried() -> None:
    made, _, _ = fetcher(Segments(cached=None))
    assert fetched(made, [job(0, 1)])[1] == (bits(0), [], 0)


@pytest.mark.parametrize("cached", [0, len(CONTENT)])
def test_pages_with_another_root_are_bad_and_the_others_good(cached: int) -> None:
    made, counts, _ = fetcher(Segments(cached), Verify.FIRST)
    _, found = fetched(made, [job(0, 4, wrong=[1, 3])])
    assert found == (bits(0, 2), [(7, 101), (7, 103)], 0 if cached else bits(0, 1, 2, 3))
    assert counts == {"pages_corrupt": 2} and made._verified == {(SEGMENT, 100), (SEGMENT, 102)}
    made, counts, _ = fetcher(Segments(cached), Verify.OFF)
    assert fetched(made, [job(0, 4, wrong=[1, 3])])[1][:2] == (bits(0, 1, 2, 3), []) and not counts


@pytest.mark.parametrize("cached", [0, len(CONTENT)])
def test_policy_first_verifies_what_it_has_not_seen(cached: int) -> None:
    made, counts, _ = fetcher(Segments(cached), Verify.FIRST)
    assert fetched(made, [job(0, 2)])[1][0] == bits(0, 1)
    assert not made.must_verify(job(0, 2)) and made.must_verify(job(0, 3)) and made.must_verify(job(1, 2))
    assert fetched(made, [job(0, 2, wrong=[0, 1])])[1][0] == bits(0, 1), "they were verified"
    assert fetched(made, [job(0, 3, wrong=[2])])[1][:2] == (bits(0, 1), [(7, 102)])
    assert counts == {"pages_corrupt": 1}


def test_what_is_remembered_as_verified_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "VERIFIED_MAX", 3)
    made, _, _ = fetcher(Segments(len(CONTENT)), Verify.FIRST)
    fetched(made, [job(0, 2)])
    fetched(made, [job(2, 1)])
    assert len(made._verified) == 3
    fetched(made, [job(5, 1)])
    assert made._verified == {(SEGMENT, 105)}


@pytest.mark.parametrize(
    ("error", "bad", "good"),
    [(errno.EIO, [(7, 101)], bits(0, 2)), (errno.ENOMEM, [], bits(0, 2))],
    ids=["disk", "memory"],
)
@pytest.mark.parametrize("verify", list(Verify))
def test_after_an_error_pages_are_read_one_by_one(verify: Verify, error: int, bad: Any, good: int) -> None:
    segments = Segments()
    segments.fails[PAGE] = error
    made, counts, _ = fetcher(segments, verify)
    out, found = fetched(made, [job(0, 3)])
    assert found == (good, bad, bits(0, 1, 2)) and counts == {"read_errors": 1}
    assert segments.reads == [(0, 3 * PAGE, False), (0, PAGE, False), (1, PAGE, False), (2, PAGE, False)]
    assert out[2 * PAGE : 3 * PAGE] == CONTENT[2 * PAGE : 3 * PAGE]
    segments.fails, segments.reads = {PAGE: error}, []
    assert made._read_singly(job(0, 3, wrong=[2]), memoryview(out)[: 3 * PAGE], LEAF)[0] == (
        bits(0) if verify is Verify.ALWAYS else good
    )


def test_an_error_of_a_cached_read_is_left_to_the_disk() -> None:
    segments = Segments(len(CONTENT))
    segments.fails[4 * PAGE] = errno.EIO
    made, counts, _ = fetcher(segments)
    _, found = fetched(made, [job(0, 1), job(4, 1), job(6, 1)])
    assert found == (bits(0, 6), [(7, 104)], bits(4)) and counts == {"read_errors": 1}


def test_large_jobs_are_read_and_summed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "PIECE_BYTES", 1000)
    assert [fetch._step(n) for n in (256, 1000, 1001, 400)] == [768, 1000, 1001, 800]
    segments = Segments()
    made, _, _ = fetcher(segments)
    assert fetched(made, [job(2, 2)])[1] == (bits(2, 3), [], bits(2, 3))
    assert [n for _, n, _ in segments.reads] == [768] * 10 + [512]
    segments = Segments(len(CONTENT))
    made, _, teams = fetcher(segments)
    assert fetched(made, [job(2, 2), job(9, 1, wrong=[0])])[1] == (bits(2, 3), [(7, 109)], 0) and teams == [2]


@pytest.mark.parametrize(
    ("change", "direct"),
    [
        ({}, True),
        ({"cold_direct": False}, False),
        ({"used": True}, False),
        ({"cached": PAGE}, False),
        ({"cached": None}, False),
        ({"fd": -1}, False),
        ({"size": PAGE - 512}, False),
        ({"mode": True, "cold_direct": False, "used": True}, True),
    ],
)
def test_when_a_read_bypasses_the_page_cache(change: dict[str, Any], direct: bool) -> None:
    """What is cold, in whole blocks, and was not used before."""
    segments = Segments(change.get("cached", 0))
    segments.direct_fd = change.get("fd", 3)
    mode = SimpleNamespace(direct=change.get("mode", False), cold_direct=change.get("cold_direct", True))
    times = SimpleNamespace(
        was_used=lambda segment, seq: (segment, seq) == (SEGMENT, 100) and change.get("used", False)
    )
    made, _, _ = fetcher(segments, mode=mode, access_times=times)
    one = job(0, 2)
    one.size = change.get("size", PAGE)
    assert made._reads_direct(one) is direct


def test_a_direct_read_is_one_read_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "PIECE_BYTES", 1024)
    segments = Segments()
    mode = SimpleNamespace(direct=True, cold_direct=False)
    made, counts, teams = fetcher(segments, mode=mode, threads=3)
    jobs = [job(n, 1) for n in range(0, 20, 2)]
    assert fetched(made, jobs)[1][0] == bits(*range(0, 20, 2))
    assert segments.reads == [(n, PAGE, True) for n in range(0, 20, 2)] and counts == {"direct_reads": 10}
    assert teams[-1] == 8, "eight at once, whatever the number of threads"
    segments.reads.clear()
    fetched(made, jobs[:3])
    assert teams[-1] == 3
    mode.direct = False
    fetched(made, jobs)
    assert teams[-1] == 3, "through the page cache a few streams read ahead best"


def test_cold_jobs_are_shared_by_neighbourhood() -> None:
    """Each thread reads neighbours; where the ends are in memory each takes the next job."""
    segments = Segments()
    made, _, _ = fetcher(segments)
    shares: list[list[int]] = []

    def each(call: object, parts: Sequence[Iterable[ReadJob]]) -> list[Any]:
        shares.extend([[j.chunk for j in part] for part in parts])
        return []

    team: Any = SimpleNamespace(each=each)
    made._team = team
    made._from_disk([job(n, 1) for n in range(5)], LEAF, memoryview(bytearray(len(CONTENT))))
    assert shares == [[0, 1], [2, 3, 4]]
    shares.clear()
    segments.cached = len(CONTENT)
    made._from_disk([job(n, 1) for n in range(5)], LEAF, memoryview(bytearray(len(CONTENT))))
    assert shares == [[0, 1, 2, 3, 4], []]


def test_without_the_library_nothing_is_copied_or_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _, _ = fetcher(Segments(len(CONTENT)))
    assert made.copy([job(0, 1)], LEAF, 9, []) is None
    one: Any = SimpleNamespace(load=3)
    assert made.scatter_at_once([(one, [])], 4) == {3}


def test_the_end_of_the_first_and_of_the_last_job_is_asked_for_first(monkeypatch: pytest.MonkeyPatch) -> None:
    segments, asked = Segments(cached=len(CONTENT)), list[tuple[int, int]]()
    cached_bytes = segments.cached_bytes

    def noting(held: Any, offset: int, nbytes: int) -> int | None:
        asked.append((offset, nbytes))
        return cached_bytes(held, offset, nbytes)

    monkeypatch.setattr(segments, "cached_bytes", noting)
    made, _, _ = fetcher(segments)
    jobs = [job(0, 2), job(4, 1), job(8, 3)]
    assert fetched(made, jobs)[1][0] == bits(0, 1, 4, 8, 9, 10)
    assert asked == [(2 * PAGE - 1, 1), (11 * PAGE - 1, 1)], "where both are there, the others are tried"
    asked.clear()
    segments.cached = 5 * PAGE
    assert fetched(made, jobs)[1] == (bits(0, 1, 4, 8, 9, 10), [], bits(8, 9, 10))
    ends = [(end * PAGE - 1, 1) for end in (2, 11, 2, 5, 11)]
    assert asked[:5] == ends


@pytest.mark.parametrize(("pages", "threads"), [((1,), 1), ((2,), 2), ((1, 1), 2), ((9, 9), 2)])
def test_the_library_reads_in_as_many_threads_as_there_are_steps(
    monkeypatch: pytest.MonkeyPatch, pages: tuple[int, ...], threads: int
) -> None:
    monkeypatch.setattr(fetch, "_step", lambda leaf_bytes: PAGE)
    made, _, _ = fetcher(Segments(cached=len(CONTENT)))
    asked: list[int] = []

    def read(native: object, jobs: Any, summed: Any, leaf_bytes: int, out: Any, workers: int) -> Any:
        asked.append(workers)
        return SimpleNamespace(supported=False)

    monkeypatch.setattr(made, "_native", object)
    monkeypatch.setattr(made, "_read_native", read)
    jobs = [job(20 * n, count) for n, count in enumerate(pages)]
    assert fetched(made, jobs)[1][0] == sum(one.bits() for one in jobs)
    assert asked == [threads], "at most as many as the store has"
