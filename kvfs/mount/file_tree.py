"""What the files of one mount share: names, pages, the spool, and which files have drafts.

The content of a file changes when a writer closes it (or syncs it), as a whole or not at all: until then it is a
*draft*, an unnamed file of the spool. A file that is read is copied there first, verified page by page, and the kernel
serves the copy by itself; the copy outlives eviction.
"""

from __future__ import annotations

import itertools
import logging
import os
import stat
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager

from kvfs.mount.chunks import Chunks
from kvfs.mount.names import Found, Names
from kvfs.mount.node import Node, OpenFile
from kvfs.mount.spool import Spool, SpoolFile
from kvfs.mount.wire import Attr, SetAttr
from kvfs.system.files import Files

SWEEP_SECONDS = 60.0
log = logging.getLogger("kvfs.mount")

#: Tells the table that a node's content changed, or that it has a successor.
RenameKey = Callable[[Node, Hashable], None]


class Draft:
    """What is being written to a file. The flock on ``name_fd`` shows the sweep that its writer lives."""

    def __init__(self, file: SpoolFile, name_fd: int) -> None:
        self.file = file
        self.name_fd = name_fd
        self.writers: dict[OpenFile, bool] = {}  # whether a descriptor of it was closed since it was opened or wrote
        self.dirty = False
        self.error = 0  # errno of the first failure: then it is never stored

    @property
    def is_settled(self) -> bool:
        """Whether it is stored, and its writers seem to be closed: the kernel tells that later, if at all."""
        return not self.dirty and not self.error and all(self.writers.values())


class Place(ABC):
    """A directory, where the name of a file was seen."""

    @abstractmethod
    def opened(self) -> AbstractContextManager[int]:
        """Its descriptor; ESTALE if its name means another directory now."""


class Spot:
    """Where the name of an inode was seen last."""

    def __init__(self, place: Place, name: bytes) -> None:
        self.place, self.name = place, name


class FileTree:
    """The files of one mount. Owns which files have drafts and where names were seen last; bytes are of ``Chunks``."""

    def __init__(self, names: Names, chunks: Chunks, spool: Spool) -> None:
        self.names = names
        self.chunks = chunks
        self.spool = spool
        self.clock = Files()
        self.lock = threading.RLock()  # changes of names, and the tables below
        self.drafts: dict[int, NamedNode] = {}  # files that have one, by inode
        #: Where an inode was seen last. All nodes of the inode refer to the one entry; it goes with the last of them.
        self.spots: weakref.WeakValueDictionary[int, Spot] = weakref.WeakValueDictionary()
        self.unique = itertools.count()
        self.rename_key: RenameKey = lambda node, key: setattr(node, "key", key)
        self._stop = threading.Event()
        self._sweeper: threading.Thread | None = None

    def seen(self, ino: int, place: Place, name: bytes) -> Spot:
        """The spot of an inode whose name was seen."""
        with self.lock:
            spot = self.spots.get(ino)
            if spot is None:
                spot = self.spots[ino] = Spot(place, name)
            spot.place, spot.name = place, name
            return spot

    def start_sweeps(self) -> None:
        self._sweeper = threading.Thread(target=self._sweep, name="kvfs-mount-sweep", daemon=True)
        self._sweeper.start()

    def _sweep(self) -> None:
        suspects: set[Found] = set()
        while True:
            try:
                suspects = self.names.sweep(suspects, self._stop.is_set)
            except Exception:
                log.exception("a sweep of the names failed")
            if self._stop.wait(SWEEP_SECONDS):
                return

    def close(self) -> None:
        self._stop.set()
        if self._sweeper is not None:
            self._sweeper.join(SWEEP_SECONDS)
        self.chunks.close()
        self.names.close()
        self.spool.close()


class NamedNode(Node):
    """What files and directories below files/ have in common: an inode in the tree of names."""

    def __init__(self, tree: FileTree, key: Hashable, ino: int) -> None:
        super().__init__(key)
        self.tree = tree
        self.ino = ino
        #: What the lookup that made this node has just seen: its reply needs no second look.
        self.looked: os.stat_result | None = None

    def _change(self, change: SetAttr, fd: int) -> None:
        """Apply mode, owner and times to a descriptor."""
        st = os.fstat(fd)
        if change.mode is not None:
            keep = 0o700 if stat.S_ISDIR(st.st_mode) else 0o600  # the mount itself must be able to open it
            os.fchmod(fd, change.mode & 0o777 | keep)
        uid = st.st_uid if change.uid is None else change.uid
        gid = st.st_gid if change.gid is None else change.gid
        if (uid, gid) != (st.st_uid, st.st_gid):
            os.fchown(fd, uid, gid)
        if change.atime_ns is not None or change.mtime_ns is not None:
            at = st.st_atime_ns if change.atime_ns is None else change.atime_ns
            os.utime(fd, ns=(at, st.st_mtime_ns if change.mtime_ns is None else change.mtime_ns))


def attr_of(st: os.stat_result) -> Attr:
    return Attr(
        st.st_ino, st.st_mode, st.st_size, st.st_nlink, st.st_uid, st.st_gid, st.st_mtime_ns, st.st_atime_ns,
        st.st_ctime_ns,
    )  # fmt: skip
