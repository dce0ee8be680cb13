"""Saving: claims, appends, the commit point. One active segment per process and class.

    claim   one transaction: drop what is present or claimed, reserve capacity, claim the rest
    append  checksums, payloads, leaf tables, entries, into space that is reserved
    publish one transaction: the commit point
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvfs import format as fmt
from kvfs import space
from kvfs.context import COMMIT_SECONDS, Context
from kvfs.errors import IndexUnavailableError
from kvfs.format import Header
from kvfs.hashing import LEAF_BYTES, leaf_table, page_key, root_of
from kvfs.identity import Identity
from kvfs.index.rows import Place
from kvfs.index.runs import Publish, RunKeys, Target, claim_run, move, publish
from kvfs.index.session import Session
from kvfs.index.tables import ACTIVE, SegmentRow
from kvfs.layout import Group, Part
from kvfs.lookup import Prompt
from kvfs.segment import Placed, Record, SegmentWriter
from kvfs.space import ANY_CLASS, NeedSpaceError, StaleWriterError

BATCH_PAGES = 256  # pages per commit: 8 rows of 32 chunks, well under a millisecond of the lock
BATCH_BYTES = 32 << 20
SPACE_SECONDS = 5.0  # how long a save waits for eviction before it declines
STEP = 4  # a segment's blocks are allocated in this many steps
IDLE_SECONDS = 10.0


class SegmentClass(NamedTuple):
    """What a segment is reserved for. Classes never share segments."""

    class_id: bytes = ANY_CLASS
    flags: int = 0
    evictor: bool = False  # may use the standing reserve


class Declined(Exception):
    """Pages are not stored; ``reason`` says why. Never leaves the package."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Job:
    """One part of one group of a prompt, to be stored."""

    identity: Identity
    descriptor: bytes
    group_number: int
    group: Group
    part: Part
    prompt: Prompt
    payload: Callable[[int], Any]  # chunk number -> buffer of part_bytes
    expires: int = 0
    attempt: bytes = bytes(8)
    segment_class: SegmentClass = SegmentClass()

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
    """Owns this process's active segments. Thread-safe: one batch at a time per class."""

    def __init__(self, context: Context, make_room: Callable[[int, float], bool]) -> None:
        self._c = context
        self._make_room = make_room  # (bytes, deadline) -> whether it is worth trying again
        self._lock = threading.Lock()
        self._locks: dict[SegmentClass, threading.Lock] = {}
        self._writers: dict[SegmentClass, tuple[SegmentWriter, str]] = {}
        self._used_at: dict[SegmentClass, float] = {}
        self._dirty: set[SegmentClass] = set()

    # -- storing -----------------------------------------------------------------------------

    def store(self, job: Job, chunks: Sequence[int]) -> Outcome:
        """Store ``chunks`` (ascending) of a job; the first decline ends it."""
        outcome = Outcome()
        deadline = self._c.files.monotonic() + SPACE_SECONDS
        lock = self._class_lock(job.segment_class)
        done = 0
        while done < len(chunks):
            try:
                with lock:
                    done += self._batch(job, chunks[done:], outcome, deadline)
                continue
            except Declined as exc:
                outcome.reason = exc.reason
            except IndexUnavailableError as exc:
                outcome.reason = "index"
                self._c.counters.add(f"declined_index_{str(exc).partition(':')[0].replace(' ', '_')}")
            except OSError:
                outcome.reason = "io"
                self._c.counters.add("write_errors")
                with lock:
                    self._drop(job.segment_class)
            outcome.declined += len(chunks) - done
            break
        self._c.counters.add("pages_stored", outcome.stored)
        self._c.counters.add("pages_skipped", outcome.skipped)
        self._c.counters.add("pages_in_flight", outcome.in_flight)
        if outcome.declined:
            self._c.counters.add(f"pages_declined_{outcome.reason}", outcome.declined)
        return outcome

    def _class_lock(self, segment_class: SegmentClass) -> threading.Lock:
        with self._lock:
            return self._locks.setdefault(segment_class, threading.Lock())

    def _batch(self, job: Job, chunks: Sequence[int], outcome: Outcome, deadline: float) -> int:
        """Store the leading chunks that fit one batch; returns how many chunks were dealt with."""
        size, leaf_bytes = job.group.part_bytes(job.part), LEAF_BYTES * job.group.leaves(job.part)
        wanted = min(len(chunks), BATCH_PAGES, max(1, BATCH_BYTES // size))
        writer, generation = self._writer(job.segment_class, SegmentWriter.need(size, leaf_bytes, 1), deadline)
        while wanted > 1 and SegmentWriter.need(size, leaf_bytes, wanted) > writer.room(self._c.settings.segment_bytes):
            wanted = max(1, wanted * 3 // 4)
        batch = chunks[:wanted]
        try:
            targets = self._claim(job, batch, writer, generation, outcome, deadline)
        except StaleWriterError:
            self._drop(job.segment_class)
            raise Declined("index") from None
        if targets:
            records = [self._record(job, t) for t in targets]
            placed = writer.append(records, job.identity.digest, job.descriptor, job.attempt)
            if self._c.settings.sync == "sync":
                self._sync(writer)
            else:
                self._dirty.add(job.segment_class)
            self._publish(job, targets, records, placed, writer, generation, outcome)
            self._c.counters.add("bytes_written", size * len(targets))
        self._used_at[job.segment_class] = self._c.files.monotonic()
        return len(batch)

    def _record(self, job: Job, target: Target) -> Record:
        payload = job.payload(target.chunk)
        leaves = leaf_table(payload, job.group.leaf_bytes(job.part))
        return Record(
            payload, leaves, root_of(leaves), len(payload), job.group_number, target.chunk, job.part.pack(),
            target.chunk_hash, target.head, job.expires,
        )  # fmt: skip

    def _claim(
        self, job: Job, chunks: Sequence[int], writer: SegmentWriter, generation: str, outcome: Outcome, deadline: float
    ) -> list[Target]:
        """Reserve and claim; grows the file to what was reserved."""
        size, leaf_bytes = job.group.part_bytes(job.part), LEAF_BYTES * job.group.leaves(job.part)
        limits = space.budget(self._c.settings, evictor=job.segment_class.evictor)
        segment_bytes = self._c.settings.segment_bytes

        def transact(session: Session) -> tuple[list[Target], int, int, int]:
            row = space.own_segment(session, writer.number, self._c.owner, generation)
            targets: list[Target] = []
            skipped = in_flight = 0
            for run in _runs_of(job, chunks):
                claims = claim_run(session, run[0], run[1], writer.number)
                targets += claims.targets
                skipped += claims.skipped
                in_flight += claims.in_flight
            allocated = writer.allocated
            if targets:
                session.put_namespace(job.identity.digest, job.descriptor, job.group_number, job.part.pack())
                end = writer.tail + SegmentWriter.need(size, leaf_bytes, len(targets))
                if end > allocated:
                    step = max(end, allocated + segment_bytes // STEP)
                    allocated = min(segment_bytes, fmt.align(step))
                space.reserve(session, writer.number, row, allocated, writer.records + len(targets) + 8, limits)
            return targets, skipped, in_flight, allocated

        targets, skipped, in_flight, allocated = self._with_room(transact, deadline)
        if allocated > writer.allocated:
            writer.grow(allocated)
        outcome.skipped += skipped
        outcome.in_flight += in_flight
        return targets

    def _with_room(self, transact: Callable[[Session], Any], deadline: float) -> Any:
        """Run a reserving transaction; where space is missing, evict and try again until the deadline."""
        while True:
            try:
                return self._c.index.write(transact, COMMIT_SECONDS)
            except NeedSpaceError as exc:
                missing = exc.missing
            except IndexUnavailableError as exc:
                if str(exc) != "index full":
                    raise
                missing = self._c.settings.segment_bytes
            now = self._c.files.monotonic()
            if now >= deadline or not self._make_room(missing, deadline):
                raise Declined("space")

    def _publish(
        self, job: Job, targets: Sequence[Target], records: Sequence[Record], placed: Sequence[Placed],
        writer: SegmentWriter, generation: str, outcome: Outcome,
    ) -> None:  # fmt: skip
        named = [
            Publish(
                t.head, t.slot,
                Place(t.chunk_hash, r.root, r.codec, 0, writer.number, p.payload // fmt.BLOCK, len(r.payload),
                      p.leaves // 8, p.seq, job.expires),
            )
            for t, r, p in zip(targets, records, placed, strict=True)
        ]  # fmt: skip

        def transact(session: Session) -> int:
            row = space.own_segment(session, writer.number, self._c.owner, generation)
            count = publish(session, job.row_key, job.group.leaves(job.part), named)
            moved = row._replace(
                records=writer.records, tail=writer.tail, table=writer.table,
                expires=max(row.expires, job.expires) if job.expires else row.expires,
            )  # fmt: skip
            session.set_segment(writer.number, row, moved)
            return count

        try:
            count = self._c.index.write(transact, COMMIT_SECONDS)
        except StaleWriterError:
            self._drop(job.segment_class)
            raise Declined("index") from None
        outcome.stored += count
        outcome.skipped += len(targets) - count  # another writer was first

    def relocate(
        self, segment_class: SegmentClass, digest: bytes, descriptor: bytes, row_key: Callable[[bytes], bytes],
        leaves: int, moves: Sequence[tuple[int, int, int, Record]],
    ) -> int:  # fmt: skip
        """Copy records to the active segment of a class and point the index to the copies; returns how many.

        ``moves``: (source segment, seq there, chunk of the run, record), all of one part shape of a namespace.
        Declined, OSError or IndexUnavailableError if that cannot be done; the sources are untouched then.
        """
        limits = space.budget(self._c.settings, evictor=segment_class.evictor)
        size = max(len(m[3].payload) for m in moves)
        need = SegmentWriter.need(size, LEAF_BYTES * leaves, len(moves))
        with self._class_lock(segment_class):
            writer, generation = self._writer(segment_class, need, self._c.files.monotonic())

            def claim(session: Session) -> int:
                row = space.own_segment(session, writer.number, self._c.owner, generation)
                allocated = max(writer.allocated, fmt.align(writer.tail + need))
                space.reserve(session, writer.number, row, allocated, writer.records + len(moves) + 8, limits)
                return allocated

            try:
                allocated = self._c.index.write(claim, COMMIT_SECONDS)
                if allocated > writer.allocated:
                    writer.grow(allocated)
                placed = writer.append([m[3] for m in moves], digest, descriptor, bytes(8))
                return self._c.index.write(
                    lambda s: self._move(s, writer, generation, row_key, leaves, moves, placed), COMMIT_SECONDS
                )
            except NeedSpaceError:
                raise Declined("space") from None
            except (OSError, StaleWriterError):
                self._drop(segment_class)
                raise Declined("io") from None

    def _move(
        self, session: Session, writer: SegmentWriter, generation: str, row_key: Callable[[bytes], bytes], leaves: int,
        moves: Sequence[tuple[int, int, int, Record]], placed: Sequence[Placed],
    ) -> int:  # fmt: skip
        row = space.own_segment(session, writer.number, self._c.owner, generation)
        moved = 0
        for (source, seq, slot, r), p in zip(moves, placed, strict=True):
            place = Place(r.chunk_hash, r.root, r.codec, 0, writer.number, p.payload // fmt.BLOCK, len(r.payload),
                          p.leaves // 8, p.seq, r.expires)  # fmt: skip
            moved += move(session, row_key, leaves, source, [(seq, Publish(r.run_hash, slot, place))])
        session.set_segment(
            writer.number, row, row._replace(records=writer.records, tail=writer.tail, table=writer.table)
        )
        return moved

    # -- active segments ---------------------------------------------------------------------

    def _writer(self, segment_class: SegmentClass, need: int, deadline: float) -> tuple[SegmentWriter, str]:
        """The active segment of the class with room for ``need`` bytes; seals the old one if it is full."""
        current = self._writers.get(segment_class)
        if current is not None:
            writer, generation = current
            if not writer.dead and generation == self._c.index.generation:
                if need <= writer.room(self._c.settings.segment_bytes):
                    return current
                self._seal(segment_class)
            else:
                self._drop(segment_class)
        fresh = self._adopt(segment_class, need) or self._create(segment_class, need, deadline)
        self._writers[segment_class] = fresh
        return fresh

    def _create(self, segment_class: SegmentClass, need: int, deadline: float) -> tuple[SegmentWriter, str]:
        segment_bytes = self._c.settings.segment_bytes
        if fmt.FIRST_PAYLOAD + need + fmt.BLOCK > segment_bytes:
            raise Declined("page larger than a segment")
        allocated = min(segment_bytes, fmt.align(max(segment_bytes // STEP, fmt.FIRST_PAYLOAD + need)))
        segment_id = self._c.files.random(16)
        limits = space.budget(self._c.settings, evictor=segment_class.evictor)

        def transact(session: Session) -> tuple[int, str]:
            number = space.new_segment(
                session, segment_id, self._c.owner, segment_class.class_id, segment_class.flags, allocated, limits
            )
            return number, session.generation

        number, generation = self._with_room(transact, deadline)
        header = Header(
            segment_id, self._c.store_id, self._c.files.now_us(), segment_class.flags, segment_class.class_id
        )
        try:
            writer = SegmentWriter.create(self._c.directory, header, number, allocated)
        except OSError:
            self._c.index.write(lambda s: s.forget_segment(number), COMMIT_SECONDS)
            raise
        return writer, generation

    def _adopt(self, segment_class: SegmentClass, need: int) -> tuple[SegmentWriter, str] | None:
        """Go on with the active segment of a process that is gone."""
        limit = self._c.settings.segment_bytes - fmt.BLOCK - need

        def look(session: Session) -> tuple[list[tuple[int, SegmentRow]], str]:
            rows = [
                (n, r) for n, r in session.segments_in(ACTIVE)
                if (r.class_id, r.flags) == segment_class[:2] and r.tail <= limit and r.owner != self._c.owner
            ]  # fmt: skip
            return rows[:8], session.generation

        rows, generation = self._c.index.read(look, COMMIT_SECONDS)
        for number, row in rows:
            if self._c.liveness is None or self._c.liveness.is_alive(row.owner):
                continue
            taken = self._c.index.write(lambda s, n=number, r=row: space.adopt(s, n, r, self._c.owner), COMMIT_SECONDS)
            if taken is None:
                continue
            try:
                size = self._c.files.stat(
                    f"{row.segment_id.hex()}.kvs", dir_fd=self._c.directory.sub("segments")
                ).st_size
                allocated = max(row.tail, min(size, row.allocated))
                return SegmentWriter.adopt(
                    self._c.directory, row.segment_id, number, epoch=taken.epoch, tail=row.tail,
                    records=row.records, allocated=allocated,
                ), generation  # fmt: skip
            except OSError:
                # what was published stays readable, page by page; nobody appends to it again
                self._c.counters.add("adopt_errors")
                charged = row.allocated
                self._c.index.write(lambda s, n=number, c=charged: space.retire(s, n, self._c.owner, c), COMMIT_SECONDS)
        return None

    def _seal(self, segment_class: SegmentClass) -> None:
        writer, generation = self._writers.pop(segment_class)
        self._dirty.discard(segment_class)
        try:
            size = writer.seal()
            if self._c.settings.sync != "cache":
                self._c.files.fdatasync(writer.fd)
            self._c.index.write(
                lambda s: space.seal(s, writer.number, self._c.owner, generation, size), COMMIT_SECONDS
            )
        except StaleWriterError:
            pass
        finally:
            writer.close()

    def _drop(self, segment_class: SegmentClass) -> None:
        """After a failure: no more appends. What was published stays, and is verified at each read."""
        current = self._writers.pop(segment_class, None)
        self._dirty.discard(segment_class)
        if current is None:
            return
        writer, generation = current
        writer.close()
        if generation == self._c.index.generation:
            try:
                self._c.index.write(
                    lambda s: space.retire(s, writer.number, self._c.owner, None), COMMIT_SECONDS
                )
            except (IndexUnavailableError, StaleWriterError):
                self._c.counters.add("drop_errors")  # the next process finishes it when this one is gone

    def _sync(self, writer: SegmentWriter) -> None:
        """A failed sync may have lost pages that the next call calls clean: the segment is dropped, never retried."""
        try:
            self._c.files.fdatasync(writer.fd)
        except OSError:
            writer.dead = True
            self._c.counters.add("sync_errors")
            self._c.index.write(lambda s: space.doom(s, writer.number, self._c.owner), COMMIT_SECONDS)
            raise

    # -- upkeep ------------------------------------------------------------------------------

    def sync_dirty(self) -> None:
        """fdatasync what was appended since the last call (level ``batch``)."""
        for segment_class in list(self._dirty):
            with self._class_lock(segment_class):
                current = self._writers.get(segment_class)
                self._dirty.discard(segment_class)
                if current is not None and not current[0].dead:
                    try:
                        self._sync(current[0])
                    except (OSError, IndexUnavailableError):
                        self._drop(segment_class)

    def tidy(self) -> None:
        """Seal or trim active segments that nobody has written to for a while."""
        now = self._c.files.monotonic()
        for segment_class, at in list(self._used_at.items()):
            if now - at >= IDLE_SECONDS:
                self._used_at.pop(segment_class, None)
                with self._class_lock(segment_class):
                    self._rest(segment_class, let_go=False)

    def _rest(self, segment_class: SegmentClass, *, let_go: bool) -> None:
        current = self._writers.get(segment_class)
        if current is None:
            return
        writer, generation = current
        try:
            if writer.dead or generation != self._c.index.generation:
                self._drop(segment_class)
            elif writer.tail > self._c.settings.segment_bytes // 2:
                self._seal(segment_class)
            else:
                size = writer.trim()
                free = space.let_go if let_go else space.shrink
                self._c.index.write(lambda s: free(s, writer.number, self._c.owner, generation, size), COMMIT_SECONDS)
                if let_go:
                    self._writers.pop(segment_class, None)
                    writer.close()
        except (OSError, IndexUnavailableError, StaleWriterError):
            self._c.counters.add("tidy_errors")

    def close(self) -> None:
        """Leave the active segments, trimmed, to whoever comes next."""
        for segment_class in list(self._writers):
            with self._class_lock(segment_class):
                self._rest(segment_class, let_go=True)
                current = self._writers.pop(segment_class, None)
                if current is not None:
                    current[0].close()

    def abandon(self) -> None:
        """In a forked child: the parent goes on writing its segments; this process starts its own."""
        for writer, _ in self._writers.values():
            writer.close()
        self.__init__(self._c, self._make_room)  # type: ignore[misc]

    def active_numbers(self) -> set[int]:
        return {writer.number for writer, _ in self._writers.values()}


def _runs_of(job: Job, chunks: Sequence[int]) -> list[tuple[RunKeys, list[int]]]:
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
