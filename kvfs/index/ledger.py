"""The ledger: what each step of a segment's life does to the index, inside one write transaction.

    active(owner) -> sealed -> dropped -> gone

A segment is charged in its row before its file grows, and until nobody holds its unlinked blocks any more.
``used`` is the sum of all rows; normal writers may fill the limit less the standing reserve, eviction all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from kvfs.directory.access_times import STAMP_BYTES
from kvfs.directory.config import Settings, quota_id
from kvfs.directory.liveness import NO_OWNER
from kvfs.errors import IndexUnavailableError
from kvfs.format import segment as fmt
from kvfs.index.environment import FULL
from kvfs.index.session import Session
from kvfs.index.tables import ACTIVE, DROPPED, SEALED, SegmentRow

ANY_CLASS = bytes(16)
QUOTA_BYTES = 8  # of a class id: which quota pays
NO_QUOTA = bytes(QUOTA_BYTES)
EPOCH_MAX = 0xFFFF_FFFF
Step: TypeAlias = Callable[[Session, int, bytes], object]  # of a segment's life, that its owner takes


class NeedSpaceError(Exception):
    """The ledger does not allow the growth; ``missing`` bytes must be freed first.

    ``owner``: the quota whose cap is reached, and whose segments must go; empty for the store's limit.
    """

    def __init__(self, missing: int, owner: bytes = b"") -> None:
        super().__init__(f"{missing} bytes missing")
        self.missing = missing
        self.owner = owner


class StaleWriterError(Exception):
    """The index was replaced or the segment taken away: the writer must be dropped."""


class Budget(NamedTuple):
    """Who asks for space: ``limit`` bytes may be used in all, ``index_limit`` of the index.

    ``owner`` is the quota that pays (8 bytes, zero for none), ``cap`` what it may use.
    """

    limit: int
    index_limit: int
    owner: bytes = NO_QUOTA
    cap: int | None = None


def budget(settings: Settings, class_id: bytes = ANY_CLASS, *, evictor: bool = False) -> Budget:
    """What a writer of a class may use. Eviction may use the standing reserve, too, beyond a quota's cap as well: what
    it carries is charged while its victim still is."""
    limit = settings.segments_bytes_max - (0 if evictor else settings.reserve_bytes)
    owner = class_id[:QUOTA_BYTES]
    cap = None
    if owner != NO_QUOTA:
        cap = next((q.cap_bytes for name, q in settings.quotas.items() if quota_id(name) == owner), None)
        if cap is not None and evictor:
            cap += settings.reserve_bytes
    return Budget(limit, int(settings.index_bytes * (1.0 if evictor else FULL)), owner, cap)


def segment_limit(settings: Settings, fresh: int) -> int:
    """Bytes at which a segment is full: ``segment_bytes``, or room for four records where they are that large.

    ``fresh`` is the size of a segment that holds one such record and nothing else.
    """
    return max(settings.segment_bytes, min(4 * fresh, page_limit(settings)))


def page_limit(settings: Settings) -> int:
    """What a segment with a single record may take: a sixteenth of the capacity."""
    return max(settings.segment_bytes, settings.capacity_bytes // 16)


def charge(file_bytes: int, records: int) -> int:
    """What a segment costs: its file, its stamps, and a block for what a file system needs per file."""
    return file_bytes + fmt.align(records * STAMP_BYTES + 1) + fmt.BLOCK


def new_segment(
    session: Session, segment_id: bytes, owner: bytes, class_id: bytes, flags: int, allocated: int, limits: Budget
) -> int:
    """Charge and insert a new active segment; its number. NeedSpaceError before anything changes."""
    cost = charge(allocated, 0)
    _check(session, cost, limits)
    row = SegmentRow(segment_id, owner, class_id, ACTIVE, flags, 1, 0, cost, fmt.FIRST_PAYLOAD, fmt.FIRST_TABLE, 0)
    return session.add_segment(row)


def own_segment(session: Session, number: int, owner: bytes, generation: str) -> SegmentRow:
    """The row of an active segment of ``owner``, or StaleWriterError."""
    row = session.segment(number)
    if session.generation != generation or row is None or row.owner != owner or row.state != ACTIVE:
        raise StaleWriterError
    return row


def reserve(session: Session, number: int, row: SegmentRow, allocated: int, records: int, limits: Budget) -> SegmentRow:
    """Charge the growth of an active segment to ``allocated`` file bytes and ``records`` records."""
    cost = max(row.allocated, charge(allocated, records))
    _check(session, cost - row.allocated, limits)
    grown = row._replace(allocated=cost)
    if grown != row:
        session.set_segment(number, row, grown)
    return grown


def _check(session: Session, growth: int, limits: Budget) -> None:
    used = session.ledger().used
    if growth > 0 and used + growth > limits.limit:
        raise NeedSpaceError(used + growth - limits.limit)
    if growth > 0 and limits.cap is not None:
        mine = session.quota_used(limits.owner)
        if mine + growth > limits.cap:
            raise NeedSpaceError(mine + growth - limits.cap, limits.owner)
    if session.used_bytes() > limits.index_limit:
        raise IndexUnavailableError("index full")


def adopt(session: Session, number: int, seen: SegmentRow, owner: bytes) -> SegmentRow | None:
    """Take over a dead owner's active segment, if it still is as it was seen."""
    row = session.segment(number)
    if row != seen:
        return None
    if seen.epoch == EPOCH_MAX:  # nobody can go on with it
        session.set_segment(number, seen, seen._replace(state=SEALED, owner=NO_OWNER))
        return None
    taken = seen._replace(owner=owner, epoch=seen.epoch + 1)
    session.set_segment(number, seen, taken)
    return taken


