"""The active segments of this process: one per class, made, adopted, sealed, dropped and tidied here."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Container
from functools import partial
from itertools import product
from typing import NamedTuple, TypeVar

from kvfs.context import COMMIT_SECONDS, Context
from kvfs.errors import IndexUnavailableError
from kvfs.format import segment as fmt
from kvfs.format.segment import FLAG_DIRECT, Header
from kvfs.index import ledger
from kvfs.index.ledger import ANY_CLASS, NeedSpaceError, StaleWriterError
from kvfs.index.session import Session
from kvfs.index.tables import ACTIVE, SegmentRow
from kvfs.segments.writer import SegmentWriter, file_name
from kvfs.write.class_locks import ClassLocks

T = TypeVar("T")
STEP = 4  # a segment's blocks are allocated in this many steps
IDLE_SECONDS = 10.0
CLASSES_MAX = 32  # active segments of one process
LANES = 8  # of a class, at most
BUSY_SECONDS = 0.005  # between looks at segments that others append to
CLOSE_SECONDS, SYNC_SECONDS = 5.0, 1.0  # for appends in progress


class SegmentClass(NamedTuple):
    """What a segment is reserved for. Classes never share segments."""

    class_id: bytes = ANY_CLASS
    flags: int = 0  # what the segment is for; how it is written is the mode's to say
    evictor: bool = False  # may use the standing reserve
    lane: int = 0  # several segments of a class are appended to at once: a file takes one buffered write at a time

    @property
    def expires(self) -> bool:
        """Whether its records expire, all about together: the second half of the class is their time."""
        return not self.flags and any(self.class_id[ledger.QUOTA_BYTES :])


class Declined(Exception):
    """Pages are not stored; ``reason`` says why. Never leaves the package."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Active(NamedTuple):
    """An active segment and the generation of the index that knows it."""

    writer: SegmentWriter
    generation: str


