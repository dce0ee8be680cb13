"""Every parser of untrusted bytes in kvfs, as targets of the fuzzer.

A target defines how an input is read, which errors it may raise, and what must hold for an accepted input: its checks
agree when recomputed independently, and the value can be used and written back.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb

import kvfs
from kvfs.directory.access_times import AccessTimes
from kvfs.directory.config import Settings, make_settings, parse_toml, to_toml
from kvfs.directory.liveness import Liveness
from kvfs.directory.pin_files import list_pins, pinned_segments
from kvfs.directory.root import Directory, create, pack_super, parse_super
from kvfs.errors import ConfigError, FormatError, KvfsError, NoSpaceError, StoreLockedError
from kvfs.format import codec as codecs
from kvfs.format import segment as fmt
from kvfs.format.checksums import checksum
from kvfs.format.segment import Entry, Header
from kvfs.index import tables
from kvfs.index.environment import Index
from kvfs.index.ledger import adopt
from kvfs.index.lmdb_files import PAGE, open_environment, open_tables
from kvfs.index.row_updates import forget, sweep
from kvfs.index.rows import _EXTENT, _HEAD, RUN, Place, claim, pack_row, parse_row
from kvfs.index.session import Session, Tables
from kvfs.index.tables import ACTIVE, DROPPED, SEALED, SegmentRow
from kvfs.index.trust import State, read_state
from kvfs.lookup.row_hits import HitBlock
from kvfs.maintenance.rebuild import Report, _Listed, _SegmentBuilder
from kvfs.native import library
from kvfs.native.index_walker import HandOverError, IndexWalker, PreparedLookup
from kvfs.pages.chunk_hash import page_key, page_prefix
from kvfs.pages.identity import Identity, digest_of, parse_descriptor
from kvfs.pages.layout import PageLayout, Part
from kvfs.segments.scan import scan_segment
from kvfs.segments.writer import Record, SegmentWriter, file_name
from kvfs.system.files import Files, pack_u64
from tools.torture.images import DictTxn, Image, ImageDirectory
from tools.torture.mutators import (
    flip_bytes,
    mend_super,
    mutate_fields,
    mutate_json,
    mutate_segment,
    mutate_toml,
    struct_mutator,
)

STORE_ID, SEGMENT_ID, OTHER_ID = b"S" * 16, b"segment id 12345", b"another segment!"
SEED = fmt.segment_seed(SEGMENT_ID)
ROW_KEY = b"row key " * 5
NOW_S = 1_800_000_000
GROWN_BYTES_MAX = 4 << 20  # of an input that is not a segment
DB = Tables("pages", "segments", "namespaces", "meta")


class Unverified(AssertionError):
    """A parser accepted bytes that do not verify."""


def must(condition: bool, what: str) -> None:
    if not condition:
        raise Unverified(what)


@dataclass(frozen=True)
class Target:
    name: str
    seeds: Callable[[], list[Image]]
    mutate: Callable[[random.Random, Image], Image]
    read: Callable[[Image], str]  # returns a word for the result
    errors: tuple[type[Exception], ...] = ()  # documented errors
    weight: int = 10


TARGETS: dict[str, Target] = {}


def target(
    seeds: Callable[[], list[bytes]], mutate: Callable[[random.Random, bytes], bytes], *errors: type[Exception],
    weight: int = 10,
) -> Callable[[Callable[[bytes], str]], Callable[[bytes], str]]:  # fmt: skip
    """Register a function of bytes as a target."""

    def register(read: Callable[[bytes], str]) -> Callable[[bytes], str]:
        name = read.__name__
        TARGETS[name] = Target(
            name,
            lambda: [Image.of(data) for data in seeds()],
            lambda chance, image: Image.of(mutate(chance, image.bytes())[:GROWN_BYTES_MAX]),
            lambda image: read(image.bytes()),
            errors,
            weight,
        )
        return read

    return register


def word(value: object) -> str:
    return "absent" if value is None else "accepted"


# -- segments --------------------------------------------------------------------------------


def entry_of(**changes: Any) -> Entry:
    e = Entry(fmt.KIND_PART, 0, 0, 1, 1, 0, 3, 0, Part(0, 2, 0, 2).pack(), fmt.FIRST_PAYLOAD, 4096, 4096, 20480, 5,
              b"c" * 32, b"r" * 32, b"x" * 16, b"a" * 8)  # fmt: skip
    return e._replace(**changes)


@target(lambda: [fmt.pack_header(Header(SEGMENT_ID, STORE_ID, 7))[:256]], struct_mutator(fmt._HEADER))
def header(data: bytes) -> str:
    found = fmt.parse_header(data)
    if found is not None:
        size = fmt.HEADER_BYTES - 8
        must(int.from_bytes(data[size : size + 8], "little") == checksum(data[:size]), "header check")
        must(data[:8] == b"KVFSEG1\n" and not any(data[32:40]), "magic, incompatible bits")
        fmt.may_append(data)
    return word(found)


@target(
    lambda: [fmt.pack_entry(entry_of(kind=k), SEED) for k in (1, 2, 3)] + [fmt.pack_entry(entry_of(), 5)],
    struct_mutator(fmt._ENTRY, SEED),
)
def entry(data: bytes) -> str:
    found = fmt.parse_entry(data, SEED)
    if found is not None:
        size = fmt.ENTRY_BYTES - 8
        must(int.from_bytes(data[size : size + 8], "little") == checksum(data[:size], seed=SEED), "entry check")
        must(fmt.pack_entry(found, SEED) == data[: fmt.ENTRY_BYTES], "an entry that cannot be written back")
    return word(found)


@target(
    lambda: [fmt.pack_seal(fmt.Seal(SEGMENT_ID, 2, 40960, 9, b"t" * 16))[:256]], struct_mutator(fmt._SEAL), weight=5
)
def seal(data: bytes) -> str:
    found = fmt.parse_seal(data)
    if found is not None:
        size = fmt.SEAL_BYTES - 8
        must(int.from_bytes(data[size : size + 8], "little") == checksum(data[:size]), "seal check")
    return word(found)


def _segment(folder: Path, sealed: bool, pages: int) -> Image:
    """A segment as kvfs writes it: two namespaces, ``pages`` pages."""
    create(str(folder), to_toml(make_settings("16MiB")), Files())
    directory = Directory(str(folder), Files(), read_only=False)
    made = Header(SEGMENT_ID, STORE_ID, 7)
    writer = SegmentWriter.create(directory, made, 1, 1 << 20)
    for n, layout in enumerate((LAYOUT, PageLayout.opaque(512, 16))):
        identity, group = Identity(f"n{n}", layout, "0123abcd"), layout.groups[0]
        records = [
            Record(bytes([i]) * group.page_bytes, group.leaf_bytes(group.full), group.leaves(group.full),
                   group.page_bytes, 0, i, group.full.pack(), bytes([i]) * 32, bytes([i // RUN * RUN]) * 32, 0)
            for i in range(pages)
        ]  # fmt: skip
        writer.append(records, identity.digest, identity.descriptor_bytes(), 11)
    writer.seal() if sealed else writer.trim()
    writer.close()
    data = (folder / "segments" / file_name(SEGMENT_ID)).read_bytes()
    directory.close()
    blocks = [(at, data[at : at + 4096]) for at in range(0, len(data), 4096)]
    return Image(len(data), [(at, block) for at, block in blocks if any(block)])


LAYOUT = PageLayout.kv(layers=2, kv_heads=2, head_dim=4, dtype="bfloat16", page_tokens=16)


def _segments() -> list[Image]:
    with tempfile.TemporaryDirectory() as folder:
        return [_segment(Path(folder) / f"{n}{sealed}", sealed, n) for n, sealed in ((2, True), (2, False), (45, True))]


def _known_entries(image: Image) -> set[bytes]:
    """Chunk hash and root of every entry anywhere that verifies: the oracle of what a rebuild may name."""
    known, data = set(), image.read(0, min(image.size, 2 << 20))
    for at in range(0, len(data) - fmt.ENTRY_BYTES + 1, 32):
        if data[at] == fmt.KIND_PART and (found := fmt.parse_entry(data[at : at + fmt.ENTRY_BYTES], SEED)):
            known.add(found.chunk_hash + found.root)
    return known


def segment(image: Image) -> str:
    """Scan, adopt, rebuild: what opening a store does with a segment from elsewhere."""
    name = file_name(SEGMENT_ID)
    directory: Any = ImageDirectory()
    directory.files.names[name] = image
    fd = directory.files.open(name, 0, dir_fd=0)
    scan = scan_segment(fd, directory.files)
    settings = make_settings("16MiB")
    txn, report = DictTxn(), Report()
    listed = _Listed(name, "segments", 0)
    with _SegmentBuilder(directory, listed, settings, STORE_ID, True, report, NOW_S, None) as builder:
        for step in builder.steps():
            step(Session(txn, DB, "", NOW_S))
    session = Session(txn, DB, "", NOW_S)
    must(session.check_ledger(), "the ledger does not add up")
    known = _known_entries(image) if txn.dbs.get("pages") else set()
    for key, value in txn.dbs.get("pages", {}).items():
        row = parse_row(key, value)
        must(row is not None, "a rebuild wrote a row that does not verify")
        assert row is not None
        for _, place in row.places():
            must(place.chunk_hash + place.root in known, "a page that no valid entry names")
            must((place.block * 4096 + place.stored_bytes) <= image.size, "a page outside the file")
    for number, seg in session.segments():
        if seg.state == ACTIVE:
            adopt(session, number, seg, b"o" * 16)
    sweep(session, b"\0", 256)
    return f"{word(scan)} {report.pages > 0} {report.skipped_entries > 0} {len(session.segments())}"


def store(image: Image) -> str:
    """A whole store with the segment in it: opened, verified, repaired, emptied."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="kvfs-fuzz-", dir=base) as folder:
        path = Path(folder) / "store"
        create(str(path), to_toml(make_settings("16MiB")), Files())
        (path / "super").write_bytes(pack_super(STORE_ID, 5))
        with (path / "segments" / file_name(SEGMENT_ID)).open("wb") as file:
            for at, data in image.pieces:
                os.pwrite(file.fileno(), data, at)
            with contextlib.suppress(OSError):  # larger than the file system allows
                file.truncate(image.size)
        with kvfs.open(path) as opened:
            must(opened.wait_ready(20.0), "the index is not rebuilt")
            report = opened.verify(repair=True)
            must(opened.wait_ready(20.0), "the index is not rebuilt after a repair")
            opened.gc(target_bytes=0)
            ns = opened.namespace("n0", LAYOUT, "0123abcd")
            put = ns.put(range(32), bytes(2 * LAYOUT.page_bytes))
            must(put.stored == 2 and ns.match(range(32)).tokens == 32, "no new pages")
            crashed = [name for name in opened.stats()["counters"] if name.endswith("_crashed")]
            must(not crashed, f"upkeep: {crashed}")
    return f"{report.bad_segments > 0} {report.bad_pages > 0} {report.index_errors > 0}"


