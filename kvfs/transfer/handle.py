"""Transfer: the handle of one asynchronous save or load.

    save   QUEUED -> WAITING (for ``after``) -> COPYING -> WRITING -> the end
    load   QUEUED -> WAITING                 -> LOADING            -> the end
    end    DONE, PARTIAL, DECLINED, CANCELLED or FAILED

Bytes move only inside ``step()``. ``cancel`` forbids new steps and waits for those in progress, so that after it
nothing moves. Whoever ends a transfer ends its leases too. Callbacks run outside of all locks: once per page, then
once for the transfer, whatever becomes of them; only then ``done`` is set.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from kvfs.errors import ConfigError
from kvfs.pages.chunk_set import members
from kvfs.transfer.staging import Lease
from kvfs.types import PageDone, PageOutcome, Tier, TransferResult, TransferState

log = logging.getLogger("kvfs")

#: Sets of chunks, as bits, by group number.
Chunks: TypeAlias = "Mapping[int, int]"
Outcomes: TypeAlias = "Mapping[PageOutcome, Chunks]"
OnPage: TypeAlias = "Callable[[PageDone], object] | None"
OnDone: TypeAlias = "Callable[[Transfer], object] | None"
Summary: TypeAlias = "Callable[[Outcomes], tuple[int, dict[Tier, int]]]"

_SLICE_SECONDS = 0.05


class Latch:
    """A transfer has several: made in half a microsecond, where ``threading.Event`` takes seven.

    A lock is held until it happens. Whoever waits takes it and lets go of it, one after the other; if an interrupt
    strikes in between, the others find out a moment later.
    """

    __slots__ = ("_happened", "_held", "_lock", "_pid")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._held = [self._lock]  # whoever pops it lets go of it
        self._happened = False
        self._pid = os.getpid()

    def is_set(self) -> bool:
        return self._happened

    def wait(self, timeout: float | None = None) -> bool:
        """Wait, at most ``timeout`` seconds; whether it has happened. ConfigError in a forked child."""
        self.check_process()
        end = None if timeout is None else time.monotonic() + timeout
        while not self._happened:
            left = _SLICE_SECONDS if end is None else min(_SLICE_SECONDS, end - time.monotonic())
            if left <= 0:
                return self._happened
            if self._lock.acquire(timeout=left):
                self._lock.release()
        return True

    def check_process(self) -> None:
        """ConfigError in a forked child: what it waits for happens in the parent."""
        if self._pid != os.getpid():
            raise ConfigError("this transfer belongs to the parent process: attach again and start a new one here")

    def _set(self) -> None:
        self._happened = True
        if self._held:
            with contextlib.suppress(IndexError):  # somebody else was quicker
                self._held.pop().release()


@dataclass(frozen=True)
class TransferTask:
    """What is fixed about a transfer when it starts. ``groups``: (name, MODEL layers, page bytes) by number."""

    kind: str  # "save" or "load"
    pages: Chunks
    groups: Mapping[int, tuple[str, tuple[int, ...], int]]
    deadline: float  # on the clock of the store
    summarise: Summary  # tokens and tiers of the outcomes
    on_page: OnPage = None
    on_done: OnDone = None


class Transfer:
    """Handle of one save or load. Any thread may use it; the methods with an underscore are the workers'."""

    def __init__(self, task: TransferTask, at_end: Callable[[Transfer], None]) -> None:
        self.kind = task.kind
        self.error: BaseException | None = None
        #: the engine may reuse its units: no byte of them will be read, or written, by this transfer any more
        self.source_free = Latch()
        #: all that will be stored is visible to other processes; for loads the same as ``done``
        self.published = Latch()
        #: the result is there, and every callback has been called
        self.done = Latch()
        self._task = task
        self._at_end = at_end
        self._ready: dict[int, Latch] = {}  # of layers that somebody has asked for
        self._arrived: set[int] = set()  # layers
        self._lock = threading.RLock()  # taken by itself: an interrupt in a condition's Python code leaves it held
        self._cond = threading.Condition(self._lock)
        self._state = TransferState.QUEUED
        self._open, self._summarise = dict(task.pages), task.summarise
        self._outcomes: dict[PageOutcome, dict[int, int]] = {}
        self._expected: tuple[Outcomes, tuple[int, dict[Tier, int]]] | None = None  # and what that comes to
        self._leases: set[Lease] = set()
        self._moving = 0
        self._touching = 0  # of these, steps that read or write the engine's memory
        self._events: deque[Callable[[], object]] = deque()  # callbacks that are due, in order
        self._dispatching = False
        self._stopped = False  # no new steps
        self._ended = False
        self._reason = ""
        self._result: TransferResult | None = None

    # -- for everybody -----------------------------------------------------------------------

    @property
    def state(self) -> TransferState:
        return self._state

    @property
    def result(self) -> TransferResult | None:
        """None until the end."""
        return self._result

    def layer_ready(self, layer: int) -> Latch:
        """When MODEL layer ``layer`` may be used. Set at the end in any case: look at ``result`` then.

        Layers become ready in order, each once all pages of it have been verified and copied; the host transport,
        and loads that are not layer-wise, load whole pages: then all layers of a group become ready together.
        """
        self.done.check_process()
        with self._lock:
            ready = self._ready.get(layer)
            if ready is None:
                known = {one for _, layers, _ in self._task.groups.values() for one in layers}
                if layer not in known:
                    raise ConfigError(f"layer {layer} is not part of this transfer: it has {sorted(known)}")
                ready = self._ready[layer] = Latch()
                if layer in self._arrived or self._result is not None:
                    ready._set()
            return ready

    def wait(self, timeout: float | None = None) -> TransferResult | None:
        """Wait for the end; the result, or None if it has not come within ``timeout`` seconds."""
        return self._result if self.done.wait(timeout) else None

    def cancel(self, timeout: float | None = None) -> bool:
        """Stop. True: no byte of this transfer, in the engine or in the store, can move any more.

        Waits for the copy, read or append in progress; False if that takes longer than ``timeout`` seconds (the
        cancellation stands, and its end will follow). Callbacks may still be running in another thread until
        ``done``. Harmless when the transfer has ended.
        """
        self.done.check_process()
        self._stop("cancelled")
        with self._lock:
            if not self._cond.wait_for(lambda: not self._moving, timeout):
                return False
        self._end_unbroken()
        return True

    def withdraw(self, timeout: float) -> bool:
        """``cancel`` for whoever needs the engine's memory and nothing else. True: no byte of it can move any more.

        What moves between disk and ring may take as long as it likes; the transfer ends with it.
        """
        self.done.check_process()
        self._stop("cancelled")
        with self._lock:
            if not self._cond.wait_for(lambda: not self._touching, timeout):
                return False
        self.source_free._set()
        self._try_end()
        return True

    # -- for the workers ---------------------------------------------------------------------

    @property
    def deadline(self) -> float:
        return self._task.deadline

    @property
    def calls_back(self) -> bool:
        """Whether ``_end`` calls somebody else's code."""
        return self._task.on_page is not None or self._task.on_done is not None

    @property
    def stopped(self) -> bool:
        return self._stopped

    def _enter(self, state: TransferState) -> None:
        with self._lock:
            if not self._ended:
                self._state = state

    @contextlib.contextmanager
    def _step(self, *, engine: bool = True, tell: bool = True) -> Iterator[bool]:
        """Bytes may move inside, if it yields True; those of the engine's memory too, unless ``engine`` is False.

        Callbacks that are due follow, unless ``tell`` is False: for a thread that has several steps at once, since a
        callback may cancel, and wait for all of them.
        """
        with self._lock:
            allowed = not self._stopped
            self._moving += allowed
            self._touching += allowed and engine
        try:
            yield allowed
        finally:
            with self._lock:
                self._moving -= allowed
                self._touching -= allowed and engine
                self._cond.notify_all()
            if tell:
                self._dispatch()

    def _stop(self, reason: str, error: BaseException | None = None) -> None:
        """No new steps; ``reason`` becomes the result's unless there is one already."""
        with self._lock:
            if not self._ended:
                self._stopped = True
                self._reason = self._reason or reason
                self.error = self.error or error

    def _try_end(self) -> None:
        """End it if nothing moves; else whoever moves will."""
        with self._lock:
            if self._moving:
                return
        self._end_unbroken()

    def _end_unbroken(self) -> None:
        """``_end``, in a thread that no signal handler runs in: an interrupt would leave it half done for ever.

        Whoever calls may hold locks that callbacks want, so these are not waited for.
        """
        if self._ended:
            return
        if threading.current_thread() is threading.main_thread():
            with contextlib.suppress(RuntimeError):  # no more threads, or the interpreter is ending
                threading.Thread(target=self._end, name="kvfs-end", daemon=True).start()
                self.published.wait()
                return
        self._end()

    def _note(self, reason: str) -> None:
        with self._lock:
            self._reason = self._reason or reason

    def _own(self, lease: Lease) -> bool:
        """Tie a lease to this transfer; False, and the lease is released, if it has ended."""
        with self._lock:
            if not self._ended:
                self._leases.add(lease)
                return True
        lease.release()
        return False

    def _offer(self, pages: Chunks, summarise: Summary) -> None:
        """The pages of a transfer that began without any, and how they are summed up; too late when it has ended."""
        with self._lock:
            if not self._ended:
                self._open, self._summarise = dict(pages), summarise

    def _settle(self, group: int, chunks: int, outcome: PageOutcome) -> None:
        """Note what became of pages; those that were settled before are left out. Callbacks follow the step."""
        with self._lock:
            fresh = self._open.get(group, 0) & chunks
            if not fresh:
                return
            self._open[group] ^= fresh
            ended = self._outcomes.setdefault(outcome, {})
            ended[group] = ended.get(group, 0) | fresh
            if self._task.on_page is not None:
                name = self._task.groups[group][0]
                self._events += [
                    partial(self._task.on_page, PageDone(name, chunk, outcome)) for chunk in members(fresh)
                ]

    def _expect(self, outcomes: Outcomes) -> None:
        """What will most likely become of the pages: summed up by a worker that has to wait anyway."""
        self._expected = outcomes, self._summarise(outcomes)

    def _settle_rest(self, outcome: PageOutcome) -> None:
        """Note what became of all pages that are still open."""
        for group, chunks in self._open.items():
            self._settle(group, chunks, outcome)

    def _dispatch(self) -> None:
        """Call what is due. One thread at a time, so that the order holds; others leave their events to it."""
        interrupt: KeyboardInterrupt | None = None
        while True:
            with self._lock:
                if self._dispatching or not self._events:
                    break
                self._dispatching = True
                event = self._events.popleft()
            try:
                event()
            except KeyboardInterrupt as exc:
                interrupt = exc  # whoever waits for the end is told first
            except BaseException:  # an engine's callback must not end a worker
                log.exception("a callback of a transfer failed")
            finally:
                with self._lock:
                    self._dispatching = False
        if interrupt is not None:
            raise interrupt

    def _layers_ready(self, layers: Iterable[int]) -> None:
        """All pages of these MODEL layers are there."""
        with self._lock:
            self._arrived.update(layers)
            for layer in self._arrived & self._ready.keys():
                self._ready[layer]._set()

    def _end(self) -> None:
        """End it, once: what is still open is declined or cancelled, leases go back, everybody is told."""
        with self._lock:
            if self._ended:
                return
            assert not self._moving, "a transfer ends while its bytes move"
            self._ended = self._stopped = True
            leases = list(self._leases)
        for lease in leases:
            lease.release()
        self.source_free._set()
        self._settle_rest(PageOutcome.CANCELLED if self._reason == "cancelled" else PageOutcome.DECLINED)
        result = self._sum_up()
        self._state = self._last_state(result)
        with self._lock:
            self._result = result
            for ready in (*self._ready.values(), self.published):
                ready._set()
        self._at_end(self)
        if self._task.on_done is not None:
            self._events.append(partial(self._task.on_done, self))
        self._events.append(self.done._set)
        self._dispatch()

    def _sum_up(self) -> TransferResult:
        moved, nbytes = 0, 0
        for outcome in (PageOutcome.STORED, PageOutcome.LOADED):
            for group, chunks in self._outcomes.get(outcome, {}).items():
                moved += chunks.bit_count()
                nbytes += chunks.bit_count() * self._task.groups[group][2]
        skipped, total = self._count(PageOutcome.SKIPPED), sum(map(self._count, self._outcomes))
        foreseen = self._expected is not None and self._expected[0] == self._outcomes
        tokens, tiers = self._expected[1] if self._expected and foreseen else self._summarise(self._outcomes)
        declined = total - moved - skipped
        reason = self._reason if declined or not total else ""
        return TransferResult(tokens, moved, nbytes, skipped, declined, tiers, reason)

    def _count(self, outcome: PageOutcome) -> int:
        return sum(chunks.bit_count() for chunks in self._outcomes.get(outcome, {}).values())

    def _last_state(self, result: TransferResult) -> TransferState:
        if self.error is not None:
            return TransferState.FAILED
        if self._count(PageOutcome.CANCELLED) or (self._reason == "cancelled" and not self._outcomes):
            return TransferState.CANCELLED
        if not result.declined:
            return TransferState.DECLINED if result.reason else TransferState.DONE
        return TransferState.PARTIAL if result.pages or result.skipped else TransferState.DECLINED
