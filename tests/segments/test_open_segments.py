"""Segments open for reading: who shares one, what is tried and for how long, and what stays of those that fail."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvfs
from kvfs.directory.root import Directory
from kvfs.format import segment as fmt
from kvfs.native import library
from kvfs.segments import open_segments
from kvfs.segments.open_segments import HeldSegments, OpenSegment, SegmentFiles, may_map, sealed_bytes
from kvfs.system.files import Files
from tests.stores import TINY_BYTES, seeded, segment_files, tiny, tokens_of


class Watched(Files):
    """Python opens segments; locks answer what the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.locks: list[bool | OSError] = []
        self.slept: list[float] = []
        self.opens: OSError | None = None
        self.wait: threading.Event | None = None

    def flock(self, fd: int, operation: int) -> bool:
        if self.locks:
            answer = self.locks.pop(0)
            if isinstance(answer, OSError):
                raise answer
            return answer
        return super().flock(fd, operation)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)

    def open(
        self, name: str, flags: int, mode: int = 0o600, *, dir_fd: int, keep: list[int | None] | None = None
    ) -> int:
        if name.endswith(".kvs"):
            if self.wait is not None:
                self.wait.wait(10.0)
            if self.opens is not None:
                raise self.opens
        return super().open(name, flags, mode, dir_fd=dir_fd, keep=keep)


@pytest.fixture
def files() -> Watched:
    return Watched()


@pytest.fixture
def store_at(memory_path: Path) -> Path:
    with kvfs.open(memory_path / "store", capacity="16MiB") as store:
        for seed in range(3):
            store.namespace("m", tiny(), "1").put(tokens_of(seed, 30), seeded(seed, 30 * TINY_BYTES))
            store._shared.services().active.finish_all()
    return memory_path / "store"


@pytest.fixture
def opener(store_at: Path, files: Watched) -> Iterator[SegmentFiles]:
    with contextlib.closing(Directory(str(store_at), files, read_only=True)) as directory:
        directory.sub("segments")
        made = SegmentFiles(directory)
        yield made
        made.close()


@pytest.fixture
def ids(store_at: Path) -> dict[int, bytes]:
    return {n: bytes.fromhex(file.stem) for n, file in enumerate(segment_files(store_at), 1)}


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_a_segment_is_open_as_long_as_somebody_has_it(opener: SegmentFiles, ids: dict[int, bytes]) -> None:
    before = descriptors()
    first = opener.acquire(1, ids[1], "g")
    assert first is not None and (first.number, first.segment_id, first.generation) == (1, ids[1], "g")
    assert opener.acquire(1, ids[1], "g") is first and opener.share(1, ids[1], "g") is first
    assert opener.count() == 1 and descriptors() == before + 1
    assert (first.tried_direct, first.direct, first.mappable) == (False, None, False)
    del first
    assert opener.count() == 0 and descriptors() == before
    assert opener.share(1, ids[1], "g") is None, "sharing opens nothing here"


def test_segments_without_a_file_are_remembered_once(
    opener: SegmentFiles, files: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_segments, "MISSING_MAX", 2)
    for n in range(3):
        assert opener.acquire(n, bytes([n]) * 16, "g") is None
    assert opener.take_missing() == {bytes([n]) * 16: (n, "g") for n in range(2)}
    assert opener.take_missing() == {}
    files.opens = OSError(errno.EMFILE, "too many")
    assert opener.acquire(5, bytes([5]) * 16, "g") is None
    assert opener.take_missing() == {}, "it may have one"


@pytest.mark.parametrize(
    ("locks", "opens", "slept"),
    [
        ([True], True, 0), ([False, True], True, 1), ([False] * 39 + [True], True, 39), ([False] * 40, False, 40),
        ([OSError(errno.EIO, "x")], False, 0), ([False, OSError(errno.EIO, "x")], False, 1),
    ],
    ids=["free", "second", "last", "never", "error", "late error"],
)  # fmt: skip
def test_a_lock_that_an_evictor_has_for_a_moment_is_waited_for(
    opener: SegmentFiles, files: Watched, ids: dict[int, bytes], locks: list[bool | OSError], opens: bool, slept: int
) -> None:
    before = descriptors()
    files.locks = list(locks)
    found = opener.acquire(1, ids[1], "g")
    assert (found is not None) is opens and files.slept == [0.00025] * slept and files.locks == []
    assert descriptors() == before + opens and opener.take_missing() == {}


