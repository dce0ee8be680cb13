"""Reads of a load: from the page cache without waiting where possible, correct and complete in any case."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.system import files as files_module
from kvfs.system.files import Files
from kvfs.system.thread_pool import Pool, Team
from tests.stores import counted, seeded, segment_files, tokens_of

PAGE, CHUNKS = 64 << 10, 160  # 10 MiB: several reads, several pieces of each


class Watched(Files):
    """Counts reads that do not wait, and how they end."""

    def __init__(self, error: int = 0, cached: int | None = -1) -> None:
        self.error, self.cached = error, cached
        self.now, self.full, self.waiting = 0, 0, 0

    def preadv(self, fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
        if not flags:
            self.waiting += len(buffers[0]) >= PAGE
            return super().preadv(fd, buffers, offset)
        self.now += 1
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        done = super().preadv(fd, buffers, offset, flags)
        self.full += done == len(buffers[0])
        return done

    def cached_bytes(self, fd: int, offset: int, nbytes: int) -> int | None:
        return super().cached_bytes(fd, offset, nbytes) if self.cached == -1 else self.cached


def layout() -> kvfs.PageLayout:
    """Four leaves of 16 KiB."""
    return kvfs.PageLayout.kv(layers=4, kv_heads=4, head_dim=64, dtype="bfloat16", page_tokens=16)


def stored(path: Path, files: Files, **settings: Any) -> tuple[kvfs.Store, kvfs.Namespace, list[int], bytes]:
    store = kvfs.open(path, capacity="128MiB", files=files, **settings)
    ns = store.namespace("m", layout(), revision="r1")
    assert ns.layout.page_bytes == PAGE
    tokens, pages = tokens_of(1, CHUNKS), seeded(1, CHUNKS * PAGE)
    assert ns.put(tokens, pages).stored == CHUNKS
    return store, ns, tokens, pages


def got(ns: kvfs.Namespace, tokens: list[int]) -> bytes:
    out = mmap.mmap(-1, CHUNKS * PAGE)
    with ns.match(tokens) as match:
        chunks = ns.get(match, out)
    found = out[: chunks * PAGE]
    out.close()  # BufferError if a thread or an unfinished task still refers to it
    return found


def drop(path: Path, keep: Callable[[int], bool]) -> None:
    """Drop from the page cache the blocks of segments for which ``keep`` is false."""
    for file in segment_files(path):
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fdatasync(fd)
            for at in range(0, os.fstat(fd).st_size, PAGE):
                if not keep(at // PAGE):
                    os.posix_fadvise(fd, at, PAGE, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


@pytest.mark.parametrize("verify", ["always", "first", "off"])
@pytest.mark.parametrize("threads", [1, 3])
def test_cached_pages_are_read_without_waiting(memory_path: Path, verify: str, threads: int) -> None:
    files = Watched()
    store, ns, tokens, pages = stored(memory_path / "store", files, verify=verify, threads=threads)
    with store:
        for _ in range(2):
            assert got(ns, tokens) == pages
        if files_module._NOWAIT and files.full:
            assert files.full == files.now and not files.waiting


@pytest.mark.parametrize("keep", [
    lambda n: n % 7 != 3,  # a hole in every stretch
    lambda n: n < 90,  # only the beginning is cached, as with prompts that share it
    lambda n: n > 90,
    lambda n: False,
])  # fmt: skip
@pytest.mark.parametrize("verify", ["always", "first", "off"])
def test_what_is_not_cached_comes_from_the_disk(store_path: Path, keep: Callable[[int], bool], verify: str) -> None:
    store, ns, tokens, pages = stored(store_path, Files(), verify=verify)
    with store:
        for _ in range(2):
            drop(store_path, keep)
            assert got(ns, tokens) == pages


@pytest.mark.parametrize("error", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EAGAIN, errno.EIO])
@pytest.mark.parametrize("cached", [-1, None, 0], ids=["cachestat", "no cachestat", "cold"])
def test_a_kernel_that_cannot_tell_costs_no_page(memory_path: Path, error: int, cached: int | None) -> None:
    files = Watched(error, cached)
    store, ns, tokens, pages = stored(memory_path / "store", files)
    with store, counted(store) as moved:
        assert got(ns, tokens) == pages
        assert moved("read_errors") == 0 == moved("pages_corrupt")
        assert files.waiting


def test_a_python_without_the_flag_reads_nevertheless(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "_NOWAIT", 0)
    files = Watched()
    store, ns, tokens, pages = stored(memory_path / "store", files)
    with store:
        assert got(ns, tokens) == pages and not files.now and files.waiting


def test_a_cached_page_with_a_flipped_bit_is_found(memory_path: Path) -> None:
    store, ns, tokens, pages = stored(memory_path / "store", Files())
    at = 77 * PAGE + 5
    with store, counted(store) as moved:
        file = next(f for f in segment_files(memory_path / "store") if pages[at : at + 64] in f.read_bytes())
        data = file.read_bytes()
        fd = os.open(file, os.O_RDWR)
        os.pwrite(fd, bytes([pages[at] ^ 1]), data.index(pages[at : at + 64]))
        os.close(fd)
        assert got(ns, tokens) == pages[: 77 * PAGE]
        assert moved("pages_corrupt") == 1


# ---------------------------------------------------------------- the caller and its helpers


def test_a_team_does_every_item_once() -> None:
    team = Team(4, "test-team")
    for workers in (1, 2, 5):
        items = iter(range(1000))
        assert sorted(n for share in team.each(list, [items] * workers) for n in share) == list(range(1000))
    assert sorted(map(sum, team.each(list, [iter([1, 2]), iter([3]), iter([4])]))) == [3, 3, 4]
    with pytest.raises(ZeroDivisionError):
        team.each(partial(map_all, lambda n: 1 // (n - 500)), [iter(list(range(1000)))] * 3)
    team.close()
    team.close()


def map_all(function: Callable[[int], Any], share: Iterator[int]) -> list[Any]:
    return [function(n) for n in share]


class Interrupted(BaseException):
    pass


def test_a_process_that_may_have_no_more_threads_reads_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    team = Team(4, "test-few")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert team.each(list, [iter([1, 2]), iter([3]), iter([4])]) == [[1, 2], [3], [4]]
    assert sorted(map(sum, team.each(list, [iter([1, 2]), iter([3])]))) == [3, 3]
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert sorted(map(sum, team.each(list, [iter([1, 2]), iter([3]), iter([4])]))) == [3, 3, 4]
    team.close()


def test_a_call_that_comes_after_the_close_is_done_without_threads() -> None:
    """Nothing would end the threads: a transfer that waits for a disk may read on after its store was closed."""
    team = Team(2, "test-late")
    assert sorted(map(sum, team.each(list, [iter([1, 2]), iter([3]), iter([4])]))) == [3, 3, 4]
    team.close()
    assert team.each(list, [iter([1, 2]), iter([3]), iter([4])]) == [[1, 2], [3], [4]]
    assert team.each(list, [iter([1, 2])] * 3) == [[1, 2], [], []]
    assert not [t for t in threading.enumerate() if t.name == "test-late"]


def test_an_interrupted_caller_leaves_nothing_to_its_helpers() -> None:
    team, begun, done = Team(2, "test-team"), threading.Semaphore(0), list[int]()
    caller = threading.get_ident()

    def one(n: int) -> None:
        if threading.get_ident() == caller:
            begun.acquire()
            raise Interrupted
        begun.release()
        threading.Event().wait(0.05)
        done.append(n)

    with pytest.raises(Interrupted):
        team.each(partial(map_all, one), [iter(list(range(1000)))] * 3)
    count = len(done)
    assert 1 <= count <= 4, "a helper finishes what it has begun, and takes no more"
    threading.Event().wait(0.1)
    assert len(done) == count, "a helper worked after the call had ended"
    assert team.each(list, [iter([7])] * 2) in ([[7]], [[], [7]], [[7], []])
    team.close()


def test_a_team_has_as_many_threads_as_its_calls_can_use() -> None:
    team, go_on = Team(3, "test-few"), threading.Event()

    def helpers() -> int:
        return sum(thread.name == "test-few" for thread in threading.enumerate())

    for workers, expected in ((1, 0), (2, 1), (2, 1), (3, 2), (2, 2)):
        team.each(list, [iter([1, 2])] * workers)
        assert helpers() == expected, "the first call of a new process starts no more than it needs"
    others = [
        threading.Thread(target=lambda: team.each(lambda share: go_on.wait(10), [iter([1]), iter([2])]))
        for _ in range(4)
    ]
    for other in others:
        other.start()
    while helpers() < 3:
        threading.Event().wait(0.001)
    threading.Event().wait(0.05)
    assert helpers() == 3, "calls at once have helpers each, but never more than the team may have"
    go_on.set()
    for other in others:
        other.join()
    assert team._wanted == 0
    with pytest.raises(ZeroDivisionError):
        team.each(partial(map_all, lambda n: 1 // n), [iter([0]), iter([0])])
    assert team._wanted == 0, "a call that fails gives its share back, too"
    team.close()
    assert helpers() == 0


def test_late_helpers_are_not_waited_for() -> None:
    team, go_on = Team(1, "test-team"), threading.Event()
    blocked = threading.Thread(target=lambda: team.each(lambda share: go_on.wait(10), [iter([1]), iter([2])]))
    holder = threading.Thread(target=lambda: team.each(lambda share: go_on.wait(10), [iter([1]), iter([2])]))
    blocked.start()
    holder.start()
    items = iter(list(range(10)))
    assert team.each(list, [items] * 2) == [list(range(10))], "the only helper is busy: the caller did it all"
    go_on.set()
    blocked.join()
    holder.join()
    team.close()


def test_shares_not_begun_when_a_store_is_closed_are_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A get on a slow disk raised an OSError when its store was closed."""
    monkeypatch.setattr(Pool.close, "__defaults__", (0.05,))
    team, begun, go_on = Team(1, "test-closed"), threading.Event(), threading.Event()

    def keep(share: Iterator[int]) -> int:
        begun.set()
        assert go_on.wait(10)
        return next(share)

    def mine(share: Iterator[int]) -> int:
        number = next(share)
        if number == 1:
            team.close()
        return number

    busy = threading.Thread(target=lambda: team.each(keep, [iter([5]), iter([6])]))
    busy.start()
    try:
        assert begun.wait(10)
        pool = team._pool
        assert pool is not None
        while pool._queue.qsize():  # the only thread has begun its share
            threading.Event().wait(0.001)
        assert team.each(mine, [iter([1]), iter([2])]) == [1]
    finally:
        go_on.set()
        busy.join()
