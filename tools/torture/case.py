"""The store that torture runs use: pages of 4 KiB, segments of 256 KiB, bytes that every process can compute."""

from __future__ import annotations

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
SETTINGS: dict[str, Any] = {"capacity": "16MiB", "segment_bytes": "256KiB", "index_bytes": "2MiB"}


def open_store(path: Path | str, files: Files | None = None, **settings: Any) -> kvfs.Store:
    return kvfs.open(path, files=files, **{**SETTINGS, **settings})


def namespace(store: kvfs.Store) -> kvfs.Namespace:
    return store.namespace("torture", LAYOUT, revision="0123abcd")


def put(ns: kvfs.Namespace, tokens: Sequence[int], judge: Judge, start: int = 0) -> kvfs.PutResult | None:
    """Put all pages of a prompt from chunk ``start`` on; the four counts must add up."""
    pages = PROMPTS.pages(tokens)[start:]
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
            pages = [memoryview(out)[i * PAGE_BYTES : (i + 1) * PAGE_BYTES] for i in range(chunks)]
        if chunks > match.chunks:
            judge.found("wrong", f"{chunks} chunks loaded of {match.chunks} matched")
        if wrong := PROMPTS.wrong(tokens, pages):
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
