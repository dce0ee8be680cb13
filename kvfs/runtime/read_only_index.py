"""The index of somebody who may only read: the store's while there is one to trust, else one outside the store.

The latter does not learn of what others store and purge. So the store's takes its place as soon as it may be trusted,
and it is built anew after a purge, or an error of LMDB.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kvfs.context import COMMIT_SECONDS, Context
from kvfs.errors import IndexUnavailableError
from kvfs.index.environment import Index, trust_version

MISSING_SECONDS = 30.0  # until a reader believes that nobody builds the store's index anew


class ReadOnlyIndex:
    """Swaps ``context.index``; calls that use the old one meanwhile are misses. One thread at a time."""

    def __init__(self, context: Context, build: Callable[[], Index]) -> None:
        self._c, self._build = context, build
        self._obeys: tuple[int, ...] | None = None  # version of the purge marks that his own index was built with
        self._distrusted: object = None  # version of the store's index that was not to be trusted
        self._missing_since = math.inf  # the store's index

    def open_own(self) -> None:
        """OSError if none can be built."""
        version = self._c.marks.version()
        old, self._c.index = self._c.index, self._build()
        self._obeys = version  # had it failed, the next turn would try again
        old.close()

    def follow(self) -> None:
        """Look what has become of the store's index. Called every second."""
        if self._obeys is None:
            self._leave_missing()
            return
        seen = trust_version(self._c.directory)
        if seen != self._distrusted and self._go_back(seen):
            return
        if self._obeys != self._c.marks.version() or self._c.index.is_missing(COMMIT_SECONDS):
            self.open_own()

    def _leave_missing(self) -> None:
        """The store's index may have been given up, and nobody builds it anew."""
        now = self._c.files.monotonic()
        if not self._c.index.is_missing(COMMIT_SECONDS):
            self._missing_since = math.inf
        elif now - self._missing_since >= MISSING_SECONDS:
            self.open_own()
        else:
            self._missing_since = min(self._missing_since, now)

    def _go_back(self, seen: object) -> bool:
        """To the store's index, if that may be trusted; ``seen``: its version."""
        shared = Index(self._c.directory, self._c.settings.index_bytes)
        try:
            shared.read(lambda session: None, COMMIT_SECONDS)
        except IndexUnavailableError as exc:
            shared.close()
            if str(exc) == "rebuilding":  # no time, or no descriptor, says nothing about it
                self._distrusted = seen
            return False
        old, self._c.index, self._obeys = self._c.index, shared, None
        old.close()
        return True
