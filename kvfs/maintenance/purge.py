"""Purging: first marks that every rebuild obeys, then index rows, then segments that hold nothing else.

The second half works from the marks alone. So after a crash, or where the index did not answer, the next process
finishes it (``resume``).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple, TypeVar

from kvfs.context import Context
from kvfs.directory.pin_files import list_pins
from kvfs.errors import ConfigError, IndexUnavailableError, StoreLockedError
from kvfs.eviction.evictor import Evictor
from kvfs.eviction.reclaimer import forget_namespaces
from kvfs.format import segment as fmt
from kvfs.format.segment import Entry, PurgeMark
from kvfs.index import ledger
from kvfs.index.deadlines import COMMIT_SECONDS
from kvfs.index.row_updates import forget
from kvfs.index.session import Session
from kvfs.index.tables import ACTIVE, DROPPED, SEALED, SegmentRow
from kvfs.maintenance.pins import Pins
from kvfs.pages.chunk_hash import HASH_BYTES, page_key
from kvfs.pages.identity import Described, salt_digest
from kvfs.segments.scan import Scan, chunk_hashes, read_namespace, scan_segment
from kvfs.segments.writer import file_name
from kvfs.system.descriptors import opened
from kvfs.types import PurgeResult
from kvfs.write.active_segments import ActiveSegments

T = TypeVar("T")
_SEGMENT = re.compile(r"[0-9a-f]{32}\.kvs\Z")
LOCK_SECONDS = 10.0  # longest wait for the evictors' lock: an eviction or another purge may run
KEYS_PER_HOLD = 128  # index rows per transaction, so that writers wait little


@dataclass(frozen=True)
class Selection:
    """Records of the namespaces for which ``takes`` is true; if ``chunks`` is given, of these chunks only.

    ``digest``: of the only namespace for which ``takes`` can be true, if there is only one.
    """

    takes: Callable[[Described], bool]
    chunks: frozenset[bytes] | None = None
    digest: bytes | None = None

    def may_have(self, entry: Entry, entries: Sequence[Entry]) -> bool:
        """Whether a record of a segment with these ``entries`` can be meant; its namespace's descriptor decides."""
        if self.chunks is not None and entry.chunk_hash not in self.chunks:
            return False
        if self.digest is None or entry.ns_seq >= len(entries):
            return True
        named = entries[entry.ns_seq]
        return named.kind != fmt.KIND_NAMESPACE or named.chunk_hash == self.digest


def select(
    *, digest: bytes | None, name: str | None, salt: str | None, chunks: Iterable[bytes] | None,
) -> Selection:  # fmt: skip
    """Records of the namespaces that match all arguments given; if ``chunks`` is given, of these chunks only.

    ``name`` is a namespace's name or its digest in hex. ConfigError if no argument is given, or one is malformed.
    """
    if digest is None and name is None and salt is None:
        raise ConfigError("nothing to purge: name a namespace or a salt (to remove everything, delete the directory)")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise ConfigError(f"salt is {type(salt).__name__} or empty: pass a tenant's salt, or name a namespace instead")
    if digest is not None and len(digest) != HASH_BYTES:
        raise ConfigError(f"namespace digest has {len(digest)} bytes: it has {HASH_BYTES}")
    wanted = None if chunks is None else _hashes(chunks)
    secret = None if salt is None else salt_digest(salt)

    def takes(described: Described) -> bool:
        return (
            (secret is None or described.salt == secret)
            and (digest is None or described.digest == digest)
            and (name is None or name in (described.name, described.digest.hex()))
        )

    return Selection(takes, wanted, digest)


def _hashes(chunks: Iterable[bytes]) -> frozenset[bytes]:
    if isinstance(chunks, (bytes, str)):
        raise ConfigError("chunks must be a sequence of chunk hashes, not one: put it into a list")
    hashes = frozenset(chunks)
    if not all(isinstance(h, bytes) and len(h) == HASH_BYTES for h in hashes):
        raise ConfigError(f"chunks must hold hashes of {HASH_BYTES} bytes each, as chunk_hashes() gives them")
    return hashes


class _Segment(NamedTuple):
    """A segment's file as read for a purge; ``scan`` is None if it cannot be read or its tables are incomplete."""

    scan: Scan | None
    spaces: dict[int, Described]  # of the records asked for, by the seq of the namespace's entry
    damaged: bool = False  # there is a header, or there may be one


