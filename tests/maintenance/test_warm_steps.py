"""How what is to be warmed is cut, joined, read and counted."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvfs.catalog.catalog import NotFoundError
from kvfs.catalog.walk import Stretch
from kvfs.maintenance import warm
from kvfs.maintenance.warm import Range, Warmed, Warmer, _blocks, _merged, _ranges, _Sums

KIB, MIB = 1 << 10, 1 << 20
ONE, TWO = b"1" * 16, b"2" * 16


def stretch(**changes: Any) -> Stretch:
    fields = dict.fromkeys(Stretch._fields, 0)
    return Stretch(**{**fields, "segment": 1, "segment_id": ONE, **changes})


@pytest.mark.parametrize(
    ("pages", "stride", "stored", "found"),
    [
        (1, 0, 5000, [(100, 5000)]),
        (3, 8192, 5000, [(100, 2 * 8192 + 5000)]),
        (3, 4096, 5000, [(100, 2 * 4096 + 5000)]),
        (3, 12288, 5000, [(100, 5000), (12388, 5000), (24676, 5000)]),
        (1, 12288, 5000, [(100, 5000)]),
        (2, 12288, 5000, [(100, 5000), (12388, 5000)]),
        (2, 8192, 4096, [(100, 4096), (8292, 4096)]),
    ],
)
def test_neighbouring_pages_are_one_range(pages: int, stride: int, stored: int, found: list[tuple[int, int]]) -> None:
    ranges = list(_ranges(stretch(pages=pages, stride=stride, stored_bytes=stored, offset=100)))
    assert ranges == [Range(1, ONE, offset, nbytes) for offset, nbytes in found]


def test_ranges_with_small_gaps_are_joined() -> None:
    def at(offset: int, nbytes: int, segment: int = 1) -> Range:
        return Range(segment, ONE if segment == 1 else TWO, offset, nbytes)

    assert list(_merged([])) == []
    gap = 64 * KIB
    assert list(_merged([at(100 + gap, 50), at(0, 100)])) == [at(0, 150 + gap)]
    assert list(_merged([at(101 + gap, 50), at(0, 100)])) == [at(0, 100), at(101 + gap, 50)]
    assert list(_merged([at(0, 100), at(10, 20), at(50, 100)])) == [at(0, 150)], "the first one may end last"
    assert list(_merged([at(0, 100, 2), at(0, 100), at(50, 10, 2)])) == [at(0, 100), at(0, 100, 2)]


@pytest.mark.parametrize("seed", range(10))
def test_blocks_are_cut_at_multiples_and_cover_all_bytes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "BLOCK_BYTES", 10)
    draw = random.Random(seed)
    ranges = [Range(n, ONE, draw.randrange(50), draw.randrange(1, 50)) for n in range(5)]
    blocks = list(_blocks(ranges))
    for r in ranges:
        mine = [b for b in blocks if b.segment == r.segment]
        assert [(b.offset + i) for b in mine for i in range(b.nbytes)] == list(range(r.offset, r.offset + r.nbytes))
        assert all(b.offset // 10 == (b.offset + b.nbytes - 1) // 10 for b in mine)
        assert all(b.offset % 10 == 0 for b in mine[1:])


def test_sums_are_told_after_each_block() -> None:
    seen: list[int] = []

    def progress(done: int) -> None:
        seen.append(done)
        raise OSError("the terminal is gone")

    sums = _Sums(progress)
    sums.add(5, resident=2, read=3)
    sums.add(7, failed=7)
    assert (sums.done, sums.resident, sums.read, sums.failed, sums.unknown, seen) == (12, 2, 3, 7, False, [5, 12])


class Disk:
    """A page cache of blocks of ten bytes: each call is noted."""

    def __init__(self, *, large: bool, fills: int | None, fails: bool = False) -> None:
        self.large, self.fills, self.fails = large, fills, fails
        self.cached: dict[tuple[int, int], int | None] = {}
        self.calls: list[tuple[Any, ...]] = []
        self.now = 100.0

    def monotonic(self) -> float:
        self.now += 0.5
        return self.now

    def cached_bytes(self, fd: int, offset: int, nbytes: int) -> int | None:
        return self.cached.get((fd, offset), 0)

    def has_large_folios(self) -> bool:
        return self.large

    @contextlib.contextmanager
    def map(self, fd: int, nbytes: int, offset: int) -> Iterator[tuple[int, int, int]]:
        self.calls.append(("map", fd, nbytes, offset))
        yield fd, offset, nbytes

    def populate(self, mapping: tuple[int, int, int]) -> None:
        fd, offset, nbytes = mapping
        if self.fails:
            raise OSError("broken")
        self.cached[fd, offset] = nbytes if self.fills is None else self.fills

    def readahead(self, fd: int, offset: int, nbytes: int) -> None:
        self.calls.append(("ahead", fd, offset, nbytes))

    def read(self, fd: int, nbytes: int, offset: int) -> bytes:
        self.calls.append(("read", fd, nbytes, offset))
        if not self.large and nbytes == 1:
            self.cached[fd, offset // 10 * 10] = 10 if self.fills is None else self.fills
        return b""


def warmer(disk: Disk, gone: bytes = b"") -> Warmer:
    def acquire(number: int, segment_id: bytes, generation: str) -> Any:
        return None if segment_id == gone else SimpleNamespace(fd=number)

    context: Any = SimpleNamespace(
        files=disk, segments=SimpleNamespace(acquire=acquire), index=SimpleNamespace(generation="g")
    )
    return Warmer(context)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "READ_BYTES", 4)
    monkeypatch.setattr(warm, "THREADS", 1)


def run(
    disk: Disk, ranges: list[Range], *, check: bool = False, gone: bytes = b""
) -> tuple[Warmed, list[tuple[int, int]]]:
    seen: list[tuple[int, int]] = []
    monkey = warm.BLOCK_BYTES
    warm.BLOCK_BYTES = 10
    try:
        return warmer(disk, gone).run(ranges, check=check, progress=lambda *at: seen.append(at)), seen
    finally:
        warm.BLOCK_BYTES = monkey


def test_what_is_in_the_page_cache_is_not_read() -> None:
    disk = Disk(large=True, fills=None)
    disk.cached[1, 0] = 10
    disk.cached[1, 10] = 4
    done, seen = run(disk, [Range(1, ONE, 0, 20)])
    assert disk.calls == [("map", 1, 10, 10)]
    assert done == Warmed(20, 14, 6, 0, 0.5) and seen == [(10, 20), (20, 20)]


def test_a_check_reads_nothing() -> None:
    disk = Disk(large=True, fills=None)
    disk.cached[1, 0] = 3
    assert run(disk, [Range(1, ONE, 0, 20)], check=True)[0] == Warmed(20, 3, 0, 0, 0.0) and disk.calls == []
    disk.cached[1, 0] = None
    assert run(disk, [Range(1, ONE, 0, 20)], check=True)[0].resident_bytes == -1, "the kernel does not tell"


def test_without_large_folios_the_last_byte_is_waited_for() -> None:
    disk = Disk(large=False, fills=None)
    assert run(disk, [Range(1, ONE, 0, 10)])[0] == Warmed(10, 0, 10, 0, 0.5)
    assert disk.calls == [("ahead", 1, 0, 10), ("read", 1, 1, 9)]


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_still_missing_is_read(fails: bool) -> None:
    disk = Disk(large=True, fills=9, fails=fails)
    assert run(disk, [Range(1, ONE, 0, 10)])[0] == Warmed(10, 0, 10, 0, 0.5)
    assert disk.calls == [
        ("map", 1, 10, 0),
        ("ahead", 1, 0, 10),
        ("read", 1, 4, 0),
        ("read", 1, 4, 4),
        ("read", 1, 2, 8),
    ]


def test_what_is_gone_or_fails_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(large=True, fills=0)
    done, seen = run(disk, [Range(1, ONE, 0, 10), Range(2, TWO, 0, 5)], gone=TWO)
    assert (done.nbytes, done.read_bytes, done.failed_bytes) == (15, 10, 5) and seen[-1] == (15, 15)

    def broken(fd: int, nbytes: int, offset: int) -> bytes:
        raise OSError("broken")

    monkeypatch.setattr(disk, "read", broken)
    disk.cached.clear()
    assert run(disk, [Range(1, ONE, 0, 10)])[0] == Warmed(10, 0, 0, 10, 0.5)
    assert run(disk, [])[0] == Warmed(0, 0, 0, 0, 0.5)


# -- what is read ------------------------------------------------------------------------------


class Shown:
    """What a catalog and a walk say, in place of both; a page cache that has the blocks in ``cached``."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        rows: Sequence[tuple[int, int]] = (),
        stretches: Sequence[Stretch] = (),
    ) -> None:
        self.cached: set[tuple[int, int]] = set()
        self.asked: list[tuple[int, int, int]] = []
        self.gone: set[int] = set()
        self.rows = [(n, SimpleNamespace(segment_id=bytes([n]) * 16, tail=tail)) for n, tail in rows]
        self.pages: dict[str, list[Any]] = {}
        self._stretches = stretches
        monkeypatch.setattr(warm, "Catalog", lambda context: self)
        monkeypatch.setattr(warm, "Walk", lambda context: self)
        monkeypatch.setattr(warm, "BLOCK_BYTES", 10)

    def segment_rows(self) -> Any:
        return self.rows

    def stretches(self, wanted: Callable[[int], bool] = lambda segment: True) -> Iterator[Stretch]:
        return (s for s in self._stretches if wanted(s.segment))

    def contents(self) -> list[Any]:
        return [SimpleNamespace(segment=s.segment, digest=s.digest) for s in self._stretches]

    def find_all_pages(self, ids: Sequence[str]) -> dict[str, list[Any]]:
        return {one: self.pages.get(one, []) for one in ids}

    def warmer(self) -> Warmer:
        def acquire(number: int, segment_id: bytes, generation: str) -> Any:
            return None if number in self.gone else SimpleNamespace(fd=number)

        def cached_bytes(fd: int, offset: int, nbytes: int) -> int:
            self.asked.append((fd, offset, nbytes))
            return nbytes if (fd, offset) in self.cached else 0

        context: Any = SimpleNamespace(
            files=SimpleNamespace(cached_bytes=cached_bytes), segments=SimpleNamespace(acquire=acquire),
            index=SimpleNamespace(generation="g"), directory=None,
        )  # fmt: skip
        return Warmer(context)


