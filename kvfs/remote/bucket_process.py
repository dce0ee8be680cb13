"""The bucket process: a child that moves pages between the store and the bucket, with an interpreter of its own.

An engine asks for a prompt and goes on; the child pulls its pages into the store, where the engine's next lookup finds
them. A pull takes seconds of CPU time per GB, and a bucket may hang: neither may cost a running request. The child
opens the store as any other process does, and ends with the process that started it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import socket
import struct
import subprocess
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any

from kvfs.context import Context
from kvfs.pages.chunk_hash import HASH_BYTES
from kvfs.pages.identity import Identity
from kvfs.remote.pull import sparse
from kvfs.system import child_process

log = logging.getLogger("kvfs")
FETCHES_MAX = 64  # that have not ended; more are not begun
ASK_SECONDS = 2.0  # a bucket that owes an answer for so long is asked nothing more until it comes
FETCH_SECONDS = 300.0  # a fetch that has not ended by then is cancelled
MISSING_SECONDS = 30.0  # for which it is remembered that the bucket holds nothing of a prompt
MISSING_MAX = 4096  # prompts of which that is remembered
FAILURES_MAX = 3  # fetches that fail in a row, before none is begun for PAUSE_SECONDS
PAUSE_SECONDS = 30.0  # also between the end of a child and the start of the next one
CANCELLED = "cancelled"  # why a fetch has ended that was cancelled
TICK_SECONDS = 10.0  # between two looks for fetches that take too long
EXIT_SECONDS = 1.0  # for which a child that has hung up may take to end
RECEIVE_BYTES = 1 << 16
DESCRIPTORS_MAX = 64  # namespaces whose descriptors are kept
_LENGTH = struct.Struct("!i")


class Fetch:
    """A prompt that is asked of the bucket. Its fields are written by one thread, and may be read by any.

    ``first``: the leading chunks that are stored here. ``reach``: about how many leading chunks the bucket holds; None
    until it has answered. ``pages``, ``nbytes``: stored here so far. ``share``: of the work up to ``reach`` that is
    done, 0 to 1. ``began``, ``answered``, ``over``: when it was asked for, when the pull began, when it ended, in
    monotonic seconds. ``ended``: nothing more will be stored; ``failed``: why that was early, or "".
    """

    def __init__(
        self, number: int, first: int, cancel: Callable[[Fetch], None], descriptor: str = "", hashes: bytes = b""
    ) -> None:
        self.number, self.first = number, first
        self.descriptor, self.hashes = descriptor, hashes  # for the pull, until it is sent
        self.cancelled = False
        self.began = time.monotonic()
        self.answered: float | None = None
        self.over: float | None = None
        self.reach: int | None = None
        self.pages = self.nbytes = 0
        self.share = 0.0
        self.failed = ""
        self._cancel = cancel
        self._ended = threading.Event()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def wait(self, seconds: float) -> bool:
        """Whether it has ended, within ``seconds``."""
        return self._ended.wait(seconds)

    def cancel(self) -> None:
        """Ask for no more objects. What was stored stays."""
        if not self.ended:
            self._cancel(self)

    def end(self, failed: str = "") -> None:
        self.failed, self.hashes, self.over = failed, b"", time.monotonic()
        self._ended.set()


class BucketProcess:
    """Owns the child, the connection to it and the thread that serves that. Thread-safe; no call waits."""

    def __init__(self, context: Context) -> None:
        """RuntimeError or OSError if there is no thread, or no descriptor, to be had."""
        self._c = context
        self._lock = threading.Lock()  # around what follows
        self._fetches: dict[int, Fetch] = {}
        self._names: dict[int, tuple[bytes, bytes]] = {}  # of a fetch: what MISSING is remembered by
        self._missing: OrderedDict[tuple[bytes, bytes], float] = OrderedDict()
        self._outgoing: deque[memoryview] = deque()
        self._descriptors: dict[bytes, str] = {}
        self._number = self._failures = 0
        self._paused_until = float("-inf")
        self._closing = self._wanted = False
        self._socket: socket.socket | None = None
        self._incoming = bytearray()
        self._process: subprocess.Popen[bytes] | None = None
        self._woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="kvfs-bucket", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._woken.close()
            self._waker.close()
            raise
        _PROCESSES.add(self)

    @property
    def pid(self) -> int | None:
        """Of the child; None while there is none."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def start(self) -> None:
        """Have the child started now: the first fetch does not wait for it, and uploads begin."""
        self._wanted = True
        self._wake()

    def fetch(self, identity: Identity, hashes: bytes, first: int) -> Fetch | None:
        """Pull a prompt of these chunk hashes, of which the first ``first`` chunks are stored here.

        None if it is not begun: the bucket lacked it just now, has failed just now or owes an answer for long, or too
        much is under way.
        """
        now, name = time.monotonic(), (identity.digest, hashes[first * HASH_BYTES : (first + 1) * HASH_BYTES])
        with self._lock:
            if self._closing or now < self._paused_until or len(self._fetches) >= FETCHES_MAX or not name[1]:
                return None
            if self._missing.get(name, 0.0) > now:
                return None
            if any(f.answered is None and now - f.began > ASK_SECONDS for f in self._fetches.values()):
                return None
            self._number += 1
            fetch = Fetch(self._number, first, self._cancel, self._descriptor(identity), hashes)
            self._fetches[fetch.number], self._names[fetch.number] = fetch, name
            end = len(hashes) // HASH_BYTES
            ask = {"ask": fetch.number, "first": first, "end": end, "descriptor": fetch.descriptor}
            self._send(_frame(ask, sparse(hashes, first)))
        self._c.counters.add("bucket_fetches")
        return fetch

    def close(self, timeout: float) -> None:
        """End the child, or leave it to end by itself after ``timeout`` seconds: it may wait for the bucket."""
        until = time.monotonic() + timeout
        with self._lock:
            self._closing = True
        self._wake()
        self._thread.join(timeout)
        process = self._process
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))

    def forget_in_child(self) -> None:
        """After a fork: only the descriptors; the connection is the parent's."""
        self._lock = threading.Lock()  # the parent's thread may have had it
        self._closing = True
        for end in (self._socket, self._woken, self._waker):
            if end is not None:
                with contextlib.suppress(OSError):
                    end.close()

    # -- any thread --------------------------------------------------------------------------

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # it is full, so the thread is about to look; or the process is closed
            self._waker.send(b"w")

    def _cancel(self, fetch: Fetch) -> None:
        with self._lock:
            fetch.cancelled = True
            if not self._closing:
                self._send(_frame({"cancel": fetch.number}))

    def _send(self, message: memoryview) -> None:
        """Under the lock. From here if the connection takes it at once: to wake the thread would cost more than that,
        since it would take the interpreter from the caller."""
        if not self._outgoing:
            message = self._sent(message)
        if message:
            self._outgoing.append(message)
            self._wake()

    def _sent(self, message: memoryview) -> memoryview:
        """Under the lock: what is left of a message after as much as the connection takes at once."""
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it is full, or the child has died: the thread finds out which
                return message[self._socket.send(message, socket.MSG_DONTWAIT) :]
        return message

    def _descriptor(self, identity: Identity) -> str:
        """Under the lock."""
        if identity.digest not in self._descriptors:
            if len(self._descriptors) >= DESCRIPTORS_MAX:
                self._descriptors.clear()
            self._descriptors[identity.digest] = identity.descriptor_bytes().hex()
        return self._descriptors[identity.digest]

    # -- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            try:
                self._turn()
            except Exception as exc:  # the child has died or cannot be started; no fetch may wait for this thread
                self._lost(exc)
        self._hang_up()
        self._end_all("the store is closed")
        self._woken.close()
        self._waker.close()

    def _turn(self) -> None:
        """Wait until there is something to do, and do it."""
        with self._lock:
            due = bool(self._outgoing) or self._wanted
        if self._socket is None and due and time.monotonic() >= self._paused_until:
            self._start()
        with self._lock:
            while self._outgoing and self._socket is not None:
                rest = self._sent(self._outgoing[0])
                if rest:
                    self._outgoing[0] = rest
                    break
                self._outgoing.popleft()
            full = bool(self._outgoing)
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        if self._socket is not None:
            poll.register(self._socket, select.POLLIN | (select.POLLOUT if full else 0))
        ready = {fd for fd, _ in poll.poll(1000 * TICK_SECONDS)}
        if self._woken.fileno() in ready:
            self._woken.recv(4096)
        if self._socket is not None and self._socket.fileno() in ready:
            self._receive(self._socket)
        self._expire()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        setup = {"path": self._c.directory.path, "store": self._c.store_id.hex(), "connection": theirs.fileno()}
        try:
            self._process = child_process.start("kvfs.runtime.bucket_server", setup, [theirs.fileno()])
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._incoming.clear()
        with self._lock:
            self._socket = ours

    def _receive(self, connection: socket.socket) -> None:
        """Take what has come of the child's messages; EOFError if it has hung up."""
        try:
            some = connection.recv(RECEIVE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:  # it was the room to send that was ready
            return
        if not some:
            raise EOFError
        self._incoming += some
        while len(self._incoming) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._incoming)[0]
            if len(self._incoming) < end:
                return
            message = bytes(self._incoming[_LENGTH.size : end])
            del self._incoming[:end]
            self._take(json.loads(message))

    def _take(self, said: dict[str, Any]) -> None:
        """What the child says of a fetch."""
        with self._lock:
            fetch = self._fetches.get(said["fetch"])
            if fetch is None:  # it took too long
                return
            if fetch.answered is None:
                fetch.answered = time.monotonic()
            pull = "reach" in said and "ended" not in said and not fetch.cancelled
            if pull:
                header = {"pull": fetch.number, "reach": said["reach"], "descriptor": fetch.descriptor}
                self._outgoing.append(_frame(header, fetch.hashes))
                fetch.hashes = b""
        fetch.reach = said.get("reach", fetch.reach)
        fetch.pages, fetch.nbytes = said.get("pages", fetch.pages), said.get("nbytes", fetch.nbytes)
        fetch.share = said.get("share", fetch.share)
        if "ended" in said:
            self._end(fetch, said["ended"])
        elif "reach" in said and not pull:
            self._end(fetch, CANCELLED)

    def _end(self, fetch: Fetch, failed: str) -> None:
        with self._lock:
            self._fetches.pop(fetch.number, None)
            name = self._names.pop(fetch.number, None)
            now = time.monotonic()
            if not failed and not fetch.pages and name is not None:
                self._missing[name] = now + MISSING_SECONDS
                if len(self._missing) > MISSING_MAX:
                    self._missing.popitem(last=False)
            if failed != CANCELLED:
                self._failures = self._failures + 1 if failed else 0
            pause = self._failures == FAILURES_MAX
            if pause:
                self._failures, self._paused_until = 0, now + PAUSE_SECONDS
        if failed and failed != CANCELLED:
            self._c.counters.add("bucket_fetches_failed")
        if pause:
            log.warning("the bucket fails (%s): it is not asked for %g s", failed, PAUSE_SECONDS)
        fetch.end(failed)

    def _expire(self) -> None:
        now = time.monotonic()
        with self._lock:
            late = [fetch for fetch in self._fetches.values() if now - fetch.began > FETCH_SECONDS]
        for fetch in late:
            fetch.cancel()
            self._end(fetch, "it took too long")

    def _lost(self, exc: BaseException) -> None:
        """The child has died, or cannot be started."""
        self._hang_up()
        with self._lock:
            self._paused_until = time.monotonic() + PAUSE_SECONDS
            self._outgoing.clear()  # the first may be the rest of a message
        process, self._process, status = self._process, None, None
        if process is not None:
            try:
                status = process.wait(EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = process.wait(EXIT_SECONDS)
        self._c.counters.add("bucket_processes_lost")
        log.warning(
            "the process that asks the bucket has ended (%s, exit status %s): it is started again in %g s",
            type(exc).__name__, status, PAUSE_SECONDS,
        )  # fmt: skip
        self._end_all("the process that asks the bucket has ended")

    def _hang_up(self) -> None:
        with self._lock:
            ours, self._socket = self._socket, None
        if ours is not None:
            with contextlib.suppress(OSError):
                ours.shutdown(socket.SHUT_RDWR)
            ours.close()

    def _end_all(self, why: str) -> None:
        with self._lock:
            ended = [*self._fetches.values()]
            self._fetches.clear()
            self._names.clear()
        for fetch in ended:
            fetch.end(why)


def _frame(header: Mapping[str, Any], hashes: bytes = b"") -> memoryview:
    """A message as ``Connection.recv_bytes`` expects it."""
    message = json.dumps(header).encode() + b"\n" + hashes
    return memoryview(_LENGTH.pack(len(message)) + message)


#: A forked child must not keep them connected: the bucket process ends with the last connection.
_PROCESSES = weakref.WeakSet[BucketProcess]()


def _forget_in_child() -> None:
    for process in list(_PROCESSES):
        process.forget_in_child()


os.register_at_fork(after_in_child=_forget_in_child)
