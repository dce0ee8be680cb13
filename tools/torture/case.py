"""The store that torture runs use: pages of 4 KiB, segments of 256 KiB, bytes that every process can compute."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kvfs
from kvfs.system.files import Files
from kvfs.testing import Prompts
from tools.torture.judge import Judge

LAYOUT = kvfs.PageLayout.kv(layers=2, kv_heads=2, head_dim=16, dtype="bfloat16", page_tokens=16)
PAGE_BYTES = LAYOUT.groups[0].page_bytes
PROMPTS = Prompts(LAYOUT.page_tokens, PAGE_BYTES)
#: Head sizes of layouts next to the usual one. Their pages have 64 bytes, 10,304 (no multiple of a block) and 102,400
#: (two fill a segment).
HEADS = (1, 161, 1600)
HUGE_BYTES, HUGE_CHUNKS_MAX = 64 << 10, 6  # prompts of larger pages are shorter
CLOCK_SECONDS_MAX = 400 * 86400  # by which a clock is wrong
SETTINGS: dict[str, Any] = {"capacity": "16MiB", "segment_bytes": "256KiB", "index_bytes": "2MiB"}


class JumpingClock(Files):
    """The wall clock is wrong by what a file says, or by what this process was told. Deadlines use another clock."""

    def __init__(self, shared: Path | None) -> None:
        self._shared = shared
        self.offset_us = 0

    def now_us(self) -> int:
        if self._shared is not None:
            with contextlib.suppress(OSError, ValueError):
                self.offset_us = int(self._shared.read_text())
        return super().now_us() + self.offset_us


def open_store(path: Path | str, files: Files | None = None, **settings: Any) -> kvfs.Store:
    return kvfs.open(path, files=files, **{**SETTINGS, **settings})


def namespace(store: kvfs.Store) -> kvfs.Namespace:
    return store.namespace("torture", LAYOUT, revision="0123abcd")


def namespaces(store: kvfs.Store, *, mixed: bool) -> list[kvfs.Namespace]:
    """The usual namespace and, if ``mixed``, those of tiny, odd and huge pages: each family is in one of them."""
    more = []
    for head in HEADS if mixed else ():
        layout = kvfs.PageLayout.kv(
            layers=1, kv_heads=1, head_dim=head, dtype="bfloat16", page_tokens=LAYOUT.page_tokens
        )
        more.append(store.namespace(f"torture-{head}", layout, revision="0123abcd"))
    return [namespace(store), *more]


def page_bytes(ns: kvfs.Namespace) -> int:
    return ns.identity.layout.groups[0].page_bytes


def put(ns: kvfs.Namespace, tokens: Sequence[int], judge: Judge, start: int = 0) -> kvfs.PutResult | None:
    """Put all pages of a prompt from chunk ``start`` on; the four counts must add up."""
    pages = Prompts(LAYOUT.page_tokens, page_bytes(ns)).pages(tokens)[start:]
    result = judge.call("put", lambda: ns.put(tokens, b"".join(pages), start))
    if result is not None and result.stored + result.skipped + result.declined + result.in_flight != len(pages):
        judge.found("raised", f"put of {len(pages)} pages: the counts do not add up: {result}")
    return result


def get(ns: kvfs.Namespace, tokens: Sequence[int], judge: Judge, *, views: bool = False) -> int:
    """Match and load a prompt; returns the verified chunks. Incorrect bytes are a finding ``wrong``."""
    match = judge.call("match", lambda: ns.match(tokens))
    if match is None:
        return 0
    with match:
        if views and ns._c.mode.maps:
            pages = judge.call("view", lambda: ns.view(match)) or []
            chunks = len(pages)
        else:
            out = bytearray(match.nbytes)
            chunks = judge.call("get", lambda: ns.get(match, out)) or 0
            size = page_bytes(ns)
            pages = [memoryview(out)[i * size : (i + 1) * size] for i in range(chunks)]
        if chunks > match.chunks:
            judge.found("wrong", f"{chunks} chunks loaded of {match.chunks} matched")
        if wrong := Prompts(LAYOUT.page_tokens, page_bytes(ns)).wrong(tokens, pages):
            judge.found("wrong", f"{wrong} of {chunks} pages of tokens {list(tokens[:1])}...", wrong)
        return chunks


def locks_left(path: Path) -> list[str]:
    """Lock files of a store that are still locked."""
    files, left = Files(), []
    for name in ("gate", "main", "run/gc", "run/rebuild"):
        try:
            fd = os.open(path / name, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            import fcntl

            if not files.flock(fd, fcntl.LOCK_EX):
                left.append(name)
        finally:
            os.close(fd)
    return left


def allocated_bytes(path: Path) -> int:
    """Blocks of every file below a directory."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total
