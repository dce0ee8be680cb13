"""What the modes of a store promise: staging does not fill the page cache, memory is on tmpfs."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import subprocess
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvfs
from kvfs.directory import io_mode
from kvfs.directory.config import make_settings
from kvfs.errors import ConfigError
from kvfs.format import segment as fmt
from kvfs.pages.layout import Part
from kvfs.system import direct_io
from kvfs.system.files import Files
from kvfs.types import Tier
from tests.stores import cached_of, counted, load, restored, scanned, seeded, segment_files, tiny, tokens_of

#: Pages of whole blocks, of less than a block, of one and a half.
LAYOUTS = {
    "blocks": tiny(head_dim=64, page_tokens=32),
    "less": tiny(),
    "odd": tiny(layers=3, head_dim=8, page_tokens=32),
}
ODD = LAYOUTS["odd"]
CHUNKS = 9


@pytest.fixture
def path(disk_path: Path) -> Path:
    """Where a test may create a store of mode staging."""
    return disk_path / "store"


def opened(path: Path, mode: str = "staging", files: Files | None = None, **settings: Any) -> kvfs.Store:
    if (path / "kvfs.toml").exists():
        set_mode(path, mode)
    return kvfs.open(path, mode=mode, files=files, **{"capacity": "32MiB", "segment_bytes": "256KiB", **settings})


def set_mode(path: Path, mode: str) -> None:
    from kvfs.directory import config_file

    config_file.change(str(path), "mode", mode, Files())


def bytes_of(layout: kvfs.PageLayout, seed: int, chunks: int = CHUNKS) -> bytes:
    return seeded(seed, chunks * layout.page_bytes)


def put(store: kvfs.Store, layout: kvfs.PageLayout = ODD, seeds: Sequence[int] = (1,)) -> kvfs.Namespace:
    ns = store.namespace("model", layout, "1")
    for seed in seeds:
        assert ns.put(tokens_of(seed, CHUNKS, layout.page_tokens), bytes_of(layout, seed)).stored == CHUNKS
    return ns


def found(ns: kvfs.Namespace, seed: int = 1) -> bool:
    """Whether all pages of a prompt are loaded, each with its bytes."""
    data = restored(ns, tokens_of(seed, CHUNKS, ns.layout.page_tokens))
    assert data == bytes_of(ns.layout, seed)[: len(data)]
    return len(data) == CHUNKS * ns.layout.page_bytes


def was_spared(path: Path) -> bool:
    """Whether the page cache holds less than half of all payload.

    The kernel may read some of it ahead in spite of its advice: a table that was being written when memory was short
    has the flag "read ahead from here" (PG_reclaim and PG_readahead are the same bit).
    """
    cached, stored = map(sum, zip(*map(cached_of, segment_files(path)), strict=True))
    return cached < stored / 2


def flags_of(path: Path) -> list[int]:
    return [scanned(file).header.flags for file in segment_files(path)]


# ---------------------------------------------------------------- bytes that bypass the page cache


class Halting(Files):
    """Reads and writes end early, anywhere."""

    def __init__(self) -> None:
        self.draw = random.Random(3)

    def _some(self, buffers: Sequence[Any]) -> list[Any]:
        first = memoryview(buffers[0])
        return [first[: self.draw.randrange(1, len(first) // 4096 + 1) * 4096]]

    def pwritev(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        done = super().pwritev(fd, self._some(buffers), offset)
        return done - self.draw.choice([0, 512]) if done > 4096 else done

    def preadv(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        done = super().preadv(fd, self._some(buffers), offset)
        return done - self.draw.choice([0, 512]) if done > 4096 else done


@pytest.mark.parametrize("files", [Files(), Halting()], ids=["whole", "short"])
def test_any_memory_and_any_size_bypasses_the_page_cache(
    path: Path, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_io, "BOUNCE_BYTES", 16384)
    monkeypatch.setattr(direct_io, "_kept", [])
    draw = random.Random(1)
    memory = direct_io.aligned(1 << 17)
    memory[:] = draw.randbytes(len(memory))
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_DIRECT)
    for _ in range(40):
        cuts = sorted(draw.choice([1, 16, 4096]) * draw.randrange(17) for _ in range(6))
        parts = [memory[a:b] for a, b in pairwise(cuts)]
        padded = b"".join(bytes(p) + bytes(-len(p) % 4096) for p in parts)
        direct_io.write(files, fd, parts, 8192)
        assert os.pread(fd, 0, 0) == b"" and path.read_bytes()[8192:][: len(padded)] == padded
        if padded:
            at, start = draw.randrange(len(padded)), draw.choice([0, 1, 4096])
            target = direct_io.aligned(len(padded) + 4096 + 8)[start:][: len(padded) - at + 1]
            target[-1] = 0xA5
            direct_io.read(files, fd, target[:-1], 8192 + at)
            assert target[:-1] == padded[at:] and target[-1] == 0xA5
    with pytest.raises(OSError, match="short"):
        direct_io.read(files, fd, memory[:8192], 1 << 30)
    os.close(fd)
    assert len(direct_io._kept) == 1


# ---------------------------------------------------------------- staging


@pytest.mark.parametrize("name", LAYOUTS)
def test_staging_stores_and_loads_and_leaves_the_page_cache_alone(path: Path, name: str) -> None:
    layout = LAYOUTS[name]
    with opened(path) as store:
        ns = put(store, layout, range(12))
        assert was_spared(path)
        assert all(found(ns, seed) for seed in range(12))
        tokens, size = tokens_of(3, CHUNKS, layout.page_tokens), CHUNKS * layout.page_bytes
        with counted(store) as moved, ns.match(tokens) as match:
            assert {ref.tier for ref in match.pages} == {Tier.DISK}
            for shift in (0, 1, 512):  # memory that O_DIRECT accepts, and memory that it refuses
                out = direct_io.aligned(size + 4096)[shift:][:size]
                assert ns.get(match, out) == CHUNKS and out == bytes_of(layout, 3)
            assert moved("direct_reads") > 0
        assert store.verify().ok
        assert was_spared(path)
        assert set(flags_of(path)) == {fmt.FLAG_DIRECT}
        store._shared.services().active.finish_all()
        assert all(found(ns, seed) for seed in range(12)) and was_spared(path)
        assert store.stats()["mode"] == "staging"


def test_what_was_read_once_is_read_from_the_disk_again(path: Path) -> None:
    with opened(path) as store:
        ns = put(store)
        with counted(store) as moved:
            for times in range(1, 4):
                assert found(ns) and moved("direct_reads") == times * CHUNKS


def test_pages_outlive_a_reader_that_is_short_of_descriptors(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment that one reader cannot open again does not leave the index that all share."""

    def short(*_: Any) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    with opened(path) as store:
        put(store)
    files = Files()
    with opened(path, files=files) as store:
        ns = store.namespace("model", ODD, "1")
        with monkeypatch.context() as patch:
            patch.setattr(files, "reopen", short)
            assert not found(ns)
        assert found(ns)


