"""A retention by use: what a host has used stays, whichever host it is, and without a word between them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import kvfs
from kvfs.directory import config_file
from kvfs.remote import upkeep, uses
from kvfs.remote.object_store import RemoteError
from kvfs.remote.uploads import Uploader
from kvfs.remote.uses import Uses
from kvfs.system.files import Files
from tests.cli.commands import called
from tests.remote.conftest import store_at
from tests.remote.test_push_pull import objects_of
from tests.stores import TINY_BYTES, restored, seeded, tiny, tokens_of, wait_until

CHUNKS = 70  # 3 objects
DAY = 86_400.0


@pytest.fixture
def pushed(here: kvfs.Store) -> kvfs.Store:
    ns = here.namespace("chat", tiny(), "1a")
    for seed in (1, 2):
        ns.put(tokens_of(seed, CHUNKS), seeded(seed, CHUNKS * TINY_BYTES))
    here.push(["chat"])
    return here


def host(tmp_path: Path, url: str, name: str = "host") -> kvfs.Store:
    """A store of another host, which notes uses."""
    store_at(tmp_path / name, url).close()
    config_file.change(str(tmp_path / name), "remote.retention_from", "use", Files())
    return kvfs.open(tmp_path / name)


def age(bucket: Path, seconds: float, kind: str = "") -> None:
    """Everything in the bucket was uploaded so long ago."""
    at = time.time() - seconds
    for file in bucket.rglob("*"):
        if file.is_file() and kind in str(file):
            os.utime(file, (at, at))


def marks_of(bucket: Path) -> list[Path]:
    return sorted(p for p in bucket.rglob("*") if p.is_file() and p.parent.parent.name == "used")


def test_what_a_host_has_pulled_stays_and_the_rest_goes(pushed: kvfs.Store, tmp_path: Path, bucket_path: Path) -> None:
    age(bucket_path, 100 * DAY)
    with host(tmp_path, f"file://{bucket_path}") as there:
        ns = there.namespace("chat", tiny(), "1a")
        assert there.pull(ns, tokens_of(1, CHUNKS)).stored == CHUNKS
        assert len(marks_of(bucket_path)) == 3
        assert all(not mark.stat().st_size for mark in marks_of(bucket_path))
    with pushed.bucket() as bucket:
        plan = upkeep.collect(bucket, time.time() - 30 * DAY, apply=False, by_use=True)
        assert (plan.objects, plan.kept, plan.used) == (3, 3, 3) and len(objects_of(bucket_path)) == 6
        done = upkeep.collect(bucket, time.time() - 30 * DAY, apply=True, by_use=True)
        assert (done.objects, done.nbytes, done.kept, done.used) == (3, plan.nbytes, 3, 3)
    with host(tmp_path, f"file://{bucket_path}", "third") as third:
        ns = third.namespace("chat", tiny(), "1a")
        assert third.pull(ns, tokens_of(1, CHUNKS)).stored == CHUNKS
        assert third.pull(ns, tokens_of(2, CHUNKS)).stored == 0


def test_an_object_goes_when_its_last_use_is_old_and_so_does_the_note_of_it(
    pushed: kvfs.Store, tmp_path: Path, bucket_path: Path
) -> None:
    with host(tmp_path, f"file://{bucket_path}") as there:
        there.pull(there.namespace("chat", tiny(), "1a"), tokens_of(1, CHUNKS))
    age(bucket_path, 40 * DAY)
    with pushed.bucket() as bucket:
        assert upkeep.collect(bucket, time.time() - 50 * DAY, apply=True, by_use=True).kept == 6
        assert len(marks_of(bucket_path)) == 3
        assert upkeep.collect(bucket, time.time() - 30 * DAY, apply=True, by_use=True).objects == 6
    assert not objects_of(bucket_path) and not marks_of(bucket_path)


def test_the_head_of_a_prompt_stays_although_only_its_tail_was_fetched(
    pushed: kvfs.Store, tmp_path: Path, bucket_path: Path
) -> None:
    """Else the next new host would find a tail that it cannot use."""
    with host(tmp_path, f"file://{bucket_path}") as there:
        ns = there.namespace("chat", tiny(), "1a")
        there.pull(ns, tokens_of(1, CHUNKS)[: 32 * 16])
        age(bucket_path, 40 * DAY)
        there.close()
    with kvfs.open(tmp_path / "host") as there:
        got = there.pull(there.namespace("chat", tiny(), "1a"), tokens_of(1, CHUNKS))
        assert (got.stored, got.objects) == (CHUNKS - 32, 2)
    with pushed.bucket() as bucket:
        assert upkeep.collect(bucket, time.time() - 30 * DAY, apply=True, by_use=True).kept == 3


def test_a_whole_namespace_for_a_new_host_is_no_use_of_its_prompts(
    pushed: kvfs.Store, tmp_path: Path, bucket_path: Path
) -> None:
    with host(tmp_path, f"file://{bucket_path}") as there:
        assert there.pull("chat").stored == 2 * CHUNKS
    assert not marks_of(bucket_path)


def test_without_the_setting_nothing_is_noted_and_age_counts_from_the_upload(
    pushed: kvfs.Store, there: kvfs.Store, bucket_path: Path
) -> None:
    there.pull(there.namespace("chat", tiny(), "1a"), tokens_of(1, CHUNKS))
    assert not marks_of(bucket_path)


def test_what_a_host_reads_from_its_own_store_stays_in_the_bucket(pushed: kvfs.Store, bucket_path: Path) -> None:
    """A prompt that every host has is not fetched any more, and a new host would start without it."""
    age(bucket_path, 40 * DAY)
    ns, noted = pushed.namespace("chat", tiny(), "1a"), Uses()
    assert restored(ns, tokens_of(2, CHUNKS)) == seeded(2, CHUNKS * TINY_BYTES)
    pushed._shared.c.access_times.flush()
    uploader = Uploader(pushed._shared.c)
    with pushed.bucket() as bucket:
        for _ in range(3):
            assert not uploader.run(bucket, "all", lambda nbytes: None, noted).done.stored
        noted.flush(bucket, 2)
        done = upkeep.collect(bucket, time.time() - 30 * DAY, apply=True, by_use=True)
    assert (done.objects, done.used) == (3, 3)
    uploader.close()


def test_a_use_is_noted_once_a_day(pushed: kvfs.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    now, told = [1000.0], list[str]()
    monkeypatch.setattr(uses.time, "monotonic", lambda: now[0])
    with pushed.bucket() as bucket:
        bucket.objects.replace = lambda name, data: told.append(name)  # type: ignore[method-assign]
        noted = Uses()
        for _ in range(3):
            noted.note(["a", "b"])
            noted.flush(bucket, 2)
        assert sorted(told) == ["a", "b"]
        now[0] += DAY
        noted.note(["b"])
        noted.flush(bucket, 2)
        assert sorted(told) == ["a", "b", "b"]


def test_what_is_noted_is_bounded(pushed: kvfs.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uses, "DUE_MAX", 10)
    monkeypatch.setattr(uses, "NOTED_MAX", 5)
    told, noted = list[str](), Uses()
    with pushed.bucket() as bucket:
        bucket.objects.replace = lambda name, data: told.append(name)  # type: ignore[method-assign]
        noted.note(f"{i}" for i in range(100))
        assert noted.due == 10
        noted.flush(bucket, 2, most=4)
        assert (len(told), noted.due) == (4, 6)
        noted.flush(bucket, 2)
        assert len(told) == 10 and len(noted._noted) == 5


def test_a_bucket_that_takes_no_notes_costs_no_page(
    pushed: kvfs.Store, tmp_path: Path, bucket_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: object, name: str, data: object) -> None:
        raise RemoteError("403 AccessDenied")

    monkeypatch.setattr("kvfs.remote.directory_store.DirectoryStore.replace", refuse)
    with host(tmp_path, f"file://{bucket_path}") as there:
        got = there.pull(there.namespace("chat", tiny(), "1a"), tokens_of(1, CHUNKS))
        assert got.stored == CHUNKS and not got.failed and "not told" in got.problems[-1]


def test_a_bucket_process_notes_what_it_fetches(pushed: kvfs.Store, tmp_path: Path, bucket_path: Path) -> None:
    with host(tmp_path, f"file://{bucket_path}") as there:
        fetch = there.fetch(there.namespace("chat", tiny(), "1a"), tokens_of(1, CHUNKS))
        assert fetch is not None and fetch.wait(100) and fetch.pages == CHUNKS
        wait_until(lambda: len(marks_of(bucket_path)) == 3)


def test_the_command_shows_what_it_would_remove(pushed: kvfs.Store, tmp_path: Path, bucket_path: Path) -> None:
    age(bucket_path, 40 * DAY)
    with host(tmp_path, f"file://{bucket_path}") as there:
        there.pull(there.namespace("chat", tiny(), "1a"), tokens_of(1, CHUNKS))
    where = ("-C", str(tmp_path / "host"), "remote", "gc")
    done = called(*where, "--older-than", "30d")
    assert "would remove 3 objects" in done.stdout and "3 stay, 3 of them since they were used" in done.stdout
    assert json.loads(called(*where, "--older-than", "30d", "--json").stdout)["used"] == 3
    assert len(objects_of(bucket_path)) == 6
    refused = called(*where, "--older-than", "1d")
    assert refused.returncode == 2 and "at least 2d" in refused.stderr
    with pytest.raises(kvfs.ConfigError, match="at least 2d"):
        config_file.change(str(tmp_path / "host"), "remote.retention", "1d", Files())
    assert called(*where, "--older-than", "30d", "--apply").returncode == 0
    assert len(objects_of(bucket_path)) == 3


def test_a_note_of_an_encrypted_object_is_found_without_the_key(tmp_path: Path, bucket_path: Path) -> None:
    """Also while keys rotate: the object has a name of the old key."""
    pytest.importorskip("cryptography", reason="needs the extra remote: pip install 'kvfs[remote]'")
    from tests.remote.test_encryption import NEW, OLD, key_file, set_keys

    url = f"file://{bucket_path}"
    store_at(tmp_path / "here", url).close()
    set_keys(tmp_path / "here", key_file(tmp_path / "old", OLD))
    with kvfs.open(tmp_path / "here") as here:
        here.namespace("chat", tiny(), "1a").put(tokens_of(1, CHUNKS), seeded(1, CHUNKS * TINY_BYTES))
        here.push(["chat"])
    age(bucket_path, 40 * DAY)
    host(tmp_path, url).close()
    set_keys(tmp_path / "host", key_file(tmp_path / "both", NEW, OLD))
    with kvfs.open(tmp_path / "host") as there:
        assert there.pull(there.namespace("chat", tiny(), "1a"), tokens_of(1, CHUNKS)).stored == CHUNKS
        with there.bucket(keyless=True) as bucket:
            done = upkeep.collect(bucket, time.time() - 30 * DAY, apply=True, by_use=True)
        assert (done.objects, done.used) == (0, 3)


def test_the_removal_of_a_namespace_takes_its_notes_along(
    pushed: kvfs.Store, tmp_path: Path, bucket_path: Path, stored_pages: Callable[[], list[str]]
) -> None:
    with host(tmp_path, f"file://{bucket_path}") as there:
        there.pull(there.namespace("chat", tiny(), "1a"), tokens_of(1, CHUNKS))
    with pushed.bucket() as bucket:
        assert upkeep.remove(bucket, bucket.find("chat"), apply=True).objects == 6
    assert not stored_pages() and not marks_of(bucket_path)
