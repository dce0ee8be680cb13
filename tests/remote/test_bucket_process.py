"""Prompts that engines ask of the bucket: pulled by a child, found by lookups, and never waited for without an end."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

import kvfs
from kvfs.directory import config_file
from kvfs.errors import ConfigError
from kvfs.pages.chunk_hash import ChunkHashes
from kvfs.remote import bucket_process
from kvfs.remote.bucket_process import BucketProcess, Fetch
from kvfs.system.files import Files
from tests.remote.conftest import store_at
from tests.stores import TINY_BYTES, restored, seeded, tiny, tokens_of, wait_until

SECONDS = 100.0  # of waits that end at once unless something is wrong
CHUNKS = 70


@pytest.fixture
def pushed(here: kvfs.Store) -> kvfs.Namespace:
    ns = here.namespace("chat", tiny(), "1a")
    ns.put(tokens_of(1, CHUNKS), seeded(1, CHUNKS * TINY_BYTES))
    assert here.push(["chat"]).stored == CHUNKS
    return ns


def fetched(store: kvfs.Store, ns: kvfs.Namespace, tokens: list[int], first: int = 0) -> Fetch:
    fetch = store.fetch(ns, tokens, first=first)
    assert fetch is not None and fetch.wait(SECONDS)
    return fetch


def process_of(store: kvfs.Store) -> BucketProcess:
    return store._shared.bucket_process()


def test_a_prompt_of_another_host_arrives_by_itself(there: kvfs.Store, pushed: kvfs.Namespace) -> None:
    ns = there.namespace("chat", tiny(), "1a")
    tokens = tokens_of(1, CHUNKS)
    fetch = fetched(there, ns, tokens)
    assert (fetch.reach, fetch.pages, fetch.failed) == (CHUNKS, CHUNKS, "")
    assert fetch.nbytes == CHUNKS * TINY_BYTES
    assert restored(ns, tokens) == seeded(1, CHUNKS * TINY_BYTES)
    assert there.verify().ok


def test_only_what_is_missing_is_fetched(there: kvfs.Store, pushed: kvfs.Namespace) -> None:
    ns, tokens, data = there.namespace("chat", tiny(), "1a"), tokens_of(1, CHUNKS), seeded(1, CHUNKS * TINY_BYTES)
    ns.put(tokens[: 40 * 16], data[: 40 * TINY_BYTES])
    fetch = fetched(there, ns, tokens, first=40)
    assert (fetch.reach, fetch.nbytes) == (CHUNKS, 30 * TINY_BYTES)
    assert restored(ns, tokens) == data


def test_the_reach_is_known_of_a_prompt_that_the_bucket_holds_in_part(
    there: kvfs.Store, pushed: kvfs.Namespace
) -> None:
    ns = there.namespace("chat", tiny(), "1a")
    tokens = tokens_of(1, CHUNKS)[: 50 * 16] + tokens_of(9, 900)
    fetch = fetched(there, ns, tokens)
    assert fetch.reach is not None and 32 <= fetch.reach <= 50
    assert fetch.pages == 50 and ns.match(tokens).tokens == 50 * 16


def test_a_prompt_that_another_host_continued_is_found(
    here: kvfs.Store, there: kvfs.Store, pushed: kvfs.Namespace
) -> None:
    """The continuation of a shorter prompt is an object of its own, in the middle of a block."""
    tokens, data = tokens_of(5, CHUNKS), seeded(5, CHUNKS * TINY_BYTES)
    for chunks in (5, CHUNKS):
        pushed.put(tokens[: chunks * 16], data[: chunks * TINY_BYTES])
        here.push(["chat"])
    ns = there.namespace("chat", tiny(), "1a")
    ns.put(tokens[: 5 * 16], data[: 5 * TINY_BYTES])
    fetch = fetched(there, ns, tokens, first=5)
    assert fetch.reach is not None and fetch.reach > 5
    assert restored(ns, tokens) == data


@pytest.mark.parametrize("length", [1, 31, 32, 33, 64, 65, 130, 400])
def test_the_reach_of_a_whole_prompt_is_its_end(here: kvfs.Store, there: kvfs.Store, length: int) -> None:
    ns, other = here.namespace("chat", tiny(), "1a"), there.namespace("chat", tiny(), "1a")
    tokens = tokens_of(7, length)
    ns.put(tokens, seeded(7, length * TINY_BYTES))
    here.push(["chat"])
    for first in sorted({0, length // 3, length - 1}):
        fetch = there.fetch(other, tokens, first=first)
        assert fetch is not None and fetch.wait(SECONDS) and fetch.reach == length, first


def test_what_the_bucket_lacks_is_asked_once(there: kvfs.Store, pushed: kvfs.Namespace) -> None:
    ns = there.namespace("chat", tiny(), "1a")
    fetch = fetched(there, ns, tokens_of(2, 40))
    assert (fetch.reach, fetch.pages, fetch.failed) == (0, 0, "")
    assert there.fetch(ns, tokens_of(2, 40)) is None
    assert fetched(there, ns, tokens_of(3, 40)).pages == 0


def test_a_bucket_that_nothing_was_pushed_to_is_a_miss(there: kvfs.Store) -> None:
    ns = there.namespace("chat", tiny(), "1a")
    fetch = fetched(there, ns, tokens_of(2, 40))
    assert (fetch.reach, fetch.pages, fetch.failed) == (0, 0, "")


def test_without_a_bucket_nothing_is_fetched(tmp_path: Path) -> None:
    with kvfs.open(tmp_path / "alone", capacity="64MiB") as store:
        ns = store.namespace("chat", tiny(), "1a")
        assert store.fetch(ns, tokens_of(1, 40)) is None
        store.start_bucket_process()
        assert store._shared._bucket_process is None


def test_read_through_can_be_switched_off(tmp_path: Path, bucket_url: str) -> None:
    store_at(tmp_path / "off", bucket_url).close()
    config_file.change(str(tmp_path / "off"), "remote.read_through", "off", Files())
    with kvfs.open(tmp_path / "off") as store:
        assert store.fetch(store.namespace("chat", tiny(), "1a"), tokens_of(1, 40)) is None


def test_a_bucket_that_fails_is_left_alone_for_a_while(
    there: kvfs.Store, bucket_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bucket_path.write_text("no directory")
    ns = there.namespace("chat", tiny(), "1a")
    for seed in range(bucket_process.FAILURES_MAX):
        fetch = fetched(there, ns, tokens_of(seed, 40))
        assert "is a file" in fetch.failed and fetch.reach is None
    assert there.fetch(ns, tokens_of(50, 40)) is None
    assert caplog.text.count("the bucket fails") == 1
    assert there._shared.c.counters.snapshot()["bucket_fetches_failed"] == bucket_process.FAILURES_MAX


def test_objects_that_do_not_verify_are_not_stored(
    there: kvfs.Store, pushed: kvfs.Namespace, bucket_path: Path
) -> None:
    data = seeded(1, CHUNKS * TINY_BYTES)
    flipped = 0
    for path in bucket_path.rglob("pages/*/*"):
        content = bytearray(path.read_bytes())
        at = content.find(data[40 * TINY_BYTES : 41 * TINY_BYTES])
        if at > 0:
            content[at + 100] ^= 1
            path.write_bytes(content)
            flipped += 1
    assert flipped == 1
    ns, tokens = there.namespace("chat", tiny(), "1a"), tokens_of(1, CHUNKS)
    assert fetched(there, ns, tokens).pages == 40
    assert restored(ns, tokens) == data[: 40 * TINY_BYTES]


def test_a_child_that_is_killed_ends_its_fetches_and_is_started_again(
    there: kvfs.Store, pushed: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_process, "PAUSE_SECONDS", 0.2)
    ns = there.namespace("chat", tiny(), "1a")
    there.start_bucket_process()
    process = process_of(there)
    wait_until(lambda: process.pid is not None)
    first = process.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    fetch = there.fetch(ns, tokens_of(1, CHUNKS))
    assert fetch is not None and not fetch.ended
    os.kill(first, signal.SIGKILL)
    assert fetch.wait(SECONDS) and "has ended" in fetch.failed
    again: list[Fetch] = []

    def has_begun() -> bool:
        begun = there.fetch(ns, tokens_of(1, CHUNKS))
        again.extend([begun] if begun is not None else [])
        return begun is not None

    wait_until(has_begun)
    assert again[0].wait(SECONDS) and again[0].pages == CHUNKS
    assert process.pid not in (None, first)


def test_a_child_that_hangs_costs_a_fetch_its_deadline(
    there: kvfs.Store, pushed: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_process, "FETCH_SECONDS", 0.2)
    monkeypatch.setattr(bucket_process, "TICK_SECONDS", 0.1)
    ns = there.namespace("chat", tiny(), "1a")
    pid = stopped(there)
    try:
        fetch = there.fetch(ns, tokens_of(1, CHUNKS))
        assert fetch is not None and fetch.wait(SECONDS) and fetch.failed == "it took too long"
    finally:
        os.kill(pid, signal.SIGCONT)


def stopped(store: kvfs.Store) -> int:
    """The child, stopped."""
    store.start_bucket_process()
    wait_until(lambda: process_of(store).pid is not None)
    pid = process_of(store).pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    return pid


def test_a_child_that_reads_nothing_holds_up_neither_deadlines_nor_close(
    there: kvfs.Store, pushed: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_process, "FETCH_SECONDS", 0.5)
    monkeypatch.setattr(bucket_process, "TICK_SECONDS", 0.1)
    ns = there.namespace("chat", tiny(), "1a")
    pid = stopped(there)
    try:
        hashes = [bytes([n]) + os.urandom(31) for n in range(30)]
        fetches = [there.fetch(ns, hashes=ChunkHashes(h * 50_000)) for h in hashes]  # 50 KB each
        assert all(fetch is not None and fetch.wait(SECONDS) for fetch in fetches)
        waits = there.fetch(ns, hashes=ChunkHashes(os.urandom(32) * 50_000))
        process = process_of(there)
        there.close()
        assert waits is None or waits.ended
        assert not process._thread.is_alive() and process._socket is None
    finally:
        os.kill(pid, signal.SIGKILL)


def test_a_bucket_that_owes_an_answer_is_asked_nothing_more(
    there: kvfs.Store, pushed: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_process, "ASK_SECONDS", 0.0)
    ns = there.namespace("chat", tiny(), "1a")
    pid = stopped(there)
    first = there.fetch(ns, tokens_of(1, CHUNKS))
    assert first is not None
    assert there.fetch(ns, tokens_of(2, CHUNKS)) is None
    os.kill(pid, signal.SIGCONT)
    assert first.wait(SECONDS) and first.pages == CHUNKS


def test_a_forked_child_does_not_keep_the_connection(there: kvfs.Store, pushed: kvfs.Namespace) -> None:
    ns = there.namespace("chat", tiny(), "1a")
    fetched(there, ns, tokens_of(1, CHUNKS))
    ours = process_of(there)._socket
    assert ours is not None
    name = os.readlink(f"/proc/self/fd/{ours.fileno()}")
    child = os.fork()
    if not child:
        kept = set()
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # that of the listing
                kept.add(os.readlink(f"/proc/self/fd/{fd}"))
        os._exit(1 if name in kept else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_fetch_that_is_cancelled_ends(there: kvfs.Store, pushed: kvfs.Namespace) -> None:
    pid = stopped(there)
    fetch = there.fetch(there.namespace("chat", tiny(), "1a"), tokens_of(1, CHUNKS))
    assert fetch is not None
    fetch.cancel()
    os.kill(pid, signal.SIGCONT)
    assert fetch.wait(SECONDS) and fetch.pages <= CHUNKS


def test_close_ends_the_child_and_what_waits(there: kvfs.Store, pushed: kvfs.Namespace) -> None:
    ns = there.namespace("chat", tiny(), "1a")
    fetched(there, ns, tokens_of(1, CHUNKS))
    pid = process_of(there).pid
    assert pid is not None
    fetch = there.fetch(ns, tokens_of(5, CHUNKS))
    there.close()
    assert fetch is not None and fetch.wait(SECONDS)
    wait_until(lambda: not Path(f"/proc/{pid}").exists())


def test_what_is_no_prompt_is_refused_before_it_is_asked(there: kvfs.Store) -> None:
    ns = there.namespace("chat", tiny(), "1a")
    for wrong in ([b"short"], [bytes(48)], [bytes(31), bytes(33)[:32]]):
        with pytest.raises(ConfigError, match="chunk hashes of 32 bytes"):
            there.fetch(ns, hashes=wrong)
    with pytest.raises(ConfigError, match="first is -1"):
        there.fetch(ns, tokens_of(1, 5), first=-1)
    with pytest.raises(ConfigError, match="one of them"):
        there.fetch(ns)


def test_too_many_fetches_are_not_begun(there: kvfs.Store, pushed: kvfs.Namespace) -> None:
    ns = there.namespace("chat", tiny(), "1a")
    pid = stopped(there)
    begun = [there.fetch(ns, tokens_of(seed, 3)) for seed in range(bucket_process.FETCHES_MAX + 3)]
    os.kill(pid, signal.SIGCONT)
    assert [fetch is None for fetch in begun].count(True) == 3
    assert all(fetch.wait(SECONDS) for fetch in begun if fetch is not None)
