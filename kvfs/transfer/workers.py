"""What the saves and loads of the host transport share; ``kvfs.transfer.save`` and ``kvfs.transfer.load`` are the jobs.

save   copy thread: event, slots, gather (then the source is free); write thread: append and publish, batch by batch
load   read thread: event, then per batch: slots, read and verify into them, scatter

A copy thread never touches a disk and the write thread never waits for slots, so a stalled disk delays no
``source_free`` while the ring has slots. When it has none, a save waits for them as long as writes make progress. A
load ends at its deadline in the middle of a read; the read keeps its slots.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, NamedTuple

from kvfs.context import Context
from kvfs.directory.config import parse_size
from kvfs.errors import ConfigError
from kvfs.pages.device_kv import DeviceKV
from kvfs.pages.identity import Identity
from kvfs.pages.layout import Group, Part
from kvfs.read.reader import Reader
from kvfs.transfer.append_process import AppendProcess
from kvfs.transfer.control import TransferControl
from kvfs.transfer.staging import SLOT_ALIGN, StagingRing
from kvfs.types import TransferState
from kvfs.write.appender import Appender

log = logging.getLogger("kvfs")
BATCH_BYTES = 16 << 20
BATCH_PAGES = 128
#: A save that finds the ring full is declined, not kept waiting, once no write has ended for STALLED_SECONDS and the
#: time that a slow disk needs for the bytes being written.
STALLED_SECONDS, SLOW_BYTES_PER_SECOND = 0.5, 512e6


class Attached(NamedTuple):
    """One group on this rank."""

    number: int
    group: Group
    part: Part
    device: DeviceKV
    page_bytes: int  # of the part


class Writes:
    """Bytes that are being written, and when the last write ended. Thread-safe."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic, self._lock = monotonic, threading.Lock()
        self._running, self._nbytes, self._since = 0, 0, monotonic()

    @contextlib.contextmanager
    def one(self, nbytes: int) -> Iterator[None]:
        """``nbytes`` are being written inside."""
        with self._lock:
            if not self._running:
                self._since = self._monotonic()
            self._running += 1
            self._nbytes += nbytes
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                self._nbytes -= nbytes
                self._since = self._monotonic()

    def stalled_at(self) -> float:
        """When the disk counts as stalled, if no write ends until then."""
        patience = STALLED_SECONDS + self._nbytes / SLOW_BYTES_PER_SECOND
        return self._since + patience if self._running else math.inf


@dataclass(frozen=True)
class TransportContext:
    """What all jobs of one HostIO share."""

    store: Context
    appender: Appender
    reader: Reader
    identity: Identity
    descriptor: bytes
    ring: StagingRing
    save_keep: int  # slots that saves leave to loads
    codec: int  # of pages that are saved
    writes: Writes
    append_process: AppendProcess | None  # None: saves append in this process
    #: loads to host memory whose disk has yet to answer
    reading: set[TransferControl] = field(default_factory=set, init=False)

    def read_hangs(self) -> bool:
        """Whether a load's deadline has passed in the middle of its read: the next load would wait for its own."""
        now = self.store.files.monotonic()
        return any(now >= transfer.deadline for transfer in list(self.reading))

    def batch(self, page_bytes: int) -> int:
        """Pages to ask for slots for at once."""
        return max(1, min(BATCH_PAGES, BATCH_BYTES // page_bytes, self.ring.holds(page_bytes)))

    def late(self, transfer: TransferControl) -> bool:
        """Whether the deadline has passed; notes it as the reason."""
        late = self.store.files.monotonic() >= transfer.deadline
        if late:
            transfer.note("deadline")
        return late


def wait_for(transfer: TransferControl, after: Any) -> None:
    """Wait for the engine's event: ``synchronize()``, ``wait()``, or a call of it. What it raises is raised here."""
    if after is None or transfer.stopped:
        return
    transfer.enter(TransferState.WAITING)
    wait = getattr(after, "synchronize", None) or getattr(after, "wait", None) or after
    wait()


def fail(transfer: TransferControl, exc: Exception) -> None:
    log.error("a %s failed", transfer.task.kind, exc_info=exc)
    transfer.stop("error", exc)


class JobThreads:
    """Daemon threads that run what is put, in order. They end with ``close``, or when this is garbage-collected.

    ``last``: called by each of them when it ends.
    """

    def __init__(self, name: str, count: int, last: Callable[[], None] = lambda: None) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=_run_all, args=(self._queue, last), name=f"kvfs-{name}-{i}", daemon=True)
            for i in range(count)
        ]
        weakref.finalize(self, _dismiss, self._queue, count).atexit = False
        for thread in self._threads:
            thread.start()

    def put(self, run: Callable[[], None]) -> None:
        self._queue.put(run)

    @property
    def waiting(self) -> int:
        """How many calls have not begun, those of cancelled transfers included."""
        return self._queue.qsize()

    def dismiss(self) -> None:
        """Have the threads end behind what was put so far."""
        _dismiss(self._queue, len(self._threads))

    def close(self, timeout: float) -> None:
        self.dismiss()
        self.join(timeout)

    def join(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))


def _run_all(queue: SimpleQueue[Callable[[], None] | None], last: Callable[[], None]) -> None:
    while (run := queue.get()) is not None:
        try:
            run()
        except BaseException:  # an error in one transfer or callback must not end the others
            log.exception("a transfer crashed")
        del run  # it holds the match, which must not live until the next call comes
    last()


def _dismiss(queue: SimpleQueue[Callable[[], None] | None], threads: int) -> None:
    for _ in range(threads):
        queue.put(None)


def make_ring(
    context: Context, attached: Collection[Attached], ring_bytes: int | str, dirty_bytes: int | str | None,
    allocate: Callable[[int], memoryview | None] = lambda nbytes: None,
) -> tuple[StagingRing, int]:  # fmt: skip
    """The ring, and how many of its slots saves must leave free. ConfigError if a page does not fit.

    A slot has the size of the largest page. ``allocate`` returns the memory; None: the ring makes its own.
    """
    page = max(a.page_bytes for a in attached)
    slot = -(-page // SLOT_ALIGN) * SLOT_ALIGN
    slots = parse_size(ring_bytes, "ring_bytes") // slot
    if not slots:
        raise ConfigError(f"ring_bytes is {ring_bytes}: pass at least {slot}, for one page of {page} bytes")
    dirty = slots - slots // 4 if dirty_bytes is None else parse_size(dirty_bytes, "dirty_bytes") // slot
    if not dirty:
        raise ConfigError(f"dirty_bytes is {dirty_bytes}: pass at least {slot}, for one page of {page} bytes")
    return StagingRing(slot, slots, context.files.monotonic, allocate(slot * slots)), max(0, slots - dirty)
