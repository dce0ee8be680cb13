"""Segment files: what a writer lays out, and which entries, seals and files are accepted."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.directory.root import Directory
from kvfs.format import segment as fmt
from kvfs.format.checksums import leaf_table, root_of
from kvfs.format.segment import ENTRY_BYTES, Entry, Header
from kvfs.pages.identity import Identity
from kvfs.segments.scan import Scan, chunk_hashes, covered_end, read_descriptor, read_namespace, scan_segment
from kvfs.segments.writer import Record, SegmentWriter, file_name, sync_segment
from kvfs.system.files import Files
from tests.stores import tiny

FILES = Files()
SEGMENT, STORE = b"g" * 16, b"t" * 16
MIB = 1 << 20
SEED = fmt.segment_seed(SEGMENT)
SLOTS, MORE_SLOTS = 76, 102  # of the first table and of the others, each with a slot for the chain entry
PAYLOAD = 16 * 1024  # of a record below: four blocks


@pytest.fixture
def directory(memory_path: Path) -> Iterator[Directory]:
    kvfs.open(memory_path / "store", capacity="16MiB").close()
    with contextlib.closing(Directory(str(memory_path / "store"), Files(), read_only=False)) as made:
        yield made


@pytest.fixture
def writer(directory: Directory) -> Iterator[SegmentWriter]:
    made = SegmentWriter.create(directory, Header(SEGMENT, STORE, 7, 0, bytes(16)), 5, 4 * MIB)
    yield made
    made.close()


LAYOUT = tiny(layers=4, kv_heads=8, head_dim=8)  # 4 x 2 x 8 leaves of 256 bytes
GROUP = LAYOUT.groups[0]
PART = GROUP.full.pack()
LEAVES, LEAF_BYTES = GROUP.leaves(GROUP.full), GROUP.leaf_bytes(GROUP.full)


@pytest.fixture
def described() -> tuple[bytes, bytes]:
    """(digest, descriptor) of a namespace of that layout."""
    identity = Identity("m", LAYOUT, "1")
    return identity.digest, identity.descriptor_bytes()


def record(number: int, payload: bytes | None = None, **changes: Any) -> Record:
    data = bytes([number % 251]) * PAYLOAD if payload is None else payload
    made = Record(data, LEAF_BYTES, LEAVES, len(data), 0, number, PART, bytes([number % 251]) * 32, b"r" * 32, 0)
    return made._replace(**changes)


def path_of(directory: Directory) -> Path:
    return Path(directory.path) / "segments" / file_name(SEGMENT)


def scan(directory: Directory) -> Scan:
    fd = os.open(path_of(directory), os.O_RDONLY)
    try:
        found = scan_segment(fd, FILES)
    finally:
        os.close(fd)
    assert found is not None
    return found


def test_the_layout_of_a_record(described: tuple[bytes, bytes]) -> None:
    assert LEAVES * LEAF_BYTES == PAYLOAD


@pytest.mark.parametrize("chunks", [1, 2, 74, 75, 76, 175, 176])
def test_an_append_takes_what_was_said_and_is_read_again(
    directory: Directory, writer: SegmentWriter, described: tuple[bytes, bytes], chunks: int
) -> None:
    """A descriptor's block, payloads, leaf tables in whole blocks, and a table of 16 KiB for every 101 entries more
    than 75."""
    digest, descriptor = described
    tables = 0 if chunks + 1 <= SLOTS - 1 else -(-(chunks + 1 - (SLOTS - 1)) // (MORE_SLOTS - 1))
    need = 4096 + chunks * PAYLOAD + fmt.align(chunks * LEAVES * 8) + tables * 16384
    assert writer.need(digest, descriptor, PAYLOAD, LEAVES * 8, chunks) == need
    assert SegmentWriter.need_fresh(len(descriptor), PAYLOAD, LEAVES * 8, chunks) == 16384 + need + 4096
    assert writer.remaining_bytes(MIB) == MIB - 4096 - 16384
    placed = writer.append([record(n) for n in range(chunks)], digest, descriptor, 99)
    assert writer.tail == 16384 + need and writer.records == chunks + 1 + tables
    leaves = 16384 + 4096 + chunks * PAYLOAD
    assert [(p.payload, p.leaves) for p in placed] == [
        (16384 + 4096 + n * PAYLOAD, leaves + n * LEAVES * 8) for n in range(chunks)
    ]
    found = scan(directory)
    assert found.checks == bytes(writer._checks) and (found.table, found.slot) == (writer.table, writer._slot)
    assert found.end <= writer.tail and found.appendable and found.seal is None and found.size == 4 * MIB
    assert [e.seq for e in found.entries] == list(range(chunks + 1 + tables))
    parts = list(found.parts())
    assert [(e.seq, e.root) for e in parts] == [(p.seq, p.root) for p in placed]
    first = record(0)
    assert parts[0] == Entry(
        fmt.KIND_PART, 0, 0, 1, 1, 0, 0, 0, PART, 20480, PAYLOAD, PAYLOAD, leaves, 99, first.chunk_hash,
        first.run_hash, root_of(leaf_table(first.payload, LEAF_BYTES)), bytes(8),
    )  # fmt: skip
    fd = os.open(path_of(directory), os.O_RDONLY)
    try:
        assert chunk_hashes(fd, FILES) == [e.chunk_hash for e in found.entries]
        for e in parts[-2:]:
            assert os.pread(fd, PAYLOAD, e.payload) == record(e.chunk).payload
            assert os.pread(fd, LEAVES * 8, e.leaves) == leaf_table(record(e.chunk).payload, LEAF_BYTES)
        named = read_namespace(fd, FILES, found.entries, 0)
        assert named is not None and named.digest == digest
        assert read_namespace(fd, FILES, found.entries, 1) is None, "the entry of a page"
        assert read_namespace(fd, FILES, found.entries, len(found.entries)) is None
        assert covered_end(found, lambda seq: read_namespace(fd, FILES, found.entries, seq)) == writer.tail
        assert covered_end(found, lambda seq: None) is None
    finally:
        os.close(fd)
    # the descriptor is known now
    again = PAYLOAD + 4096 + (16384 if writer._slot == (MORE_SLOTS if tables else SLOTS) - 1 else 0)
    assert writer.need(digest, descriptor, PAYLOAD, LEAVES * 8, 1) == again


@pytest.mark.parametrize("ended", ["sealed", "trimmed"])
def test_a_file_ends_behind_what_was_appended(
    directory: Directory, writer: SegmentWriter, described: tuple[bytes, bytes], ended: str
) -> None:
    writer.append([record(1)], *described, 99)
    tail = writer.tail
    size = writer.seal() if ended == "sealed" else writer.trim()
    assert size == writer.allocated == path_of(directory).stat().st_size == tail + (4096 if ended == "sealed" else 0)
    found = scan(directory)
    assert (found.seal is None) is (ended == "trimmed")
    if found.seal is not None:
        assert (found.seal.records, found.seal.tail, found.seal.table_root) == (2, tail, root_of(found.checks))


def entry(**changes: Any) -> Entry:
    base = Entry(
        fmt.KIND_PART, 0, 0, 2, 1, 0, 3, 0, PART, 36864, 4096, 4096, 40960, 5, b"c" * 32, b"r" * 32, bytes(16), bytes(8)
    )
    return base._replace(**changes)


@pytest.mark.parametrize(
    ("changes", "accepted"),
    [
        ({}, True),
        ({"seq": 1}, False),
        ({"seq": 3}, False),
        ({"epoch": 0}, False),
        ({"epoch": 2}, True),
        ({"payload": 36865}, False),
        ({"payload": 12288}, False),
        ({"payload": 16384}, True),
        ({"payload": 4 * MIB - 4096}, True),
        ({"payload": 4 * MIB - 4096, "stored_bytes": 4097}, False),
        ({"payload": 4 * MIB}, False),
        ({"leaves": 40961}, False),
        ({"leaves": 40968}, True),
        ({"leaves": 4 * MIB}, True),
        ({"leaves": 4 * MIB + 8}, False),
        ({"leaves": 0}, True),
        ({"kind": fmt.KIND_CHAIN, "payload": 65536}, False),  # not in the last slot
    ],
)
def test_an_entry_is_accepted_only_where_it_points_into_the_file(
    directory: Directory, writer: SegmentWriter, described: tuple[bytes, bytes], changes: dict[str, int], accepted: bool
) -> None:
    writer.append([record(1)], *described, 99)
    before = len(scan(directory).entries)
    with open(path_of(directory), "r+b") as file:
        file.seek(4096 + 2 * ENTRY_BYTES)
        file.write(fmt.pack_entry(entry(**changes), SEED))
    found = scan(directory)
    assert (len(found.entries) - before == 1) is accepted
    if accepted:
        made = entry(**changes)
        table = fmt.align(made.leaves + 8) if made.leaves else 0
        assert found.end == max(writer.tail, fmt.align(made.payload + made.stored_bytes), table)


def test_an_epoch_never_falls(directory: Directory, writer: SegmentWriter, described: tuple[bytes, bytes]) -> None:
    writer.append([record(1)], *described, 99)
    with open(path_of(directory), "r+b") as file:
        file.seek(4096 + 2 * ENTRY_BYTES)
        file.write(fmt.pack_entry(entry(epoch=2), SEED) + fmt.pack_entry(entry(seq=3, epoch=1), SEED))
    assert [e.epoch for e in scan(directory).entries] == [1, 1, 2]


@pytest.mark.parametrize(
    ("payload", "accepted"),
    [(2 * MIB, True), (2 * MIB + 1, False), (16384, False), (4 * MIB - 16384, True), (4 * MIB - 12288, False)],
)
def test_a_chain_points_forward_to_a_whole_table(
    directory: Directory, writer: SegmentWriter, described: tuple[bytes, bytes], payload: int, accepted: bool
) -> None:
    writer.append([record(n) for n in range(SLOTS - 2)], *described, 99)
    chain = entry(kind=fmt.KIND_CHAIN, seq=SLOTS - 1, payload=payload, stored_bytes=0, leaves=0)
    with open(path_of(directory), "r+b") as file:
        file.seek(4096 + (SLOTS - 1) * ENTRY_BYTES)
        file.write(fmt.pack_entry(chain, SEED))
        file.seek(payload)
        file.write(fmt.pack_entry(entry(seq=SLOTS), SEED))
    found = scan(directory)
    assert len(found.entries) == (SLOTS + 1 if accepted else SLOTS - 1)
    assert (found.table, found.slot) == ((payload, 1) if accepted else (4096, SLOTS - 1))
    if accepted:
        assert found.end == max(payload + 16384, writer.tail)
    fd = os.open(path_of(directory), os.O_RDONLY)
    try:
        assert len(chunk_hashes(fd, FILES)) >= SLOTS - 1
    finally:
        os.close(fd)


def test_a_page_in_the_last_slot_is_no_entry(
    directory: Directory, writer: SegmentWriter, described: tuple[bytes, bytes]
) -> None:
    writer.append([record(n) for n in range(SLOTS - 2)], *described, 99)
    with open(path_of(directory), "r+b") as file:
        file.seek(4096 + (SLOTS - 1) * ENTRY_BYTES)
        file.write(fmt.pack_entry(entry(seq=SLOTS - 1), SEED))
    assert len(scan(directory).entries) == SLOTS - 1


@pytest.mark.parametrize(
    ("change", "sealed"),
    [
        (lambda seal: seal, True),
        (lambda seal: seal._replace(segment_id=STORE), False),
        (lambda seal: seal._replace(tail=seal.tail - 4096), False),
        (lambda seal: seal._replace(records=seal.records + 1), False),
        (lambda seal: seal._replace(records=seal.records - 1), False),
        (lambda seal: seal._replace(table_root=bytes(16)), False),
    ],
)
def test_a_seal_is_of_this_segment_and_of_all_its_records(
    directory: Directory, writer: SegmentWriter, described: tuple[bytes, bytes],
    change: Callable[[fmt.Seal], fmt.Seal], sealed: bool,
) -> None:  # fmt: skip
    writer.append([record(1)], *described, 99)
    size = writer.seal()
    seal = scan(directory).seal
    assert seal is not None
    with open(path_of(directory), "r+b") as file:
        file.seek(size - 4096)
        file.write(fmt.pack_seal(change(seal)))
    assert (scan(directory).seal is not None) is sealed
    os.truncate(path_of(directory), size + 1)
    assert scan(directory).seal is None, "not at the end of the file"


@pytest.mark.parametrize(("size", "whole"), [(16383, False), (16384, True)])
def test_a_file_without_a_whole_table_is_no_segment(
    directory: Directory, writer: SegmentWriter, size: int, whole: bool
) -> None:
    os.truncate(path_of(directory), size)
    fd = os.open(path_of(directory), os.O_RDONLY)
    try:
        assert (scan_segment(fd, FILES) is not None) is whole
        assert chunk_hashes(fd, FILES) == []
    finally:
        os.close(fd)


def adopt(directory: Directory, writer: SegmentWriter, **changes: Any) -> SegmentWriter:
    how = {"epoch": 3, "tail": writer.tail, "records": writer.records, "allocated": MIB, **changes}
    return SegmentWriter.adopt(directory, SEGMENT, 5, **how)


def test_an_adopter_goes_on_behind_what_is_published(
    directory: Directory, writer: SegmentWriter, described: tuple[bytes, bytes]
) -> None:
    writer.append([record(1)], *described, 99)
    tail = writer.tail
    writer.append([record(2)], *described, 99)  # was not published
    adopted = adopt(directory, writer, tail=tail, records=2)
    try:
        assert (adopted.epoch, adopted.tail, adopted.records, adopted.number) == (3, tail, 2, 5)
        assert (adopted.table, adopted._slot, adopted.allocated) == (4096, 2, MIB)
        assert len(scan(directory).entries) == 2, "what was not published is cleared"
        (placed,) = adopted.append([record(3)], *described, 100)
        assert (placed.payload, placed.seq) == (tail + 4096, 3), "a descriptor of its own comes first"
        assert [e.epoch for e in scan(directory).entries] == [1, 1, 3, 3]
        adopted.seal()
        assert scan(directory).seal is not None
    finally:
        adopted.close()


@pytest.mark.parametrize(
    ("break_it", "changes", "error", "why"),
    [
        (lambda path: None, {"records": 3}, errno.EIO, "does not hold"),
        (lambda path: None, {"tail": 40959}, errno.EIO, "beyond the tail"),
        (lambda path: os.link(path, path.with_name("copy")), {}, errno.EMLINK, "another name"),
        (lambda path: path.write_bytes(b"\0" * MIB), {}, errno.EIO, "does not hold"),
        (lambda path: path.unlink(), {}, errno.ENOENT, "No such file"),
    ],
)
def test_a_segment_that_is_not_safe_to_append_to_is_not_adopted(
    directory: Directory, writer: SegmentWriter, described: tuple[bytes, bytes], break_it: Callable[[Path], object],
    changes: dict[str, int], error: int, why: str,
) -> None:  # fmt: skip
    writer.append([record(1)], *described, 99)
    assert writer.tail == 16384 + 4096 + PAYLOAD + 4096 == 40960
    before = len(os.listdir("/proc/self/fd"))
    break_it(path_of(directory))
    with pytest.raises(OSError, match=why) as raised:
        adopt(directory, writer, **changes)
    assert raised.value.errno == error
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_sealed_segment_is_not_adopted(
    directory: Directory, writer: SegmentWriter, described: tuple[bytes, bytes]
) -> None:
    writer.append([record(1)], *described, 99)
    writer.seal()
    with pytest.raises(OSError, match="does not hold"):
        adopt(directory, writer)


class Refusing(Files):
    """A disk that refuses one kind of call."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind

    def fallocate(self, fd: int, offset: int, nbytes: int, *, keep_size: bool = False) -> None:
        if self._kind == "fallocate":
            raise OSError(errno.ENOSPC, "full")
        super().fallocate(fd, offset, nbytes, keep_size=keep_size)

    def write_all(self, fd: int, buffers: Sequence[Any], offset: int, block: int = 1) -> int:
        if self._kind == "write_all":
            raise OSError(errno.EIO, "broken")
        return super().write_all(fd, buffers, offset, block)


