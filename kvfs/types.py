"""Small value types of the public API. No I/O, no third-party imports."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

#: Anything that exposes its bytes: bytes-like, numpy array, contiguous CPU torch tensor.
BufferLike: TypeAlias = Any
#: Any sequence or 1-D buffer of integers in [0, 2**32).
TokensLike: TypeAlias = Any
#: Extra key material of single chunks: chunk number -> bytes (image digest, LoRA digest, ...).
ExtraKeys: TypeAlias = Mapping[int, bytes]


class Tier(enum.IntEnum):
    """Where a page lies, fastest first."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    REMOTE = 3


class Verify(enum.Enum):
    """When the bytes of a page are checked against its checksums."""

    ALWAYS = "always"
    FIRST = "first"
    OFF = "off"


class PutResult(NamedTuple):
    """What became of the pages offered to one ``put``; the four counts add up to the pages offered."""

    stored: int
    skipped: int
    declined: int
    in_flight: int = 0
    #: why pages were declined ("" if none): "space", "index", "io", "gap", "deadline", "disabled", "read-only"
    reason: str = ""


class PurgeResult(NamedTuple):
    """What a purge did. Space that somebody still maps or reads is freed when he lets go."""

    pages: int  # index entries removed
    segments_dropped: int  # they held nothing else
    bytes_freed: int


@dataclass(frozen=True)
class SavePlan:
    """Which pages of a prompt are worth saving. Picklable: one process plans, others save."""

    chunks: int
    hashes: tuple[bytes, ...]
    missing: Mapping[str, tuple[int, ...]]  # group name -> chunk numbers, ascending
    namespace: bytes = b""  # digest

    def __bool__(self) -> bool:
        return any(self.missing.values())


class TransferState(enum.Enum):
    """Where a transfer is; the last five are ends."""

    QUEUED = "queued"
    WAITING = "waiting"  # for the engine's event
    COPYING = "copying"  # save: out of the engine's buffers
    WRITING = "writing"  # save: the source is free, the store is not done
    LOADING = "loading"
    DONE = "done"  # every page was stored or loaded, or was there already
    PARTIAL = "partial"  # some were
    DECLINED = "declined"  # none was; ``result.reason`` says why
    CANCELLED = "cancelled"
    FAILED = "failed"  # a bug, or ``after`` raised: see ``error``


class PageOutcome(enum.Enum):
    """What became of a page."""

    STORED = "stored"
    SKIPPED = "skipped"  # somebody else has stored it, or is writing it
    LOADED = "loaded"  # verified, and now in the engine's buffers
    DECLINED = "declined"
    UNREADABLE = "unreadable"  # missing, or its bytes do not verify: nothing of it was copied
    CANCELLED = "cancelled"


class PageDone(NamedTuple):
    """What ``on_page`` gets."""

    group: str
    chunk: int
    outcome: PageOutcome


@dataclass(frozen=True)
class TransferResult:
    """What a transfer did.

    ``tokens``: of a load, the restored length from token 0 on; of a save, the tokens whose pages were stored now.
    ``tiers`` (loads) adds up to ``tokens``: a token counts for the slowest tier that one of its pages came from,
    DEVICE if nothing had to move for it. ``pages`` were moved, ``skipped`` were there or in flight, ``declined``
    were not moved (refused, unreadable, cancelled). ``reason`` of the first of those: "ring", "deadline", "busy",
    "source", "disabled", "cancelled", "closed", "error", "unreadable" or one of ``PutResult``.
    """

    tokens: int = 0
    pages: int = 0
    nbytes: int = 0
    skipped: int = 0
    declined: int = 0
    tiers: Mapping[Tier, int] = field(default_factory=dict)
    reason: str = ""


#: One buffer of whole pages, or one per group name.
PagesLike: TypeAlias = "BufferLike | Mapping[str, BufferLike]"
