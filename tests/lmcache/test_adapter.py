"""The L2 adapter under LMCache's own StorageManager, controllers, serializers and benchmark, on a CPU."""

from __future__ import annotations

import functools
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

from kvfs.errors import ConfigError
from kvfs.integrations.lmcache import objects as module
from kvfs.integrations.lmcache.adapter import KvfsL2Adapter
from kvfs.store import open_store
from kvfs.system.files import Files
from kvfs.testing import EngineContract, Fault, FaultyFiles
from tests.integrations.lmcache_objects import Memory
from tests.lmcache.server import CHUNK, SECONDS, Manager, content_of, keys_of, spec_of

ROOT = Path(__file__).resolve().parents[2]
NBYTES = 32768


def start(path: Path, files: Files | None = None, **params: Any) -> Manager:
    before = module.open_store
    module.open_store = functools.partial(open_store, files=files) if files is not None else open_store  # type: ignore[assignment]
    try:
        return Manager(spec_of(path, **params), NBYTES)
    finally:
        module.open_store = before


class RealEngine:
    """A StorageManager as the contract uses an engine; each lookup and load begins with an empty L1."""

    def __init__(self, manager: Manager) -> None:
        self._manager, self._closed = manager, False

    def put(self, tokens: Sequence[int], pages: Sequence[bytes], first: int = 0) -> int:
        self._manager.clear_l1()
        keys = keys_of(tokens)[first : first + len(pages)]
        return self._manager.write(keys, pages)

    def lookup(self, tokens: Sequence[int]) -> int:
        self._manager.clear_l1()
        return self._manager.stored(keys_of(tokens))

    def get(self, tokens: Sequence[int], count: int) -> list[bytes | None]:
        self._manager.clear_l1()
        found = self._manager.prefetch(keys_of(tokens)[:count])
        assert self._manager.locks() == (0, 0, 0)
        return [*found, *[None] * (count - len(found))]

    def counters(self) -> Mapping[str, int]:
        return dict(self._manager.adapter._objects.store.stats()["counters"])

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._manager.close()


class TestStorageManager(EngineContract):
    page_tokens = CHUNK
    page_bytes = NBYTES

    def start(self, path: Path, files: Files | None = None) -> RealEngine:
        return RealEngine(start(path, files))


def prompt(seed: int, count: int) -> tuple[list[Any], list[bytes]]:
    tokens = random.Random(seed).choices(range(32_000), k=count * CHUNK)
    return keys_of(tokens), [content_of(seed, n, NBYTES) for n in range(count)]


def test_the_adapter_is_what_lmcache_expects(memory_path: Path) -> None:
    adapter = KvfsL2Adapter(json.loads(spec_of(memory_path / "store"))["adapter_params"])
    assert isinstance(adapter, L2AdapterInterface) and not KvfsL2Adapter.__abstractmethods__
    fds = {adapter.get_store_event_fd(), adapter.get_lookup_and_lock_event_fd(), adapter.get_load_event_fd()}
    assert len(fds) == 3
    assert not adapter.supports_global_eviction and adapter.get_usage().usage_fraction == -1.0
    status = adapter.report_status()
    assert status["is_healthy"] and status["capacity_bytes"] == 256 << 20 and json.dumps(status)
    adapter.close()
    adapter.close()


def test_bad_parameters_fail_the_start(memory_path: Path) -> None:
    with pytest.raises(ConfigError, match="weights_id"):
        start(memory_path / "store", weights_id="")
    assert not (memory_path / "store").exists()


@pytest.mark.parametrize("in_flight", [1, 4])
def test_lmcache_verifies_its_own_benchmark(memory_path: Path, in_flight: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lmcache.cli.main", "bench", "l2", "--l2-adapter", spec_of(memory_path / "store"),
         "--num-keys", "16", "--data-size-kb", "256", "--rounds", "2", "--in-flight", str(in_flight),
         "--no-skip-verify", "--lookup-max-hit-rate", "0.5"],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"All {32 * in_flight} keys data verified OK|data verified OK", done.stdout), done.stdout
    counts = [int(n) for n in re.findall(r"Total success: +(\d+)", done.stdout)]
    assert counts[0] == counts[2] == 32 * in_flight and 0 < counts[1] <= 32 * in_flight


@pytest.mark.parametrize("seed", range(10))
def test_every_hit_after_kill_9_is_equal(memory_path: Path, seed: int) -> None:
    """The server dies at a random point of its stores. What was reported as stored is there, and nothing else is."""
    draw, path = random.Random(seed), memory_path / "store"
    keys, pages = prompt(seed, 64)
    for _ in range(2):
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.lmcache.server", str(path), str(seed), "64"], cwd=ROOT,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert server.stdout is not None and server.stdout.readline() == "ready\n"
        time.sleep(draw.uniform(0.0, 0.8))
        server.send_signal(signal.SIGKILL)
        told = [int(line) for line in server.stdout.read().splitlines()]
        server.wait()
        manager = start(path)
        found = manager.prefetch(keys)
        assert found == pages[: len(found)] and len(found) >= max(told, default=0)
        assert manager.locks() == (0, 0, 0)
        manager.close()