@pytest.mark.parametrize("kind", ["fallocate", "write_all"])
def test_a_segment_that_cannot_be_made_leaves_no_file(memory_path: Path, kind: str) -> None:
    kvfs.open(memory_path / "store", capacity="16MiB").close()
    with contextlib.closing(Directory(str(memory_path / "store"), Refusing(kind), read_only=False)) as directory:
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(OSError, match=r"full|broken"):
            SegmentWriter.create(directory, Header(SEGMENT, STORE, 7, 0, bytes(16)), 5, MIB)
        assert not path_of(directory).exists()
        assert len(os.listdir("/proc/self/fd")) <= before + 1, "the folder may have been opened"


@pytest.mark.parametrize("kind", ["fallocate", "write_all"])
def test_a_segment_takes_no_more_records_after_an_error(
    directory: Directory, writer: SegmentWriter, described: tuple[bytes, bytes], kind: str
) -> None:
    writer._files = Refusing(kind)
    with pytest.raises(OSError, match=r"full|broken"):
        if kind == "fallocate":
            writer.grow(5 * MIB)
        else:
            writer.append([record(1)], *described, 99)
    assert writer.dead and writer.allocated == 4 * MIB and writer.records == 0
    with pytest.raises(AssertionError, match="dead segment"):
        writer.append([record(1)], *described, 99)