def places(ranges: list[Range]) -> list[tuple[int, int, int]]:
    return [(r.segment, r.offset, r.nbytes) for r in ranges]


def test_a_sample_is_of_whole_blocks_that_the_page_cache_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Shown(monkeypatch, rows=[(1, 29), (2, 9), (3, 10), (4, 40), (5, 100)])
    shown.cached, shown.gone = {(1, 10), (4, 0)}, {5}
    assert places(shown.warmer().sample(1000)) == [(1, 0, 10), (3, 0, 10), (4, 10, 10), (4, 20, 10), (4, 30, 10)]
    assert shown.asked[:3] == [(1, 0, 10), (1, 10, 10), (3, 0, 10)], "no block that is not whole"
    for nbytes, blocks in ((0, 0), (1, 1), (10, 1), (11, 2), (20, 2)):
        assert len(shown.warmer().sample(nbytes)) == blocks
    assert [r.segment_id for r in shown.warmer().sample(20)] == [bytes([1]) * 16, bytes([3]) * 16]


def test_a_sample_of_many_segments_is_spread_over_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    most = warm.SAMPLED_SEGMENTS_MAX
    for count, step in ((most - 1, 1), (most, 1), (2 * most - 1, 1), (2 * most, 2), (3 * most + 1, 3)):
        shown = Shown(monkeypatch, rows=[(n % 250, 10) for n in range(count)])
        assert [segment for segment, _, _ in places(shown.warmer().sample(1 << 30))] == [
            n % 250 for n in range(0, count, step)
        ]


