"""TransferControl: how the workers of a transport move, settle and end one save or load.

    save   QUEUED -> WAITING (for ``after``) -> COPYING -> WRITING -> the end
    load   QUEUED -> WAITING                 -> LOADING            -> the end
    end    DONE, PARTIAL, DECLINED, CANCELLED or FAILED

Bytes move only inside ``step()``. ``cancel`` forbids new steps and waits for those in progress, so that no byte moves
after it. A load that reads into leases of its worker moves none yet. The end releases every lease that the transfer
owns. Callbacks run outside all locks: once per page, then once for
the transfer, even if one raises; ``done`` is set after the last of them.
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
from typing import TYPE_CHECKING, TypeAlias

from kvfs.errors import ConfigError
from kvfs.pages.chunk_set import members
from kvfs.transfer.staging import Lease
from kvfs.types import PageDone, PageOutcome, Tier, TransferResult, TransferState

if TYPE_CHECKING:
    from kvfs.transfer.handle import Transfer

log = logging.getLogger("kvfs")

#: Sets of chunks, as bits, by group number.
Chunks: TypeAlias = "Mapping[int, int]"
Outcomes: TypeAlias = "Mapping[PageOutcome, Chunks]"
OnPage: TypeAlias = "Callable[[PageDone], object] | None"
OnDone: TypeAlias = "Callable[[Transfer], object] | None"
Summary: TypeAlias = "Callable[[Outcomes], tuple[int, dict[Tier, int]]]"

_SLICE_SECONDS = 0.05  # a wait looks at the flag at least so often
_QUERY_SECONDS = 0.001  # and so often at what it watches


class Latch:
    """Set once, never cleared. A transfer has several: one is made in 0.5 us, a ``threading.Event`` in seven.

    A lock is held until the latch is set. Each waiter acquires and releases it in turn; if an interrupt strikes in
    between, the others notice within _SLICE_SECONDS.
    """

    __slots__ = ("_held", "_help", "_is_set", "_lock", "_pid", "_query")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._held = [self._lock]  # the thread that pops it releases it
        self._is_set = False
        self._pid = os.getpid()
        self._query: Callable[[], bool] | None = None
        self._help: Callable[[float | None], object] | None = None

    def is_set(self) -> bool:
        query = self._query
        if not self._is_set and query is not None:
            try:
                over = query()
            except RuntimeError:  # of a GPU that has failed; the worker meets it too
                self._query, over = None, False
            if over:
                self._set()
        return self._is_set

    def watch(self, query: Callable[[], bool]) -> None:
        """From now on it is also set once ``query`` is true, which callers of ``is_set`` and ``wait`` find out."""
        self._query = query

    def help_with(self, help: Callable[[float | None], object]) -> None:
        """A waiter calls it first, with the end of its wait (``time.monotonic``, or None): it may do what sets this."""
        self._help = help

    def wait(self, timeout: float | None = None) -> bool:
        """Wait at most ``timeout`` seconds; whether it is set. ConfigError in a forked child."""
        self.check_process()
        end = None if timeout is None else time.monotonic() + timeout
        help = self._help
        if help is not None and not self._is_set:
            help(end)
        while not self.is_set():
            slice_seconds = _SLICE_SECONDS if self._query is None else _QUERY_SECONDS
            left = slice_seconds if end is None else min(slice_seconds, end - time.monotonic())
            if left <= 0:
                return self._is_set
            if self._lock.acquire(timeout=left):
                self._lock.release()
        return True

    def check_process(self) -> None:
        """ConfigError in a forked child: only the parent sets it."""
        if self._pid != os.getpid():
            raise ConfigError("this transfer belongs to the parent process: attach again and start a new one here")

    def _set(self) -> None:
        self._is_set, self._query, self._help = True, None, None
        if self._held:
            with contextlib.suppress(IndexError):  # another thread was quicker
                self._held.pop().release()


@dataclass(frozen=True)
class TransferTask:
    """What is fixed when a transfer starts. ``groups``: (name, MODEL layers, page bytes) by number."""

    kind: str  # "save" or "load"
    pages: Chunks
    groups: Mapping[int, tuple[str, tuple[int, ...], int]]
    deadline: float  # on the clock of the store
    summarise: Summary  # tokens and tiers of the outcomes
    on_page: OnPage = None
    on_done: OnDone = None


class TransferControl:
    """State of one transfer, for the workers and for its handle (``kvfs.transfer.handle.Transfer``). Thread-safe.

    Owns the leases, the outcome of each page, the callbacks that are due and the latches. What moves the bytes is the
    business of the jobs.
    """

    def __init__(self, task: TransferTask, at_end: Callable[[TransferControl], None]) -> None:
        """``at_end``: called once the result is known, before ``on_done``."""
        self.error: BaseException | None = None
        self.late_for = "deadline"  # the reason if the deadline passes now
        self.source_free, self.published, self.done = Latch(), Latch(), Latch()
        self.task = task
        self._at_end = at_end
        self._at_last: Callable[[], object] | None = None
        self._waiting: tuple[Callable[[], object], ...] = ()  # for ``done``
        self._ready: dict[int, Latch] = {}  # of the layers that were asked for
        self._arrived: set[int] = set()  # layers
        self._lock = threading.RLock()  # taken by itself: an interrupt in a condition's Python code leaves it held
        self._cond = threading.Condition(self._lock)
        self._state = TransferState.QUEUED
        self._open, self._summarise = dict(task.pages), task.summarise
        self._outcomes: dict[PageOutcome, dict[int, int]] = {}
        self._expected: tuple[Outcomes, tuple[int, dict[Tier, int]]] | None = None  # and their summary
        self._leases: set[Lease] = set()
        self._moving = 0  # steps in progress
        self._touching = 0  # of these, steps that read or write the engine's memory
        self._events: deque[Callable[[], object]] = deque()  # callbacks that are due, in order
        self._dispatching = False
        self._stopped = False  # no new steps
        self._ended = False
        self._reason = ""
        self._result: TransferResult | None = None

    @property
    def deadline(self) -> float:
        return self.task.deadline

    @property
    def calls_back(self) -> bool:
        """Whether ``end`` calls code of the engine."""
        return self.task.on_page is not None or self.task.on_done is not None

    @property
    def state(self) -> TransferState:
        return self._state

    @property
    def result(self) -> TransferResult | None:
        """None until the end."""
        return self._result

    @property
    def stopped(self) -> bool:
        return self._stopped

    # -- of the handle -----------------------------------------------------------------------

    def call_last(self, call: Callable[[], object]) -> None:
        """Call it at the end, behind all callbacks of pages; forgotten then."""
        self._at_last = call

    def when_done(self, call: Callable[[], object]) -> None:
        """Call it once ``done`` is set, in the thread that sets it; at once if it is."""
        with self._lock:
            if not self.done.is_set():
                self._waiting = (*self._waiting, call)
                return
        call()

    def _finish(self) -> None:
        with self._lock:
            self.done._set()
        for call in self._waiting:
            call()
        self._waiting = ()

    def layer_ready(self, layer: int) -> Latch:
        """See ``Transfer.layer_ready``."""
        self.done.check_process()
        with self._lock:
            ready = self._ready.get(layer)
            if ready is None:
                known = {one for _, layers, _ in self.task.groups.values() for one in layers}
                if layer not in known:
                    raise ConfigError(f"layer {layer} is not part of this transfer: it has {sorted(known)}")
                ready = self._ready[layer] = Latch()
                if layer in self._arrived or self._result is not None:
                    ready._set()
            return ready

    def cancel(self, timeout: float | None) -> bool:
        """See ``Transfer.cancel``."""
        self.done.check_process()
        self.stop("cancelled")
        with self._lock:
            if not self._cond.wait_for(lambda: not self._moving, timeout):
                return False
        self._end_unbroken()
        return True

    def withdraw(self, timeout: float) -> bool:
        """See ``Transfer.withdraw``."""
        self.done.check_process()
        self.stop("cancelled")
        with self._lock:
            if not self._cond.wait_for(lambda: not self._touching, timeout):
                return False
        self.free_source()
        self.try_end()
        return True

    # -- of the workers ----------------------------------------------------------------------

    def enter(self, state: TransferState) -> None:
        """Go on to ``state``, unless it has ended."""
        with self._lock:
            if not self._ended:
                self._state = state

    @contextlib.contextmanager
    def step(self, *, engine: bool = True, tell: bool = True) -> Iterator[bool]:
        """Yields whether bytes may move inside; those of the engine's memory only with ``engine``.

        Callbacks that are due follow, unless ``tell`` is False: for a thread that has several steps at once, since a
        callback may cancel, which waits for all of them.
        """
        with self._lock:
            allowed = not self._stopped
            self._moving += allowed
            self._touching += allowed and engine
        try:
            yield allowed
        finally:
            with self._lock:
                if not self._ended:  # else an interrupt has broken this off, and ``end_again`` has done it
                    self._moving -= allowed
                    self._touching -= allowed and engine
                self._cond.notify_all()
            if tell:
                self._dispatch()

    def free_source(self) -> None:
        """No byte of the engine's units will be read, or written, by this transfer any more."""
        self.source_free._set()

    def free_source_when(self, query: Callable[[], bool]) -> None:
        """``free_source`` as soon as ``query`` is true: the engine's thread sees it without a turn of a worker."""
        self.source_free.watch(query)

    def stop(self, reason: str, error: BaseException | None = None) -> None:
        """Allow no new steps; ``reason`` becomes the result's unless it has one."""
        with self._lock:
            if not self._ended:
                self._stopped = True
                self._reason = self._reason or reason
                self.error = self.error or error

    def note(self, reason: str) -> None:
        """``reason`` becomes the result's, if pages are declined, unless it has one."""
        with self._lock:
            self._reason = self._reason or reason

    def own(self, lease: Lease) -> bool:
        """Have the end release a lease. False if the transfer has ended: the lease is released now."""
        with self._lock:
            if not self._ended:
                self._leases.add(lease)
                return True
        lease.release()
        return False

    def offer(self, pages: Chunks, summarise: Summary) -> None:
        """The pages of a transfer that began without any, and their summary; ignored when it has ended."""
        with self._lock:
            if not self._ended:
                self._open, self._summarise = dict(pages), summarise

    def settle(self, group: int, chunks: int, outcome: PageOutcome) -> None:
        """Record the outcome of pages, except those that have one. Callbacks follow the step."""
        with self._lock:
            fresh = self._open.get(group, 0) & chunks
            if not fresh:
                return
            ended = self._outcomes.setdefault(outcome, {})
            ended[group] = ended.get(group, 0) | fresh
            self._open[group] ^= fresh  # last: an interrupt before it has these pages recorded again
            if self.task.on_page is not None:
                name = self.task.groups[group][0]
                self._events += [partial(self.task.on_page, PageDone(name, chunk, outcome)) for chunk in members(fresh)]

    def expect(self, outcomes: Outcomes) -> None:
        """Summarise the likely outcomes ahead of the end, in a worker that has to wait anyway."""
        self._expected = outcomes, self._summarise(outcomes)

    def layers_ready(self, layers: Iterable[int]) -> None:
        """All pages of these MODEL layers are in the engine's memory."""
        with self._lock:
            self._arrived.update(layers)
            for layer in self._arrived & self._ready.keys():
                self._ready[layer]._set()

    def try_end(self) -> None:
        """End it unless bytes move; the worker that moves them ends it then."""
        with self._lock:
            if self._moving:
                return
        self._end_unbroken()

    def end(self) -> None:
        """End it, once: decline or cancel the pages that are open, release the leases, call back."""
        with self._lock:
            if self._ended:
                return
            assert not self._moving, "a transfer ends while its bytes move"
            self._ended = self._stopped = True
        self.finish_end()

    def end_again(self) -> None:
        """``end``, by another thread, after an interrupt has broken it off; no byte moves any more."""
        with self._lock:
            self._moving = self._touching = 0  # the interrupt may have struck in the end of a step
            self._cond.notify_all()
            self._ended = self._stopped = True
        self.finish_end()

    def finish_end(self) -> None:
        """The rest of ``end``."""
        if self.done.is_set():
            self._finish()
            return
        for lease in list(self._leases):
            lease.release()
        self.free_source()
        rest = PageOutcome.CANCELLED if self._reason == "cancelled" else PageOutcome.DECLINED
        for group, chunks in self._open.items():
            self.settle(group, chunks, rest)
        result = self._sum_up()
        self._state = self._last_state(result)
        with self._lock:
            self._result = result
            for ready in (*self._ready.values(), self.published):
                ready._set()
        self._at_end(self)
        if self._at_last is not None:
            self._events.append(self._at_last)
            self._at_last = None  # it has the handle, which has this
        self._events.append(self._finish)
        self._dispatch()

    # -- helpers -----------------------------------------------------------------------------

    def _end_unbroken(self) -> None:
        """``end``, in a thread that runs no signal handler: an interrupt would leave it half done.

        The caller may hold locks that callbacks want, so callbacks are not waited for.
        """
        if self._ended:
            return
        if threading.current_thread() is threading.main_thread():
            with contextlib.suppress(RuntimeError):  # no more threads, or the interpreter is ending
                threading.Thread(target=self.end, name="kvfs-end", daemon=True).start()
                self.published.wait()
                return
        self.end()

    def _dispatch(self) -> None:
        """Call what is due. One thread at a time keeps the order; others leave their events to it."""
        interrupt: KeyboardInterrupt | None = None
        while True:
            mine = False
            try:
                with self._lock:
                    if self._dispatching or not self._events:
                        break
                    self._dispatching = mine = True
                    event = self._events.popleft()
                event()
            except KeyboardInterrupt as exc:
                interrupt = exc  # raised once those that wait for the end are told
            except BaseException:  # an engine's callback must not end a worker
                log.exception("a callback of a transfer failed")
            finally:  # no call in it: an interrupt there would leave this undone
                if mine:
                    self._dispatching = False
        if interrupt is not None:
            raise interrupt

    def _sum_up(self) -> TransferResult:
        moved, nbytes = 0, 0
        for outcome in (PageOutcome.STORED, PageOutcome.LOADED):
            for group, chunks in self._outcomes.get(outcome, {}).items():
                moved += chunks.bit_count()
                nbytes += chunks.bit_count() * self.task.groups[group][2]
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