def test_nothing_is_written_beyond_what_was_reserved(
    directory: Directory, writer: SegmentWriter, described: tuple[bytes, bytes]
) -> None:
    need = writer.need(*described, PAYLOAD, LEAVES * 8, 1)
    writer.allocated = 16384 + need - 1
    with pytest.raises(AssertionError, match="beyond what was reserved"):
        writer.append([record(1)], *described, 99)
    assert writer.dead and not any(path_of(directory).read_bytes()[4096:])
    writer.dead, writer.allocated = False, 16384 + need
    assert len(writer.append([record(1)], *described, 99)) == 1


def test_an_encoded_page_needs_its_leaf_table(writer: SegmentWriter, described: tuple[bytes, bytes]) -> None:
    with pytest.raises(AssertionError, match="leaf table"):
        writer.append([record(1, codec=fmt.CODEC_ZSTD)], *described, 99)
    assert not writer.dead


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("pages", [1, 3, 70])
def test_large_payloads_have_the_same_bytes_with_and_without_threads(
    directory: Directory, writer: SegmentWriter, described: tuple[bytes, bytes], pages: int, native: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """64 KiB each: in sum below and above the size from which checksums overlap with writes."""
    if not native:
        monkeypatch.setattr("kvfs.native.library.loaded", lambda: None)
    writer.grow(8 * MIB)
    layout = tiny(layers=16, kv_heads=8, head_dim=8)
    group = layout.groups[0]
    data = [bytes([n]) * (64 << 10) for n in range(pages)]
    records = [
        record(n, d, leaf_bytes=group.leaf_bytes(group.full), leaves=group.leaves(group.full))
        for n, d in enumerate(data)
    ]
    placed = writer.append(records, *described, 99)
    content = path_of(directory).read_bytes()
    for r, p in zip(records, placed, strict=True):
        table = leaf_table(r.payload, r.leaf_bytes)
        assert content[p.payload : p.payload + len(r.payload)] == r.payload
        assert content[p.leaves : p.leaves + len(table)] == table and p.root == root_of(table)
    assert not any(content[writer.tail :])


def test_a_descriptor_that_is_too_long_or_differs_is_none(
    directory: Directory, writer: SegmentWriter, described: tuple[bytes, bytes]
) -> None:
    writer.append([record(1)], *described, 99)
    first, second = scan(directory).entries
    fd = os.open(path_of(directory), os.O_RDONLY)
    try:
        assert read_descriptor(fd, FILES, first) == described[1]
        assert read_descriptor(fd, FILES, first._replace(root=bytes(16))) is None
        assert read_descriptor(fd, FILES, first._replace(stored_bytes=65_537)) is None
        other = first._replace(chunk_hash=bytes(32))
        assert read_namespace(fd, FILES, [other, second], 0) is None, "of another digest"
    finally:
        os.close(fd)


def test_a_segment_that_is_discarded_leaves_no_file(directory: Directory, writer: SegmentWriter) -> None:
    writer.discard(directory)
    assert not path_of(directory).exists()
    writer.discard(directory)


@pytest.mark.parametrize(
    ("leaves", "part", "end"),
    [
        (2 * MIB, PART, 2 * MIB + 4096), (4 * MIB - LEAVES * 8, PART, 4 * MIB), (4 * MIB - LEAVES * 8 + 8, PART, None),
        (4 * MIB, PART, None), (2 * MIB, bytes(8), None), (2 * MIB, b"\xff" * 8, None), (0, b"\xff" * 8, 40960),
    ],
)  # fmt: skip
def test_what_entries_cover_ends_in_the_file(
    directory: Directory, writer: SegmentWriter, described: tuple[bytes, bytes], leaves: int, part: bytes,
    end: int | None,
) -> None:  # fmt: skip
    writer.append([record(1)], *described, 99)
    with open(path_of(directory), "r+b") as file:
        file.seek(4096 + 2 * ENTRY_BYTES)
        file.write(fmt.pack_entry(entry(leaves=leaves, part=part), SEED))
    found = scan(directory)
    assert len(found.entries) == 3
    fd = os.open(path_of(directory), os.O_RDONLY)
    try:
        assert covered_end(found, lambda seq: read_namespace(fd, FILES, found.entries, seq)) == end
        several = found.entries[2]._replace(group=1)
        found.entries[2] = several
        described_end = covered_end(found, lambda seq: read_namespace(fd, FILES, found.entries, seq))
        assert described_end == (None if leaves else 40960), "there is one group"
    finally:
        os.close(fd)


@pytest.mark.parametrize("back", [4096, 16384, 4 * MIB - 16384 + 4096, 8 * MIB])
def test_names_are_read_up_to_a_table_that_is_not_ahead(
    directory: Directory, writer: SegmentWriter, described: tuple[bytes, bytes], back: int
) -> None:
    """Only check words are compared here: a table that names itself must end the search."""
    writer.append([record(n) for n in range(SLOTS + 10)], *described, 99)
    table = scan(directory).table
    assert table > 4096
    ends: list[int] = []

    class Bounded(Files):
        def read(self, fd: int, nbytes: int, offset: int) -> bytes:
            ends.append(offset + nbytes)
            assert len(ends) < 9, "it never ends"
            return super().read(fd, nbytes, offset)

    fd = os.open(path_of(directory), os.O_RDWR)
    try:
        whole = chunk_hashes(fd, Bounded())
        assert len(whole) >= SLOTS + 11
        chain = entry(kind=fmt.KIND_CHAIN, seq=SLOTS - 1, payload=table if back == 16384 else back, leaves=0)
        os.pwrite(fd, fmt.pack_entry(chain, SEED), 4096 + (SLOTS - 1) * ENTRY_BYTES)
        if back == 16384:  # the second table names itself
            os.pwrite(fd, fmt.pack_entry(chain, SEED), table + 12 * ENTRY_BYTES)
        ends.clear()
        found = chunk_hashes(fd, Bounded())
        assert found[: SLOTS - 1] == whole[: SLOTS - 1]
        assert (len(found) > SLOTS) == (back == 16384) and max(ends) <= os.fstat(fd).st_size
    finally:
        os.close(fd)


class Noting(Files):
    """Notes what is done with descriptors, in order."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def flock(self, fd: int, operation: int) -> bool:
        kind = "shared" if operation == fcntl.LOCK_SH else "exclusive"
        direct = " direct" if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT else ""
        self.done.append(kind + direct)
        return super().flock(fd, operation)

    def random_access(self, fd: int) -> None:
        self.done.append("random access")
        super().random_access(fd)

    def read(self, fd: int, nbytes: int, offset: int) -> bytes:
        self.done.append("read")
        return super().read(fd, nbytes, offset)

    def fdatasync(self, fd: int) -> None:
        self.done.append("sync")
        super().fdatasync(fd)


def test_an_adopter_locks_first_and_reads_tables_without_readahead(
    directory: Directory, writer: SegmentWriter, described: tuple[bytes, bytes]
) -> None:
    writer.append([record(1)], *described, 99)
    files = directory.files = Noting()
    adopt(directory, writer).close()
    assert files.done[:3] == ["shared", "random access", "read"] and files.done.count("shared") == 1


@pytest.mark.parametrize("adopted", [False, True])
def test_both_descriptors_of_a_segment_written_past_the_page_cache_are_locked(
    disk_path: Path, described: tuple[bytes, bytes], adopted: bool
) -> None:
    """A reclaim looks for any shared lock: the write of the second descriptor must not reach a removed file."""
    kvfs.open(disk_path / "store", capacity="16MiB").close()
    with contextlib.closing(Directory(str(disk_path / "store"), Noting(), read_only=False)) as directory:
        files = directory.files
        assert isinstance(files, Noting)
        made = SegmentWriter.create(directory, Header(SEGMENT, STORE, 7, fmt.FLAG_DIRECT, bytes(16)), 5, MIB)
        try:
            if adopted:
                made.append([record(1)], *described, 99)
                files.done.clear()
                adopt(directory, made).close()
            assert files.done.count("shared direct") == 1
            assert files.done.index("shared") < files.done.index("shared direct")
        finally:
            made.close()


@pytest.mark.parametrize("there", [True, False])
def test_a_segment_is_synced_for_its_owner_if_it_is_there(
    directory: Directory, writer: SegmentWriter, there: bool
) -> None:
    files = directory.files = Noting()
    if there:
        sync_segment(directory, SEGMENT)
        assert files.done == ["sync"]
    else:
        with pytest.raises(FileNotFoundError):
            sync_segment(directory, STORE)


def test_an_entry_says_where_the_next_table_is_and_nothing_else(
    directory: Directory, writer: SegmentWriter, described: tuple[bytes, bytes]
) -> None:
    writer.append([record(n) for n in range(SLOTS + 3)], *described, 99)
    found = scan(directory)
    (chain,) = (e for e in found.entries if e.kind == fmt.KIND_CHAIN)
    assert chain == fmt.Entry(
        fmt.KIND_CHAIN, 0, 0, SLOTS - 1, 1, 0, 0, 0, bytes(8), found.table, 0, 0, 0, 0, bytes(32), bytes(32), bytes(16),
        bytes(8),
    )  # fmt: skip
    assert found.table == writer.table and len(found.entries) == SLOTS + 5
