"""How long calls took, for each kind of fault: histograms that processes write down and a run adds up."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

STEP = math.log(1.1)  # a bucket is 10 % wide
LEAST_SECONDS = 1e-6


class Row(NamedTuple):
    """Seconds; a percentile is the upper end of its bucket, the maximum is exact."""

    fault: str
    call: str
    calls: int
    p50: float
    p999: float
    most: float


class Times:
    """Seconds of calls by kind of fault and name of the call."""

    def __init__(self) -> None:
        self._buckets: dict[str, Counter[int]] = {}
        self._most: dict[str, float] = {}

    def add(self, fault: str, call: str, seconds: float) -> None:
        key = f"{fault}|{call}"
        bucket = max(0, math.ceil(math.log(max(seconds, LEAST_SECONDS) / LEAST_SECONDS) / STEP))
        self._buckets.setdefault(key, Counter())[bucket] += 1
        self._most[key] = max(self._most.get(key, 0.0), seconds)

    def packed(self) -> dict[str, Any]:
        """For JSON."""
        return {key: [round(self._most[key], 6), dict(counts)] for key, counts in self._buckets.items()}

    def merge(self, packed: Mapping[str, Any]) -> None:
        for key, (most, counts) in packed.items():
            self._buckets.setdefault(key, Counter()).update({int(bucket): n for bucket, n in counts.items()})
            self._most[key] = max(self._most.get(key, 0.0), most)

    def rows(self) -> Iterator[Row]:
        for key, counts in sorted(self._buckets.items()):
            fault, _, call = key.partition("|")
            p50, p999 = (min(_at(counts, share), self._most[key]) for share in (0.5, 0.999))
            yield Row(fault, call, counts.total(), p50, p999, self._most[key])

    def lines(self) -> Iterator[str]:
        """A table in text: milliseconds."""
        for row in self.rows():
            yield (
                f"time {row.fault} | {row.call} | {row.calls:,} | {row.p50 * 1e3:.2f} | {row.p999 * 1e3:.1f} | "
                f"{row.most * 1e3:.1f}"
            )


def _at(counts: Counter[int], share: float) -> float:
    """The upper end of the bucket in which this share of all calls is reached."""
    left = math.ceil(share * counts.total())
    for bucket in sorted(counts):
        left -= counts[bucket]
        if left <= 0:
            return LEAST_SECONDS * math.exp(STEP * bucket)
    return 0.0
