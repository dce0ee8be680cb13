"""Counters for the engine's logs and its Prometheus endpoint."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingMetricMetadata

PREFIX = "vllm:kvfs_"
#: name -> what it counts. The scheduler counts the first nine, each worker the others for its own part of each page.
COUNTERS = {
    "requests_bypassed": "Requests that kvfs does not serve: embeddings, streaming, named items, unknown adapters.",
    "loads_failed": "Requests computed because their pages could not be loaded.",
    "loads_shortened": "Requests of which only the pages before one that could not be loaded were loaded.",
    "loads_not_worth": "Requests of which the disk would have been slower than computing: loaded in part, or not.",
    "tokens_not_worth": "Tokens that were stored, and computed because the disk would have been slower.",
    "fetches": "Requests of which pages were pulled from the bucket that hosts share.",
    "pages_fetched": "Pages pulled from that bucket for requests.",
    "fetch_seconds": "Seconds that requests waited for that bucket.",
    "lookup_seconds": "Seconds that the scheduler spent in lookups.",
    "pages_incomplete": "Pages not stored because the engine had freed some of their blocks.",
    "pages_loaded": "Pages loaded from the store.",
    "pages_not_loaded": "Pages requested and not loaded: evicted, damaged, unreadable or late.",
    "tokens_loaded_peer": "Tokens copied from the GPUs of other ranks of this host.",
    "tokens_loaded_host": "Tokens loaded from the page cache of the host.",
    "tokens_loaded_disk": "Tokens loaded at least in part from the disk.",
    "pages_stored": "Pages stored.",
    "pages_not_stored": "Pages offered and not stored.",
    "saves_refused": "Saves that were refused entirely.",
    "loads_refused": "Loads that were refused entirely.",
}


class Metrics:
    """Counters since the last ``take``. Used by one thread."""

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}

    def add(self, name: str, n: float = 1) -> None:
        if n and name in COUNTERS:
            self._counts[name] = self._counts.get(name, 0) + n

    def take(self) -> OffloadingConnectorStats | None:
        """None if nothing was counted."""
        if not self._counts:
            return None
        stats = OffloadingConnectorStats()
        for name, n in self._counts.items():
            stats.increase_counter(PREFIX + name, n)
        self._counts = {}
        return stats


def definitions() -> dict[str, OffloadingMetricMetadata]:
    return {PREFIX + name: OffloadingCounterMetadata(documentation=text) for name, text in COUNTERS.items()}