def test_a_file_that_was_unlinked_before_its_lock_is_not_used(
    opener: SegmentFiles, files: Watched, ids: dict[int, bytes], store_at: Path
) -> None:
    class Unlinking(Watched):
        def flock(self, fd: int, operation: int) -> bool:
            (store_at / "segments" / f"{ids[1].hex()}.kvs").unlink(missing_ok=True)
            return True

    opener._files = opener._directory.files = Unlinking()
    before = descriptors()
    assert opener.acquire(1, ids[1], "g") is None and descriptors() == before and opener.take_missing() == {}


def test_all_segments_of_a_lookup(opener: SegmentFiles, ids: dict[int, bytes]) -> None:
    second = opener.acquire(2, ids[2], "g")
    held = opener.acquire_all({**ids, 9: b"x" * 16}, "g", 5.0)
    assert sorted(held) == [1, 2, 3] and len(held) == 3 and 9 not in held and held.get(9) is None
    assert held[2] is second and opener.count() == 3
    assert opener.take_missing() == {b"x" * 16: (9, "g")}
    assert opener._opener is not None
    assert len(opener.acquire_all({}, "g", 5.0)) == 0
    opener.close()
    opener.close()
    assert opener._opener is None and sorted(opener.acquire_all(ids, "g", 5.0)) == [1, 2, 3], "in the caller's thread"


def test_matches_of_the_same_segments_share_their_hold(store_at: Path, ids: dict[int, bytes]) -> None:
    """As long as one of them is in use; the requests of a batch often have pages in the same segments."""
    if library.loaded() is None:
        pytest.skip(f"the native library is {library.state()}")
    with contextlib.closing(Directory(str(store_at), Files(), read_only=True)) as directory:
        directory.sub("segments")
        made = SegmentFiles(directory)
        first, before = made.acquire_all(ids, "g", 5.0), descriptors()
        assert made.acquire_all(dict(ids), "g", 5.0) is first
        others = [
            made.acquire_all({1: ids[1]}, "g", 5.0), made.acquire_all({**ids, 9: b"x" * 16}, "g", 5.0),
            made.acquire_all({2: ids[1], 1: ids[2], 3: ids[3]}, "g", 5.0), made.acquire_all(ids, "h", 5.0),
        ]  # fmt: skip
        assert not any(other is first for other in others)
        assert [sorted(other) for other in others] == [[1], [1, 2, 3], [1, 2, 3], [1, 2, 3]]
        del others
        last = made.acquire_all(ids, "g", 5.0)
        shared = weakref.ref(last)
        made.abandon()
        assert made.acquire_all(ids, "g", 5.0) is not last
        del first, last
        gc.collect()
        assert shared() is None and descriptors() <= before, "what is shared keeps nothing open"


