"""What it takes to load stored pages from the disk, against computing the same tokens.

A page that the page cache holds is loaded at the speed of the link, far faster than any model computes. The disk may be
slower than the GPU: then a prompt is loaded as far as that gains time, and the rest is computed. Both rates are
measured here: steps of the engine, and reads.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median

STEP_TOKENS_MIN = 1024  # of a step that computes a prompt; smaller ones decode
PERIOD_TOKENS = 2048, 65_536  # a measurement has at least, and at most about, so many
READ_BYTES_MIN = 64 << 20  # of a measurement of the disk, and of a load that is compared: 0.1 s at the slowest
LOAD_SECONDS = 0.02  # that a load of a part of a prompt must gain: about what it costs, whatever its size
RATES = 8  # measurements of each kind that count


class Costs:
    """The rates of one engine. Used by the scheduler's thread; ``note_read`` by any thread."""

    def __init__(self, overlap: int = 2, clock: Callable[[], float] = time.monotonic) -> None:
        """``overlap``: how many steps the engine schedules before the first of them has ended, at most."""
        self._overlap, self._clock = overlap, clock
        self._computed: deque[float] = deque(maxlen=RATES)  # tokens per second
        self._reads: deque[float] = deque(maxlen=RATES)  # bytes per second
        self._told: float | None = None  # by an earlier engine
        self._began: float | None = None  # when the first step of the measurement in progress was scheduled
        self._tokens = self._after = 0  # its tokens; steps since the last large one

    # -- measurements ------------------------------------------------------------------------

    def note_step(self, tokens: int) -> None:
        """The engine has scheduled a step. Steps follow each other as fast as they are computed."""
        now = self._clock()
        if tokens >= STEP_TOKENS_MIN:
            if self._began is None:
                self._began, self._tokens = now, 0
            elif self._tokens >= PERIOD_TOKENS[1]:
                self._end(now)
                self._began, self._tokens = now, 0
            self._tokens, self._after = self._tokens + tokens, 0
        elif tokens and self._began is not None:
            self._after += 1
            if self._after >= self._overlap:  # by now the last large one has ended
                self._end(now)

    def note_wait(self) -> None:
        """Nothing was scheduled, since requests wait for other things than the GPU."""
        self._began = None

    def note_idle(self) -> None:
        """The last request has ended."""
        if self._began is not None:
            self._end(self._clock())

    def note_speed(self, tokens_per_second: float) -> None:
        """An earlier engine computed so many tokens per second. Counts until this one has measured."""
        self._told = tokens_per_second

    def note_read(self, nbytes: int, seconds: float) -> None:
        """So many bytes were read from the disk. Few bytes say nothing, and are ignored."""
        if nbytes >= READ_BYTES_MIN and seconds > 0:
            self._reads.append(nbytes / seconds)

    def _end(self, now: float) -> None:
        assert self._began is not None
        if self._tokens >= PERIOD_TOKENS[0] and now > self._began:
            self._computed.append(self._tokens / (now - self._began))
        self._began = None

    # -- the comparison ----------------------------------------------------------------------

    @property
    def tokens_per_second(self) -> float | None:
        """That the engine computes; None until it is known."""
        return median(self._computed) if self._computed else self._told

    @property
    def bytes_per_second(self) -> float | None:
        """That the disk reads; None until it is known."""
        return median(list(self._reads)) if self._reads else None

    def disk_loses(self, tokens: int, nbytes: int) -> bool:
        """Whether to read ``nbytes`` from the disk takes longer than to compute the ``tokens`` that they hold."""
        compute, read = self.tokens_per_second, self.bytes_per_second
        return compute is not None and read is not None and nbytes / read > tokens / compute

    def best_end(self, first: int, end: int, cold: int, page_tokens: int, page_bytes: int) -> int:
        """Up to which page, of those from ``first`` to ``end``, a load gains the most time; ``first``: load none.

        ``cold``: the pages, as bits, that only the disk has. A few of them are not worth the question.
        """
        compute, read = self.tokens_per_second, self.bytes_per_second
        asked = (cold >> first).bit_count() * page_bytes >= READ_BYTES_MIN
        if compute is None or read is None or not asked or not self.disk_loses(page_tokens, page_bytes):
            return end
        gain, cost = page_tokens / compute, page_bytes / read
        best, best_end, gained = 0.0, first, 0.0
        for page in range(first, end):
            gained += gain - cost if cold >> page & 1 else gain
            if gained >= best:
                best, best_end = gained, page + 1
        return best_end if best > LOAD_SECONDS else first
