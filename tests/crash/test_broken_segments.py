"""Segment files that cannot be removed: one of them keeps none of the others."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.files import Files
from kvfs.gc import FAILURES_MAX
from tests.stores import counters, seeded, segment_files, tiny, tokens_of

LAYOUT = tiny(page_tokens=64, head_dim=16)
CHUNKS = 50  # a prompt takes most of a segment


class Stubborn(Files):
    """Files some of which some calls refuse."""

    refused: Callable[[str, str], bool] = staticmethod(lambda call, name: False)

    def _ask(self, call: str, name: str) -> None:
        if self.refused(call, name):
            raise OSError(errno.EIO, "refused")

    def rename(self, src: str, dst: str, **how: Any) -> None:
        self._ask("rename", src)
        super().rename(src, dst, **how)

    def unlink(self, name: str, **how: Any) -> None:
        self._ask("unlink", name)
        super().unlink(name, **how)

    def open(self, name: str, flags: int, *rest: Any, **how: Any) -> int:
        self._ask("open", name)
        return super().open(name, flags, *rest, **how)


@pytest.fixture
def files() -> Stubborn:
    return Stubborn()


@pytest.fixture
def store(memory_path: Path, files: Stubborn) -> Iterator[kvfs.Store]:
    """One that carries nothing, so that all of it can be dropped."""
    with kvfs.open(memory_path / "store", capacity="24MiB", segment_bytes="1MiB", files=files) as opened:
        opened._core.evictor._carry = lambda *_: None  # type: ignore[method-assign]
        yield opened


def fill(store: kvfs.Store, prompts: int) -> list[str]:
    """Names of the segments, of which there are several then."""
    ns = store.namespace("m", LAYOUT, "r1")
    for seed in range(prompts):
        result = ns.put(tokens_of(seed, CHUNKS, 64), seeded(seed, CHUNKS * LAYOUT.page_bytes))
        assert result.stored + result.skipped == CHUNKS
    return [file.name for file in segment_files(Path(store.path))]


@pytest.mark.parametrize("call", ["rename", "unlink", "open"])
def test_one_segment_that_cannot_be_removed_keeps_no_others(store: kvfs.Store, files: Stubborn, call: str) -> None:
    names = fill(store, 8)
    assert len(names) > 4
    files.refused = lambda what, name: (what, name) == (call, names[0])
    store._core.active.finish_all()
    store.gc(0)
    states = store.stats()["segments"]
    assert states["doomed"] == 1 and states["sealed"] + states["active"] == 0
    assert 0 < store.stats()["used_bytes"] < 3 << 20, "it stays charged"
    assert counters(store)["evict_errors"]
    files.refused = lambda what, name: False
    store.gc(0)
    assert store.stats()["used_bytes"] == 0
    assert segment_files(Path(store.path)) == [] == list((Path(store.path) / "doomed").iterdir())


def test_a_store_goes_on_although_a_segment_cannot_be_removed(store: kvfs.Store, files: Stubborn) -> None:
    names = fill(store, 8)
    files.refused = lambda what, name: (what, name) == ("unlink", names[0])
    store._core.active.finish_all()
    store._core.evictor.reclaimer.drop(store._core.c.index.read(lambda s: s.segments()[0][0], 5.0))
    fill(store, 40)
    assert store.namespace("m", LAYOUT, "r1").match(tokens_of(39, CHUNKS, 64)).chunks == CHUNKS
    assert counters(store)["segments_reclaimed"] > 2


def test_a_directory_in_the_way_is_moved_aside(store: kvfs.Store) -> None:
    names, path = fill(store, 8), Path(store.path)
    (path / "doomed" / names[0]).mkdir()
    (path / "doomed" / names[0] / "notes").write_text("mine")
    store._core.active.finish_all()
    store.gc(0)
    assert store.stats()["used_bytes"] == 0 and segment_files(path) == []
    [aside] = (path / "quarantine").iterdir()
    assert aside.name.startswith(names[0]) and (aside / "notes").read_text() == "mine"


def test_where_nothing_can_be_removed_no_more_is_dropped(store: kvfs.Store, files: Stubborn) -> None:
    """It would lose pages and free nothing."""
    names = fill(store, 8)
    assert len(names) > FAILURES_MAX
    files.refused = lambda what, name: what == "unlink" and name.endswith(".kvs")
    store._core.active.finish_all()
    for _ in range(3):
        store.gc(0)
    assert store.stats()["segments"]["doomed"] == FAILURES_MAX
    files.refused = lambda what, name: False
    store.gc(0)
    assert store.stats()["used_bytes"] == 0


def test_a_purge_says_that_a_dropped_segment_is_still_to_be_found(store: kvfs.Store, files: Stubborn) -> None:
    """A rebuild would name its pages again."""
    names = fill(store, 8)
    files.refused = lambda what, name: (what, name) == ("rename", names[0])
    store._core.active.finish_all()
    store.gc(0)
    with pytest.raises(kvfs.StoreAccessError, match="refused"):
        store.purge("m")
