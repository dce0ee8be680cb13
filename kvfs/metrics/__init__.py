"""Metrics of a store for Prometheus: ``collector(store)`` for an engine's own registry, and ``kvfs metrics``.

Needs ``prometheus_client`` (``pip install 'kvfs[metrics]'``).
"""

from kvfs.metrics.exporter import collector

__all__ = ["collector"]
