"""Prompts that another host has computed: whether a request waits while the bucket process pulls its pages.

Nothing is known of the bucket when a request arrives: it may be slow, away, or lack the prompt. So a request waits for
its answer a small part of the time that computing takes, and then as long as pages come faster than they are computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvfs.integrations.vllm.costs import Costs
from kvfs.integrations.vllm.requests import RequestPages, Waiting
from kvfs.namespace import Namespace
from kvfs.store import Store

TOKENS_MIN = 1024  # of a prompt that are not stored here: fewer are computed within a few round trips
ASK_SHARE = 0.1  # of the time to compute them, for which a request waits for the bucket's answer
LIMIT_SECONDS = 1.0  # longest wait while it is not known how fast the engine computes
OBSERVED_SHARE = 0.2  # of the time to compute, after which the speed of a pull is judged
RATE_BYTES_MIN = 16 << 20  # of a pull that tells how fast the bucket is
RATE_SECONDS = 60.0  # for which that is believed


class Fetches:
    """The waits of one engine. Used by the scheduler's thread; no call waits."""

    def __init__(
        self, store: Store, costs: Costs, seconds: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``seconds``: longest wait of a request, however fast it is computed; None: as the rates say."""
        self._store, self._costs, self._seconds, self._clock = store, costs, seconds, clock
        self._rate: tuple[float, float] | None = None  # bytes per second of the last pull, and when it ended
        store.start_bucket_process()

    @property
    def in_use(self) -> bool:
        remote = self._store.settings.remote
        return bool(remote.url) and remote.read_through == "on" and self._seconds != 0

    def begin(self, namespace: Namespace, state: RequestPages) -> Waiting | None:
        """Ask the bucket for what a new request lacks, after its first lookup; None if that is not begun."""
        first, chunks = state.pages.restorable(), state.pages.chunks
        if (chunks - first) * state.page_tokens < (TOKENS_MIN if self._seconds is None else 1):
            return None
        fetch = self._store.fetch(namespace, hashes=state.pages.hashes, first=first)
        return None if fetch is None else Waiting(fetch, chunks)

    def goes_on(self, waiting: Waiting, computed: int, page_tokens: int, page_bytes: int) -> bool:
        """Whether a request that the engine could compute now waits, as the engine has ``computed`` tokens of it."""
        now, fetch = self._clock(), waiting.fetch
        if waiting.since is None:
            waiting.since = now
        if fetch.ended:
            return False
        first = max(fetch.first, computed // page_tokens)
        missing = (waiting.chunks - first) * page_tokens
        waited, speed = now - waiting.since, self._costs.tokens_per_second
        if self._seconds is not None:
            return missing > 0 and fetch.reach != fetch.first and waited < self._seconds
        if missing < TOKENS_MIN:
            return False
        if fetch.reach is None:
            return waited < ASK_SHARE * (missing / speed if speed else LIMIT_SECONDS)
        gain = min(fetch.reach, waiting.chunks) - first
        if gain <= 0:
            return False
        limit = gain * page_tokens / speed if speed else LIMIT_SECONDS
        if waited > limit:
            return False
        running = now - (fetch.answered or now)
        if speed and running > OBSERVED_SHARE * limit:
            return fetch.share * limit > running
        rate = self._rate if self._rate is not None and now - self._rate[1] < RATE_SECONDS else None
        return not (speed and rate) or gain * page_bytes / rate[0] < limit

    def end(self, waiting: Waiting) -> float:
        """The request waits no longer; for how long it did, in seconds."""
        now, fetch = self._clock(), waiting.fetch
        fetch.cancel()
        if fetch.nbytes >= RATE_BYTES_MIN and fetch.answered is not None:
            self._rate = fetch.nbytes / max((fetch.over or now) - fetch.answered, 1e-6), now
        return 0.0 if waiting.since is None else now - waiting.since
