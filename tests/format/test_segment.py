"""Bytes on disk: golden bytes, round trips, and that damaged structures are refused."""

from __future__ import annotations

import random
import struct
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfs.format import segment as fmt
from kvfs.format.segment import Entry, Header, Seal

SEGMENT, STORE, CLASS = bytes(range(16)), bytes(range(16, 32)), b"class-of-segment"
HEADER = Header(SEGMENT, STORE, created_us=1_700_000_000_000_000, flags=fmt.FLAG_CARRIED, class_id=CLASS)
ENTRY = Entry(
    kind=fmt.KIND_PART, codec=0, group=1, seq=7, epoch=2, ns_seq=3, chunk=40, expires=1_800_000_000,
    part=struct.pack("<4H", 0, 32, 0, 8), payload=0x20000, stored_bytes=4096, raw_bytes=4096, leaves=0x30008,
    written_us=1_700_000_000_000_001, chunk_hash=bytes([1] * 32), run_hash=bytes([2] * 32), root=bytes([3] * 16),
    attempt=b"attempt!",
)  # fmt: skip
SEAL = Seal(SEGMENT, records=8, tail=0x40000, sealed_us=1_700_000_000_000_002, table_root=bytes([4] * 16))
SEED = fmt.segment_seed(SEGMENT)

u8, u16, u32, u64 = (st.integers(0, 2**n - 1) for n in (8, 16, 32, 64))
kinds = st.sampled_from([fmt.KIND_PART, fmt.KIND_NAMESPACE, fmt.KIND_CHAIN])


def raw(n: int) -> st.SearchStrategy[bytes]:
    return st.binary(min_size=n, max_size=n)


headers = st.builds(Header, raw(16), raw(16), u64, u32, raw(16), st.just(1))
entries = st.builds(
    Entry, kinds, u8, u16, u32, u32, u32, u32, u32, raw(8), u64, u32, u32, u64, u64, raw(32), raw(32), raw(16), raw(8)
)
seals = st.builds(Seal, raw(16), u32, u64, u64, raw(16))


# ---------------------------------------------------------------- sizes and golden bytes


def test_sizes_of_format_1() -> None:
    assert (fmt.HEADER_BYTES, fmt.ENTRY_BYTES, fmt.SEAL_BYTES) == (116, 160, 72)
    assert (fmt.BLOCK, fmt.FIRST_TABLE, fmt.FIRST_PAYLOAD, fmt.TABLE_BYTES) == (4096, 4096, 16384, 16384)
    assert (fmt.slots_of_table(True), fmt.slots_of_table(False)) == (76, 102)


def test_golden_bytes_of_a_header_page() -> None:
    page = fmt.pack_header(HEADER)
    body = (
        b"KVFSEG1\n" + struct.pack("<II", 1, 116) + struct.pack("<QQQ", 0, 0, 0) + STORE + SEGMENT
        + struct.pack("<Q", 1_700_000_000_000_000) + struct.pack("<III", 12288, 16384, 4) + CLASS
    )  # fmt: skip
    assert page == (body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))).ljust(4096, b"\0")
    assert page[108:116].hex() == GOLDEN["header"]


def test_golden_bytes_of_an_entry() -> None:
    data = fmt.pack_entry(ENTRY, SEED)
    body = (
        struct.pack("<BBHIIIII", 1, 0, 1, 7, 2, 3, 40, 1_800_000_000) + struct.pack("<4H", 0, 32, 0, 8)
        + struct.pack("<QIIQQ", 0x20000, 4096, 4096, 0x30008, 1_700_000_000_000_001)
        + bytes([1] * 32) + bytes([2] * 32) + bytes([3] * 16) + b"attempt!"
    )  # fmt: skip
    assert int.from_bytes(SEGMENT[:8], "little") == SEED
    assert data == body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body, seed=SEED))
    assert fmt.entry_check(data).hex() == GOLDEN["entry"]


def test_golden_bytes_of_a_seal_page() -> None:
    page = fmt.pack_seal(SEAL)
    body = (
        b"KVFSEAL1" + SEGMENT + struct.pack("<II", 1, 8)
        + struct.pack("<QQ", 0x40000, 1_700_000_000_000_002) + bytes([4] * 16)
    )  # fmt: skip
    assert page == (body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))).ljust(4096, b"\0")
    assert page[64:72].hex() == GOLDEN["seal"]


GOLDEN = {"header": "285c8de883c38d0f", "entry": "bed67244839eea42", "seal": "69cff4c5d5a7bde2"}


# ---------------------------------------------------------------- round trips


@given(headers)
def test_a_header_survives_the_disk(header: Header) -> None:
    page = fmt.pack_header(header)
    assert len(page) == fmt.BLOCK and fmt.parse_header(page) == header
    assert fmt.parse_header(memoryview(page)) == header


