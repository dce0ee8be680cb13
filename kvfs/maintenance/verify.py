"""Checks a store: structure of every segment, the bytes of its pages, and the index against both.

Safe while workers run: published bytes never change, and what is being written is not checked. A bad record that the
index no longer names is no problem, since no lookup finds it. ``repair`` removes bad pages from the index, moves files
that are not kvfs's to quarantine/, and retires an index that contradicts the segments, so that it is rebuilt.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import stat
import struct
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvfs.context import Context
from kvfs.directory.root import Directory, translate_os_errors
from kvfs.errors import ConfigError, CorruptError, IndexUnavailableError, KvfsError
from kvfs.format import codec as codecs
from kvfs.format import segment as fmt
from kvfs.format.checksums import LEAF_BYTES, leaf_table, root_of
from kvfs.format.codec import CodecError, CodecMemoryError
from kvfs.format.segment import Entry, Header
from kvfs.index.deadlines import COMMIT_SECONDS
from kvfs.index.row_updates import forget
from kvfs.index.rows import CLAIM, Place, parse_row
from kvfs.index.session import Session
from kvfs.index.tables import ACTIVE, DROPPED, SegmentRow
from kvfs.pages.identity import Described, parse_descriptor
from kvfs.pages.layout import Part
from kvfs.segments.open_segments import OpenSegment
from kvfs.segments.scan import Scan, read_descriptor, scan_segment
from kvfs.segments.writer import file_name
from kvfs.system.descriptors import opened
from kvfs.system.files import Files

ROWS_PER_HOLD = 256  # index rows per transaction, so that writers wait little
PROBLEMS_MAX = 1000  # lines of a report
QUARANTINE_FILES_MAX = 64  # files in quarantine/: they are not charged to the store
_PLACE = struct.Struct("<QIB")  # offset of a payload, its stored bytes, its codec
_SEGMENT_NAME = re.compile(r"[0-9a-f]{32}\.kvs\Z")


@dataclass
class Verification:
    """What was checked and what was found. ``problems`` has a line for each finding, at most PROBLEMS_MAX."""

    segments: int = 0
    pages: int = 0
    bytes: int = 0
    index_pages: int = 0
    bad_pages: int = 0
    bad_segments: int = 0
    index_errors: int = 0
    foreign_files: int = 0
    repaired: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not (self.bad_pages or self.bad_segments or self.index_errors or self.foreign_files)

    def note(self, text: str) -> None:
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(text)


class Verifier:
    """One run over a store: owns its findings, and repairs what it found. One per call."""

    def __init__(
        self, context: Context, sample: float, seed: int,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:  # fmt: skip
        if not isinstance(sample, (int, float)) or not 0.0 <= sample <= 1.0:
            raise ConfigError(f"sample is {sample!r}: pass a share from 0 (structure only) to 1 (every page)")
        self._c = context
        self._sample = sample
        self._progress = progress  # (bytes of segments checked, all bytes of segments)
        self._total = self._done = 0
        self._random = random.Random(seed)
        self.report = Verification()
        self._bad: dict[tuple[int, int], bytes] = {}  # segment number, seq -> digest of the namespace
        self._why: dict[tuple[int, int], str] = {}
        self._named: set[tuple[int, int]] = set()  # bad records that the index names
        self._foreign: list[str] = []  # names in segments/ that are not of segments
        self._records: dict[int, dict[int, bytes]] = {}  # segment number -> seq -> check of hash, root, place
        self._generation = ""  # of the index that was checked: in another one, numbers mean other segments

    def run(self) -> Verification:
        """Check everything; IndexUnavailableError if the index does not answer."""
        rows, self._generation = self._c.index.read(lambda s: (s.segments(), s.generation), COMMIT_SECONDS)
        if not self._c.index.read(lambda s: s.check_ledger(), COMMIT_SECONDS):
            self.report.index_errors += 1
            self.report.note("index: the ledger is not the sum of its segments")
        live = [(number, row) for number, row in rows if row.state != DROPPED]
        self._total = sum(row.allocated for _, row in live)
        for number, row in live:
            self._segment(number, row)
            self._done += row.allocated
            self._progress(self._done, self._total)
        self._index()
        for place in sorted(self._named):
            self.report.bad_pages += 1
            self.report.note(self._why[place])
        self._check_names({row.segment_id for _, row in rows})
        return self.report

    # -- segments ----------------------------------------------------------------------------

    def _segment(self, number: int, row: SegmentRow) -> None:
        held = self._c.segments.acquire(number, row.segment_id, self._c.index.generation)
        if held is None:
            if self._still_there(number, row) and (row.records or self._is_refused(row)):
                self._bad_segment(number, row, "cannot be opened")
            return
        try:
            scan = scan_segment(held.fd, self._c.files, records_max=None if row.state != ACTIVE else row.records)
            if scan is None or scan.header.segment_id != row.segment_id or scan.header.store_id != self._c.store_id:
                if row.records:
                    self._bad_segment(number, row, "its header is damaged or another segment's")
                return
            self.report.segments += 1
            if len(scan.entries) < row.records:
                self._bad_segment(number, row, f"{row.records} records are published, {len(scan.entries)} can be read")
            self._pages(number, row, held, scan)
        except OSError as exc:
            self._bad_segment(number, row, str(exc.strerror))

    def _is_refused(self, row: SegmentRow) -> bool:
        """Whether the file exists but cannot be read: then a rebuild has named no page of it."""
        segments = self._c.directory.sub("segments")
        try:
            with opened(self._c.files, file_name(row.segment_id), os.O_RDONLY, dir_fd=segments):
                return False
        except OSError as exc:
            return exc.errno in (errno.EACCES, errno.EPERM, errno.EIO)

    def _still_there(self, number: int, row: SegmentRow) -> bool:
        now = self._c.index.read(lambda s: s.segment(number), COMMIT_SECONDS)
        return now is not None and now.state != DROPPED and now.segment_id == row.segment_id

    def _bad_segment(self, number: int, row: SegmentRow, why: str) -> None:
        self.report.bad_segments += 1
        self.report.note(f"segment {row.segment_id.hex()}: {why}")

    def _pages(self, number: int, row: SegmentRow, held: OpenSegment, scan: Scan) -> None:
        known: dict[int, Described | None] = {}
        records = self._records.setdefault(number, {})
        for entry in scan.parts():
            records[entry.seq] = _fingerprint(entry)
            if self._random.random() >= self._sample:
                continue
            if entry.ns_seq not in known:
                known[entry.ns_seq] = self._described(held, scan, entry.ns_seq)
            self.report.pages += 1
            self.report.bytes += entry.stored_bytes
            why = self._page(held, entry, known[entry.ns_seq])
            if why:
                self._bad[number, entry.seq] = _digest(scan, entry)
                where = f"segment {row.segment_id.hex()} record {entry.seq}"
                self._why[number, entry.seq] = f"{_name(known[entry.ns_seq], entry)}{where}: {why}"
            self._progress(self._done + min(row.allocated, entry.payload + entry.stored_bytes), self._total)

    def _described(self, held: OpenSegment, scan: Scan, ns_seq: int) -> Described | None:
        if ns_seq >= len(scan.entries) or scan.entries[ns_seq].kind != fmt.KIND_NAMESPACE:
            return None
        data = read_descriptor(held.fd, self._c.files, scan.entries[ns_seq])
        return parse_descriptor(data) if data is not None else None

    def _page(self, held: OpenSegment, entry: Entry, described: Described | None) -> str:
        """What is wrong with a record; empty if nothing is."""
        if described is None or entry.group >= len(described.layout.groups):
            return "its namespace record is damaged"
        if entry.codec not in codecs.NAMES:
            return f"codec {entry.codec} is unknown"
        group = described.layout.groups[entry.group]
        try:
            part = Part.unpack(entry.part)
            raw_bytes = group.part_bytes(part)
            if not codecs.fits(entry.codec, entry.stored_bytes, raw_bytes):
                return "its size contradicts the layout"
            stored = self._c.segments.read_bytes(held, entry.stored_bytes, entry.payload)
            payload = codecs.decoded(stored, entry.codec, raw_bytes)
            table = self._c.files.read(held.fd, LEAF_BYTES * group.leaves(part), entry.leaves)
        except CodecMemoryError:  # the page may be good, so a repair must not remove it
            raise self._no_memory() from None
        except (ConfigError, CodecError) as exc:
            return str(exc)
        except OSError as exc:
            if exc.errno == errno.ENOMEM:
                raise self._no_memory() from None
            return f"cannot be read ({exc.strerror})"
        if leaf_table(payload, group.leaf_bytes(part)) != table:
            return "payload and leaf checksums disagree"
        return "" if root_of(table) == entry.root else "leaf checksums and root disagree"

    def _no_memory(self) -> KvfsError:
        return KvfsError(f"{self._c.directory.path}: too little memory to check a page; verify when more is free")

    # -- index -------------------------------------------------------------------------------

    def _index(self) -> None:
        for key, value in self._rows():
            row = parse_row(key, value)
            if row is None:
                self.report.index_errors += 1
                self.report.note(f"index row {key.hex()[:16]}: damaged")
                continue
            for _, place in row.places():
                if not place.flags & CLAIM and place.segment in self._records:
                    self.report.index_pages += 1
                    self._check_place(key, place)

    def _check_place(self, key: bytes, place: Place) -> None:
        if (place.segment, place.seq) in self._why:
            self._named.add((place.segment, place.seq))
        recorded = self._records[place.segment].get(place.seq)
        if recorded is not None and recorded != _fingerprint_of(place):
            self.report.index_errors += 1
            self.report.note(f"index row {key.hex()[:16]}: contradicts record {place.seq} of segment {place.segment}")

    def _rows(self) -> Iterator[tuple[bytes, bytes]]:
        start = b"\0"
        while True:
            batch = self._c.index.read(partial(_page_rows, start=start), COMMIT_SECONDS)
            yield from batch
            if len(batch) < ROWS_PER_HOLD:
                return
            start = batch[-1][0] + b"\0"

    def _check_names(self, known: set[bytes]) -> None:
        """Find files in segments/ that the index does not know; the newest may have been made a moment ago."""
        folder = self._c.directory.sub("segments")
        names = self._c.files.listdir(folder)
        now = {row.segment_id for _, row in self._c.index.read(lambda s: s.segments(), COMMIT_SECONDS)} | known
        ours = {file_name(segment_id) for segment_id in now}
        for name in names:
            if name in ours:
                continue
            if not _SEGMENT_NAME.match(name) or not self._is_file(name, folder):
                self._foreign.append(name)
                self.report.foreign_files += 1
                self.report.note(f"segments/{name}: not a file of kvfs")
            else:
                self.report.bad_segments += 1
                self.report.note(f"segments/{name}: the index does not know it")

    def _is_file(self, name: str, folder: int) -> bool:
        """A link or a folder is no segment, whatever its name: a rebuilt index does not know it either."""
        try:
            return stat.S_ISREG(self._c.files.stat(name, dir_fd=folder).st_mode)
        except OSError:
            return True

    # -- repair ------------------------------------------------------------------------------

    def repair(self) -> None:
        """Remove bad pages from the index; retire an index that contradicts the segments."""
        self._quarantine()
        if not self._is_same_index():
            self.report.note("index: retired and rebuilt meanwhile: check again")
            return
        if self._bad:
            keys = [key for key, value in self._rows() if _names(key, value, self._bad)]
            for first in range(0, len(keys), ROWS_PER_HOLD):
                some = keys[first : first + ROWS_PER_HOLD]
                self.report.repaired += self._c.index.write(partial(self._forget, some), COMMIT_SECONDS)
        if self.report.index_errors or self.report.bad_segments:
            try:
                self._c.index.retire()
            except IndexUnavailableError as exc:
                self.report.note(f"index: not rebuilt ({exc})")
            else:
                self.report.repaired += self.report.index_errors + self.report.bad_segments

    def _is_same_index(self) -> bool:
        try:
            return self._c.index.read(lambda s: s.generation, COMMIT_SECONDS) == self._generation
        except IndexUnavailableError:
            return False

    def _forget(self, keys: Sequence[bytes], session: Session) -> int:
        return len(forget(session, keys, self._bad)) if session.generation == self._generation else 0

    def _quarantine(self) -> None:
        """Move files that are not kvfs's to quarantine/, up to its limit; they are never deleted."""
        files, directory = self._c.files, self._c.directory
        source, target = directory.sub("segments"), directory.sub("quarantine")
        room = QUARANTINE_FILES_MAX - len(files.listdir(target))
        for name in self._foreign:
            if room <= 0:
                self.report.note(f"segments/{name}: stays, quarantine/ is full; remove its files by hand")
                continue
            try:
                files.rename(name, f"{files.now_us()}-{files.random(4).hex()}", src_dir_fd=source, dst_dir_fd=target)
            except OSError as exc:
                self.report.note(f"segments/{name}: stays ({exc.strerror})")
                continue
            room -= 1
            self.report.repaired += 1


