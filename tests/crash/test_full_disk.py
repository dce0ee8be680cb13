"""A file system that is smaller than the capacity of the store on it."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvfs

pytestmark = pytest.mark.needs_root("mounts a file system of limited size")
LAYOUT = kvfs.PageLayout.kv(layers=2, kv_heads=2, head_dim=64, dtype="bfloat16", page_tokens=64)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def test_a_store_opens_and_evicts_while_not_one_block_is_free(small_disk: Path) -> None:
    """A process that opens the store to make room must not need a free block for that."""
    path = small_disk / "store"
    tokens, pages = [7] * 64 * 16, random.Random(7).randbytes(16 * LAYOUT.page_bytes)
    with kvfs.open(path, capacity="20MiB") as store:
        store._shared.c.index.keep_slack()
        assert store.namespace("m", LAYOUT, revision="r1").put(tokens, pages).stored == 16
    with open(small_disk / "other data", "wb") as file, contextlib.suppress(OSError):
        while True:
            os.write(file.fileno(), bytes(4096))
    assert os.statvfs(small_disk).f_bfree == 0
    for _ in range(2):  # the second one finds what the first one left
        with kvfs.open(path) as store:
            assert "rebuilds" not in store.stats()["counters"]
            ns = store.namespace("m", LAYOUT, revision="r1")
            out = bytearray(len(pages))
            with ns.match(tokens) as match:
                assert ns.get(match, out) == 16 and out == pages
    with kvfs.open(path) as store:
        ns = store.namespace("m", LAYOUT, revision="r1")
        assert store.gc(0)["bytes_after"] == 0
        assert ns.put(tokens, pages).stored == 16


def test_a_full_disk_makes_room_for_the_next_put(small_disk: Path) -> None:
    """ENOSPC while the ledger had room: every later put was declined, and nothing was evicted."""
    with kvfs.open(small_disk / "store", capacity="64MiB") as store:
        ns = store.namespace("m", LAYOUT, revision="r1")
        last_stored = 0
        for i in range(60):  # 60 MiB
            tokens, pages = [i] * 64 * 16, random.Random(i).randbytes(16 * LAYOUT.page_bytes)
            result = ns.put(tokens, pages)
            assert result.reason in ("", "space")
            if result.stored == 16:
                last_stored = i
                out = bytearray(len(pages))
                with ns.match(tokens) as match:
                    loaded = ns.get(match, out) * LAYOUT.page_bytes
                assert out[:loaded] == pages[:loaded]
        counters = store.stats()["counters"]
        assert counters["disk_full"] > 0 and counters["segments_evicted"] > 0
        assert last_stored > 50, "puts go on long after the disk was full"
        usage = os.statvfs(small_disk)
        assert usage.f_blocks * usage.f_frsize <= 24 << 20