def test_two_servers_share_one_store(memory_path: Path) -> None:
    path = memory_path / "store"
    first, second = start(path), start(path)
    keys, pages = prompt(1, 40)
    assert first.write(keys[:20], pages[:20]) == 20
    assert second.prefetch(keys) == pages[:20]
    assert second.write(keys[20:], pages[20:]) == 20
    assert first.prefetch(keys) == pages
    both = [threading.Thread(target=m.write, args=prompt(2, 40)) for m in (first, second)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    stored = first.adapter._objects.store.stats()["counters"]["pages_stored"]  # of both: they are in one process
    assert stored == 20 + 20 + 40, "an object that both have is written once"
    for m in (first, second):
        m.clear_l1()
        assert m.prefetch(prompt(2, 40)[0]) == prompt(2, 40)[1] and m.locks() == (0, 0, 0)
        m.close()


@pytest.mark.parametrize("serde", ["fp8", "aesgcm"])
def test_serialized_objects_are_found_after_a_restart(memory_path: Path, serde: str) -> None:
    """Lookups are told the layout before the serializer, stores and loads the one behind it."""
    settings: dict[str, Any] = {"type": serde}
    if serde == "aesgcm":
        (memory_path / "key").write_bytes(bytes(range(32)))
        settings |= {"master_key_path": str(memory_path / "key")}
    keys, pages = prompt(3, 12)
    if serde == "fp8":  # rounds: numbers of bfloat16 that it has
        draw = random.Random(3)
        words = [b"\x80\x3f", b"\x00\xc0", b"\x00\x3f", b"\x00\x00"]  # 1, -2, 0.5, 0
        pages = [b"".join(draw.choices(words, k=NBYTES // 2)) for _ in keys]
    spec = spec_of(memory_path / "store", serde=settings)
    writer = Manager(spec, NBYTES)
    writer.write(keys, pages)
    sizes = {kind.nbytes for kind in writer.adapter._objects._kinds.known("org/model")}
    assert any(nbytes != NBYTES for nbytes in sizes)
    writer.close()
    reader = Manager(spec, NBYTES)
    assert reader.prefetch(keys) == pages and reader.locks() == (0, 0, 0)
    reader.close()


@pytest.mark.parametrize("seed", range(3))
def test_a_failing_disk_leaves_no_lock(memory_path: Path, seed: int) -> None:
    files, draw = FaultyFiles(seed=seed), random.Random(seed)
    manager = start(memory_path / "store", files)
    keys, pages = prompt(seed, 24)
    for _ in range(6):
        nth, action = files.total + draw.randint(1, 15), draw.choice(["error", "flip", "torn"])
        files.arm(Fault(nth=nth, action=action, persistent=draw.random() < 0.3))
        manager.clear_l1()
        manager.write(keys, pages)
        manager.clear_l1()
        found = manager.prefetch(keys)
        assert found == pages[: len(found)]
        assert manager.locks() == (0, 0, 0)
    files.arm()
    manager.clear_l1()
    assert manager.write(keys, pages) == 24, "a later store succeeds"
    manager.close()


def test_a_hung_disk_ends_stores_and_prefetches_at_their_deadline(memory_path: Path) -> None:
    files = FaultyFiles()
    manager = start(memory_path / "store", files, store_seconds=0.3, load_seconds=0.3)
    keys, pages = prompt(7, 8)
    assert manager.write(keys[:4], pages[:4]) == 4
    manager.clear_l1()
    for kind in ("preadv", "pwritev"):
        files.arm(Fault(kind=kind, action="delay", seconds=1.5, persistent=True))
        began = time.monotonic()
        found = manager.prefetch(keys[:4]) if kind == "preadv" else []
        if kind == "pwritev":
            manager.write(keys[4:], pages[4:])
        assert found == pages[: len(found)] and time.monotonic() - began < 1.4
        assert manager.locks() == (0, 0, 0)
        files.arm()
    manager.close()


def test_a_bitmap_has_a_bit_for_each_key(memory_path: Path) -> None:
    manager = start(memory_path / "store")
    keys, pages = prompt(8, 3)
    manager.write([keys[0], keys[2]], [pages[0], pages[2]])
    task = manager.adapter.submit_load_task(keys, [Memory(room=NBYTES) for _ in keys])
    end = time.monotonic() + SECONDS
    while (bitmap := manager.adapter.query_load_result(task)) is None and time.monotonic() < end:
        time.sleep(0.01)
    assert isinstance(bitmap, Bitmap) and len(bitmap) == 3, "of another layout: nothing is loaded"
    assert manager.adapter.query_load_result(task) is None and bitmap.popcount() == 0
    manager.adapter.delete([keys[0]])
    assert manager.stored(keys[:1]) == 0
    manager.close()
    assert os.listdir(memory_path / "store")
