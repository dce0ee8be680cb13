"""Sync levels: when bytes are forced to the disk, and what a failed sync costs."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

import kvfs
from kvfs.eviction.evictor import RELOCATED
from kvfs.eviction.victims import Victim
from kvfs.format import segment as fmt
from kvfs.index.ledger import NO_QUOTA
from kvfs.testing import Fault, FaultyFiles
from kvfs.write.active_segments import Declined, SegmentClass
from tests.stores import TINY_BYTES, counters, restored, seeded, tiny, tokens_of

CHUNKS = 4
PAGES = seeded(1, CHUNKS * TINY_BYTES)


@contextmanager
def opened(path: Path, level: str) -> Iterator[tuple[kvfs.Store, kvfs.Namespace, FaultyFiles]]:
    files = FaultyFiles(trace=True)
    with kvfs.open(path / "store", capacity="16MiB", sync=level, files=files) as store:
        store._shared.background.stop()  # the test runs background tasks itself
        yield store, store.namespace("m", tiny(), revision="r1"), files


def put(ns: kvfs.Namespace, seed: int) -> kvfs.PutResult:
    return ns.put(tokens_of(seed, CHUNKS), PAGES)


def served(ns: kvfs.Namespace, seed: int) -> bool:
    return restored(ns, tokens_of(seed, CHUNKS)) == PAGES


def test_level_cache_never_syncs(memory_path: Path) -> None:
    with opened(memory_path, "cache") as (store, ns, files):
        assert put(ns, 1).stored == CHUNKS
        store._shared.services().sync()
        store._shared.services().active.finish_all()
        assert files.calls["fdatasync"] == 0


def test_level_sync_syncs_each_put_after_its_last_write(memory_path: Path) -> None:
    with opened(memory_path, "sync") as (_, ns, files):
        for seed in range(3):
            before = len(files.trace)
            assert put(ns, seed).stored == CHUNKS
            calls = files.trace[before:]
            synced = [i for i, call in enumerate(calls) if call.kind == "fdatasync"]
            assert len(synced) == 1
            fd = calls[synced[0]].detail
            written = [i for i, call in enumerate(calls) if call.kind == "pwritev" and call.detail.split()[0] == fd]
            assert written and max(written) < synced[0]


def test_level_batch_syncs_in_the_background_and_once(memory_path: Path) -> None:
    with opened(memory_path, "batch") as (store, ns, files):
        assert put(ns, 1).stored == put(ns, 2).stored == CHUNKS
        assert files.calls["fdatasync"] == 0
        store._shared.services().sync()
        assert files.calls["fdatasync"] == 1
        store._shared.services().sync()
        assert files.calls["fdatasync"] == 1, "nothing was written since"
        assert put(ns, 3).stored == CHUNKS
        store._shared.services().sync()
        assert files.calls["fdatasync"] == 2


@pytest.mark.parametrize("level", ["batch", "sync"])
def test_a_sealed_segment_is_synced(memory_path: Path, level: str) -> None:
    with opened(memory_path, level) as (store, ns, files):
        put(ns, 1)
        store._shared.services().sync()
        before = files.calls["fdatasync"]
        store._shared.services().active.finish_all()
        assert files.calls["fdatasync"] == before + 2  # first what the seal covers, then the seal


def test_a_put_whose_sync_fails_reports_nothing_stored(memory_path: Path) -> None:
    with opened(memory_path, "sync") as (store, ns, files):
        assert put(ns, 1).stored == CHUNKS
        calls = files.calls["fdatasync"]
        files.arm(Fault(calls + 1, "fdatasync", error=errno.EIO))
        assert put(ns, 2)[:3] == (0, 0, CHUNKS)
        assert (files.calls["fdatasync"], counters(store)["sync_errors"]) == (calls + 1, 1)
        assert not served(ns, 2) and not served(ns, 1), "the kernel may have lost pages of the whole segment"
        assert put(ns, 1).stored == put(ns, 2).stored == CHUNKS
        assert served(ns, 1) and served(ns, 2)


def test_a_background_sync_that_fails_drops_the_segment_and_is_not_retried(memory_path: Path) -> None:
    with opened(memory_path, "batch") as (store, ns, files):
        assert put(ns, 1).stored == CHUNKS
        files.arm(Fault(1, "fdatasync", error=errno.EIO))
        store._shared.services().sync()
        store._shared.services().sync()
        assert (files.calls["fdatasync"], counters(store)["sync_errors"]) == (1, 1)
        assert not served(ns, 1)
        assert put(ns, 1).stored == CHUNKS
        store._shared.services().sync()
        assert served(ns, 1)
        store.gc()
        assert store.stats()["segments"]["dropped"] == 0


@pytest.mark.parametrize(("level", "syncs"), [("cache", 0), ("batch", 1), ("sync", 1)])
def test_relocated_pages_are_synced_before_their_source_is_dropped(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, level: str, syncs: int
) -> None:
    with opened(memory_path, level) as (store, ns, files):
        put(ns, 1)
        services = store._shared.services()
        services.active.finish_all()
        [(number, row)] = store._shared.c.index.read(lambda s: s.segments(), 2.0)
        victim = Victim(number, row, range(1, 1 + CHUNKS), CHUNKS * TINY_BYTES)
        monkeypatch.setattr(services.evictor.victims, "choose", lambda *_: victim)
        before = len(files.trace)
        assert services.evictor._evict_one() and counters(store)["pages_carried"] == CHUNKS
        kinds = [call.kind for call in files.trace[before:]]
        last_write = len(kinds) - 1 - kinds[::-1].index("pwritev")
        assert kinds[last_write : kinds.index("rename")].count("fdatasync") == syncs
        assert put(ns, 1).skipped == CHUNKS and served(ns, 1)


def test_a_segment_takes_no_more_copies_after_a_write_to_it_failed(memory_path: Path) -> None:
    with opened(memory_path, "cache") as (store, ns, files):
        put(ns, 1)
        services, index = store._shared.services(), store._shared.c.index
        services.active.finish_all()
        [(number, row)] = index.read(lambda s: s.segments(), 2.0)
        target = SegmentClass(NO_QUOTA + RELOCATED, fmt.FLAG_CARRIED, evictor=True)
        held = store._shared.c.segments.acquire(number, row.segment_id, index.generation)
        assert held is not None
        copy = partial(services.evictor.relocator.copy, target, number, held)
        assert copy([1]) == 1
        files.arm(Fault(1, "pwritev", "error", errno.EIO, persistent=True))
        with pytest.raises(Declined, match="io"):
            copy([2])
        files.arm()
        assert copy([2]) == 1
        rows = [row for _, row in index.read(lambda s: s.segments(), 2.0)]
        assert len(rows) == 3 and served(ns, 1), "the second copy went to the segment whose write had failed"


@pytest.mark.parametrize(("level", "syncs"), [("cache", 0), ("batch", 1), ("sync", 1)])
def test_imported_pages_are_synced_before_a_put_skips_them(memory_path: Path, level: str, syncs: int) -> None:
    bundle = str(memory_path / "bundle.tar")
    with kvfs.open(memory_path / "source", capacity="16MiB") as source:
        put(source.namespace("m", tiny(), revision="r1"), 1)
        source.export(bundle, ["m"])
    with opened(memory_path, level) as (store, ns, files):
        assert store.import_bundle(bundle).stored == CHUNKS
        assert files.calls["fdatasync"] == syncs
        assert put(ns, 1).skipped == CHUNKS
        store._shared.services().sync()
        assert files.calls["fdatasync"] == syncs


def test_a_close_at_level_batch_syncs_what_was_put_since_the_last_sync(memory_path: Path) -> None:
    with opened(memory_path, "batch") as (_, ns, files):
        put(ns, 1)
    assert files.calls["fdatasync"] == 1


DIES = """
import os, sys
import kvfs
from tests.stores import tiny
from tests.write.test_active_segments_sync import put
store = kvfs.open(sys.argv[1], capacity="16MiB", sync="batch")
store._shared.background.stop()
assert put(store.namespace("m", tiny(), revision="r1"), 1).stored == 4
os._exit(0)
"""


def put_and_die(path: Path) -> None:
    """Another process stores a prompt, and dies before its background syncs."""
    root = str(Path(__file__).resolve().parents[2])
    command = [sys.executable, "-c", DIES, str(path / "store")]
    subprocess.run(command, cwd=root, env={**os.environ, "PYTHONPATH": root}, check=True, timeout=60)


def test_at_level_batch_the_segment_of_a_dead_process_is_synced_once(memory_path: Path) -> None:
    """No rebuild does it while this process keeps the index in use, and a put skips its pages."""
    with opened(memory_path, "batch") as (store, ns, files):
        assert store.wait_ready()
        put_and_die(memory_path)
        assert put(ns, 1).skipped == CHUNKS
        store._shared.services().sync()
        assert files.calls["fdatasync"] == 1
        store._shared.services().sync()
        assert files.calls["fdatasync"] == 1 and served(ns, 1)


def test_at_level_batch_what_cannot_be_synced_for_a_dead_process_is_dropped(memory_path: Path) -> None:
    with opened(memory_path, "batch") as (store, ns, files):
        assert store.wait_ready()
        put_and_die(memory_path)
        files.arm(Fault(1, "fdatasync", error=errno.EIO))
        store._shared.services().sync()
        assert not served(ns, 1) and counters(store)["sync_errors"] == 1
        files.arm()
        assert put(ns, 1).stored == CHUNKS and served(ns, 1)
