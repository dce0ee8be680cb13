"""What counts as a use of a page, and clocks that were wrong: which prompts stay in a full store."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.directory import access_times
from kvfs.directory.access_times import AccessTimes
from kvfs.directory.root import Directory
from kvfs.system.files import Files
from tests.stores import seeded, tokens_of

LAYOUT = kvfs.PageLayout.kv(layers=2, kv_heads=2, head_dim=64, dtype="bfloat16", page_tokens=16)
CHUNKS = 10  # of each prompt: 160 KiB
PAGES = seeded(1, CHUNKS * LAYOUT.page_bytes)


class Clock(Files):
    """The real file system; the time of day moves by hand only."""

    us = 1_780_000_000_000_000

    def now_us(self) -> int:
        return self.us

    def advance(self, seconds: float) -> None:
        self.us += int(seconds * 1e6)


class HangingAtClose(Files):
    """Opens of the thread that a close may leave wait for ``answers``."""

    def __init__(self, answers: threading.Event) -> None:
        self._answers = answers

    def open(self, *args: Any, **more: Any) -> int:
        if threading.current_thread().name == "kvfs-stamps":
            self._answers.wait(60)
        return super().open(*args, **more)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ns(memory_path: Path, clock: Clock) -> Iterator[kvfs.Namespace]:
    with kvfs.open(memory_path / "store", capacity="16MiB", files=clock) as store:
        store._shared.background.stop()  # evictions happen where the test is, under its clock
        yield store.namespace("model", LAYOUT, revision="r1")


def used(ns: kvfs.Namespace, how: str, seed: int) -> int:
    """How many chunks of a prompt are there; the request uses them in the way ``how``."""
    prompt = tokens_of(seed, CHUNKS)
    if how == "put":
        return ns.put(prompt, PAGES).skipped
    if how == "look and plan":
        pages = ns.prompt(prompt)
        pages.look()
        pages.note_lookup(0)
        there = pages.stored["full"].bit_count()
    elif how == "look for a prefix":
        pages = ns.prompt(prompt)
        pages.look(prefix=True)
        first = (~pages.stored["full"] & pages.stored["full"] + 1).bit_length() - 1
        pages.look(first)
        pages.note_lookup(0)
        there = pages.stored["full"].bit_count()
    elif how == "plan_save and put":
        missing = ns.plan_save(prompt).missing["full"]
        there = CHUNKS - len(missing)
    else:
        with ns.match(prompt) as match:
            there = match.chunks
            if "get" in how:
                assert ns.get(match, bytearray(match.nbytes)) == there
    if there < CHUNKS:
        ns.put(prompt, PAGES[there * LAYOUT.page_bytes :], start=there)
    elif how == "match, put":
        ns.put(prompt, PAGES)
    return there


@pytest.mark.parametrize(
    "how", ["put", "match, put", "match, get, put", "plan_save and put", "look and plan", "look for a prefix"]
)
def test_every_way_to_use_a_prompt_keeps_it(ns: kvfs.Namespace, clock: Clock, how: str) -> None:
    """Ten prompts, each used every 40 s, next to a new one every 2 s: LRU by page keeps them."""
    for seed in range(100):
        clock.advance(2)
        ns.put(tokens_of(seed, CHUNKS), PAGES)
    shares = []
    for rounds in range(8):
        there = 0
        for seed in range(10):
            clock.advance(2)
            there += used(ns, how, 1000 + seed)
            clock.advance(2)
            ns.put(tokens_of(2000 + 10 * rounds + seed, CHUNKS), PAGES)
        shares.append(there / (10 * CHUNKS))
    assert min(shares[1:]) > 0.9, shares


@pytest.mark.parametrize("ahead", [3600, 365 * 86400])
@pytest.mark.parametrize("other", [False, True], ids=["clock", "process"])
def test_what_was_written_by_a_clock_that_was_ahead_is_evicted_first(
    ns: kvfs.Namespace, clock: Clock, ahead: int, other: bool
) -> None:
    """``other``: a process that opens the store after the clock was set right, and knows none of the access times."""
    clock.advance(ahead)
    for seed in range(120):
        clock.advance(0.1)
        ns.put(tokens_of(seed, CHUNKS), PAGES)
    clock.advance(-ahead)
    if other:
        ns._c.access_times.close()
        services = ns._keep_alive._shared.services()  # type: ignore[attr-defined]
        services.evictor.victims._survey._uses.clear()
    shares = []
    for _ in range(4):
        there = 0
        for seed in range(1000, 1030):
            clock.advance(0.1)
            there += used(ns, "match, get, put", seed)
        shares.append(there / (30 * CHUNKS))
    assert min(shares[1:]) > 0.9, shares


def test_where_an_access_time_is_in_the_future_the_time_of_writing_counts(ns: kvfs.Namespace, clock: Clock) -> None:
    """Of a process whose clock was ahead; relocations and recompression would hand it on to the copies."""
    times, segment, now = ns._c.access_times, b"s" * 16, clock.us
    times.stamp(segment, 0, [now + 1, now, now - 1, 0, now + 3_600_000_000])
    assert times.stamps(segment, [1, 2, 3, 4, 5, 6]) == [1, now, now - 1, 4, 5, 6]
    clock.advance(1)
    assert times.stamps(segment, [1, 2, 3, 4, 5, 6]) == [now + 1, now, now - 1, 4, 5, 6]


# ---------------------------------------------------------------- a disk that hangs


@pytest.mark.parametrize("how", ["match", "plan_save", "look and plan"])
def test_a_scheduler_waits_for_no_disk_to_note_a_use(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Access times were written where the lookup ran: ``plan_save`` waited for a disk until it answered."""
    prompt = tokens_of(1, CHUNKS)
    assert ns.put(prompt, PAGES).stored == CHUNKS
    times = ns._c.access_times
    times.flush()
    with monkeypatch.context() as patch:
        patch.setattr(Files, "pwritev", lambda *_: pytest.fail("a write"))
        if how == "match":
            ns.match(prompt).close()
        elif how == "plan_save":
            assert not ns.plan_save(prompt).missing["full"]
        else:
            pages = ns.prompt(prompt)
            pages.look()
            pages.note_lookup(0)
    segment_id = ns._c.index.read(lambda s: s.segments(), 2.0)[0][1].segment_id
    assert any(times.raw(segment_id)) == (how != "match"), "a match alone is no use"


