"""A file system with injected faults, a clock that the test sets, and bytes that every process can check.

>>> files = FaultyFiles(Fault(nth=3, kind="pwritev", error=errno.ENOSPC))   # the third write finds a full disk
>>> store = kvfs.open(path, capacity="16MiB", files=files)                  # doctest: +SKIP

Every :class:`~kvfs.system.files.Files` method that is one system call is counted (``KINDS``); loops such as
``read_into`` count through the calls that they make. LMDB does its own I/O, which is not covered: see
``tools/torture``.
"""

from __future__ import annotations

import array
import errno
import fcntl
import hashlib
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from kvfs.format.segment import BLOCK
from kvfs.system.direct_io import aligned
from kvfs.system.files import BareMap, Files
from kvfs.system.files import Mapping as Map

#: Calls that are counted and can fail.
KINDS = (
    "open_root", "open", "mkdir", "listdir", "rename", "unlink", "rmdir", "stat", "fstat", "close", "preadv", "pwritev",
    "truncate", "fallocate", "fsync", "fdatasync", "map", "map_bare", "populate_at", "flock", "readahead",
    "reopen", "random_access", "drop_cached",
)  # fmt: skip
#: What a fault does. ``error``: the call fails and nothing happens. ``torn``: half is written, then it fails.
#: ``short``: half is read or written. ``flip``: one bit of the bytes is wrong. ``misdirect``: 4 KiB off. ``delay``.
#: With O_DIRECT a half is a number of whole blocks.
ACTIONS = ("error", "torn", "short", "flip", "misdirect", "delay")
_MISDIRECTED_BYTES = 4096


@dataclass(frozen=True)
class Fault:
    """What happens to the ``nth`` (from 1) call of ``kind`` (None: of all), and, if ``persistent``, to all later ones.

    Actions that do not apply to a call (``flip`` of an ``unlink``) act as ``error``.
    """

    nth: int = 1
    kind: str | None = None
    action: str = "error"
    error: int = errno.EIO
    persistent: bool = False
    seconds: float = 0.1  # of a delay

    def __post_init__(self) -> None:
        assert self.nth >= 1 and self.action in ACTIONS and self.kind in (None, *KINDS), self

    def hits(self, kind: str, of_kind: int, of_all: int) -> bool:
        count = of_all if self.kind is None else of_kind
        return self.kind in (None, kind) and (count == self.nth or (self.persistent and count > self.nth))

    def raised(self) -> OSError:
        return OSError(self.error, f"injected: {os.strerror(self.error)}")


class Call(NamedTuple):
    number: int
    kind: str
    detail: str
    fault: Fault | None


