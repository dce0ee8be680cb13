"""Changing page rows inside a write transaction: claiming, publishing, moving, sweeping."""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Iterable, Sequence
from typing import NamedTuple

from kvfs.format.segment import KNOWN_CODECS
from kvfs.index.rows import CLAIM, CLAIM_SECONDS, RUN, Extent, Place, claim, pack_row, parse_row
from kvfs.index.session import Session

Places = dict[int, Place]


class Target(NamedTuple):
    """A chunk and the row that it goes to: ``head`` is the chunk hash that keys the row."""

    chunk: int  # number in the prompt
    slot: int  # chunk of the run
    chunk_hash: bytes
    head: bytes


class RunKeys(NamedTuple):
    """One run of a prompt, for one part: its hashes and how a hash becomes a row key."""

    first: int  # number of the run's first chunk in the prompt
    hashes: Sequence[bytes]  # of all chunks of the run that the prompt has
    key: Callable[[bytes], bytes]
    leaves: int


def load(session: Session, key: bytes) -> Places:
    row = parse_row(key, session.txn.get(key, db=session.db.pages))
    return dict(row.places()) if row is not None else {}


def save(session: Session, key: bytes, places: Places, leaves: int) -> None:
    """Write a row back without the chunks whose segments are gone."""
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
    """Whether somebody is writing the chunk."""
    return bool(place.flags & CLAIM) and session.claimed_until(place.segment, place.expires)


def _is_taken(session: Session, place: Place | None, wanted: bytes) -> bool:
    """Whether a slot cannot take the chunk ``wanted``.

    A claim that has ended keeps the slot for its own chunk as long as its segment lives: the record may be there, not
    published. A rebuild would name it here, while what follows it lay in another row, which nothing led to.
    """
    if place is None:
        return False
    if place.flags & CLAIM and place.chunk_hash != wanted and session.segment_alive(place.segment):
        return True
    return is_live(session, place) or claim_holds(session, place)


class Claims(NamedTuple):
    """What ``claim_run`` decided about the chunks asked for."""

    targets: list[Target]  # claimed for the caller
    skipped: int  # there already
    in_flight: int  # somebody else is writing them


def claim_run(session: Session, run: RunKeys, slots: Iterable[int], segment: int) -> Claims:
    """Claim what is neither present nor claimed, and decide which row each chunk goes to."""
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

    A chunk that is neither here nor about to be stored may lie in a row behind a gap. A new chunk must then not
    be placed so that nothing leads to that row any more, so all rows are read; otherwise up to the first gap.
    """
    rows: dict[int, Places] = {}
    count = len(run.hashes)
    asked = sum(1 << j for j in slots)
    seen = _read_rows(session, run, rows, 0, stop_at_gap=True)
    if (seen | asked) & (1 << count) - 1 != (1 << count) - 1:
        _read_rows(session, run, rows, seen, stop_at_gap=False)
    return {0: {}, **dict(sorted(rows.items()))}


def _read_rows(session: Session, run: RunKeys, rows: dict[int, Places], seen: int, *, stop_at_gap: bool) -> int:
    """Add the rows that a lookup reads which has ``seen`` these chunks; the chunks seen afterwards."""
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
    """CLAIM if somebody is writing the chunk, 0 if it is there, None if neither."""
    for places in rows.values():
        place = places.get(slot)
        if place is not None and place.chunk_hash == wanted:
            if is_live(session, place):
                return 0
            if claim_holds(session, place):
                return CLAIM
    return None


def _row_for(session: Session, rows: dict[int, Places], slot: int, wanted: bytes) -> int:
    """Which row takes a chunk: its own if there is one, as others of the chain lie there too; else the last row
    before it that has the slot free (the run's first row if there is none at all); else its own.
    """
    if rows.get(slot):
        return slot
    for number in sorted(rows, reverse=True):
        if number < slot and not _is_taken(session, rows[number].get(slot), wanted):
            return number
    return slot


class Publish(NamedTuple):
    """A record that lies in a segment and is to be named by the index."""

    head: bytes
    slot: int
    place: Place


class Named(NamedTuple):
    """How many records the index names now, and how many bytes they take."""

    records: int
    stored_bytes: int


def publish(session: Session, run_key: Callable[[bytes], bytes], leaves: int, records: Iterable[Publish]) -> Named:
    """Name records; the first of two equal ones stays. What was named by this call."""
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
            head = place.chunk_hash  # the slot went to another continuation meanwhile
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


def move(
    session: Session, run_key: Callable[[bytes], bytes], leaves: int, source: int, seq: int, to: Publish
) -> Place | None:
    """Point a row from record ``seq`` of segment ``source`` to a copy; the old place, None if it did not name that."""
    key = run_key(to.head)
    places = load(session, key)
    old = places.get(to.slot)
    if old is None or (old.segment, old.seq, old.chunk_hash) != (source, seq, to.place.chunk_hash) or old.flags & CLAIM:
        return None
    places[to.slot] = to.place
    save(session, key, places, leaves)
    return old


def forget_place(session: Session, keys: Iterable[bytes], wrong: set[tuple[int, int]]) -> int:
    """Remove records (segment, seq), found to be bad, from the rows ``keys``; returns how many."""
    return len(forget(session, keys, wrong))


def forget(session: Session, keys: Iterable[bytes], wrong: Container[tuple[int, int]]) -> set[tuple[int, int]]:
    """Remove records (segment, seq) from the rows ``keys``; those that were there."""
    removed: set[tuple[int, int]] = set()
    for key in keys:
        row = parse_row(key, session.txn.get(key, db=session.db.pages))
        if row is None:
            continue
        places = dict(row.places())
        bad = [j for j, p in places.items() if (p.segment, p.seq) in wrong and not p.flags & CLAIM]
        removed |= {(places[j].segment, places[j].seq) for j in bad}
        for j in bad:
            del places[j]
        if bad:
            save(session, key, places, row.leaves)
    return removed


def sweep(session: Session, start: bytes, rows_max: int, *, pack: bool = False) -> tuple[bytes | None, int]:
    """Clean up to ``rows_max`` page rows from key ``start`` on; (next key or None at the end, rows changed).

    ``pack``: write all of them anew. LMDB joins neighbouring leaves when both are three quarters empty, not before.
    Written in random order, leaves are as full as those of an index that only grew, with room for more.
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
    """Claims that have ended stay, see ``_is_taken``."""
    expired = where.expires and where.expires <= session.now_s and not where.flags & CLAIM
    return session.segment_alive(where.segment) and not expired


assert RUN <= 32, "the presence mask of a row has 32 bits"
