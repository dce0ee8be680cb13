"""Purge marks: ``purged/<segment id>`` names the records of a segment that no index may name again.

A mark is durable before a purge reports success, every rebuild obeys it, and it is removed with its segment: there are
never more marks than segments. It names records by ordinal and epoch. So no clock decides, a record that a later owner
writes in the same place is not covered, and the mark says nothing about tenant or prompt.
"""

from __future__ import annotations

import contextlib
import re

from kvfs.directory.root import Directory
from kvfs.errors import FormatError
from kvfs.format import segment as fmt
from kvfs.format.segment import PurgeMark
from kvfs.system.files import SHORT_OF

MARK_BYTES_MAX = 1 << 20  # of one file: a bit per record, of 8 million records
_FOLDER = "purged"
_NAME = re.compile(r"[0-9a-f]{32}\Z")


class PurgeMarks:
    """The purge marks of a store. Raises OSError unchanged, unless a method says otherwise."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._files = directory.files

    def ids(self) -> set[bytes]:
        """Segments that have a mark."""
        try:
            names = self._files.listdir(self._directory.sub(_FOLDER))
        except FileNotFoundError:  # a store of an earlier version, opened read-only
            return set()
        return {bytes.fromhex(name) for name in names if _NAME.match(name)}

    def version(self) -> tuple[int, ...]:
        """Changes when any mark does."""
        try:
            st = self._files.fstat(self._directory.sub(_FOLDER))
        except FileNotFoundError:
            return ()
        return st.st_dev, st.st_ino, st.st_mtime_ns

    def has(self, segment_id: bytes) -> bool:
        try:
            self._files.stat(segment_id.hex(), dir_fd=self._directory.sub(_FOLDER))
        except FileNotFoundError:
            return False
        except OSError:
            return True  # unknown: nothing is served on a doubt
        return True

    def read(self, segment_id: bytes) -> PurgeMark | None:
        """The mark of a segment. One that cannot be parsed covers everything: an unneeded miss does no harm.

        OSError if this process lacks descriptors or memory: a purge must not take that for a mark, nor drop anything.
        """
        try:
            data = self._directory.read_small(segment_id.hex(), MARK_BYTES_MAX, sub=_FOLDER)
        except FileNotFoundError:
            return None
        except (FormatError, OSError) as exc:
            if getattr(exc, "errno", None) in SHORT_OF:
                raise
            data = b""
        if data is None:
            return None
        mark = fmt.parse_purge_mark(data)
        if mark is None or mark.segment_id != segment_id:
            return PurgeMark(segment_id, fmt.PURGE_ALL | fmt.PURGE_PENDING, 0, b"")
        return mark

    def write(self, mark: PurgeMark) -> None:
        """Replace a segment's mark. It is durable after ``sync``."""
        data = fmt.pack_purge_mark(mark)
        self._directory.write_small(mark.segment_id.hex(), data, sub=_FOLDER, sync_folder=False)

    def sync(self) -> None:
        self._files.fsync(self._directory.sub(_FOLDER))

    def settle(self, mark: PurgeMark) -> None:
        """No index row names the purged records any more. If this is lost, the index is searched once more."""
        data = fmt.pack_purge_mark(mark._replace(flags=mark.flags & ~fmt.PURGE_PENDING))
        with contextlib.suppress(OSError):
            self._directory.write_small(mark.segment_id.hex(), data, sub=_FOLDER, sync_folder=False)

    def sweep(self) -> None:
        """Remove what a process left when it died while it wrote a mark. No process may be writing one now."""
        with contextlib.suppress(OSError):
            for name in self._files.listdir(self._directory.sub(_FOLDER)):
                if name.startswith("."):
                    self._directory.remove(name, sub=_FOLDER)

    def forget(self, segment_id: bytes) -> None:
        """The segment is reclaimed."""
        with contextlib.suppress(OSError):
            self._directory.remove(segment_id.hex(), sub=_FOLDER)