def test_uses_that_wait_for_a_disk_are_bounded_and_a_close_does_not_wait(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access_times, "NOTED_MAX", 100)
    monkeypatch.setattr(access_times, "CLOSE_SECONDS", 0.1)
    answers, times = threading.Event(), AccessTimes(ns._c.directory)
    for number in range(50):
        times.stamp(bytes([number]) * 16, 0, [1] * 10)
    assert len(times._noted) == 10 and times._noted_count == 100
    monkeypatch.setattr(Files, "open", lambda *_, **__: answers.wait(60))
    times.close()
    answers.set()


def test_what_a_close_has_left_is_written_to_its_own_folder_when_the_disk_answers(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The store's directory is closed by then, and the number of its descriptor may be that of another folder."""
    monkeypatch.setattr(access_times, "CLOSE_SECONDS", 0.1)
    answers, path = threading.Event(), Path(ns._c.directory.path)
    directory = Directory(str(path), HangingAtClose(answers), read_only=False)
    before = set(threading.enumerate())
    times, segment = AccessTimes(directory), b"s" * 16
    number = directory.sub("run/use")
    times.stamp(segment, 0, [7])
    times.close()
    (writer,) = [thread for thread in set(threading.enumerate()) - before if thread.name == "kvfs-stamps"]
    directory.close()
    other = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.dup2(other, number)
        answers.set()
        writer.join(60)
    finally:
        os.close(other)
        os.close(number)
    assert not list(tmp_path.iterdir())
    assert (path / "run" / "use" / segment.hex()).read_bytes() == (7).to_bytes(8, "little")
    assert not times._open and times._own is None, "a descriptor is left"


def test_a_use_of_a_segment_that_is_gone_makes_no_file(ns: kvfs.Namespace) -> None:
    times, gone = AccessTimes(ns._c.directory), b"gone" * 4
    times.stamp(gone, 0, [1, 2, 3])
    times.forget(gone)
    times.stamp(b"here" * 4, 0, [1])
    times.close()
    use = Path(ns._c.directory.path) / "run" / "use"
    assert (use / (b"here" * 4).hex()).exists() and not (use / gone.hex()).exists()


def test_uses_are_written_at_a_close_that_can_start_no_thread(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.12 starts none while it exits: the close of a forgotten store printed a traceback, and ended there."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    times = AccessTimes(ns._c.directory)
    times.stamp(b"here" * 4, 0, [1])
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        times.close()
    assert (Path(ns._c.directory.path) / "run" / "use" / (b"here" * 4).hex()).exists()
