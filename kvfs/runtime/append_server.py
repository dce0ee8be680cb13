"""The program of an append process (``kvfs.transfer.append_process``): requests of one engine, until it hangs up."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from kvfs.pages.identity import parse_descriptor
from kvfs.runtime import child_program
from kvfs.runtime.open_store import OpenStore
from kvfs.write.append_request import AppendReply, unpack_request


class AppendServer:
    """Serves the connections of one engine, each in a thread, in order."""

    def __init__(self, store: OpenStore, descriptor: bytes, memory: memoryview) -> None:
        described = parse_descriptor(descriptor)
        assert described is not None, "the engine's namespace has a valid descriptor"
        self._store, self._described, self._memory = store, described, memory
        self._descriptor: bytes = descriptor
        self._appender = store.services().appender
        self._lock = threading.Lock()
        store.notes_counts = False  # the engine's process counts and notes what the replies tell it
        self._told: Mapping[str, int] = store.c.counters.snapshot()  # what the engine's process has been told of

    def serve(self, connection: Connection) -> None:
        """Until the engine hangs up, or is gone."""
        try:
            while True:
                connection.send_bytes(self.answer(connection.recv_bytes()))
        except (EOFError, OSError):
            return

    def answer(self, request: bytes) -> bytes:
        job, chunks, wait, written = unpack_request(
            request, self._described.digest, self._descriptor, self._described.layout, self._memory
        )
        outcome = self._appender.store(job, chunks, wait)
        taken = chunks[: len(chunks) - outcome.declined]
        if taken:
            self._store.c.access_times.note_request(job.prompt.hashes[taken[-1]], job.at_us)
        return AppendReply(outcome, written, wait.seconds, self._growth()).pack()

    def _growth(self) -> dict[str, int]:
        """Counts since the last call."""
        with self._lock:
            now = self._store.c.counters.snapshot()
            growth = {name: n - self._told.get(name, 0) for name, n in now.items() if n > self._told.get(name, 0)}
            self._told = now
        return growth


def _serve(store: OpenStore, setup: Mapping[str, Any]) -> None:
    ring = mmap.mmap(setup["ring"], setup["ring_bytes"], prot=mmap.PROT_READ)
    server = AppendServer(store, bytes.fromhex(setup["descriptor"]), memoryview(ring))
    threads = [
        threading.Thread(target=server.serve, args=(Connection(fd),), name=f"kvfs-append-{lane}")
        for lane, fd in enumerate(setup["lanes"])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    child_program.run("append", _serve)
