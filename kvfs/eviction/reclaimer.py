"""Reclaiming: the last steps of a segment's life, of which ``kvfs.index.ledger`` tells the whole.

A segment is dropped in one commit, so its pages are misses. Then its file is renamed into ``doomed/``, and unlinked
once an exclusive flock shows that no reader holds it: its blocks are free, and it is no longer charged. Rows that still
point to it are swept out of the index later. ``flock run/gc`` lets one evictor at a time do this.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from kvfs.context import Context
from kvfs.errors import IndexUnavailableError
from kvfs.index import ledger
from kvfs.index.deadlines import COMMIT_SECONDS
from kvfs.index.environment import FULL
from kvfs.index.row_updates import sweep
from kvfs.index.session import PAGE, Session
from kvfs.index.tables import ACTIVE, DROPPED, SEALED, SegmentRow
from kvfs.segments.writer import file_name
from kvfs.system.descriptors import opened

_FILE = re.compile(r"[0-9a-f]{32}\.kvs\Z")
SWEEP_ROWS = 256  # index rows per transaction of a sweep
ROOM_BYTES_MIN = 128 << 10  # more than one commit adds to the index: a commit that would fill it is refused
ROOM_SHARE = 64  # of the index, one in so many bytes, where that is more
FAILURES_MAX = 4  # files in a row that could not be removed before eviction stops
BATCH_MAX = 16  # segments that one commit drops, or deletes with what it counts of their namespaces
FORGET_MAX = 32  # namespaces that one commit forgets


class Reclaimer:
    """Reclaims dropped segments and sweeps index rows that point to them. Owns the position of the sweep."""

    def __init__(self, context: Context) -> None:
        self._c = context
        self._sweeping = threading.Lock()
        self._sweep_at: bytes | None = None
        self._sweep_dropped = 0
        self._sweep_generation = ""
        self._failures = 0  # dropped segments in a row whose files could not be removed

    @property
    def fails(self) -> bool:
        """Whether the file system fails, not one segment: dropping more would lose pages and free nothing."""
        return self._failures >= FAILURES_MAX

    def drop(self, number: int, segment_id: bytes = b"") -> bool:
        """Drop a segment, and reclaim it if no reader holds it; whether it is reclaimed. ``segment_id``: see
        ``ledger.mark_dropped``."""
        row = self._c.index.write(lambda s: ledger.mark_dropped(s, number, self._c.owner, segment_id), COMMIT_SECONDS)
        return row is not None and self.finish(number, row)

    def drop_all(self, rows: Sequence[tuple[int, SegmentRow]]) -> list[SegmentRow]:
        """Drop segments, and reclaim those that no reader holds: these. Raises OSError unchanged, after the last."""
        dropped = list[tuple[int, SegmentRow]]()
        for some in _batches(rows):
            dropped += self._c.index.write(partial(_mark_all, rows=some, owner=self._c.owner), COMMIT_SECONDS)
        return self._reclaim(dropped, strict=True)

    def drop_missing(self, segment_id: bytes, number: int, generation: str) -> bool:
        """Drop a segment that the index names although its file is missing; whether that was the case. The caller holds
        the evictors' lock: a file leaves ``segments`` only after the commit that drops its segment."""
        with contextlib.suppress(FileNotFoundError):
            self._c.files.stat(file_name(segment_id), dir_fd=self._c.directory.sub("segments"))
            return False

        def drop(session: Session) -> SegmentRow | None:
            row = session.segment(number) if session.generation == generation else None
            if row is None or row.segment_id != segment_id or row.state == DROPPED or not row.records:
                return None  # the file of one without records may be about to be made
            return ledger.mark_dropped(session, number, self._c.owner)

        row = self._c.index.write(drop, COMMIT_SECONDS)
        if row is not None:
            self.finish(number, row)
        return row is not None

    def finish(self, number: int, row: SegmentRow) -> bool:
        """Reclaim a segment that was just dropped; True if its bytes are free. One that cannot be removed stays
        charged, like one that is held, and is tried again."""
        try:
            return bool(self._reclaim([(number, row)], strict=True))
        except OSError:
            self._c.counters.add("evict_errors")
            self._failures += 1
            return False

    def _reclaim(self, rows: Sequence[tuple[int, SegmentRow]], *, strict: bool) -> list[SegmentRow]:
        """Reclaim those of the dropped segments that no reader holds; their rows. One that cannot be removed stops none
        of the others; ``strict``: its OSError is raised at the end."""
        free, failed = list[tuple[int, SegmentRow]](), None
        for number, row in rows:
            try:
                if self._unlink(row):
                    free.append((number, row))
            except OSError as exc:
                failed = failed or exc
        marked = {row.segment_id for _, row in free if self._c.marks.has(row.segment_id)}
        if marked:
            try:
                # a file that a power cut brings back finds its mark
                self._c.files.fsync(self._c.directory.sub("doomed"))
            except OSError as exc:
                failed, free = failed or exc, [item for item in free if item[1].segment_id not in marked]
            else:
                for segment_id in marked:
                    self._c.marks.forget(segment_id)
        for some in _batches(free):
            self._c.index.write(partial(_reclaim_all, rows=some), COMMIT_SECONDS)
        self._c.counters.add("segments_reclaimed", len(free))
        if free:
            self._failures = 0
        if failed is not None and strict:
            raise failed
        if failed is not None:
            self._c.counters.add("evict_errors")
        return [row for _, row in free]

    def _unlink(self, row: SegmentRow) -> bool:
        """Unlink the file of a dropped segment, and its access times; False if a reader holds it."""
        name = file_name(row.segment_id)
        files, segments, dropped = self._c.files, self._c.directory.sub("segments"), self._c.directory.sub("doomed")
        self._remove_unexpected_entry(name)  # a directory: no file could be renamed over it
        with contextlib.suppress(FileNotFoundError):
            files.rename(name, name, src_dir_fd=segments, dst_dir_fd=dropped)
        self._remove_unexpected_entry(name)
        with contextlib.suppress(FileNotFoundError), opened(files, name, os.O_RDONLY, dir_fd=dropped) as fd:
            if not files.flock(fd, fcntl.LOCK_EX):
                return False
            files.unlink(name, dir_fd=dropped)
        self._c.access_times.forget(row.segment_id)
        return True

    def _remove_unexpected_entry(self, name: str) -> None:
        """Remove what has a segment's name and is no regular file: it must not stop the others from being reclaimed."""
        files, dropped = self._c.files, self._c.directory.sub("doomed")
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(files.stat(name, dir_fd=dropped).st_mode):
                try:
                    files.unlink(name, dir_fd=dropped)
                except OSError:  # a directory: its contents may be wanted
                    aside = f"{name}.{files.random(8).hex()}"
                    files.rename(name, aside, src_dir_fd=dropped, dst_dir_fd=self._c.directory.sub("quarantine"))

    def reclaim_dropped(self, *, strict: bool = False) -> int:
        """Reclaim all dropped segments that no reader holds; bytes freed. ``strict``: as in ``_reclaim``."""
        rows = self._c.index.read(lambda s: s.segments_in(DROPPED), COMMIT_SECONDS)
        if not rows:  # another process has removed what could not be removed here
            self._failures = 0
        return sum(row.allocated for row in self._reclaim(rows, strict=strict))

    def charge_unknown(self) -> None:
        """Charge the segment files that no row names. The caller holds the evictors' lock, so none is being reclaimed.

        One in ``segments`` is the next victim when room is needed; a rebuild before that may name its pages.
        """
        files, listed = self._c.files, list[tuple[int, str, int]]()
        for state, folder in ((DROPPED, self._c.directory.sub("doomed")), (SEALED, self._c.directory.sub("segments"))):
            listed += [(folder, name, state) for name in files.listdir(folder) if _FILE.match(name)]
        # after the listing: a row is older than its file
        rows, generation = self._c.index.read(lambda s: (s.segments(), s.generation), COMMIT_SECONDS)
        known = {file_name(row.segment_id) for _, row in rows}
        for folder, name, state in listed:
            if name not in known:
                with contextlib.suppress(FileNotFoundError):
                    st = files.stat(name, dir_fd=folder)
                    if stat.S_ISREG(st.st_mode):
                        charge = partial(
                            ledger.charge_file, segment_id=bytes.fromhex(name[:32]), generation=generation,
                            state=state, file_bytes=st.st_blocks * 512,
                        )  # fmt: skip
                        self._c.index.write(charge, COMMIT_SECONDS)
                        self._c.counters.add("segments_unknown")

    def abandon(self) -> None:
        """In a forked child: the thread that was sweeping is the parent's, and never releases the lock here."""
        self._sweeping, self._sweep_at = threading.Lock(), None

    def sweep_step(self, slices: int = 4, *, pack: bool = False) -> bool:
        """Clean some page rows, if segments were dropped since the last full round; whether there is more to clean.
        ``pack``: also pack the rows into as few index pages as they need."""
        with self._sweeping:
            return all(self._sweep_slice(pack) for _ in range(slices))

    def _sweep_slice(self, pack: bool) -> bool:
        dropped, generation = self._c.index.read(lambda s: (s.ledger().unswept, s.generation), COMMIT_SECONDS)
        if self._sweep_at is None or self._sweep_generation != generation:  # another index: none of it was swept
            self._sweep_at = None
            if not dropped:
                return False
            self._sweep_at, self._sweep_dropped, self._sweep_generation = b"\0", dropped, generation
        clean = partial(self._clean, start=self._sweep_at, pack=pack)
        following, changed = self._c.index.write(clean, COMMIT_SECONDS)
        self._c.counters.add("rows_swept", changed)
        if following is None:
            self._c.index.write(self._swept, COMMIT_SECONDS)
        self._sweep_at = following
        if following is None:
            with contextlib.suppress(IndexUnavailableError):  # the next round does it; this one has made room
                forget_namespaces(self._c)
        return True

    def _swept(self, session: Session) -> None:
        if session.generation == self._sweep_generation:
            session.swept(self._sweep_dropped)

    def _clean(self, session: Session, start: bytes, pack: bool) -> tuple[bytes | None, int]:
        """Sweep some rows. LMDB copies each leaf that changes and reuses the old ones two commits later, so a small
        index that is nearly full has no room for many."""
        free = (self._c.settings.index_bytes - session.used_bytes()) // PAGE
        return sweep(session, start, min(SWEEP_ROWS, max(1, free // 4)), pack=pack)

    def sweep_all(self, end: float | None = None) -> None:
        """Sweep until no row of a dropped segment is left, or until ``end``; the background does the rest."""
        while self.sweep_step(1) and (end is None or self._c.files.monotonic() < end):
            pass


def _batches(rows: Sequence[tuple[int, SegmentRow]]) -> Iterator[Sequence[tuple[int, SegmentRow]]]:
    return (rows[first : first + BATCH_MAX] for first in range(0, len(rows), BATCH_MAX))


def _mark_all(session: Session, rows: Sequence[tuple[int, SegmentRow]], owner: bytes) -> list[tuple[int, SegmentRow]]:
    now = ((number, ledger.mark_dropped(session, number, owner, row.segment_id)) for number, row in rows)
    return [(number, row) for number, row in now if row is not None]


def _reclaim_all(session: Session, rows: Sequence[tuple[int, SegmentRow]]) -> None:
    for number, row in rows:
        ledger.reclaim(session, number, row.segment_id)


class _Growing(NamedTuple):
    """What may gain pages: the active segments, and those with a number from ``next_segment`` on."""

    generation: str
    active: list[int]
    next_segment: int


def forget_namespaces(context: Context, only: bytes | None = None) -> int:
    """Remove the namespaces that have no page left from the index; how many. Writers are not blocked meanwhile.

    ``only``: the digest of the one that may have lost its pages, if it is known.

    Only active segments gain pages. So a namespace has none if no segment held one when it was read, and none is in
    the segments that were active before, or are new: these are few, and are read again in the removing transaction.
    """
    growing = context.index.read(_read_growing, COMMIT_SECONDS)
    if only is not None:
        empty = set() if context.index.read(partial(_has_pages, digest=only), COMMIT_SECONDS) else {only}
    else:
        empty = {digest for digest, _ in context.index.slices(Session.namespaces, COMMIT_SECONDS)}
        for held in context.index.slices(Session.contents, COMMIT_SECONDS) if empty else ():
            empty.discard(held.digest)
    left, forgotten = sorted(empty), 0
    while left:
        digests, left = left[:FORGET_MAX], left[FORGET_MAX:]
        forgotten += context.index.write(partial(_forget, growing=growing, digests=digests), COMMIT_SECONDS)
    context.counters.add("namespaces_forgotten", forgotten)
    return forgotten


def _has_pages(session: Session, digest: bytes) -> bool:
    return any(session.has_contents(number, digest) for number, _ in session.segments())


def _read_growing(session: Session) -> _Growing:
    active = [number for number, _ in session.segments_in(ACTIVE)]
    return _Growing(session.generation, active, session.ledger().next_segment)


def _forget(session: Session, growing: _Growing, digests: Sequence[bytes]) -> int:
    if session.generation != growing.generation:
        return 0
    numbers = [*growing.active, *range(growing.next_segment, session.ledger().next_segment)]
    empty = [digest for digest in digests if not any(session.has_contents(n, digest) for n in numbers)]
    for digest in empty:
        session.delete_namespace(digest)
    return len(empty)


class GcLock:
    """``flock run/gc``: one evictor at a time, among processes and among threads."""

    def __init__(self, context: Context) -> None:
        self._c = context

    @contextlib.contextmanager
    def hold(self, deadline: float) -> Iterator[bool]:
        """Yields whether the lock was acquired before ``deadline`` (monotonic seconds)."""
        files = self._c.files
        # each hold has an open file of its own: flocks of one open file would not exclude threads
        with opened(files, "gc", os.O_RDWR, dir_fd=self._c.directory.sub("run")) as fd:
            while not (got := files.flock(fd, fcntl.LOCK_EX)) and files.monotonic() < deadline:
                files.sleep(0.002)
            yield got


def index_is_full(session: Session, index_bytes: int, *, room: bool = False) -> bool:
    """Whether no row may be inserted. ``room``: or only a few, so that a caller that makes room leaves some."""
    return session.used_bytes() > FULL * index_bytes - (max(ROOM_BYTES_MIN, index_bytes // ROOM_SHARE) if room else 0)