@given(entries, u64)
def test_an_entry_survives_the_disk(entry: Entry, seed: int) -> None:
    data = fmt.pack_entry(entry, seed)
    assert len(data) == fmt.ENTRY_BYTES and fmt.parse_entry(data, seed) == entry
    assert fmt.parse_entry(memoryview(data + b"behind"), seed) == entry


@given(seals)
def test_a_seal_survives_the_disk(seal: Seal) -> None:
    page = fmt.pack_seal(seal)
    assert len(page) == fmt.BLOCK and fmt.parse_seal(page) == seal


# ---------------------------------------------------------------- damage

STRUCTURES: dict[str, tuple[bytes, Any]] = {
    "header": (fmt.pack_header(HEADER)[: fmt.HEADER_BYTES], fmt.parse_header),
    "entry": (fmt.pack_entry(ENTRY, SEED), lambda data: fmt.parse_entry(data, SEED)),
    "seal": (fmt.pack_seal(SEAL)[: fmt.SEAL_BYTES], fmt.parse_seal),
}


@pytest.mark.parametrize("what", STRUCTURES)
def test_every_flipped_bit_is_refused(what: str) -> None:
    data, parse = STRUCTURES[what]
    assert parse(data) is not None
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        assert parse(bytes(damaged)) is None, f"bit {bit} of the {what} may be flipped unnoticed"


@pytest.mark.parametrize("what", STRUCTURES)
def test_every_torn_structure_is_refused(what: str) -> None:
    data, parse = STRUCTURES[what]
    for size in range(len(data)):
        assert parse(data[:size]) is None
        assert parse(data[:size].ljust(len(data), b"\0")) is None or data[size:].strip(b"\0") == b""


@given(st.binary(max_size=300) | st.sampled_from([bytes(4096), b"\xff" * 4096]), u64)
@settings(max_examples=300)
def test_arbitrary_bytes_never_raise(data: bytes, seed: int) -> None:
    assert fmt.parse_header(data) is None
    assert fmt.parse_entry(data, seed) is None
    assert fmt.parse_seal(data) is None


@given(st.binary(min_size=108, max_size=108), st.binary(min_size=152, max_size=152), u64)
@settings(max_examples=300)
def test_arbitrary_bytes_with_a_good_checksum_never_raise(header: bytes, entry: bytes, seed: int) -> None:
    """A process that can write the file can compute checksums."""
    assert fmt.parse_header(header + struct.pack("<Q", xxhash.xxh3_64_intdigest(header))) is None
    parsed = fmt.parse_entry(entry + struct.pack("<Q", xxhash.xxh3_64_intdigest(entry, seed=seed)), seed)
    assert (parsed is not None) == (entry[0] in (1, 2, 3))


def test_an_entry_of_another_segment_is_refused() -> None:
    draw = random.Random(1)
    data = fmt.pack_entry(ENTRY, SEED)
    for _ in range(1000):
        assert fmt.parse_entry(data, fmt.segment_seed(draw.randbytes(16))) is None
    assert fmt.parse_entry(data, 0) is None


def test_zeros_are_not_an_entry() -> None:
    """Table slots that were never used are zero: they must end a scan, whatever the segment's id is."""
    for seed in (0, SEED, 2**64 - 1):
        assert fmt.parse_entry(bytes(fmt.ENTRY_BYTES), seed) is None


@pytest.mark.parametrize(
    ("offset", "packed"),
    [
        (0, b"KVFSEG2\n"),
        (8, struct.pack("<I", 2)),  # format
        (12, struct.pack("<I", 120)),  # header size
        (32, struct.pack("<Q", 1)),  # an incompatible feature
        (80, struct.pack("<I", 4096)),  # size of the first table
        (84, struct.pack("<I", 4096)),  # size of later tables
    ],
)
def test_a_header_that_this_version_must_not_read_is_refused(offset: int, packed: bytes) -> None:
    body = bytearray(fmt.pack_header(HEADER)[:108])
    body[offset : offset + len(packed)] = packed
    page = bytes(body) + struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(body)))
    assert fmt.parse_header(page) is None


@pytest.mark.parametrize("offset", [16, 24])
def test_features_that_do_not_stop_a_reader_are_ignored(offset: int) -> None:
    body = bytearray(fmt.pack_header(HEADER)[:108])
    body[offset] = 1
    assert fmt.parse_header(bytes(body) + struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(body)))) == HEADER


@given(st.integers(0, 2**40), st.sampled_from([8, 512, 4096]))
def test_align_rounds_up_to_the_next_multiple(offset: int, to: int) -> None:
    assert offset <= fmt.align(offset, to) < offset + to and fmt.align(offset, to) % to == 0


# ---------------------------------------------------------------- tables


def table_of(*entries: Entry, slots: int = 4) -> memoryview:
    packed = b"".join(fmt.pack_entry(entry, SEED) for entry in entries)
    return memoryview(packed.ljust(slots * fmt.ENTRY_BYTES, b"\0"))


