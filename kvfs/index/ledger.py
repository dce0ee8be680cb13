"""The ledger: the life of a segment. Each step is one function here, inside one write transaction.

    active(owner) -> sealed -> dropped -> reclaimed

    state     steps into it, and who takes them      meaning
    active    new_segment: a writer                  The owner appends. The row is charged before the file exists,
                                                     and by ``reserve`` before the file grows.
              release_ownership: its owner           Trimmed at a close; no owner until a writer adopts it.
              adopt: another process                 Taken over from a dead owner or none, with a higher epoch.
    sealed    seal: its owner                        Immutable; the file has its seal page and its final size.
              close_for_appends: its owner           Immutable after a failure: no seal page, the charge stays.
    dropped   mark_dropped: evictor, purge, a        From this commit on every page is a miss, but readers may hold
              failed sync                            the file: it stays charged.
    (no row)  reclaim: the reclaimer                 The file was held by no process and is unlinked; no charge.

The index decides: the file follows its row, apart from the seal page, which is written first. ``ActiveSegments``
(kvfs.write) takes the steps up to sealed, ``Evictor`` and ``Reclaimer`` (kvfs.eviction) those after it. The reclaimer
renames the file into ``doomed/``, takes an exclusive flock, unlinks the file and then deletes the row; a reader's or a
map's shared flock makes it try again later.

A crash leaves these rows, and the kernel drops the locks of the dead:

- charged, no file yet: an adopter fails to open the file and closes the segment for appends; it is charged until it
  is evicted.
- active with unpublished bytes: an adopter appends behind ``tail``, the end of what was published. If no writer
  adopts it, the evictor does, and drops it.
- seal page written, row active: an adopter finds the seal and closes the segment for appends.
- dropped, wherever the file is: the next evictor repeats the steps of the reclaimer, each of which may be done already.
- a file without a row: ``charge_file`` makes one, dropped in ``doomed/``, else sealed and without records.
- no index: a rebuild takes each row from its file. A file in ``doomed/`` is dropped, one with a seal is sealed, any
  other is active without an owner if no other process has the store open and it may be appended to, else sealed.

A living process whose step failed, or was interrupted between a commit and its use, takes it within seconds
(``ActiveSegments.tidy``).

``used`` is the sum of what all rows are charged with. Writers may fill the limit less the standing reserve, eviction
all of it.
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
QUOTA_BYTES = 8  # of a class id: the quota that pays
NO_QUOTA = bytes(QUOTA_BYTES)
MARK_BYTES = 64  # of a purge mark without its bits, one per record, rounded up
EPOCH_MAX = 0xFFFF_FFFF  # what a table entry can hold
Step: TypeAlias = Callable[[Session, int, bytes], object]  # a step that the owner takes: (session, number, owner)


class NeedSpaceError(Exception):
    """The ledger does not allow the growth; ``missing`` bytes must be freed first.

    ``owner``: the quota whose cap is reached, and whose segments must be evicted; empty for the store's limit.
    """

    def __init__(self, missing: int, owner: bytes = b"") -> None:
        super().__init__(f"{missing} bytes missing")
        self.missing = missing
        self.owner = owner


class StaleWriterError(Exception):
    """The index was replaced or the segment dropped: its writer must not append any more."""


class Budget(NamedTuple):
    """Limits of a reservation, in bytes: of all segments, of the index, and of the quota that pays.

    ``owner`` is that quota (8 bytes, zero for none), ``cap`` its limit.
    """

    limit: int
    index_limit: int
    owner: bytes = NO_QUOTA
    cap: int | None = None


def budget(settings: Settings, class_id: bytes = ANY_CLASS, *, evictor: bool = False) -> Budget:
    """Limits of a writer of a class.

    Eviction may use the standing reserve, also beyond a quota's cap: copies of hot pages are charged while their
    victim still is.
    """
    limit = settings.segments_bytes_max - (0 if evictor else settings.reserve_bytes)
    owner = class_id[:QUOTA_BYTES]
    cap = None
    if owner != NO_QUOTA:
        cap = next((q.cap_bytes for name, q in settings.quotas.items() if quota_id(name) == owner), None)
        if cap is not None and evictor:
            cap += settings.reserve_bytes
    return Budget(limit, int(settings.index_bytes * (1.0 if evictor else FULL)), owner, cap)


def segment_limit(settings: Settings, fresh: int) -> int:
    """Bytes at which a segment is full: ``segment_bytes``, or the size of four records if they are larger.

    ``fresh`` is the size of a segment that holds one such record and nothing else.
    """
    return max(settings.segment_bytes, min(4 * fresh, page_limit(settings)))


def page_limit(settings: Settings) -> int:
    """Bytes that a segment with a single record may take: ``segment_bytes`` or a sixteenth of the capacity."""
    return max(settings.segment_bytes, settings.capacity_bytes // 16)


def charge(file_bytes: int, records: int) -> int:
    """Bytes that a segment is charged: its file, its access times, a purge mark, and one block for the file's metadata.

    Each segment is charged for a mark, since a purge needs room for marks in a store that is full.
    """
    return file_bytes + fmt.align(records * STAMP_BYTES + 1) + fmt.align(records // 8 + MARK_BYTES) + fmt.BLOCK


def new_segment(
    session: Session, segment_id: bytes, owner: bytes, class_id: bytes, flags: int, allocated: int, limits: Budget
) -> int:
    """Charge and insert a new active segment; its number. NeedSpaceError leaves the index unchanged."""
    cost = charge(allocated, 0)
    _check(session, cost, limits)
    row = SegmentRow(segment_id, owner, class_id, ACTIVE, flags, 1, 0, cost, fmt.FIRST_PAYLOAD, fmt.FIRST_TABLE, 0)
    return session.add_segment(row)


def charge_file(session: Session, segment_id: bytes, generation: str, state: int, file_bytes: int) -> None:
    """Insert a row for a segment file that has none, whatever the limit is. It names no records."""
    if session.generation == generation:
        cost = charge(file_bytes, 0)
        session.add_segment(
            SegmentRow(segment_id, NO_OWNER, ANY_CLASS, state, 0, 1, 0, cost, fmt.FIRST_PAYLOAD, fmt.FIRST_TABLE, 0)
        )


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
    """Take over an active segment of a dead owner or of none; None if its row is not ``seen`` any more."""
    row = session.segment(number)
    if row != seen:
        return None
    if seen.epoch == EPOCH_MAX:  # cannot be raised: no process may append to it again
        session.set_segment(number, seen, seen._replace(state=SEALED, owner=NO_OWNER))
        return None
    taken = seen._replace(owner=owner, epoch=seen.epoch + 1)
    session.set_segment(number, seen, taken)
    return taken


def shrink(session: Session, number: int, owner: bytes, generation: str, file_bytes: int) -> None:
    """Charge an active segment that its owner trimmed to ``file_bytes``."""
    row = own_segment(session, number, owner, generation)
    session.set_segment(number, row, row._replace(allocated=charge(file_bytes, row.records)))


def close_for_appends(session: Session, number: int, owner: bytes) -> None:
    """End appends to a segment that failed; its published pages stay, and so does the charge."""
    row = session.segment(number)
    if row is not None and row.owner == owner and row.state == ACTIVE:
        session.set_segment(number, row, row._replace(state=SEALED, owner=NO_OWNER))


def release_ownership(session: Session, number: int, owner: bytes, generation: str, file_bytes: int) -> None:
    """Let another process adopt an active segment that was trimmed to ``file_bytes``."""
    row = own_segment(session, number, owner, generation)
    session.set_segment(number, row, row._replace(owner=NO_OWNER, allocated=charge(file_bytes, row.records)))


def seal(session: Session, number: int, owner: bytes, generation: str, file_bytes: int) -> None:
    """Seal a segment whose file has its seal page and its final size."""
    row = own_segment(session, number, owner, generation)
    session.set_segment(
        number, row, row._replace(state=SEALED, owner=NO_OWNER, allocated=charge(file_bytes, row.records))
    )


def mark_dropped(session: Session, number: int, owner: bytes, segment_id: bytes = b"") -> SegmentRow | None:
    """Make every page of the segment a miss from this commit on; its bytes stay charged. The row as it is now.

    A caller that read ``number`` in an earlier transaction passes ``segment_id``: in an index that was rebuilt
    meanwhile the number may mean another segment, which stays, and None is returned.
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
    """Delete the row of a dropped segment whose file is unlinked and held by no process: its bytes are free."""
    row = session.segment(number)
    if row is not None and row.state == DROPPED and row.segment_id == segment_id:
        session.delete_segment(number, row)


def abandon_stale(session: Session, number: int, owner: bytes) -> None:
    """Close for appends, or drop if empty, a segment that is still active: its row was read before its lock was taken.

    ``take_step`` applies it to the row as it is now.
    """
    row = session.segment(number)
    if row is not None and row.state == ACTIVE and row.owner == owner:
        (close_for_appends if row.records else mark_dropped)(session, number, owner)


def take_step(step: Step, number: int, owner: bytes, generation: str, session: Session) -> None:
    """Take ``step`` if ``generation`` is current: in another one the number means another segment."""
    if session.generation == generation:
        step(session, number, owner)
