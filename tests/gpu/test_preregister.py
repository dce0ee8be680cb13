"""Registration ahead of traffic: the pages that were used last, within every limit."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the GPU transport needs triton")

import kvfs
from kvfs.catalog import walk
from kvfs.directory.liveness import Liveness
from kvfs.errors import ConfigError, IndexUnavailableError
from kvfs.gpu.gpu_io import GpuIO
from kvfs.system.files import Files
from kvfs.testing import Fault, FaultyFiles
from tests.gpu.simulated import SimulatedDevice
from tests.gpu.test_gpu_io import LAYOUT, NOW, PAGE, SECONDS, Engine, attach, prompt, saved
from tests.stores import segment_files, wait_until

REGION = 16 << 10  # two pages
CHUNKS = 8  # of a prompt: 64 KiB
PROMPTS = [1000 * i for i in range(4)]


class Rank:
    """A new process's GpuIO, with small regions."""

    def __init__(self, ns: kvfs.Namespace, region_bytes: int = REGION, **changes: Any) -> None:
        self.ns, self.engine, self.device = ns, Engine(), SimulatedDevice()
        self.io: GpuIO = attach(ns, self.engine.kv, device=self.device, **changes)
        maps = self.io._gpu_context.regions
        assert maps is not None
        self.maps, maps._region_bytes = maps, region_bytes
        if self.io.transport == "arena":
            maps.source._block_bytes = region_bytes  # type: ignore[attr-defined]

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *_: object) -> None:
        self.io.close()

    def pinned(self, first: int) -> bool:
        """Whether all of a prompt is registered."""
        with self.ns.match(prompt(CHUNKS, first)) as match:
            held = match.hold.held  # type: ignore[union-attr]
            return all(
                self.maps.covers(held[ref.place.segment], ref.place.block * 4096, ref.place.stored_bytes)
                for sources in match.groups[0].sources().values() for ref in sources
            )  # fmt: skip

    def load(self, first: int) -> bytes:
        with self.ns.match(prompt(CHUNKS, first)) as match:
            result = self.io.load(match, range(2 * CHUNKS), NOW).wait(SECONDS)
        assert result is not None and result.tokens == CHUNKS * PAGE, result
        return self.engine.tokens(range(2 * CHUNKS))


@pytest.fixture
def sources(ns: kvfs.Namespace) -> list[Engine]:
    """What was saved, one prompt after the other."""
    return [saved(ns, CHUNKS, seed=i, first=first) for i, first in enumerate(PROMPTS)]


@pytest.mark.parametrize("transport", ["in_place", "arena"])
def test_the_first_load_of_the_prompt_used_last_finds_everything_registered(
    ns: kvfs.Namespace, sources: list[Engine], transport: str
) -> None:
    with Rank(ns) as before:
        before.load(PROMPTS[1])  # the third is next, and then the second, which was used again
    with Rank(ns, transport=transport) as rank:
        assert not rank.pinned(PROMPTS[1])
        there = rank.io.warm_hottest(10 * REGION)
        assert 8 * REGION <= there <= 10 * REGION and there == rank.maps.nbytes
        assert [rank.pinned(first) for first in PROMPTS] == [False, True, False, True]
        known = dict(rank.device.registered)
        assert rank.load(PROMPTS[1]) == sources[1].tokens(range(2 * CHUNKS))
        assert rank.device.registered == known, "the load had to register"
    assert not rank.device.registered


def test_the_number_of_bytes_is_an_upper_limit(ns: kvfs.Namespace, sources: list[Engine]) -> None:
    with Rank(ns) as rank:
        for nbytes in (0, REGION, 3 * REGION + 1):
            assert nbytes - REGION <= rank.io.warm_hottest(nbytes) <= nbytes
        there = rank.maps.nbytes
        assert rank.io.warm_hottest(REGION) == there > REGION, "less than is pinned: nothing is dropped"
        assert rank.io.warm_hottest("1GiB") == rank.maps.nbytes == rank.device.maps()
        assert all(map(rank.pinned, PROMPTS))
        assert rank.io.warm_hottest("1GiB") == rank.maps.nbytes, "pinned twice"


