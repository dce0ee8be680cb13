"""What several test modules need: small stores, seeded bytes, other processes and other users."""

from __future__ import annotations

import os
import pickle
import random
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.format.segment import align
from kvfs.lookup.prefix_match import PrefixMatch
from kvfs.segments.scan import Scan, scan_segment
from kvfs.system.files import Files

PAGE_TOKENS = 16
#: Threads fork one after the other: filelock, which torch brings, refuses a fork while another one is in progress.
_FORKING = threading.Lock()
#: of one page of ``tiny()``
TINY_BYTES = 2 * 2 * PAGE_TOKENS * 16


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Poll; an assertion if the condition has not come true by then, however busy the machine is."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.01)


def tiny(**changes: Any) -> kvfs.PageLayout:
    """A layout with small pages: 16 tokens, 2 layers, 2 heads, cells of 16 bytes."""
    arguments: dict[str, Any] = {"layers": 2, "kv_heads": 2, "head_dim": 4, "dtype": "bfloat16", "page_tokens": 16}
    return kvfs.PageLayout.kv(**{**arguments, **changes})


def seeded(seed: int, nbytes: int) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def tokens_of(seed: int, chunks: int, page_tokens: int = PAGE_TOKENS) -> list[int]:
    """Token ids of a prompt that shares nothing with prompts of other seeds."""
    draw = random.Random(seed)
    return [draw.randrange(1, 2**32) for _ in range(chunks * page_tokens)]


def load(ns: kvfs.Namespace, match: PrefixMatch) -> dict[str, bytes]:
    """The pages that ``get`` restores, by group, cut to the length that it returns. Checks guard bytes behind them."""
    guard = b"\xa5" * 64
    buffers = {g.name: bytearray(b"\xee" * g.nbytes + guard) for g in match.groups}
    outs = {name: memoryview(buffer)[: len(buffer) - len(guard)] for name, buffer in buffers.items()}
    chunks = ns.get(match, outs if len(outs) > 1 else next(iter(outs.values())))
    assert all(buffer.endswith(guard) for buffer in buffers.values()), "get wrote behind the buffer"
    return {
        g.name: bytes(buffers[g.name][: max(0, chunks - g.first) * g.part_bytes])
        for g in match.groups
    }  # fmt: skip


def restored(ns: kvfs.Namespace, token_ids: Any, **how: Any) -> bytes:
    """Bytes that a match and a get load for a prompt of a layout with one group."""
    with ns.match(token_ids, **how) as match:
        return next(iter(load(ns, match).values()))


def counters(store: kvfs.Store) -> dict[str, int]:
    return dict(store.stats()["counters"])


@contextmanager
def counted(store: kvfs.Store) -> Iterator[Callable[[str], int]]:
    """How far a counter moved since the beginning of the block."""
    before = counters(store)
    yield lambda name: counters(store).get(name, 0) - before.get(name, 0)


def segment_files(path: Path) -> list[Path]:
    return sorted((path / "segments").glob("*.kvs"))


def scanned(file: Path) -> Scan:
    """A segment's tables, without reading its pages into the page cache."""
    fd = os.open(file, os.O_RDONLY)
    try:
        Files().random_access(fd)
        scan = scan_segment(fd, Files())
    finally:
        os.close(fd)
    assert scan is not None
    return scan


def cached_of(file: Path) -> tuple[int, int]:
    """Bytes of payload of a segment that are in the page cache, and all of them."""
    cached = stored = 0
    entries = list(scanned(file).parts())
    fd = os.open(file, os.O_RDONLY)
    try:
        for entry in entries:
            there = Files().cached_bytes(fd, entry.payload, align(entry.stored_bytes))
            if there is None:
                pytest.skip("the kernel does not say what is in the page cache")
            cached += there
            stored += align(entry.stored_bytes)
    finally:
        os.close(fd)
    return cached, stored


def run_child(function: Callable[[], Any], *, uid: int | None = None) -> Any:
    """Result of ``function`` in a forked child, by another user if asked; what it raises is raised here.

    The child ends with ``os._exit``, as the children of multiprocessing do, so that no buffer, fixture or
    exit handler of the test runner runs twice.
    """
    reader, writer = os.pipe()
    with _FORKING:
        child = os.fork()
    if not child:
        os.close(reader)
        code = 1
        try:
            if uid is not None:
                os.setgroups([])
                os.setgid(uid)
                os.setuid(uid)
            try:
                answer: tuple[bool, Any] = (True, function())
            except BaseException as exc:
                answer = (False, (exc, traceback.format_exc()))
            with os.fdopen(writer, "wb") as pipe:
                pickle.dump(answer, pipe)
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(child, 0)
    assert data and status == 0, f"the child ended with status {status} and said nothing"
    fine, result = pickle.loads(data)
    if fine:
        return result
    exc, text = result
    raise exc from RuntimeError(f"in the child:\n{text}")


def corrupt(path: Path, page: bytes) -> None:
    """Zero 64 bytes of a stored page, in its segment of the store at ``path``."""
    for file in segment_files(path):
        at = file.read_bytes().find(page)
        if at >= 0:
            with file.open("r+b") as opened:
                opened.seek(at + len(page) // 2)
                opened.write(bytes(64))
            return
    raise AssertionError("no segment has this page")
