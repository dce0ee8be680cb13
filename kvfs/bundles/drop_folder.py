"""The drop folder ``import/``: one of the processes that have the store open adopts each bundle that is put there.

Its files are as untrusted as any bundle: they are opened below the folder's descriptor, no symlink is followed, and
only names in ``import/`` itself are written, renamed or removed.

    import/NAME                    dropped: examined if it came by a rename, or has not changed for SETTLE_SECONDS
    import/refused/NAME            refused, with the reason in NAME.reason; the latest REFUSED_MAX, bounded bytes
    import/NAME, NAME.reason       refused, and too large for refused/: it may be the only copy, so it stays, and is
                                   examined again when it has changed after its reason was written
    (removed)                      adopted: every page was verified and is in the store

``Importer`` does the import, which is idempotent: pages that are stored already are skipped. So a process may die at
any point and the next one starts over; a file is removed only when all of it is stored. It is not kept, since it would
use space outside the store's limit. One process imports at a time: it locks the folder itself, and the kernel releases
the lock when the process dies.

Low priority means small steps with pauses in between, not a lower priority of the thread: a thread that the scheduler
delays while it holds the GIL, or a segment's lock, would delay all others.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import stat
import threading
from typing import NamedTuple

from kvfs.bundles.exporter import BundleError, TooLargeError, UnsignedError
from kvfs.bundles.importer import Importer, Pace
from kvfs.context import Context
from kvfs.directory.root import DROP_FOLDER, Directory
from kvfs.errors import KvfsError
from kvfs.index import ledger
from kvfs.index.ledger import StaleWriterError
from kvfs.system.descriptors import Descriptor, opened
from kvfs.write.active_segments import ActiveSegments, Declined

log = logging.getLogger("kvfs")
REFUSED, REASON = "refused", ".reason"
IN_TRANSIT = (".tmp", ".part", ".partial", "~")  # endings of names of files that are still being written
NAMES_MAX = 256  # names of the folder that are examined
NAMES_LOGGED = 8  # namespaces of a bundle in one line of the log
ADOPTED = ".adopted-"  # begins the name of a file that is about to be removed
REFUSED_MAX = 16  # files kept in refused/
REFUSED_SHARE = 8  # and their bytes: one in so many of the capacity
SETTLE_SECONDS = 2.0  # a file that has not changed for so long may be complete
STALE_SECONDS = 600.0  # an incomplete file that has not changed for so long will not become complete
AGAIN_SECONDS, TRIES_MAX = 30.0, 5  # after an error that may pass
WORK_SECONDS, REST_SHARE, REST_SECONDS_MAX = 0.01, 2.0, 0.5  # pauses twice as long as it worked
#: A larger bundle would be worked on without a pause, or held in memory next to an engine.
PACE = Pace(
    batch_bytes=1 << 20, space_seconds=2.0, manifest_bytes_max=1 << 20, members_max=4096, records_max=1 << 18,
    page_bytes_max=64 << 20,
)  # fmt: skip
CHECK_SECONDS_MAX = 60.0  # between two checks whether a file is complete by now
NAME_BYTES_MAX = 200  # of a name in refused/: NAME.reason must fit as well
JOIN_SECONDS = 10.0  # wait for the import thread when the store is closed
#: Errors of open for a name that is not a readable regular file; other errors may pass.
_NEVER = (errno.ELOOP, errno.EINVAL, errno.EACCES, errno.EPERM, errno.ENXIO)


class _Seen(NamedTuple):
    """A file of the folder, as it was last seen. Times are monotonic seconds."""

    version: tuple[int, ...]
    since: float  # it has not changed since then
    not_before: float = 0.0
    tries: int = 0
    left: bool = False  # adopted or refused, but it could not be removed


class _Stopped(Exception):
    """The store is being closed."""


class DropFolder:
    """Adopts bundles for one process. The background scheduler calls ``look``; the import runs in a thread of its own.

    Owns what is known of the folder's names, the folder's lock and that thread; ``Importer`` stores the pages.
    """

    def __init__(self, context: Context, active: ActiveSegments) -> None:
        self._c = context
        self._files = context.files
        self._active = active
        self._known: dict[str, _Seen] = {}
        self._renamed: set[str] = set()
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._worked_since = 0.0

    def arrived(self, name: str) -> None:
        """A file came by a rename, so it is complete."""
        if len(self._renamed) < NAMES_MAX:
            self._renamed.add(name)

    def look(self) -> None:
        """Start the import thread, if there is a bundle to adopt and no other process adopts one."""
        busy = self._thread is not None and self._thread.is_alive()
        if busy or self._stopping.is_set() or self._c.inspect_only or not self._ready():
            return
        lock = self._lock()
        if lock is not None:
            self._thread = threading.Thread(target=self._work, args=(lock,), name="kvfs-import", daemon=True)
            self._thread.start()

    def cancel(self) -> None:
        self._stopping.set()

    def join(self) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(JOIN_SECONDS)

    # -- which -------------------------------------------------------------------------------

    def _lock(self) -> Descriptor | None:
        folder = Descriptor.open(self._files, DROP_FOLDER, os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._c.directory.root)
        if self._files.flock(folder.fd, fcntl.LOCK_EX):
            return folder
        folder.close()
        return None

    def _ready(self) -> list[str]:
        """Names that can be adopted now."""
        now, folder = self._files.monotonic(), self._c.directory.sub(DROP_FOLDER)
        before, self._known = self._known, {}
        names = [n for n in self._files.listdir(folder) if not n.startswith(".") and not n.endswith(IN_TRANSIT)]
        for name in sorted(names)[:NAMES_MAX]:
            try:
                st = self._files.stat(name, dir_fd=folder)
            except FileNotFoundError:
                continue
            if stat.S_ISDIR(st.st_mode):  # ``refused``; other folders are not examined
                continue
            seen = before.get(name)
            if seen is None or seen.version != _version(st):
                seen = _Seen(_version(st), now)
            self._known[name] = seen
        self._renamed &= self._known.keys()
        return [
            name
            for name, seen in self._known.items()
            if not seen.left
            and now >= seen.not_before
            and (name in self._renamed or now - seen.since >= SETTLE_SECONDS)
        ]

    # -- adopting ----------------------------------------------------------------------------

    def _work(self, lock: Descriptor) -> None:
        try:
            folder = self._c.directory.sub(DROP_FOLDER)
            for name in [n for n in self._files.listdir(folder) if n.startswith(ADOPTED)]:
                self._show(folder, name, "")  # the process that hid it was killed; it may not have been read yet
            while not self._stopping.is_set() and (ready := self._ready()):
                self._adopt(ready[0])
        except _Stopped:
            pass
        except OSError as exc:
            self._c.counters.add("import_errors")
            log.warning("%s: %s", self._where(), exc)
        finally:
            lock.close()

    def _adopt(self, name: str) -> None:
        """Import one file, refuse it, or leave it for later."""
        seen, folder = self._known[name], self._c.directory.sub(DROP_FOLDER)
        try:
            file = Descriptor.open(self._files, name, os.O_RDONLY, dir_fd=folder)
        except FileNotFoundError:
            return
        except OSError as exc:
            if exc.errno not in _NEVER:
                raise
            self._refuse(name, f"not a regular file that can be read ({exc.strerror}); copy the bundle itself")
            return
        with contextlib.closing(file):
            st = self._files.fstat(file.fd)
            version = _version(st)
            if version != seen.version:
                self._later(name, 0.0)
                return
            if self._was_left(name, st):
                self._known[name] = seen._replace(left=True)
                return
            try:
                self._take(name, file.fd, seen)
            except (BundleError, _RefusedError) as exc:
                if _version(self._files.fstat(file.fd)) == version:
                    large = ": too much to import while serving; use kvfs import" * isinstance(exc, TooLargeError)
                    self._refuse(name, f"{exc}{large}")
                else:  # it is still being written
                    self._later(name, SETTLE_SECONDS)
            except _Stopped:
                raise
            except (OSError, KvfsError, StaleWriterError, Declined) as exc:
                if seen.tries + 1 >= TRIES_MAX:
                    self._refuse(name, f"tried {TRIES_MAX} times: {exc}")
                else:
                    log.info("%s/%r is tried again later: %s", self._where(), name, exc)
                    self._later(name, AGAIN_SECONDS, tries=seen.tries + 1)
            except Exception:  # a bug: this file must not be tried forever, and must not block the others
                self._c.counters.add("import_crashed")
                log.exception("adopting %s/%r crashed", self._where(), name)
                self._refuse(name, "kvfs failed on it; its log says how")

    def _take(self, name: str, fd: int, seen: _Seen) -> None:
        st = self._files.fstat(fd)
        if why := self._reason_to_distrust(st):
            raise _RefusedError(why)
        limit = ledger.budget(self._c.settings).limit
        if st.st_size > limit:
            raise _RefusedError(f"{st.st_size} bytes: this store holds {limit}; raise its capacity and drop it again")
        self._worked_since = self._files.monotonic()
        importer = Importer(self._c, self._active, partial_=False, pace=PACE._replace(step=self._step))
        if name not in self._renamed and self._files.monotonic() - seen.since < STALE_SECONDS:
            try:
                importer.members(fd, st.st_size)
            except (TooLargeError, UnsignedError):
                raise
            except BundleError:  # not complete yet
                age = self._files.monotonic() - seen.since
                self._later(name, max(SETTLE_SECONDS, min(CHECK_SECONDS_MAX, 2 * age)))
                return
        done = importer.take(fd)
        self._c.counters.add("bundles_adopted")
        names = ", ".join(list(done.namespaces)[:NAMES_LOGGED])
        log.info("adopted %s/%r: %d of %d pages are new, of %s", self._where(), name, done.stored, done.pages, names)
        self._renamed.discard(name)
        self._remove_reason(name)
        try:
            with contextlib.suppress(FileNotFoundError):
                self._remove_adopted(name, seen.version)
        except OSError as exc:
            self._leave(name, exc)

    def _remove_adopted(self, name: str, version: tuple[int, ...]) -> None:
        """Remove an adopted file, but not one that has replaced it meanwhile: it is hidden first, so that no other
        process can replace it."""
        folder, hidden = self._c.directory.sub(DROP_FOLDER), f"{ADOPTED}{self._files.random(8).hex()}"
        if _version(self._files.stat(name, dir_fd=folder)) != version:
            return
        self._files.rename(name, hidden, src_dir_fd=folder, dst_dir_fd=folder)
        try:
            if _version(self._files.stat(hidden, dir_fd=folder))[:-1] == version[:-1]:  # a rename moves the ctime
                self._files.unlink(hidden, dir_fd=folder)
                return
            self._show(folder, hidden, name)
        except OSError:
            self._show(folder, hidden, name)
            self._known[name] = _Seen(_version(self._files.stat(name, dir_fd=folder)), self._files.monotonic())
            raise

    def _show(self, folder: int, hidden: str, name: str) -> None:
        to = hidden[1:] if not name or name in self._files.listdir(folder) else name
        self._files.rename(hidden, to, src_dir_fd=folder, dst_dir_fd=folder)

    def _reason_to_distrust(self, st: os.stat_result) -> str:
        """Why a file is not trusted; empty if it is. As for the store itself: others must have no access."""
        root = self._files.fstat(self._c.directory.root)
        if st.st_mode & 0o002:
            return f"any user may change it (mode {stat.S_IMODE(st.st_mode):04o}); chmod o-w, and drop it again"
        shared = root.st_mode & 0o070 == 0o070  # then all users who may write to the folder are in the store's group
        if not shared and st.st_uid not in (0, os.geteuid(), root.st_uid):
            return f"it belongs to user {st.st_uid}, the store to user {root.st_uid} alone; copy it as that user"
        return ""

    def _step(self) -> None:
        """Between two steps of an import: pause longer than it worked."""
        worked = self._files.monotonic() - self._worked_since
        if worked >= WORK_SECONDS:
            self._stopping.wait(min(REST_SHARE * worked, REST_SECONDS_MAX))
            self._worked_since = self._files.monotonic()
        if self._stopping.is_set():
            raise _Stopped

    def _later(self, name: str, seconds: float, *, tries: int = 0) -> None:
        seen = self._known.get(name)
        if seen is not None:
            now = self._files.monotonic()
            self._known[name] = seen._replace(not_before=now + seconds, tries=tries or seen.tries)
            if not tries:
                self._renamed.discard(name)

    def _leave(self, name: str, exc: OSError) -> None:
        """The file stays where it is, and is not examined again until it changes."""
        self._c.counters.add("import_errors")
        log.warning("%s/%r cannot be removed: %s", self._where(), name, exc.strerror)
        self._known[name] = self._known[name]._replace(left=True)

    def _where(self) -> str:
        return f"{self._c.directory.path}/{DROP_FOLDER}"

    # -- refusing ----------------------------------------------------------------------------

    def _refuse(self, name: str, why: str) -> None:
        self._c.counters.add("bundles_refused")
        log.warning("%s/%r is refused: %s", self._where(), name, why)
        self._renamed.discard(name)
        folder, aside = self._c.directory.sub(DROP_FOLDER), _aside(name)
        try:
            with contextlib.closing(self._refused()) as refused:
                st = self._files.stat(name, dir_fd=folder)
                fits = (
                    512 * st.st_blocks + self._kept(refused.fd, aside)
                    <= self._c.settings.capacity_bytes // REFUSED_SHARE
                )
                stays = (
                    ""
                    if fits
                    else f" (it stays in {DROP_FOLDER}/, too large for {REFUSED}/: change it, or drop it again)"
                )
                self._write_reason(refused.fd, aside, f"{name!r}: {why}{stays}\n")
                if fits:
                    self._files.rename(name, aside, src_dir_fd=folder, dst_dir_fd=refused.fd)
                else:
                    self._known[name] = self._known[name]._replace(left=True)
                self._bound(refused.fd)
        except FileNotFoundError:
            pass  # it was removed from outside
        except OSError as exc:
            self._leave(name, exc)

    def _was_left(self, name: str, st: os.stat_result) -> bool:
        """Whether a process has refused exactly this file and left it where it is."""
        try:
            with contextlib.closing(self._refused(make=False)) as refused:
                reason = self._files.stat(_aside(name) + REASON, dir_fd=refused.fd)
        except OSError:
            return False
        return reason.st_ctime_ns > st.st_ctime_ns

    def _remove_reason(self, name: str) -> None:
        """A file that was refused and stayed is adopted now: remove its reason."""
        with contextlib.suppress(OSError), contextlib.closing(self._refused(make=False)) as refused:
            names = self._files.listdir(refused.fd)
            if _aside(name) not in names and _aside(name) + REASON in names:
                self._remove(refused.fd, {_aside(name) + REASON})

    def _refused(self, *, make: bool = True) -> Descriptor:
        folder = self._c.directory.sub(DROP_FOLDER)
        with contextlib.suppress(FileExistsError):
            if make:
                self._files.mkdir(REFUSED, self._c.directory.dir_mode, dir_fd=folder)
        return Descriptor.open(self._files, REFUSED, os.O_RDONLY | os.O_DIRECTORY, dir_fd=folder)

    def _write_reason(self, refused: int, aside: str, text: str) -> None:
        temporary = f".{self._files.random(8).hex()}"
        with contextlib.closing(
            Descriptor.create(self._files, temporary, self._c.directory.file_mode, dir_fd=refused)
        ) as file:
            self._files.write_all(file.fd, [text.encode("utf-8", "backslashreplace")], 0)
        self._files.rename(temporary, aside + REASON, src_dir_fd=refused, dst_dir_fd=refused)

    def _kept(self, refused: int, but: str) -> int:
        """Bytes of the files in refused/, except one name."""
        names = [n for n in self._files.listdir(refused) if n != but]
        return sum(512 * self._files.stat(n, dir_fd=refused).st_blocks for n in names)

    def _bound(self, refused: int) -> None:
        """Keep the latest REFUSED_MAX files."""
        ages: dict[str, int] = {}
        names: dict[str, set[str]] = {}
        for name in self._files.listdir(refused):
            st = self._files.stat(name, dir_fd=refused)
            if stat.S_ISDIR(st.st_mode):
                continue
            base = name.removesuffix(REASON)
            ages[base] = max(ages.get(base, 0), st.st_ctime_ns)
            names.setdefault(base, set()).add(name)
        for base in sorted(ages, key=lambda b: (ages[b], b), reverse=True)[REFUSED_MAX:]:
            self._remove(refused, names[base])

    def _remove(self, refused: int, names: set[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._files.unlink(name, dir_fd=refused)


def waiting(directory: Directory) -> tuple[list[str], list[str]]:
    """(names of files that wait, names of files that were refused); the files are not checked."""
    folder, files = directory.sub(DROP_FOLDER), directory.files
    names = [n for n in files.listdir(folder) if n != REFUSED]
    refused: list[str] = []
    with contextlib.suppress(OSError), opened(files, REFUSED, os.O_RDONLY | os.O_DIRECTORY, dir_fd=folder) as fd:
        refused = sorted({n.removesuffix(REASON) for n in files.listdir(fd) if not n.startswith(".")})
    return sorted(names), refused


class _RefusedError(Exception):
    """A file that is refused without being read."""


def _aside(name: str) -> str:
    """A file's name in refused/: its own, or a hash of it where that is too long or not printable."""
    if len(os.fsencode(name)) <= NAME_BYTES_MAX and name.isprintable():
        return name
    return hashlib.blake2b(os.fsencode(name), digest_size=8).hexdigest()


def _version(st: os.stat_result) -> tuple[int, ...]:
    return st.st_dev, st.st_ino, st.st_size, st.st_mtime_ns, st.st_ctime_ns
