"""Hints that something in the store's directory has changed, from inotify through watchdog.

A hint only makes a background task run before its turn. What is missed (inotify's limits reached, its queue full, no
watchdog) is found when the task polls. So nothing may rely on a hint, and nothing here fails. Names in events are
compared, never opened. One thread, one inotify instance and three watches per store; only watchdog's bindings are used,
since its observer would start five threads and does not survive a fork.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from kvfs.directory.root import DROP_FOLDER, Directory
from kvfs.system.descriptors import Descriptor

log = logging.getLogger("kvfs")
BUFFER_BYTES = 64 * 1024  # of one read of events
REST_SECONDS = 0.01  # between two reads: a storm of events costs little CPU; an overflow of the queue is one hint
STOP_SECONDS = 5.0  # how long a stop waits for the thread
SETTINGS, HOLDS, DROPS = "settings", "holds", "drops"  # names of background tasks
_EVENT = struct.Struct("iIII")  # watch, mask, cookie, length of the name that follows


class Heard(NamedTuple):
    """An event: the task that it concerns, the name ("" if unknown), whether the file arrived by a rename."""

    task: str
    name: str = ""
    renamed: bool = False


class Watch:
    """Owns the inotify instance and thread of one store. ``keep`` starts them, and restarts them if they ended."""

    def __init__(self, directory: Directory, heard: Callable[[Heard], None], *, adopts: bool) -> None:
        self._directory = directory
        self._heard = heard
        self._adopts = adopts
        self._thread: threading.Thread | None = None
        self._stop: Descriptor | None = None
        self.why = "not started yet"  # reason why it does not work

    @property
    def works(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def keep(self) -> None:
        """Start the thread unless it runs. Where that fails, ``why`` says the reason, and polling goes on."""
        if self.works:
            return
        try:
            inotify, tasks = self._open()
            self._stop = Descriptor.owning(self._directory.files, os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        except (ImportError, AttributeError, OSError) as exc:  # no watchdog, another version of it, limits
            if self.why != str(exc):
                log.info("changes are found by polling, not by inotify: %s", exc)
            self.why = str(exc)
            return
        self.why = ""
        self._thread = threading.Thread(
            target=self._listen, args=(inotify, self._stop, tasks), name="kvfs-watch", daemon=True
        )
        self._thread.start()
        for task in tasks.values():  # what changed before the watch began
            self._heard(Heard(task))

    def _open(self) -> tuple[Descriptor, dict[int, str]]:
        """An inotify instance, and the task of each of its watches."""
        from watchdog.observers import inotify_c as library  # imported only when it is needed

        flags: Any = library.InotifyConstants
        fd = library.inotify_init()
        if fd < 0:
            raise OSError(ctypes.get_errno(), "inotify has no instance left (fs.inotify.max_user_instances)")
        inotify = Descriptor.owning(self._directory.files, fd)
        os.set_inheritable(fd, False)
        os.set_blocking(fd, False)
        arrivals = flags.IN_CLOSE_WRITE | flags.IN_MOVED_TO
        folders = [
            (SETTINGS, self._directory.root, arrivals),
            (HOLDS, self._directory.sub("segments"), flags.IN_DELETE | flags.IN_MOVED_FROM),
        ]
        if self._adopts:
            folders.append((DROPS, self._directory.sub(DROP_FOLDER), arrivals))
        tasks: dict[int, str] = {}
        for task, folder, mask in folders:
            # the directory that is open, even if its path has changed
            number = library.inotify_add_watch(fd, b"/proc/self/fd/%d" % folder, mask | flags.IN_ONLYDIR)
            if number < 0:
                code = ctypes.get_errno()
                raise OSError(code, f"inotify cannot watch: {os.strerror(code)} (fs.inotify.max_user_watches)")
            tasks[number] = task
        return inotify, tasks

    def _listen(self, inotify: Descriptor, stop: Descriptor, tasks: dict[int, str]) -> None:
        from watchdog.observers.inotify_c import InotifyConstants as flags

        lost = flags.IN_IGNORED | flags.IN_UNMOUNT
        poller = select.poll()
        poller.register(inotify.fd, select.POLLIN)
        poller.register(stop.fd, select.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if stop.fd in ready or any(event & ~select.POLLIN for event in ready.values()):
                    return
                for number, mask, name in _events(os.read(inotify.fd, BUFFER_BYTES)):
                    if mask & lost:
                        self.why = "a watched directory was removed"  # ``keep`` opens it again
                        return
                    self._tell(tasks.get(number), name, bool(mask & flags.IN_MOVED_TO), tasks)
                self._directory.files.sleep(REST_SECONDS)
        except (OSError, ValueError) as exc:
            self.why = str(exc)
        finally:
            inotify.close()

    def _tell(self, task: str | None, name: str, renamed: bool, tasks: dict[int, str]) -> None:
        if task is None:  # the queue was full: anything may have happened
            for each in tasks.values():
                self._heard(Heard(each))
        elif task != SETTINGS or name == "kvfs.toml":
            self._heard(Heard(task, name, renamed))

    def stop(self) -> None:
        thread, stop = self._thread, self._stop
        self._thread = None
        if thread is None or stop is None:
            return
        if stop.fd >= 0:
            os.eventfd_write(stop.fd, 1)
        if thread is not threading.current_thread():
            thread.join(STOP_SECONDS)
        stop.close()


def probe(directory: Directory) -> str:
    """Why inotify does not work here; empty if it does."""
    try:
        Watch(directory, lambda heard: None, adopts=False)._open()[0].close()
    except (ImportError, AttributeError, OSError) as exc:
        return str(exc)
    return ""


def _events(data: bytes) -> Iterator[tuple[int, int, str]]:
    """(watch, mask, name) of each event of a read."""
    at = 0
    while at + _EVENT.size <= len(data):
        number, mask, _, length = _EVENT.unpack_from(data, at)
        at += _EVENT.size
        yield number, mask, os.fsdecode(data[at : at + length].rstrip(b"\0"))
        at += length