def test_while_an_open_hangs_callers_get_what_is_open(
    opener: SegmentFiles, files: Watched, ids: dict[int, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfs.system.worker.GRACE_SECONDS", 0.0)
    second = opener.acquire(2, ids[2], "g")
    files.wait = threading.Event()
    assert not opener.hangs
    assert list(opener.acquire_all(ids, "g", 0.02)) == [2]
    assert opener.hangs
    assert list(opener.acquire_all(ids, "g", 100.0)) == [2], "nobody waits for it a second time"
    files.wait.set()
    opener._opener.call(lambda: None, 10.0)
    assert not opener.hangs and sorted(opener.acquire_all(ids, "g", 10.0)) == [1, 2, 3] and second is not None


def test_a_forked_child_starts_without_open_segments(opener: SegmentFiles, ids: dict[int, bytes]) -> None:
    first = opener.acquire(1, ids[1], "g")
    opener.acquire(1, b"x" * 16, "g")
    opener.acquire_all({2: ids[2]}, "g", 5.0)
    worker = opener._opener
    opener.abandon()
    assert opener.count() == 0 and opener.take_missing() == {} and opener._opener is None and not opener.hangs
    again = opener.acquire(1, ids[1], "g")
    assert again is not None and again is not first
    assert worker is not None
    worker.stop(5.0)


def test_reads_are_of_the_whole_range(opener: SegmentFiles, ids: dict[int, bytes], store_at: Path) -> None:
    held = opener.acquire(1, ids[1], "g")
    assert held is not None
    content = segment_files(store_at)[0].read_bytes()
    assert opener.read_bytes(held, 5000, 16384) == content[16384:21384]
    target = memoryview(bytearray(64))
    opener.read(held, target, 4096)
    assert target == content[4096:4160]
    with pytest.raises(OSError, match=r"end of file|short|ends"):
        opener.read_bytes(held, 10, len(content) - 5)
    cached = opener.cached_bytes(held, 0, 4096)
    assert cached in (None, 0, 4096)


@pytest.mark.parametrize(
    ("flags", "sealed", "maps"),
    [(0, False, True), (0, True, True), (fmt.FLAG_DIRECT, False, False), (fmt.FLAG_DIRECT, True, True)],
)
def test_what_was_written_past_the_page_cache_is_mapped_once_it_is_sealed(
    opener: SegmentFiles, files: Watched, ids: dict[int, bytes], store_at: Path, flags: int, sealed: bool, maps: bool
) -> None:
    file = segment_files(store_at)[0]
    data = bytearray(file.read_bytes())
    header = fmt.parse_header(bytes(data[:4096]))
    assert header is not None
    data[:4096] = fmt.pack_header(header._replace(flags=flags))
    if not sealed:
        del data[-4096:]
    file.write_bytes(data)
    held = opener.acquire(1, ids[1], "g")
    assert held is not None
    assert sealed_bytes(files, held) == (len(data) if sealed else 0)
    assert may_map(files, held) is opener.may_map(held) is held.mappable is maps
    file.write_bytes(b"")
    assert may_map(files, held) is maps, "what is known is not read again"


def test_a_seal_of_another_segment_or_place_is_none(
    opener: SegmentFiles, files: Watched, ids: dict[int, bytes], store_at: Path
) -> None:
    file = segment_files(store_at)[0]
    held = opener.acquire(1, ids[1], "g")
    assert held is not None
    seal = fmt.parse_seal(file.read_bytes()[-4096:])
    assert seal is not None and sealed_bytes(files, held) == seal.tail + 4096
    for wrong in (seal._replace(segment_id=ids[2]), seal._replace(tail=seal.tail + 4096), seal._replace(tail=0)):
        with file.open("r+b") as stream:
            stream.seek(seal.tail)
            stream.write(fmt.pack_seal(wrong))
        assert sealed_bytes(files, held) == 0
    for size in (0, 4096, 4097):
        os.truncate(file, size)
        assert sealed_bytes(files, held) == 0


def test_what_a_match_holds_is_made_when_it_is_asked_for(opener: SegmentFiles, ids: dict[int, bytes]) -> None:
    class Hold:
        def held(self) -> list[bool]:
            return [True, False, True]

    class Files:
        def share(self, number: int, segment_id: bytes, generation: str) -> OpenSegment:
            return OpenSegment(number, segment_id, None, generation)  # type: ignore[arg-type]

    held = HeldSegments(Files(), "g")  # type: ignore[arg-type]
    held.hold(Hold(), ids)  # type: ignore[arg-type]
    assert sorted(held) == [1, 3] and len(held) == 2 and 2 not in held and 1 in held
    assert held[1] is held[1] and held[3].segment_id == ids[3]
    held.add({2: held[1]})
    assert sorted(held) == [1, 2, 3] and held[2] is held[1]
    with pytest.raises(KeyError):
        held[9]


@pytest.mark.parametrize("hangs", [False, True])
def test_a_close_waits_for_the_thread_that_opens_unless_the_disk_hangs(
    opener: SegmentFiles, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    stopped: list[float] = []
    worker: Any = SimpleNamespace(stop=stopped.append)
    opener._opener = worker
    monkeypatch.setattr(SegmentFiles, "hangs", property(lambda self: hangs))
    opener.close()
    opener.close()
    assert stopped == [0.0 if hangs else open_segments.CLOSE_SECONDS] and open_segments.CLOSE_SECONDS > 0
    assert opener._worker() is None, "none is started afterwards"
