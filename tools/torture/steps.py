"""Kills and stops at each step of one operation, in forked children of a process that has no store open.

``kills``: a writer is killed at its n-th change of the disk in an append; the next one adopts its segment and is killed
at its m-th; then a put of what each had begun must not say "skipped" of a page that a load does not get.
``clocks``: a store is filled while a clock is wrong; then a working set that fits must stay.
``stops``: a process is stopped at its n-th call for longer than any deadline between processes; meanwhile others must
not be blocked, and when it goes on it must not harm what they did.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import kvfs
from kvfs.testing import Fault, FaultyFiles
from tools.torture.case import CLOCK_SECONDS_MAX, PROMPTS, JumpingClock, get, namespace, namespaces, open_store, put
from tools.torture.faults import verdict
from tools.torture.judge import Judge

CHUNKS = 5
STOP_SECONDS = 7.0  # the longest wait of one process for another is SPACE_SECONDS of kvfs.write.appender, 5
SETTLED_SECONDS = 3.0  # one wait of each kind is over by then
SLOW_SECONDS, SLOW_SHARE_MAX = 0.2, 0.25  # of the time after that, in steps that take longer: a busy machine has some
END_SECONDS = 30.0
LEVELS = ("cache", "batch")
CLOCK_ROUNDS, CLOCK_SHARE_MIN = 4, 0.9


#: Calls that change what a crash leaves. A kill at another call leaves what one at the next of these leaves.
CHANGES = frozenset(("pwritev", "fallocate", "truncate", "rename", "unlink", "mkdir", "fsync", "fdatasync"))


class SignallingFiles(FaultyFiles):
    """Sends this process a signal at the n-th call from ``arm`` on: of any thread, or one of CHANGES in this thread."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number
        self.left = 0
        self._thread: int | None = None

    def arm(self, calls: int = 0, *, changes_only: bool = False) -> None:  # type: ignore[override]
        self.left = calls
        self._thread = threading.get_ident() if changes_only else None

    def _enter(self, kind: str, detail: object = "") -> Fault | None:
        fault = super()._enter(kind, detail)
        if self._thread is None or kind in CHANGES:
            self.step()
        return fault

    def step(self) -> None:
        """One more call; those of other threads do not count if only changes do."""
        if self._thread in (None, threading.get_ident()):
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), self._number)


def count_commits(store: kvfs.Store, files: SignallingFiles) -> None:
    """LMDB's files are not ``files``: before and after each transaction of a writer there is a point, too."""
    index = store._shared.c.index
    write = index.write

    def counted(*args: Any, **more: Any) -> Any:
        files.step()
        result = write(*args, **more)
        files.step()
        return result

    index.write = counted  # type: ignore[method-assign]