class ActiveSegments:
    """Segments that this process appends to. Whoever appends holds ``lock(segment_class)``."""

    def __init__(self, context: Context, make_room: Callable[..., bool]) -> None:
        self._c = context
        self._make_room = make_room  # ``Evictor.make_room``
        self.class_locks = ClassLocks()
        self._writers: dict[SegmentClass, Active] = {}
        self._used_at: dict[SegmentClass, float] = {}  # of writers, but for those that rest, trimmed
        self._dirty: set[SegmentClass] = set()
        self._left: list[tuple[int, str, ledger.Step]] = []  # rows of this process that nobody appends to any more

    def lock(self, segment_class: SegmentClass) -> threading.Lock:
        return self.class_locks.lock(segment_class)

    def with_room(self, transact: Callable[[Session], T], deadline: float, own: SegmentClass) -> T:
        """Run a reserving transaction for a class; where space is missing, evict and try again until the deadline."""
        while True:
            full = False
            try:
                return self._c.index.write(transact, COMMIT_SECONDS)
            except NeedSpaceError as exc:
                missing, owner = exc.missing, exc.owner
            except IndexUnavailableError as exc:
                if str(exc) != "index full":
                    raise
                missing, owner, full = 0, b"", True
            now = self._c.files.monotonic()
            if now >= deadline:
                raise Declined("space")
            if not self._make_room(missing, deadline, owner, index_full=full) and not (
                owner and self._c.files.monotonic() < deadline and self._seal_other(owner, own)
            ):
                raise Declined("space")

    def _seal_other(self, owner: bytes, own: SegmentClass) -> bool:
        """Make a segment of a quota that has nothing to evict evictable: the one that was used least lately, and that
        nobody appends to right now. False if there is none but the caller's ``own``."""
        busy = False
        for segment_class in sorted(self._writers, key=lambda c: self._used_at.get(c, 0.0)):
            if segment_class == own or not segment_class.class_id.startswith(owner):
                continue
            lock = self.lock(segment_class)
            if not lock.acquire(blocking=False):  # never wait for one lock with another: its holder may do the same
                busy = True
                continue
            try:
                if segment_class in self._writers:
                    self._seal_or_drop(segment_class)
                    return True
            finally:
                lock.release()
        if busy:
            self._c.files.sleep(BUSY_SECONDS)
        return busy

    def free(self, nbytes: int, deadline: float) -> bool:
        """Evict, although the ledger has room; whether it is worth trying again."""
        return self._make_room(nbytes, deadline, b"", disk_full=True)

    def writer(
        self, segment_class: SegmentClass, fresh: int, wanted: int, need: Callable[[SegmentWriter], int],
        deadline: float,
    ) -> Active:  # fmt: skip
        """The active segment of the class with room for a record; seals the old one if it is full.

        ``need`` tells what the record takes in a given segment, ``fresh`` the size of a segment with nothing else,
        ``wanted`` the size of one with all that is to be appended.
        """
        current = self._writers.get(segment_class)
        if current is not None:
            writer, generation = current
            if not writer.dead and generation == self._c.index.generation:
                if need(writer) <= writer.room(ledger.segment_limit(self._c.settings, fresh)):
                    return current
                self._seal(segment_class)
            else:
                self.drop(segment_class)
        active = self._adopt(segment_class, fresh) or self._create(segment_class, fresh, wanted, deadline)
        self._writers[segment_class] = active
        self.note_use(segment_class)
        return active

    def _create(self, segment_class: SegmentClass, fresh: int, wanted: int, deadline: float) -> Active:
        segment_bytes = ledger.segment_limit(self._c.settings, fresh)
        if fresh > segment_bytes:
            raise Declined("space")
        allocated = min(segment_bytes, fmt.align(max(segment_bytes // STEP, wanted)))
        segment_id = self._c.files.random(16)
        limits = ledger.budget(self._c.settings, segment_class.class_id, evictor=segment_class.evictor)
        flags = segment_class.flags | self._c.mode.segment_flags

        def transact(session: Session) -> tuple[int, str]:
            number = ledger.new_segment(
                session, segment_id, self._c.owner, segment_class.class_id, flags, allocated, limits
            )
            return number, session.generation

        number, generation = self.with_room(transact, deadline, segment_class)
        header = Header(segment_id, self._c.store_id, self._c.files.now_us(), flags, segment_class.class_id)
        try:
            writer = SegmentWriter.create(self._c.directory, header, number, allocated)
        except OSError:
            self._leave(number, generation, ledger.mark_dropped)
            raise
        if not self._is_current(generation):  # a rebuild that has looked at the segments before knows nothing of it
            writer.discard(self._c.directory)
            self._leave(number, generation, ledger.mark_dropped)
            raise Declined("index")
        return Active(writer, generation)

    def _is_current(self, generation: str) -> bool:
        try:
            return self._c.index.read(lambda s: s.generation, COMMIT_SECONDS) == generation
        except IndexUnavailableError:
            return False

    def _adopt(self, segment_class: SegmentClass, fresh: int) -> Active | None:
        """Go on with the active segment of a process that is gone, if it was written in this process's way."""
        wanted = (segment_class.class_id, segment_class.flags | self._c.mode.segment_flags)
        # an append takes no more there than in a fresh segment
        limit = ledger.segment_limit(self._c.settings, fresh) - fresh

        def look(session: Session) -> tuple[list[tuple[int, SegmentRow]], str]:
            rows = [
                (n, r) for n, r in session.segments_in(ACTIVE)
                if (r.class_id, r.flags) == wanted and r.tail <= limit and r.owner != self._c.owner
            ]  # fmt: skip
            return rows[:8], session.generation

        rows, generation = self._c.index.read(look, COMMIT_SECONDS)
        for number, row in rows:
            if self._c.liveness is None or self._c.liveness.is_alive(row.owner):
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
                # what was published stays readable, page by page; nobody appends to it again
                self._c.counters.add("adopt_errors")
                self._leave(number, generation, ledger.close_for_appends)
        return None

    def _seal(self, segment_class: SegmentClass) -> None:
        writer, generation = self._writers.pop(segment_class)
        self._used_at.pop(segment_class, None)
        self._dirty.discard(segment_class)
        try:
            if self._c.settings.sync != "cache":  # a seal on the disk says that what it seals is there
                self._c.files.fdatasync(writer.fd)
            size = writer.seal()
            if self._c.settings.sync != "cache":
                self._c.files.fdatasync(writer.fd)
            self._c.index.write(
                lambda s: ledger.seal(s, writer.number, self._c.owner, generation, size), COMMIT_SECONDS
            )
        except StaleWriterError:
            pass
        except (OSError, IndexUnavailableError):
            self._leave(writer.number, generation, ledger.close_for_appends)
            raise
        finally:
            writer.close()

    def drop(self, segment_class: SegmentClass) -> None:
        """After a failure: no more appends. What was published stays, and is verified at each read."""
        current = self._writers.pop(segment_class, None)
        self._used_at.pop(segment_class, None)
        self._dirty.discard(segment_class)
        if current is None:
            return
        writer, generation = current
        writer.close()
        self._leave(writer.number, generation, ledger.close_for_appends)

    def _leave(self, number: int, generation: str, step: ledger.Step) -> None:
        """Take the next step of a segment that failed, now or when the index answers again.

        A row that stays active with a living owner would be charged, and nobody could reclaim it.
        """
        self._left.append((number, generation, step))
        self._finish_left()

    def _finish_left(self) -> None:
        for left in list(self._left):
            number, generation, step = left
            if generation == self._c.index.generation:
                try:
                    self._c.index.write(
                        partial(ledger.take_step, step, number, self._c.owner, generation), COMMIT_SECONDS
                    )
                except IndexUnavailableError:
                    self._c.counters.add("drop_errors")
                    return
            with contextlib.suppress(ValueError):
                self._left.remove(left)

    def _leave_lost(self) -> None:
        """Give up rows of this process that no writer stands for: an interrupt came between a commit and its use."""
        rows, generation = self._c.index.read(lambda s: (s.segments_in(ACTIVE), s.generation), COMMIT_SECONDS)
        for number, row in rows:
            if row.owner == self._c.owner and number not in self.active_numbers():
                flags = row.flags & ~FLAG_DIRECT
                classes = [SegmentClass(row.class_id, flags, *who) for who in product((False, True), range(LANES))]
                if not all(map(self.class_locks.is_free_within, classes)):
                    continue  # next time
                with contextlib.ExitStack() as locks:  # it may be about to be used, for a put or by an evictor
                    for one in classes:
                        locks.enter_context(self.lock(one))
                    if number not in self.active_numbers():
                        self._leave(number, generation, ledger.abandon_stale)

    def sync(self, writer: SegmentWriter) -> None:
        """A failed sync may have lost pages that the next call calls clean: the segment is dropped, never retried."""
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
                        self.drop(segment_class)

    def tidy(self) -> None:
        """Seal or trim active segments that nobody has written to for a while."""
        self._finish_left()
        self._leave_lost()
        now, settings = self._c.files.monotonic(), self._c.settings
        # prompts of many lifetimes and quotas: few segments stay open, since what is active is not to be evicted
        spare = len(self._writers) - min(CLASSES_MAX, 2 * settings.segments_bytes_max // settings.segment_bytes)
        for segment_class in sorted(self._writers, key=lambda c: self._used_at.get(c, 0.0)):  # those that rest first
            rests = spare > 0 or now - self._used_at.get(segment_class, now) >= IDLE_SECONDS
            if rests and self.class_locks.is_free_within(segment_class):
                self._used_at.pop(segment_class, None)
                if spare > 0 or segment_class.expires:
                    self.finish(segment_class)  # nothing is added to a lifetime that is past; sealed, it can go
                else:
                    with self.lock(segment_class):
                        self._rest(segment_class, release=False)
                spare -= 1

    def _rest(self, segment_class: SegmentClass, *, release: bool) -> None:
        current = self._writers.get(segment_class)
        if current is None:
            return
        writer, generation = current
        try:
            if writer.dead or generation != self._c.index.generation:
                self.drop(segment_class)
            elif writer.tail > self._c.settings.segment_bytes // 2:
                self._seal(segment_class)
            else:
                size = writer.trim()
                free = ledger.release_ownership if release else ledger.shrink
                self._c.index.write(lambda s: free(s, writer.number, self._c.owner, generation, size), COMMIT_SECONDS)
                if release:
                    self._writers.pop(segment_class, None)
                    writer.close()
        except StaleWriterError:
            self.drop(segment_class)  # somebody dropped the segment, and waits until it is let go
        except (OSError, IndexUnavailableError):
            self._c.counters.add("tidy_errors")

    def finish(self, segment_class: SegmentClass) -> None:
        """Seal the class's segment now, unless an append to it hangs: nothing more belongs in it."""
        if self.class_locks.is_free_within(segment_class, CLOSE_SECONDS):
            with self.lock(segment_class):
                if segment_class in self._writers:
                    self._seal_or_drop(segment_class)

    def _seal_or_drop(self, segment_class: SegmentClass) -> None:
        try:
            self._seal(segment_class)
        except (OSError, IndexUnavailableError):
            self.drop(segment_class)

    def finish_all(self, ids: Container[bytes] | None = None) -> None:
        """Seal all active segments, or those of them that are in ``ids``."""
        for segment_class, (writer, _) in list(self._writers.items()):
            if ids is None or writer.segment_id in ids:
                self.finish(segment_class)

    def close(self) -> bool:
        """Leave the active segments, trimmed, to whoever comes next.

        False if a disk that hangs keeps one of them: nobody else may append where that write may still come.
        """
        end = self._c.files.monotonic() + CLOSE_SECONDS
        for segment_class in list(self._writers):
            if not self.class_locks.is_free_within(segment_class, max(0.0, end - self._c.files.monotonic())):
                continue
            with self.lock(segment_class):
                self._rest(segment_class, release=True)
                current = self._writers.pop(segment_class, None)
                if current is not None:
                    current[0].close()
        return not self._writers

    def abandon(self) -> None:
        """In a forked child: the parent goes on writing its segments; this process starts its own."""
        for writer, _ in self._writers.values():
            writer.close()
        self.class_locks = ClassLocks()
        self._writers, self._used_at, self._dirty, self._left = {}, {}, set(), []

    def active_numbers(self) -> set[int]:
        return {writer.number for writer, _ in list(self._writers.values())}  # others add to them meanwhile
