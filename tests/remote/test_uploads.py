"""What a host stores goes to the bucket in the background, once, by one of its processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.catalog.walk import Walk
from kvfs.directory import config_file
from kvfs.remote import uploads
from kvfs.remote.bucket import Bucket
from kvfs.remote.directory_store import DirectoryStore
from kvfs.remote.object_store import RemoteError
from kvfs.remote.uploads import Uploader
from kvfs.system.files import Files
from tests.remote.conftest import store_at
from tests.remote.test_push_pull import objects_of
from tests.stores import TINY_BYTES, restored, seeded, tiny, tokens_of, wait_until

SECONDS = 100.0  # of waits that end soon unless something is wrong


@pytest.fixture
def uploader(here: kvfs.Store) -> Iterator[Uploader]:
    made = Uploader(here._shared.c)
    yield made
    made.close()


def run(store: kvfs.Store, uploader: Uploader, what: str = "all") -> tuple[int, int]:
    """(pages that were new in the bucket, pages that were there) of all passes that a change takes."""
    stored = present = 0
    with store.bucket() as bucket:
        for _ in range(4):
            done = uploader.run(bucket, what, lambda nbytes: None).done
            assert not done.failed
            stored, present = stored + done.stored, present + done.present
    return stored, present


def test_a_pass_sends_what_was_not_sent(here: kvfs.Store, there: kvfs.Store, uploader: Uploader) -> None:
    ns = here.namespace("chat", tiny(), "1a")
    assert run(here, uploader) == (0, 0)
    ns.put(tokens_of(1, 40), seeded(1, 40 * TINY_BYTES))
    assert run(here, uploader) == (40, 0)
    assert run(here, uploader) == (0, 0)
    ns.put(tokens_of(1, 70), seeded(1, 70 * TINY_BYTES))
    ns.put(tokens_of(2, 5), seeded(2, 5 * TINY_BYTES))
    assert run(here, uploader) == (35, 5 + 3)
    other = there.namespace("chat", tiny(), "1a")
    for seed, chunks in ((1, 70), (2, 5)):
        there.pull(other, tokens_of(seed, chunks))
        assert restored(other, tokens_of(seed, chunks)) == seeded(seed, chunks * TINY_BYTES)


def test_another_process_goes_on_where_one_has_ended(here: kvfs.Store, uploader: Uploader) -> None:
    ns = here.namespace("chat", tiny(), "1a")
    ns.put(tokens_of(1, 40), seeded(1, 40 * TINY_BYTES))
    other = Uploader(here._shared.c)
    assert uploader.has_turn() and uploader.has_turn() and not other.has_turn()
    run(here, uploader)
    uploader.close()
    assert other.has_turn() and not uploader.has_turn()
    ns.put(tokens_of(2, 5), seeded(2, 5 * TINY_BYTES))
    assert run(here, other) == (5, 40)
    other.close()


def test_pages_that_nobody_has_read_again_stay_here(
    here: kvfs.Store, uploader: Uploader, stored_pages: Callable[[], list[str]]
) -> None:
    ns = here.namespace("chat", tiny(), "1a")
    for seed in (1, 2, 3):
        ns.put(tokens_of(seed, 40), seeded(seed, 40 * TINY_BYTES))
    assert run(here, uploader, "reused") == (0, 0)
    assert restored(ns, tokens_of(2, 40)) == seeded(2, 40 * TINY_BYTES)
    here._shared.c.access_times.flush()
    assert run(here, uploader, "reused") == (40, 0)
    assert run(here, uploader, "reused") == (0, 0)
    assert len(stored_pages()) == 2


def test_pages_without_a_pin_stay_here(
    here: kvfs.Store, there: kvfs.Store, uploader: Uploader, monkeypatch: pytest.MonkeyPatch
) -> None:
    ns = here.namespace("chat", tiny(), "1a")
    for seed in (1, 2, 3):
        ns.put(tokens_of(seed, 40), seeded(seed, 40 * TINY_BYTES))
    assert run(here, uploader, "pinned") == (0, 0)
    assert here.pin("system prompt", ns, tokens_of(2, 40)) == 640
    assert run(here, uploader, "pinned") == (40, 0)
    assert there.pull("chat").stored == 40
    assert restored(there.namespace("chat", tiny(), "1a"), tokens_of(2, 40)) == seeded(2, 40 * TINY_BYTES)
    monkeypatch.setattr(uploads, "Walk", None)
    assert run(here, uploader, "pinned") == (0, 0), "nothing is walked while nothing changes"


def test_a_pass_is_bounded(here: kvfs.Store, uploader: Uploader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "PAGES_MAX", 30)
    ns = here.namespace("chat", tiny(), "1a")
    ns.put(tokens_of(1, 100), seeded(1, 100 * TINY_BYTES))
    with here.bucket() as bucket:
        passes = [uploader.run(bucket, "all", lambda nbytes: None) for _ in range(12)]
    stored = [p.done.stored for p in passes]
    assert stored[0] == 0 and all(stored[1:4]) and sum(stored[:5]) == 100, "a pass goes on where the last one ended"
    assert max(stored) <= 30 + 32, "whole rows"
    assert passes[1].more and passes[2].more and not passes[-1].more
    assert all(p.done.present == 0 for p in passes)


def test_a_row_that_grows_waits(here: kvfs.Store, uploader: Uploader) -> None:
    """Else a prompt that is saved in steps would be many small objects."""
    ns, tokens, data = here.namespace("chat", tiny(), "1a"), tokens_of(1, 30), seeded(1, 30 * TINY_BYTES)
    with here.bucket() as bucket:
        for chunks in range(5, 31, 5):
            ns.put(tokens[: chunks * 16], data[: chunks * TINY_BYTES])
            assert uploader.run(bucket, "all", lambda nbytes: None).done.pages == 0
        done = uploader.run(bucket, "all", lambda nbytes: None).done
        assert (done.stored, done.objects) == (30, 1)


def test_nothing_is_walked_while_nothing_changes(
    here: kvfs.Store, uploader: Uploader, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.namespace("chat", tiny(), "1a").put(tokens_of(1, 40), seeded(1, 40 * TINY_BYTES))
    assert run(here, uploader) == (40, 0)
    monkeypatch.setattr(uploads, "Walk", None)
    assert run(here, uploader) == (0, 0)


def test_a_row_that_was_uploaded_in_part_keeps_its_place(
    here: kvfs.Store, there: kvfs.Store, uploader: Uploader
) -> None:
    """What a pull of the namespace stores there has as few rows as here."""
    ns, tokens, data = here.namespace("chat", tiny(), "1a"), tokens_of(1, 50), seeded(1, 50 * TINY_BYTES)
    for chunks in (10, 20, 30, 40, 50):
        ns.put(tokens[: chunks * 16], data[: chunks * TINY_BYTES])
        run(here, uploader)
    assert there.pull("chat").stored == 50
    assert restored(there.namespace("chat", tiny(), "1a"), tokens) == data
    assert [len({s.row for s in Walk(store._shared.c).stretches()}) for store in (here, there)] == [2, 2]


def test_what_another_host_has_in_one_object_is_not_sent_again(
    here: kvfs.Store, there: kvfs.Store, uploader: Uploader, stored_pages: Callable[[], list[str]]
) -> None:
    tokens, data = tokens_of(1, 30), seeded(1, 30 * TINY_BYTES)
    there.namespace("chat", tiny(), "1a").put(tokens, data)
    there.push(["chat"])
    ns = here.namespace("chat", tiny(), "1a")
    for chunks in (10, 20, 30):
        ns.put(tokens[: chunks * 16], data[: chunks * TINY_BYTES])
        assert run(here, uploader)[0] == 0
    assert len(stored_pages()) == 1


def test_one_object_that_is_refused_holds_up_no_other(
    here: kvfs.Store, uploader: Uploader, stored_pages: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "PAGES_MAX", 30)
    ns = here.namespace("chat", tiny(), "1a")
    for seed in range(10):
        ns.put(tokens_of(seed, 10), seeded(seed, 10 * TINY_BYTES))
    refused: list[str] = []
    with here.bucket() as bucket:
        whole = bucket.objects.put_new

        def put_new(name: str, data: Any) -> bool:
            if "/pages/" in name and name in (refused or [name]):
                refused[:] = [name]
                raise RemoteError("no")
            return whole(name, data)

        bucket.objects.put_new = put_new  # type: ignore[method-assign]
        for _ in range(16):
            uploader.run(bucket, "all", lambda nbytes: None)
        assert len(stored_pages()) == 9
        bucket.objects.put_new = whole  # type: ignore[method-assign]
        for _ in range(4):
            uploader.run(bucket, "all", lambda nbytes: None)
        assert len(stored_pages()) == 10


def test_another_bucket_gets_everything(here: kvfs.Store, uploader: Uploader, tmp_path: Path) -> None:
    here.namespace("chat", tiny(), "1a").put(tokens_of(1, 40), seeded(1, 40 * TINY_BYTES))
    assert run(here, uploader) == (40, 0)
    other = Bucket(DirectoryStore(str(tmp_path / "other")), "file:///other")
    for _ in range(3):
        uploader.run(other, "all", lambda nbytes: None)
    assert len(objects_of(tmp_path / "other")) == 2


@pytest.mark.timeout(400)  # waits of up to 100 s for processes, on a machine that may be busy
def test_a_host_uploads_by_itself_and_another_finds_it(
    tmp_path: Path, bucket_url: str, stored_pages: Callable[[], list[str]]
) -> None:
    """Two processes of one host; the one that uploads is killed, and the other one takes over."""
    url = bucket_url
    store_at(tmp_path / "here", url).close()
    config_file.change(str(tmp_path / "here"), "remote.upload", "all", Files())
    with kvfs.open(tmp_path / "here") as here, store_at(tmp_path / "there", url) as there:
        here.start_bucket_process()
        ns = here.namespace("chat", tiny(), "1a")
        ns.put(tokens_of(1, 40), seeded(1, 40 * TINY_BYTES))
        wait_until(lambda: len(stored_pages()) == 2)
        process = here._shared.bucket_process()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        ns.put(tokens_of(2, 40), seeded(2, 40 * TINY_BYTES))
        successor = kvfs.remote.bucket_process.BucketProcess(here._shared.c)
        successor.start()
        wait_until(lambda: len(stored_pages()) == 4)
        successor.close(SECONDS)
        other = there.namespace("chat", tiny(), "1a")
        for seed in (1, 2):
            fetch = there.fetch(other, tokens_of(seed, 40))
            assert fetch is not None and fetch.wait(SECONDS)
            assert restored(other, tokens_of(seed, 40)) == seeded(seed, 40 * TINY_BYTES)
