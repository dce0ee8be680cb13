"""Saving: claims, appends, the commit point.

claim   one transaction: drop what is present or claimed, reserve capacity, claim the rest
append  checksums, payloads, leaf tables, entries, into space that is reserved
publish one transaction: the commit point
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvfs.context import COMMIT_SECONDS, Context
from kvfs.directory.config import Settings
from kvfs.errors import IndexUnavailableError, NoSpaceError
from kvfs.format import segment as fmt
from kvfs.format.checksums import LEAF_BYTES
from kvfs.index import ledger
from kvfs.index.ledger import NeedSpaceError, StaleWriterError
from kvfs.index.row_updates import Publish, RunKeys, Target, claim_run, move, publish
from kvfs.index.rows import Place
from kvfs.index.session import Session
from kvfs.lookup.search import Prompt
from kvfs.pages.chunk_hash import page_key
from kvfs.pages.identity import Identity
from kvfs.pages.layout import Group, PageLayout, Part
from kvfs.segments.writer import Placed, Record, SegmentWriter
from kvfs.write import class_locks
from kvfs.write.active_segments import STEP, ActiveSegments, Declined, SegmentClass
from kvfs.write.encode import encode_records

BATCH_PAGES = 256  # pages per commit: 8 rows of 32 chunks, well under a millisecond of the lock
BATCH_BYTES = 64 << 20
SPACE_SECONDS = 5.0  # how long a batch waits for eviction before the save declines


ANYTHING = SegmentClass()


@dataclass(frozen=True)
class AppendJob:
    """One part of one group of a prompt, to be stored."""

    identity: Identity
    descriptor: bytes
    group_number: int
    group: Group
    part: Part
    prompt: Prompt
    payload: Callable[[int], Any]  # chunk number -> buffer of part_bytes
    expires: int = 0
    at_us: int = 0  # when the request began that these pages belong to
    attempt: bytes = bytes(8)
    segment_class: SegmentClass = ANYTHING
    table: Callable[[int], bytes] | None = None  # chunk number -> leaf table, where it was made with the payload
    codec: int = fmt.CODEC_RAW  # that payloads are to be stored in, where it makes them smaller

    def row_key(self, chunk_hash: bytes) -> bytes:
        return page_key(self.identity.digest, self.group.name, chunk_hash) + self.part.pack()


@dataclass
class Outcome:
    """Counts of one job; they add up to the chunks asked for."""

    stored: int = 0
    skipped: int = 0
    in_flight: int = 0
    declined: int = 0
    reason: str = ""


class Appender:
    """Stores pages. Thread-safe: one batch at a time per class of segments."""

    def __init__(self, context: Context, active: ActiveSegments, stored: Callable[[int], None]) -> None:
        self._c = context
        self._stored = stored  # told how many bytes were newly stored
        self._active = active

    # -- storing -----------------------------------------------------------------------------

    def store(self, job: AppendJob, chunks: Sequence[int]) -> Outcome:
        """Store ``chunks`` (ascending) of a job; the first decline ends it."""
        outcome = Outcome()
        if self._c.declines:
            self._c.counters.add(f"pages_declined_{self._c.declines}", len(chunks))
            return Outcome(declined=len(chunks), reason=self._c.declines)
        deadline = self._c.files.monotonic() + SPACE_SECONDS
        done = 0
        while done < len(chunks):
            try:
                with self._active.class_locks.acquire_within(job.segment_class):
                    done += self._batch(job, chunks[done:], outcome, deadline)
                deadline = self._c.files.monotonic() + SPACE_SECONDS  # the time that it took was none of waiting
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
                    self._active.drop(job.segment_class)
                # the file system is smaller than the capacity, or others fill it
                if (
                    full
                    and self._c.files.monotonic() < deadline
                    and self._active.free(self._c.settings.segment_bytes, deadline)
                ):
                    outcome.reason = ""
                    continue
            outcome.declined += len(chunks) - done
            break
        self._c.counters.add("pages_stored", outcome.stored)
        self._c.counters.add("pages_skipped", outcome.skipped)
        self._c.counters.add("pages_in_flight", outcome.in_flight)
        if outcome.declined:
            self._c.counters.add(f"pages_declined_{outcome.reason}", outcome.declined)
        return outcome

    def _wait_for_turn(self, segment_class: SegmentClass) -> None:
        if not self._active.class_locks.is_free_within(segment_class, class_locks.APPEND_SECONDS):
            raise Declined("io")

    def _batch(self, job: AppendJob, chunks: Sequence[int], outcome: Outcome, deadline: float) -> int:
        """Store the leading chunks that fit one batch; returns how many chunks were dealt with."""
        size, leaf_bytes = job.group.part_bytes(job.part), LEAF_BYTES * job.group.leaves(job.part)
        wanted = min(len(chunks), BATCH_PAGES, max(1, BATCH_BYTES // size))
        digest = job.identity.digest
        fresh = SegmentWriter.need_fresh(len(job.descriptor), size, leaf_bytes)
        everything = SegmentWriter.need_fresh(len(job.descriptor), size, leaf_bytes, len(chunks))
        writer, generation = self._active.writer(
            job.segment_class,
            fresh,
            everything,
            lambda w: w.need(digest, job.descriptor, size, leaf_bytes, 1),
            deadline,
        )
        room = writer.room(ledger.segment_limit(self._c.settings, fresh))
        while wanted > 1 and (over := writer.need(digest, job.descriptor, size, leaf_bytes, wanted) - room) > 0:
            wanted = max(1, wanted - max(1, over // fmt.align(size)))
        batch = chunks[:wanted]
        try:
            targets, skipped, in_flight = self._claim(job, batch, writer, generation, fresh, deadline)
        except StaleWriterError:
            self._active.drop(job.segment_class)
            raise Declined("index") from None
        if targets:
            raw = [self._record(job, t) for t in targets]
            records = encode_records(raw, job.codec, job.group.cell.element_bytes, self._c.counters)
            placed = writer.append(records, job.identity.digest, job.descriptor, job.at_us)
            if self._c.settings.sync == "sync":
                self._active.sync(writer)
            else:
                self._active.note_dirty(job.segment_class)
            self._publish(job, targets, records, placed, writer, generation, outcome)
            written = sum(len(r.payload) for r in records)
            self._c.counters.add("bytes_written", written)
            self._stored(written)
        outcome.skipped += skipped
        outcome.in_flight += in_flight
        self._active.note_use(job.segment_class)
        return len(batch)

    def _record(self, job: AppendJob, target: Target) -> Record:
        payload = job.payload(target.chunk)
        return Record(
            payload, job.group.leaf_bytes(job.part), job.group.leaves(job.part), len(payload), job.group_number,
            target.chunk, job.part.pack(), target.chunk_hash, target.head, job.expires,
            table=job.table(target.chunk) if job.table is not None else b"", attempt=job.attempt,
        )  # fmt: skip

    def _claim(
        self, job: AppendJob, chunks: Sequence[int], writer: SegmentWriter, generation: str, fresh: int, deadline: float
    ) -> tuple[list[Target], int, int]:
        """Reserve and claim; grows the file to what was reserved. (claimed, present, in flight)"""
        size, leaf_bytes = job.group.part_bytes(job.part), LEAF_BYTES * job.group.leaves(job.part)
        limits = ledger.budget(self._c.settings, job.segment_class.class_id, evictor=job.segment_class.evictor)
        segment_bytes = ledger.segment_limit(self._c.settings, fresh)

        def transact(session: Session) -> tuple[list[Target], int, int, int]:
            row = ledger.own_segment(session, writer.number, self._c.owner, generation)
            targets: list[Target] = []
            skipped = in_flight = 0
            for run in _runs_of(job, chunks):
                claims = claim_run(session, run[0], run[1], writer.number)
                targets += claims.targets
                skipped += claims.skipped
                in_flight += claims.in_flight
            allocated = writer.allocated
            if targets:  # known before its bytes lie anywhere: who wants them gone names it, whatever comes of this
                session.put_namespace(job.identity.digest, job.descriptor, job.group_number, job.part.pack())
                end = writer.tail + writer.need(job.identity.digest, job.descriptor, size, leaf_bytes, len(targets))
                if end > allocated:
                    step = max(end, allocated + segment_bytes // STEP)
                    # segment_bytes may have shrunk since the batch was made to fit
                    allocated = max(fmt.align(end), min(segment_bytes, fmt.align(step)))
                records = writer.records + len(targets) + 8
                try:
                    ledger.reserve(session, writer.number, row, allocated, records, limits)
                except NeedSpaceError:  # for a whole step; the append itself may fit
                    allocated = max(writer.allocated, fmt.align(end))
                    ledger.reserve(session, writer.number, row, allocated, records, limits)
            return targets, skipped, in_flight, allocated

        targets, skipped, in_flight, allocated = self._active.with_room(transact, deadline, job.segment_class)
        if allocated > writer.allocated:
            writer.grow(allocated)
        return targets, skipped, in_flight

    def _publish(
        self, job: AppendJob, targets: Sequence[Target], records: Sequence[Record], placed: Sequence[Placed],
        writer: SegmentWriter, generation: str, outcome: Outcome,
    ) -> None:  # fmt: skip
        named = [
            Publish(
                t.head, t.slot,
                Place(t.chunk_hash, p.root, r.codec, 0, writer.number, p.payload // fmt.BLOCK, len(r.payload),
                      p.leaves // 8, p.seq, job.expires),
            )
            for t, r, p in zip(targets, records, placed, strict=True)
        ]  # fmt: skip

        def transact(session: Session) -> int:
            row = ledger.own_segment(session, writer.number, self._c.owner, generation)
            # again: it had no page, and may have been forgotten
            session.put_namespace(job.identity.digest, job.descriptor, job.group_number, job.part.pack())
            count, stored_bytes = publish(session, job.row_key, job.group.leaves(job.part), named)
            session.add_contents(writer.number, job.identity.digest, count, stored_bytes)
            moved = row._replace(
                records=writer.records, tail=writer.tail, table=writer.table,
                expires=max(row.expires, job.expires) if job.expires else row.expires,
            )  # fmt: skip
            session.set_segment(writer.number, row, moved)
            return count

        try:
            count = self._c.index.write(transact, COMMIT_SECONDS)
        except StaleWriterError:
            self._active.drop(job.segment_class)
            raise Declined("index") from None
        outcome.stored += count
        outcome.skipped += len(targets) - count  # another writer was first

    def relocate(
        self, segment_class: SegmentClass, digest: bytes, descriptor: bytes, row_key: Callable[[bytes], bytes],
        leaves: int, moves: Sequence[tuple[int, int, int, Record]], stamps: Sequence[int], *, durable: bool = False,
    ) -> int:  # fmt: skip
        """Copy records to the active segment of a class and point the index to the copies; returns how many.

        ``moves``: (source segment, seq there, chunk of the run, record), all of one part shape of a namespace;
        ``stamps``: when each was last used; ``durable``: synced first, unless the store's level is ``cache``.
        Declined, OSError or IndexUnavailableError if that cannot be done; the sources are untouched then.
        """
        limits = ledger.budget(self._c.settings, segment_class.class_id, evictor=segment_class.evictor)
        size = max(len(m[3].payload) for m in moves)
        shape = (size, LEAF_BYTES * leaves, len(moves))
        self._wait_for_turn(segment_class)
        with self._active.lock(segment_class):
            writer, generation = self._active.writer(
                segment_class, SegmentWriter.need_fresh(len(descriptor), *shape), 0,
                lambda w: w.need(digest, descriptor, *shape), self._c.files.monotonic(),
            )  # fmt: skip

            def claim(session: Session) -> int:
                row = ledger.own_segment(session, writer.number, self._c.owner, generation)
                allocated = max(writer.allocated, fmt.align(writer.tail + writer.need(digest, descriptor, *shape)))
                ledger.reserve(session, writer.number, row, allocated, writer.records + len(moves) + 8, limits)
                return allocated

            try:
                allocated = self._c.index.write(claim, COMMIT_SECONDS)
                if allocated > writer.allocated:
                    writer.grow(allocated)
                placed = writer.append([m[3] for m in moves], digest, descriptor, self._c.files.now_us())
                self._active.note_use(segment_class)
                for p, stamp in zip(placed, stamps, strict=True):
                    self._c.access_times.stamp(writer.segment_id, p.seq, [stamp])
                if durable and self._c.settings.sync != "cache":
                    self._active.sync(writer)
                expires = max(m[3].expires for m in moves) if segment_class.expires else 0
                return self._c.index.write(
                    lambda s: self._move(s, writer, generation, digest, row_key, leaves, moves, placed, expires),
                    COMMIT_SECONDS,
                )
            except NeedSpaceError:
                raise Declined("space") from None
            except (OSError, StaleWriterError):
                self._active.drop(segment_class)
                raise Declined("io") from None

    def _move(
        self, session: Session, writer: SegmentWriter, generation: str, digest: bytes,
        row_key: Callable[[bytes], bytes], leaves: int, moves: Sequence[tuple[int, int, int, Record]],
        placed: Sequence[Placed], expires: int,
    ) -> int:  # fmt: skip
        row = ledger.own_segment(session, writer.number, self._c.owner, generation)
        moved = 0
        for (source, seq, slot, r), p in zip(moves, placed, strict=True):
            place = Place(r.chunk_hash, p.root, r.codec, 0, writer.number, p.payload // fmt.BLOCK, len(r.payload),
                          p.leaves // 8, p.seq, r.expires)  # fmt: skip
            was = move(session, row_key, leaves, source, seq, Publish(r.run_hash, slot, place))
            if was is None and r.run_hash != r.chunk_hash:  # its slot went to another continuation when it was stored
                was = move(session, row_key, leaves, source, seq, Publish(r.chunk_hash, slot, place))
            if was is not None:
                moved += 1
                session.add_contents(source, digest, -1, -was.stored_bytes)
                session.add_contents(writer.number, digest, 1, place.stored_bytes)
        grown = row._replace(
            records=writer.records, tail=writer.tail, table=writer.table, expires=max(row.expires, expires)
        )
        session.set_segment(writer.number, row, grown)
        return moved


def _runs_of(job: AppendJob, chunks: Sequence[int]) -> list[tuple[RunKeys, list[int]]]:
    """Chunks by run: what ``claim_run`` takes."""
    length = job.prompt.run_length
    runs: dict[int, list[int]] = {}
    for chunk in chunks:
        runs.setdefault(chunk // length, []).append(chunk % length)
    result = []
    for number, slots in runs.items():
        first, count = job.prompt.run(number)
        keys = RunKeys(first, job.prompt.hashes[first : first + count], job.row_key, job.group.leaves(job.part))
        result.append((keys, slots))
    return result


def check_pages_fit(layout: PageLayout, descriptor_bytes: int, settings: Settings) -> None:
    """NoSpaceError if a page of the layout is larger than a segment of the store may be."""
    for group in layout.groups:
        need = SegmentWriter.need_fresh(descriptor_bytes, group.page_bytes, LEAF_BYTES * group.leaves(group.full))
        if need > ledger.page_limit(settings):
            raise NoSpaceError(
                f"a page of group {group.name} has {group.page_bytes} bytes, a segment of this store may hold "
                f"{ledger.page_limit(settings)}: use a smaller page_tokens or a larger capacity"
            )
