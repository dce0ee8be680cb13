"""The index of a process that may only read: the store's while it may be trusted, else a private one outside the store.

A private index does not learn what other processes store and purge. So the process returns to the store's index as soon
as that may be trusted, and rebuilds its private one after a purge or an LMDB error.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kvfs.context import Context
from kvfs.errors import IndexUnavailableError
from kvfs.index.deadlines import COMMIT_SECONDS
from kvfs.index.environment import Index
from kvfs.index.trust import trust_version

MISSING_SECONDS = 30.0  # how long a reader waits for a writer to rebuild the store's index


class ReadOnlyIndex:
    """Swaps ``context.index``; calls that use the old one meanwhile are misses. One thread at a time."""

    def __init__(self, context: Context, build: Callable[[], Index]) -> None:
        self._c, self._build = context, build
        self._obeys: tuple[int, ...] | None = None  # version of the purge marks that the private index was built with
        self._distrusted: object = None  # version of the store's index that may not be trusted
        self._missing_since = math.inf  # the store's index

    def open_own(self) -> None:
        """Build a private index. OSError if that fails."""
        version = self._c.marks.version()
        old, self._c.index = self._c.index, self._build()
        self._obeys = version  # not before: after an error the next call tries again
        old.close()

    def follow(self) -> None:
        """Check which index is to be used now. Called every second."""
        if self._obeys is None:
            self._leave_missing()
            return
        seen = trust_version(self._c.directory)
        if seen != self._distrusted and self._return_to_shared(seen):
            return
        if self._obeys != self._c.marks.version() or self._c.index.is_missing(COMMIT_SECONDS):
            self.open_own()

    def _leave_missing(self) -> None:
        """Build a private index if the store's has been given up and no writer rebuilds it."""
        now = self._c.files.monotonic()
        if not self._c.index.is_missing(COMMIT_SECONDS):
            self._missing_since = math.inf
        elif now - self._missing_since >= MISSING_SECONDS:
            self.open_own()
        else:
            self._missing_since = min(self._missing_since, now)

    def _return_to_shared(self, seen: object) -> bool:
        """Use the store's index, if it may be trusted; ``seen``: its version."""
        shared = Index(self._c.directory, self._c.settings.index_bytes)
        try:
            shared.read(lambda session: None, COMMIT_SECONDS)
        except IndexUnavailableError as exc:
            shared.close()
            if str(exc) == "rebuilding":  # a timeout, or a lack of descriptors, says nothing about the index
                self._distrusted = seen
            return False
        old, self._c.index, self._obeys = self._c.index, shared, None
        old.close()
        return True
