"""What every object store below ``kvfs.remote`` must do, as tests that an implementation's own test class inherits.

A subclass says how a client of an empty place is made (``start``), and how a second client of the same place.
"""

from __future__ import annotations

import contextlib
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

from kvfs.remote.object_store import ObjectStore

WRITERS = 8  # that store one name at once


class ObjectStoreContract(ABC):
    """The tests. ``place`` is a directory that is empty at the start of each test."""

    @abstractmethod
    def start(self, place: Path) -> ObjectStore:
        """A client. Two clients of one place see the same objects."""

    @contextlib.contextmanager
    def store(self, place: Path) -> Iterator[ObjectStore]:
        store = self.start(place)
        try:
            yield store
        finally:
            store.close()

    def test_an_object_comes_back_as_a_whole_and_in_ranges(self, memory_path: Path) -> None:
        data = random.Random(1).randbytes(100_000)
        with self.store(memory_path) as store:
            assert store.put_new("a/b/c", data)
            for start, length in ((0, 100_000), (0, 1), (99_999, 1), (5, 70_000)):
                found = store.get("a/b/c", start, length)
                assert found is not None and found.size == 100_000
                assert bytes(found.data) == data[start : start + length]

    def test_an_answer_may_come_into_the_callers_memory(self, memory_path: Path) -> None:
        data = random.Random(2).randbytes(1_000_000)
        with self.store(memory_path) as store:
            store.put_new("a/b", data)
            for start, length in ((0, 2_000_000), (0, 300_000), (400_000, 600_000), (999_999, 5)):
                room = bytearray(length + 10)
                found = store.get("a/b", start, length, memoryview(room))
                assert found is not None and found.size == 1_000_000
                assert bytes(found.data) == data[start : start + length]
                assert room[length:] == bytes(10), "nothing behind what was asked for"
            assert store.get("nothing", 0, 10, memoryview(bytearray(10))) is None

    def test_a_range_ends_with_the_object(self, memory_path: Path) -> None:
        with self.store(memory_path) as store:
            store.put_new("a", b"12345")
            found = store.get("a", 0, 1 << 20)
            assert found is not None and (bytes(found.data), found.size) == (b"12345", 5)
            found = store.get("a", 3, 1 << 20)
            assert found is not None and (bytes(found.data), found.size) == (b"45", 5)

    def test_a_name_without_an_object_is_none(self, memory_path: Path) -> None:
        with self.store(memory_path) as store:
            assert store.get("nothing", 0, 10) is None
            store.put_new("a/b", b"1")
            assert store.get("a", 0, 10) is None and store.get("a/b/c", 0, 10) is None

    def test_an_object_is_stored_once(self, memory_path: Path) -> None:
        with self.store(memory_path) as store, self.store(memory_path) as other:
            assert store.put_new("a/b", b"first")
            assert not other.put_new("a/b", b"second")
            found = other.get("a/b", 0, 10)
            assert found is not None and bytes(found.data) == b"first"

    def test_of_several_writers_at_once_one_stores(self, memory_path: Path) -> None:
        with self.store(memory_path) as store:
            wrote: list[int] = []
            ready = threading.Barrier(WRITERS)

            def write(number: int) -> None:
                ready.wait(60)
                if store.put_new("a/b", b"%d" % number * 50_000):
                    wrote.append(number)

            threads = [threading.Thread(target=write, args=(n,)) for n in range(WRITERS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            found = store.get("a/b", 0, 1 << 20)
            assert len(wrote) == 1 and found is not None and bytes(found.data) == b"%d" % wrote[0] * 50_000

    def test_an_object_is_replaced_and_removed(self, memory_path: Path) -> None:
        with self.store(memory_path) as store:
            store.put_new("a/b", b"first")
            store.replace("a/b", memoryview(b"second"))
            found = store.get("a/b", 0, 10)
            assert found is not None and (bytes(found.data), found.size) == (b"second", 6)
            store.delete("a/b")
            store.delete("a/b")
            assert store.get("a/b", 0, 10) is None
            assert store.put_new("a/b", b"third"), "a removed name is free"

    def test_a_listing_has_all_objects_below_a_prefix(self, memory_path: Path) -> None:
        names = ["m", "t/n/x", "t/n/pages/1", "t/n/pages/2", "t/nn/y", "u/z"]
        with self.store(memory_path) as store:
            assert list(store.listing("")) == [] and store.folders("") == []
            for i, name in enumerate(names):
                store.put_new(name, bytes(i + 1))
            assert sorted(found.name for found in store.listing("")) == sorted(names)
            assert sorted((f.name, f.size) for f in store.listing("t/n/")) == [
                ("t/n/pages/1", 3), ("t/n/pages/2", 4), ("t/n/x", 2)
            ]  # fmt: skip
            assert store.folders("") == ["t", "u"] and store.folders("t/") == ["n", "nn"]
            assert store.folders("t/n/") == ["pages"] and list(store.listing("v/")) == []

    def test_a_listing_tells_the_time_of_the_upload(self, memory_path: Path) -> None:
        with self.store(memory_path) as store:
            store.put_new("a", b"1")
            store.put_new("b", b"1")
            times = {found.name: found.modified for found in store.listing("")}
            assert abs(times["a"] - times["b"]) < 600
