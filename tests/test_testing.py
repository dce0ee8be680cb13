"""kvfs.testing itself: what is counted, what fails, and which bytes belong to which prompt."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfs.system.descriptors import Descriptor
from kvfs.system.files import Files
from kvfs.testing import KINDS, DictOracle, FakeClock, Fault, FaultyFiles, Prompts


@pytest.fixture
def root(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


def test_every_kind_is_a_method_that_is_overridden() -> None:
    assert all(getattr(FaultyFiles, kind) is not getattr(Files, kind) for kind in KINDS)


def test_the_nth_call_of_a_kind_fails_once(root: int) -> None:
    files = FaultyFiles(Fault(2, "pwritev", error=errno.ENOSPC), trace=True)
    fd = files.create("a", 0o600, dir_fd=root)
    assert files.pwritev(fd, [b"abc"], 0) == 3
    with pytest.raises(OSError, match="injected") as caught:
        files.pwritev(fd, [b"abc"], 0)
    assert caught.value.errno == errno.ENOSPC
    assert files.pwritev(fd, [b"xyz"], 0) == 3
    assert (files.calls["pwritev"], files.fired) == (3, 1)
    assert [c.kind for c in files.trace] == ["open", "pwritev", "pwritev", "pwritev"]
    assert [c.fault is not None for c in files.trace] == [False, False, True, False]
    files.close(fd)


def test_a_persistent_fault_of_all_kinds_fails_everything_from_then_on(root: int) -> None:
    files = FaultyFiles(Fault(2, persistent=True))
    fd = files.create("a", 0o600, dir_fd=root)
    for call in (lambda: files.fsync(fd), lambda: files.listdir(root), lambda: files.stat("a", dir_fd=root)):
        with pytest.raises(OSError, match="injected"):
            call()
    with pytest.raises(OSError, match="injected"):
        files.close(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)  # a close that fails has closed
    files.arm()
    assert files.listdir(root) == ["a"]


def test_a_descriptor_may_be_collected_while_a_call_is_counted(root: int) -> None:
    """The garbage collector runs between any two bytecodes, in any thread (model, seed 41: a run stood still)."""

    class Collects(Fault):
        def hits(self, *args: Any) -> bool:
            dropped.clear()
            return False

    files = FaultyFiles()
    dropped = [Descriptor.create(files, "a", 0o600, dir_fd=root)]
    files.arm(Collects())
    thread = threading.Thread(target=files.listdir, args=(root,), daemon=True)
    thread.start()
    thread.join(30.0)
    assert not thread.is_alive() and files.calls["close"] == 1


def test_short_and_torn_writes_write_half(root: int) -> None:
    files = FaultyFiles(Fault(1, "pwritev", "short"), Fault(3, "pwritev", "torn", errno.EIO))
    fd = files.create("a", 0o600, dir_fd=root)
    assert files.write_all(fd, [b"0123", b"4567"], 0) == 8  # goes on after the short one
    assert files.read(fd, 8, 0) == b"01234567"
    with pytest.raises(OSError, match="injected"):
        files.write_all(fd, [b"abcdefgh"], 0)
    assert files.read(fd, 8, 0) == b"abcd4567"
    files.close(fd)


def test_flips_and_misdirections_change_bytes_silently(root: int) -> None:
    files = FaultyFiles(seed=3)
    fd = files.create("a", 0o600, dir_fd=root)
    files.write_all(fd, [bytes(8192)], 0)
    files.arm(Fault(files.calls["preadv"] + 1, "preadv", "flip"))
    data = files.read(fd, 64, 0)
    assert sum(b.bit_count() for b in data) == 1
    assert files.read(fd, 64, 0) == bytes(64)
    files.arm(Fault(files.calls["pwritev"] + 1, "pwritev", "misdirect"))
    files.write_all(fd, [b"here"], 0)
    assert files.read(fd, 4, 0) == bytes(4)
    assert files.read(fd, 4, 4096) == b"here"
    files.close(fd)


def test_a_clock_that_the_test_sets() -> None:
    class Clocked(FakeClock, Files):
        pass

    files = Clocked()
    before, now = files.monotonic(), files.now_us()
    files.sleep(2.5)
    files.advance(1.5)
    assert files.monotonic() == before + 4.0
    assert files.now_us() == now + 4_000_000


def test_pages_are_a_function_of_all_tokens_before() -> None:
    prompts = Prompts(16, 64)
    plain, longer = prompts.tokens(1, 4), prompts.tokens(1, 6)
    forked, other = prompts.tokens(1, 6, fork=2), prompts.tokens(2, 4)
    assert prompts.pages(plain) == prompts.pages(longer)[:4]
    assert prompts.pages(forked)[:2] == prompts.pages(longer)[:2]
    assert not set(prompts.pages(forked)[2:]) & set(prompts.pages(longer))
    assert not set(prompts.pages(other)) & set(prompts.pages(plain))
    assert prompts.wrong(plain, prompts.pages(longer)) == 0
    assert prompts.wrong(plain, reversed(prompts.pages(plain))) == 4


def test_an_oracle_of_chosen_bytes() -> None:
    oracle = DictOracle()
    oracle.put(b"k", b"one")
    oracle.put(b"k", b"two")
    assert oracle.wrong([b"k", b"l"], [b"one", b"x"]) == [b"l"]
    assert oracle.wrong([b"k"], [b"two"]) == [b"k"]