class Purger:
    """Purges: owns the order of marks, rows and segments; delegates reclaiming to the evictor. One per open store.

    Works under the evictors' lock: no record is copied from segment to segment meanwhile.
    """

    def __init__(self, context: Context, evictor: Evictor, active: ActiveSegments, pins: Pins) -> None:
        self._c = context
        self._evictor = evictor
        self._active = active
        self._pins = pins
        self._left: dict[bytes, bool] = {}  # of sealed segments with a mark: whether they also hold other records

    def purge(self, selection: Selection) -> PurgeResult:
        """Remove records. On return no lookup finds them, and no rebuild brings them back.

        ConfigError, before anything is changed, if a pin protects some. StoreLockedError if it could not be done in
        time: what has a mark by then is removed as soon as that is possible.
        """
        self._active.finish_all()  # segments that this process was writing can be dropped as well
        with self._evictor.lock.hold(self._c.files.monotonic() + LOCK_SECONDS) as held:
            if not held:
                raise StoreLockedError(f"{self._c.directory.path}: another process evicts or purges: try again later")
            try:
                return self._purge(selection)
            except IndexUnavailableError as exc:
                raise StoreLockedError(
                    f"{self._c.directory.path}: the index does not answer now ({exc}); what was marked so far will be "
                    "removed when it does: purge again to be sure"
                ) from None

    def _purge(self, selection: Selection) -> PurgeResult:
        files, directory = self._c.files, self._c.directory
        ids = [bytes.fromhex(n[:32]) for n in files.listdir(directory.sub("segments")) if _SEGMENT.match(n)]
        self._c.marks.sweep()
        rows = self._rows()
        pinned = self._pins.segments()
        pages = 0
        # pinned segments first, so that a refusal changes nothing
        for segment_id in sorted(ids, key=lambda i: i not in pinned):
            mark, count = self._mark_for(segment_id, selection, rows.get(segment_id))
            if mark is None:
                continue
            if segment_id in pinned:
                raise self._protected(segment_id)
            self._c.marks.write(mark)
            pages += count
            self._evictor.victims.forget(segment_id)
        # segments dropped before may still be where a rebuild reads them
        self._evictor.reclaimer.reclaim_dropped(strict=True)
        self._c.marks.sync()
        for folder in (directory.sub("segments"), directory.sub("doomed"), directory.root):
            files.fsync(folder)
        self._c.counters.add("pages_purged", pages)
        dropped, freed = self._finish_all(self._c.marks.ids())
        with contextlib.suppress(IndexUnavailableError):  # a sweep does it later; the pages are misses
            forget_namespaces(self._c, selection.digest)
        return PurgeResult(pages, dropped, freed)

    def _protected(self, segment_id: bytes) -> ConfigError:
        names = [pin.name for pin in list_pins(self._c.directory) if segment_id.hex() in pin.segments]
        return ConfigError(f"pin {', '.join(map(repr, names))} protects pages that would be purged: unpin it first")

    def _rows(self) -> dict[bytes, SegmentRow]:
        """Segment rows by id; none while there is no index."""
        try:
            return {row.segment_id: row for _, row in self._c.index.read(Session.segments, COMMIT_SECONDS)}
        except IndexUnavailableError:
            return {}

    # -- marks -------------------------------------------------------------------------------

    def _mark_for(
        self, segment_id: bytes, selection: Selection, row: SegmentRow | None
    ) -> tuple[PurgeMark | None, int]:
        """The mark that a segment needs, older ones included, and how many records are new in it; None if none is."""
        if row is not None and row.state == DROPPED:
            return None, 0
        try:
            if self._is_free_of(selection, segment_id, row):
                return None, 0
            segment = self._read(segment_id, row, selection.may_have)
        except FileNotFoundError:
            return None, 0
        except OSError as exc:
            if exc.errno not in (errno.EINVAL, errno.ELOOP):
                raise
            return None, 0  # not a regular file: no rebuild reads it either
        old = self._c.marks.read(segment_id)
        if old is not None and old.whole:
            return None, 0
        unnamed = row is None or not row.records
        if segment.scan is None and unnamed and not (segment.damaged and (row is None or row.state != ACTIVE)):
            return None, 0  # its writer has just made it, or no rebuild takes it for a segment
        if segment.scan is None:  # unreadable: a cache may lose its pages, a purge must not miss them
            return PurgeMark(segment_id, fmt.PURGE_ALL | fmt.PURGE_PENDING, 0, b""), row.records if row else 0
        entries = segment.scan.entries
        meant = {seq for seq, described in segment.spaces.items() if selection.takes(described)}
        parts = list(segment.scan.parts())
        covered = [] if old is None else list(filter(old.covers, parts))
        known = {e.seq for e in covered}
        chosen = [
            e for e in parts if e.ns_seq in meant and selection.may_have(e, entries) and e.seq not in known
        ]  # fmt: skip
        if not chosen:
            return None, 0
        bits = bytearray(len(entries) // 8 + 1)
        for entry in chain(chosen, covered):
            bits[entry.seq // 8] |= 1 << entry.seq % 8
        if row is not None and row.state == SEALED:
            self._left[segment_id] = len(chosen) + len(covered) < len(parts)
        return PurgeMark(segment_id, fmt.PURGE_PENDING, entries[-1].epoch, bytes(bits)), len(chosen)

    def _is_free_of(self, selection: Selection, segment_id: bytes, row: SegmentRow | None) -> bool:
        """Whether no record of a segment can be meant, found out fast: most purges concern few of the segments.

        False if unknown.
        """
        wanted = selection.chunks
        if wanted is None and selection.digest is not None:
            wanted = frozenset((selection.digest,))
        files, found = self._c.files, list[bytes]()
        with (
            contextlib.suppress(OSError),
            opened(files, file_name(segment_id), os.O_RDONLY, dir_fd=self._c.directory.sub("segments")) as fd,
        ):
            files.random_access(fd)
            found = chunk_hashes(fd, files) if wanted is not None else []
        complete = found and len(found) >= (row.records if row is not None else 0)
        return bool(complete) and wanted is not None and wanted.isdisjoint(found)

    def _read(
        self, segment_id: bytes, row: SegmentRow | None, asked: Callable[[Entry, Sequence[Entry]], bool]
    ) -> _Segment:
        """A segment as a purge sees it: all entries count, published or not, since a rebuild would find them.

        Only the namespaces of records for which ``asked(entry, entries)`` is true are read. FileNotFoundError if there
        is no such file.
        """
        files = self._c.files
        with opened(files, file_name(segment_id), os.O_RDONLY, dir_fd=self._c.directory.sub("segments")) as fd:
            try:
                files.random_access(fd)  # tables only: no readahead of payloads
                scan = scan_segment(fd, files)
                if scan is None or len(scan.entries) < (row.records if row is not None else 0):
                    return _Segment(None, {}, damaged=scan is not None)
                spaces = dict[int, Described]()
                for number in {e.ns_seq for e in scan.parts() if asked(e, scan.entries)}:
                    described = read_namespace(fd, files, scan.entries, number)
                    if described is None:
                        return _Segment(None, {}, damaged=True)
                    spaces[number] = described
            except OSError as exc:
                if exc.errno != errno.EIO:
                    raise
                return _Segment(None, {}, damaged=True)
        return _Segment(scan, spaces)

    # -- finishing purges ----------------------------------------------------------------------

    def resume(self) -> None:
        """Finish purges that were interrupted, and drop segments that hold nothing else."""
        marked = self._c.marks.ids()
        if not marked:
            return
        self._active.finish_all(marked)
        with self._evictor.lock.hold(self._c.files.monotonic()) as held:
            if held:
                self._evictor.reclaimer.reclaim_dropped()
                self._finish_all(marked)

    def _finish_all(self, marked: Iterable[bytes]) -> tuple[int, int]:
        """Finish what the marks of these segments ask for. (Segments that were dropped, bytes freed: those that readers
        hold are not free yet.)"""
        found, generation = self._c.index.read(
            lambda s: ({row.segment_id: (n, row) for n, row in s.segments()}, s.generation), COMMIT_SECONDS
        )
        pinned, over = self._pins.segments(), list[tuple[int, SegmentRow]]()
        for segment_id in marked:
            number, row = found.get(segment_id, (0, None))
            if row is None:
                if not self._exists(segment_id):
                    self._c.marks.forget(segment_id)
            elif row.state != DROPPED and self._finish(number, row, generation, pinned):
                over.append((number, row))
        freed = self._evictor.reclaimer.drop_all(over)
        if self._c.index.read(lambda s: s.generation, COMMIT_SECONDS) != generation:
            raise IndexUnavailableError("replaced meanwhile")  # perhaps by one that was built without these marks
        return len(over), sum(row.allocated for row in freed)

    def _finish(self, number: int, row: SegmentRow, generation: str, pinned: set[bytes]) -> bool:
        """Finish the purge of a segment that stays; True if it is to be dropped."""
        mark, left = self._c.marks.read(row.segment_id), self._left.get(row.segment_id)
        if mark is None or (not mark.pending and (row.state == ACTIVE or left)):
            return False
        segment, purged = _Segment(None, {}), []
        if not mark.whole and (left is not False or row.segment_id in pinned):
            segment = self._read(row.segment_id, row, lambda entry, _: mark.covers(entry))
            parts = list(segment.scan.parts()) if segment.scan is not None else []
            purged = [e for e in parts if mark.covers(e)]
            left = len(purged) < len(parts)
        if not left and (mark.whole or self._may_drop(number, row, pinned)):
            self._left.pop(row.segment_id, None)
            return True
        if left and row.state != ACTIVE:
            self._left[row.segment_id] = True
        if mark.pending and not mark.whole:
            self._unname(number, generation, segment, purged)
            self._c.marks.settle(mark)
        return False

    def _exists(self, segment_id: bytes) -> bool:
        name, directory = file_name(segment_id), self._c.directory
        for folder in ("segments", "doomed"):
            try:
                self._c.files.stat(name, dir_fd=directory.sub(folder))
                return True
            except FileNotFoundError:
                continue
        return False

    def _may_drop(self, number: int, row: SegmentRow, pinned: set[bytes]) -> bool:
        """Whether a segment may be dropped: no pin, no writer. One whose owner is dead is taken over."""
        if row.segment_id in pinned:
            return False
        if row.state != ACTIVE:
            return True
        if self._c.liveness is None or self._c.liveness.is_alive(row.owner):
            return False
        take = partial(ledger.adopt, number=number, seen=row, owner=self._c.owner)
        return self._c.index.write(take, COMMIT_SECONDS) is not None

    def _unname(self, number: int, generation: str, segment: _Segment, purged: Sequence[Entry]) -> None:
        """Remove records from the index, in slices."""
        digests = {seq: described.digest for seq, described in segment.spaces.items()}
        wrong = {(number, entry.seq): digests.get(entry.ns_seq, b"") for entry in purged}
        runs = {(e.ns_seq, e.group, e.part, e.run_hash): e for e in purged}
        removed: set[int] = set()
        for keys in _slices([_row_key(segment, entry, entry.run_hash) for entry in runs.values()]):
            removed |= self._forget(generation, keys, wrong)
        # where another continuation has the run's slot, a record has a row of its own
        for entries in _slices([e for e in purged if e.seq not in removed]):
            self._forget(generation, [_row_key(segment, entry, entry.chunk_hash) for entry in entries], wrong)

    def _forget(self, generation: str, keys: Sequence[bytes], wrong: Mapping[tuple[int, int], bytes]) -> set[int]:

        def transact(session: Session) -> set[tuple[int, int]]:
            if session.generation != generation:  # its numbers mean other segments
                raise IndexUnavailableError("replaced meanwhile")
            return forget(session, keys, wrong)

        return {seq for _, seq in self._c.index.write(transact, COMMIT_SECONDS)}


def _row_key(segment: _Segment, entry: Entry, head: bytes) -> bytes:
    """Key of the row that names a record, if ``head`` keys it."""
    described = segment.spaces.get(entry.ns_seq)
    if described is None or entry.group >= len(described.layout.groups):
        return bytes(32) + entry.part  # no row names it
    return page_key(described.digest, described.layout.groups[entry.group].name, head) + entry.part


def _slices(items: list[T]) -> Iterator[list[T]]:
    for first in range(0, len(items), KEYS_PER_HOLD):
        yield items[first : first + KEYS_PER_HOLD]