def child(work: Callable[[], int]) -> int:
    """Fork a process that does ``work`` and exits with its result; its id."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    status = 99
    try:
        status = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def append(
    path: Path, family: int, number: int, at: int, sync: str, gate: Gate | None = None, counted: Path | None = None
) -> int:
    """Put one prompt; a signal comes at its ``at``-th change. 0 if the put ended.

    ``gate``: the store is open when this process is ready, and the put begins when it may go on. ``counted``: the file
    that takes the number of changes.
    """
    files = SignallingFiles(number)
    store = open_store(path, files, sync=sync)
    store.wait_ready()
    ns = namespace(store)
    if gate is not None:
        gate.wait()
    count_commits(store, files)
    files.arm(at, changes_only=True)
    put(ns, PROMPTS.tokens(family, CHUNKS), Judge())
    if counted is not None:
        counted.write_text(str(-files.left))
    return 0


class Gate:
    """A child says that it is ready, and waits until its parent lets it go on."""

    def __init__(self) -> None:
        self._ready, self._go = os.pipe(), os.pipe()

    def wait(self) -> None:
        os.write(self._ready[1], b"r")
        os.read(self._go[0], 1)

    def wait_for_child(self) -> None:
        os.read(self._ready[0], 1)

    def open(self) -> None:
        os.write(self._go[1], b"g")
        for fd in (*self._ready, *self._go):
            os.close(fd)


def prepare(path: Path, sync: str) -> None:
    """A store with an unsealed segment that a dead process has left."""

    def work() -> int:
        store = open_store(path, sync=sync)
        put(namespace(store), PROMPTS.tokens(1, CHUNKS), Judge())
        os._exit(0)

    os.waitpid(child(work), 0)


def kills(folder: Path, seed: int, seconds: float, judge: Judge) -> None:
    """All pairs of points, in a random order, until the time is up."""
    chance = random.Random(seed)
    end = time.monotonic() + seconds
    judge.fault = "after two kills"
    pairs = []
    for sync in LEVELS:
        template, counted = folder / f"template-{sync}", folder / "changes"
        prepare(template, sync)
        shutil.copytree(template, folder / "store")
        _run(lambda: append(folder / "store", 2, 0, 0, sync, counted=counted))  # noqa: B023
        shutil.rmtree(folder / "store")
        points = range(1, int(counted.read_text()) + 2)  # the last one: the put ends
        pairs += [(sync, first, second) for first in points for second in points]
    judge.counts["points"] = len(pairs)
    chance.shuffle(pairs)
    for sync, first, second in pairs:
        if time.monotonic() > end:
            return
        pair(folder, sync, first, second, judge)


def pair(folder: Path, sync: str, first: int, second: int, judge: Judge) -> None:
    """Kill a writer at its change ``first``, the one after it at ``second``; check a copy of the template."""
    path = folder / "store"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(folder / f"template-{sync}", path)
    judge.context = f"kills at changes {first} and {second} of an append, level {sync}: "
    judge.counts["kills"] += _kill_two(path, first, second, sync)
    judge.counts["pairs"] += 1
    after_kills(path, sync, judge)


def _kill_two(path: Path, first: int, second: int, sync: str) -> int:
    """How many of two appends were killed before they ended. The second writer has the store open when the first dies,
    so it adopts what the first has left; else the index would be rebuilt in between.
    """
    gate = Gate()
    heir = child(lambda: append(path, 3, signal.SIGKILL, second, sync, gate))
    gate.wait_for_child()
    statuses = [os.waitpid(child(lambda: append(path, 2, signal.SIGKILL, first, sync)), 0)[1]]
    gate.open()
    statuses.append(os.waitpid(heir, 0)[1])
    return sum(os.WIFSIGNALED(status) for status in statuses)


def after_kills(path: Path, sync: str, judge: Judge) -> None:
    """What a put calls stored is there; what was stored before the kills is there."""
    store = judge.call("open", lambda: open_store(path, sync=sync), may_raise=True)
    if store is None or not store.wait_ready(20.0):
        judge.found("unopenable", "the store does not open")
        return
    with store:
        ns = namespace(store)
        if (found := get(ns, PROMPTS.tokens(1, CHUNKS), judge)) < CHUNKS:
            judge.found("lost", f"{found} of {CHUNKS} pages from before the kills")
        for family in (2, 3):
            tokens = PROMPTS.tokens(family, CHUNKS)
            result = put(ns, tokens, judge)
            found = get(ns, tokens, judge)
            if result is not None and result.stored + result.skipped == CHUNKS and found < CHUNKS:
                judge.found("lost", f"put says {result}, {found} of {CHUNKS} pages of family {family} come")


# -- stops ---------------------------------------------------------------------------------------


def stops(folder: Path, seed: int, seconds: float, judge: Judge) -> None:
    """Stops at calls in a random order, until the time is up or all had their turn."""
    chance = random.Random(seed)
    end = time.monotonic() + seconds
    template, counted = folder / "template", folder / "calls"
    _run(lambda: fill(template))
    shutil.copytree(template, folder / "dry")
    _run(lambda: busy(folder / "dry", 0, counted))
    points = list(range(1, int(counted.read_text()) + 1))
    judge.counts["points"] = len(points)
    chance.shuffle(points)
    judge.fault = "a process is stopped"
    for at in points:
        if time.monotonic() > end:
            return
        judge.context = f"stops, seed {seed}, stopped at call {at}: "
        shutil.rmtree(folder / "store", ignore_errors=True)
        shutil.copytree(template, folder / "store")
        _stop(folder / "store", at, judge)
        judge.counts["stops"] += 1


def fill(path: Path) -> int:
    """A full store: the next put has to evict."""
    judge = Judge()
    with open_store(path) as store:
        store.wait_ready()
        huge = namespaces(store, mixed=True)[-1]
        for family in range(300, 328):
            put(huge, PROMPTS.tokens(family, 6), judge)
    return int(judge.failed)


def busy(path: Path, at: int, counted: Path | None = None) -> int:
    """Open the store, put so that it evicts, load, pin, purge, collect; stopped at the ``at``-th call."""
    files, judge = SignallingFiles(signal.SIGSTOP), Judge()
    if at:
        files.arm(at)
    with open_store(path, files) as store:
        store.wait_ready()
        ns, *_, huge = namespaces(store, mixed=True)
        for family in range(100, 103):
            put(huge, PROMPTS.tokens(family, 6), judge)
            put(ns, PROMPTS.tokens(family, 20), judge)
        tokens = PROMPTS.tokens(100, 20)
        get(ns, tokens, judge)
        put(ns, tokens, judge)
        judge.call("pin", lambda: store.pin("some", ns, tokens), may_raise=True)
        judge.call("unpin", lambda: store.unpin("some"), may_raise=True)
        judge.call("purge", lambda: store.purge(ns, prefix=PROMPTS.tokens(101, 20)), may_raise=True)
        judge.call("gc", lambda: store.gc(12 << 20), may_raise=True)
    if counted is not None:
        counted.write_text(str(files.total))
    del judge.counts["blocked"]  # it was stopped itself
    if judge.failed:
        print(*judge.notes, file=sys.stderr)
    return int(judge.failed)


def _run(work: Callable[[], int]) -> None:
    _, status = os.waitpid(child(work), 0)
    if status:
        raise RuntimeError(f"a step that no fault disturbs ended with status {status}")


def _stop(path: Path, at: int, judge: Judge) -> None:
    pid = child(lambda: busy(path, at))
    _, status = os.waitpid(pid, os.WUNTRACED)
    if not os.WIFSTOPPED(status):
        judge.counts["not_reached"] += 1
        return
    try:
        _work_meanwhile(path, judge)
    finally:
        os.kill(pid, signal.SIGCONT)
    end = time.monotonic() + END_SECONDS
    while not (done := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < end:
        time.sleep(0.05)
    if not done[0]:
        judge.found("blocked", f"it did not end within {END_SECONDS:.0f} s after it went on")
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    elif done[1]:
        judge.found("raised", f"it ended with status {done[1]} after it went on")
    verdict(path, judge, families=(201,))


def _work_meanwhile(path: Path, judge: Judge) -> None:
    """Another process puts and loads; after one wait of each kind it is no longer slow."""
    store = judge.call("open", lambda: open_store(path), may_raise=True)
    if store is None:
        return
    started, slow, family = time.monotonic(), 0.0, 200
    settled: Any = None
    with store:
        ns = namespace(store)
        while (now := time.monotonic()) < started + STOP_SECONDS:
            family += 1
            tokens = PROMPTS.tokens(201 + family % 40, 12)
            put(ns, tokens, judge)
            get(ns, tokens, judge)
            took = time.monotonic() - now
            if now > started + SETTLED_SECONDS:
                settled = settled or now
                slow += took if took > SLOW_SECONDS else 0.0
        if settled is not None and slow > SLOW_SHARE_MAX * (time.monotonic() - settled):
            judge.found("blocked", f"{slow:.1f} s of {time.monotonic() - settled:.1f} s in slow calls: {store.stats()}")


# -- clocks --------------------------------------------------------------------------------------


def clocks(folder: Path, seed: int, seconds: float, judge: Judge) -> None:
    """Stores that were filled with a wrong clock, until the time is up."""
    chance = random.Random(seed)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        offset = chance.choice((3600.0, CLOCK_SECONDS_MAX, chance.uniform(-1, 1) * CLOCK_SECONDS_MAX))
        judge.context = f"clocks, seed {seed}, a clock that was {offset:.0f} s ahead: "
        judge.fault = "after a wrong clock"
        shutil.rmtree(folder / "store", ignore_errors=True)
        right, wrong = JumpingClock(None), JumpingClock(None)
        wrong.offset_us = int(offset * 1e6)
        if chance.random() < 0.5:  # one process of two; else the clock of all
            _use(folder / "store", right, range(400, 410), judge)
        _use(folder / "store", wrong, range(300, 328), judge)
        judge.counts["cases"] += 1
        shares = [_use(folder / "store", right, range(500, 508), judge) for _ in range(CLOCK_ROUNDS)]
        if min(shares[1:]) < CLOCK_SHARE_MIN:
            judge.found("lost", f"shares of a working set that were served, by round: {shares}")


def _use(path: Path, clock: JumpingClock, families: Iterable[int], judge: Judge) -> float:
    """Load and put prompts of large pages; the share of their pages that was there."""
    there = asked = 0
    with open_store(path, clock) as store:
        store.wait_ready()
        huge = namespaces(store, mixed=True)[-1]
        for family in families:
            tokens = PROMPTS.tokens(family, 6)
            there += get(huge, tokens, judge)
            asked += 6
            put(huge, tokens, judge)
    return there / asked
