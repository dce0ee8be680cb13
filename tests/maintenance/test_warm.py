"""Warming: the pages are in the page cache afterwards, and loading them reads nothing from the disk."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

import kvfs
from kvfs.maintenance import warm
from kvfs.system.files import Files
from kvfs.testing import Fault, FaultyFiles
from tests.stores import TINY_BYTES, run_child, seeded, segment_files, tiny, tokens_of


@pytest.fixture
def path(store_path: Path) -> Path:
    with kvfs.open(store_path, capacity="64MiB") as store:
        for name in ("alpha", "beta"):
            ns = store.namespace(name, tiny(), "1a")
            for seed in range(4):
                ns.put(tokens_of(seed, 60), seeded(seed, 60 * TINY_BYTES))
    return store_path


def forget(path: Path) -> None:
    """Drop the segments from the page cache; skip the test where that is impossible."""
    for file in segment_files(path):
        fd = os.open(file, os.O_RDONLY)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        cached = Files().cached_bytes(fd, 0, os.fstat(fd).st_size)
        os.close(fd)
        if cached is None:
            pytest.skip("this kernel does not tell what is in the page cache")
        if cached:
            pytest.skip("this file system keeps everything in memory")


def disk_reads() -> int:
    with open("/proc/self/io", encoding="ascii") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def test_after_warming_a_prompt_its_load_reads_nothing_from_the_disk(path: Path) -> None:
    forget(path)
    with kvfs.open(path) as store:
        ns = store.namespace("alpha", tiny(), "1a")
        with ns.match(tokens_of(2, 60)) as match:
            assert store.warm(match=match, check=True).resident_bytes == 0
            before = disk_reads()
            done = store.warm(match=match)
            assert done.read_bytes == done.nbytes > 0 == done.failed_bytes and disk_reads() > before
            assert store.warm(match=match, check=True).resident_bytes == done.nbytes
            out, before = bytearray(match.nbytes), disk_reads()
            assert ns.get(match, out) == 60 and out == seeded(2, 60 * TINY_BYTES)
            assert disk_reads() == before
            assert all(page.tier is kvfs.Tier.HOST for page in match.pages)


def test_namespaces_prefixes_pins_and_the_hottest(path: Path) -> None:
    with kvfs.open(path) as store:
        ns = store.namespace("alpha", tiny(), "1a")
        tokens = tokens_of(1, 60)
        store.pin("keep", ns, tokens)
        forget(path)
        assert store.warm(pinned=True).read_bytes >= 60 * 4096
        with ns.match(tokens) as match:
            done = store.warm(match=match, check=True)
            assert done.resident_bytes == done.nbytes
        forget(path)
        assert store.warm(["beta"]).nbytes >= 4 * 60 * TINY_BYTES
        with store.namespace("beta", tiny(), "1a").match(tokens) as match:
            done = store.warm(match=match, check=True)
            assert done.resident_bytes == done.nbytes
        hashes = ns.plan_save(tokens_of(3, 60)).hashes
        forget(path)
        done = store.warm(prefixes=[hashes[-1].hex()[:12]])
        assert done.read_bytes > 0
        with ns.match(tokens_of(3, 60)) as match:
            done = store.warm(match=match, check=True)
            assert done.resident_bytes == done.nbytes
        forget(path)
        done = store.warm(hottest="64KiB")
        assert 0 < done.nbytes <= 64 << 10
        seen: list[tuple[int, int]] = []
        done = store.warm(["alpha", "beta"], progress=lambda *at: seen.append(at))
        assert seen[-1] == (done.nbytes, done.nbytes) and sorted(seen) == seen


def test_a_sample_is_of_what_the_page_cache_lacks(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "BLOCK_BYTES", 64 << 10)
    with kvfs.open(path) as store:
        store._shared.services().active.finish_all()
        assert store.warm(sample="1MiB").nbytes == 0, "all was just written"
    forget(path)
    with kvfs.open(path) as store:
        done = store.warm(sample="128KiB")
        assert done.nbytes == 128 << 10 and done.read_bytes >= 64 << 10 and done.seconds > 0, "but for readahead"
        store.warm(sample="64MiB")
        assert store.warm(sample="64MiB").nbytes == 0, "all is there"


def test_what_was_evicted_meanwhile_is_counted_and_raises_nothing(path: Path) -> None:
    def evict() -> int:
        with kvfs.open(path) as store:
            return store.gc(0)["segments_dropped"]

    with kvfs.open(path) as store:
        ns = store.namespace("alpha", tiny(), "1a")
        match = ns.match(tokens_of(2, 60))
        match.close()
        assert run_child(evict) > 0
        done = store.warm(match=match)
        assert done.failed_bytes == done.nbytes > 0


@pytest.mark.parametrize("kind", ["map", "populate_at"])
def test_what_cannot_be_mapped_is_read(path: Path, kind: str) -> None:
    files = FaultyFiles(Fault(kind=kind, persistent=True))
    forget(path)
    with kvfs.open(path, files=files) as store:
        done = store.warm(["alpha"])
        assert done.read_bytes + done.resident_bytes == done.nbytes > 0 == done.failed_bytes
        assert done.read_bytes > 0 and files.calls[kind]
        assert store.warm(["alpha"], check=True).resident_bytes == done.nbytes


@pytest.mark.parametrize(("release", "maps"), [("6.8.0-45-generic", 0), ("6.16.1", 1), ("7.0", 1), ("odd", 0)])
def test_kernels_without_large_folios_read_ahead(
    path: Path, release: str, maps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = FaultyFiles()
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release=release))
    forget(path)
    with kvfs.open(path, files=files) as store:
        done = store.warm(["alpha"])
        assert done.read_bytes + done.resident_bytes == done.nbytes and done.read_bytes > 0
    assert min(files.calls["populate_at"], 1) == maps


def test_a_map_whose_bytes_cannot_be_read_is_an_error_and_no_signal(tmp_path: Path) -> None:
    files = Files()
    (tmp_path / "file").write_bytes(bytes(8 << 20))
    fd = os.open(tmp_path / "file", os.O_RDWR)
    try:
        with files.map(fd, 8 << 20, 0) as mapping:
            files.populate(mapping)
            os.ftruncate(fd, 4096)
            with pytest.raises(OSError):
                files.populate(mapping)
    finally:
        os.close(fd)


def test_other_threads_run_while_a_map_is_filled(tmp_path: Path) -> None:
    """``mmap.madvise`` would hold the GIL until the disk has answered."""

    class Watched(mmap.mmap):
        def madvise(self, *_: object) -> None:
            raise AssertionError("the interpreter is kept")

    (tmp_path / "file").write_bytes(bytes(8192))
    with open(tmp_path / "file", "rb") as file, Watched(file.fileno(), 8192, prot=mmap.PROT_READ) as mapping:
        Files().populate(mapping)
