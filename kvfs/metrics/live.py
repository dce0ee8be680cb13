"""What the processes of a store do now: rates over the time that really passed between two publications."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvfs.directory.liveness import ProcessInfo
from kvfs.errors import IndexUnavailableError
from kvfs.store import Store

STALE_SECONDS = 3.0  # a process publishes every second: after this long without, its rates are unknown
WINDOW_SECONDS = 15.0  # counts of namespaces are published every 5 seconds, by each process at a time of its own
SPAN_SECONDS_MIN = 4.0  # of the window, before a rate is shown


class Rates(NamedTuple):
    """Per second; None: not known yet."""

    lookups: float
    tokens_queried: float
    tokens_matched: float
    bytes_loaded: float
    bytes_written: float

    @property
    def hit_rate(self) -> float | None:
        return self.tokens_matched / self.tokens_queried if self.tokens_queried else None


class ProcessView(NamedTuple):
    info: ProcessInfo
    rates: Rates | None


class NamespaceView(NamedTuple):
    digest: str  # in hex
    label: str  # "" if the index does not know it any more
    rates: Rates | None


class View(NamedTuple):
    """One sample. ``total``: of the processes whose rates are known; None before the second publication of any."""

    used_bytes: int | None
    capacity_bytes: int
    index_state: str
    total: Rates | None
    processes: list[ProcessView]
    namespaces: list[NamespaceView]


class _Published(NamedTuple):
    at: float  # seconds
    counts: Mapping[str, int]


class LiveView:
    """Samples a store, and keeps what it needs to tell rates. The caller decides when."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._processes: dict[str, tuple[_Published, Rates | None]] = {}
        self._namespaces: dict[str, list[_Published]] = {}

    def sample(self, now: float) -> View:
        """The state at ``now``, in seconds of the clock that the processes publish."""
        stats = self._store.stats()
        infos = [info for info in self._store.processes() if info.owner != self._store.process_id]
        processes = [ProcessView(info, self._rates_of_process(info, now)) for info in infos]
        alive = {info.owner for info in infos}
        self._processes = {owner: seen for owner, seen in self._processes.items() if owner in alive}
        known = [view.rates for view in processes if view.rates is not None]
        return View(
            stats.get("used_bytes"),
            stats["capacity_bytes"],
            stats["index"]["state"],
            Rates(*map(sum, zip(*known, strict=True))) if known else None,
            processes,
            self._sample_namespaces(now),
        )

    def _rates_of_process(self, info: ProcessInfo, now: float) -> Rates | None:
        published = _Published(info.at_us / 1e6, info.counts)
        before, rates = self._processes.get(info.owner, (published, None))
        if published.at > before.at:
            rates = _rates(before, published)
        elif now - published.at > STALE_SECONDS:
            rates = None
        self._processes[info.owner] = published, rates
        return rates

    def _sample_namespaces(self, now: float) -> list[NamespaceView]:
        sums = self._store.namespace_counts()
        try:
            labels = {d.digest.hex(): d.label for d in self._store.catalog.described()} if sums else {}
        except IndexUnavailableError:
            labels = {}
        views = []
        for digest, (at_us, counts) in sums.items():
            window = [p for p in self._namespaces.get(digest, []) if now - p.at <= WINDOW_SECONDS]
            published = _Published(at_us / 1e6, counts)
            if now - published.at <= WINDOW_SECONDS and (not window or published.at > window[-1].at):
                window.append(published)
            self._namespaces[digest] = window
            span = window[-1].at - window[0].at if window else 0.0
            views.append(
                NamespaceView(
                    digest, labels.get(digest, ""), _rates(window[0], window[-1]) if span >= SPAN_SECONDS_MIN else None
                )
            )
        self._namespaces = {digest: window for digest, window in self._namespaces.items() if digest in sums}
        return views


def _rates(before: _Published, after: _Published) -> Rates:
    seconds = after.at - before.at
    gained = [max(0, after.counts.get(name, 0) - before.counts.get(name, 0)) for name in Rates._fields]
    return Rates(*(n / seconds for n in gained))
