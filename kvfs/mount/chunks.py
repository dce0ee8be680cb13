"""Contents of files as pages of the store: saving, loading, and asking whether all of a file is there.

A page is named by the SHA-256 of its bytes, so equal pages of any files are stored once. All sizes of pages share one
namespace name, FILES, whose quota in kvfs.toml bounds what files take together.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from kvfs.lookup.prefix_match import PrefixMatch
from kvfs.mount import cells
from kvfs.mount.manifest import FILE_BYTES_MAX, PAGE_BYTES, Manifest, Piece
from kvfs.mount.spool import Spool, SpoolFile
from kvfs.namespace import Namespace
from kvfs.pages.layout import PageLayout
from kvfs.store import Store
from kvfs.system.files import Files

FILES = "files"  # name of the namespaces
REVISION = "format-1"
BATCH_PAGES = 128  # of one put: 8 MiB
BATCH_BYTES = BATCH_PAGES * PAGE_BYTES
LOAD_PAGES = 256  # of one lookup, and of one copy or get: 16 MiB
LOAD_BYTES = LOAD_PAGES * PAGE_BYTES
LOADERS = max(2, min(8, (os.cpu_count() or 1) // 2))  # batches copied at once, of all files; each has several threads
LOADED_AHEAD = LOADERS + 1  # batches of one file that are looked up and not copied yet
SAVE_TRIES = 2  # a page that was there may be evicted while the rest is stored
SAVE_SECONDS = 30.0  # longest wait for an index that does not answer, or for pages that another process is writing
FIND_SECONDS = 5.0  # longest wait for an answer whether pages are there: of a busy machine, or during a rebuild
POLL_SECONDS = 0.05
_PAGE_TOKENS = 16  # opaque pages have no tokens; the smallest number that a layout may have

#: What a decline means to a program that writes a file.
_ERRNO = {"space": errno.ENOSPC, "gap": errno.ENOSPC, "read-only": errno.EROFS, "disabled": errno.EROFS}


class ContentGoneError(Exception):
    """Pages of the file are not in the store any more."""


class Chunks:
    """The pages of files in one store. Thread-safe."""

    def __init__(self, store: Store, spool: Spool) -> None:
        self._store = store
        self._spool = spool
        self._clock = Files()
        self._spaces: dict[int, Namespace] = {}
        self._loaders = ThreadPoolExecutor(LOADERS, "kvfs-mount-load")  # its threads start with the first load
        self._local = threading.local()

    def _space(self, page_bytes: int) -> Namespace:
        space = self._spaces.get(page_bytes)
        if space is None:
            layout = PageLayout.opaque(page_bytes, _PAGE_TOKENS)
            space = self._spaces.setdefault(page_bytes, self._store.namespace(FILES, layout, REVISION))
        return space

    # -- saving ------------------------------------------------------------------------------

    def save(self, file: SpoolFile) -> tuple[Manifest, frozenset[bytes]]:
        """Store the content of a file; the ids of the segments that hold it. OSError, ENOSPC if the store cannot hold
        all of it.

        When it returns, every page is published; at sync level "sync" it is on the disk.
        """
        if file.size > FILE_BYTES_MAX:
            raise OSError(errno.EFBIG, f"{file.size} bytes: at most {FILE_BYTES_MAX} fit into a manifest")
        plan = cells.plan(file.size, lambda at, nbytes: os.pread(file.fd, nbytes, at))
        for _ in range(SAVE_TRIES):
            manifest, segments = self._store_all(file, plan)
            segments = segments or self.find(manifest)
            if segments is not None:
                return manifest, segments
        raise OSError(errno.ENOSPC, "the store cannot hold the file next to what else is written")

    def _store_all(self, file: SpoolFile, plan: cells.Plan) -> tuple[Manifest, frozenset[bytes] | None]:
        """The manifest; and the ids of the segments that hold the file, if one lookup has just found all of it."""
        keys: list[bytes] = []
        names: list[bytes] = []
        seen: set[bytes] = set()
        segments: frozenset[bytes] | None = None
        parts = _in_stream_order(plan.pieces)
        for batch, size in _batches(file, parts, plan.whole_pages, plan.last_bytes, plan.last_page):
            names = [hashlib.sha256(batch[at : at + size]).digest() for at in range(0, len(batch), size)]
            segments = self._put(size, names, batch, seen)
            keys += names
        manifest = Manifest(file.size, plan.pieces, tuple(keys), plan.last_bytes, plan.last_page).checked()
        return manifest, segments if len(keys) == len(names) else None

    def _put(self, size: int, names: Sequence[bytes], data: memoryview, seen: set[bytes]) -> frozenset[bytes] | None:
        """Store the pages that are missing; the others count as used. A page that occurs twice is offered once.

        The ids of the segments that hold them, if none was missing. Pages that are there are not offered: a put would
        give them its access time, and eviction would take them and the new ones for one prompt with gaps.
        """
        space = self._space(size)
        with space.match_keys(names) as match:
            if match.chunks == len(names):
                space.touch(match)
                return frozenset(match.segments.values())
        stored = space.present_keys(names) if len(names) > 1 else [False]  # one page: the match has told
        there = [name for name, is_stored in zip(names, stored, strict=True) if is_stored]
        if there:
            with space.match_keys(there) as match:
                space.touch(match)
        seen.update(there)
        fresh = [name not in seen and not seen.add(name) for name in names]  # type: ignore[func-returns-value]
        first = 0
        while first < len(names):
            if not fresh[first]:
                first += 1
                continue
            end = first
            while end < len(names) and fresh[end]:
                end += 1
            self._put_run(size, names[first:end], data[first * size : end * size])
            first = end
        return None

    def _put_run(self, size: int, names: Sequence[bytes], data: memoryview) -> None:
        deadline = self._clock.monotonic() + SAVE_SECONDS
        while True:
            done = self._space(size).put_keys(names, data)
            if done.declined and done.reason != "index":
                raise OSError(_ERRNO.get(done.reason, errno.EIO), f"the store declines: {done.reason}")
            if not done.in_flight and not done.declined:
                return
            if self._clock.monotonic() >= deadline:
                why = "the index does not answer" if done.declined else "another process does not finish writing"
                raise OSError(errno.EIO, f"{len(names)} pages: {why}")
            self._clock.sleep(POLL_SECONDS)

    # -- loading -----------------------------------------------------------------------------

    def close(self) -> None:
        """End the threads that load."""
        self._loaders.shutdown(wait=False, cancel_futures=True)

    def load(self, manifest: Manifest) -> SpoolFile:
        """A copy of a file, every page of it verified. ContentGoneError; OSError EIO if a page is damaged."""
        file = self._spool.create(manifest.size)
        spots = _Spots(manifest.pieces)
        try:
            self._spool.truncate(file, manifest.size)
            if manifest.size > BATCH_BYTES:
                self._clock.fallocate(file.fd, 0, manifest.size)  # once, in place of at each block that is written
            if manifest.size > LOAD_BYTES:
                self._load_all([_Batch(file, spots, *run) for run in _runs(manifest)])
            else:
                for run in _runs(manifest):
                    self._load_batch(_Batch(file, spots, *run), self._match(run[1], run[2]))
        except BaseException:
            self._spool.release(file)
            raise
        return file

    def _load_all(self, batches: Sequence[_Batch]) -> None:
        """Look up one batch after the other, while threads copy those before it: so the disk has no pauses."""
        waiting: list[tuple[Future[None], PrefixMatch]] = []
        try:
            for number, batch in enumerate(batches):
                if number >= LOADED_AHEAD:
                    waiting[number - LOADED_AHEAD][0].result()
                match = self._match(batch.size, batch.keys)
                waiting.append((self._loaders.submit(self._load_batch, batch, match), match))
            for future, _ in waiting:
                future.result()
        finally:
            for future, match in waiting:
                if future.cancel():
                    match.close()
            wait([future for future, _ in waiting])  # none may write to the file after it is released

    def _load_batch(self, batch: _Batch, found: PrefixMatch) -> None:
        """Copy the pages of a match, which it closes, into the file."""
        file, size, keys = batch.file, batch.size, batch.keys
        parts = list(batch.spots.cut(batch.at, min(len(keys) * size, file.size - batch.at)))
        with found as match:
            if self._space(size).copy(match, file.fd, [(begin, end - begin, to) for to, begin, end in parts]):
                return
            buffer = self._buffer()
            loaded = self._space(size).get(match, buffer)
            self._space(size).touch(match)
        if loaded < len(keys):
            raise OSError(errno.EIO, "a page of the file does not verify")
        for offset, begin, end in parts:
            self._spool.write(file, buffer[begin:end], offset)

    def _buffer(self) -> memoryview:
        """Memory for a batch, of the calling thread. Aligned to pages, as reads past the page cache need it."""
        buffer: memoryview | None = getattr(self._local, "buffer", None)
        if buffer is None:
            buffer = self._local.buffer = memoryview(mmap.mmap(-1, LOAD_BYTES))
        return buffer

    def find(self, manifest: Manifest, *, touch: bool = False) -> frozenset[bytes] | None:
        """Ids of the segments that hold a file; None if some of it is missing, OSError EIO if the store does not tell.
        ``touch``: it counts as used."""
        segments: set[bytes] = set()
        for _, size, keys in _runs(manifest):
            try:
                with self._match(size, keys) as match:
                    segments.update(match.segments.values())
                    if touch:
                        self._space(size).touch(match)
            except ContentGoneError:
                return None
        return frozenset(segments)

    def _match(self, size: int, keys: Sequence[bytes]) -> PrefixMatch:
        """The match of all ``keys``. ContentGoneError if one is not there; OSError EIO if the store does not tell.

        A lookup that gets no answer in time is a miss: an engine computes then, but here it would be a lost file.
        """
        deadline = self._clock.monotonic() + FIND_SECONDS
        while True:
            match = self._space(size).match_keys(keys)
            if match.chunks == len(keys):
                return match
            match.close()
            # without a generation the index was silent; if it names all pages, a segment could not be opened in time
            if match.generation and not all(self._space(size).present_keys(keys)):
                raise ContentGoneError
            if self._clock.monotonic() >= deadline:
                raise OSError(errno.EIO, "the index does not answer, or is being rebuilt")
            self._clock.sleep(POLL_SECONDS)

    def is_ready(self) -> bool:
        """Whether the index answers: not while it is being rebuilt."""
        return self._store.wait_ready(0.0)


def _runs(manifest: Manifest) -> Iterator[tuple[int, int, tuple[bytes, ...]]]:
    """(place in the stream, size of a page, keys) of each batch, in stream order."""
    whole = manifest.whole_pages
    for first in range(0, whole, LOAD_PAGES):
        yield first * PAGE_BYTES, PAGE_BYTES, manifest.keys[first : min(whole, first + LOAD_PAGES)]
    if manifest.last_page:
        yield whole * PAGE_BYTES, manifest.last_page, manifest.keys[whole:]


def _in_stream_order(pieces: Sequence[Piece]) -> list[tuple[int, int, int]]:
    """(offset in the stream, offset in the file, bytes) of each piece."""
    found, at = [], 0
    for piece in pieces:
        found.append((piece.at, at, piece.nbytes))
        at += piece.nbytes
    return sorted(found)


class _Spots:
    """Where bytes of the stream belong in the file."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._parts = _in_stream_order(pieces)

    def cut(self, at: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """(offset in the file, begin, end) of the parts of stream bytes [at, at + nbytes), relative to ``at``."""
        for stream, offset, length in self._parts:
            begin, end = max(at, stream), min(at + nbytes, stream + length)
            if begin < end:
                yield offset + begin - stream, begin - at, end - at


class _Batch(NamedTuple):
    """Neighbouring pages of the stream, and the file where they belong."""

    file: SpoolFile
    spots: _Spots
    at: int  # in the stream
    size: int  # of a page
    keys: tuple[bytes, ...]


def _batches(
    file: SpoolFile, parts: Sequence[tuple[int, int, int]], whole: int, last_bytes: int, last_page: int
) -> Iterator[tuple[memoryview, int]]:
    """(whole pages in stream order, their size), BATCH_PAGES at a time, then the last page, filled up with zeros.

    The buffer is used again for the next batch. OSError EIO if the file ends early.
    """
    stream = whole * PAGE_BYTES
    # no more than is needed: zeroing 8 MiB would be most of a small save
    buffer = memoryview(bytearray(min(BATCH_BYTES, max(stream, last_page))))
    for at in [*range(0, stream, BATCH_BYTES), *([stream] if last_page else [])]:
        last = at == stream
        nbytes = last_bytes if last else min(BATCH_BYTES, stream - at)
        for begin, offset, length in parts:
            first, end = max(at, begin), min(at + nbytes, begin + length)
            if first < end:
                _read_exactly(file.fd, buffer[first - at : end - at], offset + first - begin)
        if last:
            buffer[nbytes:last_page] = bytes(last_page - nbytes)
        yield (buffer[:last_page], last_page) if last else (buffer[:nbytes], PAGE_BYTES)


def _read_exactly(fd: int, target: memoryview, offset: int) -> None:
    while target:
        n = os.preadv(fd, [target], offset)
        if not n:
            raise OSError(errno.EIO, "the file ends early")
        target, offset = target[n:], offset + n
