"""What the scheduler leaves to a thread of its own, since a disk may hang: reading ahead, and the speeds it needs.

Pages that a request did not wait for are read into the page cache, where the next request of the prompt finds them; and
those of requests in the engine's queue, so that their loads find them there.
Each read also tells how fast the disk is; the first one, of a sample, is made for that alone. The thread ends when
nothing is left to do.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from vllm.logger import init_logger

from kvfs.errors import KvfsError
from kvfs.integrations.vllm.costs import Costs
from kvfs.lookup.prefix_match import PrefixMatch
from kvfs.namespace import Namespace
from kvfs.store import Store

logger = init_logger(f"vllm.{__name__}")
SAMPLE_BYTES = 256 << 20
WAITING_MAX = 8  # matches; the oldest is dropped for one more, which may be of use sooner
STOP_SECONDS = 5.0  # longest wait for a read in progress, which ends after its current block


class _StoppedError(Exception):
    """Ends a read."""


class Prefetcher:
    """Owns the thread, and the matches that wait for it. Measurements of the disk go to ``costs``, in that thread."""

    def __init__(self, store: Store, namespace: Namespace, costs: Costs) -> None:
        self._store, self._ns, self._costs = store, namespace, costs
        self._waiting: deque[Callable[[], None] | PrefixMatch] = deque()
        self._lock = threading.Lock()  # around ``_waiting`` and ``_thread``
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._noted = 0.0  # the speed that other engines have been told

    def begin(self, namespace: Namespace) -> None:
        """Find out how fast the disk is, and how fast an earlier engine of this namespace has computed."""
        self._ns = namespace
        self._add(self._measure)

    def ask(self, match: PrefixMatch) -> None:
        """Read the pages of ``match``, which is closed here."""
        self._add(match)

    @property
    def waiting(self) -> int:
        """How many tasks have not begun."""
        return len(self._waiting)

    def ask_prompt(self, hashes: Sequence[bytes]) -> None:
        """Look up the prompt with these chunk hashes, and read its pages."""
        namespace = self._ns
        self._add(lambda: self._read_prompt(namespace, hashes))

    def note_speed(self) -> None:
        """Tell later engines how fast this one computes, if that has changed."""
        speed = self._costs.tokens_per_second
        if speed is not None and abs(speed - self._noted) > self._noted / 10:
            self._noted = speed
            self._add(lambda: self._ns.note_compute_speed(speed))

    def stop(self) -> None:
        self._stopping = True
        if (thread := self._thread) is not None:
            thread.join(STOP_SECONDS)
        with self._lock:
            left, self._waiting = self._waiting, deque()
        for task in left:
            _close(task)

    def _add(self, task: Callable[[], None] | PrefixMatch) -> None:
        dropped: Callable[[], None] | PrefixMatch | None = None
        with self._lock:
            if self._stopping:
                dropped = task
            else:
                self._waiting.append(task)
                dropped = self._waiting.popleft() if len(self._waiting) > WAITING_MAX else None
                if self._thread is None:
                    self._start()
        _close(dropped)

    def _start(self) -> None:
        """With the lock held. Without a thread the tasks wait for the next one that is added."""
        thread = threading.Thread(target=self._run, name="kvfs-prefetch", daemon=True)
        try:
            thread.start()
        except RuntimeError as exc:  # the process may have no more threads; the engine goes on
            logger.warning_once("kvfs: nothing is read ahead: %s", exc)
        else:
            self._thread = thread

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                task = self._waiting.popleft()
            try:
                if isinstance(task, PrefixMatch):
                    with task:
                        self._read(match=task)
                else:
                    task()
            except _StoppedError:
                pass
            except (KvfsError, OSError) as exc:  # the disk fails, or the store is being closed
                logger.debug("kvfs: not prefetched, or not measured: %s", exc)
            except Exception:  # of any kind: a thread that ends here would leave matches, and their segments, held
                logger.exception("kvfs: not prefetched, or not measured")

    def _measure(self) -> None:
        speed = self._ns.compute_speed()
        if speed is not None:
            self._costs.note_speed(speed)
        self._read(sample=SAMPLE_BYTES)

    def _read_prompt(self, namespace: Namespace, hashes: Sequence[bytes]) -> None:
        pages = namespace.prompt(hashes=hashes)
        pages.look()
        if end := pages.restorable():
            with pages.select(pages.needed(0, end), end) as match:
                self._read(match=match)

    def _read(self, **what: Any) -> None:
        if self._store.settings.mode == "cache":  # other modes read past the page cache, or have no disk
            done = self._store.warm(**what, progress=self._go_on)
            self._costs.note_read(done.read_bytes, done.seconds)

    def _go_on(self, done: int, total: int) -> None:
        if self._stopping:
            raise _StoppedError


def _close(task: Callable[[], None] | PrefixMatch | None) -> None:
    """Release what a task that will not run holds."""
    if isinstance(task, PrefixMatch):
        task.close()
