"""Lookups in the index by the compiled library, in the caller's thread."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from kvfs.directory.root import Directory
from kvfs.index.tables import PARTS_MAX
from kvfs.native import library
from kvfs.native.index_walker import HandOverError, IndexWalker, MovedError, PreparedLookup, WalkResult
from kvfs.system.descriptors import Descriptor
from kvfs.system.files import Files


class NativeSession(NamedTuple):
    """What a lookup sees of the index. Unlike Session no transaction, and no gate: each call reads as of one commit.

    Each call raises HandOverError where it would have to wait; the caller then asks the index thread.
    """

    walker: IndexWalker
    generation: str
    now_s: int
    txn: int  # the last commit; calls raise MovedError when there is another one

    @property
    def state(self) -> tuple[object, int]:
        """As ``Session.state``: equal states, equal rows."""
        return self.walker, self.txn

    @property
    def now_state(self) -> tuple[object, int]:
        """``state`` of a session that begins now: as of the last commit of any process."""
        return self.walker, self.walker.last_commit()

    def check_last(self) -> None:
        """MovedError if there was a commit."""
        if self.walker.last_commit() != self.txn:
            raise MovedError("moved")

    def parts(self, digest: bytes, group: int) -> list[bytes]:
        """Packed part shapes that were stored of a group."""
        return self.walker.parts(digest, group, PARTS_MAX, self.txn)

    def keys_there(self, keys: Sequence[bytes]) -> list[bytes]:
        """Keys are looked for by ``GroupLookup.forked``; where that could not do it, the index thread does."""
        raise HandOverError("busy")

    def walk(self, lookup: PreparedLookup, first: int, end: int, rows_max: int, *, stop_at_gap: bool) -> WalkResult:
        return self.walker.walk(lookup, first, end, rows_max, self.now_s, self.txn, stop_at_gap=stop_at_gap)


class NativeIndex:
    """Owns the walker of one generation and its descriptors: CURRENT, and the index file."""

    def __init__(
        self, native: library.Library, directory: Directory, folder: int, generation: str, stamp: tuple[int, ...]
    ) -> None:
        """``folder``: of the generation; ``stamp``: of CURRENT. The exclusive gate is held. May raise OSError."""
        files = directory.files
        self._files, self._generation = files, generation
        current = Descriptor.open(files, "CURRENT", os.O_RDONLY, dir_fd=directory.sub("index"))
        data = Descriptor.open_unstamped(files, "data.mdb", dir_fd=folder)
        self._kept = current, data
        self._walker = IndexWalker(native, current.fd, data.fd, stamp)

    @classmethod
    def open(cls, directory: Directory, folder: int, generation: str, stamp: tuple[int, ...]) -> NativeIndex | None:
        """None where the library is absent or off, or where the files are a test's."""
        native = library.loaded()
        if native is None or type(directory.files) is not Files:
            return None
        try:
            return cls(native, directory, folder, generation, stamp)
        except OSError:
            return None

    def session(self) -> NativeSession | None:
        """None where the last commit cannot be read without waiting."""
        walker = self._walker
        try:
            txn = walker.last_txn or walker.last_commit()
        except HandOverError:
            return None
        return NativeSession(walker, self._generation, self._files.now_us() // 1_000_000, txn)

    def close(self) -> None:
        """Sessions in use hand over from now on. In a forked child, too."""
        self._walker.close()
        for file in self._kept:
            file.close()
