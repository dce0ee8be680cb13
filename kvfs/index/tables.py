"""Rows of the small tables of the index: segments, namespaces, quotas, and the ledger row.

The segment rows are the ledger of the store's space: ``used`` in the ledger row is their sum, changed in the same
transaction, and ``check_ledger`` recounts it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import lmdb

from kvfs.format.checksums import checksum

PARTS_MAX = 256  # part shapes that a lookup considers per group of a namespace
_SEGMENT = struct.Struct("<16s16s16sIIIIQQQI")
_LEDGER = struct.Struct("<QIIQ")
_NUMBER = struct.Struct(">I")  # big endian: cursor order is creation order
_CHECK = struct.Struct("<Q")
_USED = struct.Struct("<q")
LEDGER_KEY = b"ledger"
_QUOTA = b"quota/"
_CONTENTS = b"contents/"
_AMOUNT = struct.Struct("<qq")

ACTIVE, SEALED, DROPPED = 1, 2, 3
STATE_NAMES = {ACTIVE: "active", SEALED: "sealed", DROPPED: "dropped"}


class SegmentRow(NamedTuple):
    """One segment. ``allocated`` is what it is charged with, reserved before the file grows."""

    segment_id: bytes
    owner: bytes  # liveness name of the process that appends, or drops it; zero: no process
    class_id: bytes
    state: int  # ACTIVE, SEALED or DROPPED, see ``kvfs.index.ledger``
    flags: int  # format.FLAG_*
    epoch: int
    records: int  # entries published so far, chain entries included
    allocated: int  # bytes
    tail: int  # end of what is published
    table: int  # offset of the table that takes the next entry
    expires: int  # unix seconds when the last record expires, 0 = some never do


class Ledger(NamedTuple):
    """Sums over the segment rows, and counters."""

    used: int  # bytes that segments are charged with, all states
    next_segment: int
    dropped: int  # segments in state DROPPED
    unswept: int  # segments dropped since the last full sweep of stale page rows


def _pack(body: bytes) -> bytes:
    return body + _CHECK.pack(checksum(body))


def _unpack(packer: struct.Struct, data: bytes | None) -> tuple[Any, ...] | None:
    if data is None or len(data) != packer.size + 8:
        return None
    body = data[: packer.size]
    return packer.unpack(body) if _CHECK.unpack(data[packer.size :])[0] == checksum(body) else None


def segment_key(number: int) -> bytes:
    return _NUMBER.pack(number)


def get_segment(txn: Any, db: Any, number: int) -> SegmentRow | None:
    fields = _unpack(_SEGMENT, txn.get(_NUMBER.pack(number), db=db))
    return SegmentRow(*fields) if fields else None


def put_segment(txn: Any, db: Any, number: int, row: SegmentRow) -> None:
    txn.put(_NUMBER.pack(number), _pack(_SEGMENT.pack(*row)), db=db)


def iter_segments(txn: Any, db: Any) -> Iterator[tuple[int, SegmentRow]]:
    """All segments in order of creation. A damaged row is skipped; rebuild finds it again."""
    with txn.cursor(db=db) as cursor:
        for key, value in cursor:
            fields = _unpack(_SEGMENT, value)
            if fields and len(key) == 4:
                yield _NUMBER.unpack(key)[0], SegmentRow(*fields)


def get_ledger(txn: Any, db: Any) -> Ledger:
    data = txn.get(LEDGER_KEY, db=db)
    fields = _unpack(_LEDGER, data)
    if data is not None and fields is None:
        raise damaged("ledger")
    return Ledger(*fields) if fields else Ledger(0, 1, 0, 0)


def put_ledger(txn: Any, db: Any, ledger: Ledger) -> None:
    try:
        txn.put(LEDGER_KEY, _pack(_LEDGER.pack(*ledger)), db=db)
    except struct.error:  # negative, or beyond any file's size: it contradicts the segment rows
        raise damaged("ledger") from None


def damaged(what: str) -> lmdb.CorruptedError:
    """Error for a row that the index cannot work without: the generation is retired, as after an error of LMDB."""
    return lmdb.CorruptedError(f"{what} row is damaged")


# Active and dropped segments are listed a second time in ``meta``, so that finding them needs no walk of all segments.


def list_segment(txn: Any, db: Any, number: int, state: int) -> None:
    if state in (ACTIVE, DROPPED):
        txn.put(_listed(state) + _NUMBER.pack(number), b"", db=db)


def unlist_segment(txn: Any, db: Any, number: int, state: int) -> None:
    if state in (ACTIVE, DROPPED):
        txn.delete(_listed(state) + _NUMBER.pack(number), db=db)


def listed_segments(txn: Any, db: Any, state: int) -> list[int]:
    prefix, found = _listed(state), []
    with txn.cursor(db=db) as cursor:
        if cursor.set_range(prefix):
            for key in cursor.iternext(keys=True, values=False):
                if not key.startswith(prefix):
                    break
                found.append(_NUMBER.unpack(key[len(prefix) :])[0])
    return found


def _listed(state: int) -> bytes:
    return {ACTIVE: b"active/", DROPPED: b"doomed/"}[state]  # on disk, format 1


# What the segments of each quota (first 8 bytes of a class id, zero: none) are charged with.


def add_quota_use(txn: Any, db: Any, class_id: bytes, change: int) -> None:
    owner = class_id[:8]
    if any(owner) and change:
        used = quota_use(txn, db, owner) + change
        if used:
            txn.put(_QUOTA + owner, _pack(_USED.pack(used)), db=db)
        else:
            txn.delete(_QUOTA + owner, db=db)


def quota_use(txn: Any, db: Any, owner: bytes) -> int:
    fields = _unpack(_USED, txn.get(_QUOTA + owner, db=db))
    return fields[0] if fields else 0


# What each segment holds of each namespace: the catalog lists a store's content from it, without reading page rows.


class Contents(NamedTuple):
    """Published records of one namespace in one segment, without those that were moved to another segment."""

    segment: int
    digest: bytes
    records: int
    stored_bytes: int


def add_contents(txn: Any, db: Any, change: Contents) -> None:
    key = _CONTENTS + _NUMBER.pack(change.segment) + change.digest
    data = txn.get(key, db=db)
    old = (0, 0) if data is None else _unpack(_AMOUNT, data)
    if old is None:  # damaged: the row stays, since the counts are unknown but not zero
        return
    records, stored = old[0] + change.records, old[1] + change.stored_bytes
    if records > 0:
        txn.put(key, _pack(_AMOUNT.pack(records, max(0, stored))), db=db)
    else:
        txn.delete(key, db=db)


def read_contents(txn: Any, db: Any, after: bytes, rows_max: int) -> tuple[list[Contents], bytes | None]:
    """Up to ``rows_max`` rows behind the key ``after`` (b"" at first), and the next ``after`` or None at the end."""
    with txn.cursor(db=db) as cursor:
        more = cursor.set_range(after + b"\0" if after else _CONTENTS)
        rows = list(islice(cursor, rows_max)) if more else []
    found, at = list[Contents](), len(_CONTENTS)
    for key, value in rows:
        if not key.startswith(_CONTENTS):
            return found, None
        if len(key) == at + 36:
            amounts = _unpack(_AMOUNT, value) or (0, 0)  # damaged: listed with unknown amounts
            found.append(Contents(_NUMBER.unpack_from(key, at)[0], key[at + 4 :], *amounts))
    return found, rows[-1][0] if len(rows) == rows_max else None


def has_contents(txn: Any, db: Any, number: int, digest: bytes) -> bool:
    """Whether a segment holds pages of a namespace."""
    return txn.get(_CONTENTS + _NUMBER.pack(number) + digest, db=db) is not None


def delete_contents(txn: Any, db: Any, number: int) -> None:
    prefix = _CONTENTS + _NUMBER.pack(number)
    with txn.cursor(db=db) as cursor:
        found = cursor.set_range(prefix)
        while found and cursor.key().startswith(prefix):
            found = cursor.delete()