class FaultyFiles(Files):
    """Files whose n-th call fails. Thread-safe; faults may be changed while a store is open."""

    def __init__(self, *faults: Fault, trace: bool = False, seed: int = 0) -> None:
        self.calls: Counter[str] = Counter()
        self.fired = 0
        self.trace: list[Call] = []
        self._traced = trace
        self._faults = faults
        self.delayed = 0.0  # seconds, in all calls together
        self._lock = threading.RLock()  # the garbage collector may close a descriptor in here
        self._random = random.Random(seed)

    @property
    def total(self) -> int:
        return sum(self.calls.values())

    def arm(self, *faults: Fault) -> None:
        """Replace the faults; without arguments no call fails any more. Counting goes on, see ``total``."""
        with self._lock:
            self._faults = faults

    def _enter(self, kind: str, detail: object = "") -> Fault | None:
        """Count a call; raise or return the fault that the caller must act out."""
        with self._lock:
            self.calls[kind] += 1
            of_kind, of_all = self.calls[kind], self.total
            fault = next((f for f in self._faults if f.hits(kind, of_kind, of_all)), None)
            self.fired += fault is not None
            if self._traced:
                self.trace.append(Call(of_all, kind, str(detail), fault))
        if fault is None:
            return None
        if fault.action == "delay":
            self.delayed += fault.seconds
            self.sleep(fault.seconds)
            return None
        # a close frees the descriptor in any case
        if kind != "close" and (fault.action == "error" or kind not in ("preadv", "pwritev")):
            raise fault.raised()
        return fault

    # -- directories and names ---------------------------------------------------------------

    def open_root(self, path: str) -> int:
        self._enter("open_root", path)
        return super().open_root(path)

    def open(
        self, name: str, flags: int, mode: int = 0o600, *, dir_fd: int, keep: list[int | None] | None = None
    ) -> int:
        self._enter("open", name)
        return super().open(name, flags, mode, dir_fd=dir_fd, keep=keep)

    def reopen(self, fd: int, flags: int, keep: list[int | None]) -> int:
        self._enter("reopen", fd)
        return super().reopen(fd, flags, keep)

    def mkdir(self, name: str, mode: int, *, dir_fd: int | None = None) -> None:
        self._enter("mkdir", name)
        super().mkdir(name, mode, dir_fd=dir_fd)

    def listdir(self, dir_fd: int) -> list[str]:
        self._enter("listdir", dir_fd)
        return super().listdir(dir_fd)

    def rename(self, src: str, dst: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        self._enter("rename", f"{src} -> {dst}")
        super().rename(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    def unlink(self, name: str, *, dir_fd: int) -> None:
        self._enter("unlink", name)
        super().unlink(name, dir_fd=dir_fd)

    def rmdir(self, name: str, *, dir_fd: int) -> None:
        self._enter("rmdir", name)
        super().rmdir(name, dir_fd=dir_fd)

    def stat(self, name: str, *, dir_fd: int) -> os.stat_result:
        self._enter("stat", name)
        return super().stat(name, dir_fd=dir_fd)

    def fstat(self, fd: int) -> os.stat_result:
        self._enter("fstat", fd)
        return super().fstat(fd)

    def close(self, fd: int) -> None:
        fault = self._enter("close", fd)
        super().close(fd)
        if fault is not None:
            raise fault.raised()

    def close_kept(self, keep: list[int | None]) -> None:
        fault = self._enter("close", keep[-1])
        super().close_kept(keep)
        if fault is not None:
            raise fault.raised()

    # -- data --------------------------------------------------------------------------------

    def preadv(self, fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
        fault = self._enter("preadv", f"{fd} at {offset}")
        if fault is None:
            return super().preadv(fd, buffers, offset, flags)
        if fault.action == "torn":
            raise fault.raised()
        if fault.action == "misdirect":
            return super().preadv(fd, buffers, offset + _MISDIRECTED_BYTES, flags)
        if fault.action == "short":
            first = memoryview(buffers[0])
            return super().preadv(fd, [first[: _half(fd, len(first), least=1)]], offset, flags)
        done = super().preadv(fd, buffers, offset, flags)
        if done:
            self._flip(memoryview(buffers[0])[:done])
        return done

    def pwritev(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        fault = self._enter("pwritev", f"{fd} at {offset}")
        if fault is None:
            return super().pwritev(fd, buffers, offset)
        parts = b"".join(bytes(b) for b in buffers)
        data = aligned(len(parts))
        data[:] = parts
        if fault.action in ("short", "torn"):
            done = super().pwritev(fd, [data[: _half(fd, len(data), least=fault.action == "short")]], offset)
            if fault.action == "torn":
                raise fault.raised()
            return done
        if fault.action == "flip":
            self._flip(data)
        elif fault.action == "misdirect":
            offset += _MISDIRECTED_BYTES
        return super().pwritev(fd, [data], offset)

    def _flip(self, data: memoryview) -> None:
        bit = self._random.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8

    def truncate(self, fd: int, nbytes: int) -> None:
        self._enter("truncate", fd)
        super().truncate(fd, nbytes)

    def fallocate(self, fd: int, offset: int, nbytes: int, *, keep_size: bool = False) -> None:
        self._enter("fallocate", fd)
        super().fallocate(fd, offset, nbytes, keep_size=keep_size)

    def fsync(self, fd: int) -> None:
        self._enter("fsync", fd)
        super().fsync(fd)

    def fdatasync(self, fd: int) -> None:
        self._enter("fdatasync", fd)
        super().fdatasync(fd)

    def map(self, fd: int, length: int, offset: int) -> Map:
        self._enter("map", fd)
        return super().map(fd, length, offset)

    def map_bare(self, fd: int, length: int, offset: int) -> BareMap:
        self._enter("map_bare", fd)
        return super().map_bare(fd, length, offset)

    def populate_at(self, address: int, nbytes: int) -> None:
        self._enter("populate_at")
        super().populate_at(address, nbytes)

    def flock(self, fd: int, operation: int) -> bool:
        self._enter("flock", f"{fd} {operation}")
        return super().flock(fd, operation)

    def readahead(self, fd: int, offset: int, nbytes: int) -> None:
        self._enter("readahead", fd)
        super().readahead(fd, offset, nbytes)

    def random_access(self, fd: int) -> None:
        self._enter("random_access", fd)
        super().random_access(fd)

    def drop_cached(self, fd: int, offset: int, nbytes: int) -> None:
        self._enter("drop_cached", fd)
        super().drop_cached(fd, offset, nbytes)


def _half(fd: int, nbytes: int, least: int) -> int:
    """Half of ``nbytes``, at least ``least`` units: blocks with O_DIRECT, else bytes."""
    block = BLOCK if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT else 1
    return min(nbytes, max(least * block, nbytes // 2 // block * block))


class FakeClock:
    """Mixin for a :class:`Files`: time passes only through ``sleep`` and ``advance``.

    Threads that wait on locks and events still wait in real time. So ``sleep`` lets them run for a moment: what they
    hold would outlast any deadline otherwise.
    """

    _elapsed = 0.0

    def monotonic(self) -> float:
        return self._elapsed

    def now_us(self) -> int:
        return 1_700_000_000_000_000 + int(self._elapsed * 1e6)

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)
        time.sleep(min(seconds, 0.005))

    def advance(self, seconds: float) -> None:
        self._elapsed += seconds


class Prompts:
    """Prompts and pages that every process can compute, so that each can check any byte in a store.

    ``tokens(family, chunks)``: prompts of one family begin alike; ``fork`` (a chunk number) makes another
    continuation from there on. A page's bytes are a function of all tokens up to its end.
    """

    def __init__(self, page_tokens: int, page_bytes: int) -> None:
        self.page_tokens = page_tokens
        self.page_bytes = page_bytes

    def tokens(self, family: int, chunks: int, fork: int | None = None) -> array.array[int]:
        run = array.array("I")
        for chunk in range(chunks):
            branch = 0 if fork is None or chunk < fork else 1 + fork
            head = (family * 7919 + branch * 104729 + chunk) & 0xFFFF_FFFF
            run.extend([head, *range(self.page_tokens - 1)])
        return run

    def pages(self, tokens: Sequence[int]) -> list[bytes]:
        """Content of the full chunks of a prompt."""
        step = self.page_tokens
        packed = memoryview(array.array("I", tokens)).cast("B")
        chain, found = b"", []
        for chunk in range(len(tokens) // step):
            chain = hashlib.sha256(chain + packed[chunk * step * 4 : (chunk + 1) * step * 4]).digest()
            found.append(page_content(chain, self.page_bytes))
        return found

    def wrong(self, tokens: Sequence[int], pages: Iterable[Any]) -> int:
        """How many of the leading ``pages`` (buffers) differ from the pages of ``tokens``."""
        return sum(bytes(page) != right for page, right in zip(pages, self.pages(tokens), strict=False))


@lru_cache(maxsize=4096)
def page_content(key: bytes, nbytes: int) -> bytes:
    """``nbytes`` that differ from those of every other key."""
    return hashlib.shake_128(key).digest(nbytes)


class DictOracle:
    """What a store should hold: key -> bytes. For tests that choose their own bytes."""

    def __init__(self) -> None:
        self.pages: dict[bytes, bytes] = {}

    def put(self, key: bytes, page: Any) -> None:
        """The first content of a key stays, as in a store."""
        self.pages.setdefault(key, bytes(page))

    def wrong(self, keys: Sequence[bytes], pages: Iterable[Any]) -> list[bytes]:
        """Keys of the leading ``pages`` whose bytes are wrong, or were never put."""
        return [key for key, page in zip(keys, pages, strict=False) if self.pages.get(key) != bytes(page)]
