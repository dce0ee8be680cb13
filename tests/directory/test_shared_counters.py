"""Counts of all processes, live and dead: each count is summed once, whenever a process dies."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.directory import shared_counters, slot_file
from kvfs.directory.liveness import Liveness
from kvfs.directory.root import Directory
from kvfs.directory.shared_counters import SharedCounters
from kvfs.directory.slot_file import SlotFile
from kvfs.format.checksums import checksum
from kvfs.system.files import Files
from kvfs.testing import Fault, FaultyFiles
from tests.stores import TINY_BYTES, run_child, seeded, tiny, tokens_of


@pytest.fixture
def path(store_path: Path) -> Path:
    with kvfs.open(store_path, capacity="64MiB", counted=False):
        pass
    return store_path


def process(path: Path, files: Files | None = None) -> SharedCounters:
    """What one process has of the counters."""
    return SharedCounters(Directory(str(path), files or Files(), read_only=False))


def total(path: Path) -> dict[str, int]:
    directory = Directory(str(path), Files(), read_only=True)
    try:
        return SharedCounters(directory).total()
    finally:
        directory.close()


def test_counts_of_all_processes_are_summed_once(path: Path) -> None:
    assert total(path) == {}
    one, another = process(path), process(path)
    one.add({"lookups": 1})
    one.add({"lookups": 2})
    one.add({"lookups": 2})
    another.add({"lookups": 100, "gets": 5})
    assert total(path) == {"lookups": 102, "gets": 5}
    one.add({"lookups": 3, "puts": 1})
    assert total(path) == {"lookups": 103, "gets": 5, "puts": 1}


def test_processes_that_add_at_once_lose_nothing(path: Path) -> None:
    def count() -> None:
        mine = process(path)
        for n in range(1, 51):
            mine.add({"lookups": n, f"of_{os.getpid()}": n})
        for _ in range(20):  # a loaded machine may have kept the lock from it: the next call adds what is missing
            mine.add({"lookups": 50, f"of_{os.getpid()}": 50})

    threads = [threading.Thread(target=run_child, args=(count,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = total(path)
    assert found.pop("lookups") == 200 and list(found.values()) == [50] * 4


def test_a_reader_never_sees_less_than_before(path: Path) -> None:
    mine, stop, seen = process(path), threading.Event(), [0]

    def read() -> None:
        while not stop.is_set():
            seen.append(total(path).get("lookups", 0))

    reader = threading.Thread(target=read)
    reader.start()
    for n in range(300):
        mine.add({"lookups": n})
    stop.set()
    reader.join()
    assert seen == sorted(seen)


def test_a_process_that_is_stopped_with_the_lock_keeps_no_other_waiting(path: Path) -> None:
    mine = process(path)
    mine.add({"lookups": 1})
    with (path / "run" / "totals").open("rb") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        began = time.monotonic()
        mine.add({"lookups": 5})
        assert time.monotonic() - began < 60 * slot_file.WAIT_SECONDS
        assert total(path) == {"lookups": 1}, "reading takes no lock"
    mine.add({"lookups": 7})
    assert total(path) == {"lookups": 7}


def test_a_call_that_hangs_keeps_no_other_call_of_its_process_waiting(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The upkeep may be in the middle of an update, on a disk that hangs, when the store is closed."""
    mine, hangs, go_on = process(path), threading.Event(), threading.Event()
    monkeypatch.setattr(mine, "_add", lambda counts: (hangs.set(), go_on.wait(60))[1])
    hanging = threading.Thread(target=mine.add, args=({"lookups": 1},))
    hanging.start()
    assert hangs.wait(60)
    mine.add({"lookups": 2})
    assert hanging.is_alive()
    go_on.set()
    hanging.join()


@pytest.mark.parametrize("kind", ["open", "pwritev", "preadv", "flock", "fstat", "listdir"])
@pytest.mark.parametrize("nth", range(1, 5))
@pytest.mark.parametrize("action", ["error", "torn"])
def test_no_fault_raises_or_counts_twice(path: Path, kind: str, nth: int, action: str) -> None:
    files = FaultyFiles()
    mine = process(path, files)
    files.arm(Fault(nth=files.calls[kind] + nth, kind=kind, action=action, error=errno.ENOSPC))
    mine.add({"lookups": 4})
    mine.add({"lookups": 5})
    files.arm()
    assert total(path).get("lookups", 0) in (0, 4, 5)
    mine.add({"lookups": 6})
    assert total(path) == {"lookups": 6}


