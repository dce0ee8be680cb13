"""A store that is switched off (``KVFS_DISABLE=1``): every lookup misses, every put declines, no file is touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kvfs.context import Context, living
from kvfs.directory.access_times import AccessTimes
from kvfs.directory.config import make_settings
from kvfs.directory.purge_marks import PurgeMarks
from kvfs.directory.root import Directory
from kvfs.directory.shared_counters import SharedCounters
from kvfs.errors import IndexUnavailableError
from kvfs.index.environment import Index
from kvfs.index.session import Session
from kvfs.runtime.open_store import OpenOptions, OpenStore
from kvfs.segments.open_segments import SegmentFiles
from kvfs.system.files import Files
from kvfs.types import Verify

T = TypeVar("T")
REASON = "disabled"
CAPACITY_BYTES = 1 << 50  # so large that no layout is refused


class _NoDirectory(Directory):
    """A directory without files. The constructor of the base would open one."""

    def __init__(self, path: str, files: Files) -> None:
        self.path, self.files, self.read_only = path, files, True

    def sub(self, name: str) -> int:
        raise FileNotFoundError(f"{self.path}/{name}: kvfs is switched off")


class _NoIndex(Index):
    """An index that always raises IndexUnavailableError. The constructor of the base would start a thread."""

    def __init__(self) -> None:
        self.generation, self.timeouts = "", 0

    def _submit(self, function: Callable[[Session], T], timeout: float, *, write: bool) -> T:
        raise IndexUnavailableError(REASON)


class DisabledStore(OpenStore):
    """An open store without a directory. It is never started."""

    disabled = True
    watching = "off"

    def __init__(self, options: OpenOptions) -> None:
        super().__init__(options)
        directory = _NoDirectory(self.path, options.files)
        self.c = Context(
            directory, options.files, make_settings(CAPACITY_BYTES), bytes(16), _NoIndex(), None,
            AccessTimes(directory), SegmentFiles(directory), PurgeMarks(directory), options.verify or Verify.ALWAYS,
            options.threads or 1, SharedCounters(directory), declines=REASON,
        )  # fmt: skip

    def is_ready(self) -> bool:
        return True  # it answers every lookup, with a miss

    def close(self) -> None:
        for io in living(self.c.attached):
            io.close()
