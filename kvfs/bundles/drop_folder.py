"""The drop folder ``import/``: a bundle that is put there is adopted by one of the processes that have the store open.

What lies there is as untrusted as any bundle, and may be anything: it is opened below the folder's descriptor, no
symlink is followed, and nothing is written, renamed or removed but names in ``import/`` itself.

    import/NAME                    dropped: looked at when it came by a rename, or has not changed for SETTLE_SECONDS
    import/refused/NAME            moved aside, with why in NAME.reason beside it; the latest REFUSED_MAX, bounded bytes
    import/NAME, NAME.reason       refused, and too large to lie in refused/: it may be somebody's only copy, so it
                                   stays, and is judged again when it has changed after its reason was written
    (gone)                         adopted: every page was verified and is in the store

Adopting is ``Importer`` and idempotent: pages that are there already are skipped. So a process may die at any point,
and the next one begins anew; a file is removed only when all of it is stored. It is removed rather than kept, since
what is kept would use space that the store's limit does not know of. One process at a time: the folder itself is
locked, and the lock dies with its owner.

Low priority means small steps with rests in between, not a lower priority of the thread: a thread that the scheduler
holds back while it holds the interpreter's lock, or a segment's, would hold everybody back.
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

from kvfs.bundles.exporter import BundleError, TooLargeError
from kvfs.bundles.importer import Importer, Pace
from kvfs.context import Context
from kvfs.directory.root import Directory
from kvfs.errors import KvfsError
from kvfs.index import ledger
from kvfs.index.ledger import StaleWriterError
from kvfs.system.descriptors import Descriptor, opened
from kvfs.write.active_segments import ActiveSegments, Declined

log = logging.getLogger("kvfs")
FOLDER, REFUSED, REASON = "import", "refused", ".reason"
IN_TRANSIT = (".tmp", ".part", ".partial", "~")  # endings of names of what is still being written
NAMES_MAX = 256  # of the folder that are looked at
ADOPTED = ".adopted-"  # begins the name of a file that is about to be removed
REFUSED_MAX = 16
REFUSED_SHARE = 8  # of the capacity
SETTLE_SECONDS = 2.0
STALE_SECONDS = 600.0  # a file that is not complete, and has not changed for so long, will not become complete
AGAIN_SECONDS, TRIES_MAX = 30.0, 5
WORK_SECONDS, REST_SHARE, REST_SECONDS_MAX = 0.01, 2.0, 0.5  # rests twice as long as it worked
#: What is larger would be worked on without a rest, or held in memory beside an engine.
PACE = Pace(
    batch_bytes=1 << 20, space_seconds=2.0, manifest_bytes_max=1 << 20, members_max=4096, records_max=1 << 18,
    page_bytes_max=64 << 20,
)  # fmt: skip
CHECK_SECONDS_MAX = 60.0  # between two looks at whether a file is complete by now
NAME_BYTES_MAX = 200
JOIN_SECONDS = 10.0
#: What a name that is no readable regular file answers to open; other errors may pass.
_NEVER = (errno.ELOOP, errno.EINVAL, errno.EACCES, errno.EPERM, errno.ENXIO)


class _Seen(NamedTuple):
    """A name of the folder, as it was last seen."""

    version: tuple[int, ...]
    since: float  # it has not changed since then
    not_before: float = 0.0
    tries: int = 0
    left: bool = False  # adopted or refused, but it could not be taken away


class _Stopped(Exception):
    """The store is being closed."""


class DropFolder:
    """Adopts bundles for one process. ``look`` is the keeper's; the work is done in a thread of its own."""

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
        """Begin to adopt, if there is something to adopt and no other process is at it."""
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
        folder = Descriptor.open(self._files, FOLDER, os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._c.directory.root)
        if self._files.flock(folder.fd, fcntl.LOCK_EX):
            return folder
        folder.close()
        return None

    def _ready(self) -> list[str]:
        """Names whose turn it is."""
        now, folder = self._files.monotonic(), self._c.directory.sub(FOLDER)
        before, self._known = self._known, {}
        names = [n for n in self._files.listdir(folder) if not n.startswith(".") and not n.endswith(IN_TRANSIT)]
        for name in sorted(names)[:NAMES_MAX]:
            try:
                st = self._files.stat(name, dir_fd=folder)
            except FileNotFoundError:
                continue
            if stat.S_ISDIR(st.st_mode):  # ``refused``, and folders that nobody looks into
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
            folder = self._c.directory.sub(FOLDER)
            for name in [n for n in self._files.listdir(folder) if n.startswith(ADOPTED)]:
                self._show(folder, name, "")  # whoever hid it was killed; it may be one that nobody has read
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
        """Take in one file, refuse it, or leave it for later."""
        seen, folder = self._known[name], self._c.directory.sub(FOLDER)
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
                    large = ": too much to take beside serving; use kvfs import" * isinstance(exc, TooLargeError)
                    self._refuse(name, f"{exc}{large}")
                else:  # somebody writes to it
                    self._later(name, SETTLE_SECONDS)
            except _Stopped:
                raise
            except (OSError, KvfsError, StaleWriterError, Declined) as exc:
                if seen.tries + 1 >= TRIES_MAX:
                    self._refuse(name, f"tried {TRIES_MAX} times: {exc}")
                else:
                    log.info("%s/%r is tried again later: %s", self._where(), name, exc)
                    self._later(name, AGAIN_SECONDS, tries=seen.tries + 1)
            except Exception:  # a bug: this file must not be tried for ever, and not hold up the others
                self._c.counters.add("import_crashed")
                log.exception("adopting %s/%r crashed", self._where(), name)
                self._refuse(name, "kvfs failed on it; its log says how")

    def _take(self, name: str, fd: int, seen: _Seen) -> None:
        st = self._files.fstat(fd)
        if why := self._distrust(st):
            raise _RefusedError(why)
        limit = ledger.budget(self._c.settings).limit
        if st.st_size > limit:
            raise _RefusedError(f"{st.st_size} bytes: this store holds {limit}; raise its capacity and drop it again")
        self._worked_since = self._files.monotonic()
        importer = Importer(self._c, self._active, partial_=False, pace=PACE._replace(step=self._step))
        if name not in self._renamed and self._files.monotonic() - seen.since < STALE_SECONDS:
            try:
                importer.members(fd, st.st_size)
            except TooLargeError:
                raise
            except BundleError:  # not complete yet
                age = self._files.monotonic() - seen.since
                self._later(name, max(SETTLE_SECONDS, min(CHECK_SECONDS_MAX, 2 * age)))
                return
        done = importer.take(fd)
        self._c.counters.add("bundles_adopted")
        log.info("adopted %s/%r: %d of %d pages are new", self._where(), name, done.stored, done.pages)
        self._renamed.discard(name)
        self._forgive(name)
        try:
            with contextlib.suppress(FileNotFoundError):
                self._take_away(name, seen.version)
        except OSError as exc:
            self._leave(name, exc)

    def _take_away(self, name: str, version: tuple[int, ...]) -> None:
        """Remove what was adopted, and nothing that came under its name meanwhile: what is hidden nobody replaces."""
        folder, hidden = self._c.directory.sub(FOLDER), f"{ADOPTED}{self._files.random(8).hex()}"
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

    def _distrust(self, st: os.stat_result) -> str:
        """Why a file is not taken from its owner; empty if it is. As with the store itself: no access for others."""
        root = self._files.fstat(self._c.directory.root)
        if st.st_mode & 0o002:
            return f"anybody may change it (mode {stat.S_IMODE(st.st_mode):04o}); chmod o-w, and drop it again"
        shared = root.st_mode & 0o070 == 0o070  # then whoever may write to the folder belongs to the store's group
        if not shared and st.st_uid not in (0, os.geteuid(), root.st_uid):
            return f"it belongs to user {st.st_uid}, the store to user {root.st_uid} alone; copy it as that user"
        return ""

    def _step(self) -> None:
        """Between two steps of an import: rest longer than it worked."""
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
        """It stays where it is, and is not looked at again as long as it does not change."""
        self._c.counters.add("import_errors")
        log.warning("%s/%r cannot be taken away: %s", self._where(), name, exc.strerror)
        self._known[name] = self._known[name]._replace(left=True)

    def _where(self) -> str:
        return f"{self._c.directory.path}/{FOLDER}"

    # -- refusing ----------------------------------------------------------------------------

    def _refuse(self, name: str, why: str) -> None:
        self._c.counters.add("bundles_refused")
        log.warning("%s/%r is refused: %s", self._where(), name, why)
        self._renamed.discard(name)
        folder, aside = self._c.directory.sub(FOLDER), _aside(name)
        try:
            with contextlib.closing(self._refused()) as refused:
                st = self._files.stat(name, dir_fd=folder)
                fits = (
                    512 * st.st_blocks + self._kept(refused.fd, aside)
                    <= self._c.settings.capacity_bytes // REFUSED_SHARE
                )
                stays = (
                    "" if fits else f" (it stays in {FOLDER}/, too large for {REFUSED}/: change it, or drop it anew)"
                )
                self._write_reason(refused.fd, aside, f"{name!r}: {why}{stays}\n")
                if fits:
                    self._files.rename(name, aside, src_dir_fd=folder, dst_dir_fd=refused.fd)
                else:
                    self._known[name] = self._known[name]._replace(left=True)
                self._bound(refused.fd)
        except FileNotFoundError:
            pass  # somebody took it back
        except OSError as exc:
            self._leave(name, exc)

    def _was_left(self, name: str, st: os.stat_result) -> bool:
        """Whether a process has refused this very file, and left it where it is."""
        try:
            with contextlib.closing(self._refused(make=False)) as refused:
                reason = self._files.stat(_aside(name) + REASON, dir_fd=refused.fd)
        except OSError:
            return False
        return reason.st_ctime_ns > st.st_ctime_ns

    def _forgive(self, name: str) -> None:
        """What was refused and stayed is adopted: its reason goes."""
        with contextlib.suppress(OSError), contextlib.closing(self._refused(make=False)) as refused:
            names = self._files.listdir(refused.fd)
            if _aside(name) not in names and _aside(name) + REASON in names:
                self._remove(refused.fd, {_aside(name) + REASON})

    def _refused(self, *, make: bool = True) -> Descriptor:
        folder = self._c.directory.sub(FOLDER)
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
        """Bytes of what lies in refused/, but for one name."""
        names = [n for n in self._files.listdir(refused) if n != but]
        return sum(512 * self._files.stat(n, dir_fd=refused).st_blocks for n in names)

    def _bound(self, refused: int) -> None:
        """Keep the latest."""
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
    """(what waits in the folder, what was refused: both names, not checked)."""
    folder, files = directory.sub(FOLDER), directory.files
    names = [n for n in files.listdir(folder) if n != REFUSED]
    refused: list[str] = []
    with contextlib.suppress(OSError), opened(files, REFUSED, os.O_RDONLY | os.O_DIRECTORY, dir_fd=folder) as fd:
        refused = sorted({n.removesuffix(REASON) for n in files.listdir(fd) if not n.startswith(".")})
    return sorted(names), refused


class _RefusedError(Exception):
    """A file that is not even looked into."""


def _aside(name: str) -> str:
    """The name in refused/: the same, or where it is too long or not printable another one, always the same."""
    if len(os.fsencode(name)) <= NAME_BYTES_MAX and name.isprintable():
        return name
    return hashlib.blake2b(os.fsencode(name), digest_size=8).hexdigest()


def _version(st: os.stat_result) -> tuple[int, ...]:
    return st.st_dev, st.st_ino, st.st_size, st.st_mtime_ns, st.st_ctime_ns