def test_no_pinned_region_is_dropped_for_it(ns: kvfs.Namespace, sources: list[Engine]) -> None:
    with Rank(ns, registered_bytes=5 * REGION) as rank:
        with ns.match(prompt(CHUNKS, PROMPTS[0])) as match:
            assert rank.io.warm(match) == match.nbytes
        assert rank.pinned(PROMPTS[0])
        assert rank.io.warm_hottest("1GiB") <= 5 * REGION
        assert rank.pinned(PROMPTS[0]), "a requested prompt was dropped for one that was not requested"


@pytest.mark.parametrize("transport", ["in_place", "arena"])
def test_a_region_that_cannot_grow_stays_as_it_is(ns: kvfs.Namespace, transport: str) -> None:
    """The active segment has grown since it was registered, and the driver registers no more."""
    saved(ns, 1)
    with Rank(ns, transport=transport, region_bytes=1 << 20) as rank, ns.match(prompt(1)) as match:
        assert rank.io.warm(match) == match.nbytes
        there = rank.maps.nbytes
        saved(ns, 1, seed=2, first=1000)
        rank.device.refuse, rank.device.pinned_max = True, 0
        assert rank.io.warm_hottest("1GiB") == rank.maps.nbytes == there
        rank.device.refuse, rank.device.pinned_max = False, 1 << 30
        assert rank.io.warm_hottest("1GiB") == rank.maps.nbytes > there
        assert ns._c.pinned.mine in (rank.maps.nbytes, 2 << 20)
    assert not rank.device.registered and not ns._c.pinned.mine


def test_a_region_that_copies_use_is_not_replaced_by_a_larger_one(ns: kvfs.Namespace) -> None:
    saved(ns, 1)
    with Rank(ns, region_bytes=1 << 20) as rank, ns.match(prompt(1)) as match:
        assert rank.io.warm(match) == match.nbytes
        there = dict(rank.device.registered)
        [region] = rank.maps._regions.values()
        region.users += 1
        saved(ns, 1, seed=2, first=1000)
        rank.io.warm_hottest("1GiB")
        assert rank.device.registered == there and ns._c.pinned.mine == rank.maps.nbytes
        region.users -= 1


def test_blocks_of_an_arena_that_are_not_full_count_as_a_whole(ns: kvfs.Namespace) -> None:
    """A few pages in each of many segments would pin many times what was asked for."""
    saved(ns, 1)
    with Rank(ns, transport="arena", region_bytes=1 << 20) as rank:
        assert rank.io.warm_hottest((1 << 20) - 1) == 0 and not ns._c.pinned.mine
        wait_until(lambda: rank.io.warm_hottest(1 << 20) > 0)  # as much as the page cache holds just then
        assert 0 < rank.io.warm_hottest(1 << 20) < 1 << 20 == ns._c.pinned.mine


def test_a_forked_child_registers_nothing_with_the_engine_of_its_parent(
    ns: kvfs.Namespace, sources: list[Engine]
) -> None:
    with Rank(ns) as rank, ns.attach(Engine().kv) as host, ns.match(prompt(CHUNKS)) as match:
        pid = os.fork()
        if not pid:
            refused = 0
            for io in (rank.io, host):
                try:
                    io.warm(match)
                except ConfigError:
                    refused += 1
            os._exit(0 if refused == 2 and not rank.device.maps() else 1)
        assert os.waitpid(pid, 0)[1] == 0


