"""The L2 adapter of LMCache over memory and keys of its kind; tests/lmcache has LMCache itself."""

from __future__ import annotations

import logging
import random
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvfs.errors import ConfigError
from kvfs.integrations.lmcache import kinds, locks, objects, tasks
from kvfs.integrations.lmcache.kinds import stored_bytes
from kvfs.integrations.lmcache.settings import settings_of
from kvfs.integrations.lmcache.tasks import Task, TaskQueue
from kvfs.namespace import Namespace
from kvfs.native import library
from kvfs.system.files import Files
from kvfs.testing import EngineContract, Fault, FaultyFiles
from kvfs.types import PutResult
from tests.integrations.lmcache_objects import (
    BF16,
    CHUNK,
    FP16,
    PARAMS,
    SECONDS,
    FakeEngine,
    Key,
    Memory,
    keys_of,
    open_objects,
)
from tests.stores import corrupt

NBYTES = 8192


class TestObjects(EngineContract):
    page_tokens = CHUNK
    page_bytes = NBYTES

    def start(self, path: Path, files: Files | None = None) -> FakeEngine:
        return FakeEngine(open_objects(path, files), NBYTES)


def some(count: int, nbytes: int = NBYTES, seed: int = 1, **fields: Any) -> tuple[list[Key], list[bytes]]:
    draw = random.Random(seed)
    return [Key(draw.randbytes(32), **fields) for _ in range(count)], [draw.randbytes(nbytes) for _ in range(count)]


# ---------------------------------------------------------------- keys and objects


def test_ranks_groups_salts_and_models_are_kept_apart(memory_path: Path) -> None:
    server = open_objects(memory_path / "store")
    same = bytes(32)
    keys = [
        Key(same), Key(same, kv_rank=5), Key(same, object_group_id=1), Key(same, cache_salt="tenant"),
        Key(same, model_name="other"), Key(same, kv_rank=1, object_group_id=0), Key(same, kv_rank=0, object_group_id=1),
    ]  # fmt: skip
    pages = [bytes([n]) * NBYTES for n in range(len(keys))]
    for key, page in zip(keys, pages, strict=True):
        assert server.look([key]) == []
        assert server.store([key], [Memory(page)]).good
    memory = [Memory(room=NBYTES) for _ in keys]
    assert server.load(keys, memory) == list(range(len(keys)))
    assert [m.content for m in memory] == pages
    server.close()


def test_an_object_of_another_dtype_is_not_loaded(memory_path: Path) -> None:
    """Bytes of bfloat16 are no KV for an engine that computes in float16; the key says neither."""
    server = open_objects(memory_path / "store")
    (key,), (page,) = some(1)
    server.store([key], [Memory(page, dtype=BF16)])
    other, same = Memory(room=NBYTES, dtype=FP16), Memory(room=NBYTES, dtype=BF16)
    server.look([key], other.layout)
    assert server.load([key], [other]) == [] and other.content == bytes(NBYTES)
    assert server.load([key], [same]) == [0] and same.content == page
    server.close()


def test_sizes_of_a_serializer_are_found_after_a_restart_and_by_another_server(memory_path: Path) -> None:
    """A lookup is told the layout before the serializer, which made 5,000 bytes of 8,192."""
    first, second = open_objects(memory_path / "store"), open_objects(memory_path / "store")
    keys, pages = some(5, 5000)
    whole = Memory(room=NBYTES, dtype=BF16)
    assert second.look(keys, whole.layout) == []
    first.store(keys, [Memory(page) for page in pages])
    end = time.monotonic() + SECONDS
    while second.look(keys, whole.layout) != [0, 1, 2, 3, 4] and time.monotonic() < end:
        time.sleep(0.05)  # kinds are read again once a second
    memory = [Memory(room=5000) for _ in keys]
    assert second.load(keys, memory) == [0, 1, 2, 3, 4] and [m.content for m in memory] == pages
    first.close()
    second.close()


