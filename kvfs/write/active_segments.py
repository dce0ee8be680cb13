"""The active segments of this process, one per class: which segment an append goes to, and when it is sealed.

``kvfs.index.ledger`` describes the life of a segment, and who takes its steps.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import NamedTuple, TypeVar

from kvfs.context import Context
from kvfs.directory.config import Settings
from kvfs.directory.liveness import NO_OWNER
from kvfs.errors import IndexUnavailableError
from kvfs.format import segment as fmt
from kvfs.format.segment import FLAG_DIRECT, Header
from kvfs.index import ledger
from kvfs.index.deadlines import COMMIT_SECONDS
from kvfs.index.ledger import ANY_CLASS, NeedSpaceError, StaleWriterError
from kvfs.index.session import Session
from kvfs.index.tables import ACTIVE, SegmentRow
from kvfs.segments.writer import SegmentWriter, file_name, sync_segment
from kvfs.write.class_locks import ClassLocks

T = TypeVar("T")
STEP = 4  # a segment's blocks are allocated in this many steps
IDLE_SECONDS = 10.0  # without an append, after which a segment is sealed or trimmed
CLASSES_MAX = 32  # active segments of one process; more of them are sealed
LANES = 8  # segments of a class that one process appends to in parallel, at most
BUSY_SECONDS = 0.005  # between tries to seal a segment that another thread appends to
NO_ROOM_SECONDS = 1.0  # after a wait for room timed out: saves that need room decline at once, the background evicts
PROBE_SECONDS = 0.05  # wait of a save after that, until one has got room
FORGET_SECONDS = 10.0  # later saves wait as before: readers may have released what they held
CLOSE_SECONDS, SYNC_SECONDS = 5.0, 1.0  # how long a close, a background sync waits for an append


class SegmentClass(NamedTuple):
    """What a segment is reserved for. Classes never share segments."""

    class_id: bytes = ANY_CLASS
    flags: int = 0  # what the segment is for, without FLAG_DIRECT, which the I/O mode decides
    evictor: bool = False  # may use the standing reserve
    lane: int = 0  # parallel appends need a segment each, since a file takes one buffered write at a time

    @property
    def quota(self) -> bytes:
        return self.class_id[: ledger.QUOTA_BYTES]

    @property
    def expires(self) -> bool:
        """Whether its records expire, all at about the same time, which is the second half of the class id."""
        return not self.flags and any(self.class_id[ledger.QUOTA_BYTES :])

    def limits(self, settings: Settings) -> ledger.Budget:
        return ledger.budget(settings, self.class_id, evictor=self.evictor)


class Declined(Exception):
    """Pages are not stored; ``reason`` says why. Never leaves the library."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass
class RoomWait:
    """How long one save may still wait for room, in sum. Appends, and an eviction that gives room, are no waits."""

    seconds: float


class Active(NamedTuple):
    """An active segment and the generation of the index that knows it."""

    writer: SegmentWriter
    generation: str