def shrink(session: Session, number: int, owner: bytes, generation: str, file_bytes: int) -> None:
    """Blocks behind the tail were given back."""
    row = own_segment(session, number, owner, generation)
    session.set_segment(number, row, row._replace(allocated=charge(file_bytes, row.records)))


def close_for_appends(session: Session, number: int, owner: bytes) -> None:
    """No more appends to a segment that failed; its published pages stay, and so does the charge."""
    row = session.segment(number)
    if row is not None and row.owner == owner and row.state == ACTIVE:
        session.set_segment(number, row, row._replace(state=SEALED, owner=NO_OWNER))


def release_ownership(session: Session, number: int, owner: bytes, generation: str, file_bytes: int) -> None:
    """Leave an active segment to whoever wants to go on with it."""
    row = own_segment(session, number, owner, generation)
    session.set_segment(number, row, row._replace(owner=NO_OWNER, allocated=charge(file_bytes, row.records)))


def seal(session: Session, number: int, owner: bytes, generation: str, file_bytes: int) -> None:
    """The file has its seal page and its final size."""
    row = own_segment(session, number, owner, generation)
    session.set_segment(
        number, row, row._replace(state=SEALED, owner=NO_OWNER, allocated=charge(file_bytes, row.records))
    )


def mark_dropped(session: Session, number: int, owner: bytes, segment_id: bytes = b"") -> SegmentRow | None:
    """From this commit on every page of the segment is a miss. Its bytes stay charged.

    ``segment_id``: for who has the number from an earlier transaction. In an index that was built anew meanwhile it
    may be another segment's; that one stays, and None is returned.
    """
    row = session.segment(number)
    if row is None or (segment_id and row.segment_id != segment_id):
        return None
    if row.state == DROPPED:
        return row
    dropped = row._replace(state=DROPPED, owner=owner)
    session.set_segment(number, row, dropped)
    return dropped


def reclaim(session: Session, number: int, segment_id: bytes) -> None:
    """Nobody holds the unlinked file: its bytes are free."""
    row = session.segment(number)
    if row is not None and row.state == DROPPED and row.segment_id == segment_id:
        session.delete_segment(number, row)


def abandon_stale(session: Session, number: int, owner: bytes) -> None:
    """Seal or drop a segment if it is active still: what was seen outside the lock may be long past."""
    row = session.segment(number)
    if row is not None and row.state == ACTIVE and row.owner == owner:
        (close_for_appends if row.records else mark_dropped)(session, number, owner)


def take_step(step: Step, number: int, owner: bytes, generation: str, session: Session) -> None:
    if session.generation == generation:  # numbers mean other segments in another one
        step(session, number, owner)
