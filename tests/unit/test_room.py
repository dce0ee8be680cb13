"""Room for saves: how long they wait for it, and who makes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kvfs
from kvfs.files import Files
from kvfs.testing import FakeClock
from kvfs.writer import SPACE_SECONDS
from tests.stores import restored, seeded, tokens_of

LAYOUT = kvfs.PageLayout.kv(layers=2, kv_heads=2, head_dim=64, dtype="bfloat16", page_tokens=16)
PAGE = LAYOUT.page_bytes
MIB = 1 << 20


class Clock(FakeClock, Files):
    """The real file system under a clock that is set by hand; each write takes ``seconds`` of it."""

    seconds = 0.0

    def write_all(self, *args: Any, **how: Any) -> Any:
        self.advance(self.seconds)
        return super().write_all(*args, **how)


def test_a_put_on_a_slow_disk_may_take_its_time_in_a_full_store(memory_path: Path) -> None:
    files = Clock()
    with kvfs.open(memory_path / "store", capacity="16MiB", segment_bytes="256KiB", files=files) as store:
        ns = store.namespace("model", LAYOUT, revision="r1")
        pages = seeded(1, 300 * PAGE)
        for seed in range(4):
            assert ns.put(tokens_of(seed, 300), pages).stored == 300
            files.advance(100.0)
        files.seconds = 0.2  # of all writes together more than a put waits for room at once
        assert ns.put(tokens_of(9, 300), pages).declined == 0
        assert files.monotonic() > 400.0 + 2 * SPACE_SECONDS
        files.seconds = 0.0
        assert restored(ns, tokens_of(9, 300)) == pages
