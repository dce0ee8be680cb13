"""One transaction on the index: what a callable that runs under the gate may read and change."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvfs.format.segment import KNOWN_CODECS
from kvfs.index import tables
from kvfs.index.rows import CLAIM, CLAIM_SECONDS, Extent, Row, parse_row
from kvfs.index.tables import ACTIVE, DROPPED, PARTS_MAX, Contents, Ledger, SegmentRow

PAGE = 4096
ROW_OVERHEAD = 10  # bytes of an LMDB node: its header and its pointer
SAMPLE_ROWS = 256
DIGEST_BYTES = 32


class Tables(NamedTuple):
    """Handles of the named databases."""

    pages: Any
    segments: Any
    namespaces: Any
    meta: Any


class Session:
    """Owns one transaction and the segment rows read in it. Lives for milliseconds; results must be copies."""

    __slots__ = ("_alive", "db", "generation", "now_s", "tails", "txn")

    def __init__(self, txn: Any, db: Tables, generation: str, now_s: int) -> None:
        self.txn = txn
        self.db = db
        self.generation = generation
        self.now_s = now_s
        self._alive: dict[int, bytes | None] = {}
        self.tails: dict[int, int] = {}  # segment -> end of what is published, for segments that were looked up

    @property
    def state(self) -> tuple[Tables, int]:
        """The open index and the number of its last commit: two read transactions with equal states see equal rows."""
        return self.db, self.txn.id()

    # -- page rows ---------------------------------------------------------------------------

    def row(self, key: bytes) -> Row | None:
        return parse_row(key, self.txn.get(key, None, self.db.pages))

    def keys_there(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those of ``keys`` that have a row, valid or not."""
        with self.txn.cursor(self.db.pages) as cursor:
            return [key for key, _ in cursor.getmulti(keys)]

    def put_row(self, key: bytes, value: bytes) -> None:
        self.txn.put(key, value, db=self.db.pages)

    def delete_row(self, key: bytes) -> None:
        self.txn.delete(key, db=self.db.pages)

    def is_live(self, extent: Extent) -> bool:
        """Whether the chunks of an extent may be read: published, codec known, not expired, segment not dropped."""
        return self.live_in(extent) is not None

    def live_in(self, extent: Extent) -> bytes | None:
        """Id of the segment where the chunks of an extent may be read; None if they may not (see ``is_live``)."""
        if extent.codec not in KNOWN_CODECS:
            return None
        if extent.flags & CLAIM or (extent.expires and extent.expires <= self.now_s):
            return None
        return self.segment_id(extent.segment)

    def claim_holds(self, extent: Extent) -> bool:
        """Whether a claim is valid, see ``claimed_until``."""
        return self.claimed_until(extent.segment, extent.expires)

    def claimed_until(self, segment: int, expires: int) -> bool:
        """Whether a claim is valid: not expired, at most CLAIM_SECONDS ahead, and its segment is active."""
        if not self.now_s < expires <= self.now_s + CLAIM_SECONDS:
            return False
        row = self.segment(segment)
        return row is not None and row.state == ACTIVE

    def segment_alive(self, number: int) -> bool:
        return self.segment_id(number) is not None

    def segment_id(self, number: int) -> bytes | None:
        """Id of a segment whose pages may be read; None if it was dropped or reclaimed."""
        if number not in self._alive:
            row = self.segment(number)
            self._alive[number] = None if row is None or row.state == DROPPED else row.segment_id
            self.tails[number] = 0 if row is None else row.tail
        return self._alive[number]

    # -- segments and the ledger ---------------------------------------------------------------

    def segment(self, number: int) -> SegmentRow | None:
        return tables.get_segment(self.txn, self.db.segments, number)

    def segments(self) -> list[tuple[int, SegmentRow]]:
        return list(tables.iter_segments(self.txn, self.db.segments))

    def segments_in(self, state: int) -> list[tuple[int, SegmentRow]]:
        """The segments in state ACTIVE or DROPPED. These are few, and are found without a walk of all segments."""
        numbers = tables.listed_segments(self.txn, self.db.meta, state)
        found = [(number, self.segment(number)) for number in numbers]
        return [(number, row) for number, row in found if row is not None and row.state == state]

    def ledger(self) -> Ledger:
        return tables.get_ledger(self.txn, self.db.meta)

    def add_segment(self, row: SegmentRow) -> int:
        """Insert a new segment, charge it, and return its number. Numbers are never used twice."""
        ledger = self.ledger()
        number = ledger.next_segment
        if self.txn.get(tables.segment_key(number), db=self.db.segments) is not None:
            raise tables.damaged("ledger")
        tables.put_segment(self.txn, self.db.segments, number, row)
        tables.list_segment(self.txn, self.db.meta, number, row.state)
        tables.add_quota_use(self.txn, self.db.meta, row.class_id, row.allocated)
        self._set_ledger(
            ledger._replace(
                used=ledger.used + row.allocated,
                next_segment=number + 1,
                dropped=ledger.dropped + (row.state == DROPPED),
            )
        )
        return number

    def set_segment(self, number: int, old: SegmentRow, new: SegmentRow) -> None:
        tables.put_segment(self.txn, self.db.segments, number, new)
        if new.state != old.state:
            tables.unlist_segment(self.txn, self.db.meta, number, old.state)
            tables.list_segment(self.txn, self.db.meta, number, new.state)
        if new.allocated != old.allocated:
            tables.add_quota_use(self.txn, self.db.meta, new.class_id, new.allocated - old.allocated)
        dropped = (new.state == DROPPED) - (old.state == DROPPED)
        if new.allocated != old.allocated or dropped:
            ledger = self.ledger()
            self._set_ledger(
                ledger._replace(
                    used=ledger.used + new.allocated - old.allocated,
                    dropped=ledger.dropped + dropped,
                    unswept=ledger.unswept + (dropped > 0),
                )
            )
        self._alive.pop(number, None)

    def delete_segment(self, number: int, row: SegmentRow) -> None:
        """Delete the row of a segment and release its charge."""
        self.txn.delete(tables.segment_key(number), db=self.db.segments)
        tables.delete_contents(self.txn, self.db.meta, number)
        tables.unlist_segment(self.txn, self.db.meta, number, row.state)
        tables.add_quota_use(self.txn, self.db.meta, row.class_id, -row.allocated)
        ledger = self.ledger()
        reclaimed = row.state == DROPPED
        self._set_ledger(ledger._replace(used=ledger.used - row.allocated, dropped=ledger.dropped - reclaimed))
        self._alive.pop(number, None)

    # -- namespaces --------------------------------------------------------------------------

    def put_namespace(self, digest: bytes, descriptor: bytes, group: int, part: bytes) -> None:
        """Insert a namespace and one of its part shapes where they are missing."""
        if self.txn.get(digest, db=self.db.namespaces) is None:
            self.txn.put(digest, descriptor, db=self.db.namespaces)
        key = digest + group.to_bytes(2, "big") + part
        if self.txn.get(key, db=self.db.namespaces) is None:
            self.txn.put(key, b"", db=self.db.namespaces)

    def parts(self, digest: bytes, group: int) -> list[bytes]:
        """Packed part shapes of a group that were stored, PARTS_MAX at most."""
        prefix = digest + group.to_bytes(2, "big")
        found: list[bytes] = []
        with self.txn.cursor(db=self.db.namespaces) as cursor:
            if cursor.set_range(prefix):
                for key in cursor.iternext(keys=True, values=False):
                    if not key.startswith(prefix) or len(found) >= PARTS_MAX:
                        break
                    found.append(key[len(prefix) :])
        return found

    def namespaces(self, after: bytes, rows_max: int) -> tuple[list[tuple[bytes, bytes]], bytes | None]:
        """(digest, descriptor) of namespaces, in slices; see ``tables.read_contents``."""
        with self.txn.cursor(db=self.db.namespaces) as cursor:
            more = cursor.set_range(after + b"\0") if after else cursor.first()
            rows = list(itertools.islice(cursor, rows_max)) if more else []
        found = [row for row in rows if len(row[0]) == DIGEST_BYTES]
        return found, rows[-1][0] if len(rows) == rows_max else None

    def delete_namespace(self, digest: bytes) -> None:
        """Delete a namespace and its part shapes; none of its pages may be in the index."""
        with self.txn.cursor(db=self.db.namespaces) as cursor:
            found = cursor.set_range(digest)
            while found and cursor.key().startswith(digest):
                found = cursor.delete()

    def has_contents(self, segment: int, digest: bytes) -> bool:
        """Whether a segment holds pages of a namespace."""
        return tables.has_contents(self.txn, self.db.meta, segment, digest)

    def add_contents(self, segment: int, digest: bytes, records: int, stored_bytes: int) -> None:
        """Change the counts of what a segment holds of a namespace; negative numbers subtract."""
        if records:
            tables.add_contents(self.txn, self.db.meta, Contents(segment, digest, records, stored_bytes))

    def contents(self, after: bytes, rows_max: int) -> tuple[list[Contents], bytes | None]:
        """What segments hold of each namespace, in slices; see ``tables.read_contents``."""
        return tables.read_contents(self.txn, self.db.meta, after, rows_max)

    def quota_used(self, owner: bytes) -> int:
        """Bytes that the segments of a quota are charged with."""
        return tables.quota_use(self.txn, self.db.meta, owner)

    def swept(self, unswept: int) -> None:
        """Note the end of a full sweep that began when the ledger counted ``unswept`` segments."""
        ledger = self.ledger()
        self._set_ledger(ledger._replace(unswept=max(0, ledger.unswept - unswept)))

    def _set_ledger(self, ledger: Ledger) -> None:
        tables.put_ledger(self.txn, self.db.meta, ledger)

    def used_bytes(self) -> int:
        """Bytes of index pages in use, without free pages."""
        total = 0
        for db in self.db:
            stat = self.txn.stat(db)
            total += stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
        return int(total) * PAGE

    def fullness(self) -> float:
        """Estimate, from the first rows, how full the leaves of page rows are: 0 to 1."""
        stat, sizes = self.txn.stat(self.db.pages), []
        with self.txn.cursor(db=self.db.pages) as cursor:
            for key, value in itertools.islice(cursor, SAMPLE_ROWS):
                sizes.append(len(key) + len(value) + ROW_OVERHEAD)
        if not sizes or not stat["leaf_pages"]:
            return 1.0
        return float(stat["entries"] * sum(sizes) / len(sizes) / (stat["leaf_pages"] * PAGE))

    def check_ledger(self) -> bool:
        """Whether the ledger's sums equal a recount of the segment rows."""
        rows = [row for _, row in self.segments()]
        ledger = self.ledger()
        return ledger.used == sum(r.allocated for r in rows) and ledger.dropped == sum(r.state == DROPPED for r in rows)
