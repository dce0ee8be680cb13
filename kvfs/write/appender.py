"""Saving: claims, appends, the commit point.

claim    one transaction: drop what is stored or claimed, reserve capacity, claim the rest
append   checksums, payloads, leaf tables, entries, into space that is reserved
publish  one transaction: the commit point
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvfs.context import Context
from kvfs.directory.config import Settings
from kvfs.errors import IndexUnavailableError, NoSpaceError
from kvfs.format import segment as fmt
from kvfs.format.checksums import LEAF_BYTES
from kvfs.index import ledger
from kvfs.index.deadlines import COMMIT_SECONDS
from kvfs.index.ledger import NeedSpaceError, StaleWriterError
from kvfs.index.row_updates import Claims, Moved, Publish, RunKeys, Target, claim_run, move, publish
from kvfs.index.rows import Place
from kvfs.index.session import Session
from kvfs.index.tables import SegmentRow
from kvfs.lookup.search import Prompt
from kvfs.pages.chunk_hash import page_key
from kvfs.pages.layout import Group, PageLayout, Part
from kvfs.segments.writer import Placed, Record, SegmentWriter
from kvfs.write import class_locks
from kvfs.write.active_segments import STEP, Active, ActiveSegments, Declined, RoomWait, SegmentClass
from kvfs.write.encode import encode_records

BATCH_PAGES = 256  # of one commit: 8 rows of 32 chunks, well under a millisecond of the lock
BATCH_BYTES = 64 << 20  # of one gathered write
SPACE_SECONDS = 5.0  # that a save waits for eviction, in sum, before it declines
SPARE_RECORDS = 8  # charged for access times of entries that an append adds: descriptor, chain entries
ANYTHING = SegmentClass()


class PartShape(NamedTuple):
    """Sizes of one part of a page of one group."""

    page_bytes: int  # of the part, raw
    leaf_bytes: int
    leaves: int

    @classmethod
    def of(cls, group: Group, part: Part) -> PartShape:
        """ConfigError if the part reaches outside the group."""
        leaves, leaf_bytes = group.leaves(part), group.leaf_bytes(part)
        return cls(leaves * leaf_bytes, leaf_bytes, leaves)

    def need(self, writer: SegmentWriter, digest: bytes, descriptor: bytes, pages: int) -> int:
        """Bytes that an append of so many pages takes."""
        return writer.need(digest, descriptor, self.page_bytes, LEAF_BYTES * self.leaves, pages)

    def need_fresh(self, descriptor_bytes: int, pages: int = 1) -> int:
        """Bytes of a sealed segment that holds so many pages and nothing else."""
        return SegmentWriter.need_fresh(descriptor_bytes, self.page_bytes, LEAF_BYTES * self.leaves, pages)


@dataclass(frozen=True)
class AppendJob:
    """One part of one group of a prompt, to be stored."""

    digest: bytes  # of the namespace
    descriptor: bytes
    group_number: int
    group: Group
    part: Part
    prompt: Prompt
    payload: Callable[[int], Any]  # chunk number -> buffer of shape.page_bytes
    expires: int = 0
    at_us: int = 0  # when the request began that these pages belong to
    attempt: bytes = bytes(8)
    segment_class: SegmentClass = ANYTHING
    table: Callable[[int], bytes] | None = None  # chunk number -> leaf table, where it was made with the payload
    codec: int = fmt.CODEC_RAW  # of stored payloads, where it makes them smaller
    shape: PartShape = field(init=False)
    packed_part: bytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", PartShape.of(self.group, self.part))
        object.__setattr__(self, "packed_part", self.part.pack())

    def row_key(self, chunk_hash: bytes) -> bytes:
        return page_key(self.digest, self.group.name, chunk_hash) + self.packed_part

    def need(self, writer: SegmentWriter, pages: int) -> int:
        return self.shape.need(writer, self.digest, self.descriptor, pages)

    def need_fresh(self, pages: int = 1) -> int:
        return self.shape.need_fresh(len(self.descriptor), pages)


class Move(NamedTuple):
    """A record to be copied, and the place in the index that names it."""

    source: int  # number of its segment
    seq: int
    slot: int  # chunk of its run
    record: Record
    used_us: int  # its access time, which the copy keeps


@dataclass(frozen=True)
class RelocateJob:
    """Records of one part of one group of a namespace, to be copied to another segment."""

    digest: bytes
    descriptor: bytes
    row_key: Callable[[bytes], bytes]
    shape: PartShape  # page_bytes: of the largest stored payload
    moves: Sequence[Move]
    segment_class: SegmentClass

    def need(self, writer: SegmentWriter) -> int:
        return self.shape.need(writer, self.digest, self.descriptor, len(self.moves))

    def need_fresh(self) -> int:
        return self.shape.need_fresh(len(self.descriptor), len(self.moves))


@dataclass
class Outcome:
    """Counts of one job; they add up to the chunks asked for."""

    stored: int = 0
    skipped: int = 0
    in_flight: int = 0
    declined: int = 0
    reason: str = ""


class Appender:
    """Stores and relocates pages. Thread-safe: one batch at a time per class of segments.

    Owns the order claim, append, publish; delegates the choice of the segment to ``ActiveSegments``, its file to
    ``SegmentWriter``, index rows to ``kvfs.index.row_updates``.
    """

    def __init__(self, context: Context, active: ActiveSegments, stored: Callable[[int], None]) -> None:
        self._c = context
        self._stored = stored  # told how many bytes of blocks were newly stored
        self._active = active

    # -- storing -----------------------------------------------------------------------------

    def room_wait(self, segment_class: SegmentClass) -> RoomWait:
        return self._active.room_wait(segment_class, SPACE_SECONDS)

    def store(self, job: AppendJob, chunks: Sequence[int], wait: RoomWait | None = None) -> Outcome:
        """Store ``chunks`` (ascending) of a job; the first decline ends it. ``wait``: of the whole save."""
        outcome = Outcome()
        if self._c.declines:
            self._c.counters.add(f"pages_declined_{self._c.declines}", len(chunks))
            return Outcome(declined=len(chunks), reason=self._c.declines)
        wait = wait or self.room_wait(job.segment_class)
        done = 0
        while done < len(chunks):
            try:
                with self._active.class_locks.acquire_within(job.segment_class):
                    done += self._batch(job, chunks[done:], outcome, wait)
                continue
            except Declined as exc:
                outcome.reason = exc.reason
            except IndexUnavailableError as exc:
                outcome.reason = "index"
                self._c.counters.add(f"declined_index_{str(exc).partition(':')[0].replace(' ', '_')}")
            except class_locks.AppendTimeoutError:
                outcome.reason = "io"
            except OSError as exc:
                full = exc.errno in (errno.ENOSPC, errno.EDQUOT)
                outcome.reason = "space" if full else "io"
                self._c.counters.add("disk_full" if full else "write_errors")
                with (
                    contextlib.suppress(class_locks.AppendTimeoutError),
                    self._active.class_locks.acquire_within(job.segment_class),
                ):
                    self._active.close_for_appends(job.segment_class)
                # the file system is smaller than the capacity, or other files fill it
                if full and self._active.evict_for_full_disk(self._c.settings.segment_bytes, wait):
                    outcome.reason = ""
                    continue
            outcome.declined += len(chunks) - done
            break
        self._c.counters.add_of(job.digest, pages_stored=outcome.stored)
        self._c.counters.add("pages_skipped", outcome.skipped)
        self._c.counters.add("pages_in_flight", outcome.in_flight)
        if outcome.declined:
            self._c.counters.add(f"pages_declined_{outcome.reason}", outcome.declined)
            self._c.counters.add_of(job.digest, pages_declined=outcome.declined)
        return outcome

    def _batch(self, job: AppendJob, chunks: Sequence[int], outcome: Outcome, wait: RoomWait) -> int:
        """Store the leading chunks that fit one batch; returns how many chunks were dealt with."""
        active = self._active.writer(
            job.segment_class, job.need_fresh(), job.need_fresh(len(chunks)), lambda w: job.need(w, 1), wait
        )
        batch = chunks[: self._fitting(job, active.writer, len(chunks))]
        try:
            claims = self._claim(job, batch, active, wait)
            stored = self._append(job, claims.targets, active) if claims.targets else 0
        except StaleWriterError:
            self._active.close_for_appends(job.segment_class)
            raise Declined("index") from None
        outcome.stored += stored
        outcome.skipped += claims.skipped + len(claims.targets) - stored  # the rest another writer has published
        outcome.in_flight += claims.in_flight
        self._active.note_use(job.segment_class)
        return len(batch)

    def _fitting(self, job: AppendJob, writer: SegmentWriter, pages: int) -> int:
        """How many of so many pages one batch appends to a segment: one at least."""
        size = job.shape.page_bytes
        limit = writer.remaining_bytes(ledger.segment_limit(self._c.settings, job.need_fresh()))
        count = min(pages, BATCH_PAGES, max(1, BATCH_BYTES // size))
        while count > 1 and (over := job.need(writer, count) - limit) > 0:
            count = max(1, count - max(1, over // fmt.align(size)))
        return count

    def _claim(self, job: AppendJob, chunks: Sequence[int], active: Active, wait: RoomWait) -> Claims:
        """Claim chunks and reserve space for those that are neither stored nor claimed; the file grows to it."""

        def transact(session: Session) -> tuple[Claims, int]:
            row = self._own_row(session, active)
            claims = [claim_run(session, run, slots, active.writer.number) for run, slots in _runs_of(job, chunks)]
            targets = [target for c in claims for target in c.targets]
            allocated = active.writer.allocated
            if targets:  # a purge finds the namespace from here on, also if the append fails
                session.put_namespace(job.digest, job.descriptor, job.group_number, job.packed_part)
                allocated = self._reserve(session, row, job, active.writer, len(targets))
            return Claims(targets, sum(c.skipped for c in claims), sum(c.in_flight for c in claims)), allocated

        claims, allocated = self._active.with_room(transact, wait, job.segment_class)
        if allocated > active.writer.allocated:
            active.writer.grow(allocated)
        return claims

    def _reserve(self, session: Session, row: SegmentRow, job: AppendJob, writer: SegmentWriter, pages: int) -> int:
        """Charge an append of so many pages, in steps of a segment; returns the file's size to allocate."""
        limits = job.segment_class.limits(self._c.settings)
        segment_bytes = ledger.segment_limit(self._c.settings, job.need_fresh())
        allocated, end = writer.allocated, writer.tail + job.need(writer, pages)
        if end > allocated:
            step = max(end, allocated + segment_bytes // STEP)
            # segment_bytes may have shrunk since the batch was made to fit
            allocated = max(fmt.align(end), min(segment_bytes, fmt.align(step)))
        records = writer.records + pages + SPARE_RECORDS
        try:
            ledger.reserve(session, writer.number, row, allocated, records, limits)
        except NeedSpaceError:  # for a whole step; the append itself may fit
            allocated = max(writer.allocated, fmt.align(end))
            ledger.reserve(session, writer.number, row, allocated, records, limits)
        return allocated

    def _append(self, job: AppendJob, targets: Sequence[Target], active: Active) -> int:
        """Write and publish the pages of claimed chunks; how many were published."""
        writer = active.writer
        raw = [self._record(job, t) for t in targets]
        records = encode_records(raw, job.codec, job.group.cell.element_bytes, self._c.counters)
        placed = writer.append(records, job.digest, job.descriptor, job.at_us)
        places = [_place(r, p, writer.number) for r, p in zip(records, placed, strict=True)]
        named = [Publish(t.head, t.slot, place) for t, place in zip(targets, places, strict=True)]
        if self._c.settings.sync == "sync":
            self._active.sync(writer)
        else:
            self._active.note_dirty(job.segment_class)
        stored = self._publish(job, named, active)
        written = sum(len(r.payload) for r in records)
        self._c.counters.add_of(job.digest, bytes_written=written)
        self._stored(sum(fmt.align(len(r.payload)) for r in records))
        return stored

    def _record(self, job: AppendJob, target: Target) -> Record:
        payload = job.payload(target.chunk)
        # a key has no place in a prompt: whatever derives the slot in its row from the number finds its only one
        number = 0 if job.prompt.keyed else target.chunk
        return Record(
            payload, job.shape.leaf_bytes, job.shape.leaves, len(payload), job.group_number, number,
            job.packed_part, target.chunk_hash, target.head, job.expires,
            table=job.table(target.chunk) if job.table is not None else b"", attempt=job.attempt,
        )  # fmt: skip

    def _publish(self, job: AppendJob, named: Sequence[Publish], active: Active) -> int:
        """Name records in the index: the commit point. How many were named; the rest another writer has published."""

        def transact(session: Session) -> int:
            row = self._own_row(session, active)
            # again: it had no page, and may have been forgotten
            session.put_namespace(job.digest, job.descriptor, job.group_number, job.packed_part)
            count, stored_bytes = publish(session, job.row_key, job.shape.leaves, named)
            session.add_contents(active.writer.number, job.digest, count, stored_bytes)
            _advance(session, row, active.writer, job.expires)
            return count

        return self._c.index.write(transact, COMMIT_SECONDS)

    def _own_row(self, session: Session, active: Active) -> SegmentRow:
        return ledger.own_segment(session, active.writer.number, self._c.owner, active.generation)

    # -- relocating --------------------------------------------------------------------------

    def relocate(self, job: RelocateJob) -> int:
        """Copy records to the active segment of a class and point the index to the copies; returns how many.
        Declined, OSError or IndexUnavailableError if that cannot be done; the sources are unchanged then."""
        if not self._active.class_locks.is_free_within(job.segment_class, class_locks.APPEND_SECONDS):
            raise Declined("io")
        with self._active.lock(job.segment_class):
            wait = RoomWait(0.0)  # callers make room before
            active = self._active.writer(job.segment_class, job.need_fresh(), 0, job.need, wait)
            try:
                return self._copy(job, active)
            except NeedSpaceError:
                raise Declined("space") from None
            except (OSError, StaleWriterError):
                self._active.close_for_appends(job.segment_class)
                raise Declined("io") from None

    def _copy(self, job: RelocateJob, active: Active) -> int:
        writer, limits = active.writer, job.segment_class.limits(self._c.settings)
        records = writer.records + len(job.moves) + SPARE_RECORDS

        def reserve(session: Session) -> int:
            allocated = max(writer.allocated, fmt.align(writer.tail + job.need(writer)))
            ledger.reserve(session, writer.number, self._own_row(session, active), allocated, records, limits)
            return allocated

        allocated = self._c.index.write(reserve, COMMIT_SECONDS)
        if allocated > writer.allocated:
            writer.grow(allocated)
        placed = writer.append([m.record for m in job.moves], job.digest, job.descriptor, self._c.files.now_us())
        self._active.note_use(job.segment_class)
        used = {p.seq: m.used_us for p, m in zip(placed, job.moves, strict=True)}
        first, last = placed[0].seq, placed[-1].seq  # a chain entry between two of them is never used
        self._c.access_times.stamp(writer.segment_id, first, [used.get(seq, 0) for seq in range(first, last + 1)])
        if self._c.settings.sync != "cache":  # callers drop the sources, which may be synced
            self._active.sync(writer)
        return self._c.index.write(lambda session: self._move(session, job, placed, active), COMMIT_SECONDS)

    def _move(self, session: Session, job: RelocateJob, placed: Sequence[Placed], active: Active) -> int:
        """Point the index to copies where it still names their sources; how many."""
        writer = active.writer
        row = self._own_row(session, active)
        copies = [
            Moved(m.source, m.seq, m.record.run_hash, m.slot, _place(m.record, p, writer.number))
            for m, p in zip(job.moves, placed, strict=True)
        ]
        named = move(session, job.row_key, job.shape.leaves, copies)
        for source in {m.source for m, _ in named}:
            old = [place.stored_bytes for m, place in named if m.source == source]
            session.add_contents(source, job.digest, -len(old), -sum(old))
        session.add_contents(writer.number, job.digest, len(named), sum(m.place.stored_bytes for m, _ in named))
        expires = max(m.record.expires for m in job.moves) if job.segment_class.expires else 0
        _advance(session, row, writer, expires)
        return len(named)


def _place(record: Record, placed: Placed, segment: int) -> Place:
    return Place(
        record.chunk_hash, placed.root, record.codec, 0, segment, placed.payload // fmt.BLOCK, len(record.payload),
        placed.leaves // LEAF_BYTES, placed.seq, record.expires,
    )  # fmt: skip


def _advance(session: Session, row: SegmentRow, writer: SegmentWriter, expires: int) -> None:
    """Note in a segment's row what is published: all that its writer has appended."""
    advanced = row._replace(
        records=writer.records, tail=writer.tail, table=writer.table, expires=max(row.expires, expires)
    )
    session.set_segment(writer.number, row, advanced)


def _runs_of(job: AppendJob, chunks: Sequence[int]) -> list[tuple[RunKeys, list[int]]]:
    """Chunks by run: what ``claim_run`` takes."""
    length = job.prompt.run_length
    runs: dict[int, list[int]] = {}
    for chunk in chunks:
        runs.setdefault(chunk // length, []).append(chunk % length)
    result = []
    for number, slots in runs.items():
        first, count = job.prompt.run(number)
        keys = RunKeys(first, job.prompt.hashes[first : first + count], job.row_key, job.shape.leaves)
        result.append((keys, slots))
    return result


def check_pages_fit(layout: PageLayout, descriptor_bytes: int, settings: Settings) -> None:
    """NoSpaceError if a page of the layout is larger than a segment of the store may be."""
    for group in layout.groups:
        if PartShape.of(group, group.full).need_fresh(descriptor_bytes) > ledger.page_limit(settings):
            raise NoSpaceError(
                f"a page of group {group.name} has {group.page_bytes} bytes, a segment of this store may hold "
                f"{ledger.page_limit(settings)}: use a smaller page_tokens or a larger capacity"
            )
