"""Room for saves: how long they wait for it, and who makes it."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs import Quota
from kvfs.directory.config import quota_id
from kvfs.errors import IndexUnavailableError
from kvfs.eviction.reclaimer import Reclaimer
from kvfs.index import ledger
from kvfs.system.files import Files
from kvfs.testing import FakeClock
from kvfs.write.active_segments import LANES, NO_ROOM_SECONDS, PROBE_SECONDS
from kvfs.write.appender import SPACE_SECONDS
from tests.stores import restored, seeded, tokens_of

LAYOUT = kvfs.PageLayout.kv(layers=2, kv_heads=2, head_dim=64, dtype="bfloat16", page_tokens=16)
PAGE = LAYOUT.page_bytes
MIB = 1 << 20
PAGES = seeded(2, 4 * PAGE)


class Clock(FakeClock, Files):
    """The real file system under a clock that is set by hand; each write takes ``seconds``."""

    seconds = 0.0

    def write_all(self, *args: Any, **how: Any) -> Any:
        self.advance(self.seconds)
        return super().write_all(*args, **how)


def test_a_file_system_that_fails_while_room_is_made_is_counted(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Reclaimer) -> int:
        raise OSError(errno.EIO, "I/O error")

    with kvfs.open(memory_path / "store", capacity="16MiB") as store:
        evictor = store._shared.services().evictor
        store._shared.background.stop()
        monkeypatch.setattr(Reclaimer, "reclaim_dropped", fails)
        assert not evictor.make_room(1, store._shared.c.files.monotonic() + 60)
        assert store.stats()["counters"]["evict_errors"] == 1


def test_a_put_on_a_slow_disk_does_not_time_out_in_a_full_store(memory_path: Path) -> None:
    files = Clock()
    with kvfs.open(memory_path / "store", capacity="16MiB", segment_bytes="256KiB", files=files) as store:
        store._shared.background.stop()  # or the clock advances while it evicts, and the put times out
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


def test_a_stopped_evictor_costs_its_neighbours_one_deadline(memory_path: Path) -> None:
    files = Clock()
    with kvfs.open(memory_path / "store", capacity="16MiB", segment_bytes="256KiB", files=files) as store:
        store._shared.background.stop()
        ns, pages = store.namespace("model", LAYOUT, revision="r1"), seeded(1, 100 * PAGE)
        for seed in range(8):
            assert ns.put(tokens_of(seed, 100), pages).stored == 100
        stopped = os.open(memory_path / "store" / "run" / "gc", os.O_RDWR)
        try:
            fcntl.flock(stopped, fcntl.LOCK_EX)
            waited = []
            for seed in range(10, 13):
                began = files.monotonic()
                assert ns.put(tokens_of(seed, 100), pages).reason == "space"
                waited.append(files.monotonic() - began)
            assert waited[0] >= SPACE_SECONDS and max(waited[1:]) < 0.1, waited
        finally:
            os.close(stopped)
        assert ns.put(tokens_of(20, 100), pages).stored == 100


@pytest.mark.parametrize("nbytes", [1, 64])
def test_eviction_of_pages_far_below_a_block_relocates_within_its_budget(memory_path: Path, nbytes: int) -> None:
    """Counted by their bytes, whole segments of them were relocated to free nothing."""
    big = kvfs.PageLayout.opaque(page_bytes=900 << 10, page_tokens=16)
    small = kvfs.PageLayout.opaque(page_bytes=nbytes, page_tokens=16)
    files = Clock()
    with kvfs.open(memory_path / "store", capacity="16MiB", files=files) as store:
        store._shared.background.stop()
        files.seconds = 0.001
        ns = store.namespace("big", big, revision="r1")
        for i in range(60):
            assert ns.put_keys([b"big %02d" % i * 4], bytes(900 << 10)).stored
        before = store.stats()["counters"].get("pages_carried", 0)
        ns = store.namespace("small", small, revision="r1")
        for round_ in range(3):
            keys = [b"%02d %03d" % (round_, i) * 4 for i in range(300)]
            assert ns.put_keys(keys, bytes(300 * nbytes)).stored == 300
        # what was saved up, and a twentieth of what was stored since
        assert store.stats()["counters"].get("pages_carried", 0) - before <= 4 * (256 << 10) // 4096 + 3 * 300 // 20


# ---------------------------------------------------------------- quotas of few segments


@pytest.fixture
def small(memory_path: Path) -> Iterator[kvfs.Store]:
    quotas = {"two": Quota(cap_bytes=2 * MIB), "less": Quota(cap_bytes=MIB // 2)}
    path = memory_path / "store"
    with kvfs.open(path, capacity="64MiB", segment_bytes="1MiB", quotas=quotas, files=Clock()) as store:
        store._shared.background.stop()
        yield store


def put(store: kvfs.Store, name: str, seed: int, lane: int = 0) -> kvfs.PutResult:
    ns = store.namespace(name, LAYOUT, revision="r1")
    ns._put = partial(ns._put, lane=lane)  # type: ignore[method-assign]
    return ns.put(tokens_of(seed, 4), PAGES)


def test_a_quota_of_two_segments_is_enough_for_several_lanes(small: kvfs.Store) -> None:
    for seed in range(120):
        assert put(small, "two", seed, seed % LANES).stored == 4, seed
        assert small._shared.c.index.read(lambda s: s.quota_used(quota_id("two")), 2.0) <= 2 * MIB
    assert restored(small.namespace("two", LAYOUT, revision="r1"), tokens_of(119, 4)) == PAGES
    assert small._shared.c.files.monotonic() == 0.0, "a put waited"


def test_a_quota_is_filled_and_then_declines_without_waiting(small: kvfs.Store) -> None:
    stored = 0
    while put(small, "less", stored).stored:
        stored += 1
    assert stored == 7, "of 64 KiB, in 512: the eighth has no room next to the tables"
    assert put(small, "less", 100).reason == "space"
    assert small._shared.c.files.monotonic() == 0.0, "a put waited"


def test_a_lane_waits_for_another_that_appends(small: kvfs.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    active, files = small._shared.services().active, small._shared.c.files
    put(small, "less", 0, 1)
    busy = active.lock(next(iter(active._writers)))
    busy.acquire()
    seed = 1
    while seed < 20 and put(small, "less", seed, 0).stored:
        seed += 1
    assert SPACE_SECONDS <= files.monotonic() < 2 * SPACE_SECONDS
    assert seed < 20
    files.advance(NO_ROOM_SECONDS)
    monkeypatch.setattr(files, "sleep", lambda seconds: busy.release())
    assert put(small, "less", seed, 0).stored == 4


def test_an_evictor_that_could_not_remove_segments_evicts_again_when_another_process_has(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kvfs.open(memory_path / "s", capacity="16MiB", segment_bytes="256KiB", index_bytes="2MiB") as store:
        store._shared.background.stop()
        ns, evictor = store.namespace("m", LAYOUT, revision="r1"), store._shared.services().evictor
        for n in range(40):
            assert ns.put(tokens_of(n, 4), PAGES).stored == 4
        with monkeypatch.context() as failing:

            def fail(*args: Any, **how: Any) -> None:
                raise OSError(errno.EIO, "Input/output error")

            failing.setattr(store._shared.c.files, "rename", fail)
            while not evictor.reclaimer.fails:
                assert evictor._evict_one() == 0
        assert Reclaimer(store._shared.c).reclaim_dropped() > 0, "another process"
        for n in range(40, 400):
            assert ns.put(tokens_of(n, 4), PAGES) == (4, 0, 0, 0, "")


def test_an_index_that_is_late_for_an_eviction_does_not_look_like_a_full_store(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kvfs.open(memory_path / "s", capacity="16MiB", segment_bytes="256KiB", index_bytes="2MiB") as store:
        store._shared.background.stop()
        ns, evictor = store.namespace("m", LAYOUT, revision="r1"), store._shared.services().evictor
        choose, late = evictor.victims.choose, 0

        def hang(*args: Any) -> Any:
            nonlocal late
            late += 1
            if late % 2:
                raise IndexUnavailableError("timeout")
            return choose(*args)

        monkeypatch.setattr(evictor.victims, "choose", hang)
        n = 0
        while late < 6:
            n += 1
            assert ns.put(tokens_of(n, 4), PAGES) == (4, 0, 0, 0, "")


# ---------------------------------------------------------------- readers that hold everything


def test_readers_that_hold_all_segments_cost_one_wait(memory_path: Path) -> None:
    files = Clock()
    with kvfs.open(memory_path / "store", capacity="16MiB", segment_bytes="256KiB", files=files) as store:
        store._shared.background.stop()
        ns, pages = store.namespace("model", LAYOUT, revision="r1"), seeded(1, 100 * PAGE)
        for seed in range(8):
            assert ns.put(tokens_of(seed, 100), pages).stored == 100
        store._shared.services().active.finish_all()
        rows = store._shared.c.index.read(lambda s: s.segments(), 2.0)
        held = [store._shared.c.segments.acquire(n, row.segment_id, "") for n, row in rows]
        waited = []
        for seed in range(20, 26):
            began = files.monotonic()
            assert ns.put(tokens_of(seed, 100), pages).reason == "space"
            waited.append(files.monotonic() - began)
        assert SPACE_SECONDS <= waited[0] < 2 * SPACE_SECONDS and max(waited[1:]) == 0.0, waited
        files.advance(NO_ROOM_SECONDS)
        began = files.monotonic()
        assert ns.put(tokens_of(30, 100), pages).reason == "space"
        assert files.monotonic() - began < 2 * PROBE_SECONDS
        held.clear()
        files.advance(NO_ROOM_SECONDS)
        assert ns.put(tokens_of(40, 100), pages).stored == 100


# ---------------------------------------------------------------- files without a row


@pytest.mark.parametrize("folder", ["segments", "doomed"])
def test_segment_files_that_no_row_names_are_charged_and_make_room_first(memory_path: Path, folder: str) -> None:
    path = memory_path / "store"
    with kvfs.open(path, capacity="16MiB", segment_bytes="256KiB", files=Clock()) as store:
        store._shared.background.stop()
        services, ns = store._shared.services(), store.namespace("model", LAYOUT, revision="r1")
        assert ns.put(tokens_of(1, 4), PAGES).stored == 4
        used = store.stats()["used_bytes"]
        unknown = path / folder / f"{'ab' * 16}.kvs"
        unknown.write_bytes(bytes(MIB))
        (path / folder / f"{'cd' * 16}.kvs").mkdir()
        services.evictor.charge_unknown()
        services.evictor.charge_unknown()
        assert store.stats()["used_bytes"] >= used + MIB
        assert store.stats()["counters"]["segments_unknown"] == 1
        if folder == "segments":
            assert services.evictor._evict_one() == ledger.charge(MIB, 0)
        services.evictor.background()
        assert not unknown.exists() and store.stats()["used_bytes"] == used
        assert restored(ns, tokens_of(1, 4)) == PAGES
