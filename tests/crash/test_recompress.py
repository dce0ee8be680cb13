"""A recompress that a failed call or a kill ends early: every page is found, at its old or its new place."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kvfs
from kvfs.testing import Fault, FaultyFiles
from tests.format.test_codec import LAYOUT, PAGES
from tests.stores import restored, tokens_of

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = range(6)
RECOMPRESS = """
import sys, time, kvfs
with kvfs.open(sys.argv[1]) as store:
    print("ready", flush=True)
    print(store.recompress(idle=0).segments, flush=True)
"""


def fill(path: Path, files: FaultyFiles | None = None, sync: str = "cache") -> kvfs.Store:
    store = kvfs.open(path, capacity="64MiB", segment_bytes="512KiB", files=files, sync=sync)
    ns = store.namespace("model", LAYOUT, "1")
    for prompt in PROMPTS:
        assert ns.put(tokens_of(prompt, 6), PAGES).stored == 6
    store._shared.services().active.finish_all()
    return store


def all_there(store: kvfs.Store) -> bool:
    ns = store.namespace("model", LAYOUT, "1")
    found = [restored(ns, tokens_of(prompt, 6)) for prompt in PROMPTS]
    assert all(pages == PAGES[: len(pages)] for pages in found)
    return all(len(pages) == len(PAGES) for pages in found)


@pytest.mark.parametrize("sync", ["cache", "sync"])
@pytest.mark.parametrize("kind", ["pwritev", "preadv", "fallocate", "open", "flock", "rename", "unlink", "fdatasync"])
def test_no_page_is_lost_when_a_call_fails(memory_path: Path, kind: str, sync: str) -> None:
    fired = 0
    for n in (1, 2, 3, 4, 6, 9, 13, 19, 28, 41):
        files = FaultyFiles()
        with fill(memory_path / str(n), files, sync) as store:
            code = (errno.EIO, errno.ENOSPC)[n % 2]
            before = files.fired
            files.arm(Fault(files.calls[kind] + n, kind, "torn" if kind == "pwritev" and n % 3 else "error", code))
            try:
                stopped = store.recompress(idle=0).stopped
            except kvfs.KvfsError:  # it could not begin
                stopped = ""
            files.arm()
            if files.fired == before:
                break
            fired += 1
            assert stopped in ("", "io", "space", "a segment is gone", "a mark")
            whole = all_there(store)
            assert whole or kind == "fdatasync", n  # a segment whose sync failed is dropped
            store.recompress(idle=0)
            assert all_there(store) == whole and store.verify().ok
    assert fired or (kind, sync) == ("fdatasync", "cache")


@pytest.mark.parametrize("seed", range(3))
def test_a_kill_in_the_middle_loses_nothing(tmp_path: Path, seed: int) -> None:
    draw, path = random.Random(seed), tmp_path / "store"
    fill(path).close()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for _ in range(8):
        child = subprocess.Popen(
            [sys.executable, "-c", RECOMPRESS, str(path)], env=environment, stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        time.sleep(draw.uniform(0, 0.05))
        child.send_signal(signal.SIGKILL)
        done = child.stdout.read()
        child.wait(10.0)
        with kvfs.open(path) as store:
            assert store.wait_ready()
            assert all_there(store)
            assert store.verify().ok
        if done:
            break
    os.unlink(path / "index" / "CURRENT")  # and a rebuild finds the same
    with kvfs.open(path) as store:
        assert store.wait_ready() and all_there(store)
