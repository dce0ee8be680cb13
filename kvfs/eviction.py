"""Placeholder of the policy: whole segments by the mean age of their pages. Replaced by the measured policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class SegmentUse(NamedTuple):
    number: int
    nbytes: int
    stamps: Sequence[int]
    record_bytes: Sequence[int]
    chunk_index: Sequence[int]


class Plan(NamedTuple):
    victim: int
    carry: tuple[int, ...] = ()


def plan(segments: Sequence[SegmentUse], now_us: int) -> Plan | None:
    """The segment whose pages were used longest ago on average."""
    if not segments:
        return None
    return Plan(min(segments, key=lambda s: (sum(s.stamps) / max(1, len(s.stamps)), s.number)).number)
