"""stall: match and put, back to back, while the index does not answer: the share of time that they are blocked.

Two causes, in turns: a process is stopped (SIGSTOP) inside a transaction, with the gate held; the index thread of this
process hangs inside one. A call counts as blocked if it takes longer than SLOW_SECONDS. The first call of a case waits
for its deadline and is left out; of the rest, less than SHARE_MAX of the time may be blocked, and after the cause has
gone the store must serve what it holds.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

import kvfs
from tools.torture.judge import Judge

SLOW_SECONDS = 0.05  # waits for the index last 0.1 s or more; a loaded machine delays any call by less
SHARE_MAX = 0.01
PAUSE_SECONDS = 0.001  # between two calls
BACK_SECONDS = 10.0  # until the index answers again
CHUNKS, PAGE_TOKENS = 100, 16
LAYOUT = kvfs.PageLayout.kv(layers=1, kv_heads=1, head_dim=16, dtype="bf16", page_tokens=PAGE_TOKENS)
TOKENS = list(range(CHUNKS * PAGE_TOKENS))


def run(folder: Path, seconds: float, judge: Judge) -> None:
    """Each cause and call for a quarter of ``seconds``."""
    with kvfs.open(folder / "store", capacity="64MiB") as store:
        ns = store.namespace("stall", LAYOUT, revision="stall-1")
        pages = bytes(CHUNKS * LAYOUT.page_bytes)
        assert ns.put(TOKENS, pages).stored == CHUNKS
        fresh = iter(range(1, 1 << 30))
        for cause in (_stopped, _hung):
            calls: dict[str, Callable[[], Any]] = {
                "match": lambda: ns.match(TOKENS).close(),
                "put": lambda: ns.put([next(fresh), *TOKENS[1:]], pages),
            }
            with cause(store):
                for name, call in calls.items():
                    _measure(f"{cause.__name__[1:]} {name}", call, seconds / 4, judge)
            if not _serves(ns):
                judge.found("lost", f"{cause.__name__[1:]}: nothing is served {BACK_SECONDS:.0f} s after its end")


def _measure(name: str, call: Callable[[], Any], seconds: float, judge: Judge) -> None:
    began = time.monotonic()
    judge.call(name, call)
    first, took = time.monotonic() - began, list[float]()
    began = now = time.monotonic()
    while now - began < seconds:
        judge.call(name, call)
        took.append(time.monotonic() - now)
        time.sleep(PAUSE_SECONDS)
        now = time.monotonic()
    took.sort()
    blocked = sum(t for t in took if t > SLOW_SECONDS) / (now - began)
    click.echo(
        f"{name}: first call {first * 1e3:.0f} ms, then {len(took)} calls, p50 {took[len(took) // 2] * 1e6:.0f} us, "
        f"p99.9 {took[len(took) * 999 // 1000] * 1e3:.2f} ms, longest {took[-1] * 1e3:.1f} ms, "
        f"blocked {100 * blocked:.2f} % of the time"
    )
    if blocked >= SHARE_MAX:
        judge.found("blocked", f"{name}: {100 * blocked:.1f} % of the time")


@contextmanager
def _stopped(store: kvfs.Store) -> Iterator[None]:
    def stop(_: object) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)  # the signal may reach another thread first

    child = os.fork()
    if not child:
        try:
            store._shared.c.index.write(stop, 60.0)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, os.WUNTRACED)
    assert os.WIFSTOPPED(status), f"the child did not stop: {status}"
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@contextmanager
def _hung(store: kvfs.Store) -> Iterator[None]:
    inside, release = threading.Event(), threading.Event()

    def hang() -> None:
        inside.set()
        release.wait()

    store._shared.c.index._worker.submit(hang)
    inside.wait()
    try:
        yield
    finally:
        release.set()


def _serves(ns: kvfs.Namespace) -> bool:
    end = time.monotonic() + BACK_SECONDS
    while time.monotonic() < end:
        with ns.match(TOKENS) as match:
            if match.chunks == CHUNKS:
                return True
        time.sleep(0.02)
    return False