def test_a_disk_that_fills_up_after_open_loses_no_count(path: Path) -> None:
    files, mine = [path / "run" / name for name in ("totals", "namespaces")], process(path)
    mine.reserve()
    blocks = [file.stat().st_blocks for file in files]
    assert min(blocks) * 512 >= 2 * slot_file.SLOT_BYTES_MIN
    mine.add({"disk_full": 1}, {b"n" * 32: {"lookups": 1}})
    assert [file.stat().st_blocks for file in files] == blocks
    assert total(path) == {"disk_full": 1}


def test_an_open_store_has_made_the_files_of_its_counts(store_path: Path) -> None:
    with kvfs.open(store_path, capacity="64MiB"):
        for name in ("totals", "namespaces"):
            assert (store_path / "run" / name).stat().st_blocks * 512 >= 2 * slot_file.SLOT_BYTES_MIN


def test_a_file_with_small_slots_keeps_as_many_counts_as_fit(path: Path) -> None:
    file = path / "run" / "totals"
    file.write_bytes(bytes(2 * slot_file.SLOT_BYTES_MIN))
    process(path).add({f"{'n' * 52}_{n:03d}": 1 << 61 for n in range(shared_counters.NAMES_MAX)})
    assert file.stat().st_size == 2 * slot_file.SLOT_BYTES_MIN
    assert len(total(path)) == (slot_file.SLOT_BYTES_MIN - 20) // shared_counters.COUNT_BYTES_MAX


def test_a_torn_slot_leaves_the_one_before_and_garbage_counts_as_nothing(path: Path) -> None:
    mine, file = process(path), path / "run" / "totals"
    mine.add({"lookups": 1})
    mine.add({"lookups": 2})
    data = bytearray(file.read_bytes())
    data[30] ^= 1  # the slot of even turns is the first one
    file.write_bytes(data)
    assert total(path) == {"lookups": 1}
    for garbage in (b"", b"x" * 10, os.urandom(2 * shared_counters.SLOT_BYTES)):
        file.write_bytes(garbage)
        assert total(path) == {}
        mine.add({"lookups": mine._added["lookups"] + 1})
        assert total(path) == {"lookups": 1}


def test_files_of_earlier_versions_are_ignored_and_removed(path: Path) -> None:
    old = path / "run" / f"{7:032x}.count"
    old.write_bytes(bytes(32 * 1024))
    kept = path / "run" / "notes.count"
    kept.touch()
    process(path).add({"lookups": 1})
    assert total(path) == {"lookups": 1}
    assert not old.exists() and kept.exists()


def test_a_reader_changes_nothing(path: Path) -> None:
    SharedCounters(Directory(str(path), Files(), read_only=True)).add({"lookups": 1})
    assert total(path) == {} and not (path / "run" / "totals").exists()


def test_absurd_counts_are_bounded(path: Path) -> None:
    longest = {f"{i:056}": (1 << 62) - 1 for i in range(5000)}
    process(path).add(longest | {"x" * 57: 1, "no name": 1, "": 1})
    assert len(found := total(path)) == shared_counters.NAMES_MAX and found.items() <= longest.items()


def use(path: Path, seed: int) -> dict[str, Any]:
    with kvfs.open(path) as store:
        ns = store.namespace("alpha", tiny(), "9213176")
        ns.put(tokens_of(seed, 4), seeded(seed, 4 * TINY_BYTES))
        ns.match(tokens_of(seed, 4)).close()
    return {}


def test_of_too_many_names_latencies_are_left_out_first(path: Path) -> None:
    latencies = [f"{what}_us_{n}" for what in ("get", "match", "put", "view") for n in range(40)]
    others = ["pages_declined_read-only", "tokens_matched", "write_errors", "zeal"]
    process(path).add(dict.fromkeys([*latencies, *others], 7))
    found = total(path)
    assert len(found) == shared_counters.NAMES_MAX and [found[name] for name in others] == [7] * 4


def test_totals_survive_restarts_and_a_kill(path: Path) -> None:
    run_child(lambda: use(path, 1))
    run_child(lambda: use(path, 2))
    child = os.fork()
    if not child:
        store = kvfs.open(path)
        store.namespace("alpha", tiny(), "9213176").put(tokens_of(3, 4), seeded(3, 4 * TINY_BYTES))
        store._shared._publish()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    with kvfs.open(path, counted=False) as store:
        totals = store.stats()["totals"]
        assert totals["pages_stored"] == 12 and totals["lookups"] == 2 and totals["tokens_matched"] == 128


