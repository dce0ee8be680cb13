"""Reads, leaf tables and appends of the native library against their Python counterparts."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.format.checksums import leaf_table, root_of
from kvfs.native import library, payloads
from kvfs.read.fetch import Fetcher
from kvfs.segments.writer import NATIVE_BYTES, SegmentWriter
from kvfs.system.memory_views import address_of_readonly
from tests.stores import counted, seeded, segment_files, tokens_of

LEAF, STEP = 4096, 16384


def read(native: library.Library, stretches: list[payloads.Stretch], nbytes: int) -> tuple[payloads.CachedRead, bytes]:
    memory = ctypes.create_string_buffer(nbytes)
    call = payloads.CachedRead(native, stretches, STEP, ctypes.addressof(memory), 2)
    call.work(call.share)
    return call, memory.raw


def test_stretches_are_read_and_summed(native: library.Library, tmp_path: Path) -> None:
    data = seeded(1, 300_000)
    file = tmp_path / "file"
    file.write_bytes(data)
    fd, draw = os.open(file, os.O_RDONLY), random.Random(4)
    for _ in range(30):
        stretches, expected, at = list[payloads.Stretch](), list[bytes](), 0
        for _ in range(draw.randrange(1, 9)):
            nbytes = draw.randrange(1, 20) * LEAF
            offset = draw.randrange(len(data) - nbytes)
            stretches.append(payloads.Stretch(fd, offset, at, nbytes, draw.choice([0, LEAF])))
            expected.append(data[offset : offset + nbytes])
            at += nbytes
        call, memory = read(native, stretches, at)
        if not call.supported:
            pytest.skip("the file system does not say what is in the page cache")
        assert memory == b"".join(expected) and call.left() == []
        for number, (s, bytes_read) in enumerate(zip(stretches, expected, strict=True)):
            assert call.table(number) == (leaf_table(bytes_read, LEAF) if s.leaf_bytes else b"")
        summed = [one for s, one in zip(stretches, expected, strict=True) if s.leaf_bytes]
        assert call.tables() == b"".join(leaf_table(one, LEAF) for one in summed)
    behind = payloads.Stretch(fd, len(data) - LEAF, 0, 2 * LEAF, LEAF)
    closed = payloads.Stretch(-1, 0, 2 * LEAF, LEAF, LEAF)
    fine = payloads.Stretch(fd, 0, 3 * LEAF, LEAF, LEAF)
    call, memory = read(native, [behind, closed, fine], 4 * LEAF)
    assert (
        call.left() == [0, 1] and memory[3 * LEAF :] == data[:LEAF] and call.table(2) == leaf_table(data[:LEAF], LEAF)
    )
    os.close(fd)


@pytest.mark.parametrize("leaf", [(512 << 10) + LEAF, 1 << 20, (1 << 20) + 24, (3 << 19) + 1])
def test_a_long_leaf_is_read_and_summed_in_parts(native: library.Library, tmp_path: Path, leaf: int) -> None:
    data = seeded(leaf, 2 * leaf + LEAF)
    file = tmp_path / "file"
    file.write_bytes(data)
    fd, memory = os.open(file, os.O_RDONLY), ctypes.create_string_buffer(3 * leaf)
    two, short = payloads.Stretch(fd, 0, 0, 2 * leaf, leaf), payloads.Stretch(fd, 2 * leaf, 2 * leaf, leaf, leaf)
    call = payloads.CachedRead(native, [two, short], leaf, ctypes.addressof(memory), 1)
    call.work(call.share)
    os.close(fd)
    if not call.supported:
        pytest.skip("the file system does not say what is in the page cache")
    assert call.left() == [1], "the file ends within the last leaf"
    assert memory.raw[: 2 * leaf] == data[: 2 * leaf] and call.table(0) == leaf_table(data[: 2 * leaf], leaf)


def test_stretches_are_copied_to_their_places_in_a_file(native: library.Library, tmp_path: Path) -> None:
    data = seeded(1, 300_000)
    (tmp_path / "file").write_bytes(data)
    fd, to = os.open(tmp_path / "file", os.O_RDONLY), os.open(tmp_path / "copy", os.O_RDWR | os.O_CREAT)
    draw = random.Random(5)
    for _ in range(30):
        stretches, stream = list[payloads.Stretch](), b""
        for _ in range(draw.randrange(1, 9)):
            nbytes = draw.randrange(1, 15) * LEAF
            offset = draw.randrange(len(data) - nbytes)
            stretches.append(payloads.Stretch(fd, offset, len(stream), nbytes, LEAF))
            stream += data[offset : offset + nbytes]
        cuts = sorted({0, len(stream), *(draw.randrange(len(stream)) for _ in range(draw.randrange(6)))})
        spots, expected = list[tuple[int, int, int]](), bytearray()
        for at, end in draw.sample(list(pairwise(cuts)), len(cuts) - 1):  # in any order
            spots.append((at, end - at, len(expected)))
            expected += stream[at:end]
        os.ftruncate(to, 0)
        copy = payloads.FileCopy(native, stretches, spots, to, STEP, 2)
        for _ in range(2):
            copy.work(copy.share)
        assert not copy.errno and os.pread(to, len(expected) + 1, 0) == expected
        assert copy.tables() == leaf_table(stream, LEAF)
    for wrong, number in [
        ((fd, len(data) - LEAF, to), errno.EIO),
        ((-1, 0, to), errno.EBADF),
        ((fd, 0, -1), errno.EBADF),
    ]:
        stretch = payloads.Stretch(wrong[0], wrong[1], 0, 2 * LEAF, LEAF)
        copy = payloads.FileCopy(native, [stretch], [(0, 2 * LEAF, 0)], wrong[2], STEP, 2)
        copy.work(copy.share)
        assert copy.errno == number
    os.close(fd)
    os.close(to)


def test_a_share_that_was_taken_stops_all_threads(native: library.Library, tmp_path: Path) -> None:
    """As the team does when the caller is interrupted."""
    (tmp_path / "file").write_bytes(bytes(10 * STEP))
    with open(tmp_path / "file", "rb") as file:
        memory = ctypes.create_string_buffer(10 * STEP)
        stretch = payloads.Stretch(file.fileno(), 0, 0, 10 * STEP, LEAF)
        call = payloads.CachedRead(native, [stretch], STEP, ctypes.addressof(memory), 2)
        assert len(list(call.share)) == 3
        call.work(call.share)
        assert call._pieces.next.value == 0


def test_tables_and_roots(native: library.Library) -> None:
    draw, kept, asked, expected = random.Random(5), list[bytes](), list[tuple[int, int, int]](), list[bytes]()
    for _ in range(20):
        leaf = draw.choice([512, 4096, 16384])
        kept.append(draw.randbytes(draw.randrange(1, 9 * leaf)))
        asked.append((address_of_readonly(kept[-1]), len(kept[-1]), leaf))
        expected.append(leaf_table(kept[-1], leaf))
    assert payloads.leaf_tables(native, asked) == expected
    table = b"".join(expected[:3])[: 8 * 6]
    joined = payloads.roots(native, table, 16)
    assert joined == b"".join(root_of(table[at : at + 16]) for at in range(0, len(table), 16))


@pytest.mark.parametrize("most", [1000, 64 << 20])
def test_an_append_is_a_gathered_write_and_the_tables(
    native: library.Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(payloads, "WRITE_BYTES", most)
    pages = [seeded(n, 5000 * n) for n in range(1, 9)]
    spans = [(address_of_readonly(page), len(page)) for page in pages]
    with open(tmp_path / "file", "wb") as file:
        tables = payloads.append(native, file.fileno(), [(at, n, 512) for at, n in spans], spans, 77)
    assert tables == [leaf_table(page, 512) for page in pages]
    assert (tmp_path / "file").read_bytes() == bytes(77) + b"".join(pages) + b"".join(tables)
    with pytest.raises(OSError, match="Bad file descriptor"):
        payloads.append(native, -1, [(*spans[0], 512)], spans, 0)


def test_a_full_disk_is_an_error(native: library.Library) -> None:
    page = bytes(4096)
    fd = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(OSError, match="No space left"):
            payloads.append(
                native, fd, [(address_of_readonly(page), 4096, 512)], [(address_of_readonly(page), 4096)], 0
            )
    finally:
        os.close(fd)


LAYOUT = kvfs.PageLayout.kv(layers=4, kv_heads=4, head_dim=64, dtype="bfloat16", page_tokens=32)


@pytest.mark.parametrize("chunks", [3, 50], ids=["small", "overlapped"])
def test_segments_have_the_same_bytes_whoever_writes_them(
    native: library.Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunks: int
) -> None:
    assert LAYOUT.page_bytes >= NATIVE_BYTES
    data, tokens, files = seeded(6, chunks * LAYOUT.page_bytes), tokens_of(6, chunks, 32), []
    appended, real = list[Any](), SegmentWriter._native

    def spied(self: SegmentWriter, records: Any) -> Any:
        appended.append(real(self, records))
        return appended[-1]

    monkeypatch.setattr(SegmentWriter, "_native", spied)
    for name in ("native", "python"):
        with kvfs.open(tmp_path / name, capacity="512MiB", segment_bytes="32MiB") as store:
            ns = store.namespace("m", LAYOUT, revision="r1")
            assert ns.put(tokens, data).stored == chunks
            with ns.match(tokens) as match:
                out = bytearray(match.nbytes)
                assert ns.get(match, out) == chunks and out == data
        (file,) = segment_files(tmp_path / name)
        files.append(file.read_bytes()[8192:])  # behind the header, which has an id
        monkeypatch.setattr(library, "loaded", lambda: None)
    # payloads and leaf tables: what comes before the first byte that differs only in ids and times
    assert {bool(one) for one in appended} == {True, False}
    for page in range(chunks):
        piece = data[page * LAYOUT.page_bytes : (page + 1) * LAYOUT.page_bytes]
        assert all(piece in file for file in files)
        assert all(leaf_table(piece, LAYOUT.groups[0].leaf_bytes(LAYOUT.groups[0].full)) in file for file in files)


def test_a_damaged_page_ends_the_get_natively_too(native: library.Library, tmp_path: Path) -> None:
    chunks, tokens = 8, tokens_of(7, 8, 32)
    data = seeded(7, chunks * LAYOUT.page_bytes)
    with kvfs.open(tmp_path / "store", capacity="512MiB", segment_bytes="32MiB") as store:
        ns = store.namespace("m", LAYOUT, revision="r1")
        ns.put(tokens, data)
        (file,) = segment_files(tmp_path / "store")
        at = file.read_bytes().index(data[5 * LAYOUT.page_bytes :][:64])
        with open(file, "r+b") as opened:
            opened.seek(at + 1000)
            opened.write(b"damaged")
        with ns.match(tokens) as match, counted(store) as moved:
            out = bytearray(match.nbytes)
            assert ns.get(match, out) == 5
            assert moved("pages_corrupt") == 1 and out[: 5 * LAYOUT.page_bytes] == data[: 5 * LAYOUT.page_bytes]


def test_a_read_that_the_file_system_does_not_support_goes_the_other_way(
    native: library.Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, data = tokens_of(8, 4, 32), seeded(8, 4 * LAYOUT.page_bytes)
    calls: list[Any] = []
    real = Fetcher._read_native

    def refused(self: Fetcher, *args: Any, **options: Any) -> Any:
        monkeypatch.setattr(payloads.CachedRead, "work", lambda call, share: setattr(call, "supported", False))
        read = real(self, *args, **options)
        calls.append(read.supported)
        return read

    monkeypatch.setattr(Fetcher, "_read_native", refused)
    with kvfs.open(tmp_path / "store", capacity="512MiB", segment_bytes="32MiB") as store:
        ns = store.namespace("m", LAYOUT, revision="r1")
        ns.put(tokens, data)
        with ns.match(tokens) as match:
            out = bytearray(match.nbytes)
            assert ns.get(match, out) == 4 and out == data
    assert calls == [False]


@pytest.mark.skipif(not os.path.exists("/sys/kernel/mm/transparent_hugepage"), reason="a kernel without huge pages")
def test_copies_read_into_huge_pages() -> None:
    address = payloads.scratch(STEP)
    assert not address % payloads.HUGE_BYTES and address == payloads.scratch(1)
    inside, flags = False, ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            flags = line
    assert " hg" in flags and " sh" not in flags
