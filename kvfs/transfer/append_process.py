"""The append process: a child that appends and publishes what saves have gathered, with an interpreter of its own.

A step of an engine takes a few milliseconds and needs the interpreter. Appends take it for a tenth of a millisecond at
a time, hundreds of times per GiB, on several threads: with them in the engine's process one step in a hundred takes
twice as long (decision 0025). The child maps the staging ring, opens the store as any other process does, and serves
one connection for each write lane. It outlives an engine that is killed, until the requests that it has are stored.

Without it, or once it has died, appends run in this process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection

from kvfs.context import Context
from kvfs.directory.shared_counters import NAMESPACE_COUNTS
from kvfs.system import child_process
from kvfs.write.active_segments import RoomWait
from kvfs.write.append_request import AppendReply, pack_request
from kvfs.write.appender import AppendJob, Outcome

log = logging.getLogger("kvfs")
ALIVE_SECONDS = 1.0  # between two looks at whether the process lives, while a reply is due


class AppendProcess:
    """Owns the child and the connections to it. Thread-safe: one request at a time on each lane."""

    def __init__(self, context: Context, descriptor: bytes, ring_fd: int, ring_bytes: int, lanes: int) -> None:
        """OSError if no process can be started."""
        self._c, self._broken, self._closing = context, False, False
        pairs = [socket.socketpair() for _ in range(lanes)]
        self._sockets = [ours for ours, _ in pairs]
        self._connections = [Connection(os.dup(ours.fileno())) for ours in self._sockets]
        self._locks = [threading.Lock() for _ in pairs]  # of the connections
        theirs = [child.fileno() for _, child in pairs]
        setup = {
            "path": context.directory.path, "store": context.store_id.hex(), "descriptor": descriptor.hex(),
            "ring": ring_fd, "ring_bytes": ring_bytes, "lanes": theirs,
        }  # fmt: skip
        try:
            self._process = child_process.start("kvfs.runtime.append_server", setup, [ring_fd, *theirs])
        except BaseException:
            self._close_connections()
            raise
        finally:
            for _, child in pairs:
                child.close()
        _PROCESSES.add(self)

    @property
    def pid(self) -> int:
        return self._process.pid

    def store(self, job: AppendJob, chunks: Sequence[int], places: Mapping[int, int], wait: RoomWait) -> Outcome | None:
        """``Appender.store`` in the child; ``places``: offsets in the ring. None: it has died, or was never started.

        ``job.payload`` is called for the pages that were written.
        """
        if not chunks:
            return Outcome()
        lane = job.segment_class.lane % len(self._connections)
        with self._locks[lane]:
            if self._broken:
                return None
            if self._closing:
                return Outcome(declined=len(chunks), reason="closed")
            try:
                connection = self._connections[lane]
                connection.send_bytes(pack_request(job, chunks, places, wait))
                while not connection.poll(ALIVE_SECONDS):
                    if self._process.poll() is not None:
                        raise EOFError
                reply = AppendReply.unpack(connection.recv_bytes())
            except (OSError, EOFError) as exc:
                if self._closing:
                    return Outcome(declined=len(chunks), reason="closed")
                self._break(exc)
                return None
        wait.seconds = min(wait.seconds, reply.waited)
        for name, n in reply.counts.items():
            if name in NAMESPACE_COUNTS:
                self._c.counters.add_of(job.digest, **{name: n})
            else:
                self._c.counters.add(name, n)
        for chunk in reply.written:
            job.payload(chunk)
        return reply.outcome

    def _break(self, exc: BaseException) -> None:
        first, self._broken = not self._broken, True
        if first:
            self._c.counters.add("append_processes_lost")
            log.warning(
                "the process that writes saves has ended (%s, exit status %s): saves are written in this one from now "
                "on, which slows running requests; restart the engine to start it again",
                type(exc).__name__, self._process.poll(),
            )  # fmt: skip

    def close(self, timeout: float) -> bool:
        """Have it end behind the requests that it has; whether it has ended within ``timeout`` seconds."""
        self._closing = True
        for ours in self._sockets:  # wakes a thread that waits for a reply; its descriptor stays open until it is back
            with contextlib.suppress(OSError):
                ours.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(max(0.0, timeout))
        except subprocess.TimeoutExpired:
            return False
        return True

    def _close_connections(self) -> None:
        """Only the descriptors: in a forked child the parent's connections stay as they are."""
        for connection, ours in zip(self._connections, self._sockets, strict=True):
            with contextlib.suppress(OSError):
                connection.close()
            with contextlib.suppress(OSError):
                ours.close()


#: A forked child must not keep them connected: the append process ends with the last connection.
_PROCESSES = weakref.WeakSet[AppendProcess]()


def _forget_in_child() -> None:
    for process in list(_PROCESSES):
        process._close_connections()


os.register_at_fork(after_in_child=_forget_in_child)


def started(context: Context, descriptor: bytes, ring_fd: int, ring_bytes: int, lanes: int) -> AppendProcess | None:
    """The process; None, with a warning, where none can be started."""
    began = time.monotonic()
    try:
        return AppendProcess(context, descriptor, ring_fd, ring_bytes, lanes)
    except OSError as exc:
        log.warning("no process for the writes of saves (%s): they run in this one", exc)
        return None
    finally:
        log.debug("an append process was started in %.3f s", time.monotonic() - began)