def test_pages_that_the_page_cache_does_not_hold_are_left_out(
    ns: kvfs.Namespace, sources: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Rank(ns) as rank:
        monkeypatch.setattr(Files, "cached_bytes", lambda self, fd, offset, nbytes: nbytes - 1)
        assert rank.io.warm_hottest("1GiB") == 0
        monkeypatch.setattr(Files, "cached_bytes", lambda self, fd, offset, nbytes: None)  # an old kernel
        assert rank.io.warm_hottest("1GiB") > 0


def test_only_own_pages_of_the_namespace_are_registered(store: kvfs.Store, ns: kvfs.Namespace) -> None:
    saved(ns, CHUNKS)
    other = store.namespace("other", LAYOUT, "1")
    half = Engine(seed=2, heads=(0, 1))
    with attach(ns, half.kv) as io, Rank(other) as rank:
        assert io.warm_hottest("1GiB") == 0, "pages of whole parts are not stored as a rank of two wants them"
        assert rank.io.warm_hottest("1GiB") == 0


def test_a_sealed_segment_whose_table_was_never_filled_is_registered_by_a_reader(store_path: Path) -> None:
    with kvfs.open(store_path, capacity="64MiB") as writer:
        saved(writer.namespace("model", LAYOUT, "1"), CHUNKS)
    with kvfs.open(store_path, read_only=True) as reader, Rank(reader.namespace("model", LAYOUT, "1")) as rank:
        rank.maps._region_bytes = 1 << 20
        assert rank.io.warm_hottest("1GiB") >= CHUNKS * PAGE * 256
        assert rank.pinned(0)


def test_a_region_that_exceeds_the_budget_is_tried_once_and_not_for_each_of_its_pages(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that share a budget would each spend their whole deadline on failing attempts."""
    with kvfs.open(store_path, capacity="64MiB") as writer:
        for i in range(6):
            saved(writer.namespace("model", LAYOUT, "1"), 1, seed=i, first=1000 * i)
    tries = list[tuple[bytes, int]]()
    with (
        kvfs.open(store_path, read_only=True) as reader,
        Rank(reader.namespace("model", LAYOUT, "1"), region_bytes=1 << 20, registered_bytes=4096) as rank,
    ):
        make = rank.maps.source.make

        def counted(held: Any, start: int, nbytes: int, *, ahead: bool) -> Any:
            tries.append((held.segment_id, start))
            return make(held, start, nbytes, ahead=ahead)

        monkeypatch.setattr(rank.maps.source, "make", counted)
        assert rank.io.warm_hottest("1GiB") == 0
    assert tries and len(tries) == len(set(tries))


def test_a_store_that_is_switched_off_has_nothing_to_register(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFS_DISABLE", "1")
    with kvfs.open(store_path) as off, attach(off.namespace("model", LAYOUT, "1"), Engine(seed=1).kv) as io:
        assert io.transport == "ring" and io.warm_hottest("1GiB") == 0
        ns = off.namespace("model", LAYOUT, "1")
        result = io.save(ns.plan_save(prompt(2)), range(4), NOW).wait(SECONDS)
        assert result is not None and (result.pages, result.reason) == (0, "disabled"), result
        with ns.match(prompt(2)) as match:
            result = io.load(match, range(4), NOW).wait(SECONDS)
        assert result is not None and result.tokens == 0, result


def test_without_the_index_nothing_is_registered(
    ns: kvfs.Namespace, sources: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise IndexUnavailableError("timeout")

    with Rank(ns) as rank:
        monkeypatch.setattr(ns._c.index, "read", fails)
        assert rank.io.warm_hottest("1GiB") == 0


def test_nothing_is_registered_after_the_deadline(ns: kvfs.Namespace, sources: list[Engine]) -> None:
    with Rank(ns) as rank:
        assert rank.io.warm_hottest("1GiB", deadline=0) == 0
        with ns.match(prompt(CHUNKS)) as match:
            assert rank.io.warm(match, deadline=0) == 0


def test_a_walk_that_would_exceed_the_deadline_leaves_time_to_register(
    ns: kvfs.Namespace, sources: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else large stores, which need it most, would register nothing at all."""
    look = walk._slice

    def slow(*args: Any, **options: Any) -> Any:
        time.sleep(0.2)
        return look(*args, **options)

    monkeypatch.setattr(walk, "ROWS_PER_HOLD", 1)
    monkeypatch.setattr(walk, "_slice", slow)
    with Rank(ns) as rank:
        assert rank.io.warm_hottest("1GiB", deadline=0.8) > 0


def test_an_index_that_is_locked_delays_it_no_longer_than_its_deadline(
    ns: kvfs.Namespace, sources: list[Engine], store_path: Path
) -> None:
    with Rank(ns) as rank:
        fd = os.open(store_path / "main", os.O_RDWR)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            began = time.monotonic()
            assert rank.io.warm_hottest("1GiB", deadline=0.5) == 0
            assert time.monotonic() - began < 2.5
        finally:
            os.close(fd)


def test_a_slow_walk_of_records_delays_it_no_longer_than_its_deadline(
    store_path: Path,
) -> None:
    """In a cold store each record that the walk looks up is a read."""
    files = FaultyFiles()
    with kvfs.open(store_path, capacity="64MiB", files=files) as opened:
        ns = opened.namespace("model", LAYOUT, "1")
        for i in range(20):
            saved(ns, 1, seed=i, first=1000 * i)
        with Rank(ns) as rank:
            files.arm(Fault(kind="preadv", action="delay", seconds=0.2, persistent=True))
            began = time.monotonic()
            rank.io.warm_hottest("1GiB", deadline=0.4)
            assert time.monotonic() - began < 3.0
            files.arm()


@pytest.mark.parametrize("call", ["warm", "warm_hottest"])
def test_a_disk_that_hangs_while_a_region_is_made_does_not_keep_an_engine_from_starting(
    ns: kvfs.Namespace, sources: list[Engine], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The page cache holds the pages, but not all of the rest of their region."""
    go, asked, files = threading.Event(), threading.Event(), ns._c.files
    with Rank(ns, region_bytes=64 << 20) as rank:
        monkeypatch.setattr(
            files, "cached_bytes", lambda fd, at, nbytes: nbytes if at else nbytes - 4096, raising=False
        )
        monkeypatch.setattr(files, "populate_at", lambda *at: asked.set() or go.wait(SECONDS), raising=False)
        began = time.monotonic()
        try:
            with ns.match(prompt(CHUNKS)) as match:
                if call == "warm":
                    assert rank.io.warm(match, deadline=0.1) == 0
                else:
                    rank.io.warm_hottest("1GiB", deadline=0.1)
            assert asked.is_set() and time.monotonic() - began < SECONDS / 10
        finally:
            go.set()


def test_a_process_out_of_descriptors_still_loads_and_starts(store_path: Path) -> None:
    """The pinned bytes of other processes cannot be listed then: nothing is registered, and loads use the ring."""
    files = FaultyFiles()
    with kvfs.open(store_path, capacity="64MiB", files=files) as opened:
        ns = opened.namespace("model", LAYOUT, "1")
        source = saved(ns, CHUNKS)
        with Rank(ns) as rank:
            files.arm(Fault(kind="listdir", error=errno.EMFILE, persistent=True))
            assert rank.io.warm_hottest("1GiB") == 0
            assert rank.load(0) == source.tokens(range(2 * CHUNKS)) and rank.maps.nbytes == 0
            files.arm()
            assert rank.io.warm_hottest("1GiB") > 0


def test_the_ring_and_host_memory_have_nothing_to_register(ns: kvfs.Namespace, sources: list[Engine]) -> None:
    with attach(ns, Engine().kv, registered_bytes=0) as io, ns.match(prompt(CHUNKS)) as match:
        assert (io.warm_hottest("1GiB"), io.warm(match)) == (0, 0)
    with ns.attach(Engine().kv) as host, ns.match(prompt(CHUNKS)) as match:
        assert (host.warm_hottest("1GiB"), host.warm(match)) == (0, 0)


def test_bad_arguments_are_named(ns: kvfs.Namespace) -> None:
    with ns.attach(Engine().kv) as host, Rank(ns) as rank:
        for io in (host, rank.io):
            with pytest.raises(ConfigError, match="nbytes is 'much'"):
                io.warm_hottest("much")
            with pytest.raises(ConfigError, match="deadline is -1"):
                io.warm_hottest(1, deadline=-1)
            with ns.match(prompt(CHUNKS)) as match, pytest.raises(ConfigError, match="deadline is 'soon'"):
                io.warm(match, deadline="soon")  # type: ignore[arg-type]
    for io in (host, rank.io):
        with pytest.raises(ConfigError, match="closed"):
            io.warm_hottest("1GiB")


def test_a_region_needs_no_descriptor_other_than_its_segments(ns: kvfs.Namespace, sources: list[Engine]) -> None:
    def descriptors() -> int:
        links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        return sum(os.readlink(link).endswith(".kvs") for link in links)

    with Rank(ns) as rank:
        before = descriptors()  # of segments that are appended to
        assert rank.io.warm_hottest("1GiB") == rank.maps.nbytes
        segments = {key[0] for key in rank.maps._regions}
        assert descriptors() - before == len(segments) < len(rank.maps._regions) - 10


def test_regions_keep_a_bounded_number_of_segments_open(store_path: Path) -> None:
    """A process that is out of descriptors serves nothing at all."""
    with kvfs.open(store_path, capacity="64MiB", segment_bytes="256KiB") as store:
        ns = store.namespace("model", LAYOUT, "1")
        firsts = [1000 * i for i in range(12)]
        written = [saved(ns, CHUNKS, seed=i, first=first) for i, first in enumerate(firsts)]
        assert len(segment_files(Path(store.path))) > 3
        with Rank(ns) as rank:
            rank.maps._segments_max = 2
            for _ in range(2):
                for first, engine in zip(firsts, written, strict=True):
                    with ns.match(prompt(CHUNKS, first)) as match:
                        rank.io.warm(match)
                        assert len({key[0] for key in rank.maps._regions}) <= 2
                    assert rank.load(first) == engine.tokens(range(2 * CHUNKS))
            there = rank.maps.nbytes
            assert rank.io.warm_hottest("1GiB") == there, (
                "regions were dropped for pages that are only likely to be used"
            )


def test_an_idle_sweep_makes_no_call_of_the_driver(
    ns: kvfs.Namespace, sources: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines capture graphs for many seconds when they start; a call of any other thread may end a capture."""
    with Rank(ns) as rank:
        assert rank.io.warm_hottest("1GiB") > 0
        calls, current = list[int](), rank.device.current

        def counted() -> Any:
            calls.append(1)
            return current()

        monkeypatch.setattr(rank.device, "current", counted)
        rank.io.sweep()
        assert not calls
        pinned = rank.device.maps()
        monkeypatch.setattr(rank.io, "_is_dropped", lambda _: True)
        rank.io.sweep()
        assert calls and rank.device.maps() < pinned


class HungRun(Files):
    """Writes into ``run/`` hang."""

    def __init__(self) -> None:
        self.hangs, self.go = False, threading.Event()

    def write_all(self, fd: int, buffers: Sequence[Any], offset: int, block: int = 1) -> int:
        if self.hangs and os.readlink(f"/proc/self/fd/{fd}").endswith(".live"):
            assert self.go.wait(SECONDS)
        return super().write_all(fd, buffers, offset, block)


def test_regions_are_freed_and_read_though_the_disk_hangs(store_path: Path) -> None:
    files = HungRun()
    with kvfs.open(store_path, capacity="64MiB", files=files) as store:
        ns = store.namespace("model", LAYOUT, "1")
        source = saved(ns, CHUNKS)
        with Rank(ns) as rank:
            assert rank.io.warm_hottest("1GiB") > 0
            files.hangs = True
            try:
                key = next(reversed(rank.maps._regions))
                with rank.maps._lock:
                    assert rank.maps._drop_unused(key)
                assert ns._c.pinned.mine == rank.maps.nbytes
                with ns.match(prompt(1)) as match:
                    transfer = rank.io.load(match, range(2), NOW)
                    assert transfer.done.wait(SECONDS / 4), "a load of what is pinned waits for the disk"
                    result = transfer.result
                    assert result is not None and result.tokens == PAGE
                assert rank.engine.tokens(range(2)) == source.tokens(range(2))
            finally:
                files.go.set()
            ns._c.pinned.say()
            other = Liveness(ns._c.directory)
            assert other.pinned_by_others() == ns._c.pinned.mine
            other.close()
