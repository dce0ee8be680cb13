"""A small workload during which the n-th file-system call fails, and the verdict on the store afterwards."""

from __future__ import annotations

import gc
import os
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from kvfs.runtime import registry
from kvfs.testing import Fault, FaultyFiles
from tools.torture.case import PROMPTS, get, locks_left, namespace, open_store, put
from tools.torture.judge import Judge, kvfs_threads, open_files

READY_SECONDS = 20.0


def small_workload(path: Path, files: FaultyFiles, judge: Judge, mode: str = "cache") -> None:
    """Open, save, load, reopen, lose the index, rebuild, evict: everything that a store does, once."""
    _session(path, files, judge, families=(1, 2), mode=mode)
    _session(path, files, judge, families=(2, 3), mode=mode)
    lose_index(path)
    _session(path, files, judge, families=(1, 4), mode=mode, collect=True)


def _session(
    path: Path, files: FaultyFiles, judge: Judge, families: Sequence[int], *, mode: str, collect: bool = False
) -> None:
    store = judge.call("open", lambda: open_store(path, files, mode=mode), may_raise=True)
    if store is None:
        return
    try:
        ns = judge.call("namespace", lambda: namespace(store), may_raise=True)
        if ns is None:
            return
        for family in families:
            tokens = PROMPTS.tokens(family, 6)
            put(ns, tokens, judge)
            get(ns, tokens, judge)
            forked = PROMPTS.tokens(family, 8, fork=3)
            put(ns, forked, judge)
            get(ns, forked, judge, views=True)
            put(ns, tokens, judge)
        judge.call("stats", store.stats)
        if collect:
            judge.call("gc", lambda: store.gc(target_bytes=0), may_raise=True)
            get(ns, PROMPTS.tokens(families[0], 6), judge)
        crashed = {k: n for k, n in store._shared.c.counters.snapshot().items() if k.endswith("_crashed")}
        if crashed:
            judge.found("raised", f"upkeep: {crashed}")
    finally:
        judge.call("close", store.close)


def lose_index(path: Path) -> None:
    """Make the index untrusted, as after a power cut."""
    shutil.rmtree(path / "index", ignore_errors=True)
    if path.is_dir():
        (path / "index").mkdir(mode=0o700, exist_ok=True)


def verdict(path: Path, judge: Judge, families: Sequence[int] = (1, 2, 3, 4), mode: str = "cache") -> None:
    """Check with a healthy file system that the store opens, serves correct bytes only, and takes new pages."""
    if left := locks_left(path):
        judge.found("leaked", f"locks still held: {left}")
    store = judge.call("reopen", lambda: open_store(path, mode=mode), may_raise=True)
    if store is None:
        judge.found("unopenable", "reopen failed")
        return
    with store:
        if not store.wait_ready(READY_SECONDS):
            judge.found("unopenable", f"index not ready: {store.stats()}")
            return
        ns = namespace(store)
        for family in families:
            for tokens in (PROMPTS.tokens(family, 6), PROMPTS.tokens(family, 8, fork=3)):
                get(ns, tokens, judge)
                get(ns, tokens, judge, views=True)
        fresh = PROMPTS.tokens(99, 5)
        result = put(ns, fresh, judge)
        if result is None or result.stored + result.skipped != 5 or get(ns, fresh, judge) != 5:
            judge.found("unopenable", f"no new pages after the fault: {result}, {store.stats()}")


def run_case(folder: Path, faults: Sequence[Fault], judge: Judge, mode: str = "cache") -> FaultyFiles:
    """Run one workload with faults in a directory of its own, and the verdict."""
    folder.mkdir(parents=True)
    path = folder / "store"
    judge.context = f"{faults[0] if faults else 'no fault'}: "
    release_forgotten(judge)
    before, threads = open_files(), kvfs_threads()
    files = FaultyFiles(*faults)
    small_workload(path, files, judge, mode)
    gc.collect()
    judge.counts["faults"] += files.fired
    leaks(before, threads, judge)
    verdict(path, judge, mode=mode)
    shutil.rmtree(folder, ignore_errors=True)
    return files


def release_forgotten(judge: Judge) -> None:
    """Wait until stores that earlier callers in this process dropped without closing them are closed."""
    end = time.monotonic() + READY_SECONDS
    while registry._STORES or registry._CLOSING:
        gc.collect()
        if time.monotonic() > end:
            open_ones = [f"{store.path}: {store.users} users" for store in registry._STORES.values()]
            judge.found("leaked", f"stores of earlier callers are open: {open_ones}")
            return
        time.sleep(0.05)


def leaks(before: dict[str, str], threads: list[threading.Thread], judge: Judge) -> None:
    """Report descriptors, threads and registrations that a closed store has left, beyond those of ``before``.

    The threads of large writes belong to the process, and stay. What a busy machine keeps from its end is waited for: a
    close leaves the thread that writes access times after a second.
    """
    end = time.monotonic() + READY_SECONDS
    while any(thread.name == "kvfs-stamps" for thread in kvfs_threads()) and time.monotonic() < end:
        time.sleep(0.05)
    left = {fd: name for fd, name in open_files().items() if before.get(fd) != name}
    if left:
        judge.found("leaked", f"descriptors: {sorted(left.values())}")
    if started := [thread.name for thread in kvfs_threads() if thread not in threads]:
        judge.found("leaked", f"threads: {started}")
    if registry._STORES:
        judge.found("leaked", "a store that is closed is still registered")
        registry._STORES.clear()
    for fd in left:
        try:
            os.close(int(fd))
        except OSError:
            continue
