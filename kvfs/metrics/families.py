"""What is measured: the name, kind, labels and source of each metric.

All figures come from ``Store.stats()`` and ``Store.namespace_counts()``, which sum over the processes of the store, so
one exporter per store is enough. docs/metrics.md lists the families; a test compares the two, and the dashboard and the
alert rules, with this table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from kvfs.directory.shared_counters import NAMESPACE_COUNTS
from kvfs.errors import IndexUnavailableError
from kvfs.pages.identity import Described
from kvfs.store import Store
from kvfs.version import __version__

#: Values of the labels of one sample, and the sample.
Sample: TypeAlias = "tuple[tuple[str, ...], float]"
CALLS = ("match", "get", "put")
_EXPONENTS = range(5, 25)  # 32 us to 17 s
_BUCKET = re.compile(r"(match|get|put)_us_([0-9]{1,2})\Z")


@dataclass(frozen=True)
class Snapshot:
    """The figures of one scrape."""

    stats: Mapping[str, Any]
    namespaces: Mapping[str, Mapping[str, int]]  # digest in hex -> counts
    described: Mapping[str, Described] = field(default_factory=dict)  # digest in hex -> names

    @property
    def totals(self) -> Mapping[str, int]:
        totals: Mapping[str, int] = self.stats["totals"]
        return totals


class Family(NamedTuple):
    """One metric family. The kind "counter" adds ``_total`` to the name in the output."""

    name: str
    kind: str  # "counter", "gauge" or "info"
    help: str
    labels: tuple[str, ...]
    read: Callable[[Snapshot], Iterable[Sample]]


class Histogram(NamedTuple):
    """Latencies of one call: upper bounds in seconds with the number of calls below each; all calls and their time."""

    call: str
    buckets: tuple[tuple[float, int], ...]
    calls: int
    seconds: float


def take(store: Store) -> Snapshot:
    """Read the figures; without names of namespaces while the index does not answer."""
    stats = store.stats()
    counts = {digest: sums.counts for digest, sums in store.namespace_counts().items()}
    try:
        known = {d.digest.hex(): d for d in store.catalog.described()} if counts else {}
    except IndexUnavailableError:
        known = {}
    return Snapshot(stats, counts, {digest: known[digest] for digest in counts if digest in known})


def histograms(snapshot: Snapshot) -> Iterator[Histogram]:
    """Of each call, with the same buckets for all stores: they double."""
    calls = dict.fromkeys(CALLS, 0)
    buckets = {call: [0] * len(_EXPONENTS) for call in CALLS}
    for name, n in snapshot.totals.items():
        if match := _BUCKET.match(name):
            calls[match[1]] += n
            for number, exponent in enumerate(_EXPONENTS):
                buckets[match[1]][number] += n * (int(match[2]) <= exponent)
    for call in CALLS:
        bounds = tuple((2.0**exponent / 1e6, n) for exponent, n in zip(_EXPONENTS, buckets[call], strict=True))
        yield Histogram(call, bounds, calls[call], snapshot.totals.get(f"{call}_us", 0) / 1e6)


HISTOGRAM_NAME = "kvfs_call_seconds"
HISTOGRAM_HELP = "Duration of calls of the library, by call."


def _stat(key: str) -> Callable[[Snapshot], Iterable[Sample]]:
    """A figure of ``stats()``; no sample while the index does not answer."""
    return lambda s: [((), s.stats[key])] if key in s.stats else []


def _total(*names: str) -> Callable[[Snapshot], Iterable[Sample]]:
    return lambda s: [((), sum(s.totals.get(name, 0) for name in names))]


def _each(names: Mapping[str, str]) -> Callable[[Snapshot], Iterable[Sample]]:
    """One sample for each label value, of the count with the name next to it."""
    return lambda s: [((value,), s.totals.get(name, 0)) for value, name in names.items()]


def _prefixed(*prefixes: str, suffix: str = "") -> Callable[[Snapshot], Iterable[Sample]]:
    """One sample for each count whose name has one of the prefixes; the label is the rest of the name."""

    def read(snapshot: Snapshot) -> Iterator[Sample]:
        sums: dict[str, int] = {}
        for name, n in snapshot.totals.items():
            for prefix in prefixes:
                if name.startswith(prefix) and name.endswith(suffix):
                    label = name[len(prefix) : len(name) - len(suffix)]
                    sums[label] = sums.get(label, 0) + n
        return (((label,), n) for label, n in sorted(sums.items()))

    return read


def _info(snapshot: Snapshot) -> Iterable[Sample]:
    s = snapshot.stats
    return [((s["store_id"], s["path"], str(s["format"]), __version__, s["mode"].lower()), 1)]


def _segments(snapshot: Snapshot) -> Iterable[Sample]:
    return [((state,), n) for state, n in snapshot.stats.get("segments", {}).items()]


def _quotas(key: str) -> Callable[[Snapshot], Iterable[Sample]]:
    return lambda s: [
        ((name,), quota[key]) for name, quota in s.stats.get("quotas", {}).items() if quota[key] is not None
    ]


def _missed(snapshot: Snapshot) -> Iterable[Sample]:
    asked, found = (snapshot.totals.get(name, 0) for name in ("tokens_queried", "tokens_matched"))
    return [(("matched",), found), (("missed",), max(0, asked - found))]


def _transfers(snapshot: Snapshot) -> Iterator[Sample]:
    for name, n in sorted(snapshot.totals.items()):
        kind, _, state = name.partition("_")
        if kind in ("saves", "loads") and state:
            yield (kind[:-1], state), n


def _of_namespace(name: str) -> Callable[[Snapshot], Iterable[Sample]]:
    assert name in NAMESPACE_COUNTS
    return lambda s: [(_label(s, digest), counts.get(name, 0)) for digest, counts in s.namespaces.items()]


def _namespace_tiers(snapshot: Snapshot) -> Iterator[Sample]:
    for digest, counts in snapshot.namespaces.items():
        for tier in ("host", "disk"):
            yield (*_label(snapshot, digest), tier), counts.get(f"tokens_loaded_{tier}", 0)


def _namespace_results(snapshot: Snapshot) -> Iterator[Sample]:
    for digest, counts in snapshot.namespaces.items():
        asked, found = counts.get("tokens_queried", 0), counts.get("tokens_matched", 0)
        yield (*_label(snapshot, digest), "matched"), found
        yield (*_label(snapshot, digest), "missed"), max(0, asked - found)


def _label(snapshot: Snapshot, digest: str) -> tuple[str, str]:
    """Name and id. The id keeps namespaces of one name apart; the name is empty once the namespace is gone."""
    described = snapshot.described.get(digest)
    return (described.label if described is not None else "", digest[:12])


_NAMESPACE = ("namespace", "id")

FAMILIES: tuple[Family, ...] = (
    Family("kvfs_store", "info", "The store.", ("store_id", "path", "format", "version", "mode"), _info),
    Family("kvfs_capacity_bytes", "gauge", "Limit of the store's size.", (), _stat("capacity_bytes")),
    Family("kvfs_used_bytes", "gauge", "Bytes that the segments are charged with.", (), _stat("used_bytes")),
    Family("kvfs_index_bytes", "gauge", "Bytes in use in the index.", (), _stat("index_bytes")),
    Family("kvfs_segments", "gauge", "Segments by state.", ("state",), _segments),
    Family(
        "kvfs_index_ready",
        "gauge",
        "1 while the index answers, 0 during a rebuild or a fault.",
        (),
        lambda s: [((), float(s.stats["index"]["state"] == "ready"))],
    ),
    Family("kvfs_processes", "gauge", "Live processes that may write to the store.", (), _stat("processes")),
    Family(
        "kvfs_pinned_memory_bytes", "gauge", "Host memory that these processes keep pinned.", (), _stat("pinned_bytes")
    ),
    Family("kvfs_quota_used_bytes", "gauge", "Bytes charged to a quota.", ("quota",), _quotas("used_bytes")),
    Family("kvfs_quota_cap_bytes", "gauge", "Upper limit of a quota.", ("quota",), _quotas("cap_bytes")),
    Family("kvfs_quota_guaranteed_bytes", "gauge", "Guarantee of a quota.", ("quota",), _quotas("guaranteed_bytes")),
    Family("kvfs_lookups", "counter", "Lookups of prompts.", (), _total("lookups")),
    Family("kvfs_lookup_tokens", "counter", "Tokens of looked-up prompts, by result.", ("result",), _missed),
    Family(
        "kvfs_loaded_tokens",
        "counter",
        "Tokens restored and not computed, by the slowest tier of their pages.",
        ("tier",),
        _each({"peer": "tokens_loaded_peer", "host": "tokens_loaded_host", "disk": "tokens_loaded_disk"}),
    ),
    Family("kvfs_loaded_bytes", "counter", "Bytes of verified pages handed to engines.", (), _total("bytes_loaded")),
    Family("kvfs_written_bytes", "counter", "Bytes of pages written to segments.", (), _total("bytes_written")),
    Family(
        "kvfs_pages",
        "counter",
        "Pages offered and accepted, by result.",
        ("result",),
        _each({"stored": "pages_stored", "skipped": "pages_skipped", "in_flight": "pages_in_flight"}),
    ),
    Family("kvfs_declined_pages", "counter", "Pages not stored, by reason.", ("reason",), _prefixed("pages_declined_")),
    Family(
        "kvfs_removed_segments",
        "counter",
        "Segments evicted to make room, expired, or missing.",
        ("reason",),
        _each({"evicted": "segments_evicted", "expired": "segments_expired", "missing": "segments_missing"}),
    ),
    Family("kvfs_relocated_pages", "counter", "Hot pages copied out of evicted segments.", (), _total("pages_carried")),
    Family("kvfs_purged_pages", "counter", "Pages removed by purges.", (), _total("pages_purged")),
    Family(
        "kvfs_faults",
        "counter",
        "Pages with wrong checksums, and input or output that failed, by kind.",
        ("kind",),
        _each(
            {
                "corrupt_page": "pages_corrupt",
                "read": "read_errors",
                "write": "write_errors",
                "sync": "sync_errors",
                "disk_full": "disk_full",
                "evict": "evict_errors",
                "relocate": "carry_errors",
                "adopt": "adopt_errors",
                "import": "import_errors",
            }
        ),
    ),
    Family(
        "kvfs_index_unavailable",
        "counter",
        "Lookups and saves that the index did not answer in time, by reason.",
        ("reason",),
        _prefixed("lookup_unavailable_", "declined_index_"),
    ),
    Family(
        "kvfs_rebuilds",
        "counter",
        "Rebuilds of the index, by result.",
        ("result",),
        _each({"done": "rebuilds", "failed": "rebuild_failed"}),
    ),
    Family(
        "kvfs_task_failures",
        "counter",
        "Background tasks that failed.",
        ("task",),
        _prefixed("task_", suffix="_failed"),
    ),
    Family("kvfs_transfers", "counter", "Asynchronous saves and loads, by final state.", ("kind", "state"), _transfers),
    Family(
        "kvfs_bundles",
        "counter",
        "Bundles of the drop folder, by result.",
        ("result",),
        _each({"adopted": "bundles_adopted", "refused": "bundles_refused"}),
    ),
    Family(
        "kvfs_settings_changes",
        "counter",
        "Changes of kvfs.toml that processes noticed, by result.",
        ("result",),
        _each({"applied": "settings_taken_up", "refused": "settings_refused"}),
    ),
    Family("kvfs_namespace_lookups", "counter", "Lookups of prompts.", _NAMESPACE, _of_namespace("lookups")),
    Family(
        "kvfs_namespace_lookup_tokens",
        "counter",
        "Tokens of looked-up prompts, by result.",
        (*_NAMESPACE, "result"),
        _namespace_results,
    ),
    Family(
        "kvfs_namespace_loaded_tokens",
        "counter",
        "Tokens restored and not computed, by tier.",
        (*_NAMESPACE, "tier"),
        _namespace_tiers,
    ),
    Family(
        "kvfs_namespace_loaded_bytes",
        "counter",
        "Bytes of verified pages handed to engines.",
        _NAMESPACE,
        _of_namespace("bytes_loaded"),
    ),
    Family(
        "kvfs_namespace_written_bytes", "counter", "Bytes of pages written.", _NAMESPACE, _of_namespace("bytes_written")
    ),
    Family("kvfs_namespace_stored_pages", "counter", "Pages stored.", _NAMESPACE, _of_namespace("pages_stored")),
    Family(
        "kvfs_namespace_declined_pages", "counter", "Pages not stored.", _NAMESPACE, _of_namespace("pages_declined")
    ),
)