def test_a_process_that_only_inspects_is_not_counted(path: Path) -> None:
    with kvfs.open(path, counted=False) as store:
        store.namespace("alpha", tiny(), "9213176").match(tokens_of(1, 4)).close()
    assert total(path) == {}


@pytest.mark.parametrize("counted_first", [True, False])
def test_inspecting_in_a_process_that_serves_does_not_silence_it(path: Path, counted_first: bool) -> None:
    with kvfs.open(path, counted=counted_first) as one, kvfs.open(path, counted=not counted_first):
        one.namespace("alpha", tiny(), "9213176").put(tokens_of(1, 4), seeded(1, 4 * TINY_BYTES))
    with kvfs.open(path, counted=False) as store:
        assert store.stats()["totals"]["pages_stored"] == 4


def test_a_child_of_a_process_that_only_inspects_is_not_counted(path: Path) -> None:
    def inspect() -> dict[str, Any]:
        store.namespace("alpha", tiny(), "9213176").match(tokens_of(1, 4)).close()
        store.close()
        return {}

    with kvfs.open(path, counted=False) as store:
        run_child(inspect)
    assert total(path) == {}


def test_heartbeats_after_the_close_reach_no_other_file(path: Path, tmp_path: Path) -> None:
    directory = Directory(str(path), Files(), read_only=False)
    liveness = Liveness(directory)
    liveness.close()
    with (tmp_path / "other").open("w+b") as other:  # it has the number of the closed file now
        liveness.say_pinned(1 << 20)
        with pytest.raises(OSError, match="Bad file descriptor"):
            liveness.beat()
        liveness.close()
        other.seek(0)
        assert other.read() == b""
    directory.close()


SLOT = 256 << 10  # of a large store


def by_namespace(path: Path) -> dict[bytes, dict[str, int]]:
    directory = Directory(str(path), Files(), read_only=True)
    try:
        return {digest: sums.counts for digest, sums in SharedCounters(directory).by_namespace().items()}
    finally:
        directory.close()


A, B = b"a" * 32, b"b" * 32


def test_counts_of_namespaces_are_summed_once_over_all_processes(path: Path) -> None:
    one, another = process(path), process(path)
    assert by_namespace(path) == {}
    one.add({}, {A: {"lookups": 1}, B: {"lookups": 5}})
    one.add({}, {A: {"lookups": 2}, B: {"lookups": 5}})
    another.add({}, {A: {"lookups": 10, "bytes_written": 7}})
    assert by_namespace(path) == {A: {"lookups": 12, "bytes_written": 7}, B: {"lookups": 5}}


def test_a_namespace_that_its_process_had_forgotten_begins_again(path: Path) -> None:
    mine = process(path)
    mine.add({}, {A: {"lookups": 10}})
    mine.add({}, {A: {"lookups": 3}})
    assert by_namespace(path) == {A: {"lookups": 13}}


def test_of_too_many_namespaces_those_counted_last_are_kept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_counters, "NAMESPACES_MAX", 3)
    mine = process(path)
    names = [bytes([n]) * 32 for n in range(5)]
    for n, name in enumerate(names):
        mine.add({}, {name: {"lookups": n + 1}})
    assert by_namespace(path) == {name: {"lookups": n + 1} for n, name in enumerate(names) if n >= 2}


def test_the_largest_counts_of_all_namespaces_fit_into_a_slot(path: Path) -> None:
    counts = dict.fromkeys(shared_counters.NAMESPACE_COUNTS, (1 << 62) - 1)
    names = [n.to_bytes(32, "big") for n in range(shared_counters.NAMESPACES_MAX)]
    directory = Directory(str(path), Files(), read_only=False)
    SharedCounters(directory, SLOT).add({}, dict.fromkeys(names, counts))
    assert by_namespace(path) == dict.fromkeys(names, counts)


def test_a_small_store_has_room_for_fewer_namespaces(path: Path) -> None:
    counts = dict.fromkeys(shared_counters.NAMESPACE_COUNTS, (1 << 62) - 1)
    process(path).add({}, {n.to_bytes(32, "big"): counts for n in range(100)})
    assert len(by_namespace(path)) == 32
    assert (path / "run" / "namespaces").stat().st_size == 2 * shared_counters.NAMESPACE_SLOT_BYTES