def restore_super(path: str, files: Files) -> bool:
    """Write a lost super file, with the store id that most segments name; False if it is not lost.

    CorruptError if there are segments and none of them has a readable header.
    """
    with translate_os_errors(path), contextlib.closing(Directory(path, files, read_only=False)) as directory:
        try:
            directory.check_unused()
            return False
        except CorruptError:
            headers = list(_headers(directory))
        ids = Counter(header.store_id for header in headers)
        if not ids and files.listdir(directory.sub("segments")):
            raise CorruptError(f"{path}: no segment has a readable header, so the id of the store is lost")
        store_id = ids.most_common(1)[0][0] if ids else files.random(16)
        created = [header.created_us for header in headers if header.store_id == store_id]
        directory.publish_super(store_id, min(created, default=files.now_us()))
        return True


def _headers(directory: Directory) -> Iterator[Header]:
    """The headers of all segments that have one."""
    folder = directory.sub("segments")
    for name in filter(_SEGMENT_NAME.match, directory.files.listdir(folder)):
        with contextlib.suppress(OSError), opened(directory.files, name, os.O_RDONLY, dir_fd=folder) as fd:
            header = fmt.parse_header(directory.files.read(fd, fmt.BLOCK, 0))
            if header is not None and file_name(header.segment_id) == name:
                yield header