def test_a_table_is_read_up_to_the_first_slot_that_holds_no_entry() -> None:
    some = [ENTRY._replace(seq=n, chunk_hash=bytes([n]) * 32) for n in range(3)]
    table = table_of(*some)
    assert [entry for entry, _ in fmt.parse_entries(table, SEED)] == some
    assert [check for _, check in fmt.parse_entries(table, SEED)] == [
        fmt.entry_check(fmt.pack_entry(entry, SEED)) for entry in some
    ]
    assert fmt.parse_names(table, SEED) == ([entry.chunk_hash for entry in some], None)
    assert not list(fmt.parse_entries(table, SEED + 1)) and fmt.parse_names(table, SEED + 1) == ([], None)
    torn = bytearray(table)
    torn[fmt.ENTRY_BYTES] ^= 1
    assert [entry for entry, _ in fmt.parse_entries(memoryview(torn), SEED)] == some[:1]
    assert fmt.parse_names(memoryview(torn), SEED) == ([some[0].chunk_hash], None)
    strange = table_of(some[0], ENTRY._replace(kind=9), some[1])
    assert [entry for entry, _ in fmt.parse_entries(strange, SEED)] == some[:1]


@pytest.mark.parametrize("before", [0, 1, 2])
def test_names_end_at_the_entry_that_says_where_the_next_table_is(before: int) -> None:
    chain = ENTRY._replace(kind=fmt.KIND_CHAIN, payload=0x50000, chunk_hash=bytes(32))
    table = table_of(*[ENTRY] * before, chain, ENTRY)
    assert fmt.parse_names(table, SEED) == ([ENTRY.chunk_hash] * before + [bytes(32)], 0x50000)


# ---------------------------------------------------------------- purge marks


def test_what_a_purge_mark_covers() -> None:
    mark = fmt.PurgeMark(SEGMENT, fmt.PURGE_PENDING, epoch=2, bits=bytes([0b1000_0010, 0b1]))
    assert mark.pending and not mark.whole
    assert [seq for seq in range(40) if mark.covers(ENTRY._replace(seq=seq, epoch=2))] == [1, 7, 8]
    for epoch, covered in ((0, True), (2, True), (3, False)):
        assert mark.covers(ENTRY._replace(seq=7, epoch=epoch)) is covered, "slots that an adopter used again"
    whole = mark._replace(flags=fmt.PURGE_ALL, bits=b"")
    assert whole.whole and not whole.pending and whole.covers(ENTRY._replace(seq=10_000, epoch=9))


def test_a_purge_mark_survives_the_disk_and_is_refused_when_torn() -> None:
    for bits in (b"", b"\1", bytes(range(200))):
        mark = fmt.PurgeMark(SEGMENT, fmt.PURGE_PENDING, 7, bits)
        packed = fmt.pack_purge_mark(mark)
        assert fmt.parse_purge_mark(packed) == mark
        assert fmt.parse_purge_mark(packed[:-1]) is None and fmt.parse_purge_mark(packed + b"\0") is None
    body = struct.pack("<8s16sIII", fmt.PURGE_MAGIC, SEGMENT, 1, 7, 4) + b"\1\2\3"  # says one byte more than it has
    for damaged in (body, b"KVFSPRG2" + body[8:-4] + struct.pack("<I", 3) + body[-3:]):
        assert fmt.parse_purge_mark(damaged + struct.pack("<Q", xxhash.xxh3_64_intdigest(damaged))) is None
    empty = fmt.pack_purge_mark(fmt.PurgeMark(SEGMENT, 0, 7, b""))
    for size in range(len(empty) - 8):  # shorter than a mark of nothing, with a good checksum
        short = empty[:size] + struct.pack("<Q", xxhash.xxh3_64_intdigest(empty[:size]))
        assert fmt.parse_purge_mark(short) is None


@pytest.mark.parametrize("by", [1, -1, 1 << 63])
def test_a_check_word_that_is_larger_or_smaller_is_refused_alike(by: int) -> None:
    def changed(data: bytes, at: int) -> bytes:
        check = (int.from_bytes(data[at : at + 8], "little") + by) % (1 << 64)
        return data[:at] + check.to_bytes(8, "little") + data[at + 8 :]

    good = fmt.pack_entry(ENTRY, SEED)
    bad = changed(good, fmt.ENTRY_BYTES - 8)
    assert fmt.parse_entry(good, SEED) == ENTRY and fmt.parse_entry(bad, SEED) is None
    assert [e for e, _ in fmt.parse_entries(memoryview(good + bad + good), SEED)] == [ENTRY]
    assert fmt.parse_names(memoryview(good + bad + good), SEED) == ([ENTRY.chunk_hash], None)
    assert fmt.parse_header(changed(fmt.pack_header(HEADER), fmt.HEADER_BYTES - 8)) is None
    assert fmt.parse_seal(changed(fmt.pack_seal(SEAL), fmt.SEAL_BYTES - 8)) is None
    mark = fmt.pack_purge_mark(fmt.PurgeMark(SEGMENT, 0, 7, b"x"))
    assert fmt.parse_purge_mark(changed(mark, len(mark) - 8)) is None