TARGETS["store"] = Target("store", _segments, mutate_segment, store, (KvfsError,), weight=8)
TARGETS["segment"] = Target("segment", _segments, mutate_segment, segment, (OSError,), weight=6)


# -- the index -------------------------------------------------------------------------------


def _places(n: int) -> dict[int, Place]:
    return {
        j: Place(bytes([j]) * 32, bytes([j]) * 16, 0, 0, 1 + j // 20, 4 + 2 * j, 8192, 100 + 4 * j, 1 + j, 0)
        for j in range(n)
    }


def _rows() -> list[bytes]:
    holes = {j: p for j, p in _places(32).items() if j % 5}
    claims = {j: claim(bytes([j]) * 32, 3, NOW_S + 4) for j in range(3)}
    return [pack_row(ROW_KEY, places, 4) for places in (_places(1), _places(32), holes, claims)]


def _mutate_row(chance: random.Random, data: bytes) -> bytes:
    """Change the head or extents; hashes and roots are added or cut so that the length agrees."""
    if len(data) < _HEAD.size or chance.random() < 0.05:
        return flip_bytes(chance, data)
    out = bytearray(data)
    extents = (len(out) - _HEAD.size) // _EXTENT.size
    for _ in range(chance.choice((1, 1, 2, 3))):
        at = _HEAD.size + _EXTENT.size * chance.randrange(min(extents, out[9]) or 1)
        if chance.random() < 0.7 and at + _EXTENT.size <= len(out):
            out[at : at + _EXTENT.size] = mutate_fields(chance, _EXTENT, bytes(out[at : at + _EXTENT.size]))
        elif chance.random() < 0.5:
            out[: _HEAD.size] = mutate_fields(chance, _HEAD, bytes(out[: _HEAD.size]))
        else:
            n = out[9]
            first = [chance.randrange(RUN) for _ in range(n)]
            for i in range(n):
                at = _HEAD.size + _EXTENT.size * i
                if at + 2 <= len(out):
                    out[at : at + 2] = bytes([first[i], chance.choice((1, 2, RUN - first[i]))])
    present = 0
    for i in range(out[9] if chance.random() < 0.7 else 0):
        at = _HEAD.size + _EXTENT.size * i
        if at + 2 <= len(out):
            present |= (1 << out[at + 1]) - 1 << out[at]
    if 0 < present < 1 << 32:
        out[12:16] = present.to_bytes(4, "little")
        size = _HEAD.size + _EXTENT.size * out[9] + 48 * present.bit_count()
        out = bytearray(bytes(out)[:size].ljust(size, b"h"))
    if chance.random() < 0.95:
        out[:8] = checksum(bytes(out[8:]), seed=int.from_bytes(ROW_KEY[:8], "little")).to_bytes(8, "little")
    return bytes(out)


@target(_rows, _mutate_row, weight=15)
def row(data: bytes) -> str:
    found = parse_row(ROW_KEY, data)
    native = library.loaded()
    if native is not None:
        accepted = bool(native.held.kvfs_is_row(ROW_KEY, data, len(data)))
        must(accepted == (found is not None), f"the native library says {accepted}")
    if found is None:
        return "absent"
    seed = int.from_bytes(ROW_KEY[:8], "little")
    must(int.from_bytes(data[:8], "little") == checksum(data[8:], seed=seed), "row check")
    places = dict(found.places())
    must(sum(1 << j for j in places) == found.present, "presence")
    wanted = b"".join(places[j].chunk_hash if j in places else bytes(32) for j in range(RUN))
    must(found.matches(wanted, RUN) == found.present, "matches")
    for e, skipped, count, roots in found.stretches(found.present):
        must(len(roots) == 16 * count and skipped + count <= e.chunks, "stretches")
    again = parse_row(ROW_KEY, pack_row(ROW_KEY, places, found.leaves))
    must(again is not None and dict(again.places()) == places, "a row that cannot be written back")
    txn = DictTxn()
    txn.put(ROW_KEY, data, db="pages")
    session = Session(txn, DB, "", NOW_S)
    session.add_segment(SegmentRow(SEGMENT_ID, bytes(16), bytes(16), SEALED, 0, 1, 40, 1 << 20, 1 << 19, 4096, 0))
    forget(session, [ROW_KEY], {(1, 1): bytes(32)})
    sweep(session, b"\0", 10)
    return f"accepted {len(found.extents)}"


_HASHES = b"".join(bytes([j]) * 32 for j in range(100))
_DIGEST, _GROUP, _WHOLE = b"D" * 32, "full", Part(0, 2, 0, 2)


def _page_key(chunk: int) -> bytes:
    return page_key(_DIGEST, _GROUP, _HASHES[32 * chunk : 32 * chunk + 32]) + _WHOLE.pack()


def _indexes() -> list[bytes]:
    """An index of a prompt of three runs and a part, with a fork in the second; and one with a tree of two levels."""
    found = []
    for others in (0, 60):
        with tempfile.TemporaryFile() as file, contextlib.closing(open_environment(file.fileno(), 1 << 22)) as env:
            opened = open_tables(env, create=True)
            with env.begin(write=True) as txn:
                session = Session(txn, opened, "", NOW_S)
                for state in (SEALED, ACTIVE):
                    session.add_segment(SegmentRow(SEGMENT_ID, b"o" * 16, bytes(16), state, 0, 1, 40, 1, 9, 4096, 0))
                places = {
                    j: Place(_HASHES[32 * j : 32 * j + 32], b"r" * 16, 0, 0, 1, 4 + 2 * j, 8192, 100 + 4 * j, j, 0)
                    for j in range(100)
                }
                for first, end in ((0, 32), (32, 50), (50, 64), (64, 96), (96, 100)):
                    base = first // RUN * RUN
                    row = {j - base: places[j] for j in range(first, end)}
                    session.put_row(_page_key(first), pack_row(_page_key(first), row, 4))
                for n in range(others):
                    session.put_row(bytes([n]) * 40, pack_row(bytes([n]) * 40, {0: places[0]}, 4))
                session.put_namespace(_DIGEST, b"descriptor", 0, _WHOLE.pack())
            found.append(os.pread(file.fileno(), 1 << 22, 0))
    return found


def _mutate_index(chance: random.Random, data: bytes) -> bytes:
    """Change words: of a page's head, of its offsets, of a node's head, or of a meta page; anything else seldom."""
    if len(data) < 2 * PAGE or chance.random() < 0.05:
        return flip_bytes(chance, data)
    out = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4))):
        page = PAGE * chance.randrange(len(out) // PAGE)
        slots = max(1, min(PAGE, int.from_bytes(out[page + 12 : page + 14], "little")) - 16)
        slot = page + 16 + chance.randrange(slots) // 2 * 2
        node = page + min(PAGE - 8, int.from_bytes(out[slot : slot + 2], "little"))
        at = chance.choice(
            (page + chance.randrange(16), slot, node + chance.randrange(8), page + chance.randrange(PAGE))
        )
        number = chance.choice((0, 1, 2, chance.randrange(1 << 16), len(out) // PAGE, PAGE, PAGE - 1, 0xFFFF))
        out[at : at + 2] = number.to_bytes(2, "little")[: max(0, len(out) - at)]
    return bytes(out[: chance.randrange(len(out))] if chance.random() < 0.02 else out)


@target(_indexes, _mutate_index, HandOverError)
def index(data: bytes) -> str:
    """The file of an index, read by the native library: what it answers must be rows that verify."""
    native = library.loaded()
    if native is None:
        return "read by Python alone"
    with tempfile.TemporaryFile() as file, open(__file__, "rb") as current:  # which stands for CURRENT
        file.write(data)
        file.flush()
        st = os.fstat(current.fileno())
        stamp = st.st_dev, st.st_ino, st.st_mtime_ns, st.st_ctime_ns
        return _walked(IndexWalker(native, current.fileno(), file.fileno(), stamp))


def _walked(walker: IndexWalker) -> str:
    txn, part = walker.last_commit(), _WHOLE.pack()
    parts = walker.parts(_DIGEST, 0, 16, txn)
    must(len(parts) <= 16 and all(len(one) == 8 for one in parts), "parts")
    lookup = PreparedLookup(_HASHES, RUN, page_prefix(_DIGEST, _GROUP), [part], [[0]], True)
    must(len(walker.there(lookup, 0, 1, 100)) == 100, "there")
    at = found = 0
    while at < 4:
        walked = walker.walk(lookup, at, 4, 256, NOW_S, txn, stop_at_gap=False)
        must(at < walked.end <= 4, "progress")
        block = HitBlock(walked.rows, walked.values, [_WHOLE])
        for run in range(at, walked.end):
            for hit in block.of(run):
                row = hit.row()
                wanted = _HASHES[32 * RUN * run : 32 * RUN * (run + 1)]
                must(row is not None, "a row that is none")
                must(row is not None and not hit.bits & ~row.matches(wanted, len(wanted) // 32), "bits of other chunks")
                found += hit.bits.bit_count()
        at = walked.end
    return f"accepted {found}"


_TABLES: dict[int, tuple[struct.Struct, str, bytes]] = {
    0: (tables._SEGMENT, "segments", tables.segment_key(1)),
    1: (tables._LEDGER, "meta", tables.LEDGER_KEY),
    2: (tables._USED, "meta", b"quota/12345678"),
}


def _table_rows() -> list[bytes]:
    first = SegmentRow(SEGMENT_ID, b"o" * 16, b"12345678" * 2, ACTIVE, 0, 1, 3, 1 << 18, 1 << 17, 4096, 0)
    bodies = [tables._SEGMENT.pack(*first), tables._LEDGER.pack(1 << 18, 2, 0, 0), tables._USED.pack(1 << 18)]
    return [bytes([n]) + tables._pack(body) for n, body in enumerate(bodies)]


def _mutate_table(chance: random.Random, data: bytes) -> bytes:
    kind = data[:1] if data[:1] and data[0] in _TABLES else b"\0"
    return kind + struct_mutator(_TABLES[kind[0]][0])(chance, data[1:])


@target(_table_rows, _mutate_table, lmdb.Error)  # on which the index discards a generation
def table(data: bytes) -> str:
    """One damaged or forged row of the small tables among valid ones; what a writer and the evictor do then."""
    if not data or data[0] not in _TABLES:
        return "absent"
    txn = DictTxn()
    session = Session(txn, DB, "", NOW_S)
    first = SegmentRow(SEGMENT_ID, b"o" * 16, b"12345678" * 2, ACTIVE, 0, 1, 3, 1 << 18, 1 << 17, 4096, 0)
    session.add_segment(first)
    txn.put(_TABLES[data[0]][2], data[1:], db=_TABLES[data[0]][1])
    session = Session(txn, DB, "", NOW_S)
    rows = session.segments()
    session.segments_in(ACTIVE)
    session.segments_in(DROPPED)
    session.quota_used(b"12345678")
    session.check_ledger()
    found = session.segment(1)
    before = session.ledger()
    session.add_segment(first._replace(segment_id=OTHER_ID, class_id=bytes(16)))
    must(session.segment(1) == found, "a new segment took the number of an existing one")
    must(session.ledger().used == before.used + first.allocated, "the charge")
    return f"{data[0]} {word(found)} {len(rows)}"


# -- small files -----------------------------------------------------------------------------


@target(lambda: [pack_super(STORE_ID, 5)], lambda c, d: mutate_json(c, d, mend_super), FormatError)
def super_file(data: bytes) -> str:
    parse_super(data, "/store", read_only=False)
    body = json.loads(data)
    check = body.pop("check")
    text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    must(check == f"{checksum(text):016x}", "super check")
    must(not body["features"]["incompatible"] and body["format"] == 1, "features, format")
    return "accepted"


@target(lambda: [json.dumps(State("0" * 16, "boot", 1, 2, True, "f" * 16)._asdict()).encode()], mutate_json)
def state(data: bytes) -> str:
    found = read_state(ImageDirectory(state=Image.of(data)))  # type: ignore[arg-type]
    if found is not None:
        must([type(v) for v in found] == [str, str, int, int, bool, str], "types")
    return word(found)


@target(lambda: [b"0123456789abcdef"], flip_bytes, weight=2)
def current(data: bytes) -> str:
    fake: Any = type("Fake", (), {"_directory": ImageDirectory(CURRENT=Image.of(data))})
    found = Index._read_current(fake)
    must(found is None or (len(found) == 16 and set(found) <= set("0123456789abcdef")), "name of a generation")
    return word(found)


_SETTINGS = b"""# settings
capacity = "64MiB"
segment_bytes = 262144
index_bytes = "2MiB"
sync = "batch"
mode = "cache"
[quota."salt:0123"]
guaranteed = "1MiB"
cap = "2MiB"
ttl = "30d"
"""


@target(lambda: [_SETTINGS, to_toml(make_settings("1GiB"))], mutate_toml, ConfigError, NoSpaceError, weight=4)
def settings(data: bytes) -> str:
    found: Settings = parse_toml(data, "/store/kvfs.toml")
    must(found.capacity_bytes >= 8 * found.segment_bytes, "room for eight segments")
    must(parse_toml(to_toml(found), "again") == found, "settings that cannot be written back")
    return "accepted"


_PIN = {"name": "p", "namespace": "ab" * 32, "tokens": 32, "created_us": 5, "segments": ["00" * 16, "11" * 16]}


@target(lambda: [json.dumps(_PIN).encode()], mutate_json)
def pin(data: bytes) -> str:
    directory = ImageDirectory()
    directory.files.names |= {"0" * 16: Image.of(data), "1" * 16: Image.of(json.dumps(_PIN).encode())}
    directory.files.names |= {"readme": Image.of(data), "0" * 15 + "g": Image.of(data)}
    protected = pinned_segments(directory)
    must(all(len(s) == 16 for s in protected) and bytes.fromhex("11" * 16) in protected, "segments of pins")
    return f"{len(list_pins(directory))}"


@target(lambda: [pack_u64([1, 2, 3]), b"", pack_u64([NOW_S * 1_000_000] * 50)], flip_bytes, weight=5)
def stamps(data: bytes) -> str:
    directory: Any = ImageDirectory()
    name = SEGMENT_ID.hex()
    odd = {"": Image.of(b""), "z" * 32: Image.of(data), "../" + "a" * 29: Image.of(data), "\udcff" * 32: Image.of(data)}
    directory.files.names |= {name: Image(len(data) + (1 << 40 if data[:1] == b"\xff" else 0), [(0, data)]), **odd}
    recency = AccessTimes(directory)
    now = directory.files.now_us()
    found = recency.stamps(SEGMENT_ID, [7, 8, 9])
    must(len(found) == 3 and all(0 < stamp <= now for stamp in found), "access times in the future")
    recency.was_used(SEGMENT_ID, 2)
    recency.sweep({SEGMENT_ID})
    must(set(directory.files.names) == {name}, "access times of unknown segments stay")
    return "read"


@target(lambda: [f"boot-a {18 * 10**14:020d}\n".encode().ljust(64)], flip_bytes, StoreLockedError, weight=5)
def heartbeat(data: bytes) -> str:
    directory: Any = ImageDirectory()
    directory.files.names |= {"ab" * 16 + ".live": Image.of(data), "x.live": Image.of(data)}
    fake: Any = Liveness.__new__(Liveness)
    fake._files, fake._run, fake._directory, fake.owner, fake.boot = directory.files, 0, directory, bytes(16), "another"
    fake.refuse_foreign_kernel()
    return "alone"


# -- stored payloads -------------------------------------------------------------------------

_PAYLOAD = struct.Struct("<BI")  # codec, bytes of the page
_NUMBERS = b"".join(struct.pack("<H", 0x3F00 | i * 37 & 0xFF) for i in range(4096))


def _payloads() -> list[bytes]:
    pages = [(codec, element, _NUMBERS) for codec, element in ((1, 0), (2, 1), (2, 2), (2, 4))] + [(1, 0, bytes(8192))]
    made = [(codecs.encode(page, codec, element), len(page)) for codec, element, page in pages]
    return [_PAYLOAD.pack(used, nbytes) + bytes(stored) for (used, stored), nbytes in made]


def _mutate_payload(chance: random.Random, data: bytes) -> bytes:
    head, stored = data[: _PAYLOAD.size], data[_PAYLOAD.size :]
    if len(head) < _PAYLOAD.size or chance.random() < 0.1:
        return flip_bytes(chance, data)
    if chance.random() < 0.2:
        head = mutate_fields(chance, _PAYLOAD, head)
    start = chance.choice((0, 0, chance.randrange(len(stored) + 1)))  # headers of planes and frames stand first
    return head + stored[:start] + flip_bytes(chance, stored[start : start + 32]) + stored[start + 32 :]


@target(_payloads, _mutate_payload, codecs.CodecError, weight=15)
def payload(data: bytes) -> str:
    """Stored bytes of a page: they decode to exactly one page and write nothing outside it, or raise."""
    if len(data) < _PAYLOAD.size:
        return "too short"
    codec, nbytes = _PAYLOAD.unpack_from(data)
    nbytes %= 1 << 20
    guarded = bytearray(b"\xa5" * (nbytes + 64))
    stored = data[_PAYLOAD.size :]
    try:
        codecs.decode(stored, codec, memoryview(guarded)[:nbytes])
    finally:
        must(guarded[nbytes:] == b"\xa5" * 64, "bytes behind the page")
    page = bytes(guarded[:nbytes])
    must(codecs.decoded(stored, codec, nbytes) == page, "another page the second time")
    used, again = codecs.encode(page, codec, 2)
    must(codecs.decoded(bytes(again), used, nbytes) == page, "a page that cannot be stored again")
    return f"accepted {codec}"


# -- descriptors -----------------------------------------------------------------------------


def _identities() -> list[bytes]:
    hybrid = PageLayout.from_hf_config(HF_CONFIG)
    layouts = (LAYOUT, hybrid, PageLayout.opaque(512, 16))
    return [Identity(f"n{n}", one, "0123abcd", rope={"theta": 1e6}).descriptor_bytes() for n, one in enumerate(layouts)]


HF_CONFIG = {
    "model_type": "gemma3_text", "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 64, "hidden_size": 512, "torch_dtype": "bfloat16", "sliding_window": 512, "sliding_window_pattern": 6,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"], "rope_theta": 10000.0, "vocab_size": 1000,
}  # fmt: skip
MLA_CONFIG = {
    "model_type": "deepseek_v3", "num_hidden_layers": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "num_attention_heads": 16, "torch_dtype": "bfloat16", "hidden_size": 512,
}  # fmt: skip


@target(_identities, mutate_json, weight=15)
def descriptor(data: bytes) -> str:
    found = parse_descriptor(data)
    if found is None:
        return "absent"
    must(found.digest == digest_of(data), "digest")
    must(PageLayout.from_descriptor(found.layout.descriptor()) == found.layout, "a layout that cannot be written back")
    for group in found.layout.groups:
        must(group.part_bytes(group.full) == group.page_bytes <= 1 << 30, "bytes of a page")
    return f"accepted {len(found.layout.groups)}"


@target(lambda: [json.dumps(json.loads(d)["layout"]).encode() for d in _identities()], mutate_json, ConfigError)
def layout(data: bytes) -> str:
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return "no JSON"
    found = PageLayout.from_descriptor(tree)
    must(found.descriptor() == tree, "another descriptor")
    found.digest()
    return f"accepted {len(found.groups)}"


@target(lambda: [Part(0, 2, 1, 3).pack()], flip_bytes, ConfigError, weight=2)
def part(data: bytes) -> str:
    must(Part.unpack(data).pack() == data, "a part that cannot be written back")
    return "accepted"


@target(lambda: [json.dumps(c).encode() for c in (HF_CONFIG, MLA_CONFIG)], mutate_json, ConfigError, weight=6)
def hf_config(data: bytes) -> str:
    """The config.json of a model, which is untrusted."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return "no JSON"
    found = PageLayout.from_hf_config(tree)
    return f"accepted {len(found.groups)}"


_IDENTITY = {"name": "n", "revision": "0123abcd", "salt": "", "rope": {}, "adapter": "", "epoch": 0, "extra": {}}


@target(lambda: [json.dumps(_IDENTITY).encode()], mutate_json, ConfigError, weight=6)
def identity(data: bytes) -> str:
    """Arguments of an engine for an identity; an accepted one must be read back from its descriptor."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return "no JSON"
    if not isinstance(tree, dict) or not set(_IDENTITY) >= set(tree) >= {"name", "revision"}:
        return "no arguments"
    found = Identity(layout=LAYOUT, **tree)
    again = parse_descriptor(found.descriptor_bytes())
    must(again is not None and again.digest == found.digest, "an identity that cannot be read back")
    return "accepted"