def test_transfers_of_host_memory(path: Path) -> None:
    layout = LAYOUTS["blocks"]
    source = np.random.default_rng(1).integers(0, 65536, (2, 32, 16, 2, 128), dtype="uint16")
    target = np.zeros_like(source)
    order, tokens = "layer,block,token,head,2*dim", list(range(CHUNKS * 32))
    with opened(path) as store:
        ns = store.namespace("model", layout, "1")
        with ns.attach(kvfs.describe(layout.groups[0], source, order)) as io:
            result = io.save(ns.plan_save(tokens), range(2 * CHUNKS)).wait(60)
            assert result is not None and result.pages == CHUNKS
        assert was_spared(path)
        with ns.attach(kvfs.describe(layout.groups[0], target, order)) as io, ns.match(tokens) as match:
            result = io.load(match, range(2 * CHUNKS)).wait(60)
            assert result is not None and result.tiers == {Tier.DISK: len(tokens)}
        assert was_spared(path)
    assert (source[:, : 2 * CHUNKS] == target[:, : 2 * CHUNKS]).all()


def test_pages_of_other_parts_and_in_codecs(path: Path) -> None:
    with opened(path) as store:
        ns = store.namespace("model", ODD, "1")
        tokens, size = tokens_of(1, CHUNKS, 32), ODD.page_bytes
        heads = [Part(head, 1, 0, 3) for head in (0, 1)]
        for seed, part in enumerate(heads):
            ns.put(tokens, seeded(seed, CHUNKS * size // 2), part=part)
        with ns.match(tokens) as match:
            assert len(load(ns, match)["full"]) == CHUNKS * size
        for seed, part in enumerate(heads):
            assert restored(ns, tokens, part=part) == seeded(seed, CHUNKS * size // 2)
        zeros = bytes(CHUNKS * LAYOUTS["blocks"].page_bytes)
        for codec in ("zstd", "planes"):
            encoded = store.namespace("model", LAYOUTS["blocks"], "1", codec, codec=codec)
            encoded.put(tokens, zeros)
            assert restored(encoded, tokens) == zeros
        assert store.stats()["counters"]["pages_decoded"] == 2 * CHUNKS
        assert was_spared(path)


def test_eviction_recompression_bundles_and_rebuilds(path: Path, tmp_path: Path) -> None:
    with opened(path, capacity="16MiB", sync="batch") as store:
        ns = put(store, ODD, (1, 2))
        other = store.namespace("other", ODD, "1")
        with counted(store) as moved:
            for seed in range(10, 260):
                other.put(tokens_of(seed, CHUNKS, 32), bytes(CHUNKS * ODD.page_bytes))
                assert seed % 8 or (found(ns) and found(ns, 2))
            assert moved("segments_evicted") and moved("pages_carried")
        store._shared.services().active.finish_all()
        assert store.recompress("zstd", idle=0).pages > 0
        assert found(ns) and found(ns, 2)
        store.export(str(tmp_path / "bundle"), ["model"])
        store.purge("other")
        assert was_spared(path) and all(flags & fmt.FLAG_DIRECT for flags in flags_of(path))
    (path / "state").unlink()
    with opened(path, sync="batch") as store:  # the rebuild reads the payloads of segments without a seal
        assert store.wait_ready() and store.stats()["counters"]["rebuilds"] == 1
        assert found(store.namespace("model", ODD, "1"))
        assert was_spared(path)
    with opened(tmp_path / "second") as store:
        assert store.import_bundle(str(tmp_path / "bundle")).pages == 2 * CHUNKS
        ns = store.namespace("model", ODD, "1")
        assert found(ns) and found(ns, 2) and was_spared(tmp_path / "second")


def test_a_match_outlives_its_segments(path: Path) -> None:
    """A dropped segment has no name any more, and is still read with O_DIRECT."""
    with opened(path) as store:
        ns = put(store)
        store._shared.services().active.finish_all()
        with ns.match(tokens_of(1, CHUNKS, 32)) as match:
            store.gc(target_bytes=0)
            assert segment_files(path) == []
            assert load(ns, match)["full"] == bytes_of(ODD, 1)


def test_what_needs_the_page_cache_says_so(path: Path) -> None:
    with opened(path) as store:
        ns = put(store)
        with ns.match(tokens_of(1, CHUNKS, 32)) as match:
            with pytest.raises(ConfigError, match=r'view .*"staging".*use get.*config set mode'):
                ns.view(match)
            with pytest.raises(ConfigError, match=r'warm .*"staging".*config set mode'):
                store.warm(match=match)


# ---------------------------------------------------------------- one store, one mode after the other


def test_segments_of_both_modes_are_read_side_by_side(path: Path) -> None:
    ways = ["cache", "staging", "cache", "staging"]
    for step, mode in enumerate(ways):
        with opened(path, mode) as store:
            ns = put(store, seeds=[step])
            assert all(found(ns, seed) for seed in range(step + 1))
            assert store.stats()["mode"] == mode and store.verify().ok
    # each mode goes on with its own segment
    assert sorted(flags_of(path)) == [0, fmt.FLAG_DIRECT]
    assert {scanned(f).entries[-1].epoch for f in segment_files(path)} == {2}


@pytest.mark.parametrize("mode", ["cache", "staging"])
def test_a_segment_that_another_process_began_is_written_past_the_page_cache_only_in_mode_staging(
    path: Path, mode: str
) -> None:
    with opened(path, mode) as store:
        put(store)
    with opened(path, mode) as store:
        put(store, seeds=[2])
        ((writer, _),) = store._shared.services().active._writers.values()
        assert writer.epoch == 2 and (writer._direct is not None) == (mode == "staging")


def test_the_mode_is_that_of_the_open(path: Path) -> None:
    with opened(path, "cache") as store:
        set_mode(path, "staging")
        store._shared._follow_settings()
        assert store.settings.mode == "cache" and store.stats()["mode"] == "cache"
        put(store)
        assert flags_of(path) == [0]
    with kvfs.open(path) as store:
        assert store.settings.mode == "staging"
        put(store, seeds=[2])
        assert sorted(flags_of(path)) == [0, fmt.FLAG_DIRECT]


def test_a_segment_written_with_o_direct_is_mapped_when_sealed(path: Path) -> None:
    class Mapped(Files):
        maps = 0

        def map(self, fd: int, length: int, offset: int) -> Any:
            self.maps += 1
            return super().map(fd, length, offset)

    with opened(path) as store:
        put(store)
    files = Mapped()
    with opened(path, "cache", files) as store:
        ns = store.namespace("model", ODD, "1")
        tokens = tokens_of(1, CHUNKS, 32)
        with ns.match(tokens) as match:
            assert b"".join(ns.view(match)) == bytes_of(ODD, 1) and files.maps == 0
    with opened(path) as store:
        put(store, seeds=[2])
        store._shared.services().active.finish_all()
    with opened(path, "cache", files) as store:
        ns = store.namespace("model", ODD, "1")
        with ns.match(tokens) as match:
            assert b"".join(ns.view(match)) == bytes_of(ODD, 1) and files.maps > 0


# ---------------------------------------------------------------- what a file system must support


class NoDirect(Files):
    """A file system that refuses O_DIRECT."""

    def open(self, name: str, flags: int, *args: Any, **more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), name)
        return super().open(name, flags, *args, **more)


class LateRefusal(Files):
    """One that opens with O_DIRECT, and then refuses blocks."""

    def pwritev(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().pwritev(fd, buffers, offset)


class Pretending(Files):
    """One that accepts the flag and uses the page cache."""

    def cached_bytes(self, fd: int, offset: int, nbytes: int) -> int | None:
        return nbytes


class NoTemporary(Files):
    """One without O_TMPFILE."""

    def open(self, name: str, flags: int, *args: Any, **more: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), name)
        return super().open(name, flags, *args, **more)


@pytest.mark.parametrize("part", [None, Part(0, 1, 0, 3)], ids=["as stored", "another part"])
def test_pages_outlive_a_reader_without_memory_for_a_bounce_buffer(
    path: Path, monkeypatch: pytest.MonkeyPatch, part: Part | None
) -> None:
    """Its lack of memory was taken for a fault of the disk: intact pages left the index that all share."""

    def short(nbytes: int) -> memoryview:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with opened(path) as store:
        ns = put(store)
        with ns.match(tokens_of(1, CHUNKS, ODD.page_tokens), part=part) as match, monkeypatch.context() as patch:
            patch.setattr(direct_io, "_kept", [])
            patch.setattr(direct_io, "aligned", short)
            assert ns.get(match, bytearray(match.nbytes)) == 0
            with pytest.raises(kvfs.KvfsError, match="too little memory"):
                store.verify(repair=True)
        assert found(ns) and store.verify().ok


@pytest.mark.parametrize("files", [NoDirect(), LateRefusal(), Pretending()], ids=["open", "write", "page cache"])
def test_staging_without_o_direct_is_refused_before_anything_is_written(path: Path, files: Files) -> None:
    with pytest.raises(ConfigError, match=r'mode is "staging".*refuses O_DIRECT.*local disk.*mode "cache"'):
        opened(path, files=files)
    assert not path.exists()
    with opened(path, "cache") as store:
        put(store)
    set_mode(path, "staging")
    before = sorted((p.relative_to(path), p.stat().st_mtime_ns) for p in path.rglob("*"))
    with pytest.raises(ConfigError, match="refuses O_DIRECT"):
        kvfs.open(path, files=files)
    assert sorted((p.relative_to(path), p.stat().st_mtime_ns) for p in path.rglob("*")) == before
    if isinstance(files, NoDirect):
        with pytest.raises(ConfigError, match="refuses O_DIRECT"):
            kvfs.open(path, files=files, read_only=True)


def test_staging_needs_no_temporary_files_and_a_reader_writes_nothing(path: Path) -> None:
    layout = LAYOUTS["blocks"]
    with opened(path, files=NoTemporary()) as store:
        assert found(put(store, layout))
    assert not list(path.glob(".*"))
    with kvfs.open(path, read_only=True) as store:
        assert found(store.namespace("model", layout, "1"))
    assert was_spared(path)


def test_a_full_disk_is_no_refusal(path: Path) -> None:
    class Full(Files):
        def pwritev(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    io_mode.check(str(path.parent), make_settings("16MiB", mode="staging"), Full())


def test_staging_on_tmpfs_and_memory_elsewhere_are_refused(path: Path, memory_path: Path) -> None:
    if memory_path.parent == path.parent:
        pytest.skip("no tmpfs")
    with pytest.raises(ConfigError, match=r'mode is "staging".*tmpfs.*mode "cache"'):
        opened(memory_path / "store")
    with pytest.raises(ConfigError, match=rf'mode is "memory".*{path} is on \w+: .*tmpfs.*mode "cache"'):
        opened(path, "memory")
    assert not path.exists() and not (memory_path / "store").exists()
    with opened(path, "cache") as store:
        put(store)
    with pytest.raises(ConfigError, match='mode is "memory"'):
        set_mode(path, "memory")  # by kvfs config set: a mode that could not be opened is not written
    with opened(path, "cache") as store:
        assert found(store.namespace("model", ODD, "1"))


# ---------------------------------------------------------------- memory


class Direct(Files):
    """Counts calls that mode memory does not need."""

    count = 0

    def reopen(self, fd: int, flags: int, keep: list[int | None]) -> int:
        self.count += not flags & os.O_DIRECTORY
        return super().reopen(fd, flags, keep)

    def fdatasync(self, fd: int) -> None:
        self.count += 1
        super().fdatasync(fd)


@pytest.fixture
def tmpfs(memory_path: Path, tmp_path: Path) -> Path:
    if memory_path == tmp_path:
        pytest.skip("no tmpfs")
    return memory_path / "store"


@pytest.mark.parametrize("mode", ["memory", "cache"])
def test_a_store_on_tmpfs(tmpfs: Path, mode: str) -> None:
    files = Direct()
    with opened(tmpfs, mode, files) as store:
        ns = put(store, seeds=range(12))
        store._shared.services().active.finish_all()
        with ns.match(tokens_of(1, CHUNKS, 32)) as match:
            assert {ref.tier for ref in match.pages} == {Tier.HOST}
            assert b"".join(ns.view(match)) == bytes_of(ODD, 1)
        assert all(found(ns, seed) for seed in range(12)) and store.verify().ok
        assert store.stats()["mode"] == mode and set(flags_of(tmpfs)) == {0}
    assert files.count == 0


@pytest.mark.parametrize("sync", ["batch", "sync"])
def test_mode_memory_refuses_a_sync_level(tmpfs: Path, sync: str) -> None:
    with pytest.raises(ConfigError, match=rf'sync is "{sync}".*mode "memory".*power.*sync = "cache"'):
        opened(tmpfs, "memory", sync=sync)
    assert not tmpfs.exists()
    with opened(tmpfs, "cache", sync=sync):
        pass
    with pytest.raises(ConfigError, match="memory"):
        set_mode(tmpfs, "memory")


def test_levels_belong_to_modes_while_a_store_is_open(tmpfs: Path) -> None:
    from kvfs.directory import config_file

    with opened(tmpfs, "memory") as store:
        set_mode(tmpfs, "cache")
        config_file.change(str(tmpfs), "sync", "sync", Files())
        config_file.change(str(tmpfs), "capacity", "48MiB", Files())
        store._shared._follow_settings()
        now = store.settings
        assert (now.mode, now.sync, now.capacity_bytes) == ("memory", "cache", 48 << 20)


@pytest.mark.needs_root("a ramfs is mounted")
def test_memory_on_ramfs(tmp_path: Path) -> None:
    folder = tmp_path / "ram"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "ramfs", "ramfs", folder], check=False, capture_output=True).returncode:
        pytest.skip("this process may not mount")
    try:
        with opened(folder / "store", "memory") as store:
            assert found(put(store))
        with pytest.raises(ConfigError, match="ramfs"):
            set_mode(folder / "store", "staging")
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


DISK, MEMORY = "ext4", "tmpfs"


@pytest.mark.parametrize(
    ("mode", "kind", "takes_direct", "page", "message"),
    [
        ("cache", DISK, False, 4096, None), ("cache", MEMORY, False, 4096, None), ("cache", None, False, 4096, None),
        ("memory", MEMORY, False, 4096, None), ("memory", "ramfs", False, 4096, None),
        ("memory", DISK, True, 4096, "is on ext4: put the store on tmpfs"),
        ("memory", None, True, 4096, "is on an unknown file system: put"),
        ("staging", DISK, True, 4096, None), ("staging", None, True, 4096, None),
        ("staging", MEMORY, True, 4096, "is on tmpfs, which is memory itself"),
        ("staging", DISK, False, 4096, "is on ext4 that refuses O_DIRECT or ignores it"),
        ("staging", None, False, 4096, "is on a file system that refuses O_DIRECT"),
        ("staging", DISK, True, 16384, "is on a host with memory pages of 16384 bytes, not 4096"),
    ],
)  # fmt: skip
def test_where_each_mode_is_supported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, kind: str | None, takes_direct: bool, page: int,
    message: str | None,
) -> None:  # fmt: skip
    asked: list[str] = []

    def filesystem_of(path: str) -> str | None:
        asked.append(path)
        return kind

    monkeypatch.setattr(io_mode, "filesystem_of", filesystem_of)
    monkeypatch.setattr(io_mode, "_takes_direct", lambda *_: takes_direct)
    monkeypatch.setattr(io_mode.mmap, "PAGESIZE", page)
    settings = make_settings("16MiB", mode=mode)
    for path in (tmp_path, tmp_path / "store"):
        if message is None:
            io_mode.check(str(path), settings, Files())
        else:
            with pytest.raises(ConfigError, match=message):
                io_mode.check(str(path), settings, Files())
    assert set(asked) == (set() if mode == "cache" else {str(tmp_path)}), "the parent of one that is to be made"
    io_mode.check(str(tmp_path / "a" / "b"), settings, Files())  # there is nothing to ask about


