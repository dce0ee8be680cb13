"""Builds a new generation of the index from the segments, which are the truth.

Other work goes on meanwhile: while there is no current generation, lookups miss and saves decline. Only tables are
read; payloads are verified when they are used.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import lmdb

from kvfs.directory import io_mode
from kvfs.directory.config import Settings
from kvfs.directory.liveness import NO_OWNER
from kvfs.directory.purge_marks import PurgeMarks
from kvfs.directory.root import Directory
from kvfs.errors import ConfigError, FormatError, IndexUnavailableError
from kvfs.format import codec as codecs
from kvfs.format import segment as fmt
from kvfs.format.checksums import leaf_table, root_of
from kvfs.format.codec import CodecError
from kvfs.format.segment import Entry, PurgeMark
from kvfs.index import ledger
from kvfs.index.environment import FULL, Index
from kvfs.index.lmdb_files import discard_generation, extend_to_last_page, open_environment, open_tables
from kvfs.index.row_updates import Publish, publish
from kvfs.index.rows import RUN, Place
from kvfs.index.session import PAGE, Session
from kvfs.index.tables import ACTIVE, DROPPED, SEALED, SegmentRow
from kvfs.pages.chunk_hash import page_key
from kvfs.pages.identity import Described, parse_descriptor
from kvfs.pages.layout import Group, Part
from kvfs.segments.scan import Scan, covered_end, read_descriptor, scan_segment
from kvfs.system.descriptors import Descriptor, opened
from kvfs.system.files import SHORT_OF, Files

_SEGMENT_NAME = re.compile(r"[0-9a-f]{32}\.kvs\Z")
_GENERATION = re.compile(r"[0-9a-f]{16}\Z")
ENTRIES_PER_COMMIT = 20_000  # bounds the memory of a transaction, and the time until ``cancelled`` is asked again
PAGES_PER_ENTRY = 16  # index pages that one entry may copy, twice: what a commit frees, the next but one may use


@dataclass
class Report:
    """What a rebuild found."""

    segments: int = 0
    pages: int = 0
    duplicates: int = 0
    damaged_segments: int = 0
    unreadable_segments: int = 0
    skipped_entries: int = 0
    expired: int = 0
    purged: int = 0
    torn: int = 0  # records whose bytes a power failure lost
    unnamed: int = 0  # oldest records, for which the index has no room
    problems: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        if len(self.problems) < 100:
            self.problems.append(text)


class _Listed(NamedTuple):
    name: str
    folder: str
    created_us: int  # 0 if it has no valid header


def rebuild(
    directory: Directory, index: Index, settings: Settings, store_id: bytes, *, alone: bool,
    cancelled: Callable[[], bool],
) -> Report | None:  # fmt: skip
    """Build and install a generation; None if another process is building one or has just built one.

    ``alone``: no other process has the store open, so unsealed segments may be appended to again. IndexUnavailableError
    is raised between two steps when ``cancelled`` returns true.
    """
    files = directory.files
    run = directory.sub("run")
    try:
        files.stat("rebuild", dir_fd=run)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):
            files.close(files.create("rebuild", directory.file_mode, dir_fd=run))
    with opened(files, "rebuild", os.O_RDWR, dir_fd=run) as lock:
        if not files.flock(lock, fcntl.LOCK_EX) or not index.is_missing(timeout=5.0):
            return None  # another process builds one, or has built one meanwhile
        _remove_stale_generations(directory)
        name = files.random(8).hex()
        index_fd = directory.sub("index")
        files.mkdir(name, directory.dir_mode, dir_fd=index_fd)
        try:
            with opened(files, name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=index_fd) as folder:
                files.close(files.create("users", directory.file_mode, dir_fd=folder))
                with contextlib.closing(
                    Descriptor.create(files, "data.mdb", directory.file_mode, dir_fd=folder)
                ) as data:
                    report = build(directory, data.fd, settings, store_id, alone=alone, cancelled=cancelled)
            index.install(name, timeout=5.0)
        except BaseException as exc:
            # after a timeout it may still become current; if not, the next rebuild removes it
            if not isinstance(exc, TimeoutError) and _current(directory) != name.encode():
                discard_generation(files, index_fd, name)
            if isinstance(exc, lmdb.Error):
                raise IndexUnavailableError(f"index error: {exc}") from None
            raise
        return report


def _current(directory: Directory) -> bytes | None:
    """Name of the current generation; None if there is none, or it cannot be read."""
    with contextlib.suppress(FormatError, OSError):
        return directory.read_small("CURRENT", 64, sub="index")
    return None


def _remove_stale_generations(directory: Directory) -> None:
    """Remove what rebuilds that died left behind. The current generation, if any, is kept."""
    current = _current(directory)
    for name in directory.files.listdir(directory.sub("index")):
        if _GENERATION.match(name) and name.encode() != current:
            discard_generation(directory.files, directory.sub("index"), name)


def build(
    directory: Directory, data: int, settings: Settings, store_id: bytes, *, alone: bool,
    cancelled: Callable[[], bool] = lambda: False,
) -> Report:  # fmt: skip
    """Fill the empty file ``data`` with a complete generation, synced to disk."""
    files, report = directory.files, Report()
    env = open_environment(data, settings.index_bytes)
    try:
        tables = open_tables(env, create=True)
        now_s = files.now_us() // 1_000_000
        marks = PurgeMarks(directory)
        marked = marks.ids()
        # newest first: of two records of one page, the first that is published wins
        found = {listed.name: listed for listed in _list_all(directory, report)}  # renamed meanwhile: listed twice
        for listed in sorted(found.values(), key=lambda x: -x.created_us):
            segment_id = bytes.fromhex(listed.name[:32])
            mark = marks.read(segment_id) if segment_id in marked else None
            with _SegmentBuilder(directory, listed, settings, store_id, alone, report, now_s, mark) as builder:
                for step in builder.steps():
                    if cancelled():
                        raise IndexUnavailableError("closed")
                    with env.begin(write=True) as txn:
                        step(Session(txn, tables, "", now_s))
        extend_to_last_page(env, files, data)
        env.sync(True)
    finally:
        env.close()
    return report


def _list_all(directory: Directory, report: Report) -> Iterator[_Listed]:
    """All segments, one open at a time: there may be more of them than a process may open."""
    files = directory.files
    for folder in ("segments", "doomed"):
        for name in files.listdir(directory.sub(folder)):
            if not _SEGMENT_NAME.match(name):
                report.note(f"{folder}/{name}: not a segment's name, left alone")
                continue
            header = None
            try:
                if not stat.S_ISREG(files.stat(name, dir_fd=directory.sub(folder)).st_mode):
                    report.note(f"{folder}/{name}: not a file, left alone")
                    continue
                fd = files.open(name, os.O_RDONLY, dir_fd=directory.sub(folder))
                try:
                    files.random_access(fd)
                    header = fmt.parse_header(files.read(fd, fmt.BLOCK, 0))
                finally:
                    files.close(fd)
            except OSError as exc:
                if exc.errno in SHORT_OF:
                    raise
            yield _Listed(name, folder, header.created_us if header else 0)


class _SegmentBuilder:
    """Turns one segment's tables into index rows, in steps of bounded size. Owns the segment's descriptor."""

    def __init__(
        self, directory: Directory, listed: _Listed, settings: Settings, store_id: bytes, alone: bool,
        report: Report, now_s: int, mark: PurgeMark | None,
    ) -> None:  # fmt: skip
        self._directory = directory
        self._files: Files = directory.files
        self._listed = listed
        self._folder = directory.sub(listed.folder)
        self._fd = -1
        self._settings = settings
        self._mode = io_mode.of(settings)
        self._store_id = store_id
        self._alone = alone
        self._report = report
        self._now_s = now_s
        self._mark = mark
        self._namespaces: dict[int, Described] = {}
        self._descriptors: dict[bytes, bytes] = {}
        self._number = 0
        self._step = 0  # entries that the next commit may add

    def __enter__(self) -> _SegmentBuilder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                self._files.close(self._fd)

    def steps(self) -> Iterator[Callable[[Session], None]]:
        """One callable per transaction. A segment that cannot be read is charged, and gets no rows."""
        scan = None
        try:
            self._open()
            if self._mode.direct:  # tables only: no readahead of payloads
                self._files.random_access(self._fd)
            scan = scan_segment(self._fd, self._files)
            unreadable = False
        except FileNotFoundError:
            return  # reclaimed meanwhile
        except OSError as exc:
            if exc.errno in SHORT_OF:  # a later attempt may have the descriptors or the memory
                raise
            unreadable = True
            self._report.unreadable_segments += 1
            self._report.note(f"segments/{self._listed.name}: {exc.strerror}")
        segment_id = bytes.fromhex(self._listed.name[:32])
        foreign = scan is not None and (scan.header.segment_id, scan.header.store_id) != (segment_id, self._store_id)
        dead = self._listed.folder == "doomed" or ((scan is None or foreign) and not unreadable)
        if dead and self._listed.folder == "segments":
            self._report.damaged_segments += 1
            self._report.note(f"segments/{self._listed.name}: no valid header of this store, dropped")
        mark = self._mark
        if mark is not None and mark.whole:
            dead = True
        torn = self._report.torn
        entries = self._entries(scan, mark) if scan is not None and not dead else []
        row = self._row(segment_id, scan if not foreign else None, dead, torn=self._report.torn > torn)

        def add(session: Session) -> None:
            self._number = session.add_segment(row)
            self._size_step(session)

        yield add
        done = 0
        while done < len(entries) and self._step:
            batch = entries[done : done + self._step]
            yield partial(self._publish, entries=batch)
            done += len(batch)
        self._report.unnamed += len(entries) - done

    def _open(self) -> None:
        """Open the segment; FileNotFoundError if it was reclaimed since it was listed."""
        try:
            self._fd = self._files.open(self._listed.name, os.O_RDONLY, dir_fd=self._folder)
        except FileNotFoundError:  # an evictor that dropped it in the last generation may have renamed it
            self._listed, self._folder = self._listed._replace(folder="doomed"), self._directory.sub("doomed")
            self._fd = self._files.open(self._listed.name, os.O_RDONLY, dir_fd=self._folder)

    def _size_step(self, session: Session) -> None:
        """Set the size of the next commit. LMDB copies each leaf that changes: the less room, the smaller the commits.
        Like a writer, a rebuild adds nothing to a full index: the segments left hold the oldest pages."""
        used, size = session.used_bytes(), self._settings.index_bytes
        free = (size - used) // PAGE
        self._step = 0 if used > FULL * size else max(1, min(ENTRIES_PER_COMMIT, free // PAGES_PER_ENTRY))

    def _entries(self, scan: Scan, mark: PurgeMark | None) -> list[Entry]:
        """The records that get rows, newest first."""
        self._report.segments += 1
        self._read_namespaces(scan)
        parts = list(scan.parts())
        entries = [e for e in parts if mark is None or not mark.covers(e)]
        self._report.purged += len(parts) - len(entries)
        if scan.seal is None and self._settings.sync != "cache":
            # the last appends may be torn, and a put that skips a page promises that it is stored
            synced = self._sync()
            whole = [e for e in entries if synced and self._is_whole(e)]
            self._report.torn += len(entries) - len(whole)
            entries = whole
        return entries[::-1]

    def _row(self, segment_id: bytes, scan: Scan | None, dead: bool, *, torn: bool) -> SegmentRow:
        """The segment's row. ``torn``: it takes no appends, since once sealed its torn pages would be trusted."""
        try:
            size = self._files.stat(self._listed.name, dir_fd=self._folder).st_blocks * 512
        except OSError:
            size = self._settings.segment_bytes
        if scan is None:
            return SegmentRow(
                segment_id, NO_OWNER, ledger.ANY_CLASS, DROPPED if dead else SEALED, 0, 1, 0,
                ledger.charge(size, 0), fmt.FIRST_PAYLOAD, fmt.FIRST_TABLE, 0,
            )  # fmt: skip
        tail = None
        if scan.seal is None and self._alone and not dead and not torn and scan.appendable:
            tail = covered_end(scan, self._namespaces.get)  # None: an append might overwrite a leaf table
        expiries = [e.expires for e in scan.parts()]
        return SegmentRow(
            segment_id, NO_OWNER, scan.header.class_id, DROPPED if dead else SEALED if tail is None else ACTIVE,
            scan.header.flags, scan.entries[-1].epoch if scan.entries else 1, len(scan.entries),
            ledger.charge(size, len(scan.entries)), tail or scan.end, scan.table,
            max(expiries) if expiries and all(expiries) else 0,
        )  # fmt: skip

    def _read_namespaces(self, scan: Scan) -> None:
        for entry in scan.entries:
            if entry.kind == fmt.KIND_NAMESPACE:
                with contextlib.suppress(OSError):
                    data = read_descriptor(self._fd, self._files, entry)
                    described = parse_descriptor(data) if data is not None else None
                    if data is not None and described is not None and described.digest == entry.chunk_hash:
                        self._namespaces[entry.seq] = described
                        self._descriptors[described.digest] = data

    def _sync(self) -> bool:
        """Sync the segment for a writer that died before it did; whether that succeeded."""
        try:
            self._files.fdatasync(self._fd)
        except OSError:
            self._report.note(f"segments/{self._listed.name}: not synced, its pages are left out")
            return False
        return True

    def _is_whole(self, entry: Entry) -> bool:
        """Whether the bytes of a record verify."""
        shape = _shape(self._namespaces.get(entry.ns_seq), entry.group, entry.part)
        if shape is None or not codecs.fits(entry.codec, entry.stored_bytes, shape[2]):
            return True  # not checked here: ``_publish`` skips it, or its reader verifies it
        leaves, size = shape[1:]
        try:
            payload = self._files.read(self._fd, entry.stored_bytes, entry.payload)
            table = leaf_table(codecs.decoded(payload, entry.codec, size), size // leaves)
            stored = self._files.read(self._fd, len(table), entry.leaves)
            if self._mode.direct:
                self._files.drop_cached(self._fd, entry.payload, fmt.align(entry.stored_bytes))
        except (OSError, CodecError):
            return False
        return root_of(table) == entry.root and stored == table

    def _publish(self, session: Session, entries: list[Entry]) -> None:
        by_shape: dict[tuple[int, int, bytes], list[Publish]] = {}
        for entry in entries:
            if entry.expires and entry.expires <= self._now_s:
                self._report.expired += 1
                continue
            place = Place(entry.chunk_hash, entry.root, entry.codec, 0, self._number, entry.payload // fmt.BLOCK,
                          entry.stored_bytes, entry.leaves // 8, entry.seq, entry.expires)  # fmt: skip
            slot = entry.chunk % RUN
            by_shape.setdefault((entry.ns_seq, entry.group, entry.part), []).append(
                Publish(entry.run_hash, slot, place)
            )
        for (ns_seq, number, packed), records in by_shape.items():
            described = self._namespaces.get(ns_seq)
            shape = _shape(described, number, packed)
            if described is None or shape is None:
                self._report.skipped_entries += len(records)
                continue
            group, leaves, raw_bytes = shape
            fitting = [  # records of a codec that this version does not know are kept for later versions
                r
                for r in records
                if r.place.codec not in codecs.NAMES or codecs.fits(r.place.codec, r.place.stored_bytes, raw_bytes)
            ]
            self._report.skipped_entries += len(records) - len(fitting)
            records = fitting
            if described.layout.kind == "opaque":
                records = [r._replace(slot=0) for r in records]
            session.put_namespace(described.digest, self._descriptors[described.digest], number, packed)
            named = publish(session, partial(_row_key, described.digest, group.name, packed), leaves, records)
            session.add_contents(self._number, described.digest, *named)
            self._report.pages += named.records
            self._report.duplicates += len(records) - named.records
        self._size_step(session)


def _shape(described: Described | None, number: int, packed: bytes) -> tuple[Group, int, int] | None:
    """(group, leaves, bytes) of a part, if the namespace's layout has it."""
    if described is None or number >= len(described.layout.groups):
        return None
    try:
        group, part = described.layout.groups[number], Part.unpack(packed)
        return group, group.leaves(part), group.part_bytes(part)
    except ConfigError:
        return None


def _row_key(digest: bytes, group: str, packed: bytes, chunk_hash: bytes) -> bytes:
    return page_key(digest, group, chunk_hash) + packed
