"""Settings that change while pages are stored: a batch may be larger than the new limit allows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.write.appender import Appender
from tests.stores import TINY_BYTES, restored, seeded, tiny, tokens_of


def test_segments_that_shrink_during_a_put_raise_nothing_into_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = seeded(1, 2000 * TINY_BYTES)
    with kvfs.open(tmp_path / "store", capacity="256MiB", segment_bytes="16MiB") as store:
        ns = store.namespace("model", tiny(), "1")
        assert ns.put(tokens_of(0, 20), pages[: 20 * TINY_BYTES]).stored == 20
        c, claim, shrunk = store._shared.c, Appender._claim, list[int]()

        def shrinks(self: Appender, job: Any, chunks: Any, active: Any, *rest: Any) -> Any:
            writer = active.writer
            if not shrunk and writer.tail + len(chunks) * 4096 > writer.allocated > 1 << 20:  # it must grow
                shrunk.append(writer.allocated)
                c.settings = replace(c.settings, segment_bytes=1 << 20)
            return claim(self, job, chunks, active, *rest)

        monkeypatch.setattr(Appender, "_claim", shrinks)
        assert ns.put(tokens_of(1, 2000), pages).stored == 2000
        assert shrunk and restored(ns, tokens_of(1, 2000)) == pages
        assert store.verify().ok
