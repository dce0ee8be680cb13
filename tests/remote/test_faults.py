"""A bucket that fails, lies or changes: the pull is shorter and says so, the push goes on later, no byte is wrong."""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kvfs
from kvfs.remote import urls
from kvfs.remote.directory_store import DirectoryStore
from kvfs.remote.names import MARKER
from kvfs.remote.object_store import Fetched, Listed, ObjectStore, RemoteError
from kvfs.remote.push import FAILURES_MAX
from tests.remote.conftest import store_at
from tests.remote.test_push_pull import objects_of
from tests.stores import TINY_BYTES, corrupt, counters, restored, seeded, tiny, tokens_of

CHUNKS = 100  # 4 objects


class FaultyObjects:
    """An object store in which ``fault(call, name)`` says what goes wrong: "fail", "cut", "flip", "gone" or ""."""

    def __init__(self, inner: ObjectStore, fault: Callable[[str, str], str]) -> None:
        self._inner, self._fault = inner, fault

    def get(
        self, name: str, start: int, length: int, room: memoryview | None = None,
        arrived: Callable[[int], None] | None = None,
    ) -> Fetched | None:  # fmt: skip
        fault = self._fault("get", name)
        if fault == "fail":
            raise RemoteError("503 SlowDown")
        found = self._inner.get(name, start, length, room)
        if found is None or fault == "gone":
            return None
        data = bytearray(found.data)
        if fault == "flip" and data:
            data[len(data) * 2 // 3] ^= 4
        return Fetched(memoryview(data)[: len(data) // 2 if fault == "cut" else len(data)], found.size)

    def put_new(self, name: str, data: memoryview | bytes) -> bool:
        if self._fault("put", name) == "fail":
            raise RemoteError("503 SlowDown")
        return self._inner.put_new(name, data)

    def replace(self, name: str, data: memoryview | bytes) -> None:
        self._inner.replace(name, data)

    def delete(self, name: str) -> None:
        self._inner.delete(name)

    def listing(self, prefix: str) -> Iterator[Listed]:
        return self._inner.listing(prefix)

    def folders(self, prefix: str) -> list[str]:
        return self._inner.folders(prefix)

    def close(self) -> None:
        self._inner.close()


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[str, str], str]]:
    """What goes wrong: the test puts one function in; from an empty list on, nothing."""
    chosen: list[Callable[[str, str], str]] = []
    lock = threading.Lock()

    def fault(call: str, name: str) -> str:
        with lock:
            return chosen[0](call, name) if chosen and "/pages/" in name else ""

    plain = urls.open_object_store
    monkeypatch.setattr(urls, "open_object_store", lambda remote, **how: FaultyObjects(plain(remote), fault))
    return chosen


@pytest.fixture
def pushed(here: kvfs.Store) -> bytes:
    data = seeded(1, CHUNKS * TINY_BYTES)
    here.namespace("chat", tiny(), "1a").put(tokens_of(1, CHUNKS), data)
    assert here.push(["chat"]).stored == CHUNKS
    return data


@pytest.mark.parametrize("fault", ["fail", "cut", "flip", "gone"])
def test_a_fault_in_an_object_ends_the_prefix_before_it(
    here: kvfs.Store, there: kvfs.Store, pushed: bytes, faults: list[Callable[[str, str], str]], fault: str
) -> None:
    ns = there.namespace("chat", tiny(), "1a")
    third = f"/{ns.chunk_hashes(tokens_of(1, CHUNKS))[64].hex()}"
    faults.append(lambda call, name: fault if name.endswith(third) else "")
    got = there.pull(ns, tokens_of(1, CHUNKS))
    # a flipped byte of one page leaves the pages before it
    assert 64 <= got.stored < 96, got
    assert restored(ns, tokens_of(1, CHUNKS)) == pushed[: got.stored * TINY_BYTES]
    assert (got.failed, got.refused) == {"fail": (1, 0), "cut": (0, 1), "flip": (0, 1), "gone": (0, 0)}[fault]
    name = {"fail": "remote_errors", "cut": "remote_objects_refused", "flip": "remote_objects_refused"}.get(fault)
    assert name is None or counters(there)[name] == 1
    faults.clear()
    assert there.pull(ns, tokens_of(1, CHUNKS)).stored == CHUNKS - got.stored
    assert restored(ns, tokens_of(1, CHUNKS)) == pushed and there.verify().ok


def test_no_flipped_byte_of_an_object_gives_a_wrong_page(
    here: kvfs.Store, tmp_path: Path, bucket_path: Path, pushed: bytes
) -> None:
    """Every region of the object: header, table, descriptor, payloads, sums, seal."""
    draw = random.Random(5)
    victim = max(objects_of(bucket_path), key=lambda p: p.stat().st_size)
    whole = victim.read_bytes()
    spots = [draw.randrange(0, 200), draw.randrange(4096, 4096 + 5000), draw.randrange(16_384, 17_000)]
    spots += [draw.randrange(20_480, len(whole) - 12_288) for _ in range(6)]
    spots += [draw.randrange(len(whole) - 12_288, len(whole)) for _ in range(6)]
    for i, at in enumerate(spots):
        data = bytearray(whole)
        data[at] ^= 1 << draw.randrange(8)
        victim.write_bytes(data)
        with store_at(tmp_path / f"t{i}", f"file://{bucket_path}", "16MiB") as store:
            ns = store.namespace("chat", tiny(), "1a")
            store.pull(ns, tokens_of(1, CHUNKS))
            got = restored(ns, tokens_of(1, CHUNKS))
            assert pushed.startswith(got), at


def test_an_object_under_another_name_is_refused(
    here: kvfs.Store, there: kvfs.Store, bucket_path: Path, pushed: bytes
) -> None:
    """Also one of another namespace, with the same prompt: its bytes are right, and of another model."""
    other = here.namespace("chat", tiny(), "2b")
    other.put(tokens_of(1, CHUNKS), seeded(2, CHUNKS * TINY_BYTES))
    here.push([other.identity.digest.hex()])
    ns = there.namespace("chat", tiny(), "1a")
    mine = {p.name: p for p in objects_of(bucket_path) if ns.identity.digest.hex() in str(p)}
    for p in objects_of(bucket_path):
        if other.identity.digest.hex() in str(p):
            mine[p.name].write_bytes(p.read_bytes())
    got = there.pull(ns, tokens_of(1, CHUNKS))
    assert got.stored == 0 and got.refused >= 1 and ns.match(tokens_of(1, CHUNKS)).tokens == 0


def test_a_push_replaces_an_object_that_is_not_valid(
    here: kvfs.Store, there: kvfs.Store, objects: ObjectStore, stored_pages: Callable[[], list[str]], pushed: bytes
) -> None:
    for name in stored_pages()[:2]:
        objects.replace(name, b"not an object of kvfs" * 1000)
    done = here.push(["chat"])
    assert done.failed == 0 and done.objects == 2
    ns = there.namespace("chat", tiny(), "1a")
    there.pull(ns, tokens_of(1, CHUNKS))
    assert restored(ns, tokens_of(1, CHUNKS)) == pushed


def test_a_push_that_fails_now_and_then_is_complete_in_the_end(
    here: kvfs.Store, there: kvfs.Store, faults: list[Callable[[str, str], str]]
) -> None:
    data, draw = seeded(1, CHUNKS * TINY_BYTES), random.Random(3)
    here.namespace("chat", tiny(), "1a").put(tokens_of(1, CHUNKS), data)
    faults.append(lambda call, name: "fail" if draw.random() < 0.5 else "")
    rounds = 0
    while (done := here.push(["chat"])).failed:
        assert done.stored + done.present + done.left_out + done.failed == done.pages == CHUNKS
        assert done.problems and (rounds := rounds + 1) < 100
    assert rounds, "no request failed"
    faults.clear()
    ns = there.namespace("chat", tiny(), "1a")
    there.pull(ns, tokens_of(1, CHUNKS))
    assert restored(ns, tokens_of(1, CHUNKS)) == data


def test_a_bucket_that_is_away_ends_a_push_and_a_pull_early(
    here: kvfs.Store, there: kvfs.Store, faults: list[Callable[[str, str], str]], pushed: bytes
) -> None:
    ns = here.namespace("chat", tiny(), "1a")
    for seed in range(2, 40):
        ns.put(tokens_of(seed, 33), seeded(seed, 33 * TINY_BYTES))
    asked: list[str] = []

    def fail(call: str, name: str) -> str:
        asked.append(name)
        return "fail"

    faults.append(fail)
    done = here.push(["chat"])
    assert done.failed == done.pages and len(asked) <= 2 * FAILURES_MAX + 8
    asked.clear()
    got = there.pull("chat")
    assert got.stored == 0 and got.failed and len(asked) <= 2 * FAILURES_MAX + 8


def test_two_hosts_that_push_the_same_prompt_at_once_store_each_object_once(
    here: kvfs.Store, there: kvfs.Store, bucket_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, tokens = seeded(1, CHUNKS * TINY_BYTES), tokens_of(1, CHUNKS)
    for store in (here, there):
        store.namespace("chat", tiny(), "1a").put(tokens, data)
    stored: list[str] = []
    both = threading.Barrier(2)
    plain = DirectoryStore.put_new

    def put_new(self: DirectoryStore, name: str, data: memoryview | bytes) -> bool:
        done = plain(self, name, data)
        if done and "/pages/" in name:
            stored.append(name)
        return done

    monkeypatch.setattr(DirectoryStore, "put_new", put_new)
    results = []

    def push(store: kvfs.Store) -> None:
        both.wait(60)
        results.append(store.push(["chat"]))

    threads = [threading.Thread(target=push, args=(store,)) for store in (here, there)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert len(stored) == len(set(stored)) == 4 == len(objects_of(bucket_path))
    assert sum(r.stored for r in results) == CHUNKS and not any(r.failed for r in results)
    assert all(r.stored + r.present == CHUNKS for r in results)


def test_a_name_that_is_said_to_exist_and_is_never_shown_fails_once(
    here: kvfs.Store, bucket_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.namespace("chat", tiny(), "1a").put(tokens_of(1, 5), seeded(1, 5 * TINY_BYTES))
    plain = DirectoryStore.put_new
    monkeypatch.setattr(
        DirectoryStore, "put_new", lambda self, name, data: "/pages/" not in name and plain(self, name, data)
    )
    done = here.push(["chat"])
    assert (done.stored, done.failed) == (0, 5) and "does not show it" in done.problems[0]


def test_a_bucket_of_another_program_or_format_is_refused_before_anything_is_written(
    here: kvfs.Store, bucket_path: Path
) -> None:
    here.namespace("chat", tiny(), "1a").put(tokens_of(1, 5), seeded(1, 5 * TINY_BYTES))
    with pytest.raises(kvfs.ConfigError, match="holds no pages of kvfs"):
        here.pull("chat")
    bucket_path.mkdir()
    (bucket_path / "report.pdf").write_bytes(b"%PDF")
    with pytest.raises(kvfs.ConfigError, match="another program"):
        here.push(["chat"])
    assert [p.name for p in bucket_path.iterdir()] == ["report.pdf"]
    (bucket_path / "report.pdf").unlink()
    for marker in (json.dumps({"kvfs": "remote", "format": 2}).encode(), b"{", b"[]", b'"x"', os.urandom(50)):
        (bucket_path / MARKER).write_bytes(marker)
        for call in (lambda: here.push(["chat"]), lambda: here.pull("chat")):
            with pytest.raises(kvfs.FormatError):
                call()
        assert [p.name for p in bucket_path.iterdir()] == [MARKER]


def test_a_damaged_local_page_is_restored_by_a_pull(here: kvfs.Store, tmp_path: Path, pushed: bytes) -> None:
    ns = here.namespace("chat", tiny(), "1a")
    corrupt(tmp_path / "here", pushed[40 * TINY_BYTES : 41 * TINY_BYTES])
    assert restored(ns, tokens_of(1, CHUNKS)) == pushed[: 40 * TINY_BYTES]
    assert here.pull(ns, tokens_of(1, CHUNKS)).stored == 1
    assert restored(ns, tokens_of(1, CHUNKS)) == pushed
