"""Hints that something in the store's directory has changed, from inotify through watchdog.

A hint only makes a task of the keeper run earlier than its turn: whatever is missed (inotify's limits reached, its
queue full, no watchdog) is found when the task polls. So nothing here may be relied on, and nothing here fails.
Names that events carry are looked at, never opened. One thread, one inotify instance and three watches per store;
only watchdog's bindings are used, since its observer would start five threads and does not survive a fork.
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

from kvfs.directory.root import Directory
from kvfs.system.descriptors import Descriptor

log = logging.getLogger("kvfs")
BUFFER_BYTES = 64 * 1024
REST_SECONDS = 0.01  # between two reads: a storm of events costs little, and overflows into one hint
STOP_SECONDS = 5.0
SETTINGS, HOLDS, DROPS = "settings", "holds", "drops"  # tasks
_EVENT = struct.Struct("iIII")  # watch, mask, cookie, length of the name behind it


class Heard(NamedTuple):
    """What happened: the task that it concerns, the name ("" if it is not known), whether it came by a rename."""

    task: str
    name: str = ""
    renamed: bool = False


class Watch:
    """Watches one store for one process. ``keep`` starts it, and starts it again if it ended."""

    def __init__(self, directory: Directory, heard: Callable[[Heard], None], *, adopts: bool) -> None:
        self._directory = directory
        self._heard = heard
        self._adopts = adopts
        self._thread: threading.Thread | None = None
        self._stop: Descriptor | None = None
        self.why = "not started yet"  # why it does not work

    @property
    def works(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def keep(self) -> None:
        """Start watching if nothing watches. Where that cannot be had, ``why`` says so, and polling goes on."""
        if self.works:
            return
        try:
            inotify, tasks = self._open()
            self._stop = Descriptor.owning(self._directory.files, os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        except (ImportError, AttributeError, OSError) as exc:  # no watchdog, another one, another kernel, limits
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
        """An inotify instance, and which task each of its watches concerns."""
        from watchdog.observers import inotify_c as library  # here, so that nobody pays for it before it is needed

        flags: Any = library.InotifyConstants
        fd = library.inotify_init()
        if fd < 0:
            raise OSError(ctypes.get_errno(), "inotify has no instance left (fs.inotify.max_user_instances)")
        inotify = Descriptor.owning(self._directory.files, fd)
        os.set_inheritable(fd, False)
        os.set_blocking(fd, False)
        arrivals = flags.IN_CLOSE_WRITE | flags.IN_MOVED_TO
        wanted = [
            (SETTINGS, self._directory.root, arrivals),
            (HOLDS, self._directory.sub("segments"), flags.IN_DELETE | flags.IN_MOVED_FROM),
        ]
        if self._adopts:
            wanted.append((DROPS, self._directory.sub("import"), arrivals))
        tasks: dict[int, str] = {}
        for task, folder, mask in wanted:
            # the directory that is open, whatever its path leads to by now
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
                        self.why = "a watched directory is gone"  # ``keep`` begins anew
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
