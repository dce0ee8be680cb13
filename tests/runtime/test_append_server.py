"""The append process's side of its engine's connection."""

from __future__ import annotations

from pathlib import Path

import kvfs
from kvfs.runtime import registry
from kvfs.runtime.append_server import AppendServer
from kvfs.runtime.open_store import OpenOptions
from kvfs.system.files import Files
from tests.stores import tiny


def test_what_the_engine_is_told_of_is_noted_by_the_engine_alone(store_path: Path) -> None:
    with kvfs.open(store_path, capacity="64MiB", counted=False) as store:
        descriptor = store.namespace("model", tiny(), "1").identity.descriptor_bytes()
    child = registry.acquire(OpenOptions(str(store_path), Files(), inspect_only=True))
    server = AppendServer(child, descriptor, memoryview(b""))
    child.c.counters.add("segments_evicted", 3)
    assert server._growth() == {"segments_evicted": 3}
    registry.release(child)
    with kvfs.open(store_path, counted=False) as store:
        assert [event.what for event in store.events()] == []
