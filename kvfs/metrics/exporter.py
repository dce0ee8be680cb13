"""The metrics of a store in the formats of Prometheus: for a registry, as text, as a file, and over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from kvfs.errors import ConfigError
from kvfs.metrics.families import FAMILIES, HISTOGRAM_HELP, HISTOGRAM_NAME, Snapshot, histograms, take
from kvfs.store import Store


def collector(store: Store) -> Any:
    """A collector of ``store`` for ``prometheus_client``: ``REGISTRY.register(kvfs.metrics.collector(store))``.

    The figures are those of all processes of the store, so one process per store registers it. A scrape reads two small
    files and the index; it costs no other process anything. ConfigError without ``prometheus_client``.
    """
    return StoreCollector(store)


class StoreCollector:
    """Makes metric families of a snapshot of the store at each scrape. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._core = _prometheus("prometheus_client.core")
        self._store = store

    def describe(self) -> list[Any]:
        """Nothing: a registry then reads no store when the collector is registered."""
        return []

    def collect(self) -> Iterable[Any]:
        snapshot = take(self._store)
        for family in FAMILIES:
            yield self._family(family.kind)(family.name, family.help, list(family.labels), family.read(snapshot))
        yield self._histogram(snapshot)

    def _family(self, kind: str) -> Callable[..., Any]:
        classes = {
            "counter": self._core.CounterMetricFamily,
            "gauge": self._core.GaugeMetricFamily,
            "info": self._core.InfoMetricFamily,
        }

        def make(name: str, text: str, labels: list[str], samples: Iterable[tuple[tuple[str, ...], float]]) -> Any:
            if kind == "info":
                made = classes[kind](name, text)
                for values, _ in samples:
                    made.add_metric([], dict(zip(labels, values, strict=True)))
                return made
            made = classes[kind](name, text, labels=labels)
            for values, value in samples:
                made.add_metric(list(values), value)
            return made

        return make

    def _histogram(self, snapshot: Snapshot) -> Any:
        made = self._core.HistogramMetricFamily(HISTOGRAM_NAME, HISTOGRAM_HELP, labels=["call"])
        for one in histograms(snapshot):
            buckets = [(repr(bound), n) for bound, n in one.buckets]
            made.add_metric([one.call], [*buckets, ("+Inf", one.calls)], one.seconds)
        return made


def openmetrics(store: Store) -> str:
    """The metrics in the OpenMetrics text format."""
    text: bytes = _prometheus("prometheus_client.openmetrics.exposition").generate_latest(_registry(store))
    return text.decode()


def textfile(store: Store) -> bytes:
    """The metrics in the older text format, which node_exporter's textfile collector reads."""
    made: bytes = _prometheus("prometheus_client").generate_latest(_registry(store))
    return made


def write_textfile(store: Store, path: str) -> None:
    """Write the metrics for node_exporter's textfile collector, whose files end with ``.prom``, and rename the file.

    ConfigError for another name, or if the directory is not writable; nothing is left there then.
    """
    if not path.endswith(".prom"):
        raise ConfigError(f"the text file is {path!r}: node_exporter reads only names that end with .prom")
    try:
        _prometheus("prometheus_client").write_to_textfile(path, _registry(store))
    except OSError as exc:
        raise ConfigError(f"cannot write {path} ({exc.strerror or exc}): name a directory that is writable") from None


def available() -> bool:
    """Whether the package that formats metrics is installed."""
    import importlib.util

    return importlib.util.find_spec("prometheus_client") is not None


def serve(store: Store, host: str, port: int) -> tuple[Any, threading.Thread]:
    """Serve the metrics over HTTP: the server, which has ``server_port`` and ``shutdown()``, and its thread.

    ``host`` "": all addresses; ``port`` 0: any. OSError if the address is in use.
    """
    made: tuple[Any, threading.Thread] = _prometheus("prometheus_client").start_http_server(
        port, host or "0.0.0.0", _registry(store)
    )
    return made


def _registry(store: Store) -> Any:
    registry = _prometheus("prometheus_client").CollectorRegistry(auto_describe=False)
    registry.register(collector(store))
    return registry


def _prometheus(module: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise ConfigError("metrics need prometheus_client: pip install 'kvfs[metrics]'") from None