@pytest.mark.parametrize("error", [errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT, errno.EACCES])
def test_a_file_without_a_name_is_not_needed_to_try_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    opens = list[tuple[str, int]]()

    class Refusing(Files):
        def open(
            self, name: str, flags: int, mode: int = 0o600, *, dir_fd: int, keep: list[int | None] | None = None
        ) -> int:
            opens.append((name, flags))
            if name == ".":
                raise OSError(error, os.strerror(error))
            return super().open(name, flags & ~os.O_DIRECT, mode, dir_fd=dir_fd, keep=keep)

    files = Refusing()
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        if error not in io_mode._NO_TMPFILE:
            with pytest.raises(OSError, match=os.strerror(error)):
                io_mode._unnamed(files, fd)
            return
        file = io_mode._unnamed(files, fd)
        assert opens[1][1] == os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_DIRECT
        assert opens[1][0].startswith(".super.") and os.listdir(tmp_path) == []
        os.write(file.fd, b"x")
        file.close()
    finally:
        os.close(fd)


def test_what_the_modes_mean() -> None:
    assert io_mode.CACHE == ("cache", False, True, True) and io_mode.MEMORY == ("memory", False, False, True)
    assert io_mode.STAGING == ("staging", True, False, False)
    assert [mode.segment_flags for mode in (io_mode.CACHE, io_mode.STAGING)] == [0, fmt.FLAG_DIRECT]
    for name in ("cache", "staging", "memory"):
        assert io_mode.of(make_settings("16MiB", mode=name)).name == name
