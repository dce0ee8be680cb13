"""Generations of the index: which one is current, and transactions on it.

``index/<generation>/`` holds an LMDB environment and a file ``users``, on which every process that may change
this generation holds a shared flock. ``index/CURRENT`` names the generation; ``trust.py`` decides whether it may be
trusted. It is marked as dirty durably before the first commit. One that may not be trusted is removed, and calls raise
IndexUnavailableError("rebuilding") until ``install`` makes a new one current.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import lmdb

from kvfs.directory.root import Directory
from kvfs.errors import IndexUnavailableError
from kvfs.index.gate import Gate
from kvfs.index.lmdb_files import (
    begin,
    check_size,
    discard_generation,
    extend_to_last_page,
    keep_slack,
    open_environment,
    open_tables,
)
from kvfs.index.native_session import NativeIndex, NativeSession
from kvfs.index.session import Session, Tables
from kvfs.index.trust import State, checksum_of, file_version, read_state, trusted_state, write_state
from kvfs.native import library
from kvfs.system.descriptors import Descriptor, opened
from kvfs.system.files import SHORT_OF, boot_id
from kvfs.system.worker import Worker

T = TypeVar("T")
PROBE_SECONDS = 0.1  # between two probes of an open breaker, and how long one waits for the shared gate
PROBE_WRITE_SECONDS = 0.005  # for the exclusive one: readers wait for the probe meanwhile
FULL = 0.85  # share of the map above which nothing is inserted: deleting needs free pages as well
READ_AHEAD_BYTES_MAX = 1 << 30
ROWS_PER_HOLD = 512  # of the small tables: 2 ms on a slow core
_NAME = re.compile(rb"[0-9a-f]{16}\Z")
_OWN_ERRORS = (*SHORT_OF, errno.EACCES, errno.EPERM)  # of this process: another one may be able to open the index


class Index:
    """Owns the LMDB environment of one open store, its generation and its breaker; delegates locking to ``Gate``.

    All methods may be called from any thread; one worker thread does the work. ``read`` and ``write`` run a callable
    with a :class:`Session`, in a transaction under the gate; an exception of the callable aborts the transaction and
    is raised to the caller. They raise IndexUnavailableError if the answer does not come in time.
    """

    _native: NativeIndex | None = None  # of the open generation, for lookups in the caller's thread

    def __init__(self, directory: Directory, map_size: int, *, private: bool = False) -> None:
        self._directory = directory
        self._files = directory.files
        self._map_size = map_size
        self._private = private  # an index outside the store, which only this process uses
        self._read_only = directory.read_only and not private
        self._boot = boot_id(self._files)
        self._gate = Gate(directory)
        self._worker = Worker("kvfs-index")
        self._env: lmdb.Environment | None = None
        self._tables: Tables | None = None
        self._users = self._data = Descriptor(self._files)
        self._current: tuple[int, ...] | None = None
        self._refused: set[bool] = set()  # the breaker: False: reads fail at once, True: writes
        self._probing = False
        self._probe_at = 0.0
        self._closed = False
        self._paused = False  # the index thread waits for the end of a fork
        self._in_lmdb = False  # a thread is inside LMDB, with its locks
        self.generation = ""
        self.timeouts = 0
        self.errors = 0

    # -- transactions ------------------------------------------------------------------------

    def read(self, function: Callable[[Session], T], timeout: float) -> T:
        return self._submit(function, timeout, write=False)

    def write(self, function: Callable[[Session], T], timeout: float) -> T:
        return self._submit(function, timeout, write=True)

    def slices(
        self, look: Callable[[Session, bytes, int], tuple[list[T], bytes | None]], timeout: float
    ) -> Iterator[T]:
        """All that ``look`` finds, in reads of at most ROWS_PER_HOLD rows: a writer waits for one of them only.

        ``look(session, after, rows_max)`` returns what it found and the key to continue after, None at the end.
        ``timeout``: of each read.
        """
        after: bytes | None = b""
        while after is not None:
            found, after = self.read(partial(_slice, look, after), timeout)
            yield from found

    def native_session(self) -> NativeSession | None:
        """For a lookup in the caller's thread; None where only the index thread can do it."""
        native = self._native
        if native is None or self._closed or library.loaded() is None:
            return None
        return native.session()

    def is_missing(self, timeout: float) -> bool:
        """Whether no generation may be trusted; False if that cannot be told in time."""
        try:
            self.read(lambda session: None, timeout)
        except IndexUnavailableError as exc:
            return str(exc) == "rebuilding"
        return False

    def _submit(self, function: Callable[[Session], T], timeout: float, *, write: bool) -> T:
        if self._closed:
            raise IndexUnavailableError("closed")
        now = self._files.monotonic()
        if write in self._refused:
            self._probe()
            raise IndexUnavailableError("timeout")
        try:
            result = self._worker.call(lambda: self._transact(function, now + timeout, write), timeout)
        except TimeoutError:  # the index thread hangs
            self._trip(write=False)
            raise IndexUnavailableError("timeout") from None
        except IndexUnavailableError as exc:
            if str(exc) == "timeout":
                self._trip(write=write)
            raise
        except OSError as exc:
            self.errors += 1
            raise IndexUnavailableError(f"index error: {exc.strerror}") from None
        return result

    def _trip(self, *, write: bool) -> None:
        """Open the breaker. A process that stops as a reader hinders writers only. A read-only store does not write."""
        self.timeouts += 1
        self._refused |= {write} if self._read_only else {write, True}
        self._probe()

    def _probe(self) -> None:
        """Let the index thread find out whether the index answers again. No caller waits for that."""
        if self._probing or self._files.monotonic() < self._probe_at:
            return
        self._probing = True

        def probe() -> None:
            try:
                for write in sorted(self._refused):
                    seconds = PROBE_WRITE_SECONDS if write else PROBE_SECONDS
                    self._transact(lambda session: None, self._files.monotonic() + seconds, write)
                    self._refused.discard(write)
            except Exception as exc:
                if str(exc) != "timeout":  # any other answer is one
                    self._refused.clear()
            finally:
                self._probe_at = self._files.monotonic() + PROBE_SECONDS
                self._probing = False

        self._worker.submit(probe)

    def _transact(self, function: Callable[[Session], T], deadline: float, write: bool) -> T:
        if not self._private:
            self._gate.acquire(exclusive=write, deadline=deadline)
        try:
            if not self._private and not self._is_current():
                if not write:
                    self._gate.release()
                    self._gate.acquire(exclusive=True, deadline=deadline)
                self._open_current()
            return self._in_transaction(function, write)
        finally:
            if not self._private and self._gate.held:
                self._gate.release()

    def _in_transaction(self, function: Callable[[Session], T], write: bool) -> T:
        if self._env is None or self._tables is None:  # a private index, closed meanwhile or retired after an error
            raise IndexUnavailableError("closed" if self._closed else "rebuilding")
        now_s = self._files.now_us() // 1_000_000
        self._in_lmdb = True
        try:
            check_size(self._env, self._files, self._data.fd)
            with begin(self._env, write=write) as txn:
                result = function(Session(txn, self._tables, self.generation, now_s))
            if write:
                with contextlib.suppress(OSError):  # it is committed
                    extend_to_last_page(self._env, self._files, self._data.fd)
            return result
        except lmdb.MapFullError:
            raise IndexUnavailableError("index full") from None
        except lmdb.Error as exc:
            self.errors += 1
            self._retire(write)
            raise IndexUnavailableError(f"index error: {exc}") from None
        finally:
            self._in_lmdb = False

    # -- generations -------------------------------------------------------------------------

    def _is_current(self) -> bool:
        return self._env is not None and self._current == self._stat_current()

    def _stat_current(self) -> tuple[int, ...] | None:
        return file_version(self._directory, "CURRENT", self._directory.sub("index"))

    def _open_current(self) -> None:
        """Open the current generation; the exclusive gate is held."""
        if self._closed:
            self._close_environment()
            raise IndexUnavailableError("closed")
        current = self._stat_current()
        name = self._read_current()
        if current is None or name is None:
            self._close_environment()
            raise IndexUnavailableError("rebuilding")
        index = self._directory.sub("index")
        try:
            folder = self._files.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=index)
        except OSError as exc:
            self._close_environment()
            raise self._open_error(name, exc) from None
        try:
            self._close_native()  # it compares CURRENT as well
            if not self._has_open(folder, name):
                self._close_environment()
                self._open_in(folder, name)
            self._native = NativeIndex.open(self._directory, folder, name, current)
        except (OSError, lmdb.Error) as exc:
            self._close_environment()
            raise self._open_error(name, exc) from None
        finally:
            self._files.close(folder)
        self._current, self.generation = current, name

    def _has_open(self, folder: int, name: str) -> bool:
        """Whether this process has the generation open already: then only the mode or the owner of CURRENT has changed,
        or its content was written again. Opened again, it would be a dirty index without another user."""
        if self._env is None or name != self.generation:
            return False
        mine, there = self._files.fstat(self._data.fd), self._files.stat("data.mdb", dir_fd=folder)
        return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)

    def _open_error(self, name: str, exc: Exception) -> IndexUnavailableError:
        """What to raise. Discards the generation, unless only this process cannot open it: others may be using it."""
        own = "already open in this process" in str(exc)
        if own or getattr(exc, "errno", getattr(exc, "code", None)) in _OWN_ERRORS:
            return IndexUnavailableError(f"index error: {exc}")
        self._discard_current(name)
        return IndexUnavailableError("rebuilding")

    def _open_in(self, folder: int, name: str) -> None:
        self._users = Descriptor.open(self._files, "users", os.O_RDONLY, dir_fd=folder)
        alone = self._files.flock(self._users.fd, fcntl.LOCK_EX)
        flags = os.O_RDONLY if self._read_only else os.O_RDWR
        self._data = Descriptor.open(self._files, "data.mdb", flags, dir_fd=folder)
        data = self._files.fstat(self._data.fd)
        state = trusted_state(self._directory, name, self._data.fd, alone=alone, boot=self._boot)
        if self._read_only and state.clean and state.checksum not in ("", checksum_of(self._files, self._data.fd)):
            raise OSError("the index was damaged after it was closed")  # a damaged page number would be a SIGBUS
        if self._read_only:  # not a user: the last writer must find itself alone to leave the index clean
            self._files.flock(self._users.fd, fcntl.LOCK_UN)
        elif not self._files.flock(self._users.fd, fcntl.LOCK_SH):
            raise OSError("the users file is locked by a process that does not hold the gate")
        if not self._read_only and (state.clean or alone):
            write_state(self._directory, State(name, self._boot, data.st_dev, data.st_ino, clean=False))
        self._open_data()

    def _open_data(self) -> None:
        self._env = open_environment(self._data.fd, self._map_size, read_only=self._read_only)
        check_size(self._env, self._files, self._data.fd)
        self._tables = open_tables(self._env, create=False)

    def _read_current(self) -> str | None:
        try:
            data = self._directory.read_small("CURRENT", 64, sub="index")
        except Exception as exc:
            if getattr(exc, "errno", None) in SHORT_OF:
                raise
            return None
        return data.decode() if data is not None and _NAME.match(data) else None

    def _discard_current(self, name: str) -> None:
        """Remove CURRENT and the generation ``name``, which must not be trusted. The exclusive gate is held."""
        if self._read_only:
            return
        with contextlib.suppress(OSError):
            self._directory.remove("CURRENT", sub="index")
        discard_generation(self._files, self._directory.sub("index"), name)

    def _retire(self, exclusive: bool) -> None:
        """Discard the generation after an LMDB error: no process may use it again."""
        name = self.generation
        self._close_environment()
        if not exclusive and not self._private:
            with contextlib.suppress(IndexUnavailableError):
                self._gate.release()
                self._gate.acquire(exclusive=True, deadline=self._files.monotonic() + PROBE_SECONDS)
        if not self._private and self._gate.held and self._read_current() == name:
            self._discard_current(name)

    def install(self, name: str, timeout: float) -> None:
        """Make a new generation current, which is complete and closed in ``index/<name>``."""

        def swap() -> None:
            self._gate.acquire(exclusive=True, deadline=self._files.monotonic() + timeout)
            try:
                self._refuse_if_current()
                old = self._read_current()
                index = self._directory.sub("index")
                with opened(self._files, name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=index) as folder:
                    data = self._files.stat("data.mdb", dir_fd=folder)
                # complete and synced: the first process that opens it under the gate marks it dirty
                write_state(self._directory, State(name, self._boot, data.st_dev, data.st_ino, clean=True))
                self._directory.write_small("CURRENT", name.encode(), sub="index")
                if old is not None and old != name:
                    discard_generation(self._files, index, old)
                self._open_current()
            finally:
                self._gate.release()

        self._worker.call(swap, timeout)

    def _refuse_if_current(self) -> None:
        """Raise if a trusted generation is current: it names pages that were published since the rebuild began."""
        if self._closed:
            raise IndexUnavailableError("closed")
        if not self._is_current():
            try:
                self._open_current()
            except IndexUnavailableError:
                return
        raise IndexUnavailableError("another generation is current")

    def retire(self, timeout: float = 5.0) -> None:
        """Discard the current generation, which contradicts the segments. Lookups miss until it is rebuilt."""

        def discard() -> None:
            self._gate.acquire(exclusive=True, deadline=self._files.monotonic() + timeout)
            try:
                name = self._read_current()
                self._close_environment()
                if name is not None:
                    self._discard_current(name)
            finally:
                self._gate.release()

        self._worker.call(discard, timeout)

    def open_private(self, fd: int) -> None:
        """Open the private generation in the file ``fd``, for a reader that may not write the store."""
        assert self._private

        def do() -> None:
            self._data = Descriptor.reopen(self._files, fd, os.O_RDWR)
            self._open_data()
            self.generation = f"private-{self._files.random(4).hex()}"  # unique: numbers mean other segments in another

        self._worker.call(do, 5.0)

    # -- upkeep ------------------------------------------------------------------------------

    @property
    def map_size(self) -> int:
        return self._map_size

    def read_ahead(self) -> None:
        """Ask the kernel to read the whole index ahead, before a walk: its pages are in no order on the disk."""
        if self.generation and not self._private:
            index, flags = self._directory.sub("index"), os.O_RDONLY
            with (
                contextlib.suppress(OSError),
                opened(self._files, self.generation, flags | os.O_DIRECTORY, dir_fd=index) as folder,
                opened(self._files, "data.mdb", flags, dir_fd=folder) as fd,
            ):
                self._files.readahead(fd, 0, min(self._files.fstat(fd).st_size, READ_AHEAD_BYTES_MAX))

    def keep_slack(self) -> None:
        """Allocate blocks ahead of the index file's end, so that eviction can commit on a full disk."""
        if self.generation and not self._read_only and not self._private:
            with contextlib.suppress(OSError):
                keep_slack(self._directory, self.generation, self._map_size)

    def _close_environment(self) -> None:
        self._close_native()
        env, self._env, self._tables, self._current = self._env, None, None, None
        if env is not None:
            env.close()
        self._users.close()
        self._data.close()

    def _close_native(self) -> None:
        native, self._native = self._native, None
        if native is not None:
            native.close()

    def close(self, timeout: float = 5.0) -> None:
        """Close; the last user leaves the index clean, so that the next one does not have to rebuild it."""
        self._closed = True
        patience = timeout
        try:
            self._worker.call(lambda: self._close_clean(timeout), timeout)
        except TimeoutError:  # the index thread hangs
            patience = 0.0
        except (IndexUnavailableError, OSError, lmdb.Error):
            pass
        self._worker.stop(patience)
        self._gate.close()

    def _close_clean(self, timeout: float) -> None:
        if self._private or self._env is None or self._read_only:
            self._close_environment()
            return
        try:
            self._gate.acquire(exclusive=True, deadline=self._files.monotonic() + timeout)
            state = read_state(self._directory)
            if self._is_current() and state is not None and self._files.flock(self._users.fd, fcntl.LOCK_EX):
                check_size(self._env, self._files, self._data.fd)
                self._env.sync(True)
                checksum = checksum_of(self._files, self._data.fd)
                self._close_environment()
                write_state(self._directory, state._replace(clean=True, checksum=checksum))
        finally:
            self._close_environment()
            if self._gate.held:
                self._gate.release()

    def abandon(self) -> None:
        """In a forked child: close inherited descriptors without unlocking what the parent holds."""
        self._close_native()
        env, self._env = self._env, None
        if env is not None and (self._paused or not self._in_lmdb):
            with contextlib.suppress(Exception):
                env.close()
        elif env is not None:  # LMDB's locks may be held by a thread that only the parent has: never closed, nor freed
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(env))
        self._gate.close()  # the child has closed all inherited Descriptors already

    def quiesce(self, timeout: float) -> Callable[[], None]:
        """Before a fork: wait until the index thread is between requests; call the result after the fork."""
        import threading

        reached, resume = threading.Event(), threading.Event()

        def pause() -> None:
            self._paused = True
            reached.set()
            resume.wait(timeout)
            self._paused = False

        threading.Thread(target=self._try_call, args=(pause, timeout), name="kvfs-quiesce", daemon=True).start()
        reached.wait(timeout)
        return resume.set

    def _try_call(self, function: Callable[[], Any], timeout: float) -> None:
        with contextlib.suppress(TimeoutError):
            self._worker.call(function, timeout)


def _slice(
    look: Callable[[Session, bytes, int], tuple[list[T], bytes | None]], after: bytes, session: Session
) -> tuple[list[T], bytes | None]:
    return look(session, after, ROWS_PER_HOLD)
