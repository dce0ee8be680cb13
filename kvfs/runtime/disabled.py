"""A store that is switched off (``KVFS_DISABLE=1``): every lookup misses, every put declines, no file is touched."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar

from kvfs.context import Context, living
from kvfs.directory.access_times import AccessTimes
from kvfs.directory.config import make_settings
from kvfs.directory.liveness import NOBODY, Liveness
from kvfs.directory.purge_marks import PurgeMarks
from kvfs.directory.root import Directory
from kvfs.directory.shared_counters import SharedCounters
from kvfs.errors import IndexUnavailableError
from kvfs.index.environment import Index
from kvfs.index.session import Session
from kvfs.runtime.open_store import OpenStore
from kvfs.segments.open_segments import SegmentFiles
from kvfs.system.files import Files
from kvfs.types import Verify

T = TypeVar("T")
REASON = "disabled"


class _NoDirectory(Directory):
    """Nothing is there."""

    def __init__(self, path: str, files: Files) -> None:
        self.path, self.files, self.read_only, self.root = path, files, True, -1
        self.file_mode, self.dir_mode = 0o600, 0o700

    def sub(self, name: str) -> int:
        raise FileNotFoundError(f"{self.path}/{name}: kvfs is switched off")

    def close(self) -> None:
        pass


class _NoIndex(Index):
    """Never answers."""

    def __init__(self) -> None:
        self.generation, self.timeouts, self.errors = "", 0, 0

    def _submit(self, function: Callable[[Session], T], timeout: float, *, write: bool) -> T:
        raise IndexUnavailableError(REASON)


class _NoLiveness(Liveness):
    """A process that is no part of any store."""

    def __init__(self) -> None:
        self.owner = NOBODY


class DisabledStore(OpenStore):
    """What a ``Store`` needs, without a directory. Limits are so large that no layout is refused."""

    disabled = True
    watching = "off"

    def __init__(self, path: str, verify: Verify | None, threads: int | None, files: Files) -> None:
        self.path, self.read_only, self.users, self.rebuilt = os.path.abspath(path), False, 1, None
        self.abandoned = []
        directory = _NoDirectory(self.path, files)
        self.c = Context(
            directory, files, make_settings(1 << 50), bytes(16), _NoIndex(), _NoLiveness(), AccessTimes(directory),
            SegmentFiles(directory), PurgeMarks(directory), verify or Verify.ALWAYS, threads or 1,
            SharedCounters(directory), declines=REASON,
        )  # fmt: skip
        self._services, self._background, self._making = None, None, threading.Lock()

    def is_ready(self) -> bool:
        return True  # misses are all that it will ever answer

    def close(self) -> None:
        for io in living(self.c.attached):
            io.close()
