"""Changes of page rows inside a write transaction: claim, publish, move, forget, sweep."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from kvfs.format.segment import KNOWN_CODECS
from kvfs.index.rows import CLAIM, CLAIM_SECONDS, RUN, Extent, Place, claim, pack_row, parse_row
from kvfs.index.session import Session

Places = dict[int, Place]


class Target(NamedTuple):
    """A claimed chunk and its row: ``head`` is the chunk hash that keys the row."""

    chunk: int  # ordinal in the prompt
    slot: int  # chunk of the run
    chunk_hash: bytes
    head: bytes


class RunKeys(NamedTuple):
    """One run of a prompt, for one part: its chunk hashes, and the function from a hash to a row key."""

    first: int  # ordinal of the run's first chunk in the prompt
    hashes: Sequence[bytes]  # of all chunks of the run that the prompt has
    key: Callable[[bytes], bytes]
    leaves: int


def load(session: Session, key: bytes) -> Places:
    row = parse_row(key, session.txn.get(key, db=session.db.pages))
    return dict(row.places()) if row is not None else {}


def save(session: Session, key: bytes, places: Places, leaves: int) -> None:
    """Write a row back without the chunks whose segments were dropped."""
    kept = {j: p for j, p in places.items() if session.segment_alive(p.segment)}
    if kept:
        session.put_row(key, pack_row(key, kept, leaves))
    else:
        session.delete_row(key)


def is_live(session: Session, place: Place) -> bool:
    if place.codec not in KNOWN_CODECS:
        return False
    if place.flags & CLAIM or (place.expires and place.expires <= session.now_s):
        return False
    return session.segment_alive(place.segment)


def claim_holds(session: Session, place: Place) -> bool:
    """Whether a writer has a valid claim on the chunk."""
    return bool(place.flags & CLAIM) and session.claimed_until(place.segment, place.expires)


def _is_taken(session: Session, place: Place | None, wanted: bytes) -> bool:
    """Whether a slot cannot take the chunk ``wanted``.

    An expired claim reserves the slot for its own chunk until its segment is dropped: the record may be written but
    not published. A rebuild would name it in this slot, and a lookup would not reach the row with its successors.
    """
    if place is None:
        return False
    if place.flags & CLAIM and place.chunk_hash != wanted and session.segment_alive(place.segment):
        return True
    return is_live(session, place) or claim_holds(session, place)


class Claims(NamedTuple):
    """What ``claim_run`` decided about the chunks asked for."""

    targets: list[Target]  # claimed for the caller
    skipped: int  # stored already
    in_flight: int  # claimed by another writer


def claim_run(session: Session, run: RunKeys, slots: Iterable[int], segment: int) -> Claims:
    """Claim the chunks of ``slots`` that are neither stored nor claimed, and decide which row each one goes to."""
    slots = list(slots)
    rows = _own_rows(session, run, slots)
    changed: set[int] = set()
    targets: list[Target] = []
    skipped = in_flight = 0
    expires = session.now_s + CLAIM_SECONDS
    for j in slots:
        wanted = run.hashes[j]
        found = _state_of(session, rows, j, wanted)
        if found is None:
            number = _row_for(session, rows, j, wanted)
            if number not in rows:
                rows[number] = load(session, run.key(run.hashes[number]))
                found = _state_of(session, {number: rows[number]}, j, wanted)
        if found is None:
            rows[number][j] = claim(wanted, segment, expires)
            changed.add(number)
            targets.append(Target(run.first + j, j, wanted, run.hashes[number]))
        elif found & CLAIM:
            in_flight += 1
        else:
            skipped += 1
    for number in changed:
        save(session, run.key(run.hashes[number]), rows[number], run.leaves)
    return Claims(targets, skipped, in_flight)


def _own_rows(session: Session, run: RunKeys, slots: Sequence[int]) -> dict[int, Places]:
    """Rows of this chain, by the chunk that keys them, in the order in which a lookup reads them.

    Rows are read up to the first gap if all chunks of the run are stored there or in ``slots``. Otherwise all rows are
    read: a chunk may be in a row behind the gap, and a new chunk must not be placed so that lookups miss that row.
    """
    rows: dict[int, Places] = {}
    count = len(run.hashes)
    asked = sum(1 << j for j in slots)
    seen = _read_rows(session, run, rows, 0, stop_at_gap=True)
    if (seen | asked) & (1 << count) - 1 != (1 << count) - 1:
        _read_rows(session, run, rows, seen, stop_at_gap=False)
    return {0: {}, **dict(sorted(rows.items()))}


def _read_rows(session: Session, run: RunKeys, rows: dict[int, Places], seen: int, *, stop_at_gap: bool) -> int:
    """Add to ``rows`` what a lookup reads after it has ``seen`` these chunks (bits); the chunks seen afterwards."""
    for j, head in enumerate(run.hashes):
        if seen >> j & 1 or j in rows:
            continue
        places = load(session, run.key(head))
        if places:
            rows[j] = places
            for slot, place in places.items():
                if slot < len(run.hashes) and place.chunk_hash == run.hashes[slot] and is_live(session, place):
                    seen |= 1 << slot
        if stop_at_gap and not seen >> j & 1:
            break
    return seen


def _state_of(session: Session, rows: dict[int, Places], slot: int, wanted: bytes) -> int | None:
    """CLAIM if a writer has claimed the chunk, 0 if it is stored, None if neither."""
    for places in rows.values():
        place = places.get(slot)
        if place is not None and place.chunk_hash == wanted:
            if is_live(session, place):
                return 0
            if claim_holds(session, place):
                return CLAIM
    return None


def _row_for(session: Session, rows: dict[int, Places], slot: int, wanted: bytes) -> int:
    """Which row takes a chunk (by the chunk that keys it): its own row if it exists, since it holds others of the
    chain; else the last row before it with a free slot (the run's first row if there is no row); else its own.
    """
    if rows.get(slot):
        return slot
    for number in sorted(rows, reverse=True):
        if number < slot and not _is_taken(session, rows[number].get(slot), wanted):
            return number
    return slot


class Publish(NamedTuple):
    """A record in a segment that the index shall name: the row (by its head), the slot and the place."""

    head: bytes
    slot: int
    place: Place


class Named(NamedTuple):
    """How many records a call has named, and their stored bytes."""

    records: int
    stored_bytes: int


def publish(session: Session, run_key: Callable[[bytes], bytes], leaves: int, records: Iterable[Publish]) -> Named:
    """Name records; of two records of one page the first stays. What this call has named."""
    rows: dict[bytes, Places] = {}
    named = stored_bytes = 0
    for head, slot, place in records:
        places = rows.get(head)
        if places is None:
            places = rows[head] = load(session, run_key(head))
        old = places.get(slot)
        if (
            old is not None
            and old.chunk_hash != place.chunk_hash
            and (is_live(session, old) or claim_holds(session, old))
        ):
            head = place.chunk_hash  # the slot was given to another continuation meanwhile
            places = rows.setdefault(head, load(session, run_key(head)))
            old = places.get(slot)
        if old is not None and old.chunk_hash == place.chunk_hash and is_live(session, old):
            continue
        places[slot] = place
        named += 1
        stored_bytes += place.stored_bytes
    for head, places in rows.items():
        save(session, run_key(head), places, leaves)
    return Named(named, stored_bytes)


class Moved(NamedTuple):
    """A record ``seq`` of segment ``source``, and its copy: the chunk ``slot`` of the run of ``run_hash``."""

    source: int
    seq: int
    run_hash: bytes
    slot: int
    place: Place  # of the copy


def move(
    session: Session, run_key: Callable[[bytes], bytes], leaves: int, moved: Iterable[Moved]
) -> list[tuple[Moved, Place]]:
    """Point rows to copies where they still name the sources; those copies, with the old places.

    A record is in the row of its run, or in a row of its own where its slot went to another continuation when it was
    stored. Each row is read and written once.
    """
    rows: dict[bytes, Places] = {}
    changed: dict[bytes, None] = {}
    named = []
    for m in moved:
        for head in dict.fromkeys((m.run_hash, m.place.chunk_hash)):
            places = rows.get(head)
            if places is None:
                places = rows[head] = load(session, run_key(head))
            old = places.get(m.slot)
            if old is None or old.flags & CLAIM or old.chunk_hash != m.place.chunk_hash:
                continue
            if (old.segment, old.seq) == (m.source, m.seq):
                places[m.slot] = m.place
                changed[head] = None
                named.append((m, old))
                break
    for head in changed:
        save(session, run_key(head), rows[head], leaves)
    return named


def forget(session: Session, keys: Iterable[bytes], wrong: Mapping[tuple[int, int], bytes]) -> set[tuple[int, int]]:
    """Remove the records ``wrong`` from the rows ``keys``, and from the counts of their namespaces.

    ``wrong``: (segment, seq) -> digest of the namespace; empty if unknown. Those that were removed.
    """
    removed: set[tuple[int, int]] = set()
    sums: dict[tuple[int, bytes], tuple[int, int]] = {}
    for key in keys:
        row = parse_row(key, session.txn.get(key, db=session.db.pages))
        if row is None:
            continue
        places = dict(row.places())
        bad = [j for j, p in places.items() if (p.segment, p.seq) in wrong and not p.flags & CLAIM]
        for j in bad:
            place = places.pop(j)
            record = place.segment, place.seq
            removed.add(record)
            counted = place.segment, wrong[record]
            records, stored_bytes = sums.get(counted, (0, 0))
            sums[counted] = records + 1, stored_bytes + place.stored_bytes
        if bad:
            save(session, key, places, row.leaves)
    for (segment, digest), (records, stored_bytes) in sums.items():
        if digest:
            session.add_contents(segment, digest, -records, -stored_bytes)
    return removed


def sweep(session: Session, start: bytes, rows_max: int, *, pack: bool = False) -> tuple[bytes | None, int]:
    """Remove dead places from up to ``rows_max`` page rows, from key ``start`` on.

    Returns (next key or None at the end, rows changed). ``pack``: rewrite all of them, since LMDB merges neighbouring
    leaves only when both are three quarters empty. Rewritten in random order, leaves become as full as those of an
    index that only grew, with room for inserts.
    """
    changed: list[tuple[bytes, Places, int]] = []
    good: list[tuple[bytes, bytes]] = []
    following: bytes | None = None
    with session.txn.cursor(db=session.db.pages) as cursor:
        found = cursor.set_range(start)
        for _ in range(rows_max):
            if not found:
                break
            key, value = cursor.item()
            row = parse_row(key, value)
            if row is None:
                changed.append((key, {}, 0))
            elif not all(_keep(session, e) for e in row.extents):
                kept = {j: p for j, p in row.places() if _keep(session, p)}
                changed.append((key, kept, row.leaves))
            elif pack:
                good.append((key, value))
            found = cursor.next()
        if found:
            following = cursor.key()
    for key, _ in good:
        session.delete_row(key)
    random.shuffle(good)
    for key, value in good:
        session.put_row(key, value)
    for key, places, leaves in changed:
        if places:
            session.put_row(key, pack_row(key, places, leaves))
        else:
            session.delete_row(key)
    return following, len(changed)


def _keep(session: Session, where: Extent | Place) -> bool:
    """Whether a sweep keeps a place. Expired claims stay, see ``_is_taken``."""
    expired = where.expires and where.expires <= session.now_s and not where.flags & CLAIM
    return session.segment_alive(where.segment) and not expired


assert RUN <= 32, "the presence mask of a row has 32 bits"