class ActiveSegments:
    """Owns the writers of this process's active segments; delegates files to ``SegmentWriter``, rows to the ledger.
    A caller that appends holds ``lock(segment_class)``."""

    def __init__(self, context: Context, make_room: Callable[..., bool]) -> None:
        self._c = context
        self._make_room = make_room  # ``Evictor.make_room``
        self.class_locks = ClassLocks()
        self._writers: dict[SegmentClass, Active] = {}
        self._used_at: dict[SegmentClass, float] = {}  # last use of writers; a trimmed one has none
        self._dirty: set[SegmentClass] = set()
        self._synced_for: set[tuple[bytes, bytes]] = set()  # (segment, owner) of dead processes: nothing more to sync
        self._pending_steps: list[tuple[int, str, ledger.Step]] = []  # (number, generation, step) of failed segments
        self._no_room: dict[bytes, float] = {}  # quotas whose last wait for room timed out: until when none waits

    def lock(self, segment_class: SegmentClass) -> threading.Lock:
        return self.class_locks.lock(segment_class)

    def room_wait(self, segment_class: SegmentClass, seconds: float) -> RoomWait:
        """Of a save that may wait for ``seconds``; less after a wait that timed out."""
        until, now = self._no_room.get(segment_class.quota), self._c.files.monotonic()
        if until is None or now > until + FORGET_SECONDS:
            return RoomWait(seconds)
        return RoomWait(0.0 if now < until else PROBE_SECONDS)

    def with_room(self, transact: Callable[[Session], T], wait: RoomWait, own: SegmentClass) -> T:
        """Run a transaction that reserves space; where space is missing, evict and try again until ``wait`` is over.
        Declined ("space") if there is none by then. ``own``: the class whose lock the caller holds."""
        deadline: float | None = None
        while True:
            full = False
            try:
                result = self._c.index.write(transact, COMMIT_SECONDS)
                if deadline is not None:
                    self._no_room.pop(own.quota, None)
                return result
            except NeedSpaceError as exc:
                missing, owner = exc.missing, exc.owner
            except IndexUnavailableError as exc:
                if str(exc) != "index full":
                    raise
                missing, owner, full = 0, b"", True
            now = self._c.files.monotonic()
            if deadline is not None:
                wait.seconds = min(wait.seconds, deadline - now)  # parallel appends of one save wait at the same time
                if wait.seconds <= 0:
                    self._no_room[own.quota] = now + NO_ROOM_SECONDS
            if wait.seconds <= 0:
                raise Declined("space")
            deadline = now + wait.seconds
            if not self._make_room(missing, deadline, owner, index_full=full) and not (
                owner and self._c.files.monotonic() < deadline and self._seal_other(owner, own)
            ):
                raise Declined("space")

    def _seal_other(self, owner: bytes, own: SegmentClass) -> bool:
        """Seal the least recently used segment of a quota, so that it can be evicted, unless a thread appends to it.
        False if the quota has none but the caller's ``own``."""
        busy = False
        for segment_class in sorted(self._writers, key=lambda c: self._used_at.get(c, 0.0)):
            if segment_class == own or not segment_class.class_id.startswith(owner):
                continue
            lock = self.lock(segment_class)
            if not lock.acquire(blocking=False):  # waiting while holding ``own`` could deadlock with its holder
                busy = True
                continue
            try:
                if segment_class in self._writers:
                    self._seal_or_close(segment_class)
                    return True
            finally:
                lock.release()
        if busy:
            self._c.files.sleep(BUSY_SECONDS)
        return busy

    def evict_for_full_disk(self, nbytes: int, wait: RoomWait) -> bool:
        """Free ``nbytes`` of a file system that is full before the ledger is; whether another try may succeed."""
        began = self._c.files.monotonic()
        free = wait.seconds > 0 and self._make_room(nbytes, began + wait.seconds, b"", disk_full=True)
        wait.seconds -= self._c.files.monotonic() - began
        return free

    def writer(
        self, segment_class: SegmentClass, fresh: int, wanted: int, need: Callable[[SegmentWriter], int],
        wait: RoomWait,
    ) -> Active:  # fmt: skip
        """The active segment of the class with room for a record; seals the current one if it is full.

        Sizes in bytes: ``need`` returns what the record takes in a given segment, ``fresh`` is the size of a segment
        with this record alone, ``wanted`` that of one with all records of the append.
        """
        current = self._writers.get(segment_class)
        if current is not None:
            writer, generation = current
            if not writer.dead and generation == self._c.index.generation:
                if need(writer) <= writer.remaining_bytes(ledger.segment_limit(self._c.settings, fresh)):
                    return current
                self._seal(segment_class)
            else:
                self.close_for_appends(segment_class)
        active = self._adopt(segment_class, fresh) or self._create(segment_class, fresh, wanted, wait)
        self._writers[segment_class] = active
        self.note_use(segment_class)
        return active

    def _create(self, segment_class: SegmentClass, fresh: int, wanted: int, wait: RoomWait) -> Active:
        segment_bytes = ledger.segment_limit(self._c.settings, fresh)
        if fresh > segment_bytes:
            raise Declined("space")
        allocated = min(segment_bytes, fmt.align(max(segment_bytes // STEP, wanted)))
        segment_id = self._c.files.random(16)
        class_id, flags = segment_class.class_id, segment_class.flags | self._c.mode.segment_flags
        limits = segment_class.limits(self._c.settings)

        def transact(session: Session) -> tuple[int, str]:
            number = ledger.new_segment(session, segment_id, self._c.owner, class_id, flags, allocated, limits)
            return number, session.generation

        number, generation = self.with_room(transact, wait, segment_class)
        header = Header(segment_id, self._c.store_id, self._c.files.now_us(), flags, class_id)
        try:
            writer = SegmentWriter.create(self._c.directory, header, number, allocated)
        except OSError:
            self._take_step(number, generation, ledger.mark_dropped)
            raise
        if not self._is_current(generation):  # a rebuild that listed the segments earlier has missed this one
            writer.discard(self._c.directory)
            self._take_step(number, generation, ledger.mark_dropped)
            raise Declined("index")
        return Active(writer, generation)

    def _is_current(self, generation: str) -> bool:
        try:
            return self._c.index.read(lambda s: s.generation, COMMIT_SECONDS) == generation
        except IndexUnavailableError:
            return False

    def _adopt(self, segment_class: SegmentClass, fresh: int) -> Active | None:
        """Adopt the active segment of a dead process or of none, if it is of this class and I/O mode."""
        wanted = (segment_class.class_id, segment_class.flags | self._c.mode.segment_flags)
        # a record takes no more bytes there than in a fresh segment
        limit = ledger.segment_limit(self._c.settings, fresh) - fresh

        def look(session: Session) -> tuple[list[tuple[int, SegmentRow]], str]:
            rows = [
                (n, r) for n, r in session.segments_in(ACTIVE)
                if (r.class_id, r.flags) == wanted and r.tail <= limit and r.owner != self._c.owner
            ]  # fmt: skip
            return rows, session.generation

        rows, generation = self._c.index.read(look, COMMIT_SECONDS)
        assert self._c.liveness is not None
        is_alive = cache(self._c.liveness.is_alive)
        for number, row in rows:
            if is_alive(row.owner):
                continue
            take = partial(ledger.adopt, number=number, seen=row, owner=self._c.owner)
            taken = self._c.index.write(take, COMMIT_SECONDS)
            if taken is None:
                continue
            try:
                size = self._c.files.stat(file_name(row.segment_id), dir_fd=self._c.directory.sub("segments")).st_size
                allocated = max(row.tail, min(size, row.allocated))
                writer = SegmentWriter.adopt(
                    self._c.directory, row.segment_id, number, epoch=taken.epoch, tail=row.tail,
                    records=row.records, allocated=allocated,
                )  # fmt: skip
                return Active(writer, generation)
            except OSError:
                self._c.counters.add("adopt_errors")
                self._take_step(number, generation, ledger.close_for_appends)  # published pages stay readable
        return None

    def _seal(self, segment_class: SegmentClass) -> None:
        writer, generation = self._writers.pop(segment_class)
        self._used_at.pop(segment_class, None)
        self._dirty.discard(segment_class)
        try:
            if self._c.settings.sync != "cache":  # a seal on the disk promises that what it covers is on the disk
                self._c.files.fdatasync(writer.fd)
            size = writer.seal()
            if self._c.settings.sync != "cache":
                self._c.files.fdatasync(writer.fd)
            seal = partial(ledger.seal, number=writer.number, owner=self._c.owner, generation=generation)
            self._c.index.write(partial(seal, file_bytes=size), COMMIT_SECONDS)
        except StaleWriterError:
            pass
        except (OSError, IndexUnavailableError):
            self._take_step(writer.number, generation, ledger.close_for_appends)
            raise
        finally:
            writer.close()

    def close_for_appends(self, segment_class: SegmentClass) -> None:
        """After a failure: no more appends to the class's segment. Its published pages stay."""
        current = self._writers.pop(segment_class, None)
        self._used_at.pop(segment_class, None)
        self._dirty.discard(segment_class)
        if current is None:
            return
        writer, generation = current
        writer.close()
        self._take_step(writer.number, generation, ledger.close_for_appends)

    def _take_step(self, number: int, generation: str, step: ledger.Step) -> None:
        """Take the next step of a failed segment, now or in ``tidy``: a live owner's active row cannot be evicted."""
        self._pending_steps.append((number, generation, step))
        self._take_pending_steps()

    def _take_pending_steps(self) -> None:
        for pending in list(self._pending_steps):
            number, generation, step = pending
            if generation == self._c.index.generation:
                take = partial(ledger.take_step, step, number, self._c.owner, generation)
                try:
                    self._c.index.write(take, COMMIT_SECONDS)
                except IndexUnavailableError:
                    self._c.counters.add("drop_errors")
                    return
            with contextlib.suppress(ValueError):
                self._pending_steps.remove(pending)

    def _release_rows_without_writer(self) -> None:
        """Release rows owned by this process that have no writer: an interrupt came between a commit and its use."""
        rows, generation = self._c.index.read(lambda s: (s.segments_in(ACTIVE), s.generation), COMMIT_SECONDS)
        for number, row in rows:
            if row.owner == self._c.owner and number not in self.active_numbers():
                flags = row.flags & ~FLAG_DIRECT
                classes = [SegmentClass(row.class_id, flags, *rest) for rest in product((False, True), range(LANES))]
                if not all(map(self.class_locks.is_free_within, classes)):
                    continue  # next time
                with contextlib.ExitStack() as locks:  # a put or an evictor may be about to use the row
                    for one in classes:
                        locks.enter_context(self.lock(one))
                    if number not in self.active_numbers():
                        self._take_step(number, generation, ledger.abandon_stale)

    def sync(self, writer: SegmentWriter) -> None:
        """fdatasync a segment. One that fails is dropped, not retried: the kernel may have marked lost pages clean."""
        try:
            self._c.files.fdatasync(writer.fd)
        except OSError:
            writer.dead = True
            self._c.counters.add("sync_errors")
            drop = partial(ledger.mark_dropped, number=writer.number, owner=self._c.owner, segment_id=writer.segment_id)
            self._c.index.write(drop, COMMIT_SECONDS)
            raise

    def note_use(self, segment_class: SegmentClass) -> None:
        self._used_at[segment_class] = self._c.files.monotonic()

    def note_dirty(self, segment_class: SegmentClass) -> None:
        self._dirty.add(segment_class)

    # -- upkeep ------------------------------------------------------------------------------

    def sync_dirty(self) -> None:
        """fdatasync what was appended since the last call (level ``batch``)."""
        for segment_class in list(self._dirty):
            if not self.class_locks.is_free_within(segment_class, SYNC_SECONDS):
                continue
            with self.lock(segment_class):
                current = self._writers.get(segment_class)
                self._dirty.discard(segment_class)
                if current is not None and not current[0].dead:
                    try:
                        self.sync(current[0])
                    except (OSError, IndexUnavailableError):
                        self.close_for_appends(segment_class)

    def sync_for_the_dead(self) -> None:
        """fdatasync, once, the segments of processes that died, maybe before they synced (level ``batch``)."""
        assert self._c.liveness is not None
        synced = set()
        for number, row in self._c.index.read(lambda s: s.segments_in(ACTIVE), COMMIT_SECONDS):
            if row.owner == NO_OWNER or self._c.liveness.is_alive(row.owner):
                continue
            synced.add((row.segment_id, row.owner))
            if (row.segment_id, row.owner) in self._synced_for:
                continue
            try:
                sync_segment(self._c.directory, row.segment_id)
            except FileNotFoundError:  # dropped meanwhile
                continue
            except OSError:  # as in ``sync``
                self._c.counters.add("sync_errors")
                drop = partial(ledger.mark_dropped, number=number, owner=self._c.owner, segment_id=row.segment_id)
                self._c.index.write(drop, COMMIT_SECONDS)
        self._synced_for = synced

    def tidy(self) -> None:
        """Take pending steps, and seal or trim active segments that were not appended to for a while."""
        self._take_pending_steps()
        self._release_rows_without_writer()
        now, settings = self._c.files.monotonic(), self._c.settings
        # many lifetimes and quotas would keep many segments active, and a live owner's active segment is not evicted
        spare = len(self._writers) - min(CLASSES_MAX, 2 * settings.segments_bytes_max // settings.segment_bytes)
        for segment_class in sorted(self._writers, key=lambda c: self._used_at.get(c, 0.0)):  # trimmed ones first
            idle = spare > 0 or now - self._used_at.get(segment_class, now) >= IDLE_SECONDS
            if idle and self.class_locks.is_free_within(segment_class):
                self._used_at.pop(segment_class, None)
                if spare > 0 or segment_class.expires:
                    self.finish(segment_class)  # later pages get a later lifetime, which is another class
                else:
                    with self.lock(segment_class):
                        self._seal_or_trim(segment_class, release=False)
                spare -= 1

    def _seal_or_trim(self, segment_class: SegmentClass, *, release: bool) -> None:
        """Seal a segment that is more than half full, trim another one; ``release``: and release its ownership."""
        current = self._writers.get(segment_class)
        if current is None:
            return
        writer, generation = current
        try:
            if writer.dead or generation != self._c.index.generation:
                self.close_for_appends(segment_class)
            elif writer.tail > self._c.settings.segment_bytes // 2:
                self._seal(segment_class)
            else:
                if segment_class in self._dirty and self._c.settings.sync == "batch":
                    self._dirty.discard(segment_class)
                    self.sync(writer)
                size = writer.trim()
                free = ledger.release_ownership if release else ledger.shrink
                self._c.index.write(lambda s: free(s, writer.number, self._c.owner, generation, size), COMMIT_SECONDS)
                if release:
                    self._writers.pop(segment_class, None)
                    writer.close()
        except StaleWriterError:
            self.close_for_appends(segment_class)  # the segment was dropped, and its evictor waits for this flock
        except (OSError, IndexUnavailableError):
            self._c.counters.add("tidy_errors")

    def finish(self, segment_class: SegmentClass) -> None:
        """Seal the class's segment now, unless an append to it hangs."""
        if self.class_locks.is_free_within(segment_class, CLOSE_SECONDS):
            with self.lock(segment_class):
                if segment_class in self._writers:
                    self._seal_or_close(segment_class)

    def _seal_or_close(self, segment_class: SegmentClass) -> None:
        try:
            self._seal(segment_class)
        except (OSError, IndexUnavailableError):
            self.close_for_appends(segment_class)

    def finish_all(self, ids: Container[bytes] | None = None) -> None:
        """Seal all active segments, or those whose ids are in ``ids``."""
        for segment_class, (writer, _) in list(self._writers.items()):
            if ids is None or writer.segment_id in ids:
                self.finish(segment_class)

    def close(self) -> bool:
        """Seal the active segments, or trim them for other processes to adopt.

        False if an append hangs: this process must stay the owner, since the write may still reach the file.
        """
        end = self._c.files.monotonic() + CLOSE_SECONDS
        for segment_class in list(self._writers):
            if not self.class_locks.is_free_within(segment_class, max(0.0, end - self._c.files.monotonic())):
                continue
            with self.lock(segment_class):
                self._seal_or_trim(segment_class, release=True)
                current = self._writers.pop(segment_class, None)
                if current is not None:
                    current[0].close()
        return not self._writers

    def abandon(self) -> None:
        """In a forked child: close the parent's segments, which the parent goes on writing."""
        for writer, _ in self._writers.values():
            writer.close()
        self.class_locks = ClassLocks()
        self._writers, self._used_at, self._dirty, self._pending_steps = {}, {}, set(), []

    def active_numbers(self) -> set[int]:
        return {writer.number for writer, _ in list(self._writers.values())}  # a copy: other threads add to them