def _page_rows(session: Session, start: bytes) -> list[tuple[bytes, bytes]]:
    with session.txn.cursor(db=session.db.pages) as cursor:
        found = []
        if cursor.set_range(start):
            for key, value in cursor:
                found.append((key, value))
                if len(found) == ROWS_PER_HOLD:
                    break
        return found


def _digest(scan: Scan, entry: Entry) -> bytes:
    """Digest of the namespace that an entry belongs to; empty if its namespace record is damaged."""
    named = scan.entries[entry.ns_seq] if entry.ns_seq < len(scan.entries) else None
    return named.chunk_hash if named is not None and named.kind == fmt.KIND_NAMESPACE else b""


def _name(described: Described | None, entry: Entry) -> str:
    """What a page is to people: its namespace and tokens; empty if its namespace record is damaged."""
    if described is None:
        return ""
    step = described.layout.page_tokens
    return f"{described.label} tokens {entry.chunk * step}-{(entry.chunk + 1) * step}, "


def _names(key: bytes, value: bytes, wrong: Container[tuple[int, int]]) -> bool:
    row = parse_row(key, value)
    return row is not None and any((p.segment, p.seq) in wrong for _, p in row.places())


def _fingerprint(entry: Entry) -> bytes:
    place = _PLACE.pack(entry.payload, entry.stored_bytes, entry.codec)
    return root_of(entry.chunk_hash + entry.root + place)


def _fingerprint_of(place: Place) -> bytes:
    packed = _PLACE.pack(place.block * fmt.BLOCK, place.stored_bytes, place.codec)
    return root_of(place.chunk_hash + place.root + packed)
