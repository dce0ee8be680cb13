"""The bucket of the settings for call after call: one client, whose connections stay open.

A new client reads certificates, and each of its first requests makes a connection: on a link of 20 ms that is as long
as some MB take.
"""

from __future__ import annotations

import os
import threading
from typing import TypeAlias

from kvfs.directory.config import Remote
from kvfs.remote.bucket import Bucket
from kvfs.remote.urls import open_bucket

_Made: TypeAlias = tuple[Remote, tuple[int, ...], frozenset[tuple[str, str]]]  # what a client was made from


class KeptBucket:
    """Owns the client. Thread-safe."""

    def __init__(self, *, fresh_seconds: float = 0.0) -> None:
        """``fresh_seconds``: as of ``Bucket``."""
        self._fresh_seconds = fresh_seconds
        self._lock = threading.Lock()  # around what follows
        self._made: _Made | None = None
        self._bucket: Bucket | None = None

    def of(self, remote: Remote) -> Bucket:
        """The bucket of these settings, of the keys in their file, and of the environment, which may have credentials.
        Errors as of ``open_bucket``."""
        wanted = remote, _version(remote.key_file), frozenset(os.environ.items())
        with self._lock:
            if self._bucket is None or self._made != wanted:
                self._bucket = open_bucket(remote, fresh_seconds=self._fresh_seconds)
                self._made = wanted
            return self._bucket

    def forget(self) -> None:
        """At the end, or after a failure: another call makes a client of its own, which looks for credentials again.
        Calls that go on keep theirs, which ends with the last of them."""
        with self._lock:
            self._bucket = None


def _version(path: str) -> tuple[int, ...]:
    """Changes when a file of keys is replaced or rewritten; () for none."""
    try:
        st = os.stat(path)
    except OSError:  # opening the bucket says what is wrong with it
        return ()
    return st.st_dev, st.st_ino, st.st_size, st.st_mtime_ns, st.st_ctime_ns
