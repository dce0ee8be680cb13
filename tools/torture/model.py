"""model: long random workloads on a file system that sometimes fails, checked against the bytes of every page.

``--workload small`` fails every single call of a small workload instead, one per run: once, or from then on, with EIO
and ENOSPC, with short, torn, flipped and misdirected writes and reads. ``--workload kills`` and ``stops``: see
``tools/torture/steps.py``.
"""

from __future__ import annotations

import errno
import gc
import itertools
import random
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import kvfs
from kvfs.testing import KINDS, Fault, FaultyFiles
from tools.torture.case import PROMPTS, get, namespace, open_store, put
from tools.torture.faults import leaks, lose_index, run_case, verdict
from tools.torture.judge import Judge, kvfs_threads, open_files

ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENOMEM, errno.EACCES)
FAMILIES = 30
STEPS = 150
CREATION_WRITES = 4


def run(folder: Path, seed: int, seconds: float, judge: Judge, *, small: bool = False) -> None:
    """Run cases until the time is up, or all cases of the small workload."""
    threading.excepthook = lambda args: judge.found("raised", f"in thread {args.thread}: {args.exc_value!r}")
    end = time.monotonic() + seconds
    if small:
        total = run_case(folder / "dry", [], Judge()).total + 50
        for number, fault in enumerate(every_fault(total)):
            run_case(folder / str(number), [fault], judge)
            judge.counts["cases"] += 1
            if time.monotonic() > end:
                return
    else:
        for number in itertools.count():
            random_case(folder / str(number), seed * 10_000 + number, judge)
            judge.counts["cases"] += 1
            if time.monotonic() > end:
                return


def every_fault(calls: int) -> Iterator[Fault]:
    """Faults of every call; for writes and reads, every kind of fault."""
    for n in range(1, calls):
        for code, persistent in itertools.product((errno.EIO, errno.ENOSPC), (False, True)):
            yield Fault(n, None, "error", code, persistent)
    for n, kind, action in itertools.product(
        range(1, 80), ("pwritev", "preadv"), ("short", "torn", "flip", "misdirect")
    ):
        if action in ("short", "torn") or n > CREATION_WRITES:
            yield Fault(n, kind, action)
    for n, kind in itertools.product((1, 3, 10), KINDS):
        yield Fault(n, kind, persistent=True)


def random_fault(chance: random.Random, files: FaultyFiles) -> Fault:
    """A fault of one of the next calls."""
    kind = chance.choice([None, *KINDS])
    done = files.total if kind is None else files.calls[kind]
    action = chance.choice(["error", "error", "error", "short", "torn", "flip", "misdirect", "delay"])
    soon = done + chance.randint(1, 200 if kind is None else 10)
    return Fault(soon, kind, action, chance.choice(ERRORS), chance.random() < 0.3, 0.02)


def random_case(folder: Path, seed: int, judge: Judge) -> None:
    """Run one workload of STEPS steps, and the verdict."""
    chance = random.Random(seed)
    judge.context = f"model, case {seed}: "
    judge.fault = "calls that fail"
    folder.mkdir(parents=True)
    path, before, threads = folder / "store", open_files(), kvfs_threads()
    open_store(path).close()  # the small workload covers faults while a store is created
    files = FaultyFiles(seed=seed)
    judge.delayed = lambda: files.delayed
    left = STEPS
    while left > 0:
        left = _session(path, files, chance, judge, left)
        if chance.random() < 0.2:
            lose_index(path)
    gc.collect()
    judge.counts["faults"] += files.fired
    leaks(before, threads, judge)
    verdict(path, judge, families=range(0, FAMILIES, 7))
    shutil.rmtree(folder, ignore_errors=True)


def _session(path: Path, files: FaultyFiles, chance: random.Random, judge: Judge, left: int) -> int:
    """Do steps until the store is closed by chance; steps left."""
    files.arm(*[random_fault(chance, files)] if chance.random() < 0.3 else [])
    store = judge.call("open", lambda: open_store(path, files), may_raise=True)
    if store is None:
        files.arm()
        return left - 1
    try:
        ns = namespace(store)
        while left > 0 and chance.random() > 0.05:
            left -= 1
            if chance.random() < 0.2:
                files.arm(*[random_fault(chance, files) for _ in range(chance.randint(0, 2))])
            _step(store, ns, chance, judge)
        return left
    finally:
        judge.call("close", store.close)


def _step(store: kvfs.Store, ns: kvfs.Namespace, chance: random.Random, judge: Judge) -> None:
    """One call, of any kind."""
    tokens = PROMPTS.tokens(chance.randrange(FAMILIES), chance.randint(1, 24), chance.choice((None, 2, 9)))
    step = chance.random()
    if step < 0.45:
        put(ns, tokens, judge)
    elif step < 0.9:
        get(ns, tokens, judge, views=step > 0.75)
    elif step < 0.95:
        judge.call("gc", lambda: store.gc(chance.choice((None, 0, 4 << 20))), may_raise=True)
    elif step < 0.97:
        judge.call("verify", lambda: store.verify(0.5, repair=chance.random() < 0.5), may_raise=True)
    else:
        judge.call("pin", lambda: store.pin("some", ns, tokens), may_raise=True)
        judge.call("unpin", lambda: store.unpin("some"), may_raise=True)