def test_garbage_in_the_counts_of_namespaces_is_no_count(path: Path) -> None:
    file = path / "run" / "namespaces"
    body = {
        "namespaces": {A.hex(): {"lookups": 3, "bytes_loaded": -1, "pages_stored": "x", "other": 1, "at": []},
                       "zz": {"lookups": 1}, B.hex(): 7}
    }  # fmt: skip
    slots = SlotFile(Directory(str(path), Files(), read_only=False), "namespaces", SLOT)
    assert slots.update(lambda before, room: body)
    assert by_namespace(path) == {A: {"lookups": 3}}
    for garbage in (b"", b"x" * 10, os.urandom(2 * SLOT)):
        file.write_bytes(garbage)
        assert by_namespace(path) == {}
        process(path).add({}, {A: {"lookups": 1}})
        assert by_namespace(path) == {A: {"lookups": 1}}


def test_a_store_counts_by_namespace_and_by_the_tier_that_loads_came_from(path: Path) -> None:
    with kvfs.open(path) as store:
        ns, other = (store.namespace(name, tiny(), "9213176") for name in ("alpha", "beta"))
        ns.put(tokens_of(1, 4), seeded(1, 4 * TINY_BYTES))
        other.match(tokens_of(1, 4)).close()
        with ns.match(tokens_of(1, 4)) as match:
            assert ns.get(match, bytearray(4 * TINY_BYTES)) == 4
            tokens = match.tokens
    found = by_namespace(path)
    mine = found[ns.identity.digest]
    assert mine["lookups"] == 1 and mine["tokens_matched"] == mine["tokens_queried"] == tokens
    assert mine["tokens_loaded_host"] + mine.get("tokens_loaded_disk", 0) == tokens == total(path)["tokens_loaded"]
    assert mine["pages_stored"] == 4 and mine["bytes_written"] == mine["bytes_loaded"] == 4 * TINY_BYTES
    assert found[other.identity.digest] == {"lookups": 1, "tokens_queried": tokens}


def written(path: Path, body: dict[str, Any], turn: int = 3) -> None:
    """A file ``run/namespaces`` with a valid checksum, whatever it says."""
    data, size = json.dumps(body).encode(), shared_counters.NAMESPACE_SLOT_BYTES
    head = slot_file._HEAD.pack(0, turn, len(data))[8:]
    slot = (checksum(head + data).to_bytes(8, "little") + head + data).ljust(size, b"\0")
    (path / "run" / "namespaces").write_bytes(slot * 2)


@pytest.mark.parametrize(
    "value", ["x" * 16_150, [1] * 5000, {"a": 1}, 10**400, -5, 1.5, None], ids=lambda value: repr(value)[:9]
)
@pytest.mark.parametrize("name", ["lookups", "at"])
def test_what_is_no_count_is_not_carried_on(path: Path, name: str, value: object) -> None:
    written(path, {"namespaces": {"ab" * 32: {name: value, "puts": 1, "pages_stored": 7}}})
    mine = process(path)
    assert mine.by_namespace() == {b"\xab" * 32: shared_counters.NamespaceSums(0, {"pages_stored": 7})}
    mine.add({}, {bytes(32): {"lookups": 2}})
    sums = mine.by_namespace()
    assert sums[bytes(32)].counts == {"lookups": 2} and sums[b"\xab" * 32].counts == {"pages_stored": 7}


@pytest.mark.parametrize("turn", [2**64 - 1, 2**64 - 2, 2**63])
def test_a_turn_that_no_process_can_have_reached_is_damage(path: Path, turn: int) -> None:
    written(path, {"namespaces": {}}, turn)
    mine = process(path)
    for n in (2, 4):
        mine.add({}, {bytes(32): {"lookups": n}})
        assert mine.by_namespace()[bytes(32)].counts == {"lookups": n}


def test_a_file_that_is_too_large_is_made_again(path: Path) -> None:
    mine = process(path)
    (path / "run" / "totals").write_bytes(bytes(2 * slot_file.SLOT_BYTES_MAX + 2))
    mine.add({"lookups": 3})
    assert total(path) == {"lookups": 3}
    assert (path / "run" / "totals").stat().st_size == 2 * shared_counters.SLOT_BYTES


def test_namespaces_from_a_future_do_not_keep_others_out(path: Path) -> None:
    """The clock was years ahead once, and has been set right."""
    most = shared_counters.NAMESPACE_SLOT_BYTES // shared_counters.NAMESPACE_BYTES_MAX
    ahead = {f"{n:064x}": {"lookups": 1, "at": 1 << 60} for n in range(1, most + 1)}
    written(path, {"namespaces": ahead})
    mine = process(path)
    mine.add({}, {bytes(32): {"lookups": 2}})
    assert mine.by_namespace()[bytes(32)].counts == {"lookups": 2}
