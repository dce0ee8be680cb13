"""The program of a bucket process (``kvfs.remote.bucket_process``): fetches of one process, until it hangs up, and
uploads of what all processes of the host have stored."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from kvfs.directory.config import Remote
from kvfs.errors import IndexUnavailableError, KvfsError
from kvfs.lookup.search import Prompt
from kvfs.pages.chunk_hash import ChunkHashes
from kvfs.pages.identity import Described, parse_descriptor
from kvfs.remote.bucket import Bucket
from kvfs.remote.bucket_process import CANCELLED
from kvfs.remote.kept_bucket import KeptBucket
from kvfs.remote.pull import Puller, names_of
from kvfs.remote.uploads import Uploader
from kvfs.remote.uses import Uses
from kvfs.runtime import child_program
from kvfs.runtime.open_store import OpenStore

log = logging.getLogger("kvfs")
ASKS_AT_ONCE = PULLS_AT_ONCE = 4
UPLOAD_SECONDS = {"off": 5.0, "all": 5.0, "pinned": 5.0, "reused": 60.0}  # between two passes
WALK_SHARE = 10.0  # a walk over the index is followed by a pause of so many times its length
PAUSE_SECONDS = 300.0  # that this may be at most: settings are looked at then
END_SECONDS = 90.0  # for which it may go on once the other process has hung up: longer than a request and its retries
FAILED_SECONDS = 30.0  # after one that failed
UPLOAD_NICE = 10
USES_AT_ONCE, USES_PER_PASS = 4, 256  # requests that tell the bucket what was used
FRESH_SECONDS = 10.0  # for which the bucket's marker, and the shapes of a namespace, are not asked for again


_GOES_ON = "goes on"  # an answer is told, and the end is not due


class _CancelledError(Exception):
    """Ends a pull."""


class BucketServer:
    """Pulls what one process asks for, into the store. Owns the bucket, and the threads of the pulls."""

    def __init__(self, store: OpenStore, connection: Connection) -> None:
        self._store, self._connection = store, connection
        self._sending = threading.Lock()  # around the connection
        self._lock = threading.Lock()  # around what follows
        self._cancelled: set[int] = set()
        self._pulling: set[int] = set()
        self._closing = threading.Event()
        self._kept = KeptBucket(fresh_seconds=FRESH_SECONDS)
        self._uses, self._unnoted = Uses(), False  # what is to be told the bucket; whether that has failed

    def serve(self) -> None:
        """Until the other process hangs up, or is gone."""
        asks = ThreadPoolExecutor(ASKS_AT_ONCE, "kvfs-ask")  # not behind pulls, which take long
        pulls = ThreadPoolExecutor(PULLS_AT_ONCE, "kvfs-fetch")
        uploads = threading.Thread(target=self._upload, name="kvfs-upload")
        uploads.start()
        try:
            while True:
                header, _, hashes = self._connection.recv_bytes().partition(b"\n")
                said = json.loads(header)
                if "ask" in said:
                    asks.submit(self._answer, said["ask"], self._ask, said, hashes)
                elif "pull" in said:
                    with self._lock:
                        self._pulling.add(said["pull"])
                    pulls.submit(self._answer, said["pull"], self._pull, said, hashes)
                else:
                    with self._lock:
                        self._cancelled |= {said["cancel"]} & self._pulling
        except (EOFError, OSError):
            pass
        finally:
            self._closing.set()
            end = threading.Timer(END_SECONDS, os._exit, (1,))  # a directory of a dead file server has no deadline
            end.daemon = True
            end.start()
            for pool in (asks, pulls):
                pool.shutdown(wait=True, cancel_futures=True)
            uploads.join()
            self._kept.forget()

    def _answer(self, number: int, task: Callable[[dict[str, Any], bytes], str], *what: Any) -> None:
        """Run a task. It returns why it has ended early, or ""."""
        try:
            self._check(number)
            ended = task(*what)
        except _CancelledError:
            ended = CANCELLED
        except KvfsError as exc:
            ended = " ".join(str(exc).split())
        except Exception as exc:  # the engine must not wait for an answer that never comes
            ended = f"unexpected {type(exc).__name__}: {exc}"
        if ended == _GOES_ON:
            return
        with self._lock:
            self._pulling.discard(number)
            self._cancelled.discard(number)
        self._tell(number, ended=ended)

    def _check(self, number: int) -> None:
        if self._closing.is_set() or number in self._cancelled:
            raise _CancelledError

    def _ask(self, said: dict[str, Any], hashes: bytes) -> str:
        number, first, described = said["ask"], said["first"], _described(said)
        names = names_of(hashes, first, said["end"])
        reach = self._puller(number, described).reach(described, names, first, said["end"])
        self._tell(number, reach=reach, **({"ended": ""} if reach <= first else {}))
        return _GOES_ON

    def _pull(self, said: dict[str, Any], hashes: bytes) -> str:
        described = _described(said)
        prompt = Prompt(described.digest, ChunkHashes(hashes))
        done = self._puller(said["pull"], described).prompt(described, prompt, said["reach"])
        return next(iter(done.problems), "it failed") if done.failed and not done.stored else ""

    def _puller(self, number: int, described: Described) -> Puller:
        services = self._store.services()

        def progress() -> None:
            self._check(number)
            done = puller.done
            self._tell(number, pages=done.stored + done.skipped, nbytes=done.nbytes, share=puller.share)

        puller = Puller(self._store.c, services.active, services.reader.cold, self._bucket(), progress, self._noting())
        return puller

    def _noting(self) -> Uses | None:
        """Where uses of objects are noted, if the settings say so."""
        return self._uses if self._store.settings.remote.retention_from == "use" else None

    def _note_uses(self) -> None:
        """Tell the bucket what was used, or some of it. What fails is dropped: it is told with the next use."""
        if not self._uses.due:
            return
        try:
            self._uses.flush(self._bucket(), USES_AT_ONCE, USES_PER_PASS)
        except KvfsError as exc:
            self._store.c.counters.add("remote_errors")
            if not self._unnoted:
                log.warning("the bucket was not told what is used (%s): it may seem older", " ".join(str(exc).split()))
            self._unnoted = True

    def _bucket(self) -> Bucket:
        """The bucket of the present settings and keys."""
        return self._kept.of(self._store.settings.remote)

    def _tell(self, number: int, **what: Any) -> None:
        try:
            with self._sending:
                self._connection.send_bytes(json.dumps({"fetch": number, **what}).encode())
        except OSError:  # it has hung up
            self._closing.set()

    # -- uploads -----------------------------------------------------------------------------

    def _upload(self) -> None:
        """In a thread, until the end: what is stored goes to the bucket, if the settings say so and no other process of
        the host does it."""
        uploader, pause, said, nice = Uploader(self._store.c), 0.0, "", False
        while not self._closing.wait(pause):
            remote = self._store.settings.remote
            pause = UPLOAD_SECONDS[remote.upload]
            self._note_uses()
            if remote.upload == "off" or not remote.url:
                uploader.close()
                continue
            problem = ""
            try:
                if not uploader.has_turn():
                    continue
                bucket = self._bucket().again()  # what was removed there is written again
                if not nice:
                    bucket.is_ready()  # the client makes its threads with its first request: fetches need them, too
                    with contextlib.suppress(OSError):  # engines come first; threads that are made here inherit it
                        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), UPLOAD_NICE)
                    nice = True
                pace = partial(self._paced, remote)
                done, more, walked = uploader.run(bucket, remote.upload, pace, self._noting())
                problem = next(iter(done.problems), "")
                pause = 0.0 if more else max(pause, min(PAUSE_SECONDS, WALK_SHARE * walked))
            except _CancelledError:  # the settings have changed, or it ends
                pause = 0.0
            except IndexUnavailableError:  # a busy host: it is not the bucket's fault
                continue
            except (KvfsError, OSError) as exc:
                problem = " ".join(str(exc).split())
            except Exception as exc:  # fetches go on
                problem = f"unexpected {type(exc).__name__}: {exc}"
            if problem:
                pause = FAILED_SECONDS
            if problem and problem != said:
                log.warning("not everything was uploaded (%s): tried again every %g s", problem, FAILED_SECONDS)
            said = problem
        uploader.close()

    def _paced(self, remote: Remote, nbytes: int) -> None:
        """Wait as long as the settings say for so many bytes. _CancelledError if they have changed."""
        until = time.monotonic() + (nbytes / remote.upload_rate if remote.upload_rate else 0.0)
        while True:
            left = until - time.monotonic()
            if self._closing.wait(min(max(left, 0.0), 1.0)) or self._store.settings.remote != remote:
                raise _CancelledError
            if left <= 0:
                return


def _described(said: dict[str, Any]) -> Described:
    described = parse_descriptor(bytes.fromhex(said["descriptor"]))
    assert described is not None, "the engine's namespace has a valid descriptor"
    return described


def _serve(store: OpenStore, setup: Mapping[str, Any]) -> None:
    BucketServer(store, Connection(setup["connection"])).serve()


def main() -> None:
    child_program.run("bucket", _serve)