def test_objects_shorter_than_their_buffer_are_stored_in_a_bounded_number_of_sizes(memory_path: Path) -> None:
    server = open_objects(memory_path / "store")
    sizes = [1, 511, 512, 513, 4000, 8191, 8192]
    keys, _ = some(len(sizes))
    memory, pages = [Memory(room=NBYTES) for _ in sizes], [random.Random(n).randbytes(n) for n in sizes]
    for one, page in zip(memory, pages, strict=True):
        one.fill(page)
    done = server.store(keys, memory)
    assert done.good and done.nbytes == sum(sizes) and list(done.sizes) == sizes
    assert {k.nbytes for k in server.objects._kinds.known("org/model")} == {512, 1024, 4096, 8192}
    assert len({stored_bytes(n, NBYTES) for n in range(1, NBYTES + 1)}) == kinds.SIZES
    out = [Memory(b"\xa5" * NBYTES) for _ in sizes]
    assert server.look(keys) == server.load(keys, out) == list(range(len(sizes)))
    for one, page in zip(out, pages, strict=True):
        padded = stored_bytes(len(page), NBYTES)
        rest = bytes(padded - len(page)) + b"\xa5" * (NBYTES - padded)
        assert one.content == page + rest, "padding is zeros, not what was stored before"
    server.close()


def test_an_object_that_no_segment_can_hold_fails_alone(memory_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = open_objects(memory_path / "store", capacity="16MiB")
    with caplog.at_level(logging.WARNING, "lmcache.kvfs"):
        keys, pages = some(1, 15 << 20)
        assert not server.store(keys, [Memory(page) for page in pages]).good
        assert not server.store([Key(b"empty")], [Memory(b"")]).good
    assert "15728640" in caplog.text.replace(",", "") and "0 bytes" in caplog.text
    assert server.look(keys, Memory(room=15 << 20).layout) == []
    keys, pages = some(2)
    assert server.store(keys, [Memory(page) for page in pages]).good
    server.close()


def test_a_key_twice_in_one_task(memory_path: Path) -> None:
    server = open_objects(memory_path / "store")
    (key,), (page,) = some(1)
    done = server.store([key, key], [Memory(page), Memory(page)])
    assert done.good and done.keys == (key,)
    assert server.look([key, key]) == [0, 1]
    memory = [Memory(room=NBYTES), Memory(room=NBYTES)]
    assert server.load([key, key], memory) == [0, 1] and [m.content for m in memory] == [page, page]
    server.unlock([key])
    assert len(server.objects.locks) == 1
    server.unlock([key])
    assert not len(server.objects.locks)
    server.close()


def test_ten_thousand_keys_are_looked_up_by_one_task(memory_path: Path) -> None:
    server = open_objects(memory_path / "store", capacity="256MiB")
    keys, pages = some(300, 512)
    server.store(keys, [Memory(page) for page in pages])
    absent, _ = some(9_700, 1, seed=2)
    mixed = [*absent[:5_000], *keys, *absent[5_000:]]
    assert server.look(mixed) == list(range(5_000, 5_300))
    server.unlock(keys)
    assert not len(server.objects.locks)
    server.close()


def test_objects_are_loaded_in_any_order_with_holes(memory_path: Path) -> None:
    server = open_objects(memory_path / "store")
    keys, pages = some(40)
    server.store(keys[:35], [Memory(page) for page in pages[:35]])
    assert server.look(keys) == list(range(35))
    wanted = [39, 7, 3, 34, 0, 8, 9]
    memory = [Memory(room=NBYTES) for _ in wanted]
    assert server.load([keys[n] for n in wanted], memory) == [1, 2, 3, 4, 5, 6]
    assert [m.content for m in memory[1:]] == [pages[n] for n in wanted[1:]]
    server.close()


# ---------------------------------------------------------------- locks


def test_a_locked_object_is_loaded_after_it_was_evicted(memory_path: Path) -> None:
    server = open_objects(memory_path / "store", capacity="16MiB")
    keys, pages = some(20, 100_000)
    server.store(keys, [Memory(page) for page in pages])
    assert server.look(keys) == list(range(20))
    server.objects.store.gc(0)
    other = open_objects(memory_path / "store")
    left = other.look(keys)
    assert len(left) < 20, "some are evicted"
    other.close()
    memory = [Memory(room=100_000) for _ in keys]
    assert server.load(keys, memory) == list(range(20)) and [m.content for m in memory] == pages
    server.unlock(keys)
    assert server.look(keys) == left
    server.close()


def test_locks_are_bounded(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "LOCKS_MAX", 8)
    server = open_objects(memory_path / "store")
    keys, pages = some(20)
    server.store(keys, [Memory(page) for page in pages])
    for _ in range(3):
        assert len(server.look(keys)) == 20
    assert len(server.objects.locks) == 8
    memory = [Memory(room=NBYTES) for _ in keys]
    assert server.load(keys, memory) == list(range(20)), "a key without a lock is looked up again"
    server.unlock(keys * 4)
    assert not len(server.objects.locks)
    server.close()


def test_deleted_objects_are_gone_for_all(memory_path: Path) -> None:
    server, other = open_objects(memory_path / "store"), open_objects(memory_path / "store")
    keys, pages = some(6)
    server.store(keys, [Memory(page) for page in pages])
    assert sorted(server.objects.delete([*keys[:3], Key(b"absent")]), key=repr) == sorted(
        [(key, NBYTES) for key in keys[:3]], key=repr
    )
    assert server.look(keys) == other.look(keys, Memory(room=NBYTES).layout) == [3, 4, 5]
    server.close()
    other.close()


# ---------------------------------------------------------------- every task ends


def test_a_task_ends_at_its_deadline_with_what_it_has_and_its_memory_is_left_alone() -> None:
    ended, go, reached = threading.Semaphore(0), threading.Event(), threading.Event()
    queue, memory = TaskQueue[list[int]]("load", 1, 0.05, ended.release), bytearray(2)

    def work(task: Task[list[int]]) -> None:
        for n in range(2):
            with task.alive() as alive:
                if alive:
                    memory[n] = 1
                    task.value.append(n)
            if n == 0:
                reached.set()
                go.wait(SECONDS)

    number = queue.submit(work, [])
    assert reached.wait(SECONDS)
    waiting = queue.submit(work, [])
    time.sleep(0.06)  # longer than its deadline
    queue.sweep()
    assert ended.acquire(timeout=SECONDS) and ended.acquire(timeout=SECONDS)
    assert queue.take_all() == {number: [0], waiting: []}
    go.set()
    queue.close(SECONDS)
    assert memory == b"\x01\x00" and not ended.acquire(timeout=0), "a task ends once"


def test_a_full_or_closed_queue_ends_tasks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "QUEUE_MAX", 3)
    ended, go = threading.Semaphore(0), threading.Event()
    queue = TaskQueue[str]("store", 1, SECONDS, ended.release)
    began = threading.Event()

    def work(task: Task[str]) -> None:
        began.set()
        go.wait(SECONDS)
        task.value = "done"

    first = queue.submit(work, "failed")
    assert began.wait(SECONDS)
    numbers = [queue.submit(work, "failed") for _ in range(4)]
    assert ended.acquire(timeout=0) and queue.take(numbers[3]) == "failed"
    go.set()
    queue.close(SECONDS)
    results = {number: queue.take(number) for number in (first, *numbers[:3])}
    assert results[first] == "done" and set(results.values()) <= {"done", "failed"}
    assert queue.take(queue.submit(work, "failed")) == "failed"


