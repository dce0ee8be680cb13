"""Each of many file-system calls of a small workload fails in turn: nothing may leak, block, raise or be wrong.

This is a sample of the calls; ``python -m tools.torture model`` fails all of them, and runs long random workloads.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.testing import Fault, FaultyFiles
from tools.torture.faults import run_case, small_workload
from tools.torture.judge import Judge

CALLS_MAX = 1800  # of the workload, about
WRITES_MAX = 60
CREATION_WRITES = 4  # of super file and settings: with a flipped bit there, the store is refused, with a clear error
STRIDE, SHARES = 11, 4
STAGING_STRIDE = 211  # on a disk: fewer


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[Judge]:
    """Collects what went wrong, also in threads."""
    found = Judge()
    monkeypatch.setattr(threading, "excepthook", lambda args: found.found("raised", f"in a thread: {args.exc_value!r}"))
    yield found
    assert not found.failed, "\n".join([found.line(), *found.notes])


def run_all(folder: Path, judge: Judge, faults: list[Fault], mode: str = "cache") -> None:
    for number, fault in enumerate(faults):
        run_case(folder / str(number), [fault], judge, mode)


def test_without_faults_everything_is_stored_and_served(memory_path: Path, judge: Judge) -> None:
    files = run_case(memory_path / "case", [], judge)
    assert files.fired == 0
    assert files.total < 2 * CALLS_MAX, "the workload grew: sample more of it"
    assert set(files.calls) >= {"open", "flock", "pwritev", "preadv", "fallocate", "rename", "map", "unlink", "fsync"}


@pytest.mark.parametrize("share", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, SHARES))])
@pytest.mark.parametrize("persistent", [False, True], ids=["once", "from_then_on"])
def test_the_nth_call_fails(memory_path: Path, judge: Judge, persistent: bool, share: int) -> None:
    codes = (errno.EIO, errno.ENOSPC)
    numbers = range(1 + STRIDE * share, CALLS_MAX, STRIDE * SHARES)
    run_all(memory_path, judge, [Fault(n, None, "error", codes[n % 2], persistent) for n in numbers])


@pytest.mark.parametrize("kind", ["flock", "close", "fsync", "fallocate", "rename", "truncate", "map", "populate_at"])
def test_one_kind_of_call_always_fails(memory_path: Path, judge: Judge, kind: str) -> None:
    run_all(memory_path, judge, [Fault(n, kind, "error", errno.EIO, True) for n in (1, 2, 5)])


@pytest.mark.parametrize("action", ["short", "torn"])
def test_writes_and_reads_end_early(memory_path: Path, judge: Judge, action: str) -> None:
    once = [Fault(n, "pwritev", action, errno.ENOSPC) for n in range(1, WRITES_MAX, 3)]
    ever = [Fault(n, kind, action, errno.EIO, True) for n in (1, 10) for kind in ("pwritev", "preadv")]
    run_all(memory_path, judge, once + ever)


@pytest.mark.parametrize("kind", ["pwritev", "preadv"])
@pytest.mark.parametrize("action", ["flip", "misdirect"])
def test_wrong_bytes_are_never_served(memory_path: Path, judge: Judge, kind: str, action: str) -> None:
    run_all(memory_path, judge, [Fault(n, kind, action) for n in range(CREATION_WRITES + 1, WRITES_MAX, 4)])


# ---------------------------------------------------------------- payloads with O_DIRECT


@pytest.mark.parametrize("persistent", [False, True], ids=["once", "from_then_on"])
def test_the_nth_call_fails_in_mode_staging(disk_path: Path, judge: Judge, persistent: bool) -> None:
    codes = (errno.EIO, errno.ENOSPC, errno.EINVAL)
    faults = [Fault(n, None, "error", codes[n % 3], persistent) for n in range(7, CALLS_MAX, STAGING_STRIDE)]
    faults += [Fault(n, kind, "error", errno.EIO, persistent) for n in (1, 3) for kind in ("reopen", "random_access")]
    run_all(disk_path, judge, faults, "staging")


@pytest.mark.parametrize("action", ["short", "torn", "flip", "misdirect"])
def test_writes_and_reads_go_wrong_in_mode_staging(disk_path: Path, judge: Judge, action: str) -> None:
    once = [
        Fault(n, kind, action, errno.ENOSPC)
        for kind in ("pwritev", "preadv")
        for n in range(CREATION_WRITES + 2, WRITES_MAX, 18)
    ]
    ever = [Fault(10, kind, action, errno.EIO, True) for kind in ("pwritev", "preadv") if action in ("short", "torn")]
    run_all(disk_path, judge, once + ever, "staging")


def test_a_slow_disk_only_delays(memory_path: Path, judge: Judge) -> None:
    files = FaultyFiles(Fault(1, "pwritev", "delay", persistent=True, seconds=0.01))
    small_workload(memory_path / "store", files, judge)
    assert files.fired > 10
