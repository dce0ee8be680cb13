"""Small value types of the public API. No I/O, no third-party imports."""

from __future__ import annotations

import enum
from collections.abc import Mapping
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


#: One buffer of whole pages, or one per group name.
PagesLike: TypeAlias = "BufferLike | Mapping[str, BufferLike]"