def test_the_pages_that_were_used_last_come_first_up_to_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    old = stretch(segment=1, pages=4, stride=4096, stored_bytes=4000, offset=0, stamp_us=5)
    new = stretch(segment=2, pages=2, stride=8192, stored_bytes=5000, offset=100, stamp_us=9)
    shown = Shown(monkeypatch, stretches=[old, new])
    every = [(2, 100, 8192 + 5000), (1, 0, 3 * 4096 + 4000)]
    for nbytes, found in (
        (1 << 20, every), (2 * 8192 + 4 * 4096, every), (2 * 8192 + 4 * 4096 - 1, [every[0], (1, 0, 2 * 4096 + 4000)]),
        (2 * 8192 + 4096, [every[0], (1, 0, 4000)]), (2 * 8192 + 4095, every[:1]), (8192, [(2, 100, 5000)]),
        (8191, []), (0, []),
    ):  # fmt: skip
        assert places(shown.warmer().hottest(nbytes)) == found


def test_namespaces_prefixes_and_pins_name_their_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    one = stretch(segment=1, pages=1, stored_bytes=10, offset=0, stamp_us=5, digest=b"a")
    two = stretch(segment=1, pages=1, stored_bytes=10, offset=50, stamp_us=5, digest=b"b")
    three = stretch(segment=2, pages=1, stored_bytes=10, offset=70, stamp_us=6, digest=b"a")
    shown = Shown(monkeypatch, stretches=[one, two, three], rows=[(1, 500), (2, 700)])
    warmer = shown.warmer()
    named: Any = SimpleNamespace(digest=b"a")
    assert places(warmer.of_namespaces([named])) == [(1, 0, 10), (2, 70, 10)] and warmer.of_namespaces([]) == []
    shown.pages = {"ab": [SimpleNamespace(located=SimpleNamespace(digest=b"a"), last_used_us=6)],
                   "cd": [SimpleNamespace(located=None, last_used_us=5)]}  # fmt: skip
    assert places(warmer.of_prefixes(["AB"])) == [(2, 70, 10)], "of the request that used it last"
    assert warmer.of_prefixes(["cd"]) == [] == warmer.of_prefixes([])
    with pytest.raises(NotFoundError, match="no page has the id 'ef': give a namespace, or an id from kvfs ls"):
        warmer.of_prefixes(["ab", "EF"])
    monkeypatch.setattr(warm, "pinned_segments", lambda directory: {bytes([2]) * 16})
    assert places(warmer.of_pins()) == [(2, 0, 700)]


def test_a_match_names_the_pages_of_the_segments_that_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    def source(segment: int, block: int) -> Any:
        return SimpleNamespace(place=SimpleNamespace(segment=segment, block=block, stored_bytes=70))

    group = SimpleNamespace(sources=lambda: {0: [source(1, 3)], 1: [source(2, 4), source(9, 5)]})
    match: Any = SimpleNamespace(groups=[group], segments={1: ONE, 2: TWO})
    found = Shown(monkeypatch).warmer().of_match(match)
    assert found == [Range(1, ONE, 3 * 4096, 70), Range(2, TWO, 4 * 4096, 70)]


def test_nothing_was_read_before_it_is_said() -> None:
    assert Warmed() == Warmed(0, 0, 0, 0, 0.0)