def test_a_task_that_raises_ends(caplog: pytest.LogCaptureFixture) -> None:
    ended = threading.Semaphore(0)
    queue = TaskQueue[str]("store", 1, SECONDS, ended.release)

    def work(task: Task[str]) -> None:
        raise RuntimeError("a bug")

    number = queue.submit(work, "failed")
    assert ended.acquire(timeout=SECONDS) and queue.take(number) == "failed" and "a bug" in caplog.text
    queue.close(SECONDS)


class HangingFiles(FaultyFiles):
    """Delays last until ``over`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.over = threading.Event()

    def sleep(self, seconds: float) -> None:
        if seconds < SECONDS:
            super().sleep(seconds)
        else:
            self.over.wait(2 * SECONDS)

    def hang(self, kind: str) -> None:
        self.arm(Fault(kind=kind, action="delay", seconds=SECONDS, persistent=True))

    def answer(self) -> None:
        self.arm()
        self.over.set()


@pytest.mark.parametrize("kind", ["pwritev", "preadv"])
def test_a_disk_that_hangs_ends_no_task_late_and_touches_no_memory(
    memory_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "PIECE_BYTES", NBYTES)  # several threads store the parts of a task
    keys, pages = some(6)
    patient = open_objects(memory_path / "store")
    assert patient.store(keys[:3], [Memory(page) for page in pages[:3]]).good
    patient.close()
    files = HangingFiles()
    server = open_objects(memory_path / "store", files, store_seconds=0.3, load_seconds=0.3, threads=1)
    files.hang(kind)
    memory = [Memory(b"\xa5" * NBYTES) for _ in keys]
    if kind == "pwritev":
        stored = [Memory(page) for page in pages[3:]]
        done = [server.objects.submit_store(keys[3:], stored) for _ in range(3)]
        for _ in done:
            assert server.ended["store"].acquire(timeout=SECONDS), "results do not wait for the disk"
        assert not any(result.good for result in server.objects.stores.take_all().values())
        for one in stored:  # LMCache uses the memory for something else
            one.fill(b"\xff" * NBYTES)
        files.answer()
        server.close()
        server = open_objects(memory_path / "store")
        found = server.look(keys)
        loaded = server.load(keys, memory)
        assert loaded == found and all(memory[n].content == pages[n] for n in loaded)
        server.close()
    else:
        found = server.load(keys[:3], memory[:3])
        before = [m.content for m in memory]
        files.answer()
        server.close()
        assert [m.content for m in memory] == before
        assert all(memory[n].content == pages[n] for n in found)


@pytest.mark.parametrize("nbytes", [NBYTES, objects.PIECE_BYTES + 4096])
def test_objects_in_the_page_cache_are_loaded_without_memory_of_the_adapter(
    memory_path: Path, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library.loaded() is None:
        pytest.skip("the native library is not built")
    server = open_objects(memory_path / "store", capacity="256MiB")
    keys, pages = some(5, nbytes)
    assert server.store(keys, [Memory(page) for page in pages]).good
    monkeypatch.setattr(objects, "AT_ONCE_BYTES", 2 * nbytes)
    server.objects._pieces._free.clear()
    memory = [Memory(room=nbytes + 100) for _ in keys]
    for one in memory:
        one.metadata.shapes = [(nbytes,)]  # its buffer is longer than the object
    assert server.look(keys) == server.load(keys, memory) == list(range(5))
    assert [m.content for m in memory] == [page + bytes(100) for page in pages]
    assert not server.objects._pieces._free
    server.close()


def test_a_task_that_has_ended_loads_nothing_out_of_the_page_cache(memory_path: Path) -> None:
    server = open_objects(memory_path / "store")
    keys, pages = some(3)
    assert server.store(keys, [Memory(page) for page in pages]).good
    memory = [Memory(b"\xa5" * NBYTES) for _ in keys]
    task = Task[objects.Keys](0, lambda task: None, objects.Keys(3), 0.0)
    assert server.look(keys) == [0, 1, 2] and task.end()
    server.objects._load(task, keys, memory)
    assert not task.value.numbers and all(m.content == b"\xa5" * NBYTES for m in memory)
    server.close()


def test_a_damaged_object_is_noted_once_and_the_others_are_loaded(memory_path: Path) -> None:
    server = open_objects(memory_path / "store")
    keys, pages = some(9)
    assert server.store(keys, [Memory(page) for page in pages]).good
    corrupt(memory_path / "store", pages[4])
    memory = [Memory(room=NBYTES) for _ in keys]
    assert server.look(keys) == list(range(9))
    rest = [n for n in range(9) if n != 4]
    assert server.load(keys, memory) == rest and all(memory[n].content == pages[n] for n in rest)
    assert server.objects.store.stats()["counters"]["pages_corrupt"] == 1
    server.unlock(keys)
    assert server.look(keys) == rest
    server.close()


@pytest.mark.parametrize("seed", range(6))
def test_all_tasks_end_on_a_disk_that_fails_at_random(memory_path: Path, seed: int) -> None:
    files, draw = FaultyFiles(seed=seed), random.Random(seed)
    server = open_objects(memory_path / "store", files)
    keys, pages = some(30, seed=seed)
    for round_ in range(8):
        files.arm(Fault(nth=files.total + draw.randint(1, 20), action=draw.choice(["error", "torn", "flip"])))
        part = slice(draw.randint(0, 15), draw.randint(16, 30))
        server.store(keys[part], [Memory(page) for page in pages[part]])
        found = server.look(keys)
        memory = [Memory(room=NBYTES) for _ in found]
        loaded = server.load([keys[n] for n in found], memory)
        assert all(memory[n].content == pages[found[n]] for n in loaded), round_
        server.unlock([keys[n] for n in found])
        assert not len(server.objects.locks)
    files.arm()
    server.close()


def test_a_close_ends_tasks_under_way(memory_path: Path) -> None:
    server = open_objects(memory_path / "store")
    keys, pages = some(200, 50_000)
    numbers = [server.objects.submit_store(keys[n : n + 20], [Memory(p) for p in pages[n : n + 20]]) for n in (0, 20)]
    server.close()
    assert set(server.objects.stores.take_all()) == set(numbers)
    server.close()
    assert not server.store(keys, [Memory(page) for page in pages]).good, "a task after the close ends, too"


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"path": ""}, "path"),
        ({"weights_id": ""}, "weights_id"),
        ({"pth": "x"}, "'pth': pass some of"),
        ({"chunk_tokens": 100}, "multiple of 16"),
        ({"threads": 0}, "1 to 64"),
        ({"store_seconds": 0}, "above 0"),
        ({"load_seconds": float("nan")}, "above 0"),
        ({"capacity": "much"}, "capacity in adapter_params"),
        ({"ttl": "soon"}, "ttl in adapter_params"),
        ({"codec": "gzip"}, "gzip"),
    ],
)
def test_bad_settings_name_the_value(memory_path: Path, params: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings_of({"path": str(memory_path), **PARAMS, **params})
    assert says in str(caught.value)
    assert not list(memory_path.iterdir())


def test_lists_of_different_lengths_are_refused(memory_path: Path) -> None:
    server = open_objects(memory_path / "store")
    with pytest.raises(ConfigError, match="1 objects for 2 keys"):
        server.objects.submit_store(keys_of(list(range(512))), [Memory(b"x")])
    server.close()


def test_parts_of_a_large_store_go_to_lanes_that_no_other_part_uses(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "PIECE_BYTES", NBYTES)
    monkeypatch.setattr(objects, "LANES", 3)
    server, put, used = open_objects(memory_path / "store"), Namespace.put_keys, list[int]()
    all_there = threading.Barrier(3)

    def noting(space: Namespace, names: Any, pages: Any, *, lane: int, **how: Any) -> PutResult:
        used.append(lane)
        if len(used) <= 3:
            all_there.wait(SECONDS)  # three parts are under way at once
        return put(space, names, pages, lane=lane, **how)

    monkeypatch.setattr(Namespace, "put_keys", noting)
    keys, pages = some(6)
    done = server.store(keys, [Memory(page) for page in pages])
    assert done.good and done.keys == tuple(keys)
    assert sorted(used[:3]) == [0, 1, 2] and set(used) == {0, 1, 2}
    del used[:]
    more, pages = some(1, seed=2)
    used += [0, 0, 0]
    assert server.store(more, [Memory(page) for page in pages]).good
    assert len(used) == 4 and used[3] in (0, 1, 2), "a lane that has an active segment"
    server.close()


def test_without_a_free_lane_the_first_one_is_shared() -> None:
    lanes = objects.Lanes()
    with ExitStack() as stack:
        held = [stack.enter_context(lanes.one()) for _ in range(objects.LANES + 2)]
    assert held == [*range(objects.LANES), 0, 0]
    with lanes.one() as again:
        assert again == 0


def test_pieces_hold_whole_objects(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects larger than a piece, and tasks of many pieces."""
    monkeypatch.setattr(objects, "PIECE_BYTES", 3 * NBYTES)
    monkeypatch.setattr(objects, "SLICE_KEYS", 7)
    server = open_objects(memory_path / "store")
    for nbytes in (NBYTES, 4 * NBYTES):
        keys, pages = some(20, nbytes, seed=nbytes)
        assert server.store(keys, [Memory(page) for page in pages]).good
        memory = [Memory(room=nbytes) for _ in keys]
        assert server.look(keys) == server.load(keys, memory) == list(range(20))
        assert [m.content for m in memory] == pages
    server.close()
