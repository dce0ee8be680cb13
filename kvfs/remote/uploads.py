"""Uploads: what engines store goes to the bucket in the background. One process of the host does it at a time.

A pass walks the index and pushes the pages that were not uploaded yet. What was is remembered in memory only: the
first pass of a process asks the bucket for each object, with a short request, and sends what it lacks. So an upload
that was interrupted goes on, and a process takes over when the one with the lock has ended.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import NamedTuple

from kvfs.catalog.catalog import Catalog
from kvfs.catalog.walk import Stretch, Walk
from kvfs.context import Context
from kvfs.directory.pin_files import pinned_segments
from kvfs.pages.chunk_set import span
from kvfs.remote.bucket import Bucket
from kvfs.remote.push import Piece, Pushed, Pusher, Source, of_rows
from kvfs.remote.uses import NOTED_SECONDS, Uses
from kvfs.system.descriptors import Descriptor

PAGES_MAX = 65_536  # of one pass: bounds its memory, about 40 MiB
FORGET_SECONDS = 6 * 3600.0  # after which the bucket is asked for everything again: objects may have been removed there
LOCK = "upload"


class Uploaded(NamedTuple):
    """What one pass did; ``more``: there was more than one pass takes; ``walked``: seconds that the walk took."""

    done: Pushed
    more: bool
    walked: float = 0.0


class Uploader:
    """The uploads of one process. Owns the lock, and what it remembers of them. Not thread-safe."""

    def __init__(self, context: Context) -> None:
        self._c = context
        self._lock: Descriptor | None = None
        self._target = ""  # what follows is of this bucket and choice of pages
        self._since = 0.0
        self._done: dict[bytes, int] = {}  # segment id -> set of records, by seq, as bits
        self._growing: dict[bytes, int] = {}  # key of a row with pages that are not uploaded -> its pages
        #: records of each segment, and the segments that pins protect, when nothing was left to do
        self._walked: tuple[dict[bytes, int], set[bytes]] | None = None
        self._pinned: set[bytes] = set()  # ids of the segments that pins protect

    def has_turn(self) -> bool:
        """Whether this process uploads: another one of the host may. It keeps the turn until ``close``. OSError."""
        if self._lock is None:
            files, folder = self._c.files, self._c.directory.sub("run")
            try:
                file = Descriptor.create(files, LOCK, self._c.directory.file_mode, dir_fd=folder)
            except FileExistsError:
                file = Descriptor.open(files, LOCK, os.O_RDWR, dir_fd=folder)
            if files.flock(file.fd, fcntl.LOCK_EX):
                self._lock = file
            else:
                file.close()
        return self._lock is not None

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def run(
        self, bucket: Bucket, what: str, pace: Callable[[int], None], uses: Uses | None = None
    ) -> Uploaded:  # fmt: skip
        """One pass. ``what``: "all"; or "reused": pages that were read since they were stored, or "pinned": those in
        segments that pins protect, each with what precedes it in its row. A row that has grown since the last pass
        waits for the next one: its neighbours are being saved.

        ``pace``: as of ``Pusher.run_pieces``; an error of it ends the pass.
        ``uses``: where it is noted which objects of the bucket have pages that were read here within a day. Errors
        as of ``Pusher.run``; OSError for the files of pins.
        """
        now = self._c.files.monotonic()
        if self._target != f"{what} {bucket.url}" or now - self._since > FORGET_SECONDS:
            self._target, self._since = f"{what} {bucket.url}", now
            self._done, self._growing, self._walked = {}, {}, None
        records = {row.segment_id: row.records for _, row in Catalog(self._c).segment_rows()}
        pusher = Pusher(self._c, bucket, self._c.settings.remote.requests)
        self._pinned = pinned_segments(self._c.directory) if what == "pinned" else set()
        if what != "reused" and self._walked == (records, self._pinned):
            return Uploaded(pusher.done, more=False)
        self._done = {segment_id: bits for segment_id, bits in self._done.items() if segment_id in records}
        self._walked = None
        pieces, more, read = self._pieces(what)
        walked = self._c.files.monotonic() - now
        if not pieces:
            self._walked = None if self._growing or more else (records, self._pinned)
            return Uploaded(pusher.done, more, walked)
        done = pusher.run_pieces(pieces, pace)
        if uses is not None:
            first = ((piece.shape, piece.sources[0].chunk_hash) for piece in pusher.found)
            uses.note(shape.used_name(chunk) for shape, chunk in first if chunk in read)
        unsent = set(pusher.unsent)
        for piece in pieces:
            for source in piece.sources:
                if source not in unsent:
                    self._done[source.segment_id] = self._done.get(source.segment_id, 0) | 1 << source.seq
        return Uploaded(done, more, walked)

    def _pieces(self, what: str) -> tuple[list[Piece], bool, set[bytes]]:
        """(what is to be pushed, whether there is more, chunks of it whose rows were read within a day). Notes the rows
        that have grown."""
        described = {d.digest: d for d in Catalog(self._c).described()}
        growing, self._growing = self._growing, {}
        pieces: list[Piece] = []
        pages, read = 0, set[bytes]()
        since_us = self._c.files.now_us() - int(NOTED_SECONDS * 1e6)
        for row in self._rows(what):
            # rows are cut where objects begin, so a row is taken whole; what is uploaded of it is left out again
            mine = [piece for piece in of_rows(described, row) if not all(map(self._is_done, piece.sources))]
            count = sum(stretch.pages for stretch in row)
            if not mine:
                continue
            if growing.get(row[0].row) != count:
                self._growing[row[0].row] = count
                continue
            pieces += mine
            if any(s.stamp_us > max(s.written_us, since_us) for s in row):
                read |= {source.chunk_hash for piece in mine for source in piece.sources}
            pages += sum(len(piece.sources) for piece in mine)
            if pages >= PAGES_MAX:
                self._growing = growing | self._growing  # rows that this walk has not come to
                return pieces, True, read
        return pieces, False, read

    def _rows(self, what: str) -> Iterator[list[Stretch]]:
        for _, stretches in groupby(Walk(self._c).stretches(), key=lambda s: s.row):
            row = list(stretches)
            if what != "all":
                chosen = [i for i, s in enumerate(row) if self._is_chosen(s, what)]
                row = row[: chosen[-1] + 1] if chosen else []
            if row and not all(self._done.get(s.segment_id, 0) & (m := span(s.seq, s.pages)) == m for s in row):
                yield row

    def _is_chosen(self, stretch: Stretch, what: str) -> bool:
        return stretch.segment_id in self._pinned if what == "pinned" else stretch.stamp_us > stretch.written_us

    def _is_done(self, source: Source) -> bool:
        return bool(self._done.get(source.segment_id, 0) >> source.seq & 1)
