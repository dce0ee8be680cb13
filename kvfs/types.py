"""Small value types of the public API. No I/O, no third-party imports."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypedDict

#: Anything that exposes its bytes: bytes-like, numpy array, contiguous CPU torch tensor.
BufferLike: TypeAlias = Any
#: Any sequence or 1-D buffer of integers in [0, 2**32).
TokensLike: TypeAlias = Any
#: Extra key material of single chunks: chunk number -> bytes (image digest, LoRA digest, ...).
ExtraKeys: TypeAlias = Mapping[int, bytes]


class Tier(enum.IntEnum):
    """Where a page is stored, fastest first."""

    DEVICE = 0
    PEER = 1  # another GPU of this host
    HOST = 2
    DISK = 3
    REMOTE = 4


class Verify(enum.Enum):
    """When the bytes of a page are checked against its checksums."""

    ALWAYS = "always"
    FIRST = "first"
    OFF = "off"


class PutResult(NamedTuple):
    """Outcome of one ``put``. The four counts add up to the pages offered."""

    stored: int
    skipped: int
    declined: int
    in_flight: int = 0
    #: why pages were declined, "" if none were: "space", "index", "io", "gap", "deadline", "disabled", "read-only",
    #: "closed"
    reason: str = ""


class IndexStats(TypedDict):
    """How the index does."""

    state: str  # "ready", or why it does not answer
    generation: str
    timeouts: int  # calls of this process that it did not answer in time


class StoreStats(TypedDict, total=False):
    """What ``Store.stats`` returns. The last four are missing while the index does not answer."""

    path: str
    format: int
    store_id: str
    capacity_bytes: int
    read_only: bool
    mode: str
    verify: str
    native: str  # "on ...", or why Python does lookups, reads and sums
    watch: str  # how this process notices changes of others: "inotify", "polling" or "off"
    counters: dict[str, int]  # of this process
    totals: dict[str, int]  # of all processes, past and present
    processes: int  # live ones that may write
    pinned_bytes: int  # of memory, by them
    index: IndexStats
    used_bytes: int  # what all segments are charged
    segments: dict[str, int]  # state -> how many
    index_bytes: int  # of its budget, in use
    quotas: dict[str, dict[str, int | None]]  # name -> used_bytes, cap_bytes, guaranteed_bytes


class PurgeResult(NamedTuple):
    """What a purge did. Space that is still mapped or read is freed when its readers release it."""

    pages: int  # index entries removed
    segments_dropped: int  # segments that held only purged pages
    bytes_freed: int


@dataclass(frozen=True)
class SavePlan:
    """Which pages of a prompt are to be saved. Picklable: one process plans, others save."""

    chunks: int
    hashes: tuple[bytes, ...]
    missing: Mapping[str, tuple[int, ...]]  # group name -> chunk numbers, ascending
    namespace: bytes = b""  # digest
    keyed: bool = False  # the pages have no order: each is stored, found and loaded by itself

    def __bool__(self) -> bool:
        return any(self.missing.values())


class TransferState(enum.Enum):
    """State of a transfer; the last five are final."""

    QUEUED = "queued"
    WAITING = "waiting"  # for the ``after`` event of the engine
    COPYING = "copying"  # save: out of the engine's buffers
    WRITING = "writing"  # save: the source is free, the pages are not published yet
    LOADING = "loading"
    DONE = "done"  # every page was stored or loaded, or was there already
    PARTIAL = "partial"  # some were
    DECLINED = "declined"  # none was; ``result.reason`` says why
    CANCELLED = "cancelled"
    FAILED = "failed"  # a bug, or ``after`` raised: see ``error``


class PageOutcome(enum.Enum):
    """Outcome of one page."""

    STORED = "stored"
    SKIPPED = "skipped"  # another writer has stored it, or is writing it
    LOADED = "loaded"  # verified, and now in the engine's buffers
    DECLINED = "declined"
    UNREADABLE = "unreadable"  # missing, or its bytes do not verify: none of them was copied
    CANCELLED = "cancelled"


class PageDone(NamedTuple):
    """Argument of ``on_page``."""

    group: str
    chunk: int
    outcome: PageOutcome


@dataclass(frozen=True)
class TransferResult:
    """Outcome of a transfer.

    ``tokens``: of a load, the restored length from token 0 on; of a save, the tokens whose pages it stored. ``tiers``
    (loads) adds up to ``tokens``: a token counts for the slowest tier that one of its pages came from, DEVICE if no
    page was moved for it. ``pages`` were moved, ``skipped`` were stored already or in flight, ``declined`` were not
    moved (refused, unreadable, cancelled). ``reason`` of the first declined page: "ring", "deadline", "busy", "source",
    "disabled", "cancelled", "closed", "error", "unreadable" or one of ``PutResult``.
    """

    tokens: int = 0
    pages: int = 0
    nbytes: int = 0
    skipped: int = 0
    declined: int = 0
    tiers: Mapping[Tier, int] = field(default_factory=dict)
    reason: str = ""


#: One buffer of whole pages, or a list or tuple of buffers of one page each; for several groups one of these per name.
PagesLike: TypeAlias = "BufferLike | Sequence[BufferLike] | Mapping[str, BufferLike | Sequence[BufferLike]]"
